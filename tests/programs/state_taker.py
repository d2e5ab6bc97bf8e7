"""A peer that takes over the swarm's state again and again, each time from a parameter of its own."""

import sys

import torch

from common.console import clean_end, setup_logging
from swarm.processes import shut_down
from tests.programs.gradient_peer import make_gradient_optimizer
from tests.programs.peers import join, print_facts

with clean_end():
    prefix, times, numbers, *maddrs = sys.argv[1:]
    setup_logging("taker")
    dht = join(prefix, maddrs).dht
    parameter = torch.nn.Parameter(torch.zeros(int(numbers)))
    optimizer = make_gradient_optimizer(dht, prefix, parameter, target_batch_size=10**6, group_size=2)
    own = next(iter(optimizer.opt.param_groups))["params"][0]
    for _ in range(int(times)):
        optimizer.state_averager.local_epoch, optimizer.state_averager.lineage = 0, "own"
        with torch.no_grad():
            own.fill_(-1.0)
        loaded = optimizer.load_state_from_peers()
        state = optimizer.state_averager
        values = [own.min().item(), own.max().item(), parameter.mean().item()]
        print_facts(loaded=loaded, epoch=state.local_epoch, own=state.lineage == "own", values=values)
    shut_down(dht, optimizer)
