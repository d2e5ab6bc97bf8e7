"""Everything that hivemind 1.1.12 lacks or gets wrong, in one room: the DHT, rounds, states, who is there, a clean end.

Each repair names what it repairs; tests/test_hivemind_gaps.py tells when hivemind repairs it itself. Nothing here is
specific to a model: an experiment is edited in data.py, model.py and optimizer.py.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import ctypes
import dataclasses
import gc
import hashlib
import logging
import math
import multiprocessing
import os
import random
import resource
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait as wait_for_processes
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise that of collections.abc)

# Two public peers that dial each other at the same moment can both fail, and a round is lost: 10 of 20 first dials did,
# none of 25 with this setting. The daemon reads it when the DHT starts.
os.environ.setdefault("LIBP2P_TCP_REUSEPORT", "false")
# p2pd starts two relay services, one that passes 128 kB and one that passes 4 GB, and the later one wins: on two cores
# the small one in 9 of 12 starts, on one never (of 16). One core is enough for p2pd: 0.5 GB/s with either setting.
os.environ.setdefault("GOMAXPROCS", "1")

import hivemind
import numpy
import psutil
import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.compression import deserialize_torch_tensor
from hivemind.dht.node import DHTNode
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.optim.state_averager import TrainingStateAverager, dump_optimizer_state, load_optimizer_state
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, ValueWithExpiration, get_dht_time
from hivemind.utils.asyncio import achain, aiter_with_timeout, as_aiter
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.streaming import combine_from_streaming

from addresses import get_peer_id
from arguments import stop_for_user
from utils import select_believable

logger = logging.getLogger("averaging")

# Helper processes inherit what this module shares with them, which other ways to start a process do not provide for.
multiprocessing.set_start_method("fork", force=True)
# Shared with the helper processes: once it is set, what they log is noise.
STOPPING = multiprocessing.Value(ctypes.c_bool, False)
# Bytes of rounds and states that this process and its helpers have sent and received, so far.
TRAFFIC = multiprocessing.Array(ctypes.c_longlong, 2)
# Set by Ctrl-C and SIGTERM: whoever waits for others waits no longer.
STOP_REQUESTED = threading.Event()

# All in seconds.
TOUCH_PERIOD = 10.0  # between two pings of peers that have been lost; a peer that moved or was cut off is found again
FETCH_TIMEOUT = 5.0  # for one look at the swarm's progress; the DHT itself gives up on a peer after 3
FIRST_LOOK = 2.0  # of waiting for a group before asking whether anybody is there; a live group forms within it
RETRY_AFTER = 1.0  # between a failed round and the next: who is there has reported by then
RETRY_PERIOD = 10.0  # between two downloads of the state when nobody gave it the first time
FIRST_ANSWER = 5.0  # until a client that is asked for its state begins to answer
DOWNLOAD_PAUSE = 0.5  # between two passes over the donors: short, as a state is good for one epoch
PROGRESS_PERIOD = 5.0  # between two lines about a running download

TOUCHES = 60  # pings after which a lost peer is given up
QUESTIONED = 8  # peers pinged at once, by each peer before each round
MAX_GIVING = 2  # states that a client gives, or an auxiliary peer passes on, at once
RELAY = math.inf  # the epoch that auxiliary peers declare: as new as any client's
DOWNLOAD_TRIES = 16  # passes over all donors until one has the epoch that is wanted
MAX_STALENESS = 10  # epochs for which gradients are worth keeping; a laptop that slept for hours has older ones


# --- the DHT ----------------------------------------------------------------------------------------------------------

# Among relays to choose from, p2pd waits three minutes for a fourth one (note 30); fixed ones it asks at once.
P2P.FORCE_REACHABILITY_MAPPING["relayed"] = {"forceReachabilityPrivate": 1, "relayDiscovery": 0}


def check_versions(numpy_version: str = numpy.__version__) -> None:
    """Stop where hivemind would average nothing and log success: its 8-bit codecs fail silently on numpy >= 2.4."""
    if tuple(int(part) for part in numpy_version.split(".")[:2]) >= (2, 4):
        stop_for_user(f"numpy {numpy_version} breaks hivemind's compression in silence: pip install 'numpy<2.4'")


async def keep_in_touch(dht: hivemind.DHT, node: DHTNode) -> None:
    """Runs in the DHT's process, for ever: look for peers that were lost.

    hivemind forgets a peer that has failed to answer once. A monitor that was restarted would stay alone, and the two
    halves of a network that was cut in two might never meet again.
    """
    initial_peers = {get_peer_id(maddr) for maddr in dht.initial_peers or ()}
    known, lost = set(), dict.fromkeys(initial_peers, 0)
    while True:
        await asyncio.sleep(TOUCH_PERIOD)
        present = set(node.protocol.routing_table.peer_id_to_uid)
        lost = {peer: touches for peer, touches in lost.items() if peer not in present}
        lost |= dict.fromkeys(known - present - lost.keys(), 0)
        known |= present
        answers = await asyncio.gather(*(node.protocol.call_ping(peer) for peer in lost))
        for peer, answer in zip(list(lost), answers, strict=True):
            lost[peer] += 1
            if answer is None and lost[peer] >= TOUCHES and peer not in initial_peers:
                del lost[peer]
                known.discard(peer)


def raise_file_limit() -> float:
    """Allow this process and its helpers as many open files as the system does; returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return math.inf if soft == resource.RLIM_INFINITY else soft


class DHT(hivemind.DHT):
    """Finds lost peers again, and ends without a traceback when one that has asked it something ended first: a helper,
    as in each clean stop, or the peer itself, killed."""

    def run_in_background(self, *args, **kwargs) -> None:
        super().run_in_background(*args, **kwargs)
        self.touching = self.run_coroutine(keep_in_touch, return_future=True)

    def run(self) -> None:
        live_as_helper()
        try:
            super().run()
        except EOFError:
            if STOPPING.value:
                return
            peer = multiprocessing.parent_process()
            peer.join(1.0)  # which may be about to die
            if peer.is_alive():
                raise


# --- rounds -----------------------------------------------------------------------------------------------------------


class AveragingFailed(Exception):
    """A gradient averaging round came to nothing; its gradients are kept."""


class OutOfStep(AllreduceException):
    """The group goes on without this peer, which has to take over the state of one of those that do.

    Arguments: the epoch of that state, and the ids (bytes) of the peers that have it.
    """

    def __str__(self) -> str:
        return f"the group goes on from another state, which is of epoch {self.args[0]} then"


def read_gathered(data: bytes) -> tuple[AveragingMode, object]:
    """Whether a peer of a group averages, is a client, or is auxiliary; and what it has gathered.

    :raises ValueError: it is nothing that an averager would say
    """
    try:
        bandwidth, mode, gathered = MSGPackSerializer.loads(data)
        if bandwidth is not None and not 0 <= bandwidth < math.inf:
            raise ValueError(f"a bandwidth of {bandwidth}")
        return AveragingMode(mode), MSGPackSerializer.loads(gathered)
    except Exception as e:  # hostile bytes: the decoder raises whatever it likes
        raise ValueError(f"what a peer tells its group cannot be read ({e!r})") from e


class PromptMatchmaking(Matchmaking):
    """Starts a group as soon as the epoch has ended here and every peer that is known to be there has come.

    hivemind waits for a full group or until matchmaking_time has passed: a swarm smaller than target_group_size waits
    it out in each round (note 11), and one that was just large enough does so once a peer has died (note 22).

    And a group is full of trainers: hivemind counts auxiliary peers too, so that trainers average with nobody else.
    """

    #: ids (bytes) of the other peers that should come; set by VerifiedAverager
    expected: frozenset[bytes] = frozenset()

    @property
    def target_group_size(self) -> int | None:
        size = self.__dict__["target_group_size"]
        if size is None or self.step_control is None:
            return size
        of_group = [self.step_control.data_for_gather, *(peer.gather for peer in self.current_followers.values())]
        return size + sum(read_gathered(data)[0] == AveragingMode.AUX for data in of_group)

    async def rpc_join_group(self, request, context):
        try:
            read_gathered(request.gather)
        except ValueError as e:  # the whole group would fail
            logger.debug(f"refused {context.remote_id}: {e}")
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        arrival = time.monotonic()
        async with self.lock_request_join_group:
            # held while this peer asks another one in turn; who has waited so long here may have given up, and to count
            # it would make everybody wait for its data in vain
            is_stale = time.monotonic() - arrival > self.request_timeout / 2
        if is_stale:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.CANCELLED)
            return
        async with contextlib.aclosing(super().rpc_join_group(request, context)) as messages:
            async for message in messages:
                if message.code == averaging_pb2.ACCEPTED:
                    # the parent holds the lock that starting needs, until this message is under way
                    self.starting = asyncio.create_task(self.start_when_complete())
                yield message

    async def start_when_complete(self) -> None:
        async with self.lock_request_join_group:
            if not self.is_looking_for_group or self.assembled_group.done() or self.current_leader is not None:
                return
            if not self.step_control.triggered:
                return  # a group is looked for in advance; who comes in the meantime shall be in it
            here = {peer_id.to_bytes() for peer_id in self.current_followers}
            if self.expected and self.expected <= here:
                await self.leader_assemble_group()


