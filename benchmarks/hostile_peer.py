"""One peer that attacks a run, in one of many ways. benchmarks/attacks.py starts it and measures what it has done.

    python benchmarks/hostile_peer.py flip 0.4 --experiment_prefix tiny ...  (flags of run_trainer.py)

Each attacker is run_trainer.py, paced as the honest ones (0.4 seconds per batch), with a few functions replaced before
its helpers are forked. It prints a line of JSON for each thing that it has done: an attack that never came to pass
harms nobody.
"""

import asyncio
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import paced_trainer
import torch
from hivemind.compression import serialize_torch_tensor

import run_trainer
import swarm.rounds
from swarm.rounds import PromptRunner


def note(act: str, **facts) -> None:
    """Tell attacks.py what was done; from any of this peer's processes."""
    print(json.dumps(dict(act=act, time=time.time(), **facts)), flush=True)


# --- as a sender: what it gives to an average -------------------------------------------------------------------------


def make_noise(part: torch.Tensor) -> torch.Tensor:
    """100 times the part's norm."""
    noise = torch.randn_like(part)
    return noise * (100 * part.norm() / noise.norm())


SPOILS = {
    "nan": lambda part: torch.full_like(part, math.nan),
    "inf": lambda part: torch.full_like(part, math.inf),
    "huge": lambda part: torch.full_like(part, 1e30),
    "flip": lambda part: -10 * part,
    "zeros": torch.zeros_like,  # with a weight of 1e9
    "noise": make_noise,
    "shape": lambda part: part[1:],  # the first part alone
}


class HostileSender(PromptRunner):
    """Takes part in rounds, and gives nothing that an average could use."""

    kind: str
    content = "gradients"

    def __init__(self, *args, takes_all: bool, **kwargs):
        super().__init__(*args, takes_all=takes_all, **kwargs)
        self.is_hostile = takes_all == (self.content == "gradients")

    async def _generate_input_for_peer(self, peer_index: int):
        parts = [part for part, _ in self.tensor_part_container._input_parts_by_peer[peer_index]]
        messages, number = super()._generate_input_for_peer(peer_index), -1
        async for message in messages:
            number += 1
            if self.is_hostile:
                if not number:
                    note(f"sends {self.kind}", to=str(self.ordered_peer_ids[peer_index]))
                if self.kind in ("silence", "drip"):
                    await asyncio.sleep(3600 if self.kind == "silence" else 4)
                elif self.kind != "shape" or not number:
                    self.spoil(message, parts[number])
            yield message

    def spoil(self, message, part: torch.Tensor) -> None:
        # as it is: in 16 bits, hivemind would send 65504 for all that is larger
        sent = SPOILS[self.kind](part)
        message.tensor_part.CopyFrom(serialize_torch_tensor(sent))
        if self.kind == "zeros":
            message.weight = 1e9
        if sent.shape == part.shape:
            part.copy_(sent)  # what comes back is the difference to it: so this peer's state remains that of the others

    async def rpc_aggregate_part(self, stream, context):
        if self.is_hostile and self.kind == "silence":
            await asyncio.sleep(3600)
        async for message in super().rpc_aggregate_part(stream, context):
            yield message


def send(kind: str, content: str = "gradients") -> None:
    HostileSender.kind, HostileSender.content = kind, content
    swarm.rounds.PromptRunner = HostileSender


TRAINERS = {
    **{kind: lambda kind=kind: send(kind) for kind in (*SPOILS, "silence", "drip")},
    "parameters": lambda: send("flip", "parameters"),
}


def main() -> None:
    kind = sys.argv.pop(1)
    TRAINERS[kind]()
    paced_trainer.main()


if __name__ == "__main__":
    with run_trainer.clean_end():
        main()
