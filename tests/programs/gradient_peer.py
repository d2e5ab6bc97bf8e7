"""A peer whose gradient is known: SGD on one vector, so that parameters tell which gradients entered the average.

The gradient of every step is `--gradient` in all components; after each epoch it prints a JSON line with its parameters
and counters.
"""

import argparse
import asyncio
import concurrent.futures
import errno
import gc
import hashlib
import itertools
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from hivemind.averaging.matchmaking import Matchmaking, PotentialLeaders
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture

from arguments import AveragingArguments
from common.console import clean_end, handle_stop_signals, setup_logging
from models.state_codecs import COMPRESSIONS
from swarm import log_steps
from swarm.allreduce import FailFastAllReduceRunner
from swarm.config import AveragingConfig, make_config
from swarm.epoch import Epoch
from swarm.exchange import BlobStore
from swarm.gradients import GradientAverager
from swarm.log_rounds import LogRounds
from swarm.matchmaking import EarlyStartMatchmaking
from swarm.optimizer import AveragingHelper, CollaborativeOptimizer
from swarm.progress import PeerTracker
from swarm.sparse import TopKCompression
from tests.programs.peers import join, list_maddrs, print_facts, shut_down

TIMES = dict(matchmaking_time=2.0, next_chunk_timeout=4.0, averaging_timeout=10.0)


def make_gradient_optimizer(dht, prefix: str, parameter, folder: Path, auxiliary=False, density=1.0, **settings):
    """SGD with learning rate 1, whose parameters only gradients move: states are never averaged, unless asked for."""
    fixed = dict(batch_size_lead=0, min_vector_size=0, average_state_every=10**6, metadata_expiration=60.0)
    fixed |= dict(min_refresh_period=0.5, default_refresh_period=0.5)
    codecs = dict.fromkeys(("gradients", "state_averaging", "load_state"), COMPRESSIONS["none"])
    return (AveragingHelper if auxiliary else CollaborativeOptimizer)(
        dht,
        prefix,
        make_config(AveragingConfig, AveragingArguments(), **fixed | settings),
        params=[{"params": [parameter]}],
        optimizer=partial(torch.optim.SGD, lr=1.0),
        scheduler=partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0),
        folder=folder,
        local_steps=TopKCompression(density),
        **codecs,
    )


def collect_and_run(averager: GradientAverager, run=GradientAverager.run) -> None:
    """In the averager's process, which collects its garbage all the time: a step that waits is none."""

    def collect() -> None:
        gc.freeze()
        while True:
            gc.collect()
            time.sleep(0.01)

    threading.Thread(target=collect, daemon=True).start()
    run(averager)


def ask_in_vain(matchmaking: EarlyStartMatchmaking, leader: PeerID, ask=Matchmaking._request_join_group):
    """As where each leader is busy when it is asked first, and refuses."""

    async def refuse():
        return None

    leaders = matchmaking.potential_leaders
    is_first = leaders.past_attempts - leaders.asked_before
    leaders.asked_before |= leaders.past_attempts
    return refuse() if is_first else ask(matchmaking, leader)


def die_for_all_but(peer_id: str, rounds: int, serve=FailFastAllReduceRunner.rpc_aggregate_part) -> None:
    """After so many rounds, give averages to this peer alone, and die: for it this round has succeeded."""
    groups = set()

    async def serve_one(runner, stream, context):
        groups.add(runner.group_id)
        messages = serve(runner, stream, context)
        if len(groups) <= rounds or str(context.remote_id) == peer_id:
            async for message in messages:
                yield message
        else:
            _ = [message async for message in messages]  # what it sends enters the average
            await asyncio.sleep(3600)
        if len(groups) > rounds:
            await asyncio.sleep(0.5)
            os.killpg(0, signal.SIGKILL)

    FailFastAllReduceRunner.rpc_aggregate_part = serve_one


def fail_to_store(count: int, kind: type, name: str) -> None:
    """Let the first calls of a method fail, as if the disk were full."""
    attempts, store = itertools.count(), getattr(kind, name)

    def store_later(*arguments):
        if next(attempts) < count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return store(*arguments)

    setattr(kind, name, store_later)


def delay_anchor(fetch=LogRounds.fetch_anchor) -> None:
    """Get no first state of a log at the first attempt, as over a connection that is too slow."""
    attempts = itertools.count()

    def fetch_later(*anchor) -> concurrent.futures.Future:
        return fetch(*anchor) if next(attempts) else concurrent.futures.Future()

    log_steps.MIN_GENESIS_TIMEOUT, LogRounds.fetch_anchor = 1.0, fetch_later


def cancel_slowly(optimizer: CollaborativeOptimizer, set_result=MPFuture.set_result) -> None:
    """As where the processor has other work after each message to a helper."""

    def tell_and_pause(future: MPFuture, result) -> None:
        set_result(future, result)
        time.sleep(0.5)

    MPFuture.set_result = tell_and_pause
    optimizer.rounds.gradient_round.cancel()
    MPFuture.set_result = set_result


