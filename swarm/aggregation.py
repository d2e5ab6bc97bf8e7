"""The arithmetic of rounds of local steps: encode an update, check the blocks of other peers, and apply a commit.

The numbers of the model's tensors are cut into blocks. Each block of an update is a message of `swarm/sparse.py`. All
peers apply the same blocks, so their anchors stay equal to the last bit (DiLoCo's outer step, arXiv 2311.08105; all
updates go to all peers, as in SparseLoCo, arXiv 2508.15706). Machines differ in instruction sets and threads, so:

- tensors change by single float32 multiplications and additions in a fixed order, because `add_(alpha=)`, `addcmul`,
  `lerp`, `sum` and `@` round differently on different machines;
- norms come from counts of equal numbers and `math.fsum`, cosines from integers, weights from Python's floats;
- numbers below TINY become 0, because some programs make the processor treat numbers below 1.2e-38 as 0.

Each weight depends on all offers, so each update is measured first, and decoded again when it is applied. Each peer
also compares the last updates with its own one before compression, and tells the others (`find_opposed`).
Limits: a peer evades the rule against copies by changing a tenth of the entries, and half of the peers can do anything.
"""

import contextlib
import hashlib
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swarm.sparse import CHUNK, TINY, TopKCompression, decode

BLOCK = 2**20  # numbers
PIECE = 2**17  # numbers that the outer step changes at once, as more would need more memory
MAX_SAMPLES = 2  # of an offer, relative to the median
OTHERS_WEIGHT = 1 / 3  # of the offers of all other peers than voters, relative to that of the voters' offers
MIN_COSINE = -0.012  # median cosine of an offer with the voters' offers; below it, the offer points away from them
MAX_COSINE = 0.9  # of two offers; with a larger one, they are copies
BUCKETS = 2**16  # of a sketch; the error of a cosine of two sketches is about 1 / sqrt(BUCKETS)
SKETCH_SCALE = 2.0**20  # of the norm of a sketch: products of two sketches are exact, as whole numbers below 2 ** 53


