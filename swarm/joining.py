"""Joining a run: start the DHT in the way that the network allows, and agree on the contract with those who are there.

A peer finds out whether others can reach it by asking those it reaches itself to dial back. If they cannot, it becomes
a client, or is reached through a relay. Each way in which this can fail is one line that names the cure.

    python -c "from swarm import joining; print(joining.explain_unreachable(['/ip4/127.0.0.1/tcp/9/p2p/XXXX']))"
"""

import asyncio
import dataclasses
import http.client
import ipaddress
import json
import logging
import math
import os
import re
import socket
import threading
import time
import urllib.request
from collections import Counter
from functools import partial
from typing import NoReturn

import hivemind
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils import get_dht_time
from hivemind.utils.multiaddr import Multiaddr

from arguments import AveragingArguments, SwarmArguments
from support.console import UserError
from swarm.addresses import (
    GREETING,
    check_multiaddrs,
    explain_silence,
    get_host_port,
    get_ip,
    get_peer_id,
    is_local,
    is_public,
    is_relayed,
    select_for_others,
)
from swarm.dht import DHT, check_versions, raise_file_limit
from swarm.line import LINE
from swarm.processes import calm_log, end_when_it_dies
from swarm.status import resolve_initial_peers
from utils import FETCH_TIMEOUT, RunContract, fetch_dictionary, make_validators

logger = logging.getLogger("joining")

# The name of the request "dial me back", and how long one dial may take: a firewall that drops packets answers nothing.
DIAL_BACK = "dial_back"
DIAL_TIMEOUT = 3.0
RELAY_TIMEOUT = 200.0
# The name of the request to measure the bandwidth, how many bytes it moves, and for how many seconds they are made.
MEASURE = "measure_bandwidth"
MEASURE_BYTES, MEASURE_TIME = 2**17, 0.5
MEASURE_REQUESTS, MEASURE_PATIENCE = 8, 6.0  # at once, at most; seconds without an answer: slower than is worth to know
MEASURE_LIMIT, MEASURE_PERIOD = 500, 600.0  # requests that a peer answers to another one within so many seconds
DEFAULT_BANDWIDTH, LOWEST_BANDWIDTH = 100.0, 0.1  # Mbit/s
# libp2p's request for a place at a relay, and what a relay must pass at least: each round is tens of megabytes.
RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
RELAY_BYTES = 2**30


# --- the way into the network -----------------------------------------------------------------------------------------


def make_dht(swarm: SwarmArguments) -> tuple[hivemind.DHT, bytes]:
    """Start this peer's DHT, with the run's validators, in the way that the network allows.

    A peer that others cannot reach becomes a client where a peer that it reaches directly averages, and is reached
    through a relay where there is none: look at `dht.client_mode`.

    :returns: the DHT and this peer's public key, the subkey of the records it signs
    """
    swarm = check_addresses(swarm)
    raise_file_limit()
    calm_log()
    validators, public_key = make_validators(swarm.experiment_prefix)
    dht = start_dht(swarm, validators, client_mode=swarm.client_mode)
    if swarm.initial_peers and not swarm.client_mode:
        seen_at, is_reachable = find_reachability(dht, swarm.initial_peers)
        where = f"at {' and '.join(seen_at)}, port {' and '.join(map(str, find_ports(dht)))}" if seen_at else ""
        if is_reachable is False and swarm.announce_maddrs:
            logger.warning(f"others cannot reach this peer {where}: check --announce_maddrs and the firewall")
        elif is_reachable is False:
            dht = restart_unreachable(swarm, validators, dht, where)
    end_when_it_dies(dht, "DHT")
    connected = dht.run_coroutine(partial(find_direct_peers, swarm.initial_peers))
    if silent := [maddr for maddr in swarm.initial_peers if maddr not in connected and not swarm.use_ipfs]:
        # in the background: nobody waits for a peer that does not answer, as long as another one does
        threading.Thread(target=warn_of_silent_peers, args=[silent], daemon=True).start()
    return dht, public_key


