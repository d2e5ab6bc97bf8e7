"""Atomic writes of files and folders, locks between processes, hashes of files, and the limit of open files."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from common.console import UserError
from common.signals import afterwards

logger = logging.getLogger("files")

OPEN_LOCKS: dict[Path, TextIO] = {}


def make_folder(flag: str, folder: str | Path) -> None:
    """Make this folder and its parents unless it exists, or raise a UserError if that is impossible."""
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except OSError as e:
        raise UserError(f"{flag}: {folder} cannot be written ({e.strerror}): choose another folder") from e


def lock_folder(flag: str, folder: str | Path) -> None:
    """Make a folder and lock it until this process ends, or raise a UserError if another peer uses it."""
    make_folder(flag, folder)
    path = Path(folder).resolve() / ".lock"
    if path in OPEN_LOCKS:
        return
    try:
        # keep it open: closing any descriptor of this file would unlock it
        file = open(path, "a")  # noqa: SIM115
        is_free = try_lock(file)
    except PermissionError:
        is_free = False
    except OSError as e:
        if e.errno == errno.EROFS:
            raise UserError(f"{flag}: {folder} cannot be written ({e.strerror}): choose another folder") from e
        # a full disk
        logger.info(f"{folder} is not locked ({e.strerror}): make sure that no other peer uses it")
        return
    if not is_free:
        raise UserError(f"{flag} {folder} is in use by another peer, or not yours: choose another one")
    OPEN_LOCKS[path] = file


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time run the block; the others wait."""
    with open(path, "a") as file:
        if not try_lock(file):
            logger.info("another process fetches the same: waiting for it")
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def try_lock(file: TextIO) -> bool:
    """Lock a file until it is closed, or return False if another process has locked it."""
    try:
        # lockf, because helpers do not inherit its locks and may outlive a killed trainer by seconds
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as e:  # a file system without locks
        logger.info(f"{file.name} cannot be locked ({e.strerror}): make sure that no other process uses its folder")
    return True


def write_file(path: str | Path, content: str | bytes | Callable[[BinaryIO], object], mode: int = 0o666) -> bool:
    """Write a text or bytes, or let a function write to the open file, atomically; see `write_whole`."""
    data = content.encode() if isinstance(content, str) else content

    def write(unfinished: Path) -> None:
        with open(unfinished, "wb", opener=lambda name, how: os.open(name, how, mode)) as file:
            file.write(data) if isinstance(data, bytes) else data(file)

    return write_whole(Path(path).absolute(), write)


def append_line(path: str | Path, line: str) -> None:
    """Append a line to a file; if the disk is full or read-only, log a warning and leave the file as it is."""
    path = Path(path).absolute()
    size = None
    try:
        with open(path, "a", encoding="utf-8") as file:
            size = file.tell()
            file.write(line + "\n")
    except OSError as e:
        with contextlib.suppress(OSError):  # the disk may also be gone
            if size is not None:
                os.truncate(path, size)
        logger.warning(f"could not write to {path} ({e.strerror or e}): check the disk's space and permissions")


def read_json(path: Path) -> dict:
    """Return the JSON object in a file, or an empty one if the file is missing or invalid."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        if isinstance(values := json.loads(path.read_text(encoding="utf-8")), dict):
            return values
    return {}


def read_json_lines(path: str | Path) -> Iterator[dict]:
    """Yield the JSON objects in the lines of a file, if it exists. Incomplete lines are skipped."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                if isinstance(entry := json.loads(line), dict):
                    yield entry


def write_whole(target: Path, write: Callable[[Path], None]) -> bool:
    """Have `write` write a file or folder under another name, and rename it to the target once it is on disk.

    If the disk is full or read-only, remove the unfinished files, log a warning and return False.
    """
    # a fixed name, so that the remains of a killed process are overwritten
    unfinished, replaced = (target.with_name(f".{target.name}.{state}") for state in ("unfinished", "old.unfinished"))
    try:
        write(unfinished)
        for path in (*unfinished.rglob("*"), unfinished):
            flush_to_disk(path)
        # rename does not replace a folder that is not empty; a file must not replace a folder
        if unfinished.is_dir() and target.is_dir():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        unfinished.rename(target)
        flush_to_disk(target.parent)
        # last, so that a process that is killed while it removes files leaves no half of a folder
        shutil.rmtree(replaced, ignore_errors=True)
    except Exception as e:
        # torch wraps the system's error; safetensors and tokenizers turn it into text
        cause = e if isinstance(e, OSError) else e.__context__
        if not isinstance(cause, OSError) and "os error" not in str(e):
            raise
        shutil.rmtree(unfinished, ignore_errors=True)  # nothing if it is a file
        with contextlib.suppress(OSError):
            unfinished.unlink()
        reason = getattr(cause, "strerror", None) or e
        logger.warning(f"could not save {target} ({reason}): check the disk's space and permissions")
        return False
    return True


def flush_to_disk(path: Path) -> None:
    """Call fsync on a file, or on a folder for its list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unfinished_folder(target: Path):
    """Make a folder next to the target. If the caller does not rename it, remove it and its new parents."""
    new_parents = [parent for parent in target.absolute().parents if not parent.exists()]
    folder = target.absolute().parent / f".{target.name}.unfinished-{os.urandom(4).hex()}"

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # not empty if the target exists
                parent.rmdir()

    try:
        with afterwards(remove):
            folder.mkdir(parents=True)
            yield folder
    except OSError as e:
        raise UserError(f"cannot write {target} or its files ({e}): free some space, or choose other folders") from e


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Make a temporary folder, and remove it at the end of the block, also after a signal."""
    folder = tempfile.mkdtemp()
    with afterwards(partial(shutil.rmtree, folder, ignore_errors=True)):
        yield folder


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> dict:
    """Return the size in bytes and the SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": hash_file(path)}


def raise_file_limit() -> float:
    """Raise the limit of open files for this process and its helpers as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return math.inf if soft == resource.RLIM_INFINITY else soft
