"""Rounds of local steps over the replicated log: a thread that keeps a peer's log, and carries its messages and blobs.

The training loop makes offers and applies commits, see `CollaborativeOptimizer`. In between it does not wait for this
thread. `swarm/log.py` decides, `swarm/exchange.py` transports, and this module is the link between them:

- Peers that accept connections are called when the log has a message for them. A client, which cannot be called, calls
  others regularly, and their messages are in the answers.
- Auxiliary peers are in the DHT's list of donors. They hold all blobs, and relay between clients.
- Each message names its sender's log by the hash of its first commit. Two swarms that meet have two logs. The one with
  more peers stays, or of two equal ones that with the smaller hash.
- A peer without the log asks known contributors for the log's state after its own model's commit. It accepts the answer
  of more than half of those that reply.
"""

import concurrent.futures
import contextlib
import logging
import random
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import hivemind
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from common.files import write_file
from swarm.aggregation import BLOCK, Numbers, check_block
from swarm.exchange import MAX_MESSAGE_BYTES, BlobStore, Exchange, InvalidBlobError
from swarm.log import Action, Log, State
from swarm.log_records import Number, Offer, Status, decode, pack, unpack
from swarm.processes import STOP_REQUESTED
from swarm.progress import PeerTracker
from swarm.sparse import TopKCompression
from swarm.state_server import RELAY, parse_epochs
from utils import RecordValidator, find_peer_id

logger = logging.getLogger("swarm")

TICK = 0.5  # seconds between two looks of the log at the clock
POLL_INTERVAL, IDLE_POLL_INTERVAL = 0.5, 2.0  # seconds between two calls of a client, with an open offer and without
POLLED_PEERS = 3
MAX_QUEUE = 64  # messages to a peer that are kept until it can be called; a status repeats whatever is lost
MAX_GUESTS = 16  # peers that get all messages, although they are not known to have worked
MAX_ASKED = 16  # peers that a joining peer asks for their log
MAX_HELPERS = 4  # auxiliary peers that get all messages
HELPERS_INTERVAL = 10.0  # seconds between two looks for them
RECENT = 30.0  # seconds for which the last message of a peer tells which log it has
MIN_STORE_BYTES = 2**26
MAX_KEYS = 4096
NEWEST = bytes(32)  # asks for the state after the newest commit
# seconds at the end in which a peer serves its blobs to others that lack them; after a stop request
LINGER, STOP_LINGER = 10.0, 2.0


@dataclass(frozen=True)
class Envelope:
    """A call between two peers, or its answer."""

    log: Annotated[bytes, 0, 32]  # the first commit of the sender's log; empty without a log
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
        self.sign, self.find_key = key.sign, self.public_keys.get

    def verify(self, peer: bytes, data: bytes, signature: bytes) -> bool:
        """Return whether a signature is that of a peer with a known key."""
        return RSAPublicKey.from_bytes(self.public_keys[peer][len(b"[owner:") : -1]).verify(data, signature)

    def add_key(self, peer: bytes, key: bytes) -> None:
        """Keep a public key if the peer is its owner; beyond MAX_KEYS, instead of the oldest one. The log requests that
        again if it needs it, so new keys cannot keep out others."""
        with contextlib.suppress(ValueError):
            if peer != self.peer and find_peer_id(key) == peer:
                self.public_keys[peer] = key
                if len(self.public_keys) > MAX_KEYS:
                    del self.public_keys[next(it for it in self.public_keys if it != self.peer)]


