"""The reads of a run's records by monitors and auxiliary peers."""

import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace

import pytest
from processes import wait_until

from arguments import ReportArguments, SwarmArguments
from monitoring.reader import RunReader
from monitoring.report import RunReport


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
