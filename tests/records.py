"""Records of a run on a real DHT, and peers that publish them: what the monitor and dashboards make of them."""

import contextlib
import json
import struct
from pathlib import Path

import hivemind
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from processes import LOOPBACK, wait_until

from utils import LocalMetrics, make_validators


def make_metrics(epoch: int = 3, **fields) -> LocalMetrics:
    values = {
        "samples_per_second": 10.0,
        "samples_accumulated": 64,
        "loss": 16.0,
        "mini_steps": 2,
        "averaged_with": 2,
        "num_peers": 2,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "total_samples": 192,
        "skipped_steps": 0,
        "epoch_seconds": 6.0,
        "waiting_seconds": 1.0,
        "averaging_seconds": 0.5,
        "bytes_sent": 1_000_000,
        "bytes_received": 1_200_000,
        "client_mode": False,
    }
    return LocalMetrics(epoch=epoch, **{**values, **fields})


@contextlib.contextmanager
def run_dhts(*validators_of_each: list):
    """DHTs that know each other: the first is met by all others."""
    dhts = []
    try:
        for validators in validators_of_each:
            peers = [str(maddr) for maddr in dhts[0].get_visible_maddrs()] if dhts else []
            host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
            dhts.append(
                hivemind.DHT(initial_peers=peers, host_maddrs=host_maddrs, start=True, record_validators=validators)
            )
        yield dhts
    finally:
        for dht in dhts:
            dht.shutdown()


class Peer:
    """A peer that publishes what the test tells it to."""

    def __init__(self, prefix: str, initial_peer: str, validating: bool = True, key: RSAPrivateKey | None = None):
        self.key = f"{prefix}_metrics"
        validators, self.subkey = make_validators(prefix, key or RSAPrivateKey())
        if not validating:  # signs, but publishes anything
            validators = validators[1:2]
        self.dht = hivemind.DHT(
            initial_peers=[initial_peer], host_maddrs=[LOOPBACK[1]], start=True, record_validators=validators
        )

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
    """What a .wandb file says of each step: records in blocks of 32 KiB, as LevelDB writes its log."""
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
