"""Steps of a peer's own between two rounds: how far each has come is averaged, and nothing is lost of it."""

from functools import partial

import pytest
import torch
from processes import make_prefix, wait_until
from records import make_tracker, run_dhts
from swarms import epochs, start_peer, stop

from arguments import AveragingArguments, OptimizerArguments
from experiment.optimizer import make_local_optimizer
from swarm.config import AveragingConfig, make_config
from swarm.contract import RunContract, describe_averaging
from swarm.local_steps import LocalSteps, OuterOptimizer, at_anchor
from swarm.optimizer_state import initialize_optimizer_state_
from training.figures import TrainingSchedule, parse_schedule

BATCH, FROM = 16, 3  # samples of a step, and the epoch until which all peers step together: gradient_peer.py


def outer_steps(of: dict[int, dict], *peers: tuple[float, dict[int, dict]]) -> list[tuple[float, float]]:
    """Return the anchor's step and the expected step of each epoch since the first one with local steps.

    :param of: epochs of the peer that is looked at
    :param peers: of all peers their gradient, which is also how far a step of their own goes, and their epochs
    """
    momentum, steps = 0.0, []
    for epoch in range(FROM + 1, max(of) + 1):
        samples = [lines[epoch]["samples"] for _, lines in peers]
        kept = [lines[epoch]["unsent"] - lines[epoch - 1]["unsent"] for _, lines in peers]
        sent = [s / BATCH * gradient - k for s, k, (gradient, _) in zip(samples, kept, peers, strict=True)]
        come = sum(s * went for s, went in zip(samples, sent, strict=True)) / sum(samples)
        momentum = 0.5 * momentum + come
        steps.append((of[epoch]["anchor"] - of[epoch - 1]["anchor"], -(come + 0.5 * momentum)))
    return steps


@pytest.mark.slow
def test_pseudo_gradient_moves_anchor(start):
    prefix, flags = make_prefix(), ("--local_steps", 4, "--target_batch_size", 64, "--others", 1)
    one = start_peer(start, "one", prefix, 1.0, BATCH, flags=flags)
    two = start_peer(start, "two", prefix, 3.0, BATCH, [one], flags)
    wait_until(lambda: min(map(max, (epochs(one) or [0], epochs(two) or [0]))) >= FROM + 4, 90, "epochs of local steps")
    stop(one, two)
    last = min(max(epochs(one)), max(epochs(two)))
    lines = [{e: line for e, line in epochs(peer).items() if e <= last} for peer in (one, two)]
    assert all(line["averaged_with"] == 2 for of in lines for e, line in of.items() if e > FROM)
    together = [sum(of[e]["samples"] for of in lines) for e in range(1, last + 1)]
    assert min(together[:FROM]) >= 64 and min(together[FROM:]) >= 4 * 64
    for of in lines:
        assert [of[e]["parameter"][1] for e in of] == [pytest.approx(of[e]["anchor"]) for e in of]
        for step, expected in outer_steps(of, (1.0, lines[0]), (3.0, lines[1])):
            assert step == pytest.approx(expected, rel=1e-4)  # the values that were not averaged are still pending
    for epoch in range(1, last + 1):
        assert lines[0][epoch]["anchor"] == pytest.approx(lines[1][epoch]["anchor"], rel=1e-6)


def test_local_steps_count_samples():
    averaging = AveragingArguments(target_batch_size=100, local_steps=25, local_steps_from=200)
    contract = RunContract(
        joined=0.0, contract={"total_steps": "500", **describe_averaging(make_config(AveragingConfig, averaging))}
    )
    schedule = parse_schedule(contract)
    assert schedule == TrainingSchedule(100, 500, 25, 200)
    assert [schedule.count_samples(epoch) for epoch in (0, 200, 201, 203)] == [0, 20_000, 22_500, 27_500]


def test_epoch_ends_at_current_target():
    """As for an auxiliary peer that comes in the middle of one, or when the epochs of local steps begin."""
    periods = dict(min_refresh_period=0.2, default_refresh_period=0.2, max_refresh_period=0.5)
    prefix = make_prefix()
    with run_dhts([], []) as dhts:
        one, other = [make_tracker(dht, prefix, BATCH, **periods) for dht in dhts]
        try:
            other.report_local_progress(5, 2 * BATCH)
            one.report_local_progress(5, 0)
            wait_until(lambda: one.others and one.ready_to_update_epoch, 20, "the end of an epoch")
            with one.pause_updates():
                one.set_target(10**9)
                assert not one.ready_to_update_epoch
                assert one.view.samples == 2 * BATCH
            wait_until(lambda: one.view.ends_at < float("inf"), 20, "another estimate")
            assert not one.ready_to_update_epoch
        finally:
            one.shutdown()
            other.shutdown()


