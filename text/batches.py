"""Endless batches of similar length: of a stored split, of its shards, or of a stream of text."""

import functools
import hashlib
import itertools
import json
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from arguments import DataArguments
from support.console import UserError
from text.collators import DataCollator, DataCollatorForWholeWordMask, to_tensors
from text.documents import count_within
from text.instances import KINDS, PAIRS
from text.shards import ShardedSplit
from text.streams import ChunkTokenizer, list_instances, stream_documents
from text.workers import prepare_in_workers

logger = logging.getLogger("batches")

#: (columns of the instances, what the width of batches is a multiple of) -> collator
CollatorMaker = Callable[[list[str], int], DataCollator]


def data_seed(peer_id: str, seed: int, epoch: int = 0) -> int:
    """Seed of one peer's data order, 63 bits: the same in every process, unlike hash().

    :param epoch: where the peer begins: one that continues from a checkpoint does not read the first batches once more
    """
    start = f":{epoch}" if epoch else ""
    return int.from_bytes(hashlib.sha256(f"{seed}:{peer_id}{start}".encode()).digest()[:8], "big") >> 1


def check_data_arguments(args: DataArguments, tokenizer, corpus: dict, positions: float) -> None:
    """A UserError where instances are longer than the model takes, or cannot be masked as asked for; a line in the log
    where --max_sequence_length asks for longer ones than there are.

    :param positions: max_position_embeddings of the model
    """
    if KINDS[corpus.get("objective", PAIRS.name)].is_masked:
        DataCollatorForWholeWordMask(tokenizer, whole_word_mask=args.whole_word_mask)
    stored, most = corpus["seq_length"], args.max_sequence_length
    if min(stored, most or stored) > positions:
        source = "--streaming" if args.streaming else args.train_file or args.dataset_name or args.dataset_path
        raise UserError(
            f"{source} gives instances of {stored} tokens, the model takes {positions}: add --max_sequence_length "
            f"{positions}"
        )
    if most and most > positions:
        raise UserError(f"--max_sequence_length {most} is more than the model takes: give at most {positions}")
    if most and most > stored:
        logger.warning(f"no instance has the {most} tokens of --max_sequence_length: the longest ones have {stored}")


