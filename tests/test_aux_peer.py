"""An auxiliary peer: averages for clients, passes their states on, and may die."""

import pytest
from processes import LOOPBACK, run_python, wait_until
from swarms import SHARED, TRAINER, epochs, flags, list_joint_rounds, start_monitor, start_peer, start_trainer, stop

NUMBERS = 100_000
BYTES = 4 * NUMBERS  # of a gradient, uncompressed


def test_plain_aux_peer_needs_no_model_code():
    code = "import sys, run_aux_peer; print({'experiment', 'models', 'text'} & {*sys.modules})"
    assert run_python("-c", code, expect=0).stdout == "set()\n"


def start_aux(start, prefix: str, name: str = "aux", others=()):
    return start_peer(start, name, prefix, 0.0, 1, others, ("--auxiliary", "--step_seconds", 0.1, "--group_size", 3))


def start_clients(start, prefix: str, aux_peers: list, names=("first", "second")) -> list:
    own = "--client_mode", "--group_size", 3
    return [start_peer(start, it, prefix, 1.0 + 2 * i, 16 + 16 * i, aux_peers, own) for i, it in enumerate(names)]


def assert_equal_parameters(*peers) -> list[int]:
    """Return the epochs that these peers have averaged together, after the last of which their parameters are equal."""
    joint = list_joint_rounds(*peers)
    parameters = [epochs(peer)[joint[-1]]["parameter"][1] for peer in peers]
    assert parameters == pytest.approx([parameters[0]] * len(peers), rel=1e-5)
    return joint


def test_late_client_loads_state_through_aux_peer(start, prefix):
    """The state is that of another client."""
    aux = start_aux(start, prefix)
    [first] = start_clients(start, prefix, [aux], ["first"])
    wait_until(lambda: max(epochs(first), default=0) >= 2, 90, "2 epochs")
    [late] = start_clients(start, prefix, [aux], ["late"])
    wait_until(lambda: list_joint_rounds(first, late), 90, "a joint round")
    joint = assert_equal_parameters(first, late)
    assert joint[0] > 2 and epochs(late)[joint[0]]["parameter"][1] < -2  # it was no new run
    stop(first, late, aux)


@pytest.mark.slow
def test_clients_average_through_aux_peers(start, prefix):
    """Another auxiliary peer and a public trainer join later, and the first auxiliary peer dies."""
    aux = start_aux(start, prefix)
    first, second = start_clients(start, prefix, [aux])
    joint = wait_until(lambda: len(both := list_joint_rounds(first, second)) >= 15 and both, 120, "15 joint rounds")
    everything = range(joint[0], joint[-1] + 1)
    assert len(joint) >= 0.95 * len(everything), set(everything) - set(joint)
    for epoch in [epoch for epoch in joint if epoch - 1 in joint]:
        one, two = epochs(first)[epoch], epochs(second)[epoch]
        expected = (1.0 * one["samples"] + 3.0 * two["samples"]) / (one["samples"] + two["samples"])
        for peer in (first, second):
            before, after = epochs(peer)[epoch - 1], epochs(peer)[epoch]
            step = [a - b for a, b in zip(after["parameter"], before["parameter"], strict=True)]
            assert step == pytest.approx([-expected] * 3, rel=1e-4)
            for sum_before, sum_after in zip(before["traffic"], after["traffic"], strict=True):  # sent and received
                assert BYTES <= sum_after - sum_before < 1.01 * BYTES
    # the gradients of both in, the average to both out (the times of reports differ by a round)
    sent, received = epochs(aux)[joint[-1]]["traffic"]
    rounds = epochs(aux)[joint[-1]]["rounds"]
    assert (rounds - 1) * 2 * BYTES <= sent <= received < 1.01 * (rounds + 1) * 2 * BYTES

    other_aux = start_aux(start, prefix, "other", [aux])
    public = start_peer(start, "public", prefix, 5.0, 16, [aux, other_aux], ("--group_size", 3))
    trainers = [first, second, public]
    wait_until(lambda: len(list_joint_rounds(*trainers)) >= 5, 90, "5 joint rounds of three")
    assert assert_equal_parameters(*trainers)[0] > 15
    for client in (first, second):
        reported = [line["epoch"] for line in client.json_lines() if "epoch" in line]
        assert reported == sorted(reported)  # no peer went back
    aux.kill()
    last = max(epochs(first))
    wait_until(lambda: list_joint_rounds(*trainers)[-1] > last + 1, 90, "joint rounds without the first aux peer")
    assert_equal_parameters(*trainers)
    stop(*trainers, other_aux)


@pytest.mark.slow
def test_aux_peer_with_other_settings_is_one_line(start, tmp_path, tiny_data, prefix):
    """It stops before its start if there are trainers, otherwise once the first trainers have joined."""
    own = {name: TRAINER[name] for name in SHARED} | {"--experiment_prefix": prefix, "--target_batch_size": 9}
    own |= {"--refresh_period": 0.5, "--tokenizer_path": tiny_data["--tokenizer_path"]}
    wrong = ["run_aux_peer.py", *LOOPBACK, *flags(own), "--assist_in_averaging", "--output_dir"]
    # trainers join through a monitor without settings of its own
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor")
    early = start("early", *wrong, tmp_path / "early", "--initial_peers", peers)
    early.wait_for(r"others may join through --initial_peers /ip4/")
    endless = {"--target_batch_size": 64, "--max_steps": 1_000_000}
    trainer = start_trainer(start, tmp_path, "trainer", prefix, peers, {**tiny_data, **endless}, pace=0.1)
    early.assert_user_error("target_batch_size: the run has 64, you have 9", seconds=90)
    address = trainer.wait_for(r"--initial_peers (/ip4/\S+)").group(1)
    late = start("late", *wrong, tmp_path / "late", "--initial_peers", address)
    late.assert_user_error("target_batch_size: the run has 64, you have 9")
    stop(trainer, monitor)
