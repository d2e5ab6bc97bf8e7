"""Measure the outer step of a commit, and the encoding of an update, on one core.

    python benchmarks/bench_aggregation.py
    python benchmarks/bench_aggregation.py --numbers 14000000 --offers 3
    MALLOC_MMAP_THRESHOLD_=200000 python benchmarks/bench_aggregation.py  # counts only memory in use

Updates are random numbers, encoded at 3 % in 2 bits; all offers differ, and the momentum has other signs. Blobs are on
disk. An offer is checked and measured when it arrives; the time to apply is the rest, with reading all blobs twice as
`LogSteps` does. Seconds are the process's time: the fastest of --repeats. "beyond" is the peak of memory that all of
this adds to anchor, momentum, residual and update.
"""

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from swarm.aggregation import (
    BLOCK,
    Contribution,
    Numbers,
    aggregate,
    check_block,
    compute_digest,
    encode,
    restore,
    summarize,
)
from swarm.exchange import BlobStore
from swarm.sparse import CHUNK, TopKCompression


def measure_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the process's time of the fastest call."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


def read_peak_memory() -> float:
    """Return the largest resident size of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(numbers: int, num_offers: int, repeats: int) -> None:
    """Print the seconds of each part, and the memory of all."""
    torch.manual_seed(0)
    codec = TopKCompression(0.03)
    anchor, momentum, residual, update = (Numbers([torch.zeros(numbers)]) for _ in range(4))
    before = read_peak_memory()
    folder = tempfile.TemporaryDirectory()
    store, blobs = BlobStore(folder.name, 2**40, anchor.num_blocks, 2**24, lambda *_: None), []
    for _ in range(num_offers):
        for block in range(update.num_blocks):
            update.write(block, torch.randn(update.count(block)).mul_(1e-3))
            momentum.write(block, torch.randn(update.count(block)))
        blobs.append(store.open(store.add(encode(update, residual, codec))))
    size = sum(map(len, blobs[0]))
    print(f"{num_offers} offers of {numbers:,} numbers in blocks of {BLOCK:,}: {size / 1e6:.2f} MB each")

    def check() -> None:
        for block, data in enumerate(blobs[0]):
            check_block(data, update.count(block), codec)

    offers = [Contribution(bytes([i]), 1000 + i, 0, blob) for i, blob in enumerate(blobs)]

    def apply() -> None:
        for blob in blobs:
            deque(blob, maxlen=0)
        aggregate(anchor, momentum, offers, lr=1.0, outer_momentum=0.5, seed=b"")

    steps = {
        "encode": lambda: encode(update, residual, codec),
        "check one offer": check,
        "measure one offer": lambda: summarize(blobs[0], update, b""),
        "apply all offers": apply,
        "restore one offer": lambda: restore(blobs[0], residual),
        "digest": lambda: compute_digest(anchor, momentum),
    }
    for name, step in steps.items():
        print(f"{name:<20}{measure_seconds(step, repeats):6.2f} s", flush=True)
    print(f"{'beyond':<20}{read_peak_memory() - before:6.1f} MB, of {4 * numbers / 1e6:.0f} MB of the anchor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=60_000_000)
    parser.add_argument("--offers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(None):
        measure(CHUNK, args.offers, 1)  # loads the libraries, whose memory does not count
    measure(args.numbers, args.offers, args.repeats)


if __name__ == "__main__":
    main()
