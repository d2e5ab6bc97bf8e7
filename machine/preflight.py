"""The preflight: what may go wrong on this machine and between it and the others, found before training starts.

    python run_trainer.py --preflight --experiment_prefix my_albert --initial_peers 203.0.113.1:8080

prints a table, a cure beside each finding, and ends with exit code 0 when nothing is fatal, else 2. It joins the run's
DHT as any peer does, but publishes and trains nothing. A trainer logs at its start those problems that are quick to
find, and later what its first epochs reveal of its speed. Which batch size suits this machine is measured by

    python -m machine.preflight --experiment_prefix my_albert --fp16

with a trainer's flags; the last line that it prints is the flags to add to them.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from arguments import TRAINER_ARGS as GROUPS
from arguments import (
    AveragingArguments,
    DataArguments,
    ModelArguments,
    SwarmArguments,
    TrainerArguments,
    parse_arguments,
)
from support.console import UserError, edge, format_bytes, setup_logging

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge():
        groups = parse_arguments(*GROUPS, description=__doc__)

import hivemind
import psutil
import torch
from hivemind.dht.node import DHTNode
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.proto.dht_pb2 import PingRequest
from hivemind.utils import get_dht_time

from experiment.data import (
    choose_tokenizer,
    find_data,
    load_data,
    make_train_batches,
    make_training_dataset,
)
from experiment.model import find_objective
from experiment.optimizer import describe_contract
from machine.devices import (
    choose_devices,
    make_trial_batch,
    place_model,
    stop_when_out_of_memory,
    time_pass,
    tune_to_device,
)
from machine.training import make_trained_model, move_batch
from models.build import describe_architecture, find_longest_sequence
from swarm.addresses import get_peer_id, is_public, is_relayed, select_for_others
from swarm.contract import fetch_contracts, find_differences
from swarm.dht import raise_file_limit
from swarm.joining import check_addresses, explain_clock, explain_unreachable, start_dht
from swarm.line import LINE
from swarm.processes import clean_end, quiet_hivemind_logs
from swarm.reachability import find_direct_averagers, find_reachability, measure_bandwidth
from text.batches import check_data_arguments
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer, tokenizer_fingerprint
from utils import RunContract, fetch_progress, make_validators

logger = logging.getLogger("preflight")

ENOUGH_FILES = 4096
# Measured with ALBERT-large on a CPU: parameters, gradients, moments, sums, copies to average, to give and to restore.
HOST_BYTES_PER_PARAMETER = 75
SHARED_BYTES_PER_PARAMETER = 8  # of these in /dev/shm
STATE_BYTES_PER_PARAMETER = 12  # on disk: parameters and two moments; with lamb_8bit half of it
# Real rounds took 1.10 to 1.14 times what the bandwidth would allow (75 ms, 20 Mbit/s, three peers).
ROUND_OVERHEAD = 1.15
GRADIENT_BYTES = {"none": 4, "float16": 2, "8bit": 1}
MEASURED_SECONDS = 20.0


@dataclasses.dataclass
class Check:
    """One line of the table."""

    what: str
    level: str  # ok, warning or fatal
    finding: str
    cure: str = ""


# --- this machine -----------------------------------------------------------------------------------------------------


def check_file_limit() -> Check:
    """Raises the limit of open files itself as far as the system allows."""
    limit = raise_file_limit()
    if limit < ENOUGH_FILES:
        cure = f"ulimit -n {ENOUGH_FILES}, or raise nofile in /etc/security/limits.conf"
        return Check("open files", "warning", f"{limit:,} at most: a larger swarm needs more", cure)
    return Check("open files", "ok", f"{limit:,} at most" if limit < math.inf else "no limit")


def check_disk(folder: str, parameters: int, kept: int) -> Check:
    """:param kept: training states that are kept; one more is being written"""
    needed = STATE_BYTES_PER_PARAMETER * parameters * (kept + 1)
    existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    finding = f"{folder} has {format_bytes(free)} free, up to {format_bytes(needed)} needed"
    if free < needed:
        return Check("disk", "warning", finding, "free some, or choose another --output_dir: checkpoints would be lost")
    return Check("disk", "ok", finding)


def check_memory(parameters: int) -> Check:
    free, needed = psutil.virtual_memory().available, HOST_BYTES_PER_PARAMETER * parameters
    finding = f"{format_bytes(free)} free, {format_bytes(needed)} needed for {parameters:,} parameters, and batches"
    if free < needed:
        return Check("memory", "fatal", finding, "end other programs, add swap, or train a smaller --config_path")
    return Check(
        "memory", "ok" if free > 1.2 * needed else "warning", finding, "close to the limit: end other programs"
    )


def check_shared_memory(parameters: int) -> Check | None:
    """Containers often have 64 MB of it, and a process that runs out is killed by a bus error, without a word."""
    if not os.path.isdir("/dev/shm"):
        return None
    free, needed = shutil.disk_usage("/dev/shm").free, SHARED_BYTES_PER_PARAMETER * parameters
    finding = f"/dev/shm has {format_bytes(free)} free, {format_bytes(needed)} needed"
    if free < needed:
        return Check(
            "shared memory", "fatal", finding, "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        )
    return Check("shared memory", "ok", finding)


# --- the others -------------------------------------------------------------------------------------------------------


def check_announced(maddrs: list[str], initial_peers: list[str], client_mode: bool) -> Check:
    """Whether what this peer tells the others is of use to them."""
    shown = " ".join(maddrs[:3])
    if client_mode:
        return Check("own addresses", "ok", "none announced: client mode")
    if initial_peers and any(map(is_public, initial_peers)) and not any(map(is_public, maddrs)):
        cure = "--announce_maddrs /ip4/PUBLIC_IP/tcp/PORT with a port that your router forwards, or --client_mode"
        return Check("own addresses", "warning", f"{shown}: usable within this machine's network only", cure)
    return Check("own addresses", "ok", shown)


def check_clock(seconds: float | None) -> Check:
    """:param seconds: by which this machine's clock is ahead of the swarm's; hivemind refuses more than 3"""
    if seconds is None:
        return Check("clock", "warning", "no peer reported its time", "check that this machine sets its clock by NTP")
    if abs(seconds) > 3:
        finding, cure = explain_clock(seconds).split(": ", 1)
        return Check("clock", "fatal", finding, cure)
    finding = f"{abs(seconds):.2f} s {'ahead of' if seconds > 0 else 'behind'} the swarm's (3 s are allowed)"
    if abs(seconds) > 1:
        return Check("clock", "warning", finding, "synchronize it: sudo timedatectl set-ntp true")
    return Check("clock", "ok", finding)


async def measure_clock(initial_peers: list[str], _: hivemind.DHT, node: DHTNode) -> float | None:
    """Runs in the DHT process: seconds by which this clock is ahead of the peers', the median; None without answer."""
    differences = []
    for peer_id in {get_peer_id(maddr) for maddr in initial_peers}:
        stub = node.protocol.get_stub(peer_id)
        with contextlib.suppress(Exception):  # as hivemind's own ping: a peer that is gone fails in many ways
            sent = get_dht_time()
            response = await stub.rpc_ping(PingRequest(peer=node.protocol.node_info), timeout=5)
            differences.append((sent + get_dht_time()) / 2 - response.dht_time)
    return sorted(differences)[len(differences) // 2] if differences else None


def check_connection(seen_at: list[str], is_reachable: bool | None, averagers: int) -> Check:
    where = " and ".join(seen_at)
    if is_reachable is None:
        finding = "no peer could be asked whether others can reach this one"
        return Check("connection", "warning", finding, "if you are behind a firewall or router, use --client_mode")
    if is_reachable:
        return Check("connection", "ok", f"others reach this peer at {where}")
    cure = "behind a firewall: use --client_mode, or open a port and give it in --host_maddrs"
    if averagers:
        finding = f"others cannot reach this peer at {where}; {averagers} that average can be reached from here"
        return Check("connection", "warning", finding, f"{cure}. Without either, it will choose client mode by itself")
    finding = f"others cannot reach this peer at {where}, and no peer that averages here could be reached by a client"
    return Check(
        "connection", "warning", finding, f"{cure}. Without either, it will go through a relay, which is slower"
    )


# --- speed ------------------------------------------------------------------------------------------------------------


def check_step_time(seconds: float, batch_size: int) -> Check:
    finding = f"{seconds:.2f} s per step of {batch_size} samples"
    if seconds < 0.5:
        cure = "raise --per_device_train_batch_size or --gradient_accumulation_steps: 0.5 to 10 s are recommended"
        return Check("step time", "warning", f"{finding}: short", cure)
    if seconds > 10:
        cure = "lower --gradient_accumulation_steps or --per_device_train_batch_size: 0.5 to 10 s are recommended"
        return Check("step time", "warning", f"{finding}: long, the others may wait for its end", cure)
    return Check("step time", "ok", finding)


def check_epoch_time(seconds: float, peers: int, matchmaking_time: float) -> Check:
    """:param peers: of the swarm, this one included; a group starts when all are there; a single peer looks for none"""
    finding = f"about {seconds:,.1f} s with {peers} peer{'s'[: peers != 1]}"
    if peers > 1 and seconds < matchmaking_time:
        finding += f": others wait for a peer that is late for up to {matchmaking_time:.3g} s (--matchmaking_time)"
        cure = (
            "raise --target_batch_size (ALL PEERS) or lower --matchmaking_time: an epoch should take longer than that"
        )
        return Check("epoch time", "warning", finding, cure)
    return Check("epoch time", "ok", finding)


def estimate_round_seconds(parameters: int, peers: int, averaging: AveragingArguments) -> tuple[float, float]:
    """(bytes through this peer's line, seconds) of its largest round: each peer sends and receives 2V(N-1)/N bytes."""
    group = max(2, min(peers, averaging.target_group_size))
    per_parameter = max(GRADIENT_BYTES[averaging.compression], GRADIENT_BYTES[averaging.state_compression])
    size = 2 * per_parameter * parameters * (group - 1) / group
    return size, ROUND_OVERHEAD * 8 * size / (averaging.bandwidth * 1e6)


def check_bandwidth(parameters: int, peers: int, averaging: AveragingArguments) -> Check:
    size, seconds = estimate_round_seconds(parameters, peers, averaging)
    LINE.fix(
        matchmaking=averaging.matchmaking_time,
        request=averaging.request_timeout,
        averaging=averaging.averaging_timeout,
        chunk=averaging.next_chunk_timeout,
    )
    LINE.expect_round(seconds)
    finding = (
        f"a round moves {format_bytes(size)} each way, about {seconds:.1f} s at {averaging.bandwidth:g} Mbit/s "
        f"(--bandwidth); {LINE.describe_times()}"
    )
    cure = "fewer bytes (--compression 8bit, --state_compression float16) or a longer --averaging_timeout, ALL PEERS"
    left = LINE.averaging_timeout - LINE.matchmaking_time
    level = "fatal" if seconds > LINE.averaging_timeout else "warning" if seconds > left else "ok"
    return Check("bandwidth", level, finding, cure)


def measure_passes(
    model: torch.nn.Module, batches: Iterable, device: torch.device, autocast: contextlib.AbstractContextManager
) -> float:
    """Seconds of the forward and backward pass of one of these batches."""
    times = []
    began = time.monotonic()
    # the first is slower, and the last of a long series changes nothing
    for batch in itertools.islice(batches, 12):
        start = time.monotonic()
        time_pass(model, move_batch(batch, device), autocast)
        model.zero_grad()
        times.append(time.monotonic() - start)
        if time.monotonic() - began > MEASURED_SECONDS:
            break
    times = times[1:] or times
    return sum(times) / len(times)


# --- all of it --------------------------------------------------------------------------------------------------------


def attempt(what: str, action: Callable) -> tuple[object, Check | None]:
    """(result, None), or (None, the line with which the action would have ended a trainer)."""
    try:
        return action(), None
    except UserError as e:
        return None, Check(what, "fatal", str(e))


def check_all(*groups) -> Iterator[Check]:
    """Every check, in the order in which they make sense; a later one is left out when an earlier one forbids it.

    :param groups: instances of GROUPS
    """
    swarm, model_args, optimizer_args, averaging, data_args, args = groups
    yield Check("run", "ok", f"{swarm.experiment_prefix}: a name without a dot")
    yield check_file_limit()
    devices, failure = attempt("device", lambda: choose_devices(args))
    yield failure or Check("device", "ok", ", ".join(map(str, devices)))
    tokenizer, dataset, corpus, model = yield from check_data_and_model(model_args, data_args, args)
    if model:
        parameters = model.num_parameters()
        yield check_memory(parameters)
        if check := check_shared_memory(parameters):
            yield check
        yield check_disk(args.output_dir, parameters, args.save_total_limit)
    contract = None
    if model and dataset:
        contract = describe_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging)
    reports, averaging = yield from check_others(swarm, averaging, contract)
    if contract and devices:
        make_trial = partial(make_trial_batch, model, dataset["train"], tokenizer, corpus, data_args, model_args.seed)
        make_batches = partial(make_train_batches, dataset["train"], tokenizer, data_args, seed=model_args.seed)
        yield from check_speed(model, make_trial, make_batches, averaging, args, devices, reports)


