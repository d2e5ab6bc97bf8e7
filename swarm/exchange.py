"""Blobs and messages between the peers of a run, on hivemind's transport without its averagers and matchmaking.

A blob is a list of blocks. Its id is the SHA-256 of its block hashes, so any peer can serve it, and each block is
checked when it arrives. Each peer fetches all blobs of a round, and serves blocks as soon as it has them:

- A block comes from the owner of its blob, or from a relay: another peer that fetches the same blob. All peers choose
  the same source, by the uplinks (`plan_loads`, `choose_source`). So a slow owner sends each block once, to the relay.
- A source has to send in time, which follows from the bytes and the uplinks. If it fails, the missing blocks come from
  the owner, and then from the other holders. From then on, this source is the last choice for blobs of this owner, but
  not for other blobs: a malicious owner must not discredit relays.
- A client accepts no connections, but serves its blobs over those that it has opened: by a message to each holder.

A stream is a request and its answer: the blob's id, a count, and numbers of blocks; then the hashes and these blocks,
each after a header (number, bytes). It is raw: hivemind's streams hold as much memory as the other side claims. So what
a peer costs is bounded: one block and one piece for each stream, and `_admit` limits streams and messages.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import math
import struct
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind import DHT
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm import SwarmError

REQUEST = struct.Struct("<32sI")
HEADER = struct.Struct("<iI")
HASH_BYTES = 32  # of a block
HASHES = -1  # the number of the hashes in a header, in which blocks have theirs
PIECE = 2**13  # bytes that are sent at once: at 1 Mbit/s, a vote waits for 65 ms behind one piece

# Limits of a participant: at once, and in PERIOD seconds. All other peers together have the same limits. The third
# number divides them for each single one of these peers, so that it cannot take all.
PERIOD = 60.0
MAX_REQUESTS = (64, 500, 4)
MAX_MESSAGES = (8, 2000, 8)
MAX_COPIES = 64  # of whole blobs, for each peer in an epoch or a period: 16 updates, and more if requests repeat
MAX_MESSAGE_BYTES = 2**17
MIN_MBITS = 0.5  # of a peer, as far as its claim counts; a slower source fails
MAX_MBITS = 1000.0

MIN_STALL = 2.5  # seconds in which a source has to begin; each block adds its time
MAX_STALL = 120.0
RETRY_PAUSE = 1.0  # seconds until all holders are tried again
REQUEST_TIMEOUT = 10.0  # seconds for the request of a stream
KNOWN_BLOBS = 256  # blobs whose hashes stay in memory: the log asks for those of an epoch at each message
UNKNOWN_BLOB_TIMEOUT = 2.0  # seconds; others may have heard of a blob before this peer
UNKNOWN_BLOB_PAUSE = 0.2  # seconds between two looks for such a blob
EXCLUSION = 600.0  # seconds for which a source that has failed is the last choice
FETCH_TIMEOUT = 300.0  # seconds, for each requested block, or a whole blob; to a blob's, its time at MIN_MBITS is added
START_TIMEOUT = 60.0  # seconds
STOP_TIMEOUT = 2.0  # seconds

PEER_ERRORS = (P2PDaemonError, P2PHandlerError, OSError, EOFError, ValueError)  # of a peer or of the network


class BlobStore:
    """Blobs of one format on disk: a file for each block, named by the number for which it was checked and its SHA-256,
    and one for the hashes of each blob. Blobs of an earlier process are kept. The class is thread-safe.

    :param folder: a folder for this store only
    :param max_bytes: the limit of all files together; above it, the oldest ones are deleted
    :param num_blocks: the number of blocks of each blob, and the bytes of each one at most
    :param check: raises a ValueError if a downloaded block, given its number, is invalid; runs in a thread
    """

    def __init__(self, folder: str | Path, max_bytes: int, num_blocks: int, max_block: int, check: Callable):
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.num_blocks = num_blocks
        self.max_block = max_block
        self.check = check
        self.changed_at = 0.0  # in time.monotonic()
        self._lock = threading.Lock()
        self.list_hashes = functools.lru_cache(KNOWN_BLOBS)(self._read_hashes)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room()

    def add(self, blocks: Iterable[bytes]) -> bytes:
        """Store a blob and return its id."""
        return self.put(b"".join(self.put(block, number) for number, block in enumerate(blocks)))

    def put(self, data: bytes, number: int = HASHES) -> bytes:
        """Store a block, or the joined hashes of a blob, and return its SHA-256."""
        name = hashlib.sha256(data).digest()
        with self._lock:
            unfinished = self.folder / "unfinished"
            unfinished.write_bytes(data)
            unfinished.rename(self.folder / f"{number} {name.hex()}")
            self.changed_at = time.monotonic()
            self._bytes += len(data)
            self._names.add(f"{number} {name.hex()}")
            if self._bytes > self.max_bytes:
                self._make_room()
        return name

    def _make_room(self) -> None:
        stats = {path: path.stat() for path in self.folder.iterdir()}
        self._bytes = sum(stat.st_size for stat in stats.values())
        for path in sorted(stats, key=lambda path: stats[path].st_mtime_ns):
            if self._bytes <= 0.9 * self.max_bytes:
                break
            self._bytes -= stats.pop(path).st_size
            path.unlink()
        self._names = {path.name for path in stats}

    def get(self, name: bytes, number: int = HASHES) -> bytes:
        """Return the data with this SHA-256, or raise a KeyError if it is not here, damaged or unreadable."""
        with self._lock:
            path = self.folder / f"{number} {name.hex()}"
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                if hashlib.sha256(data).digest() == name:
                    return data
                path.unlink()
            self._names.discard(path.name)
        raise KeyError(path.name)

    def has_file(self, name: bytes, number: int = HASHES) -> bool:
        """Return whether the data with this SHA-256 is here."""
        return f"{number} {name.hex()}" in self._names  # the log asks for hundreds of blocks at each message

    def has(self, blob: bytes) -> bool:
        """Return whether all blocks of a blob are here."""
        with contextlib.suppress(KeyError):  # damaged, or just deleted
            return self.has_file(blob) and all(map(self.has_file, self.list_hashes(blob), range(self.num_blocks)))
        return False

    def _read_hashes(self, blob: bytes) -> list[bytes]:
        """Return the hashes of a blob's blocks, or raise a KeyError."""
        hashes = self.get(blob)
        if len(hashes) != HASH_BYTES * self.num_blocks:
            raise KeyError(blob.hex())
        return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]

    def open(self, blob: bytes) -> "StoredBlob":
        """Return the blocks of a blob, which are read when they are needed, or raise a KeyError."""
        return StoredBlob(self, self.list_hashes(blob))


