"""An endless mixture of text sources, which is read, tokenized and shuffled during training.

    python run_trainer.py --streaming --sources configs/sources.json --experiment_prefix my_albert

To look at the first documents of a mixture:

    python -c "from text.streams import *; stream = stream_documents(read_sources('configs/sources.json'), seed=0); \
        [print(text[:70].split()) for _, chunk in itertools.islice(stream, 2) for _, _, text in chunk]; stream.close()"

docs/data.md describes the file of sources. In each pass over a source, the peer's seed determines a new order of its
files and of their parts: 16 MiB of a plain file, or a row group of parquet. A compressed file, and a file of a Hub
dataset that is not parquet, can only be read from its beginning: divide large ones.

A position in each source is enough to resume, because a document's treatment depends only on its number and the seed.
The mixtures of datasets (5.2) cannot resume like this. They also end at a broken line, and repeat the same order.
"""

import codecs
import contextlib
import dataclasses
import functools
import glob
import gzip
import io
import itertools
import json
import logging
import lzma
import os
import queue
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

import numpy as np
import pyarrow.parquet
import pydantic
from fsspec.implementations.http_sync import HTTPFileSystem

from common.console import UserError, first_line, suggest
from text.documents import cut_blocks, load_sentence_splitter, split_paragraphs, take_text
from text.http import FIRST_DELAY, HEADERS, LONGEST_DELAY, STALL_SECONDS, TEMPORARY_ANSWERS, is_url
from text.instances import InstanceKind
from text.tokenization import ChunkEncoder

logger = logging.getLogger("streams")

FORMATS = {"jsonl": "jsonl", "json": "jsonl", "ndjson": "jsonl", "txt": "text", "text": "text", "parquet": "parquet"}
PACKED = (".gz", ".xz", ".zst")
PART_BYTES = 2**24  # of a plain file
LONGEST_LINE = 2**26  # bytes; longer lines are broken, so that they cannot exhaust the memory
TOO_LONG = b"\xff\xff"  # stands for a longer line; UTF-8 has no such bytes
HTTP_BLOCK = 2**20  # bytes of a request
TEXT_BYTES = 10_000  # of a text file, for one document, which ends at a blank line
CHUNK_CHARACTERS = 100_000  # the maximum that a worker gets at a time: a tenth of a second
CHUNK_DOCUMENTS = 256
READ_AHEAD = 64  # documents of each source
LATE_SECONDS = 10.0  # the wait for a source before the others continue without it
PATIENCE = 600.0  # seconds without a record, over all attempts, before a file is skipped
START_PATIENCE = 20.0  # the same at the start
EMPTY_SECONDS = 60.0  # until the next pass over a source without any text
BAD_START = 100  # broken records at the beginning of a source that make the start fail


class Broken(Exception):
    """The error of an unusable record or rest of a file; its text is the reason."""


class LostFile(Broken):
    """The error of the unusable rest of a file."""


READ_ERRORS = (Broken, OSError, EOFError, ValueError, KeyError, zlib.error, lzma.LZMAError, pyarrow.ArrowException)


class Position(NamedTuple):
    """The position at which to continue in a source."""

    number: int = 0  # number of the pass
    files: int = 0  # number of the source's files; 0: the pass has not begun
    place: int = 0  # index in the order of the files in this pass
    part: int = 0  # index in the order of this file's parts
    record: int = 0  # number of the part's records that were read; to continue, they are read again


Read = tuple[str | Broken, Position]  # a document's text or the reason why it is broken, and the position after it

# ---------------------------------------------------------------- files, local and http


def find_packing(path: str) -> str:
    """Return which of the suffixes PACKED a file or URL has, or an empty text."""
    name = path.partition("?")[0] if is_url(path) else path
    return next(filter(name.lower().endswith, PACKED), "")


