"""Edit me: what the model reads. Corpora, sentence-order pairs, masking, batches.

text -> documents (lists of paragraphs) -> sentences -> ids -> pairs of segments, half of them swapped: that part is run
once, by tokenize_wikitext103.py. Dataset -> batches of similar length, masked anew each time: that part is run by every
trainer. With --streaming a trainer does both at once, see make_training_dataset. To look at one batch of a dataset:

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python -c "from data import *; tokenizer = load_tokenizer('data/tokenizer'); \
        dataset, corpus = load_tokenized_dataset('data/albert_tokenized_wikitext', tokenizer); \
        print(corpus, make_eval_batches(dataset['validation'], tokenizer, batch_size=2, max_samples=2)[0])"
"""

import collections
import contextlib
import hashlib
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from arguments import ModelArguments, StreamingArguments, stop_for_user
from fetch import Data, FetchError, NoRoomError, fetch, find_parts, hold, make_room

logger = logging.getLogger("data")

COLUMNS = ["input_ids", "token_type_ids", "special_tokens_mask", "sentence_order_label"]
RETRY_SECONDS = 30.0  # until the next try, when a shard could not be had
IGNORED_LABEL = -100  # what torch's cross_entropy leaves out by default

# ---------------------------------------------------------------- loading what tokenize_wikitext103.py wrote


def load_tokenizer(path: str | Path):
    """The tokenizer in a folder, with the special tokens that pretraining needs, or one line that names the cure."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        stop_for_user(f"no tokenizer in {path}: make one with python tokenize_wikitext103.py (--help shows how)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        reason = str(e).split("\n")[0]
        stop_for_user(f"{path} holds no readable tokenizer ({reason}): make one with python tokenize_wikitext103.py")
    return check_tokenizer(tokenizer, path)


def check_tokenizer(tokenizer, name):
    """Return the tokenizer, or end the process when it lacks what masking and sentence-order pairs need."""
    lacking = [
        token for token in ("cls", "sep", "mask", "pad", "unk") if getattr(tokenizer, f"{token}_token_id") is None
    ]
    if lacking or not tokenizer.is_fast:
        reason = f"no {lacking[0]} token" if lacking else "no tokenizer.json"
        stop_for_user(f"the tokenizer {name} has {reason}: take one of ALBERT or BERT, or --train_tokenizer")
    # transformers 5 leaves token_type_ids out for ALBERT, without which A and B look alike in fine-tuning
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def tokenizer_fingerprint(tokenizer) -> str:
    """sha256 of what defines a tokenizer: which id is which piece, the special ones, and how it treats a probe text
    (capitals, accents, quotes, digits, Cyrillic, Chinese). The same under any version of the libraries."""
    probe = (
        "``Déjà vu'', said MR. O'Neill\u2019s 2nd  friend\u2014Ёлка, йод\u0306, 3.14 \uff21 漢字 [MASK] unbelievably"
    )
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    special = {
        name: tokenizer.convert_tokens_to_ids(str(token)) for name, token in tokenizer.special_tokens_map.items()
    }
    definition = [vocabulary, sorted(special.items()), tokenizer(probe, verbose=False)["input_ids"]]
    return hashlib.sha256(json.dumps(definition).encode()).hexdigest()


def choose_tokenizer(found: Data, args: ModelArguments) -> str | Path:
    """Folder of the tokenizer: the one that came in the dataset's archive, unless another one was named."""
    if found.tokenizer is None or args.tokenizer_path != ModelArguments.tokenizer_path:
        return args.tokenizer_path
    return found.tokenizer