def check_data_and_model(model_args: ModelArguments, data_args: DataArguments, args: TrainerArguments) -> Iterator:
    """Checks, and in the end (tokenizer, splits, corpus, model), each None where it could not be had."""
    model = dataset = tokenizer = found = corpus = None
    kind, failure = attempt("model", lambda: find_objective(model_args).kind)
    if not failure and (not data_args.streaming or args.do_eval):
        found, failure = attempt("dataset", lambda: find_data(model_args, data_args, kind))
    if failure:
        yield failure
    else:
        tokenizer_path = choose_tokenizer(found, model_args) if found else model_args.tokenizer_path
        tokenizer, failure = attempt("tokenizer", lambda: load_tokenizer(tokenizer_path, kind))
        yield failure or Check("tokenizer", "ok", f"{len(tokenizer):,} pieces in {tokenizer_path}")
    if tokenizer is None:
        return None, None, None, None
    if found:
        loaded, failure = attempt("dataset", lambda: load_tokenized_dataset(found, tokenizer, kind))
        if loaded:
            dataset, corpus = loaded
            count = len(dataset["validation" if data_args.streaming else "train"])
            yield Check("dataset", "ok", f"{count:,} instances in {found.dataset}, made by this tokenizer, {kind.name}")
        else:
            yield failure
    if data_args.streaming:
        train, failure = attempt("sources", lambda: make_training_dataset(tokenizer, data_args, kind))
        yield failure or check_stream(train, tokenizer, data_args, args)
        corpus = {"seq_length": data_args.max_sequence_length, "objective": kind.name}
        dataset = train and {"train": train}
    model, failure = attempt("model", lambda: make_trained_model(model_args, args, tokenizer))
    yield failure or Check("model", "ok", f"{model.num_parameters():,} parameters, {describe_architecture(model)}")
    if model and dataset:
        positions = find_longest_sequence(model)
        _, failure = attempt("batches", lambda: check_data_arguments(data_args, tokenizer, corpus, positions))
        if failure:
            yield failure
            dataset = None
    return tokenizer, dataset, corpus, model


