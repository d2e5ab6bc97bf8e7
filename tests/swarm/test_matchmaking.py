"""Followers of leaders that begin no round, without a network."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

from swarm.matchmaking import MAX_REDIRECTS, MAX_SEARCHES_APART, EarlyStartMatchmaking
from swarm.uplink import Uplink

LEADER = PeerID(b"leader")


class UselessLeader(ServicerBase):
    """A leader that accepts each follower, and redirects it to itself, or does nothing."""

    def __init__(self, redirects: bool):
        self.redirects, self.requests = redirects, 0

    def get_stub(self, *_, **__):
        return self

    async def rpc_join_group(self, _):
        self.requests += 1

        async def answer():
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            if self.redirects:
                code = averaging_pb2.GROUP_DISBANDED
                yield averaging_pb2.MessageFromLeader(code=code, suggested_leader=LEADER.to_bytes())
            await asyncio.sleep(60)

        return answer()


def make_matchmaking(leader: UselessLeader | None, kind: type[Matchmaking] = EarlyStartMatchmaking) -> Matchmaking:
    dht = SimpleNamespace(uplink=Uplink(), peer_id=PeerID(b"follower"))
    options = dict(prefix="run", target_group_size=None, min_group_size=2, min_matchmaking_time=5.0)
    options |= dict(servicer_type=UselessLeader, request_timeout=3.0, client_mode=False)
    follower = kind(dht, b"schema", dht, **options)
    follower._servicer_type = leader
    return follower


def make_step() -> SimpleNamespace:
    scheduled, step = get_dht_time() + 30.0, SimpleNamespace(data_for_gather=b"", deadline=get_dht_time() + 60.0)
    step.scheduled_time, step.wait_for_trigger = scheduled, partial(asyncio.sleep, 60)
    return step


async def search(follower: EarlyStartMatchmaking, seconds: float = 0.0) -> None:
    """Ask the leader once in a search, and leave it after some seconds if it has not begun."""
    follower.num_searches += 1
    async with follower.looking_for_group(make_step()):
        follower.potential_leaders.search_end_time = get_dht_time() + 30.0
        request = asyncio.create_task(follower._request_join_group(LEADER))
        await asyncio.sleep(seconds)
        follower.avoid_leader()
        assert await asyncio.wait_for(request, 10) is None and follower.current_leader is None


def test_hivemind_follows_redirects_until_stack_is_full():
    """Note 97; EarlyStartMatchmaking._request_join_group."""

    async def follow() -> None:
        follower = make_matchmaking(UselessLeader(redirects=True), Matchmaking)
        async with follower.looking_for_group(make_step()):
            await follower._request_join_group(LEADER)

    with pytest.raises(RecursionError):
        asyncio.run(follow())


def test_leader_redirecting_to_itself_is_left():

    async def follow() -> int:
        leader = UselessLeader(redirects=True)
        await search(make_matchmaking(leader))
        return leader.requests

    assert asyncio.run(follow()) == 1 + MAX_REDIRECTS


def test_leader_without_round_is_avoided_for_some_searches():
    """For more of them each time, but never for good, because an honest one may have been cut off."""

    async def follow() -> list[int]:
        leader, asked_in = UselessLeader(redirects=False), []
        follower = make_matchmaking(leader)
        for number in range(44):
            requests = leader.requests
            await search(follower, 0.05)
            if leader.requests > requests:
                asked_in.append(number)
        return asked_in

    assert asyncio.run(follow()) == [0, 2, 7, 24, 41] and MAX_SEARCHES_APART == 16
