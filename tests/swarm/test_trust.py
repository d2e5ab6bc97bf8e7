"""The peers that a peer believes, waits for and counts, with records that the tests make."""

import asyncio
import contextlib
import dataclasses
import math
import time
from types import SimpleNamespace

import pytest
from hivemind.averaging.allreduce import AllreduceException
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, ValueWithExpiration, get_dht_time
from processes import wait_until
from records import run_dhts, run_trackers

import swarm.trust
from swarm.averager import RoundResult, VerifyingAverager
from swarm.epoch import SYNC_RETRY_PERIOD
from swarm.guard import MaliciousPeersError, RoundSettings
from swarm.progress import WAIT_RETRY_EPOCHS
from swarm.round_watch import PeersSilentError
from swarm.rounds import AveragingError, Rounds
from swarm.state_sync import StateSync
from swarm.trust import (
    BAN_SECONDS,
    LATE,
    MAX_BROKEN_ROUNDS,
    MAX_MISSED_ROUNDS,
    SILENT,
    Absence,
    PeerTrust,
    RoundTrust,
)
from swarm.uplink import GRACE_SHARE, MAX_GRACE, Uplink
from utils import MAX_WORKERS

NAMES = [b"a", b"b", b"c", b"d"]


def make_records(*names: bytes, epoch: int = 5, ago: float = 0.0) -> dict[bytes, SimpleNamespace]:
    return {name: SimpleNamespace(epoch=epoch, time=get_dht_time() - ago) for name in names}


def make_record(name: bytes, epoch: int = 5, ago: float = 0.0, samples: int = 1, speed=1.0) -> LocalTrainingProgress:
    fields = dict(peer_id=name, epoch=epoch, samples_accumulated=samples, samples_per_second=speed)
    return LocalTrainingProgress(**fields, time=get_dht_time() - ago, client_mode=False)


def make_trust(*known: bytes, epoch_seconds: float = 40.0) -> PeerTrust:
    uplink = Uplink()
    uplink.record_epoch_time(epoch_seconds)
    return PeerTrust(uplink, attested=known)


@pytest.mark.parametrize(
    "silent, quorum",
    [((), 4), ((1, 1), 4), ((1, 2, 3), 4), ((1, 2, 11), 3), ((1, 11, 12), 2), ((1, None, None), 2), ((11,) * 4, 1)],
)
def test_recently_silent_peer_counts_toward_quorum(silent, quorum):
    """A peer may be silent for the grace of a quarter of an epoch, 10 s; None stands for a ban."""
    trust, records = make_trust(*NAMES), make_records(*NAMES) | make_records(b"behind", epoch=3)
    trust.attested |= {b"behind"}
    for name, ago in zip(NAMES, silent, strict=False):
        if ago:
            trust.absent[name] = Absence(SILENT, get_dht_time() - ago)
        else:
            trust.ban({PeerID(name): "has sent nonsense"})
    assert trust.count_quorum(records, min_epoch=4) == quorum


def test_untrusted_peers_count_toward_quorum_only_among_themselves():
    trust, records = make_trust(*NAMES), make_records(*NAMES, *(b"new%d" % number for number in range(9)))
    assert trust.count_quorum(records, min_epoch=4) == 4
    trust.forget_groups()
    assert trust.count_quorum(records, min_epoch=4) == 10
    assert make_trust(*NAMES, epoch_seconds=0.0).count_quorum(records, min_epoch=4) == 4


@pytest.mark.parametrize("peers, quorum", [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (7, 5), (8, 6), (9, 6)])
def test_two_quorums_share_an_honest_peer(peers, quorum):
    """From four peers on, a leader that is in both could otherwise make two groups of all others, each with a step."""
    names = [b"%d" % number for number in range(peers - 1)]
    assert make_trust(*names).count_quorum(make_records(*names), min_epoch=5) == quorum
    assert 2 * quorum - peers > 1 or peers < 4


@pytest.mark.parametrize(
    "peers, late, quorum",
    [(2, 1, 1), (3, 1, 2), (4, 1, 3), (4, 2, 2), (4, 3, 1), (5, 1, 4), (5, 2, 3), (9, 3, 6), (9, 4, 5), (40, 13, 27)],
)
def test_late_peers_count_toward_quorum(peers, late, quorum):
    """A hostile leader that omits peers until they are late would otherwise make steps with less and less of them. If
    more than a third cannot be reached, the others go on, but only all of them."""
    names = [b"%d" % number for number in range(peers - 1)]
    trust = make_trust(*names)
    trust.absent |= {name: Absence(LATE, get_dht_time() + 60) for name in names[:late]}
    assert trust.count_quorum(make_records(*names), min_epoch=5) == quorum
    trust.is_auxiliary = True
    assert trust.count_quorum(make_records(*names), min_epoch=5) >= 3


@pytest.mark.parametrize("trainers, group_size", [(0, 3), (1, 3), (2, 3), (3, 3), (4, 4)])
def test_aux_peer_needs_most_trainers_and_two(trainers, group_size):
    trust = PeerTrust(Uplink(), NAMES, is_auxiliary=True)
    assert trust.count_quorum(make_records(*NAMES[:trainers]), min_epoch=4) == group_size


def test_untrusted_peer_cannot_raise_the_epoch():
    trust, records = make_trust(*NAMES), make_records(*NAMES) | make_records(b"new", epoch=10**9)
    assert set(trust.select_believable(records, own_epoch=5)) == set(NAMES)
    near = make_records(*NAMES) | make_records(b"new", epoch=5 + swarm.trust.MAX_LEAD)
    assert trust.select_believable(near, own_epoch=5) == near and trust.find_swarm_epoch(near, own_epoch=5) == 5


