"""The rounds of a peer, from the search for a group to the end. A failed round loses no gradients."""

import asyncio
import concurrent.futures
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from common.signals import STOP_REQUESTED
from swarm import logger
from swarm.gradients import GradientAverager
from swarm.guard import MaliciousPeersError
from swarm.optimizer_state import StateAverager
from swarm.progress import PeerTracker
from swarm.round_watch import PeersSilentError
from utils import MAX_WORKERS

POLL_INTERVAL = 0.02  # seconds; while nothing happens, each pause is 2 % longer
MAX_POLL_INTERVAL = 0.5
CHECK_INTERVAL = 2.0  # seconds between two checks of the swarm while this peer waits for a group
ANNOUNCE_INTERVAL = 3.0  # seconds between two signs of life while this peer waits for a round
STOP_TIMEOUT = 2.0  # seconds after a stop request in which no byte has come or gone, until a round is given up
MAX_STOP_TIMEOUT = 30.0  # seconds after a stop request until any round is given up


class AveragingError(Exception):
    """A gradient averaging round failed; its gradients are kept."""


@dataclass
class RoundStats:
    """The counts and times of this peer's rounds so far."""

    succeeded: int = 0
    failed: int = 0
    failed_in_a_row: int = 0
    matchmaking_seconds: float = 0.0  # that the loop has waited, not those in the background
    averaging_seconds: float = 0.0
    samples: int = 0  # of this peer in the last step
    total_samples: int = 0  # of this peer in all steps
    group_size: int = 1  # peers whose gradients verifiably entered the last step, this one included
    last_group: frozenset[bytes] = frozenset()  # ids of the others in the last round that succeeded
    members: tuple[bytes, ...] = ()  # ids of all trainers of its group, of which some may have failed

    def record_step(self, samples: int, group_size: int) -> None:
        """Record a step with this number of this peer's samples, and of peers."""
        self.samples = samples
        self.group_size = group_size
        self.total_samples += samples
        self.succeeded += 1
        self.failed_in_a_row = 0


