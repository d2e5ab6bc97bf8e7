"""The private key of a peer, which signs its records. The digest of the public key is the peer id."""

import os
from pathlib import Path

from hivemind.proto.crypto_pb2 import PrivateKey
from hivemind.utils.crypto import RSAPrivateKey

from common.files import write_file
from swarm import SwarmError
from swarm.config import SwarmConfig
from swarm.credentials import Authority, load_invitation, read_key
from swarm.membership import AuthenticatedP2PClient, Membership
from swarm.patches import replace_client
from utils import RecordValidator

KEY_FILE = "signing_key"  # in the folder of a trainer without `identity_path`


def make_identity(config: SwarmConfig, kept_at: Path | None = None) -> Membership | None:
    """Set this process's key, and return the membership of a closed run, or None if the run is open. Call this once,
    before any network access and before helpers are forked. If the file of the key is missing, the key is new.

    :param kept_at: the file of the key if neither `invite` nor `identity_path` is given: with a new key, a restarted
        trainer would be another peer, and the samples in its checkpoint would count twice in total_samples
    :raises SwarmError: if `invite`, `authority_key` or the file with the key is not usable
    """
    path = config.identity_path or kept_at
    names = (config.experiment_prefix, config.username)
    membership = None
    if config.invite:
        invitation = load_invitation(config.invite)
        key = invitation.key
        membership = Membership(invitation.credential, invitation.authority)
        invited = membership.own.prefix, membership.own.username
        for setting, value, theirs in zip(("experiment_prefix", "username"), names, invited, strict=True):
            if value and value != theirs:
                raise SwarmError(f"`invite` {config.invite} is for `{setting}` {theirs}, not {value}: omit `{setting}`")
    else:
        key = load_key(path) if path and os.path.exists(path) else RSAPrivateKey()
    RSAPrivateKey._process_wide_key = key  # hivemind signs its progress with it and offers no API to set it
    if config.authority_key and not config.invite:
        membership = Membership.from_authority(Authority(config.authority_key), *names)
    if membership:
        # a subclass, because hivemind creates the instances
        replace_client(type("AuthenticatedP2PClient", (AuthenticatedP2PClient,), {"membership": membership}))
    return membership


def load_key(path: str | Path) -> RSAPrivateKey:
    """Return the key in a file of hivemind or of `keep_identity`, or raise a SwarmError."""
    try:
        data = Path(path).read_bytes()
        # hivemind's files have an envelope
        key = read_key(data if data.startswith(b"0") else PrivateKey.FromString(data).data)
        RecordValidator(key)  # fails for a key of another type or length
        return key
    except Exception as e:  # the key decoder raises many types for a damaged key
        reason = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
        raise SwarmError(f"{path} is not a key file ({reason}): remove it, or change `identity_path`") from e


def keep_identity(config: SwarmConfig, path: Path) -> None:
    """Save the key in this file for the next start, unless `invite` or `identity_path` already stores it."""
    if not (config.invite or config.identity_path or path.exists()):
        write_file(path, RSAPrivateKey.process_wide().to_bytes(), mode=0o600)
