"""Top-k sparsification: updates of which only the largest entries are sent (SparseLoCo, arXiv 2508.15706).

The sender adds what a message lacks to its next update: error feedback (arXiv 1809.07599). A message
has, in this order:

    bits per value, number of entries                             1 and 4 bytes
    minimum and range of the magnitudes in each chunk             bfloat16
    positions, ascending: low bits, then bitmap of high bits      Elias-Fano: at most -log2(density) + 2 bits each
    values: sign, and one of 2 ** (bits - 1) levels of the range  at 2 bits and density 3 %: 9 bits per entry in all
"""

import math
import struct

import numpy as np
import torch
from torch.nn.functional import pad

CHUNK = 4096  # numbers with a common scale; the same share of each chunk is sent
MAX_SCALE = 1e30  # of a chunk's magnitudes; larger ones are invalid
TINY = 1e-30  # smaller magnitudes become 0: not all machines compute with numbers below 1.2e-38
HEADER = struct.Struct("<BI")


def pack(codes: np.ndarray, bits: int) -> bytes:
    """Pack unsigned integers below 2 ** bits into bytes: the lowest bits of all codes first, then the next bits."""
    return b"".join(np.packbits((codes >> bit).astype(np.uint8) & 1).tobytes() for bit in range(bits))


def unpack(data: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Return the codes, in the smallest type, from which `pack` made these bytes (uint8)."""
    codes = np.zeros(count, np.min_scalar_type(2**bits - 1))
    for plane in np.unpackbits(data.reshape(bits, -(-count // 8)), axis=1, count=count)[::-1]:
        codes = codes + codes | plane
    return codes


def count_low_bits(numbers: int, count: int) -> int:
    """Return the number of low bits of a position, which are not in the bitmap (Elias, 1974; Fano, 1971)."""
    return max(1, numbers // max(1, count)).bit_length() - 1


def decode(buffer: bytes, numbers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the entries of a message, with the same bits on every machine: `values[kinds]` belong to `positions`, and
    all others of its numbers are zero.

    :returns: the positions, ascending, int64; the kinds, chunk * 2 ** bits + code, int64; the values of all kinds,
        float32: in each chunk the levels, then the negative levels
    :raises ValueError: the message is invalid for this many numbers
    """
    bits, count = HEADER.unpack_from(buffer) if len(buffer) >= HEADER.size else (0, 0)
    chunks = -(-numbers // CHUNK)
    low_bits = count_low_bits(numbers, count)
    plane = -(-count // 8)
    places = (numbers >> low_bits) + count + 1
    sizes = [HEADER.size, 4 * chunks, low_bits * plane, -(-places // 8), bits * plane]
    if not 2 <= bits <= 8 or count > numbers or len(buffer) != sum(sizes):
        raise ValueError(f"not a sparse tensor: {len(buffer)} bytes for {count} entries of {numbers}")
    _, scales, low, high, codes = np.split(np.frombuffer(buffer, np.uint8), np.cumsum(sizes)[:-1])
    minima, spread = (scales.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(2, chunks, 1)  # bfloat16
    high = np.flatnonzero(np.unpackbits(high, count=places).view(bool))
    if len(high) != count or not ((minima >= 0) & (minima <= MAX_SCALE) & (spread >= 0) & (spread <= MAX_SCALE)).all():
        raise ValueError("not a sparse tensor: the bitmap or the scales are invalid")
    positions = (high - np.arange(count) << low_bits) | unpack(low, count, low_bits)
    if count and (positions[-1] >= numbers or (positions[1:] <= positions[:-1]).any()):
        raise ValueError("not a sparse tensor: the positions are not ascending or out of range")
    levels = 2 ** (bits - 1)
    # the product is exact: 8 bits of a scale, and at most 8 of a level
    values = minima + (np.arange(levels, dtype=np.float32) + np.float32(0.5)) * (spread * np.float32(1 / levels))
    values[values < TINY] = 0
    kinds = (positions >> CHUNK.bit_length() - 1 << bits) | unpack(codes, count, bits)
    return positions, kinds, np.hstack([values, -values]).ravel()


class TopKCompression:
    """A codec that sends the largest entries of each chunk in a few bits, and never zeros.

    :param density: the maximum share of numbers to send, above 0 and up to 1
    :param bits: the number of bits per value, 2 to 8, including the sign
    """

    def __init__(self, density: float, bits: int = 2):
        self.density = density
        self.bits = bits

    def choose(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the positions of the entries to send, ascending, as int64."""
        chunk = min(CHUNK, len(numbers))
        chunks = (pad(numbers, (0, -len(numbers) % chunk)) if len(numbers) % chunk else numbers).view(-1, chunk)
        # The magnitude, rounded to 11 bits, and the position are one integer: faster than topk, and always as many.
        rest = chunk - math.ceil(self.density * chunk)
        places = torch.arange(chunk, dtype=torch.int32)
        keys = ((part & 0x7FFFF000 | places).numpy() for part in chunks.view(torch.int32).split(16))  # for the cache
        largest = np.concatenate([np.partition(it, rest, axis=1)[:, rest:] & 0xFFF for it in keys])
        largest = torch.from_numpy(np.sort(largest, axis=1) + np.arange(0, chunks.numel(), chunk)[:, None]).flatten()
        return largest[chunks.view(-1)[largest] != 0]  # includes NaN, which the receiver refuses

    def compress(self, numbers: torch.Tensor) -> bytes:
        """Compress float32 numbers of shape (n,) in host memory; receivers refuse them if one is not finite."""
        positions = self.choose(numbers)
        values = numbers[positions]
        chunk_of = positions // CHUNK
        magnitudes = values.abs()
        zeros = torch.zeros(-(-len(numbers) // CHUNK))
        minima, means, maxima = (
            zeros.scatter_reduce(0, chunk_of, magnitudes, it, include_self=False) for it in ("amin", "mean", "amax")
        )
        # with 2 bits, one large entry would leave a single level for all others; error feedback sends its rest later
        spread = torch.minimum(maxima - minima, 2**self.bits * (means - minima).clamp_min(0))
        scales = torch.stack([minima, spread]).bfloat16()
        minima, spread = scales.float()
        levels = 2 ** (self.bits - 1)
        steps = (magnitudes - minima[chunk_of]) / (spread / levels).clamp_min(torch.finfo().tiny)[chunk_of]
        codes = steps.clamp(0, levels - 1).to(torch.uint8) + levels * (values < 0)
        low_bits = count_low_bits(len(numbers), len(positions))
        positions = positions.numpy()
        bitmap = np.zeros((len(numbers) >> low_bits) + len(positions) + 1, np.uint8)
        bitmap[(positions >> low_bits) + np.arange(len(positions))] = 1
        data = HEADER.pack(self.bits, len(positions)) + scales.view(torch.int16).numpy().tobytes()
        return data + pack(positions, low_bits) + np.packbits(bitmap).tobytes() + pack(codes.numpy(), self.bits)

    def estimate_bytes(self, numbers: int) -> float:
        """Return the size of a message of this many numbers, at the maximum density."""
        return numbers / 8 * min(32.0, self.density * (self.bits + 2 - math.log2(self.density)) + 32 / CHUNK)
