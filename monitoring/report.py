"""Reports of a run by monitors and auxiliary peers: metrics.jsonl, the learning curve, a dashboard and the summary."""

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
from utils import FETCH_TIMEOUT, SwarmMetrics, aggregate_metrics, filter_plausible_records

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
#: results of measure_progress
PROGRESS = ("target_batch_size", "swarm_samples", "final_epoch", "seconds_left")


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
        #: the last line of metrics.jsonl, which may be an earlier process's
        self.last = self.history[-1] if self.history else {}
        self.course, self.contributions = RunCourse(self.prefix), Contributions(summary.get("peers", {}))
        self.workers = ContributorRegistry(map(bytes.fromhex, summary.get("workers", [])))
        #: the run's name on dashboards, and the dashboards that have its whole history
        self.run_name = summary.get("run_name") or make_run_name(self.prefix)
        self.reported_to = summary.get("reported_to", [])
        self.dashboard, self.config = Dashboard(), asdict(swarm) | asdict(args)
        #: reads in a row that found no trainer, and that found only epochs before the last one
        self.empty_reads = self.older_reads = 0
        self.alive_peers, start = 0, time.monotonic()
        self.next_drawing, self.next_table = start + CURVE_PERIOD, start + TABLE_PERIOD

    def start_dashboard(self) -> None:
        """Start the dashboard that the flags select. Call this after all helper processes are forked."""
        if self.args.report_to == "trackio":
            self.dashboard = start_trackio(self.prefix, self.run_name, self.config)
            folder = os.environ.get("TRACKIO_DIR")
            place = f"trackio {os.path.abspath(folder) if folder else 'in its own folder'}"
        elif self.args.report_to == "wandb":
            self.dashboard = start_wandb(self.args.wandb_project, self.run_name, self.config)
            place = f"wandb {self.args.wandb_project}"
        if self.dashboard.run is None or place in self.reported_to:
            return
        # this dashboard is new and needs the whole history
        for entry in self.history:
            self.dashboard.report(entry)
        if self.history:
            # finish the reports before the summary records that they are complete
            self.dashboard.finish()
        # save the run's name at once, because this process may be killed
        self.reported_to.append(place)
        self.write_summary()
        if self.history:
            self.start_dashboard()

    def update(self, dht: hivemind.DHT, is_last: bool = False) -> SwarmMetrics | None:
        """Read and report the swarm's metrics, and return those of its newest epoch if they are new.

        :param is_last: whether to hurry
        """
        last_epoch = self.last.get("epoch")
        timeout = FINAL_FETCH_TIMEOUT if is_last else FETCH_TIMEOUT
        # at the end only local records: the DHT waits for seconds for trainers that have just left
        records = fetch_records(dht, self.prefix, timeout, self.workers, latest=not is_last)
        if STOP_REQUESTED.is_set() and not is_last:
            return None  # the last update must not wait for this one
        believable = filter_plausible_records([(label, metrics) for label, (metrics, _) in records.items()], last_epoch)
        current = aggregate_metrics(believable, last_epoch)
        self.alive_peers = current.alive_peers if current else 0
        self.older_reads = self.older_reads + 1 if current and self.last and current.epoch < last_epoch else 0
        if 0 < self.older_reads < READS_BEFORE_GOING_BACK:
            return None  # these records may belong to this run or to a new one
        is_new = current is not None and current.epoch != last_epoch
        begins_anew = is_new and self.older_reads > 0 and self.go_back(current.epoch)
        reports = {} if is_last else fetch_progress(dht, self.prefix)
        self.empty_reads = 0 if reports or is_new else self.empty_reads + 1
        self.contributions.update({label: records[label] for label, _ in believable}, reports, time.time())
        news = {}
        if is_new:
            self.older_reads = 0
            recent = [entry["epoch_seconds"] for entry in self.history[-RECENT_EPOCHS:]] + [current.epoch_seconds]
            progress = self.course.measure(dht, current.epoch, believable, recent, self.workers)
            news = {"experiment_prefix": self.prefix, **asdict(current), **progress}
            if begins_anew:
                news["begins_anew"] = True
            logger.info(format_epoch(asdict(current) | progress))
        evaluation = find_evaluation(believable)
        if evaluation and evaluation.epoch > self.last_validation().get("validation_epoch", -1):
            logger.info(f"validation {format_evaluation(evaluation)}")
            news |= describe_evaluation(evaluation)
        if is_new or (news and self.last):
            self.add_entry(news)
        if time.monotonic() >= self.next_drawing:
            self.next_drawing = time.monotonic() + CURVE_PERIOD
            self.write_files()
        return current if is_new else None

    def add_entry(self, news: dict) -> None:
        """Add an epoch to metrics.jsonl, curve and dashboard.

        :param news: the metrics of a new epoch, or only an evaluation, which replaces the entry of the last epoch
        """
        own = {"time": time.time(), "total_samples": self.contributions.total_samples()}
        self.last = (news if "epoch" in news else self.last | news) | own
        self.history.add(self.last)
        append_line(self.output_dir / "metrics.jsonl", json.dumps(self.last))
        rows = []
        if time.monotonic() >= self.next_table:
            self.next_table = time.monotonic() + TABLE_PERIOD
            rows = self.contributions.make_rows()
        # dashboards have the rest of a second entry
        self.dashboard.report(self.last if "epoch" in news else news | {"epoch": self.last["epoch"]}, rows)

    def go_back(self, epoch: int) -> bool:
        """Start a new curve after the swarm went back; return whether it is a new run, not an older state."""
        starts_over = epoch <= max(NEW_RUN_EPOCH, self.last["epoch"] // 10)
        if starts_over:
            logger.info(f"Run {self.prefix} has started over, at epoch {epoch}")
            self.write_summary()
            self.put_summary_aside()
            self.contributions = Contributions({})
        self.history.forget_from(0 if starts_over else epoch)
        self.dashboard.finish()
        self.run_name, self.reported_to = make_run_name(self.prefix), []
        self.start_dashboard()
        return starts_over

    def read_progress(self) -> dict:
        """Return the content of the status page, which calls this from its own thread."""
        last, ended = self.last, self.find_end()
        progress = {"epoch": last.get("epoch"), "loss": last.get("loss"), "peers": self.alive_peers}
        metrics = SwarmMetrics(**pick(last, SwarmMetrics)) if last else None
        progress |= {**describe_swarm(metrics, self.history), **self.contributions.describe()}
        progress |= {name: last[name] for name in PROGRESS if name in last}
        progress |= {**self.last_validation(), "ended": ended}
        return progress | ({"peers": 0, "samples_per_second": 0.0, "seconds_left": 0} if ended else {})

    def find_end(self) -> float | None:
        """Return the Unix time of the last trainer's last report if all trainers have left, otherwise None."""
        if not self.last:
            return None
        is_complete = self.last["epoch"] >= self.last.get("final_epoch", math.inf)
        # one read of the DHT may miss records
        if self.empty_reads < (1 if is_complete else READS_BEFORE_THE_END):
            return None
        return max((peer.last_seen for _, peer in self.contributions.ranking()), default=self.history[-1]["time"])

    def last_validation(self) -> dict:
        """Return the last validation, by the names of metrics.jsonl."""
        return self.history.validation[-1] if self.history.validation else {}

    def finish(self) -> None:
        """Write the last curve and summary, and end the dashboard."""
        self.write_files()
        rows = self.contributions.make_rows()
        for row in rows:
            logger.info(f"Peer {row['peer']} contributed {row['samples']:,} samples ({row['share']})")
        names = [n for n in ("learning_curve.png", "metrics.jsonl", "summary.json") if (self.output_dir / n).exists()]
        logger.info(f"In {self.output_dir}: {', '.join(names)}")
        if self.last:
            # the complete table again, at the last epoch
            self.dashboard.report({"epoch": self.last["epoch"]}, rows)
        self.dashboard.finish()

    def write_files(self) -> None:
        """Draw the learning curve, if an epoch is known, and write the summary."""
        if self.history:
            draw_learning_curve(self.history, self.prefix, self.output_dir / "learning_curve.png")
        self.write_summary()

    def write_summary(self) -> None:
        """Write summary.json with the contributors and the state that the next process needs to continue."""
        summary = {
            "experiment_prefix": self.prefix,
            "epochs": self.last.get("epoch", 0),
            "last_loss": self.last.get("loss"),
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
