"""The search for the log of the others, and the choice between two logs."""

import contextlib
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from processes import wait_until
from records import make_tracker, run_dhts

from swarm import SwarmError
from swarm.aggregation import Numbers
from swarm.exchange import BlobStore, Exchange
from swarm.log import Action, make_genesis
from swarm.log_records import Leave, Offer, compute_hash, pack
from swarm.log_rounds import MAX_HELPERS, NEWEST, TICK, Envelope, Identity, LogRounds
from swarm.log_steps import LogSteps
from swarm.sparse import TopKCompression
from swarm.state_server import RELAY
from swarm.uplink import Uplink

TIMEOUT = 30.0  # seconds for an answer
NAMES = [bytes([letter]) * 34 for letter in b"abc"]


@contextlib.contextmanager
def run_rounds(folder: Path, *answers: Callable, numbers=9) -> Iterator[tuple[LogRounds, dict[bytes, Exchange], list]]:
    """Yield the rounds of a peer, the exchanges of others by their ids, which give these answers, and their DHTs."""
    with run_dhts(*[[]] * (1 + len(answers))) as (*others, own), contextlib.ExitStack() as stack:
        tracker = make_tracker(own, "run", 64)
        stack.callback(tracker.shutdown)
        exchanges = {}
        for dht, answer in zip(others, answers, strict=True):
            exchange = Exchange(dht, "run", answer, BlobStore(folder / f"{dht.peer_id}", 10**6, 1, 10**6, None))
            stack.callback(exchange.shutdown)
            exchanges[dht.peer_id.to_bytes()] = exchange
        rounds = LogRounds(tracker, Numbers([torch.zeros(numbers)]), TopKCompression(0.03), folder)
        stack.callback(rounds.shutdown)
        yield rounds, exchanges, others


def say_nothing(*_) -> bytes:
    return b""


def test_log_survives_first_epoch_of_any_length():
    state, ended = make_genesis("run", 200, bytes(32), NAMES), []
    steps = LogSteps.__new__(LogSteps)
    steps.optimizer, steps._next_join, steps._stuck_deadline, steps._end = None, math.inf, 0.0, ended.append
    uplink, log = Uplink(), SimpleNamespace(state=state, chain={state.head: 1}, list_path=lambda: {state.head: 1})
    dht, view = SimpleNamespace(uplink=uplink), SimpleNamespace(epoch=200)
    steps.optimizer = SimpleNamespace(local_epoch=200, is_auxiliary=False)
    steps.tracker = SimpleNamespace(dht=dht, view=view, withdrawn=set(), others={}, present={})
    steps.optimizer.tracker, steps._patience, log.timeout, log.me = steps.tracker, 1.0, 5.0, NAMES[0]
    log.select, log.half_tick = lambda _: [], math.inf
    steps.rounds, steps._quorum_at = SimpleNamespace(log=log, select_seen=lambda _: {}), math.inf
    for spans, epoch_seconds, seconds, is_over in (
        ([], 1500.0, 7000, False),
        ([80.0], 1500.0, 7000, False),
        ([80.0, 90.0], 1500.0, 700, True),  # the estimate of a peer that others have left is too long
        ([], 1500.0, 8000, True),
        ([], 60.0, 650, True),
    ):
        uplink.record_epoch_time(epoch_seconds)
        log.spans, log.num_ticks = spans, seconds / TICK
        steps._check_progress(state.head)
        assert (len(ended) > 0) is is_over
        ended.clear()