def test_peer_with_log_of_its_own_sees_attested_peers():
    """It began its log alone, and must find that of the others, which are far ahead."""
    trust, records = make_trust(*NAMES), make_records(*NAMES, epoch=20) | make_records(b"new", epoch=10**9)
    trust.partners.clear()
    trust.attested, trust.active = set(NAMES), {b"own"}
    assert set(trust.select_believable(records, own_epoch=1)) == set(NAMES)
    assert trust.find_swarm_epoch(records, own_epoch=1) == 1  # that of its voters


@pytest.mark.parametrize("epochs, expected", [("", 0), ("7", 7), ("87", 7), ("9977", 7), ("887", 8), ("00076", 6)])
def test_swarm_epoch_needs_more_than_half(epochs, expected):
    """Two of four others that claim a later epoch do not lift it. New peers, at epoch 0, have no say."""
    records = {bytes([number]): SimpleNamespace(epoch=int(epoch)) for number, epoch in enumerate(epochs)}
    assert make_trust().find_swarm_epoch(records, own_epoch=0) == expected


@pytest.mark.parametrize(
    "own, others, expected", [(9, "55", 5), (7, "55", 7), (9, "5", 9), (9, "559", 9), (5, "59", 5)]
)
def test_peer_far_ahead_of_most_goes_back(own, others, expected):
    """It has trained alone while it was cut off, and would never meet the others again."""
    records = {bytes([number]): SimpleNamespace(epoch=int(epoch)) for number, epoch in enumerate(others)}
    assert make_trust().find_swarm_epoch(records, own) == expected


@pytest.mark.parametrize("speeds, most", [([5], math.inf), ([2, 1], 8), ([1, 2, 3], 12), ([1, 2, 3, 4, 5, 1e6], 16)])
def test_speed_is_limited_by_median(speeds, most):
    records = [SimpleNamespace(samples_per_second=speed) for speed in (*speeds, 1e6)]
    assert PeerTrust.find_max_speed(records) == most


def test_ban_doubles_and_ends_with_report():
    trust, peer = make_trust(*NAMES), PeerID(b"a")
    trust.mark_silent([b"a"])
    for seconds in (BAN_SECONDS, 4 * BAN_SECONDS, 16 * BAN_SECONDS):
        trust.ban({peer: "has sent nonsense"})
        trust.ban({peer: "is banned already"})
        assert trust.banned_until == {b"a": pytest.approx(get_dht_time() + seconds, abs=1)}
        trust.update(make_records(*NAMES))
        assert set(trust.select_present(make_records(*NAMES))) == set(NAMES[1:]), "the ban goes on"
        trust.absent[b"a"].until = get_dht_time() - 10  # it is over
        trust.last_bans[b"a"] = seconds, get_dht_time() - 10
        trust.update(make_records(*NAMES, ago=20))
        assert trust.excluded == {b"a"}, "it has not reported since"
        trust.update(make_records(*NAMES))
        assert not trust.excluded
    trust.last_bans[b"a"] = 16 * BAN_SECONDS, get_dht_time() - (16 * swarm.trust.FORGIVEN_AFTER + 1) * BAN_SECONDS
    trust.ban({peer: "has sent nonsense after a long time"})
    assert trust.banned_until[b"a"] == pytest.approx(get_dht_time() + BAN_SECONDS, abs=1)
    trust.record_round([b"a"], {}, None, own_epoch=5)
    assert trust.excluded == {b"a"}, "a group of others that it is in does not end the ban"


def test_silent_peer_is_back_once_it_reports():
    trust = make_trust(*NAMES)
    trust.absent = {name: Absence(SILENT, get_dht_time() - 5) for name in NAMES}
    trust.update(make_records(b"a", b"b", ago=10) | make_records(b"c"))
    assert trust.excluded == {b"a", b"b"}, "c has reported, d has left"


def test_unreachable_peer_that_reports_is_late():
    """Two peers that read each other's reports, and cannot connect, waited for each other without end."""
    trust = make_trust(b"a")
    for number in range(1, MAX_MISSED_ROUNDS + 1):
        trust.mark_silent([b"a"], is_unreachable=True)
        trust.absent[b"a"].until -= 1.0
        trust.update(make_records(b"a"))
        assert trust.count_quorum(make_records(b"a"), min_epoch=5) == (2 if number < MAX_MISSED_ROUNDS else 1)
    assert trust.absent[b"a"].reason == LATE
    trust.record_round([b"a"], {}, None, own_epoch=5)
    assert not trust.absent and not trust.missed_rounds


def test_peer_that_misses_rounds_is_no_longer_awaited():
    trust, since = make_trust(*NAMES), get_dht_time() - 5
    trust.uplink.record_epoch_time(10.0)
    reports, busy, behind = make_records(b"a"), make_records(b"b", ago=10), make_records(b"c", epoch=4)
    for _ in range(MAX_MISSED_ROUNDS - 1):
        trust.record_round([b"d"], reports | busy | behind, since, own_epoch=5)
    trust.record_round([b"d"], reports, None, own_epoch=5)  # no group waited for it
    assert not trust.absent
    trust.record_round([b"d"], reports | busy | behind, since, own_epoch=5)
    assert set(trust.absent) == {b"a"} and trust.is_known(b"d")
    assert trust.absent[b"a"].until == pytest.approx(get_dht_time() + BAN_SECONDS, abs=2)
    assert b"a" not in trust.select_present(reports) and b"a" not in trust.excluded
    trust.record_round([b"a"], {}, None, own_epoch=5)
    assert not trust.absent
    trust.uplink.record_epoch_time(600.0)  # it would count again before the next round
    for _ in range(MAX_MISSED_ROUNDS):
        trust.record_round([b"d"], reports, since, own_epoch=5)
    assert trust.absent[b"a"].until == pytest.approx(get_dht_time() + 1800, abs=2)


