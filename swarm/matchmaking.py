"""Matchmaking that starts a round as soon as all expected peers have joined, and the data that peers gather for it."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.serializer import MSGPackSerializer

from swarm import logger
from swarm.allreduce import PLAUSIBLE_MBITS
from swarm.guard import SKETCH_SIZE, MaliciousPeersError
from swarm.log_records import Number, Signature, check_type, compute_hash, get_signed_part, pack, unpack
from utils import MAX_WORKERS, find_peer_id

SEARCH_INTERVAL = 1.0  # seconds between two searches for a leader
# Seconds between two lookups of peers in the DHT; each pause is 10 % longer. Later peers ask the first one themselves.
MIN_LOOKUP_INTERVAL = 0.2
MAX_LOOKUP_INTERVAL = 2.0
MAX_GATHERED = 2**12  # bytes of a peer's group data
DIGEST_BYTES = 16  # of the averages of a reducer; it could find two with the same 8 bytes
Credential = Annotated[bytes, 0, MAX_GATHERED]
ASK_AGAIN_AFTER = 0.5  # seconds; the minimum until a leader that rejected this peer is asked again
MAX_REDIRECTS = 2  # in a row: leaders that redirect this peer to each other would keep it forever (note 97)


@dataclass(frozen=True)
class RoundState:
    """The state to which a peer's gradients belong, signed so that a leader cannot forge it."""

    epoch: Number
    is_synchronous: Annotated[bool, 0, 1]  # whether the whole swarm averages in step
    lineage: Annotated[str, 0, 64]
    sketch: Annotated[tuple, SKETCH_SIZE, SKETCH_SIZE, Annotated[float, -math.inf, math.inf]]  # of the parameters
    owner: Annotated[bytes, 1, 600]  # the peer's public key
    group: Annotated[bytes, 0, 20] = b""  # the id of the last round that has succeeded
    #: of the averages from each member of that group, in its order, see `GradientAverager.find_unequal_averages`
    digests: Annotated[tuple, 0, MAX_WORKERS, Annotated[bytes, DIGEST_BYTES, DIGEST_BYTES]] = ()
    signature: Signature = b""

    def is_signed_by(self, peer_id: PeerID) -> bool:
        """Return whether this peer has signed it."""
        with contextlib.suppress(Exception):  # on untrusted bytes, the decoders can raise any exception
            key = RSAPublicKey.from_bytes(self.owner[len(b"[owner:") : -1])
            return find_peer_id(self.owner) == peer_id.to_bytes() and key.verify(get_signed_part(self), self.signature)
        return False


class GatheredData(NamedTuple):
    """The data that a peer sends to its group."""

    mode: AveragingMode
    state: RoundState | None  # parameters have none
    mbits: float | None  # bandwidth
    credential: bytes  # of a closed run


def parse_gathered(data: bytes) -> GatheredData:
    """Parse the data that a peer sends to its group, or raise ValueError with a predicate whose subject is the peer."""
    try:
        mbits, mode, content = MSGPackSerializer.loads(data if len(data) <= MAX_GATHERED else b"")
        if mbits is not None and not PLAUSIBLE_MBITS[0] <= mbits <= PLAUSIBLE_MBITS[1]:
            raise ValueError(f"implausible bandwidth of {mbits} Mbit/s")
        content = MSGPackSerializer.loads(content)
        content, credential = content if type(content) is list else (content, b"")
        state = unpack(RoundState, content) if type(content) is bytes else None
        return GatheredData(AveragingMode(mode), state, mbits, check_type(Credential, credential))
    except Exception as e:  # on untrusted bytes, the decoder can raise any exception
        raise ValueError(f"sent invalid group data ({e!r})") from e


def sign_round_state(epoch: int, is_synchronous: bool, lineage: str, sketch: Sequence[float], **report) -> bytes:
    """Return a round state with this peer's key and signature, serialized; the report has its `group` and `digests`."""
    key = RSAPrivateKey.process_wide()
    owner = b"[owner:%s]" % key.get_public_key().to_bytes()
    state = RoundState(epoch, is_synchronous, lineage, tuple(sketch), owner, **report)
    return pack(replace(state, signature=key.sign(get_signed_part(state))))


