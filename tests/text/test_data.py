"""text/ and experiment/data.py: documents, sentence-order pairs, masking, batches."""

import gzip
import hashlib
import itertools
import json
import lzma
import os
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from processes import ROOT, run_python
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AlbertTokenizer, BertTokenizer, PreTrainedTokenizerFast

from arguments import DataArguments, TokenizeArguments
from experiment import data
from support.console import UserError
from text.batches import (
    IndexedBatches,
    check_data_arguments,
    cut_rows,
    data_seed,
    group_by_length,
    sequence_length_at,
)
from text.collators import DataCollatorForWholeWordMask, number_words, to_tensors
from text.documents import (
    SAMPLE_CHAPTER,
    SAMPLE_TITLE,
    make_document_random,
    make_sentence_pairs,
    read_documents,
    read_text,
    split_articles,
    split_chapters,
    split_paragraphs,
    split_sentences,
)
from text.instances import BLOCKS, PAIRS, TEXT
from text.stored import load_tokenized_dataset
from text.tokenizers import find_word_beginnings, load_tokenizer, tokenizer_fingerprint, train_byte_tokenizer

SPECIAL = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"▁word{number}" for number in range(195)]
    return AlbertTokenizer(vocab=[(token, 0.0) for token in SPECIAL] + [(word, -5.0) for word in words])


@pytest.fixture(scope="module")
def dataset():
    """1,000 instances of 16 to 64 tokens; some words are <unk>."""
    generator = np.random.default_rng(0)
    columns = {name: [] for name in PAIRS.columns}
    for row in range(1000):
        length = int(generator.integers(16, 65))
        ids = generator.integers(5, 200, length)
        ids[generator.random(length) < 0.02] = 1
        cut = length // 2
        ids[[0, cut, length - 1]] = (2, 3, 3)
        columns["input_ids"].append(ids.astype(np.int32))
        columns["token_type_ids"].append((np.arange(length) > cut).astype(np.int8))
        columns["special_tokens_mask"].append((ids < 5).astype(np.int8))
        columns["sentence_order_label"].append(row % 2)
    return Dataset.from_dict(columns)


def make_batches(dataset, tokenizer, count, args=None, **changes):
    options = {"batch_size": 8, "seed": 1, **changes}
    return list(
        itertools.islice(data.make_train_batches(dataset, tokenizer, args or DataArguments(), **options), count)
    )


