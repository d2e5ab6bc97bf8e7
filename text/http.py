"""Files on web servers, readable from any position, with retries if a connection is cut, refused or silent.

python -c "from text.http import HttpFile; print(HttpFile('https://example.org', patience=60).read(100))"
"""

import http.client
import io
import logging
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

logger = logging.getLogger("http")

STALL_SECONDS = 30.0  # without a byte on one connection; also the maximum delay of a slow one, see PacedReader
LEAST_SPEED = 1000  # bytes per second; a slower server counts as stalled
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds between two attempts
TEMPORARY_ANSWERS = {408, 425, 429}  # also 500 to 599


class HttpError(Exception):
    """The error of a file that cannot be read; its text is the reason."""


class ChangedError(HttpError):
    """The error of a file that has changed since an earlier request."""


def is_strong(etag: str | None) -> bool:
    """Return whether an ETag identifies the exact bytes; a weak one (W/) only means similar content."""
    return bool(etag) and not etag.startswith("W/")


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def still_late(late: float, since: float, count: int) -> float:
    """Update a transfer's delay in seconds, relative to LEAST_SPEED, by `count` bytes since the time `since`."""
    return max(0.0, late + time.monotonic() - since - count / LEAST_SPEED)


class PacedReader(socket.SocketIO):
    """A socket stream whose timeout is STALL_SECONDS of total delay; a socket's own timeout restarts at each byte."""

    late, most = 0.0, 2**17  # most: bytes of headers, and of interim responses before them

    def readinto(self, buffer) -> int:
        start = time.monotonic()
        count = super().readinto(buffer)
        self.late = still_late(self.late, start, count)
        self.most -= count
        if self.late > STALL_SECONDS:
            raise TimeoutError(f"fewer than {LEAST_SPEED:,} bytes a second came")
        if self.most < 0:
            raise HttpError("its answer has headers without end: check the address")
        return count


class PacedResponse(http.client.HTTPResponse):
    """A response that is read by a PacedReader."""

    def begin(self) -> None:
        self.fp.raw.__class__ = PacedReader  # http.client creates the reader, and accepts no other one
        super().begin()
        self.fp.raw.most = float("inf")


class PacedHandler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler, urllib.request.HTTPRedirectHandler):
    """A handler of PacedResponses that follows redirects to http(s) addresses only."""

    def do_open(self, connection: type, request: urllib.request.Request, **options):
        return super().do_open(type("Paced", (connection,), {"response_class": PacedResponse}), request, **options)

    def redirect_request(self, request, response, code, reason, headers, url):
        response.close()  # urllib would read the whole body, which may be endless
        if not is_url(url):
            raise HttpError(f"leads to {url}, which is not an http(s) address: check the address")
        return super().redirect_request(request, response, code, reason, headers, url)


