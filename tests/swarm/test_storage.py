"""An untrusted peer at our nodes of the DHT: it stores records of others, or too many, and answers falsely."""

import asyncio
import contextlib
import functools
import itertools
import math
import random
from functools import partial
from types import SimpleNamespace

import hivemind.dht.node
import msgpack
import psutil
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from members import addresses, run_peer
from processes import LOOPBACK, make_prefix, wait_until
from records import attack, sign, start_dht_as

from swarm.dht import DHT, PEER_BYTES, PEER_RECORDS, DHTNode, find_node_id, ping_peers
from swarm.matchmaking import NonBlockingKeyManager
from swarm.patches import install
from swarm.uplink import RoundTimeouts, Uplink
from utils import find_peer_id, make_validators

dumps = MSGPackSerializer.dumps
PREFIX = make_prefix()
KEY = f"{PREFIX}_state_averager.all_averagers"


@pytest.fixture(scope="module")
def peers():
    """Two nodes of ours, and a stranger with hivemind's, its private and its public key."""
    key = RSAPrivateKey()
    with run_peer(PREFIX) as one, run_peer(PREFIX, one) as two:
        stranger = start_dht_as(key, addresses(one), [])
        yield one, two, stranger, key, make_validators(PREFIX, key)[1]
        stranger.shutdown()


def test_storage_accepts_only_own_records(peers):
    victim, _, stranger, key, public_key = peers
    fresh, soon, own_id = RSAPrivateKey(), get_dht_time() + 300, find_peer_id(public_key)
    fresh_subkey = make_validators(PREFIX, fresh)[1]

    def store(signer, subkey: bytes, value=1, expires=soon, key=KEY, after=b"") -> bool:
        signed = sign(signer, key, subkey, dumps(value), expires) + after
        return attack(stranger, victim, key, dumps(own_id) if after else subkey, signed, expires)[0]

    assert store(key, dumps(public_key)) and store(key, dumps(public_key), after=public_key)
    assert not store(fresh, dumps(fresh_subkey)), "a fresh key's"
    assert not store(fresh, dumps(fresh_subkey), soon + 1, after=fresh_subkey), "under an id that is not the key's"
    for subkey in (DHTProtocol.IS_REGULAR_VALUE, dumps(own_id), dumps(victim.peer_id.to_bytes())):
        assert not attack(stranger, victim, KEY, subkey, dumps(1), soon + 1)[0], "nobody's"
    for expires, peer_id in ((soon, own_id), (soon + 1, b"x" * 34)):  # for another peer
        progress = dict(peer_id=peer_id, epoch=0, samples_accumulated=0, samples_per_second=1.0, client_mode=False)
        progress["time"] = get_dht_time()
        is_stored = store(key, dumps(public_key), progress, expires, key=f"{PREFIX}_progress")
        assert is_stored == (peer_id == own_id)
    assert not store(key, dumps(public_key), expires=get_dht_time() + 4000), "for too long"
    passed_on = DictionaryDHTValue()
    passed_on.store(public_key, sign(key, KEY, dumps(public_key), dumps(2), soon + 1), soon + 1)
    assert not attack(stranger, victim, KEY, DHTProtocol.IS_DICTIONARY, dumps(passed_on), soon + 1)[0]
    # the subkey in other bytes: others would find the signature invalid, and drop the whole dictionary
    long_subkey = b"\xc6" + len(public_key).to_bytes(4, "big") + public_key
    assert MSGPackSerializer.loads(long_subkey) == public_key and not store(key, long_subkey, expires=soon + 1)
    found = victim.get(KEY, latest=True).value
    assert {subkey: item.value for subkey, item in found.items()} == {public_key: 1, own_id: 1}


async def lie(_dht, node, key, subkey, record, **attributes):
    """Runs in the stranger's process: this answer to who asks for the key."""
    lies = DictionaryDHTValue()
    lies.store(subkey, *record)
    lies.frozen, lies.__dict__ = True, lies.__dict__ | attributes
    node.protocol.storage.data[DHTID.generate(key)] = ValueWithExpiration(lies, lies.latest_expiration_time)


async def lie_plainly(_dht, node, place, expires):
    """Runs in the stranger's process: a value that is no dictionary, to who asks for what lies there."""
    node.protocol.storage.data[place] = ValueWithExpiration(dumps("plain"), expires)


