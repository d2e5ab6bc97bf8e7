"""Local steps over the replicated log, with real peers: the same bytes on all of them, whatever happens."""

import pytest
import torch
from processes import make_prefix, wait_until
from swarms import Swarm, epochs, start_peer, stop

from swarm.aggregation import Numbers
from swarm.local_steps import STEP_AHEAD
from swarm.log_steps import is_near

FROM = 3  # the epoch at which the log begins: gradient_peer.py
AVERAGED, LATE = ("--average_state_every", FROM), pytest.param([("--late_anchor",)] * 3, 2, marks=pytest.mark.slow)
GRADIENTS = 1.0, 1.0, 2.0, 3.0, 1.0, 2.0  # the offers of two peers may have the same bytes


class Peers:
    """A swarm of gradient peers that begin together, each with flags of its own."""

    def __init__(self, start, *groups):
        self.start, self.prefix, self.all = start, make_prefix(), []
        self.flags = ("--local_steps", 4, "--target_batch_size", 48, "--group_size", 16, "--density", 0.03)
        for flags in groups:
            self.add("--others", len(groups) - 1, *flags)

    def add(self, *flags):
        name, gradient = f"peer{len(self.all)}", GRADIENTS[len(self.all)]
        self.all.append(start_peer(self.start, name, self.prefix, gradient, 16, self.all[:1], (*self.flags, *flags)))
        return self.all[-1]

    def wait(self, *peers, more: int = 0, seconds: float = 120) -> int:
        """Wait until all of these peers have made this number of epochs of local steps more, and return the last."""
        epoch = max(FROM, *(last_epoch(peer) for peer in peers)) + more
        wait_until(lambda: all(last_epoch(peer) >= epoch for peer in peers), seconds, f"epoch {epoch}")
        return epoch


def last_epoch(peer) -> int:
    return max(epochs(peer), default=0)


def assert_same_bytes(*peers) -> None:
    """Assert that these peers had the same parameters at each epoch with a log that they have in common."""
    digests = [{epoch: line["digest"] for epoch, line in epochs(peer).items() if epoch >= FROM} for peer in peers]
    common = set(digests[0]).intersection(*digests[1:])
    assert len(common) > 2
    for epoch in common:
        assert len({of[epoch] for of in digests}) == 1, epoch


