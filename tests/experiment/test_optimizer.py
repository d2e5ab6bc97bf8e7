"""Parameter groups, schedule, optimizers and contract, which must match on all peers."""

import math
import re
from functools import partial

import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto.runtime_pb2 import CompressionType
from torch import nn
from torch_optimizer import Lamb
from transformers import AlbertConfig

from arguments import AveragingArguments, ModelArguments, OptimizerArguments
from common.console import UserError
from experiment.model import make_model
from experiment.objectives import OBJECTIVES
from experiment.optimizer import (
    learning_rate_factor,
    make_contract,
    make_local_optimizer,
    make_param_groups,
    make_scheduler,
    orthogonalize,
)
from models.lamb_8bit import BLOCK_SIZE, DynamicQuantizer, Lamb8bit, make_dynamic_values
from models.state_codecs import COMPRESSIONS
from swarm.config import count_batches
from swarm.contract import RunContract, find_differences
from swarm.optimizer_state import initialize_optimizer_state_, list_params


def make_demo(vocabulary: int = 300, config: str = "demo", **options) -> nn.Module:
    return make_model(ModelArguments(f"configs/{config}.json", **options), vocabulary)


@pytest.fixture
def model():
    return make_demo()


@pytest.mark.parametrize("config", ["demo", "lean-demo"])
def test_param_groups_exclude_norms_and_biases(config):
    model = make_demo(config=config)
    decayed, undecayed = make_param_groups(model)
    shapes = {name: param.dim() for name, param in model.named_parameters()}
    assert set(decayed["names"]) | set(undecayed["names"]) == set(shapes)
    assert all(shapes[name] == 2 and "norm" not in name for name in decayed["names"])
    assert all(shapes[name] == 1 for name in undecayed["names"])
    # copied lists of names miss a weight of this name
    assert any("layer_norm.weight" in name for name in undecayed["names"])
    assert (decayed["decayed"], undecayed["decayed"]) == (True, False)


WARM_UP, COSINE = [0.2, 0.4, 0.6, 0.8], [(1 + math.cos(math.pi * epoch / 8)) / 2 for epoch in range(9)]


@pytest.mark.parametrize(
    "kind, least, rates",
    [
        ("linear", 0, [*WARM_UP, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0]),
        ("linear", 0.2, [*WARM_UP, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2]),
        ("cosine", 0, [*WARM_UP, *COSINE, 0]),
        ("wsd", 0, [*WARM_UP, 1, 1, 1, 1, 1, 1, 1, 1 / 2, 0, 0]),  # 12 // 5 epochs of decay
        ("constant", 0, [*WARM_UP, *[1] * 10]),
    ],
)
def test_schedule_warms_up_and_decays(kind, least, rates):
    options = dict(lr_scheduler_type=kind, learning_rate=1.0, min_learning_rate=least)
    for warmup, expected in ((4, rates), (0, rates[4:5])):
        args = OptimizerArguments(**options, warmup_steps=warmup, total_steps=8 + warmup)
        optimizer = make_local_optimizer(args, [{"params": [nn.Parameter(torch.ones(2))], "decayed": True}])
        scheduler = make_scheduler(args, optimizer)
        for rate in expected:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("kind, share", [("wsd", 0.2), ("linear", 1 - 700 / 19_075)])
def test_schedule_with_local_steps_decays_by_batches(kind, share):
    """As in docs/speedrun.md: 700 epochs of warm-up with one batch each, then 735 with 25."""
    options = dict(learning_rate=1.0, warmup_steps=700, total_steps=1435)
    args = OptimizerArguments(lr_scheduler_type=kind, **options)
    count = partial(count_batches, local_steps=25, local_steps_from=700)
    factors = [learning_rate_factor(epoch, args, count) for epoch in range(1436)]
    sizes = [count(epoch + 1) - count(epoch) for epoch in range(1435)]
    decay = sum(size for factor, size in zip(factors[700:], sizes[700:], strict=False) if factor < 1)
    assert decay / count(1435) == pytest.approx(share, abs=26 / 19_075)
    # by the middle of the decay, half of its batches are done
    middle = next(epoch for epoch in range(700, 1436) if factors[epoch] <= 0.5)
    assert (count(1435) - count(middle)) / decay == pytest.approx(0.5, abs=0.01) and factors[-1] == 0


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, momentum=0.9, nesterov=True),
        partial(torch.optim.RMSprop, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        partial(Lamb, debias=True),
        partial(Lamb8bit, min_8bit_size=1, betas=(0.9, 0.999), eps=1e-6, clamp_value=10.0),
    ],
)
def test_optimizer_state_starts_at_zero(make):
    """hivemind's own initialization takes a step (note 8). Here no decay enters the state, and no step is counted."""
    params = [nn.Parameter(torch.linspace(-1, 1, 10)) for _ in range(2)]
    for param in params:
        optimizer = make([{"params": [param], "weight_decay": 0.5}], lr=0.1)
        if param is params[0]:
            initialize_optimizer_state_(optimizer)
            assert any(torch.is_tensor(value) for value in optimizer.state[param].values())
        for _ in range(2):
            param.grad = torch.linspace(2, -1, 10)
            optimizer.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "meta"])
