"""Documents to instances, by several processes: for tokenize_wikitext103.py, and for trainers that are given text."""

import contextlib
import ctypes
import functools
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from arguments import DataArguments, ModelArguments, TokenizeArguments
from support.console import UserError, first_line
from support.files import locked, unfinished_folder
from support.hub import hub
from text.documents import (
    WIKITEXT_TITLE,
    cut_blocks,
    encode_documents,
    load_sentence_splitter,
    make_document_random,
    make_instances,
    make_text_encoder,
    split_articles,
    split_paragraphs,
    split_sentences,
)
from text.instances import KINDS, InstanceKind
from text.stored import describe_corpus, make_table, make_tables, write_dataset
from text.tokenizers import load_tokenizer, tokenizer_fingerprint
from text.workers import hold_signals

CHUNK_CHARACTERS = 500_000  # of text per task: about half a second


def make_dataset(
    source: str, splits: dict[str, list[list[str]]], tokenizer, tokenizer_path: str | Path, folder: Path, args
) -> dict:
    """Tokenize the splits into a folder; the contents of its corpus.json."""
    tables = tokenize_splits(splits, tokenizer_path, args)
    for name, table in tables.items():
        if not table.num_rows:
            raise UserError(f"too little text for a {name} split: give more text or another --validation_fraction")
    corpus = describe_corpus(tables, tokenizer, args) | {
        "documents": {name: len(documents) for name, documents in splits.items()},
        "source": source,
    }
    write_dataset(tables, corpus, folder)
    return corpus


def split_documents(documents: list[list[str]], args: TokenizeArguments) -> dict[str, list[list[str]]]:
    """Hold random documents out for validation, none of them larger than that share of the text where possible. The
    only document there is gives up its last paragraphs, or sentences."""
    fraction = args.validation_fraction
    if len(documents) == 1:
        kind, units = "paragraphs", documents[0]
        if len(units) == 1:
            kind, units = "sentences", split_sentences(units, args.language, args.sentence_splitter)
        if len(units) == 1:
            raise UserError("the text is a single sentence: give more")
        cut = min(max(round(len(units) * (1 - fraction)), 1), len(units) - 1)
        print(f"one document: its last {len(units) - cut} of {len(units)} {kind} become the validation split")
        return {"train": [units[:cut]], "validation": [units[cut:]]}
    sizes = [sum(map(len, document)) for document in documents]
    shuffled = random.Random(args.seed).sample(range(len(documents)), len(documents))
    fitting = [index for index in shuffled if sizes[index] <= fraction * sum(sizes)]
    if not fitting:
        fitting = [min(shuffled, key=sizes.__getitem__)]
    held_out = set(fitting[: min(max(1, round(fraction * len(documents))), len(documents) - 1)])
    splits = {"train": [], "validation": []}
    for index, document in enumerate(documents):
        splits["validation" if index in held_out else "train"].append(document)
    return splits


@functools.cache
def load_worker_tokenizer(path: str | Path, kind: InstanceKind):
    tokenizer = load_tokenizer(path, kind)
    return tokenizer, make_text_encoder(tokenizer)


def tokenize_chunk(
    chunk: list[tuple[int, list[str]]], *, split: str, tokenizer_path: str | Path, args: TokenizeArguments
):
    """Of some documents, given as (index, paragraphs): an Arrow table of their pairs, or for full blocks, which reach
    over the end of a chunk, their ids end to end."""
    kind = KINDS[args.objective]
    tokenizer = load_worker_tokenizer(tokenizer_path, kind)
    if not kind.has_pairs:
        return encode_documents([paragraphs for _, paragraphs in chunk], kind, *tokenizer)
    documents = [split_sentences(paragraphs, args.language, args.sentence_splitter) for _, paragraphs in chunk]
    generators = [make_document_random(args.seed, split, index) for index, _ in chunk]
    return make_table(*make_instances(documents, generators, args.seq_length, *tokenizer))


def start_worker():
    # the tokenizer's threads do not survive a fork; and num_proc is what the user wants to spend
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive a killed parent


