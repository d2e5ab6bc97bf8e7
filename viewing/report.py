"""What people look at: the dashboard, the learning curve, the table of contributors, the summary of a run.

Used by the roles that watch the whole swarm, run_training_monitor.py and run_aux_peer.py.
"""

import contextlib
import json
import logging
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import hivemind

from arguments import ReportArguments, SwarmArguments
from support.console import UserError
from support.files import append_line, lock_folder, read_json, write_file
from swarm.processes import STOP_REQUESTED
from utils import (
    FETCH_TIMEOUT,
    ContributorRegistry,
    Evaluation,
    SwarmMetrics,
    aggregate_metrics,
    describe_evaluation,
    fetch_progress,
    fetch_records,
    filter_plausible_records,
    find_evaluation,
    format_evaluation,
)
from viewing.curves import draw_learning_curve
from viewing.dashboards import Dashboard, make_run_name, require_wandb, start_trackio, start_wandb
from viewing.history import Contributions, describe_swarm, load_history, pick
from viewing.progress import RECENT_EPOCHS, RunCourse, format_progress, format_samples

logger = logging.getLogger("report")

CURVE_PERIOD = 30.0  # seconds between two drawings: one takes up to a second of a core that may be training
# Seconds between two tables of contributors: dashboards show every one of them. They get the last one at the end.
TABLE_PERIOD = 86400.0
FINAL_FETCH_TIMEOUT = 1.0
# A read of the DHT may miss a record that is there; so many that miss all newer ones mean that a run started over.
READS_BEFORE_GOING_BACK = 3
READS_BEFORE_THE_END = 2  # that find no trainer: one may have missed them
# Up to this epoch, or a tenth of the one reached, a run that went back is a new one; beyond, it continues from an older
# state of itself. A new run may have come that far before it is noticed.
NEW_RUN_EPOCH = 30


