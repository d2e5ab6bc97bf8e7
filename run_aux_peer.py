#!/usr/bin/env python
"""An auxiliary peer: a server without a GPU that supports the trainers. A run may have several, and any may fail.

    python run_aux_peer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX --host_maddrs /ip4/0.0.0.0/tcp/12345 \\
        --identity_path aux.id --assist_in_averaging

On one machine, to try it out with the model of a tiny run (see run_trainer.py):

    python run_aux_peer.py --experiment_prefix tiny --host_maddrs /ip4/127.0.0.1/tcp/0 --refresh_period 2 \\
        --config_path configs/demo.json --optim adamw --assist_in_averaging

Without other flags it connects new peers to the DHT, relays for peers behind firewalls, and reports the learning curve
like the monitor. With --assist_in_averaging it also averages for other peers, without gradients of its own. Trainers in
client mode need one such peer, and can join late through it. With --store_checkpoints it saves the swarm's states, and
uploads them with --repo_url. These two flags need the trainers' model, optimizer and averaging flags, which it loads
from --initial_peers by default.
"""

import logging

from arguments import AUX_PEER_ARGS as GROUPS
from arguments import parse_arguments
from common.console import edge, log_to_folder, setup_logging

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(*GROUPS, description=__doc__)

from monitoring.observer import Observer
from swarm.processes import clean_end
from training.settings import begin

logger = logging.getLogger("aux")


def main(*groups) -> None:
    """Run the auxiliary peer with instances of GROUPS."""
    _, args, *_ = groups
    setup_logging("aux")
    if args.logging_dir:
        log_to_folder("aux peer", args.logging_dir)
    membership, groups = begin(groups)
    observer = Observer(membership, *groups)
    stop = observer.begin()
    logger.info(f"others may join through --initial_peers {' '.join(observer.swarm.list_maddrs())}")
    optimizer = observer.optimizer
    while not stop.is_set():
        metrics = observer.step()
        if args.assist_in_averaging:
            optimizer.step()
            if metrics:
                sent, received = (count / 1e6 for count in observer.dht.uplink.traffic)
                stats = optimizer.stats
                logger.info(
                    f"helped in {stats.succeeded} rounds, {stats.failed} failed; sent {sent:,.1f} MB, "
                    f"received {received:,.1f} MB"
                )
        stop.wait(optimizer.seconds_to_next_step(args.assist_refresh) if args.assist_in_averaging else 1.0)
    observer.finish()


if __name__ == "__main__":
    with clean_end():
        main(*groups)
