"""An all-reduce that ends as soon as it cannot succeed, and reports the peer that caused the failure."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

import torch
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner
from hivemind.averaging.partition import BannedException
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import aenumerate, amap_in_executor

from swarm.guard import NO_WEIGHT, ProtocolViolation, RoundSettings
from swarm.uplink import Uplink

CONFIRM_TIMEOUT = 2.0  # seconds; when a peer blames another one, this peer should see the same failure by then
CONFIRM_INTERVAL = 0.05  # seconds


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
        self.violations: dict[PeerID, str] = {}  # by peer: what it did against the rules of a round
        self.silent: list[bytes] = []  # the ids of the peers that neither send data nor answer pings
        #: the peer that broke the round, and the peer that reported it: the same one if its stream just ended
        self.cause: tuple[PeerID, PeerID] | None = None
        #: the peer that each other peer blamed when it ended the round; the peers that this one saw break the round
        self.blamed: dict[PeerID, PeerID] = {}
        self.broken: set[PeerID] = set()
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
        if self._future.exception():
            raise self._future.exception()

    # --- as a sender

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        try:
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
            if message.code != averaging_pb2.AVERAGED_PART:
                await self.check_blame(message, peer_id)
            elif not message.tensor_part.buffer and number < len(parts):
                message.tensor_part.CopyFrom(serialize_torch_tensor(torch.zeros_like(parts[number][0])))
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

    async def _accumulate_parts_streaming(self, stream, sender_index: int):
        """Average the parts of a sender, like hivemind, but accept and return empty messages."""
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
                if message.tensor_part.size:  # otherwise, the sender does not request the average
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
        is_foreign = message.code == averaging_pb2.BAD_GROUP_ID  # perhaps the leader has shown it another group
        blamed = self.leader if is_foreign else PeerID(message.peer_id) if message.peer_id else peer_id
        if blamed in self.ordered_peer_ids and blamed not in (peer_id, self.peer_id):
            self.blamed[peer_id] = blamed
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