def are_equal(one: list[dict], other: list[dict]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


# ---------------------------------------------------------------- documents


def test_paragraphs_join_wrapped_lines():
    assert split_paragraphs("One line\nof two.\n\n  \nNext\n") == ["One line of two.", "Next"]
    long_lines = ["word " * 60, "another " * 60]
    assert split_paragraphs("\n".join(long_lines)) == [line.strip() for line in long_lines]


def test_sample_corpus_by_chapter():
    text = read_text(ROOT / "sample_data" / "austen.txt.xz")
    chapters = split_chapters(text)
    assert len(chapters) == 270  # 269 chapters and the advertisement before Northanger Abbey
    assert " ".join(paragraph for chapter in chapters for paragraph in chapter) == " ".join(text.split())
    headings = [[p for p in chapter if SAMPLE_CHAPTER.fullmatch(p)] for chapter in chapters]
    assert sorted(map(len, headings)) == [0] + [1] * 269
    for chapter in chapters:
        titles = [place for place, p in enumerate(chapter) if SAMPLE_TITLE.fullmatch(p)]
        assert all(place < 4 for place in titles), "the title of a novel ended up behind the text of another"


def test_wikitext_articles():
    lines = [
        "\n",
        " = First = \n",
        "\n",
        " A red @-@ hot 1 @,@ 000 . \n",
        " = 5 = \n",
        " = = Part = = \n",
        " More . \n",
    ]
    lines += ["\n", " = Second ( = film ) = \n", "\n", " Text . \n"]
    assert split_articles(lines) == [
        ["First", "A red-hot 1,000 .", "5", "Part", "More ."],
        ["Second ( = film )", "Text ."],
    ]


@pytest.mark.skipif("TEST_DATA" not in os.environ, reason="TEST_DATA does not name the folder of shared test data")
def test_wikitext_file_has_60_articles():
    documents = read_documents(Path(os.environ["TEST_DATA"]) / "wikitext-2" / "valid.txt")
    assert len(documents) == 60
    assert documents[0][0] == "Homarus gammarus"


@pytest.mark.parametrize("suffix, pack", [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_files_plain_and_packed(tmp_path, suffix, pack):
    (tmp_path / f"a.txt{suffix}").write_bytes(pack("\ufeffÉtude.\r\n\r\nZwei".encode()))
    assert read_documents(tmp_path / f"a.txt{suffix}") == [["Étude.", "Zwei"]]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(b'{"body": "One."}\n\n{"body": ""}\n{"body": "a \\ud800 b"}\n'))
    assert read_documents(tmp_path / f"a.jsonl{suffix}", "body") == [["One."], ["a ? b"]]
    for name, comma in (("a.csv", ","), ("a.TSV", "\t")):
        rows = [["id", "body"], ["1", '"One, two.\r\n\r\nThree ""four""."'], ["2", ""], ["3", "long " * 30_000]]
        (tmp_path / f"{name}{suffix}").write_bytes(pack("\r\n".join(map(comma.join, rows)).encode()))
        assert read_documents(tmp_path / f"{name}{suffix}", "body") == [
            ["One, two.", 'Three "four".'],
            ["long " * 29_999 + "long"],
        ]


def test_sentences_stay_in_their_paragraph():
    assert split_sentences(["Dr. Smith went home. He slept", "Then"]) == [
        "Dr. Smith went home.",
        "He slept",
        "Then",
    ]


# ---------------------------------------------------------------- sentence-order pairs


@pytest.mark.parametrize("seq_length, longest", [(32, 10), (32, 100), (512, 60), (8, 9)])
def test_pairs_keep_all_text_in_order(seq_length, longest):
    lengths = random.Random(0)
    ids = itertools.count(10)
    sentences = [list(itertools.islice(ids, lengths.randint(1, longest))) for _ in range(2000)]
    pairs = make_sentence_pairs(sentences, seq_length, random.Random(1))
    restored = [segments[::-1] if label else segments for *segments, label in pairs]
    assert [token for first, second in restored for token in first + second] == list(itertools.chain(*sentences))
    assert all(first and second and len(first) + len(second) <= seq_length - 3 for first, second in restored)
    assert 0.4 < np.mean([label for *_, label in pairs]) < 0.6
    if longest <= (seq_length - 3) // 2:
        begins = {sentence[0] for sentence in sentences}
        assert all(first[0] in begins and second[0] in begins for first, second in restored)
        # the next sentence would not have fitted
        sizes = {sentence[0]: len(sentence) for sentence in sentences}
        for (first, second), (following, _) in zip(restored[:-2], restored[1:-1], strict=True):
            assert len(first) + len(second) + sizes[following[0]] > seq_length - 3


def test_pairs_reproduce_and_differ_by_document():
    sentences = [[number] * 5 for number in range(100)]

    def make(seed, split, index):
        return make_sentence_pairs(sentences, 64, make_document_random(seed, split, index))

    assert make(1, "train", 0) == make(1, "train", 0)
    assert (
        len({str(make(*key)) for key in ((1, "train", 0), (2, "train", 0), (1, "validation", 0), (1, "train", 1))}) == 4
    )


def test_cut_falls_on_every_sentence():
    sentences = [[number] for number in range(5)]
    cuts = set()
    for index in range(200):
        [(first, second, label)] = make_sentence_pairs(sentences, 64, random.Random(index))
        cuts.add(len(second if label else first))
    assert cuts == {1, 2, 3, 4}


@pytest.mark.parametrize("sentences, count", [([], 0), ([[]], 0), ([[7]], 0), ([[7, 8]], 1), ([[7], [8]], 1)])
def test_pairs_of_tiny_documents(sentences, count):
    assert len(make_sentence_pairs(sentences, 64, random.Random(0))) == count


# ---------------------------------------------------------------- masking and batches


def test_masking_rates(dataset, tokenizer):
    args = DataArguments()
    batches = IndexedBatches(dataset, partial(data.make_collator, tokenizer=tokenizer, args=args), args)
    flat, lengths = batches.read_rows(np.arange(1000).repeat(10), 64)
    masked = batches.collator.add_labels(flat, lengths, np.random.default_rng(0))
    before, after, labels = flat["input_ids"], masked["input_ids"], masked["labels"]
    chosen = labels != -100
    ordinary = before >= 5
    assert not (chosen & ~ordinary).any(), "a special token is to be predicted"
    assert (labels[chosen] == before[chosen]).all() and (after[~chosen] == before[~chosen]).all()
    # 370,000 ordinary tokens, 55,000 chosen: five standard deviations are 0.003 and 0.009
    assert chosen.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.003)
    assert (after[chosen] == 4).mean() == pytest.approx(0.8, abs=0.009)
    # a random token is the same one in 1 of 195 cases
    assert (after[chosen] == before[chosen]).mean() == pytest.approx(0.1 + 0.1 / 195, abs=0.007)
    replaced = after[chosen & (after != before) & (after != 4)]
    assert set(replaced) == set(range(5, 200)), "random tokens are ordinary ones, and all of them"


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
    """Positions of each word, by a plain loop: the definition."""
    words, is_open = [], False
    for position, token in enumerate(ids):
        if token < 5:
            is_open = False
        elif begins_word[token] or not is_open:
            words.append([position])
            is_open = True
        else:
            words[-1].append(position)
    return words


def make_rows(count: int, vocabulary: int, length: int = 128) -> list[dict]:
    """[CLS] A [SEP] B [SEP] with an <unk> here and there, as lists."""
    generator = np.random.default_rng(5)
    rows = []
    for number in range(count):
        ids = generator.integers(5, vocabulary, int(generator.integers(20, length + 1)) if number else length)
        ids[generator.random(len(ids)) < 0.02] = 1
        cut = int(generator.integers(2, len(ids) - 2))
        ids[[0, cut, -1]] = (2, 3, 3)
        values = (ids.tolist(), (np.arange(len(ids)) > cut).astype(int).tolist(), (ids < 5).astype(int).tolist())
        rows.append(dict(zip(PAIRS.columns, (*values, number % 2), strict=True)))
    return rows


def test_words_are_masked_wholly_or_not_at_all_and_none_more_than_others(piecewise):
    tokenizer, begins_word = piecewise
    rows = make_rows(3000, len(tokenizer))
    batch = DataCollatorForWholeWordMask(tokenizer)(rows, seed=1)
    counts = {}  # pieces of a word -> [words, chosen ones]
    tokens, before, after = [], [], []
    for row, ids, labels in zip(rows, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        words = words_of(row["input_ids"], begins_word)
        for word in words:
            is_chosen = {labels[position] != -100 for position in word}
            assert len(is_chosen) == 1, "a word is masked in part"
            for key in (min(len(word), 6), "words"):
                count = counts.setdefault(key, [0, 0])
                count[0] += 1
                count[1] += is_chosen.pop() if key != "words" else labels[word[0]] != -100
        ordinary = set(itertools.chain(*words))
        for position, token in enumerate(row["input_ids"]):
            if position not in ordinary:
                assert labels[position] == -100 and ids[position] == token, "a special token is to be predicted"
            elif labels[position] == -100:
                assert ids[position] == token
            else:
                assert labels[position] == token
                before.append(token)
                after.append(ids[position])
        tokens += [labels[position] != -100 for position in ordinary]
        assert set(labels[len(row["input_ids"]) :]) <= {-100}
    # 207,000 tokens in 88,000 words: five standard deviations, as below for the words of each size
    assert np.mean(tokens) == pytest.approx(0.15, abs=0.0075)
    for size, (count, chosen) in counts.items():
        assert count > 3000 and chosen / count == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / count) ** 0.5), size
    before, after = np.array(before), np.array(after)
    assert (after == 4).mean() == pytest.approx(0.8, abs=0.012)
    assert (after == before).mean() == pytest.approx(0.1 + 0.1 / 151, abs=0.009)
    assert set(after[(after != before) & (after != 4)]) == set(range(5, len(tokenizer)))