def load_tokenized_dataset(found: Data | str | Path, tokenizer) -> tuple:
    """What tokenize_wikitext103.py wrote: (its splits train and validation by name, the corpus.json as a dictionary).

    A missing or foreign folder, or one made by another tokenizer, ends the process with a line that names the cure.

    :param found: what fetch_data has found, or just a folder
    """
    from datasets import load_from_disk

    found = found if isinstance(found, Data) else Data(Path(found))
    path, names = found.dataset, ["validation"] if found.shards else ["train", "validation"]
    if not path.is_dir():
        stop_for_user(f"no dataset in {path}: make it with python tokenize_wikitext103.py --dataset_path {path}")
    try:
        corpus = json.loads((path / "corpus.json").read_text())
        dataset = load_from_disk(str(path))
        splits = {name: dataset[name].select_columns(COLUMNS) for name in names}
    except (OSError, ValueError, KeyError) as e:
        stop_for_user(
            f"{path} is not a dataset of tokenize_wikitext103.py ({type(e).__name__}: {str(e).splitlines()[0]}): "
            f"remove it, then run python tokenize_wikitext103.py --dataset_path {path}"
        )
    if corpus.get("tokenizer_fingerprint") != tokenizer_fingerprint(tokenizer):
        stop_for_user(
            f"{path} was made by another tokenizer than the one in {tokenizer.name_or_path}: give the --tokenizer_path "
            f"of that run, or tokenize again with --tokenizer {tokenizer.name_or_path}"
        )
    if found.shards:
        splits["train"] = ShardedSplit(found, corpus)
    return splits, corpus


class ShardedSplit:
    """A train split in shards, each fetched while the one before is read. State: the order, and the fetch under way.

    The order of shards depends on the seed alone: a shard that is late is waited for, not passed over.
    """

    def __init__(self, found: Data, corpus: dict):
        self.shards, self.cache_dir, self.corpus = found.shards, found.cache_dir, corpus
        self.seed: int | None = None

    def __len__(self) -> int:
        return self.corpus["instances"]["train"]

    def begin(self, seed: int) -> None:
        """Choose the order of shards and fetch the first one; ends the process where that cannot be had."""
        self.seed = seed
        shard = self.shards[next(self.order())]
        logger.info(f"{len(self.shards)} shards of data; the first one is {shard.source}")
        try:
            fetch(shard.source, shard.sha256, self.cache_dir)
        except FetchError as e:
            stop_for_user(str(e))

    def order(self) -> Iterator[int]:
        """Endless numbers of shards, pass after pass, each in an order of its own."""
        number = 0
        while True:
            yield from map(int, np.random.default_rng([self.seed, number]).permutation(len(self.shards)))
            number += 1

    def visit(self, stop: threading.Event) -> Iterator[Path]:
        """Endless folders of unpacked shards; ends when `stop` is set while one is waited for."""
        order = self.order()
        coming = ShardFetch(self, next(order), stop)
        while folder := coming.wait():
            current, coming = coming, ShardFetch(self, next(order), stop)
            yield folder
            if current.held:
                current.held.close()

    def load(self, folder: Path):
        """The instances of one shard, a Dataset of COLUMNS that is mapped into memory, not read."""
        from datasets import load_from_disk

        path, _ = find_parts(folder)
        corpus = json.loads((path / "corpus.json").read_text())
        if corpus["tokenizer_fingerprint"] != self.corpus["tokenizer_fingerprint"]:
            stop_for_user(f"the shard in {folder} was made by another tokenizer than the others: tell who hosts it")
        return load_from_disk(str(path))["train"].select_columns(COLUMNS)


class ShardFetch(threading.Thread):
    """The fetch of one shard while another one is read. A failure is a warning and another try later; where the disk is
    full, shards go that were read before, but not this one until `held` is closed."""

    def __init__(self, split: ShardedSplit, number: int, stop: threading.Event):
        super().__init__(daemon=True)
        self.split, self.shard, self.stop = split, split.shards[number], stop
        self.folder: Path | None = None
        self.start()

    def run(self) -> None:
        cache_dir = self.split.cache_dir
        while self.folder is None and not self.stop.is_set():
            try:
                try:
                    folder = fetch(self.shard.source, self.shard.sha256, cache_dir, math.inf, is_shown=False)
                    self.held = hold(folder)
                    self.folder = folder
                except NoRoomError:
                    if not make_room(self.split.shards, cache_dir):
                        raise
            except FileNotFoundError:
                continue  # another trainer has made room meanwhile
            except (FetchError, OSError) as e:
                logger.warning(f"{e}; trying again in {RETRY_SECONDS:g} s")
                self.stop.wait(RETRY_SECONDS)

    def wait(self) -> Path | None:
        """The folder of the shard, or None when `stop` is set first."""
        next_line = time.monotonic() + 5
        while self.is_alive() and not self.stop.is_set():
            self.join(0.1)
            if self.is_alive() and time.monotonic() > next_line:
                next_line = time.monotonic() + 60
                logger.warning(f"the data of this peer is used up: waiting for {self.shard.source}")
        return self.folder