class Rounds:
    """The rounds of a peer: the last one of gradients, whose group forms in advance, and the last one of parameters."""

    def __init__(self, tracker: PeerTracker, state_averager: StateAverager, grad_averager: GradientAverager):
        self.tracker = tracker
        self.state_averager = state_averager
        self.grad_averager = grad_averager
        self.averaging = tracker.averaging
        self.uplink = tracker.dht.uplink
        self.stats = RoundStats()
        self.is_auxiliary = tracker.trust.is_auxiliary
        self.gradient_round: StepControl | None = None
        self.parameter_round: StepControl | None = None
        # the bytes so far, when they changed, and when a stop request was seen, see `must_stop`
        self._traffic: tuple[int, int] | None = None
        self._traffic_at = 0.0
        self._stop_seen_at = 0.0

    @property
    def overlap(self) -> bool:
        """Whether rounds run in the background; with local steps, only the log does."""
        return self.averaging.overlap and self.averaging.local_steps == 1

    def is_synchronous(self) -> bool:
        """Return whether all peers step together. They do not if the swarm averages in several groups, of which one may
        be faster, or if rounds run in the background: there, peers an epoch apart are usual."""
        trust = self.tracker.trust
        trainers = self.tracker.peers_at_epoch
        if trust.partners or len(trust.attested) < MAX_WORKERS:  # otherwise, many contributors may be unknown
            trainers = list(filter(trust.is_known, trainers)) or trainers  # new keys cost nothing
        return len(trainers) + (0 if self.is_auxiliary else 1) <= self.averaging.target_group_size and not self.overlap

    def has_others(self) -> bool:
        """Return whether a round can have two peers with gradients."""
        return self.tracker.view.num_peers > (2 if self.is_auxiliary else 1)

    # --- before a round

    def is_searching(self) -> bool:
        """Return whether the search for a group is under way, or a group waits for this peer."""
        return self.gradient_round is not None and not self.gradient_round.triggered and not self.gradient_round.done()

    def has_group(self) -> bool:
        """Return whether a group has formed, and waits for this peer."""
        return self.is_searching() and self.gradient_round.stage == AveragingStage.AWAITING_TRIGGER

    def expect_group(self, awaits_all: bool = True) -> None:
        """Set the peers that the averagers' next groups need: all at this epoch (`awaits_all`), or most peers."""
        others = self.tracker.peers_at_epoch
        is_synchronous = self.is_synchronous()
        min_peers = max(self.tracker.quorum, 1 + len(others) if awaits_all else 1) if is_synchronous else 1
        known = {p: it.epoch for p, it in self.tracker.contributors_at_epoch.items() if is_synchronous}
        epochs = known if known and not awaits_all else dict.fromkeys(others, math.inf) | known
        self.grad_averager.set_expected_peers(epochs, min_peers, self.tracker.trust.excluded)
        if is_synchronous and not self.is_auxiliary:
            # a peer that makes the last step later, by download, has no part in its averaging of parameters
            others = self.stats.last_group & self.tracker.present.keys()
        self.state_averager.set_expected_peers(dict.fromkeys(others, math.inf), excluded=self.tracker.trust.excluded)

    def search_group(self) -> None:
        """Look for a group in the background."""
        self._ban_malicious_peers(self.gradient_round)
        self.gradient_round = self.grad_averager.schedule_step()
        # so that dead peers are known when the epoch ends: the DHT keeps the records of dead peers for a while
        self.tracker.ping_quiet_peers(self.tracker.present)

    # --- a round of gradients

    def average(self) -> Callable[[], None] | None:
        """Average the pending gradients: now, or if rounds overlap with computation, in the returned function. Raise an
        AveragingError if the round fails; then its gradients go into the next one."""
        self._ban_malicious_peers(self.gradient_round)
        self._ban_malicious_peers(self.parameter_round)
        if self.parameter_round is not None and self.parameter_round.done():
            self.parameter_round = None
        self.state_averager.group_id = self.tracker.dht.peer_id.to_bytes()
        if self.tracker.view.num_peers <= 1:
            self.leave(timeout=0.0)
            self.gradient_round = None
            self.grad_averager.take_pending()
            self.stats.record_step(self.grad_averager.finish(None), group_size=1)
            self.stats.members = (self.tracker.dht.peer_id.to_bytes(),)
            return None
        # None if the search in advance has failed, or has served the last epoch
        self.gradient_round = self.grad_averager.begin(self.gradient_round if self.is_searching() else None)
        finish = partial(self._finish, self.gradient_round, self.state_averager.local_epoch)
        return finish if self.overlap and not self.is_auxiliary else finish()

    def _finish(self, control: StepControl, epoch: int) -> None:
        """Wait for the averaged gradients of this epoch, and leave them to the optimizer, see `average`."""
        wait = RoundWait(self, control, epoch)
        try:
            group = wait.run()
            result = next(iter(group.values()))
            self.tracker.ban(result.violations)
            if self.is_synchronous() and not self.tracker.is_majority([*map(PeerID.to_bytes, group)]):
                raise AllreduceException("less than two thirds of the known contributors were in it")
            self.stats.record_step(self.grad_averager.finish(result), group_size=len(group))
        except (Exception, asyncio.CancelledError) as e:
            self._put_back(control, epoch, e)
            raise AveragingError("a round has failed") from e  # hivemind logs it if the round was in the background
        self.stats.members = result.members
        self.state_averager.group_id = result.group_id
        self.stats.last_group = frozenset(map(PeerID.to_bytes, group)) - {self.tracker.dht.peer_id.to_bytes()}
        if self.is_synchronous() and not self.is_auxiliary:
            self.expect_group()
            # the leader's wait ends first, so its followers have waited a little less
            has_waited = wait.searched_until > wait.started + self.uplink.timeouts.matchmaking / 2
            self.tracker.record_round(self.stats.last_group, wait.started_in_dht if has_waited else None)
        else:  # in other groups there are many peers that this one has not met
            self.tracker.trust.forget_groups()

    def _put_back(self, control: StepControl, epoch: int, error: BaseException) -> None:
        """Keep the gradients of a round that has failed for the next one."""
        self._ban_malicious_peers(control)
        if not control.done():
            control.cancel()
            self.grad_averager.end_round()
        self.grad_averager.restore_pending()
        self.stats.failed += 1
        self.stats.failed_in_a_row += 1
        self.stats.group_size = 1
        if isinstance(error, PeersSilentError):
            self.tracker.mark_silent(error.args[0])
        if self.is_auxiliary:  # it has no gradients to lose
            return
        text = f"epoch {epoch}: averaging failed ({type(error).__name__}: {error}); the gradients of "
        text += f"{self.grad_averager.samples} samples go into the next round"
        if self.stats.failed_in_a_row % 3 == 0:
            hint = "Is this machine's clock wrong, or it or its uplink too busy? `preflight` tells"
            if self.tracker.dht.client_mode and len(self.tracker.list_clients()) == len(self.tracker.present):
                hint = "No trainer accepts connections: restart without `client_mode`, to look for a relay, or ask "
                hint += "for an auxiliary peer with `assist_in_averaging`"
            logger.warning(f"{text}. {hint}")
        else:
            logger.info(text)

    def _ban_malicious_peers(self, control: StepControl | None) -> None:
        """Ban the peers that have made this round fail, or the search for its group."""
        is_failure = control is not None and control.done() and not control.cancelled()
        if is_failure and isinstance(control.exception(), MaliciousPeersError):
            self.tracker.ban(control.exception().args[0])

    # --- the end of rounds

    def must_stop(self) -> bool:
        """Return whether to give up a round because this peer was asked to stop."""
        if not STOP_REQUESTED.is_set():
            return False
        now = time.monotonic()
        self._stop_seen_at = self._stop_seen_at or now
        if self.uplink.traffic != self._traffic:  # also at the first call
            self._traffic = self.uplink.traffic
            self._traffic_at = now
        timeout = STOP_TIMEOUT / 2 if self.is_auxiliary else STOP_TIMEOUT
        return now > min(self._traffic_at + timeout, self._stop_seen_at + MAX_STOP_TIMEOUT)

    def leave(self, timeout: float, is_excluded: bool = False) -> None:
        """Cancel a search. If a group has formed, let its round go on without data of this peer, and wait for its end,
        these seconds at most. If the group would exclude this peer, leave the round before it starts."""
        control = self.gradient_round
        if control is None or control.done():
            return
        if control.stage == AveragingStage.LOOKING_FOR_GROUP or is_excluded and not control.began_allreduce:
            control.cancel()
            return
        if not control.triggered:
            control.weight = 0.0
            control.allow_allreduce()
        self._wait_for([control], timeout)

    def finish_background(self, timeout: float) -> None:
        """Wait for rounds in the background until the timeout, end them, and apply the changes that they have made."""
        pending = self.state_averager.pending_updates
        self._wait_for(pending, timeout)
        if not all(update.done() for update in pending):
            for control in filter(None, (self.gradient_round, self.parameter_round)):
                control.cancel()
            self.grad_averager.end_round()
            self.state_averager.end_round()
            concurrent.futures.wait(pending, 1.0)  # they end with their round
        self.state_averager.step()

    def _wait_for(self, futures: Collection[Future], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not all(future.done() for future in futures) and time.monotonic() < deadline and not self.must_stop():
            concurrent.futures.wait(futures, POLL_INTERVAL)


class RoundWait:
    """The wait for the round of one epoch, which gives up as soon as no group can form (note 22)."""

    def __init__(self, rounds: Rounds, control: StepControl, epoch: int):
        self.rounds = rounds
        self.control = control
        self.epoch = epoch
        self.tracker = rounds.tracker
        self.awaits_all = True  # or most peers, once expected peers have been missing for long
        self.started = self.searched_until = time.monotonic()
        self.started_in_dht = get_dht_time()
        timeouts = rounds.uplink.timeouts
        # before the wait for missing peers ends, or none of them would be known to have reported during the wait
        self.first_check = self.next_check = self.started + min(CHECK_INTERVAL, timeouts.matchmaking / 2)
        self.next_announcement = self.started + min(ANNOUNCE_INTERVAL, timeouts.matchmaking / 4)
        self.lacked_quorum_at = self.started
        patience = timeouts.matchmaking if rounds.is_synchronous() else timeouts.round_seconds / 2
        self.straggler_timeout = patience if epoch >= self.tracker.patient_from else 0.0

    def run(self) -> dict:
        """Return the result of the round, or raise an AllreduceException or another error if it fails."""
        pause = POLL_INTERVAL
        while not self.control.done():
            now = time.monotonic()
            stage = self.control.stage
            if self.rounds.must_stop():
                raise AllreduceException("this peer was asked to stop")
            if now > self.started + self.rounds.uplink.timeouts.averaging:  # which follows the group's bandwidths
                if stage == AveragingStage.LOOKING_FOR_GROUP and self.rounds.is_synchronous():
                    self.tracker.exclude_idle_peers(self.started_in_dht, len(self.tracker.present))
                raise concurrent.futures.TimeoutError("it took too long")
            if not self.rounds.is_auxiliary and now >= self.next_announcement:
                self.next_announcement = now + ANNOUNCE_INTERVAL
                self.tracker.announce()
            if stage == AveragingStage.LOOKING_FOR_GROUP:
                self.check_swarm()
            # also for the averaging of parameters, whose search for a group may have begun in the last epoch (note 72)
            self.rounds.expect_group(awaits_all=self.awaits_all)
            pause = min(1.02 * pause, MAX_POLL_INTERVAL)
            concurrent.futures.wait([self.control], pause)
            # a round in the background costs the loop nothing
            seconds = 0.0 if self.rounds.overlap else time.monotonic() - now
            if stage == AveragingStage.RUNNING_ALLREDUCE:
                self.rounds.stats.averaging_seconds += seconds
            else:
                self.rounds.stats.matchmaking_seconds += seconds
        return self.control.result()

    def check_swarm(self) -> None:
        """Find out which peers are there while no group forms; raise an AllreduceException if they cannot average."""
        now = self.searched_until = time.monotonic()
        if now > self.started + self.rounds.uplink.timeouts.matchmaking and self.awaits_all:
            self.awaits_all = False
            self.tracker.stop_waiting_for_stragglers(self.epoch)
            if self.rounds.is_synchronous():  # if there are more idle peers, they may be busy with long steps
                self.tracker.exclude_idle_peers(self.started_in_dht, len(self.tracker.peers_at_epoch) // 2)
        if now >= self.next_check:
            self.next_check = now + CHECK_INTERVAL
            if all(ping.done() for ping in self.tracker.pings):
                self.tracker.ping_quiet_peers(self.tracker.peers_at_epoch)
            self.tracker.schedule_refresh(0.0)
        if self.tracker.view.read_at < self.first_check:
            return
        timeouts = self.rounds.uplink.timeouts
        recently = get_dht_time() - ANNOUNCE_INTERVAL - 2 * CHECK_INTERVAL  # a peer in a long step has not reported
        if not self.tracker.has_quorum_reported(max(self.started_in_dht, recently)):
            self.lacked_quorum_at = now
        elif now > self.lacked_quorum_at + timeouts.matchmaking + 2 * timeouts.request:
            self.lacked_quorum_at = now
            self.rounds.grad_averager.avoid_leader()
        if self.rounds.is_synchronous() and self.tracker.view.epoch > self.epoch:
            raise AllreduceException("the others have stepped without this peer")
        if now > self.started + self.straggler_timeout:
            self.tracker.stop_waiting_for_stragglers(self.epoch)
        if not self.tracker.peers_at_epoch or self.tracker.lacks_quorum:
            raise AllreduceException("too few others are there")