class LogRounds:
    """A peer's log with its thread, its blobs and the peers that it talks to. All public methods are thread-safe.

    :param numbers: the swarm's parameters, for the sizes of blocks
    :param folder: a folder for the blobs and this peer's votes; default: a temporary one, for a key that is not kept
    :param accepts_connections: whether other peers can call this one
    """

    def __init__(
        self,
        dht: hivemind.DHT,
        tracker: PeerTracker,
        numbers: Numbers,
        codec: TopKCompression,
        folder: Path | None,
        accepts_connections: bool,
        is_auxiliary: bool,
    ):
        self.dht, self.tracker, self.accepts_connections = dht, tracker, accepts_connections
        self.is_auxiliary = is_auxiliary
        self.identity = Identity(RSAPrivateKey.process_wide())
        self.log: Log | None = None
        self.log_id = b""
        #: the epoch of this peer's model; the seconds that the exchange of all blobs may take. Set by the optimizer
        self.epoch, self.exchange_seconds = 0, 0.0
        self._events: deque[tuple[str, object]] = deque()
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="log-")
        folder = folder or Path(self._temporary.name)
        self._memory_file = folder / "votes"
        self.store = BlobStore(folder / "blobs", max(MIN_STORE_BYTES, 4 * numbers.total))
        self._lock, self._wake, self._is_ending = threading.RLock(), threading.Event(), threading.Event()
        self._outbox: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=MAX_QUEUE))
        self._called: set[bytes] = set()  # peers whose answer is awaited
        self._answers: deque[tuple] = deque()  # of peers and of fetched blobs, for the thread
        #: the Mbit/s of auxiliary peers; the running search for them, and the time of the next one
        self.helpers: dict[bytes, float] = {}
        self._search, self._next_search = None, 0.0
        #: the log of a client, for an auxiliary peer that has none
        self.offered: tuple[bytes, State] | None = None
        self._seen: dict[bytes, tuple[bytes, int, float]] = {}  # the log and the epoch of each member, and when
        self._next_poll = 0.0
        self.exchange = Exchange(
            dht,
            tracker.prefix,
            self.store,
            numbers.num_blocks,
            max_block_bytes=int(1.5 * codec.estimate_bytes(BLOCK)),
            check_block=lambda data, index: check_block(data, numbers.count(index), codec),
            on_message=self._answer,
        )
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    # --- for the training loop

    def open(self, log_id: bytes, state: State, applied: bytes, is_new: bool) -> None:
        """Start to take part in a log after the commit of this state.

        :param applied: the commit that the model has, or other bytes if it has none of this log
        :param is_new: whether the log begins now, so that this peer has no vote in it
        """
        if is_new:
            write_file(self._memory_file, log_id)
        saved = self._memory_file.read_bytes() if self._memory_file.exists() else b""
        memory = saved.removeprefix(log_id) if saved.startswith(log_id) else None
        with self._lock:
            self.log_id, self._seen = log_id, {}
            self.log = Log(
                state, self.identity, self._compute_timeout(), self.store.has, get_dht_time(), memory, applied=applied
            )
        self._wake.set()

    def close(self) -> list[Offer]:
        """Leave the log, and return this peer's offers that no commit contains."""
        with self._lock:
            offers = list(self.log.own.values()) + [it for kind, it in self._events if kind == "return"]
            self.log, self.log_id = None, b""
            self._events.clear()
            self._outbox.clear()
        return offers

    def take_events(self) -> list[tuple[str, object]]:
        """Return what the training loop has to do: `apply` a commit, `return` an offer to the residual, load another
        state after a `fork`, or `switch` to the log of the others."""
        with self._lock:
            events, self._events = list(self._events), deque()
        return events

    def is_epoch_over(self, head: bytes) -> bool:
        """Return whether more than half of the voters have offers for the commit after this one."""
        with self._lock:
            return self.log.head.head == head and self.log.head.has_quorum(self.log.select_current())

    def find_state(self, head: bytes) -> State:
        """Return the log's state after a commit."""
        with self._lock:
            return self.log.chain[head].state

    def add_offer(self, base: bytes, digest: bytes, samples: int, blocks: list[bytes]) -> Offer:
        """Store and publish an update of this peer."""
        blob, num_bytes = self.store.add(blocks), sum(map(len, blocks))
        mbits = self.dht.uplink.mbits or 0.0
        with self._lock:
            self.log.timeout = self._compute_timeout(num_bytes)
            fields = base, digest, self.log.me, samples, blob, num_bytes, self.accepts_connections, mbits
            offer = self.log.sign(Offer, *fields)
            self._perform(self.log.add_offer(get_dht_time(), offer))
        return offer

    def knows(self, head: bytes) -> bool:
        """Return whether a commit is in the chain."""
        with self._lock:
            return head in self.log.list_path()

    def mark_applied(self, head: bytes) -> None:
        """Continue after this commit's state was downloaded."""
        with self._lock:
            self._perform(self.log.mark_applied(get_dht_time(), head))

    def count_seconds_without_commit(self) -> float:
        """Return the seconds since the last commit."""
        with self._lock:
            return get_dht_time() - self.log.since

    def find(self, peers: Sequence[bytes], head: bytes) -> tuple[bytes, State | None] | None:
        """Ask peers for their log.

        :param head: the commit after which the state is wanted, or NEWEST
        :returns: the log's id, and its state if more than half of its peers that answer agree; None if fewer than half
            of the answers name one log, because one peer alone could claim to have a log
        """
        question = pack(Envelope(b"", self.epoch, request=head))
        asked = random.sample(peers, min(len(peers), MAX_ASKED))
        calls = [self.exchange.send(PeerID(peer), question) for peer in asked]
        answers: list[Envelope] = []
        with contextlib.suppress(concurrent.futures.TimeoutError):
            for call in concurrent.futures.as_completed(calls, self.dht.uplink.timeouts.request + 1.0):
                if not call.cancelled() and not call.exception():
                    with contextlib.suppress(ValueError):
                        answers.append(unpack(Envelope, call.result()))
                kinds = Counter((answer.log, answer.state) for answer in answers)
                if 2 * max(kinds.values(), default=0) > len(asked):
                    break  # the others cannot change it, and a dead peer would take the whole time
        logs = Counter(answer.log for answer in answers if answer.log)
        log_id = min(logs, key=lambda it: (-logs[it], it), default=b"")
        if not log_id or 2 * logs[log_id] < len(answers):
            return None
        states = Counter(answer.state for answer in answers if answer.log == log_id)
        state, votes = states.most_common(1)[0]
        with contextlib.suppress(ValueError):
            if state and 2 * votes > logs[log_id]:
                return log_id, unpack(State, state)
        return log_id, None

    def leave(self) -> None:
        """Tell the others, once, that this peer leaves, and serve the updates that they lack for the last commit."""
        if self.log is None or self.log.is_leaving:
            return
        with self._lock:
            self._perform(self.log.leave(get_dht_time()))
        started = time.monotonic()
        while time.monotonic() < started + (STOP_LINGER if STOP_REQUESTED.is_set() else LINGER):
            if self._is_served():
                return
            time.sleep(TICK / 5)

    def _is_served(self) -> bool:
        with self._lock:
            members, oldest = self._list_members(), time.monotonic() - RECENT
            epochs = [epoch for peer, (log, epoch, at) in self._seen.items() if at > oldest and peer in members]
            is_sent = not any(self._outbox[peer] for peer in members if self._can_call(peer))
            return is_sent and not self._called and all(epoch >= self.epoch for epoch in epochs)

    def shutdown(self) -> None:
        """Stop the threads."""
        self._is_ending.set()
        self._wake.set()
        self._thread.join()
        self.exchange.shutdown()
        shutil.rmtree(self.store.folder, ignore_errors=True)
        if self._temporary:
            self._temporary.cleanup()

    # --- the thread

    def _run(self) -> None:
        next_tick = 0.0
        while not self._is_ending.is_set():
            self._wake.wait(TICK)
            self._wake.clear()
            with self._lock:
                while self._answers:
                    self._take(*self._answers.popleft())
                self._find_helpers()
                if self.log is None:
                    continue
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    members = self._list_members()
                    self.exchange.participants = frozenset(map(PeerID, members))
                    self._perform(self.log.tick(get_dht_time()))
                    self._compare_logs()
                self._poll()
                self._send()

    def _perform(self, actions: list[Action]) -> None:
        """Do what the log says. Its messages to a peer that has just called are in the answer."""
        is_saved = True
        for kind, content, peers in actions:
            if kind == "send" and is_saved:  # a vote that is not on disk must not be sent
                for peer in peers or self._list_members():
                    self._outbox[peer].append(content)
            elif kind == "save":
                is_saved = write_file(self._memory_file, self.log_id + content)
            elif kind == "fetch":
                self._fetch(content)
            elif kind in ("apply", "return", "fork"):
                self._events.append((kind, content))
        self._wake.set()

    def _list_members(self) -> set[bytes]:
        """Return the ids of the other peers that get all messages: those that are known to have worked, and the last
        ones of the others that have called, because a record with a new key costs nothing."""
        present, is_known = self.tracker.present, self.tracker.trust.is_known
        guests = [peer for peer in self._seen if peer in present and not is_known(peer)][-MAX_GUESTS:]
        members = {*filter(is_known, present), *guests, *self.helpers, *self.log.head.participants}
        return members - {self.identity.peer, *self.tracker.trust.banned_until}

    def _find_helpers(self) -> None:
        """Look for auxiliary peers from time to time. They declare a state of infinite epoch."""
        if self._search is not None and self._search.done():
            done, self._search = self._search, None
            entry = None if done.cancelled() or done.exception() else done.result()
            found = sorted(peer for peer, epoch in parse_epochs(entry, self.identity.peer).items() if epoch == RELAY)
            self.helpers = {peer: self.helpers.get(peer, 0.0) for peer in found[:MAX_HELPERS]}
        elif self._search is None and time.monotonic() >= self._next_search:
            self._next_search = time.monotonic() + HELPERS_INTERVAL
            key = f"{self.tracker.prefix}_state_averager.all_averagers"
            self._search = self.dht.get(key, latest=True, return_future=True)

    def _can_call(self, peer: bytes) -> bool:
        record = self.tracker.others.get(peer)
        return not (record.client_mode if record else peer in self.log.head.clients)

    def _send(self) -> None:
        """Call each member for which there are messages, unless its last answer is awaited. Other peers have got theirs
        in the answer to a call."""
        members = self._list_members()
        for peer in self._outbox.keys() - members:
            del self._outbox[peer]
        for peer, queue in self._outbox.items():
            if queue and peer not in self._called and self._can_call(peer):
                self._call(peer)

    def _call(self, peer: bytes) -> None:
        self._called.add(peer)
        call = self.exchange.send(PeerID(peer), pack(self._make_envelope(peer)))
        call.add_done_callback(lambda done: (self._answers.append((peer, done)), self._wake.set()))

    def _poll(self) -> None:
        """Call some peers if others cannot call this one."""
        if self.accepts_connections or time.monotonic() < self._next_poll:
            return
        has_open_offer = bool(self.log.own) or bool(self.log.fetching)
        self._next_poll = time.monotonic() + (POLL_INTERVAL if has_open_offer else IDLE_POLL_INTERVAL)
        peers = [peer for peer in self._list_members() if self._can_call(peer) and peer not in self._called]
        for peer in random.sample(peers, min(POLLED_PEERS, len(peers))):
            self._call(peer)

    def _make_envelope(self, peer: bytes) -> Envelope:
        """Return as many messages to a peer as one call may have."""
        messages, queue, used = [], self._outbox[peer], 0
        while queue and (not messages or used + len(queue[0]) < MAX_MESSAGE_BYTES - 1000):
            used += len(queue[0])
            messages.append(queue.popleft())
        mbits = (self.dht.uplink.mbits or 0.0) if self.accepts_connections else 0.0
        return Envelope(self.log_id, self.epoch, mbits, messages=tuple(messages))

    def _take(self, peer: bytes, done: concurrent.futures.Future, offer: Offer | None = None) -> None:
        """Take the answer of a peer, or the end of the download of an offer's blob."""
        error = None if done.cancelled() else done.exception()
        if offer is not None:
            if isinstance(error, InvalidBlobError):  # the hashes are the owner's, so nobody else can have made it
                self.tracker.ban({PeerID(peer): "has sent an invalid update"})
            elif error is not None:
                logger.info(f"no update of peer {PeerID(peer)}: {error!r:.200}")
                if self.log is not None:  # it requests the blob again as long as it lacks it
                    self.log.fetching.pop(offer.blob, None)
            elif self.log is not None:
                self._perform(self.log.mark_complete(get_dht_time()))
            return
        self._called.discard(peer)
        if not done.cancelled() and error is None:
            with contextlib.suppress(ValueError):
                self._read(peer, unpack(Envelope, done.result()))

    def _read(self, peer: bytes, envelope: Envelope) -> None:
        """Take the messages of a peer."""
        if peer in self.helpers:
            self.helpers[peer] = envelope.mbits
            if envelope.request and self.log is not None:  # it cannot call this peer
                self.exchange.send(PeerID(peer), self._answer_request(envelope.request))
        if self.log is None and envelope.state:
            self.offered = envelope.log, unpack(State, envelope.state)
        if envelope.log and (peer in self.tracker.others or self.log and peer in self.log.head.voters):
            self._seen.pop(peer, None)  # the newest ones are the last ones
            self._seen[peer] = envelope.log, envelope.epoch, time.monotonic()
        if self.log is not None and envelope.log == self.log_id:
            for message in envelope.messages:
                self._perform(self.log.receive(get_dht_time(), peer, message))
                if self.is_auxiliary and not self._can_call(peer):
                    self._relay(peer, message)

    def _relay(self, sender: bytes, message: bytes) -> None:
        """Pass the records of a client on to the other clients, which it cannot call."""
        with contextlib.suppress(ValueError):
            if any(isinstance(record, Status) for record in decode(message)):
                return
            for peer in self._list_members() - {sender}:
                if not self._can_call(peer):
                    self._outbox[peer].append(message)

    def _answer(self, sender: PeerID, message: bytes) -> bytes:
        """Answer a call; runs in a thread of the exchange."""
        envelope, peer = unpack(Envelope, message), sender.to_bytes()
        with self._lock:
            if envelope.request:
                return self._answer_request(envelope.request)
            self._read(peer, envelope)
            if self.log is None and envelope.log and not envelope.state:
                return pack(Envelope(b"", self.epoch, request=NEWEST))
            return pack(self._make_envelope(peer))

    def _answer_request(self, head: bytes) -> bytes:
        """Return the answer to a peer that wants the log's state after a commit."""
        entry = None
        if self.log is not None:
            entry = self.log.list_path().get(self.log.head.head if head == NEWEST else head)
        return pack(Envelope(self.log_id, self.epoch, state=pack(entry.state) if entry else b""))

    def _fetch(self, offer: Offer) -> None:
        """Fetch the blob of an offer, with all peers that have made offers lately as possible sources."""
        offers = list(self.log.select(Offer))
        for entry in list(self.log.list_path().values())[-2:]:
            offers += entry.commit.offers if entry.commit else ()
        holders = {PeerID(peer): mbits for peer, mbits in self.helpers.items()}
        holders |= {PeerID(it.peer): it.mbits for it in (*offers, offer) if it.accepts_connections}
        if self.accepts_connections:
            holders[self.dht.peer_id] = self.dht.uplink.mbits or 0.0
        owner = PeerID(offer.peer)
        fetching = self.exchange.fetch(offer.blob, owner, holders, offer.num_bytes, self.exchange_seconds)
        fetching.add_done_callback(lambda done: (self._answers.append((offer.peer, done, offer)), self._wake.set()))

    def _compute_timeout(self, num_bytes: int = 0) -> float:
        """Return the log's timeout, where the update of each peer has this number of bytes."""
        uplink, peers = self.dht.uplink, len(self.tracker.present) + 1
        return uplink.timeouts.response + uplink.compute_transfer_timeout(peers * num_bytes) / 3

    def _compare_logs(self) -> None:
        """Tell the training loop if more peers have another log."""
        oldest, known = time.monotonic() - RECENT, self.tracker.trust.select_known(self.tracker.present)
        logs = Counter(log for peer, (log, _, at) in self._seen.items() if at > oldest and peer in known)
        logs[self.log_id] += 1
        best = min(logs, key=lambda it: (-logs[it], it))
        if best != self.log_id and ("switch", best) not in self._events:
            self._events.append(("switch", best))
