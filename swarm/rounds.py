"""Rounds: whose data entered the average."""

import asyncio
import ctypes
import gc
import logging
import math
import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise that of collections.abc)

import hivemind
import torch
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner, AveragingMode
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.averaging.partition import BannedException
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import aenumerate, amap_in_executor, as_aiter, azip

from support.console import format_number
from swarm.dht import format_peer_list, ping_peers
from swarm.guard import (
    DOUBT,
    LEAST_TRUST,
    MOSTLY_REVERSED,
    NO_WEIGHT,
    REVERSED,
    TRUST_WEIGHT,
    MaliciousPeersError,
    ProtocolViolation,
    estimate_contributions,
)
from swarm.matchmaking import parse_gathered
from swarm.patches import install_in_averager_process
from swarm.plan import (
    choose_part_size,
    count_bits,
    drop_small_partitions,
    ensure_min_partition,
    has_partition_changed,
    plan_allreduce,
)
from swarm.sparse import TopKCompression
from swarm.uplink import Uplink

logger = logging.getLogger("swarm")

FIRST_LOOK = 2.0  # seconds without data until a peer is asked whether it is there
LOOK_PERIOD = 0.5  # seconds between two looks at a running round
PREFETCH = 4  # parts compressed ahead, and received: while one waits for a sender, the next ones are on their way
MAX_STRIKES = 3  # rounds in a row that a peer has broken, after which others do without it for a while
CONFIRM_SECONDS = 2.0  # until the failure that a peer blames on another one should show here too


class StateDivergedError(AllreduceException):
    """The group continues without this peer, which has to take over the state of one of those that do.

    Arguments: the epoch of that state, and the ids (bytes) of the peers that have it.
    """

    def __str__(self) -> str:
        return f"the group continues from another state, that of epoch {self.args[0]}"


class PeersBehindError(AllreduceException):
    """All others of the group are behind this peer's state."""


