"""The preflight: the start of a trainer up to its first step, with its results as a table.

    python run_trainer.py --preflight --initial_peers 203.0.113.1:8080

Each problem has a hint. The exit code is 2 if a problem is fatal, otherwise 0. The preflight joins the run's DHT like
any peer, but publishes and saves nothing. A trainer runs the quick checks at its start too, and warns of unsuitable
step and epoch times after its first epochs.
"""

import contextlib
import itertools
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch

from common.console import UserError, format_bytes, format_count, format_number
from experiment.data import load_data, make_train_batches
from experiment.optimizer import make_contract
from models.build import describe_architecture, find_longest_sequence
from models.state_codecs import COMPRESSIONS
from swarm.config import AveragingConfig, make_config
from swarm.joining import Swarm
from swarm.membership import Membership
from swarm.plan import count_bits
from swarm.reachability import find_direct_peers, find_reachability
from swarm.uplink import RoundTimeouts, Uplink
from text.batches import check_data_arguments
from text.tokenizers import tokenizer_fingerprint
from training.checks import Check, check_epoch_time, check_machine, check_step_time
from training.devices import (
    choose_devices,
    make_trial_batch,
    place_model,
    stop_when_out_of_memory,
    time_pass,
    tune_to_device,
)
from training.figures import fetch_progress
from training.model import make_trained_model, move_batch
from training.ranks import list_trained
from training.settings import make_swarm_config, require_attested

MEASURED_BATCHES, MEASURED_SECONDS = 10, 20.0  # whichever is over first


def check_connection(seen_at: list[str], is_reachable: bool | None, is_client: bool) -> Check:
    """Check that other peers can connect to this one.

    :param is_client: whether this peer has joined in client mode, because they cannot
    """
    where = " and ".join(seen_at)
    if is_reachable:
        return Check("connection", f"others reach this peer at {where}")
    hint = "behind a firewall: use --client_mode, or open a port and name it in --host_maddrs"
    message = "no peer could test whether others can reach this one"
    if is_reachable is False:
        message = f"others cannot reach this peer at {where}: it joins {'in client mode' if is_client else 'anyway'}"
    return Check("connection", message, hint, is_warning=True)


def check_bandwidth(model: torch.nn.Module, averaging: AveragingConfig, uplink: Uplink) -> Check:
    """Show the time of a round in a large group (see CollaborativeOptimizer), and the timeouts that follow from it."""
    tensors = list_trained(model)
    codecs = COMPRESSIONS[averaging.compression], COMPRESSIONS[averaging.state_compression]
    bits = 2 * max(count_bits(tensors, codec) for codec in codecs)
    seconds = bits / (uplink.mbits * 1e6)
    uplink.fix_timeouts(
        averaging.matchmaking_time, averaging.request_timeout, averaging.averaging_timeout, averaging.next_chunk_timeout
    )
    uplink.expect_round(seconds, own_seconds=seconds)
    timeouts = uplink.timeouts
    message = (
        f"a round moves {format_bytes(bits / 8)} each way, about {seconds:.1f} s at {format_number(uplink.mbits)} "
        f"Mbit/s (--bandwidth); {timeouts.describe()}"
    )
    return Check("bandwidth", message)


class Table:
    """A table that prints each check at once, and counts the checks by level."""

    def __init__(self):
        self.levels = Counter()

    def add(self, *checks: Check) -> None:
        """Print and count these checks."""
        for check in checks:
            self.levels[check.level] += 1
            print(check, flush=True)

    @contextlib.contextmanager
    def attempt(self, what: str, **others: str) -> Iterator[None]:
        """Turn a UserError, which would have ended a trainer, into a line of the table.

        :param others: other names for the line, each with a pattern of the error's text
        """
        try:
            yield
        except UserError as e:
            what = next((name for name, pattern in others.items() if re.search(pattern, str(e))), what)
            self.add(Check(what, str(e), is_fatal=True))