def warn_of_silent_peers(maddrs: list[str]) -> None:
    for maddr in maddrs:
        if reason := explain_silence(maddr):
            logger.warning(f"--initial_peers {maddr}: {reason}")


def check_addresses(swarm: SwarmArguments) -> SwarmArguments:
    """The same arguments with HOST:PORT among --initial_peers resolved; stops with one line where one is wrong."""
    check_versions()
    if swarm.authorize:
        raise UserError("--authorize True: membership is not built yet, whoever knows --initial_peers may join")
    swarm = dataclasses.replace(
        swarm, initial_peers=resolve_initial_peers(swarm.initial_peers, swarm.experiment_prefix)
    )
    if swarm.use_google_dns:
        swarm = announce_public_address(swarm)
    check_multiaddrs("--initial_peers", swarm.initial_peers, needs_peer_id=True)
    check_multiaddrs("--host_maddrs", swarm.host_maddrs)
    check_multiaddrs("--announce_maddrs", swarm.announce_maddrs)
    for maddr in swarm.announce_maddrs:
        if get_host_port(maddr)[2] == 0:
            raise UserError(f"--announce_maddrs {maddr} has no port: give the one that others shall connect to")
    if swarm.identity_path:
        check_identity(swarm.identity_path)
    return swarm


def announce_public_address(swarm: SwarmArguments) -> SwarmArguments:
    """The same arguments with the address in --announce_maddrs that --public_ip_url sees this machine at."""
    try:
        with urllib.request.urlopen(swarm.public_ip_url, timeout=10) as answer:
            ip = ipaddress.ip_address(answer.read(100).decode().strip())
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise UserError(
            f"--public_ip_url {swarm.public_ip_url} does not tell this machine's address ({e}): choose another one, or "
            "give --announce_maddrs /ip4/PUBLIC_IP/tcp/PORT yourself"
        ) from e
    host_maddrs, announced = [], []
    for maddr in swarm.host_maddrs:
        protocol, host, port = get_host_port(maddr)
        if protocol == f"ip{ip.version}" and port == 0:
            # a port that the system chose later could not be announced
            with socket.create_server(("", 0), family=socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as free:
                port = free.getsockname()[1]
            maddr = f"/{protocol}/{host}/tcp/{port}"
        host_maddrs.append(maddr)
        if protocol == f"ip{ip.version}":
            announced.append(f"/{protocol}/{ip}/tcp/{port}")
    if not announced:
        raise UserError(f"--use_google_dns: the public address is {ip}, and --host_maddrs listens on none of its kind")
    logger.info(f"announcing {' '.join(announced)}: this port has to be open")
    return dataclasses.replace(swarm, host_maddrs=host_maddrs, announce_maddrs=announced, use_google_dns=False)


def check_identity(path: str) -> None:
    """Stop with one line when there is a file, and it holds no key."""
    if os.path.exists(path):
        try:
            with open(path, "rb") as f:
                PeerID.from_identity(f.read())
        except Exception as e:  # the reader of keys raises many kinds, all of which mean the same
            reason = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
            raise UserError(
                f"--identity_path {path} is no key file ({reason}): name one that a peer has made, or one that does "
                "not exist yet"
            ) from e


def start_dht(swarm: SwarmArguments, validators: list, **options) -> DHT:
    """Start the DHT's helper process; stops with one line when that fails."""
    if not options.get("client_mode") and not swarm.use_ipfs:
        # or nobody relays through this peer before it has found out by itself that it is public, which takes minutes
        options.setdefault("force_reachability", "public")
    try:
        dht = DHT(
            start=True,
            initial_peers=swarm.initial_peers,
            use_ipfs=swarm.use_ipfs,
            host_maddrs=swarm.host_maddrs,
            announce_maddrs=swarm.announce_maddrs or None,
            identity_path=swarm.identity_path,
            use_relay=swarm.use_relay,
            record_validators=validators,
            # hivemind's 15 s are short for a loaded machine (note 13)
            startup_timeout=60,
            **options,
        )
    except ValidationError as e:
        if clocks := re.search(r"local: ([\d.]+), peer: ([\d.]+)", str(e)):
            raise UserError(explain_clock(float(clocks[1]) - float(clocks[2]))) from e
        # the peer did not get through to us just now: whether it can is found out with more patience
        return start_dht(swarm, validators, **{**options, "strict": False, "check_if_identity_free": False})
    except (P2PDaemonError, RuntimeError, OSError, ValueError) as e:
        raise UserError(explain_failed_start(swarm, str(e))) from e
    dht.run_coroutine(answer_newcomers)
    return dht


def restart_unreachable(swarm: SwarmArguments, validators: list, dht: DHT, where: str) -> DHT:
    """In place of this DHT one in client mode, or one that is reached through a relay. Says which, and why.

    :param where: at which address and port others cannot reach this peer
    """
    reason = f"others cannot reach this peer {where} (a firewall or router is between)"
    averagers = dht.run_coroutine(partial(find_direct_averagers, swarm.experiment_prefix))
    relays = dht.run_coroutine(partial(find_relays, swarm.initial_peers))
    dht.shutdown()
    options = dict(check_if_identity_free=False)  # others still think of the one that has just ended
    if not swarm.use_relay or not relays or (averagers and not swarm.use_auto_relay):
        who = f"{averagers} peer{'s that average' if averagers != 1 else ' that averages'} can be reached directly"
        wait = "its gradients count once a trainer that others can reach is there (none of --initial_peers is a relay)"
        logger.warning(f"{reason}: going on in client mode, {who if averagers else wait}")
        return start_dht(swarm, validators, client_mode=True, **options)
    logger.warning(f"{reason}, and nobody averages whom a client could reach: waiting for an address at a relay")
    options |= dict(client_mode=False, use_auto_relay=True, force_reachability="relayed", trusted_relays=relays)
    dht = start_dht(swarm, validators, strict=False, **options)
    started = time.monotonic()
    next_report = started + 10
    while not (maddrs := [maddr for maddr in dht.get_visible_maddrs(latest=True) if is_relayed(maddr)]):
        if (now := time.monotonic()) > started + RELAY_TIMEOUT:
            logger.warning("no relay has accepted this peer: others can reach it only once one does")
            return dht
        if now > next_report:
            next_report += 10
            logger.info(f"no relay has accepted this peer within {now - started:.0f} s, still asking")
        time.sleep(0.2)
    logger.warning(f"others reach this peer through a relay: {select_for_others(maddrs)[0]}")
    return dht


def warn_of_local_addresses(dht: hivemind.DHT, swarm: SwarmArguments) -> None:
    """Say so when others could not use any of this peer's addresses, although it listens for them."""
    maddrs = select_for_others(dht.get_visible_maddrs())
    listens_everywhere = any((ip := get_ip(maddr)) is not None and ip.is_unspecified for maddr in swarm.host_maddrs)
    if listens_everywhere and not dht.client_mode and not any(map(is_public, maddrs)):
        logger.warning(
            f"{maddrs[0]} is an address for this {'machine' if is_local(maddrs[0]) else 'local network'} alone: for "
            "peers outside give --announce_maddrs /ip4/PUBLIC_IP/tcp/PORT with a port that your router forwards"
        )


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


async def answer_newcomers(_: hivemind.DHT, node: DHTNode) -> None:
    """Runs in the DHT process: from now on, tell peers whether their ports can be reached from here, and let them
    measure how fast the way here is."""
    dialling = asyncio.Semaphore(8)

    async def dial_back(request: BytesValue, context: P2PContext) -> BytesValue:
        ports = [
            int.from_bytes(request.value[at : at + 2], "big") for at in range(0, 8, 2) if request.value[at : at + 2]
        ]
        # only where the request comes from: nobody can make us dial a third party
        seen_at = [ip for maddr in await find_connections(node, context.remote_id) if (ip := get_ip(maddr))]
        reached = False
        if seen_at and ports:
            async with dialling:
                reached = any(await asyncio.gather(*(is_peer_at(str(seen_at[0]), port) for port in ports)))
        return BytesValue(value=json.dumps({"seen_at": [str(ip) for ip in seen_at], "reached": reached}).encode())

    measuring, asked, next_period = asyncio.Semaphore(MEASURE_REQUESTS), Counter(), time.monotonic() + MEASURE_PERIOD

    async def take_and_give(request: BytesValue, context: P2PContext) -> BytesValue:
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
    await node.p2p.add_protobuf_handler(MEASURE, take_and_give, BytesValue)


async def is_peer_at(ip: str, port: int) -> bool:
    """Whether a libp2p listener answers there, on a connection made for this question."""
    writer = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), DIAL_TIMEOUT)
        writer.write(GREETING)
        return await asyncio.wait_for(reader.readexactly(len(GREETING)), DIAL_TIMEOUT) == GREETING
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.close()


