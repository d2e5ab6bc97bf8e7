"""Batches: their order and form depend on the seed alone, not on the workers, for all lengths."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from processes import run_python, wait_until
from rows import are_equal, make_batches, make_rows

from arguments import DataArguments
from common.console import UserError
from experiment import data
from text.batches import IndexedSplit, check_data_arguments, sequence_length_at
from text.collators import cut_rows
from text.instances import BLOCKS, PAIRS, TEXT


def test_batches_contain_the_sequences(dataset, tokenizer):
    rows = {tuple(row["input_ids"]): row for row in dataset}
    for batch in make_batches(dataset, tokenizer, 20):
        assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels", "sentence_order_label"}
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())
        original = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        for position in range(8):
            length = int(batch["attention_mask"][position].sum())
            row = rows[tuple(original[position, :length].tolist())]
            assert batch["token_type_ids"][position, :length].tolist() == row["token_type_ids"]
            assert batch["sentence_order_label"][position] == row["sentence_order_label"]
            assert (batch["input_ids"][position, length:] == 0).all()
            assert (batch["labels"][position, length:] == -100).all()
            assert not batch["attention_mask"][position, length:].any()
        assert (batch["labels"] != -100).any()


@pytest.mark.parametrize("batch_size", [4, 64])
def test_padding_is_below_tenth(dataset, tokenizer, batch_size):
    masks = [batch["attention_mask"] for batch in make_batches(dataset, tokenizer, 200, batch_size=batch_size)]
    assert 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks) < 0.1


def test_pass_reads_each_row_once_reordered(dataset):
    split = IndexedSplit(dataset, None)
    lengths, order = split.lengths, split.order(8, seed=3)
    passes = [[next(order) for _ in range(125)] for _ in range(3)]
    for rows in passes:
        assert sorted(np.concatenate(rows)) == list(range(1000))
    assert len({tuple(np.concatenate(rows)) for rows in passes}) == 3
    assert not {frozenset(rows) for rows in passes[0]} & {frozenset(rows) for rows in passes[1]}
    # long and short batches alternate: a curriculum would show in the loss
    means = np.array([lengths[rows].mean() for rows in passes[0]])
    assert abs(np.corrcoef(means, np.arange(125))[0, 1]) < 0.3


def test_batches_depend_on_seed(dataset, tokenizer):
    batches = make_batches(dataset, tokenizer, 150)
    assert are_equal(batches, make_batches(dataset, tokenizer, 150))
    assert are_equal(batches, make_batches(dataset, tokenizer, 150, num_workers=2))
    assert not are_equal(batches, make_batches(dataset, tokenizer, 150, seed=2))


def test_split_smaller_than_batch_works(dataset, tokenizer):
    for batch in make_batches(dataset.select(range(3)), tokenizer, 5):
        assert len(batch["input_ids"]) == 8


def test_batch_width_is_multiple_of_8(dataset, tokenizer):
    long = dataset.map(lambda row: {name: row[name] * 4 for name in PAIRS.columns[:3]}).filter(
        lambda row: len(row["input_ids"]) <= 252
    )
    widths = {batch["input_ids"].shape[1] for batch in make_batches(long, tokenizer, 200)}
    assert max(widths) == 252  # a model of 252 positions has no 253rd
    assert all(width % 8 == 0 for width in widths - {252}) and len(widths) > 10


def test_eval_batches_are_fixed(dataset, tokenizer):
    def rows_of(batches):
        return sorted(
            (ids[mask.bool()].tolist(), labels[mask.bool()].tolist())
            for batch in batches
            for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
        )

    for args in (DataArguments(), DataArguments(whole_word_mask=False, max_sequence_length=40)):
        batches = data.make_eval_batches(dataset, tokenizer, args, batch_size=64)
        assert are_equal(batches, data.make_eval_batches(dataset, tokenizer, args, batch_size=64))
        assert sum(len(batch["input_ids"]) for batch in batches) == 1000
        assert max(batch["input_ids"].shape[1] for batch in batches) == (args.max_sequence_length or 64)
        assert rows_of(batches) == rows_of(data.make_eval_batches(dataset, tokenizer, args, batch_size=7))
    few = data.make_eval_batches(dataset, tokenizer, args, batch_size=64, max_samples=100)
    assert [len(batch["input_ids"]) for batch in few] == [64, 36]


@pytest.mark.parametrize("way", ["finish", "at once"])
def test_workers_survive_ctrl_c_until_trainer_ends(start, dataset, tmp_path, way):
    dataset.save_to_disk(str(tmp_path / "dataset"))
    script = start("script", "-m", "tests.programs.interrupted_batches", tmp_path / "dataset", way)
    script.wait_for("ready")
    script.interrupt()
    script.assert_clean_end()
    assert script.text.endswith("ended well\n"), script.text


ENDLESS = """
import time, numpy
from text.workers import prepare_in_workers
class Large:
    def __getitem__(self, key): return numpy.zeros(10**6)
