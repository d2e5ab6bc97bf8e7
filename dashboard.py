"""What people look at: the dashboard, the learning curve, the summary of a run.

Used by the roles that watch the whole swarm: run_training_monitor.py and run_aux_peer.py.
"""

import contextlib
import gc
import io
import json
import logging
import os
import shlex
import shutil
import sqlite3
import sys
import time
from dataclasses import asdict
from pathlib import Path

import hivemind

from arguments import ReportArguments, stop_for_user
from utils import LocalMetrics, SwarmMetrics, aggregate_metrics, fetch_metrics, select_believable

logger = logging.getLogger("dashboard")

# What dashboards raise when the disk is full or their helper process is gone. The run matters more than its display.
DASHBOARD_ERRORS = (OSError, RuntimeError, ValueError, sqlite3.Error)
CURVE_PERIOD = 30.0  # seconds between two drawings: one takes up to a second of a core that may be training
FINAL_FETCH_TIMEOUT = 5.0
# A read of the DHT may miss a record that is there; so many reads that miss all newer ones mean that a run began anew.
READS_BEFORE_GOING_BACK = 3


class RunReport:
    """Follows a run's metrics and writes what people look at; the state that lives from one look to the next.

    A user's error (an --output_dir that cannot be written) ends the process with one line.
    """

    def __init__(self, args: ReportArguments, prefix: str):
        self.args, self.prefix, self.output_dir = args, prefix, Path(args.output_dir)
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.history = load_history(self.output_dir / "metrics.jsonl", prefix)
            self.metrics_file = open(self.output_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        except OSError as e:
            stop_for_user(f"--output_dir {args.output_dir} cannot be written ({e.strerror}): choose another folder")
        self.dashboard = None
        #: what was reported last, and the newest record of every peer that ever was there
        self.last: SwarmMetrics | None = None
        self.peers: dict[str, LocalMetrics] = {}
        self.older_reads, self.next_drawing = 0, time.monotonic() + CURVE_PERIOD

    def start_dashboard(self, config: dict) -> None:
        """Call it when all helper processes are forked."""
        self.dashboard = start_dashboard(self.args, self.prefix, config)

    def update(self, dht: hivemind.DHT, is_last: bool = False) -> SwarmMetrics | None:
        """Look at the swarm once; the metrics of its newest epoch, if that was not reported yet.

        :param is_last: hurry, and draw the curve in any case
        """
        last_epoch = self.last.epoch if self.last else None
        fetch_options = {"timeout": FINAL_FETCH_TIMEOUT} if is_last else {}
        records = select_believable(fetch_metrics(dht, self.prefix, **fetch_options), last_epoch)
        self.peers.update(records)
        current = aggregate_metrics(records, last_epoch)
        self.older_reads = self.older_reads + 1 if current and self.last and current.epoch < last_epoch else 0
        is_new = current is not None and (
            self.last is None or current.epoch > last_epoch or self.older_reads >= READS_BEFORE_GOING_BACK
        )
        if is_new:
            self.last, self.older_reads = current, 0
            logger.info(
                f"Epoch #{current.epoch}  loss = {current.loss:.5f}  peers {current.alive_peers}  samples "
                f"{current.samples}  {current.samples_per_second:.1f} samples/s  averaged with {current.averaged_with}"
            )
            # epochs at or beyond this one are of an earlier run with the same name
            self.history = [entry for entry in self.history if entry["epoch"] < current.epoch]
            self.history.append({"experiment_prefix": self.prefix, "time": time.time(), **asdict(current)})
            self.metrics_file.write(json.dumps(self.history[-1]) + "\n")
            self.metrics_file.flush()
            self.dashboard = report_to_dashboard(self.dashboard, current)
        if self.history and self.last and (is_last or time.monotonic() >= self.next_drawing):
            draw_learning_curve(self.history, self.prefix, self.output_dir / "learning_curve.png")
            self.next_drawing = time.monotonic() + CURVE_PERIOD
        return current if is_new else None

    def read_progress(self) -> dict:
        """For the status page, which asks from a thread of its own."""
        last = self.last
        return {"epoch": last and last.epoch, "loss": last and last.loss, "peers": last.alive_peers if last else 0}

    def finish(self) -> None:
        """Write the summary and end the dashboard."""
        write_summary(self.output_dir / "summary.json", self.prefix, self.last, self.peers)
        logger.info(f"Learning curve, metrics.jsonl and summary.json are in {self.output_dir}")
        finish_dashboard(self.dashboard)


def start_dashboard(args: ReportArguments, prefix: str, config: dict):
    """The module (trackio or wandb, which share init, log and finish) with a run begun, or None: no dashboard."""
    run_name = f"{prefix}-{time.strftime('%m%d-%H%M%S')}"
    if args.report_to == "trackio":
        try:
            import trackio

            # to a local SQLite file: no server, no account; it greets with colour codes and two commands of its own
            with contextlib.redirect_stdout(io.StringIO()):
                trackio.init(prefix, name=run_name, config=config, embed=False, auto_log_cpu=False, auto_log_gpu=False)
        except (ImportError, *DASHBOARD_ERRORS) as e:
            logger.warning(f"No dashboard: trackio failed ({e}). metrics.jsonl and the curve are written all the same")
            return None
        # beside the interpreter when .venv is not activated
        command = "trackio" if shutil.which("trackio") else Path(sys.executable).with_name("trackio")
        folder = f"TRACKIO_DIR={shlex.quote(os.environ['TRACKIO_DIR'])} " if os.environ.get("TRACKIO_DIR") else ""
        logger.info(f"Dashboard: {folder}{command} show --project {shlex.quote(prefix)}")
        return trackio
    if args.report_to == "wandb":
        if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):  # wandb itself dropped this variable
            logger.info("No dashboard: WANDB_DISABLED is set")
            return None
        try:
            import wandb
        except ImportError:
            stop_for_user("--wandb_project needs wandb: pip install wandb, or --report_to trackio")
        try:
            # without a network, wandb tries for 90 s
            settings = wandb.Settings(init_timeout=20)
            run = wandb.init(project=args.wandb_project, name=run_name, config=config, settings=settings)
        except (wandb.Error, OSError) as e:
            reason = str(e).splitlines()[0]
            logger.warning(f"No dashboard: wandb failed ({reason}). WANDB_MODE=offline records for a later upload")
            wandb.teardown()
            return None
        logger.info(f"Dashboard: {run.url or f'wandb sync {Path(run.dir).parent}'}")
        return wandb
    return None


