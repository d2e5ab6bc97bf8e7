"""Updates of which only the largest entries are sent, in a few bits each (SparseLoCo, arXiv 2508.15706).

The sender keeps what does not arrive, tensor minus `extract(compress(tensor))`, for its next round: error feedback
(arXiv 1809.07599). A message is, in this order:

    bits of a value, number of entries                            1 and 4 bytes
    least magnitude and range of magnitudes of each chunk         bfloat16
    positions, ascending: low parts, bitmap of the high parts     Elias-Fano: 2 bits more than -log2(density) or less
    values: sign, and one of 2 ** (bits - 1) steps of the range   with 2 bits of 3 %: 9 bits an entry in all
"""

import copy
import math
import struct

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo, RoleAdaptiveCompression, TensorRole
from hivemind.proto import runtime_pb2
from torch.nn.functional import pad

CHUNK = 4096  # numbers that share a scale, and of which the same share is sent
PART = 16 * CHUNK  # numbers of a message in a round
MAX_NUMBERS, MAX_DIMENSIONS = 2**26, 8  # of a message; extract allocates 4 bytes a number
MAX_SCALE = 1e30
HEADER = struct.Struct("<BI")


def pack(codes: np.ndarray, bits: int) -> bytes:
    """Unsigned integers below 2 ** bits: first the lowest bits of all, then the next ones."""
    return b"".join(np.packbits((codes >> bit) & 1).tobytes() for bit in range(bits))


