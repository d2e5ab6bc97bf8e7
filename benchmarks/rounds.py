"""Measure how long peers average gradients over slow connections, compared with the time that the bytes alone take.

    python benchmarks/rounds.py --short
    python benchmarks/rounds.py
    python benchmarks/rounds.py --millions 14 --mbits 20 --rtt_ms 75 --compression float16 --rounds 3
    python benchmarks/rounds.py --mbits 50 --up 10
    python benchmarks/rounds.py --loss 0.5 --blocked udp --congestion bbr
    python benchmarks/rounds.py --short --spell 30

Each peer is a process on an emulated host (tests/netlab.py, needs root) that averages random gradients of a
transformer's shapes; its steps only wait. The first command takes up to five minutes, the second one, with the whole
grid, some hours. Flags that choose a part of the grid take several values each. Columns:
    rounds     those that all peers averaged together, of those that they tried, without the first one
    ping s     longest answer of a peer's DHT to another peer during a round; 30 if there was no answer
    seconds    median over those rounds of the slowest peer's time from the group's formation to the average
    ratio      seconds / ideal; the ideal is 2 V (N - 1) / N bytes at the rate of the slower direction, with N peers and
               V bytes of a gradient as sent. Sparse: of 3 %, as in rounds of local steps
    MB sent    per peer and round by the connection's counter, with headers, retransmissions and the DHT's messages
    CPU        during a round: of the fabric, a process that carries all packets, and of all cores. A star marks a row
               in which one of them was busy for more than 90 %, so that this machine was the bottleneck
With --spell, one peer's connection carries a tenth for these seconds once the rounds are over. A line follows with the
seconds of the joint rounds from then on, and the ratio to the median before.
Rows of 1000 Mbit/s without delay run on loopback, because the fabric is slower; they show this machine's share.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import netlab
import numpy
import psutil
from processes import Script, make_prefix

from swarm.sparse import TopKCompression

SPARSE = TopKCompression(density=0.03)
BYTES_PER_NUMBER = {"none": 4, "float16": 2, "8bit": 1, "sparse": SPARSE.estimate_bytes(1)}
BATCH_SIZE, STEPS_PER_EPOCH = 32, 5
PING_PERIOD, PING_TIMEOUT = 0.5, 30.0
ROUNDS_AFTER_SPELL = 6
TITLES = "million | down / up Mbit/s | RTT ms | loss | sent as | peers | rounds | ping s | seconds | ratio | MB sent"
AXES = {
    "millions": "millions of parameters",
    "mbits": "Mbit/s of each peer's connection, down and up",
    "up": "Mbit/s up, if that differs",
    "rtt_ms": "milliseconds of each path",
    "loss": "lost packets of each path in percent",
    "peers": "each needs 0.5 GB for 1 M parameters, 1.3 GB for 14 M and 4 GB for 60 M",
    "compression": ", ".join(BYTES_PER_NUMBER),
    "step_seconds": "seconds of each step, five of which make an epoch; many peers on few cores need more",
}


@dataclasses.dataclass
class Row:
    """The settings of a row of the table."""

    millions: float = 14
    mbits: float = 20
    up: float | None = None
    rtt_ms: float = 75
    loss: float = 0
    peers: int = 3
    compression: str = "float16"
    step_seconds: float = 1.0

    def __post_init__(self):
        self.up = self.up or self.mbits
        self.is_loopback = min(self.mbits, self.up) >= 1000 and not self.rtt_ms and not self.loss
        sent = 2 * self.millions * 1e6 * BYTES_PER_NUMBER[self.compression] * (self.peers - 1) / self.peers
        if self.compression == "sparse":  # each peer sends its update to all others
            sent *= self.peers / 2
        self.memory_bytes = self.peers * (4e8 + self.millions * 6e7)  # measured: 3.8 GB for each peer of 60 M
        self.ideal_seconds = sent * 8 / 1e6 / min(self.mbits, self.up)


# --- the peer ---------------------------------------------------------------------------------------------------------


def make_shapes(numbers: float) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer with this number of parameters: feed-forward layers and an embedding."""
    width = 1024 if numbers >= 5e6 else 256
    layer = [(4 * width, width), (4 * width,), (width,)]
    count, rest = divmod(int(numbers), 4 * width * width + 5 * width)
    return [(rest // width, width), *(layer * count)]


async def measure_ping(dht, node, peer_id: str) -> float:
    """Return the seconds until this peer answers. Runs in the DHT's process."""
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    start, request = time.monotonic(), dht_pb2.PingRequest(peer=node.protocol.node_info, validate=False)
    with contextlib.suppress(Exception):  # any failure counts as the longest wait
        await node.protocol.get_stub(PeerID.from_base58(peer_id)).rpc_ping(request, timeout=PING_TIMEOUT)
        return time.monotonic() - start
    return PING_TIMEOUT


def watch_pings(dht, optimizer, peer_ids: list[str], pings: list[tuple]) -> None:
    """Ping these peers forever, and append the pings that were sent during a round as (time, future)."""
    seconds = 0.0
    while True:
        time.sleep(PING_PERIOD)
        before, seconds = seconds, optimizer.stats.averaging_seconds
        questions = [partial(measure_ping, peer_id=peer_id) for peer_id in peer_ids]
        futures = [dht.run_coroutine(question, return_future=True) for question in questions]
        if seconds > before:
            pings += [(time.monotonic(), future) for future in futures]


def run_peer(row: Row, ip: str, experiment_prefix: str, initial_peers: list[str], start_file: str) -> None:
    """Average random gradients until stopped; print a JSON line after each round, also a failed one."""
    import torch

    from arguments import AveragingArguments
    from common.console import handle_stop_signals, setup_logging
    from models.state_codecs import COMPRESSIONS, LOAD_STATE_COMPRESSIONS, keep_parameters_exact
    from swarm.config import AveragingConfig, SwarmConfig, make_config
    from swarm.joining import Swarm
    from swarm.optimizer import CollaborativeOptimizer
    from swarm.processes import shut_down

    setup_logging("peer")
    dht = Swarm.join(SwarmConfig(experiment_prefix, initial_peers, host_maddrs=[f"/ip4/{ip}/tcp/0"])).dht
    print(json.dumps({"maddrs": list(map(str, dht.get_visible_maddrs()))}), flush=True)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in make_shapes(row.millions * 1e6)]
    dht.uplink.set_bandwidth(row.up, is_fixed=True)
    is_sparse = row.compression == "sparse"  # as in rounds of local steps
    averaging = make_config(
        AveragingConfig,
        AveragingArguments(),
        target_batch_size=row.peers * (1 if is_sparse else STEPS_PER_EPOCH) * BATCH_SIZE,
        local_steps=STEPS_PER_EPOCH if is_sparse else 1,
        local_steps_from=0,
        batch_size_lead=0,
        target_group_size=row.peers,
        min_vector_size=0,
        average_state_every=10**6,
        min_refresh_period=0.2,
        default_refresh_period=0.3,
        metadata_expiration=60.0,
        robust_averaging="none",
    )
    load_state = LOAD_STATE_COMPRESSIONS["8bit"]
    folder = tempfile.TemporaryDirectory(prefix="log-")
    optimizer = CollaborativeOptimizer(
        dht,
        experiment_prefix,
        averaging,
        params=[{"params": params}],
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        scheduler=partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0),
        folder=Path(folder.name),
        gradients=COMPRESSIONS[row.compression],
        local_steps=SPARSE if is_sparse else None,
        state_averaging=COMPRESSIONS["none"],
        load_state=keep_parameters_exact(load_state) if is_sparse else load_state,
    )
    stop = handle_stop_signals()
    for param in params:
        param.grad = torch.randn_like(param)
    print(json.dumps({"ready": True}), flush=True)
    while not os.path.exists(start_file):  # all start together, so no peer steps alone or downloads a state
        time.sleep(0.1)
    while len(optimizer.tracker.present) < row.peers - 1:
        optimizer.tracker.announce()
        time.sleep(0.3)
    peer_ids = json.loads(Path(start_file).read_text())
    others, pings = [peer_id for peer_id in peer_ids if peer_id != str(dht.peer_id)], []
    threading.Thread(target=watch_pings, args=(dht, optimizer, others, pings), daemon=True).start()

    counts = (0, 0)
    while not stop.wait(row.step_seconds):  # stands for the work of computing a gradient
        optimizer.step(batch_size=BATCH_SIZE)
        if is_sparse:  # a trainer would go on with local steps; here, the wait for the commit is the time of the round
            started, before = time.monotonic(), optimizer.stats.averaging_seconds
            while optimizer.log_steps.rounds.count_pending() and not stop.wait(0.02):
                optimizer.log_steps.follow()
            optimizer.stats.averaging_seconds = before + time.monotonic() - started
        if counts != (counts := (optimizer.stats.succeeded, optimizer.stats.failed)):
            line = {"time": time.time(), "epoch": optimizer.local_epoch, "averaged_with": optimizer.stats.group_size}
            numbers = [
                param.detach().numpy().tobytes() for group in optimizer.opt.param_groups for param in group["params"]
            ]
            line |= {
                "digest": hashlib.sha256(b"".join(numbers)).hexdigest(),
                "rounds": counts[0],
                "failed_rounds": counts[1],
                "round_seconds": {"averaging": optimizer.stats.averaging_seconds},
            }
            # pings without an answer count with their wait so far
            waits = [(future.result() if future.done() else time.monotonic() - sent) for sent, future in pings]
            pings[:] = [(sent, future) for sent, future in pings if not future.done()]
            print(json.dumps(line | {"longest_ping": max(waits, default=0.0)}), flush=True)
    shut_down(dht, optimizer)