def test_masks_depend_on_the_seed_alone(piecewise):
    tokenizer, _ = piecewise
    rows = make_rows(20, len(tokenizer))
    collator, another = DataCollatorForWholeWordMask(tokenizer), DataCollatorForWholeWordMask(tokenizer)
    one = collator(rows, seed=[3, 4])
    assert are_equal([one], [another(rows, seed=[3, 4])]) and not are_equal([one], [collator(rows, seed=[3, 5])])
    # without a seed: torch's, as transformers' collators
    torch.manual_seed(1)
    one, two = collator(rows), collator(rows)
    torch.manual_seed(1)
    assert are_equal([one], [collator(rows)]) and not are_equal([one], [two])


@pytest.mark.parametrize("whole_word_mask", [True, False])
def test_collator_and_stored_batches_are_the_same(piecewise, whole_word_mask):
    tokenizer, _ = piecewise
    rows = make_rows(50, len(tokenizer))
    numbers = np.arange(7, 39)
    args = DataArguments(whole_word_mask=whole_word_mask, mlm_probability=0.3, pad_to_multiple_of=16)
    collate = partial(data.make_collator, tokenizer=tokenizer, args=args)
    stored = to_tensors(IndexedBatches(Dataset.from_list(rows), collate, args)[numbers, [1, 2], None])
    collator = DataCollatorForWholeWordMask(tokenizer, 0.3, 16, whole_word_mask)
    assert stored["input_ids"].shape[1] % 16 == 0
    assert are_equal([stored], [collator([rows[number] for number in numbers], seed=[1, 2])])
    # arrays and tensors are as good as lists, and special tokens are known without being told
    arrays = [{name: np.array(value) for name, value in row.items() if name != "special_tokens_mask"} for row in rows]
    tensors = [{name: torch.tensor(value) for name, value in row.items()} for row in rows]
    for instances in (arrays, tensors):
        assert are_equal([stored], [collator([instances[number] for number in numbers], seed=[1, 2])])
    bare = collator([{"input_ids": rows[number]["input_ids"]} for number in numbers], seed=[1, 2])
    assert set(bare) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert torch.equal(bare["labels"], stored["labels"]) and not bare["token_type_ids"].any()


