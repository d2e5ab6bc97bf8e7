"""The states of a peer's epoch, and the causes of each transition. Times are the caller's, of the monotonic clock."""

import enum
import math
from dataclasses import dataclass

from swarm.progress import SwarmView

RETRY_AFTER = 1.0  # seconds between a failed round and the next: all peers that are there have reported by then
SYNC_RETRY_PERIOD = 10.0  # seconds between two downloads of the state if no peer sent it the first time
MAX_SYNC_PAUSE = 300.0  # seconds
MAX_STALE_DOWNLOADS = 3  # in a row; from this number on, each pause between downloads is longer


class EpochState(enum.Enum):
    """A state of a peer's epoch."""

    ACCUMULATING = "accumulating"
    MATCHMAKING = "matchmaking"
    AVERAGING = "averaging"
    STEPPING = "stepping"
    SYNCING = "syncing"


#: by state: the states that may follow it, and why
TRANSITIONS = {
    EpochState.ACCUMULATING: {
        EpochState.MATCHMAKING,  # the epoch ends soon, and no search for a group runs
        EpochState.AVERAGING,  # the swarm has the samples, or a group waits for this peer
        EpochState.STEPPING,  # the log has a commit: `LogSteps.follow`
        EpochState.SYNCING,  # the swarm's epoch is another: `compare_with_swarm`, `has_missed_step`, or `LogSteps`
    },
    EpochState.AVERAGING: {
        EpochState.STEPPING,  # the round has succeeded, runs in the background, or there is no other peer
        EpochState.ACCUMULATING,  # the round has failed; its gradients are kept for the next one: `retry_at`
        EpochState.SYNCING,  # the round has failed because the others have stepped, or continue from another state
    },
    EpochState.STEPPING: {EpochState.ACCUMULATING},  # the step is made: a new epoch
    EpochState.SYNCING: {EpochState.ACCUMULATING},  # a state has been loaded: a new epoch; or no peer has sent one
}
# a peer accumulates while it looks for a group, and a search that has failed is followed by another one
TRANSITIONS[EpochState.MATCHMAKING] = TRANSITIONS[EpochState.ACCUMULATING]


@dataclass
class SyncBackoff:
    """The backoff of a peer that loads the swarm's state, after downloads that failed or came too late."""

    not_before: float = -math.inf
    min_epoch: int = 0  # of the swarm
    stale_downloads: int = 0  # in a row: states that were behind the swarm when they arrived

    def allows(self, epoch: int, swarm_epoch: int, is_synchronous: bool, now: float) -> bool:
        """Return whether a download may start now. If all step together, one missed step may ignore `min_epoch`."""
        is_one_step_behind = is_synchronous and epoch + 1 == swarm_epoch
        return now >= self.not_before and (is_one_step_behind or swarm_epoch >= self.min_epoch)

    def record_stale_download(self, swarm_epoch: int, seconds: float, now: float) -> float:
        """Record a state that took these seconds, and came too late. Return the seconds until the next download."""
        self.stale_downloads += 1
        # a download that begins with an epoch ends before the next one, if that is possible at all
        self.min_epoch = swarm_epoch + 1
        if self.stale_downloads < MAX_STALE_DOWNLOADS:
            return 0.0
        pause = min(MAX_SYNC_PAUSE, seconds * 2 ** min(20, self.stale_downloads - MAX_STALE_DOWNLOADS))
        self.not_before = now + pause
        return pause


class Epoch:
    """One epoch of a peer. Its timers end with it: the next epoch is a new object."""

    def __init__(self, number: int, began: float = -math.inf):
        self.number = number
        self.began = began
        self.state = EpochState.ACCUMULATING
        self.is_compared = False  # whether the swarm's epoch was compared with this one, since that has begun
        self.unconfirmed = "", 0  # the last group that exchanged data in a round that failed here, and the samples sent
        self.retry_at = -math.inf  # a failed round may be retried with a view of the swarm from this time on

    def enter(self, state: EpochState) -> None:
        """Go to another state; raise a ValueError if TRANSITIONS do not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"no transition from {self.state.value} to {state.value}")
        self.state = state

    def has_missed_step(self, swarm_epoch: int, is_synchronous: bool) -> bool:
        """Return whether the others have stepped without this peer. If it then stepped with its own gradients alone, it
        would diverge from them: the averaging of parameters does not average the optimizer's moments."""
        return is_synchronous and swarm_epoch > self.number

    def compare_with_swarm(self, view: SwarmView, is_synchronous: bool, backoff: SyncBackoff, now: float) -> bool:
        """Compare this epoch with the swarm's, and return whether this peer has to load the swarm's state before it
        continues. Once in an epoch any difference counts; after that, one epoch does not: others may just be faster."""
        if not backoff.allows(self.number, view.epoch, is_synchronous, now):
            return False
        if not self.is_compared and view.read_at >= self.began:
            self.is_compared = True
            return view.epoch != self.number
        return abs(view.epoch - self.number) > 1
