"""The preflight, which finds problems of this machine and its connections before training starts.

    python run_trainer.py --preflight --initial_peers 203.0.113.1:8080

prints a table with a fix for each problem, and ends with exit code 0, or 2 if a problem is fatal. It joins the run's
DHT like any peer, but publishes and trains nothing. A trainer runs the quick checks at its start, and warns of
unsuitable step and epoch times after its first epochs. To measure the batch size that suits this machine, run

    python -m training.preflight --experiment_prefix my_albert --fp16

with a trainer's flags. The last line of its output is the flags to add.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from arguments import TRAINER_ARGS as GROUPS
from arguments import AveragingArguments, DataArguments, TrainerArguments, parse_arguments
from common.console import UserError, edge, format_bytes, format_number, setup_logging

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

from experiment.data import load_data, make_train_batches
from experiment.model import find_objective
from experiment.optimizer import make_contract
from models.build import describe_architecture, find_longest_sequence
from swarm.addresses import get_peer_id, is_public, is_relayed, list_shareable_maddrs
from swarm.attestation import ask_initial_peers
from swarm.config import SwarmConfig, make_config
from swarm.contract import RunContract, RunSchema
from swarm.dht import raise_file_limit
from swarm.identity import KEY_FILE, keep_identity
from swarm.joining import Swarm, start_dht
from swarm.membership import Membership
from swarm.probe import explain_unreachable
from swarm.processes import clean_end, quiet_hivemind_logs
from swarm.reachability import count_reachable_averagers, find_reachability, measure_bandwidth
from swarm.uplink import RoundTimeouts
from text.batches import check_data_arguments
from text.tokenizers import tokenizer_fingerprint
from training.checkpoint import choose_state, claim_folders
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
from training.settings import begin, make_swarm_config, require_attested
from utils import make_validators

logger = logging.getLogger("preflight")

ENOUGH_FILES = 4096
# measured with ALBERT-large on a CPU: parameters, gradients, moments, sums, copies to average, send and restore
HOST_BYTES_PER_PARAMETER = 79
SHARED_BYTES_PER_PARAMETER = 12  # of these in /dev/shm
STATE_BYTES_PER_PARAMETER = 12  # on disk: parameters and two moments; with lamb_8bit half of it
# real rounds took 1.10 to 1.14 times as long as the bandwidth allows (75 ms, 20 Mbit/s, three peers)
ROUND_OVERHEAD = 1.15
GRADIENT_BYTES = {"none": 4, "float16": 2, "8bit": 1, "sparse": 2}
MEASURED_SECONDS = 20.0


@dataclasses.dataclass
class Check:
    """One line of the table."""

    what: str
    level: str  # ok, warning or fatal
    finding: str
    cure: str = ""


def judge(what: str, finding: str, cure: str, *, is_fatal: bool = False, is_warning: bool = False) -> Check:
    """Return a line of the table with the level for this finding."""
    return Check(what, "fatal" if is_fatal else "warning" if is_warning else "ok", finding, cure)


def check_machine(parameters: int, args: TrainerArguments) -> list[Check]:
    """Run the checks that take no time."""
    checks = [check_file_limit(), check_memory(parameters)]
    checks.append(check_disk(args.output_dir, parameters, args.save_total_limit))
    if os.path.isdir("/dev/shm"):
        # containers often have 64 MB, and a bus error kills a process that needs more, without a message
        free, needed = shutil.disk_usage("/dev/shm").free, SHARED_BYTES_PER_PARAMETER * parameters
        finding = f"/dev/shm has {format_bytes(free)} free, {format_bytes(needed)} needed"
        cure = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        checks.append(judge("shared memory", finding, cure, is_fatal=free < needed))
    return checks


def check_file_limit() -> Check:
    """Raise the limit of open files as far as the system allows, and check it."""
    limit = raise_file_limit()
    cure = f"a larger swarm needs more: ulimit -n {ENOUGH_FILES}, or raise nofile in /etc/security/limits.conf"
    finding = f"{limit:,} at most" if limit < math.inf else "no limit"
    return judge("open files", finding, cure, is_warning=limit < ENOUGH_FILES)


def check_disk(folder: str, parameters: int, kept: int) -> Check:
    """Check the free space for the model and its training states. Less than one of them is fatal.

    :param kept: the number of training states to keep; one more may be in the making
    """
    one, needed = ((STATE_BYTES_PER_PARAMETER * states + 4) * parameters for states in (1, kept + 1))
    existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    finding = f"{folder} has {format_bytes(free)} free, up to {format_bytes(needed)} needed"
    if free < one:
        finding = f"{folder} has {format_bytes(free)} free, {format_bytes(one)} needed for the model and one checkpoint"
    cure = "free some, or choose another --output_dir: checkpoints would be lost"
    return judge("disk", finding, cure, is_fatal=free < one, is_warning=free < needed)


def check_memory(parameters: int) -> Check:
    free, needed = psutil.virtual_memory().available, HOST_BYTES_PER_PARAMETER * parameters
    finding = f"{format_bytes(free)} free, {format_bytes(needed)} needed for {parameters:,} parameters, and batches"
    cure = "end other programs, add swap, or train a smaller --config_path"
    return judge("memory", finding, cure, is_fatal=free < needed, is_warning=free < 1.2 * needed)


def check_announced(maddrs: list[str], initial_peers: list[str], client_mode: bool) -> Check:
    """Check that other peers can use the addresses that this peer announces."""
    if client_mode:
        return Check("own addresses", "ok", "none announced: client mode")
    cure = "--announce_maddrs /ip4/PUBLIC_IP/tcp/PORT with a port that your router forwards, or --client_mode"
    is_local = any(map(is_public, initial_peers)) and not any(map(is_public, maddrs))
    finding = " ".join(maddrs[:3]) + ": usable within this machine's network only" * is_local
    return judge("own addresses", finding, cure, is_warning=is_local)


def check_clock(seconds: float | None) -> Check:
    """Check this machine's clock, which is this many seconds ahead of the swarm's; hivemind allows up to 3."""
    if seconds is None:
        return Check("clock", "warning", "no peer reported its time", "check that this machine sets its clock by NTP")
    finding = f"{abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'} the swarm's (3 s are allowed)"
    cure = "synchronize it: sudo timedatectl set-ntp true"
    return judge("clock", finding, cure, is_fatal=abs(seconds) > 3, is_warning=abs(seconds) > 1)


async def measure_clock(initial_peers: list[str], _: hivemind.DHT, node: DHTNode) -> float | None:
    """Return the median seconds by which this clock is ahead of the peers', or None. This runs in the DHT process."""
    differences = []
    for peer_id in {get_peer_id(maddr) for maddr in initial_peers}:
        stub = node.protocol.get_stub(peer_id)
        with contextlib.suppress(Exception):  # like hivemind's ping: a peer that has left raises many types
            sent = get_dht_time()
            response = await stub.rpc_ping(PingRequest(peer=node.protocol.node_info), timeout=5)
            differences.append((sent + get_dht_time()) / 2 - response.dht_time)
    return statistics.median_high(differences) if differences else None


