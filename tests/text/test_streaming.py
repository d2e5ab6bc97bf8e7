"""Documents from files, sentence-order pairs, and streams: sources, mixtures, broken records, resumption, a trainer."""

import gzip
import io
import itertools
import json
import logging
import lzma
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from file_server import FileServer
from mains import expect_user_error
from processes import ROOT, make_prefix, wait_until
from rows import are_equal
from swarms import TINY, stop

from arguments import DataArguments
from experiment import data
from text import documents, streams
from text.instances import BLOCKS, PAIRS, TEXT
from text.streams import Broken, Position, Source, read_sources, stream_documents
from text.tokenizers import load_tokenizer
from training.prefetch import TrainingFeed


def test_text_splits_into_paragraphs_and_sentences():
    assert documents.split_paragraphs("One line\nof two.\n\n  \nNext\n") == ["One line of two.", "Next"]
    long_lines = ["word " * 60, "another " * 60]
    assert documents.split_paragraphs("\n".join(long_lines)) == [line.strip() for line in long_lines]
    sentences = documents.split_sentences(["Dr. Smith went home. He slept", "Then"])
    assert sentences == ["Dr. Smith went home.", "He slept", "Then"]
    paragraph = ["И. П. Павлов жил в Рязани и т. д. Он был физиологом. Это стоило 5 тыс. руб. за шт. Все."]
    sentences = documents.split_sentences(paragraph, "russian")
    assert sentences[:2] == ["И. П. Павлов жил в Рязани и т. д.", "Он был физиологом."]
    assert documents.split_sentences(paragraph)[0] != sentences[0]


def test_sample_corpus_splits_by_chapter():
    text = documents.read_text(ROOT / "sample_data" / "austen.txt.xz")
    chapters = documents.split_chapters(text)
    assert len(chapters) == 270  # 269 chapters and the advertisement before Northanger Abbey
    assert " ".join(paragraph for chapter in chapters for paragraph in chapter) == " ".join(text.split())
    headings = [[p for p in chapter if documents.SAMPLE_CHAPTER.fullmatch(p)] for chapter in chapters]
    assert sorted(map(len, headings)) == [0] + [1] * 269
    for chapter in chapters:
        titles = [place for place, p in enumerate(chapter) if documents.SAMPLE_TITLE.fullmatch(p)]
        assert all(place < 4 for place in titles), "the title of a novel ended up behind the text of another"


def test_wikitext_splits_by_article():
    text = "\n = First = \n\n A red @-@ hot 1 @,@ 000 . \n = 5 = \n = = Part = = \n More . \n"
    text += "\n = Second ( = film ) = \n\n Text . \n"
    expected = [["First", "A red-hot 1,000 .", "5", "Part", "More ."], ["Second ( = film )", "Text ."]]
    assert documents.split_articles(text.splitlines(keepends=True)) == expected


@pytest.mark.parametrize("suffix, pack", [("", bytes), (".GZ", gzip.compress), (".xz", lzma.compress)])
def test_text_files_plain_and_packed_match(tmp_path, suffix, pack):
    (tmp_path / f"a.txt{suffix}").write_bytes(pack("\ufeffÉtude.\r\n\r\nZwei".encode()))
    assert documents.read_documents(tmp_path / f"a.txt{suffix}") == [["Étude.", "Zwei"]]
    (tmp_path / f"a.json.txt{suffix}").write_bytes(pack(b"Zwei"))
    assert documents.read_documents(tmp_path / f"a.json.txt{suffix}") == [["Zwei"]]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(b'{"body": "One."}\n\n{"body": ""}\n{"body": "a \\ud800 b"}\n'))
    assert documents.read_documents(tmp_path / f"a.jsonl{suffix}", "body") == [["One."], ["a ? b"]]
    for name, comma in (("a.csv", ","), ("a.TSV", "\t")):
        rows = [["id", "body"], ["1", '"One, two.\r\n\r\nThree ""four""."'], ["2", ""], ["3", "long " * 30_000]]
        (tmp_path / f"{name}{suffix}").write_bytes(pack("\r\n".join(map(comma.join, rows)).encode()))
        expected = [["One, two.", 'Three "four".'], ["long " * 29_999 + "long"]]
        assert documents.read_documents(tmp_path / f"{name}{suffix}", "body") == expected


