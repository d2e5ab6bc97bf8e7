"""Masking: its rate, whole words, seeds, and the starts of words."""

import itertools

import numpy as np
import pytest
from datasets import Dataset
from processes import ROOT
from rows import SPECIAL, are_equal, collate, make_rows
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AlbertTokenizer, BertTokenizer, PreTrainedTokenizerFast

from arguments import DataArguments
from common.console import UserError
from experiment import data
from text.batches import IndexedSplit, check_data_arguments
from text.collators import DataCollatorForWholeWordMask, number_words
from text.documents import read_text
from text.tokenizers import find_word_beginnings, load_tokenizer, train_byte_tokenizer
from tokenize_wikitext103 import TokenizeArguments

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
        if token < 5:
            is_open = False
        elif begins_word[token] or not is_open:
            words.append([position])
            is_open = True
        else:
            words[-1].append(position)
    return words


def test_whole_words_are_masked_evenly(piecewise):
    tokenizer, begins_word = piecewise
    rows = make_rows(3000, len(tokenizer))
    batch = collate(DataCollatorForWholeWordMask(tokenizer), rows, seed=1)
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


def test_masks_depend_only_on_seed(piecewise):
    tokenizer, _ = piecewise
    rows = make_rows(20, len(tokenizer))
    collator, another = DataCollatorForWholeWordMask(tokenizer), DataCollatorForWholeWordMask(tokenizer)
    one = collate(collator, rows, seed=[3, 4])
    assert are_equal([one], [collate(another, rows, seed=[3, 4])])
    assert not are_equal([one], [collate(collator, rows, seed=[3, 5])])


@pytest.mark.parametrize("whole_word_mask", [True, False])
def test_collator_matches_stored_batches(piecewise, whole_word_mask):
    tokenizer, _ = piecewise
    rows = make_rows(50, len(tokenizer))
    numbers = np.arange(7, 39)
    args = DataArguments(whole_word_mask=whole_word_mask, mlm_probability=0.3)
    split = IndexedSplit(Dataset.from_list(rows), None)
    collator = data.make_collator(split.columns, split.longest, tokenizer, args)
    stored = collator.collate(*split[numbers], np.random.default_rng([1, 2]), split.longest)
    collator = DataCollatorForWholeWordMask(tokenizer, 0.3, 8, whole_word_mask)
    assert stored["input_ids"].shape[1] % 8 == 0
    assert are_equal([stored], [collate(collator, [rows[number] for number in numbers], seed=[1, 2])])
    # special tokens are recognized
    bare = collate(collator, [{"input_ids": rows[number]["input_ids"]} for number in numbers], seed=[1, 2])
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
    with pytest.raises(UserError, match="--no_whole_word_mask"):
        check_data_arguments(DataArguments(), unmarked, {"seq_length": 64}, 64)
    check_data_arguments(DataArguments(whole_word_mask=False), unmarked, {"seq_length": 64}, 64)
    rows = make_rows(20, len(pieces))
    labels = collate(DataCollatorForWholeWordMask(unmarked, whole_word_mask=False), rows)["labels"]
    assert (labels != -100).sum() > 100


def test_byte_level_words_match_offsets():
    """By the tokenizer's offsets, a word begins at the start of the text and after a space."""
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
