"""Serving states to other peers: a donor describes its state, and keeps that copy while any peer downloads its blocks.

Peers of one epoch and lineage have the same state except for the last bits, so that hashes could not compare them.
Instead, each block has a digest: its norm, and its sums with patterns of random signs. Digests differ as blocks do.
"""

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, AsyncIterator, NamedTuple  # noqa: UP035 (hivemind does not know that of collections.abc)

import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import TensorDescriptor, ValueWithExpiration
from hivemind.utils.asyncio import aiter_with_timeout
from hivemind.utils.streaming import split_for_streaming

from swarm.averager import VerifyingAverager
from swarm.log_records import Number, pack, unpack

BLOCK = 2**16  # elements; the unit of requests, checks and retries
MAX_BLOCKS = 256  # per request
MAX_REQUEST_BYTES = 4096
MESSAGE = 2**16 + 2**11  # bytes of a message: a block of 8 bits with its scales, or half of one of 16 bits
MAX_LINEAGE = 64  # bytes
HASH_BYTES = 8
NUM_SUMS = 8  # of each block, with different signs
MIN_DONOR_TIMEOUT = 5.0  # seconds without a message until a donor is given up; lower bound
RELAY = math.inf  # the epoch that auxiliary peers declare: as new as any client's
# requests of the averager's process to the main process; others are keys of steps
STATE = b""
NOTHING = b"nothing"

MAX_SERVED_PEERS = 8  # concurrent downloads from a trainer
MAX_RELAYED_PEERS = 2  # the same from a client or an auxiliary peer
MAX_SNAPSHOTS = 2  # states that a donor keeps for downloads
UNUSED_TIMEOUT = 30.0  # seconds without a request until a snapshot is dropped
IN_USE = 5.0  # seconds since its last request in which a snapshot is not replaced, and a peer counts as served
MIN_HOLD = 60.0  # seconds, or the time of all its bytes at a tenth of the uplink, after which a use no longer counts
MAX_SNAPSHOT_AGE = 1200.0  # the same for dropping a snapshot in any case


def allocate_flat(infos: Sequence[CompressionInfo]) -> list[torch.Tensor]:
    """Allocate zeros as views of one buffer per dtype: each buffer shared with another process takes an open file. They
    are shared at once: if /dev/shm is full, sending the result to another process would end hivemind's thread."""
    pieces = {}
    for dtype in {info.descriptor.dtype for info in infos}:
        sizes = [info.descriptor.numel() for info in infos if info.descriptor.dtype == dtype]
        pieces[dtype] = iter(torch.zeros(sum(sizes), dtype=dtype).share_memory_().split(sizes))
    return [next(pieces[info.descriptor.dtype]).view(info.descriptor.shape) for info in infos]


