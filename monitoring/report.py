"""Reports of a run by monitors and auxiliary peers: metrics.jsonl, the learning curve, a dashboard and the summary.

A thread reads the metrics, because the DHT may take seconds, while the loop of a role must not wait.
"""

import json
import logging
import math
import statistics
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from arguments import ArchiveArguments, ReportArguments, SwarmArguments
from common.console import UserError, format_epoch
from common.files import append_line, lock_folder, read_json, write_file
from common.flags import describe_shared, find_typed
from common.memory import settle_memory
from common.signals import STOP_REQUESTED
from monitoring.curves import draw_learning_curve
from monitoring.dashboards import Dashboard, make_run_name, start_dashboard
from monitoring.history import Contributions, describe_swarm, load_history
from monitoring.page import open_page
from swarm.contract import RunContract, choose_contract, fetch_contracts, require_same
from swarm.joining import Swarm
from training import figures
from training.progress import RECENT_EPOCHS, measure_progress
from utils import FETCH_TIMEOUT, filter_plausible_records, find_peer_id

logger = logging.getLogger("report")

CURVE_PERIOD = 30.0  # seconds between two drawings, which take up to a second of a core that may be training
CONTRACT_PERIOD = 20.0  # seconds between two reads of the contract, which changes only with a new run
CONTRACT_TIMEOUT = 5.0
FINAL_FETCH_TIMEOUT = 1.0  # also to wait for a read that is under way
# reads of the DHT without any newer record, after which the run has gone back; a single read may miss records
READS_BEFORE_GOING_BACK = 3
REPORT_LIFETIME = 120.0  # seconds; that of a progress record
READS_BEFORE_THE_END = 2  # without a trainer; one may have missed records
# seconds after a restart, for which a run that is not found may be alive: libp2p dials a lost peer ever less often
RECONNECT_TIME = 300.0
#: results of measure_progress
PROGRESS = ("target_batch_size", "swarm_samples", "final_epoch", "seconds_left")


