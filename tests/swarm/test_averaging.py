"""Rounds with known gradients: the average, and the gradients after a failed round."""

import contextlib
import itertools
import json
import os
import re
import signal
from types import SimpleNamespace

import psutil
import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture
from processes import ROOT, make_prefix, run_python, wait_until
from programs.bad_donor import KINDS
from records import run_dhts, run_trackers
from swarms import epochs, list_joint_rounds, start_peer, stop
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.allreduce import choose_fractions
from swarm.averager import RoundResult
from swarm.gradients import GradientAverager
from swarm.rounds import AveragingError, Rounds

SLOW = pytest.mark.slow


def joint_epochs(a, b) -> list[int]:
    """Epochs that both peers have averaged together, as they have the epoch before."""
    joint = list_joint_rounds(a, b)
    return [epoch for epoch in joint if epoch - 1 in joint]


def wait_for_joint_epochs(a, b, count: int, seconds: float) -> list[int]:
    return wait_until(lambda: len(both := joint_epochs(a, b)) >= count and both, seconds, f"{count} joint epochs")


def test_average_is_weighted_by_samples(start, prefix):
    """After kill -9 of the other peer, the survivor's samples enter its next step (note 16). Parameters stay apart."""
    first = start_peer(start, "first", prefix, gradient=1.0, batch_size=16)
    second = start_peer(start, "second", prefix, gradient=3.0, batch_size=32, others=[first])
    joint = wait_for_joint_epochs(first, second, 4, 60)
    for epoch in joint:
        one, two = (epochs(peer)[epoch]["samples"] for peer in (first, second))
        for peer in (first, second):
            before, after = epochs(peer)[epoch - 1]["parameter"], epochs(peer)[epoch]["parameter"]
            # SGD with learning rate 1: the parameter moves by the averaged gradient
            step = [a - b for a, b in zip(after, before, strict=True)]
            assert step == pytest.approx([-(1.0 * one + 3.0 * two) / (one + two)] * 3, rel=1e-5)
    second.kill()
    last = max(epochs(second))

    def recovered():
        return [line for line in epochs(first).values() if line["epoch"] > last + 1]

    wait_until(recovered, 90, "a step without the other peer")
    after = wait_until(lambda: recovered()[1:] and recovered(), 60, "another epoch")
    # every step of the survivor is counted exactly once: none was lost with the round, none counted twice
    assert all(line["total_samples"] == 16 * line["steps"] and line["averaged_with"] == 1 for line in after)
    # and it stepped by its own gradient, not by the zeros that hivemind continues with
    before = epochs(first)[after[0]["epoch"] - 1]["parameter"][1]
    assert after[0]["parameter"][1] == pytest.approx(before - 1.0, rel=1e-4)
    # a peer that joins now finds the record of the dead one, which lasts for a minute, and does not count it
    joining = start_peer(start, "joining", prefix, gradient=1.0, batch_size=16, others=[first])
    joint = wait_until(lambda: joint_epochs(first, joining), 60, "an epoch with the joining peer")
    assert [epochs(peer)[joint[0]]["others"] for peer in (first, joining)] == [1, 1]
    stop(first, joining)


@pytest.mark.parametrize("fails", [False, True])
def test_failed_end_of_round_loses_no_gradients(monkeypatch, fails):
    """With --overlap, a GPU may have no memory left when a round ends. Twelve samples are pending in both cases."""
    result = RoundResult(b"group", (), (2, 0), {}, {})  # this peer sends a half of its gradients in each round
    monkeypatch.setattr("swarm.rounds.RoundWait.run", lambda _: {PeerID(b"a"): result, PeerID(b"b"): result})
    with run_dhts([]) as (dht,), run_trackers([dht], 40, overlap=True) as [tracker]:
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3)]
        averager = GradientAverager(parameters, dht=dht, prefix=make_prefix(), start=False)
        rounds = Rounds(tracker, SimpleNamespace(), averager)

        def accumulate(gradient: float, samples: int) -> None:
            for param in parameters:
                param.grad = torch.full_like(param, gradient)
            averager.accumulate(samples)

        accumulate(1.0, 8)
        assert averager.take_pending() == 8
        accumulate(3.0, 4)  # while the round goes on
        averager.residual.fill_(0.5)  # of the mean
        if fails:
            averager.residual = averager.residual[:-1]
        with pytest.raises(AveragingError) if fails else contextlib.nullcontext():
            rounds._finish(MPFuture(), 5)
        expected = 8 * 1.0 + 4 * 3.0 if fails else 8 * 0.5 + 4 * 3.0
        assert [tensor.tolist() for tensor in averager.unsent] == [[expected] * 2, [expected] * 3]
        assert averager.take_pending() == 12
        assert (rounds.stats.failed, rounds.stats.total_samples) == ((1, 0) if fails else (0, 8))


