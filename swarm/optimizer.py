"""The collaborative optimizer: a failed round loses no gradients and makes no step, and no peer waits for a dead one.

The docstrings of methods that change the state of the epoch (`swarm/epoch.py`) begin with the new state.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import hivemind
import torch
from hivemind.compression import CompressionBase

from common.signals import STOP_REQUESTED
from swarm import logger
from swarm.allreduce import count_bits
from swarm.averager import PeersBehindError, StateDivergedError
from swarm.config import AveragingConfig
from swarm.epoch import RETRY_AFTER, Epoch, EpochState
from swarm.gradients import GradientAverager
from swarm.local_steps import LocalSteps, add_outer_momentum
from swarm.log_steps import LogSteps
from swarm.optimizer_state import StateAverager, list_params
from swarm.processes import exit_if_process_dies
from swarm.progress import PING_DELAY, PeerTracker
from swarm.rounds import AveragingError, Rounds
from swarm.state_sync import StateSync
from swarm.trust import PeerTrust

END_TIMEOUT = 120.0  # seconds to wait for a round at the end, without a stop request
MAX_STALENESS = 10  # epochs for which gradients are worth keeping; a laptop that slept for hours has older ones


class CollaborativeOptimizer:
    """An optimizer that steps with the average of all peers' gradients once the swarm has gathered a batch.

    Each `step` adds gradients to the pending ones. When the swarm has enough of them, a round averages them in a group
    of peers, and the optimizer, on a copy of the parameters in host memory, steps to the next epoch. After a failed
    round the epoch stays (in the background it does not), and a later `step` tries again. With `local_steps` N above 1,
    from some epoch on, each `step` also moves this peer's model, an epoch takes N times the samples, and commits of the
    log take the place of rounds, see swarm/log_steps.py.
    """

    is_auxiliary = False

    def __init__(
        self,
        dht: hivemind.DHT,
        prefix: str,
        averaging: AveragingConfig,
        *,
        params: list[dict],
        optimizer: Callable[[list[dict]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
        folder: Path | None = None,
        **compressions: CompressionBase,
    ):
        """
        :param dht: the DHT, with the uplink that rounds and states are sent through
        :param params: the groups of the model's parameters; `optimizer` gets copies of them in host memory
        :param folder: a folder of this peer's key, for the log; only local steps need it
        :param compressions: the codecs `gradients`, `state_averaging`, `load_state` (downloads) and `local_steps`
        """
        make = (lambda groups: add_outer_momentum(optimizer(groups))) if averaging.local_steps > 1 else optimizer
        self.uplink = dht.uplink
        self.averaging = averaging
        self.uplink.fix_timeouts(averaging)
        trust = PeerTrust(self.uplink, dht.attestation.workers if dht.attestation else (), self.is_auxiliary)
        self.tracker = PeerTracker(dht, prefix, averaging, trust)
        max_weight = averaging.target_batch_size if averaging.robust_averaging == "clip" else None
        options = dict(dht=dht, client_mode=dht.client_mode and not self.is_auxiliary, auxiliary=self.is_auxiliary)
        options |= dict(target_group_size=averaging.target_group_size, min_vector_size=averaging.min_vector_size)
        options |= dict(min_matchmaking_time=self.uplink.timeouts.matchmaking, max_weight=max_weight, start=True)
        own = dict(params=params, optimizer=make, scheduler=scheduler)
        own |= dict(initialize_optimizer=False, offload_optimizer=True, custom_gradients=True)  # note 8
        own |= dict(compression=compressions["state_averaging"], state_compression=compressions["load_state"])
        self.state_averager = StateAverager(prefix=f"{prefix}_state_averager", **own, **options)
        exit_if_process_dies(self.state_averager, "state averager")
        own = dict(prefix=f"{prefix}_grad_averager", compression=compressions["gradients"])
        self.grad_averager = GradientAverager(self.state_averager.main_parameters, **own, **options)
        exit_if_process_dies(self.grad_averager, "gradient averager")
        self.state_averager.wait_until_ready()  # both have started at the same time
        self.grad_averager.wait_until_ready()
        self.state_averager.grad_averager = self.grad_averager
        with self.grad_averager.get_tensors() as gradients:
            for param, gradient in zip(list_params(self.opt), gradients, strict=True):
                param.grad = gradient
        self.rounds = Rounds(self.tracker, self.state_averager, self.grad_averager)
        self.stats = self.rounds.stats
        self.sync = StateSync(self.tracker, self.state_averager)
        self.local: LocalSteps | None = None
        self.log_steps: LogSteps | None = None
        self.parked: tuple[list[torch.Tensor], int] | None = None  # the update and samples that no log has taken yet
        self.oldest_epoch = 0  # of the oldest pending gradients
        if averaging.local_steps > 1:
            self.local = LocalSteps(self.state_averager.main_parameters, self.opt, partial(optimizer, params))
            self.grad_averager.local = self.state_averager.local = self.local
            self.log_steps = LogSteps(self, compressions["local_steps"], folder)
        self.begin_epoch()
        if self.uplink.mbits:  # in a large group, each peer sends all of its gradients, and as many averages
            bits = count_bits(list_params(self.opt), compressions["gradients"])
            self.uplink.expect_round(2 * bits / (self.uplink.mbits * 1e6))
            logger.info(f"a round: up to {bits / 4e6:.3g} MB each way, at most {self.uplink.timeouts.averaging:.0f} s")

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
    def pending_samples(self) -> int:
        """This peer's samples that no step has used yet, those in its offers included. In local steps, those that have
        ended an epoch, but missed its commit, end no further one."""
        fresh = self.grad_averager.samples - self.grad_averager.old_samples
        return fresh + (self.log_steps.count_pending() if self.log_steps else 0)

    @property
    def param_groups(self) -> list[dict]:
        """The model's parameters, for torch's GradScaler."""
        return [{"params": list(self.state_averager.main_parameters)}]

    def zero_grad(self) -> None:
        """Delete the model's gradients, which `step` has added to the pending ones."""
        for param in self.state_averager.main_parameters:
            param.grad = None

    def accumulate_on(self, device: torch.device) -> None:
        """Accumulate gradients on the model's device, to avoid transfers; call it once, after the model has moved."""
        self.grad_averager.unsent = [tensor.to(device) for tensor in self.grad_averager.unsent]
        if self.local:
            self.local.anchor = [tensor.to(device) for tensor in self.local.anchor]

    def training_state(self) -> dict:
        """Return a host copy of all that the next step depends on but the gradients, see StateAverager.dump_state."""
        own = {"local": self.local.dump_inner_state()} if self.local and self.local.inner else {}
        return self.state_averager.dump_state() | {"total_samples": self.stats.total_samples} | own

    def load_training_state(self, state: dict) -> None:
        """Load a state that `training_state` returned, here or in another process. Raise a ValueError, and change
        nothing, if its tensors have other shapes than this optimizer's."""
        self.state_averager.restore_state(state)
        self.stats.total_samples = state["total_samples"]
        self.begin_epoch()
        self.grad_averager.last_step = None
        self.grad_averager.drop_pending()
        if "local" in state:
            self.local.load_inner_state(state["local"])
        # without others, an epoch that this peer was at before no longer counts
        self.tracker.update_epoch(self.local_epoch, may_lower=not self.tracker.present)

    def catch_up(self) -> None:
        """Join the others' log, whose commits this peer replays if its state is in it; or load the swarm's state."""
        if not (self._takes_local_steps and self.log_steps.join()):
            self.load_state_from_peers()

    def step(self, batch_size: int = 0) -> None:
        """Add the model's gradients, a mean over these samples; average and step once the swarm has enough samples.
        In local steps, apply them to this peer's model at once."""
        self.state_averager.step()
        if self.log_steps:
            self.log_steps.follow()
        if batch_size and not self.grad_averager.samples:
            self.oldest_epoch = self.local_epoch
        if batch_size and self.grad_averager.is_local:
            self.local.step()
            self.grad_averager.samples += batch_size
        elif batch_size:
            self.grad_averager.accumulate(batch_size)
        self.tracker.report_local_progress(self.local_epoch, self.pending_samples)
        if self._takes_local_steps:
            if self.log_steps.is_open:
                self.log_steps.offer()
                return
            if self.log_steps.join():
                return
        is_synchronous = self.rounds.is_synchronous()
        if self.epoch.compare_with_swarm(self.tracker.view, is_synchronous, self.sync.backoff, time.monotonic()):
            self.load_state_from_peers()
        else:
            self._advance(is_synchronous)

    def leave(self) -> None:
        """Tell the others that this peer leaves. A group that has formed starts a round without this peer's data."""
        if self.log_steps:
            self.log_steps.rounds.leave()
        self.tracker.shutdown()
        self.rounds.leave(timeout=0.0)
        self.rounds.finish_background(END_TIMEOUT)  # it still changes the parameters

    def shutdown(self) -> None:
        """Stop the progress reports, finish or cancel the running rounds, and stop both averagers."""
        self.leave()
        self.rounds.leave(timeout=END_TIMEOUT)
        if self.grad_averager.is_local:  # the state that is saved belongs to the swarm
            self.grad_averager.drop_pending()
        if self.log_steps:
            self.log_steps.rounds.shutdown()
        self.state_averager.shutdown()
        self.grad_averager.shutdown()

    # --- the epoch

    def _advance(self, is_synchronous: bool) -> None:
        """MATCHMAKING if the epoch ends soon; SYNCING or AVERAGING if it is over and this peer is ready."""
        self.grad_averager.round_state = self.local_epoch, is_synchronous, self.state_averager.lineage
        # including peers that are missing now: a group that forms before the epoch ends accepts no peer later
        self.rounds.expect_group()
        ends_soon = self.tracker.seconds_left <= self.uplink.timeouts.matchmaking
        # the search of a peer that is alone could go on, with a new peer and with gradients of an old epoch (note 84)
        if ends_soon and self.rounds.has_others() and not self.rounds.is_searching():
            self.epoch.enter(EpochState.MATCHMAKING)  # this peer goes on accumulating
            self.rounds.search_group()
        if not (self.tracker.ready_to_update_epoch or self.rounds.has_group()):  # its leader has decided so
            return
        view = self.tracker.view
        if self.epoch.has_missed_step(view.epoch, is_synchronous):
            if self.sync.backoff.allows(self.epoch.number, view.epoch, is_synchronous, time.monotonic()):
                self.load_state_from_peers()
        elif view.read_at >= self.epoch.retry_at and not self.tracker.lacks_quorum:
            is_alone = not self.tracker.peers_at_epoch
            if is_alone:  # if peers have come, they would have to download the step that this one makes alone
                self.tracker.refresh_now()
            if not is_alone or not self.tracker.peers_at_epoch:
                self._average()

    def _average(self) -> None:
        """AVERAGING: average the pending gradients with a group, and make the step unless that fails."""
        self.epoch.enter(EpochState.AVERAGING)
        before = self.local_epoch, self.state_averager.lineage
        try:
            with self.tracker.pause_updates():
                if self.rounds.overlap:
                    self.rounds.finish_background(self.uplink.timeouts.averaging)
                self._make_step(self.rounds.average())
        except AveragingError as e:
            if group := self.grad_averager.exchanged_group.value:
                self.epoch.unconfirmed = group.decode(), self.grad_averager.samples
            self._recover_from_failed_round(e.__cause__)
            return
        if not self.rounds.overlap:  # in the background, the optimizer may still be using the gradients
            self.grad_averager.last_step = *before, self.state_averager.group_id

    def _make_step(self, finish: Callable[[], None] | None) -> None:
        """STEPPING: let the optimizer step, and average the parameters if that is due. If the round runs in the
        background, the step follows `finish` there, which waits for the round."""
        self.epoch.enter(EpochState.STEPPING)
        averager = self.state_averager
        timeout = self.uplink.timeouts.averaging
        is_trainer = not self.is_auxiliary
        next_epoch = max(self.local_epoch + 1, self.tracker.view.epoch)
        begins_log = self.log_steps is not None and self.local_epoch + 1 >= self.averaging.local_steps_from
        # a log begins with the same parameters on all peers, which a round in the background would change
        is_due = not (next_epoch % self.averaging.average_state_every or averager.averaging_in_progress or begins_log)
        if is_trainer:  # its step would wait for the averaging of parameters (note 72), even after a stop request
            self.rounds.finish_background(timeout)
        options = dict(optimizer_step=is_trainer, delay_optimizer_step=self.rounds.overlap and is_trainer)
        options["delay_averaging"] = True  # or a peer misses the next round while it waits here for a group
        if is_due and self.rounds.has_others():
            control = self.rounds.parameter_round = averager.schedule_step(gather=next_epoch, timeout=timeout)
            options |= dict(averaging_round=True, averaging_control=control, averaging_opts=dict(timeout=timeout))
        averager.declares_steps = not begins_log  # the log begins with another state, and new peers load that
        averager.step(increment_epoch=True, wait_for_trigger=finish, **options)
        self.tracker.update_epoch(self.local_epoch)
        if begins_log and is_trainer:
            self.log_steps.begin(averager.group_id, self.stats.members)
            averager.state_sharing_priority = self.local_epoch
        self.begin_epoch()

    @property
    def _takes_local_steps(self) -> bool:
        """Whether the peers take local steps in this epoch, or do so once they have a log."""
        return self.log_steps is not None and self.local_epoch >= self.averaging.local_steps_from

    def begin_epoch(self) -> None:
        """ACCUMULATING, in a new epoch, after a step or a download, and at the start."""
        self.epoch = Epoch(self.local_epoch, time.monotonic())
        averager = self.grad_averager
        is_local = self._takes_local_steps and self.log_steps.exists
        batches = self.averaging.local_steps if is_local else 1
        self.tracker.set_target(batches * self.averaging.target_batch_size - self.averaging.batch_size_lead)
        if is_local != averager.is_local:  # the pending gradients or updates are of the other kind
            update = None if is_local else averager.copy_update()
            averager.drop_pending()
            averager.is_local = is_local
            if is_local and self.parked:
                averager.unsent, averager.samples = self.parked
            self.parked = update

    def _recover_from_failed_round(self, cause: BaseException) -> None:
        """SYNCING if the round failed because this peer's state differs; otherwise ACCUMULATING, until the next try."""
        if not STOP_REQUESTED.is_set():
            is_diverged = isinstance(cause, StateDivergedError) and self.tracker.is_majority(cause.args[2])
            if is_diverged or self.epoch.has_missed_step(self.tracker.view.epoch, self.rounds.is_synchronous()):
                self.load_state_from_peers(*cause.args[:2] if is_diverged else ())
                return
            if isinstance(cause, PeersBehindError):  # they cannot load the last step once a new round has begun
                self.tracker.stop_waiting_for_stragglers(self.local_epoch)
            # one of them may have ended the round by its death
            self.tracker.ping_quiet_peers(self.tracker.present, quiet_for=0.0)
            self.epoch.retry_at = time.monotonic() + RETRY_AFTER
            self.tracker.schedule_refresh(RETRY_AFTER)
        self.epoch.enter(EpochState.ACCUMULATING)

    def load_state_from_peers(self, min_epoch: int | None = None, contributors: Sequence[bytes] = ()) -> bool:
        """SYNCING: load the newest state of the swarm. Pending gradients stay, unless they are old, or may be in it.

        :param min_epoch: load an earlier state only after some seconds without this one; default: the swarm's epoch
        :param contributors: see StateSync.load; default: all that are known
        :returns: whether a peer has sent it; otherwise the local state stays
        """
        self.epoch.enter(EpochState.SYNCING)
        self.rounds.leave(self.uplink.timeouts.averaging, is_excluded=self.rounds.is_synchronous())
        self.rounds.gradient_round = None
        self.rounds.finish_background(self.uplink.timeouts.averaging)
        self.grad_averager.last_step = None
        old_epoch = self.local_epoch
        is_compared = self.epoch.is_compared
        (group, sent) = self.epoch.unconfirmed
        lineage_with_sent = self.state_averager.extend_lineage(old_epoch + 1, group)
        wanted = self.tracker.view.epoch if min_epoch is None else min_epoch
        is_synchronous = self.rounds.is_synchronous()
        with self.tracker.performance_ema.pause():
            # a log begins with the state of one member, which the step before it does not lead to
            can_replay = is_synchronous and not (self.log_steps and wanted >= self.averaging.local_steps_from)
            how = self.sync.load(wanted, contributors or self.tracker.list_contributors(), is_synchronous, can_replay)
        if how is None:
            self.epoch.enter(EpochState.ACCUMULATING)
            return False
        self.begin_epoch()
        # a state that arrives one epoch late is not downloaded again at once: the swarm may just be stepping
        self.epoch.is_compared = is_compared
        samples = self.grad_averager.samples
        was_averaged = group and self.state_averager.lineage == lineage_with_sent
        if was_averaged:
            self.stats.total_samples += sent
        # the lineage tells if they are part of a state that is one epoch ahead; of others, nothing does
        may_be_averaged = group and (self.local_epoch > old_epoch + 1 or not is_synchronous)
        if samples and (was_averaged or may_be_averaged or abs(self.local_epoch - self.oldest_epoch) > MAX_STALENESS):
            logger.info(f"dropped {samples} samples: epoch {old_epoch} is too old, or others have averaged them")
            self.grad_averager.drop_pending()
        samples = self.grad_averager.samples
        logger.info(f"{how} epoch {self.local_epoch} (was at {old_epoch}), kept the gradients of {samples} samples")
        self.stats.samples = 0
        self.stats.group_size = 1
        self.tracker.report_local_progress(self.local_epoch, self.grad_averager.samples)
        self.tracker.announce()
        if self.rounds.is_synchronous():
            self.tracker.refresh_attested_peers()
        self.sync.check_staleness()
        return True