def test_search_ignores_invalid_dictionary(peers):
    """One that never expires ended this search and all later ones, one of a strange size made them hang."""
    victim, reader, stranger, key, public_key = peers
    soon = get_dht_time() + 300
    record = sign(key, KEY, dumps(public_key), dumps(1), soon), soon
    assert victim.store(KEY, 5, soon, subkey=victim.peer_id.to_bytes())
    for lies in (dict(latest_expiration_time=math.inf), dict(maxsize=1), dict(maxsize="x")):
        stranger.run_coroutine(functools.partial(lie, key=KEY, subkey=public_key, record=record, **lies))
        for _ in range(2):
            found = reader.get(KEY, latest=True, return_future=True).result(timeout=20)
            assert found.value[victim.peer_id.to_bytes()].value == 5 and found.expiration_time <= soon
    key_id = DHTID.generate(KEY)
    for place in (key_id, DHTID(key_id ^ 1)):  # readers ask at one place, storing peers at the other
        stranger.run_coroutine(functools.partial(lie_plainly, place=place, expires=soon))
    assert reader.store(KEY, 6, soon, subkey=reader.peer_id.to_bytes(), return_future=True).result(timeout=20)
    found = reader.get(KEY, latest=True, return_future=True).result(timeout=20).value
    assert found[victim.peer_id.to_bytes()].value == 5 and found[reader.peer_id.to_bytes()].value == 6


async def ping_as_many(_dht, node, to) -> None:
    """Runs in the stranger's process: pings with eight ids near the place where peers store the key's records."""
    for number in range(8):
        request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=DHTID(DHTID.generate(KEY) ^ number).to_bytes()))
        await node.protocol.get_stub(to).rpc_ping(request, timeout=10)


async def find_many(_dht, node, to, count: int) -> int:
    """Runs in a node's process: ask for `count` times the same key in one request, and return the number of results."""
    request = dht_pb2.FindRequest(keys=count * [DHTID.generate(KEY).to_bytes()], peer=node.protocol.node_info)
    return len((await node.protocol.get_stub(to).rpc_find(request, timeout=10)).results)


def test_request_for_many_keys_is_bounded(peers):
    """With large records and 90,000 keys, the answer would take gigabytes."""
    one, two, *_ = peers
    assert two.run_coroutine(functools.partial(find_many, to=one.peer_id, count=1000)) == 4


async def find_ids(_dht, node, peer) -> list[DHTID]:
    """Runs in a node's process: the ids of a peer in its routing table."""
    return [uid for uid, other in node.protocol.routing_table.uid_to_peer_id.items() if other == peer]


def test_peer_has_one_place(peers):
    """With many ids near a key, it would be all the nodes at which others store and look for records."""
    victim, _, stranger, _, _ = peers
    stranger.run_coroutine(functools.partial(ping_as_many, to=victim.peer_id))
    assert victim.run_coroutine(functools.partial(find_ids, peer=stranger.peer_id)) == [find_node_id(stranger.peer_id)]


async def replace_node_id(_dht, node, node_id: bytes) -> bytes:
    """Runs in the stranger's process. Return the last id."""
    last, node.protocol.node_info.node_id = node.protocol.node_info.node_id, node_id
    return last


async def ping(_dht, node, peer, kind: type[DHTProtocol] | None = None) -> DHTID | str | None:
    """Runs in the victim's process, by our class or by hivemind's."""
    try:
        return await (kind.call_ping(node.protocol, peer) if kind else node.protocol.call_ping(peer))
    except AssertionError:
        return "raised"


async def forget(_dht, node, peer) -> None:
    """Runs in a process that has restarted, as it were."""
    table = node.protocol.routing_table
    del table[table[peer]]


async def measure_delay(dht, node, peer) -> float | None:
    return await dht.uplink.measure_delay(node, peer)


def test_restarted_peer_learns_of_peers_that_ping_it(peers):
    """Of 16 peers, most records are not near its id, so for minutes it might get no other call."""
    victim, other, *_ = peers
    own_id = find_node_id(other.peer_id)
    victim.run_coroutine(partial(forget, peer=other.peer_id))
    assert own_id not in victim.run_coroutine(partial(find_ids, peer=other.peer_id))
    assert other.run_coroutine(partial(measure_delay, peer=victim.peer_id)) is not None
    wait_until(lambda: victim.run_coroutine(partial(find_ids, peer=other.peer_id)) == [own_id], 30, "the other peer")


def test_long_node_id_is_no_answer(peers):
    """Note 101: it ended all that pinged this peer, such as the watch over a round, or the search for lost peers."""
    victim, _, stranger, _, _ = peers
    own_id = stranger.run_coroutine(partial(replace_node_id, node_id=b"\xff" * 21))
    pings = [partial(ping, peer=stranger.peer_id, kind=kind) for kind in (DHTProtocol, None)]
    answers = list(map(victim.run_coroutine, pings))
    stranger.run_coroutine(partial(replace_node_id, node_id=own_id))
    assert answers == ["raised", None] and isinstance(victim.run_coroutine(pings[1]), DHTID)


