"""Who forms a group: all that are there, as soon as they have come; and what a peer says of itself when it joins."""

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

LOOK_PERIOD = 1.0  # seconds between two looks who leads a group
MIN_LOOK_PERIOD = 0.2  # seconds between two looks while no other peer looks for a group
ASK_AGAIN_AFTER = 0.5  # seconds after which a peer that has not let this one join its group is asked once more


def parse_gathered(data: bytes) -> tuple[AveragingMode, object, float | None]:
    """Parse what a peer tells its group.

    :returns: whether it averages, is a client, or is auxiliary; what it has gathered; its bandwidth in Mbit/s or None
    :raises ValueError: the data is invalid; the message continues a sentence that begins with the peer
    """
    try:
        bandwidth, mode, gathered = MSGPackSerializer.loads(data)
        mode, gathered = AveragingMode(mode), MSGPackSerializer.loads(gathered)
        is_plausible = bandwidth is None or PLAUSIBLE_MBITS[0] <= bandwidth <= PLAUSIBLE_MBITS[1]
    except Exception as e:  # hostile bytes: the decoder raises whatever it likes
        raise ValueError(f"sends group data that cannot be read ({e!r})") from e
    if not is_plausible:
        raise ValueError(f"claims a bandwidth of {bandwidth} Mbit/s")
    return mode, gathered, bandwidth


def sign_round_state(standing: list) -> list:
    """What a peer gathers of itself, with its public key and a signature: leaders pass it on."""
    key = RSAPrivateKey.process_wide()
    return [*standing, b"[owner:%s]" % key.get_public_key().to_bytes(), key.sign(MSGPackSerializer.dumps(standing))]


def is_signed(standing: object, peer_id: PeerID) -> bool:
    """Whether this peer itself has gathered that."""
    try:
        *standing, owner, signature = standing
        is_own = find_peer_id(owner) == peer_id.to_bytes()
        return is_own and RSAPublicKey.from_bytes(owner[7:-1]).verify(MSGPackSerializer.dumps(standing), signature)
    except Exception:  # hostile bytes: the decoders raise whatever they like
        return False


class NonBlockingKeyManager(GroupKeyManager):
    """Tells beside the round that no group is looked for any more.

    hivemind begins the round only when the DHT has stored that, which dead nodes delay by many seconds, while the rest
    of the group waits (note 78).
    """

    #: the latest time until which this peer has said that it looks for a group; in seconds of the DHT's time
    declared_until = -math.inf
    next_look = -math.inf

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        self.declared_until = max(self.declared_until, expiration_time)
        declared = super().declare_averager(group_key, peer_id, expiration_time, looking_for_group)
        if looking_for_group:
            return await declared
        self.declaring = asyncio.create_task(declared)  # kept, or the garbage collector might end it
        return True

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        """Look at most once in MIN_LOOK_PERIOD. hivemind looks again as soon as the DHT has answered if no other peer
        looks for a group: a hundred times a second on a fast network (note 85)."""
        await asyncio.sleep(self.next_look - time.monotonic())
        self.next_look = time.monotonic() + MIN_LOOK_PERIOD
        return await super().get_averagers(group_key, only_active)