def measure_bandwidth(dht: hivemind.DHT, averaging: AveragingArguments) -> AveragingArguments:
    """Set the pace of this peer's line: --bandwidth, or what was measured against the initial peers.

    :returns: the same arguments with that bandwidth
    """
    if averaging.bandwidth is not None:
        LINE.set_bandwidth(averaging.bandwidth, is_given=True)
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
        logger.info(f"bandwidth: measured {up:.3g} Mbit/s up, {down:.3g} down, sending {bandwidth:g} (--bandwidth)")
    LINE.set_bandwidth(bandwidth, is_given=False)
    return dataclasses.replace(averaging, bandwidth=bandwidth)


async def measure_rates(peers: set[PeerID], _: hivemind.DHT, node: DHTNode) -> list[float] | None:
    """Runs in the DHT process: Mbit/s to and from the first of these peers that answers."""
    for peer_id in peers:
        try:
            return [await measure_rate(node, peer_id, is_up) for is_up in (True, False)]
        except (P2PDaemonError, P2PHandlerError, ControlFailure, OSError, ValueError) as e:
            logger.debug(f"{peer_id} does not let itself be measured ({e!r})")
    return None


async def measure_rate(node: DHTNode, peer_id: PeerID, is_up: bool) -> float:
    """Mbit/s, the highest of some batches of requests: one at a time first, then more, so that slow lines end soon."""
    request = BytesValue(value=bytes(MEASURE_BYTES if is_up else 2))
    requests, best, start = 1, LOWEST_BANDWIDTH, time.monotonic()
    while time.monotonic() < start + MEASURE_TIME:
        batch_start = time.monotonic()
        calls = [node.p2p.call_protobuf_handler(peer_id, MEASURE, request, BytesValue) for _ in range(requests)]
        try:
            answers = await asyncio.wait_for(asyncio.gather(*calls), MEASURE_PATIENCE)
        except asyncio.TimeoutError:
            break
        if not is_up and any(len(answer.value) != MEASURE_BYTES for answer in answers):
            raise ValueError("its answer is too short")
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
    except (
        P2PDaemonError,
        P2PHandlerError,
        ControlFailure,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        asyncio.TimeoutError,
    ):
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
        try:
            writer.write(b"\x02\x08\x00")  # a message of two bytes: type (1) RESERVE (0)
            size, shift = 0, 0
            while True:
                byte = (await reader.readexactly(1))[0]
                size, shift = size | (byte & 127) << shift, shift + 7
                if byte < 128 or shift > 14:
                    break
            answer = read_protobuf(await reader.readexactly(size))
        finally:
            writer.close()
        if answer.get(5) != 100:  # status OK
            return 0
        limit = read_protobuf(answer[4]) if 4 in answer else {}
        return limit.get(2) or math.inf  # no limit, or 0: as much as you like

    try:
        return await asyncio.wait_for(ask(), 5)
    except (P2PDaemonError, P2PHandlerError, OSError, ValueError, IndexError, EOFError, asyncio.TimeoutError):
        return 0


