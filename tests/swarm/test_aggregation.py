"""The outer step of a commit: the same bits on every machine, and limits to what one peer can change."""

import dataclasses
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ROOT

import swarm.aggregation
from swarm.aggregation import (
    BLOCK,
    MIN_COSINE,
    Contribution,
    Numbers,
    aggregate,
    check_block,
    compute_cosines,
    encode,
    find_agreement,
    find_opposed,
    restore,
    summarize,
)
from swarm.sparse import CHUNK, HEADER, TINY, TopKCompression, decode

CODEC = TopKCompression(0.03, 2)
SIZES = (3, 3 * CHUNK + 5, BLOCK)  # two blocks, and tensors that cross their limits


def make_numbers(seed: int | None = None, sizes: tuple[int, ...] = SIZES, scale: float = 1e-3) -> Numbers:
    generator = torch.Generator().manual_seed(seed or 0)
    return Numbers([torch.randn(n, generator=generator) * scale if seed else torch.zeros(n) for n in sizes])


def make_offer(seed: int, sizes: tuple[int, ...] = SIZES, scale: float = 1e-3, **fields) -> Contribution:
    blocks = encode(make_numbers(seed, sizes, scale), make_numbers(None, sizes), CODEC)
    return Contribution(**dict(peer=bytes([seed]), samples=10, epochs_late=0, blocks=blocks) | fields)


def read_all(numbers: Numbers) -> torch.Tensor:
    return torch.cat([numbers.read(block) for block in range(numbers.num_blocks)])


def apply(offers: list[Contribution], sizes: tuple[int, ...] = SIZES) -> tuple[list[float], torch.Tensor]:
    anchor, momentum = make_numbers(None, sizes), make_numbers(None, sizes)
    weights = aggregate(anchor, momentum, offers, lr=1.0, outer_momentum=0.0, seed=b"")
    return weights, read_all(anchor)


def compute_digests(path: str) -> str:
    anchor = Numbers([(torch.arange(size) * 7 % 1999 - 999).float() * 2e-5 for size in SIZES])
    momentum, digests = Numbers([(torch.arange(size) * 11 % 1999 - 999).float() * 1e-40 for size in SIZES]), []
    for offers in json.loads(Path(path).read_text()):
        offers = [Contribution(bytes([i]), i + 5, 0, [*map(bytes.fromhex, offer)]) for i, offer in enumerate(offers)]
        aggregate(anchor, momentum, offers, lr=0.7, outer_momentum=0.6, seed=b"")
        digests.append(swarm.aggregation.compute_digest(anchor, momentum).hex())
    return " ".join(digests)


def test_digest_same_for_threads_and_instructions(tmp_path):
    path = tmp_path / "offers.json"
    offers = [[make_offer(seed, scale=seed * scale).blocks for seed in range(1, 5)] for scale in (1e-3, 1e-3, 1e-29)]
    path.write_text(json.dumps([[[block.hex() for block in blocks] for blocks in epoch] for epoch in offers]))
    processes = []
    for threads, capability, flush in ((1, "default", False), (2, "avx2", True)):
        program = "import sys, torch; sys.path[:0] = ['tests', 'tests/swarm']; import test_aggregation as t; "
        program += f"torch.set_num_threads({threads}); torch.set_flush_denormal({flush}); "
        program += f"print(t.compute_digests({str(path)!r}), end='')"
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        options = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(subprocess.Popen([sys.executable, "-c", program], **options))
    outputs = {compute_digests(path), *(process.communicate()[0] for process in processes)}
    assert len(outputs) == 1 and len(set(outputs.pop().split())) == 3


def test_aggregate_matches_numpy_in_any_order():
    sizes = (2 * CHUNK,)
    offers = [make_offer(seed, sizes, samples=samples) for seed, samples in ((1, 3), (2, 4), (3, 40))]
    anchor, momentum = make_numbers(8, sizes), make_numbers(9, sizes)
    offers[2] = dataclasses.replace(offers[2], epochs_late=1)
    total = np.zeros(2 * CHUNK, np.float32)
    expected, velocity = read_all(anchor).numpy(), read_all(momentum).numpy()
    weights = aggregate(anchor, momentum, offers[::-1], lr=0.5, outer_momentum=0.5, seed=b"")[::-1]
    updates = np.zeros((3, 2 * CHUNK), np.float32)
    for update, seed in zip(updates, (1, 2, 3), strict=True):
        positions, kinds, values = decode(CODEC.compress(read_all(make_numbers(seed, sizes))), len(update))
        update[positions] = values[kinds]
    norms = [float(np.linalg.norm(update.astype(np.float64))) for update in updates]
    for update, norm, weight, samples in zip(updates, norms, weights, (3, 4, 4), strict=True):
        assert weight == pytest.approx(samples / 11 * min(1, sorted(norms)[1] / norm), rel=1e-12)
        total += np.float32(weight) * update
    velocity = np.float32(0.5) * velocity + total
    assert np.array_equal(read_all(momentum).numpy(), velocity)
    assert np.array_equal(read_all(anchor).numpy(), expected - np.float32(0.5) * (np.float32(0.5) * velocity + total))