class RunReport:
    """A reporter that follows a run's metrics and writes curve, summary and dashboard, and attests the run's settings
    to new peers. The shared flags in `groups`, the whole command line, bind the first trainers. It also has the status
    page of its role, and the archive if there is one.

    It continues the reports of an earlier process with the same --output_dir, and locks that folder. The constructor
    raises a UserError if the folder or the port of the page is in use, or the folder cannot be written.
    """

    def __init__(self, args: ReportArguments, swarm: SwarmArguments, groups: tuple = ()):
        self.args = args
        self.prefix = swarm.experiment_prefix
        self.output_dir = Path(args.output_dir)
        try:
            lock_folder("--output_dir", self.output_dir)
            (self.output_dir / "metrics.jsonl").touch()
            self.history = load_history(self.output_dir / "metrics.jsonl", self.prefix)
            summary = self.load_summary()
        except OSError as e:
            raise UserError(
                f"--output_dir {args.output_dir} cannot be read and written ({e.strerror}): choose another folder"
            ) from e
        #: the last line of metrics.jsonl, which may be an earlier process's
        self.last = self.history[-1] if self.history else {}
        self.contributions = Contributions(summary.get("peers", {}))
        self.workers = figures.ContributorRegistry(map(bytes.fromhex, summary.get("workers", [])))
        self.own_flags = describe_shared(groups, find_typed(map(type, groups)))
        #: the contract of most contributors, and this peer's until it is compared with that one
        self.contract: RunContract | None = None
        self.own_contract: RunContract | None = None
        #: the metrics of the newest epoch, until `take_news` returns them
        self.news: deque[figures.SwarmMetrics] = deque(maxlen=1)
        #: the run's name on dashboards
        self.run_name = summary.get("run_name") or make_run_name(self.prefix)
        self.dashboard = Dashboard()
        #: reads in a row that found no trainer, and no contract
        self.empty_reads = self.lost_contracts = 0
        #: the newest epochs of the last reads in a row that found only epochs before the last one
        self.older_epochs: list[int] = []
        #: until when peers of the run may still be looking for this restarted peer, unless one has been found
        self.reconnecting_until = time.monotonic() + RECONNECT_TIME if self.last else 0.0
        #: the progress of each trainer in the last read that found any, and until when it counts after others
        self.reports = {}
        self.reports_until = 0.0
        self.writing = threading.Lock()  # at the end, the reader's thread may still draw
        self.alive_peers = 0
        self.next_contract = 0.0
        self.next_drawing = time.monotonic() + CURVE_PERIOD
        self.page = open_page(swarm)
        self.archive = None  # of --store_checkpoints

    def attest(self, swarm: Swarm) -> None:
        """Attest the settings that this peer has learned of the run that it joined, or its own ones."""
        self.swarm = swarm
        if attested := swarm.dht.attestation:
            self.workers.trust(attested.workers)
            swarm.attest(attested.contract, attested.flags, attested.workers)
        else:
            swarm.attest(None, self.own_flags)

    @property
    def flags(self) -> str:
        """The shared flags of the run's contract, or of this peer if there is none yet."""
        return self.contract.flags if self.contract else self.own_flags

    def start(self) -> None:
        """Start page, dashboard and reads, until the end of this role. Call this after all helpers are forked."""
        if self.page:
            self.page.serve(self.swarm, self.read_progress, self.history)
        self.start_dashboard()
        settle_memory()
        self.reading = ThreadPoolExecutor(1, "read metrics").submit(self.read_until_stopped)

    def read_until_stopped(self) -> None:
        """Read every `refresh_period`, from the start of one read to that of the next one."""
        while not STOP_REQUESTED.is_set():
            next_read = time.monotonic() + min(self.args.refresh_period, threading.TIMEOUT_MAX)
            self.read()
            STOP_REQUESTED.wait(max(0.0, next_read - time.monotonic()))

    def read(self) -> None:
        """Read the newest metrics and the run's contract, and attest the contract and the peers that are present."""
        if metrics := self.update():
            self.news.append(metrics)
        self.swarm.attest(self.contract, self.own_flags, self.workers.present)
        if self.own_contract and self.contract:
            require_same(self.prefix, self.own_contract, [self.contract])
            self.own_contract = None

    def take_news(self) -> figures.SwarmMetrics | None:
        """Return the metrics of a new epoch, once, or None.

        :raises UserError: if trainers with different settings have joined, or this peer's credential has expired
        """
        if self.reading.done():
            self.reading.result()
        if self.swarm.dht.membership:
            self.swarm.dht.membership.check_own_credential()
        return self.news.pop() if self.news else None

    def step_archive(self, metrics: figures.SwarmMetrics | None) -> None:
        """Let the archive, if there is one, continue with a download or an upload that is due."""
        if self.archive:
            # a copy, because the reader's thread changes the history
            self.archive.step(metrics, list(self.history), self.last_validation(), self.workers.present)

    def start_dashboard(self) -> None:
        """Start the dashboard of --wandb_project. Call this after all helper processes are forked."""
        if self.args.wandb_project:
            self.dashboard = start_dashboard(self.args.wandb_project, self.run_name)
        # save the run's name at once, because this process may be killed
        self.write_summary()

    def retry_dashboard(self) -> None:
        """Start the dashboard once more, in a thread, because a service that does not answer takes half a minute."""
        name = self.run_name
        dashboard = start_dashboard(self.args.wandb_project, name)
        if name == self.run_name:  # otherwise the swarm has gone back, and has another dashboard
            self.dashboard = dashboard

    def update(self, is_last: bool = False) -> figures.SwarmMetrics | None:
        """Read and report the swarm's metrics, and return those of its newest epoch if they are new."""
        dht = self.swarm.dht
        last_epoch = self.last.get("epoch")
        timeout = FINAL_FETCH_TIMEOUT if is_last else FETCH_TIMEOUT
        contracts = progress = None
        with ThreadPoolExecutor() as pool:  # all at once, because each may wait seconds for a peer that does not answer
            # at the end only local records: the DHT waits for seconds for trainers that have just left
            fetching = pool.submit(figures.fetch_records, dht, self.prefix, timeout, self.workers, latest=not is_last)
            if not is_last:
                progress = pool.submit(figures.fetch_progress, dht, self.prefix)
                if time.monotonic() >= self.next_contract:
                    contracts = pool.submit(fetch_contracts, dht, self.prefix, CONTRACT_TIMEOUT)
        records = fetching.result()
        reports = progress.result() if progress else {}
        if STOP_REQUESTED.is_set() and not is_last:
            return None  # the last update must not wait for this one
        if reports or time.monotonic() > self.reports_until:
            self.reports = reports
            self.reports_until = time.monotonic() + REPORT_LIFETIME
        if contracts:
            self.update_contract(contracts.result(), has_trainers=not self.reports.keys().isdisjoint(records))
        believable = filter_plausible_records([(label, metrics) for label, (metrics, _) in records.items()], last_epoch)
        live, newest = figures.select_live(believable, self.reports)
        current = figures.aggregate_metrics(live, last_epoch, newest)
        self.alive_peers = current.alive_peers if current else 0
        is_new = current is not None and current.epoch != last_epoch
        is_older = is_new and self.last and current.epoch < last_epoch
        if current and (reports or is_new) and not is_older:  # not only a record that outlives its peer
            self.reconnecting_until = 0.0
        is_reconnecting = time.monotonic() < self.reconnecting_until
        self.older_epochs = [*self.older_epochs, current.epoch] if is_older else []
        if is_older and (is_reconnecting or len(self.older_epochs) < READS_BEFORE_GOING_BACK):
            return None  # these records may belong to this run or to a new one
        news = {}
        if self.older_epochs:
            # the swarm may have ended epochs since the first of these reads
            news["gone_back_to"] = min(self.older_epochs)
            self.go_back(news["gone_back_to"])
            self.older_epochs = []
        self.empty_reads = 0 if reports or is_new or is_reconnecting else self.empty_reads + 1
        self.contributions.update({label: records[label] for label, _ in believable}, reports, time.time())
        if is_new:
            schedule = self.workers.schedule
            final_epoch = statistics.mode(metrics.final_epoch or schedule.total_steps for _, metrics in live)
            recent = [(entry["epoch"], entry["epoch_seconds"]) for entry in self.history[-RECENT_EPOCHS:]]
            recent.append((current.epoch, current.epoch_seconds))
            progress = measure_progress(current.epoch, final_epoch, schedule, recent)
            news |= {"experiment_prefix": self.prefix, **asdict(current), **progress}
            logger.info(format_epoch(news))
        evaluation = figures.find_evaluation(live)
        if evaluation and evaluation.epoch > self.last_validation().get("validation_epoch", -1):
            logger.info(f"validation {figures.format_evaluation(evaluation)}")
            news |= figures.describe_evaluation(evaluation)
        if is_new or (news and self.last):
            self.add_entry(news)
        if time.monotonic() >= self.next_drawing:
            self.next_drawing = time.monotonic() + CURVE_PERIOD
            self.write_files()
        return current if is_new else None

    def update_contract(self, found: dict[bytes, RunContract], has_trainers: bool) -> None:
        """Update the contract by those that live trainers publish, by their public keys."""
        if contract := choose_contract(it for key, it in found.items() if find_peer_id(key) in self.workers.ids):
            self.contract = contract
            self.lost_contracts = 0
            self.next_contract = time.monotonic() + CONTRACT_PERIOD
        else:
            self.lost_contracts += 1
        # once may mean that the DHT did not answer; and in a long round, trainers renew their progress only
        if self.lost_contracts > 1 and not has_trainers:
            self.contract = None  # the next run of this name has its own settings
        self.workers.schedule = figures.parse_schedule(self.contract)

    def add_entry(self, news: dict) -> None:
        """Add an epoch to metrics.jsonl, curve and dashboard, or an evaluation to the entry of the last epoch."""
        own = {"time": time.time(), "total_samples": self.contributions.total_samples()}
        self.last = (news if "epoch" in news else self.last | news) | own
        self.history.add(self.last)
        append_line(self.output_dir / "metrics.jsonl", json.dumps(self.last))
        if time.monotonic() >= self.dashboard.retry_at and not STOP_REQUESTED.is_set():
            self.dashboard.retry_at = math.inf
            threading.Thread(target=self.retry_dashboard, name="dashboard", daemon=True).start()
        # dashboards have the rest of a second entry
        self.dashboard.report(self.last if "epoch" in news else news | {"epoch": self.last["epoch"]})

    def go_back(self, epoch: int) -> None:
        """Continue the curve at an earlier epoch, from which the swarm has resumed or started over."""
        logger.info(f"run {self.prefix} has gone back to epoch {epoch}")
        self.history.forget_from(epoch)
        self.dashboard.finish()
        self.run_name = make_run_name(self.prefix)
        self.start_dashboard()

    def read_progress(self) -> dict:
        """Return the content of the status page, which calls this from its own thread."""
        last = self.last
        has_ended = self.last and self.empty_reads >= READS_BEFORE_THE_END
        # the Unix time of the last trainer's last report, if all trainers have left
        seen = (peer.last_seen for _, peer in self.contributions.ranking())
        ended = max(seen, default=last["time"]) if has_ended else None
        progress = {"epoch": last.get("epoch"), "loss": last.get("loss"), "peers": self.alive_peers}
        progress |= {**describe_swarm(last, self.history), **self.contributions.describe()}
        progress |= {name: last[name] for name in PROGRESS if name in last}
        progress |= {**self.last_validation(), "ended": ended, "flags": self.flags}
        progress |= self.archive.describe() if self.archive else {}
        return progress | ({"peers": 0, "samples_per_second": 0.0, "seconds_left": 0} if ended else {})

    def last_validation(self) -> dict:
        """Return the last validation, by the names of metrics.jsonl."""
        return self.history.validation[-1] if self.history.validation else {}

    def finish(self) -> None:
        """Finish the archive, read once more, write the last curve and summary, and end the dashboard."""
        if self.archive:
            self.archive.finish()
        # the thread may wait half a minute for a DHT that does not answer
        if wait([self.reading], FINAL_FETCH_TIMEOUT).done:
            self.reading.result()
        self.update(is_last=True)
        self.write_files()
        for peer in self.contributions.describe()["contributors"]:
            name = f"{peer['username']} {peer['peer']}".strip()
            logger.info(f"peer {name} contributed {peer['total_samples']:,} samples ({peer['share']:.1%})")
        names = [n for n in ("learning_curve.png", "metrics.jsonl", "summary.json") if (self.output_dir / n).exists()]
        logger.info(f"wrote {', '.join(names)} in {self.output_dir}")
        self.dashboard.finish()

    def write_files(self) -> None:
        """Draw the learning curve, if an epoch is known, and write the summary."""
        with self.writing:
            if self.history:
                draw_learning_curve(self.history, self.prefix, self.output_dir / "learning_curve.png")
            self.write_summary()

    def write_summary(self) -> None:
        """Write summary.json with the contributors and the state that the next process needs to continue."""
        summary = {
            "experiment_prefix": self.prefix,
            "epochs": self.last.get("epoch", 0),
            "last_loss": self.last.get("loss"),
            **self.last_validation(),
            "total_samples": self.contributions.total_samples(),
            "run_name": self.run_name,
            "peers": {label: asdict(peer) for label, peer in self.contributions.ranking()},
            "workers": [peer_id.hex() for peer_id in self.workers.present],
        }
        write_file(self.output_dir / "summary.json", json.dumps(summary, indent=2) + "\n")

    def load_summary(self) -> dict:
        """Return the summary that an earlier process wrote of this run; rename one of another run."""
        path = self.output_dir / "summary.json"
        summary = read_json(path)
        if not summary or summary.get("experiment_prefix") == self.prefix:
            return summary
        aside = path.with_name(f"summary-until-{time.strftime('%Y%m%d-%H%M%S')}.json")
        path.rename(aside)
        logger.info(f"moved the summary of another run to {aside}")
        return {}


def check_flags(role: str, swarm_args: SwarmArguments, archive_args: ArchiveArguments) -> None:
    """Raise a UserError if a role that others connect to is in client mode, or lacks the token for its uploads."""
    if swarm_args.client_mode:
        raise UserError(f"--client_mode is for trainers: others must be able to reach {role}")
    if archive_args.repo_url:
        from monitoring.hub import require_token  # and torch

        require_token()


def require_reachable(swarm: Swarm) -> None:
    """Leave the swarm and raise a UserError if others cannot reach this peer, which they need."""
    if swarm.dht.client_mode:
        swarm.leave()
        raise UserError(
            "others cannot reach this peer: open the port of --host_maddrs in the firewall or forward it in the "
            "router (--announce_maddrs), or run it on another machine"
        )
