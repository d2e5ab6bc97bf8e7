"""Swarms of the scripts that users run, or of paced ones, on loopback or an emulated network, and their output."""

import json
import re
import time
from functools import partial
from pathlib import Path

import netlab
from processes import LOOPBACK, Script, make_prefix, run_python, wait_until
from safetensors.torch import load_file

# a small ALBERT, and rounds that start at once when all are there
TRAINER = {"--config_path": "configs/demo.json", "--optim": "adamw", "--learning_rate": 2e-3, "--warmup_steps": 5}
TRAINER |= {"--total_steps": 100, "--target_batch_size": 384, "--per_device_train_batch_size": 16}
TRAINER |= {"--gradient_accumulation_steps": 1, "--matchmaking_time": 3, "--dataloader_num_workers": 0}
# the rounding of 16 bits differs between peers, by 5e-6 in weights between two averagings of parameters
TRAINER["--compression"] = "none"
# epochs are so short here that parameters are not averaged at the last one if they are at each
TRAINER["--average_state_every"] = 4
# or each measures it for seconds, in which loopback takes both cores
TRAINER["--bandwidth"] = 1000

# words of a trainer in a run of its own, with epochs of 64 samples; the flags that follow override them
TINY = "--config_path configs/demo.json --optim adamw --learning_rate 1e-3 --warmup_steps 2 --total_steps 50 "
TINY += "--target_batch_size 64 --per_device_train_batch_size 16 --gradient_accumulation_steps 1 --matchmaking_time 2 "
TINY = [*(TINY + "--dataloader_num_workers 0 --bandwidth 1000").split(), *LOOPBACK]

# for a single peer: a step takes 20 ms, and epochs that end faster than a test looks would only be noise
ALONE = {**TRAINER, "--target_batch_size": 64, "--save_steps": 2, "--save_total_limit": 3}
ALONE["--gradient_accumulation_steps"] = 2

# flags of the trainers that an auxiliary peer needs
SHARED = "--config_path", "--optim", "--learning_rate", "--warmup_steps", "--total_steps", "--compression"
SHARED += "--matchmaking_time", "--average_state_every", "--bandwidth"


def flags(*groups: dict) -> list:
    merged = {name: value for group in groups for name, value in group.items()}
    return sum(([name, *(value if isinstance(value, list) else [value])] for name, value in merged.items()), [])


def start_monitor(start, prefix: str, output_dir: Path, *more, name: str = "monitor", **options) -> tuple[Script, str]:
    command = ["run_training_monitor.py", "--experiment_prefix", prefix, *LOOPBACK, "--refresh_period", 0.3]
    monitor = start(name, *command, "--output_dir", output_dir, *more, **options)
    return monitor, monitor.wait_for(r"(?m)^--initial_peers (/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)$", 300).group(1)


def read_epochs(output_dir: Path) -> list[dict]:
    path = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def choose_trainer(pace: float | None) -> list:
    """Return the words that start a trainer whose batches take this many seconds at least, at little work."""
    return ["run_trainer.py"] if pace is None else ["benchmarks/paced_trainer.py", pace]


def start_trainer(start, tmp_path: Path, name: str, prefix: str, peers: str, *groups: dict, pace=None, **options):
    """:param pace: seconds that each batch takes, at little work for the processor"""
    own = {"--experiment_prefix": prefix, "--initial_peers": peers, "--output_dir": tmp_path / name}
    return start(name, *choose_trainer(pace), *LOOPBACK, *flags(TRAINER, own, *groups), **options)


def start_alone(start, name: str, output_dir: Path, prefix: str, *groups: dict, pace=None, **options) -> Script:
    own = {"--experiment_prefix": prefix, "--output_dir": output_dir}
    return start(name, *choose_trainer(pace), *LOOPBACK, *flags(ALONE, own, *groups), **options)


def history(tmp_path: Path, name: str) -> dict[int, dict]:
    path = tmp_path / name / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {line["epoch"]: line for line in (json.loads(text) for text in lines if text.endswith("\n"))}


def list_joint_epochs(tmp_path: Path, names: list[str], after: int = 0) -> list[int]:
    """Return the epochs after `after` that exactly these trainers have averaged."""
    epochs = [history(tmp_path, name) for name in names]
    common = sorted(set(epochs[0]).intersection(*epochs[1:]))
    return [e for e in common if e > after and all(own[e]["averaged_with"] == len(names) for own in epochs)]


def wait_for_joint_epochs(tmp_path, names: list[str], number: int, seconds: float, scripts, after=0) -> list[int]:
    """Wait for this number of joint epochs after `after`, and return them; fail with the output of these scripts."""
    try:
        joint = partial(list_joint_epochs, tmp_path, names, after)
        return wait_until(lambda: len(joint()) >= number and joint(), seconds, f"{number} epochs averaged by {names}")
    except AssertionError as e:
        raise AssertionError("\n".join([str(e), *(script.text[-2000:] for script in scripts)])) from None


def largest_difference(tmp_path: Path, *names: str) -> float:
    """Return the largest difference between a weight of the first trainer's model and of another's."""
    first, *others = [load_file(tmp_path / name / "model" / "model.safetensors") for name in names]
    return max((first[key] - other[key]).abs().max().item() for other in others for key in first)


