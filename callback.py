"""CollaborativeCallback: a trainer's work around its steps: load the state, report, evaluate, save, recover.

run_trainer.py calls it at the start, after each step, and at the end. It must not slow down the loop: it never waits
for a device, and it stores records in the DHT in the background.
"""

import json
import logging
import math
import statistics
import time
from collections import Counter, deque
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from hivemind.utils import get_dht_time
from pydantic.v1 import ValidationError
from tqdm import tqdm

from arguments import SAMPLE_TEXT
from common.console import UserError, fit_terminal, format_count, format_duration, format_number
from common.files import append_line, read_json_lines, write_file
from experiment.data import make_eval_batches
from monitoring.dashboards import Dashboard, start_trainer_dashboard
from monitoring.history import Contributions, History, describe_swarm
from monitoring.page import StatusServer
from monitoring.progress import RECENT_EPOCHS, format_progress, format_samples, measure_progress
from swarm.joining import Swarm
from swarm.local_steps import at_anchor
from swarm.optimizer import CollaborativeOptimizer
from swarm.optimizer_state import list_params
from swarm.processes import STOP_REQUESTED
from swarm.trust import ContributorRegistry
from training.checkpoint import (
    CheckpointError,
    apply_state,
    collect_state,
    load_state,
    save_checkpoint,
    save_model,
    write_readme,
)
from training.checks import check_epoch_time, check_step_time, warn_of
from training.devices import all_finite, is_out_of_memory
from training.figures import describe_evaluation, fetch_records, format_evaluation, parse_schedule, perplexity
from training.model import evaluate
from training.page_client import format_join
from utils import MAX_WORKERS, Evaluation, LocalMetrics, aggregate_metrics, compute_seconds, make_worker_key

logger = logging.getLogger("trainer")

BAR_INTERVAL, LOG_INTERVAL = 0.5, 20.0  # seconds between progress lines on a terminal, and in a log file
MAX_DATA_WAIT = 0.1  # share of an epoch that the device may wait for data before a warning
METRICS_INTERVAL, METRICS_TIMEOUT = 10.0, 2.0  # seconds; for downloads of the swarm's metrics for the status page


