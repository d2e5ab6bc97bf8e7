"""The watch over a running round, which ends it if a peer is silent or keeps others waiting (note 22)."""

import asyncio
import time
from collections import Counter
from functools import partial

import hivemind
from hivemind.averaging.allreduce import AllreduceException
from hivemind.p2p import PeerID

from swarm.allreduce import FailFastAllReduceRunner
from swarm.dht import ping_peers
from swarm.guard import MaliciousPeersError

MIN_PING_DELAY = 2.0  # seconds without data until a peer is pinged
CHECK_INTERVAL = 0.5  # seconds between two checks of a running round


class PeersSilentError(AllreduceException):
    """The round has failed because some peers send no data and do not answer pings. Argument: their ids (bytes)."""

    def __str__(self) -> str:
        return f"no answer from {', '.join(str(PeerID(peer_id)) for peer_id in self.args[0])}"


class RoundWatch:
    """The clocks of a round. `awaited` maps each peer for whose data this one waits to the number of its messages."""

    def __init__(self, runner: FailFastAllReduceRunner, dht: hivemind.DHT):
        self.runner = runner
        self.dht = dht
        self.timeouts = dht.uplink.timeouts
        self.elapsed = 0.0  # seconds
        # since the last message, by peer and its message count
        self.pauses = Counter()  # seconds
        self.pings = Counter()

    async def run(self) -> None:
        """Check the round until it ends, or end it."""
        checked_at = time.monotonic()
        max_step = CHECK_INTERVAL + 2 * self.timeouts.silence_in_round
        while not self.runner._future.done():
            await asyncio.wait({self.runner._future}, timeout=CHECK_INTERVAL)
            seconds = min(time.monotonic() - checked_at, max_step)  # a peer that was frozen blames no other for it
            checked_at = time.monotonic()
            awaited = {peer: self.runner.arrived[peer] for peer in self.runner.list_awaited_peers()}
            self.elapsed += seconds
            self.pauses.update(dict.fromkeys(awaited.items(), seconds))
            if self.runner.has_uplink_slowed():  # a new plan is faster for all peers
                self.runner.end(self.runner.peer_id, AllreduceException("this peer's uplink has become slower"))
            else:
                self._end_if_late(awaited, seconds)
                await self._end_if_silent(awaited)

    def _end_if_late(self, awaited: dict[PeerID, int], seconds: float) -> None:
        """End the round if some peers keep the others waiting, `seconds` after the last check."""
        runner = self.runner
        patience = self.timeouts.next_chunk
        allowed = patience + 2 * self.timeouts.round_seconds + runner.progress * self.timeouts.slow_round
        allowed = min(allowed, self.timeouts.longest_round)
        # a reducer that waits for a sender itself gives it up in half of that, or has more time to report it
        stalled = [peer for peer, count in awaited.items() if self.pauses[peer, count] > 2 * patience]
        late = runner.list_stragglers()
        is_first_look = self.elapsed - seconds <= runner.settings.late_after < self.elapsed
        if is_first_look and 2 * len(late) < runner.group_size:
            runner.late = late  # later, others may wait behind them
        owing = runner.sender_peer_ids if runner.tensor_part_reducer.num_parts else ()  # averages may wait for others
        stragglers = [peer for peer in stalled if peer in owing and not awaited[peer]]
        if self.elapsed > allowed:
            stragglers = stragglers or late
        # no proof: a reducer may wait for others, and after a change of address, pings use another connection
        is_late = self.elapsed > allowed + patience and 2 * len(awaited) < runner.group_size
        suspects = stalled or (list(awaited) if is_late else [])
        if 0 < 2 * len(stragglers) < runner.group_size:  # otherwise, this peer's own uplink is slow
            runner.violations |= dict.fromkeys(stragglers, "kept a round waiting")
            runner.end(stragglers[0], MaliciousPeersError(runner.violations))
        elif suspects:
            runner.end(suspects[0], AllreduceException(f"peer {suspects[0]} keeps this peer waiting"))

    async def _end_if_silent(self, awaited: dict[PeerID, int]) -> None:
        """Ping the peers that have sent nothing for a while, and end the round if some of them do not answer."""
        runner = self.runner
        delay = max(MIN_PING_DELAY, self.timeouts.round_seconds / 8)
        quiet = [it for it in awaited.items() if self.pauses[it] > delay * (1 + self.pings[it])]
        to_ping = {peer.to_bytes(): peer for peer, _ in quiet if peer not in runner.clients}
        if not to_ping or runner.cause:  # the round is over
            return
        self.pings.update((peer, awaited[peer]) for peer in to_ping.values())
        ping = partial(ping_peers, peer_ids=[*to_ping], patience=self.timeouts.silence_in_round)
        unanswered = to_ping.keys() - await self.dht.run_coroutine(ping, return_future=True)
        silent = [it for it in unanswered if runner.arrived[to_ping[it]] == awaited[to_ping[it]]]
        if silent:
            runner.silent = silent
            runner.end(PeerID(silent[0]), PeersSilentError(silent))
