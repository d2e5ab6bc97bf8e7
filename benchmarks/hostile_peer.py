"""A peer that attacks a run, in one of many ways. benchmarks/attacks.py starts it and measures the damage.

    python benchmarks/hostile_peer.py flip 0.4 --experiment_prefix tiny ...  (flags of run_trainer.py)

Most attackers are run_trainer.py, paced like the honest trainers (0.4 seconds per batch), with a few functions replaced
before its helpers are forked. The others, in hostile_strangers.py, do not train and only use the DHT. Each prints a
line of JSON for each act.
"""

import asyncio
import dataclasses
import itertools
import math
import os
import sys
from collections import deque
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import hostile_log
import hostile_strangers
import paced_trainer
import torch
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.compression import serialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer
from hostile_strangers import note

import run_trainer
import swarm.averager
import swarm.dht
import swarm.patches
from swarm.allreduce import PLAUSIBLE_MBITS
from swarm.averager import FailFastAllReduceRunner, Parts
from swarm.gradients import GradientAverager
from swarm.guard import RoundSettings
from swarm.log_records import compute_hash, get_signed_part, pack
from swarm.matchmaking import EarlyStartMatchmaking, parse_gathered
from swarm.optimizer_state import StateAverager, list_params
from swarm.progress import PeerTracker
from swarm.state_server import STATE, StateSnapshot
from utils import find_peer_id

# --- false parts and false averages in rounds -------------------------------------------------------------------------


def make_noise(part: torch.Tensor) -> torch.Tensor:
    """Return noise of 100 times the part's norm."""
    noise = torch.randn_like(part)
    return noise * (100 * part.norm() / noise.norm())


def make_direction(part: torch.Tensor, length: float) -> torch.Tensor:
    """Return a fixed direction, scaled to `length` times the part's norm."""
    fixed = torch.randn(part.shape, generator=torch.Generator().manual_seed(part.numel()))
    return fixed * (length * part.norm() / fixed.norm())


SPOILS = {
    "nan": lambda part: torch.full_like(part, math.nan),
    "inf": lambda part: torch.full_like(part, math.inf),
    "huge": lambda part: torch.full_like(part, 1e30),
    "flip": lambda part: -10 * part,
    "noise": make_noise,
    "zeros": torch.zeros_like,  # with a weight of 1e9
    "direction": lambda part: make_direction(part, 2.0),  # with a weight of 1e9
    "skew": lambda part: part + make_direction(part, 5.0),  # of averages only
    "shape": lambda part: part[1:],  # for the first part only
}


class HostileSender(FailFastAllReduceRunner):
    """A runner that sends false parts in rounds."""

    kind: str
    content = "gradients"

    def __init__(self, *args, settings: RoundSettings, **kwargs):
        super().__init__(*args, settings=settings, **kwargs)
        self.is_hostile, self.has_begun = settings.are_parameters == (self.content == "parameters"), False

    async def _generate_input_for_peer(self, peer_index: int):
        parts = [part for part, _ in self.tensor_part_container._input_parts_by_peer[peer_index]]
        messages, number = super()._generate_input_for_peer(peer_index), -1
        async for message in messages:
            number += 1
            if self.is_hostile:
                if not self.has_begun:
                    note(f"sends {self.kind} to a group of {self.group_size}")
                    self.has_begun = True
                if self.kind in ("silence", "drip"):
                    await asyncio.sleep(3600 if self.kind == "silence" else 4)
                elif self.kind != "shape" or not number:
                    self.spoil(message, parts[number])
            yield message

    def spoil(self, message: averaging_pb2.AveragingData, part: torch.Tensor) -> None:
        # uncompressed, because hivemind's 16 bits end at 65504
        sent = SPOILS[self.kind](part)
        message.tensor_part.CopyFrom(serialize_torch_tensor(sent))
        if self.kind in ("zeros", "direction"):
            message.weight = 1e9
        if sent.shape == part.shape:
            # of parameters, the answer is the difference to this part, so this peer keeps the state of the others
            part.copy_(sent)

    async def rpc_aggregate_part(self, stream, context):
        if self.is_hostile and self.kind == "silence":
            await asyncio.sleep(3600)
        async for message in super().rpc_aggregate_part(stream, context):
            yield message


