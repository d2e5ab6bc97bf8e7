"""Worker processes that prepare batches. They ignore Ctrl-C, because the trainer uses batches while it shuts down."""

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator

import common.signals  # noqa: F401  makes forked processes ignore Ctrl-C


def prepare_in_workers(prepared, keys, num_workers: int, prefetch: int = 2) -> Iterator:
    """Yield prepared[key] for each of the keys, in their order, from num_workers processes; 0: from this process.

    :param prefetch: the keys per worker that are prepared ahead
    :raises RuntimeError: a worker was killed; the text begins with "DataLoader worker"
    """
    if not num_workers:
        return map(prepared.__getitem__, keys)
    from torch.utils.data import DataLoader

    # the default number suits a machine with a GPU; on two cores, torch warns about it
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    loader = DataLoader(
        prepared,
        sampler=keys,
        batch_size=None,  # a key stands for a whole batch
        collate_fn=lambda batch: batch,  # arrays: tensors need scarce shared memory, and threads, noisy at exit
        num_workers=num_workers,
        prefetch_factor=prefetch,
        multiprocessing_context="fork",
        # a tokenizer's threads do not survive a fork, and the number of processes is the user's limit
        worker_init_fn=lambda _: os.environ.update(TOKENIZERS_PARALLELISM="false"),
    )
    batches = iter(loader)
    # torch's handler would raise the error anywhere, such as in an optimizer step; `next` raises it within 5 s
    with contextlib.suppress(ValueError):  # in another thread, torch sets none
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return batches
