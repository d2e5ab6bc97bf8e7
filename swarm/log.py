"""The replicated log of local steps: a chain of commits, the same on all peers. A pure state machine without I/O.

**Chain.** A commit is the list of offers that an epoch applies. It names its parent, so the chain up to it determines a
`State`: the voters, and the offers that may follow. An offer names the last commit as its base, or the one before. An
owner has one offer for each base, so no sample counts twice. An offer that is too old returns to its owner.

**Choice of a commit.** It is single-decree Paxos among the voters, one decision for each parent: an attempt is a
ballot, and a vote an acceptance. An attempt has one leader, by hash. The leader has one list, because its vote is its
proposal: with two lists in an attempt, a later leader could not know which one may have a quorum. Attempt 0 starts when
the offers are there. If it fails, attempts are the numbers of time slots, so that no peer can run ahead, and a leader
that does not lead costs one slot. When a slot begins, each voter sends a promise: its last vote, and that it will not
vote in earlier attempts. With a quorum of promises, the leader proposes the list of the newest vote in them, or a fresh
list if a quorum has none. It ignores a promise that names a list of which it cannot get a blob: a Byzantine voter may
have voted for that. A list is a `Commit` without votes; a `Proposal` adds the leader's vote and the promises.
`State.fits` checks a record, `accepts` a list, `allows` its leader, and `is_chosen` its votes. The hash of a list
contains neither attempt nor votes.

**Safety.** A quorum is more than half of the voters, so any two have a common voter. If a list has a quorum of votes in
an attempt, the promises of each later attempt contain one of them, so each later proposal is the same list. Voters are
a function of the parent, which was chosen in the same way. So if no voter is Byzantine, there is one chain, with any
loss, delay, crash or restart. Clocks matter for progress only. A voter saves its votes before it sends them, and after
a restart it votes from the last epoch that they name. A voter that has lost them votes again once a commit has an offer
of this process: it cannot have voted on what follows.

**Byzantine voters.** One that is in two quorums can cause a fork. Two votes that contradict each other are a proof,
which ends the vote of its peer. `State.allows` believes no invented promise, `is_fair` keeps leaders from omitting
voters, `update_ready_time` limits the wait for a voter, and `rank` chooses between the branches of a fork
(docs/security.md). A leave record counts from the commit that holds it. If half of the voters are gone, the log ends.

**Gossip.** A `Status` names the commits, offers and votes that a peer has. It goes to a few random peers, which answer
with all that this peer lacks. So lost messages repeat, late peers catch up, and clients, which cannot be called, take
part. Voters have limits of their own for bytes, and thus for signatures to check. All other peers share one, see
`Log.spend`.
"""

import contextlib
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Annotated, NamedTuple

from swarm import log_records
from swarm.log_records import MAX_OFFERS, WINDOW, Commit, Leave, Offer, Proof, Proposal, Status, Vote, compute_hash

MAX_ANSWER_BYTES = 48 * 1024  # a proposal with 16 offers and 64 voters has about 45 KB
MAX_TRAFFIC = 1024 * 1024  # bytes from one peer and to it in STATUS_INTERVAL
MAX_GIVEN = 128 * 1024  # of these bytes, those to the peer: updates wait for messages, and two have the most commits
STATUS_BYTES = 8 * 1024  # as which a status counts at least, for the time that its check takes
RECORD_BYTES = 2 * 1024  # the same of another record
RESERVED_OFFERS = 12  # of a commit, for voters
MOST_JUDGES = 10  # of the places in a list: a part of many voters may choose when to be there together
MAX_OWED = 8  # offers, first in turn, of which a list must have the late ones
MAX_POOL = 16  # offers of peers that are not expected to have one
MAX_VOTES = 8  # of one voter that are kept, promises included
MIN_COUNTED = 4  # of the last WINDOW commits that have an owner's offer, for it to be a voter
MIN_AWAITED = 7  # the same, for voters that others wait for
LATE_INTERVAL = 4  # epochs in which others wait once for a voter with a late offer
NEW_VOTER_INTERVALS = (32, 1), (16, 2), (8, 4), (4, 8), (0, 4)  # (minimum of voters, commits per new voter)
MAX_COMMITS = 256  # that a peer keeps; 12 voters need 18 KB for one, and a peer that lacks more loads a state
MAX_UNASKED = 4  # commits that each peer sends to one that is behind, which then asks the first of them for more
SLOT = 15.0  # seconds of an attempt, the same on all peers
STATUS_INTERVAL = 5.0  # seconds between two statuses
MAX_SKEW = 3.0  # seconds between two clocks; hivemind does not connect peers with more
LATE_SHARE = 1 / 8  # of the usual epoch, to wait for the last voters