class NonBlockingKeyManager(GroupKeyManager):
    """A key manager that does not wait for the DHT when a search for a group ends (note 78)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        #: seconds of the DHT's time; the latest expiration time of a search that this peer has declared
        self.declared_until = -math.inf
        self.next_lookup = -math.inf
        self.lookup_interval = MIN_LOOKUP_INTERVAL

    async def declare_averager(self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group=True):
        """Declare the end of a search in the background, unlike hivemind, so that the round starts at once."""
        self.declared_until = max(self.declared_until, expiration_time)
        declared = super().declare_averager(group_key, peer_id, expiration_time, looking_for_group)
        if looking_for_group:
            return await declared
        self.declaring = asyncio.create_task(declared)
        return True

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        """Look up the peers that search for a group, but less often the longer this peer has searched (note 85)."""
        await asyncio.sleep(self.next_lookup - time.monotonic())
        self.next_lookup = time.monotonic() + self.lookup_interval
        self.lookup_interval = min(1.1 * self.lookup_interval, MAX_LOOKUP_INTERVAL)
        return await super().get_averagers(group_key, only_active)


class LeaderBackoff:
    """When each leader may be asked again: one that led to no round less and less, and unknown ones one by one."""

    def __init__(self, rounds_with: Counter):
        """:param rounds_with: the number of rounds with each peer so far, by PeerID; the averager counts them"""
        self.rounds_with = rounds_with
        #: for each useless leader, the requests in a row that led to no round, and when to ask again
        self.useless: dict[PeerID, tuple[int, float]] = {}
        self.ask_unknown_at = 0.0  # when a leader with which there was no round may be asked again

    def find_time(self, leader: PeerID, is_redirect: bool) -> float:
        """Return when this leader may be asked, also if it has declared itself again; or if another one names it."""
        _, not_before = self.useless.get(leader, (0, 0.0))
        if self.rounds_with[leader] or is_redirect:
            return not_before
        return max(not_before, self.ask_unknown_at)  # new keys cost nothing

    def record(self, leader: PeerID, seconds: float, timeout: float, num_useless: int | None) -> float:
        """Record a request that took these seconds and led to no round, and return the seconds until the next one.

        :param timeout: of a request that no leader has accepted
        :param num_useless: the useless requests before this one in a row; None if this one was not the leader's fault
        """
        now = time.monotonic()
        # no peer can join this one during a request: these take at most a third of the time
        pause = min(max(ASK_AGAIN_AFTER, 2 * seconds), timeout)
        if num_useless is not None:  # up to some minutes, or 128 times the wait for a round
            pause = max(pause, 2 * (seconds - timeout)) * 2 ** min(num_useless, 6)
            self.useless[leader] = num_useless + 1, now + pause
        if seconds < 2 * timeout:  # otherwise, it has accepted this peer
            self.ask_unknown_at = now + min(2 * seconds, timeout)
        return pause


class EarlyStartMatchmaking(Matchmaking):
    """Matchmaking that starts once the leader's epoch is over, and all expected peers are there (notes 11 and 22)."""

    def __init__(self, *args, rounds_with: Counter, **kwargs):
        """:param rounds_with: see LeaderBackoff"""
        #: the other peers that should join (ids in bytes), and excluded ones; see `set_expected_peers`
        self.expected: dict[bytes, float] = {}
        self.excluded = frozenset()
        #: the number of expected peers, this one included, that a group needs; 1 to wait for all of them
        self.min_peers = 1
        #: the peer that is asked to lead, and the limit of the request; no peer can join until the leader answers
        self.requested_leader: PeerID | None = None
        self.leader: PeerID | None = None  # of the last group
        self.group_id = b""  # of the last search, if it has found a group
        self.request_limit: asyncio.Timeout | None = None
        self.num_redirects = 0
        self.backoff = LeaderBackoff(rounds_with)
        super().__init__(*args, **kwargs)
        # our group keys are fixed and need no such limit, which would refuse the auxiliary peers of a full group
        self.group_key_manager.target_group_size = None

    async def look_for_group(self, step: StepControl) -> GroupInfo | None:
        """Look for a group with timeouts that follow the network."""
        self.group_key_manager.lookup_interval = MIN_LOOKUP_INTERVAL
        self.leader = self.peer_id
        self.group_id = b""
        timeouts = self.group_key_manager.dht.uplink.timeouts
        self.request_timeout = timeouts.request
        self.min_matchmaking_time = self.potential_leaders.min_matchmaking_time = timeouts.matchmaking
        # otherwise, the DHT would keep the record of the search before (note 82)
        in_step = get_dht_time() + timeouts.group_search if self.min_peers > 1 else -math.inf
        until = max(step.scheduled_time, self.group_key_manager.declared_until + 1e-3, in_step)
        if step.scheduled_time < until < step.deadline:
            step.scheduled_time = until
        helpers = [asyncio.create_task(self.search_again()), asyncio.create_task(self.start_when_triggered(step))]
        try:
            group = await super().look_for_group(step)
            # members to which the leader has shown different groups must not exchange data, and ban each other for it
            if group:
                view = group.group_id, [peer.to_bytes() for peer in group.peer_ids], group.gathered
                self.group_id = compute_hash(view)[:20]
            return group and replace(group, group_id=self.group_id)
        finally:
            for helper in helpers:
                helper.cancel()
            self.was_accepted_to_group.set()  # each request has left a task that waits for this (note 98)
            self.was_accepted_to_group.clear()

    async def search_again(self) -> None:
        """Look for new leaders periodically, also below a peer that ranks below this one, unlike hivemind (note 82)."""
        while True:
            await asyncio.sleep(SEARCH_INTERVAL)
            self.potential_leaders.update_triggered.set()

    async def start_when_triggered(self, step: StepControl) -> None:
        """Start the group that this peer leads when its epoch ends; give up soon after if it is of parameters."""
        await step.wait_for_trigger()
        await self.start_when_complete()
        if self._servicer_type.are_parameters:  # the search would delay the next step by averaging_timeout
            await asyncio.sleep(self.min_matchmaking_time + self.request_timeout)
            if self.step_control is step and self.current_leader is None and not self.assembled_group.done():
                self.assembled_group.set_exception(AllreduceException("no group has formed"))

    @property
    def contributors(self) -> dict[PeerID, float]:
        """The known contributors that a group should contain, and their epochs."""
        return {PeerID(peer_id): epoch for peer_id, epoch in self.expected.items() if epoch < math.inf}

    def set_expected_peers(self, expected: dict[bytes, float], min_peers: int, excluded: frozenset[bytes]) -> None:
        """Set the peers that a group should contain, see VerifyingAverager; excluded ones are not asked to lead."""
        if excluded != self.excluded:
            self.potential_leaders.past_attempts.clear()  # leaders that were unreachable, or followed another peer
        self.expected = expected
        self.min_peers = min_peers
        self.excluded = excluded
        if self.requested_leader is not None and self.requested_leader.to_bytes() in excluded:
            self.request_limit.reschedule(0.0)
            self.requested_leader = None

    # --- as a follower

    def get_request_expiration_time(self) -> float:
        """Return when a request of this peer expires. A client leads no group, and so follows any leader (note 82)."""
        expiration = super().get_request_expiration_time()
        timeouts = self.group_key_manager.dht.uplink.timeouts
        return max(expiration, get_dht_time() + timeouts.group_search) if self.client_mode else expiration

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        """Ask to join a leader's group; return None if it is excluded (note 70) or useless, or if no group forms."""
        is_redirect = self.requested_leader is not None  # hivemind's request follows the leader to its own leader
        self.num_redirects = self.num_redirects + 1 if is_redirect else 0
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        not_before = self.backoff.find_time(leader, is_redirect)
        if started < not_before:
            loop.call_later(not_before - started, self.allow_to_ask, leader)
            return None
        if leader.to_bytes() in self.excluded or self.num_redirects > MAX_REDIRECTS:
            return None
        num_useless, _ = self.backoff.useless.pop(leader, (0, 0.0))
        self.requested_leader = leader
        is_useless = False
        try:
            async with asyncio.timeout(None) as self.request_limit:
                unanswered = loop.call_later(self.request_timeout, self.end_unanswered, self.request_limit)
                if (group := await super()._request_join_group(leader)) is not None:
                    return group
        except MaliciousPeersError:
            raise
        except Exception:  # no answer or round in time, no quorum, or an answer that cannot be decoded (note 104)
            is_useless = self.requested_leader is not None  # otherwise, it was excluded
        finally:
            unanswered.cancel()
            self.requested_leader = None
        seconds = time.monotonic() - started
        pause = self.backoff.record(leader, seconds, self.request_timeout, num_useless if is_useless else None)
        loop.call_later(pause, self.allow_to_ask, leader)

    def end_unanswered(self, request_limit: asyncio.Timeout) -> None:
        """End a request that no leader has accepted; hivemind's own limit begins once there is a connection."""
        if self.current_leader is None and self.request_limit is request_limit:  # it may have led to another request
            request_limit.reschedule(0.0)

    async def avoid_leader(self) -> None:
        """Leave the leader, which should have begun by now, and ask it less and less. A client stays if there is no
        other leader: this one may be in a long step."""
        leader = self.current_leader
        if self.client_mode:  # the search, which knows the others, stands still
            found = await self.group_key_manager.get_averagers(self.group_key_manager.current_key, only_active=True)
            if all(peer == leader or peer.to_bytes() in self.excluded for peer, _ in found):
                return
        if self.requested_leader is not None and leader and self.current_leader == leader:
            self.request_limit.reschedule(0.0)
            logger.info(f"peer {self.current_leader} has begun no round: not asking it to lead for a while")

    def allow_to_ask(self, leader: PeerID) -> None:
        """Let the search ask this leader again: it was slow, or was asking another peer (note 83)."""
        leaders = self.potential_leaders
        leaders.past_attempts -= {attempt for attempt in leaders.past_attempts if attempt[0] == leader}
        leaders.update_triggered.set()

    async def follower_assemble_group(self, leader: PeerID, message: averaging_pb2.MessageFromLeader) -> GroupInfo:
        """Join the group, or raise MaliciousPeersError if the leader passes on forged or invalid data of members."""
        data_by_peer = dict(zip(map(PeerID, message.ordered_peer_ids), message.gathered, strict=False))
        try:
            members = {peer: parse_gathered(data) for peer, data in data_by_peer.items()}
        except ValueError as e:  # a correct leader would have rejected that member
            raise MaliciousPeersError({leader: f"led a group with a member that {e}"}) from e
        states = {peer: member.state for peer, member in members.items()}
        is_own = leader in data_by_peer and data_by_peer.get(self.peer_id) == self.step_control.data_for_gather
        is_valid = is_own and len(data_by_peer) == len(message.gathered) == len(message.ordered_peer_ids)
        is_valid = is_valid and len(data_by_peer) <= (self._max_trainers or 0) + MAX_WORKERS  # for auxiliary peers
        if is_valid and states[self.peer_id]:
            is_valid = all(state and state.is_signed_by(peer) for peer, state in states.items())
        if not is_valid:
            raise MaliciousPeersError({leader: "forged the group data of a follower"})
        if not all(self.is_member(peer, data) for peer, data in members.items()):  # or it has just been revoked
            logger.info(f"peer {leader} leads a group with a peer that may not take part in this run: not joining it")
            raise AllreduceException("a peer in the group has no valid credential")
        known = self.contributors
        there = [peer for peer, state in states.items() if state and state.epoch >= known.get(peer, math.inf)]
        if 3 * (1 + len(there)) < 2 * (1 + len(known)):
            logger.info(f"peer {leader} leads too few of the known contributors: not joining its group")
            raise AllreduceException("less than two thirds of the known contributors are in the group")
        self.leader = leader
        return await super().follower_assemble_group(leader, message)

    def is_member(self, peer_id: PeerID, data: GatheredData) -> bool:
        """Return whether a peer of a group has a valid credential, or the run is open: it may never have called."""
        membership = self.group_key_manager.dht.membership
        return not (membership and membership.find_fault(data.credential, peer_id.to_bytes()))

    # --- as a leader

    async def rpc_join_group(self, request, context):
        """Reject followers with invalid, unsigned or stale requests, which would make the whole round fail."""
        if not self.is_acceptable(request, context.remote_id):
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        arrival = time.monotonic()
        async with self.lock_request_join_group:
            # held while this peer asks a leader; a follower that has waited long for it may have given up (note 60)
            is_stale = time.monotonic() - arrival > self.request_timeout / 2
        if is_stale:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.CANCELLED)
            return
        async with contextlib.aclosing(super().rpc_join_group(request, context)) as messages:
            async for message in messages:
                if message.code == averaging_pb2.ACCEPTED:
                    # a task, because hivemind holds the lock that the start needs until this message is sent
                    asyncio.create_task(self.start_when_complete())
                yield message

    def is_acceptable(self, request: averaging_pb2.JoinRequest, peer_id: PeerID) -> bool:
        """Return whether a group with this follower can succeed. Invalid data of one with earlier rounds end it."""
        try:
            data = parse_gathered(request.gather)
        except ValueError as e:
            # new keys cost nothing
            is_awaited = peer_id.to_bytes() in self.expected and self.backoff.rounds_with[peer_id]
            is_leading = self.is_looking_for_group and self.current_leader is None and not self.assembled_group.done()
            if is_awaited and is_leading:
                # the optimizer bans the peer, and the next search does not wait for it
                self.assembled_group.set_exception(MaliciousPeersError({peer_id: str(e)}))
            return False
        if not self.is_member(peer_id, data):
            return False
        own = parse_gathered(self.step_control.data_for_gather).state if self.step_control else None
        if own is None:
            return True
        theirs = data.state
        if theirs is None or not theirs.is_signed_by(peer_id):
            return False
        # the group would start before the epoch of a peer that is ahead of this one ends; and the other followers would
        # not count a contributor with an earlier epoch than it has reported, and might refuse the group
        reported = self.expected.get(peer_id.to_bytes(), math.inf)
        return not (own.is_synchronous and (theirs.epoch > own.epoch or theirs.epoch < reported < math.inf))

    async def start_when_complete(self) -> None:
        """Start the group that this peer leads if its epoch has ended and the group is complete."""
        async with self.lock_request_join_group:
            is_leading = self.is_looking_for_group and self.current_leader is None and not self.assembled_group.done()
            if is_leading and self.is_complete():
                await self.leader_assemble_group()

    async def leader_assemble_group(self) -> GroupInfo | None:
        """Assemble the group without excluded followers, which would make the round fail."""
        if not self.step_control.triggered:  # hivemind would start a full group
            return None
        for follower in [peer for peer in self.current_followers if peer.to_bytes() in self.excluded]:
            del self.current_followers[follower]
        return await super().leader_assemble_group()

    def is_complete(self) -> bool:
        """Return whether the group that this peer leads should not wait for more followers."""
        min_peers = self.min_peers if self.min_peers > 1 else len(self.expected) + 1
        is_full = self.target_group_size is not None and len(self.current_followers) + 1 >= self.target_group_size
        return is_full or bool(self.expected) and self.num_expected_joined >= min_peers

    @property
    def num_expected_joined(self) -> int:
        """The number of expected peers in the group that this peer leads, this one included."""
        return 1 + sum(peer.to_bytes() in self.expected for peer in self.current_followers)

    def find_essential(self, group: Sequence[PeerID]) -> set[PeerID]:
        """Return the followers without each of which the group that this peer leads is not two thirds of the known
        contributors. They may refuse it: until the end of its batch, a follower does not know which have left."""
        known = self.contributors.keys()
        followers = known & {*group}
        return followers if self.leader == self.peer_id and 3 * len(followers) < 2 * (1 + len(known)) else set()

    @property
    def target_group_size(self) -> int | None:
        """The maximum group size: the maximum number of trainers, plus the auxiliary peers that joined (note 66)."""
        if self._max_trainers is None or self.step_control is None:
            return self._max_trainers
        gathered = [self.step_control.data_for_gather, *(peer.gather for peer in self.current_followers.values())]
        return self._max_trainers + sum(parse_gathered(data).mode == AveragingMode.AUX for data in gathered)

    @target_group_size.setter
    def target_group_size(self, max_trainers: int | None) -> None:
        self._max_trainers = max_trainers

    @property
    def min_group_size(self) -> int:
        """The minimum group size, above the current one while expected peers are missing or the epoch goes on."""
        if self.num_expected_joined < self.min_peers or not (self.step_control and self.step_control.triggered):
            return len(self.current_followers) + 2
        return self._min_group_size

    @min_group_size.setter
    def min_group_size(self, size: int) -> None:
        self._min_group_size = size