def drop_small_shares(shares: Sequence[int], min_vector_size: int) -> tuple[int, ...]:
    """What each peer of a group averages, in proportion to the others: nothing where it would be fewer numbers than
    min_vector_size.

    :param shares: numbers that each would average

    hivemind drops nobody when all shares are small, as those of equals in a large group are.
    """
    total = sum(shares)
    # all peers see the same shares in the same order, and drop the same ones
    working = sorted(range(len(shares)), key=lambda index: -shares[index])
    while len(working) > 1 and shares[working[-1]] * total < min_vector_size * sum(shares[i] for i in working):
        working.pop()
    return tuple(share * (index in working) for index, share in enumerate(shares))


async def count_bytes(messages, direction: int):
    """Pass messages on, and add their sizes to TRAFFIC.

    :param direction: 0: sent, 1: received
    """
    async for message in messages:
        with TRAFFIC.get_lock():
            TRAFFIC[direction] += message.ByteSize()
        yield message


class VerifiedAverager(hivemind.DecentralizedAverager):
    """Tells whose data verifiably entered the average, as hivemind reports success for rounds that failed.

    The result of a round maps each peer that took part completely, as seen from here, to what it gathered: no sender
    was left out of the part that this peer averaged, and all parts came back. A round in which nobody else took part
    raises AllreduceException.
    """

    _expected: frozenset[bytes] | None = None
    #: whether to look for a group not much longer than matchmaking_time, when the epoch has ended
    gives_up_early = False

    def run(self) -> None:
        live_as_helper()
        super().run()

    @classmethod
    def get_stub(cls, *args, **kwargs):
        stub = super().get_stub(*args, **kwargs)
        aggregate_part, download_state = stub.rpc_aggregate_part, stub.rpc_download_state

        async def count_aggregate_part(inputs):
            return count_bytes(await aggregate_part(count_bytes(inputs, 0)), 1)

        async def count_download_state(request):
            return count_bytes(await download_state(request), 1)

        stub.rpc_aggregate_part, stub.rpc_download_state = count_aggregate_part, count_download_state
        return stub

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in count_bytes(super().rpc_aggregate_part(count_bytes(stream, 1), context), 0):
            yield message

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        async for message in count_bytes(super().rpc_download_state(request, context), 0):
            yield message

    def step(self, *args, allow_retries: bool = False, **kwargs):
        # a retry inside hivemind would start from tensors that the failed round has half averaged, in place, and waits
        # for others who have gone on
        return super().step(*args, allow_retries=allow_retries, **kwargs)

    def expect(self, peer_ids: Iterable[bytes]) -> None:
        """A group with these other peers in it is complete and starts at once, also one that has formed already."""
        if (expected := frozenset(peer_ids)) != self._expected:
            self._expected = expected
            self._outer_pipe.send(("_expect", [expected], {}))

    async def _expect(self, expected: frozenset[bytes]) -> None:
        """Runs in the averager's process."""
        # hivemind makes its matchmaking from a fixed class (hivemind/averaging/averager.py)
        self._matchmaking.__class__ = PromptMatchmaking
        # this is for groups whose keys wander, which ours do not, and refuses a group that is larger than the trainers'
        # target_group_size for the auxiliary peers in it
        self._matchmaking.group_key_manager.target_group_size = None
        self._matchmaking.expected = expected
        await self._matchmaking.start_when_complete()

    async def _step(self, *, step, **kwargs) -> None:
        start = asyncio.create_task(self._start_when_triggered(step))
        try:
            await super()._step(step=step, **kwargs)
        finally:
            start.cancel()

    async def _start_when_triggered(self, step) -> None:
        while step._trigger is None:  # made by the parent's first lines
            await asyncio.sleep(0)
        await step.wait_for_trigger()
        matchmaking = self._matchmaking
        if isinstance(matchmaking, PromptMatchmaking):
            await matchmaking.start_when_complete()
        if self.gives_up_early:
            await asyncio.sleep(matchmaking.min_matchmaking_time + matchmaking.request_timeout)
            is_looking = matchmaking.step_control is step and matchmaking.current_leader is None
            if is_looking and not matchmaking.assembled_group.done():
                matchmaking.assembled_group.set_exception(AllreduceException("no group has formed"))

    async def _run_allreduce_inplace_(self, tensors, group_info, *args, peer_fractions, **kwargs) -> None:
        peer_fractions = drop_small_shares(peer_fractions, self.allreduce_kwargs["min_vector_size"])
        # hivemind forgets to say who is auxiliary: such a peer would send all of its tensors, with a weight of zero
        modes = tuple(
            mode if (mode := read_gathered(data)[0]) == AveragingMode.AUX or fraction else AveragingMode.CLIENT
            for data, fraction in zip(group_info.gathered, peer_fractions, strict=True)
        )
        options = dict(peer_fractions=peer_fractions, modes=modes, **kwargs)
        await super()._run_allreduce_inplace_(tensors, group_info, *args, **options)

    async def _aggregate_with_group(self, group_info, **kwargs):
        watch = asyncio.create_task(self._end_when_a_peer_is_gone(group_info))
        try:
            gathered = await super()._aggregate_with_group(group_info, **kwargs)
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
        return {peer_id: data for peer_id, data in gathered.items() if peer_id in averaged}

    async def _end_when_a_peer_is_gone(self, group_info) -> None:
        """End the running round as soon as a peer that it waits for does not answer any more: it has failed anyway, and
        hivemind waits for twice next_chunk_timeout."""
        while True:
            await asyncio.sleep(FIRST_LOOK)
            runner = await asyncio.shield(self._running_groups[group_info.group_id])
            parts, received = runner.tensor_part_container, runner.tensor_part_reducer.num_parts_received
            awaited = {
                peer_id
                for peer_id, sent in zip(runner.sender_peer_ids, received, strict=True)
                if sent < runner.tensor_part_reducer.num_parts and peer_id not in runner.banned_senders
            }
            for index, peer_id in enumerate(runner.ordered_peer_ids):
                if parts._outputs_registered_by_peer[index] < parts.num_parts_by_peer[index]:
                    awaited.add(peer_id)
                if runner.modes[index] == AveragingMode.CLIENT:  # which cannot be pinged
                    awaited.discard(peer_id)
            awaited = [peer_id.to_bytes() for peer_id in awaited - {self.peer_id}]
            if awaited:
                question = partial(find_answering_peers, peer_ids=awaited)
                if gone := set(awaited) - await self.dht.run_coroutine(question, return_future=True):
                    runner.finalize(exception=AllreduceException(f"peer {name_peers(gone)} is gone"))
                    return


def is_standing(item: object) -> bool:
    """Whether a peer has gathered what it should: [epoch, whether the whole swarm averages in step, lineage]."""
    return isinstance(item, (list, tuple)) and [type(part) for part in item] == [int, bool, str]


