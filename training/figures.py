"""Figures of a run for logs, files and dashboards: its peers' metrics and their aggregation, schedule, evaluations."""

import dataclasses
import itertools
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from hivemind import DHT
from hivemind.optim.progress_tracker import LocalTrainingProgress

from swarm.config import count_batches
from swarm.contract import RunContract
from utils import (
    FETCH_TIMEOUT,
    Evaluation,
    LocalMetrics,
    fetch_dictionary,
    filter_plausible_records,
    find_peer_id,
    make_worker_key,
    peer_label,
)

MAX_LOSS_DEVIATION = 0.25  # relative to the median; for the mean loss over the few batches of an honest peer
MIN_CONTRIBUTOR_TIMEOUT = 60.0  # seconds without a new epoch of a contributor, until any peer may become one
MAX_CONTRIBUTOR_TIMEOUT = 3 * 3600.0  # the same, whatever times of epochs they claim


class ContributorRegistry:
    """The peers that have contributed to a run. Metrics of others do not count, under any number of keys.

    Contributors name the peers with which they averaged, which makes these contributors for a while. All peers that
    publish metrics count at the start, and again if no contributor has finished an epoch for a while.
    """

    def __init__(self, ids: Iterable[bytes] = ()):
        #: until when each contributor counts if others do not name it again, and those that have metrics
        self.ids: dict[bytes, float] = {}
        self.present: set[bytes] = set()
        self.epochs: dict[bytes, int] = {}
        #: the run's schedule, which the reader of its contract keeps up to date
        self.schedule = TrainingSchedule()
        #: the time at which the contributors are dropped, unless one of them finishes an epoch
        self.until = 0.0
        self.trust(ids)

    def trust(self, ids: Iterable[bytes]) -> None:
        """Add contributors, which count for a while even if none of them has metrics."""
        self.ids |= dict.fromkeys(ids, time.monotonic() + MIN_CONTRIBUTOR_TIMEOUT)
        self.until = max(self.until, *self.ids.values(), 0.0)

    def select(self, records: Mapping[bytes, LocalMetrics]) -> set[bytes]:
        """Update the contributors by the newest metrics of each peer, and return the ids of those that have some."""
        now = time.monotonic()
        epochs = {peer_id: metrics.epoch for peer_id, metrics in records.items()}
        present = {peer_id for peer_id in epochs if self.ids.get(peer_id, 0.0) > now}
        has_epoch = any(epochs[peer_id] != self.epochs.get(peer_id) for peer_id in present)
        is_open = not has_epoch and now >= self.until
        present = set(epochs) if is_open else present
        if present and (has_epoch or is_open):
            seconds = statistics.median(records[peer_id].epoch_seconds for peer_id in present)
            seconds *= self.schedule.compare_lengths(int(statistics.median(epochs[peer_id] for peer_id in present)))
            self.until = now + min(max(MIN_CONTRIBUTOR_TIMEOUT, 3 * seconds), MAX_CONTRIBUTOR_TIMEOUT)
        self.epochs = epochs
        newest = statistics.median(epochs[peer_id] for peer_id in present) if present else 0
        names = {make_worker_key(peer_id): peer_id for peer_id in epochs}
        groups = {
            peer_id: {peer_id, *(names[name] for name in records[peer_id].partners or () if name in names)}
            for peer_id in present
            if epochs[peer_id] >= newest - 1
        }
        # A key that was in one round may name others for as long as it likes. So most others must still name it.
        namers = find_named(groups.values()) & groups.keys()
        named = find_named([groups[peer_id] for peer_id in namers]) or groups
        self.ids = {peer_id: until for peer_id, until in self.ids.items() if until > now}
        self.ids |= dict.fromkeys({*named, *(present if is_open else ())}, self.until)
        self.present = self.ids.keys() & epochs.keys()
        return self.present


