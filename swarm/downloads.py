"""Block-wise download from several donors: a state, or the gradients of the step that follows it.

A donor describes its state and serves any block of it. All donors with the same state share the work.

Peers of one epoch and lineage have the same state except for the last bits, because they average in different orders
and through compression. A hash could not compare such states. Instead, each block has a digest: its norm and its sum.
Digests are compared between donors before the download, and with each block that arrives.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole
from hivemind.optim.state_averager import dump_optimizer_state
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.streaming import combine_from_streaming, split_for_streaming
from hivemind.utils.tensor_descr import TensorDescriptor

logger = logging.getLogger("swarm")

BLOCK = 2**16  # elements; the unit of requests, checks and retries
MAX_BLOCKS = 256  # blocks per request
MAX_LINEAGE = 64  # bytes
REQUESTS_PER_DONOR = 2  # concurrent requests: the donor answers one while the next one is in transit
# Seconds of upload per request. Long requests hide the latency, but the download ends with the slowest request.
MIN_REQUEST_SECONDS, MAX_REQUEST_SECONDS = 0.1, 0.5
SILENT_DONOR_TIMEOUT = 5.0  # seconds without a message until a donor is dropped, if other donors remain
FIRST_REQUEST = 2**18  # elements per request, until the donor's speed is measured
# Relative to norm + |sum|. Measured between correct peers: 0.03 with 8-bit gradients, 0.02 with 8-bit moments.
TOLERANCE = 0.1
MATRIX_FLOOR, VECTOR_FLOOR = 0.02, 0.5  # relative to the RMS of all tensors of the same kind

# types of the numbers and settings in an optimizer's state that are not tensors
PLAIN_TYPES = (int, float, str, type(None))
# dtypes of its 0-d tensors; the same value may be a plain number at another time, as LAMB's trust ratio
NUMBER_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


class InvalidStateError(Exception):
    """A peer's state that this peer cannot or should not load."""


class StaleStateError(InvalidStateError):
    """A peer's state of an earlier epoch than the requested one."""


def allocate_flat(infos: Sequence[CompressionInfo]) -> list[torch.Tensor]:
    """Allocate tensors as views of one buffer per dtype: each buffer shared with another process takes an open file."""
    sizes: dict[torch.dtype, int] = Counter()
    for info in infos:
        sizes[info.descriptor.dtype] += info.descriptor.numel()
    pieces = {dtype: torch.empty(size, dtype=dtype) for dtype, size in sizes.items()}
    tensors = []
    for shape, dtype in ((info.descriptor.shape, info.descriptor.dtype) for info in infos):
        count = math.prod(shape)
        tensors.append(pieces[dtype][:count].view(shape))
        pieces[dtype] = pieces[dtype][count:]
    return tensors


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


def digests_differ(digests: torch.Tensor, others: torch.Tensor, floors: torch.Tensor | float = 0.0) -> bool:
    """Return whether two digests, or two lists of digests, describe different numbers.

    :param digests: the finite digests, of shape (2,) or (blocks, 2)
    :param others: the other digests, which differ if they are not finite
    :param floors: the absolute differences that do not matter
    """
    sizes = digests.abs().sum(-1, keepdim=True)
    return not ((digests - others).abs() <= TOLERANCE * sizes + floors).all()


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
        self.epoch, self.lineage = metadata["epoch"], metadata["lineage"]
        self.tensors, self.infos = tensors, infos
        self.blocks = list_blocks(infos)
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

    def give(self, numbers: Sequence[int], compression: CompressionBase, peer: PeerID):
        """Yield messages with these blocks for a peer."""
        for index, start, stop in (self.blocks[number] for number in numbers):
            for part in split_for_streaming(compression.compress(self.read(index, start, stop), self.infos[index])):
                self.used[peer] = time.monotonic()
                yield averaging_pb2.DownloadData(tensor_part=part)


