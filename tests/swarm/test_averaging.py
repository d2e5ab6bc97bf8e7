"""Rounds with known gradients: the average, and the gradients after a failed round."""

import itertools
import json
import os
import re
import signal

import psutil
import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from processes import ROOT, make_prefix, run_python, wait_until
from programs.bad_donor import KINDS
from swarms import epochs, start_peer, stop

from swarm.plan import choose_fractions


def joint_epochs(a, b) -> list[int]:
    """Epochs that both peers have averaged together, as they have the epoch before."""
    joint = [
        epoch
        for epoch in sorted(set(epochs(a)) & set(epochs(b)))
        if epochs(a)[epoch]["averaged_with"] == epochs(b)[epoch]["averaged_with"] == 2
    ]
    return [epoch for epoch in joint if epoch - 1 in joint]


def test_average_is_weighted_by_samples(start):
    """Two peers give unequal numbers of samples. Then kill -9 of the other peer, in a round or before it: the
    survivor's samples enter its next step (note 16).

    Steps are compared, not parameters: a peer that joins while the others step may hold those of an epoch before until
    the next averaging of parameters, which is switched off here.
    """
    prefix = make_prefix()
    first = start_peer(start, "first", prefix, gradient=1.0, batch_size=16)
    second = start_peer(start, "second", prefix, gradient=3.0, batch_size=32, others=[first])
    joint = wait_until(lambda: len(both := joint_epochs(first, second)) >= 4 and both, 60, "4 joint epochs")
    for epoch in joint:
        one, two = epochs(first)[epoch], epochs(second)[epoch]
        expected = (1.0 * one["samples"] + 3.0 * two["samples"]) / (one["samples"] + two["samples"])
        for peer in (first, second):
            before, after = epochs(peer)[epoch - 1]["parameter"], epochs(peer)[epoch]["parameter"]
            # SGD with learning rate 1: the parameter moves by the averaged gradient
            step = [a - b for a, b in zip(after, before, strict=True)]
            assert step == pytest.approx([-expected] * 3, rel=1e-5)

    second.kill()
    last = max(epochs(second))

    def recovered():
        return [line for line in epochs(first).values() if line["epoch"] > last + 1]

    wait_until(recovered, 90, "a step without the other peer")
    after = wait_until(lambda: recovered()[1:] and recovered(), 60, "another epoch")
    # every step of the survivor is counted exactly once: none was lost with the round, none counted twice
    for line in after:
        assert line["total_samples"] == 16 * line["steps"]
        assert line["averaged_with"] == 1
    # and it stepped by its own gradient, not by the zeros that hivemind continues with
    before = epochs(first)[after[0]["epoch"] - 1]["parameter"][1]
    assert after[0]["parameter"][1] == pytest.approx(before - 1.0, rel=1e-4)
    # a peer that joins now finds the record of the dead one, which lasts for a minute, and does not count it
    joining = start_peer(start, "joining", prefix, gradient=1.0, batch_size=16, others=[first])
    joint = wait_until(lambda: joint_epochs(first, joining), 60, "an epoch with the joining peer")
    assert [epochs(peer)[joint[0]]["others"] for peer in (first, joining)] == [1, 1]
    stop(first, joining)


@pytest.mark.slow
def test_eight_bit_averaging_keeps_weights_equal(start, tmp_path):
    """On both sides of the size from which gradients go in 8 bits; their average alone holds the weights together, as
    parameters are not averaged. If nothing is averaged (note 1), the steps have nothing in common."""
    prefix = make_prefix()
    first = start("first", "-m", "tests.programs.eight_bit_peer", prefix, 1, tmp_path)
    first.wait_for('"maddrs"')
    maddrs = first.json_lines()[0]["maddrs"]
    second = start("second", "-m", "tests.programs.eight_bit_peer", prefix, 2, tmp_path, *maddrs)
    joint = wait_until(lambda: len(both := joint_epochs(first, second)) >= 4 and both, 90, "4 joint epochs")
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
    apart = {
        epoch: epochs(second)[epoch]["parameter"][1] - epochs(first)[epoch]["parameter"][1]
        for epoch in joint_epochs(first, second)
    }
    before = [apart[epoch] for epoch in apart if nudged < epoch < mended]
    # it runs in the background, and may end after the next step
    after = [apart[epoch] for epoch in apart if epoch > mended + 1]
    assert before == pytest.approx([1.0] * len(before), abs=1e-3) and before, apart
    assert after == pytest.approx([0.0] * len(after), abs=1e-3), apart


