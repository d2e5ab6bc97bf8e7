"""Followers of leaders that begin no round, and leaders of followers that leave, without a network."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import hivemind
import pytest
from coroutines import run_async, run_timeless
from google.protobuf.message import DecodeError
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.asyncio import as_aiter

import swarm.matchmaking
from swarm.allreduce import FailFastAllReduceRunner
from swarm.averager import VerifyingAverager
from swarm.credentials import Authority
from swarm.guard import SKETCH_SIZE, MaliciousPeersError
from swarm.matchmaking import MAX_REDIRECTS, EarlyStartMatchmaking, parse_gathered, sign_round_state
from swarm.membership import Membership
from swarm.trust import MAX_BROKEN_ROUNDS, RoundTrust
from swarm.uplink import Uplink
from utils import MAX_WORKERS

LEADER = PeerID(b"leader")


class UselessLeader(ServicerBase):
    """A leader that accepts each follower, and redirects it to itself, or does nothing.

    A silent one does not answer, and a lost one does not even take connections. Garbage cannot be decoded.
    """

    def __init__(self, kind: str = ""):
        self.kind, self.requests, self.group = kind, 0, {}

    def get_stub(self, *_, **__):
        return self

    async def rpc_join_group(self, _):
        self.requests += 1

        async def answer():
            if self.kind == "garbage":
                raise DecodeError
            if self.kind != "silent":
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            if self.kind == "begins":
                ids = [peer.to_bytes() for peer in self.group]
                code, gathered = averaging_pb2.BEGIN_ALLREDUCE, [*self.group.values()]
                yield averaging_pb2.MessageFromLeader(code=code, ordered_peer_ids=ids, gathered=gathered)
            if self.kind == "redirects":
                code = averaging_pb2.GROUP_DISBANDED
                yield averaging_pb2.MessageFromLeader(code=code, suggested_leader=LEADER.to_bytes())
            await asyncio.sleep(60)

        await asyncio.sleep(60 if self.kind == "lost" else 0)
        return answer()


def make_matchmaking(leader: UselessLeader | None, kind: type[Matchmaking] = EarlyStartMatchmaking) -> Matchmaking:
    dht = SimpleNamespace(uplink=Uplink(), peer_id=PeerID(b"follower"), membership=None)
    options = dict(prefix="run", target_group_size=None, min_group_size=2, min_matchmaking_time=5.0)
    options |= dict(servicer_type=UselessLeader, request_timeout=3.0, client_mode=False)
    if kind is EarlyStartMatchmaking:
        options["rounds_with"] = Counter()
    follower = kind(dht, b"schema", dht, **options)
    follower._servicer_type = leader
    return follower


def make_step() -> SimpleNamespace:
    scheduled, step = get_dht_time() + 30.0, SimpleNamespace(data_for_gather=b"", deadline=get_dht_time() + 60.0)
    step.scheduled_time, step.wait_for_trigger = scheduled, partial(asyncio.sleep, 60)
    return step


async def search(follower: EarlyStartMatchmaking, seconds: float = 0.0) -> None:
    """Ask the leader once in a search, and leave it after some seconds if it has not begun."""
    async with follower.looking_for_group(make_step()):
        follower.potential_leaders.search_end_time = get_dht_time() + 30.0
        request = asyncio.create_task(follower._request_join_group(LEADER))
        await asyncio.sleep(seconds)
        await follower.avoid_leader()
        assert await asyncio.wait_for(request, 10) is None and follower.current_leader is None


@contextlib.asynccontextmanager
async def search_quickly(leader: UselessLeader) -> AsyncIterator[EarlyStartMatchmaking]:
    """Yield a follower in its first search, which waits for half a second for each leader."""
    follower = make_matchmaking(leader)
    follower.request_timeout = 0.5
    async with follower.looking_for_group(make_step()):
        follower.potential_leaders.search_end_time = get_dht_time() + 30.0
        yield follower


@pytest.mark.parametrize("kind, error", [("redirects", RecursionError), ("garbage", DecodeError)])
@run_async
async def test_hivemind_search_ends_with_leaders_fault(kind, error):
    """Notes 97 and 104; EarlyStartMatchmaking._request_join_group."""
    follower = make_matchmaking(UselessLeader(kind), Matchmaking)
    with pytest.raises(error):
        async with follower.looking_for_group(make_step()):
            await follower._request_join_group(LEADER)


@run_async
async def test_leader_redirecting_to_itself_is_left():
    leader = UselessLeader("redirects")
    await search(make_matchmaking(leader))
    assert leader.requests == 1 + MAX_REDIRECTS


@run_async
async def test_leader_without_round_is_asked_less_and_less(monkeypatch):
    """Each time after twice the pause, but never for good, because an honest one may have been cut off."""
    leader, clock, asked_at = UselessLeader(), [1000.0], []
    follower = make_matchmaking(leader)
    follower.backoff.rounds_with[LEADER] = 1
    monkeypatch.setattr(swarm.matchmaking, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for _ in range(60):
        requests, before = leader.requests, clock[0]
        async with follower.looking_for_group(make_step()):
            follower.potential_leaders.search_end_time = get_dht_time() + 30.0
            request = asyncio.create_task(follower._request_join_group(LEADER))
            await asyncio.sleep(0.01)
            if leader.requests > requests:
                clock[0] += 13.0  # the others have waited for a round
                await follower.avoid_leader()
            assert await asyncio.wait_for(request, 10) is None and follower.current_leader is None
        if leader.requests > requests:
            asked_at.append(before - 1000.0)
        clock[0] = max(clock[0], before + 30.0)  # in the next epoch
    assert asked_at == [0.0, 60.0, 120.0, 240.0, 420.0, 780.0, 1440.0]


@pytest.mark.parametrize("others, is_left", [((), False), ((b"banned",), False), ((b"banned", b"other"), True)])
@run_async
async def test_client_stays_with_its_only_leader(others, is_left):
    """The leader of two clients is in a long step. They would no longer ask it for a while, and it waits for none."""
    leader = UselessLeader()
    async with search_quickly(leader) as follower:
        follower.client_mode, follower.excluded = True, frozenset([b"banned"])
        declared = [(PeerID(name), get_dht_time() + 30.0) for name in (b"leader", *others)]
        follower.group_key_manager.get_averagers = AsyncMock(return_value=declared)
        request = asyncio.create_task(follower._request_join_group(LEADER))
        await asyncio.sleep(0.05)
        await follower.avoid_leader()
        await asyncio.wait([request], timeout=0.2)
        assert request.done() == is_left == (LEADER in follower.backoff.useless)
        request.cancel()


@pytest.mark.parametrize("kind", ["silent", "lost", "garbage"])
@run_timeless
async def test_silent_leader_is_asked_less_and_less(monkeypatch, kind):
    """No peer can join this one during a request, and a leader can declare itself again at any time."""
    leader, pauses, clock = UselessLeader(kind), [], asyncio.get_running_loop().time
    monkeypatch.setattr(swarm.matchmaking, "time", SimpleNamespace(monotonic=clock))
    async with search_quickly(leader) as follower:
        for number in range(1, 4):
            for _ in range(5):  # it has declared itself again
                assert await follower._request_join_group(LEADER) is None
            count, until = follower.backoff.useless[LEADER]
            assert leader.requests == count == number
            pauses.append(until - clock())
            follower.backoff.useless[LEADER], follower.backoff.ask_unknown_at = (count, 0.0), 0.0  # the pauses are over
    assert pauses == pytest.approx([0.5, 1.0, 2.0], abs=0.4)


@run_timeless
async def test_silent_strangers_share_half_of_time(monkeypatch):
    """New keys cost nothing. Of six silent ones, five were asked in a row: no peer could join this one meanwhile."""
    clock = asyncio.get_running_loop().time
    monkeypatch.setattr(swarm.matchmaking, "time", SimpleNamespace(monotonic=clock))
    leader, partner = UselessLeader("silent"), PeerID(b"partner")
    async with search_quickly(leader) as follower:
        follower.backoff.rounds_with[partner] = 1
        for number in range(6):
            assert await follower._request_join_group(PeerID(b"key%d" % number)) is None
        assert leader.requests == 1
        assert follower.backoff.ask_unknown_at - clock() == pytest.approx(0.5, abs=0.4)
        assert await follower._request_join_group(partner) is None and leader.requests == 2


@run_async
async def test_hivemind_keeps_task_of_each_join():
    """Note 98; EarlyStartMatchmaking.look_for_group."""
    leader, tasks = make_matchmaking(None, Matchmaking), len(asyncio.all_tasks())
    leader.potential_leaders.declared_group_key = key = leader.group_key_manager.current_key
    leader.potential_leaders.declared_expiration_time = get_dht_time() + 30.0
    request = averaging_pb2.JoinRequest(schema_hash=b"schema", expiration=get_dht_time() + 60.0, group_key=key)
    async with leader.looking_for_group(make_step()):
        for number in range(5):
            messages = leader.rpc_join_group(request, SimpleNamespace(remote_id=PeerID(bytes([number]))))
            assert (await anext(messages)).code == averaging_pb2.ACCEPTED
            answer = asyncio.create_task(anext(messages))
            await asyncio.sleep(0.01)
            answer.cancel()
            await asyncio.wait([answer])
    assert len(asyncio.all_tasks()) - tasks == 5


@run_async
async def test_members_with_different_views_have_different_groups(monkeypatch):
    """Otherwise, a leader that shows them different bandwidths lets honest peers ban each other for their parts."""

    async def find(matchmaking, _) -> GroupInfo:
        return GroupInfo(b"group", (LEADER, PeerID(b"follower")), matchmaking.shown)

    async def find_id(*shown: bytes) -> bytes:
        matchmaking = make_matchmaking(None)
        matchmaking.group_key_manager.declared_until, matchmaking.shown = 0.0, shown
        return (await matchmaking.look_for_group(make_step())).group_id

    monkeypatch.setattr(Matchmaking, "look_for_group", find)
    assert await find_id(b"20", b"20") == await find_id(b"20", b"20") != await find_id(b"20", b"0.01")


@run_async
async def test_leader_is_in_its_group():
    """Otherwise, a new key could show a group to some of its members only, and these would blame each other."""
    follower, data = make_matchmaking(None), MSGPackSerializer.dumps([20.0, 0, MSGPackSerializer.dumps(None)])
    follower.peer_id, follower.step_control = PeerID(b"follower"), make_step()
    follower.step_control.data_for_gather = data
    for others, is_valid in (([LEADER], True), ([PeerID(b"other")], False)):
        ids = [peer.to_bytes() for peer in (follower.peer_id, *others)]
        message = averaging_pb2.MessageFromLeader(group_id=b"id", ordered_peer_ids=ids, gathered=[data] * len(ids))
        with contextlib.nullcontext() if is_valid else pytest.raises(MaliciousPeersError, match="forged"):
            async with follower.lock_looking_for_group, follower.lock_request_join_group:
                follower.current_leader = LEADER
                await follower.follower_assemble_group(LEADER, message)
        follower.assembled_group = asyncio.Future()


def make_data(epoch: int | None = 5, credential: bytes = b"") -> bytes:
    """Return the group data of a peer, as it is with a state that has been signed; without one, of parameters."""
    state = sign_round_state(epoch, True, "", [0.0] * SKETCH_SIZE) if epoch else 5
    return MSGPackSerializer.dumps([20.0, 0, MSGPackSerializer.dumps([state, credential] if credential else state)])


@pytest.mark.parametrize(
    "epoch, reported, is_accepted", [(5, 5, True), (4, 5, False), (5, 4, True), (4, math.inf, True), (6, 5, False)]
)
@run_async
async def test_follower_with_stale_state_is_refused(monkeypatch, epoch, reported, is_accepted):
    """The leader would count it by its report. A third peer, which counts signed epochs, would rightly refuse the
    group, and be banned for that."""
    monkeypatch.setattr(swarm.matchmaking.RoundState, "is_signed_by", lambda *_: True)
    leader, hostile = make_matchmaking(None), PeerID(b"hostile")
    leader.step_control = SimpleNamespace(data_for_gather=make_data())
    leader.set_expected_peers({b"hostile": reported, b"third": 5}, 3, frozenset())
    assert leader.is_acceptable(averaging_pb2.JoinRequest(gather=make_data(epoch)), hostile) == is_accepted


@pytest.fixture
def closed_run(tmp_path):
    """The membership of the follower in a closed run, and a function that makes a credential for a peer."""
    authority = Authority(str(tmp_path / "authority.pem"))

    def issue(name: bytes, prefix: str = "run", seconds: float = 60.0) -> bytes:
        return authority.issue(prefix, name, "ada", get_dht_time() + seconds)

    return Membership(issue(b"follower"), authority.public_key), issue


@pytest.mark.parametrize("epoch", [5, None])
@pytest.mark.parametrize("fault", ["", "no credential", "another peer", "another run", "expired", "revoked"])
@run_async
async def test_group_with_uninvited_peer_is_refused(monkeypatch, closed_run, epoch, fault):
    """Any member could lead a group with keys that it has just made: they would average most of it, or break it."""
    monkeypatch.setattr(swarm.matchmaking.RoundState, "is_signed_by", lambda *_: True)
    membership, issue = closed_run
    shown = {"no credential": b"", "another peer": issue(b"leader"), "another run": issue(b"ghost", prefix="other")}
    shown["expired"] = issue(b"ghost", seconds=-1.0)
    data = make_data(epoch, shown.get(fault, issue(b"ghost")))
    monkeypatch.setattr(Membership, "revoked", frozenset([b"ghost"] if fault == "revoked" else []))
    leader = UselessLeader("begins")
    async with search_quickly(leader) as follower:
        follower.group_key_manager.dht.membership = membership
        follower.step_control.data_for_gather = make_data(epoch, membership.credential)
        assert follower.is_acceptable(averaging_pb2.JoinRequest(gather=data), PeerID(b"ghost")) == (not fault)
        leader.group = {LEADER: make_data(epoch, issue(b"leader")), PeerID(b"ghost"): data}
        leader.group[follower.peer_id] = follower.step_control.data_for_gather
        follower.set_expected_peers({}, 1, frozenset())
        group = await follower._request_join_group(LEADER)
        assert (group is None) == bool(fault) == (LEADER in follower.backoff.useless)


@pytest.mark.parametrize("gather", [b"", 5])
def test_group_data_have_credential_of_closed_run(monkeypatch, closed_run, gather):
    """Of gradients as of parameters; in an open run, they are those of plain hivemind."""
    membership, _ = closed_run
    monkeypatch.setattr(hivemind.DecentralizedAverager, "step", lambda *_, gather, **__: gather)
    gather = gather or sign_round_state(5, True, "", [0.0] * SKETCH_SIZE)
    for member in (membership, None):
        averager = VerifyingAverager.__new__(VerifyingAverager)  # without its process
        averager.dht, averager._parent_pid = SimpleNamespace(uplink=Uplink(), membership=member), None
        sent = averager.step(gather=gather)
        data = parse_gathered(MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps(sent)]))
        assert data.credential == (member.credential if member else b"") and bool(data.state) == (gather != 5)
        assert member or sent == gather


@pytest.mark.parametrize(
    "epochs, others, is_joined",
    [
        ({b"leader": 5, b"b": 5, b"c": 5}, {b"leader": 5}, False),
        ({b"leader": 5, b"b": 5, b"c": 5}, {b"leader": 5, b"b": 5}, True),
        ({b"leader": 5, b"b": 5, b"c": 5}, {b"leader": 5, b"new": 5, b"newer": 5}, False),
        ({b"leader": 5, b"b": 5, b"c": 5}, {b"leader": 5, b"b": 4}, False),  # as b has signed it an epoch ago
        ({b"leader": 5, b"b": 5, b"c": 4, b"d": 4}, {b"leader": 5, b"b": 5, b"c": 4}, True),  # c replays the step
        ({b"leader": 5, b"b": 5, b"c": 5, b"d": 5}, {b"leader": 5, b"b": 5}, False),
        ({b"leader": math.inf, b"b": 5}, {b"leader": 5}, False),
        ({b"leader": math.inf, b"b": math.inf, b"c": math.inf}, {b"leader": 5}, True),  # no contributor is known
        ({b"leader": 5}, {b"leader": 5}, True),
    ],
)
@run_async
async def test_group_without_most_contributors_is_not_joined(monkeypatch, epochs, others, is_joined):
    """A leader that begins a round with each peer alone would stop them all, as no such round leads to a step."""
    monkeypatch.setattr(swarm.matchmaking.RoundState, "is_signed_by", lambda *_: True)
    leader = UselessLeader("begins")
    async with search_quickly(leader) as follower:
        follower.step_control.data_for_gather = make_data()
        leader.group = {PeerID(name): make_data(epoch) for name, epoch in others.items()}
        leader.group[follower.peer_id] = follower.step_control.data_for_gather
        follower.set_expected_peers(epochs, 1, frozenset())
        group = await follower._request_join_group(LEADER)
        assert (group is not None) == is_joined == (LEADER not in follower.backoff.useless)
        assert is_joined or not follower.assembled_group.done(), "the search goes on"


@pytest.mark.parametrize("invented, is_refused", [(MAX_WORKERS + 1, False), (MAX_WORKERS + 2, True)])
@run_async
async def test_group_with_invented_members_is_refused(monkeypatch, invented, is_refused):
    """The plan of a round with thousands of them takes minutes and gigabytes. Auxiliary peers come on top."""
    monkeypatch.setattr(swarm.matchmaking.RoundState, "is_signed_by", lambda *_: True)
    leader, data = UselessLeader("begins"), make_data()
    async with search_quickly(leader) as follower:
        follower.step_control.data_for_gather, follower.target_group_size = data, 3
        leader.group = {peer: data for peer in (LEADER, follower.peer_id)}
        leader.group |= {PeerID(b"invented%d" % number): data for number in range(invented)}
        with pytest.raises(MaliciousPeersError) if is_refused else contextlib.nullcontext():
            assert await follower._request_join_group(LEADER)


@run_async
async def test_unknown_group_is_refused_in_time():
    """A leader may have shown it to others only. Without an answer, they would ban this peer for its silence."""
    uplink = SimpleNamespace(timeouts=SimpleNamespace(request=0.1))
    averager, context = SimpleNamespace(_running_groups={}, dht=SimpleNamespace(uplink=uplink)), SimpleNamespace()
    averager._pending_groups_registered = asyncio.Event()  # this peer still searches
    averager.matchmaking = SimpleNamespace(group_id=b"")
    request = as_aiter(averaging_pb2.AveragingData(group_id=b"unknown"))
    [answer] = [it async for it in VerifyingAverager.rpc_aggregate_part(averager, request, context)]
    assert answer.code == averaging_pb2.BAD_GROUP_ID


@run_async
@pytest.mark.parametrize("code, suspect", [("BAD_GROUP_ID", b"leader"), ("CANCELLED", b"other")])
async def test_leader_of_different_groups_is_suspect(code, suspect):
    """It may have shown the peer another group. A claim of the peer about a third one does not change that."""
    own, peer, other = (PeerID(name) for name in (b"own", b"peer", b"other"))
    runner = SimpleNamespace(ordered_peer_ids=[own, peer, other, LEADER], peer_id=own, leader=LEADER)
    runner.blamed, runner.broken, runner.foreign, runner.essential = {}, {peer}, set(), set()
    message = averaging_pb2.AveragingData(code=averaging_pb2.MessageCode.Value(code), peer_id=other.to_bytes())
    await FailFastAllReduceRunner.check_blame(runner, message, peer)
    assert runner.blamed == {peer: PeerID(suspect)} and runner.foreign == ({peer} if suspect == b"leader" else set())


@pytest.mark.parametrize(
    "known, members, is_banned",
    [
        (b"bcd", b"bc", False),  # two of four without it, or with a member that it does not count
        (b"bcd", b"bcd", True),
        (b"b", b"b", False),
        (b"bcdef", b"bcd", False),
        (b"bcdef", b"bcde", True),  # it breaks a round that needs it no more
        (b"cd", b"bcd", True),  # new keys cost nothing
        (b"", b"bcd", True),
    ],
)
@run_async
async def test_leader_bans_no_follower_that_may_refuse(known, members, is_banned):
    """In a long batch, it does not know yet which contributors have left; or it sees one of these in time."""
    leader, group = make_matchmaking(None), [PeerID(bytes([name])) for name in (*b"a", *members)]
    leader.set_expected_peers({bytes([name]): 5 for name in known}, 2, frozenset())
    own, peer, *_ = group
    leader.leader = leader.peer_id = own
    averager = SimpleNamespace(_trust=RoundTrust(), peer_id=own, dht=leader.group_key_manager.dht)
    averager._trust.rounds.update(dict.fromkeys(group, 9))
    message = averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)

    async def refuse() -> None:
        runner = SimpleNamespace(ordered_peer_ids=group, peer_id=own, leader=own, group_size=len(group), silent=[])
        runner.blamed, runner.foreign, runner.refused, runner.violations = {}, set(), set(), {}
        runner.essential = leader.find_essential(group)
        await FailFastAllReduceRunner.check_blame(runner, message, peer)
        runner.cause, runner.broken = (peer, peer), {peer}
        watch = asyncio.get_running_loop().create_future()
        watch.set_result(None)
        await VerifyingAverager._check_failed_round(averager, runner, watch)

    for _ in range(MAX_BROKEN_ROUNDS - 1):
        await refuse()
    with pytest.raises(MaliciousPeersError) if is_banned else contextlib.nullcontext() as caught:
        await refuse()
    assert not is_banned or [*caught.value.args[0]] == [peer]
    leader.leader = peer
    assert not leader.find_essential(group), "a leader of another group may have hidden it"


@run_async
async def test_tasks_of_joins_end_with_search(monkeypatch):
    async def wait(matchmaking, _) -> None:
        matchmaking.waiting = asyncio.create_task(matchmaking.was_accepted_to_group.wait())
        await asyncio.sleep(0.01)

    monkeypatch.setattr(Matchmaking, "look_for_group", wait)
    matchmaking = make_matchmaking(None)
    matchmaking.group_key_manager.declared_until = 0.0
    await matchmaking.look_for_group(make_step())
    await asyncio.wait([matchmaking.waiting], timeout=5)
    assert matchmaking.waiting.done() and not matchmaking.was_accepted_to_group.is_set()
