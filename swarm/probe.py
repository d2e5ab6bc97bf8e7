"""Checks before joining, with a separate libp2p client: which peer is at an address, and what it attests."""

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncIterator

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from common.files import temporary_folder
from swarm.addresses import diagnose_unreachable, get_peer_id
from swarm.attestation import ANSWER_TIMEOUT, RunAttestation, request_attestations, select_attesters
from swarm.errors import SwarmError
from swarm.membership import Membership
from swarm.patches import install

CONNECT_TIMEOUT = 15.0  # seconds
UNKNOWN_PEER = PeerID(b"\x12\x20" + bytes(32))  # a valid id without a known key


@contextlib.asynccontextmanager
async def open_client(membership: Membership | None) -> AsyncIterator[P2P]:
    """Start a P2P daemon that belongs to no swarm; in a closed run it has this member's identity, to be let in."""
    install()
    options = dict(no_listen=True, nat_port_map=False, auto_nat=False)
    with temporary_folder() as folder:
        identity = {"identity_path": f"{folder}/identity"} if membership else {}
        p2p = await P2P.create(dht_mode="client", **options, **identity)
    try:
        yield p2p
    finally:
        await p2p.shutdown()


async def connect(p2p: P2P, peer: PeerID, places: list[str], seconds: float) -> None:
    """Connect to a peer at one of its multiaddrs without id, or raise a TimeoutError or ControlFailure."""
    await asyncio.wait_for(p2p._client.connect(peer, list(map(Multiaddr, places))), seconds)


def parse_actual_id(error: Exception) -> str | None:
    """Return the id of the peer that answered instead of the expected one, from libp2p's error message."""
    match = re.search(r"remote key matches (\w+)", str(error))
    return match and match[1]


async def find_peer(place: str) -> str | None:
    """Return a multiaddr with the id of the peer that listens there, or None if no peer reveals one. A connection with
    a wrong id fails, and libp2p's error names the right one."""
    async with open_client(None) as p2p:
        try:
            await connect(p2p, UNKNOWN_PEER, [place], ANSWER_TIMEOUT)
        except (ControlFailure, TimeoutError) as e:
            if peer_id := parse_actual_id(e):
                return f"{place}/p2p/{peer_id}"
    return None


async def fetch_attestations(maddrs: list[str], membership: Membership | None) -> dict[PeerID, RunAttestation]:
    """Return the attestations of the peers that answer."""
    places = defaultdict(list)
    for maddr in maddrs:
        places[get_peer_id(maddr)].append(maddr.rpartition("/p2p/")[0])
    attesters = [peer for peer in select_attesters(maddrs) if all(places[peer])]
    async with open_client(membership) as p2p:
        calls = (connect(p2p, peer, places[peer], ANSWER_TIMEOUT) for peer in attesters)
        failures = await asyncio.gather(*calls, return_exceptions=True)
        connected = [peer for peer, failure in zip(attesters, failures, strict=True) if failure is None]
        return await request_attestations(p2p, connected)


async def probe(p2p: P2P, maddr: str) -> str | None:
    """Connect to a peer and return None, or why it failed and what to do."""
    try:
        await connect(p2p, peer := get_peer_id(maddr), [maddr.rpartition("/p2p/")[0]], CONNECT_TIMEOUT)
        await request_attestations(p2p, [peer])
    except SwarmError as e:
        return str(e)
    except (ControlFailure, TimeoutError) as e:
        if peer_id := parse_actual_id(e):
            return f"another peer is at this address: its id is {peer_id}, use the address it prints now"
        return f"it does not answer ({(str(e).splitlines() or ['no answer within 15 s'])[-1].strip(' *')})"
    return None


async def explain_unreachable(maddrs: list[str], membership: Membership | None) -> dict[str, str | None]:
    """Test name resolution, TCP and libp2p; return per multiaddr None, or why it failed and what to do."""
    reasons = dict(zip(maddrs, await asyncio.gather(*map(diagnose_unreachable, maddrs)), strict=True))
    answering = [maddr for maddr, reason in reasons.items() if reason is None and not maddr.startswith("/p2p/")]
    if answering:
        async with open_client(membership) as p2p:
            failures = await asyncio.gather(*(probe(p2p, maddr) for maddr in answering))
            reasons |= zip(answering, failures, strict=True)
    return reasons


def find_problem(maddrs: list[str], membership: Membership | None) -> str | None:
    """Return one line about the unreachable peers of `initial_peers`, or None if all are reachable."""
    found = asyncio.run(explain_unreachable(maddrs, membership))
    reasons = [f"{maddr}: {reason}" for maddr, reason in found.items() if reason]
    return f"cannot reach `initial_peers` {'; '.join(reasons)}" if reasons else None
