#!/usr/bin/env python
"""An auxiliary peer: a server without a GPU that supports the trainers. A run may have several, and any may fail.

    python run_aux_peer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX --host_maddrs /ip4/0.0.0.0/tcp/12345 \\
        --identity_path aux.id --assist_in_averaging

On one machine, to try it out with the model of a tiny run (see run_trainer.py):

    python run_aux_peer.py --experiment_prefix tiny --host_maddrs /ip4/127.0.0.1/tcp/0 --refresh_period 2 \\
        --config_path configs/demo.json --optim adamw --assist_in_averaging

Without other flags it connects new peers to the DHT, relays for peers behind firewalls, and reports the learning curve
like the monitor. With --assist_in_averaging it also averages for other peers, without gradients of its own. If all
trainers are in client mode, they need one such peer, and can join late through it. With --store_checkpoints it saves
the swarm's states, and uploads them with --repo_url. These two flags need the trainers' model, optimizer and averaging
flags, which it loads from --initial_peers by default.
"""

import logging

from arguments import AUX_PEER_ARGS as GROUPS
from arguments import parse_arguments
from common.console import edge, setup_logging

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(*GROUPS, description=__doc__)

from common.console import clean_end, handle_stop_signals
from monitoring.report import RunReport, check_flags, require_reachable
from swarm.joining import Swarm
from training.page_client import warn_of_local_addresses
from training.settings import begin, make_swarm_config

logger = logging.getLogger("aux")


def main(*groups) -> None:
    """Run the auxiliary peer with instances of GROUPS."""
    setup_logging("aux", groups[1].logging_dir)
    membership, groups = begin(groups)
    swarm_args, args, archive_args, *_ = groups
    check_flags("an auxiliary peer", swarm_args, archive_args)

    # join the swarm: from here on, this peer connects new peers and relays
    report = RunReport(args, swarm_args, groups)
    swarm = Swarm.join(make_swarm_config(swarm_args), membership)
    report.attest(swarm)
    require_reachable(swarm)
    warn_of_local_addresses(swarm)

    # the model
    optimizer = None
    if args.assist_in_averaging or archive_args.store_checkpoints:
        from monitoring.archive import make_auxiliary  # slow imports that a plain relay does not need

        optimizer, report.archive, report.own_contract = make_auxiliary(swarm, groups, args.assist_in_averaging)

    # threads, which must not start before all helper processes are forked
    stop = handle_stop_signals(unsaved="the last look at the run, and a checkpoint that is not written")
    report.start()
    logger.info(f"others may join through --initial_peers {' '.join(swarm.list_maddrs())}")

    # the loop
    while not stop.is_set():
        metrics = report.take_news()
        report.step_archive(metrics)
        if args.assist_in_averaging:
            optimizer.step()
            if metrics:
                sent, received = (count / 1e6 for count in swarm.dht.uplink.traffic)
                rounds = f"{optimizer.stats.succeeded} rounds, {optimizer.stats.failed} failed"
                logger.info(f"helped in {rounds}; sent {sent:,.1f} MB, received {received:,.1f} MB")
        stop.wait(optimizer.seconds_to_next_step(args.assist_refresh) if args.assist_in_averaging else 1.0)

    report.finish()
    swarm.leave(optimizer)


if __name__ == "__main__":
    with clean_end():
        main(*groups)
