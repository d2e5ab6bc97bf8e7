"""8-bit LAMB: the meaning of its bytes, steps and learning like LAMB's, and resumption."""

import pytest
import torch
from processes import ROOT
from torch import nn
from torch_optimizer import Lamb

from arguments import ModelArguments, OptimizerArguments
from experiment.model import make_model
from experiment.optimizer import make_local_optimizer, make_param_groups
from models.lamb_8bit import BLOCK_SIZE, DynamicQuantizer, Lamb8bit, make_dynamic_values
from swarm.optimizer_state import list_params

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
OPTIONS = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-6, clamp_value=10.0)


@pytest.mark.parametrize("signed", [True, False])
def test_lamb_8bit_codebook_values(signed):
    values = make_dynamic_values(signed)
    assert len(values) == 256 and values[-1] == 1 and (values == 0).sum() == 1
    assert (values.diff() > 0).all()
    assert values[0] == (-1 if signed else 0)
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
    assert torch.equal(quantizer.dequantize(*quantizer.quantize(torch.zeros(300))), torch.zeros(300))
    tiny = torch.full((300,), 1e-42)
    assert quantizer.dequantize(*quantizer.quantize(tiny)).abs().max() <= 1e-42
    for number in (float("nan"), float("inf")):
        tensor = torch.ones(2 * BLOCK_SIZE)
        tensor[7] = number
        codes, scales = quantizer.quantize(tensor)
        assert scales.isfinite().tolist() == [False, True]  # a search for such numbers finds them


def make_params(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(70, 30), (30,), (3, 5, 100)]
    scales = [0.02, 1.0, 100.0]  # of which the clamp cuts one
    params = [nn.Parameter(torch.randn(s, generator=generator) * a) for s, a in zip(shapes, scales, strict=True)]
    return [*params, nn.Parameter(torch.zeros(10))]


def make_groups(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]


def take_steps(optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
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
    take_steps(Lamb8bit(make_groups(whole), min_8bit_size=1, **OPTIONS), 3)
    monkeypatch.setattr("models.lamb_8bit.PIECE", BLOCK_SIZE)
    take_steps(Lamb8bit(make_groups(pieces), min_8bit_size=1, **OPTIONS), 3)
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
    model = make_model(ModelArguments(str(ROOT / "configs/albert-large.json")), 30_000)
    optimizer = make_local_optimizer(OptimizerArguments(optim="lamb_8bit"), make_param_groups(model))
    assert model.num_parameters() > 17e6
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    count = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 2.0 < count / model.num_parameters() <= 2.1
