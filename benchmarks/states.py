"""Measure how long a new peer downloads the swarm's state from several donors on emulated connections (needs root).

    python benchmarks/states.py

The state is that of AdamW with 14 M parameters, served as by default: parameters in 16 bits, moments in 8. Columns: the
seconds of the download in each of three turns, the bytes that arrived, and the median as a ratio to the time that these
bytes take at the rate of the donors together, or of the new peer if that is lower. CPU: of all cores, meanwhile.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import netlab
import processes
import psutil
from processes import Script, make_prefix

ROWS = [4000, 5000, 4998, 2]  # of 1,000 numbers each
TURNS = 3


def measure(donors: int, up: float, down: float, rtt_ms: float, blocked: str, folder: Path) -> str:
    """Let peers download the state one after the other, and return the row."""
    scripts: list[Script] = []
    with netlab.Net("reno") as net:
        for number in range(donors):
            net.host(f"donor{number}", rtt_ms=rtt_ms / 2, up=up, down=up, blocked=blocked)
        for turn in range(TURNS):
            net.host(f"taker{turn}", rtt_ms=rtt_ms / 2, up=down, down=down, blocked=blocked)
        net.start()
        common = {"prefix": make_prefix(), "rows": ROWS, "codec": "8bit", "mbits": up}

        def start(host: str, **options: object) -> Script:
            words = json.dumps({**common, "ip": net.ip(host), **options})
            command = "-m", "tests.programs.state_peer", words
            scripts.append(Script(folder / f"{host}.log", *command, prefix=net.prefix(host)))
            return scripts[-1]

        def find_maddrs(script: Script) -> list[str]:
            return json.loads(script.wait_for('"maddrs": (.+)}', 180)[1])

        first = find_maddrs(start("donor0", role="donor"))
        others = [start(f"donor{number}", role="donor", maddrs=first) for number in range(1, donors)]
        maddrs = [first[0], *(find_maddrs(script)[0] for script in others)]
        known = [maddr.split("/p2p/")[-1] for maddr in maddrs]
        results = []
        for turn in range(TURNS):
            taker = start(f"taker{turn}", role="taker", maddrs=first, known=known)
            taker.wait_for('"received"', 180)
            psutil.cpu_percent()
            taker.wait_for('"seconds"', 180)
            results.append(taker.json_lines()[-1] | {"cpu": psutil.cpu_percent()})
            taker.wait()
    seconds, size = [result["seconds"] for result in results], results[0]["bytes"]
    ideal = 8e-6 * size / min(donors * up, down)
    texts = ", ".join(f"{each:.2f}" for each in seconds)
    cpu = statistics.mean(result["cpu"] for result in results)
    used = min(len(result["donors"]) for result in results)
    ratio = statistics.median(seconds) / ideal
    return f"| {donors}, used {used} | {up:g} | {down:g} | {texts} | {size / 1e6:.1f} MB | {ratio:.2f} | {cpu:.0f}% |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--donors", type=int, default=8)
    parser.add_argument("--up", type=float, default=100, help="Mbit/s of each donor")
    parser.add_argument("--down", type=float, default=1000, help="Mbit/s of the new peer")
    parser.add_argument("--rtt_ms", type=float, default=75)
    parser.add_argument("--blocked", default="", help="udp or tcp, so that peers use the other one; default: QUIC")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    processes.IS_FORKING = True  # so that the peers share the memory of what they import
    print(f"| donors | up | down | seconds | bytes | ratio | CPU |\n{'|---' * 7}|")
    folder = Path(tempfile.mkdtemp(prefix="states_"))
    print(measure(args.donors, args.up, args.down, args.rtt_ms, args.blocked, folder))
    print(f"logs are in {folder}")


if __name__ == "__main__":
    main()
