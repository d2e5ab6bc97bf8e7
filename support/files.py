"""Files that exist complete or not at all, locks that keep other processes out, and fingerprints."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from support.console import UserError
from support.signals import afterwards

logger = logging.getLogger("files")

#: folders and files that could not be written the last time: one warning, not one at each try
UNWRITABLE: set[Path] = set()
OPEN_LOCKS: dict[Path, TextIO] = {}


def make_folder(flag: str, folder: str | Path) -> None:
    """Make this folder and its parents, unless it exists; a UserError where it cannot be made."""
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except OSError as e:
        raise UserError(f"{flag}: {folder} cannot be written ({e.strerror}): choose another folder") from e


def lock_folder(flag: str, folder: str | Path) -> None:
    """Make a folder and keep others out of it until this process ends; a UserError when another one is in there.

    Two peers in one folder would take each other's checkpoints for their own.
    """
    make_folder(flag, folder)
    path = Path(folder).resolve() / ".lock"
    if path not in OPEN_LOCKS:
        try:
            # never to be closed: that of any descriptor of this file would unlock it
            file = open(path, "a")  # noqa: SIM115
            is_free = try_lock(file)
        except PermissionError:
            is_free = False
        except OSError as e:  # a full disk
            logger.info(f"{folder} is not locked ({e.strerror}): make sure that no other peer uses it")
            return
        if not is_free:
            raise UserError(f"{flag} {folder} is in use by another peer, or not yours: choose another one")
        OPEN_LOCKS[path] = file


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time; the others wait."""
    with open(path, "a") as file:
        if not try_lock(file):
            logger.info("another process fetches the same: waiting for it")
            while not try_lock(file):
                time.sleep(0.2)
        yield


def try_lock(file: TextIO) -> bool:
    """Lock a file until it is closed, unless another process has locked it, which is False."""
    try:
        # of this kind because helper processes, which may outlive a killed trainer by seconds, do not inherit it
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as e:  # a disk that knows no locks
        logger.info(f"{file.name} cannot be locked ({e.strerror}): let no other process use its folder meanwhile")
    return True


def write_file(path: str | Path, content: str | Callable[[BinaryIO], object], mode: int = 0o666) -> bool:
    """Write a text, or have a function write, to a file, which then exists complete or not at all; a full disk is a
    warning and False.

    :param mode: who may read it
    """
    path = Path(path).absolute()

    def write(unfinished: Path) -> None:
        with open(unfinished, "wb", opener=lambda name, how: os.open(name, how, mode)) as file:
            file.write(content.encode()) if isinstance(content, str) else content(file)

    return write_whole(path, write, path)


def append_line(path: str | Path, line: str) -> None:
    """Append to a file of lines; a full disk is a warning and no line."""
    path = Path(path).absolute()
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as e:
        if path.exists():
            os.truncate(path, size)
        # the disk that is too full for a checkpoint is no news
        if not {path, path.parent} & UNWRITABLE:
            logger.warning(f"Could not write to {path}: {e}. Will keep trying")
        UNWRITABLE.add(path)


def read_json(path: Path) -> dict:
    """The object in a file; an empty one where there is none, or it is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        if isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
            return found
    return {}


def read_json_lines(path: str | Path) -> Iterator[dict]:
    """The objects in a file of lines, if it is there; without a line that is cut, as somebody writes it, or was killed
    meanwhile."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                if isinstance(entry := json.loads(line), dict):
                    yield entry


def write_whole(target: Path, write: Callable[[Path], None], where: Path) -> bool:
    """Have `write` write a file or a folder beside the target, whose place it takes when it is on disk.

    What cannot be written makes one warning, until it can be again, and what is unfinished goes.

    :param where: to be warned of only once
    :returns: whether all was written
    """
    # one name, not a random one: what a killed process left behind is overwritten
    unfinished, replaced = (target.with_name(f".{target.name}.{why}") for why in ("unfinished", "replaced"))
    try:
        write(unfinished)
        for path in (*unfinished.rglob("*"), unfinished):
            flush_to_disk(path)
        # a folder that is not empty cannot be replaced by a rename; by a file it shall not be
        if unfinished.is_dir() and target.is_dir():
            target.rename(replaced)
        unfinished.rename(target)
        flush_to_disk(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except Exception as e:
        # torch hides the system's error behind one of its own; safetensors and tokenizers turn it into text
        cause = e if isinstance(e, OSError) else e.__context__
        if not isinstance(cause, OSError) and "os error" not in str(e):
            raise
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)
        if where not in UNWRITABLE:
            reason = cause if isinstance(cause, OSError) else e
            logger.warning(f"Could not save {target}: {reason}. Will keep trying, and report when it works")
        UNWRITABLE.add(where)
        return False
    if where in UNWRITABLE:
        UNWRITABLE.remove(where)
        logger.info(f"Saved {target}: writing works again")
    return True


def flush_to_disk(path: Path) -> None:
    """fsync of a file, or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unfinished_folder(target: Path):
    """A folder beside the target, to be renamed when it is complete; else it goes, and the parents made for it."""
    new_parents = [parent for parent in target.absolute().parents if not parent.exists()]
    folder = target.absolute().parent / f".{target.name}.unfinished-{os.getpid()}"

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # not empty: the target is there
                parent.rmdir()

    try:
        with afterwards(remove):
            folder.mkdir(parents=True)
            yield folder
    except OSError as e:
        raise UserError(
            f"cannot write {target} and what belongs to it ({e}): free some space, or choose other folders"
        ) from e


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp()
    with afterwards(partial(shutil.rmtree, folder, ignore_errors=True)):
        yield folder


def hash_file(path: Path) -> str:
    """sha256, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> dict:
    """Size in bytes and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": hash_file(path)}
