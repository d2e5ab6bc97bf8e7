"""Two optimizers of one model: the state of the first, after some steps, goes through a checkpoint into the second.

python -m tests.programs.round_trip RUN FOLDER TOKENIZER OPTIM ...
"""

import copy
import sys
import time
from pathlib import Path

import torch

from arguments import AveragingArguments, ModelArguments, OptimizerArguments
from experiment.model import make_model
from experiment.optimizer import make_optimizer
from tests.programs.peers import clean_end, join, print_facts, shut_down
from text.tokenizers import load_tokenizer
from training.checkpoint import apply_state, collect_state, load_state, save_checkpoint

MOMENTS = {"lamb_8bit": "exp_avg_codes", "muon": "momentum_buffer"}  # the first moment of all others is exp_avg


def everything(model, optimizer):
    opt = optimizer.opt
    return {
        "weights": [tensor.clone() for tensor in model.state_dict().values()],
        "masters": [param.detach().clone() for group in opt.param_groups for param in group["params"]],
        "moments": copy.deepcopy([sorted(state.items()) for state in opt.state_dict()["state"].values()]),
        "numbers": [optimizer.local_epoch, optimizer.stats.total_samples, [group["lr"] for group in opt.param_groups]],
    }


def equal(one, other):
    if torch.is_tensor(one):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def step(model, optimizer, make_gradient):
    for param in model.parameters():
        param.grad = make_gradient(param)
    optimizer.step(batch_size=4)


def check(prefix: str, folder: str, tokenizer, optim: str) -> dict:
    options, peers = OptimizerArguments(optim=optim, warmup_steps=5, min_8bit_size=4096), []
    for seed in (1, 2):
        swarm = join(f"{prefix}_{optim}")
        model = make_model(ModelArguments("configs/demo.json", seed=seed), len(tokenizer))
        optimizer = make_optimizer(model, swarm, options, AveragingArguments(target_batch_size=4))
        optimizer.accumulate_on(torch.device("cpu"))
        peers.append((swarm.dht, model, optimizer))
    (_, model, optimizer), (_, other_model, other) = peers
    while optimizer.local_epoch < 3:
        step(model, optimizer, torch.randn_like)
        time.sleep(0.1)  # of the tracker's processor time
    scaler, other_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu")
    before = everything(model, optimizer)
    torch.manual_seed(3)
    state = collect_state(model, optimizer, {"experiment_prefix": prefix}, scaler, {"epochs": 3})
    draws = torch.rand(3)
    assert save_checkpoint(model, tokenizer, folder, state, {}, 2)
    # further steps must not change the collected state
    step(model, optimizer, torch.ones_like)
    facts = {"went_on": [optimizer.local_epoch, equal(before["masters"], everything(model, optimizer)["masters"])]}
    loaded = load_state(Path(folder) / "checkpoint-3")
    apply_state(loaded, other_model, other, other_scaler)
    after = everything(other_model, other)
    facts |= {part: equal(before[part], after[part]) for part in before}
    facts |= dict(priority=other.state_averager.state_sharing_priority, scale=other_scaler.get_scale())
    facts["tracker"] = [other.tracker.local_progress.epoch, other.tracker.view.epoch]
    facts["draws"] = equal(draws, torch.rand(3))
    # a step must not change the loaded state
    moment = loaded["optimizer"]["state"][0][MOMENTS.get(optim, "exp_avg")]
    before_step = moment.clone()
    deadline = time.monotonic() + 30  # the tracker may still hold what was before
    while other.local_epoch <= 3 and time.monotonic() < deadline:
        step(other_model, other, torch.ones_like)
        time.sleep(0.1)
    facts["is_copied"] = other.local_epoch > 3 and equal(before_step, moment)
    torch.save(state["model"], f"{folder}/collected.pt")
    for dht, _, optimizer in peers:
        shut_down(dht, optimizer)
    return facts


with clean_end():
    prefix, folder, tokenizer_path, *optims = sys.argv[1:]
    tokenizer = load_tokenizer(tokenizer_path)
    for optim in optims:
        print_facts(**check(prefix, f"{folder}/{optim}", tokenizer, optim))
