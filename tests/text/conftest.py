"""Fixtures: a tokenizer whose words are single pieces, and a dataset of sentence-order pairs."""

import pytest
from datasets import Dataset
from rows import SPECIAL, make_rows
from transformers import AlbertTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    words = [f"▁word{number}" for number in range(195)]
    return AlbertTokenizer(vocab=[(token, 0.0) for token in SPECIAL] + [(word, -5.0) for word in words])


@pytest.fixture(scope="module")
def dataset():
    """1,000 instances of 20 to 64 tokens; some words are <unk>."""
    return Dataset.from_list(make_rows(1000, 200, length=64))


@pytest.fixture
def cache(tmp_path):
    """A folder for downloads, which does not exist yet."""
    return tmp_path / "cache"
