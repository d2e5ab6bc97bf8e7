"""The states of an epoch, by a clock of the test's own."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

import swarm.epoch
from swarm.epoch import RETRY_AFTER, SYNC_RETRY_PERIOD, TRANSITIONS, Epoch, EpochInputs, EpochState, SyncBackoff
from swarm.optimizer import MAX_STALENESS, CollaborativeOptimizer

FACTS = dict(is_over=False, ends_soon=False, has_others=True, lacks_quorum=False, is_searching=False)
#: a swarm of several peers in the middle of epoch 5, in which this one is as well
CALM = EpochInputs(5, read_at=100.0, is_synchronous=True, **FACTS)


def make_inputs(**changes) -> EpochInputs:
    return dataclasses.replace(CALM, **changes)


def test_undeclared_transition_is_refused():
    for start in EpochState:
        for end in set(EpochState) - TRANSITIONS[start]:
            epoch = Epoch(5)
            epoch.state = start
            with pytest.raises(ValueError, match=f"from {start.value} to {end.value}"):
                epoch.enter(end)


def test_group_search_starts_before_epoch_end():
    epoch = Epoch(5)
    assert not epoch.should_search(CALM) and epoch.should_search(make_inputs(ends_soon=True))
    assert not epoch.should_search(make_inputs(ends_soon=True, has_others=False))
    epoch.enter(EpochState.MATCHMAKING)
    assert not epoch.should_search(make_inputs(ends_soon=True, is_searching=True))
    epoch.enter(EpochState.MATCHMAKING)  # the search has failed


def test_failed_round_retries_after_fresh_look():
    epoch = Epoch(5)
    epoch.enter(EpochState.AVERAGING)
    epoch.retry_at = 100.0 + RETRY_AFTER
    epoch.enter(EpochState.ACCUMULATING)
    assert not epoch.can_average(make_inputs(is_over=True))
    assert epoch.can_average(make_inputs(is_over=True, read_at=100.0 + RETRY_AFTER))
    assert not epoch.can_average(make_inputs(is_over=True, read_at=200.0, lacks_quorum=True))
    assert Epoch(6).can_average(CALM), "the timer has ended with its epoch"


def test_first_look_is_exact():
    epoch, backoff, ahead = Epoch(5, began=100.0), SyncBackoff(), make_inputs(swarm_epoch=6)
    assert not epoch.compare_with_swarm(make_inputs(swarm_epoch=6, read_at=99.0), backoff, 0.0)
    assert epoch.compare_with_swarm(ahead, backoff, 0.0)
    assert not epoch.compare_with_swarm(ahead, backoff, 0.0), "one of the others may just be the first"
    assert epoch.compare_with_swarm(make_inputs(swarm_epoch=7), backoff, 0.0)
    assert Epoch(5).compare_with_swarm(make_inputs(swarm_epoch=4), backoff, 0.0), "also a swarm that has lost an epoch"


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_missed_step_counts_only_if_all_step_together(is_synchronous):
    ahead = make_inputs(swarm_epoch=6, is_synchronous=is_synchronous)
    busy = SyncBackoff(min_epoch=7)  # only the download of a single step may start
    assert Epoch(5).has_missed_step(ahead) == busy.allows(5, ahead, 0.0) == is_synchronous
    assert not busy.allows(4, ahead, 0.0) and not Epoch(6).has_missed_step(ahead)


def test_peer_far_ahead_loads_state_of_others_at_once():
    """It was alone when it compared, because its line was cut."""
    epoch, backoff = Epoch(13), SyncBackoff()
    assert not epoch.compare_with_swarm(make_inputs(swarm_epoch=13, read_at=1.0), backoff, 1.0)
    assert not epoch.compare_with_swarm(make_inputs(swarm_epoch=12, read_at=2.0), backoff, 2.0)
    assert epoch.compare_with_swarm(make_inputs(swarm_epoch=5, read_at=2.0), backoff, 2.0)


def test_failed_download_pauses_the_next():
    epoch, backoff, ahead = Epoch(5), SyncBackoff(), make_inputs(swarm_epoch=9)
    backoff.not_before = 100.0 + SYNC_RETRY_PERIOD
    assert not epoch.compare_with_swarm(ahead, backoff, 100.0 + SYNC_RETRY_PERIOD - 1)
    assert epoch.compare_with_swarm(ahead, backoff, 100.0 + SYNC_RETRY_PERIOD)


def test_gradients_of_missed_rounds_become_too_old(monkeypatch):
    """A peer that makes each step of the others with their gradients keeps its own, but not for hours."""
    optimizer = CollaborativeOptimizer.__new__(CollaborativeOptimizer)
    pending, averager, ignore = SimpleNamespace(samples=0, is_local=False), SimpleNamespace(local_epoch=7), MagicMock()
    averager.lineage = averager.extend_lineage = ignore
    averager.step, pending.accumulate = ignore, lambda samples: vars(pending).update(samples=pending.samples + samples)
    pending.drop_pending = lambda: vars(pending).update(samples=0)
    optimizer.grad_averager, optimizer.state_averager, optimizer.log_steps = pending, averager, None
    optimizer.tracker = optimizer.rounds = optimizer.uplink = optimizer.stats = optimizer.averaging = ignore
    optimizer.sync = SimpleNamespace(check_staleness=ignore, backoff=ignore)
    optimizer.sync.load = lambda *_: vars(averager).update(local_epoch=averager.local_epoch + 1) or "made the step to"
    monkeypatch.setattr(CollaborativeOptimizer, "begin_epoch", lambda it: setattr(it, "epoch", Epoch(it.local_epoch)))
    monkeypatch.setattr(CollaborativeOptimizer, "_collect_inputs", ignore)
    monkeypatch.setattr(Epoch, "compare_with_swarm", lambda *_: True)
    monkeypatch.setattr(CollaborativeOptimizer, "_takes_local_steps", False)
    optimizer.begin_epoch()
    kept = []
    for _ in range(3 * MAX_STALENESS):
        optimizer.step(100)
        kept.append(pending.samples)
    assert max(kept) == 100 * MAX_STALENESS and kept.count(0) == 2


def test_stale_download_backs_off():
    backoff = SyncBackoff()
    assert backoff.record_stale_download(8, seconds=20.0, now=100.0) == 0.0
    at_8, at_9, at_99 = (make_inputs(swarm_epoch=epoch) for epoch in (8, 9, 99))
    assert not backoff.allows(6, at_8, 100.0) and backoff.allows(6, at_9, 100.0)
    assert backoff.allows(7, at_8, 100.0), "a single step is fewer bytes than a state"
    pauses = [backoff.record_stale_download(9, 20.0, 100.0) for _ in range(10)]
    first, longest = swarm.epoch.MAX_STALE_DOWNLOADS - 2, swarm.epoch.MAX_SYNC_PAUSE
    assert pauses[:first] == [0.0] * first and pauses[first : first + 3] == [20.0, 40.0, 80.0]
    assert pauses[-1] == longest and not backoff.allows(98, at_99, 100.0 + longest - 1)
    for _ in range(1100):  # of a peer that is too slow for days
        assert backoff.record_stale_download(9, 20.0, 100.0) == longest
