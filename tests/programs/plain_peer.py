"""A peer of plain hivemind, alone on loopback, looks at itself: in a process of its own, as hivemind changes
the handling of signals."""

import json
import signal
from functools import partial

import hivemind
import torch

dht = hivemind.DHT(start=True)
param = torch.nn.Parameter(torch.ones(4))
optimizer = hivemind.Optimizer(
    dht=dht,
    run_id="gaps",
    target_batch_size=64,
    params=[{"params": [param]}],
    optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    averager_opts=dict(target_group_size=4),
)
facts = dict(
    client_mode=optimizer.client_mode,
    sigint_is_ignored=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    first_step=float(next(iter(optimizer.opt.state.values()))["step"]),
    parameter=next(iter(optimizer.opt.state)).max().item(),
    state_group_size=optimizer.state_averager.matchmaking_kwargs["target_group_size"],
    gradient_group_size=optimizer.grad_averager.matchmaking_kwargs["target_group_size"],
)
param.grad = torch.ones(4)
optimizer.grad_averager.accumulate_grads_(batch_size=8)
control = optimizer.grad_averager.step(wait=False, timeout=30)
facts["samples_while_averaging"] = optimizer.grad_averager.local_samples_accumulated
control.cancel()
print(json.dumps(facts), flush=True)
optimizer.shutdown()
dht.shutdown()