def report_to_dashboard(dashboard, metrics: SwarmMetrics):
    """Log one epoch; returns the dashboard, or None once it has failed."""
    if dashboard is not None:
        try:
            values = asdict(metrics)
            dashboard.log(values, step=values.pop("epoch"))
        except DASHBOARD_ERRORS as e:
            logger.warning(f"The dashboard failed ({e}) and gets no more. metrics.jsonl goes on")
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
        except DASHBOARD_ERRORS as e:
            logger.warning(f"The dashboard may lack the last epochs ({e}). metrics.jsonl has them")


def load_history(path: Path, prefix: str) -> list[dict]:
    """The epochs of this run that an earlier monitor wrote, so that a restart continues the curve."""
    history = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last line, if that monitor was killed
                history.append(json.loads(line))
    return [entry for entry in history if entry.get("experiment_prefix") == prefix]


def draw_learning_curve(history: list[dict], prefix: str, path: Path) -> None:
    """Loss, and below it samples per second, over epochs; written whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    epochs = [entry["epoch"] for entry in history]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=[3, 1], layout="constrained"
    )
    dot = "." if len(epochs) < 50 else None
    upper.plot(epochs, [entry["loss"] for entry in history], color="#1f5fa8", linewidth=1.8, marker=dot)
    upper.set_ylabel("training loss (nats): masked words + order")
    peers = history[-1]["alive_peers"]
    upper.set_title(f"{prefix}: loss {history[-1]['loss']:.3f} at epoch {epochs[-1]}, {peers} peer{'s'[: peers != 1]}")
    lower.plot(epochs, [entry["samples_per_second"] for entry in history], color="#c2571a", linewidth=1.2, marker=dot)
    lower.set_ylabel("samples/s")
    lower.set_ylim(0, 1.15 * max(entry["samples_per_second"] for entry in history) or 1)
    lower.set_xlabel("epoch (optimizer step of the swarm)")
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    for axes in (upper, lower):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=130, format="png")
    unfinished.rename(path)
    pyplot.close(figure)
    # a figure's parts refer to each other: 2 to 4 MB a drawing pile up until Python happens to look for such circles
    gc.collect()


def write_summary(path: Path, prefix: str, last: SwarmMetrics | None, peers: dict[str, LocalMetrics]) -> None:
    """Write summary.json and log each peer's contribution."""
    contributions = {
        label: {
            "total_samples": metrics.total_samples,
            "last_epoch": metrics.epoch,
            "skipped_steps": metrics.skipped_steps,
        }
        for label, metrics in sorted(peers.items(), key=lambda item: -item[1].total_samples)
    }
    summary = {
        "experiment_prefix": prefix,
        "epochs": last.epoch if last else 0,
        "last_loss": last.loss if last else None,
        "peers": contributions,
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    all_samples = sum(metrics.total_samples for metrics in peers.values())
    for label, contribution in contributions.items():
        share = contribution["total_samples"] / max(1, all_samples)
        logger.info(f"Peer {label} gave {contribution['total_samples']:,} samples ({share:.1%})")
