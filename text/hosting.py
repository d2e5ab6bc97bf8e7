"""Pack a dataset and its tokenizer for volunteers to download: one archive, or shards and an index.

python tokenize_wikitext103.py --archive wikitext.tar.gz        # prints the sha256
"""

import contextlib
import gzip
import json
import os
import shutil
import tarfile
from pathlib import Path

from common.console import UserError, format_bytes, format_count
from common.files import hash_file, unfinished_folder
from text.instances import KINDS, PAIRS
from text.stored import load_tokenized_dataset, write_dataset
from text.tokenizers import load_tokenizer


def list_files(archive: Path, count: int) -> list[Path]:
    """Return the files of an archive in `count` shards: the index, the part that all peers need, and the shards."""
    if count == 1:
        return [archive]
    stem, suffix = archive.name.split(".", 1)
    shards = [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(count)]
    return [archive.with_name(name) for name in (f"{stem}.json", f"{stem}-common.{suffix}", *shards)]


def check_archive(archive: Path, args):
    """Raise a UserError if a file of the archive exists, or its folder does not."""
    for path in list_files(archive, args.archive_shards):
        if os.path.lexists(path):
            raise UserError(f"{path} already exists: remove it, or give another --archive")
    if not archive.parent.is_dir():
        raise UserError(f"--archive {archive}: there is no folder {archive.parent}, make it first")


def make_archive(dataset_path: Path, tokenizer_path: Path, args):
    """Pack dataset and tokenizer into one archive, or into shards and an index, and print the flags for a trainer.

    Row r goes into shard r modulo the number of shards, so that each shard represents the whole corpus.
    """
    kind = PAIRS
    with contextlib.suppress(OSError, ValueError, KeyError):  # load_tokenized_dataset reports these errors
        kind = KINDS[json.loads((dataset_path / "corpus.json").read_text()).get("objective", kind.name)]
    tokenizer = load_tokenizer(tokenizer_path, kind)
    dataset, corpus = load_tokenized_dataset(dataset_path, tokenizer)
    archive, count = Path(args.archive), args.archive_shards
    if count > len(dataset["train"]):
        raise UserError(f"--archive_shards {count}: there are only {len(dataset['train'])} instances")
    with unfinished_folder(archive) as folder:
        paths = list_files(folder / archive.name, count)
        if count == 1:
            sha256 = pack(paths[0], {"dataset": dataset_path, "tokenizer": tokenizer_path})
        else:
            sha256 = make_shards(paths, dataset, corpus, tokenizer_path)
        size = sum(path.stat().st_size for path in paths)
        for path in reversed(paths):  # the index comes last
            path.rename(archive.with_name(path.name))
    print(
        f"packed {dataset_path} and {tokenizer_path} into {format_count(len(paths), 'file')} of {format_bytes(size)}; "
        f"put {'it' if count == 1 else 'all of them side by side'} on any web server, then for each trainer:\n"
        f"--dataset_path https://YOUR_HOST/{paths[0].name} --dataset_sha256 {sha256}"
    )


def make_shards(paths: list[Path], dataset: dict, corpus: dict, tokenizer_path: Path) -> str:
    """Write the files that `list_files` names, and return the sha256 of the index."""
    index, *archives = paths
    folder, count = index.with_name("dataset"), len(archives) - 1
    parts = [{"validation": dataset["validation"]}]
    parts += [{"train": dataset["train"].shard(count, number, contiguous=False)} for number in range(count)]
    entries = []
    for archive, splits in zip(archives, parts, strict=True):
        write_dataset({name: split.with_format("arrow")[:] for name, split in splits.items()}, corpus, folder)
        folders = {"dataset": folder} if entries else {"dataset": folder, "tokenizer": tokenizer_path}
        entries.append({"name": archive.name, "sha256": pack(archive, folders), "size": archive.stat().st_size})
        shutil.rmtree(folder)
    index.write_text(json.dumps({"common": entries[0], "shards": entries[1:]}, indent=2) + "\n")
    return hash_file(index)


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
