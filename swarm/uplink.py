"""The uplink: nothing is sent faster than it carries, and all timeouts follow from what it does. All data of rounds,
states and updates passes one pacer, so that the queue stays here, where the next message can overtake it (note 43)."""

import asyncio
import contextlib
import math
import multiprocessing
import statistics
import time
from collections import deque
from ctypes import c_bool, c_double, c_longlong
from dataclasses import dataclass, fields

import psutil
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from swarm import logger
from swarm.config import AveragingConfig

# Of 1,500 bytes on the wire 52 are headers, and each two packets from the other side are acknowledged with 52 bytes.
PAYLOAD_SHARE = 0.93
BURST = 0.002  # seconds ahead of its time that a message may go, because sleeping is not more precise
CATCH_UP = 0.02  # seconds of sending that a busy core has missed, and which are made up for
ROUND_SHARE = 5  # the cost of a background byte, in bytes of a round, while a round is in progress
PAUSE = 0.5  # seconds after the last message in which sending, or a round, counts as in progress

POLL_INTERVAL = 0.5  # seconds between two polls with traffic
IDLE_POLL_INTERVAL = 5.0  # the same without traffic
PROBES = 3  # pings at each poll; the fastest answer counts: others' uplinks may be full
# Seconds of queueing delay. Messages come in bursts, at both ends: only a delay that stays is a queue.
STALL_DELAY = 0.25
HIGH_QUEUE_DELAY = 0.08
LOW_QUEUE_DELAY = 0.04
# Factors of the rate, at one poll. A rate 5 % above the uplink's made a round of 16 s one of 22. So after a queue, the
# rate grows slowly at first: by more at each poll than at the one before.
MAX_RAISE = 1.05
RAISE_STEP = 2e-4
LOWER = 0.94
MAX_RECOVERY = 1.2  # the same until the rate before a drain is back
RECOVERY_STEP = 0.02
RATE_COOLDOWN_POLLS = 5  # polls until a lower rate shows, because the queue has to drain first
# QUIC takes seconds to slow down, and the daemon holds megabytes meanwhile.
MAX_DRAIN = 60.0  # seconds to wait for any answer
MAX_FLUSH = 3.0  # seconds until the daemon's data has left
FLUSHED = 0.05  # the share of the rate below which it has
ACKNOWLEDGED = 0.03  # acknowledgements as a share of the received bytes
RECOVERED = 0.7  # of the rate before a drain, up to which the rate grows fast
RECOVERY_SHARE = 0.3  # of the rate, which has to be used meanwhile
FORGET = 0.95  # the part of the old rate that each further queue leaves
HELD_BACK_POLLS = 4  # in a row with a short queue and a low utilization, until the rate counts as too high
MIN_UTILIZATION = 0.6  # of the rate: if less was sent, a delay is not this peer's queue
MIN_RATE = 1e4  # bytes/s
SLOW_MBITS = 2.0  # the uplink of a slow peer that sends a state, or passes it on

MAX_CLOCK_ERROR = 10.0  # seconds; a peer does not start with more than three
CLOCK_WARNING_INTERVAL = 600.0  # seconds

MIN_RTT = 0.1  # seconds; shorter ones count as this
RTT_TIMEOUT_FACTOR = 6  # times the longest recent RTT, until an answer is no longer expected
MIN_RESPONSE_TIMEOUT = 1.5  # seconds
MAX_RESPONSE_TIMEOUT = 15.0
MAX_REQUEST_TIMEOUT = 10.0  # seconds; while a peer waits for an answer, others wait for its own
# A share of the epoch, and seconds: after a long epoch, a round without busy peers costs more than waiting for them.
MATCHMAKING_SHARE = 0.08
MAX_MATCHMAKING = 15.0
MAX_CLAIMED_ROUND = 200.0  # seconds of a round that timeouts follow on the word of other peers
# A share of the epoch, and seconds: a peer that is cut off, usually for seconds, would step to a state of its own.
GRACE_SHARE = 0.25
MAX_GRACE = 60.0


