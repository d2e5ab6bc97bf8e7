"""Reachability of this peer: whether others can connect to it, which peers can relay for it, and its bandwidth."""

import asyncio
import contextlib
import ipaddress
import json
import math
import time
from functools import partial

import hivemind
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe

from swarm.addresses import get_host_port, get_ip, get_peer_id, is_relayed
from swarm.attestation import dial
from swarm.state_server import parse_epochs

# The request "dial me back", and timeouts in seconds: a firewall that drops packets does not answer, and callers queue.
DIAL_BACK = "dial_back"
DIAL_TIMEOUT = 3.0
DIAL_BACK_TIMEOUT = 60.0
ANSWER_TIMEOUT = 10.0
MAX_DIALS = 2  # at once, each by a daemon of its own
MAX_CALLERS = 16  # at once, most of which wait
# The request to measure the bandwidth: its bytes are received, and the answer is empty.
MEASURE = "measure_bandwidth"
MEASURE_BYTES = 2**17
MEASURE_TIME = 0.5  # seconds; no new batch of requests starts after this time
MEASURE_REQUESTS = 8  # maximum number of concurrent requests
MEASURE_TIMEOUT = 6.0  # seconds without an answer; the exact rate of a slower connection does not matter
DEFAULT_BANDWIDTH = 100.0  # Mbit/s
USUAL_BANDWIDTH = 5.0
MIN_BANDWIDTH = 0.1
# libp2p's request for a reservation at a relay, and the bytes that a relay must forward: a round is tens of megabytes.
RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
RELAY_BYTES = 2**30
RESERVE_PERIOD = 10.0  # seconds
# Errors of a request to a peer that has left, is too slow, runs other software, or sends invalid data.
REQUEST_ERRORS = (P2PDaemonError, P2PHandlerError, OSError, ValueError, DecodeError)


def find_ports(dht: hivemind.DHT) -> list[int]:
    """Return the ports in this peer's direct (not relayed) addresses."""
    maddrs = [maddr for maddr in dht.get_visible_maddrs(latest=True) if not is_relayed(maddr)]
    return sorted({port for maddr in maddrs if (port := get_host_port(maddr)[2])})


def find_reachability(dht: hivemind.DHT) -> tuple[list[str], bool | None]:
    """Ask peers to dial back through a new connection; a ping in return, as in hivemind, passes every firewall (note
    47). Return the IP addresses at which others see this peer, and whether they can reach it (None: no answer)."""
    answers = dht.run_coroutine(partial(ask_to_dial_back, find_ports(dht)))
    # A peer with a public address has no open port at the IP version that it does not listen on.
    ips = [ip for maddr in dht.get_visible_maddrs() if (ip := get_ip(maddr))]
    versions = {ip.version for ip in ips} if any(ip.is_global for ip in ips) else {4, 6}
    answers = [answer for answer in answers if ipaddress.ip_address(answer[0]).version in versions]
    # A peer in the same network cannot test the path from outside.
    answers = [answer for answer in answers if ipaddress.ip_address(answer[0]).is_global] or answers
    return sorted({ip for ip, _ in answers}), any(reached for _, reached in answers) if answers else None


async def register_dial_back_handler(_: hivemind.DHT, node: DHTNode) -> None:
    """Start to answer requests to dial back and to measure the bandwidth. Runs in the DHT process."""
    dialling = asyncio.Semaphore(MAX_DIALS)
    callers = set()

    async def dial_back(request: BytesValue, context: P2PContext) -> BytesValue:
        ports = [256 * high + low for high, low in zip(request.value[:8:2], request.value[1:8:2], strict=False)]
        # Dial only the caller's own address, so that no peer can make us dial a third party.
        seen_at = [ip for maddr in await find_connections(node, context.remote_id) if (ip := get_ip(maddr))]
        places = [f"/ip{ip.version}/{ip}/tcp/{port}" for ip in seen_at[:1] for port in ports]
        reached = False
        if places and context.remote_id not in callers and len(callers) < MAX_CALLERS:  # else, it becomes a client
            callers.add(context.remote_id)
            try:
                # A firewall lets in packets of QUIC from this peer's own port, to which the caller has sent some.
                async with dialling:
                    reached = await dial(context.remote_id, places, DIAL_TIMEOUT) is None
            finally:
                callers.remove(context.remote_id)
        return BytesValue(value=json.dumps({"seen_at": [str(ip) for ip in seen_at], "reached": reached}).encode())

    async def receive_bytes(request: BytesValue, _: P2PContext) -> BytesValue:
        return BytesValue()

    # not canceled with the call, because the daemon would stay, and its place would be free
    await node.p2p.add_protobuf_handler(DIAL_BACK, lambda *call: asyncio.shield(dial_back(*call)), BytesValue)
    await node.p2p.add_protobuf_handler(MEASURE, receive_bytes, BytesValue)


