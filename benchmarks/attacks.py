"""Measure the damage of one malicious peer to three trainers: a swarm for each kind of attack, and one without.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/attacks.py
    python benchmarks/attacks.py --attacks nan huge --epochs 12 --pace 4
    python benchmarks/attacks.py --closed
    python benchmarks/attacks.py --local_steps 4 --honest 5 --attackers 2 --attacks log_flip log_votes

A swarm consists of a monitor, three trainers of the demo model and, after some epochs, hostile_peer.py. The honest
peers are the same with and without it, and their batches are paced (paced_trainer.py). A kind takes about a minute,
all of them half an hour. With --closed, the attacker is not a member, or has a forged invitation. With --local_steps,
the run uses local steps on the log. Then the attackers start with the others, and work honestly at first. Columns:
    acts       number of acts of the attacker; an attack without acts proves nothing
    epochs     reached by the honest trainers, of --epochs
    averaged   epochs since the attack that all honest trainers averaged together, of those reached
    loss       validation loss of the worst honest model at the end (that of the undisturbed swarm at the same epoch)
    kept       progress kept: (loss at the start - loss) / (loss at the start - the undisturbed swarm's)
    longest    longest epoch of an honest trainer, as a multiple of the usual one: the first round with the attacker /
               all later ones, with the unfinished epoch at the end
    apart      largest difference between the weights of two honest models at the end, or the models that are not finite
    exit       exit codes of the honest trainers, which get Ctrl-C and have 30 s to end
    named by   honest trainers that name the attacker in a warning; with ! if their logs have tracebacks
    notes      the attacker's last act; states that honest trainers loaded; the results of a joining trainer and of the
               monitor; memory (PSS, the highest and before); with --closed, refused calls and the attacker's last words
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import hostile_peer
import hostile_strangers
import processes
import psutil
import torch
from chaos import measure_processes
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey
from processes import LOOPBACK, Script, make_prefix, wait_until
from safetensors.torch import load_file

from arguments import DataArguments, ModelArguments
from experiment.data import load_data, make_eval_batches
from experiment.model import make_model
from swarm.credentials import Authority, Invitation
from training.evaluation import evaluate
from utils import RecordValidator, find_peer_id

PACE, BATCH_SIZE = 0.4, 8  # seconds per batch of a trainer, by default
PATIENCE = 2.0  # times the usual time that the epochs after the attack may take
START_SECONDS, END_SECONDS = 300.0, 30.0  # the first at PACE
NEWCOMERS = ("echo", "donor", "endless", "plain_value", "contracts_5", "ask_9")  # attacks on joining peers
PAIRS = ("pair_ahead",)  # attacks of two peers
EARLY = ("contract_first",)  # attacks before any trainer has joined
MEMORY = {"endless": "newcomer", "ask_60": "trainer0"}  # peers with measured memory
TRAINER = (
    "--config_path configs/demo.json --optim adamw --learning_rate 3e-3 --warmup_steps 5 --total_steps 1000000 "
    f"--per_device_train_batch_size {BATCH_SIZE} --gradient_accumulation_steps 1 --target_batch_size 160 "
    "--bandwidth 100 --average_state_every 5 --dataloader_num_workers 0"
).split()
LOCAL = ["--compression", "sparse", "--local_steps_from", "2"]
LOCAL_SAMPLES = 16  # of an honest peer in a local step of the swarm
TITLES = "attack | acts | epochs | averaged | loss | kept | longest | apart | exit | named by | notes"


class Swarm:
    """A monitor, honest trainers, the peers that joined them, and their files."""

    def __init__(self, args: argparse.Namespace, folder: Path, identities: Path):
        self.args, self.folder, self.identities = args, folder, identities
        self.start_seconds = START_SECONDS * max(1.0, args.pace / PACE)
        self.scripts: list[Script] = []
        self.honest: list[Script] = []
        self.common = ["--experiment_prefix", prefix := make_prefix(), *LOOPBACK]
        folder.mkdir()
        self.prefix, self.authority = prefix, Authority(folder / "authority.pem") if args.closed else None

    def start_monitor(self) -> None:
        options = ["--refresh_period", 1, "--output_dir", self.folder / "monitor"]
        options += ["--authorize", "--authority_key", self.authority.path] if self.authority else []
        monitor = self.start("monitor", "run_training_monitor.py", *self.common, *options)
        peers = monitor.wait_for(r"--initial_peers (/ip4\S+)", START_SECONDS).group(1)
        self.common += ["--initial_peers", peers]

    def start(self, name: str, *command: object) -> Script:
        self.scripts.append(Script(self.folder / f"{name}.log", *command))
        return self.scripts[-1]

    def flags(self, name: str, *more: object) -> list:
        data = ["--dataset_path", self.args.dataset_path, "--tokenizer_path", self.args.tokenizer_path]
        own = ["--seed", self.args.seed, "--output_dir", self.folder / name]
        # the data order comes from the peer's id
        identity = ["--identity_path", self.identities / f"{name}.id"]
        if self.authority:
            identity = ["--invite", self.invite(name)]
        sizes = ["--local_steps", self.args.local_steps, "--target_batch_size", LOCAL_SAMPLES * self.args.honest]
        local = [*LOCAL, *sizes] if self.args.local_steps > 1 else []
        return [*self.common, *data, *TRAINER, *local, *own, *identity, *more]

    def invite(self, name: str) -> Path:
        """Write an invitation for this identity, and return its path; a forged authority signs the attacker's."""
        identity, path = self.identities / f"{name}.id", self.folder / f"{name}.invite"
        if not identity.exists():
            new = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=RSAPrivateKey().to_bytes())
            identity.write_bytes(new.SerializeToString())
        key = RSAPrivateKey()
        key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(identity.read_bytes()).data})
        authority = Authority(self.folder / "forger.pem") if name == "attacker" else self.authority
        peer_id = find_peer_id(RecordValidator(key).local_public_key)
        data = authority.issue(self.prefix, peer_id, name, time.time() + 86400.0)
        Invitation(key, data, authority.public_key).save(path)
        return path

    def start_trainer(self, name: str, *more: object) -> Script:
        flags = self.flags(name, "--max_steps", self.args.epochs, *more)
        return self.start(name, "benchmarks/paced_trainer.py", self.args.pace, *flags)

    def read_history(self, name: str) -> list[dict]:
        """Return the history of a trainer: one line per epoch."""
        return self.read_json_lines(f"{name}/history.jsonl")

    def read_json_lines(self, name: str) -> list[dict]:
        path = self.folder / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def histories(self) -> list[list[dict]]:
        return [self.read_history(name) for name in list_honest(self.args)]

    def wait_for_epoch(self, epoch: int) -> None:
        def have_all() -> bool:
            return all(lines and lines[-1]["epoch"] >= epoch for lines in self.histories())

        wait_until(have_all, self.start_seconds, f"epoch {epoch} of all honest trainers, see {self.folder}")

    def end_honest(self) -> list[int | None]:
        """Stop the honest trainers by Ctrl-C, and return their exit codes, or None for a trainer that does not stop."""
        for script in self.honest:
            if script.process.poll() is None:
                script.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + END_SECONDS
        while any(script.process.poll() is None for script in self.honest) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [script.process.poll() for script in self.honest]

    def end(self) -> None:
        """Stop the other peers, whose exit codes do not matter."""
        for script in reversed(self.scripts):
            if script.process.poll() is None:
                script.process.send_signal(signal.SIGINT)
                with contextlib.suppress(AssertionError):
                    script.wait(10)

    def kill(self) -> None:
        """Kill all processes, even if Ctrl-C is pressed twice."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for script in self.scripts:
            script.kill()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def list_honest(args: argparse.Namespace) -> list[str]:
    return [f"trainer{number}" for number in range(args.honest)]


class Judge:
    """A judge that measures the validation loss of all models in the same way."""

    def __init__(self, args: argparse.Namespace):
        torch.set_num_threads(1)  # the swarm needs the other cores
        model_args = ModelArguments(config_path="configs/demo.json", tokenizer_path=args.tokenizer_path, seed=args.seed)
        data_args = DataArguments(dataset_path=args.dataset_path)
        tokenizer, splits, _ = load_data(model_args, data_args, needs_validation=True)
        self.model = make_model(model_args, tokenizer)
        options = dict(batch_size=32, max_samples=128)
        self.batches = list(make_eval_batches(splits["validation"], tokenizer, data_args, **options))
        self.start_loss = self.measure()
        #: losses of the undisturbed swarm, by epoch
        self.losses: dict[int, float] = {}

    def measure(self, folder: Path | None = None) -> float:
        if folder:
            self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        with torch.no_grad():
            return evaluate(self.model, self.batches, torch.device("cpu"))["loss"]

    def learn_usual(self, folder: Path) -> None:
        """Measure the checkpoints of the undisturbed swarm."""
        for path in folder.glob("checkpoint-*"):
            self.losses[int(path.name.split("-")[1])] = self.measure(path)

    def usual_loss(self, epoch: int) -> float:
        return self.losses[min(max(epoch, min(self.losses)), max(self.losses))]


@dataclasses.dataclass
class Course:
    """The outcome of a swarm."""

    swarm: Swarm
    codes: list[int | None]  # exit codes of the honest trainers
    began: float | None  # the time of the first act, or of a new peer's start; None without an attack
    ended: float  # the time at which the honest trainers ended, or got Ctrl-C
    attackers: list[Script]
    newcomer: Script | None
    memory: list[float]  # MB of the peer in MEMORY

    @property
    def acts(self) -> list[dict]:
        lines = [line for attacker in self.attackers for line in attacker.json_lines()]
        return sorted((line for line in lines if "peer" not in line), key=lambda line: line["time"])

    @property
    def attacker_ids(self) -> list[str]:
        return [find_peer(attacker) for attacker in self.attackers]


def find_peer(script: Script) -> str:
    """Return the peer id of a script."""
    match = re.search(r'(?:parameters, peer |"peer": ")(\w+)', script.text)
    return match[1] if match else "nobody"


def run_swarm(args: argparse.Namespace, kind: str | None, folder: Path, identities: Path, seconds: float) -> Course:
    """Run one swarm from start to end.

    :param kind: the kind of attack, or None
    :param seconds: the time limit of the epochs after the attack
    """
    swarm = Swarm(args, folder, identities)
    course = Course(swarm, [], None, 0.0, [], None, [])

    def start_attackers() -> None:
        for number in range(max(args.attackers, 2 * (kind in PAIRS))):
            name = f"attacker{number or ''}"
            flags = swarm.flags(name, "--max_steps", 10**6)
            course.attackers.append(swarm.start(name, "benchmarks/hostile_peer.py", kind, args.pace, *flags))

    try:
        swarm.start_monitor()
        if kind in EARLY:
            start_attackers()
            wait_until(lambda: course.acts, START_SECONDS, f"the attack, see {swarm.folder}")
        for name in list_honest(args):
            keep = ["--save_steps", 1, "--save_total_limit", 99] if kind is None and name == "trainer0" else []
            swarm.honest.append(swarm.start_trainer(name, *keep))
        if kind not in EARLY:
            if args.local_steps == 1 or kind in hostile_strangers.STRANGERS:
                swarm.wait_for_epoch(args.attack_after)
            if kind is not None:
                start_attackers()
        deadline = time.time() + swarm.start_seconds
        while time.time() < deadline and any(script.process.poll() is None for script in swarm.honest):
            time.sleep(0.2)
            watch(course, kind)
            if course.began:
                deadline = course.began + seconds
        course.ended, course.codes = time.time(), swarm.end_honest()
        swarm.end()
    finally:
        swarm.kill()
    return course


def watch(course: Course, kind: str | None) -> None:
    """Record the start of the attack, start a new peer, and measure memory."""
    swarm = course.swarm
    is_there = course.acts or any("first samples" in attacker.text for attacker in course.attackers)
    if kind in NEWCOMERS and is_there and not course.newcomer:
        course.newcomer = swarm.start_trainer("newcomer")
        course.began = time.time()
    if course.acts and not course.began:
        course.began = course.acts[0]["time"]
    who = {"newcomer": course.newcomer, "trainer0": swarm.honest[0]}.get(MEMORY.get(kind))
    if who:
        course.memory.append(sum(megabytes for megabytes, *_ in measure_processes(who).values()))


# --- figures ----------------------------------------------------------------------------------------------------------


def list_spans(course: Course) -> list[tuple[float, float]]:
    """Return the end and the seconds of each epoch of each honest trainer, with the unfinished one at the end."""
    spans = []
    for lines, code in zip(course.swarm.histories(), course.codes, strict=True):
        times = [line["time"] for line in lines]
        if not lines or lines[-1]["epoch"] < course.swarm.args.epochs or code is None:
            times.append(course.ended)
        spans += [(end, end - begin) for begin, end in zip(times, times[1:], strict=False)]
    return spans


def find_longest(course: Course, usual: float) -> tuple[float, float]:
    """Return the longest epoch, as a multiple of the usual one: during the start of the attack, and later."""
    later, first = [], []
    for lines in course.swarm.histories():
        borders = [line["time"] for line in lines if line["time"] > (course.began or 0)]
        first.append(borders[0] if borders else course.ended)
    for end, seconds in list_spans(course):
        if course.began is None or end > course.began:
            later.append((end > max(first) + 0.5, seconds / usual))
    return tuple(max([ratio for is_later, ratio in later if is_later == which], default=0.0) for which in (False, True))


def describe_weights(folders: list[Path]) -> str:
    """Return the largest difference between two models, or the models that are not finite."""
    models = {folder.parent.name: load_file(folder / "model.safetensors") for folder in folders}
    broken = [name for name, model in models.items() if not all(tensor.isfinite().all() for tensor in model.values())]
    if broken:
        return f"not finite: {' '.join(broken)}"
    first, *others = models.values()
    return f"{max([(first[k] - other[k]).abs().max().item() for other in others for k in first], default=0.0):.1g}"


def count_rounds(course: Course) -> str:
    """Count the epochs since the attack that all honest trainers averaged together."""
    since = [
        {line["epoch"]: line["averaged_with"] for line in lines if line["time"] > (course.began or 0)}
        for lines in course.swarm.histories()
    ]
    epochs = set().union(*since)
    together = [epoch for epoch in epochs if all(averaged.get(epoch, 0) >= len(since) for averaged in since)]
    return f"{len(together)} of {len(epochs)}"


def describe_notes(kind: str | None, course: Course) -> str:
    swarm, notes = course.swarm, []
    if course.acts:
        notes += [f"{name} {value}" for name, value in course.acts[-1].items() if name not in ("act", "time")]
    joining = "loaded the state of epoch"
    if taken := sum(script.text.count(joining) for script in swarm.honest):
        notes.append(f"{taken} states taken")
    honest = [find_peer(script) for script in swarm.honest]
    banned = [peer for script in swarm.honest for peer in re.findall(r"peer (\w+) .*: no rounds with it", script.text)]
    if wrong := sum(peer in honest for peer in banned):
        notes.append(f"{wrong} bans of honest peers by honest peers")
    if course.newcomer:
        lines, code = swarm.read_history("newcomer"), course.newcomer.process.poll()
        took = f"took {course.newcomer.text.count(joining)} states, " if joining in course.newcomer.text else ""
        ends = [
            f"loss {line['loss']:.2f} averaged with {line['averaged_with']}, " for line in (*lines[:1], *lines[-1:])
        ]
        notes.append(f"newcomer: {took}{'then '.join(ends)}exit {code}")
    if "metrics" in kind:
        lines = swarm.read_json_lines("monitor/metrics.jsonl")
        shown = [line for line in lines if line["time"] > (course.began or 0)]
        least, most = min(line["loss"] for line in lines), max(line["alive_peers"] for line in lines)
        peers = len(json.loads((swarm.folder / "monitor" / "summary.json").read_text())["peers"])
        notes.append(f"monitor: loss {least:.2f}, {most} peers, {peers} thanked, {len(shown)} epochs shown")
    if swarm.authority:
        honest = [script for script in swarm.scripts if script not in course.attackers]
        counted = re.findall(r"refused ([\d,]+) calls?, the last of (.*?),", "".join(script.text for script in honest))
        notes.append(f"{len(counted)} lines: refused {', '.join(f'{calls} of {who}' for calls, who in counted)}")
        notes += [line for it in course.attackers if not course.acts for line in it.text.splitlines()[-1:]]
    if course.memory:
        notes.append(f"{MEMORY[kind]}: {max(course.memory):.0f} MB ({course.memory[0]:.0f} before)")
    return "; ".join(notes).replace("|", " ")


def describe(kind: str | None, course: Course, judge: Judge, usual: float) -> list[str]:
    """Return a row of the table."""
    swarm, logs = course.swarm, [script.text for script in course.swarm.honest]
    epochs = [lines[-1]["epoch"] if lines else 0 for lines in swarm.histories()]
    folders = [path for name in list_honest(swarm.args) if (path := swarm.folder / name / "model").exists()]
    losses = [judge.measure(folder) for folder in folders]
    loss, kept = "no model", "-"
    if losses:
        worst, expected = max(losses, key=lambda loss: (loss != loss, loss)), judge.usual_loss(min(epochs))
        loss = f"{worst:.3f} ({expected:.3f})"
        kept = f"{(judge.start_loss - worst) / (judge.start_loss - expected):.0%}"
    warnings = [[line for line in log.splitlines() if "warning:" in line or "error:" in line] for log in logs]
    naming = sum(any(peer in line for line in lines for peer in course.attacker_ids) for lines in warnings)
    tracebacks = sum(log.count("Traceback") for log in logs)
    return [
        kind or "none",
        str(len(course.acts)),
        f"{' to '.join(str(epoch) for epoch in sorted({min(epochs), max(epochs)}))} of {swarm.args.epochs}",
        count_rounds(course),
        loss,
        kept,
        " / ".join(f"{ratio:.1f}" for ratio in find_longest(course, usual)),
        describe_weights(folders) if folders else "-",
        " ".join("killed" if code is None else str(code) for code in course.codes),
        f"{naming}{'!' * bool(tracebacks)}",
        describe_notes(kind or "none", course),
    ]


def measure(args: argparse.Namespace) -> list[list[str]]:
    """Print the table, and return its rows."""
    folder = Path(tempfile.mkdtemp(prefix="attacks_"))
    (identities := folder / "identities").mkdir()
    judge = Judge(args)
    print(f"{len(args.attacks)} kinds of attack, {os.cpu_count()} cores; logs are in {folder}", flush=True)

    psutil.cpu_percent()
    course = run_swarm(args, None, folder / "none", identities, 0.0)
    judge.learn_usual(folder / "none" / "trainer0")
    usual = statistics.median(seconds for _, seconds in list_spans(course))
    print(f"undisturbed: epochs of {usual:.1f} s, validation loss from {judge.start_loss:.3f} nats")
    # if the machine has other work, peers are excluded without any attack
    print(f"{count_rounds(course)} epochs averaged by all; the processors were busy for {psutil.cpu_percent():.0f} %\n")
    print(f"| {TITLES} |\n{'|---' * len(TITLES.split('|'))}|")
    rows = [describe(None, course, judge, usual)]
    print(f"| {' | '.join(rows[0])} |", flush=True)
    for kind in args.attacks:
        seconds = PATIENCE * usual * (args.epochs - args.attack_after)
        try:
            course = run_swarm(args, kind, folder / kind, identities, seconds)
        except AssertionError as e:  # from Script; the other rows follow
            print(f"{kind}: {e}", file=sys.stderr)
            continue
        rows.append(describe(kind, course, judge, usual))
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    kinds, log_kinds = hostile_peer.KINDS, hostile_peer.LOG_KINDS
    names = f"default: {', '.join(kinds)}; with --local_steps: {', '.join(log_kinds)}"
    parser.add_argument("--attacks", nargs="+", choices={*kinds, *log_kinds}, metavar="KIND", help=names)
    parser.add_argument("--epochs", type=int, default=16, help="epochs of the honest trainers")
    parser.add_argument("--attack_after", type=int, default=4, help="epochs before the attacker starts")
    parser.add_argument("--pace", type=float, default=PACE, help="seconds per batch: 4 for epochs of half a minute")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.add_argument("--local_steps", type=int, default=1, help="above 1: on the replicated log")
    parser.add_argument("--honest", type=int, default=3, help="honest trainers")
    parser.add_argument("--attackers", type=int, default=1, help="trainers that attack together")
    parser.add_argument("--closed", action="store_true", help="make a closed run; the attacker is not a member")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    args.attacks = args.attacks or (log_kinds if args.local_steps > 1 else kinds)
    processes.IS_FORKING = True  # otherwise each swarm takes half a minute for imports
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        rows = measure(args)
    finally:  # with the children that have just started, and without interruption
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
    if args.json:
        args.json.write_text(json.dumps([dict(zip(TITLES.split(" | "), row, strict=True)) for row in rows], indent=2))


if __name__ == "__main__":
    main()
