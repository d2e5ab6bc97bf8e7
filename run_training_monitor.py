#!/usr/bin/env python
"""The monitor: the first peer of a run. It connects new peers to the DHT, reports the learning curve and can save
checkpoints.

Start it on a machine that others can reach, and send its --initial_peers line to new peers:

    python run_training_monitor.py --experiment_prefix my_albert --host_maddrs /ip4/0.0.0.0/tcp/31337 \\
        --identity_path monitor.id --status_port 8080

On one machine, to try it out:

    python run_training_monitor.py --experiment_prefix tiny --host_maddrs /ip4/127.0.0.1/tcp/0 --refresh_period 2

It reads the signed metrics that trainers publish after each epoch. It writes to --output_dir: metrics.jsonl (one line
per epoch, another for a later evaluation), learning_curve.png, and at the end (Ctrl-C) summary.json. With --status_port
it shows the run in any browser. With --store_checkpoints it also downloads and saves the swarm's state every few
epochs. It then needs the trainers' model, optimizer and averaging flags, and sends those that it has to new peers,
which need not set them.
"""

import logging

from arguments import MONITOR_ARGS as GROUPS
from arguments import parse_arguments
from common.console import edge, setup_logging

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(*GROUPS, description=__doc__)

from common.console import clean_end, handle_stop_signals, print_line
from monitoring.report import RunReport, check_flags, require_reachable
from swarm.joining import Swarm
from training.page_client import format_join, warn_of_local_addresses
from training.settings import begin, make_swarm_config

logger = logging.getLogger("monitor")


def main(*groups) -> None:
    """Run the monitor with instances of GROUPS."""
    setup_logging("monitor", groups[1].logging_dir)
    membership, groups = begin(groups)
    swarm_args, args, archive_args, *_ = groups
    check_flags("a monitor", swarm_args, archive_args)

    # start the DHT: from here on, this peer welcomes new peers
    report = RunReport(args, swarm_args, groups)
    swarm = Swarm.join(make_swarm_config(swarm_args), membership)
    report.attest(swarm)
    if archive_args.store_checkpoints:
        require_reachable(swarm)
    warn_of_local_addresses(swarm)
    flags = report.flags
    print_how_to_join(swarm, flags)

    # the model, whose states to archive
    optimizer = None
    if archive_args.store_checkpoints:
        from monitoring.archive import make_auxiliary  # slow imports that a monitor alone does not need

        optimizer, report.archive, report.own_contract = make_auxiliary(swarm, groups)

    # threads, which must not start before all helper processes are forked
    stop = handle_stop_signals(unsaved="the last look at the run, and a checkpoint that is not written")
    report.start()

    # the loop; the reader's thread writes metrics.jsonl, and draws the curve
    logger.info(f"Waiting for trainers, checking every {args.refresh_period:g} s")
    while not stop.wait(min(1.0, args.refresh_period)):
        report.step_archive(report.take_news())
        if report.flags != flags:  # the first trainers have joined
            flags = report.flags
            print_how_to_join(swarm, flags)

    report.finish()
    swarm.leave(optimizer)


def print_how_to_join(swarm: Swarm, flags: str) -> None:
    """Print the addresses of this peer and a trainer's command with shared flags, unless it accepts no connections."""
    if swarm.dht.client_mode:
        return
    maddrs = swarm.list_maddrs()
    peers = " ".join(maddrs)
    command = format_join(swarm, maddrs, flags)
    print_line(f"\nTo join this run, give other peers this:\n--initial_peers {peers}\n\nFor example:\n{command}\n")


if __name__ == "__main__":
    with clean_end():
        main(*groups)
