"""The replicated log: each rule, and random faults. `python tests/swarm/test_log.py 1000` runs more of them."""

import hashlib
import math
import statistics
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Annotated

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import DIGEST, TIMEOUT, FakeIdentity, Network, name_peer, run_schedule

from swarm import log_records
from swarm.log import (
    MAX_ANSWER_BYTES,
    MAX_GIVEN,
    MAX_POOL,
    MAX_TRAFFIC,
    SLOT,
    Action,
    Entry,
    Log,
    State,
    make_genesis,
    rank,
)
from swarm.log_records import WINDOW, Commit, Leave, Offer, Proof, Proposal, Status, Vote, encode, pack, unpack

PEERS = [name_peer(index) for index in range(40)]


def make_state(num_members: int = 4) -> State:
    return make_genesis("run", 0, DIGEST, tuple(PEERS[:num_members]))


def make_log(num_members: int = 4, state: State | None = None, index: int = 0) -> Log:
    """A log that holds all blobs."""
    state = state or make_state(num_members)
    return Log(state, FakeIdentity(PEERS[index], PEERS), TIMEOUT, lambda blob: True, now=1e6, memory=b"")


def sign(record: object) -> object:
    return replace(record, signature=FakeIdentity(record.peer).sign(log_records.get_signed_part(record)))


def make_offer(peer: bytes, base: bytes, blob: bytes = bytes(32), accepts: bool = True, opposed=()) -> Offer:
    return sign(Offer(base, DIGEST, peer, 8, blob, 100, opposed, accepts, 20.0, b""))


def make_vote(attempt: int, last: int, proposal: bytes, peer: bytes = PEERS[1], parent: bytes = bytes(32)) -> Vote:
    return sign(Vote(parent, attempt, last, proposal, peer, b""))


def make_commit(state: State, owners, leaves=(), proofs=()) -> Commit:
    offers = sorted((make_offer(peer, state.head) for peer in owners), key=lambda offer: offer.key)
    return Commit(state.head, state.epoch + 1, tuple(offers), tuple(leaves), tuple(proofs))


def advance(state: State, owners, times: int = 1, **notices) -> State:
    for _ in range(times):
        state = state.advance(make_commit(state, owners, **notices))
    return state


def list_sent(actions: list, kind: type) -> list:
    """The records of a kind in the messages."""
    messages = [action.content for action in actions if action.kind in ("send", "gossip")]
    return [it for message in messages for it in log_records.decode(message) if type(it) is kind]


def run_until(network: Network, condition, seconds: int = 120) -> None:
    for _ in range(seconds):
        if condition():
            return
        network.run(1)
    raise AssertionError(f"not within {seconds} s")


def measure_spans(network: Network, log: Log, epochs, seconds: int = 120, act=lambda: None) -> list[float]:
    """Return the seconds until a log has each of these epochs.

    :param seconds: the longest time of an epoch
    :param act: a function for the acts of hostile peers, called each second
    """
    spans = []
    for epoch in epochs:
        start = network.now
        while log.state.epoch < epoch:
            assert network.now < start + seconds
            act()
            network.run(1)
        spans.append(network.now - start)
    return spans


def run_all_schedules(seed: int) -> None:
    for options in ({}, {"has_liar": True}, {"forgets": True}, {"withholds": True}):
        run_schedule(seed, **options)


def test_voter_without_offer_leads_few_attempts():
    state = advance(make_state(4), PEERS[1:4])
    assert state.voters == tuple(PEERS[:4]) and state.awaited == state.active == {*PEERS[:4]}
    state = advance(state, PEERS[1:4])
    assert state.awaited == {*PEERS[1:4]}
    attempts = Counter(state.find_leader(attempt) for attempt in range(10))
    assert sorted(attempts.values()) == [1, 1, 4, 4] and attempts[PEERS[0]] == 1
    assert attempts[state.find_leader(0)] == 1
    state = advance(state, PEERS[:4], times=WINDOW - 2)
    assert state.active == {*PEERS[:4]} and PEERS[0] not in state.awaited
    assert PEERS[0] in advance(state, PEERS[:4]).awaited


@pytest.mark.parametrize("num_voters", [16, 20, 30, 40, 64])
def test_voters_above_places_take_turns(num_voters):
    """All counted equally often, and no offer is made in vain. Silent ones take no place after they missed a turn."""
    state = make_genesis("run", 0, DIGEST, tuple(name_peer(index) for index in range(num_voters)))
    counts = Counter()
    for _ in range(4 * WINDOW):
        assert len(state.in_turn) == 16 and state.in_turn == state.awaited
        counts.update(state.in_turn)
        state = advance(state, state.in_turn)
    assert len(state.voters) == num_voters and max(counts.values()) < 1.6 * min(counts.values())
    if num_voters > 16:
        gone = {*state.voters[:3]}
        for _ in range(math.ceil(num_voters / 16)):  # until each has missed its turn
            state = advance(state, state.in_turn - gone)
        assert len(state.in_turn - gone) == 16 and not state.awaited & gone
        others = [b"other%d" % number for number in range(4)]
        state = advance(state, [*sorted(state.in_turn - gone)[:12], *others])
        assert len(state.list_turns()[0]) == 12, "others had four places"


def test_list_waits_for_all_voters_in_turn():
    """Of 30 voters, a leader proposed as soon as it held nine updates, and others refused its list as unfair. If too
    few peers come that have a turn, the others make offers, too."""
    state = make_genesis("run", 0, DIGEST, tuple(PEERS[:30]))
    state = advance(advance(state, state.in_turn), PEERS[14:30])
    usual, missed = state.list_turns()
    turns = usual + missed
    log = make_log(state=state, index=int(turns[0][4:]))
    for peer in turns[1:]:
        log.receive(1e6, peer, encode(make_offer(peer, state.head)))
        assert log.ready_time == math.inf
    log.add_offer(1e6 + 1, make_offer(turns[0], state.head))
    assert log.ready_time == 1e6 + 1
    waiting = make_log(state=state, index=next(i for i in range(30) if PEERS[i] not in turns))
    for number, seconds, has_turn in (
        (1, 0, False),
        (4, TIMEOUT, False),
        (4, TIMEOUT + 1, True),
        (9, TIMEOUT + 1, False),
    ):
        for peer in turns[:number]:
            waiting.receive(1e6, peer, encode(make_offer(peer, state.head)))
        waiting.tick(1e6 + seconds)
        assert waiting.has_turn() is has_turn, number
    # the offers of others do not begin the choice, nor end the wait, unless they are of most voters
    early = make_log(state=state, index=int(waiting.me[4:]))
    others = [peer for peer in state.voters if peer not in turns and peer != early.me]
    for peer in others[:9]:
        early.receive(1e6, peer, encode(make_offer(peer, state.head)))
    early.tick(1e6 + TIMEOUT + 1)
    assert not early.has_turn() and early.most_time == math.inf
    early.tick(1e6 + 2 * TIMEOUT + 2)
    assert early.has_turn(), "none with a turn has made an offer"
    for peer in others[9:] + missed + usual[:3]:
        early.receive(1e6 + 2 * TIMEOUT + 2, peer, encode(make_offer(peer, state.head)))
    assert early.most_time == 1e6 + 2 * TIMEOUT + 2 and not early.has_turn()


