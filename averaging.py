"""Everything that hivemind 1.1.12 lacks or gets wrong, in one room: starting the DHT, guards, rounds, a clean end.

Each repair names what it repairs; tests/test_hivemind_gaps.py tells when hivemind repairs it itself. Nothing here is
specific to a model: an experiment is edited in data.py, model.py and optimizer.py.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import ipaddress
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import wait as wait_for_processes

# Two public peers that dial each other at the same moment can both fail, and a round is lost: 10 of 20 first dials did,
# none of 25 with this setting. The daemon reads it when the DHT starts.
os.environ.setdefault("LIBP2P_TCP_REUSEPORT", "false")
# p2pd starts two relay services, one that passes 128 kB and one that passes 4 GB, and the later one wins: on two cores
# the small one in 9 of 12 starts, on one never (of 16). One core is enough for p2pd: 0.5 GB/s with either setting.
os.environ.setdefault("GOMAXPROCS", "1")

import hivemind
import numpy
import psutil
import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.averaging.allreduce import AllreduceException
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils import get_dht_time
from hivemind.utils.multiaddr import Multiaddr

from addresses import (
    GREETING,
    check_multiaddrs,
    explain_silence,
    get_host_port,
    get_ip,
    is_local,
    is_public,
    is_relayed,
    select_for_others,
)
from arguments import SwarmArguments, stop_for_user
from status import resolve_initial_peers
from utils import RunContract, make_validators

logger = logging.getLogger("averaging")

# Shared with the helper processes, which inherit it when they fork: once it is set, what they log is noise.
STOPPING = multiprocessing.Value(ctypes.c_bool, False)


# --- starting ---------------------------------------------------------------------------------------------------------

# The name of the request "dial me back", and how long one dial may take: a firewall that drops packets answers nothing.
DIAL_BACK = "dial_back"
DIAL_TIMEOUT = 3.0
RELAY_TIMEOUT = 200.0
# libp2p's request for a place at a relay, and what a relay must pass at least: each round is tens of megabytes.
RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
RELAY_BYTES = 2**30

# Among relays to choose from, p2pd waits three minutes for a fourth one (note 30); fixed ones it asks at once.
P2P.FORCE_REACHABILITY_MAPPING["relayed"] = {"forceReachabilityPrivate": 1, "relayDiscovery": 0}


def check_versions(numpy_version: str = numpy.__version__) -> None:
    """Stop where hivemind would average nothing and log success: its 8-bit codecs fail silently on numpy >= 2.4."""
    if tuple(int(part) for part in numpy_version.split(".")[:2]) >= (2, 4):
        stop_for_user(f"numpy {numpy_version} breaks hivemind's compression in silence: pip install 'numpy<2.4'")


def raise_file_limit() -> float:
    """Allow this process and its helpers as many open files as the system does; returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return math.inf if soft == resource.RLIM_INFINITY else soft


class DHT(hivemind.DHT):
    """Ends without a traceback when a helper that has asked it something ended first, as happens in each clean stop."""

    def run(self) -> None:
        live_as_helper()
        try:
            super().run()
        except EOFError:
            if not STOPPING.value:
                raise


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
    swarm = dataclasses.replace(
        swarm, initial_peers=resolve_initial_peers(swarm.initial_peers, swarm.experiment_prefix)
    )
    check_multiaddrs("--initial_peers", swarm.initial_peers, needs_peer_id=True)
    check_multiaddrs("--host_maddrs", swarm.host_maddrs)
    check_multiaddrs("--announce_maddrs", swarm.announce_maddrs)
    for maddr in swarm.announce_maddrs:
        if get_host_port(maddr)[2] == 0:
            stop_for_user(f"--announce_maddrs {maddr} has no port: give the one that others shall connect to")
    if swarm.identity_path:
        check_identity(swarm.identity_path)
    return swarm


def check_identity(path: str) -> None:
    """Stop with one line when there is a file, and it holds no key."""
    if os.path.exists(path):
        try:
            with open(path, "rb") as f:
                PeerID.from_identity(f.read())
        except Exception as e:  # the reader of keys raises many kinds, all of which mean the same
            reason = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
            stop_for_user(
                f"--identity_path {path} is no key file ({reason}): name one that a peer has made, or one that does "
                "not exist yet"
            )


