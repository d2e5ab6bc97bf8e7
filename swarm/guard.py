"""Checks of all data that other peers send in a round. A part that no correct peer can send is a protocol violation:
its sender is banned. An outlier may come from a correct peer: a gradient longer than the median is clipped to that
length, and of three or more, one that points away from the sum of the others is not counted."""

import dataclasses
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain, islice

import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.partition import TensorPartContainer, TensorPartReducer
from hivemind.compression import deserialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.utils.asyncio import amap_in_executor, as_aiter

MAX_WEIGHT = 4.0  # of a sender's gradient, relative to the median; its norm is clipped to the median (arXiv 2012.10333)
OPPOSED = -0.5  # cosine with the sum of all others, below which a gradient does not count
MAX_ANSWER = 10.0  # norm of an average relative to this peer's gradient, divided by the same ratio for its own part
FAR_TOO_LONG = -math.inf  # the contribution in an average that cannot be one
CHUNK = 1024  # numbers; all chunks count the same, because the largest gradients, those of biases, are the noisiest
MAX_CHANGE = 0.05, 1e-3  # of parameters by averaging: relative to their norm, and absolute for each number
SKETCH_SIZE = 9
SKETCH_WIDTH = 1024
MAX_PARAM_DEVIATION = 0.05  # of a peer's parameters from those of most peers, relative to their norm
NO_WEIGHT = 1e-9  # weight of a part that was not sent; with 0, an average of such parts only would be infinite


class ProtocolViolation(AllreduceException):
    """The error that a peer has sent data that no correct peer can send."""


class MaliciousPeersError(AllreduceException):
    """A failed round, and the peers that caused it. The argument maps each peer to a description of what it did."""

    def __str__(self) -> str:
        return "; ".join(f"{peer} {violation}" for peer, violation in self.args[0].items())


