"""Multiaddrs, the addresses of peers: which are of use to whom, and why one does not answer.

A multiaddr such as /ip4/203.0.113.1/tcp/31337/p2p/XXXX names host, port and the peer's id. Other hosts: /ip6/...,
/dns4/NAME, /dns6/NAME, /dnsaddr/NAME. With /p2p-circuit in it, it leads to a peer through another one, a relay.

    python -c "import asyncio; from swarm.addresses import diagnose_unreachable; \\
        print(asyncio.run(diagnose_unreachable('/ip4/127.0.0.1/tcp/9/p2p/XXXX')))"
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
from typing import NoReturn

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from support.console import UserError

# what a libp2p listener says, and wants to hear, before anything else
GREETING = b"\x13/multistream/1.0.0\n"


def check_multiaddrs(flag: str, maddrs: list[str], needs_peer_id: bool = False) -> None:
    """A UserError that shows a right address when one of them is malformed or lacks its peer id."""
    example = "/ip4/203.0.113.1/tcp/31337" + "/p2p/QmPeerId" * needs_peer_id
    for maddr in maddrs:
        try:
            Multiaddr(maddr)
            if needs_peer_id:
                get_peer_id(maddr)
        except Exception as e:  # hivemind's multiaddr parsing raises many kinds, all of which mean the same
            raise UserError(f"{flag} {maddr!r} is not an address such as {example} ({type(e).__name__}: {e})") from e


def get_peer_id(maddr: str) -> PeerID:
    """The id of the peer that a multiaddr leads to; it raises many kinds of errors where there is none."""
    return PeerID.from_base58(Multiaddr(maddr)["p2p"])


def get_host_port(maddr: str) -> tuple[str, str, int | None]:
    """(protocol, host, TCP port or None) of a multiaddr; ("", "", None) when it names no host, as /p2p/XXXX."""
    parts = str(maddr).strip("/").split("/")
    if len(parts) < 2 or parts[0] not in ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"):
        return "", "", None
    port = int(parts[3]) if len(parts) > 3 and parts[2] == "tcp" and parts[3].isdecimal() else None
    return parts[0], parts[1], port


def get_ip(maddr: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a multiaddr names; None when it names none, or leads through a relay."""
    protocol, host, _ = get_host_port(maddr)
    return ipaddress.ip_address(host) if protocol in ("ip4", "ip6") and not is_relayed(maddr) else None


def is_relayed(maddr: str) -> bool:
    return "/p2p-circuit" in str(maddr)


def is_local(maddr: str) -> bool:
    """Whether a multiaddr is of use on this machine alone (127.0.0.1, ::1)."""
    ip = get_ip(maddr)
    return ip is not None and (ip.is_loopback or ip.is_unspecified)


def is_public(maddr: str) -> bool:
    """Whether a multiaddr may be of use anywhere: no loopback, no address of a home or office network."""
    ip = get_ip(maddr)
    return ip is None or ip.is_global


def list_shareable_maddrs(maddrs: list) -> list[str]:
    """The addresses worth telling others: loopback ones only when there are no others, public ones first."""
    texts = sorted({str(maddr) for maddr in maddrs}, key=lambda maddr: (is_relayed(maddr), not is_public(maddr), maddr))
    return [maddr for maddr in texts if not is_local(maddr)] or texts


def exit_if_unreachable() -> NoReturn:
    """End a role that is there for others to reach it, and that has become a client; end its DHT before."""
    raise UserError(
        "others cannot reach this peer: open the port of --host_maddrs in the firewall or forward it in the router "
        "(--announce_maddrs), or run it on another machine"
    )


async def diagnose_unreachable(maddr: str, timeout: float = 5.0) -> str | None:
    """Why nothing like a peer answers at a multiaddr, with the cure; None when something does, or TCP cannot tell.

    :param timeout: seconds to wait for the connection, and again for the greeting of a libp2p listener
    """
    protocol, host, port = get_host_port(maddr)
    if port is None or is_relayed(maddr):
        return None
    family = {"4": socket.AF_INET, "6": socket.AF_INET6}.get(protocol[-1], socket.AF_UNSPEC)  # of ip4, dns6, dns

    async def ask(ip: str) -> str | None:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), timeout)
        except ConnectionRefusedError:
            return f"{host} is up, but nothing listens on its port {port}: is the peer running, is this its port?"
        except TimeoutError:
            return f"{host} does not answer on port {port} within {timeout:g} s: is it up, or behind a firewall?"
        except OSError as e:
            reason = (
                os.strerror(e.errno) if e.errno else e
            )  # asyncio has put the address in place of the system's words
            return f"{host} cannot be reached ({reason}): check your network and the address"
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(GREETING)
            if await asyncio.wait_for(reader.readexactly(len(GREETING)), timeout) == GREETING:
                return None
        return f"what listens on port {port} of {host} is not a hivemind peer: check the port"

    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    except OSError as e:
        return f"the name {host} does not resolve ({e.strerror}): check its spelling and your DNS"
    reasons = await asyncio.gather(*(ask(address[0]) for *_, address in found))
    return None if None in reasons else reasons[-1]
