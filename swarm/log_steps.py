"""The epochs of local steps that end with a commit of the replicated log, as the training loop sees them.

A log begins after a round of gradients in which all peers of a group have stepped together (*genesis*). The members of
that group are the first voters. Their states differ in the last bits, so all of them load the anchor of one member. A
member whose parameters are far from that anchor does not take part. From then on, each peer makes an *offer* at the end
of its epoch, and applies *commits*. The update stays in the local model until the next commit, which contains it.
Otherwise, it comes back through the residual. A peer without the log, or with a lost state, loads a state and joins.
"""

import contextlib
import hashlib
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from common.signals import STOP_REQUESTED
from swarm import logger
from swarm.aggregation import BLOCK, Contribution, Numbers, aggregate, compute_digest, encode, find_opposed, restore
from swarm.epoch import EpochState
from swarm.guard import MAX_PARAM_DEVIATION
from swarm.local_steps import list_momenta
from swarm.log import State, make_genesis
from swarm.log_records import Commit, Leave, Offer
from swarm.log_rounds import NEWEST, TICK, LogRounds
from swarm.optimizer_state import list_params
from swarm.rounds import ANNOUNCE_INTERVAL
from swarm.sparse import TopKCompression
from swarm.uplink import SLOW_MBITS

JOIN_INTERVAL = 3.0  # seconds until the others are asked for their log again
ATTESTATION_INTERVAL = 60.0  # the same for their contributors
OFFER_PAUSE = 10.0  # seconds after an update that could not be stored, until the next one is encoded
GENESIS_PAUSE = 0.3  # seconds between two looks for the leader's log, and for the first anchor
MIN_LEADER_TIMEOUT = 20.0  # seconds until the leader has a log
MIN_GENESIS_TIMEOUT = 60.0  # seconds for the first anchor
MAX_EPOCHS_BEHIND = 8  # commits that wait for their updates, until the state is downloaded instead
MAX_SHOWN = 12  # of an owner's last updates, of which the share that counted is shown
MAX_PATIENCE = 16.0  # the factor of both limits if a peer lacks the next updates again and again
STUCK_TIMEOUT = 60.0  # seconds without an update that a commit needs, until the state is downloaded instead
SILENCE_TIMEOUT = 600.0  # seconds without a commit, until the peers that are there begin a new log
SILENT_EPOCHS = 5  # the same in usual epochs; the longer time counts
MAX_EXPECTED_EPOCH = 1800.0  # seconds, before a log has had an epoch


def is_near(own: Numbers, anchor: Iterable[bytes]) -> bool:
    """Return whether the blocks of another peer's anchor are these numbers apart from rounding errors."""
    squares = torch.zeros(2, dtype=torch.float64)
    for block, data in enumerate(anchor):
        numbers = own.read(block)
        difference = numbers - torch.frombuffer(bytearray(data), dtype=torch.float32)
        squares += torch.stack([difference.double().square().sum(), numbers.double().square().sum()])
    distance, norm = squares.sqrt().tolist()
    return distance <= MAX_PARAM_DEVIATION * norm + 1e-3 * own.total**0.5  # false for NaN


