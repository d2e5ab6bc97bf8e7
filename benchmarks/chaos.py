"""Measure the cost of faults: trainers are killed, frozen, cut off and restarted, on a schedule that depends on a seed.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/chaos.py --minutes 10
    python benchmarks/chaos.py --minutes 2 --faults kill stop --trainers 3
    python benchmarks/chaos.py --minutes 10 --mbits 20 --rtt_ms 75 --large

A monitor and the trainers run undisturbed, then with a fault every --fault_every seconds, then undisturbed again, and
end with Ctrl-C. Batches are paced (paced_trainer.py). The faults:
    kill       kill -9 of all processes of a trainer, and the same command again a few seconds later
    main       the same for its main process only: its helpers have to end by themselves
    stop       SIGSTOP of all its processes for 20 s, like a closed laptop
    partition  half of the trainers cut off from the others for 20 s; only with root (see tests/netlab.py)
--large takes a model of 14 M parameters and epochs of about 40 s, half of it for averaging at 20 Mbit/s. Undisturbed
phases are then three times as long, and faults half as frequent.

Figures:
    goodput          samples that reached an optimizer step / samples computed. Pending samples are not lost, and those
                     of a killed trainer since its last epoch do not count
    throughput kept  samples per second and live trainer that reached a step, relative to the undisturbed swarm. A
                     trainer is not live until its loop starts, while frozen, and in an epoch that a kill cut short
    worst stall      longest time that a live trainer waited for an epoch after the trainers that it could reach had the
                     samples; and the longest time without a step of its loop
    recovery         from the restart, thaw or healing to the next epoch averaged by all live trainers
    agreement        largest difference between any two trainers' weights at the end
"""

import argparse
import contextlib
import json
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import netlab
import psutil
from processes import LOOPBACK, Script, make_prefix, wait_until
from safetensors.torch import load_file

FAULTS = ["kill", "stop", "partition", "main"]
RESTART_AFTER, FAULT_SECONDS = 5.0, 20.0
BATCH_SIZE, SECONDS_PER_BATCH = 8, 0.4
LARGE, LARGE_SECONDS_PER_BATCH, LARGE_BATCH = dict(hidden_size=1024, intermediate_size=4096), 1.6, 420
TRAINER = (
    "--optim adamw --learning_rate 1e-3 --warmup_steps 15 --total_steps 1000000 "
    f"--per_device_train_batch_size {BATCH_SIZE} --gradient_accumulation_steps 1 --dataloader_num_workers 0 "
    "--metadata_expiration 30"
).split()


def measure_processes(script: Script) -> dict[str, tuple[float, int, float, int]]:
    """Return the PSS in MB, the open files, the own memory and the threads of each process of a role, by its task.

    PSS, the proportional set size, divides shared pages among processes, so that the sum is the role's real memory.
    The own memory in MB consists of all anonymous pages and the share of shared memory. Its level counts forked pages
    twice, but only the process itself changes it: the PSS rises if another program ends, and shares no more pages.
    """
    # in the order in which a role forks them
    helpers = iter(["DHT", "state averager", "gradient averager"])
    measured = {}
    for process in sorted(script.processes(), key=lambda process: process.pid):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if process.pid == script.session:
                name = "main"
            elif process.ppid() == script.session and process.cmdline() == psutil.Process(script.session).cmdline():
                name = next(helpers, "other")
            else:
                name = "p2pd" if process.name() == "p2pd" else "other"
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {line.split()[0]: int(line.split()[1]) / 2**10 for line in rollup}
            own = sizes["Anonymous:"] + sizes["Pss_Shmem:"]
            values = sizes["Pss:"], process.num_fds(), own, process.num_threads()
            measured[name] = tuple(map(sum, zip(measured.get(name, (0.0, 0, 0.0, 0)), values, strict=True)))
    return measured


