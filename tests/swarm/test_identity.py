"""The key of a peer: its file, and the same key after a restart."""

import pytest
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from common.console import UserError
from swarm.config import SwarmConfig
from swarm.identity import keep_identity, make_identity
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
    assert path.stat().st_mode & 0o777 == 0o600
    assert start(path) == label
    path.write_bytes(b"no key")
    with pytest.raises(UserError, match="signing_key is not a key file"):
        start(path)
    assert path.read_bytes() == b"no key"


def test_identity_path_overrides_kept_key(start, tmp_path):
    path, kept = tmp_path / "peer.id", tmp_path / "signing_key"
    key = RSAPrivateKey()
    identity = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=key.to_bytes())
    path.write_bytes(identity.SerializeToString())
    assert start(kept, identity_path=str(path)) == peer_label(make_validators("run", key)[1])
    assert not kept.exists()
    path.write_bytes(b"no key")
    with pytest.raises(UserError, match="is not a key file"):
        start(kept, identity_path=str(path))