def open_file(path: str) -> BinaryIO:
    """Open a local file or URL to read decompressed bytes; errors are of READ_ERRORS."""
    if is_url(path):
        web = HTTPFileSystem(headers=HEADERS, timeout=STALL_SECONDS)
        file = io.BufferedReader(web.open(path, block_size=HTTP_BLOCK), HTTP_BLOCK)
    else:
        file = open(path, "rb")  # noqa: SIM115
    packing = find_packing(path)
    if packing == ".gz":
        return gzip.GzipFile(fileobj=file)
    if packing == ".xz":
        return lzma.LZMAFile(file)
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd")) if packing else file


def explain_failure(error: Exception) -> tuple[str, bool]:
    """Return the reason of an error of READ_ERRORS, and whether a web server may be able to send the file later."""
    # fsspec raises FileNotFoundError for any failed request for a file's size
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    # errors of requests have a response, which is None without an answer; other OSErrors are of damaged files
    code = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, FileNotFoundError) or code == 404:
        return "No such file", False
    is_temporary = hasattr(error, "response") and (code is None or code >= 500 or code in TEMPORARY_ANSWERS)
    is_temporary |= isinstance(error, ConnectionError)  # of datasets, after its own retries
    return getattr(error, "strerror", None) or first_line(error), is_temporary


def read_lines(file: BinaryIO, is_packed: bool, part: tuple[int, int]) -> Iterator[bytes]:
    """Yield the lines that begin in the part."""
    begin, end = part
    position = max(begin - 1, 0)
    if not is_packed:
        file.seek(position)
    if begin:
        # a line of the previous part, or only its line break; it may be longer than this part
        position += len(file.readline(end - position))
    while position < end and (line := file.readline(LONGEST_LINE)):
        text = line.removeprefix(codecs.BOM_UTF8) if position == 0 else line
        position += len(line)
        if len(line) == LONGEST_LINE:
            text = TOO_LONG
            while position < end and not line.endswith(b"\n") and (line := file.readline(LONGEST_LINE)):
                position += len(line)
        yield text