def test_log_ends_when_voters_have_left_one_by_one():
    """A record of a peer that has left lasts for minutes only; its leave record stays."""
    voters = [*NAMES, bytes(34), bytes([1]) * 34]
    state, ended = make_genesis("run", 200, bytes(32), voters), []
    steps = LogSteps.__new__(LogSteps)
    steps.optimizer = SimpleNamespace(local_epoch=200, is_auxiliary=False)
    steps._next_join, steps._stuck_deadline, steps._patience, steps._end = math.inf, 0.0, 1.0, ended.append
    log = SimpleNamespace(state=state, chain={state.head: 1}, list_path=lambda: {state.head: 1})
    log.spans, log.num_ticks, log.timeout, log.me, log.half_tick = [], 0, 5.0, voters[3], math.inf
    steps.rounds, steps._quorum_at = SimpleNamespace(log=log, select_seen=lambda _: {}), math.inf
    tracker = SimpleNamespace(dht=SimpleNamespace(uplink=Uplink()), view=SimpleNamespace(epoch=200), present={})
    steps.tracker = tracker
    counted = replace(state, counted=(bytes(66),))
    for current, leaves, withdrawn, others, is_over in (
        (counted, NAMES[:2], (), (), False),
        (counted, NAMES[:2], NAMES[1:2], (), False),
        (counted, NAMES[:2], NAMES[2:], (), True),
        (counted, (NAMES[0], voters[3]), NAMES[1:2], (), False),  # this peer has come back
        (counted, NAMES, (), NAMES[:1], False),  # it serves its updates for some seconds, and still votes
        (state, NAMES[:2], (), (), True),  # the first commit takes two thirds
        (state, NAMES[:1], (), (), False),
    ):
        log.state, tracker.withdrawn, tracker.others = current, {*withdrawn}, dict.fromkeys(others)
        log.select = lambda _, leaves=leaves: [Leave(state.head, peer, b"") for peer in leaves]
        steps._check_progress(state.head)
        assert (len(ended) > 0) is is_over
        ended.clear()


def test_log_ends_if_third_of_members_is_silent():
    """Two of five keep the others from the first commit. After half of the members, the rest has an epoch, and at least
    ten minutes, because some may still load the first state."""
    voters = [*NAMES, bytes(34), bytes([1]) * 34]
    state, ended = make_genesis("run", 200, bytes(32), voters), []
    counted = replace(state, counted=(bytes(66),))
    steps = LogSteps.__new__(LogSteps)
    steps.optimizer = SimpleNamespace(local_epoch=200, is_auxiliary=False)
    steps._next_join, steps._stuck_deadline, steps._patience, steps._end = math.inf, 0.0, 1.0, ended.append
    log = SimpleNamespace(chain={state.head: 1}, list_path=lambda: {state.head: 1}, select=lambda _: [])
    log.spans, log.timeout, log.me, log.half_tick = [], 5.0, voters[0], 300.0 / TICK
    steps.rounds, steps._quorum_at = SimpleNamespace(log=log, select_seen=lambda _: {}), math.inf
    dht = SimpleNamespace(uplink=Uplink())
    tracker = dict(view=SimpleNamespace(epoch=200), withdrawn=set(), others={}, present={})
    steps.tracker = SimpleNamespace(dht=dht, **tracker)
    for current, num_offers, epoch_seconds, seconds, is_over in (
        (state, 3, 300.0, 610, True),
        (state, 3, 300.0, 590, False),
        (state, 3, 1500.0, 1490, False),
        (state, 3, 1500.0, 1510, True),
        (state, 4, 1500.0, 1510, False),
        (counted, 3, 1500.0, 1510, False),
    ):
        dht.uplink.record_epoch_time(epoch_seconds)
        log.state, log.num_ticks = current, log.half_tick + seconds / TICK
        log.select_current = lambda num=num_offers: [SimpleNamespace(peer=peer) for peer in voters[:num]]
        steps._check_progress(state.head)
        assert (len(ended) > 0) is is_over
        ended.clear()


OFFERS = (3, b"head", NAMES[0]), (5, b"parent", NAMES[0]), (11, b"parent", NAMES[1])


