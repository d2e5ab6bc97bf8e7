"""A train split in shards, each of which is downloaded while the previous one is read."""

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.console import UserError
from text.fetch import FetchedDataset, NoRoomError, fetch, locate_dataset, make_name

logger = logging.getLogger("shards")

RETRY_SECONDS = 30.0  # between two attempts to download a shard


class ShardedSplit:
    """A train split in shards, whose order depends on the seed alone: a late shard is awaited, not skipped."""

    def __init__(self, found: FetchedDataset, corpus: dict, columns: list[str]):
        self.shards, self.cache_dir, self.corpus, self.columns = found.shards, found.cache_dir, corpus, columns
        self.seed: int | None = None
        self.current: int | None = None

    def __len__(self) -> int:
        return self.corpus["instances"]["train"]

    def begin(self, seed: int) -> None:
        """Choose the order of shards and download the first one; raise a UserError if that fails."""
        self.seed = seed
        shard = self.shards[next(self.order())]
        logger.info(f"{len(self.shards)} shards of data; the first one is {shard.source}")
        fetch(shard.source, shard.sha256, self.cache_dir)

    def order(self) -> Iterator[int]:
        """Yield numbers of shards endlessly, in a different order in each pass."""
        number = 0
        while True:
            yield from map(int, np.random.default_rng([self.seed, number]).permutation(len(self.shards)))
            number += 1

    def visit(self, stop: threading.Event) -> Iterator[int]:
        """Yield numbers of downloaded shards endlessly, until `stop` is set during a wait for one."""

        def start(number: int) -> threading.Thread:
            thread = threading.Thread(target=self.download, args=(number, stop), daemon=True)
            thread.start()
            return thread

        order = self.order()
        number = next(order)
        thread = start(number)
        while True:
            next_line = time.monotonic() + 5
            while thread.is_alive() and not stop.is_set():
                thread.join(0.1)
                if thread.is_alive() and time.monotonic() > next_line:
                    next_line = time.monotonic() + 60
                    logger.warning(f"this peer has used all its data: waiting for {self.shards[number].source}")
            if thread.is_alive() or stop.is_set():
                return
            self.current, number = number, next(order)
            thread = start(number)
            yield self.current

    def find_folder(self, number: int) -> Path:
        """Return the folder in the cache of a shard, which may be missing."""
        return self.cache_dir / make_name(self.shards[number].source, self.shards[number].sha256)

    def download(self, number: int, stop: threading.Event) -> None:
        """Download a shard, and try again until it is there or `stop` is set; on a full disk, remove older shards."""
        shard = self.shards[number]
        while not stop.is_set():
            try:
                fetch(shard.source, shard.sha256, self.cache_dir, is_shown=False)
                return
            except UserError as e:
                if isinstance(e, NoRoomError) and self.remove_oldest():
                    continue
                logger.warning(f"{e}; trying again in {RETRY_SECONDS:g} s")
                stop.wait(RETRY_SECONDS)

    def remove_oldest(self) -> bool:
        """Remove the shard that trainers opened longest ago, except the current one; return False if there is none.

        Another trainer that reads it has opened its files, and downloads it again when it needs it again.
        """
        folders = [self.find_folder(number) for number in range(len(self.shards)) if number != self.current]
        for folder in sorted(filter(os.path.exists, folders), key=os.path.getmtime):
            removed = folder.with_suffix(".removed")
            with contextlib.suppress(OSError):  # it belongs to another user, or another trainer removes it
                shutil.rmtree(removed, ignore_errors=True)  # left by a killed process
                folder.rename(removed)
                logger.info(f"no room for the next shard: removing {folder}")
                shutil.rmtree(removed)
                return True
        return False

    def load(self, number: int, stop: threading.Event):
        """Return the instances of a shard as a memory-mapped Dataset; download it if another trainer has removed it."""
        from datasets import load_from_disk

        self.download(number, stop)
        folder = self.find_folder(number)
        with contextlib.suppress(OSError):  # the cache is read-only
            os.utime(folder)
        try:
            path, _ = locate_dataset(folder)
            corpus = json.loads((path / "corpus.json").read_text())
            shard = load_from_disk(str(path))["train"].select_columns(self.columns)
        except (OSError, UserError):
            if folder.exists() or stop.is_set():
                raise
            return self.load(number, stop)  # another trainer has removed it since
        if corpus["tokenizer_fingerprint"] != self.corpus["tokenizer_fingerprint"]:
            raise UserError(f"the shard in {folder} was made by another tokenizer than the others: tell its publisher")
        return shard