def nest(depth: int) -> bytes:
    """Return nested tuples, as hivemind encodes them."""
    data = msgpack.packb(msgpack.ExtType(MSGPackSerializer._TUPLE_EXT_TYPE_CODE, b"\x90"))
    for _ in range(depth):
        data = msgpack.packb(msgpack.ExtType(MSGPackSerializer._TUPLE_EXT_TYPE_CODE, b"\x91" + data))
    return data


def test_nested_values_are_refused(peers):
    """Note 93: these 1.4 KB would crash the process."""
    (victim, _, stranger, *_), soon = peers, get_dht_time() + 300
    install()
    assert MSGPackSerializer.loads(nest(3)) == ((((),),),)
    for data in (nest(300), msgpack.packb(msgpack.ExtType(5, b""))):
        with pytest.raises(ValueError):
            MSGPackSerializer.loads(data)
        assert attack(stranger, victim, KEY, data, b"x", soon, is_served=False) == [False]
    assert victim.is_alive() and victim.store(KEY, 5, soon, subkey=victim.peer_id.to_bytes())


async def look_at_storage(_dht, node) -> tuple[int, int, int]:
    """Runs in a node's process: bytes of records, number of keys, and entries of all heaps."""
    storage = node.protocol.storage
    values = [item.value for item in storage.data.values()]
    size = sum(len(record.value) for value in values for record in value.data.values())
    return size, len(values), sum(len(s.expiration_heap) for s in (storage, *values))


def test_storage_limits_records_per_peer(peers):
    victim, _, stranger, key, public_key = peers
    subkey, soon = dumps(public_key), get_dht_time() + 300
    for number in range(100):
        name = f"{PREFIX}_{number}"
        value = sign(key, name, subkey, dumps(b"x" * (6000 if number < 5 else 10)), soon)
        attack(stranger, victim, name, subkey, value, soon)
    size, keys, _ = victim.run_coroutine(look_at_storage)
    assert size < PEER_BYTES and 30 < keys <= PEER_RECORDS, (size, keys)
    # hivemind remembers each version that was overwritten
    for i in range(400):
        attack(stranger, victim, KEY, subkey, sign(key, KEY, subkey, dumps(1), soon + i), soon + i)
    _, _, entries = victim.run_coroutine(look_at_storage)
    assert entries < 400, entries


@pytest.fixture
def open_run(monkeypatch):
    """Our nodes in this process belong to an open run."""
    monkeypatch.setattr(DHTNode, "dht", SimpleNamespace(uplink=Uplink(), membership=None), raising=False)


def test_storing_sends_no_foreign_records(open_run):
    """Note 76: hivemind's nodes ask all six others, and are sent all copies that these hold of a key, by a search for
    each store and by another one to read. Ours search again only if they know other nodes than before."""

    async def count_copies() -> tuple[list, list, list, dict]:
        nodes, copies = [], []
        options = dict(host_maddrs=[LOOPBACK[1]], cache_nearest=0)
        try:
            for _ in range(7):
                maddrs = [str(maddr) for maddr in await nodes[0].get_visible_maddrs()] if nodes else []
                nodes.append(await DHTNode.create(initial_peers=maddrs, **options))
            for number, node in enumerate(nodes):  # so that all know all, and each holds some
                await asyncio.gather(*(node.protocol.call_ping(other.peer_id) for other in nodes if other is not node))
                node.protocol.storage.store(DHTID.generate(KEY), dumps("a record"), get_dht_time() + 60, subkey=number)
            reporter = nodes[-1]
            call_find = reporter.protocol.call_find

            async def count(*args):
                found = await call_find(*args)
                copies.append(sum(item is not None for item, _ in found.values()))
                return found

            reporter.protocol.call_find = count
            for value in ("old", "new"):
                assert await reporter.store(KEY, value, get_dht_time() + 60, subkey="reporter")
            stored = copies.copy()
            found = await reporter.get(KEY, latest=True)
            got, key, table = copies[len(stored) :], DHTID.generate(KEY), reporter.protocol.routing_table
            [(nearest, _)] = table.get_nearest_neighbors(key, 1, exclude=reporter.node_id)
            del table[nearest]
            copies.clear()
            assert await reporter.store(KEY, "newest", get_dht_time() + 60, subkey="reporter")
            assert nearest in table
            return stored, got, copies, found.value
        finally:
            await asyncio.gather(*(node.shutdown() for node in nodes))

    stored, got, again, found = asyncio.run(asyncio.wait_for(count_copies(), 120))
    assert (stored, got) == ([0] * 5, [1] * 5) and found["reporter"].value == "new"
    assert not any(again) and len(again) >= 5


