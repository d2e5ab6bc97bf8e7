"""The progress of the swarm: which peers are there, how far they are, and when their epoch will be over.

Peers publish hivemind's records, so that plain hivemind peers read them as well (see notes 12, 22 and 71).
"""

import contextlib
import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import hivemind
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, PerformanceEMA, ValueWithExpiration, get_dht_time

from common.console import format_count
from swarm import logger
from swarm.attestation import MAX_ATTESTERS, request_in_dht
from swarm.config import AveragingConfig
from swarm.dht import ping_peers
from swarm.trust import PeerTrust, Records
from utils import find_peer_id

PING_DELAY = 2.0  # seconds without a report until a peer is pinged
REFRESH_TIMEOUT = 5.0  # seconds for a refresh that the caller waits for; the DHT gives up on a peer after 3
REFRESH_SHARE = 0.1  # minimum time between two refreshes, as a share of the time since the last change
DRIFT_PEERS = 3  # that may join within an epoch
DRIFT_RATE = 0.2  # the same as a share of the swarm; the larger number counts
MANY_PEERS = 8  # above which refreshes are rarer: each peer reads the records of all from five of them
MAX_PINGS = 8  # peers pinged at once, by each peer before each round
MAX_SPEED = 1e9  # samples/s that a record may claim
MAX_AGE = 3600.0  # seconds since the time that a record names
# Epochs after a futile wait for a straggler, until a round waits for one again. A peer that is one epoch behind replays
# the missed step while the others accumulate the next batch: without a wait, it would be late for each round.
WAIT_RETRY_EPOCHS = 5


@dataclass(frozen=True)
class SwarmView:
    """A summary of the records of all peers that are there."""

    epoch: int  # that this peer or most known peers have reached
    samples: int  # of all peers at this epoch, as they have reported them
    num_peers: int  # at this peer's epoch, itself included
    ends_at: float  # when the swarm has the samples of the epoch, as estimated; in seconds of the DHT's time
    read_at: float  # when the DHT was asked for the records; monotonic clock


