"""Download archives and shards of data over HTTP, verify them, and unpack them safely into a cache.

    python tokenize_wikitext103.py --archive wikitext.tar.gz        # prints the sha256
    python run_trainer.py --dataset_path https://example.org/wikitext.tar.gz --dataset_sha256 2c26b46b... ...

In the cache folder the name of an archive comes from its sha256 if that is known, otherwise from its address:

    NAME/                   the unpacked archive, always complete
    NAME.part, .part.json   an unfinished download, and the facts that its server reported
    NAME.json               the index of an archive in shards
    NAME.lock               a lock that makes a second trainer wait for the same download
"""

import contextlib
import errno
import gzip
import hashlib
import json
import logging
import lzma
import os
import re
import shutil
import tarfile
import urllib.parse
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from common.console import UserError, format_bytes, show_progress
from common.files import hash_file, locked, read_json
from text.http import ChangedError, HttpError, HttpFile, is_url

logger = logging.getLogger("fetch")

PATIENCE = 60.0  # seconds without a byte, over all attempts, before the start fails
KEEP_FREE = 10**9  # bytes of the disk that stay free for other programs
MAX_HEADER = 2**20  # bytes of a file's header in an archive
MOST_RESTARTS = 3  # of a download whose file changes


class NoRoomError(UserError):
    """The error of a cache whose disk is full."""


@dataclass
class Shard:
    """An archive that an index lists."""

    source: str  # URL or path
    sha256: str


@dataclass
class FetchedDataset:
    """The local folders of the dataset that --dataset_path names."""

    dataset: Path  # folder with corpus.json
    tokenizer: Path | None = None  # folder of the archive's tokenizer
    shards: list[Shard] = field(default_factory=list)  # the train split, if it is not in the folder
    cache_dir: Path = Path()


def fetch_data(path: str, sha256: str | None, cache_dir: str | Path) -> FetchedDataset:
    """Download and unpack the dataset that --dataset_path names, or find it in the cache; on failure, a UserError.

    :param path: a folder, an archive, an index of shards, or the http(s) URL of one
    :param sha256: the file's sha256, 64 hexadecimal digits; None: do not check it
    """
    cache_dir = Path(cache_dir)
    if "://" in path and not is_url(path):
        raise UserError(f"--dataset_path {path} is not an http(s) address: fix it, or fetch the file and name that")
    if not is_url(path) and not Path(path).is_file():
        if sha256:
            raise UserError(f"--dataset_sha256 is for an archive, and {path} is not one: omit it")
        return FetchedDataset(Path(path))
    found = fetch(path, sha256, cache_dir)
    if found.is_dir():
        return FetchedDataset(*locate_dataset(found))
    common, *shards = read_index(found, path)
    dataset, tokenizer = locate_dataset(fetch(common.source, common.sha256, cache_dir))
    return FetchedDataset(dataset, tokenizer, shards, cache_dir)


def fetch(source: str, sha256: str | None, cache_dir: Path, patience: float = PATIENCE, is_shown: bool = True) -> Path:
    """Return the cache's folder of the unpacked archive, or its index file, after a download if necessary.

    :param patience: the seconds without a byte, over all attempts, before a UserError
    :param is_shown: whether to show progress
    """
    sha256 = sha256.lower() if sha256 else None
    folder = cache_dir / make_name(source, sha256)
    index = folder.with_suffix(".json")
    try:
        # at first without the lock, because a shared cache may be read-only
        if not folder.exists() and not index.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_suffix(".lock")):
                if not folder.exists() and not index.exists():
                    fetch_missing(source, sha256, folder, patience, is_shown)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError(
                f"no room for {source} in {cache_dir}, where {format_bytes(KEEP_FREE)} stay free: free some space, or "
                "give another --dataset_cache_dir; the same command continues from there"
            ) from e
        raise UserError(f"cannot store {source} in {cache_dir} ({e}): give another --dataset_cache_dir") from e
    return index if index.exists() else folder


def fetch_missing(source: str, sha256: str | None, folder: Path, patience: float, is_shown: bool) -> None:
    """Put a file that is not in the cache there, like `fetch`."""
    file = Path(source)
    if is_url(source):
        file = folder.with_suffix(".part")
        download(source, file, patience, is_shown)
    try:
        found = hash_file(file)
        if sha256 is None:
            logger.info(f"{source} has sha256 {found}: pass it as --dataset_sha256 to verify the next download")
        elif found != sha256:
            raise UserError(
                f"{source} has sha256 {found}, not {sha256}, and is not used: ask its publisher, then try again"
            )
        with open(file, "rb") as opened:
            is_index = opened.read(1) == b"{"
        if is_index:
            read_index(file, source)
            shutil.copy(file, folder.with_suffix(".unfinished"))
            folder.with_suffix(".unfinished").replace(folder.with_suffix(".json"))
        else:
            unpack(file, source, folder)
    except UserError:
        discard(folder)
        raise
    discard(folder)


def make_name(source: str, sha256: str | None) -> str:
    """Return the name in the cache: part of the source's name, and a hash."""
    if not sha256:
        text = source
        if not is_url(source):
            status = os.stat(source)
            text = f"{os.path.abspath(source)} {status.st_size} {status.st_mtime_ns}"
        sha256 = hashlib.sha256(text.encode()).hexdigest()
    stem = PurePosixPath(source.partition("?")[0]).name.split(".")[0]
    return f"{re.sub(r'[^A-Za-z0-9_-]', '', stem)[:60] or 'data'}-{sha256[:16]}"


