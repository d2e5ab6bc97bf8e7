"""Sparse messages: their values, their bytes, and invalid ones."""

import math

import pytest
import torch
from hivemind.compression import CompressionInfo, deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.patches import install
from swarm.sparse import CHUNK, HEADER, MAX_NUMBERS, TopKCompression

install()  # by which hivemind finds the codec

SHAPES = [(1,), (7,), (3, 5), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (10, 1000), (2, 3, 2500)]


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1e-3


def send(codec: TopKCompression, tensor: torch.Tensor) -> torch.Tensor:
    """Over hivemind's way: bytes, and the codec found by what the message says of itself."""
    message = codec.compress(tensor, CompressionInfo.from_tensor(tensor))
    return deserialize_torch_tensor(runtime_pb2.Tensor.FromString(message.SerializeToString()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.01, 0.03, 0.5, 1.0])
def test_sparse_keeps_largest_of_each_chunk(shape, density):
    tensor = random_tensor(*shape)
    arrived = send(TopKCompression(density, bits=8), tensor)
    assert arrived.shape == tensor.shape and arrived.dtype == torch.float32
    for numbers, own in zip(tensor.flatten().split(CHUNK), arrived.flatten().split(CHUNK), strict=True):
        is_sent = own != 0
        count = math.ceil(density * min(CHUNK, tensor.numel()))
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


@pytest.mark.parametrize(
    "density, bits, most", [(0.03, 2, 0.0355), (0.03, 8, 0.0585), (0.01, 2, 0.0145), (0.1, 4, 0.13)]
)
def test_sparse_bytes_per_parameter(density, bits, most):
    codec, tensor = TopKCompression(density, bits), random_tensor(2**18)
    size = len(codec.compress(tensor).buffer) / tensor.numel()
    assert size < most
    assert size == pytest.approx(4 * codec.estimate_compression_ratio(CompressionInfo.from_tensor(tensor)), rel=0.02)


def test_sparse_answer_keeps_all_nonzeros():
    """hivemind makes the answers of a round with what stands in its table, whatever the sender's own density is."""
    average = sum(send(TopKCompression(0.03, 2), random_tensor(20_000, seed=seed)) for seed in range(3)) / 3
    answer = deserialize_torch_tensor(serialize_torch_tensor(average, runtime_pb2.QUANTILE_8BIT))
    assert torch.equal(answer != 0, average != 0) and 0.08 < (answer != 0).float().mean() < 0.09
    assert (answer - average).norm() < 0.1 * average.norm()


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


def make_message(buffer: bytes, *shape: int) -> runtime_pb2.Tensor:
    return runtime_pb2.Tensor(compression=runtime_pb2.QUANTILE_8BIT, buffer=buffer, size=shape, dtype="float32")


@pytest.mark.parametrize(
    "buffer, shape",
    [
        (b"", (5,)),
        (HEADER.pack(2, 0), ()),  # claims one number, without its scales
        (HEADER.pack(2, 0), (0,)),
        (HEADER.pack(2, 0), (MAX_NUMBERS + 1,)),
        (HEADER.pack(2, 0), (2**32 - 1,) * 8),
        (HEADER.pack(2, 0), (1,) * 9),
        (HEADER.pack(2, 2**32 - 1) + bytes(100), (2**20,)),
        (HEADER.pack(0, 1) + bytes(100), (100,)),
        (HEADER.pack(255, 1) + bytes(100), (100,)),
    ],
)
def test_sparse_checks_sizes_before_allocation(buffer, shape):
    with pytest.raises(ValueError, match="not a sparse tensor"):
        TopKCompression().extract(make_message(buffer, *shape))


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.integers(0, 255), st.binary(max_size=200), st.integers(1, 200), st.lists(st.integers(0, 2**32 - 1), max_size=10)
)
def test_sparse_random_bytes_raise_value_error(bits, tail, count, shape):
    for message in (make_message(HEADER.pack(bits, count) + tail, *shape), make_message(tail, *shape)):
        try:
            assert TopKCompression().extract(message).isfinite().all()
        except ValueError as e:
            assert "not a sparse tensor" in str(e)


@settings(max_examples=300, deadline=None, database=None)
@given(st.integers(1, 9000), st.sampled_from([0.01, 0.1, 1.0]), st.integers(2, 8), st.data())
def test_sparse_changed_bytes_raise_value_error(size, density, bits, data):
    message = TopKCompression(density, bits).compress(random_tensor(size))
    buffer = bytearray(message.buffer)
    for place in data.draw(st.lists(st.integers(0, len(buffer) - 1), min_size=1, max_size=5)):
        buffer[place] = data.draw(st.integers(0, 255))
    try:
        arrived = TopKCompression().extract(make_message(bytes(buffer), size))
        assert arrived.shape == (size,) and arrived.isfinite().all()
    except ValueError as e:
        assert "not a sparse tensor" in str(e)
