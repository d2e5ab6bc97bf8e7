"""The common part of monitors and auxiliary peers: follow a run, report it, and archive its states if flags say so."""

import concurrent.futures
import math
import threading
import time
from collections import deque

from arguments import AuxPeerArguments
from common.console import UserError
from common.flags import describe_shared, find_typed
from monitoring.page import open_page
from monitoring.report import RunReport
from swarm.contract import RunContract, require_same
from swarm.joining import Swarm
from swarm.membership import Membership
from swarm.processes import STOP_REQUESTED, handle_stop_signals
from training.settings import make_swarm_config
from utils import SwarmMetrics

# seconds between two updates of the metrics while the status page is open, and seconds that it counts as open
READER_PERIOD, READING_SECONDS = 5.0, 15.0
LOOK_TIMEOUT = 1.0  # seconds to wait at the end for an update of the metrics


class Observer:
    """A peer that computes no gradients: it joins the DHT, follows the run and reports it.

    :param groups: instances of MONITOR_ARGS or AUX_PEER_ARGS
    """

    def __init__(self, membership: Membership | None, *groups):
        self.groups = swarm_args, args, archive_args, *_ = groups
        is_aux = isinstance(args, AuxPeerArguments)
        if swarm_args.client_mode:
            who = "an auxiliary peer" if is_aux else "a monitor"
            raise UserError(f"--client_mode is for trainers: others must be able to reach {who}")
        if archive_args.repo_url:
            from monitoring.hub import require_token  # and torch, as in prepare_model

            require_token()
        self.prefix, self.period = swarm_args.experiment_prefix, min(args.refresh_period, threading.TIMEOUT_MAX)
        self.assists = is_aux and args.assist_in_averaging
        self.needs_model = self.assists or archive_args.store_checkpoints
        self.report = RunReport(args, swarm_args)
        self.page = open_page(swarm_args)
        self.swarm = Swarm.join(make_swarm_config(swarm_args), membership)
        self.dht = self.swarm.dht
        #: the shared flags for the first trainers, including typed defaults
        self.own_flags = describe_shared(groups, find_typed(map(type, groups)))
        if known := self.dht.attestation:
            self.report.workers.ids |= set(known.workers)
            self.swarm.attest(known.contract, known.flags, known.workers)
        else:
            self.swarm.attest(None, self.own_flags)
        # a client may observe, but only auxiliary peers load states, and hivemind has none in client mode
        if self.dht.client_mode and (is_aux or self.needs_model):
            self.swarm.leave()
            raise UserError(
                "others cannot reach this peer: open the port of --host_maddrs in the firewall or forward it in the "
                "router (--announce_maddrs), or run it on another machine"
            )
        self.swarm.warn_of_local_addresses()
        self.optimizer = self.archive = None
        #: the contract to compare with that of the first trainers, which may join later
        self.contract: RunContract | None = None
        #: the newest metrics, until `step` returns them
        self.news: deque[SwarmMetrics] = deque(maxlen=1)
        #: the time of the last request to the status page
        self.last_visit = -math.inf

    def begin(self) -> threading.Event:
        """Prepare the model and the dashboard if flags say so, start to watch, and return the event that ends the role.

        :raises UserError: if live trainers use different settings or the archive's folder cannot be written
        """
        if self.needs_model:
            self.prepare_model()
        self.report.start_dashboard()
        stop = handle_stop_signals(unsaved="the last look at the run, and a checkpoint that is not written")
        if self.page:
            self.page.serve(self.dht, self.read_progress, self.report.history)
        # in a thread, because it waits for the DHT, while the role's loop must not wait
        self.watching = concurrent.futures.ThreadPoolExecutor(1, "watch metrics").submit(self.watch)
        return stop

    def prepare_model(self) -> None:
        """Make the trainers' model and optimizer, to load their states or to average for them, and the archive."""
        # slow imports that a role without a model does not need
        from experiment.model import find_objective, make_model
        from experiment.optimizer import make_contract, make_optimizer
        from monitoring.archive import CheckpointHandler
        from text.tokenizers import load_tokenizer, tokenizer_fingerprint

        _, _, archive_args, model_args, optimizer_args, averaging_args = self.groups
        tokenizer = load_tokenizer(model_args.tokenizer_path, find_objective(model_args).kind)
        if self.assists:
            self.swarm.measure_bandwidth(averaging_args.bandwidth)
        model = make_model(model_args, tokenizer)
        self.contract = make_contract(model, tokenizer_fingerprint(tokenizer), optimizer_args, averaging_args)
        self.swarm.compare_contract(self.contract)
        self.optimizer = make_optimizer(model, self.swarm, optimizer_args, averaging_args, auxiliary=True)
        if self.assists:
            self.optimizer.state_averager.serve_state()
        if archive_args.store_checkpoints:
            self.archive = CheckpointHandler(self.groups, model, tokenizer, self.optimizer)

    def watch(self) -> None:
        """Read the metrics until the end, in a thread."""
        next_look = time.monotonic()
        while not STOP_REQUESTED.is_set():
            is_read = time.monotonic() < self.last_visit + READING_SECONDS
            if time.monotonic() >= next_look - (max(0.0, self.period - READER_PERIOD) if is_read else 0.0):
                self.look()
                next_look = time.monotonic() + self.period
            STOP_REQUESTED.wait(min(1.0, self.period))

    def read_progress(self) -> dict:
        """Return the content of the status page, which calls this from its own thread."""
        self.last_visit = time.monotonic()
        archive = self.archive.describe() if self.archive else {}
        return {**self.report.read_progress(), **archive, "flags": self.flags}

    @property
    def flags(self) -> str:
        """The shared flags of the run's contract, or of this peer if there is none yet."""
        contract = self.report.course.contract
        return contract.flags if contract else self.own_flags

    def look(self) -> None:
        """Read the newest metrics and the run's contract, and attest them."""
        if metrics := self.report.update(self.dht):
            self.news.append(metrics)
        course, workers = self.report.course, self.report.workers
        course.look_at_contract(self.dht, workers)
        # attest the contract, and the peers that are present
        self.swarm.attest(course.contract, self.own_flags, workers.present)
        if self.contract and course.contract:
            require_same(self.prefix, self.contract, [course.contract])
            self.contract = None

    def step(self) -> SwarmMetrics | None:
        """Continue the archive without waiting, and return the metrics of a new epoch, once.

        :raises UserError: if trainers with different settings have joined, or this peer's credential has expired
        """
        if self.watching.done():
            self.watching.result()
        if self.dht.membership:
            self.dht.membership.check_own_credential()
        metrics = self.news.pop() if self.news else None
        if self.archive:
            # a copy, because the thread changes the history, and empties it if the run starts over
            self.archive.step(metrics, list(self.report.history))
        return metrics

    def finish(self) -> None:
        """Write and report the last state, and leave the swarm."""
        if self.archive:
            self.archive.finish()
        # a thread may wait half a minute for a DHT that does not answer
        if concurrent.futures.wait([self.watching], LOOK_TIMEOUT).done:
            self.watching.result()
        self.report.update(self.dht, is_last=True)
        self.report.finish()
        self.swarm.leave(self.optimizer)
