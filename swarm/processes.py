"""How a role of the swarm ends, its helper processes with it, and what they say of it."""

import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import wait as wait_for_processes

from support.console import edge
from support.signals import begin_end, find_helpers, obey_signals, terminate_helpers, terminate_process_tree

logger = logging.getLogger("swarm")

# Shared with the helper processes: once it is set, what they log is noise.
STOPPING = multiprocessing.Value(ctypes.c_bool, False)
# Set by Ctrl-C and SIGTERM: whoever waits for others waits no longer.
STOP_REQUESTED = threading.Event()
# Who presses Ctrl-C again so soon may only have seen nothing happen.
ASK_SECONDS = 10.0


def filter_hivemind_log(record: logging.LogRecord) -> bool:
    """Makes one line of each exception that hivemind has caught and handled, and drops what it logs of each round and
    while stopping."""
    if not record.name.startswith(("hivemind", "asyncio")):
        return True
    if not os.environ.get("HIVEMIND_LOGLEVEL"):
        # a round that fails, a peer that leaves: daily business, which a traceback makes look like a crash
        record.exc_info = record.exc_text = None
        if record.name.startswith(("hivemind.averaging", "asyncio")):
            return False  # CollaborativeOptimizer reports the outcome of a round
    # each peer without --identity_path has a new one; the others are a round that has failed in the background
    known = ("Generating new identity", "Aborted StateAverager.step", "a round has failed")
    text = str(record.msg)
    is_reported = text.startswith(known) or "Matchmaking._request_join_potential_leaders()" in text  # by the optimizer
    return not STOPPING.value and not is_reported


def quiet_hivemind_logs() -> None:
    """Hide hivemind's cosmetic tracebacks (note 37), in this process and in the helpers that it will fork."""
    for name in (None, "hivemind"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(filter_hivemind_log)
    # MPFuture.__del__ wakes event loops that are closed by then
    show_unraisable, show = sys.unraisablehook, sys.excepthook
    sys.unraisablehook = lambda unraisable: None if STOPPING.value else show_unraisable(unraisable)
    # a helper that ends while it fetches a tensor: multiprocessing's thread that serves it calls this hook
    sys.excepthook = lambda *error: None if STOPPING.value else show(*error)
    # hivemind brings the schedule to the epoch of a downloaded state before the first step of this process
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    # the default number of data loader workers suits a machine with a GPU; torch warns of it on two cores
    warnings.filterwarnings("ignore", message="This DataLoader will create")


def exit_if_process_dies(process: multiprocessing.Process, name: str) -> None:
    """End this process and its helpers when that helper dies: whoever waits for its answer would wait forever."""
    # a snapshot of what the helper itself has started: these are nobody's children once it is dead
    helpers = find_helpers(process.pid)

    def watch() -> None:
        wait_for_processes([process.sentinel])
        if not STOPPING.value:
            begin_end()
            logger.error(f"the {name} process died, this peer cannot continue (out of memory?)")
            terminate_process_tree(1, helpers)

    threading.Thread(target=watch, name=f"watch {name}", daemon=True).start()


@contextlib.contextmanager
def clean_end() -> Iterator[None]:
    """Run a role's main() in this: Ctrl-C and SIGTERM end it at once, until `handle_stop_signals`; an exception ends
    the helpers too.

    Ends the process: exit code 0 after a normal end, 1 after an exception, 2 after a user's error.
    """

    def end_after_thread_failed(failure: threading.ExceptHookArgs) -> None:
        if not STOPPING.value:
            begin_end()
            traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
            terminate_process_tree(1)

    code = 0
    try:
        with edge():
            threading.excepthook = end_after_thread_failed
            yield
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    terminate_process_tree(code)


def handle_stop_signals(unsaved: str | None = None) -> threading.Event:
    """From now on SIGINT and SIGTERM set this event, for the loop to look at; a second signal ends at once.

    :param unsaved: what ending at once loses: the first signal says so, and a Ctrl-C soon after it asks once more
    """
    start = None

    def request_stop(number: int) -> None:
        nonlocal start, unsaved
        STOP_REQUESTED.set()
        if start is None:
            start = time.monotonic()
            if unsaved:
                logger.info("stopping: saving; Ctrl-C again gives up what is not saved")
        elif unsaved and number == signal.SIGINT and time.monotonic() < start + ASK_SECONDS:
            logger.info(f"still stopping: Ctrl-C once more ends at once, and loses {unsaved}")
            start = -math.inf
        else:
            begin_end()
            if unsaved:
                logger.info(f"ended at once; lost: {unsaved}")
            terminate_process_tree(130 if unsaved else 0)

    obey_signals(request_stop)
    return STOP_REQUESTED


def shut_down(dht, optimizer=None) -> None:
    """Say goodbye to the swarm and end the helper processes, without the tracebacks of hivemind's own."""
    helpers = find_helpers()
    STOPPING.value = True
    if optimizer is not None:
        optimizer.shutdown()
    dht.shutdown()
    terminate_helpers(helpers)