def test_muon_matches_torch_on_any_device(device):
    """The optimizer steps on the device: cpu:0 gets copies, meta fails."""
    model, reference = make_demo(1000), make_demo(1000)
    args = OptimizerArguments(optim="muon", learning_rate=0.01, warmup_steps=0, weight_decay=0.1)
    groups = make_param_groups(model, separate_hidden=True)
    optimizer = make_local_optimizer(args, groups, find_device=lambda: torch.device(device))
    hidden, others, flat = make_param_groups(reference, separate_hidden=True)
    assert "albert.embeddings.word_embeddings.weight" in others["names"]
    assert any("ffn.weight" in name for name in hidden["names"]) and all(p.ndim == 2 for p in hidden["params"])
    adamw = [{"params": others["params"], "weight_decay": 0.1}, {"params": flat["params"], "weight_decay": 0.0}]
    parts = [
        torch.optim.Muon(hidden["params"], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw, lr=0.01, eps=1e-6, fused=True),
    ]
    before = [param.detach().clone() for param in model.parameters()]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            param.grad = torch.randn(param.shape, generator=generator) * 1e-3
            other.grad = param.grad.clone()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        for part in parts:
            part.step()
    matrices = {id(param) for param in list_params(optimizer)[: len(hidden["params"])]}
    for param, expected, start in zip(model.parameters(), reference.parameters(), before, strict=True):
        # torch's iterations have 8 bits of precision
        tolerance = 0.02 * (expected - start).norm() if id(param) in matrices else 0.0
        assert (param - expected).norm() <= tolerance and not torch.equal(param, start)
    assert list(optimizer.state) == list_params(optimizer)  # peers exchange states in this order
    for param, expected in zip(optimizer.param_groups[0]["params"], hidden["params"], strict=True):
        assert optimizer.state[param]["momentum_buffer"].equal(parts[0].state[expected]["momentum_buffer"])


@pytest.mark.parametrize("shape", [(20, 50), (50, 20)])
def test_orthogonalize_maps_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):  # the polynomial of torch.optim.Muon
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    expected = left @ values.diag() @ right
    assert torch.allclose(orthogonalize(matrix).double(), expected, atol=1e-5)
    assert 0.6 < values.min() < values.max() < 1.3


def test_muon_without_matrices_is_one_line(model):
    for param in model.parameters():
        param.requires_grad_(param.ndim < 2)
    with pytest.raises(UserError, match="--optim muon: .*choose --optim adamw"):
        make_param_groups(model, separate_hidden=True)


@pytest.mark.parametrize("numbers, name", [(2**16, "FLOAT16"), (2**16 + 1, "UNIFORM_8BIT")])
def test_eight_bit_moments_need_65536_elements(numbers, name):
    tensor = torch.randn(numbers)
    # an all-reduce sends a tensor in parts, but the size of the whole tensor decides
    info = CompressionInfo.from_tensor(tensor).get_part(0, 1000)
    sent = COMPRESSIONS["8bit"].compress(tensor[:1000], info)
    assert CompressionType.Name(sent.compression) == name


