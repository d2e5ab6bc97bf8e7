"""The progress of a run and its estimated end, for logs, files, dashboards and the status page."""

import math
import statistics
import time
from collections.abc import Iterable

import hivemind

from common.console import format_duration
from swarm.contract import RunContract, choose_contract, fetch_contracts
from swarm.processes import STOP_REQUESTED
from swarm.trust import ContributorRegistry
from training.figures import TrainingSchedule, parse_schedule
from utils import LocalMetrics, find_peer_id

RECENT_EPOCHS = 20  # the median of their times predicts the end of a run
SCHEDULE_PERIOD = 20.0  # seconds between two reads of the contract, which changes only with a new run
SCHEDULE_TIMEOUT = 5.0


class RunCourse:
    """An estimator of a run's progress from its trainers' records, and from the schedule in their contracts."""

    def __init__(self, prefix: str):
        self.prefix, self.schedule, self.next_look = prefix, TrainingSchedule(), 0.0
        #: the contract of most peers that have worked
        self.contract: RunContract | None = None
        self.is_gone = False

    def look_at_contract(self, dht: hivemind.DHT, workers: ContributorRegistry) -> None:
        """Update the contract if that is due. This may wait for the DHT."""
        now = time.monotonic()
        if now < self.next_look or STOP_REQUESTED.is_set():
            return
        found = fetch_contracts(dht, self.prefix, SCHEDULE_TIMEOUT)
        if contract := choose_contract(it for key, it in found.items() if find_peer_id(key) in workers.ids):
            self.contract, self.schedule, self.next_look = contract, parse_schedule(contract), now + SCHEDULE_PERIOD
        elif self.is_gone:
            self.contract = None  # the next run of this name has its own settings
        self.is_gone = not contract  # once may mean that the DHT did not answer

    def measure(
        self,
        dht: hivemind.DHT,
        epoch: int,
        records: list[tuple[str, LocalMetrics]],
        recent_seconds: Iterable[float],
        workers: ContributorRegistry,
    ) -> dict[str, float]:
        """Update the contract, and return the result of measure_progress. This may wait for the DHT.

        :param records: the trainers' newest records
        """
        self.look_at_contract(dht, workers)
        final_epoch = find_final_epoch(records, self.schedule.total_steps)
        return measure_progress(epoch, final_epoch, self.schedule, recent_seconds)


def find_final_epoch(records: list[tuple[str, LocalMetrics]], total_steps: int | None) -> int | None:
    """Return the final epoch of most of these peers, or None if it is unknown.

    :param total_steps: the final epoch of peers that report none
    """
    epochs = [metrics.final_epoch or total_steps for _, metrics in records if metrics.final_epoch or total_steps]
    return max(set(epochs), key=epochs.count) if epochs else total_steps


def measure_progress(
    epoch: int, final_epoch: int | None, schedule: TrainingSchedule, recent_seconds: Iterable[float]
) -> dict[str, float]:
    """Return the swarm's progress and estimated time left, as far as known, by the names of files and dashboards.

    :param recent_seconds: the seconds of each of its last RECENT_EPOCHS epochs
    """
    progress, recent = {}, [seconds for seconds in recent_seconds if seconds > 0]
    if schedule.target_batch_size:
        samples = schedule.count_samples(epoch)
        progress = {"target_batch_size": schedule.count_samples(epoch + 1) - samples, "swarm_samples": samples}
    if final_epoch:
        progress["final_epoch"] = final_epoch
        if recent:
            progress["seconds_left"] = max(0, final_epoch - epoch) * statistics.median(recent)
    return progress


def format_progress(epoch: int, progress: dict[str, float]) -> str:
    """Return `12% of 1,000 epochs, ends in 2 h 5 min`, or the share of a trainer's own samples, as far as known."""
    if "sample_limit" in progress:
        done, total, what = progress["own_samples"], progress["sample_limit"], "samples of its data"
    elif "final_epoch" in progress:
        done, total, what = epoch, progress["final_epoch"], "epochs"
    else:
        return ""
    left = f", ends in {format_duration(progress['seconds_left'])}" if progress.get("seconds_left") else ""
    return f"{math.floor(1000 * min(1.0, done / total)) / 10:g}% of {total:,} {what}{left}"


def format_samples(progress: dict[str, float]) -> str:
    """Return `491,520 samples so far, 4,096 an epoch` of the swarm, or an empty string if that is unknown."""
    if "swarm_samples" not in progress:
        return ""
    return f"{progress['swarm_samples']:,} samples so far, {progress['target_batch_size']:,} an epoch"
