"""Joining a run: start the DHT in a way that the network allows.

A peer asks the peers that it reaches to dial back. If they cannot, it becomes a client or is reached through a relay.
Each failure is one line that says what to do.
"""

import asyncio
import dataclasses
import http.client
import ipaddress
import logging
import re
import socket
import threading
import time
import urllib.request
from functools import partial

import hivemind
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2PDaemonError

from arguments import SwarmArguments
from support.console import UserError
from swarm.addresses import (
    check_multiaddrs,
    diagnose_unreachable,
    get_host_port,
    get_ip,
    is_local,
    is_public,
    is_relayed,
    list_shareable_maddrs,
)
from swarm.dht import DHT, check_versions, raise_file_limit
from swarm.membership import CredentialValidator, Membership
from swarm.outside import find_problem
from swarm.processes import exit_if_process_dies, quiet_hivemind_logs, shut_down
from swarm.reachability import (
    count_reachable_averagers,
    find_direct_peers,
    find_ports,
    find_reachability,
    find_relays,
    register_dial_back_handler,
)
from swarm.status import resolve_initial_peers
from swarm.vouching import ask_initial_peers, register_attestation_handler
from utils import make_validators

logger = logging.getLogger("joining")

RELAY_TIMEOUT = 200  # seconds to wait for a reservation at a relay


def make_dht(swarm: SwarmArguments, membership: Membership | None = None) -> tuple[DHT, bytes]:
    """Start this peer's DHT, with the run's validators, in a way that the network allows.

    A peer that others cannot reach becomes a client if it directly reaches a peer that averages. Otherwise it is
    reached through a relay. `dht.client_mode` is the outcome.

    :param membership: the membership of a closed run, see `make_identity`
    :returns: the DHT, and this peer's public key, which is the subkey of the records that it signs
    """
    swarm = check_addresses(swarm)
    raise_file_limit()
    quiet_hivemind_logs()
    validators, public_key = make_validators(swarm.experiment_prefix)
    dht = start_dht(swarm, validators, membership, client_mode=swarm.client_mode)
    if swarm.initial_peers and not swarm.client_mode:
        seen_at, is_reachable = find_reachability(dht, swarm.initial_peers)
        where = f"at {' and '.join(seen_at)}, port {' and '.join(map(str, find_ports(dht)))}" if seen_at else ""
        if is_reachable is False and swarm.announce_maddrs:
            logger.warning(f"others cannot reach this peer {where}: check --announce_maddrs and the firewall")
        elif is_reachable is False:
            dht = restart_as_client_or_relayed(swarm, validators, dht, where)
    try:
        dht.vouched = ask_initial_peers(dht, swarm.experiment_prefix, swarm.initial_peers, swarm.new_run)
    except UserError:
        shut_down(dht)
        raise
    exit_if_process_dies(dht, "DHT")
    connected = dht.run_coroutine(partial(find_direct_peers, swarm.initial_peers))
    if silent := [maddr for maddr in swarm.initial_peers if maddr not in connected and not swarm.use_ipfs]:
        # In the background, because one peer that answers is enough to join.
        threading.Thread(target=warn_of_unresponsive_peers, args=[silent], daemon=True).start()
    return dht, public_key


def warn_of_unresponsive_peers(maddrs: list[str]) -> None:
    """Log why these initial peers cannot be reached."""
    for maddr in maddrs:
        if reason := asyncio.run(diagnose_unreachable(maddr)):
            logger.warning(f"--initial_peers {maddr}: {reason}")


