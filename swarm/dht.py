"""The DHT: finds lost peers again, and tells who answers."""

import asyncio
import contextlib
import math
import multiprocessing
import resource
from collections.abc import Iterable

import hivemind
import numpy
import torch
from hivemind.p2p import P2P, PeerID

from support.console import UserError
from support.files import temporary_folder
from support.signals import block_signals
from swarm.addresses import get_peer_id
from swarm.membership import Membership, maintain_membership
from swarm.patches import install, install_in_dht_process
from swarm.processes import STOPPING
from swarm.storage import DHTNode, make_node_classes
from swarm.uplink import Uplink
from swarm.vouching import RunAttestation

TOUCH_PERIOD = 10.0  # seconds between two pings of lost peers; one that moved or was cut off is found again
TOUCHES = 60  # pings after which a lost peer is given up


def check_versions(numpy_version: str = numpy.__version__) -> None:
    """Stop where hivemind would average nothing and log success: its 8-bit codecs fail silently on numpy >= 2.4."""
    if tuple(int(part) for part in numpy_version.split(".")[:2]) >= (2, 4):
        raise UserError(f"numpy {numpy_version} silently breaks hivemind's compression: pip install 'numpy<2.4'")


async def reconnect_lost_peers(dht: hivemind.DHT, node: DHTNode) -> None:
    """Runs in the DHT's process, forever: look for peers that were lost.

    hivemind forgets a peer that has failed to answer once. A monitor that was restarted would stay alone, and the two
    halves of a network that was cut in two might never meet again.
    """
    initial_peers = {get_peer_id(maddr) for maddr in dht.initial_peers or ()}
    known, lost = set(), dict.fromkeys(initial_peers, 0)
    while True:
        await asyncio.sleep(TOUCH_PERIOD)
        present = set(node.protocol.routing_table.peer_id_to_uid)
        lost = {peer: touches for peer, touches in lost.items() if peer not in present}
        lost |= dict.fromkeys(known - present - lost.keys(), 0)
        known |= present
        answers = await asyncio.gather(*(node.protocol.call_ping(peer) for peer in lost))
        for peer, answer in zip(list(lost), answers, strict=True):
            lost[peer] += 1
            if answer is None and lost[peer] >= TOUCHES and peer not in initial_peers:
                del lost[peer]
                known.discard(peer)


async def monitor_uplink(dht: hivemind.DHT, node: DHTNode) -> None:
    """Runs in the DHT's process, forever."""
    await dht.uplink.watch(node)


def raise_file_limit() -> float:
    """Allow this process and its helpers as many open files as the system does; returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return math.inf if soft == resource.RLIM_INFINITY else soft


class DHT(hivemind.DHT):
    """Finds lost peers again, and ends without a traceback when one that has asked it something ended first: a helper,
    as in each clean stop, or the peer itself, killed."""

    #: what the peers in --initial_peers say of the run; None where nobody does
    vouched: RunAttestation | None = None

    def __init__(
        self,
        *args,
        identity_path: str | None = None,
        uplink: Uplink | None = None,
        membership: Membership | None = None,
        **kwargs,
    ):
        """
        :param identity_path: the file of the peer's key; default: a new key, which is not kept
        :param uplink: shared with all that sends through it; default: a new one
        :param membership: None if the run is open
        :param kwargs: options of hivemind.DHT
        """
        self.uplink, self.membership = uplink or Uplink(), membership
        #: in the DHT's process: those of its coroutines that are not done
        self._tasks: set[asyncio.Task] = set()
        install()
        with block_signals():  # torch starts its manager of shared memory, and would wait forever for one that has died
            torch.empty(1).share_memory_()
        with temporary_folder() as folder:  # p2pd reads a new key there, and it is needed no more
            if membership and membership.invite:  # for hivemind to look whether another peer uses it
                P2P.generate_identity(identity_path := f"{folder}/invited")
            super().__init__(*args, identity_path=identity_path or f"{folder}/identity", **kwargs)

    def run_in_background(self, *args, **kwargs) -> None:
        super().run_in_background(*args, **kwargs)
        self.touching = self.run_coroutine(reconnect_lost_peers, return_future=True)
        self.watching = self.run_coroutine(monitor_uplink, return_future=True)
        if self.membership:
            self.keeping = self.run_coroutine(maintain_membership, return_future=True)

    async def _run_coroutine(self, coro, future) -> None:
        """Hold the task until it is done: hivemind leaves it to the garbage collector (note 86)."""
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await super()._run_coroutine(coro, future)
        finally:
            self._tasks.discard(task)

    def run(self) -> None:
        install_in_dht_process(*make_node_classes(self.uplink, self.membership))
        try:
            super().run()
        except EOFError:
            if STOPPING.value:
                return
            peer = multiprocessing.parent_process()
            peer.join(1.0)  # which may be about to die
            if peer.is_alive():
                raise


def format_peer_list(peer_ids: Iterable[bytes]) -> str:
    return ", ".join(str(PeerID(peer_id)) for peer_id in peer_ids)


async def ping_peers(
    dht: hivemind.DHT, node: DHTNode, peer_ids: list[bytes], patience: float | None = None
) -> set[bytes]:
    """Runs in the DHT's process: those of these peers that answer a ping, or else a second one.

    :param patience: seconds to wait for each answer; default: the uplink's timeout of a response
    """

    uplink: Uplink = dht.uplink
    timeout = patience or uplink.timeouts.response

    async def answers(peer: PeerID) -> bool:
        for attempt in range(2):
            with contextlib.suppress(asyncio.TimeoutError):
                # only the second one costs the peer its place in the routing table
                ping = asyncio.shield(node.protocol.call_ping(peer)) if attempt else uplink.measure_rtt(node, peer)
                if await asyncio.wait_for(ping, timeout) is not None:
                    return True
        return False

    found = await asyncio.gather(*(answers(PeerID(peer_id)) for peer_id in peer_ids))
    return {peer_id for peer_id, is_there in zip(peer_ids, found, strict=True) if is_there}