def test_log_ends_when_most_voters_are_gone(monkeypatch):
    """They have left no record. Five epochs of two hours are only for voters that are there. A peer that sees no other
    may be cut off. A commit whose updates are on their way ends no log."""
    voters = [*NAMES, bytes(34), bytes([1]) * 34]
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0)
    monkeypatch.setattr("swarm.log_steps.time", clock)
    state, ended = replace(make_genesis("run", 200, bytes(32), voters), counted=(bytes(66),)), []
    steps = LogSteps.__new__(LogSteps)
    steps.optimizer = SimpleNamespace(local_epoch=200, is_auxiliary=False)
    steps._next_join, steps._stuck_deadline, steps._patience, steps._end = math.inf, 0.0, 1.0, ended.append
    log = SimpleNamespace(state=state, chain={state.head: 1}, list_path=lambda: {state.head: 1}, select=lambda _: [])
    log.spans, log.num_ticks, log.timeout, log.me, log.half_tick = [7200.0], 0, 5.0, voters[3], math.inf
    steps.rounds = SimpleNamespace(log=log)
    tracker = SimpleNamespace(dht=SimpleNamespace(uplink=Uplink()), view=SimpleNamespace(epoch=200), withdrawn=set())
    steps.tracker, guest = tracker, bytes([7]) * 34
    for others, seen, seconds, is_over in (
        (voters[:2], (), 30_000, False),
        (voters[:1], voters[1:2], 30_000, False),
        ([guest, *voters[:1]], (), 7100, False),
        ([guest, *voters[:1]], (), 7300, True),
        ((), (), 30_000, False),
    ):
        tracker.others = tracker.present = dict.fromkeys(others)
        steps.rounds.select_seen, steps._quorum_at = lambda _, seen=seen: dict.fromkeys(seen), math.inf
        steps._check_progress(state.head)
        clock.now += seconds
        steps._check_progress(state.head)
        assert (len(ended) > 0) is is_over
        ended.clear()
    tracker.withdrawn, tracker.others = {*NAMES}, {}
    steps._check_progress(b"the commit before")
    assert not ended
    clock.now += 61.0
    steps._check_progress(b"the commit before")
    assert ended == ["too few voters have stayed"]


@pytest.mark.parametrize(
    ("steps_before", "left", "num_voters", "is_offered"),
    [
        ((4.0, 4.0), 3.0, 2, False),
        ((20.0, 20.0), 9.0, 2, False),
        ((20.0, 20.0), 7.0, 2, True),
        ((20.0, 20.0), 7.0, 1, False),
        ((1.0, 90.0), 30.0, 2, False),  # an evaluation
        ((90.0, 90.0), math.inf, 2, True),
        ((90.0, 90.0), 0.0, 1, True),
    ],
)
def test_peer_with_long_steps_offers_before_end(monkeypatch, steps_before, left, num_voters, is_offered):
    """Others wait for 12 s. In a simulation, a peer with steps of 20 s in epochs of 60 s was in 4 of 38 commits."""
    clock, made = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0), []
    monkeypatch.setattr("swarm.log_steps.time", clock)
    steps = LogSteps.__new__(LogSteps)
    uplink = Uplink()
    uplink.record_epoch_time(60.0)
    averager = SimpleNamespace(samples=8)
    steps.optimizer = SimpleNamespace(grad_averager=averager, stats=SimpleNamespace(averaging_seconds=0.0))
    steps.averager, steps._offered, steps._next_offer = SimpleNamespace(lineage="ab"), (b"", b""), 0.0
    state = SimpleNamespace(head=b"other", voters=NAMES[:num_voters])
    steps.rounds = SimpleNamespace(log=SimpleNamespace(state=state, patience=12.0, has_turn=lambda: True))
    ema = SimpleNamespace(pause=contextlib.nullcontext)
    tracker = SimpleNamespace(dht=SimpleNamespace(uplink=uplink), performance_ema=ema, ready_to_update_epoch=left == 0)
    steps.tracker, steps._make_offer = tracker, made.append
    steps._step_ends = deque(maxlen=3)
    tracker.seconds_left = 100.0
    for step in steps_before:
        assert not made or left == 0.0
        steps.offer()
        clock.now += step
    tracker.seconds_left = left
    steps.offer()
    assert (len(made) > 0) is is_offered