async def measure_rate(dht: hivemind.DHT, node: DHTNode) -> float | None:
    """Return the highest rate of several batches of requests to initial peers, in Mbit/s; MIN_BANDWIDTH if all are too
    slow. A slow peer may be busy itself, so others are asked, and all once more, until a rate reaches USUAL_BANDWIDTH.
    Each batch is twice the last one, so that a slow connection needs few."""
    request = BytesValue(value=bytes(MEASURE_BYTES))
    best = None
    for peer_id in 2 * dht.initial_ids:
        requests = 1
        start = time.monotonic()
        try:
            while time.monotonic() < start + MEASURE_TIME:
                batch_start = time.monotonic()
                calls = [node.p2p.call_protobuf_handler(peer_id, MEASURE, request, BytesValue) for _ in range(requests)]
                await asyncio.wait_for(asyncio.gather(*calls), MEASURE_TIMEOUT)
                best = max(best or MIN_BANDWIDTH, 8e-6 * requests * MEASURE_BYTES / (time.monotonic() - batch_start))
                requests = min(2 * requests, MEASURE_REQUESTS)
        except REQUEST_ERRORS as e:  # among them, TimeoutError
            best = best or (MIN_BANDWIDTH if isinstance(e, TimeoutError) else None)
        if best and best >= USUAL_BANDWIDTH:
            break
    return best


async def find_connections(node: DHTNode, peer_id: PeerID) -> list[str]:
    """Return the multiaddrs of direct (not relayed) connections to this peer."""
    infos = [info for info in await node.p2p.list_peers() if info.peer_id == peer_id]
    return [str(maddr) for info in infos for maddr in info.addrs if get_ip(maddr) is not None]


async def call_dial_back(node: DHTNode, peer_id: PeerID, ports: list[int]) -> tuple[str, bool] | None:
    """Ask one peer to dial back; return the IP address that it sees, and if it got through; None if it fails."""
    request = BytesValue(value=b"".join(port.to_bytes(2, "big") for port in ports[:4]))
    try:
        call = node.p2p.call_protobuf_handler(peer_id, DIAL_BACK, request, BytesValue)
        answer = json.loads((await asyncio.wait_for(call, DIAL_BACK_TIMEOUT if ports else ANSWER_TIMEOUT)).value)
        return str(ipaddress.ip_address(answer["seen_at"][0])), answer["reached"] is True
    except (*REQUEST_ERRORS, LookupError, TypeError, RecursionError):  # the last by deeply nested JSON
        return None


async def ask_to_dial_back(ports: list[int], dht: hivemind.DHT, node: DHTNode) -> list[tuple[str, bool]]:
    """Ask up to four initial peers to dial back, and return the valid answers. Runs in the DHT process."""
    answers = await asyncio.gather(*(call_dial_back(node, peer_id, ports) for peer_id in dht.initial_ids[:4]))
    return [answer for answer in answers if answer]


async def find_direct_peers(maddrs: list[str], _: hivemind.DHT, node: DHTNode) -> list[str]:
    """Return the multiaddrs whose peers have a direct connection with this one. Runs in the DHT process."""
    direct = {maddr: await find_connections(node, get_peer_id(maddr)) for maddr in maddrs}
    # A multiaddr with only a peer id has no address of its own: IPFS resolved it.
    return [f"{used[0]}{maddr}" if maddr.startswith("/p2p/") else maddr for maddr, used in direct.items() if used]


async def find_relays(maddrs: list[str], dht: hivemind.DHT, node: DHTNode) -> list[str]:
    """Return the directly connected peers that relay as many bytes as training needs. Runs in the DHT process."""
    direct = await find_direct_peers(maddrs, dht, node)
    limits = await asyncio.gather(*(ask_relay_limit(node.p2p, get_peer_id(maddr)) for maddr in direct))
    return [maddr for maddr, limit in zip(direct, limits, strict=True) if limit >= RELAY_BYTES]


async def keep_reservations(maddrs: list[str], _: hivemind.DHT, node: DHTNode) -> None:
    """Reserve places at these relays again and again: after a lost one, libp2p would wait an hour (note 30)."""
    while True:
        await asyncio.gather(*(ask_relay_limit(node.p2p, get_peer_id(maddr)) for maddr in maddrs))
        await asyncio.sleep(RESERVE_PERIOD)


async def ask_relay_limit(p2p: P2P, peer_id: PeerID) -> float:
    """Reserve a place at this relay, and return the bytes that it passes on per connection, or 0. hivemind's relays end
    at 128 kB, within a round."""
    answer = Empty()
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            _, reader, writer = await p2p.call_binary_stream_handler(peer_id, RELAY_PROTOCOL)
            with contextlib.closing(writer):
                writer.write(b"\x02\x08\x00")  # a message of two bytes: type (1) RESERVE (0)
                await read_pbmsg_safe(reader, answer)
        fields = read_fields(answer)
        limit = int(read_fields(Empty.FromString(fields.get(4, b""))).get(2, 0))
    except (*REQUEST_ERRORS, TypeError, EOFError):
        return 0
    return (limit or math.inf) if fields.get(5) == 100 else 0  # status OK; a missing limit or 0 means unlimited


def read_fields(message: Empty) -> dict[int, int | bytes]:
    """Return the unknown fields of a protobuf message, by field number; the last value of a repeated field counts."""
    return {field.field_number: field.data for field in UnknownFieldSet(message)}


async def count_reachable_averagers(prefix: str, _: hivemind.DHT, node: DHTNode) -> int:
    """Count the run's state donors that this peer reaches directly, of eight at most. Runs in the DHT process."""
    record = await node.get(f"{prefix}_state_averager.all_averagers", latest=True)
    peers = list(map(PeerID, parse_epochs(record, node.peer_id.to_bytes())))[:8]
    # The request opens a connection; its answer does not matter.
    await asyncio.gather(*(call_dial_back(node, peer_id, []) for peer_id in peers))
    return len([peer_id for peer_id in peers if await find_connections(node, peer_id)])