class HttpFile(io.RawIOBase):
    """A file on a web server. A read returns the bytes that have arrived, without a wait for more.

    :param patience: the seconds without a byte, over all attempts, before a read fails; slower than LEAST_SPEED counts
    :param stop: an event that ends the wait between two attempts
    :param facts: the attribute `facts` of an earlier HttpFile; the file must be the same as then
    :param is_one: whether all bytes must be of one file, so that an unverifiable restart is a ChangedError
    :ivar facts: size (None: unknown) and, if reported, etag and last_modified; empty before the first response
    """

    def __init__(
        self,
        url: str,
        patience: float,
        stop: threading.Event | None = None,
        facts: dict[str, int | str] | None = None,
        is_one: bool = False,
    ):
        self.url, self.patience, self.stop, self.facts = url, patience, stop or threading.Event(), facts or {}
        self.is_one = is_one
        self.response, self.arrived = None, 0  # arrived: the response's position in the file
        self.position, self.late = 0, 0.0  # late: over all connections

    def readable(self) -> bool:
        return True

    seekable = readable

    def tell(self) -> int:
        return self.position

    def find_size(self) -> int | None:
        """Return the size in bytes, or None if the server does not report it."""
        if not self.facts:
            self.retry(lambda: b" ")
        return self.facts["size"]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self.find_size() is None:
            raise io.UnsupportedOperation(f"{self.url}: its server does not report its size")
        self.position = offset + {io.SEEK_CUR: self.position, io.SEEK_END: self.facts.get("size")}.get(whence, 0)
        return self.position

    def readinto(self, buffer) -> int:
        if self.facts and self.facts["size"] is not None and self.position >= self.facts["size"]:
            return 0
        if self.arrived != self.position:
            self.disconnect()
        piece = self.retry(lambda: self.response.read1(len(buffer)))
        buffer[: len(piece)] = piece
        self.position += len(piece)
        self.arrived = self.position
        return len(piece)

    def close(self) -> None:
        self.disconnect()
        super().close()

    def connect(self) -> None:
        """Open a connection, and skip to the current position if the server starts at the beginning."""
        request = urllib.request.Request(self.url, headers={"User-Agent": "collaborative-training"})
        if self.position:
            request.add_header("Range", f"bytes={self.position}-")
            etag = self.facts.get("etag")
            if validator := etag if is_strong(etag) else self.facts.get("last_modified"):
                request.add_header("If-Range", validator)
        self.response = urllib.request.build_opener(PacedHandler).open(request, timeout=STALL_SECONDS)
        headers = self.response.headers
        told = {"etag": headers["ETag"], "last_modified": headers["Last-Modified"]}
        if self.response.status == http.client.PARTIAL_CONTENT:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers["Content-Range"] or "")
            if not match or int(match[1]) != self.position:
                raise ChangedError("its server sent another range than requested")
            told["size"], self.arrived = None if match[2] == "*" else int(match[2]), self.position
        else:  # from the beginning: the first request, a server without ranges, or a changed file
            told["size"], self.arrived = int(headers["Content-Length"]) if headers["Content-Length"] else None, 0
            if self.is_one and self.position and not self.facts.keys() & {"etag", "last_modified"}:
                raise ChangedError("was cut off, and its server does not tell whether it is still the same")
        if is_strong(told["etag"]) and is_strong(self.facts.get("etag")):
            told["last_modified"] = None  # the machines of a CDN may disagree on it
        # a server may omit values that it has reported before
        told = {name: value for name, value in told.items() if value is not None}
        if any(self.facts.get(name) not in (None, value) for name, value in told.items()):
            raise ChangedError("has changed in the meantime")
        self.facts = {"size": None, **self.facts, **told}
        while self.arrived < self.position:
            piece = self.response.read(min(self.position - self.arrived, 2**20))
            if not piece:
                raise ConnectionError("the connection was cut")
            self.arrived += len(piece)

    def disconnect(self) -> None:
        if self.response:
            self.response.close()
        self.response = None

    def retry(self, read: Callable[[], bytes]) -> bytes:
        """Call `read` on a connection, with retries; return its bytes, which are empty only at the end of the file.

        :raises HttpError: the file cannot be read, or has changed (ChangedError)
        """
        delay, start = FIRST_DELAY, time.monotonic()
        while True:
            try:
                if self.response is None:
                    self.connect()
                piece = read()
                if piece or self.facts["size"] in (None, self.position):
                    self.late = still_late(self.late, start, len(piece))
                    return piece
                reason = f"the connection was cut after {self.position:,} of {self.facts['size']:,} bytes"
            except urllib.error.HTTPError as e:
                if e.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise ChangedError("is shorter than it was before") from e
                reason = f"answers {e.code} {e.reason}"
                if e.code < 500 and e.code not in TEMPORARY_ANSWERS:
                    raise HttpError(f"{reason}: check the address") from e
            except (OSError, http.client.HTTPException, ValueError) as e:
                why = getattr(e, "reason", e)
                reason = str(getattr(why, "strerror", None) or why or type(why).__name__)
                if isinstance(e, (ValueError, http.client.InvalidURL)):
                    raise HttpError(f"{reason}: check the address") from e
                if isinstance(why, ssl.SSLCertVerificationError):
                    raise HttpError(f"{reason}: its certificate or this machine's clock is wrong") from e
            self.disconnect()
            if self.late + time.monotonic() + delay - start > self.patience or self.stop.is_set():
                raise HttpError(f"{reason}; gave up")
            logger.warning(f"{self.url}: {reason}; trying again in {delay:g} s")
            self.stop.wait(delay)
            delay = min(2 * delay, LONGEST_DELAY)
