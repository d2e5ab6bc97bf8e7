"""Averaging rounds of which this peer knows whose data entered the average."""

import asyncio
import ctypes
import gc
import logging
import math
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise that of collections.abc)

import hivemind
import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import as_aiter, azip

from support.console import format_number
from swarm.allreduce import FailFastAllReduceRunner
from swarm.dht import format_peer_list, ping_peers
from swarm.guard import MaliciousPeersError, estimate_contributions
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
from swarm.trust import RoundTrust

logger = logging.getLogger("swarm")

FIRST_LOOK = 2.0  # seconds without data until a peer is asked whether it is there
LOOK_PERIOD = 0.5  # seconds between two looks at a running round
PREFETCH = 4  # parts compressed ahead, and received: while one waits for a sender, the next ones are on their way


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
        #: in the averager's process: what it has learned of its peers
        self._trust = RoundTrust()
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
                self._trust.record_broken_round(running.result().list_suspects())
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
        self._trust.record_round(averaged)
        return {peer_id: data for peer_id, data in gathered.items() if peer_id in averaged}

    def _check_averages(self, runner: FailFastAllReduceRunner) -> None:
        """Check how much of this peer's gradient is in what the others have averaged.

        :raises AllreduceException: an average points away from it; MaliciousPeersError: some peer's have for some time
        """
        if not runner.weight:
            return
        container, peers = runner.tensor_part_container, runner.ordered_peer_ids
        weight = min(runner.weight, self.max_weight)
        weight /= max(weight, sum(runner.tensor_part_reducer.weights))
        shares = estimate_contributions(container, peers.index(self.peer_id), weight)
        of_all = container.estimate_contribution(weight, range(container.group_size))
        self._trust.record_averages({peers[index]: share for index, share in shares.items()}, of_all, weight)

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
