"""Simulate the recipe of rehearsal.py in one process, without a network: why does its loss differ from one process'?

    python benchmarks/rehearsal.py --minutes 5 --runs open --output_dir outputs/rehearsal  # makes the first model, too
    OMP_NUM_THREADS=1 python benchmarks/rehearsal_in_process.py outputs/rehearsal/begin/model --peers 1
    OMP_NUM_THREADS=1 python benchmarks/rehearsal_in_process.py outputs/rehearsal/begin/model --shared_data

Twelve peers with the batches of LINES train by Muon and wsd. As on the log, an epoch takes 25 batches of 48 samples,
and ends with one outer step. With --peers 1, one process trains on the same number of samples. It prints the validation
loss after every second epoch.
"""

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from rehearsal import LINES, MAX_TRAINERS

from arguments import DataArguments, ModelArguments, OptimizerArguments
from experiment.data import load_data, make_eval_batches, make_train_batches
from experiment.model import make_model
from experiment.objectives import compute_losses
from experiment.optimizer import learning_rate_factor, make_local_optimizer, make_param_groups
from swarm.aggregation import Contribution, Numbers, aggregate, encode
from swarm.config import count_batches
from swarm.local_steps import STEP_AHEAD
from swarm.optimizer_state import copy_tensors, list_params
from swarm.sparse import TopKCompression
from training.evaluation import evaluate
from training.model import move_batch

CPU = torch.device("cpu")
BATCH_SIZE, LOCAL_STEPS, TOTAL_EPOCHS, LEARNING_RATE = 48, 25, 45, 2e-3
BATCHES = [batch for _, batch in list(LINES.values())[:MAX_TRAINERS]]


class Peer:
    """A peer: its batches, its optimizer, its parameters, and what its updates have not sent yet."""

    def __init__(self, model: torch.nn.Module, settings: OptimizerArguments, batches: Iterator, batch_size: int):
        self.model, self.batches, self.batch_size = model, batches, batch_size
        self.optimizer = make_local_optimizer(settings, make_param_groups(model, separate_hidden=True))
        self.params = [param.detach().clone() for param in list_params(self.optimizer)]
        self.unsent = [torch.zeros_like(param) for param in self.params]

    def train(self, steps: int, rate: float) -> None:
        """Make steps with the model, which then has this peer's parameters."""
        copy_tensors(list_params(self.optimizer), self.params)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = compute_losses(self.model, move_batch(next(self.batches), CPU))["loss"]
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.params = [param.detach().clone() for param in list_params(self.optimizer)]

    def offer(self, anchor: list[torch.Tensor], codec: TopKCompression) -> list[bytes]:
        """Return the encoded update, and take it out of the parameters, see LocalSteps.mark_offered."""
        update = [before - after for before, after in zip(anchor, self.params, strict=True)]
        blocks = encode(Numbers(update), Numbers(self.unsent), codec)
        for param, change, rest in zip(self.params, update, self.unsent, strict=True):
            param.add_(change).sub_(rest, alpha=STEP_AHEAD)
            rest.mul_(1 - STEP_AHEAD)
        return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of the model to start from")
    parser.add_argument("--dataset_path", default="data/albert_tokenized_wikitext")
    parser.add_argument("--tokenizer_path", default="data/tokenizer")
    parser.add_argument("--epochs", type=int, default=42)
    parser.add_argument("--peers", type=int, choices=[1, MAX_TRAINERS], default=MAX_TRAINERS)
    parser.add_argument("--density", type=float, default=0.03, help="1: all numbers, in 8 bits")
    parser.add_argument("--rate", type=float, default=1.0, help="of the local steps, relative to that of one process")
    parser.add_argument("--outer_rate", type=float, default=1.0)
    parser.add_argument("--equal", action="store_true", help="four samples in each batch")
    parser.add_argument(
        "--shared_data", action="store_true", help="the same, and all peers share each shuffled pass over the data"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model_args = ModelArguments(model_name_or_path=args.model, tokenizer_path=args.tokenizer_path, objective="clm")
    data = DataArguments(dataset_path=args.dataset_path)
    tokenizer, splits, _ = load_data(model_args, data, needs_validation=True)
    model = make_model(model_args, tokenizer).train()
    validation = list(make_eval_batches(splits["validation"], tokenizer, data, batch_size=64, max_samples=512))

    def make_batches(peer: int, size: int) -> Iterator:
        return iter(make_train_batches(splits["train"], tokenizer, data, batch_size=size, seed=1000 + peer))

    sizes = [BATCH_SIZE] if args.peers == 1 else [4] * MAX_TRAINERS if args.equal or args.shared_data else BATCHES
    shared = make_batches(99, 4) if args.shared_data else None
    own = dict(optim="muon", learning_rate=LEARNING_RATE, lr_scheduler_type="wsd", warmup_steps=0)
    settings = OptimizerArguments(**own, total_steps=TOTAL_EPOCHS)
    count = partial(count_batches, local_steps=LOCAL_STEPS, local_steps_from=1)
    of_steps = OptimizerArguments(**own, total_steps=(TOTAL_EPOCHS - 1) * LOCAL_STEPS)
    peers = [Peer(model, settings, shared or make_batches(i, size), size) for i, size in enumerate(sizes)]
    first, codec = peers[0], TopKCompression(args.density, 2 if args.density < 1 else 8)
    first.train(1, LEARNING_RATE)
    for peer in peers[1:]:
        peer.params = [param.clone() for param in first.params]
        peer.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    anchor = [param.clone() for param in first.params]
    momentum = [torch.zeros_like(param) for param in anchor]
    steps = round(LOCAL_STEPS * BATCH_SIZE / sum(sizes))
    for epoch in range(1, args.epochs):
        if args.peers == 1:
            for step in range(steps):
                number = (epoch - 1) * steps + step
                first.train(1, LEARNING_RATE * learning_rate_factor(number, of_steps))
            anchor = first.params
        else:
            offers, before = [], [param.clone() for param in anchor]
            for i, peer in enumerate(peers):
                peer.train(steps, LEARNING_RATE * args.rate * learning_rate_factor(epoch, settings, count))
                offers.append(Contribution(bytes([i]), steps * peer.batch_size, 0, peer.offer(anchor, codec)))
            state = Numbers(anchor), Numbers(momentum)
            aggregate(*state, offers, lr=args.outer_rate, outer_momentum=0.5, seed=bytes([epoch]))
            for peer in peers:
                for param, old, new in zip(peer.params, before, anchor, strict=True):
                    param.add_(new - old)
        if epoch % 2:
            copy_tensors(list_params(first.optimizer), anchor)
            print(json.dumps({"epoch": epoch + 1, "loss": evaluate(model, validation, CPU)["loss"]}), flush=True)


if __name__ == "__main__":
    main()