@pytest.mark.parametrize(
    "min_vector_size, expected",
    [
        (0, (300, 100, 0, 400, 200)),
        (150, (300, 0, 0, 400, 200)),
        # without the smallest, the next one averages 222 of 1,000: too few again
        (250, (300, 0, 0, 400, 0)),
        (10**9, (0, 0, 0, 400, 0)),
    ],
)
def test_plan_merges_small_partitions(min_vector_size, expected):
    """Of 1,000 elements; the third peer is a client, which averages none anyway."""
    modes = [AveragingMode.CLIENT if index == 2 else AveragingMode.NODE for index in range(5)]
    assert choose_fractions((300, 100, 0, 400, 200), modes, min_vector_size) == expected


@pytest.mark.slow
def test_next_chunk_timeout_and_min_vector_size_apply(start):
    """--next_chunk_timeout and --min_vector_size, each by its effect."""
    settings = [{"next_chunk_timeout": 1}, {"next_chunk_timeout": 4, "min_vector_size": 600}]
    rounds = [
        start(f"rounds{number}", "-m", "tests.programs.silent_round", make_prefix(), json.dumps(setting))
        for number, setting in enumerate(settings)
    ]
    facts = []
    for script in rounds:
        script.assert_clean_end(120)
        facts += script.json_lines()
    # a matrix and a bias have 1,010 elements: two peers of the same bandwidth share them, unless 505 are too few
    assert [fact["group_sizes"] for fact in facts] == [[2, 2], [2, 2]]
    assert [fact["shares"] for fact in facts] == [[0.5, 0.5], [0, 1]]
    # no round is left, with all its tensors (note 79)
    assert [fact["runners"] for fact in facts] == [0, 0]
    # either peer may average all: one waits for the other's data, or for its averages
    assert all(re.search("has left the round|no other peer's data entered", fact["failure"]) for fact in facts), facts
    # if both average a share, the wait for the silent one is double: for its part, then for its averages
    assert facts[0]["seconds"] == pytest.approx(2 * 1, abs=0.9)
    assert 4 - 0.1 <= facts[1]["seconds"] <= 2 * 4 + 0.9


def test_peer_counting_fewer_samples_joins_round(start):
    """A peer that knows too few samples of the others would make a complete group wait."""
    prefix = make_prefix()
    first = start_peer(start, "first", prefix, gradient=1.0, batch_size=16)
    second = start_peer(start, "second", prefix, gradient=3.0, batch_size=16, others=[first], flags=["--counts_less"])
    joint = wait_until(lambda: len(both := joint_epochs(first, second)) >= 3 and both, 90, "3 joint epochs")
    assert epochs(first)[joint[-1]]["parameter"] == pytest.approx(epochs(second)[joint[-1]]["parameter"], rel=1e-5)
    # nor does the group that has formed end an epoch early
    assert all(epochs(first)[epoch]["samples"] + epochs(second)[epoch]["samples"] >= 128 for epoch in joint)
    stop(first, second)


def test_peer_dying_between_answers_leaves_no_difference(start):
    """One of two survivors has all averages of the last round, and steps. The other loads this step, or on busy
    processors the state after it, without the dead one."""
    prefix, flags = make_prefix(), ("--group_size", 3, "--others", 2)
    one = start_peer(start, "one", prefix, 1.0, 16, flags=flags)
    two = start_peer(start, "two", prefix, 2.0, 16, [one], flags)
    one_id = one.json_lines()[0]["maddrs"][0].rpartition("/")[2]
    dying = start_peer(start, "dying", prefix, 6.0, 16, [one], (*flags, "--dies_for_all_but", one_id))
    joint = wait_until(lambda: len(both := joint_epochs(one, two)) >= 2 and both, 90, "epochs of the survivors")
    broken = joint[0] - 2  # the last epoch of three
    assert broken - 1 <= max(epochs(dying)) <= broken and epochs(one)[broken]["averaged_with"] == 3
    assert epochs(two)[broken]["averaged_with"] == 1
    # its gradients are in that step, and not once more in the next one
    one_step, next_step = (epochs(two)[epoch] for epoch in (broken, broken + 1))
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
    prefix, names, common = (
        make_prefix(),
        ["a", "b", "hurried", "late"],
        ("--group_size", 4, "--target_batch_size", 192),
    )
    own = {
        "hurried": ("--matchmaking", 20, 9.5, "--cancels_at", 4),
        "late": ("--matchmaking", 20, 20, "--asks_in_vain"),
    }
    own["late"] += ("--skips", 5, "--slow_downloads", 4)
    peers = []
    for name in names:
        flags = (*common, "--others", 3, *own.get(name, ("--matchmaking", 10, 10)))
        peers.append(start_peer(start, name, prefix, gradient=1.0, batch_size=16, others=peers[:1], flags=flags))
    wait_until(lambda: all(7 in epochs(peer) for peer in peers), 120, "seven epochs")
    counts = {
        name: [epochs(peer)[epoch]["averaged_with"] for epoch in (3, 4, 5, 6, 7)]
        for name, peer in zip(names, peers, strict=True)
    }
    together = [4, 4, 4, 3, 4]
    assert counts == {"a": together, "b": together, "hurried": together, "late": [4, 4, 4, 1, 4]}
    # its gradients of the missed round are in the next one
    line = epochs(peers[-1])[7]
    assert line["total_samples"] == 16 * line["steps"]
    stop(*peers)


