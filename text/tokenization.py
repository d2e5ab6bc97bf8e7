"""Tokenization of documents by several processes, for tokenize_wikitext103.py and for trainers that read text files.

The functions' `args` are TokenizeArguments of tokenize_wikitext103.py, or have the same names.
"""

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from arguments import DataArguments
from common.console import UserError, first_line, show_progress
from common.files import locked, make_folder, unfinished_folder
from common.hub import hub
from text.documents import (
    WIKITEXT_TITLE,
    cut_blocks,
    encode_conversations,
    encode_documents,
    load_sentence_splitter,
    make_document_random,
    make_instances,
    make_text_encoder,
    pack_conversations,
    split_articles,
    split_paragraphs,
    split_sentences,
    take_conversation,
)
from text.instances import KINDS, TEXT, InstanceKind
from text.stored import describe_corpus, make_table, make_tables, write_dataset
from text.tokenizers import tokenizer_fingerprint
from text.workers import prepare_in_workers

CHUNK_CHARACTERS = 500_000  # of text per task: about half a second
VALIDATION_FRACTION = 0.05  # share of documents, unless a split exists


def make_dataset(source: str, splits: dict[str, list[list[str]]], tokenizer, folder: Path, args) -> dict:
    """Tokenize the splits into a folder, and return the contents of its corpus.json."""
    tables = tokenize_splits(splits, tokenizer, args)
    for name, table in tables.items():
        if not table.num_rows:
            raise UserError(f"too little text for a {name} split: give more text")
    corpus = describe_corpus(tables, tokenizer, args) | {
        "documents": {name: len(documents) for name, documents in splits.items()},
        "source": source,
    }
    write_dataset(tables, corpus, folder)
    return corpus


def split_documents(documents: list[list[str]], args) -> dict[str, list[list[str]]]:
    """Split off random documents for validation, if possible within its share; cut a single one near its end."""
    if len(documents) == 1 and KINDS[args.objective].has_turns:
        raise UserError("there is a single conversation, and none for a validation split: give more")
    if len(documents) == 1:
        kind, units = "paragraphs", documents[0]
        if len(units) == 1:
            kind, units = "sentences", split_sentences(units, args.language)
        if len(units) == 1:
            raise UserError("the text is a single sentence: give more text")
        cut = min(max(round(len(units) * (1 - VALIDATION_FRACTION)), 1), len(units) - 1)
        print(f"one document: its last {len(units) - cut} of {len(units)} {kind} become the validation split")
        return {"train": [units[:cut]], "validation": [units[cut:]]}
    sizes = [count_characters(document) for document in documents]
    shuffled = random.Random(args.seed).sample(range(len(documents)), len(documents))
    fitting = [index for index in shuffled if sizes[index] <= VALIDATION_FRACTION * sum(sizes)]
    if not fitting:
        fitting = [min(shuffled, key=sizes.__getitem__)]
    held_out = set(fitting[: min(max(1, round(VALIDATION_FRACTION * len(documents))), len(documents) - 1)])
    train = [document for index, document in enumerate(documents) if index not in held_out]
    return {"train": train, "validation": [documents[index] for index in sorted(held_out)]}


class ChunkEncoder:
    """A map for workers from (split, [(index, paragraphs)]) to columns and their lengths, or to ids for blocks."""

    def __init__(self, tokenizer, args):
        self.tokenizer, self.args, self.kind = tokenizer, args, KINDS[args.objective]
        self.encoder = make_text_encoder(tokenizer)

    def __getitem__(self, key: tuple[str, list[tuple[int, list[str]]]]):
        (split, chunk), args = key, self.args
        if self.kind.has_turns:
            return encode_conversations([messages for _, messages in chunk], self.tokenizer)
        if not self.kind.has_pairs:
            return encode_documents([paragraphs for _, paragraphs in chunk], self.kind, self.tokenizer, self.encoder)
        documents = [split_sentences(paragraphs, args.language) for _, paragraphs in chunk]
        generators = [make_document_random(args.seed, split, index) for index, _ in chunk]
        return make_instances(documents, generators, args.seq_length, self.tokenizer, self.encoder)


def tokenize_splits(splits: dict[str, list[list[str]]], tokenizer, args) -> dict:
    """Return an Arrow table of instances for each split, in the order of the documents."""
    import pyarrow

    kind = KINDS[args.objective]
    chunks = [(name, chunk) for name, documents in splits.items() for chunk in make_chunks(documents)]
    total = sum(count_characters(document) for documents in splits.values() for document in documents)
    parts = {name: [] for name in splits}
    num_workers = args.num_proc if args.num_proc > 1 else 0
    results = prepare_in_workers(ChunkEncoder(tokenizer, args), chunks, num_workers)
    try:
        with show_progress("tokenizing", total) as progress:
            for (name, chunk), part in zip(chunks, results, strict=True):
                parts[name].append(part)
                progress.update(sum(count_characters(document) for _, document in chunk))
    except UserError as e:  # from a worker, whose traceback precedes the text
        raise UserError(str(e).rpartition("UserError: ")[2].strip()) from None
    except RuntimeError as e:
        if not str(e).startswith("DataLoader worker"):
            raise
        raise UserError("a tokenizing process was killed, probably out of memory: lower --num_proc") from None
    if kind.has_pairs:
        return {name: pyarrow.concat_tables(make_table(*part) for part in parts[name]) for name in splits}
    if kind.has_turns:
        blocks = {name: pack_split(name, parts[name], args.seq_length) for name in splits}
    else:
        blocks = {name: cut_blocks(np.concatenate(parts[name]), args.seq_length, kind, tokenizer) for name in splits}
    return {name: pyarrow.concat_tables(make_tables(*blocks[name])) for name in splits}