def check_others(swarm: SwarmArguments, averaging: AveragingArguments, contract: dict[str, str] | None) -> Iterator:
    """Checks of the way to the swarm and of the swarm, and in the end (its trainers' reports, the averaging arguments
    with the bandwidth that was measured)."""
    resolved, failure = attempt("addresses", lambda: check_addresses(swarm))
    if failure:
        yield failure
        return [], averaging
    reasons = explain_unreachable(resolved.initial_peers) if not resolved.use_ipfs else {}
    for maddr, reason in reasons.items():
        # one that answers is enough
        level = "ok" if not reason else "fatal" if all(reasons.values()) else "warning"
        yield Check("peer", level, f"{maddr}: {reason or 'answers, and has the expected id'}")
    if not resolved.initial_peers:
        yield Check("peer", "ok", "no --initial_peers: a swarm of its own")
    if reasons and all(reasons.values()):
        return [], averaging
    quiet_hivemind_logs()
    validators, _ = make_validators(swarm.experiment_prefix)
    dht, failure = attempt("joining", lambda: start_dht(resolved, validators, client_mode=resolved.client_mode))
    if failure:
        failure.what = "clock" if "clock" in failure.finding else failure.what
        yield failure
        return [], averaging
    averaging = measure_bandwidth(dht, averaging)
    yield from check_swarm(dht, resolved)
    reports = list(fetch_progress(dht, swarm.experiment_prefix).values())
    if contract:
        yield check_contract(dht, swarm.experiment_prefix, contract)
    dht.shutdown()
    return reports, averaging


