"""Trainers that die, sleep or are cut off, a monitor that dies, slow links: it costs no more than their own share."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import netlab
import pytest
from processes import Script, make_prefix, wait_until
from test_swarm import TRAINER, flags, history, largest_difference

AVERAGING_TIMEOUT, MATCHMAKING_TIME = 15, 3
# Batches of 16 at a pace of 0.2 s, so that the cores are not the bottleneck: three trainers take two seconds an epoch.
PACE = 0.2
SETTINGS = {
    **TRAINER,
    "--target_group_size": 16,
    "--matchmaking_time": MATCHMAKING_TIME,
    "--request_timeout": 1,
    "--next_chunk_timeout": 4,
    "--averaging_timeout": AVERAGING_TIMEOUT,
    "--metadata_expiration": 30,
    "--average_state_every": 3,
    "--total_steps": 1000,
}


class Swarm:
    """A monitor and paced trainers, on loopback or each on a host of an emulated network."""

    def __init__(self, start, tmp_path: Path, settings: dict, net: netlab.Net | None = None):
        self.start, self.tmp_path, self.net = start, tmp_path, net
        self.settings = {**SETTINGS, **settings, "--experiment_prefix": make_prefix()}
        self.trainers: dict[str, Script] = {}
        self.pace = PACE  # seconds of a batch

    def where(self, name: str) -> dict:
        """Flags and options that put a role on its host."""
        host = self.net.ip(name) if self.net else "127.0.0.1"
        return {"--host_maddrs": f"/ip4/{host}/tcp/0"}

    def prefix(self, name: str) -> dict:
        return {"prefix": self.net.prefix(name)} if self.net else {}

    def start_monitor(self, name: str = "monitor", **own) -> Script:
        options = {"--refresh_period": 0.5, "--report_to": "none", "--output_dir": self.tmp_path / "monitor"}
        options |= {"--experiment_prefix": self.settings["--experiment_prefix"], **self.where("monitor")}
        options |= {f"--{flag}": value for flag, value in own.items()}
        monitor = self.start(name, "run_training_monitor.py", *flags(options), **self.prefix("monitor"))
        self.peers = monitor.wait_for(r"--initial_peers (/ip4/\S+)").group(1)
        return monitor

    def start_trainers(self, *names: str, **own) -> list[Script]:
        for name in names:
            options = {"--initial_peers": self.peers, "--output_dir": self.tmp_path / name, **self.where(name)}
            options |= {f"--{flag}": value for flag, value in own.items()}
            trainer = self.start(
                name, "benchmarks/paced_trainer.py", self.pace, *flags(self.settings, options), **self.prefix(name)
            )
            self.trainers[name] = trainer
        return [self.trainers[name] for name in names]

    def history(self, name: str) -> dict[int, dict]:
        return history(self.tmp_path, name)

    def last_epoch(self, name: str) -> int:
        return max(self.history(name), default=0)

    def wait_for_joint_epochs(self, names: list[str], number: int, seconds: float, after: int = 0) -> list[int]:
        """So many epochs beyond `after` that all of these have averaged, and nobody else."""

        def find() -> list[int]:
            epochs = [self.history(name) for name in names]
            common = set(epochs[0]).intersection(*epochs[1:])
            joint = [
                e for e in sorted(common) if e > after and all(h[e]["averaged_with"] == len(names) for h in epochs)
            ]
            return joint if len(joint) >= number else []

        try:
            return wait_until(find, seconds, f"{number} epochs averaged by {names} after {after}")
        except AssertionError as e:
            raise AssertionError(f"{e}\n" + "\n".join(self.trainers[name].text[-2000:] for name in names)) from None

    def stop_together(self, names: list[str], after: int) -> float:
        """Ctrl-C at the beginning of an epoch, so that all end with the same one; returns the time.

        :param after: an epoch since which parameters shall have been averaged, which brings them together again.
            Such a round goes on in the background, and misses those who end before it does: it gets one whole epoch.
        """
        period = SETTINGS["--average_state_every"]

        def has_begun() -> bool:
            epochs = {self.last_epoch(name) for name in names}
            epoch = max(epochs)
            is_new = time.time() - self.history(names[0]).get(epoch, {"time": 0})["time"] < 0.5
            return len(epochs) == 1 and is_new and epoch % period == period - 1 and epoch - period + 1 > after

        wait_until(has_begun, 60, "the beginning of an epoch, for all at once")
        stopped = time.time()
        for name in names:
            self.trainers[name].interrupt()
        for name in names:
            self.trainers[name].assert_clean_end(60)
        summaries = [json.loads((self.tmp_path / name / "summary.json").read_text()) for name in names]
        assert len({summary["epoch"] for summary in summaries}) == 1, summaries
        return stopped

    def difference(self, names: list[str]) -> float:
        return largest_difference(self.tmp_path, *names)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "main"])
def test_a_killed_trainer_costs_the_others_one_round_at_most(start, tmp_path, tiny_data, whole):
    """kill -9 of one of three trainers: of all its processes, or of the main one alone, whose helpers then end."""
    swarm = Swarm(start, tmp_path, tiny_data)
    swarm.start_monitor()
    names = ["a", "b", "c"]
    *_, victim = swarm.start_trainers(*names)
    joint = swarm.wait_for_joint_epochs(names, 3, 90)
    normal = (swarm.history("a")[joint[-1]]["time"] - swarm.history("a")[joint[0]]["time"]) / (joint[-1] - joint[0])

    killed = time.time()
    if whole:
        victim.kill()
    else:
        os.kill(victim.process.pid, signal.SIGKILL)
    wait_until(lambda: not victim.left_processes(), 8, f"no process left: {victim.left_processes()}")
    # the record of the dead one lingers for 30 s: all these epochs pass before it is gone
    after = swarm.last_epoch("a")
    swarm.wait_for_joint_epochs(names[:2], 4, 60, after)
    for name in names[:2]:
        times = [killed, *sorted(line["time"] for line in swarm.history(name).values() if line["time"] > killed)]
        *steps, broken = sorted(end - begin for begin, end in zip(times, times[1:], strict=False))
        assert broken < AVERAGING_TIMEOUT + 2 * normal + MATCHMAKING_TIME, "the round that it broke"
        # two compute what three did, and wait for one that does not come; but not for a timeout
        assert max(steps) < 1.5 * normal + MATCHMAKING_TIME + 3 < AVERAGING_TIMEOUT, (normal, broken, steps)
    # nobody but the dead one has lost a sample
    for name in names[:2]:
        line = swarm.history(name)[swarm.last_epoch(name)]
        assert line["computed_samples"] == line["total_samples"] + line["pending_samples"]
    swarm.stop_together(names[:2], after)
    assert swarm.difference(names[:2]) < 1e-6


@pytest.mark.slow
def test_a_frozen_trainer_catches_up(start, tmp_path, tiny_data):
    """SIGSTOP of all processes of each in turn, as a laptop that is closed: the others continue, also those that it led
    while their group formed, which takes all of an epoch here; then it is one of them."""
    swarm = Swarm(start, tmp_path, {**tiny_data, "--matchmaking_time": 40, "--averaging_timeout": 60})
    swarm.start_monitor()
    names = ["a", "b", "c"]
    swarm.start_trainers(*names)
    joint = swarm.wait_for_joint_epochs(names, 2, 90)
    for victim in names:
        others = [name for name in names if name != victim]
        swarm.trainers[victim].freeze()
        after = swarm.wait_for_joint_epochs(others, 2, 30, after=swarm.last_epoch(others[0]))[-1]
        swarm.trainers[victim].thaw()
        joint = swarm.wait_for_joint_epochs(names, 1, 30, after)
    swarm.stop_together(names, joint[0])
    assert swarm.difference(names) < 1e-3  # of steps of 1e-3, as Adam's moments have come in 8 bits


@pytest.mark.slow
def test_a_monitor_that_died_is_found_again(start, tmp_path, tiny_data):
    """Training continues without it, newcomers join through a trainer; restarted, it is where and who it was."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    swarm = Swarm(start, tmp_path, tiny_data)
    own = {"identity_path": tmp_path / "monitor.id", "host_maddrs": f"/ip4/127.0.0.1/tcp/{port}"}
    monitor = swarm.start_monitor(**own)
    address = swarm.peers
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        trainer_port = unused.getsockname()[1]
    [first] = swarm.start_trainers("a", host_maddrs=f"/ip4/127.0.0.1/tcp/{trainer_port}")
    swarm.start_trainers("b")
    swarm.wait_for_joint_epochs(["a", "b"], 2, 90)

    monitor.kill()
    swarm.wait_for_joint_epochs(["a", "b"], 3, 30, after=swarm.last_epoch("a"))
    peer_id = first.wait_for(r"peer (\w{40,})").group(1)
    swarm.peers = f"/ip4/127.0.0.1/tcp/{trainer_port}/p2p/{peer_id}"
    swarm.start_trainers("c")
    swarm.wait_for_joint_epochs(["a", "b", "c"], 2, 60)

    def seen() -> list[dict]:
        path = tmp_path / "monitor" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    missed = swarm.last_epoch("a")
    swarm.start_monitor("monitor again", **own)
    assert swarm.peers == address
    # nobody has told it of the others: they have to come back to it
    reported = wait_until(lambda: [line for line in seen() if line["epoch"] > missed], 60, "the trainers' metrics")
    assert reported[0]["alive_peers"] == 3
    swarm.start_trainers("d")
    swarm.wait_for_joint_epochs(["a", "b", "c", "d"], 2, 60)


