"""A peer that averages its parameters with others who are not there."""

import json
import sys
import time

import torch

from common.console import clean_end
from swarm.config import SwarmConfig
from swarm.joining import Swarm
from swarm.processes import shut_down
from tests.programs.gradient_peer import make_gradient_optimizer

with clean_end():
    dht = Swarm.join(SwarmConfig(sys.argv[1], host_maddrs=["/ip4/127.0.0.1/tcp/0"])).dht
    parameter = torch.nn.Parameter(torch.zeros(8))
    optimizer = make_gradient_optimizer(dht, sys.argv[1], parameter, target_batch_size=10**6, group_size=2)
    averager = optimizer.state_averager
    averager.set_expected_peers([b"somebody"])
    start = time.monotonic()
    averager.step(averaging_round=True, delay_averaging=False, averaging_opts=dict(timeout=120.0))
    print(json.dumps({"seconds": time.monotonic() - start}), flush=True)
    shut_down(dht, optimizer)
