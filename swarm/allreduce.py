"""An all-reduce that ends as soon as it cannot succeed, and reports the peer that caused the failure."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise that of collections.abc)

import torch
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner
from hivemind.averaging.partition import BannedException
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import aenumerate, amap_in_executor, as_aiter

from swarm.guard import NO_WEIGHT, ProtocolViolation
from swarm.sparse import TopKCompression
from swarm.uplink import Uplink

logger = logging.getLogger("swarm")

CONFIRM_TIMEOUT = 2.0  # seconds; when a peer blames another one, this peer should see the same failure by then


class FailFastAllReduceRunner(AllReduceRunner):
    """A runner that ends a round as soon as it can no longer succeed, and reports the cause to the group.

    hivemind's runner continues without the parts of a failed reducer, and reports no cause.
    """

    def __init__(
        self,
        *args,
        uplink: Uplink,
        has_uplink_slowed: Callable[[], bool],
        share: int,
        turn: int,
        takes_all: bool,
        max_weight: float | None,
        are_parameters: bool,
        residual: torch.Tensor | None,
        **kwargs,
    ):
        """
        :param uplink: the pacer of all sent messages
        :param has_uplink_slowed: returns whether this peer's uplink has become too slow for its share of the round
        :param share: N to send every N-th part of the tensors; the weight of the other parts is 0
        :param turn: the index of the first part to send, below `share`
        :param takes_all: whether to load the averages of all parts; otherwise, parts not sent keep their own values
        :param max_weight, are_parameters: see RobustReducer
        :param residual: zeros, as many as all tensors have elements; receives the part of them that the others do not
            get. The tensors then become the values that the others got, plus the returned differences
        """
        super().__init__(*args, **kwargs)
        sparse = kwargs["compression"] if isinstance(kwargs["compression"], TopKCompression) else None
        self.tensor_part_reducer.configure_checks(max_weight, are_parameters, sparse)
        own = self.ordered_peer_ids.index(self.peer_id)
        self.tensor_part_container.configure_checks(are_parameters and max_weight is not None, own if sparse else None)
        parts = chain.from_iterable(self.tensor_part_container._input_parts_by_peer)
        residuals = iter([] if residual is None else residual.split([len(part) for part, _ in parts]))
        #: the residual of each part, by the index of the peer that averages it
        self.rests = [list(islice(residuals, count)) for count in self.tensor_part_container.num_parts_by_peer]
        #: a description of the invalid data, by the peer that sent it
        self.lies: dict[PeerID, str] = {}
        #: the peer that broke the round, and the peer that reported it: the same one if its stream just ended
        self.cause: tuple[PeerID, PeerID] | None = None
        #: the peer that each other peer blamed when it ended the round; an event per peer, set if it broke the round
        self.blamed: dict[PeerID, PeerID] = {}
        self.broken = {peer: asyncio.Event() for peer in self.ordered_peer_ids}
        self.uplink, self.has_uplink_slowed = uplink, has_uplink_slowed
        self.share, self.turn, self.takes_all = share, turn, takes_all
        #: the time of each peer's last message in this round, on the monotonic clock
        self.heard = dict.fromkeys(self.ordered_peer_ids, time.monotonic())

    def should_delay_results(self, peer_id: PeerID) -> bool:
        """Never delay results: the pacer already keeps acknowledgements from waiting behind data."""
        return False

    def list_awaited_peers(self) -> list[PeerID]:
        """Return the other peers whose data this peer is waiting for."""
        parts, received = self.tensor_part_container, self.tensor_part_reducer.num_parts_received
        senders = zip(self.sender_peer_ids, received, strict=True)
        awaited = {peer for peer, sent in senders if sent < self.tensor_part_reducer.num_parts} - self.banned_senders
        for index, peer in enumerate(self.ordered_peer_ids):
            if parts._outputs_registered_by_peer[index] < parts.num_parts_by_peer[index]:
                awaited.add(peer)
        return [peer for peer in awaited if peer != self.peer_id]

    def list_stragglers(self, are_reducers: bool) -> list[PeerID]:
        """Return the peers that hold up this peer's part of the round.

        :param are_reducers: whether to return unfinished reducers once this peer's own part is averaged, although they
            may be waiting for a sender themselves
        """
        reducer, awaited = self.tensor_part_reducer, self.list_awaited_peers()
        if reducer.finished.is_set():
            return awaited if are_reducers else []
        received = zip(self.sender_peer_ids, reducer.num_parts_received, strict=True)
        return [peer for peer, count in received if peer in awaited and count <= reducer.current_part_index]

    def is_sent(self, peer_index: int, part_index: int) -> bool:
        """Return whether this peer sends this part of the tensors in this round."""
        before = sum(self.tensor_part_container.num_parts_by_peer[:peer_index])
        return (before + part_index) % self.share == self.turn

    def encode(self, peer_index: int, part_index: int) -> runtime_pb2.Tensor:
        """Compress a part; with a residual, replace the part by the values that the reducer gets."""
        part, info = self.tensor_part_container._input_parts_by_peer[peer_index][part_index]
        message = self.tensor_part_container.compression.compress(part, info)
        if self.rests[peer_index]:
            decoded = deserialize_torch_tensor(message)
            torch.sub(part, decoded, out=self.rests[peer_index][part_index])
            part.copy_(decoded)
        return message

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Yield the messages for a peer, like hivemind, but empty ones for parts that are not sent."""
        container = self.tensor_part_container
        container._inputs_consumed_by_peer[peer_index] = True

        def make_message(part_index: int) -> averaging_pb2.AveragingData:
            message = averaging_pb2.AveragingData(weight=self.weight)
            if part_index == 0:
                message.code, message.group_id = averaging_pb2.PART_FOR_AVERAGING, self.group_id
            if self.is_sent(peer_index, part_index):
                message.tensor_part.CopyFrom(self.encode(peer_index, part_index))
            elif self.takes_all:
                part, info = container._input_parts_by_peer[peer_index][part_index]
                self.rests[peer_index][part_index].copy_(part)
                part.zero_()  # the reducer returns the average itself
                # a compression type and a size without data request the average
                message.tensor_part.compression = container.compression.compress(part[:1], info).compression
                message.tensor_part.size.append(len(part))
            return message

        parts = as_aiter(*range(container.num_parts_by_peer[peer_index]))
        async for message in amap_in_executor(make_message, parts, max_prefetch=container.prefetch):
            yield message

    async def _accumulate_parts_streaming(self, stream, sender_index: int):
        """Average the parts of a sender, like hivemind, but accept and return empty messages."""
        reducer, loop, part_index = self.tensor_part_reducer, asyncio.get_running_loop(), 0

        def read(message: averaging_pb2.AveragingData) -> tuple:
            tensor = deserialize_torch_tensor(message.tensor_part) if message.tensor_part.buffer else None
            is_wanted = bool(message.tensor_part.size)
            return tensor, message.weight, is_wanted, message.tensor_part.compression

        try:
            async for tensor, weight, is_wanted, compression in amap_in_executor(
                read, stream, max_prefetch=self.tensor_part_container.prefetch
            ):
                if tensor is None:
                    tensor, weight = torch.zeros(reducer.part_shapes[part_index]), NO_WEIGHT
                average = await reducer.accumulate_part(sender_index, part_index, tensor, weight=weight)
                part_index += 1
                answer = averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART)
                if is_wanted and reducer.sparse:
                    answer.tensor_part.CopyFrom(reducer.answers[part_index - 1])
                elif is_wanted:
                    serialize = partial(serialize_torch_tensor, average - tensor, compression)
                    answer.tensor_part.CopyFrom(await loop.run_in_executor(None, serialize))
                yield answer
        except BannedException:
            logger.debug(f"sender {sender_index} is already excluded from this round")
        except ProtocolViolation as e:
            self.record_violation(self.sender_peer_ids[sender_index], e)
            raise
        finally:
            if part_index != reducer.num_parts:
                await self._ban_sender(self.sender_peer_ids[sender_index])

    def record_violation(self, peer_id: PeerID, lie: Exception) -> None:
        """Record a peer that sent invalid data, which also breaks the round."""
        self.lies[peer_id] = str(lie)
        self.broken[peer_id].set()

    async def record_activity(self, messages: AsyncIterator, peer_id: PeerID):
        """Pass a peer's messages on, and record the time of each."""
        async for message in messages:
            self.heard[peer_id] = time.monotonic()
            yield message

    def end(self, cause: PeerID, exception: Exception) -> None:
        """End the round because of a peer, and report that peer to the others."""
        self.cause = self.cause or (cause, self.peer_id)
        self.finalize(exception=exception)

    def end_after(self, peer_id: PeerID, error: Exception) -> None:
        """End the round after the communication with a peer has failed."""
        cause = self.blamed.get(peer_id, peer_id)
        if cause == self.peer_id:
            cause = peer_id
        if cause == peer_id:
            self.broken[peer_id].set()
        self.cause = self.cause or (cause, peer_id)
        why = f"{error!r}" if cause == peer_id else f"because of peer {cause}"
        # the streams to the other peers end with this round, so they are informed
        self.finalize(exception=AllreduceException(f"peer {peer_id} has left the round ({why})"))

    def list_suspects(self) -> list[PeerID]:
        """Return the peer that broke the round, or two peers if one blames the other and this peer saw neither fail."""
        suspects = set(self.cause or ()) - {self.peer_id}
        return [peer for peer in suspects if self.broken[peer].is_set()] or list(suspects)

    async def check_blame(self, messages: AsyncIterator, peer_id: PeerID):
        """Pass a peer's messages on. The last message of a failed round names the peer that the sender blames.

        The claim alone proves nothing: if it is right, this peer should soon see the same failure.
        """
        async for message in messages:
            is_last = message.code != averaging_pb2.AVERAGED_PART
            if is_last and message.peer_id and (blamed := PeerID(message.peer_id)) in self.ordered_peer_ids:
                self.blamed[peer_id] = blamed
                if blamed not in (peer_id, self.peer_id):
                    failures = [asyncio.create_task(self.broken[peer].wait()) for peer in (peer_id, blamed)]
                    await asyncio.wait(failures, timeout=CONFIRM_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
                    for failure in failures:
                        failure.cancel()
            yield message

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Serve averages, like hivemind, but report to the sender if the round has failed, and the cause."""
        try:
            async for message in super().rpc_aggregate_part(self.record_activity(stream, context.remote_id), context):
                if message.code != averaging_pb2.AVERAGED_PART and self.cause:
                    message.peer_id = self.cause[0].to_bytes()
                yield message
        except asyncio.CancelledError:
            if not self._future.done():
                raise
            # The round has ended here. hivemind sends nothing, and the other peer would wait for reducer_timeout.
            cause = self.cause[0] if self.cause else self.peer_id
            yield averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, peer_id=cause.to_bytes())

    def _get_peer_stub(self, peer: PeerID):
        stub = super()._get_peer_stub(peer)
        aggregate_part = stub.rpc_aggregate_part

        async def record_averages(inputs):
            averages = self.uplink.receive(await aggregate_part(self.uplink.send(inputs, self.takes_all)))
            averages = self.check_blame(self.record_activity(averages, peer), peer)
            return self.fill_skipped_parts(averages, peer)

        stub.rpc_aggregate_part = record_averages
        return stub

    async def fill_skipped_parts(self, averages: AsyncIterator, peer: PeerID):
        """Insert a difference of zero for each part whose average was not requested."""
        parts = list(self.tensor_part_container._input_parts_by_peer[self.ordered_peer_ids.index(peer)])
        async for number, message in aenumerate(averages):
            if message.code == averaging_pb2.AVERAGED_PART and not message.tensor_part.buffer and number < len(parts):
                message.tensor_part.CopyFrom(serialize_torch_tensor(torch.zeros_like(parts[number][0])))
            yield message

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        index, reducer = self.ordered_peer_ids.index(peer_id), self.tensor_part_reducer
        is_sparse = reducer.sparse and peer_id == self.peer_id
        try:
            if is_sparse:  # the own part loses its small entries too, like those of the other peers
                async for _ in amap_in_executor(partial(self.encode, index), as_aiter(*range(reducer.num_parts))):
                    pass
            await super()._communicate_with_peer(peer_id)
            if is_sparse and self.weight:  # the residual of the average is this peer's to send, at its own weight
                for rest, missing in zip(self.rests[index], reducer.missing, strict=True):
                    rest.add_(missing, alpha=sum(reducer.weights) / self.weight)
        except Exception as e:
            if isinstance(e, ProtocolViolation) and peer_id != self.peer_id:
                self.record_violation(peer_id, e)
            self.end_after(peer_id, e)
            raise

    async def run(self) -> AsyncIterator[torch.Tensor]:
        """Run the round, and raise the exception that ended it, which hivemind hides."""
        try:
            async for update in super().run():
                yield update
        except AllreduceException as e:
            # hivemind's error does not contain the cause
            raise self._future.exception() or e from e
        if self._future.exception():
            raise self._future.exception()  # at auxiliary peers, hivemind raises nothing