def test_owner_that_most_voters_oppose_is_suspended():
    """No minority can do that, nor peers without a vote, nor late offers, nor offers that name a peer twice."""
    state = advance(make_state(5), [PEERS[0], *PEERS[2:6]])
    victim = PEERS[4]
    late = Offer(state.parent, DIGEST, PEERS[1], 8, bytes(32), 100, (victim,), True, 20.0, b"")
    for judges, others, is_suspended in (
        (PEERS[:3], (), True),
        (PEERS[:2], (), False),
        ((*PEERS[:2], PEERS[5]), (), False),
        ((PEERS[0], PEERS[2]), (late,), False),
    ):
        offers = [make_offer(peer, state.head, opposed=(victim,) if peer in judges else ()) for peer in PEERS[:6]]
        offers = [it for it in offers if it.peer not in {other.peer for other in others}]
        commit = replace(make_commit(state, ()), offers=tuple(sorted([*offers, *others], key=lambda it: it.key)))
        assert state.accepts(commit, lambda record: True)
        assert (state.advance(commit).suspended == {victim}) is is_suspended
    double = make_offer(PEERS[0], state.head, opposed=(victim, victim, victim, PEERS[7]))
    commit = make_commit(state, PEERS[1:5])
    assert not state.advance(replace(commit, offers=(double, *commit.offers))).suspended
    offers = [make_offer(peer, state.head, opposed=(victim,)) for peer in PEERS[:3]]
    after = state.advance(replace(make_commit(state, ()), offers=tuple(offers)))
    assert [advance(after, PEERS[:5], times=n).suspended for n in (WINDOW - 1, WINDOW)] == [{victim}, set()]
    assert victim in after.voters
    # half of the voters are too many, because the rest would decide alone
    for victims, suspended in ((PEERS[:2], {*PEERS[:2]}), (PEERS[:3], set())):
        assert replace(state, opposed=(*state.opposed[1:], tuple(victims))).suspended == suspended
    # the voters of a list are all suspended, and a peer without a vote has an offer in it
    opposed = replace(state, opposed=(*state.opposed[1:], tuple(PEERS[:2])))
    assert opposed.find_suspended(make_commit(opposed, [*PEERS[:3], PEERS[7]])) == {*PEERS[:2]}
    assert opposed.find_suspended(make_commit(opposed, [*PEERS[:2], PEERS[7]])) == set()


def test_part_of_many_voters_suspends_no_owner():
    """Voters that let a turn pass may judge together later."""
    state = make_genesis("run", 0, DIGEST, tuple(PEERS[:30]))
    state = advance(advance(state, state.in_turn), PEERS[14:30])
    for num_judges, suspended in ((10, set()), (11, {PEERS[29]})):
        offers = [make_offer(peer, state.head, opposed=(PEERS[29],)) for peer in PEERS[:num_judges]]
        offers += [make_offer(peer, state.head) for peer in PEERS[num_judges:16]]
        commit = replace(make_commit(state, ()), offers=tuple(sorted(offers, key=lambda it: it.key)))
        assert state.advance(commit).suspended == suspended


def test_clients_lead_if_reachable_voter_does_not():
    """The only voter that accepts connections would otherwise lead every attempt, also after its end."""
    network = Network(8, 5, clients=(1, 2, 3), members=4)
    network.trainers[PEERS[4]].make_offer = lambda: None  # an auxiliary peer, over which the clients exchange messages
    reachable = network.trainers[PEERS[0]]
    clients = [network.trainers[peer] for peer in PEERS[1:4]]
    run_until(network, lambda: all(client.log.state.epoch >= 2 for client in clients))
    assert reachable.log.state.find_leader(0) == PEERS[0]
    reachable.crash()
    epoch = clients[0].log.state.epoch
    run_until(network, lambda: all(client.log.state.epoch >= epoch + 2 for client in clients), 30 * int(SLOT))
    # from now on, no time is lost
    assert clients[0].log.state.find_leader(0) in PEERS[1:4]
    assert statistics.median(measure_spans(network, clients[0].log, range(epoch + 3, epoch + 8))) < network.pace + SLOT


def test_voter_that_is_always_late_delays_few_lists():
    """Its late offers count, so it would be awaited in each epoch."""
    state = advance(advance(make_state(4), PEERS[:4], times=4), PEERS[1:4])
    awaited = []
    for _ in range(8):
        commit = make_commit(state, PEERS[1:4])
        late = make_offer(PEERS[0], state.parent)
        offers = tuple(sorted((*commit.offers, late), key=lambda offer: offer.key))
        assert state.accepts(commit := replace(commit, offers=offers), lambda record: True)
        state = state.advance(commit)
        awaited.append(PEERS[0] in state.awaited)
        assert {*PEERS[1:4]} <= state.awaited
    assert sum(awaited) == 2
    assert PEERS[0] in advance(state, PEERS[:4]).awaited, "once it is in time, it is awaited again"


@pytest.mark.parametrize("num_voters", [31, 63, 64])
def test_voters_increase_to_their_limit(num_voters):
    """The more voters there are, the fewer commits lie between two new ones; none is new beyond the limit."""
    peers = tuple(map(name_peer, range(num_voters + 1)))
    state = make_genesis("run", 0, DIGEST, peers[:num_voters])
    state = replace(state, owners=(peers,) * WINDOW)
    assert len(advance(state, peers[-15:], times=2).voters) == min(num_voters + 1, 64)


def test_new_keys_are_neither_active_nor_believed():
    """Thirteen of them have offers in a commit of three voters, and name another state."""
    state = make_state(3)
    commit = make_commit(state, PEERS[:16])
    offers = tuple(
        replace(it, digest=it.digest if it.peer in state.voters else bytes([1]) * 32) for it in commit.offers
    )
    assert state.find_digest(replace(commit, offers=offers)) == DIGEST
    assert state.advance(commit).active == {*PEERS[:3]}


def test_two_of_five_voters_name_no_state():
    """A hostile leader may omit two offers of the others."""
    state, other = make_state(5), bytes([1]) * 32
    commit = make_commit(state, PEERS[:3])
    offers = tuple(replace(it, digest=DIGEST if it.peer == PEERS[0] else other) for it in commit.offers)
    assert state.find_digest(replace(commit, offers=offers)) == b""
    offers = (*offers, make_offer(PEERS[4], state.head), make_offer(PEERS[3], state.head))
    assert state.find_digest(replace(commit, offers=offers)) == DIGEST


@pytest.mark.parametrize(("num_peers", "withholders"), [(4, [0]), (4, [1]), (5, [0, 1]), (7, [0, 1])])
def test_withheld_updates_delay_two_commits(num_peers, withholders):
    """The withholders are voters, and lead the first attempt in some of these schedules."""
    network = Network(1, num_peers, pace=4.0)
    run_until(network, lambda: network.honest[0].log.state.epoch == 3)
    network.withholders = {PEERS[index] for index in withholders}
    spans = measure_spans(network, network.honest[-1].log, range(4, 14))
    assert max(spans[:2]) <= 2 * TIMEOUT + 7 and max(spans[2:]) <= 7


def test_withholder_that_waits_delays_few_commits():
    """It serves its updates until lists wait for them again, which allows two delays in nine commits."""
    network = Network(1, 4, pace=4.0)
    log = network.honest[-1].log

    def withhold() -> None:
        network.withholders = {PEERS[0]} & log.state.awaited

    assert sum(span > 8 for span in measure_spans(network, log, range(1, 28), 59, withhold)) <= 6