@dataclasses.dataclass(eq=False)
class Donor:
    """A peer that has described its state, and the progress of the download from it."""

    peer: PeerID
    metadata: dict
    infos: list[CompressionInfo]
    digests: torch.Tensor  # one row per block, then one per plain number of the optimizer
    elements: int = 0  # elements received
    since: float = 0.0  # time of the first request
    heard: float = 0.0  # time of the last message

    @property
    def key(self) -> tuple[int, str]:
        """The epoch and the lineage of the state."""
        return self.metadata["epoch"], self.metadata["lineage"]

    @property
    def name(self) -> str:
        """The id of the peer whose state it is: an auxiliary peer names the client that it relays."""
        return str(self.metadata.get("origin", self.peer))[:100]

    def has_state_of(self, other: "Donor") -> bool:
        """Return whether both donors describe the same state."""
        return (
            self.key == other.key
            and [info.descriptor for info in self.infos] == [info.descriptor for info in other.infos]
            and not digests_differ(self.digests, other.digests, self.compute_digest_tolerances())
        )

    def compute_digest_tolerances(self) -> torch.Tensor:
        """Return the absolute difference of each digest that does not matter, of shape (digests, 1).

        It is relative to the RMS of all numbers of the same kind: the parameters, or one of the moments. The gradients
        of some biases, such as those of attention keys, consist of rounding errors only. Adam turns these errors into
        full-size updates, which differ from peer to peer.
        """
        optimizer_indices = [i for i, info in enumerate(self.infos) if info.role == TensorRole.OPTIMIZER]
        moment_indices = [i for i in optimizer_indices if self.infos[i].descriptor.shape]
        moments = max(1, len(moment_indices) // max(1, len(self.infos) - len(optimizer_indices)))
        kinds = {i: (self.infos[i].descriptor.dtype, place % moments) for place, i in enumerate(moment_indices)}
        blocks = list_blocks(self.infos)
        squares, counts = Counter(), Counter()
        for (i, start, stop), norm in zip(blocks, self.digests[:, 0].tolist(), strict=False):
            squares[kinds.get(i)] += norm**2
            counts[kinds.get(i)] += stop - start
        floors = torch.zeros(len(self.digests), 1)
        for number, (i, start, stop) in enumerate(blocks):
            share = MATRIX_FLOOR if len(self.infos[i].descriptor.shape) > 1 else VECTOR_FLOOR
            floors[number] = share * (squares[kinds.get(i)] / counts[kinds.get(i)] * (stop - start)) ** 0.5
        return floors


def parse_description(
    peer: PeerID,
    metadata: object,
    min_epoch: int,
    tensors: Sequence[tuple[torch.Tensor, TensorRole]],
    optimizer: torch.optim.Optimizer | None,
) -> Donor:
    """Parse a peer's description of its state and check it against this peer's tensors.

    :param metadata: the decoded description, not yet checked
    :param min_epoch: the earliest epoch to accept
    :param tensors: this peer's tensors and their roles; the donor's must have the same shapes and dtypes
    :param optimizer: this peer's optimizer, whose state the donor's must match too; None to expect `tensors` only
    :raises InvalidStateError: the description is incomplete, or the state differs from this peer's
    """
    if not isinstance(metadata, dict) or not isinstance(metadata.get("lineage"), str):
        raise InvalidStateError("the description has no lineage")
    if len(metadata["lineage"].encode()) > MAX_LINEAGE:
        raise InvalidStateError("the lineage is too long")
    if type(metadata.get("epoch")) is not int:
        raise InvalidStateError("the description has no epoch")
    if metadata["epoch"] < min_epoch:
        raise StaleStateError(f"the state is of epoch {metadata['epoch']}, earlier than epoch {min_epoch}")
    expected, plain_numbers = list(tensors), []
    own, own_tensors = dump_optimizer_state(optimizer) if optimizer else ([], [])
    theirs, count = metadata.get("optimizer_metadata", []), 0
    if not isinstance(theirs, list) or len(theirs) != len(own):
        raise InvalidStateError("the optimizer's state differs from this peer's")
    for item, own_item in zip(theirs, own, strict=True):
        own_tensor = own_tensors[own_item["index"]] if own_item["type"] == "tensor" else torch.zeros(())
        if item == {"type": "tensor", "index": count}:
            expected.append((own_tensor, TensorRole.OPTIMIZER))
            count += 1
        elif own_tensor.ndim or set(item) != {"type", "value"} or not isinstance(item["value"], PLAIN_TYPES):
            raise InvalidStateError("the optimizer's state differs from this peer's")
        elif isinstance(item["value"], (int, float)):
            plain_numbers.append([float(item["value"])] * 2)
    descriptions = metadata.get("tensors")
    if not isinstance(descriptions, list) or len(descriptions) != len(expected):
        raise InvalidStateError(f"the state does not have {len(expected)} tensors, as this peer's has")
    infos = []
    for index, ((tensor, role), (name, *shape)) in enumerate(zip(expected, descriptions, strict=True)):
        if shape != list(tensor.shape):
            raise InvalidStateError(f"tensor {index} has the shape {tuple(shape)[:9]}, not {tuple(tensor.shape)}")
        types = {str(tensor.dtype).removeprefix("torch."): tensor.dtype} | (NUMBER_TYPES if not shape else {})
        if name not in types:
            raise InvalidStateError(f"tensor {index} has the dtype {str(name)[:20]}, not {' or '.join(types)}")
        infos.append(CompressionInfo(index, TensorDescriptor(tensor.shape, types[name]), role))
    digests = torch.frombuffer(bytearray(metadata["digests"]), dtype=torch.float32).view(-1, 2)
    if len(digests) != len(list_blocks(infos)):
        raise InvalidStateError(f"the description has {len(digests)} digests for {len(list_blocks(infos))} blocks")
    digests = torch.cat((digests, torch.tensor(plain_numbers).view(-1, 2)))
    if not digests.isfinite().all():
        raise InvalidStateError("the state is not finite")
    return Donor(peer, metadata, infos, digests)


def group_donors(donors: Sequence[Donor], ranks: dict[PeerID, tuple]) -> list[list[Donor]]:
    """Group donors by state, best group first.

    Groups are sorted by rank, then by size, then by epoch: a single donor may claim any state and any epoch.

    :param ranks: the rank of each peer; a larger tuple is better
    """
    remaining = sorted(donors, key=lambda donor: ranks[donor.peer], reverse=True)
    groups = []
    while remaining:
        candidates = ([donor for donor in remaining if first.has_state_of(donor)] for first in remaining)
        groups.append(max(candidates, key=len))
        remaining = [donor for donor in remaining if donor not in groups[-1]]
    # the first donor of each group has its best rank
    return sorted(groups, key=lambda group: (ranks[group[0].peer], len(group), group[0].key[0]), reverse=True)


def select_agreed(groups: Sequence[list[Donor]], voters: Sequence[PeerID]) -> list[list[Donor]]:
    """Return the group that contains more than half of the voters, if there is one; without voters, all groups."""
    return [g for g in groups if not voters or 2 * sum(donor.peer in voters for donor in g) > len(voters)]


class MultiSourceDownload:
    """A download of one state from several donors that have it.

    :param request: a function that sends a request (see `parse_request`) to a peer and returns the stream of its answer
    :param patience: a function that returns the timeout of the last remaining donor, in seconds without a message
    :param compression: the state codec, which must match on all peers
    :param received: the progress counters to update: bytes, elements, milliseconds
    """

    def __init__(
        self,
        donors: Sequence[Donor],
        request: Callable,
        patience: Callable[[], float],
        compression: CompressionBase,
        received: list[int],
    ):
        self.donors, self.infos = list(donors), donors[0].infos
        self.request, self.patience, self.compression, self.received = request, patience, compression, received
        self.tensors, self.blocks = allocate_flat(self.infos), list_blocks(self.infos)
        #: numbers of the blocks that are still to be requested
        self.queue = deque(range(len(self.blocks)))
        self.start = time.monotonic()

    async def fetch(self, note_failure: Callable[[PeerID, Exception], None]) -> bool:
        """Download all blocks into `tensors`.

        :param note_failure: a function that is called with each donor that fails, and its error
        :returns: whether all blocks arrived; False if all donors failed
        """
        while self.queue and self.donors:
            # the blocks of a failed donor return to the queue, perhaps after the other donors have finished
            await asyncio.gather(*(self.fetch_from(donor, note_failure) for donor in self.donors))
        return not self.queue

    async def fetch_from(self, donor: Donor, note_failure: Callable[[PeerID, Exception], None]) -> None:
        """Download blocks from one donor until the queue is empty or the donor fails."""
        donor.heard = time.monotonic()
        donor.since = donor.since or donor.heard
        # different sizes, so that the requests do not finish at the same moment
        tasks = {asyncio.create_task(self.work(donor, 1 - 0.4 * i)) for i in range(REQUESTS_PER_DONOR)}
        pending = tasks
        try:
            while pending:
                timeout = SILENT_DONOR_TIMEOUT if len(self.donors) > 1 else self.patience()
                seconds_left = donor.heard + timeout - time.monotonic()
                if seconds_left <= 0:
                    raise InvalidStateError(f"no message for {timeout:.0f} s")
                done, pending = await asyncio.wait(pending, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except Exception as e:  # untrusted bytes and a broken network can raise any exception
            self.donors.remove(donor)
            note_failure(donor.peer, e)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def work(self, donor: Donor, share: float) -> None:
        """Send one request after the other to a donor; blocks that do not arrive return to the queue."""
        while numbers := self.take(donor, share):
            try:
                await self.fetch_blocks(donor, numbers)
            finally:
                self.queue.extendleft(reversed(numbers))

    def take(self, donor: Donor, share: float) -> list[int]:
        """Remove the blocks of the next request from the queue: fewer at the end, so that all donors end together.

        :param share: the size of the request relative to the usual one
        """
        sizes = [stop - start for _, start, stop in (self.blocks[number] for number in self.queue)]
        speed = max(FIRST_REQUEST, donor.elements) / max(MAX_REQUEST_SECONDS, time.monotonic() - donor.since)
        rest = sum(sizes) / (REQUESTS_PER_DONOR * len(self.donors))
        goal = max(min(rest, MAX_REQUEST_SECONDS * speed), MIN_REQUEST_SECONDS * speed) * share
        numbers, elements = [], 0
        while self.queue and len(numbers) < MAX_BLOCKS and (not numbers or elements + sizes[len(numbers)] <= goal):
            elements += sizes[len(numbers)]
            numbers.append(self.queue.popleft())
        return numbers

    async def fetch_blocks(self, donor: Donor, asked: list[int]) -> None:
        """Download these blocks in one request.

        :param asked: the numbers of the blocks; those that arrive are removed from this list
        :raises InvalidStateError: the blocks differ from the donor's description; network errors pass through
        """
        parts: list = []
        size = 0
        stream = await self.request(donor.peer, [*donor.key, list(asked)])
        try:
            async for message in stream:
                donor.heard = time.monotonic()
                self.received[0] += message.ByteSize()
                self.received[2] = int(1000 * (donor.heard - self.start))
                if message.metadata:
                    raise InvalidStateError(f"the donor no longer has the state of epoch {donor.key[0]}")
                if message.tensor_part.dtype and parts:  # only the first part of a block names its dtype
                    self.complete(donor, asked, parts)
                    parts, size = [], 0
                size += len(message.tensor_part.buffer)
                if not asked or size > 16 * BLOCK:
                    raise InvalidStateError("the donor sent more data than requested")
                parts.append(message.tensor_part)
            if parts:
                self.complete(donor, asked, parts)
        finally:
            await stream.aclose()
        if asked:
            raise InvalidStateError(f"the answer ended {len(asked)} blocks too early")

    def complete(self, donor: Donor, asked: list[int], parts: list) -> None:
        """Check the first of these blocks and copy it to its place in `tensors`."""
        index, start, stop = self.blocks[asked[0]]
        target = self.tensors[index].view(-1)[start:stop]
        codec, message = self.compression, combine_from_streaming(parts)
        while hasattr(codec, "choose_compression"):
            codec = codec.choose_compression(self.infos[index])
        if message.compression != codec.compression_type:
            raise InvalidStateError("the donor compresses states differently: --load_state_compression must match")
        if list(message.size) != [stop - start]:
            raise InvalidStateError(f"a block of tensor {index} has the shape {tuple(message.size)[:9]}")
        block = codec.extract(message)
        if block.dtype != target.dtype:
            raise InvalidStateError(f"tensor {index} has the dtype {block.dtype}, not {target.dtype}")
        if not block.isfinite().all():
            raise InvalidStateError(f"tensor {index} is not finite")
        if digests_differ(donor.digests[asked[0]], digest(block)):
            raise InvalidStateError(f"tensor {index} differs from the donor's description")
        target.copy_(block)
        self.received[1] += len(block)
        donor.elements += len(block)
        asked.pop(0)
