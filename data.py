"""Edit me: what the model reads. Corpora, sentence-order pairs or full blocks, masking, batches.

text -> documents (lists of paragraphs) -> ids -> pairs of segments, half of them swapped, or full blocks: that part is
run once, by tokenize_wikitext103.py. Dataset -> batches of similar length, masked anew each time: that part is run by
every trainer. The columns of a dataset tell which kind of batches is made of it, see COLUMNS_OF. With --streaming a
trainer does both at once, see make_training_dataset. To see what the model will see:

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python data.py

prints some masked batches as text, and how much of them is masked, and how; it takes a trainer's flags that concern
data, such as --dataset_path, --tokenizer_path, --no_whole_word_mask, --max_sequence_length.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from arguments import DEFAULT_TOKENIZER_PATH, DataArguments, ModelArguments, parse_arguments
from fetch import Data, FetchError, NoRoomError, fetch, fetch_data, find_parts, hold, hub, make_room
from support.console import UserError, edge, first_line

logger = logging.getLogger("data")

COLUMNS = ["input_ids", "token_type_ids", "special_tokens_mask", "sentence_order_label"]
#: by objective, what an instance is: special_tokens_mask calls for masking, sentence_order_label for a swapped pair
COLUMNS_OF = {"mlm_sop": COLUMNS, "mlm": ["input_ids", "special_tokens_mask"], "clm": ["input_ids"]}
# a text that tokenizers treat in ways of their own
PROBE = "``Déjà vu'', said MR. O'Neill\u2019s 2nd  friend\u2014Ёлка, йод\u0306, 3.14 \uff21 漢字 [MASK] unbelievably"
RETRY_SECONDS = 30.0  # until the next try, when a shard could not be had
IGNORED_LABEL = -100  # what torch's cross_entropy leaves out by default

# ---------------------------------------------------------------- loading what tokenize_wikitext103.py wrote


def load_tokenizer(path: str | Path, objective: str = "mlm_sop"):
    """The tokenizer in a folder, or of that name on the Hub, with the special tokens that the objective needs, or one
    line that names the cure."""
    from transformers import AutoTokenizer

    is_folder = Path(path).is_dir()
    is_default = str(path) == DEFAULT_TOKENIZER_PATH
    if not is_folder and (is_default or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(path))):
        raise UserError(f"no tokenizer in {path}: make one with python tokenize_wikitext103.py (--help shows how)")
    try:
        with contextlib.nullcontext() if is_folder else hub(f"the tokenizer {path}", "a folder that exists"):
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=is_folder)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"{path} holds no readable tokenizer ({first_line(e)}): make one with python tokenize_wikitext103.py"
        ) from e
    return check_tokenizer(tokenizer, path, objective)


def check_tokenizer(tokenizer, name, objective: str = "mlm_sop"):
    """Return the tokenizer, or end the process when it lacks what the objective needs: masking and pairs their special
    tokens, full text (clm) an end token, which then also pads where no other one does."""
    if objective == "clm":
        tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    needed = ("eos", "pad") if objective == "clm" else ("cls", "sep", "mask", "pad", "unk")
    lacking = [token for token in needed if getattr(tokenizer, f"{token}_token_id") is None]
    if lacking or not tokenizer.is_fast:
        reason = f"no {lacking[0]} token" if lacking else "no tokenizer.json"
        cure = "one of GPT-2 or Llama" if objective == "clm" else "one of ALBERT or BERT"
        raise UserError(
            f"the tokenizer {name} has {reason}: take {cure}, or --train_tokenizer (--objective {objective})"
        )
    if objective == "clm" and tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]:
        # training texts end with it alone
        logger.warning(f"the tokenizer {name} ends each prompt too: generate text with add_special_tokens=False")
    if (last := max(tokenizer.get_vocab().values())) >= len(tokenizer):
        raise UserError(f"the tokenizer {name} numbers {len(tokenizer)} pieces up to {last}: take one without gaps")
    if objective == "mlm_sop":
        # transformers 5 leaves token_type_ids out for ALBERT, without which A and B look alike in fine-tuning
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def tokenizer_fingerprint(tokenizer) -> str:
    """sha256 of what defines a tokenizer: which id is which piece, the special ones, and how it treats a probe text
    (capitals, accents, quotes, digits, Cyrillic, Chinese). The same under any version of the libraries."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    special = {
        name: tokenizer.convert_tokens_to_ids(str(token)) for name, token in tokenizer.special_tokens_map.items()
    }
    definition = [vocabulary, sorted(special.items()), tokenizer(PROBE, verbose=False)["input_ids"]]
    return hashlib.sha256(json.dumps(definition).encode()).hexdigest()


