"""Batches: their masks, order and form depend on the seed alone, not on the workers, for all lengths."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from datasets import Dataset
from mains import expect_user_error
from processes import ROOT, run_python, wait_until
from rows import SPECIAL, are_equal, collate, make_batches, make_rows
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AlbertTokenizer, BertTokenizer, PreTrainedTokenizerFast

from arguments import DataArguments
from experiment import data
from text.batches import IndexedSplit, check_data_arguments, sequence_length_at
from text.collators import DataCollatorForWholeWordMask, cut_rows, number_words
from text.documents import read_text
from text.instances import BLOCKS, PAIRS, TEXT
from text.tokenizers import find_word_beginnings, load_tokenizer, train_byte_tokenizer
from tokenize_wikitext103 import TokenizeArguments


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer whose words are single pieces."""
    words = [f"▁word{number}" for number in range(195)]
    return AlbertTokenizer(vocab=[(token, 0.0) for token in SPECIAL] + [(word, -5.0) for word in words])


@pytest.fixture(scope="module")
def dataset():
    """1,000 sentence-order pairs of 20 to 64 tokens; some words are <unk>."""
    return Dataset.from_list(make_rows(1000, 200, length=64))


def restore(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the ids before the masking."""
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def test_batches_contain_the_sequences(dataset, tokenizer):
    rows = {tuple(row["input_ids"]): row for row in dataset}
    for batch in make_batches(dataset, tokenizer, 20):
        assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels", "sentence_order_label"}
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())
        padding = batch["attention_mask"] == 0
        assert (batch["input_ids"][padding] == 0).all() and (batch["labels"][padding] == -100).all()
        for position, (ids, length) in enumerate(zip(restore(batch), batch["attention_mask"].sum(1), strict=True)):
            row = rows[tuple(ids[:length].tolist())]
            assert batch["token_type_ids"][position, :length].tolist() == row["token_type_ids"]
            assert batch["sentence_order_label"][position] == row["sentence_order_label"]
        assert (batch["labels"] != -100).any()


def test_padding_is_below_tenth(dataset, tokenizer):
    for batch_size in (4, 64):
        batches = make_batches(dataset, tokenizer, 200, batch_size=batch_size)
        assert torch.cat([batch["attention_mask"].flatten() for batch in batches]).float().mean() > 0.9


def test_pass_reads_each_row_once_reordered(dataset):
    split = IndexedSplit(dataset, None)
    order = split.order(8, seed=3)
    passes = [[next(order) for _ in range(125)] for _ in range(3)]
    for rows in passes:
        assert sorted(np.concatenate(rows)) == list(range(1000))
    assert len({tuple(np.concatenate(rows)) for rows in passes}) == 3
    assert not {frozenset(rows) for rows in passes[0]} & {frozenset(rows) for rows in passes[1]}
    # long and short batches alternate: a curriculum would show in the loss
    means = np.array([split.lengths[rows].mean() for rows in passes[0]])
    assert abs(np.corrcoef(means, np.arange(125))[0, 1]) < 0.3


def test_batches_depend_on_seed(dataset, tokenizer):
    batches = make_batches(dataset, tokenizer, 150)
    assert are_equal(batches, make_batches(dataset, tokenizer, 150))
    assert are_equal(batches, make_batches(dataset, tokenizer, 150, num_workers=2))
    assert not are_equal(batches, make_batches(dataset, tokenizer, 150, seed=2))


def test_split_smaller_than_batch_works(dataset, tokenizer):
    assert {len(batch["labels"]) for batch in make_batches(dataset.select(range(3)), tokenizer, 5)} == {8}


def test_batch_width_is_multiple_of_8(dataset, tokenizer):
    long = dataset.map(lambda row: {name: row[name] * 4 for name in PAIRS.columns[:3]})
    long = long.filter(lambda row: len(row["input_ids"]) <= 252)
    widths = {batch["input_ids"].shape[1] for batch in make_batches(long, tokenizer, 200)}
    assert max(widths) == 252  # a model of 252 positions has no 253rd
    assert all(width % 8 == 0 for width in widths - {252}) and len(widths) > 10


def test_eval_batches_are_fixed(dataset, tokenizer):
    def rows_of(batches):
        parts = [zip(it["input_ids"], it["attention_mask"].bool(), it["labels"], strict=True) for it in batches]
        return sorted((ids[mask].tolist(), labels[mask].tolist()) for part in parts for ids, mask, labels in part)

    for args in (DataArguments(), DataArguments(whole_word_mask=False, max_sequence_length=40)):
        batches = data.make_eval_batches(dataset, tokenizer, args, batch_size=64)
        assert are_equal(batches, data.make_eval_batches(dataset, tokenizer, args, batch_size=64))
        assert sum(len(batch["input_ids"]) for batch in batches) == 1000
        assert max(batch["input_ids"].shape[1] for batch in batches) == (args.max_sequence_length or 64)
        assert rows_of(batches) == rows_of(data.make_eval_batches(dataset, tokenizer, args, batch_size=7))
    few = data.make_eval_batches(dataset, tokenizer, args, batch_size=64, max_samples=100)
    assert [len(batch["input_ids"]) for batch in few] == [64, 36]


@pytest.mark.parametrize("way", ["finish", "at_once"])
def test_workers_survive_ctrl_c_until_trainer_ends(start, dataset, tokenizer, tmp_path, way):
    dataset.save_to_disk(str(tmp_path / "dataset"))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = ["-m", "tests.programs.interrupted_batches", way, tmp_path / "tokenizer", tmp_path / "dataset"]
    script = start("script", *words)
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
assert list(prepare_in_workers(range(100), range(100), 2)) == list(range(100))
"""


def test_workers_survive_end_of_process_group():
    """A scheduler may end the process group, but the trainer ends its workers."""
    run_python("-c", HASTY, expect=0)


def make_blocks(columns: tuple[str, ...]) -> tuple[set[tuple[int, ...]], Dataset]:
    """Return the ids of 50 blocks of 24 tokens, with [CLS] and [SEP] for masking; the last one is shorter."""
    rows = []
    for number, row in enumerate(make_rows(50, 200, length=24)):
        ids = (row["input_ids"] * 2)[: 24 if number < 49 else 13]  # 3 in the middle ends a document
        if "special_tokens_mask" in columns:
            ids[0], ids[-1] = 2, 3
        values = {"input_ids": ids, "special_tokens_mask": [int(token < 5) for token in ids]}
        rows.append({name: values[name] for name in columns})
    return {tuple(row["input_ids"]) for row in rows}, Dataset.from_list(rows)


def test_causal_batches_label_all_but_first(tokenizer):
    texts, blocks = make_blocks(TEXT.columns)
    batches = make_batches(blocks, tokenizer, 12)
    for batch in [*batches, *data.make_eval_batches(blocks, tokenizer, DataArguments(), batch_size=7)]:
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
    assert are_equal(batches, make_batches(blocks, tokenizer, 12, num_workers=2))
    batches = make_batches(blocks, tokenizer, 6, DataArguments(max_sequence_length=10))
    starts = {text[:10] for text in texts}
    assert all(tuple(row.tolist()) in starts for batch in batches for row in batch["input_ids"])


def test_cut_blocks_keep_end_token(tokenizer):
    texts, blocks = make_blocks(BLOCKS.columns)
    args = DataArguments(max_sequence_length=16, mlm_probability=0.3)
    for batch in make_batches(blocks, tokenizer, 12, args):
        assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
        lengths = batch["attention_mask"].sum(1).tolist()
        assert set(lengths) <= {16, 13} and not batch["token_type_ids"].any()
        for ids, length in zip(restore(batch).tolist(), lengths, strict=True):
            assert ids[0] == 2 and ids[length - 1] == 3
            assert any(text[: length - 1] == tuple(ids[: length - 1]) for text in texts)
        assert (batch["labels"] != -100).sum() > 8


def test_sequence_length_grows_with_epoch():
    args = DataArguments(initial_sequence_length=24, max_sequence_length=60, sequence_length_warmup_steps=10)
    # 24 + 3.6 an epoch, rounded down to multiples of 8; the end is what was asked for
    expected = [24, 24, 24, 32, 32, 40, 40, 48, 48, 56, 60, 60]
    assert [sequence_length_at(epoch, args) for epoch in range(12)] == expected
    # the initial length need not be a multiple of 8
    args = DataArguments(initial_sequence_length=30, max_sequence_length=512, sequence_length_warmup_steps=1000)
    assert [sequence_length_at(epoch, args) for epoch in (0, 1, 10, 999, 10**9)] == [30, 30, 32, 504, 512]
    for length in (None, 64):
        assert sequence_length_at(5, DataArguments(max_sequence_length=length)) == length


@pytest.mark.parametrize("limit", [8, 9, 21, 64, 127, 128])
def test_cut_sequences_keep_special_tokens(limit):
    rows = make_rows(300, 200)
    flat = {name: np.concatenate([np.atleast_1d(row[name]) for row in rows]) for name in rows[0]}
    cut, lengths = cut_rows(flat, np.array([len(row["input_ids"]) for row in rows]), limit)
    assert (cut["sentence_order_label"] == flat["sentence_order_label"]).all()
    parts = [np.split(cut[name], np.cumsum(lengths)[:-1]) for name in PAIRS.columns[:3]]
    for row, length, *values in zip(rows, lengths, *parts, strict=True):
        ids, types, special = (value.tolist() for value in values)
        assert len(ids) == length == min(limit, len(row["input_ids"]))
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
            batches.sequence_length = lengths.get(number, batches.sequence_length)
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
    unchanged = make_batches(dataset, tokenizer, 40)
    labels = [[batch["sentence_order_label"].tolist() for batch in each] for each in (batches, unchanged)]
    assert labels[0] == labels[1] and widths[16:] == [batch["input_ids"].shape[1] for batch in unchanged[16:]]


def test_excessive_sequence_length_is_one_line(tokenizer, caplog):
    corpus = {"seq_length": 128}
    check_data_arguments(DataArguments(), tokenizer, corpus, 128)
    check_data_arguments(DataArguments(max_sequence_length=64), tokenizer, corpus, 64)
    assert not caplog.text
    for length, positions, words in (
        (None, 64, "--max_sequence_length 64"),
        (100, 64, "--max_sequence_length 64"),
        # even if the dataset's sequences are shorter
        (10_000, 128, "--max_sequence_length 10000 is more than the model takes: give at most 128"),
    ):
        with expect_user_error(words):
            check_data_arguments(DataArguments(max_sequence_length=length), tokenizer, corpus, positions)
    check_data_arguments(DataArguments(max_sequence_length=512), tokenizer, corpus, 512)
    assert "longest ones have 128" in caplog.text


WORDPIECE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# pieces, and whether each begins a word; the marks of the other kind are ordinary characters
PIECES = {
    "sentencepiece": [(f"▁w{n}", True) for n in range(60)] + [(f"p{n}", False) for n in range(90)] + [("##p", False)],
    "wordpiece": [(f"w{n}", True) for n in range(60)] + [(f"##p{n}", False) for n in range(90)] + [("▁", True)],
}


@pytest.fixture(scope="module", params=PIECES)
def piecewise(request, tmp_path_factory):
    """A tokenizer whose words have several pieces, saved and loaded as users do, and which of its ids begin a word."""
    pieces = [piece for piece, _ in PIECES[request.param]]
    if request.param == "sentencepiece":
        tokenizer = AlbertTokenizer(vocab=[(piece, -1.0) for piece in SPECIAL + pieces])
    else:
        tokenizer = BertTokenizer(vocab={piece: number for number, piece in enumerate(WORDPIECE + pieces)})
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder), [False] * 5 + [begins for _, begins in PIECES[request.param]]


