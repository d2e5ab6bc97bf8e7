"""Local steps of one peer."""

from functools import partial

import pytest
import torch
from processes import wait_until
from records import run_dhts, run_trackers

from arguments import AveragingArguments, OptimizerArguments
from experiment.optimizer import describe_averaging, make_local_optimizer
from swarm.aggregation import Numbers, encode
from swarm.config import AveragingConfig, make_config
from swarm.contract import RunContract
from swarm.local_steps import STEP_AHEAD, LocalSteps, add_outer_momentum, at_anchor, list_momenta
from swarm.optimizer_state import initialize_optimizer_state_
from swarm.sparse import TopKCompression
from training.figures import TrainingSchedule, parse_schedule

BATCH = 16  # samples of a step


def test_local_steps_count_samples():
    averaging = AveragingArguments(target_batch_size=100, local_steps=25, local_steps_from=200)
    terms = {"total_steps": "500", **describe_averaging(make_config(AveragingConfig, averaging))}
    schedule = parse_schedule(RunContract(joined=0.0, contract=terms))
    assert schedule == TrainingSchedule(100, 500, 25, 200)
    assert [schedule.count_samples(epoch) for epoch in (0, 200, 201, 203)] == [0, 20_000, 22_500, 27_500]


def test_epoch_ends_at_current_target():
    """As for an auxiliary peer that comes in the middle of one, or when the epochs of local steps begin."""
    periods = dict(min_refresh_period=0.2, default_refresh_period=0.2, max_refresh_period=0.5)
    with run_dhts([], []) as dhts, run_trackers(dhts, BATCH, **periods) as (one, other):
        other.report_local_progress(5, 2 * BATCH)
        one.report_local_progress(5, 0)
        wait_until(lambda: one.others and one.ready_to_update_epoch, 20, "the end of an epoch")
        with one.lock:
            one.set_target(10**9)
            assert not one.ready_to_update_epoch and one.view.samples == 2 * BATCH
        wait_until(lambda: one.view.ends_at < float("inf"), 20, "another estimate")
        assert not one.ready_to_update_epoch


def make_local_steps(numbers: int = 5) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, LocalSteps]:
    """Of one parameter, which begins with zeros."""
    model, host = torch.nn.Parameter(torch.zeros(numbers)), torch.nn.Parameter(torch.zeros(numbers))

    def make_adam(groups: list[dict]) -> torch.optim.Optimizer:
        adam = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
        initialize_optimizer_state_(adam)
        return adam

    joint = add_outer_momentum(make_adam([{"params": [host]}]))
    return model, joint, LocalSteps([model], joint, partial(make_adam, [{"params": [model]}]))


def test_anchor_move_keeps_local_progress():
    model, _, local = make_local_steps()
    model.grad = torch.full_like(model, 2.0)
    local.step()
    assert local.measure()[0].tolist() == pytest.approx([0.1] * 5) and model.tolist() == pytest.approx([-0.1] * 5)
    with at_anchor(local):
        assert model.tolist() == [0.0] * 5
    assert model.tolist() == pytest.approx([-0.1] * 5)
    sent = local.measure()
    local.step()  # while the round is under way
    local.offered = sent
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
        local = LocalSteps([model], add_outer_momentum(make(host)), partial(make, groups))
        model.grad = torch.ones_like(model)
        before = model._version
        local.step()
        assert model._version > before, name
        with torch.no_grad():
            model[0, 0] = torch.nan
        local.move_anchor([torch.ones(5, 5)])
        assert model.tolist() == [[1.0] * 5] * 5


def test_step_ahead_keeps_part_of_what_offer_lacks():
    model, _, local = make_local_steps()
    with torch.no_grad():
        model.copy_(torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0]))
    update, residual = local.measure(), [torch.zeros(5)]
    assert update[0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    encode(Numbers(update), Numbers(residual), TopKCompression(density=0.4))  # the last two numbers
    assert residual[0].tolist()[:3] == [1.0, 2.0, 3.0]
    lacking = residual[0].clone()
    local.mark_offered(update, residual)
    assert residual[0].equal((1 - STEP_AHEAD) * lacking)
    local.move_anchor([torch.full((5,), 10.0)])
    assert model.equal(10.0 - STEP_AHEAD * lacking)
    assert (local.measure()[0] + residual[0]).equal(lacking)  # none is lost
    assert local.offered == []


def test_first_local_step_uses_shared_moments():
    model, joint, local = make_local_steps()
    (host,) = joint.param_groups[0]["params"]
    for _ in range(9):
        host.grad = torch.full_like(host, 2.0)
        joint.step()
    assert host.tolist() == pytest.approx([-0.9] * 5)
    joint.param_groups[0]["lr"] = 0.01
    model.grad = torch.zeros_like(model)
    local.step()
    # AdamW with a tenth zero gradient after nine of 2
    first, second = (1 - 0.9**9) * 0.9 * 2, (1 - 0.999**9) * 0.999 * 4
    step = 0.01 * first / (1 - 0.9**10) / (second / (1 - 0.999**10)) ** 0.5
    assert model.tolist() == pytest.approx([-step] * 5, rel=1e-4)
    joint.state[host]["outer_momentum"].fill_(0.25)
    assert "outer_momentum" not in local.inner.state[model]
    _, other, _ = make_local_steps()
    other.load_state_dict(joint.state_dict())
    assert [it.tolist() for it in list_momenta(other)] == [[0.25] * 5]
