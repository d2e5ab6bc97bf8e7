"""Downloading a state, or the gradients of the step that follows it, block by block from several donors.

Several peers describe their states, and those that agree are the donors. Their digests are compared with each other
before the download, and with each block that arrives. At the end, several donors send the same blocks.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.p2p import PeerID
from hivemind.utils.streaming import combine_from_streaming

from swarm import logger, state_server
from swarm.dht import ping_peers
from swarm.state_server import NUM_SUMS, StateRequest, StateServer, allocate_flat, describe_tensors, digest, list_blocks
from swarm.trust import MAX_LEAD

MIN_TIMEOUT = 600.0  # seconds for a whole state
DOWNLOAD_PAUSE = 0.5  # seconds between two passes over the donors: short, because a state is current for one epoch
DOWNLOAD_TRIES = 16  # passes over all donors until one has the requested epoch
LONE_TRIES = 3  # the first passes, in which a single donor's state is not loaded if other donors could confirm it
MAX_FAILURES = 6  # of a client, which a relay may have caused; any other peer is excluded after two
MAX_DONORS = 8  # peers that are asked for descriptions at once, and then serve blocks: at home, each sends 10 Mbit/s

REQUESTS_PER_DONOR = 2  # concurrent requests: the donor answers one while the next one is in transit
# Seconds of upload per request. Long requests hide the latency, but at the end, others repeat those of slow donors.
MIN_REQUEST_SECONDS = 0.1
MAX_REQUEST_SECONDS = 0.5
SILENT_DONOR_TIMEOUT = 5.0  # seconds without a message until a donor is dropped, if other donors remain
FIRST_REQUEST = 2**18  # elements per request, until the donor's speed is measured
# Relative to norm + |sum|. Measured between correct peers: 0.03 with 8-bit gradients, 0.02 with 8-bit moments.
TOLERANCE = 0.1
MATRIX_FLOOR = 0.02  # relative to the RMS of all tensors of the same kind
VECTOR_FLOOR = 0.5
# Of peers that step in different groups: the same for parameters, and the ratio of the RMS of moments. Measured between
# models that had nothing in common but their first parameters: 0.46 and 2.1, one epoch apart.
NEAR_TOLERANCE = 0.5
MAX_NEAR_RATIO = 4.0


class DownloadProgress(ctypes.Structure):
    """The progress of the last download, shared between processes."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("bytes", "elements", "total_elements", "milliseconds")]


def digests_differ(digests: torch.Tensor, others: torch.Tensor, floors: torch.Tensor | float = 0.0) -> bool:
    """Return whether digests of shape (..., 1 + NUM_SUMS) describe other numbers, beyond the differences `floors`."""
    digests = digests.double()  # or huge numbers would have infinite limits
    differences = (digests - others.double()).abs()
    # the RMS of the sums estimates the norm
    rms, rms_of_difference = (it[..., 1:].square().mean(-1).sqrt() for it in (digests, differences))
    limits = TOLERANCE * (digests[..., 0].abs() + rms) + floors
    # the first digests are finite; the other ones differ if they are not
    return not ((differences[..., 0] <= limits) & (rms_of_difference <= limits)).all()


