"""The codecs of the compression flags, and those of a state transfer: parameters in 16 bits, moments in 8.

A state takes a third of the bytes. Moments use the block-wise dynamic quantization of arxiv.org/abs/2110.02861, as
lamb_8bit.py does. hivemind's codecs are too coarse: its 16 bits end at 6e-8, in the range of biases and second moments,
and its 8 bits are linear. If a second moment becomes 0 but the first one does not, the next step is huge.
"""

import copy

import torch
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)
from hivemind.compression.adaptive import AdaptiveCompressionBase
from hivemind.proto import runtime_pb2

from models.lamb_8bit import BLOCK_SIZE, DynamicQuantizer


class Scaled16bit(Float16Compression):
    """A codec of float16 fractions of the largest number, with relative errors up to 2.4e-4 down to 1/16,000 of it."""

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """Encode a tensor."""
        numbers = tensor.detach().float()
        scale = numbers.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        buffer = scale.numpy().tobytes() + (numbers / scale).half().numpy().tobytes()
        return runtime_pb2.Tensor(compression=self.compression_type, buffer=buffer, size=tensor.shape, dtype="float32")

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode a tensor, or raise a ValueError if the bytes do not match its size."""
        data = bytearray(serialized_tensor.buffer)
        shape = torch.Size(serialized_tensor.size)
        if len(data) != 4 + 2 * shape.numel() or not shape.numel():
            raise ValueError(f"{len(data)} bytes for {shape.numel()} elements in 16 bits")
        scale = torch.frombuffer(data, dtype=torch.float32, count=1)
        return (torch.frombuffer(data, dtype=torch.float16, offset=4).float() * scale).view(shape)


class Dynamic8bit(BlockwiseQuantization):
    """A codec of 8 bits for signed numbers, or the roots of unsigned ones, of which only 0 becomes 0 (see Lamb8bit)."""

    quantizers = DynamicQuantizer(signed=True), DynamicQuantizer(signed=False)

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """Encode a tensor."""
        numbers = tensor.detach().flatten()
        is_root = not (numbers < 0).any()
        codes, scales = self.quantizers[is_root].quantize(numbers.sqrt() if is_root else numbers)
        if is_root:
            codes[(numbers > 0) & (codes == 0)] = 1  # the smallest value above 0
        buffer = bytes([is_root]) + scales.numpy().tobytes() + codes.numpy().tobytes()
        return runtime_pb2.Tensor(compression=self.compression_type, buffer=buffer, size=tensor.shape, dtype="float32")

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode a tensor, or raise a ValueError if the bytes do not match its size."""
        is_root = serialized_tensor.buffer[:1] == b"\1"
        data = bytearray(serialized_tensor.buffer[1:])
        shape = torch.Size(serialized_tensor.size)
        blocks = -(-shape.numel() // BLOCK_SIZE)
        if len(data) != 4 * blocks + shape.numel() or not data:
            raise ValueError(f"{len(data)} bytes for {shape.numel()} elements in 8 bits")
        scales = torch.frombuffer(data, dtype=torch.float32, count=blocks)
        codes = torch.frombuffer(data, dtype=torch.uint8, offset=4 * blocks)
        numbers = self.quantizers[is_root].dequantize(codes, scales)
        return (numbers.square_() if is_root else numbers).view(shape)


class MatrixMoments8bit(AdaptiveCompressionBase):
    """A codec of Dynamic8bit for float32 matrices; step counts, norms, biases and Lamb8bit's bytes stay as they are."""

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        """Return the codec for a tensor of this shape and type."""
        is_matrix = len(info.descriptor.shape) >= 2 and info.descriptor.dtype == torch.float32
        return Dynamic8bit() if is_matrix else NoCompression()


# --compression; parameters in rounds are not compressed
COMPRESSIONS = {
    "none": NoCompression(),
    "float16": Float16Compression(),
    "sparse": Float16Compression(),  # while all peers step together; then `TopKCompression` of swarm/sparse.py
    # 8 bits need a codebook per tensor, which does not pay off for small tensors of up to 2**16 elements
    "8bit": SizeAdaptiveCompression(
        threshold=2**16 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
    ),
}

# --load_state_compression: for the state that a joining peer loads, and the step that a peer has missed
LOAD_STATE_COMPRESSIONS = {
    "none": NoCompression(),
    "float16": RoleAdaptiveCompression(parameter=Scaled16bit(), gradient=Scaled16bit()),
    "8bit": RoleAdaptiveCompression(
        parameter=Scaled16bit(), gradient=MatrixMoments8bit(), optimizer=MatrixMoments8bit()
    ),
}


def keep_parameters_exact(codec: CompressionBase) -> CompressionBase:
    """Return a codec of LOAD_STATE_COMPRESSIONS with exact parameters, for runs whose peers all have the same bits."""
    if isinstance(codec, RoleAdaptiveCompression):
        codec = copy.copy(codec)
        codec.role_compressions = codec.role_compressions | {TensorRole.PARAMETER: NoCompression()}
    return codec
