"""How this peer looks from outside: whether others can reach it, who relays for it, how fast the way there is."""

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import logging
import math
import time
from collections import Counter
from functools import partial

import hivemind
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe

from arguments import AveragingArguments
from support.console import format_number
from swarm.addresses import diagnose_unreachable, get_host_port, get_ip, get_peer_id, is_relayed

logger = logging.getLogger("reachability")

# The name of the request "dial me back", and how long one dial may take: a firewall that drops packets answers nothing.
DIAL_BACK = "dial_back"
DIAL_TIMEOUT = 3.0
# The name of the request to measure the bandwidth, how many bytes it moves, and for how many seconds they are made.
MEASURE = "measure_bandwidth"
MEASURE_BYTES, MEASURE_TIME = 2**17, 0.5
MEASURE_REQUESTS, MEASURE_PATIENCE = 8, 6.0  # at once, at most; seconds without an answer: slower than is worth knowing
MEASURE_LIMIT, MEASURE_PERIOD = 500, 600.0  # requests that a peer answers to another one within so many seconds
DEFAULT_BANDWIDTH, LOWEST_BANDWIDTH = 100.0, 0.1  # Mbit/s
# libp2p's request for a place at a relay, and what a relay must pass at least: each round is tens of megabytes.
RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
RELAY_BYTES = 2**30
# Of a request to a peer that is gone, too slow, of another project, or lies.
REQUEST_ERRORS = (P2PDaemonError, P2PHandlerError, OSError, ValueError)


def find_ports(dht: hivemind.DHT) -> list[int]:
    """The TCP ports at which this peer's addresses say it can be reached directly."""
    maddrs = [maddr for maddr in dht.get_visible_maddrs(latest=True) if not is_relayed(maddr)]
    return sorted({port for maddr in maddrs if (port := get_host_port(maddr)[2])})


def find_reachability(dht: hivemind.DHT, initial_peers: list[str]) -> tuple[list[str], bool | None]:
    """Ask peers to dial back, by a connection of its own.

    hivemind's own check, a ping in return, uses the connection that this peer has opened, and so succeeds through
    every firewall.

    :returns: the IP addresses at which others see this peer, and whether they can reach it there (None: nobody tells)
    """
    answers = dht.run_coroutine(partial(ask_to_dial_back, initial_peers, find_ports(dht)))
    # one that sees us from within the same network knows nothing of the way from outside
    outside = {ip: reached for ip, reached in answers if ipaddress.ip_address(ip).is_global}
    answers = [(ip, reached) for ip, reached in answers if not outside or ip in outside]
    if not answers:
        return [], None
    return sorted({ip for ip, _ in answers}), any(reached for _, reached in answers)


async def register_dial_back_handler(_: hivemind.DHT, node: DHTNode) -> None:
    """Runs in the DHT process: from now on, tell peers whether their ports can be reached from here, and let them
    measure how fast the way here is."""
    dialling = asyncio.Semaphore(8)

    async def dial_back(request: BytesValue, context: P2PContext) -> BytesValue:
        ports = [256 * high + low for high, low in zip(request.value[:8:2], request.value[1:8:2], strict=False)]
        # only where the request comes from: nobody can make us dial a third party
        seen_at = [ip for maddr in await find_connections(node, context.remote_id) if (ip := get_ip(maddr))]
        reached = False
        if seen_at and ports:
            async with dialling:
                place = f"/ip{seen_at[0].version}/{seen_at[0]}/tcp"
                asked = (diagnose_unreachable(f"{place}/{port}", DIAL_TIMEOUT) for port in ports)
                reached = None in await asyncio.gather(*asked)
        return BytesValue(value=json.dumps({"seen_at": [str(ip) for ip in seen_at], "reached": reached}).encode())

    measuring, asked, next_period = asyncio.Semaphore(MEASURE_REQUESTS), Counter(), time.monotonic() + MEASURE_PERIOD

    async def echo_bytes(request: BytesValue, context: P2PContext) -> BytesValue:
        nonlocal next_period
        if time.monotonic() > next_period:
            next_period = time.monotonic() + MEASURE_PERIOD
            asked.clear()
        asked[context.remote_id] += 1
        if asked[context.remote_id] > MEASURE_LIMIT or len(asked) > MEASURE_LIMIT:
            raise ValueError("you have measured often enough")
        async with measuring:
            # the answer to two bytes is long, and the other way round
            return BytesValue(value=bytes(MEASURE_BYTES) if len(request.value) <= 2 else b"")

    await node.p2p.add_protobuf_handler(DIAL_BACK, dial_back, BytesValue)
    await node.p2p.add_protobuf_handler(MEASURE, echo_bytes, BytesValue)