class Trainer:
    """A trainer: its command, which runs again after each kill, its runs and the times at which it was frozen."""

    def __init__(self, name: str, folder: Path, command: list, prefix: list[str], env: dict[str, str] | None = None):
        self.name, self.folder, self.prefix, self.env = name, folder, prefix, env
        self.command = [*command, "--output_dir", folder]
        self.runs: list[dict] = []  # the times started, ready and ended; the history after the end
        self.frozen: list[list[float]] = []  # [from, to]
        folder.mkdir()

    def start(self) -> None:
        log = self.folder / f"log-{len(self.runs)}"
        self.runs.append(dict(started=time.time(), ready=None, ended=None))
        self.script = Script(log, *self.command, prefix=self.prefix, env=self.env)

    def look(self) -> None:
        """Record the time at which the loop starts."""
        if self.runs[-1]["ready"] is None and "until epoch" in self.script.text:
            self.runs[-1]["ready"] = time.time()

    def has_died(self) -> bool:
        return self.runs[-1]["ended"] is None and self.script.process.poll() is not None

    def note_end(self) -> None:
        """Keep the history of a run that has ended; the next run starts a new file."""
        self.runs[-1].update(ended=time.time(), history=self.read_history())
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "history.jsonl").rename(self.folder / f"history-{len(self.runs) - 1}.jsonl")

    def read_history(self) -> list[dict]:
        """Return the history of the current run."""
        path = self.folder / "history.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def histories(self) -> list[tuple[dict, list[dict]]]:
        """Return each run with its history."""
        return [(run, run["history"] if run["ended"] else self.read_history()) for run in self.runs]


