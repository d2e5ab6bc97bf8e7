"""Passes to closed runs: what an authority signs, the invitations that it hands out, and what it remembers of them.

A pass says that the peer with this id may take part in this run until then. It is no secret: who shows it has to be
that peer, which the transport proves. An invitation is a file with a pass and the key of the peer that it is for.
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
MAX_REVOKED = 1000  # at once, of passes that have not ended: the list travels with each handshake
MAX_LIST_BYTES = 64 * MAX_REVOKED
LONGEST, SHORTEST = 3660 * 86400.0, 1.0  # seconds of a pass


@dataclass(frozen=True)
class Pass:
    prefix: str
    peer_id: bytes
    username: str
    expires: float  # Unix time
    lifetime: float  # seconds, for which it is renewed

    @property
    def is_due(self) -> bool:
        """Whether it is time to renew it."""
        return self.expires - get_dht_time() < self.lifetime / 2


def read_signed(kind: bytes, data: bytes, authority: bytes) -> list:
    """What this authority has signed; nothing else is decoded.

    :param authority: its public key
    :raises ValueError: it has not
    """
    signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(authority).verify(signature, kind + body)
    except InvalidSignature:
        raise ValueError("the authority of this run has not signed it") from None
    return MSGPackSerializer.loads(body)


@functools.lru_cache(maxsize=4096)
def parse_credential(data: bytes, authority: bytes) -> Pass:
    """:raises ValueError: it is not of this authority"""
    if len(data) > MAX_PASS_BYTES:
        raise ValueError("it is too long for a pass")
    return Pass(*read_signed(b"pass", data, authority))


@functools.lru_cache(maxsize=16)
def read_revocations(data: bytes, authority: bytes, prefix: str) -> tuple[float, frozenset[bytes]]:
    """When these were signed, and the ids of the peers whose passes do not count any more.

    :raises ValueError: they are not of this authority, or of another run
    """
    if not data:
        return 0.0, frozenset()
    if len(data) > MAX_LIST_BYTES:
        raise ValueError("it is too long")
    run, signed, *peer_ids = read_signed(b"revocations", data, authority)
    if run != prefix:
        raise ValueError("it is of another run")
    return signed, frozenset(peer_ids)


class Authority:
    """Who decides on the members of closed runs: a key, and the list of its members beside it."""

    def __init__(self, path: str):
        """:param path: of the key, which is made if it does not exist"""
        self.path, self.ledger = Path(path), Path(path).with_suffix(".members.json")
        try:
            if not self.path.exists():
                options = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
                write_private("--authority_key", self.path, Ed25519PrivateKey.generate().private_bytes(*options))
            self.key = load_pem_private_key(self.path.read_bytes(), password=None)
            self.public_key = self.key.public_key().public_bytes_raw()
            # of a key of another kind, this is longer
            if len(self.public_key) != 32 or not isinstance(self.key, Ed25519PrivateKey):
                raise ValueError("it is of another kind")
        except (OSError, ValueError, TypeError, AttributeError) as e:
            reason = getattr(e, "strerror", None) or "it holds no key of an authority"
            raise UserError(
                f"--authority_key {path}: {reason}; name a file that a closed run's monitor has made, or a new one"
            ) from e

    def sign(self, kind: bytes, content: Iterable) -> bytes:
        body = MSGPackSerializer.dumps(list(content))
        return self.key.sign(kind + body) + body

    def issue(self, prefix: str, peer_id: bytes, username: str, lifetime: float) -> bytes:
        return self.sign(b"pass", astuple(Pass(prefix, peer_id, username, get_dht_time() + lifetime, lifetime)))

    @contextlib.contextmanager
    def open_members(self) -> Iterator[dict]:
        """By run what is known of its members, by their ids, and its revocations; what is changed in it is written."""
        with locked(self.path.with_suffix(".lock")):
            runs = self.read_members()
            before = json.dumps(runs)
            yield runs
            if json.dumps(runs) != before:
                write_private("--authority_key", self.ledger, json.dumps(runs, indent=2).encode())

    def read_members(self) -> dict:
        try:
            return json.loads(self.ledger.read_text(encoding="utf-8")) if self.ledger.exists() else {}
        except (OSError, ValueError) as e:
            raise UserError(f"{self.ledger} cannot be read ({e}): restore it, as it holds who was revoked") from e

    def record_issued(self, runs: dict, prefix: str, data: bytes) -> None:
        """Remember the member whose pass this is."""
        member = parse_credential(data, self.public_key)
        entry = self.open_run(runs, prefix)["members"].setdefault(str(PeerID(member.peer_id)), {"revoked": False})
        entry |= {"username": member.username, "expires": member.expires}

    @staticmethod
    def open_run(runs: dict, prefix: str) -> dict:
        return runs.setdefault(prefix, {"members": {}, "revocations": ""})

    def revoke(self, runs: dict, prefix: str, username: str) -> int:
        """Revoke all passes of this member; returns how many."""
        run, now = self.open_run(runs, prefix), get_dht_time()
        found = [entry for entry in run["members"].values() if entry["username"] == username and not entry["revoked"]]
        for entry in found:
            entry["revoked"] = True
        revoked = [name for name, entry in run["members"].items() if entry["revoked"] and entry["expires"] > now]
        if len(revoked) > MAX_REVOKED:
            raise UserError(f"{MAX_REVOKED} passes are revoked already: begin a run with another --authority_key")
        ids = (PeerID.from_base58(name).to_bytes() for name in revoked)
        # the newest list counts, also where this clock was set back
        last, _ = read_revocations(bytes.fromhex(run["revocations"]), self.public_key, prefix)
        run["revocations"] = self.sign(b"revocations", [prefix, max(now, last + 1.0), *ids]).hex()
        return len(found)

    def read_run_revocations(self, prefix: str) -> bytes:
        return bytes.fromhex(self.read_members().get(prefix, {}).get("revocations", ""))


def write_private(flag: str, path: Path, content: bytes) -> None:
    """A file that nobody else can read, complete or not at all."""
    if not path.absolute().parent.is_dir() or not write_file(path, lambda file: file.write(content), mode=0o600):
        raise UserError(f"{flag}: {path} cannot be written: name a file in another folder")


@dataclass
class Invitation:
    """What `invite.py` writes, for one peer."""

    key: RSAPrivateKey
    data: bytes  # the pass
    authority: bytes  # its public key

    def save(self, flag: str, path: Path) -> None:
        identity = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=self.key.to_bytes()).SerializeToString()
        parts = {"key": identity, "pass": self.data, "authority": self.authority}
        # one line of text, to be pasted as a notebook's secret
        text = json.dumps({name: base64.b64encode(part).decode() for name, part in parts.items()})
        write_private(flag, path, text.encode() + b"\n")


def read_key(data: bytes) -> RSAPrivateKey:
    """:raises ValueError: or what else the reader of keys raises, for what is no key"""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": data})
    return key


def load_invitation(path: str) -> Invitation:
    """:raises UserError: it is none"""
    try:
        with open(path, "rb") as file:
            text = file.read(2**14)
        parts = {name: base64.b64decode(part, validate=True) for name, part in json.loads(text).items()}
        key = read_key(crypto_pb2.PrivateKey.FromString(parts["key"]).data)
        member = parse_credential(parts["pass"], parts["authority"])
        if member.peer_id != find_peer_id(RecordValidator(key).local_public_key):
            raise ValueError("its pass is of another peer: each needs an invitation of its own")
    except OSError as e:
        raise UserError(
            f"--invite {path} cannot be read ({os.strerror(e.errno)}): name the file of an invitation"
        ) from e
    except (binascii.Error, json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as e:
        raise UserError(f"--invite {path} is not an invitation: ask the organizer for the whole file, unchanged") from e
    except Exception as e:  # the reader of keys raises many kinds, all of which mean the same
        reason = e if isinstance(e, ValueError) else "its key is damaged"
        raise UserError(f"--invite {path} cannot be used, {reason}: ask the organizer for another invitation") from e
    if member.expires <= get_dht_time():
        raise UserError(f"--invite {path}: the pass of {member.username} has expired: ask the organizer for a new one")
    return Invitation(key, parts["pass"], parts["authority"])


def parse_duration(flag: str, text: str) -> float:
    """Seconds: 30d, 12h, 45m or 90s."""
    match = re.fullmatch(r"(\d{1,9})([dhms])", text, re.ASCII)
    seconds = float(match[1]) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[match[2]] if match else math.nan
    if not SHORTEST <= seconds <= LONGEST:
        raise UserError(f"{flag} {text} is not a time such as 30d, 12h, 45m or 90s, of ten years at most")
    return seconds
