"""The parameters and the optimizer's state of a peer: averaged, served, downloaded, saved and restored."""

import contextlib
import copy
import hashlib
import multiprocessing
import threading
from collections.abc import Sequence

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.utils import MPFuture, nested_pack

from swarm.gradients import GradientAverager
from swarm.state_download import DownloadProgress, StateDownload
from swarm.state_server import StateServer, copy_flat, make_step_key


def list_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters in the order of the optimizer's groups, in which peers exchange them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def initialize_optimizer_state_(optimizer: torch.optim.Optimizer) -> None:
    """Create the tensors of the optimizer's state as they are before its first step.

    hivemind creates them by a step with zero gradients at the full learning rate. That step counts in bias correction
    (note 8), and its weight decay moves the parameters or enters the momentum of SGD.
    """
    params = list_params(optimizer)
    gradients = [param.grad for param in params]
    settings = [dict(group) for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    optimizer.step()
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
        if "step" in optimizer.state[param]:  # torch's SGD, for example, counts no steps
            optimizer.state[param]["step"] *= 0


class StateAverager(TrainingStateAverager, StateServer):
    """A state averager that other peers can download from, and that downloads from several of them at once."""

    #: a peer that missed the group of the others would otherwise delay its next step by averaging_timeout
    gives_up_early = True
    #: the id of the group whose gradients the next step applies, or of this peer if it is alone; set by the optimizer
    group_id = b""
    #: the averager whose last step is served to peers that missed it; set by the optimizer
    grad_averager: GradientAverager | None = None
    #: the local steps, by which the model is ahead of the parameters here, or None; set by the optimizer
    local = None

    def __init__(self, *args, **kwargs):
        self._lock_step = threading.Lock()
        self.download_progress = multiprocessing.Value(DownloadProgress)
        super().__init__(*args, **kwargs)

    def step(self, *args, increment_epoch: bool = False, **kwargs):
        """Step like hivemind, but hold back downloads during the step, and update the lineage hash."""
        if not increment_epoch:
            return super().step(*args, **kwargs)
        # hivemind advances the epoch before the step: a download in between would get old parameters as new ones
        with self._lock_step:
            result = super().step(*args, increment_epoch=True, **kwargs)
            history = f"{self.lineage} {self.local_epoch} {self.group_id.hex()}"
            self.lineage = hashlib.sha256(history.encode()).hexdigest()[:16]
            self.state_sharing_priority = self.local_epoch
            return result

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch and its learning rate, also to an earlier epoch; hivemind can only advance them (note 63)."""
        if self.scheduler is not None:
            self.scheduler.last_epoch, self.scheduler._step_count = epoch - 1, epoch
            self.scheduler.step()
        self.local_epoch = self.state_sharing_priority = epoch

    def _apply_optimizer_parameters_(self) -> None:
        if self.local is None:
            super()._apply_optimizer_parameters_()
        else:
            self.local.move_anchor(list_params(self.optimizer))

    # --- for other peers

    def get_current_state(self):
        """Return a consistent copy of the state with its lineage hash, or the last step's gradients if requested."""
        with self._lock_step:
            if self._wants_step.value:
                return self._get_last_step()
            metadata, tensors, infos = super().get_current_state()
            return metadata | {"lineage": self.lineage}, copy_flat(tensors, infos), infos

    def _get_last_step(self):
        """Return the gradients of the last step; they exist until the next round starts."""
        if self.grad_averager is None or self.grad_averager.last_step is None:
            return {"epoch": -1, "lineage": ""}, [], []
        with self.grad_averager.get_tensors() as gradients:
            epoch, lineage, group_id = self.grad_averager.last_step or (-1, "", b"")
            infos = [
                CompressionInfo.from_tensor(gradient, key=i, role=TensorRole.GRADIENT)
                for i, gradient in enumerate(gradients)
            ]
            metadata = {"epoch": epoch, "lineage": make_step_key(lineage), "group": group_id}
            return metadata, copy_flat(gradients, infos), infos

    # --- from other peers

    def start_download(
        self,
        min_epoch: int = 0,
        trusted: Sequence[bytes] = (),
        avoid: Sequence[bytes] = (),
        timeout: float = 600.0,
        is_step: bool = False,
    ) -> MPFuture:
        """Start to download a state for `apply_downloaded_state`, or the averaged gradients of the step from this one.

        :param min_epoch: the epoch of the state to wait for, some seconds, before an earlier state is accepted
        :param trusted: see StateDownload, like `avoid` and `timeout`
        :returns: a future of (metadata, tensors), or of None if no peer sent it. metadata["donors"] are the ids of the
            peers that sent the state, the one that sent most of it first; metadata["group"] is the id of the group that
            averaged the gradients
        """
        # the epoch that clients declare may lag behind their state; an auxiliary peer has no state of its own to keep
        lowest_epoch = 0 if self.mode == AveragingMode.AUX else min(min_epoch, self.local_epoch)
        request = (self.local_epoch, self.lineage) if is_step else (min_epoch, lowest_epoch)
        future = MPFuture()
        self._outer_pipe.send(("_download", [future, is_step, request, trusted, avoid, timeout], {}))
        return future

    async def _download(self, future: MPFuture, is_step: bool, request: tuple, *options) -> None:
        """Run a download in the averager's process; the future's result is None if the download fails."""
        result, self.download_progress.elements = None, 0
        download = StateDownload(self, list_params(self.optimizer), None if is_step else self.optimizer, *options)
        try:
            result = await (download.fetch_step if is_step else download.fetch_state)(*request)
        finally:
            future.set_result(result)

    def apply_downloaded_state(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Replace this peer's state by a downloaded one, see `start_download`."""
        params = len(list_params(self.optimizer))
        # clones, because torch keeps the tensors it loads, and each of them the memory of the whole download
        moments = [tensor.clone() for tensor in tensors[params:]]
        items = metadata["optimizer_metadata"]
        values = [moments[item["index"]] if item["type"] == "tensor" else item["value"] for item in items]
        state = nested_pack(values, self.optimizer.state_dict())["state"]
        self._replace_state(tensors[:params], state, metadata["epoch"], metadata["lineage"])

    def _replace_state(self, parameters: Sequence[torch.Tensor], state: dict, epoch: int, lineage: str) -> None:
        """Replace the state; learning rate and other options of this process stay, as the contract says."""
        # an auxiliary peer has nothing to average and must not wait for the other peers' round
        averaged = contextlib.nullcontext() if self.mode == AveragingMode.AUX else self.lock_averaged_tensors
        with self._lock_step, self.lock_optimizer, averaged, torch.no_grad():
            settings = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": state, "param_groups": settings})
            for target, tensor in zip(list_params(self.optimizer), parameters, strict=True):
                target.copy_(tensor)
            self.set_epoch(epoch)
            self.lineage = lineage
        self._apply_optimizer_parameters_()

    # --- for checkpoints

    def dump_state(self) -> dict:
        """Return a copy of the training state without gradients; call it between two steps.

        It does not wait for parameter averaging in the background. Some parameters may have the values from before the
        averaging, others those after it, as on a peer that loses its connection during the averaging.

        :returns: parameters (a list, in the order of the param groups), optimizer and scheduler (their state_dict),
            local_epoch and lineage; torch.load can read all of them with weights_only=True
        """
        with self.lock_optimizer:
            # the scheduler's epoch: a step in the background counts once it has finished and moved the schedule
            return {
                "parameters": [param.detach().clone() for param in list_params(self.optimizer)],
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
                "scheduler": copy.deepcopy(self.scheduler.state_dict()),
                "local_epoch": self.scheduler.last_epoch,
                "lineage": self.lineage,
            }

    def restore_state(self, state: dict) -> None:
        """Load a state from `dump_state`.

        :raises ValueError: the tensors' shapes differ from this optimizer's; nothing was changed
        """

        def list_shapes(parameters: Sequence[torch.Tensor], moments: dict[int, dict]) -> list:
            # a single number may be a tensor at one time and a plain number at another, as LAMB's trust ratio
            return [tuple(tensor.shape) for tensor in parameters] + [
                {name: tuple(getattr(value, "shape", ())) for name, value in entry.items()}
                for _, entry in sorted(moments.items())
            ]

        parameters, moments = state["parameters"], state["optimizer"]["state"]
        own_shapes = list_shapes(list_params(self.optimizer), self.optimizer.state_dict()["state"])
        if list_shapes(parameters, moments) != own_shapes:
            raise ValueError(
                "the optimizer differs (`optim`, `min_8bit_size`, `local_steps`), or the shapes of its tensors"
            )
        self.scheduler.load_state_dict({**state["scheduler"], "base_lrs": self.scheduler.base_lrs})
        # a copy, because torch keeps the tensors it loads and changes them in place
        self._replace_state(parameters, copy.deepcopy(moments), state["local_epoch"], state.get("lineage", ""))
