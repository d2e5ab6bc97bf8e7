"""This peer's line to the others: nothing is sent faster than it carries, and all times follow from it.

A volunteer's line carries 20 Mbit/s up. What a round hands over faster than that waits in queues in front of the modem,
in sockets and in the daemon, and whatever comes next waits behind it: a ping through a full line took longer than 3 s,
and its peer was taken for dead. So all that averagers send passes one pacer, and the queue stays where the next message
can go round it: here.

    python benchmarks/rounds.py --short
"""

import asyncio
import contextlib
import logging
import math
import multiprocessing
import time
from collections import deque
from ctypes import c_bool, c_double, c_longlong

from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from support.console import format_number

logger = logging.getLogger("swarm")

# Of 1,500 bytes on the wire 52 are headers, and what comes the other way is acknowledged with 52 bytes for two packets.
PAYLOAD_SHARE = 0.93
# After a pause TCP begins with 15 kB and doubles that with each answer. What was handed over faster would stand in a
# queue for seconds, as the line has little to spare: from a quarter of the rate on, doubled in so many seconds.
TCP_PAUSE, RAMP = 0.5, 0.15
BURST = 0.002  # seconds ahead of its time that a message may go, as sleeping is not more precise
ROUND_SHARE = 5  # a byte in the background costs as many in a round while one is in progress
ROUND_PAUSE = 0.5  # seconds after a round's last message in which it counts as going on

LOOK_PERIOD, IDLE_PERIOD = 0.5, 5.0  # seconds between two looks at the line, with traffic and without
LOOKED_AT = 3  # peers asked at each look; the nearest answer counts, as the others' own lines may be full
# Seconds of waiting. Messages come in bursts, at both ends: only what never goes away is a queue.
STUCK, LONG_QUEUE, SHORT_QUEUE = 0.25, 0.08, 0.04
# Of the rate, at one look. To exceed the line costs more than to stay below it: with 5 % too much, a round took 22 s
# that took 16 s just below, as TCP loses packets and its sockets hold the queue. So after a queue the rate grows slowly
# at first: by so much more at each look than at the one before, to 6 % in 12 seconds of sending and 25 % in 24.
RAISE, PROBE, LOWER = 1.05, 2e-4, 0.94
SETTLING = 5  # looks until a lower rate shows, as the queue has to leave first
MUCH = 0.6  # of the rate: where less was sent than that, whatever delays the answers is not this peer's queue
HELD_POLL = 0.05  # seconds between two tries to send while a long queue leaves
LOWEST_RATE = 1e4  # bytes/s

SHORTEST_ANSWER = 0.1  # seconds; shorter ones are taken for that
PATIENCE = 6  # times the longest recent answer, until one that has not come is not expected any more
SHORTEST_PATIENCE, LONGEST_PATIENCE = 1.5, 15.0  # seconds
LONGEST_REQUEST = 10.0  # seconds: while a peer waits for an answer, others wait for its own
# Of an epoch, and in seconds: some are still busy with a step when it ends. Where it was long, to leave them out costs
# more than to wait.
MATCHMAKING_SHARE, LONGEST_MATCHMAKING = 0.08, 15.0
LONGEST_CLAIMED = 200.0  # seconds of a round that timeouts follow on the word of others
# Of an epoch, and in seconds: who is cut off with a smaller half, mostly for some seconds, would step to another state.
GRACE_SHARE, LONGEST_GRACE = 0.25, 60.0