class HostileReducer(FailFastAllReduceRunner):
    """A runner that averages correctly, and sends something else."""

    kind: str

    def __init__(self, *args, settings: RoundSettings, **kwargs):
        super().__init__(*args, settings=settings, **kwargs)
        if settings.are_parameters or not self.parts_for_local_averaging:
            return
        accumulate, has_begun = self.tensor_part_reducer.accumulate_part, False

        async def accumulate_part(*args, **kwargs) -> torch.Tensor:
            nonlocal has_begun
            average = await accumulate(*args, **kwargs)
            if not has_begun:
                has_begun = True
                own = self.peer_fractions[self.ordered_peer_ids.index(self.peer_id)]
                note(f"gives {self.kind} as average", share=own / sum(self.peer_fractions))
            return SPOILS[self.kind](average)

        self.tensor_part_reducer.accumulate_part = accumulate_part


class EchoReducer(FailFastAllReduceRunner):
    """A runner that averages correctly, and sends to each peer its own gradient for an average."""

    def __init__(self, *args, settings: RoundSettings, **kwargs):
        super().__init__(*args, settings=settings, **kwargs)
        if not settings.are_parameters and self.parts_for_local_averaging:
            own = self.peer_fractions[self.ordered_peer_ids.index(self.peer_id)]
            note("returns to each peer its own gradient", share=own / sum(self.peer_fractions))

    async def _accumulate_parts_streaming(self, stream, sender_index: int):
        parts = deque()

        async def keep():
            async for message in stream:
                parts.append(message.tensor_part)
                yield message

        async for answer in super()._accumulate_parts_streaming(keep(), sender_index):
            own = parts.popleft()
            if not self.settings.are_parameters and own.buffer:  # a slow peer does not send all parts
                answer.tensor_part.CopyFrom(own)
            yield answer


def send(kind: str, content: str = "gradients") -> None:
    HostileSender.kind, HostileSender.content = kind, content
    swarm.averager.FailFastAllReduceRunner = HostileSender


def reduce(kind: str) -> None:
    HostileReducer.kind = kind
    swarm.averager.FailFastAllReduceRunner = HostileReducer
    claim_bandwidth(PLAUSIBLE_MBITS[1])  # so that this peer averages everything


def echo() -> None:
    swarm.averager.FailFastAllReduceRunner = EchoReducer
    claim_bandwidth(PLAUSIBLE_MBITS[1])


def ride_free(batch: int = 160) -> None:
    """Claim a whole batch, and contribute the last average."""
    store, take_pending, finish, last = swarm.dht.DHT.store, GradientAverager.take_pending, GradientAverager.finish, []

    def store_claim(self, key, value, *args, **kwargs):
        if str(key).endswith("_progress") and isinstance(value, dict):
            value = value | dict(samples_accumulated=batch, samples_per_second=1e6)
        return store(self, key, value, *args, **kwargs)

    def take_last(self) -> float:
        samples = take_pending(self)
        if not last:
            return samples
        note("contributes the last average")
        with self.get_tensors() as averaged:
            for tensor, average in zip(averaged, last, strict=True):
                tensor.copy_(average)
        return batch

    def keep_average(self, *args) -> int:
        with self.get_tensors() as averaged:
            last[:] = [tensor.clone() for tensor in averaged]
        return finish(self, *args)

    swarm.dht.DHT.store = store_claim
    GradientAverager.take_pending, GradientAverager.finish = take_last, keep_average


def claim_bandwidth(mbits: float) -> None:
    GradientAverager.bandwidth = property(lambda _: mbits, lambda *_: None)


def claim_and_fall_silent(mbits: float) -> None:
    """Claim an uplink that would make a round last for years, and send nothing."""
    schedule = GradientAverager.schedule_step

    def schedule_step(self):
        note(f"claims {mbits} Mbit/s")
        return schedule(self)

    GradientAverager.schedule_step = schedule_step
    claim_bandwidth(mbits)
    send("silence")


# --- false data of followers, as a leader -----------------------------------------------------------------------------


class HostileLeader(EarlyStartMatchmaking):
    """A leader that starts first, and forges its followers' states as far behind its own."""

    async def look_for_group(self, step):
        self.min_matchmaking_time = self.potential_leaders.min_matchmaking_time = 1.0
        return await Matchmaking.look_for_group(self, step)

    async def _request_join_group(self, leader) -> None:
        return None

    async def leader_assemble_group(self):
        forged = 0
        for peer, request in self.current_followers.items():
            bandwidth, mode, _ = MSGPackSerializer.loads(request.gather)
            if state := parse_gathered(request.gather).state:
                epoch, lineage = max(0, state.epoch - 5), f"forged {str(peer)[-8:]}"
                gathered = MSGPackSerializer.dumps(pack(dataclasses.replace(state, epoch=epoch, lineage=lineage)))
                request.gather = MSGPackSerializer.dumps([bandwidth, mode, gathered])
                forged += 1
        if forged:
            note(f"forges the standing of {forged} followers")
        return await super().leader_assemble_group()