class RunReport:
    """Follows a run's metrics and writes what people look at; the state that lives from one look to the next.

    It continues where an earlier process with the same --output_dir ended, and keeps others out of that folder. An
    --output_dir that is in use, or cannot be written, is a UserError when it is made.
    """

    def __init__(self, args: ReportArguments, swarm: SwarmArguments):
        require_wandb(args)
        self.args, self.prefix, self.output_dir = args, swarm.experiment_prefix, Path(args.output_dir)
        try:
            lock_folder("--output_dir", self.output_dir)
            (self.output_dir / "metrics.jsonl").touch()
            self.history = load_history(self.output_dir / "metrics.jsonl", self.prefix)
            summary = self.load_summary()
        except OSError as e:
            raise UserError(
                f"--output_dir {args.output_dir} cannot be read and written ({e.strerror}): choose another folder"
            ) from e
        #: what was reported last, be it by an earlier process
        self.last = SwarmMetrics(**pick(self.history[-1], SwarmMetrics)) if self.history else None
        self.contributions = Contributions(summary.get("peers", {}))
        #: the run's name on dashboards, and on which of them it is
        self.run_name = summary.get("run_name") or make_run_name(self.prefix)
        self.reported_to = summary.get("reported_to", [])
        #: arguments to show beside the curves
        self.config = asdict(swarm) | asdict(args)
        self.dashboard, self.alive_peers = Dashboard(), 0
        known = self.history[-1] if self.history else {}
        self.course = RunCourse(self.prefix)
        #: of measure_progress, at the last epoch
        self.progress = {name: known[name] for name in ("final_epoch", "swarm_samples") if name in known}
        #: looks in a row that found no trainer
        self.empty_looks = 0
        self.workers = ContributorRegistry(map(bytes.fromhex, summary.get("workers", [])))
        self.older_reads, start = 0, time.monotonic()
        self.next_drawing, self.next_table = start + CURVE_PERIOD, start + TABLE_PERIOD

    def start_dashboard(self) -> None:
        """Call it when all helper processes are forked."""
        if self.args.report_to == "trackio":
            self.dashboard = start_trackio(self.prefix, self.run_name, self.config)
            folder = os.environ.get("TRACKIO_DIR")
            where = os.path.abspath(folder) if folder else "in its own folder"
        elif self.args.report_to == "wandb":
            self.dashboard = start_wandb(self.args.wandb_project, self.run_name, self.config)
            where = self.args.wandb_project
        if self.dashboard.run is None or f"{self.args.report_to} {where}" in self.reported_to:
            return
        # a dashboard that does not know this run yet
        for entry in self.history:
            self.dashboard.report(entry)
        if self.history:
            # before it is noted that all this was reported, it has to be
            self.dashboard.finish()
        # the run's name there is on the disk at once, should this process be killed
        self.reported_to.append(f"{self.args.report_to} {where}")
        self.write_summary()
        if self.history:
            self.start_dashboard()

    def update(self, dht: hivemind.DHT, is_last: bool = False) -> SwarmMetrics | None:
        """Look at the swarm once; the metrics of its newest epoch, if that was not reported yet.

        :param is_last: hurry, and draw the curve in any case
        """
        last_epoch = self.last.epoch if self.last else None
        timeout = FINAL_FETCH_TIMEOUT if is_last else FETCH_TIMEOUT
        # at the end what this peer holds: trainers that have just left do not answer, which takes the DHT seconds
        records = fetch_records(dht, self.prefix, timeout, self.workers, latest=not is_last)
        if STOP_REQUESTED.is_set() and not is_last:
            return None  # the last look does not wait for this one
        believable = filter_plausible_records([(label, metrics) for label, (metrics, _) in records.items()], last_epoch)
        current = aggregate_metrics(believable, last_epoch)
        self.alive_peers = current.alive_peers if current else 0
        self.older_reads = self.older_reads + 1 if current and self.last and current.epoch < last_epoch else 0
        # of older records it is not clear at first to which run they belong
        is_clear = self.older_reads in (0, READS_BEFORE_GOING_BACK)
        is_new = current is not None and is_clear and current.epoch != last_epoch
        starts_over = is_new and self.older_reads > 0 and self.go_back(current.epoch)
        evaluation = None
        if is_clear:
            reports = {} if is_last else fetch_progress(dht, self.prefix)
            self.empty_looks = 0 if reports or is_new else self.empty_looks + 1
            self.contributions.update({label: records[label] for label, _ in believable}, reports, time.time())
            evaluation = find_evaluation(believable)
            if evaluation and evaluation.epoch <= self.last_validation().get("validation_epoch", -1):
                evaluation = None
        if is_new:
            self.last, self.older_reads = current, 0
            recent = [entry["epoch_seconds"] for entry in self.history[-RECENT_EPOCHS:]] + [current.epoch_seconds]
            self.progress = self.course.measure(dht, current.epoch, believable, recent, self.workers)
            logger.info(
                f"Epoch #{current.epoch}  loss = {current.loss:.5f}  peers {current.alive_peers}  samples "
                f"{current.samples}  {current.samples_per_second:.1f} samples/s  averaged with {current.averaged_with}"
                f"  {format_progress(current.epoch, self.progress)}  {format_samples(self.progress)}".rstrip()
            )
        if evaluation:
            logger.info(f"Validation {format_evaluation(evaluation)}")
        if is_new or (evaluation and self.last):
            self.note(is_new, starts_over, evaluation)
        if self.history and (is_last or time.monotonic() >= self.next_drawing):
            draw_learning_curve(self.history, self.prefix, self.output_dir / "learning_curve.png")
            self.write_summary()
            self.next_drawing = time.monotonic() + CURVE_PERIOD
        return current if is_new else None

    def note(self, is_new: bool, starts_over: bool, evaluation: Evaluation | None) -> None:
        """Add the last epoch to metrics.jsonl, curve and dashboard; or, as an evaluation may come later than the
        metrics of its epoch, another line on it, in place of the last."""
        validation = describe_evaluation(evaluation) if evaluation else {}
        entry = {"experiment_prefix": self.prefix, "time": time.time(), **asdict(self.last), **self.progress}
        entry["total_samples"] = self.contributions.total_samples()
        entry |= {"begins_anew": True} if starts_over else {}
        entry |= validation
        self.history.add(entry)
        append_line(self.output_dir / "metrics.jsonl", json.dumps(entry))
        rows = []
        if time.monotonic() >= self.next_table:
            self.next_table = time.monotonic() + TABLE_PERIOD
            rows = self.contributions.make_rows()
        # of a second line only what is new: dashboards have the rest
        news = entry if is_new else {"epoch": entry["epoch"], **validation}
        self.dashboard.report(news, rows)

    def go_back(self, epoch: int) -> bool:
        """The swarm continues from an older state, or, if True, has started over: a new curve begins."""
        starts_over = epoch <= max(NEW_RUN_EPOCH, self.last.epoch // 10)
        self.history.forget_from(0 if starts_over else epoch)
        if starts_over:
            logger.info(f"Run {self.prefix} has started over, at epoch {epoch}")
            self.write_summary()
            self.put_summary_aside()
            self.contributions = Contributions({})
        self.dashboard.finish()
        self.dashboard, self.run_name, self.reported_to = Dashboard(), make_run_name(self.prefix), []
        self.start_dashboard()
        return starts_over

    def read_progress(self) -> dict:
        """Return what the status page shows; it asks from its own thread."""
        last, ended = self.last, self.find_end()
        progress = {"epoch": last and last.epoch, "loss": last and last.loss, "peers": self.alive_peers}
        progress |= {**describe_swarm(last, self.history), **self.contributions.describe()}
        progress |= {**self.progress, **self.last_validation(), "ended": ended}
        return progress | ({"peers": 0, "samples_per_second": 0.0, "seconds_left": 0} if ended else {})

    def find_end(self) -> float | None:
        """Return the Unix time of the last trainer's last report if no trainer is there any more, otherwise None."""
        if not self.last:
            return None
        is_complete = self.last.epoch >= self.progress.get("final_epoch", math.inf)
        # one read of the DHT may miss what is there
        if self.empty_looks < (1 if is_complete else READS_BEFORE_THE_END):
            return None
        return max((peer.last_seen for _, peer in self.contributions.ranking()), default=self.history[-1]["time"])

    def last_validation(self) -> dict:
        """Return the last validation, by the names of metrics.jsonl."""
        return self.history.validation[-1] if self.history.validation else {}

    def finish(self) -> None:
        """Write the summary and end the dashboard."""
        self.write_summary()
        total = max(1, self.contributions.total_samples())
        for row in self.contributions.make_rows():
            logger.info(f"Peer {row['peer']} contributed {row['samples']:,} samples ({row['samples'] / total:.1%})")
        names = [n for n in ("learning_curve.png", "metrics.jsonl", "summary.json") if (self.output_dir / n).exists()]
        logger.info(f"In {self.output_dir}: {', '.join(names)}")
        if self.last:
            # the whole table once more, beside the last epoch's numbers
            self.dashboard.report({"epoch": self.last.epoch}, self.contributions.make_rows())
        self.dashboard.finish()

    def write_summary(self) -> None:
        """Write summary.json: the contributors, and what the next process needs to continue."""
        summary = {
            "experiment_prefix": self.prefix,
            "epochs": self.last.epoch if self.last else 0,
            "last_loss": self.last.loss if self.last else None,
            **self.last_validation(),
            "total_samples": self.contributions.total_samples(),
            "run_name": self.run_name,
            "reported_to": self.reported_to,
            "peers": self.contributions.to_json(),
            "workers": [peer_id.hex() for peer_id in self.workers.present],
        }
        write_file(self.output_dir / "summary.json", json.dumps(summary, indent=2) + "\n")

    def load_summary(self) -> dict:
        """What an earlier process has written of this run; that of another run is put aside."""
        summary = read_json(self.output_dir / "summary.json")
        if summary and summary.get("experiment_prefix") != self.prefix:
            self.put_summary_aside()
            return {}
        return summary

    def put_summary_aside(self) -> None:
        aside = self.output_dir / f"summary-until-{time.strftime('%Y%m%d-%H%M%S')}.json"
        with contextlib.suppress(FileNotFoundError):
            (self.output_dir / "summary.json").rename(aside)
            logger.info(f"The summary of the run before is in {aside}")