async def find_invented(self, request: dht_pb2.FindRequest, _) -> dht_pb2.FindResponse:
    """Name five nodes that are nearer to each key than all others, and do not exist."""
    ids = [b"\x12\x20" + random.randbytes(32) for _ in range(3000)]
    nodes = {DHTID.generate(peer_id): peer_id for peer_id in ids}
    answer = dht_pb2.FindResponse(peer=self.node_info)
    for key in map(DHTID.from_bytes, request.keys):
        near = sorted(nodes, key=key.xor_distance)[:5]
        answer.results.add(
            type=dht_pb2.NOT_FOUND,
            nearest_node_ids=[node_id.to_bytes() for node_id in near],
            nearest_peer_ids=[nodes[node_id] for node_id in near],
        )
    return answer


async def holds(_: DHT, node: DHTNode, key: str) -> bool:
    return node.protocol.storage.get(DHTID.generate(key)) is not None


def test_invented_nodes_hide_no_records(monkeypatch):
    """Of nine nodes, the nearest one to a key is hostile."""
    with contextlib.ExitStack() as stack:
        dhts = [stack.enter_context(run_peer(PREFIX))]
        while len(dhts) < 9:
            if len(dhts) == 8:
                monkeypatch.setattr("swarm.dht.DHTProtocol.rpc_find", find_invented)
            dhts.append(stack.enter_context(run_peer(PREFIX, dhts[0])))
        for dht in dhts:
            ids = [other.peer_id.to_bytes() for other in dhts if other is not dht]
            ping = partial(dht.run_coroutine, partial(ping_peers, peer_ids=ids))
            wait_until(lambda ping=ping, ids=ids: ping() == {*ids}, 60, "the answers of all")

        def sort_by_distance(key: str) -> list[DHT]:
            return sorted(dhts, key=lambda dht: DHTID.generate(key).xor_distance(find_node_id(dht.peer_id)))

        names = (f"{PREFIX}_{number}" for number in itertools.count())
        key = next(name for name in names if sort_by_distance(name)[0] is dhts[-1])
        _, *others, reader, reporter = sort_by_distance(key)
        reporter.store(key, "new", get_dht_time() + 60, subkey=reporter.public_key)
        assert sum(other.run_coroutine(partial(holds, key=key)) for other in others) >= 2
        assert reader.get(key, latest=True).value[reporter.public_key].value == "new"


@pytest.mark.parametrize(
    "kind, has_ended", [pytest.param(hivemind.dht.node.DHTNode, False, marks=pytest.mark.slow), (DHTNode, True)]
)
def test_failed_search_ends(open_run, kind, has_ended):
    """Note 77: hivemind's search never ends, and the wait for the other peers' progress neither."""

    async def search() -> bool:
        options, soon = dict(host_maddrs=[LOOPBACK[1]]), get_dht_time() + 60
        first = await kind.create(**options)
        second = await kind.create(initial_peers=[str(maddr) for maddr in await first.get_visible_maddrs()], **options)
        try:
            assert await second.store(KEY, "new", soon, subkey="second")

            async def fail(*_):
                raise OSError("of whatever kind")

            second.protocol.call_find = fail
            try:
                found = await asyncio.wait_for(second.get(KEY, latest=True), 2 * RoundTimeouts().response)
            except TimeoutError:
                return False
            return found.value["second"].value == "new"
        finally:
            await asyncio.gather(first.shutdown(), second.shutdown())

    assert asyncio.run(asyncio.wait_for(search(), 60)) == has_ended


def test_found_group_skips_dht_store(peers):
    """Note 78: if storing takes long, hivemind makes the whole group wait."""
    victim, soon = peers[0], get_dht_time() + 300
    manager = NonBlockingKeyManager(victim, f"{PREFIX}_state_averager", "", None)
    own = manager.current_key, victim.peer_id
    process = psutil.Process(victim.pid)

    async def find_a_group() -> list[tuple]:
        assert await manager.declare_averager(*own, expiration_time=soon)
        looking = await manager.get_averagers(manager.current_key, only_active=True)
        process.suspend()
        try:
            await asyncio.wait_for(manager.declare_averager(*own, soon, looking_for_group=False), 30)
            assert not manager.declaring.done()
        finally:
            process.resume()
        assert await manager.declaring
        return [looking, await manager.get_averagers(manager.current_key, only_active=True)]

    looking, found = asyncio.run(asyncio.wait_for(find_a_group(), 60))
    assert [peer for peer, _ in looking] == [victim.peer_id] and not found
