"""Tokenized datasets on disk: a DatasetDict of train and validation, and corpus.json, which describes it."""

import json
from pathlib import Path

import numpy as np

from common.console import UserError, first_line
from text.documents import find_begin_token
from text.instances import BLOCKS, IGNORED_LABEL, KINDS, PAIRS, Columns, InstanceKind
from text.tokenizers import tokenizer_fingerprint


def load_tokenized_dataset(path: str | Path, tokenizer, kind: InstanceKind | None = None) -> tuple:
    """Load a dataset of tokenize_wikitext103.py; return its splits, by name, and its corpus.json as a dictionary.

    :param kind: the kind of instances to load, None: the stored kind; stored pairs can also be loaded as blocks
    """
    from datasets import load_from_disk

    path = Path(path)
    command = f"python tokenize_wikitext103.py --objective {(kind or PAIRS).name} --dataset_path {path}"
    if not path.is_dir():
        raise UserError(f"no dataset in {path}: make it with {command}")
    try:
        corpus = json.loads((path / "corpus.json").read_text())
        dataset = load_from_disk(str(path))
        stored = KINDS[corpus.get("objective", PAIRS.name)]
        kind = kind or stored
        columns = [name for name in stored.columns if kind.has_pairs or name != "sentence_order_label"]
        splits = {name: dataset[name].select_columns(columns) for name in ("train", "validation")}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
        raise UserError(
            f"{path} is not a dataset of tokenize_wikitext103.py ({type(e).__name__}: {first_line(e)}): "
            f"remove it, then run {command}"
        ) from e
    if corpus.get("tokenizer_fingerprint") != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{path} was made by another tokenizer than the one in {tokenizer.name_or_path}: give the --tokenizer_path "
            f"of this dataset, or tokenize again with --tokenizer {tokenizer.name_or_path}"
        )
    if kind != stored and (kind, stored) != (BLOCKS, PAIRS):
        raise UserError(
            f"{path} was made for --objective {stored.name}, but the model needs {kind.name}: tokenize again with "
            f"--objective {kind.name}, or train another model"
        )
    if corpus.get("begin_token", []) != find_begin_token(tokenizer, stored):
        raise UserError(
            f"{path} lacks the token that begins each text of the tokenizer in {tokenizer.name_or_path}: tokenize "
            f"again with --objective {stored.name} --tokenizer {tokenizer.name_or_path}"
        )
    return splits, corpus


def describe_corpus(tables: dict, tokenizer, args) -> dict:
    """Return the contents of corpus.json.

    unigram_entropy, in nats, is the entropy of the validation split's tokens without special ones: a lower bound on the
    loss of a model without context. In conversations, only the assistant's tokens count.
    """
    column = "labels" if KINDS[args.objective].has_turns else "input_ids"
    ids = np.concatenate([chunk.flatten().to_numpy() for chunk in tables["validation"][column].chunks])
    counts = np.bincount(ids[~np.isin(ids, [*tokenizer.all_special_ids, IGNORED_LABEL])])
    shares = counts[counts > 0] / counts.sum()
    begin = find_begin_token(tokenizer, KINDS[args.objective])
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "objective": args.objective,
        "vocab_size": len(tokenizer),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        **({"begin_token": begin} if begin else {}),  # versions that left it out name none
        "instances": {name: table.num_rows for name, table in tables.items()},
        "tokens": {name: sum(len(c.flatten()) for c in table["input_ids"].chunks) for name, table in tables.items()},
        "seq_length": args.seq_length,
        "seed": args.seed,
    }


def make_table(columns: Columns, lengths: np.ndarray):
    """Return the Arrow table of sequences from columns joined end to end; sentence_order_label has one value each."""
    import pyarrow

    arrays = {name: pyarrow.array(values) for name, values in columns.items()}
    # large, because the offsets of other lists have 32 bits
    offsets = pyarrow.array(np.concatenate([[0], lengths.cumsum()]), pyarrow.int64())
    for name in arrays.keys() - {"sentence_order_label"}:
        arrays[name] = pyarrow.LargeListArray.from_arrays(offsets, arrays[name])
    return pyarrow.table(arrays)


def write_dataset(tables: dict, corpus: dict, folder: Path):
    """Write the splits and the corpus's facts to a new folder, as `load_tokenized_dataset` reads them."""
    import datasets
    from datasets.table import InMemoryTable

    datasets.disable_progress_bars()
    # without a fingerprint, datasets would hash all the data, and name it differently each time
    name = "-".join(str(corpus[key]) for key in ("tokenizer_fingerprint", "seed", "seq_length"))[-16:]
    splits = {split: datasets.Dataset(InMemoryTable(table), fingerprint=name) for split, table in tables.items()}
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    (folder / "corpus.json").write_text(json.dumps(corpus, indent=2) + "\n")
