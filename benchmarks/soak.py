"""Measure the memory of every role over time: a monitor and two trainers, with epochs of about a second.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    python benchmarks/soak.py --minutes 10

For each process of each role, it prints the megabytes after the warm-up and at the end, the slope of a fitted line, and
the open files, and draws soak.png. Memory is PSS (proportional set size), which divides shared pages among processes,
so that a role's processes add up to its real memory.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import psutil
from processes import LOOPBACK, Script, make_prefix

SECONDS_PER_BATCH, BATCH_SIZE = 0.2, 16
TRAINER = (
    "--config_path configs/demo.json --optim adamw --learning_rate 1e-3 --warmup_steps 15 --total_steps 1000000 "
    f"--per_device_train_batch_size {BATCH_SIZE} --gradient_accumulation_steps 1 --target_batch_size 128 "
    "--target_group_size 2 --matchmaking_time 2 --dataloader_num_workers 0 --logging_steps 100"
).split()


def measure_processes(script: Script) -> dict[str, tuple[float, int, float, int]]:
    """Return the PSS in MB, the open files, the own memory and the threads of each process of a role, by its task.

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


def fit_slope(times: list[float], values: list[float]) -> float:
    """Return the slope of the least-squares line."""
    mean_time, mean_value = sum(times) / len(times), sum(values) / len(values)
    covariance = sum((t - mean_time) * (v - mean_value) for t, v in zip(times, values, strict=True))
    return covariance / sum((t - mean_time) ** 2 for t in times)


def draw(samples: list[tuple[float, dict]], warm_up: float, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    roles = list(samples[0][1])
    figure, axes = pyplot.subplots(1, len(roles), figsize=(4 * len(roles), 4), sharey=True, layout="constrained")
    minutes = [seconds / 60 for seconds, _ in samples]
    for axis, role in zip(axes, roles, strict=True):
        for name in samples[-1][1][role]:
            axis.plot(minutes, [roles[role].get(name, (float("nan"),))[0] for _, roles in samples], label=name)
        axis.plot(minutes, [sum(mb for mb, *_ in roles[role].values()) for _, roles in samples], "k", label="all")
        axis.axvline(warm_up / 60, color="#bbbbbb", linewidth=0.8)
        axis.set(title=role, xlabel="minutes", ylim=(0, None))
        axis.legend(fontsize="small")
    axes[0].set_ylabel("MB (PSS)")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--warm_up", type=float, default=0.3, help="share of the time that the fit excludes")
    parser.add_argument("--output_dir", default="outputs/soak", help="folder of the picture, the logs and soak.json")
    args = parser.parse_args()
    folder = Path(args.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)

    common = ["--experiment_prefix", make_prefix(), *LOOPBACK]
    own = ["--refresh_period", 2, "--output_dir", folder / "monitor"]
    scripts = {"monitor": Script(folder / "monitor.log", "run_training_monitor.py", *common, *own)}
    samples: list[tuple[float, dict]] = []
    try:
        common += ["--initial_peers", scripts["monitor"].wait_for(r"--initial_peers (/ip4\S+)").group(1), *TRAINER]
        common += ["--dataset_path", args.dataset_path, "--tokenizer_path", args.tokenizer_path]
        for name in ("trainer 1", "trainer 2"):
            command = ["benchmarks/paced_trainer.py", SECONDS_PER_BATCH, *common, "--output_dir", folder / name]
            command += ["--resume_from_checkpoint", "none"]  # from an earlier run
            scripts[name] = Script(folder / f"{name}.log", *command)
        for name in ("trainer 1", "trainer 2"):
            scripts[name].wait_for("first samples", 120)
        begin = time.monotonic()
        while (seconds := time.monotonic() - begin) < args.minutes * 60:
            samples.append((seconds, {role: measure_processes(script) for role, script in scripts.items()}))
            (folder / "soak.json").write_text(json.dumps(samples))
            time.sleep(5)
        for script in reversed(scripts.values()):
            script.interrupt()
            script.assert_clean_end()
    finally:
        for script in scripts.values():
            script.kill()

    warm_up = args.warm_up * samples[-1][0]
    steady = [sample for sample in samples if sample[0] >= warm_up]
    times = [seconds for seconds, _ in steady]
    epochs = [json.loads(line) for line in (folder / "trainer 1" / "history.jsonl").read_text().splitlines()]
    averaged = sum(line["averaged_with"] == 2 for line in epochs)
    print(
        f"{len(epochs)} epochs, {averaged} of them averaged; from {warm_up / 60:.1f} to {times[-1] / 60:.1f} minutes:"
    )
    print(f"{'role':10} {'process':18} {'MB':>7} {'at end':>7} {'MB/hour':>8} {'files':>6} {'at end':>6}")
    for role in scripts:
        names = steady[-1][1][role]
        table = {name: [roles[role].get(name, (0.0, 0)) for _, roles in steady] for name in names}
        table["all"] = [tuple(map(sum, zip(*roles[role].values(), strict=True))) for _, roles in steady]
        for name, values in table.items():
            memory = [mb for mb, *_ in values]
            # means over a tenth of the time at both ends, because single readings vary
            few = max(1, len(memory) // 10)
            first, last = sum(memory[:few]) / few, sum(memory[-few:]) / few
            print(
                f"{role:10} {name:18} {first:7.1f} {last:7.1f} {fit_slope(times, memory) * 3600:8.1f} "
                f"{values[0][1]:6} {values[-1][1]:6}"
            )
    draw(samples, warm_up, str(folder / "soak.png"))
    print(f"picture: {folder / 'soak.png'}")


if __name__ == "__main__":
    main()