@dataclass
class RoundTimeouts:
    """All timeouts of a round, in seconds, as a function of the uplink's measurements and of the user's settings."""

    rtt: float = 0.3  # of a small message, see `Uplink.record_rtt`
    round_seconds: float = 1.0  # of the longest recent round, or of the next one as planned
    epoch_seconds: float = 0.0  # of the last epoch
    # fixed by the user; 0 if the value follows from the uplink
    matchmaking_time: float = 0.0
    averaging_timeout: float = 0.0
    next_chunk_timeout: float = 0.0

    def __post_init__(self):
        #: the wait for a small answer before the request is sent once more
        self.response = min(max(RTT_TIMEOUT_FACTOR * self.rtt, MIN_RESPONSE_TIMEOUT), MAX_RESPONSE_TIMEOUT)
        #: the wait for a peer that was asked to form a group, before another one is asked
        self.request = min(2 * self.response, self.matchmaking_time / 2 or MAX_REQUEST_TIMEOUT)
        #: the wait for other peers when a group forms
        share = min(MATCHMAKING_SHARE * self.epoch_seconds, MAX_MATCHMAKING)
        self.matchmaking = self.matchmaking_time or max(2.5 * self.request, share)
        #: the end of a search for a group: the same for all peers, because the one that began first leads (note 82)
        self.group_search = 2 * (self.matchmaking_time or MAX_MATCHMAKING)
        #: the longest duration of a round that makes progress: a connection that loses packets may carry a tenth. The
        #: claims of other peers must not make it longer than three times MAX_CLAIMED_ROUND
        self.slow_round = max(3 * self.round_seconds, min(10 * self.round_seconds, 3 * MAX_CLAIMED_ROUND))
        self.longest_round = max(30.0, self.slow_round)
        #: the wait for a chunk of data until a peer is excluded, although it answers pings
        self.next_chunk = self.next_chunk_timeout or max(10.0, 4 * self.response, self.round_seconds / 2)
        #: the end of a round, matchmaking included, and after the peers that hold it up have been found
        self.averaging = self.averaging_timeout or self.longest_round + 2 * self.next_chunk + self.matchmaking
        #: the wait for an answer during a round: an uplink that drops to a tenth has seconds of data queued
        self.silence_in_round = max(self.response, self.round_seconds / 8)
        #: the time for which most of a swarm may be missing until the others continue without them
        self.partition_grace = min(GRACE_SHARE * self.epoch_seconds, MAX_GRACE)


Answers = dict[PeerID, tuple[float, float]]  # to pings, see `Uplink.measure_delay`


