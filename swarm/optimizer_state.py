"""The parameters and the optimizer's state of a peer: averaged, served, downloaded, saved and restored."""

import asyncio
import contextlib
import copy
import hashlib
import multiprocessing
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.optim.state_averager import initialize_optimizer_state_ as step_with_zero_gradients
from hivemind.utils import MPFuture, nested_map

from common.memory import collect_garbage
from swarm.gradients import GradientAverager
from swarm.state_download import DownloadProgress, StateDownload
from swarm.state_server import STATE, StateServer, allocate_flat


def list_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters in the order of the optimizer's groups, in which peers exchange them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def list_state(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[CompressionInfo]]:
    """Return the tensors of a state in the order in which peers exchange them: the parameters, then for each of them
    the optimizer's values in the order of their names. A number is a tensor, too: LAMB's trust ratio is either."""
    tensors = [(param, "parameter", TensorRole.PARAMETER) for param in list_params(optimizer)]
    for param in list_params(optimizer):
        for name, value in sorted(optimizer.state.get(param, {}).items()):
            is_number = not isinstance(value, torch.Tensor) or not value.ndim
            value = torch.as_tensor(value, dtype=torch.float64) if is_number else value
            # no codec compresses this role: all peers must have the outer momentum to the last bit
            tensors.append((value, name, TensorRole.UNSPECIFIED if name == "outer_momentum" else TensorRole.OPTIMIZER))
    infos = [CompressionInfo.from_tensor(tensor, key=name, role=role) for tensor, name, role in tensors]
    return [tensor for tensor, _, _ in tensors], infos


def convert_like(own: object, value: torch.Tensor) -> object:
    """Return a value of `list_state` as this optimizer keeps it, with the type of `own`."""
    if isinstance(own, torch.Tensor):
        return value.to(own.dtype, copy=True)  # torch keeps the tensor, and with it the memory of the whole download
    number = value.item()
    return int(number) if isinstance(own, int) and number.is_integer() else number


@torch.no_grad()
def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def copy_flat(tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]) -> list[torch.Tensor]:
    """Copy the tensors into flat buffers, because the next step changes the originals while they are being sent."""
    copies = allocate_flat(infos)
    copy_tensors(copies, tensors)
    return copies


def initialize_optimizer_state_(optimizer: torch.optim.Optimizer) -> None:
    """Create the tensors of the optimizer's state as they are before its first step (note 8)."""
    settings = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    step_with_zero_gradients(optimizer)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for state in optimizer.state.values():
        if "step" in state:  # torch's SGD, for example, counts no steps
            state["step"] *= 0