def test_unquoted_tsv_keeps_its_rows(tmp_path):
    """By the rules of CSV, the quotation marks would open cells that end rows later."""
    texts = ['"Stop," he said.', "One.", 'She said: "No."', '"Yes."']
    (tmp_path / "a.tsv").write_text("\n".join(["id\ttext", *(f"{i}\t{text}" for i, text in enumerate(texts))]))
    assert documents.read_documents(tmp_path / "a.tsv") == [[text] for text in texts]


def test_causal_text_keeps_its_lines(tmp_path):
    code = "def f(x):\n    if x:\n        return 1\n\n    return 2"
    (tmp_path / "a.txt").write_bytes(f"\r\n{code}\n".replace("\n", "\r\n").encode())
    [lines] = documents.read_documents(tmp_path / "a.txt", kind=TEXT)
    assert "\n".join(lines) == code
    assert documents.split_paragraphs(" \n\n", TEXT) == [] != documents.split_paragraphs(code)
    lines = ["a short line without a point"] * 5000  # with no blank line, all of them would be one paragraph
    assert documents.split_paragraphs("\n".join(lines)) == lines


def test_records_replace_half_of_surrogate_pair(tmp_path):
    """Tokenizers refuse it; a whole pair is one character."""
    (tmp_path / "a.jsonl").write_text('{"a": "x \\ud83d y", "b": ["\\uD83D\\uDE00", 1]}\n{"a": "\\u00e9"}\n')
    records = documents.read_records(tmp_path / "a.jsonl", is_strict=True)
    assert list(records) == [(1, {"a": "x ? y", "b": ["\U0001f600", 1]}), (2, {"a": "é"})]


@pytest.mark.parametrize("seq_length, longest", [(32, 10), (32, 100), (512, 60), (8, 9)])
def test_sentence_pairs_keep_text_in_order(seq_length, longest):
    lengths = random.Random(0)
    ids = itertools.count(10)
    sentences = [list(itertools.islice(ids, lengths.randint(1, longest))) for _ in range(2000)]
    pairs = documents.make_sentence_pairs(sentences, seq_length, random.Random(1))
    restored = [segments[::-1] if label else segments for *segments, label in pairs]
    assert [token for first, second in restored for token in first + second] == list(itertools.chain(*sentences))
    assert all(first and second and len(first) + len(second) <= seq_length - 3 for first, second in restored)
    assert 0.4 < np.mean([label for *_, label in pairs]) < 0.6
    if longest <= (seq_length - 3) // 2:
        begins = {sentence[0] for sentence in sentences}
        assert all(first[0] in begins and second[0] in begins for first, second in restored)
        # the next sentence would not have fitted
        sizes = {sentence[0]: len(sentence) for sentence in sentences}
        for (first, second), (following, _) in zip(restored[:-2], restored[1:-1], strict=True):
            assert len(first) + len(second) + sizes[following[0]] > seq_length - 3


def test_sentence_pairs_depend_on_document():
    def make(sentences, seed=1, split="train", index=0):
        return documents.make_sentence_pairs(sentences, 64, documents.make_document_random(seed, split, index))

    many = [[number] * 5 for number in range(100)]
    assert make(many) == make(many)
    assert len({str(make(many, **key)) for key in ({}, {"seed": 2}, {"split": "validation"}, {"index": 1})}) == 4
    # a cut may be after each sentence
    pairs = [make([[number] for number in range(5)], index=index) for index in range(200)]
    assert {len(second if label else first) for [(first, second, label)] in pairs} == {1, 2, 3, 4}
    for sentences, count in (([], 0), ([[]], 0), ([[7]], 0), ([[7, 8]], 1), ([[7], [8]], 1)):
        assert len(make(sentences)) == count


GO_ON = threading.Event()  # never set
RECORDS = [f"Text number {number}. It has two sentences." for number in range(600)]


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text, "id": 1}, ensure_ascii=False) + "\n" for text in texts))
    return path


