"""The states of an epoch, by a clock of the test's own."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

import swarm.epoch
from swarm.epoch import RETRY_AFTER, SYNC_RETRY_PERIOD, TRANSITIONS, Epoch, EpochState, SyncBackoff
from swarm.optimizer import MAX_STALENESS, CollaborativeOptimizer
from swarm.rounds import Rounds
from swarm.uplink import Uplink


def is_behind(epoch: Epoch, swarm_epoch: int, backoff: SyncBackoff, now: float = 0.0, read_at: float = 100.0) -> bool:
    """Compare an epoch with a swarm of which all peers step together."""
    return epoch.compare_with_swarm(SimpleNamespace(epoch=swarm_epoch, read_at=read_at), True, backoff, now)


def advance(epoch: Epoch, read_at: float = 100.0, swarm_epoch: int = 5, **changes) -> list[str]:
    """Return what a peer does that is at the epoch of a swarm of several peers, in the middle of it."""
    facts = dict(is_over=False, seconds_left=1e3, has_others=True, lacks_quorum=False, is_searching=False) | changes
    done = []
    rounds = SimpleNamespace(expect_group=lambda: None, has_group=lambda: False)
    rounds.search_group = lambda: done.append("search")
    rounds.has_others, rounds.is_searching = lambda: facts["has_others"], lambda: facts["is_searching"]
    tracker = SimpleNamespace(peers_at_epoch=[b"peer"], ready_to_update_epoch=facts["is_over"], **facts)
    tracker.view = SimpleNamespace(epoch=swarm_epoch, read_at=read_at)
    peer = SimpleNamespace(epoch=epoch, local_epoch=5, rounds=rounds, tracker=tracker, uplink=Uplink())
    peer.grad_averager, peer.state_averager = SimpleNamespace(), SimpleNamespace(lineage="")
    peer.sync, peer._average = SimpleNamespace(backoff=SyncBackoff()), lambda: done.append("average")
    peer.load_state_from_peers = lambda: done.append("load")
    CollaborativeOptimizer._advance(peer, is_synchronous=True)
    return done


def test_undeclared_transition_is_refused():
    for start in EpochState:
        for end in set(EpochState) - TRANSITIONS[start]:
            epoch = Epoch(5)
            epoch.state = start
            with pytest.raises(ValueError, match=f"from {start.value} to {end.value}"):
                epoch.enter(end)


@pytest.mark.parametrize(
    "is_client, clients, advice",
    [(True, 2, "restart without `client_mode`, to look for a relay"), (True, 1, "clock"), (False, 1, "clock")],
)
def test_third_failure_advises_clients_without_averager(caplog, is_client, clients, advice):
    """Of two trainers; a restart of one with `client_mode` would look for no relay."""
    dht = SimpleNamespace(client_mode=is_client, uplink=None)
    tracker = SimpleNamespace(dht=dht, trust=SimpleNamespace(is_auxiliary=False), present=[1, 2], averaging=None)
    tracker.list_clients = lambda: range(clients)
    rounds = Rounds(tracker, None, SimpleNamespace(restore_pending=lambda: None, samples=64))
    control = SimpleNamespace(done=lambda: True, cancelled=lambda: True)
    with caplog.at_level("INFO"):
        for epoch in range(3):
            rounds._put_back(control, epoch, TimeoutError("no group"))
    *infos, warning = [(record.levelname, record.message) for record in caplog.records]
    assert [level.lower() for level, _ in infos] == ["info", "info"] and warning[0].lower().startswith("warn")
    assert advice in warning[1] and ("`assist_in_averaging`" in warning[1]) == (advice != "clock")


def test_group_search_starts_before_epoch_end():
    epoch = Epoch(5)
    assert advance(epoch) == advance(epoch, seconds_left=1.0, has_others=False) == []
    assert advance(epoch, seconds_left=1.0) == ["search"] and epoch.state == EpochState.MATCHMAKING
    assert advance(epoch, seconds_left=1.0, is_searching=True) == []
    assert advance(epoch, seconds_left=1.0) == ["search"], "the search has failed"


def test_failed_round_retries_after_fresh_look():
    epoch = Epoch(5)
    epoch.retry_at = 100.0 + RETRY_AFTER
    assert advance(epoch, is_over=True) == advance(epoch, 200.0, is_over=True, lacks_quorum=True) == []
    assert advance(epoch, 100.0 + RETRY_AFTER, is_over=True) == ["average"]
    assert advance(epoch, 100.0 + RETRY_AFTER, swarm_epoch=6, is_over=True) == ["load"]
    assert advance(Epoch(5), is_over=True) == ["average"], "the timer has ended with its epoch"


def test_first_look_is_exact():
    epoch, backoff = Epoch(5, began=100.0), SyncBackoff()
    assert not is_behind(epoch, 6, backoff, read_at=99.0)
    assert is_behind(epoch, 6, backoff)
    assert not is_behind(epoch, 6, backoff), "one of the others may just be the first"
    assert is_behind(epoch, 7, backoff)
    assert is_behind(Epoch(5), 4, backoff), "also a swarm that has lost an epoch"


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_missed_step_counts_only_if_all_step_together(is_synchronous):
    busy = SyncBackoff(min_epoch=7)  # only the download of a single step may start
    assert Epoch(5).has_missed_step(6, is_synchronous) == busy.allows(5, 6, is_synchronous, 0.0) == is_synchronous
    assert not busy.allows(4, 6, is_synchronous, 0.0) and not Epoch(6).has_missed_step(6, is_synchronous)


def test_peer_far_ahead_loads_state_of_others_at_once():
    """It was alone when it compared, because its line was cut."""
    epoch, backoff = Epoch(13), SyncBackoff()
    assert not is_behind(epoch, 13, backoff, 1.0)
    assert not is_behind(epoch, 12, backoff, 2.0)
    assert is_behind(epoch, 5, backoff, 2.0)


def test_failed_download_pauses_the_next():
    epoch, backoff = Epoch(5), SyncBackoff(not_before=100.0 + SYNC_RETRY_PERIOD)
    assert not is_behind(epoch, 9, backoff, 100.0 + SYNC_RETRY_PERIOD - 1)
    assert is_behind(epoch, 9, backoff, 100.0 + SYNC_RETRY_PERIOD)


def test_gradients_of_missed_rounds_become_too_old(monkeypatch):
    """A peer that makes each step of the others with their gradients keeps its own, but not for hours."""
    optimizer = CollaborativeOptimizer.__new__(CollaborativeOptimizer)
    pending, averager, ignore = (
        SimpleNamespace(samples=0, old_samples=0, is_local=False),
        SimpleNamespace(local_epoch=7),
        MagicMock(),
    )
    averager.lineage = averager.extend_lineage = ignore
    averager.step, pending.accumulate = ignore, lambda samples: vars(pending).update(samples=pending.samples + samples)
    pending.drop_pending = lambda: vars(pending).update(samples=0)
    optimizer.grad_averager, optimizer.state_averager, optimizer.log_steps = pending, averager, None
    optimizer.tracker = optimizer.rounds = optimizer.uplink = optimizer.stats = optimizer.averaging = ignore
    optimizer.sync = SimpleNamespace(check_staleness=ignore, backoff=ignore)
    optimizer.sync.load = lambda *_: vars(averager).update(local_epoch=averager.local_epoch + 1) or "made the step to"
    monkeypatch.setattr(CollaborativeOptimizer, "begin_epoch", lambda it: setattr(it, "epoch", Epoch(it.local_epoch)))
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
    assert not backoff.allows(6, 8, True, 100.0) and backoff.allows(6, 9, True, 100.0)
    assert backoff.allows(7, 8, True, 100.0), "a single step is fewer bytes than a state"
    pauses = [backoff.record_stale_download(9, 20.0, 100.0) for _ in range(10)]
    first, longest = swarm.epoch.MAX_STALE_DOWNLOADS - 2, swarm.epoch.MAX_SYNC_PAUSE
    assert pauses[:first] == [0.0] * first and pauses[first : first + 3] == [20.0, 40.0, 80.0]
    assert pauses[-1] == longest and not backoff.allows(98, 99, True, 100.0 + longest - 1)
    for _ in range(1100):  # of a peer that is too slow for days
        assert backoff.record_stale_download(9, 20.0, 100.0) == longest
