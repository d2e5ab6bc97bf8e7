"""The wait for a round, in bounded time: for peers that are there, as long as the round can still succeed."""

import concurrent.futures
import time
from collections.abc import Callable
from dataclasses import dataclass

from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.utils import MPFuture, get_dht_time

from swarm.gradients import GradientAverager
from swarm.processes import STOP_REQUESTED
from swarm.progress import FIRST_LOOK, PeerTracker
from swarm.uplink import Uplink

POLL_INTERVAL = 0.02  # seconds
ANNOUNCE_INTERVAL = 3.0  # seconds between two signs of life while this peer waits for a round
STOP_TIMEOUT = 2.0  # seconds after a stop request in which no byte has come or gone, until a round is given up
MAX_STOP_TIMEOUT = 30.0  # seconds after a stop request until any round is given up


@dataclass
class StopTimeout:
    """The time after which a peer that was asked to stop no longer waits for its rounds."""

    uplink: Uplink
    timeout: float = STOP_TIMEOUT
    requested_at: float = 0.0
    last_traffic_at: float = 0.0
    traffic: tuple[int, int] | None = None

    def is_over(self) -> bool:
        """Return whether a round should be given up because this peer was asked to stop."""
        if not STOP_REQUESTED.is_set():
            return False
        now = time.monotonic()
        self.requested_at = self.requested_at or now
        if self.traffic != self.uplink.traffic:
            self.traffic, self.last_traffic_at = self.uplink.traffic, now
        return now > min(self.last_traffic_at + self.timeout, self.requested_at + MAX_STOP_TIMEOUT)


@dataclass
class RoundWait:
    """The wait for the round of one epoch.

    hivemind waits until its timeout for dead peers whose records are still there (note 22), and for a round that was
    over before this peer came. This looks at the swarm while no group has formed, and gives up as soon as no group can
    form. All of its timers end with it.
    """

    control: StepControl
    epoch: int  # of this peer, which the round ends
    tracker: PeerTracker
    averager: GradientAverager
    uplink: Uplink
    stop: StopTimeout
    is_synchronous: Callable[[], bool]  # whether all peers step together
    expect_for_states: Callable[[], None]  # updates the peers that the averaging of parameters waits for
    announces: bool  # whether the other peers are told that this one is still there
    # seconds so far while a group formed, and while it averaged
    matchmaking_seconds: float = 0.0
    averaging_seconds: float = 0.0
    #: the time in the DHT since which expected peers are missing; None as long as all of them are awaited
    waited_since: float | None = None
    min_peers: int = 1  # of a group
    #: the DHT's answer to the last look, which a dead peer delays by seconds
    records: MPFuture | None = None

    def __post_init__(self):
        self.started, self.started_in_dht = time.monotonic(), get_dht_time()
        self.next_look, self.next_announcement = self.started + FIRST_LOOK, self.started + ANNOUNCE_INTERVAL
        self.straggler_timeout = 0.0
        if self.epoch >= self.tracker.patient_from:
            timeouts = self.uplink.timeouts
            self.straggler_timeout = timeouts.matchmaking if self.is_synchronous() else timeouts.round_seconds / 2

    def run(self) -> dict:
        """Return the result of the round.

        :raises AllreduceException: the round has failed, or cannot succeed; or whatever else hivemind raises
        """
        while not self.control.done():
            now, stage = time.monotonic(), self.control.stage
            if self.stop.is_over():
                raise AllreduceException("this peer was asked to stop")
            if now > self.started + self.uplink.timeouts.averaging:  # which follows the group's bandwidths
                if stage == AveragingStage.LOOKING_FOR_GROUP and self.is_synchronous():
                    self.tracker.exclude_idle_peers(self.started_in_dht, len(self.tracker.present))
                raise concurrent.futures.TimeoutError("it took too long")
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

    def look_at_swarm(self) -> None:
        """While no group has formed, find out which peers are there, and whether the others still wait for this one.

        :raises AllreduceException: the others have stepped, or too few of them are there
        """
        now = time.monotonic()
        if now > self.started + self.uplink.timeouts.matchmaking and self.waited_since is None:
            self.waited_since = self.started_in_dht
            self.tracker.stop_waiting_for_stragglers(self.epoch)
            if self.is_synchronous():  # if there are more idle peers, they may be busy with long steps
                self.tracker.exclude_idle_peers(self.started_in_dht, len(self.tracker.peers_at_epoch) // 2)
        self.min_peers = 1
        if self.is_synchronous():
            self.min_peers = self.tracker.count_min_group_size(awaits_all=self.waited_since is None)
        if self.records is None and now >= self.next_look:
            if all(ping.done() for ping in self.tracker.pings):
                self.tracker.ping_silent_peers(self.tracker.peers_at_epoch)
            self.records = self.tracker.request_records()
        if self.records is None or not self.records.done():
            return
        self.tracker.apply_records(self.records.result(), now)
        self.records, self.next_look = None, now + FIRST_LOOK
        if self.is_synchronous() and self.tracker.global_epoch > self.epoch:
            raise AllreduceException("the others have stepped without this peer")
        if now > self.started + self.straggler_timeout:
            self.tracker.stop_waiting_for_stragglers(self.epoch)
        if not self.tracker.peers_at_epoch or self.tracker.lacks_quorum:
            raise AllreduceException("too few others are there")
