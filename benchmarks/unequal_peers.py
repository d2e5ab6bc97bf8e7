"""Simulate what the limits to a peer's weight cost four peers, one of which is much faster than the others.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    OMP_NUM_THREADS=1 python benchmarks/unequal_peers.py --fast 16 --units 4000

The peers train the demo's model in dense rounds. A peer's gradient is the mean over as many units of 8 samples as it is
fast. Its weight in the average is limited to some times that of the slow peers; with `epochs`, so are the samples by
which an epoch ends, so that epochs take longer. All rows have the same number of samples.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from local_steps import AdamW, Worker

from arguments import DataArguments, ModelArguments

UNIT, LR = 8, 3e-3


def train(worker: Worker, counts: list[int], weights: list[int], units: int) -> tuple[int, float]:
    """Return the number of epochs and the validation loss.

    :param counts: units of each peer in an epoch
    :param weights: of each peer's gradient
    """
    adam, epochs, done = AdamW(len(worker.initial)), 0, 0
    worker.shuffle(0)
    worker.weights.copy_(worker.initial)
    while done < units:
        average = torch.zeros_like(worker.weights)
        for peer, (count, weight) in enumerate(zip(counts, weights, strict=True)):
            worker.gradient.zero_()
            for _ in range(count):
                worker.add_gradient(peer)
            average += worker.gradient * (weight / sum(weights) / count)
        adam.step(worker.weights, average, LR, worker.decay)
        epochs, done = epochs + 1, done + sum(counts)
    return epochs, worker.evaluate(worker.weights.clone())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default=DataArguments.dataset_path)
    parser.add_argument("--tokenizer_path", default=ModelArguments.tokenizer_path)
    parser.add_argument("--fast", type=int, default=16, help="speed of one peer, relative to the three others")
    parser.add_argument("--units", type=int, default=4000, help="units of all peers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    worker, fast = Worker(args, 0, UNIT), args.fast
    print("| limit | units of each peer in an epoch | weights | epochs | loss |\n|---" + "|---" * 4 + "|")
    rows = [("none", [fast, 1, 1, 1], fast)]
    for limit in (4, 2):
        longer = (fast + 3) / (min(fast, limit) + 3)
        rows += [(f"{limit}", [fast, 1, 1, 1], min(fast, limit))]
        rows += [(f"{limit}, epochs", [round(fast * longer), *[round(longer)] * 3], min(fast, limit))]
    for name, counts, weight in rows:
        epochs, loss = train(worker, counts, [weight, 1, 1, 1], args.units)
        print(f"| {name} | {counts} | {weight}, 1, 1, 1 | {epochs} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
