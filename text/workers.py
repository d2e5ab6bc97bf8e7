"""Processes that prepare batches, and never see Ctrl-C."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def hold_signals(*numbers: int):
    """For the start of worker processes: such a signal takes effect at the end, and in this process only.

    The forked processes do not see it unless they unblock it. A terminal sends Ctrl-C to all processes, but it is for
    this one to end the others; and Python swallows an exception that a signal handler raises while it forks.
    """
    held: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, lambda number, _: held.append(number)) for number in numbers}
    earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # inherited by what is forked
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in held[:1]:
            signal.raise_signal(number)


def keep_arrays(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What workers send. Tensors would travel in shared memory, of which containers have little, through threads that
    print tracebacks when the trainer ends first; arrays go through a pipe."""
    return batch


def start_worker(_: int) -> None:
    # torchrun sends SIGTERM to a trainer's whole process group, and torch takes a worker that dies for an error
    os.setpgrp()
    # a tokenizer's threads do not survive a fork; and the number of processes is what the user wants to spend
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.platform == "linux":
        # do not outlive a killed parent: a worker that ends by itself waits until somebody has taken its last batches
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        signal.sigtimedwait([signal.SIGTERM], 0)  # one that was sent to the group while this process was still in it
    # held while it was forked; by it Python ends workers that are left at exit, and then waits for them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def prepare_in_workers(prepared, keys, num_workers: int) -> Iterator:
    """prepared[key] for each of the keys, in their order, from num_workers processes, or from this one. Workers never
    see Ctrl-C: the trainer still needs batches, or a quiet end of the workers, while it shuts down.

    :raises RuntimeError: "DataLoader worker ...": one was killed
    """
    if not num_workers:
        return map(prepared.__getitem__, keys)
    from torch.utils.data import DataLoader

    loader = DataLoader(
        prepared,
        sampler=keys,
        batch_size=None,  # a key stands for a whole batch
        collate_fn=keep_arrays,
        num_workers=num_workers,
        multiprocessing_context="fork",
        worker_init_fn=start_worker,
    )
    with hold_signals(signal.SIGINT, signal.SIGTERM):
        return iter(loader)