batches = prepare_in_workers(Large(), range(1000), 2)
next(batches)
print("ready", flush=True)
time.sleep(600)
"""


def test_workers_end_with_killed_trainer(start):
    """They do not wait for the pipe with their last batches."""
    script = start("script", "-c", ENDLESS)
    script.wait_for("ready")
    assert len(script.left_processes()) == 3
    script.process.kill()
    wait_until(lambda: not script.left_processes(), 20, "the workers are gone")


HASTY = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # which runs before later ones
from text.workers import prepare_in_workers
batches = prepare_in_workers(range(100), range(100), 2)
assert list(batches) == list(range(100))
"""


def test_workers_survive_end_of_process_group():
    """A scheduler may end the process group, but the trainer ends its workers."""
    run_python("-c", HASTY, expect=0)


def make_blocks(columns: tuple[str, ...], count: int = 50) -> tuple[list[dict], Dataset]:
    """Make blocks of 24 ids, with [CLS] and [SEP] for masking; the last one is shorter."""
    rows = []
    for row in make_rows(count, 200, length=24):
        ids = (row["input_ids"] * 2)[: 24 if len(rows) < count - 1 else 13]  # 3 in the middle ends a document
        if "special_tokens_mask" in columns:
            ids[0], ids[-1] = 2, 3
        values = {"input_ids": ids, "special_tokens_mask": [int(token < 5) for token in ids]}
        rows.append({name: values[name] for name in columns})
    return rows, Dataset.from_list(rows)


def test_causal_batches_label_all_but_first(tokenizer):
    rows, blocks = make_blocks(TEXT.columns)
    texts = {tuple(row["input_ids"]) for row in rows}
    args = DataArguments()
    batches = make_batches(blocks, tokenizer, 12, args)
    for batch in [*batches, *data.make_eval_batches(blocks, tokenizer, args, batch_size=7)]:
        names = ("input_ids", "attention_mask", "labels", "position_ids")
        assert set(batch) == set(names)
        for ids, mask, labels, positions in zip(*(batch[name] for name in names), strict=True):
            length = int(mask.sum())
            assert tuple(ids[:length].tolist()) in texts and (ids[length:] == 0).all()
            begins = [not place or bool(ids[place - 1] == 3) for place in range(length)]  # 3 ends a document
            assert [position == 0 for position in positions[:length].tolist()] == begins
            assert positions[:length].diff()[positions[1:length] > 0].eq(1).all() and not positions[length:].any()
            assert labels[:length].eq(-100).tolist() == begins and (labels[length:] == -100).all()
            assert (labels == ids)[labels != -100].all()
    assert are_equal(batches, make_batches(blocks, tokenizer, 12, args, num_workers=2))
    batches = make_batches(blocks, tokenizer, 6, DataArguments(max_sequence_length=10))
    starts = {text[:10] for text in texts}
    assert all(tuple(row.tolist()) in starts for batch in batches for row in batch["input_ids"])


def test_cut_blocks_keep_end_token(tokenizer):
    rows, blocks = make_blocks(BLOCKS.columns)
    args = DataArguments(max_sequence_length=16, mlm_probability=0.3)
    for batch in make_batches(blocks, tokenizer, 12, args):
        assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
        true = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        lengths = batch["attention_mask"].sum(1)
        assert set(lengths.tolist()) <= {16, 13} and not batch["token_type_ids"].any()
        for ids, length in zip(true.tolist(), lengths.tolist(), strict=True):
            assert ids[0] == 2 and ids[length - 1] == 3
            assert any(row["input_ids"][: length - 1] == ids[: length - 1] for row in rows)
        assert (batch["labels"] != -100).sum() > 8


GROWING = dict(initial_sequence_length=24, max_sequence_length=60, sequence_length_warmup_steps=10)


