"""Compare steps at ALBERT-large's size: 8-bit LAMB, torch_optimizer's Lamb and other libraries on the CPU; Muon on the
CPU and on the accelerator.

    pip install bitsandbytes torchao      # optional
    OMP_NUM_THREADS=1 python benchmarks/bench_optimizer.py

It takes two minutes.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch_optimizer import Lamb

from arguments import ModelArguments, OptimizerArguments
from experiment.model import make_model
from experiment.optimizer import make_local_optimizer, make_param_groups
from models.lamb_8bit import BLOCK_SIZE, DynamicQuantizer
from swarm.optimizer_state import list_params

TURNS = 15
NUMBERS = 2**22


def measure(
    *functions: Callable[[], object], turns: int = TURNS, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Return the median milliseconds of each function by a clock, called in turn."""
    times = [[] for _ in functions]
    for _ in range(turns + 1):
        for function, own in zip(functions, times, strict=True):
            start = clock()
            function()
            own.append(1000 * (clock() - start))
    return [statistics.median(own[1:]) for own in times]


def measure_steps() -> None:
    optimizers = []
    for name in ("lamb", "lamb_8bit"):
        model = make_model(ModelArguments("configs/albert-large.json"), 30_000)
        optimizers.append(make_local_optimizer(OptimizerArguments(optim=name), make_param_groups(model)))
        for param in list_params(optimizers[-1]):
            param.grad = torch.randn_like(param) * 1e-4
    print(f"{model.num_parameters():,} parameters, {torch.get_num_threads()} threads")
    milliseconds = measure(*(optimizer.step for optimizer in optimizers))
    for optimizer, duration in zip(optimizers, milliseconds, strict=True):
        tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / model.num_parameters()
        print(f"{type(optimizer).__name__:8}  step {duration:6.0f} ms  moments {size:.2f} bytes per parameter")
    print(f"ratio {milliseconds[1] / milliseconds[0]:.2f}")


def measure_muon() -> dict[str, float]:
    """Return the milliseconds of a step of host tensors: Muon on the CPU and on the accelerator, or without one, on
    copies in host memory (cpu:0), which shows the cost of copies; AdamW on the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu", 0)
    functions = {}
    for name, where in (("muon", torch.device("cpu")), ("muon", device), ("adamw", torch.device("cpu"))):
        model = make_model(ModelArguments("configs/albert-large.json"), 30_000)
        groups = make_param_groups(model, separate_hidden=name == "muon")
        optimizer = make_local_optimizer(OptimizerArguments(optim=name), groups, find_device=lambda where=where: where)
        for param in list_params(optimizer):
            param.grad = torch.randn_like(param) * 1e-4
        functions[f"{name} on {where}"] = optimizer.step
    clock = time.monotonic if accelerator else time.process_time
    return dict(zip(functions, measure(*functions.values(), turns=5, clock=clock), strict=True))


def measure_quantizers() -> None:
    """Compare our quantizer with both libraries, with the same blocks and nearly the same values."""
    tensor = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0)) * 1e-3
    quantizer = DynamicQuantizer(signed=True)
    pairs = {"ours": (lambda: quantizer.quantize(tensor), lambda parts: quantizer.dequantize(*parts))}
    try:
        from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

        values = create_dynamic_map(signed=True)
        pairs["bitsandbytes"] = (
            lambda: quantize_blockwise(tensor, code=values, blocksize=BLOCK_SIZE),
            lambda parts: dequantize_blockwise(*parts),
        )
    except ImportError:
        print("bitsandbytes is not installed")
    try:
        from torchao.optim import quant_utils as ao

        ao_values = torch.tensor(ao.create_dynamic_map(signed=True))

        def quantize_as_torchao() -> tuple:
            shares, scales = ao.scale_tensor(tensor, BLOCK_SIZE)
            return ao.quantize_8bit_with_qmap(shares, ao_values), ao_values, scales

        pairs["torchao"] = (quantize_as_torchao, lambda parts: ao.dequant_with_qmap(*parts))
    except ImportError:
        print("torchao is not installed")
    for name, (quantize, dequantize) in pairs.items():
        parts = quantize()
        there, back = measure(quantize, lambda dequantize=dequantize, parts=parts: dequantize(parts))
        error = (dequantize(parts).view(-1) - tensor).norm() / tensor.norm()
        print(f"{name:12}  {NUMBERS:,} numbers to 8 bits {there:5.0f} ms, back {back:4.0f} ms, error {error:.5f}")


def compare_lambs() -> None:
    """Print how far two equal steps move weights of two scales, relative to their norm."""
    try:
        import bitsandbytes
    except ImportError:
        return
    lamb_options = dict(lr=0.01, weight_decay=0.01, eps=1e-6)
    kinds = {
        "torch_optimizer.Lamb": lambda params: Lamb(params, clamp_value=1e4, debias=True, **lamb_options),
        "bitsandbytes LAMB8bit": lambda params: bitsandbytes.optim.LAMB8bit(params, **lamb_options),
        "bitsandbytes AdamW8bit": lambda params: bitsandbytes.optim.AdamW8bit(params, **lamb_options),
    }
    generator = torch.Generator().manual_seed(0)
    weights, gradient = (torch.randn(128, 128, generator=generator) for _ in range(2))
    for name, make in kinds.items():
        moved = []
        for scale in (1.0, 0.02):
            param = torch.nn.Parameter(weights * scale)
            optimizer = make([param])
            for _ in range(2):
                param.grad = gradient.clone()
                optimizer.step()
            moved.append(((param - weights * scale).norm() / (weights * scale).norm()).item())
        print(f"{name:22}  weights of scale 1 move by {moved[0]:.4f}, of scale 0.02 by {moved[1]:.4f}")


if __name__ == "__main__":
    measure_steps()
    for title, duration in measure_muon().items():
        print(f"{title:14}  step {duration:5.0f} ms")
    measure_quantizers()
    compare_lambs()
