"""Simulate which peer sends how much in an exchange of blobs, or measure an exchange over emulated connections.

    python benchmarks/exchange.py
    python benchmarks/exchange.py --measure --loss 0 0.5 2

The first command needs seconds: it applies the rule of swarm/exchange.py to homes with 20 Mbit/s up, with and
without an aux peer of 100 Mbit/s, and prints the bytes up a parameter and round. `seconds` is the time that the
exchange may take, and `busiest` the time that the busiest uplink needs for its bytes. The second one needs root: three
peers exchange blobs of 14 M parameters at 20 Mbit/s and 75 ms (tests/netlab.py).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from collections import Counter

import netlab
from hivemind.p2p import PeerID
from processes import Script, make_prefix

from swarm.exchange import BlobStore, Download, Exchange, plan_loads

MILLIONS, BLOCK_BYTES = 14, 36_650  # a block of 2**20 numbers: 3 %, 2 bits
NUM_BLOCKS = round(MILLIONS * 1e6 / 2**20)
ROUNDS = 5


def make_store(folder: Path) -> BlobStore:
    return BlobStore(folder, 10**9, NUM_BLOCKS, 2 * BLOCK_BYTES, lambda *_: None)


def simulate(homes: int, aux_mbits: float, seconds: float, folder: Path) -> str:
    """Return the row of an exchange of the blobs of all homes, of which each takes the first 16."""
    peers = [PeerID(os.urandom(32)) for _ in range(homes + (aux_mbits > 0))]
    uplinks = {peer: 20.0 for peer in peers[:homes]} | {peer: aux_mbits for peer in peers[homes:]}
    sent: Counter[PeerID] = Counter()
    for owner in peers[:homes][:16]:
        download = Download(b"", owner, NUM_BLOCKS * BLOCK_BYTES, make_store(folder))
        download.uplinks, download.loads = uplinks, plan_loads(uplinks, NUM_BLOCKS * BLOCK_BYTES, seconds)
        for peer in peers:
            for number in range(NUM_BLOCKS):
                if peer != owner:
                    sent[download.list_sources(number, peer)[0]] += BLOCK_BYTES
    per_number = [sent[peer] / (NUM_BLOCKS * 2**20) for peer in peers[:homes]]
    busiest = max(8e-6 * sent[peer] / uplinks[peer] for peer in peers)
    mean = sum(per_number) / homes
    return f"| {homes} | {aux_mbits:g} | {seconds:g} | {mean:.3f} | {max(per_number):.3f} | {busiest:.1f} |"


def write_and_wait(folder: Path, name: str, number: int, content: list[str]) -> list[Path]:
    """Write this peer's file, wait for those of all three peers, and return them."""
    unfinished = folder / f"unfinished{number}"
    unfinished.write_text(json.dumps(content))
    unfinished.rename(folder / f"{name}{number}")
    while len(paths := list(folder.glob(f"{name}*"))) < 3:
        time.sleep(0.005)
    return paths


def run_peer(ip: str, prefix: str, maddrs: list[str], folder: str, number: int) -> None:
    """Exchange a blob with the other peers each time that all have written theirs."""
    from swarm.dht import DHT

    dht = DHT(maddrs, host_maddrs=[f"/ip4/{ip}/tcp/0"], start=True)
    dht.uplink.set_bandwidth(20, is_fixed=True)
    store = make_store(Path(folder, f"store{number}"))
    exchange = Exchange(dht, prefix, lambda *_: b"", store)
    print(json.dumps({"maddr": str(dht.get_visible_maddrs()[0])}), flush=True)
    for turn in range(ROUNDS):
        blob = store.add([os.urandom(BLOCK_BYTES) for _ in range(NUM_BLOCKS)])
        paths = write_and_wait(Path(folder), f"offer{turn}_", number, [str(dht.peer_id), blob.hex()])
        time.sleep(3.0)  # the connections are idle, as after the steps of an epoch
        offers = [json.loads(path.read_text()) for path in sorted(paths)]
        holders = {PeerID.from_base58(peer): 20.0 for peer, _ in offers}
        exchange.participants = exchange.urgent = frozenset(holders)
        start = time.monotonic()
        size = NUM_BLOCKS * BLOCK_BYTES
        futures = []
        for peer, name in offers:
            owner = PeerID.from_base58(peer)
            futures.append(exchange.fetch(bytes.fromhex(name), owner, holders, size, store))
        for future in futures:
            future.result(120)
        print(json.dumps({"turn": turn, "seconds": time.monotonic() - start}), flush=True)
        write_and_wait(Path(folder), f"done{turn}_", number, [])  # an owner that leaves takes its blob with it
    exchange.shutdown()
    dht.shutdown()


def measure(loss: float) -> str:
    """Return the row of three peers: the seconds of the slowest one in each round, in ascending order."""
    scripts: list[Script] = []
    maddrs: list[str] = []
    prefix = make_prefix()
    with netlab.Net("reno") as net, tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            net.host(f"peer{number}", rtt_ms=37.5, up=20, down=20, loss=1 - (1 - loss / 100) ** 0.5)
        net.start()
        for number in range(3):
            options = dict(ip=net.ip(f"peer{number}"), prefix=prefix, maddrs=maddrs, folder=folder, number=number)
            log = Path(folder, f"peer{number}.log")
            scripts.append(Script(log, __file__, "--peer", json.dumps(options), prefix=net.prefix(f"peer{number}")))
            maddrs = [scripts[0].wait_for('"maddr": "(.+)"', 120)[1]]
        for script in scripts:
            script.wait_for(f'"turn": {ROUNDS - 1}', 300)
        turns = zip(*([line["seconds"] for line in s.json_lines() if "turn" in line] for s in scripts), strict=True)
        return f"| {loss:g} % | {', '.join(f'{seconds:.2f}' for seconds in sorted(map(max, turns)))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="on emulated connections, instead of the simulation")
    parser.add_argument("--loss", nargs="+", type=float, default=[0], help="lost packets of each path in percent")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        run_peer(**json.loads(args.peer))
    elif args.measure:
        print("| loss | seconds until all three have all blobs |\n|---|---|")
        for loss in args.loss:
            print(measure(loss), flush=True)
    else:
        print("| homes | aux Mbit/s | seconds | mean | most | busiest s |\n|---|---|---|---|---|---|")
        for homes in (3, 8, 16, 32):
            for aux_mbits, seconds in ((0, 0), (100, 0), (100, 15)):
                with tempfile.TemporaryDirectory() as folder:
                    print(simulate(homes, aux_mbits, seconds, Path(folder)))


if __name__ == "__main__":
    main()