@pytest.mark.parametrize("name", ["lamb", "lamb_8bit", "adamw"])
def test_step_clips_gradient_norm(name):
    args, params = OptimizerArguments(optim=name, max_grad_norm=0.5, min_8bit_size=1), []
    for scale in (1.0, 1000.0):
        params.append(nn.Parameter(torch.ones(4)))
        optimizer = make_local_optimizer(args, [{"params": params[-1:], "decayed": False}])
        params[-1].grad = torch.tensor([1.0, -1, 2, 3]) * scale
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(15**0.5 * scale)
        assert params[-1].grad.norm().item() == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(*params)


def contract(model, optimizer=None, averaging=None, tokenizer="a" * 64) -> RunContract:
    made = make_contract(model, tokenizer, optimizer or OptimizerArguments(), averaging or AveragingArguments())
    return made.copy(update={"joined": 1.0})


def test_contract_mismatch_names_settings(model):
    run = contract(model)
    assert find_differences(contract(model), [run]) == []
    # each peer chooses when to start matchmaking
    assert find_differences(contract(model, averaging=AveragingArguments(batch_size_lead=64)), [run]) == []
    deeper = make_demo()
    deeper.config.num_hidden_layers += 1  # which share their weights: all shapes are the same
    for mine, words in [
        (contract(make_demo(301)), "model shapes: "),
        (contract(deeper), "model: "),
        (contract(model, tokenizer="b" * 64), "tokenizer: "),
        (contract(model, OptimizerArguments(optim="adamw")), "optimizer: "),
        (contract(model, OptimizerArguments(optim="lamb_8bit")), "optimizer: .* 8 bits from 65536 numbers"),
        (contract(model, OptimizerArguments(optim="lamb_8bit", min_8bit_size=9)), "optimizer: .* 8 bits from 9 "),
        (contract(model, OptimizerArguments(learning_rate=1e-3)), "schedule: "),
        (contract(model, OptimizerArguments(min_learning_rate=1e-5)), "schedule: "),
        (contract(model, averaging=AveragingArguments(target_batch_size=64)), "target_batch_size: the run has 4096"),
        (contract(model, averaging=AveragingArguments(compression="8bit")), "compression: "),
        (contract(model, averaging=AveragingArguments(target_group_size=4)), "averaging: "),
    ]:
        [difference] = find_differences(mine, [run])
        assert re.match(words, difference)


def test_contract_majority_wins_then_oldest(model):
    mine, other = contract(model), contract(model, averaging=AveragingArguments(target_batch_size=64))
    younger = RunContract(joined=2.0, contract=mine.contract)
    assert find_differences(mine, [other, other, mine]) != []
    assert find_differences(mine, [other, younger, mine]) == []
    assert find_differences(mine, [other, younger]) != []


def test_contract_includes_parameter_order():
    class Model(nn.Module):
        def __init__(self, names):
            super().__init__()
            self.config, self.objective, self.initial_weights = AlbertConfig(), OBJECTIVES["mlm_sop"], "random"
            for name in names:
                setattr(self, name, nn.Linear(3, 3))

    differences = find_differences(contract(Model("ba")), [contract(Model("ab"))])
    assert [difference.split(":")[0] for difference in differences] == ["parameter groups", "parameter order"]


def test_contract_includes_frozen_weights():
    """No peer sends them: they follow from the seed."""
    first, second = make_demo(seed=1), make_demo(seed=2)
    assert find_differences(contract(second), [contract(first)]) == []
    for model in (first, second):
        model.get_input_embeddings().requires_grad_(False)
    expected = "initial weights: the run has random, 1 frozen, of seed 1, you have random, 1 frozen, of seed 2"
    assert find_differences(contract(second), [contract(first)]) == [expected]


DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
OPTIONS = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-6, clamp_value=10.0)


@pytest.mark.parametrize("signed", [True, False])
def test_lamb_8bit_codebook_values(signed):
    values = make_dynamic_values(signed)
    assert len(values) == 256 and (values == 0).sum() == 1 and (values.diff() > 0).all()
    assert (values[0], values[-1]) == (-1 if signed else 0, 1)
    # three quarters of the values are in the two upper decades, and two in the lowest
    assert (values.abs() > 0.01).sum() == 193
    assert ((values != 0) & (values.abs() < 1e-6)).sum() == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(8, BLOCK_SIZE), (10, 100), (1,)], ids=str)