def assert_steps_contain_updates(*peers) -> None:
    """Assert that each outer step is that of the peers' updates, each of which is its gradients without what is left.

    All numbers of a peer are the same, so each update counts as a copy, with the same weight. A late peer has none.
    """
    lines, momentum = [epochs(peer) for peer in peers], 0.0
    for epoch in range(FROM + 1, min(map(last_epoch, peers)) + 1):
        updates = []
        there = [(gradient, of) for gradient, of in zip(GRADIENTS, lines, strict=False) if epoch in of]
        for gradient, of in there:
            left = of[epoch]["unsent"] - (of[epoch - 1]["unsent"] if epoch > FROM + 1 and epoch - 1 in of else 0.0)
            updates.append(of[epoch]["samples"] / 16 * gradient - left / (1 - STEP_AHEAD))
        assert len(updates) == there[0][1][epoch]["averaged_with"], epoch
        update = sum(min(it, sorted(updates)[len(updates) // 2]) for it in updates) / len(updates)
        momentum = 0.5 * momentum + update
        anchors = next((of[epoch - 1]["anchor"], of[epoch]["anchor"]) for _, of in there if epoch - 1 in of)
        step = anchors[1] - anchors[0]
        assert step == pytest.approx(-(update + 0.5 * momentum), rel=1e-3), epoch


@pytest.mark.parametrize("flags", [(), pytest.param(("--client_mode",), marks=pytest.mark.slow)])
def test_peers_keep_same_bytes(start, flags):
    swarm = Peers(start, ("--waits",), ("--waits",), ("--waits", *flags))
    swarm.wait(*swarm.all, more=5)
    stop(*swarm.all)
    assert_same_bytes(*swarm.all)
    for peer in swarm.all:
        of_log = [line for epoch, line in epochs(peer).items() if epoch > FROM]
        assert {line["averaged_with"] for line in of_log[1:]} <= ({2, 3} if flags else {3})
        traffic = of_log[-1]["traffic"][0] - of_log[0]["traffic"][0]
        assert traffic < (len(of_log) - 1) * 40_000  # of 400 kB
    if not flags:
        assert_steps_contain_updates(*swarm.all)


@pytest.mark.parametrize("groups, late", [([AVERAGED, (*AVERAGED, "--nudge_at", 1, "--nudge_by", 0.02)], None), LATE])
def test_peers_begin_log_with_same_state(start, groups, late):
    """Parameters are averaged at that epoch, in the background; or all but the leader get the first state late."""
    swarm = Peers(start, *groups)
    swarm.wait(*swarm.all, more=3)
    stop(*swarm.all)
    late_peers = sum("the first state of the log has not arrived" in peer.text for peer in swarm.all)
    assert late is None or late_peers == late
    assert_same_bytes(*swarm.all)


@pytest.mark.slow
def test_full_disk_delays_beginning_of_log(start):
    """The first leader cannot store its state; the next round of gradients makes another try."""
    swarm = Peers(start, ("--full_disk_at_start", 2))
    (peer,) = swarm.all
    swarm.wait(peer, more=5)
    stop(peer)
    assert peer.text.count("cannot store the log's first state") == 2 and "local steps begin" in peer.text


@pytest.mark.slow
def test_full_disk_delays_update_without_change(start):
    """An update that cannot be stored enters a later one, once."""
    swarm = Peers(start, ("--waits",), ("--waits",), ("--waits", "--full_disk", 3))
    swarm.wait(*swarm.all, more=5)
    stop(*swarm.all)
    assert "cannot store an update" in swarm.all[2].text
    assert_same_bytes(*swarm.all)
    assert_steps_contain_updates(*swarm.all)


@pytest.mark.slow
def test_new_peer_loads_first_state_alone(start):
    flags = "--local_steps_from", 1, "--local_steps", 60  # a first epoch of local steps that lasts a while
    swarm = Peers(start, flags, flags, (*flags, "--skips", 0))
    *_, three = swarm.all
    wait_until(lambda: last_epoch(three) > 1, 120, "an epoch of local steps")
    stop(*swarm.all)
    assert epochs(three)[last_epoch(three)]["traffic"][1] < 600_000  # a state has 400 kB, and so has a joint step


@pytest.mark.slow
def test_frozen_killed_and_new_peer_leave_bytes_equal(start):
    """A frozen peer replays the commits instead of loading a state, and is killed then."""
    swarm = Peers(start, (), (), ())
    one, two, three = swarm.all
    swarm.wait(one, two, three, more=2)
    three.freeze()
    received = epochs(three)[last_epoch(three)]["traffic"][1]
    swarm.wait(one, two, more=3)
    three.thaw()
    swarm.wait(one, two, three, more=3)
    three.kill()
    assert_same_bytes(one, two, three)
    assert epochs(three)[last_epoch(three)]["traffic"][1] - received < 400_000  # a state has 800 kB
    swarm.wait(one, two, more=3)
    four = swarm.add()
    swarm.wait(one, two, four, more=3)
    stop(one, two, four)
    assert_same_bytes(one, two, four)
    assert epochs(four)[last_epoch(four)]["total_samples"] > 0


@pytest.mark.slow
def test_peer_with_newer_checkpoint_loads_older_state(start):
    """The others have begun again from an older checkpoint, and reach its epoch hours later."""
    swarm = Peers(start, (), ())
    swarm.wait(*swarm.all, more=1)
    three = swarm.add("--begin_at", 90)
    wait_until(lambda: sum(epoch < 90 for epoch in epochs(three)) > 3, 120, "epochs before that of its checkpoint")
    stop(*swarm.all)
    assert_same_bytes(*swarm.all)


@pytest.mark.slow
@pytest.mark.parametrize("are_clients, seconds", [(False, 180), (True, 240)])
def test_remaining_half_begins_new_log(start, are_clients, seconds):
    """Clients do so through an auxiliary peer."""
    swarm = Peers(start)
    swarm.flags += ("--silence", 10, *(("--group_size", 5) if are_clients else ()))
    aux = [swarm.add("--auxiliary", "--step_seconds", 0.1)] if are_clients else []
    one, two, *killed = (swarm.add("--others", 3, *(["--client_mode"] if are_clients else [])) for _ in range(4))
    last = swarm.wait(one, two, *killed, more=2)
    for peer in killed:
        peer.kill()
    swarm.wait(one, two, more=6, seconds=seconds)
    stop(one, two, *aux)
    lines = epochs(one), epochs(two)
    assert {of[max(of)]["averaged_with"] for of in lines} <= ({1, 2} if are_clients else {2})
    common = max(lines[0].keys() & lines[1].keys())
    assert common >= last + 6 and lines[0][common]["digest"] == lines[1][common]["digest"]
    for of in lines:
        computed, counted = (of[max(of)][name] - of[last][name] for name in ("steps", "total_samples"))
        assert 16 * computed - counted <= 2 * 48 * 4  # also of the time without a commit


@pytest.mark.slow
@pytest.mark.parametrize("silence, seconds", [(600, 200), (70, 200)])
def test_last_peer_continues_with_its_updates(start, silence, seconds):
    """One of two peers leaves or dies, and its record counts for 60 s. One vote of two is not a quorum."""
    swarm = Peers(start, *[("--silence", silence)] * 2)
    one, two = swarm.all
    last = swarm.wait(one, two, more=2)
    stop(two) if silence == 600 else two.kill()
    swarm.wait(one, more=5, seconds=seconds)
    stop(one)
    before, after = epochs(one)[last], epochs(one)[last_epoch(one)]
    computed, counted = (after[name] - before[name] for name in ("steps", "total_samples"))
    assert 16 * computed - counted <= 2 * 48 * 4  # at most an epoch's samples, before or after, are pending


@pytest.mark.slow
def test_clients_commit_through_aux_peer(start):
    swarm = Peers(start)
    swarm.flags += ("--group_size", 3)
    aux = swarm.add("--auxiliary", "--step_seconds", 0.1)
    one, two = (swarm.add("--client_mode", "--others", 1) for _ in range(2))
    swarm.wait(one, two, more=4)
    stop(one, two, aux)
    assert_same_bytes(one, two)
    assert {epochs(peer)[last_epoch(peer)]["averaged_with"] for peer in (one, two)} <= {1, 2}


@pytest.mark.parametrize("change, is_same", [(0.0, True), (1e-4, True), (1.0, False), (float("nan"), False)])
def test_first_state_is_near_own_or_refused(change, is_same):
    """A NaN would destroy the model of each member."""
    own = torch.arange(1.0, 9.0)
    anchor = (own + change * torch.eye(8)[3]).numpy().tobytes()
    assert is_near(Numbers([own]), [anchor]) == is_same


@pytest.mark.slow
def test_peer_that_began_alone_joins_log(start, tmp_path, tiny_data, net):
    """Its only initial peer was cut off from all others, and had lost them by a restart (issue 42)."""
    names = ["a", "b", "c"]
    for name in ("monitor", *names, "late"):
        net.host(name, rtt_ms=5)
    net.start()
    local = {"--local_steps": 4, "--local_steps_from": 2, "--target_batch_size": 48}
    swarm = Swarm(start, tmp_path, {**tiny_data, **local}, net)
    own = dict(identity_path=tmp_path / "id", host_maddrs=f"/ip4/{net.ip('monitor')}/tcp/31337")
    monitor = swarm.start_monitor(**own)
    swarm.start_trainers(*names)
    swarm.wait_for_joint_epochs(names, 3, 120)
    net.partition(["monitor", "late"])
    stop(monitor)
    swarm.start_monitor("restarted", **own)
    swarm.start_trainers("late")
    swarm.trainers["late"].wait_for("local steps begin, with 1 peers", 120)
    wait_until(lambda: swarm.last_epoch("late") >= 3, 60, "an epoch of its own log")
    net.heal()
    swarm.wait_for_joint_epochs([*names, "late"], 2, 150, swarm.last_epoch("a"))


@pytest.mark.slow
def test_trainers_end_with_same_model(start, tiny_data, tmp_path):
    local = {"--local_steps": 4, "--local_steps_from": 2, "--total_steps": 14}
    swarm = Swarm(start, tmp_path, {**tiny_data, **local, "--target_batch_size": 48})
    swarm.start_monitor()
    names = ["a", "b", "c"]
    *_, killed = swarm.start_trainers(*names)
    wait_until(lambda: swarm.last_epoch("c") >= 5, 90, "epoch 5")
    killed.kill()
    swarm.start_trainers("c")
    for name in names:
        assert swarm.trainers[name].wait(180) == 0
    assert swarm.difference(names) == 0.0
