"""Simulate rounds of local steps in one process: peers take H local steps each, average the changes, and step together.

    python tokenize_wikitext103.py --corpus sample --train_tokenizer --vocab_size 1000 --seq_length 64
    OMP_NUM_THREADS=1 python benchmarks/local_steps.py
    OMP_NUM_THREADS=1 python benchmarks/local_steps.py --all batch=16,lr=2e-3 --settings local=1 local=25,density=0.03

Four simulated peers of 64 samples a step train ALBERT of configs/demo.json with AdamW. In DiLoCo (arXiv 2311.08105), a
peer offers the change of its H local steps, offers are averaged by samples, and SGD with Nesterov momentum steps the
common anchor. In SparseLoCo (2508.15706), an offer holds the largest entries of each chunk in a few bits, and the rest
waits for the next round, half of it in the peer's own parameters (`LocalSteps.take`). A setting is a list of fields of
`Setting`; without --settings, the table is measured.

Bytes are those that a peer sends. With a density, it sends its update to each other peer, as on the log
(swarm/sparse.py). Otherwise the peers average in 16 bits, and each sends its offer and its part of the average once.
Seconds are the time of these bytes at 20 Mbit/s plus --seconds_per_step of a GPU.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from arguments import DataArguments, ModelArguments
from experiment.data import load_data, make_eval_batches, make_train_batches
from experiment.model import make_model
from experiment.objectives import compute_losses
from swarm.aggregation import Contribution, Numbers, aggregate, encode
from swarm.local_steps import STEP_AHEAD
from swarm.sparse import TopKCompression
from training.evaluation import evaluate
from training.model import move_batch

CPU = torch.device("cpu")
PEERS, MBITS = 4, 20
BETAS, EPSILON, DECAY, MAX_NORM = (0.9, 0.999), 1e-6, 0.01, 1.0  # the defaults of run_trainer.py
EVALUATE_EVERY = 200  # steps


@dataclasses.dataclass(frozen=True)
class Setting:
    """The setting of a run, with `begin` synchronous steps and then `local` steps of each peer between two rounds."""

    local: int = 25
    begin: int = 0
    steps: int = 800
    lr: float = 3e-3  # of the local steps
    final_lr: float = 3e-3  # linear from `begin` to the end
    outer_lr: float = 1.0
    momentum: float = 0.5
    density: float = 0.0  # 0: dense
    bits: int = 2
    lost: float = 0.0  # share of the offers and averages that do not arrive
    lost_rounds: float = 0.0  # share of the rounds that fail for all peers
    ramp: float = 0.0  # upper bound on H as a share of the steps so far; 0: none
    fast: float = 1.0  # speed of the first peer relative to the others
    peers: int = PEERS
    batch: int = 64  # samples of a peer in a step
    seed: int = 0


SPARSE = "density=0.03,begin=200"
TABLE = [
    "local=1",
    "local=1,peers=1",
    "local=25,outer_lr=0.7,momentum=0.9",
    "local=25,outer_lr=0.7,momentum=0.6",
    *(f"local={steps},outer_lr=0.7,momentum=0.6,begin=200" for steps in (10, 25, 100)),
    *(f"local={steps},{SPARSE}" for steps in (10, 25, 100)),
    f"local=25,{SPARSE},lost=0.5",
    f"local=25,{SPARSE},fast=4",
]


class Worker:
    """A model with its parameters and gradients as one vector each, and the batches of each peer."""

    def __init__(self, args: argparse.Namespace, seed: int, batch: int):
        data = DataArguments(dataset_path=args.dataset_path)
        model_args = ModelArguments("configs/demo.json", tokenizer_path=args.tokenizer_path, seed=seed)
        tokenizer, splits, _ = load_data(model_args, data, needs_validation=True)
        self.model = make_model(model_args, tokenizer)
        for module in self.model.modules():  # the same function in one kernel instead of eight
            if type(getattr(module, "activation", None)).__name__ == "NewGELUActivation":
                module.activation = torch.nn.GELU(approximate="tanh")
        self.model.set_attn_implementation("sdpa_float32")
        params = list(self.model.parameters())
        self.weights = torch.cat([param.detach().flatten() for param in params])
        self.gradient = torch.zeros_like(self.weights)
        self.decay = torch.cat([torch.full_like(p, DECAY * (p.ndim >= 2)).detach().flatten() for p in params])
        self.cuts = [param.numel() for param in params]
        self.initial = self.weights.clone()
        for param, weights, gradient in zip(
            params, self.weights.split(self.cuts), self.gradient.split(self.cuts), strict=True
        ):
            param.data, param.grad = weights.view_as(param), gradient.view_as(param)
        self.validation = make_eval_batches(splits["validation"], tokenizer, data, batch_size=64)
        self.make_batches = lambda peer, phase, size=batch: iter(
            make_train_batches(splits["train"], tokenizer, data, batch_size=size, seed=100 * seed + 10 * peer + phase)
        )
        self.model.train()

    def shuffle(self, phase: int, peers: int = PEERS) -> None:
        """Restart each peer's batches, which are the same for all settings."""
        self.batches = [self.make_batches(peer, phase) for peer in range(peers)]

    def add_gradient(self, peer: int) -> float:
        """Add the gradient of a peer's next batch, and return its masked-LM loss."""
        with torch.autocast("cpu", torch.bfloat16):
            losses = compute_losses(self.model, move_batch(next(self.batches[peer]), CPU))
        losses["loss"].backward()
        return float(losses["token_loss"])

    def evaluate(self, weights: torch.Tensor) -> float:
        self.weights.copy_(weights)
        with torch.autocast("cpu", torch.bfloat16):
            return evaluate(self.model, self.validation, CPU)["loss"]


