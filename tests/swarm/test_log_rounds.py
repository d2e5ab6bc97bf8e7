"""The search for the log of the others, and the choice between two logs."""

import threading
import time
from dataclasses import replace
from functools import partial

import torch
from hivemind.p2p import PeerID
from processes import wait_until
from records import make_tracker, run_dhts, run_trackers

from swarm.aggregation import Numbers
from swarm.exchange import BlobStore, Exchange
from swarm.log import make_genesis
from swarm.log_records import pack
from swarm.log_rounds import NEWEST, Envelope, LogRounds
from swarm.sparse import TopKCompression

TIMEOUT = 30.0  # seconds for an answer


def test_find_does_not_wait_for_silent_peer(tmp_path):
    """If three of four peers agree, the fourth one cannot change the choice."""
    is_over = threading.Event()
    with run_dhts(*[[]] * 5) as (own, *others):
        peers = [dht.peer_id.to_bytes() for dht in others]
        state = make_genesis("run", 3, bytes(32), tuple(peers))
        tracker = make_tracker(own, "run", 64)
        own.uplink.fix_timeouts(replace(tracker.averaging, request_timeout=TIMEOUT))
        rounds = LogRounds(tracker, Numbers([torch.zeros(9)]), TopKCompression(0.03), tmp_path)

        def answer(is_silent: bool, _: PeerID, message: bytes) -> bytes:
            if is_silent:
                is_over.wait(2 * TIMEOUT)
            return pack(Envelope(state.head, 3, state=pack(state)))

        exchanges = [
            Exchange(dht, "run", BlobStore(tmp_path / f"{dht.peer_id}", 10**6), 1, answer_as)
            for dht, answer_as in zip(others, [partial(answer, is_silent) for is_silent in (0, 0, 0, 1)], strict=True)
        ]
        started = time.monotonic()
        assert rounds.find(peers, NEWEST) == (state.head, state)
        assert time.monotonic() - started < TIMEOUT
        is_over.set()
        for part in (rounds, *exchanges, tracker):
            part.shutdown()


def test_one_claim_closes_no_new_log(tmp_path):
    """A log without a commit ends only if most known peers have another one."""
    other_log = bytes(range(32))
    with run_dhts(*[[]] * 4) as dhts, run_trackers(dhts, 64) as (tracker, *others):
        own, *peers = [dht.peer_id.to_bytes() for dht in dhts]
        for other in others:
            other.report_local_progress(3, 8)
        tracker.trust.partners |= set(peers)  # they have averaged with this peer
        tracker.report_local_progress(3, 8)
        wait_until(lambda: tracker.refresh_now() or len(tracker.present) == 3, 30, "the others' records")
        rounds = LogRounds(tracker, Numbers([torch.zeros(9)]), TopKCompression(0.03), tmp_path)
        state = make_genesis(tracker.prefix, 3, bytes(32), (own, *peers))
        rounds.open(state.head, state, is_new=True)
        exchanges = [
            Exchange(dht, tracker.prefix, BlobStore(tmp_path / f"{dht.peer_id}", 10**6), 1, lambda *_: b"")
            for dht in dhts[1:]
        ]
        results = []
        for exchange in exchanges:
            exchange.send(PeerID(own), pack(Envelope(other_log, 3))).result(TIMEOUT)
            results.append(rounds.has_fewer_peers())
        assert results == [False, False, True]
        for part in (rounds, *exchanges):
            part.shutdown()