def check_connection(seen_at: list[str], is_reachable: bool | None, averagers: int) -> Check:
    """Check that other peers can connect to this one."""
    where = " and ".join(seen_at)
    if is_reachable is None:
        finding = "no peer could test whether others can reach this one"
        return Check("connection", "warning", finding, "if you are behind a firewall or router, use --client_mode")
    if is_reachable:
        return Check("connection", "ok", f"others reach this peer at {where}")
    found = f"{averagers} that average" if averagers else "no peer that averages"
    finding = f"others cannot reach this peer at {where}; {found} can be reached from here"
    cure = "behind a firewall: use --client_mode, or open a port and name it in --host_maddrs. Otherwise it will "
    cure += "choose client mode by itself" if averagers else "go through a relay, which is slower"
    return Check("connection", "warning", finding, cure)


def check_step_time(seconds: float, batch_size: int) -> Check:
    finding = f"{seconds:.2f} s per step of {batch_size} samples; 0.5 to 10 s are recommended"
    cure = f"{'raise' if seconds < 0.5 else 'lower'} --per_device_train_batch_size or --gradient_accumulation_steps"
    return judge("step time", finding, cure, is_warning=not 0.5 <= seconds <= 10)


def check_epoch_time(seconds: float, peers: int, matchmaking_time: float) -> Check:
    """Check the time of an epoch with this many peers, this one included. A single peer looks for no group."""
    is_short = peers > 1 and seconds < matchmaking_time
    finding = f"about {seconds:,.1f} s with {peers} peer{'s'[: peers != 1]}"
    if is_short:
        finding += f": others wait up to {matchmaking_time:.3g} s for a late peer (--matchmaking_time)"
    cure = "raise --target_batch_size (on all peers) or lower --matchmaking_time: an epoch should take longer than that"
    return judge("epoch time", finding, cure, is_warning=is_short)