class EarlyStartMatchmaking(Matchmaking):
    """Starts a group as soon as the epoch has ended here and every peer that is known to be there has come.

    hivemind waits for a full group or until matchmaking_time has passed: a swarm smaller than target_group_size waits
    it out in each round (note 11), and one that was just large enough does so once a peer has died (note 22).

    A group that has formed waits for none of its members: whoever leads it knows that the epoch is over. hivemind's may
    also form before, once it is full or has waited for long, so that nobody knows what it is waiting for.

    And a group is full of trainers: hivemind counts auxiliary peers too, so that trainers average with nobody else.
    """

    #: ids (bytes) of the other peers that should come, and of those that do not answer; see `set_expected_peers`
    expected: frozenset[bytes] = frozenset()
    silent: frozenset[bytes] = frozenset()
    #: how many of these and this peer have to come, once a group is looked for in earnest
    at_least = 1
    #: the last peer that was asked to lead; until it accepts or refuses, nobody can join this one
    asked: PeerID | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # this is for groups whose keys wander, which ours do not, and refuses a group that is larger than the trainers'
        # target_group_size for the auxiliary peers in it
        self.group_key_manager.target_group_size = None

    def set_expected_peers(self, peer_ids: frozenset[bytes], at_least: int, silent: frozenset[bytes]) -> None:
        """These should come now, which may make a group complete; those that do not answer lead none."""
        if silent != self.silent:
            self.potential_leaders.past_attempts.clear()  # those who could not be asked, or led to somebody else
        self.expected, self.at_least, self.silent = peer_ids, at_least, silent
        if self.asked is not None and self.asked.to_bytes() in silent:
            self.joining.cancel()

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        """hivemind's, which waits for a leader that is frozen or cut off until matchmaking_time has passed, and as long
        as the network likes for a connection to it."""
        if leader.to_bytes() in self.silent:
            return None
        self.joining = joining = asyncio.create_task(super()._request_join_group(leader))
        self.asked, began, loop = leader, time.monotonic(), asyncio.get_running_loop()
        try:
            if (group := await asyncio.shield(joining)) is None:
                # while it asks, others cannot join this one: for a third of the time at most
                pause = min(max(ASK_AGAIN_AFTER, 2 * (time.monotonic() - began)), self.request_timeout)
                loop.call_later(pause, self.allow_to_ask, leader)
            return group
        except asyncio.CancelledError:
            # it is this peer that does not look for a group any more
            if not joining.cancelled() or asyncio.current_task().cancelling():
                joining.cancel()
                await asyncio.wait({joining})
                raise
            return None

    def allow_to_ask(self, leader: PeerID) -> None:
        """Ask this leader again, if it still looks for a group. hivemind asks each leader once (note 83): one that was
        slow at that moment, or was asking another peer, would do without this peer in the whole round."""
        leaders = self.potential_leaders
        leaders.past_attempts -= {attempt for attempt in leaders.past_attempts if attempt[0] == leader}
        leaders.update_triggered.set()

    async def follower_assemble_group(self, leader: PeerID, message: averaging_pb2.MessageFromLeader) -> GroupInfo:
        """Check what the leader says of the members.

        :raises MaliciousPeersError: it does not pass on what they have said, this peer among them
        """
        own = self.step_control.data_for_gather
        said = dict(zip(map(PeerID, message.ordered_peer_ids), message.gathered, strict=False))
        is_true = said.get(self.peer_id) == own and len(said) == len(message.gathered)
        try:
            parsed = {peer: parse_gathered(data)[1] for peer, data in said.items()}
        except ValueError as e:  # an honest leader has refused it
            raise MaliciousPeersError({leader: f"leads a group of which a member {e}"}) from e
        if is_true and isinstance(parsed[self.peer_id], list):
            is_true = all(is_signed(gathered, peer) for peer, gathered in parsed.items())
        if not is_true:
            raise MaliciousPeersError({leader: "forges what its followers say of themselves"})
        return await super().follower_assemble_group(leader, message)

    async def leader_assemble_group(self) -> GroupInfo:
        for follower in [peer for peer in self.current_followers if peer.to_bytes() in self.silent]:
            del self.current_followers[follower]  # or it would end the round
        return await super().leader_assemble_group()

    async def look_for_group(self, step):
        # hivemind's times are fixed at the start: if all answers were slow, no peer would answer in time
        timeouts = self.group_key_manager.dht.uplink.timeouts
        self.request_timeout = timeouts.request
        self.min_matchmaking_time = self.potential_leaders.min_matchmaking_time = timeouts.matchmaking
        # the DHT keeps, of two records, the one that lasts longer: where matchmaking_time has become shorter, no other
        # peer would see that this one looks for a group again, while this one waits to be asked (note 82)
        until = max(step.scheduled_time, self.group_key_manager.declared_until + 1e-3)
        if self.at_least > 1:
            until = max(until, get_dht_time() + timeouts.group_search)
        if step.scheduled_time < until < step.deadline:
            step.scheduled_time = until
        looking = asyncio.create_task(self.look_again())
        try:
            return await super().look_for_group(step)
        finally:
            looking.cancel()

    async def look_again(self) -> None:
        """hivemind looks for no new leader any longer where it knows of peers that would go after this one: those that
        come later would do so too, if matchmaking_time were the same for all (note 82)."""
        while True:
            await asyncio.sleep(LOOK_PERIOD)
            self.potential_leaders.update_triggered.set()

    @property
    def target_group_size(self) -> int | None:
        """With so many peers it begins: never, as long as this one's epoch goes on."""
        return self.size_limit if self.has_epoch_ended else None

    @target_group_size.setter
    def target_group_size(self, size: int | None) -> None:
        self._trainers_of_group = size

    @property
    def size_limit(self) -> int | None:
        size = self._trainers_of_group
        if size is None or self.step_control is None:
            return size
        of_group = [self.step_control.data_for_gather, *(peer.gather for peer in self.current_followers.values())]
        return size + sum(parse_gathered(data)[0] == AveragingMode.AUX for data in of_group)

    async def rpc_join_group(self, request, context):
        try:
            _, theirs, _ = parse_gathered(request.gather)
        except ValueError as e:
            is_awaited = self.is_looking_for_group and context.remote_id.to_bytes() in self.expected
            if is_awaited and self.current_leader is None and not self.assembled_group.done():
                # this search ends, the optimizer bans the peer, and the next search does not wait for it
                self.assembled_group.set_exception(MaliciousPeersError({context.remote_id: str(e)}))
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        try:
            own = parse_gathered(self.step_control.data_for_gather)[1] if self.step_control else None
            if isinstance(own, list) and isinstance(theirs, list) and own[1] and own[:1] < theirs[:1]:
                raise ValueError("it is further than this peer, which would close its group before its epoch ends")
            if isinstance(own, list) and not is_signed(theirs, context.remote_id):
                raise ValueError("it has not signed what it says of itself")
        except (ValueError, TypeError) as e:  # the whole group would fail
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
                    # the parent holds the lock that starting needs, until this message is sent
                    self.starting = asyncio.create_task(self.start_when_complete())
                yield message

    def _check_reasons_to_reject(self, request, context) -> averaging_pb2.MessageFromLeader | None:
        reason = super()._check_reasons_to_reject(request, context)
        return averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_IS_FULL) if self.is_full else reason

    async def start_when_complete(self) -> None:
        async with self.lock_request_join_group:
            if not self.is_looking_for_group or self.assembled_group.done() or self.current_leader is not None:
                return
            if self.has_epoch_ended and self.is_complete():
                await self.leader_assemble_group()

    def is_complete(self) -> bool:
        """Whether nobody else is worth a wait."""
        here = self.list_joined_peers()
        is_enough = self.at_least <= len(here & self.expected_with_self) if self.at_least > 1 else self.expected <= here
        return bool(self.expected) and is_enough or self.is_full

    @property
    def is_full(self) -> bool:
        return self.size_limit is not None and len(self.current_followers) + 1 >= self.size_limit

    @property
    def has_epoch_ended(self) -> bool:
        """Whether this peer's epoch is; before, whoever comes shall be in the group."""
        return self.step_control is not None and self.step_control.triggered

    def list_joined_peers(self) -> set[bytes]:
        return {peer_id.to_bytes() for peer_id in (self.peer_id, *self.current_followers)}

    @property
    def expected_with_self(self) -> set[bytes]:
        return self.expected | {self.peer_id.to_bytes()}

    @property
    def min_group_size(self) -> int:
        """More than there are while too few of the expected peers have come, or this one's epoch goes on, so that
        hivemind keeps looking."""
        if len(self.list_joined_peers() & self.expected_with_self) < self.at_least or not self.has_epoch_ended:
            return len(self.current_followers) + 2
        return self._least_group_size

    @min_group_size.setter
    def min_group_size(self, size: int) -> None:
        self._least_group_size = size
