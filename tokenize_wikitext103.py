#!/usr/bin/env python
"""Tokenize text into a dataset on disk for run_trainer.py, and save the tokenizer.

The real experiment (WikiText-103 and the tokenizer of albert-large-v2, both from the Hugging Face Hub; about ten
minutes on one core):

    python tokenize_wikitext103.py

From the sample in this repository (no Hub, takes seconds), or from your own text:

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python tokenize_wikitext103.py --text_files a.txt b.txt.gz c.jsonl --train_tokenizer --vocab_size 8000

A sequence is a pair of segments, half of them swapped, for ALBERT (--objective mlm_sop, the default), or a full block:
mlm for BERT, RoBERTa and similar models; clm for GPT-2, Llama and similar models:

    python tokenize_wikitext103.py --objective clm --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64

With --archive NAME.tar.gz it also packs both for volunteers to download (see text/fetch.py). If both exist already, it
only packs them.

It writes --tokenizer_path, then --dataset_path: a DatasetDict of train and validation, and corpus.json, which describes
it. Both appear complete or not at all. The result, including the tokenizer, depends only on the text and the flags, not
on --num_proc.
"""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arguments import (
    DEFAULT_DATASET_PATH,
    DEFAULT_TOKENIZER_PATH,
    MAX_SEED,
    MIN_SEQUENCE_LENGTH,
    OBJECTIVES,
    parse_arguments,
)
from common.console import UserError, edge
from common.files import unfinished_folder
from common.flags import FlagGroup, flag
from common.signals import LAST_ACT
from text.documents import load_sentence_splitter, read_documents, read_text, split_chapters
from text.fetch import make_archive
from text.instances import KINDS, Documents
from text.tokenization import load_hub_splits, make_dataset, split_documents
from text.tokenizers import load_tokenizer, train_byte_tokenizer, train_tokenizer

SAMPLE_CORPUS = Path(__file__).parent / "sample_data" / "austen.txt.xz"


@dataclass
class TokenizeArguments(FlagGroup):
    """Tokenization of a dataset."""

    objective: OBJECTIVES = flag(
        "mlm_sop",
        "Kind of sequences. mlm_sop: segment pairs, for ALBERT and LeanALBERT, also usable by BERT; mlm: full "
        "blocks of text, for BERT, RoBERTa and similar models; clm: full blocks with no special token except an end "
        "token after each document, for GPT-2, Llama and similar models; sft: conversations.",
    )
    corpus: Literal["wikitext103", "sample"] = flag(
        "wikitext103", "WikiText-103 from the Hugging Face Hub, or the sample included in this repository."
    )
    text_files: list[str] = flag(
        [],
        "Your own text instead of a corpus: plain, .jsonl, .csv or .tsv files, also .gz or .xz, UTF-8. A document is "
        "a JSON line, a row, or a file (an article of a file in WikiText format).",
    )
    text_column: str = flag("text", "Field of a JSON line or a row that holds the text.")
    tokenizer: str = flag("albert/albert-large-v2", "Tokenizer to use: a name on the Hugging Face Hub or a folder.")
    train_tokenizer: bool = flag(
        False, "Train a tokenizer on the text instead: Unigram as ALBERT's; for clm BPE of bytes, as GPT-2's."
    )
    vocab_size: int = flag(30_000, "With --train_tokenizer: maximum number of tokens in the vocabulary.", ge=100)
    cased: bool = flag(False, "With --train_tokenizer: distinguish upper and lower case; always done for clm.")
    keep_accents: bool = flag(False, "With --train_tokenizer: keep accents; Russian needs them. Always kept for clm.")
    language: str = flag("english", "Language of the text, for splitting it into sentences.")
    seq_length: int = flag(512, "Maximum number of tokens of a sequence.", ge=MIN_SEQUENCE_LENGTH)
    seed: int = flag(42, "Seed of the split, the cuts and the swaps.", ge=0, le=MAX_SEED)
    num_proc: int = flag(1, "Processes to tokenize with; the result does not depend on it.", ge=1)
    dataset_cache_dir: str = flag("data/cache", "Folder for downloads from the Hub.", aliases=["--cache_dir"])
    dataset_path: str = flag(DEFAULT_DATASET_PATH, "Folder to write the dataset to; must not exist yet.")
    tokenizer_path: str = flag(DEFAULT_TOKENIZER_PATH, "Folder to write the tokenizer to; must not exist yet.")
    archive: str | None = flag(None, "Archive for dataset and tokenizer, also existing ones: NAME.tar.gz or NAME.tar.")

    def __post_init__(self):
        super().__post_init__()
        if self.archive and not re.fullmatch(r"[^/.][^/.]*\.(tar|tar\.gz|tgz)", self.archive.rsplit("/", 1)[-1]):
            raise UserError(f"--archive {self.archive} is not a name such as wikitext.tar.gz, without another dot")


