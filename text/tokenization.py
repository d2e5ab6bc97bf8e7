"""Tokenization of documents by several processes, for tokenize_wikitext103.py and for trainers that read text files.

The functions' `args` are TokenizeArguments of tokenize_wikitext103.py, or have the same names.
"""

import contextlib
import copy
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
    find_begin_token,
    load_sentence_splitter,
    make_document_random,
    make_instances,
    pack_conversations,
    split_articles,
    split_paragraphs,
    split_sentences,
    take_conversation,
)
from text.instances import KINDS, TEXT, Documents, InstanceKind, Sequences
from text.stored import describe_corpus, make_table, write_dataset
from text.tokenizers import tokenizer_fingerprint
from text.workers import prepare_in_workers

CHUNK_CHARACTERS = 500_000  # of text per task: about half a second
VALIDATION_FRACTION = 0.05  # share of documents, unless a split exists


def make_dataset(source: str, splits: dict[str, Documents], tokenizer, folder: Path, args) -> dict:
    """Tokenize the splits into a folder, and return the contents of its corpus.json."""
    tables = tokenize_splits(splits, tokenizer, args)
    counts = {name: len(part) for name, part in splits.items()}
    corpus = describe_corpus(tables, tokenizer, args) | {"documents": counts, "source": source}
    write_dataset(tables, corpus, folder)
    return corpus


def split_documents(documents: Documents, args) -> dict[str, Documents]:
    """Split off random documents for validation; if all are longer than its share, cut the longest near its end."""
    if len(documents) == 1 and KINDS[args.objective].has_turns:
        raise UserError("there is a single conversation, and none for a validation split: give more")
    sizes = [sum(map(len, document)) for document in documents]
    most = VALIDATION_FRACTION * sum(sizes)
    shuffled = random.Random(args.seed).sample(range(len(documents)), len(documents))
    fitting = [index for index in shuffled if sizes[index] <= most]
    if not fitting and not KINDS[args.objective].has_turns:
        longest = max(range(len(documents)), key=sizes.__getitem__)
        units = documents[longest]
        units = units if len(units) > 1 else split_sentences(units, args.language)
        if len(units) > 1:
            cut = min(max(round(len(units) * (1 - most / sizes[longest])), 1), len(units) - 1)
            print(f"the last {len(units) - cut} of {len(units)} parts of the longest document are for validation")
            train = [*documents[:longest], units[:cut], *documents[longest + 1 :]]
            return {"train": train, "validation": [units[cut:]]}
        if len(documents) == 1:
            raise UserError("the text is a single sentence: give more text")
    fitting = fitting or [min(shuffled, key=sizes.__getitem__)]
    held_out = set(fitting[: min(max(1, round(VALIDATION_FRACTION * len(documents))), len(documents) - 1)])
    train = [document for index, document in enumerate(documents) if index not in held_out]
    return {"train": train, "validation": [documents[index] for index in sorted(held_out)]}


class ChunkEncoder:
    """An encoder of documents for workers: to columns, joined end to end, and lengths, or to ids for blocks."""

    def __init__(self, tokenizer, kind: InstanceKind, seq_length: int, seed: int):
        self.tokenizer = tokenizer
        self.kind = kind
        self.seq_length = seq_length
        self.seed = seed
        # for text of any length, in which "[SEP]" is ordinary text too
        self.encoder = copy.deepcopy(tokenizer.backend_tokenizer)
        self.encoder.no_truncation()
        self.encoder.no_padding()
        self.encoder.encode_special_tokens = True

    def __getitem__(self, key: tuple[str, list[tuple[int, list[str], str]]]):
        """Encode documents of a split, given as (number in the split, paragraphs, language)."""
        split, chunk = key
        documents = [paragraphs for _, paragraphs, _ in chunk]
        if self.kind.has_turns:
            return encode_conversations(documents, self.tokenizer)
        if not self.kind.has_pairs:
            return encode_documents(documents, self.kind, self.tokenizer, self.encoder)
        documents = [split_sentences(paragraphs, language) for _, paragraphs, language in chunk]
        generators = [make_document_random(self.seed, split, number) for number, *_ in chunk]
        return make_instances(documents, generators, self.seq_length, self.tokenizer, self.encoder)