def test_end_of_round_takes_no_device_memory():
    """With --overlap, a forward pass may have left none. The pending gradients are on another device than the rest."""
    operations = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            operations.append(operation.overloadpacket)
            return operation(*args, **kwargs or {})

    parameters = [torch.zeros(size) for size in (2, 3)]
    unsent, sums = ([torch.zeros(size, device="meta") for size in (2, 3)] for _ in range(2))
    averager = SimpleNamespace(parameters=parameters, residual=torch.zeros(5), unsent=unsent, _in_flight=(sums, 8))
    averager._lock, averager._behind, averager._in_mean = contextlib.nullcontext(), [0], 8
    with Recorder():
        GradientAverager.finish(averager, RoundResult(b"group", (), (1, 0), {}, {}))
    aten = torch.ops.aten
    assert operations == [aten.split_with_sizes, *2 * [aten.view, aten.copy_, aten.add_]]  # views, or in place


@pytest.mark.slow
def test_eight_bit_averaging_keeps_weights_equal(start, tmp_path, prefix):
    """Only gradients are averaged. If none are (note 1), the steps have nothing in common."""
    first = start("first", "-m", "tests.programs.eight_bit_peer", prefix, 1, tmp_path)
    first.wait_for('"maddrs"')
    maddrs = first.json_lines()[0]["maddrs"]
    second = start("second", "-m", "tests.programs.eight_bit_peer", prefix, 2, tmp_path, *maddrs)
    joint = wait_for_joint_epochs(first, second, 4, 90)
    stop(first, second)
    differences = []
    for epoch in joint:
        weights = {(seed, e): torch.load(tmp_path / f"{seed}-{e}.pt") for seed in (1, 2) for e in (epoch - 1, epoch)}
        for matrix in (0, 1):
            step, other = (weights[seed, epoch][matrix] - weights[seed, epoch - 1][matrix] for seed in (1, 2))
            assert step.norm() > 0.001 * weights[1, epoch][matrix].norm()
            differences.append(((step - other).norm() / step.norm()).item())
    print("differences of steps, as a share of each:", differences)
    assert max(differences) < 0.1


@pytest.mark.slow
def test_average_state_every_corrects_drift(start):
    """--average_state_every: a wrong parameter is corrected at the next epoch that it divides, not before."""
    prefix, every = make_prefix(), 5
    flags = ("--average_state_every", every)
    first = start_peer(start, "first", prefix, gradient=1.0, batch_size=32, flags=flags)
    others = dict(others=[first], flags=(*flags, "--nudge_at", every + 1))
    second = start_peer(start, "second", prefix, gradient=3.0, batch_size=32, **others)
    second.wait_for("nudged", 90)
    nudged = next(line["nudged"] for line in second.json_lines() if "nudged" in line)
    mended = nudged - nudged % every + every
    wait_until(lambda: max(joint_epochs(first, second), default=0) > mended + 2, 90, "epochs after the averaging")
    stop(first, second)
    means = [{epoch: line["parameter"][1] for epoch, line in epochs(peer).items()} for peer in (first, second)]
    apart = {epoch: means[1][epoch] - means[0][epoch] for epoch in joint_epochs(first, second)}
    before = [apart[epoch] for epoch in apart if nudged < epoch < mended]
    # it runs in the background, and may end after the next step
    after = [apart[epoch] for epoch in apart if epoch > mended + 1]
    assert before == pytest.approx([1.0] * len(before), abs=1e-3) and before, apart
    assert after == pytest.approx([0.0] * len(after), abs=1e-3), apart


