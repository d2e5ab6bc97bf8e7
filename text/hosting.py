"""Pack a dataset and its tokenizer into one archive for volunteers to download.

python tokenize_wikitext103.py --archive wikitext.tar.gz        # prints the sha256
"""

import contextlib
import gzip
import json
import os
import tarfile
from pathlib import Path

from common.console import UserError, format_bytes
from common.files import hash_file, unfinished_folder
from text.instances import KINDS, PAIRS
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer


def check_archive(archive: Path) -> None:
    """Raise a UserError if the archive exists, or its folder does not."""
    if os.path.lexists(archive):
        raise UserError(f"{archive} already exists: remove it, or give another --archive")
    if not archive.parent.is_dir():
        raise UserError(f"--archive {archive}: there is no folder {archive.parent}, make it first")


def make_archive(dataset_path: Path, tokenizer_path: Path, archive: Path) -> None:
    """Pack dataset and tokenizer into an archive, and print the flags for a trainer."""
    kind = PAIRS
    with contextlib.suppress(OSError, ValueError, KeyError):  # load_tokenized_dataset reports these errors
        kind = KINDS[json.loads((dataset_path / "corpus.json").read_text()).get("objective", kind.name)]
    load_tokenized_dataset(dataset_path, load_tokenizer(tokenizer_path, kind))
    with unfinished_folder(archive) as folder:
        packed = folder / archive.name
        sha256 = pack(packed, {"dataset": dataset_path, "tokenizer": tokenizer_path})
        size = packed.stat().st_size
        packed.rename(archive)
    print(
        f"packed {dataset_path} and {tokenizer_path} into {format_bytes(size)}; put it on any web server, then for "
        f"each trainer:\n--dataset_path https://YOUR_HOST/{archive.name} --dataset_sha256 {sha256}"
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
