"""Measure the processor time of peers that have nothing to compute: a share of a core for each process of each role.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/idle.py

A monitor, an auxiliary peer with `--assist_in_averaging` and a trainer of the demo model wait for a second trainer,
whose fifth batch takes ten minutes. All are real processes on loopback, and the epoch never ends.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import psutil
from processes import LOOPBACK, Script, make_prefix
from swarms import flags, history, start_monitor

SETTLE = 30.0  # seconds from the first samples of both trainers to the measurement
PACES = {"waiting": "0.1", "slow": "1,1,1,1,600"}  # seconds of the batches, see paced_trainer.py
BATCH_SIZE = 16


def list_processes(script: Script) -> list[psutil.Process]:
    """Return a role's process and its helpers."""
    own = psutil.Process(script.process.pid)
    return [own, *own.children(recursive=True)]


def measure(scripts: dict[str, Script], seconds: float) -> None:
    """Print a row for each process, and one for each role."""
    found = {name: list_processes(script) for name, script in scripts.items()}
    before = {process: sum(process.cpu_times()[:2]) for each in found.values() for process in each}
    time.sleep(seconds)
    print("| role | % of a core | main process | helpers |\n|---|---|---|---|")
    for name, each in found.items():
        own, *helpers = (100 * (sum(process.cpu_times()[:2]) - before[process]) / seconds for process in each)
        texts = [f"{process.name()} {share:.2f}" for process, share in zip(each[1:], helpers, strict=True)]
        print(f"| {name} | {own + sum(helpers):.2f} | {own:.2f} | {', '.join(texts)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the measurement")
    args = parser.parse_args()
    folder, prefix, scripts = Path(tempfile.mkdtemp(prefix="idle_")), make_prefix(), {}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("stopped"))

    def start(name: str, *command: object) -> Script:
        scripts[name] = Script(folder / f"{name}.log", *command)
        return scripts[name]

    try:
        more = "--refresh_period", 30
        _, peers = start_monitor(start, prefix, folder / "monitor", *more)
        swarm = {"--experiment_prefix": prefix, "--initial_peers": peers, "--config_path": "configs/demo.json"}
        swarm |= {"--optim": "adamw", "--learning_rate": 3e-3, "--target_batch_size": 40 * BATCH_SIZE}
        swarm |= {"--tokenizer_path": args.tokenizer_path, "--bandwidth": 100}
        data = {"--dataset_path": args.dataset_path, "--total_steps": 10**6, "--dataloader_num_workers": 0}
        data |= {"--per_device_train_batch_size": BATCH_SIZE, "--gradient_accumulation_steps": 1}
        for name, paces in PACES.items():
            # a peer that looks for a group early leaves no peer without one
            matchmaking = {"--matchmaking_time": 300 if name == "waiting" else 1}
            own = flags(swarm, data, matchmaking, {"--output_dir": folder / name})
            start(name, "benchmarks/paced_trainer.py", paces, *LOOPBACK, *own)
        start("aux", "run_aux_peer.py", *LOOPBACK, *flags(swarm), "--assist_in_averaging")

        scripts["aux"].wait_for("others may join", 120)
        for name in PACES:
            scripts[name].wait_for("first samples computed", 120)
        time.sleep(SETTLE)
        measure(scripts, args.seconds)
        print(f"{len(history(folder, 'waiting'))} epochs passed; logs are in {folder}")
    finally:
        for script in scripts.values():
            helpers = list_processes(script)
            script.kill()
            for process in helpers:
                with contextlib.suppress(psutil.Error):
                    process.kill()


if __name__ == "__main__":
    main()
