"""Two optimizers of one model: the state of the first, after some steps, goes through a file into the second."""

import copy
import json
import random
import sys
import time
from functools import partial

import numpy
import torch
from hivemind.utils.crypto import RSAPrivateKey

from arguments import AveragingArguments, ModelArguments, OptimizerArguments
from common.files import write_file
from experiment.model import make_model
from experiment.optimizer import make_optimizer
from swarm.config import SwarmConfig
from swarm.joining import Swarm
from swarm.processes import clean_end, shut_down
from text.tokenizers import load_tokenizer
from training.checkpoint import apply_state, collect_state, load_state, save_checkpoint

folder, tokenizer_path, optim = sys.argv[2:]
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


with clean_end():
    options = OptimizerArguments(optim=optim, warmup_steps=5, min_8bit_size=4096)
    tokenizer = load_tokenizer(tokenizer_path)
    peers = []
    for seed in (1, 2):
        RSAPrivateKey._process_wide_key = None  # two peers in one process
        swarm = Swarm.join(SwarmConfig(sys.argv[1], host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
        model = make_model(ModelArguments("configs/demo.json", seed=seed), len(tokenizer))
        optimizer = make_optimizer(model, swarm, options, AveragingArguments(target_batch_size=4))
        optimizer.accumulate_on(torch.device("cpu"))
        peers.append((swarm.dht, model, optimizer))
    (_, model, optimizer), (_, other_model, other) = peers
    while optimizer.local_epoch < 3:
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step(batch_size=4)
    scaler, other_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu")
    before = everything(model, optimizer)
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    state = collect_state(model, optimizer, {"experiment_prefix": swarm.prefix}, scaler, {"epochs": 3})
    draws = [torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist()]
    assert save_checkpoint(model, tokenizer, folder, state, {}, 2)
    assert write_file(folder + "/state.pt", partial(torch.save, state))
    facts = {}
    # going on must not change what was collected
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step(batch_size=4)
    facts["went_on"] = [optimizer.local_epoch, equal(before["masters"], everything(model, optimizer)["masters"])]
    loaded_from = {"folder": load_state(folder + "/checkpoint-3"), "file": load_state(folder + "/state.pt")}
    for name, loaded in loaded_from.items():
        with torch.no_grad():
            for param in other_model.parameters():
                param.zero_()
        apply_state({**loaded, "path": name}, other_model, other, other_scaler)
        after = everything(other_model, other)
        facts[name] = {part: equal(before[part], after[part]) for part in before}
        facts[name] |= {
            "tracker": [other.tracker.local_progress.epoch, other.tracker.global_epoch],
            "priority": other.state_averager.state_sharing_priority,
            "scale": other_scaler.get_scale(),
            "draws": equal(draws, [torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist()]),
        }
        # training continues with a copy: a step does not change the loaded state
        moment = loaded["optimizer"]["state"][0][MOMENTS.get(optim, "exp_avg")]
        before_step = moment.clone()
        for param in other_model.parameters():
            param.grad = torch.ones_like(param)
        deadline = time.monotonic() + 30  # the tracker may still hold what was before
        while other.local_epoch <= 3 and time.monotonic() < deadline:
            other.step(batch_size=4)
            time.sleep(0.1)
        facts[name]["is_copied"] = other.local_epoch > 3 and equal(before_step, moment)
    print(json.dumps(facts), flush=True)
    for dht, _, optimizer in peers:
        shut_down(dht, optimizer)
