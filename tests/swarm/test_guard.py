"""The checks of parts and averages in a round, and rounds with one hostile peer of four."""

import asyncio
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import as_aiter
from processes import Script, make_prefix, wait_until
from programs.hostile_peer import ANSWERED, HOLDS_UP, SENT
from swarms import epochs, list_joint_rounds, start_peer, stop

from swarm import guard
from swarm.allreduce import FailFastAllReduceRunner
from swarm.guard import SKETCH_SIZE, ProtocolViolation, VerifyingContainer, compute_sketch, find_outliers
from swarm.log_records import unpack
from swarm.matchmaking import RoundState, sign_round_state
from swarm.round_watch import RoundWatch
from swarm.trust import REVERSED_AVERAGE
from swarm.uplink import Uplink


def make_gradients(count: int, correlation: float, numbers: int = 5000) -> torch.Tensor:
    """With this cosine between any two, of length 1 and a little more or less."""
    common, own = torch.randn(numbers), torch.randn(count, numbers)
    return (correlation**0.5 * common + (1 - correlation) ** 0.5 * own) * (torch.rand(count, 1) + 0.5) / numbers**0.5


def factors_of(gradients: torch.Tensor) -> list[float]:
    count, numbers = gradients.shape
    return guard.compute_clipping_factors(
        (gradients @ gradients.T).double(), torch.full((count,), float(numbers)).double()
    ).tolist()


@pytest.mark.parametrize("arrived, progress", [(0, 0.0), (5, 0.5), (10, 1.0), (1000, 1.0)])
def test_progress_of_round_is_bounded(arrived, progress):
    parts, reducer = SimpleNamespace(num_parts_by_peer=[2, 2]), SimpleNamespace(num_parts=3, num_senders=2)
    runner = SimpleNamespace(arrived=Counter(a=arrived), tensor_part_container=parts, tensor_part_reducer=reducer)
    assert FailFastAllReduceRunner.progress.fget(runner) == progress


def test_second_stream_of_parts_is_refused():
    """Each part would count twice, and the sender would get the blame of the peer whose part then comes too late."""
    peer = PeerID(b"a")
    runner = SimpleNamespace(active_senders={peer}, violations={})
    with pytest.raises(ProtocolViolation, match="two streams"):
        asyncio.run(anext(FailFastAllReduceRunner.rpc_aggregate_part(runner, None, SimpleNamespace(remote_id=peer))))
    assert list(runner.violations) == [peer]


def test_auxiliary_peer_awaits_no_averages():
    """It would otherwise end the round, and blame a peer that is done."""
    first, second, helper = (PeerID(bytes([number])) for number in range(3))
    runner = SimpleNamespace(sender_peer_ids=[first, second], ordered_peer_ids=[first, second, helper])
    runner.banned_senders, runner.tensor_part_reducer = set(), SimpleNamespace(num_parts_received=[3, 3], num_parts=3)
    runner.tensor_part_container = SimpleNamespace(_outputs_registered_by_peer=[0, 0, 0], num_parts_by_peer=[2, 2, 3])
    for peer, awaited in ((helper, set()), (first, {second, helper})):
        runner.peer_id = peer
        assert {*FailFastAllReduceRunner.list_awaited_peers(runner)} == awaited