def test_sequence_length_grows_with_epoch():
    args = DataArguments(**GROWING)
    # 24 + 3.6 an epoch, rounded down to multiples of 8; the end is what was asked for
    expected = [24, 24, 24, 32, 32, 40, 40, 48, 48, 56, 60, 60]
    assert [sequence_length_at(epoch, args) for epoch in range(12)] == expected
    # the initial length need not be a multiple of 8
    args = DataArguments(initial_sequence_length=30, max_sequence_length=512, sequence_length_warmup_steps=1000)
    assert [sequence_length_at(epoch, args) for epoch in (0, 1, 10, 999, 10**9)] == [30, 30, 32, 504, 512]
    assert sequence_length_at(5, DataArguments()) is None
    assert sequence_length_at(5, DataArguments(max_sequence_length=64)) == 64


@pytest.mark.parametrize("limit", [8, 9, 21, 64, 127, 128])
def test_cut_sequences_keep_special_tokens(limit):
    rows = make_rows(300, 200)
    flat = {name: np.concatenate([row[name] for row in rows]) for name in PAIRS.columns[:3]}
    flat["sentence_order_label"] = np.array([row["sentence_order_label"] for row in rows])
    cut, lengths = cut_rows(flat, np.array([len(row["input_ids"]) for row in rows]), limit)
    assert (cut["sentence_order_label"] == flat["sentence_order_label"]).all()
    parts = {name: np.split(cut[name], np.cumsum(lengths)[:-1]) for name in PAIRS.columns[:3]}
    for number, row in enumerate(rows):
        ids, types, special = (parts[name][number].tolist() for name in PAIRS.columns[:3])
        assert len(ids) == lengths[number] == min(limit, len(row["input_ids"]))
        assert special == [int(token < 5) for token in ids]
        end, whole_end = types.index(1), row["token_type_ids"].index(1)
        assert types == [0] * end + [1] * (len(ids) - end)
        first, second = row["input_ids"][:whole_end], row["input_ids"][whole_end:]
        assert ids[:end] == [*first[: end - 1], 3] and ids[end:] == [*second[: len(ids) - end - 1], 3]
        # the longer segment is truncated first
        kept, given = (end, len(ids) - end), (len(first) - end, len(second) - len(ids) + end)
        assert abs(kept[0] - kept[1]) <= 1 or given[kept.index(min(kept))] == 0


def test_next_batch_has_new_length(dataset, tokenizer):
    lengths = {0: 24, 5: 32, 6: 40, 12: 40, 15: 24, 16: None}

    def take(num_workers):
        options = dict(batch_size=8, seed=1, num_workers=num_workers)
        batches = data.make_train_batches(dataset, tokenizer, DataArguments(), **options)
        taken, iterator = [], None
        for number in range(40):
            if number in lengths:
                batches.sequence_length = lengths[number]
            iterator = iterator or iter(batches)
            taken.append(next(iterator))
        return taken

    batches = take(0)
    widths = [batch["input_ids"].shape[1] for batch in batches]
    for start, end, longest in ((0, 5, 24), (5, 6, 32), (6, 15, 40), (15, 16, 24)):
        assert max(widths[start:end]) <= longest
    assert max(widths[:5]) == 24 and max(widths[6:15]) == 40 and 50 < max(widths[16:]) <= 64
    assert are_equal(batches, take(1)) and are_equal(batches, take(2))
    # no instance is lost when the length changes: the rows are those of an order without change
    rows = [batch["sentence_order_label"].tolist() for batch in make_batches(dataset, tokenizer, 40)]
    assert rows == [batch["sentence_order_label"].tolist() for batch in batches]
    assert widths[16:] == [batch["input_ids"].shape[1] for batch in make_batches(dataset, tokenizer, 40)][16:]


def test_excessive_sequence_length_is_one_line(tokenizer, caplog):
    corpus = {"seq_length": 128}
    check_data_arguments(DataArguments(), tokenizer, corpus, 128)
    check_data_arguments(DataArguments(max_sequence_length=64), tokenizer, corpus, 64)
    assert not caplog.text
    for args in (DataArguments(), DataArguments(max_sequence_length=100)):
        with pytest.raises(UserError, match="^[^\n]*--max_sequence_length 64[^\n]*$"):
            check_data_arguments(args, tokenizer, corpus, 64)
    # even if the dataset's sequences are shorter
    with pytest.raises(UserError, match="^--max_sequence_length 10000 is more than the model takes: give at most 128$"):
        check_data_arguments(DataArguments(max_sequence_length=10_000), tokenizer, corpus, 128)
    check_data_arguments(DataArguments(max_sequence_length=512), tokenizer, corpus, 512)
    assert "longest ones have 128" in caplog.text
