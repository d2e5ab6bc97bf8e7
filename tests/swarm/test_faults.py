"""Trainers that die, sleep or are cut off, a monitor that dies, slow links: it costs no more than their own share."""

import os
import re
import signal
import socket
import time

import pytest
from processes import wait_until
from swarms import AVERAGING_TIMEOUT, MATCHMAKING_TIME, Swarm, read_epochs, stop

NAMES = ["a", "b", "c"]


def start_swarm(start, tmp_path, settings: dict, names: list[str] = NAMES, net=None) -> Swarm:
    """Start a monitor and these trainers."""
    swarm = Swarm(start, tmp_path, settings, net)
    swarm.start_monitor()
    swarm.start_trainers(*names)
    return swarm


def find_unused_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "main"])
def test_killed_trainer_costs_at_most_one_round(start, tmp_path, tiny_data, whole):
    """kill -9 of one of three trainers: of all its processes, or of the main one alone, with which the rest ends."""
    # it may die between its answers to both: then one of them makes the step of the other, whose gradients come in 8
    # bits otherwise. Moments would differ by a hundredth
    settings = {"--dataloader_num_workers": 1, "--load_state_compression": "none"}
    swarm = start_swarm(start, tmp_path, {**tiny_data, **settings})
    victim, joint = swarm.trainers["c"], swarm.wait_for_joint_epochs(NAMES, 3, 90)
    normal = (swarm.history("a")[joint[-1]]["time"] - swarm.history("a")[joint[0]]["time"]) / (joint[-1] - joint[0])
    killed = time.time()
    if whole:
        victim.kill()
    else:
        os.kill(victim.process.pid, signal.SIGKILL)
    wait_until(lambda: not victim.left_processes(), 8, f"no process left: {victim.left_processes()}")
    # the record of the dead one lingers for 30 s: all these epochs pass before it is gone
    after = swarm.last_epoch("a")
    swarm.wait_for_joint_epochs(NAMES[:2], 4, 60, after)
    for name in NAMES[:2]:
        times = [killed, *sorted(line["time"] for line in swarm.history(name).values() if line["time"] > killed)]
        *steps, broken = sorted(end - begin for begin, end in zip(times, times[1:], strict=False))
        assert broken < AVERAGING_TIMEOUT + 2 * normal + MATCHMAKING_TIME, "the round that it broke"
        # two compute what three did, and wait for one that does not come; but not for a timeout
        assert max(steps) < 1.5 * normal + MATCHMAKING_TIME + 3 < AVERAGING_TIMEOUT, (normal, broken, steps)
        line = swarm.history(name)[swarm.last_epoch(name)]
        assert line["computed_samples"] == line["total_samples"] + line["pending_samples"]
    swarm.stop_together(NAMES[:2], after)
    assert swarm.difference(NAMES[:2]) < 1e-6


@pytest.mark.slow
def test_orderly_leave_logs_no_warning(start, tmp_path, tiny_data):
    # with the usual 384 samples, an epoch of the two that remain takes as long as matchmaking, of which trainers warn
    swarm = start_swarm(start, tmp_path, {**tiny_data, "--target_batch_size": 640})
    *others, leaver = swarm.trainers.values()
    swarm.wait_for_joint_epochs(NAMES, 2, 90)
    lengths = [len(other.text) for other in others]
    stop(leaver)
    swarm.wait_for_joint_epochs(["a", "b"], 2, 60, swarm.last_epoch("a"))
    peer_id = re.search(r"parameters, peer (\w+)", leaver.text)[1]
    for other, length in zip(others, lengths, strict=True):
        assert f"peer {peer_id} left" in other.text and "warning" not in other.text[length:], other.text[length:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims, seconds, limits, settings",
    [(NAMES, 0, (30, 30), {"--matchmaking_time": 40, "--averaging_timeout": 60}), (["c"], 20, (60, 90), {})],
    ids=["matchmaking", "round"],
)
def test_frozen_trainer_catches_up(start, tmp_path, tiny_data, victims, seconds, limits, settings):
    """A laptop is closed (SIGSTOP) while a group forms, which takes all of an epoch, or in a round that is given up."""
    # moments that come in 8 bits differ by a hundredth, and so do the steps after parameters were averaged
    swarm = start_swarm(start, tmp_path, {**tiny_data, **settings, "--load_state_compression": "none"})
    first, *_ = swarm.wait_for_joint_epochs(NAMES, 2, 90)
    for victim in victims:
        others = [name for name in NAMES if name != victim]
        frozen, before = time.time(), swarm.last_epoch(others[0])
        swarm.trainers[victim].freeze()
        after = swarm.wait_for_joint_epochs(others, 2, limits[0], after=before)[-1]
        time.sleep(max(0.0, frozen + seconds - time.time()))
        swarm.trainers[victim].thaw()
        first, *_ = swarm.wait_for_joint_epochs(NAMES, 1, limits[1], after)
    swarm.stop_together(NAMES, first)
    assert swarm.difference(NAMES) < 1e-6


