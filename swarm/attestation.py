"""Attestations: the peers in `initial_peers` tell a new peer about their run. They are its root of trust: their ids are
part of the addresses that it was started with, and the transport proves them. Records that untrusted peers stored about
a run count only if none of these peers answers. A new peer asks them with a client of its own, before it joins."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from functools import partial

import hivemind
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.dht.node import DHTNode
from hivemind.dht.schema import conbytes
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.serializer import MSGPackSerializer
from pydantic.v1 import BaseModel, ValidationError, conlist, constr

from common.files import temporary_folder
from swarm import SwarmError
from swarm.addresses import add_quic, get_host_port, get_peer_id
from swarm.contract import RunContract
from swarm.membership import Membership, explain_denial
from swarm.patches import install
from utils import MAX_WORKERS, Flags

RPC_ATTEST = "vouch"  # the name of the request
ANSWER_TIMEOUT = 5.0  # seconds to wait for an attestation
CONNECT_TIMEOUT = 8.0  # seconds; QUIC gives up after 5, and only then libp2p names the errors
MAX_ATTESTERS = 8  # peers of `initial_peers` that are asked
#: a part of libp2p's error, and what to do about it; the last one applies to all other errors
DIAL_ERRORS = {
    "connection refused": "nothing listens on its port {}: is the peer running, is this its port?",
    "security protocol": "the program on its port {} is not a hivemind peer: check the port",
    "no good addresses": "its name does not resolve: check its spelling and your DNS",
    "timeout": "it does not answer on port {}: is it up, or behind a firewall?",
    "network is unreachable": "this machine has no route there: is it online, and with this version of IP?",
    "": "it does not answer on port {}: is it up, or behind a firewall?",
}
UNKNOWN_PEER = PeerID(b"\x12\x20" + bytes(32))  # a valid id without a known key


class RunAttestation(BaseModel):
    """A peer's attestation of its run."""

    prefix: constr(strict=True, max_length=256)
    contract: RunContract | None = None  # the contract of most contributors; None if no peer has contributed yet
    flags: Flags = ""  # the peer's own flags, which new peers use if no peer has contributed yet
    workers: conlist(conbytes(strict=True, max_length=64), max_items=MAX_WORKERS) = []  # ids of contributors


async def register_attestation_handler(dht: hivemind.DHT, node: DHTNode, prefix: str) -> None:
    """Start to serve the newest attestation of `set_attestation` to new peers. Runs in the DHT process."""
    await set_attestation(dht, node, RunAttestation(prefix=prefix))

    async def serve_attestation(_: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=MSGPackSerializer.dumps(node.attestation.dict()))

    await node.p2p.add_protobuf_handler(RPC_ATTEST, serve_attestation, BytesValue)


async def set_attestation(_: hivemind.DHT, node: DHTNode, attestation: RunAttestation) -> None:
    """Replace the attestation that this peer serves. Runs in the DHT process."""
    node.attestation = attestation


async def request_in_dht(_: hivemind.DHT, node: DHTNode, peers: list[PeerID]) -> dict[PeerID, RunAttestation]:
    """Return the attestations of the peers that answer. Runs in the DHT process."""
    return await request_attestations(node.p2p, peers)


async def request_attestations(p2p: P2P, peers: list[PeerID], is_new: bool = False) -> dict[PeerID, RunAttestation]:
    """Return the attestations of the peers that answer. Raise a SwarmError if none does, and one denies access or, for
    a new peer, has another version of the code."""

    async def request_attestation(peer: PeerID) -> RunAttestation:
        answer = await p2p.call_protobuf_handler(peer, RPC_ATTEST, BytesValue(), BytesValue)
        return RunAttestation.parse_obj(MSGPackSerializer.loads(answer.value))

    calls = (asyncio.wait_for(request_attestation(peer), ANSWER_TIMEOUT) for peer in peers)
    answers = await asyncio.gather(*calls, return_exceptions=True)  # invalid bytes may raise any exception
    valid = {peer: answer for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, RunAttestation)}
    for peer, answer in zip(peers, answers, strict=True):
        if not valid and (reason := explain_denial(answer)):
            raise SwarmError(f"peer {peer} in `initial_peers` does not let this one in: {reason}")
        if is_new and not valid and isinstance(answer, ValidationError) and "unknownflag" in str(answer):
            raise SwarmError(
                f"peer {peer} in `initial_peers` sends settings that this version of the code does not know: use the "
                "run's version (git pull, or ask its organizer)"
            )
    return valid


def ask_initial_peers(dht: hivemind.DHT, prefix: str, is_new_run: bool) -> RunAttestation | None:
    """Return the merged attestations of the peers in `initial_peers`, see `merge_attestations`."""
    request = partial(request_in_dht, peers=dht.initial_ids[:MAX_ATTESTERS])
    return merge_attestations(dht.run_coroutine(request), prefix, is_new_run)


