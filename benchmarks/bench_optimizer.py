"""Compare a step of 8-bit LAMB with torch_optimizer's Lamb and other libraries, at ALBERT-large's size on the CPU.

    pip install bitsandbytes torchao      # optional
    OMP_NUM_THREADS=1 python benchmarks/bench_optimizer.py

It takes half a minute.
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


def measure(*functions: Callable[[], object]) -> list[float]:
    """Return the median CPU milliseconds of each function, called in turn."""
    times = [[] for _ in functions]
    for _ in range(TURNS + 1):
        for function, own in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            own.append(1000 * (time.process_time() - start))
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
    measure_quantizers()
    compare_lambs()
