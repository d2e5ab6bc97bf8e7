"""Data over HTTP: archives as the script packs them, a server with real faults, hostile servers and archives. Each ends
in one line, and nothing of theirs is taken for data."""

import io
import os
import shutil
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer, drip, flood, send, serve
from mains import expect_user_error, run_main
from processes import read_files, wait_until

import tokenize_wikitext103
from common.console import UserError
from common.files import hash_file
from text import fetch, http
from text.fetch import make_archive, pack
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
FOUND = b"HTTP/1.1 302 Found\r\nConnection: close\r\nLocation: "


@pytest.fixture
def cache(tmp_path):
    """A folder for downloads, which does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def short_patience(request, monkeypatch):
    """With hostile servers; an honest one may be slow on a busy machine."""
    if "server" not in request.fixturenames:
        monkeypatch.setattr(http, "FIRST_DELAY", 0.05)


def left_in(cache: Path) -> list[Path]:
    """Return the files in the cache, except for locks."""
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


def expect_line(words: str, url: str, cache: Path, patience: float = 20.0) -> list[str]:
    """Expect the fetch to fail soon, in one line with these words; return the kinds of files in the cache.

    :param patience: after which the fetch gives up; shorter if the test expects that
    """
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=words) as error:
        patch.setattr(http, "PATIENCE", patience)
        fetch.fetch(url, None, cache)
    assert str(error.value).isprintable()  # one line, and no escapes
    assert time.monotonic() - start < 20  # this machine may be busy
    return sorted("".join(path.suffixes) for path in left_in(cache))


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "gopher://127.0.0.1:9", "http://127.0.0.1:no"])
def test_unusable_proxy_is_one_line(cache, monkeypatch, proxy):
    """httpx has no SOCKS without a further package."""
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ALL_PROXY", proxy)
    expect_line("check the proxy", "http://example.org/a.tar", cache)


def expect_stop(words: str, *arguments) -> None:
    with expect_user_error(words):
        fetch.fetch_data(*arguments)


def make_tar(path: Path, text: str = "{}") -> bytes:
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("dataset/corpus.json")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return path.read_bytes()


def find_start(request: bytes) -> int:
    """Return the first byte that the request's Range asks for."""
    return int(request.partition(b"bytes=")[2].partition(b"-")[0] or 0)


