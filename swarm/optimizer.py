"""The collaborative optimizer: a failed round loses no gradients and makes no step, and no peer waits for a dead one.

`swarm/epoch.py` has the states of an epoch. Each transition is one method here:

| to | method |
|---|---|
| MATCHMAKING | `_search_group` |
| AVERAGING | `_average` |
| STEPPING | `_make_step` |
| SYNCING | `load_state_from_peers` |
| ACCUMULATING, after a failed round | `_recover_from_failed_round` |
| ACCUMULATING, in a new epoch | `_begin_epoch` |
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import CompressionBase
from hivemind.utils import get_dht_time

from arguments import AveragingArguments
from swarm.averager import PeersBehindError, PeersUnreachableError, StateDivergedError
from swarm.epoch import RETRY_AFTER, Epoch, EpochState, StragglerPatience, SwarmLook
from swarm.gradients import GradientAverager
from swarm.guard import MaliciousPeersError
from swarm.local_steps import LocalSteps, LocalStepsAverager, OuterOptimizer
from swarm.plan import count_bits
from swarm.processes import STOP_REQUESTED, exit_if_process_dies
from swarm.progress import FIRST_LOOK, PeerTracker
from swarm.round_wait import STOP_TIMEOUT, RoundWait, StopTimeout, stop_waiting_for_stragglers
from swarm.state_sync import FETCH_TIMEOUT, StateSync
from swarm.states import StateAverager, list_params
from swarm.trust import PeerTrust

logger = logging.getLogger("swarm")

SHUTDOWN_TIMEOUT = 5.0  # seconds
END_TIMEOUT = 120.0  # seconds to wait for a round at the end, without a stop request
MAX_STALENESS = 10  # epochs for which gradients are worth keeping; a laptop that slept for hours has older ones


class AveragingError(Exception):
    """A gradient averaging round failed; its gradients are kept."""


@dataclass
class RoundStats:
    """The counts and times of this peer's rounds so far."""

    succeeded: int = 0
    failed: int = 0
    failed_in_a_row: int = 0
    matchmaking_seconds: float = 0.0  # that the loop has waited, not those in the background
    averaging_seconds: float = 0.0
    samples: int = 0  # of this peer in the last step
    total_samples: int = 0  # of this peer in all steps
    group_size: int = 1  # peers whose gradients verifiably entered the last step, this one included
    last_group: frozenset[bytes] = frozenset()  # ids of the others in the last round that succeeded

    def record_step(self, samples: int) -> None:
        """Record a step with this number of this peer's samples."""
        self.samples = samples
        self.total_samples += samples
        self.succeeded += 1
        self.failed_in_a_row = 0

    def record_failure(self) -> None:
        """Record a failed round."""
        self.failed += 1
        self.failed_in_a_row += 1
        self.group_size = 1


