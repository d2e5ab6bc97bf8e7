"""gradient_peer.py, whose first argument says how it lies in rounds. Run by tests/swarm/test_guard.py."""

import math
import sys

import torch
from hivemind.averaging.partition import TensorPartReducer

from support.console import setup_logging
from swarm.guard import GuardedReducer
from swarm.processes import clean_end
from swarm.rounds import PromptRunner
from tests.programs import gradient_peer

SENT = {
    "broken": lambda part: part.fill_(math.nan),
    "nan": lambda part: part.fill_(math.nan),
    "huge": lambda part: part.fill_(1e30),
    "flip": lambda part: part.mul_(-10),
    "shape": lambda part: part,
    "zeros": lambda part: part.zero_(),
}
ANSWERED = {
    "noise": lambda average: torch.randn_like(average) * average.norm() / len(average) ** 0.5,
    "reversed": lambda average: -average,
    "none": lambda average: average * math.nan,
}


def lie_as_sender(kind: str) -> None:
    generate, begin = PromptRunner._generate_input_for_peer, PromptRunner.__init__

    def spoil(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        print("lying", flush=True)
        for parts in self.tensor_part_container._input_parts_by_peer:
            for part, _ in parts:
                SENT[kind](part)
        if kind == "zeros":
            self.weight = 1e9
        if kind != "broken":  # an honest one finds out itself, and leaves
            self.tensor_part_reducer.__class__ = TensorPartReducer

    async def spoil_shape(self, peer_index: int):
        async for message in generate(self, peer_index):
            message.tensor_part.size[0] -= 1
            message.tensor_part.buffer = message.tensor_part.buffer[:-4]
            yield message

    PromptRunner.__init__ = spoil
    if kind == "shape":
        PromptRunner._generate_input_for_peer = spoil_shape


def lie_as_reducer(kind: str) -> None:
    finish = GuardedReducer.check_current_part_finished

    def spoil(self):
        if self.current_part_accumulated_from == self.num_current_senders:
            print("lying", flush=True)
            self.accumulator, self.sent = ANSWERED[kind](self.accumulator), {}
        finish(self)

    GuardedReducer.check_current_part_finished = spoil


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    (lie_as_sender if kind in SENT else lie_as_reducer)(kind)
    setup_logging("hostile")
    with clean_end():
        gradient_peer.main()
