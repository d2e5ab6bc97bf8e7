"""The monitor: first peer of a run. Welcomes others onto the DHT, follows the learning curve, can save checkpoints.

Start it on a machine that others can reach, and give its --initial_peers line to whoever joins:

    python run_training_monitor.py --experiment_prefix my_albert --host_maddrs /ip4/0.0.0.0/tcp/31337 \
        --identity_path monitor.id

On one machine, to try it out:

    python run_training_monitor.py --experiment_prefix tiny --host_maddrs /ip4/127.0.0.1/tcp/0 --refresh_period 2

It reads what the trainers publish, signed, after each epoch, and writes to --output_dir: metrics.jsonl (one line an
epoch), learning_curve.png, and at the end (Ctrl-C) summary.json. With --store_checkpoints it also downloads the swarm's
state every few epochs and saves the model; give it then the trainers' model, optimizer and averaging flags.
"""

import contextlib
import io
import ipaddress
import json
import logging
import shlex
import sqlite3
import time
from dataclasses import asdict
from pathlib import Path

import hivemind

from arguments import (
    MonitorArguments,
    stop_for_user,
)
from utils import SwarmMetrics

logger = logging.getLogger(__name__)

CURVE_PERIOD = 30.0  # seconds between two drawings: one takes up to a second of a core that may be training
FINAL_FETCH_TIMEOUT = 5.0
# A read of the DHT may miss a record that is there; so many reads that miss all newer ones mean that a run began anew.
READS_BEFORE_GOING_BACK = 3


def print_how_to_join(dht: hivemind.DHT, prefix: str) -> None:
    """Print, for copy and paste, the addresses of this peer and a trainer's command that uses them.

    Loopback addresses are of use on this machine alone: they are printed only when there are no others.
    """
    maddrs = sorted(str(maddr) for maddr in dht.get_visible_maddrs())
    maddrs = [maddr for maddr in maddrs if not is_loopback(maddr)] or maddrs
    peers = f"--initial_peers {' '.join(maddrs)}"
    print(
        f"\nTo join this run, give other peers this:\n{peers}\n\nFor example:\n"
        f"python run_trainer.py --experiment_prefix {shlex.quote(prefix)} {peers}\n",
        flush=True,
    )


def is_loopback(maddr: str) -> bool:
    """Whether a multiaddr such as /ip4/127.0.0.1/tcp/31337/p2p/XXXX leads back to the machine it is used on."""
    _, protocol, host, *_ = maddr.split("/")
    return protocol in ("ip4", "ip6") and ipaddress.ip_address(host).is_loopback


def start_dashboard(args: MonitorArguments, prefix: str, config: dict):
    """The module (trackio or wandb, which share init, log and finish) with a run begun, or None: no dashboard."""
    run_name = f"{prefix}-{time.strftime('%m%d-%H%M%S')}"
    if args.report_to == "trackio":
        try:
            import trackio

            # to a local SQLite file: no server, no account; it greets with colour codes and two commands of its own
            with contextlib.redirect_stdout(io.StringIO()):
                trackio.init(prefix, name=run_name, config=config, embed=False, auto_log_cpu=False, auto_log_gpu=False)
        except (ImportError, OSError, ValueError, sqlite3.Error) as e:
            logger.warning(f"No dashboard: trackio failed ({e}). metrics.jsonl and the curve are written all the same")
            return None
        logger.info(f"Dashboard: trackio show --project {shlex.quote(prefix)}")
        return trackio
    if args.report_to == "wandb":
        try:
            import wandb

            run = wandb.init(project=args.wandb_project, name=run_name, config=config)
        except ImportError:
            stop_for_user("--wandb_project needs wandb: pip install wandb, or --report_to trackio")
        except (wandb.Error, OSError) as e:
            logger.warning(f"No dashboard: wandb failed ({e}). metrics.jsonl and the curve are written all the same")
            return None
        logger.info(f"Dashboard: {run.url or 'wandb sync ' + str(run.dir)}")
        return wandb
    return None


def report_to_dashboard(dashboard, metrics: SwarmMetrics):
    """Log one epoch; returns the dashboard, or None once it has failed."""
    if dashboard is not None:
        try:
            dashboard.log(asdict(metrics), step=metrics.epoch)
        except (OSError, RuntimeError, ValueError, sqlite3.Error) as e:
            logger.warning(f"The dashboard failed ({e}) and gets no more. metrics.jsonl goes on")
            return None
    return dashboard


def finish_dashboard(dashboard) -> None:
    """Write what is pending and end the dashboard's threads and helper processes."""
    if dashboard is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            dashboard.finish()
        if hasattr(dashboard, "teardown"):  # wandb's service process
            dashboard.teardown()


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
    upper.set_ylabel("loss (nats, mean over the swarm)")
    peers = history[-1]["alive_peers"]
    upper.set_title(f"{prefix}: loss {history[-1]['loss']:.3f} at epoch {epochs[-1]}, {peers} peer{'s'[: peers != 1]}")
    lower.plot(epochs, [entry["samples_per_second"] for entry in history], color="#c2571a", linewidth=1.2, marker=dot)
    lower.set_ylabel("samples/s")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("epoch (optimizer step of the swarm)")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, lower):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, dpi=130, format="png")
    unfinished.rename(path)
    pyplot.close(figure)
