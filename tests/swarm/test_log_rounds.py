"""The search for the log of the others, and the choice between two logs."""

import shutil
import threading
import time
from dataclasses import replace
from functools import partial

import torch
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from processes import wait_until
from records import make_tracker, run_dhts, run_trackers

from swarm.aggregation import Numbers
from swarm.exchange import BlobStore, Exchange
from swarm.log import Action, make_genesis
from swarm.log_records import pack
from swarm.log_rounds import MAX_HELPERS, NEWEST, Envelope, Identity, LogRounds
from swarm.sparse import TopKCompression
from swarm.state_server import RELAY

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


def test_peers_that_refuse_count_against_claim(tmp_path):
    """Strangers may have asked them so often that they answer no other one; then one claim must not decide."""
    with run_dhts(*[[]] * 4) as (own, *others):
        peers = [dht.peer_id.to_bytes() for dht in others]
        state = make_genesis("run", 3, bytes(32), tuple(peers[:1]))
        tracker = make_tracker(own, "run", 64)
        rounds = LogRounds(tracker, Numbers([torch.zeros(9)]), TopKCompression(0.03), tmp_path)

        def answer(is_liar: bool, *_) -> bytes:
            if not is_liar:
                raise ValueError("too many requests")
            return pack(Envelope(state.head, 3, state=pack(state)))

        exchanges = [
            Exchange(dht, "run", BlobStore(tmp_path / f"{dht.peer_id}", 10**6), 1, partial(answer, dht is others[0]))
            for dht in others
        ]
        assert rounds.find(peers[:1], NEWEST) == (state.head, state)
        assert rounds.find(peers, NEWEST) is None
        for part in (rounds, *exchanges, tracker):
            part.shutdown()


def test_vote_is_sent_only_if_on_disk(tmp_path):
    """The peer could otherwise be killed, and vote for another list, which proves a lie."""
    with run_dhts([], []) as (dht, other):
        tracker = make_tracker(dht, "run", 64)
        rounds = LogRounds(tracker, Numbers([torch.zeros(9)]), TopKCompression(0.03), tmp_path)
        own, peer = dht.peer_id.to_bytes(), other.peer_id.to_bytes()
        state = make_genesis("run", 3, bytes(32), (own, peer))
        vote, status = (Action("send", data, (peer,)) for data in (b"vote", b"status"))
        with rounds._lock:  # its thread waits
            rounds.open(state.head, state, is_new=True)
            (tmp_path / "votes").unlink()
            (tmp_path / "votes" / "in the way").mkdir(parents=True)
            rounds._perform([Action("save", b"memory"), vote])
            rounds._perform([status])
            assert not rounds._outbox[peer]
            shutil.rmtree(tmp_path / "votes")
            rounds._perform([Action("save", b"memory"), vote])
            assert [*rounds._outbox[peer]] == [b"vote"] and (tmp_path / "votes").read_bytes() == state.head + b"memory"
        for part in (rounds, tracker):
            part.shutdown()


def test_only_trusted_auxiliary_peers_are_fast_sources(tmp_path):
    """A source that fails costs time, and any peer can call itself an auxiliary peer with a fast uplink."""
    with run_dhts([], []) as (first, dht):
        tracker = make_tracker(dht, "run", 64)
        rounds = LogRounds(tracker, Numbers([torch.zeros(9)]), TopKCompression(0.03), tmp_path)
        assert rounds.trusted == {first.peer_id.to_bytes()}
        *strangers, trusted = [bytes([number]) * len(rounds.identity.peer) for number in range(10)]
        rounds.trusted = {trusted}
        declared = {peer: ValueWithExpiration(RELAY, get_dht_time() + 60) for peer in (*strangers, trusted)}
        with rounds._lock:
            rounds._take_helpers(ValueWithExpiration(declared, get_dht_time() + 60))
            for peer in (*strangers, trusted):
                rounds._read(peer, Envelope(b"", 0, mbits=100.0))
            rounds._take_helpers(None)  # no answer
            assert len(rounds.helpers) == MAX_HELPERS and rounds.helpers.pop(trusted) == 100.0
            assert set(rounds.helpers.values()) == {0.0}
        for part in (rounds, tracker):
            part.shutdown()


def test_signature_has_one_spelling():
    """A leader could otherwise change the offers of others, which their owners would then count twice."""
    key = RSAPrivateKey()
    identity, signature = Identity(key), key.sign(b"data")
    assert identity.verify(identity.peer, b"data", signature)
    for other in (b"!" + signature, signature + b"\n", b"?", b""):
        assert identity.verify(identity.peer, b"data", other) is False
