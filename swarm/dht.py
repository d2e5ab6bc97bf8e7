"""A DHT that reconnects to lost peers, and pings of peers."""

import asyncio
import contextlib
import multiprocessing
import signal
import time

import hivemind
import numpy
import torch
from hivemind.p2p import P2P, PeerID

from common.files import temporary_folder
from common.signals import block_signals, find_helpers, is_alive
from swarm import SwarmError
from swarm.addresses import add_quic, get_peer_id
from swarm.attestation import RunAttestation
from swarm.membership import Membership, maintain_revocations
from swarm.patches import install, install_in_dht_process
from swarm.processes import STOPPING
from swarm.storage import DHTNode, DHTProtocol, find_node_id
from swarm.uplink import Uplink
from utils import RecordValidator, find_peer_id

TOUCH_PERIOD = 10.0  # seconds between two pings of a lost peer, which may have moved or been disconnected
LOST_AFTER = 600.0  # seconds without a peer until it is given up


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
            if membership and not membership.issuer:  # a file lets hivemind check that no other peer uses this identity
                P2P.generate_identity(identity_path := f"{folder}/invited")
            super().__init__(*args, identity_path=identity_path or f"{folder}/identity", **kwargs)
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
    uplink = dht.uplink
    timeout = patience or dht.uplink.timeouts.response

    async def answers(peer: PeerID) -> bool:
        for attempt in range(2):
            with contextlib.suppress(asyncio.TimeoutError):
                # only the second ping removes a silent peer from the routing table
                ping = asyncio.shield(node.protocol.call_ping(peer)) if attempt else uplink.measure_delay(node, peer)
                if await asyncio.wait_for(ping, timeout) is not None:
                    return True
        return False

    results = await asyncio.gather(*(answers(PeerID(peer_id)) for peer_id in peer_ids))
    return {peer_id for peer_id, has_answered in zip(peer_ids, results, strict=True) if has_answered}