def merge_attestations(answers: dict[PeerID, RunAttestation], prefix: str, is_new_run: bool) -> RunAttestation | None:
    """Merge the attestations of a run; return None if no peer answered, and raise a SwarmError if they disagree.

    :param prefix: the run's name, or an empty string for the run that the peers serve
    :param is_new_run: whether to return None, and not raise a SwarmError, if the peers serve only other runs
    """
    names = sorted({answer.prefix for answer in answers.values()})
    if not prefix and len(names) > 1:
        known = ", ".join(map(repr, names))
        raise SwarmError(f"`initial_peers` serve several runs: choose one by `experiment_prefix` ({known})")
    prefix = prefix or "".join(names)
    matching = {peer: answer for peer, answer in answers.items() if answer.prefix == prefix}
    if not matching:
        if is_new_run or not answers:
            return None
        peer, other = next(iter(answers.items()))
        raise SwarmError(
            f"peer {peer} in `initial_peers` serves run {other.prefix!r}, not {prefix!r}: correct `experiment_prefix`, "
            "or pass `new_run` to start another run among its peers"
        )
    contracts = {peer: answer.contract for peer, answer in matching.items() if answer.contract}
    flags = {peer: answer.flags for peer, answer in matching.items() if answer.flags}
    if contracts:
        agree = len({tuple(sorted(contract.contract.items())) for contract in contracts.values()}) == 1
    else:
        # they agree if none has two values: a trainer without a contribution may list more than the run's monitor
        texts = {text for words in flags.values() for text in re.split(" (?=--)", words)}
        agree = len({re.match(r"--(\w+)", text)[1] for text in texts}) == len(texts)
    if not agree:
        raise SwarmError(
            f"the peers in `initial_peers` disagree on the settings of run {prefix!r}: pass only those that you trust "
            f"({', '.join(map(str, contracts or flags))})"
        )
    workers = list(dict.fromkeys(worker for answer in matching.values() for worker in answer.workers))
    contract = next(iter(contracts.values()), None)
    flags = max(flags.values(), key=len, default="")
    return RunAttestation(prefix=prefix, contract=contract, flags=flags, workers=workers[:MAX_WORKERS])


# --- before joining


@contextlib.asynccontextmanager
async def open_client(membership: Membership | None) -> AsyncIterator[P2P]:
    """Start a P2P daemon that belongs to no swarm; in a closed run it has this member's identity, to be let in."""
    install()
    with temporary_folder() as folder:
        identity = {"identity_path": f"{folder}/identity"} if membership else {}
        p2p = await P2P.create(dht_mode="client", no_listen=True, nat_port_map=False, auto_nat=False, **identity)
    try:
        yield p2p
    finally:
        await p2p.shutdown()


async def connect(p2p: P2P, peer: PeerID, places: list[str], seconds: float) -> Exception | None:
    """Connect to a peer at one of its multiaddrs without id, by TCP or QUIC; return the error if this fails."""
    try:
        await asyncio.wait_for(p2p._client.connect(peer, list(map(Multiaddr, add_quic(places)))), seconds)
    except (ControlFailure, TimeoutError) as e:
        return e
    return None


async def dial(peer: PeerID, places: list[str], seconds: float) -> Exception | None:
    """Connect to a peer as `connect` does, with a separate libp2p client."""
    async with open_client(None) as p2p:
        return await connect(p2p, peer, places, seconds)


def parse_actual_id(error: Exception | None) -> str | None:
    """Return the id of the peer that answered instead of the expected one, from libp2p's error message."""
    match = re.search(r"remote key matches (\w+)", str(error))
    return match and match[1]


async def find_peer(place: str) -> str | None:
    """Return a multiaddr with the id of the peer that listens there, which the error about a wrong id names."""
    peer_id = parse_actual_id(await dial(UNKNOWN_PEER, [place], CONNECT_TIMEOUT))
    return peer_id and f"{place}/p2p/{peer_id}"


async def find_problem(p2p: P2P, maddr: str) -> str | None:
    """Connect to a peer; return None, or why it failed and what to do."""
    error = await connect(p2p, get_peer_id(maddr), [maddr.rpartition("/p2p/")[0]], CONNECT_TIMEOUT)
    if actual_id := parse_actual_id(error):
        return f"another peer is at this address: its id is {actual_id}, use the address it prints now"
    advice = next(text for part, text in DIAL_ERRORS.items() if part in str(error))
    return advice.format(get_host_port(maddr)[2]) if error else None


async def contact_initial_peers(
    maddrs: list[str], membership: Membership | None
) -> tuple[dict[PeerID, RunAttestation], str | None]:
    """Return what `request_attestations` does, and one line about the peers that cannot be reached, or None."""
    maddrs = [maddr for maddr in maddrs if not maddr.startswith("/p2p/")]
    async with open_client(membership) as p2p:
        problems = dict(zip(maddrs, await asyncio.gather(*(find_problem(p2p, maddr) for maddr in maddrs)), strict=True))
        peers = [*dict.fromkeys(get_peer_id(it) for it, why in problems.items() if why is None)][:MAX_ATTESTERS]
        if membership:
            await membership.exchange_revocations(p2p, peers)
        attestations = await request_attestations(p2p, peers, is_new=True)
    texts = [f"{maddr}: {problem}" for maddr, problem in problems.items() if problem]
    return attestations, f"cannot reach `initial_peers` {'; '.join(texts)}" if texts else None
