"""A peer of the experiment in the current folder steps alone, and a second one loads its state. Print both as JSON.

python tests/programs/shared_momentum.py RUN OPTIM LEARNING_RATE [COMPRESSION]
"""

import os
import sys
from collections import Counter

sys.path.insert(0, os.getcwd())

import torch
from peers import clean_end, join, list_maddrs, print_facts, shut_down

from arguments import AveragingArguments, ModelArguments, OptimizerArguments
from experiment.model import make_model
from experiment.objectives import compute_losses
from experiment.optimizer import make_contract, make_optimizer
from training.model import move_batch

FIRST_MOMENTS = ("momentum_buffer", "exp_avg")


def list_moments(optimizer) -> list[torch.Tensor]:
    """The first moment of each parameter."""
    return [state[name] for state in optimizer.opt.state.values() for name in FIRST_MOMENTS if name in state]


def find_largest_difference(tensors, others) -> float:
    return max((a - b).abs().max().item() for a, b in zip(tensors, others, strict=True))


with clean_end():
    torch.set_num_threads(1)
    prefix, optim, rate, compression = [*sys.argv[1:], "none"][:4]
    numbers = dict(warmup_steps=0, weight_decay=0.5, min_8bit_size=4096)
    options = OptimizerArguments(optim=optim, learning_rate=float(rate), **numbers)
    averaging = AveragingArguments(target_batch_size=4, load_state_compression=compression, matchmaking_time=1.0)
    model_args, peers = ModelArguments("configs/demo.json"), []
    for seed in (1, 2):
        swarm = join(prefix, list_maddrs(*(dht for dht, *_ in peers)))
        model_args.seed = seed
        model = make_model(model_args, 300)
        optimizer = make_optimizer(model, swarm, options, averaging)
        optimizer.accumulate_on(torch.device("cpu"))
        peers.append((swarm.dht, model, optimizer))
        if seed == 1:
            before = [moment.abs().max().item() for moment in list_moments(optimizer)]
            ids = torch.arange(64).reshape(4, 16) % 290 + 5
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
            batch |= {"token_type_ids": torch.zeros_like(ids), "sentence_order_label": torch.tensor([0, 1, 0, 1])}
            losses = []
            while optimizer.local_epoch < 4:
                loss = compute_losses(model, move_batch(batch, torch.device("cpu")))["loss"]
                loss.backward()
                optimizer.step(batch_size=4)
                optimizer.zero_grad()
                losses.append(loss.item())
    loaded = optimizer.load_state_from_peers()
    (_, first, giver), (_, second, taker) = peers
    kinds = Counter(name for state in giver.opt.state.values() for name in state if name in FIRST_MOMENTS)
    facts = dict(kinds=kinds, before=before, losses=losses, loaded=loaded)
    facts["epochs"] = [giver.local_epoch, taker.local_epoch]
    facts["sizes"] = [moment.norm().item() for moment in list_moments(giver)]
    facts["same_weights"] = [a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    facts["contract"] = make_contract(first, "a", options, averaging).contract["optimizer"]
    given, taken = (optimizer.training_state()["optimizer"]["state"].values() for optimizer in (giver, taker))
    pairs = [[*map(torch.as_tensor, (a[name], b[name]))] for a, b in zip(given, taken, strict=True) for name in a]
    facts["same_state"] = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    facts["bytes"] = sum(b.numel() for _, b in pairs if b.dtype == torch.uint8)
    facts["weights"] = find_largest_difference(first.parameters(), second.parameters())
    # a step uses the loaded state
    for optimizer in (giver, taker):
        for group in optimizer.opt.param_groups:
            for param in group["params"]:
                param.grad.fill_(0.1)
        optimizer.opt.step()
    facts["weights_after"] = find_largest_difference(*(it.training_state()["parameters"] for it in (giver, taker)))
    print_facts(**facts)
    for dht, _, optimizer in reversed(peers):
        shut_down(dht, optimizer)
