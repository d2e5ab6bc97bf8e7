"""Parameter groups, schedule, optimizer, contract: what all peers must build alike."""

import pytest
import torch
from torch import nn

from arguments import AveragingArguments, ModelArguments, OptimizerArguments
from joining import find_differences
from model import make_model
from optimizer import describe_contract, learning_rate_factor, make_local_optimizer, make_param_groups
from utils import RunContract


@pytest.fixture
def model():
    return make_model(ModelArguments(config_path="configs/demo.json"), 300)


def test_norms_and_biases_are_not_decayed(model):
    decayed, undecayed = make_param_groups(model)
    shapes = {name: param.dim() for name, param in model.named_parameters()}
    assert set(decayed["names"]) | set(undecayed["names"]) == set(shapes)
    assert all(shapes[name] == 2 for name in decayed["names"])
    assert all(shapes[name] == 1 for name in undecayed["names"])
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    # the one that copied lists of names miss
    assert f"{layer}.full_layer_layer_norm.weight" in undecayed["names"]
    assert (decayed["decayed"], undecayed["decayed"]) == (True, False)


def test_schedule():
    factors = [learning_rate_factor(epoch, warmup_steps=4, total_steps=12) for epoch in range(14)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0])
    assert learning_rate_factor(0, warmup_steps=0, total_steps=10) == 1


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_a_new_optimizer_has_not_moved_its_parameters(name):
    """hivemind's own initialisation takes a step (note 8); ours leaves parameters and counters alone."""
    param = nn.Parameter(torch.linspace(-1, 1, 10))
    args = OptimizerArguments(optim=name, warmup_steps=0, weight_decay=0.5, learning_rate=0.1)
    before = param.detach().clone()
    optimizer = make_local_optimizer(args, [{"params": [param], "decayed": True}])
    assert torch.equal(param, before)
    assert float(optimizer.state[param]["step"]) == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(optimizer.state[param]["exp_avg"], torch.zeros(10))


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_gradients_are_clipped(name):
    results = []
    for scale in (1.0, 1000.0):
        param = nn.Parameter(torch.ones(4))
        args = OptimizerArguments(optim=name, max_grad_norm=0.5)
        optimizer = make_local_optimizer(args, [{"params": [param], "decayed": False}])
        param.grad = torch.tensor([1.0, -1, 2, 3]) * scale
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(15**0.5 * scale)
        assert param.grad.norm().item() == pytest.approx(0.5, rel=1e-4)
        results.append(param.detach().clone())
    torch.testing.assert_close(results[0], results[1])


def contract(model, tokenizer="a" * 64, optimizer=None, averaging=None) -> RunContract:
    terms = describe_contract(model, tokenizer, optimizer or OptimizerArguments(), averaging or AveragingArguments())
    return RunContract(joined=1.0, contract=terms)


def test_contract_names_what_differs(model):
    run = contract(model)
    assert find_differences(contract(model), [run]) == []
    # when a peer begins to look for its group is its own affair
    assert find_differences(contract(model, averaging=AveragingArguments(batch_size_lead=64)), [run]) == []
    wider = make_model(ModelArguments(config_path="configs/demo.json"), 301)
    for mine, names in [
        (contract(wider), ["model shapes"]),
        (contract(model, tokenizer="b" * 64), ["tokenizer"]),
        (contract(model, optimizer=OptimizerArguments(optim="adamw")), ["optimizer"]),
        (contract(model, optimizer=OptimizerArguments(learning_rate=1e-3)), ["schedule"]),
        (contract(model, averaging=AveragingArguments(target_batch_size=64)), ["target_batch_size"]),
        (contract(model, averaging=AveragingArguments(compression="8bit")), ["compression"]),
        (contract(model, averaging=AveragingArguments(target_group_size=4)), ["averaging"]),
    ]:
        differences = find_differences(mine, [run])
        assert [difference.split(":")[0] for difference in differences] == names
    assert (
        "the run has 4096, you have 64"
        in find_differences(contract(model, averaging=AveragingArguments(target_batch_size=64)), [run])[0]
    )


def test_most_peers_decide_and_among_equals_the_eldest(model):
    mine = contract(model)
    other = contract(model, averaging=AveragingArguments(target_batch_size=64))
    younger = RunContract(joined=2.0, contract=mine.contract)
    assert find_differences(mine, [other, other, mine]) != []
    assert find_differences(mine, [other, younger, mine]) == []
    assert find_differences(mine, [other, younger]) != []


def test_parameter_order_is_part_of_the_contract():
    class Model(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(3, 3))

    differences = find_differences(contract(Model("ba")), [contract(Model("ab"))])
    assert [difference.split(":")[0] for difference in differences] == ["parameter groups", "parameter order"]
