"""Bytes from the network, of every kind that hypothesis makes: they are parsed, or refused in the way that the callers
expect, and no other exception is raised. Each test takes a second or two."""

import contextlib
import dataclasses
import json

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.schema import SchemaValidator
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.optim.progress_tracker import TrainingProgressSchema
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.v1 import ValidationError
from records import make_metrics

import training.page_client
from common.console import UserError
from swarm.allreduce import PLAUSIBLE_MBITS
from swarm.contract import RunContract, RunSchema
from swarm.log_records import list_fields, unpack
from swarm.matchmaking import parse_gathered
from swarm.state_server import MAX_BLOCKS, StateRequest
from training.settings import check_multiaddrs
from utils import MAX_EPOCH_GAP, LocalMetrics, filter_plausible_records, find_peer_id, make_validators

FAST = settings(max_examples=100, deadline=None, database=None)

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats() | st.sampled_from([0, -1, 10**9, 10**15, 1e300])
PLAIN = st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.binary(max_size=40)
NAMES = st.text(max_size=8)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4))
BYTES = st.binary(max_size=200) | VALUES.map(MSGPackSerializer.dumps)
# hivemind's own types: a dictionary of records, a tuple
BYTES |= st.builds(lambda kind, data: b"\xc7" + bytes([len(data) % 256, kind]) + data, st.integers(0, 127), BYTES)


def vary(record: dict) -> st.SearchStrategy[dict]:
    """Return the record with random, missing or additional fields."""
    fields = st.sampled_from([*record, "more"])
    changed = st.dictionaries(fields, VALUES, max_size=2).map(lambda values: {**record, **values})
    return changed | fields.map(lambda name: {key: value for key, value in record.items() if key != name})


METRICS = make_metrics().dict()
EVALUATED = METRICS | {"evaluation": dict(epoch=1, loss=1.0, accuracy=0.5, samples=1)}
PROGRESS = dict(epoch=1, samples_accumulated=1, samples_per_second=1.0, time=1.0, client_mode=False)
RUN = dict(joined=1.0, contract={"name": "text"})
VARIED = vary(METRICS) | vary(EVALUATED) | vary(RUN) | st.builds(dict, st.just(RUN), contract=VALUES)


@pytest.fixture(scope="module")
def signer() -> tuple[CompositeValidator, bytes]:
    validators, public_key = make_validators("run", RSAPrivateKey(), RunSchema)
    # as hivemind's tracker adds it
    return CompositeValidator([*validators, SchemaValidator(TrainingProgressSchema, prefix="run")]), public_key


@FAST
@given(key=BYTES, subkey=BYTES, value=BYTES, expires=st.floats() | st.just(get_dht_time() + 60))
def test_records_of_other_types_are_refused(signer, key, subkey, value, expires):
    validator, public_key = signer
    for own_subkey in (subkey, MSGPackSerializer.dumps(public_key)):
        assert validator.validate(DHTRecord(key, own_subkey, value, expires)) is False  # and no exception


@FAST
@given(
    name=st.sampled_from(["metrics", "run", "progress", "group"]),
    value=VARIED | vary(PROGRESS) | VALUES,
    is_id=st.booleans(),
    peer_id=st.booleans() | st.binary(max_size=40),
)
def test_signed_record_fields_are_bounded(signer, name, value, is_id, peer_id):
    for schema in (LocalMetrics, RunContract):
        with contextlib.suppress(ValidationError, TypeError):
            schema.parse_obj(value)
    validator, public_key = signer
    own_id = find_peer_id(public_key)
    if isinstance(value, dict) and peer_id is not False:
        value = value | {"peer_id": own_id if peer_id is True else peer_id}
    subkey = MSGPackSerializer.dumps(own_id if is_id else public_key)
    key = DHTID.generate(f"run_{name}").to_bytes()
    record = DHTRecord(key, subkey, MSGPackSerializer.dumps(value), get_dht_time() + 60)
    signed = dataclasses.replace(record, value=validator.sign_value(record))
    if not validator.validate(signed):
        return
    assert validator.strip_value(signed) == record.value
    assert not isinstance(value, dict) or value.get("peer_id", own_id) == own_id
    if name == "metrics":
        assert not is_id and 0 <= LocalMetrics.parse_obj(value).epoch <= 10**9
    if name == "run" and value is not None:
        assert not is_id and len(RunContract.parse_obj(value).contract) <= 32
    # a changed bit makes the signature invalid
    assert not validator.validate(dataclasses.replace(signed, value=signed.value[:-1] + b"\0"))


GROUP_DATA = st.tuples(NUMBERS | st.none(), VALUES, BYTES | VALUES)


@FAST
@given(data=BYTES, parts=GROUP_DATA, blocks=st.lists(NUMBERS, max_size=9), client=st.binary(max_size=9) | NUMBERS)
def test_messages_of_peers_are_bounded(data, parts, blocks, client):
    for message in (data, MSGPackSerializer.dumps(parts), MSGPackSerializer.dumps(list(parts))):
        with contextlib.suppress(ValueError):
            _, _, bandwidth = parse_gathered(message)
            assert bandwidth is None or PLAUSIBLE_MBITS[0] <= bandwidth <= PLAUSIBLE_MBITS[1]
    for message in (data, MSGPackSerializer.dumps([5, "a", blocks, client])):
        with contextlib.suppress(ValueError):
            request = unpack(StateRequest, message)
            assert [type(part) for part in list_fields(request)] == [int, str, tuple, bytes]
            assert len(request.blocks) <= MAX_BLOCKS and all(type(number) is int for number in request.blocks)


@FAST
@given(st.lists(st.integers(0, 10**9) | st.integers(0, 3000), max_size=30), st.none() | st.integers(0, 10**9))
def test_believable_records_are_consistent(epochs, last_epoch):
    records = [(str(i), LocalMetrics.construct(epoch=epoch)) for i, epoch in enumerate(epochs)]
    chosen = sorted(metrics.epoch for _, metrics in filter_plausible_records(records, last_epoch))
    assert bool(chosen) == bool(epochs)
    assert all(b - a <= MAX_EPOCH_GAP for a, b in zip(chosen, chosen[1:], strict=False))
    assert not any(abs(epoch - chosen[0]) <= MAX_EPOCH_GAP and epoch not in chosen for epoch in epochs)


MADDRS = st.sampled_from(["/ip4/1.2.3.4/tcp/80/p2p/Qm", "/p2p/", "/ip4/1.2.3.4/tcp/x", "/ip6/::/tcp/0"]) | VALUES
FIELDS = dict(experiment_prefix=st.sampled_from(["run", "other"]), multiaddrs=st.lists(MADDRS, max_size=4) | VALUES)
PAGES = VALUES | st.fixed_dictionaries(FIELDS)


@FAST
@given(body=st.binary(max_size=200) | PAGES.map(lambda page: json.dumps(page, default=str).encode()))
def test_status_of_others_is_read_or_refused(body):
    async def answer(host, port):
        return body, "1.2.3.4"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.page_client, "fetch_page", answer)
        with contextlib.suppress(UserError):
            maddrs = training.page_client.find_maddrs("example.org:80", "run")
            check_multiaddrs("--initial_peers", maddrs, needs_peer_id=True)
            assert all(maddr.startswith("/") for maddr in maddrs)
