"""The plan of a round: what each peer sends and averages. All peers compute the same plan from the gathered data."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionBase, CompressionInfo

# Seconds in which the slowest uplink sends one part. Other messages wait behind a part, and a reducer answers one part
# at a time.
PART_SECONDS = 0.0125
PART_BYTES = 2**14, 2**19  # minimum, maximum
MIN_SHARE = 1 / 32  # minimum fraction of the tensors that a peer averages
WORTH_SPARING = 3.0  # seconds beyond a usual round; a slow peer that would make all others wait longer sends less
PLAUSIBLE_MBITS = 1e-2, 1e6  # range of bandwidth claims; others are refused, because claims decide how long rounds take
MAX_TURNS = 16  # rounds in which a slow peer sends all of its parts once; its gradients get old in the meantime


def drop_small_partitions(shares: Sequence[int], min_vector_size: int) -> tuple[int, ...]:
    """Drop partitions with fewer than min_vector_size elements, which the other peers then average.

    hivemind keeps all partitions if all of them are small, as in a large group of equal peers.

    :param shares: the number of elements that each peer would average
    :returns: the relative size of each peer's partition
    """
    total = sum(shares)
    # all peers see the same shares in the same order, and drop the same ones
    working = sorted(range(len(shares)), key=lambda index: -shares[index])
    while len(working) > 1 and shares[working[-1]] * total < min_vector_size * sum(shares[i] for i in working):
        working.pop()
    return tuple(share if index in working else 0 for index, share in enumerate(shares))


def ensure_min_partition(fractions: Sequence[float], modes: Sequence[AveragingMode]) -> tuple[float, ...]:
    """Give each peer that can average at least a small partition, with which it checks the averages of the others.

    :param fractions: the fraction of the tensors that each peer would average; a peer with a fast uplink may have all
    """
    min_fraction = MIN_SHARE * sum(fractions)
    return tuple(
        max(fraction, min_fraction) if mode == AveragingMode.NODE else fraction
        for fraction, mode in zip(fractions, modes, strict=True)
    )


def choose_part_size(bandwidths: Sequence[float | None]) -> int:
    """Return the size of a round's messages in bytes, the same on all peers because all see the same bandwidths.

    :param bandwidths: the uplink bandwidth of each peer in the group, in Mbit/s, or None
    """
    slowest = min((mbits for mbits in bandwidths if mbits), default=math.inf)
    min_bytes, max_bytes = PART_BYTES
    return int(min(max(slowest * 1e6 / 8 * PART_SECONDS, min_bytes), max_bytes))


def count_bits(
    tensors: Sequence[torch.Tensor], compression: CompressionBase, infos: Sequence[CompressionInfo] | None = None
) -> float:
    """Return the compressed size of these tensors in bits."""
    infos = infos or [CompressionInfo.from_tensor(tensor) for tensor in tensors]
    ratios = map(compression.estimate_compression_ratio, infos)
    return 8 * sum(tensor.nbytes * ratio for tensor, ratio in zip(tensors, ratios, strict=True))


@dataclasses.dataclass
class AllReducePlan:
    """The tasks of each peer in a round, in the group's order."""

    fractions: tuple[float, ...]  # the fraction of the tensors that the peer averages
    modes: tuple[AveragingMode, ...]
    shares: tuple[int, ...]  # N: the peer sends every N-th part of its tensors, starting with another part each round
    seconds: float  # minimum duration of the round, by the claims of most peers; a single claim can double it


def plan_allreduce(
    bits: float, fractions: Sequence[float], modes: Sequence[AveragingMode], bandwidths: Sequence[float | None]
) -> AllReducePlan:
    """Plan a round that does not wait long for a peer with a much slower uplink.

    Such a peer averages nothing, and sends as many of its parts as it can in the time that the others need.

    :param bits: the compressed size of the tensors, in bits
    :param fractions: the fraction of the tensors that each peer would average
    :param bandwidths: the uplink bandwidth of each peer, in Mbit/s; None if unknown, which counts as fast
    """
    senders = sum(mode != AveragingMode.AUX for mode in modes)
    rates = [1e6 * (mbits or math.inf) for mbits in bandwidths]
    sender_rates = sorted(rate for rate, mode in zip(rates, modes, strict=True) if mode != AveragingMode.AUX) or rates
    # each of N equal peers sends (N - 1) / N of its tensors to the reducers, and as many bits of averages back
    usual_seconds = 2 * bits * (senders - 1) / max(1, senders) / sender_rates[(len(sender_rates) - 1) // 2]
    own_seconds = [0.0 if mode == AveragingMode.AUX else bits / rate for rate, mode in zip(rates, modes, strict=True)]
    max_seconds = max(1.3 * usual_seconds, usual_seconds + WORTH_SPARING)
    shares = tuple(
        min(math.ceil(seconds / usual_seconds), MAX_TURNS) if usual_seconds and seconds > max_seconds else 1
        for seconds in own_seconds
    )
    if any(fraction for fraction, share in zip(fractions, shares, strict=True) if share == 1):
        fractions = tuple(fraction if share == 1 else 0.0 for fraction, share in zip(fractions, shares, strict=True))
    # hivemind does not pass on the modes: an auxiliary peer would send all of its tensors with a weight of zero
    modes = tuple(
        mode if mode == AveragingMode.AUX or fraction else AveragingMode.CLIENT
        for mode, fraction in zip(modes, fractions, strict=True)
    )
    seconds = 0.0
    for own, share, fraction, rate in zip(own_seconds, shares, fractions, rates, strict=True):
        partition = fraction / sum(fractions)
        others = senders - 1 if own > 0 else senders
        seconds = max(seconds, own * (1 - partition) / share + others * partition * bits / rate)
    return AllReducePlan(fractions, modes, shares, min(seconds, 2 * max_seconds))


def has_partition_changed(share: int, before: int) -> bool:
    """Return whether the new share differs enough to be used; small differences are fluctuations of the bandwidth."""
    return share != before and not (min(share, before) > 1 and 0.6 < share / before < 1.6)