@pytest.mark.slow
def test_halves_of_a_swarm_that_was_cut_in_two_become_one_again(start, tmp_path, tiny_data, net):
    """Both halves go on by themselves; within 30 s after healing all have the same weights."""
    names = ["a", "b", "c", "d"]
    for name in ("monitor", *names):
        net.host(name, rtt_ms=5)
    net.start()
    swarm = Swarm(start, tmp_path, {**tiny_data, "--target_batch_size": 512}, net)
    swarm.start_monitor()
    swarm.start_trainers(*names)
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
    assert swarm.difference(names) < 1e-6


@pytest.mark.slow
def test_trainers_average_over_slow_links(start, tmp_path, tiny_data, net):
    """75 ms of round-trip time and 20 Mbit/s."""
    for name in ("monitor", "a", "b"):
        net.host(name, rtt_ms=37.5, up=20, down=20)
    net.start()
    swarm = Swarm(start, tmp_path, {**tiny_data, "--max_steps": 6, "--target_group_size": 2}, net)
    swarm.start_monitor()
    trainers = swarm.start_trainers("a", "b")
    for trainer in trainers:
        trainer.assert_clean_end(120)
    averaged = [line["averaged_with"] == 2 for line in swarm.history("a").values()]
    # whoever is ready first goes alone until the other is there
    assert sum(averaged) >= 3 and all(averaged[-2:])
    assert swarm.difference(["a", "b"]) < 1e-6
    assert min(net.bytes("a")) > 1e6
