"""Serving states to other peers: a donor describes its state, and keeps that copy while any peer downloads its blocks.

Peers of one epoch and lineage have the same state except for the last bits, because they average in different orders
and through compression. A hash could not compare such states. Instead, each block has a digest: its norm and its sum.
"""

import asyncio
import contextlib
import ctypes
import logging
import math
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise that of collections.abc)

import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.asyncio import aiter_with_timeout
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.streaming import split_for_streaming

from swarm.averager import VerifyingAverager

logger = logging.getLogger("swarm")

BLOCK = 2**16  # elements; the unit of requests, checks and retries
MAX_BLOCKS = 256  # blocks per request
MAX_LINEAGE = 64  # bytes
FIRST_ANSWER = 5.0  # seconds; timeout for the first message from a client
RELAY = math.inf  # the epoch that auxiliary peers declare: as new as any client's

MAX_SERVED_PEERS, MAX_RELAYED_PEERS = 8, 2  # concurrent downloads from a trainer; from a client or an auxiliary peer
MAX_SNAPSHOTS = 2  # states that a donor keeps for downloads
UNUSED_TIMEOUT = 30.0  # seconds without a request until a snapshot is dropped
IN_USE = 5.0  # seconds since its last request in which a snapshot is not replaced, and a peer counts as served
MAX_SNAPSHOT_AGE = 1200.0  # seconds after which a snapshot is dropped in any case


def list_exact_moments(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the addresses of the moments that all peers must have to the last bit."""
    states = [state["outer_momentum"] for state in optimizer.state.values() if "outer_momentum" in state]
    return {tensor.data_ptr() for tensor in states}


def get_moment_role(moment: torch.Tensor, exact: set[int]) -> TensorRole:
    """Return the role by which the state's codec compresses a moment, or does not."""
    return TensorRole.UNSPECIFIED if moment.data_ptr() in exact else TensorRole.OPTIMIZER


def allocate_flat(infos: Sequence[CompressionInfo]) -> list[torch.Tensor]:
    """Allocate tensors as views of one buffer per dtype: each buffer shared with another process takes an open file."""
    pieces = {}
    for dtype in {info.descriptor.dtype for info in infos}:
        sizes = [info.descriptor.numel() for info in infos if info.descriptor.dtype == dtype]
        pieces[dtype] = iter(torch.empty(sum(sizes), dtype=dtype).split(sizes))
    return [next(pieces[info.descriptor.dtype]).view(info.descriptor.shape) for info in infos]


def copy_flat(tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]) -> list[torch.Tensor]:
    """Copy the tensors into flat buffers, because the next step changes the originals while they are being sent."""
    copies = allocate_flat(infos)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


def list_blocks(infos: Sequence[CompressionInfo]) -> list[tuple[int, int, int]]:
    """Return (tensor index, start, stop) of each block; peers request blocks by their positions in this list."""
    counts = [info.descriptor.numel() for info in infos]
    return [(i, at, min(at + BLOCK, count)) for i, count in enumerate(counts) for at in range(0, count, BLOCK)]


