"""Credentials for closed runs: the authority that issues and revokes them, its member list, and invitation files.

A credential is not a secret: the transport proves that the peer that presents it has the id in it. An invitation is a
file with a credential and the private key of its peer. On the wire and in files, a credential is named "pass".
"""

import base64
import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from common.files import locked, write_file
from swarm import SwarmError
from utils import RecordValidator, find_peer_id

SIGNATURE_BYTES = 64
MAX_CREDENTIAL_BYTES = 2048
# Unexpired revoked credentials per run; limited because peers send the list to each other again and again.
MAX_REVOKED = 1000
MAX_LIST_BYTES = 64 * MAX_REVOKED


@dataclass(frozen=True)
class MembershipCredential:
    """The statement that a peer may take part in a run until a time, in the order in which it is signed."""

    prefix: str
    peer_id: bytes
    username: str
    expires: float  # Unix time


def read_signed(kind: bytes, data: bytes, authority: bytes, max_bytes: int) -> list:
    """Return the content of signed data of this kind, or raise a ValueError, before decoding it, if it is forged."""
    if len(data) > max_bytes:
        raise ValueError("it is too long")
    body = data[SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(authority).verify(data[:SIGNATURE_BYTES], kind + body)
    except InvalidSignature:
        raise ValueError("the run's authority has not signed it") from None
    return MSGPackSerializer.loads(body)


@functools.lru_cache(maxsize=4096)
def parse_credential(data: bytes, authority: bytes) -> MembershipCredential:
    """Verify a credential's signature and decode it, or raise a ValueError."""
    content = read_signed(b"pass", data, authority, MAX_CREDENTIAL_BYTES)
    return MembershipCredential(*content[:4])  # older invitations end with the lifetime of renewed credentials


@functools.lru_cache(maxsize=16)
def read_revocations(data: bytes, authority: bytes, prefix: str) -> tuple[float, frozenset[bytes]]:
    """Return when a revocation list was signed, and the ids of the revoked peers; none if it is empty or invalid."""
    with contextlib.suppress(ValueError):
        run, signed_at, *peer_ids = read_signed(b"revocations", data, authority, MAX_LIST_BYTES)
        if run == prefix:
            return signed_at, frozenset(peer_ids)
    return 0.0, frozenset()


class Authority:
    """The issuer (CA) of the credentials of closed runs: a signing key, and the member list in a file next to it."""

    def __init__(self, path: str):
        """:param path: the key file, which is created if it does not exist"""
        self.path = Path(path)
        self.member_list = self.path.with_suffix(".members.json")
        try:
            if not self.path.exists():
                key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
                write_private("authority_key", self.path, key.decode())
            self.key = load_pem_private_key(self.path.read_bytes(), password=None)
            if not isinstance(self.key, Ed25519PrivateKey):
                raise TypeError("it is not an Ed25519 key")
        except (OSError, ValueError, TypeError) as e:
            reason = getattr(e, "strerror", None) or "it does not hold an authority's key"
            text = f"`authority_key` {path}: {reason}; choose the key of a closed run's monitor, or a new file"
            raise SwarmError(text) from e
        self.public_key = self.key.public_key().public_bytes_raw()

    def sign(self, kind: bytes, content: Iterable) -> bytes:
        """Return the signature of the serialized content, followed by the content."""
        body = MSGPackSerializer.dumps(list(content))
        return self.key.sign(kind + body) + body

    def issue(self, prefix: str, peer_id: bytes, username: str, expires: float) -> bytes:
        """Return a new credential that is valid until this time."""
        return self.sign(b"pass", [prefix, peer_id, username, expires])

    def invite(self, prefix: str, username: str, lifetime: float, path: Path) -> None:
        """Write an invitation that is valid for `lifetime` seconds, and add its peer to the member list."""
        key = RSAPrivateKey()
        expires = get_dht_time() + lifetime
        peer_id = find_peer_id(RecordValidator(key).local_public_key)
        with self.open_run(prefix) as run:  # first, because only listed invitations can be revoked
            run["members"][str(PeerID(peer_id))] = {"username": username, "expires": expires, "revoked": False}
        Invitation(key, self.issue(prefix, peer_id, username, expires), self.public_key).save(path)

    def read_members(self) -> dict[str, dict]:
        """Read the member list without locking it; see `open_run` for its format."""
        try:
            return json.loads(self.member_list.read_text(encoding="utf-8")) if self.member_list.exists() else {}
        except (OSError, ValueError) as e:
            raise SwarmError(f"{self.member_list} cannot be read ({e}): restore it from a backup") from e

    @contextlib.contextmanager
    def open_run(self, prefix: str) -> Iterator[dict]:
        """Lock the member list, yield a run's entry for changes, and write the list. An entry holds the run's members
        by peer id, and its signed revocation list in hexadecimal."""
        with locked(self.path.with_suffix(".lock")):
            runs = self.read_members()
            yield runs.setdefault(prefix, {"members": {}, "revocations": ""})
            write_private("authority_key", self.member_list, json.dumps(runs, indent=2))

    def revoke(self, prefix: str, username: str | None = None, newer: bytes = b"") -> int:
        """Revoke all credentials of this member and return their number, or raise a SwarmError if there are none. Add
        those of a newer list: invite.py has run on another machine, or the member list is from a backup."""
        with self.open_run(prefix) as run:
            lists = [read_revocations(it, self.public_key, prefix) for it in (bytes.fromhex(run["revocations"]), newer)]
            (last_time, last_ids), (time, ids) = lists
            members = {PeerID.from_base58(name).to_bytes(): it for name, it in run["members"].items()}
            named = {peer_id for peer_id, it in members.items() if it["username"] == username}
            if username and not named:
                raise SwarmError(f"run {prefix!r} has no member {username!r}")
            for peer_id in members.keys() & (named | last_ids | ids):
                members[peer_id]["revoked"] = True
            revoked = {peer_id for peer_id, it in members.items() if it["revoked"] and it["expires"] > get_dht_time()}
            revoked |= (last_ids | ids) - members.keys()  # those of another copy of the member list
            if time <= last_time or revoked - ids:
                if len(revoked) > MAX_REVOKED:
                    raise SwarmError(f"{MAX_REVOKED} invitations are revoked: start a run with another `authority_key`")
                # Peers keep the list with the newest time, so it must increase even if this clock was set back.
                newer = self.sign(b"revocations", [prefix, max(get_dht_time(), last_time + 1.0, time + 1.0), *revoked])
            run["revocations"] = newer.hex()
        return len(named)


def write_private(setting: str, path: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner."""
    if not path.absolute().parent.is_dir() or not write_file(path, text, mode=0o600):
        raise SwarmError(f"`{setting}`: {path} cannot be written: choose a file in another folder")


@dataclass
class Invitation:
    """The content of an invitation file, which `invite.py` writes for one peer."""

    key: RSAPrivateKey
    credential: bytes
    authority: bytes  # the authority's public key

    def save(self, path: Path) -> None:
        """Write the file as one line of text, which can be pasted as a notebook's secret."""
        identity = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=self.key.to_bytes()).SerializeToString()
        parts = {"key": identity, "pass": self.credential, "authority": self.authority}
        text = json.dumps({name: base64.b64encode(part).decode() for name, part in parts.items()})
        write_private("out", path, text + "\n")


def read_key(data: bytes) -> RSAPrivateKey:
    """Decode a private key; invalid bytes raise a ValueError or another exception of the decoder."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": data})
    return key


def load_invitation(path: str) -> Invitation:
    """Read and check an invitation file, or raise a SwarmError."""
    try:
        with open(path, "rb") as file:
            parts = {name: base64.b64decode(it, validate=True) for name, it in json.loads(file.read(2**14)).items()}
        key = read_key(crypto_pb2.PrivateKey.FromString(parts["key"]).data)
        credential = parse_credential(parts["pass"], parts["authority"])
        if credential.peer_id != find_peer_id(RecordValidator(key).local_public_key):
            raise ValueError("its key belongs to another peer")
    except OSError as e:
        raise SwarmError(f"`invite` {path} cannot be read ({os.strerror(e.errno)}): give an invitation file") from e
    except Exception as e:  # for damaged bytes, the decoders raise many types, and subclasses of ValueError
        reason = e if type(e) is ValueError else "it is damaged or incomplete"
        raise SwarmError(f"`invite` {path} is not a valid invitation ({reason}): ask the organizer for another") from e
    if credential.expires <= get_dht_time():
        raise SwarmError(f"`invite` {path} for {credential.username} has expired: ask the organizer for a new one")
    return Invitation(key, parts["pass"], parts["authority"])
