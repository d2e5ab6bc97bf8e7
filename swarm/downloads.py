"""A state in blocks: a donor describes it and gives any of them; who joins fetches them from all donors that have it.
And the gradients of a step in the same way, for those who have the state before it.

Peers of one epoch and lineage have the same state but for the last bits, as they have averaged in another order
and through compression: no hash tells whether they do. Here each block is compared by its norm and its sum, between
donors before anything is fetched, and with what has arrived.
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

BLOCK = 2**16  # elements that are asked for, checked and, when a donor breaks off, asked for again together
MAX_BLOCKS = 256  # in one request
MAX_LINEAGE = 64  # bytes
UNDER_WAY = 2  # requests to each donor: while one of them is on its way, the donor answers the other
# of a donor's line that a request takes: more than that is in flight, but all wait for the slowest one at the end
LEAST_SECONDS, MOST_SECONDS = 0.1, 0.5
SHORT_PATIENCE = 5.0  # seconds without a message until a donor is given up while there are others
FIRST_REQUEST = 2**18  # elements in a request, until the donor's speed is known
# Of norm and sum together. Between honest peers with 8-bit gradients 0.03 was measured, and 0.02 through 8-bit moments.
TOLERANCE = 0.1
MATRIX_FLOOR, VECTOR_FLOOR = 0.02, 0.5  # of the usual size of their kind

# of the numbers and settings in an optimizer's state
PLAIN_TYPES = (int, float, str, type(None))
# of its tensors that are single numbers, which are tensors at one time and not at another: LAMB's trust ratio
NUMBER_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


class InvalidStateError(Exception):
    """A peer's state that this peer cannot or should not take over."""


class StaleStateError(InvalidStateError):
    """A peer's state of an earlier epoch than the one that is wanted."""


def allocate_flat(infos: Sequence[CompressionInfo]) -> list[torch.Tensor]:
    """Tensors of these shapes and types; all of a type are one piece of memory, as each piece that another process
    shares takes an open file."""
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
    """Copies, as the next step changes what is still being sent."""
    copies = allocate_flat(infos)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


def list_blocks(infos: Sequence[CompressionInfo]) -> list[tuple[int, int, int]]:
    """(tensor, start, stop) of each block: peers ask each other for blocks by their places in this list."""
    counts = [info.descriptor.numel() for info in infos]
    return [(i, at, min(at + BLOCK, count)) for i, count in enumerate(counts) for at in range(0, count, BLOCK)]


def digest(numbers: torch.Tensor) -> torch.Tensor:
    """Norm and sum."""
    numbers = numbers.float()
    return torch.stack((numbers.norm(), numbers.sum()))


def digests_differ(digests: torch.Tensor, others: torch.Tensor, floors: torch.Tensor | float = 0.0) -> bool:
    """Whether two digests, or lists of them, are not of the same numbers.

    :param floors: of what matters
    """
    sizes = digests.abs().sum(-1, keepdim=True)
    return not ((digests - others).abs() <= TOLERANCE * sizes + floors).all()  # nor where they are not finite


def parse_request(data: bytes) -> list | None:
    """What a peer asks for: [epoch] for the description of a state of at least that epoch; [epoch, digest] for that of
    the step from this state to the next one; [epoch, digest, numbers of blocks] for these blocks of what was
    described. None: nothing that a peer would ask for."""
    try:
        request = MSGPackSerializer.loads(data) if data else [0]
        if [type(part) for part in request] == [int, str, list] and 0 < len(request[2]) <= MAX_BLOCKS:
            return request if {type(number) for number in request[2]} == {int} else None
        return request if [type(part) for part in request] in ([int], [int, str]) else None
    except Exception:  # hostile bytes: the decoder raises whatever it likes
        return None