def words_of(ids: list[int], begins_word: list[bool]) -> list[list[int]]:
    """Return the positions of each word by a plain loop."""
    words, is_open = [], False
    for position, token in enumerate(ids):
        if token >= 5 and (begins_word[token] or not is_open):
            words.append([position])
        elif token >= 5:
            words[-1].append(position)
        is_open = token >= 5
    return words


def test_whole_words_are_masked_evenly(piecewise):
    tokenizer, begins_word = piecewise
    rows = make_rows(3000, len(tokenizer))
    batch = collate(DataCollatorForWholeWordMask(tokenizer), rows, seed=1)
    tokens, changes, chosen = [], [], defaultdict(list)  # whether each word of a size is chosen
    for row, ids, labels in zip(rows, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        words = words_of(row["input_ids"], begins_word)
        for word in words:
            assert len({labels[position] != -100 for position in word}) == 1, "a word is masked in part"
            for key in (min(len(word), 6), "words"):
                chosen[key].append(labels[word[0]] != -100)
        ordinary = set(itertools.chain(*words))
        for position, token in enumerate(row["input_ids"]):
            if labels[position] == -100:
                assert ids[position] == token
            else:
                assert labels[position] == token and position in ordinary, "a special token is to be predicted"
                changes.append((token, ids[position]))
        tokens += [labels[position] != -100 for position in ordinary]
        assert set(labels[len(row["input_ids"]) :]) <= {-100}
    # 207,000 tokens in 88,000 words: five standard deviations, as below for the words of each size
    assert np.mean(tokens) == pytest.approx(0.15, abs=0.0075)
    for size, part in chosen.items():
        assert len(part) > 3000 and np.mean(part) == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / len(part)) ** 0.5), size
    before, after = np.array(changes).T
    assert (after == 4).mean() == pytest.approx(0.8, abs=0.012)
    assert (after == before).mean() == pytest.approx(0.1 + 0.1 / 151, abs=0.009)
    assert set(after[(after != before) & (after != 4)]) == set(range(5, len(tokenizer)))