class Uplink:
    """The pacer of this peer. Its values are shared with helpers forked later; rates are bytes/s of payload."""

    def __init__(self):
        self.lock = multiprocessing.Lock()
        shared = multiprocessing.RawValue
        self._sent = shared(c_longlong)  # bytes so far, see `traffic`
        self._received = shared(c_longlong)
        #: the pace, and its upper bound if the user has set one
        self._rate = shared(c_double, 0)
        self._limit = shared(c_double, math.inf)
        #: when all data handed over so far has left; when the background may continue
        self._free_at = shared(c_double)
        self._background_at = shared(c_double)
        #: when a round last sent; when this peer began to send after a pause
        self._round_at = shared(c_double)
        self._began = shared(c_double)
        self._is_paused = shared(c_bool)  # whether nothing is sent until a long queue has drained
        #: the fields of RoundTimeouts
        self._times = {field.name: shared(c_double, field.default) for field in fields(RoundTimeouts)}
        self._rtts: list[tuple[PeerID, float]] = []  # the last ones, in the DHT's process
        # polls of a full uplink since the last queue; polls until it has drained; the last rates; that before a drain
        self._polls_since_queue = math.inf
        self._settling = 0
        self._rates = deque(maxlen=4)
        self._lost = 0.0
        self._shortest: dict[PeerID, float] = {}  # the shortest delay of each peer, see `measure_delay`
        self._next_warning = 0.0

    # --- rate

    def set_bandwidth(self, mbits: float, is_fixed: bool) -> None:
        """Set the bandwidth of the uplink. If the user has fixed it, nothing is ever sent faster."""
        self._rate.value = PAYLOAD_SHARE * mbits * 1e6 / 8
        self._limit.value = self._rate.value if is_fixed else math.inf

    @property
    def mbits(self) -> float | None:
        """The bandwidth of the uplink in Mbit/s, as far as it is known."""
        return self._rate.value * 8e-6 / PAYLOAD_SHARE or None

    @property
    def traffic(self) -> tuple[int, int]:
        """The bytes of rounds, states and the log that this peer has sent, and those of data that it has received."""
        return self._sent.value, self._received.value

    def compute_transfer_timeout(self, size: int) -> float:
        """Return the seconds that this many bytes take at a tenth of the rate; 0 if that is unknown."""
        return 10 * size / self._rate.value if self._rate.value else 0.0

    def compute_state_timeout(self, size: int) -> float:
        """Return the same for a state, which a peer of SLOW_MBITS may send or pass on, if that takes longer."""
        return max(self.compute_transfer_timeout(size), 8e-6 * size / SLOW_MBITS)

    def reserve(self, size: int, is_urgent: bool) -> float:
        """Reserve the uplink's next free time for this many bytes, and return the seconds until then. If these are
        negative, it is not their turn: call again after that many seconds."""
        with self.lock:
            now = time.monotonic()
            rate = self._rate.value
            if self._is_paused.value:
                return -0.05  # seconds until the next try
            if is_urgent:
                self._round_at.value = now
            elif now < self._background_at.value:
                return now - self._background_at.value
            self._sent.value += size
            if not rate:
                return 0.0
            if now > self._free_at.value + PAUSE:
                self._began.value = now
            start = max(now - CATCH_UP, self._free_at.value)
            rate *= 2 ** min(0.0, (start - self._began.value) / 0.15 - 2)  # after a pause, connections begin slowly
            self._free_at.value = start + size / rate
            if not is_urgent:
                pause = size / rate * (ROUND_SHARE if now < self._round_at.value + PAUSE else 1)
                self._background_at.value = max(self._background_at.value, now - CATCH_UP) + pause
            return max(0.0, start - now - BURST)

    async def send(self, messages, is_urgent: bool):
        """Pass messages on at the uplink's pace: those of rounds, for which other peers wait, before the background."""
        async for message in messages:
            await self.pace(message.ByteSize(), is_urgent)
            yield message

    async def pace(self, size: int, is_urgent: bool) -> None:
        """Wait until this many bytes may be sent."""
        while (seconds := self.reserve(size, is_urgent)) < 0:
            await asyncio.sleep(-seconds)
        await asyncio.sleep(seconds)

    def count_received(self, size: int) -> None:
        """Add these bytes to `traffic`."""
        with self.lock:
            self._received.value += size

    # --- times

    @property
    def timeouts(self) -> RoundTimeouts:
        """The timeouts that follow from what is known now."""
        return RoundTimeouts(**{name: value.value for name, value in self._times.items()})

    def fix_timeouts(self, settings: AveragingConfig) -> None:
        """Set the timeouts that the user has given."""
        for name in ("matchmaking_time", "averaging_timeout", "next_chunk_timeout"):
            self._times[name].value = getattr(settings, name) or 0.0

    def expect_round(self, seconds: float, own_seconds: float = 0.0) -> None:
        """Record how long a round should take, or took. The longest one counts, and decays. Claims of other peers above
        MAX_CLAIMED_ROUND count up to the time for this peer's own bytes."""
        seconds = min(seconds, max(MAX_CLAIMED_ROUND, own_seconds))
        self._times["round_seconds"].value = max(seconds, 0.9 * self._times["round_seconds"].value)

    def record_epoch_time(self, seconds: float) -> None:
        """Record how long an epoch lasts."""
        self._times["epoch_seconds"].value = seconds

    def record_rtt(self, peer: PeerID, seconds: float) -> None:
        """Record the RTT of a small message. Of the last two of each peer, the third-longest counts: the two longest
        may be of one peer. It at most doubles, because a frozen peer answers when it is back, and decays by a tenth."""
        own = [it for it in self._rtts if it[0] == peer][-1:]
        self._rtts = [*(it for it in self._rtts if it[0] != peer), *own, (peer, seconds)][-2 * PROBES :]
        rtt = self._times["rtt"]
        seconds = sorted(it for _, it in self._rtts)[-3:][0]
        rtt.value = max(min(seconds, 2 * rtt.value), 0.9 * rtt.value, MIN_RTT)

    # --- polls

    async def watch(self, node: DHTNode) -> None:
        """Measure RTTs, and keep the queue short by the rate (LEDBAT, RFC 6817). Runs forever, in the DHT's process."""
        pings: dict[PeerID, asyncio.Task] = {}
        delays = deque([0.0] * HELD_BACK_POLLS, maxlen=HELD_BACK_POLLS)  # in seconds, at the last polls
        sent = self._sent.value
        polled = time.monotonic()
        peak = 0.0  # the highest share since `empty`
        empty = sent, polled  # when there was no queue
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            node.protocol.wait_timeout = max(3.0, 2 * self.timeouts.response)
            now = time.monotonic()
            peers = choose_peers(node)
            seconds = max(POLL_INTERVAL / 2, now - max(polled, self._began.value))
            share = (self._sent.value - sent) / seconds / (self._rate.value or math.inf)
            has_traffic = share > 0.02  # messages of the log alone make no queue
            if not peers or not has_traffic and now < polled + IDLE_POLL_INTERVAL:
                continue
            sent = self._sent.value
            polled = now
            pings = {peer: ping for peer, ping in pings.items() if not ping.done()}  # a late answer is not a sample
            fresh = {peer: asyncio.create_task(self.measure_delay(node, peer)) for peer in peers if peer not in pings}
            pings |= fresh
            # a slow return path delays answers, too
            patience = max(POLL_INTERVAL, 1.5 * min((it for _, it in self._rtts), default=0.0))
            lag, _ = await asyncio.gather(measure_lag(node), asyncio.wait(pings.values(), timeout=patience))
            answers = {peer: ping.result() for peer, ping in fresh.items() if ping.done() and ping.result()}
            self._check_clock(answers)
            excess = self._find_excess(answers)
            if has_traffic:
                delays.append(max(0.0, excess - lag))  # busy cores are no queue
                queue = min(delays[-2], delays[-1])  # a lost packet makes one answer late
                peak = max(peak, share)
                # QUIC keeps a short queue itself, and then sends less
                is_held_back = share < MIN_UTILIZATION and min(delays) > HIGH_QUEUE_DELAY
                if peak < MIN_UTILIZATION or queue < STALL_DELAY and not is_held_back:
                    self.adjust(queue, share)
                else:
                    await self.drain(node, *empty)
                    sent = self._sent.value
                    polled = time.monotonic()
                    delays.extend([0.0] * HELD_BACK_POLLS)
            if not has_traffic or delays[-1] < LOW_QUEUE_DELAY:
                empty = (sent, polled)
                peak = 0.0

    def _check_clock(self, answers: Answers) -> None:
        """Warn if this machine's clock is wrong: records would expire too early or too late for others."""
        now = time.monotonic()
        if not answers or now < self._next_warning:
            return
        ahead = get_dht_time() - now - statistics.median(delay for delay, _ in answers.values())
        if abs(ahead) > MAX_CLOCK_ERROR:
            self._next_warning = now + CLOCK_WARNING_INTERVAL
            text = f"this machine's clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} most peers'"
            logger.warning(f"{text}: synchronize it, e.g. sudo timedatectl set-ntp true")

    def _find_excess(self, answers: Answers) -> float:
        """Return the seconds by which the ping with the least delay took longer than that peer's shortest one."""
        for peer, (delay, rtt) in answers.items():
            last = self._shortest.get(peer, delay)
            # a longer route is learned in a minute; if the delay grows by more than the RTT, a clock was set
            self._shortest[peer] = delay if delay > last + rtt else min(delay, last + 0.01 * (delay - last))
        return min((delay - self._shortest[peer] for peer, (delay, _) in answers.items()), default=POLL_INTERVAL)

    def adjust(self, queue: float, share: float) -> None:
        """Raise or lower the rate after a poll, by the queueing delay, the seconds that the last pings took beyond the
        shortest one, and by the share of the rate that was used. After a drain it grows fast to the old rate.
        At first, this needs little use, because a peer that sends a part of its gradients fills no uplink."""
        rate = self._rate.value
        self._rates.append(rate)
        self._settling = max(0, self._settling - 1)
        if queue > HIGH_QUEUE_DELAY and share > MIN_UTILIZATION and not self._settling:
            rate = LOWER * min(self._rates)  # it began some polls ago
            self._polls_since_queue = 0
            self._settling = RATE_COOLDOWN_POLLS
            self._lost = FORGET * self._lost
            with self.lock:  # let it drain
                self._free_at.value = max(time.monotonic(), self._free_at.value) + queue
        elif queue < LOW_QUEUE_DELAY and share > (RECOVERY_SHARE if rate < RECOVERED * self._lost else 0.85):
            most, step = (MAX_RECOVERY, RECOVERY_STEP) if rate < self._lost else (MAX_RAISE, RAISE_STEP)
            rate *= min(most, 1 + step * self._polls_since_queue)
            self._polls_since_queue += 1
        self._rate.value = min(max(rate, MIN_RATE), self._limit.value)

    async def drain(self, node: DHTNode, sent: int, since: float) -> None:
        """Send nothing until pings are answered again. Then continue at the rate at which the uplink has carried data
        since the last time without a queue (`since`, after `sent` bytes): it is much slower than the old rate."""
        self._is_paused.value = True
        held = time.monotonic()
        received = self._received.value
        answers = 0
        try:
            while not answers and time.monotonic() < held + MAX_DRAIN and (peers := choose_peers(node)):
                # no peer counts as dead because this uplink is slow
                self._times["rtt"].value = MAX_RESPONSE_TIMEOUT / RTT_TIMEOUT_FACTOR
                for answer in asyncio.as_completed([self.measure_delay(node, peer) for peer in peers]):
                    if await answer is not None:
                        answers += 1
                    if 2 * answers > len(peers):  # each connection has a queue of its own, and some peers may be dead
                        break
                if not answers:
                    await asyncio.sleep(POLL_INTERVAL)
            # after a long time in which nothing came in either, the connection was cut
            if answers and (time.monotonic() < held + MAX_RESPONSE_TIMEOUT or self._received.value > received):
                carried = await self.measure_drain(sent, max(since, self._began.value))
                # if it was the route and not the uplink, it is faster soon
                self._polls_since_queue = 0
                self._settling = 0
                self._lost = max(FORGET * self._lost, self._rate.value)
                self._rate.value = max(min(carried, LOWER * self._rate.value), MIN_RATE)
                self._rates.clear()
        finally:
            self._is_paused.value = False

    async def measure_drain(self, sent: int, since: float) -> float:
        """Wait until the daemon holds no more data, and return the rate since these bytes were sent; if that takes
        longer than MAX_FLUSH, return the rate at which bytes, those of other programs included, leave this machine."""
        leaving = deque([math.inf], maxlen=3)
        now = time.monotonic()
        end = now + MAX_FLUSH
        flushed = max(FLUSHED * self._rate.value, MIN_RATE)
        while leaving[-1] > flushed and now < end:
            last = now
            left = count_left()
            await asyncio.sleep(POLL_INTERVAL)
            now = time.monotonic()
            leaving.append((count_left() - left) / (now - last))
        drained = (self._sent.value - sent) / max(POLL_INTERVAL, now - POLL_INTERVAL - since)
        return drained if leaving[-1] <= flushed else min(drained, max(leaving))

    async def measure_delay(self, node: DHTNode, peer: PeerID) -> tuple[float, float] | None:
        """Return a ping's seconds one way, apart from a constant of each peer, and its RTT; None without an answer."""
        start = time.monotonic()  # this machine's wall clock may be set
        with contextlib.suppress(Exception):  # a dead peer fails in many ways, all of which mean the same
            # with this node's id, by which a peer that has restarted finds the others again
            ping = node.protocol.get_stub(peer).rpc_ping(dht_pb2.PingRequest(peer=node.protocol.node_info))
            answer = await asyncio.wait_for(ping, MAX_RESPONSE_TIMEOUT)
            self.record_rtt(peer, rtt := time.monotonic() - start)
            return (answer.dht_time - start, rtt) if math.isfinite(answer.dht_time) else None
        return None


async def measure_lag(node: DHTNode) -> float:
    """Return the seconds that this machine's own daemon takes to answer: busy cores delay answers to pings as well."""
    start = time.monotonic()
    with contextlib.suppress(P2PDaemonError, OSError, EOFError):
        await node.protocol.p2p.list_peers()
    return time.monotonic() - start


def count_left() -> float:
    """Return the bytes of payload that have left this machine, those of other programs included."""
    counters = psutil.net_io_counters()
    return PAYLOAD_SHARE * (counters.bytes_sent - ACKNOWLEDGED * counters.bytes_recv)


def choose_peers(node: DHTNode) -> list[PeerID]:
    """Return the peers to ping: initial ones, as others may invent a queue, then the same ones in a secret order."""
    peers = node.protocol.routing_table.peer_id_to_uid
    initial_ids = node.dht.initial_ids
    return sorted(peers, key=lambda it: (it not in initial_ids, hash(it)))[:PROBES]  # Python salts hashes of bytes