def join_lines(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield documents of at least TEXT_BYTES, to a blank line, or twice as many."""
    kept = []
    size = 0
    for line in lines:
        kept.append(line)
        size += len(line)
        if size >= TEXT_BYTES and (line.isspace() or size >= 2 * TEXT_BYTES):
            yield b"".join(kept)
            kept = []
            size = 0
    if kept:
        yield b"".join(kept)


def read_parquet(table: pyarrow.parquet.ParquetFile, column: str, group: int) -> Iterator[pyarrow.Scalar]:
    """Yield the values in a column of one row group."""
    if column not in table.schema_arrow.names:
        raise Broken(f"no {column} (there is {', '.join(table.schema_arrow.names)[:200]}): give another text_column")
    batches = table.iter_batches(batch_size=256, row_groups=[group], columns=[column])
    return itertools.chain.from_iterable(batch.column(0) for batch in batches)


def read_examples(shard) -> Iterator[dict]:
    """Yield the records of a datasets.IterableDataset."""
    from datasets.exceptions import DatasetsError

    try:
        yield from shard
    except DatasetsError as e:
        raise Broken(str(e)) from e


# ---------------------------------------------------------------- sources


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(strict=True, extra="forbid"))
class Source:
    """An entry of a file of sources, which counts its documents and broken records."""

    path: Annotated[str | list[str], pydantic.Field(min_length=1)]
    name: str = ""
    format: Literal["", "jsonl", "text", "parquet", "hub"] = ""
    text_column: str = "text"
    weight: float = pydantic.Field(1.0, gt=0, allow_inf_nan=False)
    language: str = "english"
    config: str | None = None
    split: str = "train"

    def __post_init__(self):
        paths = [self.path] if isinstance(self.path, str) else self.path
        self.name = self.name or paths[0]
        name = paths[0].partition("?")[0] if is_url(paths[0]) else paths[0]
        suffix = re.sub(r"\.(gz|xz|zst)$", "", name.lower()).rpartition(".")[2]
        self.format = self.format or FORMATS.get(suffix, "hub")
        self.files = []
        self.dataset = None
        for path in paths if self.format != "hub" else []:
            is_pattern = glob.has_magic(path) and not is_url(path) and not os.path.exists(path)
            self.files += sorted(glob.glob(path, recursive=True)) if is_pattern else [path]
        self.documents = self.broken = 0

    @contextlib.contextmanager
    def open(self, index: int) -> Iterator[tuple[list, Callable]]:
        """Open a file; yield its parts, and a function that yields the records of a part as the file holds them."""
        if self.format == "hub":
            parts = self.dataset.shard(num_shards=len(self.files), index=index).reshard()  # row groups of parquet files
            yield [parts.shard(parts.num_shards, number) for number in range(parts.num_shards)], read_examples
            return
        path = self.files[index]
        with open_file(path) as file:
            if self.format == "parquet":
                table = pyarrow.parquet.ParquetFile(file)
                yield range(table.num_row_groups), functools.partial(read_parquet, table, self.text_column)
            else:
                join = join_lines if self.format == "text" else iter
                # a packed file is one part of unknown size
                is_packed = bool(find_packing(path))
                size, length = (1, sys.maxsize) if is_packed else (file.seek(0, io.SEEK_END), PART_BYTES)
                parts = [(begin, begin + length) for begin in range(0, size, length)]
                yield parts, lambda part: join(read_lines(file, is_packed, part))

    def decode(self, record: object) -> str:
        """Return the text of a record of `open`; raise a ValueError or RecursionError if it is broken."""
        if self.format in ("text", "jsonl") and TOO_LONG in record:
            raise ValueError(f"a line is longer than {LONGEST_LINE // 2**20} MiB")
        # A line of UTF-16 is cut within a character, and json would decode some of them to another text.
        if self.format in ("text", "jsonl") and b"\0" in record:
            raise ValueError("it has NUL bytes: convert it to UTF-8")
        if self.format == "text":
            return record.decode()
        if self.format == "parquet":
            record = {self.text_column: record.as_py()}
        if self.format == "jsonl":
            if record.isspace():
                return ""
            record = json.loads(record)
        return take_text(record, self.text_column)

    def read_pass(
        self, seed: int, position: Position, stop: threading.Event, patience: float = PATIENCE
    ) -> Iterator[Read]:
        """Yield documents from a position to the end of its pass."""
        if self.format == "hub" and not self.dataset:
            # datasets reads the files of a dataset on the Hub, and skips the parts of a file that it cannot parse
            import datasets

            self.dataset = datasets.load_dataset(self.path, self.config, split=self.split, streaming=True)
            self.files = [f"file {number}" for number in range(self.dataset.num_shards)]
        key = [seed, zlib.crc32(self.name.encode()), position.number]
        order = np.random.default_rng(key).permutation(len(self.files))
        if position.files not in (0, len(order)):
            return  # files were added or removed, so the order is different
        position = position._replace(files=len(order))
        for place in range(position.place, len(order)):
            start = position if place == position.place else Position(position.number, len(order), place)
            yield from self.read_file(int(order[place]), key, start, stop, patience)

    def read_file(
        self, index: int, key: list[int], position: Position, stop: threading.Event, patience: float
    ) -> Iterator[Read]:
        """Yield like read_pass, to the end of a file; continue at the same position if its server fails."""
        delay = FIRST_DELAY
        deadline = time.monotonic() + patience
        while True:
            try:
                for text, after in self.read_parts(index, key, position):
                    position = after
                    yield text, position
                    delay = FIRST_DELAY
                    deadline = time.monotonic() + patience
                return
            except READ_ERRORS as e:
                reason, is_temporary = explain_failure(e)
                problem = f"{self.files[index]}: {reason}"
                if not is_temporary or time.monotonic() + delay > deadline:
                    yield LostFile(f"{problem}; skipping the rest of it"), position
                    return
            logger.warning(f"{problem}; trying again in {delay:g} s")
            if stop.wait(delay):
                return
            delay = min(2 * delay, LONGEST_DELAY)

    def read_parts(self, index: int, key: list[int], position: Position) -> Iterator[Read]:
        """Yield like read_pass, to the end of a file; errors are of READ_ERRORS."""
        with self.open(index) as (parts, read):
            order = np.random.default_rng([*key, index]).permutation(len(parts))
            for part in range(position.part, len(parts)):
                if part != position.part:
                    position = Position(position.number, position.files, position.place, part)
                which = int(order[part])
                for found in itertools.islice(read(parts[which]), position.record, None):
                    position = position._replace(record=position.record + 1)
                    try:
                        text = self.decode(found)
                    except (ValueError, RecursionError) as e:
                        where = f"{self.files[index]}, record {position.record} of part {which + 1}"
                        text = Broken(f"{where} is broken ({e}): see its format and text_column")
                    yield text, position

    def read(self, seed: int, position: Position, stop: threading.Event) -> Iterator[tuple[str, Position]]:
        """Yield (document's text, position after it) endlessly, pass after pass; count and log broken records."""
        while not stop.is_set():
            is_empty = position.files == 0
            for text, behind in self.read_pass(seed, position, stop):
                if stop.is_set():
                    return
                if isinstance(text, Broken):
                    self.broken += 1
                    # the first, the tenth, the hundredth, ...
                    if isinstance(text, LostFile) or str(self.broken).strip("0") == "1":
                        logger.warning(f"source {self.name}: skipped broken record number {self.broken:,}: {text}")
                elif text and not text.isspace():
                    is_empty = False
                    yield text, behind
            if is_empty and not stop.is_set():
                logger.warning(f"source {self.name}: a whole pass without any text; next pass in {EMPTY_SECONDS:g} s")
                stop.wait(EMPTY_SECONDS)
            position = Position(position.number + 1)

    def find_problem(self) -> str | None:
        """Return the reason why the source's beginning has no text, or None if it has."""
        problem = ""
        deadline = time.monotonic() + START_PATIENCE
        try:
            records = self.read_pass(0, Position(), threading.Event(), START_PATIENCE)
            for text, _ in itertools.islice(records, BAD_START):
                if not isinstance(text, Broken) and text.strip():
                    return None
                problem = problem or str(text).strip()
                if time.monotonic() > deadline:
                    break
        except Exception as e:  # many types, of any file format
            problem = first_line(e)
        return problem or f"there is no text in {self.path}"


def read_sources(path: str | Path) -> list[Source]:
    """Read the sources of a JSON file; raise a UserError if it is invalid."""
    names = [item.name for item in dataclasses.fields(Source)]
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("it is not a list of objects")
    except (OSError, ValueError) as e:
        raise UserError(f"--sources {path} cannot be read ({e}); configs/sources.json is an example") from e
    sources = []
    for entry in entries:
        where = f"--sources {path}, {entry.get('name') or entry.get('path') or entry}"
        try:
            source = Source(**entry)
        except pydantic.ValidationError as e:
            problem = e.errors()[0]
            name = str(problem["loc"][0])
            hint = "" if name in names else f"{suggest(name, names)} (fields: {', '.join(names)})"
            raise UserError(f"{where}: {problem['msg']}: {name}{hint}") from None
        if source.format == "hub" and (isinstance(source.path, list) or is_url(source.path)):
            raise UserError(f"{where}: the path does not show the format: give jsonl, text or parquet")
        load_sentence_splitter(source.language)
        if source.name in [other.name for other in sources]:
            raise UserError(f"{where}: two sources have this name: give each its own name")
        sources.append(source)
    return sources


# ---------------------------------------------------------------- the mixture


class Reader(threading.Thread):
    """A thread that reads a source ahead, so that a slow source does not delay the others."""

    def __init__(self, source: Source, seed: int, position: Position, stop: threading.Event):
        super().__init__(daemon=True)
        self.source = source
        self.seed = seed
        self.position = position
        self.stop = stop
        self.ahead = queue.Queue(READ_AHEAD)
        self.is_late = False
        self.start()

    def run(self) -> None:
        """Read documents into the queue; an error goes there too, in place of a document."""
        try:
            for document in self.source.read(self.seed, self.position, self.stop):
                self.ahead.put(document)
        except Exception as e:  # `take` raises it
            self.ahead.put(e)

    def take(self, seconds: float) -> str:
        """Return the next document; raise queue.Empty if there is none in time."""
        document = self.ahead.get(timeout=seconds)
        if isinstance(document, Exception):
            raise document
        text, self.position = document
        self.source.documents += 1
        return text

    def end(self) -> None:
        """Let the thread end: `stop` is set, and the thread may wait for room in the queue, or for a server."""
        while self.is_alive() and not self.ahead.empty():
            self.ahead.get()
        self.join(0.5)


def stream_documents(
    sources: list[Source], seed: int, state: dict | None = None, interrupted: threading.Event | None = None
) -> Iterator[tuple[dict, list[tuple[int, int, str]]]]:
    """Yield the documents of a mixture in chunks, endlessly: (state before it, [(number, index of its source, text)]).

    From this state, another stream with the same seed continues with the same chunk, unless a source was late. Then the
    other sources continue, and the late one may join later. Threads start at the first chunk, so fork before it.

    :param interrupted: an event that ends the iteration
    """
    interrupted = interrupted or threading.Event()
    stop = threading.Event()
    state = state or {"documents": 0, "positions": {}}
    count = state["documents"]
    readers = [Reader(source, seed, Position(*state["positions"].get(source.name, ())), stop) for source in sources]
    try:
        while True:
            state = {"documents": count, "positions": {r.source.name: list(r.position) for r in readers}}
            generator = np.random.default_rng([seed, count])
            chunk = []
            characters = 0
            while characters < CHUNK_CHARACTERS and len(chunk) < CHUNK_DOCUMENTS:
                if (taken := take_document(readers, generator, interrupted)) is None:
                    return
                chunk.append((count, *taken))
                characters += len(taken[1])
                count += 1
            yield state, chunk
    finally:
        stop.set()
        for reader in readers:
            reader.end()


def take_document(
    readers: list[Reader], generator: np.random.Generator, interrupted: threading.Event
) -> tuple[int, str] | None:
    """Return the index of a random source and its next document, or None if the stream is interrupted."""
    weights = np.array([reader.source.weight for reader in readers])
    while not interrupted.is_set():
        for reader in readers:
            reader.is_late = reader.is_late and reader.ahead.empty()
        is_ready = np.array([not reader.is_late for reader in readers])
        chances = weights * is_ready if is_ready.any() else weights
        chosen = int(generator.choice(len(weights), p=chances / chances.sum()))
        reader = readers[chosen]
        deadline = time.monotonic() + LATE_SECONDS * is_ready.any()
        while not interrupted.is_set():
            with contextlib.suppress(queue.Empty):
                return chosen, reader.take(seconds=0.1)
            if time.monotonic() > deadline:
                if not reader.is_late:
                    name = reader.source.name
                    logger.warning(f"source {name} is late: continuing without it until it yields something")
                reader.is_late = True
                break
    return None


class TrainingDataset(ChunkEncoder):
    """The train split of --streaming; text.batches.StreamedBatches makes batches of it.

    In DataLoader's workers, it maps a chunk of stream_documents, (state, documents), to (state, columns joined end to
    end, lengths). The last block of each chunk may be shorter.
    """

    def __init__(self, sources: list[Source], tokenizer, kind: InstanceKind, seq_length: int, shuffle_buffer: int):
        super().__init__(tokenizer, kind, seq_length, seed=0)
        self.sources = sources
        self.shuffle_buffer = shuffle_buffer

    def __getitem__(self, key: tuple[dict | None, list]) -> tuple:
        state, chunk = key
        documents = [(number, split_paragraphs(text, self.kind), self.sources[i].language) for number, i, text in chunk]
        encoded = super().__getitem__(("stream", documents))
        if not self.kind.has_pairs:
            encoded = cut_blocks(encoded, self.seq_length, self.kind, self.tokenizer, keep_rest=True)
        return state, *encoded
