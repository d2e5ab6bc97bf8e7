"""The progress of the swarm: which peers are there, how far they are, and when their epoch will be over.

Peers publish their progress in hivemind's records, so that plain hivemind peers read them as well. hivemind's tracker
reads them too, but counts a dead peer until its last record expires (note 22), reports each step (note 12), and holds a
lock while it asks the DHT (note 71).
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import hivemind
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import SchemaValidator
from hivemind.optim.progress_tracker import LocalTrainingProgress, TrainingProgressSchema
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, PerformanceEMA, ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from swarm.attestation import RunAttestation, request_in_dht, select_attesters
from swarm.dht import ping_peers
from swarm.trust import PeerTrust
from utils import find_peer_id

logger = logging.getLogger("swarm")

FIRST_LOOK = 2.0  # seconds of waiting for a group, or without a report, until a peer is asked whether it is there
MAX_PINGS = 8  # peers pinged at once, by each peer before each round
MAX_SPEED = 1e9  # samples/s that a record may claim
MAX_AGE = 3600.0  # seconds since the time that a record names


@dataclass(frozen=True)
class SwarmView:
    """A summary of the records of all peers that are there."""

    epoch: int  # that most known peers have reached
    samples: int  # of all peers at this epoch, as they have reported them
    num_peers: int  # at this peer's epoch, itself included
    ends_at: float  # when the swarm has the samples of the epoch, as estimated; in seconds of the DHT's time
    read_at: float  # when the DHT was asked for the records; monotonic clock


class PeerTracker(threading.Thread):
    """Publishes this peer's progress, and reads that of the others; in a thread of its own until `shutdown`."""

    def __init__(
        self,
        dht: hivemind.DHT,
        prefix: str,
        target_batch_size: int,
        trust: PeerTrust,
        *,
        client_mode: bool = False,
        min_refresh_period: float = 0.5,
        max_refresh_period: float = 10.0,
        default_refresh_period: float = 3.0,
        expected_drift_peers: float = 3.0,
        expected_drift_rate: float = 0.2,
        performance_ema_alpha: float = 0.1,
        metadata_expiration: float = 60.0,
        private_key: RSAPrivateKey | None = None,
    ):
        """
        :param target_batch_size: the number of samples of an epoch
        :param trust: decides which records count
        :param min_refresh_period: seconds between two looks at the swarm at least, and between two reports of an epoch
        :param max_refresh_period: seconds between two looks at most
        :param default_refresh_period: seconds between two looks as long as there are no records
        :param expected_drift_peers: the number of peers that may join within an epoch
        :param expected_drift_rate: the share of peers that may join within an epoch
        :param metadata_expiration: seconds for which a record stays in the DHT
        :param private_key: signs the records; default: this process's key
        """
        super().__init__(name=f"progress of {prefix}", daemon=True)
        self.dht, self.prefix, self.trust, self.client_mode = dht, prefix, trust, client_mode
        self.key, self.target_batch_size = f"{prefix}_progress", target_batch_size
        self.min_refresh_period, self.max_refresh_period = min_refresh_period, max_refresh_period
        self.default_refresh_period = default_refresh_period
        self.expected_drift_peers, self.expected_drift_rate = expected_drift_peers, expected_drift_rate
        self.metadata_expiration = metadata_expiration
        self.performance_ema = PerformanceEMA(alpha=performance_ema_alpha)
        signature = RSASignatureValidator(private_key)
        self._public_key = signature.local_public_key
        dht.add_validators([SchemaValidator(TrainingProgressSchema, prefix=prefix), signature])

        self.local_progress = self._make_record(0, 0)
        #: newest records of the other peers that can be true, by peer id
        self.others: dict[bytes, LocalTrainingProgress] = {}
        #: pings in flight, and the last request for attestations: MPFuture forgets the callbacks of one nobody holds
        self.pings: list[MPFuture] = []
        self._attestations: MPFuture | None = None
        #: the epoch in which rounds no longer wait for peers that are one epoch behind
        self.impatient_epoch = -1
        #: whether the thread has read the records since this peer's epoch began
        self.is_fresh = False
        # when this epoch began, and the seconds that the last one took
        self._epoch_began, self._epoch_seconds = time.monotonic(), 0.0
        # held by a thread that changes the view, and by the loop as long as no other thread may change it
        self._lock, self._wake, self._is_ending = threading.RLock(), threading.Event(), threading.Event()
        self._reported_at = self._next_report = self._next_read = -math.inf
        # the swarm's epoch at the last report of samples; only a peer that trains with the swarm publishes its progress
        self._active_epoch = -math.inf
        self.view = self._make_view(self.dht.get(self.key, latest=True), time.monotonic())
        self.start()

    # --- this peer

    def _make_record(self, epoch: int, samples: int) -> LocalTrainingProgress:
        return LocalTrainingProgress(
            peer_id=self.dht.peer_id.to_bytes(),
            epoch=epoch,
            samples_accumulated=samples,
            samples_per_second=self.performance_ema.samples_per_second,
            time=get_dht_time(),
            client_mode=self.client_mode,
        )

    def report_local_progress(self, epoch: int, samples: int) -> None:
        """Record the number of samples that this peer has of its epoch.

        The number is published at once, or min_refresh_period after the last report of this epoch (note 12).
        """
        new_samples, last_epoch = samples - self.local_progress.samples_accumulated, self.local_progress.epoch
        with self._lock:
            if epoch == last_epoch == self.view.epoch:
                self.view = replace(self.view, samples=self.view.samples + new_samples)
        if new_samples > 0:
            self.performance_ema.update(task_size=new_samples)
        else:
            self.performance_ema.reset_timer()
        if samples:
            self._active_epoch = self.view.epoch
        self.local_progress = self._make_record(epoch, samples)
        now = time.monotonic()
        due_at = self._reported_at + self.min_refresh_period
        if epoch != last_epoch:
            self._epoch_began, self._epoch_seconds = now, now - self._epoch_began
            due_at = now
        self._next_report = min(self._next_report, due_at)
        self._wake.set()

    def update_epoch(self, epoch: int) -> None:
        """Go to another epoch, without samples yet. The caller has paused updates."""
        if epoch > self.view.epoch:
            self.view = replace(self.view, epoch=epoch, samples=0, ends_at=math.inf)
        self.report_local_progress(epoch, 0)
        self.is_fresh = False

    def set_swarm_epoch(self, epoch: int) -> None:
        """Take this for the swarm's epoch, also if it is a lower one. The caller has paused updates."""
        self.view = replace(self.view, epoch=epoch)

    def set_target(self, samples: int) -> None:
        """Change the number of samples of an epoch.

        The end was estimated for another number: an auxiliary peer that has just come would take an epoch of local
        steps for over.
        """
        if samples != self.target_batch_size:
            self.target_batch_size = samples
            with self._lock:
                self.view = replace(self.view, ends_at=math.inf)
            self.schedule_refresh(0.0)

    def announce(self) -> None:
        """Tell the others that this peer is there.

        hivemind does so only once a peer has computed a gradient, and not while the peer waits for others. Then the
        others would start the next round without it.
        """
        if self._is_ending.is_set():
            return
        self.local_progress = self.local_progress.copy(update={"time": get_dht_time()})
        self._store(self.local_progress.dict())

    def _store(self, value: dict | None) -> None:
        expiration = get_dht_time() + self.metadata_expiration
        options = dict(value=value, expiration_time=expiration, return_future=True)
        self.dht.store(self.key, subkey=self._public_key, **options)

    @contextlib.contextmanager
    def suspend_participation(self) -> Iterator[None]:
        """Let the others continue without this peer while it does other work between two steps.

        Its record names an epoch long past, so that the others count no samples of it and wait for it in no round. The
        time does not count for its speed.
        """
        own = self.local_progress
        with self.performance_ema.pause():
            # at first, no epoch is too long past; a peer that has just joined has not announced itself yet
            if own.epoch >= 2 and self.present and not self._is_ending.is_set():
                self.local_progress = self._make_record(own.epoch - 2, 0)
                self.announce()
            try:
                yield
            finally:
                if self.local_progress is not own:
                    self.local_progress = self._make_record(own.epoch, own.samples_accumulated)
                    self.announce()
                    self.schedule_refresh(0.0)

    # --- the others

    @property
    def global_epoch(self) -> int:
        """The epoch of the swarm, as last read."""
        return self.view.epoch

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the swarm has the samples of this peer's epoch, or is further.

        The others may have more than they have reported, as estimated. A peer that is alone knows all samples.
        """
        view = self.view
        is_estimated = view.num_peers > 1 and get_dht_time() >= view.ends_at
        return is_estimated or view.samples >= self.target_batch_size or view.epoch > self.local_progress.epoch

    @property
    def estimated_next_update_time(self) -> float:
        """When the swarm has the samples of this peer's epoch, in seconds of the DHT's time."""
        return get_dht_time() if self.ready_to_update_epoch else self.view.ends_at

    @property
    def present(self) -> dict[bytes, LocalTrainingProgress]:
        """The newest records of the other peers that are there, by peer id."""
        return self.trust.select_present(self.others)

    @property
    def peers_at_epoch(self) -> list[bytes]:
        """The ids of the other peers that are there and at this peer's epoch, or about to be."""
        return [peer_id for peer_id, record in self.present.items() if record.epoch >= self._min_epoch]

    @property
    def _min_epoch(self) -> int:
        # a peer that is one epoch behind makes the others' step just now; worth waiting for, once
        epoch = self.local_progress.epoch
        return epoch if epoch == self.impatient_epoch else epoch - 1

    @property
    def quorum(self) -> int:
        """The number of peers that a round takes, this one included."""
        return self.trust.count_quorum(self.others, self._min_epoch)

    def count_min_group_size(self, awaits_all: bool) -> int:
        """Return how many peers a round takes if all peers step together, this one included.

        :param awaits_all: whether the round waits for all peers at this epoch; otherwise most of the swarm is enough
        """
        return max(self.quorum, 1 + len(self.peers_at_epoch)) if awaits_all else self.quorum

    @property
    def lacks_quorum(self) -> bool:
        """Whether too few peers are at this epoch for a round."""
        return 1 + len(self.peers_at_epoch) < self.quorum

    def list_donors(self) -> list[bytes]:
        """Return the ids of the known contributors, which decide which state is the swarm's; clients serve only peers
        that they have called."""
        return [p for p, record in self.present.items() if self.trust.is_known(p) and not record.client_mode]

    def refresh_trusted_peers(self) -> None:
        """Ask --initial_peers once more for the contributors that they know, without waiting.

        A peer that came early has heard of few. It counts so little of what others say that it comes late to each
        round, and meets no more of them.
        """
        if peers := select_attesters(map(str, self.dht.initial_peers or ())):
            request = partial(request_in_dht, peers=peers)
            self._attestations = self.dht.run_coroutine(request, return_future=True)
            self._attestations.add_done_callback(
                lambda done: done.cancelled() or done.exception() or self._apply_attestations(done.result())
            )

    def _apply_attestations(self, answers: dict[PeerID, RunAttestation]) -> None:
        attested = {worker for it in answers.values() if it.prefix == self.prefix for worker in it.workers}
        self.trust.attested = attested or self.trust.attested

    def mark_unresponsive(self, peer_ids: Iterable[bytes]) -> None:
        """Do not count these peers until they report something new."""
        present = self.present
        if silent := [peer_id for peer_id in peer_ids if peer_id in present]:
            self.trust.mark_unresponsive(silent)
            self.schedule_refresh(0.0)

    def exclude_idle_peers(self, since: float, max_peers: int) -> None:
        """Do not count peers that answer pings, but have not reported since this time, while others waited for them.

        :param max_peers: the number of such peers up to which this holds; if there are more, all of them count
        """
        idle = [peer_id for peer_id, record in self.present.items() if record.time < since]
        if len(idle) <= max_peers:
            self.mark_unresponsive(idle)

    def ping_silent_peers(self, peer_ids: Iterable[bytes], quiet_for: float = FIRST_LOOK) -> None:
        """Ping those of these peers that have been quiet for longest; the ones that do not answer no longer count.

        :param quiet_for: the seconds without a report after which a peer is pinged
        """
        present, quiet_since = self.present, get_dht_time() - quiet_for
        quiet = [
            peer_id
            for peer_id in peer_ids
            if peer_id in present and not present[peer_id].client_mode and present[peer_id].time < quiet_since
        ]
        pinged = set(sorted(quiet, key=lambda peer_id: present[peer_id].time)[:MAX_PINGS])
        if not pinged:
            return
        future = self.dht.run_coroutine(partial(ping_peers, peer_ids=list(pinged)), return_future=True)
        self.pings = [ping for ping in self.pings if not ping.done()] + [future]
        future.add_done_callback(
            lambda done: done.cancelled() or done.exception() or self.mark_unresponsive(pinged - done.result())
        )

    def ban(self, violations: dict[PeerID, str]) -> None:
        """Do no rounds with these peers for a while, see PeerTrust.ban."""
        if violations:
            self.trust.ban(violations)
            self.schedule_refresh(0.0)

    def record_round(self, group: Iterable[bytes], waited_since: float | None) -> list[bytes]:
        """Record which peers were in the round that has just succeeded, see PeerTrust.record_round.

        :returns: the ids of the peers at this epoch that were not
        """
        present = self.present
        absent = {p: present[p] for p in self.peers_at_epoch if p in present and p not in group}
        self.trust.record_round(group, absent, waited_since, self.local_progress.epoch)
        return list(absent)

    # --- looks at the swarm

    @contextlib.contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Keep the thread from changing the view, and do not count the time for this peer's speed."""
        try:
            with self._lock, self.performance_ema.pause():
                yield
        finally:
            self._wake.set()

    def schedule_refresh(self, seconds: float) -> None:
        """Look at the swarm again after this time."""
        self._next_read = time.monotonic() + seconds
        self._wake.set()

    def refresh_now(self, timeout: float) -> None:
        """Look at the swarm at once. The caller has paused updates.

        :param timeout: seconds to wait for the DHT
        :raises TimeoutError: the DHT has not answered
        """
        self.apply_records(self.request_records().result(timeout=timeout))

    def request_records(self) -> MPFuture:
        """Ask the DHT for the records; `apply_records` takes the answer."""
        return self.dht.get(self.key, latest=True, return_future=True)

    def apply_records(self, entry: ValueWithExpiration | None) -> None:
        """Update the view by what the DHT has answered. The caller has paused updates."""
        self.view = self._make_view(entry, time.monotonic())

    def run(self) -> None:
        """Publish and read until the end, without holding the lock while the DHT is asked (note 71)."""
        answer, requested_at, answered_at = None, 0.0, None
        while not self._is_ending.is_set():
            now = time.monotonic()
            if now >= self._next_report:
                # in this order: a report that comes in between is published once more
                self._reported_at, self._next_report = now, now + self.metadata_expiration / 2
                record = self.local_progress
                if self._active_epoch >= self.view.epoch - 1:
                    self._store(record.dict())
            if answer is None and now >= self._next_read:
                answer, requested_at, self._next_read = self.request_records(), now, math.inf
                answer.add_done_callback(lambda _: self._wake.set())
            if answer is not None and answer.done() and answered_at is None:
                answered_at = time.monotonic()
            if answered_at is not None and self._lock.acquire(blocking=False):
                try:
                    self._read(answer, requested_at, answered_at)
                finally:
                    self._lock.release()
                answer = answered_at = None
            seconds = min(self._next_report, self._next_read if answer is None else math.inf) - time.monotonic()
            self._wake.wait(max(0.0, seconds))
            self._wake.clear()

    def _read(self, answer: MPFuture, requested_at: float, answered_at: float) -> None:
        """Take the DHT's answer, unless a round has passed since, in which the loop has looked itself."""
        scheduled = self._next_read
        if answer.cancelled() or answer.exception():
            self._next_read = min(scheduled, time.monotonic() + self.default_refresh_period)
        elif time.monotonic() > answered_at + self.min_refresh_period:
            self._next_read = time.monotonic()
        else:
            self.view = self._make_view(answer.result(), requested_at)
            self._next_read = min(scheduled, self._next_read)
            self.is_fresh = True

    def _read_records(self, entry: ValueWithExpiration | None) -> None:
        """Update the other peers' records by what the DHT has answered."""
        newest: dict[bytes, LocalTrainingProgress] = {}
        withdrawn = set()
        values = entry.value.items() if entry and isinstance(entry.value, dict) else ()
        for key, item in values:
            if item.value is None:
                withdrawn.add(find_peer_id(key))
                continue
            record = LocalTrainingProgress.parse_obj(item.value)
            is_plausible = record.samples_per_second <= MAX_SPEED and abs(record.time - get_dht_time()) < MAX_AGE
            # a peer that was restarted has the records of both lives
            is_newest = record.peer_id not in newest or record.time > newest[record.peer_id].time
            if is_plausible and is_newest:
                newest[record.peer_id] = record
        newest.pop(self.dht.peer_id.to_bytes(), None)
        last, self.others = self.others, self.trust.select_believable(newest, self.local_progress.epoch)
        for peer_id in withdrawn & last.keys() - self.others.keys():
            logger.info(f"peer {PeerID(peer_id)} left")
        self.trust.update(self.others)

    def _make_view(self, entry: ValueWithExpiration | None, read_at: float) -> SwarmView:
        """Return what the records say of the swarm, and schedule the next look at it."""
        self._read_records(entry)
        own, present, now = self.local_progress, self.present, get_dht_time()
        epoch = self.trust.find_swarm_epoch(present, own.epoch)
        known = [own, *(record for peer_id, record in present.items() if self.trust.is_known(peer_id))]
        others = [record for peer_id, record in present.items() if not self.trust.is_known(peer_id)]
        speed = sum(record.samples_per_second for record in known)
        # a peer that has just joined has had no epoch yet; and a claimed speed does not shorten the last one
        expected_seconds = self.target_batch_size / speed if speed else 0.0
        self.dht.uplink.record_epoch_time(max(self._epoch_seconds, expected_seconds))
        samples = sum(record.samples_accumulated for record in known if record.epoch == epoch)
        # those that have come since their reports as well
        estimated = sum(
            record.samples_accumulated + max(0.0, now - record.time) * record.samples_per_second
            for record in known
            if record.epoch == epoch
        )
        speeds = [record.samples_per_second for record in others]
        counts = [record.samples_accumulated for record in others]
        if len(known) > 1:
            speeds = self.trust.scale_claims(speeds, speed)
            counts = self.trust.scale_claims(counts, sum(record.samples_accumulated for record in known))
        for record, count, claimed_speed in zip(others, counts, speeds, strict=True):
            speed += claimed_speed
            if record.epoch == epoch:
                samples += int(count)
                # the samples since the report are estimated for untrusted peers only if all others are untrusted
                since = 0.0 if len(known) > 1 else max(0.0, now - record.time)
                estimated += count + since * claimed_speed
        seconds_left = max(0.0, self.target_batch_size - estimated) / max(speed, self.performance_ema.eps)
        count = len(present) + 1
        max_count = max(count + self.expected_drift_peers, count * (1 + self.expected_drift_rate))
        period = min(max(seconds_left * count / max_count, self.min_refresh_period), self.max_refresh_period)
        self._next_read = time.monotonic() + (period if entry else self.default_refresh_period)
        # hivemind does not count a peer that has not reported yet, so that such a peer makes its first step alone. It
        # counts a peer that is far behind, for which the others would wait in each round.
        return SwarmView(epoch, samples, len(self.peers_at_epoch) + 1, now + seconds_left, read_at)

    def shutdown(self, timeout: float | None = None) -> None:
        """Withdraw this peer's record, and end."""
        self._is_ending.set()
        self._wake.set()
        self.join(timeout)
        self._store(None)
