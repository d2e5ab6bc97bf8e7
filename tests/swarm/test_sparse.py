"""Sparse messages: their values, their bytes, and invalid ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.sparse import CHUNK, HEADER, TopKCompression, decode

SIZES = [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 10_000]


def random_tensor(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e-3


def read(data: bytes, size: int) -> torch.Tensor:
    positions, kinds, values = decode(data, size)
    numbers = torch.zeros(size)
    numbers[torch.from_numpy(positions)] = torch.from_numpy(values[kinds])
    return numbers


def send(codec: TopKCompression, tensor: torch.Tensor) -> torch.Tensor:
    return read(codec.compress(tensor), len(tensor))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", [0.01, 0.03, 0.5, 1.0])
def test_sparse_keeps_largest_of_each_chunk(size, density):
    tensor = random_tensor(size)
    arrived = send(TopKCompression(density, bits=8), tensor)
    assert arrived.shape == tensor.shape and arrived.dtype == torch.float32
    for numbers, own in zip(tensor.flatten().split(CHUNK), arrived.flatten().split(CHUNK), strict=True):
        is_sent, count = own != 0, math.ceil(density * min(CHUNK, tensor.numel()))
        assert is_sent.sum() == min(count, len(numbers))
        assert is_sent.all() or numbers[is_sent].abs().min() >= (1 - 2**-11) * numbers[~is_sent].abs().max()
        spread = numbers.abs().max() - numbers[is_sent].abs().min()
        assert (own - numbers)[is_sent].abs().max() <= spread / 128 + 0.005 * numbers.abs().max()


@pytest.mark.parametrize("bits, error", [(2, 0.12), (3, 0.07), (4, 0.04), (8, 0.005)])
def test_sparse_quantization_error_is_bounded(bits, error):
    tensor = random_tensor(100_000)
    arrived = send(TopKCompression(0.03, bits), tensor)
    is_sent = arrived != 0
    assert (arrived - tensor)[is_sent].norm() < error * tensor[is_sent].norm()


@pytest.mark.parametrize("share, bits, most", [(0.03, 2, 0.0355), (0.03, 8, 0.0585), (0.01, 2, 0.0145), (0.1, 4, 0.13)])
def test_sparse_bytes_per_parameter(share, bits, most):
    codec, tensor = TopKCompression(share, bits), random_tensor(2**18)
    num_bytes = len(codec.compress(tensor))
    assert num_bytes / tensor.numel() < most
    assert num_bytes == pytest.approx(codec.estimate_bytes(tensor.numel()), rel=0.02)


def test_sparse_error_feedback_sends_rest_later():
    """Error feedback: the sum of what arrives follows the sum of what was to be sent."""
    codec, unsent, arrived = TopKCompression(0.03, 2), torch.zeros(10_000), torch.zeros(10_000)
    for _ in range(300):
        unsent += random_tensor(10_000)
        sent = send(codec, unsent)
        arrived, unsent = arrived + sent, unsent - sent
    assert torch.allclose(arrived + unsent, 300 * random_tensor(10_000), atol=1e-4)
    assert unsent.norm() < 0.15 * arrived.norm()


def test_sparse_handles_zeros_and_outlier():
    codec = TopKCompression(0.03, 2)
    assert not send(codec, torch.zeros(5000)).any()
    tensor = random_tensor(5000)
    tensor[17] = 1e6
    arrived = send(codec, tensor)
    assert arrived[17] > 0 and (arrived - tensor)[arrived != 0][1:].norm() < tensor.norm()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_sparse_refuses_nonfinite(number):
    tensor = random_tensor(5000)
    tensor[17] = number
    with pytest.raises(ValueError, match="not a sparse tensor"):
        send(TopKCompression(0.03, 2), tensor)


@pytest.mark.parametrize(
    "header, tail, size",
    [((2, 0), 0, 1), ((2, 0), 0, 2**40), ((2, 2**32 - 1), 100, 2**20), ((0, 1), 100, 100), ((255, 1), 100, 100)],
)
def test_sparse_checks_sizes_before_allocation(header, tail, size):
    for data in (HEADER.pack(*header) + bytes(tail), b""):
        with pytest.raises(ValueError, match="not a sparse tensor"):
            decode(data, size)


def check_bytes(data: bytes, size: int) -> None:
    """Assert that these bytes have finite numbers, or are refused."""
    try:
        assert read(data, size).isfinite().all()
    except ValueError as e:
        assert "not a sparse tensor" in str(e)


@settings(max_examples=300, deadline=None, database=None)
@given(st.integers(0, 255), st.binary(max_size=200), st.integers(1, 200), st.integers(1, 2**32))
def test_sparse_random_bytes_raise_value_error(bits, tail, count, size):
    check_bytes(HEADER.pack(bits, count) + tail, size)
    check_bytes(tail, size)


@settings(max_examples=300, deadline=None, database=None)
@given(st.integers(1, 9000), st.sampled_from([0.01, 0.1, 1.0]), st.integers(2, 8), st.data())
def test_sparse_changed_bytes_raise_value_error(size, density, bits, data):
    changed = bytearray(TopKCompression(density, bits).compress(random_tensor(size)))
    for place in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=5)):
        changed[place] = data.draw(st.integers(0, 255))
    check_bytes(bytes(changed), size)