class TwoFacedLeader(HostileLeader):
    """A leader that starts first, and tells one follower that the others have slow uplinks, so that their plans of the
    round differ."""

    async def look_for_group(self, step):
        group = await super().look_for_group(step)
        view = group and (group.group_id, [peer.to_bytes() for peer in group.peer_ids], group.gathered)
        return group and dataclasses.replace(group, group_id=compute_hash(view)[:20])

    async def leader_assemble_group(self):
        return await EarlyStartMatchmaking.leader_assemble_group(self)

    async def rpc_join_group(self, request, context):
        async for message in super().rpc_join_group(request, context):
            is_begin = message.code == averaging_pb2.BEGIN_ALLREDUCE
            if is_begin and context.remote_id == min(self.current_followers, key=PeerID.to_bytes):
                note("shows one follower another group")
                for index, peer in enumerate(map(PeerID, message.ordered_peer_ids)):
                    if peer not in (self.peer_id, context.remote_id):
                        _, mode, content = MSGPackSerializer.loads(message.gathered[index])
                        message.gathered[index] = MSGPackSerializer.dumps([0.02, mode, content])
            yield message


class MuteLeader(HostileLeader):
    """A leader that starts first, accepts each follower, and never begins the round."""

    async def rpc_join_group(self, *_):
        note("accepts a follower, and begins no round")
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        await asyncio.sleep(3600)


class PairLeader(HostileLeader):
    """A leader that starts first, and begins a round with each follower alone, as an auxiliary peer that averages
    nothing."""

    async def rpc_join_group(self, request, context):
        if self.step_control is None:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
            return
        note("begins a round with one follower alone")
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        mbits, _, content = MSGPackSerializer.loads(self.step_control.data_for_gather)
        gathered = [MSGPackSerializer.dumps([mbits, AveragingMode.AUX.value, content]), request.gather]
        members = dict(ordered_peer_ids=[peer.to_bytes() for peer in (self.peer_id, context.remote_id)])
        members |= dict(group_id=os.urandom(20), gathered=gathered)
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.BEGIN_ALLREDUCE, **members)


def lead_pairs() -> None:
    async def rpc_aggregate_part(self, stream: Parts, context: P2PContext) -> Parts:
        async for message in stream:
            yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=message.tensor_part)

    GradientAverager.rpc_aggregate_part = rpc_aggregate_part
    lead_as(PairLeader)


class HalvesLeader(TwoFacedLeader):
    """A leader that works honestly for two rounds. Then it starts first, and holds two rounds in each epoch, with
    another half of the others each time."""

    attempt = 0

    @property
    def is_honest(self) -> bool:
        return max(self.backoff.rounds_with.values(), default=0) < 2

    def list_half(self) -> set[PeerID]:
        others = sorted(self.expected)
        first = (len(others) + 1) // 2
        return {*map(PeerID, others[first:] if self.attempt % 2 else others[:first])}

    async def look_for_group(self, step):
        search = EarlyStartMatchmaking if self.is_honest else TwoFacedLeader
        return await search.look_for_group(self, step)

    async def _request_join_group(self, leader):
        return await EarlyStartMatchmaking._request_join_group(self, leader) if self.is_honest else None

    def is_complete(self) -> bool:
        return super().is_complete() if self.is_honest else self.current_followers.keys() >= self.list_half()

    async def leader_assemble_group(self):
        if self.is_honest:
            return await EarlyStartMatchmaking.leader_assemble_group(self)
        if not self.step_control.triggered or not self.is_complete():
            return None
        for follower in self.current_followers.keys() - self.list_half():
            del self.current_followers[follower]
        self.attempt += 1
        note(f"begins a round with {len(self.current_followers)} followers")
        return await Matchmaking.leader_assemble_group(self)

    def rpc_join_group(self, request, context):
        return EarlyStartMatchmaking.rpc_join_group(self, request, context)


def lead_halves() -> None:
    """Make no step after the first round in an epoch, to be in the second one as well."""
    epochs = []

    def is_second(self, *_) -> bool:
        epochs.append(self.local_progress.epoch)
        return len(epochs) <= 2 or epochs.count(epochs[-1]) > 1

    PeerTracker.is_majority = is_second
    lead_as(HalvesLeader)


