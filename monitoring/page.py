"""The status page of a run over HTTP, on --status_port of any role: page.html for users, JSON for programs.

    python run_training_monitor.py --experiment_prefix my_albert --status_port 8080
    curl http://localhost:8080/

A browser gets the page, which requests /status.json and /history.json?since=EPOCH. New peers can also join by
/status.json (training/page_client.py). The server is read-only, makes each answer at most once a second, and ends the
oldest visit if there are too many.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import logging
import math
import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from arguments import SwarmArguments
from common.console import UserError
from monitoring.history import Contributions, History, describe_swarm
from swarm.addresses import get_host_port, is_relayed
from swarm.joining import Swarm
from training.figures import ContributorRegistry, aggregate_metrics, fetch_records
from training.page_client import VISIT_TIMEOUT, format_join

logger = logging.getLogger("status")

MAX_VISITORS = 64  # visits at once
MAX_REQUEST_BYTES = 2**14  # of a visit; http.client would keep 100 headers of 64 KiB
SLOT_TIMEOUT = 0.1  # seconds for an evicted visit to end
ANSWER_PERIOD = 1.0  # seconds for which answers are cached
MAX_ANSWERS = 64  # that are cached
READ_INTERVAL = 10.0  # seconds between a trainer's downloads of the swarm's metrics
READ_TIMEOUT = 2.0  # seconds for such a download
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


class StatusServer(http.server.ThreadingHTTPServer):
    """A server that binds its port at once, to fail early if the port is in use, and answers only after `serve`."""

    daemon_threads = True

    def __init__(self, port: int):
        self.slots = threading.BoundedSemaphore(MAX_VISITORS)
        #: the keys are the open visits, oldest first
        self.visits: dict[socket.socket, None] = {}
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        # HTTPServer would look up this machine's name on bind, which may take seconds
        super().__init__(("", port), StatusHandler, bind_and_activate=False)
        self.socket.close()
        try:
            self.socket = socket.create_server(("", port), family=family, backlog=MAX_VISITORS, dualstack_ipv6=is_dual)
        except OSError as e:
            raise UserError(f"--status_port {port}: {os.strerror(e.errno).lower()}, choose another port or 0") from e
        # otherwise helper processes would hold the port after this one is killed
        os.register_at_fork(after_in_child=self.socket.close)

    def serve(self, swarm: Swarm, read_progress: Callable[[], dict], history: History) -> None:
        """Start to answer, in a thread. Call this after all helper processes are forked.

        :param read_progress: returns epoch, loss, peers and other figures (None if unknown) and the run's shared flags
        """
        self.swarm = swarm
        self.read_progress = read_progress
        self.history = history
        # once, because the DHT's process may be too busy to answer a visitor
        self.maddrs = swarm.list_maddrs()
        self.answers = {}
        self.next_answers = 0.0
        self.answering = threading.Lock()
        self.html = (Path(__file__).parent / "page.html").read_bytes()
        self.policy = make_policy(self.html.decode())
        threading.Thread(target=self.serve_forever, name="status page", daemon=True).start()
        direct = [maddr for maddr in self.maddrs if not is_relayed(maddr)]
        protocol, host, _ = get_host_port(direct[0]) if direct else ("dns", "localhost", None)
        host = f"[{host}]" if protocol == "ip6" else host
        logger.info(f"status page: http://{host}:{self.socket.getsockname()[1]}/")

    def answer(self, name: str, make: Callable[[], dict]) -> bytes:
        """Return the result of `make` as JSON, or its cached result for this name."""
        with self.answering:
            if time.monotonic() >= self.next_answers or len(self.answers) >= MAX_ANSWERS:
                self.answers = {}
                self.next_answers = time.monotonic() + ANSWER_PERIOD
            if name not in self.answers:
                indent = 2 if name == "status" else None  # for readers
                self.answers[name] = json.dumps(make(), indent=indent).encode() + b"\n"
            return self.answers[name]

    def make_status(self) -> dict:
        """Return the content of /status.json."""
        progress = self.read_progress()
        flags = progress.pop("flags")
        dht = self.swarm.dht
        can_welcome = self.maddrs and not dht.client_mode
        return {
            "experiment_prefix": self.swarm.prefix,
            "peer_id": str(dht.peer_id),
            "client_mode": dht.client_mode,
            "multiaddrs": self.maddrs,
            "join": format_join(self.swarm, self.maddrs, flags) if can_welcome else None,
            "time": time.time(),
            **progress,
        }

    def process_request(self, request, client_address) -> None:
        """Start a visit. If there are too many, end the oldest."""
        for visit in list(self.visits)[: 1 - MAX_VISITORS]:
            self.visits.pop(visit, None)
            with contextlib.suppress(OSError):  # its own thread has closed it
                visit.shutdown(socket.SHUT_RDWR)
        if self.slots.acquire(timeout=SLOT_TIMEOUT):
            self.visits[request] = None
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no more threads can start
                self.visits.pop(request, None)
                self.slots.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:
        """Answer a visitor in a thread of its own, then free its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.visits.pop(request, None)
            self.slots.release()

    def handle_error(self, request, client_address) -> None:
        """Log an error of a visitor's connection for debugging only."""
        logger.debug("a visitor of the status page left early", exc_info=True)


