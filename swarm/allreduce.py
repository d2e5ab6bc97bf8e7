"""An all-reduce that ends as soon as it cannot succeed, and reports the cause; and the plan of what each peer sends."""

import asyncio
import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import torch
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner, AveragingMode
from hivemind.averaging.partition import BannedException
from hivemind.compression import CompressionBase, CompressionInfo, deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import aenumerate, amap_in_executor

from swarm.guard import NO_WEIGHT, ProtocolViolation, RoundSettings
from swarm.log_records import pack
from swarm.uplink import Uplink

NODE = AveragingMode.NODE
CLIENT = AveragingMode.CLIENT
AUX = AveragingMode.AUX

PART_SECONDS = 0.0125  # in which the slowest uplink sends one part, behind which other messages wait
MIN_PART_BYTES = 2**14
MAX_PART_BYTES = 2**19
MIN_FRACTION = 1 / 32  # minimum fraction of the tensors that a peer averages
MAX_FRACTION = 2.0  # maximum, relative to the median of three or more peers: a bandwidth is a claim
WORTH_SPARING = 3.0  # seconds beyond a usual round; a slow peer that would make all others wait longer sends less
UNCERTAINTY = 1.1  # factor of a slow peer's seconds: its bandwidth is known to a tenth, and all others wait
PLAUSIBLE_MBITS = 1e-2, 1e6  # range of bandwidth claims; others are refused, because claims decide how long rounds take
MAX_PARTITIONS = 16  # rounds in which a slow peer sends all of its parts once; its gradients get old in the meantime
CONFIRM_TIMEOUT = 2.0  # seconds; when a peer blames another one, this peer should see the same failure by then
CONFIRM_INTERVAL = 0.05  # seconds


