"""Measure training on one GPU, and print a table for docs/measured.md.

    make gpu-bench                              # 8 minutes on an H200
    python benchmarks/gpu_bench.py --small      # the same on the CPU, with toy shapes and without the compiler

Each measurement has its own process, with bf16 and scaled dot-product attention: passes over random tokens with the
trainer's --torch_compile and `--per_device_train_batch_size auto`; steps of optimizers; a plain loop over the sample
corpus with AdamW on the device; run_trainer.py as the only peer with the same model, batches and samples in an epoch,
in turn with the loop; two trainers in one swarm on the same device, with twice as many samples in an epoch. A ratio
compares within a turn. Rates are taken between ends of epochs, without the first epoch. The end of an epoch costs a
swarm of one a fixed time, because AdamW's step is on the host. So its ratio grows with the epoch.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_optimizer import measure_muon, measure_steps
from throughput import ROOT, wait_for

from arguments import AveragingArguments, DataArguments, ModelArguments, OptimizerArguments, TrainerArguments
from common.console import UserError, edge
from common.files import read_json_lines
from experiment.data import load_data, make_train_batches
from experiment.model import make_model
from experiment.objectives import compute_losses
from experiment.optimizer import make_local_optimizer, make_param_groups
from training import devices
from training.metrics import format_speed
from training.model import move_batch
from training.prefetch import TrainingFeed

BATCH_SIZE, ACCUMULATION = 16, 8  # of the plain loop and the trainers
EPOCHS = 2  # measured epochs, after one in which processes start and find each other
TURNS = 3  # of the plain loop and the swarm of one, at most


class Model(NamedTuple):
    """A model to measure: its tokens in a sequence, its vocabulary, and the aim."""

    config_path: str
    length: int
    vocab_size: int
    aim: str = ""


class Scale(NamedTuple):
    """The device, the shapes and the seconds of all measurements."""

    device: str
    models: dict[str, Model]
    samples: int  # eight times the largest batch of a model's passes
    epoch_seconds: float  # of the plain loop
    turn_seconds: float  # from the start; no turn but the first starts later
    workers: int


GPT, ALBERT, LEAN = "GPT-2 124M", "ALBERT-large", "LeanALBERT-large"
FULL_MODELS = {
    GPT: Model("configs/gpt2-124m.json", 1024, 50304, "MFU >= 45 %"),
    ALBERT: Model("configs/albert-large.json", 512, 30000, "MFU >= 50 %"),
    LEAN: Model("configs/lean-albert.json", 512, 30000),
}
SMALL_PATHS = {GPT: "configs/gpt-demo.json", ALBERT: "configs/demo.json", LEAN: "configs/lean-demo.json"}
SMALL_MODELS = {name: Model(path, 64, 1000) for name, path in SMALL_PATHS.items()}
FULL = Scale("cuda:0", FULL_MODELS, samples=512, epoch_seconds=8.0, turn_seconds=390.0, workers=4)
SMALL = Scale("cpu", SMALL_MODELS, samples=16, epoch_seconds=2.0, turn_seconds=40.0, workers=0)


def run_alone(function, *args):
    """Return a function's result from a process of its own, which frees the device's memory at its end."""
    print(f"{function.__name__} ...", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure_model(scale: Scale, name: str) -> dict:
    """Return the batch size, FLOP a token, speed and memory of a model's passes."""
    spec, is_gpu = scale.models[name], scale.device != "cpu"
    args = TrainerArguments(device=scale.device, bf16=True, torch_compile=is_gpu, per_device_train_batch_size="auto")
    device, model = devices.choose_devices(args)[0], make_model(ModelArguments(spec.config_path), spec.vocab_size)
    autocast, _ = devices.place_model(model, device, args)
    ids, share = torch.randint(5, spec.vocab_size, (1, spec.length)), 1.0 if model.objective.is_causal else 0.15
    labels = torch.where(torch.rand(ids.shape) < share, ids, -100)
    labels[:, 0] = -100  # no token before it predicts it
    sequence = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    sequence |= {"token_type_ids": torch.zeros_like(ids), "sentence_order_label": torch.tensor([1])}
    flop = devices.count_flop(model, sequence, device) / spec.length
    averaging = AveragingArguments(target_batch_size=scale.samples)
    tuned = devices.tune_to_device(model, lambda: sequence, args, device, autocast, averaging, 1)
    rows = tuned.per_device_train_batch_size
    batch = move_batch(devices.stretch_batch(sequence, rows), device)
    for _ in range(3):  # may compile again for this batch size
        devices.time_pass(model, batch, autocast)
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median([devices.time_pass(model, batch, autocast) for _ in range(20)])
    compiled = "compiled" if any(module._compiled_call_impl for module in model.modules()) else "not compiled"
    shape, memory = f"{name}, {compiled}, {rows} x {spec.length:,} tokens", torch.cuda.max_memory_allocated()
    return {"shape": shape, "flop": flop, "tokens_per_second": rows * spec.length / seconds, "memory": memory}