def take_states(optimizer: CollaborativeOptimizer, parameter: torch.nn.Parameter, count: int) -> None:
    """Load the swarm's state this number of times, each time with a parameter and a history of its own before."""
    state, own = optimizer.state_averager, next(iter(optimizer.opt.param_groups))["params"][0]
    for _ in range(count):
        state.local_epoch, state.lineage = 0, "own"
        with torch.no_grad():
            own.fill_(-1.0)
        loaded = optimizer.load_state_from_peers()
        values = [own.min().item(), own.max().item(), parameter.mean().item()]
        print_facts(loaded=loaded, epoch=state.local_epoch, own=state.lineage == "own", values=values)


def wait_for_others(optimizer: CollaborativeOptimizer, count: int, stop) -> None:
    """Wait until this number of other peers are there, and not behind this one."""

    def present() -> int:
        return sum(record.epoch >= optimizer.local_epoch for record in optimizer.tracker.present.values())

    while present() < count and not stop.is_set():
        optimizer.tracker.announce()
        time.sleep(0.3)


def main() -> None:
    parser = argparse.ArgumentParser()
    plain = dict(step_seconds=0.3, target_batch_size=128, group_size=2, numbers=100_000, average_state_every=10**6)
    plain |= dict(averaging_timeout=10.0, local_steps=1, local_steps_from=3, nudge_by=1.0, experiment_prefix="")
    for name, default in (plain | dict(gradient=0.0, batch_size=0)).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--initial_peers", nargs="*", default=[])
    parser.add_argument("--client_mode", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--auxiliary", action="store_true", help="no gradient: average for the others")
    parser.add_argument("--begin_at", type=int, help="this epoch, with a state of its own, as from a checkpoint")
    parser.add_argument("--leap_at", type=int, help="at this epoch, once: be an epoch ahead, with a state of its own")
    parser.add_argument("--download_from", type=int, default=0, help="swarm's epoch: before, it takes over no state")
    parser.add_argument("--mbits", type=float, help="of this peer's line, upwards")
    parser.add_argument("--times_follow_the_line", action="store_true", help="instead of being given")
    parser.add_argument("--host", default="127.0.0.1", help="its address")
    parser.add_argument("--robust", dest="is_robust", action="store_true")
    parser.add_argument("--begin", type=float, default=0.0, help="the parameters at epoch 0")
    parser.add_argument("--known", nargs="*", default=[], help="ids of peers that are known to have contributed")
    parser.add_argument("--dies_for_all_but", help="the id of the only peer for which its last round succeeds")
    parser.add_argument("--others", type=int, default=0, help="go on when so many other peers are there")
    parser.add_argument("--others_at", type=int, default=0, help="the epoch at which it waits until they are there too")
    parser.add_argument("--nudge_at", type=int, help="at this epoch, once: change the parameters, as if led astray")
    parser.add_argument("--density", type=float, default=1.0, help="of local steps")
    parser.add_argument("--counts_less", action="store_true", help="than the others: for it, no epoch is ever over")
    parser.add_argument("--matchmaking", type=float, nargs=2, help="seconds for it, before and from epoch 2 on")
    parser.add_argument("--asks_in_vain", action="store_true", help="the first time, whomever it asks to lead")
    parser.add_argument("--skips", type=int, help="this epoch: it makes no step until the others have")
    parser.add_argument("--cancels_at", type=int, help="this epoch: its first search; then it goes on slowly")
    parser.add_argument("--waits", action="store_true", help="for each commit, so that all peers have an offer in it")
    parser.add_argument("--full_disk", type=int, default=0, help="its first offers, which cannot be stored")
    parser.add_argument("--late_anchor", action="store_true", help="a log's first state, at the first attempt")
    parser.add_argument("--full_disk_at_start", type=int, default=0, help="the first blobs, which cannot be stored")
    parser.add_argument("--silence", type=float, default=600.0, help="seconds without a commit that end a log")
    parser.add_argument("--slow_downloads", type=float, default=0.0, help="seconds that each takes at least")
    parser.add_argument("--takes", type=int, default=0, help="only load the swarm's state this number of times")
    args = parser.parse_args()
    setup_logging("peer")
    if args.waits:  # on busy cores as well
        LogRounds._compute_timeout = lambda *_: 60.0
    log_steps.SILENCE_TIMEOUT = args.silence
    if args.dies_for_all_but:
        die_for_all_but(args.dies_for_all_but, rounds=3)
    if args.counts_less:
        PeerTracker.ready_to_update_epoch, GradientAverager.run = False, collect_and_run
        GradientAverager._expected = property(lambda _: None, lambda *_: None)  # its process is told at each step
    if args.late_anchor:
        delay_anchor()
    fail_to_store(args.full_disk, LogRounds, "add_offer")
    fail_to_store(args.full_disk_at_start, BlobStore, "add")
    if args.asks_in_vain:
        PotentialLeaders.asked_before, Matchmaking._request_join_group = set(), ask_in_vain

    dht = join(args.experiment_prefix, args.initial_peers, args.host, client_mode=args.client_mode).dht
    if args.mbits:
        dht.uplink.set_bandwidth(args.mbits, is_fixed=True)
    parameter = torch.nn.Parameter(torch.full([args.numbers], args.begin))
    names = "target_batch_size auxiliary average_state_every local_steps local_steps_from overlap density"
    options = {name: getattr(args, name) for name in names.split()} | dict(outer_lr=1.0, outer_momentum=0.5)
    options |= dict(target_group_size=args.group_size, robust_averaging="clip" if args.is_robust else "none")
    if not args.times_follow_the_line:
        options |= TIMES | dict(averaging_timeout=args.averaging_timeout)
    folder = tempfile.TemporaryDirectory(prefix="log-")
    optimizer = make_gradient_optimizer(dht, args.experiment_prefix, parameter, Path(folder.name), **options)
    if args.auxiliary:
        optimizer.state_averager.relay_states()
    optimizer.tracker.trust.attested = {PeerID.from_base58(peer).to_bytes() for peer in args.known}
    optimizer.sync.backoff.min_epoch = args.download_from
    start_download, pause = optimizer.state_averager.start_download, partial(time.sleep, args.slow_downloads)
    optimizer.state_averager.start_download = lambda *own, **more: pause() or start_download(*own, **more)
    if args.begin_at:
        optimizer.load_training_state(optimizer.training_state() | {"local_epoch": args.begin_at, "lineage": 32 * "ab"})
    stop = handle_stop_signals()
    print_facts(maddrs=list_maddrs(dht))
    if args.takes:
        take_states(optimizer, parameter, args.takes)
        stop.set()
    epoch = steps = 0
    while not stop.is_set():
        if optimizer.local_epoch >= args.others_at:
            wait_for_others(optimizer, args.others, stop)
            args.others = 0  # once
        if args.matchmaking:
            matchmaking_time = args.matchmaking[optimizer.local_epoch >= 2]
            dht.uplink.fix_timeouts(replace(optimizer.averaging, matchmaking_time=matchmaking_time))
        while optimizer.local_epoch == args.skips and optimizer.tracker.view.epoch == args.skips:
            optimizer.tracker.announce()
            time.sleep(0.2)
        time.sleep(args.step_seconds)  # stands for the work of computing a gradient
        if args.auxiliary:
            optimizer.step()
        else:
            parameter.grad = torch.full_like(parameter, args.gradient)
            optimizer.step(batch_size=args.batch_size)
        while args.waits and optimizer.log_steps.rounds.count_pending() and not stop.is_set():
            time.sleep(0.05)
            optimizer.log_steps.follow()
        steps += 1
        control = optimizer.rounds.gradient_round
        if optimizer.local_epoch == args.cancels_at and control.stage.name == "LOOKING_FOR_GROUP":
            args.cancels_at = None
            cancel_slowly(optimizer)
        if args.leap_at and optimizer.local_epoch >= args.leap_at:
            args.leap_at = None
            optimizer.state_averager.set_epoch(optimizer.local_epoch + 1)
            optimizer.state_averager.lineage = "leapt"
            optimizer.tracker.update_epoch(optimizer.local_epoch)
            optimizer.epoch = Epoch(optimizer.local_epoch)
            optimizer.epoch.is_compared = True
            print_facts(leapt=optimizer.local_epoch)
        if args.nudge_at and optimizer.local_epoch >= args.nudge_at:
            args.nudge_at = None
            averager = optimizer.state_averager
            with torch.no_grad(), averager.lock_averaged_tensors:
                next(iter(optimizer.opt.param_groups))["params"][0].add_(args.nudge_by)
            averager._apply_optimizer_parameters_()
            print_facts(nudged=optimizer.local_epoch)
        if optimizer.local_epoch != epoch:
            epoch = optimizer.local_epoch
            stats, anchor = optimizer.stats, next(iter(optimizer.opt.param_groups))["params"][0].detach()
            facts = dict(epoch=epoch, steps=steps, samples=stats.samples, total_samples=stats.total_samples)
            facts |= dict(averaged_with=stats.group_size, rounds=stats.succeeded, failed_rounds=stats.failed)
            facts |= dict(averaging_seconds=stats.averaging_seconds, others=len(optimizer.tracker.present))
            facts |= dict(traffic=list(dht.uplink.traffic), anchor=anchor.mean().item())
            facts["unsent"] = optimizer.grad_averager.unsent[0].mean().item()
            facts["digest"] = hashlib.sha256(anchor.numpy().tobytes()).hexdigest()
            facts["parameter"] = [parameter.min().item(), parameter.mean().item(), parameter.max().item()]
            print_facts(**facts)
    shut_down(dht, optimizer)


if __name__ == "__main__":
    with clean_end():
        main()