class Line:
    """What this process and its helpers, forked later, know of their one line. All rates are of payload, in bytes/s."""

    def __init__(self):
        self.lock = multiprocessing.Lock()
        shared = multiprocessing.RawValue
        #: bytes of rounds and states so far
        self._sent, self._received = shared(c_longlong), shared(c_longlong)
        #: the pace, what it may be at most, and whether the user has said so
        self._rate, self._limit, self._is_given = shared(c_double, 0), shared(c_double, math.inf), shared(c_bool)
        #: when what was handed over so far has left; when the background may go on; when a round was last sent to
        self._free_at, self._background_at, self._round_at = shared(c_double), shared(c_double), shared(c_double)
        #: when it began to send after a pause
        self._began = shared(c_double)
        #: whether nothing is sent until a long queue has left
        self._is_held = shared(c_bool)
        #: the longest recent answer to a small question, in seconds
        self._answer = shared(c_double, 0.3)
        #: the longest recent round, or what one should take, in seconds
        self._round_seconds = shared(c_double, 1.0)
        #: the last epoch, in seconds
        self._epoch_seconds = shared(c_double)
        # looks at a full line since a queue was seen; for how many that queue may still be there; and the last rates
        self._calm, self._settling, self._rates = math.inf, 0, deque(maxlen=4)
        #: what the user has fixed, in seconds; 0: follows from the line
        self._fixed = {name: shared(c_double) for name in ("matchmaking", "request", "averaging", "chunk")}

    # --- rate

    def set_bandwidth(self, mbits: float, is_given: bool) -> None:
        """
        :param mbits: of the line, upwards
        :param is_given: by the user: never send faster; otherwise it was measured, and may have been more
        """
        self._rate.value = PAYLOAD_SHARE * mbits * 1e6 / 8
        self._limit.value, self._is_given.value = self._rate.value if is_given else math.inf, is_given

    @property
    def mbits(self) -> float | None:
        """What the line carries upwards, in Mbit/s, as far as is known."""
        return self._rate.value * 8e-6 / PAYLOAD_SHARE or None

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of rounds and states that this peer has sent and received so far."""
        return self._sent.value, self._received.value

    def seconds_for(self, size: int) -> float:
        """Seconds for this many bytes at a tenth of the rate: longer than a download may take."""
        return 10 * size / self._rate.value if self._rate.value else 0.0

    def reserve(self, size: int, is_round: bool) -> float:
        """Reserve the line's next free time for this many bytes.

        :returns: seconds until then; negative: it is not their turn, ask again after that many seconds
        """
        with self.lock:
            now, rate = time.monotonic(), self._rate.value
            if self._is_held.value:
                return -HELD_POLL
            if is_round:
                self._round_at.value = now
            elif now < self._background_at.value:
                return now - self._background_at.value
            self._sent.value += size
            if not rate:
                return 0.0
            if now > self._free_at.value + TCP_PAUSE:
                self._began.value = now
            start = max(now, self._free_at.value)
            rate *= min(1.0, 2 ** ((start - self._began.value) / RAMP - 2))
            self._free_at.value = start + size / rate
            if not is_round:
                is_shared = now - self._round_at.value < ROUND_PAUSE
                pause = size / rate * (ROUND_SHARE if is_shared else 1)
                self._background_at.value = max(self._background_at.value, now - pause) + pause
            return max(0.0, start - now - BURST)

    async def send(self, messages, is_round: bool):
        """Pass messages on at the line's pace: those of rounds before those of the background, all of one kind in turn.

        :param is_round: whether others wait for these
        """
        async for message in messages:
            while (seconds := self.reserve(message.ByteSize(), is_round)) < 0:
                await asyncio.sleep(-seconds)
            if seconds:
                await asyncio.sleep(seconds)
            yield message

    async def receive(self, messages):
        """Pass messages on, and count their bytes."""
        async for message in messages:
            with self.lock:
                self._received.value += message.ByteSize()
            yield message

    # --- times

    def fix(self, *seconds: float | None) -> None:
        """Times that the user has given, or None: of matchmaking, a request, averaging, a chunk."""
        for name, value in zip(("matchmaking", "request", "averaging", "chunk"), seconds, strict=True):
            self._fixed[name].value = value or 0.0

    @property
    def patience(self) -> float:
        """Seconds to wait for a small answer before asking once more."""
        return min(max(PATIENCE * self._answer.value, SHORTEST_PATIENCE), LONGEST_PATIENCE)

    @property
    def round_seconds(self) -> float:
        """What a round should take, or the longest recent one did."""
        return self._round_seconds.value

    @property
    def request_timeout(self) -> float:
        """Seconds after which a peer that does not answer a request to form a group is passed over."""
        longest = self._fixed["matchmaking"].value / 2 or LONGEST_REQUEST
        return self._fixed["request"].value or min(2 * self.patience, longest)

    @property
    def matchmaking_time(self) -> float:
        """Seconds to wait for others when a group forms."""
        share = min(MATCHMAKING_SHARE * self._epoch_seconds.value, LONGEST_MATCHMAKING)
        return self._fixed["matchmaking"].value or max(5.0, 2.5 * self.request_timeout, share)

    @property
    def looking_time(self) -> float:
        """Seconds for which a peer says that it looks for a group, which breaks up then. It looks before its epoch
        ends, and waits as long for late peers. The same for all peers, because the one that began first leads."""
        return 2 * (self._fixed["matchmaking"].value or LONGEST_MATCHMAKING)

    @property
    def averaging_timeout(self) -> float:
        """Seconds after which a round is given up, matchmaking included."""
        return self._fixed["averaging"].value or max(30.0, 3 * self._round_seconds.value) + self.matchmaking_time

    @property
    def next_chunk_timeout(self) -> float:
        """Seconds without a piece of data after which a peer is left out, although it answers pings."""
        return self._fixed["chunk"].value or max(10.0, 4 * self.patience, self._round_seconds.value / 2)

    @property
    def grace(self) -> float:
        """Seconds for which most of a swarm may be gone until the others go on without them."""
        return min(GRACE_SHARE * self._epoch_seconds.value, LONGEST_GRACE)

    def format_timeouts(self) -> str:
        return (
            f"it may take {self.averaging_timeout:.0f} s (--averaging_timeout), its group {self.matchmaking_time:.1f} "
            f"s to form (--matchmaking_time), an answer {self.request_timeout:.1f} s (--request_timeout), and a peer "
            f"may pause for {self.next_chunk_timeout:.0f} s (--next_chunk_timeout)"
        )

    def expect_round(self, seconds: float, own_seconds: float = 0.0) -> None:
        """Learn how long a round should take, or took: the longest counts, and is slowly forgotten.

        :param seconds: follows from what others claim, or do
        :param own_seconds: for this peer's own bytes at its own rate: a longer time counts up to LONGEST_CLAIMED
        """
        seconds = min(seconds, max(LONGEST_CLAIMED, own_seconds))
        self._round_seconds.value = max(seconds, 0.9 * self._round_seconds.value)

    def record_epoch_time(self, seconds: float) -> None:
        """An epoch takes so long."""
        self._epoch_seconds.value = seconds

    def record_rtt(self, seconds: float) -> None:
        """An answer took so long: the longest counts, and is slowly forgotten. Twice the one before at most, as that of
        a peer that was frozen comes when it is there again; where the line is slow, all of them do."""
        self._answer.value = max(min(seconds, 2 * self._answer.value), 0.9 * self._answer.value, SHORTEST_ANSWER)

    # --- looks

    async def watch(self, node: DHTNode) -> None:
        """Runs in the DHT's process, forever: ask some peers how long an answer takes, and keep the queue in front of
        the modem short by the rate (as LEDBAT does, RFC 6817)."""
        shortest: dict[PeerID, float] = {}
        asking: dict[PeerID, asyncio.Task] = {}
        sent, looked, is_told, wait = self._sent.value, time.monotonic(), False, 0.0
        calm_sent, calm_at, most = sent, looked, 0.0  # when there was no queue, and the most that was sent since
        while True:
            await asyncio.sleep(LOOK_PERIOD)
            node.protocol.wait_timeout = max(3.0, 2 * self.patience)
            now, has_traffic = time.monotonic(), self._sent.value > sent
            peers = choose_peers(node)
            if not peers or not has_traffic and now < looked + IDLE_PERIOD:
                continue
            seconds = max(LOOK_PERIOD / 2, now - max(looked, self._began.value))
            share = (self._sent.value - sent) / seconds / (self._rate.value or math.inf)
            sent, looked = self._sent.value, now
            asking = {peer: answer for peer, answer in asking.items() if not answer.done()}  # what came late is no look
            fresh = {peer: asyncio.create_task(ask(node, peer)) for peer in peers if peer not in asking}
            asking |= fresh
            await asyncio.wait(asking.values(), timeout=LOOK_PERIOD)
            waits = []
            for peer, answer in fresh.items():
                if answer.done() and (seconds := answer.result()) is not None:
                    # a way that has become longer for good is learned in a minute
                    known = shortest.get(peer, seconds)
                    shortest[peer] = min(seconds, known + 0.01 * (seconds - known))
                    waits.append(seconds - shortest[peer])
            if has_traffic:
                last_wait, wait = wait, min(waits, default=LOOK_PERIOD)
                most = max(most, share)
                if wait < STUCK or most < MUCH:
                    self.adjust(wait, last_wait, share)
                else:
                    await self.drain(node, calm_sent, calm_at)
                    sent, looked, wait = self._sent.value, time.monotonic(), 0.0
            if not has_traffic or wait < SHORT_QUEUE:
                calm_sent, calm_at, most = sent, looked, 0.0
            if self._is_given.value and not is_told and self._rate.value < 0.7 * self._limit.value:
                is_told = True
                logger.warning(
                    f"this line carries about {format_number(self.mbits)} Mbit/s up, less than --bandwidth says: "
                    "sending no faster than that"
                )

    def adjust(self, wait: float, last_wait: float, share: float) -> None:
        """
        :param wait: seconds that a question took beyond the shortest
        :param last_wait: at the last look
        :param share: of the rate that was used
        """
        if not (rate := self._rate.value):
            return
        self._rates.append(rate)
        self._settling = max(0, self._settling - 1)
        # the first queue grows quickly; later on, what does not stay is none
        queue = wait if self._calm == math.inf else min(wait, last_wait)
        if queue > LONG_QUEUE and share > MUCH and not self._settling:
            rate = LOWER * min(self._rates)  # it began some looks ago
            self._calm, self._settling = 0, SETTLING
            with self.lock:  # let it leave
                self._free_at.value = max(time.monotonic(), self._free_at.value) + queue
        elif queue < SHORT_QUEUE and share > 0.85:
            rate *= min(RAISE, 1 + PROBE * self._calm)
            self._calm += 1
        self._rate.value = min(max(rate, LOWEST_RATE), self._limit.value)

    async def drain(self, node: DHTNode, sent: int, since: float) -> None:
        """The line is much slower than the rate, and what was handed over stands in front of it: send nothing until
        answers have come through, and go on as fast as the line has carried that.

        :param sent: bytes handed over when there was no queue yet
        :param since: when that was
        """
        self._is_held.value, held, received = True, time.monotonic(), self._received.value
        answers = 0
        try:
            while not answers and (peers := choose_peers(node)):
                self._answer.value = LONGEST_PATIENCE / PATIENCE  # nobody is gone because this line is slow
                for answer in asyncio.as_completed([asyncio.create_task(ask(node, peer)) for peer in peers]):
                    answers += await answer is not None
                    if 2 * answers > len(peers):  # each peer's connection has a queue of its own, and some may be dead
                        break
                if not answers:
                    await asyncio.sleep(LOOK_PERIOD)
        finally:
            self._is_held.value = False
        now = time.monotonic()
        # where nothing came in either, the way was cut
        if now < held + LONGEST_PATIENCE or self._received.value > received:
            carried = (self._sent.value - sent) / (now - max(since, self._began.value))
            self._rate.value = max(min(carried, LOWER * self._rate.value), LOWEST_RATE)
            self._calm, self._settling = math.inf, 0  # where it was the way and not the line, it is faster soon
            self._rates.clear()


def choose_peers(node: DHTNode) -> list[PeerID]:
    """Whom to ask about the line."""
    return list(node.protocol.routing_table.peer_id_to_uid)[:LOOKED_AT]


async def ask(node: DHTNode, peer: PeerID) -> float | None:
    """Runs in the DHT's process: seconds that a ping took to that peer, more or less as its clock goes; or None without
    an answer."""
    start, sent = time.monotonic(), get_dht_time()
    with contextlib.suppress(Exception):  # a peer that is gone fails in many ways, all of which mean the same
        ping = node.protocol.get_stub(peer).rpc_ping(dht_pb2.PingRequest())
        answer = await asyncio.wait_for(ping, LONGEST_PATIENCE)
        LINE.record_rtt(time.monotonic() - start)
        return answer.dht_time - sent
    return None


LINE = Line()


def from_line(name: str) -> property:
    """For a time or rate that hivemind fixes at its start, and that follows from the line here."""
    return property(lambda _: getattr(LINE, name), lambda *_: None)