def find_named(groups: Collection[set[bytes]]) -> set[bytes]:
    """Return the peers that most contributors name, given the peers that each of them names, itself included. If the
    swarm averages in several groups, most of a typical group are enough."""
    typical = statistics.median_low(map(len, groups)) if groups else 0
    quorum = min(max(2, typical // 2 + 1), len(groups) // 2 + 1)
    counts = Counter(itertools.chain.from_iterable(groups))
    return {peer_id for peer_id, count in counts.items() if count >= quorum}


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


def fetch_progress(dht: DHT, prefix: str) -> dict[str, LocalTrainingProgress]:
    """Return the newest progress records of the run's trainers, in the format of hivemind's tracker, by peer label."""
    records = fetch_dictionary(dht, f"{prefix}_progress", LocalTrainingProgress)
    return {peer_label(public_key): progress for public_key, (progress, _) in records.items()}


@dataclasses.dataclass
class SwarmMetrics:
    """The swarm's metrics at its newest epoch."""

    epoch: int
    loss: float  # nats per batch, the mean over all peers' batches
    alive_peers: int  # peers whose last report is for this epoch or the previous one
    samples: int  # contributions of these peers
    samples_per_second: float  # total of these peers
    epoch_seconds: float  # median over these peers, as are the parts that it consists of:
    compute_seconds: float  # the rest after waiting and averaging
    waiting_seconds: float
    averaging_seconds: float
    bytes_sent: int  # total of these peers in this epoch
    bytes_received: int
    averaged_with: int  # peers in the averaged gradient: the smallest number that any of these peers reports
    grad_norm: float  # median over these peers
    learning_rate: float  # median over these peers
    skipped_steps: int  # total of these peers so far


def average_loss(records: list[LocalMetrics]) -> float:
    """Return the mean loss over all peers' batches, in nats, robust to one malicious peer of at least three."""
    losses = [(metrics.loss / metrics.mini_steps, metrics.mini_steps) for metrics in records if metrics.mini_steps]
    if len(losses) > 2:
        median_loss, median_count = (statistics.median_low(column) for column in zip(*losses, strict=True))
        limit = MAX_LOSS_DEVIATION * median_loss
        # peers far from the median do not count, and no peer counts much more than the others
        losses = [(loss, min(count, 2 * median_count)) for loss, count in losses if abs(loss - median_loss) <= limit]
    return math.fsum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def select_live(
    records: list[tuple[str, LocalMetrics]], progress: Mapping[str, LocalTrainingProgress]
) -> tuple[list[tuple[str, LocalMetrics]], int | None]:
    """Return the records of the peers that report their progress, as metrics outlive their peer by ten minutes, and the
    newest epoch that more than a quarter of them have reached. Records beyond the next epoch do not count.

    :param progress: the newest progress record of each peer, by label; without any, all records are returned, and None
    """
    live = [(label, metrics) for label, metrics in records if label in progress]
    if not live:
        return records, None
    # the metrics of a peer that has restarted are old, and the progress of one that loads a state names an old epoch
    epochs = sorted((max(metrics.epoch, progress[label].epoch) for label, metrics in live), reverse=True)
    newest = epochs[len(epochs) // 4]
    return [(label, metrics) for label, metrics in live if metrics.epoch <= newest + 1], newest


def aggregate_metrics(
    records: list[tuple[str, LocalMetrics]], last_epoch: int | None = None, newest: int | None = None
) -> SwarmMetrics | None:
    """Aggregate all peers' plausible records into the metrics of their newest epoch, or None without any batch.

    Peers do not report at the same time, so the previous epoch counts too. Older records belong to peers that left.

    :param newest: an upper bound of the newest epoch
    """
    plausible = [metrics for _, metrics in filter_plausible_records(records, last_epoch)]
    newest_epoch = max((metrics.epoch for metrics in plausible), default=0)
    newest_epoch = newest_epoch if newest is None else min(newest_epoch, newest)
    current = [metrics for metrics in plausible if metrics.epoch >= newest_epoch - 1]
    if not any(metrics.mini_steps for metrics in current):
        return None
    names = ("epoch_seconds", "waiting_seconds", "averaging_seconds", "grad_norm", "learning_rate")
    medians = {name: statistics.median(getattr(metrics, name) for metrics in current) for name in names}
    names = ("samples_per_second", "bytes_sent", "bytes_received", "skipped_steps")
    totals = {name: sum(getattr(metrics, name) for metrics in current) for name in names}
    return SwarmMetrics(
        epoch=newest_epoch,
        loss=average_loss(current),
        alive_peers=len(current),
        samples=sum(metrics.samples_accumulated for metrics in current),
        compute_seconds=compute_seconds(medians),
        averaged_with=min(metrics.averaged_with for metrics in current),
        **medians,
        **totals,
    )


def compute_seconds(seconds: dict[str, float]) -> float:
    """Return the seconds of an epoch without those spent waiting and averaging."""
    return max(0.0, seconds["epoch_seconds"] - seconds["waiting_seconds"] - seconds["averaging_seconds"])


@dataclasses.dataclass
class TrainingSchedule:
    """The length of a run's epochs and of the whole run, as its contract defines them."""

    target_batch_size: int | None = None  # samples per epoch
    total_steps: int | None = None  # epochs until the learning rate is lowest
    local_steps: int = 1  # factor on the samples per epoch, once the run is at epoch local_steps_from
    local_steps_from: int | None = None

    def count_samples(self, epoch: int) -> int:
        """Return the number of samples of all epochs before this one."""
        return self.target_batch_size * count_batches(epoch, self.local_steps, self.local_steps_from)

    def compare_lengths(self, epoch: int) -> float:
        """Return how many times as many samples this epoch takes as the one before."""
        if not self.target_batch_size:
            return 1.0
        before, begin, end = map(self.count_samples, (epoch - 1, epoch, epoch + 1))
        return (end - begin) / (begin - before)


def parse_schedule(contract: RunContract | None) -> TrainingSchedule:
    """Return the schedule in a contract; numbers that are missing or invalid keep their defaults."""
    names = [item.name for item in dataclasses.fields(TrainingSchedule)]
    texts = {name: contract.contract.get(name, "") if contract else "" for name in names}
    return TrainingSchedule(**{name: int(it) for name, it in texts.items() if re.fullmatch(r"\d{1,9}", it, re.ASCII)})


def find_evaluation(records: list[tuple[str, LocalMetrics]]) -> Evaluation | None:
    """Return the newest evaluation in the records; of several for one epoch, the one with the median loss."""
    evaluations = [metrics.evaluation for _, metrics in records if metrics.evaluation]
    newest = max((evaluation.epoch for evaluation in evaluations), default=0)
    evaluations = sorted((e for e in evaluations if e.epoch == newest), key=lambda evaluation: evaluation.loss)
    return evaluations[(len(evaluations) - 1) // 2] if evaluations else None


def describe_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Return an evaluation's metrics for files and dashboards; the perplexity is over the predicted tokens only."""
    values = evaluation.dict(exclude={"samples"}, exclude_none=True) | {"perplexity": perplexity(evaluation.loss)}
    return {f"validation_{name}": value for name, value in values.items()}


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