def start_dht(swarm: SwarmArguments, validators: list, **options) -> DHT:
    """Start the DHT's helper process; stops with one line when that fails."""
    logging.getLogger("asyncio").addFilter(is_not_a_destroyed_task)
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
            stop_for_user(explain_clock(float(clocks[1]) - float(clocks[2])))
        # the peer did not get through to us just now: whether it can is found out with more patience
        return start_dht(swarm, validators, **{**options, "strict": False, "check_if_identity_free": False})
    except (P2PDaemonError, RuntimeError, OSError, ValueError) as e:
        stop_for_user(explain_failed_start(swarm, str(e)))
    dht.run_coroutine(offer_dial_back)
    return dht


def is_not_a_destroyed_task(record: logging.LogRecord) -> bool:
    """For logging: a DHT that ends during its start, as by a wrong clock, leaves tasks that add nothing."""
    return not record.getMessage().startswith("Task was destroyed but it is pending")


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


async def offer_dial_back(_: hivemind.DHT, node: DHTNode) -> None:
    """Runs in the DHT process: from now on, tell peers whether their ports can be reached from here."""
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

    await node.p2p.add_protobuf_handler(DIAL_BACK, dial_back, BytesValue)


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
    peers = [PeerID.from_base58(Multiaddr(maddr)["p2p"]) for maddr in initial_peers]
    # four are enough to tell
    answers = await asyncio.gather(*(call_dial_back(node, peer_id, ports) for peer_id in list(set(peers))[:4]))
    return [(answer["seen_at"][0], answer["reached"] is True) for answer in answers if answer and answer["seen_at"]]


async def find_direct_peers(maddrs: list[str], _: hivemind.DHT, node: DHTNode) -> list[str]:
    """Runs in the DHT process: where this peer is connected, directly, with the peers of these multiaddrs."""
    found = []
    for maddr in maddrs:
        if connections := await find_connections(node, PeerID.from_base58(peer_id := Multiaddr(maddr)["p2p"])):
            # one that was found by its id alone has its address from IPFS
            found.append(f"{connections[0]}/p2p/{peer_id}" if maddr.startswith("/p2p/") else maddr)
    return found


async def find_relays(maddrs: list[str], dht: hivemind.DHT, node: DHTNode) -> list[str]:
    """Runs in the DHT process: of these peers, those that would relay for this one as much as training takes."""
    direct = await find_direct_peers(maddrs, dht, node)
    limits = await asyncio.gather(*(ask_relay_limit(node.p2p, Multiaddr(maddr)["p2p"]) for maddr in direct))
    return [maddr for maddr, limit in zip(direct, limits, strict=True) if limit >= RELAY_BYTES]


async def ask_relay_limit(p2p: P2P, peer_id: str) -> float:
    """Bytes that this peer passes through one relayed connection; 0 when it does not relay for us.

    Relays of plain hivemind pass 128 kB, after which the connection breaks, and every round with it.
    """

    async def ask() -> float:
        _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), RELAY_PROTOCOL)
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
            peer_id = Multiaddr(maddr)["p2p"]
            address = Multiaddr(maddr.rsplit("/p2p/", 1)[0])
            try:
                await asyncio.wait_for(p2p._client.connect(PeerID.from_base58(peer_id), [address]), 15)
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


def fetch_contracts(dht: hivemind.DHT, prefix: str) -> dict[bytes, RunContract]:
    """The contracts that live trainers have published, by their public keys."""
    found = dht.get(f"{prefix}_run", latest=True)
    if found is None or not isinstance(found.value, dict):
        return {}
    return {key: RunContract.parse_obj(entry.value) for key, entry in found.value.items() if entry.value is not None}


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
            stop_for_user(
                f"run {prefix!r} goes by other settings; {'; '.join(differences)}. Take over its flags, or choose "
                "another --experiment_prefix"
            )
        if not published:
            publish_contract(dht, prefix, public_key, mine, expiration).result(timeout=30)
    return mine


# --- rounds -----------------------------------------------------------------------------------------------------------


class AveragingFailed(Exception):
    """A gradient averaging round came to nothing; its gradients are kept."""


class OutOfStep(AllreduceException):
    """The group is at another epoch (the argument) than this peer, which has to take over the swarm's state."""


