"""Compare the learning curve of a swarm with that of one process on the same batches, with the real scripts.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    OMP_NUM_THREADS=1 python benchmarks/fidelity.py --picture fidelity.png
    OMP_NUM_THREADS=1 python benchmarks/fidelity.py --large --mbits 20 --rtt_ms 75 --minutes 20 --seeds 0 \\
        --runs 3 "3 --local_steps 25 --local_steps_from 8 --compression sparse"
    OMP_NUM_THREADS=1 python benchmarks/fidelity.py --model MODEL --mbits 1 --pace 0.4 --minutes 10 --seeds 0 \\
        --runs 3 "3 --local_steps 25 --local_steps_from 0 --compression sparse"

A run is a number of trainers and their flags. It has its own monitor, and ends after --samples of the whole swarm or
after --minutes. The first trainer measures the validation loss regularly. Columns:
    loss        validation loss of the first trainer's model at the end, and its ratio to the first run's
    samples     of all trainers that are in the model
    computing   share of the trainers' time, from their third epoch on
    MB sent     by a trainer on average, for rounds and states
--mbits emulates a network (tests/netlab.py, needs root). With --pace, a batch waits instead of a GPU's work, so that
the cores are not the bottleneck.
"""

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import netlab
from chaos import LARGE
from processes import LOOPBACK, Script, make_prefix, wait_until

from monitoring.curves import make_panels, save_figure

LOCAL = "--local_steps 8 --local_steps_from 150"
RUNS = ["1", "2", "4", f"4 {LOCAL}"]
TRAINER = (
    "--optim adamw --learning_rate 3e-3 --warmup_steps 15 --total_steps 1000000 --dataloader_num_workers 0 --do_eval"
)


class Run:
    """One swarm, from its start to its end."""

    def __init__(self, args: argparse.Namespace, text: str, seed: int, folder: Path, net: netlab.Net | None):
        count, *flags = shlex.split(text)
        self.args, self.folder, self.net, self.name = args, folder, net, text
        folder.mkdir(parents=True)
        names = [f"trainer{number}" for number in range(int(count))]
        if net:
            for name in ("monitor", *names):
                net.host(name, rtt_ms=args.rtt_ms / 2, up=args.mbits, down=args.mbits)
            net.start()
        prefix = ["--experiment_prefix", make_prefix()]
        monitor = ["run_training_monitor.py", *prefix, "--output_dir", folder / "monitor"]
        self.monitor = self.start("monitor", *monitor)
        self.scripts = [self.monitor]
        peers = self.monitor.wait_for(r"--initial_peers (/ip4\S+)").group(1)
        config = json.loads(Path("configs/demo.json").read_text()) | (LARGE if args.large else {})
        (folder / "config.json").write_text(json.dumps(config))
        command = ["run_trainer.py"] if not args.pace else ["benchmarks/paced_trainer.py", args.pace]
        command += [*prefix, "--initial_peers", peers, *TRAINER.split()]
        command += ["--model_name_or_path", args.model] if args.model else ["--config_path", folder / "config.json"]
        command += ["--dataset_path", args.dataset_path, "--tokenizer_path", args.tokenizer_path, "--seed", seed]
        command += ["--target_batch_size", args.target_batch_size, "--max_eval_samples", args.eval_samples]
        command += ["--per_device_train_batch_size", args.batch_size, *flags]
        for name in names:
            own = ["--eval_steps", args.eval_steps] if name == names[0] else []
            self.scripts.append(self.start(name, *command, *own, "--output_dir", folder / name))
        self.trainers = [folder / name for name in names]

    def start(self, name: str, *command: object) -> Script:
        own = ["--host_maddrs", f"/ip4/{self.net.ip(name)}/tcp/0"] if self.net else LOOPBACK
        return Script(self.folder / f"{name}.log", *command, *own, prefix=self.net.prefix(name) if self.net else [])

    def read(self, trainer: Path) -> list[dict]:
        path = trainer / "history.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def is_over(self) -> bool:
        lines = self.read(self.trainers[0])
        since = time.time() - lines[0]["time"] if lines else 0.0
        assert all(script.process.poll() is None for script in self.scripts), f"one has ended: see {self.folder}"
        return since > self.args.minutes * 60 or bool(lines and lines[-1]["swarm_samples"] >= self.args.samples)

    def finish(self) -> None:
        wait_until(self.is_over, 60 * self.args.minutes + 600, "the end of the run")
        for script in self.scripts[1:]:
            script.process.send_signal(2)
        assert not any([script.wait(300) for script in self.scripts[1:]]), f"not a clean end: see {self.folder}"
        self.monitor.interrupt()
        self.monitor.wait(60)

    def report(self) -> dict:
        histories = [self.read(trainer) for trainer in self.trainers]
        # by epoch; in short epochs, the swarm computes more than a batch before all peers know
        computed = Counter()
        for lines in histories:
            computed.update({line["epoch"]: line["samples_accumulated"] for line in lines})
        samples = dict(zip(sorted(computed), accumulate(computed[epoch] for epoch in sorted(computed)), strict=True))
        curve = {line["validation_epoch"]: line for line in histories[0] if line.get("validation_loss")}
        steady = [line for lines in histories for line in lines[2:]]
        return {
            "run": self.name,
            "samples": max(samples.values()),
            "computing": sum(line["compute_seconds"] for line in steady)
            / sum(line["compute_seconds"] + line["waiting_seconds"] + line["averaging_seconds"] for line in steady),
            "megabytes": statistics.fmean(sum(line["bytes_sent"] for line in lines) / 1e6 for lines in histories),
            "minutes": (histories[0][-1]["time"] - histories[0][0]["time"]) / 60,
            "curve": [(samples.get(epoch, 0), line["validation_loss"]) for epoch, line in curve.items()],
        }