def check_speed(
    model: torch.nn.Module,
    make_trial: Callable,
    make_batches: Callable,
    averaging: AveragingArguments,
    args: TrainerArguments,
    devices: list[torch.device],
    reports: list[LocalTrainingProgress],
) -> Iterator[Check]:
    """What steps, epochs and rounds will take; with the longest sequences where these grow.

    :param make_trial, make_batches: make_trial_batch and make_train_batches, but for the batch size
    :param reports: of the swarm's trainers
    """
    device, count = devices[0], len(devices)

    def measure() -> tuple[int, float]:
        with stop_when_out_of_memory(args, device, model):
            autocast, _ = place_model(model, device, args)
            tuned = tune_to_device(model, make_trial, args, device, autocast, averaging.target_batch_size, count)
            size, batches = tuned.per_device_train_batch_size, tuned.gradient_accumulation_steps
            seconds = measure_passes(model, make_batches(batch_size=size), device, autocast)
        return size * batches * count, seconds * batches

    measured, failure = attempt("step time", measure)
    if failure:
        yield failure
        return
    batch_size, seconds = measured
    yield check_step_time(seconds, batch_size)
    peers = len(reports) + 1
    speed = batch_size / seconds + sum(report.samples_per_second for report in reports)
    epoch_seconds = averaging.target_batch_size / speed
    yield check_epoch_time(epoch_seconds, peers, averaging.matchmaking_time or LINE.matchmaking_time)
    if averaging.bandwidth is not None:  # no peer, no measure
        yield check_bandwidth(model.num_parameters(), peers, averaging)


