"""Rounds of local steps over the replicated log: a thread that keeps a peer's log, and carries its messages and blobs.

The training loop makes offers and applies commits, see `LogSteps`. In between it does not wait for this
thread. `swarm/log.py` decides, `swarm/exchange.py` transports, and this module is the link between them:

- Peers that accept connections are called when the log has a message for them. A client, which cannot be called, calls
  others regularly, and their messages are in the answers.
- Auxiliary peers are in the DHT's list of donors. They hold the newest blobs, and clients get records of others there.
- Each message names its sender's log by the head of its first state. Two swarms that meet have two logs. The one with
  more peers stays, see `LogRounds.has_fewer_peers`.
- A peer without the log asks known contributors for the log's state after its own model's commit, see `choose_log`.
"""

import base64
import concurrent.futures
import contextlib
import random
import shutil
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from common.files import write_file
from common.signals import STOP_REQUESTED
from swarm import SwarmError, logger
from swarm.aggregation import BLOCK, Numbers, check_block
from swarm.exchange import MAX_MESSAGE_BYTES, MIN_MBITS, BlobStore, Exchange, InvalidBlobError
from swarm.log import Action, Log, State, make_genesis
from swarm.log_records import MAX_OFFERS, Commit, Number, Offer, pack, unpack
from swarm.progress import MANY_PEERS, PeerTracker
from swarm.sparse import TopKCompression
from swarm.state_server import RELAY, parse_epochs
from utils import RecordValidator, find_peer_id

TICK = 0.5  # seconds between two calls of `Log.tick`
EXCHANGE_SHARE = 1 / 4  # of an epoch, in which the updates should arrive: the more time, the less slow uplinks send
RECENT = 30.0  # seconds for which a peer's message tells its log
TIE_EPOCHS = 16  # of two logs with equally many peers, the one in a later block of this many epochs stays
POLL_INTERVAL = 0.5  # seconds between two calls of a client that has an open offer
IDLE_INTERVAL = 2.0  # the same without one
MAX_QUEUE = 64  # messages to a peer that are kept until it can be called; a status repeats whatever is lost
MAX_GUESTS = 16  # peers that get all messages, although they are not known to have worked
GOSSIPED_PEERS = 4  # to which each status goes, and which a client calls at once
MAX_ASKED = 16  # peers that a joining peer asks for their log
MAX_HELPERS = 4  # auxiliary peers that get all messages
HELPERS_INTERVAL = 10.0  # seconds between two searches for them
MIN_STORE_BYTES = 2**26  # on top of 5 for each parameter: a first state needs 4, and a full store deletes a tenth
MAX_KEYS = 4096
NEWEST = bytes(32)  # asks for the state after the newest commit
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the former goes on while the machine sleeps (Linux)
LINGER = 60.0  # seconds at the end in which a peer serves its blobs to others that lack them
STOP_LINGER = 2.0  # the same after a stop request


@dataclass(frozen=True)
class Envelope:
    """Messages of the log, a question for its state (also in an answer, by a peer without the log), or that state."""

    log: Annotated[bytes, 0, 32]  # the head of its first state; empty without a log
    epoch: Number  # of the sender's model
    mbits: Annotated[float, 0.0, 1e9] = 0.0  # of its uplink
    request: Annotated[bytes, 0, 32] = b""  # the commit after which the sender wants the log's state; empty for none
    state: Annotated[bytes, 0, MAX_MESSAGE_BYTES] = b""  # the requested one; empty if it is not known
    messages: Annotated[tuple, 0, MAX_QUEUE, Annotated[bytes, 1, MAX_MESSAGE_BYTES]] = ()