@dataclasses.dataclass(eq=False)
class Donor:
    """A peer that has described its state, and the progress of the download from it."""

    peer: PeerID
    metadata: dict
    infos: list[CompressionInfo]
    digests: torch.Tensor  # a row for each block
    rank: tuple = ()  # a larger tuple is better
    elements: int = 0  # elements received
    silence: asyncio.Timeout | None = None  # the end of the wait for the next message

    def __post_init__(self):
        """Compute the RMS of the parameters, and of each kind of moments by its name. With it, compute the difference
        of each digest that does not matter: the gradients of some biases, as of attention keys, are only rounding
        errors, which Adam turns into full-size updates."""
        blocks = list_blocks(self.infos)
        squares = Counter()
        counts = Counter()
        for (i, start, stop), norm in zip(blocks, self.digests[:, 0].tolist(), strict=True):
            squares[self.infos[i].key] += norm**2
            counts[self.infos[i].key] += stop - start
        self.rms = {kind: (squares[kind] / counts[kind]) ** 0.5 for kind in counts}
        self.num_param_blocks = sum(self.infos[i].role == TensorRole.PARAMETER for i, _, _ in blocks)
        self.floors = torch.zeros(len(blocks))
        for number, (i, start, stop) in enumerate(blocks):
            floor = MATRIX_FLOOR if len(self.infos[i].descriptor.shape) > 1 else VECTOR_FLOOR
            self.floors[number] = floor * self.rms[self.infos[i].key] * (stop - start) ** 0.5

    @property
    def key(self) -> tuple[int, str]:
        """The epoch and the lineage of the state."""
        return self.metadata["epoch"], self.metadata["lineage"]

    def has_state_of(self, other: "Donor") -> bool:
        """Return whether both donors describe the same state; of those that do, the metadata of one is used. In a log,
        parameters and outer momentum must be the same to the last bit."""
        own, others = ((it.key, it.metadata.get("group"), it.metadata.get("hashes")) for it in (self, other))
        return own == others and not digests_differ(self.digests, other.digests, self.floors)

    def measure_distance(self, other: "Donor") -> float:
        """Return how much the parameters of another donor differ, as a share of the limit for peers of one swarm that
        do not step together; infinity if they are not at about the same epoch, with moments of similar size."""
        if abs(self.key[0] - other.key[0]) > MAX_LEAD:
            return math.inf
        pairs = [(self.rms[kind], other.rms[kind]) for kind in self.rms]
        if any(max(pair) > MAX_NEAR_RATIO * min(pair) for pair in pairs):
            return math.inf
        digests, others = (donor.digests[: self.num_param_blocks, :2].double() for donor in (self, other))
        limits = NEAR_TOLERANCE * digests.abs().sum(-1, keepdim=True) + self.floors[: self.num_param_blocks, None]
        return ((digests - others).abs() / limits.clamp(min=1e-300)).max().item()


def group_donors(donors: Sequence[Donor]) -> list[list[Donor]]:
    """Group donors by state. Sort the groups by rank, size and epoch: a single donor may claim any state and epoch."""
    remaining = sorted(donors, key=lambda donor: donor.rank, reverse=True)
    groups = []
    while remaining:
        candidates = ([donor for donor in remaining if first.has_state_of(donor)] for first in remaining)
        groups.append(max(candidates, key=len))
        remaining = [donor for donor in remaining if donor not in groups[-1]]
    # the first donor of each group has its best rank
    return sorted(groups, key=lambda group: (group[0].rank, len(group), group[0].key[0]), reverse=True)


def select_agreed(
    groups: Sequence[list[Donor]], witnesses: Sequence[PeerID], is_synchronous: bool = True
) -> list[list[Donor]]:
    """Return the groups with a state that more than half of the witnesses confirm; without witnesses, all groups.

    A witness confirms the state that it describes. If the peers do not all step together, each may have a state of its
    own, and a witness also confirms those of other witnesses that are near. The most central one comes first, because a
    malicious one can be as far from the others as the limit allows.
    """
    if not witnesses:
        return list(groups)
    testimonies = [donor for group in groups for donor in group if donor.peer in witnesses]

    def measure_majority(group: list[Donor]) -> float:
        """Return the distance from this state within which those of more than half of the witnesses are."""
        own = [donor for donor in testimonies if donor in group]
        distances = [0.0] * len(own)
        if own and not is_synchronous:
            distances += [donor.measure_distance(own[0]) for donor in testimonies if donor not in own]
        return statistics.median_high(distances + [math.inf] * (len(witnesses) - len(distances)))

    measured = sorted(((measure_majority(group), group) for group in groups), key=lambda pair: pair[0])
    return [group for distance, group in measured if distance <= 1.0]