def check_stream(train, tokenizer, data_args: DataArguments, args: TrainerArguments) -> Check:
    """Makes a first batch as training would, and shows it."""
    size, start = args.per_device_train_batch_size, time.monotonic()
    size = 8 if size == "auto" else size
    batch = next(iter(make_train_batches(train, tokenizer, data_args, batch_size=size, seed=0)))
    begin = tokenizer.decode(batch["input_ids"][0, :16])
    return Check(
        "sources",
        "ok",
        f"{', '.join(source.name for source in train.sources)}: a first batch of {size} instances, "
        f"{batch['attention_mask'].sum(1).float().mean():.0f} tokens on average, in "
        f"{time.monotonic() - start:.1f} s; it begins: {begin}",
    )


def check_swarm(dht: hivemind.DHT, swarm: SwarmArguments) -> Iterator[Check]:
    """What only a peer that has joined the DHT can tell."""
    maddrs = select_for_others(dht.get_visible_maddrs(latest=True))
    if swarm.initial_peers:
        yield check_clock(dht.run_coroutine(partial(measure_clock, swarm.initial_peers)))
        if swarm.client_mode:
            yield Check("connection", "ok", "client mode: others need not reach this peer")
        else:
            seen_at, is_reachable = find_reachability(dht, swarm.initial_peers)
            averagers = dht.run_coroutine(partial(find_direct_averagers, swarm.experiment_prefix))
            yield check_connection(seen_at, is_reachable, averagers)
    yield check_announced([m for m in maddrs if not is_relayed(m)], swarm.initial_peers, swarm.client_mode)


