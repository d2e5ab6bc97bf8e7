"""Local steps between two rounds, and rounds that average pseudo-gradients (DiLoCo, arXiv 2311.08105)."""

import contextlib
import copy
import ctypes
import multiprocessing
from collections.abc import Callable, Iterator, Sequence

import torch

from swarm.aggregation import Contribution, Numbers, aggregate
from swarm.gradients import GradientAverager
from swarm.optimizer_state import list_params


@torch.no_grad()
def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


class OuterOptimizer(torch.optim.Optimizer):
    """An optimizer of the parameters in host memory. While all peers step together, it is the inner optimizer. Once
    they take local steps, it is SGD with Nesterov momentum, and its gradients are the averaged pseudo-gradients."""

    def __init__(self, inner: torch.optim.Optimizer, lr: float, momentum: float):
        super().__init__(inner.param_groups, {})
        self.inner, self.lr, self.momentum = inner, lr, momentum
        self.is_outer = False  # whether the next step is an outer step (SGD); set by LocalStepsAverager.is_local
        #: the offers of the commit that the next outer step applies, instead of a gradient; set by LogSteps
        self.contributions: list[Contribution] | None = None
        self.weights: list[float] = []  # of the offers that the last step applied
        for param in list_params(inner):  # from the start, because all peers must exchange the same tensors
            inner.state[param]["outer_momentum"] = torch.zeros_like(param)
        self.state = inner.state

    @property
    def grad_norm(self) -> float:
        """The norm of the last gradient before clipping."""
        return self.inner.grad_norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Make an inner step, or an outer step with the averaged pseudo-gradients."""
        if not self.is_outer:
            self.inner.step()
            return
        params = list_params(self)
        if self.contributions is not None:
            anchor, momentum = Numbers(params), Numbers(self.list_momenta())
            self.weights = aggregate(anchor, momentum, self.contributions, lr=self.lr, outer_momentum=self.momentum)
            self.inner.grad_norm = torch.nn.utils.get_total_norm(self.list_momenta()).item()
            return
        self.inner.grad_norm = torch.nn.utils.get_total_norm([param.grad for param in params]).item()
        for param in params:
            momentum = self.state[param]["outer_momentum"].mul_(self.momentum).add_(param.grad)
            param.sub_(param.grad + self.momentum * momentum, alpha=self.lr)

    def list_momenta(self) -> list[torch.Tensor]:
        """Return the outer momentum of each parameter."""
        return [self.state[param]["outer_momentum"] for param in list_params(self)]

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the inner optimizer's state, which this optimizer shares."""
        self.inner.load_state_dict(state_dict)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups


class LocalSteps:
    """The local parameters on the model's device, next to the swarm's parameters, the *anchor*.

    The difference between the two is the pending update. Local steps add to it, and a round removes the part that it
    averages. When the anchor moves, the local parameters move by the same amount.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        outer: OuterOptimizer,
        make_inner: Callable[[], torch.optim.Optimizer],
    ):
        """:param make_inner: a function that creates an optimizer of these parameters, for the local steps"""
        self.params, self.outer, self.make_inner = params, outer, make_inner
        self.inner: torch.optim.Optimizer | None = None  # created by the first local step
        self.anchor = [param.detach().clone() for param in params]
        self._taken: list[torch.Tensor] = []  # averaged by a successful round; another thread may set it

    def move_to(self, device: torch.device) -> None:
        """Move the anchor to the model's device; call this once, after the model has moved."""
        self.anchor = [tensor.to(device) for tensor in self.anchor]

    def step(self) -> None:
        """Make a local step with the model's gradients, at the swarm's learning rate; the first one with the moments of
        the steps that all peers made together."""
        if self.inner is None:
            self.load_inner_state(self.outer.inner.state_dict())
        for group, of_swarm in zip(self.inner.param_groups, self.outer.param_groups, strict=True):
            group["lr"] = of_swarm["lr"]
        self.inner.step()
        # some optimizers write without autograd's version counter, by which other ranks detect changes
        for param in self.params:
            torch.autograd.graph.increment_version(param)

    @torch.no_grad()
    def measure(self) -> list[torch.Tensor]:
        """Return the pseudo-gradients: the anchor minus the local parameters."""
        return [anchor - param for anchor, param in zip(self.anchor, self.params, strict=True)]

    def record_averaged(self, sent: list[torch.Tensor]) -> None:
        """Record what a round has averaged, which `move_anchor` then removes; may be called from any thread."""
        self._taken = sent

    @torch.no_grad()
    def move_anchor(self, anchor: Sequence[torch.Tensor]) -> None:
        """Move the anchor, and the local parameters along with it; if they are not finite, reset them to the anchor."""
        updates, self._taken = self._taken, []
        for param, update in zip(self.params, updates, strict=False):
            param.add_(update)
        for param, before, after in zip(self.params, self.anchor, anchor, strict=True):
            after = after.to(param.device, copy=True)  # a round in the background may be changing the original
            param.add_(after - before)
            before.copy_(after)
            if not param.sum().isfinite():
                param.copy_(after)

    def drop_pending(self) -> None:
        """Discard the pending update: reset the local parameters to the anchor."""
        self._taken = []
        copy_tensors(self.params, self.anchor)

    def load_inner_state(self, state_dict: dict) -> None:
        """Load the state of an optimizer of local steps, or of the swarm's."""
        if self.inner is None:
            self.inner = self.make_inner()
        # a copy, because torch keeps tensors that are on the right device, and changes them in place
        state = copy.deepcopy(state_dict["state"])
        for moments in state.values():
            moments.pop("outer_momentum", None)
        self.inner.load_state_dict({"state": state, "param_groups": self.inner.state_dict()["param_groups"]})