def test_lamb_8bit_rounds_to_nearest(shape, signed, device):
    torch.manual_seed(0)
    tensor = torch.randn(shape) * 10.0 ** torch.empty(shape).uniform_(-6, 6)
    tensor = tensor if signed else tensor.abs()
    quantizer = DynamicQuantizer(signed)
    codes, scales = (part.cpu() for part in quantizer.quantize(tensor.to(device)))
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, shape, (-(-tensor.numel() // BLOCK_SIZE),))
    shown = quantizer.dequantize(codes.to(device), scales.to(device)).cpu()
    scale_of_each = scales.repeat_interleave(BLOCK_SIZE)[: tensor.numel()].view(shape)
    shares = tensor.double() / scale_of_each
    nearest = (shares[..., None] - make_dynamic_values(signed)).abs().amin(-1)
    # the table uses 11 bits of a number
    assert ((shown / scale_of_each - shares).abs() <= nearest + 2**-11 * shares.abs() + 1e-7).all()
    # a block's largest value is exact, with either sign
    largest = tensor.abs() == scale_of_each
    assert torch.equal(shown[largest], tensor[largest]) and largest.sum() >= len(scales)


def test_lamb_8bit_handles_zero_and_nonfinite():
    quantizer = DynamicQuantizer(signed=True)
    for number in (0.0, 1e-42):
        assert quantizer.dequantize(*quantizer.quantize(torch.full((300,), number))).abs().max() <= number
    for number in (float("nan"), float("inf")):
        tensor = torch.ones(2 * BLOCK_SIZE)
        tensor[7] = number
        codes, scales = quantizer.quantize(tensor)
        assert scales.isfinite().tolist() == [False, True]  # a search for such numbers finds them


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {(70, 30): 0.02, (30,): 1.0, (3, 5, 100): 100.0}  # the clamp cuts one of these scales
    params = [torch.randn(shape, generator=generator) * scale for shape, scale in shapes.items()]
    return [*map(nn.Parameter, params), nn.Parameter(torch.zeros(10))]


def make_groups(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]


def take_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in list_params(optimizer):
            param.grad = torch.randn(param.shape, generator=generator).to(param.device)
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("min_8bit_size, error", [(10**9, 1e-5), (1, 0.03)], ids=["32 bits", "8 bits"])
def test_lamb_8bit_tracks_lamb(min_8bit_size, error, device):
    start, field, ours = make_params(), make_params(), [nn.Parameter(p.detach().to(device)) for p in make_params()]
    take_steps(Lamb(make_groups(field), debias=True, **OPTIONS), 10)
    take_steps(Lamb8bit(make_groups(ours), min_8bit_size=min_8bit_size, **OPTIONS), 10)
    for before, param, other in zip(start, field, ours, strict=True):
        assert (other.cpu() - param).norm() < error * (param - before).norm()


def test_lamb_8bit_is_independent_of_chunks(monkeypatch):
    whole, pieces = make_params(), make_params()
    for params in (whole, pieces):
        take_steps(Lamb8bit(make_groups(params), min_8bit_size=1, **OPTIONS), 3)
        monkeypatch.setattr("models.lamb_8bit.PIECE", BLOCK_SIZE)
    assert all(map(torch.equal, whole, pieces))


def test_lamb_8bit_moves_small_gradients():
    """In 8 bits the square of a gradient of 1e-3 vanishes next to that of 1: divided by its root, the first
    moment leaps, and the trust ratio takes from all others. With squares, frequent words here move a third as far."""
    field, ours = (nn.Parameter(torch.ones(2, 128)) for _ in range(2))
    optimizers = [Lamb([field], debias=True, **OPTIONS), Lamb8bit([ours], min_8bit_size=1, **OPTIONS)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradient = torch.randn(2, 128, generator=generator) * torch.tensor([[1.0], [1e-3]])
        for param, optimizer in zip((field, ours), optimizers, strict=True):
            param.grad = gradient.clone()
            optimizer.step()
    expected, moved = ((param - 1).abs().mean(1) for param in (field, ours))
    torch.testing.assert_close(moved, expected, rtol=0.05, atol=0)


def test_lamb_8bit_bytes_of_albert_large():
    model = make_demo(30_000, "albert-large")
    optimizer = make_local_optimizer(OptimizerArguments(optim="lamb_8bit"), make_param_groups(model))
    assert model.num_parameters() > 17e6
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    count = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 2.0 < count / model.num_parameters() <= 2.1