@pytest.mark.parametrize("whole_word_mask", [True, False])
def test_collator_matches_stored_batches(piecewise, whole_word_mask):
    tokenizer, _ = piecewise
    rows, numbers = make_rows(50, len(tokenizer)), np.arange(7, 39)
    args = DataArguments(whole_word_mask=whole_word_mask, mlm_probability=0.3)
    split = IndexedSplit(Dataset.from_list(rows), None)
    collator = data.make_collator(split.columns, split.longest, tokenizer, args)
    stored = collator.collate(*split[numbers], np.random.default_rng([1, 2]), split.longest)
    collator, rows = DataCollatorForWholeWordMask(tokenizer, 0.3, 8, whole_word_mask), rows[7:39]
    assert are_equal([stored], [collate(collator, rows, seed=[1, 2])])
    assert not are_equal([stored], [collate(collator, rows, seed=[1, 3])])
    # special tokens are recognized
    bare = collate(collator, [{"input_ids": row["input_ids"]} for row in rows], seed=[1, 2])
    assert set(bare) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert bare["labels"].equal(stored["labels"]) and not bare["token_type_ids"].any()


def test_batch_masks_at_least_one_word(piecewise):
    tokenizer, _ = piecewise
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=1e-9)
    # two tokens between special ones are one word
    labels = collate(collator, [{"input_ids": [2, 100, 101, 3]}])["labels"]
    assert labels.tolist() == [[-100, 100, 101, -100]]
    assert not (collate(collator, [{"input_ids": [2, 1, 3]}])["labels"] != -100).any()
    # no word continues in the next instance, even without special tokens
    for seed in range(10):
        labels = collate(collator, [{"input_ids": [5, 100]}, {"input_ids": [101, 102]}], seed)["labels"]
        assert labels.tolist() in ([[5, 100], [-100, -100]], [[-100, -100], [101, 102]])
    # no special token is chosen, even if all others are
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=1 - 1e-9)
    labels = collate(collator, [{"input_ids": [2, 100, 1, 101, 3]}])["labels"]
    assert labels.tolist() == [[-100, 100, -100, 101, -100]]


