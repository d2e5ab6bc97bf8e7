"""Joining by HOST:PORT, the address of a peer's status page (see monitoring/page.py) or of the peer itself, and what a
peer logs about how others join.

A page is trusted only as a source of addresses: the run's contract and validators apply to the peers at these
addresses as to all others.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import re
import shlex

from common.addresses import split_host_port
from common.console import UserError, first_line
from swarm.addresses import get_ip, is_local, is_public
from swarm.attestation import find_peer
from swarm.joining import Swarm

logger = logging.getLogger("joining")

MAX_PAGE_BYTES = 64 * 1024
VISIT_TIMEOUT = 5.0  # seconds
HAPPY_EYEBALLS_DELAY = 0.25  # seconds; as RFC 8305 recommends
GREETING = b"\x13/multistream/1.0.0\n"  # both sides of a libp2p connection send this first


class PageError(UserError):
    """There is no peer to join by at an address of --initial_peers."""


def format_join(swarm: Swarm, maddrs: list[str], flags: str) -> str:
    """Return a trainer's command to join the run with its shared flags, for copy and paste."""
    prefix = shlex.quote(swarm.prefix) + (" --invite FILE" if swarm.dht.membership else "")
    return f"python run_trainer.py --experiment_prefix {prefix} --initial_peers {' '.join(maddrs)} {flags}".rstrip()


def warn_of_local_addresses(swarm: Swarm) -> None:
    """Log a warning if this peer listens on all interfaces, but has no address that works from outside."""
    best, *_ = maddrs = swarm.list_maddrs()
    listens_everywhere = any(ip is not None and ip.is_unspecified for ip in map(get_ip, swarm.config.host_maddrs))
    if listens_everywhere and not swarm.dht.client_mode and not any(map(is_public, maddrs)):
        logger.warning(
            f"{best} can be reached only from this {'machine' if is_local(best) else 'local network'}: for peers "
            "outside, pass --announce_maddrs /ip4/PUBLIC_IP/tcp/PORT with a port that your router forwards"
        )


async def fetch_page(host: str, port: int) -> tuple[bytes, str]:
    """Download http://host:port/ without an HTTP client, so that a hostile page costs at most MAX_PAGE_BYTES.

    The caller limits the time.

    :returns: the body, or GREETING if a peer itself listens there; and the IP address that answered
    :raises OSError, ValueError: if there is no page
    """
    # if the first address of a name drops packets, as many of IPv6 do, the next one is tried meanwhile
    reader, writer = await asyncio.open_connection(host, port, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY)
    with contextlib.closing(writer):
        writer.write(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        ip = writer.get_extra_info("peername")[0]
        start = await reader.read(len(GREETING))
        if start == GREETING:
            return start, ip
        try:
            await reader.readexactly(MAX_PAGE_BYTES + 1 - len(start))
        except asyncio.IncompleteReadError as e:  # an HTTP/1.0 server closes the connection after its answer
            head, _, body = (start + e.partial).partition(b"\r\n\r\n")
            if not re.match(rb"HTTP/\S+ 200\b", head):
                raise ValueError(f"it answers {head[:60]!r}") from e
            return body, ip
    raise ValueError(f"its answer is longer than {MAX_PAGE_BYTES} bytes")


def choose_maddrs(maddrs: list[str], ip: str) -> list[str]:
    """Choose the addresses of a peer to try after its status page answered at `ip`.

    Those with `ip` are best. Otherwise the peer may be behind a router or in a container: try `ip` with the ports of
    its private addresses, and its public and relayed addresses.
    """
    place, seen = make_place(ip)
    if same := [maddr for maddr in maddrs if get_ip(maddr) == seen]:
        return same
    replaced = [] if seen.is_loopback else [f"{place}/{m.split('/', 3)[3]}" for m in maddrs if not is_public(m)]
    return list(dict.fromkeys(replaced + [maddr for maddr in maddrs if is_public(maddr)])) or maddrs


def find_maddrs(address: str, prefix: str) -> list[str]:
    """Return the multiaddrs of the peer at `address`, host:port or http://host:port/ of its status page or of the peer
    itself, or raise a UserError. An empty prefix accepts any run."""
    try:
        host, port = split_host_port(address.removeprefix("http://").rstrip("/"))
    except ValueError:
        port = None
    if not port:
        raise UserError(
            f"--initial_peers {address!r} is not an address such as /ip4/203.0.113.1/tcp/31337/p2p/QmPeerId, nor "
            "HOST:PORT of a peer or its status page"
        )
    cure = "check that a peer runs there with --status_port, or pass the multiaddr that it prints"
    try:
        body, ip = asyncio.run(asyncio.wait_for(fetch_page(host, port), VISIT_TIMEOUT))
        if body == GREETING:  # the peer's own port, as in older guides
            if maddr := asyncio.run(find_peer(f"{make_place(ip)[0]}/tcp/{port}")):
                return [maddr]
            raise ValueError("a peer listens there, but does not reveal its id")
        page = json.loads(body)
        if not isinstance(page, dict) or not isinstance(page.get("multiaddrs"), list):
            raise ValueError("it lists no multiaddrs")
        if prefix and page.get("experiment_prefix") != prefix:
            raise ValueError(f"it shows run {str(page.get('experiment_prefix'))[:80]!r}, not {prefix!r}")
        maddrs = [str(maddr)[:500] for maddr in page["multiaddrs"][:32]]  # checked like those of --initial_peers
        if page.get("client_mode") or not maddrs:
            raise ValueError("its peer accepts no connections: choose another peer")
        return choose_maddrs(maddrs, ip)
    except (OSError, ValueError, IndexError, RecursionError) as e:
        # asyncio's text of a failed connection is a tuple of addresses
        reason = os.strerror(e.errno) if isinstance(e, ConnectionError) and e.errno else first_line(e)
        reason = f"no answer within {VISIT_TIMEOUT:g} s" if isinstance(e, TimeoutError) else reason
        raise PageError(f"--initial_peers {address}: no status page to join by ({reason}); {cure}") from e


def make_place(ip: str) -> tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the start of a multiaddr and the parsed address, as IPv4 if it is IPv4 mapped to IPv6."""
    seen = ipaddress.ip_address(ip.partition("%")[0])
    seen = getattr(seen, "ipv4_mapped", None) or seen
    return f"/ip{seen.version}/{seen}", seen


def resolve_initial_peers(addresses: list[str], prefix: str) -> list[str]:
    """Return --initial_peers as multiaddrs: each HOST:PORT is replaced by the addresses on its status page.

    :raises PageError: if no address is left; otherwise, a warning names each page that does not answer
    """
    maddrs = []
    errors = []
    for address in addresses:
        try:
            maddrs += [address] if address.startswith("/") else find_maddrs(address, prefix)
        except PageError as e:
            errors.append(e)
    if errors and not maddrs:
        raise errors[0]
    for error in errors:
        logger.warning(str(error))
    return maddrs
