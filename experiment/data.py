"""Edit me: what the model reads. Which dataset or stream of text, cut to which length, in which batches.

text -> documents (lists of paragraphs) -> ids -> pairs of segments, half of them swapped, or full blocks: that part is
run once, by tokenize_wikitext103.py. Dataset -> batches of similar length, masked anew each time: that part is run by
every trainer. The columns of a dataset tell which kind of batches is made of it, see text.stored.COLUMNS_OF. With
--streaming a trainer does both at once, see make_training_dataset. To see what the model will see:

    python -m experiment.show
"""

import hashlib
import json
import logging
import threading
from pathlib import Path

import numpy as np
from torch.utils.data import IterableDataset

from arguments import DEFAULT_TOKENIZER_PATH, DataArguments, ModelArguments
from experiment.model import find_objective
from support.console import UserError
from text.batches import (
    BatchLoader,
    LengthGroupedOrder,
    MaskedBatches,
    ShardedBatches,
    ShardedOrder,
    StreamedBatches,
    choose_multiple,
)
from text.collators import DataCollatorForWholeWordMask, make_collator, to_tensors
from text.fetch import Data, fetch_data
from text.shards import ShardedSplit
from text.stored import COLUMNS_OF, load_tokenized_dataset
from text.streams import TrainingDataset, read_sources
from text.tokenization import tokenize_for_trainer
from text.tokenizers import load_tokenizer

logger = logging.getLogger("data")


def choose_tokenizer(found: Data, args: ModelArguments) -> str | Path:
    """Folder of the tokenizer: the one that came in the dataset's archive, unless another one was named, or a
    pretrained model, whose weights know its own."""
    is_named = args.model_name_or_path or args.tokenizer_path != DEFAULT_TOKENIZER_PATH
    return args.tokenizer_path if found.tokenizer is None or is_named else found.tokenizer


def find_data(model_args: ModelArguments, args: DataArguments, objective: str) -> Data:
    """Where the tokenized dataset is: fetched, or tokenized here and now if the flags name text."""
    if not (args.train_file or args.dataset_name):
        return fetch_data(args.dataset_path, args.dataset_sha256, args.dataset_cache_dir)
    return Data(tokenize_for_trainer(load_tokenizer(model_args.tokenizer_path, objective), model_args, args, objective))


# ---------------------------------------------------------------- batches


def data_seed(peer_id: str, seed: int, epoch: int = 0) -> int:
    """Seed of one peer's data order, 63 bits: the same in every process, unlike hash().

    :param epoch: where the peer begins: one that goes on from a checkpoint does not read the first batches once more
    """
    start = f":{epoch}" if epoch else ""
    return int.from_bytes(hashlib.sha256(f"{seed}:{peer_id}{start}".encode()).digest()[:8], "big") >> 1


def check_data_arguments(args: DataArguments, tokenizer, corpus: dict, positions: float) -> None:
    """A UserError where instances are longer than the model takes, or cannot be masked as asked for; a line in the log
    where --max_sequence_length asks for longer ones than there are.

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
    """Endless instances of a mixture of sources (see text/streams.py), a torch IterableDataset of dictionaries:
    input_ids, token_type_ids, special_tokens_mask (arrays of the same length) and sentence_order_label (0 or 1); for
    other objectives the columns of COLUMNS_OF.

    A source that gives nothing at its beginning is a UserError. Edit me: documents may be chosen or changed in
    ChunkTokenizer.

    :param max_sequence_length: in tokens, special ones included
    :param seed: of the order, the mixture, the cuts and the swaps; make_train_batches gives it the peer's own
    :param shuffle_buffer: instances that are shuffled together
    :param sentence_splitter: auto, punkt or razdel, for sources that name none
    """
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