def unpack(data: np.ndarray, count: int, bits: int) -> np.ndarray:
    """What `pack` was given, as int64.

    :param data: the bytes of `pack`, as uint8
    """
    codes = np.zeros(count, np.int64)
    for bit in range(bits):
        plane = data[bit * -(-count // 8) :]
        codes |= np.unpackbits(plane, count=count).astype(np.int64) << bit
    return codes


def count_low_bits(numbers: int, count: int) -> int:
    """Of a position those that are not in the bitmap (Elias, 1974; Fano, 1971)."""
    return max(1, numbers // max(1, count)).bit_length() - 1


class TopKCompression(CompressionBase):
    """The largest entries of each chunk, in a few bits; what is 0 is never sent.

    It travels under the name of a codec of hivemind's that nobody uses here, whose place among the deserializers it
    takes when this file is imported: hivemind reads no message of a number that has no name.

    :param density: share of the numbers that is sent at most, above 0 and up to 1
    :param bits: of a value, its sign among them, 2 to 8
    """

    compression_type = runtime_pb2.QUANTILE_8BIT

    def __init__(self, density: float = 1.0, bits: int = 8):
        self.density, self.bits = density, bits

    def choose(self, numbers: torch.Tensor) -> torch.Tensor:
        """Positions of the entries to be sent, ascending, int64."""
        if self.density == 1:
            return numbers.nonzero().flatten()
        chunk = min(CHUNK, len(numbers))
        chunks = pad(numbers.abs(), (0, -len(numbers) % chunk)).view(-1, chunk)
        largest = chunks.topk(math.ceil(self.density * chunk), sorted=False).indices.sort().values
        largest += torch.arange(0, chunks.numel(), chunk)[:, None]
        return largest[chunks.view(-1)[largest] != 0]  # a NaN too: the receiver refuses it

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo | None = None, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """The message of 1 to MAX_NUMBERS numbers of any shape. With one that is not finite, nobody will accept it."""
        numbers = tensor.detach().float().flatten()
        positions = self.choose(numbers)
        values, chunk_of = numbers[positions], positions // CHUNK
        magnitudes, of_chunks = values.abs(), torch.zeros(-(-len(numbers) // CHUNK))
        least, mean, most = (
            of_chunks.scatter_reduce(0, chunk_of, magnitudes, how, include_self=False)
            for how in ("amin", "mean", "amax")
        )
        # in 2 bits one large entry would leave a single step for all others; it goes on in the next rounds
        spread = torch.minimum(most - least, 2**self.bits * (mean - least).clamp_min(0))
        scales = torch.stack([least, spread]).bfloat16()
        least, spread = scales.float()
        levels = 2 ** (self.bits - 1)
        steps = (magnitudes - least[chunk_of]) / (spread / levels).clamp_min(torch.finfo().tiny)[chunk_of]
        codes = steps.clamp(0, levels - 1).to(torch.uint8) + levels * (values < 0)
        low_bits, positions = count_low_bits(len(numbers), len(positions)), positions.numpy()
        bitmap = np.zeros((len(numbers) >> low_bits) + len(positions) + 1, np.uint8)
        bitmap[(positions >> low_bits) + np.arange(len(positions))] = 1
        buffer = HEADER.pack(self.bits, len(positions)) + scales.view(torch.int16).numpy().tobytes()
        buffer += pack(positions, low_bits) + np.packbits(bitmap).tobytes() + pack(codes.numpy(), self.bits)
        return runtime_pb2.Tensor(compression=self.compression_type, buffer=buffer, size=tensor.shape, dtype="float32")

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """The float32 tensor, 0 where nothing was sent.

        :raises ValueError: no `compress` has made these bytes; nothing of the tensor's size was allocated then
        """
        shape, buffer = tuple(serialized_tensor.size), serialized_tensor.buffer
        numbers = math.prod(shape[:MAX_DIMENSIONS])
        if len(shape) > MAX_DIMENSIONS or not 0 < numbers <= MAX_NUMBERS or len(buffer) < HEADER.size:
            raise ValueError(f"not a sparse tensor: {len(buffer)} bytes for the shape {shape[:MAX_DIMENSIONS]}")
        bits, count = HEADER.unpack_from(buffer)
        chunks, low_bits, plane = -(-numbers // CHUNK), count_low_bits(numbers, count), -(-count // 8)
        places = (numbers >> low_bits) + count + 1
        sizes = [HEADER.size, 4 * chunks, low_bits * plane, -(-places // 8), bits * plane]
        if not 2 <= bits <= 8 or count > numbers or len(buffer) != sum(sizes):
            raise ValueError(f"not a sparse tensor: {len(buffer)} bytes for {count} entries of {numbers}")
        data = np.frombuffer(buffer, np.uint8)
        _, scales, low, high, codes = np.split(data, np.cumsum(sizes)[:-1])
        scales = torch.from_numpy(scales.copy()).view(torch.bfloat16).float().view(2, chunks)
        high = np.flatnonzero(np.unpackbits(high, count=places))
        if len(high) != count or not ((scales >= 0) & (scales <= MAX_SCALE)).all():
            raise ValueError("not a sparse tensor: its bitmap or its scales are wrong")
        positions = (high - np.arange(count) << low_bits) | unpack(low, count, low_bits)
        if count and (positions[-1] >= numbers or (np.diff(positions) <= 0).any()):
            raise ValueError("not a sparse tensor: its positions do not ascend or are out of range")
        positions, codes = torch.from_numpy(positions), torch.from_numpy(unpack(codes, count, bits))
        levels, chunk_of = 2 ** (bits - 1), positions // CHUNK
        least, step = scales[0][chunk_of], (scales[1] / levels)[chunk_of]
        values = (least + (codes % levels + 0.5) * step) * (1 - 2 * (codes // levels))
        return torch.zeros(numbers).index_put_((positions,), values).view(shape)

    def answer(self, average: torch.Tensor) -> runtime_pb2.Tensor:
        """The message of an average of what such messages held: all of it, in 4 bits, which a model learns as well from
        as from 8."""
        return TopKCompression(density=1.0, bits=4).compress(average)

    def estimate_compression_ratio(self, info: CompressionInfo | None) -> float:
        return min(1.0, (self.density * (self.bits + 2 - math.log2(self.density)) + 32 / CHUNK) / 32)

    def estimate_both_ways(self, senders: int) -> float:
        """Bits of a message and of the answer of so many senders' average, in messages, halved."""
        answer = TopKCompression(1 - (1 - self.density) ** max(1, senders), bits=4)  # no two send the same
        return (1 + answer.estimate_compression_ratio(None) / self.estimate_compression_ratio(None)) / 2

    @property
    def part_size(self) -> int:
        """Bytes of the messages of a round, of which hivemind makes the parts of its tensors."""
        return math.ceil(4 * PART * self.estimate_compression_ratio(None))


def compress_sparse_step(codec: CompressionBase) -> CompressionBase:
    """This codec of states, but for the step that a late peer fetches: where all send sparsely, the average is mostly
    zeros too. It goes in 8 bits then, a third of what it takes with them; as it is where the codec compresses nothing.
    """
    if isinstance(codec, RoleAdaptiveCompression):
        codec = copy.copy(codec)
        codec.role_compressions = codec.role_compressions | {TensorRole.GRADIENT: TopKCompression()}
    return codec
