"""Credentials for closed runs: the authority that issues and revokes them, its member list, and invitation files.

A credential (class `Pass`) states that the peer with this id may take part in this run until this time. It is not a
secret: the transport proves that the peer which presents it has this id. An invitation is a file that holds a
credential and the private key of its peer.
"""

import base64
import binascii
import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer

from support.console import UserError
from support.files import locked, write_file
from utils import RecordValidator, find_peer_id

SIGNATURE_BYTES, MAX_PASS_BYTES = 64, 2048
# Unexpired revoked credentials per run; limited because the list travels with each handshake.
MAX_REVOKED = 1000
MAX_LIST_BYTES = 64 * MAX_REVOKED
MIN_LIFETIME, MAX_LIFETIME = 1.0, 3660 * 86400.0  # seconds that a credential is valid


@dataclass(frozen=True)
class Pass:
    """The content of a credential."""

    prefix: str
    peer_id: bytes
    username: str
    expires: float  # Unix time
    lifetime: float  # seconds; validity of the credential, and of its renewals

    @property
    def is_due(self) -> bool:
        """Return whether the credential should be renewed: less than half of its lifetime is left."""
        return self.expires - get_dht_time() < self.lifetime / 2


def read_signed(kind: bytes, data: bytes, authority: bytes) -> list:
    """Verify the authority's signature on `data`, then decode the content. Unsigned bytes are never decoded.

    :param kind: the type of the content, which is part of the signed bytes
    :param authority: the authority's public key
    :raises ValueError: if the signature is invalid
    """
    signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(authority).verify(signature, kind + body)
    except InvalidSignature:
        raise ValueError("the run's authority has not signed it") from None
    return MSGPackSerializer.loads(body)


@functools.lru_cache(maxsize=4096)
def parse_credential(data: bytes, authority: bytes) -> Pass:
    """Verify a credential's signature and decode it, or raise a ValueError."""
    if len(data) > MAX_PASS_BYTES:
        raise ValueError("the credential is too long")
    return Pass(*read_signed(b"pass", data, authority))


@functools.lru_cache(maxsize=16)
def read_revocations(data: bytes, authority: bytes, prefix: str) -> tuple[float, frozenset[bytes]]:
    """Verify and decode a revocation list.

    :returns: the time of its signature and the ids of the peers whose credentials are revoked
    :raises ValueError: if it is too long, for another run, or the authority has not signed it
    """
    if not data:
        return 0.0, frozenset()
    if len(data) > MAX_LIST_BYTES:
        raise ValueError("the revocation list is too long")
    run, signed_at, *peer_ids = read_signed(b"revocations", data, authority)
    if run != prefix:
        raise ValueError("the revocation list is for another run")
    return signed_at, frozenset(peer_ids)


class Authority:
    """The issuer (CA) of the credentials of closed runs: a signing key, and the member list in a file next to it."""

    def __init__(self, path: str):
        """:param path: the key file, which is created if it does not exist"""
        self.path = Path(path)
        self.ledger = self.path.with_suffix(".members.json")
        try:
            if not self.path.exists():
                options = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
                write_private("--authority_key", self.path, Ed25519PrivateKey.generate().private_bytes(*options))
            self.key = load_pem_private_key(self.path.read_bytes(), password=None)
            self.public_key = self.key.public_key().public_bytes_raw()
            # keys of some other types are longer
            if len(self.public_key) != 32 or not isinstance(self.key, Ed25519PrivateKey):
                raise ValueError("it is not an Ed25519 key")
        except (OSError, ValueError, TypeError, AttributeError) as e:
            reason = getattr(e, "strerror", None) or "it does not hold an authority's key"
            raise UserError(
                f"--authority_key {path}: {reason}; pass a file that a closed run's monitor created, or a new one"
            ) from e

    def sign(self, kind: bytes, content: Iterable) -> bytes:
        """Return the signature of the serialized content, followed by the content."""
        body = MSGPackSerializer.dumps(list(content))
        return self.key.sign(kind + body) + body

    def issue(self, prefix: str, peer_id: bytes, username: str, lifetime: float) -> bytes:
        """Return a new signed credential that is valid for `lifetime` seconds."""
        return self.sign(b"pass", astuple(Pass(prefix, peer_id, username, get_dht_time() + lifetime, lifetime)))

    @contextlib.contextmanager
    def open_members(self) -> Iterator[dict]:
        """Lock the member list, yield it for changes, and write it if it changed; see `open_run` for its format."""
        with locked(self.path.with_suffix(".lock")):
            runs = self.read_members()
            before = json.dumps(runs)
            yield runs
            if json.dumps(runs) != before:
                write_private("--authority_key", self.ledger, json.dumps(runs, indent=2).encode())

    def read_members(self) -> dict:
        """Read the member list without locking it, or raise a UserError."""
        try:
            return json.loads(self.ledger.read_text(encoding="utf-8")) if self.ledger.exists() else {}
        except (OSError, ValueError) as e:
            raise UserError(f"{self.ledger} cannot be read ({e}): restore it, because it lists the revocations") from e

    def record_issued(self, runs: dict, prefix: str, data: bytes) -> None:
        """Add the owner of this credential to the member list, or update their entry."""
        member = parse_credential(data, self.public_key)
        entry = self.open_run(runs, prefix)["members"].setdefault(str(PeerID(member.peer_id)), {"revoked": False})
        entry |= {"username": member.username, "expires": member.expires}

    @staticmethod
    def open_run(runs: dict, prefix: str) -> dict:
        """Return a run's entry: its members by peer id, and its signed revocation list in hexadecimal."""
        return runs.setdefault(prefix, {"members": {}, "revocations": ""})

    def revoke(self, runs: dict, prefix: str, username: str) -> int:
        """Revoke all credentials of this member and return their number."""
        run, now = self.open_run(runs, prefix), get_dht_time()
        entries = [entry for entry in run["members"].values() if entry["username"] == username and not entry["revoked"]]
        for entry in entries:
            entry["revoked"] = True
        revoked = [name for name, entry in run["members"].items() if entry["revoked"] and entry["expires"] > now]
        if len(revoked) > MAX_REVOKED:
            raise UserError(f"{MAX_REVOKED} invitations are already revoked: start a run with another --authority_key")
        ids = (PeerID.from_base58(name).to_bytes() for name in revoked)
        # Peers keep the list with the newest time, so it must increase even if this clock was set back.
        last, _ = read_revocations(bytes.fromhex(run["revocations"]), self.public_key, prefix)
        run["revocations"] = self.sign(b"revocations", [prefix, max(now, last + 1.0), *ids]).hex()
        return len(entries)

    def read_run_revocations(self, prefix: str) -> bytes:
        """Return the run's signed revocation list, empty if no member has been revoked."""
        return bytes.fromhex(self.read_members().get(prefix, {}).get("revocations", ""))


