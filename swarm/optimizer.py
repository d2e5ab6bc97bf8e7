"""The collaborative optimizer: failed rounds lose no gradients and take no step, and nobody waits in vain."""

import asyncio
import concurrent.futures
import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import hivemind
import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import CompressionBase
from hivemind.utils import get_dht_time

from arguments import AveragingArguments
from swarm.gradients import GradientAverager
from swarm.guard import MaliciousPeersError
from swarm.line import LINE, from_line
from swarm.local_steps import LocalSteps, LocalStepsAverager, OuterOptimizer
from swarm.plan import count_bits
from swarm.processes import STOP_REQUESTED, exit_if_process_dies
from swarm.progress import FIRST_LOOK, ProgressTracker
from swarm.rounds import PeersBehindError, PeersUnreachableError, StateDivergedError
from swarm.states import StateAverager, list_params

logger = logging.getLogger("swarm")

# All in seconds.
FETCH_TIMEOUT = 5.0  # for one look at the swarm's progress; the DHT itself gives up on a peer after 3
SIGN_PERIOD = 3.0  # between two signs of life while this peer waits for a round
RETRY_AFTER = 1.0  # between a failed round and the next: who is there has reported by then
LEAST_DOWNLOAD_TIMEOUT, SHUTDOWN_TIMEOUT = 600.0, 5.0
# After a stop request, for a round of which no byte comes or goes, and for any round; and without one, at the end.
STOP_PATIENCE, MAX_STOP_PATIENCE, END_PATIENCE = 2.0, 30.0, 120.0
RETRY_PERIOD = 10.0  # between two downloads of the state when nobody sent it the first time

# A peer one epoch behind is waited for like any other where all go in step: it makes the step of the others while they
# accumulate the next one, and would come too late forever. After a wait in vain not again in so many epochs.
PATIENT_EVERY = 5
MAX_STALENESS = 10  # epochs for which gradients are worth keeping; a laptop that slept for hours has older ones


class AveragingError(Exception):
    """A gradient averaging round failed; its gradients are kept."""


