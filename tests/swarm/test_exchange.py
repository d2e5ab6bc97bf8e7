"""Blobs and messages between peers on loopback: spread, failing holders, clients, limits, the end."""

import asyncio
import contextlib
import os
import struct
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from processes import LOOPBACK, make_prefix, wait_until

import swarm.exchange
from swarm import SwarmError
from swarm.dht import DHT
from swarm.exchange import REQUEST, BlobStore, Download, Exchange, InvalidBlobError, choose_source, plan_loads

NUM_BLOCKS, BLOCK_BYTES = 6, 20_000
INVALID = b"invalid"


def check_block(data: bytes, number: int) -> None:
    if data.startswith(INVALID):
        raise ValueError(f"block {number}")


def make_store(folder: Path, max_bytes: int = 10**8, check=check_block) -> BlobStore:
    return BlobStore(folder, max_bytes, NUM_BLOCKS, 2 * BLOCK_BYTES, check)


def find_hashes(store: BlobStore, blob: bytes) -> Path:
    """Return the file with the hashes of a blob."""
    return store.folder / f"-1 {blob.hex()}"


def make_blocks() -> list[bytes]:
    return [os.urandom(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]


def start_dht(*others, is_client: bool = False) -> DHT:
    RSAPrivateKey._process_wide_key = RSAPrivateKey()
    peers = [str(maddr) for dht in others for maddr in dht.get_visible_maddrs()]
    return DHT(peers, host_maddrs=[LOOPBACK[1]], start=True, client_mode=is_client, no_listen=is_client)


@pytest.fixture(scope="module")
def dhts():
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, RSAPrivateKey, "_process_wide_key", None)
        started = []
        for number in range(3):
            started.append(start_dht(*started, is_client=number == 2))
            stack.callback(started[-1].shutdown)
        yield started


@pytest.fixture
def start(dhts, tmp_path):
    """Return a function that starts the exchange of a DHT; all its peers are participants."""
    prefix, started = make_prefix(), []

    def start_exchange(dht: DHT) -> Exchange:
        store = make_store(tmp_path / str(len(started)))
        exchange = Exchange(dht, prefix, lambda _, message: b"0 " + message, store)
        started.append(exchange)
        for other in started:
            other.participants = other.urgent = frozenset(it.peer_id for it in started)
        return exchange

    yield start_exchange
    for exchange in started:
        if exchange._thread.is_alive():
            exchange.shutdown()


@pytest.fixture
def exchanges(dhts, start):
    started = [start(dht) for dht in dhts]
    connect(*started)
    return started


def connect(*exchanges: Exchange) -> None:
    """Let the last one, a client, open its connections."""
    for exchange in exchanges[:-1]:
        assert exchanges[-1].send(exchange.peer_id, b"offer").result(20).endswith(b" offer")


def request(exchange: Exchange, blob: bytes, owner: Exchange, holders: dict[Exchange, float | None]) -> Future:
    """Begin to fetch a blob from these holders with their Mbit/s."""
    mbits = {holder.peer_id: number for holder, number in holders.items()}
    return exchange.fetch(blob, owner.peer_id, mbits, NUM_BLOCKS * BLOCK_BYTES, exchange.stores[0])


def fetch(exchange: Exchange, blob: bytes, owner: Exchange, *holders: Exchange) -> None:
    """Fetch a blob from these holders, of which the later ones have more Mbit/s."""
    request(exchange, blob, owner, {holder: 20.0 * 50**index for index, holder in enumerate(holders)}).result(60)


def count_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_exchange_of_all_blobs_includes_client(exchanges):
    blobs = [make_blocks() for _ in exchanges]
    names = [exchange.stores[0].add(blob) for exchange, blob in zip(exchanges, blobs, strict=True)]
    holders, owners = dict.fromkeys(exchanges[:2], 20.0), zip(exchanges, names, strict=True)
    futures = [request(it, name, owner, holders) for owner, name in owners for it in exchanges]
    for future in futures:
        future.result(60)
    for exchange in exchanges:
        assert [list(exchange.stores[0].open(name)) for name in names] == blobs


