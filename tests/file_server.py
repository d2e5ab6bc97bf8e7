"""Web servers on loopback: one serves a folder, with the faults of real ones, and counts what it sends; another sends
any bytes."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class LocalServer(ThreadingHTTPServer):
    def __init__(self, handler: type[BaseHTTPRequestHandler]):
        super().__init__(("127.0.0.1", 0), handler)
        self.url, self.left = f"http://127.0.0.1:{self.server_port}", threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.left.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass


class FileServer(LocalServer):
    """Serves the files of a folder. Faults are attributes; set them at any time.

    :ivar sent: (path, bytes of the body) of each answer
    """

    def __init__(self, folder: Path):
        super().__init__(FileHandler)
        self.folder = folder
        self.has_ranges = self.has_length = True
        self.validator = "ETag"  # or Last-Modified, or None
        self.version = "1"  # goes into the ETag
        self.answers: dict[str, list[int]] = {}  # status codes of a path's next answers; the last one stays
        self.cuts: dict[str, list[int]] = {}  # a path's next answers end after this number of bytes
        self.is_stalling = False  # instead of a cut connection, one on which nothing more comes
        self.chunk_delay = 0.0  # seconds before each 64 KB
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.sent: list[list] = []

    def count(self, name: str) -> int:
        return sum(count for path, count in self.sent if path == f"/{name}")


class FileHandler(Handler):
    def do_HEAD(self):
        path, codes = self.server.folder / self.path.lstrip("/"), self.server.answers.get(self.path, [])
        self.send_response(404 if not path.is_file() else 503 if codes[:1] == [503] else 200)
        self.send_header("Content-Length", str(path.stat().st_size if path.is_file() else 0))
        self.end_headers()

    def do_GET(self):
        owner, path, self.close_connection = self.server, self.server.folder / self.path.lstrip("/"), True
        owner.requests.append((self.path, self.headers["Range"]))
        codes = owner.answers.get(self.path, [])
        code = (codes.pop(0) if len(codes) > 1 else codes[0]) if codes else 200
        if code != 200 or not path.is_file():
            return self.send_error(code if code != 200 else 404)
        body, start = path.read_bytes(), 0
        versions = {"ETag": f'"{owner.version}"', "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if match and owner.has_ranges and self.headers["If-Range"] in (None, versions.get(owner.validator)):
            start, whole = int(match[1]), len(body)
            if start >= whole:
                return self.send_error(416)
            body = body[: int(match[2]) + 1] if match[2] else body
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{whole}")
        else:
            self.send_response(200)
        if owner.validator:
            self.send_header(owner.validator, versions[owner.validator])
        if owner.has_length:
            self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Connection", "close")
        self.end_headers()
        cuts = owner.cuts.get(self.path, [])
        end = min(len(body), start + cuts.pop(0)) if cuts else len(body)
        owner.sent.append(entry := [self.path, 0])
        for position in range(start, end, 65_536):
            time.sleep(owner.chunk_delay)
            try:
                self.wfile.write(body[position : min(end, position + 65_536)])
            except OSError:  # the client has gone
                return
            entry[1] += min(end, position + 65_536) - position
        if end < len(body) and owner.is_stalling:
            owner.left.wait()


@contextlib.contextmanager
def serve(*answers: Callable[[bytes], Iterator[bytes]]) -> Iterator[str]:
    """Yield the address of a server that answers by these functions in turn, and then by the last one.

    Each takes the request, and yields the bytes of the answer.
    """
    left, ended = list(answers), threading.Event()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            request = connection.recv(65_536)
            while request.startswith(b"GET") and b"\r\n\r\n" not in request:
                request += connection.recv(65_536)
            for piece in (left.pop(0) if len(left) > 1 else left[0])(request):
                connection.sendall(piece)
                if ended.is_set():
                    return

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        ended.set()
        server.shutdown(socket.SHUT_RDWR)


def send(*pieces: bytes) -> Callable:
    return lambda request: iter(pieces)


def drip(*pieces: bytes, pause: float = 0.1, last: bytes = b"x") -> Callable:
    """Send these pieces, and then the last one after each pause without end."""

    def answer(request: bytes) -> Iterator[bytes]:
        yield from pieces
        while True:
            time.sleep(pause)
            yield last

    return answer


def flood(*pieces: bytes) -> Callable:
    """Send these pieces, and repeat the last one without end."""
    return drip(*pieces, pause=0.0, last=pieces[-1])