@dataclasses.dataclass(eq=False)
class StateDownload:
    """The search for a state or step, and its download from all peers with it (note 25); in the averager's process."""

    averager: StateServer
    infos: list[CompressionInfo]  # of this peer's tensors; the donors' must have the same shapes and types
    # ids of known contributors, most of which must describe the state; if none serves one, the largest group decides
    contributors: Sequence[bytes] = ()
    avoid: Sequence[bytes] = ()  # the ids of peers to ask last
    is_synchronous: bool = True  # whether all peers step together, see `select_agreed`
    # peers that accept no connections, and their epochs; they can be called only by peers that they have called
    clients: dict[PeerID, int] = dataclasses.field(default_factory=dict)
    failures: dict[PeerID, int] = dataclasses.field(default_factory=Counter)
    witnesses: list[PeerID] = dataclasses.field(default_factory=list)  # contributors, of which a majority decides

    async def fetch_step(self, epoch: int, lineage: str) -> tuple[dict, list[torch.Tensor]] | None:
        """Return the description and the averaged gradients of the step that other peers made from this state."""
        epochs = await self.find_peers(epoch + 1)
        others = [peer for peer in epochs if epochs[peer] > epoch and peer not in self.witnesses]
        others = [peer for peer in others if peer.to_bytes() not in self.avoid]
        random.shuffle(others)
        step = StateRequest(epoch, self.averager.make_step_key(lineage))
        donors = await self.ask_for_descriptions([*self.witnesses, *others], step)
        for group in select_agreed(group_donors(donors), self.witnesses):
            metadata = group[0].metadata
            if group[0].key != (step.epoch, step.lineage) or type(metadata.get("group")) is not bytes:
                continue
            if tensors := await self.download_from(group):
                return metadata | {"group": metadata["group"][: state_server.MAX_LINEAGE]}, tensors
        return None

    async def fetch_state(self, min_epoch: int, lowest_epoch: int) -> tuple[dict, list[torch.Tensor]] | None:
        """Return the newest state and its description; wait some seconds for one of at least `min_epoch`."""
        for attempt in range(DOWNLOAD_TRIES):
            await asyncio.sleep(DOWNLOAD_PAUSE if attempt else 0)
            # on the last attempt, an earlier state is better than none
            first_epoch = min_epoch if attempt < DOWNLOAD_TRIES - 1 else lowest_epoch
            epochs = await self.find_peers(min_epoch)
            peers = [peer for peer in epochs if epochs[peer] >= lowest_epoch]
            peers.sort(key=lambda peer: (self.rank(peer), epochs[peer], random.random()), reverse=True)
            if not peers and attempt >= 3:
                break  # no peer can serve a state
            if peers and not self.witnesses:  # untrusted peers that claim the highest epochs may block all others
                start = MAX_DONORS * attempt % len(peers)
                peers = peers[start:] + peers[:start]
            donors = await self.ask_for_descriptions(peers, StateRequest(first_epoch))
            for group in select_agreed(group_donors(donors), self.witnesses, self.is_synchronous):
                if not self.witnesses and len(group) == 1 and len(peers) > 2 and attempt < LONE_TRIES:
                    continue
                for donor in donors:
                    if donor.key == group[0].key and donor not in group:
                        logger.warning(f"the state of peer {donor.peer} differs from others' of the same epoch")
                if tensors := await self.download_from(group):
                    senders = sorted((donor for donor in group if donor.elements), key=lambda d: -d.elements)
                    return group[0].metadata | {"donors": [str(donor.peer) for donor in senders]}, tensors
        return None

    async def find_peers(self, min_epoch: int) -> dict[PeerID, float]:
        """Return the peers that declare a state, and its epoch. Choose the witnesses, and a relay for each client.
        Exclude unknown clients if another peer has at least the epoch before `min_epoch`."""
        declared = await self.averager.fetch_epochs()
        relays = [peer for peer, epoch in declared.items() if epoch == state_server.RELAY]
        epochs = {peer: declared[peer] for peer in declared if peer not in relays and self.failures[peer] < 2}
        relays = [peer for peer in relays if peer in self.averager.dht.initial_ids] or relays  # anyone can declare it
        # more failures are allowed, because a relay may have caused them: the next time, it may be another one
        can_call = relays or not self.averager.client_mode
        clients = {peer: it for peer, it in self.clients.items() if can_call and self.failures[peer] < MAX_FAILURES}
        contributors = {*map(PeerID, self.contributors)}
        # one that says it accepts no connections has a vote among the clients only, even if it declares a state
        witnesses = [*(contributors & epochs.keys() - self.clients.keys() or contributors & clients.keys())]
        self.witnesses = random.sample(witnesses, min(MAX_DONORS, len(witnesses)))
        if not witnesses and contributors & {*declared, *self.clients}:
            return {}  # all contributors have failed: strangers must not decide, and dead peers soon no longer count
        if any(epoch >= min_epoch - 1 for epoch in epochs.values()):
            clients = {peer: clients[peer] for peer in contributors & clients.keys()}
        needs_relay = relays and self.averager.mode != AveragingMode.AUX  # an auxiliary peer can call clients itself
        self.averager.relays = {peer: random.choice(relays) for peer in clients} if needs_relay else {}
        return epochs | clients

    def rank(self, peer: PeerID) -> tuple:
        """Return a sort key of the peers that may have the state; better ones are larger."""
        peer_id = peer.to_bytes()
        trust = peer in self.witnesses, -self.failures[peer], peer_id in self.contributors, peer_id not in self.avoid
        return *trust, peer not in self.clients

    async def ask_for_descriptions(self, peers: Sequence[PeerID], request: StateRequest) -> list[Donor]:
        """Return those of the first MAX_DONORS peers that describe the requested state. Once a peer has described it,
        the others get as much time again, and at least 1 s. If there are witnesses, more than half of them must have
        described it first, because a malicious peer may be quick."""
        donors = []

        async def ask(peer: PeerID) -> None:
            try:
                async with asyncio.timeout(self.averager.donor_timeout):
                    message = await anext(self.averager.request_state(peer, request), None)
                if message is None:
                    raise ValueError("the peer sent no description")
                if len(message.metadata) > 2**17 + sum(2**10 + it.descriptor.numel() // 2**7 for it in self.infos):
                    raise ValueError("the description is too long")  # digests have 36 bytes for 65,536 numbers
                metadata = self.averager.serializer.loads(message.metadata)
                if donor := self.parse_description(peer, metadata, request.epoch):
                    donors.append(donor)
            except Exception as e:  # untrusted bytes and a broken network can raise any exception
                self.record_failure(peer, e)
                if peer in self.witnesses and peer not in self.clients:  # clients answer no pings
                    ping = partial(ping_peers, peer_ids=[peer.to_bytes()])
                    # a dead witness would count against each state; without any witness, untrusted peers would decide
                    if not await self.averager.dht.run_coroutine(ping, return_future=True) and len(self.witnesses) > 1:
                        self.witnesses.remove(peer)

        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(ask(peer)) for peer in peers[:MAX_DONORS]]
        start = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                for answer in asyncio.as_completed(tasks):
                    await answer
                    if donors and select_agreed([donors], self.witnesses) and limit.when() is None:
                        limit.reschedule(loop.time() + max(1.0, loop.time() - start))
        for task in tasks:
            task.cancel()
        return donors

    def parse_description(self, peer: PeerID, metadata: dict, min_epoch: int) -> Donor | None:
        """Check a description against this peer's tensors; return None if the state is of an earlier epoch. Raise a
        ValueError if the state differs from this peer's; untrusted bytes can raise any other exception."""
        epoch = metadata["epoch"]
        lineage = metadata["lineage"]
        if type(epoch) is not int or type(lineage) is not str or len(lineage.encode()) > state_server.MAX_LINEAGE:
            raise ValueError("the description has no valid epoch and lineage")
        if epoch < min_epoch:
            return None
        if metadata["tensors"] != describe_tensors(info.descriptor for info in self.infos):
            raise ValueError("its tensors have other shapes or types than this peer's")
        digests = metadata["digests"]
        blocks = list_blocks(self.infos)
        if type(digests) is not bytes or len(digests) != 4 * (1 + NUM_SUMS) * len(blocks):
            raise ValueError(f"the description does not have digests for {len(blocks)} blocks")
        digests = torch.frombuffer(bytearray(digests), dtype=torch.float32).view(-1, 1 + NUM_SUMS)
        if not digests.isfinite().all():
            raise ValueError("the state is not finite")
        return Donor(peer, metadata, self.infos, digests, self.rank(peer))

    def record_failure(self, peer: PeerID, error: Exception) -> None:
        """Count the failure of a peer, and log it."""
        self.failures[peer] += 1
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        logger.info(f"the state of peer {peer} cannot be used ({reason[:200]}), trying other donors")

    async def download_from(self, group: list[Donor]) -> list[torch.Tensor] | None:
        """Download the state that all these donors have; return None if all of them fail."""
        download = BlockDownload(group, self.averager, self.record_failure)
        num_bytes = sum(tensor.nbytes for tensor in download.tensors)
        timeout = max(MIN_TIMEOUT, self.averager.dht.uplink.compute_state_timeout(num_bytes))
        await download.run(timeout)
        if not download.missing:
            return download.tensors
        for donor in download.donors:  # those that have not failed
            self.record_failure(donor.peer, ValueError(f"not complete after {timeout:.0f} s"))
            self.failures[donor.peer] += MAX_FAILURES  # another try would take as long
        return None