def write_private(flag: str, path: Path, content: bytes) -> None:
    """Write a file atomically, readable only by its owner."""
    if not path.absolute().parent.is_dir() or not write_file(path, lambda file: file.write(content), mode=0o600):
        raise UserError(f"{flag}: {path} cannot be written: pass a file in another folder")


@dataclass
class Invitation:
    """The content of an invitation file, which `invite.py` writes for one peer."""

    key: RSAPrivateKey
    data: bytes  # the signed credential
    authority: bytes  # the authority's public key

    def save(self, flag: str, path: Path) -> None:
        """Write the file as one line of text, which can be pasted as a notebook's secret."""
        identity = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=self.key.to_bytes()).SerializeToString()
        parts = {"key": identity, "pass": self.data, "authority": self.authority}
        text = json.dumps({name: base64.b64encode(part).decode() for name, part in parts.items()})
        write_private(flag, path, text.encode() + b"\n")


def read_key(data: bytes) -> RSAPrivateKey:
    """Decode a private key; invalid bytes raise a ValueError or another exception of the decoder."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": data})
    return key


def load_invitation(path: str) -> Invitation:
    """Read and check the file of --invite, or raise a UserError."""
    try:
        with open(path, "rb") as file:
            text = file.read(2**14)
        parts = {name: base64.b64decode(part, validate=True) for name, part in json.loads(text).items()}
        key = read_key(crypto_pb2.PrivateKey.FromString(parts["key"]).data)
        member = parse_credential(parts["pass"], parts["authority"])
        if member.peer_id != find_peer_id(RecordValidator(key).local_public_key):
            raise ValueError("its key belongs to another peer (each needs its own invitation)")
    except OSError as e:
        raise UserError(f"--invite {path} cannot be read ({os.strerror(e.errno)}): pass an invitation file") from e
    except (binascii.Error, json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as e:
        raise UserError(f"--invite {path} is not an invitation: ask the organizer for the whole file, unchanged") from e
    except Exception as e:  # the key decoder raises many types for a damaged key
        reason = e if isinstance(e, ValueError) else "its key is damaged"
        raise UserError(f"--invite {path} cannot be used, {reason}: ask the organizer for another invitation") from e
    if member.expires <= get_dht_time():
        raise UserError(f"--invite {path} for {member.username} has expired: ask the organizer for a new one")
    return Invitation(key, parts["pass"], parts["authority"])


def parse_duration(flag: str, text: str) -> float:
    """Return the seconds of a duration such as 30d, 12h, 45m or 90s, or raise a UserError."""
    match = re.fullmatch(r"(\d{1,9})([dhms])", text, re.ASCII)
    seconds = float(match[1]) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[match[2]] if match else math.nan
    if not MIN_LIFETIME <= seconds <= MAX_LIFETIME:
        raise UserError(f"{flag} {text} is not a time such as 30d, 12h, 45m or 90s: pass one of at most ten years")
    return seconds
