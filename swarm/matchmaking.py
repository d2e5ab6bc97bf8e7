"""Matchmaking that starts a round as soon as all expected peers have joined, and the data that peers gather for it."""

import asyncio
import contextlib
import logging
import math
import time

from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.serializer import MSGPackSerializer

from swarm.guard import MaliciousPeersError
from swarm.plan import PLAUSIBLE_MBITS
from utils import find_peer_id

logger = logging.getLogger("swarm")

LOOK_PERIOD = 1.0  # seconds between two searches for a leader
MIN_LOOK_PERIOD = 0.2  # seconds; the minimum between two DHT lookups, while no other peer looks for a group
ASK_AGAIN_AFTER = 0.5  # seconds; the minimum until a leader that rejected this peer is asked again


def parse_gathered(data: bytes) -> tuple[AveragingMode, object, float | None]:
    """Parse the data that a peer sends to its group.

    :returns: the averaging mode; the gathered object; the bandwidth in Mbit/s, or None
    :raises ValueError: the data is invalid; the message is a predicate whose subject is the peer
    """
    try:
        bandwidth, mode, gathered = MSGPackSerializer.loads(data)
        mode, gathered = AveragingMode(mode), MSGPackSerializer.loads(gathered)
        is_plausible = bandwidth is None or PLAUSIBLE_MBITS[0] <= bandwidth <= PLAUSIBLE_MBITS[1]
    except Exception as e:  # on untrusted bytes, the decoder can raise any exception
        raise ValueError(f"sent invalid group data ({e!r})") from e
    if not is_plausible:
        raise ValueError(f"claimed an implausible bandwidth of {bandwidth} Mbit/s")
    return mode, gathered, bandwidth


def sign_round_state(standing: list) -> list:
    """Append this peer's public key and signature to its round state, so that a leader cannot forge it."""
    key = RSAPrivateKey.process_wide()
    return [*standing, b"[owner:%s]" % key.get_public_key().to_bytes(), key.sign(MSGPackSerializer.dumps(standing))]


def is_signed(standing: object, peer_id: PeerID) -> bool:
    """Return whether this peer has signed the gathered data, see `sign_round_state`."""
    try:
        *standing, owner, signature = standing
        is_own = find_peer_id(owner) == peer_id.to_bytes()
        return is_own and RSAPublicKey.from_bytes(owner[7:-1]).verify(MSGPackSerializer.dumps(standing), signature)
    except Exception:  # on untrusted bytes, the decoders can raise any exception
        return False


class NonBlockingKeyManager(GroupKeyManager):
    """A key manager that does not wait for the DHT when a search for a group ends.

    hivemind starts the round only after the DHT has stored the end of the search. Dead nodes delay that by many
    seconds, and the rest of the group waits (note 78).
    """

    #: seconds of the DHT's time; the latest expiration time of a search that this peer has declared
    declared_until = -math.inf
    next_look = -math.inf

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """Declare the end of a search in the background, unlike hivemind, so that the round starts at once."""
        self.declared_until = max(self.declared_until, expiration_time)
        declared = super().declare_averager(group_key, peer_id, expiration_time, looking_for_group)
        if looking_for_group:
            return await declared
        self.declaring = asyncio.create_task(declared)  # without a reference, the task may be garbage collected
        return True

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        """Look up the peers that search for a group, at most once per MIN_LOOK_PERIOD. If there are none, hivemind
        repeats the lookup at once: 100 times per second on a fast network (note 85)."""
        await asyncio.sleep(self.next_look - time.monotonic())
        self.next_look = time.monotonic() + MIN_LOOK_PERIOD
        return await super().get_averagers(group_key, only_active)