def open_page(args: SwarmArguments) -> StatusServer | None:
    """Return the server for --status_port, or None if it is not set."""
    return None if args.status_port is None else StatusServer(args.status_port)


class RequestReader:
    """A reader of a visitor's lines, which are empty after MAX_REQUEST_BYTES: this ends the headers."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.bytes_left = MAX_REQUEST_BYTES

    def readline(self, size: int) -> bytes:
        """Read a line of at most this size."""
        line = self.file.readline(min(size, self.bytes_left))
        self.bytes_left -= len(line)
        return line

    def close(self) -> None:
        """Close the reader; the socket stays open."""
        self.file.close()


class StatusHandler(http.server.BaseHTTPRequestHandler):
    """A handler for one visit to the status page."""

    timeout = VISIT_TIMEOUT
    server_version = "status"
    sys_version = ""

    def setup(self) -> None:
        """Open the connection, and limit the bytes that are read from it."""
        super().setup()
        self.rfile = RequestReader(self.rfile)

    def do_GET(self) -> None:
        """Answer a request for the page, the status or the history of the loss."""
        path, _, query = self.path.partition("?")
        if path == "/" and "text/html" in self.headers.get("Accept", ""):
            self.send("text/html; charset=utf-8", self.server.html)
        elif path in ("/", "/status", "/status.json"):
            self.send("application/json", self.server.answer("status", self.server.make_status))
        elif path == "/history.json":
            since = urllib.parse.parse_qs(query).get("since", ["-1"])[0]
            if not re.fullmatch(r"-?\d{1,10}", since, re.ASCII):
                self.send_error(400, "since is the number of an epoch")
                return
            points = self.server.answer(since, lambda: self.server.history.make_points(int(since)))
            self.send("application/json", points)
        else:
            self.send_error(404)

    def send(self, kind: str, body: bytes) -> None:
        """Send a response of this content type."""
        self.send_response(200)
        own = {"Content-Type": kind, "Content-Length": len(body), "Content-Security-Policy": self.server.policy}
        for name, value in (own | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Log nothing for visits."""


def make_policy(html: str) -> str:
    """Return a content security policy that allows the page's own script and style, and requests to its server."""

    def find_hash(tag: str) -> str:
        text = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {find_hash('script')}; style-src {find_hash('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class TrainerPage:
    """A page with a trainer's own curve and figures, and with the swarm's metrics, which only visits refresh."""

    def __init__(self, server: StatusServer, swarm: Swarm, describe: Callable[[], dict]):
        self.server = server
        self.swarm = swarm
        self.describe = describe
        self.history = History()
        self.contributions = Contributions({})
        self.workers = ContributorRegistry()
        #: the swarm's newest metrics, if any
        self.metrics: dict = {}
        self.next_read = 0.0

    def add(self, line: dict) -> None:
        """Add a line of history.jsonl to the curve."""
        self.history.add({**line, "alive_peers": line["num_peers"]})

    def serve(self, lines: list[dict]) -> None:
        """Start to answer, in a thread, with these lines of history.jsonl, all of this run."""
        for line in lines:
            self.add(line)
        self.server.serve(self.swarm, self.read, self.history)

    def read(self) -> dict:
        """Return the content of the page."""
        if time.monotonic() >= self.next_read:
            self.next_read = time.monotonic() + READ_INTERVAL
            records = fetch_records(self.swarm.dht, self.swarm.prefix, READ_TIMEOUT, self.workers)
            self.contributions.update(records, {}, time.time())
            metrics = aggregate_metrics([(label, metrics) for label, (metrics, _) in records.items()])
            self.metrics = vars(metrics) if metrics else {}
        own = self.describe()
        shown = describe_swarm(self.metrics, self.history) | self.contributions.describe()
        # not by the curve, which an earlier start may have ended
        is_over = self.history and own["epoch"] >= own.get("final_epoch", math.inf)
        ended = self.history[-1]["time"] if is_over else None
        return {**shown, **own, "ended": ended, "flags": self.swarm.contract.flags}
