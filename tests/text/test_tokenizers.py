"""Tokenizers and stored datasets as they are loaded."""

import pytest
from rows import SPECIAL
from transformers import AlbertTokenizer

from support.console import UserError
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer, tokenizer_fingerprint


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
