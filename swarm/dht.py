"""A DHT that reconnects to lost peers. Its nodes accept records only from their owners, a few each (notes 73 and 74),
with little traffic (note 76)."""

import asyncio
import contextlib
import heapq
import itertools
import multiprocessing
import signal
import time
from collections.abc import Collection

import hivemind.dht.node
import hivemind.dht.protocol
import numpy
import torch
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import TimedStorage, ValueWithExpiration, get_dht_time

from common.files import temporary_folder
from common.signals import block_signals, find_helpers, is_alive
from swarm import SwarmError
from swarm.addresses import add_quic, get_peer_id
from swarm.attestation import RunAttestation
from swarm.membership import Membership, maintain_revocations
from swarm.patches import install, install_in_dht_process
from swarm.processes import STOPPING
from swarm.uplink import Uplink
from utils import MAX_RECORD_LIFETIME, RecordValidator, find_peer_id, find_subkey_owner

TOUCH_PERIOD = 10.0  # seconds between two pings of a lost peer, which may have moved or been disconnected
LOST_AFTER = 600.0  # seconds without a peer until it is given up
# Per peer and per key. A trainer has about ten records of 1 KB and a contract of 3 KB; all of a key fit in 4 MB.
PEER_RECORDS = 64
PEER_BYTES = 2**16
KEY_BYTES = 3_000_000
MAX_SENDERS = 1024  # peers whose records a node stores within an hour
MAX_UNKNOWN = 2  # nodes in an answer that may be invented; a search asks the nearest five
SEARCH_LIFETIME = 60.0  # seconds until the nearest nodes are searched again, although this node knows no nearer ones
FIELDS = ("keys", "subkeys", "values", "expiration_time", "in_cache")


def find_node_id(peer: PeerID) -> DHTID:
    """Return a peer's only id as a DHT node. With many ids near a key, it would be all nodes that hold its records."""
    return DHTID.generate(peer.to_bytes())


