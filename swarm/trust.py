"""Which peers a trainer believes, waits for and counts.

These are the rules about reports of peers, and about their behavior in rounds; swarm/guard.py checks a round's data.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hivemind.averaging.allreduce import AllreduceException
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from swarm import logger
from swarm.guard import MaliciousPeersError
from swarm.uplink import Uplink
from utils import filter_plausible_records

# The reasons for which a peer does not count until it reports again:
# - SILENT: it answers no request. It still counts toward the quorum for a while.
# - BANNED: it has broken a rule. It does not count before the end of the ban either.
# - LATE: it reports, but misses rounds. No round waits for it before the end of BAN_SECONDS or LATE_EPOCHS, or a round
#   with it that succeeds. It still counts toward the quorum, because a hostile leader may have omitted it.
SILENT = "silent"
BANNED = "banned"
LATE = "late"
BAN_SECONDS = 60.0  # of the first ban, each further one takes four times as long
LATE_EPOCHS = 3  # for which no round waits for a late peer, but BAN_SECONDS at least
FORGIVEN_AFTER = 10  # times the duration of a ban since its end: then the next one is a first ban again
MAX_LEAD = 2  # epochs by which an untrusted peer may be ahead of all that are known to have worked
MAX_RELATIVE_SPEED = 4.0  # of a peer, relative to the median of the known peers
MAX_MISSED_ROUNDS = 3  # in a row that a peer misses although it reports; then it is LATE
UNREACHABLE = f"has not answered {MAX_MISSED_ROUNDS} times (an auxiliary peer helps if both set `client_mode`)"
MAX_BROKEN_ROUNDS = 3  # more than those in time; then others do without the peer that has broken them for a while
# A peer's score is a moving average of how much of this peer's gradient is in its averages, weighted by this peer's
# share of them. A single round proves nothing: an honest gradient can point away from all others.
TRUST_EMA_ALPHA = 0.5
BAN_THRESHOLD = 0.25
SUSPICION_THRESHOLD = 0.4
REVERSED_PART = -0.5  # the share in one peer's part, below which that points away
REVERSED_AVERAGE = -0.3  # the share in the whole average, below which that is not used

Records = Mapping[bytes, LocalTrainingProgress]  # by peer id


@dataclass
class Absence:
    """The state of a peer that does not count, until it reports after a certain time."""

    reason: str  # SILENT, BANNED or LATE
    until: float  # seconds of the DHT's time; later reports end the absence
    is_unreachable: bool = False  # whether it has answered no ping, although others have


class PeerTrust:
    """A peer's record of the others: which have worked, and which do not count for a while."""

    def __init__(self, uplink: Uplink, attested: Iterable[bytes] = (), is_auxiliary: bool = False):
        self.uplink = uplink
        self.is_auxiliary = is_auxiliary
        #: ids of the peers that the initial peers name as contributors, and of those that were in rounds with this one
        self.attested = set(attested)
        self.partners = set()
        #: ids of the voters with updates in the last commits, the only contributors as long as there is a log
        self.active: set[bytes] = set()
        self.absent: dict[bytes, Absence] = {}
        #: the duration and the end of each peer's last ban, and how many rounds each peer has missed in a row
        self.last_bans: dict[bytes, tuple[float, float]] = {}
        self.missed_rounds = Counter()

    # --- records to believe

    def is_known(self, peer_id: bytes) -> bool:
        """Return whether this peer is a known contributor (docs/design.md#words)."""
        return peer_id in self.active if self.active else peer_id in self.partners or peer_id in self.attested

    def select_known(self, records: Records) -> Records:
        """Return the records of known contributors, or all of them as long as there are none, and no log."""
        known = {peer_id: record for peer_id, record in records.items() if self.is_known(peer_id)}
        return known if known or self.active else records

    def select_believable(self, records: Records, own_epoch: int) -> dict[bytes, LocalTrainingProgress]:
        """Return the plausible records: any peer can sign "epoch 10**9". `has_fewer_peers` needs all attested ones."""
        believable = dict(filter_plausible_records(list(self.select_known(records).items()), own_epoch))
        if any(map(self.is_known, records)):
            limit = max([own_epoch, *(record.epoch for record in believable.values())]) + MAX_LEAD
            believable |= {peer_id: record for peer_id, record in records.items() if record.epoch <= limit}
        return believable | {peer: records[peer] for peer in records.keys() & self.attested if self.active}

    def find_swarm_epoch(self, present: Records, own_epoch: int) -> int:
        """Return the highest epoch that this peer or more than half of the known contributors have reached; without a
        log, that of most peers if this one is more than MAX_LEAD ahead of it, as after a cut. New peers, at epoch 0,
        have no say. A single peer, which could serve an invented state, cannot raise it."""
        others = [record.epoch for record in self.select_known(present).values() if record.epoch]
        middle = sorted([own_epoch, *others], reverse=True)[len(others) // 2]
        return middle if own_epoch > middle + MAX_LEAD and not self.active else max(own_epoch, middle)

    @staticmethod
    def find_max_speed(records: Sequence[LocalTrainingProgress]) -> float:
        """Return the most samples/s that count: no claim ends an epoch early, but of two peers, either may be right."""
        speeds = sorted(record.samples_per_second for record in records)
        return MAX_RELATIVE_SPEED * speeds[len(speeds) // 2] if len(speeds) > 2 else math.inf

    # --- peers to count

    @property
    def excluded(self) -> set[bytes]:
        """The ids of peers that answer no request, or are banned."""
        return {peer_id for peer_id, absence in list(self.absent.items()) if absence.reason != LATE}

    @property
    def banned_until(self) -> dict[bytes, float]:
        """The end of the ban of each peer that is banned."""
        return {peer_id: it.until for peer_id, it in list(self.absent.items()) if it.reason == BANNED}

    def select_present(self, records: Records) -> dict[bytes, LocalTrainingProgress]:
        """Return the records of the peers that count."""
        return {peer_id: record for peer_id, record in list(records.items()) if peer_id not in self.absent}

    def select_counted(self, records: Records) -> Records:
        """Return the records of the peers that are there, late ones included, or have just fallen silent."""
        oldest = get_dht_time() - self.uplink.timeouts.partition_grace
        absent = {p for p, it in list(self.absent.items()) if it.reason == BANNED or it.until < oldest}
        return {peer_id: record for peer_id, record in list(records.items()) if peer_id not in absent}

    def count_quorum(self, records: Records, min_epoch: int, max_epoch: float = math.inf) -> int:
        """Return how many peers a round takes, this one included: two thirds of the known contributors at these epochs,
        or all that are not late if these are fewer; and two trainers at least with an auxiliary peer. One that just
        fell silent counts: no smaller half may step."""
        members = {p: it for p, it in self.select_counted(records).items() if min_epoch <= it.epoch <= max_epoch}
        known = self.select_known(members).keys()
        in_time = len(known - {p for p, it in list(self.absent.items()) if it.reason == LATE})
        # with a mere majority, one leader could hold a round with each half of the others
        if self.is_auxiliary:
            return 1 + max(2, min(math.ceil(2 * len(known) / 3), in_time))
        return min(math.ceil(2 * (1 + len(known)) / 3), 1 + in_time)

    # --- events

    def mark_silent(self, peer_ids: Iterable[bytes], is_unreachable: bool = False) -> None:
        """Do not count these peers until they report something new."""
        self.absent |= dict.fromkeys(peer_ids, Absence(SILENT, get_dht_time(), is_unreachable))

    def ban(self, violations: Mapping[PeerID, str]) -> None:
        """Do no rounds with these peers for a while, and log their violations. Each ban takes four times as long as the
        last one, unless FORGIVEN_AFTER times its duration has passed since it ended."""
        for peer, violation in violations.items():
            peer_id = peer.to_bytes()
            now = get_dht_time()
            last, ended = self.last_bans.get(peer_id, (0.0, 0.0))
            if now < ended:
                continue
            seconds = 4 * last if now < ended + FORGIVEN_AFTER * last else BAN_SECONDS
            self.last_bans[peer_id] = seconds, now + seconds
            self.absent[peer_id] = Absence(BANNED, now + seconds)
            logger.warning(f"peer {peer} {violation}: no rounds with it for {seconds:.0f} s")

    def record_round(self, group: Iterable[bytes], absent: Records, waited_since: float | None, own_epoch: int) -> None:
        """Record a successful round with these peers, and the `absent` ones that it awaited since this time, if any."""
        self.partners |= set(group)
        for peer_id in group:
            del self.missed_rounds[peer_id]
            if peer_id in self.absent and self.absent[peer_id].reason != BANNED:
                del self.absent[peer_id]
        for peer_id, record in absent.items():
            # a peer that is behind may be replaying the missed step; a busy one reports nothing
            if waited_since is not None and record.time >= waited_since and record.epoch >= own_epoch:
                self.count_missed_round(peer_id, f"has missed {MAX_MISSED_ROUNDS} rounds in a row")

    def count_missed_round(self, peer_id: bytes, fault: str) -> None:
        """Count a round that a reporting peer has missed, or a state that it owes; at the third, it is LATE."""
        self.missed_rounds[peer_id] += 1
        if self.missed_rounds[peer_id] >= MAX_MISSED_ROUNDS:
            del self.missed_rounds[peer_id]
            # no ban: it may be slow, and is welcome in any group that it finds in time
            seconds = max(BAN_SECONDS, LATE_EPOCHS * self.uplink.timeouts.epoch_seconds)
            self.absent[peer_id] = Absence(LATE, get_dht_time() + seconds)
            logger.warning(f"peer {PeerID(peer_id)} reports, but {fault}: not waiting for it for {seconds:.0f} s")

    def forget_groups(self) -> None:
        """Believe all peers alike, because this peer does not meet most of them if there are several groups."""
        self.partners.clear()
        self.attested.clear()
        self.missed_rounds.clear()

    def update(self, records: Records) -> None:
        """Count the peers again that have reported since their absence was over, or whose records have expired."""
        now = get_dht_time()
        for peer_id, absence in list(self.absent.items()):
            record = records.get(peer_id)
            if min(record.time if record else now, now) > absence.until:
                self.absent.pop(peer_id, None)  # a round in the background may do this as well
                if record:
                    logger.info(f"peer {PeerID(peer_id)} is back, at epoch {record.epoch}")
                if record and absence.is_unreachable:  # it can reach the DHT, but perhaps not this peer
                    self.count_missed_round(peer_id, UNREACHABLE)


class RoundTrust:
    """An averager's record of the peers in its rounds; it lives in the averager's process."""

    def __init__(self):
        self.scores: dict[PeerID, float] = {}
        #: the score of new peers together, with which each begins, because keys cost nothing
        self.first_score = 1.0
        #: rounds that each peer has broken, less those with it that succeeded in time, and the number of the latter
        self.broken_rounds = Counter()
        self.rounds = Counter()
        self.leaders: dict[PeerID, PeerID] = {}  # of the first round in which a peer sent nothing, since it was in time

    def record_round(self, peers: Iterable[PeerID], late: Collection[PeerID], leader: PeerID) -> dict[PeerID, str]:
        """Record a round that has succeeded, though some were late. Return those that were so too often."""
        in_time = {*peers}.difference(late)  # with another leader, they may still have broken the first one's rounds
        self.leaders = {peer: first for peer, first in self.leaders.items() if peer not in in_time or first != leader}
        for peer in peers:
            self.rounds[peer] += peer not in late
            broken = max(0, self.broken_rounds[peer] + (1 if peer in late else -1))
            self.broken_rounds[peer] = min(broken, MAX_BROKEN_ROUNDS)
        return {peer: "delays all rounds" for peer in late if self.broken_rounds[peer] >= MAX_BROKEN_ROUNDS}

    def record_broken_round(self, suspects: Collection[PeerID], foreign: Mapping[PeerID, PeerID]) -> None:
        """Record a round that has failed, which may be chance; raise MaliciousPeersError after several of them. Of two
        suspects, the one with fewer rounds counts: a new attacker cannot turn honest peers against each other. The
        first leader (values of `foreign`) counts instead of a peer that does not know the group: it may have hidden it,
        unless it has more than twice as many rounds."""
        for peer, leader in foreign.items():
            is_first = self.leaders.setdefault(peer, leader) == leader
            suspects = [leader] if is_first else [peer]
            if is_first and 2 * self.rounds[peer] < self.rounds[leader]:
                suspects = []
        fewest = min((self.rounds[peer] for peer in suspects), default=0)
        counted = [peer for peer in suspects if self.rounds[peer] == fewest]
        self.broken_rounds.update(counted)
        if banned := [peer for peer in counted if self.broken_rounds[peer] >= MAX_BROKEN_ROUNDS]:
            self.broken_rounds.clear()
            raise MaliciousPeersError(dict.fromkeys(banned, f"has broken or delayed {MAX_BROKEN_ROUNDS} rounds"))

    def record_averages(self, shares: Mapping[PeerID, float], share_of_all: float, weight: float) -> None:
        """Record how much of this peer's gradient is in the average of each of the others, and in the whole one: from 1
        for all of it to -1 for the contrary, see swarm/guard.py. Its weight in the average is from 0 to 1. Raise a
        MaliciousPeersError if some peers have left it out for some rounds, and another AllreduceException if an average
        points away from what was sent for it."""
        for peer, share in shares.items():
            score = self.scores.get(peer, max(self.first_score, SUSPICION_THRESHOLD))
            self.scores[peer] = score + TRUST_EMA_ALPHA * weight * (share - score)
            if self.rounds[peer] < MAX_BROKEN_ROUNDS:
                self.first_score += TRUST_EMA_ALPHA * weight * (max(share, -1.0) - self.first_score)
        if banned := [peer for peer in shares if self.scores[peer] < BAN_THRESHOLD]:
            self.scores |= dict.fromkeys(banned, 2 * BAN_THRESHOLD)  # for when they are back
            raise MaliciousPeersError(dict.fromkeys(banned, "sends averages without this peer's gradients"))
        reversed_by = [peer for peer, share in shares.items() if share < REVERSED_PART]
        if share_of_all < REVERSED_AVERAGE or any(self.scores[peer] < SUSPICION_THRESHOLD for peer in reversed_by):
            raise AllreduceException("an average points away from what was sent for it")
