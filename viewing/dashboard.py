"""What people look at: the dashboard, the learning curve, the thanks to those who contribute, the summary of a run.

Used by the roles that watch the whole swarm, run_training_monitor.py and run_aux_peer.py; a trainer reports its own
curves to wandb through it.
"""

import contextlib
import gc
import importlib.util
import io
import json
import logging
import os
import secrets
import shlex
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import hivemind

from arguments import ReportArguments, TrainerArguments
from support.console import UserError
from support.files import append_line, lock_folder, write_file
from swarm.joining import Plan, find_plan
from utils import (
    RECENT_EPOCHS,
    LocalMetrics,
    SwarmMetrics,
    aggregate_metrics,
    describe_evaluation,
    fetch_records,
    find_evaluation,
    find_final_epoch,
    measure_progress,
    perplexity,
    select_believable,
    show_progress,
    show_samples,
)

logger = logging.getLogger("dashboard")

# What dashboards raise when the disk is full or their helper process is gone. The run matters more than its display.
DASHBOARD_ERRORS = (OSError, RuntimeError, ValueError, sqlite3.Error)
CURVE_PERIOD = 30.0  # seconds between two drawings: one takes up to a second of a core that may be training
# Seconds between two tables of thanks, of which dashboards keep every one: at the start, and later.
FIRST_TABLE_PERIOD, TABLE_PERIOD = 60.0, 3600.0
FINAL_FETCH_TIMEOUT = 5.0
PLAN_PERIOD = 60.0  # seconds between two looks at what never changes in a run
# of the curves
TRAINING = dict(color="#1f5fa8", linewidth=1.8)
VALIDATION = dict(color="#b3367d", linewidth=1.4, marker="o", markersize=3.5)
# A read of the DHT may miss a record that is there; so many reads that miss all newer ones mean that a run began anew.
READS_BEFORE_GOING_BACK = 3
# Up to this epoch, or a tenth of the one reached, a run that went back is a new one; beyond, it goes on from an older
# state of itself. A new run may have come that far before it is noticed.
NEW_RUN_EPOCH = 30
MAX_POINTS = 4096  # of a curve, in memory: more than a picture has pixels
# Strangers can sign records with fresh keys, and each key is a peer to thank: the table keeps those who gave most.
MAX_PEERS, MAX_PEERS_SHOWN = 10_000, 200

# The dashboards' groups and what is in them, by the names of our metrics; dashboards show those of no group first.
GROUPS = {
    "": ("loss", "validation_loss", "learning_rate", "alive_peers", "num_peers", "samples_per_second", "total_samples"),
    "validation/": ("validation_perplexity", "validation_accuracy"),
    "progress/": ("swarm_samples", "target_batch_size", "final_epoch", "seconds_left"),
    "epoch/": ("epoch_seconds", "compute_seconds", "waiting_seconds", "averaging_seconds", "data_wait_share"),
    "round/": ("samples", "samples_accumulated", "averaged_with", "grad_norm", "skipped_steps"),
    "traffic/": ("bytes_sent", "bytes_received"),
}
# Arguments that dashboards are not told: they hold addresses, and names of users.
PRIVATE = ("initial_peers", "_maddrs", "_path", "_dir", "_url", "_port", "token", "resume_from_checkpoint")


