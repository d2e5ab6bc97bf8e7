"""Text to a tokenized dataset on disk for run_trainer.py, and the tokenizer that it was made with.

The real experiment (WikiText-103 and the tokenizer of albert-large-v2, both from the Hugging Face Hub; about ten
minutes on one core):

    python tokenize_wikitext103.py

Without the hub, in seconds, from the sample that this repository carries; and any text of your own:

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python tokenize_wikitext103.py --text_files a.txt b.txt.gz c.jsonl --train_tokenizer --vocab_size 8000

Instances are pairs of segments, half of them swapped, for ALBERT (--objective mlm_sop, the default), or full blocks:
mlm, for BERT, RoBERTa and their like; clm, for GPT-2, Llama and their like:

    python tokenize_wikitext103.py --objective clm --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64

With --archive NAME.tar.gz it also packs both, for volunteers who fetch them (see fetch.py); where they are there
already, it does that alone.

Writes --tokenizer_path, then --dataset_path: a DatasetDict of train and validation, and corpus.json, which tells what
it is. Both appear complete or not at all. All of it, the tokenizer included, depends on text and flags only, not on
--num_proc.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

import data
import fetch
from arguments import DataArguments, ModelArguments, TokenizeArguments, parse_arguments
from documents import (
    WIKITEXT_TITLE,
    cut_blocks,
    encode_documents,
    load_sentence_splitter,
    make_document_random,
    make_instances,
    make_text_encoder,
    read_documents,
    read_text,
    split_articles,
    split_chapters,
    split_paragraphs,
    split_sentences,
)
from support.console import UserError, edge, first_line, show_bytes
from support.files import hash_file, locked, unfinished_folder

SAMPLE_CORPUS = Path(__file__).parent / "sample_data" / "austen.txt.xz"
SPECIAL_TOKENS = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]  # in ALBERT's order
CHUNK_CHARACTERS = 500_000  # of text per task: about half a second


def main():
    (args,) = parse_arguments(TokenizeArguments, description="Turn text into a tokenized dataset.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave as on Ctrl-C: clean up first
    tokenizer_path, dataset_path = Path(args.tokenizer_path), Path(args.dataset_path)
    # a second dataset for the tokenizer of the first one: it stays where it is
    is_tokenizer_kept = not args.train_tokenizer and Path(args.tokenizer).resolve() == tokenizer_path.resolve()
    if args.archive:
        check_archive(Path(args.archive), args)
        if dataset_path.is_dir() and tokenizer_path.is_dir() and not args.text_files and not args.train_tokenizer:
            print(f"{dataset_path} and {tokenizer_path} are there already, and are packed as they are")
            return make_archive(dataset_path, tokenizer_path, args)
    check_targets(tokenizer_path, dataset_path, is_tokenizer_kept)
    load_sentence_splitter(args.language, args.sentence_splitter)

    source, splits = load_splits(args)
    with contextlib.ExitStack() as stack:
        unfinished_dataset = stack.enter_context(unfinished_folder(dataset_path))
        unfinished_tokenizer = tokenizer_path
        if is_tokenizer_kept:
            tokenizer = data.load_tokenizer(tokenizer_path, args.objective)
        else:
            unfinished_tokenizer = stack.enter_context(unfinished_folder(tokenizer_path))
            if args.train_tokenizer:
                train = train_byte_tokenizer if args.objective == "clm" else train_tokenizer
                tokenizer = train(splits["train"], args)
            else:
                tokenizer = find_tokenizer(args)
            tokenizer.save_pretrained(unfinished_tokenizer)
            # what the peers will load is what tokenizes
            tokenizer = data.load_tokenizer(unfinished_tokenizer, args.objective)

        corpus = make_dataset(source, splits, tokenizer, unfinished_tokenizer, unfinished_dataset, args)
        try:
            if not is_tokenizer_kept:
                unfinished_tokenizer.rename(tokenizer_path)
            unfinished_dataset.rename(dataset_path)
        except BaseException:
            if not is_tokenizer_kept and not unfinished_tokenizer.exists():
                shutil.rmtree(tokenizer_path)
            raise

    instances, tokens = corpus["instances"], corpus["tokens"]
    print(
        f"wrote {instances['train']:,} instances ({tokens['train']:,} tokens) for training and "
        f"{instances['validation']:,} ({tokens['validation']:,}) for validation to {dataset_path}\n"
        f"the tokenizer of {corpus['vocab_size']:,} pieces is in {tokenizer_path}; unigram entropy "
        f"{corpus['unigram_entropy']:.2f} nats: the loss of a model that knows only word frequencies"
    )
    if args.archive:
        make_archive(dataset_path, tokenizer_path, args)
    print("next: python run_training_monitor.py --experiment_prefix my_albert")


def make_dataset(
    source: str, splits: dict[str, list[list[str]]], tokenizer, tokenizer_path: str | Path, folder: Path, args
) -> dict:
    """Tokenize the splits into a folder; the contents of its corpus.json."""
    tables = tokenize_splits(splits, tokenizer_path, args)
    for name, table in tables.items():
        if not table.num_rows:
            raise UserError(f"too little text for a {name} split: give more text or another --validation_fraction")
    corpus = describe_corpus(tables, tokenizer, args) | {
        "documents": {name: len(documents) for name, documents in splits.items()},
        "source": source,
    }
    write_dataset(tables, corpus, folder)
    return corpus


def check_targets(tokenizer_path: Path, dataset_path: Path, is_tokenizer_kept: bool):
    for flag, path in (("--tokenizer_path", tokenizer_path), ("--dataset_path", dataset_path)):
        if os.path.lexists(path) and not (is_tokenizer_kept and path is tokenizer_path):
            raise UserError(f"{path} exists already: remove it, or give another {flag}")
    tokenizer_path, dataset_path = tokenizer_path.resolve(), dataset_path.resolve()
    if tokenizer_path.is_relative_to(dataset_path) or dataset_path.is_relative_to(tokenizer_path):
        raise UserError("--tokenizer_path and --dataset_path must be two folders, neither inside the other")


def name_shards(archive: Path, count: int) -> list[Path]:
    """The files of an archive in `count` shards: its index, what all peers need, then the shards."""
    stem, suffix = archive.name.split(".", 1)
    names = [f"{stem}.json", f"{stem}-common.{suffix}"]
    names += [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(count)]
    return [archive.with_name(name) for name in names]


def check_archive(archive: Path, args: TokenizeArguments):
    for path in [archive] if args.archive_shards == 1 else name_shards(archive, args.archive_shards):
        if os.path.lexists(path):
            raise UserError(f"{path} exists already: remove it, or give another --archive")
    if not archive.parent.is_dir():
        raise UserError(f"--archive {archive}: there is no folder {archive.parent}, make it first")


def make_archive(dataset_path: Path, tokenizer_path: Path, args: TokenizeArguments):
    """Pack dataset and tokenizer into one archive, or into shards and an index, and say what to give to a trainer.

    Row number r goes into shard r modulo their number: each shows the whole corpus.
    """
    objective = "mlm_sop"
    with contextlib.suppress(OSError, ValueError):  # load_tokenized_dataset says what is wrong there
        objective = json.loads((dataset_path / "corpus.json").read_text()).get("objective", objective)
    tokenizer = data.load_tokenizer(tokenizer_path, objective)
    dataset, corpus = data.load_tokenized_dataset(dataset_path, tokenizer)
    archive, count = Path(args.archive), args.archive_shards
    made: list[Path] = []
    try:
        if count == 1:
            made = [archive]
            sha256 = fetch.pack(archive, {"dataset": dataset_path, "tokenizer": tokenizer_path})
        else:
            if count > len(dataset["train"]):
                raise UserError(f"--archive_shards {count}: there are only {len(dataset['train'])} instances")
            made = name_shards(archive, count)
            sha256 = make_shards(made, dataset, corpus, tokenizer_path)
    except BaseException as e:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise UserError(
                f"cannot write {archive} ({e}): make room, then run the same command again to pack what is there"
            ) from e
        raise
    size = sum(path.stat().st_size for path in made)
    print(
        f"packed {dataset_path} and {tokenizer_path} into {len(made)} file{'s'[: len(made) != 1]} of "
        f"{show_bytes(size)}; put {'it' if count == 1 else 'all of them side by side'} on any web server, "
        f"then for each trainer:\n--dataset_path https://YOUR_HOST/{made[0].name} --dataset_sha256 {sha256}"
    )


def make_shards(names: list[Path], dataset: dict, corpus: dict, tokenizer_path: Path) -> str:
    """Write the files of `name_shards`; returns the sha256 of the index."""
    from tqdm import tqdm

    index, *archives = names
    entries = []
    for number, archive in enumerate(tqdm(archives, desc="packing", unit="file", disable=None), start=-1):
        with unfinished_folder(archive) as folder:
            if number < 0:
                parts = {"dataset": folder, "tokenizer": tokenizer_path}
                tables = {"validation": select_rows(dataset["validation"], 1, 0)}
            else:
                parts, count = {"dataset": folder}, len(archives) - 1
                tables = {"train": select_rows(dataset["train"], count, number)}
            write_dataset(tables, corpus, folder)
            entries.append({"name": archive.name, "sha256": fetch.pack(archive, parts), "size": archive.stat().st_size})
    index.write_text(json.dumps({"common": entries[0], "shards": entries[1:]}, indent=2) + "\n")
    return hash_file(index)


def select_rows(dataset, count: int, number: int):
    """Arrow table of each `count`th row of a Dataset, from row `number` on."""
    import pyarrow

    parts, start = [], number
    for table in dataset.with_format("arrow").iter(65_536):
        parts.append(table.take(np.arange(start, table.num_rows, count)))
        start = (start - table.num_rows) % count
    return pyarrow.concat_tables(parts)


def load_splits(args: TokenizeArguments) -> tuple[str, dict[str, list[list[str]]]]:
    """(where the text is from, {"train": documents, "validation": documents}); a document is a list of paragraphs."""
    if args.text_files:
        source = ", ".join(Path(path).name for path in args.text_files)
        documents = [document for path in args.text_files for document in read_documents(path, args.text_column)]
    elif args.corpus == "sample":
        source, documents = SAMPLE_CORPUS.name, split_chapters(read_text(SAMPLE_CORPUS))
    else:
        # raw: the other one has <unk> for words that any subword tokenizer can spell
        name = ("Salesforce/wikitext", "wikitext-103-raw-v1")
        with fetch.hub(f"the dataset {name[0]}", "--corpus sample or --text_files"):
            import datasets

            wikitext = datasets.load_dataset(*name, cache_dir=args.cache_dir)
        splits = {split: split_articles(list(wikitext[split]["text"])) for split in ("train", "validation")}
        return "/".join(name), splits
    if not documents:
        raise UserError(f"there is no text in {source}: give files that are not empty")
    return source, split_documents(documents, args)


def split_documents(documents: list[list[str]], args: TokenizeArguments) -> dict[str, list[list[str]]]:
    """Hold random documents out for validation, none of them larger than that share of the text where possible. The
    only document there is gives up its last paragraphs, or sentences."""
    fraction = args.validation_fraction
    if len(documents) == 1:
        kind, units = "paragraphs", documents[0]
        if len(units) == 1:
            kind, units = "sentences", split_sentences(units, args.language, args.sentence_splitter)
        if len(units) == 1:
            raise UserError("the text is a single sentence: give more")
        cut = min(max(round(len(units) * (1 - fraction)), 1), len(units) - 1)
        print(f"one document: its last {len(units) - cut} of {len(units)} {kind} become the validation split")
        return {"train": [units[:cut]], "validation": [units[cut:]]}
    sizes = [sum(map(len, document)) for document in documents]
    shuffled = random.Random(args.seed).sample(range(len(documents)), len(documents))
    fitting = [index for index in shuffled if sizes[index] <= fraction * sum(sizes)]
    if not fitting:
        fitting = [min(shuffled, key=sizes.__getitem__)]
    held_out = set(fitting[: min(max(1, round(fraction * len(documents))), len(documents) - 1)])
    splits = {"train": [], "validation": []}
    for index, document in enumerate(documents):
        splits["validation" if index in held_out else "train"].append(document)
    return splits


def find_tokenizer(args: TokenizeArguments):
    if Path(args.tokenizer).is_dir():
        return data.load_tokenizer(args.tokenizer, args.objective)
    with fetch.hub(f"the tokenizer {args.tokenizer}", "--train_tokenizer, or --tokenizer with a folder"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, cache_dir=args.cache_dir)
    return data.check_tokenizer(tokenizer, args.tokenizer, args.objective)


def train_tokenizer(documents: list[list[str]], args: TokenizeArguments):
    """An ALBERT-style Unigram tokenizer. May have fewer pieces than asked for: small text does not yield more.

    It is built on AlbertTokenizer's own normalizer and pre-tokenizer, because loading a saved tokenizer as
    AlbertTokenizer replaces any other ones without a word (transformers 5.23).
    """
    from tokenizers.trainers import UnigramTrainer
    from transformers import AlbertTokenizer

    text = " ".join(itertools.islice((paragraph for document in documents for paragraph in document), 10_000))
    letters = [character for character in text if character.isalpha()]
    marked = sum(len(unicodedata.normalize("NFKD", character)) > 1 for character in letters)
    if not args.keep_accents and marked > 0.01 * len(letters):
        print(f"{marked / len(letters):.1%} of the letters lose their marks (a short i becomes an i): --keep_accents")

    flags = {"do_lower_case": not args.cased, "keep_accents": args.keep_accents}
    backend = AlbertTokenizer(**flags).backend_tokenizer
    trainer = UnigramTrainer(
        vocab_size=args.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        unk_token="<unk>",
        show_progress=sys.stderr.isatty(),
    )
    print(f"training a tokenizer of {args.vocab_size:,} pieces", flush=True)
    backend.train_from_iterator((paragraph for document in documents for paragraph in document), trainer)
    pieces = json.loads(backend.to_str())["model"]["vocab"][len(SPECIAL_TOKENS) :]
    if not pieces:
        raise UserError("there is too little text to train a tokenizer: give more, or use --tokenizer")

    # The trainer (tokenizers 0.23) walks through hash tables: from run to run, single characters that it did not keep
    # but must include get other scores above the lowest one, 1e-4 apart, sums differ in their last digits, and with
    # them the order, which gives the ids. Peers who tokenize the same text must arrive at the same tokenizer.
    lowest = min(score for _, score in pieces)
    highest_filler = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    pieces = [(p, round(lowest if len(p) == 1 and score <= highest_filler else score, 4)) for p, score in pieces]
    pieces.sort(key=lambda piece: (-piece[1], piece[0]))
    vocabulary = [(token, 0.0) for token in SPECIAL_TOKENS] + pieces
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return AlbertTokenizer(vocab=vocabulary, model_input_names=names, model_max_length=args.seq_length, **flags)


def train_byte_tokenizer(documents: list[list[str]], args: TokenizeArguments):
    """A tokenizer of GPT-2's kind: BPE of bytes, and one special token, behind documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import GPT2Tokenizer

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    print(f"training a tokenizer of {args.vocab_size:,} pieces", flush=True)
    backend.train_from_iterator(("\n".join(document) for document in documents), trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return GPT2Tokenizer(vocab=model["vocab"], merges=merges, model_max_length=args.seq_length)


@functools.cache
def load_worker_tokenizer(path: str | Path, objective: str):
    tokenizer = data.load_tokenizer(path, objective)
    return tokenizer, make_text_encoder(tokenizer)


def tokenize_chunk(
    chunk: list[tuple[int, list[str]]], *, split: str, tokenizer_path: str | Path, args: TokenizeArguments
):
    """Of some documents, given as (index, paragraphs): an Arrow table of their pairs, or for full blocks, which reach
    over the end of a chunk, their ids end to end."""
    tokenizer = load_worker_tokenizer(tokenizer_path, args.objective)
    if args.objective != "mlm_sop":
        return encode_documents([paragraphs for _, paragraphs in chunk], args.objective, *tokenizer)
    documents = [split_sentences(paragraphs, args.language, args.sentence_splitter) for _, paragraphs in chunk]
    generators = [make_document_random(args.seed, split, index) for index, _ in chunk]
    return make_table(*make_instances(documents, generators, args.seq_length, *tokenizer))


def make_table(columns: dict[str, np.ndarray], lengths: np.ndarray):
    """Arrow table of instances: lists from columns joined end to end, and sentence_order_label as it is."""
    import pyarrow

    offsets = pyarrow.array(np.concatenate([[0], lengths.cumsum()]), pyarrow.int32())
    arrays = {name: pyarrow.array(values) for name, values in columns.items()}
    is_list = {name: name != "sentence_order_label" for name in columns}
    lists = {name: pyarrow.ListArray.from_arrays(offsets, a) if is_list[name] else a for name, a in arrays.items()}
    return pyarrow.table(lists)


def make_tables(columns: dict[str, np.ndarray], lengths: np.ndarray, most: int = 2**30) -> Iterator:
    """Arrow tables of full blocks, of so many numbers each at most: offsets in a list column have 32 bits."""
    rows = most // int(lengths.max())
    ends = np.concatenate([[0], lengths.cumsum()])
    for start in range(0, len(lengths), rows):
        part = lengths[start : start + rows]
        first, end = ends[start], ends[start + len(part)]
        yield make_table({name: values[first:end] for name, values in columns.items()}, part)


def start_worker():
    # the tokenizer's threads do not survive a fork; and num_proc is what the user wants to spend
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive a killed parent


def tokenize_splits(splits: dict[str, list[list[str]]], tokenizer_path: str | Path, args: TokenizeArguments) -> dict:
    """{split: Arrow table of its instances}, in the order of the documents whatever the number of processes."""
    import pyarrow
    from tqdm import tqdm

    chunks = {name: list(make_chunks(documents)) for name, documents in splits.items()}
    sizes = {name: [sum(len(p) for _, document in c for p in document) for c in chunks[name]] for name in chunks}
    # before the fork: once for all processes
    tokenizer, _ = load_worker_tokenizer(tokenizer_path, args.objective)
    executor = None
    if args.num_proc > 1:
        executor = ProcessPoolExecutor(args.num_proc, multiprocessing.get_context("fork"), initializer=start_worker)
    tables = {}
    total = sum(map(sum, sizes.values()))
    try:
        interval = 0.2 if sys.stderr.isatty() else 10  # seconds; few lines in a log file
        with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", mininterval=interval) as progress:
            for name in splits:
                work = functools.partial(tokenize_chunk, split=name, tokenizer_path=tokenizer_path, args=args)
                with data.hold_signals(signal.SIGINT, signal.SIGTERM):  # processes start here
                    results = executor.map(work, chunks[name]) if executor else map(work, chunks[name])
                parts = []
                for size, table in zip(sizes[name], results, strict=True):
                    parts.append(table)
                    progress.update(size)
                if args.objective == "mlm_sop":
                    tables[name] = pyarrow.concat_tables(parts)
                else:
                    blocks = cut_blocks(np.concatenate(parts), args.seq_length, args.objective, tokenizer)
                    tables[name] = pyarrow.concat_tables(make_tables(*blocks))
    except BrokenProcessPool:
        raise UserError("a tokenizing process was killed, probably for want of memory: lower --num_proc") from None
    finally:
        if executor:
            executor.shutdown(cancel_futures=True)
    return tables


def make_chunks(documents: list[list[str]]):
    chunk, size = [], 0
    for index, document in enumerate(documents):
        chunk.append((index, document))
        size += sum(map(len, document))
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def describe_corpus(tables: dict, tokenizer, args: TokenizeArguments) -> dict:
    """The contents of corpus.json. unigram_entropy, in nats, is that of the validation split's own tokens, special
    ones left out: no model without context can have a lower loss there."""
    ids = np.concatenate([chunk.flatten().to_numpy() for chunk in tables["validation"]["input_ids"].chunks])
    counts = np.bincount(ids[~np.isin(ids, tokenizer.all_special_ids)])
    shares = counts[counts > 0] / counts.sum()
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in tables["train"]["input_ids"].chunks])
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "objective": args.objective,
        "vocab_size": len(tokenizer),
        "tokenizer_fingerprint": data.tokenizer_fingerprint(tokenizer),
        "instances": {name: table.num_rows for name, table in tables.items()},
        "tokens": {name: sum(len(c.flatten()) for c in table["input_ids"].chunks) for name, table in tables.items()},
        "mean_length": float(lengths.mean()),
        "padding_if_batched_at_random": float(1 - lengths.mean() / lengths.max()),
        "seq_length": args.seq_length,
        "seed": args.seed,
    }