# --- the driver -------------------------------------------------------------------------------------------------------


def start_peers(row: Row, net: netlab.Net, folder: Path, scripts: list[Script]) -> None:
    """Start the peers on their hosts, the first one alone, and let them go once all are ready."""
    start_file, prefix, maddrs = folder / "start.json", make_prefix(), []
    for number in range(row.peers):
        host = "loopback" if row.is_loopback else f"peer{number}"
        ip = "127.0.0.1" if row.is_loopback else net.ip(host)
        options = dict(ip=ip, experiment_prefix=prefix, initial_peers=maddrs, start_file=str(start_file))
        command = [__file__, "--peer", json.dumps(dict(row=dataclasses.asdict(row), **options))]
        scripts.append(Script(folder / f"peer{number}.log", *command, prefix=net.prefix(host)))
        if not maddrs:
            maddrs = json.loads(scripts[0].wait_for('"maddrs": (.+)}', 120)[1])
    for script in scripts:
        script.wait_for('"ready"', 180)
    unfinished = folder / "unfinished"
    unfinished.write_text(json.dumps([script.wait_for('"maddrs": .*/p2p/(.+?)"')[1] for script in scripts]))
    unfinished.rename(start_file)


def end_peers(net: netlab.Net, scripts: list[Script]) -> None:
    """Kill all processes except torch's managers of shared memory, which free the memory of the killed ones."""
    for script in scripts:
        script.kill()
        script.wait()
    pids = [netlab.run("ip netns pids", namespace) for namespace in net.namespaces]
    psutil.wait_procs([psutil.Process(int(pid)) for pid in " ".join(pids).split() if psutil.pid_exists(int(pid))], 20)