def main():
    (args,) = parse_arguments(TokenizeArguments, description=__doc__)
    tokenizer_path = Path(args.tokenizer_path)
    dataset_path = Path(args.dataset_path)
    objective = args.objective
    if objective not in KINDS:  # an objective of your own, which reuses a kind
        from experiment.objectives import OBJECTIVES

        args.objective = OBJECTIVES[objective].kind.name
    kind = KINDS[args.objective]
    if args.archive:
        require_absent("--archive", args.archive)
        if dataset_path.is_dir() and tokenizer_path.is_dir() and not args.text_files and not args.train_tokenizer:
            print(f"{dataset_path} and {tokenizer_path} exist already: packing them unchanged")
            return make_archive(dataset_path, tokenizer_path, Path(args.archive))
    check_targets(tokenizer_path, dataset_path)
    load_sentence_splitter(args.language)

    source, splits = load_splits(args)
    with unfinished_folder(dataset_path) as new_dataset, unfinished_folder(tokenizer_path) as new_tokenizer:
        if args.train_tokenizer:
            train = train_tokenizer if kind.is_masked else train_byte_tokenizer
            tokenizer = train(splits["train"], args)
        else:
            cure = "--train_tokenizer, or --tokenizer with a folder"
            tokenizer = load_tokenizer(args.tokenizer, kind, args.dataset_cache_dir, cure)
        tokenizer.save_pretrained(new_tokenizer)
        # tokenize with the saved files, which the peers will load
        tokenizer = load_tokenizer(new_tokenizer, kind)

        corpus = make_dataset(source, splits, tokenizer, new_dataset, args)
        with LAST_ACT:  # a signal waits until both are there
            new_tokenizer.rename(tokenizer_path)
            new_dataset.rename(dataset_path)

    instances = corpus["instances"]
    tokens = corpus["tokens"]
    print(
        f"wrote {instances['train']:,} sequences ({tokens['train']:,} tokens) for training and "
        f"{instances['validation']:,} ({tokens['validation']:,}) for validation to {dataset_path}\n"
        f"the tokenizer of {corpus['vocab_size']:,} tokens is in {tokenizer_path}; unigram entropy "
        f"{corpus['unigram_entropy']:.2f} nats: the loss of a model that knows only word frequencies"
    )
    if args.archive:
        make_archive(dataset_path, tokenizer_path, Path(args.archive))
    model = "" if kind.is_masked else " --config_path configs/gpt2-124m.json"  # the default one is ALBERT
    paths = f"--dataset_path {shlex.quote(args.dataset_path)} --tokenizer_path {shlex.quote(args.tokenizer_path)}"
    print(
        "next, with --initial_peers ADDRESS to join a run, or --experiment_prefix NAME to start one:\n"
        f"python run_trainer.py {paths} --objective {objective}{model}"
    )


def require_absent(flag: str, path: str) -> None:
    """Raise a UserError if this file or folder exists."""
    if os.path.lexists(path):
        raise UserError(f"{path} already exists: give another {flag}, or remove it")


def check_targets(tokenizer_path: Path, dataset_path: Path):
    """Raise UserError if an output folder exists or one lies inside the other."""
    require_absent("--tokenizer_path", tokenizer_path)
    require_absent("--dataset_path", dataset_path)
    tokenizer_path = tokenizer_path.resolve()
    dataset_path = dataset_path.resolve()
    if tokenizer_path.is_relative_to(dataset_path) or dataset_path.is_relative_to(tokenizer_path):
        raise UserError("--tokenizer_path and --dataset_path must be two folders, neither inside the other")


def load_splits(args: TokenizeArguments) -> tuple[str, dict[str, Documents]]:
    """Return the name of the text's source, and the documents of each split, which are lists of paragraphs."""
    kind = KINDS[args.objective]
    if kind.has_turns and not args.text_files:
        raise UserError(f"--objective {args.objective} needs conversations: give --text_files chats.jsonl")
    if kind.has_turns and args.train_tokenizer:
        raise UserError("--train_tokenizer makes no chat template: give a --tokenizer that has one")
    if args.text_files:
        source = ", ".join(Path(path).name for path in args.text_files)
        documents = [document for path in args.text_files for document in read_documents(path, args.text_column, kind)]
    elif args.corpus == "sample":
        source = SAMPLE_CORPUS.name
        documents = split_chapters(read_text(SAMPLE_CORPUS))
    else:
        # raw, because the other version replaces rare words by <unk>
        name = ["Salesforce/wikitext", "wikitext-103-raw-v1"]
        return load_hub_splits(name, "text", args.dataset_cache_dir, "--corpus sample or --text_files")
    if not documents:
        raise UserError(f"there is no text in {source}: give files that are not empty")
    return source, split_documents(documents, args)


if __name__ == "__main__":
    with edge(interrupted="each of dataset, tokenizer and archive is complete or does not exist"):
        main()
