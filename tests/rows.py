"""Instances and batches of them for tests of text/, and how two batches are compared."""

import itertools

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from arguments import DataArguments
from experiment import data
from text.collators import DataCollator
from text.instances import PAIRS

SPECIAL = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def make_llama_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 20 words that begins texts with <s>, as that of Llama."""
    pieces = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(20))]
    backend = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


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


def make_model_batch(share: float = 0.15, vocab_size: int = 300) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens with padding in one row, in which this share of the tokens has a label."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocab_size, (4, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    labels = torch.where(torch.rand(ids.shape, generator=generator) < share, ids, -100).masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    types = (torch.arange(16) >= 8).long().expand(4, -1).clone()
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}
    return batch | {"sentence_order_label": torch.tensor([0, 1, 1, 0])}


def collate(collator: DataCollator, rows: list[dict], seed: object = 0) -> dict[str, torch.Tensor]:
    lengths = np.array([len(row["input_ids"]) for row in rows])
    flat = {name: np.concatenate([np.atleast_1d(row[name]) for row in rows]) for name in rows[0]}
    return collator.collate(flat, lengths, np.random.default_rng(seed), np.inf)


def make_batches(dataset, tokenizer, count, args=None, **changes):
    options = {"batch_size": 8, "seed": 1, **changes}
    batches = data.make_train_batches(dataset, tokenizer, args or DataArguments(), **options)
    return list(itertools.islice(batches, count))


def are_equal(one: list[dict], other: list[dict]) -> bool:
    pairs = list(zip(one, other, strict=False))
    has_names = len(one) == len(other) and all(a.keys() == b.keys() for a, b in pairs)
    return has_names and all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)
