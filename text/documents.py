"""Read files as documents, and turn documents into sentence-order pairs or full blocks.

A document is a list of paragraphs. To see a file's sentences:

    python -c "from text.documents import *; print(split_sentences(read_documents('README.md')[0])[:5])"
"""

import codecs
import csv
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import random
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jinja2
import numpy as np

from common.console import UserError, first_line
from text.instances import IGNORED_LABEL, PAIRS, TEXT, Columns, Documents, InstanceKind, Sequences

WIKITEXT_TITLE = re.compile(r"^ ?= (?!=)[^\n]* = *$")
WIKITEXT_HEADING = re.compile(r"^(?:= )+(.*?)(?: =)+$")
SAMPLE_TITLE = re.compile(
    r"EMMA|MANSFIELD PARK|NORTHANGER ABBEY|Persuasion|PRIDE AND PREJUDICE|SENSE AND SENSIBILITY|VOLUME [IVX]+"
)
SAMPLE_CHAPTER = re.compile(r"(?:CHAPTER|Chapter) (?:[IVXLC]+|\d+)")
HALF_PAIR = re.compile(r"\\ud[89a-f]", re.IGNORECASE)  # or a whole one
PART_CHARACTERS = 50_000  # encoded at once, because some tokenizers need memory that grows with the square of a text