def test_one_word_of_a_batch_is_masked_at_least(piecewise):
    tokenizer, _ = piecewise
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=1e-9)
    # two pieces that make one word, between special tokens, whatever they begin with
    labels = collator([{"input_ids": [2, 100, 101, 3]}], seed=0)["labels"]
    assert labels.tolist() == [[-100, 100, 101, -100]]
    assert not (collator([{"input_ids": [2, 1, 3]}], seed=0)["labels"] != -100).any()
    # no word reaches over the end of an instance, even where no special token is there
    for seed in range(10):
        labels = collator([{"input_ids": [5, 100]}, {"input_ids": [101, 102]}], seed=seed)["labels"]
        assert labels.tolist() in ([[5, 100], [-100, -100]], [[-100, -100], [101, 102]])
    # and no special token is chosen where all else is
    collator = DataCollatorForWholeWordMask(tokenizer, mlm_probability=1 - 1e-9)
    assert collator([{"input_ids": [2, 100, 1, 101, 3]}])["labels"].tolist() == [[-100, 100, -100, 101, -100]]


def test_a_tokenizer_that_does_not_mark_words_is_refused_with_the_cure(tokenizer):
    pieces = [*WORDPIECE, *(f"{mark}a{n}" for n in range(50) for mark in ("·", "")), "▁", "##"]
    backend = Tokenizer(BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), WORDPIECE, strict=True))
    unmarked = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    with pytest.raises(UserError, match="--no_whole_word_mask"):
        check_data_arguments(DataArguments(), unmarked, {"seq_length": 64}, 64)
    check_data_arguments(DataArguments(whole_word_mask=False), unmarked, {"seq_length": 64}, 64)
    rows = make_rows(20, len(pieces))
    labels = DataCollatorForWholeWordMask(unmarked, whole_word_mask=False)(rows, seed=1)["labels"]
    assert (labels != -100).sum() > 100