@pytest.mark.parametrize(
    "min_vector_size, expected",
    [(0, (300, 100, 0, 400, 200)), (150, (300, 0, 0, 400, 200)), (250, (300, 0, 0, 400, 0)), (2000, (0, 0, 0, 400, 0))],
)
def test_plan_merges_small_partitions(min_vector_size, expected):
    """Of 1,000 elements. The third peer is a client. Without the smallest part, the next one has 222: too few again."""
    modes = [AveragingMode.CLIENT if index == 2 else AveragingMode.NODE for index in range(5)]
    assert choose_fractions((300, 100, 0, 400, 200), modes, min_vector_size) == expected


@pytest.mark.slow
def test_next_chunk_timeout_and_min_vector_size_apply(start):
    settings = {"next_chunk_timeout": 1}, {"next_chunk_timeout": 4, "min_vector_size": 600}
    command = "-m", "tests.programs.silent_round"
    scripts = [start(f"rounds{it}", *command, make_prefix(), json.dumps(settings[it])) for it in range(2)]
    facts = []
    for script in scripts:
        script.assert_clean_end(120)
        facts += script.json_lines()
    # a matrix and a bias have 1,010 elements: two peers of the same bandwidth share them, unless 505 are too few
    assert [fact["group_sizes"] for fact in facts] == [[2, 2], [2, 2]]
    assert [fact["shares"] for fact in facts] == [[0.5, 0.5], [0, 1]]
    # no round is left, with all its tensors (note 79)
    assert [fact["runners"] for fact in facts] == [0, 0]
    # either peer may average all: one waits for the other's data, or for its averages
    reasons = "keeps this peer waiting|no other peer's data entered"
    assert all(re.search(reasons, fact["failure"]) for fact in facts), facts
    # if both average a share, the wait for the silent one is double: for its part, then for its averages
    assert facts[0]["seconds"] == pytest.approx(2 * 1, abs=0.9) and 4 - 0.1 <= facts[1]["seconds"] <= 2 * 4 + 0.9


@pytest.mark.parametrize("kind, failure", [("end", "given up"), ("late", "None")])
def test_round_waits_for_long_batch_and_ends_if_given_up(start, kind, failure):
    """hivemind cancels only the search for a group; the exchange would go on for the 30 s of a silent peer."""
    script = start("rounds", "-m", "tests.programs.silent_round", make_prefix(), '{"next_chunk_timeout": 30}', kind)
    script.assert_clean_end(120)
    (facts,) = script.json_lines()
    assert failure in facts["failure"] and facts["seconds"] < 15 and facts["runners"] == 0


def test_peer_counting_fewer_samples_joins_round(start, prefix):
    """A peer that knows too few samples of the others would make a complete group wait."""
    first = start_peer(start, "first", prefix, gradient=1.0, batch_size=16)
    second = start_peer(start, "second", prefix, gradient=3.0, batch_size=16, others=[first], flags=["--counts_less"])
    joint = wait_for_joint_epochs(first, second, 3, 90)
    assert epochs(first)[joint[-1]]["parameter"] == pytest.approx(epochs(second)[joint[-1]]["parameter"], rel=1e-5)
    # nor does the group that has formed end an epoch early
    assert all(epochs(first)[epoch]["samples"] + epochs(second)[epoch]["samples"] >= 128 for epoch in joint)
    stop(first, second)


