"""The monitor: first peer of a run. Welcomes others onto the DHT, follows the learning curve, can save checkpoints.

Start it on a machine that others can reach, and give its --initial_peers line to whoever joins:

    python run_training_monitor.py --experiment_prefix my_albert --host_maddrs /ip4/0.0.0.0/tcp/31337 \
        --identity_path monitor.id

On one machine, to try it out:

    python run_training_monitor.py --experiment_prefix tiny --host_maddrs /ip4/127.0.0.1/tcp/0 --refresh_period 2

It reads what the trainers publish, signed, after each epoch, and writes to --output_dir: metrics.jsonl (one line an
epoch), learning_curve.png, and at the end (Ctrl-C) summary.json. With --store_checkpoints it also downloads the swarm's
state every few epochs and saves it; give it then the trainers' model, optimizer and averaging flags.
"""

import contextlib
import gc
import io
import json
import logging
import os
import shlex
import shutil
import signal
import sqlite3
import sys
import time
from dataclasses import asdict
from pathlib import Path

# Ctrl-C while the imports below run: the end, without a traceback
signal.signal(signal.SIGINT, signal.SIG_DFL)

import hivemind

from addresses import select_for_others
from arguments import (
    AveragingArguments,
    ModelArguments,
    MonitorArguments,
    OptimizerArguments,
    SwarmArguments,
    parse_arguments,
    stop_for_user,
)
from averaging import clean_end, handle_stop_signals, shut_down
from joining import make_dht, warn_of_local_addresses
from status import StatusServer
from utils import LocalMetrics, SwarmMetrics, aggregate_metrics, fetch_metrics, select_believable, setup_logging

logger = logging.getLogger("monitor")

# What dashboards raise when the disk is full or their helper process is gone. The run matters more than its display.
DASHBOARD_ERRORS = (OSError, RuntimeError, ValueError, sqlite3.Error)
CURVE_PERIOD = 30.0  # seconds between two drawings: one takes up to a second of a core that may be training
FINAL_FETCH_TIMEOUT = 5.0
# A read of the DHT may miss a record that is there; so many reads that miss all newer ones mean that a run began anew.
READS_BEFORE_GOING_BACK = 3


def print_how_to_join(dht: hivemind.DHT, prefix: str) -> None:
    """Print, for copy and paste, the addresses of this peer and a trainer's command that uses them."""
    peers = f"--initial_peers {' '.join(select_for_others(dht.get_visible_maddrs()))}"
    print(
        f"\nTo join this run, give other peers this:\n{peers}\n\nFor example:\n"
        f"python run_trainer.py --experiment_prefix {shlex.quote(prefix)} {peers}\n",
        flush=True,
    )


def start_dashboard(args: MonitorArguments, prefix: str, config: dict):
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


class CheckpointSaver:
    """Keeps a copy of model and optimizer to download the swarm's state into, and saves it every few epochs."""

    def __init__(
        self,
        dht: hivemind.DHT,
        args: MonitorArguments,
        swarm_args: SwarmArguments,
        model_args: ModelArguments,
        optimizer_args: OptimizerArguments,
        averaging_args: AveragingArguments,
    ):
        # a monitor that saves nothing needs neither the model's code nor the time to load it
        from data import load_tokenizer
        from model import make_model
        from optimizer import make_optimizer

        self.args, self.last_epoch = args, 0
        groups = (args, swarm_args, model_args, optimizer_args, averaging_args)
        self.arguments = {name: value for group in groups for name, value in asdict(group).items()}
        self.tokenizer = load_tokenizer(model_args.tokenizer_path)
        self.model = make_model(model_args, len(self.tokenizer))
        # auxiliary: takes no part in training; its state is the trainers' only right after a download (note 28)
        self.optimizer = make_optimizer(
            self.model, dht, swarm_args, optimizer_args, averaging_args, client_mode=dht.client_mode, auxiliary=True
        )

    def save_if_due(self, epoch: int, prefix: str, loss: float) -> None:
        """Download the swarm's state and save it, when enough epochs have passed since the last time."""
        if epoch < self.last_epoch + self.args.save_checkpoint_step_interval:
            return
        from checkpoint import collect_state, save_checkpoint

        if not self.optimizer.load_state_from_peers():
            logger.warning("No peer gave its state, will try to save a checkpoint at the next epoch")
            return
        self.last_epoch = self.optimizer.local_epoch
        # a whole training state: should all trainers die, one can go on from it (--resume_from_checkpoint)
        state = collect_state(self.model, self.optimizer, self.arguments)
        extra = {"experiment_prefix": prefix, "swarm_loss": loss}
        limit = self.args.save_total_limit
        if save_checkpoint(self.model, self.tokenizer, self.args.output_dir, state, extra, limit):
            logger.info(f"Saved {self.args.output_dir}/checkpoint-{state['local_epoch']}")


