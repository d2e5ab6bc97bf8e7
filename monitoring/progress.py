"""The progress of a run and its estimated end, for logs, files, dashboards, the status page and --watch."""

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Iterable

import hivemind

from common.console import format_duration
from swarm.contract import RunContract, choose_contract, fetch_contracts
from swarm.processes import STOP_REQUESTED
from swarm.trust import ContributorRegistry
from utils import Evaluation, LocalMetrics, find_peer_id

RECENT_EPOCHS = 20  # the median of their times predicts the end of a run
SCHEDULE_PERIOD = 20.0  # seconds between two reads of the contract, which changes only with a new run
SCHEDULE_TIMEOUT = 5.0

NUMBER = re.compile(r"\d{1,9}", re.ASCII)


@dataclasses.dataclass
class TrainingSchedule:
    """The length of a run's epochs and of the whole run, as its contract defines them."""

    target_batch_size: int | None = None  # samples per epoch
    total_steps: int | None = None  # epochs until the learning rate is lowest
    local_steps: int = 1  # factor on the samples per epoch, once the run is at epoch local_steps_from
    local_steps_from: int | None = None

    def count_samples(self, epoch: int) -> int:
        """Return the number of samples of all epochs before this one."""
        return self.target_batch_size * (epoch + (self.local_steps - 1) * max(0, epoch - (self.local_steps_from or 0)))


def parse_schedule(contract: RunContract) -> TrainingSchedule:
    """Return the schedule in a contract; numbers that are missing or invalid keep their defaults."""
    names = [item.name for item in dataclasses.fields(TrainingSchedule)]
    texts = {name: contract.contract.get(name, "") for name in names}
    return TrainingSchedule(**{name: int(text) for name, text in texts.items() if NUMBER.fullmatch(text)})


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


def find_evaluation(records: list[tuple[str, LocalMetrics]]) -> Evaluation | None:
    """Return the newest evaluation in the records; of several for one epoch, the one with the median loss."""
    evaluations = [metrics.evaluation for _, metrics in records if metrics.evaluation]
    newest = max((evaluation.epoch for evaluation in evaluations), default=0)
    evaluations = sorted((e for e in evaluations if e.epoch == newest), key=lambda evaluation: evaluation.loss)
    return evaluations[(len(evaluations) - 1) // 2] if evaluations else None


def describe_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Return an evaluation's metrics for files and dashboards; the perplexity is over the predicted tokens only."""
    return {
        "validation_epoch": evaluation.epoch,
        "validation_loss": evaluation.loss,
        "validation_perplexity": perplexity(evaluation.loss),
        "validation_accuracy": evaluation.accuracy,
        **({"validation_unigram_entropy": evaluation.unigram_entropy} if evaluation.unigram_entropy else {}),
    }


def format_evaluation(evaluation: Evaluation) -> str:
    """Return e.g. `loss 5.2500 nats, perplexity 190.6, accuracy 12.5% at epoch 1,000`."""
    return (
        f"loss {evaluation.loss:.4f} nats, perplexity {perplexity(evaluation.loss):,.1f}, accuracy "
        f"{evaluation.accuracy:.1%} at epoch {evaluation.epoch:,}"
    )


def perplexity(loss: float) -> float:
    """Return e to the loss in nats, limited to stay finite."""
    return math.exp(min(loss, 700.0))