def read_rounds(script: Script) -> list[dict]:
    """Return the lines that a peer has printed, each with the seconds of averaging since the previous one."""
    lines, before = [line for line in script.json_lines() if "epoch" in line], 0.0
    for line in lines:
        line["seconds"], before = line["round_seconds"]["averaging"] - before, line["round_seconds"]["averaging"]
    return lines


def find_joint_rounds(lines: list[list[dict]], peers: int) -> dict[int, list[dict]]:
    """Return by epoch the lines of all peers about its round, if all averaged it together."""
    averaged = [{line["epoch"]: line for line in each if line["averaged_with"] == peers} for each in lines]
    return {epoch: [each[epoch] for each in averaged] for epoch in sorted(set.intersection(*map(set, averaged)))}


def measure(row: Row, rounds: int, congestion: str, blocked: str, spell: float, folder: Path) -> list[str]:
    """Run the peers of a row, and return its cells."""
    scripts: list[Script] = []
    cpu = []  # the time, and the CPU seconds so far of the fabric and of an average core
    sent, joint = [], {}
    with netlab.Net(congestion) as net, contextlib.ExitStack() as stack:
        stack.callback(end_peers, net, scripts)
        for host in ["loopback"] if row.is_loopback else [f"peer{number}" for number in range(row.peers)]:
            loss = 1 - (1 - row.loss / 100) ** 0.5
            net.host(host, blocked=blocked, rtt_ms=row.rtt_ms / 2, up=row.up, down=row.mbits, loss=loss)
        net.start()
        start_peers(row, net, folder, scripts)
        deadline = time.monotonic() + (rounds + 1) * (60 + (12 if row.loss else 4) * row.ideal_seconds)
        skipped = 2 if row.compression == "sparse" else 1  # a log begins with a dense round, and loads a state
        while len(joint) < rounds + skipped and time.monotonic() < deadline:
            time.sleep(0.1)
            of_fabric, of_all = psutil.Process(net.fabric.pid).cpu_times(), psutil.cpu_times()
            working = sum(of_all[:8]) - of_all.idle - of_all.iowait
            cpu.append((time.time(), of_fabric.user + of_fabric.system, working / os.cpu_count()))
            lines = [read_rounds(script) for script in scripts]
            before, joint = len(joint), find_joint_rounds(lines, row.peers)
            if len(joint) > before:
                sent.append(sum(net.bytes(host)[0] for host in net.hosts))
            if any(script.process.poll() is not None for script in scripts):
                print(f"a peer has ended by itself, see {folder}", file=sys.stderr)
                break
        if spell:
            show_spell(row, net, spell, scripts, joint)
    if skipped == 2:
        joint.pop(next(iter(joint), None), None)
        sent = sent[1:]
        digests = [len({line["digest"] for line in joint[epoch]}) for epoch in joint]
        print(f"epochs in which all peers had the same bits: {digests.count(1)} of {len(digests)}", flush=True)
    return make_cells(row, lines, joint, cpu, sent)


