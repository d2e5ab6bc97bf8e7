"""Settings that a new peer inherits from the peers in --initial_peers: the run name and the shared flags.

A command line that sets one of these flags to another value is rejected.
The initial peers are the root of trust (see swarm/attestation.py). Their flags are parsed and checked like typed ones.
None of these flags can name a file or folder, except for the model shapes in this repository.
"""

import asyncio
import dataclasses
import http.client
import ipaddress
import logging
import os
import re
import socket
import urllib.request
from pathlib import Path

from hivemind.utils.multiaddr import Multiaddr

from arguments import SwarmArguments, TrainerArguments, parse_arguments
from common.console import UserError
from common.flags import list_values
from swarm.addresses import get_host_port, get_peer_id
from swarm.attestation import RunAttestation, contact_initial_peers, merge_attestations
from swarm.config import SwarmConfig, make_config
from swarm.identity import make_identity
from swarm.joining import Swarm
from swarm.membership import Membership
from training.page_client import resolve_initial_peers

logger = logging.getLogger("joining")

SHAPE = "config_path"
BASE = "model_name_or_path"
OWN_FLAGS = ("experiment_prefix", "tokenizer_path", SHAPE)
PUBLIC_IP_URL = "https://api.ipify.org"


def begin(groups: tuple, kept_at: Path | None = None) -> tuple[Membership | None, tuple]:
    """Make this peer's identity, kept at this path, and return the membership of a closed run, and the parsed command
    line (SwarmArguments first) with the settings of the run."""
    membership = make_identity(make_config(SwarmConfig, groups[0]), kept_at)
    return membership, apply_settings(groups, discover_settings(groups[0], membership))


def check_multiaddrs(flag: str, maddrs: list[str], needs_peer_id: bool = False) -> None:
    """Raise a UserError with an example if an address is malformed, or lacks its peer id, or else its port."""
    example = "/ip4/203.0.113.1/tcp/31337" + ("/p2p/QmPeerId" if needs_peer_id else "")
    for maddr in maddrs:
        try:
            Multiaddr(maddr)
            if needs_peer_id:
                get_peer_id(maddr)
            elif not re.search(r"/(tcp|udp)/\d+", maddr):
                raise ValueError("it has no port")
        except Exception as e:  # hivemind's multiaddr parser raises many types for a malformed address
            raise UserError(f"{flag} {maddr!r} is not an address such as {example} ({type(e).__name__}: {e})") from e


def discover_settings(swarm: SwarmArguments, membership: Membership | None) -> dict[str, str]:
    """Ask the peers in --initial_peers for their run name and shared flags and return these by name.

    :raises UserError: if the peers disagree or serve another run, or if the run name remains unknown
    """
    if not swarm.initial_peers or swarm.use_ipfs:
        return {}
    prefix = swarm.experiment_prefix or (membership.own.prefix if membership else "")
    maddrs = resolve_initial_peers(swarm.initial_peers, prefix)
    check_multiaddrs("--initial_peers", maddrs, needs_peer_id=True)
    attestations, problem = asyncio.run(contact_initial_peers(maddrs, membership))
    attestation = merge_attestations(attestations, prefix, swarm.new_run)
    if not attestation:
        if prefix:
            return {} if swarm.experiment_prefix else {"experiment_prefix": prefix}
        raise UserError(problem or "--initial_peers did not send a run name: pass --experiment_prefix")
    if problem:
        logger.warning(problem)
    if not prefix and not re.fullmatch(r"[\w-]{1,100}", attestation.prefix, re.ASCII):
        # The name becomes a part of folder and dashboard names, so the user must confirm an unusual one.
        raise UserError(f"--initial_peers serve run {attestation.prefix!r}: if you trust it, pass --experiment_prefix")
    settings = list_settings(attestation)
    if not attestation.contract and not settings:
        logger.info("--initial_peers have no settings of the run yet: using defaults for all flags that are not set")
    return {"experiment_prefix": attestation.prefix, **settings}


def list_settings(attestation: RunAttestation) -> dict[str, str]:
    """Return the flags in an attestation that bind a new peer, by name; a switch that is on has the value True. BASE is
    among them, but only the user may name a model."""
    flags = attestation.contract.flags if attestation.contract else attestation.flags
    settings = {name: value or "True" for name, value in re.findall(r"--(\w+)(?: ([^-]\S*))?", flags)}
    # other flags and files may mean another thing on each machine
    shapes = [*map(str, Path("configs").glob("*.json"))]
    return {name: it for name, it in settings.items() if name not in OWN_FLAGS or (name == SHAPE and it in shapes)}