def compute_clipping_factors(products: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the factor for each sender's gradient: below 1 if its norm is above the median (of two, above the smaller
    norm); of three or more, 0 if it points away from the sum of all others. The products are those of all parts sent so
    far, of shape (senders, senders), and the counts are the elements of each sender."""
    factors = torch.ones_like(counts)
    senders = torch.nonzero(products.diagonal()).flatten()
    if not len(senders):
        return factors
    norms = products.diagonal().sqrt()[senders]
    lengths = norms / counts[senders].sqrt()
    factors[senders] = (lengths.median() / lengths).clamp(max=1.0)
    if len(senders) > 2:
        cosines = products[senders][:, senders] / norms / norms[:, None]
        with_others = cosines.sum(1) - 1
        others_norm = (cosines.sum() - 1 - 2 * with_others).clamp(min=0).sqrt()  # of the sum of the others' directions
        is_opposed = with_others < OPPOSED * others_norm
        if 2 * is_opposed.sum() < len(senders):  # with few elements, all gradients may point away from each other
            factors[senders[is_opposed]] = 0.0
    return factors


@dataclasses.dataclass
class RoundSettings:
    """The settings of this peer in a round: what it sends, and how it checks what the others send."""

    are_parameters: bool = False  # otherwise, gradients are averaged
    max_weight: float | None = None  # of a sender, in samples; None to refuse protocol violations only
    num_partitions: int = 1  # N to send every N-th part of the tensors; the weight of the other parts is 0
    partition_index: int = 0  # the first part to send, below N
    late_after: float = math.inf  # seconds; a sender of gradients that holds it up then is late, see `RoundTrust`
    # zeros, as many as all tensors have elements; receives the part of the tensors that the others do not get
    residual: torch.Tensor | None = None


class RobustReducer(TensorPartReducer):
    """A reducer that lets no sender skew an average: gradients are clipped, and the median of each parameter counts."""

    def configure(self, settings: RoundSettings) -> None:
        """Set up the checks of a round; call this once, before it starts."""
        self.settings = settings
        self.sent: dict[int, tuple[torch.Tensor, float]] = {}  # the current part and its weight, by sender
        self.shares: dict[int, float] = {}  # the smallest factor of each sender's parts in an average
        self.products = torch.zeros(self.num_senders, self.num_senders, dtype=torch.float64)
        self.counts = torch.zeros(self.num_senders, dtype=torch.float64)

    async def accumulate_part(self, sender_index: int, part_index: int, tensor_part, weight: float = 1.0):
        """Accumulate a part as hivemind does, but raise ProtocolViolation if it cannot be averaged."""
        if tensor_part.shape != self.part_shapes[part_index] or tensor_part.dtype != torch.float32:
            raise ProtocolViolation(f"sent a part of the shape {tuple(tensor_part.shape)[:9]} in {tensor_part.dtype}")
        if not 0 <= weight < math.inf or not (tensor_part @ tensor_part).isfinite():
            raise ProtocolViolation("sent a part that is not finite")
        if self.settings.max_weight is not None:
            weight = min(weight, self.settings.max_weight)
            self.sent[sender_index] = tensor_part, weight
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight=max(weight, NO_WEIGHT))

    def check_current_part_finished(self) -> None:
        """Finish the current part once all senders have sent it, with a robust average instead of hivemind's mean."""
        if self.current_part_accumulated_from == self.num_current_senders:
            sent = {index: (part, weight) for index, (part, weight) in self.sent.items() if weight > NO_WEIGHT}
            self.sent = {}
            if len(sent) >= (3 if self.settings.are_parameters else 2):
                self.accumulator = self.average_part(sent)
                self.denominator = 1.0
        super().check_current_part_finished()

    def average_part(self, sent: dict[int, tuple[torch.Tensor, float]]) -> torch.Tensor:
        """Return the average of the current part, given the part and the weight of each sender, by index."""
        indices = torch.tensor(list(sent))
        parts = torch.stack([part for part, _ in sent.values()])
        if self.settings.are_parameters:
            # faster than torch.median by a factor of several; of an even number, torch takes the lower middle value
            parts = parts.sort(dim=0).values
            return (parts[(len(parts) - 1) // 2] + parts[len(parts) // 2]) / 2
        self.products[indices[:, None], indices] += (parts @ parts.T).double()
        self.counts[indices] += parts.shape[1]
        factors = compute_clipping_factors(self.products, self.counts)[indices].float()
        weights = torch.tensor([weight for _, weight in sent.values()])
        if len(sent) > 2:  # of two, either may be right
            weights = weights.clamp(max=MAX_WEIGHT * weights.sort().values[len(sent) // 2])
        weights *= factors > 0
        shares = weights * factors / weights.sum()
        for index, share in zip(sent, shares.tolist(), strict=True):
            self.shares[index] = min(share, self.shares.get(index, 1.0))
        return shares @ parts


class VerifyingContainer(TensorPartContainer):
    """A container that can send some of its parts only, and accepts a reducer's part only if it can be an average."""

    def configure(self, settings: RoundSettings, own_index: int) -> None:
        """Set up what this peer sends in a round, and the checks of the averages; call this once, before it starts."""
        self.settings = settings
        self.own_index = own_index
        self.return_deltas = settings.are_parameters
        self.input_parts = self._input_parts_by_peer
        parts = chain.from_iterable(self.input_parts)
        residuals = iter([] if settings.residual is None else settings.residual.split([len(part) for part, _ in parts]))
        #: the residual of each part, by the index of the peer that averages it
        self.residuals = [list(islice(residuals, count)) for count in self.num_parts_by_peer]
        #: per reducer, summed over its parts: own @ own, average @ average, own @ average, number of elements
        self.sums = torch.zeros(self.group_size, 4, dtype=torch.float64)
        #: per reducer, for each chunk: own @ average relative to own @ own
        self.ratios: list[list[torch.Tensor]] = [[] for _ in range(self.group_size)]

    async def iterate_input_parts_for(self, peer_index: int) -> AsyncIterator[runtime_pb2.Tensor | None]:
        """Yield the messages for a peer, like hivemind, but None or a request of the average if a part is not sent."""
        first = sum(self.num_parts_by_peer[:peer_index])

        def make_message(part_index: int) -> runtime_pb2.Tensor | None:
            part, info = self.input_parts[peer_index][part_index]
            if (first + part_index) % self.settings.num_partitions == self.settings.partition_index:
                message = self.compression.compress(part, info)
                if self.residuals[peer_index]:
                    torch.sub(part, deserialize_torch_tensor(message), out=self.residuals[peer_index][part_index])
                return message
            if self.settings.are_parameters:  # these keep their own values; of gradients, all averages are requested
                return None
            self.residuals[peer_index][part_index].copy_(part)
            part.zero_()  # it is no part of the average
            return runtime_pb2.Tensor(size=[len(part)])  # without data, a request

        indices = as_aiter(*range(self.num_parts_by_peer[peer_index]))
        async for message in amap_in_executor(make_message, indices, max_prefetch=self.prefetch):
            yield message

    def register_processed_part(self, peer_index: int, part_index: int, part: torch.Tensor) -> None:
        """Register a returned part like hivemind, which is an average of gradients, or the difference between one of
        parameters and this peer's. Raise ProtocolViolation if it cannot be an average."""
        own = self.input_parts[peer_index][part_index][0]
        if part.shape != own.shape:
            raise ProtocolViolation(f"sent an average of the shape {tuple(part.shape)[:9]}")
        average = own + part if self.return_deltas else part
        products = torch.stack([own @ own, average @ average, own @ average])
        if not products.isfinite().all():
            raise ProtocolViolation("sent an average that is not finite")
        if products[0]:  # zero if this peer did not send the part
            self.sums[peer_index] += torch.tensor([*products, len(own)], dtype=torch.float64)
            pad = 0, -len(own) % CHUNK
            squares, with_own = (torch.nn.functional.pad(own * it, pad).view(-1, CHUNK).sum(1) for it in (own, average))
            self.ratios[peer_index].append((with_own / squares)[squares > 0])
        if self.settings.are_parameters and self.settings.max_weight is not None:
            own_square, average_square, product, count = self.sums[peer_index]
            relative, absolute = MAX_CHANGE
            if own_square + average_square - 2 * product > relative**2 * own_square + absolute**2 * count:
                part = torch.zeros_like(part)  # no ban: with two senders, a reducer cannot know which is right
        super().register_processed_part(peer_index, part_index, part)

    def estimate_contribution(self, own_weight: float, peer_indices: Iterable[int]) -> float:
        """Return the share of this peer's gradient in the averages of these peers, relative to its expected weight: 1
        for at least this share, 0 for none, -1 for the reversed gradient."""
        ratios = [ratio for index in peer_indices for ratio in self.ratios[index]]
        return float((torch.cat(ratios) / own_weight).clamp(-1.0, 1.0).mean()) if ratios and own_weight else 1.0

    def estimate_contributions(self, own_weight: float) -> dict[int, float]:
        """Return the share of this peer's gradient in the average of each other peer, see `estimate_contribution`, by
        peer index: FAR_TOO_LONG if the norm is too large for an average. Only those if this peer's own average points
        away from its gradient, because it may be the outlier; none without an own average."""
        own, average, _, _ = self.sums.T
        if not own[self.own_index]:
            return {}
        others = [index for index in torch.nonzero(own).flatten().tolist() if index != self.own_index]
        lengths = (average / own).sqrt()
        too_long = MAX_ANSWER * lengths[self.own_index].clamp(min=1.0)
        shares = {index: FAR_TOO_LONG for index in others if lengths[index] > too_long}
        if self.estimate_contribution(own_weight, [self.own_index]) >= 0.0:
            shares = {index: self.estimate_contribution(own_weight, [index]) for index in others} | shares
        return shares


@torch.no_grad()
def compute_sketch(parameters: Iterable[torch.Tensor]) -> list[float]:
    """Return SKETCH_SIZE numbers: the norm of the parameters, and random projections of them. The distance between two
    sketches is about that between the parameters (Johnson and Lindenstrauss). NaN counts as infinity."""
    # as many +1 as -1, so that a rounding bias does not add up over millions of parameters
    signs = torch.rand(SKETCH_WIDTH, SKETCH_SIZE - 1, generator=torch.Generator().manual_seed(0)).argsort(dim=0) % 2
    square = torch.zeros((), dtype=torch.float64)
    columns = torch.zeros(SKETCH_WIDTH, dtype=torch.float64)
    for tensor in (parameter.detach().flatten().float() for parameter in parameters):
        square += (tensor @ tensor).double().cpu()
        padded = torch.nn.functional.pad(tensor, (0, -len(tensor) % SKETCH_WIDTH))
        columns += padded.view(-1, SKETCH_WIDTH).sum(dim=0).double().cpu()
    projections = columns @ (2.0 * signs - 1).double() / (SKETCH_SIZE - 1) ** 0.5
    return torch.cat((square.sqrt().view(1), projections)).nan_to_num(math.inf, math.inf, -math.inf).tolist()


def find_outliers(sketches: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the peers whose parameters differ from most; none of two, because either may be right."""
    numbers = torch.tensor(sketches, dtype=torch.float64)
    middle = numbers.sort(dim=0).values[len(numbers) // 2]
    is_near = (numbers - middle).norm(dim=1) <= MAX_PARAM_DEVIATION * middle[0]  # false for NaN
    outliers = torch.nonzero(~is_near).flatten().tolist()
    return outliers if 2 * len(outliers) < len(sketches) else []
