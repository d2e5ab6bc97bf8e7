"""Send Ctrl-C to a trainer, a monitor and an auxiliary peer at random moments of their first seconds.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/stop_requests.py --moments 40 --load 4
    python benchmarks/stop_requests.py --moments 200 --roles trainer --helpers 4 --forked

Each moment has a new process, whose group gets SIGINT, as from a terminal. A line is printed for each wrong end (an
exit code other than 0, a traceback, a remaining process, more than 3 s), and a summary. --earliest skips the time in
which Python itself answers SIGINT with a traceback, before the script's first line.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import processes
import psutil
from processes import LOOPBACK, Script, make_prefix, wait_until
from swarms import TRAINER, flags

LIMIT = 3.0  # seconds


@contextlib.contextmanager
def make_load(count: int) -> Iterator[None]:
    """Run this number of busy processes."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()


def stop_at(moment: float, helpers: int, name: str, folder: Path, *command: object) -> tuple[float, list[str]]:
    """Start a script, send Ctrl-C after `moment` seconds or once it has helpers; return the seconds and the faults."""
    script = Script(folder / f"{name}.log", *command)
    try:
        if helpers:
            wait_until(lambda: len(script.processes()) > helpers, 100, f"{helpers} helpers")
        else:
            time.sleep(moment)
        script.interrupt()
        start = time.monotonic()
        code = script.wait(60)
        seconds, wrong = time.monotonic() - start, []
        deadline = time.monotonic() + 1  # torch's manager of shared memory ends by itself
        while script.left_processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        wrong += [f"exit code {code}"] * (code != 0)
        wrong += ["a traceback"] * any(words in script.text for words in ("Traceback", "Exception ignored"))
        wrong += [f"left {line}" for line in script.left_processes()]
        wrong += ["too slow"] * (seconds > LIMIT)
        if wrong:
            wrong.append(f"its log:\n{script.text[-1500:]}")
        return seconds, wrong
    finally:
        script.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=40, help="number of Ctrl-C for each role")
    parser.add_argument("--earliest", type=float, default=0.3, help="seconds after the start")
    parser.add_argument("--latest", type=float, default=10.0, help="seconds after the start")
    parser.add_argument("--helpers", type=int, default=0, help="send Ctrl-C once this number of helpers has started")
    parser.add_argument("--forked", action="store_true", help="start as forks with the imports, as the tests do")
    parser.add_argument("--load", type=int, default=0, help="busy processes next to them")
    parser.add_argument("--roles", nargs="+", default=["trainer", "monitor", "aux"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dataset_path", default="data/dataset")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    args = parser.parse_args()
    processes.IS_FORKING = args.forked
    generator, prefix, failures = random.Random(args.seed), make_prefix(), 0
    tokenizer = ["--tokenizer_path", args.tokenizer_path]
    with tempfile.TemporaryDirectory() as name, make_load(args.load):
        folder = Path(name)
        common = [*LOOPBACK, "--experiment_prefix", prefix]
        host = Script(folder / "host.log", "run_training_monitor.py", *common, "--output_dir", folder / "host")
        try:
            peers = ["--initial_peers", host.wait_for(r"(?m)^--initial_peers (\S+)$", 300)[1]]
            shared = [*common, *peers, "--output_dir"]
            commands = {
                "trainer": ["run_trainer.py", *shared[:-1], *flags(TRAINER), *tokenizer]
                + ["--dataset_path", args.dataset_path, "--output_dir"],
                "monitor": ["run_training_monitor.py", *shared],
                "aux": ["run_aux_peer.py", "--assist_in_averaging", "--config_path", TRAINER["--config_path"]]
                + [*tokenizer, *shared],
            }
            for role in args.roles:
                times = []
                for number in range(args.moments):
                    moment = generator.uniform(args.earliest, args.latest)
                    command = *commands[role], folder / f"{role}{number}"
                    seconds, wrong = stop_at(moment, args.helpers, role, folder, *command)
                    times.append(seconds)
                    failures += bool(wrong)
                    if wrong:
                        when = f"with {args.helpers} helpers" if args.helpers else f"at {moment:.2f} s"
                        print(f"{role}, Ctrl-C {when}, ended after {seconds:.2f} s: {'; '.join(wrong)}")
                late = sum(seconds > LIMIT for seconds in times)
                print(
                    f"{role}: {args.moments} times, {sum(times) / len(times):.2f} s on average, {max(times):.2f} s at "
                    f"most, {late} above {LIMIT:g} s; load average {psutil.getloadavg()[0]:.1f}",
                    flush=True,
                )
        finally:
            host.kill()
    print(f"{failures} of {args.moments * len(args.roles)} did not end well")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