def test_voters_replace_source_that_stalls(exchanges, monkeypatch):
    """They have what they voted for, but an owner may send it to some of them only."""
    monkeypatch.setattr("swarm.exchange.MIN_STALL", 60.0)
    (owner, voter, client), blocks = exchanges, make_blocks()
    blob = [it.stores[0].add(blocks) for it in (owner, voter)][0]
    owner._send_block = lambda *_: asyncio.sleep(60)
    waiting = request(client, blob, owner, {owner: 20.0})
    with pytest.raises(TimeoutError):
        waiting.result(1.0)
    options = {owner.peer_id: 20.0, voter.peer_id: 0.1}, NUM_BLOCKS * BLOCK_BYTES, client.stores[0]
    client.fetch(blob, owner.peer_id, *options, voters=frozenset({voter.peer_id})).result(30)
    assert waiting.cancelled() and list(client.stores[0].open(blob)) == blocks


@pytest.mark.parametrize("fault", ["silent", "dripping", "wrong bytes"])
def test_fetch_from_faulty_relay_uses_owner(exchanges, monkeypatch, fault):
    async def drip(peer, number, data, writer) -> None:
        for at in range(len(data)):
            await asyncio.sleep(0.2)
            writer.write(data[at : at + 1])

    monkeypatch.setattr("swarm.exchange.MIN_STALL", 1.0)
    owner, relay, client = exchanges
    blocks, others = make_blocks(), make_blocks()
    blob = owner.stores[0].add(blocks)
    relay.stores[0].add(blocks)
    if fault == "silent":
        relay._serve_blocks = lambda *_: asyncio.sleep(600)
    elif fault == "dripping":
        relay._send_block = drip
    else:
        relay.stores = (store := make_store(relay.stores[0].folder),)
        hashes = store.get(blob)
        store.get = lambda name, _=0: hashes if name == blob else bytes(BLOCK_BYTES)
    fetch(client, blob, owner, owner, relay)
    assert list(client.stores[0].open(blob)) == blocks
    # the owner may be at fault, so the relay stays the first choice for other owners
    assert client._excluded.keys() == {(owner.peer_id, relay.peer_id)}
    blob = owner.stores[0].add(others)
    requests = relay._counts["request", client.peer_id]
    fetch(client, blob, owner, owner, relay)
    assert relay._counts["request", client.peer_id] <= requests


def test_slow_relay_is_replaced_by_owner(exchanges, monkeypatch):
    """A false claim makes it the only relay. The rates are a tenth of real ones: 20, 200 and 0.6 Mbit/s."""
    monkeypatch.setattr("swarm.exchange.MIN_MBITS", 0.05)
    owner, relay, client = exchanges
    blob = owner.stores[0].add(blocks := make_blocks())
    relay.stores[0].add(blocks)
    send = relay._send_block

    async def send_slowly(peer, number, data, writer) -> None:
        await asyncio.sleep(8e-6 * len(data) / 0.06)
        await send(peer, number, data, writer)

    relay._send_block = send_slowly
    seconds = 8e-6 * NUM_BLOCKS * BLOCK_BYTES / 0.06  # of the whole blob at the relay's rate: 16
    request(client, blob, owner, {owner: 2.0, relay: 20.0}).result(0.75 * seconds)
    assert list(client.stores[0].open(blob)) == blocks
    assert client._excluded.keys() == {(owner.peer_id, relay.peer_id)}


