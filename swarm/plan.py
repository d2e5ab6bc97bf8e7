"""The plan of a round: what each peer sends and averages. All peers compute the same plan from the gathered data."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionBase, CompressionInfo

NODE = AveragingMode.NODE
CLIENT = AveragingMode.CLIENT
AUX = AveragingMode.AUX

PART_SECONDS = 0.0125  # in which the slowest uplink sends one part, behind which other messages wait
MIN_PART_BYTES = 2**14
MAX_PART_BYTES = 2**19
MIN_FRACTION = 1 / 32  # minimum fraction of the tensors that a peer averages
MAX_FRACTION = 2.0  # maximum, relative to the median of three or more peers: a bandwidth is a claim
WORTH_SPARING = 3.0  # seconds beyond a usual round; a slow peer that would make all others wait longer sends less
UNCERTAINTY = 1.1  # factor of a slow peer's seconds: its bandwidth is known to a tenth, and all others wait
PLAUSIBLE_MBITS = 1e-2, 1e6  # range of bandwidth claims; others are refused, because claims decide how long rounds take
MAX_PARTITIONS = 16  # rounds in which a slow peer sends all of its parts once; its gradients get old in the meantime


def choose_fractions(fractions: Sequence[float], modes: Sequence[AveragingMode], min_size: int) -> tuple[float, ...]:
    """Return what each peer averages, given the numbers in hivemind: at least MIN_FRACTION, with which it checks the
    averages of the others, at most MAX_FRACTION, and nothing with fewer than min_size elements (note 59)."""
    least = MIN_FRACTION * sum(fractions)
    fractions = [max(part, least) if mode == NODE else part for part, mode in zip(fractions, modes, strict=True)]
    positive = sorted(filter(None, fractions))
    if len(positive) > 2:
        fractions = [min(fraction, MAX_FRACTION * positive[len(positive) // 2]) for fraction in fractions]
    total = sum(fractions)
    # all peers see the same fractions in the same order, and drop the same ones
    kept = sorted(range(len(fractions)), key=lambda index: -fractions[index])
    while len(kept) > 1 and fractions[kept[-1]] * total < min_size * sum(fractions[index] for index in kept):
        kept.pop()
    return tuple(fraction if index in kept else 0 for index, fraction in enumerate(fractions))


def count_bits(tensors: Sequence[torch.Tensor], compression: CompressionBase) -> float:
    """Return the compressed size of these tensors in bits."""
    ratios = map(compression.estimate_compression_ratio, map(CompressionInfo.from_tensor, tensors))
    return 8 * sum(tensor.nbytes * ratio for tensor, ratio in zip(tensors, ratios, strict=True))


@dataclasses.dataclass
class AllReducePlan:
    """The tasks of each peer in a round, in the group's order."""

    fractions: tuple[float, ...]  # of the tensors, that the peer averages
    modes: tuple[AveragingMode, ...]
    num_partitions: tuple[int, ...]  # N: the peer sends every N-th part of its tensors, and other parts in each round
    part_bytes: int  # the size of a message
    seconds: float  # minimum duration of the round, by the claims of most peers; a single claim can double it


def plan_allreduce(
    bits: float, fractions: Sequence[float], modes: Sequence[AveragingMode], bandwidths: Sequence[float | None]
) -> AllReducePlan:
    """Plan a round that does not wait long for a peer with a much slower uplink (note 20): such a peer averages
    nothing, and sends as many of its parts as it can in the time that the others need. The bits are those of the
    compressed tensors. Fractions are what each peer would average, and bandwidths its Mbit/s up; None if unknown."""
    senders = sum(mode != AUX for mode in modes)
    rates = [1e6 * (mbits or math.inf) for mbits in bandwidths]  # an unknown one counts as fast
    sender_rates = sorted(rate for rate, mode in zip(rates, modes, strict=True) if mode != AUX) or rates
    # each of N equal peers sends (N - 1) / N of its tensors to the reducers, and as many bits of averages back
    usual_seconds = 2 * bits * max(0, senders - 1) / max(1, senders) / sender_rates[(len(sender_rates) - 1) // 2]
    own_seconds = [0.0 if mode == AUX else bits / rate for rate, mode in zip(rates, modes, strict=True)]
    max_seconds = max(1.3 * usual_seconds, usual_seconds + WORTH_SPARING)
    num_partitions = [1] * len(modes)
    for index, seconds in enumerate(own_seconds):
        if usual_seconds and seconds > max_seconds:
            num_partitions[index] = min(math.ceil(UNCERTAINTY * seconds / usual_seconds), MAX_PARTITIONS)
    of_fast_peers = tuple(part if count == 1 else 0.0 for part, count in zip(fractions, num_partitions, strict=True))
    fractions = of_fast_peers if any(of_fast_peers) else fractions
    # hivemind does not pass on the modes: an auxiliary peer would send all of its tensors with a weight of zero
    modes = tuple(mode if mode == AUX or part else CLIENT for mode, part in zip(modes, fractions, strict=True))
    round_seconds = 0.0
    for seconds, count, part, rate in zip(own_seconds, num_partitions, fractions, rates, strict=True):
        fraction = part / sum(fractions)
        others = senders - 1 if seconds > 0 else senders
        round_seconds = max(round_seconds, seconds * (1 - fraction) / count + others * fraction * bits / rate)
    part_bytes = int(min(max(min(rates) / 8 * PART_SECONDS, MIN_PART_BYTES), MAX_PART_BYTES))
    return AllReducePlan(fractions, modes, tuple(num_partitions), part_bytes, min(round_seconds, 2 * max_seconds))


def has_partition_changed(count: int, before: int) -> bool:
    """Return whether a new number of partitions is worth a change; small ones are fluctuations of the bandwidth."""
    return count != before and not (min(count, before) > 1 and 0.6 < count / before < 1.6)
