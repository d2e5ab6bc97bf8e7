"""Edit me: what the model reads. Which text, cut into which documents, collated into which batches.

text -> documents (lists of paragraphs) -> ids -> instances (see text/instances.py) -> batches of similar length, masked
anew each time. Up to the instances, tokenize_wikitext103.py has done it before, or a trainer does it at its first start
(--train_file, --dataset_name) or on the way (--streaming). To see what the model will see:

    python -m experiment.show
"""

import threading
from functools import partial
from pathlib import Path

from torch.utils.data import IterableDataset

from arguments import DEFAULT_TOKENIZER_PATH, DataArguments, ModelArguments
from experiment.model import find_objective
from support.console import UserError
from text.batches import (
    BatchLoader,
    IndexedBatches,
    ShardedBatches,
    StreamedBatches,
    choose_multiple,
    list_batches,
)
from text.collators import DataCollator, DataCollatorForCausalLM, DataCollatorForWholeWordMask
from text.documents import read_documents
from text.fetch import FetchedDataset, fetch_data
from text.instances import PAIRS, InstanceKind
from text.shards import ShardedSplit
from text.stored import load_tokenized_dataset
from text.streams import TrainingDataset, read_sources
from text.tokenization import load_hub_splits, tokenize_for_trainer
from text.tokenizers import load_tokenizer

# ---------------------------------------------------------------- text


def load_documents(args: DataArguments) -> tuple[str, dict[str, list[list[str]]]]:
    """(where the text is from, documents by split) for --train_file or --dataset_name. A document is a list of
    paragraphs; where there is no validation split, some documents are held out for it."""
    if args.dataset_name:
        name = [args.dataset_name, *filter(None, [args.dataset_config_name])]
        cache_dir = Path(args.dataset_cache_dir) / "hub"
        source, splits = load_hub_splits(name, args.text_column, cache_dir, "--train_file")
    else:
        source, splits = Path(args.train_file).name, {"train": read_documents(args.train_file, args.text_column)}
    if args.validation_file:
        splits["validation"] = read_documents(args.validation_file, args.text_column)
    return source, splits


def make_training_dataset(tokenizer, args: DataArguments, kind: InstanceKind = PAIRS) -> TrainingDataset:
    """The train split of --streaming: endless instances of a mixture of sources (see text/streams.py), a torch
    IterableDataset of dictionaries: input_ids, token_type_ids, special_tokens_mask (arrays of the same length) and
    sentence_order_label (0 or 1); for another kind its columns.

    A source that gives nothing at its beginning is a UserError. Documents may be chosen or changed in ChunkTokenizer.
    The order, the mixture, the cuts and the swaps follow from its attribute `seed`; make_train_batches gives it the
    peer's own.
    """
    found = read_sources(args.sources, args.sentence_splitter)
    for source in found:
        if problem := source.find_problem(seed=0):
            raise UserError(f"--sources {args.sources}: {source.name} yields no text: {problem}")
    return TrainingDataset(found, tokenizer, args.max_sequence_length, 0, args.shuffle_buffer, kind)


def find_data(model_args: ModelArguments, args: DataArguments, kind: InstanceKind) -> FetchedDataset:
    """Where the tokenized dataset is: fetched, or tokenized here and now if the flags name text."""
    if not (args.train_file or args.dataset_name):
        return fetch_data(args.dataset_path, args.dataset_sha256, args.dataset_cache_dir)
    tokenizer = load_tokenizer(model_args.tokenizer_path, kind)
    return FetchedDataset(tokenize_for_trainer(*load_documents(args), tokenizer, kind, model_args.seed, args))


def choose_tokenizer(found: FetchedDataset, args: ModelArguments) -> str | Path:
    """Folder of the tokenizer: the one that came in the dataset's archive, unless another one was named, or a
    pretrained model, whose weights know its own."""
    is_named = args.model_name_or_path or args.tokenizer_path != DEFAULT_TOKENIZER_PATH
    return args.tokenizer_path if found.tokenizer is None or is_named else found.tokenizer


def load_data(model_args: ModelArguments, args: DataArguments, needs_validation: bool) -> tuple:
    """(the tokenizer, splits by name, what is known of the corpus): a stored dataset, or with --streaming a stream of
    text for training, beside a stored validation split if that is needed. All are for the model's objective."""
    kind = find_objective(model_args).kind
    if args.streaming and not needs_validation:
        tokenizer, splits = load_tokenizer(model_args.tokenizer_path, kind), {}
        corpus = {"unigram_entropy": None, "objective": kind.name}
    else:
        found = find_data(model_args, args, kind)
        tokenizer = load_tokenizer(choose_tokenizer(found, model_args), kind)
        splits, corpus = load_tokenized_dataset(found, tokenizer, kind)
    if args.streaming:
        splits["train"] = make_training_dataset(tokenizer, args, kind)
        corpus["seq_length"] = args.max_sequence_length
    return tokenizer, splits, corpus


# ---------------------------------------------------------------- batches


def make_collator(columns: list[str], multiple: int, tokenizer, args: DataArguments) -> DataCollator:
    """What makes batches with labels of instances with these columns, their width a multiple of that."""
    if "special_tokens_mask" in columns:
        return DataCollatorForWholeWordMask(tokenizer, args.mlm_probability, multiple, args.whole_word_mask)
    return DataCollatorForCausalLM(tokenizer, multiple)


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
    :param state: of StreamedBatches: where to continue, and with which seed
    """
    collate = partial(make_collator, tokenizer=tokenizer, args=args)
    if isinstance(dataset, IterableDataset):
        dataset.seed = state["seed"] if state else seed
        collator = collate(dataset.kind.columns, choose_multiple(args, dataset.max_sequence_length))
        return StreamedBatches(
            dataset, collator, batch_size=batch_size, num_workers=num_workers, stop=stop, state=state
        )
    if isinstance(dataset, ShardedSplit):
        if dataset.seed is None:
            dataset.begin(seed)
        batches = ShardedBatches(dataset, collate, args, stop or threading.Event())
    else:
        batches = IndexedBatches(dataset, collate, args)
    return BatchLoader(batches, batch_size, seed, num_workers)


def make_eval_batches(
    dataset, tokenizer, args: DataArguments, *, batch_size: int, max_samples: int | None = None
) -> list[dict]:
    """The batches (see make_train_batches) of one split, or of max_samples random rows of it, the same at each call;
    rows are as long as at the end of training."""
    collate = partial(make_collator, tokenizer=tokenizer, args=args)
    return list_batches(IndexedBatches(dataset, collate, args), batch_size, max_samples)