def show_spell(row: Row, net: netlab.Net, seconds: float, scripts: list[Script], joint: dict[int, list[dict]]) -> None:
    """Slow down the first peer's connection for this time, and print the seconds of the following rounds."""
    usual = numpy.median([max(line["seconds"] for line in joint[epoch]) for epoch in list(joint)[1:]])
    net.set("peer0", up=row.up / 10, down=row.mbits / 10)
    time.sleep(seconds)
    net.set("peer0", up=row.up, down=row.mbits)
    deadline, later = time.monotonic() + 20 * usual, []
    while len(later) < ROUNDS_AFTER_SPELL and time.monotonic() < deadline:
        time.sleep(1.0)
        lines = [read_rounds(script) for script in scripts]
        rounds = find_joint_rounds(lines, row.peers)
        later = [max(line["seconds"] for line in rounds[epoch]) for epoch in rounds if epoch not in joint]
    text = ", ".join(f"{each:.1f} s ({each / usual:.2f})" for each in later)
    print(f"after a spell of {seconds:g} s, {sum(line['failed_rounds'] for line in lines[0][-1:])} failed: {text}")


def make_cells(row: Row, lines: list[list[dict]], joint: dict, cpu: list[tuple], sent: list[int]) -> list[str]:
    first, *epochs = joint or [None]
    if joint:  # all rounds after the first one, with the failed ones
        lines = [each[each.index(own) + 1 :] for each, own in zip(lines, joint[first], strict=True)]
    ping = max((line["longest_ping"] for each in lines for line in each), default=0)
    measured = ["-"] * 4
    if epochs:
        slowest = [max(joint[epoch], key=lambda line: line["seconds"]) for epoch in epochs]
        spans = numpy.array([[line["time"] - line["seconds"], line["time"]] for line in slowest])
        seconds, (times, *work) = numpy.diff(spans), zip(*cpu, strict=True)
        loads = [numpy.diff(numpy.interp(spans, times, each)).sum() / seconds.sum() for each in work]
        measured = [
            f"{numpy.median(seconds):.3g}",
            f"{numpy.median(seconds) / row.ideal_seconds:.2f}" + ("*" if max(loads) > 0.9 else ""),
            "-" if row.is_loopback else f"{(sent[-1] - sent[0]) / 1e6 / row.peers / len(epochs):.1f}",
            " / ".join(f"{load:.0%}" for load in loads),
        ]
    return [
        f"{row.millions:g}",
        f"{row.mbits:g} / {row.up:g}{', loopback' * row.is_loopback}",
        f"{row.rtt_ms:g}",
        f"{row.loss:g} %",
        row.compression,
        f"{row.peers}",
        f"{len(epochs)} of {max(map(len, lines))}",
        f"{ping:.1f}",
        *measured,
    ]


