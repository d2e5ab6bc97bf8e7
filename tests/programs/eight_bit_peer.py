"""A peer of 8-bit LAMB, whose gradients are random numbers of its own: 16 bits on the wire for its first matrix, 8 for
the second, which is one row larger. Writes its weights after each epoch."""

import sys
import time

import torch

from arguments import AveragingArguments, OptimizerArguments
from common.console import clean_end, handle_stop_signals
from experiment.optimizer import make_optimizer
from swarm.config import AveragingConfig, make_config
from tests.programs.peers import join, list_maddrs, print_facts, shut_down

with clean_end():
    prefix, seed, folder, *maddrs = sys.argv[1:]
    swarm = join(prefix, maddrs)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, rows, bias=False) for rows in (256, 257)))
    settings = dict(target_batch_size=64, target_group_size=2, compression="8bit", average_state_every=10**6)
    settings |= dict(matchmaking_time=2, averaging_timeout=10, next_chunk_timeout=4)
    averaging = make_config(AveragingConfig, AveragingArguments(), default_refresh_period=0.3, **settings)
    options = OptimizerArguments(optim="lamb_8bit", min_8bit_size=1, learning_rate=0.01, warmup_steps=0)
    optimizer, stop = make_optimizer(model, swarm, options, averaging), handle_stop_signals()
    print_facts(maddrs=list_maddrs(swarm.dht))
    torch.manual_seed(int(seed))
    epoch = 0
    while not stop.is_set():
        time.sleep(0.3)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step(batch_size=16)
        if optimizer.local_epoch != epoch:
            epoch = optimizer.local_epoch
            torch.save([param.detach().clone() for param in model.parameters()], f"{folder}/{seed}-{epoch}.pt")
            print_facts(epoch=epoch, averaged_with=optimizer.stats.group_size)
    shut_down(swarm.dht, optimizer)