@pytest.mark.parametrize(
    ("uplinks", "source", "mbits"),
    [
        ([20.0, 200.0, 20.0, 20.0, 20.0], 1, 1.25),
        ([20.0, 200.0, 20.0, 20.0, 20.0], 0, 0.5),  # an owner whose uplink was overestimated is the only source
        ([20.0, 1000.0, *[20.0] * 13], 1, 0.5),  # of 15 peers, the owner would send 1.4 Mbit/s to each
        ([20.0, 2.0, 20.0], 1, 0.5),
        ([0.5, *[200.0] * 7], 1, 0.5),  # the first state of a log, in which no claims count
    ],
)
def test_relay_needs_quarter_of_owner_rate(tmp_path, uplinks, source, mbits):
    peers = [PeerID(bytes([number])) for number in range(len(uplinks))]
    download = Download(bytes(32), peers[0], NUM_BLOCKS * BLOCK_BYTES, make_store(tmp_path))
    download.uplinks = dict(zip(peers, uplinks, strict=True))
    assert download.find_least_mbits(peers[source]) == mbits


def test_fetch_from_leaving_owner_uses_another(dhts, start):
    dht = start_dht(dhts[0])
    owner, relay, client = start(dht), start(dhts[1]), start(dhts[2])
    connect(owner, relay, client)
    blocks = make_blocks()
    blob = owner.stores[0].add(blocks)
    fetch(relay, blob, owner, owner)
    dht.uplink.set_bandwidth(0.2, is_fixed=True)
    future = request(client, blob, owner, {owner: 1000.0, relay: 1.0})
    wait_until(lambda: len(list(client.stores[0].folder.iterdir())) > 1, 20, "a block")
    assert not client.stores[0].has(blob)
    owner.shutdown()
    dht.shutdown()
    future.result(20)
    assert list(client.stores[0].open(blob)) == blocks
    find_hashes(client.stores[0], blob).unlink()
    fetch(client, blob, owner, owner, relay)
    assert list(client.stores[0].open(blob)) == blocks


def test_relay_serves_blocks_that_come_meanwhile(exchanges, monkeypatch):
    """Otherwise, the slow owner sends them again, and the relay is the last choice for ten minutes."""
    monkeypatch.setattr("swarm.exchange.UNKNOWN_BLOB_TIMEOUT", 0.0)
    owner, relay, client = exchanges
    first, *others = blocks = make_blocks()
    blob, send = owner.stores[0].add(blocks), relay._send_block
    relay.stores[0].put(owner.stores[0].get(blob))
    relay.stores[0].put(first, 0)

    async def send_late(*args) -> None:
        await send(*args)
        for number, block in enumerate(others, 1):
            relay.stores[0].put(block, number)

    relay._send_block = send_late
    fetch(client, blob, owner, owner, relay)
    assert owner._counts["block", client.peer_id] == 0 and relay._counts["block", client.peer_id] == NUM_BLOCKS


def test_fetch_uses_client_if_no_holder_has_blob(exchanges):
    one, two, client = exchanges
    blocks = make_blocks()
    blob = client.stores[0].add(blocks)
    request(one, blob, two, {one: 20.0, two: 20.0, client: None}).result(30)
    assert list(one.stores[0].open(blob)) == blocks


def test_fetch_of_invalid_blob_fails(exchanges):
    one, two, _ = exchanges
    invalid, short = [INVALID, *make_blocks()[1:]], make_blocks()[1:]
    for blocks, reason in ((invalid, "block 0"), (short, "5 blocks instead of 6")):
        one.stores[0].num_blocks = len(blocks)
        with pytest.raises(InvalidBlobError, match=reason):
            fetch(two, one.stores[0].add(blocks), one, one)


def test_fetch_with_full_disk_names_cure(exchanges):
    one, two, _ = exchanges
    two.stores[0].folder.rmdir()
    with pytest.raises(SwarmError, match="free some space"):
        fetch(two, one.stores[0].add(make_blocks()), one, one)


def open_streams(exchange: Exchange, server: Exchange, count: int, *requests: bytes) -> list:
    """Return the readers and writers of streams that have sent a request, or nothing."""

    async def open_all() -> list:
        call = exchange._p2p.call_binary_stream_handler
        streams = [(await call(server.peer_id, server._fetch_name))[1:] for _ in range(count)]
        for _, writer in streams:
            writer.writelines(requests)
        return streams

    return asyncio.run_coroutine_threadsafe(open_all(), exchange._loop).result(20)