class GradientAverager(hivemind.optim.grad_averager.GradientAverager, VerifiedAverager):
    """Keeps the gradients of a failed round, which hivemind loses: it empties the accumulators when a round starts.

    Averages peers of one state only. hivemind lets a peer that has lost a round average its old gradients with
    everybody's new ones, for ever one epoch behind; and two halves of a swarm that could not reach each other for a
    while, or a peer that has stepped alone, go on with other weights and moments than the rest. So peers gather where
    they stand, their epoch and their lineage (see StateAverager): the majority goes on, the others take over its state.
    And spares a joining peer a second download: hivemind fetches the averaged gradients of a peer and drops them.
    """

    #: set by the optimizer: [epoch, whether the whole swarm averages in step, lineage] of the gradients
    standing = [0, False, ""]

    def __init__(self, *args, **kwargs):
        self._in_flight = self._kept = None
        super().__init__(*args, **kwargs)

    def schedule_step(self, *args, **kwargs):
        return super().schedule_step(*args, gather=self.standing, **kwargs)

    async def _aggregate_with_group(self, group_info, **kwargs):
        # all see the same list of what each has gathered, so all leave out the same peers, and nobody waits for those
        of_group = [read_gathered(data) for data in group_info.gathered]
        # auxiliary peers have no gradients, and average anybody's
        trainers = [index for index, (mode, _) in enumerate(of_group) if mode != AveragingMode.AUX]
        if trainers and all(is_standing(of_group[index][1]) and of_group[index][1][1] for index in trainers):
            standings = {index: (of_group[index][1][0], of_group[index][1][2]) for index in trainers}
            votes = Counter(standings.values())
            # among equals not one that is far behind; then that of a peer that gives it to anybody, as clients give
            # theirs only to peers that they have called
            newest = max(epoch for epoch, _ in votes)
            given = {standings[index] for index in trainers if of_group[index][0] != AveragingMode.CLIENT}
            chosen = max(votes, key=lambda item: (votes[item], item[0] >= newest - 1, item in given, item))
            donors = [group_info.peer_ids[index] for index in trainers if standings[index] == chosen]
            if self.peer_id not in donors and self.mode != AveragingMode.AUX:
                # one that is left alone cannot step now; two or more are about to
                raise OutOfStep(chosen[0] + (len(donors) > 1), [peer_id.to_bytes() for peer_id in donors])
            if len(donors) == 1:
                raise AllreduceException(f"nobody else of the same state in a group of {len(trainers)} trainers")
            staying = [index for index in range(len(of_group)) if standings.get(index, chosen) == chosen]
            if all(of_group[index][0] == AveragingMode.CLIENT for index in staying):
                raise AllreduceException(f"none of the {len(staying)} peers of the same state accepts connections")
            group_info = dataclasses.replace(
                group_info,
                peer_ids=tuple(group_info.peer_ids[index] for index in staying),
                gathered=tuple(group_info.gathered[index] for index in staying),
            )
        averaged = await super()._aggregate_with_group(group_info, **kwargs)
        return dict.fromkeys(averaged, group_info.group_id)

    def step(self, *args, **kwargs):
        self._in_flight = self._snapshot()
        return super().step(*args, **kwargs)

    def _snapshot(self) -> tuple:
        sums = [accumulator.clone() for accumulator in self._grad_accumulators() if self.local_samples_accumulated]
        return sums, self.local_samples_accumulated, self.local_times_accumulated, self._anchor_batch_size

    def keep_gradients(self) -> None:
        """Put the gradients of the round that just failed aside, for the next `accumulate_grads_`."""
        self._kept, self._in_flight = self._in_flight if self._in_flight[1] else None, None
        self.notify_used_averaged_gradients()

    def keep_accumulated(self) -> None:
        """Put the gradients accumulated so far aside, for the next `accumulate_grads_`."""
        self._kept = self._snapshot() if self.local_samples_accumulated else self._kept

    def drop_kept(self) -> None:
        """Forget the gradients that were put aside."""
        self._kept = None

    @property
    def kept_samples(self) -> int:
        """Samples whose gradients wait for the next round."""
        return self._kept[1] if self._kept else 0

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        # merged here, in the loop's own thread: after a delayed round, hivemind empties the accumulators once more
        if self._kept:
            sums, samples, times, anchor = self._kept
            self._kept = None
            self._anchor_batch_size = self._anchor_batch_size or anchor
            for accumulator, kept in zip(self._grad_accumulators(), sums, strict=True):
                accumulator.add_(kept.to(accumulator.device), alpha=anchor / self._anchor_batch_size)
            self.local_samples_accumulated += samples
            self.local_times_accumulated += times
        super().accumulate_grads_(batch_size)

    def load_state_from_peers(self, **kwargs) -> None:
        return None

    def accumulate_on(self, device: torch.device) -> None:
        """Move the accumulators to where the gradients are, so that accumulating needs no transfer."""
        self._local_accumulators = tuple(accumulator.to(device) for accumulator in self._local_accumulators)


# --- taking over the swarm's state ------------------------------------------------------------------------------------


# of the numbers and settings in an optimizer's state
PLAIN_TYPES = (int, float, str, type(None))


def list_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, in the order of its groups, in which peers exchange them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


class UnusableState(Exception):
    """A peer's state that this peer cannot or should not take over."""


class StaleState(UnusableState):
    """A peer's state of an earlier epoch than the one that is wanted."""