def test_blobs_of_new_keys_delay_commits_once():
    """Each voter has an update of a new key that no other peer can get, and lists it when it leads."""
    network, offered = Network(1, 5, pace=4.0), set()
    log, strangers = network.honest[0].log, PEERS[10:15]
    for trainer in network.honest:
        trainer.log.identity.known |= set(strangers)

    def offer_new_keys() -> None:
        for trainer, stranger in zip(network.honest, strangers, strict=True):
            head = trainer.log.state.head
            offer = make_offer(stranger, head, hashlib.sha256(stranger + head).digest())
            if (stranger, head) not in offered:
                offered.add((stranger, head))
                trainer.log.holds = lambda blob, own=trainer, only=offer.blob: blob == only or blob in own.store
                trainer.run(trainer.log.receive(network.now, stranger, encode(offer)))

    assert max(measure_spans(network, log, range(1, 11), act=offer_new_keys)) <= TIMEOUT + SLOT + 10


class LonelyLog(Log):
    """A liar: as a leader, it proposes its own offer only, at once."""

    def make_list(self) -> Commit | None:
        commit = super().make_list()
        own = tuple(offer for offer in commit.offers if offer.peer == self.me) if commit else ()
        return replace(commit, offers=own) if own else None

    def update_ready_time(self) -> None:
        self.ready_time = min(self.ready_time, self.now)


@pytest.mark.parametrize("seed", [0, 2])
def test_leader_that_proposes_own_offer_gets_no_votes(seed):
    network = Network(seed, 4, pace=4.0)
    network.trainers[PEERS[seed]].log.__class__ = LonelyLog
    observer = network.honest[seed - 1].log
    spans = measure_spans(network, observer, range(1, 31))
    assert {len(entry.commit.offers) for entry in observer.list_entries(0)} == {4}
    assert statistics.median(spans) <= 6 and sum(span > TIMEOUT + 7 for span in spans) <= 1


class OmittingLog(Log):
    """A liar: as a leader, it omits as many offers of the others as the rules allow, first of those that lead."""

    gang = ()

    def make_list(self) -> Commit | None:
        if not (commit := super().make_list()):
            return None
        others = sorted(
            (it for it in commit.offers if it.peer not in self.gang), key=lambda it: it.peer in self.state.active
        )
        for offer in reversed(others):
            smaller = replace(commit, offers=tuple(it for it in commit.offers if it != offer))
            commit = smaller if self.is_fair(smaller) else commit
        return commit


@pytest.mark.parametrize(
    ("num_peers", "liars", "share"), [(4, 1, 0.30), (5, 2, 0.51), pytest.param(7, 2, 0.35, marks=pytest.mark.slow)]
)
def test_leaders_that_omit_offers_gain_little(num_peers, liars, share):
    """The liars' share of all offers; where all count, it is 0.25, 0.4 and 0.29."""
    network = Network(0, num_peers, pace=4.0)
    for peer in PEERS[:liars]:
        network.trainers[peer].log.__class__, network.trainers[peer].log.gang = OmittingLog, PEERS[:liars]
    log = network.honest[-1].log
    run_until(network, lambda: log.state.epoch >= 30, 300)
    offers = [it for entry in log.list_entries(0) for it in entry.commit.offers]
    honest = sum(it.peer not in PEERS[:liars] for it in offers)
    assert 1 - honest / len(offers) < share and honest > 0.8 * log.state.epoch * (num_peers - liars)


@pytest.mark.parametrize(
    ("num_voters", "liars", "is_half"), [(3, 1, 1), (4, 1, 0), (5, 2, 1), (6, 2, 1), (7, 2, 0), (9, 3, 1), (10, 3, 0)]
)
def test_third_of_voters_may_be_half_of_list(num_voters, liars, is_half):
    """This is a known limit: half of a list can cancel the other half, see docs/security.md."""
    log = make_log(num_voters)
    log.__class__, log.gang = OmittingLog, PEERS[:liars]
    log.receive(1e6, PEERS[1], encode(*(make_offer(peer, log.state.head) for peer in PEERS[:num_voters])))
    owners = {offer.peer for offer in log.make_list().offers}
    assert owners >= {*PEERS[:liars]} and (2 * liars >= len(owners)) == is_half


class EvictingLog(Log):
    """A liar: as a leader, it omits as many voters as the rules allow, first those with the fewest offers. It writes a
    number into its own offer with which it leads the next commit too, if there is one."""

    def make_list(self) -> Commit | None:
        if not (commit := super().make_list()):
            return None
        counts = Counter(peer for peers in self.state.owners for peer in peers)
        for peer in sorted({*self.state.voters} - {self.me}, key=lambda peer: (counts[peer], peer)):
            smaller = replace(commit, offers=tuple(it for it in commit.offers if it.peer != peer))
            commit = smaller if self.is_fair(smaller) else commit
        (own,) = [it for it in commit.offers if (it.peer, it.base) == (self.me, self.state.head)] or [commit.offers[0]]
        for number in range(20 if own.peer == self.me else 0):
            changed = self.sign(Offer, *log_records.list_fields(own)[:-2], float(number))
            spelled = replace(commit, offers=tuple(changed if it == own else it for it in commit.offers))
            if self.state.advance(spelled).find_leader(0) == self.me:
                return spelled
        return commit


@pytest.mark.parametrize("num_peers", [4, 5, pytest.param(7, marks=pytest.mark.slow)])
def test_leader_that_omits_voters_cannot_end_their_votes(num_peers):
    """All peers offer at about the same time, because one that is often late may lose its vote."""
    network = Network(1, num_peers, pace=1.5)
    network.trainers[PEERS[0]].log.__class__ = EvictingLog
    log = network.honest[-1].log
    for epoch in range(1, 31):
        run_until(network, lambda: log.state.epoch >= epoch)  # noqa: B023
        assert len(log.state.voters) == num_peers, epoch


def test_list_must_have_late_offer_that_was_here_in_time():
    """That is before the first offer of this height. A leader may lack an update that came later."""
    state = make_state(5)
    offers = [make_offer(peer, state.head, blob=peer.ljust(32)) for peer in PEERS[:5]]
    commit = Commit(state.head, 1, (offers[0], *offers[2:]), (), ())
    votes = tuple(make_vote(0, 0, commit.hash, peer, state.head) for peer in PEERS[1:5])
    current = [make_offer(peer, commit.hash) for peer in (PEERS[0], *PEERS[2:5])]
    lists = [Commit(commit.hash, 2, tuple(it), (), ()) for it in (current, [offers[1], *current])]
    for is_here in (True, False):
        log = make_log(state=state)
        log.holds = {bytes(32), *(it.blob for it in offers if is_here or it.peer != PEERS[1])}.__contains__
        log.receive(1e6, PEERS[2], encode(*offers, replace(commit, votes=votes), current[1]))
        log.holds = lambda blob: True
        log.receive(1e6, PEERS[2], encode(*current))
        assert log.state.head == commit.hash and [log.is_fair(it) for it in lists] == [not is_here, True]


