"""What monitors and auxiliary peers do alike: follow a run, report it, keep its states where flags ask for it."""

import concurrent.futures
import math
import threading
import time
from collections import deque

from arguments import AuxPeerArguments
from machine.settings import make_swarm_config
from support.console import UserError
from support.flags import describe_shared, find_typed
from swarm.contract import require_same
from swarm.joining import Swarm
from swarm.membership import Membership
from swarm.processes import STOP_REQUESTED, handle_stop_signals
from utils import RunContract, SwarmMetrics
from viewing.page import open_page
from viewing.report import RunReport

# seconds between two looks at the metrics while somebody reads the page, and for how long a visit counts as reading
READER_PERIOD, READING_SECONDS = 5.0, 15.0
LOOK_TIMEOUT = 1.0  # seconds that the end waits for a look at the metrics that has begun


class Observer:
    """A peer that computes no gradients, from its place in the DHT to the last report.

    :param groups: instances of MONITOR_ARGS or AUX_PEER_ARGS
    """

    def __init__(self, membership: Membership | None, *groups):
        self.groups = swarm_args, args, archive_args, *_ = groups
        is_aux = isinstance(args, AuxPeerArguments)
        if swarm_args.client_mode:
            who = "an auxiliary peer" if is_aux else "a monitor"
            raise UserError(f"--client_mode is for trainers: others must be able to reach {who}")
        if archive_args.repo_url:
            from viewing.hub import require_token  # and torch, as in prepare_model

            require_token()
        self.prefix, self.period = swarm_args.experiment_prefix, min(args.refresh_period, threading.TIMEOUT_MAX)
        self.assists = is_aux and args.assist_in_averaging
        self.needs_model = self.assists or archive_args.store_checkpoints
        self.report = RunReport(args, swarm_args)
        self.page = open_page(swarm_args)
        self.swarm = Swarm.join(make_swarm_config(swarm_args), membership)
        self.dht = self.swarm.dht
        #: by which the first trainers must begin; its default binds too where it was typed
        self.own_flags = describe_shared(groups, find_typed(map(type, groups)))
        if known := self.dht.attestation:
            self.report.workers.ids |= set(known.workers)
            self.swarm.attest(known.contract, known.flags, known.workers)
        else:
            self.swarm.attest(None, self.own_flags)
        # a client may look on; who takes the swarm's state is an auxiliary peer, and hivemind has none in client mode
        if self.dht.client_mode and (is_aux or self.needs_model):
            self.swarm.leave()
            raise UserError(
                "others cannot reach this peer: open the port of --host_maddrs in the firewall or forward it in the "
                "router (--announce_maddrs), or run it on another machine"
            )
        self.swarm.warn_of_local_addresses()
        self.optimizer = self.archive = None
        #: to be compared with that of the first trainers, which may come after this peer
        self.contract: RunContract | None = None
        #: the newest metrics, until `step` returns them
        self.news: deque[SwarmMetrics] = deque(maxlen=1)
        #: when the page was asked for last
        self.last_visit = -math.inf

    def begin(self) -> threading.Event:
        """Make what the flags ask for, and begin to watch; returns what is set when it is time to end.

        :raises UserError: the run's live trainers use different settings, or the archive's folder cannot be written
        """
        if self.needs_model:
            self.prepare_model()
        self.report.start_dashboard()
        stop = handle_stop_signals(unsaved="the last look at the run, and a checkpoint that is not written")
        if self.page:
            self.page.serve(self.dht, self.read_progress, self.report.history)
        # looks at the metrics wait for the DHT: beside the loop, which must be there when an epoch ends
        self.watching = concurrent.futures.ThreadPoolExecutor(1, "watch metrics").submit(self.watch)
        return stop

    def prepare_model(self) -> None:
        """Model and optimizer as the trainers build them, to take their states or to average for them; the archive."""
        # who saves nothing needs neither the model's code nor the time to load it
        from experiment.model import find_objective, make_model
        from experiment.optimizer import make_contract, make_optimizer
        from text.tokenizers import load_tokenizer, tokenizer_fingerprint
        from viewing.archive import CheckpointHandler

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
        """In a thread: look at the metrics, at once and until the end."""
        next_look = time.monotonic()
        while not STOP_REQUESTED.is_set():
            is_read = time.monotonic() < self.last_visit + READING_SECONDS
            if time.monotonic() >= next_look - (max(0.0, self.period - READER_PERIOD) if is_read else 0.0):
                self.look()
                next_look = time.monotonic() + self.period
            STOP_REQUESTED.wait(min(1.0, self.period))

    def read_progress(self) -> dict:
        """Return what the run's page shows; it asks from its own thread."""
        self.last_visit = time.monotonic()
        archive = self.archive.describe() if self.archive else {}
        return {**self.report.read_progress(), **archive, "flags": self.flags}

    @property
    def flags(self) -> str:
        """Those that all peers of the run share: its contract's, or before there is one those that this peer has."""
        contract = self.report.course.contract
        return contract.flags if contract else self.own_flags

    def look(self) -> None:
        if metrics := self.report.update(self.dht):
            self.news.append(metrics)
        course, workers = self.report.course, self.report.workers
        course.look_at_contract(self.dht, workers)
        # what this peer has seen of the run, and who is there
        self.swarm.attest(course.contract, self.own_flags, workers.present)
        if self.contract and course.contract:
            require_same(self.prefix, self.contract, [course.contract])
            self.contract = None

    def step(self) -> SwarmMetrics | None:
        """Go on with what is due, without waiting; the metrics of the newest epoch, once.

        :raises UserError: trainers have come that use different settings; or this peer's credential has expired
        """
        if self.watching.done():
            self.watching.result()
        if self.dht.membership:
            self.dht.membership.check_own_credential()
        metrics = self.news.pop() if self.news else None
        if self.archive:
            # as it is now: the thread that watches changes it, and empties it where the run has started over
            self.archive.step(metrics, list(self.report.history))
        return metrics

    def finish(self) -> None:
        """Write and report what is left, and leave the swarm."""
        if self.archive:
            self.archive.finish()
        # it may wait half a minute for a DHT that does not answer
        if concurrent.futures.wait([self.watching], LOOK_TIMEOUT).done:
            self.watching.result()
        self.report.update(self.dht, is_last=True)
        self.report.finish()
        self.swarm.leave(self.optimizer)
