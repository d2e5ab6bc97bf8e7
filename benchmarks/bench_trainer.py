"""Compare the trainer's samples per second, alone and in a swarm of two, with a plain loop and transformers' Trainer.

    pip install accelerate                                    # for transformers' Trainer; without: --no_transformers
    python benchmarks/bench_trainer.py --families bert albert --turns 3
    python benchmarks/bench_trainer.py --families bert --shape bert-base --seq_length 512 --device cuda --bf16 \\
        --batch_size 32 --vocab_size 30000

All train the same model with AdamW, on the same batches of the sample corpus. They take turns, each in its own
processes, with one thread per process on a CPU:

    plain           a loop of thirty lines, see run_plain
    transformers    transformers.Trainer, with the same forward pass, which computes logits at labels only
    one             run_trainer.py as the only peer
    two             two of them in one swarm, each measured; on one GPU, they share it

In its first turn, the plain loop chooses the samples of an epoch of --epoch_seconds, and the batches of a step of one
second. Rates are taken between ends of epochs, without the first ones. A ratio compares with the plain loop of the same
turn; the median of the turns counts. A turn of a family takes about four times the start of a process (10 to 30 s) and
--epochs x --epoch_seconds. If a CPU has other work, compare the samples per CPU second of a process with its helpers.

FLOP are those of the matrix products of a forward and a backward pass with padding, as torch counts them. MFU is FLOP
per sample x samples/s, as a share of the GPU's dense bf16 peak by its data sheet.
"""

import argparse
import contextlib
import importlib.util
import itertools
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

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
# hidden size, layers, heads, inner size
SHAPES = {
    "small": (256, 2, 4, 1024),
    "bert-base": (768, 12, 12, 3072),
    "albert-large": (1024, 24, 16, 4096),
}
OBJECTIVES = {"albert": "mlm_sop", "lean_albert": "mlm_sop", "bert": "mlm", "roberta": "mlm", "distilbert": "mlm"}
OBJECTIVES |= {"gpt2": "clm", "llama": "clm"}
WAYS = ["plain", "transformers", "one", "two"]
# epochs that are not measured, because processes start and find each other
WARM_UP = 1


def make_config(family: str, shape: str, length: int) -> dict:
    hidden, layers, heads, inner = SHAPES[shape]
    if family == "gpt2":
        sizes = dict(n_embd=hidden, n_layer=layers, n_head=heads, n_inner=inner, n_positions=length)
    elif family == "distilbert":
        sizes = dict(dim=hidden, n_layers=layers, n_heads=heads, hidden_dim=inner, max_position_embeddings=length)
    else:
        sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner)
        # RoBERTa's positions start after the number of the padding token
        sizes["max_position_embeddings"] = length + 16 * (family == "roberta")
    if family in ("albert", "lean_albert"):
        sizes["embedding_size"] = 128
    return {"model_type": family, **sizes}


def make_data(args: argparse.Namespace, objective: str) -> dict[str, str]:
    """Tokenize the sample corpus for this objective, once for all runs, and return the flags that name it."""
    folder = Path(args.folder) / f"{objective}-{args.seq_length}-{args.vocab_size}"
    flags = {"--dataset_path": str(folder / "dataset"), "--tokenizer_path": str(folder / "tokenizer")}
    if not (folder / "dataset").is_dir():
        print(f"tokenizing the sample corpus for {objective}", flush=True)
        command = [sys.executable, "tokenize_wikitext103.py", "--corpus", "sample", "--train_tokenizer"]
        command += ["--objective", objective, "--vocab_size", str(args.vocab_size)]
        command += ["--seq_length", str(args.seq_length), *sum(flags.items(), ())]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return flags


# --- the other ways, each in its own process --------------------------------------------------------------------------