def test_samples_end_one_epoch_only(monkeypatch):
    """Those of a peer without a turn, and of updates that no commit contains. Otherwise, epochs of 30 voters ended
    after a third of their samples."""
    made = []
    steps = LogSteps.__new__(LogSteps)
    averager = SimpleNamespace(samples=25, old_samples=0, unsent=[])
    steps.optimizer = SimpleNamespace(grad_averager=averager, stats=SimpleNamespace(averaging_seconds=0.0))
    steps.averager, steps._offered, steps._next_offer = SimpleNamespace(lineage="ab" * 32), (b"", b""), 0.0
    steps._passed, steps._step_ends, steps._make_offer = (b"", 0), deque(maxlen=3), made.append
    tracker = SimpleNamespace(dht=SimpleNamespace(uplink=Uplink()), ready_to_update_epoch=True, seconds_left=0.0)
    tracker.performance_ema = SimpleNamespace(pause=contextlib.nullcontext)
    steps.tracker = tracker
    log = SimpleNamespace(state=SimpleNamespace(head=b"other", voters=NAMES), patience=12.0, has_turn=lambda: False)
    steps.rounds = SimpleNamespace(log=log, store=SimpleNamespace(open=lambda blob: []))
    steps.offer()
    averager.samples = 30  # some more, before the commit
    steps.offer()
    assert not made and steps._passed == (steps.head, 25)
    monkeypatch.setattr("swarm.log_steps.restore", lambda blocks, numbers: None)
    steps._take_back(SimpleNamespace(blob=b"", samples=7))
    assert (averager.samples, averager.old_samples) == (37, 7)
    log.has_turn = lambda: True
    steps.offer()
    assert made == [steps.head]
    steps.rounds.count_pending = lambda: 37
    steps._offered, steps._offered_old = (steps.head, b""), 7
    assert steps.count_pending() == 30
    steps.averager.lineage = "cd" * 32
    assert steps.count_pending() == 37


def test_pending_samples_have_ended_no_epoch_before():
    """An offer on the last commit but one, or that no commit contains, does not count toward the next epoch."""
    rounds = LogRounds.__new__(LogRounds)
    rounds._lock = threading.RLock()
    now, late, other = (SimpleNamespace(samples=it, base=base, peer=peer) for it, base, peer in OFFERS)
    rounds.log = SimpleNamespace(me=NAMES[0], own={b"1": now, b"2": late}, returned=[late])
    rounds.log.state = SimpleNamespace(head=b"head")
    rounds.log.list_unapplied = lambda: [SimpleNamespace(offers=[late, other])]
    assert rounds.count_pending() == now.samples + late.samples


def test_peer_without_updates_loads_fewer_and_fewer_states():
    """On a full disk, each commit would otherwise cost a download of the whole state."""
    state = make_genesis("run", 200, bytes(32), NAMES)
    steps, loads = LogSteps.__new__(LogSteps), []
    load = SimpleNamespace(backoff=SimpleNamespace(not_before=0.0))
    steps.optimizer = SimpleNamespace(local_epoch=199, is_auxiliary=False, sync=load)
    steps.optimizer.load_state_from_peers = lambda: loads.append(steps._stuck_deadline) or is_sent
    steps._next_join, steps._stuck_deadline, steps._patience = math.inf, 0.0, 1.0
    log = SimpleNamespace(state=state, chain={}, list_path=dict, spans=[], num_ticks=0, timeout=5.0, me=NAMES[0])
    log.select, log.half_tick = lambda _: [], math.inf
    steps.rounds, steps._quorum_at = SimpleNamespace(log=log, select_seen=lambda _: {}), math.inf
    dht = SimpleNamespace(uplink=Uplink())
    tracker = dict(view=SimpleNamespace(epoch=200), withdrawn=set(), others={}, present={})
    steps.tracker = SimpleNamespace(dht=dht, **tracker)
    waits, is_sent = [], True
    for _ in range(3):
        steps._check_progress(bytes(32))
        waits.append(steps._stuck_deadline - time.monotonic())
        steps._stuck_deadline = time.monotonic() - 1.0  # the time has passed
        steps._check_progress(bytes(32))
    is_sent = False  # a failure does not count
    steps._check_progress(bytes(32))
    steps._stuck_deadline = time.monotonic() - 1.0
    steps._check_progress(bytes(32))
    assert steps._patience == 8.0 and len(loads) == 4
    assert waits == [pytest.approx(60.0 * factor, abs=1.0) for factor in (1, 2, 4)]
    steps.optimizer.local_epoch = 200 - 9  # behind by more than eight commits
    steps._check_progress(bytes(32))
    assert len(loads) == 4
    steps._patience = 1.0  # since it has applied a commit
    steps._check_progress(bytes(32))
    assert len(loads) == 5


