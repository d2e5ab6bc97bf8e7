"""Measure the matchmaking of many light peers on home connections, of which one dies and one joins now and then.

    python benchmarks/many.py --peers 4 8 16 --epochs 20

Each peer is a process on an emulated host (tests/netlab.py, needs root) of 20 Mbit/s and 75 ms with a model of 20,000
numbers, whose batches only wait. Timeouts are the defaults. Columns, of the epochs after the second one:
    by all     epochs that all peers averaged together, of those in which no peer joined or died; and of the others
    form s     from the last peer's wait for a group until all are in it: median, 90 %, longest
    DHT/s      lookups and stores that a peer's DHT node serves in a second; it sends as many on average
    CPU        share of a core of a peer with its helpers; of this machine, with the fabric that carries all packets
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial, wraps
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import netlab
import numpy
import processes
import psutil
from processes import Script, make_prefix, wait_until

NUMBERS, BATCH_SIZE, STEP_SECONDS, STEPS_PER_EPOCH = 20_000, 16, 1.0, 10
START_TIMEOUT = 180.0  # seconds


# --- the peer ---------------------------------------------------------------------------------------------------------


def count_messages() -> multiprocessing.Value:
    """Return a counter of lookups and stores that the DHT's process of this program, which starts later, will serve."""
    from hivemind.dht.protocol import DHTProtocol

    counter = multiprocessing.Value("q")

    def count(serve):
        @wraps(serve)
        async def count_and_serve(self, request, context):
            with counter.get_lock():
                counter.value += 1
            return await serve(self, request, context)

        return count_and_serve

    for name in ("rpc_find", "rpc_store"):  # each of them calls rpc_ping itself
        setattr(DHTProtocol, name, count(getattr(DHTProtocol, name)))
    return counter


def run_peer(ip: str, prefix: str, maddrs: list[str], peers: int) -> None:
    """Train with gradients of zero until stopped, and print a JSON line after each round."""
    import torch

    from arguments import AveragingArguments
    from common.console import handle_stop_signals, setup_logging
    from models.state_codecs import COMPRESSIONS, LOAD_STATE_COMPRESSIONS
    from swarm.config import AveragingConfig, SwarmConfig, make_config
    from swarm.joining import Swarm
    from swarm.optimizer import CollaborativeOptimizer
    from swarm.processes import shut_down

    setup_logging("peer")
    counter = count_messages()
    swarm = Swarm.join(SwarmConfig(prefix, maddrs, host_maddrs=[f"/ip4/{ip}/tcp/0"]))
    swarm.dht.uplink.set_bandwidth(20, is_fixed=True)
    parameter = torch.nn.Parameter(torch.zeros(NUMBERS))
    target = peers * STEPS_PER_EPOCH * BATCH_SIZE
    optimizer = CollaborativeOptimizer(
        swarm.dht,
        prefix,
        make_config(AveragingConfig, AveragingArguments(), target_batch_size=target),
        params=[{"params": [parameter]}],
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        scheduler=partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0),
        gradients=COMPRESSIONS["float16"],
        state_averaging=COMPRESSIONS["none"],
        load_state=LOAD_STATE_COMPRESSIONS["8bit"],
    )
    parameter.grad = torch.randn(NUMBERS)
    stop, stats, before = handle_stop_signals(), optimizer.stats, (0.0, 0.0, 0)
    print(json.dumps({"maddrs": list(map(str, swarm.dht.get_visible_maddrs()))}), flush=True)
    while not stop.wait(STEP_SECONDS * random.uniform(0.8, 1.2)):
        optimizer.step(batch_size=BATCH_SIZE)
        counts = stats.matchmaking_seconds, stats.averaging_seconds, stats.succeeded + stats.failed
        if counts[2] > before[2]:
            searched, averaged = counts[0] - before[0], counts[1] - before[1]
            line = {"time": time.time(), "epoch": optimizer.local_epoch, "searched": searched, "averaged": averaged}
            print(json.dumps(line | {"group": stats.group_size, "messages": counter.value}), flush=True)
            before = counts
    shut_down(swarm.dht, optimizer)


# --- the driver -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Peer:
    """A peer's process, and when it joined and died."""

    script: Script
    joined: float = numpy.inf
    died: float = numpy.inf

    def count_cpu(self) -> float:
        """Return the processor seconds so far, helpers included."""
        own = psutil.Process(self.script.process.pid)
        return sum(sum(process.cpu_times()[:2]) for process in [own, *own.children(recursive=True)])