def read_protobuf(message: bytes) -> dict[int, int | bytes]:
    """The last value of each field of a message that has only integers, texts and messages."""

    def read_integer() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            value, shift, at = value | (message[at] & 127) << shift, shift + 7, at + 1
            if message[at - 1] < 128:
                return value

    at, found = 0, {}
    while at < len(message):
        key = read_integer()
        if key & 7 not in (0, 2):
            raise ValueError(f"unexpected wire type {key & 7}")
        value = read_integer()
        if key & 7 == 2:
            at, value = at + value, message[at : at + value]
        found[key >> 3] = value
    return found


async def find_direct_averagers(prefix: str, _: hivemind.DHT, node: DHTNode) -> int:
    """Runs in the DHT process: number of peers of the run that give states, and that this one reaches directly."""
    found = await node.get(f"{prefix}_state_averager.all_averagers", latest=True)
    if found is None or not isinstance(found.value, dict):
        return 0
    peers = [PeerID(key) for key, entry in found.value.items() if entry.value is not None]
    peers = [peer_id for peer_id in peers if peer_id != node.peer_id][:8]
    # the question opens a connection; what is answered does not matter
    await asyncio.gather(*(call_dial_back(node, peer_id, []) for peer_id in peers))
    return sum([bool(await find_connections(node, peer_id)) for peer_id in peers])


