"""Check that trainers average together if they start one after another on a busy machine: one line per swarm.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/starts.py --starts 40 --load 12

A swarm is a monitor and trainers of the demo model with paced batches (paced_trainer.py) and default timeouts, as real
processes on loopback. From its fifth epoch on, each trainer must average with all others. Otherwise the exit code is 1,
and the logs of that swarm are kept.
"""

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import processes
import psutil
from processes import LOOPBACK, Script, make_prefix, wait_until
from swarms import flags, history, start_monitor

BATCH_SIZE, FIRST = 8, 5  # FIRST: the epoch from which on each trainer must be in all rounds


def watch_swarm(args: argparse.Namespace, folder: Path, scripts: list[Script]) -> bool:
    """Run a swarm until each trainer has made its epochs; print and return whether all have averaged together."""

    def start(name: str, *command: object) -> Script:
        scripts.append(Script(folder / f"{name}.log", *command))
        return scripts[-1]

    def list_epochs(name: str) -> list[dict]:
        """Return the epochs of a trainer from its fifth on."""
        return list(history(folder, name).values())[FIRST - 1 :]

    prefix, names = make_prefix(), [f"trainer{number}" for number in range(args.trainers)]
    _, peers = start_monitor(start, prefix, folder / "monitor")
    settings = {
        "--experiment_prefix": prefix,
        "--initial_peers": peers,
        "--config_path": "configs/demo.json",
        "--dataset_path": args.dataset_path,
        "--tokenizer_path": args.tokenizer_path,
        "--optim": "adamw",
        "--learning_rate": 3e-3,
        "--total_steps": 10**6,
        "--per_device_train_batch_size": BATCH_SIZE,
        "--gradient_accumulation_steps": 1,
        "--target_batch_size": BATCH_SIZE * args.batches * args.trainers,
        "--bandwidth": 100,
        "--average_state_every": 5,
        "--dataloader_num_workers": 0,
    }
    for name in names:
        own = flags(settings, {"--output_dir": folder / name})
        start(name, "benchmarks/paced_trainer.py", args.pace, *LOOPBACK, *own)
        time.sleep(args.spread / (args.trainers - 1) * (name != names[-1]))

    def is_over() -> bool:
        has_ended = any(script.process.poll() is not None for script in scripts)
        return has_ended or all(len(list_epochs(name)) >= args.epochs for name in names)

    wait_until(is_over, args.seconds, "all epochs")
    assert all(script.process.poll() is None for script in scripts), "a monitor or trainer has ended"
    counts = {name: [line["averaged_with"] for line in list_epochs(name)] for name in names}
    late = [f"{name} averaged with {own}" for name, own in counts.items() if min(own) < args.trainers]
    longest = max(line["epoch_seconds"] for name in names for line in list_epochs(name))
    print(f"{'; '.join(late) or 'together'}; longest epoch {longest:.1f} s", flush=True)
    return not late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--starts", type=int, default=40, help="swarms")
    parser.add_argument("--load", type=int, default=12, help="busy processes next to them")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--spread", type=float, default=8.0, help="seconds from the first start to the last")
    parser.add_argument("--pace", type=float, default=0.3, help="seconds of a batch")
    parser.add_argument("--batches", type=int, default=8, help="batches of each trainer in an epoch")
    parser.add_argument("--epochs", type=int, default=6, help="checked epochs of each trainer")
    parser.add_argument("--seconds", type=float, default=400.0, help="time limit of a swarm")
    args = parser.parse_args()
    processes.IS_FORKING = True  # otherwise each swarm takes half a minute for imports
    # a shell starts background processes with Ctrl-C ignored
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("stopped"))
    kept, together, scripts = Path(tempfile.mkdtemp(prefix="starts_")), 0, []
    try:
        for _ in range(args.load):
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for number in range(args.starts):
            (folder := kept / str(number)).mkdir()
            is_together = False
            try:
                is_together = watch_swarm(args, folder, scripts)
            except AssertionError as e:  # from wait_until and Script; the other swarms follow
                print(f"{e}, see {folder}", flush=True)
            while scripts:
                scripts[-1].kill()
                scripts.pop().process.wait(10)
            together += is_together
            if is_together:
                shutil.rmtree(folder)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        for script in scripts:
            script.kill()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
    print(f"{together} of {args.starts} swarms averaged together; logs of the others are in {kept}")
    sys.exit(together < args.starts)


if __name__ == "__main__":
    main()