def test_peer_breaking_rounds_is_banned():
    trust, old, new = RoundTrust(), PeerID(b"old"), PeerID(b"new")
    trust.record_round([old], [], old)
    for _ in range(MAX_BROKEN_ROUNDS - 1):
        trust.record_broken_round([old, new], {})  # one blames the other
    trust.record_round([new], [], old)  # one in time makes up for one broken round
    trust.record_broken_round([new], {})
    with pytest.raises(MaliciousPeersError) as caught:
        trust.record_broken_round([new], {})
    assert list(caught.value.args[0]) == [new]
    trust.record_broken_round([new], {})  # counted from the start again


def count_broken(trust: RoundTrust, rounds: list[tuple]) -> set[PeerID]:
    """Return the peers that are banned after these broken rounds: the leader, and the peer that did not know it."""
    for leader, peer in rounds:
        try:
            trust.record_broken_round([leader, peer], {peer: leader})
        except MaliciousPeersError as e:
            return {*e.args[0]}
    return set()


def test_leader_that_hides_its_group_is_banned():
    """It has one round more than its victim, because it has led one without it."""
    hostile, victim, third = map(PeerID, (b"hostile", b"victim", b"third"))
    trust = RoundTrust()
    trust.rounds.update({hostile: 9, victim: 8, third: 9})
    assert count_broken(trust, MAX_BROKEN_ROUNDS * [(hostile, victim)]) == {hostile}
    trust.record_round([victim], [], hostile)  # it knows the group again
    # a peer that refuses the groups of several leaders is to blame itself
    assert count_broken(trust, [(third, victim), *MAX_BROKEN_ROUNDS * [(hostile, victim)]]) == {victim}
    new = PeerID(b"new")
    assert not count_broken(RoundTrust(), []) and not count_broken(trust, 9 * [(third, new)]), "keys cost nothing"


def test_peer_that_refuses_groups_blames_one_leader_at_most():
    """A round in time with another leader does not make it innocent: it would turn all others against each other."""
    hostile, first, second = map(PeerID, (b"hostile", b"first", b"second"))
    trust = RoundTrust()
    trust.rounds.update({hostile: 9, first: 9, second: 9})
    assert count_broken(trust, MAX_BROKEN_ROUNDS * [(first, hostile)]) == {first}
    trust.record_round([hostile, second], [], second)
    assert count_broken(trust, (MAX_BROKEN_ROUNDS + 1) * [(second, hostile)]) == {hostile}


def test_of_two_equal_suspects_both_count():
    """An attacker that names another victim each time is banned more often, and so for longer, than each of these."""
    trust, peers = RoundTrust(), [PeerID(b"a"), PeerID(b"b")]
    with pytest.raises(MaliciousPeersError) as caught:
        for _ in range(MAX_BROKEN_ROUNDS):
            trust.record_broken_round(peers, {})
    assert [*caught.value.args[0]] == peers


def test_peer_that_delays_rounds_in_a_row_is_named():
    trust, slow, other = RoundTrust(), PeerID(b"slow"), PeerID(b"other")
    late = [[slow]] * (MAX_BROKEN_ROUNDS - 1) + [[other]] + [[slow]] * 2
    named = [[*trust.record_round([slow, other], each, other)] for each in late]
    assert named == [[]] * (len(late) - 1) + [[slow]]
    with pytest.raises(MaliciousPeersError):
        trust.record_broken_round([slow], {})  # it has not been in time since
    for _ in range(9):
        trust.record_round([slow, other], [other], slow)
    assert not trust.record_round([slow, other], [], slow)  # not for a round in time
    assert not trust.record_round([slow, other], [], slow) and trust.broken_rounds[other] == MAX_BROKEN_ROUNDS - 2


@pytest.mark.parametrize("are_parameters", [False, True])
def test_late_sender_of_parameters_is_not_banned(are_parameters):
    """Parameters wait behind gradients, so an honest sender of them may be late in each round."""
    own, late = PeerID(b"own"), PeerID(b"late")
    averager = SimpleNamespace(are_parameters=are_parameters, max_weight=None, _trust=RoundTrust(), peer_id=own)
    runner = SimpleNamespace(ordered_peer_ids=[own, late], sender_peer_ids=[own, late], banned_senders=set())
    runner.tensor_part_container, runner.settings, runner.group_id = None, RoundSettings(), b"group"
    runner.late, runner.violations, runner.leader, runner.digests = [late], {}, own, {}
    for _ in range(MAX_BROKEN_ROUNDS):
        result = VerifyingAverager._check_round(averager, runner)[late]
    assert result.violations.keys() == (set() if are_parameters else {late})


def test_sender_that_comes_too_late_to_count_is_banned():
    """It claims a slow line and sends nothing. Each round with it succeeds, but takes seconds."""
    own, other, third, absent = map(PeerID, (b"own", b"other", b"third", b"absent"))
    averager = SimpleNamespace(are_parameters=False, max_weight=None, _trust=RoundTrust(), peer_id=own)
    everyone = [own, other, third, absent]
    runner = SimpleNamespace(ordered_peer_ids=everyone, sender_peer_ids=everyone, banned_senders={absent}, late=[])
    runner.tensor_part_container, runner.settings, runner.group_id = None, RoundSettings(), b"group"
    runner.violations, runner.leader, runner.digests = {}, other, {}  # the leader may not have told it to begin
    for _ in range(2 * MAX_BROKEN_ROUNDS):
        VerifyingAverager._check_round(averager, runner)
    assert not runner.violations and absent not in averager._trust.rounds
    averager._trust.rounds.clear()
    runner.leader = third
    for _ in range(MAX_BROKEN_ROUNDS):
        assert not runner.violations
        VerifyingAverager._check_round(averager, runner)
    assert runner.violations.keys() == {absent} and averager._trust.rounds == {own: 3, other: 3, third: 3, absent: 0}
    runner.violations, runner.banned_senders = {}, {other, third}
    for _ in range(2 * MAX_BROKEN_ROUNDS):  # this peer's own line is slow
        VerifyingAverager._check_round(averager, runner)
    assert not runner.violations.keys() & {other, third}