def draw(results: list[dict], path: Path) -> None:
    figure, axes = make_panels(1, 1, figsize=(9, 5.5))
    names = list(dict.fromkeys(result["run"] for result in results))
    for result in results:
        number = names.index(result["run"])
        is_first = result is next(r for r in results if r["run"] == result["run"])
        count, _, flags = result["run"].partition(" ")
        label = f"{count} {'trainers' if int(count) > 1 else 'trainer'} {flags}" if is_first else None
        axes.plot(*zip(*result["curve"], strict=True), color=f"C{number}", linewidth=1.3, label=label)
    axes.set(xlabel="samples of the swarm", ylabel="validation loss")
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--runs", nargs="+", default=RUNS, help="number of trainers and their flags, as one word")
    parser.add_argument("--samples", type=int, default=51_200)
    parser.add_argument("--minutes", type=float, default=30, help="time limit of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds of the initial weights")
    parser.add_argument("--target_batch_size", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16, help="samples of a trainer's step")
    parser.add_argument("--eval_steps", type=int, default=25, help="epochs between two measurements")
    parser.add_argument("--eval_samples", type=int, default=512)
    parser.add_argument("--model", help="folder of a model to continue from, instead of a new one")
    parser.add_argument("--large", action="store_true", help="train a model of 14 M parameters")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each batch waits")
    parser.add_argument("--mbits", type=float, help="Mbit/s of each peer, up and down, on an emulated network")
    parser.add_argument("--rtt_ms", type=float, default=75, help="milliseconds of each path there")
    parser.add_argument("--picture", type=Path, help="file for all curves")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    results = []
    print("| run | seed | loss | / first | samples | minutes | computing | MB sent |\n" + "|---" * 8 + "|", flush=True)
    for seed in args.seeds:
        first = None
        for number, text in enumerate(args.runs):
            folder = Path(tempfile.mkdtemp(prefix="fidelity_")) / f"run{number}"
            with netlab.Net() if args.mbits else contextlib.nullcontext() as net:
                run = Run(args, text, seed, folder, net)
                try:
                    run.finish()
                finally:
                    for script in run.scripts:
                        script.kill()
            results.append(run.report() | {"seed": seed})
            end = results[-1]
            loss = end["curve"][-1][1]
            first = first or loss
            print(
                f"| {text} | {seed} | {loss:.3f} | {loss / first:.3f} | {end['samples']:,} | {end['minutes']:.1f} | "
                f"{end['computing']:.1%} | {end['megabytes']:.1f} |",
                flush=True,
            )
            if args.picture:
                draw(results, args.picture)
            if args.json:
                args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