def write_sources(path: Path, *entries: dict) -> Path:
    path.write_text(json.dumps([{**entry, "path": str(entry["path"])} for entry in entries]))
    return path


def read_pass(source: Source, position: Position = Position(), seed: int = 1) -> list[str]:  # noqa: B008 (a tuple)
    return [text for text, _ in source.read_pass(seed, position, GO_ON) if not isinstance(text, Broken)]


def take_documents(sources: list[Source], count: int) -> list[tuple[int, str]]:
    """Return the source and the text of the first documents of a mixture."""
    found = (document[1:] for _, chunk in stream_documents(sources, seed=1) for document in chunk)
    return list(itertools.islice(found, count))


def write_format(folder: Path, name: str) -> Path:
    """Write RECORDS to a file or folder of this format."""
    lines, path = write_jsonl(folder / "lines.jsonl", RECORDS).read_bytes(), folder / name
    if name == "hub":
        path.mkdir()
        for part in range(3):
            table = pyarrow.table({"text": RECORDS[part * 200 : part * 200 + 200]})
            pyarrow.parquet.write_table(table, path / f"train-{part}.parquet")
    elif name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": RECORDS, "id": range(600)}), path, row_group_size=100)
    elif name.endswith(".zst"):
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(lines)
    else:
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(lines))
    return path


NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.parquet", "hub"]


@pytest.mark.parametrize("name", [*NAMES, "http a.jsonl", "http a.jsonl.gz?as=file", "http a.parquet"])
def test_stream_formats_match_and_resume(name, tmp_path, monkeypatch):
    """The server cuts connections, and fails."""
    for constant, value in (("PART_BYTES", 5000), ("FIRST_DELAY", 0.05), ("HTTP_BLOCK", 4096)):
        monkeypatch.setattr(streams, constant, value)
    file = name.removeprefix("http ")
    path = write_format(tmp_path, file.partition("?")[0]).rename(tmp_path / file)
    with FileServer(tmp_path) as server:
        server.cuts[f"/{file}"], server.answers[f"/{file}"] = [1000, 500], [200, 503, 200]
        # the order comes from the name, too
        source = Source(path=str(path) if file == name else f"{server.url}/{file}", name=name)
        whole = list(source.read_pass(1, Position(), GO_ON))
        assert sorted(text for text, _ in whole) == sorted(RECORDS)
        assert file == name or not server.cuts[f"/{file}"] and len(server.requests) > 2
        for number in (0, 1, 99, 100, 321, 598, 599):
            # as read from stream.json
            position = Position(*json.loads(json.dumps(whole[number][1])))
            assert read_pass(source, position) == [text for text, _ in whole[number + 1 :]]
        if not file.startswith("a.jsonl."):
            # the order differs between passes and peers, except for packed files
            assert read_pass(source, Position(1)) != read_pass(source) != read_pass(source, seed=2)


def test_stream_file_order_differs_by_peer(tmp_path):
    for number in range(8):
        write_jsonl(tmp_path / f"{number}.jsonl", [f"{number}a", f"{number}b"])
    source = Source(path=f"{tmp_path}/*.jsonl", name="files")
    passes = [read_pass(source, Position(number), seed) for seed in (1, 2) for number in range(3)]
    assert len({tuple(texts) for texts in passes}) == 6 and len({texts[0] for texts in passes}) > 2
    assert all(sorted(texts) == sorted(passes[0]) for texts in passes)
    items = list(itertools.islice(source.read(1, Position(), GO_ON), 48))
    assert [text for text, _ in items] == sum(passes[:3], [])
    # a new file changes the order, so the next pass starts
    write_jsonl(tmp_path / "8.jsonl", ["8a"])
    source = Source(path=f"{tmp_path}/*.jsonl", name="files")
    assert next(source.read(1, items[0][1], GO_ON))[1].number == 1