def measure_plain(scale: Scale, own: dict) -> dict:
    """Return the speed of the plain loop. The first time, choose the batches of an epoch too."""
    _, dataset_path, _, tokenizer_path = own["paths"]
    args, data_args = TrainerArguments(device=scale.device, bf16=True), DataArguments(dataset_path=dataset_path)
    model_args = ModelArguments(scale.models[GPT].config_path, tokenizer_path=tokenizer_path)
    tokenizer, dataset, _ = load_data(model_args, data_args, needs_validation=False)
    device, model = devices.choose_devices(args)[0], make_model(model_args, tokenizer)
    autocast, _ = devices.place_model(model, device, args)
    optimizer = make_local_optimizer(OptimizerArguments(optim="adamw", learning_rate=1e-4), make_param_groups(model))
    options = dict(batch_size=BATCH_SIZE, seed=1, num_workers=scale.workers)
    feed = TrainingFeed(make_train_batches(dataset["train"], tokenizer, data_args, **options), device)

    def run(batches: int) -> float:
        start = time.perf_counter()
        for _ in range(batches):
            with autocast:
                loss = compute_losses(model, move_batch(next(feed), device))["loss"]
            (loss / batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    if "batches" not in own:
        run(5)
        step_seconds = run(5 * ACCUMULATION) / 5
        own["batches"] = ACCUMULATION * max(1, round(scale.epoch_seconds / step_seconds))
    run(own["batches"])
    feed.take_counts()
    seconds, tokens = sum(run(own["batches"]) for _ in range(EPOCHS)), feed.take_counts()["tokens"]
    own["samples"], own["seconds"] = own["batches"] * BATCH_SIZE, seconds / EPOCHS
    own |= {"tokens_per_sample": tokens / EPOCHS / own["samples"], "tokens_per_second": tokens / seconds, "mfu": None}
    return own | {"memory": torch.cuda.max_memory_allocated(), "parameters": model.num_parameters()}


def read_joint(folder: Path, count: int) -> list[dict]:
    """Return a trainer's epochs that this number of peers averaged, up to the last measured one."""
    return [line for line in read_json_lines(folder / "history.jsonl") if line["averaged_with"] == count][: 1 + EPOCHS]


def measure_swarm(scale: Scale, own: dict, count: int) -> dict:
    """Return the total speed of a swarm of this number of trainers, started as users do, and the memory of one."""
    print(f"swarm of {count} ...", file=sys.stderr, flush=True)
    processes, peers = {}, []
    command = [sys.executable, "run_trainer.py", "--experiment_prefix", "benchmark"]
    command += (
        f"--config_path {scale.models[GPT].config_path} --optim adamw --learning_rate 1e-4 --bf16 --matchmaking_time 4 "
        f"--target_batch_size {own['samples'] * count} --per_device_train_batch_size {BATCH_SIZE} "
        f"--gradient_accumulation_steps {ACCUMULATION} --target_group_size 2 --device {scale.device} "
        f"--dataloader_num_workers {scale.workers} --host_maddrs /ip4/127.0.0.1/tcp/0"
    ).split()
    with tempfile.TemporaryDirectory() as name:
        try:
            for number in range(count):
                folder = Path(name) / str(number)
                folder.mkdir()
                words = [*command, *own["paths"], "--output_dir", str(folder), *peers]
                with open(folder / "log", "w") as log:
                    processes[folder] = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
                match = wait_for(r"others may join through (--initial_peers) (/\S+)", folder / "log", processes[folder])
                peers = peers or list(match.groups())
            while any(len(read_joint(folder, count)) < 1 + EPOCHS for folder in processes):
                time.sleep(0.1)
                for folder, process in processes.items():
                    assert process.poll() is None, f"a trainer ended:\n{(folder / 'log').read_text()[-3000:]}"
            joint = [read_joint(folder, count) for folder in processes]
        finally:
            for process in processes.values():
                process.send_signal(signal.SIGINT)
                process.wait(120)
    rate = 0.0
    for first, *_, last in joint:
        rate += (last["computed_samples"] - first["computed_samples"]) / (last["time"] - first["time"])
    shares = [epoch["mfu"] or 0.0 for _, *epochs in joint for epoch in epochs]  # of the device's peak
    speed = {"samples_per_second": rate, "tokens_per_second": rate * own["tokens_per_sample"]}
    return speed | {"mfu": count * statistics.mean(shares) or None, "memory": joint[0][-1].get("peak_memory_bytes")}


def make_data(scale: Scale, folder: str) -> dict:
    """Tokenize the sample corpus for the swarm's model, and return the flags that name it."""
    paths = ["--dataset_path", f"{folder}/dataset", "--tokenizer_path", f"{folder}/tokenizer"]
    words = "tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --objective clm --seq_length"
    command = [sys.executable, *words.split(), str(scale.models[GPT].length), *paths]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return {"paths": paths}


def describe(values: dict) -> str:
    """Return a result's speed and memory."""
    memory = f"{values['memory'] / 1e9:.1f} GB" if values["memory"] else "-"
    return f"{format_speed(values)}, peak memory {memory}"


def measure_all(scale: Scale, peak: float | None) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table: the measurement, its aim and its result."""
    start = time.monotonic()
    for name, spec in scale.models.items():
        values = run_alone(measure_model, scale, name)
        values["mfu"] = values["tokens_per_second"] * values["flop"] / peak if peak else None
        yield values["shape"], spec.aim, describe(values)
    path = scale.models[ALBERT].config_path
    for device in dict.fromkeys(("cpu", scale.device)):
        steps = run_alone(measure_steps, ("lamb", "lamb_8bit", "adamw"), path, device)
        times = ", ".join(f"{name} {step['ms']:.2f} ms ({step['bytes']:.2f})" for name, step in steps.items())
        ratio = f"8-bit LAMB {steps['lamb_8bit']['ms'] / steps['lamb']['ms']:.2f} times LAMB"
        yield f"{ALBERT}'s step on {device} (bytes of moments a parameter)", "", f"{times}; {ratio}"
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in run_alone(measure_muon, path).items())
    yield f"{ALBERT}'s step with parameters on the host", "", times
    with tempfile.TemporaryDirectory() as folder:
        own, ratios, two = make_data(scale, folder), [], None
        while not ratios or (len(ratios) < TURNS and time.monotonic() - start < scale.turn_seconds):
            own = run_alone(measure_plain, scale, own)
            one = measure_swarm(scale, own, 1)
            ratios.append(one["samples_per_second"] * own["seconds"] / own["samples"])
            two = two or measure_swarm(scale, own, 2)
    size = f"{own['parameters']:,} parameters, {own['samples']:,} samples in {own['seconds']:.1f} s"
    yield f"plain loop, {size}", "", describe(own)
    each, median = ", ".join(f"{ratio:.3f}" for ratio in ratios), statistics.median(ratios)
    result = f"{median:.3f} ({each}), {describe(one)}"
    yield "swarm of one as a ratio to the plain loop, median (turns)", ">= 0.98", result
    ratio = two["samples_per_second"] / one["samples_per_second"]
    yield "two trainers on one device as a ratio to one (memory of the first)", "", f"{ratio:.3f}, {describe(two)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy shapes on the CPU")
    scale, start = SMALL if parser.parse_args().small else FULL, time.monotonic()
    if scale is SMALL:
        os.environ["OMP_NUM_THREADS"] = "1"
    elif not torch.cuda.is_available():
        cure = "`python benchmarks/gpu_bench.py --small` runs the same on the CPU with toy shapes"
        raise UserError(f"torch finds no CUDA GPU here: {cure}")
    device = "CPU, toy shapes" if scale is SMALL else torch.cuda.get_device_name()
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    print(f"{device}, torch {torch.__version__}, commit {commit}, bf16:\n")
    print("| Measurement | Aim | Result |\n|---|---|---|")
    for row in measure_all(scale, devices.find_peak(device, is_half=True)):
        print(f"| {' | '.join(row)} |", flush=True)
    print(f"\nIt took {(time.monotonic() - start) / 60:.1f} minutes.")


if __name__ == "__main__":
    with edge():
        main()