@contextlib.contextmanager
def at_anchor(local: LocalSteps | None) -> Iterator[None]:
    """Set the model to the swarm's parameters within this context; without local steps, it always has them."""
    params, anchor = (local.params, local.anchor) if local else ((), ())
    own = [param.detach().clone() for param in params]
    copy_tensors(params, anchor)
    try:
        yield
    finally:
        copy_tensors(params, own)


class LocalStepsAverager(GradientAverager):
    """A gradient averager that averages pseudo-gradients once the peers take local steps. The next ones contain the
    residual of sparsification (error feedback, arXiv 1809.07599)."""

    local: LocalSteps  # set by the optimizer
    # the epoch of the last round of local steps, and the epoch after the last such round that succeeded
    _taken_epoch, _expected_epoch = 0, 0

    def __init__(self, *args, **kwargs):
        self._is_local = multiprocessing.Value(ctypes.c_bool)
        super().__init__(*args, **kwargs)

    @property
    def is_local(self) -> bool:
        """Whether the peers take local steps; set by the optimizer."""
        return self._is_local.value

    @is_local.setter
    def is_local(self, value: bool) -> None:
        """Set whether the peers take local steps, in all processes and in the outer optimizer."""
        self._is_local.value = self.local.outer.is_outer = value

    def list_shared_parameters(self) -> Sequence[torch.Tensor]:
        """Return the anchor, because the local parameters differ between peers."""
        return self.local.anchor

    def accumulate(self, batch_size: int) -> None:
        """Make a local step with the parameters' gradients; before local steps start, accumulate them."""
        if not self.is_local:
            return super().accumulate(batch_size)
        self.local.step()
        with self._lock:
            self.samples += batch_size

    @torch.no_grad()
    def take_pending(self) -> float:
        """Start a round with the pseudo-gradients, per epoch for a straggler; return the number of samples."""
        if not self.is_local:
            return super().take_pending()
        self.last_step = None
        pseudo_gradients = self.local.measure()
        if not all(tensor.sum().isfinite() for tensor in pseudo_gradients):
            self.drop_pending()
            pseudo_gradients = self.local.measure()
        with self._lock:
            self._in_flight, self.samples = (pseudo_gradients, self.samples), 0
        epoch = self.round_state[0]
        # a straggler's update covers several epochs in which the others have stepped: it sends the mean per epoch
        self._in_mean = 1 + max(0, epoch - self._expected_epoch) if self._expected_epoch else 1
        self._taken_epoch = epoch
        sums = [tensor + residual for tensor, residual in zip(pseudo_gradients, self.unsent, strict=True)]
        self._set_averaged(sums, self._in_mean)
        return self._in_flight[1]

    def finish(self, num_partitions: int = 1, partition_index: int = 0) -> int:
        """Remove the sent gradients, and record the averaged update for `move_anchor`."""
        if self.is_local:
            self.local.record_averaged(self._in_flight[0])
            self._expected_epoch = self._taken_epoch + 1
        return super().finish(num_partitions, partition_index)

    def _keep_residual(self) -> None:
        if not self.is_local:
            return super()._keep_residual()
        if self._in_flight[1]:  # an update of 0 samples has no weight in the average, so the old residual stays
            for tensor, residual in zip(self.unsent, self.list_residuals(), strict=True):
                tensor.copy_(residual).mul_(self._in_mean)

    def restore_pending(self) -> None:
        """Restore the pending samples after a failed round; the local parameters still contain the update."""
        if not self.is_local:
            return super().restore_pending()
        with self._lock:
            self.samples += self._in_flight[1]
        self._in_flight = [], 0

    def drop_pending(self) -> None:
        """Discard the pending gradients, and the pending update of the local parameters."""
        super().drop_pending()
        self.local.drop_pending()
        self._expected_epoch = 0
