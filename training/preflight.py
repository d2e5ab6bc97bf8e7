"""The preflight: the start of a trainer up to its first step, with its results as a table.

    python run_trainer.py --preflight --initial_peers 203.0.113.1:8080

Each problem has a hint. The exit code is 2 if a problem is fatal, 130 after Ctrl-C, otherwise 0. The preflight joins
the run's DHT like any peer, but publishes and saves nothing. A trainer runs the quick checks at its start too.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch

from common.console import format_bytes, format_count, format_number, print_line
from experiment.data import load_data
from experiment.optimizer import make_contract
from models.build import describe_architecture, find_longest_sequence
from models.state_codecs import COMPRESSIONS
from swarm.addresses import is_relayed
from swarm.allreduce import count_bits
from swarm.config import AveragingConfig, make_config
from swarm.joining import Swarm
from swarm.membership import Membership
from swarm.reachability import find_direct_peers, find_reachability
from swarm.uplink import Uplink
from text.batches import check_data_arguments
from text.tokenizers import tokenizer_fingerprint
from training.checks import Check, check_epoch_time, check_machine, check_step_time
from training.devices import choose_devices, measure_step, try_device
from training.figures import fetch_progress
from training.model import make_trainable_model
from training.page_client import warn_of_local_addresses
from training.ranks import list_trained
from training.settings import make_swarm_config, require_attested


def check_connection(maddrs: list[str], seen_at: list[str], is_reachable: bool | None, is_client: bool) -> Check:
    """Check that other peers can connect to this one at these addresses, which are those of relays if it needs them. It
    may have joined in client mode because they cannot."""
    where = " and ".join(seen_at)
    if not is_client and all(map(is_relayed, maddrs)):
        return Check("connection", f"others reach this peer through a relay: {maddrs[0]}")
    if is_reachable:
        return Check("connection", f"others reach this peer at {where}")
    hint = "behind a firewall: open a port and name it in --host_maddrs"
    message = "no peer could test whether others can reach this one"
    if is_reachable is False:
        message = f"others cannot reach this peer at {where}: it joins {'in client mode' if is_client else 'anyway'}"
    return Check("connection", message, hint, "warning")


def check_bandwidth(model: torch.nn.Module, averaging: AveragingConfig, uplink: Uplink) -> Check:
    """Show the time of a round in a large group (see CollaborativeOptimizer)."""
    bits = 2 * count_bits(list_trained(model), COMPRESSIONS[averaging.compression])
    seconds = bits / (uplink.mbits * 1e6)
    uplink.fix_timeouts(averaging)
    size = format_bytes(bits / 8)
    rate = f"{format_number(uplink.mbits)} Mbit/s (--bandwidth)"
    return Check("bandwidth", f"a round of gradients moves up to {size} each way, about {seconds:.1f} s at {rate}")


def run_preflight(membership: Membership | None, groups: tuple) -> int:
    """Print all checks, and return the exit code. The first error that would end a trainer ends the preflight too."""
    swarm_args, model_args, optimizer_args, averaging, data_args, args = groups
    levels = Counter()

    def show(*checks: Check) -> None:
        for check in checks:
            levels[check.level] += 1
            print_line(str(check))

    print_line(f"preflight of run {swarm_args.experiment_prefix}\n")
    devices = choose_devices(args)
    show(Check("device", ", ".join(map(str, devices))))
    tokenizer, dataset, corpus = load_data(model_args, data_args, args.do_eval)
    show(Check("tokenizer", f"{len(tokenizer):,} tokens in {tokenizer.name_or_path}"))
    for name, split in dataset.items():
        is_stream = data_args.streaming and name == "train"
        size = ", ".join(source.name for source in split.sources) if is_stream else f"{len(split):,} sequences"
        show(Check("dataset", f"{size} for {name}"))
    model = make_trainable_model(model_args, args, tokenizer)
    show(Check("model", f"{model.num_parameters():,} parameters, {describe_architecture(model)}"))
    show(*check_machine(model, args, averaging.local_steps))
    check_data_arguments(data_args, tokenizer, corpus, find_longest_sequence(model))

    swarm = Swarm.join(make_swarm_config(swarm_args), membership)
    swarm.measure_bandwidth(averaging.bandwidth)
    show(*check_swarm(swarm))
    require_attested(swarm, groups)
    contract = make_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging)
    is_known = swarm.compare_contract(contract)
    show(Check("settings", "the same as the run's" if is_known else "no trainer yet"))
    show(check_bandwidth(model, make_config(AveragingConfig, averaging), swarm.dht.uplink))

    for device in devices:
        try_device(device)
    if not args.sharded:  # the first device alone may be too small
        seconds, samples = measure_step(model, (tokenizer, dataset, corpus), devices, groups)
        show(check_step_time(seconds, samples))
        reports = fetch_progress(swarm.dht, swarm.prefix).values()
        speed = samples / seconds + sum(report.samples_per_second for report in reports)
        matchmaking_time = swarm.dht.uplink.timeouts.matchmaking
        # of a dense round: on the log, no group has to form
        show(check_epoch_time(averaging.target_batch_size / speed, len(reports) + 1, matchmaking_time))
    swarm.leave()
    warnings = format_count(levels["warning"], "warning")
    if levels["fatal"]:
        print_line(f"\n{levels['fatal']} fatal, {warnings}: fix the fatal problems before you train")
        return 2
    print_line(f"\nready to train ({warnings})")
    return 0


def check_swarm(swarm: Swarm) -> Iterator[Check]:
    """Check the connections with the swarm that this peer has joined."""
    dht = swarm.dht
    initial_peers = swarm.config.initial_peers
    if not initial_peers:
        yield Check("peer", "no --initial_peers: this peer starts a new swarm")
    else:
        answering = dht.run_coroutine(partial(find_direct_peers, initial_peers))
        message = f"{len(answering)} of {len(initial_peers)} initial peers can be reached directly"
        yield Check("peer", message, level="ok" if len(answering) == len(initial_peers) else "warning")
    if swarm.config.client_mode:
        yield Check("connection", "client mode: others need not reach this peer")
    elif initial_peers:
        yield check_connection(swarm.list_maddrs(), *find_reachability(dht), dht.client_mode)
    warn_of_local_addresses(swarm)
    yield Check("own addresses", "none: client mode" if dht.client_mode else " ".join(swarm.list_maddrs()[:3]))
