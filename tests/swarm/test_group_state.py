"""Which state the trainers of a group continue from, and when a peer gives up its own."""

from types import SimpleNamespace

import pytest
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from swarm.averager import StateDivergedError
from swarm.gradients import GradientAverager
from swarm.guard import SKETCH_SIZE
from swarm.log_records import pack
from swarm.matchmaking import RoundState

NODE = AveragingMode.NODE.value


def gather(state: tuple[int, str]) -> bytes:
    epoch, lineage = state
    own = RoundState(epoch, True, lineage, (1.0,) * SKETCH_SIZE, b"owner", signature=bytes(256))
    return MSGPackSerializer.dumps([20.0, NODE, MSGPackSerializer.dumps(pack(own))])


def choose(own: str, states: dict[str, tuple[int, str]], known: dict[str, int]) -> str:
    """Return the peers with which one of them averages, or in capitals, those whose state it loads; or nothing.

    :param states: the epoch and the lineage that the leader shows for each peer of the group
    :param known: the epochs of the other known contributors
    """
    peers = {PeerID(name.encode()): name for name in states}
    contributors = {PeerID(name.encode()): float(epoch) for name, epoch in known.items()}
    averager = SimpleNamespace(mode=AveragingMode.NODE, peer_id=PeerID(own.encode()))
    averager.find_unequal_averages = lambda members: {}
    averager.matchmaking = SimpleNamespace(contributors=contributors)
    group = GroupInfo(b"group", tuple(peers), tuple(gather(state) for state in states.values()))
    try:
        return "".join(peers[peer] for peer in GradientAverager.select_group(averager, group).peer_ids)
    except StateDivergedError as e:
        return "".join(peers[PeerID(peer)] for peer in e.args[1]).upper()
    except AllreduceException:
        return ""


COMMON, FIRST, SECOND, THIRD, LAST = (6, "0"), (7, "1"), (7, "2"), (7, "3"), (7, "z")


@pytest.mark.parametrize(
    "states, known, chosen",
    [
        (dict(a=FIRST, b=COMMON, m=LAST), dict(b=6, c=7, m=7), ""),  # c may have the state of a
        (dict(a=FIRST, b=COMMON, c=(5, "5"), m=LAST), dict(b=6, c=7, m=7), ""),  # the leader shows an earlier one
        (dict(a=FIRST, b=FIRST, c=LAST, m=LAST), dict(b=7, c=7, m=7), "CM"),  # two halves
        (dict(a=FIRST, b=COMMON, c=COMMON, m=COMMON), dict(b=6, c=6, m=6), "BCM"),
        (dict(a=FIRST, b=COMMON, c=COMMON), dict(b=6, c=6, m=6), "BC"),
        (dict(a=COMMON, b=FIRST, c=FIRST), dict(b=7, c=7, m=7), "BC"),  # it has missed a step
        (dict(a=FIRST, b=SECOND), dict(b=7), "B"),
        (dict(a=FIRST, b=SECOND, c=THIRD), dict(b=7, c=7), "C"),
        (dict(a=FIRST, b=SECOND, c=THIRD, d=LAST), dict(b=7, c=7, d=7), "D"),  # each has stepped alone
        (dict(a=FIRST, b=SECOND, c=THIRD), {}, "C"),  # after a start of all peers from checkpoints
        (dict(a=FIRST, b=FIRST, c=FIRST, m=LAST), dict(b=7, c=7, m=7), "abc"),
    ],
)
def test_peer_gives_up_state_for_more_peers_only(states, known, chosen):
    """A reducer kept averages from some peers, so that three had a state each. Its own, with noise, was then loaded."""
    assert choose("a", states, known) == chosen