def attend_in_float32(module, query, key, value, attention_mask, **options) -> tuple[torch.Tensor, None]:
    """Compute attention in float32; in bfloat16 its backward pass takes five times as long on a CPU."""
    with torch.autocast("cpu", enabled=False):
        output = scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=attention_mask)
    return output.transpose(1, 2), None


AttentionInterface.register("sdpa_float32", attend_in_float32)


class AdamW:
    """AdamW for one vector, as in torch."""

    def __init__(self, size: int):
        self.mean, self.square, self.count = torch.zeros(size), torch.zeros(size), 0

    def step(self, weights: torch.Tensor, gradient: torch.Tensor, lr: float, decay: torch.Tensor) -> None:
        """Clip the gradient and change the weights, both in place."""
        gradient.mul_((MAX_NORM / (gradient.norm() + 1e-6)).clamp(max=1.0))
        self.count += 1
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = (self.square / (1 - BETAS[1] ** self.count)).sqrt_().add_(EPSILON)
        weights.addcmul_(weights, decay, value=-lr).addcdiv_(self.mean, root, value=-lr / (1 - BETAS[0] ** self.count))

    def copy(self) -> "AdamW":
        twin = AdamW(0)
        twin.mean, twin.square, twin.count = self.mean.clone(), self.square.clone(), self.count
        return twin


def measure_agreement(offers: list[torch.Tensor]) -> float:
    """Return the mean cosine between two peers' offers."""
    directions = torch.stack([offer / offer.norm().clamp_min(1e-12) for offer in offers])
    count = len(offers)
    return float((directions.sum(0).square().sum() - count) / (count * (count - 1)))


