"""A peer that takes over the swarm's state again and again, each time from a parameter of its own."""

import sys

import torch

from common.console import clean_end, setup_logging
from tests.programs.gradient_peer import TIMES, make_gradient_optimizer
from tests.programs.peers import join, print_facts, shut_down

with clean_end():
    prefix, times, numbers, *maddrs = sys.argv[1:]
    setup_logging("taker")
    dht, parameter = join(prefix, maddrs).dht, torch.nn.Parameter(torch.zeros(int(numbers)))
    optimizer = make_gradient_optimizer(dht, prefix, parameter, target_batch_size=10**6, target_group_size=2, **TIMES)
    own = next(iter(optimizer.opt.param_groups))["params"][0]
    for _ in range(int(times)):
        optimizer.state_averager.local_epoch, optimizer.state_averager.lineage = 0, "own"
        with torch.no_grad():
            own.fill_(-1.0)
        loaded, state = optimizer.load_state_from_peers(), optimizer.state_averager
        values = [own.min().item(), own.max().item(), parameter.mean().item()]
        print_facts(loaded=loaded, epoch=state.local_epoch, own=state.lineage == "own", values=values)
    shut_down(dht, optimizer)