def test_round_counts_for_auxiliary_peer():
    """It sends no gradients. Without rounds, each third failure in its life, and each blame, would have banned it."""
    own, peer, aux = map(PeerID, (b"own", b"peer", b"aux"))
    averager = SimpleNamespace(are_parameters=False, max_weight=None, _trust=RoundTrust(), peer_id=own)
    runner = SimpleNamespace(ordered_peer_ids=[own, peer, aux], sender_peer_ids=[own, peer], banned_senders=set())
    runner.tensor_part_container, runner.settings, runner.group_id = None, RoundSettings(), b"group"
    runner.late, runner.violations, runner.leader, runner.digests = [], {}, own, {}
    for _ in range(2 * MAX_BROKEN_ROUNDS):
        VerifyingAverager._check_round(averager, runner)
        averager._trust.record_broken_round([aux], {})
        VerifyingAverager._check_round(averager, runner)
    assert averager._trust.rounds[aux] == averager._trust.rounds[peer] and not runner.violations


def test_new_keys_are_judged_together():
    """A reducer with a new key in each round reversed 30 of 30 averages."""
    trust, old = RoundTrust(), PeerID(b"old")
    used = 0
    for _ in range(MAX_BROKEN_ROUNDS):
        trust.record_round([old], [], old)
    for number in range(30):
        new = PeerID(b"new%d" % number)
        with contextlib.suppress(AllreduceException):
            trust.record_averages({old: 0.9, new: -1.0}, 0.3, weight=1 / 3)
            used += 1
        assert trust.scores[old] > 0.9
    assert used <= 2


def test_new_peer_after_hostile_keys_is_not_banned():
    """It begins with their score, but one low share of its own proves nothing."""
    trust, honest = RoundTrust(), PeerID(b"honest")
    for number in range(8):
        with contextlib.suppress(AllreduceException):
            trust.record_averages({PeerID(b"new%d" % number): -1.0}, 0.3, weight=1 / 3)
    assert trust.first_score < -0.5
    for share in (0.2, 0.8, 0.8, 0.8, 0.2):
        trust.record_averages({honest: share}, 0.8, weight=1 / 3)
        trust.record_round([honest], [], honest)
    assert trust.scores[honest] > 0.25


def test_averages_without_own_gradients_are_detected():
    trust, peer = RoundTrust(), PeerID(b"a")
    with pytest.raises(AllreduceException, match="points away"):
        trust.record_averages({peer: 1.0}, -0.5, weight=0.3)
    for _ in range(20):
        trust.record_averages({peer: 0.9}, 0.9, weight=0.3)
    rounds = 0
    with pytest.raises(MaliciousPeersError):
        for rounds in range(1, 20):  # noqa: B007
            trust.record_averages({peer: 0.0}, 0.5, weight=0.3)
    assert 5 <= rounds <= 12
    assert trust.scores[peer] == 0.5, "it has another chance once it is back"


@pytest.fixture(scope="module")
def dhts():
    with run_dhts([], []) as dhts:
        yield dhts


@pytest.fixture
def tracker(dhts):
    """The tracker of a lone peer at epoch 5, whose own thread waits."""
    with run_trackers(dhts[:1], 40, metadata_expiration=30.0) as [tracker], tracker.lock:
        tracker.update_epoch(5)
        yield tracker


@pytest.fixture
def epoch(dhts):
    """The tracker of a lone peer in an epoch of 400 samples that began ten seconds ago, and knows three others."""
    with run_trackers(dhts[:1], 400) as [tracker], tracker.lock:
        tracker.trust.attested = {b"a", b"b", b"c"}
        tracker.update_epoch(1)
        tracker._epoch_began -= 10.0
        yield tracker


def test_lone_peer_counts_samples_and_no_estimate(dhts):
    """By hivemind's estimate, an epoch could end a batch early on a busy machine."""
    with run_trackers(dhts[:1], 40, min_refresh_period=0.1, max_refresh_period=0.1) as [tracker]:
        tracker.report_local_progress(0, 30)
        wait_until(lambda: get_dht_time() > tracker.view.ends_at, 20, "the end by the estimate")
        assert tracker.view.samples == 30 and not tracker.ready_to_update_epoch
        tracker.report_local_progress(0, 40)
        assert tracker.ready_to_update_epoch


def test_looks_become_rare_without_changes(dhts):
    with run_trackers(dhts[:1], 40) as [tracker]:
        tracker.report_local_progress(0, 40)
        entry, now, pauses = ValueWithExpiration({}, math.inf), time.monotonic(), []
        with tracker.lock:
            for seconds in (0.0, 20.0, 600.0):
                tracker.apply_records(entry, now + seconds)
                pauses.append(tracker._next_read - time.monotonic())
        assert pauses == pytest.approx([0.5, 2.0, 5.0], abs=0.3)


@pytest.mark.parametrize(
    "samples, owners, expected",
    [(1, 0, [2.0, 5.0]), (1, 31, [2.0, 20.0]), (40, 31, [20.0, 20.0]), (40, 1, [19.4, 19.4])],
)
def test_refreshes_are_rarer_in_large_swarm(tracker, samples, owners, expected):
    """If 32 peers all read the records of all twice a second, the five that hold them send 15 Mbit/s each."""
    names = [b"%d" % number for number in range(31)]
    tracker.averaging = dataclasses.replace(tracker.averaging, metadata_expiration=120.0)
    tracker.trust.attested, tracker.trust.active = {*names}, {*names[:owners]}
    records = {it: ValueWithExpiration(make_record(it, samples=samples).dict(), math.inf) for it in names}
    pauses = []
    for seconds in (0.0, 600.0):
        tracker.apply_records(ValueWithExpiration(records, math.inf), time.monotonic() + seconds)
        pauses.append(tracker._next_read - time.monotonic())
    assert pauses == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("samples", [1, 40])
