"""The state of a trainer: what it trains, and its counters; saved, loaded, and repaired after a fault."""

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.console import UserError
from common.flags import list_values
from swarm.joining import Swarm
from swarm.optimizer import CollaborativeOptimizer
from swarm.optimizer_state import list_params
from training.checkpoint import CheckpointError, apply_state, collect_state, load_state, save_checkpoint
from training.devices import all_finite
from training.progress import RECENT_EPOCHS

logger = logging.getLogger("trainer")

DEFAULT_SAVE_STEPS = 500
TOTALS = ("epochs", "averaged_epochs", "skipped_steps", "computed_samples")


@dataclass
class EpochStats:
    """The steps of a trainer since an epoch."""

    number: int = 0  # of that epoch
    start: float = field(default_factory=time.monotonic)
    loss_sum: float = 0.0
    mini_steps: int = 0  # batches in loss_sum
    tokens: int = 0
    data_wait: float = 0.0  # seconds that the device waited for data
    longest_step: float = 0.0  # seconds between the ends of two steps
    last_step_end: float = field(default_factory=time.monotonic)


@dataclass
class TrainerStats:
    """A trainer's counters. Those in TOTALS include earlier starts, because checkpoints keep them."""

    epochs: int = 0
    averaged_epochs: int = 0  # with other peers
    skipped_steps: int = 0
    computed_samples: int = 0
    samples_before: int = 0  # of computed_samples, those of earlier starts
    tokens: int = 0  # since this start, without padding
    train_start: float = field(default_factory=time.monotonic)
    epoch: EpochStats = field(default_factory=EpochStats)
    last_epoch: EpochStats | None = None
    last_loss: float | None = None  # mean of this trainer's steps in the last epoch in which it made any
    #: the epochs that the last ones of this start have led to, and their seconds
    recent_epochs: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_EPOCHS))

    @property
    def loss(self) -> float | None:
        """The mean loss of this epoch's steps so far, or else of the last epoch."""
        epoch = self.epoch  # the status page's thread reads this while the next epoch may begin
        return epoch.loss_sum / epoch.mini_steps if epoch.mini_steps else self.last_loss

    def record_step(self, loss: float, batches: int, samples: int, waited: float, tokens: int) -> None:
        """Count one step with its batches, samples and tokens, see CollaborativeCallback.on_step_end."""
        epoch = self.epoch
        now = time.monotonic()
        epoch.data_wait += waited
        epoch.longest_step = max(epoch.longest_step, now - epoch.last_step_end)
        epoch.last_step_end = now
        if math.isfinite(loss):
            epoch.loss_sum += loss * batches
            epoch.mini_steps += batches
            self.computed_samples += samples
            epoch.tokens += tokens
            self.tokens += tokens
        else:
            self.skipped_steps += 1
            logger.warning(f"skipped a step with non-finite loss or gradients ({self.skipped_steps} so far)")


@dataclass
class TrainerState:
    """All objects of a trainer: its place in the swarm, the model, optimizer, data, arguments and counters."""

    swarm: Swarm
    optimizer: CollaborativeOptimizer
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dataset: dict  # this and the corpus: by experiment.data.load_data
    corpus: dict
    scaler: torch.amp.GradScaler
    groups: tuple  # the whole command line, as in TRAINER_ARGS
    num_devices: int = 1  # that share each step
    saved_epoch: int = 0  # of the newest checkpoint
    is_saved: bool = True  # whether the last checkpoint could be written
    stats: TrainerStats = field(default_factory=TrainerStats)

    def __post_init__(self):
        _, _, optimizer_args, _, self.data_args, self.args = self.groups
        #: the epoch at which this trainer stops
        self.final_epoch = optimizer_args.total_steps if self.args.max_steps is None else self.args.max_steps
        self.batches_per_step = self.args.gradient_accumulation_steps * self.num_devices
        self.samples_per_step = self.args.per_device_train_batch_size * self.batches_per_step
        self.peer_id = str(self.swarm.dht.peer_id)
        passes = self.args.num_train_epochs
        #: number of computed samples at which this trainer stops
        self.sample_limit = passes * len(self.dataset["train"]) if passes else math.inf

    def load(self, path: Path) -> None:
        """Continue from a saved state, or raise a UserError."""
        try:
            state = load_state(path)
            apply_state(state, self.model, self.optimizer, self.scaler)
        except CheckpointError as e:
            raise UserError(f"cannot resume: {e}; --resume_from_checkpoint none starts over") from e
        self.saved_epoch = self.optimizer.local_epoch
        counters = state.get("counters", {})
        if counters.get("peer_id", self.peer_id) != self.peer_id:
            # another peer's, as before an invitation was renewed; its samples would count twice in the run
            counters = {}
            self.optimizer.stats.total_samples = 0
        self.optimizer.stats.failed = counters.get("failed_rounds", 0)
        for name in TOTALS:
            setattr(self.stats, name, counters.get(name, 0))
        self.stats.samples_before = self.stats.computed_samples

    def collect(self) -> dict:
        """Return a copy of all that a restart needs, see training/checkpoint.py."""
        counters = {name: getattr(self.stats, name) for name in TOTALS}
        counters |= {"failed_rounds": self.optimizer.stats.failed, "peer_id": self.peer_id}
        return collect_state(self.model, self.optimizer, list_values(self.groups), self.scaler, counters)

    @property
    def save_period(self) -> int:
        """The number of epochs between two checkpoints; by default those of DEFAULT_SAVE_STEPS batches."""
        is_local = self.optimizer.grad_averager.is_local
        averaging = self.optimizer.averaging
        return self.args.save_steps or max(1, DEFAULT_SAVE_STEPS // (averaging.local_steps if is_local else 1))

    def save(self) -> None:
        """Write a checkpoint; if the disk is full, training continues without it."""
        state = self.collect()
        args = self.args
        extra = {"experiment_prefix": self.swarm.prefix, "loss": self.stats.last_loss, "time": time.time()}
        limit = args.save_total_limit
        self.is_saved = save_checkpoint(self.model, self.tokenizer, args.output_dir, state, extra, limit)
        if self.is_saved:
            self.saved_epoch = state["local_epoch"]

    def list_tensors(self) -> list[torch.Tensor]:
        """Return the optimizer's parameters and moments, which are in host memory."""
        params = list_params(self.optimizer.opt)
        state = self.optimizer.opt.state
        return params + [value for param in params for value in state[param].values() if torch.is_tensor(value)]

    def is_finite(self) -> bool:
        """Return whether the parameters and moments are finite; 8-bit moments are checked by their scales."""
        return bool(all_finite(tensor for tensor in self.list_tensors() if tensor.is_floating_point()))

    def repair(self) -> None:
        """Replace non-finite parameters by the swarm's state, or stop if no peer sends one."""
        if not self.is_finite():
            logger.warning(f"non-finite parameters at epoch {self.optimizer.local_epoch}: loading the swarm's state")
            if not self.optimizer.load_state_from_peers():
                logger.error("no peer sent a state: restart to continue from the newest checkpoint")
                raise SystemExit(1)
