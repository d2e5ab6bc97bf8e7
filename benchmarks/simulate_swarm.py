"""Simulate swarms too large for this machine: the distance between peers that average in groups.

    OMP_NUM_THREADS=1 python benchmarks/simulate_swarm.py

There are two ways to form groups of at most --group peers. random: peers that look for a group at the same time. grid:
Moshpit (arXiv 2103.03239), in which two peers that have just met do not meet again soon; if peers fill a grid of d
dimensions, d rounds are an exact average. In a round, the share --churn of the peers is lost, whose groups continue
without them, and as many new peers load the state of a random peer.

Columns: the mean squared distance from the mean of all peers after k rounds, relative to the one before the first
round; then its mean over 100 rounds if each peer moves by an independent step of length 1 before every round. Next to
each is the theory for random groups without churn: groups of M of N peers leave f = (N - M) / (M (N - 1)) of it in a
round, and f / (1 - f) in the end. Groups of a grid are as large as its side, which may be less than --group.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

NUMBERS = 64  # of each peer
STEADY_ROUNDS = 100


def form_random_groups(peers: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """Return the group of each peer; groups are as even as possible."""
    return generator.permutation(peers) % math.ceil(peers / size)


class Grid:
    """Moshpit's grid: peers that differ in one coordinate only form a group, which deals out new values of it."""

    def __init__(self, peers: int, size: int, generator: np.random.Generator):
        self.generator, self.turn = generator, 0
        dimensions = math.ceil(math.log(peers) / math.log(size) - 1e-9)
        self.side = math.ceil(peers ** (1 / dimensions) - 1e-9)
        cells = generator.permutation(self.side**dimensions)[:peers]
        self.coordinates = np.stack([cells // self.side**d % self.side for d in range(dimensions)], axis=1)

    def form_groups(self) -> np.ndarray:
        axis, self.turn = self.turn, (self.turn + 1) % self.coordinates.shape[1]
        others = np.delete(self.coordinates, axis, axis=1)
        groups = np.unique(others, axis=0, return_inverse=True)[1].reshape(-1)
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            self.coordinates[members, axis] = self.generator.permutation(self.side)[: len(members)]
        return groups


def average_groups(states: np.ndarray, groups: np.ndarray, is_there: np.ndarray) -> None:
    """Replace the states of the present peers of each group by their mean. states: [peers, numbers]"""
    sums = np.zeros((groups.max() + 1, states.shape[1]))
    np.add.at(sums, groups[is_there], states[is_there])
    counts = np.bincount(groups[is_there], minlength=len(sums))
    states[is_there] = (sums / np.maximum(counts, 1)[:, None])[groups[is_there]]


def simulate(peers: int, size: int, kind: str, churn: float, rounds: int, step: float, seed: int) -> list[float]:
    """Return the mean squared distance from the mean after each round, relative to the first one or to a step."""
    generator = np.random.default_rng(seed)
    grid = Grid(peers, size, generator)
    states, distances = generator.standard_normal((peers, NUMBERS)) * (step == 0), []
    for _ in range(rounds):
        states += step * generator.standard_normal(states.shape)
        groups = grid.form_groups() if kind == "grid" else form_random_groups(peers, size, generator)
        is_lost = generator.random(peers) < churn
        if is_lost.all():
            continue
        average_groups(states, groups, ~is_lost)
        states[is_lost] = states[generator.choice(np.flatnonzero(~is_lost), is_lost.sum())]
        distances.append(float(((states - states.mean(0)) ** 2).mean()))
    return distances


def report_distances(args: argparse.Namespace) -> None:
    shown = [1, 2, 3, 5]
    print(
        f"| peers | groups of {args.group} | churn | "
        + " | ".join(f"{k}: theory" for k in shown)
        + " | steady: theory |"
    )
    print("|---" * (4 + len(shown)) + "|")
    for peers in args.peers:
        size = min(args.group, peers)
        # the size of even groups
        size_of_all = peers / math.ceil(peers / size)
        factor = (peers - size_of_all) / (size_of_all * (peers - 1))
        for kind in ("random", "grid"):
            for churn in (0.0, args.churn):
                still = np.mean([simulate(peers, size, kind, churn, max(shown), 0, s) for s in range(args.seeds)], 0)
                moving = np.mean([simulate(peers, size, kind, churn, STEADY_ROUNDS, 1, s)[20:] for s in range(3)])
                cells = [f"{still[k - 1]:.1e}: {factor**k:.1e}" for k in shown]
                cells.append(f"{moving:.3f}: {factor / (1 - factor):.3f}")
                print(f"| {peers} | {kind} | {churn:.0%} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--churn", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=5)
    report_distances(parser.parse_args())