class StateAverager(TrainingStateAverager, VerifiedAverager):
    """Gives whole states to peers that join, and takes them: from another donor when one fails, in bounded time.

    hivemind (note 25) tries for ever, believes what it gets, and ends with the first answer that is truncated.

    Clients give no state in hivemind: where all trainers are clients nobody could join, and who has lost a round would
    be lost. Here they give it to peers that they have called, and auxiliary peers, which all clients call, pass it on.
    """

    #: who has missed the others' group would wait here for averaging_timeout, and its next step with it
    gives_up_early = True
    #: names the common history of peers whose state is the same: a digest of the groups that each epoch was made with
    lineage = ""
    #: id of the group whose gradient the next step takes, or of this peer that is alone; set by the optimizer
    group_id = b""

    def __init__(self, *args, **kwargs):
        self._lock_step = threading.Lock()
        # states that are being given just now, and how often clients have broken off
        self._giving, self._broken = 0, Counter()
        # of the last download: bytes, numbers, milliseconds
        self.received = multiprocessing.Array(ctypes.c_longlong, 3)
        super().__init__(*args, **kwargs)

    def offer_states(self) -> None:
        """From now on give this client's state to whom it has called, or, if auxiliary, pass on those of clients."""
        if self.mode == AveragingMode.AUX:
            self.allow_state_sharing = True
        else:
            self._outer_pipe.send(("_give_as_client", [], {}))

    async def _give_as_client(self) -> None:
        """Runs in the process of a client's averager, for ever."""
        name = self._get_handle_name(self.prefix, "rpc_download_state")
        options = dict(input_protobuf_type=averaging_pb2.DownloadRequest, stream_output=True)
        await self._p2p.add_protobuf_handler(name, self.rpc_download_state, **options)
        self._allow_state_sharing.value = True
        while True:
            self._state_updated.clear()
            try:
                await self.dht.store(
                    f"{self._state_key}.clients",
                    subkey=self.peer_id.to_bytes(),
                    value=self.state_sharing_priority,
                    expiration_time=get_dht_time() + self.declare_state_period,
                    return_future=True,
                )
            except Exception as e:  # of whatever kind the DHT's process raises: the next one may work
                logger.debug(f"could not tell of this client's state: {e!r}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state_updated.wait(), self.declare_state_period / 2)

    @property
    def state_sharing_priority(self) -> float:
        # not the epoch that an auxiliary peer is at: its own state is no trainer's
        return RELAY if self.mode == AveragingMode.AUX else super().state_sharing_priority

    @state_sharing_priority.setter
    def state_sharing_priority(self, value: float) -> None:
        TrainingStateAverager.state_sharing_priority.fset(self, value)

    @property
    def _state_key(self) -> str:
        return self._matchmaking.group_key_manager.prefix

    async def _fetch_epochs(self, key: str) -> dict[PeerID, float]:
        """The epochs of the states that other peers say they give."""
        entry = await self.dht.get(f"{self._state_key}.{key}", latest=True, return_future=True)
        declared = entry.value.items() if entry is not None and isinstance(entry.value, dict) else ()
        return {
            PeerID(peer): float(info.value)
            for peer, info in declared
            if isinstance(info, ValueWithExpiration)
            and isinstance(info.value, (int, float))
            and info.value >= 0  # no NaN
            and peer != self.peer_id.to_bytes()
        }

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        if self.mode == AveragingMode.NODE:
            async for message in super().rpc_download_state(request, context):
                yield message
        elif self.allow_state_sharing and self._giving < MAX_GIVING:
            # through a volunteer's line at home
            self._giving += 1
            try:
                is_client = self.mode == AveragingMode.CLIENT
                source = super().rpc_download_state if is_client else self._pass_on
                async for message in source(request, context):
                    yield message
            finally:
                self._giving -= 1

    async def _pass_on(self, request, context: P2PContext) -> AsyncIterator[averaging_pb2.DownloadData]:
        """The state of a client; of another one when it gives none."""
        epochs = await self._fetch_epochs("clients")
        epochs = {peer: epoch for peer, epoch in epochs.items() if epoch < math.inf and peer != context.remote_id}
        # any of those who are not behind, as a stranger may boast of the highest epoch; first who never failed
        usual = statistics.median(epochs.values()) if epochs else 0
        clients = [peer for peer, epoch in epochs.items() if epoch >= usual]
        for peer in sorted(clients, key=lambda peer: (self._broken[peer], random.random())):
            passed = 0
            try:
                call = self.get_stub(self._p2p, peer, namespace=self.prefix).rpc_download_state(request)
                stream = await asyncio.wait_for(call, FIRST_ANSWER)
                # sooner than who is waiting here gives up
                first = await asyncio.wait_for(anext(stream), FIRST_ANSWER)
                metadata = self.serializer.loads(first.metadata)
                first.metadata = self.serializer.dumps(metadata | {"origin": str(peer)})
                rest = aiter_with_timeout(stream, timeout=self.next_chunk_timeout)
                async for message in count_bytes(achain(as_aiter(first), rest), 0):
                    passed += 1
                    yield message
                return
            except Exception as e:  # a stranger's bytes and a broken network raise whatever they like
                logger.debug(f"the state of {peer} could not be passed on: {e!r}")
            self._broken[peer] += 1
            if passed:
                return

    def step(self, *args, increment_epoch: bool = False, **kwargs):
        if self.mode == AveragingMode.AUX:
            # or an auxiliary peer misses the next round while it waits here for a group
            kwargs["delay_averaging"] = True
        if not increment_epoch:
            return super().step(*args, **kwargs)
        # hivemind counts the epoch first and steps then: who downloads in between gets the old parameters as new ones
        with self._lock_step:
            result = super().step(*args, increment_epoch=True, **kwargs)
            history = f"{self.lineage} {self.local_epoch} {self.group_id.hex()}"
            self.lineage = hashlib.sha256(history.encode()).hexdigest()[:16]
            self._declare_as_client()
            return result

    def _declare_as_client(self) -> None:
        if self.client_mode:
            self._state_sharing_priority.value = self.local_epoch
            self._outer_pipe.send(("_trigger_declare_load_state", [], {}))

    def get_current_state(self):
        with self._lock_step:
            metadata, tensors, infos = super().get_current_state()
            # copies, or the next step changes what is still being sent
            return metadata | {"lineage": self.lineage}, [tensor.clone() for tensor in tensors], infos

    def load_state_from_peers(
        self, min_epoch: int = 0, donors: Sequence[bytes] = (), avoid: Sequence[bytes] = (), timeout: float = 600.0
    ) -> bool:
        """Download the state of the peer that is furthest, and take it over as a whole or not at all.

        :param min_epoch: wait some seconds for a state of this epoch before taking an earlier one
        :param donors: ids of peers to ask before the others
        :param avoid: ids of peers to ask last
        :param timeout: seconds for one donor's whole state
        :returns: whether parameters, optimizer, epoch and lineage are now that peer's
        """
        future = self.start_download(min_epoch, donors, avoid, timeout)
        targets = (*list_params(self.optimizer), *self.extra_tensors)
        numbers = sum(map(torch.Tensor.numel, (*targets, *dump_optimizer_state(self.optimizer)[1])))
        next_report = time.monotonic()
        while True:
            try:
                loaded = future.result(timeout=0.5)
                break
            except concurrent.futures.TimeoutError:
                received_bytes, received_numbers, milliseconds = self.received
                if received_numbers and time.monotonic() >= next_report + PROGRESS_PERIOD:
                    next_report = time.monotonic()
                    logger.info(
                        f"downloading the swarm's state: {received_numbers / numbers:.0%}, "
                        f"{received_bytes / 1e6:.1f} MB at {received_bytes * 8e-3 / max(1, milliseconds):.1f} Mbit/s"
                    )
                if STOP_REQUESTED.is_set():
                    return False
        if loaded is None:
            return False
        self.take_over(*loaded)
        return True

    def start_download(
        self, min_epoch: int = 0, donors: Sequence[bytes] = (), avoid: Sequence[bytes] = (), timeout: float = 600.0
    ) -> MPFuture:
        """Begin to download a state, see `load_state_from_peers`, without waiting for it.

        :returns: of (metadata, tensors) to give to `take_over`, or of None: no peer gave its state. metadata["epoch"],
            and metadata["donor"]: the id of the peer that gave it
        """
        future = MPFuture()
        # what clients declare may lag behind what they have, and an auxiliary peer has no state of its own to keep
        lowest = 0 if self.mode == AveragingMode.AUX else min(min_epoch, self.local_epoch)
        options = dict(min_epoch=min_epoch, lowest_epoch=lowest, donors=donors, avoid=avoid, timeout=timeout)
        self._outer_pipe.send(("_load_state_from_peers", [], dict(future=future, **options)))
        return future

    def take_over(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Make a downloaded state this peer's own."""
        targets = (*list_params(self.optimizer), *self.extra_tensors)
        # the run's own: all peers have the same, unless one lies
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        # an auxiliary peer has nothing to average, and must not wait here for a round of the others
        averaged = contextlib.nullcontext() if self.mode == AveragingMode.AUX else self.lock_averaged_tensors
        with self._lock_step, torch.no_grad(), averaged:
            load_optimizer_state(self.optimizer, metadata["optimizer_metadata"], tensors[len(targets) :])
            for group, own in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(own)
            for target, tensor in zip(targets, tensors, strict=False):
                target.copy_(tensor)
            self.set_epoch(metadata["epoch"])
            self.lineage = metadata["lineage"]
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        if not self.reuse_tensors and self.mode != AveragingMode.AUX:
            self._load_local_tensors_into_averager_()

    def set_epoch(self, epoch: int) -> None:
        """Move epoch and learning rate to this epoch, also back; hivemind's only ever go forward."""
        if self.scheduler is not None:
            self.scheduler.last_epoch, self.scheduler._step_count = epoch - 1, epoch
            self.scheduler.step()
        self.local_epoch = epoch
        self._declare_as_client()

    async def _load_state_from_peers(self, future, timeout: float, **options) -> None:
        """Runs in the averager's process."""
        try:
            future.set_result(await self._download_state(timeout, **options))
        finally:
            if not future.done():
                future.set_result(None)

    async def _download_state(
        self, timeout: float, min_epoch: int, lowest_epoch: int, donors: Sequence[bytes], avoid: Sequence[bytes]
    ) -> tuple[dict, list[torch.Tensor]] | None:
        failures: dict[PeerID, int] = Counter()
        for attempt in range(DOWNLOAD_TRIES):
            await asyncio.sleep(DOWNLOAD_PAUSE * bool(attempt))
            # the last time, a state that is older than wanted is better than none
            wanted = min_epoch if attempt < DOWNLOAD_TRIES - 1 else lowest_epoch
            epochs = await self._fetch_epochs("all_averagers")
            # trainers that have what is wanted go before auxiliary peers, which have it from a client
            kinds = {peer: 2 if wanted <= epoch < RELAY else 1 for peer, epoch in epochs.items()}
            if self.mode != AveragingMode.CLIENT:
                # clients last, as only those reach them whom they have called
                has_newest = any(min_epoch - 1 <= epoch < RELAY for epoch in epochs.values())
                clients = await self._fetch_epochs("clients")
                epochs |= {peer: clients[peer] for peer in clients if not has_newest or peer.to_bytes() in donors}
            ranks = {}
            for peer, epoch in epochs.items():
                if epoch >= lowest_epoch and failures[peer] < (2 if epoch < RELAY else 6):
                    is_donor, is_avoided = peer.to_bytes() in donors, peer.to_bytes() in avoid
                    rank = (-failures[peer], is_donor, not is_avoided, kinds.get(peer, 0), epoch, random.random())
                    ranks[peer] = rank
            if not ranks and attempt >= 3:
                break  # nobody is there, or nobody who can give a state
            for peer in sorted(ranks, key=ranks.get, reverse=True):
                try:
                    return await asyncio.wait_for(self._download_from(peer, wanted), timeout)
                except StaleState:
                    continue
                except Exception as e:  # a stranger's bytes and a broken network raise whatever they like
                    failures[peer] += 1
                    reason = str(e) if isinstance(e, UnusableState) else f"{type(e).__name__}: {e}".splitlines()[0]
                    logger.warning(f"the state of peer {peer} is of no use ({reason}), asking another one")
        return None

    async def _download_from(self, peer: PeerID, min_epoch: int) -> tuple[dict, list[torch.Tensor]]:
        """One peer's state, checked; raises UnusableState, TimeoutError or what the network and the bytes cause."""
        metadata, expected, tensors, parts = None, [], [], []
        self.received[:], start = (0, 0, 0), time.monotonic()

        def complete_tensor() -> None:
            tensor = deserialize_torch_tensor(combine_from_streaming(parts))
            shape, dtype = expected[len(tensors)] if len(tensors) < len(expected) else (None, None)
            if tensor.shape != shape:
                raise UnusableState(f"tensor {len(tensors)} has the shape {tuple(tensor.shape)}")
            if dtype not in (None, tensor.dtype):
                raise UnusableState(f"tensor {len(tensors)} is of type {tensor.dtype}")
            if not tensor.isfinite().all():
                raise UnusableState(f"tensor {len(tensors)} is not finite")
            tensors.append(tensor)
            self.received[1] += tensor.numel()
            parts.clear()

        stream = await self.get_stub(self._p2p, peer, namespace=self.prefix).rpc_download_state(
            averaging_pb2.DownloadRequest()
        )
        try:
            async for message in aiter_with_timeout(stream, timeout=self.next_chunk_timeout):
                self.received[0] += message.ByteSize()
                self.received[2] = int(1000 * (time.monotonic() - start))
                if metadata is None:
                    metadata = self.serializer.loads(message.metadata)
                    expected = self._check_metadata(metadata, min_epoch)
                if message.tensor_part.dtype and parts:  # the first part of a tensor names its type
                    complete_tensor()
                parts.append(message.tensor_part)
        finally:
            await stream.aclose()
        if parts:
            complete_tensor()
        if metadata is None:
            raise UnusableState("it gave none")
        if len(tensors) != len(expected):
            raise UnusableState(f"it ended after {len(tensors)} of {len(expected)} tensors")
        # an auxiliary peer says whose state it has passed on
        return metadata | {"donor": str(metadata.get("origin", peer))[:100]}, tensors

    def _check_metadata(self, metadata: object, min_epoch: int) -> list[tuple[torch.Size, torch.dtype | None]]:
        """Shapes and types (None: any) of the tensors that have to follow; raises UnusableState where something is
        missing or wrong."""
        if not isinstance(metadata, dict) or not isinstance(metadata.get("lineage"), str):
            raise UnusableState("it has no lineage")
        if type(metadata.get("epoch")) is not int:
            raise UnusableState("it has no epoch")
        if metadata["epoch"] < min_epoch:
            raise StaleState(f"it is of epoch {metadata['epoch']}, {min_epoch} is wanted")
        params = list_params(self.optimizer)
        expected = [(tensor.shape, tensor.dtype) for tensor in (*params, *self.extra_tensors)]
        own, own_tensors = dump_optimizer_state(self.optimizer)
        theirs, count = metadata.get("optimizer_metadata"), 0
        if not isinstance(theirs, list) or len(theirs) != len(own):
            raise UnusableState("its optimizer is another one")
        for item, own_item in zip(theirs, own, strict=True):
            own_tensor = own_tensors[own_item["index"]] if own_item["type"] == "tensor" else torch.zeros(())
            shape = own_tensor.shape
            if item == {"type": "tensor", "index": count}:
                # single numbers are tensors at one time and not at another: LAMB's trust ratio
                expected.append((shape, own_tensor.dtype if len(shape) else None))
                count += 1
            elif len(shape) or set(item) != {"type", "value"} or not isinstance(item["value"], PLAIN_TYPES):
                raise UnusableState("its optimizer is another one")
        return expected


# --- who is there -----------------------------------------------------------------------------------------------------


def name_peers(peer_ids: Iterable[bytes]) -> str:
    return ", ".join(str(PeerID(peer_id)) for peer_id in peer_ids)


async def find_answering_peers(dht: hivemind.DHT, node: DHTNode, peer_ids: list[bytes]) -> set[bytes]:
    """Runs in the DHT's process: those of these peers that answer a ping (within 3 s)."""
    answers = await asyncio.gather(*(node.protocol.call_ping(PeerID(peer_id)) for peer_id in peer_ids))
    return {peer_id for peer_id, answer in zip(peer_ids, answers, strict=True) if answer is not None}


class ProgressTracker(hivemind.optim.progress_tracker.ProgressTracker):
    """Counts only peers that are there, and reports at most once in min_refresh_period within an epoch.

    hivemind counts a peer until its last record expires: for all that time a dead peer's samples are expected and
    others wait for it in each round (note 22). Here a peer that was found silent does not count until it reports
    something new. And hivemind reports each step (note 12): a signature and a message to several peers, and nobody
    looks more often than min_refresh_period.
    """

    _last_report = -float("inf")

    def __init__(self, *args, **kwargs):
        #: newest records of the other peers, by peer id
        self.others: dict[bytes, LocalTrainingProgress] = {}
        #: what the records of silent peers said when they fell silent: (epoch, samples)
        self.silent: dict[bytes, tuple[int, int]] = {}
        self.last_fetch = -float("inf")
        #: the epoch in which peers that are behind have been waited for long enough
        self.impatient_epoch = -1
        super().__init__(*args, **kwargs)

    def _parse_swarm_progress_data(self, metadata):
        own_id = self.dht.peer_id.to_bytes()
        newest: dict[bytes, tuple[bytes, LocalTrainingProgress]] = {}
        for key, entry in metadata.items() if isinstance(metadata, dict) else ():
            if entry.value is not None:
                record = LocalTrainingProgress.parse_obj(entry.value)
                # a peer that was restarted has the records of both lives
                if record.peer_id not in newest or record.time > newest[record.peer_id][1].time:
                    newest[record.peer_id] = key, record
        # anybody may sign "epoch 10**9" with a fresh key, and everybody would ask for that state
        records = [(peer_id, record) for peer_id, (_, record) in newest.items() if peer_id != own_id]
        self.others = dict(select_believable(records, self.local_progress.epoch))
        newest = {peer_id: item for peer_id, item in newest.items() if peer_id == own_id or peer_id in self.others}
        for peer_id, said in list(self.silent.items()):
            record = self.others.get(peer_id)
            if record is None:
                del self.silent[peer_id]
            elif (record.epoch, record.samples_accumulated) != said:
                del self.silent[peer_id]
                logger.info(f"peer {PeerID(peer_id)} is back, at epoch {record.epoch}")
        counted = {key: metadata[key] for peer_id, (key, _) in newest.items() if peer_id not in self.silent}
        if all(record.client_mode for record in self.present.values()):
            # hivemind would not look at their epochs, as clients give no state; here they do
            for key, entry in counted.items():
                counted[key] = ValueWithExpiration({**entry.value, "client_mode": False}, entry.expiration_time)
        if own_id in newest:  # what the others were told last is older
            own_key = newest[own_id][0]
            counted[own_key] = ValueWithExpiration(self.local_progress.dict(), metadata[own_key].expiration_time)
        self.last_fetch = time.monotonic()
        progress = super()._parse_swarm_progress_data(counted)
        # hivemind does not count a peer that has not reported yet, so that it makes its first step alone; and counts
        # one that is far behind, for which the others would wait in each round
        progress.num_peers = len(self.in_step) + 1
        return progress

    @property
    def present(self) -> dict[bytes, LocalTrainingProgress]:
        """Newest records of the other peers that are not silent, by peer id."""
        return {peer_id: record for peer_id, record in list(self.others.items()) if peer_id not in self.silent}

    @property
    def in_step(self) -> list[bytes]:
        """Ids of the other peers that are there and at this peer's epoch, or about to be."""
        # who is one epoch behind takes over the state just now; worth to wait for a little, once
        epoch = self.local_progress.epoch - (self.local_progress.epoch != self.impatient_epoch)
        return [peer_id for peer_id, record in self.present.items() if record.epoch >= epoch]

    @contextlib.contextmanager
    def step_aside(self) -> Iterator[None]:
        """For what takes this peer's time between two steps: the others neither count on its samples meanwhile nor wait
        for it in a round, as its record names an epoch too long past for that; nor do they take it for slow later."""
        own = self.local_progress
        with self.performance_ema.pause():
            # at first, no epoch is too long past; a newcomer has not announced itself yet
            if own.epoch >= 2 and self.present and not self.shutdown_triggered.is_set():
                self.local_progress = self._get_local_progress(own.epoch - 2, 0)
                self.announce()
            try:
                yield
            finally:
                if self.local_progress is not own:
                    self.local_progress = self._get_local_progress(own.epoch, own.samples_accumulated)
                    self.announce()
                    self.fetch_soon(0.0)

    def leave_out(self, peer_ids: Iterable[bytes]) -> None:
        """From now on these peers do not count, until they report something new."""
        gone = [peer_id for peer_id in peer_ids if peer_id in self.present]
        for peer_id in gone:
            self.silent[peer_id] = self.others[peer_id].epoch, self.others[peer_id].samples_accumulated
        if gone:
            logger.warning(f"no answer from peer {name_peers(gone)}: going on with {len(self.present)} other peers")
            self.fetch_soon(0.0)

    def fetch_soon(self, seconds: float) -> None:
        """Look at the swarm's progress again after this time."""
        self.global_progress.next_fetch_time = get_dht_time() + seconds
        self.global_state_updated.set()

    def fetch_now(self, timeout: float) -> None:
        """Look at the swarm's progress at once. The caller has paused updates."""
        entry = self.dht.get(self.training_progress_key, latest=True, return_future=True).result(timeout=timeout)
        self.global_progress = self._parse_swarm_progress_data(entry.value if entry else None)

    def announce(self) -> None:
        """Tell the others that this peer is there. hivemind does so when it has computed something first: the others
        would go into the next round without it."""
        self.dht.store(
            self.training_progress_key,
            subkey=self._local_public_key,
            value=self.local_progress.dict(),
            expiration_time=get_dht_time() + self.metadata_expiration,
            return_future=True,
        )

    def report_local_progress(self, local_epoch: int, *args, **kwargs) -> None:
        has_new_epoch = local_epoch != self.local_progress.epoch
        super().report_local_progress(local_epoch, *args, **kwargs)
        now = time.monotonic()
        if has_new_epoch or now - self._last_report >= self.min_refresh_period:
            self._last_report = now
        else:
            self.should_report_progress.clear()


class Optimizer(hivemind.Optimizer):
    """hivemind.Optimizer whose failed rounds lose no gradients and take no step, and that waits for nobody in vain.

    After a failed round the epoch stays, the gradients are kept, and a later `step` tries again.
    """

    #: peers whose gradients verifiably entered the last step, this one included
    averaged_with = 1
    #: rounds of this peer that came to an average, and to nothing
    rounds = 0
    failed_rounds = 0
    #: samples of this peer in the last step, and in all steps together
    epoch_samples = 0
    total_samples = 0
    #: how often in a row a downloaded state was already behind the swarm when it arrived
    late_downloads = 0
    _download_after = -float("inf")  # time before which no download is tried
    _retry_after = -float("inf")  # time of the look at the swarm's progress before which no round is tried
    _questions: list = []  # pings under way
    #: of an auxiliary peer: when its epoch began
    _epoch_start = -float("inf")

    def __init__(self, *args, **kwargs):
        #: seconds spent so far while a group formed, and while gradients were averaged
        self.round_seconds = {"waiting": 0.0, "averaging": 0.0}
        super().__init__(*args, **kwargs)

    def accumulate_on(self, device: torch.device) -> None:
        """Accumulate gradients on the model's device; call it once, after the model has moved there."""
        self.grad_averager.accumulate_on(device)

    def training_state(self) -> dict:
        """A copy of all that this peer's next step depends on but its gradients, at any moment between two steps.

        Without waiting for an averaging of parameters that runs in the background: for some of them the copy may hold
        the values before it, for others those after it, as all peers do that lose their connection in it.

        :returns: parameters (a list, in the order of the param groups), optimizer and scheduler (their state_dict),
            local_epoch, lineage, total_samples; all of it of types that torch.load reads with weights_only=True
        """
        averager = self.state_averager
        with averager.lock_optimizer, torch.no_grad():
            # a step in the background counts when it has ended, which is when it moves the schedule on
            return {
                "parameters": [param.detach().clone() for param in list_params(self.opt)],
                "optimizer": copy.deepcopy(self.opt.state_dict()),
                "scheduler": copy.deepcopy(averager.scheduler.state_dict()),
                "local_epoch": averager.scheduler.last_epoch,
                "lineage": averager.lineage,
                "total_samples": self.total_samples,
            }

    def load_training_state(self, state: dict) -> None:
        """Take over what `training_state` returned, also that of another process or device.

        Learning rate and other options remain those of this process, which the run's contract names. hivemind's
        load_state_dict would leave the parameters, the schedule, and what the swarm hears of this peer (note 26).

        :raises ValueError: the tensors have other shapes than this optimizer's; nothing has changed then
        """
        averager, epoch = self.state_averager, state["local_epoch"]
        own = self.opt.state_dict()
        params = list_params(self.opt)
        moments = state["optimizer"]["state"]

        def shapes(parameters: list[torch.Tensor], moments: dict[int, dict]) -> list:
            # single numbers are tensors at one time and not at another: LAMB's trust ratio
            return [tuple(tensor.shape) for tensor in parameters] + [
                {name: tuple(getattr(value, "shape", ())) for name, value in entry.items()}
                for _, entry in sorted(moments.items())
            ]

        if shapes(state["parameters"], moments) != shapes(params, own["state"]):
            raise ValueError(
                "its optimizer is another one (--optim, --min_8bit_size), or its tensors have other shapes"
            )
        with averager.lock_optimizer, averager.lock_averaged_tensors, torch.no_grad():
            for param, saved in zip(params, state["parameters"], strict=True):
                param.copy_(saved)
            # a copy: torch would keep these tensors and change them in place
            self.opt.load_state_dict({"state": copy.deepcopy(moments), "param_groups": own["param_groups"]})
            scheduler = averager.scheduler
            scheduler.load_state_dict({**state["scheduler"], "base_lrs": scheduler.base_lrs})
            averager.set_epoch(epoch)
            averager.lineage = state.get("lineage", "")
        averager._apply_optimizer_parameters_()
        self.grad_averager.reset_accumulated_grads_()
        self.total_samples = state["total_samples"]
        with self.tracker.pause_updates():
            self.tracker.update_epoch(epoch)
            if not self.tracker.present:  # an epoch that this peer was at before counts no more
                self.tracker.global_progress.epoch = epoch
        self._should_check_synchronization_on_update = True
        if not self.client_mode:
            # newcomers ask those who are furthest
            averager.state_sharing_priority = self.grad_averager.state_sharing_priority = epoch

    def step(self, closure=None, batch_size: int | None = None, grad_scaler=None):
        if self.auxiliary:
            self._follow_trainers()
            if len(self.tracker.in_step) < 2:
                return None  # who is alone needs no help
        elif self._should_load_state_from_peers():
            # hivemind drops what this step has computed
            self.grad_averager.accumulate_grads_(batch_size)
            self.load_state_from_peers()
            return None
        return super().step(closure, batch_size, grad_scaler)

    def seconds_to_next_step(self, at_most: float) -> float:
        """How long an auxiliary peer may do nothing: it has to be there when the trainers' epoch is about to end."""
        return min(at_most, max(0.05, self.tracker.estimated_next_update_time - self.matchmaking_time - get_dht_time()))

    def _follow_trainers(self) -> None:
        """Bring an auxiliary peer to the trainers' epoch: it has no progress of its own.

        That is the highest epoch that two of them have reached, as one alone cannot be helped. Forward when they have
        stepped without it; back when they have lost a round that it took for averaged.
        """
        records = sorted(self.tracker.present.values(), key=lambda record: -record.epoch)
        if len(records) < 2:
            return
        epoch, reported = records[1].epoch, records[1].time > self._epoch_start + FIRST_LOOK
        if epoch == self.local_epoch or (epoch < self.local_epoch and not reported):
            return
        if self.scheduled_grads is not None and not self.scheduled_grads.done():
            if self.scheduled_grads.stage == AveragingStage.LOOKING_FOR_GROUP:
                self.scheduled_grads.cancel()
            else:
                self.scheduled_grads.allow_allreduce()  # others are waiting for this peer
        self.scheduled_grads, self._epoch_start = None, get_dht_time()
        self.state_averager.set_epoch(epoch)
        with self.tracker.pause_updates():
            self.tracker.update_epoch(epoch)
            self.tracker.global_progress.epoch = epoch
        self.tracker.fetch_soon(0.0)

    def _should_load_state_from_peers(self) -> bool:
        return time.monotonic() >= self._download_after and super()._should_load_state_from_peers()

    def load_state_from_peers(self, min_epoch: int | None = None, donors: Sequence[bytes] = ()) -> bool:
        """Take over the newest state of the swarm; gradients that are not yet averaged are kept.

        :param min_epoch: take an earlier state only after some seconds without this one; default: the swarm's epoch
        :param donors: ids of peers to ask first
        :returns: whether a peer gave it; otherwise the local state stays, and peers that do not answer do not count
            any more, so that training goes on without them
        """
        if self.scheduled_grads is not None and not self.scheduled_grads.done():
            if self.scheduled_grads.stage != AveragingStage.RUNNING_ALLREDUCE and self._averages_in_step():
                # the group would leave this peer out
                self.scheduled_grads.cancel()
            else:
                self._tag_along_with_zero_weight(self.scheduled_grads)
            self.scheduled_grads = None
        self.state_averager.step(wait_for_delayed_updates=True)
        old_epoch = self.local_epoch
        with self.tracker.performance_ema.pause():
            loaded = self.state_averager.load_state_from_peers(
                min_epoch=self.tracker.global_epoch if min_epoch is None else min_epoch,
                donors=donors,
                avoid=list(self.tracker.silent),
                timeout=self.load_state_timeout,
            )
        if not loaded:
            ahead = [peer_id for peer_id, record in self.tracker.present.items() if record.epoch > self.local_epoch]
            logger.warning("no peer gave its state: going on with the local one")
            self._question(ahead)
            self._download_after = time.monotonic() + RETRY_PERIOD
            return False

        self.grad_averager.keep_accumulated()
        if self.local_epoch - old_epoch > MAX_STALENESS and self.grad_averager.kept_samples:
            logger.warning(f"dropped {self.grad_averager.kept_samples} samples: their epoch {old_epoch} is too old")
            self.grad_averager.drop_kept()
        logger.info(
            f"took over the state of epoch {self.local_epoch} (was at {old_epoch}), kept the gradients of "
            f"{self.grad_averager.kept_samples} samples"
        )
        self.epoch_samples, self.averaged_with = 0, 1
        self.tracker.report_local_progress(self.local_epoch, samples_accumulated=0)
        self.grad_averager.reset_accumulated_grads_()
        if not self.client_mode:
            self.state_averager.state_sharing_priority = self.local_epoch
        if not self.auxiliary:
            self.tracker.announce()
        self._note_late_download()
        return True

    def _note_late_download(self) -> None:
        """Tell a peer that can never catch up why, and let it try less often."""
        with self.tracker.lock_global_progress, contextlib.suppress(concurrent.futures.TimeoutError):
            self.tracker.fetch_now(timeout=FETCH_TIMEOUT)
        epochs = self.tracker.global_epoch - self.local_epoch
        self.late_downloads = self.late_downloads + 1 if epochs > 0 else 0
        if self.late_downloads >= 3:
            megabytes, seconds = self.state_averager.received[0] / 1e6, max(1, self.state_averager.received[2]) / 1000
            pause = min(300.0, seconds * 2 ** (self.late_downloads - 3))
            logger.warning(
                f"cannot catch up: the state of {megabytes:.1f} MB took {seconds:.1f} s "
                f"({megabytes * 8 / seconds:.1f} Mbit/s), and meanwhile the swarm made {epochs} epochs of about "
                f"{seconds / epochs:.1f} s. It takes a faster connection, or a larger --target_batch_size for all. "
                f"Next try in {pause:.0f} s"
            )
            self._download_after = time.monotonic() + pause

    def _make_progress_tracker(self, target_batch_size: int, **kwargs) -> ProgressTracker:
        return ProgressTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
            **kwargs,
        )

    def _make_state_averager(self, **kwargs) -> StateAverager:
        averager = StateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            start=True,
            **kwargs,
        )
        end_when_it_dies(averager, "state averager")
        if self.client_mode:
            averager.offer_states()
        return averager

    def _make_gradient_averager(self, *args, **kwargs):
        averager = super()._make_gradient_averager(*args, **kwargs)
        end_when_it_dies(averager, "gradient averager")
        return averager

    def _maybe_schedule_gradient_averaging(self) -> None:
        self.grad_averager.standing = [self.local_epoch, self._averages_in_step(), self.state_averager.lineage]
        others = self.tracker.in_step
        for averager in (self.grad_averager, self.state_averager):
            averager.expect(others)
        # hivemind looks for a group in advance even for a peer that is alone, and cancels when the epoch ends: a round
        # that is cancelled late goes on all the same, with a newcomer and the gradients of an old epoch
        if self.tracker.global_progress.num_peers > 1 + self.auxiliary:
            before = self.scheduled_grads
            super()._maybe_schedule_gradient_averaging()
            if self.scheduled_grads is not before:
                # in good time: who is gone is known when the epoch ends
                self._question(others)

    def _maybe_schedule_state_averaging(self) -> None:
        if self.tracker.global_progress.num_peers > 1 + self.auxiliary:
            super()._maybe_schedule_state_averaging()

    def _begin_averaging_gradients(self, grad_scaler) -> bool:
        if self.scheduled_grads is not None and (self.scheduled_grads.triggered or self.scheduled_grads.done()):
            # hivemind steps alone when the group that it looked for in advance came to nothing, while others are there
            self.scheduled_grads = None
        if not self.delay_grad_averaging:
            self.averaged_with = 1
        self.state_averager.group_id = self.dht.peer_id.to_bytes()
        return super()._begin_averaging_gradients(grad_scaler)

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control) -> None:
        # hivemind would go on with its accumulators here, which are zeros by now (note 16)
        try:
            group = self._wait_for_round(maybe_step_control)
        except (Exception, asyncio.CancelledError) as e:
            if not maybe_step_control.done():
                maybe_step_control.cancel()
            self.grad_averager.keep_gradients()
            self.failed_rounds += 1
            self.averaged_with = 1
            raise AveragingFailed(f"{type(e).__name__}: {e}") from e
        self._load_averaged_gradients_into_optimizer_()
        self.averaged_with = len(group)
        if self._averages_in_step() and not self.auxiliary:
            self.state_averager.group_id = next(iter(group.values()))
            present, took_part = self.tracker.present, {peer_id.to_bytes() for peer_id in group}
            absent = [peer_id for peer_id in self.tracker.in_step if peer_id in present and peer_id not in took_part]
            # nobody can ping a peer in client mode
            self.tracker.leave_out(peer_id for peer_id in absent if present[peer_id].client_mode)
            self._question(absent)

    def _wait_for_round(self, control) -> dict:
        """The round's result. While no group is found, look whether anybody is there, and whether the others are here.

        hivemind waits for averaging_timeout in both cases: for dead peers whose records are still there (note 22), and
        for a round that was over before this peer came.
        """
        deadline = time.monotonic() + self.averaging_timeout
        next_look = time.monotonic() + FIRST_LOOK
        last = time.monotonic()
        while True:
            activity = "averaging" if control.stage == AveragingStage.RUNNING_ALLREDUCE else "waiting"
            try:
                return control.result(max(0.0, min(0.02, deadline - time.monotonic())))
            except concurrent.futures.TimeoutError:
                if control.done():
                    return control.result()  # just now, or its failure is a TimeoutError too
                if time.monotonic() >= deadline:
                    if control.stage == AveragingStage.LOOKING_FOR_GROUP and self._averages_in_step():
                        self.tracker.leave_out(self.tracker.present)
                    raise
            finally:
                now = time.monotonic()
                # in the background it costs the loop nothing
                self.round_seconds[activity] += (now - last) * (not self.delay_grad_averaging)
                last = now
            if control.stage != AveragingStage.LOOKING_FOR_GROUP:
                continue
            # whoever is there is enough
            self.grad_averager.expect(self.tracker.in_step)
            if time.monotonic() < next_look:
                continue
            if STOP_REQUESTED.is_set():
                raise AllreduceException("this peer was asked to stop")
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self.tracker.fetch_now(timeout=FETCH_TIMEOUT)
            if self._has_missed_the_round():
                raise AllreduceException("the others have stepped without this peer")
            self.tracker.impatient_epoch = self.local_epoch
            self._question(self.tracker.in_step, wait=True)
            if not self.tracker.in_step:
                raise AllreduceException("nobody else is there")
            next_look = time.monotonic() + FIRST_LOOK

    def _question(self, peer_ids: Iterable[bytes], wait: bool = False) -> None:
        """Ping those of these peers that have been quiet for longest; who does not answer does not count any more.

        :param wait: for the answers, up to about 3 s; otherwise they are dealt with when they come
        """
        present = self.tracker.present
        public = [peer_id for peer_id in peer_ids if peer_id in present and not present[peer_id].client_mode]
        asked = set(sorted(public, key=lambda peer_id: present[peer_id].time)[:QUESTIONED])
        if not asked:
            return
        future = self.dht.run_coroutine(partial(find_answering_peers, peer_ids=list(asked)), return_future=True)
        if wait:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self.tracker.leave_out(asked - future.result(timeout=FETCH_TIMEOUT))
        else:
            self._questions = [question for question in self._questions if not question.done()] + [future]
            future.add_done_callback(
                lambda done: done.cancelled() or done.exception() or self.tracker.leave_out(asked - done.result())
            )

    def _averages_in_step(self) -> bool:
        """Whether all peers go from epoch to epoch together.

        Not where the swarm averages in several groups, of which one may be faster, nor where rounds run on in the
        background: neighbours an epoch apart are nothing unusual there.
        """
        group_size = self.grad_averager.matchmaking_kwargs["target_group_size"]
        is_one_group = group_size is None or len(self.tracker.in_step) + (not self.auxiliary) <= group_size
        return is_one_group and not self.delay_grad_averaging

    def _has_missed_the_round(self) -> bool:
        """Whether the others have stepped without this peer.

        hivemind would then step by its own gradients alone; the averaging of parameters brings those together again,
        but not the moments.
        """
        return self._averages_in_step() and self.tracker.global_epoch > self.local_epoch

    def _update_global_epoch(self, grad_scaler) -> None:
        if self._has_missed_the_round():
            if time.monotonic() >= self._download_after and not self.auxiliary:
                self.load_state_from_peers()
            return
        if self.tracker.last_fetch < self._retry_after:
            return
        samples = self.grad_averager.local_samples_accumulated
        try:
            super()._update_global_epoch(grad_scaler)
            self.epoch_samples = samples
            self.total_samples += samples
            self.rounds += 1
            self._epoch_start = get_dht_time()
        except AveragingFailed as e:
            if self.auxiliary:
                # nothing of its own is lost; where the trainers are, it looks in the next step
                self._retry_after = time.monotonic()
                self.tracker.fetch_soon(0.0)
                return
            logger.warning(
                f"epoch {self.local_epoch}: averaging failed ({e}); the gradients of {self.grad_averager.kept_samples} "
                "samples go into the next round"
            )
            cause = e.__cause__
            if isinstance(cause, OutOfStep):
                self.load_state_from_peers(*cause.args)
            elif self._has_missed_the_round():
                self.load_state_from_peers()
            else:
                self._question(self.tracker.present)
                self._retry_after = time.monotonic() + RETRY_AFTER
                self.tracker.fetch_soon(RETRY_AFTER)


