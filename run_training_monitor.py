"""The monitor: first peer of a run. Welcomes others onto the DHT, follows the learning curve, can save checkpoints.

Start it on a machine that others can reach, and give its --initial_peers line to whoever joins:

    python run_training_monitor.py --experiment_prefix my_albert --host_maddrs /ip4/0.0.0.0/tcp/31337 \
        --identity_path monitor.id

On one machine, to try it out:

    python run_training_monitor.py --experiment_prefix tiny --host_maddrs /ip4/127.0.0.1/tcp/0 --refresh_period 2

It reads what the trainers publish, signed, after each epoch, and writes to --output_dir: metrics.jsonl (one line per
epoch, and another if a trainer's evaluation comes later), learning_curve.png, and at the end (Ctrl-C) summary.json.
With --store_checkpoints it also downloads the swarm's state every few epochs and saves it; it then needs the trainers'
model, optimizer and averaging flags.

To watch a swarm from any terminal, as a reader that leaves no trace; and to plot what a monitor has written:

    python run_training_monitor.py --experiment_prefix my_albert --watch --initial_peers /ip4/203.0.113.1/tcp/31337/...
    python run_training_monitor.py --experiment_prefix my_albert --plot loss.png
"""

import logging
import shlex
from dataclasses import asdict
from pathlib import Path

from arguments import (
    ArchiveArguments,
    AveragingArguments,
    ModelArguments,
    MonitorArguments,
    OptimizerArguments,
    SwarmArguments,
    parse_arguments,
)
from support.console import UserError, edge, setup_logging

GROUPS = (
    SwarmArguments,
    MonitorArguments,
    ArchiveArguments,
    ModelArguments,
    OptimizerArguments,
    AveragingArguments,
)

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(*GROUPS, description=__doc__.splitlines()[0])

import hivemind

from swarm.addresses import select_for_others, stop_unreachable
from swarm.contract import compare_with_run
from swarm.joining import make_dht, warn_of_local_addresses
from swarm.processes import clean_end, handle_stop_signals, shut_down
from swarm.status import StatusServer
from viewing.curves import plot_run
from viewing.history import load_history
from viewing.report import RunReport
from viewing.watch import watch_swarm

logger = logging.getLogger("monitor")


def print_how_to_join(dht: hivemind.DHT, prefix: str) -> None:
    """Print, for copy and paste, the addresses of this peer and a trainer's command that uses them."""
    peers = f"--initial_peers {' '.join(select_for_others(dht.get_visible_maddrs()))}"
    print(
        f"\nTo join this run, give other peers this:\n{peers}\n\nFor example:\n"
        f"python run_trainer.py --experiment_prefix {shlex.quote(prefix)} {peers}\n",
        flush=True,
    )


def plot(file: str, output_dir: str, prefix: str) -> None:
    """Draw the curves of the run that --output_dir has the metrics of."""
    path = Path(output_dir) / "metrics.jsonl"
    try:
        history = load_history(path, prefix)
    except OSError as e:
        raise UserError(f"--output_dir {output_dir}: {path} cannot be read ({e.strerror})") from e
    if not history:
        raise UserError(
            f"--plot: {path} has no epoch of run {prefix!r}: give the --output_dir and --experiment_prefix of a monitor"
        )
    if not Path(file).absolute().parent.is_dir() or Path(file).is_dir() or not plot_run(history, prefix, Path(file)):
        raise UserError(f"--plot {file} cannot be written: name a file in a folder that exists")
    print(f"{len(history):,} points of {history.added:,} epochs in {file}")


def main(*groups) -> None:
    """:param groups: instances of GROUPS"""
    swarm, args, archive_args, model_args, optimizer_args, averaging_args = groups
    setup_logging("monitor", args.logging_dir)
    if swarm.client_mode:
        raise UserError("--client_mode is for trainers: others must be able to reach a monitor")
    if args.plot:
        plot(args.plot, args.output_dir, swarm.experiment_prefix)
        return
    if args.watch:
        watch_swarm(swarm, args.refresh_period)
        return
    report = RunReport(args, swarm.experiment_prefix)
    page = StatusServer(swarm.status_port, swarm.experiment_prefix) if swarm.status_port is not None else None
    dht, _ = make_dht(swarm)
    # a client may look on; who takes the swarm's state is an auxiliary peer, and hivemind has none in client mode
    if dht.client_mode and archive_args.store_checkpoints:
        shut_down(dht)
        stop_unreachable()
    if not dht.client_mode:
        print_how_to_join(dht, swarm.experiment_prefix)
    warn_of_local_addresses(dht, swarm)
    archive = optimizer = None
    if archive_args.store_checkpoints:
        # a monitor that saves nothing needs neither the model's code nor the time to load it
        from experiment.model import find_objective
        from text.tokenizers import load_tokenizer
        from viewing.archive import CheckpointHandler, make_observer

        tokenizer = load_tokenizer(model_args.tokenizer_path, find_objective(model_args).kind)
        model, optimizer, contract = make_observer(dht, swarm, model_args, optimizer_args, averaging_args, tokenizer)
        archive = CheckpointHandler(
            archive_args,
            swarm,
            args.output_dir,
            model=model,
            tokenizer=tokenizer,
            optimizer=optimizer,
            arguments={name: value for group in groups for name, value in asdict(group).items()},
        )
    report.start_dashboard({**asdict(swarm), **asdict(args)})
    stop = handle_stop_signals()
    logger.info(f"Waiting for trainers, checking every {args.refresh_period:g} s")
    if page:
        page.serve(dht, report.read_progress)
    is_compared = False
    while True:
        is_last = stop.wait(args.refresh_period)
        metrics = report.update(dht, is_last)
        if archive:
            if metrics and not is_compared:
                is_compared = True
                compare_with_run(dht, swarm.experiment_prefix, contract)
            archive.step(metrics, report.history)
        if is_last:
            break
    if archive:
        archive.finish()
    report.finish()
    shut_down(dht, optimizer)


if __name__ == "__main__":
    with clean_end():
        main(*groups)
