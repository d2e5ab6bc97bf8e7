"""A state averager without the rest of a collaborative optimizer, for tests of states."""

from functools import partial

import torch

from swarm.optimizer_state import StateAverager


def make_state_averager(dht, prefix: str, *tensors: torch.Tensor, kind=StateAverager, optimizer=None, **options):
    """:param optimizer: makes it from groups of parameters; default: SGD with learning rate 1"""
    return kind(
        dht=dht,
        prefix=f"{prefix}_state_averager",
        params=[{"params": list(map(torch.nn.Parameter, tensors))}],
        optimizer=optimizer or partial(torch.optim.SGD, lr=1.0),
        scheduler=partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0),
        offload_optimizer=True,
        custom_gradients=True,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        start=True,
        **options,
    )