class EarlyStartMatchmaking(Matchmaking):
    """Matchmaking that starts a group as soon as the leader's epoch has ended and all expected peers have joined.

    hivemind waits for a full group or until matchmaking_time has passed. A swarm smaller than target_group_size waits
    that long in each round (note 11), and a swarm of exactly that size does after a peer has died (note 22).

    A formed group waits for none of its members, because its leader's epoch has ended. In hivemind, a group may form
    earlier, when it is full or has waited for long, and then waits for an unknown member.

    Only trainers count towards the group size. hivemind counts auxiliary peers too, which may leave a trainer alone.
    """

    #: ids (bytes) of the other peers that should join, and of unresponsive peers; see `set_expected_peers`
    expected: frozenset[bytes] = frozenset()
    silent: frozenset[bytes] = frozenset()
    #: the number of expected peers, this one included, that a group needs; 1 to wait for all of them
    at_least = 1
    #: the last peer that was asked to lead; no peer can join this one until the leader answers
    asked: PeerID | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Our group keys are fixed and need no such limit. It would refuse a group that is larger than the trainers'
        # target_group_size because of its auxiliary peers.
        self.group_key_manager.target_group_size = None

    def set_expected_peers(self, peer_ids: frozenset[bytes], at_least: int, silent: frozenset[bytes]) -> None:
        """Set the peers that a group should contain, see VerifyingAverager; silent peers are not asked to lead."""
        if silent != self.silent:
            self.potential_leaders.past_attempts.clear()  # leaders that were unreachable, or followed another peer
        self.expected, self.at_least, self.silent = peer_ids, at_least, silent
        if self.asked is not None and self.asked.to_bytes() in silent:
            self.joining.cancel()

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        """Ask a leader to join its group, until the leader becomes silent. hivemind waits for a frozen or unreachable
        leader until matchmaking_time has passed, and has no timeout for the connection."""
        if leader.to_bytes() in self.silent:
            return None
        self.joining = joining = asyncio.create_task(super()._request_join_group(leader))
        self.asked, started, loop = leader, time.monotonic(), asyncio.get_running_loop()
        try:
            if (group := await asyncio.shield(joining)) is None:
                # no peer can join this one during a request: these take at most a third of the time
                pause = min(max(ASK_AGAIN_AFTER, 2 * (time.monotonic() - started)), self.request_timeout)
                loop.call_later(pause, self.allow_to_ask, leader)
            return group
        except asyncio.CancelledError:
            # this peer's search was cancelled, and not only the request
            if not joining.cancelled() or asyncio.current_task().cancelling():
                joining.cancel()
                await asyncio.wait({joining})
                raise
            return None

    def allow_to_ask(self, leader: PeerID) -> None:
        """Let the search ask this leader again if it still looks for a group. hivemind asks each leader once (note 83):
        a leader that was slow, or was asking another peer, would average without this peer."""
        leaders = self.potential_leaders
        leaders.past_attempts -= {attempt for attempt in leaders.past_attempts if attempt[0] == leader}
        leaders.update_triggered.set()

    async def follower_assemble_group(self, leader: PeerID, message: averaging_pb2.MessageFromLeader) -> GroupInfo:
        """Check the members' gathered data that the leader passes on, then join its group.

        :raises MaliciousPeersError: the leader has forged the data of a member, or passes on invalid data
        """
        own = self.step_control.data_for_gather
        data_by_peer = dict(zip(map(PeerID, message.ordered_peer_ids), message.gathered, strict=False))
        is_valid = data_by_peer.get(self.peer_id) == own and len(data_by_peer) == len(message.gathered)
        try:
            parsed = {peer: parse_gathered(data)[1] for peer, data in data_by_peer.items()}
        except ValueError as e:  # a correct leader would have rejected that member
            raise MaliciousPeersError({leader: f"led a group with a member that {e}"}) from e
        if is_valid and isinstance(parsed[self.peer_id], list):
            is_valid = all(is_signed(gathered, peer) for peer, gathered in parsed.items())
        if not is_valid:
            raise MaliciousPeersError({leader: "forged the group data of a follower"})
        return await super().follower_assemble_group(leader, message)

    async def leader_assemble_group(self) -> GroupInfo:
        """Assemble the group without silent followers, which would make the round fail."""
        for follower in [peer for peer in self.current_followers if peer.to_bytes() in self.silent]:
            del self.current_followers[follower]
        return await super().leader_assemble_group()

    async def look_for_group(self, step):
        """Look for a group with timeouts that follow the network; with hivemind's fixed ones, slow answers are late."""
        timeouts = self.group_key_manager.dht.uplink.timeouts
        self.request_timeout = timeouts.request
        self.min_matchmaking_time = self.potential_leaders.min_matchmaking_time = timeouts.matchmaking
        # Of two records, the DHT keeps the one with the later expiration time. After matchmaking_time has become
        # shorter, the other peers would not see this new search, while this peer waits for their requests (note 82).
        until = max(step.scheduled_time, self.group_key_manager.declared_until + 1e-3)
        if self.at_least > 1:
            until = max(until, get_dht_time() + timeouts.group_search)
        if step.scheduled_time < until < step.deadline:
            step.scheduled_time = until
        search = asyncio.create_task(self.look_again())
        try:
            return await super().look_for_group(step)
        finally:
            search.cancel()

    async def look_again(self) -> None:
        """Look for new leaders periodically. hivemind stops once it knows a peer that ranks below this one, as if all
        later peers did too: that holds only if matchmaking_time is the same for all (note 82)."""
        while True:
            await asyncio.sleep(LOOK_PERIOD)
            self.potential_leaders.update_triggered.set()

    @property
    def target_group_size(self) -> int | None:
        """The group size at which hivemind starts a round; None before this peer's epoch ends, so that none starts."""
        return self.size_limit if self.has_epoch_ended else None

    @target_group_size.setter
    def target_group_size(self, size: int | None) -> None:
        """Set the maximum number of trainers in a group."""
        self._trainers_of_group = size

    @property
    def size_limit(self) -> int | None:
        """The maximum group size: the maximum number of trainers plus the auxiliary peers that have joined."""
        size = self._trainers_of_group
        if size is None or self.step_control is None:
            return size
        gathered = [self.step_control.data_for_gather, *(peer.gather for peer in self.current_followers.values())]
        return size + sum(parse_gathered(data)[0] == AveragingMode.AUX for data in gathered)

    async def rpc_join_group(self, request, context):
        """Reject followers with invalid, unsigned or stale requests, which would make the whole round fail."""
        try:
            _, theirs, _ = parse_gathered(request.gather)
        except ValueError as e:
            is_awaited = self.is_looking_for_group and context.remote_id.to_bytes() in self.expected
            if is_awaited and self.current_leader is None and not self.assembled_group.done():
                # end this search: the optimizer bans the peer, and the next search does not wait for it
                self.assembled_group.set_exception(MaliciousPeersError({context.remote_id: str(e)}))
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        try:
            own = parse_gathered(self.step_control.data_for_gather)[1] if self.step_control else None
            if isinstance(own, list) and isinstance(theirs, list) and own[1] and own[:1] < theirs[:1]:
                raise ValueError("it is ahead of this peer, whose group would start before that epoch ends")
            if isinstance(own, list) and not is_signed(theirs, context.remote_id):
                raise ValueError("it has not signed its round state")
        except (ValueError, TypeError) as e:
            logger.debug(f"refused {context.remote_id}: {e}")
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        arrival = time.monotonic()
        async with self.lock_request_join_group:
            # This peer holds the lock while it asks a leader. A follower that has waited long for it may have given up,
            # and the group would wait for its data.
            is_stale = time.monotonic() - arrival > self.request_timeout / 2
        if is_stale:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.CANCELLED)
            return
        async with contextlib.aclosing(super().rpc_join_group(request, context)) as messages:
            async for message in messages:
                if message.code == averaging_pb2.ACCEPTED:
                    # a task, because hivemind holds the lock that the start needs until this message is sent
                    self.starting = asyncio.create_task(self.start_when_complete())
                yield message

    def _check_reasons_to_reject(self, request, context) -> averaging_pb2.MessageFromLeader | None:
        reason = super()._check_reasons_to_reject(request, context)
        return averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_IS_FULL) if self.is_full else reason

    async def start_when_complete(self) -> None:
        """Start the group that this peer leads if its epoch has ended and the group is complete."""
        async with self.lock_request_join_group:
            if not self.is_looking_for_group or self.assembled_group.done() or self.current_leader is not None:
                return
            if self.has_epoch_ended and self.is_complete():
                await self.leader_assemble_group()

    def is_complete(self) -> bool:
        """Return whether the group that this peer leads should not wait for more followers."""
        ids = self.list_joined_peers()
        is_enough = self.at_least <= len(ids & self.expected_with_self) if self.at_least > 1 else self.expected <= ids
        return bool(self.expected) and is_enough or self.is_full

    @property
    def is_full(self) -> bool:
        """Whether the group that this peer leads has reached `size_limit`."""
        return self.size_limit is not None and len(self.current_followers) + 1 >= self.size_limit

    @property
    def has_epoch_ended(self) -> bool:
        """Whether this peer's epoch has ended; until then, its group accepts all peers and does not start."""
        return self.step_control is not None and self.step_control.triggered

    def list_joined_peers(self) -> set[bytes]:
        """Return the ids of this peer and its followers."""
        return {peer_id.to_bytes() for peer_id in (self.peer_id, *self.current_followers)}

    @property
    def expected_with_self(self) -> set[bytes]:
        """The ids of the expected peers and of this peer."""
        return self.expected | {self.peer_id.to_bytes()}

    @property
    def min_group_size(self) -> int:
        """The minimum group size. It exceeds the current size while expected peers are missing or this peer's epoch has
        not ended, so that hivemind keeps looking."""
        if len(self.list_joined_peers() & self.expected_with_self) < self.at_least or not self.has_epoch_ended:
            return len(self.current_followers) + 2
        return self._least_group_size

    @min_group_size.setter
    def min_group_size(self, size: int) -> None:
        """Set the minimum once the expected peers have joined and the epoch has ended."""
        self._least_group_size = size
