"""Averages of gradients have the same bits for all peers. A reducer that sends others is found in the next round."""

import json
from types import SimpleNamespace

import pytest
from hivemind.averaging.allreduce import AveragingMode
from hivemind.p2p import PeerID
from processes import make_prefix, run_python

from swarm.averager import RoundResult
from swarm.gradients import WITNESS_ROUNDS, GradientAverager
from swarm.matchmaking import GatheredData
from swarm.trust import RoundTrust

NAMES = "abcdefgh"
HONEST = ["public", "client", "slow", "aux", "liar", "echo"]


def find_violations(views: dict[str, str], own: str = "a", group: str = "abcd", rounds=(), late="") -> str:
    """Return the peers that break a rule for one of them.

    :param views: for each peer that reports, what it has received from each peer of the group, in its order
    :param rounds: the number of rounds with each peer, by name; 5 for the others
    :param late: the peers that have missed the last round of this peer
    """
    peers = {name: PeerID(name.encode()) for name in NAMES}
    seen = {name: tuple(letter.encode() * 16 for letter in view) for name, view in views.items()}
    averager = SimpleNamespace(peer_id=peers[own], _trust=RoundTrust())
    averager._trust.rounds.update({peers[name]: dict(rounds).get(name, 5) for name in group})
    members = tuple(name.encode() for name in group)
    digests = dict(zip((peers[name] for name in group), seen[own], strict=True))
    averager._last_result = RoundResult(b"group", members, (1, 0), {}, digests)
    groups = {name: b"before" if name in late else b"group" for name in seen}
    states = {name: SimpleNamespace(group=groups[name], digests=it) for name, it in seen.items()}
    gathered = {peers[name]: GatheredData(AveragingMode.NODE, state, 20.0, b"") for name, state in states.items()}
    found = GradientAverager.find_unequal_averages(averager, gathered)
    return "".join(name for name in NAMES if peers[name] in found)


@pytest.mark.parametrize(
    "views, group, banned",
    [
        (dict(a="0123", b="0123", c="0123", d="0123"), "abcd", ""),
        (dict(a="012x", b="012y", c="012z", d="0123"), "abcd", "d"),  # an echo
        (dict(a="012x", b="012y", c="012z"), "abcd", "d"),  # which is not in the next group
        (dict(a="012x", b="0123", c="0123", d="0123"), "abcd", "d"),  # with one victim
        (dict(a="0123", b="012x", c="0123", d="0123"), "abcd", ""),  # or one reports it falsely
        (dict(a="0123", b="0123", c="0123", d="xyzx"), "abcd", ""),
        (dict(a="01", b="x1", c="0"), "ab", ""),
        (dict(a="012", b="01x", c="012"), "abc", ""),  # of two, either may be right
        (dict(a="0123x", b="0123x", c="0123y", d="0123y"), "abcde", ""),  # two halves
        (dict(a="0123x", b="0123y", c="0123y", d="0123y"), "abcde", "e"),
        (dict(a="0123x", b="0123x", c="0123x", d="0123y"), "abcde", ""),
        (dict(a="01234567", **dict.fromkeys("gh", "xxxxxxxx")), "abcdefgh", ""),  # a quarter
        (dict(a="01234567", **dict.fromkeys("fgh", "x1234567")), "abcdefgh", ""),  # of itself, it knows
        (dict(a="01234567", **dict.fromkeys("fgh", "0x234567")), "abcdefgh", ""),
        (dict(a="01234567", **dict.fromkeys("efgh", "0x234567")), "abcdefgh", "b"),
        (dict(a="0123456", **dict.fromkeys("fg", "0xxxx56")), "abcdefg", ""),  # two of seven lie about all others
        (dict(a="0123", **dict.fromkeys("efgh", "xxxx")), "abcd", ""),  # they were not in that round
        (dict(a="0123", b="", c="0"), "abcd", ""),
    ],
)
def test_reports_of_more_than_half_count(views, group, banned):
    assert find_violations(views, group=group) == banned


def test_report_of_another_group_does_not_count():
    views = dict(a="012x", b="012y", c="012z", d="0123")
    assert find_violations(views) == "d" and find_violations(views, late="c") == ""


@pytest.mark.parametrize(
    "of_accused, of_others, banned", [(5, 5, "d"), (5, 2, ""), (5, 3, "d"), (99, 15, ""), (99, 16, "d")]
)
def test_new_keys_accuse_no_old_peer(of_accused, of_others, banned):
    """Two new keys of six members would otherwise turn honest peers against each other."""
    assert WITNESS_ROUNDS == 16
    views = dict(a="012345", b="012x45", c="012x45", d="012345", e="012x45")
    rounds = dict(d=of_accused, b=of_others, c=of_others, e=of_others)
    assert find_violations(views, group="abcdef", rounds=rounds) == banned


def test_new_keys_hide_no_echo():
    """They would otherwise be most of the group."""
    views = dict(a="012xeeee", b="012yeeee", c="012zeeee", **dict.fromkeys("efgh", "012xeeee"))
    assert find_violations(views, group=NAMES, rounds=dict.fromkeys("efgh", 1)) == "d"


@pytest.mark.parametrize("compression, kinds", [("float16", HONEST), ("8bit", ["public", "public", "public", "echo"])])
def test_averages_are_equal_or_their_reducer_is_banned(compression, kinds):
    """The reports of the first two rounds arrive in the second and third ones, and those of the echo in the fourth."""
    words = ["-m", "tests.programs.dense_rounds", make_prefix(), compression, *kinds]
    facts = [json.loads(line) for line in run_python(*words, expect=0).stdout.splitlines()]
    assert [fact["is_equal"] for fact in facts] == [True, True, False, False]
    assert all(set(fact["sizes"]) == {len(kinds) - kinds.count("aux")} and fact["length"] > 1 for fact in facts)
    assert ("slow" in kinds) == (16 in facts[0]["turns"])
    echo = f"echo {kinds.index('echo')}"
    for *early, last in zip(*(fact["violations"].items() for fact in facts), strict=True):
        name, violations = last
        assert early == [(name, [])] * 3
        assert violations == ([] if name.split()[0] in ("aux", "echo") else [echo])