class Numbers:
    """The numbers of a list of tensors, in blocks. The blocks are views, so the tensors must keep their memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """:param tensors: contiguous float32 tensors; of an update or a residual on any device, else in host memory"""
        self.total = sum(tensor.numel() for tensor in tensors)
        self.num_blocks = -(-self.total // BLOCK)
        self.pieces: list[list[torch.Tensor]] = [[] for _ in range(self.num_blocks)]  # by block
        end = 0
        for tensor in tensors:
            rest = tensor.detach().view(-1)
            while len(rest):
                piece, rest = rest.tensor_split([PIECE - end % PIECE])
                self.pieces[end // BLOCK].append(piece)
                end += len(piece)

    def count(self, block: int) -> int:
        """Return the number of numbers in a block; only the last block has less than BLOCK."""
        return min(BLOCK, self.total - block * BLOCK)

    def read(self, block: int) -> torch.Tensor:
        """Return a copy of a block in host memory, of shape (count,)."""
        return torch.cat(self.pieces[block]).cpu()

    def write(self, block: int, values: torch.Tensor) -> None:
        """Change the numbers of a block to these values, of shape (count,)."""
        for piece, part in zip(self.pieces[block], values.split([*map(len, self.pieces[block])]), strict=True):
            piece.copy_(part)


@dataclass(frozen=True)
class Contribution:
    """An offer of a commit: an encoded update and what its weight depends on."""

    peer: bytes
    samples: int
    epochs_late: int  # between the offer's base and the parent of the commit
    blocks: Sequence[bytes]  # may be a reader of files
    is_voter: bool = True


def encode(update: Numbers, residual: Numbers, codec: TopKCompression) -> list[bytes]:
    """Return the encoded blocks of update + residual; the residual becomes what they lack (error feedback).

    :raises ValueError: a number is not finite, or too large for the codec; the residual is then invalid
    """
    blocks = []
    for index in range(residual.num_blocks):
        for piece, part in zip(residual.pieces[index], update.pieces[index], strict=True):
            piece.add_(part.to(piece.device))
        blocks.append(codec.compress(residual.read(index)))
    restore(blocks, residual, sign=-1)
    return blocks


def restore(blocks: Sequence[bytes], residual: Numbers, sign: int = 1) -> None:
    """Add an update that no commit contains to the residual, or with the sign -1, subtract it."""
    for index, block in enumerate(blocks):
        values = residual.read(index)
        positions, kinds, decoded = decode(block, len(values))
        values.numpy()[positions] += (sign * decoded)[kinds]
        residual.write(index, values)


def check_block(data: bytes, numbers: int, codec: TopKCompression) -> None:
    """Check a block of another peer on arrival, before it is stored and served.

    :param numbers: the count of numbers in the block
    :raises ValueError: the block is invalid, or has more entries or bits than the codec sends
    """
    positions, _, values = decode(data, numbers)
    chunks = -(-numbers // CHUNK)
    if len(values) != chunks << codec.bits or len(positions) > chunks * math.ceil(codec.density * CHUNK):
        raise ValueError(f"a block of {numbers} numbers has {len(positions)} entries in {len(values)} kinds")


def summarize(blocks: Sequence[bytes], numbers: Numbers, seed: bytes) -> tuple[float, np.ndarray]:
    """Return the norm of an update of as many numbers as `numbers` has, and its sketch, of shape (BUCKETS,).

    An invalid one has no norm, so it does not count: its owner may have named blocks of other blobs as its own. A
    sketch holds the sum of the numbers in each bucket, where a hash of the position chooses the bucket, and whether the
    number counts as negative (count sketch, Charikar et al., 2002). It is rounded, relative to the norm.

    :param seed: of the hash. No owner but the leader knows it in time: numbers could hide the direction of the rest
    """
    squares = []
    sketch = np.zeros(2 * BUCKETS)
    factor, offset = np.frombuffer(hashlib.sha256(seed).digest()[:16], "<u8")
    for block in range(numbers.num_blocks):
        try:
            positions, kinds, values = decode(blocks[block], numbers.count(block))
        except (ValueError, IndexError):
            return 0.0, np.zeros(BUCKETS)
        of_kind = np.bincount(kinds, minlength=len(values))
        squares.append(math.fsum((of_kind * np.square(values, dtype=np.float64)).tolist()))
        hashes = (positions.astype(np.uint64) + np.uint64(block * BLOCK) + offset) * (factor | np.uint64(1))
        # a product alone is linear: a leader could find a seed with which certain positions cancel each other
        hashes = (hashes ^ hashes >> np.uint64(32)) * (factor | np.uint64(1))
        sketch += np.bincount((hashes >> np.uint64(47)).astype(np.int64), values[kinds], 2 * BUCKETS)
    norm = math.sqrt(math.fsum(squares))
    return norm, np.rint((sketch[:BUCKETS] - sketch[BUCKETS:]) * (SKETCH_SCALE / norm if norm else 0.0))


def find_opposed(residual: Numbers, own: Sequence[bytes], others: Sequence[Sequence[bytes]]) -> list[int]:
    """Return the indices of the other peers' updates that point away from this peer's, before compression.

    Compressed updates share few positions, so one may avoid those of all others, and look like noise to them. No update
    can avoid the positions of one that is whole.

    :param residual: the rest of this peer's update, which its blocks lack
    """
    products = np.zeros(len(others))
    squares = np.zeros(len(others))
    square = 0.0
    for block in range(residual.num_blocks):
        whole = residual.read(block).numpy()
        positions, kinds, values = decode(own[block], len(whole))
        whole[positions] += values[kinds]
        square += float(np.dot(whole, whole))
        for index, blocks in enumerate(others):
            with contextlib.suppress(ValueError, IndexError):  # an invalid update does not count anyway
                positions, kinds, values = decode(blocks[block], len(whole))
                entries = values[kinds].astype(np.float64)
                products[index] += entries @ whole[positions]
                squares[index] += entries @ entries
    return np.flatnonzero(products < MIN_COSINE * np.sqrt(square * squares)).tolist()


def compute_cosines(sketches: Sequence[np.ndarray]) -> list[list[float]]:
    """Return the cosine of each two sketches, 0 if one of them is empty."""
    products = (np.stack(sketches) @ np.stack(sketches).T).tolist()
    norms = [math.sqrt(row[i]) or math.inf for i, row in enumerate(products)]
    return [[it / (a * b) for it, b in zip(row, norms, strict=True)] for row, a in zip(products, norms, strict=True)]


def find_agreement(cosines: list[list[float]], index: int, others: Collection[int]) -> float:
    """Return the upper median cosine of a contribution with the others: two of five contributions cannot decide."""
    return statistics.median_high([cosines[index][i] for i in others if i != index] or [0.0])


def compute_weights(offers: Sequence[Contribution], numbers: Numbers, seed: bytes) -> list[float]:
    """Return the factor of each contribution in the sum: its share of the samples, times a factor that clips its norm.

    Samples count up to MAX_SAMPLES times the median, and half for each epoch that the offer is late. Norms are clipped
    to the median (arXiv 2603.08163). Of an even number, the median is the lower middle value. Copies share the weight
    of the heaviest, because a copy must not remove the original. Empty offers do not count. Offers that point away from
    most others do not count either, unless half of the voters' offers do.

    New keys cost nothing. So the medians are those of voters' offers, copies of these by others do not count, and all
    offers of others have OTHERS_WEIGHT of the voters' weight at most.
    """
    norms, sketches = zip(*(summarize(it.blocks, numbers, seed) for it in offers), strict=True)
    counted = [i for i, offer in enumerate(offers) if norms[i] and offer.samples > 0]
    voters = {i for i in counted if offers[i].is_voter}
    cosines = compute_cosines(sketches)
    agreed = [i for i in counted if find_agreement(cosines, i, voters) >= MIN_COSINE]
    if 2 * len(voters.intersection(agreed)) > len(voters):
        counted = agreed
    if not counted:
        return [0.0] * len(offers)
    voters = voters.intersection(counted) or counted
    most_samples = MAX_SAMPLES * statistics.median_low(offers[i].samples for i in voters)
    most_norm = statistics.median_low(norms[i] for i in voters)
    heaviness = {i: math.ldexp(min(offers[i].samples, most_samples), -offers[i].epochs_late) for i in counted}
    copies = {i: [j for j in counted if i == j or cosines[i][j] > MAX_COSINE] for i in counted}
    sharers = {i: [j for j in copies[i] if j in voters] or copies[i] for i in counted}
    weights = {i: max(heaviness[j] for j in copies[i]) / len(sharers[i]) for i in counted if i in sharers[i]}
    of_others = math.fsum(weights[i] for i in weights if i not in voters)
    limit = OTHERS_WEIGHT * math.fsum(weights[i] for i in weights if i in voters)
    weights |= {i: weights[i] * min(1.0, limit / of_others) for i in weights if i not in voters}
    total = math.fsum(weights.values())
    return [weights[i] / total * min(1.0, most_norm / norms[i]) if i in weights else 0.0 for i in range(len(offers))]


@torch.no_grad()
def aggregate(
    anchor: Numbers, momentum: Numbers, offers: Sequence[Contribution], *, lr: float, outer_momentum: float, seed: bytes
) -> list[float]:
    """Make the outer step of a commit in place: SGD with Nesterov momentum, with the weighted sum of the updates.

    :param seed: see `summarize`
    :returns: the factor of each contribution in the sum, see `compute_weights`
    """
    weights = compute_weights(offers, anchor, seed)
    order = sorted(range(len(weights)), key=lambda i: (offers[i].peer, offers[i].epochs_late))
    total = torch.zeros(min(BLOCK, anchor.total))
    for block, pieces in enumerate(anchor.pieces):
        total = total[: anchor.count(block)].zero_()
        for index in order:
            if weights[index] > TINY:
                positions, kinds, values = decode(offers[index].blocks[block], len(total))
                values = values * np.float32(weights[index])
                values[np.abs(values) < TINY] = 0
                # no position occurs twice, so this adds one number to each
                total.scatter_add_(0, torch.from_numpy(positions), torch.from_numpy(values.take(kinds)))
        updates = total.split([*map(len, pieces)])
        for params, velocity, update in zip(pieces, momentum.pieces[block], updates, strict=True):
            torch.hardshrink(update, TINY, out=update)
            torch.hardshrink(velocity.mul_(outer_momentum).add_(update), TINY, out=velocity)
            params.sub_(torch.mul(velocity, outer_momentum).add_(update).mul_(lr))
            torch.hardshrink(params, TINY, out=params)
    return weights


def compute_digest(anchor: Numbers, momentum: Numbers) -> bytes:
    """Return the SHA-256 of the SHA-256 of each block of the anchor, then of the momentum (little-endian float32)."""
    blocks = (numbers.read(block).numpy() for numbers in (anchor, momentum) for block in range(numbers.num_blocks))
    return hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).digest()