@pytest.mark.parametrize("num_parts, arrived, is_banned", [(3, 0, True), (0, 0, False), (3, 1, False)])
def test_silent_peer_is_banned_if_it_owes_gradients(num_parts, arrived, is_banned):
    """This peer averages parts, or none. An honest reducer that waits for an attacker would be banned otherwise."""
    own, silent, other = (PeerID(bytes([number])) for number in range(3))
    uplink, ended = Uplink(), []
    uplink._times["next_chunk_timeout"].value = 0.5

    async def answer(*_, **__) -> set[bytes]:
        return {silent.to_bytes()}

    async def watch() -> None:
        runner = SimpleNamespace(ordered_peer_ids=[own, silent, other], modes=3 * [AveragingMode.NODE], group_size=3)
        runner.sender_peer_ids, runner.arrived = runner.ordered_peer_ids, Counter({silent: arrived})
        runner.tensor_part_reducer, runner.violations = SimpleNamespace(num_parts=num_parts), {}
        runner.list_awaited_peers, runner.list_stragglers = (lambda: [silent]), lambda: []
        runner.settings, runner.cause = guard.RoundSettings(), None
        runner.has_uplink_slowed, runner.progress, runner._future = (lambda: False), 0.0, asyncio.Future()
        runner.end = lambda *cause: runner._future.set_result(ended.append((*cause, runner.violations)))
        await asyncio.wait_for(RoundWatch(runner, SimpleNamespace(uplink=uplink, run_coroutine=answer)).run(), 20)

    asyncio.run(watch())
    [(cause, _, violations)] = ended
    assert cause == silent and violations.keys() == ({silent} if is_banned else set())


@pytest.mark.parametrize("are_parameters", [False, True])
def test_empty_average_of_gradients_is_violation(are_parameters):
    """With no difference, this peer would take its own gradient for the average. Of parameters, few are requested."""
    own, part = PeerID(b"own"), torch.ones(3)
    runner = SimpleNamespace(ordered_peer_ids=[own], settings=guard.RoundSettings(are_parameters))
    runner.tensor_part_container = SimpleNamespace(input_parts=[[(part, None)]])
    runner.record_activity = lambda messages, _: messages

    async def read() -> torch.Tensor:
        messages = as_aiter(averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART))
        [message] = [it async for it in FailFastAllReduceRunner.read_averages(runner, messages, own)]
        return deserialize_torch_tensor(message.tensor_part)

    if are_parameters:
        assert not asyncio.run(read()).any()
    else:
        with pytest.raises(ProtocolViolation, match="no average"):
            asyncio.run(read())


def test_clip_keeps_honest_gradients():
    for seed in range(200):
        torch.manual_seed(seed)
        gradients = make_gradients(3 + seed % 6, correlation=(seed % 10) / 10)
        assert min(factors_of(gradients)) > 0.3  # lengths vary by a factor of three here


def test_clip_limits_outliers():
    torch.manual_seed(0)
    gradients = make_gradients(4, correlation=0.5)
    lengths = gradients.norm(dim=1)
    *honest, factor = factors_of(torch.cat((gradients[:3], -10 * gradients[3:])))
    assert factor == 0 and min(honest) > 0.3
    *honest, factor = factors_of(torch.cat((gradients[:3], 100 * torch.randn(1, 5000) / 5000**0.5)))
    assert 0 < factor * 100 < 1.1 * lengths[:3].median() and min(honest) > 0.3
    assert factors_of(torch.cat((gradients[:3], torch.zeros(1, 5000)))) == pytest.approx(
        [*factors_of(gradients[:3]), 1]
    )
    three_ways = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
    assert factors_of(three_ways) == pytest.approx([1, 1, 1])
    of_two = factors_of(torch.stack((gradients[0], -10 * gradients[0])))
    assert of_two == pytest.approx([1, 0.1])  # either may be right


async def reduce(parts: dict[int, list], weights, max_weight, are_parameters=False, senders=4) -> list[torch.Tensor]:
    """The averages of all parts, of which those senders that lie send no more."""
    shapes = [torch.Size([7]), torch.Size([3])]
    reducer = guard.RobustReducer(shapes, senders)
    reducer.configure(guard.RoundSettings(are_parameters, max_weight))

    async def send(index: int) -> list:
        averages = []
        for number, part in enumerate(parts[index]):
            try:
                averages.append(await reducer.accumulate_part(index, number, part, weight=weights[index]))
            except ProtocolViolation:
                reducer.num_parts_received[index] = number
                reducer.on_sender_failed(index)
                return averages
        return averages

    return max(await asyncio.gather(*map(send, parts)), key=len)