class VerifiedAverager(hivemind.DecentralizedAverager):
    """Tells whose data verifiably entered the average, as hivemind reports success for rounds that failed.

    The result of a round maps each peer that took part completely, as seen from here, to what it gathered: no sender
    was left out of the part that this peer averaged, and all parts came back. A round in which nobody else took part
    raises AllreduceException.
    """

    def run(self) -> None:
        live_as_helper()
        super().run()

    def step(self, *args, allow_retries: bool = False, **kwargs):
        # a retry inside hivemind would start from tensors that the failed round has half averaged, in place, and waits
        # for others who have gone on
        return super().step(*args, allow_retries=allow_retries, **kwargs)

    async def _aggregate_with_group(self, group_info, **kwargs):
        gathered = await super()._aggregate_with_group(group_info, **kwargs)
        runner = self._running_groups[group_info.group_id].result()
        if runner.tensor_part_container.failed_size:
            # a reducer did not answer: for its parts we hold our own values alone
            averaged = {self.peer_id}
        else:
            averaged = set(runner.sender_peer_ids) - runner.banned_senders
        if self.peer_id in runner.sender_peer_ids and averaged <= {self.peer_id}:
            raise AllreduceException(f"nobody else's data entered the average of {len(group_info.peer_ids)} peers")
        return {peer_id: data for peer_id, data in gathered.items() if peer_id in averaged}


def is_epoch_in_step(item: object) -> bool:
    """Whether a peer has gathered what it should: [epoch, whether the whole swarm averages in step]."""
    return isinstance(item, (list, tuple)) and [type(part) for part in item] == [int, bool]


class GradientAverager(hivemind.optim.grad_averager.GradientAverager, VerifiedAverager):
    """Keeps the gradients of a failed round, which hivemind loses: it empties the accumulators when a round starts.

    Averages peers of one epoch only: hivemind lets a peer that has lost a round average its old gradients with
    everybody's new ones, for ever one epoch behind. And spares a joining peer a second download: hivemind fetches the
    averaged gradients of a peer and drops them.
    """

    #: set by the optimizer: the epoch whose gradients are gathered, and whether the whole swarm averages in step
    epoch, in_step = 0, False

    def __init__(self, *args, **kwargs):
        self._in_flight = self._kept = None
        super().__init__(*args, **kwargs)

    def schedule_step(self, *args, **kwargs):
        return super().schedule_step(*args, gather=[self.epoch, self.in_step], **kwargs)

    async def _aggregate_with_group(self, group_info, **kwargs):
        # all see the same list of what each has gathered, so all leave out the same peers, and nobody waits for those
        gathered = [self.serializer.loads(self.serializer.loads(data)[2]) for data in group_info.gathered]
        epochs = [item[0] if is_epoch_in_step(item) else -1 for item in gathered]
        if all(is_epoch_in_step(item) and item[1] for item in gathered):
            votes = Counter(epochs)
            epoch = max(votes, key=lambda epoch: (votes[epoch], epoch))
            if epochs[group_info.peer_ids.index(self.peer_id)] != epoch:
                raise OutOfStep(epoch)
            if votes[epoch] == 1:
                raise AllreduceException(f"no other peer of epoch {epoch} in a group of {len(epochs)}")
            chosen = [index for index, its_epoch in enumerate(epochs) if its_epoch == epoch]
            group_info = dataclasses.replace(
                group_info,
                peer_ids=tuple(group_info.peer_ids[index] for index in chosen),
                gathered=tuple(group_info.gathered[index] for index in chosen),
            )
        return await super()._aggregate_with_group(group_info, **kwargs)

    def step(self, *args, **kwargs):
        self._in_flight = self._snapshot()
        return super().step(*args, **kwargs)

    def _snapshot(self) -> tuple:
        sums = [accumulator.clone() for accumulator in self._grad_accumulators()]
        return sums, self.local_samples_accumulated, self.local_times_accumulated, self._anchor_batch_size

    def keep_gradients(self) -> None:
        """Put the gradients of the round that just failed aside, for the next `accumulate_grads_`."""
        self._kept, self._in_flight = self._in_flight if self._in_flight[1] else None, None
        self.notify_used_averaged_gradients()

    def keep_accumulated(self) -> None:
        """Put the gradients accumulated so far aside, for the next `accumulate_grads_`."""
        self._kept = self._snapshot() if self.local_samples_accumulated else self._kept

    @property
    def kept_samples(self) -> int:
        """Samples whose gradients wait for the next round."""
        return self._kept[1] if self._kept else 0

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        # merged here, in the loop's own thread: after a delayed round, hivemind empties the accumulators once more
        if self._kept:
            sums, samples, times, anchor = self._kept
            self._kept = None
            self._anchor_batch_size = self._anchor_batch_size or anchor
            for accumulator, kept in zip(self._grad_accumulators(), sums, strict=True):
                accumulator.add_(kept.to(accumulator.device), alpha=anchor / self._anchor_batch_size)
            self.local_samples_accumulated += samples
            self.local_times_accumulated += times
        super().accumulate_grads_(batch_size)

    def load_state_from_peers(self, **kwargs) -> None:
        return None

    def accumulate_on(self, device: torch.device) -> None:
        """Move the accumulators to where the gradients are, so that accumulating needs no transfer."""
        self._local_accumulators = tuple(accumulator.to(device) for accumulator in self._local_accumulators)


