"""Two peers average once; in a second round one of them is in the group, and sends nothing. Print their states.

With "end" as the last word, the other one gives up the second round as soon as it has begun. With "late", the silent
one begins after five seconds, as during a long batch.
"""

import json
import multiprocessing
import sys
import time

import torch
from hivemind.averaging.control import AveragingStage
from hivemind.utils.crypto import RSAPrivateKey

import swarm.averager
from arguments import AveragingArguments, OptimizerArguments
from experiment.optimizer import make_optimizer
from swarm.config import AveragingConfig, make_config
from tests.programs.peers import clean_end, join, list_maddrs, print_facts, shut_down

shares = multiprocessing.Array("d", 2)
plan_allreduce = swarm.averager.plan_allreduce


def note_shares(*args):
    plan = plan_allreduce(*args)
    shares[:] = plan.fractions
    return plan


runners = multiprocessing.Value("i", 0)


class CountedRunner(swarm.averager.FailFastAllReduceRunner):
    def __init__(self, *args, **kwargs):
        with runners:
            runners.value += 1
        super().__init__(*args, **kwargs)

    def __del__(self):
        with runners:
            runners.value -= 1


swarm.averager.plan_allreduce, swarm.averager.FailFastAllReduceRunner = note_shares, CountedRunner
with clean_end():
    settings = dict(matchmaking_time=2, target_group_size=2)
    peers, keys, maddrs = [], [], []
    for _ in range(2):
        place = join(sys.argv[1], maddrs)
        keys.append(RSAPrivateKey.process_wide())
        maddrs = list_maddrs(place.dht)
        averaging = make_config(AveragingConfig, AveragingArguments(**settings), **json.loads(sys.argv[2]))
        optimizer = make_optimizer(torch.nn.Linear(100, 10), place, OptimizerArguments(), averaging)
        peers.append((place.dht, optimizer))
    averagers = [optimizer.grad_averager for _, optimizer in peers]

    def schedule():
        controls = []
        for averager, key in zip(averagers, keys, strict=True):
            averager.accumulate(batch_size=1)
            RSAPrivateKey._process_wide_key = key  # with which it signs what its group is told
            controls.append(averager.schedule_step())
        return controls

    groups = [averager.begin(control) for averager, control in zip(averagers, schedule(), strict=True)]
    groups = [control.result(60) for control in groups]
    for averager, group in zip(averagers, groups, strict=True):
        averager.finish(next(iter(group.values())))
    facts = dict(group_sizes=[len(group) for group in groups], shares=sorted(share / sum(shares) for share in shares))
    controls = schedule()
    control = averagers[0].begin(controls[0])
    while control.stage == AveragingStage.LOOKING_FOR_GROUP:
        time.sleep(0.01)
    start = time.monotonic()
    if sys.argv[-1] == "end":
        while not averagers[0].exchanged_group.value:
            time.sleep(0.01)
        averagers[0].end_round()
    if sys.argv[-1] == "late":
        time.sleep(5)
        averagers[1].begin(controls[1])
    facts["failure"] = str(control.exception(60))
    facts["seconds"] = time.monotonic() - start
    controls[1].cancel()
    for number, averager in enumerate(averagers):
        averager.set_expected_peers({}, min_peers=2 + number)  # as the optimizer does: hivemind remembers the last call
    while runners.value and time.monotonic() < start + 30:
        time.sleep(0.1)
    print_facts(**facts, runners=runners.value)
    for dht, optimizer in peers:
        shut_down(dht, optimizer)
