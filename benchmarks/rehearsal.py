"""Measure a swarm of volunteers with home connections, churn and colluding liars: a closed run, then an open one.

    python tokenize_wikitext103.py --objective clm --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/rehearsal.py --minutes 30 --seed 0
    python benchmarks/rehearsal.py --short
    python benchmarks/rehearsal.py --minutes 5 --runs open --events kill --every 90 --lies

A monitor and an auxiliary peer run on servers, and twelve trainers at home (LINES). They train a causal model by Muon
and wsd, with sparse local steps on the log, as docs/organizers.md says. All of them join by the address of the run's
page alone, in the closed run with an invitation. A seed chooses the order of the events:
    kill       kill -9 of a trainer, and the same command 5 s later
    freeze     SIGSTOP of all its processes for 30 s
    partition  half of the trainers are cut off from all others for 30 s
    slow       a connection drops to a tenth for two minutes
    router     the router in front of a trainer gets another address
    clock      a trainer's clock jumps by 2 s, forward or back, and returns after 40 s
    newcomer   a new peer joins, and stays until the next one
and once in each run, disk, monitor and aux: a trainer's disk is full for a minute, the monitor ends and starts again,
and the auxiliary peer is killed, and returns after 30 s.
From a sixth of the time on, there are two malicious peers of one kind of hostile_log.py, with the same seeds: they push
in one direction, or serve one invented state. The next kind follows after twelve minutes. In the closed run they are
members. At the end, one undisturbed process trains on as many samples.

Scaled down, so that two cores carry 16 peers: the model (0.55 M parameters), batches (2 to 8 samples in 4 s, of which
the processor needs 0.2), epochs (90 s) and the intervals of reports and checkpoints. Steps of one process replace all
but one of the 200 joint epochs before the log. Connections, timeouts, local steps and compression are real ones.
The table lists each figure with its aim; --output_dir has pictures, all logs and figures.json.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import hostile_log
import netlab
import numpy as np
import processes
import psutil
from chaos import Trainer, gains, largest_difference, measure_processes, overlap
from processes import LOOPBACK, Script, make_prefix, wait_until

from monitoring.curves import make_panels, save_figure
from swarm.credentials import Authority

FIBRE, CABLE = dict(rtt_ms=10, down=100, up=20), dict(down=50, up=10)
#: of each host: Mbit/s, half of the milliseconds between two such hosts, share of lost packets; samples of a batch
LINES = {
    "fibre1": (FIBRE, 8),
    "cable1": (dict(CABLE, rtt_ms=20, loss=0.002), 6),
    "router1": (dict(CABLE, rtt_ms=20, nat="gateway1"), 3),
    "abroad": (dict(CABLE, rtt_ms=90), 4),
    "wifi": (dict(CABLE, rtt_ms=25, loss=0.01), 4),
    "dsl": (dict(rtt_ms=25, down=16, up=2), 2),
    "fibre2": (FIBRE, 6),
    "cable2": (dict(CABLE, rtt_ms=30, loss=0.002), 4),
    "mobile": (dict(rtt_ms=60, down=30, up=8, loss=0.005, nat="gateway2"), 3),
    "firewall": (dict(CABLE, rtt_ms=90, firewall=True), 3),
    "cable3": (dict(CABLE, rtt_ms=35, loss=0.005), 4),
    "fibre3": (FIBRE, 6),
    **dict.fromkeys(["monitor", "aux"], (dict(rtt_ms=10, down=1000, up=1000), 0)),
    **dict.fromkeys(["guest_0", "guest_1", "liar_0", "liar_1"], (dict(CABLE, rtt_ms=20), 4)),
}
MAX_TRAINERS = 12  # the first lines; the others are for servers, new and malicious peers
CHURN = ["kill", "freeze", "partition", "slow", "router", "clock", "newcomer"]
ONCE = ["disk", "monitor", "aux"]
#: of an event; shorter if events are more frequent than one in 45 s
SECONDS = dict(kill=5.0, freeze=30.0, partition=30.0, slow=120.0, clock=40.0, disk=60.0, aux=30.0)
LIES = [*hostile_log.ATTACKS, "pair_ahead"]
LIE_MINUTES = 12.0
OWN_ID = r"(?: parameters, peer |others may join through --initial_peers /\S+/p2p/)(\w+)"
BAN = r"peer (\w+) (.*: no rounds with it.*)"
SHORT = dict(minutes=4.0, every=25.0, local_steps=6, steps=60)
DISK, DISK_MEGABYTES = "cable1", 200
SECONDS_PER_BATCH, JOINT_STEPS, START_SECONDS = 4.0, 1, 4.0
RECIPE = "--optim muon --learning_rate 2e-3 --lr_scheduler_type wsd --warmup_steps 0"
LOG = f"--local_steps_from {JOINT_STEPS} --compression sparse"
OWN = "--gradient_accumulation_steps 1 --dataloader_num_workers 0 --save_steps 4"
EVALUATION = "--do_eval --max_eval_samples 512"
BEGIN = "--optim muon --learning_rate 6e-3 --warmup_steps 20 --total_steps 1000000 --target_batch_size 64"
# runs on the monitor's host, like a program that follows the run
WATCH = """
import json, time, urllib.request
while True:
    seen = {"time": time.time()}
    try:
        with urllib.request.urlopen("http://127.0.0.1:8080/status.json", timeout=4) as answer:
            seen["status"] = json.load(answer)
    except OSError as e:
        seen["error"] = str(e)
    print(json.dumps(seen), flush=True)
    time.sleep(5)
