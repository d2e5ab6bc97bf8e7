"""Shutdown of a swarm role together with its helper processes, and filters for their logs."""

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

from common.console import edge
from common.signals import begin_end, find_helpers, obey_signals, terminate_helpers, terminate_process_tree

logger = logging.getLogger("swarm")

STOPPING = multiprocessing.Value(ctypes.c_bool, False)  # shared with the helpers, whose logs are noise once it is set
STOP_REQUESTED = threading.Event()  # set by Ctrl-C and SIGTERM; all waits for other peers end then
CONFIRM_TIMEOUT = 10.0  # seconds; the first Ctrl-C has no visible effect at once, and a second one must be confirmed


def filter_hivemind_log(record: logging.LogRecord) -> bool:
    """Remove tracebacks of exceptions that hivemind has handled, and drop its logs of rounds and of the shutdown."""
    if not record.name.startswith(("hivemind", "asyncio")):
        return True
    if not os.environ.get("HIVEMIND_LOGLEVEL"):
        # Failed rounds and leaving peers are normal, but a traceback makes them look like a crash.
        record.exc_info = record.exc_text = None
        if record.name.startswith(("hivemind.averaging", "asyncio")):
            return False  # CollaborativeOptimizer reports the outcome of a round
    # A new identity is normal, as is a caller that breaks off. The optimizer reports failed rounds in the background.
    usual = "Generating new identity", "Exception while receiving", "Aborted StateAverager.step", "a round has failed"
    text = str(record.msg)
    is_expected = text.startswith(usual) or "Matchmaking._request_join_potential_leaders()" in text
    return not STOPPING.value and not is_expected


def quiet_hivemind_logs() -> None:
    """Hide hivemind's harmless tracebacks (note 37), in this process and in the helpers that it forks later."""
    for name in (None, "hivemind"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(filter_hivemind_log)
    show_unraisable, show = sys.unraisablehook, sys.excepthook
    # MPFuture.__del__ wakes event loops that are already closed.
    sys.unraisablehook = lambda unraisable: None if STOPPING.value else show_unraisable(unraisable)
    # If a helper stops while it fetches a tensor, multiprocessing's thread that serves the tensor calls this hook.
    sys.excepthook = lambda *error: None if STOPPING.value else show(*error)
    # hivemind moves the schedule to the epoch of a downloaded state before this process makes its first step.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    # The default number of data loader workers suits a machine with a GPU; on two cores torch warns about it.
    warnings.filterwarnings("ignore", message="This DataLoader will create")


def exit_if_process_dies(process: multiprocessing.Process, name: str) -> None:
    """Stop this process and its helpers when one helper dies, because callers would wait forever for its answer."""
    helpers = find_helpers(process.pid)  # once it is dead, its children have lost their parent

    def watch() -> None:
        wait_for_processes([process.sentinel])
        if not STOPPING.value:
            begin_end()
            logger.error(f"the {name} process died, this peer cannot continue (out of memory?)")
            terminate_process_tree(1, helpers)

    threading.Thread(target=watch, name=f"watch {name}", daemon=True).start()


@contextlib.contextmanager
def clean_end() -> Iterator[None]:
    """Run a role's main() and then exit, together with the helpers, also after an exception in any thread: with code 0
    after success, 1 after an exception, and 2 after a user error."""

    def exit_after_thread_failed(failure: threading.ExceptHookArgs) -> None:
        if not STOPPING.value:
            begin_end()
            traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
            terminate_process_tree(1)

    code = 0
    try:
        with edge():
            threading.excepthook = exit_after_thread_failed
            yield
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else (0 if e.code is None else 1)
    except BaseException:
        traceback.print_exc()
        code = 1
    terminate_process_tree(code)


def handle_stop_signals(unsaved: str | None = None) -> threading.Event:
    """Make SIGINT and SIGTERM set STOP_REQUESTED, and return that event. A second signal stops at once; if work is
    unsaved, which the log names, an early second Ctrl-C only asks to confirm."""
    start = None

    def request_stop(number: int) -> None:
        nonlocal start, unsaved
        STOP_REQUESTED.set()
        if start is None:
            start = time.monotonic()
            if unsaved:
                logger.info("stopping: saving; Ctrl-C again discards unsaved work")
        elif unsaved and number == signal.SIGINT and time.monotonic() < start + CONFIRM_TIMEOUT:
            logger.info(f"still stopping: Ctrl-C once more stops at once, and loses {unsaved}")
            start = -math.inf
        else:
            begin_end()
            if unsaved:
                logger.info(f"stopped at once; lost: {unsaved}")
            terminate_process_tree(130 if unsaved else 0)

    obey_signals(request_stop)
    return STOP_REQUESTED


def shut_down(dht, optimizer=None) -> None:
    """Leave the swarm and stop the helper processes, without the tracebacks of hivemind's own shutdown."""
    helpers = find_helpers()
    STOPPING.value = True
    if optimizer is not None:
        optimizer.shutdown()
    dht.shutdown()
    terminate_helpers(helpers)
