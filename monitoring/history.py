"""The history of a run, in memory and on disk: its epochs and the contributions of its peers."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from arguments import TrainerArguments
from common.files import read_json_lines
from training.figures import SwarmMetrics
from utils import LocalMetrics

MAX_POINTS = 4096  # points of a curve in memory, more than a plot has pixels
MAX_POINTS_SENT = 500  # points per request of the status page
# The largest contributors are kept, because untrusted peers can sign records with many new keys.
MAX_PEERS = 10_000
MAX_PEERS_SENT = 50  # with any names, a status stays below MAX_PAGE_BYTES of training/page_client.py


class History(list):
    """The epochs of a run as in metrics.jsonl, oldest first and evenly downsampled if there are many.

    The newest epoch is always the last element. Evaluations, which are few, are also kept separately.
    """

    def __init__(self):
        super().__init__()
        #: results of describe_evaluation, oldest first
        self.validation: list[dict] = []
        #: length in epochs of a segment, of which only the first epoch is kept
        self.stride = 1

    def add(self, entry: dict) -> None:
        """Append an epoch, and drop entries from `gone_back_to` or the same epoch on, which the swarm has repeated."""
        if self and self[-1]["epoch"] >= entry["epoch"]:
            self.forget_from(entry.get("gone_back_to", entry["epoch"]))
        if validation := {name: value for name, value in entry.items() if name.startswith("validation_")}:
            self.validation.append(validation)
            if len(self.validation) > MAX_POINTS:
                self.validation[:] = self.validation[::2]
        if len(self) > 1 and self.find_stretch(self[-1]) == self.find_stretch(self[-2]):
            self.pop()
        while len(self) >= MAX_POINTS:  # if epochs are missing, one pass may remove none
            self.stride *= 2
            first = {self.find_stretch(entry): entry for entry in reversed(self)}
            self[:] = reversed(first.values())
        self.append(entry)

    def find_stretch(self, entry: dict) -> int:
        """Return the number of the entry's segment."""
        return (entry["epoch"] - self[0]["epoch"]) // self.stride

    def make_points(self, since: int) -> dict:
        """Return points for the status page, evenly downsampled: the epochs after `since` as POINT, all evaluations as
        epoch and loss, and the Unix time of the run's start, which identifies it."""
        entries = list(self)
        begin = entries[0]["time"] - entries[0]["epoch_seconds"] if entries else None
        return {
            "begin": begin,
            "training": [[entry[name] for name in POINT] for entry in thin(e for e in entries if e["epoch"] > since)],
            "validation": [[e["validation_epoch"], e["validation_loss"]] for e in thin(self.validation)],
        }

    def forget_from(self, epoch: int) -> None:
        """Drop this epoch and later ones."""
        self.validation[:] = [values for values in self.validation if values["validation_epoch"] < epoch]
        self[:] = [entry for entry in self if entry["epoch"] < epoch]
        if not self:
            self.stride = 1


#: the values of an epoch that are sent to the status page
POINT = ("epoch", "time", "loss", "alive_peers", "samples_per_second")


def thin(entries: Iterable[dict]) -> list[dict]:
    """Return up to MAX_POINTS_SENT entries, including the newest."""
    entries = list(entries)
    return entries[:: -math.ceil(len(entries) / MAX_POINTS_SENT) or -1][::-1]


def load_history(path: Path, prefix: str) -> History:
    """Load the epochs of this run that an earlier monitor wrote, so that a restart continues the curve."""
    history = History()
    needed = {field.name for field in fields(SwarmMetrics)} | {"time", "total_samples"}
    for entry in read_json_lines(path):
        # entries of older versions lack fields
        if entry.get("experiment_prefix") == prefix and needed <= entry.keys():
            history.add(entry)
    return history


