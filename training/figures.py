"""Figures of a run for logs, files and dashboards: its peers' metrics, its schedule, and evaluations.

To print the metrics of a live run:

    python -c "import hivemind, utils; from training.figures import fetch_records; \\
        dht = hivemind.DHT(initial_peers=['/ip4/127.0.0.1/tcp/31337/p2p/XXXX'], start=True, \\
        record_validators=utils.make_validators('my_albert')[0]); print(fetch_records(dht, 'my_albert'))"
"""

import dataclasses
import math
import re

from hivemind import DHT
from hivemind.optim.progress_tracker import LocalTrainingProgress

from swarm.contract import RunContract
from swarm.trust import ContributorRegistry
from utils import FETCH_TIMEOUT, Evaluation, LocalMetrics, fetch_dictionary, find_peer_id, peer_label

NUMBER = re.compile(r"\d{1,9}", re.ASCII)


def fetch_records(
    dht: DHT,
    prefix: str,
    timeout: float = FETCH_TIMEOUT,
    workers: ContributorRegistry | None = None,
    latest: bool = True,
) -> dict[str, tuple[LocalMetrics, float]]:
    """Return all peers' newest metrics by label, each with its expiration time; see `fetch_dictionary`.

    :param workers: the registry to update; with it, only the records of contributors are returned
    """
    records = fetch_dictionary(dht, f"{prefix}_metrics", LocalMetrics, timeout, latest)
    if workers:
        of_workers = workers.select({find_peer_id(public_key): metrics for public_key, (metrics, _) in records.items()})
        records = {key: record for key, record in records.items() if find_peer_id(key) in of_workers}
    return dict(sorted({peer_label(public_key): record for public_key, record in records.items()}.items()))


def fetch_progress(dht: DHT, prefix: str, timeout: float = FETCH_TIMEOUT) -> dict[str, LocalTrainingProgress]:
    """Return the newest progress records of hivemind's tracker in the run's trainers, by peer label."""
    records = fetch_dictionary(dht, f"{prefix}_progress", LocalTrainingProgress, timeout)
    return {peer_label(public_key): progress for public_key, (progress, _) in records.items()}


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


def parse_schedule(contract: RunContract | None) -> TrainingSchedule:
    """Return the schedule in a contract; numbers that are missing or invalid keep their defaults."""
    names = [item.name for item in dataclasses.fields(TrainingSchedule)]
    texts = {name: contract.contract.get(name, "") if contract else "" for name in names}
    return TrainingSchedule(**{name: int(text) for name, text in texts.items() if NUMBER.fullmatch(text)})


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
        **({"validation_bits_per_byte": evaluation.bits_per_byte} if evaluation.bits_per_byte else {}),
    }


def format_evaluation(evaluation: Evaluation) -> str:
    """Return e.g. `loss 5.2500 nats, perplexity 190.6, accuracy 12.5% at epoch 1,000`."""
    bits = f"{evaluation.bits_per_byte:.4f} bits per byte, " if evaluation.bits_per_byte else ""
    return (
        f"loss {evaluation.loss:.4f} nats, perplexity {perplexity(evaluation.loss):,.1f}, {bits}accuracy "
        f"{evaluation.accuracy:.1%} at epoch {evaluation.epoch:,}"
    )


def perplexity(loss: float) -> float:
    """Return e to the loss in nats, limited to stay finite."""
    return math.exp(min(loss, 700.0))
