"""gradient_peer.py, whose first argument says how it lies in rounds. Run by tests/swarm/test_guard.py."""

import asyncio
import math
import sys

import torch
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.averaging.partition import TensorPartReducer
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2, dht_pb2

from common.console import clean_end, setup_logging
from swarm.allreduce import PLAUSIBLE_MBITS
from swarm.averager import FailFastAllReduceRunner
from swarm.dht import DHTProtocol
from swarm.gradients import GradientAverager
from swarm.guard import RobustReducer
from swarm.matchmaking import EarlyStartMatchmaking
from swarm.trust import RoundTrust
from tests.programs import gradient_peer

SENT = {
    "broken": lambda part: part.fill_(math.nan),
    "nan": lambda part: part.fill_(math.nan),
    "huge": lambda part: part.fill_(1e30),
    "flip": lambda part: part.mul_(-10),
    "shape": lambda part: part,
    "type": lambda part: part,
    "zeros": lambda part: part.zero_(),
}
ANSWERED = {
    "noise": lambda average: torch.randn_like(average) * average.norm() / len(average) ** 0.5,
    "reversed": lambda average: -average,
    "none": lambda average: average * math.nan,
}


def drip(_: str) -> None:
    generate = FailFastAllReduceRunner._generate_input_for_peer

    async def send_slowly(self, peer_index: int):
        print("lying", flush=True)
        async for message in generate(self, peer_index):
            await asyncio.sleep(3.5)
            yield message

    FailFastAllReduceRunner._generate_input_for_peer = send_slowly


def lead(_: str) -> None:
    """As its followers' leader, make the standing of one that of another."""

    async def look_first(self, step):
        self.min_matchmaking_time = self.potential_leaders.min_matchmaking_time = 0.5
        return await Matchmaking.look_for_group(self, step)

    async def follow_nobody(self, leader):
        return None

    async def forge(self):
        print("lying", flush=True)
        if self.current_followers:
            next(iter(self.current_followers.values())).gather = self.step_control.data_for_gather
        return await Matchmaking.leader_assemble_group(self)

    EarlyStartMatchmaking.look_for_group, EarlyStartMatchmaking._request_join_group = look_first, follow_nobody
    EarlyStartMatchmaking.leader_assemble_group = forge


def lead_without_rounds(_: str) -> None:
    """Accept each follower at once, and never begin the round."""

    async def hold(self, request, context):
        print("lying", flush=True)
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        await asyncio.sleep(3600)

    lead("mute")
    EarlyStartMatchmaking.rpc_join_group = hold


def stay_away(_: str) -> None:
    async def find_nobody(self, step):
        print("lying", flush=True)
        await asyncio.sleep(3600)

    EarlyStartMatchmaking.look_for_group = find_nobody


def fall_silent(_: str) -> None:
    """Send nothing in rounds."""
    print("lying", flush=True)

    async def send_nothing(self, *_):
        await asyncio.sleep(3600)
        yield

    FailFastAllReduceRunner._generate_input_for_peer = send_nothing
    FailFastAllReduceRunner.rpc_aggregate_part = send_nothing


def fall_silent_and_answer_late(_: str) -> None:
    """The others wait for each answer to a ping as well."""
    answer = DHTProtocol.rpc_ping

    async def answer_late(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        if not request.HasField("peer"):  # a second ping has it
            await asyncio.sleep(3600)
        await asyncio.sleep(1.3)
        return await answer(self, request, context)

    DHTProtocol.rpc_ping = answer_late
    fall_silent("late")


def claim_a_slow_line(_: str) -> None:
    """Its rounds would last for an hour, and it sends nothing in them. A slower line would be refused."""
    GradientAverager.bandwidth = property(lambda _: 1.1 * PLAUSIBLE_MBITS[0], lambda *_: None)
    answer = FailFastAllReduceRunner.rpc_aggregate_part
    fall_silent("slow")
    FailFastAllReduceRunner.rpc_aggregate_part = answer


HOLDS_UP = {"drip": drip, "leader": lead, "absent": stay_away, "slow": claim_a_slow_line}
HOLDS_UP |= {"silent": fall_silent, "late": fall_silent_and_answer_late}
UNNAMED = {"mute": lead_without_rounds}  # no peer can prove that they do harm


def lie_as_sender(kind: str) -> None:
    generate, begin = FailFastAllReduceRunner._generate_input_for_peer, FailFastAllReduceRunner.__init__

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

    async def spoil_message(self, peer_index: int):
        async for message in generate(self, peer_index):
            part = deserialize_torch_tensor(message.tensor_part)
            message.tensor_part.CopyFrom(serialize_torch_tensor(part[1:] if kind == "shape" else part.double()))
            yield message

    FailFastAllReduceRunner.__init__ = spoil
    RoundTrust.record_averages = lambda *_: None  # or it would ban the honest ones, whose averages are not its own
    if kind in ("shape", "type"):
        FailFastAllReduceRunner._generate_input_for_peer = spoil_message


def lie_as_reducer(kind: str) -> None:
    finish = RobustReducer.check_current_part_finished

    def spoil(self):
        if self.current_part_accumulated_from == self.num_current_senders:
            print("lying", flush=True)
            self.accumulator, self.sent = ANSWERED[kind](self.accumulator), {}
        finish(self)

    RobustReducer.check_current_part_finished = spoil


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    (HOLDS_UP | UNNAMED).get(kind, lie_as_sender if kind in SENT else lie_as_reducer)(kind)
    setup_logging("hostile")
    with clean_end():
        gradient_peer.main()
