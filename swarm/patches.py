"""All that is replaced in hivemind from outside, and all that its daemon reads in the environment.

hivemind makes its parts from fixed classes. Where it needs a subclass of ours, the name is replaced here and nowhere
else. Each function says in which process it has an effect, so that plain hivemind stays what it is in all others.
"Note NN" is in docs/hivemind.md; tests/swarm/test_hivemind_gaps.py tells when hivemind repairs it itself.
"""

import asyncio
import contextlib
import os

import hivemind
import hivemind.averaging.allreduce
import hivemind.averaging.averager
import hivemind.averaging.matchmaking
import hivemind.dht.dht
import hivemind.dht.node
import hivemind.p2p.p2p_daemon
from hivemind.averaging.control import StepControl
from hivemind.compression import serialization
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.utils import MPFuture
from hivemind.utils.crypto import RSAPrivateKey

from swarm.guard import RobustReducer, VerifyingContainer
from swarm.matchmaking import EarlyStartMatchmaking, NonBlockingKeyManager
from swarm.sparse import TopKCompression

ENVIRONMENT = {
    # Two public peers that dial each other at the same moment can both fail, and a round is lost: 10 of 20 first dials
    # did, none of 25 with this setting.
    "LIBP2P_TCP_REUSEPORT": "false",
    # p2pd starts two relay services, one that passes 128 kB and one that passes 4 GB, and the later one wins: on two
    # cores the small one in 9 of 12 starts, on one never (of 16). One core is enough for p2pd: 0.5 GB/s either way.
    "GOMAXPROCS": "1",
}


class ResilientControlClient(p2pclient.ControlClient):
    """A connection to the daemon that survives a request which is cancelled just as its answer arrives: hivemind's
    hears nothing from then on, neither answers nor requests of other peers (note 80)."""

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        while not reader.at_eof():
            with contextlib.suppress(asyncio.InvalidStateError):
                await super()._read_from_persistent_conn(reader)


class CancellableStep(StepControl):
    """A step that ends when it is cancelled.

    hivemind tells the averager's process to stop before it marks the step as cancelled. If that process looks in
    between, it keeps looking for a group of this epoch forever, and all later steps wait for that (note 84).
    """

    def cancel(self) -> bool:
        is_cancelled = MPFuture.cancel(self)
        self._trigger.cancel()
        self._cancel.set_result(None)
        return is_cancelled


def install() -> None:
    """Replace what this process and its helpers use; call it before the first connection."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Among relays to choose from, p2pd waits three minutes for a fourth one (note 30); it asks fixed ones at once.
    P2P.FORCE_REACHABILITY_MAPPING["relayed"] = {"forceReachabilityPrivate": 1, "relayDiscovery": 0}
    # Seconds: hivemind's 15 are short for a loaded machine (note 13), also where it looks if an identity is in use.
    P2P.create.__func__.__kwdefaults__["startup_timeout"] = 60
    # A new identity is the key that this process signs with: a record can be traced to the peer that has to prove its
    # id.
    hivemind.p2p.p2p_daemon.RSAPrivateKey = RSAPrivateKey.process_wide
    p2pclient.ControlClient = ResilientControlClient
    hivemind.averaging.averager.StepControl = CancellableStep
    # A codec has to have a number that hivemind knows; nothing here uses this one.
    serialization._BASE_COMPRESSION_TYPES["QUANTILE_8BIT"] = TopKCompression()


def install_in_dht_process(protocol: type, node: type) -> None:
    """Replace the DHT's parts by these subclasses, in its helper process alone."""
    hivemind.dht.node.DHTProtocol, hivemind.dht.dht.DHTNode = protocol, node


def install_in_averager_process() -> None:
    """Replace matchmaking (notes 11, 22, 78, 82, 83, 85) and the parts of an all-reduce, in an averager's process."""
    hivemind.averaging.averager.Matchmaking = EarlyStartMatchmaking
    hivemind.averaging.matchmaking.GroupKeyManager = NonBlockingKeyManager
    hivemind.averaging.allreduce.TensorPartContainer = VerifyingContainer
    hivemind.averaging.allreduce.TensorPartReducer = RobustReducer


def replace_client(client: type[p2pclient.Client]) -> None:
    """Let this process and its helpers call others through this subclass: in a closed run it shows a pass first."""
    p2pclient.Client = client