def make_local_steps(numbers: int = 5) -> tuple[torch.nn.Parameter, OuterOptimizer, LocalSteps]:
    """Of one parameter, which begins with zeros."""
    model, host = torch.nn.Parameter(torch.zeros(numbers)), torch.nn.Parameter(torch.zeros(numbers))

    def make_adam(groups: list[dict]) -> torch.optim.Optimizer:
        adam = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
        initialize_optimizer_state_(adam)
        adam.grad_norm = 0.0
        return adam

    outer = OuterOptimizer(make_adam([{"params": [host]}]), lr=0.5, momentum=0.0)
    return model, outer, LocalSteps([model], outer, partial(make_adam, [{"params": [model]}]))


def test_anchor_move_keeps_local_progress():
    model, outer, local = make_local_steps()
    model.grad = torch.full_like(model, 2.0)
    local.step()
    assert local.measure()[0].tolist() == pytest.approx([0.1] * 5) and model.tolist() == pytest.approx([-0.1] * 5)
    with at_anchor(local):
        assert model.tolist() == [0.0] * 5
    assert model.tolist() == pytest.approx([-0.1] * 5)
    sent = local.measure()
    local.step()  # while the round is under way
    local.record_averaged(sent)
    local.move_anchor([torch.full((5,), 3.0)])
    assert model.tolist() == pytest.approx([2.9] * 5) and local.measure()[0].tolist() == pytest.approx([0.1] * 5)
    local.move_anchor([torch.full((5,), 4.0)])  # somebody else's step
    assert model.tolist() == pytest.approx([3.9] * 5) and local.measure()[0].tolist() == pytest.approx([0.1] * 5)
    local.drop_pending()
    assert model.tolist() == [4.0] * 5


def test_nonfinite_local_weights_return_to_anchor():
    for name in ("lamb", "adamw", "lamb_8bit"):
        model = torch.nn.Parameter(torch.zeros(5, 5))
        groups = [{"params": [model], "decayed": True}]
        host = [{"params": [torch.nn.Parameter(torch.zeros(5, 5))], "decayed": True}]
        make = partial(make_local_optimizer, OptimizerArguments(optim=name))
        local = LocalSteps([model], OuterOptimizer(make(host), 0.7, 0.9), partial(make, groups))
        model.grad = torch.ones_like(model)
        before = model._version
        local.step()
        assert model._version > before, name
        with torch.no_grad():
            model[0, 0] = torch.nan
        local.move_anchor([torch.ones(5, 5)])
        assert model.tolist() == [[1.0] * 5] * 5


def test_first_local_step_uses_shared_moments():
    model, outer, local = make_local_steps()
    (host,) = outer.param_groups[0]["params"]
    for _ in range(9):
        host.grad = torch.full_like(host, 2.0)
        outer.step()
    assert host.tolist() == pytest.approx([-0.9] * 5)
    outer.param_groups[0]["lr"] = 0.01
    model.grad = torch.zeros_like(model)
    local.step()
    # AdamW with a tenth zero gradient after nine of 2
    first, second = (1 - 0.9**9) * 0.9 * 2, (1 - 0.999**9) * 0.999 * 4
    step = 0.01 * first / (1 - 0.9**10) / (second / (1 - 0.999**10)) ** 0.5
    assert model.tolist() == pytest.approx([-step] * 5, rel=1e-4)
    before = outer.state[host]["exp_avg"].clone()
    outer.is_outer, host.grad = True, torch.full_like(host, 0.2)
    outer.step()
    assert host.tolist() == pytest.approx([-0.9 - 0.5 * 0.2] * 5)
    assert outer.state[host]["exp_avg"].equal(before) and outer.grad_norm == pytest.approx(0.2 * 5**0.5)
    state = outer.state_dict()
    model2, outer2, _ = make_local_steps()
    outer2.load_state_dict(state)
    (host2,) = outer2.param_groups[0]["params"]
    assert outer2.state[host2]["outer_momentum"].tolist() == pytest.approx([0.2] * 5)