def estimate_round_seconds(parameters: int, peers: int, averaging: AveragingArguments) -> tuple[float, float]:
    """Return the bytes that this peer sends in its largest round, 2V(N-1)/N, and its seconds; it receives as many."""
    group = max(2, min(peers, averaging.target_group_size))
    per_parameter = max(GRADIENT_BYTES[averaging.compression], GRADIENT_BYTES[averaging.state_compression])
    size = 2 * per_parameter * parameters * (group - 1) / group
    return size, ROUND_OVERHEAD * 8 * size / (averaging.bandwidth * 1e6)


def check_bandwidth(parameters: int, peers: int, averaging: AveragingArguments) -> Check:
    """Check that a round takes less time than its timeouts at this bandwidth."""
    size, seconds = estimate_round_seconds(parameters, peers, averaging)
    timeouts = RoundTimeouts(
        round_seconds=max(seconds, RoundTimeouts.round_seconds),
        fixed_matchmaking=averaging.matchmaking_time or 0.0,
        fixed_request=averaging.request_timeout or 0.0,
        fixed_averaging=averaging.averaging_timeout or 0.0,
        fixed_chunk=averaging.next_chunk_timeout or 0.0,
    )
    finding = (
        f"a round moves {format_bytes(size)} each way, about {seconds:.1f} s at {format_number(averaging.bandwidth)} "
        f"Mbit/s (--bandwidth); {timeouts.describe()}"
    )
    cure = "fewer bytes (--compression 8bit, --state_compression float16) or a longer --averaging_timeout, on all peers"
    is_late = seconds > timeouts.averaging - timeouts.matchmaking
    return judge("bandwidth", finding, cure, is_fatal=seconds > timeouts.averaging, is_warning=is_late)


def measure_passes(
    model: torch.nn.Module, batches: Iterable, device: torch.device, autocast: contextlib.AbstractContextManager
) -> float:
    """Return the mean seconds of a forward and backward pass."""
    times, deadline = [], time.monotonic() + MEASURED_SECONDS
    # the first pass is slower and not counted; a dozen is enough
    for batch in itertools.islice(batches, 12):
        times.append(time_pass(model, move_batch(batch, device), autocast))
        model.zero_grad()
        if time.monotonic() > deadline:
            break
    return statistics.mean(times[1:] or times)


class Table:
    """A table that prints each check at once, and counts the checks by level."""

    def __init__(self):
        self.levels = Counter()

    def add(self, *checks: Check) -> None:
        for check in checks:
            self.levels[check.level] += 1
            print(format_check(check), flush=True)

    @contextlib.contextmanager
    def attempt(self, what: str, **others: str) -> Iterator[None]:
        """Turn a UserError, which would have ended a trainer, into a line of the table.

        :param others: other names for the line, each with a pattern of the error's text
        """
        try:
            yield
        except UserError as e:
            what = next((name for name, pattern in others.items() if re.search(pattern, str(e))), what)
            self.add(Check(what, "fatal", str(e)))