class StateAverager(TrainingStateAverager, VerifiedAverager):
    """Gives whole states to peers that join, takes them in a bounded number of tries, and tells whether it did."""

    loaded_state = False

    def __init__(self, *args, **kwargs):
        self._lock_step = threading.Lock()
        super().__init__(*args, **kwargs)

    def step(self, *args, increment_epoch: bool = False, **kwargs):
        # hivemind counts the epoch first and steps then: who downloads in between gets the old parameters as new ones
        with self._lock_step if increment_epoch else contextlib.nullcontext():
            return super().step(*args, increment_epoch=increment_epoch, **kwargs)

    def get_current_state(self):
        with self._lock_step:
            metadata, tensors, infos = super().get_current_state()
            # copies, or the next step changes what is still being sent
            return metadata, [tensor.clone() for tensor in tensors], infos

    def load_state_from_peers(self, min_epoch: int = 0, tries: int = 4, **kwargs) -> bool:
        """Download the state of the peer that is furthest; hivemind alone tries for ever and hides the end (note 25).

        :param min_epoch: try again when the state is of an earlier epoch, as long as there are tries
        :returns: whether parameters, optimizer and epoch are now that peer's
        """
        self.loaded_state = False
        for attempt in range(tries):
            time.sleep(attempt / 2)
            self._downloaded_epoch = None
            try:
                super().load_state_from_peers(**kwargs)
            except (IndexError, TimeoutError, asyncio.TimeoutError, RuntimeError, ValueError, KeyError) as e:
                logger.warning(f"a peer's state did not load ({type(e).__name__}: {e})")
                continue
            self.loaded_state = self.loaded_state or self._downloaded_epoch is not None
            if self._downloaded_epoch is not None and self._downloaded_epoch >= min_epoch:
                break
        return self.loaded_state

    def _update_scheduler(self):
        # the last thing that hivemind does with a state that it has accepted
        self._downloaded_epoch = self.local_epoch
        super()._update_scheduler()


class ProgressTracker(hivemind.optim.progress_tracker.ProgressTracker):
    """Reports at most once in min_refresh_period within an epoch; hivemind reports each step (note 12).

    A report is a signature and a message to several peers, and nobody looks more often than that.
    """

    _last_report = -float("inf")

    def report_local_progress(self, local_epoch: int, *args, **kwargs) -> None:
        has_new_epoch = local_epoch != self.local_progress.epoch
        super().report_local_progress(local_epoch, *args, **kwargs)
        now = time.monotonic()
        if has_new_epoch or now - self._last_report >= self.min_refresh_period:
            self._last_report = now
        else:
            self.should_report_progress.clear()