def run_card(checkpoint: Path) -> str:
    """Return the output of the code in an archive's card, which opens this checkpoint."""
    code = re.search(r"```python\n(.*?)```", (checkpoint / "README.md").read_text(), re.DOTALL)[1]
    offline = "import huggingface_hub\nhuggingface_hub.constants.HF_HUB_OFFLINE = True\n"
    return run_python("-c", offline + code, cwd=checkpoint.parent, expect=0).stdout


GRADIENT_PEER = ("tests.programs.gradient_peer",)


def start_peer(start, name, prefix, gradient, batch_size, others=(), flags=(), program=GRADIENT_PEER) -> Script:
    words = ["-m", *program, "--experiment_prefix", prefix, "--gradient", gradient]
    if others:
        words += ["--initial_peers", *sum((other.json_lines()[0]["maddrs"] for other in others), [])]
    peer = start(name, *words, "--batch_size", batch_size, *flags)
    peer.wait_for('"maddrs"')
    return peer


def stop(*peers: Script) -> None:
    for peer in peers:
        peer.interrupt()
    for peer in peers:
        peer.assert_clean_end()


def epochs(peer) -> dict[int, dict]:
    return {line["epoch"]: line for line in peer.json_lines() if "epoch" in line}


def list_joint_rounds(*peers: Script) -> list[int]:
    """Return the epochs that all these peers have averaged together, without others."""
    lines = [epochs(peer) for peer in peers]
    common = sorted(set(lines[0]).intersection(*lines[1:]))
    return [epoch for epoch in common if all(of[epoch]["averaged_with"] == len(peers) for of in lines)]


AVERAGING_TIMEOUT, MATCHMAKING_TIME = 15, 3
PACED = {**TRAINER, "--target_group_size": 16, "--matchmaking_time": MATCHMAKING_TIME, "--next_chunk_timeout": 4}
PACED |= {"--averaging_timeout": AVERAGING_TIMEOUT, "--metadata_expiration": 30, "--average_state_every": 3}
PACED["--total_steps"] = 1000


class Swarm:
    """A monitor and paced trainers, on loopback or each on a host of an emulated network."""

    def __init__(self, start, tmp_path: Path, settings: dict, net: netlab.Net | None = None):
        self.start, self.tmp_path, self.net = start, tmp_path, net
        self.settings = {**PACED, **settings, "--experiment_prefix": make_prefix()}
        if net:
            del self.settings["--bandwidth"]
        self.trainers: dict[str, Script] = {}
        # seconds of a batch of 16, so that the cores are not the bottleneck: three trainers take two seconds an epoch
        self.pace = 0.2

    def where(self, name: str) -> dict:
        host = self.net.ip(name) if self.net else "127.0.0.1"
        return {"--host_maddrs": f"/ip4/{host}/tcp/0"}

    def prefix(self, name: str) -> dict:
        return {"prefix": self.net.prefix(name)} if self.net else {}

    def start_monitor(self, name: str = "monitor", **own) -> Script:
        options = {"--refresh_period": 0.5, "--output_dir": self.tmp_path / "monitor"}
        options |= {"--experiment_prefix": self.settings["--experiment_prefix"], **self.where("monitor")}
        options |= {f"--{flag}": value for flag, value in own.items()}
        monitor = self.start(name, "run_training_monitor.py", *flags(options), **self.prefix("monitor"))
        self.peers = monitor.wait_for(r"--initial_peers (/ip4/\S+)").group(1)
        return monitor

    def start_trainers(self, *names: str, program: str = "benchmarks/paced_trainer.py", **own) -> list[Script]:
        for name in names:
            options = {"--initial_peers": self.peers, "--output_dir": self.tmp_path / name, **self.where(name)}
            words = flags(self.settings, options, {f"--{flag}": value for flag, value in own.items()})
            self.trainers[name] = self.start(name, program, self.pace, *words, **self.prefix(name))
        return [self.trainers[name] for name in names]

    def history(self, name: str) -> dict[int, dict]:
        return history(self.tmp_path, name)

    def last_epoch(self, name: str) -> int:
        return max(self.history(name), default=0)

    def wait_for_joint_epochs(self, names: list[str], number: int, seconds: float, after: int = 0) -> list[int]:
        scripts = [self.trainers[name] for name in names]
        return wait_for_joint_epochs(self.tmp_path, names, number, seconds, scripts, after)

    def stop_together(self, names: list[str], after: int) -> float:
        """Ctrl-C at the beginning of an epoch, so that all end with the same one; returns the time.

        :param after: an epoch since which parameters shall have been averaged, which brings them together again.
            Such a round goes on in the background, and misses those who end before it does: it gets one whole epoch.
        """
        period = PACED["--average_state_every"]

        def has_begun() -> bool:
            epochs = {self.last_epoch(name) for name in names}
            epoch = max(epochs)
            is_new = time.time() - self.history(names[0]).get(epoch, {"time": 0})["time"] < 0.5
            return len(epochs) == 1 and is_new and epoch % period == period - 1 and epoch - period + 1 > after

        wait_until(has_begun, 60, "the beginning of an epoch, for all at once")
        stopped = time.time()
        for name in names:
            self.trainers[name].interrupt()
        for name in names:
            self.trainers[name].assert_clean_end(60)
        summaries = [json.loads((self.tmp_path / name / "summary.json").read_text()) for name in names]
        assert len({summary["epoch"] for summary in summaries}) == 1, summaries
        return stopped

    def difference(self, names: list[str]) -> float:
        return largest_difference(self.tmp_path, *names)
