"""Endless batches of sequences of similar length, from a stored split or a stream of text."""

import hashlib
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from arguments import DataArguments
from common.console import UserError
from text.collators import DataCollator, DataCollatorForWholeWordMask, take_rows
from text.instances import IGNORED_LABEL, KINDS, PAIRS, Sequences
from text.streams import TrainingDataset, stream_documents
from text.tokenization import join_parts
from text.workers import prepare_in_workers

logger = logging.getLogger("batches")

PREFETCH = 8  # keys per worker that are prepared ahead, because a step takes all its batches before its first pass


def data_seed(peer_id: str, seed: int, epoch: int = 0) -> int:
    """Return the 63-bit seed of a peer's data order, which is the same in every process, unlike that of hash().

    :param epoch: the peer's first epoch; after a resume, another order avoids a second read of the first batches
    """
    start = f":{epoch}" if epoch else ""
    return int.from_bytes(hashlib.sha256(f"{seed}:{peer_id}{start}".encode()).digest()[:8], "big") >> 1


def check_data_arguments(args: DataArguments, tokenizer, corpus: dict, positions: float) -> None:
    """Raise a UserError if the model cannot take sequences of this length, or the tokenizer cannot mask whole words.

    If --max_sequence_length exceeds the longest sequence, log a warning.

    :param positions: the model's max_position_embeddings
    """
    if KINDS[corpus.get("objective", PAIRS.name)].is_masked:
        DataCollatorForWholeWordMask(tokenizer, whole_word_mask=args.whole_word_mask)
    stored = corpus["seq_length"]
    most = args.max_sequence_length
    if min(stored, most or stored) > positions:
        source = "--streaming" if args.streaming else args.train_file or args.dataset_name or args.dataset_path
        cure = f"add --max_sequence_length {positions}"
        raise UserError(f"{source} has sequences of {stored} tokens, the model takes {positions}: {cure}")
    if most and most > positions:
        raise UserError(f"--max_sequence_length {most} is more than the model takes: give at most {positions}")
    if most and most > stored:
        logger.warning(f"no sequence has the {most} tokens of --max_sequence_length: the longest ones have {stored}")


