"""Curves that continue, contributors who are never lost, a trainer's curves, and the reads of a run's records."""

import json
import re
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace

import numpy
import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import get_dht_time
from processes import make_prefix, wait_until
from records import make_metrics, read_wandb_history
from swarms import TINY

from arguments import ReportArguments, SwarmArguments
from common.console import UserError
from monitoring.history import Contributions, History, load_history
from monitoring.reader import RunReader
from monitoring.report import RunReport
from training.figures import aggregate_metrics


def make_entry(epoch: int, **fields) -> dict:
    """A line of metrics.jsonl."""
    metrics = aggregate_metrics([("a", make_metrics(epoch))])
    entry = {"experiment_prefix": "run", "time": 1e9 + 10 * epoch, "total_samples": 64 * epoch, **vars(metrics)}
    return {**entry, **fields}


def test_history_thins_out_evenly(monkeypatch):
    monkeypatch.setattr("monitoring.history.MAX_POINTS", 100)
    history = History()
    for epoch in range(1, 10_001):
        history.add({"epoch": epoch})
        assert history[-1]["epoch"] == epoch and len(history) <= 100
    epochs = [entry["epoch"] for entry in history]
    gaps = numpy.diff(epochs[:-1])
    assert epochs[0] == 1 and len(epochs) >= 50
    assert set(gaps) == {history.stride} and 0 < epochs[-1] - epochs[-2] <= history.stride

    # the swarm continues from an older state
    history.add({"epoch": 5_000})
    assert [entry["epoch"] for entry in history] == [epoch for epoch in epochs if epoch < 5_000] + [5_000]

    # an observer that misses most epochs
    history = History()
    for epoch in range(1, 10_001, 5):
        history.add({"epoch": epoch})
        assert history[-1]["epoch"] == epoch and len(history) <= 100
    gaps = numpy.diff([entry["epoch"] for entry in history])
    assert len(history) >= 50 and max(gaps) < history.stride + 5


def test_history_round_trips(tmp_path):
    path, history = tmp_path / "metrics.jsonl", History()
    assert load_history(path, "run") == []
    lines = [make_entry(epoch) for epoch in (*range(1, 8), *range(4, 7))]
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
        + json.dumps(make_entry(9, experiment_prefix="another"))
        + '\n{"experiment_prefix": "run", "epoch": 10}\n[1]\n'
        + json.dumps(make_entry(11))[:-9]  # its writer was killed
    )
    for line in lines:
        history.add(line)
    assert load_history(path, "run") == history
    assert [entry["epoch"] for entry in history] == [1, 2, 3, 4, 5, 6]


def test_contributions_survive_restarts():
    contributors, expires = Contributions({}), iter(range(1, 100))

    def tell(label: str, total: int, epoch: int = 3, at: int | None = None) -> int:
        """Add a record of 64 samples in its epoch, `total` so far, and return the samples in the table."""
        record = make_metrics(epoch, total_samples=total), float(next(expires) if at is None else at)
        contributors.update({label: record}, {}, 1000.0 + record[1])
        return contributors.peers[label].total_samples

    assert tell("a", 640, at=0) == 640  # it was there before this monitor
    assert tell("a", 768, epoch=5) == 768
    assert tell("a", 640, at=0) == 768  # a read that missed the newest record
    seen = contributors.peers["a"].last_seen
    assert tell("b", 64) == 64
    # after a restart from a checkpoint, only its new 64 samples count
    assert tell("a", 704, epoch=6) == 832
    assert tell("a", 768, epoch=7) == 896
    # after a restart without one
    assert tell("a", 64, epoch=8) == 960
    assert tell("a", 128, epoch=9) == 1024
    assert contributors.peers["a"].last_seen > seen
    # its first record after a restart may hold no samples at all
    assert tell("a", 0, epoch=10) == 1024

    saved = {label: asdict(peer) for label, peer in contributors.ranking()}  # as summary.json has them
    contributors = Contributions(json.loads(json.dumps(saved)))
    assert contributors.total_samples() == 1024 + 64
    assert tell("a", 64, epoch=11) == 1088
    shown = contributors.describe()["contributors"]
    assert [(row["peer"], row["total_samples"], round(row["share"], 3)) for row in shown] == [
        ("a", 1088, 0.944),
        ("b", 64, 0.056),
    ]


def test_counted_shares_are_those_of_most_trainers():
    contributors = Contributions({})
    names = [letter * 8 for letter in "abcd"]
    claims = [dict(zip(names, it, strict=False)) for it in ((0.25, 1.0), (0.25, 1.0), (1.0, 0.0), ())]
    records = {name: (make_metrics(counted=it), 1e9) for name, it in zip(names, claims, strict=True)}
    contributors.update(records, {}, 0.0)
    assert [row["counted"] for row in contributors.describe()["contributors"]] == [0.25, 1.0, None, None]


def test_last_seen_is_time_of_report():
    contributors, now = Contributions({}), get_dht_time()
    options = dict(peer_id=b"1", epoch=3, samples_accumulated=0, samples_per_second=1.0, client_mode=False)
    reports = {
        label: LocalTrainingProgress(time=now + at, **options) for label, at in {"there": -7, "ahead": 9}.items()
    }
    # the metrics of all were made 100 s ago
    contributors.update(dict.fromkeys(("gone", *reports), (make_metrics(), now + 500)), reports, now)
    seen = {label: contributors.peers[label].last_seen - now for label in contributors.peers}
    assert seen == pytest.approx({"gone": -100, "there": -7, "ahead": 0}, abs=0.01)


