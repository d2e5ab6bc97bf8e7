"""Three steps of SGD on the same 12 batches, by two ranks of each kind, and then by rank 0 alone. In each of the first
ones rank 0 takes a nap, as in a long round, once the other one waits for it.

    python -m tests.programs.steps_of_ranks TOKENIZER DATASET FOLDER CONFIG KIND ...  (KIND: whole or sharded)
"""

import contextlib
import copy
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from arguments import DataArguments, ModelArguments, SwarmArguments, TrainerArguments
from common.signals import terminate_process_tree
from experiment.data import load_data, make_train_batches
from experiment.model import make_model
from run_trainer import accumulate_gradients
from training.ranks import NUMBER_VARIABLE, RankGroup, ShardedRankGroup, join_ranks

torch.set_num_threads(1)
tokenizer_path, dataset_path, folder, config, *kinds = sys.argv[1:]
model_args = ModelArguments(config, tokenizer_path=tokenizer_path)
data_args = DataArguments(dataset_path=dataset_path)
tokenizer, dataset, _ = load_data(model_args, data_args, False)
torch.manual_seed(int(os.environ.get(NUMBER_VARIABLE, 0)))
reference = make_model(model_args, len(tokenizer)).eval()  # no dropout
first = join_ranks(TrainerArguments(device="cpu", num_devices=2))
if first.is_main:
    first.start_others(SwarmArguments("a"), "")
batches = iter(make_train_batches(dataset["train"], tokenizer, data_args, batch_size=8, seed=7))
batches = [next(batches) for _ in range(12)]
scaler, device, autocast = torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu"), contextlib.nullcontext()


def train(ranks: RankGroup, model: torch.nn.Module, is_sharded: bool) -> dict:
    if ranks.number:  # until rank 0 gives its own
        for param in model.parameters():
            param.data.zero_()
    feed, optimizer = iter(batches[ranks.number :: ranks.count]), torch.optim.SGD(model.parameters(), lr=0.1)
    worker = ranks.distribute(model)
    waiting = Path(folder) / "waiting"
    told = ranks.broadcast({"told": 5} if ranks.number == 0 else None)
    args = TrainerArguments(device="cpu", gradient_accumulation_steps=2)
    epoch, losses, waited, used = ranks.broadcast_state(model, 0, scaler), [], 0.0, 0.0
    while epoch < 3:
        loss = accumulate_gradients(worker, ranks, feed, args, device, autocast, scaler)
        assert ranks.all_continue(True)
        loss = ranks.average_gradients(model, loss)
        losses.append(loss.item())
        if ranks.number == 0:
            optimizer.step()
            while not waiting.exists():
                time.sleep(0.01)
            waiting.unlink()
            time.sleep(1)
        before, cpu = time.monotonic(), time.process_time()
        if ranks.number:
            waiting.touch()
        epoch = ranks.broadcast_state(model, epoch + 1, scaler)
        waited, used = waited + time.monotonic() - before, used + time.process_time() - cpu
        model.zero_grad(set_to_none=False)
    own = [param.to_local() if isinstance(param, DTensor) else param for param in worker.parameters()]
    weights = {name: param.full_tensor() if is_sharded else param for name, param in worker.named_parameters()}
    elements = sum(map(torch.numel, own))
    return {"weights": weights, "elements": elements, "losses": losses, "told": told, "waited": waited, "used": used}


first.connect()
for kind in kinds:
    is_sharded = kind == "sharded"
    ranks = ShardedRankGroup(first.number, [device] * 2) if is_sharded else first
    torch.save(train(ranks, copy.deepcopy(reference), is_sharded), f"{folder}/{kind}{ranks.number}.pt")
assert not first.all_continue(first.number != 1)  # one rank that stops is enough
if first.number == 0:
    feed, args = iter(batches), TrainerArguments(device="cpu", gradient_accumulation_steps=4)
    optimizer, losses, alone = torch.optim.SGD(reference.parameters(), lr=0.1), [], RankGroup(0, [device])
    for _ in range(3):
        losses.append(accumulate_gradients(reference, alone, feed, args, device, autocast, scaler).item())
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"weights": dict(reference.named_parameters()), "losses": losses}, f"{folder}/alone.pt")
first.end()
terminate_process_tree(0)