def make_rows(chosen: dict[str, list]) -> list[Row]:
    """Return all combinations of these values, with Row's defaults for the rest, or the grid if there are none."""

    def combine(**axes: list) -> list[Row]:
        axes = {"compression": ["float16", "8bit"], **axes}
        return [Row(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]

    if chosen:
        return combine(**chosen)
    grid = combine(millions=[1, 14, 60], mbits=[1000, 100, 20], rtt_ms=[0, 75])
    return [*grid, *combine(peers=[8], mbits=[100, 20]), *combine(mbits=[50], up=[10]), *combine(loss=[0.5])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="only 14 M parameters at 20 Mbit/s and 75 ms")
    for name, text in AXES.items():
        parser.add_argument(f"--{name}", nargs="+", help=text, type={"peers": int, "compression": str}.get(name, float))
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, after the first one")
    parser.add_argument("--congestion", default="reno", help="TCP's congestion control: reno, cubic, bbr")
    parser.add_argument("--blocked", default="", help="udp or tcp, so that peers use the other one; default: QUIC")
    parser.add_argument("--spell", type=float, default=0.0, help="seconds for which one connection carries a tenth")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # the driver starts the peers with it
    args = parser.parse_args()
    if args.peer:
        from common.console import clean_end

        options = json.loads(args.peer)
        with clean_end():
            run_peer(Row(**options.pop("row")), **options)
    if why := netlab.unavailable():
        raise SystemExit(f"no network can be emulated here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    chosen = {name: value for name in AXES if (value := getattr(args, name))}
    rows = make_rows(chosen or ({"mbits": [20]} if args.short else {}))
    folder = Path(tempfile.mkdtemp(prefix="rounds_"))
    print(f"{len(rows)} rows, TCP with {args.congestion}, {os.cpu_count()} cores; logs are in {folder}\n")
    print(f"| {TITLES} | CPU fabric / all |\n{'|---' * 12}|", flush=True)
    for number, row in enumerate(rows):
        if psutil.virtual_memory().available < row.memory_bytes:
            print(f"{row}: left out, it needs {row.memory_bytes / 1e9:.0f} GB of memory", file=sys.stderr)
            continue
        (logs := folder / f"row{number}").mkdir()
        try:
            cells = measure(row, args.rounds, args.congestion, args.blocked, args.spell, logs)
            print(f"| {' | '.join(cells)} |", flush=True)
        except AssertionError as e:  # from Script; the other rows follow
            print(f"{row}: {e}", file=sys.stderr)


if __name__ == "__main__":
    main()
