"""The private key of a peer, which signs its records. The digest of the public key is the peer id."""

import logging
import os
from pathlib import Path

from hivemind.proto.crypto_pb2 import PrivateKey
from hivemind.utils.crypto import RSAPrivateKey

from swarm.config import SwarmConfig
from swarm.credentials import Authority, load_invitation, read_key
from swarm.errors import SwarmError
from swarm.membership import Membership, install_client
from utils import RecordValidator

logger = logging.getLogger("joining")

KEY_FILE = "signing_key"  # in the folder of a trainer without `identity_path`


def make_identity(config: SwarmConfig, kept_at: Path | None = None) -> Membership | None:
    """Set this process's key, and return the membership of a closed run, or None if the run is open.

    Call this once, before any network access and before helpers are forked. The key is read from `invite`, or else from
    `identity_path`, or else from `kept_at`. If the file is missing, the key is new. hivemind then writes it to
    `identity_path`, or `keep_identity` writes it to `kept_at`.

    :param kept_at: the file in which `keep_identity` saves the key. With a new key, a restarted trainer would be
        another peer, and the samples in its checkpoint would count twice in total_samples
    :raises SwarmError: if `invite`, `authority_key` or `identity_path` is not usable
    """
    if config.invite:
        invitation = load_invitation(config.invite)
        key = invitation.key
    elif config.identity_path and os.path.exists(config.identity_path):
        key = load_identity(config.identity_path)
    else:
        key = load_kept_identity(kept_at)
    RSAPrivateKey._process_wide_key = key  # hivemind signs its progress with it and offers no API to set it
    prefix, username = config.experiment_prefix, config.username
    if config.invite:
        membership = Membership.from_invitation(config.invite, invitation, prefix, username)
    elif config.authority_key:
        membership = Membership.from_authority(Authority(config.authority_key), prefix, username)
    else:
        return None
    install_client(membership)
    return membership


def load_identity(path: str) -> RSAPrivateKey:
    """Return the key in the file of `identity_path`, or raise a SwarmError."""
    try:
        key = read_key(PrivateKey.FromString(Path(path).read_bytes()).data)
        RecordValidator(key)  # fails for a key of another type or length
        return key
    except Exception as e:  # the key decoder raises many types for a damaged key
        reason = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
        raise SwarmError(
            f"`identity_path` {path} is not a key file ({reason}): pass one that a peer created, or a new path"
        ) from e


def load_kept_identity(path: Path | None) -> RSAPrivateKey:
    """Return the key in this file, or a new one if there is none."""
    if path is not None and path.exists():
        try:
            return read_key(path.read_bytes())
        except (OSError, ValueError, TypeError) as e:
            reason = getattr(e, "strerror", None) or "it does not hold a key"
            logger.warning(f"{path}: {reason}; using a new key, with which this trainer counts as a new peer")
    return RSAPrivateKey()


def keep_identity(config: SwarmConfig, path: Path) -> None:
    """Save the key in this file for the next start, unless `invite` or `identity_path` already stores it."""
    if config.invite or config.identity_path:
        return
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        if not path.exists():
            unfinished.touch(mode=0o600)
            unfinished.write_bytes(RSAPrivateKey.process_wide().to_bytes())
            unfinished.rename(path)
    except OSError as e:
        logger.warning(f"{path}: {e.strerror}; without this key, the trainer counts as a new peer after a restart")