class DHTProtocol(hivemind.dht.protocol.DHTProtocol):  # the class name is part of the RPC names
    """A DHT protocol that accepts only a limited number of records, from their owners."""

    def __init__(self, **options):
        super().__init__(**options)
        self.held = TimedStorage()  # by sender: the size and the expiration time of each record, by key and subkey

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Store only the records that `may_store` admits; hivemind stores all valid ones."""
        records = list(zip(*(getattr(request, name) for name in FIELDS), strict=True))
        admitted = [self.may_store(context.remote_id, *record) for record in records]
        kept = {name: itertools.compress(getattr(request, name), admitted) for name in FIELDS}
        stored = iter((await super().rpc_store(dht_pb2.StoreRequest(peer=request.peer, **kept), context)).store_ok)
        return dht_pb2.StoreResponse(store_ok=[it and next(stored) for it in admitted], peer=self.node_info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Answer four keys, the most that a search asks for; for 90,000, hivemind would need gigabytes (note 102)."""
        return await super().rpc_find(dht_pb2.FindRequest(keys=request.keys[:4], peer=request.peer), context)

    def may_store(self, sender: PeerID, key: bytes, tag: bytes, value: bytes, expires: float, in_cache: bool) -> bool:
        """Return whether a record belongs to its sender and is within the limits; count it if so."""
        try:
            subkey = self.serializer.loads(tag)
            stored = self.storage.get(DHTID.from_bytes(key))
            now = get_dht_time()
            # records that hivemind forwards, to new peers and to caches, have no subkey
            if in_cache or sender.to_bytes() != find_subkey_owner(subkey) or expires > now + MAX_RECORD_LIFETIME:
                return False  # of another peer, or expires too late
            held, _ = self.held.get(sender) or ({}, None)
            held = {name: item for name, item in held.items() if item[1] > now}
            held[key, tag] = len(tag + value), expires
            of_key = {name: item.value for name, item in stored.value.data.items()} if stored else {}
            size = sum(len(name + item) for name, item in (of_key | {subkey: value}).items())
            has_room = len(self.held) < MAX_SENDERS or sender in self.held  # new keys cost nothing
            own_size = sum(count for count, _ in held.values())
            if not has_room or len(held) > PEER_RECORDS or own_size > PEER_BYTES or size > KEY_BYTES:
                return False  # too many records, or too large
        except Exception:  # on untrusted bytes, the decoder can raise any exception
            return False
        self.held.store(sender, held, now + MAX_RECORD_LIFETIME)
        for storage in (self.held, self.storage, *filter(None, [stored and stored.value])):
            # hivemind keeps the expiration times of overwritten records
            if len(storage.expiration_heap) > 2 * len(storage.data) + 100:
                storage.expiration_heap = list(storage.key_to_heap.values())
                heapq.heapify(storage.expiration_heap)
        return True

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Add or drop a peer, like hivemind, whatever id it claims."""
        await super().update_routing_table(find_node_id(peer_id), peer_id, responded)

    async def call_ping(self, peer: PeerID, *args, **options) -> DHTID | None:
        """Ping a peer; None if it does not answer, or sends an id that hivemind cannot read (note 101)."""
        with contextlib.suppress(AssertionError):
            return await super().call_ping(peer, *args, **options)

    async def call_store(self, peer, keys, values, *args, **kwargs):
        """Forward no records: receivers would refuse them, and their owners store them again within a minute."""
        if not any(isinstance(value, DictionaryDHTValue) for value in values):
            return await super().call_store(peer, keys, values, *args, **kwargs)

    async def call_find(self, peer, keys):
        """Ask a peer for records, and rebuild its dictionaries, whose lifetime and size may be false (note 74)."""
        results = await super().call_find(peer, keys)
        for key, (item, nearest) in (results or {}).items():
            records = DictionaryDHTValue()
            data = item.value.data if item and isinstance(item.value, DictionaryDHTValue) else {}
            for subkey, record in data.items():
                records.store(subkey, record.value, record.expiration_time)
            nearest = {find_node_id(other): other for other in nearest.values()}
            unknown = [node_id for node_id, other in nearest.items() if other not in self.routing_table]
            for node_id in sorted(unknown, key=key.xor_distance)[MAX_UNKNOWN:]:  # invented ones would hide all others
                del nearest[node_id]
            results[key] = ValueWithExpiration(records, records.latest_expiration_time) if records else None, nearest
        return results


class DHTNode(hivemind.dht.node.DHTNode):
    """A DHT node with a fraction of hivemind's traffic (note 76)."""

    dht: hivemind.DHT  # set by `DHT.run`

    def __init__(self, **options):
        super().__init__(**options)
        self.searches = TimedStorage()  # by stored key: the nearest nodes, as the last search has found them

    async def find_nearest_nodes(self, queries: Collection[DHTID], *args, found_callback=None, **options) -> dict:
        """Search near the adjacent keys: the nearest nodes are the same, but hold no records there to send."""
        if found_callback is not None:  # a search of `store`: hivemind's asks 20 nodes for the nearest 5
            [key] = queries
            near = dict(self.protocol.routing_table.get_nearest_neighbors(key, self.num_replicas, exclude=self.node_id))
            if (found := self.searches.get(key)) and found.value == near.keys():
                options["node_to_peer_id"].update(near)
                await found_callback(key, [*near], {*near})
                return {}

            async def note(_, nearest: list[DHTID], visited: set[DHTID]) -> None:
                self.searches.store(key, {*nearest}, get_dht_time() + SEARCH_LIFETIME)
                await found_callback(key, nearest, visited)

            options |= {"found_callback": note, "beam_size": self.num_replicas}
        search = super().find_nearest_nodes([DHTID(key ^ 1) for key in queries], *args, **options)
        if self.node_id in queries:  # at the start: only the routing table needs it, and it takes seconds
            self.first_search = asyncio.create_task(search)  # a reference: asyncio holds tasks weakly (note 81)
            return {}
        return {DHTID(key ^ 1): nodes for key, nodes in (await search).items()}

    async def get_many_by_id(self, key_ids: Collection[DHTID], *args, **options) -> dict:
        """Return the records that arrive within the response timeout (note 77), without those of revoked members."""
        options = {"beam_size": self.num_replicas} | options | {"return_futures": True}
        futures = await super().get_many_by_id(key_ids, *args, **options)
        _, late = await asyncio.wait(futures.values(), timeout=self.dht.uplink.timeouts.response)
        for search in [search for key in key_ids for search in self.pending_get_requests[key]]:
            if search.future in late:
                search.finish_search()
        results = {key: future.result() if future.done() else None for key, future in futures.items()}
        if self.dht.membership and (revoked := self.dht.membership.revoked):
            for records in [item.value for item in results.values() if item and isinstance(item.value, dict)]:
                for subkey in [subkey for subkey in records if find_subkey_owner(subkey) in revoked]:
                    del records[subkey]
        return results