def choose_tokenizer(found: Data, args: ModelArguments) -> str | Path:
    """Folder of the tokenizer: the one that came in the dataset's archive, unless another one was named, or a
    pretrained model, whose weights know its own."""
    is_named = args.model_name_or_path or args.tokenizer_path != DEFAULT_TOKENIZER_PATH
    return args.tokenizer_path if found.tokenizer is None or is_named else found.tokenizer


def find_data(model_args: ModelArguments, args: DataArguments, objective: str) -> Data:
    """Where the tokenized dataset is: fetched, or tokenized here and now if the flags name text."""
    if not (args.train_file or args.dataset_name):
        return fetch_data(args.dataset_path, args.dataset_sha256, args.dataset_cache_dir)
    from tokenize_wikitext103 import tokenize_for_trainer

    return Data(tokenize_for_trainer(load_tokenizer(model_args.tokenizer_path, objective), model_args, args, objective))


def load_tokenized_dataset(found: Data | str | Path, tokenizer, objective: str | None = None) -> tuple:
    """What tokenize_wikitext103.py wrote: (its splits train and validation by name, the corpus.json as a dictionary).

    A missing or foreign folder, or one made by another tokenizer or for another objective, ends the process with a line
    that names the cure. For mlm, pairs of segments will do.

    :param found: what fetch_data has found, or just a folder
    :param objective: whose columns to give; None: those that are there
    """
    from datasets import load_from_disk

    found = found if isinstance(found, Data) else Data(Path(found))
    path, names = found.dataset, ["validation"] if found.shards else ["train", "validation"]
    if not path.is_dir():
        raise UserError(f"no dataset in {path}: make it with python tokenize_wikitext103.py --dataset_path {path}")
    try:
        corpus = json.loads((path / "corpus.json").read_text())
        dataset, made_for = load_from_disk(str(path)), corpus.get("objective", "mlm_sop")
        objective = objective or made_for
        columns = [name for name in COLUMNS_OF[made_for] if objective != "mlm" or name != "sentence_order_label"]
        splits = {name: dataset[name].select_columns(columns) for name in names}
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"{path} is not a dataset of tokenize_wikitext103.py ({type(e).__name__}: {first_line(e)}): "
            f"remove it, then run python tokenize_wikitext103.py --dataset_path {path}"
        ) from e
    if corpus.get("tokenizer_fingerprint") != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{path} was made by another tokenizer than the one in {tokenizer.name_or_path}: give the --tokenizer_path "
            f"of that run, or tokenize again with --tokenizer {tokenizer.name_or_path}"
        )
    if objective != made_for and (objective, made_for) != ("mlm", "mlm_sop"):
        raise UserError(
            f"{path} was made for --objective {made_for}, and the model learns by {objective}: tokenize again with "
            f"--objective {objective}, or train another model"
        )
    if found.shards:
        splits["train"] = ShardedSplit(found, corpus, columns)
    return splits, corpus


class ShardedSplit:
    """A train split in shards, each fetched while the one before is read. State: the order, and the fetch under way.

    The order of shards depends on the seed alone: a shard that is late is waited for, not passed over.
    """

    def __init__(self, found: Data, corpus: dict, columns: list[str]):
        self.shards, self.cache_dir, self.corpus, self.columns = found.shards, found.cache_dir, corpus, columns
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
            raise UserError(str(e)) from e

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
        """The instances of one shard, a Dataset of its columns that is mapped into memory, not read."""
        from datasets import load_from_disk

        path, _ = find_parts(folder)
        corpus = json.loads((path / "corpus.json").read_text())
        if corpus["tokenizer_fingerprint"] != self.corpus["tokenizer_fingerprint"]:
            raise UserError(f"the shard in {folder} was made by another tokenizer than the others: tell who hosts it")
        return load_from_disk(str(path))["train"].select_columns(self.columns)


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