@pytest.mark.slow
def test_minority_takes_no_step(start):
    """Three of five say that they are there, and come to no round, as if they were busy with one of their own: a step
    of the two others would be another one than theirs."""
    prefix = make_prefix()
    five = ("--group_size", 5, "--others", 4)
    a = start_peer(start, "a", prefix, gradient=1.0, batch_size=16, flags=five)
    busy = ("--group_size", 5, "--others", 99, "--others_at", 1)
    several = [
        start_peer(start, f"busy{number}", prefix, gradient=1.0, batch_size=16, others=[a], flags=busy)
        for number in range(3)
    ]
    b = start_peer(start, "b", prefix, gradient=3.0, batch_size=16, others=[a], flags=five)
    for peer in (a, b):
        wait_until(lambda peer=peer: peer.text.count("averaging failed") >= 2, 90, "two rounds in vain")
        assert max(epochs(peer)) == 1
    stop(*several)
    joint = wait_until(lambda: joint_epochs(a, b), 60, "epochs of the two")
    assert epochs(a)[joint[0]]["parameter"] == epochs(b)[joint[0]]["parameter"]
    stop(a, b)


@pytest.mark.slow
def test_client_alone_ahead_loads_state(start):
    """A client does not send its state, so the others could never catch up with it."""
    prefix = make_prefix()
    public = start_peer(start, "public", prefix, gradient=1.0, batch_size=16)
    flags = ("--client_mode", "--leap_at", 6)
    client = start_peer(start, "client", prefix, gradient=3.0, batch_size=16, others=[public], flags=flags)
    client.wait_for("leapt", 60)
    leapt = next(line["leapt"] for line in client.json_lines() if "leapt" in line)
    joint = wait_until(lambda: [epoch for epoch in joint_epochs(public, client) if epoch > leapt + 1], 60, "an epoch")
    assert epochs(public)[joint[0]]["parameter"] == epochs(client)[joint[0]]["parameter"]
    stop(public, client)


def test_leading_peer_continues_without_straggler(start):
    """One epoch behind, with a state that arrived late, it takes over that of the next epoch: of which there would be
    none as long as the other one waits for it in each round."""
    prefix = make_prefix()
    ahead = start_peer(start, "ahead", prefix, gradient=1.0, batch_size=16, flags=("--others", 1, "--leap_at", 2))
    behind = start_peer(
        start, "behind", prefix, gradient=3.0, batch_size=16, others=[ahead], flags=("--download_from", 4)
    )
    joint = wait_until(lambda: [epoch for epoch in joint_epochs(ahead, behind) if epoch > 4], 60, "an epoch of both")
    assert epochs(ahead)[4]["averaged_with"] == 1 and epochs(ahead)[4]["failed_rounds"] >= 1
    assert epochs(ahead)[joint[0]]["parameter"] == epochs(behind)[joint[0]]["parameter"]
    stop(ahead, behind)


def assert_it_ends_with_its_helper(peer) -> None:
    """A trainer whose DHT process has died says so and ends, instead of waiting forever."""
    helpers = [child for child in psutil.Process(peer.process.pid).children() if "torch" not in child.name()]
    os.kill(helpers[0].pid, signal.SIGKILL)
    assert peer.wait(30) == 1
    assert "process died" in peer.text
    wait_until(lambda: not peer.left_processes(), 10, "no process left")