def digest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the norm and the sum of these numbers, of shape (2,)."""
    numbers = numbers.float()
    return torch.stack((numbers.norm(), numbers.sum()))


def parse_request(data: bytes) -> list | None:
    """Parse the request of a downloading peer; return None if it is invalid.

    [epoch] requests the description of a state of at least that epoch, [epoch, lineage] that of the step from this
    state to the next one, and [epoch, lineage, block numbers] these blocks of a described state or step.
    """
    try:
        request = MSGPackSerializer.loads(data) if data else [0]
        if [type(part) for part in request] == [int, str, list] and 0 < len(request[2]) <= MAX_BLOCKS:
            return request if {type(number) for number in request[2]} == {int} else None
        return request if [type(part) for part in request] in ([int], [int, str]) else None
    except Exception:  # on untrusted bytes, the decoder can raise any exception
        return None


class StateSnapshot:
    """A copy of a state, or of one step's gradients, that a donor keeps while peers download it."""

    def __init__(self, metadata: dict, tensors: list[torch.Tensor], infos: list[CompressionInfo]):
        self.epoch, self.lineage, self.is_step = metadata["epoch"], metadata["lineage"], "group" in metadata
        self.tensors, self.infos, self.blocks = tensors, infos, list_blocks(infos)
        self.taken = time.monotonic()
        self.used = {}  # the time of each peer's last download
        self.description = metadata | {
            "tensors": [[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in tensors],
            "digests": torch.stack([digest(self.read(*block)) for block in self.blocks]).numpy().tobytes(),
        }

    @property
    def last_use(self) -> float:
        """The time of the last download by any peer."""
        return max(self.used.values(), default=-math.inf)

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of one block."""
        return self.tensors[index].view(-1)[start:stop]

    def give(self, numbers: Sequence[int], compression: CompressionBase, peer: PeerID) -> Iterator[DownloadData]:
        """Yield messages with these blocks for a peer."""
        for index, start, stop in (self.blocks[number] for number in numbers):
            for part in split_for_streaming(compression.compress(self.read(index, start, stop), self.infos[index])):
                self.used[peer] = time.monotonic()
                yield DownloadData(tensor_part=part)


class StateServer(VerifyingAverager):
    """An averager that serves snapshots of its state, and the gradients of its last step, to several peers at once.
    Clients (note 65) serve it to the peers that they have called: to auxiliary peers, which relay it."""

    def __init__(self, *args, **kwargs):
        self._lineage = multiprocessing.Array(ctypes.c_char, MAX_LINEAGE)
        # whether the averager's process requests the last step from the main process, and not the state
        self._wants_step = multiprocessing.Value(ctypes.c_bool)
        self._snapshots: list[StateSnapshot] = []
        self._lock_snapshots = asyncio.Lock()
        self._last_requests = {}  # the time of each served peer's last request
        # for an auxiliary peer: the failures of each client, and the client that described each state
        self._client_failures, self._origins = Counter(), {}
        super().__init__(*args, **kwargs)

    @staticmethod
    def make_step_key(lineage: str) -> str:
        """Return the name by which peers request the step from the state of this lineage."""
        return f"{lineage} step"

    @property
    def lineage(self) -> str:
        """The hash of the groups that averaged each epoch, in all processes. Peers with the same state share it."""
        return self._lineage.value.decode()

    @lineage.setter
    def lineage(self, value: str) -> None:
        self._lineage.value = value.encode()

    @property
    def donor_timeout(self) -> float:
        """The timeout of a donor, in seconds without a message."""
        return max(FIRST_ANSWER, self.dht.uplink.timeouts.next_chunk)

    @VerifyingAverager.state_sharing_priority.setter
    def state_sharing_priority(self, epoch: float) -> None:
        """Declare the epoch of this peer's state; an auxiliary peer has no trainer's state itself."""
        epoch = RELAY if self.mode == AveragingMode.AUX else epoch
        if epoch != self.state_sharing_priority:
            self._state_sharing_priority.value = epoch
            self._outer_pipe.send(("_trigger_declare_load_state", [], {}))

    def serve_state(self) -> None:
        """Start to serve this client's state to the peers that it has called; an auxiliary peer starts to relay."""
        if self.mode == AveragingMode.AUX:
            self.state_sharing_priority, self.allow_state_sharing = RELAY, True
        else:
            self._outer_pipe.send(("_serve_state_as_client", [], {}))

    async def _serve_state_as_client(self) -> None:
        """Serve the state and declare it in the DHT, forever; runs in the averager's process."""
        name = self._get_handle_name(self.prefix, "rpc_download_state")
        await self._p2p.add_protobuf_handler(name, self.rpc_download_state, BytesValue, stream_output=True)
        self._allow_state_sharing.value = True
        while True:
            self._state_updated.clear()
            with contextlib.suppress(Exception):  # of any type, from the DHT's process; the next attempt may succeed
                await self.dht.store(
                    f"{self.prefix}.clients",
                    subkey=self.peer_id.to_bytes(),
                    value=self.state_sharing_priority,
                    expiration_time=get_dht_time() + self.declare_state_period,
                    return_future=True,
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state_updated.wait(), self.declare_state_period / 2)

    async def fetch_epochs(self, key: str) -> dict[PeerID, float]:
        """Return the epochs of the states that other peers declare under this key; runs in the averager's process."""
        entry = await self.dht.get(f"{self.prefix}.{key}", latest=True, return_future=True)
        declared = entry.value.items() if entry is not None and isinstance(entry.value, dict) else ()
        return {
            PeerID(peer): float(info.value)
            for peer, info in declared
            if isinstance(info, ValueWithExpiration)
            and isinstance(info.value, (int, float))
            and info.value >= 0  # no NaN
            and peer != self.peer_id.to_bytes()
        }

    async def request_state(self, peer: PeerID, request: list) -> AsyncIterator[DownloadData]:
        """Send a request (see `parse_request`) to a peer, and yield the messages of its answer."""
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        stream = await stub.rpc_download_state(BytesValue(value=self.serializer.dumps(request)))
        async for message in self.dht.uplink.receive(stream):
            yield message

    async def rpc_download_state(self, request: BytesValue, context: P2PContext) -> AsyncIterator[DownloadData]:
        """Serve a description or blocks of the state, or relay a client's state, at the uplink's pace."""
        fields, peer = parse_request(request.value), context.remote_id
        if fields is None or not self.allow_state_sharing or not self._admit(peer):
            return
        is_relay = self.mode == AveragingMode.AUX
        answer = self._relay_client_state(peer, fields) if is_relay else self._answer(peer, *fields)
        async for message in self.dht.uplink.send(answer, is_round=False):
            yield message

    def _admit(self, peer: PeerID) -> bool:
        """Count this peer among those that are served, unless these are enough for the uplink; return whether it is
        served. Otherwise, it asks another donor, or retries."""
        now = time.monotonic()
        self._last_requests = {other: at for other, at in self._last_requests.items() if now - at < IN_USE}
        max_peers = MAX_SERVED_PEERS if self.mode == AveragingMode.NODE else MAX_RELAYED_PEERS
        if peer not in self._last_requests and len(self._last_requests) >= max_peers:
            return False
        self._last_requests[peer] = now
        return True

    async def _answer(
        self, peer: PeerID, epoch: int, lineage: str | None = None, numbers: Sequence[int] = ()
    ) -> AsyncIterator[DownloadData]:
        """Yield the description or the blocks of a snapshot, see `parse_request`."""
        if not numbers:
            is_new_enough = self.state_sharing_priority >= epoch
            snapshot = await self._find_snapshot(peer, epoch, lineage) if is_new_enough else None
            description = snapshot.description if snapshot else {"epoch": -1, "lineage": ""}
            yield DownloadData(metadata=self.serializer.dumps(description))
            return
        snapshots = [it for it in self._snapshots if (it.epoch, it.lineage) == (epoch, lineage)]
        if not snapshots or not 0 <= min(numbers) <= max(numbers) < len(snapshots[0].blocks):
            yield DownloadData(metadata=self.serializer.dumps({"gone": True}))
            return
        for message in snapshots[0].give(numbers, self.state_compression, peer):
            yield message

    async def _find_snapshot(self, peer: PeerID, epoch: int, lineage: str | None) -> StateSnapshot | None:
        """Return a snapshot of the current state, or the newest existing snapshot if there is no room for another.

        :param lineage: the lineage of the state whose next step is requested instead. That step must be the last one,
            and no round may have started since; otherwise the result is None
        """
        async with self._lock_snapshots:
            for snapshot in self._snapshots:
                snapshot.used.pop(peer, None)  # a peer that requests a description has ended its last download
            name = self.lineage if lineage is None else self.make_step_key(lineage)
            snapshot = next((snapshot for snapshot in self._snapshots if snapshot.lineage == name), None)
            if snapshot is None:
                oldest = min(self._snapshots, key=lambda snapshot: snapshot.last_use, default=None)
                if len(self._snapshots) >= MAX_SNAPSHOTS and time.monotonic() - oldest.last_use > IN_USE:
                    self._snapshots.remove(oldest)
                if len(self._snapshots) < MAX_SNAPSHOTS:
                    snapshot = await self._take_snapshot(epoch, name, is_step=lineage is not None)
                elif lineage is None:
                    snapshot = next((it for it in reversed(self._snapshots) if not it.is_step), None)
            if snapshot is not None:
                snapshot.used[peer] = time.monotonic()
            return snapshot

    async def _take_snapshot(self, epoch: int, name: str, is_step: bool) -> StateSnapshot | None:
        self._wants_step.value = is_step
        metadata, tensors, infos = await self._get_current_state_from_host_process()
        metadata = self.serializer.loads(metadata)
        if metadata["epoch"] < epoch or is_step and metadata["lineage"] != name:
            return None
        snapshot = await asyncio.to_thread(StateSnapshot, metadata, tensors, infos)
        self._snapshots.append(snapshot)
        asyncio.create_task(self._drop_when_unused(snapshot))
        return snapshot

    async def _drop_when_unused(self, snapshot: StateSnapshot) -> None:
        while time.monotonic() < min(snapshot.last_use + UNUSED_TIMEOUT, snapshot.taken + MAX_SNAPSHOT_AGE):
            await asyncio.sleep(1.0)
        with contextlib.suppress(ValueError):  # a newer snapshot has replaced it
            self._snapshots.remove(snapshot)

    async def _relay_client_state(self, asker: PeerID, request: list) -> AsyncIterator[DownloadData]:
        """Relay the answer of a client; if it does not describe its state, try the next client."""
        is_description = len(request) == 1
        if is_description:
            epochs = await self.fetch_epochs("clients")
            epochs.pop(asker, None)
            # any client at or above the median: an untrusted one may claim the highest epoch
            usual = statistics.median(epochs.values()) if epochs else 0
            clients = [peer for peer, epoch in epochs.items() if epoch >= usual]
        else:
            clients = [peer for key, peer in self._origins.items() if key == (request[0], request[1])]
        # clients with the fewest failures come first
        for peer in sorted(clients, key=lambda peer: (self._client_failures[peer], random.random())):
            has_answered = False
            # shorter than the timeout of the peer that waits for this answer
            timeout = FIRST_ANSWER if is_description else self.donor_timeout
            try:
                async for message in aiter_with_timeout(self.request_state(peer, request), timeout):
                    if is_description:
                        metadata = self.serializer.loads(message.metadata)
                        self._origins[int(metadata["epoch"]), str(metadata["lineage"])[:MAX_LINEAGE]] = peer
                        self._origins = dict(list(self._origins.items())[-2 * MAX_RELAYED_PEERS :])
                        message.metadata = self.serializer.dumps(metadata | {"origin": str(peer)})
                    has_answered = True
                    yield message
                if has_answered:
                    return
            except Exception as e:  # untrusted bytes and a broken network can raise any exception
                logger.debug(f"could not relay the state of peer {peer}: {e!r}")
            self._client_failures[peer] += 1
            if has_answered:
                return
