"""Signals, helper processes and the end of this one: Ctrl-C and SIGTERM are obeyed at any time, and leave no process.

A signal handler that raises may strike anywhere, and leaves a lock held or a destructor half done. Here handlers do
nothing. A thread hears of each signal at once, also while the main thread waits in native code, and acts on it.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
HELPER_TIMEOUT = 1.0  # seconds for helpers to end after SIGTERM
# Held by a thread that forks or must not be cut short, and for good by the thread that ends this process.
LAST_ACT = threading.RLock()
#: what is left to do, however this process ends
CLEANUPS: list[Callable[[], object]] = []


def obey_signals(obey: Callable[[int], object], pause: float = 0.0) -> None:
    """From now on, have a thread call this with the number of each SIGINT and SIGTERM.

    :param pause: seconds for which the main thread then stands still: what it waits for may end by the same signal
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while number := os.read(reader, 1)[0]:
            if number in STOP_SIGNALS:
                obey(number)

    threading.Thread(target=listen, name="obey signals", daemon=True).start()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: time.sleep(pause))
    # what Python has a handler for it writes here as soon as it comes, in whichever thread
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if earlier != -1:
        os.write(earlier, b"\0")  # ends the thread of an earlier call
        os.close(earlier)
    # blocked where another rank of this machine has started this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


# --- helper processes -------------------------------------------------------------------------------------------------


def begin_fork() -> None:
    LAST_ACT.acquire()
    # inherited: a signal before the new process has become a helper would be taken for one to its parent
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def end_fork() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    LAST_ACT.release()


def init_helper_process() -> None:
    """What each forked process does first: leave Ctrl-C to its parent, and end when the parent is gone."""
    # a terminal sends Ctrl-C to the whole process group, torchrun SIGTERM; it is for the parent to end its helpers
    os.setpgrp()
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # which drops one that was sent to the group just now
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_fork()
    # pages of the imports that this process shares with its parent: a garbage collection would write to all of them
    gc.freeze()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        terminate_helpers(find_helpers())
        os._exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


os.register_at_fork(before=begin_fork, after_in_parent=end_fork, after_in_child=init_helper_process)


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """For the start of a process by other means than Python's fork, which does not outlive a Ctrl-C at that moment."""
    begin_fork()
    try:
        yield
    finally:
        end_fork()


def find_helpers(pid: int | None = None) -> list:
    """All processes that this one, or the one given, has started, directly or not, as psutil's.

    Without torch's manager of shared memory: it ends with its last client, and clients that outlive it abort.
    """
    import psutil  # not before the arguments are read

    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if child.name() != "torch_shm_manager"]


def terminate_helpers(helpers: list) -> None:
    """SIGTERM, and SIGKILL after HELPER_TIMEOUT."""
    import psutil

    for send in (psutil.Process.terminate, psutil.Process.kill):
        for helper in helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(helper)
                helper.resume()
        _, helpers = psutil.wait_procs(helpers, timeout=HELPER_TIMEOUT)


# --- the end ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def afterwards(clean_up: Callable[[], object]) -> Iterator[None]:
    """Do this at the end of the block, also when a signal ends this process in the middle of it."""
    CLEANUPS.append(clean_up)
    try:
        yield
    finally:
        CLEANUPS.remove(clean_up)
        clean_up()


def begin_end() -> None:
    """Call it before the last words. It returns in one thread alone: whoever else would end this process, or fork
    another one, waits until it is over."""
    LAST_ACT.acquire()


def terminate_process_tree(code: int, helpers: list = ()) -> None:
    """End the helper processes, then this process, at once."""
    begin_end()
    sys.stdout.flush()
    sys.stderr.flush()
    # other threads find that their helpers are gone, and have nothing to say about it
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
    import psutil

    frozen = [*helpers]
    # a helper that dies just as it starts another process would leave that one behind
    while new := [helper for helper in find_helpers() if helper not in frozen]:
        for helper in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.suspend()
        frozen += new
    terminate_helpers(frozen)
    for clean_up in reversed(CLEANUPS):
        clean_up()
    # not sys.exit: threads of hivemind that wait for dead helpers would keep the interpreter from ending
    os._exit(code)
