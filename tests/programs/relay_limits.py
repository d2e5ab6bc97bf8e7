"""Print the bytes that a relay lets through: of plain hivemind, and of Swarm.join, each with a new daemon."""

import asyncio

from hivemind.p2p import P2P

from swarm.addresses import get_peer_id
from swarm.reachability import ask_relay_limit
from tests.programs.peers import clean_end, join, list_maddrs, shut_down


async def ask(maddr, peer_id):
    p2p = await P2P.create(initial_peers=[maddr], dht_mode="client")
    try:
        return await ask_relay_limit(p2p, get_peer_id(f"/p2p/{peer_id}"))
    finally:
        await p2p.shutdown()


async def ask_plain():
    plain = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    try:
        return await ask(str((await plain.get_visible_maddrs())[0]), str(plain.peer_id))
    finally:
        await plain.shutdown()


with clean_end():
    print(asyncio.run(ask_plain()), flush=True)
    dhts = [join("gaps").dht for _ in range(4)]
    for dht in dhts:
        print(asyncio.run(ask(list_maddrs(dht)[0], str(dht.peer_id))), flush=True)
    for dht in dhts:
        shut_down(dht)
