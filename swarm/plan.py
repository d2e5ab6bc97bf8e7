"""What each peer of a group sends and averages in a round: all make the same plan of what all have gathered."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionBase, CompressionInfo

# A part takes so many seconds of the slowest line: others' messages wait behind it, and a reducer answers part by part.
PART_SECONDS = 0.0125
PART_BYTES = 2**14, 2**19  # at least, at most
LEAST_SHARE = 1 / 32  # of the tensors, that a peer averages
WORTH_SPARING = 3.0  # seconds that all would wait for a slow peer's last data, from which on it sends less
PLAUSIBLE_MBITS = 1e-2, 1e6  # of a line; a claim outside of it is refused, or it would decide how long rounds take
MOST_TURNS = 16  # rounds in which it sends all of its parts once, at most: gradients grow old


def drop_small_partitions(shares: Sequence[int], min_vector_size: int) -> tuple[int, ...]:
    """What each peer of a group averages, in proportion to the others: nothing where it would be fewer elements than
    min_vector_size.

    :param shares: elements that each would average

    hivemind drops nobody when all shares are small, as those of equals in a large group are.
    """
    total = sum(shares)
    # all peers see the same shares in the same order, and drop the same ones
    working = sorted(range(len(shares)), key=lambda index: -shares[index])
    while len(working) > 1 and shares[working[-1]] * total < min_vector_size * sum(shares[i] for i in working):
        working.pop()
    return tuple(share * (index in working) for index, share in enumerate(shares))


def ensure_min_partition(fractions: Sequence[float], modes: Sequence[AveragingMode]) -> tuple[float, ...]:
    """At least a small one to each peer that can average: by what it averages itself it judges what the others do.

    :param fractions: of the tensors, that each would average; a fast line may have all of them
    """
    least = LEAST_SHARE * sum(fractions)
    return tuple(
        max(fraction, least) if mode == AveragingMode.NODE else fraction
        for fraction, mode in zip(fractions, modes, strict=True)
    )


def choose_part_size(bandwidths: Sequence[float | None]) -> int:
    """Bytes of one message of a round; the same for all peers, as all see the same bandwidths.

    :param bandwidths: of the group's peers, in Mbit/s
    """
    slowest = min((mbits for mbits in bandwidths if mbits), default=math.inf)
    least, most = PART_BYTES
    return int(min(max(slowest * 1e6 / 8 * PART_SECONDS, least), most))


def count_bits(
    tensors: Sequence[torch.Tensor], compression: CompressionBase, infos: Sequence[CompressionInfo] | None = None
) -> float:
    """Return the size in bits of these tensors as they are sent."""
    infos = infos or [CompressionInfo.from_tensor(tensor) for tensor in tensors]
    ratios = map(compression.estimate_compression_ratio, infos)
    return 8 * sum(tensor.nbytes * ratio for tensor, ratio in zip(tensors, ratios, strict=True))


@dataclasses.dataclass
class AllReducePlan:
    """What each peer of a group does in a round, in the group's order; all make the same plan of what all have
    gathered."""

    fractions: tuple[float, ...]  # of the tensors, that it averages for the others
    modes: tuple[AveragingMode, ...]
    shares: tuple[int, ...]  # it sends each so many-th part of its own tensors, in turn; 1: all of them
    seconds: float  # that the round takes at least, by the claims of most peers: a single claim may double it


def plan_allreduce(
    bits: float, fractions: Sequence[float], modes: Sequence[AveragingMode], bandwidths: Sequence[float | None]
) -> AllReducePlan:
    """Spare the others a long wait for a peer whose line is much slower: it averages nothing for them, and sends so
    many of its parts as it can in the time that the others need.

    :param bits: of the tensors, as they are sent
    :param bandwidths: in Mbit/s; None: not known, and taken for fast
    """
    senders = sum(mode != AveragingMode.AUX for mode in modes)
    rates = [1e6 * (mbits or math.inf) for mbits in bandwidths]
    lines = sorted(rate for rate, mode in zip(rates, modes, strict=True) if mode != AveragingMode.AUX) or rates
    # of equals, each sends what the others average, and all of them what it averages
    usual = 2 * bits * (senders - 1) / max(1, senders) / lines[(len(lines) - 1) // 2]
    alone = [bits / rate * (mode != AveragingMode.AUX) for rate, mode in zip(rates, modes, strict=True)]
    longest = max(1.3 * usual, usual + WORTH_SPARING)
    shares = tuple(
        min(math.ceil(seconds / usual), MOST_TURNS) if usual and seconds > longest else 1 for seconds in alone
    )
    if any(fraction for fraction, share in zip(fractions, shares, strict=True) if share == 1):
        fractions = tuple(fraction * (share == 1) for fraction, share in zip(fractions, shares, strict=True))
    # hivemind forgets to say who is auxiliary: such a peer would send all of its tensors, with a weight of zero
    modes = tuple(
        mode if mode == AveragingMode.AUX or fraction else AveragingMode.CLIENT
        for mode, fraction in zip(modes, fractions, strict=True)
    )
    part = [fraction / sum(fractions) for fraction in fractions]
    seconds = max(
        (own * (1 - part[i]) / shares[i] + (senders - (own > 0)) * part[i] * bits / rates[i])
        for i, own in enumerate(alone)
    )
    return AllReducePlan(fractions, modes, shares, min(seconds, 2 * longest))


def has_partition_changed(share: int, before: int) -> bool:
    """Whether it is worth sending a different share than before: a line's speed varies."""
    return share != before and not (min(share, before) > 1 and 0.6 < share / before < 1.6)