def measure_bandwidth(dht: hivemind.DHT, averaging: AveragingArguments) -> AveragingArguments:
    """Set the pace of this peer's uplink: --bandwidth, or what was measured against the initial peers.

    :returns: the same arguments with that bandwidth
    """
    if averaging.bandwidth is not None:
        dht.uplink.set_bandwidth(averaging.bandwidth, is_fixed=True)
        return averaging
    peers = {get_peer_id(str(maddr)) for maddr in dht.initial_peers or ()}
    found = dht.run_coroutine(partial(measure_rates, peers)) if peers else None
    if found is None:
        reason = "none of --initial_peers answers bandwidth tests" if peers else "nobody is there to measure it against"
        logger.info(f"bandwidth: {reason}, beginning with {DEFAULT_BANDWIDTH:g} Mbit/s (--bandwidth)")
        bandwidth = DEFAULT_BANDWIDTH
    else:
        up, down = found
        bandwidth = float(f"{min(up, 1e5):.2g}")
        rates = [format_number(rate) for rate in (up, down, bandwidth)]
        logger.info(f"bandwidth: measured {rates[0]} Mbit/s up, {rates[1]} down, sending {rates[2]} (--bandwidth)")
    dht.uplink.set_bandwidth(bandwidth, is_fixed=False)
    return dataclasses.replace(averaging, bandwidth=bandwidth)


async def measure_rates(peers: set[PeerID], _: hivemind.DHT, node: DHTNode) -> list[float] | None:
    """Runs in the DHT process: Mbit/s to and from the first of these peers that answers."""
    for peer_id in peers:
        try:
            return [await measure_rate(node, peer_id, is_up) for is_up in (True, False)]
        except REQUEST_ERRORS as e:
            logger.debug(f"{peer_id} does not answer bandwidth tests ({e!r})")
    return None


async def measure_rate(node: DHTNode, peer_id: PeerID, is_up: bool) -> float:
    """Mbit/s, the highest of some batches of requests: one at a time first, then more, so that slow lines end soon."""
    request = BytesValue(value=bytes(MEASURE_BYTES if is_up else 2))
    requests, made, best, start = 1, 0, LOWEST_BANDWIDTH, time.monotonic()
    # there and back, and once more after a restart, before the other peer answers no more
    while time.monotonic() < start + MEASURE_TIME and made < MEASURE_LIMIT // 5:
        batch_start = time.monotonic()
        calls = [node.p2p.call_protobuf_handler(peer_id, MEASURE, request, BytesValue) for _ in range(requests)]
        try:
            answers = await asyncio.wait_for(asyncio.gather(*calls), MEASURE_PATIENCE)
        except TimeoutError:
            break
        if not is_up and any(len(answer.value) != MEASURE_BYTES for answer in answers):
            raise ValueError("its answer is too short")
        made += requests
        best = max(best, 8e-6 * requests * MEASURE_BYTES / (time.monotonic() - batch_start))
        requests = min(2 * requests, MEASURE_REQUESTS)
    return best


async def find_connections(node: DHTNode, peer_id: PeerID) -> list[str]:
    """The multiaddrs at which this peer is connected with another one directly, not through a relay."""
    infos = [info for info in await node.p2p.list_peers() if info.peer_id == peer_id]
    return [str(maddr) for info in infos for maddr in info.addrs if get_ip(maddr) is not None]


