"""A peer of AdamW on four matrices, of which two are not a whole number of blocks. A donor fills parameters and moments
with known random numbers, and may change one of them or step on; a taker downloads, and says what it has got."""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from hivemind.p2p import PeerID

from common.console import clean_end, handle_stop_signals, setup_logging
from models.state_codecs import LOAD_STATE_COMPRESSIONS
from swarm import state_download
from swarm.optimizer_state import initialize_optimizer_state_, list_params
from swarm.state_server import parse_epochs
from tests.programs.peers import join, list_maddrs, make_state_averager, print_facts, shut_down


def make_optimizer(groups):
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    initialize_optimizer_state_(optimizer)
    return optimizer


def measure_memory(averager):
    """Return the bytes of the averager's process that only it can free."""
    lines = Path(f"/proc/{averager.pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split()[0]: int(line.split()[1]) * 2**10 for line in lines}
    return sizes["Anonymous:"] + sizes["Pss_Shmem:"]


def list_tensors(averager):
    params = list_params(averager.optimizer)
    states = [averager.optimizer.state[param] for param in params]
    return params + [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def select_of_all(groups, witnesses, *more, select=state_download.select_agreed):
    """Select no state before all donors have described theirs: on busy cores, one needs a second more than another."""
    return select(groups, witnesses, *more) if sum(map(len, groups)) >= options["donors"] else []


with clean_end():
    options = json.loads(sys.argv[1])
    if "donors" in options:  # before the averager's process is forked
        state_download.select_agreed = select_of_all
    setup_logging("peer")
    dht = join(options["prefix"], options.get("maddrs", ()), options.get("ip", "127.0.0.1")).dht
    averager = make_state_averager(
        dht,
        options["prefix"],
        *(torch.zeros(rows, 1000) for rows in options.get("rows", (400, 512, 65, 2))),
        optimizer=make_optimizer,
        next_chunk_timeout=5.0,
        state_compression=LOAD_STATE_COMPRESSIONS[options.get("codec", "none")],
    )
    stop, generator = handle_stop_signals(), torch.Generator().manual_seed(0)
    expected = [torch.randn(tensor.shape, generator=generator) for tensor in list_tensors(averager)]
    expected[5::2] = [tensor.square() * 1e-6 for tensor in expected[5::2]]  # of parameters there are four
    if options["role"] == "donor":
        dht.uplink.set_bandwidth(options["mbits"], is_fixed=True)
        torch.manual_seed(os.getpid())
        with torch.no_grad():
            for tensor, numbers in zip(list_tensors(averager), expected, strict=True):
                # as no two peers are alike, even less those of different groups
                tensor.copy_(numbers).mul_(1 + options.get("noise", 1e-6) * torch.rand_like(numbers))
            if "lie" in options:
                list_tensors(averager)[options["lie"]].mul_(-1)
        averager.lineage = options.get("lineage", "common")
        averager.set_epoch(options.get("epoch", 3))
        print_facts(maddrs=list_maddrs(dht))
        sent = 0
        while not stop.wait(0.1):
            if dht.uplink.traffic[0] != sent:
                sent = dht.uplink.traffic[0]
                print_facts(sent=sent)
                if options.get("steps"):
                    with averager.lock_optimizer, torch.no_grad():
                        list_params(averager.optimizer)[0].add_(1)
                        averager.set_epoch(averager.local_epoch + 1)
                        averager.lineage = f"common {averager.local_epoch}"
    else:
        known = [PeerID.from_base58(peer).to_bytes() for peer in options.get("known", [])]
        read_declarations = partial(dht.get, f"{options['prefix']}_state_averager.all_averagers", latest=True)
        while len(parse_epochs(read_declarations(), dht.peer_id.to_bytes())) < options.get("donors", len(known)):
            time.sleep(0.1)
        own, started = {name: options[name] for name in ("is_synchronous",) if name in options}, time.monotonic()
        future = averager.start_download(min_epoch=3, contributors=known, **own)
        while not future.done():
            print_facts(received=averager.download_progress.bytes)
            time.sleep(0.1)
        metadata, tensors = future.result()
        facts = dict(seconds=time.monotonic() - started, donors=metadata["donors"])
        averager.apply_downloaded_state(metadata, tensors)
        progress, tensors = averager.download_progress, list_tensors(averager)
        facts |= dict(epoch=averager.local_epoch, lineage=averager.lineage)
        facts["kept"] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        facts["errors"] = [((a - b).norm() / b.norm()).item() for a, b in zip(tensors, expected, strict=True)]
        facts |= dict(bytes=progress.bytes, numbers=progress.elements)
        if options.get("again"):
            del future, tensors
            before, started = measure_memory(averager), time.monotonic()
            for _ in range(options["again"]):
                averager.start_download(min_epoch=3, contributors=known, **own).result(60)
            while measure_memory(averager) > before + 4e6 and time.monotonic() < started + 60:
                time.sleep(0.1)
            facts["grown"] = measure_memory(averager) - before
        print_facts(**facts)
    shut_down(dht)