def write_dataset(tables: dict, corpus: dict, folder: Path):
    import datasets
    from datasets.table import InMemoryTable

    datasets.disable_progress_bars()
    # a fingerprint of its own: datasets would hash all the data, and name it anew each time
    name = "-".join(str(corpus[key]) for key in ("tokenizer_fingerprint", "seed", "seq_length"))[-16:]
    splits = {split: datasets.Dataset(InMemoryTable(table), fingerprint=name) for split, table in tables.items()}
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    (folder / "corpus.json").write_text(json.dumps(corpus, indent=2) + "\n")


def tokenize_for_trainer(tokenizer, model_args: ModelArguments, args: DataArguments, objective: str) -> Path:
    """Folder of the dataset made of --train_file or --dataset_name, in the cache: made at the first start, found there
    later on, by other trainers too. The same text and flags give the same rows on every peer."""
    load_sentence_splitter(args.language, args.sentence_splitter)
    if args.dataset_name:
        source, splits = load_hub_splits(args)
    else:
        source = Path(args.train_file).name
        splits = {"train": read_documents(args.train_file, args.text_column)}
    if args.validation_file:
        splits["validation"] = read_documents(args.validation_file, args.text_column)
    for name, documents in splits.items():
        if not documents:
            where = args.validation_file if name == "validation" and args.validation_file else source
            raise UserError(f"there is no text for the {name} split in {where}: give files that are not empty")
    options = TokenizeArguments(
        objective=objective,
        seq_length=args.max_sequence_length,
        language=args.language,
        sentence_splitter=args.sentence_splitter,
        seed=model_args.seed,
        num_proc=min(8, os.cpu_count() or 1),
    )
    facts = [objective, options.seq_length, options.seed, options.language, options.sentence_splitter]
    digest = hashlib.sha256(json.dumps([*facts, data.tokenizer_fingerprint(tokenizer)]).encode())
    for name, documents in splits.items():
        digest.update(f"{name} {len(documents)}".encode())
        for document in documents:
            digest.update("\n".join([*document, ""]).encode("utf-8", "replace") + b"\0")
    cache_dir = Path(args.dataset_cache_dir)
    folder = cache_dir / f"text-{digest.hexdigest()[:16]}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"--dataset_cache_dir {cache_dir} cannot be written ({e.strerror}): choose another folder"
        ) from e
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            if "validation" not in splits:
                splits = split_documents(splits["train"], options)
            with unfinished_folder(folder) as unfinished:
                make_dataset(source, splits, tokenizer, model_args.tokenizer_path, unfinished, options)
                unfinished.rename(folder)
    return folder


