"""Steps of a peer's own between two rounds, which average how far each peer has come (DiLoCo, arXiv 2311.08105)."""

import contextlib
import copy
import ctypes
import multiprocessing
from collections.abc import Callable, Iterator, Sequence

import torch
from hivemind.compression import CompressionBase

from swarm.gradients import GradientAverager
from swarm.sparse import TopKCompression
from swarm.states import list_params


class OuterOptimizer(torch.optim.Optimizer):
    """Of the parameters in host memory: the optimizer that it is made of as long as all peers step together; from then
    on SGD with Nesterov momentum, whose gradient is the average of how far the peers have come."""

    def __init__(self, inner: torch.optim.Optimizer, lr: float, momentum: float):
        super().__init__(inner.param_groups, {})
        self.inner, self.lr, self.momentum = inner, lr, momentum
        #: whether the next step is one of SGD; set by the swarm's optimizer
        self.is_outer = False
        for param in list_params(inner):  # all peers exchange the same tensors all the time
            inner.state[param]["outer_momentum"] = torch.zeros_like(param)
        self.state = inner.state

    @property
    def grad_norm(self) -> float:
        """Of the last gradient before clipping."""
        return self.inner.grad_norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if not self.is_outer:
            self.inner.step()
            return
        params = list_params(self)
        self.inner.grad_norm = torch.nn.utils.get_total_norm([param.grad for param in params]).item()
        for param in params:
            momentum = self.state[param]["outer_momentum"].mul_(self.momentum).add_(param.grad)
            param.sub_(param.grad + self.momentum * momentum, alpha=self.lr)

    def load_state_dict(self, state_dict: dict) -> None:
        self.inner.load_state_dict(state_dict)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups


class LocalSteps:
    """Where this peer is, on the model's device, beside the swarm's parameters, the *anchor*. What lies between the two
    is what it has not yet sent: steps add to it, rounds take it out, and when the anchor moves, it moves along."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        outer: OuterOptimizer,
        make_optimizer: Callable[[list[dict]], torch.optim.Optimizer],
        groups: list[dict],
    ):
        """
        :param params: the model's
        :param make_optimizer: of these groups of them
        """
        self.params, self.outer, self.make_optimizer, self.groups = params, outer, make_optimizer, groups
        self.inner: torch.optim.Optimizer | None = None
        self.anchor = [param.detach().clone() for param in params]
        self._taken: list[torch.Tensor] = []  # by a round that has succeeded, in the background perhaps

    def move_to(self, device: torch.device) -> None:
        """Call it once, after the model has moved there."""
        self.anchor = [tensor.to(device) for tensor in self.anchor]

    def step(self) -> None:
        """With the model's gradients, at the swarm's learning rate; the first one begins with the moments of the steps
        that all peers have made together."""
        if self.inner is None:
            self.inner = self.make_optimizer(self.groups)
            self.load_state_dict(self.outer.inner.state_dict())
        for group, of_swarm in zip(self.inner.param_groups, self.outer.param_groups, strict=True):
            group["lr"] = of_swarm["lr"]
        self.inner.step()
        for param in self.params:  # some optimizers write past autograd, by which other ranks know what has changed
            torch.autograd.graph.increment_version(param)

    @torch.no_grad()
    def measure(self) -> list[torch.Tensor]:
        """How far the anchor would have to go, against the gradient, to be where this peer is."""
        return [anchor - param for anchor, param in zip(self.anchor, self.params, strict=True)]

    def take_pending(self, sent: list[torch.Tensor]) -> None:
        """A round has taken this of it; from any thread."""
        self._taken = sent

    @torch.no_grad()
    def move_anchor(self, anchor: Sequence[torch.Tensor]) -> None:
        """To the swarm's new parameters."""
        taken, self._taken = self._taken, []
        for param, sent in zip(self.params, taken, strict=False):
            param.add_(sent)
        for param, before, after in zip(self.params, self.anchor, anchor, strict=True):
            after = after.to(param.device, copy=True)  # its average may be arriving
            param.add_(after - before)
            before.copy_(after)
            if not param.sum().isfinite():
                param.copy_(after)

    @torch.no_grad()
    def drop_pending(self) -> None:
        """Go back to the anchor."""
        self._taken = []
        for param, anchor in zip(self.params, self.anchor, strict=True):
            param.copy_(anchor)

    def state_dict(self) -> dict:
        """The moments, which are this peer's own; nothing before its first step."""
        return self.inner.state_dict() if self.inner else {}

    def load_state_dict(self, state_dict: dict) -> None:
        """What `state_dict` returned, also of the outer optimizer."""
        if self.inner is None:
            self.inner = self.make_optimizer(self.groups)
        # a copy: torch would keep tensors that are on its device, and change them in place
        state = copy.deepcopy(state_dict["state"])
        for moments in state.values():
            moments.pop("outer_momentum", None)
        self.inner.load_state_dict({"state": state, "param_groups": self.inner.state_dict()["param_groups"]})