@pytest.mark.parametrize("bad", [torch.full((3,), math.nan), torch.full((3,), 1e30), torch.zeros(4), torch.zeros(0)])
def test_invalid_part_excludes_only_its_sender(bad):
    parts = {i: [torch.full((7,), float(i)), torch.full((3,), float(i))] for i in range(3)} | {3: [torch.ones(7), bad]}
    first, second = asyncio.run(reduce(parts, [1, 1, 2, 4], None))
    assert first.tolist() == pytest.approx([(0 + 1 + 4 + 4) / 8] * 7)
    assert second.tolist() == pytest.approx([(0 + 1 + 4) / 4] * 3)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.complex64, torch.int64])
def test_part_of_other_type_excludes_only_its_sender(kind):
    """Otherwise, the average fails, with an honest peer as the cause."""
    parts = {index: [torch.full((7,), 2.0), torch.full((3,), 2.0)] for index in range(3)}
    other = {3: [torch.ones(7, dtype=kind), torch.ones(3, dtype=kind)]}
    for in_order in (parts | other, other | parts):
        first, second = asyncio.run(reduce(in_order, [1] * 4, 100))
        assert first.tolist() == pytest.approx([2.0] * 7) and second.tolist() == pytest.approx([2.0] * 3)


def test_message_of_peer_needs_no_gradient():
    """Otherwise, the averaged tensors keep the messages of all rounds for autograd."""
    part = serialize_torch_tensor(torch.ones(3).requires_grad_())
    runner, peer = SimpleNamespace(uplink=Uplink(), arrived=Counter()), PeerID(b"a")

    async def read() -> torch.Tensor:
        messages = as_aiter(averaging_pb2.AveragingData(tensor_part=part))
        message = await anext(FailFastAllReduceRunner.record_activity(runner, messages, peer))
        return deserialize_torch_tensor(message.tensor_part)

    assert deserialize_torch_tensor(part).requires_grad and not asyncio.run(read()).requires_grad
    part.dtype = "(65536,)f4"  # of a part of 64 KB, numpy would make gigabytes
    assert asyncio.run(read()).tolist() == [1.0] * 3


def test_reducer_bounds_weights_and_takes_median():
    for last, mean in ((1.0, 10 / 7), (100.0, 2.0)):  # at four times the median weight, and of the median norm
        parts = {i: [torch.full((7,), value), torch.full((3,), value)] for i, value in enumerate((2.0, 2.0, 2.0, last))}
        for average in asyncio.run(reduce(parts, [1, 1, 1, 1e9], 100)):
            assert average.tolist() == pytest.approx([mean] * len(average))
    for values, median in (((1.0, 1.5, 2.0, 9e9), 1.75), ((1.0, 1.0, -9e9, 1.0), 1.0)):
        parts = {i: [torch.full((7,), value), torch.full((3,), value)] for i, value in enumerate(values)}
        for average in asyncio.run(reduce(parts, [1] * 4, 2, are_parameters=True)):
            assert average.tolist() == pytest.approx([median] * len(average))


def test_average_without_samples_is_finite():
    for max_weight in (None, 100):
        parts = {i: [torch.zeros(7), torch.zeros(3)] for i in range(4)}
        assert all(not average.any() for average in asyncio.run(reduce(parts, [0] * 4, max_weight)))