class CollaborativeCallback:
    """A trainer's hooks around its steps, and the state that they keep, such as sums since the last epoch.

    :param groups: the arguments of the whole command line, as in TRAINER_ARGS, which checkpoints record
    :param swarm: the run, with the contract that this peer has published
    :param dataset, corpus: the results of experiment.data.load_data
    :param autocast: the precision for evaluations
    :param num_devices: the number of this machine's devices that share each step
    :param page: the status page that shows this trainer's progress, if any
    """

    def __init__(
        self,
        swarm: Swarm,
        optimizer: CollaborativeOptimizer,
        groups: tuple,
        *,
        model: torch.nn.Module,
        tokenizer,
        dataset: dict,
        corpus: dict,
        autocast: AbstractContextManager,
        scaler: torch.amp.GradScaler | None,
        num_devices: int = 1,
        page: StatusServer | None = None,
    ):
        self.swarm, self.dht, self.optimizer = swarm, swarm.dht, optimizer
        _, _, optimizer_args, _, self.data_args, self.args = groups
        self.contract_lifetime = optimizer.averaging.metadata_expiration
        self.arguments = {name: value for group in groups for name, value in asdict(group).items()}
        self.model, self.tokenizer, self.dataset, self.corpus = model, tokenizer, dataset, corpus
        self.autocast, self.scaler, self.page = autocast, scaler, page
        self.batches_per_step = self.args.gradient_accumulation_steps * num_devices
        #: samples per step of this peer
        self.batch_size = self.args.per_device_train_batch_size * self.batches_per_step
        self.next_contract_time = 0.0
        self.loss_sum, self.mini_steps = 0.0, 0
        #: mean loss of this trainer's steps in the last epoch in which it made any, or None
        self.epoch_loss: float | None = None
        #: the last published metrics
        self.metrics: dict | None = None
        self.last_epoch, self.epoch_start = 0, time.monotonic()
        #: totals of this trainer, including earlier starts, which computed `samples_before` of the samples
        self.counters = Counter(dict.fromkeys(("epochs", "averaged_epochs", "skipped_steps", "computed_samples"), 0))
        self.samples_before, self.train_start = 0, time.monotonic()
        self.has_contributed = False
        self.rounds_before = self.read_round_seconds(), optimizer.uplink.traffic
        #: seconds; the longest time between two steps since the last epoch
        self.longest_step, self.last_step_end = 0.0, time.monotonic()
        self.saved_epoch = 0
        self.history = Path(self.args.output_dir) / "history.jsonl"
        #: for the status page: this trainer's epochs, and the swarm's metrics, which only page requests refresh
        self.curve, self.contributions, self.workers = History(), Contributions({}), ContributorRegistry()
        self.swarm_metrics = None
        self.next_look = 0.0
        # A terminal has a bar, a log file has lines.
        self.bar = tqdm(unit="", dynamic_ncols=True, leave=False, disable=None, bar_format="{desc}")
        self.next_line_time = time.monotonic() + (LOG_INTERVAL if self.bar.disable else 0.0)
        #: seconds that the device waited for data in this epoch; the share of such waits in the last epoch; and the
        #: number of consecutive epochs with too large a share
        self.waited, self.wait_share, self.starved_epochs = 0.0, 0.0, 0
        #: wandb, if this trainer reports its own curves
        self.dashboard = Dashboard()
        self.start_loss: float | None = None
        self.evaluation: Evaluation | None = None
        #: versions of the parameters in the last evaluation
        self.evaluated: list[int] = []
        self.final_epoch = optimizer_args.total_steps if self.args.max_steps is None else self.args.max_steps
        self.recent_seconds: deque[float] = deque(maxlen=RECENT_EPOCHS)
        #: number of computed samples at which this trainer stops, by --num_train_epochs
        passes = self.args.num_train_epochs
        self.sample_limit = passes * len(dataset["train"]) if passes else math.inf

    def resume(self, path: Path | None) -> None:
        """Continue from a saved training state and its history, or start a new history if there is no state."""
        lines = []
        if path is not None:
            try:
                state = load_state(path)
                apply_state(state, self.model, self.optimizer, self.scaler)
            except CheckpointError as e:
                raise UserError(f"cannot resume: {e}; --resume_from_checkpoint none starts over") from e
            self.saved_epoch = self.optimizer.local_epoch
            self.counters.update(state.get("counters", {}))
            self.optimizer.stats.failed = self.counters.pop("failed_rounds", 0)
            self.samples_before = self.counters["computed_samples"]
            # Epochs after the checkpoint are lost and will be repeated.
            lines = [line for line in read_json_lines(self.history) if line["epoch"] <= self.optimizer.local_epoch]
        write_file(self.history, "".join(json.dumps(line) + "\n" for line in lines))
        for line in lines:
            self.curve.add({**line, "alive_peers": line["num_peers"]})

    def on_train_begin(self, saved_state: Path | None) -> None:
        """Load the saved state, log this peer's address, evaluate, and load the swarm's state if it is further ahead.

        :param saved_state: the path of the state that this trainer saved before, if any
        """
        self.resume(saved_state)
        self.publish_attestation()
        self.dashboard = start_trainer_dashboard(self.args, self.swarm.prefix, self.arguments, saved_state is not None)
        logger.info(
            f"run {self.swarm.prefix} until epoch {self.final_epoch}, {self.model.num_parameters():,} parameters, "
            f"peer {self.dht.peer_id}{' in client mode' if self.dht.client_mode else ''}"
        )
        if not self.dht.client_mode:
            maddr = self.swarm.list_maddrs()[0]
            logger.info(f"others may join through --initial_peers {maddr}")
            if not self.swarm.config.initial_peers:
                command = format_join(
                    self.swarm.prefix, [maddr], self.swarm.contract.flags, self.dht.membership is not None
                )
                if self.data_args.train_file == SAMPLE_TEXT:
                    command += f" --train_file {SAMPLE_TEXT}"
                logger.info(f"for example: {command}")
        self.swarm.warn_of_local_addresses()
        if self.page:
            self.page.serve(self.dht, self.read_progress, self.curve)
        if self.args.do_eval and self.measure():
            self.start_loss = self.evaluation.loss
            logger.info(f"unigram entropy {self.corpus['unigram_entropy']:.3f} nats")
        epoch, others = self.optimizer.tracker.view.epoch, len(self.optimizer.tracker.present)
        if others and epoch > self.optimizer.local_epoch:
            logger.info(f"loading the state of epoch {epoch} from {format_count(others, 'other peer')}")
            self.optimizer.load_state_from_peers()
        self.last_epoch = self.optimizer.local_epoch
        self.last_step_end = self.train_start = time.monotonic()
        self.run_periodic_tasks()
        if self.optimizer.local_epoch >= self.final_epoch:
            logger.info(
                f"epoch {self.final_epoch} is reached: raise --max_steps, or --resume_from_checkpoint none starts over"
            )

    def on_step_end(self, loss: float, waited: float) -> None:
        """Record one step of this peer, and do the periodic tasks.

        :param loss: the mean loss over the step's batches; if it is not finite, the step contributed nothing
        :param waited: the seconds that the device waited for data
        """
        if math.isfinite(loss):
            self.loss_sum += loss * self.batches_per_step
            self.mini_steps += self.batches_per_step
            self.counters["computed_samples"] += self.batch_size
        else:
            self.counters["skipped_steps"] += 1
            count = self.counters["skipped_steps"]
            logger.warning(f"skipped a step with non-finite loss or gradients ({count} so far)")
        self.waited += waited
        now = time.monotonic()
        self.longest_step, self.last_step_end = max(self.longest_step, now - self.last_step_end), now
        self.run_periodic_tasks()

    def run_periodic_tasks(self) -> None:
        """Do the tasks that are due, which most times are none."""
        now = time.monotonic()
        if self.dht.membership:
            self.dht.membership.check_own_credential()
        if now >= self.next_contract_time:
            self.next_contract_time = now + self.contract_lifetime / 3
            self.swarm.renew_contract(self.contract_lifetime)
        if not self.has_contributed and self.optimizer.grad_averager.samples:
            self.has_contributed = True
            seconds = time.time() - psutil.Process().create_time()
            next_epoch = self.optimizer.local_epoch + 1
            logger.info(
                f"first samples computed {seconds:.1f} s after the start; they count once epoch {next_epoch} is reached"
            )
        if self.optimizer.local_epoch != self.last_epoch:
            self.on_epoch_end(now)
        if now >= self.next_line_time and self.bar.disable:
            self.next_line_time = now + LOG_INTERVAL
            logger.info(self.describe_progress())
        elif now >= self.next_line_time:
            self.next_line_time = now + BAR_INTERVAL
            self.bar.set_description_str(fit_terminal(self.describe_progress()))
        if self.counters["computed_samples"] >= self.sample_limit and self.optimizer.local_epoch < self.final_epoch:
            passes, size = self.args.num_train_epochs, len(self.dataset["train"])
            logger.info(f"{passes:g} passes over {size:,} samples are done: stopping")
            # The data end between two epochs. Publish a last evaluation now, while this peer is still in the swarm.
            if self.args.eval_steps and self.metrics and self.measure():
                self.publish()
            STOP_REQUESTED.set()

    def on_epoch_end(self, now: float) -> None:
        """Check the parameters after an epoch, publish and log its metrics, and evaluate and save if it is time."""
        if not self.parameters_are_finite():
            self.recover()
        optimizer, epoch = self.optimizer, self.optimizer.local_epoch
        self.counters["epochs"] += 1
        self.recent_seconds.append((now - self.epoch_start) / max(1, epoch - self.last_epoch))
        self.check_data_wait(now - self.epoch_start)
        if optimizer.stats.group_size > 1:
            self.counters["averaged_epochs"] += 1
        if self.mini_steps:
            self.epoch_loss = self.loss_sum / self.mini_steps
        metrics = {
            "epoch": epoch,
            "samples_per_second": float(optimizer.tracker.performance_ema.samples_per_second),
            "samples_accumulated": optimizer.stats.samples,
            "loss": self.loss_sum,
            "mini_steps": self.mini_steps,
            "averaged_with": optimizer.stats.group_size,
            "num_peers": len(optimizer.tracker.present) + 1,
            "grad_norm": optimizer.opt.grad_norm,
            "learning_rate": float(optimizer.opt.param_groups[0]["lr"]),
            "total_samples": optimizer.stats.total_samples,
            "skipped_steps": self.counters["skipped_steps"],
            "epoch_seconds": now - self.epoch_start,
            "client_mode": self.dht.client_mode,
            **self.measure_rounds(),
        }
        if self.counters["epochs"] == 3:
            # Earlier epochs are not typical: this peer joins in the middle of one, or waits while other peers start.
            # Short steps are harmless.
            step_seconds = max(0.5, self.batch_size / max(metrics["samples_per_second"], 1e-9))
            matchmaking_time = optimizer.uplink.timeouts.matchmaking
            epoch_check = check_epoch_time(metrics["epoch_seconds"], metrics["num_peers"], matchmaking_time)
            warn_of([check_step_time(step_seconds, self.batch_size), epoch_check])
        membership = self.dht.membership
        if username := membership.username if membership else self.swarm.config.username:
            metrics["username"] = username
        if self.args.max_steps is not None:
            metrics["final_epoch"] = self.args.max_steps
        self.swarm.recheck_contract()
        self.publish_attestation()
        self.metrics = metrics
        self.publish()
        validation, is_last = {}, epoch >= self.final_epoch
        if self.args.eval_steps and (self.has_crossed_interval(self.args.eval_steps) or is_last) and self.measure():
            validation = describe_evaluation(self.evaluation)
            self.publish()
        progress = self.measure_progress()
        own = {
            "loss": self.epoch_loss,
            "time": time.time(),
            # Samples computed since this process started, and those of them that wait for the next round. Others that
            # are not in total_samples are lost.
            "computed_samples": self.counters["computed_samples"] - self.samples_before,
            "pending_samples": optimizer.grad_averager.samples,
            "longest_step": self.longest_step,
            "compute_seconds": compute_seconds(metrics),
            "data_wait_share": self.wait_share,
            **({"peak_memory_bytes": torch.cuda.max_memory_allocated()} if self.model.device.type == "cuda" else {}),
            **progress,
            **validation,
        }
        append_line(self.history, json.dumps(metrics | own))
        self.curve.add({**metrics, **own, "alive_peers": metrics["num_peers"]})
        self.dashboard.report(metrics | own)
        is_first = self.args.logging_first_step and self.counters["epochs"] == 1
        if self.bar.disable and (epoch % self.args.logging_steps == 0 or is_first):
            self.next_line_time = now + LOG_INTERVAL
            loss = "" if self.epoch_loss is None else f"loss = {self.epoch_loss:.5f}  "
            logger.info(
                f"Epoch #{epoch}  {loss}averaged with {metrics['averaged_with']} of "
                f"{metrics['num_peers']}  {now - self.epoch_start:.1f} s  own samples {optimizer.stats.samples}  "
                f"{format_progress(epoch, progress)}  {format_samples(progress)}".rstrip()
            )
        self.loss_sum, self.mini_steps, self.longest_step = 0.0, 0, 0.0
        if self.has_crossed_interval(self.args.save_steps):
            self.save()
        self.last_epoch, self.epoch_start = epoch, now

    def publish_attestation(self) -> None:
        """Serve the run's contract, flags and contributors to new peers that have this peer's address."""
        has_contributed = self.counters["epochs"] > 0
        group = [self.dht.peer_id.to_bytes(), *self.optimizer.stats.last_group]
        # As long as no peer has contributed, this trainer's settings may be the wrong ones.
        is_sure = has_contributed or not self.dht.attestation or self.dht.attestation.contract
        contract = self.swarm.contract
        self.swarm.attest(contract if is_sure else None, contract.flags, group if has_contributed else ())

    def publish(self) -> None:
        """Store this peer's signed metrics of the last epoch and its newest evaluation; do not wait for the DHT."""
        more = {"evaluation": self.evaluation} if self.args.eval_steps else {}
        if self.optimizer.stats.group_size > 1:
            more["partners"] = [make_worker_key(peer_id) for peer_id in self.optimizer.stats.last_group][:MAX_WORKERS]
        try:
            metrics = LocalMetrics.parse_obj(self.metrics | more)
        except ValidationError as e:
            # For example, the loss has diverged. Other peers would reject the record.
            logger.warning(f"the metrics of epoch {self.metrics['epoch']} are not published: {list_errors(e)}")
            return
        self.swarm.publish_metrics(metrics, self.args.statistics_expiration)

    def has_crossed_interval(self, steps: int) -> bool:
        """Return whether a multiple of `steps` epochs was reached; a loaded state may have skipped the exact epoch."""
        return self.optimizer.local_epoch // steps != self.last_epoch // steps

    def compute_evaluation(self) -> dict:
        """Return the loss and accuracy on the validation split, and the number of samples."""
        options = dict(batch_size=self.args.per_device_eval_batch_size, max_samples=self.args.max_eval_samples)
        batches = make_eval_batches(self.dataset["validation"], self.tokenizer, self.data_args, **options)
        with self.autocast, at_anchor(self.optimizer.local):
            result = evaluate(self.model, batches, self.model.device)
        return {"samples": sum(len(batch["input_ids"]) for batch in batches), **result}

    def measure(self) -> bool:
        """Evaluate the model, unless these weights were evaluated already.

        :returns: whether there is an evaluation to report
        """
        versions = [param._version for param in self.model.parameters()]
        if versions == self.evaluated:
            return self.evaluation is not None
        start, self.evaluated = time.monotonic(), versions
        try:
            with self.optimizer.tracker.suspend_participation():
                result = {"epoch": self.optimizer.local_epoch, **self.compute_evaluation()}
                result["unigram_entropy"] = self.corpus["unigram_entropy"]
            self.evaluation = Evaluation(**{name: result[name] for name in Evaluation.__fields__})
        except ValidationError as e:
            self.evaluation = None
            logger.warning(f"the evaluation of epoch {result['epoch']} failed: {list_errors(e)}")
            return False
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            self.evaluation = None
            logger.warning(
                "out of memory in evaluation: lower --per_device_eval_batch_size (now "
                f"{self.args.per_device_eval_batch_size}); skipping this evaluation"
            )
            return False
        seconds = time.monotonic() - start
        logger.info(f"validation {format_evaluation(self.evaluation)}, measured in {seconds:.1f} s")
        if self.recent_seconds and seconds > statistics.median(self.recent_seconds):
            logger.warning(
                f"the evaluation took {seconds:.1f} s, longer than an epoch: lower --max_eval_samples (used "
                f"{self.evaluation.samples:,}), otherwise the swarm steps without this trainer"
            )
        return True

    def measure_progress(self) -> dict:
        """Return the run's progress and the time until this trainer stops, which its data may do before the run."""
        # The tracker's target_batch_size is smaller by --batch_size_lead, so read the contract's.
        schedule, recent = parse_schedule(self.swarm.contract), list(self.recent_seconds)
        progress = measure_progress(self.optimizer.local_epoch, self.final_epoch, schedule, recent)
        computed = self.counters["computed_samples"]
        if computed > self.samples_before and self.sample_limit < math.inf:
            seconds = (time.monotonic() - self.train_start) / (computed - self.samples_before)
            left = max(0.0, self.sample_limit - computed) * seconds
            if left <= progress.get("seconds_left", left):
                progress |= {"seconds_left": left, "own_samples": computed, "sample_limit": int(self.sample_limit)}
        return progress

    def check_data_wait(self, seconds: float) -> None:
        """Update the share of the epoch in which the device waited for data, and warn after three bad epochs in a row.

        :param seconds: the duration of the epoch
        """
        self.wait_share, self.waited = min(1.0, self.waited / max(seconds, 1e-9)), 0.0
        # In the first epoch, the data loader's workers start.
        is_starved = self.wait_share > MAX_DATA_WAIT and self.counters["epochs"] > 1
        self.starved_epochs = self.starved_epochs + 1 if is_starved else 0
        if self.starved_epochs == 3:
            logger.warning(
                f"the device waits for data {self.wait_share:.0%} of the time: raise --dataloader_num_workers (now "
                f"{self.args.dataloader_num_workers}) if this machine has idle cores"
            )

    def read_round_seconds(self) -> dict[str, float]:
        stats = self.optimizer.stats
        return {"waiting": stats.matchmaking_seconds, "averaging": stats.averaging_seconds}

    def measure_rounds(self) -> dict:
        """Return the seconds and bytes spent in rounds since the previous call."""
        seconds, traffic = self.read_round_seconds(), self.optimizer.uplink.traffic
        before_seconds, before_traffic = self.rounds_before
        self.rounds_before = seconds, traffic
        return {
            **{f"{name}_seconds": seconds[name] - before_seconds[name] for name in seconds},
            "bytes_sent": traffic[0] - before_traffic[0],
            "bytes_received": traffic[1] - before_traffic[1],
        }

    def read_progress(self) -> dict:
        """Return the content of the status page, which calls this from its own thread."""
        peers = len(self.optimizer.tracker.present) + 1
        progress = {"epoch": self.optimizer.local_epoch, "loss": self.measure_loss(), "peers": peers}
        progress["flags"] = self.swarm.contract.flags
        is_over = self.curve and self.optimizer.local_epoch >= self.final_epoch
        progress["ended"] = self.curve[-1]["time"] if is_over else None
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + METRICS_INTERVAL
            records = fetch_records(self.dht, self.swarm.prefix, METRICS_TIMEOUT, self.workers)
            self.contributions.update(records, {}, time.time())
            self.swarm_metrics = aggregate_metrics([(label, metrics) for label, (metrics, _) in records.items()])
        progress |= {**describe_swarm(self.swarm_metrics, self.curve), **self.contributions.describe()}
        progress["checkpoints"] = [self.saved_epoch] if self.saved_epoch > 0 else []
        validation = describe_evaluation(self.evaluation) if self.evaluation else {}
        return progress | self.measure_progress() | validation

    def measure_loss(self) -> float | None:
        """Return the mean loss of this epoch's steps so far, or else of the last epoch."""
        return self.loss_sum / self.mini_steps if self.mini_steps else self.epoch_loss

    def describe_progress(self) -> str:
        """Return one line about the swarm from the tracker's records, without network access.

        The most important parts come first. Unknown values are omitted. The parts are two spaces apart.
        """
        optimizer, tracker = self.optimizer, self.optimizer.tracker
        view, pending = tracker.view, optimizer.grad_averager.samples
        gathered, target = max(view.samples, pending), tracker.target_batch_size
        speed = sum(peer.samples_per_second for peer in (tracker.performance_ema, *tracker.present.values()))
        loss = self.measure_loss()
        parts = [f"epoch {optimizer.local_epoch:,} {min(100, 100 * gathered // target)}%"]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        parts.append(f"own samples {optimizer.stats.total_samples + pending:,}")
        parts.append(format_count(len(tracker.present) + 1, "peer"))
        if speed > 1e-6:  # zero until a peer has made a step
            parts.append(f"{format_number(speed)} samples/s")
            seconds = min(view.ends_at - get_dht_time(), (target - gathered) / speed)
            if seconds > 0:
                parts.append(f"next in {format_duration(seconds)}")
        if self.wait_share > MAX_DATA_WAIT:
            parts.append(f"waits for data {self.wait_share:.0%}")
        parts.append(format_progress(optimizer.local_epoch, self.measure_progress()))
        return "  ".join(parts)

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the optimizer's parameters and moments, which are in host memory."""
        params, state = list_params(self.optimizer.opt), self.optimizer.opt.state
        return params + [value for param in params for value in state[param].values() if torch.is_tensor(value)]

    def parameters_are_finite(self) -> bool:
        """Return whether the parameters and moments are finite; 8-bit moments are checked by their scales."""
        return bool(all_finite(tensor for tensor in self.state_tensors() if tensor.is_floating_point()))

    def collect_state(self) -> dict:
        """Return this trainer's whole state, see training/checkpoint.py."""
        counters = {**self.counters, "failed_rounds": self.optimizer.stats.failed}
        return collect_state(self.model, self.optimizer, self.arguments, self.scaler, counters)

    def save(self) -> None:
        """Write a checkpoint; if the disk is full, training continues without it."""
        state = self.collect_state()
        extra = {"experiment_prefix": self.swarm.prefix, "loss": self.epoch_loss, "time": time.time()}
        if save_checkpoint(self.model, self.tokenizer, self.args.output_dir, state, extra, self.args.save_total_limit):
            self.saved_epoch = state["local_epoch"]

    def recover(self) -> None:
        """Replace non-finite parameters by the swarm's state, or stop if no peer sends one."""
        logger.warning(f"non-finite parameters at epoch {self.optimizer.local_epoch}: loading the swarm's state")
        if not self.optimizer.load_state_from_peers():
            logger.error("no peer sent a state: restart to continue from the newest checkpoint")
            raise SystemExit(1)

    def on_train_end(self) -> None:
        """Leave the run, save, and withdraw the contract, so that it does not bind the next run of the same name."""
        self.optimizer.leave()
        self.bar.close()
        if self.optimizer.local_epoch > self.saved_epoch and self.parameters_are_finite():
            self.save()
        self.swarm.withdraw_contract(self.contract_lifetime)
        self.dashboard.finish()

    def save_results(self, with_evaluation: bool) -> bool:
        """Write the model and summary.json. Call this after leaving the swarm, which would wait for the evaluation.

        :param with_evaluation: whether to evaluate the model, if --do_eval is set
        :returns: whether the model could be written
        """
        optimizer, output_dir = self.optimizer, Path(self.args.output_dir)
        entropy = self.corpus["unigram_entropy"]
        summary = {} if self.start_loss is None else {"start_loss": self.start_loss}
        summary |= {
            "unigram_entropy": entropy,
            "peer_id": str(self.dht.peer_id),
            "epoch": optimizer.local_epoch,
            "samples": optimizer.stats.total_samples,
            "epochs_here": self.counters["epochs"],
            "epochs_averaged": self.counters["averaged_epochs"],
            "failed_rounds": optimizer.stats.failed,
            "skipped_steps": self.counters["skipped_steps"],
            "computed_samples": self.counters["computed_samples"],
        }
        if self.data_args.streaming:
            summary["sources"] = self.dataset["train"].count_records()
            for name, read in summary["sources"].items():
                logger.info(f"source {name}: {read['documents']:,} documents read, {read['broken']:,} broken records")
        folder, extra = output_dir / "model", {"epoch": optimizer.local_epoch}
        card = {"README.md": write_readme(self.model, folder)}
        is_saved = save_model(self.model, self.tokenizer, folder, extra, beside=card)
        if self.args.do_eval and with_evaluation and self.measure():
            loss = self.evaluation.loss
            summary |= {"final_loss": loss, "final_perplexity": perplexity(loss)}
            summary["final_accuracy"] = self.evaluation.accuracy
            logger.info(f"validation loss {loss:.3f}, unigram entropy {entropy:.3f} nats")
        write_file(output_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        lost = summary["computed_samples"] - summary["samples"]
        more = f" ({lost:,} more were not part of any step)" if lost > 0 else ""
        where = f"in {output_dir}" if is_saved else "NOT SAVED, see the warning above"
        logger.info(
            f"epoch {summary['epoch']}, contributed {summary['samples']:,} samples{more}, averaged with others in "
            f"{summary['epochs_averaged']} of {summary['epochs_here']} epochs; the model is {where}"
        )
        return is_saved


def list_errors(error: ValidationError) -> str:
    """Return the messages of a validation error, separated by semicolons."""
    return "; ".join(error["msg"] for error in error.errors())