def test_stream_text_splits_between_paragraphs(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "PART_BYTES", 50_000)
    paragraphs = [f"Paragraph {number} begins.\nIt goes on{' and on' * 20}.\n\n" for number in range(1500)]
    (tmp_path / "a.txt").write_text("".join(paragraphs))
    source = Source(path=str(tmp_path / "a.txt"))
    whole = list(source.read_pass(1, Position(), GO_ON))
    assert Counter("".join(text for text, _ in whole).split()) == Counter("".join(paragraphs).split())
    assert max(len(text) for text, _ in whole) < 11_000
    assert read_pass(source, whole[7][1]) == [text for text, _ in whole[8:]]
    (tmp_path / "b.txt").write_text("No blank line here.\n" * 5000)
    # two parts of 50,000 bytes
    lengths = map(len, read_pass(Source(path=str(tmp_path / "b.txt"))))
    assert sorted(lengths) == [10_000] * 2 + [20_000] * 4


def test_stream_long_line_is_read_once(monkeypatch):
    """A list in JSON is one line; other parts than the one where it begins look at their own bytes only."""
    monkeypatch.setattr(streams, "LONGEST_LINE", 3000)
    sizes = []

    class CountedFile(io.BytesIO):
        def readline(self, *size: int) -> bytes:
            sizes.append(len(line := super().readline(*size)))
            return line

    content = b'{"text": "One."}\n' + 50_000 * b"x" + b'\n{"text": "Two."}\n'
    file, parts = CountedFile(content), range(0, len(content), 1000)
    lines = [line for begin in parts for line in streams.read_lines(file, False, (begin, begin + 1000))]
    assert lines == [b'{"text": "One."}\n', streams.TOO_LONG, b'{"text": "Two."}\n']
    assert max(sizes) == 3000 and sum(sizes) < len(content) + 3000 + len(parts)


