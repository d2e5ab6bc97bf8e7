"""The batches of a trainer on their way to the device, the waiting time for them, and the position in a stream."""

import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from arguments import DataArguments, TrainerArguments
from common.files import read_json, write_file
from common.signals import STOP_REQUESTED
from experiment.data import make_train_batches
from text.batches import sequence_length_at

logger = logging.getLogger("batches")


class TrainingFeed:
    """An iterator over batches that stops on a stop signal and measures how long its caller waits for batches.

    Batches for a GPU are in pinned memory, so that the host need not wait for their copy. `position` is the file for
    the position in a stream.
    """

    def __init__(
        self,
        batches: Iterable[dict[str, torch.Tensor]],
        device: torch.device,
        args: DataArguments | None = None,
        position: Path | None = None,
    ):
        self.source = batches
        self.batches = iter(batches)
        self.is_pinned = device.type == "cuda"
        self.args = args
        self.position = position
        self.epoch: int | None = None
        #: seconds, and tokens without padding, since the last `take_counts`
        self.waited = 0.0
        self.tokens = 0

    def __iter__(self) -> "TrainingFeed":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if STOP_REQUESTED.is_set():
            raise StopIteration
        start = time.monotonic()
        try:
            batch = next(self.batches)
        finally:
            self.waited += time.monotonic() - start
        self.tokens += int(batch["attention_mask"].sum())
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self.is_pinned else batch

    def take_counts(self) -> dict[str, float]:
        """Return the seconds of waiting, and the number of tokens without padding, since the last call."""
        counts = {"waited": self.waited, "tokens": self.tokens}
        self.waited = 0.0
        self.tokens = 0
        return counts

    def begin_epoch(self, epoch: int) -> None:
        """Set the sequence length of this epoch, and save the position for a restart with any checkpoint."""
        if epoch != self.epoch:
            self.epoch = epoch
            length = sequence_length_at(epoch, self.args)
            if length != self.source.sequence_length:
                logger.info(f"sequences of up to {length} tokens from now on")
            self.source.sequence_length = length
            self.save_position()

    def save_position(self) -> None:
        """Save the position in a stream at which a restart continues."""
        if self.position and (state := self.source.state):
            write_file(self.position, json.dumps(state) + "\n")


def make_feed(
    split, tokenizer, data_args: DataArguments, args: TrainerArguments, *, seed: int, rank: int, device: torch.device
) -> TrainingFeed:
    """Return the batches of the train split for this rank. A stream continues after the batches already read."""
    name = f"stream_{rank}.json" if rank else "stream.json"
    position = Path(args.output_dir) / name if data_args.streaming else None
    if state := read_json(position) if position and args.resume_from_checkpoint != "none" else None:
        logger.info(f"{position}: continuing after document {state['documents']:,}")
    sizes = dict(batch_size=args.per_device_train_batch_size, num_workers=args.dataloader_num_workers)
    batches = make_train_batches(split, tokenizer, data_args, seed=seed, stop=STOP_REQUESTED, state=state, **sizes)
    return TrainingFeed(batches, device, data_args, position)