def test_streams_of_stranger_do_not_block_participant(exchanges):
    one, two, stranger = exchanges
    one.participants = frozenset([two.peer_id])
    most = swarm.exchange.MAX_REQUESTS[0] // swarm.exchange.MAX_REQUESTS[2]
    streams = open_streams(stranger, one, most + 4)
    wait_until(lambda: sum(reader.at_eof() for reader, _ in streams) == 4, 20, "the end of four streams")
    fetch(two, one.stores[0].add(make_blocks()), one, one)
    wait_until(lambda: one._active == {("request", stranger.peer_id): most, ("request", None): most}, 20, "the rest")


class Sink:
    """The writer of a stream whose other side reads nothing."""

    def __init__(self):
        self.transport = self
        self.data = b""
        self.is_open = True

    def set_write_buffer_limits(self, high: int) -> None:
        assert not high

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def abort(self) -> None:
        self.is_open = False


def serve(exchange: Exchange, peer: PeerID, blob: bytes, *numbers: int) -> Sink:
    """Let an exchange serve a request of any peer, and return what the peer gets."""
    sink = Sink()

    async def start() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(REQUEST.pack(blob, len(numbers)) + struct.pack(f"<{len(numbers)}I", *numbers))
        sink.task = asyncio.create_task(exchange._serve(SimpleNamespace(peer_id=peer), reader, sink))
        await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(start(), exchange._loop).result(20)
    return sink


def list_keys(count: int) -> list[PeerID]:
    return [PeerID(b"key%d" % number) for number in range(count)]


def test_new_requests_replace_oldest_of_strangers(exchanges):
    """An attacker's requests for an update that never arrives would keep all joining peers from theirs. Each new key
    ends one request only."""
    server, owner, joiner = exchanges
    server.participants, (first, *others), hidden = frozenset(), list_keys(68), bytes(32)
    server.fetch(hidden, owner.peer_id, {owner.peer_id: 20.0}, 1, server.stores[0])
    wait_until(lambda: server._downloads, 20, "the download")
    sinks = [serve(server, peer, hidden, 0) for peer in (*[first] * 16, *others[:3] * 16, *others[3:])]
    assert all(sink.is_open for sink in sinks) and server._active["request", None] == 128
    blob = server.stores[0].add(blocks := make_blocks())
    fetch(joiner, blob, server, server)
    assert list(joiner.stores[0].open(blob)) == blocks
    assert [sink.is_open for sink in sinks] == [False] + 127 * [True]
    server.keep(frozenset(), server.stores[0])
    wait_until(lambda: not server._active, 20, "the end of all requests")


def test_participants_keep_requests_of_many_strangers(exchanges):
    """Neither does a participant's request end, nor does a stranger's that asks for more than its share."""
    server, owner, _ = exchanges
    voter, others, hidden = PeerID(b"voter"), list_keys(199), bytes(32)
    server.participants = frozenset({voter})
    server.fetch(hidden, owner.peer_id, {owner.peer_id: 20.0}, 1, server.stores[0])
    wait_until(lambda: server._downloads, 20, "the download")
    own = serve(server, voter, hidden, 0)
    sinks = [serve(server, peer, hidden, 0) for peer in others]
    wait_until(lambda: server._active["request", None] == 128, 20, "the end of the oldest requests")
    assert own.is_open and [sink.is_open for sink in sinks] == 71 * [False] + 128 * [True]
    more = serve(server, others[-1], hidden, 0)
    wait_until(lambda: not more.is_open, 20, "the end of a second request")
    assert all(sink.is_open for sink in sinks[71:])
    server.keep(frozenset(), server.stores[0])


