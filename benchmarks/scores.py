"""Simulate the scores of offers in one process: how often an honest owner would be halved, and how soon a hostile one.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    OMP_NUM_THREADS=1 python benchmarks/scores.py --peers 8 --rounds 160

Peers train the demo's model as in local_steps.py. In some rounds, each peer scores each offer: it measures the loss of
one batch of its own before and after it applies the offer at its weight, as the log does for one offer of a commit. Two
more offers are measured, and not applied: one that is reversed, and one with the same numbers at random positions.

A verdict is the sign that more than half of the scorers give. An owner is halved at MIN_GOOD or fewer good ones of its
last WINDOW verdicts. Each row draws the scorers and the rounds at random, from the last half of the training:
    hostile     scorers that call all honest offers bad, and all hostile ones good
    honest      share of good verdicts; owners in 1,000 that are halved at any time in --lifetime verdicts
    reversed    share of good verdicts, and verdicts until half of such owners are halved; shuffled: the same
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from local_steps import CPU, Run, Setting, Worker

from arguments import DataArguments, ModelArguments
from experiment.objectives import compute_losses
from swarm.aggregation import Contribution, Numbers, aggregate, encode, weigh
from swarm.sparse import decode
from training.model import move_batch

KINDS = "honest", "reversed", "shuffled"


class ScoredRun(Run):
    """A run whose offers all peers score in every `every`-th round."""

    def __init__(self, worker: Worker, setting: Setting, every: int, batch: int, output: Path | None):
        super().__init__(worker, setting, 0.1)
        self.every, self.output, self.rounds = every, output, 0
        self.batches = [worker.make_batches(peer, 7, batch) for peer in range(setting.peers)]
        #: bits by round and kind: for each offer, those of all scorers
        self.bits: dict[int, dict[str, list[list[bool]]]] = {}

    def aggregate(self, codec, unsent, samples, late) -> float:
        size = len(self.anchor)
        blocks = [encode(Numbers([torch.zeros(size)]), Numbers([it]), codec) for it in unsent]
        offers = [Contribution(bytes([i]), *it) for i, it in enumerate(zip(samples, late, blocks, strict=True))]
        weights = weigh(offers, Numbers([self.velocity]))
        self.rounds += 1
        if self.rounds % self.every == 0:
            self.bits[self.rounds] = self.score(offers, weights)
            if self.output:
                self.output.write_text(json.dumps(self.bits))
        self.anchor = self.anchor.clone()
        aggregate(
            Numbers([self.anchor]),
            Numbers([self.velocity]),
            offers,
            weights,
            lr=self.setting.outer_lr,
            outer_momentum=self.setting.momentum,
        )
        return 0.0

    @torch.no_grad()
    def score(self, offers: list[Contribution], weights: list[float]) -> dict[str, list[list[bool]]]:
        """Return the bits of all scorers for each offer, and for its reversed and shuffled forms."""
        bits = {kind: [] for kind in KINDS}
        batches = [move_batch(next(it), CPU) for it in self.batches]
        before = [self.measure(self.anchor, batch) for batch in batches]
        for owner, (offer, weight) in enumerate(zip(offers, weights, strict=True)):
            update = torch.zeros(len(self.anchor))
            positions, kinds, values = decode(offer.blocks[0], len(update))
            update[positions] = torch.from_numpy(values)[kinds]
            shuffled = update[torch.randperm(len(update))]
            for kind, tensor in zip(KINDS, (update, -update, shuffled), strict=True):
                after = self.anchor - self.setting.outer_lr * weight * tensor
                scorers = [peer for peer in range(len(offers)) if peer != owner]
                bits[kind].append([self.measure(after, batches[peer]) < before[peer] for peer in scorers])
        return bits

    def measure(self, weights: torch.Tensor, batch) -> float:
        self.worker.weights.copy_(weights)
        self.worker.model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            loss = float(compute_losses(self.worker.model, batch)["loss"])
        self.worker.model.train()
        return loss


def judge(bits: list[bool], scorers: int, hostile: int, is_honest: bool) -> int:
    """Return the verdict of this number of scorers, drawn at random: 1, -1, or 0 without a majority."""
    honest = random.sample(bits, min(len(bits), scorers - hostile))
    total = sum(1 if bit else -1 for bit in honest) + hostile * (-1 if is_honest else 1)
    return (total > 0) - (total < 0)


def find_halving(verdicts: list[int], window: int, min_good: int) -> int | None:
    """Return the number of verdicts after which an owner is halved."""
    for end in range(window, len(verdicts) + 1):
        if sum(verdict > 0 for verdict in verdicts[end - window : end]) <= min_good:
            return end
    return None


def simulate(
    bits: dict[str, list[list[bool]]], kind: str, args, scorers: int, hostile: int, rule
) -> tuple[float, list]:
    """Return the share of good verdicts, and when each of 1,000 owners is halved, if at all."""
    halvings, good, count = [], 0, 0
    for _ in range(args.owners):
        verdicts = []
        while len(verdicts) < args.lifetime:
            verdict = judge(random.choice(bits[kind]), scorers, hostile, kind == "honest")
            if verdict:
                verdicts.append(verdict)
        good, count = good + sum(it > 0 for it in verdicts), count + len(verdicts)
        halvings.append(find_halving(verdicts, *rule))
    return good / count, halvings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default=DataArguments.dataset_path)
    parser.add_argument("--tokenizer_path", default=ModelArguments.tokenizer_path)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=160)
    parser.add_argument("--every", type=int, default=4, help="rounds between two that are scored")
    parser.add_argument("--local", type=int, default=25, help="steps of a round")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--score_batch", type=int, default=64, help="samples of a score")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--lifetime", type=int, default=100, help="verdicts of an owner")
    parser.add_argument("--owners", type=int, default=1000)
    parser.add_argument("--rules", nargs="+", default=["12,3", "12,2", "12,1", "16,3"], help="WINDOW,MIN_GOOD")
    parser.add_argument("--output", type=Path, help="file for all bits, by round and kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(
        local=args.local, steps=args.local * args.rounds, batch=args.batch, peers=args.peers, density=0.03, lr=args.lr
    )
    worker = Worker(args, 0, args.batch)
    worker.shuffle(0, args.peers)
    run = ScoredRun(worker, setting, args.every, args.score_batch, args.output)
    run.train_locally()
    rounds = sorted(run.bits)
    print("| rounds | validation loss | " + " | ".join(f"{kind}: bits that are good" for kind in KINDS) + " |")
    print("|---" * 5 + "|")
    for part in range(4):
        chosen = rounds[part * len(rounds) // 4 : (part + 1) * len(rounds) // 4]
        shares = [statistics.fmean(b for r in chosen for offer in run.bits[r][kind] for b in offer) for kind in KINDS]
        loss = [line["loss"] for line in run.history if line["step"] <= chosen[-1] * args.local]
        text = f"{loss[-1]:.3f}" if loss else "-"
        print(
            f"| {chosen[0]} to {chosen[-1]} | {text} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True
        )
    late = {kind: [offer for r in rounds[len(rounds) // 2 :] for offer in run.bits[r][kind]] for kind in KINDS}
    print(
        "\n| scorers, hostile | rule | honest: good, halved in 1,000 | reversed: good, after | shuffled: good, after |"
    )
    print("|---" * 5 + "|")
    for scorers, hostile in ((2, 0), (3, 0), (args.peers - 1, 0), (3, 1), (args.peers - 1, args.peers // 4)):
        for rule in (tuple(map(int, text.split(","))) for text in args.rules):
            row = []
            for kind in KINDS:
                good, halvings = simulate(late, kind, args, scorers, hostile, rule)
                ended = [it for it in halvings if it is not None]
                middle = f"{statistics.median(ended):.0f}" if 2 * len(ended) >= args.owners else "never"
                row.append(f"{good:.1%}, {len(ended) if kind == 'honest' else middle}")
            print(f"| {scorers}, {hostile} | {rule[1]} of {rule[0]} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
