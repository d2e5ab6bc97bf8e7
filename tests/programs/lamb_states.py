"""LAMB's state has numbers that become tensors after some steps. Each peer must accept the state of another.

The state of 8-bit LAMB has tensors of bytes, which torch's load_state_dict and Float16 would change."""

import json
import sys

import torch
from hivemind.utils.crypto import RSAPrivateKey

from arguments import AveragingArguments, OptimizerArguments
from common.console import clean_end
from experiment.optimizer import make_optimizer
from swarm.config import SwarmConfig
from swarm.joining import Swarm
from swarm.processes import shut_down

with clean_end():
    states, maddrs = [], []
    for steps in (3, 0):
        RSAPrivateKey._process_wide_key = None  # two peers in one process
        swarm = Swarm.join(SwarmConfig(sys.argv[1], maddrs, host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
        dht = swarm.dht
        maddrs = [str(maddr) for maddr in dht.get_visible_maddrs()]
        torch.manual_seed(steps)
        model = torch.nn.Sequential(torch.nn.Linear(50, 20), torch.nn.LayerNorm(20))
        options = OptimizerArguments(optim=sys.argv[2], min_8bit_size=1000)
        optimizer = make_optimizer(model, swarm, options, AveragingArguments(load_state_compression=sys.argv[3]))
        for _ in range(steps):
            for param in (param for group in optimizer.opt.param_groups for param in group["params"]):
                param.grad.normal_()
            optimizer.state_averager.step(increment_epoch=True, optimizer_step=True)
        states.append((dht, model, optimizer))
    (_, model, giver), (_, copy, taker) = states
    giver.state_averager.state_sharing_priority = 3
    loaded = taker.load_state_from_peers()
    given, taken = (optimizer.training_state()["optimizer"]["state"].values() for optimizer in (giver, taker))
    pairs = [
        [torch.as_tensor(state[name]) for state in (a, b)] for a, b in zip(given, taken, strict=True) for name in a
    ]
    facts = dict(
        loaded=loaded,
        epoch=taker.local_epoch,
        same=all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs),
        bytes=sum(b.numel() for _, b in pairs if b.dtype == torch.uint8),
        weights=max((a - b).abs().max().item() for a, b in zip(model.parameters(), copy.parameters(), strict=True)),
    )
    # a step uses the loaded state
    for optimizer in (giver, taker):
        for param in (param for group in optimizer.opt.param_groups for param in group["params"]):
            param.grad.fill_(0.1)
        optimizer.opt.step()
    masters = [optimizer.training_state()["parameters"] for optimizer in (giver, taker)]
    facts["weights_after"] = max((a - b).abs().max().item() for a, b in zip(*masters, strict=True))
    print(json.dumps(facts), flush=True)
    for dht, _, optimizer in reversed(states):
        shut_down(dht, optimizer)