def check_data_arguments(args: DataArguments, tokenizer, corpus: dict, positions: float) -> None:
    """End the process where instances are longer than the model takes, or cannot be masked as asked for; a line in the
    log where --max_sequence_length asks for longer ones than there are.

    :param positions: max_position_embeddings of the model
    """
    if corpus.get("objective") != "clm":
        DataCollatorForWholeWordMask(tokenizer, whole_word_mask=args.whole_word_mask)
    stored, most = corpus["seq_length"], args.max_sequence_length
    if min(stored, most or stored) > positions:
        source = "--streaming" if args.streaming else args.train_file or args.dataset_name or args.dataset_path
        raise UserError(
            f"{source} gives instances of {stored} tokens, the model takes {positions}: add --max_sequence_length "
            f"{positions}"
        )
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
    With the end of A kept, text would go on from A to B in unswapped pairs alone, which would tell them apart. A block
    keeps its first tokens, and its [SEP] if it has one.
    """
    if lengths.max() <= sequence_length:
        return flat, lengths
    if "token_type_ids" not in flat:
        kept = np.minimum(lengths, sequence_length)
        positions = np.arange(len(flat["input_ids"])) - (np.cumsum(lengths) - lengths).repeat(lengths)
        last = int("special_tokens_mask" in flat)
        is_kept = (positions < (kept - last).repeat(lengths)) | (last * (positions + 1) == lengths.repeat(lengths))
        return {name: values[is_kept] for name, values in flat.items()}, kept
    second = np.add.reduceat(flat["token_type_ids"], np.cumsum(lengths) - lengths)
    first = lengths - second
    kept_second = np.minimum(second, np.maximum(sequence_length // 2, sequence_length - first))
    kept_first = np.minimum(first, sequence_length - kept_second)
    sizes = np.stack([first, second], axis=1).ravel()
    kept_sizes = np.stack([kept_first, kept_second], axis=1).ravel()
    positions = np.arange(len(flat["input_ids"])) - (np.cumsum(sizes) - sizes).repeat(sizes)
    is_kept = (positions < (kept_sizes - 1).repeat(sizes)) | (positions == (sizes - 1).repeat(sizes))
    flat = {name: values if name == "sentence_order_label" else values[is_kept] for name, values in flat.items()}
    return flat, kept_first + kept_second


def find_word_beginnings(tokenizer) -> np.ndarray | None:
    """Which ids begin a word, bool [vocabulary]: in SentencePiece those that begin with "▁", in byte-level BPE those
    with "Ġ", a space, in WordPiece those that do not begin with "##". None where the tokenizer's pieces do not tell."""
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if prefix := getattr(getattr(backend, "model", None), "continuing_subword_prefix", None):
        return np.array([not piece.startswith(prefix) for piece in pieces])
    for mark in "▁Ġ":
        begins_word = np.array([piece.startswith(mark) for piece in pieces])
        # a vocabulary may hold the sign itself, or marks in a language without spaces: that is no way to find words
        if begins_word.mean() > 0.01:
            return begins_word
    return None


