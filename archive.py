"""Keep and publish states of the swarm. Used by run_training_monitor.py and run_aux_peer.py."""

import logging
from dataclasses import asdict
from pathlib import Path

import torch

from arguments import ArchiveArguments, SwarmArguments
from averaging import Optimizer
from checkpoint import collect_state, save_checkpoint
from utils import SwarmMetrics

logger = logging.getLogger("archive")


class CheckpointHandler:
    """Downloads the swarm's state every few epochs and saves it; the state that lives from one look to the next.

    :param optimizer: an auxiliary one, made by make_optimizer. Its state is the trainers' only right after a download
        (note 28)
    :param arguments: of the whole command line, by name: checkpoints note them
    """

    def __init__(
        self,
        args: ArchiveArguments,
        swarm: SwarmArguments,
        output_dir: str,
        *,
        model: torch.nn.Module,
        tokenizer,
        optimizer: Optimizer,
        arguments: dict,
    ):
        self.args, self.prefix, self.output_dir = args, swarm.experiment_prefix, Path(output_dir)
        self.model, self.tokenizer, self.optimizer, self.arguments = model, tokenizer, optimizer, arguments
        self.last_epoch = 0
        self.download = None
        self.metrics: SwarmMetrics | None = None

    def step(self, metrics: SwarmMetrics | None, history: list[dict]) -> None:
        """Go on with what is due, without waiting for the network: call it at each look at the swarm.

        :param metrics: of the swarm's newest epoch, if that was not given before
        :param history: of the run, see dashboard.py
        """
        self.metrics = metrics or self.metrics
        if self.download is None:
            if metrics and metrics.epoch >= self.last_epoch + self.args.save_checkpoint_step_interval:
                self.download = self.optimizer.state_averager.start_download(min_epoch=metrics.epoch)
            return
        if not self.download.done():
            return
        loaded, self.download = self.download.result(), None
        if loaded is None:
            logger.warning("No peer gave its state, will try to save a checkpoint at the next epoch")
            return
        self.optimizer.state_averager.take_over(*loaded)
        self.last_epoch = self.optimizer.local_epoch
        # a whole training state: should all trainers die, one can go on from it (--resume_from_checkpoint)
        state = collect_state(self.model, self.optimizer, self.arguments)
        extra = {
            "experiment_prefix": self.prefix,
            "given_by": [loaded[0]["donor"]],
            "swarm": asdict(self.metrics),
        }
        limit = self.args.save_total_limit
        if save_checkpoint(self.model, self.tokenizer, self.output_dir, state, extra, limit):
            logger.info(f"Saved {self.output_dir}/checkpoint-{state['local_epoch']}")
