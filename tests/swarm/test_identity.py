"""The key of a peer: its file, and the same key after a restart."""

import pytest
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from common.console import UserError
from swarm.config import SwarmConfig
from swarm.identity import keep_identity, make_identity
from swarm.log_rounds import Identity
from utils import make_validators, peer_label


@pytest.fixture
def start(monkeypatch):
    """start(kept_at, **flags) -> label of the peer that a process with these flags is"""
    monkeypatch.setattr(RSAPrivateKey, "_process_wide_key", None)

    def start_process(kept_at=None, **flags) -> str:
        RSAPrivateKey._process_wide_key = None
        config = SwarmConfig("run", **flags)
        make_identity(config, kept_at)
        if kept_at:
            keep_identity(config, kept_at)
        return peer_label(make_validators("run")[1])

    return start_process


def test_kept_key_survives_restart(start, tmp_path):
    path = tmp_path / "signing_key"
    label = start(path)
    assert path.stat().st_mode & 0o777 == 0o600 and start(path) == label
    path.write_bytes(b"no key")
    with pytest.raises(UserError, match="signing_key is not a key file"):
        start(path)
    assert path.read_bytes() == b"no key"


def test_identity_path_overrides_kept_key(start, tmp_path):
    path, kept, key = tmp_path / "peer.id", tmp_path / "signing_key", RSAPrivateKey()
    identity = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=key.to_bytes())
    path.write_bytes(identity.SerializeToString())
    assert start(kept, identity_path=str(path)) == peer_label(make_validators("run", key)[1])
    assert not kept.exists()
    path.write_bytes(b"no key")
    with pytest.raises(UserError, match="is not a key file"):
        start(kept, identity_path=str(path))


def test_new_keys_replace_oldest_ones(monkeypatch):
    """Many new keys keep no other key out, and not this peer's."""
    monkeypatch.setattr("swarm.log_rounds.MAX_KEYS", 3)
    own, *others = (Identity(RSAPrivateKey()) for _ in range(5))
    for other in others:
        own.add_key(other.peer, other.public_keys[other.peer])
    own.add_key(own.peer, others[0].public_keys[others[0].peer])
    own.add_key(others[0].peer, others[1].public_keys[others[1].peer])
    assert set(own.public_keys) == {own.peer, others[2].peer, others[3].peer}
    assert own.verify(others[3].peer, b"data", others[3].sign(b"data"))