class StoredBlob:
    """A sequence of the blocks of a blob on disk. Reading one raises a KeyError if it is not there."""

    def __init__(self, store: BlobStore, names: list[bytes]):
        self.store = store
        self.names = names

    def __getitem__(self, index: int) -> bytes:
        return self.store.get(self.names[index], index)


def plan_loads(uplinks: Mapping[PeerID, float], num_bytes: int, seconds: float) -> dict[PeerID, float]:
    """Return how many copies of a blob each holder should send, so that each holder gets the blobs of all others.

    All uplinks keep the same Mbit/s free, as many as possible: fast peers send first. If this takes longer than
    `seconds`, all peers send in proportion to their uplinks, which is the fastest way.

    :param uplinks: the Mbit/s of the peers that accept connections
    """
    rates = {peer: min(max(uplinks[peer], MIN_MBITS), MAX_MBITS) for peer in sorted(uplinks, key=PeerID.to_bytes)}
    copies = len(rates) * max(1, len(rates) - 1)
    needed = 8e-6 * num_bytes * copies / seconds if seconds else math.inf  # Mbit/s
    sums = itertools.accumulate(sorted(rates.values(), reverse=True))
    level = max([0.0, *((total - needed) / count for count, total in enumerate(sums, 1))])
    spare = {peer: max(0.0, rate - level) for peer, rate in rates.items()}
    return {peer: copies * rate / sum(spare.values()) for peer, rate in spare.items()}