@dataclass(frozen=True)
class State:
    """All that later commits depend on. A checkpoint keeps it, and a new peer gets it from a peer that it trusts."""

    epoch: log_records.Number
    head: log_records.Hash  # the newest commit, and its parent
    parent: log_records.Hash  # or of the first state, the blob of its anchor
    voters: Annotated[tuple, 1, log_records.MAX_VOTERS, log_records.Peer]
    owners: Annotated[tuple, WINDOW, WINDOW, log_records.Peers]  # of offers in each of the last commits
    opposed: Annotated[tuple, WINDOW, WINDOW, log_records.Peers]  # those that most voters have opposed in each of them
    counted: Annotated[tuple, 0, MAX_OFFERS, Annotated[bytes, 33, 96]]  # the keys of the head's offers, if it has any
    clients: Annotated[tuple, 0, 1024, log_records.Peer]  # peers that accept no connections
    banned: Annotated[tuple, 0, 4096, log_records.Peer]

    @property
    def places(self) -> int:
        """The places of voters in the next commit. Others may take some if they had some in the head."""
        others = {*self.owners[-1]} - {*self.voters}
        return MAX_OFFERS - min(len(others), MAX_OFFERS - RESERVED_OFFERS)

    def list_turns(self) -> tuple[list[bytes], list[bytes]]:
        """Return the voters that have a turn in the next commit, as many as there are places, because they have not
        counted for longest; and those that have missed a turn. They may be gone, so they take none of these places."""
        last = {peer: number for number, peers in enumerate(self.owners) for peer in peers}
        cycle = math.ceil(len(self.voters) / self.places)  # commits from turn to turn
        missed = [peer for peer in self.voters if last.get(peer, -1) < WINDOW - cycle]
        usual = sorted({*self.voters} - {*missed}, key=lambda peer: (last[peer], compute_hash(self.head, peer)))
        return usual[: self.places], missed

    @property
    def in_turn(self) -> set[bytes]:
        """The voters that make an offer for the next commit: all, if there are places for all."""
        return {peer for peers in self.list_turns() for peer in peers}

    @property
    def awaited(self) -> set[bytes]:
        """The voters for whose offers lists wait: those that have a turn, or with places for all, those with offers in
        at least MIN_AWAITED of the last commits. If the one in the head came late, its voter is awaited in each
        LATE_INTERVAL-th epoch only: it may be late on purpose."""
        usual = {peer for peer in self.voters if sum(peer in peers for peers in self.owners) >= MIN_AWAITED}
        usual = usual if len(self.voters) <= self.places else {*self.list_turns()[0]}
        late = {key[len(self.parent) :] for key in self.counted if not key.startswith(self.parent)}
        return usual - late if self.epoch % LATE_INTERVAL else usual

    @property
    def active(self) -> set[bytes]:
        """The voters with an offer in one of the last two commits. They lead most attempts, and their samples count. If
        they are not most voters, all voters do: a few must not decide which state the others load."""
        active = {*self.voters} & {*self.owners[-2], *self.owners[-1]}
        return active if 2 * len(active) > len(self.voters) else {*self.voters}

    @property
    def suspended(self) -> set[bytes]:
        """The owners whose updates do not count, because most voters have opposed one of the last of them. If these are
        half of the voters, all updates count: after a noisy step, honest updates may point back against it."""
        owners = {peer for peers in self.opposed for peer in peers}
        return owners if 2 * len(owners & {*self.voters}) < len(self.voters) else set()

    def find_suspended(self, commit: Commit) -> set[bytes]:
        """Return the owners whose updates do not count in the next commit; none if its voters all are, because peers
        without a vote must not decide."""
        suspended = self.advance(commit).suspended
        voters = {offer.peer for offer in commit.offers} & {*self.voters}
        return set() if voters <= suspended else suspended

    @property
    def participants(self) -> set[bytes]:
        """The voters, and the owners of counted offers in the last commits."""
        return {*self.voters, *(peer for peers in self.owners for peer in peers)}

    def find_leader(self, attempt: int) -> bytes:
        """Return the only peer that may propose in an attempt. It follows from the epoch: leaders could choose heads.
        Active voters that accept connections come first. After attempt 0, all others, and the leader of that attempt,
        have one turn where these have four."""
        active = self.active
        able = active - {*self.clients} or active
        order = {peer: (peer not in able, peer not in active, compute_hash(self.epoch, peer)) for peer in self.voters}
        first, *others = sorted(order, key=order.get)
        leaders = [first, *others, *3 * [peer for peer in others if peer in able]]
        return leaders[attempt % len(leaders)]

    def find_digest(self, commit: Commit) -> bytes:
        """Return the digest of the model at the head that most voters name in the next commit, or nothing."""
        digests = Counter(it.digest for it in commit.offers if it.base == self.head and it.peer in self.voters)
        return next((digest for digest in digests if 2 * digests[digest] > min(len(self.voters), MAX_OFFERS)), b"")

    def is_most(self, peers: Collection[bytes], of: Collection[bytes]) -> bool:
        """Return whether these are more than half of some voters. The first commit takes two thirds (two of three): the
        leader may have shown each half of the others another first state, and vote with both."""
        return len({*peers} & {*of}) > len(of) * (1 / 2 if self.counted else 0.66)

    def is_quorum(self, peers: Collection[bytes]) -> bool:
        """Return whether these are most voters, see `is_most`."""
        return self.is_most(peers, self.voters)

    def has_quorum(self, records: Iterable[Vote]) -> bool:
        """Return whether a quorum has one of these records; see `is_quorum`."""
        return self.is_quorum({record.peer for record in records})

    def has_most_turns(self, records: Iterable[Offer | Leave]) -> bool:
        """Return whether a quorum has one of these records, or of more voters than places, most that have a turn: as
        many others could end each epoch early."""
        peers = {record.peer for record in records}
        turns = self.list_turns()[0] if len(self.voters) > self.places else ()
        return self.is_quorum(peers) or self.is_most(peers, turns)

    def has_most_voters(self, commit: Commit) -> bool:
        """Return whether most voters have an offer in this list, or leave. Weights depend on the list alone, so the few
        peers of a short list could make any change of the model."""
        known = {record.peer for record in (*commit.offers, *commit.leaves)} & {*self.voters}
        return 2 * len(known) > min(len(self.voters), MAX_OFFERS)

    def allows(self, proposal: Proposal, known: Collection[tuple[int, bytes]]) -> bool:
        """Return whether the leader was the right one, and its promises allow the list: a new one, or that of the last
        vote in them, if `known` has that proposal (attempt, list): a promise may name one that was never made."""
        vote = proposal.vote
        promises = proposal.promises
        name = proposal.commit.hash
        is_leader = vote.peer == self.find_leader(vote.attempt)
        is_own = (vote.parent, vote.proposal, vote.last) == (self.head, name, vote.attempt)
        asked = {(self.head, vote.attempt - 1)} if vote.attempt else set()
        is_asked = {(it.parent, it.attempt) for it in promises} == asked and (not asked or self.has_quorum(promises))
        newest = max((it.last for it in promises), default=-1)
        lists = {it.proposal for it in promises if it.last == newest}
        return is_leader and is_own and is_asked and (newest < 0 or name in lists and (newest, name) in known)

    def fits(self, record: Offer | Leave | Proof) -> bool:
        """Return whether the next commit may contain the record, signatures apart."""
        if isinstance(record, Proof):
            return record.peer in self.voters and record.is_valid()
        is_new = record.key not in self.counted if isinstance(record, Offer) else record.peer in self.participants
        return record.base in (self.head, self.parent) and is_new

    def accepts(self, commit: Commit, is_signed: Callable[[object], bool]) -> bool:
        """Return whether this may be the next commit, votes apart."""
        peers = [[record.peer for record in records] for records in (commit.leaves, commit.proofs)]
        votes = (vote for proof in commit.proofs for vote in (proof.first, proof.second))
        return (
            (commit.parent, commit.epoch) == (self.head, self.epoch + 1)
            and self.has_most_voters(commit)
            and len({offer.peer for offer in commit.offers}) == len(commit.offers)
            and all(names == sorted(set(names)) for names in (*peers, [offer.key for offer in commit.offers]))
            and all(map(self.fits, (*commit.offers, *commit.leaves, *commit.proofs)))
            and all(map(is_signed, (*commit.offers, *commit.leaves, *votes)))
        )

    def is_chosen(self, commit: Commit, is_signed: Callable[[object], bool]) -> bool:
        """Return whether a quorum voted for this child of the head in one attempt."""
        terms = {(vote.parent, vote.proposal, vote.last, vote.attempt) for vote in commit.votes}
        attempts = {(self.head, commit.hash, vote.attempt, vote.attempt) for vote in commit.votes[:1]}
        return self.has_quorum(commit.votes) and terms == attempts and all(map(is_signed, commit.votes))

    def advance(self, commit: Commit) -> "State":
        """Return the state after a valid commit."""
        banned = {*self.banned, *(proof.peer for proof in commit.proofs)}
        out = {leave.peer for leave in commit.leaves}
        current = {offer.peer for offer in commit.offers}
        owners = tuple(tuple(sorted(set(peers) - out)) for peers in (*self.owners[1:], current))
        judges = [it for it in commit.offers if it.base == self.head and it.peer in self.voters]
        votes = Counter(peer for judge in judges for peer in {*judge.opposed} & {*self.owners[-1]})
        opposed = sorted(peer for peer in votes if votes[peer] > min(len(self.voters) / 2, MOST_JUDGES))
        counts = Counter(peer for peers in owners for peer in peers)
        present = [peer for peer in self.voters if peer not in banned | out]
        # a log without voters would end, so the last ones stay
        # a commit has places for some of many voters: half of an equal share is enough
        least = min(MIN_COUNTED, WINDOW * log_records.MAX_OFFERS // (2 * len(self.voters)))
        voters = [peer for peer in present if counts[peer] >= least] or present or list(self.voters)
        able = {peer for peer in counts if counts[peer] >= MIN_COUNTED} - {*banned, *voters}
        # a quarter more in WINDOW commits, or two if there are fewer than four
        interval = next(commits for least, commits in NEW_VOTER_INTERVALS if len(voters) >= least)
        is_time = len(voters) < log_records.MAX_VOTERS and commit.epoch % interval == 0
        new = sorted(able, key=lambda peer: (-counts[peer], peer))[:1] if is_time else []
        clients = {*self.clients, *current} - {offer.peer for offer in commit.offers if offer.accepts_connections}
        return State(
            epoch=commit.epoch,
            head=commit.hash,
            parent=self.head,
            voters=tuple(sorted((*voters, *new))),
            owners=owners,
            opposed=(*self.opposed[1:], tuple(opposed)),
            counted=tuple(offer.key for offer in commit.offers),
            clients=tuple(sorted(clients & {*counts, *voters})),
            banned=tuple(sorted(banned)),
        )


def make_genesis(run: str, epoch: int, blob: bytes, members: Sequence[bytes]) -> State:
    """Return the state with which a log begins, after a dense round. All its members are the first voters, and count as
    owners of offers in the commits before. The parent is the blob of one member's anchor. The momentum is zero."""
    voters = tuple(sorted(set(members)))[: log_records.MAX_VOTERS]
    head = compute_hash("genesis", (run, epoch, blob, voters))
    return State(epoch, head, blob, voters, (voters,) * WINDOW, ((),) * WINDOW, (), (), ())


class Action(NamedTuple):
    """An instruction to the caller, which follows them in the order of the list.

    `send`: the message to `peers` (as the response if the peer has just called), or if there are none, to all peers;
    `gossip`: to these, or to some random ones. `save`: write the memory to disk before any later action. `fetch`: the
    blob of an offer, first from `peers` and then from voters and helpers, then call `receive` again. It comes again
    after a commit, with other `peers`, or once `Log.fetching` lacks it.
    """

    kind: str
    content: object
    peers: tuple[bytes, ...] = ()


class Entry(NamedTuple):
    """A commit, None for the first, and the state after it."""

    commit: Commit | None
    state: State


class Log:
    """One peer's copy of the log, and its part in the choice of the next commit.

    The public methods return a list of Actions. The caller sets `model` to the hash of the commit that its model has,
    and applies `find_next`. Times are seconds of a clock that peers share, see MAX_SKEW.
    """

    def __init__(self, state: State, identity, timeout: float, holds: Callable, now: float, memory: bytes | None):
        """
        :param state: that of `make_genesis`, of a checkpoint, or of a peer that this one trusts
        :param identity: has `peer`, `sign(data)`, `verify(peer, data, signature)`, `find_key(peer)`, which is None for
            an unknown key, and `add_key(peer, key)`, which checks the digest. Keys of past voters must stay known
        :param timeout: seconds in which updates and votes arrive; follows from bytes and uplinks, so peers may differ
        :param holds: returns whether a blob, given its id, is here, complete and valid
        :param memory: of the last action `save`; empty if this peer has not voted in this log, None if it may have
        """
        self.identity = identity
        self.timeout = timeout
        self.holds = holds
        self.me = identity.peer
        self.now = now
        self.chain = {state.head: Entry(None, state)}  # by the hash of the commit; lost branches are kept too
        self.model = state.head
        kind = Annotated[tuple, 0, MAX_COMMITS, log_records.Memory]
        try:
            memories = log_records.unpack(kind, memory) if memory else ()
        except ValueError:
            memories = memory = None  # another version has written it
        self.memories = {item.parent: item for item in memories or ()}
        #: the first epoch for whose commit this peer knows all votes that it has given
        self.voting_epoch = math.inf if memory is None else max((item.epoch for item in memories), default=0)
        self.records: dict[bytes, object] = {}  # of the next commit, by name
        self.turns: dict[bytes, int] = {}  # the epoch since which each owner of an offer waits for its turn
        self.own: dict[bytes, Offer] = {}  # this peer's offers that no commit counts, by key
        self.returned: deque[Offer] = deque()  # those that no commit will count; the caller takes them
        self.traffic: dict[bytes, int] = {}  # bytes in this status interval, by peer
        self.given: dict[bytes, int] = {}  # those to the peer
        self.fetching: dict[bytes, Action] = {}  # by blob; without an entry, it is requested again
        self.missing_keys: set[bytes] = set()
        self.spans: deque[float] = deque(maxlen=WINDOW)  # seconds between the last commits
        self.actions: list[Action] = []
        self.is_leaving = False
        self.status_time = now
        self.start_choice(state)

    def add_offer(self, now: float, offer: Offer) -> list[Action]:
        """Publish this peer's offer, see `sign`."""
        self.now = now
        self.own[offer.key] = offer
        if self.state.fits(offer):
            self.add_record(offer)
            self.send(offer)
        return self.finish()

    def leave(self, now: float) -> list[Action]:
        """Announce that this peer leaves. It should stay until a commit has its record, for an epoch at most."""
        self.now = now
        self.is_leaving = True
        self.sign_leave()
        return self.finish()

    def tick(self, now: float) -> list[Action]:
        """Continue with the passage of time; called twice a second, see TICK in `swarm/log_rounds.py`."""
        self.now = now
        self.num_ticks += 1
        if not 0 <= now - self.status_time < STATUS_INTERVAL:  # the clock may jump
            self.status_time = now
            self.missing_keys = set()
            self.traffic = {}
            self.given = {}
            self.is_dirty = True
        if self.is_dirty:
            self.is_dirty = False
            self.send_status()
        return self.finish()

    def receive(self, now: float, sender: bytes, *messages: bytes) -> list[Action]:
        """Process messages, maybe invalid, of a peer with a proven id; without any, continue after a blob has come."""
        self.now = now
        count = len(self.records)
        missing = set(self.missing_keys)
        newest = next(reversed(self.chain))
        for message in messages:
            if len(self.records) != count:  # this message may be about the next commit
                self.settle()
            count = len(self.records)
            records = []
            with contextlib.suppress(ValueError):
                records = log_records.decode(message) if self.spend(sender, len(message)) else []
            least = sum(STATUS_BYTES if isinstance(record, Status) else RECORD_BYTES for record in records)
            records = records if self.spend(sender, max(0, least - len(message))) else []
            for record in sorted(records, key=lambda it: getattr(it, "attempt", -1)):  # some need earlier ones
                if isinstance(record, Status):
                    self.take_status(sender, record)
                else:
                    TAKERS[type(record)](self, record)
        if self.missing_keys - missing or next(reversed(self.chain)) != newest:
            self.send_status(sender)
        return self.finish()

    def finish(self) -> list[Action]:
        """Return all actions that follow from the new knowledge."""
        self.settle()
        self.fetch()
        actions = self.actions
        self.actions = []
        return actions

    def spend(self, peer: bytes, num_bytes: int) -> bool:
        """Count these bytes, and return whether the peer may go on. Each voter has a limit of its own. All others
        share one, each up to a quarter of it. One below its equal share may exceed it, or new keys shut it out."""
        used = self.traffic[peer] = self.traffic.get(peer, 0) + num_bytes
        if peer in self.state.voters:
            return used <= MAX_TRAFFIC
        total = self.traffic.get(b"", 0) + num_bytes
        others = len(self.traffic.keys() - {b"", *self.state.voters})
        is_allowed = used <= MAX_TRAFFIC // 4 and min(total, used * others) <= MAX_TRAFFIC
        if is_allowed:
            self.traffic[b""] = total
        return is_allowed

    def send(self, *records: object, to: bytes | None = None, kind: str = "send") -> None:
        """Send a message to a peer that stays below its limits, or to several."""
        message = log_records.encode(*records)
        if to is not None:
            given = self.given.get(to, 0) + len(message)
            if given > MAX_GIVEN or not self.spend(to, len(message)):
                return
            self.given[to] = given
        self.actions.append(Action(kind, message, (to,) if to else ()))

    def sign(self, kind: type, *values) -> object:
        """Return a record of this kind with this peer's signature."""
        record = kind(*values, b"")
        return replace(record, signature=self.identity.sign(log_records.get_signed_part(record)))

    def is_signed(self, record: object) -> bool:
        """Return whether the signature of a record is its peer's. Missing keys are requested."""
        if self.identity.find_key(record.peer) is None:
            self.missing_keys.add(record.peer)
            return False
        return self.identity.verify(record.peer, log_records.get_signed_part(record), record.signature)

    def select(self, kind: type) -> list:
        """Return the records of a kind."""
        return [record for record in list(self.records.values()) if isinstance(record, kind)]  # other threads add some

    def select_leaves(self) -> list[Leave]:
        """Return the leave records of peers that have made no offer since then: these have started again. An offer is
        surely newer if it builds on a newer commit. Any peer may send an old record once more."""
        current = self.select_current()
        back = {it.peer for it in current}
        leaves = [it for it in self.select(Leave) if it.base == self.state.head or it.peer not in back]
        last = {it.peer: it for it in list(self.records.values()) if it in leaves or it in current}
        return [it for it in last.values() if isinstance(it, Leave)]

    def add_record(self, record: object) -> None:
        """Keep a valid record for the next commit, and tell others."""
        self.records[compute_hash(record)[:8]] = record
        self.is_dirty = True

    # The gossip

    def send_status(self, to: bytes | None = None) -> None:
        """Say what this peer has, to a peer or to some random ones."""
        path = list(self.list_path())
        newest = next(reversed(self.chain))  # maybe of a branch that a peer is sending
        ancestors = [path[-1 - step] for step in log_records.ANCESTOR_STEPS if step < len(path)]
        trusted = self.state.participants
        missing = sorted(self.missing_keys, key=lambda peer: (peer != to, peer not in trusted, peer))
        known = tuple(self.records)[:1024], tuple(missing)[: log_records.MAX_VOTERS]
        self.send(Status((path[-1], newest, *ancestors, path[0]), *known, to is not None), to=to, kind="gossip")

    def take_status(self, sender: bytes, status: Status) -> None:
        """Send a peer all that it lacks."""
        answer = [log_records.Key(peer, key) for peer in status.missing_keys if (key := self.identity.find_key(peer))]
        path = self.list_path()
        if epochs := [path[head].state.epoch for head in status.heads if head in path]:
            limit = MAX_COMMITS if status.is_answer else MAX_UNASKED
            answer += [entry.commit for entry in self.list_entries(max(epochs))[:limit]]
        is_level = status.heads[0] == self.state.head
        if is_level:
            lacking = [record for name, record in self.records.items() if name not in status.records]
            answer += sorted(lacking, key=lambda it: (log_records.KINDS.index(type(it)), -getattr(it, "attempt", 0)))
        sizes = accumulate(len(log_records.pack(record)) for record in answer)
        count = len(list(takewhile(lambda size: size <= MAX_ANSWER_BYTES, sizes)))
        if answer:
            self.send(*answer[: max(1, count)], to=sender)
        has_news = status.heads[0] not in self.chain or is_level and not self.records.keys() >= {*status.records}
        if has_news and not status.is_answer:
            self.send_status(sender)

    def take_key(self, record: log_records.Key) -> None:
        """Remember a public key that was missing."""
        if record.peer in self.missing_keys:
            self.missing_keys.discard(record.peer)
            self.identity.add_key(record.peer, record.key)

    def take_offer(self, offer: Offer) -> None:
        """Keep a valid offer: the first one for each key, and of new peers the first ones in turn."""
        offers = {it.key: it for it in self.select(Offer)}
        expected = {*self.state.participants, self.me}
        pool = [] if offer.peer in expected else [it for it in offers.values() if it.peer not in expected]
        replaced = sorted(pool, key=self.find_turn)[MAX_POOL - 1 :]
        has_room = not replaced or self.find_turn(offer) < self.find_turn(replaced[0])
        if offer.key not in offers and has_room and self.state.fits(offer) and self.is_signed(offer):
            self.add_record(offer)
            for other in replaced:
                del self.records[compute_hash(other)[:8]]

    def take_notice(self, record: Leave | Proof) -> None:
        """Keep a valid leave record or proof, one for each peer."""
        signed = [record] if isinstance(record, Leave) else [record.first, record.second]
        is_known = record.peer in {other.peer for other in self.select(type(record))}
        if not is_known and self.state.fits(record) and all(map(self.is_signed, signed)):
            self.add_record(record)

    def fetch(self) -> None:
        """Request blobs that the next commit may contain, or that a commit contains. If attempt 0 has failed, the peers
        that voted for a list serve its blobs: their owners may have sent them to some voters only."""
        listed = {key: proposal.commit.offers for key, proposal in self.list_proposals().items()}
        holders = defaultdict(set)
        for vote in self.select(Vote) if self.memory.promised else ():
            for offer in listed.get((vote.last, vote.proposal), ()):
                holders[offer.blob].add(vote.peer)
        lists = [*listed.values(), self.choose(self.select(Offer))]
        lists += [commit.offers for commit in self.list_unapplied()[:WINDOW]]
        if self.model not in self.chain:  # an auxiliary peer, which has no model, holds what late peers may lack
            lists += [entry.commit.offers for entry in self.list_entries(self.state.epoch - 2)]
        offers = [offer for offers in lists for offer in offers if not self.holds(offer.blob)]
        wanted = {it.blob: Action("fetch", it, tuple(sorted(holders[it.blob]))) for it in offers}
        self.actions += [action for blob, action in wanted.items() if self.fetching.get(blob) != action]
        self.fetching = wanted

    # The chain

    def list_path(self, head: bytes = b"") -> dict[bytes, Entry]:
        """Return the commits up to this one, or else the newest one, by their hashes, the oldest first."""
        entries = [self.chain[head or self.state.head]]
        while entries[-1].commit and (parent := self.chain.get(entries[-1].state.parent)):
            entries.append(parent)
        return {entry.state.head: entry for entry in reversed(entries)}

    def list_entries(self, epoch: int) -> list[Entry]:
        """Return the commits after an epoch. Each step of the trainer calls this, so it walks no older ones."""
        entries = []
        entry = self.chain[self.state.head]
        while entry and entry.commit and entry.state.epoch > epoch:
            entries.append(entry)
            entry = self.chain.get(entry.state.parent)
        return entries[::-1]

    def start_choice(self, state: State) -> None:
        """Start the choice of the commit after a state. The order matters: turns come from the records before it."""
        left = self.select_leaves()  # the others have started again
        self.state = state
        self.since = self.now
        self.is_dirty = True
        self.num_ticks = 0
        #: when this peer knew a voter's offer, had most voters' updates, had all that a list waits for, last promised
        self.first_time = self.most_time = self.ready_time = self.promise_time = math.inf
        self.half_tick = math.inf  # since which it knows offers of half of the voters
        self.asked_time = math.inf  # since which this peer would make an offer if it had a turn
        turns = {it.peer: self.turns.get(it.peer, state.epoch - 1) for it in self.select(Offer) if self.holds(it.blob)}
        turns |= {peer: epoch for epoch, peers in enumerate(state.owners, state.epoch + 1 - WINDOW) for peer in peers}
        self.returned += [offer for offer in self.own.values() if not state.fits(offer)]
        self.own = {key: offer for key, offer in self.own.items() if state.fits(offer)}
        kept = [it for it in self.records.values() if (isinstance(it, Offer | Proof) or it in left) and state.fits(it)]
        self.records = {}
        self.turns = turns
        for record in (*kept, *self.own.values(), *self.memory.choice):
            self.add_record(record)
        self.memories = {name: item for name, item in self.memories.items() if item.epoch > state.epoch}
        self.fetching = {}
        self.owed = set()  # late offers that the next list must have, see `is_fair`
        if self.is_leaving:
            self.sign_leave()

    def take_commit(self, commit: Commit) -> None:
        """Keep a valid commit that a quorum has voted for, and proofs if the votes contradict those for another one."""
        if commit.hash in self.chain or commit.parent not in self.chain:
            return
        state = self.chain[commit.parent].state
        if state.is_chosen(commit, self.is_signed) and state.accepts(commit, self.is_signed):
            others = [it.commit for it in self.chain.values() if it.commit and it.commit.parent == state.head]
            self.add_commit(commit)
            for proof in [Proof(first, second) for it in others for first in it.votes for second in commit.votes]:
                self.take_notice(proof)

    def add_commit(self, commit: Commit) -> None:
        """Add a valid commit, and follow its branch if that is the better one."""
        state = self.chain[commit.parent].state.advance(commit)
        self.chain[commit.hash] = Entry(commit, state)
        path = self.list_path()
        branch = [entry for head, entry in self.list_path(commit.hash).items() if head not in path]
        if branch[0].commit.parent not in path:
            return
        fork = self.chain[branch[0].commit.parent].state
        lost = self.list_entries(fork.epoch)
        if lost and rank(lost, fork) <= rank(branch, fork):
            return
        offers = {offer for entry in lost for offer in entry.commit.offers if offer.peer == self.me}
        counted = {offer for entry in branch for offer in entry.commit.offers}
        if counted & {*self.own.values()}:
            self.voting_epoch = 0
        self.own = {offer.key: offer for offer in {*self.own.values(), *offers} - counted}
        if self.first_time < math.inf:  # commits that are replayed tell nothing about the length of an epoch
            self.spans.append(self.now - self.since)
        self.start_choice(state)
        if len(self.chain) > MAX_COMMITS:
            del self.chain[next(iter(self.chain))]

    def list_unapplied(self) -> list[Commit]:
        """Return the commits that the model lacks; none if it has another branch, or commits that are not known yet."""
        own = self.chain.get(self.model)
        commits = [entry.commit for entry in self.list_entries(own.state.epoch)] if own else []
        return commits if commits and commits[0].parent == self.model else []

    def find_next(self) -> Commit | None:
        """Return the commit that the model needs next, if all blobs are here."""
        return next((commit for commit in self.list_unapplied()[:1] if self.holds_all(commit)), None)

    def holds_all(self, commit: Commit) -> bool:
        """Return whether all blobs of a commit are here."""
        return all(self.holds(offer.blob) for offer in commit.offers)

    # The choice of the next commit

    def find_slot(self, skew: float = 0.0) -> int:
        """Return the attempt of this time."""
        return int((self.now + skew) // SLOT)

    @property
    def memory(self) -> log_records.Memory:
        """This peer's memory of the choice of the next commit."""
        return self.memories.get(self.state.head) or log_records.Memory(self.state.head, self.state.epoch + 1)

    def remember(self, memory: log_records.Memory) -> None:
        """Save a memory before the vote is sent."""
        self.memories[memory.parent] = memory
        self.actions.append(Action("save", log_records.pack(tuple(self.memories.values()))))

    def sign_leave(self) -> None:
        """Sign and send a leave record for the next commits."""
        if self.me in self.state.participants:
            self.take_notice(self.sign(Leave, self.state.head, self.me))

    def list_proposals(self) -> dict[tuple[int, bytes], Proposal]:
        """Return the proposals by attempt and list."""
        return {(proposal.attempt, proposal.commit.hash): proposal for proposal in self.select(Proposal)}

    def choose(self, offers: Iterable[Offer]) -> list[Offer]:
        """Return as many offers as a commit may have, first of owners that were not counted for longest.

        Late ones whose owners have newer ones come last; otherwise, all offers of more than MAX_OFFERS peers would soon
        be late. Others get only a quarter and the places that voters leave free, because new keys cost nothing.
        """
        ranked = list({offer.key: offer for offer in offers}.values())
        new = {it.peer for it in ranked if it.base == self.state.head}
        ranked.sort(key=lambda it: (it.base != self.state.head and it.peer in new, self.find_turn(it)))
        voters = [offer for offer in ranked if offer.peer in self.state.voters]
        others = [offer for offer in ranked if offer.peer not in self.state.voters]
        rest = MAX_OFFERS - RESERVED_OFFERS
        return (voters[:RESERVED_OFFERS] + others[:rest] + voters[RESERVED_OFFERS:] + others[rest:])[:MAX_OFFERS]

    def choose_one_each(self, offers: Iterable[Offer]) -> list[Offer]:
        """Return the newest chosen offer of each owner, because the rules of a list count each offer as a peer."""
        chosen = self.choose(offers)
        newest = {offer.peer: offer for offer in reversed(chosen)}
        return [offer for offer in chosen if newest[offer.peer] is offer]

    def find_turn(self, offer: Offer) -> tuple[int, bytes]:
        """Return the turn of an owner: since when it has not counted; new keys come last, in a random order."""
        return self.turns.get(offer.peer, self.state.epoch + 1), compute_hash(self.state.head, offer.peer)

    def make_list(self) -> Commit | None:
        """Return a list of the newest offers and all notices that this peer holds, or None if it lacks those of most
        voters. Only the first attempt lists offers of others, because peers may lack the blobs of new keys."""
        is_first = not self.memory.promised
        offers = [it for it in self.select(Offer) if self.holds(it.blob) and (is_first or it.peer in self.state.voters)]
        kinds = self.select_leaves(), self.select(Proof)
        notices = [sorted(records, key=lambda it: it.peer)[:MAX_OFFERS] for records in kinds]
        ordered = tuple(sorted(self.choose_one_each(offers), key=lambda offer: offer.key))
        commit = Commit(self.state.head, self.state.epoch + 1, ordered, *map(tuple, notices))
        return commit if offers and self.state.has_most_voters(commit) else None

    def select_current(self) -> list[Offer]:
        """Return the voters' offers that build on the head."""
        return [it for it in self.select(Offer) if it.base == self.state.head and it.peer in self.state.voters]

    @property
    def patience(self) -> float:
        """The seconds for which an awaited update may be later than those of most voters."""
        return self.timeout + LATE_SHARE * statistics.median_low(self.spans or (0.0,))

    def has_turn(self) -> bool:
        """Return whether this peer should make an offer, at the end of its epoch. Voters wait for their turn, unless
        too few others have come some time after the first call."""
        is_back = self.me in {leave.peer for leave in self.select_leaves()}  # without an offer, it would lose its vote
        if self.me not in self.state.voters or self.me in self.state.in_turn or is_back:
            return True
        self.asked_time = min(self.asked_time, self.now)
        return self.asked_time + self.patience < self.now < self.most_time

    def update_ready_time(self) -> None:
        """Set `ready_time`, from which this peer proposes or votes in attempt 0: once it has the updates of most voters
        and of all awaited ones, or at a deadline. A list waits for no leaving peer, and no update without a place."""
        chosen = {*self.choose(self.select(Offer))}
        current = self.select_current()
        settled = [*self.select_leaves(), *(it for it in current if it not in chosen or self.holds(it.blob))]
        if current and self.now < self.first_time:
            self.first_time = self.now
            self.owed = {it.key for it in self.select(Offer) if it.base == self.state.parent and self.holds(it.blob)}
        if 2 * len(current) >= min(len(self.state.voters), MAX_OFFERS):
            self.half_tick = min(self.half_tick, self.num_ticks)
        if self.state.has_most_turns(settled):
            self.most_time = min(self.most_time, self.now)
        has_all = self.most_time <= self.now and {it.peer for it in settled} >= self.state.awaited
        if has_all or self.now >= self.most_time + self.patience:
            self.ready_time = min(self.ready_time, self.now)

    def is_fair(self, commit: Commit) -> bool:
        """Return whether a list has two thirds of the voters' offers that are here, and late ones that were here in
        time, or newer ones of their owners. So no leader omits a voter until it loses its vote."""
        offers = [offer for offer in self.select(Offer) if offer.peer in self.state.voters and self.holds(offer.blob)]
        expected = self.choose_one_each(offers)
        listed = {offer.key for offer in commit.offers}
        owners = {offer.peer for offer in commit.offers}
        omitted = [it for it in expected if it.key not in listed]
        owed = {self.state.parent + it.peer for it in expected[:MAX_OWED] if it.peer not in owners} & self.owed
        return 3 * len(omitted) <= len(expected) and not owed

    def settle(self) -> None:
        """Take all steps that the records allow."""
        self.update_ready_time()
        if self.me in self.state.voters and self.state.epoch + 1 >= self.voting_epoch:
            self.promise()
            self.lead()
            self.vote()
        for (attempt, name), proposal in self.list_proposals().items():
            terms = attempt, attempt, name
            votes = tuple(it for it in self.select(Vote) if (it.attempt, it.last, it.proposal) == terms)
            if self.state.has_quorum(votes):
                self.add_commit(replace(proposal.commit, votes=votes))
                return self.settle()

    def lead(self) -> None:
        """Propose a list, if it is this peer's turn."""
        memory = self.memory
        attempt = self.memory.promised
        is_turn = attempt in (0, self.find_slot()) and self.state.find_leader(attempt) == self.me
        if not is_turn or memory.last >= attempt:
            return
        promises = self.list_promises(attempt)
        if not (self.state.has_quorum(promises) if attempt else self.ready_time <= self.now):
            return
        commit = self.make_list()
        if newest := max((it for it in promises if it.last >= 0), key=lambda it: it.last, default=None):
            earlier = self.list_proposals()[newest.last, newest.proposal]
            commit = earlier.commit
            self.send(earlier)  # without it, the others would not believe the promise
        if commit:
            vote = self.sign(Vote, self.state.head, attempt, attempt, commit.hash, self.me)
            proposal = Proposal(commit, vote, promises)
            self.remember(replace(memory, choice=(proposal,)))
            self.send(proposal)
            self.take_proposal(proposal)

    def list_promises(self, attempt: int) -> tuple[Vote, ...]:
        """Return the promises with which this peer may lead an attempt. If a list was chosen, each quorum names it.

        So it may ignore those of a Byzantine voter, which name a list that does not exist or lacks a blob. Those of a
        list that `is_fair` rejects count only if the voters had time to deny it, and the others are no quorum.
        """
        lists = self.list_proposals()
        promises = [it for it in self.select(Vote) if it.attempt == attempt - 1]
        if self.state.has_quorum(denials := [it for it in promises if it.last < 0]):
            return tuple(denials)  # so no list can have a quorum of votes
        named = {vote: lists.get((vote.last, vote.proposal)) for vote in promises}
        held = [it for it in promises if it.last < 0 or (named[it] and self.holds_all(named[it].commit))]
        fair = [it for it in held if it.last < 0 or self.is_fair(named[it].commit)]
        return tuple(held if self.counts_as_chosen(attempt) and not self.state.has_quorum(fair) else fair)

    def counts_as_chosen(self, attempt: int) -> bool:
        """Return whether a list of an earlier attempt may be the commit: voters had time to deny it, and few did."""
        denials = [it for it in self.select(Vote) if it.attempt == attempt - 1 and it.last < 0]
        return self.now >= self.promise_time + min(self.timeout, SLOT / 2) and not self.state.has_quorum(denials)

    def vote(self) -> None:
        """Vote for the newest proposal, if this peer may and holds its blobs."""
        memory = self.memory
        newest = max(self.select(Proposal), key=lambda it: it.attempt, default=None)
        if not newest or newest.attempt < memory.promised or newest.attempt <= memory.last:
            return
        attempt = newest.attempt
        commit = newest.commit
        is_usual = self.is_fair(commit) and (attempt or self.ready_time <= self.now)
        is_earlier = any(it.last >= 0 for it in newest.promises) and self.counts_as_chosen(attempt)
        if (is_usual or is_earlier) and self.holds_all(commit):
            self.remember(replace(memory, promised=attempt, choice=(newest,)))
            self.send_vote(attempt, attempt, commit.hash)

    def promise(self) -> None:
        """Once attempt 0 has had its time, send the last vote in each slot, and promise not to vote in earlier ones."""
        memory = self.memory
        attempt = self.find_slot()
        if self.now >= self.ready_time + self.timeout and memory.promised < attempt:
            self.promise_time = self.now
            self.remember(replace(memory, promised=attempt))
            self.send_vote(attempt - 1, memory.last, b"".join(it.commit.hash for it in memory.choice))

    def send_vote(self, *terms) -> None:
        """Sign and send a vote or a promise: the attempt, the attempt of the last vote, and its list."""
        vote = self.sign(Vote, self.state.head, *terms, self.me)
        self.send(vote)
        self.take_vote(vote)

    def take_proposal(self, proposal: Proposal) -> None:
        """Keep a valid proposal with the records in it."""
        commit = proposal.commit
        known = self.list_proposals()
        votes = (proposal.vote, *proposal.promises)
        if commit.votes or (proposal.attempt, commit.hash) in known:
            return
        liars = {proof.peer for proof in self.select(Proof)}  # which may name any number of lists; two are a proof
        named = {(vote.last, vote.proposal) for vote in self.select(Vote) if vote.peer not in liars}
        is_spare = (proposal.attempt, commit.hash) not in named and sum(it == proposal.attempt for it, _ in known) >= 2
        if is_spare or proposal.attempt > self.find_slot(MAX_SKEW) or not self.state.allows(proposal, known):
            return
        if not all(map(self.is_signed, votes)) or not self.state.accepts(commit, self.is_signed):
            return
        if len(known) >= log_records.MAX_VOTERS:  # the most that are kept
            del self.records[compute_hash(min(known.values(), key=lambda other: other.attempt))[:8]]
        self.add_record(proposal)
        for offer in commit.offers:
            self.take_offer(offer)
        for vote in votes:
            self.take_vote(vote)

    def take_vote(self, vote: Vote) -> None:
        """Keep a voter's signed vote or promise, and a proof if it contradicts another one."""
        is_voter = vote.parent == self.state.head and vote.peer in self.state.voters
        if not is_voter or vote.attempt > self.find_slot(MAX_SKEW):
            return
        own = [other for other in self.select(Vote) if other.peer == vote.peer]
        is_odd = vote.last > vote.attempt or (vote.last >= 0) != bool(vote.proposal)
        is_known = log_records.list_fields(vote)[:-1] in [log_records.list_fields(other)[:-1] for other in own]
        if is_odd or is_known or not self.is_signed(vote):
            return
        for other in own:
            self.take_notice(Proof(other, vote))
        self.add_record(vote)
        if len(own) >= MAX_VOTES:
            del self.records[compute_hash(min((*own, vote), key=lambda other: other.attempt))[:8]]


def rank(entries: list[Entry], fork: State) -> tuple:
    """Return a branch's sort key; the smallest wins. It counts the voters at the fork with offers that build on it."""
    bases = {entry.state.head for entry in entries}
    owners = {offer.peer for entry in entries for offer in entry.commit.offers if offer.base in bases}
    return -len(owners & {*fork.voters}), entries[0].commit.hash


TAKERS = {log_records.Key: Log.take_key, Commit: Log.take_commit, Offer: Log.take_offer, Leave: Log.take_notice}
TAKERS |= {Proof: Log.take_notice, Proposal: Log.take_proposal, Vote: Log.take_vote}
