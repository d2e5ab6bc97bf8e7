"""What is kept of a run, in memory and on disk: its epochs, and who has contributed how much."""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hivemind.optim.progress_tracker import LocalTrainingProgress

from arguments import TrainerArguments
from support.files import read_json_lines
from utils import LocalMetrics, SwarmMetrics, name_peer

MAX_POINTS = 4096  # of a curve, in memory: more than a picture has pixels
MAX_POINTS_SENT = 500  # at once, to a page that draws it
# Strangers can sign records with fresh keys, and each key is a peer to thank: the table keeps those who gave most.
MAX_PEERS, MAX_PEERS_SHOWN = 10_000, 200
MAX_PEERS_SENT = 50  # whatever they are called, a status with them stays below MAX_PAGE_BYTES of machine/page_client.py


class History(list):
    """A run's epochs, oldest first, as in metrics.jsonl: all of a short run, evenly thinned out for a long one.

    The newest epoch is always the last element. Evaluations, which are few, are kept apart as well.
    """

    def __init__(self):
        super().__init__()
        #: what describe_evaluation gave for each, oldest first
        self.validation: list[dict] = []
        #: epochs of which the first one is kept for good
        self.stride = 1

    def add(self, entry: dict) -> None:
        """Append an epoch; those beyond it are of an earlier run with the same name, and are forgotten. A second
        line on the newest epoch takes the place of the first."""
        if self and self[-1]["epoch"] >= entry["epoch"]:
            self.forget_from(0 if entry.get("begins_anew") else entry["epoch"])
        if validation := {name: value for name, value in entry.items() if name.startswith("validation_")}:
            self.validation.append(validation)
            if len(self.validation) > MAX_POINTS:
                self.validation[:] = self.validation[::2]
        if len(self) > 1 and self.find_stretch(self[-1]) == self.find_stretch(self[-2]):
            self.pop()
        while len(self) >= MAX_POINTS:  # where epochs are missing, one thinning may take none
            self.stride *= 2
            first = {self.find_stretch(entry): entry for entry in reversed(self)}
            self[:] = reversed(first.values())
        self.append(entry)

    def find_stretch(self, entry: dict) -> int:
        return (entry["epoch"] - self[0]["epoch"]) // self.stride

    def make_points(self, since: int) -> dict:
        """What the run's page draws, evenly thinned out: the epochs after `since`, and all evaluations.

        :returns: Unix time of the run's begin, which tells one run from another; epochs as POINT; evaluations as epoch
            and loss
        """
        entries = list(self)
        begin = entries[0]["time"] - entries[0]["epoch_seconds"] if entries else None
        return {
            "begin": begin,
            "training": [[entry[name] for name in POINT] for entry in thin(e for e in entries if e["epoch"] > since)],
            "validation": [[e["validation_epoch"], e["validation_loss"]] for e in thin(self.validation)],
        }

    def forget_from(self, epoch: int) -> None:
        self.validation[:] = [values for values in self.validation if values["validation_epoch"] < epoch]
        self[:] = [entry for entry in self if entry["epoch"] < epoch]
        if not self:
            self.stride = 1


#: of an epoch, what a page is sent
POINT = ("epoch", "time", "loss", "alive_peers", "samples_per_second")


def thin(entries: Iterable[dict]) -> list[dict]:
    """MAX_POINTS_SENT of them at most, the newest among them."""
    entries = list(entries)
    return entries[:: -math.ceil(len(entries) / MAX_POINTS_SENT) or -1][::-1]


def load_history(path: Path, prefix: str) -> History:
    """The epochs of this run that an earlier monitor wrote, so that a restart continues the curve."""
    history = History()
    needed = {field.name for field in fields(SwarmMetrics)} | {"time", "total_samples"}
    for entry in read_json_lines(path):
        # those of older versions lack fields
        if entry.get("experiment_prefix") == prefix and needed <= entry.keys():
            history.add(entry)
    return history


@dataclass
class Contribution:
    """What one peer has given to the run, by its own account."""

    total_samples: int  # in all, over its restarts
    last_epoch: int
    skipped_steps: int
    samples_per_second: float
    client_mode: bool
    last_seen: float  # Unix time of its newest report
    reported_samples: int  # total_samples of its newest record
    expiration_time: float  # of its newest record
    username: str = ""  # by its own word