def read_text(path: str | Path) -> str:
    """Read a whole UTF-8 file, plain, .gz or .xz; raise a UserError if it cannot be read."""
    path = Path(path)
    open_file = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower(), open)
    try:
        with open_file(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no file {path}: check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: name the files in it, e.g. {path}/*.txt") from None
    except UnicodeDecodeError as e:
        is_wide = e.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        coding = "UTF-16" if is_wide else "WINDOWS-1252 (or WINDOWS-1251 if it is Russian)"
        raise UserError(
            f"{path} is not UTF-8 (byte {e.object[e.start]:#04x} at {e.start}): convert it first, "
            f"e.g. with iconv -t UTF-8 FILE -o NEW_FILE -f {coding}"
        ) from e
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as e:
        raise UserError(f"{path} is damaged or not a {path.suffix} file ({e}): fetch it again, or rename it") from e
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e
    if "\0" in text:
        raise UserError(f"{path} has NUL bytes: unpack it, convert it from UTF-16 with iconv, or remove them")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_paragraphs(text: str, kind: InstanceKind = PAIRS) -> list[str]:
    """Split text into paragraphs: at blank lines, or at every line break if most of it is not hard-wrapped.

    A causal model learns line breaks and indents as well, so for that, each line is a paragraph.
    """
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    if not kind.is_masked:
        return lines if any(map(str.strip, lines)) else []
    is_wrapped = sum(len(line) for line in lines if len(line) > 200) * 2 <= len(text)
    blocks = re.split(r"\n\s*\n", text) if is_wrapped else lines
    # in a long text without blank lines, each line is a sentence or a record
    parts = [part for block in blocks for part in (block.split("\n") if len(block) > PART_CHARACTERS else [block])]
    return [" ".join(part.split()) for part in parts if part and not part.isspace()]


def split_articles(lines: list[str]) -> Documents:
    """Split text in WikiText format into documents: an article begins at ` = Title = ` between blank lines.

    The marks of headings are removed. ` @-@ `, ` @,@ ` and ` @.@ ` become the hyphen, comma or point within a word or
    number that they stand for, because ALBERT's vocabulary needs four tokens for each.
    """
    articles: Documents = []
    for position, line in enumerate(lines):
        text = " ".join(re.sub(r" @([-,.])@ ", r"\1", line).split())
        if not text:
            continue
        # a formula can look like a title, but has no blank lines around it
        neighbours = lines[position - 1 : position] + lines[position + 1 : position + 2]
        is_alone = not any(neighbour.strip() for neighbour in neighbours)
        if not articles or (is_alone and WIKITEXT_TITLE.match(line.rstrip("\n"))):
            articles.append([])
        articles[-1].append(WIKITEXT_HEADING.sub(r"\1", text))
    return articles


def split_chapters(text: str) -> Documents:
    """Split the sample corpus into chapters; the first one includes the title page of its novel or volume."""
    chapters: Documents = []
    for paragraph in split_paragraphs(text):
        has_body = bool(chapters) and any(len(earlier) > 60 for earlier in chapters[-1])
        if not chapters or (has_body and (SAMPLE_CHAPTER.fullmatch(paragraph) or SAMPLE_TITLE.fullmatch(paragraph))):
            chapters.append([])
        chapters[-1].append(paragraph)
    return chapters


def read_documents(path: str | Path, text_column: str = "text", kind: InstanceKind = PAIRS) -> Documents:
    """Read the documents of a user's file, which may be compressed (.gz, .xz); raise a UserError if it is invalid.

    Each line of .jsonl (.json) is a document, and each row of .csv and .tsv, whose first row names the columns. A file
    in WikiText format is split into its articles. Any other file is a single document. A conversation is a document
    whose paragraphs are its messages, as JSON.
    """
    kinds = find_kinds(path)
    if kind.has_turns and not kinds & {".jsonl", ".json"}:
        raise UserError(f"{path} has no conversations: --objective {kind.name} needs JSON lines, e.g. chats.jsonl")
    if other := kinds & {".parquet", ".arrow", ".zst", ".zip"}:
        cure = "or name .jsonl.zst and .parquet files in --sources of run_trainer.py --streaming"
        raise UserError(f"{path}: {other.pop()} is not supported: unpack or convert it to .jsonl, {cure}")
    if kinds & {".jsonl", ".json", ".csv", ".tsv"}:
        documents = []
        for number, record in read_records(path):
            try:
                if kind.has_turns:
                    documents.append(take_conversation(record))
                else:
                    documents.append(split_paragraphs(take_text(record, text_column), kind))
            except ValueError as e:
                cure = "see docs/data.md" if kind.has_turns else "give another --text_column"
                raise UserError(f"{path}, line {number} {e}: {cure}") from None
        return [paragraphs for paragraphs in documents if paragraphs]
    text = read_text(path)
    if WIKITEXT_TITLE.match(text.strip("\n ").split("\n", 1)[0].strip()):
        return split_articles(text.split("\n"))
    return [paragraphs] if (paragraphs := split_paragraphs(text, kind)) else []


def find_kinds(path: str | Path) -> set[str]:
    """Return the suffixes of a file that show its format and compression: the last one, or two if it is packed."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    return {*suffixes[-2 if suffixes[-1:] in ([".gz"], [".xz"]) else -1 :]}


def has_quoted_cells(text: str) -> bool:
    """Return whether the quotation marks of a TSV file follow the rules of CSV. In many files, such as those of GLUE,
    they belong to the text. Read by those rules, they would join rows."""
    try:
        deque(csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True), maxlen=0)
    except csv.Error:
        return False
    return True


def read_records(path: str | Path, is_strict: bool = False) -> Iterator[tuple[int, object]]:
    """Yield (number of its last line, record) from a .csv or .tsv file or JSON lines; raise a UserError if invalid.

    :param is_strict: whether to refuse rows with more columns than the header, and quotation marks that csv forbids
    """
    text = read_text(path)
    kinds = find_kinds(path)
    if kinds & {".csv", ".tsv"}:
        csv.field_size_limit(2**31 - 1)
        delimiter = "\t" if ".tsv" in kinds else ","
        is_plain = not is_strict and delimiter == "\t" and not has_quoted_cells(text)
        quoting = csv.QUOTE_NONE if is_plain else csv.QUOTE_MINIMAL
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=is_strict)
        try:
            for row in rows:
                if is_strict and None in row:
                    count = len(rows.fieldnames)
                    raise UserError(f"{path}, line {rows.line_num} has more than the header's {count} columns: fix it")
                yield rows.line_num, row
        except csv.Error as e:
            raise UserError(f"{path} cannot be read after line {rows.line_num} ({e}): fix its quotation marks") from e
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
                if HALF_PAIR.search(line):  # half of a surrogate pair, which no tokenizer accepts, becomes ?
                    record = json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace").decode())
            except (ValueError, RecursionError):
                cure = "fix it" if is_strict else "put one object on each line, or name a file of plain text .txt"
                raise UserError(f"{path}, line {number} is not JSON: {cure}") from None
            yield number, record


def take_text(record: object, column: str) -> str:
    """Return the text in a column of a record, or raise a ValueError whose message begins with a verb."""
    if not isinstance(record, dict) or column not in record:
        found = ", ".join(map(str, record)) if isinstance(record, dict) else "no field at all"
        raise ValueError(f"has no {column} (there is {found[:200]})")
    if not isinstance(record[column], str):
        raise ValueError(f"has a {column} that is not text")
    # JSON can contain half of a surrogate pair, which no tokenizer accepts
    return record[column].encode("utf-8", "replace").decode()


def take_conversation(record: object) -> list[str]:
    """Return the `messages` of a record, each as JSON, or raise a ValueError whose message begins with a verb."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("has no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError("has a message whose role or content is not text")
    return [json.dumps(message, ensure_ascii=False) for message in messages]


@functools.cache
def load_sentence_splitter(language: str) -> Callable[[str], list[str]]:
    """Return a function that splits a paragraph into sentences; raise a UserError if the language is unknown.

    It is punkt (Kiss and Strunk, 2006), with a model of each language, or razdel, with rules for Russian abbreviations.
    """
    if language == "russian":
        import razdel

        return lambda paragraph: [sentence.text for sentence in razdel.sentenize(paragraph)]
    import punkt

    if language not in punkt.available_languages():
        raise UserError(f"no language {language}: choose one of {', '.join(punkt.available_languages())}")
    return punkt.PunktSentenceTokenizer(punkt.load_model(language)).tokenize


def split_sentences(paragraphs: Iterable[str], language: str = "english") -> list[str]:
    """Split the paragraphs of one document into sentences."""
    split = load_sentence_splitter(language)
    return [sentence for paragraph in paragraphs for sentence in split(paragraph)]


# ---------------------------------------------------------------- sentence-order pairs


def make_document_random(seed: int, split: str, index: int) -> random.Random:
    """Return a document's random generator, the same in every process and at any time."""
    return random.Random(hashlib.sha256(f"{seed}:{split}:{index}".encode()).digest())


def make_sentence_pairs(
    sentences: list[list[int]], seq_length: int, generator: random.Random
) -> list[tuple[list[int], list[int], int]]:
    """Return sentence-order pairs (arxiv.org/abs/1909.11942, section 3.1) of a document as (first, second, label).

    Consecutive sentences fill up to seq_length - 3 ids, which leaves room for three special tokens. A random sentence
    boundary divides them into segments A and B. Label 0 is A, B; label 1, half of the pairs, is B, A. All text is kept:
    sentences over half of the room are divided. The boundary is inside a sentence only if there is no other.
    """
    room = seq_length - 3
    chunks: list[list[tuple[bool, list[int]]]] = []  # of pieces: whether it begins a sentence, ids
    length = room
    for ids in sentences:
        parts = -(-len(ids) // (room // 2))
        for part in range(parts):
            piece = ids[part * len(ids) // parts : (part + 1) * len(ids) // parts]
            if length + len(piece) > room:
                chunks.append([])
                length = 0
            chunks[-1].append((part == 0, piece))
            length += len(piece)
    # two pieces always fit, so only a document's last chunk can have a single piece
    if chunks and len(chunks[-1]) == 1:
        begins, ids = chunks[-1][0]
        if len(chunks) > 1 and len(chunks[-2]) > 2:
            chunks[-1].insert(0, chunks[-2].pop())
        elif len(ids) > 1:
            cut = generator.randint(1, len(ids) - 1)
            chunks[-1] = [(begins, ids[:cut]), (False, ids[cut:])]
        else:
            chunks.pop()

    pairs = []
    for chunk in chunks:
        places = range(1, len(chunk))
        cut = generator.choice([place for place in places if chunk[place][0]] or places)
        first = [token for _, ids in chunk[:cut] for token in ids]
        second = [token for _, ids in chunk[cut:] for token in ids]
        pairs.append((second, first, 1) if generator.random() < 0.5 else (first, second, 0))
    return pairs


def count_within(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, ... for each row of these lengths, joined end to end."""
    return np.arange(lengths.sum()) - (lengths.cumsum() - lengths).repeat(lengths)


def make_instances(
    documents: Documents, generators: list[random.Random], seq_length: int, tokenizer, encoder
) -> Sequences:
    """Make pairs for the model from sentences; return their columns, joined end to end, and their lengths.

    All sentences are tokenized once, in one batch; pairs are then made from ids.

    :param documents: the sentences of each document
    :param generators: the result of make_document_random for each document
    """
    sentences = list(itertools.chain.from_iterable(documents))
    encodings = iter(encoder.encode_batch_fast(sentences, add_special_tokens=False))
    rows = []
    first_lengths = []
    labels = []
    for document, generator in zip(documents, generators, strict=True):
        ids = [next(encodings).ids for _ in document]
        for first, second, label in make_sentence_pairs(ids, seq_length, generator):
            rows.append([tokenizer.cls_token_id, *first, tokenizer.sep_token_id, *second, tokenizer.sep_token_id])
            first_lengths.append(len(first) + 2)
            labels.append(label)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    input_ids = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=lengths.sum())
    is_second = count_within(lengths) >= np.array(first_lengths, dtype=np.int64).repeat(lengths)
    columns = {
        "input_ids": input_ids,
        "token_type_ids": is_second.astype(np.int8),
        # includes <unk>, which the model should not learn to predict
        "special_tokens_mask": np.isin(input_ids, tokenizer.all_special_ids).astype(np.int8),
        "sentence_order_label": np.array(labels, dtype=np.int8),
    }
    return columns, lengths


# ---------------------------------------------------------------- full blocks


def find_begin_token(tokenizer, kind: InstanceKind) -> list[int]:
    """Return the id of the token that begins each document of TEXT, as in Llama's pretraining; otherwise no id.

    It is not [CLS], which belongs to masked models, and not an end token (OPT), after which another document begins.
    """
    begin = tokenizer.bos_token_id
    if kind != TEXT or begin in (tokenizer.cls_token_id, tokenizer.eos_token_id):
        return []
    return [begin] if tokenizer("a")["input_ids"][:1] == [begin] else []


def encode_documents(documents: Documents, kind: InstanceKind, tokenizer, encoder) -> np.ndarray:
    """Return the ids of documents, joined end to end, as int32.

    For masking, [SEP] follows each document, and a space joins paragraphs. Otherwise an end token follows each
    document, a line break joins paragraphs, and the tokenizer may have a token that begins each document.
    """
    joint, end = (" ", tokenizer.sep_token_id) if kind.is_masked else ("\n", tokenizer.eos_token_id)
    begin = find_begin_token(tokenizer, kind)
    texts = []
    begins = []
    ends = []
    for document in documents:
        parts = [[]]
        size = 0
        for paragraph in document:
            if size >= PART_CHARACTERS:
                parts.append([""])  # joined to the previous part
                size = 0
            parts[-1].append(paragraph)
            size += len(paragraph)
        texts += map(joint.join, parts)
        begins += [begin] + [[]] * (len(parts) - 1)
        ends += [[]] * (len(parts) - 1) + [[end]]
    encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
    lists = ([*first, *it.ids, *last] for first, it, last in zip(begins, encodings, ends, strict=True))
    return np.fromiter(itertools.chain.from_iterable(lists), dtype=np.int32)


def cut_blocks(ids: np.ndarray, seq_length: int, kind: InstanceKind, tokenizer, keep_rest: bool = False) -> Sequences:
    """Cut ids into blocks of seq_length; return their columns, joined end to end, and their lengths.

    Blocks for masking include [CLS] and [SEP]. Each block begins at the end of the previous one, as in the full
    sentences of arxiv.org/abs/1907.11692, section 4.2, but also within a sentence.

    :param keep_rest: whether the rest becomes a shorter block; if there is no full block, it always does
    """
    room = seq_length - 2 if kind.is_masked else seq_length
    count, rest = divmod(len(ids), room)
    sizes = np.full(count, room, dtype=np.int64)
    if rest and (keep_rest or not count):
        sizes = np.append(sizes, rest)
    ids = ids[: sizes.sum()]
    if not kind.is_masked:
        return {"input_ids": ids}, sizes
    places = np.stack([sizes.cumsum() - sizes, sizes.cumsum()], axis=1).ravel()
    input_ids = np.insert(ids, places, [tokenizer.cls_token_id, tokenizer.sep_token_id] * len(sizes))
    special = np.isin(input_ids, tokenizer.all_special_ids).astype(np.int8)
    return {"input_ids": input_ids, "special_tokens_mask": special}, sizes + 2


# ---------------------------------------------------------------- conversations


def encode_conversations(documents: Documents, tokenizer) -> Sequences:
    """Return input_ids and labels of conversations, joined end to end, and their lengths.

    The tokenizer's chat template marks the assistant's tokens, which alone have labels.
    """
    conversations = [[json.loads(message) for message in document] for document in documents]
    options = dict(return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False})
    try:
        rows = tokenizer.apply_chat_template(conversations, **options)
    except jinja2.TemplateError as e:
        raise UserError(f"the chat template rejects a conversation ({first_line(e)}): remove such conversations") from e
    lengths = np.array([len(ids) for ids in rows["input_ids"]])
    ids, is_answer = (np.fromiter(itertools.chain(*rows[it]), np.int32) for it in ("input_ids", "assistant_masks"))
    is_labelled = (is_answer == 1) & (count_within(lengths) > 0)  # a first token is not predicted
    return {"input_ids": ids, "labels": np.where(is_labelled, ids, IGNORED_LABEL)}, lengths


def pack_conversations(columns: Columns, lengths: np.ndarray, seq_length: int) -> tuple[Columns, np.ndarray, int]:
    """Fill sequences with whole conversations, of which each keeps its first seq_length tokens.

    :returns: the columns of the sequences, joined end to end, their lengths, and the number of conversations without a
        label in these tokens, which are dropped
    """
    positions = count_within(lengths)
    numbers = np.arange(len(lengths)).repeat(lengths)
    is_labelled = (columns["labels"] != IGNORED_LABEL) & (positions < seq_length)
    is_kept = np.bincount(numbers[is_labelled], minlength=len(lengths)) > 0
    sizes = []
    room = 0
    for length in np.minimum(lengths, seq_length)[is_kept]:
        if length > room:
            sizes.append(0)
            room = seq_length
        sizes[-1] += length
        room -= length
    in_row = is_kept[numbers] & (positions < seq_length)
    columns = {**columns, "position_ids": positions.astype(np.int32)}
    columns = {name: values[in_row] for name, values in columns.items()}
    return columns, np.array(sizes, dtype=np.int64), int((~is_kept).sum())