def run_preflight(membership: Membership | None, groups: tuple) -> int:
    """Run and print all checks. A check is skipped if an earlier one that it depends on has failed.

    :param membership: the membership in a closed run
    :param groups: instances of GROUPS
    :returns: the exit code: 2 if a check is fatal, otherwise 0
    """
    if os.environ.get("RANK", "0") != "0":  # one of torchrun's processes is enough
        return 0
    swarm, model_args, optimizer_args, averaging, data_args, args = groups
    print(f"preflight of run {swarm.experiment_prefix}\n", flush=True)
    table = Table()
    devices = tokenizer = dataset = contract = None
    with table.attempt("device"):
        devices = choose_devices(args)
        table.add(Check("device", "ok", ", ".join(map(str, devices))))
    with table.attempt("model"):
        objective = find_objective(model_args)
        with table.attempt("dataset", tokenizer="no (readable )?tokenizer|the tokenizer "):
            tokenizer, dataset, corpus = load_data(model_args, data_args, args.do_eval)
            table.add(Check("tokenizer", "ok", f"{len(tokenizer):,} tokens in {tokenizer.name_or_path}"))
            for name, split in dataset.items():
                if name == "train" and data_args.streaming:
                    table.add(check_stream(split, tokenizer, data_args))
                else:
                    finding = f"{len(split):,} sequences for {name}, made by this tokenizer, {objective.kind.name}"
                    table.add(Check("dataset", "ok", finding))
        # without a tokenizer, a common vocabulary size shows the model's needs
        model = make_trained_model(model_args, args, 30_000 if tokenizer is None else tokenizer)
        where = ", with 30,000 tokens" * (tokenizer is None)
        table.add(Check("model", "ok", f"{model.num_parameters():,} parameters{where}, {describe_architecture(model)}"))
        table.add(*check_machine(model.num_parameters(), args))
        if dataset:
            check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))
            contract = make_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging)
    reports, averaging = check_swarm(table, membership, groups, contract)
    if contract and devices:
        with table.attempt("step time"):
            tuned, autocast = tune(model, (tokenizer, dataset, corpus), devices, groups)
            size, count = tuned.per_device_train_batch_size, tuned.gradient_accumulation_steps
            batches = make_train_batches(dataset["train"], tokenizer, data_args, batch_size=size, seed=model_args.seed)
            with stop_when_out_of_memory(args, devices[0], model):
                seconds = count * measure_passes(model, batches, devices[0], autocast)
            batch_size, peers = size * count * len(devices), len(reports) + 1
            table.add(check_step_time(seconds, batch_size))
            speed = batch_size / seconds + sum(report.samples_per_second for report in reports)
            epoch_seconds = averaging.target_batch_size / speed
            table.add(check_epoch_time(epoch_seconds, peers, averaging.matchmaking_time or RoundTimeouts().matchmaking))
            if averaging.bandwidth is not None:  # not measured without a peer
                table.add(check_bandwidth(model.num_parameters(), peers, averaging))
    fatal, warnings = table.levels["fatal"], f"{table.levels['warning']} warning{'s'[: table.levels['warning'] != 1]}"
    if fatal:
        print(f"\n{fatal} fatal, {warnings}: fix the fatal problems before you train")
    else:
        print(f"\nready to train ({warnings})")
    return 2 if fatal else 0


def check_stream(train, tokenizer, data_args: DataArguments) -> Check:
    """Make a first batch in the same way as training, and show it."""
    start = time.monotonic()
    batch = next(iter(make_train_batches(train, tokenizer, data_args, batch_size=8, seed=0)))
    names, length = ", ".join(source.name for source in train.sources), batch["attention_mask"].sum(1).float().mean()
    return Check(
        "sources",
        "ok",
        f"{names}: a first batch of 8 sequences, {length:.0f} tokens on average, in {time.monotonic() - start:.1f} s; "
        f"it begins: {tokenizer.decode(batch['input_ids'][0, :16])}",
    )


def check_swarm(
    table: Table, membership: Membership | None, groups: tuple, contract: RunContract | None
) -> tuple[list[LocalTrainingProgress], AveragingArguments]:
    """Check the connection to the swarm and the swarm's settings.

    :param groups: instances of GROUPS
    :returns: the trainers' reports, and the averaging arguments with the measured bandwidth
    """
    swarm, _, _, averaging, *_ = groups
    reports, prefix = [], swarm.experiment_prefix
    with table.attempt("joining", clock="this machine's clock"):
        config = make_swarm_config(swarm)
        reasons = {} if config.use_ipfs else asyncio.run(explain_unreachable(config.initial_peers, membership))
        is_alone = bool(reasons) and all(reasons.values())  # one peer that answers is enough
        for maddr, reason in reasons.items():
            finding = f"{maddr}: {reason or 'answers, and has the expected id'}"
            table.add(judge("peer", finding, "", is_fatal=is_alone, is_warning=bool(reason)))
        if not config.initial_peers:
            table.add(Check("peer", "ok", "no --initial_peers: this peer starts a new swarm"))
        if is_alone:
            return reports, averaging
        quiet_hivemind_logs()
        validators, public_key = make_validators(prefix, schema=RunSchema)
        dht = start_dht(config, validators, membership, client_mode=config.client_mode)
        averaging = dataclasses.replace(averaging, bandwidth=measure_bandwidth(dht, averaging.bandwidth))
        if config.initial_peers:
            table.add(check_clock(dht.run_coroutine(partial(measure_clock, config.initial_peers))))
            if config.client_mode:
                table.add(Check("connection", "ok", "client mode: others need not reach this peer"))
            else:
                averagers = dht.run_coroutine(partial(count_reachable_averagers, prefix))
                table.add(check_connection(*find_reachability(dht, config.initial_peers), averagers))
        maddrs = [
            maddr for maddr in list_shareable_maddrs(dht.get_visible_maddrs(latest=True)) if not is_relayed(maddr)
        ]
        table.add(check_announced(maddrs, config.initial_peers, config.client_mode))
        reports = list(fetch_progress(dht, prefix).values())
        if contract:
            with table.attempt("settings"):
                dht.attestation = ask_initial_peers(dht, prefix, config.initial_peers, config.new_run)
                place = Swarm(config, dht, public_key)
                require_attested(place, groups)
                is_known = place.compare_contract(contract)
                finding = "the same as the run's" if is_known else "no trainer yet"
                table.add(Check("settings", "ok", finding))
        dht.shutdown()
    return reports, averaging