def test_words_of_byte_level_pieces_are_those_of_the_text():
    """Against the tokenizer's own offsets: a word begins at the text's beginning and behind a space."""
    text = " ".join(read_text(ROOT / "sample_data" / "austen.txt.xz")[:60_000].split()) + " déjà — Ёлка 3.14 ok"
    args = TokenizeArguments(vocab_size=600)
    tokenizer = train_byte_tokenizer([[text]], args)
    encoding = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoding["input_ids"])
    spaces = np.cumsum([character == " " for character in text])
    expected = np.diff([spaces[end - 1] for _, end in encoding["offset_mapping"]], prepend=-1) == 1
    words, count = number_words(
        find_word_beginnings(tokenizer)[ids], np.ones(len(ids), dtype=bool), np.array([len(ids)])
    )
    assert count == expected.sum() == len(text.split())
    assert (np.diff(words, prepend=0) == 1).tolist() == expected.tolist()


# ---------------------------------------------------------------- full blocks


def make_blocks(columns: tuple[str, ...], count: int = 50) -> tuple[list[dict], Dataset]:
    """Blocks of 24 ids, with [CLS] and [SEP] if they are to be masked; and the last one shorter."""
    rows = []
    for row in make_rows(count, 200, length=24):
        ids = (row["input_ids"] * 2)[: 24 if len(rows) < count - 1 else 13]
        if "special_tokens_mask" in columns:
            ids[0], ids[-1] = 2, 3
        values = {"input_ids": ids, "special_tokens_mask": [int(token < 5) for token in ids]}
        rows.append({name: values[name] for name in columns})
    return rows, Dataset.from_list(rows)


def test_causal_batches_predict_every_token_but_the_first_of_a_row(tokenizer):
    rows, blocks = make_blocks(TEXT.columns)
    texts = {tuple(row["input_ids"]) for row in rows}
    args = DataArguments(pad_to_multiple_of=16)
    batches = make_batches(blocks, tokenizer, 12, args)
    for batch in [*batches, *data.make_eval_batches(blocks, tokenizer, args, batch_size=7)]:
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        for ids, mask, labels in zip(*(batch[name] for name in ("input_ids", "attention_mask", "labels")), strict=True):
            length = int(mask.sum())
            assert tuple(ids[:length].tolist()) in texts and (ids[length:] == 0).all()
            assert labels[1:length].equal(ids[1:length]) and labels[0] == -100 and (labels[length:] == -100).all()
    assert are_equal(batches, make_batches(blocks, tokenizer, 12, args, num_workers=2))
    batches = make_batches(blocks, tokenizer, 6, DataArguments(max_sequence_length=10))
    starts = {text[:10] for text in texts}
    assert all(tuple(row.tolist()) in starts for batch in batches for row in batch["input_ids"])


