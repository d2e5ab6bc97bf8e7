"""Rounds of gradients of peers of several kinds. Print whether all trainers have the same averages, and the violations.

The peers "public", "client", "slow" and "aux" are honest. "liar" reports other averages than those that it has
received. From the third round on, "echo" returns to each sender its own gradient.
"""

import sys
from collections import deque

import torch
from hivemind.utils.crypto import RSAPrivateKey

import swarm.averager
from arguments import AveragingArguments, OptimizerArguments
from experiment.optimizer import make_optimizer
from swarm.allreduce import FailFastAllReduceRunner
from tests.programs.peers import clean_end, join, list_maddrs, print_facts, shut_down


class EchoRunner(FailFastAllReduceRunner):
    rounds = 0  # in the process of its averager

    def __init__(self, *args, **kwargs):
        EchoRunner.rounds += 1
        super().__init__(*args, **kwargs)

    async def _accumulate_parts_streaming(self, stream, sender_index: int):
        parts = deque()

        async def keep():
            async for message in stream:
                parts.append(message.tensor_part)
                yield message

        async for answer in super()._accumulate_parts_streaming(keep(), sender_index):
            own = parts.popleft()
            if EchoRunner.rounds > 2 and own.buffer:  # a slow peer does not send all parts
                answer.tensor_part.CopyFrom(own)
            yield answer


with clean_end():
    prefix, compression, *kinds = sys.argv[1:]
    settings = dict(matchmaking_time=2, target_group_size=8, compression=compression)
    peers, keys, maddrs = [], [], []
    for kind in kinds:
        place = join(prefix, maddrs, client_mode=kind == "client")
        place.dht.uplink.set_bandwidth(0.2 if kind == "slow" else 20, is_fixed=True)
        keys.append(RSAPrivateKey.process_wide())
        maddrs = maddrs or list_maddrs(place.dht)
        torch.manual_seed(0)
        model = torch.nn.Linear(600, 600)  # 8 bits for the weight, and 16 for the bias
        swarm.averager.FailFastAllReduceRunner = EchoRunner if kind == "echo" else FailFastAllReduceRunner
        options = OptimizerArguments(), AveragingArguments(**settings)
        peers.append((model, place.dht, make_optimizer(model, place, *options, auxiliary=kind == "aux")))
    averagers = [optimizer.grad_averager for _, _, optimizer in peers]
    ids = [dht.peer_id.to_bytes() for _, dht, _ in peers]
    names = {own: f"{kind} {index}" for index, (own, kind) in enumerate(zip(ids, kinds, strict=True))}
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        controls = []
        for kind, own, key, averager, (model, *_) in zip(kinds, ids, keys, averagers, peers, strict=True):
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            if kind != "aux":
                averager.accumulate(batch_size=8)
            if kind == "liar" and averager._report:
                averager._report["digests"] = tuple(bytes(16) for _ in averager._report["digests"])
            RSAPrivateKey._process_wide_key = key  # with which it signs the data for its group
            others = {peer: float("inf") for peer in ids if peer != own}
            averager.set_expected_peers(others, min_peers=len(ids))
            averager.round_state = number, True, "lineage"
            controls.append(averager.schedule_step())
        for averager, control in zip(averagers, controls, strict=True):
            averager.begin(control)
        averages, violations, sizes, turns = [], {}, [], []
        for own, kind, averager, control in zip(ids, kinds, averagers, controls, strict=True):
            group = control.result(60)
            result = next(iter(group.values()))
            averager.finish(result)
            sizes.append(len(group))
            turns.append(result.turn[0])
            violations[names[own]] = [names[peer.to_bytes()] for peer in result.violations]
            if kind != "aux":
                with averager.get_tensors() as tensors:
                    averages.append(torch.cat([tensor.flatten() for tensor in tensors]))
        is_equal = all(torch.equal(averages[0].view(torch.int32), it.view(torch.int32)) for it in averages)
        length = averages[0].norm().item()
        print_facts(is_equal=is_equal, violations=violations, sizes=sizes, turns=turns, length=length)
    for _, dht, optimizer in peers:
        shut_down(dht, optimizer)
