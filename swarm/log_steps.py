"""The epochs of local steps that end with a commit of the replicated log, as the training loop sees them.

A log begins after a round of gradients in which all peers of a group have stepped together (*genesis*). Its members are
the first voters. Their states differ in the last bits, so all of them load the state of one member, unless it is far
from their own. From then on each peer makes an *offer* at the end of its epoch, and applies *commits*. An offer takes
its update out of the local model. The update comes back with the commit, or through the residual if no commit has it. A
peer without the log, or with a lost state, loads a state and joins.
"""

import contextlib
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from swarm.aggregation import Contribution, Numbers, compute_digest, encode, restore
from swarm.epoch import EpochState
from swarm.exchange import BlobStore
from swarm.guard import MAX_PARAM_DEVIATION
from swarm.log import Genesis
from swarm.log_records import Commit, Offer
from swarm.log_rounds import NEWEST, LogRounds
from swarm.optimizer_state import list_params
from swarm.processes import STOP_REQUESTED
from swarm.sparse import TopKCompression

logger = logging.getLogger("swarm")

JOIN_INTERVAL = 3.0  # seconds between two searches for the others' log
GENESIS_PAUSE = 0.3  # seconds until a member that has no log yet is asked again
MIN_GENESIS_TIMEOUT = 60.0  # seconds for the state of a member, until that of the next one is loaded
SEARCH_TIMEOUT = 30.0  # seconds in which the commit of a downloaded state should become known
EXCHANGE_SHARE = 1 / 4  # of an epoch, in which the updates should arrive: the more time, the less slow uplinks send
MAX_EPOCHS_BEHIND = 8  # commits that wait for their updates, until the state is downloaded instead
MAX_SHOWN = 12  # of an owner's last updates, of which the share that counted is shown
STUCK_TIMEOUT = 60.0  # seconds without an update that a commit needs, until the state is downloaded instead
SILENCE_TIMEOUT, SILENT_EPOCHS = 600.0, 5  # without a commit, until the peers that are there begin a new log


class StoredBlob(Sequence):
    """The blocks of an update, read when they are needed."""

    def __init__(self, store: BlobStore, blob: bytes):
        self.store, self.names = store, store.list_hashes(blob)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> bytes:
        return self.store.get(self.names[index])


