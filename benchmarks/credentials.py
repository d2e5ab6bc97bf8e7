"""Measure the costs of a closed run: the check of a credential, and its epochs compared with those of an open run.

    python benchmarks/credentials.py
    python benchmarks/credentials.py --pairs 3 --epochs 12

The first command takes a minute. It prints the milliseconds of a ping between two nodes on loopback, in an open and a
closed run, and of the check of a credential, with its signature at the first time. With --pairs, swarms of
benchmarks/attacks.py run without an attacker, open and closed in turn.
"""

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import attacks
import processes
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import PingRequest
from members import make_invitation, run_peer

from swarm.credentials import parse_credential

CALLS = 200


async def time_calls(dht, node, peer: PeerID, is_closed: bool) -> dict[str, list[float]]:
    """Return the milliseconds of each call. Runs in a DHT's process."""
    seconds = {"ping": [], "check": [], "signature": []}

    async def measure(name: str, call) -> None:
        start = time.perf_counter()
        await call()
        seconds[name].append(1e3 * (time.perf_counter() - start))

    async def check() -> None:
        dht.membership.require(dht.membership.credential, dht.peer_id)

    async def verify() -> None:
        parse_credential.__wrapped__(dht.membership.credential, dht.membership.public_key)

    for _ in range(CALLS):
        await measure("ping", lambda: node.protocol.get_stub(peer).rpc_ping(PingRequest()))
        if is_closed:
            await measure("check", check)
            await measure("signature", verify)
    return {name: times for name, times in seconds.items() if times}


def measure_calls() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("open", "closed"):
            key = f"{folder}/authority.pem" if kind == "closed" else None
            with run_peer(f"credentials_{kind}", authority_key=key) as one:
                path = make_invitation(Path(folder), f"credentials_{kind}", "ada") if key else None
                with run_peer(f"credentials_{kind}", one, invite=path) as two:
                    found = two.run_coroutine(partial(time_calls, peer=one.peer_id, is_closed=bool(key)))
            for name, times in found.items():
                low, middle, high = min(times), statistics.median(times), sorted(times)[int(0.9 * len(times))]
                print(
                    f"{kind:6}  {name:9}  median {middle:7.3f} ms, least {low:.3f}, 90 % below {high:.3f}", flush=True
                )


def measure_epochs(args: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="credentials_"))
    (identities := folder / "identities").mkdir()
    processes.IS_FORKING = True
    for number in range(args.pairs):
        for args.closed in (False, True)[:: 1 if number % 2 else -1]:
            course = attacks.run_swarm(args, None, folder / f"{number}{args.closed}", identities, 0.0)
            spans = [seconds for _, seconds in attacks.list_spans(course)]
            kind, rounds = "closed" if args.closed else "open", attacks.count_rounds(course)
            print(f"{kind:6}  {statistics.median(spans):.2f} s an epoch, averaged by all: {rounds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=0, help="pairs of an open and a closed swarm")
    parser.add_argument("--epochs", type=int, default=12, help="epochs of each swarm")
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.set_defaults(attack_after=4)
    args = parser.parse_args()
    measure_epochs(args) if args.pairs else measure_calls()


if __name__ == "__main__":
    main()