class LogSteps:
    """The offers and the commits of one peer, as a part of the epochs of its collaborative optimizer."""

    def __init__(self, optimizer, codec: TopKCompression, folder: Path):
        self.optimizer = optimizer
        self.codec = codec
        self.averager = optimizer.state_averager
        self.tracker = optimizer.tracker
        self.rounds = LogRounds(self.tracker, Numbers(list_params(optimizer.opt)), codec, folder)
        self._offered = b"", b""  # the base of the last offer, and the digest of the state there
        self._offered_old = 0  # the samples in it that have ended an epoch before
        self._passed = b"", 0  # the commit after which this peer had no turn, and its samples at the end of that epoch
        self.exists = False  # whether this peer takes part in a log, or other peers do
        self._ended = b"", b""  # the log that has ended for this peer, perhaps not yet for others, and its last commit
        self._leader = b""  # of the log that this peer has begun with others
        #: leaders whose first state has not arrived or led to no commit, and the last late one, with its leader
        self._silent: set[bytes] = set()
        self._late: tuple[State, bytes] | None = None
        self._next_join = self._next_offer = self._stuck_deadline = 0.0
        self._quorum_at = math.inf  # when most voters were last there
        self._step_ends: deque[float] = deque(maxlen=3)
        self._patience = 1.0  # a factor of the time until missing updates count as lost
        self.had_weight: dict[bytes, deque[bool]] = {}  # whether each of an owner's last updates had any weight

    # --- the state

    @property
    def is_open(self) -> bool:
        """Whether this peer takes part in a log."""
        return self.rounds.log is not None

    def count_pending(self) -> int:
        """Return the samples of this peer's offers that the model lacks, and that have not ended an epoch before."""
        old = self._offered_old if self._offered[0] == self.head else 0
        return max(0, self.rounds.count_pending() - old)

    @property
    def head(self) -> bytes:
        """The commit that the model has; NEWEST if it is not that of a log."""
        lineage = self.averager.lineage  # of a group, it is shorter
        return bytes.fromhex(lineage) if len(lineage) == 2 * len(NEWEST) else NEWEST

    def compute_counted_shares(self) -> dict[bytes, float]:
        """Return, by public key, which share of its last updates counted, for each owner in the last commits."""
        owners = self.rounds.log.state.participants if self.is_open else ()
        keys = self.rounds.identity.public_keys
        self.had_weight = {peer: it for peer, it in self.had_weight.items() if peer in owners}
        return {keys[peer]: sum(it) / len(it) for peer, it in self.had_weight.items() if peer in keys}

    # --- the beginning

    def begin(self, group_id: bytes, members: Sequence[bytes]) -> None:
        """Begin a log after a round with these peers, this one included; `join` takes a first state that comes late."""
        rounds = self.rounds
        silent = self._silent
        epoch = self.optimizer.local_epoch
        can_call = rounds.can_call
        anchor = Numbers(list_params(self.optimizer.opt))
        state = None
        leader = min(members, key=lambda it: (not can_call(it), it in silent, hashlib.sha256(group_id + it).digest()))

        def ask() -> State | None:
            _, state = rounds.find([leader] if can_call(leader) else list(rounds.helpers), NEWEST)
            return state if state and state.epoch >= epoch else None

        if leader == rounds.identity.peer:
            blocks = (anchor.read(block).numpy().tobytes() for block in range(anchor.num_blocks))
            try:
                state = make_genesis(self.tracker.prefix, epoch, rounds.anchors.add(blocks), members)
            except OSError as e:
                logger.warning(f"cannot store the log's first state ({e.strerror}): free some space for `output_dir`")
        else:
            state = self._wait(ask, max(MIN_LEADER_TIMEOUT, 2 * self.tracker.dht.uplink.timeouts.matchmaking))
        is_first = state and state == make_genesis(self.tracker.prefix, epoch, state.parent, members)
        if not is_first or not self._take_genesis(state, leader):  # the leader may have gone on
            silent.add(leader)

    def _take_genesis(self, state: State, leader: bytes) -> bool:
        """Open a log with the leader's anchor; return False if that does not arrive, or is far from this peer's."""
        rounds = self.rounds
        anchor = Numbers(list_params(self.optimizer.opt))
        rounds.expect(state.head)  # if it comes too late, this peer loads a later state, and votes as well
        # the leader sends it once, and those that can be called pass it on to all others
        relays = sum(map(rounds.can_call, state.voters)) - 1 if rounds.can_call(leader) else len(rounds.helpers)
        num_bytes = 4 * anchor.total * (1 + len(state.voters) // max(1, min(relays, anchor.num_blocks)))
        seconds = self.tracker.dht.uplink.compute_state_timeout(num_bytes)
        fetching = rounds.fetch_anchor(state.parent, leader, state.voters)
        start = time.monotonic()
        pause = 2 * max(MIN_GENESIS_TIMEOUT, 8e-6 * 4 * BLOCK * len(state.voters) / SLOW_MBITS)  # a block for each

        def is_over() -> bool:
            return fetching.done() or time.monotonic() > max(start, rounds.anchors.changed_at) + pause

        self._wait(is_over, max(MIN_GENESIS_TIMEOUT, seconds))
        self._late = None if rounds.anchors.has(state.parent) else (state, leader)
        if self._late:
            logger.warning("the first state of the log has not arrived")
            return False
        if not is_near(anchor, rounds.anchors.open(state.parent)):
            logger.warning("the first state of the log is far from this peer's")
            return False
        with self.averager.lock_optimizer:
            for block, data in enumerate(rounds.anchors.open(state.parent)):
                anchor.write(block, torch.frombuffer(bytearray(data), dtype=torch.float32))
            for momentum in list_momenta(self.optimizer.opt):
                momentum.zero_()
            self.averager.lineage = state.head.hex()
        self.optimizer.local.move_anchor(list_params(self.optimizer.opt))
        self.exists = True
        self._leader = leader
        rounds.open(state.head, state)
        logger.info(f"epoch {state.epoch}: local steps begin, with {len(state.voters)} peers")
        return True

    def join(self) -> bool:
        """Look for the others' log from time to time, and join it; return whether there is one."""
        if time.monotonic() >= self._next_join:
            self._next_join = time.monotonic() + JOIN_INTERVAL
            log_id, state = self._find_log()
            self.exists = bool(log_id)
            if log_id:
                self._join(log_id, state)
            elif self.optimizer.grad_averager.is_local:  # back to rounds in which all step together
                self.optimizer.begin_epoch()
        return self.exists

    def _find_log(self) -> tuple[bytes, State | None]:
        """Return the id of the others' log, if any, and its state after this peer's model if they agree on it."""
        peers = [*filter(self.rounds.can_call, self.tracker.list_contributors() or self.tracker.present)]
        if self.optimizer.is_auxiliary and (offered := self.rounds.take_offered()) and not peers:
            log_id, state, client = offered
            if not state.counted:  # the log begins, and clients get the anchor here
                self.rounds.fetch_anchor(state.parent, client, state.voters)
        else:  # in a run of clients, the auxiliary peers
            head = NEWEST if self._ended[0] or self.optimizer.is_auxiliary else self.head
            log_id, state = self.rounds.find(peers or [*self.rounds.helpers], head)
        # not a log that this peer has left, and that has no commit since
        if log_id and (log_id != self._ended[0] or state and state.head != self._ended[1]):
            return log_id, state
        self.tracker.ping_quiet_peers(peers)  # dead ones count against each log
        return b"", None

    def _join(self, log_id: bytes, state: State | None) -> None:
        """Take part in a log: by its first state, if that came late; by the state of this peer's model; or load one."""
        if log_id == self._ended[0]:
            self.optimizer.grad_averager.drop_pending()  # it may have counted updates since this peer has left it
            self.optimizer.parked = None
        self._ended = b"", b""
        if self._late and state == self._late[0] and state.epoch == self.optimizer.local_epoch:
            if self._take_genesis(*self._late):
                self.optimizer.begin_epoch()
        elif state is not None and (self.optimizer.is_auxiliary or state.head == self.head):  # without a model, any
            self.rounds.open(log_id, state)
            self._leader = b""
            self.optimizer.begin_epoch()
            logger.info(f"epoch {state.epoch}: joined the log of {len(state.voters)} voters")
        elif self.optimizer.load_state_from_peers(self.tracker.trust.find_swarm_epoch(self.tracker.present, 0)):
            self._next_join = 0.0  # the state may be older than this peer's checkpoint

    # --- an epoch

    def follow(self) -> None:
        """Do what the log has asked for since the last call."""
        self.tracker.trust.active = self.rounds.log.state.active if self.is_open else set()
        while self.is_open and self.rounds.log.returned:
            self._take_back(self.rounds.log.returned.popleft())
        if self.is_open and self.rounds.has_fewer_peers(self._ended[0]):
            logger.info("most peers have another log: joining them")
            self._close()
        elif self.is_open:
            has_model = not self.optimizer.is_auxiliary
            while has_model and (found := self.rounds.find_next(self.head)) and self._apply(*found):
                self._stuck_deadline = 0.0
                self._patience = 1.0
            self._check_progress(self.head if has_model else self.rounds.log.state.head)
        self.rounds.epoch = self.optimizer.local_epoch

    def _check_progress(self, head: bytes) -> None:
        """Load the state if this peer, whose model has this commit, is too far behind; leave a log that has ended."""
        log = self.rounds.log
        newest = self.rounds.log.state
        now = time.monotonic()
        # the first epoch of a log may last longer, too; of a peer that others have left, the estimate is too long
        expected = min(self.tracker.dht.uplink.timeouts.epoch_seconds, MAX_EXPECTED_EPOCH)
        usual = statistics.median_high([*log.spans, expected])
        max_silence = max(SILENCE_TIMEOUT, SILENT_EPOCHS * usual)
        if now >= self._next_join:  # their contributors may have another log, see `has_fewer_peers`
            self._next_join = now + ATTESTATION_INTERVAL
            self.tracker.refresh_attested_peers()
        if self.tracker.view.epoch > newest.epoch + MAX_EPOCHS_BEHIND:
            max_silence = STUCK_TIMEOUT  # the others may no longer have the commits that follow
        wait = self._patience * max(STUCK_TIMEOUT, log.timeout)
        self._stuck_deadline = 0.0 if head == newest.head else self._stuck_deadline or now + wait
        is_far = newest.epoch > self.optimizer.local_epoch + self._patience * MAX_EPOCHS_BEHIND
        left = self.tracker.withdrawn | {leave.peer for leave in log.select(Leave)}
        left -= {*self.tracker.others, log.me}  # some have come back, perhaps this peer
        if not newest.counted and (log.num_ticks - log.half_tick) * TICK > max(SILENCE_TIMEOUT, expected):
            left |= newest.in_turn - {it.peer for it in log.select_current()}  # an epoch later than half of them
        here = {log.me, *self.tracker.others, *self.rounds.select_seen(newest.voters)}
        # a peer that sees no other may be cut off
        has_quorum = newest.is_quorum({*newest.voters} & here) or not self.tracker.present
        self._quorum_at = now if has_quorum else min(self._quorum_at, now)
        has_all = head == newest.head or 0 < self._stuck_deadline < now
        if has_all and not newest.is_quorum({*newest.voters} - left):
            self._end("too few voters have stayed")
        elif now > self._quorum_at + max(SILENCE_TIMEOUT, usual):  # without a word
            self._end("most voters are gone")
        elif log.num_ticks * TICK > max_silence:  # a clock that stands still while this process does
            self._end(f"no commit for {max_silence:.0f} s")
        elif head in log.chain and head not in log.list_path():
            self._load_state("the log has forked")
        elif head != newest.head and (0 < self._stuck_deadline < now or is_far):
            self._load_state(f"updates of epoch {self.optimizer.local_epoch} are missing")

    def _end(self, reason: str) -> None:
        """Leave a log that can have no further commit. A peer that is alone begins another with its pending update."""
        logger.warning(f"{reason}: leaving the log")
        if not self.rounds.log.state.counted:  # its leader may have shown other members another first state
            self._silent.add(self._leader)
        self._ended = self.rounds.log_id, self.rounds.log.state.head
        self._close()
        if not self.tracker.present and not self.optimizer.is_auxiliary:
            self.begin(self._ended[1], [self.rounds.identity.peer])

    def _close(self) -> None:
        """Leave the log; updates that no commit contains stay pending."""
        for offer in self.rounds.close():
            self._take_back(offer)
        self._next_join = self._stuck_deadline = 0.0
        self._quorum_at = math.inf
        self._step_ends.clear()
        self._patience = 1.0

    def _load_state(self, reason: str) -> None:
        """Load a state of this log, unless that has just failed, and continue with it once its commit is known."""
        if time.monotonic() < self.optimizer.sync.backoff.not_before:
            return
        logger.warning(f"{reason}: loading the swarm's state")
        self._stuck_deadline = 0.0
        if self.optimizer.load_state_from_peers():  # the next update may be missing for the same reason
            self._patience = min(2 * self._patience, MAX_PATIENCE)

    def _take_back(self, offer: Offer) -> None:
        """Add an update that no commit contains to the residual."""
        with contextlib.suppress(KeyError):  # the disk has lost it
            restore(list(self.rounds.store.open(offer.blob)), Numbers(self.optimizer.grad_averager.unsent))
            self.optimizer.grad_averager.samples += offer.samples
            self.optimizer.grad_averager.old_samples += offer.samples

    def _wait(self, look: Callable[[], object], seconds: float) -> object:
        """Wait at most these seconds for a true result, report that this peer is there, and return the last result."""
        deadline = time.monotonic() + seconds
        announced = time.monotonic()
        while not (found := look()) and time.monotonic() < deadline and not STOP_REQUESTED.wait(GENESIS_PAUSE):
            if time.monotonic() > announced + ANNOUNCE_INTERVAL:
                announced = time.monotonic()
                self.tracker.announce()
        return found

    def offer(self) -> None:
        """Offer the pending update if the epoch is over, or will be over for longer than others wait at the end of the
        next step. The loop continues with local steps until the commit comes."""
        head = self.head
        self._step_ends.append(time.monotonic())
        if self._offered[0] == head or not self.optimizer.grad_averager.samples or time.monotonic() < self._next_offer:
            return
        log = self.rounds.log
        has_most_offers = log.state.head == head and log.state.has_most_turns(log.select_current())
        # just after a commit, `seconds_left` is not known
        left = min(self.tracker.seconds_left, self.tracker.dht.uplink.timeouts.epoch_seconds or math.inf)
        # an evaluation makes one step longer, not two
        steps = [end - start for start, end in itertools.pairwise(self._step_ends)]
        seconds = min(steps) if len(steps) == 2 else 0.0
        # a single voter does not wait
        will_be_late = len(log.state.voters) > 1 and left + log.patience < seconds
        is_over = self.tracker.ready_to_update_epoch or has_most_offers or will_be_late
        if is_over and not log.has_turn():
            self._passed = self._passed if self._passed[0] == head else (head, self.optimizer.grad_averager.samples)
        elif is_over:
            started = time.monotonic()
            with self.tracker.performance_ema.pause():
                self._make_offer(head)
            self.optimizer.stats.averaging_seconds += time.monotonic() - started

    def _make_offer(self, head: bytes) -> None:
        optimizer = self.optimizer
        grad_averager = self.optimizer.grad_averager
        update = optimizer.local.measure()
        try:
            blocks = encode(Numbers(update), Numbers(grad_averager.unsent), self.codec)
        except ValueError as e:
            logger.warning(f"dropped the samples of this epoch, because an update is invalid: {e}")
            grad_averager.drop_pending()
            return
        optimizer.local.mark_offered(update, grad_averager.unsent)
        digest = compute_digest(Numbers(list_params(optimizer.opt)), Numbers(list_momenta(optimizer.opt)))
        try:
            self.rounds.add_offer(head, digest, grad_averager.samples, blocks, self._find_opposed(head, blocks))
            self._offered = head, digest
            self._offered_old = grad_averager.old_samples
            self._passed = b"", 0
            grad_averager.samples = grad_averager.old_samples = 0
        except OSError as e:
            logger.warning(f"cannot store an update ({e.strerror}): free some space for `output_dir`")
            self._next_offer = time.monotonic() + OFFER_PAUSE
            restore(blocks, Numbers(grad_averager.unsent))
            optimizer.local.move_anchor(optimizer.local.anchor)  # the update is in `unsent` now

    def _find_opposed(self, head: bytes, blocks: list[bytes]) -> set[bytes]:
        """Return the owners in a commit whose updates oppose this peer's update, which is in these blocks and its rest
        in the residual."""
        entry = self.rounds.log.chain.get(head)
        offers = [it for it in entry.commit.offers if it.peer != self.rounds.log.me] if entry and entry.commit else []
        with contextlib.suppress(KeyError):  # the disk has lost one
            blobs = [self.rounds.store.open(it.blob) for it in offers]
            opposed = find_opposed(Numbers(self.optimizer.grad_averager.unsent), blocks, blobs)
            return {offers[index].peer for index in opposed}
        return set()

    def _apply(self, commit: Commit, before: State) -> bool:
        """STEPPING: make the outer step of a commit, given the log's state before; return whether that was possible."""
        optimizer = self.optimizer
        averager = self.averager
        me = self.tracker.dht.peer_id.to_bytes()
        base, digest = self._offered
        if base == commit.parent and before.find_digest(commit) not in (b"", digest):
            self._load_state("this peer's state differs from most others")
            return False
        try:
            blobs = [self.rounds.store.open(it.blob) for it in commit.offers]
            for blob in blobs:
                deque(blob, maxlen=0)  # an outer step must not end in the middle because a block is damaged
        except KeyError:
            self._load_state(f"the updates of epoch {commit.epoch} are no longer on disk")
            return False
        suspended = before.find_suspended(commit)
        samples = {it.peer: it.samples for it in commit.offers if it.peer not in suspended}
        contributions = [
            Contribution(it.peer, samples.get(it.peer, 0), it.base != commit.parent, blob, it.peer in before.voters)
            for it, blob in zip(commit.offers, blobs, strict=True)
        ]
        opt = optimizer.opt
        started = time.monotonic()
        own_samples = sum(it.samples for it in commit.offers if it.peer == me)
        options = dict(lr=optimizer.averaging.outer_lr, outer_momentum=optimizer.averaging.outer_momentum)
        optimizer.epoch.enter(EpochState.STEPPING)
        try:
            with self.tracker.pause_updates():
                with averager.lock_optimizer, averager.lock_averaged_tensors:
                    state = Numbers(list_params(opt)), Numbers(list_momenta(opt))
                    weights = aggregate(*state, contributions, **options, seed=commit.hash)
                    averager.set_epoch(optimizer.local_epoch + 1)
                    averager.lineage = commit.hash.hex()
                optimizer.local.move_anchor(list_params(opt))
                if self._passed[0] == commit.parent:
                    optimizer.grad_averager.old_samples = self._passed[1]
                self.tracker.update_epoch(optimizer.local_epoch, optimizer.pending_samples - own_samples)
        except Exception as e:  # a block has just gone, or memory is full: the anchor may be half changed
            averager.lineage = ""
            optimizer.begin_epoch()
            self._load_state(f"the outer step has failed ({e!r})")
            return False
        opt.grad_norm = torch.nn.utils.get_total_norm(list_momenta(opt)).item()
        optimizer.stats.averaging_seconds += time.monotonic() - started
        for it, weight in zip(commit.offers, weights, strict=True):
            self.had_weight.setdefault(it.peer, deque(maxlen=MAX_SHOWN)).append(weight > 0)
        owners = {it.peer for it in commit.offers}
        optimizer.stats.record_step(own_samples, group_size=len(owners))
        optimizer.stats.last_group = frozenset(owners & {*before.voters} - {me})  # new keys cost nothing
        self._silent.clear()
        optimizer.begin_epoch()
        self.tracker.record_round(optimizer.stats.last_group, None)
        return True
