"""Reports of a run by run_training_monitor.py and run_aux_peer.py.

These are the dashboard, the learning curve, the table of contributors and the summary.
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
from common.console import UserError, format_epoch
from common.files import append_line, lock_folder, read_json, write_file
from monitoring.curves import draw_learning_curve
from monitoring.dashboards import Dashboard, make_run_name, require_wandb, start_trackio, start_wandb
from monitoring.history import Contributions, describe_swarm, load_history, pick
from monitoring.progress import RunCourse
from swarm.processes import STOP_REQUESTED
from swarm.trust import ContributorRegistry
from training.figures import describe_evaluation, fetch_progress, fetch_records, find_evaluation, format_evaluation
from training.progress import RECENT_EPOCHS
from utils import FETCH_TIMEOUT, Evaluation, SwarmMetrics, aggregate_metrics, filter_plausible_records

logger = logging.getLogger("report")

CURVE_PERIOD = 30.0  # seconds between two drawings, which take up to a second of a core that may be training
# seconds between two tables of contributors, because dashboards show all of them; the last one follows at the end
TABLE_PERIOD = 86400.0
FINAL_FETCH_TIMEOUT = 1.0
# Reads of the DHT without any newer record, after which the run has started over. A single read may miss records.
READS_BEFORE_GOING_BACK = 3
READS_BEFORE_THE_END = 2  # reads without a trainer, of which one may have missed records
# A run that went back is a new one up to this epoch, or up to a tenth of the epoch reached. Beyond, it has resumed from
# an older state. A new run may reach that epoch before it is detected.
NEW_RUN_EPOCH = 30


class RunReport:
    """A reporter that follows a run's metrics and writes curve, summary and dashboard.

    It continues the reports of an earlier process with the same --output_dir, and locks that folder. The constructor
    raises a UserError if the folder is in use or cannot be written.
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
        #: the metrics of the last report, which may be an earlier process's
        self.last = SwarmMetrics(**pick(self.history[-1], SwarmMetrics)) if self.history else None
        self.contributions = Contributions(summary.get("peers", {}))
        #: the run's name on dashboards, and the dashboards that have it
        self.run_name = summary.get("run_name") or make_run_name(self.prefix)
        self.reported_to = summary.get("reported_to", [])
        #: arguments for dashboards
        self.config = asdict(swarm) | asdict(args)
        self.dashboard, self.alive_peers = Dashboard(), 0
        known = self.history[-1] if self.history else {}
        self.course = RunCourse(self.prefix)
        #: the result of measure_progress at the last epoch
        self.progress = {name: known[name] for name in ("final_epoch", "swarm_samples") if name in known}
        #: updates in a row that found no trainer
        self.empty_looks = 0
        self.workers = ContributorRegistry(map(bytes.fromhex, summary.get("workers", [])))
        self.older_reads, start = 0, time.monotonic()
        self.next_drawing, self.next_table = start + CURVE_PERIOD, start + TABLE_PERIOD

    def start_dashboard(self) -> None:
        """Start the dashboard that the flags select. Call this after all helper processes are forked."""
        if self.args.report_to == "trackio":
            self.dashboard = start_trackio(self.prefix, self.run_name, self.config)
            folder = os.environ.get("TRACKIO_DIR")
            where = os.path.abspath(folder) if folder else "in its own folder"
        elif self.args.report_to == "wandb":
            self.dashboard = start_wandb(self.args.wandb_project, self.run_name, self.config)
            where = self.args.wandb_project
        if self.dashboard.run is None or f"{self.args.report_to} {where}" in self.reported_to:
            return
        # this dashboard is new and needs the whole history
        for entry in self.history:
            self.dashboard.report(entry)
        if self.history:
            # finish the reports before the summary records that they are complete
            self.dashboard.finish()
        # save the run's name at once, because this process may be killed
        self.reported_to.append(f"{self.args.report_to} {where}")
        self.write_summary()
        if self.history:
            self.start_dashboard()

    def update(self, dht: hivemind.DHT, is_last: bool = False) -> SwarmMetrics | None:
        """Read and report the swarm's metrics, and return those of its newest epoch if they are new.

        :param is_last: whether to hurry, and to draw the curve in any case
        """
        last_epoch = self.last.epoch if self.last else None
        timeout = FINAL_FETCH_TIMEOUT if is_last else FETCH_TIMEOUT
        # at the end only local records: the DHT waits for seconds for trainers that have just left
        records = fetch_records(dht, self.prefix, timeout, self.workers, latest=not is_last)
        if STOP_REQUESTED.is_set() and not is_last:
            return None  # the last update must not wait for this one
        believable = filter_plausible_records([(label, metrics) for label, (metrics, _) in records.items()], last_epoch)
        current = aggregate_metrics(believable, last_epoch)
        self.alive_peers = current.alive_peers if current else 0
        self.older_reads = self.older_reads + 1 if current and self.last and current.epoch < last_epoch else 0
        # older records may belong to this run or to a new one
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
            logger.info(format_epoch(asdict(current) | self.progress))
        if evaluation:
            logger.info(f"validation {format_evaluation(evaluation)}")
        if is_new or (evaluation and self.last):
            self.note(is_new, starts_over, evaluation)
        if self.history and (is_last or time.monotonic() >= self.next_drawing):
            draw_learning_curve(self.history, self.prefix, self.output_dir / "learning_curve.png")
            self.write_summary()
            self.next_drawing = time.monotonic() + CURVE_PERIOD
        return current if is_new else None

    def note(self, is_new: bool, starts_over: bool, evaluation: Evaluation | None) -> None:
        """Add the last epoch to metrics.jsonl, curve and dashboard, or replace its entry if an evaluation follows."""
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
        # dashboards have the rest of a second entry
        news = entry if is_new else {"epoch": entry["epoch"], **validation}
        self.dashboard.report(news, rows)

    def go_back(self, epoch: int) -> bool:
        """Start a new curve after the swarm went back; return whether it is a new run, not an older state."""
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
        """Return the content of the status page, which calls this from its own thread."""
        last, ended = self.last, self.find_end()
        progress = {"epoch": last and last.epoch, "loss": last and last.loss, "peers": self.alive_peers}
        progress |= {**describe_swarm(last, self.history), **self.contributions.describe()}
        progress |= {**self.progress, **self.last_validation(), "ended": ended}
        return progress | ({"peers": 0, "samples_per_second": 0.0, "seconds_left": 0} if ended else {})

    def find_end(self) -> float | None:
        """Return the Unix time of the last trainer's last report if all trainers have left, otherwise None."""
        if not self.last:
            return None
        is_complete = self.last.epoch >= self.progress.get("final_epoch", math.inf)
        # one read of the DHT may miss records
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
            # the complete table again, at the last epoch
            self.dashboard.report({"epoch": self.last.epoch}, self.contributions.make_rows())
        self.dashboard.finish()

    def write_summary(self) -> None:
        """Write summary.json with the contributors and the state that the next process needs to continue."""
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
        """Return the summary that an earlier process wrote of this run; rename one of another run."""
        summary = read_json(self.output_dir / "summary.json")
        if summary and summary.get("experiment_prefix") != self.prefix:
            self.put_summary_aside()
            return {}
        return summary

    def put_summary_aside(self) -> None:
        """Rename the summary of another run, with the time in its new name."""
        aside = self.output_dir / f"summary-until-{time.strftime('%Y%m%d-%H%M%S')}.json"
        with contextlib.suppress(FileNotFoundError):
            (self.output_dir / "summary.json").rename(aside)
            logger.info(f"Moved the summary of the earlier run to {aside}")
