"""Measure the samples per second that are masked and padded on one core: as trainers do it, and by a plain loop.

    python benchmarks/masking.py

Both take the same instances, [CLS] A [SEP] B [SEP] of 512 random tokens, and return batches of 32. The loop masks
whole words token by token, as BERT's and RuLeanALBERT's collators do. Rounds alternate; the last line has the medians.
"as trained" is IndexedSplit, which reads the instances from an Arrow table, and its collator.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from datasets import Dataset
from transformers import AlbertTokenizer

from arguments import DataArguments
from experiment.data import make_collator
from text.batches import IndexedSplit
from text.instances import PAIRS

SPECIAL = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
LENGTH, BATCH_SIZE, VOCABULARY = 512, 32, 30_000


def make_instances(count: int) -> list[dict]:
    ids = np.random.default_rng(0).integers(len(SPECIAL), VOCABULARY, (count, LENGTH))
    ids[:, 0], ids[:, LENGTH // 2], ids[:, -1] = 2, 3, 3
    types = (np.arange(LENGTH) > LENGTH // 2).astype(int).tolist()
    instances = []
    for number, row in enumerate(ids):
        values = row.tolist(), types, (row < len(SPECIAL)).astype(int).tolist(), number % 2
        instances.append(dict(zip(PAIRS.columns, values, strict=True)))
    return instances


def mask_by_loop(instances: list[dict], tokenizer, mlm_probability: float = 0.15) -> dict[str, torch.Tensor]:
    """Mask and pad instances token by token."""
    width = max(len(instance["input_ids"]) for instance in instances)
    batch = {name: [] for name in ("input_ids", "token_type_ids", "attention_mask", "labels", "sentence_order_label")}
    special_ids = set(tokenizer.all_special_ids)
    for instance in instances:
        words = []
        for position, token in enumerate(instance["input_ids"]):
            piece = tokenizer.convert_ids_to_tokens(token)
            if token in special_ids:
                words.append([])
            elif not words or not words[-1] or piece.startswith("▁"):
                words.append([position])
            else:
                words[-1].append(position)
        words = [word for word in words if word]
        random.shuffle(words)
        wanted, chosen = round(sum(map(len, words)) * mlm_probability), []
        for word in words:
            if len(chosen) + len(word) <= wanted:
                chosen += word
        ids, labels = list(instance["input_ids"]), [-100] * len(instance["input_ids"])
        for position in chosen:
            labels[position] = ids[position]
            fate = random.random()
            if fate < 0.8:
                ids[position] = tokenizer.mask_token_id
            elif fate >= 0.9:
                ids[position] = random.randrange(len(SPECIAL), VOCABULARY)
        padding = width - len(ids)
        batch["input_ids"].append(ids + [tokenizer.pad_token_id] * padding)
        batch["token_type_ids"].append(instance["token_type_ids"] + [0] * padding)
        batch["attention_mask"].append([1] * len(ids) + [0] * padding)
        batch["labels"].append(labels + [-100] * padding)
        batch["sentence_order_label"].append(instance["sentence_order_label"])
    return {name: torch.tensor(values) for name, values in batch.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024, help="samples of each round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pieces = [f"{'▁' * (number % 3 > 0)}piece{number}" for number in range(VOCABULARY - len(SPECIAL))]
    tokenizer = AlbertTokenizer(vocab=[(token, 0.0) for token in SPECIAL] + [(piece, -5.0) for piece in pieces])
    instances = make_instances(args.samples)
    split = IndexedSplit(Dataset.from_list(instances), None)
    collator = make_collator(split.columns, split.longest, tokenizer, DataArguments())
    batches = [range(start, min(start + BATCH_SIZE, args.samples)) for start in range(0, args.samples, BATCH_SIZE)]
    ways = {
        "plain loop": lambda rows: mask_by_loop([instances[row] for row in rows], tokenizer),
        "as trained": lambda rows: collator.collate(*split[np.array(rows)], np.random.default_rng(rows[0]), LENGTH),
    }
    rates = {name: [] for name in ways}
    for number, (name, mask) in itertools.product(range(args.rounds), ways.items()):
        start = time.perf_counter()
        chosen = sum(int((mask(rows)["labels"] != -100).sum()) for rows in batches)
        rates[name].append(args.samples / (time.perf_counter() - start))
        rate = chosen / (args.samples * (LENGTH - 3))
        print(f"round {number + 1}: {name} {rates[name][-1]:,.0f} samples/s, {rate:.1%} chosen", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(", ".join(f"{name} {rate:,.0f}" for name, rate in medians.items()), "samples/s of 512 tokens;", end=" ")
    print(", ".join(f"{name} {medians[name] / medians['plain loop']:.0f} times" for name in list(ways)[1:]))


if __name__ == "__main__":
    main()