def test_long_list_must_have_owner_of_late_offer():
    """Of nine or more offers, a newer one of this owner is enough: a leader may have no room for both."""
    state = make_state(12)
    offers = [make_offer(peer, state.head, blob=peer.ljust(32)) for peer in PEERS[:12]]
    log = make_log(state=state)
    log.receive(1e6, PEERS[2], encode(*offers))
    commit = Commit(state.head, 1, (offers[0], *offers[2:]), (), ())
    votes = tuple(make_vote(0, 0, commit.hash, peer, state.head) for peer in PEERS[2:10])
    log.receive(1e6, PEERS[2], encode(replace(commit, votes=votes)))
    current = [make_offer(peer, commit.hash) for peer in PEERS[:12]]
    for offer in current:
        log.receive(1e6, PEERS[2], encode(offer))
    assert log.state.head == commit.hash and log.owed == {offers[1].key}
    lists = current, [current[0], *current[2:]], [offers[1], current[0], *current[2:]]
    assert [log.is_fair(Commit(commit.hash, 2, tuple(it), (), ())) for it in lists] == [True, False, True]


def test_commits_of_many_voters_have_newest_offers():
    """Otherwise, the more offers have no place, the more are late for the next commit, until all are."""
    state, late = make_state(20), []
    for _ in range(10):
        log = make_log(state=state)
        offers = [*late, *(make_offer(peer, state.head) for peer in PEERS[:20])]
        chosen = log.choose(filter(state.fits, offers))
        assert {offer.base for offer in chosen} == {state.head}
        late = [offer for offer in offers if offer not in chosen]
        state = state.advance(Commit(state.head, state.epoch + 1, tuple(chosen), (), ()))
    assert state.voters == tuple(PEERS[:20])


def test_list_does_not_choose_next_leaders():
    """Otherwise, a leader would choose among several lists the one after which it leads again."""
    states = [advance(make_state(8), PEERS[: 8 - omitted]) for omitted in range(3)]
    assert len({tuple(state.find_leader(attempt) for attempt in range(30)) for state in states}) == 1


class ForkingLog(Log):
    """A liar that may have the key of another one. As the first leader, it sends a list with the liars' votes to one
    half of the honest peers, and another list with their votes to the rest."""

    acts, gang = 0, ()

    def lead(self) -> None:
        whole = self.make_list() if self.ready_time <= self.now and not self.memory.choice else None
        if not whole or self.memory.promised or self.state.find_leader(0) != self.me or self.me in self.state.banned:
            return super().lead()
        honest = [peer for peer in self.state.voters if peer not in self.gang]
        half, rest = honest[: len(honest) // 2], honest[len(honest) // 2 :]
        part = replace(whole, offers=tuple(it for it in whole.offers if it.peer != rest[-1]))
        for commit, peers in ((whole, half), (part, rest)):
            votes = {peer: make_vote(0, 0, commit.hash, peer, self.state.head) for peer in self.gang}
            proposal = Proposal(commit, votes[self.me], ())
            self.actions.append(Action("send", encode(proposal, *votes.values()), tuple(peers)))
            self.remember(replace(self.memory, choice=(proposal,)))
        self.acts += 1
        return None


MORE_FORKS = [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, (0, 2)), (3, (0, 2)), (3, (0,)))]


@pytest.mark.parametrize(("seed", "gang"), [(0, (0, 2)), (1, (0, 2)), (1, (0,)), *MORE_FORKS])
def test_fork_by_liars_of_five_ends_their_votes(seed, gang):
    """A single liar can fork a log of five as well, with two honest voters for each list."""
    network, gang = Network(seed, 5, pace=8.0), [PEERS[index] for index in gang]
    run_until(
        network, lambda: all(it.log.state.epoch for it in network.trainers.values())
    )  # the first needs two thirds
    network.is_safe, liars = False, [network.trainers[peer].log for peer in gang]
    for log in liars:
        log.__class__, log.gang = ForkingLog, gang
    honest = [trainer.log for trainer in network.honest if trainer.peer not in gang]

    def has_forked() -> bool:
        heads = {(entry.state.epoch, head) for log in honest for head, entry in log.chain.items()}
        return len(heads) > len(dict(heads))

    run_until(network, has_forked)
    epoch, acts = max(log.state.epoch for log in honest), sum(log.acts for log in liars)
    run_until(network, lambda: all({*gang} <= {*log.state.banned} for log in honest))
    assert max(log.state.epoch for log in honest) <= epoch + 2 and sum(log.acts for log in liars) <= acts + 2
    run_until(network, lambda: all(log.state.epoch >= epoch + 10 for log in honest), 30 * 10)
    assert len({log.list_path().keys() >= {honest[0].state.parent} for log in honest}) == 1 and network.forks <= 6


class SplittingLog(Log):
    """A liar: as the first leader, it proposes as many lists as there are other voters, two of them to each, and is
    silent from then on."""

    acts = 0

    def promise(self) -> None:
        if not self.acts:
            super().promise()

    def lead(self) -> None:
        whole = self.make_list() if self.ready_time <= self.now and not self.memory.choice else None
        if not whole or self.memory.promised or self.state.find_leader(0) != self.me or len(whole.offers) < 4:
            return
        lists = [whole, *(replace(whole, offers=tuple(it for it in whole.offers if it != out)) for out in whole.offers)]
        proposals = [Proposal(it, make_vote(0, 0, it.hash, self.me, self.state.head), ()) for it in lists[:3]]
        for index, peer in enumerate(peer for peer in self.state.voters if peer != self.me):
            self.actions.append(Action("send", encode(proposals[index], proposals[(index + 1) % 3]), (peer,)))
        self.remember(replace(self.memory, choice=tuple(proposals[:1])))
        self.acts += 1


def test_leader_with_list_for_each_voter_delays_one_commit():
    """No list has a quorum, and no voter would keep all three, but for the promises that name them."""
    network = Network(0, 4, pace=4.0)
    liar, honest = network.trainers[PEERS[0]].log, [network.trainers[peer].log for peer in PEERS[1:4]]
    liar.__class__ = SplittingLog
    run_until(network, lambda: liar.acts)
    epoch = max(log.state.epoch for log in honest)
    run_until(network, lambda: all(log.state.epoch >= epoch + 2 for log in honest))
    assert all(PEERS[0] in log.state.banned for log in honest)