def require_settings(settings: dict[str, str], groups: tuple) -> None:
    """Raise a UserError that lists the flags which differ from the run's."""
    own = list_values(groups)
    differences = []
    for name, theirs in settings.items():
        mine = str(own[name])
        # Different paths may lead to the same file. The contract compares the weights of pretrained models.
        is_same = theirs == mine or name == SHAPE and os.path.realpath(theirs) == os.path.realpath(mine)
        if not is_same and name != BASE:
            differences.append(f"--{name}: the run has {theirs}, you have {mine}")
    if differences:
        raise UserError(
            f"run {own['experiment_prefix']!r} uses different settings; {'; '.join(differences)}. Omit these flags to "
            "use the run's, or start another run with --new_run --experiment_prefix NAME"
        )


def require_attested(swarm: Swarm, groups: tuple) -> None:
    """Raise a UserError if the flags differ from the attested ones, which bind trainers until there is a contract.

    `apply_settings` has not compared them if --use_ipfs is set, or if the attesting peer had only just started.
    """
    attestation = swarm.dht.attestation
    if attestation and not attestation.contract:
        require_settings(list_settings(attestation), groups)


def apply_settings(groups: tuple, settings: dict[str, str]) -> tuple:
    """Parse the command line again, with the run's settings as defaults, and log the flags that changed.

    :raises UserError: if the command line sets other values, or does not fit the settings
    """
    if not settings:
        return groups
    base = settings.get(BASE)
    settings = {name: it for name, it in settings.items() if name != BASE}
    own = list_values(groups)
    if base and not own[BASE] and ("lora_r" in settings or isinstance(groups[-1], TrainerArguments)):
        raise UserError(f"the run trains --{BASE} {base}: if you trust this model, add the flag")
    try:
        adopted = parse_arguments(*map(type, groups), before=[f"--{name}={it}" for name, it in settings.items()])
    except UserError as e:
        flags = " ".join(f"--{name} {it}" for name, it in settings.items())
        raise UserError(f"{e} (with {flags} from --initial_peers)") from e
    require_settings(settings, adopted)
    new = list_values(adopted)
    if inherited := [f"--{name} {it}" for name, it in settings.items() if own[name] != new[name]]:
        logger.info(f"inherited from --initial_peers: {' '.join(inherited)}")
    return adopted


def make_swarm_config(swarm: SwarmArguments) -> SwarmConfig:
    """Return the swarm's settings with multiaddrs for HOST:PORT, or raise a UserError if an address is invalid."""
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
    return make_config(SwarmConfig, swarm)


def announce_public_address(swarm: SwarmArguments, url: str = PUBLIC_IP_URL) -> SwarmArguments:
    """Look up this machine's address, and return the arguments with it in --announce_maddrs."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            ip = ipaddress.ip_address(answer.read(100).decode().strip())
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise UserError(
            f"--use_google_dns: {url} does not return this machine's address ({e}): pass --announce_maddrs "
            "/ip4/PUBLIC_IP/tcp/PORT instead"
        ) from e
    host_maddrs = []
    announced = []
    for maddr in swarm.host_maddrs:
        protocol, host, port = get_host_port(maddr)
        is_shown = protocol == f"ip{ip.version}" and not ipaddress.ip_address(host).is_loopback
        if is_shown and port == 0:
            # Choose a free port now: it must be known before the start to be announced.
            with socket.create_server(("", 0), family=socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as free:
                port = free.getsockname()[1]
            maddr = f"/{protocol}/{host}/tcp/{port}"
        host_maddrs.append(maddr)
        if is_shown:
            announced.append(maddr.replace(host, str(ip), 1))
    if not announced:
        raise UserError(
            f"--use_google_dns: the public address is {ip}, but --host_maddrs has no IPv{ip.version} address: add one"
        )
    logger.info(f"announcing {' '.join(announced)}: this port must be open")
    return dataclasses.replace(swarm, host_maddrs=host_maddrs, announce_maddrs=announced, use_google_dns=False)