class Identity:
    """The key of this process, and the public keys of other peers, whose digests are the peer ids."""

    def __init__(self, key: RSAPrivateKey):
        public_key = RecordValidator(key).local_public_key
        self.peer = find_peer_id(public_key)
        self.public_keys = {self.peer: public_key}
        self.sign = key.sign
        self.find_key = self.public_keys.get

    def verify(self, peer: bytes, data: bytes, signature: bytes) -> bool:
        """Return whether a peer with a known key has signed this, in the only spelling, which no leader can change."""
        with contextlib.suppress(ValueError):
            if base64.b64encode(base64.b64decode(signature)) == signature:
                return RSAPublicKey.from_bytes(self.public_keys[peer][len(b"[owner:") : -1]).verify(data, signature)
        return False

    def add_key(self, peer: bytes, key: bytes) -> None:
        """Keep a public key if the peer is its owner; above MAX_KEYS, replace the oldest, which the log can ask for."""
        with contextlib.suppress(ValueError):
            if peer != self.peer and find_peer_id(key) == peer:
                self.public_keys[peer] = key
                if len(self.public_keys) > MAX_KEYS:
                    del self.public_keys[next(it for it in self.public_keys if it != self.peer)]


def choose_log(answers: Sequence[Envelope], num_asked: int) -> tuple[bytes, State | None]:
    """Return the id of the log that most answers name, and its state if more than half of these agree on it; no id if
    fewer than half of the asked peers name one log, because others can keep the honest ones from answering."""
    logs = Counter(answer.log for answer in answers if len(answer.log) == len(NEWEST))
    log_id = min(logs, key=lambda it: (-logs[it], it), default=b"")
    if not log_id or 2 * logs[log_id] < num_asked:
        return b"", None
    state, votes = Counter(answer.state for answer in answers if answer.log == log_id).most_common(1)[0]
    with contextlib.suppress(ValueError):
        if state and 2 * votes > logs[log_id]:
            return log_id, unpack(State, state)
    return log_id, None