def pack_split(name: str, parts: list, seq_length: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the columns of a split of conversations, joined end to end, and the lengths of its sequences."""
    columns = {column: np.concatenate([part[column] for part, _ in parts]) for column in ("input_ids", "labels")}
    columns, lengths, dropped = pack_conversations(columns, np.concatenate([part for _, part in parts]), seq_length)
    what = f"without an assistant's turn in their first {seq_length} tokens"
    if not len(lengths):
        raise UserError(f"all conversations of the {name} split are {what}: give others, or longer sequences")
    if dropped:
        print(f"{name}: dropped {dropped:,} conversations {what}", flush=True)
    return columns, lengths


def make_chunks(documents: list[list[str]]) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield lists of documents with their indices, each of about CHUNK_CHARACTERS characters."""
    chunk, size = [], 0
    for index, document in enumerate(documents):
        chunk.append((index, document))
        size += count_characters(document)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def count_characters(document: list[str]) -> int:
    """Return the number of characters of all paragraphs."""
    return sum(map(len, document))


def tokenize_for_trainer(
    source: str, splits: dict, tokenizer, kind: InstanceKind, seed: int, args: DataArguments
) -> Path:
    """Return the cache's folder of these documents' dataset, which is made if it is not there.

    :param source: the origin of the documents, for corpus.json
    :param splits: the documents, as lists of paragraphs, for train and optionally for validation
    """
    load_sentence_splitter(args.language)
    for name, documents in splits.items():
        if not documents:
            where = args.validation_file if name == "validation" and args.validation_file else source
            raise UserError(f"no text for the {name} split in {where}: give files that are not empty")
    options = SimpleNamespace(
        objective=kind.name,
        seq_length=args.max_sequence_length,
        language=args.language,
        seed=seed,
        num_proc=min(8, os.cpu_count() or 1),
    )
    facts = [kind.name, options.seq_length, seed, args.language]
    facts += [tokenizer.chat_template] if kind.has_turns else []
    digest = hashlib.sha256(json.dumps([*facts, tokenizer_fingerprint(tokenizer)]).encode())
    for name, documents in splits.items():
        digest.update(f"{name} {len(documents)}".encode())
        for document in documents:
            digest.update("\n".join([*document, ""]).encode("utf-8", "replace") + b"\0")
    cache_dir = Path(args.dataset_cache_dir)
    folder = cache_dir / f"text-{digest.hexdigest()[:16]}"
    make_folder("--dataset_cache_dir", cache_dir)
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            if "validation" not in splits:
                splits = split_documents(splits["train"], options)
            with unfinished_folder(folder) as unfinished:
                make_dataset(source, splits, tokenizer, unfinished, options)
                unfinished.rename(folder)
    return folder


def load_hub_splits(
    name: list[str], text_column: str, cache_dir: str | Path | None, alternative: str, kind: InstanceKind = TEXT
) -> tuple[str, dict[str, list[list[str]]]]:
    """Return a dataset's name, and the documents of its train split and validation split if there is one.

    A record is a document, but text in WikiText format is split into its articles. Conversations are in `messages`.

    :param name: the name of a dataset on the Hub or of a folder, and optionally that of its configuration
    :param alternative: the flags that need no connection, for the error text
    """
    what, is_folder = f"the dataset {name[0]}", Path(name[0]).is_dir()
    with contextlib.nullcontext() if is_folder else hub(what, alternative):
        import datasets  # not earlier, because it decides at import whether it is offline

        try:
            found = datasets.load_dataset(*name, cache_dir=cache_dir)
        except (OSError, ValueError) as e:
            if not is_folder:
                raise
            raise UserError(f"{what} cannot be read ({first_line(e)})") from e
    if "train" not in found:
        raise UserError(f"{what} has no split train, but {', '.join(found)}: use another dataset")
    splits = {}
    for split in [name for name in ("train", "validation") if name in found]:
        if kind.has_turns:
            try:
                splits[split] = [take_conversation(record) for record in found[split]]
            except ValueError as e:
                raise UserError(f"{what} {e} in its {split} split: see docs/data.md") from None
            continue
        if text_column not in found[split].column_names:
            columns = ", ".join(found[split].column_names)
            raise UserError(f"{what} has only the columns {columns}: give one of them as --text_column")
        texts = [text or "" for text in found[split][text_column]]
        if any(not isinstance(text, str) for text in texts):
            raise UserError(f"{what}: column {text_column} is not text: give another --text_column")
        first = next((text for text in texts if text.strip()), "")
        if WIKITEXT_TITLE.match(first.strip("\n")):
            splits[split] = split_articles(texts)
        else:
            splits[split] = [paragraphs for text in texts if (paragraphs := split_paragraphs(text))]
    return "/".join(name), splits