class Meter:
    """A meter of samples, tokens and time, from the first measured end of an epoch to the last one."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.ends, self.samples = args, [], 0
        self.places = self.tokens = 0

    def add(self, batch: dict) -> None:
        mask = batch.get("attention_mask")
        self.samples += len(batch["input_ids"])
        self.places += batch["input_ids"].numel()
        self.tokens += batch["input_ids"].numel() if mask is None else int(mask.sum())

    def end_epoch(self, waited: float) -> bool:
        """Return whether that was the last epoch.

        :param waited: seconds spent waiting for data since the previous end
        """
        self.ends.append((time.monotonic(), self.samples, waited, time.process_time()))
        return len(self.ends) > WARM_UP + self.args.epochs - 1

    def report(self, **more) -> None:
        """Print the results as a line of JSON."""
        import torch

        first, *rest = self.ends[WARM_UP - 1 :]
        seconds, samples = rest[-1][0] - first[0], rest[-1][1] - first[1]
        values = {
            "samples_per_second": samples / seconds,
            "samples_per_cpu_second": samples / (rest[-1][3] - first[3]),
            "waiting": sum(waited for _, _, waited, _ in rest) / seconds,
            "padding": 1 - self.tokens / self.places,
            "tokens_per_sample": self.tokens / self.samples,
        }
        if self.args.device.startswith("cuda"):
            values["memory"] = torch.cuda.max_memory_allocated()
        print(json.dumps(values | more), flush=True)


def prepare(args: argparse.Namespace) -> tuple:
    """Return the model, its device, autocast, the optimizer and endless batches, as run_trainer.py makes them."""
    from arguments import DataArguments, ModelArguments, OptimizerArguments, TrainerArguments
    from experiment.data import load_data, make_train_batches
    from experiment.optimizer import make_local_optimizer, make_param_groups
    from training.devices import choose_devices, place_model
    from training.model import make_trained_model

    trainer_args = TrainerArguments(device=args.device, bf16=args.bf16)
    model_args = ModelArguments(args.config_path, tokenizer_path=args.tokenizer_path)
    data_args = DataArguments(dataset_path=args.dataset_path)
    tokenizer, dataset, _ = load_data(model_args, data_args, needs_validation=False)
    model = make_trained_model(model_args, trainer_args, tokenizer)
    device = choose_devices(trainer_args)[0]
    autocast, _ = place_model(model, device, trainer_args)
    optimizer = make_local_optimizer(OptimizerArguments(optim="adamw", learning_rate=1e-4), make_param_groups(model))
    batches = make_train_batches(
        dataset["train"], tokenizer, data_args, batch_size=args.batch_size, seed=1, num_workers=args.num_workers
    )
    return model, device, autocast, optimizer, batches


def run_plain(args: argparse.Namespace) -> None:
    import torch

    from experiment.objectives import compute_losses
    from training.model import move_batch
    from training.prefetch import PrefetchLoader

    model, device, autocast, optimizer, batches = prepare(args)
    feed, meter = PrefetchLoader(batches, device), Meter(args)

    def compute(batch: dict, accumulation: int) -> None:
        with autocast:
            loss = compute_losses(model, move_batch(batch, device))["loss"]
        (loss / accumulation).backward()

    more = {"target_batch_size": args.target_batch_size, "accumulation": args.accumulation}
    if not args.target_batch_size:
        more = choose_sizes(args, lambda: compute(next(feed), 1))
    if not args.flop:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            for batch in itertools.islice(feed, 8):
                compute(batch, 1)
        more["flop"] = counter.get_total_flops() / (8 * args.batch_size)
    optimizer.zero_grad()
    accumulation = more["target_batch_size"] // args.batch_size
    feed.take_counts()["waited"]
    for number, batch in enumerate(feed, start=1):
        meter.add(batch)
        compute(batch, accumulation)
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if meter.end_epoch(feed.take_counts()["waited"]):
                break
    meter.report(**more, parameters=model.num_parameters())


def choose_sizes(args: argparse.Namespace, compute) -> dict[str, int]:
    """Choose the samples of an epoch of --epoch_seconds, and the number of batches in a step of one second."""
    import torch

    # CPU seconds of this process, because a CPU may have other work
    clock = time.monotonic if args.device.startswith("cuda") else time.process_time
    for _ in range(3):
        compute()
    start, count = clock(), 0
    while clock() < start + 2:
        compute()
        count += 1
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
    per_second = count / (clock() - start)
    accumulation = max(1, round(per_second))
    steps = max(1, round(per_second * args.epoch_seconds / accumulation))
    return {"accumulation": accumulation, "target_batch_size": steps * accumulation * args.batch_size}


def run_transformers(args: argparse.Namespace) -> None:
    import torch
    import transformers

    from experiment.objectives import compute_losses
    from training.model import move_batch
    from training.prefetch import PrefetchLoader

    model, device, _, optimizer, batches = prepare(args)
    feed, meter = PrefetchLoader(batches, device), Meter(args)

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            for batch in feed:
                meter.add(batch)
                yield move_batch(batch, torch.device("cpu"))

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if not self.state.global_step:
                assert len(inputs["labelled_positions"]) == (inputs["labels"] != -100).sum(), "not the same labels"
            return compute_losses(model, inputs)["loss"]

    class EndOfEpoch(transformers.TrainerCallback):
        def on_step_end(self, _, state, control, **more):
            if device.type == "cuda":
                torch.cuda.synchronize()
            control.should_training_stop = meter.end_epoch(feed.take_counts()["waited"])

    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,  # an item is a whole batch
            gradient_accumulation_steps=args.target_batch_size // args.batch_size,
            max_steps=10**6,
            max_grad_norm=0.0,  # the optimizer clips
            bf16=args.bf16,
            use_cpu=device.type == "cpu",
            dataloader_num_workers=0,  # the batches have their own workers
            accelerator_config={"dispatch_batches": False},  # otherwise it cuts each tensor to the number of rows
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=options,
            train_dataset=Batches(),
            data_collator=lambda items: items[0],
            optimizers=(optimizer, None),
            callbacks=[EndOfEpoch()],
        )
        # its console lines must not mix with the results
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()
    meter.report()


def run_child(args: argparse.Namespace, way: str, own: dict) -> dict:
    """Run a process of this script, and return its measurements."""
    words = [f"--{name}={value}" for name, value in own.items()]
    command = [sys.executable, __file__, *sys.argv[1:], *words, "--way", way]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{way} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


# --- run_trainer.py ---------------------------------------------------------------------------------------------------


def start_trainer(args, own: dict, folder: Path, prefix: str, peers: list[str], count: int) -> subprocess.Popen:
    """Start a trainer as users do; its output goes to folder/log."""
    folder.mkdir(parents=True)
    flags = {
        **{f"--{name}": own[name] for name in ("config_path", "dataset_path", "tokenizer_path")},
        "--experiment_prefix": prefix,
        "--output_dir": folder,
        "--host_maddrs": "/ip4/127.0.0.1/tcp/0",
        "--optim": "adamw",
        "--learning_rate": 1e-4,
        "--target_batch_size": own["target_batch_size"] * count,
        "--per_device_train_batch_size": args.batch_size,
        "--gradient_accumulation_steps": own["accumulation"],
        "--matchmaking_time": 4,
        "--target_group_size": 2,
        "--dataloader_num_workers": args.num_workers,
        "--device": args.device,
    }
    command = [sys.executable, "run_trainer.py", *(str(word) for flag in flags.items() for word in flag)]
    command += ["--bf16"] * args.bf16 + (["--initial_peers", *peers] if peers else [])
    with open(folder / "log", "w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def read_lines(folder: Path) -> list[dict]:
    path = folder / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_swarm(args: argparse.Namespace, own: dict, count: int) -> dict:
    """Return the means over these trainers and --epochs joint epochs."""
    prefix = f"benchmark_{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folders = [Path(name) / str(number) for number in range(count)]
        processes, peers = [], []
        try:
            for folder in folders:
                processes.append(start_trainer(args, own, folder, prefix, peers, count))
                pattern = r"others may join through --initial_peers (/\S+)"
                while not (peers or (match := re.search(pattern, (folder / "log").read_text()))):
                    check_alive(processes, folders)
                peers = peers or [match[1]]
            cpu_seconds: list[float] = []
            while (done := min(len(find_joint(read_lines(folder), count)) for folder in folders)) < args.epochs + 1:
                if done and not cpu_seconds:
                    cpu_seconds.append(count_cpu_seconds(processes))
                check_alive(processes, folders)
            cpu_seconds.append(count_cpu_seconds(processes))
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                process.wait(120)
        rates, waiting, memory, samples = [], [], 0, 0
        for folder in folders:
            first, *rest = joint = find_joint(read_lines(folder), count)[: args.epochs + 1]
            computed = joint[-1]["computed_samples"] - first["computed_samples"]
            samples += computed
            rates.append(computed / (joint[-1]["time"] - first["time"]))
            waiting += [line["data_wait_share"] for line in rest]
            memory = max(memory, joint[-1].get("peak_memory_bytes", 0))
    values = {"samples_per_second": statistics.mean(rates), "waiting": statistics.mean(waiting), "memory": memory}
    values["samples_per_cpu_second"] = samples / (cpu_seconds[-1] - cpu_seconds[0])
    return values | {"in_rounds": statistics.mean(in_rounds(line) for line in rest)}


def count_cpu_seconds(processes: list[subprocess.Popen]) -> float:
    """Return the CPU seconds of these trainers and all their helpers so far."""
    total = 0.0
    for process in processes:
        trainer = psutil.Process(process.pid)
        for part in (trainer, *trainer.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = part.cpu_times()
                total += times.user + times.system
    return total


def in_rounds(line: dict) -> float:
    """Return the share of an epoch spent in matchmaking and averaging."""
    return (line["waiting_seconds"] + line["averaging_seconds"]) / line["epoch_seconds"]


def find_joint(lines: list[dict], count: int) -> list[dict]:
    """Return the joint epochs, without the first ones."""
    return [line for line in lines if line["averaged_with"] == count][WARM_UP - 1 :]


def check_alive(processes: list[subprocess.Popen], folders: list[Path]) -> None:
    time.sleep(0.05)
    for process, folder in zip(processes, folders, strict=False):
        if process.poll() is not None:
            raise SystemExit(f"a trainer ended with code {process.returncode}:\n{(folder / 'log').read_text()[-3000:]}")


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, family: str) -> None:
    """Run all ways in turn; print each turn, then the medians."""
    config = Path(args.folder) / f"{family}-{args.shape}-{args.seq_length}.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(make_config(family, args.shape, args.seq_length)))
    own = {name.removeprefix("--"): path for name, path in make_data(args, OBJECTIVES[family]).items()}
    own |= {"config_path": str(config), "target_batch_size": 0, "accumulation": 0, "flop": 0.0}
    ways = [way for way in WAYS if way != "transformers" or not args.no_transformers]
    results, facts = {way: [] for way in ways}, {}
    for turn in range(args.turns):
        for way in ways:
            trainers = {"one": 1, "two": 2}.get(way)
            values = run_swarm(args, own, trainers) if trainers else run_child(args, way, own)
            if way == "plain":
                facts = {**values, **facts}
                own |= {name: facts[name] for name in ("target_batch_size", "accumulation", "flop")}
            results[way].append(values)
        rates = {way: results[way][-1]["samples_per_second"] for way in ways}
        text = ", ".join(f"{way} {rate:,.1f} ({rate / rates['plain']:.3f})" for way, rate in rates.items())
        print(f"{family}, turn {turn + 1}: samples/s {text}", flush=True)
    print(
        f"{family}: {facts['parameters']:,} parameters, batches of {args.batch_size} samples of "
        f"{facts['tokens_per_sample']:.0f} tokens ({facts['padding']:.1%} padding), {facts['accumulation']} batches in "
        f"a step, {facts['target_batch_size']:,} samples an epoch, {facts['flop'] / 1e9:.2f} GFLOP a sample"
    )
    is_cuda = args.device.startswith("cuda")
    peak = find_peak() if is_cuda else None
    print(
        f"  {'':13} {'samples/s':>9} {'ratio':>6} {'per CPU s':>9} {'ratio':>6} {'tokens/s':>9} {'GFLOP/s':>9} "
        f"{'waits for data':>14} {'rounds':>7}" + ("    MFU  peak GB" if is_cuda else "")
    )
    for way in ways:
        rate, ratio = find_medians("samples_per_second", results[way], results["plain"])
        waiting = statistics.median(values["waiting"] for values in results[way])
        rounds = statistics.median(values.get("in_rounds", 0.0) for values in results[way])
        line = f"  {way:13} {rate:9,.1f} {ratio:6.3f} "
        line += "{:9,.1f} {:6.3f} ".format(*find_medians("samples_per_cpu_second", results[way], results["plain"]))
        line += f"{rate * facts['tokens_per_sample']:9,.0f} "
        line += f"{rate * facts['flop'] / 1e9:9,.0f} {waiting:14.1%} {rounds:7.1%}"
        if is_cuda:
            memory = max(values["memory"] for values in results[way])
            line += f"  {rate * facts['flop'] / peak:5.1%} {memory / 1e9:8.2f}"
        print(line, flush=True)


def find_medians(name: str, results: list[dict], plain: list[dict]) -> tuple[float, float]:
    """Return the medians of a rate, and of its ratio to the plain loop's in the same turn."""
    ratios = [values[name] / other[name] for values, other in zip(results, plain, strict=True)]
    return statistics.median(values[name] for values in results), statistics.median(ratios)