class Optimizer(hivemind.Optimizer):
    """hivemind.Optimizer whose failed rounds lose no gradients and take no step.

    After a failed round the epoch stays, the gradients are kept, and the next `step` tries again.
    """

    #: peers whose gradients verifiably entered the last step, this one included
    averaged_with = 1
    #: rounds of this peer that came to nothing
    failed_rounds = 0
    #: samples of this peer in the last step, and in all steps together
    epoch_samples = 0
    total_samples = 0
    #: epoch of the last group that has left this peer out
    _group_epoch = -1

    def accumulate_on(self, device: torch.device) -> None:
        """Accumulate gradients on the model's device; call it once, after the model has moved there."""
        self.grad_averager.accumulate_on(device)

    def load_state_from_peers(self, **kwargs) -> bool:
        """Take over the newest state of the swarm.

        :returns: whether a peer gave it; otherwise the local state stays
        """
        if self.local_epoch and self.tracker.global_epoch - self.local_epoch <= 1:
            # gradients of a round that the others went through without us are one epoch old, and still good
            self.grad_averager.keep_accumulated()
        # a group that left us out is about to step to the epoch after its own: wait for that one
        min_epoch = max(self.tracker.global_epoch, self._group_epoch + 1)
        super().load_state_from_peers(min_epoch=min_epoch, **kwargs)
        return self.state_averager.loaded_state

    def _make_progress_tracker(self, target_batch_size: int, **kwargs) -> ProgressTracker:
        return ProgressTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
            **kwargs,
        )

    def _make_state_averager(self, **kwargs) -> StateAverager:
        averager = StateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            start=True,
            **kwargs,
        )
        end_when_it_dies(averager, "state averager")
        return averager

    def _make_gradient_averager(self, *args, **kwargs):
        averager = super()._make_gradient_averager(*args, **kwargs)
        end_when_it_dies(averager, "gradient averager")
        return averager

    def _maybe_schedule_gradient_averaging(self) -> None:
        # hivemind looks for a group in advance even for a peer that is alone, and cancels when the epoch ends: a round
        # that is cancelled late goes on all the same, with a newcomer and the gradients of an old epoch
        self.grad_averager.epoch = self.local_epoch
        self.grad_averager.in_step = self._averages_in_step()
        if self.tracker.global_progress.num_peers > 1:
            super()._maybe_schedule_gradient_averaging()

    def _maybe_schedule_state_averaging(self) -> None:
        if self.tracker.global_progress.num_peers > 1:
            super()._maybe_schedule_state_averaging()

    def _begin_averaging_gradients(self, grad_scaler) -> bool:
        if self.scheduled_grads is not None and (self.scheduled_grads.triggered or self.scheduled_grads.done()):
            # hivemind steps alone when the group that it looked for in advance came to nothing, while others are there
            self.scheduled_grads = None
        if not self.delay_grad_averaging:
            self.averaged_with = 1
        return super()._begin_averaging_gradients(grad_scaler)

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control) -> None:
        # hivemind would go on with its accumulators here, which are zeros by now (note 16)
        try:
            group = maybe_step_control.result(self.averaging_timeout)
        except (Exception, asyncio.CancelledError) as e:
            if not maybe_step_control.done():
                maybe_step_control.cancel()
            self.grad_averager.keep_gradients()
            self.failed_rounds += 1
            self.averaged_with = 1
            if isinstance(e, OutOfStep):
                self._group_epoch = e.args[0]
            raise AveragingFailed(f"{type(e).__name__}: {e}") from e
        self._load_averaged_gradients_into_optimizer_()
        self.averaged_with = len(group)

    def _averages_in_step(self) -> bool:
        """Whether all peers go from epoch to epoch together.

        Not where the swarm averages in several groups, of which one may be faster, nor where rounds run on in the
        background: neighbours an epoch apart are nothing unusual there.
        """
        group_size = self.grad_averager.matchmaking_kwargs["target_group_size"]
        is_one_group = group_size is None or self.tracker.global_progress.num_peers <= group_size
        return is_one_group and not self.delay_grad_averaging

    def _has_missed_the_round(self) -> bool:
        """Whether the others have stepped without this peer.

        hivemind would then step by its own gradients alone; the averaging of parameters brings those together again,
        but not the moments.
        """
        return not self.auxiliary and self._averages_in_step() and self.tracker.global_epoch > self.local_epoch

    def _update_global_epoch(self, grad_scaler) -> None:
        if self._has_missed_the_round() and self.load_state_from_peers():
            return
        samples = self.grad_averager.local_samples_accumulated
        try:
            super()._update_global_epoch(grad_scaler)
            self.epoch_samples = samples
            self.total_samples += samples
        except AveragingFailed as e:
            logger.warning(
                f"epoch {self.local_epoch}: averaging failed ({e}); the gradients of {self.grad_averager.kept_samples} "
                "samples go into the next round"
            )
            if self._group_epoch >= self.local_epoch:
                self.load_state_from_peers()