def check_contract(dht: hivemind.DHT, prefix: str, contract: dict[str, str]) -> Check:
    others = list(fetch_contracts(dht, prefix).values())
    if differences := find_differences(RunContract(joined=get_dht_time(), contract=contract), others):
        finding = f"run {prefix!r} uses different ones; {'; '.join(differences)}"
        return Check("settings", "fatal", finding, "take over its flags, or choose another --experiment_prefix")
    count = len(others)
    return Check(
        "settings", "ok", f"those of the run's {count} trainer{'s'[: count != 1]}" if count else "no trainer yet"
    )


def run_preflight(*groups) -> int:
    """Print the table, a line at a time.

    :param groups: the arguments of `check_all`
    :returns: the exit code, 0 when nothing is fatal, else 2
    """
    if os.environ.get("RANK", "0") != "0":  # of those that torchrun starts, one will do
        return 0
    print(f"preflight of run {groups[0].experiment_prefix}\n", flush=True)
    checks = []
    for check in check_all(*groups):
        checks.append(check)
        print(format_check(check), flush=True)
    fatal, warnings = (sum(check.level == level for check in checks) for level in ("fatal", "warning"))
    if fatal:
        print(f"\n{fatal} fatal, {warnings} warning{'s'[: warnings != 1]}: fix what is fatal before you train")
    else:
        print(f"\nready to train ({warnings} warning{'s'[: warnings != 1]})")
    return 2 if fatal else 0


def format_check(check: Check) -> str:
    """`level  what  finding`, and the cure below it unless all is well; wrapped to the terminal's width."""
    color = {"ok": "32", "warning": "33", "fatal": "31"}[check.level] if sys.stdout.isatty() else None
    level = f"\033[{color}m{check.level:<8}\033[0m" if color else f"{check.level:<8}"
    # addresses are copied and searched for: a file gets them in one line
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    wrap = partial(textwrap.wrap, width=max(60, width) - 24, break_long_words=False, break_on_hyphens=False)
    lines = wrap(check.finding)
    if check.level != "ok" and check.cure:
        first, *rest = wrap(check.cure)
        lines += [f"-> {first}", *(f"   {line}" for line in rest)]
    return "\n".join(f"{level}{check.what:<15} {line}" if not i else f"{'':24}{line}" for i, line in enumerate(lines))


def warn(check: Check | None) -> None:
    """One line in a starting trainer's log, unless all is well."""
    if check is not None and check.level != "ok":
        logger.warning(f"{check.what}: {check.finding}; {check.cure}")


def warn_at_start(model: torch.nn.Module, args: TrainerArguments) -> None:
    """The checks that take no time."""
    parameters = sum(param.numel() for param in model.parameters())
    warn(check_file_limit())
    warn(check_memory(parameters))
    warn(check_shared_memory(parameters))
    warn(check_disk(args.output_dir, parameters, args.save_total_limit))


def warn_of_speed(
    step_seconds: float, batch_size: int, epoch_seconds: float, peers: int, matchmaking_time: float
) -> None:
    """What the first epochs have shown, where it costs the others something."""
    if step_seconds > 0.5:  # short steps are harmless: the tracker does not report each
        warn(check_step_time(step_seconds, batch_size))
    warn(check_epoch_time(epoch_seconds, peers, matchmaking_time))


def main(*groups) -> None:
    """Measure the batch size that suits this machine.

    :param groups: instances of GROUPS
    """
    _, model_args, _, averaging, data_args, args = groups
    args = dataclasses.replace(args, per_device_train_batch_size="auto")
    setup_logging("preflight")
    tokenizer, dataset, corpus = load_data(model_args, data_args, needs_validation=False)
    model = make_trained_model(model_args, args, tokenizer)
    check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))
    devices = choose_devices(args)
    autocast, _ = place_model(model, devices[0], args)
    make_trial = partial(make_trial_batch, model, dataset["train"], tokenizer, corpus, data_args, model_args.seed)
    args = tune_to_device(model, make_trial, args, devices[0], autocast, averaging.target_batch_size, len(devices))
    sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    print("--per_device_train_batch_size {} --gradient_accumulation_steps {}".format(*sizes), flush=True)


if __name__ == "__main__":
    with clean_end():
        main(*groups)