class CrowdLeader(HostileLeader):
    """A leader that starts first, and shows its followers a group with invented members."""

    keys: list[RSAPrivateKey]

    async def leader_assemble_group(self):
        return await EarlyStartMatchmaking.leader_assemble_group(self)

    async def rpc_join_group(self, request, context):
        async for message in super().rpc_join_group(request, context):
            if message.code == averaging_pb2.BEGIN_ALLREDUCE:
                note(f"invents {len(self.keys)} members")
                own = parse_gathered(message.gathered[0]).state
                for key in self.keys:
                    owner = b"[owner:%s]" % key.get_public_key().to_bytes()
                    state = dataclasses.replace(own, owner=owner, signature=b"")
                    state = dataclasses.replace(state, signature=key.sign(get_signed_part(state)))
                    message.ordered_peer_ids.append(find_peer_id(owner))
                    data = [20.0, AveragingMode.NODE.value, MSGPackSerializer.dumps(pack(state))]
                    message.gathered.append(MSGPackSerializer.dumps(data))
            yield message


def make_keys(count: int, public_exponent: int = 65537) -> list[RSAPrivateKey]:
    """Make keys of shared primes: others would take a minute."""
    numbers = [rsa.generate_private_key(public_exponent, 2048).private_numbers() for _ in range(15)]
    pairs = itertools.combinations([prime for each in numbers for prime in (each.p, each.q)], 2)
    keys = []
    for p, q in itertools.islice(pairs, count):
        d = pow(public_exponent, -1, (p - 1) * (q - 1))
        rest = rsa.rsa_crt_dmp1(d, p), rsa.rsa_crt_dmq1(d, q), rsa.rsa_crt_iqmp(p, q)
        public = rsa.RSAPublicNumbers(public_exponent, p * q)
        keys.append(RSAPrivateKey.__new__(RSAPrivateKey))
        keys[-1]._private_key = rsa.RSAPrivateNumbers(p, q, d, *rest, public).private_key(
            unsafe_skip_rsa_key_validation=True
        )
    return keys


def lead_crowd(size: int = 400) -> None:
    CrowdLeader.keys = make_keys(size)
    lead_as(CrowdLeader)


class RoundSplitter(FailFastAllReduceRunner):
    """A runner that keeps the last average from all others but one, from the third round on."""

    rounds = 0

    def __init__(self, *args, settings: RoundSettings, **kwargs):
        super().__init__(*args, settings=settings, **kwargs)
        RoundSplitter.rounds += not settings.are_parameters
        others = {*self.ordered_peer_ids} - {self.peer_id}
        self.victims = others - {min(others, key=PeerID.to_bytes)} if RoundSplitter.rounds > 2 else set()

    async def rpc_aggregate_part(self, stream, context):
        last = None
        async for message in super().rpc_aggregate_part(stream, context):
            if last is not None:
                yield last
            last = message
        if context.remote_id in self.victims and not self.settings.are_parameters:
            note("keeps the last average from a peer")
            await asyncio.sleep(3)
        elif last is not None:
            yield last


def split_rounds() -> None:
    swarm.averager.FailFastAllReduceRunner = RoundSplitter
    poison_state()


def lead_as(kind: type[HostileLeader]) -> None:
    swarm.patches.EarlyStartMatchmaking = kind


def lead() -> None:
    swarm.patches.EarlyStartMatchmaking = HostileLeader
    poison_state()


# --- false states, as a peer that is ahead and as a donor -------------------------------------------------------------


def poison_state(ahead: int = 0) -> None:
    """Serve noise for the weights, as a state that is ahead by this number of epochs."""
    get_current_state = StateAverager.get_current_state

    def get_poisoned_state(self):
        metadata, tensors, infos = get_current_state(self)
        if tensors:
            for tensor, _ in zip(tensors, list_params(self.optimizer), strict=False):
                tensor.normal_()
            if self._wanted.value == STATE:
                metadata["epoch"] += ahead
            note(f"gives a poisoned {'state' if self._wanted.value == STATE else 'step'} of epoch {metadata['epoch']}")
        return metadata, tensors, infos

    StateAverager.get_current_state = get_poisoned_state


def declare_states(change) -> None:
    """Announce states of other epochs: the result of this function for the true epoch."""
    before = StateAverager.state_sharing_priority
    StateAverager.state_sharing_priority = property(
        before.fget, lambda self, epoch: before.fset(self, float(change(epoch)))
    )


