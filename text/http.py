"""Files on web servers, readable from any position, with retries if a connection is cut, refused or slow.

python -c "from text.http import HttpFile; print(HttpFile('https://example.org', patience=60).read(100))"
"""

import io
import logging
import re
import threading
import time
import urllib.parse

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
        self.client, self.response, self.pieces, self.deadline = None, None, None, 0.0
        self.position = 0
        self.arrived, self.rest = 0, b""  # bytes that have arrived but are not yet read, and their position
        self.late = 0.0  # seconds behind LEAST_SPEED, over all connections

    def readable(self) -> bool:
        """Return True: this file can be read, and so can any position of it."""
        return True

    seekable = readable

    def find_size(self) -> int | None:
        """Return the size in bytes, or None if the server does not report it."""
        if not self.facts:
            self.rest = self.receive()
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
            self.disconnect()
        piece = self.rest or self.receive()
        count = min(len(buffer), len(piece))
        buffer[:count] = piece[:count]
        self.rest = piece[count:]
        self.position += count
        self.arrived = self.position
        return count

    def close(self) -> None:
        """Close the connection too."""
        self.disconnect()
        if self.client:
            self.client.close()
        super().close()

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

    def connect(self) -> None:
        """Request the file from the current position on, and check that it is the same file as before."""
        self.client = self.client or httpx2.Client(headers=HEADERS, timeout=STALL_SECONDS)
        headers = {"Range": f"bytes={self.position}-"} if self.position else {}
        request = self.client.build_request("GET", self.url, headers=headers, extensions={"trace": self.watch})
        for _ in range(MOST_REDIRECTS):
            self.deadline = time.monotonic() + STALL_SECONDS
            self.response = self.client.send(request, stream=True)
            request = self.response.next_request
            if request is None:
                break
            self.response.close()  # unread: a body may be endless
        else:
            raise HttpError("leads from one address to another without end: check the address")
        if self.response.status_code == httpx2.codes.RANGE_NOT_SATISFIABLE:
            raise ChangedError("is shorter than it was before")
        self.response.raise_for_status()
        headers, self.arrived = self.response.headers, 0
        size, validator = headers.get("Content-Length"), headers.get("ETag", headers.get("Last-Modified"))
        if self.response.status_code == httpx2.codes.PARTIAL_CONTENT:
            match = re.fullmatch(r"bytes (\d{1,19})-\d+/(?:(\d{1,19})|\*)", headers.get("Content-Range", ""))
            if not match or int(match[1]) != self.position:
                raise ChangedError("its server sent another range than requested")
            size, self.arrived = match[2], self.position
        elif self.position and self.facts and not self.facts.get("etag"):
            raise ChangedError("was cut off, and its server does not tell whether it is still the same")
        facts = {"size": int(size) if size else None, "etag": validator}
        for name, value in facts.items():
            earlier = self.facts.get(name)
            if None not in (earlier, value) and earlier != value:
                raise ChangedError("has changed in the meantime")
            self.facts[name] = value if earlier is None else earlier
        self.pieces = self.response.iter_raw()

    def disconnect(self) -> None:
        """Drop the current response and the bytes of it that nothing has read yet."""
        if self.response:
            self.response.close()
        self.response, self.pieces, self.rest = None, None, b""

    def receive(self) -> bytes:
        """Return the bytes that arrive next at the current position, with retries; none at the end of the file."""
        delay, start = FIRST_DELAY, time.monotonic()
        while self.facts.get("size") is None or self.position < self.facts["size"]:
            try:
                if self.pieces is None:
                    self.connect()
                self.deadline = time.monotonic() + STALL_SECONDS
                piece = next(self.pieces, b"")
                self.late = max(0.0, self.late + time.monotonic() - start - len(piece) / LEAST_SPEED)
                start = time.monotonic()
                if self.late > self.patience:
                    raise TimeoutError
                skipped = min(self.position - self.arrived, len(piece))
                self.arrived += skipped
                if piece and skipped == len(piece):  # the server has no ranges, and started at the beginning
                    continue
                if piece or (self.facts["size"] is None and self.arrived == self.position):
                    return piece[skipped:]
                reason = f"the connection was cut after {self.position:,} bytes"
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
            self.disconnect()
            if self.late + time.monotonic() + delay - start > self.patience or self.stop.is_set():
                raise HttpError(f"{reason}; gave up")
            logger.warning(f"{self.url}: {reason}; trying again in {delay:g} s")
            self.stop.wait(delay)
            delay = min(2 * delay, LONGEST_DELAY)
        return b""
