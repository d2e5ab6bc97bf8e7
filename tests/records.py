"""Records of a run on a real DHT, and peers that publish them, for tests of the monitor and the dashboards."""

import contextlib
import functools
import json
import struct
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import hivemind
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.proto import crypto_pb2, dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from processes import LOOPBACK, make_prefix, wait_until

from arguments import AveragingArguments
from swarm.config import AveragingConfig, make_config
from swarm.progress import PeerTracker
from swarm.trust import PeerTrust
from swarm.uplink import Uplink
from utils import LocalMetrics, make_validators


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple:
    """Return the answer of a status page: its code, headers and body."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.headers, e.read()


def make_metrics(epoch: int = 3, **fields) -> LocalMetrics:
    values = dict(samples_per_second=10.0, samples_accumulated=64, total_samples=192, loss=16.0, mini_steps=2)
    values |= dict(averaged_with=2, num_peers=2, grad_norm=1.0, learning_rate=1e-3, skipped_steps=0, client_mode=False)
    values |= dict(epoch_seconds=6.0, waiting_seconds=1.0, averaging_seconds=0.5, bytes_sent=10**6)
    return LocalMetrics(epoch=epoch, **{**values, "bytes_received": 1_200_000, **fields})


@contextlib.contextmanager
def run_dhts(*validators_of_each: list):
    """Run DHTs that know each other; all join through the first one."""
    dhts = []
    try:
        for validators in validators_of_each:
            peers = [str(maddr) for maddr in dhts[0].get_visible_maddrs()] if dhts else []
            host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
            dht = hivemind.DHT(initial_peers=peers, host_maddrs=host_maddrs, start=True, record_validators=validators)
            dht.uplink, dht.key, dht.initial_ids = Uplink(), RSAPrivateKey(), [it.peer_id for it in dhts[:1]]
            dhts.append(dht)
        yield dhts
    finally:
        for dht in dhts:
            dht.shutdown()


def make_tracker(dht: hivemind.DHT, prefix: str, target_batch_size: int, **periods) -> PeerTracker:
    """Make the tracker of a peer in this process, with the key of its DHT, or else a new one."""
    RSAPrivateKey._process_wide_key = getattr(dht, "key", None)
    dht.add_validators([RSASignatureValidator()])  # of a run's own DHTs, `make_validators` returns one
    averaging = make_config(AveragingConfig, AveragingArguments(target_batch_size=target_batch_size), **periods)
    return PeerTracker(dht, prefix, averaging, PeerTrust(dht.uplink))


@contextlib.contextmanager
def run_trackers(dhts: list[hivemind.DHT], target_batch_size: int, **periods):
    """Run the trackers of a new run, one on each DHT."""
    prefix, trackers = make_prefix(), []
    try:
        for dht in dhts:
            trackers.append(make_tracker(dht, prefix, target_batch_size, **periods))
        yield trackers
    finally:
        for tracker in trackers:
            tracker.shutdown()


async def send_bytes(_dht, node, to, arguments: tuple[str, bytes, bytes | int, float]) -> list[bool]:
    """Send these bytes to a peer unchanged, and serve them to others. Runs in the attacker's DHT process.

    A number as the value stands for this number of bytes: hivemind's pipe to its own process breaks on large messages.
    """
    key, subkey, value, expiration_time = arguments
    if isinstance(value, int):
        value = MSGPackSerializer.dumps(b"x" * value)
    key_id = DHTID.generate(source=key)
    if subkey == DHTProtocol.IS_REGULAR_VALUE:
        node.protocol.storage.store(key_id, value, expiration_time)
    elif subkey != DHTProtocol.IS_DICTIONARY:
        node.protocol.storage.store_subkey(key_id, MSGPackSerializer.loads(subkey), value, expiration_time)
    # hivemind's call_store encodes the subkey: this is the request as an attacker would send it
    request = dht_pb2.StoreRequest(
        keys=[key_id.to_bytes()],
        subkeys=[subkey],
        values=[value],
        expiration_time=[expiration_time],
        in_cache=[False],
        peer=node.protocol.node_info,
    )
    response = await node.protocol.get_stub(to).rpc_store(request, timeout=10)
    return list(response.store_ok)


def attack(attacker: hivemind.DHT, victim: hivemind.DHT, *arguments) -> list[bool]:
    """Return whether the victim stored it; see send_bytes for the arguments after the victim."""
    coroutine = functools.partial(send_bytes, to=victim.peer_id, arguments=arguments)
    return attacker.run_coroutine(coroutine, return_future=True).result(timeout=20)


def sign(private_key: RSAPrivateKey, key: str, subkey: bytes, value: bytes, expiration_time: float) -> bytes:
    """Sign a value by this key, which need not own the subkey."""
    record = DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, value, expiration_time)
    signature = private_key.sign(RSASignatureValidator(private_key)._serialize_record(record))
    return value + RSASignatureValidator.SIGNATURE_FORMAT.replace(b"_value_", signature)


def start_dht_as(key: RSAPrivateKey, initial_peers: list[str], validators: list, **options) -> hivemind.DHT:
    """Start hivemind's own DHT with the peer id of this key: our DHTs accept its records from no other peer."""
    identity = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=key.to_bytes())
    with tempfile.NamedTemporaryFile() as file:
        file.write(identity.SerializeToString())
        file.flush()
        return hivemind.DHT(
            initial_peers=initial_peers,
            host_maddrs=[LOOPBACK[1]],
            start=True,
            record_validators=validators,
            identity_path=file.name,
            check_if_identity_free=False,
            **options,
        )


class Peer:
    """A peer that publishes what the test tells it to."""

    def __init__(self, prefix: str, initial_peer: str, validating: bool = True, key: RSAPrivateKey | None = None):
        self.key, key = f"{prefix}_metrics", key or RSAPrivateKey()
        validators, self.subkey = make_validators(prefix, key)
        if not validating:  # signs, but publishes anything
            validators = validators[1:2]
        self.dht = start_dht_as(key, [initial_peer], validators)

    def store(self, values: dict) -> bool:
        return self.dht.store(self.key, values, subkey=self.subkey, expiration_time=get_dht_time() + 300)

    def publish(self, values: dict) -> None:
        """Store a record; tried again, as a request may time out on a loaded machine."""
        wait_until(lambda: self.store(values), 30, "a record stored")


@contextlib.contextmanager
def run_peers(prefix: str, initial_peer: str, *validating: bool, key: RSAPrivateKey | None = None):
    """:param key: of the first of them"""
    peers = []
    try:
        for is_validating in validating:
            peers.append(Peer(prefix, initial_peer, is_validating, None if peers else key))
        yield peers
    finally:
        for peer in peers:
            peer.dht.shutdown()


def read_wandb_history(path: Path) -> dict[int, dict]:
    """Return the values of each step in a .wandb file: records in blocks of 32 KiB, as LevelDB writes its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, history = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, part = Record.FromString(part), b""
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
                history[record.history.step.num] = {name: json.loads(item.value_json) for name, item in items.items()}
    return history