def announce_progress(ahead: int) -> None:
    """Report an epoch that is ahead of this peer's by this number, and a state of that epoch."""
    store, announced = swarm.dht.DHT.store, set()

    def store_ahead(self, key, value, *args, **kwargs):
        if str(key).endswith("_progress") and isinstance(value, dict):
            value = value | {"epoch": value["epoch"] + ahead}
            if value["epoch"] not in announced:
                announced.add(value["epoch"])
                note(f"announces epoch {value['epoch']}")
        return store(self, key, value, *args, **kwargs)

    swarm.dht.DHT.store = store_ahead
    declare_states(lambda epoch: epoch + ahead)
    poison_state(ahead)


def conspire(honest_epochs: int = 6, ahead: int = 2) -> None:
    """Work for some epochs, then report later ones and serve an invented state, the same for all that conspire."""
    store, get_current_state = swarm.dht.DHT.store, StateAverager.get_current_state
    first, announced = math.inf, set()

    def is_time(epoch: int) -> bool:
        return epoch >= first + honest_epochs

    def store_ahead(self, key, value, *args, **kwargs):
        nonlocal first
        if str(key).endswith("_progress") and isinstance(value, dict) and value["epoch"]:
            first = min(first, value["epoch"])
            if is_time(value["epoch"]):
                value = value | {"epoch": value["epoch"] + ahead}
                if value["epoch"] not in announced:
                    announced.add(value["epoch"])
                    note(f"announces epoch {value['epoch']}")
        return store(self, key, value, *args, **kwargs)

    def get_invented_state(self):
        metadata, tensors, infos = get_current_state(self)
        if tensors and is_time(metadata["epoch"]):
            generator = torch.Generator().manual_seed(metadata["epoch"])
            for tensor, _ in zip(tensors, list_params(self.optimizer), strict=False):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            if self._wanted.value == STATE:
                metadata["epoch"] += ahead
                metadata["lineage"] = f"invented {metadata['epoch']}"
            note(
                f"serves an invented {'state' if self._wanted.value == STATE else 'step'} of epoch {metadata['epoch']}"
            )
        return metadata, tensors, infos

    swarm.dht.DHT.store, StateAverager.get_current_state = store_ahead, get_invented_state
    declare_states(lambda epoch: epoch + ahead * is_time(epoch))


def donate() -> None:
    declare_states(lambda _: 10**6)
    poison_state(ahead=1)


def give_endlessly() -> None:
    """Send an endless state instead of the requested blocks."""

    def give_blocks(self, *_):
        note("begins an endless state")
        part = runtime_pb2.Tensor(buffer=bytes(2**16))
        while True:
            yield averaging_pb2.DownloadData(tensor_part=part)

    StateSnapshot.serve = give_blocks
    donate()


TRAINERS = {
    **{kind: lambda kind=kind: send(kind) for kind in (*SPOILS, "silence", "drip") if kind != "skew"},
    "parameters": lambda: send("flip", content="parameters"),
    **{f"reduce_{kind}": lambda kind=kind: reduce(kind) for kind in ("noise", "nan", "flip", "skew")},
    "echo": echo,
    "free_rider": ride_free,
    "split_round": split_rounds,
    "leader": lead,
    "leader_crowd": lead_crowd,
    "leader_halves": lead_halves,
    "leader_mute": lambda: lead_as(MuteLeader),
    "leader_pairs": lead_pairs,
    "leader_views": lambda: lead_as(TwoFacedLeader),
    "ahead_2": lambda: announce_progress(2),
    "ahead_500": lambda: announce_progress(500),
    "ahead_1e9": lambda: announce_progress(10**9),
    "pair_ahead": conspire,
    "claim_1e-7": lambda: claim_and_fall_silent(1e-7),
    "claim_1e-320": lambda: claim_and_fall_silent(1e-320),
    "donor": donate,
    "endless": give_endlessly,
}
KINDS = [*TRAINERS, *hostile_strangers.STRANGERS]
LOG_KINDS = [*hostile_log.ATTACKS, "pair_ahead", "progress_30"]  # on a run with local steps


def main() -> None:
    kind = sys.argv.pop(1)
    if kind in TRAINERS or kind in hostile_log.ATTACKS:
        TRAINERS.get(kind, partial(hostile_log.attack, kind))()
        paced_trainer.main()
    else:
        del sys.argv[1]  # seconds per batch
        hostile_strangers.main(kind, *run_trainer.parse_arguments(*paced_trainer.GROUPS))


if __name__ == "__main__":
    with run_trainer.clean_end():
        main()