def test_records_of_new_keys_make_refreshes_rare(tracker, samples):
    """A thousand are a megabyte, from each of five peers. Those of an implausible epoch cost as much."""
    tracker.averaging = dataclasses.replace(tracker.averaging, metadata_expiration=120.0)
    tracker.trust.active = {b"voter"}
    found = [make_record(b"voter", samples=samples), *(make_record(b"%d" % it, epoch=10**9) for it in range(1100))]
    records = {it.peer_id: ValueWithExpiration(it.dict(), math.inf) for it in found}
    tracker.apply_records(ValueWithExpiration(records, math.inf), time.monotonic() + 600.0)
    assert {*tracker.others} == {b"voter"}
    assert tracker._next_read - time.monotonic() == pytest.approx(30.0, abs=0.3)


def test_reports_and_steps_without_a_pause_are_seen(dhts):
    """A quick second report is delayed, and the samples of steps without a pause are averaged at once."""
    with run_trackers(dhts, 16, max_refresh_period=0.5) as [one, other]:
        for samples in (5, 10, 15):
            other.report_local_progress(0, samples)
        wait_until(lambda: [it.samples_accumulated for it in one.others.values()] == [15], 20, "the last report")
        for epoch in range(5):
            other.report_local_progress(epoch, 16)
            other.update_epoch(epoch + 1)
        wait_until(lambda: [it.epoch for it in one.others.values()] == [5], 20, "the last epoch")


def test_record_is_published_again_in_long_step(dhts):
    with run_trackers(dhts, 16, metadata_expiration=2.0, max_refresh_period=0.5) as [one, other]:
        other.report_local_progress(0, 5)
        wait_until(lambda: one.others, 20, "the report")
        with other.pause_updates():
            time.sleep(5.0)
            wait_until(lambda: one.others, 20, "the same report again")
        other.report_local_progress(0, 6)
        wait_until(lambda: other.view.samples == 6, 20, "a look after the step")


@pytest.mark.parametrize("answers, unanswered", [((), ()), ((b"a",), (b"b",)), ((b"a", b"b"), ())])
def test_own_outage_makes_no_peer_late(tracker, answers, unanswered):
    """If no peer answers, this one's own connection may have failed. And a busy peer, which answers, is not late."""
    tracker.others = make_records(b"a", b"b")
    for _ in range(MAX_MISSED_ROUNDS):
        done = MPFuture()
        done.set_result({*answers})
        tracker._take_pings({b"a", b"b"}, done)
        tracker.exclude_idle_peers(get_dht_time() + 1, 2)
        for absence in tracker.trust.absent.values():
            absence.until -= 1.0
        tracker.trust.update(tracker.others)
    assert {*tracker.trust.absent} == {*unanswered}


def test_dht_without_an_answer_changes_nothing(tracker):
    """No peer is forgiven, and the quorum stays, until the records that are known would have expired."""
    tracker.others = {name: make_record(name, ago=5.0) for name in NAMES}
    tracker.trust.mark_silent([b"a"])
    for _ in range(2):
        tracker.apply_records(None, 0.0)
        assert set(tracker.others) == set(NAMES) and tracker.trust.excluded == {b"a"}
        assert tracker.view.num_peers == 4 and tracker.quorum == 4
    tracker.others = {name: make_record(name, ago=31.0) for name in NAMES}
    tracker.apply_records(None, 0.0)
    assert not tracker.others and tracker.view.num_peers == 1


def test_former_voters_are_no_contributors():
    """One key after the other may get a vote and leave, until all of them together are most known peers."""
    trust = make_trust(b"a", b"b")
    trust.partners = {b"c", b"d"}
    trust.active = {b"b", b"d"}
    assert [name for name in NAMES if trust.is_known(name)] == [b"b", b"d"]
    assert not trust.select_known(make_records(b"a", b"c")), "strangers do not take the place of voters"


def test_silent_contributors_leave_stranger_no_say(epoch):
    """A stranger replaced the state of the run while the others answered no ping for a moment."""
    epoch.others = {name: make_record(name, 1) for name in (b"a", b"b", b"c")}
    epoch.others[b"new"] = make_record(b"new", epoch=3, samples=500)
    epoch.trust.mark_silent([b"a", b"b", b"c"])
    epoch.apply_records(None, 0.0)
    assert epoch.view.epoch == 1 and epoch.view.samples == 0


def test_claimed_batch_does_not_end_epoch(epoch):
    """A known peer that claims a batch counts as four others at most, and an unknown one does not count."""
    claims = {b"c": (400, 1e6), b"d": (400, 1e6)}
    epoch.others = {name: make_record(name, 1, 0.0, *claims.get(name, (1, 1.0))) for name in NAMES}
    epoch.apply_records(None, 0.0)
    assert epoch.view.samples == 42 and not epoch.ready_to_update_epoch
    assert epoch.view.ends_at - get_dht_time() == pytest.approx(358 / 6, rel=0.1)
    # a new peer knows the length of an epoch by the contributors' records
    assert epoch.trust.uplink.timeouts.partition_grace == pytest.approx(GRACE_SHARE * 400 / 6, rel=0.1)
    epoch.trust.active = {b"a"}  # the last commits of a log have no update of the others
    epoch.set_target(10**6)
    epoch.apply_records(None, 0.0)
    assert epoch.view.samples == 1 and epoch.trust.uplink.timeouts.partition_grace == MAX_GRACE


def test_batch_of_peers_far_behind_ends_no_epoch(epoch):
    """A peer that was cut off must load their state, instead of stepping with the samples of another epoch."""
    epoch.update_epoch(9)
    epoch.others = {name: make_record(name, 4, 0.0, 200) for name in (b"a", b"b", b"c")}
    epoch.apply_records(None, 0.0)
    assert epoch.view.epoch == 4 and epoch.view.samples >= 400 and not epoch.ready_to_update_epoch