class PeerTracker:
    """A tracker that publishes this peer's progress and reads that of the others, in a thread of its own."""

    def __init__(self, dht: hivemind.DHT, prefix: str, averaging: AveragingConfig, trust: PeerTrust):
        self.dht = dht
        self.prefix = prefix
        self.averaging = averaging
        self.trust = trust
        self.key = f"{prefix}_progress"
        self.target_batch_size = averaging.target_batch_size - averaging.batch_size_lead
        self.performance_ema = PerformanceEMA()
        self._public_key = RSASignatureValidator().local_public_key
        self.local_progress = self._make_record(0, 0)
        #: the newest plausible records of the other peers, by peer id
        self.others: dict[bytes, LocalTrainingProgress] = {}
        self.withdrawn: set[bytes] = set()  # the peers that have left lately, and have withdrawn their records
        #: pings in flight, and the last request for attestations: without a reference, MPFuture forgets the callbacks
        self.pings: list[MPFuture] = []
        self._attestations: MPFuture | None = None
        #: the epoch in which rounds no longer wait for peers that are one epoch behind; the next one in which they may
        self.impatient_epoch = -1
        self.patient_from = 0
        # when this epoch began, the seconds that the last one took, and whether this peer was there in time
        self._epoch_began = time.monotonic()
        self._epoch_seconds = 0.0
        self._has_seen_start = False
        self.lock = threading.Condition()  # held by a thread that changes the view or the trust in peers
        self._is_ending = threading.Event()
        self._wake = threading.Event()
        self._is_paused = False
        self._reported_at = self._next_report = self._next_read = -math.inf
        self.view = SwarmView(-1, 0, 1, math.inf, -math.inf)
        self._changed_at = time.monotonic()
        # the swarm's epoch at the last report of samples; only a peer that trains with the swarm publishes its progress
        self._active_epoch = -math.inf
        self.apply_records(self.dht.get(self.key, latest=True), time.monotonic())
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Publish this peer's record and read the others' until the end; without waiting for the DHT (note 71)."""
        request = None
        read_at = -math.inf
        while not self._is_ending.is_set():
            now = time.monotonic()
            if now >= self._next_report:
                # in this order: a report that comes in between is published once more
                self._reported_at = now
                self._next_report = now + self.averaging.metadata_expiration / 2
                if self._active_epoch >= self.view.epoch - 1:
                    self._store(self.local_progress.dict())
            if request is None and now >= self._next_read:
                self._next_read = math.inf  # first, because the loop may schedule the next refresh at any moment
                read_at = time.monotonic()
                request = self.dht.get(self.key, latest=True, return_future=True)
                request.add_done_callback(lambda _: self._wake.set())
            if request is not None and request.done():
                self._take_answer(request, read_at)
                request = None
            due_at = self._next_report if request else min(self._next_report, self._next_read)
            self._wake.wait(max(0.0, due_at - time.monotonic()))
            self._wake.clear()

    # --- this peer

    def _make_record(self, epoch: int, samples: int) -> LocalTrainingProgress:
        own = dict(peer_id=self.dht.peer_id.to_bytes(), client_mode=self.dht.client_mode, time=get_dht_time())
        own["samples_per_second"] = self.performance_ema.samples_per_second
        return LocalTrainingProgress(epoch=epoch, samples_accumulated=samples, **own)

    def report_local_progress(self, epoch: int, samples: int) -> None:
        """Record this peer's samples of its epoch; its next report is min_refresh_period after the last (note 12)."""
        new_samples = samples - self.local_progress.samples_accumulated
        last_epoch = self.local_progress.epoch
        with self.lock:
            if epoch == last_epoch == self.view.epoch:
                self.view = replace(self.view, samples=self.view.samples + new_samples)
        if new_samples > 0 and epoch == last_epoch:
            self.performance_ema.update(task_size=new_samples)
        else:
            self.performance_ema.reset_timer()
        if samples:
            self._active_epoch = self.view.epoch
        self.local_progress = self._make_record(epoch, samples)
        now = time.monotonic()
        due_at = self._reported_at + self.averaging.min_refresh_period
        if epoch != last_epoch:
            self._epoch_seconds = now - self._epoch_began
            self._epoch_began = now
            self._has_seen_start = epoch == last_epoch + 1
            due_at = now
        self._next_report = min(self._next_report, due_at)
        self._wake.set()

    def update_epoch(self, epoch: int, samples: int = 0, *, may_lower: bool = False) -> None:
        """Go to another epoch, with these samples of this peer; with `may_lower`, this lowers the swarm's as well."""
        with self.lock:
            if epoch > self.view.epoch or may_lower:
                self.view = replace(self.view, epoch=epoch, samples=samples, ends_at=math.inf)
            self.report_local_progress(epoch, samples)

    def set_target(self, samples: int) -> None:
        """Change the number of samples of an epoch. Its end was estimated for another number, and is unknown now."""
        if samples != self.target_batch_size:
            self.target_batch_size = samples
            with self.lock:
                self.view = replace(self.view, ends_at=math.inf)
            self.schedule_refresh(0.0)

    def announce(self) -> None:
        """Publish this peer's record, although it has computed nothing or waits for others (note 49)."""
        if not self._is_ending.is_set():
            self.local_progress = self.local_progress.copy(update={"time": get_dht_time()})
            self._store(self.local_progress.dict())

    def _store(self, value: dict | None) -> None:
        expiration = get_dht_time() + self.averaging.metadata_expiration
        self.dht.store(self.key, value, expiration, subkey=self._public_key, return_future=True)

    @contextlib.contextmanager
    def suspend_participation(self) -> Iterator[None]:
        """Let the others continue without this peer for a while: its record names an old epoch, and its speed stays."""
        own = self.local_progress
        with self.performance_ema.pause():
            # at first, no epoch is too long past; a peer that has just joined has not announced itself yet
            if own.epoch >= 2 and self.present:
                self.local_progress = self._make_record(own.epoch - 2, 0)
                self.announce()
            try:
                yield
            finally:
                if self.local_progress is not own:
                    with self.lock:  # most others may still have been at the epoch before
                        self.view = replace(self.view, epoch=max(self.view.epoch, own.epoch))
                    self.local_progress = self._make_record(own.epoch, own.samples_accumulated)
                    self.announce()
                    self.schedule_refresh(0.0)

    # --- the others

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the swarm has the samples of this peer's epoch, as reported or estimated, or is further."""
        view = self.view
        if view.epoch < self.local_progress.epoch:
            return False  # most others are far behind, and this peer has to load their state
        is_estimated = view.num_peers > 1 and get_dht_time() >= view.ends_at  # a peer that is alone knows all samples
        return is_estimated or view.samples >= self.target_batch_size or view.epoch > self.local_progress.epoch

    @property
    def seconds_left(self) -> float:
        """The seconds until the swarm has the samples of this peer's epoch, as estimated."""
        return 0.0 if self.ready_to_update_epoch else self.view.ends_at - get_dht_time()

    @property
    def present(self) -> dict[bytes, LocalTrainingProgress]:
        """The newest records of the other peers that are there, by peer id."""
        return self.trust.select_present(self.others)

    @property
    def peers_at_epoch(self) -> list[bytes]:
        """The ids of the other peers that are there and at most one epoch behind this one."""
        return [peer_id for peer_id, record in self.present.items() if record.epoch >= self._min_epoch]

    @property
    def _min_epoch(self) -> int:
        # a peer that is one epoch behind may be replaying the missed step: worth waiting for, once
        epoch = self.local_progress.epoch
        return epoch if epoch == self.impatient_epoch else epoch - 1

    @property
    def _quorum_epochs(self) -> tuple[int, float]:
        """The first and the last epoch of the contributors that count toward the quorum."""
        epoch = self.local_progress.epoch
        counted = self.trust.select_counted(self.others)
        known = [it.epoch for p, it in counted.items() if self.trust.is_known(p) and it.epoch >= epoch - 1]
        if len(known) < 2:  # of two peers, either may go on without the other
            return self._min_epoch, math.inf
        # a peer that made the last step with a hostile one alone must not go on: most others may have missed it
        has_others = self.view.epoch <= epoch and sum(other <= epoch for other in known) > 1
        return epoch - 1, epoch if has_others else math.inf  # those that are ahead do not make this epoch again

    def _select_contributors(self, first: int, last: float = math.inf) -> Records:
        """Return the records of the known contributors at these epochs that are there or late."""
        excluded = self.trust.excluded
        known = {p: it for p, it in self.others.items() if self.trust.is_known(p) and p not in excluded}
        return {p: it for p, it in known.items() if first <= it.epoch <= last}

    @property
    def contributors_at_epoch(self) -> Records:
        """The records of the known contributors that are there, and count toward the quorum; also of those that are
        late, unless these are more than a third: a hostile leader can omit no more of them."""
        known = self._select_contributors(*self._quorum_epochs)
        in_time = self.trust.select_present(known)
        return known if 3 * (1 + len(in_time)) >= 2 * (1 + len(known)) else in_time

    @property
    def quorum(self) -> int:
        """The number of peers that a joint round takes, with this one."""
        return self.trust.count_quorum(self.others, *self._quorum_epochs)

    @property
    def lacks_quorum(self) -> bool:
        """Whether too few peers are at this epoch for a round."""
        return 1 + len(self.peers_at_epoch) < self.quorum

    def has_quorum_reported(self, since: float) -> bool:
        """Return whether enough known contributors for a round have reported since this time of the DHT."""
        in_time = self.trust.select_present(self.contributors_at_epoch)
        return 1 + sum(it.time > since for it in in_time.values()) >= self.quorum

    def is_majority(self, group: Collection[bytes]) -> bool:
        """Return whether this is two thirds of the known contributors, with this peer, or all that are not late: a
        leader may omit any."""
        first, last = self._quorum_epochs
        known = self._select_contributors(first, last)
        members = self._select_contributors(first).keys() & group  # some may be ahead by now
        has_all_in_time = self.trust.select_present(known).keys() <= members
        return has_all_in_time or 3 * (1 + len(members)) >= 2 * (1 + len(known.keys() | members))

    def list_contributors(self) -> list[bytes]:
        """Return the known contributors, which choose the state: those that accept connections; the clients if there
        are no others, or if this peer is behind and none of the others is ahead of it."""
        known = {p: record for p, record in self.present.items() if self.trust.is_known(p)}
        public = [p for p, record in known.items() if not record.client_mode]
        own_epoch = self.local_progress.epoch
        is_served = self.view.epoch <= own_epoch or any(known[p].epoch > own_epoch for p in public)
        return (public if is_served else []) or [p for p in known if p not in public] or public

    def list_clients(self) -> dict[PeerID, int]:
        """Return the peers that accept no connections, and their epochs."""
        return {PeerID(p): record.epoch for p, record in self.present.items() if record.client_mode}

    def stop_waiting_for_stragglers(self, epoch: int) -> None:
        """In this epoch, no longer wait for peers that are one epoch behind, unless the quorum needs them."""
        count = len(self.peers_at_epoch)
        self.impatient_epoch = epoch
        if self.lacks_quorum:
            self.impatient_epoch = -1
        elif epoch >= self.patient_from and len(self.peers_at_epoch) < count:
            self.patient_from = epoch + WAIT_RETRY_EPOCHS

    def refresh_attested_peers(self) -> None:
        """Ask the initial peers again for contributors, without waiting: a peer that joined early knows few of them."""

        def apply(done: MPFuture) -> None:
            if not done.cancelled() and not done.exception():
                attestations = [it for it in done.result().values() if it.prefix == self.prefix]
                self.trust.attested = {worker for it in attestations for worker in it.workers} or self.trust.attested

        if peers := self.dht.initial_ids[:MAX_ATTESTERS]:
            self._attestations = self.dht.run_coroutine(partial(request_in_dht, peers=peers), return_future=True)
            self._attestations.add_done_callback(apply)

    def mark_silent(self, peer_ids: Iterable[bytes], is_unreachable: bool = False) -> None:
        """Do not count these peers until they report something new, see PeerTrust.mark_silent."""
        present = self.present
        if silent := [peer_id for peer_id in peer_ids if peer_id in present]:
            self.trust.mark_silent(silent, is_unreachable)
            others = format_count(len(present) - len(silent), "other peer")
            logger.info(f"no answer from peer {', '.join(map(str, map(PeerID, silent)))}: continuing with {others}")
            self.schedule_refresh(0.0)

    def exclude_idle_peers(self, since: float, max_peers: int) -> None:
        """Stop counting the peers that have not reported since this time, unless they are more than `max_peers`."""
        idle = [peer_id for peer_id, record in self.present.items() if record.time < since]
        if len(idle) <= max_peers:
            self.mark_silent(idle)

    def ping_quiet_peers(self, peer_ids: Iterable[bytes], quiet_for: float = PING_DELAY) -> None:
        """Ping those that were quiet for these seconds, quietest first. Without an answer, they no longer count."""
        present = self.present
        quiet_since = get_dht_time() - quiet_for
        quiet = [it for p in peer_ids if (it := present.get(p)) and not it.client_mode and it.time < quiet_since]
        if asked := {record.peer_id for record in sorted(quiet, key=lambda record: record.time)[:MAX_PINGS]}:
            ping = self.dht.run_coroutine(partial(ping_peers, peer_ids=list(asked)), return_future=True)
            self.pings = [*(other for other in self.pings if not other.done()), ping]
            ping.add_done_callback(partial(self._take_pings, asked))

    def _take_pings(self, asked: set[bytes], done: MPFuture) -> None:
        if not done.cancelled() and not done.exception():
            silent = asked - done.result()
            # if no peer answers, this one's own connection may have failed
            self.mark_silent(silent, is_unreachable=silent != asked or len(asked) == 1)

    def ban(self, violations: dict[PeerID, str]) -> None:
        """Do no rounds with these peers for a while, see PeerTrust.ban."""
        if violations:
            self.trust.ban(violations)
            self.schedule_refresh(0.0)

    def record_round(self, group: Iterable[bytes], waited_since: float | None) -> None:
        """Record a round's peers, see PeerTrust.record_round. Ping the absent ones; quiet clients no longer count."""
        with self.lock:
            quiet_since = get_dht_time() - PING_DELAY
            absent = {p: self.others[p] for p in self.peers_at_epoch if p not in group}
            self.trust.record_round(group, absent, waited_since, self.local_progress.epoch)
        if not self.trust.active:  # with a log, new peers are in no group
            # a peer in client mode cannot be pinged; one that has just reported is late, and would be so forever
            self.mark_silent(p for p, record in absent.items() if record.client_mode and record.time < quiet_since)
        self.ping_quiet_peers(absent)

    # --- refreshes of the view

    @contextlib.contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Refresh the view only if `schedule_refresh` asks for it, and do not count the time for this peer's speed."""
        self._is_paused = True
        try:
            with self.performance_ema.pause():
                yield
        finally:
            self._is_paused = False
            self.schedule_refresh(0.0)

    def schedule_refresh(self, seconds: float) -> None:
        """Refresh the view after this time."""
        with self.lock:
            self._next_read = time.monotonic() + seconds
        self._wake.set()

    def refresh_now(self) -> None:
        """Refresh the view, and wait for the DHT's answer unless it is late."""
        asked_at = time.monotonic()
        self.schedule_refresh(0.0)
        with self.performance_ema.pause(), self.lock:
            self.lock.wait_for(lambda: self.view.read_at >= asked_at, REFRESH_TIMEOUT)

    def _take_answer(self, request: MPFuture, read_at: float) -> None:
        """Update the view by the DHT's answer to this request."""
        if request.exception():
            self._next_read = min(self._next_read, time.monotonic() + self.averaging.default_refresh_period)
            return
        with self.lock:
            # keep a refresh that was scheduled meanwhile; after an answer from before this epoch, refresh at once
            scheduled = self._next_read
            self.apply_records(request.result(), read_at)
            self._next_read = min(scheduled, self._next_read if read_at >= self._epoch_began else time.monotonic())
            self.lock.notify_all()

    def _read_records(self, entry: ValueWithExpiration | None) -> None:
        """Update the other peers' records by the DHT's answer. Without an answer, they stay until they expire."""
        now = get_dht_time()
        if entry is None:
            oldest = now - self.averaging.metadata_expiration
            self.others = {peer_id: record for peer_id, record in self.others.items() if record.time > oldest}
            return
        values = entry.value if isinstance(entry.value, dict) else {}
        withdrawn = {find_peer_id(key) for key, item in values.items() if item.value is None}
        records = [LocalTrainingProgress.parse_obj(item.value) for item in values.values() if item.value is not None]
        plausible = [it for it in records if it.samples_per_second <= MAX_SPEED and abs(it.time - now) < MAX_AGE]
        newest = {record.peer_id: record for record in plausible}
        newest.pop(self.dht.peer_id.to_bytes(), None)
        last = self.others
        self.others = self.trust.select_believable(newest, self.local_progress.epoch)
        self.withdrawn = withdrawn - self.others.keys()
        for peer_id in self.withdrawn & last.keys():
            logger.info(f"peer {PeerID(peer_id)} left")
        self.trust.update(self.others)

    def apply_records(self, entry: ValueWithExpiration | None, read_at: float) -> None:
        """Update the view by what the DHT has answered, and schedule the next refresh. The caller holds the lock."""
        self._read_records(entry)
        own = self.local_progress
        present = self.present
        now = get_dht_time()
        # others count from their first round on, or as long as no contributors are known, also silent ones
        known = self.trust.select_present(self.trust.select_known(self.others))
        epoch = self.trust.find_swarm_epoch(known, own.epoch)
        counted = [own, *known.values()]
        has_log = bool(self.trust.active)
        max_speed = self.trust.find_max_speed(counted)
        max_samples = max_speed * (time.monotonic() - self._epoch_began) if self._has_seen_start else math.inf
        speeds = {it.peer_id: min(it.samples_per_second, max_speed) for it in counted}
        at_epoch = [it for it in counted if it.epoch == epoch]
        samples = sum(int(min(it.samples_accumulated, max_samples)) for it in at_epoch)
        # they have more by now than they have reported
        estimates = [it.samples_accumulated + max(0.0, now - it.time) * speeds[it.peer_id] for it in at_epoch]
        speed = max(sum(speeds.values()), self.performance_ema.eps)
        seconds_left = max(0.0, self.target_batch_size - sum(min(it, max_samples) for it in estimates)) / speed

        # a peer that has just joined has had no epoch yet; and a claimed speed does not shorten the last one
        known_speed = sum(speeds[it.peer_id] for it in counted if it is own or self.trust.is_known(it.peer_id))
        expected_seconds = self.target_batch_size / known_speed if known_speed > self.performance_ema.eps else 0.0
        self.dht.uplink.record_epoch_time(max(self._epoch_seconds, expected_seconds))

        count = len(present) + 1
        # records of unknown peers cost as much, whatever they say
        num_read = len(entry.value) if has_log and entry and isinstance(entry.value, dict) else 0
        scale = max(1.0, len(counted) / MANY_PEERS, num_read / MANY_PEERS)
        max_count = max(count + DRIFT_PEERS, count * (1 + DRIFT_RATE))
        if (epoch, samples) != (self.view.epoch, self.view.samples):
            self._changed_at = read_at  # without changes, refreshes become rare
        soonest = max(REFRESH_SHARE * (read_at - self._changed_at), scale * self.averaging.min_refresh_period)
        # without a log, a peer must see in time that the others wait for it (note 75); with one, their offers tell
        latest = self.averaging.max_refresh_period
        if has_log:
            latest = min(latest * scale, self.averaging.metadata_expiration / 4)
        usual = latest if has_log and not seconds_left else min(max(soonest, seconds_left * count / max_count), latest)
        period = usual if entry else self.averaging.default_refresh_period
        self._next_read = math.inf if self._is_paused else time.monotonic() + period
        self.view = SwarmView(epoch, samples, len(self.peers_at_epoch) + 1, now + seconds_left, read_at)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Withdraw this peer's record, and end; wait at most these seconds for the thread."""
        self._is_ending.set()
        self._wake.set()
        self._thread.join(timeout)
        self._store(None)