class StateAverager(TrainingStateAverager, StateServer):
    """A state averager that other peers can download from, and that downloads from several of them at once."""

    def __init__(self, *args, **kwargs):
        # set by the optimizer and its parts
        #: the id of the group whose gradients the next step applies, or of this peer if it is alone
        self.group_id = b""
        self.declares_steps = True  # whether others may load the state as soon as a step is made
        #: the averager whose last step is served to peers that missed it
        self.grad_averager: GradientAverager | None = None
        self.local = None  # the local steps, by which the model is ahead of the parameters here, or None
        self.download_progress = multiprocessing.Value(DownloadProgress)
        super().__init__(*args, **kwargs)
        self.optimizer.register_step_post_hook(self.record_step)

    def record_step(self, *_) -> None:
        """Update the lineage, and declare the new epoch; called after each step of the optimizer."""
        self.lineage = self.extend_lineage(self.local_epoch, self.group_id.hex())
        if self.declares_steps:
            self.state_sharing_priority = self.local_epoch

    def extend_lineage(self, epoch: int, group_id: str) -> str:
        """Return the lineage after the step to this epoch with the gradients of this group (hex)."""
        return hashlib.sha256(f"{self.lineage} {epoch} {group_id}".encode()).hexdigest()[:16]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch and its learning rate, also to an earlier epoch (note 63)."""
        self.scheduler._step_count = epoch
        with warnings.catch_warnings(action="ignore"):  # torch advises against a jump, but most schedules allow it
            self.scheduler.step(epoch)
        self.local_epoch = self.state_sharing_priority = epoch

    def _apply_optimizer_parameters_(self) -> None:
        if self.local is None:
            super()._apply_optimizer_parameters_()
        else:
            self.local.move_anchor(list_params(self.optimizer))

    @torch.no_grad()
    def get_current_state(self):
        """Return a consistent copy of the state with its lineage hash, or of the last step's gradients, or nothing."""
        if self._wanted.value == STATE:
            # a step holds this lock while it changes all of these; an averaging of parameters may go on for seconds
            with self.lock_optimizer:
                tensors, infos = list_state(self.optimizer)
                # hivemind's local_epoch is ahead of the parameters until the step is made
                metadata = {"epoch": self.scheduler.last_epoch, "lineage": self.lineage}
                return metadata, copy_flat(tensors, infos), infos
        last_step = self.grad_averager and self.grad_averager.last_step
        if last_step is None or self._wanted.value != self.make_step_key(last_step[1]).encode():  # a copy takes long
            return {"epoch": -1, "lineage": ""}, [], []
        with self.grad_averager.get_tensors() as gradients:
            # the next round, in another thread, ends the last step
            epoch, lineage, group_id = self.grad_averager.last_step or (-1, "", b"")
            infos = [CompressionInfo.from_tensor(it, key="gradient", role=TensorRole.GRADIENT) for it in gradients]
            metadata = {"epoch": epoch, "lineage": self.make_step_key(lineage), "group": group_id}
            return metadata, copy_flat(gradients, infos), infos

    def start_download(self, min_epoch: int = 0, is_step: bool = False, **options) -> MPFuture:
        """Start to download a state for `apply_downloaded_state`, or the averaged gradients of the step from this one.

        :param min_epoch: the epoch of the state to wait for, some seconds, before an earlier state is accepted
        :param options: `contributors`, `avoid`, `is_synchronous` and `clients`, see StateDownload
        :returns: a future of (metadata, tensors), or of None if no peer sent it. metadata["donors"] are the ids of a
            state's donors, most bytes first; metadata["group"] is the id of the group that averaged the gradients
        """
        # the epoch that clients declare may lag behind their state; an auxiliary peer has no state of its own to keep
        lowest_epoch = 0 if self.mode == AveragingMode.AUX else min(min_epoch, self.local_epoch)
        request = (self.local_epoch, self.lineage) if is_step else (min_epoch, lowest_epoch)
        future = MPFuture()
        self._send("_download", future, is_step, request, **options)
        return future

    async def _download(self, future: MPFuture, is_step: bool, request: tuple, **options) -> None:
        """Run a download in the averager's process; the future's result is None if the download fails."""
        result = None
        self.download_progress.elements = 0
        infos = list_state(self.optimizer)[1]
        if is_step:
            infos = [replace(it, role=TensorRole.GRADIENT) for it in infos if it.role == TensorRole.PARAMETER]
        download = StateDownload(self, infos, **options)
        try:
            result = await (download.fetch_step if is_step else download.fetch_state)(*request)
        finally:
            future.set_result(result)
            # a download and its tensors form a reference cycle
            asyncio.get_running_loop().call_later(1.0, collect_garbage)

    def apply_downloaded_state(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Replace this peer's state by a downloaded one, see `start_download`."""
        params = len(list_params(self.optimizer))
        values = iter(tensors[params:])
        own = sorted(self.optimizer.state_dict()["state"].items())
        state = {i: {name: convert_like(it, next(values)) for name, it in sorted(of_i.items())} for i, of_i in own}
        self._replace_state(tensors[:params], state, metadata["epoch"], metadata["lineage"])

    def _replace_state(self, parameters: Sequence[torch.Tensor], state: dict, epoch: int, lineage: str) -> None:
        """Replace the state; learning rate and other options of this process stay, as the contract says."""
        # an auxiliary peer has nothing to average and must not wait for the other peers' round
        averaged = contextlib.nullcontext() if self.mode == AveragingMode.AUX else self.lock_averaged_tensors
        with self.lock_optimizer, averaged, torch.no_grad():
            self.optimizer.load_state_dict(dict(state=state, param_groups=self.optimizer.state_dict()["param_groups"]))
            copy_tensors(list_params(self.optimizer), parameters)
            self.set_epoch(epoch)
            self.lineage = lineage
        self._apply_optimizer_parameters_()

    def dump_state(self) -> dict:
        """Return a copy of the training state without gradients, which torch.load can read with weights_only=True; call
        it between two steps. Parameters may be half averaged by a round in the background."""
        with self.lock_optimizer:
            # the scheduler's epoch: a step in the background counts once it has finished and moved the schedule
            return {
                "parameters": [param.detach().clone() for param in list_params(self.optimizer)],
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
                "local_epoch": self.scheduler.last_epoch,
                "lineage": self.lineage,
            }

    def restore_state(self, state: dict) -> None:
        """Load a state from `dump_state`. Raise a ValueError, and change nothing, if its tensors have other shapes."""
        own = list_params(self.optimizer), self.optimizer.state_dict()["state"]
        saved = state["parameters"], state["optimizer"]["state"]
        # a single number may be a tensor at one time and a plain number at another, as LAMB's trust ratio
        shapes, own_shapes = (nested_map(lambda it: tuple(getattr(it, "shape", ())), these) for these in (saved, own))
        if shapes != own_shapes:
            raise ValueError("`optim`, `min_8bit_size`, `local_steps`, or the shapes of the tensors differ")
        # a copy of the moments, because torch keeps the tensors it loads and changes them in place
        parameters, moments = saved
        self._replace_state(parameters, copy.deepcopy(moments), state["local_epoch"], state.get("lineage", ""))