# --- download ---------------------------------------------------------------------------------------------------------


def download(url: str, partial: Path, patience: float, is_shown: bool, restarts: int = MOST_RESTARTS) -> None:
    """Download a URL to the file `partial`, from the byte at which an earlier attempt or process stopped."""
    facts_file = partial.with_suffix(".part.json")
    if not (facts := read_json(facts_file)):
        discard(partial)
    total = 0
    try:
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(HttpFile(url, patience, facts=facts))
            total = source.find_size()
            facts_file.write_text(json.dumps(source.facts))
            file = stack.enter_context(open(partial, "ab"))
            received = source.seek(file.tell())
            if is_shown:
                bar = stack.enter_context(show_progress(f"fetching {partial.stem}", total, received))
            while piece := source.read(1 << 16):
                check_room(partial.parent, len(piece))
                file.write(piece)
                file.flush()  # keeps the bytes if this process is killed
                if is_shown:
                    bar.update(len(piece))
    except OSError:
        if total is None:  # the file may be endless
            discard(partial)
        raise
    except ChangedError as e:
        discard(partial)
        if not restarts:
            raise UserError(f"{url}: {e}: the same command downloads it again") from e
        logger.warning(f"{url}: {e}: starting over")
        return download(url, partial, patience, is_shown, restarts - 1)
    except HttpError as e:
        size = partial.stat().st_size if partial.exists() else 0
        more = f". The same command continues from {format_bytes(size)}" if size else ""
        raise UserError(f"{url}: {e}{more}") from e
    if not partial.stat().st_size:
        discard(partial)
        raise UserError(f"{url} is empty: check the address")


def check_room(folder: Path, size: int) -> None:
    """Raise the OSError of a full disk if another `size` bytes would leave less than KEEP_FREE."""
    if shutil.disk_usage(folder).free - size < KEEP_FREE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def discard(partial: Path) -> None:
    """Remove a download, by its name with any suffix, that is no longer needed."""
    for suffix in (".part", ".part.json"):
        partial.with_suffix(suffix).unlink(missing_ok=True)


# --- archives ---------------------------------------------------------------------------------------------------------


def read_index(file: Path, source: str) -> list[Shard]:
    """Return the archives that an index lists, the common one first; they are in the same place as the index."""
    shards = []
    try:
        if file.stat().st_size > 10**7:  # bytes; enough for 60,000 shards
            raise ValueError("it has more than 10 MB")
        index = json.loads(file.read_text())
        for entry in [index["common"], *index["shards"]]:
            if not re.fullmatch(r"[\w-][\w.-]*", entry["name"]) or not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
                raise ValueError(f"{entry['name']!r:.80} is not a file name, or its sha256 is not a SHA-256")
            name = entry["name"]
            place = urllib.parse.urljoin(source, name) if is_url(source) else str(Path(source).parent / name)
            shards.append(Shard(place, entry["sha256"]))
        if len(shards) < 2:
            raise ValueError("it lists none")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(
            f"{source} is not an index of shards ({e!r}): make it with tokenize_wikitext103.py --archive"
        ) from e
    return shards


class BoundedInfo(tarfile.TarInfo):
    """A member of an archive whose headers are bounded; tarfile reads headers of any size into memory."""

    @classmethod
    def frombuf(cls, *args) -> tarfile.TarInfo:
        """Parse a header, and refuse one that would have tarfile allocate more than MAX_HEADER bytes."""
        member = super().frombuf(*args)
        if not (member.isreg() or member.isdir()) and member.size > MAX_HEADER:
            raise tarfile.ReadError(f"a header of {member.size:,} bytes")
        return member


def take_plain(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Refuse what tarfile's data filter refuses, all links, and absolute names; check the room on the disk."""
    if not (member.isreg() or member.isdir()):
        raise tarfile.SpecialFileError(member)
    if member.name.startswith("/"):
        raise tarfile.AbsolutePathError(member)
    check_room(Path(folder), member.size)
    return tarfile.data_filter(member, folder)


def unpack(file: Path, source: str, folder: Path) -> None:
    """Unpack an archive, in which links and devices are forbidden, to `folder`, which appears once it is complete."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir()
    try:
        with tarfile.open(file, "r:*", tarinfo=BoundedInfo) as archive:
            archive.extractall(unfinished, filter=take_plain)
        locate_dataset(unfinished, source)
        unfinished.rename(folder)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, RecursionError) as e:
        with open(file, "rb") as opened:
            begin = opened.read(16)
        raise UserError(
            f"{source} is damaged, not a .tar, .tar.gz or index, or has links or files outside its folder, and is not "
            f"used: pack it with tokenize_wikitext103.py --archive ({str(e).splitlines()[0]}; it begins with {begin!r})"
        ) from e
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def locate_dataset(folder: Path, source: str | None = None) -> tuple[Path, Path | None]:
    """Return the folders of the dataset and of the tokenizer or None, at any depth of an unpacked archive."""
    corpora, tokenizers = (sorted(folder.rglob(name)) for name in ("corpus.json", "tokenizer_config.json"))
    if len(corpora) != 1:
        number = "more than one dataset" if corpora else "no dataset"
        raise UserError(f"{source or folder} contains {number}: make it with python tokenize_wikitext103.py --archive")
    return corpora[0].parent, tokenizers[0].parent if len(tokenizers) == 1 else None
