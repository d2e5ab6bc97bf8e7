"""Which peers are there, and how far they are: as far as their reports can be believed."""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

import hivemind
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, ValueWithExpiration, enter_asynchronously, get_dht_time

from support.console import format_count
from swarm.dht import format_peer_list, ping_peers
from swarm.vouching import RunAttestation, request_attestations, select_attesters
from utils import filter_plausible_records, find_peer_id

logger = logging.getLogger("swarm")

BAN_SECONDS = 60.0
FIRST_LOOK = 2.0  # seconds of waiting for a group, or without a report, before asking whether anybody is there
QUESTIONED = 8  # peers pinged at once, by each peer before each round
MAX_SPEED, MAX_AGE = 1e9, 3600.0  # samples/s, and seconds since a report: more nobody has
MAX_LEAD = 2  # epochs by which a stranger may be further than all who are known to have worked
MAX_ABSENCES = 3  # rounds in a row for which a peer is waited for in vain that says it is there


def find_majority_epoch(epochs: Iterable[int]) -> int:
    """Return the highest epoch that more than half of these peers have reached. New peers, at epoch 0, have no say."""
    started = sorted(filter(None, epochs), reverse=True)
    return started[len(started) // 2] if started else 0


class ProgressTracker(hivemind.optim.progress_tracker.ProgressTracker):
    """Counts only peers that are there, and reports at most once in min_refresh_period within an epoch.

    hivemind counts a peer until its last record expires: for all that time a dead peer's samples are expected and
    others wait for it in each round (note 22). Here a peer that was found silent does not count until it reports
    something new. And hivemind reports each step (note 12): a signature and a message to several peers, and nobody
    looks more often than min_refresh_period.
    """

    _last_report = -float("inf")

    def __init__(self, *args, **kwargs):
        #: newest records of the other peers, by peer id
        self.others: dict[bytes, LocalTrainingProgress] = {}
        #: when peers were found silent, or until when they are banned, in seconds of the DHT's time
        self.silent: dict[bytes, float] = {}
        #: those of them of whom the next look may tell that they have left in order
        self.unexplained: set[bytes] = set()
        #: how often each has lied, and to how many rounds in a row it has not come
        self.lies: Counter[PeerID] = Counter()
        self.absences: Counter[bytes] = Counter()
        #: until when nobody waits for those who do not come, in seconds of the DHT's time
        self.unawaited: dict[bytes, float] = {}
        #: ids of peers that have been in rounds with this one, and of those that its --initial_peers vouch for
        self.partners: set[bytes] = set()
        self.vouched: set[bytes] = set()
        self.last_fetch = -float("inf")
        #: pings in flight
        self.questions: list[MPFuture] = []
        #: the last epoch's end, and how long it took, in seconds
        self._epoch_began, self._epoch_seconds = time.monotonic(), 0.0
        #: the last question who has worked: MPFuture forgets the callbacks of one that nobody holds
        self._asked: MPFuture | None = None
        #: the epoch in which peers that are behind have been waited for long enough
        self.impatient_epoch = -1
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        """hivemind's, which leaves behind what it has just asked the DHT: told of the answer when this loop is closed,
        it would print a traceback."""

        async def run_all() -> None:
            await asyncio.gather(self._progress_reporter(), self._progress_fetcher())

        asyncio.run(run_all())
        self.shutdown_complete.set()

    async def _progress_fetcher(self) -> None:
        """hivemind's, but for the lock, which it holds while the DHT is asked: a dead peer delays that for seconds, and
        the loop would wait for it at the end of an epoch."""
        loop = asyncio.get_running_loop()
        stopping = loop.run_in_executor(None, self.shutdown_triggered.wait)
        while not self.shutdown_triggered.is_set():
            seconds = max(0.0, self.global_progress.next_fetch_time - get_dht_time())
            if await loop.run_in_executor(None, self.global_state_updated.wait, seconds):
                self.global_state_updated.clear()
                continue
            asked = time.monotonic()
            answer = asyncio.create_task(asyncio.wait_for(self.request_records(), None))
            await asyncio.wait({answer, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answered = time.monotonic()
                async with enter_asynchronously(self.lock_global_progress):
                    # a whole round may have passed meanwhile, in which the loop has looked itself
                    if time.monotonic() < answered + self.min_refresh_period:
                        self.apply_records(answer.result())
                        self.last_fetch = asked
                        self.fetched_global_progress_this_epoch.set()
            answer.cancel()

    def _parse_swarm_progress_data(self, metadata):
        own_id = self.dht.peer_id.to_bytes()
        newest: dict[bytes, tuple[bytes, LocalTrainingProgress]] = {}
        withdrawn = set()
        for key, entry in metadata.items() if isinstance(metadata, dict) else ():
            if entry.value is not None:
                record = LocalTrainingProgress.parse_obj(entry.value)
                if not (record.samples_per_second <= MAX_SPEED and abs(record.time - get_dht_time()) < MAX_AGE):
                    continue
                # a peer that was restarted has the records of both lives
                if record.peer_id not in newest or record.time > newest[record.peer_id][1].time:
                    newest[record.peer_id] = key, record
            else:
                withdrawn.add(find_peer_id(key))
        # anybody may sign "epoch 10**9" with a fresh key, and everybody would ask for that state
        records = [(peer_id, record) for peer_id, (_, record) in newest.items() if peer_id != own_id]
        before, known = self.others, [(peer_id, record) for peer_id, record in records if peer_id in self.trusted]
        self.others = dict(filter_plausible_records(known or records, self.local_progress.epoch))
        if known:
            limit = max(record.epoch for record in (self.local_progress, *self.others.values())) + MAX_LEAD
            self.others |= {peer_id: record for peer_id, record in records if record.epoch <= limit}
        for peer_id in withdrawn & before.keys() - self.others.keys():
            logger.info(f"peer {PeerID(peer_id)} left")
        newest = {peer_id: item for peer_id, item in newest.items() if peer_id == own_id or peer_id in self.others}
        self.unawaited = {peer_id: until for peer_id, until in self.unawaited.items() if get_dht_time() < until}
        for peer_id, since in list(self.silent.items()):
            record, now = self.others.get(peer_id), get_dht_time()
            if record is None:
                if since < now:
                    del self.silent[peer_id]
            elif min(record.time, now) > since:
                del self.silent[peer_id]
                logger.info(f"peer {PeerID(peer_id)} is back, at epoch {record.epoch}")
        if gone := self.unexplained & self.silent.keys() & self.others.keys():
            others = format_count(len(self.present), "other peer")
            logger.info(f"no answer from peer {format_peer_list(gone)}: continuing with {others}")
        self.unexplained.clear()
        here = {own_id, *self.present}
        counted = {key: metadata[key] for peer_id, (key, _) in newest.items() if peer_id in here}
        # a peer that claims an epoch has a state for it to serve
        known = [record for peer_id, record in self.present.items() if peer_id in self.trusted]
        others = known or self.present.values()
        highest = max(self.local_progress.epoch, find_majority_epoch(record.epoch for record in others))
        for key, entry in counted.items():
            if entry.value["epoch"] > highest:
                lowered = {**entry.value, "epoch": highest, "samples_accumulated": 0}
                counted[key] = ValueWithExpiration(lowered, entry.expiration_time)
        # nor do they end it early: all of them together count for as much at most as those who have worked
        present, trusted = self.present, self.trusted
        workers = [self.local_progress, *(present[peer_id] for peer_id in present.keys() & trusted)]
        speed = sum(record.samples_per_second for record in workers)
        # who has just come has had none; nor do speeds that somebody claims make it shorter than it was
        self.dht.uplink.record_epoch_time(max(self._epoch_seconds, self.target_batch_size / speed if speed else 0.0))
        strangers = [newest[peer_id] for peer_id in present.keys() - trusted]
        for name in ("samples_accumulated", "samples_per_second") if len(workers) > 1 else ():
            limit = sum(getattr(record, name) for record in workers)
            claimed = max(limit, sum(getattr(record, name) for _, record in strangers))
            for key, record in strangers if claimed else ():
                number = type(limit)(getattr(record, name) * limit / claimed)
                # from now on: nobody computes for a stranger what it may have done since
                value = {**counted[key].value, name: min(counted[key].value[name], number), "time": get_dht_time()}
                counted[key] = ValueWithExpiration(value, counted[key].expiration_time)
        if all(record.client_mode for record in self.present.values()):
            # hivemind would not look at their epochs, as clients give no state; here they do
            for key, entry in counted.items():
                counted[key] = ValueWithExpiration({**entry.value, "client_mode": False}, entry.expiration_time)
        if own_id in newest:  # what the others were told last is older
            own_key = newest[own_id][0]
            counted[own_key] = ValueWithExpiration(self.local_progress.dict(), metadata[own_key].expiration_time)
        self.last_fetch = time.monotonic()
        progress = super()._parse_swarm_progress_data(counted)
        # hivemind does not count a peer that has not reported yet, so that it makes its first step alone; and counts
        # one that is far behind, for which the others would wait in each round
        progress.num_peers = len(self.peers_at_epoch) + 1
        return progress

    @property
    def present(self) -> dict[bytes, LocalTrainingProgress]:
        """Newest records of the other peers that are neither silent nor absent from all rounds, by peer id."""
        others, out = list(self.others.items()), self.silent.keys() | self.unawaited.keys()
        return {peer_id: record for peer_id, record in others if peer_id not in out}

    @property
    def quorum(self) -> int:
        """How many peers a round takes, this one among them: most of those at this epoch who are known to have worked.
        Who has fallen silent counts on for a while: the network may be cut in two, and a step of the smaller half would
        be another one than that of the larger."""
        now, known, grace = get_dht_time(), self.trusted, self.dht.uplink.timeouts.partition_grace
        members = {
            peer_id
            for peer_id, record in list(self.others.items())
            # neither silent for long, nor banned, which is until later
            if record.epoch >= self._min_epoch and now - grace <= self.silent.get(peer_id, now) <= now
        } - self.unawaited.keys()
        return 1 + (1 + len(members & known or members)) // 2

    def refresh_trusted_peers(self) -> None:
        """Ask those whom this peer was told to trust once more, without waiting. Whoever came early has heard of few
        workers, and counts so little of what others say that it comes late to each round, and meets no more of them."""
        if peers := select_attesters(map(str, self.dht.initial_peers or ())):
            self._asked = self.dht.run_coroutine(partial(request_attestations, peers=peers), return_future=True)
            self._asked.add_done_callback(
                lambda done: done.cancelled() or done.exception() or self._hear(done.result())
            )

    def _hear(self, answers: dict[PeerID, RunAttestation]) -> None:
        workers = {worker for it in answers.values() if it.prefix == self.prefix for worker in it.workers}
        self.vouched = workers or self.vouched

    @property
    def trusted(self) -> set[bytes]:
        """Ids of peers that are known to have worked."""
        return self.partners | self.vouched

    def list_donors(self) -> list[bytes]:
        """Ids of the known contributors that decide which state is the swarm's; clients serve only peers that they have
        called."""
        return [p for p, record in self.present.items() if p in self.trusted and not record.client_mode]

    @property
    def has_stopped_waiting(self) -> bool:
        return self.local_progress.epoch == self.impatient_epoch

    @property
    def peers_at_epoch(self) -> list[bytes]:
        """Ids of the other peers that are there and at this peer's epoch, or about to be."""
        return [peer_id for peer_id, record in self.present.items() if record.epoch >= self._min_epoch]

    @property
    def _min_epoch(self) -> int:
        # who is one epoch behind makes the others' step just now; worth waiting for, once
        return self.local_progress.epoch - (not self.has_stopped_waiting)

    @property
    def lacks_quorum(self) -> bool:
        """Whether too few are there for a round."""
        return 1 + len(self.peers_at_epoch) < self.quorum

    @contextlib.contextmanager
    def suspend_participation(self) -> Iterator[None]:
        """For what takes this peer's time between two steps: the others neither count on its samples meanwhile nor wait
        for it in a round, as its record names an epoch too long past for that; nor do they take it for slow later."""
        own = self.local_progress
        with self.performance_ema.pause():
            # at first, no epoch is too long past; a newcomer has not announced itself yet
            if own.epoch >= 2 and self.present and not self.shutdown_triggered.is_set():
                self.local_progress = self._get_local_progress(own.epoch - 2, 0)
                self.announce()
            try:
                yield
            finally:
                if self.local_progress is not own:
                    self.local_progress = self._get_local_progress(own.epoch, own.samples_accumulated)
                    self.announce()
                    self.schedule_refresh(0.0)

    def mark_unresponsive(self, peer_ids: Iterable[bytes]) -> None:
        """From now on these peers do not count, until they report something new."""
        gone = [peer_id for peer_id in peer_ids if peer_id in self.present]
        self.silent |= dict.fromkeys(gone, get_dht_time())
        if gone:
            self.unexplained.update(gone)
            self.schedule_refresh(0.0)

    def exclude_idle_peers(self, since: float, at_most: int) -> None:
        """Those who answer pings, but have given no sign of life since this time, in which others waited for them;
        nobody where there are more of them than this."""
        idle = [peer_id for peer_id, record in self.present.items() if record.time < since]
        if len(idle) <= at_most:
            self.mark_unresponsive(idle)

    def ping_silent_peers(self, peer_ids: Iterable[bytes], quiet_for: float = FIRST_LOOK) -> None:
        """Ping those of these peers that have been quiet for longest; who does not answer does not count any more.

        :param quiet_for: seconds without a report after which a peer is asked
        """
        present, quiet_since = self.present, get_dht_time() - quiet_for
        public = [
            peer_id
            for peer_id in peer_ids
            if peer_id in present and not present[peer_id].client_mode and present[peer_id].time < quiet_since
        ]
        asked = set(sorted(public, key=lambda peer_id: present[peer_id].time)[:QUESTIONED])
        if not asked:
            return
        future = self.dht.run_coroutine(partial(ping_peers, peer_ids=list(asked)), return_future=True)
        self.questions = [question for question in self.questions if not question.done()] + [future]
        future.add_done_callback(
            lambda done: done.cancelled() or done.exception() or self.mark_unresponsive(asked - done.result())
        )

    def ban(self, lies: dict[PeerID, str]) -> None:
        """These peers have lied in a round, and do not count for a while, four times as long each time.

        :param lies: what each has done, in words
        """
        for peer, lie in lies.items():
            if self.silent.get(peer.to_bytes(), 0.0) > get_dht_time():
                continue  # it is out already, for this or something else
            self.silent[peer.to_bytes()] = get_dht_time() + BAN_SECONDS * 4 ** self.lies[peer]
            self.lies[peer] += 1
            logger.warning(f"peer {peer} {lie}: no rounds with it for a while")
        if lies:
            self.schedule_refresh(0.0)

    def record_round(self, took_part: Iterable[bytes], waited_since: float | None) -> list[bytes]:
        """These peers were in the round that has just succeeded.

        :param waited_since: when the others began to be waited for, in vain; in seconds of the DHT's time
        :returns: who of those that are there was not
        """
        present = self.present
        absent = [peer_id for peer_id in self.peers_at_epoch if peer_id in present and peer_id not in took_part]
        self.partners |= set(took_part)
        for peer_id in took_part:
            del self.absences[peer_id]
            self.unawaited.pop(peer_id, None)
        # not who is behind, and may be making the step of the others; nor who is busy, and says nothing
        said = [p for p in absent if waited_since is not None and present[p].time >= waited_since]
        self.absences.update(p for p in said if present[p].epoch >= self.local_progress.epoch)
        for peer_id in [peer_id for peer_id in absent if self.absences[peer_id] >= MAX_ABSENCES]:
            del self.absences[peer_id]
            # no ban: it may be slow, and is welcome in any group that it finds in time
            self.unawaited[peer_id] = get_dht_time() + BAN_SECONDS
            logger.warning(f"peer {PeerID(peer_id)} says that it is there, and comes to no round: not waiting for it")
        return absent

    def set_target(self, samples: int) -> None:
        """So many make an epoch now. When it ends was estimated for another number of them: an auxiliary peer that has
        just come would take an epoch of local steps for over."""
        if samples != self.target_batch_size:
            self.target_batch_size, self.global_progress.eta_next_epoch = samples, math.inf
            self.schedule_refresh(0.0)

    def schedule_refresh(self, seconds: float) -> None:
        """Look at the swarm's progress again after this time."""
        self.global_progress.next_fetch_time = get_dht_time() + seconds
        self.global_state_updated.set()

    def refresh_now(self, timeout: float) -> None:
        """Look at the swarm's progress at once. The caller has paused updates."""
        self.apply_records(self.request_records().result(timeout=timeout))

    def request_records(self) -> MPFuture:
        """Ask the DHT; for `apply_records`, when the answer is there."""
        return self.dht.get(self.training_progress_key, latest=True, return_future=True)

    def apply_records(self, entry: ValueWithExpiration | None) -> None:
        """Look at what the DHT has answered. The caller has paused updates."""
        self.global_progress = self._parse_swarm_progress_data(entry.value if entry else None)

    def announce(self) -> None:
        """Tell the others that this peer is there. hivemind does so when it has computed something first: the others
        would go into the next round without it; nor does it while it waits for others."""
        if self.shutdown_triggered.is_set():
            return
        self.local_progress = self.local_progress.copy(update={"time": get_dht_time()})
        self.dht.store(
            self.training_progress_key,
            subkey=self._local_public_key,
            value=self.local_progress.dict(),
            expiration_time=get_dht_time() + self.metadata_expiration,
            return_future=True,
        )

    def report_local_progress(self, local_epoch: int, *args, **kwargs) -> None:
        has_new_epoch = local_epoch != self.local_progress.epoch
        super().report_local_progress(local_epoch, *args, **kwargs)
        now = time.monotonic()
        if has_new_epoch:
            self._epoch_began, self._epoch_seconds = now, now - self._epoch_began
        if has_new_epoch or now - self._last_report >= self.min_refresh_period:
            self._last_report = now
        else:
            self.should_report_progress.clear()
