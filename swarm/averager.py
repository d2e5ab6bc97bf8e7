"""Averagers that report which peers' data entered the average."""

import asyncio
import contextlib
import ctypes
import math
import multiprocessing
import time
from collections.abc import Iterable
from typing import AsyncIterator, NamedTuple  # noqa: UP035 (hivemind does not know that of collections.abc)

import hivemind
import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import achain, as_aiter, azip

from common.console import format_number
from common.memory import collect_garbage
from swarm import logger
from swarm.allreduce import FailFastAllReduceRunner, choose_fractions, count_bits, has_partition_changed, plan_allreduce
from swarm.guard import MaliciousPeersError, RoundSettings
from swarm.matchmaking import DIGEST_BYTES, EarlyStartMatchmaking, parse_gathered
from swarm.patches import install_in_averager_process
from swarm.round_watch import PeersSilentError, RoundWatch
from swarm.trust import RoundTrust

MAX_SLOWNESS = 3.0  # of a round, relative to its plan; a sender that holds up a slower one counts as late
Parts = AsyncIterator[averaging_pb2.AveragingData]
PREFETCH = 4  # parts to compress and to receive ahead, while the current part waits for a sender


class StateDivergedError(AllreduceException):
    """The group continues from another state. Arguments: its epoch, the ids of its peers, and those of all trainers."""

    def __str__(self) -> str:
        return f"the group continues from another state, that of epoch {self.args[0]}"


class PeersBehindError(AllreduceException):
    """The error that no other peer of the group has the chosen state, which is this peer's."""


class RoundResult(NamedTuple):
    """The result of a round. The averager's future maps each peer whose data entered the average to it."""

    group_id: bytes
    members: tuple[bytes, ...]  # ids of all trainers of the group, of which some may have failed
    turn: tuple[int, int]  # this peer's num_partitions and partition_index, see RoundSettings
    violations: dict[PeerID, str]
    digests: dict[PeerID, bytes]  # of the averages of gradients from each member, in the group's order


