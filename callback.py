"""CollaborativeCallback: what happens around each step of a trainer: take over the state, report, back up, restore.

run_trainer.py calls it; read there when. It must not cost the loop: losses are summed on the device and read once per
epoch, records go to the DHT in the background.
"""

import json
import logging
import math
import os
import time

import psutil
import torch
from hivemind import DHT
from hivemind.utils import get_dht_time
from pydantic.v1 import ValidationError
from tqdm import tqdm

from arguments import SwarmArguments, TrainerArguments
from averaging import Optimizer, publish_contract
from utils import LocalMetrics, RunContract

logger = logging.getLogger("trainer")


class CollaborativeCallback:
    """The state that lives across a trainer's steps: sums since the last epoch, the backup, the progress bar."""

    def __init__(
        self,
        dht: DHT,
        optimizer: Optimizer,
        swarm: SwarmArguments,
        args: TrainerArguments,
        public_key: bytes,
        contract: RunContract,
    ):
        self.dht, self.optimizer, self.swarm, self.args = dht, optimizer, swarm, args
        self.public_key, self.contract = public_key, contract
        self.next_contract_time = 0.0
        self.loss_sum: torch.Tensor | float = 0.0
        self.mini_steps = self.skipped_steps = 0
        self.epoch_loss = math.nan
        self.last_epoch, self.epoch_start = 0, time.monotonic()
        self.epochs = self.averaged_epochs = 0
        self.has_contributed = False
        # samples whose gradients this process has computed, and its longest time between two steps since the last epoch
        self.computed_samples, self.longest_step, self.last_step_end = 0, 0.0, time.monotonic()
        self.backup: tuple[torch.Tensor, ...] | None = None
        self.history = open(os.path.join(args.output_dir, "history.jsonl"), "w", buffering=1)  # noqa: SIM115
        # a bar for a terminal, lines for a log file
        self.bar = tqdm(unit="", dynamic_ncols=True, leave=False, disable=None, bar_format="{desc}")
        self.next_bar_time = 0.0

    def on_train_begin(self) -> None:
        """Take over the swarm's state, when there is a swarm that is further than the initial weights."""
        progress = self.optimizer.tracker.global_progress
        if progress.num_peers and progress.epoch > 0:
            logger.info(f"loading the state of epoch {progress.epoch} from {progress.num_peers} peers")
            if not self.optimizer.load_state_from_peers():
                logger.warning("no peer gave its state, starting from the local one")
        self.last_epoch = self.optimizer.local_epoch
        self.back_up()
        self.last_step_end = time.monotonic()
        self.on_step_end()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of one batch (a scalar on the device) without waiting for it."""
        self.loss_sum = self.loss_sum + loss.detach()
        self.mini_steps += 1

    def skip_step(self) -> None:
        """Count a step whose loss or gradients were not finite."""
        self.skipped_steps += 1
        self.loss_sum, self.mini_steps = 0.0, 0
        logger.warning(f"skipped a step with non-finite loss or gradients ({self.skipped_steps} so far)")

    def on_step_end(self, samples: int = 0) -> None:
        """After each step of this peer: most times only a look at the clock.

        :param samples: those whose gradients were given to the optimizer
        """
        now = time.monotonic()
        self.computed_samples += samples
        self.longest_step, self.last_step_end = max(self.longest_step, now - self.last_step_end), now
        if now >= self.next_contract_time:
            self.next_contract_time = now + self.args.statistics_expiration / 3
            publish_contract(
                self.dht, self.swarm.experiment_prefix, self.public_key, self.contract, self.args.statistics_expiration
            )
        if not self.has_contributed and self.optimizer.grad_averager.local_samples_accumulated:
            self.has_contributed = True
            seconds = time.time() - psutil.Process().create_time()
            logger.info(f"first contribution {seconds:.1f} s after the start, to epoch {self.optimizer.local_epoch}")
        if self.optimizer.local_epoch != self.last_epoch:
            self.on_epoch_end(now)
        if now >= self.next_bar_time:
            self.next_bar_time = now + 0.5
            self.bar.set_description_str(self.describe_progress())

    def on_epoch_end(self, now: float) -> None:
        """The swarm has stepped: report, and look after the parameters."""
        if not self.parameters_are_finite():
            self.restore()
        optimizer, epoch = self.optimizer, self.optimizer.local_epoch
        self.epochs += 1
        self.averaged_epochs += optimizer.averaged_with > 1
        # the only place where the loop waits for the device on behalf of reports
        loss_sum = float(self.loss_sum)
        if self.mini_steps:
            self.epoch_loss = loss_sum / self.mini_steps
        metrics = {
            "epoch": epoch,
            "samples_per_second": float(optimizer.tracker.performance_ema.samples_per_second),
            "samples_accumulated": optimizer.epoch_samples,
            "loss": loss_sum,
            "mini_steps": self.mini_steps,
            "averaged_with": optimizer.averaged_with,
            "num_peers": max(1, optimizer.tracker.global_progress.num_peers),
            "grad_norm": optimizer.opt.grad_norm,
            "learning_rate": float(optimizer.opt.param_groups[0]["lr"]),
            "total_samples": optimizer.total_samples,
            "skipped_steps": self.skipped_steps,
        }
        try:
            self.dht.store(
                f"{self.swarm.experiment_prefix}_metrics",
                subkey=self.public_key,
                value=LocalMetrics.parse_obj(metrics).dict(),
                expiration_time=get_dht_time() + self.args.statistics_expiration,
                return_future=True,
            )
        except ValidationError as e:
            # a loss that has run away, say: the others would refuse the record
            logger.warning(f"epoch {epoch} is not reported: {'; '.join(error['msg'] for error in e.errors())}")
        own = {
            "loss": self.epoch_loss,
            "time": time.time(),
            # computed since this process started, and of these what waits for the next round: the rest of what is not
            # in total_samples is lost
            "computed_samples": self.computed_samples,
            "pending_samples": optimizer.grad_averager.local_samples_accumulated + optimizer.grad_averager.kept_samples,
            "longest_step": self.longest_step,
        }
        self.history.write(json.dumps(metrics | own) + "\n")
        if self.bar.disable and epoch % self.args.logging_steps == 0:
            logger.info(
                f"Epoch #{epoch}  loss = {self.epoch_loss:.5f}  averaged with {metrics['averaged_with']} of "
                f"{metrics['num_peers']}  {now - self.epoch_start:.1f} s  own samples {optimizer.epoch_samples}"
            )
        self.loss_sum, self.mini_steps, self.longest_step = 0.0, 0, 0.0
        self.last_epoch, self.epoch_start = epoch, now
        if epoch % self.args.backup_every_steps == 0:
            self.back_up()

    def describe_progress(self) -> str:
        """One line on the swarm, from what the tracker already knows."""
        progress, optimizer = self.optimizer.tracker.global_progress, self.optimizer
        eta = progress.eta_next_epoch - get_dht_time()
        speed = (progress.target_batch_size - progress.samples_accumulated) / eta if 0 < eta < math.inf else math.nan
        percent = min(100, 100 * progress.samples_accumulated // progress.target_batch_size)
        return (
            f"epoch {optimizer.local_epoch} {percent:3d}%  loss {self.epoch_loss:.4f}  "
            f"peers {max(1, progress.num_peers)}  {speed:.0f} samples/s  next epoch in {max(0, min(eta, 1e6)):.0f} s  "
            f"mine {optimizer.total_samples + optimizer.grad_averager.local_samples_accumulated:,} samples"
        )

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters and moments of the optimizer, which live in host memory."""
        local = self.optimizer.opt
        params = [param for group in local.param_groups for param in group["params"]]
        moments = [value for param in params for value in local.state[param].values() if torch.is_tensor(value)]
        return params + moments

    @torch.no_grad()
    def parameters_are_finite(self) -> bool:
        return bool(torch.stack([torch.linalg.vector_norm(tensor) for tensor in self.state_tensors()]).isfinite().all())

    @torch.no_grad()
    def back_up(self) -> None:
        """Copy parameters and moments in memory."""
        self.backup = tuple(tensor.clone() for tensor in self.state_tensors())

    @torch.no_grad()
    def restore(self) -> None:
        """Put the backup in place of parameters that are not finite any more; averaging brings the swarm's later."""
        logger.warning(f"non-finite parameters at epoch {self.optimizer.local_epoch}, restoring the last backup")
        with self.optimizer.state_averager.lock_averaged_tensors:
            for tensor, saved in zip(self.state_tensors(), self.backup, strict=True):
                tensor.copy_(saved)
        self.optimizer.state_averager._apply_optimizer_parameters_()

    def on_train_end(self) -> None:
        """Withdraw the contract: a swarm that has ended must not bind the next one of the same name."""
        self.bar.close()
        self.history.close()
        publish_contract(self.dht, self.swarm.experiment_prefix, self.public_key, None, self.args.statistics_expiration)
