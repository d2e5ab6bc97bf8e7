"""CollaborativeCallback: what happens around a trainer's steps: take over the state, report, evaluate, save, recover.

run_trainer.py calls it: at the start, after each step, and at the end. It must not cost the loop: it waits for no
device, and records go to the DHT in the background.
"""

import json
import logging
import math
import statistics
import time
from collections import Counter, deque
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil
import torch
from hivemind import DHT
from hivemind.utils import get_dht_time
from pydantic.v1 import ValidationError
from tqdm import tqdm

from arguments import SAMPLE_TEXT
from experiment.data import make_eval_batches
from machine.checkpoint import (
    CheckpointError,
    apply_state,
    collect_state,
    load_state,
    save_checkpoint,
    save_model,
    write_readme,
)
from machine.devices import all_finite, is_out_of_memory
from machine.preflight import check_epoch_time, check_step_time, warn_of
from machine.training import evaluate
from support.console import UserError, fit_terminal, format_count, format_duration, format_number
from support.files import append_line, read_json_lines, write_file
from swarm.addresses import list_shareable_maddrs
from swarm.contract import parse_schedule, publish_contract, recheck_contract
from swarm.joining import warn_of_local_addresses
from swarm.local_steps import at_anchor
from swarm.optimizer import CollaborativeOptimizer
from swarm.processes import STOP_REQUESTED
from swarm.states import list_params
from swarm.status import format_join
from swarm.vouching import RunAttestation, publish_attestation
from utils import (
    MAX_WORKERS,
    ContributorRegistry,
    Evaluation,
    LocalMetrics,
    RunContract,
    aggregate_metrics,
    compute_seconds,
    describe_evaluation,
    fetch_records,
    format_evaluation,
    make_worker_key,
    perplexity,
)
from viewing.dashboards import Dashboard, start_trainer_dashboard
from viewing.history import Contributions, History, describe_swarm
from viewing.page import StatusServer
from viewing.progress import RECENT_EPOCHS, format_progress, format_samples, measure_progress

logger = logging.getLogger("trainer")

BAR_PERIOD, LOG_PERIOD = 0.5, 20.0  # seconds between two lines of progress on a terminal, and in a log file
LONG_WAIT = 0.1  # of an epoch, for data
LOOK_PERIOD, LOOK_TIMEOUT = 10.0, 2.0  # seconds between two looks at the swarm for the run's page, and of one