class Contributions:
    """Who has given how much, also those who have left.

    A trainer counts its samples itself, and continues counting after a restart from its checkpoint; one that starts
    without has an older number, or zero. What it contributed before still counts.

    :param saved: what `to_json` gave
    """

    def __init__(self, saved: dict[str, dict]):
        names = {field.name for field in fields(Contribution)}
        known = {label: {"username": "", **values} for label, values in saved.items()}  # older ones have no names
        self.peers = {label: Contribution(**values) for label, values in known.items() if names == values.keys()}

    def update(
        self,
        records: dict[str, tuple[LocalMetrics, float]],
        reports: dict[str, LocalTrainingProgress],
        now: float,
    ) -> None:
        """Take in the peers' newest records, each with its expiration time.

        :param reports: of those who are there: what they have told of their progress within the epoch
        :param now: Unix time
        """
        for label, (metrics, expiration_time) in records.items():
            known = self.peers.get(label)
            if known is None:
                gave = metrics.total_samples
            elif expiration_time <= known.expiration_time:  # a read that missed its newest record, or no news
                continue
            elif metrics.total_samples >= known.reported_samples:
                gave = known.total_samples + metrics.total_samples - known.reported_samples
            else:  # it went on from an older count: of what it has given since, this epoch's samples are certain
                gave = known.total_samples + min(metrics.samples_accumulated, metrics.total_samples)
            self.peers[label] = Contribution(
                total_samples=gave,
                last_epoch=metrics.epoch,
                skipped_steps=metrics.skipped_steps,
                samples_per_second=metrics.samples_per_second,
                client_mode=metrics.client_mode,
                # of a peer that is gone: when it has made this record, unless its flag is not the default
                last_seen=min(now, expiration_time - TrainerArguments.statistics_expiration),
                reported_samples=metrics.total_samples,
                expiration_time=expiration_time,
                username=metrics.username or "",
            )
        for label in self.peers.keys() & reports.keys():
            # its own word, which may be any number
            self.peers[label].last_seen = min(now, max(self.peers[label].last_seen, reports[label].time))
        if len(self.peers) > MAX_PEERS:
            self.peers = dict(self.ranking()[:MAX_PEERS])

    def ranking(self) -> list[tuple[str, Contribution]]:
        return sorted(self.peers.items(), key=lambda item: -item[1].total_samples)

    def total_samples(self) -> int:
        return sum(peer.total_samples for peer in self.peers.values())

    def make_rows(self) -> list[dict]:
        """Rows of the table of contributors: the most generous first, and one row for all others."""
        ranking, total = self.ranking(), max(1, self.total_samples())
        rows = [
            {
                "peer": name_peer(label, peer.username),
                "samples": peer.total_samples,
                "share": f"{peer.total_samples / total:.1%}",
                "samples/s": round(peer.samples_per_second, 1),
                "epoch": peer.last_epoch,
                "last seen (UTC)": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(peer.last_seen)),
                "connection": "client" if peer.client_mode else "public",
                "skipped steps": peer.skipped_steps,
            }
            for label, peer in ranking[:MAX_PEERS_SHOWN]
        ]
        if others := [peer for _, peer in ranking[MAX_PEERS_SHOWN:]]:
            samples = sum(peer.total_samples for peer in others)
            rest = {"peer": f"{len(others)} others", "samples": samples, "share": f"{samples / total:.1%}"}
            rows.append(dict.fromkeys(rows[0], "") | {"samples/s": 0.0, "epoch": 0, "skipped steps": 0} | rest)
        return rows

    def describe(self) -> dict:
        """What the run's page shows: the most generous, and how many there are."""
        ranking, total = self.ranking(), self.total_samples()
        shown = ("username", "total_samples", "samples_per_second", "last_seen", "client_mode")
        contributors = [
            {"peer": label, "share": peer.total_samples / max(1, total)} | {name: getattr(peer, name) for name in shown}
            for label, peer in ranking[:MAX_PEERS_SENT]
        ]
        return {"total_samples": total, "num_contributors": len(ranking), "contributors": contributors}

    def to_json(self) -> dict[str, dict]:
        return {label: asdict(peer) for label, peer in self.ranking()}


def describe_swarm(metrics: SwarmMetrics | None, history: History) -> dict:
    """What the run's page shows of the newest epoch, and how many of those that are known all peers have averaged."""
    names = ("samples_per_second", "epoch_seconds", "compute_seconds", "waiting_seconds", "averaging_seconds")
    entries = list(history)
    averaged = sum(entry["averaged_with"] >= entry["alive_peers"] for entry in entries)
    shown = {name: getattr(metrics, name) for name in names} if metrics else {}
    return {**shown, "known_epochs": len(entries), "averaged_epochs": averaged}


def pick(values: dict, schema: type) -> dict:
    """Of a dictionary what a dataclass has fields for."""
    return {field.name: values[field.name] for field in fields(schema)}