def test_backdated_record_does_not_end_epoch(epoch):
    """A peer may have computed for 50 minutes by the time in its record, but not in an epoch of 10 seconds."""
    records = [make_record(b"a", 1), make_record(b"b", 1), make_record(b"c", 1, ago=3000.0)]
    values = {it.peer_id: ValueWithExpiration(it.dict(), math.inf) for it in records}
    epoch.apply_records(ValueWithExpiration(values, math.inf), 0.0)
    assert epoch.view.samples == 3 and not epoch.ready_to_update_epoch
    assert epoch.view.ends_at - get_dht_time() == pytest.approx((400 - 1 - 1 - 40) / 3, rel=0.1)


def test_group_without_most_contributors_is_recognized(tracker):
    tracker.others = make_records(*NAMES) | make_records(b"new") | make_records(b"behind", epoch=3)
    assert tracker.is_majority([]) and tracker.is_majority([b"new"]), "no contributor is known"
    tracker.trust.attested = {*NAMES, b"behind"}
    groups = [b"new"], [b"a", b"new"], [b"a", b"b"], [b"a", b"b", b"c"], NAMES
    assert [tracker.is_majority(group) for group in groups] == [False, False, False, True, True]
    tracker.trust.mark_silent([b"c", b"d"])
    assert [tracker.is_majority(group) for group in groups] == [False, True, True, True, True]


def test_leader_that_omits_peers_gets_no_pair(tracker):
    """One of four led three rounds without b, which was late then, and two rounds later the others alone."""
    tracker.others, tracker.trust.attested = {name: make_record(name) for name in (b"b", b"c", b"hostile")}, set()
    tracker.trust.attested = {*tracker.others}
    for _ in range(MAX_MISSED_ROUNDS):
        tracker.record_round([b"c", b"hostile"], waited_since=get_dht_time() - 5)
    assert {*tracker.trust.absent} == {b"b"} and {*tracker.peers_at_epoch} == {b"c", b"hostile"}
    groups = [b"hostile"], [b"c", b"hostile"], [b"b", b"hostile"], [b"b", b"c"], [b"b"]
    assert [tracker.is_majority(group) for group in groups] == [False, True, True, True, False]
    assert tracker.quorum == 3 and not tracker.lacks_quorum and tracker.has_quorum_reported(get_dht_time() - 10.0)
    tracker.others |= {b"c": make_record(b"c", ago=20.0)}
    assert not tracker.has_quorum_reported(get_dht_time() - 10.0), "its leader may wait for c"
    expected = []
    averager = SimpleNamespace(set_expected_peers=lambda *it, **_: expected.append(it))
    for awaits_all, others in ((True, 3), (False, 3)):
        Rounds(tracker, averager, averager).expect_group(awaits_all)
        epochs, min_peers, excluded = expected[-2]
        assert epochs == dict.fromkeys([b"b", b"c", b"hostile"], 5) and (min_peers, excluded) == (others, set())
    tracker.record_round([b"b", b"hostile"], waited_since=get_dht_time() - 5)
    assert not tracker.trust.absent


def test_two_of_four_go_on_without_late_ones(tracker):
    """The other two are a hostile peer and the one with which it has made a step, or cannot be reached. Neither may
    then take the place of a peer in time, nor may one that is back lead another one alone."""
    tracker.others, tracker.trust.attested = make_records(*NAMES[:3]), {*NAMES[:3]}
    tracker.trust.absent = {name: Absence(LATE, get_dht_time() + 60) for name in (b"b", b"c")}
    groups = [b"a"], [b"b"], [b"b", b"c"], [b"a", b"b"]
    assert [tracker.is_majority(group) for group in groups] == [True, False, True, True]
    assert tracker.quorum == 2 and [*tracker.contributors_at_epoch] == [b"a"] and not tracker.lacks_quorum
    del tracker.trust.absent[b"c"]
    groups = [b"a"], [b"c"], [b"a", b"c"], [b"a", b"b"]
    assert [tracker.is_majority(group) for group in groups] == [False, False, True, True] and tracker.quorum == 3


@pytest.mark.parametrize(
    "epochs, clients, view_epoch, expected",
    [
        ((5, 5), b"", 5, b"ab"),
        ((5, 5), b"b", 5, b"a"),  # this peer is not behind
        ((5, 6, 6), b"bc", 6, b"bc"),  # a is behind as well
        ((6, 6, 6), b"bc", 6, b"a"),
        ((4, 5), b"", 6, b"ab"),
        ((6, 6), b"ab", 6, b"ab"),
    ],
)
def test_public_peer_that_is_behind_is_no_witness(tracker, epochs, clients, view_epoch, expected):
    """Two trainers lost the end of a round with two clients. Each loaded the other's state, which was its own."""
    names = NAMES[: len(epochs)]
    tracker.others = {name: make_record(name, epoch) for name, epoch in zip(names, epochs, strict=True)}
    tracker.others |= {it: tracker.others[it].copy(update={"client_mode": True}) for it in map(bytes, zip(clients))}
    tracker.trust.attested, tracker.view = {*names}, dataclasses.replace(tracker.view, epoch=view_epoch)
    assert sorted(tracker.list_contributors()) == [*map(bytes, zip(expected))]


