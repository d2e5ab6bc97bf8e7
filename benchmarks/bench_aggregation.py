"""Measure the outer step of a commit, and the encoding of an update, on one core.

    python benchmarks/bench_aggregation.py
    python benchmarks/bench_aggregation.py --numbers 14000000 --offers 3

Updates are random numbers, encoded at 3 % in 2 bits; all offers differ. Seconds are the process's time: the fastest of
--repeats. "beyond" is the peak of memory that the process adds to anchor, momentum and blobs.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from swarm.aggregation import BLOCK, Contribution, Numbers, aggregate, check_block, compute_digest, encode, restore
from swarm.sparse import TopKCompression


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=60_000_000)
    parser.add_argument("--offers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    codec = TopKCompression(0.03)
    anchor, momentum, residual, update = (Numbers([torch.zeros(args.numbers)]) for _ in range(4))
    blobs = []
    for _ in range(args.offers):
        for block in range(update.num_blocks):
            update.write(block, torch.randn(update.count(block)) * 1e-3)
        blobs.append(encode(update, residual, codec))
    offers = [Contribution(bytes([index]), 1000 + index, 0, blob) for index, blob in enumerate(blobs)]
    size = sum(map(len, blobs[0]))
    print(f"{args.offers} offers of {args.numbers:,} numbers in blocks of {BLOCK:,}: {size / 1e6:.2f} MB each")

    def check() -> None:
        for block, data in enumerate(blobs[0]):
            check_block(data, update.count(block), codec)

    before = read_peak_memory()
    steps = {
        "encode": lambda: encode(update, residual, codec),
        "check one offer": check,
        "apply all offers": lambda: aggregate(anchor, momentum, offers, lr=1.0, outer_momentum=0.5),
        "restore one offer": lambda: restore(blobs[0], residual),
        "digest": lambda: compute_digest(anchor, momentum),
    }
    for name, step in steps.items():
        print(f"{name:<20}{measure_seconds(step, args.repeats):6.2f} s", flush=True)
    print(f"{'beyond':<20}{read_peak_memory() - before:6.1f} MB, of {4 * args.numbers / 1e6:.0f} MB of the anchor")


if __name__ == "__main__":
    main()