class LogSteps:
    """The offers and the commits of one peer.

    :param optimizer: the collaborative optimizer, of whose epochs these are a part
    """

    def __init__(self, optimizer, codec: TopKCompression, folder: Path | None):
        self.optimizer, self.codec = optimizer, codec
        self.averager, self.tracker = optimizer.state_averager, optimizer.tracker
        dht, numbers = self.tracker.dht, Numbers(list_params(optimizer.opt))
        options = dict(accepts_connections=not dht.client_mode, is_auxiliary=optimizer.is_auxiliary)
        self.rounds = LogRounds(dht, self.tracker, numbers, codec, folder, **options)
        #: of this peer, neither applied nor returned, by base; another peer may offer the same blob
        self.offers: dict[bytes, Offer] = {}
        #: whether this peer takes part in a log, or other peers do
        self.exists = False
        #: the log that has ended for this peer, but perhaps not yet for others
        self._ended = b""
        self._next_join, self._stuck_since = 0.0, None
        #: whether each of an owner's last updates had any weight, by owner
        self.counted: dict[bytes, deque[bool]] = {}

    # --- the state

    @property
    def is_open(self) -> bool:
        """Whether this peer takes part in a log."""
        return self.rounds.log is not None

    @property
    def head(self) -> bytes:
        """The commit that the model has; NEWEST if it is not that of a log."""
        lineage = self.averager.lineage  # of a group, it is shorter
        return bytes.fromhex(lineage) if len(lineage) == 2 * len(NEWEST) else NEWEST

    def list_counted(self) -> dict[bytes, float]:
        """Return the share of their last updates that counted, of the owners in the last commits, by public key."""
        owners, keys = self.rounds.log.head.participants if self.is_open else (), self.rounds.identity.public_keys
        self.counted = {peer: counted for peer, counted in self.counted.items() if peer in owners}
        return {keys[peer]: sum(it) / len(it) for peer, it in self.counted.items() if peer in keys}

    @property
    def pending_samples(self) -> int:
        """The samples of this peer that are in offers."""
        return sum(offer.samples for offer in self.offers.values())

    def _list_numbers(self) -> tuple[Numbers, Numbers]:
        opt = self.optimizer.opt
        return Numbers(list_params(opt)), Numbers(opt.list_momenta())

    def _open(self, log_id: bytes, state, applied: bytes, is_new: bool = False) -> None:
        self.rounds.epoch, self._stuck_since, self.exists = self.optimizer.local_epoch, None, True
        self.tracker.trust.owners = {*state.owners[-1]}
        self.rounds.open(log_id, state, applied, is_new)

    # --- the beginning

    def begin(self, group_id: bytes, members: Sequence[bytes]) -> None:
        """Begin a log after a round of gradients with these members, this peer included."""
        epoch, me = self.optimizer.local_epoch, self.tracker.dht.peer_id.to_bytes()
        clients = {peer for peer, record in self.tracker.others.items() if record.client_mode}
        if not self.rounds.accepts_connections:
            clients.add(me)
        leaders = sorted(members, key=lambda peer: (peer in clients, hashlib.sha256(group_id + peer).digest()))
        place = leaders.index(me)
        # each member serves two others, because the first one alone would have to send all copies
        donors = [leaders[(place - 1) // 2], *leaders[:place]] if place else []
        level = (place + 1).bit_length() - 1
        if not any(self._load_genesis(donor, epoch, members, level) or self.exists for donor in donors):
            for momentum in self.optimizer.opt.list_momenta():
                momentum.zero_()
            state = Genesis(self.tracker.prefix, epoch, compute_digest(*self._list_numbers()), members).make_state()
            self.averager.lineage = state.head.hex()
            self._open(state.head, state, state.head, is_new=True)
        if self.is_open:
            logger.info(f"epoch {epoch}: local steps begin, with {len(members)} peers")

    def _load_genesis(self, donor: bytes, epoch: int, members: Sequence[bytes], level: int) -> bool:
        """Load the state of a member, and begin the log with it; return whether that succeeded.

        :param level: how many downloads, one after the other, bring the first member's state to this one
        """
        uplink, record = self.tracker.dht.uplink, self.tracker.others.get(donor)
        num_bytes = 2 * 4 * Numbers(list_params(self.optimizer.opt)).total  # the momentum is zero
        timeout = max(MIN_GENESIS_TIMEOUT, uplink.compute_transfer_timeout(num_bytes))
        deadline = time.monotonic() + 2 * uplink.timeouts.matchmaking + (level - 1) * timeout
        while time.monotonic() < deadline and not STOP_REQUESTED.is_set():
            peers = list(self.rounds.helpers) if record and record.client_mode else [donor]
            found = self.rounds.find(peers, NEWEST)
            state = found[1] if found else None
            if state is None or state.epoch < epoch:
                time.sleep(GENESIS_PAUSE)
                continue
            if (state.epoch, state.voters) != (epoch, tuple(sorted(members))):
                self.exists = True  # it has gone on, so this peer joins
                return False
            loaded = self.optimizer.sync.download(epoch, [donor], timeout=timeout)
            if loaded is None or loaded[0]["lineage"] != state.head.hex():
                continue
            if not self._is_near(loaded[1]):
                logger.warning("the state of the first member is far from this peer's")
                return False
            self.averager.apply_downloaded_state(*loaded)
            genesis = Genesis(self.tracker.prefix, epoch, compute_digest(*self._list_numbers()), members)
            if genesis.make_state() != state:
                return False
            self._open(state.head, state, state.head, is_new=True)
            return True
        return False

    def _is_near(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these parameters are this peer's, apart from rounding."""
        own = list_params(self.optimizer.opt)
        distance = sum((a - b).double().square().sum() for a, b in zip(own, tensors, strict=False)) ** 0.5
        norm = sum(param.detach().double().square().sum() for param in own) ** 0.5
        return bool(distance <= MAX_PARAM_DEVIATION * norm + 1e-3 * Numbers(own).total ** 0.5)

    def join(self) -> bool:
        """Look for the others' log from time to time, and join it; return whether there is one."""
        if self.optimizer.is_auxiliary and self.rounds.offered:
            self._open(*self.rounds.offered, NEWEST)
            self.rounds.offered = None
            return True
        if time.monotonic() < self._next_join:
            return self.exists
        self._next_join = time.monotonic() + JOIN_INTERVAL
        present = self.tracker.present
        peers = self.tracker.list_donors() or [peer for peer, record in present.items() if not record.client_mode]
        peers = peers or list(self.rounds.helpers)  # a run of clients
        found = self.rounds.find(peers, NEWEST if self._ended else self.head) if peers else None
        if found and found[0] == self._ended and (found[1] is None or found[1].head == self.head):
            found = None  # it has no commit since this peer has left it
        self.exists = found is not None
        if found is None:
            if self.optimizer.grad_averager.is_local:  # back to rounds in which all step together
                self.optimizer.begin_epoch()
            return False
        (log_id, state), self._ended = found, b""
        if self.optimizer.is_auxiliary:  # it has no model
            if state is not None:
                self._open(log_id, state, NEWEST)
        elif state is not None and state.head == self.head:
            self._open(log_id, state, state.head)
            self.optimizer.begin_epoch()
            logger.info(f"epoch {state.epoch}: joined the log of {len(state.voters)} voters")
        elif self.optimizer.load_state_from_peers():
            self._next_join = 0.0
        return True

    # --- an epoch

    def follow(self) -> None:
        """Do what the log has asked for since the last call."""
        for kind, content in self.rounds.take_events():
            if kind == "apply" and not self.optimizer.is_auxiliary and content.parent == self.head:
                self._apply(content)
            elif kind == "return":
                self._take_back(content)
            elif kind == "fork" and not self.optimizer.is_auxiliary:
                logger.info("the log has forked: loading the state of the longer branch")
                self._load_later_state()
            elif kind == "switch":
                logger.info("most peers have another log: joining them")
                self._close()
                return
        if self.is_open and not self.optimizer.is_auxiliary:
            self._check_progress()

    def _check_progress(self) -> None:
        """Load the state if this peer is too far behind, and leave the log if it has ended."""
        longest = max(SILENCE_TIMEOUT, SILENT_EPOCHS * self.tracker.dht.uplink.timeouts.epoch_seconds)
        is_behind = self.rounds.epoch < self.rounds.log.head.epoch
        self._stuck_since = (self._stuck_since or time.monotonic()) if is_behind else None
        is_stuck = is_behind and time.monotonic() > self._stuck_since + STUCK_TIMEOUT
        if is_stuck or self.rounds.log.head.epoch > self.rounds.epoch + MAX_EPOCHS_BEHIND:
            logger.info(f"updates of epoch {self.rounds.epoch} are missing: loading the swarm's state")
            self._load_later_state()
        elif self.rounds.count_seconds_without_commit() > longest:
            logger.warning(f"no commit for {longest:.0f} s: the peers that are there begin a new log")
            self._ended = self.rounds.log_id
            self._close()

    def _close(self) -> None:
        """Leave the log; updates that no commit contains stay pending."""
        for offer in self.rounds.close():
            self._take_back(offer)
        self.offers.clear()
        self.tracker.trust.owners = set()
        self._next_join = 0.0

    def _load_later_state(self) -> None:
        """Load a state of this log."""
        self._stuck_since = None
        if not self.optimizer.load_state_from_peers():
            return
        deadline = time.monotonic() + SEARCH_TIMEOUT
        while not self.rounds.knows(self.head):
            if time.monotonic() > deadline or STOP_REQUESTED.is_set():
                self._close()
                return
            time.sleep(0.1)
        self.rounds.epoch = self.optimizer.local_epoch
        self.rounds.mark_applied(self.head)

    def _take_back(self, offer: Offer) -> None:
        """Add an update that no commit contains to the residual."""
        self.offers.pop(offer.base, None)
        grad_averager = self.optimizer.grad_averager
        with contextlib.suppress(KeyError):  # the disk has lost it
            restore(self.rounds.store.read(offer.blob), Numbers(grad_averager.unsent))
            grad_averager.samples += offer.samples

    def offer(self) -> None:
        """Offer the pending update if the epoch is over. The loop continues with local steps until the commit comes."""
        head, grad_averager = self.head, self.optimizer.grad_averager
        if head in self.offers or not grad_averager.samples:
            return
        if self.tracker.ready_to_update_epoch or self.rounds.is_epoch_over(head):
            with self._count_seconds(), self.tracker.performance_ema.pause():
                self._make_offer(head)

    def _make_offer(self, head: bytes) -> None:
        optimizer, grad_averager = self.optimizer, self.optimizer.grad_averager
        update = optimizer.local.measure()
        try:
            blocks = encode(Numbers(update), Numbers(grad_averager.unsent), self.codec)
        except ValueError as e:
            logger.warning(f"dropped the samples of this epoch, because an update is invalid: {e}")
            grad_averager.drop_pending()
            return
        optimizer.local.record_averaged(update)
        samples, grad_averager.samples = grad_averager.samples, 0
        self.rounds.exchange_seconds = EXCHANGE_SHARE * self.tracker.dht.uplink.timeouts.epoch_seconds
        digest = compute_digest(*self._list_numbers())
        try:
            self.offers[head] = self.rounds.add_offer(head, digest, samples, blocks)
        except OSError as e:
            logger.warning(f"cannot store an update ({e.strerror}): free some space for `output_dir`")
            restore(blocks, Numbers(grad_averager.unsent))
            grad_averager.samples += samples

    @contextlib.contextmanager
    def _count_seconds(self) -> Iterator[None]:
        """Count the time of this context, in which the loop computes nothing."""
        started = time.monotonic()
        yield
        self.optimizer.stats.averaging_seconds += time.monotonic() - started

    def _apply(self, commit: Commit) -> None:
        """Make the outer step of a commit."""
        optimizer, averager = self.optimizer, self.averager
        is_stored = self._is_stored(commit)
        if not is_stored or self._differs_from_most(commit):
            reason = "this peer's state differs from most others" if is_stored else "its updates are no longer on disk"
            logger.warning(f"cannot apply the commit of epoch {commit.epoch} ({reason}): loading the swarm's state")
            self._load_later_state()
            return
        me, owners = self.tracker.dht.peer_id.to_bytes(), {it.peer for it in commit.offers}
        self.tracker.trust.owners = {*owners, *self.rounds.find_state(commit.parent).owners[-1]}
        counted = [it.base for it in commit.offers if it.peer == me and it.base in self.offers]
        samples = sum(self.offers.pop(base).samples for base in counted)
        with self._count_seconds(), self._outer_step(commit), self.tracker.pause_updates():
            optimizer.epoch.enter(EpochState.AVERAGING)
            optimizer.epoch.enter(EpochState.STEPPING)
            averager.step(increment_epoch=True, optimizer_step=True)
            self.tracker.update_epoch(optimizer.local_epoch)
        self.rounds.epoch = optimizer.local_epoch
        optimizer.stats.record_step(samples, group_size=len(owners))
        optimizer.stats.last_group = frozenset(owners - {me})
        optimizer.begin_epoch()
        self.tracker.record_round(owners - {me}, None)

    def _is_stored(self, commit: Commit) -> bool:
        """Return whether all updates of a commit are on disk, undamaged: an outer step must not end in the middle."""
        with contextlib.suppress(KeyError):
            for offer in commit.offers:
                self.rounds.store.read(offer.blob)
            return True
        return False

    def _differs_from_most(self, commit: Commit) -> bool:
        """Return whether more than half of a commit's offers name another state than the offer of this peer."""
        own = self.offers.get(commit.parent)
        digests = Counter(it.digest for it in commit.offers if it.base == commit.parent)
        if not own or not digests:
            return False
        digest, count = digests.most_common(1)[0]
        return digest != own.digest and 2 * count > digests.total()

    @contextlib.contextmanager
    def _outer_step(self, commit: Commit) -> Iterator[None]:
        """Let the outer optimizer's next step apply a commit."""
        outer, store, voters = self.optimizer.opt, self.rounds.store, self.rounds.find_state(commit.parent).voters
        outer.contributions = [
            Contribution(it.peer, it.samples, it.base != commit.parent, StoredBlob(store, it.blob), it.peer in voters)
            for it in commit.offers
        ]
        self.averager.next_lineage = commit.hash.hex()
        try:
            yield
            for it, weight in zip(commit.offers, outer.weights, strict=True):
                self.counted.setdefault(it.peer, deque(maxlen=MAX_SHOWN)).append(weight > 0)
        finally:
            outer.contributions = self.averager.next_lineage = None