def choose_fractions(fractions: Sequence[float], modes: Sequence[AveragingMode], min_size: int) -> tuple[float, ...]:
    """Return what each peer averages, given the numbers in hivemind: at least MIN_FRACTION, with which it checks the
    averages of the others, at most MAX_FRACTION, and nothing with fewer than min_size elements (note 59)."""
    least = MIN_FRACTION * sum(fractions)
    fractions = [max(part, least) if mode == NODE else part for part, mode in zip(fractions, modes, strict=True)]
    positive = sorted(filter(None, fractions))
    if len(positive) > 2:
        fractions = [min(fraction, MAX_FRACTION * positive[len(positive) // 2]) for fraction in fractions]
    total = sum(fractions)
    # all peers see the same fractions in the same order, and drop the same ones
    kept = sorted(range(len(fractions)), key=lambda index: -fractions[index])
    while len(kept) > 1 and fractions[kept[-1]] * total < min_size * sum(fractions[index] for index in kept):
        kept.pop()
    return tuple(fraction if index in kept else 0 for index, fraction in enumerate(fractions))


def count_bits(tensors: Sequence[torch.Tensor], compression: CompressionBase) -> float:
    """Return the compressed size of these tensors in bits."""
    ratios = map(compression.estimate_compression_ratio, map(CompressionInfo.from_tensor, tensors))
    return 8 * sum(tensor.nbytes * ratio for tensor, ratio in zip(tensors, ratios, strict=True))


@dataclass
class AllReducePlan:
    """The tasks of each peer in a round, in the group's order."""

    fractions: tuple[float, ...]  # of the tensors, that the peer averages
    modes: tuple[AveragingMode, ...]
    num_partitions: tuple[int, ...]  # N: the peer sends every N-th part of its tensors, and other parts in each round
    part_bytes: int  # the size of a message
    seconds: float  # minimum duration of the round, by the claims of most peers; a single claim can double it


def plan_allreduce(
    bits: float, fractions: Sequence[float], modes: Sequence[AveragingMode], bandwidths: Sequence[float | None]
) -> AllReducePlan:
    """Plan a round that does not wait long for a peer with a much slower uplink (note 20): such a peer averages
    nothing, and sends as many of its parts as it can in the time that the others need. The bits are those of the
    compressed tensors. Fractions are what each peer would average, and bandwidths its Mbit/s up; None if unknown."""
    senders = sum(mode != AUX for mode in modes)
    rates = [1e6 * (mbits or math.inf) for mbits in bandwidths]  # an unknown one counts as fast
    sender_rates = sorted(rate for rate, mode in zip(rates, modes, strict=True) if mode != AUX) or rates
    # each of N equal peers sends (N - 1) / N of its tensors to the reducers, and as many bits of averages back
    usual_seconds = 2 * bits * max(0, senders - 1) / max(1, senders) / sender_rates[(len(sender_rates) - 1) // 2]
    own_seconds = [0.0 if mode == AUX else bits / rate for rate, mode in zip(rates, modes, strict=True)]
    max_seconds = max(1.3 * usual_seconds, usual_seconds + WORTH_SPARING)
    num_partitions = [1] * len(modes)
    for index, seconds in enumerate(own_seconds):
        if usual_seconds and seconds > max_seconds:
            num_partitions[index] = min(math.ceil(UNCERTAINTY * seconds / usual_seconds), MAX_PARTITIONS)
    of_fast_peers = tuple(part if count == 1 else 0.0 for part, count in zip(fractions, num_partitions, strict=True))
    fractions = of_fast_peers if any(of_fast_peers) else fractions
    # hivemind does not pass on the modes: an auxiliary peer would send all of its tensors with a weight of zero
    modes = tuple(mode if mode == AUX or part else CLIENT for mode, part in zip(modes, fractions, strict=True))
    round_seconds = 0.0
    for seconds, count, part, rate in zip(own_seconds, num_partitions, fractions, rates, strict=True):
        fraction = part / sum(fractions)
        others = senders - 1 if seconds > 0 else senders
        round_seconds = max(round_seconds, seconds * (1 - fraction) / count + others * fraction * bits / rate)
    part_bytes = int(min(max(min(rates) / 8 * PART_SECONDS, MIN_PART_BYTES), MAX_PART_BYTES))
    return AllReducePlan(fractions, modes, tuple(num_partitions), part_bytes, min(round_seconds, 2 * max_seconds))


def has_partition_changed(count: int, before: int) -> bool:
    """Return whether a new number of partitions is worth a change; small ones are fluctuations of the bandwidth."""
    return count != before and not (min(count, before) > 1 and 0.6 < count / before < 1.6)


class FailFastAllReduceRunner(AllReduceRunner):
    """A runner that ends a round as soon as it can no longer succeed, and reports the cause (notes 44 and 54)."""

    def __init__(self, *args, uplink: Uplink, settings: RoundSettings, has_uplink_slowed: Callable[[], bool], **kwargs):
        super().__init__(*args, **kwargs)
        self.uplink = uplink
        self.settings = settings
        self.has_uplink_slowed = has_uplink_slowed
        self.leader: PeerID | None = None  # of the group; set by the averager, as the peers that cannot be called
        self.clients: set[PeerID] = set()
        self.tensor_part_reducer.configure(settings)
        self.tensor_part_container.configure(settings, self.ordered_peer_ids.index(self.peer_id))
        self.encoding: tuple[int, asyncio.Task | None] = -1, None  # the last part of `encode_average`
        self.digests = {peer: hashlib.sha256() for peer in self.ordered_peer_ids}  # of the averages of gradients
        self.violations: dict[PeerID, str] = {}  # by peer: what it did against the rules of a round
        self.silent: list[bytes] = []  # the ids of the peers that neither send data nor answer pings
        #: the peer that broke the round, and the peer that reported it: the same one if its stream just ended
        self.cause: tuple[PeerID, PeerID] | None = None
        #: the peer that each other peer blamed when it ended the round; the peers that this one saw break the round
        self.blamed: dict[PeerID, PeerID] = {}
        self.broken: set[PeerID] = set()
        self.foreign: set[PeerID] = set()  # the peers to which the leader may have shown another group
        self.essential: set[PeerID] = set()  # the followers that may refuse the group, see EarlyStartMatchmaking
        self.refused: set[PeerID] = set()  # those that have
        self.arrived = Counter()  # the number of messages of each other peer
        self.late: list[PeerID] = []  # the senders that were late, see RoundSettings

    def should_delay_results(self, peer_id: PeerID) -> bool:
        """Never delay results: the pacer already keeps acknowledgements from waiting behind data."""
        return False

    async def run(self) -> AsyncIterator[torch.Tensor]:
        """Run the round, and raise the exception that ended it, which hivemind hides."""
        with contextlib.suppress(AllreduceException):  # another one; at auxiliary peers, hivemind raises nothing
            async for update in super().run():
                yield update
        if error := self._future.exception():
            raise error

    # --- as a sender

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        try:
            if peer_id == self.peer_id and not self.settings.are_parameters:
                await self.average_own_parts()
            else:
                await super()._communicate_with_peer(peer_id)
        except Exception as e:
            cause = self.blamed.get(peer_id, peer_id)
            is_violation = isinstance(e, ProtocolViolation)
            if is_violation and peer_id != self.peer_id:
                self.violations[peer_id] = str(e)
            if is_violation or cause == peer_id:
                self.broken.add(peer_id)
            why = f"{e!r}" if cause == peer_id else f"because of peer {cause}"
            self.end(cause, AllreduceException(f"peer {peer_id} has left the round ({why})"), reporter=peer_id)
            raise

    def _get_peer_stub(self, peer: PeerID):
        stub = super()._get_peer_stub(peer)
        aggregate_part = stub.rpc_aggregate_part

        async def exchange_parts(parts):
            averages = await aggregate_part(self.uplink.send(parts, is_urgent=not self.settings.are_parameters))
            return self.read_averages(averages, peer)

        stub.rpc_aggregate_part = exchange_parts
        return stub

    async def read_averages(self, messages: AsyncIterator, peer_id: PeerID):
        """Yield a reducer's messages, with a difference of zero for each part whose average was not requested."""
        parts = list(self.tensor_part_container.input_parts[self.ordered_peer_ids.index(peer_id)])
        async for number, message in aenumerate(self.record_activity(messages, peer_id)):
            part = message.tensor_part
            if message.code != averaging_pb2.AVERAGED_PART:
                await self.check_blame(message, peer_id)
            elif not self.settings.are_parameters:
                if not part.buffer:
                    raise ProtocolViolation("sent no average")
                self.digests[peer_id].update(pack((part.compression, part.buffer)))  # type and shape are known
            elif not part.buffer and number < len(parts):
                part.CopyFrom(serialize_torch_tensor(torch.zeros_like(parts[number][0])))
            yield message

    # --- as a reducer

    async def rpc_aggregate_part(self, stream: AsyncIterator, context: P2PContext) -> AsyncIterator:
        """Serve averages at the uplink's pace, and report to the sender if the round has failed, and the cause."""
        if context.remote_id in self.active_senders:  # each part would count twice, and that of another peer too late
            self.violations[context.remote_id] = "sent its parts in two streams"
            raise ProtocolViolation(self.violations[context.remote_id])
        averages = super().rpc_aggregate_part(self.record_activity(stream, context.remote_id), context)
        try:
            async for message in self.uplink.send(averages, is_urgent=not self.settings.are_parameters):
                if message.code != averaging_pb2.AVERAGED_PART and self.cause:
                    message.peer_id = self.cause[0].to_bytes()
                yield message
        except asyncio.CancelledError:
            if not self._future.done():
                raise
            # The round has ended here. hivemind sends nothing, and the other peer would wait until it gives up.
            cause = self.cause[0] if self.cause else self.peer_id
            yield averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, peer_id=cause.to_bytes())

    async def encode_average(self, part_index: int, average: torch.Tensor) -> runtime_pb2.Tensor:
        """Encode an average of gradients once, so that all senders, and this peer, have the same bits."""
        if part_index != self.encoding[0]:
            container = self.tensor_part_container
            _, info = container.input_parts[container.own_index][part_index]
            encoded = asyncio.to_thread(container.compression.compress, average, info)
            self.encoding = part_index, asyncio.create_task(encoded)
        return await asyncio.shield(self.encoding[1])  # the stream of one sender may end

    async def average_own_parts(self) -> None:
        """Average this peer's gradients in its own parts, and decode the averages as all other peers do."""
        container = self.tensor_part_container
        index = self.sender_peer_ids.index(self.peer_id)
        for part_index, part in enumerate(self.parts_for_local_averaging):
            average = await self.tensor_part_reducer.accumulate_part(index, part_index, part, weight=self.weight)
            decoded = deserialize_torch_tensor(await self.encode_average(part_index, average))
            container.register_processed_part(container.own_index, part_index, decoded)

    async def _accumulate_parts_streaming(self, stream, sender_index: int):
        """Average the parts of a sender, like hivemind, but accept and return empty messages, and return averages of
        gradients themselves: unlike differences, they must be the same for all senders (note 107)."""
        reducer = self.tensor_part_reducer
        peer_id = self.sender_peer_ids[sender_index]
        part_index = 0

        def read(message: averaging_pb2.AveragingData) -> tuple:
            return deserialize_torch_tensor(message.tensor_part) if message.tensor_part.buffer else None, message

        parts = amap_in_executor(read, stream, max_prefetch=self.tensor_part_container.prefetch)
        try:
            async for tensor, message in parts:
                weight = message.weight
                if tensor is None:
                    tensor = torch.zeros(reducer.part_shapes[part_index])
                    weight = NO_WEIGHT
                average = await reducer.accumulate_part(sender_index, part_index, tensor, weight=weight)
                part_index += 1
                answer = averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART)
                if message.tensor_part.size and not self.settings.are_parameters:
                    answer.tensor_part.CopyFrom(await self.encode_average(part_index - 1, average))
                elif message.tensor_part.size:  # otherwise, the sender does not request the average
                    delta = average - tensor
                    codec = message.tensor_part.compression
                    answer.tensor_part.CopyFrom(await asyncio.to_thread(serialize_torch_tensor, delta, codec))
                yield answer
        except BannedException:
            pass  # the sender is already excluded from this round
        except ProtocolViolation as e:
            self.violations[peer_id] = str(e)
            self.broken.add(peer_id)
            raise
        finally:
            if part_index != reducer.num_parts:
                await self._ban_sender(peer_id)

    # --- the end of a failed round

    async def record_activity(self, messages: AsyncIterator, peer_id: PeerID):
        """Pass a peer's messages on, and count them and their bytes."""
        async for message in messages:
            self.uplink.count_received(message.ByteSize())
            message.tensor_part.requires_grad = False  # otherwise, autograd would keep the tensors of all rounds
            message.tensor_part.dtype = "float32"  # the sender's may be (65536,)f4 (note 103)
            self.arrived[peer_id] += 1
            yield message

    async def check_blame(self, message: averaging_pb2.AveragingData, peer_id: PeerID) -> None:
        """Record the peer that another one blames, and wait until this peer sees one fail: a claim is no proof."""
        is_foreign = message.code == averaging_pb2.BAD_GROUP_ID
        blamed = self.leader if is_foreign else PeerID(message.peer_id) if message.peer_id else peer_id
        if is_foreign and peer_id in self.essential:
            self.refused.add(peer_id)
        if blamed in self.ordered_peer_ids and blamed not in (peer_id, self.peer_id):
            self.blamed[peer_id] = blamed
            if is_foreign:
                self.foreign.add(peer_id)
            deadline = time.monotonic() + (0.0 if is_foreign else CONFIRM_TIMEOUT)
            while self.broken.isdisjoint((peer_id, blamed)) and time.monotonic() < deadline:
                await asyncio.sleep(CONFIRM_INTERVAL)

    def end(self, cause: PeerID, exception: Exception, reporter: PeerID | None = None) -> None:
        """End the round and tell the others the cause, which this peer or the reporter blames."""
        self.cause = self.cause or (cause, reporter or self.peer_id)
        self.finalize(exception=exception)

    @property
    def progress(self) -> float:
        """The share of this round's messages that have arrived from other peers."""
        reducer = self.tensor_part_reducer
        expected = sum(self.tensor_part_container.num_parts_by_peer) + reducer.num_parts * reducer.num_senders
        return min(1.0, self.arrived.total() / max(1, expected))  # a peer may send more than it should

    def list_awaited_peers(self) -> list[PeerID]:
        """Return the other peers whose data this peer is waiting for."""
        parts = self.tensor_part_container
        senders = zip(self.sender_peer_ids, self.tensor_part_reducer.num_parts_received, strict=True)
        awaited = {peer for peer, count in senders if count < self.tensor_part_reducer.num_parts} - self.banned_senders
        reducers = zip(self.ordered_peer_ids, parts._outputs_registered_by_peer, parts.num_parts_by_peer, strict=True)
        if self.peer_id in self.sender_peer_ids:  # an auxiliary peer requests no averages
            awaited |= {peer for peer, registered, expected in reducers if registered < expected}
        return list(awaited - {self.peer_id})

    def list_stragglers(self) -> list[PeerID]:
        """Return the senders that hold up the averages that this peer makes."""
        reducer = self.tensor_part_reducer
        awaited = [] if reducer.finished.is_set() else self.list_awaited_peers()
        received = zip(self.sender_peer_ids, reducer.num_parts_received, strict=True)
        return [peer for peer, count in received if peer in awaited and count <= reducer.current_part_index]