def test_encode_and_restore_lose_nothing():
    update, residual = make_numbers(1), make_numbers(2)
    before, blocks = read_all(update) + read_all(residual), encode(update, residual, CODEC)
    assert read_all(residual).norm() < 0.9 * before.norm()
    restore(blocks, residual)
    assert torch.allclose(read_all(residual), before, atol=1e-9)


def test_aggregate_limits_outlier_to_median():
    offers = [make_offer(seed) for seed in range(1, 4)]
    updates = [apply([offer])[1] for offer in offers]
    weights, anchor = apply([*offers, make_offer(4, scale=1e25, samples=10**9)])
    moved = anchor - sum(weight * update for weight, update in zip(weights, updates, strict=False))
    assert moved.norm() <= 2 / 5 * max(update.norm() for update in updates) * 1.0001
    assert apply([*offers, make_offer(4, scale=0.0)])[0][3] == 0


def test_copies_share_weight_of_heaviest():
    original, other = make_offer(1), make_offer(2)
    copies = [dataclasses.replace(original, peer=bytes([peer]), samples=peer) for peer in (3, 4)]
    weights, _ = apply([original, other, *copies])
    assert weights[0] == weights[2] == weights[3] == pytest.approx(weights[1] / 3, rel=1e-12)


@pytest.mark.parametrize("blocks", [lambda b: b[::-1], lambda b: b[:1], lambda b: [], lambda b: [b"", *b[1:]]])
def test_invalid_offers_do_not_count(blocks):
    """The owner of an offer names blocks that are here already, of another update or of the first anchor."""
    offers = [make_offer(seed) for seed in range(1, 4)]
    expected, anchor = apply(offers)
    invalid = dataclasses.replace(offers[0], peer=b"x", blocks=blocks(offers[0].blocks))
    weights, after = apply([*offers, invalid])
    assert weights == [*expected, 0.0] and after.equal(anchor) and apply([invalid])[0] == [0.0]


@pytest.mark.parametrize("honest", [3, 5])
def test_reversed_offers_have_no_weight(honest):
    """The honest updates have a little in common; two voters and many others reverse it."""
    common = read_all(make_numbers(50))
    updates = [0.5 * common + read_all(make_numbers(seed)) for seed in range(1, 1 + honest)]
    updates += [-10 * common + read_all(make_numbers(seed)) for seed in range(6, 14)]
    sizes = (len(common),)
    zeros = make_numbers(None, sizes)
    blobs = [encode(Numbers([update]), zeros, CODEC) for update in updates]
    offers = [Contribution(bytes([i]), 10, 0, blob, is_voter=i < honest + 2) for i, blob in enumerate(blobs)]
    weights = apply(offers, sizes)[0]
    assert min(weights[:honest]) > 0.1 and weights[honest:] == [0.0] * 8
    assert min(apply([offers[0], offers[honest]], sizes)[0]) > 0, "either may be right"


def test_others_have_a_quarter_of_weight():
    """Offers of many new keys, with small norms, large claims, or copies of a voter's, do not displace the voters."""
    voters = [make_offer(seed) for seed in (1, 2, 3)]
    others = [make_offer(seed, samples=10**6, scale=1e-6, is_voter=False) for seed in range(4, 11)]
    copies = [dataclasses.replace(voters[0], peer=bytes([seed]), is_voter=False) for seed in range(11, 17)]
    weights = apply([*voters, *others, *copies])[0]
    assert weights[:3] == pytest.approx([1 / 4] * 3, rel=0.01) and weights[10:] == [0.0] * 6
    assert sum(weights[3:10]) == pytest.approx(1 / 4, rel=1e-9)
    assert apply([*voters, others[0]])[0][3] == pytest.approx(1 / 4, rel=1e-9)
    assert apply(others)[0] == pytest.approx([1 / 7] * 7, rel=0.01)


