"""Peers on loopback, also several in one process, and averagers of states without the rest of an optimizer."""

import json
from functools import partial

import torch
from hivemind.utils.crypto import RSAPrivateKey

from common.console import clean_end as clean_end
from swarm.config import SwarmConfig
from swarm.dht import DHT
from swarm.joining import Swarm
from swarm.optimizer_state import StateAverager
from swarm.processes import shut_down as shut_down


def join(prefix: str, maddrs=(), host: str = "127.0.0.1", **options) -> Swarm:
    """Join a run as a new peer, also after another peer of this process."""
    RSAPrivateKey._process_wide_key = None
    return Swarm.join(SwarmConfig(prefix, list(maddrs), host_maddrs=[f"/ip4/{host}/tcp/0"], **options))


def list_maddrs(*dhts: DHT) -> list[str]:
    return [str(maddr) for dht in dhts for maddr in dht.get_visible_maddrs()]


def print_facts(**facts) -> None:
    print(json.dumps(facts), flush=True)


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
