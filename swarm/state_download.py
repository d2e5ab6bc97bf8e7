"""Downloading a state, or the gradients of the step that follows it, block by block from several donors.

Several peers describe their states, and those that agree are the donors. Their digests are compared with each other
before the download, and with each block that arrives. All donors take blocks from one queue.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.state_averager import dump_optimizer_state
from hivemind.p2p import PeerID
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.streaming import combine_from_streaming
from hivemind.utils.tensor_descr import TensorDescriptor

from swarm.state_server import (
    BLOCK,
    MAX_BLOCKS,
    MAX_LINEAGE,
    RELAY,
    StateServer,
    allocate_flat,
    digest,
    list_blocks,
    make_step_key,
)

logger = logging.getLogger("swarm")

DOWNLOAD_PAUSE = 0.5  # seconds between two passes over the donors: short, because a state is current for one epoch
DOWNLOAD_TRIES = 16  # passes over all donors until one has the requested epoch
LONE_TRIES = 3  # the first passes, in which a single donor's state is not loaded if other donors could confirm it
MAX_DONORS = 8  # peers that are asked for descriptions at once, and then serve blocks: at home, each sends 10 Mbit/s

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


class DownloadProgress(ctypes.Structure):
    """The progress of the last download, shared between processes."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("bytes", "elements", "total_elements", "milliseconds")]


def digests_differ(digests: torch.Tensor, others: torch.Tensor, floors: torch.Tensor | float = 0.0) -> bool:
    """Return whether two digests, or two lists of digests, describe different numbers.

    :param digests: the finite digests, of shape (2,) or (blocks, 2)
    :param others: the other digests, which differ if they are not finite
    :param floors: the absolute differences that do not matter
    """
    sizes = digests.abs().sum(-1, keepdim=True)
    return not ((digests - others).abs() <= TOLERANCE * sizes + floors).all()