def run_preflight(membership: Membership | None, groups: tuple) -> int:
    """Run and print all checks. A check is skipped if an earlier one that it depends on has failed.

    :param membership: the membership in a closed run
    :param groups: instances of TRAINER_ARGS
    :returns: the exit code: 2 if a check is fatal, otherwise 0
    """
    if os.environ.get("RANK", "0") != "0":  # one of torchrun's processes is enough
        return 0
    swarm_args, model_args, optimizer_args, averaging, data_args, args = groups
    print(f"preflight of run {swarm_args.experiment_prefix}\n", flush=True)
    table = Table()
    devices = tokenizer = model = contract = swarm = None
    with table.attempt("device"):
        devices = choose_devices(args)
        table.add(Check("device", ", ".join(map(str, devices))))
    with table.attempt("model"):
        with table.attempt("dataset", tokenizer="no (readable )?tokenizer|the tokenizer "):
            tokenizer, dataset, corpus = load_data(model_args, data_args, args.do_eval)
            table.add(Check("tokenizer", f"{len(tokenizer):,} tokens in {tokenizer.name_or_path}"))
            for name, split in dataset.items():
                is_stream = data_args.streaming and name == "train"
                size = ", ".join(source.name for source in split.sources) if is_stream else f"{len(split):,} sequences"
                table.add(Check("dataset", f"{size} for {name}"))
        # without a tokenizer, a common vocabulary size shows the model's needs
        model = make_trained_model(model_args, args, 30_000 if tokenizer is None else tokenizer)
        message = f"{model.num_parameters():,} parameters, {describe_architecture(model)}"
        table.add(Check("model", message if tokenizer else f"with 30,000 tokens {message}"))
        table.add(*check_machine(model.num_parameters(), args))
        if tokenizer:
            check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))
            contract = make_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging)
    with table.attempt("joining", clock="this machine's clock", peer="--initial_peers"):
        swarm = Swarm.join(make_swarm_config(swarm_args), membership)
        swarm.measure_bandwidth(averaging.bandwidth)
        table.add(*check_swarm(swarm))
    if swarm and contract:
        with table.attempt("settings"):
            require_attested(swarm, groups)
            is_known = swarm.compare_contract(contract)
            table.add(Check("settings", "the same as the run's" if is_known else "no trainer yet"))
        table.add(check_bandwidth(model, make_config(AveragingConfig, averaging), swarm.dht.uplink))
    if contract and devices and not args.sharded:  # the first device alone may be too small
        reports = list(fetch_progress(swarm.dht, swarm.prefix).values()) if swarm else []
        with table.attempt("step time"):
            step_seconds, step_samples = measure_step(model, (tokenizer, dataset, corpus), devices, groups)
            table.add(check_step_time(step_seconds, step_samples))
            speed = step_samples / step_seconds + sum(report.samples_per_second for report in reports)
            timeouts = swarm.dht.uplink.timeouts if swarm else RoundTimeouts()
            epoch_seconds = averaging.target_batch_size / speed
            table.add(check_epoch_time(epoch_seconds, len(reports) + 1, timeouts.matchmaking))
    if swarm:
        swarm.leave()
    fatal, warnings = table.levels["fatal"], format_count(table.levels["warning"], "warning")
    if fatal:
        print(f"\n{fatal} fatal, {warnings}: fix the fatal problems before you train")
    else:
        print(f"\nready to train ({warnings})")
    return 2 if fatal else 0


def check_swarm(swarm: Swarm) -> Iterator[Check]:
    """Check the connections with the swarm that this peer has joined."""
    dht, initial_peers = swarm.dht, swarm.config.initial_peers
    if not initial_peers:
        yield Check("peer", "no --initial_peers: this peer starts a new swarm")
    else:
        answering = dht.run_coroutine(partial(find_direct_peers, initial_peers))
        message = f"{len(answering)} of {len(initial_peers)} initial peers can be reached directly"
        yield Check("peer", message, is_warning=len(answering) < len(initial_peers))
    if swarm.config.client_mode:
        yield Check("connection", "client mode: others need not reach this peer")
    elif initial_peers:
        yield check_connection(*find_reachability(dht, initial_peers), dht.client_mode)
    swarm.warn_of_local_addresses()
    yield Check("own addresses", "none: client mode" if dht.client_mode else " ".join(swarm.list_maddrs()[:3]))


def measure_step(model, loaded: tuple, devices: list[torch.device], groups: tuple) -> tuple[float, int]:
    """Move the model to the first device, tune both, and return the seconds of a step and its samples.

    :param loaded: the tokenizer, dataset and corpus of load_data
    """
    _, model_args, _, averaging, data_args, args = groups
    (tokenizer, dataset, corpus), device, seed = loaded, devices[0], model_args.seed
    trial = partial(make_trial_batch, model, dataset["train"], tokenizer, corpus, data_args, seed)
    with stop_when_out_of_memory(args, device, model):
        autocast, _ = place_model(model, device, args)
        args = tune_to_device(model, trial, args, device, autocast, averaging.target_batch_size, len(devices))
        size, count = args.per_device_train_batch_size, args.gradient_accumulation_steps
        batches = make_train_batches(dataset["train"], tokenizer, data_args, batch_size=size, seed=seed)
        times, deadline = [], time.monotonic() + MEASURED_SECONDS
        for batch in itertools.islice(batches, MEASURED_BATCHES):
            times.append(time_pass(model, move_batch(batch, device), autocast))
            if time.monotonic() > deadline:
                break
    # the first pass is slower
    return count * statistics.mean(times[1:] or times), size * count * len(devices)
