"""Local steps between two commits of the log (DiLoCo, arXiv 2311.08105)."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from hivemind.utils import nested_map
from torch.optim import Optimizer

from swarm.optimizer_state import copy_tensors, list_params

STEP_AHEAD = 0.5  # the part of the residual that stays in the local parameters (openreview.net/forum?id=ejnVWfknCm)


def add_outer_momentum(optimizer: Optimizer) -> Optimizer:
    """Give an optimizer's state the momentum of the outer steps: all peers must always exchange the same tensors."""
    for param in list_params(optimizer):
        optimizer.state[param]["outer_momentum"] = torch.zeros_like(param)
    return optimizer


def list_momenta(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the outer momentum of each parameter."""
    return [optimizer.state[param]["outer_momentum"] for param in list_params(optimizer)]


class LocalSteps:
    """The local parameters on the model's device, next to the swarm's parameters, the *anchor*.

    The difference between the two is the pending update. Local steps add to it, and an offer takes it out when the
    anchor moves next. When the anchor moves, the local parameters move by the same amount.
    """

    def __init__(self, params: Sequence[torch.Tensor], joint: Optimizer, make_inner: Callable[[], Optimizer]):
        """:param make_inner: a function that creates an optimizer of these parameters, for the local steps"""
        self.params = params
        self.joint = joint
        self.make_inner = make_inner
        self.inner: Optimizer | None = None  # created by the first local step
        self.anchor = [param.detach().clone() for param in params]
        self.offered: list[torch.Tensor] = []  # the update of the last offer, which `move_anchor` removes

    def step(self) -> None:
        """Make a local step at the swarm's learning rate; the first one with the moments of the joint steps."""
        if self.inner is None:
            self.load_inner_state(self.joint.state_dict())
        for group, of_swarm in zip(self.inner.param_groups, self.joint.param_groups, strict=True):
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
        for param, update in zip(self.params, self.offered, strict=False):
            param.add_(update)
        self.offered = []
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
        return nested_map(lambda it: it.to("cpu", copy=True) if torch.is_tensor(it) else it, self.inner.state_dict())

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
