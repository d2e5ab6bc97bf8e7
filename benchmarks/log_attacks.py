"""Simulate hostile offers on the log in one process: the progress of honest peers, and the weight of the hostile ones.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    OMP_NUM_THREADS=1 python benchmarks/log_attacks.py --honest 3 --attackers 1
    OMP_NUM_THREADS=1 python benchmarks/log_attacks.py --honest 5 --attackers 2 --kinds flip momentum

Honest peers train the demo's model as in local_steps.py, and all offers are weighted as those of a commit. Network and
votes are left out: attacks.py --local_steps has them. The attackers know all honest offers, and make the same offer,
except for `keys`: there, 13 peers that are not voters make one offer each. Columns:
    loss     validation loss at the end, and without attackers after the same rounds
    kept     progress kept: (loss at the start - loss) / (the same without attackers)
    cosine   median of the cosines of an offer with all others: the lowest and the mean of honest offers, then of others
    share    of the weight of all offers that the attackers' offers have, in the last ten rounds; and of one honest peer
    suspended  offers of honest peers, and of attackers, that did not count because most peers opposed earlier ones
"""

import argparse
import dataclasses
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from local_steps import Run, Setting, Worker

from arguments import DataArguments, ModelArguments
from swarm.aggregation import (
    Contribution,
    Numbers,
    aggregate,
    compute_cosines,
    encode,
    find_agreement,
    find_opposed,
    summarize,
)
from swarm.log_records import WINDOW
from swarm.sparse import TopKCompression

MANY_SAMPLES = 2**40
DENSITY = 0.03


def make_direction(update: torch.Tensor, number: int = 0) -> torch.Tensor:
    """Return the same direction each time, of the norm of an update."""
    fixed = torch.randn(len(update), generator=torch.Generator().manual_seed(number))
    return fixed * (update.norm() / fixed.norm())


def avoid_others(updates: list[torch.Tensor], number: int) -> torch.Tensor:
    """Return the reverse of the mean update, without the positions that honest offers have: their cosine is 0."""
    reverse = -torch.stack(updates).mean(0)
    for update in updates:
        reverse[TopKCompression(DENSITY).choose(update)] = 0
    reverse[torch.arange(len(reverse)) % 2 == number] /= 2  # two attackers send different positions
    return reverse


# for each kind, the update of an attacker, given those of the honest peers, the momentum and the attacker's number
ATTACKS = {
    "flip": lambda updates, momentum, number: -10 * torch.stack(updates).mean(0),
    "direction": lambda updates, momentum, number: make_direction(updates[0]),
    "avoid": lambda updates, momentum, number: avoid_others(updates, number),
    "shuffle": lambda updates, momentum, number: updates[0][torch.randperm(len(updates[0]))],
    "momentum": lambda updates, momentum, number: momentum,
    "copy": lambda updates, momentum, number: updates[0],
    "keys": lambda updates, momentum, number: make_direction(1e-3 * updates[0], number),
}


class AttackedRun(Run):
    """A run with hostile offers of one kind, or none."""

    def __init__(self, worker: Worker, setting: Setting, kind: str | None, attackers: int):
        super().__init__(worker, setting, 0.1)
        self.kind, self.attackers = kind, 0 if kind is None else 13 if kind == "keys" else attackers
        self.shares: list[list[float]] = []
        self.cosines: list[list[float]] = []
        self.previous: list[list[bytes]] = []  # the blobs of the last round
        self.opposed: list[set[int]] = []  # in each round, those of the last one that most peers oppose
        self.suspended = [0, 0]  # offers of honest peers and of others that did not count for that reason

    def aggregate(self, codec, unsent, samples, late) -> int:
        zeros = torch.zeros_like(self.anchor)
        updates = [it.clone() for it in unsent]
        blobs = [encode(Numbers([zeros]), Numbers([it]), codec) for it in unsent]  # it leaves the residuals
        offers = [Contribution(bytes([i]), *it) for i, it in enumerate(zip(samples, late, blobs, strict=True))]
        for number in range(self.attackers):
            update = ATTACKS[self.kind](updates, self.velocity, number).clone()
            blob = blobs[0] if self.kind == "copy" else encode(Numbers([zeros]), Numbers([update]), codec)
            offers.append(Contribution(bytes([100 + number]), MANY_SAMPLES, 0, blob, is_voter=self.kind != "keys"))
        judged = (find_opposed(Numbers([it]), blob, self.previous) for it, blob in zip(unsent, blobs, strict=True))
        votes = Counter(index for opposed in judged for index in opposed)
        self.opposed.append({index for index in votes if 2 * votes[index] > len(blobs) + self.attackers})
        for index in set().union(*self.opposed[-WINDOW:]):
            offers[index] = dataclasses.replace(offers[index], samples=0)
            self.suspended[index >= len(blobs)] += 1
        self.previous = [offer.blocks for offer in offers]
        self.anchor, momentum = self.anchor.clone(), Numbers([self.velocity])
        cosines = compute_cosines([summarize(it.blocks, momentum, b"")[1] for it in offers])
        self.cosines.append([find_agreement(cosines, i, range(len(offers))) for i in range(len(offers))])
        setting = self.setting
        anchor = Numbers([self.anchor])
        options = dict(lr=setting.outer_lr, outer_momentum=setting.momentum, seed=b"")
        weights = aggregate(anchor, momentum, offers, **options)
        self.shares.append([weight / sum(weights) for weight in weights])
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default=DataArguments.dataset_path)
    parser.add_argument("--tokenizer_path", default=ModelArguments.tokenizer_path)
    parser.add_argument("--honest", type=int, default=3)
    parser.add_argument("--attackers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--local", type=int, default=10, help="steps of a round")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--kinds", nargs="+", choices=ATTACKS, default=[*ATTACKS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = args.local * args.rounds
    setting = Setting(local=args.local, steps=steps, batch=args.batch, peers=args.honest, density=DENSITY)
    worker = Worker(args, 0, args.batch)
    start, expected = worker.evaluate(worker.initial.clone()), None
    print(
        f"{args.honest} honest peers, {args.attackers} attackers, {args.rounds} rounds; loss at the start {start:.3f}"
    )
    print(
        "| attack | loss | kept | cosine | share of the attackers, of an honest peer | suspended |\n" + 6 * "|---" + "|"
    )
    for kind in (None, *args.kinds):
        worker.shuffle(0, args.honest)
        run = AttackedRun(worker, setting, kind, args.attackers)
        run.train_locally()
        loss = run.history[-1]["loss"]
        expected = expected or loss
        hostile = statistics.fmean(sum(shares[args.honest :]) for shares in run.shares[-10:])
        honest = (1 - hostile) / args.honest
        kept = (start - loss) / (start - expected)
        sides = [it for of_round in run.cosines for it in of_round[: args.honest]], []
        sides[1].extend(it for of_round in run.cosines for it in of_round[args.honest :])
        cosine = "; ".join(f"{min(side):.3f}, {statistics.fmean(side):.3f}" for side in sides if side)
        shares = f"{hostile:.1%}, {honest:.1%} | {run.suspended}"
        print(f"| {kind or 'none'} | {loss:.3f} | {kept:.1%} | {cosine} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
