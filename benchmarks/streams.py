"""Measure how long plain hivemind streams take for the bytes of a round: the lower bound of benchmarks/rounds.py.

    python benchmarks/streams.py
    python benchmarks/streams.py --mbits 1000 --blocked udp --streams 4
    python benchmarks/streams.py --mbits 100 --senders 8

Each of three peers on emulated hosts (tests/netlab.py, needs root) sends to each other one, at the same time, what a
round of `--millions` parameters in float16 sends: parts of 512 kB, answered by as many bytes. Nothing is averaged, and
nothing paced. Columns: the slowest peer's seconds in the first turn, with new connections; their median and maximum in
the five turns that follow; and processor seconds of such a turn: of the fabric that carries all packets, of all p2pd,
and of all Python processes. With --senders, these peers send 4 bytes for each parameter together to one peer of ten
times their rate instead: the lower bound of benchmarks/states.py.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import netlab
import processes
import psutil
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2P, PeerID
from hivemind.utils import as_aiter
from processes import Script

PEERS, TURNS, PART_BYTES = 3, 5, 2**19


async def echo(requests, context):
    """Answer each part at once."""
    async for request in requests:
        yield request


async def send(request, context):
    """Send as many parts as requested."""
    for _ in range(int(request.value)):
        yield BytesValue(value=bytes(PART_BYTES))


async def download(p2p: P2P, peer: PeerID, parts: int) -> None:
    """Request this number of parts from a peer, and wait for them."""
    request = as_aiter(BytesValue(value=str(parts).encode()))
    async for _ in await p2p.iterate_protobuf_handler(peer, "send", request, BytesValue):
        pass


async def exchange(p2p: P2P, peer: PeerID, parts: int) -> None:
    """Send this number of parts to a peer, and wait for its answers."""

    async def make_parts():
        for _ in range(parts):
            yield BytesValue(value=bytes(PART_BYTES))

    async for _ in await p2p.iterate_protobuf_handler(peer, "echo", make_parts(), BytesValue):
        pass


async def run_peer(ip: str, maddrs: list[str], streams: int, size: float, folder: str, role: str) -> None:
    """Serve; at each turn, exchange these bytes with each other peer, or if this is the receiver, download them."""
    from swarm.addresses import add_quic
    from swarm.patches import install

    install()
    addresses = {"initial_peers": add_quic(maddrs), "host_maddrs": add_quic([f"/ip4/{ip}/tcp/0"])}
    p2p = await P2P.create(**{name: value for name, value in addresses.items() if value})
    await p2p.add_protobuf_handler("echo", echo, BytesValue, stream_input=True, stream_output=True)
    await p2p.add_protobuf_handler("send", send, BytesValue, stream_output=True)
    transfer = {"peer": exchange, "receiver": download}.get(role)  # a sender has none
    own = list(map(str, await p2p.get_visible_maddrs()))
    print(json.dumps({"maddrs": own, "id": str(p2p.peer_id)}), flush=True)
    for turn in range(TURNS + 1) if transfer else ():
        while not (start := Path(folder, f"turn{turn}")).exists():
            await asyncio.sleep(0.005)
        others = [PeerID.from_base58(peer) for peer in json.loads(start.read_text()) if peer != str(p2p.peer_id)]
        started, parts = time.monotonic(), round(size / PART_BYTES / streams)
        await asyncio.gather(*(transfer(p2p, peer, parts) for peer in others for _ in range(streams)))
        print(json.dumps({"turn": turn, "seconds": time.monotonic() - started}), flush=True)
    await asyncio.sleep(600)  # the driver kills this process


def count_cpu(net: netlab.Net) -> list[float]:
    """Return the processor seconds so far of the fabric, of all p2pd and of the Python processes."""
    pids = " ".join(netlab.run("ip netns pids", namespace) for namespace in net.namespaces).split()
    seconds = {"fabric": 0.0, "p2pd": 0.0, "python": 0.0}
    for process in [psutil.Process(net.fabric.pid), *map(psutil.Process, map(int, pids))]:
        name = "fabric" if process.pid == net.fabric.pid else "p2pd" if process.name() == "p2pd" else "python"
        seconds[name] += sum(process.cpu_times()[:2])
    return list(seconds.values())


def measure(
    mbits: float, streams: int, millions: float, senders: int, rtt_ms: float, blocked: str, folder: Path
) -> str:
    """Run the peers, and return their row."""
    roles = ["sender"] * senders + ["receiver"] if senders else ["peer"] * PEERS
    size = millions * 1e6 * (4 / senders if senders else 2 / PEERS)
    scripts: list[Script] = []
    with netlab.Net("reno") as net:
        for number, role in enumerate(roles):
            rate = 10 * mbits if role == "receiver" else mbits
            net.host(f"peer{number}", blocked=blocked, rtt_ms=rtt_ms / 2, up=rate, down=rate)
        net.start()
        maddrs: list[str] = []
        for number, role in enumerate(roles):
            host = f"peer{number}"
            options = dict(ip=net.ip(host), maddrs=maddrs, streams=streams, size=size, folder=str(folder), role=role)
            command = [__file__, "--peer", json.dumps(options)]
            scripts.append(Script(folder / f"{host}.log", *command, prefix=net.prefix(host)))
            found = json.loads(scripts[-1].wait_for('"maddrs": (.+?), "id"', 60)[1])
            maddrs = [*maddrs, *found]
        ids = [script.wait_for('"id": "(.+)"')[1] for script in scripts]
        rows = []
        for turn in range(TURNS + 1):
            before = count_cpu(net)
            (folder / "unfinished").write_text(json.dumps(ids))
            (folder / "unfinished").rename(folder / f"turn{turn}")
            for script in scripts[senders:]:
                script.wait_for(f'"turn": {turn},', 120)
            slowest = max(line["seconds"] for s in scripts for line in s.json_lines() if line.get("turn") == turn)
            rows.append([slowest, *(after - start for after, start in zip(count_cpu(net), before, strict=True))])
            time.sleep(3.0)  # the connections are idle, as after the steps of an epoch
        seconds, *cpu = map(list, zip(*rows[1:], strict=True))
    times = rows[0][0], statistics.median(seconds), max(seconds), *map(statistics.mean, cpu)
    cells = [f"{each:.2f}" for each in times]
    transport = {"udp": "TCP", "tcp": "QUIC", "": "QUIC"}[blocked]
    return f"| {mbits:g} | {transport} | {streams} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=14, help="millions of parameters")
    parser.add_argument("--mbits", nargs="+", type=float, default=[100, 1000])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4], help="between each two peers, each way")
    parser.add_argument("--blocked", nargs="+", default=["", "udp"], help="udp for TCP, an empty word for QUIC")
    parser.add_argument("--senders", type=int, default=0, help="peers that send to another one only")
    parser.add_argument("--rtt_ms", type=float, default=75)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        asyncio.run(run_peer(**json.loads(args.peer)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    processes.IS_FORKING = True  # so that the peers share the memory of what they import
    print(f"| Mbit/s | transport | streams | first | seconds | longest | fabric | p2pd | Python |\n{'|---' * 9}|")
    for mbits in args.mbits:
        for blocked in args.blocked:
            for streams in args.streams:
                with tempfile.TemporaryDirectory() as folder:
                    row = measure(mbits, streams, args.millions, args.senders, args.rtt_ms, blocked, Path(folder))
                    print(row, flush=True)


if __name__ == "__main__":
    main()