class CollaborativeCallback:
    """The state that lives across a trainer's steps: sums since the last epoch, the progress bar.

    :param groups: the arguments of the whole command line, as in TRAINER_ARGS: checkpoints note them
    :param dataset, corpus: of data.load_data
    :param autocast: the precision in which to evaluate
    :param num_devices: those of this machine that share each step
    :param page: shows this trainer's progress, once there is some
    """

    def __init__(
        self,
        dht: DHT,
        optimizer: CollaborativeOptimizer,
        groups: tuple,
        public_key: bytes,
        contract: RunContract,
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
        self.dht, self.optimizer, self.public_key, self.contract = dht, optimizer, public_key, contract
        self.swarm, _, optimizer_args, _, self.data_args, self.args = groups
        self.prefix = self.swarm.experiment_prefix
        self.arguments = {name: value for group in groups for name, value in asdict(group).items()}
        self.model, self.tokenizer, self.dataset, self.corpus = model, tokenizer, dataset, corpus
        self.autocast, self.scaler, self.page = autocast, scaler, page
        self.batches_per_step = self.args.gradient_accumulation_steps * num_devices
        #: samples of a step of this peer
        self.batch_size = self.args.per_device_train_batch_size * self.batches_per_step
        self.next_contract_time = 0.0
        self.loss_sum, self.mini_steps = 0.0, 0
        #: mean of this trainer's steps in its last epoch that had some; None before
        self.epoch_loss: float | None = None
        #: what was last published
        self.metrics: dict | None = None
        self.last_epoch, self.epoch_start = 0, time.monotonic()
        #: what this trainer has done, earlier starts included, of which `samples_before` samples were computed in those
        self.counters = Counter(dict.fromkeys(("epochs", "averaged_epochs", "skipped_steps", "computed_samples"), 0))
        self.samples_before, self.train_start = 0, time.monotonic()
        self.has_contributed = False
        self.rounds_before = self.read_round_seconds(), optimizer.uplink.traffic
        # the longest time between two steps since the last epoch
        self.longest_step, self.last_step_end = 0.0, time.monotonic()
        self.saved_epoch = 0
        self.history = Path(self.args.output_dir) / "history.jsonl"
        #: for the page: this trainer's epochs, and what a look at the swarm has shown, not more often than pages ask
        self.curve, self.contributions, self.workers = History(), Contributions({}), ContributorRegistry()
        self.swarm_metrics, self.next_look = None, 0.0
        # a bar for a terminal, lines for a log file
        self.bar = tqdm(unit="", dynamic_ncols=True, leave=False, disable=None, bar_format="{desc}")
        self.next_line_time = time.monotonic() + (LOG_PERIOD if self.bar.disable else 0.0)
        #: for how long the device has waited for data in this epoch, and for how many epochs that was too long
        self.waited, self.wait_share, self.starved_epochs = 0.0, 0.0, 0
        #: wandb, when this trainer reports its own curves
        self.dashboard = Dashboard()
        self.start_loss: float | None = None
        self.evaluation: Evaluation | None = None
        #: versions of the parameters that were evaluated
        self.evaluated: list[int] = []
        self.final_epoch = optimizer_args.total_steps if self.args.max_steps is None else self.args.max_steps
        self.recent_seconds: deque[float] = deque(maxlen=RECENT_EPOCHS)
        #: of computed samples, where --num_train_epochs says so
        passes = self.args.num_train_epochs
        self.sample_limit = passes * len(dataset["train"]) if passes else math.inf

    def resume(self, path: Path | None) -> None:
        """Go on from a training state, if there is one, with its history; otherwise begin a new history."""
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
            # what came after the checkpoint was lost, and comes again
            lines = [line for line in read_json_lines(self.history) if line["epoch"] <= self.optimizer.local_epoch]
        write_file(self.history, "".join(json.dumps(line) + "\n" for line in lines))
        for line in lines:
            self.curve.add({**line, "alive_peers": line["num_peers"]})

    def on_train_begin(self, saved_state: Path | None) -> None:
        """Go on from the state that this trainer has saved, if any; say where others find this peer; evaluate; and take
        over the swarm's state, when there is a swarm that is further than this peer."""
        self.resume(saved_state)
        self.publish_attestation()
        self.dashboard = start_trainer_dashboard(self.args, self.prefix, self.arguments, saved_state is not None)
        logger.info(
            f"run {self.prefix} until epoch {self.final_epoch}, {self.model.num_parameters():,} parameters, "
            f"peer {self.dht.peer_id}{' in client mode' if self.dht.client_mode else ''}"
        )
        if not self.dht.client_mode:
            maddr = list_shareable_maddrs(self.dht.get_visible_maddrs())[0]
            logger.info(f"others may join through --initial_peers {maddr}")
            if not self.swarm.initial_peers:
                command = format_join(self.prefix, [maddr], self.contract.flags, self.dht.membership is not None)
                text = f" --train_file {SAMPLE_TEXT}" * (self.data_args.train_file == SAMPLE_TEXT)
                logger.info(f"for example: {command}{text}")
        warn_of_local_addresses(self.dht, self.swarm)
        if self.page:
            self.page.serve(self.dht, self.read_progress, self.curve)
        if self.args.do_eval and self.measure():
            self.start_loss = self.evaluation.loss
            logger.info(f"unigram entropy {self.corpus['unigram_entropy']:.3f} nats")
        epoch, others = self.optimizer.tracker.view.epoch, len(self.optimizer.tracker.present)
        if others and epoch > self.optimizer.local_epoch:
            logger.info(f"taking over the state of epoch {epoch} from {format_count(others, 'other peer')}")
            self.optimizer.load_state_from_peers()
        self.last_epoch = self.optimizer.local_epoch
        self.back_up()
        self.last_step_end = self.train_start = time.monotonic()
        self.run_periodic_tasks()
        if self.optimizer.local_epoch >= self.final_epoch:
            logger.info(
                f"epoch {self.final_epoch} is reached: raise --max_steps, or --resume_from_checkpoint none starts over"
            )

    def on_step_end(self, loss: float, waited: float) -> None:
        """After each step of this peer.

        :param loss: the mean over the step's batches; if it is not finite, nothing was given to the optimizer
        :param waited: seconds for which the device has waited for data
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
        """What is due now: most times nothing."""
        now = time.monotonic()
        if self.dht.membership:
            self.dht.membership.check_own_credential()
        if now >= self.next_contract_time:
            expiration = self.optimizer.tracker.metadata_expiration
            self.next_contract_time = now + expiration / 3
            publish_contract(self.dht, self.prefix, self.public_key, self.contract, expiration)
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
            self.next_line_time = now + LOG_PERIOD
            logger.info(self.describe_progress())
        elif now >= self.next_line_time:
            self.next_line_time = now + BAR_PERIOD
            self.bar.set_description_str(fit_terminal(self.describe_progress()))
        if self.counters["computed_samples"] >= self.sample_limit and self.optimizer.local_epoch < self.final_epoch:
            passes, size = self.args.num_train_epochs, len(self.dataset["train"])
            logger.info(f"{passes:g} passes over {size:,} samples are done: ending")
            # a last time while the swarm still hears it: the data end between epochs
            if self.args.eval_steps and self.metrics and self.measure():
                self.publish()
            STOP_REQUESTED.set()

    def on_epoch_end(self, now: float) -> None:
        """The swarm has stepped: report, and look after the parameters."""
        if not self.parameters_are_finite():
            self.recover()
        optimizer, epoch = self.optimizer, self.optimizer.local_epoch
        self.counters["epochs"] += 1
        self.recent_seconds.append((now - self.epoch_start) / max(1, epoch - self.last_epoch))
        self.check_data_wait(now - self.epoch_start)
        self.counters["averaged_epochs"] += optimizer.stats.group_size > 1
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
            # the first two begin in the middle, or wait for others who start; and short steps are harmless
            step_seconds = max(0.5, self.batch_size / max(metrics["samples_per_second"], 1e-9))
            matchmaking_time = optimizer.uplink.timeouts.matchmaking
            epoch_check = check_epoch_time(metrics["epoch_seconds"], metrics["num_peers"], matchmaking_time)
            warn_of([check_step_time(step_seconds, self.batch_size), epoch_check])
        membership = self.dht.membership
        if username := membership.username if membership else self.swarm.username:
            metrics["username"] = username
        if self.args.max_steps is not None:
            metrics["final_epoch"] = self.args.max_steps
        recheck_contract(self.dht, self.prefix, self.contract)
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
            # computed since this process started, and of these what waits for the next round: the rest of what is not
            # in total_samples is lost
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
            self.next_line_time = now + LOG_PERIOD
            loss = "" if self.epoch_loss is None else f"loss = {self.epoch_loss:.5f}  "
            logger.info(
                f"Epoch #{epoch}  {loss}averaged with {metrics['averaged_with']} of "
                f"{metrics['num_peers']}  {now - self.epoch_start:.1f} s  own samples {optimizer.stats.samples}  "
                f"{format_progress(epoch, progress)}  {format_samples(progress)}".rstrip()
            )
        self.loss_sum, self.mini_steps, self.longest_step = 0.0, 0, 0.0
        if self.has_crossed_interval(self.args.backup_every_epochs):
            self.back_up()
        if self.has_crossed_interval(self.args.save_steps):
            self.save()
        self.last_epoch, self.epoch_start = epoch, now

    def publish_attestation(self) -> None:
        """Tell newcomers that were given this peer's address what they need to know of the run."""
        has_worked = self.counters["epochs"] > 0
        workers = [self.dht.peer_id.to_bytes(), *self.optimizer.stats.last_group][:MAX_WORKERS] if has_worked else []
        # where nobody has worked, it may be this trainer that has the wrong settings
        is_sure = has_worked or not self.dht.vouched or self.dht.vouched.contract
        contract = self.contract if is_sure else None
        publish_attestation(
            self.dht, RunAttestation(prefix=self.prefix, contract=contract, flags=self.contract.flags, workers=workers)
        )

    def publish(self) -> None:
        """Store this peer's signed record of the last epoch, with the newest evaluation, without waiting."""
        more = {"evaluation": self.evaluation} if self.args.eval_steps else {}
        if self.optimizer.stats.group_size > 1:
            more["partners"] = [make_worker_key(peer_id) for peer_id in self.optimizer.stats.last_group][:MAX_WORKERS]
        try:
            record = LocalMetrics.parse_obj(self.metrics | more).dict()
        except ValidationError as e:
            # a loss that has run away, say: the others would refuse the record
            logger.warning(f"epoch {self.metrics['epoch']} is not reported: {list_errors(e)}")
            return
        self.dht.store(
            f"{self.prefix}_metrics",
            subkey=self.public_key,
            value=record,
            expiration_time=get_dht_time() + self.args.statistics_expiration,
            return_future=True,
        )

    def has_crossed_interval(self, steps: int) -> bool:
        """Whether what is due every so many epochs is due: a peer that takes over the swarm's state leaps over some."""
        return self.optimizer.local_epoch // steps != self.last_epoch // steps

    def compute_evaluation(self) -> dict:
        """Loss and accuracy on the validation split, and of how many samples."""
        options = dict(batch_size=self.args.per_device_eval_batch_size, max_samples=self.args.max_eval_samples)
        batches = make_eval_batches(self.dataset["validation"], self.tokenizer, self.data_args, **options)
        with self.autocast, at_anchor(self.optimizer.local):
            result = evaluate(self.model, batches, self.model.device)
        return {"samples": sum(len(batch["input_ids"]) for batch in batches), **result}

    def measure(self) -> bool:
        """Evaluate the model as it is, unless these weights have been; False where it yielded nothing that could be
        reported."""
        versions = [param._version for param in self.model.parameters()]
        if versions == self.evaluated:
            return self.evaluation is not None
        start, self.evaluated = time.monotonic(), versions
        try:
            with self.optimizer.tracker.suspend_participation():
                measured = {"epoch": self.optimizer.local_epoch, **self.compute_evaluation()}
                measured["unigram_entropy"] = self.corpus["unigram_entropy"]
            self.evaluation = Evaluation(**{name: measured[name] for name in Evaluation.__fields__})
        except ValidationError as e:
            self.evaluation = None
            logger.warning(f"the evaluation of epoch {measured['epoch']} failed: {list_errors(e)}")
            return False
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            self.evaluation = None
            logger.warning(
                "out of memory in evaluation: lower --per_device_eval_batch_size (now "
                f"{self.args.per_device_eval_batch_size}); the model is not evaluated"
            )
            return False
        seconds = time.monotonic() - start
        logger.info(f"validation {format_evaluation(self.evaluation)}, measured in {seconds:.1f} s")
        if self.recent_seconds and seconds > statistics.median(self.recent_seconds):
            logger.warning(
                f"the evaluation has taken {seconds:.1f} s, longer than an epoch: lower --max_eval_samples (used "
                f"{self.evaluation.samples:,}), or the swarm continues without this trainer meanwhile"
            )
        return True

    def measure_progress(self) -> dict:
        """How far the swarm has come, and when this trainer ends: as its data may before the run does."""
        # not the tracker's, which is less --batch_size_lead
        schedule, recent = parse_schedule(self.contract), list(self.recent_seconds)
        progress = measure_progress(self.optimizer.local_epoch, self.final_epoch, schedule, recent)
        computed = self.counters["computed_samples"]
        if computed > self.samples_before and self.sample_limit < math.inf:
            seconds = (time.monotonic() - self.train_start) / (computed - self.samples_before)
            left = max(0.0, self.sample_limit - computed) * seconds
            if left <= progress.get("seconds_left", left):
                progress |= {"seconds_left": left, "own_samples": computed, "sample_limit": int(self.sample_limit)}
        return progress

    def check_data_wait(self, seconds: float) -> None:
        """Find the share of the epoch in which the device has waited for data; say once when that is too much."""
        self.wait_share, self.waited = min(1.0, self.waited / max(seconds, 1e-9)), 0.0
        # not the first epoch, in which the data's workers start
        is_starved = self.wait_share > LONG_WAIT and self.counters["epochs"] > 1
        self.starved_epochs = self.starved_epochs + 1 if is_starved else 0
        if self.starved_epochs == 3:
            logger.warning(
                f"{self.wait_share:.0%} of the time is spent waiting for data: raise --dataloader_num_workers (now "
                f"{self.args.dataloader_num_workers}), if this machine has cores to spare"
            )

    def read_round_seconds(self) -> dict[str, float]:
        stats = self.optimizer.stats
        return {"waiting": stats.matchmaking_seconds, "averaging": stats.averaging_seconds}

    def measure_rounds(self) -> dict:
        """Time and bytes that rounds took since the epoch before."""
        seconds, traffic = self.read_round_seconds(), self.optimizer.uplink.traffic
        before_seconds, before_traffic = self.rounds_before
        self.rounds_before = seconds, traffic
        return {
            **{f"{name}_seconds": seconds[name] - before_seconds[name] for name in seconds},
            "bytes_sent": traffic[0] - before_traffic[0],
            "bytes_received": traffic[1] - before_traffic[1],
        }

    def read_progress(self) -> dict:
        """Return what the status page shows; it asks from its own thread."""
        peers = len(self.optimizer.tracker.present) + 1
        progress = {"epoch": self.optimizer.local_epoch, "loss": self.measure_loss(), "peers": peers}
        progress["flags"] = self.contract.flags
        is_over = self.curve and self.optimizer.local_epoch >= self.final_epoch
        progress["ended"] = self.curve[-1]["time"] if is_over else None
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_PERIOD
            records = fetch_records(self.dht, self.prefix, LOOK_TIMEOUT, self.workers)
            self.contributions.update(records, {}, time.time())
            self.swarm_metrics = aggregate_metrics([(label, metrics) for label, (metrics, _) in records.items()])
        progress |= {**describe_swarm(self.swarm_metrics, self.curve), **self.contributions.describe()}
        progress["checkpoints"] = [self.saved_epoch] * (self.saved_epoch > 0)
        validation = describe_evaluation(self.evaluation) if self.evaluation else {}
        return progress | self.measure_progress() | validation

    def measure_loss(self) -> float | None:
        """The mean of this epoch's steps so far, or else of the epoch before."""
        return self.loss_sum / self.mini_steps if self.mini_steps else self.epoch_loss

    def describe_progress(self) -> str:
        """One line on the swarm, from what the tracker already knows: what matters first, and nothing that is not known
        yet. Its parts are two spaces apart."""
        optimizer, tracker = self.optimizer, self.optimizer.tracker
        view, here = tracker.view, optimizer.grad_averager.samples
        gathered, target = max(view.samples, here), tracker.target_batch_size
        speed = sum(peer.samples_per_second for peer in (tracker.performance_ema, *tracker.present.values()))
        loss = self.measure_loss()
        parts = [f"epoch {optimizer.local_epoch:,} {min(100, 100 * gathered // target)}%"]
        parts += [] if loss is None else [f"loss {loss:.4f}"]
        parts.append(f"own samples {optimizer.stats.total_samples + here:,}")
        parts.append(format_count(len(tracker.present) + 1, "peer"))
        if speed > 1e-6:  # not before somebody's first step
            parts.append(f"{format_number(speed)} samples/s")
            seconds = min(view.ends_at - get_dht_time(), (target - gathered) / speed)
            parts += [f"next in {format_duration(seconds)}"] * (seconds > 0)
        parts += [f"waits for data {self.wait_share:.0%}"] * (self.wait_share > LONG_WAIT)
        course = format_progress(optimizer.local_epoch, self.measure_progress())
        return "  ".join([*parts, course])

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters and moments of the optimizer, which live in host memory."""
        params, state = list_params(self.optimizer.opt), self.optimizer.opt.state
        return params + [value for param in params for value in state[param].values() if torch.is_tensor(value)]

    def parameters_are_finite(self) -> bool:
        # the codes of 8-bit moments are whole numbers; it is their scales that may not be finite
        return all_finite(tensor for tensor in self.state_tensors() if tensor.is_floating_point())

    def collect_state(self) -> dict:
        """This trainer's whole state, see machine/checkpoint.py."""
        counters = {**self.counters, "failed_rounds": self.optimizer.stats.failed}
        return collect_state(self.model, self.optimizer, self.arguments, self.scaler, counters)

    def save(self) -> None:
        """Write a checkpoint; a disk that is full costs the checkpoint, not the training."""
        state = self.collect_state()
        extra = {"experiment_prefix": self.prefix, "loss": self.epoch_loss, "time": time.time()}
        if save_checkpoint(self.model, self.tokenizer, self.args.output_dir, state, extra, self.args.save_total_limit):
            self.saved_epoch = state["local_epoch"]

    def back_up(self) -> None:
        """Write the state to --state_path, if there is one: a crash costs the epochs since."""
        if self.args.state_path is not None:
            write_file(self.args.state_path, partial(torch.save, self.collect_state()))

    def recover(self) -> None:
        """Take over the swarm's state in place of parameters that are not finite any more."""
        logger.warning(f"non-finite parameters at epoch {self.optimizer.local_epoch}: asking the swarm for its state")
        if not self.optimizer.load_state_from_peers():
            logger.error("nobody sent a state: restart to continue from the newest checkpoint")
            raise SystemExit(1)

    def on_train_end(self) -> None:
        """Save, and withdraw the contract: a swarm that has ended must not bind the next one of the same name."""
        self.optimizer.leave()
        self.bar.close()
        if self.optimizer.local_epoch > self.saved_epoch and self.parameters_are_finite():
            self.save()
        expiration = self.optimizer.tracker.metadata_expiration
        publish_contract(self.dht, self.prefix, self.public_key, None, expiration)
        self.dashboard.finish()

    def save_results(self, with_evaluation: bool) -> bool:
        """The model and summary.json, when the swarm is left, which would wait for an evaluation.

        :returns: whether the model could be written
        """
        optimizer, output_dir, entropy = self.optimizer, Path(self.args.output_dir), self.corpus["unigram_entropy"]
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
    return "; ".join(error["msg"] for error in error.errors())
