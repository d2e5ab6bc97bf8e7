"""The wait for a round, in bounded time: for peers that are there, as long as the round can still succeed."""

import concurrent.futures
import time
from collections.abc import Callable

from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.utils import MPFuture, get_dht_time

from swarm.epoch import StragglerPatience
from swarm.gradients import GradientAverager
from swarm.processes import STOP_REQUESTED
from swarm.progress import FIRST_LOOK, PeerTracker
from swarm.uplink import Uplink

POLL_INTERVAL = 0.02  # seconds
ANNOUNCE_INTERVAL = 3.0  # seconds between two signs of life while this peer waits for a round
STOP_TIMEOUT = 2.0  # seconds after a stop request in which no byte has come or gone, until a round is given up
MAX_STOP_TIMEOUT = 30.0  # seconds after a stop request until any round is given up


class StopTimeout:
    """Decides when a peer that was asked to stop no longer waits for its rounds."""

    def __init__(self, uplink: Uplink, timeout: float = STOP_TIMEOUT):
        self.uplink, self.timeout = uplink, timeout
        self.requested_at: float | None = None
        self.traffic: tuple[int, int] | None = None
        self.last_traffic_at = 0.0

    def is_over(self) -> bool:
        """Return whether a round should be given up because this peer was asked to stop."""
        if not STOP_REQUESTED.is_set():
            return False
        now = time.monotonic()
        if self.requested_at is None:
            self.requested_at = now
        if self.traffic != self.uplink.traffic:
            self.traffic, self.last_traffic_at = self.uplink.traffic, now
        return now > min(self.last_traffic_at + self.timeout, self.requested_at + MAX_STOP_TIMEOUT)


class RoundWait:
    """The wait for the round of one epoch.

    hivemind waits until its timeout for dead peers whose records are still there (note 22), and for a round that was
    over before this peer came. This looks at the swarm while no group has formed, and gives up as soon as no group can
    form. All of its timers end with it.
    """

    def __init__(
        self,
        control: StepControl,
        epoch: int,
        tracker: PeerTracker,
        averager: GradientAverager,
        uplink: Uplink,
        stop: StopTimeout,
        patience: StragglerPatience,
        *,
        is_synchronous: Callable[[], bool],
        expect_for_states: Callable[[], None],
        announces: bool,
    ):
        """
        :param control: the round
        :param epoch: the epoch of this peer, which the round ends
        :param is_synchronous: returns whether all peers step together
        :param expect_for_states: updates the peers that the averaging of parameters waits for
        :param announces: whether the other peers are told that this one is still there
        """
        self.control, self.epoch, self.tracker, self.averager, self.uplink = control, epoch, tracker, averager, uplink
        self.stop, self.patience, self.announces = stop, patience, announces
        self.is_synchronous, self.expect_for_states = is_synchronous, expect_for_states
        #: seconds so far while a group formed, and while it averaged
        self.matchmaking_seconds = self.averaging_seconds = 0.0
        #: the time in the DHT since which expected peers are missing; None as long as all of them are awaited
        self.waited_since: float | None = None
        self.min_peers = 1  # of a group
        self.started, self.started_in_dht = time.monotonic(), get_dht_time()
        self.next_look, self.next_announcement = self.started + FIRST_LOOK, self.started + ANNOUNCE_INTERVAL
        #: the DHT's answer to the last look, which a dead peer delays by seconds
        self.records: MPFuture | None = None
        self.straggler_timeout = 0.0
        if patience.waits_in(epoch):
            timeouts = uplink.timeouts
            self.straggler_timeout = timeouts.matchmaking if is_synchronous() else timeouts.round_seconds / 2

    def run(self) -> dict:
        """Return the result of the round.

        :raises AllreduceException: the round has failed, or cannot succeed; or whatever else hivemind raises
        """
        while not self.control.done():
            now, stage = time.monotonic(), self.control.stage
            if self.stop.is_over():
                raise AllreduceException("this peer was asked to stop")
            if now > self.started + self.uplink.timeouts.averaging:  # which follows the group's bandwidths
                self.give_up()
            if self.announces and now >= self.next_announcement:
                self.next_announcement = now + ANNOUNCE_INTERVAL
                self.tracker.announce()
            if stage == AveragingStage.LOOKING_FOR_GROUP:
                self.look_at_swarm()
                self.expect_for_states()  # the averaging of the last epoch may still look for a group (note 72)
            self.averager.set_expected_peers(self.tracker.peers_at_epoch, self.min_peers, self.tracker.trust.excluded)
            try:
                self.control.result(POLL_INTERVAL)
            except concurrent.futures.TimeoutError:
                pass  # the round is not over; or it has ended with such an error, which is raised below
            finally:
                seconds = time.monotonic() - now
                if stage == AveragingStage.RUNNING_ALLREDUCE:
                    self.averaging_seconds += seconds
                else:
                    self.matchmaking_seconds += seconds
        return self.control.result()

    def give_up(self) -> None:
        """End a round that takes too long.

        :raises TimeoutError: always
        """
        if self.control.stage == AveragingStage.LOOKING_FOR_GROUP:
            max_excluded = len(self.tracker.present) if self.is_synchronous() else 0
            self.tracker.exclude_idle_peers(self.started_in_dht, max_excluded)
        raise concurrent.futures.TimeoutError("it took too long")

    def look_at_swarm(self) -> None:
        """While no group has formed, find out which peers are there, and whether the others still wait for this one.

        :raises AllreduceException: the others have stepped, or too few of them are there
        """
        now = time.monotonic()
        if now > self.started + self.uplink.timeouts.matchmaking and self.waited_since is None:
            self.waited_since = self.started_in_dht
            stop_waiting_for_stragglers(self.tracker, self.patience, self.epoch)
            # if there are more idle peers, they may be busy with long steps: most of the swarm is enough
            max_excluded = len(self.tracker.peers_at_epoch) // 2 if self.is_synchronous() else 0
            self.tracker.exclude_idle_peers(self.started_in_dht, max_excluded)
        self.min_peers = 1
        if self.is_synchronous():
            self.min_peers = self.tracker.count_min_group_size(awaits_all=self.waited_since is None)
        if self.records is None and now >= self.next_look:
            if all(ping.done() for ping in self.tracker.pings):
                self.tracker.ping_silent_peers(self.tracker.peers_at_epoch)
            self.records = self.tracker.request_records()
        if self.records is None or not self.records.done():
            return
        self.tracker.apply_records(self.records.result())
        self.records, self.next_look = None, now + FIRST_LOOK
        if self.is_synchronous() and self.tracker.global_epoch > self.epoch:
            raise AllreduceException("the others have stepped without this peer")
        if now > self.started + self.straggler_timeout:
            stop_waiting_for_stragglers(self.tracker, self.patience, self.epoch)
        if not self.tracker.peers_at_epoch or self.tracker.lacks_quorum:
            raise AllreduceException("too few others are there")


def stop_waiting_for_stragglers(tracker: PeerTracker, patience: StragglerPatience, epoch: int) -> None:
    """In this epoch, no longer count peers that are one epoch behind among those that a round needs."""
    count = len(tracker.peers_at_epoch)
    tracker.impatient_epoch = epoch
    if patience.waits_in(epoch) and len(tracker.peers_at_epoch) < count:
        patience.record_vain_wait(epoch)
