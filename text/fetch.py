"""Pack a dataset and its tokenizer into one archive; download it over HTTP, verify it, and unpack it into a cache.

    python tokenize_wikitext103.py --archive wikitext.tar.gz        # prints the sha256
    python run_trainer.py --dataset_path https://example.org/wikitext.tar.gz --dataset_sha256 2c26b46b... ...

In the cache folder the name of an archive comes from its sha256 if that is known, otherwise from its address:

    NAME/                   the unpacked archive, always complete
    NAME.part, .part.json   an unfinished download, and the facts that its server reported
    NAME.lock               a lock that makes a second trainer wait for the same download
"""

import asyncio
import contextlib
import errno
import gzip
import hashlib
import logging
import lzma
import os
import re
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from common.console import UserError, format_bytes
from common.files import hash_file, locked, read_json, unfinished_folder
from text.http import KEEP_FREE, HttpError, check_room, discard, download, is_url
from text.instances import KINDS, PAIRS
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer

logger = logging.getLogger("fetch")

MAX_HEADER = 2**20  # bytes of a file's header in an archive
# of nested headers, of impossible names and times, and of members that are files and folders at once
MEMBER_ERRORS = (RecursionError, ValueError, OverflowError, FileExistsError, IsADirectoryError, NotADirectoryError)


def fetch_data(path: str, sha256: str | None, cache_dir: str | Path) -> tuple[Path, Path | None]:
    """Download and unpack the dataset that --dataset_path names, or find it in the cache; on failure, a UserError.

    :param path: a folder, an archive, or the http(s) URL of one
    :param sha256: the archive's sha256, 64 hexadecimal digits; None: do not check it
    :returns: the local folders of the dataset, and of the archive's tokenizer or None
    """
    if "://" in path and not is_url(path):
        raise UserError(f"--dataset_path {path} is not an http(s) address: fix it, or fetch the file and name that")
    if not is_url(path) and not Path(path).is_file():
        if sha256:
            raise UserError(f"--dataset_sha256 is for an archive, and {path} is not one: omit it")
        return Path(path), None
    return locate_dataset(fetch(path, sha256, Path(cache_dir)))


def fetch(source: str, sha256: str | None, cache_dir: Path) -> Path:
    """Return the cache's folder of the unpacked archive, after a download if necessary."""
    sha256 = sha256.lower() if sha256 else None
    folder = cache_dir / make_name(source, sha256)
    try:
        # at first without the lock, because a shared cache may be read-only
        if not folder.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_suffix(".lock")):
                if not folder.exists():
                    fetch_missing(source, sha256, folder)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no room for {source} in {cache_dir}, where {format_bytes(KEEP_FREE)} stay free: free some space, or "
                "give another --dataset_cache_dir; the same command continues from there"
            ) from e
        raise UserError(f"cannot store {source} in {cache_dir} ({e}): give another --dataset_cache_dir") from e
    return folder


def fetch_missing(source: str, sha256: str | None, folder: Path) -> None:
    """Put an archive that is not in the cache there, like `fetch`."""
    file = Path(source)
    if is_url(source):
        file = folder.with_suffix(".part")
        try:
            asyncio.run(download(source, file))
        except HttpError as e:
            size = file.stat().st_size if file.exists() else 0
            more = f". The same command continues from {format_bytes(size)}" if size else ""
            raise UserError(f"{source}: {e}{more}") from e
    try:
        if not file.stat().st_size:
            raise UserError(f"{source} is empty: check the address")
        found = hash_file(file)
        if sha256 is None:
            logger.info(f"{source} has sha256 {found}: pass it as --dataset_sha256 to verify the next download")
        elif found != sha256:
            raise UserError(
                f"{source} has sha256 {found}, not {sha256}, and is not used: ask its publisher, then try again"
            )
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
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, *MEMBER_ERRORS) as e:
        with open(file, "rb") as opened:
            begin = opened.read(16)
        raise UserError(
            f"{source} is damaged, not a .tar or .tar.gz, or has links or files outside its folder, and is not "
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


def make_archive(dataset_path: Path, tokenizer_path: Path, archive: Path) -> None:
    """Pack dataset and tokenizer into an archive, and print the flags for a trainer."""
    kind = KINDS.get(read_json(dataset_path / "corpus.json").get("objective"), PAIRS)
    load_tokenized_dataset(dataset_path, load_tokenizer(tokenizer_path, kind))
    with unfinished_folder(archive) as folder:
        packed = folder / archive.name
        sha256 = pack(packed, {"dataset": dataset_path, "tokenizer": tokenizer_path})
        packed.rename(archive)
    print(
        f"packed {dataset_path} and {tokenizer_path} into {format_bytes(archive.stat().st_size)}; put it on any web "
        f"server, then for each trainer:\n--dataset_path https://YOUR_HOST/{archive.name} --dataset_sha256 {sha256}"
    )


def pack(archive: Path, folders: dict[str, Path]) -> str:
    """Write an archive of folders by their names in it, and return its sha256.

    The same files result in the same bytes on every machine, because they are sorted, without owners and times. (The
    bytes of a .tar.gz also depend on the version of zlib.)
    """
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(open(archive, "wb"))
        if archive.suffix in (".gz", ".tgz"):
            stream = stack.enter_context(gzip.GzipFile("", "wb", 6, stream, mtime=0))
        tar = stack.enter_context(tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT))
        for name, folder in folders.items():
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                member = tarfile.TarInfo(f"{name}/{path.relative_to(folder).as_posix()}")
                member.size = path.stat().st_size
                with open(path, "rb") as file:
                    tar.addfile(member, file)
    return hash_file(archive)
