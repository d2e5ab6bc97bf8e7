"""Accumulation of gradients until a round has averaged them."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID

from swarm.averager import PeersBehindError, RoundResult, StateDivergedError, VerifyingAverager
from swarm.guard import compute_sketch, find_outliers
from swarm.matchmaking import GatheredData, parse_gathered, sign_round_state
from utils import MAX_WORKERS

WITNESS_ROUNDS = 16  # after which the report of a peer counts against any other


class GradientAverager(VerifyingAverager):
    """An averager that holds the pending gradients of this peer. Steps add to them. A successful round removes what it
    has sent, and a failed round restores it. Only peers with the same state average together (note 56)."""

    are_parameters = False

    def __init__(self, parameters: Sequence[torch.nn.Parameter], **kwargs):
        """:param kwargs: the arguments of DecentralizedAverager"""
        self.parameters = tuple(parameters)
        # the optimizer sets these four
        #: the LocalSteps of this peer's model, or None; and whether the peers take local steps now
        self.local = None
        self.is_local = False
        #: the epoch of the gradients, whether the whole swarm averages in step, and the lineage
        self.round_state = 0, False, ""
        #: the epoch and the lineage before the last step, and the id of its group; None once the next round has started
        self.last_step: tuple[int, str, bytes] | None = None
        #: the pending gradients: for each parameter, the sum of gradient times samples; in local steps, the residual
        self.unsent = [torch.zeros_like(param, requires_grad=False) for param in self.parameters]
        self.samples = 0  # the samples of the pending gradients that have not been in a round
        self.old_samples = 0  # those among them that have ended an epoch before
        # for each partition of a slow peer (see `plan_allreduce`), the samples of earlier rounds that are still pending
        self._behind = [0]
        self._next_partition = 0
        self._in_flight: tuple[list[torch.Tensor], int] = [], 0
        self._report: dict = {}  # of the last round, for the next group
        self._in_mean = 1  # the divisor of the averaged sums: their samples
        self._lock = threading.Lock()  # a round in the background may end at any moment
        averaged = tuple(torch.zeros(param.shape, dtype=param.dtype).share_memory_() for param in self.parameters)
        self.residual = torch.zeros(sum(tensor.numel() for tensor in averaged)).share_memory_()
        super().__init__(averaged_tensors=averaged, allow_state_sharing=False, **kwargs)

    @torch.no_grad()
    def accumulate(self, batch_size: int) -> None:
        """Add the parameters' gradients, the mean over these samples, to the pending ones."""
        with self._lock:
            for tensor, param in zip(self.unsent, self.parameters, strict=True):
                if param.grad is not None:
                    tensor.add_(param.grad.to(tensor.device), alpha=batch_size)
            self.samples += batch_size

    def schedule_step(self) -> StepControl:
        """Start matchmaking for a round that `begin` starts; it continues until the returned control is canceled."""
        gather = sign_round_state(*self.round_state, compute_sketch(self.parameters), **self._report)
        return self.step(wait=False, require_trigger=True, gather=gather)

    def begin(self, control: StepControl | None) -> StepControl:
        """Average the pending gradients, in the group of a scheduled step or, without one, in a new group."""
        control = self.schedule_step() if control is None else control
        self.exchanged_group.value = b""
        control.weight = self.take_pending()
        control.allow_allreduce()
        return control

    @torch.no_grad()
    def take_pending(self) -> float:
        """Move the pending gradients' mean to the averaged tensors, for a round or a lone step; return its samples."""
        self.last_step = None
        with self._lock:
            self._in_flight = self.unsent, self.samples
            samples = self.samples + self._behind[self._next_partition]
            self.unsent = [torch.zeros_like(tensor) for tensor in self.unsent]
            self.samples = self.old_samples = 0
        self._in_mean = max(1, samples)
        with self.get_tensors() as averaged:  # a round that was cancelled may still write to them
            self.residual.zero_()
            for mean, total in zip(averaged, self._in_flight[0], strict=True):
                mean.copy_(total).div_(self._in_mean)
        return samples

    @torch.no_grad()
    def finish(self, result: RoundResult | None) -> int:
        """Remove the gradients that a round, or a step of this peer alone (None), used; return their new samples."""
        if result:
            self._report = dict(group=result.group_id, digests=tuple(result.digests.values())[:MAX_WORKERS])
        num_partitions, partition_index = result.turn if result else (1, 0)
        sums, samples = self._in_flight
        if result:  # keep the part that did not reach the other peers, in used memory, because a GPU may have no other
            residuals = self.residual.split([param.numel() for param in self.parameters])
            with self._lock:
                for tensor, used, residual in zip(self.unsent, sums, residuals, strict=True):
                    tensor.add_(used.copy_(residual.view(tensor.shape)), alpha=self._in_mean)
        if num_partitions != len(self._behind):  # the bandwidth has changed: the counts become an estimate
            self._behind = [sum(self._behind) // len(self._behind)] * num_partitions
        self._behind = [behind + samples for behind in self._behind]
        self._behind[partition_index] = 0
        self._next_partition = (partition_index + 1) % num_partitions
        self._in_flight = [], 0
        return samples

    @torch.no_grad()
    def restore_pending(self) -> None:
        """Restore the pending gradients after a failed round."""
        sums, samples = self._in_flight
        # with NaN or infinity among them, no later round could succeed
        if all((tensor.flatten() @ tensor.flatten()).isfinite() for tensor in sums):
            with self._lock:
                for tensor, total in zip(self.unsent, sums, strict=True):
                    tensor.add_(total)
                self.samples += samples
        self._in_flight = [], 0

    def drop_pending(self) -> None:
        """Discard the pending gradients, and the pending update of local steps."""
        with self._lock:
            for tensor in self.unsent:
                tensor.zero_()
            self.samples = self.old_samples = 0
            self._behind = [0]
            self._next_partition = 0
        if self.local:
            self.local.drop_pending()

    def copy_update(self) -> tuple[list[torch.Tensor], int]:
        """Return the pending update of local steps plus the residual, and its samples."""
        self.local.move_anchor(self.local.anchor)  # takes out an offered update, which is in the residual again
        return [update + rest for update, rest in zip(self.local.measure(), self.unsent, strict=True)], self.samples

    def find_unequal_averages(self, members: Mapping[PeerID, GatheredData]) -> dict[PeerID, str]:
        """Return the peers from which at least two others, and most members of the last round, have received another
        average than this peer. Fewer reports do not count, because they prove nothing, nor do those of peers with far
        fewer rounds than the accused one, because keys cost nothing."""
        last = self._last_result
        states = {peer: member.state for peer, member in members.items() if member.state}
        digests = {peer: state.digests for peer, state in states.items() if state.group == last.group_id}
        reports = {peer: dict(zip(last.digests, theirs, strict=False)) for peer, theirs in digests.items()}
        rounds = self._trust.rounds
        unequal = {}
        for reducer, digest in last.digests.items():
            enough = min(rounds[reducer] / 2, WITNESS_ROUNDS)
            others = {*map(PeerID, last.members)} - {self.peer_id, reducer}
            witnesses = [peer for peer in others if rounds[peer] >= enough]
            differing = sum(reports[peer].get(reducer, digest) != digest for peer in witnesses if peer in reports)
            if reducer != self.peer_id and differing > 1 and 2 * differing > len(witnesses) + 1:
                unequal[reducer] = "has sent another average to others than to this peer"
        return unequal

    def select_group(self, group_info: GroupInfo) -> GroupInfo:
        """Return the members with the same epoch and lineage as most others, which differ after a partition, or on a
        peer that stepped alone; the rest must load that state. Of three or more peers, one with other parameters is
        excluded too, see `find_outliers`. Auxiliary peers can average the gradients of any state."""
        gathered = dict(zip(group_info.peer_ids, group_info.gathered, strict=True))
        members = {peer: parse_gathered(data) for peer, data in gathered.items()}
        # an auxiliary peer receives no averages
        self._unequal = {} if self.mode == AveragingMode.AUX else self.find_unequal_averages(members)
        trainers = [peer for peer, member in members.items() if member.mode != AveragingMode.AUX]
        states = {peer: state for peer in trainers if (state := members[peer].state) and state.is_synchronous}
        if 2 * len(states) <= len(trainers):
            return group_info
        keys = {peer: (state.epoch, state.lineage) for peer, state in states.items()}
        votes = Counter(keys.values())
        # with equal votes, prefer a state that is not far behind, and one that not only clients serve
        newest = max(epoch for epoch, _ in votes)
        served = {key for peer, key in keys.items() if members[peer].mode != AveragingMode.CLIENT}
        chosen = max(votes, key=lambda key: (votes[key], key[0] >= newest - 1, key in served, key))
        agreeing = [peer for peer, key in keys.items() if key == chosen]
        outliers = [agreeing[index] for index in find_outliers([states[peer].sketch for peer in agreeing])]
        agreeing = [peer for peer in agreeing if peer not in outliers]
        if self.mode != AveragingMode.AUX and self.peer_id not in agreeing:
            known = self.matchmaking.contributors
            # a leader may have omitted peers with this one's state, or have passed on earlier states of them
            missing = sum(not (p in states and states[p].epoch >= epoch) for p, epoch in known.items())
            own = keys.get(self.peer_id)
            if own != chosen and votes[own] + missing > len(agreeing):
                raise AllreduceException("more peers may have this peer's state than the group's")
            # not the next epoch: a group may form long before its epoch ends
            raise StateDivergedError(chosen[0], *([it.to_bytes() for it in peers] for peers in (agreeing, trainers)))
        if len(agreeing) == 1:
            raise PeersBehindError(f"no other peer has the same state in a group of {len(trainers)} trainers")
        remaining = [peer for peer in members if peer not in trainers or peer in agreeing]
        if all(members[peer].mode == AveragingMode.CLIENT for peer in remaining):
            raise AllreduceException(f"none of the {len(remaining)} peers with the same state accepts connections")
        return replace(group_info, peer_ids=tuple(remaining), gathered=tuple(gathered[peer] for peer in remaining))
