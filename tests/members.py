"""Invitations to closed runs, and peers that use them."""

import base64
import contextlib
import json
from pathlib import Path

import hivemind.p2p.p2p_daemon_bindings.p2pclient as p2pclient
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.multiaddr import Multiaddr
from processes import LOOPBACK
from programs.peers import list_maddrs as addresses

from swarm.config import SwarmConfig
from swarm.contract import RunSchema
from swarm.credentials import Authority, Invitation, load_invitation, parse_credential
from swarm.dht import DHT
from swarm.identity import make_identity
from swarm.joining import start_dht
from swarm.membership import explain_denial
from utils import make_validators

PLAIN_CLIENT = p2pclient.Client


def leave() -> None:
    """Forget the run that this process has joined."""
    RSAPrivateKey._process_wide_key, p2pclient.Client = None, PLAIN_CLIENT


@contextlib.contextmanager
def run_peer(prefix: str, *others: DHT, **swarm):
    """Yield a DHT node as Swarm.join starts it, in a process of its own, with the public key of its records. This
    process keeps no key or membership."""
    leave()
    try:
        config = SwarmConfig(prefix, addresses(*others), host_maddrs=[LOOPBACK[1]], **swarm)
        membership = make_identity(config)
        validators, public_key = make_validators(config.experiment_prefix, schema=RunSchema)
        dht = start_dht(config, validators, membership, client_mode=config.client_mode)
        dht.public_key = public_key
    finally:
        leave()
    try:
        yield dht
    finally:
        dht.shutdown()


async def open_stream(_, node, peer: PeerID, name: str) -> str:
    """Return the result of a call with a stream as its answer. Runs in a DHT's process."""
    try:
        async for _ in await node.p2p.iterate_protobuf_handler(peer, name, BytesValue(), BytesValue):
            return "an answer"
    except P2PHandlerError as e:
        return explain_denial(e) or str(e)


async def connect(_, node, peer: PeerID, maddrs: list[str]) -> None:
    await node.p2p._client.connect(peer, [Multiaddr(maddr.rpartition("/p2p/")[0]) for maddr in maddrs])


def make_invitation(folder: Path, run: str, name: str, lifetime: float = 3600.0, **changes) -> str:
    """Write an invitation by the authority in this folder; `changes` are of the content of its credential."""
    authority, path = Authority(folder / "authority.pem"), folder / f"{name}.invite"
    authority.invite(run, name, lifetime, path)
    if changes:
        invitation = load_invitation(path)
        content = vars(parse_credential(invitation.credential, invitation.authority)) | changes
        Invitation(invitation.key, authority.sign(b"pass", content.values()), authority.public_key).save(path)
    return str(path)


def secret_parts(invitation: str) -> list[str]:
    """Return pieces of the key and the credential in an invitation that each copy of them would contain: in base64 at
    each of its three offsets, in hexadecimal, or as decoded text."""
    parts, found = json.loads(invitation), []
    for data in (base64.b64decode(parts["key"])[100:], base64.b64decode(parts["pass"])):
        found += [base64.b64encode(data[at:])[:40].decode() for at in range(3)]
        found += [data[:30].hex(), data[:30].decode(errors="replace")]
    return found