class CollaborativeOptimizer:
    """Steps with the average of all peers' gradients when the swarm has gathered a batch.

    Each `step` adds gradients to the pending ones. When the swarm has enough of them, a round averages them in a group
    of peers, and the optimizer, on a copy of the parameters in host memory, steps to the next epoch. After a failed
    round the epoch stays (in the background it does not), and a later `step` tries again. A peer that missed a step
    loads that of the others.

    With `--local_steps` N above 1, each `step` also moves this peer's model, from some epoch on. An epoch then takes N
    times the samples, and rounds average pseudo-gradients, see swarm/local_steps.py.
    """

    is_auxiliary = False

    def __init__(
        self,
        dht: hivemind.DHT,
        prefix: str,
        averaging: AveragingArguments,
        *,
        params: list[dict],
        optimizer: Callable[[list[dict]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        client_mode: bool,
        **compressions: CompressionBase,
    ):
        """
        :param dht: the DHT, with the uplink that rounds and states are sent through
        :param params: the groups of the model's parameters, from which `optimizer` makes one of their copies
        :param client_mode: whether to accept no incoming connection
        :param compressions: of gradients, local_steps (default: the same), averaged and served (load_state) states
        """

        def select(*names: str) -> dict:
            return {name: getattr(averaging, name) for name in names}

        def make_outer(groups: list[dict]) -> OuterOptimizer:
            return OuterOptimizer(optimizer(groups), averaging.outer_lr, averaging.outer_momentum)

        self.dht, self.uplink, self.averaging, self.client_mode = dht, dht.uplink, averaging, client_mode
        times = averaging.matchmaking_time, averaging.request_timeout, averaging.averaging_timeout
        self.uplink.fix_timeouts(*times, averaging.next_chunk_timeout)
        timeouts = self.uplink.timeouts
        self.stats, self.epoch = RoundStats(), Epoch(0)
        self.patience = StragglerPatience()
        #: for rounds that are under way at the end
        self.stop_timeout = StopTimeout(self.uplink, STOP_TIMEOUT / 2 if self.is_auxiliary else STOP_TIMEOUT)
        #: the last rounds of gradients, which are searched for in advance, and of parameters
        self.gradient_round: StepControl | None = None
        self.state_round: StepControl | None = None
        self.trust = PeerTrust(self.uplink, attested=dht.vouched.workers if dht.vouched else ())
        self.tracker = PeerTracker(
            dht,
            prefix,
            averaging.target_batch_size - averaging.batch_size_lead,
            self.trust,
            client_mode=client_mode,
            **select("min_refresh_period", "max_refresh_period", "default_refresh_period", "expected_drift_peers"),
            **select("expected_drift_rate", "metadata_expiration", "performance_ema_alpha"),
        )
        options = dict(
            dht=dht,
            client_mode=client_mode,
            auxiliary=self.is_auxiliary,
            min_matchmaking_time=timeouts.matchmaking,
            next_chunk_timeout=timeouts.next_chunk,
            shutdown_timeout=SHUTDOWN_TIMEOUT,
            start=True,
            **select("target_group_size", "min_vector_size"),
        )
        self.state_averager = StateAverager(
            prefix=f"{prefix}_state_averager",
            params=params,
            optimizer=make_outer if averaging.local_steps > 1 else optimizer,
            scheduler=scheduler,
            initialize_optimizer=False,  # it comes with its state, see initialize_optimizer_state_
            offload_optimizer=True,
            custom_gradients=True,
            compression=compressions["state_averaging"],
            state_compression=compressions["load_state"],
            **options,
        )
        exit_if_process_dies(self.state_averager, "state averager")
        if client_mode:
            self.state_averager.serve_state()
        make_local = partial(LocalStepsAverager, sparse=compressions.get("local_steps"))
        self.grad_averager = (make_local if averaging.local_steps > 1 else GradientAverager)(
            self.state_averager.main_parameters,
            prefix=f"{prefix}_grad_averager",
            compression=compressions["gradients"],
            **options,
        )
        exit_if_process_dies(self.grad_averager, "gradient averager")
        self.state_averager.grad_averager = self.grad_averager
        self.sync = StateSync(self.tracker, self.state_averager, self.grad_averager, self.uplink)
        self.local: LocalSteps | None = None
        if averaging.local_steps > 1:
            self.local = LocalSteps(self.state_averager.main_parameters, self.opt, optimizer, params)
            self.grad_averager.local = self.state_averager.local = self.local
        self._update_phase()
        with self.grad_averager.get_tensors() as gradients:
            for param, gradient in zip(list_params(self.opt), gradients, strict=True):
                param.grad = gradient
        if self.uplink.mbits:  # in a large group, each peer sends all of its gradients, and as many averages
            bits = count_bits(self.grad_averager._averaged_tensors, self.grad_averager.codec)
            seconds = 2 * bits / (self.uplink.mbits * 1e6)
            self.uplink.expect_round(seconds, own_seconds=seconds)
            logger.info(f"a round of {bits / 8e6:.3g} MB: {self.uplink.timeouts.describe()}")

    # --- for the training loop

    @property
    def opt(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters' copies."""
        return self.state_averager.optimizer

    @property
    def local_epoch(self) -> int:
        """The number of steps that this peer's parameters have made."""
        return self.state_averager.local_epoch

    @property
    def param_groups(self) -> list[dict]:
        """The model's parameters, for torch's GradScaler."""
        return [{"params": list(self.state_averager.main_parameters)}]

    def zero_grad(self) -> None:
        """Delete the model's gradients, which `step` has added to the pending ones."""
        for param in self.state_averager.main_parameters:
            param.grad = None

    def accumulate_on(self, device: torch.device) -> None:
        """Accumulate gradients on the model's device; call it once, after the model has moved there."""
        self.grad_averager.accumulate_on(device)
        if self.local:
            self.local.move_to(device)

    @property
    def is_local(self) -> bool:
        """Whether peers step by themselves in this epoch."""
        return self.local is not None and self.local_epoch >= self.averaging.local_steps_from

    @property
    def overlap(self) -> bool:
        """Whether rounds run in the background: those of local steps only, if there are any."""
        return self.averaging.overlap and (self.local is None or self.is_local)

    def training_state(self) -> dict:
        """Return a copy of all that the next step depends on but the gradients, see StateAverager.dump_state."""
        own = {"local": copy.deepcopy(self.local.state_dict())} if self.local and self.local.inner else {}
        return self.state_averager.dump_state() | {"total_samples": self.stats.total_samples} | own

    def load_training_state(self, state: dict) -> None:
        """Load what `training_state` returned, also that of another process or device.

        :raises ValueError: the tensors have other shapes than this optimizer's; nothing has changed then
        """
        self.state_averager.restore_state(state)
        self.stats.total_samples = state["total_samples"]
        self._update_phase()
        self.grad_averager.last_step = None
        self.grad_averager.drop_pending()
        if "local" in state:
            self.local.load_state_dict(state["local"])
        with self.tracker.pause_updates():
            self.tracker.update_epoch(self.local_epoch)
            if not self.tracker.present:  # an epoch that this peer was at before no longer counts
                self.tracker.set_swarm_epoch(self.local_epoch)
        self.epoch = Epoch(self.local_epoch)
        self._declare_state()

    def step(self, batch_size: int = 0) -> None:
        """Add the model's gradients to the pending ones; when the swarm has enough, average and step.

        :param batch_size: the number of samples of which the model's gradients are the mean
        """
        self.state_averager.step(apply_delayed_updates=True)
        self.grad_averager.accumulate(batch_size)
        self.tracker.report_local_progress(self.local_epoch, self.grad_averager.samples)
        look = self._look_at_swarm()
        if self.epoch.must_sync(look, self.sync.backoff, time.monotonic()):
            self.load_state_from_peers()
            return
        self._advance(look)

    def leave(self) -> None:
        """Tell the others that this peer is about to leave: `shutdown` follows once everything is saved. A round that
        they have begun goes on, without data of this peer."""
        self.tracker.shutdown(SHUTDOWN_TIMEOUT)
        self._leave_round(self.gradient_round, timeout=0.0)
        self._finish_background(END_TIMEOUT)  # it still changes the parameters

    def shutdown(self) -> None:
        """Stop the progress reports, finish or cancel the running rounds, and stop both averagers."""
        self.tracker.shutdown(SHUTDOWN_TIMEOUT)
        self._finish_background(END_TIMEOUT)
        self._leave_round(self.gradient_round, timeout=END_TIMEOUT)
        if self.is_local:  # the state that is saved belongs to the swarm
            self.grad_averager.drop_pending()
        self.state_averager.shutdown()
        self.grad_averager.shutdown()

    # --- the epoch

    def _look_at_swarm(self) -> SwarmLook:
        """Return what this peer knows of the swarm now."""
        control, tracker = self.gradient_round, self.tracker
        return SwarmLook(
            swarm_epoch=tracker.global_epoch,
            is_fresh=tracker.is_fresh,
            read_at=tracker.view.read_at,
            has_batch=tracker.ready_to_update_epoch,
            seconds_left=tracker.estimated_next_update_time - get_dht_time(),
            matchmaking_time=self.uplink.timeouts.matchmaking,
            has_others=self._has_others(),
            lacks_quorum=tracker.lacks_quorum,
            is_synchronous=self._is_synchronous(),
            is_searching=control is not None and not control.triggered and not control.done(),
            has_group=control is not None
            and control.stage == AveragingStage.AWAITING_TRIGGER
            and not control.triggered,
        )

    def _advance(self, look: SwarmLook) -> None:
        """Take the epoch as far as it can go now."""
        self._expect_group(look)
        if self.epoch.should_search(look):
            self._search_group()
        if not self.epoch.is_over(look):
            return
        if self.epoch.has_missed_step(look):
            self._catch_up(look)
        elif self.epoch.can_average(look) and not self._has_met_others():
            self._average()

    def _catch_up(self, look: SwarmLook) -> None:
        """Load the step that the others have made without this peer, unless that has just failed."""
        is_one_step_behind = self.epoch.is_one_step_behind(look)
        if self.sync.backoff.allows(look.swarm_epoch, is_one_step_behind, time.monotonic()):
            self.load_state_from_peers()

    def _has_met_others(self) -> bool:
        """Look at the swarm once more before this peer steps alone: new peers would have to download its state.

        :returns: whether other peers have come
        """
        if self.tracker.peers_at_epoch:
            return False
        with self.tracker.pause_updates(), contextlib.suppress(concurrent.futures.TimeoutError):
            self.tracker.refresh_now(timeout=FETCH_TIMEOUT)
        return bool(self.tracker.peers_at_epoch)

    def _expect_group(self, look: SwarmLook) -> None:
        """Tell the averagers which peers should be in their next groups."""
        # peers that are missing now too: a group that forms before the epoch ends accepts no peer later
        others = self.tracker.peers_at_epoch
        min_peers = self.tracker.count_min_group_size(awaits_all=True) if look.is_synchronous else 1
        self.grad_averager.round_state = [self.local_epoch, look.is_synchronous, self.state_averager.lineage]
        self.grad_averager.set_expected_peers(others, min_peers, self.trust.excluded)
        self._expect_for_states()

    def _expect_for_states(self) -> None:
        """Let the averaging of parameters wait for the last group alone if all peers step together: a peer that makes
        the step later, by download, has no part in it."""
        others = self.tracker.peers_at_epoch
        if self._is_synchronous() and not self.is_auxiliary:
            others = self.stats.last_group & self.tracker.present.keys()
        self.state_averager.set_expected_peers(others, silent=self.trust.excluded)

    def _search_group(self) -> None:
        """MATCHMAKING: look for a group, while this peer goes on accumulating."""
        self.epoch.enter(EpochState.MATCHMAKING)
        self._ban_malicious_peers(self.gradient_round)
        self.gradient_round = self.grad_averager.schedule_step()
        # when the epoch ends, it is known which of them are dead; a new peer finds records of long dead ones
        self.tracker.ping_silent_peers(self.tracker.present)

    def _average(self) -> None:
        """AVERAGING: average the pending gradients with a group, and make the step unless that fails."""
        self.epoch.enter(EpochState.AVERAGING)
        before = self.local_epoch, self.state_averager.lineage
        try:
            with self.tracker.pause_updates():
                self._make_step(self._run_round())
        except AveragingError as e:
            self._recover_from_failed_round(e.__cause__)
            return
        if not self.overlap:  # in the background, the optimizer may still be using the gradients
            self.grad_averager.last_step = *before, self.state_averager.group_id

    def _run_round(self) -> Callable[[], None] | None:
        """Average the pending gradients: now, or if rounds overlap with computation, in what is returned.

        :raises AveragingError: the round has failed, and nothing has changed
        """
        if self.overlap:
            self._finish_background(self.uplink.timeouts.averaging)
        control = self._start_round()
        if control is None:
            self.grad_averager.take_pending()
            self.stats.record_step(self.grad_averager.finish())
            return None
        finish = partial(self._finish_round, control, self.local_epoch)
        if self.overlap and not self.is_auxiliary:
            return finish
        return finish()

    def _start_round(self) -> StepControl | None:
        """Start the round of this epoch's gradients; None if there is no other peer."""
        control = self.gradient_round
        self._ban_malicious_peers(control, self.state_round)
        if self.state_round is not None and self.state_round.done():
            self.state_round = None
        if control is not None and (control.triggered or control.done()):
            control = None  # the search in advance has failed, or was that of the last epoch
        if not self.overlap:
            self.stats.group_size = 1
        self.state_averager.group_id = self.dht.peer_id.to_bytes()
        if self.tracker.view.num_peers <= 1:
            self._leave_round(control, timeout=0.0)
            self.gradient_round = None
        else:
            self.gradient_round = self.grad_averager.begin(control)
        return self.gradient_round

    def _finish_round(self, control: StepControl, epoch: int) -> None:
        """Wait for the averaged gradients of this epoch, which are the optimizer's then.

        :raises AveragingError: the round has failed, and its gradients go into the next one
        """
        wait = RoundWait(
            control,
            epoch,
            self.tracker,
            self.grad_averager,
            self.uplink,
            self.stop_timeout,
            self.patience,
            is_synchronous=self._is_synchronous,
            expect_for_states=self._expect_for_states,
            announces=not self.is_auxiliary,
        )
        try:
            group = wait.run()
        except (Exception, asyncio.CancelledError) as e:
            self._put_round_back(control, epoch, e)
            raise AveragingError("a round has failed") from e  # hivemind logs it if the round was in the background
        finally:
            if not self.overlap:  # in the background it costs the loop nothing
                self.stats.matchmaking_seconds += wait.matchmaking_seconds
                self.stats.averaging_seconds += wait.averaging_seconds
        group_id, *sent, violations = next(iter(group.values()))
        self.stats.record_step(self.grad_averager.finish(*sent))
        self.stats.group_size = len(group)
        self.stats.last_group = frozenset(peer_id.to_bytes() for peer_id in group) - {self.dht.peer_id.to_bytes()}
        self.tracker.ban(violations)
        if not self._is_synchronous() or self.is_auxiliary:
            # in other groups there are many peers that this one has not met
            self.trust.forget_groups()
            return
        self.state_averager.group_id = group_id
        self._expect_for_states()
        present = self.tracker.present
        absent = self.tracker.record_round(self.stats.last_group, wait.waited_since)
        # a peer in client mode cannot be pinged; one that has just reported is late, and would be so forever
        quiet = [peer_id for peer_id in absent if present[peer_id].time < get_dht_time() - FIRST_LOOK]
        self.tracker.mark_unresponsive(peer_id for peer_id in quiet if present[peer_id].client_mode)
        self.tracker.ping_silent_peers(absent)

    def _put_round_back(self, control: StepControl, epoch: int, error: BaseException) -> None:
        """Keep the gradients of a round that has failed for the next one."""
        if isinstance(error, MaliciousPeersError):
            self.tracker.ban(error.args[0])
        if not control.done():
            control.cancel()
        self.grad_averager.restore_pending()
        self.stats.record_failure()
        if self.is_auxiliary:  # it has no gradients to lose
            return
        text = (
            f"epoch {epoch}: averaging failed ({type(error).__name__}: {error}); the gradients of "
            f"{self.grad_averager.samples} samples go into the next round"
        )
        if self.stats.failed_in_a_row % 3 == 0:
            logger.warning(f"{text}. Is this machine or its uplink too busy? --preflight tells")
        else:
            logger.info(text)
        if isinstance(error, PeersUnreachableError):
            self.tracker.mark_unresponsive(error.args[0])

    def _make_step(self, finish: Callable[[], None] | None) -> None:
        """STEPPING: let the optimizer step, and average the parameters if that is due.

        :param finish: waits for the round, if that runs in the background; the step follows it there
        """
        self.epoch.enter(EpochState.STEPPING)
        averager, timeout = self.state_averager, self.uplink.timeouts.averaging
        next_epoch = max(self.local_epoch + 1, self.tracker.global_epoch)
        is_due = next_epoch % self.averaging.average_state_every == 0 and not averager.averaging_in_progress
        if not self.is_auxiliary:  # its step would wait for it in line, whatever the user asks
            self._finish_background(timeout)
        with_parameters = is_due and self._has_others()
        if with_parameters:
            self.state_round = averager.schedule_step(gather=next_epoch, timeout=timeout)
        averager.step(
            increment_epoch=True,
            wait_for_trigger=finish,
            optimizer_step=not self.is_auxiliary,
            delay_optimizer_step=self.overlap and not self.is_auxiliary,
            averaging_round=with_parameters,
            delay_averaging=True,  # or a peer misses the next round while it waits here for a group
            averaging_control=self.state_round if with_parameters else None,
            averaging_opts=dict(timeout=timeout) if with_parameters else None,
        )
        self.tracker.update_epoch(self.local_epoch)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """ACCUMULATING, in a new epoch, after a step or a download."""
        self.epoch.enter(EpochState.ACCUMULATING)
        self.epoch = Epoch(self.local_epoch)
        self._update_phase()
        self._declare_state()

    def _recover_from_failed_round(self, cause: BaseException) -> None:
        """SYNCING, if the round has failed because this peer has another state than the others; otherwise ACCUMULATING,
        until the next try."""
        if not STOP_REQUESTED.is_set():
            if isinstance(cause, StateDivergedError):
                self.load_state_from_peers(*cause.args)
                return
            if self.epoch.has_missed_step(self._look_at_swarm()):
                self.load_state_from_peers()
                return
            if isinstance(cause, PeersBehindError):  # they cannot load the last step once a new round has begun
                stop_waiting_for_stragglers(self.tracker, self.patience, self.local_epoch)
            # one of them may have ended the round by its death
            self.tracker.ping_silent_peers(self.tracker.present, quiet_for=0.0)
            self.epoch.retry_at = time.monotonic() + RETRY_AFTER
            self.tracker.schedule_refresh(RETRY_AFTER)
        self.epoch.enter(EpochState.ACCUMULATING)

    def load_state_from_peers(self, min_epoch: int | None = None, donors: Sequence[bytes] = ()) -> bool:
        """SYNCING: load the newest state of the swarm. Pending gradients are kept.

        :param min_epoch: load an earlier state only after some seconds without this one; default: the swarm's epoch
        :param donors: the ids of peers of which more than half have to describe the same state; default: those that are
            known to have worked
        :returns: whether a peer has sent it; otherwise the local state stays
        """
        self.epoch.enter(EpochState.SYNCING)
        control, self.gradient_round = self.gradient_round, None
        is_running = control is not None and control.stage == AveragingStage.RUNNING_ALLREDUCE
        if control is not None and not control.done() and self._is_synchronous() and not is_running:
            control.cancel()  # the group would exclude this peer
        self._leave_round(control, timeout=self.uplink.timeouts.averaging)
        self._finish_background(self.uplink.timeouts.averaging)
        self.grad_averager.last_step = None
        old_epoch = self.local_epoch
        wanted = self.tracker.global_epoch if min_epoch is None else min_epoch
        is_one_step_behind = self._is_synchronous() and old_epoch + 1 == wanted and not self.is_auxiliary
        with self.tracker.performance_ema.pause():
            how = self.sync.load(wanted, donors or self.tracker.list_donors(), is_one_step_behind)
        if how is None:
            self.epoch.enter(EpochState.ACCUMULATING)
            return False
        # a state that arrives one epoch late is not downloaded again at once: the swarm may just be stepping
        is_compared = self.epoch.is_compared
        self._begin_epoch()
        self.epoch.is_compared = is_compared
        samples = self.grad_averager.samples
        if self.local_epoch - old_epoch > MAX_STALENESS and samples:
            logger.warning(f"dropped {samples} samples: their epoch {old_epoch} is too old")
            self.grad_averager.drop_pending()
        logger.info(
            f"{how} epoch {self.local_epoch} (was at {old_epoch}), kept the gradients of {self.grad_averager.samples} "
            "samples"
        )
        self.stats.samples, self.stats.group_size = 0, 1
        self.tracker.report_local_progress(self.local_epoch, self.grad_averager.samples)
        if not self.is_auxiliary:
            self.tracker.announce()
        if self._is_synchronous():
            self.tracker.refresh_trusted_peers()
        self.sync.check_staleness()
        return True

    # --- what several of these need

    def _is_synchronous(self) -> bool:
        """Return whether all peers go from epoch to epoch together.

        They do not if the swarm averages in several groups, of which one may be faster, or if rounds run in the
        background: there, peers an epoch apart are usual.
        """
        group_size = self.averaging.target_group_size
        trainers = len(self.tracker.peers_at_epoch) + (0 if self.is_auxiliary else 1)
        return (group_size is None or trainers <= group_size) and not self.overlap

    def _has_others(self) -> bool:
        """Return whether a round can have two peers with gradients."""
        return self.tracker.view.num_peers > (2 if self.is_auxiliary else 1)

    def _update_phase(self) -> None:
        """Follow the epoch, which may be the first one of local steps."""
        batch = self.averaging.target_batch_size
        if self.is_local:
            batch *= self.averaging.local_steps
        self.tracker.set_target(batch - self.averaging.batch_size_lead)
        if self.averaging.robust_averaging == "clip":
            self.grad_averager.max_weight = self.state_averager.max_weight = batch
        if self.local and self.is_local != self.grad_averager.is_local:
            self.grad_averager.drop_pending()  # they are of the other kind
            self.grad_averager.is_local = self.is_local

    def _declare_state(self) -> None:
        if not self.client_mode:  # joining peers ask the peers that are furthest
            self.state_averager.state_sharing_priority = self.grad_averager.state_sharing_priority = self.local_epoch

    def _ban_malicious_peers(self, *controls: StepControl | None) -> None:
        """Ban the peers that have made one of these rounds fail, or the search for its group."""
        for control in controls:
            is_failure = control is not None and control.done() and not control.cancelled()
            if is_failure and isinstance(control.exception(), MaliciousPeersError):
                self.tracker.ban(control.exception().args[0])

    def _leave_round(self, control: StepControl | None, timeout: float) -> None:
        """Let a round whose group has formed go on, without data of this peer, and wait for its end so long."""
        if control is None or control.done():
            return
        if control.stage == AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()
            return
        if not control.triggered:
            control.weight = 0.0
            control.allow_allreduce()
        deadline = time.monotonic() + timeout
        while not control.done() and time.monotonic() < deadline and not self.stop_timeout.is_over():
            time.sleep(0.02)

    def _finish_background(self, timeout: float) -> None:
        """Wait so long for rounds in the background, end them, and apply what they have changed."""
        deadline, pending = time.monotonic() + timeout, self.state_averager.pending_updates
        while concurrent.futures.wait(pending, 0.02).not_done and time.monotonic() < deadline:
            if self.stop_timeout.is_over():
                break
        if not all(update.done() for update in pending):
            for control in filter(None, (self.gradient_round, self.state_round)):
                control.cancel()
            concurrent.futures.wait(pending, 1.0)  # they end with their round
        self.state_averager.step()


class AveragingHelper(CollaborativeOptimizer):
    """The optimizer of an auxiliary peer: without gradients of its own, it averages those of the trainers."""

    is_auxiliary = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.epoch_start = -float("inf")  # in seconds of the DHT's time

    def step(self) -> None:
        """Average with the trainers when their epoch ends; the model stays as it is."""
        self.state_averager.step(apply_delayed_updates=True)
        self._follow_trainers()
        if len(self.tracker.peers_at_epoch) >= 2:  # a trainer that is alone needs no help
            self._advance(self._look_at_swarm())

    def seconds_to_next_step(self, max_seconds: float) -> float:
        """Return how long this peer may do nothing: it has to be there when the trainers' epoch is about to end."""
        search_time = self.tracker.estimated_next_update_time - self.uplink.timeouts.matchmaking
        return min(max_seconds, max(0.05, search_time - get_dht_time()))

    def _follow_trainers(self) -> None:
        """Go to the trainers' epoch: the highest one that more than half of them have reached.

        Forward if they have stepped without this peer; back if they have lost a round that it took for averaged.
        """
        records = sorted(self.tracker.present.values(), key=lambda record: -record.epoch)
        if len(records) < 2:
            return
        middle = records[len(records) // 2]
        has_reported = middle.time > self.epoch_start + FIRST_LOOK
        if middle.epoch == self.local_epoch or (middle.epoch < self.local_epoch and not has_reported):
            return
        self._leave_round(self.gradient_round, timeout=0.0)
        self.gradient_round, self.epoch_start = None, get_dht_time()
        self.state_averager.set_epoch(middle.epoch)
        self.epoch = Epoch(middle.epoch)
        self._update_phase()
        with self.tracker.pause_updates():
            self.tracker.update_epoch(middle.epoch)
            self.tracker.set_swarm_epoch(middle.epoch)
        self.tracker.schedule_refresh(0.0)

    def _catch_up(self, look: SwarmLook) -> None:
        """Do nothing: `_follow_trainers` does it, and the trainers' state is not this peer's affair."""

    def _has_met_others(self) -> bool:
        return False  # it never steps alone

    def _recover_from_failed_round(self, cause: BaseException) -> None:
        if not STOP_REQUESTED.is_set():
            self.epoch.retry_at = time.monotonic()
            self.tracker.schedule_refresh(0.0)
        self.epoch.enter(EpochState.ACCUMULATING)

    def _begin_epoch(self) -> None:
        super()._begin_epoch()
        self.epoch_start = get_dht_time()