def test_masked_blocks_keep_their_end_when_they_are_cut(tokenizer):
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


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_a_look_at_batches_of_each_kind(tmp_path, tiny_data, objective):
    shape = {"model_type": "bert" if objective == "mlm" else "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "a.txt").write_text("A first line of text.\n\nAnd one more of the lines here.\n\n" * 100)
    words = ["-m", "experiment.show", "--config_path", tmp_path / "config.json", "--max_sequence_length", 32]
    words += ["--train_file", tmp_path / "a.txt", "--dataset_cache_dir", tmp_path]
    run = run_python(*words, "--tokenizer_path", tiny_data["--tokenizer_path"], expect=0)
    assert f"objective {objective}" in run.stdout and "more of the lines" in run.stdout.replace("\n   ", "")
    assert ("mask rate" in run.stdout) == (objective == "mlm") == ("⟦" in run.stdout)
    assert "1,000 instances" in run.stdout and "swapped" not in run.stdout


# ---------------------------------------------------------------- sequences that grow

GROWING = dict(initial_sequence_length=24, max_sequence_length=60, sequence_length_warmup_steps=10)


def test_sequence_length_grows_with_the_epoch():
    args = DataArguments(**GROWING)
    # 24 + 3.6 an epoch, rounded down to multiples of 8; the end is what was asked for
    assert [sequence_length_at(epoch, args) for epoch in range(12)] == [
        *(24, 24, 24, 32, 32, 40, 40, 48, 48, 56),
        *(60, 60),
    ]
    args = DataArguments(**GROWING, pad_to_multiple_of=1)
    assert [sequence_length_at(epoch, args) for epoch in range(3)] == [24, 27, 31]
    # one that is no multiple itself is where it begins
    args = DataArguments(initial_sequence_length=30, max_sequence_length=512, sequence_length_warmup_steps=1000)
    assert [sequence_length_at(epoch, args) for epoch in (0, 1, 10, 999, 10**9)] == [30, 30, 32, 504, 512]
    assert sequence_length_at(5, DataArguments()) is None
    assert sequence_length_at(5, DataArguments(max_sequence_length=64)) == 64
    assert sequence_length_at(5, DataArguments(initial_sequence_length=0, max_sequence_length=0)) is None


@pytest.mark.parametrize("limit", [8, 9, 21, 64, 127, 128])
def test_cut_instances_keep_their_form(limit):
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
        # the longer segment gives first
        kept, given = (end, len(ids) - end), (len(first) - end, len(second) - len(ids) + end)
        assert abs(kept[0] - kept[1]) <= 1 or given[kept.index(min(kept))] == 0


def take_while_growing(batches, lengths: dict[int, int | None], count: int) -> list[dict]:
    """The first batches, and the lengths that are set before some of them."""
    taken, iterator = [], None
    for number in range(count):
        if number in lengths:
            batches.set_sequence_length(lengths[number])
        iterator = iterator or iter(batches)
        taken.append(next(iterator))
    return taken


def test_the_next_batch_has_the_new_length_whatever_the_workers(dataset, tokenizer):
    lengths = {0: 24, 5: 32, 6: 40, 12: 40, 15: 24, 16: None}

    def take(num_workers):
        options = dict(batch_size=8, seed=1, num_workers=num_workers)
        return take_while_growing(data.make_train_batches(dataset, tokenizer, DataArguments(), **options), lengths, 40)

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


def test_a_length_for_good(dataset, tokenizer):
    """max_sequence_length alone cuts as well, and sets what is padded to."""
    batches = make_batches(dataset, tokenizer, 30, DataArguments(max_sequence_length=37, pad_to_multiple_of=8))
    assert {batch["input_ids"].shape[1] for batch in batches} == {24, 32, 37}
    whole = {tuple(row["input_ids"]) for row in dataset}
    for ids, labels, mask in ((b["input_ids"], b["labels"], b["attention_mask"].bool()) for b in batches):
        for row, kept in zip(torch.where(labels == -100, ids, labels), mask, strict=True):
            row = row[kept].tolist()
            assert (row[0], row.count(3), row[-1]) == (2, 2, 3)
            assert len(row) == 37 or tuple(row) in whole


def test_lengths_beyond_the_model_or_the_dataset_are_one_line(tokenizer, caplog):
    corpus = {"seq_length": 128}
    check_data_arguments(DataArguments(), tokenizer, corpus, 128)
    check_data_arguments(DataArguments(max_sequence_length=64), tokenizer, corpus, 64)
    assert not caplog.text
    for args in (DataArguments(), DataArguments(max_sequence_length=100)):
        with pytest.raises(UserError, match="^[^\n]*--max_sequence_length 64[^\n]*$"):
            check_data_arguments(args, tokenizer, corpus, 64)
    check_data_arguments(DataArguments(max_sequence_length=512), tokenizer, corpus, 512)
    assert "longest ones have 128" in caplog.text


def test_a_look_at_the_batches(start, tiny_data):
    shown = {}
    for name, more in {
        "words": [],
        "pieces": ["--no_whole_word_mask", "--mlm_probability", 0.3],
        "short": ["--initial_sequence_length", 16, "--max_sequence_length", 32, "--sequence_length_warmup_steps", 9],
    }.items():
        shown[name] = start(name, "-m", "experiment.show", *itertools.chain(*tiny_data.items()), *more)
    assert [script.wait(60) for script in shown.values()] == [0, 0, 0]
    shown = {name: script.text for name, script in shown.items()}
    for name, text in shown.items():
        row = r"row \d of 4: (\d+) tokens, (\d+) of padding, .*, (\d+) to be predicted\n((?: {4}.*\n)+)"
        rows = re.findall(row, text)
        assert len(rows) == 6
        assert all(row.startswith("    [CLS] ") and row.endswith(" [SEP]\n") for *_, row in rows), rows
        assert all(int(length) <= (16 if name == "short" else 32) for length, *_ in rows)
        # what is shown as masked is about as much as is said to be: a word stands in one pair of brackets
        assert 0 < sum(row.count("⟦") for *_, row in rows) <= sum(int(count) for _, _, count, _ in rows)
    percents = {name: [float(p) for p in re.findall(r"([\d.]+)%", text)] for name, text in shown.items()}
    for name, rate in (("words", 15), ("pieces", 30), ("short", 15)):
        expected = (rate, 80, 10, 10)
        assert all(abs(p - e) < 3 for p, e in zip(percents[name], expected, strict=False)), percents[name]
        assert percents[name][1] + percents[name][2] + percents[name][3] == pytest.approx(100, abs=0.2)
    assert percents["words"][5] == 0 and percents["pieces"][5] > 5, "words are masked in part or not"
    assert len(percents["words"]) == 8


def test_batches_show_the_instances(dataset, tokenizer):
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
def test_padding_stays_below_a_tenth(dataset, tokenizer, batch_size):
    masks = [batch["attention_mask"] for batch in make_batches(dataset, tokenizer, 200, batch_size=batch_size)]
    assert 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks) < 0.1