def format_check(check: Check) -> str:
    """Return `level  what  finding`, and the cure below a problem, wrapped to the terminal's width."""
    color = {"ok": "32", "warning": "33", "fatal": "31"}[check.level] if sys.stdout.isatty() else None
    level = f"\033[{color}m{check.level:<8}\033[0m" if color else f"{check.level:<8}"
    # not wrapped in a file, so that addresses can be copied and searched
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    wrap = partial(textwrap.wrap, width=max(60, width) - 24, break_long_words=False, break_on_hyphens=False)
    lines = wrap(check.finding)
    if check.level != "ok" and check.cure:
        first, *rest = wrap(check.cure)
        lines += [f"-> {first}", *(f"   {line}" for line in rest)]
    return "\n".join(f"{level}{check.what:<15} {line}" if not i else f"{'':24}{line}" for i, line in enumerate(lines))


def warn_of(checks: list[Check]) -> None:
    """Log each problem in one line, or raise a UserError if the disk has no room for a checkpoint."""
    for check in checks:
        if check.what == "disk" and check.level == "fatal":
            raise UserError(f"{check.finding}: {check.cure}")
        if check.level != "ok":
            logger.warning(f"{check.what}: {check.finding}; {check.cure}")


def prepare_start(groups: tuple, model, tokenizer, corpus: dict) -> Path | None:
    """Check a trainer's needs before it joins, lock its folders, and keep its identity there.

    :param groups: instances of GROUPS
    :returns: the state to resume from, if any
    """
    swarm, *_, data_args, args = groups
    check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))
    warn_of(check_machine(model.num_parameters(), args))
    claim_folders(args)
    keep_identity(make_config(SwarmConfig, swarm), Path(args.output_dir) / KEY_FILE)
    return choose_state(args, model, swarm.experiment_prefix)


def tune(model: torch.nn.Module, loaded: tuple, devices: list[torch.device], groups: tuple) -> tuple:
    """Move the model to the first device, and choose its batch size if that is "auto".

    :param loaded: the tokenizer, dataset and corpus of load_data
    :returns: the trainer's arguments with that batch size, and the context for forward passes
    """
    _, model_args, _, averaging, data_args, args = groups
    tokenizer, dataset, corpus = loaded
    make_trial = partial(make_trial_batch, model, dataset["train"], tokenizer, corpus, data_args, model_args.seed)
    with stop_when_out_of_memory(args, devices[0], model):
        autocast, _ = place_model(model, devices[0], args)
        args = tune_to_device(model, make_trial, args, devices[0], autocast, averaging.target_batch_size, len(devices))
    return args, autocast


def main(*groups) -> None:
    """Measure the batch size that suits this machine.

    :param groups: instances of GROUPS
    """
    setup_logging("preflight")
    _, groups = begin(groups)
    _, model_args, *_, data_args, args = groups
    args = dataclasses.replace(args, per_device_train_batch_size="auto")
    tokenizer, dataset, corpus = load_data(model_args, data_args, needs_validation=False)
    model = make_trained_model(model_args, args, tokenizer)
    check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))
    args, _ = tune(model, (tokenizer, dataset, corpus), choose_devices(args), (*groups[:-1], args))
    sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    print("--per_device_train_batch_size {} --gradient_accumulation_steps {}".format(*sizes), flush=True)


if __name__ == "__main__":
    with clean_end():
        main(*groups)