@pytest.mark.slow
def test_peer_dying_between_answers_leaves_no_difference(start):
    """A survivor has all averages, and steps; the other loads this step, or on busy processors the state after it."""
    prefix, flags = make_prefix(), ("--group_size", 3, "--others", 2)
    one = start_peer(start, "one", prefix, 1.0, 16, flags=flags)
    two = start_peer(start, "two", prefix, 2.0, 16, [one], flags)
    one_id = one.json_lines()[0]["maddrs"][0].rpartition("/")[2]
    dying = start_peer(start, "dying", prefix, 6.0, 16, [one], (*flags, "--dies_for_all_but", one_id))
    joint = wait_for_joint_epochs(one, two, 2, 90)
    broken = max(epoch for epoch, line in epochs(one).items() if line["averaged_with"] == 3)
    loaded = min(epoch for epoch in epochs(two) if epoch >= broken)
    assert broken - 1 <= max(epochs(dying)) <= broken
    assert loaded <= broken + 1 and epochs(two)[loaded]["averaged_with"] == 1
    # its gradients are in that step, and not once more in the next one
    one_step, next_step = (epochs(two)[epoch] for epoch in (loaded, loaded + 1))
    assert next_step["samples"] == 16 * (next_step["steps"] - one_step["steps"])
    for epoch in epochs(one).keys() & epochs(two).keys():
        assert epochs(one)[epoch]["parameter"] == pytest.approx(epochs(two)[epoch]["parameter"], rel=1e-6)
    lines = [epochs(peer)[joint[-1]] for peer in (one, two)]
    assert lines[0]["total_samples"] == 16 * lines[0]["steps"]
    # the batches that it computed after the failed round are dropped with those that were averaged
    assert 0 <= 16 * lines[1]["steps"] - lines[1]["total_samples"] <= 4 * 16
    stop(one, two)


def test_overlap_averages_and_confirms_states(start):
    """Rounds run in the background: all peers apply the same averages, and a peer that is alone says so. No two states
    are the same there, so that a new peer looks for one that is near those of most contributors."""
    prefix, flags = make_prefix(), ("--overlap", "--group_size", 3, "--begin", 1000)
    one = start_peer(start, "one", prefix, 1.0, 32, flags=(*flags, "--others", 1))
    two = start_peer(start, "two", prefix, 3.0, 32, [one], (*flags, "--others", 1))

    def find_anchors() -> list[list[float]]:
        return [[line["anchor"] for line in epochs(peer).values()] for peer in (one, two)]

    def has_averaged() -> bool:
        own, others = find_anchors()
        common = [it for it in own if it != 1000 and any(abs(it - other) < 1e-2 for other in others)]
        return min(len(common), sum(1 < a - b < 3 for a, b in itertools.pairwise(own))) >= 4

    # both have the same parameters after each round of these, and each step is a mean of 1 and 3
    wait_until(has_averaged, 90, "four epochs with the same parameters and four joint steps")
    epoch = max(epochs(one))
    # the state of an epoch is there some time after its beginning
    wait_until(lambda: max(epochs(one)) > epoch + 1, 60, "two epochs more")
    known = [peer.json_lines()[0]["maddrs"][0].rpartition("/")[2] for peer in (one, two)]
    three = start_peer(start, "three", prefix, 2.0, 32, [one], (*flags, "--known", *known))
    three.wait_for("loaded the state of epoch", 60)
    wait_until(lambda: len([line for line in epochs(three).values() if line["averaged_with"] == 3]) >= 2, 60, "rounds")
    first = next(iter(epochs(three).values()))
    assert first["epoch"] > epoch
    of_one = [line for line in epochs(one).values() if abs(line["epoch"] - first["epoch"]) <= 1]
    assert min(abs(first["anchor"] - line["anchor"]) for line in of_one) < 5 < 1000 - first["anchor"]
    stop(two, three)
    last = max(epochs(one))
    wait_until(lambda: max(epochs(one)) > last + 3, 60, "epochs of one peer")
    stop(one)
    assert [epochs(one)[epoch]["averaged_with"] for epoch in sorted(epochs(one))[-2:]] == [1, 1]


