#!/usr/bin/env python
"""The demo: a monitor and two trainers, each a process of this machine, train one model of English.

    make demo

or, with everything installed, `python demo.py`. With --clients neither trainer accepts a connection, and an auxiliary
peer averages for them. With --config_path configs/lean-demo.json they train a LeanALBERT; with configs/gpt-demo.json a
causal model, by Muon. The demo only starts the project's scripts and reads their output. It prints each command, and
you can run it yourself. It ends after two to three minutes on two cores. All files are in --output_dir.
Exit code 0: the peers averaged and learned more than word frequencies; 1: they did not, or something failed; 2: a flag
is wrong; 130: Ctrl-C, which leaves no process.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from common.console import UserError, clean_end, format_clock, format_epoch
from common.files import lock_folder, read_json_lines
from common.signals import LAST_ACT

ROOT = Path(__file__).resolve().parent
TRAINERS = ("trainer1", "trainer2")
TOKENIZE = "tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64"
HERE = "--experiment_prefix demo --host_maddrs /ip4/127.0.0.1/tcp/0"
MONITOR = f"run_training_monitor.py {HERE} --refresh_period 2 --status_port 0"
# A group of two is full, and averages at once. AdamW has a high rate; the real run's LAMB needs larger batches and
# thousands of epochs.
ADAMW = "--optim adamw --learning_rate 3e-3"
MUON = "--optim muon --learning_rate 6e-3"
SHARED = (
    f"{ADAMW} --warmup_steps 15 --target_batch_size 512 "
    "--matchmaking_time 2 --target_group_size 2 --average_state_every 16"
)
TRAINER = (
    f"run_trainer.py {HERE} {SHARED} --per_device_train_batch_size 64 --gradient_accumulation_steps 1 "
    "--dataloader_num_workers 0 --do_eval --max_eval_samples 512 --eval_steps 32"
)
AUX_PEER = f"run_aux_peer.py {HERE} {SHARED} --refresh_period 2 --status_port 0 --assist_in_averaging"
CAUSAL = "configs/gpt-demo.json"  # this model predicts the next token
CONFIGS = ("configs/demo.json", "configs/lean-demo.json", CAUSAL)
# Two trainers share the cores. On a GPU, epochs of this small model would end faster than peers can find each other.
TRAINER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

STALL_LIMIT = 180.0  # seconds; the demo fails after this time without a new epoch
# the first peer's output about joining, and about its status page
JOIN = r"--initial_peers .+$"
PAGE = r"status page: http://\S+:(\d+)/"
STOP_LIMIT = 20.0  # seconds; time for the first peer to stop after Ctrl-C
SAME_GRADIENT = 1e-3  # relative difference of gradient norms; each peer's own gradient differs by several per cent
SAME_WEIGHTS = 1e-6


class DemoError(Exception):
    """The error that the demo has failed, as opposed to a wrong flag."""


class Scripts:
    """The running scripts, each with its own session and log. `clean_end` ends those that still run."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self.running: dict[str, subprocess.Popen] = {}

    def start(self, name: str, what: str, command: str, is_shown: bool = True, **environment: str) -> None:
        """Print and start `python {command}`; its output goes to {name}.log."""
        print(f"\n{what} (log: {self.log(name)})" if is_shown else f"\n{what}", flush=True)
        if is_shown:
            words = [*map("=".join, environment.items()), os.path.relpath(sys.executable), command]
            print("  " + " \\\n      ".join(textwrap.wrap(" ".join(words), 105, break_on_hyphens=False)), flush=True)
        with open(self.log(name), "w") as log, LAST_ACT:  # a signal waits until the script is a process
            self.running[name] = subprocess.Popen(
                [sys.executable, *shlex.split(command)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C of a terminal reaches only the demo
            )

    def log(self, name: str) -> Path:
        """Return the path of a script's log."""
        return self.output_dir / f"{name}.log"

    def has_ended(self, name: str) -> bool:
        """Return whether the script has ended; raise a DemoError if it failed."""
        with LAST_ACT:  # a script that a signal to the demo ends has not failed
            code = self.running[name].poll()
        if code:
            lines = self.log(name).read_text(errors="replace").strip().splitlines() or ["(it printed nothing)"]
            how = f"with exit code {code}" if code > 0 else f"by signal {signal.Signals(-code).name}"
            raise DemoError(f"{name} ended {how}, see {self.log(name)}; its last line: {lines[-1].strip()}")
        return code == 0

    def wait(self, name: str, seconds: float) -> None:
        """Wait until the script has ended."""
        deadline = time.monotonic() + seconds
        while not self.has_ended(name):
            if time.monotonic() > deadline:
                raise DemoError(f"{name} did not end within {seconds:g} s, see {self.log(name)}")
            time.sleep(0.1)

    def interrupt(self, name: str) -> None:
        """Send Ctrl-C to the script and to its child processes, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, signal.SIGINT)


def clear_folder(folder: Path) -> None:
    """Remove the results of an earlier demo, or raise a UserError if these are files of something else."""
    found = [path for path in folder.iterdir() if path.name != ".lock"]
    if found and not (folder / "tokenize.log").exists():
        raise UserError(f"--output_dir {folder} has other files, such as {found[0].name}: give a new folder")
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def tokenize(scripts: Scripts, data: Path, is_causal: bool) -> str:
    """Tokenize the sample, and return the flags with the paths of the data."""
    flags = f"--dataset_path {shlex.quote(f'{data}/dataset')} --tokenizer_path {shlex.quote(f'{data}/tokenizer')}"
    command = f"{TOKENIZE} --objective clm {flags}" if is_causal else f"{TOKENIZE} {flags}"
    scripts.start("tokenize", "Tokenize the sample corpus, six novels by Jane Austen", command)
    scripts.wait("tokenize", STALL_LIMIT)
    return flags


def start_first_peer(scripts: Scripts, what: str, command: str, folder: Path) -> str:
    """Start the monitor, or the auxiliary peer instead, and return the --initial_peers flag for the others."""
    scripts.start("monitor", what, f"{command} --output_dir {shlex.quote(str(folder))}")
    deadline = time.monotonic() + STALL_LIMIT
    text = ""
    while not all(found := [re.search(pattern, text, re.MULTILINE) for pattern in (JOIN, PAGE)]):
        if scripts.has_ended("monitor") or time.monotonic() > deadline:
            raise DemoError(f"the first peer gave no address to join, see {scripts.log('monitor')}")
        time.sleep(0.1)
        text = scripts.log("monitor").read_text()
    join, page = found
    print(f"\nThe status page, until the run ends: http://127.0.0.1:{page[1]}")
    return join.group()


def watch(scripts: Scripts, metrics_file: Path, start_time: float) -> None:
    """Print the progress every ten seconds until both trainers have ended."""
    epoch = 0
    last_change = time.monotonic()
    next_time = 0.0
    while not all([scripts.has_ended(name) for name in TRAINERS]):
        if scripts.has_ended("monitor"):
            raise DemoError(f"the first peer ended before the trainers did, see {scripts.log('monitor')}")
        metrics = list(read_json_lines(metrics_file))
        if metrics and metrics[-1]["epoch"] != epoch:
            epoch = metrics[-1]["epoch"]
            last_change = time.monotonic()
        if time.monotonic() >= next_time:
            next_time = time.monotonic() + 10
            elapsed = format_clock(time.monotonic() - start_time)
            print(format_epoch(metrics[-1]) if metrics else f"the trainers start, {elapsed} elapsed", flush=True)
        if time.monotonic() - last_change > STALL_LIMIT:
            logs = " and ".join(str(scripts.log(name)) for name in TRAINERS)
            raise DemoError(f"no epoch was finished within {STALL_LIMIT:g} s, see {logs}")
        time.sleep(0.5)


def report(output_dir: Path, epochs: int) -> None:
    """Print the outcome from the trainers' files; raise a DemoError if the demo failed."""
    from safetensors.numpy import load_file

    folders = [output_dir / name for name in TRAINERS]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    first, second = ({line["epoch"]: line for line in read_json_lines(folder / "history.jsonl")} for folder in folders)
    weights, others = (load_file(folder / "model" / "model.safetensors") for folder in folders)

    final_loss = max(summary["final_loss"] for summary in summaries)
    entropy = summaries[0]["unigram_entropy"]
    samples = [summary["samples"] for summary in summaries]
    shares = [
        f"peer {number} contributed {count:,} samples ({count / max(1, sum(samples)):.1%})"
        for number, count in enumerate(samples, start=1)
    ]
    # equal gradient norms prove that both peers used one average, independently of the logs
    averaged = [
        epoch
        for epoch in first.keys() & second.keys()
        if first[epoch]["averaged_with"] == second[epoch]["averaged_with"] == 2
        and math.isclose(first[epoch]["grad_norm"], second[epoch]["grad_norm"], rel_tol=SAME_GRADIENT)
    ]
    difference = max(float(abs(weights[name] - others[name]).max()) for name in weights)
    agreement = "agree" if difference <= SAME_WEIGHTS else "do NOT agree"

    print(f"final loss {final_loss:.3f} (start {summaries[0]['start_loss']:.3f}, unigram entropy {entropy:.3f})")
    print(", ".join(shares))
    print(f"averaged with 2 of 2 in {len(averaged)} of {epochs} epochs")
    print(f"the peers' weights {agreement}: they differ by at most {difference:.1e}")
    print(f"checkpoint: {folders[0] / 'model'}")
    print(f"learning curve: {output_dir / 'monitor' / 'learning_curve.png'}", flush=True)
    texts = re.findall(r"sample text: (.*)", Path(f"{folders[0]}.log").read_text())
    print("\nThree texts by the trained model:", *texts[-3:], sep="\n  ", flush=True)

    logs = f"{folders[0]}.log and {folders[1]}.log"
    if not averaged:
        raise DemoError(f"the peers never averaged their gradients, see {logs}")
    if not final_loss < entropy:
        raise DemoError(f"the model has not learned more than word frequencies, see {logs}")


def run(args: argparse.Namespace) -> None:
    """Run the demo; raise a DemoError if it fails, and a UserError if it cannot begin."""
    start_time = time.monotonic()
    output_dir = Path(args.output_dir)
    if args.config_path not in CONFIGS:
        raise UserError(f"--config_path must be one of {', '.join(CONFIGS)}")
    is_causal = args.config_path == CAUSAL
    lock_folder("--output_dir", output_dir)
    clear_folder(output_dir)
    scripts = Scripts(output_dir)
    epochs = 96 if is_causal else 128
    data_flags = tokenize(scripts, output_dir / "data", is_causal)
    shape = f"--config_path {shlex.quote(args.config_path)} --total_steps {epochs}"
    what = "Start the monitor, the first peer of the run"
    command = MONITOR
    trainer = f"{TRAINER} {shape}"
    if args.clients:
        what = "Start an auxiliary peer, which averages for peers that accept no connection"
        command = f"{AUX_PEER} {shape} {re.search(r'--tokenizer_path .+', data_flags).group()}"
        trainer = f"{TRAINER} --client_mode {shape}"
    if is_causal:
        command, trainer = (words.replace(ADAMW, MUON) for words in (command, trainer))
    initial_peers = start_first_peer(scripts, what, command, output_dir / "monitor")
    for name in TRAINERS:
        folder = shlex.quote(str(output_dir / name))
        is_first = name == TRAINERS[0]
        what = "Start a peer" if is_first else f"Start another peer: the same command with --output_dir {folder}"
        command = f"{trainer} {data_flags} --output_dir {folder} {initial_peers}"
        scripts.start(name, what, command, is_first, **TRAINER_ENVIRONMENT)
    parts = "the next word" if is_causal else "masked words plus that of sentence order (0.69 by guessing)"
    print(f"\nProgress of the training; the loss is that of {parts}:")
    watch(scripts, output_dir / "monitor" / "metrics.jsonl", start_time)
    scripts.interrupt("monitor")
    scripts.wait("monitor", STOP_LIMIT)
    print(f"took {format_clock(time.monotonic() - start_time)}\n")
    report(output_dir, epochs)


def main() -> None:
    """Parse the flags and run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="demo_output", help="folder for all results; old results are replaced")
    parser.add_argument("--config_path", default=CONFIGS[0], help=f"the model: {', '.join(CONFIGS)}")
    parser.add_argument("--clients", action="store_true", help="make both trainers clients, as behind firewalls")
    args = parser.parse_args()
    os.chdir(ROOT)
    try:
        run(args)
    except DemoError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    with clean_end(interrupted="the same command starts again"):
        main()