class CollaborativeOptimizer:
    """Steps when the swarm has gathered a batch, with the average of all peers' gradients, and never waits in vain.

    Each `step` adds gradients to what this peer has not yet sent. When the swarm has enough of them, a round averages
    them in a group of peers, and the optimizer, on a copy of the parameters in host memory, steps to the next epoch.
    After a failed round the epoch stays (in the background it does not), and a later `step` tries again. Who has missed
    a step takes over the others'.

    With `--local_steps` above 1, each `step` also moves this peer's model, from some epoch on; epochs take so many
    times the batch, and what is averaged is how far each peer has come, see swarm/local_steps.py.
    """

    matchmaking_time = from_line("matchmaking_time")
    averaging_timeout = from_line("averaging_timeout")
    next_chunk_timeout = from_line("next_chunk_timeout")

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
        auxiliary: bool = False,
        **compressions: CompressionBase,
    ):
        """
        :param params: groups of the model's parameters, from which `optimizer` makes one of their copies
        :param client_mode: accept no incoming connection
        :param auxiliary: without gradients, average those of others
        :param compressions: of gradients, local_steps (default: the same), averaged and given (load_state) states
        """

        def select(*names: str) -> dict:
            return {name: getattr(averaging, name) for name in names}

        def make_outer(groups: list[dict]) -> OuterOptimizer:
            return OuterOptimizer(optimizer(groups), averaging.outer_lr, averaging.outer_momentum)

        times = (averaging.matchmaking_time, averaging.request_timeout, averaging.averaging_timeout)
        LINE.fix(*times, averaging.next_chunk_timeout)  # in seconds; those that are None follow from the line
        self.dht, self.client_mode, self.auxiliary = dht, client_mode, auxiliary
        #: peers whose gradients verifiably entered the last step, this one included
        self.averaged_with = 1
        #: rounds of this peer that succeeded, and that failed
        self.rounds = 0
        self.failed_rounds = 0
        self._failures = 0  # in a row
        #: samples of this peer in the last step, and in all steps together
        self.epoch_samples = 0
        self.total_samples = 0
        #: how often in a row a downloaded state was already behind the swarm when it arrived
        self.late_downloads = 0
        self._download_after = -math.inf  # time before which no download is tried
        self._download_from = 0  # the swarm's epoch before which none is tried
        self._retry_after = -math.inf  # time of the look at the swarm's progress before which no round is tried
        self._waited_since: float | None = None  # DHT time at which the last round began to miss expected peers
        self._patient_from = 0  # the epoch before which this peer waits for no straggler
        #: ids of the others in the last round
        self.last_group: frozenset[bytes] = frozenset()
        #: the last rounds of gradients, which are looked for in advance, and of parameters
        self.scheduled_grads: StepControl | None = None
        self.scheduled_state: StepControl | None = None
        self._must_be_exact = True  # whether the next look at the others may show that they are a single epoch ahead
        #: after a stop request: when it was first seen, and what had come and gone when that last changed, and when
        self._stop_seen: float | None = None
        self._last_traffic: tuple[tuple[int, int] | None, float] = (None, 0.0)
        self._epoch_start = -math.inf  # of an auxiliary peer
        self.averaging, self.average_state_every = averaging, averaging.average_state_every
        #: seconds spent so far while a group formed, and while gradients were averaged
        self.round_seconds = {"waiting": 0.0, "averaging": 0.0}
        self.tracker = ProgressTracker(
            dht,
            prefix,
            averaging.target_batch_size - averaging.batch_size_lead,
            client_mode=client_mode,
            start=True,
            **select("min_refresh_period", "max_refresh_period", "default_refresh_period", "expected_drift_peers"),
            **select("expected_drift_rate", "metadata_expiration", "performance_ema_alpha"),
        )
        self.tracker.vouched = set(dht.vouched.workers if dht.vouched else ())
        options = dict(
            dht=dht,
            client_mode=client_mode,
            auxiliary=auxiliary,
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.averaging_timeout,
            next_chunk_timeout=self.next_chunk_timeout,
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
        self.local: LocalSteps | None = None
        if averaging.local_steps > 1:
            self.local = LocalSteps(self.state_averager.main_parameters, self.opt, optimizer, params)
            self.grad_averager.local = self.state_averager.local = self.local
        self._update_phase()
        with self.grad_averager.get_tensors() as gradients:
            for param, gradient in zip(list_params(self.opt), gradients, strict=True):
                param.grad = gradient
        if LINE.mbits:  # in a large group, each peer sends all of its gradients, and as many averages
            bits = count_bits(self.grad_averager._averaged_tensors, self.grad_averager.codec)
            seconds = 2 * bits / (LINE.mbits * 1e6)
            LINE.expect_round(seconds, own_seconds=seconds)
            logger.info(f"a round of {bits / 8e6:.3g} MB: {LINE.format_timeouts()}")

    @property
    def opt(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters' copies."""
        return self.state_averager.optimizer

    @property
    def local_epoch(self) -> int:
        """Steps that lie behind this peer's parameters."""
        return self.state_averager.local_epoch

    @property
    def param_groups(self) -> list[dict]:
        """The model's parameters, for torch's GradScaler."""
        return [{"params": list(self.state_averager.main_parameters)}]

    def zero_grad(self) -> None:
        """Forget the model's gradients, which `step` has added up."""
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
        """Whether rounds run in the background: of local steps only, where there are any."""
        return self.averaging.overlap and (self.local is None or self.is_local)

    def _update_phase(self) -> None:
        """By the epoch, after it has changed."""
        batch = self.averaging.target_batch_size * (self.averaging.local_steps if self.is_local else 1)
        self.tracker.set_target(batch - self.averaging.batch_size_lead)
        if self.averaging.robust_averaging == "clip":
            self.grad_averager.max_weight = self.state_averager.max_weight = batch
        if self.local and self.is_local != self.grad_averager.is_local:
            self.grad_averager.drop_pending()  # of the other kind
            self.grad_averager.is_local = self.is_local

    def training_state(self) -> dict:
        """A copy of all that this peer's next step depends on but its gradients, see StateAverager.dump_state."""
        own = {"local": copy.deepcopy(self.local.state_dict())} if self.local and self.local.inner else {}
        return self.state_averager.dump_state() | {"total_samples": self.total_samples} | own

    def load_training_state(self, state: dict) -> None:
        """Take over what `training_state` returned, also that of another process or device.

        :raises ValueError: the tensors have other shapes than this optimizer's; nothing has changed then
        """
        self.state_averager.restore_state(state)
        epoch, self.total_samples = self.local_epoch, state["total_samples"]
        self._update_phase()
        self.grad_averager.last_step = None
        self.grad_averager.drop_pending()
        if "local" in state:
            self.local.load_state_dict(state["local"])
        with self.tracker.pause_updates():
            self.tracker.update_epoch(epoch)
            if not self.tracker.present:  # an epoch that this peer was at before counts no more
                self.tracker.global_progress.epoch = epoch
        self._must_be_exact = True
        self._declare_state()

    def _declare_state(self) -> None:
        if not self.client_mode:  # newcomers ask those who are furthest
            self.state_averager.state_sharing_priority = self.grad_averager.state_sharing_priority = self.local_epoch

    def step(self, batch_size: int = 0) -> None:
        """Add the gradients of so many samples to what is not yet sent; when the swarm has enough, average and step.

        :param batch_size: of which the model's gradients are the mean; an auxiliary peer has none
        """
        self.state_averager.step(apply_delayed_updates=True)
        if self.auxiliary:
            self._sync_epoch_with_trainers()
            if len(self.tracker.peers_at_epoch) < 2:
                return  # who is alone needs no help
        else:
            self.grad_averager.accumulate(batch_size)
            self.tracker.report_local_progress(self.local_epoch, self.grad_averager.samples)
            if self._needs_state_sync():
                self.load_state_from_peers()
                return
        if self._start_matchmaking() or self.tracker.ready_to_update_epoch:
            self._end_epoch()

    def leave(self) -> None:
        """Tell the others that this peer is about to go: `shutdown` comes when it has saved what it has. A round that
        they have begun goes on, without anything of this peer."""
        self.tracker.shutdown(SHUTDOWN_TIMEOUT)
        self._leave_round(self.scheduled_grads, patience=0.0)
        self._finish_background(END_PATIENCE)  # it still changes the parameters

    def shutdown(self) -> None:
        self.tracker.shutdown(SHUTDOWN_TIMEOUT)
        self._finish_background(END_PATIENCE)
        self._leave_round(self.scheduled_grads, patience=END_PATIENCE)
        if self.is_local:  # what is saved is the swarm's
            self.grad_averager.drop_pending()
        self.state_averager.shutdown()
        self.grad_averager.shutdown()

    def _leave_round(self, control: StepControl | None, patience: float) -> None:
        """Where a group has begun, let its round go on, without anything of this peer, and wait for its end so long."""
        if control is None or control.done():
            return
        if control.stage == AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()
            return
        if not control.triggered:
            control.weight = 0.0
            control.allow_allreduce()
        deadline = time.monotonic() + patience
        while not control.done() and time.monotonic() < deadline and not self._gives_up():
            time.sleep(0.02)

    def _finish_background(self, patience: float) -> None:
        """Wait so long for rounds in the background, end them, and take over what they have changed."""
        deadline, pending = time.monotonic() + patience, self.state_averager.pending_updates
        while concurrent.futures.wait(pending, 0.02).not_done and time.monotonic() < deadline and not self._gives_up():
            pass
        if not all(update.done() for update in pending):
            for control in filter(None, (self.scheduled_grads, self.scheduled_state)):
                control.cancel()
            concurrent.futures.wait(pending, 1.0)  # they end with their round
        self.state_averager.step()

    def _gives_up(self) -> bool:
        """Whether this peer was asked to stop, and need wait no longer for a round."""
        if not STOP_REQUESTED.is_set():
            return False
        now, (traffic, _) = time.monotonic(), self._last_traffic
        self._stop_seen = self._stop_seen or now
        if traffic != LINE.traffic:
            self._last_traffic = LINE.traffic, now
        patience = STOP_PATIENCE / 2 if self.auxiliary else STOP_PATIENCE
        return now > min(self._last_traffic[1] + patience, self._stop_seen + MAX_STOP_PATIENCE)

    def seconds_to_next_step(self, at_most: float) -> float:
        """How long an auxiliary peer may do nothing: it has to be there when the trainers' epoch is about to end."""
        return min(at_most, max(0.05, self.tracker.estimated_next_update_time - self.matchmaking_time - get_dht_time()))

    def _sync_epoch_with_trainers(self) -> None:
        """Bring an auxiliary peer to the trainers' epoch: it has no progress of its own.

        That is the highest epoch that more than half of them have reached. Forward when they have stepped without it;
        back when they have lost a round that it took for averaged.
        """
        records = sorted(self.tracker.present.values(), key=lambda record: -record.epoch)
        if len(records) < 2:
            return
        middle = records[len(records) // 2]
        epoch, reported = middle.epoch, middle.time > self._epoch_start + FIRST_LOOK
        if epoch == self.local_epoch or (epoch < self.local_epoch and not reported):
            return
        self._leave_round(self.scheduled_grads, patience=0.0)
        self.scheduled_grads, self._epoch_start = None, get_dht_time()
        self.state_averager.set_epoch(epoch)
        self._update_phase()
        with self.tracker.pause_updates():
            self.tracker.update_epoch(epoch)
            self.tracker.global_progress.epoch = epoch
        self.tracker.schedule_refresh(0.0)

    def _needs_state_sync(self) -> bool:
        """Whether the others are further: once an epoch by any number, as one of them may just be the first."""
        if not self._can_sync_state():
            return False
        if self._must_be_exact and self.tracker.fetched_global_progress_this_epoch.is_set():
            self._must_be_exact = False
            return self.local_epoch != self.tracker.global_epoch
        return self.local_epoch < self.tracker.global_epoch - 1

    def _can_sync_state(self) -> bool:
        epoch = self.tracker.global_epoch
        is_promising = self._is_one_step_behind(epoch) or epoch >= self._download_from
        return time.monotonic() >= self._download_after and is_promising

    def _is_one_step_behind(self, epoch: int) -> bool:
        return self.local_epoch + 1 == epoch and self._is_synchronous() and not self.auxiliary

    def _replay_missed_step(self) -> bool:
        """Make the last step of the swarm with the gradients that others have averaged: from the same state they lead
        to the same one, and are fewer bytes than that.

        :returns: whether somebody who has started from this very state gave them
        """
        loaded = self.state_averager.download_missed_step(
            self.tracker.list_donors(), avoid=list(self.tracker.silent), timeout=self._download_timeout
        )
        if loaded is None:
            return False
        gradients, group_id = loaded
        before = self.local_epoch, self.state_averager.lineage
        with self.grad_averager.get_tensors() as averaged_gradients:
            for tensor, gradient in zip(averaged_gradients, gradients, strict=True):
                tensor.copy_(gradient)
        self.state_averager.group_id = group_id
        self.state_averager.step(increment_epoch=True, optimizer_step=True)
        self._publish_last_step(*before)
        return True

    def _publish_last_step(self, epoch: int, digest: str) -> None:
        """To who was late for it; in the background, the optimizer may be using its gradients still."""
        if not self.overlap:
            self.grad_averager.last_step = epoch, digest, self.state_averager.group_id

    @property
    def _download_timeout(self) -> float:
        return max(LEAST_DOWNLOAD_TIMEOUT, LINE.seconds_for(12 * self.state_averager.total_size))

    def load_state_from_peers(self, min_epoch: int | None = None, donors: Sequence[bytes] = ()) -> bool:
        """Take over the newest state of the swarm; gradients that are not yet averaged are kept.

        :param min_epoch: take an earlier state only after some seconds without this one; default: the swarm's epoch
        :param donors: ids of peers of which more than half have to describe the same state; default: those that are
            known to have worked
        :returns: whether a peer sent it; otherwise the local state stays, and peers that do not answer do not count
            any more, so that training continues without them
        """
        control, self.scheduled_grads = self.scheduled_grads, None
        is_running = control is not None and control.stage == AveragingStage.RUNNING_ALLREDUCE
        if control is not None and not control.done() and self._is_synchronous() and not is_running:
            control.cancel()  # the group would leave this peer out
        self._leave_round(control, patience=self.averaging_timeout)
        self._finish_background(self.averaging_timeout)
        self.grad_averager.last_step = None
        old_epoch = self.local_epoch
        wanted = self.tracker.global_epoch if min_epoch is None else min_epoch
        with self.tracker.performance_ema.pause():
            is_one_behind = self._is_one_step_behind(wanted)
            has_stepped = loaded = is_one_behind and self._replay_missed_step()
            if is_one_behind and not loaded and self.tracker.global_epoch < self._download_from:
                self._download_after = time.monotonic() + RETRY_AFTER
                return False
            loaded = loaded or self.state_averager.load_state_from_peers(
                wanted,
                donors or self.tracker.list_donors(),
                avoid=list(self.tracker.silent),
                timeout=self._download_timeout,
            )
        if not loaded:
            ahead = [peer_id for peer_id, record in self.tracker.present.items() if record.epoch > self.local_epoch]
            logger.warning("no peer sent its state: continuing with the local one")
            self.tracker.ping_silent_peers(ahead)
            self._download_after = time.monotonic() + RETRY_PERIOD
            return False

        self._update_phase()
        samples = self.grad_averager.samples
        if self.local_epoch - old_epoch > MAX_STALENESS and samples:
            logger.warning(f"dropped {samples} samples: their epoch {old_epoch} is too old")
            self.grad_averager.drop_pending()
        logger.info(
            f"{'made the step to' if has_stepped else 'took over the state of'} epoch {self.local_epoch} (was at "
            f"{old_epoch}), kept the gradients of {self.grad_averager.samples} samples"
        )
        self.epoch_samples, self.averaged_with = 0, 1
        self.tracker.report_local_progress(self.local_epoch, self.grad_averager.samples)
        self._declare_state()
        if not self.auxiliary:
            self.tracker.announce()
        if self._is_synchronous():
            self.tracker.refresh_trusted_peers()
        self._check_download_staleness()
        return True

    def _check_download_staleness(self) -> None:
        """Tell a peer that can never catch up why, and let it try less often."""
        with self.tracker.lock_global_progress, contextlib.suppress(concurrent.futures.TimeoutError):
            self.tracker.refresh_now(timeout=FETCH_TIMEOUT)
        epochs = self.tracker.global_epoch - self.local_epoch
        if epochs <= 0:
            self.late_downloads = 0
            return
        self.late_downloads += 1
        # one that begins with an epoch is there before the next one, if that is possible at all
        self._download_from = self.tracker.global_epoch + 1
        megabytes, seconds = self.state_averager.received[0] / 1e6, max(1, self.state_averager.received[2]) / 1000
        # what has to come within an epoch, with a connection as it was: a step
        step_share = min(1.0, self.state_averager.count_step_size_bits() / 8e6 / megabytes)
        is_too_slow = step_share * epochs > 1  # even a step takes longer to arrive than an epoch lasts
        if self.late_downloads >= 3 or is_too_slow:
            pause = min(300.0, seconds * 2 ** max(0, self.late_downloads - 3))
            logger.warning(
                f"cannot catch up: a download of {megabytes:.1f} MB took {seconds:.1f} s "
                f"({megabytes * 8 / seconds:.1f} Mbit/s), and meanwhile the swarm made {epochs} epochs of about "
                f"{seconds / epochs:.1f} s. It takes a faster connection, or a larger --target_batch_size for all. "
                f"Next try in {pause:.0f} s"
            )
            self._download_after = time.monotonic() + pause

    def _start_matchmaking(self) -> bool:
        """In good time before the epoch ends, so that the round begins as soon as it has ended; returns whether a group
        has formed, which waits for this peer, as that may count fewer samples than the others."""
        digest = self.state_averager.lineage
        self.grad_averager.round_state = [self.local_epoch, self._is_synchronous(), digest]
        others = self.tracker.peers_at_epoch
        # all of them: a group that forms before the epoch ends takes nobody in who comes then
        self.grad_averager.set_expected_peers(others, self._count_min_group_size(others), self.tracker.silent)
        self._set_expected_state_peers()
        # not when alone: a round that is cancelled late still goes on, with a newcomer and gradients of an old epoch
        is_soon = self.tracker.estimated_next_update_time - get_dht_time() <= self.matchmaking_time
        control = self.scheduled_grads
        if self._has_others and is_soon and (control is None or control.triggered or control.done()):
            self._ban_malicious_peers(control)
            self.scheduled_grads = self.grad_averager.schedule_step()
            # which of them are gone is known when the epoch ends; a joining peer finds records of long dead peers
            self.tracker.ping_silent_peers(self.tracker.present)
        return control is not None and control.stage == AveragingStage.AWAITING_TRIGGER and not control.triggered

    @property
    def _has_others(self) -> bool:
        return self.tracker.global_progress.num_peers > 1 + self.auxiliary

    def _set_expected_state_peers(self) -> None:
        """Let the averaging of parameters wait, in step, for those of the last round alone: whoever makes the step
        later, by download, has no part in it."""
        others = self.tracker.peers_at_epoch
        if self._is_synchronous() and not self.auxiliary:
            others = self.last_group & self.tracker.present.keys()
        self.state_averager.set_expected_peers(others, silent=self.tracker.silent)

    def _start_round(self) -> StepControl | None:
        """The round of this epoch's gradients, or None where nobody else is there."""
        control = self.scheduled_grads
        self._ban_malicious_peers(control, self.scheduled_state)
        if self.scheduled_state is not None and self.scheduled_state.done():
            self.scheduled_state = None
        if control is not None and (control.triggered or control.done()):
            control = None  # the group that was looked for in advance has failed, while others are there
        if not self.overlap:
            self.averaged_with = 1
        self.state_averager.group_id = self.dht.peer_id.to_bytes()
        if self.tracker.global_progress.num_peers <= 1:
            self._leave_round(control, patience=0.0)
            self.scheduled_grads = None
        else:
            self.scheduled_grads = self.grad_averager.begin(control)
        return self.scheduled_grads

    def _ban_malicious_peers(self, *controls: StepControl | None) -> None:
        """Ban the peers that have made one of these rounds fail, or the search for its group."""
        for ended in controls:
            is_failure = ended is not None and ended.done() and not ended.cancelled()
            if is_failure and isinstance(ended.exception(), MaliciousPeersError):
                self.tracker.ban(ended.exception().args[0])

    def _finish_round(self, control: StepControl, epoch: int) -> None:
        """Wait for the averaged gradients of this epoch, which are the optimizer's then.

        :raises AveragingError: the round has failed, and its gradients go into the next one
        """
        try:
            group = self._wait_for_round(control)
        except (Exception, asyncio.CancelledError) as e:
            if isinstance(e, MaliciousPeersError):
                self.tracker.ban(e.args[0])
            if not control.done():
                control.cancel()
            self.grad_averager.restore_pending()
            self.failed_rounds, self._failures = self.failed_rounds + 1, self._failures + 1
            self.averaged_with = 1
            if not self.auxiliary:  # nothing of its own is lost
                samples = self.grad_averager.samples
                text = f"epoch {epoch}: averaging failed ({type(e).__name__}: {e}); the gradients of {samples} samples "
                advice = ". Is this machine or its line too busy? --preflight tells" * (self._failures % 3 == 0)
                logger.log(logging.WARNING if advice else logging.INFO, f"{text}go into the next round{advice}")
                if isinstance(e, PeersUnreachableError):
                    self.tracker.mark_unresponsive(e.args[0])
            raise AveragingError("a round has failed") from e  # hivemind logs it where the round was in the background
        group_id, *sent, lies = next(iter(group.values()))
        self._count_round(self.grad_averager.finish(*sent))
        self.tracker.ban(lies)
        self.averaged_with = len(group)
        self.last_group = frozenset(peer_id.to_bytes() for peer_id in group) - {self.dht.peer_id.to_bytes()}
        if self._is_synchronous() and not self.auxiliary:
            self.state_averager.group_id = group_id
            self._set_expected_state_peers()
            present, absent = self.tracker.present, self.tracker.record_round(self.last_group, self._waited_since)
            # nobody can ping a peer in client mode; one that has just reported is late, and would be so forever
            quiet = [peer_id for peer_id in absent if present[peer_id].time < get_dht_time() - FIRST_LOOK]
            self.tracker.mark_unresponsive(peer_id for peer_id in quiet if present[peer_id].client_mode)
            self.tracker.ping_silent_peers(absent)
        else:
            # in other groups there are many whom this peer has not met
            self.tracker.partners.clear()
            self.tracker.vouched.clear()

    def _wait_for_round(self, control) -> dict:
        """The round's result. While no group is found, look whether anybody is there, and whether the others are here.

        hivemind waits for averaging_timeout in both cases: for dead peers whose records are still there (note 22), and
        for a round that was over before this peer came.
        """
        start = last = time.monotonic()
        asked, next_look, next_sign = get_dht_time(), start + FIRST_LOOK, start + SIGN_PERIOD
        patience = self.matchmaking_time if self._is_synchronous() else LINE.round_seconds / 2
        patience *= self.local_epoch >= self._patient_from
        answer, self._waited_since, at_least = None, None, 1
        while True:
            deadline = start + self.averaging_timeout  # which follows the group's bandwidths
            if self._gives_up():
                raise AllreduceException("this peer was asked to stop")
            if last >= next_sign and not self.auxiliary:
                next_sign = last + SIGN_PERIOD
                self.tracker.announce()
            activity = "averaging" if control.stage == AveragingStage.RUNNING_ALLREDUCE else "waiting"
            try:
                return control.result(max(0.0, min(0.02, deadline - time.monotonic())))
            except concurrent.futures.TimeoutError:
                if control.done():
                    return control.result()  # just now, or its failure is a TimeoutError too
                if time.monotonic() >= deadline:
                    if control.stage == AveragingStage.LOOKING_FOR_GROUP:
                        self.tracker.exclude_idle_peers(asked, len(self.tracker.present) * self._is_synchronous())
                    raise
            finally:
                now = time.monotonic()
                # in the background it costs the loop nothing
                self.round_seconds[activity] += (now - last) * (not self.overlap)
                last = now
            if control.stage != AveragingStage.LOOKING_FOR_GROUP:
                self.grad_averager.set_expected_peers(self.tracker.peers_at_epoch, at_least, self.tracker.silent)
                continue
            waited = time.monotonic() - start
            if waited > self.matchmaking_time and self._waited_since is None:
                self._waited_since = asked
                self._stop_waiting_for_stragglers()
                # where there are more, they may be busy with long steps: most of the swarm will do
                self.tracker.exclude_idle_peers(asked, len(self.tracker.peers_at_epoch) // 2 * self._is_synchronous())
            others = self.tracker.peers_at_epoch
            at_least = self._count_min_group_size(others if self._waited_since is None else ())
            self.grad_averager.set_expected_peers(others, at_least, self.tracker.silent)
            self._set_expected_state_peers()  # that of the last epoch may still be looking for a group (note 72)
            if time.monotonic() >= next_look and answer is None:
                if all(question.done() for question in self.tracker.questions):
                    self.tracker.ping_silent_peers(self.tracker.peers_at_epoch)
                answer = self.tracker.request_records()
            if answer is None or not answer.done():  # a dead peer delays the DHT for seconds
                continue
            self.tracker.apply_records(answer.result())
            answer, next_look = None, time.monotonic() + FIRST_LOOK
            if self._has_missed_round():
                raise AllreduceException("the others have stepped without this peer")
            if waited > patience:
                self._stop_waiting_for_stragglers()
            if not self.tracker.peers_at_epoch or self.tracker.lacks_quorum:
                raise AllreduceException("too few others are there")

    def _stop_waiting_for_stragglers(self) -> None:
        """In this epoch, the round needs nobody any longer who is an epoch behind."""
        before = len(self.tracker.peers_at_epoch)
        self.tracker.impatient_epoch = self.local_epoch
        if self.local_epoch >= self._patient_from and len(self.tracker.peers_at_epoch) < before:  # in vain
            self._patient_from = self.local_epoch + PATIENT_EVERY

    def _count_min_group_size(self, others: Sequence[bytes]) -> int:
        """Peers that a round takes: these others, as long as they are waited for, and most of the swarm in any case."""
        return max(self.tracker.quorum, 1 + len(others)) if self._is_synchronous() else 1

    def _is_synchronous(self) -> bool:
        """Whether all peers go from epoch to epoch together.

        Not where the swarm averages in several groups, of which one may be faster, nor where rounds run on in the
        background: neighbours an epoch apart are nothing unusual there.
        """
        group_size = self.grad_averager.matchmaking_kwargs["target_group_size"]
        is_one_group = group_size is None or len(self.tracker.peers_at_epoch) + (not self.auxiliary) <= group_size
        return is_one_group and not self.overlap

    def _has_missed_round(self) -> bool:
        """Whether the others have stepped without this peer.

        A step by its own gradients alone would part it from them: the averaging of parameters brings those together
        again, but not the moments.
        """
        return self._is_synchronous() and self.tracker.global_epoch > self.local_epoch

    def _end_epoch(self) -> None:
        if self._has_missed_round():
            if self._can_sync_state() and not self.auxiliary:
                self.load_state_from_peers()
            return
        if self.tracker.last_fetch < self._retry_after or self.tracker.lacks_quorum:
            return  # the next steps go on meanwhile
        if not self.tracker.peers_at_epoch and not self.auxiliary:
            # newcomers have to download the state of who goes ahead alone: one more look first
            with self.tracker.lock_global_progress, contextlib.suppress(concurrent.futures.TimeoutError):
                self.tracker.refresh_now(timeout=FETCH_TIMEOUT)
            if self.tracker.peers_at_epoch:
                return
        before = self.local_epoch, self.state_averager.lineage
        try:
            with self.tracker.pause_updates():
                self._average_and_step()
        except AveragingError as e:
            self._handle_failed_round(e.__cause__)
            return
        self._publish_last_step(*before)
        self._epoch_start = get_dht_time()

    def _count_round(self, samples: int) -> None:
        self.epoch_samples = samples
        self.total_samples += samples
        self.rounds, self._failures = self.rounds + 1, 0

    def _average_and_step(self) -> None:
        """:raises AveragingError: the round has failed, and nothing has changed"""
        averager, finish = self.state_averager, None
        if self.overlap:
            self._finish_background(self.averaging_timeout)
        control = self._start_round()
        if control is None:
            self.grad_averager.take_pending()
            self._count_round(self.grad_averager.finish())
        elif self.overlap and not self.auxiliary:
            finish = partial(self._finish_round, control, self.local_epoch)
        else:
            self._finish_round(control, self.local_epoch)
        next_epoch = max(self.local_epoch + 1, self.tracker.global_epoch)
        is_due = next_epoch % self.average_state_every == 0 and not averager.averaging_in_progress
        if not self.auxiliary:  # its step would wait for it in line, whatever the user asks
            self._finish_background(self.averaging_timeout)
        if with_parameters := is_due and self._has_others:
            self.scheduled_state = averager.schedule_step(gather=next_epoch, timeout=self.averaging_timeout)
        averager.step(
            increment_epoch=True,
            wait_for_trigger=finish,
            optimizer_step=not self.auxiliary,
            delay_optimizer_step=self.overlap and not self.auxiliary,
            averaging_round=with_parameters,
            delay_averaging=True,  # or a peer misses the next round while it waits here for a group
            averaging_control=self.scheduled_state if with_parameters else None,
            averaging_opts=dict(timeout=self.averaging_timeout) if with_parameters else None,
        )
        self._update_phase()
        self.tracker.update_epoch(self.local_epoch)
        self._must_be_exact = True
        self._declare_state()

    def _handle_failed_round(self, cause: BaseException) -> None:
        """Find out what the round has failed of."""
        if STOP_REQUESTED.is_set():
            return
        if self.auxiliary:
            self._retry_after = time.monotonic()
            self.tracker.schedule_refresh(0.0)
            return
        if isinstance(cause, StateDivergedError):
            self.load_state_from_peers(*cause.args)
        elif self._has_missed_round():
            self.load_state_from_peers()
        else:
            if isinstance(cause, PeersBehindError):  # they cannot load the last step once a new round has begun
                self._stop_waiting_for_stragglers()
            # one of them may have ended the round by its death
            self.tracker.ping_silent_peers(self.tracker.present, quiet_for=0.0)
            self._retry_after = time.monotonic() + RETRY_AFTER
            self.tracker.schedule_refresh(RETRY_AFTER)
