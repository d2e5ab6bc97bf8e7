"""The progress of a run and its estimated end, from the records of its trainers."""

import time
from collections.abc import Iterable

import hivemind

from swarm.contract import RunContract, choose_contract, fetch_contracts
from swarm.processes import STOP_REQUESTED
from swarm.trust import ContributorRegistry
from training.figures import TrainingSchedule, parse_schedule
from training.progress import measure_progress
from utils import LocalMetrics, find_peer_id

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

    def measure(self, dht, epoch: int, records: list, recent_seconds: Iterable[float], workers) -> dict[str, float]:
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