@dataclass
class Contribution:
    """The contribution of one peer to the run, as it reports it."""

    total_samples: int  # over all its restarts
    last_epoch: int
    skipped_steps: int
    samples_per_second: float
    client_mode: bool
    last_seen: float  # Unix time of its newest report
    reported_samples: int  # total_samples of its newest record
    expiration_time: float  # of its newest record
    username: str = ""  # as it reports
    counted: float | None = None  # the share of its last updates that counted, as most trainers report it


class Contributions:
    """The contributions of all peers, including those that have left.

    A trainer counts its samples itself. After a restart, its count may be that of an older checkpoint or zero, but its
    earlier contribution still counts.
    """

    def __init__(self, saved: dict[str, dict]):
        self.peers = {label: Contribution(**values) for label, values in saved.items()}

    def update(self, records: dict[str, tuple[LocalMetrics, float]], reports: dict, now: float) -> None:
        """Add the peers' newest records, each with its expiration time, and their reports to hivemind's tracker."""
        for label, (metrics, expiration_time) in records.items():
            known = self.peers.get(label)
            new_samples = metrics.total_samples
            if known and expiration_time <= known.expiration_time:  # an older or the same record
                continue
            if known and metrics.total_samples >= known.reported_samples:
                new_samples -= known.reported_samples
            elif known:  # it continues from an older count: only this epoch's samples are certainly new
                new_samples = min(metrics.samples_accumulated, metrics.total_samples)
            self.peers[label] = Contribution(
                total_samples=new_samples + (known.total_samples if known else 0),
                last_epoch=metrics.epoch,
                skipped_steps=metrics.skipped_steps,
                samples_per_second=metrics.samples_per_second,
                client_mode=metrics.client_mode,
                # if the peer has left: the time of this record, if its expiration is the default
                last_seen=min(now, expiration_time - TrainerArguments.statistics_expiration),
                reported_samples=metrics.total_samples,
                expiration_time=expiration_time,
                username=metrics.username or "",
            )
        for label in self.peers.keys() & records.keys():
            shares = [metrics.counted[label] for metrics, _ in records.values() if label in (metrics.counted or {})]
            self.peers[label].counted = statistics.median_low(shares) if shares else None
        for label in self.peers.keys() & reports.keys():
            # limited, because a peer may report any time
            self.peers[label].last_seen = min(now, max(self.peers[label].last_seen, reports[label].time))
        if len(self.peers) > MAX_PEERS:
            self.peers = dict(self.ranking()[:MAX_PEERS])

    def ranking(self) -> list[tuple[str, Contribution]]:
        """Return the contributors with their labels, largest first."""
        return sorted(self.peers.items(), key=lambda item: -item[1].total_samples)

    def total_samples(self) -> int:
        """Return the samples of all contributors."""
        return sum(peer.total_samples for peer in self.peers.values())

    def describe(self) -> dict:
        """Return the largest contributors, largest first, and the totals for the status page."""
        ranking = self.ranking()  # a copy, because the reader's thread adds peers
        total = sum(peer.total_samples for _, peer in ranking)
        shown = ("username", "total_samples", "samples_per_second", "counted", "last_seen", "client_mode")
        contributors = [
            {"peer": label, "share": peer.total_samples / max(1, total)} | {name: getattr(peer, name) for name in shown}
            for label, peer in ranking[:MAX_PEERS_SENT]
        ]
        return {"total_samples": total, "num_contributors": len(ranking), "contributors": contributors}


def describe_swarm(metrics: dict, history: History) -> dict:
    """Return some of the newest epoch's SwarmMetrics, if any, for the status page, and how many epochs all peers
    averaged."""
    names = ("samples_per_second", "epoch_seconds", "compute_seconds", "waiting_seconds", "averaging_seconds")
    entries = list(history)
    averaged = [entry for entry in entries if entry["averaged_with"] >= entry["alive_peers"]]
    shown = {name: metrics[name] for name in names if metrics}
    return {**shown, "known_epochs": len(entries), "averaged_epochs": len(averaged)}


def pick(values: dict, schema: type) -> dict:
    """Return the values of a dictionary for which a dataclass has fields."""
    return {field.name: values[field.name] for field in fields(schema)}