def send_one_byte(request: bytes) -> Iterator[bytes]:
    start = find_start(request)
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
    "endless redirect": (flood(FOUND + b"/data.tar\r\n\r\n", bytes(2**16)), "without end", []),
    "file": (send(FOUND, b"file:///etc/passwd\r\n\r\n"), "unsupported protocol", []),
    "two lines": (send(FOUND, b"file:///a\r\n \x1b[2J run: curl evil\r\n\r\n"), "unsupported protocol|answers 302", []),
    "escapes": (send(b"HTTP/1.1 404 \x1b[2Jrun: curl evil\r\n\r\n"), r"answers 404  \[2Jrun: curl evil", []),
    "more": (send_length("Content-Length: 2000"), "received 1000 bytes, expected 2000.; gave up", PART),
    "far more": (send_length(f"Content-Length: {10**19}"), "received 1000 bytes, expected 1.*; gave up", PART),
    "fewer": (send_length("Content-Length: 500"), "is damaged, not a .tar", []),
    "no number": (send_length("Content-Length: many"), "bad Content-Length; gave up", []),
    "part": (send(b"HTTP/1.1 206 No\r\nContent-Range: bytes 0-1/2\r\n\r\nab"), "has changed in the meantime", []),
    "missing": (send(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n"), "404 Not Found: check the address", []),
    "empty": (send(OK, b"\r\n"), "is empty", []),
    "page": (send(OK, b"\r\n<!DOCTYPE html><title>Sign in</title>"), "begins with b'<!DOCTYPE html", []),
    "gzip": (send(OK, b"\r\n\x1f\x8b\x08 and no more"), "is damaged", []),
    "shorter": (lambda request: iter([NO_RANGE if b"Range" in request else SHORT]), "is shorter than it was", []),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_server_is_dropped(cache, attack):
    answer, words, left = ATTACKS[attack]
    with serve(answer) as url:
        for _ in range(2 if left else 1):  # files that stay are neither the whole, nor continued with other bytes
            patience = 1.5 if attack == "one byte a connection" else 1.0 if "gave up" in words else 20.0
            assert set(expect_line(words, url, cache, patience)) <= set(left)


def test_fetch_slow_or_stalling_server_completes(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(http, "PATIENCE", 3.0)
    content = make_tar(tmp_path / "data.tar", "{}" + 40_000 * " ")

    def answer(request: bytes) -> Iterator[bytes]:
        yield OK + b"Content-Length: %d\r\n\r\n" % len(content)
        for start in range(0, len(content), 2_000):
            time.sleep(2.0 if start == 4_000 else 0.1)  # 20 kB/s
            yield content[start : start + 2_000]

    with serve(answer) as url:
        assert fetch.fetch(url, None, cache).is_dir()


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
        expect_line("continues from 1.0 kB", url, cache, patience=2.0)
        assert fetch.fetch(url, None, cache).is_dir()


def test_fetch_ignores_time_but_checks_tag(cache, tmp_path):
    content = make_tar(tmp_path / "data.tar")

    def send_half(tag: bytes, second: int) -> Callable:
        def answer(request: bytes) -> Iterator[bytes]:
            start = find_start(request)
            head = b"HTTP/1.1 206 No\r\nContent-Range: bytes %d-%d/%d\r\n" % (start, len(content) - 1, len(content))
            yield head if start else b"HTTP/1.1 200 OK\r\n"
            yield b"Connection: close\r\nETag: %b\r\nLast-Modified: Sun, 01 Nov 2026 00:00:%02d GMT\r\n" % (tag, second)
            yield b"Content-Length: %d\r\n\r\n" % (len(content) - start)
            yield content[start:] if start else content[:1000]

        return answer

    with serve(send_half(b'"1"', 1), send_half(b'"1"', 2)) as url:
        assert fetch.fetch(url, None, cache).is_dir()
    # each cut answer of another server has another tag
    with serve(*(send_half(b'"%d"' % number, 1) for number in range(9))) as url:
        assert expect_line("has changed in the meantime", url, cache / "other") == []


@pytest.mark.parametrize("text", [NESTED, "[]", '{"objective": []}'], ids=["nested", "list", "kind"])
def test_fetch_invalid_corpus_is_refused(cache, tmp_path, text):
    make_tar(tmp_path / "data.tar", text)
    with expect_user_error("is not a dataset of"):
        load_tokenized_dataset(fetch.fetch_data(str(tmp_path / "data.tar"), None, cache)[0], None)


def test_unpack_endless_headers_are_refused(cache, tmp_path):
    """tarfile reads a member with a long name recursively, and that may be another long name."""
    nested, long = tarfile.TarInfo("././@LongLink"), tarfile.TarInfo("second")
    nested.type, nested.size, long.pax_headers = tarfile.GNUTYPE_LONGNAME, 512, {"comment": 2**21 * "x"}
    (tmp_path / "nested.tar").write_bytes(2000 * (nested.tobuf() + bytes(512)))
    with tarfile.open(tmp_path / "long.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("first"))
        archive.addfile(long)
    assert expect_line("is damaged", str(tmp_path / "nested.tar"), cache) == []
    assert expect_line("a header of 2,097,1.. bytes", str(tmp_path / "long.tar"), cache) == []


@pytest.mark.parametrize(
    "members",
    [{"a": {"path": "a\0b"}}, {"a": {"mtime": "1e30"}}, {"a": {}, "a/b": {}}, {"a/b": {}, "a": {}}],
    ids=["name", "time", "file as folder", "folder as file"],
)
def test_unpack_impossible_header_leaves_no_download(cache, tmp_path, members):
    """Each later start would unpack the complete download again, and fail without a request."""
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        for name, header in members.items():
            member = tarfile.TarInfo(name)
            member.pax_headers = header
            archive.addfile(member)
    content = (tmp_path / "data.tar").read_bytes()
    with serve(send(OK, b"Content-Length: %d\r\n\r\n" % len(content), content)) as url:
        assert expect_line("is damaged", url, cache) == []


@pytest.fixture(scope="module")
def hosted(tmp_path_factory, tiny_data) -> Path:
    """A folder to serve: tiny.tar.gz, plain.tar, and big.tar of 3 MB."""
    folder = tmp_path_factory.mktemp("hosted")
    for name in ("tiny.tar.gz", "plain.tar"):
        make_archive(tiny_data["--dataset_path"], tiny_data["--tokenizer_path"], folder / name)
    (folder / "padding").mkdir()
    (folder / "padding" / "noise").write_bytes(np.random.default_rng(0).bytes(3_000_000))
    pack(folder / "big.tar", {"dataset": tiny_data["--dataset_path"], "padding": folder / "padding"})
    return folder


@pytest.fixture
def server(hosted):
    with FileServer(hosted) as file_server:
        yield file_server


def test_archive_bytes_are_deterministic(tmp_path, tiny_data, hosted, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in tiny_data["--dataset_path"].rglob("*"):
        os.utime(path, (1e9, 1e9))
    run_main(tokenize_wikitext103, *sum(tiny_data.items(), ()), "--archive", "other.tar.gz")
    assert (tmp_path / "other.tar.gz").read_bytes() == (hosted / "tiny.tar.gz").read_bytes()
    assert f"/other.tar.gz --dataset_sha256 {hash_file(hosted / 'tiny.tar.gz')}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["other.tar.gz"]
    with expect_user_error("other.tar.gz already exists"):
        tokenize_wikitext103.require_absent("--archive", tmp_path / "other.tar.gz")


@pytest.mark.parametrize("name", ["tiny.tar.gz", "plain.tar"])
@pytest.mark.parametrize("is_remote", [True, False])
def test_archive_unpacks_to_original_folder(server, hosted, cache, tiny_data, name, is_remote):
    source = f"{server.url}/{name}" if is_remote else str(hosted / name)
    sha256 = hash_file(hosted / name)
    folder, fetched = fetch.fetch_data(source, sha256, cache)
    assert read_files(folder) == read_files(tiny_data["--dataset_path"])
    assert read_files(fetched) == read_files(tiny_data["--tokenizer_path"])
    # the second call finds it in the cache
    assert fetch.fetch_data(source, sha256, cache) == (folder, fetched) and len(server.requests) == is_remote
    assert [path.name for path in left_in(cache)] == [f"{name.split('.')[0]}-{sha256[:16]}"]
    dataset, corpus = load_tokenized_dataset(folder, load_tokenizer(fetched))
    assert len(dataset["train"]) == corpus["instances"]["train"] > 0


def test_dataset_folder_is_left_unchanged(tiny_data, cache):
    folder = tiny_data["--dataset_path"]
    assert fetch.fetch_data(str(folder), None, cache) == (folder, None)
    assert not cache.exists()
    expect_stop("--dataset_sha256", str(folder), "0" * 64, cache)
    for address in ("s3://bucket/a.tar", "http://[bad/a.tar", "http://host:x/a.tar"):
        expect_stop("is not an http(s) address", address, None, cache)


CUTS = {  # the features of the server, and the requests
    "tag": ({}, [None, "bytes=1000000-", "bytes=2000000-"]),
    "time": ({"validator": "Last-Modified"}, [None, "bytes=1000000-", "bytes=2000000-"]),
    "ranges": ({"validator": None}, [None, "bytes=1000000-", "bytes=2000000-"]),
    "no ranges": ({"has_ranges": False}, [None, "bytes=1000000-", "bytes=1000000-"]),
    "nothing": ({"has_ranges": False, "validator": None}, [None, "bytes=1000000-"]),
}


@pytest.mark.parametrize("support", CUTS)
def test_cut_download_resumes(server, hosted, cache, support):
    attributes, requests = CUTS[support]
    vars(server).update(attributes)
    server.cuts["/big.tar"] = [1_000_000] * (len(requests) - 1)
    fetch.fetch(f"{server.url}/big.tar", hash_file(hosted / "big.tar"), cache)
    assert [wanted for _, wanted in server.requests] == requests
    if server.has_ranges:
        assert server.count("big.tar") == (hosted / "big.tar").stat().st_size  # no byte twice


@pytest.mark.parametrize("change", ["larger", "smaller"])
def test_changed_file_is_downloaded_again(server, hosted, cache, tmp_path, change):
    """The server continues with the new file, or no longer has the range."""
    first, second = ("tiny.tar.gz", "big.tar") if change == "larger" else ("big.tar", "tiny.tar.gz")
    server.folder = tmp_path
    (tmp_path / "data.tar").write_bytes((hosted / first).read_bytes())
    server.cuts["/data.tar"] = [(hosted / first).stat().st_size - 1000]
    server.answers["/data.tar"] = [200, 404]
    with expect_user_error("404"):
        fetch.fetch(f"{server.url}/data.tar", None, cache)
    (tmp_path / "data.tar").write_bytes((hosted / second).read_bytes())
    server.answers, server.version = {}, "2"
    folder = fetch.fetch(f"{server.url}/data.tar", None, cache)
    fetch.unpack(hosted / second, second, tmp_path / "expected")
    assert read_files(folder) == read_files(tmp_path / "expected")


def test_failing_server_is_retried_then_dropped(server, cache, caplog):
    server.answers["/tiny.tar.gz"] = [500, 429, 200]
    assert fetch.fetch(f"{server.url}/tiny.tar.gz", None, cache).is_dir()
    assert len(server.requests) == 3 and "answers 500" in caplog.text
    server.answers["/plain.tar"] = [503]
    expect_line("answers 503 .*gave up", f"{server.url}/plain.tar", cache, patience=2)
    assert server.requests.count(("/plain.tar", None)) <= 3  # after 0, 0.5 and 1.5 s
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    expect_line("All connection attempts failed; gave up", f"http://127.0.0.1:{port}/tiny.tar.gz", cache, patience=1)


def test_wrong_or_cut_archive_is_refused(server, hosted, cache):
    url, sha256 = f"{server.url}/tiny.tar.gz", hash_file(hosted / "tiny.tar.gz")
    expect_stop(f"has sha256 {sha256}, not {'0' * 64}", url, "0" * 64, cache)
    server.has_length, server.cuts["/tiny.tar.gz"] = False, [20_000]
    expect_stop("damaged", url, None, cache)
    assert left_in(cache) == []
    assert fetch.fetch_data(url, sha256.upper(), cache)[0].is_dir()


MEMBERS = {  # name, type and target of a link
    "parent": ("../escaped", tarfile.REGTYPE, ""),
    "inner parent": ("dataset/../../escaped", tarfile.REGTYPE, ""),
    "absolute": ("/tmp/escaped", tarfile.REGTYPE, ""),
    "symlink": ("dataset/link", tarfile.SYMTYPE, "../../.."),
    "inner symlink": ("dataset/link", tarfile.SYMTYPE, "corpus.json"),
    "hard link": ("dataset/link", tarfile.LNKTYPE, "../../../escaped"),
    "device": ("dataset/null", tarfile.CHRTYPE, ""),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_archive_path_traversal_is_refused(tmp_path, cache, kind):
    with tarfile.open(tmp_path / "hostile.tar", "w") as archive:
        good, bad, through_link = map(tarfile.TarInfo, ("dataset/corpus.json", "", "dataset/link/a"))
        good.size = through_link.size = 2
        bad.name, bad.type, bad.linkname = MEMBERS[kind]
        bad.devmajor, bad.devminor = 1, 3
        for member in (good, bad, through_link):
            archive.addfile(member, io.BytesIO(b"{}"[: member.size]))
    expect_stop("files outside its folder, and is not used", str(tmp_path / "hostile.tar"), None, cache)
    assert left_in(cache) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "hostile.tar"]


FETCH = """
import logging, sys
from text.fetch import fetch_data
logging.basicConfig(level="INFO")
print(fetch_data(*sys.argv[1:4])[0])
"""


def test_killed_download_resumes_every_byte_once(start, server, hosted, cache):
    """Of the next two processes, one downloads the rest, and the other waits."""
    url, sha256, size = f"{server.url}/big.tar", hash_file(hosted / "big.tar"), (hosted / "big.tar").stat().st_size
    server.is_stalling, server.cuts["/big.tar"] = True, [2_000_000]
    first = start("first", "-c", FETCH, url, sha256, cache)
    part = cache / f"big-{sha256[:16]}.part"
    wait_until(lambda: part.exists() and part.stat().st_size == 2_000_000, 60, "two thirds are here")
    first.kill()
    server.chunk_delay = 2.0
    processes = [start(f"peer{number}", "-c", FETCH, url, sha256, cache) for number in range(2)]
    waiting = "another process fetches the same"
    wait_until(lambda: any(waiting in process.text for process in processes), 60, "one that waits for the other")
    server.chunk_delay = 0.0
    assert [process.wait(60) for process in processes] == [0, 0]
    assert processes[0].text.splitlines()[-1] == processes[1].text.splitlines()[-1]
    assert server.count("big.tar") == size
    assert sum(waiting in process.text for process in processes) == 1