def initialize_optimizer_state_(optimizer: torch.optim.Optimizer) -> None:
    """Fill the optimizer's state with zeros.

    hivemind needs the tensors of the state before the first step and makes them by a step with zero gradients, at the
    full learning rate: it counts in bias correction (note 8), and weight decay moves the parameters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
        state = optimizer.state[param]
        state["step"] = torch.zeros_like(state["step"]) if torch.is_tensor(state["step"]) else 0


# --- the end ----------------------------------------------------------------------------------------------------------


class CalmLog(logging.Filter):
    """Makes one line of each exception that hivemind has caught and handled, and drops all it logs while stopping."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(("hivemind", "asyncio")):
            return True
        if record.exc_info and not os.environ.get("HIVEMIND_LOGLEVEL"):
            # a round that fails, a peer that leaves: daily business, which a traceback makes look like a crash
            record.exc_info = record.exc_text = None
        return not STOPPING.value


def calm_log() -> None:
    """Spare the user hivemind's cosmetic tracebacks (note 37), in this process and in the helpers that it will fork."""
    for name in (None, "hivemind"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(CalmLog())
    # MPFuture.__del__ wakes event loops that are closed by then
    show = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None if STOPPING.value else show(unraisable)
    # hivemind brings the schedule to the epoch of a downloaded state before the first step of this process
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    # the default number of data loader workers suits a machine with a GPU; torch warns of it on two cores
    warnings.filterwarnings("ignore", message="This DataLoader will create")


def live_as_helper() -> None:
    """What each helper process does first: leave Ctrl-C to its parent, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # a terminal sends Ctrl-C to the whole process group: out of it, or p2pd is gone before we have said goodbye
    os.setpgrp()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        end_helpers(find_helpers())
        os._exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


def end_when_it_dies(process: multiprocessing.Process, name: str) -> None:
    """End this process and its helpers when that helper dies: whoever waits for its answer would wait for ever."""
    # a snapshot of what the helper itself has started: these are nobody's children once it is dead
    helpers = find_helpers(process.pid)

    def watch() -> None:
        wait_for_processes([process.sentinel])
        if not STOPPING.value:
            logger.error(f"the {name} process died, this peer cannot go on (out of memory?)")
            end_process(1, helpers)

    threading.Thread(target=watch, name=f"watch {name}", daemon=True).start()


def end_process(code: int, helpers: list[psutil.Process] = ()) -> None:
    """End the helper processes, then this process, at once."""
    STOPPING.value = True
    end_helpers([*find_helpers(), *helpers])
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: threads of hivemind that wait for dead helpers would keep the interpreter from ending
    os._exit(code)


def find_helpers(pid: int | None = None) -> list[psutil.Process]:
    """All processes that this one, or the one given, has started, directly or not.

    Without torch's manager of shared memory: it ends with its last client, and clients that outlive it abort.
    """
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if child.name() != "torch_shm_manager"]


def end_helpers(helpers: list[psutil.Process]) -> None:
    """SIGTERM, and SIGKILL after three seconds."""
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for helper in helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(helper)
        _, helpers = psutil.wait_procs(helpers, timeout=3)


@contextlib.contextmanager
def clean_end() -> Iterator[None]:
    """Run a role's main() in this: Ctrl-C and SIGTERM are a normal end at any time, an exception ends the helpers too.

    Ends the process: exit code 0 after a normal end, 1 after an exception, 2 after a user's error.
    """

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    def end_after_thread_failed(failure: threading.ExceptHookArgs) -> None:
        if not STOPPING.value:
            traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
            end_process(1)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    threading.excepthook = end_after_thread_failed
    code = 0
    try:
        yield
    except KeyboardInterrupt:
        logger.info("stopped")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    end_process(code)


def handle_stop_signals() -> threading.Event:
    """From now on SIGINT and SIGTERM set this event, for the loop to look at; a second signal ends at once.

    Call it when everything is built: hivemind's constructors set SIGINT to be ignored (note 36).
    """
    stop = threading.Event()

    def request_stop(*_) -> None:
        if stop.is_set():
            end_process(0)
        stop.set()

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    return stop


def shut_down(dht: hivemind.DHT, optimizer: Optimizer | None = None) -> None:
    """Say goodbye to the swarm and end the helper processes, without the tracebacks of hivemind's own."""
    helpers = find_helpers()
    STOPPING.value = True
    if optimizer is not None:
        optimizer.shutdown()
    dht.shutdown()
    end_helpers(helpers)