class Chaos:
    """The swarm, its faults and their times."""

    def __init__(self, args: argparse.Namespace, net: netlab.Net | None, folder: Path):
        self.args, self.net, self.folder = args, net, folder
        self.random = random.Random(args.seed)
        self.events: list[dict] = []  # the time, kind, names and end of each fault
        self.partitions: list[list] = []  # [from, to, names cut off]
        self.pending: list[tuple[float, Callable[[], None]]] = []
        self.begin = time.time()

    def say(self, text: str) -> None:
        print(f"{time.time() - self.begin:7.1f} s  {text}", flush=True)

    # --- the swarm

    def start(self) -> None:
        names = [f"trainer{number}" for number in range(self.args.trainers)]
        if self.net:
            for name in ("monitor", *names):
                self.net.host(name, rtt_ms=self.args.rtt_ms / 2, up=self.args.mbits, down=self.args.mbits)
            self.net.start()
        common = ["--experiment_prefix", make_prefix()]
        options = ["--refresh_period", 2, "--output_dir", self.folder / "monitor"]
        command = ["run_training_monitor.py", *common, *self.listen("monitor"), *options]
        self.monitor = Script(self.folder / "monitor.log", *command, prefix=self.prefix("monitor"))
        self.trainers: list[Trainer] = []
        peers = self.monitor.wait_for(r"--initial_peers (/ip4\S+)").group(1)
        common += ["--initial_peers", peers, *TRAINER, "--target_group_size", self.args.target_group_size]
        common += ["--target_batch_size", self.args.target_batch_size]
        common += shlex.split(self.args.flags)
        common += ["--dataset_path", self.args.dataset_path, "--tokenizer_path", self.args.tokenizer_path]
        config = json.loads(Path("configs/demo.json").read_text()) | (LARGE if self.args.large else {})
        (self.folder / "config.json").write_text(json.dumps(config))
        common += ["--config_path", self.folder / "config.json"]
        pace = LARGE_SECONDS_PER_BATCH if self.args.large else SECONDS_PER_BATCH
        for name in names:
            command = ["benchmarks/paced_trainer.py", pace, *common, *self.listen(name)]
            self.trainers.append(Trainer(name, self.folder / name, command, self.prefix(name)))
            self.trainers[-1].start()

    def listen(self, name: str) -> list[str]:
        return ["--host_maddrs", f"/ip4/{self.net.ip(name)}/tcp/0"] if self.net else LOOPBACK

    def prefix(self, name: str) -> list[str]:
        return self.net.prefix(name) if self.net else []

    def kill(self) -> None:
        """Kill all processes."""
        for script in [self.monitor, *(trainer.script for trainer in self.trainers)]:
            script.kill()

    def wait_for_joint_epoch(self, seconds: float) -> dict | None:
        """Return the next epoch that all trainers average, or None after this time (for a small model)."""
        begin, seconds = time.time(), seconds * (3 if self.args.large else 1)

        def find() -> dict | None:
            self.work()
            newest = [(trainer.read_history() or [None])[-1] for trainer in self.trainers]
            if any(line is None or line["time"] < begin for line in newest):
                return None
            averaged_by_all = all(line["averaged_with"] == len(self.trainers) for line in newest)
            return newest[0] if averaged_by_all and len({line["epoch"] for line in newest}) == 1 else None

        try:
            return wait_until(find, seconds, "an epoch averaged by all")
        except AssertionError:
            return None

    # --- faults

    def work(self) -> None:
        """Run the actions that are due, and restart trainers that have ended."""
        for due, action in list(self.pending):
            if time.time() >= due:
                self.pending.remove((due, action))
                action()
        for trainer in self.trainers:
            trainer.look()
            if trainer.has_died():
                code = trainer.script.process.returncode
                if code == 2:  # a user error, which a restart would repeat
                    sys.exit(trainer.script.text.strip().splitlines()[-1])
                self.say(f"{trainer.name} ended by itself with {code}, see {trainer.script.log}; it is started again")
                self.events.append(dict(time=time.time(), kind="death", names=[trainer.name], until=time.time()))
                trainer.script.kill()
                trainer.note_end()
                trainer.start()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.pending.append((time.time() + seconds, action))

    def strike(self, kind: str) -> None:
        """Cause a fault, and schedule its end."""
        # only live trainers, except for a partition, which takes half of all
        able = [t for t in self.trainers if t.runs[-1]["ready"] and not t.runs[-1]["ended"]]
        able = [t for t in able if not (t.frozen and t.frozen[-1][1] is None)]
        if kind == "partition":
            victims = sorted(self.random.sample(range(len(self.trainers)), len(self.trainers) // 2))
            victims = [self.trainers[number] for number in victims]
        else:
            victims = [self.random.choice(able)]
        event = dict(time=time.time(), kind=kind, names=[victim.name for victim in victims], until=None)
        self.events.append(event)
        self.say(f"{kind} {' '.join(event['names'])}")
        [victim, *_] = victims

        def undo() -> None:
            event["until"] = time.time()
            if kind in ("kill", "main"):
                event["orphans"] = len(victim.script.left_processes())
                if event["orphans"]:
                    self.say(f"{victim.name} has left {event['orphans']} processes behind after {RESTART_AFTER:g} s")
                    victim.script.kill()
                victim.start()
            elif kind == "stop":
                victim.frozen[-1][1] = time.time()
                victim.script.thaw()
            else:
                self.partitions[-1][1] = time.time()
                self.net.heal()
            self.say(f"{kind} {' '.join(event['names'])}: undone")

        if kind == "kill":
            victim.script.kill()
            victim.note_end()
        elif kind == "main":
            victim.script.process.kill()
            victim.script.process.wait()
            victim.note_end()
        elif kind == "stop":
            victim.frozen.append([time.time(), None])
            victim.script.freeze()
        else:
            self.partitions.append([time.time(), None, event["names"]])
            self.net.partition(event["names"])
        self.later(RESTART_AFTER if kind in ("kill", "main") else FAULT_SECONDS, undo)

    def run_phase(self, name: str, seconds: float, kinds: list[str] = ()) -> list[float]:
        """Wait, with these kinds of faults, and return the times of the begin and the end."""
        begin, bag = time.time(), []
        self.say(f"{name} for {seconds:.0f} s")
        psutil.cpu_percent()
        for number in range(int(seconds / self.args.fault_every) if kinds else 0):
            if not bag:  # all kinds are equally frequent
                bag = self.random.sample(kinds, len(kinds))
            self.later((number + 0.2) * self.args.fault_every, partial(self.strike, bag.pop()))
        while time.time() < begin + seconds or self.pending:
            self.work()
            time.sleep(0.1)
        # if the machine has other work, phases cannot be compared
        self.say(f"the processors were busy for {psutil.cpu_percent():.0f} % of the time")
        return [begin, time.time()]


# --- figures ----------------------------------------------------------------------------------------------------------


def overlap(a: list[float], b: list[float]) -> float:
    """Return the seconds that two intervals share."""
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def gains(trainer: Trainer) -> list[dict]:
    """Return for each epoch of each run the begin and end, the samples reached and lost, and the longest step."""
    result = []
    for run, lines in trainer.histories():
        begin = run["ready"]
        # a run may continue from the counts of a checkpoint
        last = None
        for line in lines:
            if last is None:
                total, last = line["total_samples"] - line["samples_accumulated"], dict(computed=0, pending=0)
            computed = line["computed_samples"] - last["computed"]
            reached = line["total_samples"] - total
            gain = dict(begin=begin, end=line["time"], epoch=line["epoch"], reached=reached, run=run)
            gain["lost"] = computed - reached - (line["pending_samples"] - last["pending"])
            gain |= dict(longest_step=line["longest_step"], averaged_with=line["averaged_with"])
            result.append(gain)
            begin, total = line["time"], line["total_samples"]
            last = dict(computed=line["computed_samples"], pending=line["pending_samples"])
    return result


def live_intervals(trainer: Trainer, end: float, epoch_seconds: float, is_strict: bool = False) -> list[list[float]]:
    """Return the times in which a trainer was live: its loop ran, it was not frozen, and no kill cut the epoch short.

    :param is_strict: whether to exclude also the epoch in which it was frozen, whose samples come late
    """
    result = []
    for run, lines in trainer.histories():
        if run["ready"] is None:
            continue
        begin, stop = run["ready"], run["ended"] or end
        if run["ended"]:
            stop = max(max([line["time"] for line in lines], default=begin), run["ended"] - 2 * epoch_seconds)
        for frozen_from, frozen_to in trainer.frozen:
            if begin <= frozen_from < (run["ended"] or end):
                before = [line["time"] for line in lines if line["time"] <= frozen_from]
                result.append([begin, min(stop, max(before, default=begin) if is_strict else frozen_from)])
                begin = frozen_to or end
        result.append([begin, stop])
    return [interval for interval in result if interval[1] > interval[0]]


def count_reached(trainers: list[Trainer], phase: list[float]) -> float:
    """Return the samples that reached a step in this phase; those of an epoch are spread evenly over its time."""
    return sum(
        gain["reached"] * overlap([gain["begin"], gain["end"]], phase) / (gain["end"] - gain["begin"])
        for trainer in trainers
        for gain in gains(trainer)
    )


def throughput(trainers: list[Trainer], phase: list[float], epoch_seconds: float) -> float:
    """Return the samples per second and live trainer."""
    live = sum(overlap(i, phase) for t in trainers for i in live_intervals(t, phase[1], epoch_seconds))
    return count_reached(trainers, phase) / live


def find_stalls(chaos: Chaos, phase: list[float], rate: float, epoch_seconds: float) -> list[dict]:
    """Return for each epoch of each trainer in the phase the seconds after its samples could have been complete.

    :param rate: samples per second of one undisturbed trainer, with rounds
    """
    live = {t.name: live_intervals(t, phase[1], epoch_seconds, is_strict=True) for t in chaos.trainers}

    def supply(name: str, begin: float, end: float) -> float:
        """Return the samples of the trainers that this one can reach, and its own."""
        borders = sorted({begin, end, *(x for f, t, _ in chaos.partitions for x in (f, t) if begin < x < end)})
        samples = 0.0
        for part in zip(borders, borders[1:], strict=False):
            cut = [set(names) for f, t, names in chaos.partitions if f <= part[0] < t]
            for other, intervals in live.items():
                if not cut or (other in cut[0]) == (name in cut[0]):
                    samples += rate * sum(overlap(interval, part) for interval in intervals)
        return samples

    stalls = []
    for trainer in chaos.trainers:
        epochs = gains(trainer)
        spans = [(gain["begin"], gain["end"], gain["epoch"]) for gain in epochs]
        # with the epoch that a kill or the phase's end cut short, which may have stalled
        for run, lines in trainer.histories():
            if run["ready"]:
                last = lines[-1] if lines else dict(time=run["ready"], epoch=-1)
                spans.append((last["time"], run["ended"] or phase[1], last["epoch"] + 1))
        for begin, end, epoch in spans:
            if begin is None or end <= phase[0] or begin >= phase[1] or end <= begin:
                continue
            # catching up after a freeze counts as recovery
            if any(overlap(frozen, [begin, end]) for frozen in trainer.frozen):
                continue
            needed = begin
            while needed < end and supply(trainer.name, begin, needed) < chaos.args.target_batch_size:
                needed += 0.1
            stalls.append(dict(trainer=trainer.name, epoch=epoch, time=end, seconds=max(0.0, end - needed)))
    return sorted(stalls, key=lambda stall: -stall["seconds"])


def find_standstills(chaos: Chaos, phase: list[float]) -> list[dict]:
    """Return the loops' longest times between two steps, without the time in which they were frozen."""
    standstills = []
    for trainer in chaos.trainers:
        for gain in gains(trainer):
            if phase[0] < gain["end"] <= phase[1]:
                frozen = sum(overlap(f, [gain["begin"], gain["end"]]) for f in trainer.frozen)
                seconds = gain["longest_step"] - (frozen if gain["longest_step"] > frozen else 0)
                standstills.append(dict(trainer=trainer.name, epoch=gain["epoch"], time=gain["end"], seconds=seconds))
    return sorted(standstills, key=lambda standstill: -standstill["seconds"])


def find_recovery(chaos: Chaos, event: dict, end: float, epoch_seconds: float) -> float | None:
    """Return the seconds from the end of a fault to the first epoch that its victims average with all live trainers."""
    live = [live_intervals(trainer, end, epoch_seconds) for trainer in chaos.trainers]
    done = []
    for trainer in chaos.trainers:
        if trainer.name in event["names"]:
            for gain in gains(trainer):
                count = sum(any(b <= gain["begin"] and gain["end"] <= e + 1 for b, e in each) for each in live)
                if gain["end"] > event["until"] and gain["averaged_with"] >= max(2, count):
                    done.append(gain["end"] - event["until"])
                    break
    return max(done) if len(done) == len(event["names"]) else None


def largest_difference(folders: list[Path]) -> float:
    """Return the largest difference between any two trainers' weights."""
    first, *others = [load_file(folder / "model" / "model.safetensors") for folder in folders]
    return max((first[key] - other[key]).abs().max().item() for other in others for key in first)


def report(chaos: Chaos, phases: dict[str, list[float]]) -> dict:
    """Compute and print the figures."""
    trainers = chaos.trainers
    calm = [phases["undisturbed"], phases["undisturbed again"]]
    storm = phases["chaos"]
    ends = [gain["end"] for gain in gains(trainers[0]) if calm[0][0] < gain["end"] <= calm[0][1]]
    epoch_seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    rates = [throughput(trainers, phase, epoch_seconds) for phase in calm]
    rate = sum(rates) / len(rates)
    in_storm = throughput(trainers, storm, epoch_seconds)
    losses = [
        dict(trainer=trainer.name, epoch=gain["epoch"], time=gain["end"], samples=gain["lost"])
        for trainer in trainers
        for gain in gains(trainer)
        if storm[0] < gain["end"] <= storm[1] and gain["lost"]
    ]
    lost = sum(loss["samples"] for loss in losses)
    reached = sum(g["reached"] for t in trainers for g in gains(t) if storm[0] < g["end"] <= storm[1])
    stalls = find_stalls(chaos, storm, rate, epoch_seconds)
    standstills = find_standstills(chaos, storm)
    usual = max(s["seconds"] for phase in calm for s in find_standstills(chaos, phase))
    recoveries = []
    for event, following in zip(chaos.events, [*chaos.events[1:], {"time": storm[1]}], strict=True):
        kept = throughput(trainers, [event["time"], following["time"]], epoch_seconds) / rate
        seconds = find_recovery(chaos, event, time.time(), epoch_seconds)
        recoveries.append(
            dict(kind=event["kind"], time=event["time"], names=event["names"], seconds=seconds, kept=kept)
        )

    def show(item: dict) -> str:
        return (
            f"{item['seconds']:.1f} s ({item['trainer']}, epoch {item['epoch']}, at {item['time'] - chaos.begin:.0f} s)"
        )

    print(f"\nundisturbed: epochs of {epoch_seconds:.1f} s, {rates[0]:.2f} and {rates[1]:.2f} samples/s per trainer")
    print(f"faults: {len(chaos.events)} in {storm[1] - storm[0]:.0f} s")
    print(f"goodput: {reached / max(1, reached + lost):.2%}, {lost} of {reached + lost} samples lost")
    for loss in losses:
        print(
            f"    {loss['samples']} by {loss['trainer']}, epoch {loss['epoch']}, at {loss['time'] - chaos.begin:.0f} s"
        )
    print(f"throughput kept: {in_storm / rate:.1%} ({in_storm:.2f} samples/s per live trainer)")
    print(f"worst stalls: {', '.join(map(show, stalls[:4]))}")
    print(f"loop stood still: {', '.join(map(show, standstills[:4]))}; undisturbed {usual:.1f} s")
    for recovery in recoveries:
        seconds = "never" if recovery["seconds"] is None else f"{recovery['seconds']:.1f} s"
        at = recovery["time"] - chaos.begin
        print(
            f"recovery from {recovery['kind']} of {' '.join(recovery['names'])} at {at:.0f} s: {seconds}; "
            f"{recovery['kept']:.0%} of the throughput until the next fault"
        )
    return dict(
        epoch_seconds=epoch_seconds,
        undisturbed=rates,
        chaos=in_storm,
        throughput_kept=in_storm / rate,
        goodput=reached / max(1, reached + lost),
        reached=reached,
        losses=losses,
        stalls=stalls[:20],
        standstills=standstills[:20],
        recoveries=recoveries,
        events=chaos.events,
        phases=phases,
    )


def measure_memory(chaos: Chaos) -> dict[str, float]:
    """Return the memory of each role, in MB (PSS)."""
    scripts = {"monitor": chaos.monitor, **{trainer.name: trainer.script for trainer in chaos.trainers}}
    return {role: sum(mb for mb, *_ in measure_processes(script).values()) for role, script in scripts.items()}


def run(args: argparse.Namespace, net: netlab.Net | None, folder: Path) -> dict:
    chaos = Chaos(args, net, folder)
    kinds = [kind for kind in args.faults if kind != "partition" or net]
    print(f"logs are in {folder}; faults: {' '.join(kinds)}", flush=True)
    phases: dict[str, list[float]] = {}
    try:
        chaos.start()
        if not chaos.wait_for_joint_epoch(180):
            raise SystemExit(f"no epoch was averaged by all, see {folder}")
        chaos.wait_for_joint_epoch(60)
        phases["undisturbed"] = chaos.run_phase("undisturbed", args.undisturbed)
        memory = [measure_memory(chaos)]
        phases["chaos"] = chaos.run_phase("chaos", args.minutes * 60, kinds)
        joint = chaos.wait_for_joint_epoch(120)
        chaos.say(f"epoch {joint['epoch']} averaged by all" if joint else "no epoch averaged by all within 120 s")
        memory.append(measure_memory(chaos))
        phases["undisturbed again"] = chaos.run_phase("undisturbed", args.undisturbed)
        # all end in the same epoch, after its parameters have been averaged
        chaos.wait_for_joint_epoch(120)
        time.sleep(4)
        for trainer in chaos.trainers:
            trainer.script.process.send_signal(2)
        codes = [trainer.script.wait(120) for trainer in chaos.trainers]
        chaos.say(f"ended with {codes}")
        chaos.monitor.interrupt()
        chaos.monitor.wait(60)
    finally:
        chaos.kill()
    figures = report(chaos, phases)
    epochs = [json.loads((t.folder / "summary.json").read_text())["epoch"] for t in chaos.trainers]
    difference = largest_difference([trainer.folder for trainer in chaos.trainers])
    print(f"final weights: differ by {difference:.1e} at most, of epochs {sorted(set(epochs))}")
    for role in memory[0]:
        print(f"memory of {role}: {memory[0][role]:.0f} MB before the chaos, {memory[1][role]:.0f} MB after it (PSS)")
    return figures | dict(arguments=vars(args), difference=difference, epochs=epochs, memory=memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument(
        "--target_batch_size",
        type=int,
        default=512,
        help="samples: 8 s of four trainers",
    )
    parser.add_argument("--target_group_size", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=5, help="minutes with faults")
    parser.add_argument("--undisturbed", type=float, default=60, help="seconds without faults, before and after")
    parser.add_argument("--fault_every", type=float, default=30, help="seconds between two faults")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0, help="seed of the schedule")
    parser.add_argument("--rtt_ms", type=float, default=20, help="of each path of the emulated network")
    parser.add_argument("--mbits", type=float, default=100, help="of each peer there, up and down")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    parser.add_argument("--flags", default="", help="more flags for all trainers, as one word")
    parser.add_argument("--large", action="store_true", help="14 M parameters, epochs of about 40 s at 20 Mbit/s")
    args = parser.parse_args()
    if args.large:
        args.target_batch_size, args.undisturbed, args.fault_every = (
            LARGE_BATCH,
            3 * args.undisturbed,
            2 * args.fault_every,
        )
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    with contextlib.ExitStack() as stack:
        net = None
        if "partition" in args.faults:
            if why := netlab.unavailable():
                print(f"no partitions: {why}")
            else:
                net = stack.enter_context(netlab.Net())
        figures = run(args, net, folder)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2, default=str))


if __name__ == "__main__":
    main()
