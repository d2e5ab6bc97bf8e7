"""Read a run's metrics in a thread, because the DHT may take seconds, while the loop of a role must not wait."""

import concurrent.futures
import threading
import time
from collections import deque

from arguments import ArchiveArguments, SwarmArguments
from common.console import UserError
from common.flags import describe_shared, find_typed
from common.memory import settle_memory
from common.signals import STOP_REQUESTED
from monitoring.report import RunReport
from swarm.contract import RunContract, require_same
from swarm.joining import Swarm
from training.figures import SwarmMetrics

FINAL_WAIT = 1.0  # seconds to wait at the end for a read that is under way


class RunReader:
    """A reader of a run's metrics every `period` seconds. It reports them, and attests the run's settings to new peers.

    The shared flags in `groups`, the whole command line, bind the first trainers.
    """

    def __init__(self, swarm: Swarm, report: RunReport, groups: tuple, period: float):
        self.swarm, self.report, self.period = swarm, report, min(period, threading.TIMEOUT_MAX)
        self.own_flags = describe_shared(groups, find_typed(map(type, groups)))
        #: this peer's contract until it is compared with that of the first trainers, which may join later
        self.contract: RunContract | None = None
        #: the metrics of the newest epoch, until `take_news` returns them
        self.news: deque[SwarmMetrics] = deque(maxlen=1)
        if attested := swarm.dht.attestation:
            report.workers.trust(attested.workers)
            swarm.attest(attested.contract, attested.flags, attested.workers)
        else:
            swarm.attest(None, self.own_flags)

    @property
    def flags(self) -> str:
        """The shared flags of the run's contract, or of this peer if there is none yet."""
        return self.report.contract.flags if self.report.contract else self.own_flags

    def start(self) -> None:
        """Start to read, until the end of this role."""
        settle_memory()
        self.reading = concurrent.futures.ThreadPoolExecutor(1, "read metrics").submit(self.read_until_stopped)

    def read_until_stopped(self) -> None:
        """Read every `period`, from the start of one read to that of the next one."""
        while not STOP_REQUESTED.is_set():
            next_read = time.monotonic() + self.period
            self.read()
            STOP_REQUESTED.wait(max(0.0, next_read - time.monotonic()))

    def read(self) -> None:
        """Read the newest metrics and the run's contract, and attest the contract and the peers that are present."""
        if metrics := self.report.update(self.swarm.dht):
            self.news.append(metrics)
        contract = self.report.contract
        self.swarm.attest(contract, self.own_flags, self.report.workers.present)
        if self.contract and contract:
            require_same(self.swarm.prefix, self.contract, [contract])
            self.contract = None

    def take_news(self) -> SwarmMetrics | None:
        """Return the metrics of a new epoch, once, or None.

        :raises UserError: if trainers with different settings have joined, or this peer's credential has expired
        """
        if self.reading.done():
            self.reading.result()
        if self.swarm.dht.membership:
            self.swarm.dht.membership.check_own_credential()
        return self.news.pop() if self.news else None

    def describe(self) -> dict:
        """Return the run's figures for the status page, which calls this from its own thread."""
        return {**self.report.read_progress(), "flags": self.flags}

    def finish(self) -> None:
        """Read once more, and report the last state of the run."""
        # the thread may wait half a minute for a DHT that does not answer
        if concurrent.futures.wait([self.reading], FINAL_WAIT).done:
            self.reading.result()
        self.report.update(self.swarm.dht, is_last=True)
        self.report.finish()


def check_flags(role: str, swarm_args: SwarmArguments, archive_args: ArchiveArguments) -> None:
    """Raise a UserError if a role that others connect to is in client mode, or lacks the token for its uploads."""
    if swarm_args.client_mode:
        raise UserError(f"--client_mode is for trainers: others must be able to reach {role}")
    if archive_args.repo_url:
        from monitoring.hub import require_token  # and torch

        require_token()


def require_reachable(swarm: Swarm) -> None:
    """Leave the swarm and raise a UserError if others cannot reach this peer: hivemind loads no states for a client."""
    if swarm.dht.client_mode:
        swarm.leave()
        raise UserError(
            "others cannot reach this peer: open the port of --host_maddrs in the firewall or forward it in the "
            "router (--announce_maddrs), or run it on another machine"
        )