def test_repeated_block_is_refused(exchanges):
    """Its stream had the time of as many blocks as it has numbers, for a single one."""
    server, _, stranger = exchanges
    blob = server.stores[0].add(make_blocks())
    repeated, other = (serve(server, stranger.peer_id, blob, 0, number) for number in (0, 1))
    wait_until(lambda: len(other.data) > 2 * BLOCK_BYTES, 20, "two blocks")
    assert not repeated.is_open and not repeated.data
    server._loop.call_soon_threadsafe(other.task.cancel)


def test_request_ends_with_its_stream(exchanges, monkeypatch):
    """A caller that gives up asks again. On slow uplinks, hundreds of its requests waited, each with an open file."""
    server, _, client = exchanges
    blob, requests = bytes(32), (REQUEST.pack(bytes(32), 1), struct.pack("<I", 0))
    monkeypatch.setattr("swarm.exchange.UNKNOWN_BLOB_TIMEOUT", 60.0)
    count, streams = count_files(), open_streams(client, server, 8, *requests)
    wait_until(lambda: server._active["request", client.peer_id] == 8, 20, "all requests")
    for _, writer in streams:
        client._loop.call_soon_threadsafe(writer.transport.abort)
    wait_until(lambda: not server._active and count_files() <= count, 20, "the end of all requests")
    assert not server._find_store(blob)


def test_stream_ends_without_reader(exchanges, monkeypatch):
    """Otherwise each stream of a peer that does not read would keep a file open. The daemon holds up to 16 MB."""
    monkeypatch.setattr("swarm.exchange.FETCH_TIMEOUT", 0.5)
    server, _, client = exchanges
    blob = server.stores[0].add([os.urandom(5 * 10**6) for _ in range(NUM_BLOCKS)])
    count, numbers = count_files(), struct.pack(f"<{NUM_BLOCKS}I", *range(NUM_BLOCKS))
    streams = open_streams(client, server, 3, REQUEST.pack(blob, NUM_BLOCKS), numbers)
    assert len(streams) == 3 and count_files() >= count + 3
    wait_until(lambda: not server._active, 20, "the end of all requests")
    wait_until(lambda: count_files() <= count + 3, 20, "only the files of the client")


def test_slow_uplink_serves_many_blocks(exchanges, monkeypatch):
    """The owner of a first state of hundreds of megabytes would count as silent while it sends."""
    monkeypatch.setattr("swarm.exchange.FETCH_TIMEOUT", 1.5)
    monkeypatch.setattr("swarm.exchange.MIN_MBITS", 0.1)
    server, client, _ = exchanges
    blob = server.stores[0].add(make_blocks())
    monkeypatch.setattr(server.uplink._rate, "value", NUM_BLOCKS * BLOCK_BYTES / 3.0)  # three seconds
    fetch(client, blob, server, server)
    assert not client._excluded


def test_short_epochs_allow_more_copies(exchanges, monkeypatch):
    monkeypatch.setattr("swarm.exchange.MAX_COPIES", 2)
    server, client, _ = exchanges
    monkeypatch.setattr(server.uplink._times["epoch_seconds"], "value", 10.0)
    for _ in range(8):
        fetch(client, server.stores[0].add(make_blocks()), server, server)


def test_message_above_limit_is_refused(exchanges):
    with pytest.raises(Exception, match="too large"):
        exchanges[0].send(exchanges[1].peer_id, bytes(swarm.exchange.MAX_MESSAGE_BYTES + 1)).result(20)


def test_answers_to_others_than_voters_are_not_urgent(exchanges):
    """Short questions with long answers would otherwise delay all updates."""
    one, two, _ = exchanges
    one.urgent, urgent_at = frozenset(), one.uplink._round_at.value
    for _ in range(2):
        two.send(one.peer_id, b"question").result(20)
        assert (one.uplink._round_at.value > urgent_at) == bool(one.urgent)
        one.urgent = frozenset([two.peer_id])


def test_calls_to_others_than_voters_are_not_urgent(exchanges):
    """A new key may answer each call with a short question, whose long answer is in the next call."""
    one, two, _ = exchanges
    one.urgent, urgent_at = frozenset(), one.uplink._round_at.value
    for _ in range(2):
        one.send(two.peer_id, b"answer").result(20)
        assert (one.uplink._round_at.value > urgent_at) == bool(one.urgent)
        one.urgent = frozenset([two.peer_id])


