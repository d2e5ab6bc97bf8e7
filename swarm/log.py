"""The replicated log of local steps: a chain of commits, the same on all peers. A pure state machine without I/O.

**Chain.** A commit is the list of offers that an epoch applies. It names its parent, so the chain up to it determines a
`State`: the voters, and the offers that may follow. An offer names the last commit as its base, or the one before. An
owner has one offer for each base, so no sample counts twice. An offer that is too old returns to its owner.

**Choice of a commit.** It is single-decree Paxos among the voters, one decision for each parent. An attempt has one
leader, by hash, and the leader has one list, because its vote is its proposal: with two lists in an attempt, a later
leader could not know which one may have a quorum. Attempt 0 starts when the offers are there. If it fails, attempts are
the numbers of time slots, so that no peer can run ahead, and a leader that does not lead costs one slot. When a slot
begins, each voter sends an answer: its last vote, and the promise not to vote in earlier attempts. With a quorum of
answers, the leader proposes the list of the newest vote in them, or a fresh list if there is none. It leaves out an
answer that names a list of which it cannot get a blob: a liar may have voted for that. The hash of a list contains
neither attempt nor votes.

**Safety.** A quorum is more than half of the voters, so any two have a common voter. If a list has a quorum of votes in
an attempt, the answers of every later attempt contain one of them, so every later proposal is the same list. Voters
are a function of the parent, which was chosen in the same way. A voter saves commits and its memory before it sends,
and continues from there after a restart, not from an older checkpoint: it would not know its votes since, and if all
did so, no peer could vote. A peer without its memory must take a new key. So without liars and emergencies there is one
chain, with any loss, delay or crash. Clocks matter for progress only.

**Liars.** A liar in two quorums can cause a fork. Votes and answers are signed. Two that contradict each other are a
proof, which enters the next commit and ends the vote of its peer. A proposal holds the answers that allow it, and those
of the attempt that proposed the list first. So a liar cannot invent an earlier vote for a list that no leader could
propose. Voters vote for a new list once it has offers of all voters, or after a deadline, and only if it has half of
the voters' offers that they hold: a leader alone could send an update that no other one bounds. A list that omits fewer
passes: the next one can have them. Branches compare by their content, because certificates differ from peer to peer:
fewer absent voters in the first commit, then more voters whose offers build on the branch, then the smaller hash of the
first commit.

**Silence.** If half of the voters gave no vote and no answer for long, although there are offers, the others may make a
decision that names these as absent: it is another Paxos, whose voters are the others. It can be a fork if the absent
live on, and then a commit of a quorum wins. A leave record counts from the commit that holds it, so a leaving peer
votes until then.

**Gossip.** A `Status` names the commits, offers and votes that a peer has. The answer is all that it lacks. So lost
messages repeat, late peers catch up, and clients, which cannot be called, take part. The voters and the owners of
counted offers have limits of their own for bytes, and thus for signatures to check; all other peers share one.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple, get_type_hints

import msgpack

MAX_MESSAGE_BYTES = 128 * 1024  # a proposal with 16 offers and 64 voters has about 45 KB
MAX_ANSWER_BYTES = 48 * 1024
MAX_TRAFFIC = 256 * 1024  # bytes from one peer and to it between two ticks; bounds the time for signatures too
MAX_OFFERS, RESERVED_OFFERS = 16, 12  # in a commit, and those of them for voters if there are more
MAX_VOTERS = 64
MAX_POOL = 16  # offers of other peers than voters
MAX_VOTES = 8  # of one voter in one decision, answers included
MAX_PROPOSALS, MAX_DECISIONS = 16, 8
WINDOW, MIN_COUNTED = 8, 4  # an owner with offers in 4 of the last 8 commits is a voter
MAX_COMMITS = 1000  # that a peer keeps
MAX_VERDICTS, MIN_GOOD = 12, 3  # with as few good ones of its last verdicts, the weight of an owner is halved
MAX_UNASKED = 4  # commits that each peer sends to one that is behind, which then asks the first of them for more
SLOT = 15.0  # seconds of an attempt; all peers must agree
MAX_SKEW = 3.0  # seconds between two clocks; hivemind does not connect peers with more
STATUS_INTERVAL = 5.0  # seconds
ANCESTOR_STEPS = 1, 4, 16, 64, 256  # commits back from the newest

Hash = Annotated[bytes, 32, 32]
Peer = Annotated[bytes, 1, 64]
Peers = Annotated[tuple, 0, MAX_VOTERS, Peer]
History = Annotated[tuple, WINDOW, WINDOW, Peers]
Names = Annotated[tuple, 0, 1024, Annotated[bytes, 8, 8]]
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


@lru_cache
def list_types(kind: type) -> tuple:
    """Return the annotations of a dataclass, in order."""
    return tuple(get_type_hints(kind, include_extras=True).values())


def check_type(kind: object, value: object) -> object:
    """Return deserialized data as a value of this type, or raise a ValueError.

    :param kind: a dataclass, or an annotated type with the bounds of the value (of bytes and tuples: of the length) and
        the type of a tuple's items
    """
    if is_dataclass(kind):
        if type(value) is not tuple or len(value) != len(list_types(kind)):
            raise ValueError(f"not a {kind.__name__}")
        return kind(*map(check_type, list_types(kind), value))
    low, high, *items = kind.__metadata__
    if type(value) is not kind.__origin__:
        raise ValueError(f"not of the type {kind.__origin__.__name__}")
    if not low <= (value if isinstance(value, int | float) else len(value)) <= high:
        raise ValueError("out of bounds")
    return tuple(check_type(items[0], item) for item in value) if items else value


def unpack(kind: object, data: bytes) -> object:
    """Parse serialized data of this type, see `check_type`, or raise a ValueError."""
    return check_type(kind, msgpack.unpackb(data, use_list=False))


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
    num_bytes: Number
    accepts_connections: Annotated[bool, 0, 1]
    mbits: Annotated[float, 0.0, 1e9]
    score: Annotated[int, -1, 1]  # of the picked offer of the base: 1 if it improves the model; 0 if it is unknown
    signature: Signature

    @property
    def key(self) -> bytes:
        """The base and the owner, for which one offer counts."""
        return self.base + self.peer


@dataclass(frozen=True)
class Vote:
    """A signed statement: in all attempts up to this one, the peer's last vote was in `last` for `proposal`.

    If `last` is the attempt, it is a vote. The answer to the leader of an attempt names the attempt before.
    """

    decision: Hash  # see name_decision
    attempt: Number
    last: Annotated[int, -1, 2**48]  # -1 for none
    proposal: Annotated[bytes, 0, 32]  # the hash of the commit
    peer: Peer
    signature: Signature


@dataclass(frozen=True)
class Leave:
    """A voter's signed notice that it leaves, valid for as many commits as an offer."""

    base: Hash
    peer: Peer
    signature: Signature