def choose_source(owner: PeerID, position: float, loads: Mapping[PeerID, float]) -> PeerID:
    """Return the holder from which all others fetch a block: its owner, or a relay, which fetches it from the owner.

    An owner that should send more copies than its own blob needs is a relay for the others.

    :param position: of the block in its blob, from 0 to 1; the owner serves the first ones itself
    :param loads: see `plan_loads`
    """
    relayed = max(1, len(loads) - 2)  # an owner that serves a share f itself sends 1 + f (n - 2) copies
    direct = {peer: min(1.0, max(0.0, (load - 1) / relayed)) for peer, load in loads.items()}
    own = direct.pop(owner, 0.0)
    if position < own:
        return owner
    spare = {peer: max(0.0, loads[peer] - 1 - relayed * direct[peer]) for peer in direct}
    spare = spare if any(spare.values()) else {peer: loads[peer] for peer in direct}
    place = (position - own) / (1 - own) * sum(spare.values())
    sums = itertools.accumulate(spare.values())
    return next((peer for peer, end in zip(spare, sums, strict=True) if place < end), owner)


class InvalidBlobError(Exception):
    """The error that the blocks of a blob match their hashes, but are invalid: its owner has made them."""


class Download:
    """A blob on its way to this peer."""

    def __init__(self, blob: bytes, owner: PeerID, num_bytes: int, store: BlobStore, voters=frozenset()):
        self.blob = blob
        self.owner = owner
        self.store = store
        self.voters: frozenset[PeerID] = voters  # which have the blob, and come first
        self.num_bytes = min(num_bytes, store.num_blocks * store.max_block)
        self.missing = set(range(store.num_blocks))
        #: the Mbit/s of each holder, and the copies of a blob that it should send
        self.uplinks: dict[PeerID, float] = {}
        self.loads: dict[PeerID, float] = {}
        self.clients: set[PeerID] = set()  # which serve a block only if no holder does
        self.arrival = asyncio.Event()  # set when a block arrives, and then replaced

    def list_sources(self, number: int, own_id: PeerID) -> list[PeerID]:
        """Return the peers from which this one may fetch a block, the best one first. Two clients cannot connect."""
        rank = sum(peer.to_bytes() < self.owner.to_bytes() for peer in self.uplinks)
        # over all blobs of a round, the positions are spread evenly
        position = (number + (rank + 0.5) / (len(self.uplinks) + 1)) / self.store.num_blocks
        others = sorted(self.uplinks, key=lambda peer: hash((id(self), peer)))  # for all blocks, to need few streams
        sources = *self.voters, choose_source(self.owner, position, self.loads), self.owner, *others, *self.clients
        return [it for it in dict.fromkeys(sources) if it != own_id and (own_id in self.uplinks or it in self.uplinks)]

    def compute_timeout(self, source: PeerID) -> float:
        """Return the seconds in which a source must begin: twice the time to send all copies from it and the owner."""
        peers = ({source} if source in self.voters else {source, self.owner}) & self.uplinks.keys()
        loads = (max(1.0, self.loads[peer]) / max(self.uplinks[peer], MIN_MBITS) for peer in peers)
        return min(MIN_STALL + 2 * 8e-6 * self.num_bytes * sum(loads), MAX_STALL)

    def find_least_mbits(self, source: PeerID) -> float:
        """Return the Mbit/s below which a source fails. A relay fails if its owner could send four times as fast."""
        claims = [self.uplinks.get(peer, 0.0) for peer in (source, self.owner)]
        others = max(1, len(self.uplinks) + len(self.clients) - 1)  # to which the owner would send
        return max(MIN_MBITS, min(claims) / (4 * others)) if source != self.owner else MIN_MBITS


