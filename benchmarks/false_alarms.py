"""Count false alarms of honest peers in dense rounds, in one process: bans, averages that a peer refuses, cut weights.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    OMP_NUM_THREADS=1 python benchmarks/false_alarms.py --rounds 1000

Peers train the demo's model together. Their gradients are of 8, 16 and 32 samples, through float16. Each round has the
reducers, the checks of averages and the trust of swarm/, without the network. `python tests/swarm/test_log.py 1000`
does the same for the log, with random faults of the network.
"""

import argparse
import asyncio
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.p2p import PeerID
from local_steps import AdamW, Worker

from arguments import DataArguments, ModelArguments
from swarm.guard import MaliciousPeersError, RobustReducer, RoundSettings, VerifyingContainer
from swarm.trust import RoundTrust

UNIT, UNITS, LR = 8, (1, 2, 4), 3e-3
SETTINGS = RoundSettings(max_weight=UNIT * sum(UNITS))
PEERS = [PeerID(bytes([0x12, 0x20]) + bytes(31) + bytes([index])) for index in range(len(UNITS))]


async def reduce(containers: list[VerifyingContainer], index: int) -> tuple[RobustReducer, list[torch.Tensor]]:
    """Return the reducer of one peer, and the averages of its parts."""
    parts = [[part for part, _ in container.input_parts[index]] for container in containers]
    reducer = RobustReducer([part.shape for part in parts[0]], len(parts))
    reducer.configure(SETTINGS)

    async def send(sender: int) -> list[torch.Tensor]:
        weight = float(UNIT * UNITS[sender])
        return [await reducer.accumulate_part(sender, n, part, weight=weight) for n, part in enumerate(parts[sender])]

    return reducer, (await asyncio.gather(*map(send, range(len(parts)))))[0]


def run_round(gradients: list[torch.Tensor], trusts: list[RoundTrust], alarms: Counter) -> torch.Tensor:
    """Return the average of a round, and count the alarms."""
    containers = [VerifyingContainer([it], [1 / len(gradients)] * len(gradients)) for it in gradients]
    for index, container in enumerate(containers):
        container.configure(SETTINGS, own_index=index)
    results = [asyncio.run(reduce(containers, index)) for index in range(len(gradients))]
    for own, (container, trust) in enumerate(zip(containers, trusts, strict=True)):
        for index, (_, averages) in enumerate(results):
            for number, average in enumerate(averages):
                container.register_processed_part(index, number, average)
        weight = results[own][0].shares.get(own, 1.0)
        shares = {PEERS[index]: share for index, share in container.estimate_contributions(weight).items()}
        alarms["weights cut to zero"] += weight == 0.0
        try:
            trust.record_averages(shares, container.estimate_contribution(weight, range(len(gradients))), weight)
            trust.record_round(PEERS, [])
        except MaliciousPeersError:
            alarms["bans"] += 1
        except AllreduceException:
            alarms["averages refused"] += 1
    return torch.cat([average for _, averages in results for average in averages])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default=DataArguments.dataset_path)
    parser.add_argument("--tokenizer_path", default=ModelArguments.tokenizer_path)
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    worker = Worker(args, 0, UNIT)
    worker.shuffle(0, len(UNITS))
    adam, trusts, alarms = AdamW(len(worker.initial)), [RoundTrust() for _ in UNITS], Counter()
    lowest, start = [], worker.evaluate(worker.initial)
    for number in range(args.rounds):
        gradients = []
        for peer, units in enumerate(UNITS):
            worker.gradient.zero_()
            for _ in range(units):
                worker.add_gradient(peer)
            gradients.append((worker.gradient / units).half().float())
        average = run_round(gradients, trusts, alarms)
        adam.step(worker.weights, average, LR, worker.decay)
        lowest.append(min(score for trust in trusts for score in trust.scores.values()))
        if number % 100 == 99 or number + 1 == args.rounds:
            counted = ", ".join(
                f"{alarms[kind]} {kind}" for kind in ("bans", "averages refused", "weights cut to zero")
            )
            scores = f"lowest score {min(lowest):.2f}, median of the lowest {statistics.median(lowest):.2f}"
            print(f"{number + 1} rounds: {counted}; {scores}", flush=True)
    print(f"validation loss {start:.3f} at the start, {worker.evaluate(worker.weights.clone()):.3f} at the end")


if __name__ == "__main__":
    main()
