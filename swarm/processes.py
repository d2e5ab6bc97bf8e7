"""Helper processes: the end of a peer together with them, and filters for their logs."""

import ctypes
import logging
import multiprocessing
import os
import sys
import threading
import warnings
from multiprocessing.connection import wait as wait_for_processes

from common.signals import LAST_ACT, find_helpers, terminate_helpers, terminate_process_tree
from swarm import logger

STOPPING = multiprocessing.Value(ctypes.c_bool, False)  # shared with the helpers, whose logs are noise once it is set


def filter_hivemind_log(record: logging.LogRecord) -> bool:
    """Remove tracebacks of exceptions that hivemind has handled, and drop its logs of rounds and of the shutdown."""
    if not record.name.startswith(("hivemind", "asyncio")):
        return True
    if not os.environ.get("HIVEMIND_LOGLEVEL"):
        # Failed rounds and leaving peers are normal, but a traceback makes them look like a crash.
        record.exc_info = record.exc_text = None
        if record.name.startswith(("hivemind.averaging", "asyncio")):
            return False  # CollaborativeOptimizer reports the outcome of a round
    # A new identity is normal, as is a caller that breaks off. The optimizer reports failed rounds in the background,
    # and `Swarm.join` tests later, and waits longer, whether others reach this peer.
    usual = "Generating new identity", "Exception while receiving", "Aborted StateAverager.step", "a round has failed"
    usual += "Matchmaking._request_join_potential_leaders()", "can't access this node", "Checking that identity"
    return not (STOPPING.value or any(text in str(record.msg) for text in usual))


def quiet_hivemind_logs() -> None:
    """Hide hivemind's harmless tracebacks (note 37), in this process and in the helpers that it forks later."""
    for name in (None, "hivemind"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(filter_hivemind_log)
    show_unraisable = sys.unraisablehook
    show = sys.excepthook
    # MPFuture.__del__ wakes event loops that are already closed.
    sys.unraisablehook = lambda unraisable: None if STOPPING.value else show_unraisable(unraisable)
    # If a helper stops while it fetches a tensor, multiprocessing's thread that serves the tensor calls this hook.
    sys.excepthook = lambda *error: None if STOPPING.value else show(*error)
    # hivemind moves the schedule to the epoch of a downloaded state before this process makes its first step.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def exit_if_process_dies(process: multiprocessing.Process, name: str) -> None:
    """Stop this process and its helpers when one helper dies, because callers would wait forever for its answer."""
    helpers = find_helpers(process.pid)  # once it is dead, its children have lost their parent

    def watch() -> None:
        wait_for_processes([process.sentinel])
        if not STOPPING.value:
            LAST_ACT.acquire()
            logger.error(f"the {name} process died, this peer cannot continue (out of memory?)")
            terminate_process_tree(1, helpers)

    threading.Thread(target=watch, name=f"watch {name}", daemon=True).start()


def shut_down(dht, optimizer=None) -> None:
    """Leave the swarm and stop the helper processes, without the tracebacks of hivemind's own shutdown."""
    helpers = find_helpers()
    STOPPING.value = True
    threading.excepthook = lambda _: None  # threads of hivemind fail without their helpers
    if optimizer is not None:
        optimizer.shutdown()
    dht.shutdown()
    terminate_helpers(helpers)
