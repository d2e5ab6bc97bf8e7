"""Closed runs: who has a valid pass takes part, and all that others ask for is refused, counted, and has no effect."""

import asyncio
import base64
import contextlib
import json
import os
import stat
from functools import partial
from pathlib import Path

import hivemind.p2p.p2p_daemon_bindings.p2pclient as p2pclient
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer
from mains import refuse, run_main
from processes import LOOPBACK, make_prefix, wait_until

import invite
from arguments import SwarmArguments
from support.console import UserError
from swarm.adoption import find_settings
from swarm.dht import DHT
from swarm.joining import check_addresses, start_dht
from swarm.membership import MEMBERS, SHOW, explain_refusal
from swarm.passes import Authority, Invitation, Pass, load_invitation, read_pass
from swarm.reachability import DIAL_BACK, MEASURE
from swarm.vouching import VOUCH
from utils import find_peer_id, make_validators

PLAIN_CLIENT = p2pclient.Client
#: what peers have in shared memory, which this process would use again
KEPT: list[dict] = []


def leave() -> None:
    """Make this process one that has entered no run."""
    RSAPrivateKey._process_wide_key, p2pclient.Client = None, PLAIN_CLIENT
    KEPT.append(dict(MEMBERS.__dict__))
    MEMBERS.__dict__.clear()


@contextlib.contextmanager
def run_peer(prefix: str, *others: DHT, **swarm):
    """A node as make_dht starts it, in a process of its own; what this one knows of members is not its any more."""
    leave()
    try:
        args = check_addresses(SwarmArguments(prefix, addresses(*others), host_maddrs=[LOOPBACK[1]], **swarm))
        dht = start_dht(args, make_validators(args.experiment_prefix)[0], client_mode=args.client_mode)
    finally:
        leave()
    try:
        yield dht
    finally:
        dht.shutdown()


def addresses(*dhts: DHT) -> list[str]:
    return [str(maddr) for dht in dhts for maddr in dht.get_visible_maddrs()]


def make_invitation(folder: Path, prefix: str, name: str, lifetime: float = 3600.0, **changes) -> str:
    """The file of an invitation by the authority in this folder; `changes` are of what the pass says."""
    authority, path = Authority(folder / "authority.pem"), folder / f"{name}.invite"
    key = RSAPrivateKey()
    from utils import RecordValidator

    peer_id = find_peer_id(RecordValidator(key).local_public_key)
    said = dict(prefix=prefix, peer_id=peer_id, username=name, expires=get_dht_time() + lifetime, lifetime=lifetime)
    data = authority.sign(b"pass", (said | changes).values())
    with authority.open_members() as runs:
        authority.note(runs, prefix, data)
    Invitation(key, data, authority.public_key).save("--out", path)
    return str(path)


async def call(_, node, peer: PeerID, name: str, data: bytes = b"") -> str:
    """Runs in a DHT's process: what becomes of a call to that peer."""
    try:
        answer = await node.p2p.call_protobuf_handler(peer, name, BytesValue(value=data), BytesValue)
    except P2PHandlerError as e:
        return explain_refusal(e) or str(e)
    return f"{len(answer.value)} bytes"


async def count_strangers(*_) -> dict:
    """Runs in a DHT's process: how many calls it has refused, by reason."""
    counts = {}
    for count, reason in MEMBERS.strangers.read().values():
        counts[reason] = counts.get(reason, 0) + count
    return counts


async def list_met(_, node) -> list[PeerID]:
    return [PeerID(peer) for peer in MEMBERS.known.read()["peers"]]


async def list_routes(_, node) -> list[PeerID]:
    return list(node.protocol.routing_table.peer_id_to_uid)


def test_members_meet_and_strangers_get_nothing(tmp_path):
    prefix, key = make_prefix(), str(tmp_path / "authority.pem")
    with run_peer(prefix, authority_key=key) as monitor:
        ada = make_invitation(tmp_path, prefix, "ada")
        bob = make_invitation(tmp_path, prefix, "bob")
        with run_peer("", monitor, invite=ada) as one, run_peer(prefix, monitor, invite=bob, client_mode=True) as two:
            assert one.store("key", 1, get_dht_time() + 60, subkey=b"x") is False  # it speaks for itself alone
            validators, _ = make_validators(prefix)
            with run_peer("stranger") as stranger:
                ask = partial(call, peer=monitor.peer_id)
                stranger.run_coroutine(partial(connect, peer=monitor.peer_id, maddrs=addresses(monitor)))
                for name in (VOUCH, DIAL_BACK, MEASURE, "DHTProtocol.rpc_ping", "DHTProtocol.rpc_find"):
                    said = stranger.run_coroutine(partial(ask, name=name))
                    assert "its run is closed" in said, (name, said)
                assert stranger.run_coroutine(partial(ask, name=SHOW)).startswith("Failed")
                assert stranger.peer_id not in monitor.run_coroutine(list_routes)
                assert stranger.peer_id not in monitor.run_coroutine(list_met)
            for peer in (one, two):
                assert peer.run_coroutine(partial(call, peer=monitor.peer_id, name=MEASURE)) == f"{2**17} bytes"
            assert set(monitor.run_coroutine(list_met)) == {one.peer_id, two.peer_id}


async def connect(_, node, peer: PeerID, maddrs: list[str]) -> None:
    from hivemind.utils.multiaddr import Multiaddr

    await node.p2p._client.connect(peer, [Multiaddr(maddr.rpartition("/p2p/")[0]) for maddr in maddrs])
