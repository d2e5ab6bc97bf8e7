"""Gradients, until a round has averaged them."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Sequence

import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.compression import CompressionBase

from swarm.guard import SKETCH_SIZE, compute_sketch, find_outliers
from swarm.matchmaking import parse_gathered, sign_round_state
from swarm.rounds import PeersBehindError, StateDivergedError, VerifyingAverager


def is_round_state(item: object) -> bool:
    """Whether a peer has gathered what it should: [epoch, whether the whole swarm averages in step, lineage,
    sketch of its parameters], signed, see sign_round_state."""
    is_list = isinstance(item, (list, tuple)) and [type(part) for part in item] == [int, bool, str, list, bytes, bytes]
    return is_list and len(item[3]) == SKETCH_SIZE and all(type(number) is float for number in item[3])


class GradientAverager(VerifyingAverager):
    """Holds what this peer has not yet sent. Steps add to it; a round that has succeeded has taken out what it has sent
    of it, and one that has failed nothing.

    Averages peers of one state only: a peer that has lost a round would average its old gradients with everybody's new
    ones, forever one epoch behind; and two halves of a swarm that could not reach each other for a while, or a peer
    that has stepped alone, continue with other weights and moments than the rest. So peers gather their epoch and their
    lineage (see StateAverager): the majority continues, the others take over its state. So does one of three or
    more whose parameters have become others all the same, see `find_outliers`.
    """

    is_urgent = True
    content = "gradients"
    #: set by the optimizer: [epoch, whether the whole swarm averages in step, lineage] of the gradients
    round_state = [0, False, ""]
    #: epoch and lineage of the state that the averaged gradients have moved on, and the group that made them;
    #: None once the next round has begun. Set by the optimizer
    last_step: tuple[int, str, bytes] | None = None

    def __init__(self, parameters: Sequence[torch.nn.Parameter], **kwargs):
        """
        :param parameters: the model's, whose gradients are averaged
        :param kwargs: DecentralizedAverager's
        """
        self.parameters = tuple(parameters)
        #: what is not yet sent: of each parameter, the sum of gradients, each times the samples of its batch
        self.unsent = [torch.zeros_like(param, requires_grad=False) for param in self.parameters]
        #: samples whose gradients are in no round yet
        self.samples = 0
        # and of earlier rounds, in which they could not be sent: for each of the turns that this peer's line makes of
        # its gradients, see plan_allreduce; and whose turn it is
        self._behind, self._next_turn = [0], 0
        self._in_flight: tuple[list[torch.Tensor], int] = [], 0
        self._in_mean = 1  # samples, of which the averaged gradients are the mean
        self._lock = threading.Lock()  # a round in the background ends at any moment
        averaged = tuple(torch.zeros(param.shape, dtype=param.dtype).share_memory_() for param in self.parameters)
        self.residual = torch.zeros(sum(tensor.numel() for tensor in averaged)).share_memory_()
        super().__init__(averaged_tensors=averaged, **kwargs)

    @property
    def codec(self) -> CompressionBase:
        """How it is sent."""
        return self.allreduce_kwargs["compression"]

    def accumulate_on(self, device: torch.device) -> None:
        """Accumulate where the gradients are, so that it needs no transfer."""
        self.unsent = [tensor.to(device) for tensor in self.unsent]

    @torch.no_grad()
    def accumulate(self, batch_size: int) -> None:
        """Add the parameters' gradients, the mean over so many samples."""
        with self._lock:
            for tensor, param in zip(self.unsent, self.parameters, strict=True):
                if param.grad is not None:
                    tensor.add_(param.grad.to(tensor.device), alpha=batch_size)
            self.samples += batch_size

    def schedule_step(self) -> StepControl:
        """Look for a group, for a round that `begin` starts, for as long as nobody cancels that."""
        gather = sign_round_state([*self.round_state, compute_sketch(self.list_shared_parameters())])
        return self.step(wait=False, require_trigger=True, gather=gather)

    def list_shared_parameters(self) -> Sequence[torch.Tensor]:
        """The parameters that all peers should have in common."""
        return self.parameters

    def begin(self, control: StepControl | None) -> StepControl:
        """Average what is not yet sent, with the group that this control looks for, or one that is looked for now."""
        control = self.schedule_step() if control is None else control
        control.weight = self.take_pending()
        control.allow_allreduce()
        return control

    @torch.no_grad()
    def take_pending(self) -> float:
        """Start a round with the mean of the pending gradients; `finish` or `restore_pending` ends it.

        :returns: the number of samples in the mean
        """
        self.last_step = None
        with self._lock:
            self._in_flight = self.unsent, self.samples
            samples = self.samples + self._behind[self._next_turn]
            self.unsent, self.samples = [torch.zeros_like(tensor) for tensor in self.unsent], 0
        self._in_mean = max(1, samples)
        self._set_averaged(self._in_flight[0], self._in_mean)
        return samples

    def _set_averaged(self, tensors: Sequence[torch.Tensor], samples: float) -> None:
        """Let the next round average these sums of so many samples."""
        self.residual.zero_()
        with self.get_tensors() as averaged:
            for mean, total in zip(averaged, tensors, strict=True):
                mean.copy_(total).div_(samples)

    @torch.no_grad()
    def finish(self, share: int = 1, turn: int = 0) -> int:
        """The round has succeeded, or this peer has stepped alone.

        :param share: that one of so many turns was sent
        :param turn: which one
        :returns: new samples in it
        """
        samples = self._in_flight[1]
        if share != len(self._behind):  # the line has changed: neither exact nor lost
            self._behind = [sum(self._behind) // len(self._behind)] * share
        self._behind = [behind + samples for behind in self._behind]
        self._behind[turn], self._next_turn = 0, (turn + 1) % share
        with self._lock:
            self._keep_residual()
        self._in_flight = [], 0
        return samples

    def _keep_residual(self) -> None:
        """What has not arrived is not yet sent."""
        for tensor, rest in zip(self.unsent, self.list_residuals(), strict=True):
            tensor.add_(rest.to(tensor.device), alpha=self._in_mean)

    def list_residuals(self) -> list[torch.Tensor]:
        """What of the offered gradients has not arrived, by parameters."""
        rests = self.residual.split([param.numel() for param in self.parameters])
        return [rest.view(param.shape) for rest, param in zip(rests, self.parameters, strict=True)]

    @torch.no_grad()
    def restore_pending(self) -> None:
        """The round has failed."""
        sums, samples = self._in_flight
        # with a number that is not finite, no round would succeed any more
        if all((tensor.flatten() @ tensor.flatten()).isfinite() for tensor in sums):
            with self._lock:
                for tensor, total in zip(self.unsent, sums, strict=True):
                    tensor.add_(total)
                self.samples += samples
        self._in_flight = [], 0

    def drop_pending(self) -> None:
        """Forget what is not yet sent."""
        with self._lock:
            for tensor in self.unsent:
                tensor.zero_()
            self.samples, self._behind, self._next_turn = 0, [0], 0

    async def _aggregate_with_group(self, group_info, **kwargs):
        # all see the same list of what each has gathered, so all leave out the same peers, and nobody waits for those
        of_group = [parse_gathered(data) for data in group_info.gathered]
        # auxiliary peers have no gradients, and average anybody's
        trainers = [index for index, (mode, *_) in enumerate(of_group) if mode != AveragingMode.AUX]
        in_step = [i for i in trainers if is_round_state(of_group[i][1]) and of_group[i][1][1]]
        if 2 * len(in_step) > len(trainers):
            standings = {index: (of_group[index][1][0], of_group[index][1][2]) for index in in_step}
            votes = Counter(standings.values())
            # among equals not one that is far behind; then that of a peer that gives it to anybody, as clients give
            # theirs only to peers that they have called
            newest = max(epoch for epoch, _ in votes)
            given = {standings[index] for index in in_step if of_group[index][0] != AveragingMode.CLIENT}
            chosen = max(votes, key=lambda item: (votes[item], item[0] >= newest - 1, item in given, item))
            agreeing = [index for index in in_step if standings[index] == chosen]
            odd = find_outliers([of_group[index][1][3] for index in agreeing])
            agreeing = [index for at, index in enumerate(agreeing) if at not in odd]
            if self.mode != AveragingMode.AUX and self.peer_id not in [group_info.peer_ids[i] for i in agreeing]:
                # not that of the next epoch: a group may form long before its epoch ends
                raise StateDivergedError(chosen[0], [group_info.peer_ids[index].to_bytes() for index in agreeing])
            if len(agreeing) == 1:
                raise PeersBehindError(f"nobody else of the same state in a group of {len(trainers)} trainers")
            staying = [index for index in range(len(of_group)) if index not in trainers or index in agreeing]
            if all(of_group[index][0] == AveragingMode.CLIENT for index in staying):
                raise AllreduceException(f"none of the {len(staying)} peers of the same state accepts connections")
            group_info = dataclasses.replace(
                group_info,
                peer_ids=tuple(group_info.peer_ids[index] for index in staying),
                gathered=tuple(group_info.gathered[index] for index in staying),
            )
        averaged = await super()._aggregate_with_group(group_info, **kwargs)
        runner = self._running_groups[group_info.group_id].result()
        return dict.fromkeys(averaged, (group_info.group_id, runner.share, runner.turn, runner.lies))
