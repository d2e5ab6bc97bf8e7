"""The key of a peer: it signs the peer's records, and its digest is the peer id."""

import logging
import os
from pathlib import Path

from hivemind.proto.crypto_pb2 import PrivateKey
from hivemind.utils.crypto import RSAPrivateKey

from arguments import SwarmArguments
from support.console import UserError
from swarm.membership import Membership, install_client
from swarm.passes import Authority, load_invitation, read_key
from utils import RecordValidator

logger = logging.getLogger("joining")

KEY_FILE = "signing_key"  # in the folder of a trainer without --identity_path


def make_identity(swarm: SwarmArguments, kept_at: Path | None = None) -> Membership | None:
    """Set this process's key and, for a closed run, load its pass.

    Call it once, before anything that uses the network and before helpers are forked. The key comes from --invite, or
    else from --identity_path, or else from `kept_at`. A missing file means a new key: hivemind writes it to
    --identity_path, `keep_identity` to the other one.

    :param kept_at: the file in which `keep_identity` has saved the key, if it has. The public key names a peer in
        metrics: with a new key, a restarted trainer would be another peer, whose total_samples count again those that
        its checkpoint remembers.
    :returns: the membership of a closed run; None if the run is open
    :raises UserError: --invite, --authority_key or --identity_path is not usable
    """
    if swarm.invite:
        invitation = load_invitation(swarm.invite)
        key = invitation.key
    elif swarm.identity_path and os.path.exists(swarm.identity_path):
        key = load_identity(swarm.identity_path)
    else:
        key = load_kept_identity(kept_at)
    RSAPrivateKey._process_wide_key = key  # hivemind has no other way in, and signs its progress with it
    if not swarm.authorize:
        return None
    if swarm.invite:
        prefix, username = swarm.experiment_prefix, swarm.username
        membership = Membership.from_invitation(swarm.invite, invitation, prefix, username)
    else:
        issuer = Authority(swarm.authority_key)
        membership = Membership.from_authority(issuer, swarm.experiment_prefix, swarm.username)
    install_client(membership)
    return membership


def load_identity(path: str) -> RSAPrivateKey:
    """Return the key in the file of --identity_path.

    :raises UserError: the file holds no usable key
    """
    try:
        key = read_key(PrivateKey.FromString(Path(path).read_bytes()).data)
        RecordValidator(key)  # it may be a key of another kind or length
        return key
    except Exception as e:  # the reader of keys raises many kinds, all of which mean the same
        reason = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
        raise UserError(
            f"--identity_path {path} is not a key file ({reason}): name one that a peer has made, or one that does "
            "not exist yet"
        ) from e


def load_kept_identity(path: Path | None) -> RSAPrivateKey:
    """Return the key in this file, or a new one if there is none."""
    if path is not None and path.exists():
        try:
            return read_key(path.read_bytes())
        except (OSError, ValueError, TypeError) as e:
            reason = getattr(e, "strerror", None) or "it holds no key"
            logger.warning(f"{path}: {reason}; with a key for this start only, others take this trainer for a new one")
    return RSAPrivateKey()


def keep_identity(swarm: SwarmArguments, path: Path) -> None:
    """Save the key in this file for the next start, unless it has a file already."""
    if swarm.invite or swarm.identity_path:
        return
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        if not path.exists():
            unfinished.touch(mode=0o600)
            unfinished.write_bytes(RSAPrivateKey.process_wide().to_bytes())
            unfinished.rename(path)
    except OSError as e:
        logger.warning(f"{path}: {e.strerror}; without it, others take this trainer for a new one after a restart")
