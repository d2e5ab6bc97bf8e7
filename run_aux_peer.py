"""An auxiliary peer: a server without a GPU that supports the trainers. Several may run at once, and any may fail.

    python run_aux_peer.py --experiment_prefix my_albert --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX \
        --host_maddrs /ip4/0.0.0.0/tcp/12345 --identity_path aux.id --assist_in_averaging

On one machine, to try it out with the model of a tiny run (see run_trainer.py):

    python run_aux_peer.py --experiment_prefix tiny --host_maddrs /ip4/127.0.0.1/tcp/0 --refresh_period 2 \
        --config_path configs/demo.json --optim adamw --assist_in_averaging

Without other flags it welcomes others onto the DHT, relays for peers behind firewalls, and follows the learning curve
as the monitor does. --assist_in_averaging: it also averages for the others, without gradients of its own; trainers in
client mode need one peer that does, and can join late through it. --store_checkpoints: it keeps the swarm's
states, and uploads them with --repo_url. These two need the trainers' model, optimizer and averaging flags.
"""

import concurrent.futures
import logging
import time
from dataclasses import asdict

from arguments import (
    ArchiveArguments,
    AuxPeerArguments,
    AveragingArguments,
    ModelArguments,
    OptimizerArguments,
    SwarmArguments,
    parse_arguments,
)
from support.console import UserError, edge, log_to_folder, setup_logging

GROUPS = (
    SwarmArguments,
    AuxPeerArguments,
    ArchiveArguments,
    ModelArguments,
    OptimizerArguments,
    AveragingArguments,
)

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(*GROUPS, description=__doc__)

from experiment.model import find_objective
from swarm.addresses import select_for_others, stop_unreachable
from swarm.contract import compare_with_run
from swarm.joining import make_dht, warn_of_local_addresses
from swarm.line import LINE
from swarm.processes import clean_end, handle_stop_signals, shut_down
from swarm.reachability import measure_bandwidth
from swarm.status import StatusServer
from text.tokenizers import load_tokenizer
from viewing.archive import CheckpointHandler, make_observer
from viewing.report import RunReport

logger = logging.getLogger("aux")

LAST_LOOK_TIMEOUT = 8.0  # seconds that the end waits for the last look at the metrics


def main(*groups) -> None:
    """:param groups: instances of GROUPS"""
    swarm, args, archive_args, model_args, optimizer_args, averaging_args = groups
    setup_logging("aux")
    if swarm.client_mode:
        raise UserError("--client_mode is for trainers: others must be able to reach an auxiliary peer")
    if args.logging_dir:
        log_to_folder("aux peer", args.logging_dir)
    report = RunReport(args, swarm.experiment_prefix)
    needs_model = args.assist_in_averaging or archive_args.store_checkpoints
    tokenizer = load_tokenizer(model_args.tokenizer_path, find_objective(model_args).kind) if needs_model else None
    page = StatusServer(swarm.status_port, swarm.experiment_prefix) if swarm.status_port is not None else None
    dht, _ = make_dht(swarm)
    if dht.client_mode:
        shut_down(dht)
        stop_unreachable()
    warn_of_local_addresses(dht, swarm)
    optimizer = archive = None
    if needs_model:
        if args.assist_in_averaging:
            averaging_args = measure_bandwidth(dht, averaging_args)
        model, optimizer, contract = make_observer(dht, swarm, model_args, optimizer_args, averaging_args, tokenizer)
    if args.assist_in_averaging:
        optimizer.state_averager.offer_states()
    if archive_args.store_checkpoints:
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
    logger.info(f"others may join through --initial_peers {' '.join(select_for_others(dht.get_visible_maddrs()))}")
    if page:
        page.serve(dht, report.read_progress)

    # looks at the metrics wait for the DHT: beside the loop, which must be there when an epoch ends
    watching = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="watch metrics")
    look, next_look, comparison = None, 0.0, None
    while not stop.is_set():
        if look is None and time.monotonic() >= next_look:
            look, next_look = watching.submit(report.update, dht), time.monotonic() + args.refresh_period
        metrics = None
        if look is not None and look.done():
            metrics, look = look.result(), None
            if metrics and optimizer and comparison is None:
                # once more: the first trainers may have come after this peer
                comparison = watching.submit(compare_with_run, dht, swarm.experiment_prefix, contract)
            if metrics and optimizer and args.assist_in_averaging:
                sent, received = (count / 1e6 for count in LINE.traffic)
                logger.info(
                    f"helped in {optimizer.rounds} rounds, {optimizer.failed_rounds} failed; sent {sent:,.1f} MB, "
                    f"received {received:,.1f} MB"
                )
        if comparison is not None and comparison.done():
            comparison.result()
        if archive:
            archive.step(metrics, report.history)
        if args.assist_in_averaging:
            optimizer.step()
        stop.wait(optimizer.seconds_to_next_step(args.assist_refresh) if args.assist_in_averaging else 1.0)
    # after a look in progress; not at all if that waits, for up to half a minute, for a DHT that does not answer
    last_look = watching.submit(report.update, dht, is_last=True)
    if archive:
        archive.finish()
    if concurrent.futures.wait([last_look], LAST_LOOK_TIMEOUT).done:
        last_look.result()
    watching.shutdown(wait=False, cancel_futures=True)
    report.finish()
    shut_down(dht, optimizer)


if __name__ == "__main__":
    with clean_end():
        main(*groups)
