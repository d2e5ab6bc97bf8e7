"""Processes that prepare batches, and never see Ctrl-C."""

import os
from collections.abc import Iterator

import numpy as np

import support.signals  # noqa: F401  forked processes become helpers by it


def keep_arrays(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What workers send. Tensors would travel in shared memory, of which containers have little, through threads that
    print tracebacks when the trainer ends first; arrays go through a pipe."""
    return batch


def keep_to_one_core(_: int) -> None:
    # a tokenizer's threads do not survive a fork; and the number of processes is what the user wants to spend
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


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
        worker_init_fn=keep_to_one_core,
    )
    return iter(loader)