def describe_tensors(tensors: Iterable[torch.Tensor | TensorDescriptor]) -> list[list]:
    """Return the type and the shape of each tensor."""
    return [[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in tensors]


def list_blocks(infos: Sequence[CompressionInfo]) -> list[tuple[int, int, int]]:
    """Return (tensor index, start, stop) of each block; peers request blocks by their positions in this list."""
    counts = [info.descriptor.numel() for info in infos]
    return [(i, at, min(at + BLOCK, count)) for i, count in enumerate(counts) for at in range(0, count, BLOCK)]


@functools.cache
def make_signs() -> torch.Tensor:
    """Return the random signs of each sum, of shape (NUM_SUMS, BLOCK); the first sum has none."""
    signs = 2.0 * torch.randint(2, (NUM_SUMS, BLOCK), generator=torch.Generator().manual_seed(0)) - 1.0
    signs[0] = 1.0
    return signs


def digest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the norm of these numbers and their sums, of shape (1 + NUM_SUMS,)."""
    numbers = numbers.float()
    return torch.cat((numbers.norm().view(1), make_signs()[:, : len(numbers)] @ numbers))


def hash_exactly(numbers: torch.Tensor, info: CompressionInfo) -> bytes:
    """Return a hash of a block that has the same bits on all peers of a log; zeros for the moments of an optimizer."""
    is_exact = info.role != TensorRole.OPTIMIZER
    return hashlib.sha256(numbers.contiguous().numpy()).digest()[:HASH_BYTES] if is_exact else bytes(HASH_BYTES)


@dataclass(frozen=True)
class StateRequest:
    """A request of a downloading peer: for these blocks of a state or step, or without any, for its description."""

    epoch: Number  # of the state; for the description of a state, the lowest one that is of use
    lineage: Annotated[str, 0, 2 * MAX_LINEAGE] = ""  # of a step, see `make_step_key`; empty for the newest state
    blocks: Annotated[tuple, 0, MAX_BLOCKS, Number] = ()
    client: Annotated[bytes, 0, 64] = b""  # the id of the client to which an auxiliary peer should pass this request on


def parse_epochs(entry: ValueWithExpiration | None, own_id: bytes) -> dict[bytes, float]:
    """Return the epochs of the states that peers declare in a record of the DHT, without this peer's."""
    declared = entry.value.items() if entry is not None and isinstance(entry.value, dict) else ()
    return {
        peer: float(info.value)
        for peer, info in declared
        if isinstance(info, ValueWithExpiration) and isinstance(info.value, (int, float))
        if info.value >= 0 and peer != own_id and len(peer) == len(own_id)  # no NaN, and no keys
    }


class StateSnapshot:
    """A copy of a state, or of one step's gradients, that a donor keeps while peers download it. After `hold` seconds,
    a newer one may replace it, even if a peer still requests blocks from time to time."""

    def __init__(self, metadata: dict, tensors: Sequence[torch.Tensor], infos: list[CompressionInfo], hold: float):
        self.epoch = metadata["epoch"]
        self.lineage = metadata["lineage"]
        self.is_step = "group" in metadata
        self.tensors = list(tensors)
        self.infos = infos
        self.blocks = list_blocks(infos)
        self.taken = time.monotonic()
        self.hold = hold
        self.used = {}  # by peer: the time of its last download
        self.description = metadata | {
            "tensors": describe_tensors(tensors),
            "digests": torch.stack([digest(self.read(*block)) for block in self.blocks]).numpy().tobytes(),
        }
        if len(self.lineage) == MAX_LINEAGE:  # the hash of a commit
            self.description["hashes"] = b"".join(hash_exactly(self.read(*it), infos[it[0]]) for it in self.blocks)
        self.last_request = time.monotonic()  # the digests of a large model take long

    @property
    def last_use(self) -> float:
        """The time of the last download that counts, by any peer, or of the first request."""
        return min(max(self.used.values(), default=self.taken), self.taken + self.hold)

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of one block."""
        return self.tensors[index].view(-1)[start:stop]

    def serve(self, numbers: Sequence[int], compression: CompressionBase, peer: PeerID) -> Iterator[DownloadData]:
        """Yield messages with these blocks for a peer."""
        for index, start, stop in (self.blocks[number] for number in numbers):
            if not self.tensors:
                raise IndexError("this copy of the state has been removed")
            block = compression.compress(self.read(index, start, stop), self.infos[index])
            for part in split_for_streaming(block, MESSAGE):
                self.used[peer] = self.last_request = time.monotonic()
                yield DownloadData(tensor_part=part)


class Service(NamedTuple):
    """The requests of a peer for blocks: the times of the first and the last one, and the number of blocks."""

    first: float
    last: float
    blocks: int


class StateServer(VerifyingAverager):
    """An averager that serves snapshots of its state, and the gradients of its last step, to several peers at once.
    Only peers that a client has called can reach it (note 65): an auxiliary peer passes on what others ask it for."""

    def __init__(self, *args, **kwargs):
        self._lineage, self._last_lineage = (multiprocessing.Array(ctypes.c_char, MAX_LINEAGE) for _ in range(2))
        self._wanted = multiprocessing.Array(ctypes.c_char, 2 * MAX_LINEAGE)
        self._snapshots: list[StateSnapshot] = []
        self._lock_snapshots = asyncio.Lock()
        self._served: dict[PeerID, Service] = {}
        self.relays: dict[PeerID, PeerID] = {}  # the auxiliary peer through which this peer calls each client
        super().__init__(*args, **kwargs)
        self._send("_serve_state_as_client" if self.client_mode else "_renew_declaration")

    @staticmethod
    def make_step_key(lineage: str) -> str:
        """Return the name by which peers request the step from the state of this lineage."""
        return f"{lineage} step"

    @property
    def lineage(self) -> str:
        """A hash of the groups that averaged each epoch, or of the last commit. Peers with the same state share it."""
        return self._lineage.value.decode()

    @lineage.setter
    def lineage(self, value: str) -> None:
        self._last_lineage.value = self._lineage.value
        self._lineage.value = value.encode()

    @property
    def donor_timeout(self) -> float:
        """The timeout of a donor, in seconds without a message."""
        return max(MIN_DONOR_TIMEOUT, self.dht.uplink.timeouts.next_chunk)

    @VerifyingAverager.state_sharing_priority.setter
    def state_sharing_priority(self, epoch: float) -> None:
        """Declare the epoch of this peer's state; an auxiliary peer has no trainer's state itself."""
        epoch = RELAY if self.mode == AveragingMode.AUX else epoch
        if epoch != self.state_sharing_priority:
            self._state_sharing_priority.value = epoch
            self._send("_trigger_declare_load_state")

    def relay_states(self) -> None:
        """Start to relay the states of clients, on an auxiliary peer."""
        self.state_sharing_priority = RELAY
        self.allow_state_sharing = True

    async def _serve_state_as_client(self) -> None:
        name = self._get_handle_name(self.prefix, "rpc_download_state")
        await self._p2p.add_protobuf_handler(name, self.rpc_download_state, BytesValue, stream_output=True)
        self._allow_state_sharing.value = True

    async def _renew_declaration(self) -> None:
        """Have the state declared again before its record expires, forever: dead peers delay each store (note 25)."""
        while True:
            await asyncio.sleep(self.declare_state_period / 2)
            self._state_updated.set()

    async def fetch_epochs(self) -> dict[PeerID, float]:
        """Return the epochs of the states that other peers declare; runs in the averager's process."""
        entry = await self.dht.get(f"{self.prefix}.all_averagers", latest=True, return_future=True)
        return {PeerID(peer): epoch for peer, epoch in parse_epochs(entry, self.peer_id.to_bytes()).items()}

    async def request_state(self, peer: PeerID, request: StateRequest) -> AsyncIterator[DownloadData]:
        """Send a request to a peer, or to a client's relay, and yield the messages of the answer."""
        if relay := self.relays.get(peer):
            request = replace(request, client=peer.to_bytes())
        stub = self.get_stub(self._p2p, relay or peer, namespace=self.prefix)
        async for message in await stub.rpc_download_state(BytesValue(value=pack(request))):
            self.dht.uplink.count_received(message.ByteSize())
            yield message

    async def rpc_download_state(self, request: BytesValue, context: P2PContext) -> AsyncIterator[DownloadData]:
        """Serve a description or blocks of the state, or relay a client's answer, at the uplink's pace."""
        # an error, also that of a request that is too long, goes to the caller
        parsed = unpack(StateRequest, request.value[:MAX_REQUEST_BYTES])
        if not self.allow_state_sharing or not self._admit(context.remote_id, len(parsed.blocks)):
            return
        answer = self._relay(parsed) if self.mode == AveragingMode.AUX else self._answer(context.remote_id, parsed)
        async for message in self.dht.uplink.send(answer, is_urgent=False):
            yield message

    async def _relay(self, request: StateRequest) -> AsyncIterator[DownloadData]:
        """Yield a client's answer to a request, for a peer that cannot reach the client."""
        answer = self.request_state(PeerID(request.client), replace(request, client=b""))
        with contextlib.suppress(Exception):  # untrusted bytes and a broken network can raise any exception
            async for message in aiter_with_timeout(answer, self.donor_timeout):
                yield message

    def _admit(self, peer: PeerID, num_blocks: int) -> bool:
        """Count this peer among those that are served, and return whether it is. If there are enough of them, it
        replaces the slowest one, or asks another donor, or retries. So peers that hardly fetch block no others."""
        if not num_blocks:  # it wants a description, which costs little
            return True
        now = time.monotonic()
        self._served = served = {other: it for other, it in self._served.items() if now - it.last < IN_USE}
        max_peers = MAX_SERVED_PEERS if self.mode == AveragingMode.NODE else MAX_RELAYED_PEERS
        if peer not in served and len(served) >= max_peers:
            rates = {other: it.blocks / (now - it.first + IN_USE) for other, it in served.items()}
            limit = 2 * statistics.median(rates.values())
            slow = [other for other, it in served.items() if now - it.first > IN_USE and rates[other] <= limit]
            if not slow:
                return False
            del served[min(slow, key=rates.get)]
        first, _, blocks = served.get(peer, Service(now, now, 0))
        served[peer] = Service(first, now, blocks + num_blocks)
        return True

    async def _answer(self, peer: PeerID, request: StateRequest) -> AsyncIterator[DownloadData]:
        """Yield the description or the blocks of a snapshot, which is completed for others if this peer is gone."""
        key = request.epoch, request.lineage
        known = [it for it in self._snapshots if (it.epoch, it.lineage) == key]
        if not request.blocks:
            # an invented step must not cost a copy; the main process may be making the step from the current state
            steps = [self.make_step_key(it) for it in (self._last_lineage.value.decode(), self.lineage)]
            is_here = self.state_sharing_priority >= request.epoch and request.lineage in ("", *steps)
            snapshot = await asyncio.shield(self._find_snapshot(peer, *key)) if is_here else None
            description = snapshot.description if snapshot else {"epoch": -1, "lineage": ""}
            yield DownloadData(metadata=self.serializer.dumps(description))
        elif not known or max(request.blocks) >= len(known[0].blocks):
            yield DownloadData(metadata=self.serializer.dumps({"gone": True}))
        else:
            for message in known[0].serve(request.blocks, self.state_compression, peer):
                yield message

    async def _find_snapshot(self, peer: PeerID, epoch: int, step_key: str) -> StateSnapshot | None:
        """Return a snapshot of the current state; if there is no room for another one, the newest that exists.

        :param step_key: the key of the step that is requested instead, or an empty string. The result is None unless it
            is the last step and no round has started since
        """
        async with self._lock_snapshots:
            for snapshot in self._snapshots if not self.client_mode else ():  # a client's caller is a relay of several
                snapshot.used.pop(peer, None)  # a peer that requests a description has ended its last download
            for snapshot in self._snapshots:
                if snapshot.lineage == (step_key or self.lineage):
                    snapshot.last_request = time.monotonic()  # for another 30 s, in which the peer may request blocks
                    return snapshot
            if len(self._snapshots) >= MAX_SNAPSHOTS:
                oldest = min(self._snapshots, key=lambda it: it.last_use)
                if time.monotonic() - oldest.last_use <= IN_USE:
                    return None if step_key else next((it for it in self._snapshots[::-1] if not it.is_step), None)
                self._remove(oldest)
            self._wanted.value = step_key.encode()
            metadata, tensors, infos = await self._get_current_state_from_host_process()
            self._wanted.value = NOTHING  # otherwise, the main process keeps its last answer (note 89)
            await self._get_current_state_from_host_process()
            metadata = self.serializer.loads(metadata)
            if metadata["epoch"] < epoch or step_key and metadata["lineage"] != step_key:
                return None
            hold = max(MIN_HOLD, self.dht.uplink.compute_transfer_timeout(sum(tensor.nbytes for tensor in tensors)))
            snapshot = await asyncio.to_thread(StateSnapshot, metadata, tensors, infos, hold)
            self._snapshots.append(snapshot)
            asyncio.create_task(self._drop_when_unused(snapshot))
            return snapshot

    async def _drop_when_unused(self, snapshot: StateSnapshot) -> None:
        oldest = snapshot.taken + max(MAX_SNAPSHOT_AGE, snapshot.hold)
        while time.monotonic() < min(snapshot.last_request + UNUSED_TIMEOUT, oldest):
            await asyncio.sleep(1.0)
        if snapshot in self._snapshots:  # otherwise, a newer one has replaced it
            self._remove(snapshot)

    def _remove(self, snapshot: StateSnapshot) -> None:
        """Remove a snapshot, and free its memory even if the caller of a stream does not read."""
        self._snapshots.remove(snapshot)
        snapshot.tensors.clear()
