"""Averagers that report which peers' data entered the average."""

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
from hivemind.compression import CompressionBase
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

FIRST_LOOK = 2.0  # seconds without data until a peer is pinged
LOOK_PERIOD = 0.5  # seconds between two checks of a running round
PREFETCH = 4  # parts to compress and to receive ahead, while the current part waits for a sender


class StateDivergedError(AllreduceException):
    """The group continues without this peer, which must load the group's state.

    Arguments: the epoch of that state, and the ids (bytes) of the peers that have it.
    """

    def __str__(self) -> str:
        return f"the group continues from another state, that of epoch {self.args[0]}"


class PeersBehindError(AllreduceException):
    """All other peers of the group have an older state than this peer."""


class PeersUnreachableError(AllreduceException):
    """The round has failed because some peers send no data and do not answer pings. Argument: their ids (bytes)."""

    def __str__(self) -> str:
        return f"no answer from {format_peer_list(self.args[0])}"


class VerifyingAverager(hivemind.DecentralizedAverager):
    """An averager that reports which peers' data verifiably entered the average; hivemind hides failures of rounds.

    The result of a round maps each peer that took part completely, as far as this peer can see, to its gathered data:
    the sender was not excluded from the part that this peer averaged, and all parts were returned. A round without any
    other such peer raises AllreduceException.
    """

    #: whether other peers wait for this averager's messages; otherwise they are sent in the background
    is_urgent = False
    #: the averaged tensors, as named in logs
    content = "parameters"
    #: the residual of a round, shared with the averager's process, see FailFastAllReduceRunner
    residual: torch.Tensor | None = None
    # N if every N-th part of the tensors is sent in a round, and the index of the first one in the next round
    _share, _turn = 1, 0
    _expected: tuple[frozenset[bytes], int, frozenset[bytes]] | None = None
    #: whether to stop the search for a group soon after matchmaking_time, once the epoch has ended
    gives_up_early = False

    def __init__(self, *args, **kwargs):
        self._max_weight = multiprocessing.Value(ctypes.c_double)
        #: in the averager's process: the record of its peers' rounds
        self._trust = RoundTrust()
        #: in the averager's process: the tasks of unfinished steps
        self._steps: set[asyncio.Task] = set()
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        """Run the averager's process with our matchmaking and all-reduce classes."""
        install_in_averager_process()
        super().run()

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start the averager's process; hivemind's method makes this process ignore Ctrl-C from then on (note 36)."""
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    @property
    def codec(self) -> CompressionBase:
        """The codec of the tensors in a round."""
        return self.allreduce_kwargs["compression"]

    @property
    def max_weight(self) -> float | None:
        """The maximum weight of a peer, in samples, see swarm/guard.py; None to refuse protocol violations only."""
        return self._max_weight.value or None

    @max_weight.setter
    def max_weight(self, value: float | None) -> None:
        """Set the maximum weight, in all processes."""
        self._max_weight.value = value or 0.0

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Serve averages at the uplink's pace, which hivemind ignores."""
        uplink = self.dht.uplink
        averages = super().rpc_aggregate_part(uplink.receive(stream), context)
        async for message in uplink.send(averages, self.is_urgent):
            yield message

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Serve the state at the uplink's pace, after the messages of rounds."""
        async for message in self.dht.uplink.send(super().rpc_download_state(request, context), is_round=False):
            yield message

    def step(self, *args, allow_retries: bool = False, **kwargs):
        """Start a round without hivemind's retries: these would start from tensors that the failed round has partly
        averaged in place, and would wait for peers that have already stepped."""
        self.bandwidth = self.dht.uplink.mbits  # part of the group data
        return super().step(*args, allow_retries=allow_retries, **kwargs)

    def set_expected_peers(self, peer_ids: Iterable[bytes], at_least: int = 1, silent: Iterable[bytes] = ()) -> None:
        """Set the ids of the peers that make a group complete, so that it starts at once, even if it has formed before.

        :param at_least: the number of these peers, this one included, that a group needs; 1 to wait for all of them
        :param silent: the ids of peers that do not answer, for which no group waits
        """
        if (expected := (frozenset(peer_ids), at_least, frozenset(silent))) != self._expected:
            self._expected = expected
            self._outer_pipe.send(("_set_expected_peers", [*expected], {}))

    async def _set_expected_peers(self, expected: frozenset[bytes], at_least: int, silent: frozenset[bytes]) -> None:
        """Set the expected peers of the matchmaking. Runs in the averager's process."""
        self._matchmaking.set_expected_peers(expected, at_least, silent)
        await self._matchmaking.start_when_complete()

    @property
    def _silent(self) -> frozenset[bytes]:
        return self._matchmaking.silent

    async def _step(self, *, step, **kwargs) -> None:
        task, start = asyncio.current_task(), asyncio.create_task(self._start_when_triggered(step))
        self._allreduce_timeout = self.dht.uplink.timeouts.averaging
        self._steps.add(task)  # a step that waits for its epoch to end could be garbage collected (note 81)
        try:
            await super()._step(step=step, **kwargs)
        finally:
            self._steps.discard(task)
            start.cancel()
            # A finished round and its tensors form a reference cycle. The garbage collector rarely runs by itself here,
            # because this process allocates few objects (note 79).
            asyncio.get_running_loop().call_later(1.0, gc.collect)

    async def _start_when_triggered(self, step) -> None:
        while step._trigger is None:  # the superclass creates it at the start of the step
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
        """Run an all-reduce, like hivemind, but with our plan, pacing, timeouts and runner."""
        modes = [parse_gathered(data)[0] for data in group_info.gathered]
        shares = ensure_min_partition(peer_fractions, modes)
        peer_fractions = drop_small_partitions(shares, self.allreduce_kwargs["min_vector_size"])
        bandwidths = [parse_gathered(data)[2] for data in group_info.gathered]
        uplink = self.dht.uplink
        codec, part_size = self.codec, choose_part_size(bandwidths)
        bits = count_bits(tensors, codec, kwargs["tensor_infos"])
        if isinstance(codec, TopKCompression):
            part_size = codec.part_size
            bits *= codec.estimate_both_ways(sum(mode != AveragingMode.AUX for mode in modes))
        make_plan = partial(plan_allreduce, bits, peer_fractions, modes)
        plan, own = make_plan(bandwidths), group_info.peer_ids.index(self.peer_id)

        def has_uplink_slowed() -> bool:
            if (uplink.mbits or math.inf) > (bandwidths[own] or math.inf) / 2:
                return False  # a new round would cost the group more time than the slower uplink
            share = make_plan([*bandwidths[:own], uplink.mbits, *bandwidths[own + 1 :]]).shares[own]
            return share > plan.shares[own] and has_partition_changed(share, plan.shares[own])

        self._set_partition_share(plan.shares[own], bandwidths, own)
        next_chunk = uplink.timeouts.next_chunk
        kwargs |= dict(sender_timeout=next_chunk, reducer_timeout=2 * next_chunk)
        kwargs |= dict(compression=codec, part_size_bytes=part_size, prefetch=PREFETCH)
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
        # at an auxiliary peer, the runner yields no updates
        async for tensor, update in azip(as_aiter(*tensors), runner):
            tensor.add_(update)
        uplink.expect_round(time.monotonic() - started, own_seconds)
        self._turn = (self._turn + 1) % self._share

    def _set_partition_share(self, share: int, bandwidths: Sequence[float | None], own: int) -> None:
        """Send every N-th part of the tensors in this round."""
        if has_partition_changed(share, self._share):
            mbits = [format_number(rate) for rate in (bandwidths[own], max(filter(None, bandwidths)))]
            logger.info(
                f"the uplink carries {mbits[0]} Mbit/s, the fastest one in the group {mbits[1]}: "
                + f"sending {1 / share:.0%} of the {self.content} in each round"
            )
            self._share, self._turn = share, 0

    async def _aggregate_with_group(self, group_info, **kwargs):
        watch = asyncio.create_task(self._abort_on_peer_failure(group_info))
        try:
            gathered = await super()._aggregate_with_group(group_info, **kwargs)
        except MatchmakingException as e:
            # Another peer was first to detect the failure and has left the round. Finish the pings, because otherwise
            # the next group would wait for the silent peer.
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
            # a reducer did not answer: its parts still have this peer's own values
            averaged = {self.peer_id}
        else:
            averaged = set(runner.sender_peer_ids) - runner.banned_senders
        if len(averaged) < 2:  # this peer counts too, unless it is auxiliary
            raise AllreduceException(f"no other peer's data entered the average of {len(group_info.peer_ids)} peers")
        if self.max_weight is not None and self.is_urgent and self.peer_id in averaged:
            self._check_averages(runner)
        self._trust.record_round(averaged)
        return {peer_id: data for peer_id, data in gathered.items() if peer_id in averaged}

    def _check_averages(self, runner: FailFastAllReduceRunner) -> None:
        """Check the share of this peer's gradient in the averages of the other peers.

        :raises AllreduceException: an average points away from the gradient; MaliciousPeersError: the averages of some
            peer have done so for several rounds
        """
        if not runner.weight:
            return
        container, peers = runner.tensor_part_container, runner.ordered_peer_ids
        weight = min(runner.weight, self.max_weight)
        weight /= max(weight, sum(runner.tensor_part_reducer.weights))
        shares = estimate_contributions(container, peers.index(self.peer_id), weight)
        total_share = container.estimate_contribution(weight, range(container.group_size))
        self._trust.record_averages({peers[index]: share for index, share in shares.items()}, total_share, weight)

    async def _abort_on_peer_failure(self, group_info) -> list[bytes]:
        """End the running round if it waits for a peer that sends no data for a while and answers no ping.

        Such a round has failed anyway, and hivemind would wait for twice next_chunk_timeout.

        :returns: the ids of such peers, or an empty list if the round has ended otherwise
        """
        runner = await asyncio.shield(self._running_groups[group_info.group_id])
        modes = zip(runner.ordered_peer_ids, runner.modes, strict=True)
        clients = {peer for peer, mode in modes if mode == AveragingMode.CLIENT}
        timeouts = self.dht.uplink.timeouts
        ping_delay = max(FIRST_LOOK, timeouts.round_seconds / 8)
        outdated = self._silent  # found before this round, in which these peers may have sent data
        # counted instead of a deadline, because a frozen peer makes no checks
        checks_left = (timeouts.next_chunk + 2 * timeouts.round_seconds) / LOOK_PERIOD
        while not runner._future.done():
            await asyncio.wait({runner._future}, timeout=LOOK_PERIOD)
            if runner.has_uplink_slowed():  # a new plan is faster for all peers
                runner.end(self.peer_id, AllreduceException("this peer's uplink has become slower"))
                return []
            checks_left -= 1
            # a reducer that waits for a straggler itself gets 10 more checks to report it
            stragglers = runner.list_stragglers(are_reducers=checks_left < -10) if checks_left < 0 else []
            if 0 < 2 * len(stragglers) < runner.group_size:  # otherwise, this peer's own uplink is slow
                runner.lies |= dict.fromkeys(stragglers, "kept a round waiting")
                runner.end(stragglers[0], MaliciousPeersError(runner.lies))
                return []
            quiet_since = time.monotonic() - ping_delay
            # clients cannot be pinged
            quiet = [p for p in runner.list_awaited_peers() if runner.heard[p] < quiet_since and p not in clients]
            outdated |= self._silent - {peer.to_bytes() for peer in quiet}
            if not quiet:
                continue
            silent = [peer for peer in quiet if peer.to_bytes() in self._silent - outdated]
            if not silent:  # the optimizer has not found them silent, so ping them here
                ping = partial(
                    ping_peers, peer_ids=[peer.to_bytes() for peer in quiet], patience=timeouts.silence_in_round
                )
                answering = await self.dht.run_coroutine(ping, return_future=True)
                runner.heard |= {peer: time.monotonic() for peer in quiet if peer.to_bytes() in answering}
                silent = [peer for peer in quiet if runner.heard[peer] < quiet_since]
            if silent:
                unreachable = [peer.to_bytes() for peer in silent]
                runner.end(silent[0], PeersUnreachableError(unreachable))
                return unreachable
        return []