def tokenize_splits(splits: dict[str, list[list[str]]], tokenizer_path: str | Path, args: TokenizeArguments) -> dict:
    """{split: Arrow table of its instances}, in the order of the documents whatever the number of processes."""
    import pyarrow
    from tqdm import tqdm

    chunks = {name: list(make_chunks(documents)) for name, documents in splits.items()}
    sizes = {name: [sum(len(p) for _, document in c for p in document) for c in chunks[name]] for name in chunks}
    # before the fork: once for all processes
    kind = KINDS[args.objective]
    tokenizer, _ = load_worker_tokenizer(tokenizer_path, kind)
    executor = None
    if args.num_proc > 1:
        executor = ProcessPoolExecutor(args.num_proc, multiprocessing.get_context("fork"), initializer=start_worker)
    tables = {}
    total = sum(map(sum, sizes.values()))
    try:
        interval = 0.2 if sys.stderr.isatty() else 10  # seconds; few lines in a log file
        with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", mininterval=interval) as progress:
            for name in splits:
                work = functools.partial(tokenize_chunk, split=name, tokenizer_path=tokenizer_path, args=args)
                with hold_signals(signal.SIGINT, signal.SIGTERM):  # processes start here
                    results = executor.map(work, chunks[name]) if executor else map(work, chunks[name])
                parts = []
                for size, table in zip(sizes[name], results, strict=True):
                    parts.append(table)
                    progress.update(size)
                if kind.has_pairs:
                    tables[name] = pyarrow.concat_tables(parts)
                else:
                    blocks = cut_blocks(np.concatenate(parts), args.seq_length, kind, tokenizer)
                    tables[name] = pyarrow.concat_tables(make_tables(*blocks))
    except BrokenProcessPool:
        raise UserError("a tokenizing process was killed, probably out of memory: lower --num_proc") from None
    finally:
        if executor:
            executor.shutdown(cancel_futures=True)
    return tables


def make_chunks(documents: list[list[str]]):
    chunk, size = [], 0
    for index, document in enumerate(documents):
        chunk.append((index, document))
        size += sum(map(len, document))
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def tokenize_for_trainer(
    source: str, splits: dict, tokenizer, kind: InstanceKind, model_args: ModelArguments, args: DataArguments
) -> Path:
    """Folder of the dataset made of these documents, in the cache: made at the first start, found there later on, by
    other trainers too. The same text and flags give the same rows on every peer.

    :param source: where the documents are from, for corpus.json
    :param splits: documents, each a list of paragraphs, for train and, unless some are to be held out, validation
    """
    load_sentence_splitter(args.language, args.sentence_splitter)
    for name, documents in splits.items():
        if not documents:
            where = args.validation_file if name == "validation" and args.validation_file else source
            raise UserError(f"there is no text for the {name} split in {where}: give files that are not empty")
    options = TokenizeArguments(
        objective=kind.name,
        seq_length=args.max_sequence_length,
        language=args.language,
        sentence_splitter=args.sentence_splitter,
        seed=model_args.seed,
        num_proc=min(8, os.cpu_count() or 1),
    )
    facts = [kind.name, options.seq_length, options.seed, options.language, options.sentence_splitter]
    digest = hashlib.sha256(json.dumps([*facts, tokenizer_fingerprint(tokenizer)]).encode())
    for name, documents in splits.items():
        digest.update(f"{name} {len(documents)}".encode())
        for document in documents:
            digest.update("\n".join([*document, ""]).encode("utf-8", "replace") + b"\0")
    cache_dir = Path(args.dataset_cache_dir)
    folder = cache_dir / f"text-{digest.hexdigest()[:16]}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"--dataset_cache_dir {cache_dir} cannot be written ({e.strerror}): choose another folder"
        ) from e
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            if "validation" not in splits:
                splits = split_documents(splits["train"], options)
            with unfinished_folder(folder) as unfinished:
                make_dataset(source, splits, tokenizer, model_args.tokenizer_path, unfinished, options)
                unfinished.rename(folder)
    return folder


def load_hub_splits(args: DataArguments) -> tuple[str, dict[str, list[list[str]]]]:
    """(name, documents of the train split, and of the validation split if there is one) of --dataset_name: a record is
    a document, but text in WikiText format is split into its articles."""
    name = [args.dataset_name, *([args.dataset_config_name] if args.dataset_config_name else [])]
    is_folder = Path(args.dataset_name).is_dir()
    with contextlib.nullcontext() if is_folder else hub(f"the dataset {args.dataset_name}", "--train_file"):
        import datasets  # now: it looks once whether there is a connection

        try:
            found = datasets.load_dataset(*name, cache_dir=str(Path(args.dataset_cache_dir) / "hub"))
        except (OSError, ValueError) as e:
            if not is_folder:
                raise
            raise UserError(f"--dataset_name {args.dataset_name} holds no dataset ({first_line(e)})") from e
    splits = {}
    for split in [name for name in ("train", "validation") if name in found]:
        if args.text_column not in found[split].column_names:
            columns = ", ".join(found[split].column_names)
            raise UserError(f"--dataset_name {args.dataset_name} has the columns {columns}: give one in --text_column")
        texts = [text or "" for text in found[split][args.text_column]]
        if any(not isinstance(text, str) for text in texts):
            raise UserError(f"--dataset_name {args.dataset_name}: {args.text_column} is not text: give --text_column")
        first = next((text for text in texts if text.strip()), "")
        if WIKITEXT_TITLE.match(first.strip("\n")):
            splits[split] = split_articles(texts)
        else:
            splits[split] = [paragraphs for text in texts if (paragraphs := split_paragraphs(text))]
    if "train" not in splits:
        raise UserError(
            f"--dataset_name {args.dataset_name} has no split train, but {', '.join(found)}: use another one"
        )
    return "/".join(name), splits