def test_each_pass_has_every_row_once_in_a_new_order():
    lengths = np.random.default_rng(0).integers(8, 65, 1000)
    generator = np.random.default_rng(3)
    passes = [group_by_length(lengths, 8, generator) for _ in range(3)]
    for rows in passes:
        assert sorted(np.concatenate(rows)) == list(range(1000))
    assert len({tuple(np.concatenate(rows)) for rows in passes}) == 3
    assert not {frozenset(rows) for rows in passes[0]} & {frozenset(rows) for rows in passes[1]}
    # long and short batches alternate: a curriculum would show in the loss
    means = np.array([lengths[rows].mean() for rows in passes[0]])
    assert abs(np.corrcoef(means, np.arange(125))[0, 1]) < 0.3


def test_batches_reproduce_from_the_seed(dataset, tokenizer):
    batches = make_batches(dataset, tokenizer, 150)
    assert are_equal(batches, make_batches(dataset, tokenizer, 150))
    assert are_equal(batches, make_batches(dataset, tokenizer, 150, num_workers=2))
    assert not are_equal(batches, make_batches(dataset, tokenizer, 150, seed=2))


def test_split_smaller_than_a_batch(dataset, tokenizer):
    for batch in make_batches(dataset.select(range(3)), tokenizer, 5):
        assert len(batch["input_ids"]) == 8


def test_width_is_a_multiple_of_8_within_the_longest_row(dataset, tokenizer):
    long = dataset.map(lambda row: {name: row[name] * 4 for name in PAIRS.columns[:3]}).filter(
        lambda row: len(row["input_ids"]) <= 252
    )
    widths = {batch["input_ids"].shape[1] for batch in make_batches(long, tokenizer, 200)}
    assert max(widths) == 252  # a model of 252 positions has no 253rd
    assert all(width % 8 == 0 for width in widths - {252}) and len(widths) > 10


def test_evaluation_is_the_same_at_every_call_and_batch_size(dataset, tokenizer):
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


def test_selected_rows_are_read_not_the_file_behind(dataset, tokenizer):
    part = dataset.select(range(500, 510))
    [batch] = data.make_eval_batches(part, tokenizer, DataArguments(), batch_size=64)
    original = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    assert sorted(int(m.sum()) for m in batch["attention_mask"]) == sorted(len(ids) for ids in part["input_ids"])
    assert {tuple(ids) for ids in part["input_ids"]} == {
        tuple(ids[mask.bool()].tolist()) for ids, mask in zip(original, batch["attention_mask"], strict=True)
    }


