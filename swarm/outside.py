"""What a peer finds out before it joins, by a libp2p client of its own: who is at an address, and what it vouches for.

    python -c "import asyncio; from swarm.outside import explain_unreachable; \\
        print(asyncio.run(explain_unreachable(['/ip4/127.0.0.1/tcp/9/p2p/XXXX'], None)))"
"""

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncIterator

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from support.console import UserError
from support.files import temporary_folder
from swarm.addresses import diagnose_unreachable, get_peer_id
from swarm.membership import Membership
from swarm.patches import install
from swarm.vouching import ANSWER_SECONDS, RunAttestation, request_statements, select_attesters

CONNECT_SECONDS = 15.0
NOBODY = PeerID(b"\x12\x20" + bytes(32))  # an id whose key is not known to anybody


@contextlib.asynccontextmanager
async def open_client(membership: Membership | None) -> AsyncIterator[P2P]:
    """A daemon that is no part of any swarm; of a closed run's member, as which it may ask."""
    install()
    options = dict(no_listen=True, nat_port_map=False, auto_nat=False, startup_timeout=60)
    with temporary_folder() as folder:
        identity = {"identity_path": f"{folder}/identity"} if membership else {}
        p2p = await P2P.create(dht_mode="client", **options, **identity)
    try:
        yield p2p
    finally:
        await p2p.shutdown()


async def connect(p2p: P2P, peer: PeerID, places: list[str], seconds: float) -> None:
    """:param places: its multiaddrs, without its id"""
    await asyncio.wait_for(p2p._client.connect(peer, list(map(Multiaddr, places))), seconds)


def find_real_id(error: Exception) -> str | None:
    """The id of the peer that has answered in the place of another one."""
    match = re.search(r"remote key matches (\w+)", str(error))
    return match and match[1]


async def find_peer(place: str) -> str | None:
    """The multiaddr, with its id, of the peer that listens at one without; None where it does not say who it is."""
    async with open_client(None) as p2p:
        try:
            await connect(p2p, NOBODY, [place], ANSWER_SECONDS)
        except (ControlFailure, TimeoutError) as e:
            if peer_id := find_real_id(e):
                return f"{place}/p2p/{peer_id}"
    return None


async def ask_from_outside(maddrs: list[str], membership: Membership | None) -> dict[PeerID, RunAttestation]:
    """The statements of those of these peers that answer."""
    places = defaultdict(list)
    for maddr in maddrs:
        places[get_peer_id(maddr)].append(maddr.rpartition("/p2p/")[0])
    asked = [peer for peer in select_attesters(maddrs) if all(places[peer])]
    async with open_client(membership) as p2p:
        calls = (connect(p2p, peer, places[peer], ANSWER_SECONDS) for peer in asked)
        failures = await asyncio.gather(*calls, return_exceptions=True)
        there = [peer for peer, failure in zip(asked, failures, strict=True) if failure is None]
        return await request_statements(p2p, there)


async def probe(p2p: P2P, maddr: str) -> str | None:
    """Why libp2p cannot connect to a peer, with the cure, or None."""
    try:
        await connect(p2p, peer := get_peer_id(maddr), [maddr.rpartition("/p2p/")[0]], CONNECT_SECONDS)
        await request_statements(p2p, [peer])
    except UserError as e:
        return str(e)
    except (ControlFailure, TimeoutError) as e:
        if peer_id := find_real_id(e):
            return f"another peer is at this address: its id is {peer_id}, use the address it prints now"
        return f"it does not answer ({(str(e).splitlines() or ['no answer within 15 s'])[-1].strip(' *')})"
    return None


async def explain_unreachable(maddrs: list[str], membership: Membership | None) -> dict[str, str | None]:
    """For each peer why it cannot be reached, with the cure, or None when it can: by name, TCP, and libp2p."""
    reasons = dict(zip(maddrs, await asyncio.gather(*map(diagnose_unreachable, maddrs)), strict=True))
    answering = [maddr for maddr, reason in reasons.items() if reason is None and not maddr.startswith("/p2p/")]
    if answering:
        async with open_client(membership) as p2p:
            found = await asyncio.gather(*(probe(p2p, maddr) for maddr in answering))
            reasons |= zip(answering, found, strict=True)
    return reasons


def find_problem(maddrs: list[str], membership: Membership | None) -> str | None:
    """One line on those of --initial_peers that cannot be reached; None where all can."""
    found = asyncio.run(explain_unreachable(maddrs, membership))
    reasons = [f"{maddr}: {reason}" for maddr, reason in found.items() if reason]
    return f"cannot reach --initial_peers {'; '.join(reasons)}" if reasons else None