def test_contributions_are_bounded(monkeypatch):
    monkeypatch.setattr("monitoring.history.MAX_PEERS", 50)
    monkeypatch.setattr("monitoring.history.MAX_PEERS_SENT", 10)
    contributors = Contributions({})
    contributors.update({f"{i:08x}": (make_metrics(total_samples=i), 1.0) for i in range(80)}, {}, 0.0)
    shown = contributors.describe()
    assert len(contributors.peers) == 50 and min(peer.total_samples for peer in contributors.peers.values()) == 30
    assert [row["total_samples"] for row in shown["contributors"]] == list(range(79, 69, -1))
    assert shown["num_contributors"] == 50 and shown["total_samples"] == sum(range(30, 80))


def test_unreadable_summary_is_kept(tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(UserError, match=f"--output_dir {tmp_path} cannot be read"):
        RunReport(ReportArguments(output_dir=str(tmp_path), report_to="none"), SwarmArguments("run"))


def test_trainer_reports_to_wandb_offline(start, tmp_path, tiny_data):
    """The log file has the first epoch, and the run is named after the peer."""
    output_dir, logs = tmp_path / "out", tmp_path / "logs"
    flags = ["--logging_steps", "100", "--logging_first_step", "--logging_dir", logs]
    text = tmp_path / "mine.txt"
    text.write_text("".join(path.read_text() for path in sorted(tiny_data["--dataset_path"].parent.glob("00*.txt"))))
    flags += ["--train_file", text, "--validation_file", text, "--sources", tmp_path / "mine.json"]
    flags += ["--tokenizer_path", tiny_data["--tokenizer_path"], "--max_sequence_length", 32]
    flags += ["--dataset_cache_dir", tmp_path / "cache"]
    prefix = make_prefix()
    trainer = start(
        *("trainer", "run_trainer.py", *TINY, "--experiment_prefix", prefix, "--output_dir", output_dir, *flags),
        *("--max_steps", 4),
        env={"WANDB_MODE": "offline", "WANDB_PROJECT": "mine"},
    )
    trainer.assert_clean_end(90)
    history = [json.loads(line) for line in (output_dir / "history.jsonl").read_text().splitlines()]
    [file] = logs.glob("wandb/offline-run-*/*.wandb")
    peer_id = json.loads((output_dir / "summary.json").read_text())["peer_id"]
    assert file.name == f"run-{prefix}-trainer-{peer_id[-8:]}.wandb"
    reported = read_wandb_history(file)
    assert sorted(reported) == [line["epoch"] for line in history] == [1, 2, 3, 4]
    for line in history:
        values = reported[line["epoch"]]
        assert values["loss"] == line["loss"] and values["total_samples"] == line["total_samples"]
        parts = [values[f"epoch/{name}_seconds"] for name in ("compute", "waiting", "averaging")]
        assert sum(parts) == pytest.approx(values["epoch/epoch_seconds"])
    # no path or address is reported
    assert str(tmp_path).encode() not in file.read_bytes() and b"/ip4/" not in file.read_bytes()
    log = (logs / "trainer.log").read_text()
    epochs = [line for line in log.splitlines() if "next epoch" not in line]  # progress, if an epoch takes 20 s
    assert re.findall(r"epoch (\d+)/", "\n".join(epochs)) == ["1"]
    assert re.search(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d trainer run " + prefix, log)


class SlowDHT:
    """A DHT that answers after a second, because a peer that it asks does not; it records the times of requests."""

    attestation = None

    def __init__(self):
        self.requests: dict[str, list[float]] = defaultdict(list)

    def get(self, key: str, **_) -> Future:
        self.requests[key].append(time.monotonic())
        answer = Future()
        threading.Timer(1.0, answer.set_result, [None]).start()
        return answer


@pytest.fixture
def dht(tmp_path, monkeypatch):
    """A DHT whose records a reader reads every 1.5 s."""
    stop, dht = threading.Event(), SlowDHT()
    for module in ("reader", "report"):
        monkeypatch.setattr(f"monitoring.{module}.STOP_REQUESTED", stop)
    report = RunReport(ReportArguments(output_dir=str(tmp_path), report_to="none"), SwarmArguments("run"))
    swarm = SimpleNamespace(dht=dht, prefix="run", attest=lambda *_: None)
    reader = RunReader(swarm, report, (), 1.5)
    reader.start()
    yield dht
    stop.set()
    reader.reading.result()


def test_slow_dht_does_not_delay_reads(dht):
    wait_until(lambda: len(dht.requests["run_metrics"]) >= 4, 20, "four reads")
    first, *_, last = times = dht.requests["run_metrics"]
    assert (last - first) / (len(times) - 1) < 2.2, [after - before for before, after in pairwise(times)]
    # all records are requested at once
    starts = [dht.requests[f"run_{name}"][0] for name in ("metrics", "progress", "run")]
    assert max(starts) - min(starts) < 0.5