def give_averages(own: torch.Tensor, averages: list[torch.Tensor], are_parameters: bool = False) -> VerifyingContainer:
    """Return the container after a round in which each peer has averaged one part of the own tensor."""
    container = VerifyingContainer([own], [1.0] * len(averages), part_size_bytes=len(own) // len(averages) * 4)
    container.configure(guard.RoundSettings(are_parameters, max_weight=1.0), own_index=0)
    for index, (average, part) in enumerate(zip(averages, own.chunk(len(averages)), strict=True)):
        answer = average - part if are_parameters and average.shape == part.shape else average
        container.register_processed_part(index, 0, answer)
    return container


def test_false_average_is_detected():
    torch.manual_seed(1)
    for correlation in (0.0, 0.3, 0.9):
        gradients = make_gradients(4, correlation)
        own, true = gradients[0], list(gradients.mean(0).chunk(4))
        weight = 0.25 * float(gradients[0].norm() / gradients.norm(dim=1).mean())
        assert min(give_averages(own, true).estimate_contributions(weight).values()) > 0.6
        noise = torch.randn(1250) * true[2].norm() / 1250**0.5
        for false, at_most in ((noise, 0.2), (-true[2], -0.6), (50 * true[2], guard.FAR_TOO_LONG)):
            container = give_averages(own, [*true[:2], false, true[3]])
            good, bad, other = (container.estimate_contributions(weight)[index] for index in (1, 2, 3))
            assert bad <= at_most and min(good, other) > 0.6
        false = give_averages(own, [true[0], *(-part for part in true[1:])])
        assert (
            false.estimate_contribution(weight, range(4))
            < REVERSED_AVERAGE
            < 0.6
            < container.estimate_contribution(weight, (1, 3))
        )
        # an outlier does not blame the others
        assert give_averages(-10 * own, true).estimate_contributions(weight) == {}
    with pytest.raises(ProtocolViolation, match="not finite"):
        give_averages(own, [*true[:3], true[3] * math.nan])
    with pytest.raises(ProtocolViolation, match="shape"):
        give_averages(own, [*true[:3], torch.zeros(1)])
    give_averages(own, [part + 1e-3 for part in own.chunk(4)], are_parameters=True)
    # no proof against the reducer, which cannot know which of two senders is right
    far = give_averages(own, [*own[:3750].chunk(3), true[3]], are_parameters=True)
    assert not far._output_parts_by_peer[3][0].any()


def test_diverged_parameters_are_detected():
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 1000), (77,), (5,), (3, 2, 1)]
    common = [torch.randn(shape, generator=generator) for shape in shapes]
    numbers = sum(map(torch.Tensor.numel, common))
    length = sum(tensor.square().sum() for tensor in common).sqrt().item()

    def sketch_at(distance: float, constant: float = 0.0) -> list[float]:
        """Of parameters so far from the common ones, in terms of their length."""
        step = distance * length / numbers**0.5
        return compute_sketch([t + step * torch.randn(t.shape, generator=generator) + constant for t in common])

    near, far = [sketch_at(1e-3) for _ in range(3)], sketch_at(0.2)
    assert near[0][0] == pytest.approx(length, rel=1e-3)
    assert torch.tensor(far).dist(torch.tensor(near[0])).item() == pytest.approx(0.2 * length, rel=0.7)
    assert find_outliers(near) == find_outliers([near[0], far]) == find_outliers([[0.0] * SKETCH_SIZE] * 4) == []
    assert (
        find_outliers([near[0], far, *near[1:]]) == find_outliers([near[0], [math.nan] * SKETCH_SIZE, *near[1:]]) == [1]
    )
    assert find_outliers([near[0], sketch_at(1e-3, constant=1e-4), near[1]]) == [], "rounding that goes one way"
    assert find_outliers([near[0], [math.inf] * SKETCH_SIZE, *near[1:], far]) == [1, 4]
    broken = compute_sketch([torch.tensor([1.0, math.nan])])
    assert unpack(RoundState, sign_round_state(5, True, "", broken)).sketch == (math.inf,) * SKETCH_SIZE


def test_diverged_peer_loads_state(start):
    prefix, flags = make_prefix(), ("--group_size", 8, "--others", 2)
    peers = [start_peer(start, "a", prefix, 1.0, 48, flags=flags)]
    peers.append(start_peer(start, "b", prefix, 1.0, 48, peers[:1], flags))
    # not in the first epochs: a peer that misses one might load this peer's state
    peers.append(start_peer(start, "astray", prefix, 1.0, 48, peers[:1], (*flags, "--nudge_at", 6, "--nudge_by", 50)))
    peers[2].wait_for("nudged", 90)
    peers[2].wait_for("loaded the state", 60)
    last = max(epochs(peers[2]))
    joint = wait_until(lambda: [e for e in list_joint_rounds(*peers) if e > last], 60, "a round of all")
    for peer in peers:
        assert epochs(peer)[joint[0]]["parameter"] == pytest.approx([-joint[0]] * 3)
    stop(*peers)