@pytest.mark.slow
def test_restarted_monitor_is_found_again(start, tmp_path, tiny_data):
    """Training continues without it, and new peers join through a trainer. A restart keeps its address and id."""
    swarm, port = Swarm(start, tmp_path, tiny_data), find_unused_port()
    own = {"identity_path": tmp_path / "monitor.id", "host_maddrs": f"/ip4/127.0.0.1/tcp/{port}"}
    monitor, address, trainer_port = swarm.start_monitor(**own), swarm.peers, find_unused_port()
    [first] = swarm.start_trainers("a", host_maddrs=f"/ip4/127.0.0.1/tcp/{trainer_port}")
    swarm.start_trainers("b")
    swarm.wait_for_joint_epochs(["a", "b"], 2, 90)
    monitor.kill()
    swarm.wait_for_joint_epochs(["a", "b"], 3, 30, after=swarm.last_epoch("a"))
    peer_id = first.wait_for(r"peer (\w{40,})").group(1)
    swarm.peers = f"/ip4/127.0.0.1/tcp/{trainer_port}/p2p/{peer_id}"
    swarm.start_trainers("c")
    swarm.wait_for_joint_epochs(NAMES, 2, 60)
    missed, folder = swarm.last_epoch("a"), tmp_path / "monitor"
    swarm.start_monitor("monitor again", **own)
    assert swarm.peers == address
    # it does not know the others: they have to reconnect to it
    reported = wait_until(lambda: [it for it in read_epochs(folder) if it["epoch"] > missed], 60, "metrics")
    assert reported[0]["alive_peers"] == 3
    swarm.start_trainers("d")
    swarm.wait_for_joint_epochs([*NAMES, "d"], 2, 60)


@pytest.mark.slow
def test_partitioned_swarm_merges(start, tmp_path, tiny_data, net):
    """Both halves go on by themselves; within 30 s after healing all have the same weights."""
    names = [*NAMES, "d"]
    for name in ("monitor", *names):
        net.host(name, rtt_ms=5)
    net.start()
    swarm = start_swarm(start, tmp_path, {**tiny_data, "--target_batch_size": 512}, names, net)
    swarm.wait_for_joint_epochs(names, 2, 120)
    cut = time.time()
    net.partition(["c", "d"])
    time.sleep(25)
    healed = time.time()
    net.heal()
    for half in (names[:2], names[2:]):
        for name in half:
            during = [line for line in swarm.history(name).values() if cut < line["time"] <= healed]
            # one round broken by the cut, then at the pace of two
            assert sum(line["averaged_with"] == 2 for line in during) >= 2, (name, during)
    after = max(swarm.last_epoch(name) for name in names)
    joint = swarm.wait_for_joint_epochs(names, 1, healed + 30 - time.time(), after)
    assert swarm.stop_together(names, joint[0]) - healed < 60
    assert swarm.difference(names) < 1e-3  # those of one half have taken over a state that was sent in 16 bits
