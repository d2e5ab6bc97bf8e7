"""Signals, helper processes and the exit: STOP_SIGNALS work at any time and leave no process behind.

A signal handler that raises an exception could leave a lock held or a destructor unfinished. Handlers here do nothing.
A thread receives each signal at once, also while the main thread waits in native code, and acts on it.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from common.memory import settle_memory

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one if a terminal is closed
HELPER_TIMEOUT = 1.0  # seconds for helpers to end after SIGTERM
STOP_REQUESTED = threading.Event()  # set by STOP_SIGNALS; all waits for other peers end then
# Held by a thread that forks or must not be interrupted, and forever by the thread that ends this process.
LAST_ACT = threading.RLock()
#: functions to call at the exit of this process, also after a signal
CLEANUPS: list[Callable[[], object]] = []


def obey_signals(obey: Callable[[int], object], pause: float = 0.0) -> None:
    """Start a thread that calls `obey` with the number of each signal of STOP_SIGNALS. The main thread then pauses for
    some seconds, because the same signal may end its helpers."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while number := os.read(reader, 1)[0]:
            if number in STOP_SIGNALS:
                obey(number)

    threading.Thread(target=listen, name="obey signals", daemon=True).start()
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: time.sleep(pause))
    # Python writes the number of each handled signal here at once, in any thread
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if earlier != -1:
        os.write(earlier, b"\0")  # ends the thread of an earlier call
        os.close(earlier)


# --- helper processes -------------------------------------------------------------------------------------------------


def begin_fork() -> None:
    """Block signals, and the exit of this process, until `end_fork`."""
    LAST_ACT.acquire()
    # the child inherits this: until it is a helper, it would handle a signal as if it were its parent
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def end_fork() -> None:
    """Allow signals and the exit again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    LAST_ACT.release()


def init_helper_process() -> None:
    """Set up a forked process: ignore Ctrl-C, and exit once the parent has exited."""
    # A terminal sends Ctrl-C to the whole process group. The parent ends its helpers.
    os.setpgrp()
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # drops a signal that the group has just received
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_fork()
    settle_memory()
    exit_with_parent()


def exit_with_parent(parent: int | None = None) -> None:
    """Start a thread that ends this process and its helpers once its parent has ended.

    :param parent: the parent's id, if it may have ended before this call
    """
    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        terminate_helpers(find_helpers())
        os._exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


os.register_at_fork(before=begin_fork, after_in_parent=end_fork, after_in_child=init_helper_process)


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block signals during the start of a process without Python's fork, which Ctrl-C would otherwise end."""
    begin_fork()
    try:
        yield
    finally:
        end_fork()


def find_helpers(pid: int | None = None) -> list:
    """Return all descendants of this process, or of the process `pid`, as psutil's processes.

    torch's manager of shared memory is excluded: it exits after its last client, and clients that outlive it abort.
    """
    import psutil  # a slow import, not needed to parse the arguments

    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if child.name() != "torch_shm_manager"]


def terminate_helpers(helpers: list) -> None:
    """Send SIGTERM, and SIGKILL after HELPER_TIMEOUT."""
    import psutil

    for send in (psutil.Process.terminate, psutil.Process.kill):
        for helper in helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(helper)
                helper.resume()
        deadline = time.monotonic() + HELPER_TIMEOUT
        while (helpers := [helper for helper in helpers if is_alive(helper)]) and time.monotonic() < deadline:
            time.sleep(0.01)


def is_alive(process) -> bool:
    """Return whether a process of psutil runs. A container's init may reap orphans late or never, so zombies count
    as exited."""
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- the end ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def afterwards(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` at the end of the block, also if a signal ends this process before that."""
    CLEANUPS.append(clean_up)
    try:
        yield
    finally:
        CLEANUPS.remove(clean_up)
        clean_up()


def terminate_process_tree(code: int, helpers: list = ()) -> None:
    """End the helper processes, then this process, without delay."""
    LAST_ACT.acquire()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk, or a pipe whose reader has ended
            stream.flush()
    # other threads must not log errors about their missing helpers
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
    import psutil

    frozen = [*helpers]
    # a helper that is killed while it starts another process would leave that process behind
    while new := [helper for helper in find_helpers() if helper not in frozen]:
        for helper in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.suspend()
        frozen += new
    terminate_helpers(frozen)
    for clean_up in reversed(CLEANUPS):
        clean_up()
    # not sys.exit: threads of hivemind that wait for dead helpers would block it
    os._exit(code)
