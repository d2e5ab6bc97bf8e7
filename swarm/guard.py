"""What a peer checks of what others send in a round, before it uses it.

Who averages a part believes no sender, and who sends believes nobody that averages for it. What nobody honest could
have sent is a lie: its sender is named, and has no part in rounds for a while. What may be honest, but is much longer
than what the others sent or points away from all of them, counts less or not at all.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.partition import TensorPartContainer, TensorPartReducer
from hivemind.proto import runtime_pb2

from swarm.sparse import TopKCompression

MAX_LENGTH = 2.0  # of a sender's gradient, in terms of the median's (clipping as in arXiv 2012.10333)
OPPOSED = -0.5  # cosine with all the others together, below which a gradient does not count
MAX_ANSWER = 10.0  # length of an average beside the own gradient, in terms of the same for what was averaged here
# A peer's trust is a moving average of estimate_contributions. The newest value has more weight if this peer's share of
# the average is larger, because the share of a few samples among many is mostly noise. A single round proves nothing:
# at the start of a plateau, an honest gradient of 64 samples can point away from all others.
TRUST_WEIGHT, LEAST_TRUST, DOUBT = 0.5, 0.25, 0.4
REVERSED, FAR_TOO_LONG, LEAST_OWN_SHARE = -0.5, -math.inf, 0.0
MOSTLY_REVERSED = -0.3  # of the whole average: no step is taken by it, whoever is to blame
CHUNK = 1024  # numbers, of which each such counts the same: the largest gradients, of biases, are the noisiest
MAX_CHANGE = 0.05, 1e-3  # of parameters by their average: of their length, and of each number
SKETCH_SIZE, SKETCH_WIDTH = 9, 1024
MAX_ODD = 0.05  # of the length of the parameters: by how much those of a peer may differ from most others'
NO_WEIGHT = 1e-9  # of a part that was not sent; 0 would make an average of nothing else infinite


class ProtocolViolation(AllreduceException):
    """What a peer has sent cannot be honest."""


class MaliciousPeersError(AllreduceException):
    """These peers have made rounds fail. Argument: what each has done, in words."""

    def __str__(self) -> str:
        return "; ".join(f"{peer} {lie}" for peer, lie in self.args[0].items())


def compute_clipping_factors(products: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """By what to multiply each sender's gradient: less than 1 where it is much longer than the median (of two, than the
    other one), 0 where it points away from all the others together, of which it takes two.

    :param products: of shape (senders, senders), scalar products of all that they have sent so far
    :param counts: how many numbers each has sent
    """
    factors, senders = torch.ones_like(counts), torch.nonzero(products.diagonal()).flatten()
    if not len(senders):
        return factors
    norms = products.diagonal().sqrt()[senders]
    lengths = norms / counts[senders].sqrt()
    factors[senders] = (MAX_LENGTH * lengths.median() / lengths).clamp(max=1.0)
    if len(senders) > 2:
        cosines = products[senders][:, senders] / norms / norms[:, None]
        with_others = cosines.sum(1) - 1
        of_others = (cosines.sum() - 1 - 2 * with_others).clamp(min=0).sqrt()  # length of the sum of their directions
        is_opposed = with_others < OPPOSED * of_others
        if 2 * is_opposed.sum() < len(senders):  # of few numbers, all may point away from each other
            factors[senders[is_opposed]] = 0.0
    return factors


class RobustReducer(TensorPartReducer):
    """A reducer that averages parts so that no single sender can skew the result.

    Gradients are clipped and weighted, see `compute_clipping_factors`. Parameters are the same on all peers except for
    rounding, so the median of each number is used.
    """

    def configure_checks(self, max_weight: float | None, are_parameters: bool, sparse: TopKCompression | None) -> None:
        """
        :param max_weight: samples for which a sender counts at most; None: only lies are refused
        :param are_parameters: and not gradients
        :param sparse: by which averages go to all, this peer included; else differences do
        """
        self.max_weight, self.are_parameters, self.sparse = max_weight, are_parameters, sparse
        self.answers: list[runtime_pb2.Tensor] = []
        self.missing: list[torch.Tensor] = []  # of averages, what does not arrive
        self.sent: dict[int, tuple[torch.Tensor, float]] = {}  # of the current part
        #: by sender, the largest weight of its parts
        self.weights = [0.0] * self.num_senders
        self.products = torch.zeros(self.num_senders, self.num_senders, dtype=torch.float64)
        self.counts = torch.zeros(self.num_senders, dtype=torch.float64)

    async def accumulate_part(self, sender_index: int, part_index: int, tensor_part, weight: float = 1.0):
        """hivemind's; raises ProtocolViolation instead of counting what cannot be averaged."""
        if tensor_part.shape != self.part_shapes[part_index]:
            raise ProtocolViolation(f"sent a part of the shape {tuple(tensor_part.shape)[:9]}")
        if not 0 <= weight < math.inf or not (tensor_part @ tensor_part).isfinite():
            raise ProtocolViolation("sent a part that is not finite")
        if self.max_weight is not None:
            weight = min(weight, self.max_weight)
            self.sent[sender_index] = tensor_part, weight
        self.weights[sender_index] = max(weight, self.weights[sender_index])
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight=weight)

    def check_current_part_finished(self) -> None:
        if self.sent and self.current_part_accumulated_from == self.num_current_senders:
            sent = {index: (part, weight) for index, (part, weight) in self.sent.items() if weight > NO_WEIGHT}
            self.sent = {}
            if len(sent) > 1 + self.are_parameters:
                self.accumulator, self.denominator = self.average_part(sent), 1.0
        if self.sparse and self.current_part_accumulated_from == self.num_current_senders:
            average = self.accumulator / max(self.denominator, NO_WEIGHT)
            self.answers.append(self.sparse.answer(average))
            self.accumulator, self.denominator = self.sparse.extract(self.answers[-1]), 1.0
            self.missing.append(average - self.accumulator)
        super().check_current_part_finished()

    def average_part(self, sent: dict[int, tuple[torch.Tensor, float]]) -> torch.Tensor:
        """The average of the current part.

        :param sent: by the senders' indices, parts and their weights
        """
        indices, parts = torch.tensor(list(sent)), torch.stack([part for part, _ in sent.values()])
        if self.are_parameters:
            # several times as fast as torch's median, which of an even number takes the lower one besides
            parts = parts.sort(dim=0).values
            return (parts[(len(parts) - 1) // 2] + parts[len(parts) // 2]) / 2
        self.products[indices[:, None], indices] += (parts @ parts.T).double()
        self.counts[indices] += parts.shape[1]
        factors = compute_clipping_factors(self.products, self.counts)[indices].float()
        weights = torch.tensor([weight for _, weight in sent.values()]) * (factors > 0)
        return (weights * factors) @ parts / weights.sum()


class VerifyingContainer(TensorPartContainer):
    """Takes from a peer that averages only what an average can be."""

    def configure_checks(self, are_parameters: bool, sparse_index: int | None) -> None:
        """
        :param sparse_index: this peer's, where the others answer with averages; else with differences to what was sent
        """
        self.are_parameters, self.sparse_index = are_parameters, sparse_index
        #: for each peer that averages: own * own, average * average, own * average, numbers; summed over its parts
        self.sums = torch.zeros(self.group_size, 4, dtype=torch.float64)
        #: and for each chunk of them, own * average in terms of own * own
        self.ratios: list[list[torch.Tensor]] = [[] for _ in range(self.group_size)]

    def register_processed_part(self, peer_index: int, part_index: int, part: torch.Tensor) -> None:
        own = self._input_parts_by_peer[peer_index][part_index][0]
        if part.shape != own.shape:
            raise ProtocolViolation(f"sent an average of the shape {tuple(part.shape)[:9]}")
        if self.sparse_index not in (None, peer_index):
            part = part - own
        average = own + part
        products = torch.stack([own @ own, average @ average, own @ average])
        if not products.isfinite().all():
            raise ProtocolViolation("sent an average that is not finite")
        if products[0]:  # else the part was not sent
            self.sums[peer_index] += torch.tensor([*products, len(own)], dtype=torch.float64)
            squares, with_own = (
                torch.nn.functional.pad(own * other, (0, -len(own) % CHUNK)).view(-1, CHUNK).sum(dim=1)
                for other in (own, average)
            )
            self.ratios[peer_index].append((with_own / squares)[squares > 0])
        if self.are_parameters:
            own_square, average_square, product, count = self.sums[peer_index]
            of_all, of_each = MAX_CHANGE
            if own_square + average_square - 2 * product > of_all**2 * own_square + of_each**2 * count:
                raise ProtocolViolation("sent parameters that are not near anybody's")
        super().register_processed_part(peer_index, part_index, part)

    def estimate_contribution(self, own_weight: float, peer_indices: Iterable[int]) -> float:
        """How much of this peer's gradient is in what these have averaged: 1 as much as there should be at least,
        0 nothing, -1 the contrary.

        :param own_weight: of this peer's gradient in the average
        """
        ratios = [ratio for index in peer_indices for ratio in self.ratios[index]]
        return float((torch.cat(ratios) / own_weight).clamp(-1.0, 1.0).mean()) if ratios else 1.0


def estimate_contributions(container: VerifyingContainer, own_index: int, own_weight: float) -> dict[int, float]:
    """Return how much of this peer's gradient is in what each other peer has averaged, see `estimate_contribution`;
    FAR_TOO_LONG if it cannot be an average.

    :returns: by index. None where this peer averages nothing: it may itself be the odd one; nor where its gradient is
        hardly in what it has averaged itself
    """
    own, average, _, _ = container.sums.T
    others = [index for index in torch.nonzero(own).flatten().tolist() if index != own_index]
    if not own[own_index]:
        return {}
    lengths = (average / own).sqrt()
    too_long = MAX_ANSWER * lengths[own_index].clamp(min=1.0)
    shares = {index: FAR_TOO_LONG for index in others if lengths[index] > too_long}
    if container.estimate_contribution(own_weight, [own_index]) >= LEAST_OWN_SHARE:
        shares = {index: container.estimate_contribution(own_weight, [index]) for index in others} | shares
    return shares


@torch.no_grad()
def compute_sketch(parameters: Iterable[torch.Tensor]) -> list[float]:
    """A few numbers that are near each other where the parameters are: their length, and what random signs make of
    their sums, as far from another peer's as the parameters are (Johnson and Lindenstrauss)."""
    # as many of either sign, so that rounding which always goes the same way does not add up over millions of numbers
    signs = torch.rand(SKETCH_WIDTH, SKETCH_SIZE - 1, generator=torch.Generator().manual_seed(0)).argsort(dim=0) % 2
    square, columns = torch.zeros((), dtype=torch.float64), torch.zeros(SKETCH_WIDTH, dtype=torch.float64)
    for tensor in (parameter.detach().flatten().float() for parameter in parameters):
        square += (tensor @ tensor).double().cpu()
        padded = torch.nn.functional.pad(tensor, (0, -len(tensor) % SKETCH_WIDTH))
        columns += padded.view(-1, SKETCH_WIDTH).sum(dim=0).double().cpu()
    projections = columns @ (2.0 * signs - 1).double() / (SKETCH_SIZE - 1) ** 0.5
    return [float(square.sqrt()), *projections.tolist()]


def find_outliers(sketches: Sequence[Sequence[float]]) -> list[int]:
    """Which of these peers have other parameters than most: none of two, of which nobody knows who is right."""
    if len(sketches) < 3:
        return []
    numbers = torch.tensor(sketches, dtype=torch.float64)
    middle = numbers.sort(dim=0).values[len(numbers) // 2]
    distances = (numbers - middle).norm(dim=1)
    odd = torch.nonzero(~(distances <= MAX_ODD * middle[0])).flatten().tolist()  # what is not finite too
    return odd if 2 * len(odd) < len(sketches) else []
