"""A trainer's status page."""

import math
import time
from collections.abc import Callable

from monitoring.history import Contributions, History, describe_swarm
from monitoring.page import StatusServer
from swarm.joining import Swarm
from swarm.trust import ContributorRegistry
from training.figures import fetch_records
from utils import SwarmMetrics, aggregate_metrics

READ_INTERVAL, READ_TIMEOUT = 10.0, 2.0  # seconds; for downloads of the swarm's metrics


class TrainerPage:
    """A page with a trainer's own curve and figures, and with the swarm's metrics, which only visits refresh."""

    def __init__(self, server: StatusServer, swarm: Swarm, describe: Callable[[], dict]):
        self.server, self.swarm, self.describe = server, swarm, describe
        self.history, self.contributions, self.workers = History(), Contributions({}), ContributorRegistry()
        self.metrics: SwarmMetrics | None = None
        self.next_read = 0.0

    def add(self, line: dict) -> None:
        """Add a line of history.jsonl to the curve."""
        self.history.add({**line, "alive_peers": line["num_peers"]})

    def serve(self) -> None:
        """Start to answer, in a thread."""
        self.server.serve(self.swarm.dht, self.read, self.history)

    def read(self) -> dict:
        """Return the content of the page."""
        if time.monotonic() >= self.next_read:
            self.next_read = time.monotonic() + READ_INTERVAL
            records = fetch_records(self.swarm.dht, self.swarm.prefix, READ_TIMEOUT, self.workers)
            self.contributions.update(records, {}, time.time())
            self.metrics = aggregate_metrics([(label, metrics) for label, (metrics, _) in records.items()])
        own, shown = self.describe(), describe_swarm(self.metrics, self.history) | self.contributions.describe()
        is_over = self.history and self.history[-1]["epoch"] >= own.get("final_epoch", math.inf)
        ended = self.history[-1]["time"] if is_over else None
        return {**shown, **own, "ended": ended, "flags": self.swarm.contract.flags}