def main() -> None:
    setup_logging("monitor")
    swarm_args, args, model_args, optimizer_args, averaging_args = parse_arguments(
        SwarmArguments,
        MonitorArguments,
        ModelArguments,
        OptimizerArguments,
        AveragingArguments,
        description=__doc__.splitlines()[0],
    )
    prefix = swarm_args.experiment_prefix
    if swarm_args.client_mode:
        stop_for_user("--client_mode is for trainers: a monitor is there for others to reach it")
    output_dir = Path(args.output_dir)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        history = load_history(output_dir / "metrics.jsonl", prefix)
        metrics_file = open(output_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (open until the end)
    except OSError as e:
        stop_for_user(f"--output_dir {args.output_dir} cannot be written ({e.strerror}): choose another folder")

    page = StatusServer(swarm_args.status_port, prefix) if swarm_args.status_port is not None else None
    dht, _ = make_dht(swarm_args)
    print_how_to_join(dht, prefix)
    warn_of_local_addresses(dht, swarm_args)
    saver = None
    if args.store_checkpoints:
        saver = CheckpointSaver(dht, args, swarm_args, model_args, optimizer_args, averaging_args)
    dashboard = start_dashboard(args, prefix, {**asdict(swarm_args), **asdict(args)})
    stop = handle_stop_signals()
    logger.info(f"Waiting for trainers, looking every {args.refresh_period:g} s")

    last: SwarmMetrics | None = None  # what was reported last
    peers: dict[str, LocalMetrics] = {}  # the newest record of every peer that ever was there
    older_reads, next_drawing = 0, time.monotonic() + CURVE_PERIOD
    if page:
        page.serve(
            dht,
            lambda: {
                "epoch": last and last.epoch,
                "loss": last and last.loss,
                "peers": last.alive_peers if last else 0,
            },
        )
    while True:
        is_last_round = stop.wait(args.refresh_period)
        fetch_options = {"timeout": FINAL_FETCH_TIMEOUT} if is_last_round else {}
        last_epoch = last.epoch if last else None
        records = select_believable(fetch_metrics(dht, prefix, **fetch_options), last_epoch)
        peers.update(records)
        current = aggregate_metrics(records, last_epoch)
        older_reads = older_reads + 1 if current and last and current.epoch < last.epoch else 0
        if current and (last is None or current.epoch > last.epoch or older_reads >= READS_BEFORE_GOING_BACK):
            last, older_reads = current, 0
            logger.info(
                f"Epoch #{last.epoch}  loss = {last.loss:.5f}  peers {last.alive_peers}  samples {last.samples}  "
                f"{last.samples_per_second:.1f} samples/s  averaged with {last.averaged_with}"
            )
            # epochs at or beyond this one are of an earlier run with the same name
            history = [entry for entry in history if entry["epoch"] < last.epoch]
            history.append({"experiment_prefix": prefix, "time": time.time(), **asdict(last)})
            metrics_file.write(json.dumps(history[-1]) + "\n")
            metrics_file.flush()
            dashboard = report_to_dashboard(dashboard, last)
            if saver:
                saver.save_if_due(last.epoch, prefix, last.loss)
        if history and last and (is_last_round or time.monotonic() >= next_drawing):
            draw_learning_curve(history, prefix, output_dir / "learning_curve.png")
            next_drawing = time.monotonic() + CURVE_PERIOD
        if is_last_round:
            break

    write_summary(output_dir / "summary.json", prefix, last, peers)
    logger.info(f"Learning curve, metrics.jsonl and summary.json are in {output_dir}")
    finish_dashboard(dashboard)
    shut_down(dht, saver.optimizer if saver else None)


if __name__ == "__main__":
    with clean_end():
        main()
