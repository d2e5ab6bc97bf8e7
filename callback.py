"""A trainer's tasks around its steps. Only evaluations, checkpoints and downloads of a state wait for a device or the
DHT, and in the first epoch of a run the comparison of its contract."""

import json
import logging
import time
from pathlib import Path

import psutil

from arguments import SAMPLE_TEXT
from common.console import format_count, format_epoch
from common.files import write_file
from common.memory import collect_garbage, settle_memory
from common.signals import STOP_REQUESTED
from monitoring.page import StatusServer, TrainerPage
from swarm.contract import CONTRACT_LIFETIME
from training.checkpoint import save_model, write_readme
from training.evaluation import Evaluator
from training.figures import describe_evaluation
from training.metrics import MetricsReporter, format_speed
from training.page_client import format_join, warn_of_local_addresses
from training.progress import ProgressDisplay
from training.state import EpochStats, TrainerState

logger = logging.getLogger("trainer")


class CollaborativeCallback:
    """A trainer's hooks around its steps. Its parts do the work, and each owns what it knows:

    TrainerState       the model, the optimizer, the data and the counters; checkpoints
    MetricsReporter    the metrics of each epoch: published, and written to history.jsonl
    Evaluator          the loss on the validation split
    ProgressDisplay    the line of progress
    StatusServer       the status page

    The page is optional.
    """

    def __init__(self, state: TrainerState, evaluator: Evaluator, display: ProgressDisplay, page: StatusServer | None):
        self.state = state
        self.args = state.args
        self.stats = state.stats
        self.swarm = state.swarm
        self.optimizer = state.optimizer
        self.metrics = MetricsReporter(state)
        self.evaluator = evaluator
        self.display = display
        self.page = TrainerPage(page, self.swarm, self.describe) if page else None
        self.next_contract_time = 0.0
        self.has_contributed = False
        self.start_loss: float | None = None

    def on_train_begin(self, saved_state: Path | None) -> None:
        """Load the state that this trainer has saved, log its address, evaluate, and catch up with the swarm."""
        settle_memory()  # before a state is loaded, which may have to be collected later
        optimizer = self.optimizer
        final_epoch = self.state.final_epoch
        optimizer.accumulate_on(self.state.model.device)
        if saved_state:
            self.state.load(saved_state)
        self.metrics.measure_flop()
        self.publish_attestation()
        self.log_start()
        if self.page:
            self.page.serve(self.metrics.read_history())
        if evaluation := self.evaluator.measure():
            self.start_loss = evaluation.loss
        if optimizer.tracker.present and optimizer.tracker.view.epoch > optimizer.local_epoch:
            others = format_count(len(optimizer.tracker.present), "other peer")
            logger.info(f"catching up with {others} at epoch {optimizer.tracker.view.epoch}")
            optimizer.catch_up()
        self.stats.epoch = EpochStats(optimizer.local_epoch)
        self.stats.train_start = time.monotonic()
        self.run_periodic_tasks()
        if optimizer.local_epoch >= final_epoch:
            logger.info(
                f"epoch {final_epoch} is reached: raise --max_steps, or --resume_from_checkpoint none starts over"
            )

    def log_start(self) -> None:
        """Log the run, and how others join through this peer."""
        swarm = self.swarm
        size = self.state.model.num_parameters()
        peer = f"peer {swarm.dht.peer_id}{' in client mode' if swarm.dht.client_mode else ''}"
        logger.info(f"run {swarm.prefix} until epoch {self.state.final_epoch}, {size:,} parameters, {peer}")
        if not swarm.dht.client_mode:
            maddr = swarm.list_maddrs()[0]
            logger.info(f"others may join through --initial_peers {maddr}")
            if not swarm.config.initial_peers:
                command = format_join(swarm, [maddr], swarm.contract.flags)
                data = f" --train_file {SAMPLE_TEXT}" if self.state.data_args.train_file == SAMPLE_TEXT else ""
                logger.info(f"for example: {command}{data}")
        warn_of_local_addresses(swarm)

    def on_step_end(self, loss: float, waited: float, tokens: int) -> None:
        """Record one step of this peer, and do the tasks that are due.

        :param loss: the mean loss over the step's batches; if it is not finite, the step contributed nothing
        :param waited: the seconds that the device waited for data
        :param tokens: rank 0's tokens without padding; other ranks count as many
        """
        state = self.state
        self.stats.record_step(loss, state.batches_per_step, state.samples_per_step, waited, tokens * state.num_devices)
        self.run_periodic_tasks()

    def run_periodic_tasks(self) -> None:
        """Do the tasks that are due, which most times are none."""
        optimizer = self.optimizer
        now = time.monotonic()
        if self.swarm.dht.membership:
            self.swarm.dht.membership.check_own_credential()
        if now >= self.next_contract_time:
            self.next_contract_time = now + CONTRACT_LIFETIME / 3
            self.swarm.publish_contract(self.swarm.contract)
        if now >= self.metrics.next_time:
            self.publish()
        if not self.has_contributed and self.stats.computed_samples > self.stats.samples_before:
            self.has_contributed = True
            seconds = time.time() - psutil.Process().create_time()
            next_epoch = self.stats.epoch.number + 1
            logger.info(f"first samples computed {seconds:.1f} s after the start; they count in epoch {next_epoch}")
        if optimizer.local_epoch != self.stats.epoch.number:
            self.on_epoch_end()
        self.display.update(self.format_progress)
        if self.stats.computed_samples >= self.state.sample_limit and optimizer.local_epoch < self.state.final_epoch:
            size = len(self.state.dataset["train"])
            logger.info(f"{self.args.num_train_epochs:g} passes over {size:,} samples are done: stopping")
            # The data end between two epochs. Publish a last evaluation now, while this peer is still in the swarm.
            if self.args.eval_steps and self.metrics.metrics and self.evaluator.measure():
                self.publish()
            STOP_REQUESTED.set()

    def on_epoch_end(self) -> None:
        """Check the parameters after an epoch, publish and log its metrics, and evaluate and save if it is time."""
        self.state.repair()
        self.metrics.measure_epoch()
        self.swarm.recheck_contract()
        self.publish_attestation()
        self.publish()
        is_last = self.optimizer.local_epoch >= self.state.final_epoch
        period = self.args.eval_steps
        evaluation = self.evaluator.measure() if period and (is_last or self.is_due(period)) else None
        if evaluation:
            self.publish()
        line = self.metrics.write(evaluation)
        if self.page:
            self.page.add(line)
        self.display.log_epoch(line, is_first=self.stats.epochs == 1)
        if self.is_due(self.state.save_period):
            self.state.save()
        collect_garbage()

    def is_due(self, period: int) -> bool:
        """Return whether a multiple of `period` was reached; a loaded state may have skipped the exact epoch."""
        return self.stats.epoch.number // period != self.stats.last_epoch.number // period

    def publish_attestation(self) -> None:
        """Serve the run's contract, flags and contributors to new peers that have this peer's address."""
        swarm = self.swarm
        has_finished_epoch = self.stats.epochs > 0
        group = [swarm.dht.peer_id.to_bytes(), *self.optimizer.stats.last_group]
        # As long as no peer has contributed, this trainer's settings may be the wrong ones.
        is_sure = has_finished_epoch or not self.swarm.dht.attestation or self.swarm.dht.attestation.contract
        swarm.attest(swarm.contract if is_sure else None, swarm.contract.flags, group if has_finished_epoch else ())

    def publish(self) -> None:
        """Store this peer's metrics in the DHT, with the newest evaluation if there is --eval_steps."""
        self.metrics.publish(self.evaluator.last if self.args.eval_steps else None)

    def format_progress(self) -> str:
        """Return the line of progress in the middle of an epoch, with the swarm's progress to the next one."""
        samples = self.optimizer.grad_averager.samples
        values = self.describe()
        values |= {"averaged_with": self.optimizer.stats.group_size, "num_peers": values["peers"]}
        values |= {"samples_accumulated": samples, "epoch_seconds": time.monotonic() - self.stats.epoch.start}
        share = min(1.0, max(self.optimizer.tracker.view.samples, samples) / self.optimizer.tracker.target_batch_size)
        return f"{format_epoch(values)}  next epoch {share:.0%}"

    def describe(self) -> dict:
        """Return this trainer's figures for its status page, which calls this from its own thread."""
        saved_epoch = self.state.saved_epoch
        evaluation = self.evaluator.last
        return {
            "epoch": self.optimizer.local_epoch,
            "loss": self.stats.loss,
            "peers": len(self.optimizer.tracker.present) + 1,
            "checkpoints": [saved_epoch] if saved_epoch else [],
            **self.metrics.measure_progress(),
            **(describe_evaluation(evaluation) if evaluation else {}),
            "texts": self.evaluator.texts,
        }

    def on_train_end(self) -> None:
        """Leave the run, save, and withdraw the contract, so that it does not bind the next run of the same name."""
        self.optimizer.leave()
        self.display.close()
        if self.optimizer.local_epoch != self.state.saved_epoch and self.state.is_finite():
            self.state.save()
        self.swarm.publish_contract(None)

    def save_results(self, with_evaluation: bool) -> bool:
        """Write the model and summary.json, after leaving the swarm; return whether model and state are saved."""
        model = self.state.model
        output_dir = Path(self.args.output_dir)
        summary = self.metrics.summarize()
        folder = output_dir / "model"
        card = {"README.md": write_readme(model, folder)}
        is_saved = save_model(model, self.state.tokenizer, folder, {"epoch": summary["epoch"]}, extra_files=card)
        is_saved &= self.state.is_saved
        if self.start_loss is not None:
            summary["start_loss"] = self.start_loss
        path = output_dir / "summary.json"
        write_file(path, json.dumps(summary, indent=2) + "\n")
        if with_evaluation and (final := self.evaluator.measure_final()):
            write_file(path, json.dumps(summary | final, indent=2) + "\n")
        lost = self.stats.computed_samples - summary["samples"]
        more = f" ({lost:,} more were not part of any step)" if lost > 0 else ""
        where = f"model and state are in {output_dir}" if is_saved else "NOT SAVED: see the warning above"
        logger.info(
            f"epoch {summary['epoch']}, contributed {summary['samples']:,} samples{more}, averaged with others in "
            f"{self.stats.averaged_epochs} of {self.stats.epochs} epochs, {format_speed(summary)}; {where}"
        )
        return is_saved