class BlockDownload:
    """A download of one state from several donors that have it."""

    def __init__(self, donors: Sequence[Donor], averager: StateServer, record_failure: Callable):
        self.donors = list(donors)
        self.infos = donors[0].infos
        self.averager = averager
        self.record_failure = record_failure
        self.tensors = allocate_flat(self.infos)
        self.blocks = list_blocks(self.infos)
        numbers = donors[0].digests.any(-1).nonzero().flatten().tolist()
        #: the donors that are sending each missing block; blocks of zeros, as a new momentum has, are known
        self.missing: dict[int, list[Donor]] = {number: [] for number in numbers}
        self.start = time.monotonic()
        self.progress = averager.download_progress
        self.progress.bytes = self.progress.elements = self.progress.milliseconds = 0
        self.progress.total_elements = sum(stop - start for _, start, stop in map(self.blocks.__getitem__, numbers))

    async def run(self, timeout: float) -> None:
        """Download all blocks into `tensors`; if all donors fail or are too slow, some blocks stay in `missing`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout) as self.limit:  # it ends with the last block, not the slowest donor
                await asyncio.gather(*(self.fetch_from(donor) for donor in self.donors))

    async def fetch_from(self, donor: Donor) -> None:
        """Download blocks from one donor until none is missing or the donor fails."""
        try:
            async with asyncio.timeout(self.max_silence) as donor.silence, asyncio.TaskGroup() as requests:
                for i in range(REQUESTS_PER_DONOR):
                    # different sizes, so that the requests do not finish at the same moment
                    requests.create_task(self.work(donor, 1 - 0.4 * i))
        except Exception as e:  # untrusted bytes and a broken network can raise any exception
            self.donors.remove(donor)
            self.record_failure(donor.peer, e.exceptions[0] if isinstance(e, ExceptionGroup) else e)

    @property
    def max_silence(self) -> float:
        """The time without a message until a donor is dropped, in seconds."""
        return SILENT_DONOR_TIMEOUT if len(self.donors) > 1 else self.averager.donor_timeout

    async def work(self, donor: Donor, share: float) -> None:
        """Send one request after the other to a donor."""
        while self.missing:
            if all(self.missing.values()):  # the other donors are about to end
                await asyncio.sleep(MAX_REQUEST_SECONDS)
            if numbers := self.choose(donor, share):
                try:
                    await self.fetch_blocks(donor, numbers)
                finally:
                    for number in self.missing.keys() & numbers:
                        self.missing[number].remove(donor)

    def choose(self, donor: Donor, share: float) -> list[int]:
        """Choose the blocks of the next request: fewer at the end, so that all donors end together. At last, choose
        those that other donors are sending, because one may be slow or silent."""
        free = [number for number, donors in self.missing.items() if not donors]
        late = (number for number, donors in self.missing.items() if donor not in donors)
        free = free or sorted(late, key=lambda number: len(self.missing[number]))
        sizes = [stop - start for _, start, stop in map(self.blocks.__getitem__, free)]
        speed = max(FIRST_REQUEST, donor.elements) / max(MAX_REQUEST_SECONDS, time.monotonic() - self.start)
        rest = sum(sizes) / (REQUESTS_PER_DONOR * len(self.donors))
        goal = max(min(rest, MAX_REQUEST_SECONDS * speed), MIN_REQUEST_SECONDS * speed) * share
        count = max(1, sum(elements <= goal for elements in itertools.accumulate(sizes)))
        numbers = free[: min(count, state_server.MAX_BLOCKS)]
        for number in numbers:
            self.missing[number].append(donor)
        return numbers

    async def fetch_blocks(self, donor: Donor, numbers: list[int]) -> None:
        """Download these blocks in one request, and remove those that arrive from `numbers`."""
        parts = []
        size = 0
        stream = self.averager.request_state(donor.peer, StateRequest(*donor.key, tuple(numbers)))
        async with contextlib.aclosing(stream):
            async for message in stream:
                donor.silence.reschedule(asyncio.get_running_loop().time() + self.max_silence)
                self.progress.bytes += message.ByteSize()
                self.progress.milliseconds = int(1000 * (time.monotonic() - self.start))
                if message.metadata:
                    raise ValueError(f"the donor no longer has the state of epoch {donor.key[0]}")
                parts.append(message.tensor_part)
                size += 2**12 + message.ByteSize()  # so that empty messages count as well
                if not numbers or size > 16 * state_server.BLOCK:
                    raise ValueError("the donor sent more data than requested")
                if len(parts) >= parts[0].chunks:
                    self.complete(donor, numbers, parts)
                    parts = []
                    size = 0
        if numbers:
            raise ValueError(f"the answer ended {len(numbers)} blocks too early")

    def complete(self, donor: Donor, numbers: list[int], parts: list) -> None:
        """Check the first of these blocks and copy it to its place in `tensors`."""
        index, start, stop = self.blocks[numbers[0]]
        target = self.tensors[index].view(-1)[start:stop]
        codec = self.averager.state_compression
        message = combine_from_streaming(parts)
        while hasattr(codec, "choose_compression"):
            codec = codec.choose_compression(self.infos[index])
        if message.compression != codec.compression_type:
            raise ValueError("the donor compresses states differently: `load_state_compression` must match")
        block = codec.extract(message)
        if (block.dtype, block.shape) != (target.dtype, target.shape):
            raise ValueError(f"a block of tensor {index} is of {block.dtype} and shape {tuple(block.shape)[:9]}")
        described = donor.metadata.get("hashes", b"")[state_server.HASH_BYTES * numbers[0] :][: state_server.HASH_BYTES]
        is_other = described and described != state_server.hash_exactly(block, self.infos[index])
        if is_other or digests_differ(donor.digests[numbers[0]], digest(block)):
            raise ValueError(f"tensor {index} differs from the donor's description")
        donor.elements += len(block)
        if self.missing.pop(numbers.pop(0), None):  # otherwise another donor was faster
            target.copy_(block)
            self.progress.elements += len(block)
            if not self.missing:
                self.limit.reschedule(0.0)