async def probe_peers(maddrs: list[str], use_ipfs: bool = False) -> dict[str, str | None]:
    """Connect to each of these peers from a daemon made for this purpose.

    :returns: for each, why it did not work, with the cure, or None
    """
    p2p = await P2P.create(dht_mode="client", no_listen=True, nat_port_map=False, auto_nat=False, startup_timeout=60)
    try:

        async def probe(maddr: str) -> str | None:
            address = Multiaddr(maddr.rsplit("/p2p/", 1)[0])
            try:
                await asyncio.wait_for(p2p._client.connect(get_peer_id(maddr), [address]), 15)
            except (ControlFailure, asyncio.TimeoutError) as e:
                if mismatch := re.search(r"remote key matches (\w+)", str(e)):
                    return f"another peer is at this address: its id is {mismatch[1]}, take the address it prints now"
                return f"it does not answer ({(str(e).splitlines() or ['no answer within 15 s'])[-1].strip(' *')})"
            return None

        return dict(zip(maddrs, await asyncio.gather(*map(probe, maddrs)), strict=True))
    finally:
        await p2p.shutdown()


def explain_unreachable(maddrs: list[str]) -> dict[str, str | None]:
    """For each peer why it cannot be reached, with the cure, or None when it can: by name, TCP, and libp2p."""
    reasons = {maddr: explain_silence(maddr) for maddr in maddrs}
    answering = [maddr for maddr, reason in reasons.items() if reason is None and not maddr.startswith("/p2p/")]
    return reasons | (asyncio.run(probe_peers(answering)) if answering else {})


def explain_clock(seconds: float) -> str:
    """:param seconds: by which this machine's clock is ahead of the swarm's"""
    return (
        f"this machine's clock is {abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'} the swarm's, which "
        "allows 3 s: set it by the network, e.g. sudo timedatectl set-ntp true"
    )


def explain_failed_start(swarm: SwarmArguments, error: str) -> str:
    """One line for the daemon's error, which names the flag to change."""
    last_line = error.strip().splitlines()[-1] if error.strip() else "no reason given"
    if "already taken" in error:
        return f"--identity_path {swarm.identity_path} is in use by a running peer: give each peer a file of its own"
    if "address already in use" in error or "failed to listen" in error:
        return f"--host_maddrs {' '.join(swarm.host_maddrs)}: the port is in use, choose another or 0 ({last_line})"
    if swarm.identity_path and (swarm.identity_path in error or "saving the identity" in error):
        return f"--identity_path {swarm.identity_path} cannot be written ({last_line}): name a file in another folder"
    if swarm.initial_peers:
        reasons = [f"{maddr}: {reason}" for maddr, reason in explain_unreachable(swarm.initial_peers).items() if reason]
        return f"cannot reach --initial_peers {'; '.join(reasons) or f'{swarm.initial_peers} ({last_line})'}"
    return f"cannot start the peer-to-peer daemon ({last_line})"


# --- membership -------------------------------------------------------------------------------------------------------


