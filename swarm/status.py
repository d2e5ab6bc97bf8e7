"""The status page: one peer's addresses and progress as JSON over HTTP, and the way to join by HOST:PORT.

    python run_training_monitor.py --experiment_prefix my_albert --status_port 8080
    curl http://localhost:8080/

Read-only, small, and of no use to an attacker: nothing that a visitor sends changes anything, and no more than
MAX_VISITORS are served at once. Whoever reads a page trusts it as far as an address: the run's contract and
validators apply to whom it leads to as to any other peer.
"""

import asyncio
import contextlib
import http.server
import ipaddress
import json
import logging
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable

from hivemind import DHT

from arguments import split_host_port
from support.console import UserError
from swarm.addresses import GREETING, get_host_port, get_ip, get_peer_id, is_public, select_for_others
from swarm.membership import MEMBERS
from swarm.outside import find_peer

logger = logging.getLogger("status")

MAX_PAGE_BYTES = 64 * 1024
MAX_VISITORS = 16
VISIT_TIMEOUT = 5.0  # seconds
ADDRESS_PERIOD = 10.0  # seconds between two questions to the DHT process: relay addresses come and go


class StatusServer(http.server.ThreadingHTTPServer):
    """Bound at once, so that a port in use is an error at the start; answers only after `serve`."""

    daemon_threads = True

    def __init__(self, port: int, prefix: str):
        self.prefix, self.visitors = prefix, threading.BoundedSemaphore(MAX_VISITORS)
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        # not bound by HTTPServer, which looks this machine's name up, and may take seconds
        super().__init__(("", port), StatusHandler, bind_and_activate=False)
        self.socket.close()
        try:
            self.socket = socket.create_server(("", port), family=family, backlog=MAX_VISITORS, dualstack_ipv6=is_dual)
        except OSError as e:
            raise UserError(f"--status_port {port}: {os.strerror(e.errno).lower()}, choose another port or 0") from e
        # helper processes must not hold the port when this one is killed
        os.register_at_fork(after_in_child=self.socket.close)

    def serve(self, dht: DHT, read_progress: Callable[[], dict]) -> None:
        """Begin to answer, in a thread: call it when all helper processes are forked.

        :param read_progress: called by that thread; epoch, loss, peers and what else is known, None if unknown; and the
            flags that all peers of the run share
        """
        self.dht, self.read_progress = dht, read_progress
        self.maddrs, self.next_look, self.look = [], 0.0, threading.Lock()
        threading.Thread(target=self.serve_forever, name="status page", daemon=True).start()
        logger.info(f"status page on port {self.socket.getsockname()[1]}")

    def make_page(self) -> dict:
        with self.look:
            if time.monotonic() >= self.next_look:
                self.maddrs = select_for_others(self.dht.get_visible_maddrs(latest=True))
                self.next_look = time.monotonic() + ADDRESS_PERIOD
        progress = self.read_progress()
        flags, can_welcome = progress.pop("flags"), self.maddrs and not self.dht.client_mode
        return {
            "experiment_prefix": self.prefix,
            "peer_id": str(self.dht.peer_id),
            "client_mode": self.dht.client_mode,
            "multiaddrs": self.maddrs,
            "join": format_join(self.prefix, self.maddrs, flags) if can_welcome else None,
            **progress,
        }

    def process_request(self, request, client_address) -> None:
        if not self.visitors.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.visitors.release()

    def handle_error(self, request, client_address) -> None:
        logger.debug("a visitor of the status page left early", exc_info=True)


def format_join(prefix: str, maddrs: list[str], flags: str) -> str:
    """A trainer's command, for copy and paste.

    :param flags: that all peers of the run must share
    """
    prefix = shlex.quote(prefix) + " --invite FILE" * bool(MEMBERS.prefix)
    return f"python run_trainer.py --experiment_prefix {prefix} --initial_peers {' '.join(maddrs)} {flags}".rstrip()


class StatusHandler(http.server.BaseHTTPRequestHandler):
    timeout = VISIT_TIMEOUT
    server_version, sys_version = "status", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/status"):
            self.send_error(404)
            return
        page = json.dumps(self.server.make_page(), indent=2).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_) -> None:
        """Visitors are not worth a line each."""


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
