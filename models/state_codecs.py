"""What the names of compressions stand for; and a state on its way to a peer that joins: parameters in 16 bits, moments
in 8, a third of the bytes.

Moments take the block-wise dynamic quantization of arxiv.org/abs/2110.02861, in which lamb_8bit.py keeps its own.
hivemind's codecs do not suit: 16 bits end at 6e-8, where biases begin and second moments are, and its 8 bits are of one
step for a whole tensor. A second moment becomes 0 beside a first one that is not, and the next step leaps.
"""

import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    Uniform8BitQuantization,
)
from hivemind.compression.adaptive import AdaptiveCompressionBase
from hivemind.proto import runtime_pb2

from models.lamb_8bit import BLOCK_SIZE, DynamicQuantizer


class Scaled16bit(CompressionBase):
    """Shares of the largest number, in 16 bits: an error of 2.4e-4 at most, for those of up to 1/16,000 of it."""

    compression_type = runtime_pb2.FLOAT16

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        numbers = tensor.detach().float()
        scale = numbers.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        buffer = scale.numpy().tobytes() + (numbers / scale).half().numpy().tobytes()
        return runtime_pb2.Tensor(compression=self.compression_type, buffer=buffer, size=tensor.shape, dtype="float32")

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """:raises ValueError: the bytes are not those of a tensor of this size"""
        data, shape = bytearray(serialized_tensor.buffer), torch.Size(serialized_tensor.size)
        if len(data) != 4 + 2 * shape.numel() or not shape.numel():
            raise ValueError(f"{len(data)} bytes for {shape.numel()} elements in 16 bits")
        scale = torch.frombuffer(data, dtype=torch.float32, count=1)
        return (torch.frombuffer(data, dtype=torch.float16, offset=4).float() * scale).view(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return 0.5


class Dynamic8bit(CompressionBase):
    """Numbers that may be negative, or the roots of numbers that are not: of second moments (see Lamb8bit), whose
    numbers are squares. What is not 0 does not become 0 there."""

    compression_type = runtime_pb2.BLOCKWISE_8BIT
    quantizers = DynamicQuantizer(signed=True), DynamicQuantizer(signed=False)

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        numbers = tensor.detach().flatten()
        is_root = not (numbers < 0).any()
        codes, scales = self.quantizers[is_root].quantize(numbers.sqrt() if is_root else numbers)
        if is_root:
            codes[(numbers > 0) & (codes == 0)] = 1  # of the values the smallest that is not 0
        buffer = bytes([is_root]) + scales.numpy().tobytes() + codes.numpy().tobytes()
        return runtime_pb2.Tensor(compression=self.compression_type, buffer=buffer, size=tensor.shape, dtype="float32")

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """:raises ValueError: the bytes are not those of a tensor of this size"""
        is_root, data = serialized_tensor.buffer[:1] == b"\1", bytearray(serialized_tensor.buffer[1:])
        shape = torch.Size(serialized_tensor.size)
        blocks = -(-shape.numel() // BLOCK_SIZE)
        if len(data) != 4 * blocks + shape.numel() or not data:
            raise ValueError(f"{len(data)} bytes for {shape.numel()} elements in 8 bits")
        scales = torch.frombuffer(data, dtype=torch.float32, count=blocks)
        codes = torch.frombuffer(data, dtype=torch.uint8, offset=4 * blocks)
        numbers = self.quantizers[is_root].dequantize(codes, scales)
        return (numbers.square_() if is_root else numbers).view(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return (1 + 4 / BLOCK_SIZE) / 4


class MatrixMoments8bit(AdaptiveCompressionBase):
    """Dynamic8bit for matrices of 32-bit numbers; as they are: a step's number, the few moments of norms and biases,
    and the moments of Lamb8bit, which are bytes already."""

    matrix, other = Dynamic8bit(), NoCompression()

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        is_matrix = len(info.descriptor.shape) >= 2 and info.descriptor.dtype == torch.float32
        return self.matrix if is_matrix else self.other


# --compression and --state_compression
COMPRESSIONS = {
    "none": NoCompression(),
    "float16": Float16Compression(),
    "sparse": Float16Compression(),  # as long as all peers step together
    # 8 bits need a codebook per tensor, which small tensors are not worth: those of up to 2**16 elements
    "8bit": SizeAdaptiveCompression(
        threshold=2**16 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
    ),
}

# --load_state_compression: how a state comes to a peer that joins, and a step to one that has missed it
LOAD_STATE_COMPRESSIONS = {
    "none": NoCompression(),
    "float16": RoleAdaptiveCompression(parameter=Scaled16bit(), gradient=Scaled16bit()),
    "8bit": RoleAdaptiveCompression(
        parameter=Scaled16bit(), gradient=MatrixMoments8bit(), optimizer=MatrixMoments8bit()
    ),
}