@dataclass(frozen=True)
class Proof:
    """Two votes of one peer of which an honest peer signs one."""

    first: Vote
    second: Vote

    @property
    def peer(self) -> bytes:
        """The liar."""
        return self.first.peer

    def is_valid(self) -> bool:
        """Return whether the votes contradict each other, signatures apart."""
        early, late = sorted((self.first, self.second), key=lambda vote: vote.attempt)
        if (early.decision, early.peer) != (late.decision, late.peer) or late.last > early.attempt:
            return False
        return (early.last, early.proposal) != (late.last, late.proposal)


def name_decision(parent: bytes, absent: tuple[bytes, ...]) -> bytes:
    """Return the name of the decision for a child of a commit, which votes carry."""
    return compute_hash("emergency", parent, absent) if absent else parent


@dataclass(frozen=True)
class Commit:
    """The offers of an epoch, and the votes that chose them."""

    parent: Hash
    epoch: Number
    offers: Annotated[tuple, 1, MAX_OFFERS, Offer]  # in the order of their keys
    leaves: Annotated[tuple, 0, MAX_OFFERS, Leave]  # in the order of peers, as the next two
    proofs: Annotated[tuple, 0, MAX_OFFERS, Proof]
    absent: Peers
    votes: Annotated[tuple, 0, MAX_VOTERS, Vote] = ()

    @cached_property
    def hash(self) -> bytes:
        """The hash of all but the votes."""
        return compute_hash("commit", *list_fields(self)[:-1])

    @property
    def picked(self) -> int:
        """The index of the offer that all peers score."""
        return int.from_bytes(self.hash[:4]) % len(self.offers)


@dataclass(frozen=True)
class Step:
    """A leader's vote, and the answers that allow its list; in attempt 0 there are none."""

    vote: Vote
    answers: Annotated[tuple, 0, MAX_VOTERS, Vote]


@dataclass(frozen=True)
class Proposal:
    """A list without votes, the attempt that proposed it first, and the newest one if that is another."""

    commit: Commit
    steps: Annotated[tuple, 1, 2, Step]

    @property
    def attempt(self) -> int:
        """The attempt in which voters may vote for it."""
        return self.steps[-1].vote.attempt


@dataclass(frozen=True)
class Memory:
    """This peer's promise and last vote in a decision."""

    decision: Hash
    epoch: Number  # of the commit
    promised: Number = 0  # the first attempt in which it may still vote
    last: Annotated[int, -1, 2**48] = -1
    choice: Annotated[tuple, 0, 1, Proposal] = ()  # the proposal of its last vote


class Decision(NamedTuple):
    """The electorate of a child of a commit."""

    name: bytes
    absent: tuple[bytes, ...]
    voters: tuple[bytes, ...]
    leaders: tuple[bytes, ...]

    @property
    def quorum(self) -> int:
        """The number of votes that make a commit."""
        return len(self.voters) // 2 + 1

    def find_leader(self, attempt: int) -> bytes:
        """Return the only peer that may propose in an attempt."""
        return min(self.leaders, key=lambda peer: compute_hash(self.name, attempt, peer))

    def has_quorum(self, votes: Iterable[Vote]) -> bool:
        """Return whether these are records of more than half of the voters."""
        return len({vote.peer for vote in votes} & set(self.voters)) >= self.quorum

    def allows(self, proposal: Proposal) -> bool:
        """Return whether the leaders were the right ones, and their answers allow the list."""
        name, before = proposal.commit.hash, -1
        for vote, answers in map(list_fields, proposal.steps):
            if (vote.decision, vote.proposal, vote.last) != (self.name, name, vote.attempt) or vote.attempt <= before:
                return False
            if vote.peer != self.find_leader(vote.attempt):
                return False
            if vote.attempt > 0:
                newest = max((answer.last for answer in answers), default=-1)
                lists = {answer.proposal for answer in answers if answer.last == newest >= 0}
                asked = {(answer.decision, answer.attempt) for answer in answers}
                if not self.has_quorum(answers) or asked != {(self.name, vote.attempt - 1)} or newest < before:
                    return False
                if (lists and before < 0) or (before >= 0 and name not in lists):
                    return False
            before = vote.attempt
        return True