class StateSnapshot:
    """A state, or the gradients of a step, that a donor keeps while it is being fetched."""

    def __init__(self, metadata: dict, tensors: list[torch.Tensor], infos: list[CompressionInfo]):
        self.epoch, self.lineage, self.tensors, self.infos = (
            metadata["epoch"],
            metadata["lineage"],
            tensors,
            infos,
        )
        self.blocks = list_blocks(infos)
        self.taken, self.used = time.monotonic(), {}  # and when each peer has fetched something of it last
        self.description = metadata | {
            "tensors": [[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in tensors],
            "digests": torch.stack([digest(self.read(*block)) for block in self.blocks]).numpy().tobytes(),
        }

    @property
    def last_use(self) -> float:
        return max(self.used.values(), default=-math.inf)

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        return self.tensors[index].view(-1)[start:stop]

    def give(self, numbers: Sequence[int], compression: CompressionBase, peer: PeerID):
        """Messages of these blocks, to this peer."""
        for index, start, stop in (self.blocks[number] for number in numbers):
            for part in split_for_streaming(compression.compress(self.read(index, start, stop), self.infos[index])):
                self.used[peer] = time.monotonic()
                yield averaging_pb2.DownloadData(tensor_part=part)


@dataclasses.dataclass(eq=False)
class Donor:
    """A peer that has described its state, and what has come from it."""

    peer: PeerID
    metadata: dict
    infos: list[CompressionInfo]
    digests: torch.Tensor
    elements: int = 0
    since: float = 0.0
    heard: float = 0.0

    @property
    def key(self) -> tuple[int, str]:
        return self.metadata["epoch"], self.metadata["lineage"]

    @property
    def name(self) -> str:
        # an auxiliary peer says whose state it passes on
        return str(self.metadata.get("origin", self.peer))[:100]

    def has_state_of(self, other: "Donor") -> bool:
        return (
            self.key == other.key
            and [info.descriptor for info in self.infos] == [info.descriptor for info in other.infos]
            and not digests_differ(self.digests, other.digests, self.compute_digest_tolerances())
        )

    def compute_digest_tolerances(self) -> torch.Tensor:
        """For each digest, the difference that does not matter beside other numbers of its kind (parameters, or one of
        the moments): gradients of some biases, those of an attention's keys, are nothing but what was rounded off, and
        Adam makes steps of full length of them, which differ from peer to peer."""
        of_optimizer = [i for i, info in enumerate(self.infos) if info.role == TensorRole.OPTIMIZER]
        with_numbers = [i for i in of_optimizer if self.infos[i].descriptor.shape]
        moments = max(1, len(with_numbers) // max(1, len(self.infos) - len(of_optimizer)))
        kinds = {i: (self.infos[i].descriptor.dtype, place % moments) for place, i in enumerate(with_numbers)}
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
    """
    :param tensors: this peer's own, and the optimizer's state: the donor's have to be like these
    :param optimizer: None where only tensors are wanted
    :raises InvalidStateError: something is missing or wrong
    """
    if not isinstance(metadata, dict) or not isinstance(metadata.get("lineage"), str):
        raise InvalidStateError("it has no lineage")
    if len(metadata["lineage"].encode()) > MAX_LINEAGE:
        raise InvalidStateError("its lineage is too long")
    if type(metadata.get("epoch")) is not int:
        raise InvalidStateError("it has no epoch")
    if metadata["epoch"] < min_epoch:
        raise StaleStateError(f"it is of epoch {metadata['epoch']}, {min_epoch} is wanted")
    expected, plain_numbers = list(tensors), []
    own, own_tensors = dump_optimizer_state(optimizer) if optimizer else ([], [])
    theirs, count = metadata.get("optimizer_metadata", []), 0
    if not isinstance(theirs, list) or len(theirs) != len(own):
        raise InvalidStateError("its optimizer differs")
    for item, own_item in zip(theirs, own, strict=True):
        own_tensor = own_tensors[own_item["index"]] if own_item["type"] == "tensor" else torch.zeros(())
        if item == {"type": "tensor", "index": count}:
            expected.append((own_tensor, TensorRole.OPTIMIZER))
            count += 1
        elif own_tensor.ndim or set(item) != {"type", "value"} or not isinstance(item["value"], PLAIN_TYPES):
            raise InvalidStateError("its optimizer differs")
        elif isinstance(item["value"], (int, float)):
            plain_numbers.append([float(item["value"])] * 2)
    described = metadata.get("tensors")
    if not isinstance(described, list) or len(described) != len(expected):
        raise InvalidStateError(f"it does not have {len(expected)} tensors")
    infos = []
    for index, ((tensor, role), (name, *shape)) in enumerate(zip(expected, described, strict=True)):
        if shape != list(tensor.shape):
            raise InvalidStateError(f"tensor {index} has the shape {tuple(shape)[:9]}")
        types = {str(tensor.dtype).removeprefix("torch."): tensor.dtype} | (NUMBER_TYPES if not shape else {})
        if name not in types:
            raise InvalidStateError(f"tensor {index} is of type {str(name)[:20]}")
        infos.append(CompressionInfo(index, TensorDescriptor(tensor.shape, types[name]), role))
    digests = torch.frombuffer(bytearray(metadata["digests"]), dtype=torch.float32).view(-1, 2)
    if len(digests) != len(list_blocks(infos)):
        raise InvalidStateError("its digests are not those of its tensors")
    digests = torch.cat((digests, torch.tensor(plain_numbers).view(-1, 2)))
    if not digests.isfinite().all():
        raise InvalidStateError("it is not finite")
    return Donor(peer, metadata, infos, digests)


def group_donors(donors: Sequence[Donor], ranks: dict[PeerID, tuple]) -> list[list[Donor]]:
    """Donors that have the same state together; in the order of rank, then how many have it, then epoch: one of them
    may lie, about both."""
    left, groups = sorted(donors, key=lambda donor: ranks[donor.peer], reverse=True), []
    while left:
        groups.append(max(([donor for donor in left if first.has_state_of(donor)] for first in left), key=len))
        left = [donor for donor in left if donor not in groups[-1]]
    # the first of a group has its best rank
    return sorted(groups, key=lambda group: (ranks[group[0].peer], len(group), group[0].key[0]), reverse=True)


def select_agreed(groups: Sequence[list[Donor]], voters: Sequence[PeerID]) -> list[list[Donor]]:
    """The group of donors in which more than half of the voters are, if there is one; all groups without voters."""
    return [g for g in groups if not voters or 2 * sum(donor.peer in voters for donor in g) > len(voters)]


class MultiSourceDownload:
    """A state that is put together from blocks of several donors, which have the same one.

    :param request: asks a peer for something, see `parse_request`, and returns the stream of its answer
    :param patience: returns the seconds without a message after which the only donor is given up
    :param compression: all peers' own, as hivemind has it
    :param received: counts what comes: bytes, elements, milliseconds
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
        #: numbers of blocks that nobody has been asked for
        self.queue = deque(range(len(self.blocks)))
        self.start = time.monotonic()

    async def fetch(self, note_failure: Callable[[PeerID, Exception], None]) -> bool:
        """Fetch all blocks into `tensors`; returns whether they came, as donors may fail one after the other."""
        while self.queue and self.donors:
            # a donor that fails gives back what it was asked for, maybe when the others have ended
            await asyncio.gather(*(self.fetch_from(donor, note_failure) for donor in self.donors))
        return not self.queue

    async def fetch_from(self, donor: Donor, note_failure: Callable[[PeerID, Exception], None]) -> None:
        """Fetch blocks of this donor until none is left to ask for, or it fails."""
        donor.heard = time.monotonic()
        donor.since = donor.since or donor.heard
        # requests of different sizes do not end at the same moment
        tasks = {asyncio.create_task(self.work(donor, 1 - 0.4 * i)) for i in range(UNDER_WAY)}
        pending = tasks
        try:
            while pending:
                patience = SHORT_PATIENCE if len(self.donors) > 1 else self.patience()
                left = donor.heard + patience - time.monotonic()
                if left <= 0:
                    raise InvalidStateError(f"nothing has come from it for {patience:.0f} s")
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except Exception as e:  # a stranger's bytes and a broken network raise whatever they like
            self.donors.remove(donor)
            note_failure(donor.peer, e)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def work(self, donor: Donor, share: float) -> None:
        while asked := self.take(donor, share):
            try:
                await self.fetch_blocks(donor, asked)
            finally:
                self.queue.extendleft(reversed(asked))

    def take(self, donor: Donor, share: float) -> list[int]:
        """Blocks to ask this donor for next: fewer towards the end, which all donors should reach together."""
        sizes = [stop - start for _, start, stop in (self.blocks[number] for number in self.queue)]
        speed = max(FIRST_REQUEST, donor.elements) / max(MOST_SECONDS, time.monotonic() - donor.since)
        rest = sum(sizes) / (UNDER_WAY * len(self.donors))
        goal, taken, elements = max(min(rest, MOST_SECONDS * speed), LEAST_SECONDS * speed) * share, [], 0
        while self.queue and len(taken) < MAX_BLOCKS and (not taken or elements + sizes[len(taken)] <= goal):
            elements += sizes[len(taken)]
            taken.append(self.queue.popleft())
        return taken

    async def fetch_blocks(self, donor: Donor, asked: list[int]) -> None:
        """Ask for these blocks in one request; those that arrive come off the list.

        :raises InvalidStateError: they are not what the donor has described; or whatever the network causes
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
                    raise InvalidStateError(f"it no longer has the state of epoch {donor.key[0]}")
                if message.tensor_part.dtype and parts:  # the first part of a block names its type
                    self.complete(donor, asked, parts)
                    parts, size = [], 0
                size += len(message.tensor_part.buffer)
                if not asked or size > 16 * BLOCK:
                    raise InvalidStateError("it sent more than it was asked for")
                parts.append(message.tensor_part)
            if parts:
                self.complete(donor, asked, parts)
        finally:
            await stream.aclose()
        if asked:
            raise InvalidStateError(f"it ended {len(asked)} blocks too early")

    def complete(self, donor: Donor, asked: list[int], parts: list) -> None:
        """Check the first of these blocks, and put it where it belongs."""
        index, start, stop = self.blocks[asked[0]]
        target = self.tensors[index].view(-1)[start:stop]
        codec, message = self.compression, combine_from_streaming(parts)
        while hasattr(codec, "choose_compression"):
            codec = codec.choose_compression(self.infos[index])
        if message.compression != codec.compression_type:
            raise InvalidStateError("it compresses states in another way: --load_state_compression differs")
        if list(message.size) != [stop - start]:
            raise InvalidStateError(f"tensor {index} has blocks of the shape {tuple(message.size)[:9]}")
        block = codec.extract(message)
        if block.dtype != target.dtype:
            raise InvalidStateError(f"tensor {index} is of type {block.dtype}")
        if not block.isfinite().all():
            raise InvalidStateError(f"tensor {index} is not finite")
        if digests_differ(donor.digests[asked[0]], digest(block)):
            raise InvalidStateError(f"tensor {index} is not the one that it has described")
        target.copy_(block)
        self.received[1] += len(block)
        donor.elements += len(block)
        asked.pop(0)