class RunReport:
    """Follows a run's metrics and writes what people look at; the state that lives from one look to the next.

    It goes on where an earlier process with the same --output_dir ended, and keeps others out of that folder. A user's
    error (an --output_dir that is in use, or cannot be written) ends the process with one line.
    """

    def __init__(self, args: ReportArguments, prefix: str):
        require_wandb(args)
        self.args, self.prefix, self.output_dir = args, prefix, Path(args.output_dir)
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            lock_folder("--output_dir", self.output_dir)
            (self.output_dir / "metrics.jsonl").touch()
            self.history = load_history(self.output_dir / "metrics.jsonl", prefix)
            summary = self.load_summary()
        except OSError as e:
            raise UserError(
                f"--output_dir {args.output_dir} cannot be written ({e.strerror}): choose another folder"
            ) from e
        #: what was reported last, be it by an earlier process
        self.last = SwarmMetrics(**pick(self.history[-1], SwarmMetrics)) if self.history else None
        self.contributions = Contributions(summary.get("peers", {}))
        #: the run's name on dashboards, and on which of them it is
        self.run_name = summary.get("run_name") or make_run_name(prefix)
        self.reported_to = summary.get("reported_to", [])
        self.dashboard, self.config, self.alive_peers = None, {}, 0
        self.plan, self.next_plan, self.progress = Plan(), 0.0, {}
        self.older_reads, self.next_drawing, self.next_table = 0, time.monotonic() + CURVE_PERIOD, 0.0
        self.table_period = FIRST_TABLE_PERIOD

    def start_dashboard(self, config: dict) -> None:
        """Call it when all helper processes are forked.

        :param config: arguments to show beside the curves; addresses and paths among them are left out
        """
        self.config = {name: value for name, value in config.items() if not name.endswith(PRIVATE)}
        if self.args.report_to == "trackio":
            self.dashboard = start_trackio(self.prefix, self.run_name, self.config)
            where = os.path.abspath(os.environ.get("TRACKIO_DIR") or "trackio's default")
        elif self.args.report_to == "wandb":
            self.dashboard = start_wandb(self.args.wandb_project, self.run_name, self.config)
            where = self.args.wandb_project
        if self.dashboard is None or f"{self.args.report_to} {where}" in self.reported_to:
            return
        # a dashboard that does not know this run yet; its name is on the disk at once, should this process be killed
        self.reported_to.append(f"{self.args.report_to} {where}")
        if self.history:
            for entry in self.history:
                self.dashboard = report_to_dashboard(self.dashboard, entry)
            # before it is noted that all this was reported, it has to be
            finish_dashboard(self.dashboard)
            self.write_summary()
            self.start_dashboard(config)
        else:
            self.write_summary()

    def update(self, dht: hivemind.DHT, is_last: bool = False) -> SwarmMetrics | None:
        """Look at the swarm once; the metrics of its newest epoch, if that was not reported yet.

        :param is_last: hurry, and draw the curve in any case
        """
        last_epoch = self.last.epoch if self.last else None
        fetch_options = {"timeout": FINAL_FETCH_TIMEOUT} if is_last else {}
        records = fetch_records(dht, self.prefix, **fetch_options)
        believable = select_believable([(label, metrics) for label, (metrics, _) in records.items()], last_epoch)
        current = aggregate_metrics(believable, last_epoch)
        self.alive_peers = current.alive_peers if current else 0
        self.older_reads = self.older_reads + 1 if current and self.last and current.epoch < last_epoch else 0
        is_new = current is not None and (
            self.last is None or current.epoch > last_epoch or self.older_reads >= READS_BEFORE_GOING_BACK
        )
        begins_anew = is_new and self.last is not None and current.epoch < last_epoch and self.go_back(current.epoch)
        if is_new or not self.older_reads:  # else it is not clear yet to which run they belong
            self.contributions.update({label: records[label] for label, _ in believable}, time.time())
        evaluation = None if self.older_reads and not is_new else find_evaluation(believable)
        if evaluation and self.history.validation and evaluation.epoch <= self.history.validation[-1]["epoch"]:
            evaluation = None
        if is_new:
            self.last, self.older_reads = current, 0
            self.progress = self.measure_progress(dht, believable, is_last)
            course = f"{show_progress(current.epoch, self.progress)}  {show_samples(self.progress)}".strip()
            logger.info(
                f"Epoch #{current.epoch}  loss = {current.loss:.5f}  peers {current.alive_peers}  samples "
                f"{current.samples}  {current.samples_per_second:.1f} samples/s  averaged with {current.averaged_with}"
                f"  {course}".rstrip()
            )
        if evaluation:
            logger.info(
                f"Validation at epoch {evaluation.epoch}: loss {evaluation.loss:.4f}, perplexity "
                f"{perplexity(evaluation.loss):,.1f}, accuracy {evaluation.accuracy:.1%}"
            )
        if is_new or (evaluation and self.last):
            # an evaluation may come later than the metrics of its epoch: another line then, in place of the last
            entry = {"experiment_prefix": self.prefix, "time": time.time(), **asdict(self.last), **self.progress}
            entry["total_samples"] = self.contributions.total_samples()
            entry |= {"begins_anew": True} if begins_anew else {}
            entry |= describe_evaluation(evaluation) if evaluation else {}
            self.history.add(entry)
            append_line(self.output_dir / "metrics.jsonl", json.dumps(entry))
            rows = []
            if time.monotonic() >= self.next_table:
                self.next_table = time.monotonic() + self.table_period
                self.table_period = min(2 * self.table_period, TABLE_PERIOD)
                rows = self.contributions.make_rows()
            # of a second line only what is new: dashboards have the rest
            news = entry if is_new else {"epoch": entry["epoch"], **describe_evaluation(evaluation)}
            self.dashboard = report_to_dashboard(self.dashboard, news, rows)
        if self.history and (is_last or time.monotonic() >= self.next_drawing):
            draw_learning_curve(self.history, self.prefix, self.output_dir / "learning_curve.png")
            self.write_summary()
            self.next_drawing = time.monotonic() + CURVE_PERIOD
        return current if is_new else None

    def measure_progress(self, dht: hivemind.DHT, records: list[tuple[str, LocalMetrics]], is_last: bool) -> dict:
        """How far the swarm has come, and when it ends: see utils.measure_progress."""
        if time.monotonic() >= self.next_plan and not is_last:
            self.plan = find_plan(dht, self.prefix, FINAL_FETCH_TIMEOUT) or self.plan
            self.next_plan = time.monotonic() + (PLAN_PERIOD if self.plan.total_steps else 0.0)
        final_epoch = find_final_epoch(records, self.plan.total_steps)
        recent = [entry["epoch_seconds"] for entry in self.history[-RECENT_EPOCHS:]] + [self.last.epoch_seconds]
        return measure_progress(self.last.epoch, final_epoch, self.plan.target_batch_size, recent)

    def go_back(self, epoch: int) -> bool:
        """The swarm goes on from an older state, or, if True, has begun anew: what comes now is a curve of its own."""
        begins_anew = epoch <= max(NEW_RUN_EPOCH, self.last.epoch // 10)
        self.history.forget_from(0 if begins_anew else epoch)
        if begins_anew:
            logger.info(f"Run {self.prefix} has begun anew, at epoch {epoch}")
            self.write_summary()
            self.put_summary_aside()
            self.contributions = Contributions({})
        finish_dashboard(self.dashboard)
        self.dashboard, self.run_name, self.reported_to = None, make_run_name(self.prefix), []
        self.start_dashboard(self.config)
        return begins_anew

    def read_progress(self) -> dict:
        """For the status page, which asks from a thread of its own."""
        last = self.last
        progress = {"epoch": last and last.epoch, "loss": last and last.loss, "peers": self.alive_peers}
        return progress | self.progress | self.last_validation()

    def last_validation(self) -> dict:
        """By the names of metrics.jsonl."""
        values = self.history.validation[-1] if self.history.validation else {}
        return {f"validation_{name}": value for name, value in values.items()}

    def finish(self) -> None:
        """Write the summary and end the dashboard."""
        self.write_summary()
        total = max(1, self.contributions.total_samples())
        for row in self.contributions.make_rows():
            logger.info(f"Peer {row['peer']} gave {row['samples']:,} samples ({row['samples'] / total:.1%})")
        logger.info(f"Learning curve, metrics.jsonl and summary.json are in {self.output_dir}")
        if self.last:
            # the whole table once more, beside the last epoch's numbers
            report_to_dashboard(self.dashboard, {"epoch": self.last.epoch}, self.contributions.make_rows())
        finish_dashboard(self.dashboard)

    def write_summary(self) -> None:
        """Write summary.json: the thanks, and what the next process needs to go on."""
        summary = {
            "experiment_prefix": self.prefix,
            "epochs": self.last.epoch if self.last else 0,
            "last_loss": self.last.loss if self.last else None,
            **self.last_validation(),
            "total_samples": self.contributions.total_samples(),
            "run_name": self.run_name,
            "reported_to": self.reported_to,
            "peers": self.contributions.to_json(),
        }
        text = json.dumps(summary, indent=2) + "\n"
        write_file(self.output_dir / "summary.json", lambda file: file.write(text.encode()))

    def load_summary(self) -> dict:
        """What an earlier process has written of this run; that of another run is put aside."""
        path, summary = self.output_dir / "summary.json", {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            summary = json.loads(path.read_text(encoding="utf-8"))
        if summary and summary.get("experiment_prefix") != self.prefix:
            self.put_summary_aside()
            return {}
        return summary

    def put_summary_aside(self) -> None:
        aside = self.output_dir / f"summary-until-{time.strftime('%Y%m%d-%H%M%S')}.json"
        with contextlib.suppress(FileNotFoundError):
            (self.output_dir / "summary.json").rename(aside)
            logger.info(f"The summary of the run before is in {aside}")


# --- what is kept of a run --------------------------------------------------------------------------------------------


class History(list):
    """A run's epochs, oldest first, as in metrics.jsonl: all of a short run, evenly thinned out for a long one.

    The newest epoch is always the last element. Evaluations, which are few, are kept apart as well.
    """

    def __init__(self):
        super().__init__()
        #: epoch, loss, perplexity, accuracy of each, oldest first
        self.validation: list[dict] = []
        # one epoch in `stride` is kept for good, `added` counts all
        self.stride, self.added = 1, 0

    def add(self, entry: dict) -> None:
        """Append an epoch; those beyond it are of an earlier run with the same name, and are forgotten. A second
        line on the newest epoch takes the place of the first."""
        if self and self[-1]["epoch"] == entry["epoch"] and not entry.get("begins_anew"):
            self[-1] = entry
            self.add_validation(entry)
            return
        if self and self[-1]["epoch"] >= entry["epoch"]:
            self.forget_from(0 if entry.get("begins_anew") else entry["epoch"])
        self.add_validation(entry)
        if self and (self.added - 1) % self.stride:
            self.pop()
        self.append(entry)
        self.added += 1
        if len(self) > MAX_POINTS:
            self.stride *= 2
            # every second of those kept for good, and the newest in any case
            self[:] = self[::2] + self[-1:] * (len(self) % 2 == 0)

    def add_validation(self, entry: dict) -> None:
        if "validation_loss" in entry:
            names = ("epoch", "loss", "perplexity", "accuracy")
            self.validation.append({name: entry[f"validation_{name}"] for name in names})
        if len(self.validation) > MAX_POINTS:
            self.validation[:] = self.validation[::2]

    def forget_from(self, epoch: int) -> None:
        self.validation[:] = [values for values in self.validation if values["epoch"] < epoch]
        self[:] = [entry for entry in self if entry["epoch"] < epoch]
        self.stride, self.added = (self.stride, (len(self) - 1) * self.stride + 1) if self else (1, 0)


def load_history(path: Path, prefix: str) -> History:
    """The epochs of this run that an earlier monitor wrote, so that a restart continues the curve."""
    history = History()
    needed = {field.name for field in fields(SwarmMetrics)} | {"time", "total_samples"}
    if path.exists():
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # the last line, if that monitor was killed
                    continue
                # those of older versions lack fields
                if isinstance(entry, dict) and entry.get("experiment_prefix") == prefix and needed <= entry.keys():
                    history.add(entry)
    return history


@dataclass
class Contribution:
    """What one peer has given to the run, by its own account."""

    total_samples: int  # in all, over its restarts
    last_epoch: int
    skipped_steps: int
    samples_per_second: float
    client_mode: bool
    last_seen: float  # Unix time at which its newest record was first read
    reported_samples: int  # total_samples of its newest record
    expiration_time: float  # of its newest record


class Contributions:
    """Who has given how much, also those who have left.

    A trainer counts its samples itself, and goes on counting after a restart from its checkpoint; one that starts
    without has an older number, or zero. What it gave before counts all the same.

    :param saved: what `to_json` gave
    """

    def __init__(self, saved: dict[str, dict]):
        names = {field.name for field in fields(Contribution)}
        self.peers = {label: Contribution(**values) for label, values in saved.items() if names == values.keys()}

    def update(self, records: dict[str, tuple[LocalMetrics, float]], now: float) -> None:
        """Take in the peers' newest records, each with its expiration time.

        :param now: Unix time
        """
        for label, (metrics, expiration_time) in records.items():
            known = self.peers.get(label)
            if known is None:
                gave = metrics.total_samples
            elif expiration_time <= known.expiration_time:  # a read that missed its newest record, or no news
                continue
            elif metrics.total_samples >= known.reported_samples:
                gave = known.total_samples + metrics.total_samples - known.reported_samples
            else:  # it went on from an older count: of what it has given since, this epoch's samples are certain
                gave = known.total_samples + min(metrics.samples_accumulated, metrics.total_samples)
            self.peers[label] = Contribution(
                total_samples=gave,
                last_epoch=metrics.epoch,
                skipped_steps=metrics.skipped_steps,
                samples_per_second=metrics.samples_per_second,
                client_mode=metrics.client_mode,
                last_seen=now,
                reported_samples=metrics.total_samples,
                expiration_time=expiration_time,
            )
        if len(self.peers) > MAX_PEERS:
            self.peers = dict(self.ranking()[:MAX_PEERS])

    def ranking(self) -> list[tuple[str, Contribution]]:
        return sorted(self.peers.items(), key=lambda item: -item[1].total_samples)

    def total_samples(self) -> int:
        return sum(peer.total_samples for peer in self.peers.values())

    def make_rows(self) -> list[dict]:
        """The table of thanks: peers by what they gave, the most generous first, and one row for all others."""
        ranking, total = self.ranking(), max(1, self.total_samples())
        rows = [
            {
                "peer": label,
                "samples": peer.total_samples,
                "share": f"{peer.total_samples / total:.1%}",
                "samples/s": round(peer.samples_per_second, 1),
                "epoch": peer.last_epoch,
                "last seen (UTC)": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(peer.last_seen)),
                "way in": "client" if peer.client_mode else "public",
                "skipped steps": peer.skipped_steps,
            }
            for label, peer in ranking[:MAX_PEERS_SHOWN]
        ]
        if others := [peer for _, peer in ranking[MAX_PEERS_SHOWN:]]:
            samples = sum(peer.total_samples for peer in others)
            rest = {"peer": f"{len(others)} others", "samples": samples, "share": f"{samples / total:.1%}"}
            rows.append(dict.fromkeys(rows[0], "") | {"samples/s": 0.0, "epoch": 0, "skipped steps": 0} | rest)
        return rows

    def to_json(self) -> dict[str, dict]:
        return {label: asdict(peer) for label, peer in self.ranking()}


def pick(values: dict, schema: type) -> dict:
    """Of a dictionary what a dataclass has fields for."""
    return {field.name: values[field.name] for field in fields(schema)}


# --- dashboards -------------------------------------------------------------------------------------------------------


def make_run_name(prefix: str) -> str:
    """For dashboards: unique, also among several peers that report to one of them."""
    return f"{prefix}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def start_trackio(prefix: str, run_name: str, config: dict):
    """The module trackio with a run begun or gone on with, or None: no dashboard."""
    try:
        import trackio

        # to a local SQLite file: no server, no account; it greets with colour codes and two commands of its own
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.init(
                prefix,
                name=run_name,
                resume="allow",
                config=config,
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
    except (ImportError, *DASHBOARD_ERRORS) as e:
        logger.warning(f"No dashboard: trackio failed ({e}). metrics.jsonl and the curve are written all the same")
        return None
    # beside the interpreter when .venv is not activated
    command = "trackio" if shutil.which("trackio") else Path(sys.executable).with_name("trackio")
    folder = f"TRACKIO_DIR={shlex.quote(os.environ['TRACKIO_DIR'])} " if os.environ.get("TRACKIO_DIR") else ""
    logger.info(f"Dashboard: {folder}{command} show --project {shlex.quote(prefix)}")
    return trackio


def start_wandb(project: str, run_name: str, config: dict):
    """The module wandb with a run begun or gone on with, or None: no dashboard.

    Sends the config and what is logged: no host name, no command line, no console output, which holds addresses.
    """
    # wandb itself dropped the first of these variables
    disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes")
    if disabled or os.environ.get("WANDB_MODE") == "disabled":
        logger.info(f"No dashboard: {'WANDB_DISABLED is set' if disabled else 'WANDB_MODE is disabled'}")
        return None
    if importlib.util.find_spec("wandb") is None:
        logger.warning("No dashboard: wandb is not installed (pip install wandb)")
        return None
    import wandb

    try:
        if folder := os.environ.get("WANDB_DIR"):
            os.makedirs(folder, exist_ok=True)  # or wandb writes to /tmp
        settings = wandb.Settings(
            init_timeout=20,  # without a network, wandb tries for 90 s
            login_timeout=60,  # who has no key is asked for one, in a terminal
            finish_timeout=10,  # and then for ever; what is not uploaded stays on the disk for `wandb sync`
            console="off",
            disable_code=True,
            disable_git=True,
            host="",
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        # the name, without the characters that an id may not have: the same run after a restart
        run_id = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in run_name)[-64:]
        run = wandb.init(project=project, id=run_id, name=run_name, resume="allow", config=config, settings=settings)
    except (wandb.Error, *DASHBOARD_ERRORS) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        logger.warning(f"No dashboard: wandb failed ({reason}). WANDB_MODE=offline records for a later upload")
        wandb.teardown()
        return None
    logger.info(f"Dashboard: {run.url or f'wandb sync {Path(run.dir).parent}'}")
    return wandb


def require_wandb(args: ReportArguments | TrainerArguments) -> None:
    """Stop with one line where --wandb_project is given and wandb is missing."""
    if args.wandb_project and importlib.util.find_spec("wandb") is None:
        raise UserError("--wandb_project needs wandb: pip install wandb, or leave the flag away")


def start_trainer_dashboard(args: TrainerArguments, prefix: str, config: dict, is_resumed: bool):
    """The module wandb when --wandb_project or WANDB_PROJECT asks for a trainer's own curves, or None.

    Call it when hivemind's helper processes are forked.

    :param is_resumed: go on with the curves of the trainer that used this --output_dir before
    """
    project = args.wandb_project or os.environ.get("WANDB_PROJECT")
    if not project:
        return None
    path, run_name = Path(args.output_dir) / "wandb_run", make_run_name(f"{prefix}-trainer")
    with contextlib.suppress(OSError):
        if is_resumed and path.exists():
            run_name = path.read_text(encoding="utf-8").strip()
        path.write_text(run_name, encoding="utf-8")
    return start_wandb(project, run_name, {name: value for name, value in config.items() if not name.endswith(PRIVATE)})


def group_metrics(values: dict) -> dict:
    """Those metrics that dashboards show, by the names they have there."""
    return {f"{group}{name}": values[name] for group, names in GROUPS.items() for name in names if name in values}


def report_to_dashboard(dashboard, values: dict, thanks: Sequence[dict] = ()):
    """Log one epoch without waiting; returns the dashboard, or None once it has failed.

    :param values: metrics by name, `epoch` among them
    :param thanks: rows of a table
    """
    if dashboard is None:
        return None
    try:
        table = {}
        if thanks:
            table["thanks"] = dashboard.Table(columns=list(thanks[0]), data=[list(row.values()) for row in thanks])
        dashboard.log(group_metrics(values) | table, step=values["epoch"])
    except Exception as e:  # wandb's service may die in many ways, and training must not notice any of them
        logger.warning(f"The dashboard failed ({e!r}) and gets no more")
        return None
    return dashboard


def finish_dashboard(dashboard) -> None:
    """Write what is pending and end the dashboard's threads and helper processes."""
    if dashboard is not None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                dashboard.finish()
            if hasattr(dashboard, "teardown"):  # wandb's service process
                dashboard.teardown()
        except Exception as e:  # as above
            logger.warning(f"The dashboard may lack the last epochs ({e!r})")


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw_learning_curve(history: History, prefix: str, path: Path) -> bool:
    """Loss, and below it samples per second, over epochs; whether it could be written, whole."""
    pyplot = import_pyplot()
    epochs = [entry["epoch"] for entry in history]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=[3, 1], layout="constrained"
    )
    dot = "." if len(epochs) < 50 else None
    upper.plot(epochs, [entry["loss"] for entry in history], label="training", **TRAINING, marker=dot)
    draw_validation(upper, history, lambda epoch: epoch)
    upper.set_title(describe_last(history, prefix))
    lower.plot(epochs, [entry["samples_per_second"] for entry in history], color="#c2571a", linewidth=1.2, marker=dot)
    lower.set_ylabel("samples/s")
    lower.set_ylim(0, 1.15 * max(entry["samples_per_second"] for entry in history) or 1)
    lower.set_xlabel("epoch (optimizer step of the swarm)")
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    return save_figure(pyplot, figure, path)


def plot_run(history: History, prefix: str, path: Path) -> bool:
    """Loss over epochs, over samples and over hours, side by side; whether it could be written, whole."""
    pyplot = import_pyplot()
    import numpy
    from matplotlib.ticker import EngFormatter

    losses = [entry["loss"] for entry in history]
    figure, panels = pyplot.subplots(1, 3, sharey=True, figsize=(15, 4.8), layout="constrained")
    epochs = [entry["epoch"] for entry in history]
    over = {
        "epoch (optimizer step of the swarm)": epochs,
        "samples that the peers gave": [entry["total_samples"] for entry in history],
        "hours since the first epoch shown": [(entry["time"] - history[0]["time"]) / 3600 for entry in history],
    }
    for axes, (label, values) in zip(panels, over.items(), strict=True):
        axes.plot(values, losses, label="training", **TRAINING, marker="." if len(losses) < 50 else None)
        draw_validation(axes, history, lambda epoch, values=values: numpy.interp(epoch, epochs, values))
        axes.set_xlabel(label)
    for axes in panels[1:]:
        axes.set_ylabel(None)
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.suptitle(describe_last(history, prefix))
    return save_figure(pyplot, figure, path)


def draw_validation(axes, history: History, place: Callable[[float], float]) -> None:
    """The second line, if anybody evaluates: of the words to be predicted alone, without the order of sentences.

    :param place: from an epoch to where it is on the horizontal axis
    """
    axes.set_ylabel("loss (nats)" if history.validation else "training loss (nats)")
    if history.validation:
        points = [(place(values["epoch"]), values["loss"]) for values in history.validation]
        axes.plot(*zip(*points, strict=True), label="validation (words)", **VALIDATION)
        axes.legend(frameon=False)


def describe_last(history: History, prefix: str) -> str:
    last = history[-1]
    peers = last["alive_peers"]
    text = f"{prefix}: loss {last['loss']:.3f} at epoch {last['epoch']:,}, {peers} peer{'s'[: peers != 1]}"
    if history.validation:
        text += f"; validation {history.validation[-1]['loss']:.3f}"
    return text.replace("$", r"\$")  # two of them would be a formula


def import_pyplot():
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    return pyplot


def save_figure(pyplot, figure, path: Path) -> bool:
    for axes in figure.axes:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    is_written = write_file(path, lambda file: figure.savefig(file, dpi=130, format="png"))
    pyplot.close(figure)
    # a figure's parts refer to each other: 2 to 4 MB a drawing pile up until Python happens to look for such circles
    gc.collect()
    return is_written