class VerifyingAverager(hivemind.DecentralizedAverager):
    """An averager that reports which peers' data verifiably entered the average; hivemind hides failures (note 54)."""

    #: whether parameters are averaged, in the background; or gradients, which other peers wait for
    are_parameters = True
    residual: torch.Tensor | None = None  # see RoundSettings; shared with the averager's process

    def __init__(self, *args, max_weight: float | None = None, **kwargs):
        """:param max_weight: see RoundSettings"""
        self.max_weight = max_weight
        # of the next round, see RoundSettings
        self._num_partitions = 1
        self._partition_index = 0
        self._expected = None
        #: the id of the last round's group in hex; empty until its peers exchange data
        self.exchanged_group = multiprocessing.Array(ctypes.c_char, 64)
        self._trust = RoundTrust()  # used in the averager's process only, as is the limit of the last round
        self._limit: asyncio.Timeout | None = None
        self._last_result = RoundResult(b"", (), (1, 0), {}, {})  # of a round that has succeeded
        self._unequal: dict[PeerID, str] = {}  # violations in that round, see `find_unequal_averages`
        super().__init__(*args, **kwargs)

    @property
    def matchmaking(self) -> EarlyStartMatchmaking:
        """The search for groups, in the averager's process."""
        return self._matchmaking

    def run(self) -> None:
        """Run the averager's process with our matchmaking and all-reduce classes."""
        install_in_averager_process()
        self.matchmaking_kwargs["rounds_with"] = self._trust.rounds
        super().run()

    def run_in_background(self, **_) -> None:
        """Start the averager's process, without waiting; hivemind's method makes this one ignore Ctrl-C (note 36)."""
        self.start()

    def _send(self, method: str, *args, **options) -> None:
        """Call a coroutine method in the averager's process, without waiting for it."""
        self._outer_pipe.send((method, [*args], options))

    def step(self, *args, gather: object = None, allow_retries: bool = False, **kwargs):
        """Start a round without hivemind's retries: a failed round leaves the tensors partly averaged (note 55)."""
        self.bandwidth = self.dht.uplink.mbits  # part of the group data
        if self.dht.membership:  # for the members that this peer does not call
            gather = [gather, self.dht.membership.credential]
        return super().step(*args, gather=gather, allow_retries=allow_retries, **kwargs)

    def set_expected_peers(
        self, epochs: dict[bytes, float], min_peers: int = 1, excluded: Iterable[bytes] = ()
    ) -> None:
        """Set the peers with which a group starts at once, with the epochs of known contributors and infinity for other
        peers; the number of them that it needs, this one included (1 to wait for all of them); and the silent or banned
        peers, for which no group waits. A group of another leader needs two thirds of the contributors."""
        if (expected := (epochs, min_peers, frozenset(excluded))) != self._expected:
            self._expected = expected
            self._send("_set_expected_peers", *expected)

    async def _set_expected_peers(self, *expected) -> None:
        self.matchmaking.set_expected_peers(*expected)
        await self.matchmaking.start_when_complete()

    def avoid_leader(self) -> None:
        """Leave the leader that this peer follows, if any, see EarlyStartMatchmaking."""
        self._send("_avoid_leader")

    async def _avoid_leader(self) -> None:
        await self.matchmaking.avoid_leader()

    def end_round(self) -> None:
        """End the running round, if any, for all peers; hivemind cancels only the search for a group."""
        self._send("_end_round")

    async def _end_round(self) -> None:
        for running in [it for it in self._running_groups.values() if it.done()]:
            running.result().end(self.peer_id, AllreduceException("this peer has given up the round"))

    async def rpc_aggregate_part(self, stream: Parts, context: P2PContext) -> Parts:
        """Serve a group like hivemind, but refuse one that no leader has shown to this peer in time (note 105): without
        an answer, the others would ban this peer instead of the leader."""
        request = await anext(stream)
        if request.group_id not in self._running_groups:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._pending_groups_registered.wait(), self.dht.uplink.timeouts.request)
        # a group that has formed waits until this peer ends its batch
        if request.group_id not in self._running_groups and request.group_id != self.matchmaking.group_id:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        async for message in super().rpc_aggregate_part(achain(as_aiter(request), stream), context):
            yield message

    async def _aggregate_with_group(self, group_info, **kwargs) -> dict[PeerID, RoundResult]:
        group_info = group_info if self.are_parameters else self.select_group(group_info)
        running = self._running_groups[group_info.group_id]
        running.finalize = lambda cancel: ()  # hivemind's shutdown calls it (note 88)
        watch = asyncio.create_task(self._watch(running))
        try:
            async with asyncio.timeout(self.dht.uplink.timeouts.averaging) as self._limit:
                await super()._aggregate_with_group(group_info, **kwargs)
            return self._check_round(running.result())
        except MatchmakingException:
            if running.done():
                await self._check_failed_round(running.result(), watch)
            raise
        finally:
            watch.cancel()
            # a finished round and its tensors form a reference cycle (note 79)
            asyncio.get_running_loop().call_later(1.0, collect_garbage)

    async def _run_allreduce_inplace_(self, tensors, group_info, *, peer_fractions, **kwargs) -> None:
        """Run an all-reduce, like hivemind, but with our plan, pacing, timeouts and runner."""
        members = [parse_gathered(data) for data in group_info.gathered]
        modes = [member.mode for member in members]
        bandwidths = [member.mbits for member in members]
        own = group_info.peer_ids.index(self.peer_id)
        uplink = self.dht.uplink
        bits = count_bits(tensors, kwargs["compression"])
        fractions = choose_fractions(peer_fractions, modes, self.allreduce_kwargs["min_vector_size"])
        plan = plan_allreduce(bits, fractions, modes, bandwidths)
        num_partitions = plan.num_partitions[own]

        def has_uplink_slowed() -> bool:
            if (uplink.mbits or math.inf) > (bandwidths[own] or math.inf) / 2:
                return False  # a new round would cost the group more time than the slower uplink
            now = [*bandwidths[:own], uplink.mbits, *bandwidths[own + 1 :]]
            count = plan_allreduce(bits, fractions, modes, now).num_partitions[own]
            return count > num_partitions and has_partition_changed(count, num_partitions)

        if has_partition_changed(num_partitions, self._num_partitions):
            mbits = [format_number(rate) for rate in (bandwidths[own], max(filter(None, bandwidths)))]
            rates = f"the uplink carries {mbits[0]} Mbit/s, the fastest one in the group {mbits[1]}"
            part = f"{1 / num_partitions:.0%} of the {'parameters' if self.are_parameters else 'gradients'}"
            logger.info(f"{rates}: sending {part} in each round")
            self._num_partitions = num_partitions
            self._partition_index = 0
        own_seconds = 2 * bits / (1e6 * uplink.mbits) if uplink.mbits else 0.0
        uplink.expect_round(plan.seconds, own_seconds)
        self._limit.reschedule(asyncio.get_running_loop().time() + uplink.timeouts.averaging)
        started = time.monotonic()
        late_after = uplink.timeouts.next_chunk + MAX_SLOWNESS * plan.seconds
        turn = dict(num_partitions=self._num_partitions, partition_index=self._partition_index, late_after=late_after)
        settings = RoundSettings(self.are_parameters, self.max_weight, residual=self.residual, **turn)
        kwargs |= dict(p2p=self._p2p, servicer_type=type(self), prefix=self.prefix, group_id=group_info.group_id)
        kwargs |= dict(ordered_peer_ids=group_info.peer_ids, peer_fractions=plan.fractions, modes=plan.modes)
        kwargs |= dict(part_size_bytes=plan.part_bytes, prefetch=PREFETCH, has_uplink_slowed=has_uplink_slowed)
        kwargs |= dict(sender_timeout=uplink.timeouts.next_chunk, reducer_timeout=None)  # see `RoundWatch`
        runner = FailFastAllReduceRunner(tensors=tensors, uplink=uplink, settings=settings, **kwargs)
        runner.leader = self.matchmaking.leader
        runner.essential = self.matchmaking.find_essential(group_info.peer_ids)
        runner.violations |= self._unequal
        # in the plan, slow peers that accept connections are clients, too
        pairs = zip(group_info.peer_ids, modes, strict=True)
        runner.clients = {peer for peer, mode in pairs if mode == AveragingMode.CLIENT}
        self.exchanged_group.value = group_info.group_id.hex()[:64].encode()
        self._running_groups[group_info.group_id].set_result(runner)
        # at an auxiliary peer, the runner yields no updates
        async for tensor, update in azip(as_aiter(*tensors), runner):
            if self.are_parameters:
                tensor.add_(update)
            else:  # a sum with a difference would have other bits on each peer
                tensor.copy_(update)
        uplink.expect_round(min(time.monotonic() - started, late_after), own_seconds)
        self._partition_index = (self._partition_index + 1) % self._num_partitions

    async def _watch(self, running: asyncio.Future) -> None:
        """End the round if it cannot succeed in time, once it runs."""
        await RoundWatch(await asyncio.shield(running), self.dht).run()

    # --- the verdict on a round; swarm/trust.py has the rules

    async def _check_failed_round(self, runner: FailFastAllReduceRunner, watch: asyncio.Task) -> None:
        """Raise an error that names the peers that have made a round fail, if they are known."""
        if runner.violations:
            raise MaliciousPeersError(runner.violations)
        # finish the pings if another peer has left first, because the next group would wait for the silent peer
        await asyncio.wait({watch}, timeout=2 * self.dht.uplink.timeouts.silence_in_round + 0.5)
        # silent peers, or the one that broke it, or two peers if one blames the other and this peer saw neither fail
        suspects = set(map(PeerID, runner.silent)) or set(runner.cause or ()) - {self.peer_id} - runner.refused
        if 2 * len(runner.silent) < runner.group_size:  # otherwise, this peer's own connection may have failed
            suspects = suspects & runner.broken or suspects
            self._trust.record_broken_round(suspects, dict.fromkeys(suspects & runner.foreign, runner.leader))
        if runner.silent:
            raise PeersSilentError(runner.silent)

    def _check_round(self, runner: FailFastAllReduceRunner) -> dict[PeerID, RoundResult]:
        """Return the result of a round, or raise AllreduceException if it is of no use or `RoundTrust` rejects it."""
        container = runner.tensor_part_container
        peers = runner.ordered_peer_ids
        averaged = set(runner.sender_peer_ids) - runner.banned_senders
        if len(averaged) < 2:  # this peer counts too, unless it is auxiliary
            raise AllreduceException(f"no other peer's data entered the average of {len(peers)} peers")
        if self.max_weight is not None and not self.are_parameters and runner.weight:
            # in the averages that this peer has made, if any; an outlier has none
            own = runner.tensor_part_reducer.shares.get(runner.sender_peer_ids.index(self.peer_id), 1.0)
            shares = {peers[index]: share for index, share in container.estimate_contributions(own).items()}
            self._trust.record_averages(shares, container.estimate_contribution(own, range(container.group_size)), own)
        # a sender that came too late to count is late, too, but not with its first leader, which may not have told it
        first = {peer: self._trust.leaders.setdefault(peer, runner.leader) for peer in runner.banned_senders}
        too_late = [peer for peer in first if first[peer] != runner.leader and 2 * len(first) < len(peers)]
        late = set() if self.are_parameters else {*runner.late, *too_late}
        runner.violations |= self._trust.record_round(set(peers) - runner.banned_senders | late, late, runner.leader)
        members = tuple(map(PeerID.to_bytes, runner.sender_peer_ids))
        turn = runner.settings.num_partitions, runner.settings.partition_index
        digests = {peer: it.digest()[:DIGEST_BYTES] for peer, it in runner.digests.items()}
        self._last_result = RoundResult(runner.group_id, members, turn, runner.violations, digests)
        return dict.fromkeys(averaged, self._last_result)