class Run:
    """A run of one setting, with the state of its peers and a history."""

    def __init__(self, worker: Worker, setting: Setting, seconds_per_step: float):
        self.worker, self.setting, self.seconds_per_step = worker, setting, seconds_per_step
        self.anchor, self.adam = worker.initial.clone(), AdamW(len(worker.initial))
        self.done, self.bytes, self.history = 0, 0.0, []
        self.agreements, self.losses = [], []

    def record(self) -> None:
        self.history.append(
            dict(
                step=self.done,
                samples=self.done * self.setting.peers * self.setting.batch,
                megabytes=self.bytes / 1e6,
                seconds=self.done * self.seconds_per_step + self.bytes * 8e-6 / MBITS,
                loss=self.worker.evaluate(self.anchor),
                train=statistics.fmean(self.losses or [0.0]),
                agreement=statistics.fmean(self.agreements or [0.0]),
            )
        )
        self.agreements, self.losses = [], []

    def train_synchronously(self, until: int) -> None:
        worker, peers, s = self.worker, self.setting.peers, self.setting
        worker.weights.copy_(self.anchor)
        while self.done < until:
            gradients = []
            for peer in range(peers):
                worker.gradient.zero_()
                self.losses.append(worker.add_gradient(peer))
                gradients.append(worker.gradient.clone())
            if peers > 1:
                self.agreements.append(measure_agreement(gradients))
            lr = s.lr + (s.final_lr - s.lr) * max(0, self.done - s.begin) / max(1, s.steps - s.begin)
            self.adam.step(worker.weights, torch.stack(gradients).mean(0), lr, worker.decay)
            self.done += 1
            self.bytes += 2 * (peers - 1) / peers * 2 * len(worker.weights)
            if self.done % EVALUATE_EVERY == 0 or self.done == s.steps:
                self.anchor = worker.weights.clone()
                self.record()
                worker.weights.copy_(self.anchor)
        self.anchor = worker.weights.clone()

    def train_locally(self) -> None:
        s, size, chance = self.setting, len(self.anchor), random.Random(self.setting.seed)
        codec = TopKCompression(s.density, s.bits) if s.density else None
        adams = [self.adam.copy() for _ in range(s.peers)]
        # of each peer: where its next steps start, and from where its next update is measured
        starts, bases = [self.anchor] * s.peers, [self.anchor] * s.peers
        unsent, samples = [torch.zeros(size) for _ in range(s.peers)], [0] * s.peers
        outer_steps, taken_over = 0, [0] * s.peers  # of the anchor, and the last one that each peer has loaded
        self.velocity = torch.zeros(size)
        speeds = [s.fast] + [1.0] * (s.peers - 1)
        while self.done < s.steps:
            lr = s.lr + (s.final_lr - s.lr) * (self.done - s.begin) / max(1, s.steps - s.begin)
            local = min(s.local, s.steps - self.done)
            if s.ramp:
                local = min(local, max(1, int(self.done * s.ramp)))
            for peer in range(s.peers):
                steps = round(local * s.peers * speeds[peer] / sum(speeds))
                end = self.take_steps(peer, starts[peer], adams[peer], steps, lr)
                unsent[peer] += bases[peer] - end
                samples[peer] += steps * s.batch
                starts[peer] = bases[peer] = end
            self.done += local
            group = [peer for peer in range(s.peers) if chance.random() >= s.lost]
            if group and chance.random() >= s.lost_rounds:
                self.agreements.append(measure_agreement([unsent[peer] for peer in group]) if len(group) > 1 else 1.0)
                late = [outer_steps - taken_over[peer] for peer in group]
                updates, counts = [unsent[peer] for peer in group], [samples[peer] for peer in group]
                step = partial(self.aggregate, codec) if codec else self.average
                sent = step(updates, counts, late)
                outer_steps += 1
                self.bytes += (len(group) - 1) / s.peers * sent
                for peer in group:
                    starts[peer], bases[peer] = self.anchor - STEP_AHEAD * unsent[peer], self.anchor
                    unsent[peer] *= 1 - STEP_AHEAD
                    samples[peer], taken_over[peer] = 0, outer_steps
            if self.done // EVALUATE_EVERY > (self.done - local) // EVALUATE_EVERY or self.done == s.steps:
                self.record()

    def aggregate(self, codec, unsent: list[torch.Tensor], samples: list[int], late: list[int]) -> int:
        """Make the outer step as the peers of a log do, and return the bytes of all updates."""
        offers = [encode(Numbers([torch.zeros_like(it)]), Numbers([it]), codec) for it in unsent]
        parts = zip(samples, late, offers, strict=True)
        contributions = [Contribution(bytes([i]), *part) for i, part in enumerate(parts)]
        self.anchor = self.anchor.clone()
        state = Numbers([self.anchor]), Numbers([self.velocity])
        aggregate(*state, contributions, lr=self.setting.outer_lr, outer_momentum=self.setting.momentum, seed=b"")
        return sum(len(block) for blocks in offers for block in blocks)

    def average(self, unsent: list[torch.Tensor], samples: list[int], late: list[int]) -> int:
        """Make the outer step with the average in 16 bits, and return the bytes of an offer and of the average."""
        weights = torch.tensor([float(count) for count in samples])
        shares = torch.tensor([1 / (1 + epochs) for epochs in late])
        average = torch.einsum("p,pn->n", weights * shares / weights.sum(), torch.stack(unsent).half().float())
        for tensor in unsent:
            tensor.sub_(tensor.half().float())
        self.velocity.mul_(self.setting.momentum).add_(average)
        self.anchor = self.anchor - self.setting.outer_lr * (average + self.setting.momentum * self.velocity)
        return 4 * len(average)

    def take_steps(self, peer: int, start: torch.Tensor, adam: AdamW, steps: int, lr: float) -> torch.Tensor:
        worker = self.worker
        worker.weights.copy_(start)
        for _ in range(steps):
            worker.gradient.zero_()
            self.losses.append(worker.add_gradient(peer))
            adam.step(worker.weights, worker.gradient, lr, worker.decay)
        return worker.weights.clone()


