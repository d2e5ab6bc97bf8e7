"""Multiaddrs, the addresses of peers: parsing, and choosing those that other peers can use.

A multiaddr such as /ip4/203.0.113.1/tcp/31337/p2p/XXXX consists of the host, the port and the peer id. The host can
also be /ip6/..., /dns4/NAME, /dns6/NAME or /dnsaddr/NAME. An address with /p2p-circuit goes through a relay peer.
"""

import ipaddress
import re
from collections.abc import Iterable

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr


def get_peer_id(maddr: str) -> PeerID:
    """Return the id of the peer, not of its relay, in a multiaddr; without one, exceptions of many types are raised."""
    return PeerID.from_base58([value for kind, value in Multiaddr(maddr).items() if kind.name == "p2p"][-1])


def to_quic(maddr: str) -> str:
    """Return the address of QUIC at the port of a TCP address."""
    return re.sub(r"/tcp/(\d+)", r"/udp/\1/quic-v1", str(maddr))


def add_quic(maddrs: Iterable) -> list[str]:
    """Return these addresses to listen on, to announce or to dial. If all are of TCP, add QUIC at the same ports: it
    carries more over connections that lose packets, and libp2p dials it first. On loopback, TCP is faster."""
    texts = [str(maddr) for maddr in maddrs]
    if any("/udp/" in maddr for maddr in texts):
        return texts
    remote = [maddr for maddr in texts if not getattr(get_ip(maddr), "is_loopback", False)]
    return list(dict.fromkeys([*texts, *map(to_quic, remote)]))


def get_host_port(maddr: str) -> tuple[str, str, int | None]:
    """Return (protocol, host, port or None) of a multiaddr, or ("", "", None) without a host, as in /p2p/XXXX."""
    parts = str(maddr).strip("/").split("/")
    if len(parts) < 2 or parts[0] not in ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"):
        return "", "", None
    port = int(parts[3]) if len(parts) > 3 and parts[2] in ("tcp", "udp") and parts[3].isdecimal() else None
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
    """Return the addresses to share, public ones first, loopback only if alone, and none that `add_quic` adds again."""
    texts = {str(maddr) for maddr in maddrs}
    texts -= {to_quic(maddr) for maddr in texts if "/tcp/" in maddr}
    texts = sorted(texts, key=lambda maddr: (is_relayed(maddr), not is_public(maddr), maddr))
    return [maddr for maddr in texts if not is_local(maddr)] or texts