def test_last_commit_counts_at_end_of_run():
    """A trainer must not leave before the others have the updates of the commit that it applied last."""
    optimizer = SimpleNamespace(local_epoch=13, is_auxiliary=False, grad_averager=SimpleNamespace(is_local=True))
    found = [("commit", "state before")]
    log = SimpleNamespace(state=SimpleNamespace(active=set()), returned=deque())
    rounds = SimpleNamespace(log=log, epoch=0, has_fewer_peers=lambda _: False)
    rounds.find_next = lambda _: found.pop() if found else None
    steps = LogSteps.__new__(LogSteps)
    steps.tracker, steps.rounds, steps.optimizer = SimpleNamespace(trust=SimpleNamespace()), rounds, optimizer
    steps.averager, steps._ended = SimpleNamespace(lineage=""), (b"", b"")
    steps._apply = lambda *_: vars(optimizer).update(local_epoch=14) or True
    steps._check_progress = lambda _: None
    steps.follow()
    assert rounds.epoch == 14


def test_find_does_not_wait_for_silent_peer(tmp_path):
    """If three of four peers agree, the fourth one cannot change the choice."""
    is_over = threading.Event()

    def answer(*_) -> bytes:
        return pack(Envelope(state.head, 3, state=pack(state)))

    def answer_late(*_) -> bytes:
        is_over.wait(2 * TIMEOUT)
        return answer()

    with run_rounds(tmp_path, answer, answer, answer, answer_late) as (rounds, peers, _):
        state = make_genesis("run", 3, bytes(32), tuple(peers))
        rounds.dht.uplink.fix_timeouts(replace(rounds.tracker.averaging, matchmaking_time=2 * TIMEOUT))
        rounds.dht.uplink._times["rtt"].value = TIMEOUT
        assert rounds.dht.uplink.timeouts.request == TIMEOUT
        started = time.monotonic()
        assert rounds.find([*peers], NEWEST) == (state.head, state) and time.monotonic() - started < TIMEOUT
        is_over.set()


def test_one_claim_closes_no_new_log(tmp_path):
    """A log without a commit ends only if most known peers have another one."""
    other_log = bytes(range(32))
    with run_rounds(tmp_path, *[say_nothing] * 3) as (rounds, peers, dhts), contextlib.ExitStack() as stack:
        for dht in dhts:
            other = make_tracker(dht, "run", 64)
            stack.callback(other.shutdown)
            other.report_local_progress(3, 8)
        tracker, own = rounds.tracker, rounds.identity.peer
        tracker.trust.partners |= set(peers)  # they have averaged with this peer
        tracker.report_local_progress(3, 8)
        wait_until(lambda: tracker.refresh_now() or len(tracker.present) == 3, 30, "the others' records")
        state = make_genesis(tracker.prefix, 3, bytes(32), (own, *peers))
        rounds.open(state.head, state)
        results = []
        for exchange in peers.values():
            exchange.send(rounds.dht.peer_id, pack(Envelope(other_log, 3))).result(TIMEOUT)
            results.append(rounds.has_fewer_peers(b""))
        assert results == [False, False, True]


