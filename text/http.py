"""A download over HTTP that continues where an earlier one stopped, and ends if the server is too slow.

python -c "from text.http import *; asyncio.run(download('https://example.org', Path('page.part')))"
"""

import asyncio
import errno
import json
import logging
import os
import shutil
import urllib.parse
from pathlib import Path

import httpx2
from tqdm import tqdm

from common.console import show_progress
from common.files import read_json

logger = logging.getLogger("http")

STALL_SECONDS = 30.0  # for each piece of an answer
PATIENCE = 60.0  # seconds without a byte, over all attempts, before a download fails; slower than LEAST_SPEED counts
LEAST_SPEED = 1000  # bytes per second
FIRST_DELAY = 0.5  # seconds between the first two attempts
LONGEST_DELAY = 10.0
TEMPORARY_ANSWERS = {408, 425, 429}  # also 500 to 599
MOST_REDIRECTS = 10
KEEP_FREE = 10**9  # bytes of the disk that stay free for other programs
HEADERS = {"User-Agent": "collaborative-training", "Accept-Encoding": "identity"}


class HttpError(Exception):
    """The error of a file that cannot be downloaded; its text is the reason."""


def is_url(source: str) -> bool:
    """Return whether this is an http(s) address, without typing errors in its host and port."""
    try:
        return source.startswith(("http://", "https://")) and urllib.parse.urlsplit(source).port != 0
    except ValueError:
        return False


def check_room(folder: Path, size: int) -> None:
    """Raise the OSError of a full disk if another `size` bytes would leave less than KEEP_FREE."""
    if shutil.disk_usage(folder).free - size < KEEP_FREE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def download(url: str, partial: Path) -> None:
    """Download a URL to the file `partial`, which an earlier process may have begun, or raise an HttpError."""
    delay = FIRST_DELAY
    reason = f"fewer than {LEAST_SPEED:,} bytes a second came"
    try:
        client = httpx2.AsyncClient(headers=HEADERS, timeout=STALL_SECONDS)
    except (httpx2.InvalidURL, ImportError, ValueError) as e:  # SOCKS without its package, or no proxy at all
        raise HttpError(f"{str(e).rstrip('.')}: check the proxy in this shell's environment") from e
    try:
        # httpx's own timeouts restart at each byte
        async with asyncio.timeout(PATIENCE) as limit, client:
            with show_progress(f"fetching {partial.stem}", None) as bar:
                while True:
                    try:
                        return await receive(client, url, partial, limit, bar)
                    except httpx2.HTTPStatusError as e:
                        reason = f"answers {e.response.status_code} {e.response.reason_phrase}"
                        if not e.response.is_server_error and e.response.status_code not in TEMPORARY_ANSWERS:
                            raise HttpError(f"{reason}: check the address") from e
                    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, ValueError) as e:
                        raise HttpError(f"{e}: check the address") from e
                    except httpx2.HTTPError as e:
                        reason = str(e) or type(e).__name__
                        if "CERTIFICATE_VERIFY_FAILED" in reason:
                            raise HttpError(f"{reason}: its certificate or this machine's clock is wrong") from e
                    logger.warning(f"{url}: {reason}; trying again in {delay:g} s")
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, LONGEST_DELAY)
    except TimeoutError as e:
        raise HttpError(f"{reason}; gave up") from e


async def receive(client: httpx2.AsyncClient, url: str, partial: Path, limit: asyncio.Timeout, bar: tqdm) -> None:
    """Make one attempt to receive the rest of a file, and postpone the limit with each piece."""
    facts_file = partial.with_suffix(".part.json")
    facts = read_json(facts_file)
    begin = partial.stat().st_size if facts and partial.exists() else 0
    if begin and begin == facts["size"]:
        return
    headers = {"Range": f"bytes={begin}-"} if begin else {}
    if begin and facts["etag"] and not facts["etag"].startswith("W/"):
        headers["If-Range"] = facts["etag"]  # a file that has changed comes from its beginning
    response = await request(client, url, headers)
    try:
        if response.status_code == httpx2.codes.RANGE_NOT_SATISFIABLE:
            discard(partial)
            raise HttpError("is shorter than it was before: try again")
        response.raise_for_status()
        tag = response.headers.get("ETag", response.headers.get("Last-Modified"))
        if response.status_code == httpx2.codes.PARTIAL_CONTENT:
            place = response.headers.get("Content-Range", "")
            total = f"/{facts['size']}" if begin and facts["size"] else ""
            is_next = place.startswith(f"bytes {begin}-") and place.endswith(total)
            if not begin or tag != facts["etag"] or not is_next:
                discard(partial)
                raise HttpError("has changed in the meantime: try again")
        else:
            length = response.headers.get("Content-Length")
            begin = 0
            facts = {"size": int(length) if length else None, "etag": tag}
            facts_file.write_text(json.dumps(facts))
        bar.total = facts["size"]
        bar.n = begin
        with open(partial, "ab" if begin else "wb") as file:
            async for piece in response.aiter_raw():
                check_room(partial.parent, len(piece))
                file.write(piece)
                file.flush()  # keeps the bytes if this process is killed
                bar.update(len(piece))
                soon = asyncio.get_running_loop().time() + PATIENCE
                limit.reschedule(min(limit.when() + len(piece) / LEAST_SPEED, soon))
            if facts["size"] not in (None, file.tell()):
                raise httpx2.RemoteProtocolError(f"the connection was cut after {file.tell():,} bytes")
    except OSError:
        if facts["size"] is None:  # the file may be endless
            discard(partial)
        raise
    finally:
        await response.aclose()


async def request(client: httpx2.AsyncClient, url: str, headers: dict[str, str]) -> httpx2.Response:
    """Return the response, whose body is not read yet, after redirects."""
    following = client.build_request("GET", url, headers=headers)
    for _ in range(MOST_REDIRECTS):
        response = await client.send(following, stream=True)
        if response.next_request is None:
            return response
        following = response.next_request
        await response.aclose()  # unread: a body may be endless
    raise HttpError("leads from one address to another without end: check the address")


def discard(partial: Path) -> None:
    """Remove an unfinished download and its facts; the name may have any suffix."""
    for suffix in (".part", ".part.json"):
        partial.with_suffix(suffix).unlink(missing_ok=True)