@pytest.mark.slow
def test_late_peer_joins_next_round(start):
    """Of four peers, one takes less time for matchmaking than before (note 82), and later cancels a step (note 84).
    Another is refused whenever it first asks a leader (note 83), and misses a round, whose step it downloads slowly."""
    prefix, common, peers = make_prefix(), ("--group_size", 4, "--target_batch_size", 192, "--others", 3), []
    own = {name: ("--matchmaking", 10, 10) for name in "ab"}
    own["hurried"] = ("--matchmaking", 20, 9.5, "--cancels_at", 4)
    own["late"] = ("--matchmaking", 20, 20, "--asks_in_vain", "--skips", 5, "--slow_downloads", 4)
    for name, flags in own.items():
        peers.append(start_peer(start, name, prefix, 1.0, 16, peers[:1], (*common, *flags)))
    wait_until(lambda: all(7 in epochs(peer) for peer in peers), 120, "seven epochs")
    counts = [[epochs(peer)[epoch]["averaged_with"] for epoch in (3, 4, 5, 6, 7)] for peer in peers]
    assert counts == [[4, 4, 4, 3, 4]] * 3 + [[4, 4, 4, 1, 4]]
    line = epochs(peers[-1])[7]
    assert line["total_samples"] == 16 * line["steps"]
    stop(*peers)


@pytest.mark.slow
def test_minority_takes_no_step(start):
    """Three of five say that they are there, and come to no round. The two others would make a step of their own."""
    prefix, five = make_prefix(), ("--group_size", 5, "--others", 4)
    a = start_peer(start, "a", prefix, gradient=1.0, batch_size=16, flags=five)
    busy = ("--group_size", 5, "--others", 99, "--others_at", 1)
    several = [start_peer(start, f"busy{number}", prefix, 1.0, 16, [a], busy) for number in range(3)]
    b = start_peer(start, "b", prefix, gradient=3.0, batch_size=16, others=[a], flags=five)
    for peer in (a, b):
        wait_until(lambda peer=peer: peer.text.count("averaging failed") >= 2, 90, "two rounds in vain")
        assert max(epochs(peer)) == 1
    stop(*several)
    joint = wait_until(lambda: joint_epochs(a, b), 60, "epochs of the two")
    assert epochs(a)[joint[0]]["parameter"] == epochs(b)[joint[0]]["parameter"]
    stop(a, b)


@pytest.mark.slow
def test_client_alone_ahead_loads_state(start, prefix):
    """A client does not send its state, so the others could never catch up with it."""
    public = start_peer(start, "public", prefix, gradient=1.0, batch_size=16)
    flags = ("--client_mode", "--leap_at", 6)
    client = start_peer(start, "client", prefix, gradient=3.0, batch_size=16, others=[public], flags=flags)
    client.wait_for("leapt", 60)
    leapt = next(line["leapt"] for line in client.json_lines() if "leapt" in line)
    joint = wait_until(lambda: [epoch for epoch in joint_epochs(public, client) if epoch > leapt + 1], 60, "an epoch")
    assert epochs(public)[joint[0]]["parameter"] == epochs(client)[joint[0]]["parameter"]
    stop(public, client)


@pytest.mark.slow
def test_leading_peer_continues_without_straggler(start, prefix):
    """A peer one epoch behind loads the next state. There is none if the other one waits for it in each round."""
    ahead = start_peer(start, "ahead", prefix, gradient=1.0, batch_size=16, flags=("--others", 1, "--leap_at", 2))
    behind = start_peer(start, "behind", prefix, 3.0, 16, [ahead], ("--download_from", 4))
    joint = wait_until(lambda: [epoch for epoch in joint_epochs(ahead, behind) if epoch > 4], 60, "an epoch of both")
    assert epochs(ahead)[4]["averaged_with"] == 1 and epochs(ahead)[4]["failed_rounds"] >= 1
    assert epochs(ahead)[joint[0]]["parameter"] == epochs(behind)[joint[0]]["parameter"]
    stop(ahead, behind)