KINDS = [*SENT, *ANSWERED, *HOLDS_UP]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_peer_of_four_cannot_bend_round(start, kind):
    """Three honest peers of gradient 1 step by 1 each time, and name the hostile one that joins them."""
    prefix, options = make_prefix(), ("--group_size", 8, "--robust", "--numbers", 10**6)
    peers = [start_peer(start, "a", prefix, 1.0, 16, flags=(*options, "--others", 2))]
    peers += [start_peer(start, name, prefix, 1.0, 16, peers[:1], (*options, "--others", 2)) for name in "bc"]
    wait_until(lambda: min(max(epochs(peer), default=0) for peer in peers) >= 2, 60, "two epochs of all")
    program = ("tests.programs.hostile_peer", kind)
    liar = start_peer(start, "liar", prefix, 1.0, 16, peers[:1], options, program)
    # a peer that leaves each round, or comes to none, is out once one peer has had enough of it
    enough = {"broken": 1, "absent": 1}.get(kind, 3)
    words = ": not waiting for it for" if kind == "absent" else ": no rounds with it for"
    hostile = liar.json_lines()[0]["maddrs"][0].rpartition("/")[2]
    wait_until(lambda: sum(words in peer.text for peer in peers) >= enough, 120, "bans")
    if kind == "silent":  # all of them saw it
        assert [peer.text.count("averaging failed") for peer in peers] == [1, 1, 1]
    before = max(map(max, map(epochs, peers)))

    def find_steps(peer: Script) -> list[int]:
        """Return the epochs after the bans before which this peer made a step, and loaded no state."""
        return [epoch for epoch in epochs(peer) if epoch > before + 2 and epoch - 1 in epochs(peer)]

    wait_until(lambda: all(map(find_steps, peers)), 120, "three more epochs of all")
    for peer in peers:
        lines = epochs(peer)
        # as averages, they count twice and more
        for epoch in lines if kind not in ("flip", "noise", "reversed") else ():
            low = 0.1 if kind == "zeros" else 0.98  # its share of the samples is all that it takes
            assert -1.02 * epoch <= lines[epoch]["parameter"][0] <= lines[epoch]["parameter"][2] <= -low * epoch
        epoch = find_steps(peer)[0]
        steps = [lines[epoch]["parameter"][i] - lines[epoch - 1]["parameter"][i] for i in range(3)]
        assert steps == pytest.approx([-1] * 3, rel=1e-5)
        assert set(re.findall(r"peer (\w+) .*: no rounds with it", peer.text)) <= {hostile}
    stop(*peers)


@pytest.mark.slow
def test_mute_leader_of_four_costs_one_wait(start):
    """Its followers leave it within their round, do without it for some rounds, and do not ban it."""
    prefix, options = make_prefix(), ("--group_size", 8, "--averaging_timeout", 20)
    peers = [start_peer(start, "a", prefix, 1.0, 16, flags=(*options, "--others", 2))]
    peers += [start_peer(start, name, prefix, 1.0, 16, peers[:1], (*options, "--others", 2)) for name in "bc"]
    wait_until(lambda: min(max(epochs(peer), default=0) for peer in peers) >= 2, 90, "two epochs of all")
    liar = start_peer(start, "liar", prefix, 1.0, 16, peers[:1], options, ("tests.programs.hostile_peer", "mute"))
    liar.wait_for("lying", 90)
    before = max(map(max, map(epochs, peers)))
    wait_until(lambda: min(map(max, map(epochs, peers))) >= before + 5, 200, "five epochs of all")
    hostile = liar.json_lines()[0]["maddrs"][0].rpartition("/")[2]
    for peer in peers:
        assert re.findall(r"peer (\w+) has begun no round", peer.text) in ([hostile], 2 * [hostile])
        assert "it took too long" not in peer.text and "no rounds with it" not in peer.text
    stop(*peers)