@dataclasses.dataclass(eq=False)
class Donor:
    """A peer that has described its state, and the progress of the download from it."""

    peer: PeerID
    metadata: dict
    infos: list[CompressionInfo]
    digests: torch.Tensor  # one row per block, then one per plain number of the optimizer
    elements: int = 0  # elements received
    since: float = 0.0  # time of the first request
    silence: asyncio.Timeout | None = None  # the end of the wait for the next message

    @property
    def key(self) -> tuple[int, str]:
        """The epoch and the lineage of the state."""
        return self.metadata["epoch"], self.metadata["lineage"]

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
        moments = [i for i, info in enumerate(self.infos) if info.role == TensorRole.OPTIMIZER]
        params = len(self.infos) - len(moments)
        moments = [i for i in moments if self.infos[i].descriptor.shape]
        moments_per_param = max(1, len(moments) // max(1, params))
        kinds = {i: (self.infos[i].descriptor.dtype, at % moments_per_param) for at, i in enumerate(moments)}
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


@dataclasses.dataclass(eq=False)
class StateDownload:
    """The search for peers that have a state or a step, and the download from them; in the averager's process.

    Some of the peers may fail. hivemind (note 25) retries forever, accepts states unchecked, and crashes on a truncated
    answer.
    """

    averager: StateServer
    params: Sequence[torch.Tensor]  # of this peer; the donors' must have the same shapes and dtypes
    optimizer: torch.optim.Optimizer | None  # of this peer; the donors' state must match it. None to download a step
    # the ids of peers that are known to have worked: more than half of them must describe the state. If none of them
    # serves a state, the largest group decides
    trusted: Sequence[bytes]
    avoid: Sequence[bytes]  # the ids of peers to ask last
    timeout: float  # seconds for a whole state
    failures: dict[PeerID, int] = dataclasses.field(default_factory=Counter)
    voters: list[PeerID] = dataclasses.field(default_factory=list)  # the peers that decide which state is the swarm's

    async def fetch_step(self, epoch: int, lineage: str) -> tuple[dict, list[torch.Tensor]] | None:
        """Return the description and the averaged gradients of the step that other peers made from this state."""
        epochs = await self.averager.fetch_epochs("all_averagers")
        self.choose_voters(epochs)
        others = [peer for peer, their_epoch in epochs.items() if epoch < their_epoch < RELAY]
        others = [peer for peer in others if peer.to_bytes() not in self.avoid and peer not in self.voters]
        random.shuffle(others)
        peers = [*self.voters, *others][:MAX_DONORS]
        candidates = await self.ask_for_descriptions(peers, [epoch, lineage])
        for group in select_agreed(group_donors(candidates, dict.fromkeys(peers, ())), self.voters):
            is_step = group[0].key == (epoch, make_step_key(lineage))
            if is_step and type(group[0].metadata.get("group")) is bytes and (tensors := await self.fetch_from(group)):
                return group[0].metadata, tensors
        return None

    async def fetch_state(self, min_epoch: int, lowest_epoch: int) -> tuple[dict, list[torch.Tensor]] | None:
        """Return the newest state and its description, see `StateAverager.start_download`.

        :param min_epoch: the epoch to wait for, some seconds, before an earlier state is accepted
        :param lowest_epoch: the earliest epoch to accept
        """
        for attempt in range(DOWNLOAD_TRIES):
            await asyncio.sleep(DOWNLOAD_PAUSE if attempt else 0)
            # on the last attempt, an earlier state is better than none
            first_epoch = min_epoch if attempt < DOWNLOAD_TRIES - 1 else lowest_epoch
            ranks = await self.rank_peers(min_epoch, first_epoch, lowest_epoch)
            if not ranks and attempt >= 3:
                break  # no peer can serve a state
            peers = list(ranks)
            batches = [peers[at : at + MAX_DONORS] for at in range(0, len(peers), MAX_DONORS)]
            # all voters are in the first batch, and batches without voters cannot decide
            for batch in batches[:1] if self.voters else batches:
                candidates = await self.ask_for_descriptions(batch, [first_epoch])
                for group in select_agreed(group_donors(candidates, ranks), self.voters):
                    if not self.voters and len(group) == 1 and len(ranks) > 2 and attempt < LONE_TRIES:
                        continue
                    for donor in candidates:
                        if donor.key == group[0].key and donor not in group:
                            logger.warning(f"the state of peer {donor.peer} differs from others' of the same epoch")
                    if tensors := await self.fetch_from(group):
                        senders = sorted((donor for donor in group if donor.elements), key=lambda d: -d.elements)
                        # an auxiliary peer names the client that it relays
                        names = [str(donor.metadata.get("origin", donor.peer))[:100] for donor in senders]
                        return group[0].metadata | {"donors": list(dict.fromkeys(names))}, tensors
        return None

    def choose_voters(self, epochs: dict[PeerID, float]) -> None:
        """Choose a random sample of the trusted peers that serve a state and have not failed twice."""
        voters = [peer for peer in epochs if peer.to_bytes() in self.trusted and self.failures[peer] < 2]
        self.voters = random.sample(voters, min(MAX_DONORS, len(voters)))

    async def rank_peers(self, min_epoch: int, first_epoch: int, lowest_epoch: int) -> dict[PeerID, tuple]:
        """Choose the voters, and return the ranks of the peers that may have the state, best first."""
        epochs = await self.averager.fetch_epochs("all_averagers")
        self.choose_voters(epochs)
        # trainers that have the epoch rank before auxiliary peers, which relay it from a client
        kinds = {peer: 2 if first_epoch <= epoch < RELAY else 1 for peer, epoch in epochs.items()}
        if self.averager.mode != AveragingMode.CLIENT:
            # clients come last, because only the peers that they have called can reach them
            has_newest = any(min_epoch - 1 <= epoch < RELAY for epoch in epochs.values())
            clients = await self.averager.fetch_epochs("clients")
            epochs |= {peer: clients[peer] for peer in clients if not has_newest or peer.to_bytes() in self.trusted}
        ranks = {}
        for peer, epoch in epochs.items():
            failures, is_trusted = self.failures[peer], peer.to_bytes() in self.trusted
            if epoch >= lowest_epoch and failures < (2 if epoch < RELAY else 6):
                is_first_choice = peer.to_bytes() not in self.avoid
                ranks[peer] = peer in self.voters, -failures, is_trusted, is_first_choice, kinds.get(peer, 0)
        order = sorted(ranks, key=lambda peer: (ranks[peer], epochs[peer], random.random()), reverse=True)
        return {peer: ranks[peer] for peer in order}

    async def ask_for_descriptions(self, peers: Sequence[PeerID], request: list) -> list[Donor]:
        """Return the peers that describe the requested state, see `parse_request`.

        Once a peer has described it, the others get as much time again, and at least 1 s. With voters, more than half
        of them must have described it first, because a malicious peer may be quick.
        """
        donors = []

        async def ask(peer: PeerID) -> None:
            try:
                async with (
                    asyncio.timeout(self.averager.donor_timeout),
                    contextlib.aclosing(self.averager.request_state(peer, request)) as stream,
                ):
                    if (message := await anext(stream, None)) is None:
                        raise InvalidStateError("the peer sent no description")
                if donor := self.parse_description(peer, MSGPackSerializer.loads(message.metadata), request[0]):
                    donors.append(donor)
            except Exception as e:  # untrusted bytes and a broken network can raise any exception
                self.note_failure(peer, e)

        start, tasks = time.monotonic(), [asyncio.create_task(ask(peer)) for peer in peers]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                for answer in asyncio.as_completed(tasks):
                    await answer
                    votes = sum(donor.peer in self.voters for donor in donors)
                    has_enough = donors and (not self.voters or 2 * votes > len(self.voters))
                    if has_enough and limit.when() is None:
                        seconds = max(1.0, time.monotonic() - start)
                        limit.reschedule(asyncio.get_running_loop().time() + seconds)
        for task in tasks:
            task.cancel()
        return donors

    def parse_description(self, peer: PeerID, metadata: object, min_epoch: int) -> Donor | None:
        """Parse a peer's description of its state and check it against this peer's tensors.

        :returns: the donor, or None if its state is of an earlier epoch than `min_epoch`
        :raises InvalidStateError: the description is incomplete, or the state differs from this peer's
        """
        if not isinstance(metadata, dict) or type(metadata.get("epoch")) is not int:
            raise InvalidStateError("the description has no epoch")
        if not isinstance(metadata.get("lineage"), str) or len(metadata["lineage"].encode()) > MAX_LINEAGE:
            raise InvalidStateError("the description has no lineage, or one that is too long")
        if metadata["epoch"] < min_epoch:
            return None
        expected = [(param, TensorRole.PARAMETER if self.optimizer else TensorRole.GRADIENT) for param in self.params]
        own, own_tensors = dump_optimizer_state(self.optimizer) if self.optimizer else ([], [])
        theirs, plain_numbers = metadata.get("optimizer_metadata", []), []
        if not isinstance(theirs, list) or len(theirs) != len(own):
            raise InvalidStateError("the optimizer's state differs from this peer's")
        for item, own_item in zip(theirs, own, strict=True):
            own_tensor = own_tensors[own_item["index"]] if own_item["type"] == "tensor" else torch.zeros(())
            if item == {"type": "tensor", "index": len(expected) - len(self.params)}:
                expected.append((own_tensor, TensorRole.OPTIMIZER))
            elif own_tensor.ndim or set(item) != {"type", "value"} or not isinstance(item["value"], PLAIN_TYPES):
                raise InvalidStateError("the optimizer's state differs from this peer's")
            elif isinstance(item["value"], (int, float)):
                plain_numbers.append([float(item["value"])] * 2)
        descriptions = metadata.get("tensors")
        if not isinstance(descriptions, list) or len(descriptions) != len(expected):
            raise InvalidStateError(f"the state does not have {len(expected)} tensors, as this peer's has")
        infos = []
        for index, ((tensor, role), (name, *shape)) in enumerate(zip(expected, descriptions, strict=True)):
            types = {str(tensor.dtype).removeprefix("torch."): tensor.dtype} | (NUMBER_TYPES if not shape else {})
            if shape != list(tensor.shape) or name not in types:
                described = f"{str(name)[:20]} {tuple(shape)[:9]}"
                raise InvalidStateError(f"tensor {index} is {described}, not {tensor.dtype} {tuple(tensor.shape)}")
            infos.append(CompressionInfo(index, TensorDescriptor(tensor.shape, types[name]), role))
        digests = torch.frombuffer(bytearray(metadata["digests"]), dtype=torch.float32).view(-1, 2)
        if len(digests) != len(list_blocks(infos)):
            raise InvalidStateError(f"the description has {len(digests)} digests for {len(list_blocks(infos))} blocks")
        digests = torch.cat((digests, torch.tensor(plain_numbers).view(-1, 2)))
        if not digests.isfinite().all():
            raise InvalidStateError("the state is not finite")
        return Donor(peer, metadata, infos, digests)

    def note_failure(self, peer: PeerID, error: Exception) -> None:
        """Count the failure of a peer, and log it."""
        self.failures[peer] += 1
        reason = str(error) if isinstance(error, InvalidStateError) else repr(error)[:200]
        logger.info(f"the state of peer {peer} cannot be used ({reason}), trying other donors")

    async def fetch_from(self, group: list[Donor]) -> list[torch.Tensor] | None:
        """Download the state that all these donors have; return None if all of them fail."""
        download = BlockDownload(group, self.averager, self.note_failure)
        try:
            async with asyncio.timeout(self.timeout):
                await download.run()
        except TimeoutError:
            for donor in download.donors:
                self.note_failure(donor.peer, InvalidStateError(f"not complete after {self.timeout:.0f} s"))
        return None if download.queue else download.tensors


class BlockDownload:
    """A download of one state from several donors that have it."""

    def __init__(self, donors: Sequence[Donor], averager: StateServer, note_failure: Callable):
        self.donors, self.infos = list(donors), donors[0].infos
        self.averager, self.note_failure = averager, note_failure
        self.tensors, self.blocks = allocate_flat(self.infos), list_blocks(self.infos)
        #: numbers of the blocks that are still to be requested
        self.queue = deque(range(len(self.blocks)))
        self.start, self.progress = time.monotonic(), averager.download_progress
        self.progress.bytes = self.progress.elements = self.progress.milliseconds = 0
        self.progress.total_elements = sum(tensor.numel() for tensor in self.tensors)

    async def run(self) -> None:
        """Download all blocks into `tensors`; if all donors fail, some blocks stay in `queue`."""
        while self.queue and self.donors:
            # the blocks of a failed donor return to the queue, perhaps after the other donors have finished
            await asyncio.gather(*(self.fetch_from(donor) for donor in self.donors))

    async def fetch_from(self, donor: Donor) -> None:
        """Download blocks from one donor until the queue is empty or the donor fails."""
        donor.since = donor.since or time.monotonic()
        try:
            async with asyncio.timeout(self.max_silence) as donor.silence, asyncio.TaskGroup() as requests:
                for i in range(REQUESTS_PER_DONOR):
                    # different sizes, so that the requests do not finish at the same moment
                    requests.create_task(self.work(donor, 1 - 0.4 * i))
        except Exception as e:  # untrusted bytes and a broken network can raise any exception
            self.donors.remove(donor)
            self.note_failure(donor.peer, e.exceptions[0] if isinstance(e, ExceptionGroup) else e)

    @property
    def max_silence(self) -> float:
        """The time without a message until a donor is dropped, in seconds."""
        return SILENT_DONOR_TIMEOUT if len(self.donors) > 1 else self.averager.donor_timeout

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

    async def fetch_blocks(self, donor: Donor, numbers: list[int]) -> None:
        """Download these blocks in one request.

        :param numbers: the numbers of the blocks; those that arrive are removed from this list
        :raises InvalidStateError: the blocks differ from the donor's description; network errors pass through
        """
        parts, size = [], 0
        request = [*donor.key, list(numbers)]
        async with contextlib.aclosing(self.averager.request_state(donor.peer, request)) as stream:
            async for message in stream:
                donor.silence.reschedule(asyncio.get_running_loop().time() + self.max_silence)
                self.progress.bytes += message.ByteSize()
                self.progress.milliseconds = int(1000 * (time.monotonic() - self.start))
                if message.metadata:
                    raise InvalidStateError(f"the donor no longer has the state of epoch {donor.key[0]}")
                if message.tensor_part.dtype and parts:  # only the first part of a block names its dtype
                    self.complete(donor, numbers, parts)
                    parts, size = [], 0
                size += len(message.tensor_part.buffer)
                if not numbers or size > 16 * BLOCK:
                    raise InvalidStateError("the donor sent more data than requested")
                parts.append(message.tensor_part)
        if parts:
            self.complete(donor, numbers, parts)
        if numbers:
            raise InvalidStateError(f"the answer ended {len(numbers)} blocks too early")

    def complete(self, donor: Donor, numbers: list[int], parts: list) -> None:
        """Check the first of these blocks and copy it to its place in `tensors`."""
        index, start, stop = self.blocks[numbers[0]]
        target = self.tensors[index].view(-1)[start:stop]
        codec, message = self.averager.state_compression, combine_from_streaming(parts)
        while hasattr(codec, "choose_compression"):
            codec = codec.choose_compression(self.infos[index])
        if message.compression != codec.compression_type:
            raise InvalidStateError("the donor compresses states differently: `load_state_compression` must match")
        if list(message.size) != [stop - start]:
            raise InvalidStateError(f"a block of tensor {index} has the shape {tuple(message.size)[:9]}")
        block = codec.extract(message)
        if block.dtype != target.dtype:
            raise InvalidStateError(f"tensor {index} has the dtype {block.dtype}, not {target.dtype}")
        if not block.isfinite().all():
            raise InvalidStateError(f"tensor {index} is not finite")
        if digests_differ(donor.digests[numbers[0]], digest(block)):
            raise InvalidStateError(f"tensor {index} differs from the donor's description")
        target.copy_(block)
        self.progress.elements += len(block)
        donor.elements += len(block)
        numbers.pop(0)
