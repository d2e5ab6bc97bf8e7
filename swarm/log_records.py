"""The records of the log of local steps, and their bytes. All peers serialize a record into the same bytes.

The annotation of each field has its bounds, which `unpack` checks. Signatures are checked in `swarm/log.py`.
"""

import hashlib
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Annotated

import msgpack

MAX_OFFERS = 16  # of a commit
MAX_VOTERS = 64  # of a log
WINDOW = 8  # commits, of which a state keeps the owners of offers
MAX_ITEMS = 4096  # of a list in a message: the decoder reserves as much memory as a list claims to have
ANCESTOR_STEPS = 1, 4, 16, 64, 256  # from the newest commit back to others that a status names

Hash = Annotated[bytes, 32, 32]
Peer = Annotated[bytes, 1, 64]
Peers = Annotated[tuple, 0, MAX_VOTERS, Peer]
Signature = Annotated[bytes, 1, 512]
Number = Annotated[int, 0, 2**48]


def list_fields(record: object) -> tuple:
    """Return the values of a dataclass, in order."""
    return tuple(getattr(record, name) for name in record.__dataclass_fields__)


def pack(record: object) -> bytes:
    """Serialize numbers, bytes, tuples and dataclasses, into the same bytes on all peers."""
    return msgpack.packb(record, default=list_fields)


def compute_hash(*parts: object) -> bytes:
    """Return the SHA-256 of the serialized parts."""
    return hashlib.sha256(pack(parts)).digest()


def check_type(kind: object, value: object) -> object:
    """Return deserialized data as a value of this type, or raise a ValueError.

    :param kind: a dataclass, or an annotated type with the bounds of the value (of bytes and tuples: of the length) and
        the type of a tuple's items
    """
    if is_dataclass(kind):
        types = kind.__annotations__.values()  # in the order of the fields
        if type(value) is not tuple or len(value) != len(types):
            raise ValueError(f"not a {kind.__name__}")
        return kind(*map(check_type, types, value))
    low, high, *items = kind.__metadata__
    if type(value) is not kind.__origin__:
        raise ValueError(f"not of the type {kind.__origin__.__name__}")
    if not low <= (value if isinstance(value, int | float) else len(value)) <= high:
        raise ValueError("out of bounds")
    return tuple(check_type(items[0], item) for item in value) if items else value


def unpack(kind: object, data: bytes) -> object:
    """Parse serialized data of this type, see `check_type`, or raise a ValueError."""
    return check_type(kind, msgpack.unpackb(data, use_list=False, max_array_len=MAX_ITEMS))


def get_signed_part(record: object) -> bytes:
    """Return the bytes that a record's signature, its last field, covers."""
    return pack((type(record).__name__, *list_fields(record)[:-1]))


@dataclass(frozen=True)
class Offer:
    """A pseudo-gradient that its owner has encoded."""

    base: Hash
    digest: Hash  # of the state at the base
    peer: Peer
    samples: Annotated[int, 1, 2**48]
    blob: Hash
    num_bytes: Annotated[int, 1, 2**48]
    opposed: Annotated[tuple, 0, MAX_OFFERS, Peer]  # owners in the base whose updates oppose the peer's own one
    accepts_connections: Annotated[bool, 0, 1]
    mbits: Annotated[float, 0.0, 1e9]
    signature: Signature

    @property
    def key(self) -> bytes:
        """The base and the owner, for which one offer counts."""
        return self.base + self.peer


@dataclass(frozen=True)
class Vote:
    """A signed statement: in all attempts up to this one, the peer's last vote was in `last` for `proposal`.

    If `last` is the attempt, it is a vote, and as all of them a promise to the next leader; without any vote, a denial.
    """

    parent: Hash  # of the list
    attempt: Number
    last: Annotated[int, -1, 2**48]  # -1 for none
    proposal: Annotated[bytes, 0, 32]  # the hash of the commit
    peer: Peer
    signature: Signature


@dataclass(frozen=True)
class Leave:
    """A peer's signed notice that it leaves, valid for as many commits as an offer."""

    base: Hash
    peer: Peer
    signature: Signature


@dataclass(frozen=True)
class Proof:
    """Two contradicting votes of one peer: a correct peer signs only one of them."""

    first: Vote
    second: Vote

    @property
    def peer(self) -> bytes:
        """The Byzantine peer."""
        return self.first.peer

    def is_valid(self) -> bool:
        """Return whether the votes contradict each other, signatures apart."""
        early, late = sorted((self.first, self.second), key=lambda vote: vote.attempt)
        are_related = (early.parent, early.peer) == (late.parent, late.peer) and late.last <= early.attempt
        return are_related and (early.last, early.proposal) != (late.last, late.proposal)


@dataclass(frozen=True)
class Commit:
    """The offers of an epoch, and the votes that chose them."""

    parent: Hash
    epoch: Number
    offers: Annotated[tuple, 1, MAX_OFFERS, Offer]  # in the order of their keys
    leaves: Annotated[tuple, 0, MAX_OFFERS, Leave]  # in the order of peers, as the proofs
    proofs: Annotated[tuple, 0, MAX_OFFERS, Proof]
    votes: Annotated[tuple, 0, MAX_VOTERS, Vote] = ()

    @cached_property
    def hash(self) -> bytes:
        """The hash of all but the votes."""
        return compute_hash("commit", *list_fields(self)[:-1])


@dataclass(frozen=True)
class Proposal:
    """A list without votes, its leader's vote, and the promises that allow it; in attempt 0 there are none."""

    commit: Commit
    vote: Vote
    promises: Annotated[tuple, 0, MAX_VOTERS, Vote]

    @property
    def attempt(self) -> int:
        """The attempt in which voters may vote for it."""
        return self.vote.attempt


@dataclass(frozen=True)
class Memory:
    """This peer's promise and last vote in the choice of a commit."""

    parent: Hash
    epoch: Number  # of the commit
    promised: Number = 0  # the first attempt in which it may still vote
    choice: Annotated[tuple, 0, 1, Proposal] = ()  # the proposal of its last vote

    @property
    def last(self) -> int:
        """The attempt of the last vote, -1 for none."""
        return self.choice[0].attempt if self.choice else -1


@dataclass(frozen=True)
class Status:
    """The knowledge of a peer, by which others find what it lacks. Records have the first bytes of their hash."""

    heads: Annotated[tuple, 1, len(ANCESTOR_STEPS) + 3, Hash]  # the newest commit, and some before
    records: Annotated[tuple, 0, 1024, Annotated[bytes, 8, 8]]
    missing_keys: Peers
    is_answer: Annotated[bool, 0, 1]  # so that no status follows


@dataclass(frozen=True)
class Key:
    """A public key, of which the peer id is the digest."""

    peer: Peer
    key: Annotated[bytes, 1, 600]


KINDS = Status, Key, Commit, Offer, Leave, Proof, Proposal, Vote  # a message is a list of these


def encode(*records: object) -> bytes:
    """Return a message."""
    return pack([(KINDS.index(type(record)), record) for record in records])


def decode(message: bytes) -> list:
    """Return the records of a message, or raise a ValueError."""
    try:
        records = msgpack.unpackb(message, use_list=False, max_array_len=MAX_ITEMS)
        return [check_type(KINDS[kind], content) for kind, content in records]
    except (TypeError, IndexError) as e:
        raise ValueError("not a message") from e