def sequence_length_at(epoch: int, args: DataArguments) -> int | None:
    """Tokens of an instance, at most, at this epoch of the swarm; the same on every peer. None: as in the dataset.

    Linear from initial_sequence_length to max_sequence_length, rounded down to what tensor cores like.
    """
    if args.initial_sequence_length is None or epoch >= args.sequence_length_warmup_steps:
        return args.max_sequence_length
    grown = (args.max_sequence_length - args.initial_sequence_length) * epoch // args.sequence_length_warmup_steps
    multiple = args.pad_to_multiple_of or 8
    return max(args.initial_sequence_length, (args.initial_sequence_length + grown) // multiple * multiple)


def choose_multiple(args: DataArguments, longest: int) -> int:
    """What the width of batches is a multiple of: tensor cores like 8, but on short rows that would be up to a seventh
    of padding."""
    return args.pad_to_multiple_of or (8 if longest >= 128 else 1)


def cut_rows(
    flat: dict[str, np.ndarray], lengths: np.ndarray, sequence_length: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns and lengths of rows, joined end to end, with no row longer than sequence_length.

    [CLS] A [SEP] B [SEP] stays that: each segment keeps its first tokens and its [SEP], and the longer one gives first.
    With the end of A kept, text would continue from A to B in unswapped pairs only, which would tell them apart. A
    block keeps its first tokens, and its [SEP] if it has one.
    """
    if lengths.max() <= sequence_length:
        return flat, lengths
    if "token_type_ids" not in flat:
        kept = np.minimum(lengths, sequence_length)
        positions = count_within(lengths)
        last = int("special_tokens_mask" in flat)
        is_kept = (positions < (kept - last).repeat(lengths)) | (last * (positions + 1) == lengths.repeat(lengths))
        return {name: values[is_kept] for name, values in flat.items()}, kept
    second = np.add.reduceat(flat["token_type_ids"], np.cumsum(lengths) - lengths)
    first = lengths - second
    kept_second = np.minimum(second, np.maximum(sequence_length // 2, sequence_length - first))
    kept_first = np.minimum(first, sequence_length - kept_second)
    sizes = np.stack([first, second], axis=1).ravel()
    kept_sizes = np.stack([kept_first, kept_second], axis=1).ravel()
    positions = count_within(sizes)
    is_kept = (positions < (kept_sizes - 1).repeat(sizes)) | (positions == (sizes - 1).repeat(sizes))
    flat = {name: values if name == "sentence_order_label" else values[is_kept] for name, values in flat.items()}
    return flat, kept_first + kept_second


class IndexedBatches:
    """Random access to batches of a split: (row numbers, seed of the masks, sequence length or None) -> batch. State:
    the open Arrow table."""

    def __init__(self, dataset, make_collator: CollatorMaker, args: DataArguments):
        import pyarrow.compute

        self.columns = dataset.column_names
        self.dataset = dataset.with_format("arrow")
        self.lengths = np.concatenate(
            [pyarrow.compute.list_value_length(table["input_ids"]).to_numpy() for table in self.dataset.iter(65536)]
        )
        self.longest = int(min(self.lengths.max(), args.max_sequence_length or math.inf))
        multiple = choose_multiple(args, self.longest)
        # batches are grouped by these: more rows to choose from for a batch, and no more padding
        self.padded_lengths = -(-np.minimum(self.lengths, self.longest) // multiple)
        self.collator = make_collator(self.columns, multiple)

    def read_rows(self, rows: np.ndarray, sequence_length: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Columns of the rows, joined end to end as int64, and the rows' lengths."""
        table = self.dataset[rows.tolist()]
        columns = {name: table[name].combine_chunks() for name in self.columns}
        flat = {
            name: (column.flatten() if name != "sentence_order_label" else column).to_numpy().astype(np.int64)
            for name, column in columns.items()
        }
        return cut_rows(flat, self.lengths[rows], sequence_length)

    def order(self, batch_size: int, seed: int) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Endless keys, but the sequence length, pass after pass."""
        generator, number = np.random.default_rng(seed), itertools.count()
        while True:
            for rows in group_by_length(self.padded_lengths, batch_size, generator):
                yield rows, [seed, next(number)]

    def __getitem__(self, key: tuple[np.ndarray, list[int], int | None]) -> dict[str, np.ndarray]:
        rows, mask_seed, sequence_length = key
        longest = min(sequence_length or self.longest, self.longest)
        flat, lengths = self.read_rows(rows, longest)
        return self.collator.collate(flat, lengths, np.random.default_rng(mask_seed), longest)


def list_batches(batches: IndexedBatches, batch_size: int, max_samples: int | None = None) -> list[dict]:
    """All batches of a split, or those of max_samples random rows of it, in order of length.

    Rows and masks are the same at each call and on each peer, whatever the batch size: losses can be compared.
    """
    generator = np.random.default_rng(0)
    rows = generator.permutation(len(batches.lengths))[:max_samples]
    rows = rows[np.argsort(batches.lengths[rows], kind="stable")]
    flat, lengths = batches.read_rows(rows, batches.longest)
    flat = batches.collator.add_labels(flat, lengths, generator)
    cuts = np.arange(batch_size, len(rows), batch_size)
    ends = np.cumsum(lengths)[cuts - 1]
    parts = {name: np.split(flat[name], cuts if name == "sentence_order_label" else ends) for name in flat}
    return [
        to_tensors(batches.collator.pad({name: parts[name][number] for name in parts}, part, batches.longest))
        for number, part in enumerate(np.split(lengths, cuts))
    ]


def group_by_length(
    lengths: np.ndarray, batch_size: int, generator: np.random.Generator, keep_rest: bool = False
) -> list[np.ndarray]:
    """Batches as row numbers: shuffled, grouped by length, and the groups shuffled again. Rows beyond a multiple of
    batch_size sit out; fewer than one batch repeat.

    :param keep_rest: have each row once instead, in a shorter batch where it must be
    """
    order = generator.permutation(len(lengths))
    if not keep_rest:
        order = np.resize(order, max(len(order) // batch_size, 1) * batch_size)
    order = order[np.argsort(lengths[order], kind="stable")]
    cuts = np.arange(batch_size, len(order), batch_size)
    if rest := len(order) % batch_size:  # the longest rows are not always those of the shorter batch
        cuts[generator.integers(len(cuts) + 1) :] -= batch_size - rest
    batches = np.split(order, cuts)
    return [batches[number] for number in generator.permutation(len(batches))]


class ShardedBatches:
    """As IndexedBatches, of a ShardedSplit: the keys have the shard's folder in front. Each process opens one shard at
    a time for itself.

    :param stop: ends the wait for a shard
    """

    def __init__(self, split: ShardedSplit, make_collator: CollatorMaker, args: DataArguments, stop: threading.Event):
        self.split, self.stop = split, stop
        self.open = functools.lru_cache(1)(lambda folder: IndexedBatches(split.load(folder), make_collator, args))

    def order(self, batch_size: int, seed: int) -> Iterator[tuple[Path, np.ndarray, list[int]]]:
        """Endless keys, but the sequence length: a pass over one shard, then the next."""
        number = itertools.count()
        for visit, folder in enumerate(self.split.visit(self.stop)):
            lengths, generator = self.open(folder).padded_lengths, np.random.default_rng([seed, visit])
            for rows in group_by_length(lengths, batch_size, generator):
                yield folder, rows, [seed, next(number)]

    def __getitem__(self, key: tuple[Path, np.ndarray, list[int], int | None]) -> dict[str, np.ndarray]:
        folder, *rest = key
        return self.open(folder)[tuple(rest)]


class BatchLoader:
    """Endless batches as tensors, prepared by num_workers processes, or by this one."""

    def __init__(self, batches: IndexedBatches | ShardedBatches, batch_size: int, seed: int, num_workers: int):
        self.batches, self.batch_size, self.seed, self.num_workers = batches, batch_size, seed, num_workers
        self.sequence_length: int | None = None

    def set_sequence_length(self, sequence_length: int | None) -> None:
        """From the next batch on, truncate instances to this many tokens (None: do not)."""
        if sequence_length != self.sequence_length:
            logger.info(
                f"sequences of {f'up to {sequence_length} tokens' if sequence_length else 'any length'} from now on"
            )
        self.sequence_length = sequence_length

    def __iter__(self) -> Iterator[dict]:
        under_way = deque()  # keys whose batches nobody has taken yet

        def give_keys() -> Iterator[tuple]:
            for key in self.batches.order(self.batch_size, self.seed):
                under_way.append((*key, self.sequence_length))
                yield under_way[-1]

        for batch in prepare_in_workers(self.batches, give_keys(), self.num_workers):
            *key, sequence_length = under_way.popleft()
            if sequence_length != self.sequence_length:  # prepared before it was set: made anew
                batch = self.batches[(*key, self.sequence_length)]
            yield to_tensors(batch)


class StreamedBatches:
    """Endless batches of a TrainingDataset. This process reads, its workers tokenize what it hands out, in turn: the
    same for the same seed, whatever num_workers.

    Instances gather in a pool. When it has `shuffle_buffer` of them (the first pools are smaller, not to keep a start
    waiting), its batches are those of `group_by_length`, and the next pool gathers while they are taken. State: where
    the documents of the present pool begin, and how many of its batches have been taken. From there the same batches
    follow, once each. Where batch size, sequence length or shuffle_buffer are others, the pool starts over instead;
    where a source was late, part of the pool may be lost or come twice.

    :param collator: (instances, seed of the masks, sequence length) -> a batch
    :param stop: ends the iteration when it is set while data is waited for
    :param state: where to continue; None: at the beginning
    """

    def __init__(
        self,
        dataset,
        collator,
        *,
        batch_size: int,
        num_workers: int = 0,
        stop: threading.Event | None = None,
        state: dict | None = None,
    ):
        self.dataset, self.collator, self.batch_size, self.num_workers = dataset, collator, batch_size, num_workers
        self.stop, self.progress = stop, state
        self.sequence_length = dataset.max_sequence_length

    def set_sequence_length(self, length: int) -> None:
        """As BatchLoader's. What was prepared for another length is given up."""
        self.sequence_length = length

    def state(self) -> dict | None:
        """For JSON: what to begin with to continue after the batch that was taken last; None before the first."""
        return self.progress

    def describe(self) -> dict:
        """What the batches of a pool depend on, beside its documents."""
        return {
            "seed": self.dataset.seed,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "shuffle_buffer": self.dataset.shuffle_buffer,
        }

    def __iter__(self) -> Iterator[dict]:
        dataset, saved = self.dataset, self.progress

        def hand_out() -> Iterator[tuple]:
            # DataLoader asks for so many while its workers start: text may be long in coming, and Ctrl-C must wait then
            for _ in range(2 * self.num_workers):
                yield self.sequence_length, None, []
            for begin, chunk in stream_documents(dataset.sources, dataset.seed, saved, self.stop):
                yield self.sequence_length, begin, chunk

        tokenizer = ChunkTokenizer(dataset.sources, dataset.tokenizer, dataset.seed, dataset.kind)
        chunks = prepare_in_workers(tokenizer, hand_out(), self.num_workers)

        def gather(pool: dict, count: int) -> bool:
            """Whether the pool has this many instances now; False when there are no more."""
            while len(pool["instances"]) < count and (result := next(chunks, None)):
                length, begin, columns, lengths = result
                if length == self.sequence_length and len(lengths):
                    pool["begin"] = pool["begin"] or begin
                    pool["instances"] += list_instances(columns, lengths)
            return len(pool["instances"]) >= count

        smallest, largest = 4 * self.batch_size, max(dataset.shuffle_buffer, self.batch_size)
        size, taken = min(smallest, largest), 0
        if saved:
            size = max(saved["pool_size"], self.batch_size)
            taken = saved["taken"] * all(saved[name] == value for name, value in self.describe().items())
        pool = {"begin": None, "instances": []}
        while gather(pool, size):
            description, next_size = self.describe(), min(2 * size, largest)
            seed = [dataset.seed, pool["begin"]["documents"]]
            lengths = np.array([len(instance["input_ids"]) for instance in pool["instances"]])
            batches = group_by_length(lengths // 8, self.batch_size, np.random.default_rng(seed))
            next_pool = {"begin": None, "instances": []}
            for number in range(taken, len(batches)):
                if not gather(next_pool, next_size * (number + 1) // len(batches)):
                    return
                instances = [pool["instances"][row] for row in batches[number]]
                batch = self.collator(instances, [*seed, number], self.sequence_length)
                self.progress = {**description, **pool["begin"], "pool_size": size, "taken": number + 1}
                yield batch
                if self.describe() != description:
                    next_pool, next_size = {"begin": None, "instances": []}, min(smallest, largest)
                    break
            pool, size, taken = next_pool, next_size, 0


def load_stream_state(path: Path) -> dict | None:
    """What the callback has written: see StreamedBatches. None where there is nothing, or nothing to be read."""
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text())
        count, *_ = [state[name] for name in ("documents", "positions", "seed", "pool_size", "taken")]
        logger.info(f"{path}: continuing after document {count:,}")
        return state
    except (OSError, ValueError, KeyError, TypeError) as e:
        logger.warning(f"{path} is damaged ({type(e).__name__}): starting over with the text")
        return None
