"""An all-reduce that ends as soon as it cannot succeed, and says because of which peer."""

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

CONFIRM_TIMEOUT = 2.0  # seconds until the failure that a peer blames on another one should show here too


class FailFastAllReduceRunner(AllReduceRunner):
    """A round that ends as soon as it cannot succeed any more: hivemind's continues to its end without the parts of a
    reducer that has failed, and tells nobody why."""

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
        :param uplink: the pacer of all that is sent
        :param has_uplink_slowed: whether this peer's line has become too slow for what the round wants of it
        :param share: send each so many-th part of the tensors; the weight of the others is 0
        :param turn: with which of them to begin
        :param takes_all: take the average of all parts anyway; otherwise keep the own values of those not sent
        :param max_weight, are_parameters: see RobustReducer
        :param residual: of as many numbers as all tensors have, 0 in the beginning: what of them does not arrive. The
            tensors are then what others got, plus what comes back
        """
        super().__init__(*args, **kwargs)
        sparse = kwargs["compression"] if isinstance(kwargs["compression"], TopKCompression) else None
        self.tensor_part_reducer.configure_checks(max_weight, are_parameters, sparse)
        own = self.ordered_peer_ids.index(self.peer_id)
        self.tensor_part_container.configure_checks(are_parameters and max_weight is not None, own if sparse else None)
        parts = chain.from_iterable(self.tensor_part_container._input_parts_by_peer)
        rests = iter([] if residual is None else residual.split([len(part) for part, _ in parts]))
        #: what of each part does not arrive, by the peer that averages it
        self.rests = [list(islice(rests, count)) for count in self.tensor_part_container.num_parts_by_peer]
        #: peers that sent invalid data, and how it was invalid
        self.lies: dict[PeerID, str] = {}
        #: the peer that broke the round, and the peer that said so: the same one if its stream just ended
        self.cause: tuple[PeerID, PeerID] | None = None
        #: whom the other peers blamed as they ended the round; and the peers that this peer has seen break it
        self.blamed: dict[PeerID, PeerID] = {}
        self.broken = {peer: asyncio.Event() for peer in self.ordered_peer_ids}
        self.uplink, self.has_uplink_slowed = uplink, has_uplink_slowed
        self.share, self.turn, self.takes_all = share, turn, takes_all
        #: when each peer was last heard of, in this round
        self.heard = dict.fromkeys(self.ordered_peer_ids, time.monotonic())

    def should_delay_results(self, peer_id: PeerID) -> bool:
        # hivemind would spare lines on which acknowledgements wait behind data, which the pacer does
        return False

    def list_awaited_peers(self) -> list[PeerID]:
        """The other peers whose data this one is waiting for."""
        parts, received = self.tensor_part_container, self.tensor_part_reducer.num_parts_received
        senders = zip(self.sender_peer_ids, received, strict=True)
        awaited = {peer for peer, sent in senders if sent < self.tensor_part_reducer.num_parts} - self.banned_senders
        for index, peer in enumerate(self.ordered_peer_ids):
            if parts._outputs_registered_by_peer[index] < parts.num_parts_by_peer[index]:
                awaited.add(peer)
        return [peer for peer in awaited if peer != self.peer_id]

    def list_stragglers(self, are_reducers: bool) -> list[PeerID]:
        """Those without whom this peer's part of the round would go on.

        :param are_reducers: where it is done, who has not answered, though that one may be waiting for a sender itself
        """
        reducer, awaited = self.tensor_part_reducer, self.list_awaited_peers()
        if reducer.finished.is_set():
            return awaited if are_reducers else []
        received = zip(self.sender_peer_ids, reducer.num_parts_received, strict=True)
        return [peer for peer, count in received if peer in awaited and count <= reducer.current_part_index]

    def is_sent(self, peer_index: int, part_index: int) -> bool:
        before = sum(self.tensor_part_container.num_parts_by_peer[:peer_index])
        return (before + part_index) % self.share == self.turn

    def encode(self, peer_index: int, part_index: int) -> runtime_pb2.Tensor:
        """A part as it is sent; with a residual, the part becomes what arrives."""
        part, info = self.tensor_part_container._input_parts_by_peer[peer_index][part_index]
        message = self.tensor_part_container.compression.compress(part, info)
        if self.rests[peer_index]:
            arriving = deserialize_torch_tensor(message)
            torch.sub(part, arriving, out=self.rests[peer_index][part_index])
            part.copy_(arriving)
        return message

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        """hivemind's, with an empty message in place of each part that is not sent."""
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
                part.zero_()  # what comes back is the average itself
                # that it is wanted, and how it is to be sent
                message.tensor_part.compression = container.compression.compress(part[:1], info).compression
                message.tensor_part.size.append(len(part))
            return message

        parts = as_aiter(*range(container.num_parts_by_peer[peer_index]))
        async for message in amap_in_executor(make_message, parts, max_prefetch=container.prefetch):
            yield message

    async def _accumulate_parts_streaming(self, stream, sender_index: int):
        """hivemind's, with empty messages."""
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
            logger.debug(f"sender {sender_index} is out of this round already")
        except ProtocolViolation as e:
            self.record_violation(self.sender_peer_ids[sender_index], e)
            raise
        finally:
            if part_index != reducer.num_parts:
                await self._ban_sender(self.sender_peer_ids[sender_index])

    def record_violation(self, peer_id: PeerID, lie: Exception) -> None:
        self.lies[peer_id] = str(lie)
        self.broken[peer_id].set()

    async def record_activity(self, messages: AsyncIterator, peer_id: PeerID):
        async for message in messages:
            self.heard[peer_id] = time.monotonic()
            yield message

    def end(self, cause: PeerID, exception: Exception) -> None:
        """End the round, which this peer breaks because of that one: the others are told so."""
        self.cause = self.cause or (cause, self.peer_id)
        self.finalize(exception=exception)

    def end_after(self, peer_id: PeerID, error: Exception) -> None:
        """End the round after the exchange with a peer has failed."""
        cause = self.blamed.get(peer_id, peer_id)
        if cause == self.peer_id:
            cause = peer_id
        if cause == peer_id:
            self.broken[peer_id].set()
        self.cause = self.cause or (cause, peer_id)
        why = f"{error!r}" if cause == peer_id else f"because of peer {cause}"
        # the streams to the others break with this round, which tells them
        self.finalize(exception=AllreduceException(f"peer {peer_id} has left the round ({why})"))

    def list_suspects(self) -> list[PeerID]:
        """The peer that broke the round; two peers where one blames the other, and this peer cannot tell."""
        suspects = set(self.cause or ()) - {self.peer_id}
        return [peer for peer in suspects if self.broken[peer].is_set()] or list(suspects)

    async def check_blame(self, messages: AsyncIterator, peer_id: PeerID):
        """Pass a peer's messages on; the last one of a round that it has ended says because of whom.

        Its word alone proves nothing: if it is right, this peer should soon see the same.
        """
        async for message in messages:
            is_last = message.code != averaging_pb2.AVERAGED_PART
            if is_last and message.peer_id and (blamed := PeerID(message.peer_id)) in self.ordered_peer_ids:
                self.blamed[peer_id] = blamed
                if blamed not in (peer_id, self.peer_id):
                    signs = [asyncio.create_task(self.broken[peer].wait()) for peer in (peer_id, blamed)]
                    await asyncio.wait(signs, timeout=CONFIRM_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
                    for sign in signs:
                        sign.cancel()
            yield message

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        try:
            async for message in super().rpc_aggregate_part(self.record_activity(stream, context.remote_id), context):
                if message.code != averaging_pb2.AVERAGED_PART and self.cause:
                    message.peer_id = self.cause[0].to_bytes()
                yield message
        except asyncio.CancelledError:
            if not self._future.done():
                raise
            # the round has ended here; hivemind says nothing, and the other peer would wait for reducer_timeout
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
        """No difference for parts whose average is not wanted."""
        parts = list(self.tensor_part_container._input_parts_by_peer[self.ordered_peer_ids.index(peer)])
        async for number, message in aenumerate(averages):
            if message.code == averaging_pb2.AVERAGED_PART and not message.tensor_part.buffer and number < len(parts):
                message.tensor_part.CopyFrom(serialize_torch_tensor(torch.zeros_like(parts[number][0])))
            yield message

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        index, reducer = self.ordered_peer_ids.index(peer_id), self.tensor_part_reducer
        is_sparse = reducer.sparse and peer_id == self.peer_id
        try:
            if is_sparse:  # own numbers count as little as those of the others
                async for _ in amap_in_executor(partial(self.encode, index), as_aiter(*range(reducer.num_parts))):
                    pass
            await super()._communicate_with_peer(peer_id)
            if is_sparse and self.weight:  # what nobody gets of the average is this peer's to send, at its own weight
                for rest, missing in zip(self.rests[index], reducer.missing, strict=True):
                    rest.add_(missing, alpha=sum(reducer.weights) / self.weight)
        except Exception as e:
            if isinstance(e, ProtocolViolation) and peer_id != self.peer_id:
                self.record_violation(peer_id, e)
            self.end_after(peer_id, e)
            raise

    async def run(self) -> AsyncIterator[torch.Tensor]:
        try:
            async for update in super().run():
                yield update
        except AllreduceException as e:
            # why it was ended, where hivemind says that it was
            raise self._future.exception() or e from e
        if self._future.exception():
            raise self._future.exception()  # auxiliary peers take it for a success
