"""How far a run has come, and when it ends: for lines of a log, files, dashboards, the status page and --watch."""

import math
import statistics
import time
from collections.abc import Iterable

import hivemind

from support.console import format_duration
from swarm.contract import TrainingSchedule, choose_contract, fetch_contracts, parse_schedule
from swarm.processes import STOP_REQUESTED
from utils import ContributorRegistry, LocalMetrics, RunContract, find_peer_id

RECENT_EPOCHS = 20  # whose median time tells when a run ends
SCHEDULE_PERIOD = 20.0  # seconds between two looks at what changes only when another run begins
SCHEDULE_TIMEOUT = 5.0


class RunCourse:
    """How far a run has come, for those who see what its trainers publish: the contracts have the schedule."""

    def __init__(self, prefix: str):
        self.prefix, self.schedule, self.next_look = prefix, TrainingSchedule(), 0.0
        #: that of most who have worked
        self.contract: RunContract | None = None
        self.is_gone = False

    def look_at_contract(self, dht: hivemind.DHT, workers: ContributorRegistry) -> None:
        """Now and then, find out by which settings most train that have worked; it may wait for the DHT."""
        now = time.monotonic()
        if now < self.next_look or STOP_REQUESTED.is_set():
            return
        found = fetch_contracts(dht, self.prefix, SCHEDULE_TIMEOUT)
        if contract := choose_contract(it for key, it in found.items() if find_peer_id(key) in workers.ids):
            self.contract, self.schedule, self.next_look = contract, parse_schedule(contract), now + SCHEDULE_PERIOD
        elif self.is_gone:
            self.contract = None  # the next run of this name has settings of its own
        self.is_gone = not contract  # or the DHT has not answered

    def measure(
        self,
        dht: hivemind.DHT,
        epoch: int,
        records: list[tuple[str, LocalMetrics]],
        recent_seconds: Iterable[float],
        workers: ContributorRegistry,
    ) -> dict[str, float]:
        """Like measure_progress; it may wait for the DHT.

        :param records: the trainers' newest ones
        """
        self.look_at_contract(dht, workers)
        final_epoch = find_final_epoch(records, self.schedule.total_steps)
        return measure_progress(epoch, final_epoch, self.schedule, recent_seconds)


def find_final_epoch(records: list[tuple[str, LocalMetrics]], total_steps: int | None) -> int | None:
    """The epoch at which most of these peers end; None while it is not known.

    :param total_steps: where those end that report no epoch of their own
    """
    epochs = [metrics.final_epoch or total_steps for _, metrics in records if metrics.final_epoch or total_steps]
    return max(set(epochs), key=epochs.count) if epochs else total_steps


def measure_progress(
    epoch: int, final_epoch: int | None, schedule: TrainingSchedule, recent_seconds: Iterable[float]
) -> dict[str, float]:
    """How far the swarm has come, and when it ends, by the names of files and dashboards; without what is not known.

    :param recent_seconds: of its last epochs, each; RECENT_EPOCHS of them will do
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
    """`12% of 1,000 epochs, ends in 2 h 5 min`, or of a trainer's own samples; as much of it as is known."""
    if "sample_limit" in progress:
        done, total, what = progress["own_samples"], progress["sample_limit"], "samples of its data"
    elif "final_epoch" in progress:
        done, total, what = epoch, progress["final_epoch"], "epochs"
    else:
        return ""
    left = f", ends in {format_duration(progress['seconds_left'])}" if progress.get("seconds_left") else ""
    return f"{math.floor(1000 * min(1.0, done / total)) / 10:g}% of {total:,} {what}{left}"


def format_samples(progress: dict[str, float]) -> str:
    """`491,520 samples so far, 4,096 an epoch`: of the swarm; nothing where that is not known."""
    if "swarm_samples" not in progress:
        return ""
    return f"{progress['swarm_samples']:,} samples so far, {progress['target_batch_size']:,} an epoch"