def test_leader_with_quorum_of_denials_proposes_all_offers():
    """No quorum can have voted for a list that most voters deny, so the vote of a liar must not bring it back."""
    slot, state = int(1e6 // SLOT) + 1, make_state(4)
    first, me = state.find_leader(0), state.find_leader(slot)
    log = make_log(state=state, index=PEERS.index(me))
    offers = sorted((make_offer(peer, state.head) for peer in PEERS[:4]), key=lambda offer: offer.key)
    log.add_offer(1e6, next(offer for offer in offers if offer.peer == me))
    log.receive(1e6, PEERS[5], encode(*offers))
    log.tick(1e6 + TIMEOUT)
    commit = Commit(state.head, 1, tuple(offer for offer in offers if offer.peer != me), (), ())
    proposal = Proposal(commit, make_vote(0, 0, commit.hash, first, state.head), ())
    denials = [make_vote(slot - 1, -1, b"", peer, state.head) for peer in PEERS[:4] if peer not in (first, me)]
    claim = make_vote(slot - 1, 0, commit.hash, first, state.head)
    (sent,) = list_sent(log.receive(log.now, first, encode(proposal, claim, *denials)), Proposal)
    assert sent.attempt == slot and sent.commit.offers == tuple(offers) and state.allows(sent, ())


def test_many_lists_of_liar_replace_no_other():
    """Its votes name each of its lists. Without the list of its vote, this peer accepts none of a later attempt."""
    state = make_state(5)
    leader = state.find_leader(0)
    log = make_log(state=state, index=next(index for index in range(5) if PEERS[index] != leader))
    whole = make_commit(state, PEERS[:5])
    for number in range(71):
        lie = Proof(make_vote(number, -1, b"", leader), make_vote(number, number, bytes(32), leader))
        commit = replace(whole, proofs=(lie,) if number else ())
        vote = make_vote(0, 0, commit.hash, leader, state.head)
        log.receive(1e6, leader, encode(vote, Proposal(commit, vote, ())))
    assert log.memory.choice[0].commit == whole
    assert (0, whole.hash) in log.list_proposals() and len(log.list_proposals()) == 2


def test_promise_cannot_invent_proposal():
    """A liar led attempt 0 in silence, and says that it voted for another list than its victims since then. Otherwise,
    it could choose one list in secret and let all apply another one, without a proof."""
    slot, state = int(1e6 // SLOT), make_state(4)
    leader, before = state.find_leader(slot), state.find_leader(slot - 2)
    log = make_log(state=state, index=next(i for i in range(4) if PEERS[i] not in (leader, before)))
    chosen, other = make_commit(state, PEERS[:3]), make_commit(state, PEERS[:4])
    first = [make_vote(slot - 3, -1, b"", peer, state.head) for peer in PEERS[:3]]
    earlier = Proposal(chosen, make_vote(slot - 2, slot - 2, chosen.hash, before, state.head), tuple(first))
    claims = {slot - 2: chosen, slot - 1: other}
    proposals = {}
    for last, commit in claims.items():
        promises = [make_vote(slot - 1, -1, b"", peer, state.head) for peer in PEERS[:4] if peer != PEERS[0]][:2]
        promises.append(make_vote(slot - 1, last, commit.hash, PEERS[0], state.head))
        vote = make_vote(slot, slot, commit.hash, leader, state.head)
        proposals[last] = Proposal(commit, vote, tuple(promises))
    log.receive(1e6, PEERS[0], encode(*proposals.values()))
    assert not log.select(Proposal)
    log.receive(1e6, PEERS[0], encode(*proposals.values(), earlier))  # its attempt decides the order
    assert log.select(Proposal) == [earlier, proposals[slot - 2]]


def test_blobs_come_from_voters_after_first_attempt():
    """An owner may send its update to the first leader only, which lists it."""
    log = make_log(index=1)
    log.holds, offer = {bytes(32)}.__contains__, make_offer(PEERS[10], log.state.head, b"n" * 32)
    commit = make_commit(log.state, PEERS[:3])
    commit = replace(commit, offers=tuple(sorted((*commit.offers, offer), key=lambda it: it.key)))
    leader = log.state.find_leader(0)
    proposal = Proposal(commit, make_vote(0, 0, commit.hash, leader, log.state.head), ())
    [fetch] = [it for it in log.receive(1e6, leader, encode(proposal)) if it.kind == "fetch"]
    assert fetch == Action("fetch", offer)
    log.ready_time = log.now
    actions = log.tick(1e6 + TIMEOUT)
    assert [it for it in actions if it.kind == "fetch"] == [Action("fetch", offer, (leader,))]
    assert not [it for it in log.tick(log.now + 1) if it.kind == "fetch"]


def test_auxiliary_peer_fetches_late_updates():
    """It has no model that lacks them, but other peers may."""
    log, holds = make_log(), set()
    log.model, log.holds = bytes(32), holds.__contains__
    commit = make_commit(log.state, PEERS[:3])
    votes = tuple(make_vote(0, 0, commit.hash, peer, log.state.head) for peer in PEERS[:3])
    actions = log.receive(1e6, PEERS[1], encode(replace(commit, votes=votes)))
    assert log.state.epoch == 1 and [it.content.blob for it in actions if it.kind == "fetch"] == [bytes(32)]


def test_false_names_do_not_stay_in_memory():
    """Each second, a voter signs something new, so that the log always has news, and a stranger names new peers."""
    log = make_log(4)
    for number in range(100):
        names = [b"%d %d" % (number, index) for index in range(8)]
        log.receive(log.now, b"stranger", encode(*(make_offer(peer, log.state.head) for peer in names)))
        log.receive(log.now, PEERS[1], encode(make_vote(number, -1, b"", parent=log.state.head)))
        log.tick(log.now + 1.0)
    assert len(log.missing_keys) <= 8 * 5


def test_many_statuses_cost_little():
    """Each costs the time of many bytes: a message of 100 is ignored, and so are more than 32 in five seconds."""
    log, status = make_log(4), encode(Status((bytes(32),), (), (), False))
    unknown = Status((bytes([1]) * 32, log.state.head), (), (), False)
    assert not log.receive(1e6, b"stranger", encode(*100 * [unknown]))
    log.tick(1e6 + 6)
    assert log.receive(log.now, PEERS[1], encode(unknown))
    answers = [log.receive(log.now, b"stranger", encode(unknown)) for _ in range(100)]
    assert 20 <= sum(map(bool, answers)) <= 32 and not log.receive(log.now, b"stranger", status)


def test_short_questions_of_voter_have_few_answers():
    """Messages do not wait for updates: on 2 Mbit/s, one voter's questions left a tenth of the uplink for these."""
    log = make_log(20)
    for peer in PEERS[:20]:
        log.take_offer(make_offer(peer, log.state.head))
    question = encode(Status((log.state.head,), (), (), True))

    def count_bytes(peer: bytes, calls: int) -> int:
        actions = [it for _ in range(calls) for it in log.receive(log.now, peer, question)]
        return sum(len(it.content) for it in actions if it.peers == (peer,))

    first = count_bytes(PEERS[1], 1)
    assert 4 * MAX_GIVEN / 5 < first + count_bytes(PEERS[1], 100) <= MAX_GIVEN
    assert count_bytes(PEERS[2], 1) == first
    log.tick(log.now + 6)
    assert count_bytes(PEERS[1], 1) >= first


def test_strangers_leave_room_for_other_peers():
    """One floods the log with small messages, and another one sends offers in the names of 64 peers whose ids come
    first. Each answer asks its receiver for its key first."""
    log, flood = make_log(4), encode(*20 * [log_records.Key(b"nobody", b"key")])
    log.identity.known = {log.me}
    for _ in range(100):
        log.receive(1e6, b"stranger", flood)
    names = [bytes([0, number]) for number in range(64)]
    log.receive(1e6, b"another", encode(*(make_offer(peer, log.state.head) for peer in names)))
    assert log.missing_keys == {*names}
    for peer in (PEERS[1], b"new"):
        for more in ((), (Status((bytes(32),), (), (), False),)):
            actions = log.receive(1e6, peer, encode(make_offer(peer, log.state.head), *more))
            assert peer in list_sent(actions, Status)[0].missing_keys


@pytest.mark.parametrize("count", [5, 100])
def test_strangers_leave_room_for_new_peer(count):
    """A status costs more than its bytes, and five keys could use up all that new peers have together."""
    log, flood = make_log(4), encode(*31 * [Status((bytes([1]) * 32,), (), (), False)])
    log.identity.known = {log.me, *PEERS}
    for number in 4 * [*range(count)]:
        log.receive(1e6, b"%d" % number, flood)
    assert log.traffic[b""] < 4 * MAX_TRAFFIC
    log.receive(1e6, b"new", encode(make_offer(b"new", log.state.head)))
    assert b"new" in log.missing_keys


def test_log_of_many_members_has_bounded_state():
    """Its state could otherwise not be read, and no other member could begin it."""
    members = tuple(bytes([number]) for number in range(70))
    state = make_genesis("run", 3, bytes(32), members)
    assert len(state.voters) == log_records.MAX_VOTERS and unpack(State, pack(state)) == state
    assert make_genesis("run", 3, bytes(32), members[::-1]) == state  # an auxiliary peer knows only the voters


MORE_FAULTS = [pytest.param(seed, (), marks=pytest.mark.slow) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("seed", "options"), [(0, ()), (1, ("has_liar",)), (1, ("withholds",)), (1, ("forgets",)), *MORE_FAULTS]
)
def test_log_with_faults_stays_one(seed, options):
    run_schedule(seed, **dict.fromkeys(options, True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_log_with_many_faults_stays_one(seed):
    run_all_schedules(seed)


def test_log_without_faults_counts_all():
    network = Network(0, 5, clients=[3, 4], pace=4.0)
    network.run(100)
    network.check_samples()
    commits = [entry.commit for entry in network.honest[0].log.list_entries(0)]
    assert len(commits) >= 8 and all(len(commit.offers) == 5 for commit in commits)


@pytest.mark.parametrize(
    ("first", "second", "is_lie"),
    [
        ((3, 3, b"a"), (3, 3, b"b"), True),  # two votes in one attempt
        ((3, 3, b"a"), (4, 3, b"a"), False),  # the same vote in a promise
        ((3, 3, b"a"), (4, -1, b""), True),  # a promise that hides a vote
        ((4, -1, b""), (3, 3, b"a"), True),
        ((4, -1, b""), (5, 5, b"a"), False),  # a later vote
        ((4, -1, b""), (6, 3, b"a"), True),  # a vote after the promise not to
        ((3, 3, b"a"), (7, 6, b"b"), False),
    ],
)
def test_proof_needs_contradiction(first, second, is_lie):
    assert Proof(make_vote(*first), make_vote(*second)).is_valid() == is_lie
    other = make_vote(*second, parent=bytes([1]) * 32), make_vote(*second, peer=PEERS[2])
    assert not any(Proof(make_vote(*first), it).is_valid() for it in other)


def test_proof_in_commit_ends_vote():
    state = make_state()
    proof = Proof(make_vote(3, 3, b"a"), make_vote(3, 3, b"b"))
    after = advance(advance(state, PEERS[:4], proofs=[proof]), PEERS[:4], times=9)
    assert after.voters == (PEERS[0], PEERS[2], PEERS[3]) and after.banned == (PEERS[1],)
    assert after.accepts(make_commit(after, PEERS[:3]), lambda record: True)
    assert not after.accepts(make_commit(after, PEERS[:3], proofs=[proof]), lambda record: True)


def test_voter_follows_from_counted_offers():
    state = advance(make_state(), PEERS[:5], times=7)
    assert PEERS[4] not in state.voters
    state = advance(state, PEERS[:5])
    assert PEERS[4] in state.voters
    state = advance(state, PEERS[:3], times=4)
    assert state.voters == tuple(PEERS[:5])
    assert advance(state, PEERS[:3]).voters == tuple(PEERS[:3])


@pytest.mark.parametrize(
    ("num_members", "num_peers", "counts"), [(8, 16, {8: 10, 16: 12}), (1, 9, {3: 1, 4: 2, 8: 3, 12: 4, 24: 6})]
)
def test_new_voters_are_quarter(num_members, num_peers, counts):
    """A log of one peer gains voters too: then the end of its first peer is not the end of the log."""
    for times, count in counts.items():
        assert sorted(advance(make_state(num_members), PEERS[:num_peers], times).voters) == PEERS[:count]


def test_last_voters_stay():
    state = make_state(3)
    for index in range(12):
        state = advance(state, [PEERS[index % 3]])
    assert state.voters


def test_leave_reduces_voters_at_once():
    network = Network(0, 4)
    leaving = network.trainers[PEERS[2]]
    leaving.run(leaving.log.leave(network.now))
    run_until(network, lambda: leaving.log.state.epoch == 1)
    assert leaving.log.state.voters == (PEERS[0], PEERS[1], PEERS[3])
    assert advance(leaving.log.state, PEERS[:2]).voters == (PEERS[0], PEERS[1], PEERS[3])


def test_restarted_peer_keeps_its_vote():
    """Ctrl-C and the same command within an epoch cost the vote, because the leave record was still listed."""
    log = make_log(4)
    leave = sign(log_records.Leave(log.state.head, PEERS[1], b""))
    log.take_notice(leave)
    for peer in (PEERS[0], PEERS[2], PEERS[3]):
        log.take_offer(make_offer(peer, log.state.head))
    assert log.make_list().leaves == (leave,)
    log.take_offer(make_offer(PEERS[1], log.state.head))
    commit = log.make_list()
    assert not commit.leaves and len(log.state.advance(commit).voters) == 4
    log.add_commit(commit)
    assert not log.select_leaves()  # nor before the next offer
    log.take_offer(make_offer(PEERS[1], log.state.head))
    log.take_notice(leave)  # any peer may have kept it
    assert leave in log.select(Leave) and not log.select_leaves()
    left = sign(log_records.Leave(log.state.head, PEERS[2], b""))
    log.take_offer(make_offer(PEERS[2], log.state.head))
    log.take_notice(left)
    assert log.select_leaves() == [left]


def test_second_offer_of_one_base_is_ignored():
    log = make_log(1)
    for blob in (b"a" * 32, b"b" * 32):
        log.receive(1e6, PEERS[1], encode(make_offer(PEERS[1], log.state.head, blob)))
    log.add_offer(1e6, make_offer(log.me, log.state.head, b"d" * 32))
    log.tick(1e6 + 60)
    (entry,) = log.list_entries(0)
    assert [offer.blob for offer in entry.commit.offers] == [b"d" * 32, b"a" * 32]
    late = make_offer(PEERS[1], entry.commit.parent, b"b" * 32)
    log.receive(1e6 + 60, PEERS[1], encode(late))
    assert not log.select(Offer)


def test_list_waits_for_voters_of_last_commits():
    """A late offer of one does not end the wait, or the next one would be late again. New peers do not cause a wait."""
    state = advance(make_state(3), PEERS[:4], times=2)
    log = make_log(state=state)
    log.add_offer(1e6, make_offer(log.me, state.head, b"d" * 32))
    log.tick(1e6 + TIMEOUT + 1)
    log.receive(log.now, PEERS[1], encode(make_offer(PEERS[1], state.head), make_offer(PEERS[2], state.parent)))
    log.tick(log.now + TIMEOUT - 1)
    assert log.ready_time > log.now
    log.receive(log.now, PEERS[1], encode(make_offer(PEERS[2], state.head)))
    assert log.ready_time == log.now == 1e6 + 2 * TIMEOUT


def test_silence_counts_from_offers_of_half_on():
    """Otherwise, one hostile voter with an early offer would end each log before the first epoch is over."""
    log = make_log(5)
    for peer, tick in zip(PEERS[:4], (math.inf, math.inf, 3, 3), strict=True):
        log.tick(log.now + 0.5)
        log.receive(log.now, peer, encode(make_offer(peer, log.state.head)))
        assert log.half_tick == tick


def test_list_does_not_wait_for_offers_without_a_place():
    log = make_log(20)
    offers = [make_offer(peer, log.state.head, blob=peer.ljust(32)) for peer in PEERS[1:20]]
    blobs = {offer.blob for offer in log.choose(offers)}
    log.holds = blobs.__contains__
    log.receive(1e6, PEERS[1], encode(*offers))
    assert log.ready_time > log.now
    log.holds = {*blobs, bytes(32)}.__contains__
    log.receive(1e6, PEERS[1], encode(make_offer(PEERS[0], log.state.head)))
    assert len(blobs) == 16 and log.ready_time == log.now


def test_list_waits_no_longer_than_share_of_epoch():
    """For the last voters; but forever for most voters, because of a short list, each offer has a large weight."""
    state = make_state(3)
    for peers, has_most in ((PEERS[:2], True), ((PEERS[0], PEERS[3]), False)):
        log = make_log(state=state)
        log.spans.append(80.0)
        for peer in peers:
            log.receive(1e6, peer, encode(make_offer(peer, state.head)))
        log.tick(1e6 + TIMEOUT + 10 - 0.1)
        assert log.ready_time > log.now
        log.tick(1e6 + TIMEOUT + 10)
        assert log.ready_time == log.now if has_most else log.ready_time > log.now
        log.tick(1e6 + 1000 * TIMEOUT)
        assert math.isfinite(log.ready_time) is has_most and bool(log.make_list()) is has_most


def test_list_of_few_voters_or_of_two_offers_of_one_is_refused():
    """Weights follow from the list alone: such a list would let one or two peers of seven change the model at will."""
    state = advance(make_state(7), PEERS[:7])
    whole = make_commit(state, PEERS[:7])
    assert state.accepts(whole, lambda record: True)
    assert state.accepts(make_commit(state, PEERS[:4]), lambda record: True)
    assert not state.accepts(make_commit(state, [*PEERS[:3], *PEERS[8:12]]), lambda record: True)
    before = replace(state, counted=(), owners=state.owners)
    late = make_offer(PEERS[0], before.parent, b"l" * 32)
    both = replace(whole, offers=tuple(sorted((*whole.offers, late), key=lambda it: it.key)))
    assert before.fits(late) and not before.accepts(both, lambda record: True)
    log = make_log(state=before)
    for offer in both.offers:
        log.receive(1e6, offer.peer, encode(offer))
    listed = log.make_list().offers
    assert {it.peer for it in listed} == {*PEERS[:7]} and late not in listed and len(listed) == 7


def test_first_commit_takes_two_thirds():
    """One peer of seven that votes with both halves of the others would split the swarm for good."""
    state = make_state(7)
    votes = [make_vote(0, 0, bytes(32), peer, state.head) for peer in PEERS[:7]]
    assert not state.has_quorum(votes[:4]) and state.has_quorum(votes[:5])
    after = advance(state, PEERS[:7])
    assert after.has_quorum(votes[:4]) and not after.has_quorum(votes[:3])


def test_late_offer_counts_once_or_returns():
    log = make_log(1)
    genesis, commits = log.state.head, []
    for index in range(3):
        log.receive(1e6, PEERS[1], encode(make_offer(PEERS[1], genesis)))
        log.add_offer(1e6, make_offer(log.me, log.state.head, bytes([index]) * 32))
        log.tick(log.now + 60)
        commits.append(log.find_next())
        log.model = log.state.head
    assert [[offer.peer for offer in commit.offers] for commit in commits] == [PEERS[:2], PEERS[:1], PEERS[:1]]
    for base, blob in ((genesis, b"z" * 32), (log.state.head, b"y" * 32)):
        log.add_offer(log.now, make_offer(log.me, base, blob))
        log.tick(log.now + 60)
    assert [offer.blob for offer in log.returned] == [b"z" * 32]


def test_late_offer_alone_makes_no_commit():
    """An epoch may take much longer than the timeouts."""
    state = advance(make_state(1), PEERS[:1])
    log = make_log(state=state)
    log.receive(1e6, PEERS[1], encode(make_offer(PEERS[1], state.parent)))
    log.tick(1e6 + 16 * TIMEOUT + 60)
    assert log.state == state
    log.add_offer(log.now, make_offer(log.me, state.head, b"d" * 32))
    log.tick(log.now + TIMEOUT)
    assert log.state.epoch == state.epoch + 1 and log.state.owners[-1] == tuple(PEERS[:2])


def test_turns_reserve_room_for_voters():
    log = make_log(20)
    log.receive(1e6, PEERS[1], encode(*(make_offer(peer, log.state.head) for peer in PEERS[:36])))
    chosen = {offer.peer for offer in log.choose(log.select(Offer))}
    assert len(chosen) == 16 and len(chosen & set(PEERS[:20])) == 12
    log.add_commit(make_commit(log.state, chosen))
    again = {offer.peer for offer in log.choose(make_offer(peer, log.state.head) for peer in PEERS[:40])}
    assert set(PEERS[:20]) - chosen <= again and len(again & chosen & set(PEERS[20:])) == 0


def test_votes_of_many_peers_stay():
    """Each of 36 peers is in fewer than four of eight commits: twelve voters remained, and most updates were lost."""
    log = make_log(36)
    counted = set()
    for _ in range(20):
        for peer in PEERS[:36]:
            log.take_offer(make_offer(peer, log.state.head))
        commit = log.make_list()
        counted |= {offer.peer for offer in commit.offers}
        log.add_commit(commit)
    assert len(log.state.voters) == len(counted) == 36


@pytest.mark.parametrize("withholds", [False, True])
def test_new_peer_next_to_new_keys_becomes_voter(withholds):
    """Forty new keys offer first, others in each epoch, or sixteen whose updates no peer gets in all epochs."""
    log, epoch = make_log(4), 0
    log.identity.known, log.holds = {*PEERS, b"new"}, lambda blob: blob == bytes(32)
    while b"new" not in log.state.voters:
        epoch += 1
        names = [b"%d %d" % (number, 0 if withholds else epoch) for number in range(16 if withholds else 40)]
        log.identity.known |= {*names}
        for peer in (*names, *PEERS[:4], b"new"):
            blob = bytes(31) + b"x" if withholds and peer in names else bytes(32)
            log.take_offer(make_offer(peer, log.state.head, blob))
        assert len(log.select(Offer)) <= 4 + 2 * MAX_POOL and epoch < 20
        log.add_commit(log.make_list())


def test_next_leader_replaces_crashed_one():
    network = Network(1, 3)
    leader = network.honest[0].log.state.find_leader(0)
    network.trainers[leader].crash()
    network.honest.remove(network.trainers[leader])
    run_until(network, lambda: all(trainer.log.state.epoch == 1 for trainer in network.honest))
    votes = network.honest[0].log.list_entries(0)[0].commit.votes
    assert votes[0].attempt >= 1e6 // SLOT


def test_restarted_voters_choose_same_list():
    """All votes are lost but for one voter, which then starts again from its disk."""
    network = Network(2, 3)
    leader = network.honest[0].log.state.find_leader(0)
    run_until(network, lambda: network.trainers[leader].memory)
    (memory,) = unpack(Annotated[tuple, 1, 1, log_records.Memory], network.trainers[leader].memory)
    for trainer in network.honest:
        if not trainer.log.state.epoch:
            trainer.crash()
    network.queue.clear()
    network.heal()
    run_until(network, lambda: network.trainers[leader].log.state.epoch)
    assert memory.choice[0].commit.hash in network.trainers[leader].log.chain


def test_restarted_voter_waits_for_its_last_epoch():
    """Its checkpoint is older than its last vote, so it has forgotten its votes in between."""
    log, memory = make_log(1), log_records.Memory(bytes(32), 3)
    old = Log(log.state, log.identity, TIMEOUT, log.holds, 1e6, pack((memory,)))
    for it in (log, old):
        it.add_offer(1e6, make_offer(it.me, it.state.head, b"a" * 32))
        it.tick(1e6 + 60)
    assert log.state.epoch == 1 and old.state.epoch == 0


def test_memory_of_another_version_counts_as_lost():
    log = make_log(1)
    other = Log(log.state, log.identity, TIMEOUT, log.holds, 1e6, pack(("another", "version")))
    assert other.voting_epoch == math.inf and not other.memories


def test_voter_without_memory_waits_for_own_offer():
    """All commits after one that has an offer of this process are new to it."""
    network = Network(8, 3)
    run_until(network, lambda: network.honest[2].log.state.epoch == 3)
    network.trainers[PEERS[2]].crash()
    network.trainers[PEERS[2]].memory = None
    network.heal()
    log = network.trainers[PEERS[2]].log

    def list_commits() -> list[tuple[bool, bool]]:
        """Return whether each commit has a vote and an offer of the restarted peer."""
        commits = [entry.commit for entry in log.list_entries(3)]
        return [tuple(PEERS[2] in {it.peer for it in part} for part in (it.votes, it.offers)) for it in commits]

    run_until(network, lambda: any(vote for vote, _ in list_commits()))
    votes, offers = zip(*list_commits(), strict=True)
    assert offers.index(True) < votes.index(True)


def test_rank_orders_branches_by_content():
    state = make_state(5)

    def make_branch(owners) -> list[Entry]:
        first = make_commit(state, owners)
        after = state.advance(first)
        second = make_commit(after, owners)
        return [Entry(first, after), Entry(second, after.advance(second))]

    small, large = make_branch(PEERS[:2]), make_branch(PEERS[1:4])
    assert rank(large, state) < rank(small, state)
    assert rank(large + make_branch(PEERS[5:30]), state) == rank(large, state)  # owners that are not voters


def test_late_peer_catches_up_and_asks_for_keys():
    network = Network(5, 4, members=3)
    late = network.trainers[PEERS[3]]
    late.crash()
    network.honest.remove(late)
    network.run(400)
    late.restart()
    late.log.identity.known = {PEERS[3]}
    network.run(20)
    assert late.state == late.log.state.head and late.log.state.epoch >= network.honest[0].log.state.epoch - 1 > 10
    # it would otherwise take the time of the next epoch for that of many
    assert all(span > 1.0 for span in late.log.spans)


def list_messages() -> list[bytes]:
    """Valid messages of every kind."""
    network = Network(6, 3)
    messages, post = [], network.post
    network.post = lambda sender, receiver, content: (messages.append(content), post(sender, receiver, content))
    leader = network.honest[0].log.state.find_leader(0)
    network.trainers[leader].crash()
    network.run(100)
    messages = [message for message in messages if isinstance(message, bytes)]
    kinds = {type(it) for message in messages for it in log_records.decode(message)}
    assert kinds >= {*log_records.KINDS} - {Leave, Proof, log_records.KINDS[1]}
    return messages


def test_random_bytes_are_ignored():
    messages = list_messages()

    @settings(max_examples=600, deadline=None)
    @given(
        st.sampled_from(messages) | st.binary(max_size=200),
        st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4)), max_size=4),
    )
    def check(message, changes):
        log = make_log(3)
        for position, values in changes:
            start = int(position * len(message))
            message = message[:start] + values + message[start + len(values) :]
        log.receive(1e6, PEERS[1], message)
        log.tick(1e6 + 1)
        for record in (*log.select(Offer), *log.select(Vote)):
            assert log.is_signed(record)

    check()


def test_claimed_lengths_reserve_no_memory():
    """Five bytes can claim a list of 131,072 items, for which the decoder would reserve a megabyte."""
    claims = b"\xdd\x00\x02\x00\x00" * 1000
    tracemalloc.start()
    with pytest.raises(ValueError):
        log_records.decode(claims + bytes(131_072 - len(claims)))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_worthless_messages_are_settled_once(monkeypatch):
    """All choices and all updates on disk are looked at each time, while the training loop waits."""
    log, counts = make_log(3), []
    settle = log.settle
    monkeypatch.setattr(log, "settle", lambda: counts.append(1) or settle())
    late = encode(Leave(bytes(32), PEERS[1], b"signature"))
    log.receive(1e6, PEERS[1], *[late] * 50)
    assert len(counts) == 1


def test_forged_records_are_ignored():
    log = make_log()
    offer = make_offer(PEERS[1], log.state.head)
    forged = replace(offer, peer=PEERS[2])
    commit = make_commit(log.state, PEERS[:4])
    votes = tuple(make_vote(0, 0, commit.hash, peer, log.state.head) for peer in PEERS[:3])
    for few in (votes[:2], (*votes[:2], votes[1]), (*votes[:2], replace(votes[2], peer=PEERS[3])), ()):
        log.receive(1e6, PEERS[3], encode(replace(commit, votes=few)))
    log.receive(1e6, PEERS[3], encode(forged, replace(offer, samples=9)))
    log.receive(1e6, PEERS[3], encode(sign(Leave(log.state.head, PEERS[30], b""))))
    log.receive(1e6, PEERS[3], encode(Proof(votes[0], votes[0])))
    assert log.state.epoch == 0 and not log.records


def test_flood_stays_small():
    """Offers of new peers, votes, proposals and questions of one voter without an end."""
    log, now = make_log(), 1e6
    keys = FakeIdentity(b"x")
    log.identity.verify = lambda peer, data, signature: True
    log.identity.find_key = keys.sign
    sent = 0
    for index in range(300):
        now += 1
        name = b"%08d" % index
        vote = make_vote(index, index - 1, name * 4, parent=log.state.head)
        commit = make_commit(log.state, [PEERS[1], name])
        records = [make_offer(name, log.state.head), vote, make_offer(PEERS[1], log.state.head, name * 4)]
        records += [Proposal(commit, vote, ()), Status((name * 4,), (name,), (name,), False)]
        actions = [it for _ in range(20) for it in log.receive(now, PEERS[1], encode(*records))]
        sent += sum(len(action.content) for action in actions if action.kind in ("send", "gossip"))
        log.tick(now)
    assert len(log.records) <= MAX_POOL + 20
    assert sent < 300 * 16 * MAX_ANSWER_BYTES and len(pack(tuple(log.records.values()))) < 64_000


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        run_all_schedules(number)