def test_waiting_answers_keep_no_places(exchanges, monkeypatch):
    """Those of an attacker's keys would otherwise hide the log from joining peers, while this one sends an update."""
    monkeypatch.setattr("swarm.exchange.REQUEST_TIMEOUT", 5.0)
    server, keys, questions = exchanges[0], list_keys(30), []
    server.participants = server.urgent = frozenset()
    server.on_message = lambda sender, message: questions.append(sender) or message
    monkeypatch.setattr(server.uplink._background_at, "value", time.monotonic() + 60.0)

    def ask(peer: PeerID) -> Future:
        answering = server._serve_message(BytesValue(value=b"question"), SimpleNamespace(remote_id=peer))
        return asyncio.run_coroutine_threadsafe(answering, server._loop)

    futures = []
    for peer in keys:
        futures.append(ask(peer))
        wait_until(lambda peer=peer: peer in questions, 20, "the question")
    with pytest.raises(ValueError, match="too many"):
        ask(keys[0]).result(20)
    for future in futures:
        with pytest.raises(TimeoutError):
            future.result(20)
    assert not server._active


def test_unwanted_downloads_end_and_may_begin_again(exchanges, tmp_path):
    exchange, owner, _ = exchanges
    blobs, own, other = [bytes([it]) * 32 for it in range(4)], exchange.stores[0], make_store(tmp_path / "other")

    def fetch(blob: bytes, store=own):
        return exchange.fetch(blob, owner.peer_id, {owner.peer_id: 20.0}, 1, store)

    futures = [fetch(blobs[0], other), *map(fetch, blobs[1:])]
    wait_until(lambda: len(exchange._downloads) == 4, 20, "the start of the downloads")
    exchange.keep(frozenset(blobs[1:2]), own)
    again = fetch(blobs[2])
    wait_until(lambda: len(exchange._downloads) == 3 and futures[3].done(), 20, "the end of two downloads")
    assert [future.cancelled() for future in (*futures, again)] == [False, False, True, True, False]
    exchange.keep(frozenset(), own)
    exchange.keep(frozenset(), other)
    wait_until(lambda: not exchange._downloads, 20, "the end of all downloads")


def list_sockets() -> set[str]:
    return {it.laddr for it in psutil.Process().net_connections("unix") if "p2pclient" in it.laddr}


def test_shutdown_leaves_nothing(dhts, tmp_path):
    sockets, count, store = list_sockets(), count_files(), make_store(tmp_path / "store")
    exchange = Exchange(dhts[0], make_prefix(), lambda *_: b"", store)
    peer = PeerID.from_base58("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")
    future = exchange.fetch(bytes(32), peer, {peer: 20.0}, BLOCK_BYTES, store)
    wait_until(lambda: exchange._downloads, 20, "the start of the download")
    own = list_sockets() - sockets
    exchange.shutdown()
    assert future.cancelled() and own and not any(map(os.path.exists, own))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("exchange")]
    wait_until(lambda: count_files() <= count, 20, "no file of the exchange")


def test_store_reads_hashes_of_blobs_once(tmp_path):
    """The log asks for all blobs of an epoch at each message, which read 15 files. And a stranger that requests an
    anchor's blocks by their names would fill the cache of hashes with gigabytes."""
    store = make_store(tmp_path)
    blob = store.add(make_blocks())
    hashes = store.list_hashes(blob)
    find_hashes(store, blob).unlink()
    assert store.has(blob) and store.list_hashes(blob) == hashes
    for number, name in enumerate(hashes):
        assert store.has_file(name, number) and not store.has(name)
        with pytest.raises(KeyError):
            store.list_hashes(name)