class LogRounds:
    """A peer's log with its thread, its blobs and the peers that it talks to. All public methods are thread-safe.

    :param numbers: the swarm's parameters, for the sizes of blocks
    :param folder: a folder for the blobs and this peer's votes
    """

    def __init__(self, tracker: PeerTracker, numbers: Numbers, codec: TopKCompression, folder: Path):
        self.dht = tracker.dht
        self.tracker = tracker
        self.accepts_connections = not self.dht.client_mode
        self.identity = Identity(RSAPrivateKey.process_wide())
        self.initial_peers = {peer.to_bytes() for peer in self.dht.initial_ids}
        self.log: Log | None = None
        self.log_id = b""
        self.epoch = 0  # of this peer's model; set by the optimizer
        self._clock_offset = get_dht_time() - time.clock_gettime(CLOCK)
        self._memory_file = folder / "votes"
        self.numbers = numbers
        count = numbers.count
        sizes = MIN_STORE_BYTES + 5 * numbers.total, numbers.num_blocks
        self.update_bytes = codec.estimate_bytes(numbers.total)
        limit = int(1.5 * codec.estimate_bytes(BLOCK))
        self.store = BlobStore(folder / "blobs/updates", *sizes, limit, lambda it, i: check_block(it, count(i), codec))
        self.anchors = BlobStore(
            folder / "blobs/anchors", *sizes, 4 * BLOCK, lambda it, i: np.frombuffer(it, "<f4").reshape(count(i))
        )
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._is_ending = threading.Event()
        self._outbox: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=MAX_QUEUE))
        self._called: set[bytes] = set()  # peers whose answer is awaited
        self._jobs: deque[Callable[[], None]] = deque()  # for the thread
        self.helpers: dict[bytes, float] = {}  # the Mbit/s of auxiliary peers; 0 of those that are not initial peers
        self._unsaved = b""  # the commit whose next vote is not on disk
        self._next_search = self._next_poll = 0.0
        self.offered: dict[bytes, tuple[bytes, State]] = {}  # by client: its log, for an auxiliary peer
        self._seen: dict[bytes, tuple[bytes, int, float]] = {}  # the log and the epoch of each member, and when
        self.exchange = Exchange(self.dht, tracker.prefix, self._answer, self.store, self.anchors)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def _now(self) -> float:
        """Return the swarm's time. If this machine's clock was set, a promise for a later slot would bind this peer."""
        return self._clock_offset + time.clock_gettime(CLOCK)

    # --- for the training loop

    def expect(self, log_id: bytes) -> None:
        """Record on disk that this peer has no votes in a log that it begins with others, and may open later."""
        write_file(self._memory_file, log_id)

    def open(self, log_id: bytes, state: State) -> None:
        """Start to take part in a log, from this state on."""
        saved = self._memory_file.read_bytes() if self._memory_file.exists() else b""
        memory = saved.removeprefix(log_id) if saved.startswith(log_id) else None
        with self._lock:
            self.log_id = log_id
            self._seen = {}
            self.log = Log(state, self.identity, self._compute_timeout(state), self.store.has, self._now(), memory)
            if self.tracker.trust.is_auxiliary:  # it has no model
                self.log.model = NEWEST
        self._wake.set()

    def close(self) -> list[Offer]:
        """Leave the log, and return this peer's offers that no commit contains."""
        with self._lock:
            offers = [*self.log.own.values(), *self.log.returned]
            self.log = None
            self.log_id = b""
            self._outbox.clear()
        return offers

    def find_next(self, head: bytes) -> tuple[Commit, State] | None:
        """Return the commit after `head` once its updates are here, with the log's state before it; otherwise None."""
        with self._lock:
            self.log.model = head
            commit = self.log.find_next()
            return (commit, self.log.chain[head].state) if commit else None

    def count_pending(self) -> int:
        """Return the samples of this peer's offers that the next commit, or one that the model lacks, may contain."""
        with self._lock:
            if (log := self.log) is None:
                return 0
            offers = [offer for offer in log.own.values() if offer.base == log.state.head]
            offers += [offer for commit in log.list_unapplied() for offer in commit.offers if offer.peer == log.me]
            return sum(offer.samples for offer in offers)

    def add_offer(self, base: bytes, digest: bytes, samples: int, blocks: list[bytes], opposed: set[bytes]) -> None:
        """Store and publish an update of this peer. It opposes the updates of these peers in the base."""
        blob = self.store.add(blocks)
        num_bytes = sum(map(len, blocks))
        mbits = self.dht.uplink.mbits or 0.0
        with self._lock:
            self.log.timeout = self._compute_timeout(self.log.state)
            fields = base, digest, self.log.me, samples, blob, num_bytes, tuple(sorted(opposed))
            offer = self.log.sign(Offer, *fields, self.accepts_connections, mbits)
            self._perform(self.log.add_offer(self._now(), offer))

    def find(self, peers: Sequence[bytes], head: bytes) -> tuple[bytes, State | None]:
        """Ask peers for their log and its state after the commit `head`, which may be NEWEST; see `choose_log`."""
        question = pack(Envelope(b"", self.epoch, request=head))
        calls = [self.exchange.send(PeerID(it), question) for it in random.sample(peers, min(len(peers), MAX_ASKED))]
        answers = []
        with contextlib.suppress(TimeoutError):
            for call in concurrent.futures.as_completed(calls, self.dht.uplink.timeouts.request + 1.0):
                with contextlib.suppress(Exception):  # no answer, or an invalid one
                    answers.append(unpack(Envelope, call.result()))
                kinds = Counter((answer.log, answer.state) for answer in answers)
                if 2 * max(kinds.values(), default=0) > len(calls):
                    break  # the others cannot change it, and a dead peer would take the whole time
        return choose_log(answers, len(calls))

    def has_fewer_peers(self, ended: bytes) -> bool:
        """Return whether most peers that have worked, this one included, have another log. Half of them are enough if
        this log has a commit (before, other members may still open it), and the other log is in a later block of
        TIE_EPOCHS epochs, or in the same one and has the smaller id. Half of this log's voters are enough as well,
        because it can have no commit without them.

        :param ended: the log that this peer has left; it returns to that one only for most peers
        """
        # also former voters: most of them may have begun another log while the network was cut
        known = self.tracker.present.keys() & (self.tracker.trust.partners | self.tracker.trust.attested)
        with self._lock:
            seen = self.select_seen(known)
            state = self.log.state
        gone = [peer for peer in state.voters if peer in seen and seen[peer][0] != self.log_id]
        if state.counted and 2 * len(gone) >= len(state.voters):
            return True
        pairs = sorted([*seen.values(), (self.log_id, self.epoch)])
        logs = Counter(log for log, _ in pairs)
        epochs = dict(pairs)  # the last epoch of a log is the highest one
        first = min(logs, key=lambda it: (-logs[it], -(epochs[it] // TIE_EPOCHS), it))
        needs_most = not state.counted or first == ended  # `known` has the others only
        return first != self.log_id and 2 * logs[first] > len(known) + needs_most

    def take_offered(self) -> tuple[bytes, State, bytes] | None:
        """Return the log that clients have offered to this auxiliary peer, its state, and one of them: its first state,
        which its id proves, or a later one from more than half of the known contributors."""
        with self._lock:
            offered = self.offered
            self.offered = {}
        known = self.tracker.trust.select_known(self.tracker.present).keys()
        for (log_id, state), count in Counter(offered.values()).most_common():
            first = make_genesis(self.tracker.prefix, state.epoch, state.parent, state.voters)
            has_most = 2 * len(known & {*state.voters}) > len(known)  # a stranger may begin a log of its own
            if 2 * count > len(known) or has_most and state == first and state.head == log_id:
                return log_id, state, next(peer for peer, it in offered.items() if it == (log_id, state))
        return None

    def fetch_anchor(self, blob: bytes, leader: bytes, members: Sequence[bytes]) -> concurrent.futures.Future:
        """Fetch the first anchor. The leader sends each block once, to a member that passes it on. No claims count."""
        self.exchange.participants = self.exchange.urgent = frozenset(map(PeerID, members))
        peers = members if self.can_call(leader) else [*self.helpers, self.identity.peer]  # it leads only clients
        holders = {PeerID(it): MIN_MBITS if it == leader else 200.0 for it in filter(self.can_call, peers)}
        return self.exchange.fetch(blob, PeerID(leader), holders, 4 * self.numbers.total, self.anchors)

    def leave(self) -> None:
        """Tell the others, once, that this peer leaves, and serve the updates that they lack for the last commit."""
        if self.log is None or self.log.is_leaving:
            return
        with self._lock:
            self._perform(self.log.leave(self._now()))
        start = time.monotonic()
        while time.monotonic() < start + (STOP_LINGER if STOP_REQUESTED.is_set() else LINGER) and not self._is_served():
            time.sleep(TICK / 5)

    def _is_served(self) -> bool:
        with self._lock:
            members = self._list_members()
            is_sent = not any(self._outbox[peer] for peer in members if self.can_call(peer))
            seen = self.select_seen(members - self.helpers.keys())  # whose epochs may lag
            has_all = all(epoch >= self.epoch for log, epoch in seen.values() if log == self.log_id)
            return is_sent and not self._called and has_all

    def select_seen(self, peers: Collection[bytes]) -> dict[bytes, tuple[bytes, int]]:
        """Return the log and the epoch of each of these peers that has told them lately."""
        oldest = time.monotonic() - RECENT
        seen = list(self._seen.items())  # the training loop calls this without the lock
        return {it: (log, epoch) for it, (log, epoch, at) in seen if at > oldest and it in peers}

    def shutdown(self) -> None:
        """Stop the threads."""
        self._is_ending.set()
        self._wake.set()
        self._thread.join()
        self.exchange.shutdown()
        shutil.rmtree(self.store.folder.parent, ignore_errors=True)

    # --- the thread

    def _run(self) -> None:
        next_tick = 0.0
        while not self._is_ending.is_set():
            self._wake.wait(TICK)
            self._wake.clear()
            with self._lock:
                while self._jobs:
                    self._jobs.popleft()()
                self._find_helpers()
                if self.log is None:
                    continue
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    if not self.log.num_ticks:  # only between two choices: a promise names a slot of this clock
                        self._clock_offset = get_dht_time() - time.clock_gettime(CLOCK)
                    participants = self._list_participants()
                    voters = self.log.state.voters
                    self._seen = {it: self._seen[it] for it in self._seen if it in self.tracker.others or it in voters}
                    self.exchange.participants = frozenset(map(PeerID, participants))
                    # new keys cost nothing, so they must not delay the data of voters
                    self.exchange.urgent = frozenset(map(PeerID, participants & {*voters, *self.initial_peers}))
                    self._perform(self.log.tick(self._now()))
                self._call_peers()

    def _perform(self, actions: list[Action]) -> None:
        """Do what the log says. Its messages to a peer that has just called are in the answer."""
        for kind, content, peers in actions:
            if kind in ("send", "gossip") and self._unsaved != self.log.state.head:  # votes are saved before
                peers = [*(peers or self._list_members())]
                random.shuffle(peers)
                for peer in peers[: GOSSIPED_PEERS if kind == "gossip" else None]:
                    self._outbox[peer].append(content)
            elif kind == "save":
                self._unsaved = b"" if write_file(self._memory_file, self.log_id + content) else self.log.state.head
            elif kind == "fetch":
                self._fetch(content, peers)
        self.exchange.keep(frozenset(self.log.fetching), self.store)
        self._wake.set()

    def _list_participants(self) -> set[bytes]:
        """Return the ids of the others that have worked, are voters, or are auxiliary peers. An offer costs nothing."""
        others = (self.tracker.trust.partners | self.tracker.trust.attested) & self.tracker.present.keys()
        return {*others, *self.helpers, *self.log.state.voters} - {self.identity.peer, *self.tracker.trust.banned_until}

    def _list_members(self) -> set[bytes]:
        """Return the ids of the other peers that get all messages: the participants, and the last ones of the others
        that have called, because a record with a new key costs nothing."""
        participants = self._list_participants()
        present = self.tracker.present
        guests = [peer for peer in self._seen if peer in present and peer not in participants]
        return participants | {*guests[-MAX_GUESTS:]} - {*self.tracker.trust.banned_until}

    def _when_done(self, future: concurrent.futures.Future, take: Callable, *args) -> None:
        """Let the thread call a function with the result of a future, or the exception."""

        def add_job(done: concurrent.futures.Future) -> None:
            if not done.cancelled():  # at the end, or because the log no longer wants a blob
                self._jobs.append(partial(take, done.exception() or done.result(), *args))
                self._wake.set()

        future.add_done_callback(add_job)

    def _find_helpers(self) -> None:
        """Look for auxiliary peers from time to time. They declare a state of infinite epoch."""
        if time.monotonic() >= self._next_search:
            # each peer reads the records of all
            self._next_search = time.monotonic() + HELPERS_INTERVAL * max(1.0, len(self.tracker.others) / MANY_PEERS)
            key = f"{self.tracker.prefix}_state_averager.all_averagers"
            self._search = self.dht.get(key, latest=True, return_future=True)  # without a reference, it would not end
            self._when_done(self._search, self._take_helpers)

    def _take_helpers(self, entry: object) -> None:
        if isinstance(entry, ValueWithExpiration):  # otherwise, no peer has answered
            found = [peer for peer, epoch in parse_epochs(entry, self.identity.peer).items() if epoch == RELAY]
            found.sort(key=lambda peer: (peer not in self.initial_peers, peer not in self.helpers, peer))
            self.helpers = {peer: self.helpers.get(peer, 0.0) for peer in found[:MAX_HELPERS]}

    def can_call(self, peer: bytes) -> bool:
        """Return whether a peer accepts connections; this one may be asked for as well."""
        if peer == self.identity.peer:
            return self.accepts_connections
        record = self.tracker.others.get(peer)
        return not (record.client_mode if record else self.log is not None and peer in self.log.state.clients)

    def _call_peers(self) -> None:
        """Call each member with messages to send, unless its last answer is awaited. Clients get theirs in answers, so
        they also call some peers for which they have no messages."""
        members = self._list_members()
        for peer in self._outbox.keys() - members:
            del self._outbox[peer]
        free = {peer for peer in members - self._called if self.can_call(peer)}
        callees = {peer for peer in free if self._outbox.get(peer)}
        if not self.accepts_connections and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + (POLL_INTERVAL if self.log.own or self.log.fetching else IDLE_INTERVAL)
            peers = [*free & self._list_participants()]
            callees.update(random.sample(peers, min(GOSSIPED_PEERS, len(peers))))
        for peer in callees:
            self._called.add(peer)
            self._when_done(self.exchange.send(PeerID(peer), pack(self._make_envelope(peer))), self._take_answer, peer)

    def _make_envelope(self, peer: bytes) -> Envelope:
        """Return as many messages to a peer as one call may have."""
        messages = []
        queue = self._outbox.get(peer, ())
        while queue and (not messages or sum(map(len, (*messages, queue[0]))) < MAX_MESSAGE_BYTES - 1000):
            messages.append(queue.popleft())
        mbits = (self.dht.uplink.mbits or 0.0) if self.accepts_connections else 0.0
        return Envelope(self.log_id, self.epoch, mbits, messages=tuple(messages))

    def _take_answer(self, answer: bytes | BaseException, peer: bytes) -> None:
        self._called.discard(peer)
        if isinstance(answer, bytes):
            with contextlib.suppress(ValueError):
                self._read(peer, unpack(Envelope, answer))

    def _take_blob(self, error: BaseException | None, offer: Offer) -> None:
        """Continue after the blob of an offer has arrived, or not."""
        if isinstance(error, InvalidBlobError):  # the hashes are the owner's, so no other peer has made it
            self.tracker.ban({PeerID(offer.peer): "has sent an invalid update"})
        elif error is not None:
            logger.info(f"no update of peer {PeerID(offer.peer)}: {error!r:.200}")
            if self.log is not None and not isinstance(error, SwarmError):  # a full disk waits for the next commit
                self.log.fetching.pop(offer.blob, None)
        elif self.log is not None:
            self._perform(self.log.receive(self._now(), self.identity.peer))

    def _read(self, peer: bytes, envelope: Envelope) -> None:
        if peer in self.helpers:
            self.helpers[peer] = envelope.mbits if peer in self.initial_peers else 0.0
            if envelope.request and self.log is not None:  # it cannot call this peer
                self.exchange.send(PeerID(peer), self._answer_request(envelope.request))
        if self.log is None and envelope.state and peer in self.tracker.trust.select_known(self.tracker.others):
            self.offered[peer] = envelope.log, unpack(State, envelope.state)
        if envelope.log and (peer in self.tracker.others or self.log and peer in self.log.state.voters):
            self._seen.pop(peer, None)  # the newest ones are the last ones
            self._seen[peer] = envelope.log, envelope.epoch, time.monotonic()
        if self.log is not None and envelope.log == self.log_id:
            self._perform(self.log.receive(self._now(), peer, *envelope.messages))

    def _answer(self, sender: PeerID, message: bytes) -> bytes:
        """Answer a call; runs in a thread of the exchange."""
        envelope = unpack(Envelope, message)
        peer = sender.to_bytes()
        with self._lock:
            if envelope.request:
                return self._answer_request(envelope.request)
            self._read(peer, envelope)
            if self.log is None and envelope.log and not envelope.state:
                return pack(Envelope(b"", self.epoch, request=NEWEST))
            return pack(self._make_envelope(peer))

    def _answer_request(self, head: bytes) -> bytes:
        """Return the answer to a peer that wants the log's state after a commit."""
        entry = self.log and self.log.list_path().get(self.log.state.head if head == NEWEST else head)
        return pack(Envelope(self.log_id, self.epoch, state=pack(entry.state) if entry else b""))

    def _fetch(self, offer: Offer, voters: Sequence[bytes]) -> None:
        """Fetch the blob of an offer, first from these peers, or else from voters that have made offers lately."""
        recent = self.log.list_entries(self.log.state.epoch - 2)
        offers = (*self.log.select(Offer), *(it for entry in recent for it in entry.commit.offers))
        offers = [offer, *(it for it in offers if it.peer in self.log.state.voters)]
        holders = {PeerID(peer): mbits for peer, mbits in self.helpers.items()}
        holders |= {PeerID(it.peer): it.mbits if it.accepts_connections else None for it in offers}
        if self.accepts_connections:
            holders[self.dht.peer_id] = self.dht.uplink.mbits or 0.0
        seconds = EXCHANGE_SHARE * self.dht.uplink.timeouts.epoch_seconds
        options = offer.num_bytes, self.store, seconds, map(PeerID, voters)
        self._when_done(self.exchange.fetch(offer.blob, PeerID(offer.peer), holders, *options), self._take_blob, offer)

    def _compute_timeout(self, state: State) -> float:
        """Return the log's timeout, which follows from the bytes of a commit's updates."""
        num_bytes = self.update_bytes * min(len(state.participants), MAX_OFFERS)
        return self.dht.uplink.timeouts.response + self.dht.uplink.compute_transfer_timeout(num_bytes) / 3
