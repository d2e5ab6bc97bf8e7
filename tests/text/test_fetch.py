"""Servers that mean no good, on real sockets: each ends in one line, and nothing of theirs is taken for data."""

import io
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_server import drip, flood, send, serve

from common.console import UserError
from text import fetch, http
from text.stored import load_tokenized_dataset

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
FOUND = b"HTTP/1.1 302 Found\r\nConnection: close\r\nLocation: "


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(http, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(http, "FIRST_DELAY", 0.05)


def expect_line(words: str, url: str, cache: Path, patience: float = 1.0) -> list[str]:
    """Expect the fetch to fail soon, in one line with these words; return the kinds of files in the cache."""
    start = time.monotonic()
    with pytest.raises(UserError, match=words) as error:
        fetch.fetch(url, None, cache, patience)
    assert str(error.value).isprintable()  # one line, and no escapes
    assert time.monotonic() - start < 20  # this machine may be busy
    return sorted("".join(path.suffixes) for path in cache.iterdir() if path.suffix != ".lock")


def make_tar(path: Path, text: str = "{}") -> bytes:
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("dataset/corpus.json")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return path.read_bytes()


def send_one_byte(request: bytes) -> Iterator[bytes]:
    start = int(request.partition(b"bytes=")[2].partition(b"-")[0] or 0)
    status = b"206 No\r\nContent-Range: bytes %d-998/999" % start if start else b"200 OK\r\nContent-Length: 999"
    yield b"HTTP/1.1 %b\r\nConnection: close\r\n\r\nx" % status


def send_length(header: str) -> Callable:
    return send(OK, header.encode(), b"\r\n\r\n", 1000 * b"x")


SHORT = OK + b"Content-Length: 2000\r\n\r\n" + 1000 * b"x"
NO_RANGE = b"HTTP/1.1 416 No\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
NESTED = '{"objective":' + 100_000 * "[" + 100_000 * "]" + "}"
PART = [".part", ".part.json"]
SLOW = "fewer than 1,000 bytes a second came; gave up"
# the behavior of the server, words of the error, and the files that may stay; drips are in time for each read
ATTACKS = {
    "drips body": (drip(OK, b"Content-Length: 9999\r\n\r\n"), SLOW, PART),
    "drips body without a length": (drip(OK, b"\r\n"), SLOW, PART),
    "drips status": (drip(b"HTTP/1.1 200 "), SLOW, []),
    "drips header": (drip(OK, b"X: "), SLOW, []),
    "drips size of a chunk": (drip(OK, b"Transfer-Encoding: chunked\r\n\r\n5;"), SLOW, PART),
    "never starts": (flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000), SLOW, []),
    "one byte a connection": (send_one_byte, "(cut after|received|fewer than) .*; gave up", PART),
    "circle": (send(FOUND, b"/data.tar\r\n\r\n"), "without end", []),
    "ever other address": (lambda _: iter([FOUND + b"/%d\r\n\r\n" % time.time_ns()]), "without end", []),
    "endless redirect": (flood(FOUND + b"/data.tar\r\n\r\n", bytes(2**16)), "without end", []),
    "ftp": (send(FOUND, b"ftp://127.0.0.1/etc/passwd\r\n\r\n"), "unsupported protocol", []),
    "file": (send(FOUND, b"file:///etc/passwd\r\n\r\n"), "unsupported protocol", []),
    "two lines": (send(FOUND, b"file:///a\r\n \x1b[2J run: curl evil\r\n\r\n"), "unsupported protocol|answers 302", []),
    "escapes": (send(b"HTTP/1.1 404 \x1b[2Jrun: curl evil\r\n\r\n"), r"answers 404  \[2Jrun: curl evil", []),
    "more": (send_length("Content-Length: 2000"), "received 1000 bytes, expected 2000.; gave up", PART),
    "far more": (send_length(f"Content-Length: {10**19}"), "received 1000 bytes, expected 1.*; gave up", PART),
    "fewer": (send_length("Content-Length: 500"), "is damaged, not a .tar", []),
    "negative": (send_length("Content-Length: -5"), "bad Content-Length", []),
    "no number": (send_length("Content-Length: many"), "bad Content-Length", []),
    "part": (send(b"HTTP/1.1 206 No\r\nContent-Range: bytes 0-1/2\r\n\r\nab"), "has changed in the meantime", []),
    "shorter": (lambda request: iter([NO_RANGE if b"Range" in request else SHORT]), "is shorter than it was", []),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_server_is_dropped(cache, attack):
    answer, words, left = ATTACKS[attack]
    with serve(answer) as url:
        for _ in range(2):  # files that stay are neither the whole, nor continued with other bytes
            patience = 1.5 if attack in ("one byte a connection", "shorter") else 1.0
            assert set(expect_line(words, url, cache, patience)) <= set(left)


def test_fetch_slow_or_stalling_server_completes(cache, tmp_path):
    content = make_tar(tmp_path / "data.tar", "{}" + 10_000 * " ")

    def answer(request: bytes) -> Iterator[bytes]:
        yield OK + b"Content-Length: %d\r\n\r\n" % len(content)
        for start in range(0, len(content), 2_000):
            time.sleep(0.4 if start == 4_000 else 0.1)  # 20 kB/s
            yield content[start : start + 2_000]

    with serve(answer) as url:
        assert fetch.fetch(url, None, cache, patience=0.5).is_dir()


def test_fetch_stops_before_disk_full(cache, monkeypatch, tmp_path):
    content = make_tar(tmp_path / "data.tar")
    free = shutil.disk_usage(cache.parent).free
    monkeypatch.setattr(http, "KEEP_FREE", free - 20_000_000)
    with serve(flood(OK + b"\r\n", bytes(2**20))) as url:
        assert expect_line("no room for .* stay free", url, cache) == []
    monkeypatch.setattr(http, "KEEP_FREE", 2 * free)
    head = OK + b"Content-Length: %d\r\n\r\n" % len(content)
    with serve(send(head, content), drip(head, content[:1000]), send(head, content)) as url:
        assert expect_line("no room for .* stay free", url, cache) == PART
        assert sum(path.stat().st_size for path in cache.glob("*.part")) == 0
        assert ".unfinished" not in expect_line("no room for", str(tmp_path / "data.tar"), cache)
        monkeypatch.setattr(http, "KEEP_FREE", 0)
        expect_line("continues from 1.0 kB", url, cache, 0.1)
        assert fetch.fetch(url, None, cache).is_dir()


def test_fetch_ignores_time_but_checks_tag(cache, tmp_path):
    content = make_tar(tmp_path / "data.tar")

    def send_half(tag: bytes, second: int) -> Callable:
        def answer(request: bytes) -> Iterator[bytes]:
            start = int(request.partition(b"bytes=")[2].partition(b"-")[0] or 0)
            head = b"HTTP/1.1 206 No\r\nContent-Range: bytes %d-%d/%d\r\n" % (start, len(content) - 1, len(content))
            yield head if start else b"HTTP/1.1 200 OK\r\n"
            yield b"Connection: close\r\nETag: %b\r\n" % tag
            yield b"Last-Modified: Sun, 01 Nov 2026 00:00:%02d GMT\r\n" % second
            yield b"Content-Length: %d\r\n\r\n" % (len(content) - start)
            yield content[start:] if start else content[:1000]

        return answer

    with serve(send_half(b'"1"', 1), send_half(b'"1"', 2)) as url:
        assert fetch.fetch(url, None, cache).is_dir()
    # each cut answer of another server has another tag
    with serve(*(send_half(b'"%d"' % number, 1) for number in range(9))) as url:
        assert expect_line("has changed in the meantime", url, cache / "other", 2) == []


@pytest.mark.parametrize("text", [NESTED, "[]", '{"objective": []}'], ids=["nested", "list", "kind"])
def test_fetch_invalid_corpus_is_refused(cache, tmp_path, text):
    make_tar(tmp_path / "data.tar", text)
    with pytest.raises(UserError, match="is not a dataset of"):
        load_tokenized_dataset(fetch.fetch_data(str(tmp_path / "data.tar"), None, cache)[0], None)


def test_unpack_endless_headers_are_refused(cache, tmp_path):
    """tarfile reads a member with a long name recursively, and that may be another long name."""
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 512
    (tmp_path / "nested.tar").write_bytes(2000 * (member.tobuf() + bytes(512)))
    with tarfile.open(tmp_path / "long.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("first"))
        member = tarfile.TarInfo("second")
        member.pax_headers = {"comment": 2**21 * "x"}
        archive.addfile(member)
    assert expect_line("is damaged", str(tmp_path / "nested.tar"), cache) == []
    assert expect_line("a header of 2,097,1.. bytes", str(tmp_path / "long.tar"), cache) == []
