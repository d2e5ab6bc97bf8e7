"""Multiaddrs, the addresses of peers: parsing, choosing those that other peers can use, and diagnosing failures.

A multiaddr such as /ip4/203.0.113.1/tcp/31337/p2p/XXXX consists of the host, the port and the peer id. The host can
also be /ip6/..., /dns4/NAME, /dns6/NAME or /dnsaddr/NAME. An address with /p2p-circuit goes through a relay peer.
"""

import asyncio
import contextlib
import ipaddress
import os
import re
import socket

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm.errors import SwarmError

# Both sides of a libp2p connection send this first.
GREETING = b"\x13/multistream/1.0.0\n"


def check_multiaddrs(flag: str, maddrs: list[str], needs_peer_id: bool = False) -> None:
    """Raise a SwarmError with an example if an address is malformed, or lacks its peer id, or else its port."""
    example = "/ip4/203.0.113.1/tcp/31337" + ("/p2p/QmPeerId" if needs_peer_id else "")
    for maddr in maddrs:
        try:
            Multiaddr(maddr)
            if needs_peer_id:
                get_peer_id(maddr)
            elif not re.search(r"/(tcp|udp)/\d+", maddr):
                raise ValueError("it has no port")
        except Exception as e:  # hivemind's multiaddr parser raises many types for a malformed address
            raise SwarmError(f"{flag} {maddr!r} is not an address such as {example} ({type(e).__name__}: {e})") from e


def get_peer_id(maddr: str) -> PeerID:
    """Return the peer id of a multiaddr; without a valid id, the parser raises exceptions of many types."""
    return PeerID.from_base58(Multiaddr(maddr)["p2p"])


def get_host_port(maddr: str) -> tuple[str, str, int | None]:
    """Return (protocol, host, TCP port or None) of a multiaddr, or ("", "", None) without a host, as in /p2p/XXXX."""
    parts = str(maddr).strip("/").split("/")
    if len(parts) < 2 or parts[0] not in ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"):
        return "", "", None
    port = int(parts[3]) if len(parts) > 3 and parts[2] == "tcp" and parts[3].isdecimal() else None
    return parts[0], parts[1], port


def get_ip(maddr: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in a multiaddr, or None if it has none or goes through a relay."""
    protocol, host, _ = get_host_port(maddr)
    return ipaddress.ip_address(host) if protocol in ("ip4", "ip6") and not is_relayed(maddr) else None


def is_relayed(maddr: str) -> bool:
    """Return whether a multiaddr goes through a relay."""
    return "/p2p-circuit" in str(maddr)


def is_local(maddr: str) -> bool:
    """Return whether a multiaddr works only on this machine (127.0.0.1, ::1)."""
    ip = get_ip(maddr)
    return ip is not None and (ip.is_loopback or ip.is_unspecified)


def is_public(maddr: str) -> bool:
    """Return whether a multiaddr may work from anywhere: it is not a loopback or private network address."""
    ip = get_ip(maddr)
    return ip is None or ip.is_global


def list_shareable_maddrs(maddrs: list) -> list[str]:
    """Return the addresses to share with other peers, public ones first; loopback ones only if there are no others."""
    texts = sorted({str(maddr) for maddr in maddrs}, key=lambda maddr: (is_relayed(maddr), not is_public(maddr), maddr))
    return [maddr for maddr in texts if not is_local(maddr)] or texts


async def diagnose_unreachable(maddr: str, timeout: float = 5.0) -> str | None:
    """Try a TCP connection to a multiaddr and return why no peer answers there, and what to do. Return None if a libp2p
    listener answers, or if TCP cannot test this address.

    :param timeout: seconds to wait for the connection, and again for the greeting of a libp2p listener
    """
    protocol, host, port = get_host_port(maddr)
    if port is None or is_relayed(maddr):
        return None
    # ip4 and dns4 end in 4, ip6 and dns6 in 6; dns and dnsaddr allow both families
    family = {"4": socket.AF_INET, "6": socket.AF_INET6}.get(protocol[-1], socket.AF_UNSPEC)

    async def try_connection(ip: str) -> str | None:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), timeout)
        except ConnectionRefusedError:
            return f"{host} is up, but nothing listens on its port {port}: is the peer running, is this its port?"
        except TimeoutError:
            return f"{host} does not answer on port {port} within {timeout:g} s: is it up, or behind a firewall?"
        except OSError as e:
            # asyncio replaces the system's message by one that repeats the address
            reason = os.strerror(e.errno) if e.errno else e
            return f"{host} cannot be reached ({reason}): check your network and the address"
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(GREETING)
            if await asyncio.wait_for(reader.readexactly(len(GREETING)), timeout) == GREETING:
                return None
        return f"the program on port {port} of {host} is not a hivemind peer: check the port"

    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    except OSError as e:
        return f"the name {host} does not resolve ({e.strerror}): check its spelling and your DNS"
    reasons = await asyncio.gather(*(try_connection(address[0]) for *_, address in infos))
    return None if None in reasons else reasons[-1]