def test_invalid_state_is_refused_and_retried(start, prefix):
    """The whole state of the next donor is loaded (note 25)."""
    good = start_peer(start, "good", prefix, gradient=1.0, batch_size=128)
    bad = start("bad", "-m", "tests.programs.bad_donor", prefix, *good.json_lines()[0]["maddrs"])
    bad.wait_for('"maddrs"')
    wait_until(lambda: epochs(good), 60, "an epoch")
    taker = start_peer(start, "taker", prefix, 0.0, 0, [good], ("--takes", len(KINDS)))
    taker.assert_clean_end(120)
    # asked at least once for each, and once more where the good peer was just between two epochs
    assert [line["gave"] for line in bad.json_lines() if "gave" in line][: len(KINDS)] == list(KINDS)
    _, *lines = taker.json_lines()
    assert len(lines) == len(KINDS)
    for line in lines:
        # the good peer's parameter is minus its epoch, as it steps alone by 1
        assert line["loaded"] and not line["own"] and 0 < line["epoch"] < 1000
        assert line["values"] == [-line["epoch"]] * 3
    # kill -9 of the trainer alone, by the system that runs out of memory: no orphan keeps taking part (note 21)
    os.kill(good.process.pid, signal.SIGKILL)
    good.process.wait(60)
    wait_until(lambda: not good.left_processes(), 60, "no process left")
    # with the bad donor alone, nothing is taken over, and it takes bounded time
    alone = start_peer(start, "alone", prefix, 0.0, 0, [bad], ("--takes", 1))
    alone.assert_clean_end(120)
    assert alone.json_lines()[1:] == [{"loaded": False, "epoch": 0, "own": True, "values": [-1.0, -1.0, 0.0]}]
    # a peer ends if its daemon dies: otherwise it would be alone from then on, and never say so
    [daemon] = [it for it in psutil.Process(bad.process.pid).children(recursive=True) if it.name().startswith("p2pd")]
    daemon.kill()
    assert bad.wait(60) == 1 and "the DHT process died, this peer cannot continue" in bad.text
    wait_until(lambda: not bad.left_processes(), 60, "no process left")


@pytest.mark.slow
def test_new_peer_too_slow_logs_reason(start):
    """Its state is behind the swarm's as soon as it has arrived."""
    prefix, quick = make_prefix(), ("--numbers", 4_000_000, "--step_seconds", 0.05, "--target_batch_size", 16)
    # the state takes more than three seconds
    swarm = start_peer(start, "swarm", prefix, gradient=1e-3, batch_size=16, flags=(*quick, "--mbits", 40))
    wait_until(lambda: epochs(swarm), 60, "an epoch")
    newcomer = start_peer(start, "newcomer", prefix, gradient=1e-3, batch_size=16, others=[swarm], flags=quick)
    reason = r"cannot catch up: a download of ([\d.]+) MB took [\d.]+ s \(([\d.]+) Mbit/s\), and meanwhile the swarm "
    reason = newcomer.wait_for(reason + r"made (\d+) epochs of about [\d.]+ s", 90)
    megabytes, speed, made = map(float, reason.groups())
    # 4 million elements of 4 bytes, of a state or a step
    assert megabytes == pytest.approx(16, rel=0.01) and speed > 0 and made >= 1
    assert "cannot be used" not in newcomer.text  # a peer that has neither a state nor a step to send says so
    stop(newcomer)
    # a trainer whose DHT process has died says so and ends, instead of waiting forever
    helpers = [child for child in psutil.Process(swarm.process.pid).children() if "torch" not in child.name()]
    os.kill(helpers[0].pid, signal.SIGKILL)
    assert swarm.wait(60) == 1 and "process died" in swarm.text
    wait_until(lambda: not swarm.left_processes(), 60, "no process left")


@pytest.mark.parametrize("optim, compression", [pytest.param("lamb", "none", marks=SLOW), ("lamb_8bit", "float16")])
def test_lamb_state_is_loaded_from_peer(optim, compression):
    """Its numbers become tensors after some steps, and Float16 would change the bytes of 8-bit LAMB."""
    words = [ROOT / "tests/programs/shared_momentum.py", make_prefix(), optim, 0.01, compression]
    facts = json.loads(run_python(*words, expect=0).stdout.splitlines()[-1])
    assert facts["loaded"] and facts["epochs"] == [4, 4] and facts["same_state"]
    assert facts["bytes"] == (2 * 300_544 if optim == "lamb_8bit" else 0)  # two moments of the larger matrices
    assert max(facts["weights"], facts["weights_after"]) <= (1e-3 if compression == "float16" else 0)