def test_data_seed_is_the_same_in_every_process():
    calls = "data_seed('12D3KooW', 42), data_seed('12D3KooX', 42), data_seed('x', 1)"
    code = f"from text.batches import data_seed; print({calls})"
    seeds = run_python("-c", code, env={"PYTHONHASHSEED": "1"}, expect=0).stdout.split()
    assert seeds == [str(data_seed(*arguments)) for arguments in (("12D3KooW", 42), ("12D3KooX", 42), ("x", 1))]
    assert len(set(seeds)) == 3 and all(0 <= int(seed) < 2**63 for seed in seeds)
    assert int(seeds[0]) == int.from_bytes(hashlib.sha256(b"42:12D3KooW").digest()[:8], "big") // 2


INTERRUPTED = """
import signal, sys
from experiment import data
from arguments import DataArguments
from datasets import load_from_disk
from transformers import AlbertTokenizer
special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
tokenizer = AlbertTokenizer(vocab=[(t, 0.0) for t in [*special, *(f"▁word{number}" for number in range(195))]])
signals = []
is_patient = sys.argv[2] == "finish"  # a trainer that notes the signal and finishes its step
# set in any case: a shell that starts tests in the background has them ignore it
signal.signal(signal.SIGINT, (lambda number, _: signals.append(number)) if is_patient else signal.default_int_handler)
options = dict(batch_size=8, seed=1, num_workers=2)
batches = iter(data.make_train_batches(load_from_disk(sys.argv[1]), tokenizer, DataArguments(), **options))
next(batches)
try:
    print("ready", flush=True)
    while not signals:
        next(batches)
    for _ in range(50):
        next(batches)
except KeyboardInterrupt:
    pass
print("ended well", flush=True)
"""


@pytest.mark.parametrize("way", ["finish", "at once"])
def test_workers_outlive_ctrl_c_until_the_trainer_ends(start, dataset, tmp_path, way):
    dataset.save_to_disk(str(tmp_path / "dataset"))
    script = start("script", "-c", INTERRUPTED, tmp_path / "dataset", way)
    script.wait_for("ready")
    script.interrupt()
    script.assert_clean_end()
    assert script.text.endswith("ended well\n"), script.text


# ---------------------------------------------------------------- loading


def test_missing_tokenizer_and_dataset_name_the_command(tmp_path, tokenizer):
    for load in (
        lambda: load_tokenizer(tmp_path / "none"),
        lambda: load_tokenizer(tmp_path),
        lambda: load_tokenized_dataset(tmp_path / "none", tokenizer),
        lambda: load_tokenized_dataset(tmp_path, tokenizer),
    ):
        with pytest.raises(UserError, match="^[^\n]*python tokenize_wikitext103.py[^\n]*$"):
            load()


def test_tokenizer_without_special_tokens_is_refused(tmp_path, tokenizer):
    lacking = AlbertTokenizer(vocab=[(token, 0.0) for token in SPECIAL], mask_token=None)
    lacking.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no mask token"):
        load_tokenizer(tmp_path)


def test_fingerprint_tells_tokenizers_apart(tmp_path, tokenizer):
    vocabulary = [(token, 0.0) for token in SPECIAL] + [(f"▁{c}", -3.0) for c in "abcdeABCDEMRmr"] + [("▁déjà", -3.0)]
    variants = [tokenizer, AlbertTokenizer(vocab=vocabulary), AlbertTokenizer(vocab=vocabulary[:-1])]
    variants += [
        AlbertTokenizer(vocab=vocabulary, do_lower_case=False),
        AlbertTokenizer(vocab=vocabulary, keep_accents=True),
    ]
    fingerprints = [tokenizer_fingerprint(variant) for variant in variants]
    assert len(set(fingerprints)) == len(variants)
    for number, variant in enumerate(variants):
        variant.save_pretrained(tmp_path / str(number))
        assert tokenizer_fingerprint(load_tokenizer(tmp_path / str(number))) == fingerprints[number]