"""


class Rehearsal:
    """A swarm of this kind, closed or open, its events, of which churn yields the kinds, and its measurements."""

    def __init__(self, args: argparse.Namespace, net: netlab.Net, model: Path, kind: str, churn: Iterator[str]):
        self.args, self.net, self.model, self.folder = args, net, model, args.output_dir / kind
        self.is_closed, self.churn, self.names = kind == "closed", churn, list(LINES)[: args.trainers]
        self.random, self.begin = random.Random(f"{kind} {args.seed}"), time.time()
        self.trainers: list[Trainer] = []
        self.guests: list[Trainer] = []
        self.liars: list[Trainer] = []
        self.servers: dict[str, Script] = {}
        self.events: list[dict] = []  # kind, names, from and until
        self.pending: list[tuple[float, Callable[[], None]]] = []
        self.deaths: list[str] = []
        self.memory: dict[str, list[tuple[float, dict]]] = defaultdict(list)
        self.next_look = 0.0
        #: for each new peer, the seconds to its first samples, without their batch, and those that its line allows
        self.newcomers: dict[str, tuple[float, float]] = {}

    @property
    def honest(self) -> list[Trainer]:
        return self.trainers + self.guests

    def say(self, text: str) -> None:
        print(f"{time.time() - self.begin:7.1f} s  {text}", flush=True)

    # --- the peers

    def start(self) -> None:
        for name in (*self.names, *list(LINES)[MAX_TRAINERS:]):
            self.net.host(name, **LINES[name][0])
        self.net.start()
        (disk := self.folder / DISK).mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "tmpfs", disk], check=True)
        self.prefix, self.page = make_prefix(), f"{self.net.ip('monitor')}:8080"
        self.data = ["--tokenizer_path", self.args.tokenizer_path, "--model_name_or_path", self.model]
        self.start_server("monitor")
        self.servers["monitor"].wait_for("--initial_peers /ip4", 120)
        self.start_server("aux")
        Script(self.folder / "watch.jsonl", "-c", WATCH, prefix=self.net.prefix("monitor"))
        for number, name in enumerate(self.names):
            self.trainers.append(trainer := self.make_trainer(name, name))
            # All at once, the imports would take the two cores a minute. So the first batches last until all are there.
            trainer.command[1] = f"{START_SECONDS * (len(self.names) + 3 - number)},{SECONDS_PER_BATCH}"
            trainer.start()
            trainer.command[1] = SECONDS_PER_BATCH
            self.let_pass(START_SECONDS)
        logs, begun = [trainer.folder / "log-0" for trainer in self.trainers], re.compile("steps begin|joined the log")
        wait_until(lambda: self.work() or all(begun.search(it.read_text()) for it in logs), 300, "a log with all")
        self.started = time.time()

    def join(self, name: str) -> list:
        """Return the flags by which a peer joins: the page's address, and a new invitation in a closed run."""
        invitation = self.folder / f"{name}.invite"
        if self.is_closed and not invitation.exists():
            Authority(self.folder / "authority.pem").invite(self.prefix, name, 86400.0, invitation)
        return ["--initial_peers", self.page, *(["--invite", invitation] if self.is_closed else [])]

    def start_server(self, name: str) -> None:
        command = ["--host_maddrs", f"/ip4/{self.net.ip(name)}/tcp/31337", "--output_dir", self.folder / name]
        command += ["--refresh_period", 5]
        if name == "aux":
            command = ["run_aux_peer.py", *command, *self.join(name), *self.data]
            command += ["--assist_in_averaging", "--store_checkpoints", "--save_steps", 2]
        else:
            command = ["run_training_monitor.py", *command, "--experiment_prefix", self.prefix, "--status_port", 8080]
            command += [*list_recipe(self.args), *LOG.split(), "--local_steps", self.args.local_steps]
            command += ["--authorize", "--authority_key", self.folder / "authority.pem"] if self.is_closed else []
        if name == "monitor" or not self.is_closed:
            command += ["--identity_path", self.folder / f"{name}.id"]
        log = self.folder / f"{name}.log-{len(list(self.folder.glob(f'{name}.log-*')))}"
        self.servers[name] = Script(log, *command, prefix=self.net.prefix(name))

    def make_trainer(self, name: str, host: str, lie: str | None = None) -> Trainer:
        program = ["benchmarks/hostile_peer.py", lie] if lie else ["benchmarks/paced_trainer.py"]
        command = [*program, SECONDS_PER_BATCH, *self.join(name), *self.data, *OWN.split()]
        command += ["--dataset_path", self.args.dataset_path, "--per_device_train_batch_size", LINES[host][1]]
        command += ["--host_maddrs", f"/ip4/{self.net.ip(host)}/tcp/0", "--max_steps", 10**6]
        command += [*EVALUATION.split(), "--eval_steps", 2] if name == self.names[0] else []
        folder = self.folder / name / ("files" if name == DISK else "")  # on the small disk
        (clock := self.folder / f"{name}.clock").write_bytes(bytes(8))
        trainer = Trainer(name, folder, command, self.net.prefix(host), env={"CLOCK_FILE": str(clock)})
        trainer.host, trainer.kind, trainer.batch_size = host, lie, LINES[host][1]
        return trainer

    def measure_memory(self) -> None:
        """Record the memory of each honest role's processes, by its log, of which each start has another one."""
        self.next_look = time.time() + 30
        scripts = [trainer.script for trainer in self.honest if not trainer.runs[-1]["ended"]]
        for script in (*self.servers.values(), *scripts):
            if used := measure_processes(script):
                self.memory[f"{script.log.parent.name}/{script.log.name}"].append((time.time(), used))

    # --- the events

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.pending.append((time.time() + seconds, action))

    def work(self) -> None:
        """Run the actions that are due, restart trainers that have ended, and measure new peers."""
        for due, action in list(self.pending):
            if time.time() >= due:
                self.pending.remove((due, action))
                action()
        for trainer in self.honest:
            trainer.look()
            if trainer.has_died():
                self.deaths.append(f"{trainer.name} with {trainer.script.process.returncode}")
                self.say(f"{self.deaths[-1]}: it has ended by itself, see {trainer.script.log}, and is started again")
                trainer.script.kill()
                trainer.note_end()
                trainer.start()
        if time.time() >= self.next_look:
            self.measure_memory()
        for guest in self.guests:
            match = re.search(r"first samples computed ([\d.]+) s", guest.script.text)
            if match and guest.name not in self.newcomers:
                megabits = (self.net.bytes(guest.host)[1] - guest.received) * 8e-6
                allowed = megabits / LINES[guest.host][0]["down"] * 1.3 + 10
                self.newcomers[guest.name] = float(match[1]) - SECONDS_PER_BATCH, allowed
                set_priority(guest.script, 0)

    def let_pass(self, seconds: float) -> None:
        with contextlib.suppress(AssertionError):
            wait_until(self.work, seconds, "the end of this time")

    def strike(self, kind: str) -> None:
        """Let an event happen to trainers that are live and in no other event; wait for one if there is none."""
        busy = {name for event in self.events if event["until"] is None for name in event["names"]}
        able = [trainer for trainer in self.trainers if trainer.runs[-1]["ready"] and trainer.name not in busy]
        if kind == "disk":
            able = [trainer for trainer in able if trainer.name == DISK]
        elif kind == "router":
            able = [trainer for trainer in able if "nat" in LINES[trainer.name][0]]
        if not able:
            self.later(5, partial(self.strike, kind))
            return
        count = {"partition": len(self.trainers) // 2, "newcomer": 0, "monitor": 0, "aux": 0}.get(kind, 1)
        victims = self.random.sample(able, min(len(able), count))
        event = dict(kind=kind, names=[it.name for it in victims] or [kind], since=time.time(), until=None)
        self.events.append(event)
        undo = getattr(self, f"do_{kind}")(event, *victims)
        self.say(f"{kind} {' '.join(event['names'])}")

        def finish() -> None:
            if undo and undo() is False:
                self.later(0.5, finish)
                return
            event["until"] = time.time()

        self.later(SECONDS.get(kind, 0.5) * min(1.0, self.args.every / 45), finish)

    def do_kill(self, _, victim: Trainer) -> Callable:
        victim.script.kill()
        victim.note_end()
        return victim.start

    def do_freeze(self, _, victim: Trainer) -> Callable:
        victim.script.freeze()
        return victim.script.thaw

    def do_partition(self, _, *victims: Trainer) -> Callable:
        self.net.partition([victim.name for victim in victims])
        return self.net.heal

    def do_slow(self, _, victim: Trainer) -> Callable:
        line = LINES[victim.name][0]
        self.net.set(victim.name, up=line["up"] / 10, down=line["down"] / 10)
        return lambda: self.net.set(victim.name, up=line["up"], down=line["down"])

    def do_router(self, _, victim: Trainer) -> None:
        self.net.renumber(victim.name)

    def do_clock(self, event: dict, victim: Trainer) -> Callable:
        def shift(seconds: float) -> None:
            with open(victim.env["CLOCK_FILE"], "r+b") as file:  # in place, because the processes have mapped it
                file.write(struct.pack("d", seconds))

        shift(self.random.choice([-2.0, 2.0]))
        return partial(shift, 0.0)

    def do_newcomer(self, event: dict) -> Callable | None:
        number = len(self.guests)
        self.guests.append(guest := self.make_trainer(f"guest{number}", f"guest_{number % 2}"))
        event["names"], guest.received = [guest.name], self.net.bytes(guest.host)[1]
        guest.start()
        set_priority(guest.script, -15)  # until its first samples
        if not number:
            return None
        leaver = self.guests[-2]
        leaver.script.interrupt()
        leaver.runs[-1]["ended"] = time.time()  # other peers do not wait for it from now on
        return lambda: leaver.script.process.poll() is not None and leaver.note_end()

    def do_disk(self, _, victim: Trainer) -> Callable:
        file = victim.folder.parent / "full"
        with contextlib.suppress(OSError), open(file, "wb") as disk:
            while True:
                disk.write(bytes(2**20))
        return file.unlink

    def do_monitor(self, _) -> Callable:
        return self.restart("monitor", Script.interrupt)

    def do_aux(self, _) -> Callable:
        return self.restart("aux", Script.kill)

    def restart(self, name: str, stop: Callable[[Script], None]) -> Callable:
        stop(script := self.servers[name])
        return lambda: script.process.poll() is not None and self.start_server(name)

    def lie(self, kind: str) -> None:
        """Replace the malicious peers by two of this kind."""
        for liar in self.liars[-2:]:
            liar.script.kill()
            liar.note_end()
        self.say(f"the liars' kind is {kind}")
        for number in range(2):
            self.liars.append(self.make_trainer(f"liar{len(self.liars)}", f"liar_{number}", kind))
            self.liars[-1].start()

    def plan(self) -> None:
        """Schedule the events and the malicious peers by the seed."""
        seconds, once = self.args.minutes * 60, [kind for kind in ONCE if kind in self.args.events]
        count = int(seconds / self.args.every) - 2
        once = dict(zip(self.random.sample(range(count), len(once)), once, strict=True))
        for number in range(count):
            if kind := once.get(number) or next(self.churn, None):
                self.later((number + 1) * self.args.every, partial(self.strike, kind))
        pairs = max(1, round(seconds * 5 / 6 / (LIE_MINUTES * 60)))
        lies = self.random.sample(LIES, pairs) if self.args.lies is None else self.args.lies
        for number, kind in enumerate(lies):
            self.later(seconds * (1 + 5 * number / len(lies)) / 6, partial(self.lie, kind))

    def end(self) -> list[int]:
        """Send Ctrl-C to all trainers shortly after an epoch, and return the exit codes."""
        present = [trainer for trainer in self.honest if not trainer.runs[-1]["ended"]]

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
        for trainer in self.honest + self.liars:
            if trainer.runs:
                trainer.script.kill()
        for script in self.servers.values():
            script.kill()


def set_priority(script: Script, nice: int) -> None:
    """Set the share of the processors of a peer's session: one that starts would have a machine of its own, and the
    seconds in which it waits for the processors of all other peers are not those of a start."""
    pid = script.process.pid
    with contextlib.suppress(OSError, AssertionError):  # no autogroups in this kernel, or the peer has ended
        wait_until(lambda: os.getsid(pid) == pid, 5, "the session of a forked process")
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


# --- figures ----------------------------------------------------------------------------------------------------------


def list_spans(rehearsal: Rehearsal) -> list[dict]:
    """Return all epochs of honest trainers, also unfinished ones, with their seconds without faults, longest first."""
    spans = []
    for trainer in rehearsal.honest:
        away = [
            [event["since"], event["until"] or rehearsal.ended]
            for event in rehearsal.events
            if event["kind"] == "partition" or (event["kind"] == "freeze" and trainer.name in event["names"])
        ]
        for run, lines in trainer.histories():
            times = [run["ready"], *(line["time"] for line in lines), run["ended"] or rehearsal.ended]
            times = [max(moment, rehearsal.started) for moment in times] if run["ready"] else []
            for span in itertools.pairwise(times):
                seconds = span[1] - span[0] - sum(overlap(span, it) for it in away)
                spans.append(dict(trainer=trainer.name, minute=(span[0] - rehearsal.begin) / 60, seconds=seconds))
    return sorted(spans, key=lambda span: -span["seconds"])


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
    all_trainers, truth = rehearsal.honest + rehearsal.liars, defaultdict(list)
    for line in (line for trainer in all_trainers for _, lines in trainer.histories() for line in lines):
        truth[line["epoch"]].append(line)
    seen = [json.loads(text) for text in (rehearsal.folder / "watch.jsonl").read_text().splitlines()]
    answers = [(it["time"], it["status"]) for it in seen if it.get("status", {}).get("epoch") is not None]
    usual = statistics.median(line["epoch_seconds"] for lines in truth.values() for line in lines)
    changes = [run[name] for trainer in all_trainers for run in trainer.runs for name in ("ready", "ended")]
    changes += [event[name] for event in rehearsal.events for name in ("since", "until")]
    wrong = dict(epoch=[], loss=[], peers=[], samples_per_second=[])
    for moment, status in answers:
        lines, epoch = truth.get(status["epoch"], []), status["epoch"]
        # by most peers; the first may be a liar, or have a clock that is ahead or behind
        reached = [e for e, ls in truth.items() if statistics.median(line["time"] for line in ls) < moment - 10]
        if reached and max(reached) > epoch:
            wrong["epoch"].append((moment, epoch, max(reached)))
        steps = sum(line["mini_steps"] for line in lines)
        # some peers may not have written or reported the epoch yet
        if not steps or moment < max(line["time"] for line in lines) + 15:
            continue
        is_calm = not any(change and moment - 2 * usual < change < moment for change in changes)
        right = dict(loss=sum(line["loss"] * line["mini_steps"] for line in lines if line["loss"]) / steps)
        if is_calm:
            right |= dict(peers=len(lines), samples_per_second=sum(line["samples_per_second"] for line in lines))
        for name, value in right.items():
            if abs(status[name] / value - 1) > 0.1:
                wrong[name].append((moment, status[name], value))
    return wrong | dict(looks=len(answers), failed=len(seen) - len(answers))


def measure_growth(rehearsal: Rehearsal) -> dict[str, dict[str, float]]:
    """Return the growth of each role that runs for 15 minutes, from its minute 10 on: of its own memory as a share of
    its PSS at that time (see measure_processes), and of its open files and threads."""
    growth = {}
    for log, values in rehearsal.memory.items():
        steady = [used.values() for moment, used in values if moment > values[0][0] + 600]
        if len(steady) >= 10:
            few = max(3, len(steady) // 10)
            columns = zip(*(map(sum, zip(*used, strict=True)) for used in steady), strict=True)
            means = [(statistics.fmean(column[:few]), statistics.fmean(column[-few:])) for column in columns]
            (shared, _), files, own, threads = means
            growth[log] = dict(
                memory=(own[1] - own[0]) / shared, files=files[1] - files[0], threads=threads[1] - threads[0]
            )
    return growth


def list_bans(rehearsal: Rehearsal) -> list[str]:
    """Return the lines by which honest peers ban each other."""
    paths = [path for trainer in rehearsal.honest for path in trainer.folder.glob("log-*")]
    texts = [path.read_text() for path in (*paths, *rehearsal.folder.glob("*.log-*"))]
    honest = {peer for text in texts for peer in re.findall(OWN_ID, text)}
    return [f"{peer} {why}" for text in texts for peer, why in re.findall(BAN, text) if peer in honest]


def list_poisoned(rehearsal: Rehearsal, start_loss: float) -> list[str]:
    """Return the epochs of honest trainers whose loss says that the model was replaced."""
    lines = [(it.name, line) for it in rehearsal.honest for _, lines in it.histories() for line in lines]
    return [f"{name} {line['epoch']}" for name, line in lines if (line["loss"] or 0.0) > 1.2 * start_loss]


def run_alone(args: argparse.Namespace, folder: Path, *flags: object) -> Path:
    """Train with one process and these flags, and return its folder."""
    folder.mkdir()
    command = ["run_trainer.py", "--experiment_prefix", make_prefix(), *LOOPBACK, "--dataset_path", args.dataset_path]
    command += ["--tokenizer_path", args.tokenizer_path, *OWN.split(), *flags, "--output_dir", folder]
    script = Script(folder / "log", *command)
    try:
        code = script.wait(7200)
    finally:
        script.kill()
    if code:
        sys.exit(f"one process alone ended with {code}, see {script.log}")
    return folder


def list_recipe(args: argparse.Namespace) -> list:
    """Return the flags of the model's optimizer; the learning rate decays in about the last fifth of the time."""
    rate = sum(batch for _, batch in list(LINES.values())[: args.trainers]) / SECONDS_PER_BATCH
    epochs = JOINT_STEPS + 1.1 * args.minutes * 60 * rate / args.target_batch_size / args.local_steps
    return [*RECIPE.split(), "--total_steps", math.ceil(epochs), "--target_batch_size", args.target_batch_size]


def train_alone(args: argparse.Namespace, model: Path, samples: int) -> Path:
    """Train with one process on this number of samples, with the same schedule, and return its folder."""
    *recipe, _, epochs, _, batch = list_recipe(args)
    steps = (epochs - JOINT_STEPS) * args.local_steps
    own = ["--total_steps", steps, "--target_batch_size", batch, "--max_steps", samples // batch]
    own += ["--per_device_train_batch_size", batch, *EVALUATION.split(), "--eval_steps", args.local_steps]
    return run_alone(args, args.output_dir / "alone", *recipe, *own, "--model_name_or_path", model)


def make_model(args: argparse.Namespace) -> Path:
    """Train the model to start from, and return its folder."""
    print(f"first one process makes {args.steps} steps", flush=True)
    own = ["--config_path", "configs/gpt-demo.json", "--per_device_train_batch_size", 64, "--max_steps", args.steps]
    return run_alone(args, args.output_dir / "begin", *BEGIN.split(), *own) / "model"


def read_losses(folder: Path, samples_per_epoch: float) -> dict[float, float]:
    """Return the validation losses by samples of the whole swarm."""
    lines = [json.loads(text) for path in folder.glob("history*.jsonl") for text in path.read_text().splitlines()]
    losses = {line["validation_epoch"]: line["validation_loss"] for line in lines if line.get("validation_loss")}
    losses[max(line["epoch"] for line in lines)] = json.loads((folder / "summary.json").read_text())["final_loss"]
    return {epoch * samples_per_epoch: loss for epoch, loss in sorted(losses.items())}


def measure(rehearsal: Rehearsal, codes: list[int]) -> dict:
    """Return all figures of a run, except for those that need the process alone."""
    honest = rehearsal.honest
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
    counts, most = list_warnings(honest)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in rehearsal.folders]
    return dict(
        loss=json.loads((rehearsal.folders[0] / "summary.json").read_text())["final_loss"],
        reached=reached,
        lost=lost,
        died=died,
        of_liars=sum(gain["reached"] for liar in rehearsal.liars for gain in gains(liar)),
        goodput=reached / max(1, reached + lost + died),
        computing=1 - away / sum(line["epoch_seconds"] for line in lines),
        usual=statistics.median(line["epoch_seconds"] for line in lines),
        longest=list_spans(rehearsal)[:10],
        newcomers=rehearsal.newcomers,
        growth=measure_growth(rehearsal),
        page=check_monitor(rehearsal),
        lines=sorted(([kind, count, most[kind]] for kind, count in counts.items()), key=lambda it: -it[2]),
        bans=list_bans(rehearsal),
        codes=codes,
        digests=len({hashlib.sha256(it).hexdigest() for it in weights}),
        difference=largest_difference(rehearsal.folders),
        deaths=rehearsal.deaths,
        events=rehearsal.events,
        lies=[liar.kind for liar in rehearsal.liars],
        busy=rehearsal.busy,
        memory=rehearsal.memory,
    )


def list_rows(f: dict) -> dict[str, str]:
    """Return the cells of a run with the figures `f`, by the figure and its aim."""
    # lines that name a flag or the full disk have a cure
    helpless = [most for kind, _, most in f["lines"] if "--" not in kind and "disk" not in kind]
    longest = [f"{it['trainer']} from minute {it['minute']:.1f} {it['seconds']:.0f} s" for it in f["longest"][:4]]
    growth = {
        name: sorted(((it[name], log) for log, it in f["growth"].items()), reverse=True)[:4]
        for name in ("memory", "files", "threads")
    }
    page = ", ".join(f"{name} {len(it)}" for name, it in f["page"].items() if isinstance(it, list))
    newcomers = ", ".join(f"{seconds:.0f} ({allowed:.0f})" for seconds, allowed in f["newcomers"].values())
    ratio = f["loss"] / f["alone"]
    return {
        "validation loss against one process | <= 1.01": f"{f['loss']:.3f} / {f['alone']:.3f} = {ratio:.3f}",
        "samples in the model: of honest peers, of liars | ": f"{f['reached']:,}, {f['of_liars']:,}",
        "honest samples that reached a step, killed processes' included | >= 95 %": f"{f['goodput']:.1%}",
        "share of time honest trainers compute | >= 97 %": f"{f['computing']:.1%}",
        "longest time without an epoch, in usual ones | <= 1.5": (
            f"{f['longest'][0]['seconds'] / f['usual']:.1f} of {f['usual']:.0f} s: {', '.join(longest)}"
        ),
        "seconds to a new peer's first samples (allowed) | always": newcomers or "-",
        "memory from minute 10, most growth | <= +3 %": (
            ", ".join(f"{log} {more:+.1%}" for more, log in growth["memory"]) or "-"
        ),
        "open files, threads from minute 10, most growth | 0": "; ".join(
            ", ".join(f"{log} {more:+.1f}" for more, log in growth[name]) or "-" for name in ("files", "threads")
        ),
        "looks at the page wrong by more than 10 % | 0": f"{page}, of {f['page']['looks']}",
        "lines without a cure, most of one kind in ten minutes | 0": str(max(helpless, default=0)),
        "different weights at the end (largest difference) | 1": f"{f['digests']} ({f['difference']:.1e})",
        "honest peers banned; epochs with a replaced model | 0; 0": f"{len(f['bans'])}; {len(f['poisoned'])}",
        "exit codes; ended by themselves | [0]; none": f"{sorted(set(f['codes']))}; {', '.join(f['deaths']) or 'none'}",
        "processors busy | < 80 %": f"{f['busy']:.0f} %",
    }


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
    names = [*rehearsal.names, "guest", "monitor", "aux"]
    for trainer in rehearsal.honest:
        row = names.index("guest" if trainer.name.startswith("guest") else trainer.name)
        moments = [(line["time"] - rehearsal.begin) / 60 for _, lines in trainer.histories() for line in lines]
        axes[1].plot(moments, [row] * len(moments), "|", color="C0", markersize=9)
    colours = {kind: f"C{number}" for number, kind in enumerate([*CHURN, *ONCE])}
    for event in rehearsal.events:
        for name in event["names"]:
            row = names.index("guest" if name.startswith("guest") else name)
            until = event["until"] or rehearsal.ended
            begin, end = ((moment - rehearsal.begin) / 60 for moment in (event["since"], until))
            axes[1].plot([begin, max(end, begin + 0.15)], [row + 0.25] * 2, color=colours[event["kind"]], linewidth=5)
    for liar in rehearsal.liars[::2]:
        begin = (liar.runs[0]["started"] - rehearsal.begin) / 60
        axes[1].axvline(begin, color="k", alpha=0.2)
        axes[1].text(begin, len(names) - 0.4, f"2 x {liar.kind}", fontsize=7)
    handles = [axes[1].plot([], [], color=colour, linewidth=5, label=kind)[0] for kind, colour in colours.items()]
    axes[1].legend(handles=handles, ncols=5, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    axes[1].set(yticks=range(len(names)), yticklabels=names, xlabel="minutes; a mark is an epoch")
    save_figure(figure, path)


def choose_churn(generator: random.Random, kinds: list[str]) -> Iterator[str]:
    """Yield these kinds of events forever, all equally often."""
    while kinds:
        yield from generator.sample(kinds, len(kinds))


def run(args: argparse.Namespace, model: Path, kind: str, churn: Iterator[str]) -> tuple[Rehearsal, dict]:
    """Run a swarm, and return it and its figures."""
    print(f"{kind} run", flush=True)
    with netlab.Net() as net:
        rehearsal = Rehearsal(args, net, model.absolute(), kind, churn)
        try:
            rehearsal.start()
            rehearsal.plan()
            psutil.cpu_times_percent()
            rehearsal.let_pass(args.minutes * 60)
            shares = psutil.cpu_times_percent()
            rehearsal.busy = 100 - shares.idle - shares.iowait - shares.nice  # without other work at a low priority
            codes = rehearsal.end()
        finally:
            rehearsal.kill()
    return rehearsal, measure(rehearsal, codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--model", type=Path, help="folder of a model to start from")
    parser.add_argument("--runs", nargs="+", choices=["closed", "open"], default=["closed", "open"])
    parser.add_argument("--minutes", type=float, default=30, help="of each run")
    parser.add_argument("--trainers", type=int, default=12, choices=range(2, MAX_TRAINERS + 1))
    parser.add_argument("--seed", type=int, default=0, help="seed of the events")
    parser.add_argument("--target_batch_size", type=int, default=48, help="of a joint step, and of the one process")
    parser.add_argument("--local_steps", type=int, default=25, help="batches of this size in an epoch")
    parser.add_argument("--every", type=float, default=45, help="seconds between two events")
    parser.add_argument("--events", nargs="*", choices=[*CHURN, *ONCE], default=[*CHURN, *ONCE], metavar="KIND")
    parser.add_argument("--lies", nargs="*", choices=LIES, metavar="KIND", help="kinds of malicious peers")
    parser.add_argument("--short", dest="is_short", action="store_true", help="two runs of 4 minutes")
    parser.add_argument("--output_dir", type=Path, default="outputs/rehearsal", help="a new folder")
    parser.set_defaults(**SHORT if parser.parse_args().is_short else dict(steps=400))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if why := netlab.unavailable():
        sys.exit(f"no network can be emulated: {why}")
    args.output_dir = args.output_dir.absolute()
    shutil.rmtree(args.output_dir, ignore_errors=True)
    args.output_dir.mkdir(parents=True)
    source, library = Path(__file__).with_name("clock.c"), args.output_dir / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    # otherwise glibc keeps freed blocks of up to 16 MB, which takes a third more memory
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "LD_PRELOAD": str(library)}
    processes.IS_FORKING = True  # otherwise each start takes ten seconds of a core for imports
    model = args.model or make_model(args)
    churn = choose_churn(random.Random(args.seed), [kind for kind in CHURN if kind in args.events])
    file = args.output_dir / "figures.json"
    try:
        runs = {kind: run(args, model, kind, churn) for kind in args.runs}
        figures = {kind: each for kind, (_, each) in runs.items()}
        file.write_text(json.dumps(figures, indent=2, default=str))
        print("now one process trains alone", flush=True)
        most = max(each["reached"] for each in figures.values())
        alone = train_alone(args, model.absolute(), most)
        losses = read_losses(alone, args.target_batch_size)
        start_loss = json.loads((alone / "summary.json").read_text())["start_loss"]
        for kind, (rehearsal, each) in runs.items():
            each["alone"] = float(np.interp(each["reached"], list(losses), list(losses.values())))
            each["poisoned"] = list_poisoned(rehearsal, start_loss)
            draw(rehearsal, each["reached"], alone, args.output_dir / f"{kind}.png")
        file.write_text(json.dumps(figures, indent=2, default=str))
        table = {kind: list_rows(each) for kind, each in figures.items()}
        print(f"\n| figure | aim | {' | '.join(table)} |\n{'|---' * (len(table) + 2)}|")
        for row in table[args.runs[0]]:
            print(f"| {row} | {' | '.join(rows[row] for rows in table.values())} |")
    finally:
        for kind in args.runs:
            subprocess.run(["umount", "-l", args.output_dir / kind / DISK], capture_output=True)


if __name__ == "__main__":
    main()