def test_stream_broken_records_are_counted(tmp_path, caplog, monkeypatch):
    lines = [json.dumps({"text": text}).encode() for text in RECORDS[:50]]
    broken = [b'{"text": "cut', b'{"body": "a"}', b'{"text": 3}', b'{"text": "\xff\xfe"}', b"[1]", b"[" * 100_000]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*broken[:3], *lines[:25], b"", *broken[3:], *lines[25:]]))
    packed = gzip.compress(b"\n".join(lines * 200), 0)
    (tmp_path / "b.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    options = {"data_page_size": 1000, "use_dictionary": False, "compression": "none", "write_batch_size": 20}
    pyarrow.parquet.write_table(pyarrow.table({"text": RECORDS}), tmp_path / "c.parquet", **options)
    damaged = bytearray((tmp_path / "c.parquet").read_bytes())
    place = damaged.index(RECORDS[500].encode())
    damaged[place : place + 3000] = b"\xff" * 3000
    (tmp_path / "c.parquet").write_bytes(damaged)
    (tmp_path / "d.txt").write_bytes(b"One line.\n" * 1000 + b"\n" + b"Two \xff lines.\n" * 1000 + b"\nThree lines.\n")
    (tmp_path / "e.txt").write_bytes(b"Four lines.\n" * 1000 + b"\n" + b"x" * 200_000 + b"\n")
    monkeypatch.setattr(streams, "LONGEST_LINE", 150_000)
    found = {}
    for path in sorted(tmp_path.iterdir()):
        source = Source(path=str(path))
        first_pass = itertools.takewhile(lambda item: item[1].number == 0, source.read(1, Position(), GO_ON))
        found[path.name[0]] = [text for text, _ in first_pass], source.broken
    # the next pass has already found three of them
    assert found["a"] == (RECORDS[:50], len(broken) + 3)
    assert len(found["b"][0]) > 4000 and set(found["b"][0]) == set(RECORDS[:50]) and found["b"][1] == 1
    assert 0 < len(found["c"][0]) < 600 and set(found["c"][0]) < set(RECORDS) and found["c"][1] >= 1
    assert [text.split("\n")[0] for text in found["d"][0]] == ["One line.", "Three lines."]
    [message] = [message for message in caplog.messages if "a.jsonl" in message]
    assert "a.jsonl, record 1 of part 1 is broken (Invalid control character" in message
    assert any("d.txt, record 2 of part 1 is broken ('utf-8' codec" in message for message in caplog.messages)
    assert (
        len(found["e"][0]) == 1
        and found["e"][1] >= 1
        and any("a line is longer than" in message for message in caplog.messages)
    )
    # the rest of a file is more than a record
    for seed in range(4):
        caplog.clear()
        source = Source(path=[str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz")])
        assert any(position.number for _, position in source.read(seed, Position(), GO_ON))
        assert sum("b.jsonl.gz: " in message and "the rest of it" in message for message in caplog.messages) == 1


def test_stream_of_one_hub_file_differs_between_peers(tmp_path):
    """All peers would read the same documents in the same order."""
    pyarrow.parquet.write_table(pyarrow.table({"text": RECORDS}), tmp_path / "train.parquet", row_group_size=100)
    first, second = (read_pass(Source(path=str(tmp_path), name="texts"), seed=seed) for seed in (1, 2))
    assert first != second and sorted(first) == sorted(second) == sorted(RECORDS)


class ShakyDataset:
    """A dataset on the Hub, whose server is down for a while; `datasets` gives up after its own retries."""

    def __init__(self):
        self.failures = [100, 200]  # the number of records before each, last first

    num_shards = 1

    def reshard(self) -> "ShakyDataset":
        return self

    def shard(self, num_shards: int, index: int) -> "ShakyDataset":
        return self

    def __iter__(self) -> Iterator[dict]:
        for number, text in enumerate(RECORDS):
            if number in self.failures[-1:]:
                self.failures.pop()
                raise ConnectionError("Server Disconnected")
            yield {"text": text}


def test_stream_waits_for_hub(monkeypatch):
    monkeypatch.setattr(streams, "FIRST_DELAY", 0.01)
    source = Source(path="someone/texts")
    source.dataset, source.files = ShakyDataset(), ["file 0"]
    assert read_pass(source) == RECORDS and not source.dataset.failures


def test_stream_missing_file_is_skipped(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", RECORDS[:10])
    with FileServer(tmp_path) as server:
        source = Source(path=[f"{server.url}/gone.jsonl", f"{server.url}/a.jsonl"])
        assert read_pass(source) == RECORDS[:10]
        [problem] = [text for text, _ in source.read_pass(1, Position(), GO_ON) if isinstance(text, Broken)]
        assert str(problem).startswith(f"{server.url}/gone.jsonl: No such file")


def test_stream_stalling_source_is_skipped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(streams, "LATE_SECONDS", 0.5)
    monkeypatch.setattr(streams, "HTTP_BLOCK", 2**16)
    write_jsonl(tmp_path / "far.jsonl", RECORDS * 50)
    near = write_jsonl(tmp_path / "near.jsonl", ["Near."] * 100)
    with FileServer(tmp_path) as server:
        server.cuts["/far.jsonl"], server.is_stalling = [10**6] * 4 + [100], True
        found = take_documents([Source(path=f"{server.url}/far.jsonl"), Source(path=str(near))], 20_000)
    counts = Counter(index for index, _ in found)
    # the data of four requests
    assert 7000 < counts[0] < 9500 and counts.total() == 20_000
    assert len({index for index, _ in found[-1000:]}) == 1
    assert sum("is late" in message for message in caplog.messages) == 1


def test_stop_while_source_is_awaited_logs_no_delay(tmp_path, caplog):
    far = write_jsonl(tmp_path / "far.jsonl", RECORDS * 50)
    interrupted = threading.Event()
    with FileServer(tmp_path) as server:
        server.cuts["/far.jsonl"], server.is_stalling = [100], True
        source = Source(path=f"{server.url}/{Path(far).name}")
        stop = threading.Timer(1.0, interrupted.set)
        stop.start()
        assert [*stream_documents([source], seed=1, interrupted=interrupted)] == []
    assert not [message for message in caplog.messages if "is late" in message]


def test_format_follows_from_local_pattern():
    assert Source(path="DATA/PART-1.JSONL.GZ").format == "jsonl"
    assert Source(path="data/part-?.jsonl").format == Source(path="https://example.org/a.jsonl?x=1").format == "jsonl"


def test_mixture_follows_weights_and_repeats(tmp_path):
    entries = []
    for name, count, weight in (("a", 7, 1), ("b", 400, 2), ("c", 90, 5)):
        path = write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {number}" for number in range(count)])
        entries.append({"path": path, "weight": weight})
    found = take_documents(read_sources(write_sources(tmp_path / "sources.json", *entries)), 8000)
    shares = np.bincount([index for index, _ in found]) / 8000
    # four standard deviations of a choice
    assert np.abs(shares - np.array([1, 2, 5]) / 8).max() < 4 * 0.5 / 8000**0.5
    # each record occurs equally often, apart from the current pass
    for index, count in enumerate((7, 400, 90)):
        times = Counter(text for number, text in found if number == index)
        assert len(times) == count and max(times.values()) - min(times.values()) <= 1
    assert read_sources(ROOT / "configs" / "sources-russian.json")


@pytest.fixture(scope="module")
def tokenizer(tiny_data):
    return load_tokenizer(tiny_data["--tokenizer_path"])


@pytest.fixture
def austen(tmp_path, monkeypatch) -> Path:
    """Sources with small documents and chunks, so that a test sees several pools, and passes over the second one."""
    monkeypatch.setattr(streams, "TEXT_BYTES", 1000)
    monkeypatch.setattr(streams, "CHUNK_CHARACTERS", 3000)
    novel = {"path": ROOT / "sample_data" / "austen.txt.xz", "weight": 3}
    return write_sources(tmp_path / "sources.json", novel, {"path": write_jsonl(tmp_path / "own.jsonl", RECORDS[:20])})


def open_stream(tokenizer, sources, kind=PAIRS, shuffle_buffer=data.SHUFFLE_BUFFER, **options):
    args = DataArguments(streaming=True, sources=sources, **options)
    dataset = data.make_training_dataset(tokenizer, args, kind)
    dataset.shuffle_buffer = shuffle_buffer
    return dataset


def make_batches(tokenizer, sources, count, kind=PAIRS, length=64, **options):
    """Return the first batches, and the state after them."""
    options = {"seed": 1, "batch_size": 16} | options
    dataset = open_stream(tokenizer, sources, kind, max_sequence_length=length, shuffle_buffer=256)
    batches = data.make_train_batches(dataset, tokenizer, DataArguments(), **options)
    return list(itertools.islice(batches, count)), batches.state


def make_rows(*args, **options) -> tuple[list[list[tuple]], dict]:
    """Return the ids and order of each instance in the batches, and the state after them."""
    batches, state = make_batches(*args, **options)
    for batch in batches:
        batch["input_ids"] = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    names = ("input_ids", "attention_mask", "sentence_order_label")
    rows = [zip(*(batch[name] for name in names), strict=True) for batch in batches]
    return [[(*ids[mask.bool()].tolist(), int(label)) for ids, mask, label in part] for part in rows], state


def test_stream_batches_are_independent_of_workers(tokenizer, austen):
    batches, _ = make_batches(tokenizer, austen, 60)
    for num_workers in (1, 2):
        assert are_equal(make_batches(tokenizer, austen, 60, num_workers=num_workers)[0], batches)
    assert not are_equal(make_batches(tokenizer, austen, 1, seed=2)[0], batches[:1])
    assert all(batch["input_ids"].shape[1] <= 64 for batch in batches)
    padding = 1 - np.mean([batch["attention_mask"].float().mean() for batch in batches])
    assert padding < 0.12


def test_stream_restart_continues_after_last_batch(tokenizer, austen):
    """At the start, in the middle and at the end of a pool, no instance is lost or repeated."""
    whole, _ = make_rows(tokenizer, austen, 80)
    for count in (1, 4, 60, 37):
        before, state = make_rows(tokenizer, austen, count, num_workers=2)
        state = json.loads(json.dumps(state))
        after, _ = make_rows(tokenizer, austen, 80 - count, seed=999, state=state)
        assert before + after == whole, count
    # within one pass, each instance occurs once
    instances = Counter(row for batch in whole for row in batch if len(row) > 40)
    assert max(instances.values()) == 1 and len(instances) > 500
    # with another batch size, it continues at the beginning of the pool
    assert state["documents"] > 0 and state["taken"] > 1
    after, first = make_rows(tokenizer, austen, 1, state=state, batch_size=8)
    assert (len(after[0]), first["positions"], first["taken"]) == (8, state["positions"], 1)


def test_tiny_sources_repeat_reshuffled(tokenizer, tmp_path):
    texts = [f"It is {'so ' * number}. It is." for number in range(1, 41)]
    sources = write_sources(tmp_path / "s.json", {"path": write_jsonl(tmp_path / "a.jsonl", texts)})
    batches, _ = make_rows(tokenizer, sources, 100)
    lengths = [len(row) for batch in batches for row in batch]
    times = Counter(lengths).values()
    assert len(times) == 40 and 25 < min(times) <= max(times) < 55
    assert len({tuple(lengths[start : start + 40]) for start in range(0, 1600, 40)}) == 40


def test_stream_sequence_length_changes_next_batch(tokenizer, austen, caplog):
    args = DataArguments(initial_sequence_length=32, max_sequence_length=128, sequence_length_warmup_steps=10)
    dataset = open_stream(tokenizer, austen, max_sequence_length=128, shuffle_buffer=256)
    batches = data.make_train_batches(dataset, tokenizer, args, batch_size=16, seed=1, num_workers=2)
    feed = TrainingFeed(batches, torch.device("cpu"), args)
    caplog.set_level(logging.INFO, "batches")
    for epoch, length in ((0, 32), (7, 96), (4, 64), (4, 64), (10, 128)):
        feed.begin_epoch(epoch)
        longest = [int(batch["attention_mask"].sum(1).max()) for batch in itertools.islice(feed, 10)]
        assert length - 10 < max(longest) <= length, (length, longest)
    assert caplog.messages == [f"sequences of up to {length} tokens from now on" for length in (32, 96, 64, 128)]


@pytest.mark.parametrize("kind", [BLOCKS, TEXT])
def test_stream_blocks_keep_all_text(tiny_data, austen, kind):
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"], kind)
    batches, _ = make_batches(tokenizer, austen, 40, kind, 32)
    names = {"input_ids", "attention_mask", "labels", "token_type_ids" if kind.is_masked else "position_ids"}
    assert set(batches[0]) == names
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches])
    assert lengths.max() == 32 and (lengths == 32).float().mean() > 0.9
    chunk = [(0, 0, "A first text of it.\n\nWith two parts."), (1, 0, "Another text. " * 20)]
    [source, *_] = read_sources(austen)
    _, columns, lengths = streams.TrainingDataset([source], tokenizer, kind, 32, 64)[None, chunk]
    ids, ends = columns["input_ids"], lengths.cumsum()
    if kind.is_masked:
        ids = np.delete(ids, [*(ends - lengths), *(ends - 1)])
    expected = sum((tokenizer(text, add_special_tokens=False)["input_ids"] + [3] for *_, text in chunk), [])
    assert ids.tolist() == expected and lengths[:-1].tolist() == [32] * (len(lengths) - 1)


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"path": "missing.jsonl"}, ["--sources", "missing.jsonl", "No such file"]),
        ({"path": "no/*.jsonl"}, ["no/*.jsonl", "no text"]),
        ({"path": "{folder}/body.jsonl"}, ["record 1", "has no text", "body", "text_column"]),
        ({"path": "{folder}/body.parquet"}, ["no text", "body", "text_column"]),
        ({"path": "{folder}/text.txt", "format": "jsonl"}, ["record 1", "format"]),
        ({"path": "{folder}/text.txt", "format": "parquet"}, ["text.txt", "Parquet"]),
        ({"path": "{folder}/body.jsonl.gz"}, ["body.jsonl.gz", "gzip"]),
        ({"path": "{url}/missing.jsonl"}, ["missing.jsonl", "No such file"]),
        ({"path": "{folder}/utf16.txt"}, ["record 1", "it has NUL bytes: convert it to UTF-8"]),
        ({"path": "{folder}/utf16.jsonl"}, ["record 1", "it has NUL bytes: convert it to UTF-8"]),
        ({"path": "{folder}/nothing"}, ["nothing"]),
        ({"path": "{folder}/empty"}, ["empty yields no text"]),
        ({"path": "{folder}/scripted"}, ["scripted yields no text", "scripts are no longer supported"]),
        ({"path": "https://example.org/data"}, ["format"]),
        ({"path": "a.jsonl", "wieght": 2}, ["wieght, did you mean weight?"]),
        ({"path": "a.jsonl", "weight": 0}, ["weight", "greater than 0"]),
        ({"path": "a.jsonl", "language": "elvish"}, ["elvish", "english"]),
        ({"path": 3}, ["path"]),
    ],
    ids=lambda value: value.get("path") if isinstance(value, dict) else "",
)
def test_empty_source_is_one_line(entry, words, tmp_path, tokenizer):
    write_jsonl(tmp_path / "body.jsonl", ["A.", "B."], column="body")
    (tmp_path / "body.jsonl.gz").write_bytes((tmp_path / "body.jsonl").read_bytes())
    pyarrow.parquet.write_table(pyarrow.table({"body": ["A."]}), tmp_path / "body.parquet")
    (tmp_path / "utf16.txt").write_bytes(("Emma slept.\n\n" * 2000).encode("utf-16"))
    (tmp_path / "utf16.jsonl").write_bytes(('{"text": "Emma slept."}\n' * 2000).encode("utf-16-le"))
    (tmp_path / "text.txt").write_text("A text.\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.jsonl").touch()
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").touch()
    with FileServer(tmp_path) as server:
        if isinstance(entry["path"], str):
            entry = {**entry, "path": entry["path"].replace("{folder}", str(tmp_path)).replace("{url}", server.url)}
        (tmp_path / "sources.json").write_text(json.dumps([entry]))
        with expect_user_error(*words):
            open_stream(tokenizer, tmp_path / "sources.json")


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_trainer_resumes_stream(start, tmp_path, tiny_data, num_devices):
    """Each rank continues at its own position."""
    flags = [
        *("--streaming", "--sources", "configs/sources.json", "--tokenizer_path", tiny_data["--tokenizer_path"]),
        *(*TINY, "--max_sequence_length", "128", "--total_steps", "1000", "--target_batch_size", "32"),
        *("--dataloader_num_workers", "1", "--save_steps", "2", "--device", "cpu", "--num_devices", num_devices),
        *("--experiment_prefix", make_prefix(), "--output_dir", tmp_path / "out"),
    ]
    files = [tmp_path / "out" / name for name in ("stream.json", "stream_1.json")[:num_devices]]
    trainer = start("first", "run_trainer.py", *flags)
    trainer.wait_for("epoch 4/", 90)
    trainer.kill()
    trainer.process.wait(60)
    befores = [json.loads(file.read_text()) for file in files]
    trainer = start("second", "run_trainer.py", *flags)
    trainer.wait_for(rf"continuing after document {befores[0]['documents']:,}", 60)
    trainer.wait_for("epoch 6/", 90)
    stop(trainer)
    for file, before in zip(files, befores, strict=True):
        after = json.loads(file.read_text())
        assert after["seed"] == before["seed"]
        assert (after["documents"], after["taken"]) > (before["documents"], before["taken"])
    austen = json.loads((tmp_path / "out" / "summary.json").read_text())["sources"]["austen"]
    assert austen["documents"] > 0 and austen["broken"] == 0


def test_ctrl_c_ends_wait_for_stalled_server(tmp_path, tiny_data, start):
    write_jsonl(tmp_path / "far.jsonl", RECORDS * 50)
    with FileServer(tmp_path) as server:
        server.cuts["/far.jsonl"], server.is_stalling = [10**7, 100_000], True
        sources = write_sources(tmp_path / "s.json", {"path": f"{server.url}/far.jsonl"})
        words = ["-m", "tests.programs.interrupted_batches", "stream", tiny_data["--tokenizer_path"], sources]
        script = start("script", *words)
        wait_until(lambda: len(server.sent) >= 2 and server.sent[1][1] == 100_000, 60, "it reads")
        stop(script)
