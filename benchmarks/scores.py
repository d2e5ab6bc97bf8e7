"""Simulate scores of offers, which the log does not use: how often an honest owner would be halved, or a hostile one.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    OMP_NUM_THREADS=1 python benchmarks/scores.py --peers 8 --rounds 160

Peers train the demo's model as in local_steps.py. In some rounds, each peer scores each offer: it measures the loss of
one batch of its own before and after it applies the offer at its weight. In the log, one bit could say the result. Two
more offers are measured, and not applied: one that is reversed, and one with the same numbers at random positions.

A verdict is the sign of more than QUORUM of the scores, or 0. An owner is halved if MAX_BAD of its last WINDOW verdicts
are bad. Each row draws the scorers and the rounds at random, from the first or the last half of the training:
    hostile     peers of the scorers that call honest offers bad; one less calls hostile ones good
    honest      share of bad verdicts; owners in 1,000 that are halved at any time in --lifetime verdicts
    reversed    share of bad verdicts, and verdicts until half of such owners are halved; shuffled: the same
"""

import argparse
import itertools
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
from swarm.aggregation import Contribution, Numbers, aggregate, compute_weights, encode, measure
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
        weights = compute_weights(offers, measure(offers, Numbers([self.velocity])))
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


def is_bad(bits: list[bool], scorers: int, hostile: int, is_honest: bool, quorum: float) -> bool:
    """Return whether the verdict of this number of scorers, drawn at random, is bad."""
    honest = random.sample(bits, min(len(bits), scorers - hostile))
    return honest.count(False) + hostile * is_honest > quorum * (len(honest) + hostile)


def find_halving(verdicts: list[bool], window: int, max_bad: int) -> int | None:
    """Return the number of verdicts after which an owner is halved."""
    ends = range(1, len(verdicts) + 1)
    return next((end for end in ends if sum(verdicts[max(0, end - window) : end]) >= max_bad), None)


def simulate(offers: list[list[bool]], kind: str, args, scorers: int, hostile: int, rule) -> tuple[float, list[int]]:
    """Return the share of bad verdicts, and when owners are halved, of those that are."""
    halvings, bad = [], 0
    hostile -= kind != "honest" and hostile > 0
    for _ in range(args.owners):
        drawn = random.choices(offers, k=args.lifetime)
        verdicts = [is_bad(bits, scorers, hostile, kind == "honest", rule[2]) for bits in drawn]
        bad += sum(verdicts)
        halvings.append(find_halving(verdicts, *map(int, rule[:2])))
    return bad / args.owners / args.lifetime, [end for end in halvings if end is not None]


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
    parser.add_argument("--rules", nargs="+", default=["12,9,0.5", "12,10,0.75"], help="WINDOW,MAX_BAD,QUORUM")
    parser.add_argument("--output", type=Path, help="file for all bits, by round and kind")
    parser.add_argument("--bits", type=Path, help="file of an earlier run to evaluate, instead of training")
    args = parser.parse_args()
    history, bits = [], json.loads(args.bits.read_text()) if args.bits else {}
    if not bits:
        torch.set_num_threads(1)
        sizes = dict(local=args.local, steps=args.local * args.rounds, batch=args.batch, peers=args.peers)
        worker = Worker(args, 0, args.batch)
        worker.shuffle(0, args.peers)
        run = ScoredRun(worker, Setting(**sizes, density=0.03, lr=args.lr), args.every, args.score_batch, args.output)
        run.train_locally()
        history, bits = run.history, run.bits
    bits = {int(number): of_round for number, of_round in bits.items()}
    rounds = sorted(bits)
    print("| rounds | validation loss | " + " | ".join(f"{kind}: bits that are good" for kind in KINDS) + " |")
    print("|---" * 5 + "|")
    for part in range(4):
        chosen = rounds[part * len(rounds) // 4 : (part + 1) * len(rounds) // 4]
        losses = [line["loss"] for line in history if line["step"] <= chosen[-1] * args.local]
        shares = [statistics.fmean(b for r in chosen for offer in bits[r][kind] for b in offer) for kind in KINDS]
        row = [f"{chosen[0]} to {chosen[-1]}", f"{losses[-1]:.3f}" if losses else "-", *(f"{it:.1%}" for it in shares)]
        print(f"| {' | '.join(row)} |", flush=True)
    titles = (
        "part | scorers, hostile | rule | honest: bad, halved in 1,000 | reversed: bad, after | shuffled: bad, after"
    )
    print(f"\n| {titles} |")
    print("|---" * 6 + "|")
    half = len(rounds) // 2
    groups = (3, 0), (args.peers - 1, 0), (3, 1), (args.peers - 1, args.peers // 4)
    for name, chosen in ("first half", rounds[:half]), ("last half", rounds[half:]):
        for (scorers, hostile), text in itertools.product(groups, args.rules):
            row = [name, f"{scorers}, {hostile}", text]
            for kind in KINDS:
                offers = [of_offer for number in chosen for of_offer in bits[number][kind]]
                rule = tuple(map(float, text.split(",")))
                bad, ends = simulate(offers, kind, args, scorers, hostile, rule)
                middle = f"{statistics.median(ends):.0f}" if 2 * len(ends) >= args.owners else "never"
                row.append(f"{bad:.1%}, {len(ends) if kind == 'honest' else middle}")
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
