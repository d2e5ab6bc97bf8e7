"""HOST:PORT on the command line."""

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable

from common.console import UserError


def split_host_port(text: str) -> tuple[str, int | None]:
    """Split `host:port`, `[IPv6]:port` or `host:*` (port None) in two, or raise a ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/\s]+)):(\*|\d{1,5})", text)
    port = None if match and match[3] == "*" else int(match[3]) if match else -1
    if port is not None and not 0 <= port < 2**16:
        raise ValueError(f"{text!r} is neither an address such as /ip4/203.0.113.1/tcp/31337 nor HOST:PORT")
    return match[1] or match[2], port


def make_host_maddrs(text: str) -> list[str]:
    """Return the multiaddrs to listen on for a multiaddr, or for `host:port` as older guides write it."""
    if text.startswith("/"):
        return [text]
    try:
        host, port = split_host_port(text)
        address = ipaddress.ip_address(host)
    except ValueError:
        raise UserError(
            f"--host_maddrs {text!r} is not an address to listen on, such as /ip4/0.0.0.0/tcp/31337 or '[::]:31337'"
        ) from None
    # a socket on [::] also accepts IPv4, but libp2p's does not
    addresses = ["ip4/0.0.0.0", "ip6/::"] if address == ipaddress.ip_address("::") else [f"ip{address.version}/{host}"]
    return [f"/{address}/tcp/{port or 0}" for address in addresses]


def find_used_port(maddrs: Iterable[str]) -> str | None:
    """Return the first of these multiaddrs to listen on whose TCP port another program uses, or None."""
    for maddr in maddrs:
        match = re.match(r"/ip([46])/([^/]+)/tcp/(\d+)", maddr)
        if not match or match[3] == "0":
            continue
        family = socket.AF_INET6 if match[1] == "6" else socket.AF_INET
        try:
            socket.create_server((match[2], int(match[3])), family=family).close()
        except OSError as e:
            if e.errno == errno.EADDRINUSE:  # p2pd reports other errors itself, such as an address of another machine
                return maddr
    return None