def test_blob_counts_only_blocks_checked_at_their_place(exchanges):
    """Otherwise, one voter holds an update that is invalid for the others, and the log has no commit."""
    owner, client, _ = exchanges
    first = os.urandom(BLOCK_BYTES)  # invalid at the last place, as a whole block of an update is
    blob = owner.stores[0].add([first] * NUM_BLOCKS)
    client.stores[0].check = lambda data, number: check_block(INVALID * (number > 0), 0)
    with pytest.raises(InvalidBlobError):
        client.fetch(blob, owner.peer_id, {owner.peer_id: 20.0}, BLOCK_BYTES, client.stores[0]).result(60)
    client.stores[0].put(owner.stores[0].get(blob))
    client.stores[0].put(first, 0)
    assert owner.stores[0].has(blob) and not client.stores[0].has(blob)


def test_offered_id_of_first_state_hides_no_block(exchanges, tmp_path):
    """A malicious update may have the id of a blob of another format, so that the hashes are in both stores."""
    owner, client, _ = exchanges
    blob = owner.stores[0].add(blocks := make_blocks())
    owner.stores = make_store(tmp_path / "updates"), *owner.stores
    owner.stores[0].put(owner.stores[1].get(blob))
    fetch(client, blob, owner, owner)
    assert list(client.stores[0].open(blob)) == blocks


def test_few_peers_leave_messages_to_another(exchanges):
    exchange, *crowd = exchanges[0], *(PeerID(bytes([number])) for number in range(101))
    exchange.participants = frozenset()
    for peer in crowd[:100]:
        with contextlib.suppress(ValueError):
            for _ in range(1000):
                with exchange._admit("message", peer, *swarm.exchange.MAX_MESSAGES):
                    pass
    assert exchange._counts["message", None] < 4 * swarm.exchange.MAX_MESSAGES[1]
    for peer, is_refused in ((crowd[0], True), (crowd[100], False)):
        acting = exchange._admit("message", peer, *swarm.exchange.MAX_MESSAGES)
        with pytest.raises(ValueError) if is_refused else contextlib.nullcontext(), acting:
            pass


def test_store_keeps_newest_and_drops_damaged(tmp_path):
    store = make_store(tmp_path, 3 * NUM_BLOCKS * BLOCK_BYTES)
    blobs = [store.add(make_blocks()) for _ in range(5)]
    assert not store.has(blobs[0]) and store.has(blobs[-1]) and make_store(tmp_path).has(blobs[-1])
    (tmp_path / f"0 {store.list_hashes(blobs[-1])[0].hex()}").write_bytes(b"damaged")
    with pytest.raises(KeyError):
        list(store.open(blobs[-1]))
    assert not store.has(blobs[-1]) and store.has(blobs[-2])
    find_hashes(store, blobs[-2]).write_bytes(b"")  # the power failed
    assert not make_store(tmp_path).has(blobs[-2])


def test_relays_share_blob_of_one_owner():
    """Of the anchor with which a log begins, all other members fetch the same number of blocks for the others."""
    owner, *others = [PeerID(bytes([number])) for number in range(8)]
    loads = plan_loads({owner: swarm.exchange.MIN_MBITS, **dict.fromkeys(others, swarm.exchange.MAX_MBITS)}, 10**9, 0.0)
    sources = Counter(choose_source(owner, (number + 0.5) / 70, loads) for number in range(70))
    assert sources == dict.fromkeys(others, 10)


def test_loads_spare_slow_lines_if_time_allows():
    peers = [PeerID(bytes([number])) for number in range(17)]
    equal = plan_loads(dict.fromkeys(peers[:8], 20.0), 500_000, 0.0)
    assert list(equal.values()) == pytest.approx([7] * 8)
    assert all(choose_source(peer, at / 20, equal) == peer for peer in peers[:8] for at in range(20))
    aided = dict.fromkeys(peers[:16], 20.0) | {peers[16]: 100.0}
    loads = plan_loads(aided, 500_000, 15.0)
    assert loads[peers[0]] == 0 and choose_source(peers[0], 0.5, loads) == peers[16]