class Exchange:
    """A thread that fetches and serves blobs, and carries messages, at the uplink's pace.

    :param dht: this peer's DHT, with its `uplink`
    :param prefix: the run's name
    :param on_message: returns the answer to a message, given its sender; called in a thread, one at a time
    :param stores: the stores of all formats, of blobs with the same number of blocks
    """

    def __init__(self, dht: DHT, prefix: str, on_message: Callable[[PeerID, bytes], bytes], *stores: BlobStore):
        self.stores = stores
        self.num_blocks = stores[0].num_blocks
        self.on_message = on_message
        self.uplink = dht.uplink
        self.peer_id = dht.peer_id
        #: the peers of the log, whose requests come before those of all other peers; set by the caller
        self.participants: frozenset[PeerID] = frozenset()
        #: those whose messages and blocks do not wait for background data; set by the caller
        self.urgent: frozenset[PeerID] = frozenset()
        self._message_name = f"{prefix}::Exchange.message"
        self._fetch_name = f"{prefix}::Exchange.fetch"
        self._downloads: dict[bytes, Download] = {}
        self._excluded: dict[tuple[PeerID, PeerID], float] = {}  # until this time, by owner and source
        self._active = Counter()
        self._counts = Counter()
        self._strangers: list[asyncio.Task] = []  # the requests of untrusted peers, the oldest first
        self._period_end = 0.0
        self._locks = weakref.WeakValueDictionary()  # by peer
        # messages and blocks do not wait for each other
        self._message_worker, self._block_worker = (ThreadPoolExecutor(1, f"exchange {it}") for it in ("log", "blocks"))
        started = Future()
        # not dht.replicate_p2p: an averager that this process forks would replace that object, and unlink its socket
        main = self._run(dht.run_coroutine(DHT._get_p2p_daemon_listen_maddr), started)
        self._thread = threading.Thread(target=asyncio.run, args=(main,), name="exchange", daemon=True)
        self._thread.start()
        started.result(START_TIMEOUT)

    async def _run(self, daemon: Multiaddr, started: Future) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        try:
            self._p2p = await P2P.replicate(daemon)
            await self._p2p.add_protobuf_handler(self._message_name, self._serve_message, BytesValue)
            await self._p2p.add_binary_stream_handler(self._fetch_name, self._serve)
        except Exception as e:
            started.set_exception(e)
            return
        started.set_result(None)
        await self._stopped.wait()
        with contextlib.suppress(*PEER_ERRORS):  # the DHT may have ended before
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._p2p.remove_protobuf_handler(self._message_name)
                await self._p2p.remove_binary_stream_handler(self._fetch_name)
        await self._p2p.shutdown()

    def shutdown(self) -> None:
        """Stop the threads, and cancel the futures of all calls."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._message_worker.shutdown()
        self._block_worker.shutdown()

    @contextlib.contextmanager
    def _admit(self, act: str, peer: PeerID, at_once: int, in_period: int, share: int) -> Iterator[None]:
        """Let a peer act, or raise a ValueError if it has too many acts at once or in this period."""
        if time.monotonic() > self._period_end:
            self._period_end = time.monotonic() + PERIOD
            self._counts.clear()
        limits = (self._active, at_once), (self._counts, in_period)
        if any(self._is_over(counts, act, peer, most, share) for counts, most in limits):
            raise ValueError("too many requests")
        names = [(act, peer)] if peer in self.participants else [(act, peer), (act, None)]
        self._active.update(names)
        self._counts.update(names)
        try:
            yield
        finally:
            self._active.subtract(names)
            self._active = +self._active  # without zeros

    def _is_over(self, counts: Counter, act: str, peer: PeerID, most: int, share: int) -> bool:
        """Return whether a peer has too many acts, or all untrusted ones have too many together. One that had less than
        its share of these may go on: new keys cost nothing."""
        own = counts[act, peer]
        total = counts[act, None]
        if peer in self.participants:
            return own >= most
        if own >= most / share:
            return True
        if total < most:
            return False
        strangers = sum(kind == act and it not in self.participants for kind, it in counts) - 1  # without None
        # a message takes milliseconds; for a request, the oldest one ends, see `_make_room`
        return own * strangers >= most or counts is self._active and act == "message" and total >= 2 * most

    def _make_room(self) -> None:
        """End the oldest request of an untrusted peer if this one, which is running, exceeds their places. If it were
        refused, an attacker's keys could hold all places, with updates that never arrive here."""
        self._strangers = [task for task in self._strangers if not task.done()]
        if len(self._strangers) >= 2 * MAX_REQUESTS[0]:
            self._strangers.pop(0).cancel()
        self._strangers.append(asyncio.current_task())

    # --- messages

    def send(self, peer: PeerID, message: bytes) -> Future[bytes]:
        """Send a message of up to MAX_MESSAGE_BYTES, and return the future of its answer."""
        return asyncio.run_coroutine_threadsafe(self._send(peer, message), self._loop)

    async def _pace_message(self, peer: PeerID, size: int) -> None:
        """Let a message to a voter or an initial peer go at once; data waits for it. All others wait for their turn, as
        long as a caller does: new keys with short questions would otherwise delay all updates."""
        if peer in self.urgent:
            self.uplink.reserve(size, is_urgent=True)
        else:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                await self.uplink.pace(size, is_urgent=False)

    async def _send(self, peer: PeerID, message: bytes) -> bytes:
        await self._pace_message(peer, len(message))
        timeout = self.uplink.timeouts.request + self.uplink.compute_transfer_timeout(len(message))
        call = self._p2p.call_protobuf_handler(peer, self._message_name, BytesValue(value=message), BytesValue)
        answer = (await asyncio.wait_for(call, timeout)).value
        if len(answer) > MAX_MESSAGE_BYTES:
            raise ValueError(f"peer {peer} has sent an answer of {len(answer)} bytes")
        return answer

    async def _serve_message(self, request: BytesValue, context: P2PContext) -> BytesValue:
        sender = context.remote_id
        if len(request.value) > MAX_MESSAGE_BYTES:
            raise ValueError("the message is too large")
        with self._admit("answer", sender, *MAX_MESSAGES):  # it may wait for the uplink, and keeps no place meanwhile
            with self._admit("message", sender, *MAX_MESSAGES):
                answer = await self._loop.run_in_executor(self._message_worker, self.on_message, sender, request.value)
            await self._pace_message(sender, len(answer))
            return BytesValue(value=answer)

    # --- serving

    async def _serve(self, info, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request, and send its answer; then close the stream."""
        writer.transport.set_write_buffer_limits(0)  # at the end, nothing waits to be sent
        # asyncio logs a traceback for a handler that is cancelled at the shutdown
        errors = contextlib.suppress(*PEER_ERRORS, LookupError, asyncio.CancelledError)
        try:
            with errors, self._admit("request", info.peer_id, *MAX_REQUESTS):
                if info.peer_id not in self.participants:
                    self._make_room()
                async with asyncio.timeout(REQUEST_TIMEOUT):
                    blob, count = REQUEST.unpack(await reader.readexactly(REQUEST.size))
                    if not 0 < count <= self.num_blocks:
                        raise ValueError("no blocks requested, or too many")
                    numbers = set(struct.unpack(f"<{count}I", await reader.readexactly(4 * count)))
                    if len(numbers) < count:
                        raise ValueError("the same block requested twice")
                closing = asyncio.create_task(reader.read(1))  # until the caller closes the stream (note 87)
                serving = asyncio.create_task(self._serve_blocks(info.peer_id, blob, numbers, writer))
                closing.add_done_callback(lambda _: serving.cancel())  # it may wait long for a block, or the uplink
                async with asyncio.timeout(FETCH_TIMEOUT * count):
                    await serving
                    if not numbers:
                        await closing
        finally:
            writer.transport.abort()  # `close` would wait for a side that does not read; this ends `closing`

    async def _serve_blocks(self, peer: PeerID, blob: bytes, numbers: set[int], writer: asyncio.StreamWriter) -> None:
        """Send these blocks of a blob, the hashes first, each as soon as it is here, and remove them from `numbers`."""
        hashes = []
        unknown_at = time.monotonic() + UNKNOWN_BLOB_TIMEOUT
        lock = self._locks.setdefault(peer, asyncio.Lock())  # so each peer gets the same share of the uplink
        most = MAX_COPIES * self.num_blocks * max(1.0, PERIOD / max(0.5, self.uplink.timeouts.epoch_seconds or PERIOD))
        while numbers:
            if not hashes and (store := self._find_store(blob)):
                hashes = store.list_hashes(blob)
                async with lock:
                    await self._send_block(peer, HASHES, b"".join(hashes), writer)
            ready = {n: it for n in numbers if n < len(hashes) and (it := self._find_store(hashes[n], n))}
            for number in sorted(ready):
                self._counts["block", peer] += 1
                if self._counts["block", peer] > most:
                    raise ValueError("too many copies requested")
                async with lock:
                    await self._send_block(peer, number, ready[number].get(hashes[number], number), writer)
            if ready:
                numbers.difference_update(ready)  # others may have come meanwhile
            elif blob in self._downloads:
                await self._downloads[blob].arrival.wait()
            elif peer not in self.participants or time.monotonic() > unknown_at:
                return
            else:
                await asyncio.sleep(UNKNOWN_BLOB_PAUSE)

    def _find_store(self, name: bytes, number: int = HASHES) -> BlobStore | None:
        return next((it for it in self.stores if it.has_file(name, number)), None)

    async def _send_block(self, peer: PeerID, number: int, data: bytes, writer: asyncio.StreamWriter) -> None:
        data = HEADER.pack(number, len(data)) + data
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            await self.uplink.pace(len(piece), is_urgent=peer in self.urgent)
            writer.write(piece)
            await writer.drain()

    # --- fetching

    def fetch(
        self, blob: bytes, owner: PeerID, holders: Mapping, num_bytes: int, store: BlobStore, seconds=0.0, voters=()
    ) -> Future[None]:
        """Fetch a blob into a store. The future fails with an InvalidBlobError if its owner has made an invalid one,
        with a SwarmError if the disk is full, and with a TimeoutError if no holder has the whole blob in time.

        :param holders: the Mbit/s of all peers that accept connections and fetch or hold this blob, with this peer and
            the owner if they do; None for clients. Another call for the same blob adds more
        :param num_bytes: the sum of the blocks' sizes
        :param seconds: the time that the exchange of all blobs may take; with more time, slow uplinks send less
        :param voters: peers that have the whole blob; with new ones, a running download starts again
        """
        fetching = self._fetch(blob, owner, holders, num_bytes, store, seconds, frozenset(voters))
        return asyncio.run_coroutine_threadsafe(fetching, self._loop)

    async def _fetch(self, blob, owner, holders, num_bytes, store, seconds, voters) -> None:
        if store.has(blob):
            return
        download = before = self._downloads.get(blob)
        if not before or not voters <= before.voters:
            download = self._downloads[blob] = Download(blob, owner, num_bytes, store, voters)
            if before:
                before.task.cancel()
                download.missing = before.missing
            download.task = asyncio.create_task(self._download(download))
        download.uplinks |= {peer: mbits for peer, mbits in holders.items() if mbits is not None}
        download.clients |= holders.keys() - download.uplinks.keys()
        download.loads = plan_loads(download.uplinks, download.num_bytes, seconds)
        await asyncio.shield(download.task)

    def keep(self, blobs: frozenset[bytes], store: BlobStore) -> None:
        """Cancel the downloads of all other blobs into this store."""
        asyncio.run_coroutine_threadsafe(self._keep(blobs, store), self._loop)

    async def _keep(self, blobs, store) -> None:  # like `_fetch`, a coroutine, because they must run in their order
        for download in [it for it in self._downloads.values() if it.store is store and it.blob not in blobs]:
            del self._downloads[download.blob]
            download.task.cancel()

    async def _download(self, download: Download) -> None:
        try:
            async with asyncio.timeout(FETCH_TIMEOUT + 8e-6 * download.num_bytes / MIN_MBITS):
                while download.missing:
                    async with asyncio.TaskGroup() as tasks:
                        self._start_fetching(tasks, download, download.missing, frozenset())
                    await asyncio.sleep(RETRY_PAUSE if download.missing else 0)
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        finally:
            if self._downloads.get(download.blob) is download:  # otherwise it was cancelled
                del self._downloads[download.blob]
            download.arrival.set()

    def _start_fetching(self, tasks: asyncio.TaskGroup, download: Download, numbers: Iterable[int], tried) -> None:
        """Fetch each block from its best source that has not been tried."""
        groups = defaultdict(list)
        self._excluded = {key: end for key, end in self._excluded.items() if end > time.monotonic()}
        for number in numbers:
            if sources := [peer for peer in download.list_sources(number, self.peer_id) if peer not in tried]:
                groups[min(sources, key=lambda peer: (download.owner, peer) in self._excluded)].append(number)
        for peer, group in groups.items():
            tasks.create_task(self._fetch_from(tasks, download, peer, group, tried | {peer}))

    async def _fetch_from(self, tasks, download: Download, peer: PeerID, numbers: list[int], tried) -> None:
        """Fetch these blocks from a peer, and those that do not arrive from the next one."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.uplink.timeouts.request):
                _, reader, writer = await self._p2p.call_binary_stream_handler(peer, self._fetch_name)
            try:
                writer.write(REQUEST.pack(download.blob, len(numbers)) + struct.pack(f"<{len(numbers)}I", *numbers))
                await self._receive(download, peer, {HASHES, *numbers}, reader)
            finally:
                writer.transport.abort()
        except PEER_ERRORS as e:
            # a peer that does not have the blob closes the stream at once
            if not isinstance(e, EOFError) or time.monotonic() > start + MIN_STALL:
                self._excluded[download.owner, peer] = time.monotonic() + EXCLUSION
        self._start_fetching(tasks, download, download.missing.intersection(numbers), tried)

    async def _receive(self, download: Download, peer: PeerID, wanted: set[int], reader: asyncio.StreamReader) -> None:
        """Receive the hashes and these blocks, and store each. It extends the timeout by what the block may take."""
        async with asyncio.timeout(download.compute_timeout(peer)) as timeout:
            while wanted:
                number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                expected = wanted & {HASHES} or wanted  # the hashes come first
                if number not in expected or size > max(download.store.max_block, HASH_BYTES * self.num_blocks):
                    raise ValueError(f"it has sent block {number} of {size} bytes")
                data = await reader.readexactly(size)
                self.uplink.count_received(size)
                timeout.reschedule(timeout.when() + 8e-6 * size / download.find_least_mbits(peer))
                wanted.remove(number)
                await self._loop.run_in_executor(self._block_worker, self._store, download, number, data)
                download.missing.discard(number)
                download.arrival.set()
                download.arrival = asyncio.Event()

    def _store(self, download: Download, number: int, data: bytes) -> None:
        """Check and store the hashes or a block; runs in a thread."""
        store = download.store
        name = download.blob if number == HASHES else store.list_hashes(download.blob)[number]
        if hashlib.sha256(data).digest() != name:
            raise ValueError("its data has another hash")
        try:
            if number != HASHES:
                store.check(data, number)
            elif len(data) != HASH_BYTES * self.num_blocks:
                raise ValueError(f"the blob has {len(data) / HASH_BYTES:g} blocks instead of {self.num_blocks}")
        except ValueError as e:
            raise InvalidBlobError(str(e)) from None
        try:
            store.put(data, number)
        except OSError as e:  # not this peer's failure
            raise SwarmError(f"{store.folder} cannot be written ({e.strerror}): free some space") from None
