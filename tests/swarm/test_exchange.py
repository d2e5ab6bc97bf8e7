"""Blobs and messages between peers on loopback: spread, failing holders, clients, limits, the end."""

import os
import threading

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from processes import LOOPBACK, make_prefix

from swarm.dht import DHT
from swarm.exchange import BlobStore, Exchange, InvalidBlobError, choose_source, plan_loads

NUM_BLOCKS, BLOCK_BYTES = 6, 20_000
INVALID = b"invalid"


def check_block(data: bytes, number: int) -> None:
    if data.startswith(INVALID):
        raise ValueError(f"block {number}")


class UncheckedStore(BlobStore):
    """A store that serves wrong bytes."""

    def get(self, name: bytes) -> bytes:
        return (self.folder / name.hex()).read_bytes()


def make_blocks() -> list[bytes]:
    return [os.urandom(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]


@pytest.fixture(scope="module")
def dhts():
    """The DHTs of two peers and a client."""
    started = []
    try:
        for number in range(3):
            RSAPrivateKey._process_wide_key = None
            peers = [str(maddr) for dht in started for maddr in dht.get_visible_maddrs()]
            is_client = number == 2
            started.append(
                DHT(peers, host_maddrs=[LOOPBACK[1]], start=True, client_mode=is_client, no_listen=is_client)
            )
        yield started
    finally:
        RSAPrivateKey._process_wide_key = None
        for dht in started:
            dht.shutdown()


@pytest.fixture
def exchanges(dhts, tmp_path):
    prefix, started = make_prefix(), []
    for number, dht in enumerate(dhts):
        store = BlobStore(tmp_path / str(number), 10**7)
        answer = (b"%d " % number).__add__
        exchange = Exchange(
            dht,
            prefix,
            store,
            NUM_BLOCKS,
            2 * BLOCK_BYTES,
            check_block,
            lambda sender, message, answer=answer: answer(message),
        )
        exchange.participants = frozenset(dht.peer_id for dht in dhts)
        started.append(exchange)
    for exchange in started[:2]:  # the client opens its connections
        assert started[2].send(exchange.peer_id, b"offer").result(20).endswith(b" offer")
    yield started
    for exchange in started:
        exchange.shutdown()


def fetch(exchange: Exchange, blob: bytes, owner: PeerID, *holders: PeerID) -> None:
    exchange.fetch(blob, owner, dict.fromkeys(holders, 20.0), NUM_BLOCKS * BLOCK_BYTES).result(60)


def test_exchange_of_all_blobs_includes_client(exchanges):
    blobs = [make_blocks() for _ in exchanges]
    names = [exchange.store.add(blob) for exchange, blob in zip(exchanges, blobs, strict=True)]
    holders = {exchange.peer_id: 20.0 for exchange in exchanges[:2]}
    futures = [
        exchange.fetch(name, owner.peer_id, holders, NUM_BLOCKS * BLOCK_BYTES)
        for exchange in exchanges
        for owner, name in zip(exchanges, names, strict=True)
    ]
    for future in futures:
        future.result(60)
    assert all(
        exchange.store.read(name) == blob for exchange in exchanges for name, blob in zip(names, blobs, strict=True)
    )


def test_fetch_from_lying_holder_uses_another(exchanges):
    one, two, client = exchanges
    blocks = make_blocks()
    blob = one.store.add(blocks)
    two.store.add(blocks)
    for path in two.store.folder.iterdir():
        if path.stat().st_size == BLOCK_BYTES:
            path.write_bytes(b"x" * BLOCK_BYTES)
    two.store = UncheckedStore(two.store.folder, 10**7)
    fetch(client, blob, two.peer_id, one.peer_id, two.peer_id)
    assert client.store.read(blob) == blocks


def test_fetch_of_invalid_blob_fails(exchanges):
    blob = exchanges[0].store.add([INVALID, *make_blocks()[1:]])
    with pytest.raises(InvalidBlobError, match="block 0"):
        fetch(exchanges[1], blob, exchanges[0].peer_id, exchanges[0].peer_id)
    short = exchanges[0].store.add(make_blocks()[1:])
    with pytest.raises(InvalidBlobError, match="5 blocks instead of 6"):
        fetch(exchanges[1], short, exchanges[0].peer_id, exchanges[0].peer_id)


def test_message_above_limit_is_refused(exchanges):
    with pytest.raises(Exception, match="too large"):
        exchanges[0].send(exchanges[1].peer_id, bytes(2**16 + 1)).result(20)


def test_shutdown_leaves_no_thread(dhts, tmp_path):
    store = BlobStore(tmp_path / "store", 10**7)
    Exchange(dhts[0], make_prefix(), store, NUM_BLOCKS, BLOCK_BYTES, check_block, lambda *_: b"").shutdown()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("exchange")]


def test_store_keeps_newest_and_drops_damaged(tmp_path):
    store = BlobStore(tmp_path, 3 * NUM_BLOCKS * BLOCK_BYTES)
    blobs = [store.add(make_blocks()) for _ in range(5)]
    assert not store.has(blobs[0]) and store.has(blobs[-1]) and BlobStore(tmp_path, 10**7).has(blobs[-1])
    (tmp_path / store.list_hashes(blobs[-1])[0].hex()).write_bytes(b"damaged")
    with pytest.raises(KeyError):
        store.read(blobs[-1])
    assert not store.has(blobs[-1])


def test_loads_spare_slow_lines_if_time_allows():
    peers = [PeerID(bytes([number])) for number in range(17)]
    equal = plan_loads(dict.fromkeys(peers[:8], 20.0), 500_000, 0.0)
    assert all(load == pytest.approx(7) for load in equal.values())
    assert all(choose_source(peer, at / 20, equal) == peer for peer in peers[:8] for at in range(20))
    aided = dict.fromkeys(peers[:16], 20.0) | {peers[16]: 100.0}
    loads = plan_loads(aided, 500_000, 15.0)
    assert loads[peers[0]] == 0 and choose_source(peers[0], 0.5, loads) == peers[16]