def test_tokenizer_without_word_marks_is_refused():
    pieces = [*WORDPIECE, *(f"{mark}a{n}" for n in range(50) for mark in ("·", "")), "▁", "##"]
    backend = Tokenizer(BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), WORDPIECE, strict=True))
    unmarked = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    with expect_user_error("--no_whole_word_mask"):
        check_data_arguments(DataArguments(), unmarked, {"seq_length": 64}, 64)
    check_data_arguments(DataArguments(whole_word_mask=False), unmarked, {"seq_length": 64}, 64)
    collator = DataCollatorForWholeWordMask(unmarked, whole_word_mask=False)
    assert (collate(collator, make_rows(20, len(pieces)))["labels"] != -100).sum() > 100


def test_byte_level_words_match_offsets():
    """By the tokenizer's offsets, a word begins at the start of the text and after a space."""
    text = " ".join(read_text(ROOT / "sample_data" / "austen.txt.xz")[:60_000].split()) + " déjà — Ёлка 3.14 ok"
    tokenizer = train_byte_tokenizer([[text]], TokenizeArguments(vocab_size=600))
    encoding = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoding["input_ids"])
    spaces = np.cumsum([character == " " for character in text])
    expected = np.diff([spaces[end - 1] for _, end in encoding["offset_mapping"]], prepend=-1) == 1
    begins = find_word_beginnings(tokenizer)[ids]
    words, count = number_words(begins, np.ones(len(ids), dtype=bool), np.array([len(ids)]))
    assert count == expected.sum() == len(text.split())
    assert (np.diff(words, prepend=0) == 1).tolist() == expected.tolist()
