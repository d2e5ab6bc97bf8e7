"""Measure samples per second: a swarm of one and a plain PyTorch loop, two trainers and one, and a late joiner's start.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/throughput.py --pairs 3 --seconds 30

All run the demo's model and batches, as processes with OMP_NUM_THREADS=1, in turn: plain loop, swarm of one, swarm of
two. Rates are taken between the first and the last joint epoch, without start-up. It takes (start-up + seconds) x 3 x
pairs, and prints each run, then the medians of the ratios.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
BATCH_SIZE = 64
TRAINER = (
    "--config_path configs/demo.json --optim adamw --learning_rate 3e-3 --warmup_steps 15 --total_steps 100000 "
    f"--per_device_train_batch_size {BATCH_SIZE} --gradient_accumulation_steps 1 --matchmaking_time 2 "
    "--average_state_every 4 --target_group_size 2 --dataloader_num_workers 0 --host_maddrs /ip4/127.0.0.1/tcp/0"
).split()


def run_plain_loop(args: argparse.Namespace) -> None:
    """Train the same model without hivemind, and print the samples per second."""
    import torch

    from arguments import DataArguments, ModelArguments, OptimizerArguments
    from experiment.data import make_train_batches
    from experiment.model import make_model
    from experiment.objectives import compute_losses
    from experiment.optimizer import make_local_optimizer, make_param_groups, make_scheduler
    from text.stored import load_tokenized_dataset
    from text.tokenizers import load_tokenizer
    from training.model import move_batch

    tokenizer = load_tokenizer(args.tokenizer_path)
    dataset, _ = load_tokenized_dataset(args.dataset_path, tokenizer)
    model = make_model(ModelArguments(config_path="configs/demo.json"), len(tokenizer)).train()
    options = OptimizerArguments(optim="adamw", learning_rate=3e-3, warmup_steps=15)
    optimizer = make_local_optimizer(options, make_param_groups(model))
    scheduler = make_scheduler(options, optimizer)
    batches = make_train_batches(dataset["train"], tokenizer, DataArguments(), batch_size=BATCH_SIZE, seed=1)
    samples = start = 0
    for number, batch in enumerate(batches, start=1):
        loss = compute_losses(model, move_batch(batch, torch.device("cpu")))["loss"]
        (loss * BATCH_SIZE / args.target_batch_size).backward()
        samples += BATCH_SIZE
        if number % (args.target_batch_size // BATCH_SIZE) == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not start:
                samples, start = 0, time.monotonic()
            elif time.monotonic() - start >= args.seconds:
                break
    print(samples / (time.monotonic() - start))


def start_trainer(args, prefix: str, folder: Path, peers: list[str], target_batch_size: int):
    """Start a trainer as users do; its output goes to folder/log."""
    folder.mkdir()
    command = [sys.executable, "run_trainer.py", *TRAINER, "--experiment_prefix", prefix]
    command += ["--target_batch_size", str(target_batch_size), "--output_dir", str(folder)]
    command += ["--dataset_path", args.dataset_path, "--tokenizer_path", args.tokenizer_path]
    command += ["--initial_peers", *peers] if peers else []
    with open(folder / "log", "w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def wait_for(pattern: str, path: Path, process: subprocess.Popen, seconds: float = 120) -> re.Match:
    deadline = time.monotonic() + seconds
    while not (match := re.search(pattern, path.read_text() if path.exists() else "")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no {pattern!r} in {path}:\n{path.read_text()[-2000:]}")
        time.sleep(0.1)
    return match


def run_swarm(args, trainers: int) -> tuple[float, float]:
    """Return the samples per second of a swarm, and the seconds from a late joiner's start to its first samples."""
    prefix = f"benchmark_{uuid.uuid4().hex[:8]}"
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    monitor_log = folder / "monitor.log"
    with open(monitor_log, "w") as log:
        command = [sys.executable, "run_training_monitor.py", "--experiment_prefix", prefix]
        command += ["--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--output_dir", str(folder / "monitor")]
        monitor = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    peers = [wait_for(r"--initial_peers (/ip4\S+)", monitor_log, monitor).group(1)]
    processes, first_contribution = [], 0.0
    for number in range(trainers):
        process = start_trainer(args, prefix, folder / f"{number}", peers, args.target_batch_size * trainers)
        processes.append(process)
        match = wait_for(r"first samples computed ([\d.]+) s", folder / f"{number}" / "log", process)
        first_contribution = float(match.group(1))
    begin = time.time()
    time.sleep(args.seconds + args.target_batch_size / 200)
    for process in [*processes, monitor]:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    epochs = {}
    for number in range(trainers):
        for line in (folder / f"{number}" / "history.jsonl").read_text().splitlines():
            line = json.loads(line)
            epochs.setdefault(line["epoch"], []).append(line)
    joint = [lines for _, lines in sorted(epochs.items()) if len(lines) == trainers and lines[0]["time"] > begin]
    assert all(line["averaged_with"] == trainers for lines in joint for line in lines), "not all epochs were averaged"
    samples = sum(line["samples_accumulated"] for lines in joint[1:] for line in lines)
    seconds = joint[-1][0]["time"] - joint[0][0]["time"]
    print(f"  swarm of {trainers}: {len(joint) - 1} epochs of {seconds / (len(joint) - 1):.1f} s", flush=True)
    return samples / seconds, first_contribution


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="minimum time of each measurement")
    parser.add_argument("--target_batch_size", type=int, default=2560, help="per trainer; 2560 take 10 s of a core")
    parser.add_argument("--plain_loop", action="store_true", help="run only the plain loop, once")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    if args.plain_loop:
        run_plain_loop(args)
        return
    rows = []
    for number in range(args.pairs):
        command = [sys.executable, __file__, *sys.argv[1:], "--plain_loop"]
        plain = float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        one, _ = run_swarm(args, 1)
        two, join_seconds = run_swarm(args, 2)
        rows.append((one / plain, two / one, join_seconds))
        print(
            f"run {number + 1}: plain loop {plain:.0f}, swarm of one {one:.0f} ({one / plain:.3f}), swarm of two "
            f"{two:.0f} samples/s ({two / one:.2f}); the second joined in {join_seconds:.1f} s",
            flush=True,
        )
    ratios = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"median: one / plain {ratios[0]:.3f}, two / one {ratios[1]:.2f}, joining {ratios[2]:.1f} s")


if __name__ == "__main__":
    main()
