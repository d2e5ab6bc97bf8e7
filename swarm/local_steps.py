"""Local steps between two commits of the log, and the outer step that a commit makes (DiLoCo, arXiv 2311.08105)."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from hivemind.utils import nested_map
from torch.optim import Optimizer

from swarm.aggregation import Contribution, Numbers, aggregate
from swarm.optimizer_state import copy_tensors, list_params

STEP_AHEAD = 0.5  # the part of the residual that stays in the local parameters (openreview.net/forum?id=ejnVWfknCm)


class OuterOptimizer(Optimizer):
    """An optimizer of the parameters in host memory. While all peers step together, it is the inner optimizer. For a
    commit of the log, it is SGD with Nesterov momentum, and its gradient is the weighted sum of the offers."""

    def __init__(self, inner: Optimizer, lr: float, momentum: float):
        super().__init__(inner.param_groups, {})
        self.inner, self.lr, self.momentum = inner, lr, momentum
        self.contributions: list[Contribution] | None = None  # the offers to apply; None for an inner step
        self.seed = b""  # the commit that has them
        self.weights: list[float] = []  # of the offers that the last step applied
        for param in list_params(inner):  # from the start, because all peers must exchange the same tensors
            inner.state[param]["outer_momentum"] = torch.zeros_like(param)
        self.state = inner.state

    @property
    def grad_norm(self) -> float:
        """The norm of the last gradient before clipping, or of the outer momentum after a commit."""
        return self.inner.grad_norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Make an inner step, or the outer step of a commit."""
        if self.contributions is None:
            self.inner.step()
            return
        state = Numbers(list_params(self)), Numbers(self.list_momenta())
        self.weights = aggregate(*state, self.contributions, lr=self.lr, outer_momentum=self.momentum, seed=self.seed)
        self.inner.grad_norm = torch.nn.utils.get_total_norm(self.list_momenta()).item()

    def list_momenta(self) -> list[torch.Tensor]:
        """Return the outer momentum of each parameter."""
        return [self.state[param]["outer_momentum"] for param in list_params(self)]

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the inner optimizer's state, which this optimizer shares."""
        self.inner.load_state_dict(state_dict)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups


class LocalSteps:
    """The local parameters on the model's device, next to the swarm's parameters, the *anchor*.

    The difference between the two is the pending update. Local steps add to it, and an offer takes it out when the
    anchor moves next. When the anchor moves, the local parameters move by the same amount.
    """

    def __init__(self, params: Sequence[torch.Tensor], outer: OuterOptimizer, make_inner: Callable[[], Optimizer]):
        """:param make_inner: a function that creates an optimizer of these parameters, for the local steps"""
        self.params, self.outer, self.make_inner = params, outer, make_inner
        self.inner: Optimizer | None = None  # created by the first local step
        self.anchor = [param.detach().clone() for param in params]
        self.offered: list[torch.Tensor] = []  # the update of the last offer, which `move_anchor` removes

    def step(self) -> None:
        """Make a local step at the swarm's learning rate; the first one with the moments of the joint steps."""
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

    @torch.no_grad()
    def mark_offered(self, update: list[torch.Tensor], residual: Sequence[torch.Tensor]) -> None:
        """Let `move_anchor` take an offered update out of the local parameters. A part of what the offer lacks stays
        there instead of in the residual, because the next local steps would compute it once more."""
        for tensor, lacking in zip(update, residual, strict=True):
            tensor.sub_(lacking, alpha=STEP_AHEAD)
            lacking.mul_(1 - STEP_AHEAD)
        self.offered = update

    @torch.no_grad()
    def move_anchor(self, anchor: Sequence[torch.Tensor]) -> None:
        """Move the anchor, and the local parameters along with it; if they are not finite, reset them to the anchor."""
        updates, self.offered = self.offered, []
        for param, update in zip(self.params, updates, strict=False):
            param.add_(update)
        for param, before, after in zip(self.params, self.anchor, anchor, strict=True):
            after = after.to(param.device, copy=True)  # parameters are averaged in the background
            param.add_(after - before)
            before.copy_(after)
            if not param.sum().isfinite():
                param.copy_(after)

    def drop_pending(self) -> None:
        """Discard the pending update: reset the local parameters to the anchor."""
        self.offered = []
        copy_tensors(self.params, self.anchor)

    def dump_inner_state(self) -> dict:
        """Return a copy of the state of the local steps' optimizer, in host memory."""
        state = self.inner.state_dict()
        return nested_map(lambda it: it.to("cpu", copy=True) if isinstance(it, torch.Tensor) else it, state)

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