@dataclass(frozen=True)
class Verdicts:
    """The last scores of an owner's offers, each the sign of more than half of the voters' scores."""

    peer: Peer
    signs: Annotated[tuple, 0, MAX_VERDICTS, Annotated[int, -1, 1]]


@dataclass(frozen=True)
class State:
    """All that later commits depend on. A checkpoint keeps it, and a new peer gets it from a peer that it trusts."""

    epoch: Number
    head: Hash  # the newest commit, and its parent
    parent: Hash
    voters: Annotated[tuple, 1, MAX_VOTERS, Peer]
    admitted: History  # the new voters in each of the last commits
    owners: History  # of offers in each of the last commits
    counted: Annotated[tuple, 0, MAX_OFFERS, Annotated[bytes, 33, 96]]  # the keys of the offers in the head
    clients: Annotated[tuple, 0, 1024, Peer]  # peers that accept no connections
    banned: Annotated[tuple, 0, 4096, Peer]
    picked: Annotated[bytes, 0, 64] = b""  # the owner of the offer in the head that the next offers score
    verdicts: Annotated[tuple, 0, 1024, Verdicts] = ()  # in the order of peers

    def doubts(self, peer: bytes) -> bool:
        """Return whether the scores of an owner are so bad that its weight is halved."""
        signs = dict(map(list_fields, self.verdicts)).get(peer, ())
        return len(signs) == MAX_VERDICTS and signs.count(1) <= MIN_GOOD

    @property
    def participants(self) -> set[bytes]:
        """The voters, and the owners of counted offers in the last commits."""
        return {*self.voters, *(peer for peers in self.owners for peer in peers)}

    def make_decision(self, absent: tuple[bytes, ...]) -> Decision:
        """Return the electorate of the next commit, or in an emergency that without the absent."""
        voters = tuple(peer for peer in self.voters if peer not in absent)
        leaders = tuple(peer for peer in voters if peer not in self.clients) or voters
        return Decision(name_decision(self.head, absent), absent, voters, leaders)

    def fits(self, record: Offer | Leave | Proof) -> bool:
        """Return whether the next commit may contain the record, signatures apart."""
        if isinstance(record, Proof):
            return record.peer in self.voters and record.is_valid()
        is_new = record.key not in self.counted if isinstance(record, Offer) else record.peer in self.voters
        return record.base in (self.head, self.parent) and is_new

    def check(self, commit: Commit, is_signed: Callable[[object], bool]) -> None:
        """Raise a ValueError unless this may be the next commit, votes apart."""
        if (commit.parent, commit.epoch) != (self.head, self.epoch + 1):
            raise ValueError("another parent")
        if not set(commit.absent) < set(self.voters):
            raise ValueError("the absent must be voters")
        peers = [[record.peer for record in records] for records in (commit.leaves, commit.proofs)]
        for names in (*peers, commit.absent, [offer.key for offer in commit.offers]):
            if list(names) != sorted(set(names)):
                raise ValueError("not in order")
        if not all(map(self.fits, (*commit.offers, *commit.leaves, *commit.proofs))):
            raise ValueError("a record does not fit")
        votes = (vote for proof in commit.proofs for vote in (proof.first, proof.second))
        if not all(map(is_signed, (*commit.offers, *commit.leaves, *votes))):
            raise ValueError("a signature is invalid")

    def check_votes(self, commit: Commit, is_signed: Callable[[object], bool]) -> None:
        """Raise a ValueError unless a quorum voted for a child of the head in one attempt."""
        decision, votes = self.make_decision(commit.absent), commit.votes
        terms = {(vote.decision, vote.proposal, vote.attempt, vote.last) for vote in votes}
        if not decision.has_quorum(votes) or terms != {
            (decision.name, commit.hash, votes[0].attempt, votes[0].attempt)
        }:
            raise ValueError("no quorum")
        if not all(map(is_signed, votes)):
            raise ValueError("a signature is invalid")

    def advance(self, commit: Commit) -> "State":
        """Return the state after a valid commit."""
        banned = {*self.banned, *(proof.peer for proof in commit.proofs)}
        out = {*commit.absent, *(leave.peer for leave in commit.leaves)}
        current = {offer.peer for offer in commit.offers}
        owners = tuple(tuple(sorted(set(peers) - out)) for peers in (*self.owners[1:], current))
        counts = Counter(peer for peers in owners for peer in peers)
        present = [peer for peer in self.voters if peer not in banned | out]
        # a log without voters would end, so the last ones stay
        voters = [peer for peer in present if counts[peer] >= MIN_COUNTED] or present or list(self.voters)
        able = {peer for peer in counts if counts[peer] >= MIN_COUNTED} - {*banned, *voters}
        room = max(1, len(voters) // 4) - sum(map(len, self.admitted[1:]))
        new = sorted(able, key=lambda peer: (-counts[peer], peer))[: max(0, min(room, MAX_VOTERS - len(voters)))]
        clients = {*self.clients, *current} - {offer.peer for offer in commit.offers if offer.accepts_connections}
        scorers = {*self.voters} - {self.picked}
        scores = [offer.score for offer in commit.offers if offer.base == self.head and offer.peer in scorers]
        verdicts = dict(map(list_fields, self.verdicts))
        if sign := next((sign for sign in (1, -1) if 2 * scores.count(sign) > len(scores)), 0):
            verdicts[self.picked] = (*verdicts.get(self.picked, ()), sign)[-MAX_VERDICTS:]
        verdicts = {peer: signs for peer, signs in verdicts.items() if peer in counts or peer in voters}
        return State(
            epoch=commit.epoch,
            head=commit.hash,
            parent=self.head,
            voters=tuple(sorted((*voters, *new))),
            admitted=(*self.admitted[1:], tuple(new)),
            owners=owners,
            counted=tuple(offer.key for offer in commit.offers),
            clients=tuple(sorted(clients & {*counts, *voters})),
            banned=tuple(sorted(banned)),
            picked=commit.offers[commit.picked].peer,
            verdicts=tuple(Verdicts(*item) for item in sorted(verdicts.items())),
        )


@dataclass(frozen=True)
class Genesis:
    """The beginning of a log: the state of the members of the last dense round, which are the first voters."""

    run: Annotated[str, 1, 200]
    epoch: Number
    digest: Hash
    members: Peers

    def make_state(self) -> State:
        """Return the state, in which all members count as owners of offers in the commits before."""
        head, members = compute_hash("genesis", self), tuple(sorted(set(self.members)))
        return State(self.epoch, head, head, members, ((),) * WINDOW, (members,) * WINDOW, (), (), ())


@dataclass(frozen=True)
class Status:
    """The knowledge of a peer, by which others find what it lacks. Records have the first bytes of their hash."""

    heads: Annotated[tuple, 1, len(ANCESTOR_STEPS) + 3, Hash]  # the newest commit, and some before
    records: Names
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
    items = msgpack.unpackb(message, use_list=False)
    try:
        return [check_type(KINDS[kind], content) for kind, content in items]
    except (TypeError, IndexError) as e:
        raise ValueError("not a message") from e


class Action(NamedTuple):
    """An order to the caller, in the order of the list.

    `send`: the message to `peers`, or to all peers if there are none (as the response if the peer has just called).
    `save`: write the memory to disk before any later action. `append`: the same with a commit, which replaces that of
    its epoch. `fetch`: the blob of an offer, from these peers or any other participant, then call `mark_complete`;
    repeated after a commit, or if `Log.fetching` loses it. `apply`: a commit, of which this peer holds all blobs, to
    the model. `fork`: the model has commits that lost: download one with this commit or a later one, keep the residual,
    and call `mark_applied`. `return`: add the blob of this peer's offer to the residual: no commit will count it.
    """

    kind: str
    content: object
    peers: tuple[bytes, ...] = ()


class Timeouts(NamedTuple):
    """Seconds that follow from the sizes of blobs and the uplinks; peers may differ in them."""

    collect: float  # from the offers of most voters until a list without the others
    longest: float  # the same from the first offer
    commit: float  # from then until the leader counts as failed
    emergency: float = 600.0  # without a commit, and without a message from an absent voter


class Entry(NamedTuple):
    """A commit, None for the first, and the state after it."""

    commit: Commit | None
    state: State


class Log:
    """One peer's copy of the log, and its part in the choice of the next commit.

    The public methods return a list of Actions. Times are seconds of a clock that peers share, see MAX_SKEW.
    """

    def __init__(
        self,
        state: State,
        identity,
        timeouts: Timeouts,
        holds: Callable[[bytes], bool],
        now: float,
        memory: bytes = b"",
        commits: Iterable[Commit] = (),
        applied: bytes = b"",
    ):
        """
        :param state: that of a Genesis, of a checkpoint, or of a peer that this one trusts
        :param identity: has `peer`, `sign(data)`, `verify(peer, data, signature)`, `find_key(peer)`, which is None for
            an unknown key, and `add_key(peer, key)`, which checks the digest. Keys of past voters must stay known
        :param holds: returns whether a blob is here, complete and valid
        :param memory: of the last action `save`; without it, a restarted peer may only use a new key
        :param commits: after the state, as `append` wrote them; those of another branch may follow and are ignored
        :param applied: the hash of the commit that the model has, by default that of the state
        """
        self.identity, self.timeouts, self.holds = identity, timeouts, holds
        self.me, self.now = identity.peer, now
        self.chain = {state.head: Entry(None, state)}  # by the hash of the commit; lost branches are kept too
        for commit in commits:
            if commit.parent == state.head:
                state = state.advance(commit)
                self.chain[commit.hash] = Entry(commit, state)
        model = self.chain.get(applied or next(iter(self.chain)))
        self.applied: int | None = model.state.epoch if model else None  # None during a download
        memories = unpack(Annotated[tuple, 0, MAX_COMMITS, Memory], memory) if memory else ()
        self.memories = {item.decision: item for item in memories}
        self.records: dict[bytes, object] = {}  # of the next commit, by name
        self.own: dict[bytes, Offer] = {}  # this peer's offers that no commit counts, by key
        self.heard: dict[bytes, float] = {}  # the times of the last votes
        self.traffic: dict[bytes, int] = {}  # bytes since the last tick, by peer
        self.fetching: dict[bytes, Offer] = {}  # by blob; without an entry, it is requested again
        self.missing_keys: set[bytes] = set()
        self.actions: list[Action] = []
        self.is_leaving, self.status_time = False, now
        self.start_height(state)

    def add_offer(self, now: float, base: bytes, *values) -> list[Action]:
        """Publish this peer's offer.

        :param values: the other fields of an Offer apart from the peer and the signature
        """
        digest, *others = values
        offer = self.sign(Offer, base, digest, self.me, *others)
        self.now, self.own[offer.key] = now, offer
        if self.head.fits(offer):
            self.add_record(offer)
            self.send(offer)
        return self.finish()

    def mark_complete(self, now: float) -> list[Action]:
        """Continue after a blob has arrived, so that `holds` is true for it."""
        self.now, self.is_dirty = now, True
        return self.finish()

    def mark_applied(self, now: float, head: bytes) -> list[Action]:
        """Continue after a state was downloaded: that after the commit with this hash, unless this commit has lost."""
        self.now = now
        if head in (path := self.list_path()):
            self.applied = path[head].state.epoch
        else:
            self.actions.append(Action("fork", self.chain[self.head.head].commit))
        return self.finish()

    def leave(self, now: float) -> list[Action]:
        """Announce that this peer leaves. It should stay until a commit has its record, for an epoch at most."""
        self.now, self.is_leaving = now, True
        self.sign_leave()
        return self.finish()

    def tick(self, now: float) -> list[Action]:
        """Continue with the passage of time; call this about once a second."""
        self.now, self.traffic = now, {}
        if absent := self.find_absent():
            self.open_decision(absent)
        if now >= self.status_time + STATUS_INTERVAL:
            self.missing_keys, self.is_dirty = set(), True
        if self.is_dirty:
            self.is_dirty, self.status_time = False, now
            self.send_status()
        return self.finish()

    def receive(self, now: float, sender: bytes, message: bytes) -> list[Action]:
        """Take a message from a peer whose id the transport has proven. Invalid bytes and records are ignored."""
        self.now, missing, newest = now, set(self.missing_keys), next(reversed(self.chain))
        if len(message) > MAX_MESSAGE_BYTES or not self.spend(sender, message):
            return []
        try:
            records = decode(message)
        except ValueError:
            return []
        for record in records:
            TAKERS[KINDS.index(type(record))](self, sender, record)
        if self.missing_keys - missing or next(reversed(self.chain)) != newest:
            self.send_status(sender, is_answer=True)
        return self.finish()

    def finish(self) -> list[Action]:
        """Return all actions that follow from the new knowledge."""
        self.settle()
        self.fetch()
        actions, self.actions = self.actions, []
        return actions

    def spend(self, peer: bytes, message: bytes) -> bool:
        """Count the bytes of a message, and return whether a peer stays below its limit. Untrusted ones share one."""
        name = peer if peer in self.head.participants else b""
        self.traffic[name] = self.traffic.get(name, 0) + len(message)
        return self.traffic[name] <= MAX_TRAFFIC

    def send(self, *records: object, to: bytes | None = None) -> None:
        """Send a message to a peer that stays below its limit, or to all."""
        message = encode(*records)
        if to is None or self.spend(to, message):
            self.actions.append(Action("send", message, (to,) if to else ()))

    def sign(self, kind: type, *values) -> object:
        """Return a record of this kind with this peer's signature."""
        record = kind(*values, b"")
        return replace(record, signature=self.identity.sign(get_signed_part(record)))

    def is_signed(self, record: object) -> bool:
        """Return whether the signature of a record is its peer's. Missing keys are requested."""
        if self.identity.find_key(record.peer) is None:
            self.missing_keys.add(record.peer)
            return False
        return self.identity.verify(record.peer, get_signed_part(record), record.signature)

    def select(self, kind: type) -> list:
        """Return the records of a kind."""
        return [record for record in self.records.values() if isinstance(record, kind)]

    def add_record(self, record: object) -> None:
        """Keep a valid record for the next commit, and tell others."""
        self.records[compute_hash(record)[:8]] = record
        self.is_dirty = True

    def drop_record(self, record: object) -> None:
        """Drop a record."""
        del self.records[compute_hash(record)[:8]]

    # The gossip

    def send_status(self, to: bytes | None = None, is_answer: bool = False) -> None:
        """Say what this peer has."""
        path, newest = list(self.list_path()), next(reversed(self.chain))  # maybe of a branch that a peer is sending
        ancestors = [path[-1 - step] for step in ANCESTOR_STEPS if step < len(path)]
        known = tuple(self.records)[:1024], tuple(sorted(self.missing_keys)[:MAX_VOTERS])
        self.send(Status((path[-1], newest, *ancestors, path[0]), *known, is_answer), to=to)

    def take_status(self, sender: bytes, status: Status) -> None:
        """Send a peer all that it lacks."""
        answer = [Key(peer, key) for peer in status.missing_keys if (key := self.identity.find_key(peer))]
        path = self.list_path()
        if epochs := [path[head].state.epoch for head in status.heads if head in path]:
            limit = MAX_COMMITS if status.is_answer else MAX_UNASKED
            answer += [entry.commit for entry in self.list_entries(max(epochs))[:limit]]
        is_level = status.heads[0] == self.head.head
        if is_level:
            lacking = [record for name, record in self.records.items() if name not in status.records]
            answer += sorted(lacking, key=lambda it: (KINDS.index(type(it)), -getattr(it, "attempt", 0)))
        num_bytes, chosen = 0, []
        for record in answer:
            num_bytes += len(pack(record))
            if chosen and num_bytes > MAX_ANSWER_BYTES:
                break
            chosen.append(record)
        if chosen:
            self.send(*chosen, to=sender)
        has_news = status.heads[0] not in self.chain or is_level and not self.records.keys() >= {*status.records}
        if has_news and not status.is_answer:
            self.send_status(sender, is_answer=True)

    def take_key(self, sender: bytes, record: Key) -> None:
        """Remember a public key that was missing."""
        if record.peer in self.missing_keys:
            self.missing_keys.discard(record.peer)
            self.identity.add_key(record.peer, record.key)

    def take_offer(self, sender: bytes, offer: Offer) -> None:
        """Keep a valid offer, the first one for each key. Another peer may keep another one; a commit has one."""
        offers, voters = self.select(Offer), self.head.voters
        is_known = offer.key in {other.key for other in offers}
        is_full = offer.peer not in voters and sum(other.peer not in voters for other in offers) >= MAX_POOL
        if not is_known and not is_full and self.head.fits(offer) and self.is_signed(offer):
            self.add_record(offer)

    def take_notice(self, sender: bytes, record: Leave | Proof) -> None:
        """Keep a valid leave record or proof, one for each peer."""
        signed = [record] if isinstance(record, Leave) else [record.first, record.second]
        is_known = record.peer in {other.peer for other in self.select(type(record))}
        if not is_known and self.head.fits(record) and all(map(self.is_signed, signed)):
            self.add_record(record)

    def fetch(self) -> None:
        """Request blobs that the next commit may contain, or that a commit contains."""
        lists = [proposal.commit.offers for proposal in self.select(Proposal)]
        entries = self.list_entries(self.head.epoch if self.applied is None else self.applied)[:WINDOW]
        lists += [self.choose(self.select(Offer)), *(entry.commit.offers for entry in entries)]
        wanted = {offer.blob: offer for offers in lists for offer in offers if not self.holds(offer.blob)}
        for blob, offer in wanted.items():
            if blob not in self.fetching:
                peers = {offer.peer, *self.head.voters} - {self.me}
                self.actions.append(Action("fetch", offer, tuple(sorted(peers))))
        self.fetching = wanted

    # The chain

    def list_path(self) -> dict[bytes, Entry]:
        """Return the commits up to the newest one by their hashes, the oldest first."""
        entries, entry = [], self.chain[self.head.head]
        while entry:
            entries.append(entry)
            entry = self.chain.get(entry.state.parent) if entry.commit else None
        return {entry.state.head: entry for entry in reversed(entries)}

    def list_entries(self, epoch: int) -> list[Entry]:
        """Return the commits after an epoch."""
        return [entry for entry in self.list_path().values() if entry.commit and entry.state.epoch > epoch]

    def start_height(self, state: State) -> None:
        """Start the choice of the commit after a state."""
        self.head = state
        self.since, self.first_time, self.most_time, self.is_dirty = self.now, None, None, True
        self.decisions: dict[bytes, Decision] = {}
        kept = [record for record in self.records.values() if isinstance(record, Offer | Leave | Proof)]
        self.records = {}
        for record in (*filter(state.fits, kept), *filter(state.fits, self.own.values())):
            self.add_record(record)
        self.actions += [Action("return", offer) for offer in self.own.values() if not state.fits(offer)]
        self.own = {key: offer for key, offer in self.own.items() if state.fits(offer)}
        self.memories = {name: item for name, item in self.memories.items() if item.epoch > state.epoch}
        self.fetching = {}
        self.open_decision(())
        self.main = self.decisions[state.head]
        if self.is_leaving:
            self.sign_leave()

    def take_commit(self, sender: bytes, commit: Commit) -> None:
        """Keep a valid commit that a quorum has voted for."""
        if commit.hash not in self.chain and commit.parent in self.chain:
            state = self.chain[commit.parent].state
            try:
                state.check_votes(commit, self.is_signed)  # first, so that only voters can cause more work
                state.check(commit, self.is_signed)
            except ValueError:
                return
            self.add_commit(commit)

    def add_commit(self, commit: Commit) -> None:
        """Add a valid commit, and follow its branch if that is the better one."""
        state = self.chain[commit.parent].state.advance(commit)
        self.chain[commit.hash] = Entry(commit, state)
        path, branch = self.list_path(), [self.chain[commit.hash]]
        while branch[0].commit.parent not in path:
            if branch[0].commit.parent not in self.chain:
                return
            branch.insert(0, self.chain[branch[0].commit.parent])
        fork = self.chain[branch[0].commit.parent].state
        lost = self.list_entries(fork.epoch)
        if lost and rank(lost, fork) <= rank(branch, fork):
            return
        offers = {offer for entry in lost for offer in entry.commit.offers if offer.peer == self.me}
        counted = {offer for entry in branch for offer in entry.commit.offers}
        self.own = {offer.key: offer for offer in {*self.own.values(), *offers} - counted}
        self.actions += [Action("append", entry.commit) for entry in branch]
        if lost and (self.applied is None or self.applied > fork.epoch):
            self.applied = None
            self.actions.append(Action("fork", commit))
        self.start_height(state)
        if len(self.chain) > MAX_COMMITS:
            del self.chain[next(iter(self.chain))]

    def apply(self) -> None:
        """Apply the next commits whose blobs are here."""
        while self.applied is not None and self.applied < self.head.epoch:
            commit = self.list_entries(self.applied)[0].commit
            if commit.epoch != self.applied + 1 or not self.holds_all(commit):
                return
            self.applied += 1
            self.actions.append(Action("apply", commit))

    def holds_all(self, commit: Commit) -> bool:
        """Return whether all blobs of a commit are here."""
        return all(self.holds(offer.blob) for offer in commit.offers)

    # The choice of the next commit

    def find_slot(self, skew: float = 0.0) -> int:
        """Return the attempt of this time."""
        return int((self.now + skew) // SLOT)

    def find_absent(self) -> tuple[bytes, ...]:
        """Return the voters without a vote or an answer for long, if there is an emergency.

        Messages do not count: clients do not hear each other, and a peer that never votes would hinder all others.
        """
        start = self.now - self.timeouts.emergency
        absent = [peer for peer in self.head.voters if peer != self.me and self.heard.get(peer, 0.0) < start]
        num_present = len(self.head.voters) - len(absent)
        is_emergency = self.deadline + self.timeouts.commit < start and num_present < self.main.quorum
        return tuple(absent) if is_emergency else ()

    def open_decision(self, absent: tuple[bytes, ...]) -> None:
        """Start a decision, or continue one from before a restart."""
        decision = self.head.make_decision(absent)
        if decision.name in self.decisions or len(self.decisions) >= MAX_DECISIONS:
            return
        self.decisions[decision.name] = decision
        for proposal in self.recall(decision).choice:
            self.add_record(proposal)

    def recall(self, decision: Decision) -> Memory:
        """Return this peer's memory of a decision."""
        return self.memories.get(decision.name) or Memory(decision.name, self.head.epoch + 1)

    def remember(self, memory: Memory) -> None:
        """Save a memory before the vote is sent."""
        self.memories[memory.decision] = memory
        self.actions.append(Action("save", pack(tuple(self.memories.values()))))

    def sign_leave(self) -> None:
        """Sign and send a leave record for the next commits."""
        if self.me in self.head.voters:
            self.take_notice(self.me, self.sign(Leave, self.head.head, self.me))

    def list_proposals(self, decision: Decision) -> dict[tuple[int, bytes], Proposal]:
        """Return the proposals in a decision, by attempt and list."""
        proposals = [it for it in self.select(Proposal) if it.steps[0].vote.decision == decision.name]
        return {(proposal.attempt, proposal.commit.hash): proposal for proposal in proposals}

    def choose(self, offers: Iterable[Offer]) -> list[Offer]:
        """Return as many offers as a commit may have: late ones, then those whose owners were not counted for longest.

        A quarter is for other peers than voters, and not more, because new keys cost nothing.
        """
        state = self.head
        newest = {peer: index for index, peers in enumerate(state.owners) for peer in peers}

        def rank_offer(offer: Offer) -> tuple:
            return offer.base == state.head, newest.get(offer.peer, -1), compute_hash(state.head, offer.peer)

        ranked = sorted({offer.key: offer for offer in offers}.values(), key=rank_offer)
        voters = [offer for offer in ranked if offer.peer in state.voters]
        others = [offer for offer in ranked if offer.peer not in state.voters]
        first, rest = RESERVED_OFFERS, MAX_OFFERS - RESERVED_OFFERS
        return (voters[:first] + others[:rest] + voters[first:] + others[rest:])[:MAX_OFFERS]

    def make_list(self, decision: Decision) -> Commit | None:
        """Return a list with all offers and notices that this peer holds, or None if there is no offer."""
        offers = [offer for offer in self.select(Offer) if self.holds(offer.blob)]
        notices = [sorted(self.select(kind), key=lambda it: it.peer)[:MAX_OFFERS] for kind in (Leave, Proof)]
        if not offers:
            return None
        ordered = tuple(sorted(self.choose(offers), key=lambda offer: offer.key))
        return Commit(self.head.head, self.head.epoch + 1, ordered, *map(tuple, notices), decision.absent)

    def is_complete(self, decision: Decision, commit: Commit) -> bool:
        """Return whether a list has offers of all voters that stay, or the time for others is over."""
        owners = {record.peer for record in (*commit.offers, *self.select(Leave))}
        return self.now >= self.deadline or owners >= set(decision.voters)

    def is_fair(self, commit: Commit) -> bool:
        """Return whether a list has half of the voters' offers that are here: its leader must not decide alone."""
        offers = [offer for offer in self.select(Offer) if offer.peer in self.head.voters and self.holds(offer.blob)]
        expected = {offer.key for offer in self.choose(offers)}
        return 2 * len(expected & {offer.key for offer in commit.offers}) >= len(expected)

    @property
    def deadline(self) -> float:
        """The time after which lists may miss offers of voters."""
        first, most = self.first_time, self.most_time
        after_first = math.inf if first is None else first + self.timeouts.longest
        return after_first if most is None else min(after_first, most + self.timeouts.collect)

    def settle(self) -> None:
        """Take all steps that the records allow."""
        owners = {offer.peer for offer in self.select(Offer)}
        if owners and self.first_time is None:
            self.first_time = self.now
        if self.most_time is None and len(owners & {*self.head.voters}) >= self.main.quorum:
            self.most_time = self.now
        for decision in [it for it in self.decisions.values() if self.me in it.voters]:
            self.answer(decision)
            self.lead(decision)
            self.vote(decision)
        if commit := self.find_commit():
            self.add_commit(commit)
            self.settle()
        self.apply()

    def find_commit(self) -> Commit | None:
        """Return a list that a quorum has voted for, with the votes."""
        votes: dict[tuple, dict[bytes, Vote]] = {}
        for vote in self.select(Vote):
            if vote.last == vote.attempt:
                votes.setdefault((vote.decision, vote.proposal, vote.attempt), {})[vote.peer] = vote
        for proposal in self.select(Proposal):
            decision = self.decisions[proposal.steps[0].vote.decision]
            for (name, proposed, _), by_peer in votes.items():
                is_vote = (name, proposed) == (decision.name, proposal.commit.hash)
                if is_vote and decision.has_quorum(by_peer.values()):
                    return replace(proposal.commit, votes=tuple(by_peer.values()))
        return None

    def lead(self, decision: Decision) -> None:
        """Propose a list, if it is this peer's turn."""
        memory, steps, answers = self.recall(decision), (), ()
        attempt = memory.promised
        if memory.last >= attempt or attempt not in (0, self.find_slot()) or decision.find_leader(attempt) != self.me:
            return
        commit = self.make_list(decision)
        if attempt > 0:
            lists = self.list_proposals(decision)
            # A liar may name a list that does not exist, or withhold a blob of it. A chosen list is in any quorum.
            answers = tuple(
                vote
                for vote in self.select(Vote)
                if (vote.decision, vote.attempt) == (decision.name, attempt - 1)
                and (vote.last < 0 or (it := lists.get((vote.last, vote.proposal))) and self.holds_all(it.commit))
            )
            if not decision.has_quorum(answers):
                return
            fair = tuple(it for it in answers if it.last < 0 or self.is_fair(lists[it.last, it.proposal].commit))
            answers = fair if decision.has_quorum(fair) else answers
            newest = max(answers, key=lambda vote: vote.last)
            if newest.last >= 0:
                proposal = lists[newest.last, newest.proposal]
                commit, steps = proposal.commit, proposal.steps[:1]
        if commit and (attempt > 0 or self.is_complete(decision, commit)):
            vote = self.sign(Vote, decision.name, attempt, attempt, commit.hash, self.me)
            proposal = Proposal(commit, (*steps, Step(vote, answers)))
            self.remember(replace(memory, last=attempt, choice=(proposal,)))
            self.send(proposal)
            self.take_proposal(self.me, proposal)

    def vote(self, decision: Decision) -> None:
        """Vote for the newest proposal, if this peer may and holds its blobs."""
        memory, proposals = self.recall(decision), self.list_proposals(decision).values()
        newest = max(proposals, key=lambda proposal: proposal.attempt, default=None)
        if not newest or newest.attempt < memory.promised or newest.attempt <= memory.last:
            return
        attempt, commit = newest.attempt, newest.commit
        # more than one step: an earlier leader may have got a quorum for the list
        is_due = len(newest.steps) > 1 or self.is_fair(commit) and (attempt or self.is_complete(decision, commit))
        if is_due and self.holds_all(commit):
            self.remember(replace(memory, promised=attempt, last=attempt, choice=(newest,)))
            self.send_vote(decision, attempt, attempt, commit.hash)

    def answer(self, decision: Decision) -> None:
        """Once attempt 0 had its time, promise in each slot not to vote in earlier ones, and say the last vote."""
        memory, attempt = self.recall(decision), self.find_slot()
        if self.now >= self.deadline + self.timeouts.commit and memory.promised < attempt:
            self.remember(replace(memory, promised=attempt))
            proposal = b"".join(it.commit.hash for it in memory.choice)
            self.send_vote(decision, attempt - 1, memory.last, proposal)

    def send_vote(self, *terms) -> None:
        """Sign and send a vote or an answer: the decision, the attempt, the attempt of the last vote, and its list."""
        decision, *others = terms
        vote = self.sign(Vote, decision.name, *others, self.me)
        self.send(vote)
        self.take_vote(self.me, vote)

    def take_proposal(self, sender: bytes, proposal: Proposal) -> None:
        """Keep a valid proposal with the records in it."""
        commit, known = proposal.commit, self.select(Proposal)
        decision = self.decisions.get(name_decision(commit.parent, commit.absent))
        if not decision or commit.votes or (proposal.attempt, commit.hash) in self.list_proposals(decision):
            return
        votes = [vote for step in proposal.steps for vote in (step.vote, *step.answers)]
        has_two = sum(other.attempt == proposal.attempt for other in known) >= 2 * len(self.decisions)
        if has_two or proposal.attempt > self.find_slot(MAX_SKEW) or not decision.allows(proposal):
            return
        try:
            self.head.check(commit, self.is_signed)
        except ValueError:
            return
        if not all(map(self.is_signed, votes)):
            return
        if len(known) >= MAX_PROPOSALS:
            self.drop_record(min(known, key=lambda other: other.attempt))
        self.add_record(proposal)
        for vote in votes:
            self.take_vote(sender, vote)

    def take_vote(self, sender: bytes, vote: Vote) -> None:
        """Keep a voter's signed vote or answer, and a proof if it contradicts another one."""
        decision = self.decisions.get(vote.decision)
        if not decision or vote.peer not in decision.voters or vote.attempt > self.find_slot(MAX_SKEW):
            return
        own = [other for other in self.select(Vote) if (other.decision, other.peer) == (vote.decision, vote.peer)]
        is_odd = vote.last > vote.attempt or (vote.last >= 0) != bool(vote.proposal)
        is_known = list_fields(vote)[:-1] in [list_fields(other)[:-1] for other in own]
        if is_odd or is_known or not self.is_signed(vote):
            return
        self.heard[vote.peer] = self.now
        for other in own:
            self.take_notice(sender, Proof(other, vote))
        self.add_record(vote)
        if len(own) >= MAX_VOTES:
            self.drop_record(min((*own, vote), key=lambda other: other.attempt))


def rank(entries: list[Entry], fork: State) -> tuple:
    """Return the order of a branch; the smallest wins. The voters at the fork count whose offers build on it."""
    bases = {entry.state.head for entry in entries}
    owners = {offer.peer for entry in entries for offer in entry.commit.offers if offer.base in bases}
    return len(entries[0].commit.absent), -len(owners & set(fork.voters)), entries[0].commit.hash


# for each of KINDS
TAKERS = [Log.take_status, Log.take_key, Log.take_commit, Log.take_offer, Log.take_notice, Log.take_notice]
TAKERS += [Log.take_proposal, Log.take_vote]
