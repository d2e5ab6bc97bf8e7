"""Files on web servers, readable from any position, with retries if a connection is cut, refused or slow.

python -c "from text.http import HttpFile; print(HttpFile('https://example.org', patience=60).read(100))"
"""

import contextlib
import io
import logging
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator

import httpx2

logger = logging.getLogger("http")

STALL_SECONDS = 30.0  # for the headers of an answer, and for each piece of its body
LEAST_SPEED = 1000  # bytes per second
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds between two attempts
TEMPORARY_ANSWERS = {408, 425, 429}  # also 500 to 599
MOST_REDIRECTS = 10
HEADERS = {"User-Agent": "collaborative-training", "Accept-Encoding": "identity"}


class HttpError(Exception):
    """The error of a file that cannot be read; its text is the reason."""


class ChangedError(HttpError):
    """The error of a file that has changed since an earlier request, or may have."""


def is_url(source: str) -> bool:
    """Return whether this is an http(s) address, without typing errors in its host and port."""
    try:
        return source.startswith(("http://", "https://")) and urllib.parse.urlsplit(source).port != 0
    except ValueError:
        return False


class HttpFile(io.RawIOBase):
    """A file on a web server. A read returns the bytes that have arrived, without a wait for more.

    :param patience: the seconds without a byte, over all attempts, before a read fails; slower than LEAST_SPEED counts
    :param stop: an event that ends the wait between two attempts
    :param facts: the attribute `facts` of an earlier HttpFile; the file must be the same as then
    :ivar facts: its size and its ETag (or time of change), None if the server does not report them; empty before the
        first response
    """

    def __init__(self, url: str, patience: float, stop: threading.Event | None = None, facts: dict | None = None):
        self.url, self.patience, self.stop, self.facts = url, patience, stop or threading.Event(), dict(facts or {})
        self.client: httpx2.Client | None = None
        self.late = self.deadline = 0.0  # late: seconds behind LEAST_SPEED, over all connections
        self.position = self.arrived = 0
        self.pieces, self.rest = self.receive(0), b""  # bytes from `arrived` on; rest: of the piece that came last

    def readable(self) -> bool:
        """Return True: this file can be read, and so can any position of it."""
        return True

    seekable = readable

    def find_size(self) -> int | None:
        """Return the size in bytes, or None if the server does not report it."""
        if not self.facts:
            self.rest = next(self.pieces, b"")
        return self.facts.get("size")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read; the request follows with that read."""
        if whence == io.SEEK_END and self.find_size() is None:
            raise io.UnsupportedOperation(f"{self.url}: its server does not report its size")
        self.position = offset + {io.SEEK_CUR: self.position, io.SEEK_END: self.facts.get("size")}.get(whence, 0)
        return self.position

    def readinto(self, buffer) -> int:
        """Read at most `len(buffer)` bytes; return their number, 0 at the end."""
        if self.arrived != self.position:
            self.pieces.close()
            self.pieces, self.rest = self.receive(self.position), b""
        piece = self.rest or next(self.pieces, b"")
        count = min(len(buffer), len(piece))
        buffer[:count], self.rest = piece[:count], piece[count:]
        self.position += count
        self.arrived = self.position
        return count

    def close(self) -> None:
        """Close the connection too."""
        self.pieces.close()
        if self.client:
            self.client.close()
        super().close()

    def receive(self, position: int) -> Iterator[bytes]:
        """Yield the bytes from this position on as they arrive, over several connections if necessary."""
        delay, since = FIRST_DELAY, time.monotonic()
        while self.facts.get("size") is None or position < self.facts["size"]:
            try:
                with contextlib.closing(self.connect(position)) as response:
                    before = position - self.check(response, position)  # bytes that a server without ranges repeats
                    for piece in response.iter_raw():
                        self.late = max(0.0, self.late + time.monotonic() - since - len(piece) / LEAST_SPEED)
                        if self.late > self.patience:
                            raise TimeoutError
                        wanted, before = piece[before:], max(0, before - len(piece))
                        position += len(wanted)
                        if wanted:
                            yield wanted
                            delay = FIRST_DELAY
                        since = time.monotonic()
                        self.deadline = since + STALL_SECONDS
                if self.facts["size"] in (None, position) and not before:
                    return
                reason = f"the connection was cut after {position:,} bytes"
            except (TimeoutError, httpx2.TimeoutException):
                reason = f"fewer than {LEAST_SPEED:,} bytes a second came"
            except httpx2.HTTPStatusError as e:
                reason = f"answers {e.response.status_code} {e.response.reason_phrase}"
                if not e.response.is_server_error and e.response.status_code not in TEMPORARY_ANSWERS:
                    raise HttpError(f"{reason}: check the address") from e
            except (httpx2.HTTPError, httpx2.InvalidURL, ImportError, ValueError) as e:
                reason = str(e) or type(e).__name__
                if isinstance(e, httpx2.UnsupportedProtocol) or not isinstance(e, httpx2.HTTPError):
                    raise HttpError(f"{reason}: check the address, and the proxy if there is one") from e
                if "CERTIFICATE_VERIFY_FAILED" in reason:
                    raise HttpError(f"{reason}: its certificate or this machine's clock is wrong") from e
            if self.late + time.monotonic() + delay - since > self.patience or self.stop.is_set():
                raise HttpError(f"{reason}; gave up")
            logger.warning(f"{self.url}: {reason}; trying again in {delay:g} s")
            self.stop.wait(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    def connect(self, position: int) -> httpx2.Response:
        """Request the file from this position on, and return the response, whose body is not read yet."""
        self.client = self.client or httpx2.Client(headers=HEADERS, timeout=STALL_SECONDS)
        headers = {"Range": f"bytes={position}-"} if position else {}
        request = self.client.build_request("GET", self.url, headers=headers, extensions={"trace": self.watch})
        for _ in range(MOST_REDIRECTS):
            self.deadline = time.monotonic() + STALL_SECONDS
            response = self.client.send(request, stream=True)
            request = response.next_request
            if request is None:
                return response
            response.close()  # unread: a body may be endless
        raise HttpError("leads from one address to another without end: check the address")

    def watch(self, event: str, details: dict) -> None:
        """Hold a new connection to the deadline, because the timeouts of httpx restart at each byte."""
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")):
            return
        stream = details["return_value"]
        read = stream.read

        def read_in_time(size: int, timeout: float | None = None) -> bytes:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            return read(size, left)

        stream.read = read_in_time

    def check(self, response: httpx2.Response, position: int) -> int:
        """Return the position at which a response begins; raise a ChangedError if the file is not as before."""
        if response.status_code == httpx2.codes.RANGE_NOT_SATISFIABLE:
            raise ChangedError("is shorter than it was before")
        response.raise_for_status()
        begin, size = 0, response.headers.get("Content-Length")
        if response.status_code == httpx2.codes.PARTIAL_CONTENT:
            match = re.fullmatch(r"bytes (\d{1,19})-\d+/(?:(\d{1,19})|\*)", response.headers.get("Content-Range", ""))
            if not match or int(match[1]) != position:
                raise ChangedError("its server sent another range than requested")
            begin, size = position, match[2]
        elif position and self.facts and not self.facts.get("etag"):
            raise ChangedError("was cut off, and its server does not tell whether it is still the same")
        validator = response.headers.get("ETag", response.headers.get("Last-Modified"))
        for name, value in {"size": int(size) if size else None, "etag": validator}.items():
            if self.facts.get(name) is None:
                self.facts[name] = value
            elif value not in (None, self.facts[name]):
                raise ChangedError("has changed in the meantime")
        return begin