def test_log_ahead_stays_of_two_equal_ones(tmp_path):
    """One of two peers was asleep, while the other one continued alone for nine or for a thousand epochs."""
    with run_rounds(tmp_path, say_nothing) as (rounds, (peer,), (dht,)), contextlib.ExitStack() as stack:
        other = make_tracker(dht, "run", 64)
        stack.callback(other.shutdown)
        other.report_local_progress(3, 8)
        rounds.tracker.trust.partners.add(peer)
        wait_until(lambda: rounds.tracker.refresh_now() or rounds.tracker.present, 30, "the other's record")
        own, state = bytes([100]) * 32, make_genesis("run", 3, bytes(32), (rounds.identity.peer, *NAMES))
        rounds.open(own, state)
        state = replace(state, counted=(bytes(66),))  # in place of a commit
        rounds.log.state = state
        for other_log in (bytes(32), bytes([200]) * 32):
            for epoch, other_epoch, stays in ((3, 12, other_log > own), (3, 1000, False), (1000, 3, True)):
                rounds.epoch = epoch
                rounds._read(peer, Envelope(other_log, other_epoch))
                assert rounds.has_fewer_peers(b"") != stays
        # it does not return to a log that it has left for one other peer
        rounds.epoch = 3
        rounds._read(peer, Envelope(bytes(32), 3))
        assert rounds.has_fewer_peers(b"") and not rounds.has_fewer_peers(bytes(32))
        # without half of its voters, no log goes on
        rounds.log.state = replace(state, voters=(rounds.identity.peer, peer))
        rounds._read(peer, Envelope(bytes([200]) * 32, 3))
        assert rounds.has_fewer_peers(b"")


def test_peers_that_refuse_count_against_claim(tmp_path):
    """Strangers may have asked them so often that they answer no other one; then one claim must not decide."""

    def answer(*_) -> bytes:
        return pack(Envelope(state.head, 3, state=pack(state)))

    def refuse(*_) -> bytes:
        raise ValueError("too many requests")

    with run_rounds(tmp_path, answer, answer, refuse, refuse, refuse) as (rounds, peers, _):
        first, second, *_ = peers
        state = make_genesis("run", 3, bytes(32), (first, second))
        assert rounds.find([first, second], NEWEST) == (state.head, state)
        assert rounds.find([*peers], NEWEST) == (b"", None)


def test_auxiliary_peer_believes_no_single_client(tmp_path):
    """A state with other voters and the id of the true log would keep it from that log forever."""
    with run_rounds(tmp_path) as (rounds, _, _):
        clients = [bytes([number]) * 34 for number in range(1, 5)]
        rounds.tracker.others = {it: SimpleNamespace(peer_id=it, epoch=3, client_mode=True) for it in clients}
        first = make_genesis("run", 3, bytes(32), clients)
        later, false = replace(first, epoch=9, head=bytes([9]) * 32), replace(first, voters=(clients[0],))

        def offer(*states) -> object:
            for client, state in zip(clients, states, strict=False):
                rounds._read(client, Envelope(first.head, 9, state=pack(state)))
            return rounds.take_offered()

        rounds.tracker.trust.partners = {*clients}
        assert offer(false) is None and offer(false, later, later) is None
        assert offer(false, later, later, later) == (first.head, later, clients[1])
        assert offer(first) == (first.head, first, clients[0])
        alone = make_genesis("run", 3, bytes(32), (b"stranger",))
        rounds._read(clients[1], Envelope(alone.head, 3, state=pack(alone)))
        assert rounds.take_offered() is None  # a log that its only voter has begun


def test_vote_is_sent_only_if_on_disk(tmp_path):
    """The peer could otherwise be killed, and vote for another list, which proves a lie."""
    with run_rounds(tmp_path, say_nothing) as (rounds, [peer], _):
        state = make_genesis("run", 3, bytes(32), (rounds.identity.peer, peer))
        vote, status = (Action("send", data, (peer,)) for data in (b"vote", b"status"))
        with rounds._lock:  # its thread waits
            rounds.expect(state.head)
            rounds.open(state.head, state)
            (tmp_path / "votes").unlink()
            (tmp_path / "votes" / "in the way").mkdir(parents=True)
            rounds._perform([Action("save", b"memory"), vote])
            rounds._perform([status])
            assert not rounds._outbox[peer]
            shutil.rmtree(tmp_path / "votes")
            rounds._perform([Action("save", b"memory"), vote])
            assert [*rounds._outbox[peer]] == [b"vote"] and (tmp_path / "votes").read_bytes() == state.head + b"memory"