class AveragingHelper(CollaborativeOptimizer):
    """The optimizer of an auxiliary peer: without gradients of its own, it averages those of the trainers."""

    is_auxiliary = True

    def step(self) -> None:
        """Average with the trainers when their epoch ends; the model stays as it is."""
        self.state_averager.step()
        self._follow_trainers()
        if self.log_steps and (self._takes_local_steps or self.log_steps.rounds.offered):
            self.log_steps.follow()
            if self.log_steps.is_open or self.log_steps.join():
                return
        self._advance(self.rounds.is_synchronous())

    def seconds_to_next_step(self, max_seconds: float) -> float:
        """Return how long this peer may do nothing: it has to be there when the trainers' epoch is about to end."""
        left = self.tracker.seconds_left - self.uplink.timeouts.matchmaking
        return min(max_seconds, max(left, 0.05 if len(self.tracker.peers_at_epoch) > 1 else 0.25))

    def _follow_trainers(self) -> None:
        """Go to the highest epoch that most trainers have reached: also back, if a round failed for them alone."""
        records = sorted(self.tracker.present.values(), key=lambda record: -record.epoch)
        if len(records) < 2:
            return
        middle = records[len(records) // 2]
        has_reported = middle.time > self.tracker.local_progress.time + PING_DELAY  # since this peer's epoch began
        if middle.epoch == self.local_epoch or (middle.epoch < self.local_epoch and not has_reported):
            return
        self.rounds.leave(timeout=0.0)
        self.rounds.gradient_round = None
        self.state_averager.set_epoch(middle.epoch)
        self.begin_epoch()
        self.tracker.update_epoch(middle.epoch, may_lower=True)
        self.tracker.schedule_refresh(0.0)

    def load_state_from_peers(self, *args, **kwargs) -> bool:
        """Do nothing: `_follow_trainers` changes the epoch, and this peer needs no trainer's state."""
        return False

    def _recover_from_failed_round(self, cause: BaseException) -> None:
        """ACCUMULATING: try again at once, because this peer has no gradients to lose."""
        self.epoch.retry_at = time.monotonic()
        self.tracker.schedule_refresh(0.0)
        self.epoch.enter(EpochState.ACCUMULATING)
