"""All monkey patches of hivemind, and the environment variables of its daemon. Each docstring names the processes that
a function affects."""

import asyncio
import contextlib
import os

from hivemind.averaging import allreduce, averager, matchmaking
from hivemind.averaging.control import StepControl
from hivemind.dht import dht, node
from hivemind.p2p import P2P, p2p_daemon
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.utils import MPFuture
from hivemind.utils.crypto import RSAPrivateKey

from swarm.guard import RobustReducer, VerifyingContainer
from swarm.matchmaking import EarlyStartMatchmaking, NonBlockingKeyManager

ENVIRONMENT = {
    "LIBP2P_TCP_REUSEPORT": "false",  # otherwise, two peers that dial each other at the same moment can fail (note 6)
    "GOMAXPROCS": "1",  # on more cores, p2pd often relays only 128 kB (note 48); one is enough for 0.5 GB/s
}


class ResilientControlClient(p2pclient.ControlClient):
    """A connection to the daemon that survives the cancellation of a request whose answer just arrives (note 80)."""

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        while not reader.at_eof():
            with contextlib.suppress(asyncio.InvalidStateError):
                await super()._read_from_persistent_conn(reader)


class CancellableStep(StepControl):
    """A step control whose step always ends when it is cancelled."""

    def cancel(self) -> bool:
        """Cancel the step, and only then notify the averager's process, which may check it in between (note 84)."""
        is_cancelled = MPFuture.cancel(self)
        self._trigger.cancel()
        if not self._cancel.done():  # `leave` and `finish_background` may both cancel it
            self._cancel.set_result(None)
        return is_cancelled


def install() -> None:
    """Replace classes and settings of this process and its helpers; must be called before the first connection."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # With relay discovery, p2pd waits three minutes for a fourth relay (note 30); it contacts fixed relays at once.
    P2P.FORCE_REACHABILITY_MAPPING["relayed"] = {"forceReachabilityPrivate": 1, "relayDiscovery": 0}
    P2P.create.__func__.__kwdefaults__["startup_timeout"] = 60  # seconds, see note 13
    # New identities use the key that signs this process's records: its owner is the peer that the transport verifies.
    p2p_daemon.RSAPrivateKey = RSAPrivateKey.process_wide
    p2pclient.ControlClient = ResilientControlClient
    averager.StepControl = CancellableStep


def install_in_dht_process(protocol_class: type, node_class: type) -> None:
    """Replace the DHT's protocol and node classes by these subclasses, in the DHT's process only."""
    node.DHTProtocol, dht.DHTNode = protocol_class, node_class


def install_in_averager_process() -> None:
    """Replace the matchmaking (notes 11, 22, 78, 82, 83, 85) and all-reduce classes, in an averager's process only."""
    averager.Matchmaking = EarlyStartMatchmaking
    matchmaking.GroupKeyManager = NonBlockingKeyManager
    allreduce.TensorPartContainer = VerifyingContainer
    allreduce.TensorPartReducer = RobustReducer


def replace_client(client: type[p2pclient.Client]) -> None:
    """Make this process and its helpers call peers through this subclass, which in a closed run shows a credential."""
    p2pclient.Client = client
