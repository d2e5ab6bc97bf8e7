"""A peer of the experiment in the current folder steps alone, and a second one loads its state. Print both as JSON."""

import json
import os
import sys
from collections import Counter

sys.path.insert(0, os.getcwd())

import torch
from hivemind.utils.crypto import RSAPrivateKey

from arguments import AveragingArguments, ModelArguments, OptimizerArguments
from common.console import clean_end
from experiment.model import make_model
from experiment.objectives import compute_losses
from experiment.optimizer import make_contract, make_optimizer
from swarm.config import SwarmConfig
from swarm.joining import Swarm
from swarm.processes import shut_down
from training.model import move_batch

FIRST_MOMENTS = ("momentum_buffer", "exp_avg")


def list_moments(optimizer) -> list[torch.Tensor]:
    """The first moment of each parameter."""
    return [state[name] for state in optimizer.opt.state.values() for name in FIRST_MOMENTS if name in state]


with clean_end():
    torch.set_num_threads(1)
    prefix, optim, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])
    options = OptimizerArguments(optim=optim, learning_rate=rate, warmup_steps=0, weight_decay=0.5)
    averaging = AveragingArguments(target_batch_size=4, load_state_compression="none", matchmaking_time=1.0)
    model_args, peers = ModelArguments("configs/demo.json"), []
    for seed in (1, 2):
        others = [str(maddr) for dht, *_ in peers for maddr in dht.get_visible_maddrs()]
        RSAPrivateKey._process_wide_key = None  # two peers in one process
        swarm = Swarm.join(SwarmConfig(prefix, others, host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
        dht = swarm.dht
        model_args.seed = seed
        model = make_model(model_args, 300)
        optimizer = make_optimizer(model, swarm, options, averaging)
        optimizer.accumulate_on(torch.device("cpu"))
        peers.append((dht, model, optimizer))
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
    buffers = [list_moments(optimizer) for optimizer in (giver, taker)]
    kinds = Counter(name for state in giver.opt.state.values() for name in state if name in FIRST_MOMENTS)
    facts = dict(
        kinds=kinds, before=before, losses=losses, loaded=loaded, epochs=[giver.local_epoch, taker.local_epoch]
    )
    facts["sizes"] = [buffer.norm().item() for buffer in buffers[0]]
    facts["same_momentum"] = [a.equal(b) for a, b in zip(*buffers, strict=True)]
    facts["same_weights"] = [a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    facts["contract"] = make_contract(first, "a", options, averaging).contract["optimizer"]
    print(json.dumps(facts), flush=True)
    for dht, _, optimizer in peers:
        shut_down(dht, optimizer)