@pytest.mark.parametrize("is_served", [True, False])
@pytest.mark.parametrize(
    "others, ahead", [(b"abc", b"ab"), (b"abcde", b"abc"), (b"abcd", b"abcd"), (b"abcde", b"abcd")]
)
def test_stale_state_is_no_answer(tracker, monkeypatch, is_served, others, ahead):
    """Two of four, of which one is hostile, have made a step alone. The hostile one serves the state before."""
    records, now = {name: make_record(name, 6 if name in ahead else 5) for name in map(bytes, zip(others))}, [0.0]
    tracker.trust.attested = {*records}
    state = SimpleNamespace(local_epoch=5, apply_downloaded_state=lambda *_: None)
    state.download_progress = SimpleNamespace(bytes=1, milliseconds=1000)
    monkeypatch.setattr("swarm.state_sync.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(tracker, "ping_quiet_peers", lambda _: None)

    def refresh() -> None:
        values = {it.peer_id: ValueWithExpiration(it.dict(), math.inf) for it in records.values()}
        tracker.apply_records(ValueWithExpiration(values, math.inf), 0.0)

    monkeypatch.setattr(tracker, "refresh_now", refresh)
    sync = StateSync(tracker, state)
    sync.download = lambda *_, is_step=False, **__: None if is_step or not is_served else ({}, [])
    refresh()
    while tracker.view.epoch == 6 and now[0] < 100:
        now[0] += 1.0
        if sync.backoff.allows(5, 6, True, now[0]) and sync.load(6, tracker.list_contributors(), True, True):
            sync.check_staleness()
        refresh()
    is_swarm = 3 * len(ahead) >= 2 * (1 + len(others))
    assert (tracker.view.epoch == 5) != is_swarm and (len(tracker.trust.absent) == len(ahead)) != is_swarm
    assert is_swarm or now[0] <= 2 * SYNC_RETRY_PERIOD + 2


def test_records_of_new_keys_leave_peers_in_step(tracker):
    """Otherwise, as with several groups, a peer forgets its contributors after the next round, and believes all."""
    new, trust, rounds = [b"new%d" % number for number in range(300)], tracker.trust, Rounds(tracker, None, None)
    tracker.others, most = make_records(*NAMES, *new), new[:MAX_WORKERS]  # which the initial peers can name
    assert not rounds.is_synchronous(), "no contributor is known"
    for attested, partners, expected in ((NAMES, (), 1), (most, (), 0), (most, NAMES, 1), (most, new, 0)):
        trust.attested, trust.partners = {*attested}, {*partners}
        assert rounds.is_synchronous() == bool(expected)


def test_quorum_of_known_contributors_waits(tracker):
    new = make_records(*(b"new%d" % number for number in range(9)))
    tracker.others = make_records(b"a", b"b", b"c") | make_records(b"d", ago=20.0) | new
    tracker.trust.attested = {*NAMES}
    assert [tracker.has_quorum_reported(get_dht_time() + seconds) for seconds in (-10.0, 10.0)] == [True, False]
    tracker.others |= make_records(b"b", ago=20.0)
    assert not tracker.has_quorum_reported(get_dht_time() - 10.0)


def test_commit_does_not_raise_speed(dhts):
    """The samples since the offer, of several steps, are no work of the first step after the commit."""
    with run_trackers(dhts[:1], 400) as [tracker]:
        updates = []
        tracker.update_epoch(3)
        tracker.performance_ema.update = lambda task_size: updates.append(task_size)
        for samples in (10, 20, 0, 10, 20):  # an offer takes the first ones
            tracker.report_local_progress(3, samples)
        tracker.update_epoch(4, 20)
        assert tracker.view.samples == 20 and tracker.local_progress.samples_accumulated == 20
        tracker.report_local_progress(4, 30)
        assert updates == 5 * [10] and tracker.view.samples == 30


def test_aux_peer_excludes_unresponsive_peers(tracker):
    tracker.others, tracker.trust.is_auxiliary = {name: make_record(name, ago=1.0) for name in NAMES}, True
    rounds = Rounds(tracker, None, SimpleNamespace(restore_pending=lambda: None, end_round=lambda: None))
    rounds._put_back(MPFuture(), 5, PeersSilentError([b"a", b"b"]))
    assert set(tracker.present) == {b"c", b"d"} and rounds.stats.failed == 1


@pytest.mark.parametrize(
    "group, behind, is_step",
    [
        ((b"a", b"b", b"c"), b"", True),
        ((b"a", b"b"), b"", False),
        ((b"a", b"b", b"new", b"newer"), b"", False),
        ((b"a",), b"bcd", False),
        ((b"a", b"b", b"c"), b"d", True),
    ],
)
def test_step_needs_most_contributors(tracker, monkeypatch, group, behind, is_step):
    """The others would follow a malicious leader and the one peer with which it makes a step."""
    tracker.others, tracker.trust.attested = {it: make_record(it) for it in (*NAMES, b"new", b"newer")}, {*NAMES}
    tracker.others |= {name: make_record(name, epoch=4) for name in map(bytes, zip(behind))}
    result, ignore = RoundResult(b"group", (), (1, 0), {}, {}), lambda *_, **__: 1
    names = ("set_expected_peers", "restore_pending", "end_round", "finish")
    averager = SimpleNamespace(samples=1, **dict.fromkeys(names, ignore))
    rounds = Rounds(tracker, averager, averager)
    monkeypatch.setattr("swarm.rounds.RoundWait.run", lambda _: {PeerID(name): result for name in group})
    with contextlib.nullcontext() if is_step else pytest.raises(AveragingError):
        rounds._finish(MPFuture(), 5)
    assert (rounds.stats.succeeded, rounds.stats.failed) == (int(is_step), int(not is_step))


def test_silence_in_each_round_is_a_fault():
    """A peer that reports in between would otherwise end all rounds."""
    done, own = SimpleNamespace(uplink=Uplink()), PeerID(b"own")
    averager = SimpleNamespace(_trust=RoundTrust(), peer_id=own, dht=done)
    runner = SimpleNamespace(violations={}, silent=[b"silent"], cause=(PeerID(b"silent"), own), broken=set())
    runner.foreign, runner.leader, runner.refused = set(), own, set()
    runner.group_size = 4

    async def fail() -> None:
        watch = asyncio.get_running_loop().create_future()
        watch.set_result(None)
        await VerifyingAverager._check_failed_round(averager, runner, watch)

    for most in (*MAX_BROKEN_ROUNDS * [True], *(MAX_BROKEN_ROUNDS - 1) * [False]):  # most: this peer is cut off
        runner.silent = [b"silent", b"others"] if most else [b"silent"]
        with pytest.raises(PeersSilentError):
            asyncio.run(fail())
    with pytest.raises(MaliciousPeersError) as caught:
        asyncio.run(fail())
    assert list(caught.value.args[0]) == [PeerID(b"silent")]


def test_peer_in_split_round_waits_for_others(tracker):
    """A hostile peer, here a, gave the averages of a round to this peer only, and now follows each of its steps."""
    tracker.others, tracker.trust.attested = make_records(b"a") | make_records(b"b", b"c", epoch=4), {b"a", b"b", b"c"}
    tracker.stop_waiting_for_stragglers(5)
    assert {*tracker.peers_at_epoch} == {*tracker.contributors_at_epoch} == {b"a", b"b", b"c"} and tracker.quorum == 3
    assert not tracker.is_majority([b"a"]) and tracker.is_majority([b"a", b"b"])
    tracker.others |= make_records(b"c", b"b")  # they have loaded the step
    tracker.others |= make_records(b"d", epoch=4)
    tracker.trust.attested |= {b"d"}
    tracker.stop_waiting_for_stragglers(5)
    assert {*tracker.peers_at_epoch} == {b"a", b"b", b"c"} and tracker.quorum == 4, "d is one of five"


@pytest.mark.parametrize("ahead, view_epoch, quorum", [(b"ad", 5, 2), (b"ad", 6, 4), (b"a", 5, 3), (b"abcd", 6, 4)])
def test_minority_that_is_ahead_is_not_needed(tracker, ahead, view_epoch, quorum):
    """The others of a split round could otherwise make no epoch, because those that are ahead do not make it again."""
    tracker.others, tracker.trust.attested = make_records(*NAMES), {*NAMES}
    tracker.others |= make_records(*map(bytes, zip(ahead)), epoch=6)
    tracker.view = dataclasses.replace(tracker.view, epoch=view_epoch)
    assert tracker.quorum == quorum
    # of a group with a leader that is ahead, no state is loaded
    assert not tracker.is_majority([b"a"])


def test_one_of_two_goes_on_without_the_other(tracker):
    """It may be at the last epoch for long, and neither is a majority."""
    tracker.others, tracker.trust.attested = make_records(b"a", epoch=4), {b"a"}
    assert tracker.quorum == 2
    tracker.stop_waiting_for_stragglers(5)
    assert tracker.quorum == 1 and not tracker.peers_at_epoch and tracker.is_majority([])


def test_round_counts_members_that_have_reported_next_epoch(tracker):
    """A fast member of the round may have stepped before this peer looks."""
    names = [*NAMES, b"e"]
    tracker.others, tracker.trust.attested = make_records(*names), {*names}
    for fast in ((), (b"a",), (b"a", b"b")):
        tracker.others |= make_records(*fast, epoch=6)
        assert tracker.is_majority([b"a", b"b", b"c"]) and not tracker.is_majority([b"a", b"b"])


def test_banned_third_peer_is_not_awaited(tracker):
    tracker.others, tracker.trust.attested = make_records(b"a", epoch=4) | make_records(b"b"), {b"a", b"b"}
    tracker.trust.ban({PeerID(b"b"): "has lied"})
    tracker.stop_waiting_for_stragglers(5)
    assert tracker.quorum == 1 and tracker.is_majority([])


def test_peers_ahead_without_state_are_late(tracker):
    """Otherwise, two of four would wait forever for the state of a hostile peer and its partner in the last step."""
    tracker.others = {b"a": make_record(b"a", 6), b"b": make_record(b"b", 6), b"c": make_record(b"c")}
    tracker.trust.attested = {b"a", b"b", b"c"}
    tracker.apply_records(None, 0.0)
    assert tracker.view.epoch == 6
    for _ in range(MAX_MISSED_ROUNDS):
        for peer_id in (b"a", b"b"):
            tracker.trust.count_missed_round(peer_id, "is ahead")
    tracker.view = dataclasses.replace(tracker.view, epoch=5)
    assert tracker.trust.find_swarm_epoch(tracker.present, 5) == 5 and not tracker.trust.excluded
    assert tracker.quorum == 2 and tracker.peers_at_epoch == [b"c"]


def test_straggler_is_awaited_again_some_epochs_later(tracker):
    tracker.others = make_records(b"a", epoch=4) | make_records(b"b", epoch=5)
    assert tracker.peers_at_epoch == [b"a", b"b"] and max(tracker.quorum, 1 + len(tracker.peers_at_epoch)) == 3
    tracker.stop_waiting_for_stragglers(5)
    assert tracker.peers_at_epoch == [b"b"] and tracker.patient_from == 5 + WAIT_RETRY_EPOCHS
    tracker.update_epoch(6)
    tracker.others = make_records(b"b", epoch=5)
    assert tracker.peers_at_epoch == [b"b"], "it may make the step of the others just now"
    tracker.stop_waiting_for_stragglers(6)
    assert not tracker.peers_at_epoch and tracker.patient_from == 5 + WAIT_RETRY_EPOCHS


@pytest.mark.parametrize("is_client", [False, True])
def test_clients_without_leader_read_a_cure(tracker, monkeypatch, caplog, is_client):
    """The last trainer that accepts connections has left; those that remain can only wait for each other."""
    tracker.others = {b"a": make_record(b"a").copy(update={"client_mode": True})}
    monkeypatch.setattr(tracker, "dht", SimpleNamespace(client_mode=is_client, uplink=tracker.dht.uplink))
    averager = SimpleNamespace(restore_pending=lambda: None, end_round=lambda: None, samples=1)
    rounds = Rounds(tracker, averager, averager)
    for _ in range(3):
        rounds._put_back(MPFuture(), 5, TimeoutError())
    assert ("No trainer accepts connections" in caplog.text) == is_client