# ---------------------------------------------------------------- batches


def data_seed(peer_id: str, seed: int, epoch: int = 0) -> int:
    """Seed of one peer's data order, 63 bits: the same in every process, unlike hash().

    :param epoch: where the peer begins: one that goes on from a checkpoint does not read the first batches once more
    """
    start = f":{epoch}" if epoch else ""
    return int.from_bytes(hashlib.sha256(f"{seed}:{peer_id}{start}".encode()).digest()[:8], "big") >> 1


class MaskedBatches:
    """Random access to batches of a split: (row numbers, seed of the masks) -> batch. State: the open Arrow table."""

    def __init__(self, dataset, tokenizer, mlm_probability: float):
        import pyarrow.compute

        self.dataset = dataset.select_columns(COLUMNS).with_format("arrow")
        self.lengths = np.concatenate(
            [pyarrow.compute.list_value_length(table["input_ids"]).to_numpy() for table in self.dataset.iter(65536)]
        )
        # tensor cores like widths that are multiples of 8, but on short rows that would be up to a seventh of padding
        self.multiple = 8 if self.lengths.max() >= 128 else 1
        # batches are grouped by these: more rows to choose from for a batch, and no more padding
        self.padded_lengths = -(-self.lengths // self.multiple)
        self.mlm_probability = mlm_probability
        self.pad_id, self.mask_id = tokenizer.pad_token_id, tokenizer.mask_token_id
        self.ordinary_ids = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)

    def read_rows(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Columns of the rows, joined end to end as int64, and the rows' lengths."""
        table = self.dataset[rows.tolist()]
        columns = {name: table[name].combine_chunks() for name in COLUMNS}
        flat = {
            name: (column.flatten() if name != "sentence_order_label" else column).to_numpy().astype(np.int64)
            for name, column in columns.items()
        }
        return flat, self.lengths[rows]

    def mask_tokens(self, flat: dict[str, np.ndarray], generator: np.random.Generator) -> dict[str, np.ndarray]:
        """BERT's masking (arxiv.org/abs/1810.04805, section 3.1): of the chosen tokens 80 % become [MASK], 10 % a
        random token, 10 % stay; special tokens are never chosen. At least one token is, or the loss had no value."""
        input_ids, maskable = flat["input_ids"].copy(), flat["special_tokens_mask"] == 0
        is_chosen = (generator.random(len(input_ids)) < self.mlm_probability) & maskable
        if not is_chosen.any() and maskable.any():
            is_chosen[generator.choice(np.flatnonzero(maskable))] = True
        labels = np.where(is_chosen, input_ids, IGNORED_LABEL)
        chosen = np.flatnonzero(is_chosen)
        fate = generator.random(len(chosen))
        input_ids[chosen[fate < 0.8]] = self.mask_id
        replaced = chosen[fate >= 0.9]
        input_ids[replaced] = generator.choice(self.ordinary_ids, len(replaced))
        return {**flat, "input_ids": input_ids, "labels": labels}

    def pad(self, flat: dict[str, np.ndarray], lengths: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [rows, width] of int64; width is the longest row's length, rounded up to self.multiple, but never
        beyond the longest row of the split: a model may have no position for it."""
        width = min(-(-lengths.max() // self.multiple) * self.multiple, self.lengths.max())
        is_filled = np.arange(width) < lengths[:, None]
        batch = {"attention_mask": is_filled.astype(np.int64), "sentence_order_label": flat["sentence_order_label"]}
        for name, value in (("input_ids", self.pad_id), ("token_type_ids", 0), ("labels", IGNORED_LABEL)):
            batch[name] = np.full(is_filled.shape, value, dtype=np.int64)
            batch[name][is_filled] = flat[name]
        return batch

    def __getitem__(self, key: tuple[np.ndarray, list[int]]) -> dict[str, np.ndarray]:
        rows, mask_seed = key
        flat, lengths = self.read_rows(rows)
        return self.pad(self.mask_tokens(flat, np.random.default_rng(mask_seed)), lengths)


class LengthGroupedOrder:
    """Endless row numbers of batches, pass after pass: in each, rows are shuffled, grouped by length, and the groups
    shuffled again. Rows beyond a multiple of batch_size sit out one pass; a split smaller than one batch repeats."""

    def __init__(self, padded_lengths: np.ndarray, batch_size: int, seed: int):
        self.padded_lengths, self.batch_size, self.seed = padded_lengths, batch_size, seed

    def __iter__(self) -> Iterator[tuple[np.ndarray, list[int]]]:
        generator = np.random.default_rng(self.seed)
        number = 0
        while True:
            for rows in self.make_pass(generator):
                yield rows, [self.seed, number]
                number += 1

    def make_pass(self, generator: np.random.Generator) -> np.ndarray:
        """Row numbers [batches, batch_size] of one pass."""
        order = generator.permutation(len(self.padded_lengths))
        order = np.resize(order, max(len(order) // self.batch_size, 1) * self.batch_size)
        order = order[np.argsort(self.padded_lengths[order], kind="stable")]
        return generator.permutation(order.reshape(-1, self.batch_size))


class ShardedBatches:
    """MaskedBatches of a ShardedSplit: (folder of the shard, row numbers, seed of the masks) -> batch. State: the shard
    that is open; each process opens it for itself."""

    def __init__(self, split: ShardedSplit, tokenizer, mlm_probability: float):
        self.split, self.options = split, (tokenizer, mlm_probability)
        self.folder: Path | None = None

    def open(self, folder: Path) -> MaskedBatches:
        if folder != self.folder:
            self.folder, self.batches = folder, MaskedBatches(self.split.load(folder), *self.options)
        return self.batches

    def __getitem__(self, key: tuple[Path, np.ndarray, list[int]]) -> dict[str, np.ndarray]:
        folder, rows, mask_seed = key
        return self.open(folder)[rows, mask_seed]


class ShardedOrder:
    """Endless keys of ShardedBatches: a LengthGroupedOrder's pass over one shard, then the next."""

    def __init__(self, batches: ShardedBatches, batch_size: int, seed: int, stop: threading.Event):
        self.batches, self.batch_size, self.seed, self.stop = batches, batch_size, seed, stop

    def __iter__(self) -> Iterator[tuple[Path, np.ndarray, list[int]]]:
        number = 0
        for visit, folder in enumerate(self.batches.split.visit(self.stop)):
            order = LengthGroupedOrder(self.batches.open(folder).padded_lengths, self.batch_size, self.seed)
            for rows in order.make_pass(np.random.default_rng([self.seed, visit])):
                yield folder, rows, [self.seed, number]
                number += 1


@contextlib.contextmanager
def hold_signals(*numbers: int):
    """For the start of worker processes: such a signal takes effect at the end, and in this process only.

    The forked processes never see it. A terminal sends Ctrl-C to all processes, but it is for this one to end the
    others; and Python swallows an exception that a signal handler raises while it forks.
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


def to_tensors(batch: dict[str, np.ndarray]) -> dict:
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}


def keep_arrays(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What workers send. Tensors would travel in shared memory, of which containers have little, through threads that
    print tracebacks when the trainer ends first; arrays go through a pipe."""
    return batch


class UninterruptedLoader:
    """A DataLoader of arrays, as tensors, whose workers never see Ctrl-C: the trainer still needs batches, or a quiet
    end of the workers, while it shuts down."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        # not SIGTERM: by it Python ends workers that are left at exit, and then waits for them
        with hold_signals(signal.SIGINT):
            batches = iter(self.loader)
        return map(to_tensors, batches)


def make_train_batches(
    dataset,
    tokenizer,
    *,
    batch_size: int,
    seed: int,
    mlm_probability: float = 0.15,
    num_workers: int = 0,
    stop: threading.Event | None = None,
    state: dict | None = None,
):
    """Endless iterable of training batches from one split; the same for the same seed, whatever num_workers.

    Each is a dictionary of int64 tensors: input_ids, attention_mask, token_type_ids, labels (-100 where nothing is to
    be predicted), all [batch_size, longest row], and sentence_order_label [batch_size] (1: swapped).

    :param dataset: a Dataset; or a ShardedSplit: its order of shards is begun with this seed unless it has begun; or
        what make_training_dataset has returned
    :param stop: ends the iteration when it is set while data is waited for
    :param state: of StreamedBatches: where to go on, and with which seed
    """
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(dataset, IterableDataset):
        dataset.seed = state["seed"] if state else seed
        collator = InstanceCollator(dataset, mlm_probability)
        return StreamedBatches(
            dataset, collator, batch_size=batch_size, num_workers=num_workers, stop=stop, state=state
        )
    if isinstance(dataset, ShardedSplit):
        if dataset.seed is None:
            dataset.begin(seed)
        batches = ShardedBatches(dataset, tokenizer, mlm_probability)
        order = ShardedOrder(batches, batch_size, seed, stop or threading.Event())
    else:
        batches = MaskedBatches(dataset, tokenizer, mlm_probability)
        order = LengthGroupedOrder(batches.padded_lengths, batch_size, seed)
    loader = DataLoader(
        batches,
        sampler=order,
        batch_size=None,  # an item of the "dataset" is a whole batch
        collate_fn=keep_arrays,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    return UninterruptedLoader(loader)


def make_eval_batches(
    dataset, tokenizer, *, batch_size: int, mlm_probability: float = 0.15, max_samples: int | None = None
) -> list[dict]:
    """The batches (see make_train_batches) of one split, or of max_samples random rows of it, in order of length.

    Rows and masks are the same at each call and on each peer, whatever the batch size: losses can be compared.
    """
    batches = MaskedBatches(dataset, tokenizer, mlm_probability)
    generator = np.random.default_rng(0)
    rows = generator.permutation(len(batches.lengths))[:max_samples]
    rows = rows[np.argsort(batches.lengths[rows], kind="stable")]
    flat, lengths = batches.read_rows(rows)
    flat = batches.mask_tokens(flat, generator)
    ends = np.cumsum(lengths)
    result = []
    for start in range(0, len(rows), batch_size):
        stop = min(start + batch_size, len(rows))
        tokens = slice(ends[start] - lengths[start], ends[stop - 1])
        part = {name: values[tokens] for name, values in flat.items() if name != "sentence_order_label"}
        part["sentence_order_label"] = flat["sentence_order_label"][start:stop]
        result.append(to_tensors(batches.pad(part, lengths[start:stop])))
    return result


# ---------------------------------------------------------------- text that is tokenized while it is trained on


def make_training_dataset(
    tokenizer,
    *,
    sources: str | Path = "configs/sources.json",
    max_sequence_length: int = 512,
    seed: int = 0,
    shuffle_buffer: int = 8192,
    sentence_splitter: str = "auto",
):
    """Endless instances of a mixture of sources (see streaming.py), a torch IterableDataset of dictionaries:
    input_ids, token_type_ids, special_tokens_mask (arrays of the same length) and sentence_order_label (0 or 1).

    Sources that give nothing at their beginning end the process with one line. Edit me: documents may be chosen or
    changed in ChunkTokenizer.

    :param max_sequence_length: in tokens, special ones included
    :param seed: of the order, the mixture, the cuts and the swaps; make_train_batches gives it the peer's own
    :param shuffle_buffer: instances that are shuffled together
    :param sentence_splitter: auto, punkt or razdel, for sources that name none
    """
    from streaming import TrainingDataset, read_sources

    found = read_sources(sources, sentence_splitter)
    for source in found:
        if problem := source.find_problem(seed):
            stop_for_user(f"--sources {sources}: {source.name} gives no text: {problem}")
    return TrainingDataset(found, tokenizer, max_sequence_length, seed, shuffle_buffer)


def make_streamed_split(tokenizer, model, args: StreamingArguments):
    """The train split of --streaming, its instances as long as the model has positions, or 512 tokens."""
    return make_training_dataset(
        tokenizer,
        sources=args.sources,
        max_sequence_length=min(512, model.config.max_position_embeddings),
        shuffle_buffer=args.shuffle_buffer,
        sentence_splitter=args.sentence_splitter,
    )


def load_stream_state(path: Path) -> dict | None:
    """What the callback has written: see StreamedBatches. None where there is nothing, or nothing to be read."""
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text())
        count, *_ = [state[name] for name in ("documents", "positions", "seed", "pool_size", "taken")]
        logger.info(f"{path}: going on behind document {count:,}")
        return state
    except (OSError, ValueError, KeyError, TypeError) as e:
        logger.warning(f"{path} is damaged ({type(e).__name__}): the text is read from a new beginning")
        return None


class InstanceCollator(MaskedBatches):
    """A list of instances to a batch, see make_train_batches."""

    def __init__(self, dataset, mlm_probability: float):
        tokenizer = dataset.tokenizer
        self.lengths = np.array([dataset.max_sequence_length])
        self.multiple = 8 if dataset.max_sequence_length >= 128 else 1
        self.mlm_probability = mlm_probability
        self.pad_id, self.mask_id = tokenizer.pad_token_id, tokenizer.mask_token_id
        self.ordinary_ids = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        self.generator = np.random.default_rng(dataset.seed)

    def __call__(self, instances: list[dict]) -> dict:
        flat = {name: np.concatenate([row[name] for row in instances]).astype(np.int64) for name in COLUMNS[:3]}
        flat["sentence_order_label"] = np.array([row["sentence_order_label"] for row in instances])
        lengths = np.array([len(row["input_ids"]) for row in instances])
        return to_tensors(self.pad(self.mask_tokens(flat, self.generator), lengths))


class StreamedBatches:
    """Endless batches of a TrainingDataset. This process reads, its workers tokenize what it hands out, in turn: the
    same for the same seed, whatever num_workers.

    Instances gather in a pool. When it has `shuffle_buffer` of them (the first pools are smaller, not to keep a start
    waiting), they are shuffled, grouped by length and the groups shuffled again; those beyond a multiple of batch_size
    sit out. While its batches are taken the next pool gathers. State: where the documents of the present pool begin,
    and how many of its batches have been taken. From there the same batches follow, masks apart: nothing is lost,
    nothing comes twice. Where batch size, sequence length or shuffle_buffer are others, the pool begins anew instead;
    where a source was late, part of the pool may be lost or come twice.

    :param collator: a list of instances -> a batch
    :param stop: ends the iteration when it is set while data is waited for
    :param state: where to go on; None: at the beginning
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
        """Tokens of an instance at most, from the next batch on. What was prepared for another length is given up."""
        self.sequence_length = length

    def state(self) -> dict | None:
        """For JSON: what to begin with to go on behind the batch that was taken last; None before the first."""
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
        from torch.utils.data import DataLoader

        from streaming import ChunkTokenizer, DocumentStream, list_instances

        dataset, saved = self.dataset, self.progress
        stream = DocumentStream(dataset.sources, dataset.seed, saved, self.stop)
        begins: collections.deque = collections.deque()  # the stream's state before each chunk that is on its way

        def hand_out():
            # DataLoader asks for so many while its workers start: text may be long in coming, and Ctrl-C must wait then
            for _ in range(2 * self.num_workers):
                begins.append(None)
                yield self.sequence_length, []
            for begin, chunk in stream:
                begins.append(begin)
                yield self.sequence_length, chunk

        loader = DataLoader(
            ChunkTokenizer(dataset.sources, dataset.tokenizer, dataset.seed),
            sampler=hand_out(),
            batch_size=None,
            collate_fn=keep_arrays,
            num_workers=self.num_workers,
            multiprocessing_context="fork" if self.num_workers else None,
        )
        with hold_signals(signal.SIGINT):  # as UninterruptedLoader
            chunks = iter(loader)

        def gather(pool: dict, count: int) -> bool:
            """Whether the pool has so many instances now; False when there are no more."""
            while len(pool["instances"]) < count and (result := next(chunks, None)):
                length, columns, lengths = result
                begin = begins.popleft()
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
            batches = self.group(pool)
            next_pool = {"begin": None, "instances": []}
            for number in range(taken, len(batches)):
                if not gather(next_pool, next_size * (number + 1) // len(batches)):
                    return
                batch = self.collator([pool["instances"][row] for row in batches[number]])
                self.progress = {**description, **pool["begin"], "pool_size": size, "taken": number + 1}
                yield batch
                if self.describe() != description:
                    next_pool, next_size = {"begin": None, "instances": []}, min(smallest, largest)
                    break
            pool, size, taken = next_pool, next_size, 0

    def group(self, pool: dict) -> np.ndarray:
        """Numbers [batches, batch_size] of the pool's instances."""
        lengths = np.array([len(instance["input_ids"]) for instance in pool["instances"]])
        generator = np.random.default_rng([self.dataset.seed, pool["begin"]["documents"]])
        order = generator.permutation(len(lengths))[: len(lengths) // self.batch_size * self.batch_size]
        order = order[np.argsort(lengths[order] // 8, kind="stable")]
        return generator.permutation(order.reshape(-1, self.batch_size))