def sequence_length_at(epoch: int, args: DataArguments) -> int | None:
    """Return the maximum number of tokens of a sequence at this epoch, the same on every peer; None: no maximum.

    It grows linearly from initial_sequence_length to max_sequence_length, rounded down to suit tensor cores.
    """
    if args.initial_sequence_length is None or epoch >= args.sequence_length_warmup_steps:
        return args.max_sequence_length
    grown = (args.max_sequence_length - args.initial_sequence_length) * epoch // args.sequence_length_warmup_steps
    return max(args.initial_sequence_length, (args.initial_sequence_length + grown) // 8 * 8)


def count_labels(batches: list[dict]) -> int:
    """Return the number of labels in batches."""
    return sum(int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches)


def choose_multiple(longest: int) -> int:
    """Return the multiple for the width of batches: 8 suits tensor cores, but pads short rows by up to a seventh."""
    return 8 if longest >= 128 else 1


class IndexedSplit:
    """The sequences of a split on disk: their columns, joined end to end as int64, and lengths, by row numbers."""

    def __init__(self, dataset, max_sequence_length: int | None):
        import pyarrow.compute

        self.columns = dataset.column_names
        self.dataset = dataset.with_format("arrow")
        self.lengths = np.concatenate(
            [pyarrow.compute.list_value_length(table["input_ids"]).to_numpy() for table in self.dataset.iter(65536)]
        )
        self.longest = int(min(self.lengths.max(), max_sequence_length or math.inf))

    def __getitem__(self, rows: np.ndarray) -> Sequences:
        table = self.dataset[rows.tolist()]
        flat = {}
        for name in self.columns:
            column = table[name].combine_chunks()
            flat[name] = (column if name == "sentence_order_label" else column.flatten()).to_numpy().astype(np.int64)
        return flat, self.lengths[rows]

    def order(self, batch_size: int, seed: int) -> Iterator[np.ndarray]:
        """Yield the row numbers of batches, endlessly, pass after pass."""
        # grouping by padded length leaves more rows to choose from, at the same amount of padding
        padded_lengths = -(-np.minimum(self.lengths, self.longest) // choose_multiple(self.longest))
        generator = np.random.default_rng(seed)
        while True:
            yield from group_by_length(padded_lengths, batch_size, generator)


def group_by_length(
    lengths: np.ndarray, batch_size: int, generator: np.random.Generator, keep_rest: bool = False
) -> list[np.ndarray]:
    """Shuffle rows, group them by length into batches, shuffle the batches, and return their row numbers.

    Rows beyond a multiple of batch_size are dropped; if there is less than one batch, rows repeat.

    :param keep_rest: whether to use each row exactly once instead, so that one batch may be shorter
    """
    order = generator.permutation(len(lengths))
    if not keep_rest:
        order = np.resize(order, max(len(order) // batch_size, 1) * batch_size)
    order = order[np.argsort(lengths[order], kind="stable")]
    cuts = np.arange(batch_size, len(order), batch_size)
    if rest := len(order) % batch_size:  # otherwise the shorter batch would always have the longest rows
        cuts[generator.integers(len(cuts) + 1) :] -= batch_size - rest
    batches = np.split(order, cuts)
    return [batches[number] for number in generator.permutation(len(batches))]


@dataclass
class BatchLoader:
    """Endless batches of a split, which num_workers processes read, or this process if there are none.

    `sequence_length`, which may change at any time, truncates the sequences of the next batches; None: no limit.
    """

    split: IndexedSplit
    collator: DataCollator
    batch_size: int
    seed: int
    num_workers: int
    sequence_length: int | None = None

    def __iter__(self) -> Iterator[dict]:
        order = self.split.order(self.batch_size, self.seed)
        for number, rows in enumerate(prepare_in_workers(self.split, order, self.num_workers, PREFETCH)):
            longest = min(self.sequence_length or self.split.longest, self.split.longest)
            yield self.collator.collate(*rows, np.random.default_rng([self.seed, number]), longest)


@dataclass
class StreamedBatches:
    """Endless batches of a TrainingDataset, which depend on its seed but not on num_workers.

    This process reads the text; the workers tokenize chunks of it in turn. Sequences fill a pool of `shuffle_buffer`
    (the first pools are smaller, for a quick start), and `group_by_length` divides the pool into batches. The next pool
    fills while these batches are taken.

    `state`, for JSON, is the position in the text at which the current pool begins, and the number of its batches
    taken. From there the same batches follow, once each. If batch size or shuffle_buffer have changed, the pool starts
    over instead; if a source was late, part of the pool may be lost or repeated. `sequence_length` is BatchLoader's.

    :param stop: an event that ends the iteration during a wait for data
    :param state: the state to continue from; None: start at the beginning
    """

    dataset: TrainingDataset
    collator: DataCollator
    batch_size: int
    num_workers: int
    stop: threading.Event | None
    state: dict | None

    def __post_init__(self):
        self.sequence_length = self.dataset.seq_length

    def __iter__(self) -> Iterator[dict]:
        dataset = self.dataset
        saved = self.state
        own = {"seed": dataset.seed, "batch_size": self.batch_size, "shuffle_buffer": dataset.shuffle_buffer}

        def hand_out() -> Iterator[tuple]:
            # DataLoader takes PREFETCH keys per worker while it starts; a long wait for text there would block Ctrl-C
            for _ in range(PREFETCH * self.num_workers):
                yield None, []
            yield from stream_documents(dataset.sources, dataset.seed, saved, self.stop)

        chunks = prepare_in_workers(dataset, hand_out(), self.num_workers, PREFETCH)

        def gather(pool: list[tuple], count: int) -> bool:
            """Fill the pool up to this many sequences; return False if the stream has ended before that."""
            while (is_short := sum(len(lengths) for *_, lengths in pool) < count) and (chunk := next(chunks, None)):
                if len(chunk[2]):
                    pool.append(chunk)
            return not is_short

        largest = max(dataset.shuffle_buffer, self.batch_size)
        size = min(4 * self.batch_size, largest)
        taken = 0
        if saved:
            size = max(saved["pool_size"], self.batch_size)
            taken = saved["taken"] if all(saved[name] == value for name, value in own.items()) else 0
        pool: list[tuple] = []  # of chunks: the state before each, its columns and lengths
        while gather(pool, size):
            begin = pool[0][0]
            columns, lengths = join_parts([part for _, *part in pool])
            seed = [dataset.seed, begin["documents"]]
            next_size = min(2 * size, largest)
            next_pool = []
            batches = group_by_length(lengths // 8, self.batch_size, np.random.default_rng(seed))
            for number in range(taken, len(batches)):
                if not gather(next_pool, next_size * (number + 1) // len(batches)):
                    return
                self.state = {**own, **begin, "pool_size": size, "taken": number + 1}
                longest = self.sequence_length
                generator = np.random.default_rng([*seed, number])
                yield self.collator.collate(*take_rows(columns, lengths, batches[number]), generator, longest)
            pool = next_pool
            size = next_size
            taken = 0