def test_store_keeps_whole_first_state(tmp_path, monkeypatch):
    """A store that is full of old ones must not delete the oldest blocks of a large model's state."""
    monkeypatch.setattr("swarm.log_rounds.MIN_STORE_BYTES", 0)  # which is little, next to a large model
    with run_rounds(tmp_path, numbers=10**5) as (rounds, _, _):
        rounds.anchors.num_blocks = 100
        for number in range(1, 201):
            rounds.anchors.put(number.to_bytes(4000, "little"))
        blob = rounds.anchors.add(bytes([number]) * 4000 for number in range(100))
        assert rounds.anchors.has(blob)


def test_new_offers_end_no_wanted_download(tmp_path):
    """Each new key can have a better turn than the one before, and name an update that no peer has."""
    with run_rounds(tmp_path, say_nothing) as (rounds, [peer], _), rounds._lock:
        state = make_genesis("run", 3, bytes(32), (rounds.identity.peer, peer))
        rounds.open(state.head, state)
        for number in range(300):
            owner = number.to_bytes(34) if number else peer
            rounds.log.add_record(Offer(state.head, bytes(32), owner, 8, owner[-32:], 100, (), True, 20.0, b""))
            rounds._perform(rounds.log.finish())
            while number and (old := [it for it in rounds.log.select(Offer) if it.peer != peer][:-4]):
                del rounds.log.records[compute_hash(old[0])[:8]]  # as `take_offer` does
        wanted = rounds.log.fetching.keys()
        assert peer[-32:] in wanted and len(wanted) < 20
        wait_until(lambda: rounds.exchange._downloads.keys() == wanted, 20, "only wanted downloads")


def test_full_disk_requests_update_after_next_commit(tmp_path):
    """The other peers would otherwise send it the same update several times in a minute."""
    with run_rounds(tmp_path, say_nothing) as (rounds, [peer], _), rounds._lock:
        state, blob = make_genesis("run", 3, bytes(32), (rounds.identity.peer, peer)), bytes([1]) * 32
        rounds.open(state.head, state)
        offer = Offer(state.head, bytes(32), peer, 8, blob, 100, (), True, 20.0, b"")
        rounds.log.add_record(offer)
        results = []
        for error in (SwarmError("the disk is full"), TimeoutError()):
            rounds.log.fetch()
            rounds._take_blob(error, offer)
            results.append(blob in rounds.log.fetching)
        assert results == [True, False]


def test_only_trusted_auxiliary_peers_are_fast_sources(tmp_path):
    """A source that fails costs time, and any peer can call itself an auxiliary peer with a fast uplink."""
    with run_rounds(tmp_path, say_nothing) as (rounds, peers, _):
        assert rounds.initial_peers == {*peers}
        *untrusted, initial = [bytes([number]) * len(rounds.identity.peer) for number in range(10)]
        rounds.initial_peers = {initial}
        declared = {peer: ValueWithExpiration(RELAY, get_dht_time() + 60) for peer in (*untrusted, initial)}
        with rounds._lock:
            rounds._take_helpers(ValueWithExpiration(declared, get_dht_time() + 60))
            for peer in (*untrusted, initial):
                rounds._read(peer, Envelope(b"", 0, mbits=100.0))
            rounds._take_helpers(None)  # no answer
            assert len(rounds.helpers) == MAX_HELPERS and rounds.helpers.pop(initial) == 100.0
            assert set(rounds.helpers.values()) == {0.0}
            before = set(rounds.helpers)
            declared |= {bytes(len(peer) - 1) + peer[:1]: declared[peer] for peer in untrusted}  # lower ids
            rounds._take_helpers(ValueWithExpiration(declared, get_dht_time() + 60))
            assert set(rounds.helpers) == {*before, initial}, "new keys displace no auxiliary peer"


def test_signature_has_one_spelling():
    """A leader could otherwise change the offers of others, which their owners would then count twice."""
    key = RSAPrivateKey()
    identity, signature = Identity(key), key.sign(b"data")
    assert identity.verify(identity.peer, b"data", signature)
    for other in (b"!" + signature, signature + b"\n", b"?", b""):
        assert identity.verify(identity.peer, b"data", other) is False