def find_peak() -> float:
    """Return the FLOP/s of this GPU by its data sheet, or NaN. Another process asks: a CUDA context takes memory."""
    from bench_model import PEAK_FLOPS

    question = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    name = subprocess.run(question, capture_output=True, text=True, check=True).stdout
    return next((flops for key, flops in PEAK_FLOPS.items() if key in re.split(r"\W", name)), float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--seq_length", type=int, default=64)
    parser.add_argument("--vocab_size", type=int, default=4000, help="maximum vocabulary of the tokenizer")
    parser.add_argument("--batch_size", type=int, default=16, help="samples per forward pass")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the first visible GPU")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--num_workers", type=int, help="processes that prepare batches; default: 0, on a GPU 4")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3, help="measured epochs in each turn")
    parser.add_argument("--epoch_seconds", type=float, default=10, help="seconds of an epoch of the plain loop")
    parser.add_argument("--no_transformers", action="store_true", help="skip transformers' Trainer")
    parser.add_argument("--folder", default="outputs/bench_trainer", help="folder for data and configurations")
    # flags for the processes of this script
    for name, kind in dict(way=str, config_path=str, dataset_path=str, tokenizer_path=str, flop=float).items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    for name in ("target_batch_size", "accumulation"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder = str(Path(args.folder).absolute())
    if args.num_workers is None:
        args.num_workers = 4 if args.device.startswith("cuda") else 0
    if args.device == "cuda":
        # transformers' Trainer and run_trainer.py use all visible GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if args.way:
        {"plain": run_plain, "transformers": run_transformers}[args.way](args)
        return
    if not args.no_transformers and importlib.util.find_spec("accelerate") is None:
        raise SystemExit("transformers' Trainer needs accelerate: pip install accelerate, or add --no_transformers")
    os.environ.update(TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")
    if args.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
    for family in args.families:
        compare(args, family)


if __name__ == "__main__":
    main()
