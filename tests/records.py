"""Records of a run on a real DHT, and peers that publish them, for tests of the monitor and the dashboards."""

import contextlib
import functools
import http.client
import tempfile

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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def make_metrics(epoch: int = 3, **fields) -> LocalMetrics:
    values = dict(samples_per_second=10.0, samples_accumulated=64, total_samples=192, loss=16.0, mini_steps=2)
    values |= dict(averaged_with=2, num_peers=2, grad_norm=1.0, learning_rate=1e-3, skipped_steps=0, client_mode=False)
    values |= dict(epoch_seconds=6.0, waiting_seconds=1.0, averaging_seconds=0.5, bytes_sent=10**6)
    return LocalMetrics(epoch=epoch, **{**values, "bytes_received": 1_200_000, **fields})


@contextlib.contextmanager
def run_dhts(*validators_of_each: list):
    """Run DHTs that know each other; all join through the first one."""
    with contextlib.ExitStack() as stack:
        dhts = []
        for validators in validators_of_each:
            first = dhts[:1]
            options = {"initial_peers": [str(maddr) for dht in first for maddr in dht.get_visible_maddrs()]}
            dht = hivemind.DHT(host_maddrs=[LOOPBACK[1]], start=True, record_validators=validators, **options)
            dhts.append(dht)
            stack.callback(dht.shutdown)
            # which trackers expect
            dht.uplink, dht.key, dht.initial_ids = Uplink(), RSAPrivateKey(), [it.peer_id for it in first]
        yield dhts


def make_tracker(dht: hivemind.DHT, prefix: str, target_batch_size: int, **periods) -> PeerTracker:
    """Make the tracker of a peer in this process, with the key of its DHT, or else a new one."""
    RSAPrivateKey._process_wide_key = getattr(dht, "key", None)
    dht.add_validators([RSASignatureValidator()])  # of a run's own DHTs, `make_validators` returns one
    averaging = make_config(AveragingConfig, AveragingArguments(target_batch_size=target_batch_size), **periods)
    return PeerTracker(dht, prefix, averaging, PeerTrust(dht.uplink))


@contextlib.contextmanager
def run_trackers(dhts: list[hivemind.DHT], target_batch_size: int, **periods):
    prefix, trackers = make_prefix(), []
    with contextlib.ExitStack() as stack:
        for dht in dhts:
            trackers.append(make_tracker(dht, prefix, target_batch_size, **periods))
            stack.callback(trackers[-1].shutdown)
        yield trackers


async def send_bytes(_, node, to, key: str, subkey: bytes, value: bytes | int, expiration_time, is_served=True) -> list:
    """Send these bytes to a peer unchanged, and maybe serve them to others. Runs in the attacker's DHT process.

    A number as the value stands for this number of bytes: hivemind's pipe to its own process breaks on large messages.
    """
    value = MSGPackSerializer.dumps(b"x" * value) if isinstance(value, int) else value
    key_id = DHTID.generate(source=key)
    if is_served and subkey == DHTProtocol.IS_REGULAR_VALUE:
        node.protocol.storage.store(key_id, value, expiration_time)
    elif is_served and subkey != DHTProtocol.IS_DICTIONARY:
        node.protocol.storage.store_subkey(key_id, MSGPackSerializer.loads(subkey), value, expiration_time)
    # hivemind's call_store encodes the subkey: this is the request as an attacker would send it
    parts = dict(keys=[key_id.to_bytes()], subkeys=[subkey], values=[value], expiration_time=[expiration_time])
    request = dht_pb2.StoreRequest(in_cache=[False], peer=node.protocol.node_info, **parts)
    return list((await node.protocol.get_stub(to).rpc_store(request, timeout=10)).store_ok)


def attack(attacker: hivemind.DHT, victim: hivemind.DHT, key: str, subkey, value, expiration_time, **more) -> list:
    """Return whether the victim stored it; see send_bytes."""
    options = dict(to=victim.peer_id, key=key, subkey=subkey, value=value, expiration_time=expiration_time, **more)
    return attacker.run_coroutine(functools.partial(send_bytes, **options), return_future=True).result(timeout=20)


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
        options |= dict(identity_path=file.name, check_if_identity_free=False, host_maddrs=[LOOPBACK[1]], start=True)
        return hivemind.DHT(initial_peers=initial_peers, record_validators=validators, **options)


class Peer:
    """A peer that publishes what the test tells it to."""

    def __init__(self, prefix: str, initial_peer: str, validating: bool = True, key: RSAPrivateKey | None = None):
        self.key, key = f"{prefix}_metrics", key or RSAPrivateKey()
        validators, self.subkey = make_validators(prefix, key)
        # one that does not validate signs, but publishes anything
        self.dht = start_dht_as(key, [initial_peer], validators if validating else validators[1:2])

    def store(self, values: dict) -> bool:
        return self.dht.store(self.key, values, subkey=self.subkey, expiration_time=get_dht_time() + 300)

    def publish(self, values: dict) -> None:
        """Store a record; tried again, as a request may time out on a loaded machine."""
        wait_until(lambda: self.store(values), 30, "a record stored")


@contextlib.contextmanager
def run_peers(prefix: str, initial_peer: str, *validating: bool, key: RSAPrivateKey | None = None):
    """:param key: of the first of them"""
    peers = [Peer(prefix, initial_peer, it, None if i else key) for i, it in enumerate(validating)]
    try:
        yield peers
    finally:
        for peer in peers:
            peer.dht.shutdown()