def check_addresses(swarm: SwarmArguments) -> SwarmArguments:
    """Check all addresses, resolve HOST:PORT in --initial_peers, and return the changed arguments.

    :raises UserError: if an address is invalid or does not resolve
    """
    check_versions()
    initial_peers = resolve_initial_peers(swarm.initial_peers, swarm.experiment_prefix)
    if initial_peers != swarm.initial_peers:
        logger.info(f"--initial_peers {' '.join(initial_peers)}")
    swarm = dataclasses.replace(swarm, initial_peers=initial_peers)
    if swarm.use_google_dns:
        swarm = announce_public_address(swarm)
    check_multiaddrs("--initial_peers", swarm.initial_peers, needs_peer_id=True)
    check_multiaddrs("--host_maddrs", swarm.host_maddrs)
    check_multiaddrs("--announce_maddrs", swarm.announce_maddrs)
    for maddr in swarm.announce_maddrs:
        if get_host_port(maddr)[2] == 0:
            raise UserError(f"--announce_maddrs {maddr} has no port: pass the port that others connect to")
    return swarm


def announce_public_address(swarm: SwarmArguments) -> SwarmArguments:
    """Look up this machine's address with --public_ip_url and return the arguments with it in --announce_maddrs."""
    try:
        with urllib.request.urlopen(swarm.public_ip_url, timeout=10) as answer:
            ip = ipaddress.ip_address(answer.read(100).decode().strip())
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise UserError(
            f"--public_ip_url {swarm.public_ip_url} does not return this machine's address ({e}): choose another one, "
            "or pass --announce_maddrs /ip4/PUBLIC_IP/tcp/PORT"
        ) from e
    host_maddrs, announced = [], []
    for maddr in swarm.host_maddrs:
        protocol, host, port = get_host_port(maddr)
        if protocol == f"ip{ip.version}" and port == 0:
            # Choose a free port now: it must be known before the start to be announced.
            with socket.create_server(("", 0), family=socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as free:
                port = free.getsockname()[1]
            maddr = f"/{protocol}/{host}/tcp/{port}"
        host_maddrs.append(maddr)
        if protocol == f"ip{ip.version}":
            announced.append(f"/{protocol}/{ip}/tcp/{port}")
    if not announced:
        raise UserError(
            f"--use_google_dns: the public address is {ip}, but --host_maddrs has no IPv{ip.version} address: add one"
        )
    logger.info(f"announcing {' '.join(announced)}: this port must be open")
    return dataclasses.replace(swarm, host_maddrs=host_maddrs, announce_maddrs=announced, use_google_dns=False)


def start_dht(
    swarm: SwarmArguments, validators: list, membership: Membership | None, is_first: bool = True, **options
) -> DHT:
    """Start the DHT's helper process and register this peer's request handlers.

    A start that failed although all initial peers can be reached is retried once.

    :raises UserError: if it fails
    """
    if not options.get("client_mode") and not swarm.use_ipfs:
        # Without this, libp2p takes minutes to detect that this peer is public, and it cannot be a relay until then.
        options.setdefault("force_reachability", "public")
    of_members = [CredentialValidator(validators[1], membership)] if membership else []
    try:
        dht = DHT(
            start=True,
            initial_peers=swarm.initial_peers,
            use_ipfs=swarm.use_ipfs,
            host_maddrs=swarm.host_maddrs,
            announce_maddrs=swarm.announce_maddrs or None,
            identity_path=swarm.identity_path,
            use_relay=swarm.use_relay,
            record_validators=[*validators, *of_members],
            membership=membership,
            # hivemind's 15 s are too short on a loaded machine (note 13).
            startup_timeout=60,
            **options,
        )
    except ValidationError as e:
        if clocks := re.search(r"local: ([\d.]+), peer: ([\d.]+)", str(e)):
            ahead = float(clocks[1]) - float(clocks[2])
            raise UserError(
                f"this machine's clock is {abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's, "
                "which allows 3 s: synchronize it, e.g. sudo timedatectl set-ntp true"
            ) from e
        # hivemind's ping in return failed. Skip it: `find_reachability` tests this later, and waits longer.
        return start_dht(swarm, validators, membership, **{**options, "strict": False, "check_if_identity_free": False})
    except (P2PDaemonError, RuntimeError, OSError, ValueError) as e:
        reason = explain_failed_start(swarm, str(e), membership)
        if reason is None and is_first:
            return start_dht(swarm, validators, membership, is_first=False, **options)
        raise UserError(reason or f"--initial_peers did not answer at first, but do now ({e}): try again") from e
    dht.run_coroutine(register_dial_back_handler)
    dht.run_coroutine(partial(register_attestation_handler, prefix=swarm.experiment_prefix))
    return dht


def restart_as_client_or_relayed(swarm: SwarmArguments, validators: list, dht: DHT, where: str) -> DHT:
    """Replace this DHT by one in client mode or behind a relay, and log the reason.

    :param where: the address and port at which others cannot reach this peer, for the log
    """
    reason = f"others cannot reach this peer {where} (a firewall or router is in between)"
    averagers = dht.run_coroutine(partial(count_reachable_averagers, swarm.experiment_prefix))
    relays = dht.run_coroutine(partial(find_relays, swarm.initial_peers))
    dht.shutdown()
    options = dict(check_if_identity_free=False)  # other peers may still know this identity from the old DHT
    if not swarm.use_relay or not relays or (averagers and not swarm.use_auto_relay):
        who = f"{averagers} peer{'s that average' if averagers != 1 else ' that averages'} can be reached directly"
        wait = "its gradients count once a reachable trainer joins (none of --initial_peers is a relay)"
        logger.warning(f"{reason}: continuing in client mode, {who if averagers else wait}")
        return start_dht(swarm, validators, dht.membership, client_mode=True, **options)
    logger.warning(f"{reason}, and no peer that averages can be reached directly: waiting for an address at a relay")
    options |= dict(client_mode=False, use_auto_relay=True, force_reachability="relayed", trusted_relays=relays)
    dht = start_dht(swarm, validators, dht.membership, strict=False, **options)
    for attempt in range(5 * RELAY_TIMEOUT):  # five per second
        if maddrs := [maddr for maddr in dht.get_visible_maddrs(latest=True) if is_relayed(maddr)]:
            logger.warning(f"others reach this peer through a relay: {list_shareable_maddrs(maddrs)[0]}")
            return dht
        if attempt and attempt % 50 == 0:
            logger.info(f"no relay has accepted this peer within {attempt // 5} s, still waiting")
        time.sleep(0.2)
    logger.warning("no relay has accepted this peer: others cannot reach it until one does")
    return dht


def warn_of_local_addresses(dht: hivemind.DHT, swarm: SwarmArguments) -> None:
    """Log a warning if this peer listens on all interfaces, but has no address that works from outside."""
    maddrs = list_shareable_maddrs(dht.get_visible_maddrs())
    listens_everywhere = any((ip := get_ip(maddr)) is not None and ip.is_unspecified for maddr in swarm.host_maddrs)
    if listens_everywhere and not dht.client_mode and not any(map(is_public, maddrs)):
        logger.warning(
            f"{maddrs[0]} can be reached only from this {'machine' if is_local(maddrs[0]) else 'local network'}: for "
            "peers outside, pass --announce_maddrs /ip4/PUBLIC_IP/tcp/PORT with a port that your router forwards"
        )


def explain_failed_start(swarm: SwarmArguments, error: str, membership: Membership | None) -> str | None:
    """Return one line for the daemon's error, with the flag to change, or None if all --initial_peers answer."""
    last_line = error.strip().splitlines()[-1] if error.strip() else "no reason given"
    if "already taken" in error:
        flag = f"--invite {swarm.invite}" if swarm.invite else f"--identity_path {swarm.identity_path}"
        return f"{flag} is in use by a running peer: pass a separate file to each peer"
    if "address already in use" in error or "failed to listen" in error:
        return f"--host_maddrs {' '.join(swarm.host_maddrs)}: the port is in use, choose another or 0 ({last_line})"
    if swarm.identity_path and (swarm.identity_path in error or "saving the identity" in error):
        return f"--identity_path {swarm.identity_path} cannot be written ({last_line}): pass a file in another folder"
    if swarm.initial_peers:
        return find_problem(swarm.initial_peers, membership)
    return f"cannot start the peer-to-peer daemon ({last_line})"
