"""Edit me: the model's data, from text to batches.

text -> documents (lists of paragraphs) -> ids -> sequences (see text/instances.py) -> batches of similar length, with
a new mask each time. The sequences are made by tokenize_wikitext103.py in advance, by a trainer at its first start
(--train_file, --dataset_name), or during training (--streaming). To look at the batches:

    python -m experiment.show
"""

import threading
from pathlib import Path

import numpy as np

from arguments import DEFAULT_TOKENIZER_PATH, DataArguments, ModelArguments
from common.console import UserError
from experiment.model import find_objective
from text.batches import BatchLoader, IndexedSplit, StreamedBatches, choose_multiple
from text.collators import DataCollator, DataCollatorForCausalLM, DataCollatorForWholeWordMask, cut_rows, take_rows
from text.documents import read_documents
from text.fetch import fetch_data
from text.instances import PAIRS, Documents, InstanceKind
from text.stored import load_tokenized_dataset
from text.streams import TrainingDataset, read_sources
from text.tokenization import load_hub_splits, tokenize_for_trainer
from text.tokenizers import load_tokenizer

SHUFFLE_BUFFER = 8192  # sequences of --streaming that are shuffled together, twice; 3 kB each at 512 tokens

# ---------------------------------------------------------------- text


def load_documents(args: DataArguments, kind: InstanceKind) -> tuple[str, dict[str, Documents]]:
    """Return the name of the text of --train_file or --dataset_name, and its documents (lists of paragraphs) by split.

    Without a validation split, some documents are held out later.
    """
    if args.dataset_name:
        name = args.dataset_name.split(":")  # with the configuration, if it has several
        cache_dir = Path(args.dataset_cache_dir) / "hub"
        source, splits = load_hub_splits(name, args.text_column, cache_dir, "--train_file", kind)
    else:
        source = Path(args.train_file).name
        splits = {"train": read_documents(args.train_file, args.text_column, kind)}
    if args.validation_file:
        splits["validation"] = read_documents(args.validation_file, args.text_column, kind)
    return source, splits


def make_training_dataset(tokenizer, args: DataArguments, kind: InstanceKind = PAIRS) -> TrainingDataset:
    """Return the train split of --streaming: endless sequences from a mixture of sources (see text/streams.py).

    Its `seed`, which make_train_batches sets for each peer, decides order, mixture, cuts and swaps. To select or change
    documents, edit TrainingDataset.

    :raises UserError: if a source yields no text
    """
    sources = read_sources(args.sources)
    for source in sources:
        if problem := source.find_problem():
            raise UserError(f"--sources {args.sources}: {source.name} yields no text: {problem}")
    return TrainingDataset(sources, tokenizer, kind, args.max_sequence_length, SHUFFLE_BUFFER)


def load_data(model_args: ModelArguments, args: DataArguments, needs_validation: bool) -> tuple:
    """Return the tokenizer, the splits by name (with --streaming, "train" is a stream), and facts of the corpus."""
    kind = find_objective(model_args).kind
    if args.streaming and kind.has_turns:
        raise UserError(f"--streaming reads no conversations (--objective {kind.name}): give --train_file instead")
    if args.streaming and not needs_validation:
        tokenizer = load_tokenizer(model_args.tokenizer_path, kind)
        splits = {}
        corpus = {"unigram_entropy": None, "objective": kind.name}
    else:
        if args.train_file or args.dataset_name:
            tokenizer = load_tokenizer(model_args.tokenizer_path, kind)
            (source, documents) = load_documents(args, kind)
            folder = tokenize_for_trainer(source, documents, tokenizer, kind, model_args.seed, args)
        else:
            folder, fetched = fetch_data(args.dataset_path, args.dataset_sha256, args.dataset_cache_dir)
            # the archive's tokenizer, if any, unless the flags name a tokenizer or a pretrained model
            is_default = model_args.tokenizer_path == DEFAULT_TOKENIZER_PATH and not model_args.model_name_or_path
            tokenizer = load_tokenizer(fetched if fetched and is_default else model_args.tokenizer_path, kind)
        splits, corpus = load_tokenized_dataset(folder, tokenizer, kind)
    if args.streaming:
        splits["train"] = make_training_dataset(tokenizer, args, kind)
        corpus["seq_length"] = args.max_sequence_length
    return tokenizer, splits, corpus


# ---------------------------------------------------------------- batches


def make_collator(columns: list[str], longest: int, tokenizer, args: DataArguments) -> DataCollator:
    """Return a collator for sequences with these columns and up to `longest` tokens."""
    multiple = choose_multiple(longest)
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
    """Return an endless iterable of batches from a train split, which depend on the seed but not on num_workers.

    Each is a dictionary of int64 tensors: input_ids, attention_mask, labels (-100: no label) and, for masked models,
    token_type_ids, all [batch_size, longest sequence]; for pairs, sentence_order_label [batch_size] (1: swapped). Set
    its `sequence_length` to sequence_length_at(epoch, args) at each epoch.

    :param dataset: a Dataset, or the result of make_training_dataset
    :param stop: an event that ends the iteration while it waits for data
    :param state: the state of StreamedBatches, with the position and the seed to continue with
    """
    if isinstance(dataset, TrainingDataset):
        dataset.seed = state["seed"] if state else seed
        collator = make_collator(dataset.kind.columns, dataset.seq_length, tokenizer, args)
        return StreamedBatches(dataset, collator, batch_size, num_workers, stop, state)
    split = IndexedSplit(dataset, args.max_sequence_length)
    collator = make_collator(split.columns, split.longest, tokenizer, args)
    return BatchLoader(split, collator, batch_size, seed, num_workers)


def make_eval_batches(
    dataset, tokenizer, args: DataArguments, *, batch_size: int, max_samples: int | None = None
) -> list[dict]:
    """Return the batches of a split, or of max_samples random sequences, sorted by length.

    Sequences and masks are the same at each call, on each peer and at any batch size, so that losses are comparable.
    They are as long as at the end of training. See make_train_batches for the format.
    """
    split = IndexedSplit(dataset, args.max_sequence_length)
    collator = make_collator(split.columns, split.longest, tokenizer, args)
    generator = np.random.default_rng(0)
    rows = generator.permutation(len(split.lengths))[:max_samples]
    rows = rows[np.argsort(split.lengths[rows], kind="stable")]
    flat, lengths = cut_rows(*split[rows], split.longest)
    flat = collator.add_labels(flat, lengths, generator)
    parts = np.split(np.arange(len(rows)), np.arange(batch_size, len(rows), batch_size))
    return [collator.pad(*take_rows(flat, lengths, part), split.longest) for part in parts]