async def call_dial_back(node: DHTNode, peer_id: PeerID, ports: list[int]) -> dict | None:
    """What that peer answers, or None: it is gone, or not of this project, or lies."""
    request = BytesValue(value=b"".join(port.to_bytes(2, "big") for port in ports[:4]))
    try:
        call = node.p2p.call_protobuf_handler(peer_id, DIAL_BACK, request, BytesValue)
        answer = json.loads((await asyncio.wait_for(call, 2 * DIAL_TIMEOUT)).value)
        [ipaddress.ip_address(ip) for ip in answer["seen_at"]]
    except (*REQUEST_ERRORS, KeyError, TypeError):
        return None
    return answer


async def ask_to_dial_back(
    initial_peers: list[str], ports: list[int], _: hivemind.DHT, node: DHTNode
) -> list[tuple[str, bool]]:
    """Runs in the DHT process: (IP address at which a peer sees this one, whether it could reach it there), by peer."""
    peers = {get_peer_id(maddr) for maddr in initial_peers}
    # four are enough to tell
    answers = await asyncio.gather(*(call_dial_back(node, peer_id, ports) for peer_id in list(peers)[:4]))
    return [(answer["seen_at"][0], answer["reached"] is True) for answer in answers if answer and answer["seen_at"]]


async def find_direct_peers(maddrs: list[str], _: hivemind.DHT, node: DHTNode) -> list[str]:
    """Runs in the DHT process: where this peer is connected, directly, with the peers of these multiaddrs."""
    found = []
    for maddr in maddrs:
        if connections := await find_connections(node, peer_id := get_peer_id(maddr)):
            # one that was found by its id alone has its address from IPFS
            found.append(f"{connections[0]}/p2p/{peer_id}" if maddr.startswith("/p2p/") else maddr)
    return found


async def find_relays(maddrs: list[str], dht: hivemind.DHT, node: DHTNode) -> list[str]:
    """Runs in the DHT process: of these peers, those that would relay for this one as much as training takes."""
    direct = await find_direct_peers(maddrs, dht, node)
    limits = await asyncio.gather(*(ask_relay_limit(node.p2p, get_peer_id(maddr)) for maddr in direct))
    return [maddr for maddr, limit in zip(direct, limits, strict=True) if limit >= RELAY_BYTES]


async def ask_relay_limit(p2p: P2P, peer_id: PeerID) -> float:
    """Bytes that this peer passes through one relayed connection; 0 when it does not relay for us.

    Relays of plain hivemind pass 128 kB, after which the connection breaks, and every round with it.
    """

    async def ask() -> float:
        _, reader, writer = await p2p.call_binary_stream_handler(peer_id, RELAY_PROTOCOL)
        answer = Empty()
        with contextlib.closing(writer):
            writer.write(b"\x02\x08\x00")  # a message of two bytes: type (1) RESERVE (0)
            await read_pbmsg_safe(reader, answer)
        fields = read_fields(answer)
        if fields.get(5) != 100:  # status OK
            return 0
        limit = read_fields(Empty.FromString(fields.get(4, b"")))
        return limit.get(2) or math.inf  # no limit, or 0: as much as you like

    try:
        return await asyncio.wait_for(ask(), 5)
    except (*REQUEST_ERRORS, TypeError, EOFError, DecodeError):
        return 0


def read_fields(message: Empty) -> dict[int, int | bytes]:
    """The last value of each field that was read, by its number."""
    return {field.field_number: field.data for field in UnknownFieldSet(message)}


async def count_reachable_averagers(prefix: str, _: hivemind.DHT, node: DHTNode) -> int:
    """Runs in the DHT process: number of peers of the run that give states, and that this one reaches directly."""
    found = await node.get(f"{prefix}_state_averager.all_averagers", latest=True)
    if found is None or not isinstance(found.value, dict):
        return 0
    peers = [PeerID(key) for key, entry in found.value.items() if entry.value is not None]
    peers = [peer_id for peer_id in peers if peer_id != node.peer_id][:8]
    # the question opens a connection; what is answered does not matter
    await asyncio.gather(*(call_dial_back(node, peer_id, []) for peer_id in peers))
    return sum([bool(await find_connections(node, peer_id)) for peer_id in peers])
