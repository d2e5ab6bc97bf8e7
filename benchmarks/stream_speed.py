"""Measure the speed of --streaming: batches through one worker at 512 tokens, and the time of each part of its work.

python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 8000
OMP_NUM_THREADS=1 python benchmarks/stream_speed.py
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core, as in a worker

from arguments import DataArguments
from experiment.data import make_train_batches, make_training_dataset
from text.collators import DataCollatorForWholeWordMask, take_rows
from text.documents import split_paragraphs, split_sentences
from text.streams import stream_documents
from text.tokenization import join_parts
from text.tokenizers import load_tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", default="configs/sources.json")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--num_workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer_path)
    dataset = make_training_dataset(tokenizer, DataArguments(streaming=True, sources=args.sources))
    dataset.shuffle_buffer = 1024

    batches = iter(
        make_train_batches(dataset, tokenizer, DataArguments(), batch_size=32, seed=1, num_workers=args.num_workers)
    )
    for _ in range(96):  # until the pools are full; before, they take in more than they give out
        next(batches)
    start, own, rows, tokens, places = time.monotonic(), time.process_time(), 0, 0, 0
    while (seconds := time.monotonic() - start) < args.seconds:
        mask = next(batches)["attention_mask"]
        rows, tokens, places = rows + len(mask), tokens + int(mask.sum()), places + mask.numel()
    print(
        f"{args.num_workers} workers: {rows / seconds:,.0f} samples/s, {tokens / seconds:,.0f} tokens/s, "
        f"{1 - tokens / places:.1%} padding, {(time.process_time() - own) / seconds:.0%} of a core in the main process"
    )

    parts = {}

    def measure(name: str, work):
        start = time.process_time()
        result = work()
        parts[name] = time.process_time() - start
        return result

    stream = iter(stream_documents(dataset.sources, seed=1))
    dataset[next(stream)]
    chunks = measure("reading", lambda: list(itertools.islice(stream, 40)))
    results = measure("a worker's work", lambda: [dataset[key] for key in chunks])
    documents = [split_paragraphs(text) for _, chunk in chunks for *_, text in chunk]
    sentences = measure("of it sentences", lambda: [split_sentences(document) for document in documents])
    flat = list(itertools.chain(*sentences))
    measure("of it tokens", lambda: dataset.encoder.encode_batch_fast(flat, add_special_tokens=False))
    columns, lengths = join_parts([part for _, *part in results])
    collator, generator = DataCollatorForWholeWordMask(tokenizer, pad_to_multiple_of=8), np.random.default_rng(1)
    batches = np.split(np.arange(len(lengths)), range(32, len(lengths), 32))
    taken = (take_rows(columns, lengths, rows) for rows in batches)
    measure("masks and padding", lambda: [collator.collate(*rows, generator, 512) for rows in taken])
    print(f"CPU milliseconds for 1,000 of {len(lengths):,} samples:")
    for name, seconds in parts.items():
        print(f"  {name:18} {1e6 * seconds / len(lengths):7.0f}")


if __name__ == "__main__":
    main()