class PeersUnreachableError(AllreduceException):
    """The round has failed, and these peers (ids, bytes) neither send anything nor answer. Argument: the ids."""

    def __str__(self) -> str:
        return f"no answer from {format_peer_list(self.args[0])}"


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
                    await asyncio.wait(signs, timeout=CONFIRM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
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


class VerifyingAverager(hivemind.DecentralizedAverager):
    """Tells whose data verifiably entered the average, as hivemind reports success for rounds that failed.

    The result of a round maps each peer that took part completely, as seen from here, to what it gathered: no sender
    was left out of the part that this peer averaged, and all parts came back. A round in which nobody else took part
    raises AllreduceException.
    """

    #: whether others wait for what this averager sends; otherwise it is sent in the background
    is_urgent = False
    #: what it averages, in words
    content = "parameters"
    #: of a round, shared with the averager's process, see FailFastAllReduceRunner
    residual: torch.Tensor | None = None
    # each so many-th part of the tensors is sent in a round, the next one is that of this number
    _share, _turn = 1, 0
    _expected: tuple[frozenset[bytes], int, frozenset[bytes]] | None = None
    #: whether to look for a group not much longer than matchmaking_time, when the epoch has ended
    gives_up_early = False

    def __init__(self, *args, **kwargs):
        self._max_weight = multiprocessing.Value(ctypes.c_double)
        #: in the averager's process: rounds that each peer has broken since one with it succeeded, and successful ones
        self._strikes: Counter[PeerID] = Counter()
        self._rounds_with: Counter[PeerID] = Counter()
        #: in the averager's process: how much each is trusted to average, see swarm/guard.py
        self._trust: dict[PeerID, float] = defaultdict(lambda: 1.0)
        #: in the averager's process: the steps that are under way
        self._steps: set[asyncio.Task] = set()
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        install_in_averager_process()
        super().run()

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """hivemind's, which has this process ignore Ctrl-C from then on (note 36)."""
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    @property
    def max_weight(self) -> float | None:
        """Samples for which a peer counts at most, see swarm/guard.py; None: whatever is no lie counts."""
        return self._max_weight.value or None

    @max_weight.setter
    def max_weight(self, value: float | None) -> None:
        self._max_weight.value = value or 0.0

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        uplink = self.dht.uplink
        averages = super().rpc_aggregate_part(uplink.receive(stream), context)
        async for message in uplink.send(averages, self.is_urgent):
            yield message

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        async for message in self.dht.uplink.send(super().rpc_download_state(request, context), is_round=False):
            yield message

    def step(self, *args, allow_retries: bool = False, **kwargs):
        # a retry inside hivemind would start from tensors that the failed round has half averaged, in place, and waits
        # for others who have moved on
        self.bandwidth = self.dht.uplink.mbits  # which the group is told
        return super().step(*args, allow_retries=allow_retries, **kwargs)

    def set_expected_peers(self, peer_ids: Iterable[bytes], at_least: int = 1, silent: Iterable[bytes] = ()) -> None:
        """A group with these other peers in it is complete and starts at once, also one that has formed already.

        :param at_least: how many of them and this peer it takes; where it is more than 1, so many are enough
        :param silent: ids of peers that do not answer, and that nobody needs to wait for
        """
        if (expected := (frozenset(peer_ids), at_least, frozenset(silent))) != self._expected:
            self._expected = expected
            self._outer_pipe.send(("_set_expected_peers", [*expected], {}))

    async def _set_expected_peers(self, expected: frozenset[bytes], at_least: int, silent: frozenset[bytes]) -> None:
        """Runs in the averager's process."""
        self._matchmaking.set_expected_peers(expected, at_least, silent)
        await self._matchmaking.start_when_complete()

    @property
    def _silent(self) -> frozenset[bytes]:
        return self._matchmaking.silent

    async def _step(self, *, step, **kwargs) -> None:
        task, start = asyncio.current_task(), asyncio.create_task(self._start_when_triggered(step))
        self._allreduce_timeout = self.dht.uplink.timeouts.averaging
        self._steps.add(task)  # nobody else holds one that waits for its epoch to end: it would be garbage (note 81)
        try:
            await super()._step(step=step, **kwargs)
        finally:
            self._steps.discard(task)
            start.cancel()
            # what a round leaves, with all its tensors, refers to itself, and so little happens in this process that
            # the garbage collector hardly ever comes by (note 79)
            asyncio.get_running_loop().call_later(1.0, gc.collect)

    async def _start_when_triggered(self, step) -> None:
        while step._trigger is None:  # made by the parent's first lines
            await asyncio.sleep(0)
        await step.wait_for_trigger()
        matchmaking = self._matchmaking
        await matchmaking.start_when_complete()
        if self.gives_up_early:
            await asyncio.sleep(matchmaking.min_matchmaking_time + matchmaking.request_timeout)
            is_looking = matchmaking.step_control is step and matchmaking.current_leader is None
            if is_looking and not matchmaking.assembled_group.done():
                matchmaking.assembled_group.set_exception(AllreduceException("no group has formed"))

    async def _run_allreduce_inplace_(self, tensors, group_info, *, peer_fractions, **kwargs) -> None:
        """hivemind's, with a runner of our own."""
        modes = [parse_gathered(data)[0] for data in group_info.gathered]
        shares = ensure_min_partition(peer_fractions, modes)
        peer_fractions = drop_small_partitions(shares, self.allreduce_kwargs["min_vector_size"])
        bandwidths = [parse_gathered(data)[2] for data in group_info.gathered]
        uplink = self.dht.uplink
        codec, part_size = kwargs["compression"], choose_part_size(bandwidths)
        bits = count_bits(tensors, codec, kwargs["tensor_infos"])
        if isinstance(codec, TopKCompression):
            part_size = codec.part_size
            bits *= codec.estimate_both_ways(sum(mode != AveragingMode.AUX for mode in modes))
        make_plan = partial(plan_allreduce, bits, peer_fractions, modes)
        plan, own = make_plan(bandwidths), group_info.peer_ids.index(self.peer_id)

        def has_uplink_slowed() -> bool:
            if (uplink.mbits or math.inf) > (bandwidths[own] or math.inf) / 2:
                return False  # a new round would take all of them longer than what this line has lost
            share = make_plan([*bandwidths[:own], uplink.mbits, *bandwidths[own + 1 :]]).shares[own]
            return share > plan.shares[own] and has_partition_changed(share, plan.shares[own])

        self._set_partition_share(plan.shares[own], bandwidths, own)
        next_chunk = uplink.timeouts.next_chunk
        kwargs |= dict(sender_timeout=next_chunk, reducer_timeout=2 * next_chunk)
        kwargs |= dict(part_size_bytes=part_size, prefetch=PREFETCH)
        own_seconds = 2 * bits / (1e6 * uplink.mbits) if uplink.mbits else 0.0
        uplink.expect_round(plan.seconds, own_seconds)
        started = time.monotonic()
        runner = FailFastAllReduceRunner(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_info.group_id,
            ordered_peer_ids=group_info.peer_ids,
            peer_fractions=plan.fractions,
            modes=plan.modes,
            uplink=uplink,
            has_uplink_slowed=has_uplink_slowed,
            share=self._share,
            turn=self._turn,
            takes_all=self.is_urgent,
            max_weight=self.max_weight,
            are_parameters=not self.is_urgent,
            residual=self.residual,
            **kwargs,
        )
        self._running_groups[group_info.group_id].set_result(runner)
        # of an auxiliary peer, nothing
        async for tensor, update in azip(as_aiter(*tensors), runner):
            tensor.add_(update)
        uplink.expect_round(time.monotonic() - started, own_seconds)
        self._turn = (self._turn + 1) % self._share

    def _set_partition_share(self, share: int, bandwidths: Sequence[float | None], own: int) -> None:
        """Send every N-th part of the tensors in this round."""
        if has_partition_changed(share, self._share):
            mbits = [format_number(rate) for rate in (bandwidths[own], max(filter(None, bandwidths)))]
            logger.info(
                f"this line carries {mbits[0]} Mbit/s up, others {mbits[1]}: "
                + f"sending {1 / share:.0%} of the {self.content} in each round"
            )
            self._share, self._turn = share, 0

    async def _aggregate_with_group(self, group_info, **kwargs):
        watch = asyncio.create_task(self._abort_on_peer_failure(group_info))
        try:
            gathered = await super()._aggregate_with_group(group_info, **kwargs)
        except MatchmakingException as e:
            # another peer was first to find out, and has left the round; ask to the end, or the next group would wait
            if (running := self._running_groups[group_info.group_id]).done():
                if lies := running.result().lies:
                    raise MaliciousPeersError(lies) from e
                await asyncio.wait({watch}, timeout=2 * self.dht.uplink.timeouts.silence_in_round + 0.5)
            if watch.done() and not watch.exception() and watch.result():
                raise PeersUnreachableError(watch.result()) from e
            if running.done():
                self._record_broken_round(running.result().list_suspects())
            raise
        finally:
            watch.cancel()
        runner = self._running_groups[group_info.group_id].result()
        if runner.tensor_part_container.failed_size:
            # a reducer did not answer: for its parts we hold our own values alone
            averaged = {self.peer_id}
        else:
            averaged = set(runner.sender_peer_ids) - runner.banned_senders
        if len(averaged) < 2:  # of which this peer is one, unless it is auxiliary
            raise AllreduceException(f"nobody else's data entered the average of {len(group_info.peer_ids)} peers")
        if self.max_weight is not None and self.is_urgent and self.peer_id in averaged:
            self._check_averages(runner)
        for peer in averaged:
            del self._strikes[peer]
        self._rounds_with.update(averaged)
        return {peer_id: data for peer_id, data in gathered.items() if peer_id in averaged}

    def _check_averages(self, runner: FailFastAllReduceRunner) -> None:
        """Raises MaliciousPeersError for those whose averages have for some rounds not been what they should."""
        if not runner.weight:
            return
        weight = min(runner.weight, self.max_weight)
        weight /= max(weight, sum(runner.tensor_part_reducer.weights))
        index = runner.ordered_peer_ids.index(self.peer_id)
        container = runner.tensor_part_container
        shares = estimate_contributions(container, index, weight)
        shares = {runner.ordered_peer_ids[index]: share for index, share in shares.items()}
        for peer, share in shares.items():
            self._trust[peer] += TRUST_WEIGHT * weight * (share - self._trust[peer])
        if out := [peer for peer, trust in self._trust.items() if trust < LEAST_TRUST]:
            self._trust |= dict.fromkeys(out, 2 * LEAST_TRUST)  # when they are back
            raise MaliciousPeersError(dict.fromkeys(out, "sends averages that own gradients are no part of"))
        is_reversed = container.estimate_contribution(weight, range(container.group_size)) < MOSTLY_REVERSED
        if is_reversed or any(share < REVERSED and self._trust[peer] < DOUBT for peer, share in shares.items()):
            raise AllreduceException("an average points away from what was sent for it")

    def _record_broken_round(self, suspects: list[PeerID]) -> None:
        """Count a broken round, which may be chance.

        :raises MaliciousPeersError: a peer has broken several in a row

        Of two peers, of which one blames the other, the one with fewer rounds behind it counts: an attacker has to work
        for long before it can turn honest peers against each other.
        """
        if not suspects:
            return
        peer = min(suspects, key=lambda peer: self._rounds_with[peer])
        self._strikes[peer] += 1
        if self._strikes[peer] >= MAX_STRIKES:
            self._strikes.clear()
            raise MaliciousPeersError({peer: f"has broken {MAX_STRIKES} rounds in a row"})

    async def _abort_on_peer_failure(self, group_info) -> list[bytes]:
        """End the running round when a peer that it waits for has sent nothing for a while, nor answers a question:
        the round has failed anyway, and hivemind waits for twice next_chunk_timeout.

        :returns: the ids of such peers, when the round has ended
        """
        runner = await asyncio.shield(self._running_groups[group_info.group_id])
        modes = zip(runner.ordered_peer_ids, runner.modes, strict=True)
        clients = {peer for peer, mode in modes if mode == AveragingMode.CLIENT}
        timeouts = self.dht.uplink.timeouts
        quiet_for = max(FIRST_LOOK, timeouts.round_seconds / 8)
        known = self._silent  # which is older than what they have sent in this round
        looks = (timeouts.next_chunk + 2 * timeouts.round_seconds) / LOOK_PERIOD  # none while this peer is frozen
        while not runner._future.done():
            await asyncio.wait({runner._future}, timeout=LOOK_PERIOD)
            if runner.has_uplink_slowed():  # all are sooner done with another plan
                runner.end(self.peer_id, AllreduceException("this peer's line has become slower"))
                return []
            looks -= 1
            # who waits for a sender itself is the first to say so
            laggards = runner.list_stragglers(are_reducers=looks < -10) if looks < 0 else []
            if 0 < 2 * len(laggards) < runner.group_size:  # else it is this peer's own line that is slow
                runner.lies |= dict.fromkeys(laggards, "keeps a round waiting")
                runner.end(laggards[0], MaliciousPeersError(runner.lies))
                return []
            quiet_since = time.monotonic() - quiet_for
            # clients cannot be asked
            quiet = [p for p in runner.list_awaited_peers() if runner.heard[p] < quiet_since and p not in clients]
            known |= self._silent - {peer.to_bytes() for peer in quiet}
            if not quiet:
                continue
            silent = [peer for peer in quiet if peer.to_bytes() in self._silent - known]
            if not silent:  # the optimizer has not asked them either
                question = partial(
                    ping_peers, peer_ids=[peer.to_bytes() for peer in quiet], patience=timeouts.silence_in_round
                )
                answering = await self.dht.run_coroutine(question, return_future=True)
                runner.heard |= {peer: time.monotonic() for peer in quiet if peer.to_bytes() in answering}
                silent = [peer for peer in quiet if runner.heard[peer] < quiet_since]
            if silent:
                gone = [peer.to_bytes() for peer in silent]
                runner.end(silent[0], PeersUnreachableError(gone))
                return gone
        return []
