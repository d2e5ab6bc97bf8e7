"""Joining by HOST:PORT, of a peer's status page (see viewing/page.py) or of the peer itself.

Whoever reads a page trusts it as far as an address: the run's contract and validators apply to whom it leads to as to
any other peer.
"""

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import shlex

from arguments import split_host_port
from support.console import UserError
from swarm.addresses import GREETING, get_host_port, get_ip, get_peer_id, is_public
from swarm.outside import find_peer

MAX_PAGE_BYTES = 64 * 1024
VISIT_TIMEOUT = 5.0  # seconds


def format_join(prefix: str, maddrs: list[str], flags: str, is_closed: bool) -> str:
    """A trainer's command, for copy and paste.

    :param flags: that all peers of the run must share
    :param is_closed: whether the run is for invited peers alone
    """
    invite = " --invite FILE" if is_closed else ""
    prefix = shlex.quote(prefix) + invite
    return f"python run_trainer.py --experiment_prefix {prefix} --initial_peers {' '.join(maddrs)} {flags}".rstrip()


async def fetch_page(host: str, port: int) -> tuple[bytes, str]:
    """The body of http://host:port/, and the IP address that answered; OSError or ValueError when there is none. Where
    it is no page, but a peer itself, GREETING.

    No HTTP client, because this bounds what a hostile page can cost: MAX_PAGE_BYTES, and what the caller waits.
    """
    reader, writer = await asyncio.open_connection(host, port)
    with contextlib.closing(writer):
        writer.write(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        ip, start = writer.get_extra_info("peername")[0], await reader.read(len(GREETING))
        if start == GREETING:
            return start, ip
        try:
            await reader.readexactly(MAX_PAGE_BYTES + 1 - len(start))
        except asyncio.IncompleteReadError as e:  # an HTTP/1.0 server answers in one piece and hangs up
            head, _, body = (start + e.partial).partition(b"\r\n\r\n")
            if not re.match(rb"HTTP/\S+ 200\b", head):
                raise ValueError(f"it answers {head[:60]!r}") from e
            return body, ip
    raise ValueError(f"its answer is longer than {MAX_PAGE_BYTES} bytes")


def choose_maddrs(maddrs: list[str], ip: str) -> list[str]:
    """Which of a peer's addresses a newcomer should try who has reached its status page at `ip`.

    That of the same IP address; or else, as the peer may see itself behind a router or in a container, its ports at
    that address, and its public and relayed addresses.
    """
    place, seen = make_place(ip)
    if same := [maddr for maddr in maddrs if get_ip(maddr) == seen]:
        return same
    replaced = [] if seen.is_loopback else [f"{place}/{m.split('/', 3)[3]}" for m in maddrs if not is_public(m)]
    return list(dict.fromkeys(replaced + [maddr for maddr in maddrs if is_public(maddr)])) or maddrs


def find_maddrs(address: str, prefix: str) -> list[str]:
    """The multiaddrs of the peer that is at `address`, or its status page; a UserError when there is none.

    :param address: host:port, or http://host:port/
    :param prefix: the run that the page must be of; empty: any
    """
    try:
        host, port = split_host_port(address.removeprefix("http://").rstrip("/"))
    except ValueError:
        port = None
    if not port:
        raise UserError(
            f"--initial_peers {address!r} is not an address such as /ip4/203.0.113.1/tcp/31337/p2p/QmPeerId, nor "
            "HOST:PORT of a peer or its status page"
        )
    cure = "check that a peer runs there with --status_port, or take the multiaddr that it prints"
    try:
        body, ip = asyncio.run(asyncio.wait_for(fetch_page(host, port), VISIT_TIMEOUT))
        if body == GREETING:  # the peer's own port, as in older guides
            return [find_peer_at(ip, port)]
        page = json.loads(body)
        if not isinstance(page, dict) or not isinstance(page.get("multiaddrs"), list):
            raise ValueError("it lists no multiaddrs")
        if prefix and page.get("experiment_prefix") != prefix:
            raise ValueError(f"it is of the run {str(page.get('experiment_prefix'))[:80]!r}, not {prefix!r}")
        maddrs = [check_maddr(maddr) for maddr in page["multiaddrs"][:32]]
        if page.get("client_mode") or not maddrs:
            raise ValueError("it accepts no connections: ask for another peer")
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"--initial_peers {address}: no status page to join by ({describe(e)}); {cure}") from e
    return choose_maddrs(maddrs, ip)


def find_peer_at(ip: str, port: int) -> str:
    """The multiaddr of the peer that listens there; ValueError when it does not say who it is."""
    maddr = asyncio.run(find_peer(f"{make_place(ip)[0]}/tcp/{port}"))
    if maddr is None:
        raise ValueError("a peer listens there that does not say who it is")
    return maddr


def make_place(ip: str) -> tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The beginning of a multiaddr, and the address: IPv4 where it is IPv4 written as IPv6."""
    seen = ipaddress.ip_address(ip.partition("%")[0])
    seen = getattr(seen, "ipv4_mapped", None) or seen
    return f"/ip{seen.version}/{seen}", seen


def check_maddr(maddr: object) -> str:
    """The multiaddr of a page, which anybody may have written; ValueError when it is not one."""
    if not isinstance(maddr, str) or not maddr.startswith("/") or len(maddr) > 500 or any(c in maddr for c in ", \n"):
        raise ValueError(f"it lists {str(maddr)[:80]!r}, which is not a multiaddr")
    try:
        get_peer_id(maddr)
        get_ip(maddr), get_host_port(maddr)
    except Exception as e:  # hivemind's multiaddr parsing raises many kinds, all of which mean the same
        raise ValueError(f"it lists {maddr[:80]!r}, which is not a multiaddr") from e
    return maddr


def describe(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "its answer is not JSON"
    if isinstance(error, TimeoutError):
        return f"no answer within {VISIT_TIMEOUT:g} s"
    if (
        isinstance(error, OSError) and (error.errno or 0) > 0
    ):  # asyncio has put the address in place of the system's words
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def resolve_initial_peers(addresses: list[str], prefix: str) -> list[str]:
    """--initial_peers as multiaddrs: each HOST:PORT becomes the addresses that the status page there lists."""
    found = ([address] if address.startswith("/") else find_maddrs(address, prefix) for address in addresses)
    return [maddr for maddrs in found for maddr in maddrs]