def parse_setting(text: str) -> Setting:
    """Parse a text such as local=25,density=0.03."""
    types = {field.name: field.type for field in dataclasses.fields(Setting)}
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return Setting(**{name: types[name](value) for name, value in pairs})


def find_loss(history: list[dict], what: str, most: float) -> str:
    """Return the last validation loss within this budget of samples or seconds."""
    losses = [line["loss"] for line in history if line[what] <= most]
    return f"{losses[-1]:.3f}" if losses else "-"


def train(worker: Worker, setting: Setting, seconds_per_step: float, begun: dict) -> list[dict]:
    """Return the history of one setting; settings with the same synchronous steps share these in `begun`."""
    run, key = (
        Run(worker, setting, seconds_per_step),
        (setting.begin, setting.seed, setting.batch, setting.lr, setting.peers),
    )
    worker.shuffle(0)
    if key not in begun:
        run.train_synchronously(setting.begin)
        begun[key] = run.anchor, run.adam, run.done, run.bytes, run.history
    run.anchor, adam, run.done, run.bytes, history = begun[key]
    run.adam, run.history = adam.copy(), list(history)
    worker.shuffle(1)
    if setting.local == 1:
        run.train_synchronously(setting.steps)
    else:
        run.train_locally()
    return run.history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default=DataArguments.dataset_path)
    parser.add_argument("--tokenizer_path", default=ModelArguments.tokenizer_path)
    parser.add_argument("--settings", nargs="+", default=TABLE, help="fields of Setting, without spaces; see TABLE")
    parser.add_argument("--all", default="", help="fields that all settings share, e.g. batch=16,lr=2e-3,steps=1000")
    parser.add_argument("--seconds_per_step", type=float, default=0.1)
    parser.add_argument("--output", type=Path, help="append settings and histories to this file, as JSON lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    workers, begun = {}, {}
    print("| setting | loss: a fourth of the samples, half, all | MB sent | seconds | at a fourth of them, half |")
    print("|---" * 5 + "|")
    for text in args.settings:
        setting = parse_setting(f"{args.all},{text}")
        kind = setting.seed, setting.batch
        if kind not in workers:
            workers[kind] = Worker(args, *kind)
        history = train(workers[kind], setting, args.seconds_per_step, begun)
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(setting) | {"history": history}) + "\n")
        last = history[-1]
        samples = ", ".join(find_loss(history, "samples", share * last["samples"]) for share in (0.25, 0.5, 1))
        seconds = ", ".join(find_loss(history, "seconds", share * last["seconds"]) for share in (0.25, 0.5))
        print(f"| {text} | {samples} | {last['megabytes']:.1f} | {last['seconds']:.0f} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