def check_versions(numpy_version: str = numpy.__version__) -> None:
    """Raise a SwarmError on numpy >= 2.4: hivemind's 8-bit codecs fail silently there, and rounds average nothing."""
    if tuple(int(part) for part in numpy_version.split(".")[:2]) >= (2, 4):
        raise SwarmError(f"numpy {numpy_version} silently breaks hivemind's compression: pip install 'numpy<2.4'")


async def reconnect_lost_peers(dht: hivemind.DHT, node: DHTNode) -> None:
    """Ping lost peers, which hivemind drops, until they answer (note 64). Runs in the DHT's process, forever."""
    seen: dict[PeerID, float] = {}  # when each peer was last there
    while True:
        await asyncio.sleep(TOUCH_PERIOD)
        now = time.monotonic()
        present = node.protocol.routing_table.peer_id_to_uid.keys()
        if present:  # otherwise, this peer's own line is down
            seen = {peer: at for peer, at in seen.items() if at > now - LOST_AFTER} | dict.fromkeys(present, now)
        await asyncio.gather(*map(node.protocol.call_ping, {*seen, *dht.initial_ids} - present))


async def run_jobs(dht: hivemind.DHT, node: DHTNode) -> None:
    """Reconnect to peers, measure the uplink and forward revocations. Runs in the DHT's process, until it ends."""
    jobs = [reconnect_lost_peers(dht, node), dht.uplink.watch(node)]
    if dht.membership:
        jobs.append(maintain_revocations(dht, node))
    jobs = asyncio.gather(*jobs)  # a reference: asyncio holds tasks weakly (note 81)
    daemon = find_helpers()
    while all(map(is_alive, daemon)) and not jobs.done():
        await asyncio.sleep(1.0)
    if node.is_alive:  # without the daemon, no call would ever be answered: `exit_if_process_dies` notices the end
        signal.raise_signal(signal.SIGKILL)


class DHT(hivemind.DHT):
    """A DHT that reconnects to lost peers, and exits without a traceback if a process that waits for its answer has
    ended: a helper process, as in each clean stop, or the killed main process."""

    def __init__(self, *args, identity_path: str | None = None, membership: Membership | None = None, **kwargs):
        """Start it. Without `identity_path`, the key is a temporary one. Without membership, the run is open."""
        self.uplink = Uplink()
        self.membership = membership
        #: the attestation of the run by the peers in `initial_peers`; None if no peer has sent one
        self.attestation: RunAttestation | None = None
        maddrs = {name: kwargs.get(name) for name in ("initial_peers", "host_maddrs", "announce_maddrs")}
        self.initial_ids = list(dict.fromkeys(get_peer_id(str(maddr)) for maddr in maddrs["initial_peers"] or ()))
        kwargs |= {name: add_quic(value) for name, value in maddrs.items() if value}
        kwargs["node_id"] = find_node_id(PeerID(find_peer_id(RecordValidator().local_public_key)))
        install()
        with block_signals():  # torch starts its shared memory manager here, and waits forever if a signal kills it
            torch.empty(1).share_memory_()
        with temporary_folder() as folder:  # holds a new key until p2pd has read it
            if not identity_path:  # a file lets hivemind check that no other peer uses this identity
                P2P.generate_identity(identity_path := f"{folder}/identity")
            super().__init__(*args, identity_path=identity_path, **kwargs)
        self.jobs = self.run_coroutine(run_jobs, return_future=True)

    def run(self) -> None:
        """Run the DHT with our node classes, and exit silently if the parent process stops or has died."""
        DHTNode.dht = self
        install_in_dht_process(DHTProtocol, DHTNode)
        try:
            super().run()
        except EOFError:
            parent = multiprocessing.parent_process()
            parent.join(0.0 if STOPPING.value else 1.0)  # it may be about to exit
            if parent.is_alive() and not STOPPING.value:
                raise


async def ping_peers(dht: DHT, node: DHTNode, peer_ids: list[bytes], patience: float | None = None) -> set[bytes]:
    """Return the ids of peers that answer one of two pings within `patience` seconds; default: the response timeout."""
    timeout = patience or dht.uplink.timeouts.response

    async def answers(peer: PeerID) -> bool:
        for again in (False, True):
            with contextlib.suppress(asyncio.TimeoutError):
                # only the second ping removes a silent peer from the routing table
                ping = asyncio.shield(node.protocol.call_ping(peer)) if again else dht.uplink.measure_delay(node, peer)
                if await asyncio.wait_for(ping, timeout) is not None:
                    return True
        return False

    results = await asyncio.gather(*(answers(PeerID(peer_id)) for peer_id in peer_ids))
    return {peer_id for peer_id, has_answered in zip(peer_ids, results, strict=True) if has_answered}
