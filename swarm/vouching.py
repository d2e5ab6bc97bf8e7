"""What the peers vouch for whose addresses a newcomer was given: the root of trust that everybody has.

Their ids came with the addresses, and the transport proves them. What strangers have stored about a run counts only
where none of them answers.
"""

import asyncio
import re
from collections.abc import Iterable
from functools import partial

import hivemind
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.dht.node import DHTNode
from hivemind.dht.schema import conbytes
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.utils.serializer import MSGPackSerializer
from pydantic.v1 import BaseModel, conlist, constr

from support.console import UserError
from swarm.addresses import get_peer_id
from swarm.membership import explain_denial
from utils import MAX_WORKERS, Flags, RunContract

VOUCH = "vouch"  # the name of the request
ANSWER_SECONDS, ASKED = 5.0, 8  # to wait for an answer; peers that are asked


class RunAttestation(BaseModel):
    """What a peer says of its run."""

    prefix: constr(strict=True, max_length=256)
    contract: RunContract | None = None  # that of most who have worked; None: nobody has
    flags: Flags = ""  # its own ones, by which others begin where nobody has worked
    workers: conlist(conbytes(strict=True, max_length=64), max_items=MAX_WORKERS) = []  # ids of peers that have worked


async def register_attestation_handler(dht: hivemind.DHT, node: DHTNode, prefix: str) -> None:
    """Runs in the DHT's process: from now on, tell newcomers what `vouch` has said last."""
    await set_statement(dht, node, RunAttestation(prefix=prefix))

    async def tell(_: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=MSGPackSerializer.dumps(node.statement.dict()))

    await node.p2p.add_protobuf_handler(VOUCH, tell, BytesValue)


async def set_statement(_: hivemind.DHT, node: DHTNode, statement: RunAttestation) -> None:
    node.statement = statement


def publish_attestation(dht: hivemind.DHT, statement: RunAttestation) -> None:
    """Tell this to newcomers from now on, without waiting."""
    dht.run_coroutine(partial(set_statement, statement=statement), return_future=True)


async def request_attestations(_: hivemind.DHT, node: DHTNode, peers: list[PeerID]) -> dict[PeerID, RunAttestation]:
    """Runs in the DHT's process: the statements of those of these peers that answer."""
    return await request_statements(node.p2p, peers)


async def request_statements(p2p: P2P, peers: list[PeerID]) -> dict[PeerID, RunAttestation]:
    """:raises UserError: all that answer say that this peer is not a member of their run"""

    async def ask(peer: PeerID) -> RunAttestation:
        answer = await p2p.call_protobuf_handler(peer, VOUCH, BytesValue(), BytesValue)
        return RunAttestation.parse_obj(MSGPackSerializer.loads(answer.value))

    calls = (asyncio.wait_for(ask(peer), ANSWER_SECONDS) for peer in peers)
    answers = await asyncio.gather(*calls, return_exceptions=True)  # of whatever kind others' bytes make it
    found = {peer: answer for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, RunAttestation)}
    for peer, answer in zip(peers, answers, strict=True):
        if not found and (reason := explain_denial(answer)):
            raise UserError(f"peer {peer} in --initial_peers does not let this one in: {reason}")
    return found


def ask_initial_peers(
    dht: hivemind.DHT, prefix: str, initial_peers: Iterable[str], is_new_run: bool
) -> RunAttestation | None:
    """What the peers in --initial_peers say of this run, see `merge_attestations`."""
    peers = select_attesters(initial_peers)
    return merge_attestations(
        dht.run_coroutine(partial(request_attestations, peers=peers)) if peers else {}, prefix, is_new_run
    )


def select_attesters(initial_peers: Iterable[str]) -> list[PeerID]:
    return list(dict.fromkeys(map(get_peer_id, initial_peers)))[:ASKED]


def merge_attestations(answers: dict[PeerID, RunAttestation], prefix: str, is_new_run: bool) -> RunAttestation | None:
    """What these say together of a run; None where none of them answers, or knows it.

    :param prefix: the run's; empty: that which they serve
    :param is_new_run: they may serve other runs alone
    :raises UserError: they do, and that was not expected; or they disagree
    """
    names = sorted({answer.prefix for answer in answers.values()})
    if not prefix and len(names) > 1:
        raise UserError(
            f"--initial_peers serve several runs: choose one by --experiment_prefix ({', '.join(map(repr, names))})"
        )
    prefix = prefix or "".join(names)
    found = {peer: answer for peer, answer in answers.items() if answer.prefix == prefix}
    if answers and not found:
        if is_new_run:
            return None
        peer, other = next(iter(answers.items()))
        raise UserError(
            f"peer {peer} in --initial_peers serves run {other.prefix!r}, not {prefix!r}: correct --experiment_prefix, "
            "or give --new_run to begin another run among its peers"
        )
    contracts = {peer: answer.contract for peer, answer in found.items() if answer.contract}
    flags = {peer: answer.flags for peer, answer in found.items() if answer.flags}
    if contracts:
        is_one = len({tuple(sorted(contract.contract.items())) for contract in contracts.values()}) == 1
    else:
        # a trainer that has not worked yet may name more flags than the monitor whose run it has joined
        texts = {text for words in flags.values() for text in re.split(" (?=--)", words)}
        is_one = len({re.match(r"--(?:no_)?(\w+)", text)[1] for text in texts}) == len(texts)
    if not is_one:
        raise UserError(
            f"the peers in --initial_peers disagree on the settings of run {prefix!r}: give those alone whom you trust "
            f"({', '.join(map(str, contracts or flags))})"
        )
    workers = list(dict.fromkeys(worker for answer in found.values() for worker in answer.workers))
    contract = next(iter(contracts.values()), None)
    flags = max(flags.values(), key=len, default="")
    return (
        RunAttestation(prefix=prefix, contract=contract, flags=flags, workers=workers[:MAX_WORKERS]) if found else None
    )
