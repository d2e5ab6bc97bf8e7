"""Fixtures: a tokenizer whose words are single pieces, and a dataset of sentence-order pairs."""

import numpy as np
import pytest
from datasets import Dataset
from rows import SPECIAL
from transformers import AlbertTokenizer

from text.instances import PAIRS


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
