"""Data over HTTP: archives as the script packs them, a real server with real faults, hostile archives."""

import io
import os
import socket
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer
from mains import expect_user_error, run_main
from processes import read_files, wait_until

import tokenize_wikitext103
from arguments import ModelArguments
from common.console import UserError
from common.files import hash_file
from experiment import data
from text import fetch
from text.hosting import check_archive, make_archive, pack
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer


@pytest.fixture(scope="module")
def hosted(tmp_path_factory, tiny_data) -> Path:
    """A folder to serve: tiny.tar.gz, plain.tar, and big.tar of 3 MB."""
    folder = tmp_path_factory.mktemp("hosted")
    for name in ("tiny.tar.gz", "plain.tar"):
        make_archive(tiny_data["--dataset_path"], tiny_data["--tokenizer_path"], folder / name)
    padding = folder / "padding"
    padding.mkdir()
    (padding / "noise").write_bytes(np.random.default_rng(0).bytes(3_000_000))
    pack(folder / "big.tar", {"dataset": tiny_data["--dataset_path"], "padding": padding})
    return folder


@pytest.fixture
def server(hosted):
    with FileServer(hosted) as file_server:
        yield file_server


def left_in(cache: Path) -> list[str]:
    """Return the names of the files in the cache, except for locks."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def expect_stop(words: str, *arguments) -> None:
    with expect_user_error(words):
        fetch.fetch_data(*arguments)


def test_archive_bytes_are_deterministic(tmp_path, tiny_data, hosted, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in tiny_data["--dataset_path"].rglob("*"):
        os.utime(path, (1e9, 1e9))
    run_main(tokenize_wikitext103, *sum(tiny_data.items(), ()), "--archive", "other.tar.gz")
    assert (tmp_path / "other.tar.gz").read_bytes() == (hosted / "tiny.tar.gz").read_bytes()
    assert f"/other.tar.gz --dataset_sha256 {hash_file(hosted / 'tiny.tar.gz')}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["other.tar.gz"]
    with pytest.raises(UserError, match="other.tar.gz already exists"):
        check_archive(tmp_path / "other.tar.gz")


# ---------------------------------------------------------------- fetching


@pytest.mark.parametrize("name", ["tiny.tar.gz", "plain.tar"])
@pytest.mark.parametrize("is_remote", [True, False])
def test_archive_unpacks_to_original_folder(server, hosted, cache, tiny_data, name, is_remote):
    source = f"{server.url}/{name}" if is_remote else str(hosted / name)
    sha256 = hash_file(hosted / name)
    for _ in range(2):
        folder, fetched = fetch.fetch_data(source, sha256, cache)
    assert read_files(folder) == read_files(tiny_data["--dataset_path"])
    assert read_files(fetched) == read_files(tiny_data["--tokenizer_path"])
    # the second call found it in the cache
    assert len(server.requests) == is_remote
    assert left_in(cache) == [f"{name.split('.')[0]}-{sha256[:16]}"]
    # the archive's own tokenizer is taken unless another one is named
    assert data.choose_tokenizer(fetched, ModelArguments()) == fetched
    assert data.choose_tokenizer(fetched, ModelArguments(tokenizer_path="mine")) == "mine"
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
    has_all = attributes.get("has_ranges", True)
    server.cuts["/big.tar"] = [1_000_000, 1_000_000] if has_all or support == "no ranges" else [1_000_000]
    fetch.fetch(f"{server.url}/big.tar", hash_file(hosted / "big.tar"), cache)
    assert [wanted for _, wanted in server.requests] == requests
    if has_all:
        assert server.count("big.tar") == (hosted / "big.tar").stat().st_size  # no byte twice


@pytest.mark.parametrize("change", ["larger", "smaller"])
def test_changed_file_is_downloaded_again(server, hosted, cache, tmp_path, change):
    """The server continues with the new file, or no longer has the range."""
    first, second = ("tiny.tar.gz", "big.tar") if change == "larger" else ("big.tar", "tiny.tar.gz")
    server.folder = tmp_path
    (tmp_path / "data.tar").write_bytes((hosted / first).read_bytes())
    server.cuts["/data.tar"] = [(hosted / first).stat().st_size - 1000]
    server.answers["/data.tar"] = [200, 404]
    with pytest.raises(UserError, match="404"):
        fetch.fetch(f"{server.url}/data.tar", None, cache)
    (tmp_path / "data.tar").write_bytes((hosted / second).read_bytes())
    server.answers, server.version = {}, "2"
    folder = fetch.fetch(f"{server.url}/data.tar", None, cache)
    fetch.unpack(hosted / second, second, tmp_path / "expected")
    assert read_files(folder) == read_files(tmp_path / "expected")


def test_failing_server_is_retried_then_dropped(server, cache, caplog):
    server.answers["/tiny.tar.gz"] = [500, 429, 200]
    assert fetch.fetch(f"{server.url}/tiny.tar.gz", None, cache, patience=10).is_dir()
    assert len(server.requests) == 3 and "answers 500" in caplog.text
    server.answers["/plain.tar"] = [503]
    start = time.monotonic()
    with pytest.raises(UserError, match="answers 503 .*gave up"):
        fetch.fetch(f"{server.url}/plain.tar", None, cache, patience=2)
    assert time.monotonic() - start < 5
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(UserError, match="All connection attempts failed; gave up"):
        fetch.fetch(f"http://127.0.0.1:{port}/tiny.tar.gz", None, cache, patience=0.5)


FAULTS = {
    "missing": (None, "answers 404 Not Found: check the address"),
    "empty": (b"", "is empty"),
    "page": (b"<!DOCTYPE html><title>Sign in</title>", "begins with b'<!DOCTYPE html"),
    "gzip": (b"\x1f\x8b\x08 and no more", "is damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_archive_is_one_line(server, tmp_path, cache, fault):
    content, words = FAULTS[fault]
    server.folder = tmp_path
    if content is not None:
        (tmp_path / "data.tar.gz").write_bytes(content)
    expect_stop(words, f"{server.url}/data.tar.gz", None, cache)
    assert left_in(cache) == []


def test_wrong_or_cut_archive_is_refused(server, hosted, cache):
    url, sha256 = f"{server.url}/tiny.tar.gz", hash_file(hosted / "tiny.tar.gz")
    expect_stop(f"has sha256 {sha256}, not {'0' * 64}", url, "0" * 64, cache)
    server.has_length, server.cuts["/tiny.tar.gz"] = False, [20_000]
    expect_stop("damaged", url, None, cache)
    assert left_in(cache) == []
    assert fetch.fetch_data(url, sha256.upper(), cache)[0].is_dir()


# ---------------------------------------------------------------- hostile archives


MEMBERS = {  # name, type and target of a link
    "parent": ("../escaped", tarfile.REGTYPE, ""),
    "inner parent": ("dataset/../../escaped", tarfile.REGTYPE, ""),
    "absolute": ("/tmp/escaped", tarfile.REGTYPE, ""),
    "symlink": ("dataset/link", tarfile.SYMTYPE, "../../.."),
    "absolute symlink": ("dataset/link", tarfile.SYMTYPE, "/tmp"),
    "inner symlink": ("dataset/link", tarfile.SYMTYPE, "corpus.json"),
    "hard link": ("dataset/link", tarfile.LNKTYPE, "../../../escaped"),
    "device": ("dataset/null", tarfile.CHRTYPE, ""),
    "fifo": ("dataset/fifo", tarfile.FIFOTYPE, ""),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_archive_path_traversal_is_refused(tmp_path, cache, kind):
    with tarfile.open(tmp_path / "hostile.tar", "w") as archive:
        good, bad, through_link = (
            tarfile.TarInfo(n) for n in ("dataset/corpus.json", MEMBERS[kind][0], "dataset/link/a")
        )
        good.size = through_link.size = 2
        _, bad.type, bad.linkname = MEMBERS[kind]
        bad.devmajor, bad.devminor = 1, 3
        for member in (good, bad, through_link):
            archive.addfile(member, io.BytesIO(b"{}"[: member.size]))
    expect_stop("files outside its folder, and is not used", str(tmp_path / "hostile.tar"), None, cache)
    assert left_in(cache) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "hostile.tar"]


# ---------------------------------------------------------------- processes

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
    server.chunk_delay = 0.05
    processes = [start(f"peer{number}", "-c", FETCH, url, sha256, cache) for number in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert processes[0].text.splitlines()[-1] == processes[1].text.splitlines()[-1]
    assert server.count("big.tar") == size
    assert sum("another process fetches the same" in process.text for process in processes) == 1