def run_swarm(count: int, epochs: int, churn: float, folder: Path) -> str:
    """Run a swarm of this size, and return its row."""
    peers: list[Peer] = []
    with netlab.Net("reno") as net:
        for number in range(count):
            net.host(f"peer{number}", rtt_ms=37.5, up=20, down=20)
        net.start()
        prefix, maddrs = make_prefix(), []

        def start(host: str) -> Peer:
            options = dict(ip=net.ip(host), prefix=prefix, maddrs=maddrs, peers=count)
            log = folder / f"{host}_{len(peers)}.log"
            peers.append(Peer(Script(log, __file__, "--peer", json.dumps(options), prefix=net.prefix(host))))
            return peers[-1]

        try:
            for number in range(count):
                # one after the other, because 16 starts at once take two cores a minute
                joined = start(f"peer{number}").script.wait_for('"maddrs": (.+)}', START_TIMEOUT)
                maddrs = maddrs or json.loads(joined[1])
            wait_until(lambda: len(read_lines(peers[0])) >= 2, 240, "two epochs")
            began, cpu = time.time(), [peer.count_cpu() for peer in peers]
            busy = psutil.cpu_times()
            first, next_change = len(read_lines(peers[0])), began + churn
            while len(read_lines(peers[0])) < first + epochs:
                time.sleep(0.2)
                assert peers[0].script.process.poll() is None, f"the first peer has ended, see {folder}"
                if time.time() > next_change:
                    next_change += churn
                    host = f"peer{random.randrange(1, count)}"
                    victim = next(peer for peer in reversed(peers) if f"/{host}_" in str(peer.script.log))
                    victim.died = time.time()
                    victim.script.kill()
                    start(host)
            seconds, now = time.time() - began, psutil.cpu_times()
            share = 1 - (now.idle + now.iowait - busy.idle - busy.iowait) / seconds / os.cpu_count()
            alive = [(p, used) for p, used in zip(peers, cpu, strict=False) if p.died == numpy.inf]
            used = numpy.mean([peer.count_cpu() - before for peer, before in alive]) / seconds
        finally:
            for peer in peers:
                peer.script.kill()
    return make_row(count, peers, began, f"{used:.1%}, {share:.0%}")


def read_lines(peer: Peer) -> list[dict]:
    """Return the peer's lines about rounds that succeeded."""
    return [line for line in peer.script.json_lines() if line.get("group", 1) > 1]


def make_row(count: int, peers: list[Peer], began: float, cpu: str) -> str:
    """Return the cells of a swarm, from the lines of its peers since this time."""
    by_peer = [{line["epoch"]: line for line in read_lines(peer)} for peer in peers]
    for peer, lines in zip(peers, by_peer, strict=True):
        peer.joined = min((line["time"] for line in lines.values()), default=numpy.inf)
    quiet, changed, forming = [], [], []
    for epoch, line in by_peer[0].items():
        if line["time"] < began:
            continue
        end = line["time"]
        start = by_peer[0].get(epoch - 1, {"time": end - STEPS_PER_EPOCH * STEP_SECONDS})["time"]
        there = [number for number, peer in enumerate(peers) if peer.joined < end and peer.died > end]
        members = [by_peer[number][epoch] for number in there if epoch in by_peer[number]]
        is_quiet = not any(start - 10 < moment < end for peer in peers for moment in (peer.joined, peer.died))
        is_by_all = len(members) == len(there) and all(each["group"] >= len(there) for each in members)
        (quiet if is_quiet else changed).append(is_by_all)
        formed = max(each["time"] - each["averaged"] for each in members)
        forming.append(formed - max(each["time"] - each["averaged"] - each["searched"] for each in members))
    rates = []
    for lines in by_peer:
        ordered = sorted((line for line in lines.values() if line["time"] > began), key=lambda line: line["time"])
        if len(ordered) > 1:
            first, last = ordered[0], ordered[-1]
            rates.append((last["messages"] - first["messages"]) / (last["time"] - first["time"]))
    times = " / ".join(f"{numpy.quantile(forming, share):.1f}" for share in (0.5, 0.9, 1.0))
    shares = f"{sum(quiet)} of {len(quiet)}; {sum(changed)} of {len(changed)}"
    return f"| {count} | {shares} | {times} | {numpy.mean(rates):.1f} | {cpu} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--epochs", type=int, default=20, help="epochs that count")
    parser.add_argument("--churn", type=float, default=60.0, help="seconds between two deaths, each with a new peer")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        from common.console import clean_end

        with clean_end():
            run_peer(**json.loads(args.peer))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    processes.IS_FORKING = True  # so that the peers share the memory of what they import
    print(f"| peers | by all: quiet; others | form s | DHT/s | CPU |\n{'|---' * 5}|", flush=True)
    for count in args.peers:
        folder = Path(tempfile.mkdtemp(prefix="many_"))
        print(f"{count} peers: logs are in {folder}", file=sys.stderr)
        print(run_swarm(count, args.epochs, args.churn, folder), flush=True)


if __name__ == "__main__":
    main()
