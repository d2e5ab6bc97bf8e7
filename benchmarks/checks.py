"""Measure the CPU time of a peer with and without the checks of the other peers' data in a round.

    OMP_NUM_THREADS=1 python benchmarks/checks.py
    OMP_NUM_THREADS=1 python benchmarks/checks.py --millions 60 --peers 8

In one process and without a network, a peer averages its part of all gradients, and receives the averages of the
others: with hivemind's classes and with ours (swarm/guard.py). It also measures the sketch of the parameters and the
signatures, once a round.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from hivemind.averaging.partition import TensorPartContainer, TensorPartReducer
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey

from swarm.guard import RobustReducer, RoundSettings, VerifyingContainer, compute_sketch
from swarm.log_records import unpack
from swarm.matchmaking import RoundState, sign_round_state
from utils import find_peer_id

TURNS = 7
PART = 2**17  # numbers in a part, as in hivemind
MAX_WEIGHT = 512


async def reduce(gradients: torch.Tensor, is_guarded: bool) -> None:
    """Average a vector of each sender, part by part."""
    shapes = [part.shape for part in gradients[0].split(PART)]
    reducer = (RobustReducer if is_guarded else TensorPartReducer)(shapes, len(gradients))
    if is_guarded:
        reducer.configure(RoundSettings(max_weight=MAX_WEIGHT))

    async def send(index: int) -> None:
        for number, part in enumerate(gradients[index].split(PART)):
            await reducer.accumulate_part(index, number, part, weight=100.0)

    await asyncio.gather(*map(send, range(len(gradients))))


def take_back(gradient: torch.Tensor, peers: int, is_guarded: bool) -> None:
    """Register the averages of the other peers."""
    container = (VerifyingContainer if is_guarded else TensorPartContainer)([gradient], [1 / peers] * peers)
    if is_guarded:
        container.configure(RoundSettings(), own_index=0)
    for index in range(peers):
        for number, (part, _) in enumerate(container._input_parts_by_peer[index]):
            container.register_processed_part(index, number, torch.zeros_like(part))


def measure(function) -> float:
    """Return the median CPU seconds."""
    times = []
    for _ in range(TURNS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=14.0, help="millions of parameters")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--epoch_seconds", type=float, default=20.0, help="seconds of the epoch in the last line")
    args = parser.parse_args()
    numbers, peers = int(args.millions * 1e6), args.peers
    gradients, parameters = torch.randn(peers, numbers // peers), torch.randn(numbers)
    RSAPrivateKey.process_wide()
    standing = 10, True, "0" * 16, compute_sketch([parameters])
    own_id = PeerID(find_peer_id(unpack(RoundState, sign_round_state(*standing)).owner))

    def judge_standings() -> None:
        signed = sign_round_state(*standing)
        for _ in range(peers):
            unpack(RoundState, signed).is_signed_by(own_id)

    rows = {
        "averaging": [
            lambda is_guarded=is_guarded: asyncio.run(reduce(gradients, is_guarded)) for is_guarded in (0, 1)
        ],
        "taking back": [
            lambda is_guarded=is_guarded: take_back(parameters, peers, is_guarded) for is_guarded in (0, 1)
        ],
        "sketch": [lambda: None, lambda: compute_sketch([parameters])],
        "signatures": [lambda: None, judge_standings],
    }
    print(f"{numbers:,} parameters, {peers} peers, {torch.get_num_threads()} threads; seconds of the processor a round")
    total = 0.0
    for name, pair in rows.items():
        without, with_checks = map(measure, pair)
        total += with_checks - without
        print(f"{name:12} {without:.3f} without, {with_checks:.3f} with checks")
    print(f"all checks: {total:.3f} s, {total / args.epoch_seconds:.1%} of an epoch of {args.epoch_seconds:.0f} s")


if __name__ == "__main__":
    main()