def test_reversed_offer_cannot_hide():
    """A fifth of its chunks has tiny numbers. Their signs fit the others in the hash of an earlier commit."""
    common, size = read_all(make_numbers(50)), CHUNK * 50
    updates = [common[:size] + read_all(make_numbers(seed))[:size] for seed in (1, 2, 3)]
    blobs = [encode(Numbers([update]), make_numbers(None, (size,)), CODEC) for update in updates]
    numbers, seed = make_numbers(None, (size,)), b"earlier"
    sums = sum(summarize(blob, numbers, seed)[1] for blob in blobs)
    factor, offset = np.frombuffer(hashlib.sha256(seed).digest()[:16], "<u8")
    buckets = (np.arange(size, dtype=np.uint64) + offset) * (factor | np.uint64(1)) >> np.uint64(49)
    hidden = torch.from_numpy(np.concatenate([sums, -sums])[buckets.astype(np.int64)]).float()
    update = -sum(updates).view(-1, CHUNK)
    update[::5] = hidden.view(-1, CHUNK)[::5] * 1e-12
    offers = [Contribution(bytes([i]), 10, 0, blob) for i, blob in enumerate(blobs)]
    offers.append(Contribution(b"x", 10**9, 0, encode(Numbers([update.view(-1)]), make_numbers(None, (size,)), CODEC)))
    for seed in (b"earlier", b"this"):
        weights = aggregate(numbers, make_numbers(None, (size,)), offers, lr=0.0, outer_momentum=0.0, seed=seed)
        assert weights[3] == 0 and min(weights[:3]) > 0.3


def test_check_block_refuses_scale_and_codec():
    data = bytearray(make_offer(1, (CHUNK,)).blocks[0])
    with pytest.raises(ValueError, match="entries"):
        check_block(bytes(data), CHUNK, TopKCompression(0.02, 2))
    for scale in (math.nan, math.inf, 2e30, -1.0):
        data[HEADER.size : HEADER.size + 2] = struct.pack("<f", scale)[2:]
        with pytest.raises(ValueError, match="not a sparse tensor"):
            check_block(bytes(data), CHUNK, CODEC)


@settings(max_examples=200, deadline=None, database=None)
@given(st.integers(1, 2 * CHUNK), st.data())
def test_any_bytes_raise_or_stay_finite(size, data):
    offer = make_offer(1, (size,))
    block = bytearray(offer.blocks[0])
    for place in data.draw(st.lists(st.integers(0, len(block) - 1), max_size=6)):
        block[place] = data.draw(st.integers(0, 255))
    try:
        check_block(bytes(block), size, CODEC)
    except ValueError:
        return
    for offers in ([offer], [make_offer(1, (size,)), make_offer(2, (size,))], []):
        changed = dataclasses.replace(offer, peer=b"x", samples=10**12, blocks=[bytes(block)])
        anchor = apply([*offers, changed], (size,))[1]
        assert anchor.isfinite().all() and not ((anchor != 0) & (anchor.abs() < TINY)).any()


def test_update_that_avoids_positions_of_others_is_opposed():
    """It looks like noise to compressed updates: with it, one of four peers made a simulated run diverge."""
    generator = torch.Generator().manual_seed(0)
    codec = TopKCompression(0.03)
    common = torch.randn(50_000, generator=generator)
    wholes = [common + 2 * torch.randn(50_000, generator=generator) for _ in range(4)]
    rests = [whole.clone() for whole in wholes]
    blobs = [encode(Numbers([torch.zeros(50_000)]), Numbers([rest]), codec) for rest in rests]
    reverse = -common
    for whole in wholes[:3]:
        reverse[codec.choose(whole)] = 0
    noise = torch.randn(50_000, generator=generator)
    hostile = [encode(Numbers([torch.zeros(50_000)]), Numbers([it]), codec) for it in (reverse, noise)]
    sketches = [summarize(blob, Numbers([common]), b"")[1] for blob in [*blobs[:3], hostile[0]]]
    assert find_agreement(compute_cosines(sketches), 3, [0, 1, 2]) > MIN_COSINE
    for index in range(3):
        others = [*blobs, *hostile, [], [b"invalid"]]
        assert find_opposed(Numbers([rests[index]]), blobs[index], others) == [4]