def number_words(begins_word: np.ndarray, is_ordinary: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """(number of each token's word, from 1 on, or 0 for special tokens; number of words), of rows joined end to end.

    :param begins_word: what find_word_beginnings says of each token; what follows a special token begins one as well
    """
    begins_word = begins_word.copy()
    begins_word[1:] |= ~is_ordinary[:-1]
    begins_word[np.cumsum(lengths) - lengths] = True
    words = np.cumsum(begins_word & is_ordinary)
    return words * is_ordinary, int(words[-1])


class DataCollator:
    """From instances to a padded batch with labels: the one place where that is done, for every kind of data.

    :param pad_to_multiple_of: round the width of batches up to a multiple of this
    """

    def __init__(self, tokenizer, pad_to_multiple_of: int | None = None):
        #: by the column of a batch, what fills it up where a row has no more
        self.padding = {"input_ids": tokenizer.pad_token_id, "labels": IGNORED_LABEL}
        self.pad_to_multiple_of = pad_to_multiple_of or 1

    def __call__(self, instances: list[dict], seed: int | list[int] | None = None, longest: float = math.inf) -> dict:
        """The batch, as tensors (see make_train_batches), of instances with input_ids and, if they have them,
        token_type_ids, special_tokens_mask and sentence_order_label: lists, arrays or tensors.

        :param seed: of the masks; without, they come from torch's own generator
        :param longest: width beyond which nothing is padded: a model may have no position for it
        """
        import torch

        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        lengths = np.array([len(instance["input_ids"]) for instance in instances])
        flat = {
            name: join_lists([instance[name] for instance in instances], are_bytes=name != "input_ids")
            for name in ("input_ids", "token_type_ids", "special_tokens_mask")
            if name in instances[0]
        }
        if "sentence_order_label" in instances[0]:
            flat["sentence_order_label"] = np.array([int(instance["sentence_order_label"]) for instance in instances])
        return to_tensors(self.collate(flat, lengths, np.random.default_rng(seed), longest))

    def collate(
        self,
        flat: dict[str, np.ndarray],
        lengths: np.ndarray,
        generator: np.random.Generator,
        longest: float = math.inf,
    ) -> dict[str, np.ndarray]:
        """The batch of rows whose columns are joined end to end; see `add_labels` and `pad`."""
        return self.pad(self.add_labels(flat, lengths, generator), lengths, longest)

    def pad(self, flat: dict[str, np.ndarray], lengths: np.ndarray, longest: float = math.inf) -> dict[str, np.ndarray]:
        """Arrays [rows, width] of int64; width is the longest row's length, rounded up to pad_to_multiple_of.

        :param longest: but no more than this: a model may have no position for it
        """
        width = int(min(-(-lengths.max() // self.pad_to_multiple_of) * self.pad_to_multiple_of, longest))
        is_filled = np.arange(width) < lengths[:, None]
        batch = {"attention_mask": is_filled.astype(np.int64)}
        if "sentence_order_label" in flat:
            batch["sentence_order_label"] = flat["sentence_order_label"]
        for name, value in self.padding.items():
            batch[name] = np.full(is_filled.shape, value, dtype=np.int64)
            batch[name][is_filled] = flat.get(name, value)
        return batch


class DataCollatorForCausalLM(DataCollator):
    """Labels are the tokens themselves, as transformers' models take them: they shift them. All are to be predicted but
    the first of a row, which nothing is before."""

    def add_labels(
        self, flat: dict[str, np.ndarray], lengths: np.ndarray, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Rows joined end to end with the labels: IGNORED_LABEL where there is none."""
        labels = flat["input_ids"].copy()
        labels[np.cumsum(lengths) - lengths] = IGNORED_LABEL
        return {**flat, "labels": labels}


class DataCollatorForWholeWordMask(DataCollator):
    """BERT's masking (arxiv.org/abs/1810.04805, section 3.1), of whole words as in its later models.

    Each word is chosen with mlm_probability, whatever its length, so that each token is, too. What becomes of the
    chosen tokens is drawn for each by itself, as in BERT's code: 80 % become [MASK], 10 % a random token, 10 % stay.
    Special tokens are never chosen, and end a word. At least one word of a batch is chosen, or its loss had no value.

    :param whole_word_mask: False chooses tokens, each by itself
    """

    def __init__(
        self,
        tokenizer,
        mlm_probability: float = 0.15,
        pad_to_multiple_of: int | None = None,
        whole_word_mask: bool = True,
    ):
        super().__init__(tokenizer, pad_to_multiple_of)
        self.padding["token_type_ids"] = 0
        self.mlm_probability, self.mask_id = mlm_probability, tokenizer.mask_token_id
        self.is_special = np.isin(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        self.ordinary_ids = np.flatnonzero(~self.is_special)
        self.begins_word = find_word_beginnings(tokenizer) if whole_word_mask else np.ones(len(tokenizer), dtype=bool)
        if self.begins_word is None:
            raise UserError(
                f"where words begin cannot be told from the pieces of the tokenizer {tokenizer.name_or_path}: add "
                "--no_whole_word_mask, or take one of ALBERT or BERT"
            )

    def add_labels(
        self, flat: dict[str, np.ndarray], lengths: np.ndarray, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Rows joined end to end with masked input_ids, and the labels: IGNORED_LABEL where nothing was chosen."""
        input_ids = flat["input_ids"].copy()
        special = flat["special_tokens_mask"] if "special_tokens_mask" in flat else self.is_special[input_ids]
        words, count = number_words(self.begins_word[input_ids], special == 0, lengths)
        is_chosen_word = generator.random(count + 1) < self.mlm_probability
        is_chosen_word[0] = False
        if count and not is_chosen_word.any():
            is_chosen_word[generator.integers(1, count + 1)] = True
        is_chosen = is_chosen_word[words]
        labels = np.where(is_chosen, input_ids, IGNORED_LABEL)
        chosen = np.flatnonzero(is_chosen)
        fate = generator.random(len(chosen))
        input_ids[chosen[fate < 0.8]] = self.mask_id
        replaced = chosen[fate >= 0.9]
        input_ids[replaced] = generator.choice(self.ordinary_ids, len(replaced))
        return {**flat, "input_ids": input_ids, "labels": labels}


def make_collator(columns: list[str], tokenizer, args: DataArguments, multiple: int) -> DataCollator:
    """For instances of these columns."""
    if "special_tokens_mask" in columns:
        return DataCollatorForWholeWordMask(tokenizer, args.mlm_probability, multiple, args.whole_word_mask)
    return DataCollatorForCausalLM(tokenizer, multiple)


def join_lists(lists: list, are_bytes: bool) -> np.ndarray:
    """The elements of lists, or of arrays or tensors, end to end as int64.

    :param are_bytes: all lie between 0 and 255, which is read several times as fast
    """
    if not isinstance(lists[0], list):
        return np.concatenate([np.asarray(values) for values in lists]).astype(np.int64)
    if are_bytes:
        return np.frombuffer(b"".join(map(bytes, lists)), dtype=np.uint8).astype(np.int64)
    return np.fromiter(itertools.chain.from_iterable(lists), dtype=np.int64)


class MaskedBatches:
    """Random access to batches of a split: (row numbers, seed of the masks, sequence length or None) -> batch. State:
    the open Arrow table."""

    def __init__(self, dataset, tokenizer, args: DataArguments):
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
        self.collator = make_collator(self.columns, tokenizer, args, multiple)

    def read_rows(self, rows: np.ndarray, sequence_length: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Columns of the rows, joined end to end as int64, and the rows' lengths."""
        table = self.dataset[rows.tolist()]
        columns = {name: table[name].combine_chunks() for name in self.columns}
        flat = {
            name: (column.flatten() if name != "sentence_order_label" else column).to_numpy().astype(np.int64)
            for name, column in columns.items()
        }
        return cut_rows(flat, self.lengths[rows], sequence_length)

    def __getitem__(self, key: tuple[np.ndarray, list[int], int | None]) -> dict[str, np.ndarray]:
        rows, mask_seed, sequence_length = key
        longest = min(sequence_length or self.longest, self.longest)
        flat, lengths = self.read_rows(rows, longest)
        return self.collator.collate(flat, lengths, np.random.default_rng(mask_seed), longest)


class LengthGroupedOrder:
    """Endless keys of MaskedBatches, but the sequence length, pass after pass: in each, rows are shuffled, grouped by
    length, and the groups shuffled again. Rows beyond a multiple of batch_size sit out one pass; a split smaller than
    one batch repeats."""

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
    """MaskedBatches of a ShardedSplit: their keys with the shard's folder before -> batch. State: the shard that is
    open; each process opens it for itself."""

    def __init__(self, split: ShardedSplit, tokenizer, args: DataArguments):
        self.split, self.options = split, (tokenizer, args)
        self.folder: Path | None = None

    def open(self, folder: Path) -> MaskedBatches:
        if folder != self.folder:
            self.folder, self.batches = folder, MaskedBatches(self.split.load(folder), *self.options)
        return self.batches

    def __getitem__(self, key: tuple[Path, np.ndarray, list[int], int | None]) -> dict[str, np.ndarray]:
        folder, *rest = key
        return self.open(folder)[tuple(rest)]


class ShardedOrder:
    """Endless keys of ShardedBatches, but the sequence length: a LengthGroupedOrder's pass over one shard, then the
    next."""

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


class LengthedOrder:
    """The keys of an order, each with the sequence length that holds when it is given. State: the keys whose batches
    nobody has taken yet, and those to give once more."""

    def __init__(self, order):
        self.order, self.sequence_length = order, None
        self.under_way, self.again = deque(), deque()

    def __iter__(self) -> Iterator[tuple]:
        keys = iter(self.order)
        self.under_way, self.again = deque(), deque()
        while (key := self.again.popleft() if self.again else next(keys, None)) is not None:
            self.under_way.append(key)
            yield *key, self.sequence_length

    def recall(self) -> int:
        """Give the keys under way once more, before all others; the number of their batches, which nobody wants now."""
        count = len(self.under_way)
        self.again.extendleft(reversed(self.under_way))
        self.under_way.clear()
        return count


def leave_process_group(_: int) -> None:
    """What a worker does first: torchrun sends SIGTERM to a trainer's whole process group, and torch takes a worker
    that dies for an error."""
    os.setpgrp()


def prepare_in_workers(prepared, keys, num_workers: int) -> Iterator:
    """prepared[key] for each of the keys, from num_workers processes, or from this one. Workers never see Ctrl-C: the
    trainer still needs batches, or a quiet end of the workers, while it shuts down."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        prepared,
        sampler=keys,
        batch_size=None,  # a key stands for a whole batch
        collate_fn=keep_arrays,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=leave_process_group,
    )
    # not SIGTERM: by it Python ends workers that are left at exit, and then waits for them
    with hold_signals(signal.SIGINT):
        return iter(loader)


class BatchLoader:
    """Batches as tensors, prepared by num_workers processes, or by this one."""

    def __init__(self, batches, order, num_workers: int):
        self.batches, self.order, self.num_workers = batches, LengthedOrder(order), num_workers
        self.outdated = 0

    def set_sequence_length(self, sequence_length: int | None) -> None:
        """From the next batch on, cut instances to so many tokens (None: to none).

        What workers have prepared is thrown away and made anew: the batches are the same with any number of workers.
        """
        if sequence_length == self.order.sequence_length:
            return
        logger.info(
            f"sequences of {f'up to {sequence_length} tokens' if sequence_length else 'any length'} from now on"
        )
        self.order.sequence_length = sequence_length
        self.outdated += self.order.recall()

    def __iter__(self) -> Iterator[dict]:
        self.outdated = 0
        for batch in prepare_in_workers(self.batches, self.order, self.num_workers):
            if self.outdated:
                self.outdated -= 1
                continue
            self.order.under_way.popleft()
            yield to_tensors(batch)


def make_train_batches(
    dataset,
    tokenizer,
    args: DataArguments,
    *,
    batch_size: int,
    seed: int,
    num_workers: int = 0,
    stop: threading.Event | None = None,
    state: dict | None = None,
):
    """Endless iterable of training batches from one split; the same for the same seed, whatever num_workers.

    Each is a dictionary of int64 tensors: input_ids, attention_mask, labels (-100 where nothing is to be predicted),
    and for masked models token_type_ids, all [batch_size, longest row]; for pairs sentence_order_label [batch_size] (1:
    swapped). Sequences grow when its set_sequence_length(sequence_length_at(epoch, args)) is called.

    :param dataset: a Dataset; or a ShardedSplit: its order of shards is begun with this seed unless it has begun; or
        what make_training_dataset has returned
    :param stop: ends the iteration when it is set while data is waited for
    :param state: of StreamedBatches: where to go on, and with which seed
    """
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        dataset.seed = state["seed"] if state else seed
        multiple = choose_multiple(args, dataset.max_sequence_length)
        collator = make_collator(COLUMNS_OF[dataset.objective], tokenizer, args, multiple)
        return StreamedBatches(
            dataset, collator, batch_size=batch_size, num_workers=num_workers, stop=stop, state=state
        )
    if isinstance(dataset, ShardedSplit):
        if dataset.seed is None:
            dataset.begin(seed)
        batches = ShardedBatches(dataset, tokenizer, args)
        order = ShardedOrder(batches, batch_size, seed, stop or threading.Event())
    else:
        batches = MaskedBatches(dataset, tokenizer, args)
        order = LengthGroupedOrder(batches.padded_lengths, batch_size, seed)
    return BatchLoader(batches, order, num_workers)


def make_eval_batches(
    dataset, tokenizer, args: DataArguments, *, batch_size: int, max_samples: int | None = None
) -> list[dict]:
    """The batches (see make_train_batches) of one split, or of max_samples random rows of it, in order of length; rows
    are as long as at the end of training.

    Rows and masks are the same at each call and on each peer, whatever the batch size: losses can be compared.
    """
    batches = MaskedBatches(dataset, tokenizer, args)
    generator = np.random.default_rng(0)
    rows = generator.permutation(len(batches.lengths))[:max_samples]
    rows = rows[np.argsort(batches.lengths[rows], kind="stable")]
    flat, lengths = batches.read_rows(rows, batches.longest)
    flat = batches.collator.add_labels(flat, lengths, generator)
    ends = np.cumsum(lengths)
    result = []
    for start in range(0, len(rows), batch_size):
        stop = min(start + batch_size, len(rows))
        tokens = slice(ends[start] - lengths[start], ends[stop - 1])
        part = {
            name: values[slice(start, stop) if name == "sentence_order_label" else tokens]
            for name, values in flat.items()
        }
        result.append(to_tensors(batches.collator.pad(part, lengths[start:stop], batches.longest)))
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
    objective: str = "mlm_sop",
):
    """Endless instances of a mixture of sources (see streaming.py), a torch IterableDataset of dictionaries:
    input_ids, token_type_ids, special_tokens_mask (arrays of the same length) and sentence_order_label (0 or 1); for
    other objectives the columns of COLUMNS_OF.

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
            raise UserError(f"--sources {sources}: {source.name} gives no text: {problem}")
    return TrainingDataset(found, tokenizer, max_sequence_length, seed, shuffle_buffer, objective)


def make_streamed_split(tokenizer, args: DataArguments, objective: str):
    """The train split of --streaming."""
    return make_training_dataset(
        tokenizer,
        sources=args.sources,
        max_sequence_length=args.max_sequence_length,
        shuffle_buffer=args.shuffle_buffer,
        sentence_splitter=args.sentence_splitter,
        objective=objective,
    )


def load_data(model_args: ModelArguments, args: DataArguments, needs_validation: bool) -> tuple:
    """(the tokenizer, splits by name, what is known of the corpus): a stored dataset, or with --streaming a stream of
    text for training, beside a stored validation split if that is needed. All are for the model's objective."""
    from model import find_objective

    objective = find_objective(model_args)
    if args.streaming and not needs_validation:
        tokenizer, splits = load_tokenizer(model_args.tokenizer_path, objective), {}
        corpus = {"unigram_entropy": None, "objective": objective}
    else:
        found = find_data(model_args, args, objective)
        tokenizer = load_tokenizer(choose_tokenizer(found, model_args), objective)
        splits, corpus = load_tokenized_dataset(found, tokenizer, objective)
    if args.streaming:
        splits["train"] = make_streamed_split(tokenizer, args, objective)
        corpus["seq_length"] = args.max_sequence_length
    return tokenizer, splits, corpus


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


class StreamedBatches:
    """Endless batches of a TrainingDataset. This process reads, its workers tokenize what it hands out, in turn: the
    same for the same seed, whatever num_workers.

    Instances gather in a pool. When it has `shuffle_buffer` of them (the first pools are smaller, not to keep a start
    waiting), they are shuffled, grouped by length and the groups shuffled again; those beyond a multiple of batch_size
    sit out. While its batches are taken the next pool gathers. State: where the documents of the present pool begin,
    and how many of its batches have been taken. From there the same batches follow: nothing is lost,
    nothing comes twice. Where batch size, sequence length or shuffle_buffer are others, the pool begins anew instead;
    where a source was late, part of the pool may be lost or come twice.

    :param collator: (instances, seed of the masks, sequence length) -> a batch
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
        from streaming import ChunkTokenizer, DocumentStream, list_instances

        dataset, saved = self.dataset, self.progress
        stream = DocumentStream(dataset.sources, dataset.seed, saved, self.stop)
        begins: deque = deque()  # the stream's state before each chunk that is on its way

        def hand_out():
            # DataLoader asks for so many while its workers start: text may be long in coming, and Ctrl-C must wait then
            for _ in range(2 * self.num_workers):
                begins.append(None)
                yield self.sequence_length, []
            for begin, chunk in stream:
                begins.append(begin)
                yield self.sequence_length, chunk

        tokenizer = ChunkTokenizer(dataset.sources, dataset.tokenizer, dataset.seed, dataset.objective)
        chunks = prepare_in_workers(tokenizer, hand_out(), self.num_workers)

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
                instances = [pool["instances"][row] for row in batches[number]]
                mask_seed = [dataset.seed, pool["begin"]["documents"], number]
                batch = self.collator(instances, mask_seed, self.sequence_length)
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


# ---------------------------------------------------------------- a look at batches

BATCH_SIZE, SHOWN_ROWS, SHOWN_BATCHES, MEASURED_BATCHES = 4, 2, 3, 250


class BatchStatistics:
    """What masking and padding have done to batches, in numbers and as text. State: counts."""

    def __init__(self, tokenizer, objective: str):
        self.tokenizer, self.counts = tokenizer, Counter()
        self.is_causal, self.has_pairs = objective == "clm", objective == "mlm_sop"
        self.is_special = np.isin(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        begins_word = find_word_beginnings(tokenizer)
        self.begins_word = np.ones(len(tokenizer), dtype=bool) if begins_word is None else begins_word

    def add(self, batch: dict) -> None:
        is_filled = batch["attention_mask"].numpy() == 1
        ids, labels = (batch[name].numpy()[is_filled] for name in ("input_ids", "labels"))
        is_chosen = labels != IGNORED_LABEL
        true = np.where(is_chosen, labels, ids)
        words, count = number_words(self.begins_word[true], ~self.is_special[true], is_filled.sum(axis=1))
        sizes, chosen = np.bincount(words, minlength=count + 1), np.bincount(words[is_chosen], minlength=count + 1)
        is_mask = ids == self.tokenizer.mask_token_id
        self.counts.update(
            rows=len(is_filled),
            swapped=int(batch["sentence_order_label"].sum()) if "sentence_order_label" in batch else 0,
            places=is_filled.size,
            padding=int((~is_filled).sum()),
            tokens=int((words > 0).sum()),
            chosen=int(is_chosen.sum()),
            masked=int((is_chosen & is_mask).sum()),
            kept=int((is_chosen & (ids == true)).sum()),
            words=count,
            chosen_words=int((chosen == sizes)[1:].sum()),
            divided_words=int(((chosen > 0) & (chosen < sizes))[1:].sum()),
        )

    def describe(self) -> str:
        c = self.counts
        padding = f"{c['padding'] / c['places']:.1%} of the batches is padding"
        if self.is_causal:
            return f"{c['rows']:,} instances of {c['places'] / c['rows']:.0f} tokens; {padding}"
        other = c["chosen"] - c["masked"] - c["kept"]
        fates = [count / max(1, c["chosen"]) for count in (c["masked"], other, c["kept"])]
        return (
            f"{c['rows']:,} instances: mask rate {c['chosen'] / max(1, c['tokens']):.1%} of the tokens; of these "
            f"{fates[0]:.1%} are [MASK], {fates[1]:.1%} another token, {fates[2]:.1%} as they were\n"
            f"{c['words']:,} words: {c['chosen_words'] / max(1, c['words']):.1%} to be predicted wholly, "
            f"{c['divided_words'] / max(1, c['words']):.1%} in part\n"
            + padding
            + (f", {c['swapped'] / c['rows']:.1%} of the pairs are swapped" if self.has_pairs else "")
        )

    def show_row(self, ids: np.ndarray, labels: np.ndarray) -> str:
        """A row without padding as text: what the model sees, and in brackets behind it what it is to predict, unless
        that is just the next word."""
        if self.is_causal:
            return " ".join(self.tokenizer.decode(ids).split())
        is_chosen = labels != IGNORED_LABEL
        true = np.where(is_chosen, labels, ids)
        words, _ = number_words(self.begins_word[true], ~self.is_special[true], np.array([len(ids)]))
        begins = (words == 0) | (np.diff(words, prepend=0) != 0)
        begins_part = begins | (np.diff(is_chosen, prepend=False))
        text = ""
        for part in np.split(np.arange(len(ids)), np.flatnonzero(begins_part)[1:]):
            seen, expected = (
                "".join(piece.removeprefix("▁").removeprefix("Ġ").removeprefix("##") for piece in pieces)
                for pieces in (self.tokenizer.convert_ids_to_tokens(values[part].tolist()) for values in (ids, true))
            )
            text += " " * bool(begins[part[0]]) + seen + (f"⟦{expected}⟧" if is_chosen[part[0]] else "")
        return text.strip()


def main() -> None:
    model_args, args = parse_arguments(
        ModelArguments, DataArguments, description="Print batches as text, as a model will see them."
    )
    from model import find_objective

    objective = find_objective(model_args)
    tokenizer, dataset, corpus = load_data(model_args, args, needs_validation=False)
    check_data_arguments(args, tokenizer, corpus, math.inf)
    batches = make_train_batches(dataset["train"], tokenizer, args, batch_size=BATCH_SIZE, seed=model_args.seed)
    batches.set_sequence_length(sequence_length_at(0, args))
    statistics = BatchStatistics(tokenizer, objective)
    stored = "" if args.streaming else f"{len(dataset['train']):,} instances for training, "
    source = args.sources if args.streaming else args.train_file or args.dataset_name or args.dataset_path
    print(f"{source}: {stored}{len(tokenizer):,} pieces, objective {objective}")
    what = "of each word it predicts the next" if objective == "clm" else "in brackets what it is to predict"
    print(f"As the model sees them; {what}:")
    for number, batch in enumerate(itertools.islice(batches, MEASURED_BATCHES), start=1):
        statistics.add(batch)
        for row in range(SHOWN_ROWS * (number <= SHOWN_BATCHES)):
            length, width = int(batch["attention_mask"][row].sum()), batch["attention_mask"].shape[1]
            ids, labels = (batch[name][row, :length].numpy() for name in ("input_ids", "labels"))
            facts = [f"{length} tokens, {width - length} of padding"]
            if "sentence_order_label" in batch:
                facts.append("swapped" if batch["sentence_order_label"][row] else "in order")
            facts.append(f"{(labels != IGNORED_LABEL).sum()} to be predicted")
            print(f"\nbatch {number}, row {row + 1} of {BATCH_SIZE}: {', '.join(facts)}")
            width = min(120, shutil.get_terminal_size().columns)
            lines = textwrap.wrap(statistics.show_row(ids, labels), width - 4, break_on_hyphens=False)
            text = textwrap.indent("\n".join(lines), "    ")
            if sys.stdout.isatty():
                text = text.replace("⟦", "\033[33m⟦").replace("⟧", "⟧\033[0m")
            print(text, flush=True)
    print(f"\n{statistics.describe()}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    with edge():
        main()
