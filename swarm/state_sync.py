"""Catching up with the swarm: load the newest state, or only the step that this peer has missed."""

import logging
import time
from collections.abc import Sequence

from swarm.epoch import RETRY_AFTER, SyncBackoff
from swarm.gradients import GradientAverager
from swarm.progress import PeerTracker
from swarm.states import StateAverager
from swarm.uplink import Uplink

logger = logging.getLogger("swarm")

MIN_DOWNLOAD_TIMEOUT = 600.0  # seconds


class StateSync:
    """Loads what this peer lacks of the swarm's state, and decides when it may try again."""

    def __init__(
        self, tracker: PeerTracker, state_averager: StateAverager, grad_averager: GradientAverager, uplink: Uplink
    ):
        self.tracker, self.uplink = tracker, uplink
        self.state_averager, self.grad_averager = state_averager, grad_averager
        self.backoff = SyncBackoff()

    def load(self, min_epoch: int, donors: Sequence[bytes], is_one_step_behind: bool) -> str | None:
        """Load the newest state of the swarm.

        :param min_epoch: load an earlier state only after some seconds without this one
        :param donors: the ids of peers of which more than half have to describe the same state
        :param is_one_step_behind: whether the gradients of the missed step are enough
        :returns: how this peer has come to it, in words for the log; None if no peer has sent a state. Then the peers
            that do not answer no longer count, so that training continues without them
        """
        silent, timeout = list(self.tracker.trust.excluded), self.download_timeout
        if is_one_step_behind:
            if self._replay_missed_step(silent, timeout):
                return "made the step to"
            if self.tracker.global_epoch < self.backoff.min_epoch:
                self.backoff.record_failure(time.monotonic(), RETRY_AFTER)
                return None
        if self.state_averager.load_state_from_peers(min_epoch, donors, avoid=silent, timeout=timeout):
            return "took over the state of"
        epoch = self.state_averager.local_epoch
        ahead = [peer_id for peer_id, record in self.tracker.present.items() if record.epoch > epoch]
        logger.warning("no peer sent its state: continuing with the local one")
        self.tracker.ping_silent_peers(ahead)
        self.backoff.record_failure(time.monotonic())
        return None

    @property
    def download_timeout(self) -> float:
        """The timeout of a download, in seconds."""
        return max(MIN_DOWNLOAD_TIMEOUT, self.uplink.compute_transfer_timeout(12 * self.state_averager.total_size))

    def _replay_missed_step(self, avoid: Sequence[bytes], timeout: float) -> bool:
        """Make the last step of the swarm with the gradients that other peers have averaged.

        From the same state, the same gradients lead to the same state, and are fewer bytes.

        :returns: whether a peer that has started from this very state has sent them
        """
        loaded = self.state_averager.download_missed_step(self.tracker.list_donors(), avoid=avoid, timeout=timeout)
        if loaded is None:
            return False
        gradients, group_id = loaded
        with self.grad_averager.get_tensors() as averaged_gradients:
            for tensor, gradient in zip(averaged_gradients, gradients, strict=True):
                tensor.copy_(gradient)
        before = self.state_averager.local_epoch, self.state_averager.lineage
        self.state_averager.group_id = group_id
        self.state_averager.step(increment_epoch=True, optimizer_step=True)
        self.grad_averager.last_step = *before, group_id  # for peers that were late as well
        return True

    def check_staleness(self) -> None:
        """Compare the loaded state with the swarm. If this peer can never catch up, log why, and try less often."""
        self.tracker.refresh_now()
        epochs = self.tracker.global_epoch - self.state_averager.local_epoch
        if epochs <= 0:
            self.backoff.stale_downloads = 0
            return
        size, _, milliseconds = self.state_averager.received
        megabytes, seconds = size / 1e6, max(1, milliseconds) / 1000
        # the least that has to arrive within an epoch, at the same bandwidth, is a step
        step_share = min(1.0, self.state_averager.count_step_size_bits() / 8e6 / megabytes)
        is_too_slow = step_share * epochs > 1
        pause = self.backoff.record_stale_download(self.tracker.global_epoch, seconds, is_too_slow, time.monotonic())
        if pause:
            logger.warning(
                f"cannot catch up: a download of {megabytes:.1f} MB took {seconds:.1f} s "
                f"({megabytes * 8 / seconds:.1f} Mbit/s), and meanwhile the swarm made {epochs} epochs of about "
                f"{seconds / epochs:.1f} s. It takes a faster connection, or a larger --target_batch_size for all. "
                f"Next try in {pause:.0f} s"
            )