def fetch_contracts(dht: hivemind.DHT, prefix: str, timeout: float = FETCH_TIMEOUT) -> dict[bytes, RunContract]:
    """The contracts that live trainers have published, by their public keys.

    :param timeout: seconds to wait for the DHT; the result is empty when it does not answer
    """
    found = fetch_dictionary(dht, f"{prefix}_run", timeout)
    return {key: RunContract.parse_obj(entry.value) for key, entry in found.items() if entry.value is not None}


@dataclasses.dataclass
class Plan:
    """What the contracts of a run's trainers say about its course."""

    target_batch_size: int | None = None  # samples that make an epoch
    total_steps: int | None = None  # epochs, at the end of which the learning rate is lowest


def find_plan(dht: hivemind.DHT, prefix: str, timeout: float) -> Plan | None:
    """By the contract that most trainers have published; None while there is none.

    :param timeout: seconds to wait for the DHT
    """
    contracts = [contract.contract for contract in fetch_contracts(dht, prefix, timeout).values()]

    def find_most_frequent(name: str, pattern: str) -> int | None:
        matches = [re.fullmatch(pattern, contract.get(name, ""), re.ASCII) for contract in contracts]
        numbers = Counter(int(match[1]) for match in matches if match)
        return numbers.most_common(1)[0][0] if numbers else None

    plan = Plan(
        find_most_frequent("target_batch_size", r"(\d{1,9})"), find_most_frequent("schedule", r".*\btotal (\d{1,9})")
    )
    return plan if contracts else None


def publish_contract(
    dht: hivemind.DHT, prefix: str, public_key: bytes, contract: RunContract | None, expiration: float
):
    """Store this peer's signed contract for `expiration` seconds, or withdraw it with None, without waiting."""
    return dht.store(
        f"{prefix}_run",
        subkey=public_key,
        value=None if contract is None else contract.dict(),
        expiration_time=get_dht_time() + expiration,
        return_future=True,
    )


def find_differences(mine: RunContract, others: list[RunContract]) -> list[str]:
    """Where my contract differs from the one that most others hold (among equals the eldest), one text per term."""
    if not others:
        return []
    votes = Counter(tuple(sorted(other.contract.items())) for other in others)
    joined = {tuple(sorted(other.contract.items())): -other.joined for other in sorted(others, key=lambda o: -o.joined)}
    theirs = dict(max(votes, key=lambda terms: (votes[terms], joined[terms])))
    names = sorted(set(theirs) | set(mine.contract))
    return [
        f"{name}: the run has {theirs.get(name, 'none')}, you have {mine.contract.get(name, 'none')}"
        for name in names
        if theirs.get(name) != mine.contract.get(name)
    ]


def stop_different(prefix: str, differences: list[str]) -> NoReturn:
    raise UserError(
        f"run {prefix!r} goes by other settings; {'; '.join(differences)}. Take over its flags, or choose another "
        "--experiment_prefix"
    )


def compare_with_run(dht: hivemind.DHT, prefix: str, contract: dict[str, str]) -> None:
    """Stop with one line where this contract differs from the live trainers'; for who helps them, and binds nobody."""
    mine = RunContract(joined=get_dht_time(), contract=contract)
    if differences := find_differences(mine, list(fetch_contracts(dht, prefix).values())):
        stop_different(prefix, differences)


def join_run(
    dht: hivemind.DHT, prefix: str, public_key: bytes, contract: dict[str, str], expiration: float
) -> RunContract:
    """Compare this peer's contract with the live trainers' and publish it; stop with one line where they differ.

    Peers that start at the same moment see nobody, so each looks again after it has published: then at least one of two
    sees the other, and only elder peers count.
    """
    mine = RunContract(joined=get_dht_time(), contract=contract)
    for published in (False, True):
        others = [other for key, other in fetch_contracts(dht, prefix).items() if key != public_key]
        if published:
            others = [other for other in others if other.joined < mine.joined]
        if differences := find_differences(mine, others):
            if published:
                publish_contract(dht, prefix, public_key, None, expiration).result(timeout=30)
            stop_different(prefix, differences)
        if not published:
            publish_contract(dht, prefix, public_key, mine, expiration).result(timeout=30)
    return mine
