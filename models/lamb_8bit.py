"""LAMB (arxiv.org/abs/1904.00962) whose two moments take one byte per parameter each, and 4 bytes per block of 256.

The step is that of torch_optimizer's Lamb, the optimizer of --optim lamb. Between steps the moments have 8 bits, by the
block-wise dynamic quantization of arxiv.org/abs/2110.02861. This implementation is plain torch, the same on CPU and
GPU. No library has it (benchmarks/bench_optimizer.py): bitsandbytes' LAMB8bit omits the trust ratio, like AdamW8bit,
and torchao has AdamW only, with its own tensor class. Both quantize more slowly on a CPU, where the swarm steps.

The state consists of plain tensors, whose shapes and types follow from the parameters, because peers exchange them by
position: codes (uint8, in the parameter's shape) and scales (float32, one per block).
"""

import torch
from torch.nn.functional import pad

BLOCK_SIZE = 256
PIECE = 2**18  # elements processed at once: a multiple of BLOCK_SIZE that fits a CPU's cache


def make_dynamic_values(signed: bool) -> torch.Tensor:
    """Return the 256 values of the codes: 0, 1, seven decades of doubling density, and the negative ones if signed."""
    decades = []
    for exponent in range(-6, 1):
        borders = torch.linspace(0.1, 1, 2 ** (exponent + 6 + (not signed)) + 1, dtype=torch.float64)
        decades.append((borders[1:] + borders[:-1]) / 2 * 10.0**exponent)
    positive = torch.cat(decades)
    values = torch.cat([*([-positive] if signed else []), torch.tensor([0.0, 1.0]), positive]).sort().values.float()
    if signed:
        # the published values end at -0.993: a block's largest number, if negative, would lose 0.7 % at each step
        values[0] = -1.0
    return values


class DynamicQuantizer:
    """A quantizer of float32 to 8 bits, which divides each block of 256 by its maximum, and rounds to 256 values."""

    def __init__(self, signed: bool):
        self.values = make_dynamic_values(signed)
        # A table of all float16 numbers replaces the search for the nearest value, twice as fast on a CPU. Rounding to
        # 11 bits before 8 increases the error by 1e-6 of itself.
        halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
        self.table = torch.bucketize(halves, (self.values[1:] + self.values[:-1]) / 2).to(torch.uint8)

    def quantize(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (codes, scales); a number that is not finite makes its block's scale not finite."""
        self.table = self.table.to(tensor.device)
        blocks = pad(tensor.flatten(), (0, -tensor.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
        scales = blocks.abs().amax(1)
        shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        index = shares.half().view(torch.int16).int().add_(2**15)
        codes = self.table.index_select(0, index.view(-1))
        return codes[: tensor.numel()].view(tensor.shape), scales

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the numbers that these codes and scales stand for."""
        self.values = self.values.to(codes.device)
        index = pad(codes.flatten(), (0, -codes.numel() % BLOCK_SIZE)).int()
        blocks = self.values.index_select(0, index).view(-1, BLOCK_SIZE).mul_(scales[:, None])
        return blocks.view(-1)[: codes.numel()].view(codes.shape)


class Lamb8bit(torch.optim.Optimizer):
    """A LAMB optimizer with 8-bit moments, or 32-bit ones for tensors of fewer than `min_8bit_size` elements.

    :param clamp_value: the upper bound of the weight norm in the trust ratio
    """

    def __init__(
        self, params, lr: float, betas: tuple[float, float], eps: float, clamp_value: float, min_8bit_size: int
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.clamp_value = clamp_value
        self.min_8bit_size = min_8bit_size
        # The state has the root of the second moment, which has half the range on a log scale. Next to a gradient 2,500
        # times as large, as frequent tokens have, a square would round to 0, and the step divided by it would be huge.
        self.quantizers = {"exp_avg": DynamicQuantizer(signed=True), "exp_avg_sq_root": DynamicQuantizer(signed=False)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, **group)

    def update(self, param: torch.Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_):
        """Make the step of one parameter."""
        state = self.state[param] or self.make_state(param)
        state["step"] += 1
        gradient = param.grad.flatten()
        step = torch.empty(param.numel(), device=param.device)
        for start in range(0, param.numel(), PIECE):
            piece = slice(start, start + PIECE)
            mean, square = self.read(state, piece)
            mean.mul_(betas[0]).add_(gradient[piece], alpha=1 - betas[0])
            square.mul_(betas[1]).addcmul_(gradient[piece], gradient[piece], value=1 - betas[1])
            root = square.sqrt()
            self.write(state, piece, mean, root)
            torch.div(mean, root.add_(eps), out=step[piece])
        step = step.view(param.shape).add_(param, alpha=weight_decay)
        bias_correction = (1 - betas[1] ** state["step"]) ** 0.5 / (1 - betas[0] ** state["step"])
        weight_norm = param.norm().clamp(0, self.clamp_value).item()
        step_norm = step.norm().item()
        trust_ratio = weight_norm / step_norm if weight_norm and step_norm else 1.0
        param.add_(step, alpha=-lr * bias_correction * trust_ratio)

    def make_state(self, param: torch.Tensor) -> dict:
        """Make a parameter's state."""
        state = self.state[param]
        zeros = torch.zeros(param.shape, device=param.device)
        state["step"] = 0
        if param.numel() < self.min_8bit_size:
            state |= {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        else:
            for name, quantizer in self.quantizers.items():
                state[f"{name}_codes"], state[f"{name}_scales"] = quantizer.quantize(zeros)
        return state

    def read(self, state: dict, piece: slice) -> list[torch.Tensor]:
        """Return the two moments of these elements of a parameter in 32 bits, which the caller changes in place."""
        if "exp_avg" in state:
            return [state[name].view(-1)[piece] for name in ("exp_avg", "exp_avg_sq")]
        mean, root = (it.dequantize(*slice_moment(state, name, piece)) for name, it in self.quantizers.items())
        return [mean, root.square_()]

    def write(self, state: dict, piece: slice, *moments: torch.Tensor) -> None:
        """Store the first moment and the root of the second one, unless they are already the state's tensors."""
        if "exp_avg" in state:
            return
        for (name, quantizer), moment in zip(self.quantizers.items(), moments, strict=True):
            for target, tensor in zip(slice_moment(state, name, piece), quantizer.quantize(moment), strict=True):
                target.copy_(tensor)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state, and convert its codes back to bytes."""
        super().load_state_dict(state_dict)
        # torch has cast the codes to the parameters' type, in which whole numbers are exact
        for state in self.state.values():
            for name in state.keys() & {f"{name}_codes" for name in self.quantizers}:
                state[name] = state[name].to(torch.uint8)


def slice_moment(state: dict, name: str, piece: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of these elements, which begin with a block."""
    blocks = slice(piece.start // BLOCK_SIZE, piece.stop // BLOCK_SIZE)
    return state[f"{name}_codes"].view(-1)[piece], state[f"{name}_scales"][blocks]