@contextlib.contextmanager
def at_anchor(local: LocalSteps | None) -> Iterator[None]:
    """With the model where the swarm is; without local steps it is always there."""

    @torch.no_grad()
    def move_to(tensors: Sequence[torch.Tensor]) -> None:
        for param, tensor in zip(params, tensors, strict=True):
            param.copy_(tensor)

    params, anchor = (local.params, local.anchor) if local else ((), ())
    own = [param.detach().clone() for param in params]
    move_to(anchor)
    try:
        yield
    finally:
        move_to(own)


class LocalStepsAverager(GradientAverager):
    """Averages how far peers have come, once they step by themselves. What of it does not arrive is added to how far
    they come next (error feedback, arXiv 1809.07599)."""

    local: LocalSteps  # set by the optimizer
    # the epoch of the last round of local steps, and the one after the last that succeeded
    _taken_epoch, _expected_epoch = 0, 0

    def __init__(self, *args, sparse: TopKCompression | None, **kwargs):
        """:param sparse: how it is sent then; default: like gradients"""
        self.sparse, self._is_local = sparse, multiprocessing.Value(ctypes.c_bool)
        super().__init__(*args, **kwargs)

    @property
    def is_local(self) -> bool:
        """Whether peers step by themselves; set by the optimizer."""
        return self._is_local.value

    @is_local.setter
    def is_local(self, value: bool) -> None:
        self._is_local.value = self.local.outer.is_outer = value

    @property
    def codec(self) -> CompressionBase:
        return self.sparse if self.is_local and self.sparse else super().codec

    async def _run_allreduce_inplace_(self, *args, **kwargs) -> None:
        await super()._run_allreduce_inplace_(*args, **kwargs | {"compression": self.codec})

    def list_shared_parameters(self) -> Sequence[torch.Tensor]:
        return self.local.anchor

    def accumulate(self, batch_size: int) -> None:
        if not self.is_local:
            return super().accumulate(batch_size)
        self.local.step()
        with self._lock:
            self.samples += batch_size

    @torch.no_grad()
    def take_pending(self) -> float:
        if not self.is_local:
            return super().take_pending()
        self.last_step = None
        come = self.local.measure()
        if not all(tensor.sum().isfinite() for tensor in come):
            self.drop_pending()
            come = self.local.measure()
        with self._lock:
            self._in_flight, self.samples = (come, self.samples), 0
        epoch = self.round_state[0]
        # what a late peer has done while the others stepped without it would be a step on top of theirs
        self._in_mean = 1 + max(0, epoch - self._expected_epoch) if self._expected_epoch else 1
        self._taken_epoch = epoch
        self._set_averaged([tensor + rest for tensor, rest in zip(come, self.unsent, strict=True)], self._in_mean)
        return self._in_flight[1]

    def finish(self, share: int = 1, turn: int = 0) -> int:
        if self.is_local:
            self.local.take_pending(self._in_flight[0])
            self._expected_epoch = self._taken_epoch + 1
        return super().finish(share, turn)

    def _keep_residual(self) -> None:
        if not self.is_local:
            return super()._keep_residual()
        if self._in_flight[1]:  # else nobody has counted what it held
            for tensor, rest in zip(self.unsent, self.list_residuals(), strict=True):
                tensor.copy_(rest).mul_(self._in_mean)

    def restore_pending(self) -> None:
        if not self.is_local:
            return super().restore_pending()
        (_, samples), self._in_flight = self._in_flight, ([], 0)
        with self._lock:
            self.samples += samples

    def drop_pending(self) -> None:
        super().drop_pending()
        self.local.drop_pending()
        self._expected_epoch = 0
