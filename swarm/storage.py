"""What a DHT node keeps and believes: of each peer its own records, and few of them (notes 73 and 74); and how little
of it travels (note 76)."""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Collection

import hivemind.dht.node
import hivemind.dht.protocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import TimedStorage, ValueWithExpiration, get_dht_time

from swarm.membership import SHOW, Membership
from swarm.uplink import Uplink
from utils import MAX_RECORD_LIFETIME, find_subkey_owner

logger = logging.getLogger("swarm")

# A trainer has about ten records of 1 KB and a contract of 3 KB: 7 MB for 500 of them. All records of a key travel in
# one message, of 4 MB at most; each has a signature, and so at least 0.7 KB.
PEER_RECORDS, PEER_BYTES, KEY_BYTES = 64, 2**16, 3_000_000
FIELDS = ("keys", "subkeys", "values", "expiration_time", "in_cache")


class DHTProtocol(hivemind.dht.protocol.DHTProtocol):  # requests have the name of the class
    membership: Membership | None = None  # see make_node_classes

    def __init__(self, **options):
        super().__init__(**options)
        self.held = TimedStorage()  # by sender: bytes and expiration times of its records by key and subkey

    @classmethod
    async def create(cls, p2p: P2P, *args, **options) -> "DHTProtocol":
        if cls.membership:  # before this peer calls others, which may call back
            await p2p._client.add_unary_handler(SHOW, cls.membership.answer)
        return await super().create(p2p, *args, **options)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        records = list(zip(*(getattr(request, name) for name in FIELDS), strict=True))
        admitted = [self.accepts_record(context.remote_id, *record) for record in records]
        rest = dict(zip(FIELDS, zip(*itertools.compress(records, admitted), strict=True), strict=False))
        stored = iter((await super().rpc_store(dht_pb2.StoreRequest(peer=request.peer, **rest), context)).store_ok)
        return dht_pb2.StoreResponse(store_ok=[it and next(stored) for it in admitted], peer=self.node_info)

    def accepts_record(
        self, sender: PeerID, key: bytes, tag: bytes, value: bytes, expires: float, in_cache: bool
    ) -> bool:
        """Whether this is a record of the sender's own, and not one too much; then it counts among them."""
        try:
            subkey, stored, now = self.serializer.loads(tag), self.storage.get(DHTID.from_bytes(key)), get_dht_time()
            # what hivemind passes on, to newcomers and as a cache, has no subkey
            if in_cache or sender.to_bytes() != find_subkey_owner(subkey):
                raise ValueError("it is another peer's")
            held, _ = self.held.get(sender) or ({}, None)
            held = {name: item for name, item in held.items() if item[1] > now}
            held[key, tag] = len(tag + value), expires
            of_key = {name: item.value for name, item in stored.value.data.items()} if stored else {}
            size = sum(len(name + item) for name, item in (of_key | {subkey: value}).items())
            if len(held) > PEER_RECORDS or sum(count for count, _ in held.values()) > PEER_BYTES or size > KEY_BYTES:
                raise ValueError("it is one too much")
        except Exception as e:  # hostile bytes: the decoder raises whatever it likes
            logger.debug(f"refused a record of {sender}: {e}")
            return False
        self.held.store(sender, held, now + MAX_RECORD_LIFETIME)
        for storage in (self.held, self.storage, *filter(None, [stored and stored.value])):
            prune_expiration_heap(storage)
        return True

    async def call_store(self, peer, keys, values, *args, **kwargs):
        """Passes nothing on: it would be refused above. Peers store anew within a minute."""
        if not any(isinstance(value, DictionaryDHTValue) for value in values):
            return await super().call_store(peer, keys, values, *args, **kwargs)

    async def call_find(self, peer, keys):
        """hivemind believes the peer how long a dictionary lives and how much it holds: one that never expires ended
        this search and all later ones at once, and one of a strange size made them hang. All that peers store here is
        in dictionaries."""
        found = await super().call_find(peer, keys)
        for key, (item, nearest) in (found or {}).items():
            records = DictionaryDHTValue()
            revoked = self.membership.revoked if self.membership else frozenset()
            held = item.value.data if item and isinstance(item.value, DictionaryDHTValue) else {}
            for subkey, record in held.items():
                if not revoked or find_subkey_owner(subkey) not in revoked:
                    records.store(subkey, record.value, record.expiration_time)
            found[key] = ValueWithExpiration(records, records.latest_expiration_time) if records else None, nearest
        return found


class DHTNode(hivemind.dht.node.DHTNode):
    """hivemind's, with a fraction of its traffic: there, up to 20 others send all records of a key for each report and
    each look of a peer, which of ten trainers was 1 Mbit/s for each of them."""

    uplink: Uplink  # see make_node_classes

    async def find_nearest_nodes(self, queries: Collection[DHTID], *args, found_callback=None, **options) -> dict:
        """Who stores something asks who is near its key. Under the key beside it nobody holds anything that they would
        send along, and the same ones are near that."""

        def make_adjacent_key(key: DHTID) -> DHTID:
            return DHTID(key ^ 1)

        if found_callback is not None:
            options["found_callback"] = lambda key, *found: found_callback(make_adjacent_key(key), *found)
        found = await super().find_nearest_nodes([make_adjacent_key(key) for key in queries], *args, **options)
        return {make_adjacent_key(key): nodes for key, nodes in found.items()}

    async def get_many_by_id(self, key_ids: Collection[DHTID], *args, **options) -> dict:
        """What as many nodes as store a record have answered within the line's patience. hivemind's search waits for
        each of them, and forever where one of its workers has failed (note 77)."""
        options = {"beam_size": self.num_replicas} | options | {"return_futures": True}
        futures = await super().get_many_by_id(key_ids, *args, **options)
        _, late = await asyncio.wait(futures.values(), timeout=self.uplink.timeouts.response)
        for search in [search for key in key_ids for search in self.pending_get_requests[key] if search.future in late]:
            search.finish_search()
        return {key: future.result() if future.done() else None for key, future in futures.items()}


def prune_expiration_heap(storage: TimedStorage) -> None:
    """Expiration times of records that were overwritten since, which hivemind keeps."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 100:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)


def make_node_classes(uplink: Uplink, membership: Membership | None) -> tuple[type[DHTProtocol], type[DHTNode]]:
    """Return the classes of this peer's DHT node. hivemind makes the instances, and passes nothing through to them."""
    protocol = type("DHTProtocol", (DHTProtocol,), {"membership": membership})
    return protocol, type("DHTNode", (DHTNode,), {"uplink": uplink})