def load_hub_splits(args: DataArguments) -> tuple[str, dict[str, list[list[str]]]]:
    """(name, documents of the train split, and of the validation split if there is one) of --dataset_name: a record is
    a document, but text in WikiText format is split into its articles."""
    name = [args.dataset_name, *([args.dataset_config_name] if args.dataset_config_name else [])]
    is_folder = Path(args.dataset_name).is_dir()
    with contextlib.nullcontext() if is_folder else fetch.hub(f"the dataset {args.dataset_name}", "--train_file"):
        import datasets  # now: it looks once whether there is a connection

        try:
            found = datasets.load_dataset(*name, cache_dir=str(Path(args.dataset_cache_dir) / "hub"))
        except (OSError, ValueError) as e:
            if not is_folder:
                raise
            raise UserError(f"--dataset_name {args.dataset_name} holds no dataset ({first_line(e)})") from e
    splits = {}
    for split in [name for name in ("train", "validation") if name in found]:
        if args.text_column not in found[split].column_names:
            columns = ", ".join(found[split].column_names)
            raise UserError(f"--dataset_name {args.dataset_name} has the columns {columns}: give one in --text_column")
        texts = [text or "" for text in found[split][args.text_column]]
        if any(not isinstance(text, str) for text in texts):
            raise UserError(f"--dataset_name {args.dataset_name}: {args.text_column} is no text: give --text_column")
        first = next((text for text in texts if text.strip()), "")
        if WIKITEXT_TITLE.match(first.strip("\n")):
            splits[split] = split_articles(texts)
        else:
            splits[split] = [paragraphs for text in texts if (paragraphs := split_paragraphs(text))]
    if "train" not in splits:
        raise UserError(
            f"--dataset_name {args.dataset_name} has no split train, but {', '.join(found)}: use another one"
        )
    return "/".join(name), splits


if __name__ == "__main__":
    with edge(interrupted="nothing was written"):
        main()