def assert_its_helpers_end_with_it(peer) -> None:
    """kill -9 of the trainer alone, by the system that runs out of memory: no orphan keeps taking part (note 21)."""
    os.kill(peer.process.pid, signal.SIGKILL)
    peer.process.wait(10)
    wait_until(lambda: not peer.left_processes(), 15, "no process left")


def test_invalid_state_is_refused_and_retried(start):
    """Truncated, of wrong shapes, not finite, not what it was said to be, broken or no answer (note 25): the next
    donor's is taken as a whole."""
    prefix = make_prefix()
    good = start_peer(start, "good", prefix, gradient=1.0, batch_size=128)
    maddrs = good.json_lines()[0]["maddrs"]
    bad = start("bad", "-m", "tests.programs.bad_donor", prefix, *maddrs)
    bad.wait_for('"maddrs"')
    wait_until(lambda: epochs(good), 60, "an epoch")
    taker = start("taker", "-m", "tests.programs.state_taker", prefix, len(KINDS), 100_000, *maddrs)
    taker.assert_clean_end(120)
    # asked at least once for each, and once more where the good peer was just between two epochs
    assert [line["gave"] for line in bad.json_lines() if "gave" in line][: len(KINDS)] == list(KINDS)
    taken = taker.json_lines()
    assert len(taken) == len(KINDS)
    for line in taken:
        # the good peer's parameter is minus its epoch, as it steps alone by 1
        assert line["loaded"] and not line["own"]
        assert 0 < line["epoch"] < 1000
        assert line["values"] == [-line["epoch"]] * 3

    # with the bad donor alone, nothing is taken over, and it takes bounded time
    assert_its_helpers_end_with_it(good)
    alone = start("alone", "-m", "tests.programs.state_taker", prefix, 1, 100_000, *bad.json_lines()[0]["maddrs"])
    alone.assert_clean_end(120)
    assert alone.json_lines() == [{"loaded": False, "epoch": 0, "own": True, "values": [-1.0, -1.0, 0.0]}]


def test_new_peer_too_slow_logs_reason(start):
    """Its state is behind the swarm's as soon as it has arrived: it says how large it is, how fast it came, and how
    fast the swarm is, and tries less often."""
    prefix = make_prefix()
    quick = ("--numbers", 4_000_000, "--step_seconds", 0.05, "--target_batch_size", 16)
    # the state takes more than three seconds
    swarm = start_peer(start, "swarm", prefix, gradient=1e-3, batch_size=16, flags=(*quick, "--mbits", 40))
    wait_until(lambda: epochs(swarm), 60, "an epoch")
    newcomer = start_peer(start, "newcomer", prefix, gradient=1e-3, batch_size=16, others=[swarm], flags=quick)
    reason = newcomer.wait_for(
        r"cannot catch up: a download of ([\d.]+) MB took ([\d.]+) s \(([\d.]+) Mbit/s\), and meanwhile the swarm made "
        r"(\d+) epochs of about ([\d.]+) s",
        90,
    )
    megabytes, _, speed, made, _ = map(float, reason.groups())
    assert megabytes == pytest.approx(16, rel=0.01)  # 4 million elements of 4 bytes, of a state or a step
    assert speed > 0 and made >= 1
    assert "cannot be used" not in newcomer.text  # a peer that has neither a state nor a step to send says so
    stop(newcomer)
    assert_it_ends_with_its_helper(swarm)


@pytest.mark.parametrize(
    "optim, compression", [pytest.param("lamb", "none", marks=pytest.mark.slow), ("lamb_8bit", "float16")]
)
def test_lamb_state_is_loaded_from_peer(optim, compression):
    """Moments come bit for bit, also where parameters come in 16 bits. Its numbers become tensors after some steps, and
    torch's load_state_dict and Float16 would change the bytes of 8-bit LAMB."""
    words = [ROOT / "tests/programs/shared_momentum.py", make_prefix(), optim, 0.01, compression]
    facts = json.loads(run_python(*words, expect=0).stdout.splitlines()[-1])
    assert facts["loaded"] and facts["epochs"] == [4, 4] and facts["same_state"]
    assert facts["bytes"] == (2 * 300_544 if optim == "lamb_8bit" else 0)  # two moments of the larger matrices
    assert max(facts["weights"], facts["weights_after"]) <= (1e-3 if compression == "float16" else 0)