def initialize_optimizer_state_(optimizer: torch.optim.Optimizer) -> None:
    """Fill the optimizer's state with zeros.

    hivemind needs the tensors of the state before the first step and makes them by a step with zero gradients, at the
    full learning rate: it counts in bias correction (note 8), and weight decay moves the parameters.
    """
    params = list_params(optimizer)
    gradients = [param.grad for param in params]
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
        state = optimizer.state[param]
        state["step"] = torch.zeros_like(state["step"]) if torch.is_tensor(state["step"]) else 0


# --- the end ----------------------------------------------------------------------------------------------------------


class CalmLog(logging.Filter):
    """Makes one line of each exception that hivemind has caught and handled, and drops what it logs of each round and
    while stopping."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(("hivemind", "asyncio")):
            return True
        if not os.environ.get("HIVEMIND_LOGLEVEL"):
            # a round that fails, a peer that leaves: daily business, which a traceback makes look like a crash
            record.exc_info = record.exc_text = None
            if record.name.startswith(("hivemind.averaging", "asyncio")):
                return False  # Optimizer says what became of a round
        return not STOPPING.value


def calm_log() -> None:
    """Spare the user hivemind's cosmetic tracebacks (note 37), in this process and in the helpers that it will fork."""
    for name in (None, "hivemind"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(CalmLog())
    # MPFuture.__del__ wakes event loops that are closed by then
    show_unraisable, show = sys.unraisablehook, sys.excepthook
    sys.unraisablehook = lambda unraisable: None if STOPPING.value else show_unraisable(unraisable)
    # a helper that ends while it fetches a tensor: multiprocessing's thread that serves it calls this hook
    sys.excepthook = lambda *error: None if STOPPING.value else show(*error)
    # hivemind brings the schedule to the epoch of a downloaded state before the first step of this process
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    # the default number of data loader workers suits a machine with a GPU; torch warns of it on two cores
    warnings.filterwarnings("ignore", message="This DataLoader will create")


def live_as_helper() -> None:
    """What each helper process does first: leave Ctrl-C to its parent, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # a terminal sends Ctrl-C to the whole process group: out of it, or p2pd is gone before we have said goodbye
    os.setpgrp()
    # pages of the imports that this process shares with its parent: a garbage collection would write to all of them
    gc.freeze()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        end_helpers(find_helpers())
        os._exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


def end_when_it_dies(process: multiprocessing.Process, name: str) -> None:
    """End this process and its helpers when that helper dies: whoever waits for its answer would wait for ever."""
    # a snapshot of what the helper itself has started: these are nobody's children once it is dead
    helpers = find_helpers(process.pid)

    def watch() -> None:
        wait_for_processes([process.sentinel])
        if not STOPPING.value:
            logger.error(f"the {name} process died, this peer cannot go on (out of memory?)")
            end_process(1, helpers)

    threading.Thread(target=watch, name=f"watch {name}", daemon=True).start()


def end_process(code: int, helpers: list[psutil.Process] = ()) -> None:
    """End the helper processes, then this process, at once."""
    STOPPING.value = True
    end_helpers([*find_helpers(), *helpers])
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: threads of hivemind that wait for dead helpers would keep the interpreter from ending
    os._exit(code)


def find_helpers(pid: int | None = None) -> list[psutil.Process]:
    """All processes that this one, or the one given, has started, directly or not.

    Without torch's manager of shared memory: it ends with its last client, and clients that outlive it abort.
    """
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if child.name() != "torch_shm_manager"]


def end_helpers(helpers: list[psutil.Process]) -> None:
    """SIGTERM, and SIGKILL after three seconds."""
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for helper in helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(helper)
        _, helpers = psutil.wait_procs(helpers, timeout=3)


@contextlib.contextmanager
def clean_end() -> Iterator[None]:
    """Run a role's main() in this: Ctrl-C and SIGTERM are a normal end at any time, an exception ends the helpers too.

    Ends the process: exit code 0 after a normal end, 1 after an exception, 2 after a user's error.
    """

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    def end_after_thread_failed(failure: threading.ExceptHookArgs) -> None:
        if not STOPPING.value:
            traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
            end_process(1)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    threading.excepthook = end_after_thread_failed
    code = 0
    try:
        yield
    except KeyboardInterrupt:
        logger.info("stopped")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    end_process(code)


def handle_stop_signals() -> threading.Event:
    """From now on SIGINT and SIGTERM set this event, for the loop to look at; a second signal ends at once.

    Call it when everything is built: hivemind's constructors set SIGINT to be ignored (note 36).
    """

    def request_stop(*_) -> None:
        if STOP_REQUESTED.is_set():
            end_process(0)
        STOP_REQUESTED.set()

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    return STOP_REQUESTED


def shut_down(dht: hivemind.DHT, optimizer: Optimizer | None = None) -> None:
    """Say goodbye to the swarm and end the helper processes, without the tracebacks of hivemind's own."""
    helpers = find_helpers()
    STOPPING.value = True
    if optimizer is not None:
        optimizer.shutdown()
    dht.shutdown()
    end_helpers(helpers)
