"""A train split in shards, each of which is downloaded while the previous one is read."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from common.console import UserError
from text.fetch import FetchedDataset, NoRoomError, Shard, fetch, locate_dataset, make_name

logger = logging.getLogger("shards")

RETRY_SECONDS = 30.0  # between two attempts to download a shard


class ShardedSplit:
    """A train split in shards, whose order depends on the seed alone: a late shard is awaited, not skipped."""

    def __init__(self, found: FetchedDataset, corpus: dict, columns: list[str]):
        self.shards, self.cache_dir, self.corpus, self.columns = found.shards, found.cache_dir, corpus, columns
        self.seed: int | None = None

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

    def visit(self, stop: threading.Event) -> Iterator[Path]:
        """Yield folders of unpacked shards endlessly, until `stop` is set during a wait for one."""
        order = self.order()
        coming = ShardFetch(self, next(order), stop)
        while folder := coming.wait():
            current, coming = coming, ShardFetch(self, next(order), stop)
            yield folder
            if current.pinned:
                current.pinned.close()

    def load(self, folder: Path):
        """Return the instances of one shard as a memory-mapped Dataset."""
        from datasets import load_from_disk

        path, _ = locate_dataset(folder)
        corpus = json.loads((path / "corpus.json").read_text())
        if corpus["tokenizer_fingerprint"] != self.corpus["tokenizer_fingerprint"]:
            raise UserError(f"the shard in {folder} was made by another tokenizer than the others: tell its publisher")
        return load_from_disk(str(path))["train"].select_columns(self.columns)


class ShardFetch(threading.Thread):
    """A thread that downloads one shard while another one is read.

    After a failure it logs a warning and retries. If the disk is full, it removes shards that were read before, but
    not this one until `pinned` is closed.
    """

    def __init__(self, split: ShardedSplit, number: int, stop: threading.Event):
        super().__init__(daemon=True)
        self.split, self.shard, self.stop = split, split.shards[number], stop
        self.folder: Path | None = None
        self.start()

    def run(self) -> None:
        """Download the shard, and try again until it is there or the iteration stops."""
        cache_dir = self.split.cache_dir
        while self.folder is None and not self.stop.is_set():
            try:
                try:
                    folder = fetch(self.shard.source, self.shard.sha256, cache_dir, is_shown=False)
                    self.pinned = pin(folder)
                    self.folder = folder
                except NoRoomError:
                    if not evict_oldest(self.split.shards, cache_dir):
                        raise
            except FileNotFoundError:
                continue  # another trainer has removed this shard
            except (UserError, OSError) as e:
                logger.warning(f"{e}; trying again in {RETRY_SECONDS:g} s")
                self.stop.wait(RETRY_SECONDS)

    def wait(self) -> Path | None:
        """Wait for the shard and return its folder, or None if `stop` is set first."""
        next_line = time.monotonic() + 5
        while self.is_alive() and not self.stop.is_set():
            self.join(0.1)
            if self.is_alive() and time.monotonic() > next_line:
                next_line = time.monotonic() + 60
                logger.warning(f"this peer has used all its data: waiting for {self.shard.source}")
        return self.folder


def pin(folder: Path) -> IO | None:
    """Protect a folder of the cache from `evict_oldest` of any process, as long as the returned file is open.

    :returns: the open file; None for a folder of another user, who may remove it at any time
    :raises FileNotFoundError: the folder has just been removed
    """
    try:
        file = open(folder / ".in_use", "a")  # noqa: SIM115 (open until the caller closes it)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return None
        raise
    fcntl.flock(file, fcntl.LOCK_SH)
    if not folder.exists():
        raise FileNotFoundError(folder)
    os.utime(folder / ".in_use")
    return file


def evict_oldest(shards: list[Shard], cache_dir: Path) -> bool:
    """Remove the least recently read shard that is not pinned; return False if there is none."""
    folders = [cache_dir / make_name(shard.source, shard.sha256) for shard in shards]
    try:
        marks = [folder / ".in_use" for folder in folders if (folder / ".in_use").exists()]
        for mark in sorted(marks, key=lambda mark: mark.stat().st_mtime):
            # the shard is pinned, or belongs to another user
            with contextlib.suppress(BlockingIOError, PermissionError), open(mark, "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.info(f"no room for the next shard: removing {mark.parent}")
                removed = mark.parent.with_suffix(".removed")
                shutil.rmtree(removed, ignore_errors=True)  # left by a killed process
                mark.parent.rename(removed)
                shutil.rmtree(removed)
                return True
    except FileNotFoundError:  # another trainer has just made room
        return True
    return False
