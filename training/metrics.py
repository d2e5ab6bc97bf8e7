"""The metrics of a trainer's epochs: published to the swarm, and written to history.jsonl."""

import json
import logging
import math
import time
from pathlib import Path

import torch
from pydantic.v1 import ValidationError

from common.files import append_line, read_json_lines, write_file
from training.checks import check_epoch_time, check_step_time, warn_of
from training.devices import count_flop, find_peak, make_trial_batch
from training.figures import compute_seconds, describe_evaluation, parse_schedule
from training.progress import measure_progress
from training.state import EpochStats, TrainerState
from utils import MAX_WORKERS, Evaluation, LocalMetrics, make_worker_key, peer_label

logger = logging.getLogger("trainer")

MAX_DATA_WAIT = 0.1  # share of an epoch that the device may wait for data before a warning


class MetricsReporter:
    """The metrics of a trainer's epochs, which it measures, publishes and writes to history.jsonl."""

    def __init__(self, state: TrainerState):
        self.state = state
        self.swarm = state.swarm
        self.optimizer = state.optimizer
        self.stats = state.stats
        self.history = Path(state.args.output_dir) / "history.jsonl"
        #: the metrics of the last epoch
        self.metrics: dict | None = None
        #: the share of this peer's peak FLOP/s that one token per second takes, if the peak is known
        self.flop_share: float | None = None
        self.round_totals = self.read_round_totals()
        #: the last epoch of this run in history.jsonl
        self.last_written = max((line["epoch"] for line in self.read_history()), default=0)
        #: by time.monotonic(), when the published metrics should be renewed, because an epoch may outlast them
        self.next_time = math.inf

    def is_of_run(self, line: dict) -> bool:
        """Return whether a line of history.jsonl belongs to this run; lines of earlier versions name no run."""
        return line.get("experiment_prefix", self.swarm.prefix) == self.swarm.prefix

    def read_history(self) -> list[dict]:
        """Return the lines of this run in history.jsonl."""
        return list(filter(self.is_of_run, read_json_lines(self.history)))

    def measure_flop(self) -> None:
        """Count the FLOP of a token, if the peak of the device is known."""
        state = self.state
        device = self.state.model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        if peak := find_peak(name, is_half=state.args.bf16 or state.args.fp16):
            train = state.dataset["train"]
            batch = make_trial_batch(state.model, train, state.tokenizer, state.corpus, state.data_args, seed=0)
            flop = count_flop(state.model, batch, device) / batch["input_ids"].numel()
            self.flop_share = flop / peak / state.num_devices
            logger.info(f"{flop / 1e9:,.3g} GFLOP a token, at most {peak / 1e12:,.0f} TFLOP/s of {name}")

    def measure_speed(self, tokens: int, seconds: float) -> dict[str, float | None]:
        """Return this peer's tokens per second, and its MFU: the share of its peak FLOP/s, None if that is unknown."""
        # not published, because older peers reject records with fields that they do not know
        rate = tokens / max(seconds, 1e-9)
        return {"tokens_per_second": rate, "mfu": rate * self.flop_share if self.flop_share else None}

    def summarize(self) -> dict:
        """Return the figures of this trainer and, since this start, its tokens, seconds and speed, for summary.json."""
        state = self.state
        optimizer = self.optimizer
        stats = self.stats
        seconds = stats.epoch.last_step_end - stats.train_start
        summary = {
            "unigram_entropy": state.corpus["unigram_entropy"],
            "peer_id": str(self.swarm.dht.peer_id),
            "epoch": optimizer.local_epoch,
            "samples": optimizer.stats.total_samples,
            "epochs_here": stats.epochs,
            "epochs_averaged": stats.averaged_epochs,
            "failed_rounds": optimizer.stats.failed,
            "skipped_steps": stats.skipped_steps,
            "computed_samples": stats.computed_samples,
            "tokens": stats.tokens,
            "seconds": seconds,
            **self.measure_speed(stats.tokens, seconds),
        }
        if state.data_args.streaming:
            sources = state.dataset["train"].sources
            summary["sources"] = {it.name: {"documents": it.documents, "broken": it.broken} for it in sources}
        return summary

    def read_round_totals(self) -> dict[str, float]:
        """Return the seconds and bytes that this peer has spent in rounds so far."""
        stats = self.optimizer.stats
        (sent, received) = self.optimizer.uplink.traffic
        seconds = {"waiting_seconds": stats.matchmaking_seconds, "averaging_seconds": stats.averaging_seconds}
        return {**seconds, "bytes_sent": sent, "bytes_received": received}

    def measure_epoch(self) -> None:
        """Measure the epoch that has just ended, and start the counters of the next one."""
        optimizer = self.optimizer
        stats = self.stats
        dht = self.swarm.dht
        stats.last_epoch = stats.epoch
        stats.epoch = EpochStats(optimizer.local_epoch)
        ended = stats.last_epoch
        seconds = stats.epoch.start - ended.start
        before = self.round_totals
        self.round_totals = self.read_round_totals()
        stats.epochs += 1
        stats.recent_epochs.append((optimizer.local_epoch, seconds / max(1, optimizer.local_epoch - ended.number)))
        if optimizer.stats.group_size > 1:
            stats.averaged_epochs += 1
        if ended.mini_steps:
            stats.last_loss = ended.loss_sum / ended.mini_steps
        self.metrics = {
            "epoch": optimizer.local_epoch,
            "samples_per_second": float(optimizer.tracker.performance_ema.samples_per_second),
            "samples_accumulated": optimizer.stats.samples,
            "loss": ended.loss_sum,
            "mini_steps": ended.mini_steps,
            "averaged_with": optimizer.stats.group_size,
            "num_peers": len(optimizer.tracker.present) + 1,
            "grad_norm": optimizer.opt.grad_norm,
            "learning_rate": float(optimizer.opt.param_groups[0]["lr"]),
            "total_samples": optimizer.stats.total_samples,
            "skipped_steps": stats.skipped_steps,
            "epoch_seconds": seconds,
            "client_mode": dht.client_mode,
            "username": (dht.membership.own.username if dht.membership else self.swarm.config.username) or None,
            "final_epoch": self.state.args.max_steps,
            **{name: total - before[name] for name, total in self.round_totals.items()},
        }
        if len(stats.recent_epochs) == 3:  # earlier ones are not typical: workers start, or this peer joins in one
            self.check_times()

    def check_times(self) -> None:
        """Log a warning if steps or epochs are too short or too long, or if the device waits for data."""
        metrics = self.metrics
        size = self.state.samples_per_step
        waiting = self.measure_wait_share()
        step_seconds = max(0.5, size / max(metrics["samples_per_second"], 1e-9))  # short steps are harmless
        matchmaking_time = self.optimizer.uplink.timeouts.matchmaking
        epoch_check = check_epoch_time(metrics["epoch_seconds"], metrics["num_peers"], matchmaking_time)
        warn_of([check_step_time(step_seconds, size), epoch_check])
        if waiting > MAX_DATA_WAIT:
            logger.warning(
                f"the device waits for data {waiting:.0%} of the time: raise --dataloader_num_workers (now "
                f"{self.state.args.dataloader_num_workers}) if this machine has idle cores"
            )

    def measure_wait_share(self) -> float:
        """Return the share of the last epoch in which the device waited for data."""
        return min(1.0, self.stats.last_epoch.data_wait / max(self.metrics["epoch_seconds"], 1e-9))

    def publish(self, evaluation: Evaluation | None) -> None:
        """Store this peer's signed metrics of the last epoch in the DHT, without waiting."""
        more = {}
        self.next_time = time.monotonic() + self.state.args.statistics_expiration / 3
        if evaluation and evaluation.epoch <= self.metrics["epoch"]:  # not of a later epoch that was given up
            more["evaluation"] = evaluation
        if self.optimizer.stats.group_size > 1:
            more["partners"] = [make_worker_key(peer_id) for peer_id in self.optimizer.stats.last_group][:MAX_WORKERS]
        if self.optimizer.log_steps:
            counted = self.optimizer.log_steps.compute_counted_shares()
            more["counted"] = {peer_label(key): it for key, it in counted.items()}
        try:
            metrics = LocalMetrics.parse_obj(self.metrics | more)
        except ValidationError as e:  # such as a loss that has diverged: other peers would reject the record
            logger.warning(f"the metrics of epoch {self.metrics['epoch']} are not published: {e}")
        else:
            self.swarm.publish("metrics", metrics.dict(), self.state.args.statistics_expiration)

    def write(self, evaluation: Evaluation | None) -> dict:
        """Append the last epoch to history.jsonl, with its evaluation if there is one, and return the line."""
        stats = self.stats
        metrics = self.metrics
        own = {
            "experiment_prefix": self.swarm.prefix,
            "loss": stats.last_loss,
            "time": time.time(),
            # Samples computed since this process started, and those of them that wait for the next round. Others that
            # are not in total_samples are lost.
            "computed_samples": stats.computed_samples - stats.samples_before,
            "pending_samples": self.optimizer.pending_samples,
            "longest_step": stats.last_epoch.longest_step,
            "compute_seconds": compute_seconds(metrics),
            "data_wait_share": self.measure_wait_share(),
        }
        if self.state.model.device.type == "cuda":
            own["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        line = metrics | own | self.measure_progress() | (describe_evaluation(evaluation) if evaluation else {})
        if line["epoch"] <= self.last_written:  # a restart, or the swarm, has gone back: drop what is repeated
            lines = read_json_lines(self.history)
            kept = [other for other in lines if not self.is_of_run(other) or other["epoch"] < line["epoch"]]
            write_file(self.history, "".join(json.dumps(other) + "\n" for other in kept))
        append_line(self.history, json.dumps(line))
        self.last_written = line["epoch"]
        return line

    def measure_progress(self) -> dict[str, float]:
        """Return the run's progress, and this trainer's speed in the last epoch."""
        # The tracker's target_batch_size is smaller by --batch_size_lead, so read the contract's.
        schedule = parse_schedule(self.swarm.contract)
        recent = list(self.stats.recent_epochs)
        progress = measure_progress(self.optimizer.local_epoch, self.state.final_epoch, schedule, recent)
        if self.metrics:
            progress |= self.measure_speed(self.stats.last_epoch.tokens, self.metrics["epoch_seconds"])
        return progress


def format_speed(speed: dict[str, float | None]) -> str:
    """Return e.g. `52,100 tokens/s, MFU 41.2%`, or `-` for an unknown MFU."""
    mfu = "-" if speed["mfu"] is None else f"{speed['mfu']:.1%}"
    return f"{speed['tokens_per_second']:,.0f} tokens/s, MFU {mfu}"
