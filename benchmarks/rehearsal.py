"""Measure a swarm of volunteers with home connections, churn and a malicious peer, on an emulated network.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/rehearsal.py --minutes 60 --seed 0
    python benchmarks/rehearsal.py --short
    python benchmarks/rehearsal.py --minutes 60 --no_liar --no_events

A monitor and an auxiliary peer run on servers, and trainers at home (LINES) with paced batches (paced_trainer.py). They
continue from a model of 14 M parameters (--model, or trained first in a quarter of an hour), with the settings of
docs/organizers.md. A seed chooses the order of the events, all equally frequent:
    kill       kill -9 of a trainer, and the same command 5 s later
    again      Ctrl-C, and the same command again
    stop       SIGSTOP of all its processes for 30 s
    newcomer   a new peer joins, and stays until the next one
    slow       a connection drops to a tenth for two minutes
    partition  half of the trainers are cut off from all others for 30 s
    disk       the disk of a trainer is full for a minute
    monitor    the monitor ends and is started again
    aux        kill -9 of the auxiliary peer, which returns after 30 s
After a quarter of the time, a malicious peer joins; every twelfth of the time, another kind of hostile_peer.py replaces
it. At the end, one undisturbed process trains on the same number of samples, with the batches of the swarm's local
steps. The table lists each figure with its aim; --output_dir has the picture, all logs and figures.json.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import hostile_peer
import netlab
import numpy as np
import processes
import psutil
from chaos import LARGE, Trainer, gains, largest_difference, overlap
from processes import LOOPBACK, Script, make_prefix, wait_until
from soak import measure_processes

from monitoring.curves import make_panels, save_figure

SERVER = dict(rtt_ms=10, down=1000, up=1000)
FIBRE, CABLE = dict(rtt_ms=10, down=100, up=20), dict(down=50, up=10, loss=0.002)
#: Mbit/s, half of the milliseconds between two such hosts, and the samples of a batch there
LINES = {
    "fibre1": (FIBRE, 8),
    "cable1": (dict(CABLE, rtt_ms=20), 6),
    "router": (dict(rtt_ms=20, down=50, up=10, nat="gateway"), 3),
    "dsl": (dict(rtt_ms=25, down=16, up=2), 2),
    "fibre2": (FIBRE, 6),
    "cable2": (dict(CABLE, rtt_ms=28), 4),
    "cable3": (dict(CABLE, rtt_ms=37), 4),
    "firewall": (dict(rtt_ms=20, down=50, up=10, firewall=True), 3),
    "guest": (dict(rtt_ms=20, down=50, up=10), 3),
    "liar": (dict(rtt_ms=20, down=50, up=10), 4),
}
KINDS = ["kill", "newcomer", "stop", "monitor", "slow", "again", "disk", "partition", "aux"]
SECONDS = {"kill": 5.0, "stop": 30.0, "slow": 120.0, "partition": 30.0, "disk": 60.0, "aux": 30.0, "newcomer": 0.0}
LIES = [kind for kind in hostile_peer.KINDS if kind != "contract_first"]
DISK, DISK_MEGABYTES = "cable1", 1200
SECONDS_PER_BATCH, LOCAL_STEPS = 4.0, 50
ALL_PEERS = f"--local_steps {LOCAL_STEPS} --local_steps_from 0 --compression sparse"
SHARED = "--optim adamw --learning_rate 3e-4 --warmup_steps 0 --total_steps 1000000"
OWN = "--gradient_accumulation_steps 1 --dataloader_num_workers 0 --save_steps 10"
EVALUATION = "--do_eval --max_eval_samples 512"
BEGIN = (
    "--optim adamw --learning_rate 1e-3 --warmup_steps 50 --total_steps 1000000 --target_batch_size 64 "
    "--per_device_train_batch_size 16 --gradient_accumulation_steps 1 --dataloader_num_workers 0"
)
# runs on the monitor's host, like a program that follows the run
WATCH = """
import json, sys, time, urllib.request
while True:
    seen = {"time": time.time()}
    for page in ("status", "history"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:8080/{page}.json", timeout=4) as answer:
                seen[page] = json.load(answer)
        except OSError as e:
            seen[page] = {"error": str(e)}
    print(json.dumps(seen), flush=True)
    time.sleep(5)
"""


class Rehearsal:
    """A swarm, its events and its measurements."""

    def __init__(self, args: argparse.Namespace, net: netlab.Net, model: Path):
        self.args, self.net, self.model, self.folder = args, net, model, args.output_dir
        self.random, self.begin = random.Random(args.seed), time.time()
        self.names = list(LINES)[: args.trainers]
        self.trainers: list[Trainer] = []
        self.guests: list[Trainer] = []
        self.liars: list[Trainer] = []
        self.servers: dict[str, Script] = {}
        self.starts: Counter[str] = Counter()
        self.events: list[dict] = []  # kind, names, from and until
        self.pending: list[tuple[float, Callable[[], None]]] = []
        self.deaths: list[str] = []
        self.memory: list[dict] = []
        #: for each new peer, the bytes received at its start and at its first samples
        self.received: dict[str, list[int]] = {}

    def say(self, text: str) -> None:
        print(f"{time.time() - self.begin:7.1f} s  {text}", flush=True)

    # --- the peers

    def start(self) -> None:
        for name in ("monitor", "aux"):
            self.net.host(name, **SERVER)
        for name in (*self.names, "guest", "liar"):
            self.net.host(name, **LINES[name][0])
        self.net.start()
        disk = self.folder / DISK
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs", disk], check=True)
        self.prefix = ["--experiment_prefix", make_prefix()]
        self.data = ["--tokenizer_path", self.args.tokenizer_path, "--model_name_or_path", self.model]
        self.flags = [*ALL_PEERS.split(), *SHARED.split(), "--target_batch_size", self.args.target_batch_size]
        self.coordinators = []
        for name in ("monitor", "aux"):
            self.start_server(name)
            pattern = r"--initial_peers (/ip4\S+)"
            self.coordinators.append(self.servers[name].wait_for(pattern, 120).group(1))
        Script(self.folder / "watch.jsonl", "-c", WATCH, prefix=self.net.prefix("monitor"))
        for name in self.names:
            self.trainers.append(self.make_trainer(name, name))
            self.trainers[-1].start()

    def start_server(self, name: str) -> None:
        listen = f"/ip4/{self.net.ip(name)}/tcp/31337"
        command = [*self.prefix, "--host_maddrs", listen, "--identity_path", self.folder / f"{name}.id"]
        command += ["--output_dir", self.folder / name]
        if name == "monitor":
            command = ["run_training_monitor.py", *command, "--report_to", "none", "--status_port", 8080]
            command += ["--refresh_period", 5]
        else:
            command = ["run_aux_peer.py", *command, "--initial_peers", *self.coordinators[:1], *self.data, *self.flags]
            command += ["--assist_in_averaging", "--store_checkpoints", "--save_checkpoint_step_interval", 2]
            command += ["--report_to", "none"]
        log = self.folder / f"{name}.log-{self.starts[name]}"
        self.starts[name] += 1
        self.servers[name] = Script(log, *command, prefix=self.net.prefix(name))

    def make_trainer(self, name: str, host: str, lie: str | None = None) -> Trainer:
        program = ["benchmarks/hostile_peer.py", lie] if lie else ["benchmarks/paced_trainer.py"]
        command = [*program, SECONDS_PER_BATCH, *self.prefix, "--initial_peers", *self.coordinators, *self.data]
        command += ["--dataset_path", self.args.dataset_path, *self.flags, *OWN.split()]
        command += ["--per_device_train_batch_size", LINES[host][1]]
        command += ["--host_maddrs", f"/ip4/{self.net.ip(host)}/tcp/0"]
        command += [*EVALUATION.split(), "--eval_steps", 5] if name == self.names[0] else []
        folder = self.folder / name
        if name == DISK:
            folder /= "files"  # on the small disk
        trainer = Trainer(name, folder, command, self.net.prefix(host))
        trainer.batch_size = LINES[host][1]
        return trainer

    def list_honest(self) -> list[Trainer]:
        return self.trainers + self.guests

    def list_scripts(self) -> dict[str, Script]:
        running = {trainer.name: trainer.script for trainer in self.list_honest() if not trainer.runs[-1]["ended"]}
        return self.servers | running

    # --- the events

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.pending.append((time.time() + seconds, action))

    def work(self) -> None:
        """Run the actions that are due, restart trainers that have ended, and measure new peers."""
        for due, action in list(self.pending):
            if time.time() >= due:
                self.pending.remove((due, action))
                action()
        for trainer in self.list_honest():
            trainer.look()
            if trainer.has_died():
                self.deaths.append(f"{trainer.name} with {trainer.script.process.returncode}")
                self.say(f"{self.deaths[-1]}: it has ended by itself, see {trainer.script.log}, and is started again")
                trainer.script.kill()
                trainer.note_end()
                trainer.start()
        for guest in self.guests:
            received = self.received.setdefault(guest.name, [self.net.bytes("guest")[1]])
            if len(received) == 1 and "first samples computed" in guest.script.text:
                received.append(self.net.bytes("guest")[1])

    def let_pass(self, seconds: float) -> None:
        end, next_look = time.time() + seconds, 0.0
        while time.time() < end:
            self.work()
            if time.time() >= next_look:
                next_look = time.time() + 20
                scripts = self.list_scripts().items()
                self.memory.append(dict(time=time.time(), roles={n: measure_processes(s) for n, s in scripts}))
            time.sleep(0.2)

    def is_able(self, trainer: Trainer) -> bool:
        """Return whether a trainer is live and not in any event."""
        busy = {name for event in self.events if event["until"] is None for name in event["names"]}
        return bool(trainer.runs[-1]["ready"]) and trainer.name not in busy

    def strike(self, kind: str) -> None:
        able = [trainer for trainer in self.trainers if self.is_able(trainer)]
        if kind == "disk":
            able = [trainer for trainer in able if trainer.name == DISK]
        if not able:
            self.later(5, partial(self.strike, kind))
            return
        victims = self.random.sample(able, min(len(able), len(self.trainers) // 2 if kind == "partition" else 1))
        if kind in ("newcomer", "monitor", "aux"):
            victims = []
        event = dict(kind=kind, names=[victim.name for victim in victims], since=time.time(), until=None)
        self.events.append(event)
        self.say(f"{kind} {' '.join(event['names'])}")
        undo = getattr(self, f"do_{kind}")(event, *victims)

        def finish() -> None:
            if undo and undo() is False:
                self.later(0.5, finish)
                return
            event["until"] = time.time()

        self.later(SECONDS.get(kind, 0.5) * min(1.0, self.args.every / 30), finish)

    def do_kill(self, _, victim: Trainer) -> Callable:
        victim.script.kill()
        victim.note_end()
        return victim.start

    def say_goodbye(self, leaver: Trainer, then: Callable[[], None]) -> Callable:
        """Send Ctrl-C; return a function that calls `then` once the trainer has ended, and returns whether it has."""
        leaver.script.interrupt()
        leaver.runs[-1]["ended"] = time.time()  # other peers do not wait for it from now on

        def go_on() -> bool:
            if leaver.script.process.poll() is None:
                return False
            leaver.note_end()
            then()
            return True

        return go_on

    def do_again(self, _, victim: Trainer) -> Callable:
        return self.say_goodbye(victim, victim.start)

    def do_stop(self, _, victim: Trainer) -> Callable:
        victim.frozen.append([time.time(), None])
        victim.script.freeze()

        def thaw() -> None:
            victim.frozen[-1][1] = time.time()
            victim.script.thaw()

        return thaw

    def do_newcomer(self, event: dict) -> Callable | None:
        guest = self.make_trainer(f"guest{len(self.guests)}", "guest")
        event["names"] = [guest.name]

        def come() -> None:
            self.guests.append(guest)
            guest.start()

        return self.say_goodbye(self.guests[-1], come) if self.guests else come()

    def do_slow(self, _, victim: Trainer) -> Callable:
        line = LINES[victim.name][0]
        self.net.set(victim.name, up=line["up"] / 10, down=line["down"] / 10)
        return lambda: self.net.set(victim.name, up=line["up"], down=line["down"])

    def do_partition(self, _, *victims: Trainer) -> Callable:
        self.net.partition([victim.name for victim in victims])
        return self.net.heal

    def do_disk(self, _, victim: Trainer) -> Callable:
        file = victim.folder.parent / "full"
        with contextlib.suppress(OSError), open(file, "wb") as disk:
            while True:
                disk.write(bytes(2**20))
        return file.unlink

    def do_monitor(self, event: dict) -> Callable:
        event["names"] = ["monitor"]
        monitor = self.servers["monitor"]
        monitor.interrupt()

        def start() -> bool:
            if monitor.process.poll() is None:
                return False
            self.start_server("monitor")
            return True

        return start

    def do_aux(self, event: dict) -> Callable:
        event["names"] = ["aux"]
        self.servers["aux"].kill()
        return lambda: self.start_server("aux")

    def lie(self, kind: str) -> None:
        if self.liars:
            self.liars[-1].script.kill()
            self.liars[-1].note_end()
        self.say(f"the liar's kind is {kind}")
        self.liars.append(self.make_trainer(f"liar{len(self.liars)}", "liar", kind))
        self.liars[-1].kind = kind
        self.liars[-1].start()

    def plan(self) -> None:
        """Schedule the events and the malicious peers by the seed."""
        minute = self.args.every
        bag: list[str] = []
        for number in range(int(self.args.minutes * 60 / minute) - 2 if self.args.events else 0):
            bag = bag or (list(reversed(KINDS)) if self.args.is_short else self.random.sample(KINDS, len(KINDS)))
            self.later((number + 1) * minute, partial(self.strike, bag.pop()))
        lies = self.args.lie or self.random.sample(LIES, len(LIES))
        for number, kind in enumerate(lies[: self.args.lies]):
            due = self.args.minutes * 60 * (1 + 3 * number / self.args.lies) / 4
            self.later(due, partial(self.lie, kind))

    def end(self) -> list[int]:
        """Send Ctrl-C to all trainers shortly after an epoch, and return the exit codes."""
        present = [trainer for trainer in self.list_honest() if not trainer.runs[-1]["ended"]]

        def is_joint() -> bool:
            self.work()
            epochs = [(trainer.read_history() or [dict(epoch=0, time=0.0)])[-1] for trainer in present]
            newest = max(line["time"] for line in epochs)
            return len({line["epoch"] for line in epochs}) == 1 and 4 < time.time() - newest < 10

        with contextlib.suppress(AssertionError):
            wait_until(is_joint, 400, "an epoch that all have reached")
        self.ended = time.time()
        for trainer in present:
            trainer.script.process.send_signal(2)
        codes = [trainer.script.wait(180) for trainer in present]
        self.folders = [trainer.folder for trainer in present]
        for server in reversed(self.servers.values()):
            server.interrupt()
            server.wait(120)
        return codes

    def kill(self) -> None:
        """Kill all processes."""
        for trainer in (*self.list_honest(), *self.liars):
            if trainer.runs:
                trainer.script.kill()
        for script in self.servers.values():
            script.kill()


# --- figures ----------------------------------------------------------------------------------------------------------


def list_spans(rehearsal: Rehearsal, trainer: Trainer) -> list[tuple[float, float]]:
    """Return the start of each epoch of a trainer, with the unfinished one, and its seconds without faults."""
    away = [(frozen[0], frozen[1] or rehearsal.ended) for frozen in trainer.frozen]
    cuts = [event for event in rehearsal.events if event["kind"] == "partition"]
    away += [(event["since"], event["until"] or rehearsal.ended) for event in cuts]
    spans = []
    for run, lines in trainer.histories():
        if run["ready"]:
            times = [run["ready"], *(line["time"] for line in lines), run["ended"] or rehearsal.ended]
            spans += itertools.pairwise(times)
    return [(begin, end - begin - sum(overlap([begin, end], list(it)) for it in away)) for begin, end in spans]


def list_warnings(trainers: list[Trainer]) -> tuple[dict[str, int], dict[str, int]]:
    """Return by kind of line above info the number in all logs, and the most in ten minutes of a run."""
    counts, most = Counter(), Counter()
    for path in (path for trainer in trainers for path in trainer.folder.glob("log-*")):
        times = defaultdict(list)
        pattern = r"^(\d\d:\d\d:\d\d) \S+ (?:warning|error|critical): (.*)"
        for clock, text in re.findall(pattern, path.read_text(), re.M):
            kind = re.sub(r"\b(?=\w*\d)[\w.,%]+|Qm\w+|12D\w+", "#", text)
            times[kind[:140]].append(datetime.strptime(clock, "%H:%M:%S").timestamp())
        for kind, moments in times.items():
            counts[kind] += len(moments)
            most[kind] = max(most[kind], *(sum(0 <= other - moment < 600 for other in moments) for moment in moments))
    return dict(counts), dict(most)


def check_monitor(rehearsal: Rehearsal) -> dict[str, list]:
    """Return the figures of the page that differ by more than 10 % from the trainers' files, and count the looks."""
    all_trainers = rehearsal.list_honest() + rehearsal.liars
    truth = defaultdict(list)
    for trainer in all_trainers:
        for _, lines in trainer.histories():
            for line in lines:
                truth[line["epoch"]].append(line)
    seen = [json.loads(text) for text in (rehearsal.folder / "watch.jsonl").read_text().splitlines()]
    answers = [(it["time"], it["status"]) for it in seen if it["status"].get("epoch") is not None]
    usual = statistics.median(line["epoch_seconds"] for lines in truth.values() for line in lines)
    changes = [
        moment for trainer in all_trainers for run, _ in trainer.histories() for moment in (run["ready"], run["ended"])
    ]
    changes += [moment for trainer in all_trainers for frozen in trainer.frozen for moment in frozen]
    wrong = dict(epoch=[], loss=[], peers=[], samples_per_second=[])
    for moment, status in answers:
        lines, epoch = truth.get(status["epoch"], []), status["epoch"]
        reached = [e for e, ls in truth.items() if min(line["time"] for line in ls) < moment - 10]
        if reached and max(reached) > epoch:
            wrong["epoch"].append((moment, epoch, max(reached)))
        steps = sum(line["mini_steps"] for line in lines)
        # some peers may not have written or reported the epoch yet
        if not steps or moment < max(line["time"] for line in lines) + 15:
            continue
        is_calm = not any(change and moment - 2 * usual < change < moment for change in changes)
        loss = sum(line["loss"] * line["mini_steps"] for line in lines if line["loss"]) / steps
        if abs(status["loss"] / loss - 1) > 0.1:
            wrong["loss"].append((moment, status["loss"], loss))
        rate = sum(line["samples_per_second"] for line in lines)
        if is_calm and abs(status["peers"] / len(lines) - 1) > 0.1:
            wrong["peers"].append((moment, status["peers"], len(lines)))
        if is_calm and abs(status["samples_per_second"] / rate - 1) > 0.1:
            wrong["samples_per_second"].append((moment, status["samples_per_second"], rate))
    return wrong | dict(looks=len(answers), failed=len(seen) - len(answers))


def measure_growth(rehearsal: Rehearsal) -> dict[str, float]:
    """Return the growth in memory of each role, without its first minutes, as some is first used in round two."""
    growth = {}
    starts = {trainer.name: [run["started"] for run in trainer.runs] for trainer in rehearsal.list_honest()}
    starts, readings = starts | {"monitor": [0.0], "aux": [0.0]}, defaultdict(list)
    for event in rehearsal.events:
        if event["kind"] in ("monitor", "aux") and event["until"]:
            starts[event["kind"]].append(event["until"])
    for sample in rehearsal.memory:
        for role, measured in sample["roles"].items():
            number = sum(start <= sample["time"] for start in starts[role])
            readings[role, number].append((sample["time"], sum(mb for mb, _ in measured.values())))
    for (role, _), values in readings.items():
        steady = [mb for moment, mb in values if moment > values[0][0] + rehearsal.args.minutes * 60 / 6]
        if len(steady) >= 15:  # five minutes
            few = max(3, len(steady) // 10)
            change = statistics.fmean(steady[-few:]) / statistics.fmean(steady[:few]) - 1
            growth[role] = max(growth.get(role, -1.0), change)
    return growth


def open_archive(folder: Path) -> str:
    """Return a sentence that a pipeline completes with the newest checkpoint."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    fill = transformers.pipeline("fill-mask", model=str(newest), tokenizer=str(newest))
    word = fill(f"it was a {fill.tokenizer.mask_token} day")[0]["token_str"]
    return f"{newest.name}: it was a {word} day"


def train_alone(args: argparse.Namespace, model: Path, samples: int) -> Path:
    """Train with one process on this number of samples, and return its folder."""
    folder = args.output_dir / "alone"
    folder.mkdir()
    command = ["run_trainer.py", "--experiment_prefix", make_prefix(), *LOOPBACK, "--dataset_path", args.dataset_path]
    command += ["--tokenizer_path", args.tokenizer_path, "--model_name_or_path", model, *SHARED.split()]
    command += ["--target_batch_size", args.target_batch_size, *EVALUATION.split(), "--eval_steps", 100]
    command += ["--per_device_train_batch_size", args.target_batch_size, "--gradient_accumulation_steps", 1]
    command += ["--dataloader_num_workers", 0, "--save_steps", 10**6]
    script = Script(folder / "log", *command, "--max_steps", samples // args.target_batch_size, "--output_dir", folder)
    try:
        script.wait(7200)
    finally:
        script.kill()
    return folder


def make_model(args: argparse.Namespace) -> Path:
    """Train the model to start from, with 14 M parameters and 400 steps of 64 samples, and return its folder."""
    folder = args.output_dir / "begin"
    folder.mkdir()
    config = json.loads(Path("configs/demo.json").read_text()) | LARGE
    (folder / "config.json").write_text(json.dumps(config))
    command = ["run_trainer.py", "--experiment_prefix", make_prefix(), *LOOPBACK, "--dataset_path", args.dataset_path]
    command += ["--tokenizer_path", args.tokenizer_path, "--config_path", folder / "config.json", *BEGIN.split()]
    steps = 20 if args.is_short else 400
    print(f"first one process makes {steps} steps", flush=True)
    script = Script(folder / "log", *command, "--max_steps", steps, "--output_dir", folder)
    try:
        script.wait(7200)
    finally:
        script.kill()
    return folder / "model"


def measure_newcomers(rehearsal: Rehearsal) -> list[dict]:
    """Return each new peer's seconds to its first samples, without their batch, and those that its download takes."""
    newcomers = []
    for guest in rehearsal.guests:
        if len(received := rehearsal.received[guest.name]) == 2:
            seconds = re.search(r"first samples computed ([\d.]+) s", (guest.folder / "log-0").read_text())[1]
            allowed = (received[1] - received[0]) * 8e-6 / LINES["guest"][0]["down"] * 1.3 + 10
            newcomers.append(dict(name=guest.name, seconds=float(seconds) - SECONDS_PER_BATCH, allowed=allowed))
    return newcomers


def read_losses(folder: Path, samples_per_epoch: float) -> dict[int, float]:
    """Return the validation losses by samples of the whole swarm."""
    lines = [json.loads(text) for path in folder.glob("history*.jsonl") for text in path.read_text().splitlines()]
    losses = {line["validation_epoch"]: line["validation_loss"] for line in lines if line.get("validation_loss")}
    losses[max(line["epoch"] for line in lines)] = json.loads((folder / "summary.json").read_text())["final_loss"]
    return {epoch * samples_per_epoch: loss for epoch, loss in sorted(losses.items())}


def measure(rehearsal: Rehearsal, codes: list[int]) -> dict:
    """Return all figures of the swarm."""
    honest = rehearsal.list_honest()
    epochs = [gain for trainer in honest for gain in gains(trainer)]
    reached, lost = (sum(gain[name] for gain in epochs) for name in ("reached", "lost"))
    # by the clock, because no process counts them
    died = sum(
        int((run["ended"] - max([line["time"] for line in lines], default=run["ready"])) / SECONDS_PER_BATCH)
        * trainer.batch_size
        for trainer in honest
        for run, lines in trainer.histories()
        if run["ended"] and run["ready"]
    )
    lines = [line for trainer in honest for _, run in trainer.histories() for line in run[2:]]
    away = sum(line["waiting_seconds"] + line["averaging_seconds"] for line in lines)
    spans = [
        dict(trainer=trainer.name, minute=(begin - rehearsal.begin) / 60, seconds=seconds)
        for trainer in honest
        for begin, seconds in list_spans(rehearsal, trainer)
    ]
    counts, most = list_warnings(honest)
    return dict(
        losses=dict(swarm=json.loads((rehearsal.folders[0] / "summary.json").read_text())["final_loss"]),
        reached=reached,
        of_liars=sum(gain["reached"] for liar in rehearsal.liars for gain in gains(liar)),
        goodput=reached / max(1, reached + lost),
        died=died,
        computing=1 - away / sum(line["epoch_seconds"] for line in lines),
        usual=statistics.median(line["epoch_seconds"] for line in lines),
        longest=sorted(spans, key=lambda span: -span["seconds"])[:10],
        newcomers=measure_newcomers(rehearsal),
        growth=measure_growth(rehearsal),
        page=check_monitor(rehearsal),
        lines=sorted(([kind, count, most[kind]] for kind, count in counts.items()), key=lambda it: -it[2]),
        codes=codes,
        difference=largest_difference(rehearsal.folders),
        archive=open_archive(rehearsal.folder / "aux"),
        deaths=rehearsal.deaths,
        events=rehearsal.events,
        lies=[
            dict(kind=liar.kind, minute=(liar.runs[0]["started"] - rehearsal.begin) / 60) for liar in rehearsal.liars
        ],
    )


def print_table(args: argparse.Namespace, f: dict) -> None:
    """Print the table of the figures `f`."""
    swarm, alone = f["losses"].values()
    helpless = [most for kind, _, most in f["lines"] if "--" not in kind and "disk" not in kind]
    longest = [f"{it['trainer']} from minute {it['minute']:.1f} {it['seconds']:.0f} s" for it in f["longest"][:5]]
    growth = sorted(f["growth"].items(), key=lambda it: -it[1])[:4]
    page = ", ".join(f"{name} {len(it)}" for name, it in f["page"].items() if isinstance(it, list))
    print("\n| figure | reached | aim |\n|---|---|---|")
    most = 1.05 if args.lies else 1.03 if args.events else 1.02
    print(f"| validation loss against one process | {swarm:.3f} / {alone:.3f} = {swarm / alone:.3f} | <= {most} |")
    print(f"| samples in the model, of liars | {f['reached']:,}, {f['of_liars']:,} | |")
    print(f"| honest samples that reached a step; ended with a process | {f['goodput']:.2%}; {f['died']:,} | >= 98 % |")
    print(f"| share of time honest trainers compute | {f['computing']:.1%} | >= 95 % |")
    print(
        f"| longest time without an epoch, in usual ones of {f['usual']:.0f} s | "
        f"{f['longest'][0]['seconds'] / f['usual']:.1f}: {', '.join(longest)} | <= 2 |"
    )
    for it in f["newcomers"]:
        print(f"| seconds to first samples, {it['name']} | {it['seconds']:.1f} | <= {it['allowed']:.1f} |")
    print(f"| memory, most growth | {', '.join(f'{role} {share:+.1%}' for role, share in growth)} | <= +5 % |")
    print(f"| page wrong by more than 10 % | {page}, of {f['page']['looks']} looks | never |")
    print(f"| lines without a cure, most in ten minutes | {max(helpless, default=0)} | <= 1 |")
    print(f"| exit codes; largest difference of weights | {sorted(set(f['codes']))}; {f['difference']:.1e} | [0]; 0 |")
    print(f"| archive | {f['archive']} | opens |\n| ended by themselves | {', '.join(f['deaths']) or 'none'} | none |")
    print("\nlines above info of all honest trainers, and the most of one within ten minutes:")
    for kind, count, most in f["lines"]:
        print(f"{count:5} {most:4}  {kind}")


def draw(rehearsal: Rehearsal, reached: int, alone: Path, path: Path) -> None:
    """Draw the loss by samples (honest trainers have reached this number), and the epochs and events of each peer."""
    figure, axes = make_panels(2, 1, figsize=(11, 9))
    swarm, batch = rehearsal.folders[0], rehearsal.args.target_batch_size
    per_epoch = reached / max(read_losses(swarm, 1))  # less than the target if malicious peers claim samples
    for label, folder, size in (("swarm", swarm, per_epoch), ("one process", alone, batch)):
        losses = read_losses(folder, size)
        axes[0].plot(list(losses), list(losses.values()), label=label)
    axes[0].set(xlabel="samples", ylabel="validation loss")
    axes[0].legend()
    names = [trainer.name for trainer in rehearsal.trainers] + ["guest", "monitor", "aux"]
    for trainer in rehearsal.list_honest():
        row = names.index("guest" if trainer.name.startswith("guest") else trainer.name)
        moments = [(line["time"] - rehearsal.begin) / 60 for _, lines in trainer.histories() for line in lines]
        axes[1].plot(moments, [row] * len(moments), "|", color="C0", markersize=9)
    colours = {kind: f"C{number + 1}" for number, kind in enumerate(KINDS)}
    for event in rehearsal.events:
        for name in event["names"]:
            row = names.index("guest" if name.startswith("guest") else name)
            until = event["until"] or rehearsal.ended
            begin, end = ((moment - rehearsal.begin) / 60 for moment in (event["since"], until))
            axes[1].plot([begin, max(end, begin + 0.15)], [row + 0.25] * 2, color=colours[event["kind"]], linewidth=5)
    for liar, following in itertools.zip_longest(rehearsal.liars, rehearsal.liars[1:]):
        begin = (liar.runs[0]["started"] - rehearsal.begin) / 60
        end = ((following.runs[0]["started"] if following else rehearsal.ended) - rehearsal.begin) / 60
        axes[1].axvspan(begin, end, color="k", alpha=0.04)
        axes[1].text(begin, len(names) - 0.4, liar.kind, fontsize=7, rotation=30)
    handles = [axes[1].plot([], [], color=colour, linewidth=5, label=kind)[0] for kind, colour in colours.items()]
    axes[1].legend(handles=handles, ncols=5, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    axes[1].set(yticks=range(len(names)), yticklabels=names, xlabel="minutes; a mark is an epoch")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--model", type=Path, help="folder of the model to start from")
    parser.add_argument("--alone", type=Path, help="folder of an earlier process alone, with as many samples")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--trainers", type=int, default=8, choices=range(2, 9))
    parser.add_argument("--seed", type=int, default=0, help="seed of the events")
    parser.add_argument(
        "--target_batch_size",
        type=int,
        default=40,
        help="samples; an epoch has 50 times as many",
    )
    parser.add_argument("--every", type=float, default=60, help="seconds between two events")
    parser.add_argument("--lie", nargs="+", choices=LIES, metavar="KIND", help="kinds of malicious peers")
    parser.add_argument("--no_liar", dest="lies", action="store_const", const=0, default=9)
    parser.add_argument("--no_events", dest="events", action="store_false")
    parser.add_argument("--short", dest="is_short", action="store_true", help="6 minutes, 4 trainers, 2 attackers")
    parser.add_argument("--output_dir", type=Path, default="outputs/rehearsal", help="a new folder")
    args = parser.parse_args()
    if args.is_short:
        args.minutes, args.trainers, args.every, args.target_batch_size, args.lies = 6, 4, 30, 4, min(args.lies, 2)
    if args.lie:
        args.lies = min(args.lies, len(args.lie))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if why := netlab.unavailable():
        sys.exit(f"no network can be emulated: {why}")
    args.output_dir = args.output_dir.absolute()
    shutil.rmtree(args.output_dir, ignore_errors=True)
    args.output_dir.mkdir(parents=True)
    # otherwise glibc keeps freed blocks of up to 16 MB, which takes a third more memory
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    processes.IS_FORKING = True  # otherwise each start takes ten seconds of a core for imports
    model = args.model or make_model(args)
    try:
        with netlab.Net() as net:
            rehearsal = Rehearsal(args, net, model.absolute())
            try:
                rehearsal.start()
                rehearsal.plan()
                psutil.cpu_percent()
                rehearsal.let_pass(args.minutes * 60)
                rehearsal.say(f"the processors were busy for {psutil.cpu_percent():.0f} % of the time")
                codes = rehearsal.end()
            finally:
                rehearsal.kill()
        figures, file = measure(rehearsal, codes), args.output_dir / "figures.json"
        file.write_text(json.dumps(figures, indent=2, default=str))
        (args.output_dir / "memory.json").write_text(json.dumps(rehearsal.memory))
        print("now one process trains alone", flush=True)
        alone = args.alone or train_alone(args, model.absolute(), figures["reached"])
        losses = read_losses(alone, args.target_batch_size)
        figures["losses"]["alone"] = float(np.interp(figures["reached"], list(losses), list(losses.values())))
        draw(rehearsal, figures["reached"], alone, args.output_dir / "rehearsal.png")
        file.write_text(json.dumps(figures, indent=2, default=str))
        print_table(args, figures)
    finally:
        subprocess.run(["umount", "-l", args.output_dir / DISK], capture_output=True)


if __name__ == "__main__":
    main()
