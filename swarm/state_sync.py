"""Catching up with the swarm: load the newest state, or only the step that this peer has missed."""

import concurrent.futures
import contextlib
import time
from collections.abc import Sequence

from common.signals import STOP_REQUESTED
from swarm import logger
from swarm.epoch import RETRY_AFTER, SYNC_RETRY_PERIOD, SyncBackoff
from swarm.optimizer_state import StateAverager, copy_tensors
from swarm.progress import PeerTracker

PROGRESS_PERIOD = 5.0  # seconds between two log lines about a running download


class StateSync:
    """The downloads of a peer that has fallen behind, and the backoff between them."""

    def __init__(self, tracker: PeerTracker, state_averager: StateAverager):
        self.tracker = tracker
        self.state_averager = state_averager
        self.backoff = SyncBackoff()

    def load(self, min_epoch: int, contributors: Sequence[bytes], is_synchronous: bool, can_replay: bool) -> str | None:
        """Load the newest state of the swarm.

        :param min_epoch: load an earlier state only after some seconds without this one
        :param contributors: the ids of peers of which more than half have to describe the same state
        :param is_synchronous: whether all peers step together; otherwise, nearly the same state is enough
        :param can_replay: whether a peer that is one step behind first tries to load the gradients of that step alone
        :returns: the first words of a log line; None if no peer has sent a state. Then silent peers no longer count
        """
        if can_replay and self.state_averager.local_epoch + 1 == min_epoch:
            if self._replay_missed_step():
                return "made the step to"
            if self.tracker.view.epoch < self.backoff.min_epoch:
                pause = SYNC_RETRY_PERIOD if self._doubt_peers_ahead(is_synchronous) else RETRY_AFTER
                self.backoff.not_before = time.monotonic() + pause
                return None
        if loaded := self.download(min_epoch, contributors=contributors, is_synchronous=is_synchronous):
            self.state_averager.apply_downloaded_state(*loaded)
            return "loaded the state of"
        if not STOP_REQUESTED.is_set():
            logger.warning("no peer sent its state: continuing with the local one")
            self._doubt_peers_ahead(is_synchronous)
            self.backoff.not_before = time.monotonic() + SYNC_RETRY_PERIOD
        return None

    def _doubt_peers_ahead(self, is_synchronous: bool) -> bool:
        """Ping the peers that are ahead. If they are less than two thirds of the swarm, count it against them that they
        serve no state, and return True: a hostile peer may have made a step with some others."""
        known = self.tracker.trust.select_known(self.tracker.present)
        ahead = [peer_id for peer_id, record in known.items() if record.epoch > self.state_averager.local_epoch]
        is_part = is_synchronous and len(ahead) < len(known) and 3 * len(ahead) < 2 * (1 + len(known))
        for peer_id in ahead if is_part else ():
            self.tracker.trust.count_missed_round(peer_id, "its state is not that of most peers ahead")
        self.tracker.ping_quiet_peers(ahead)
        return is_part

    def download(self, min_epoch: int, is_step: bool = False, **options) -> tuple[dict, list] | None:
        """Return a downloaded state or step, see StateAverager.start_download; None if no peer sent it or at a stop."""
        averager = self.state_averager
        own = dict(avoid=[*self.tracker.trust.excluded], clients=self.tracker.list_clients())
        future = averager.start_download(min_epoch, is_step, **own, **options)
        last_report = time.monotonic()
        progress = averager.download_progress
        while not STOP_REQUESTED.is_set():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return future.result(timeout=0.5)
            if progress.elements and time.monotonic() >= last_report + PROGRESS_PERIOD:
                last_report = time.monotonic()
                mbits = progress.bytes * 8e-3 / max(1, progress.milliseconds)
                share = progress.elements / progress.total_elements
                size = f"{progress.bytes / 1e6:.1f} MB at {mbits:.1f} Mbit/s"
                logger.info(f"downloading the swarm's {'step' if is_step else 'state'}: {share:.0%}, {size}")
        return None

    def _replay_missed_step(self) -> bool:
        """Make the last step of the swarm with the gradients that other peers have averaged, and which are fewer bytes
        than a state; return whether a peer that started from this very state has sent them."""
        if (loaded := self.download(0, is_step=True, contributors=self.tracker.list_contributors())) is None:
            return False
        metadata, gradients = loaded
        averager = self.state_averager
        with self.state_averager.grad_averager.get_tensors() as averaged_gradients:
            copy_tensors(averaged_gradients, gradients)
        before = (averager.local_epoch, averager.lineage)
        averager.group_id = metadata["group"]
        averager.step(increment_epoch=True, optimizer_step=True)
        self.state_averager.grad_averager.last_step = *before, averager.group_id  # for peers that were late as well
        return True

    def check_staleness(self) -> None:
        """Compare the loaded state with the swarm. If this peer can never catch up, log why, and try less often."""
        self.tracker.refresh_now()
        epochs = self.tracker.view.epoch - self.state_averager.local_epoch
        if epochs <= 0:
            self.backoff.stale_downloads = 0
            return
        megabytes = self.state_averager.download_progress.bytes / 1e6
        seconds = max(1, self.state_averager.download_progress.milliseconds) / 1000
        if pause := self.backoff.record_stale_download(self.tracker.view.epoch, seconds, time.monotonic()):
            took = f"a download of {megabytes:.1f} MB took {seconds:.1f} s ({megabytes * 8 / seconds:.1f} Mbit/s)"
            made = f"meanwhile the swarm made {epochs} epochs of about {seconds / epochs:.1f} s"
            needs = "It takes a faster connection, or a larger `target_batch_size` for all"
            logger.warning(f"cannot catch up: {took}, and {made}. {needs}. Next try in {pause:.0f} s")