def tokenize_splits(splits: dict[str, Documents], tokenizer, args) -> dict:
    """Return an Arrow table of instances for each split, in the order of the documents."""
    kind = KINDS[args.objective]
    chunks = [(name, chunk) for name, documents in splits.items() for chunk in make_chunks(documents, args.language)]
    parts = {name: [] for name in splits}
    encoder = ChunkEncoder(tokenizer, kind, args.seq_length, args.seed)
    results = prepare_in_workers(encoder, chunks, args.num_proc if args.num_proc > 1 else 0)
    try:
        with show_progress("tokenizing", CHUNK_CHARACTERS * len(chunks)) as progress:
            for (name, _), part in zip(chunks, results, strict=True):
                parts[name].append(part)
                progress.update(CHUNK_CHARACTERS)
    except UserError as e:  # from a worker, whose traceback precedes the text
        raise UserError(str(e).rpartition("UserError: ")[2].strip()) from None
    except RuntimeError as e:
        if not str(e).startswith("DataLoader worker"):
            raise
        raise UserError("a tokenizing process was killed, probably out of memory: lower --num_proc") from None
    tables = {}
    for name, part in parts.items():
        if kind.has_pairs:
            columns, lengths = join_parts(part)
        elif kind.has_turns:
            columns, lengths, dropped = pack_conversations(*join_parts(part), args.seq_length)
            what = f"without an assistant's turn in their first {args.seq_length} tokens"
            if not len(lengths):
                raise UserError(f"all conversations of the {name} split are {what}: give others, or longer sequences")
            if dropped:
                print(f"{name}: dropped {dropped:,} conversations {what}", flush=True)
        else:
            columns, lengths = cut_blocks(np.concatenate(part), args.seq_length, kind, tokenizer)
        if not len(lengths):
            raise UserError(f"too little text for a {name} split: give more text")
        tables[name] = make_table(columns, lengths)
    return tables


def join_parts(parts: list[Sequences]) -> Sequences:
    """Join the columns and the lengths of several chunks."""
    columns = {name: np.concatenate([columns[name] for columns, _ in parts]) for name in parts[0][0]}
    return columns, np.concatenate([lengths for _, lengths in parts])


def make_chunks(documents: Documents, language: str) -> Iterator[list[tuple[int, list[str], str]]]:
    """Yield lists of documents for ChunkEncoder, each of about CHUNK_CHARACTERS characters."""
    chunk = []
    size = 0
    for index, document in enumerate(documents):
        chunk.append((index, document, language))
        size += sum(map(len, document))
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def tokenize_for_trainer(
    source: str, splits: dict, tokenizer, kind: InstanceKind, seed: int, args: DataArguments
) -> Path:
    """Return the cache's folder of these documents' dataset, which is made if it is not there."""
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
    facts = [kind.name, options.seq_length, seed, args.language, tokenizer_fingerprint(tokenizer)]
    facts += [tokenizer.chat_template] if kind.has_turns else find_begin_token(tokenizer, kind)
    digest = hashlib.sha256(json.dumps(facts).encode())
    for split in splits.items():
        for piece in json.JSONEncoder().iterencode(split):  # a whole corpus as one text would need much memory
            digest.update(piece.encode())
    cache_dir = Path(args.dataset_cache_dir)
    folder = cache_dir / f"text-{digest.hexdigest()[:16]}"
    make_folder("--dataset_cache_dir", cache_dir)
    if folder.exists():  # without the lock, because a shared cache may be read-only
        return folder
    with unfinished_folder(folder) as unfinished, locked(folder.with_suffix(".lock")):
        if not folder.exists():
            if "validation" not in splits:
                splits = split_documents(splits["train"], options)
            make_dataset(source, splits, tokenizer, unfinished, options)
            unfinished.rename(folder)
    return folder


def load_hub_splits(
    name: list[str], text_column: str, cache_dir: str | Path | None, alternative: str, kind: InstanceKind = TEXT
) -> tuple[str, dict[str, Documents]]:
    """Return a dataset's name, and the documents of its train split and validation split if there is one.

    A record is a document, but text in WikiText format is split into its articles. Conversations are in `messages`.

    :param name: the name of a dataset on the Hub or of a folder, and optionally that of its configuration
    :param alternative: the flags that need no connection, for the error text
    """
    what = f"the dataset {name[0]}"
    is_folder = Path(name[0]).is_dir()
    with contextlib.nullcontext() if is_folder else hub(what, alternative):
        import datasets  # not earlier, because it decides at import whether it is offline

        try:
            found = datasets.load_dataset(*name, cache_dir=cache_dir)
            if is_folder and next(iter(found.values())).info.builder_name == "text":  # a file, as in `read_documents`
                found = datasets.load_dataset(*name, cache_dir=cache_dir, sample_by="document")
        except Exception as e:  # many types, of any file format
            reason = first_line(e)
            if isinstance(e, datasets.exceptions.DatasetGenerationError):  # only its cause says what is malformed
                reason = " ".join(str(e.__cause__ or e).split())[:200]
            if not is_folder:
                raise ValueError(reason) from e  # which `hub` expects
            raise UserError(f"{what} cannot be read ({reason})") from e
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
        if getattr(found[split].features.get(text_column), "dtype", None) not in ("string", "large_string"):
            columns = ", ".join(found[split].column_names)
            raise UserError(f"{what} has no text in {text_column}: give another --text_column (there is {columns})")
        texts = [text or "" for text in found[split][text_column]]
        first = next((text for text in texts if text.strip()), "").strip("\n")
        if WIKITEXT_TITLE.match(first.split("\n", 1)[0]):
            has_lines = not any("\n" in text.strip("\n") for text in texts)  # and not whole files
            files = [texts] if has_lines else [text.split("\n") for text in texts]
            splits[split] = [article for lines in files for article in split_articles(lines)]
        else:
            splits[split] = [paragraphs for text in texts if (paragraphs := split_paragraphs(text, kind))]
    return "/".join(name), splits
