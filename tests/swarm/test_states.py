"""States that come from several donors at once: all of them are used, and none of them is trusted."""

import asyncio
import contextlib
import itertools
import json
import math
import re
import threading
import time
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch
from coroutines import TimelessLoop, run_async
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.averager import CompressionInfo
from hivemind.compression import Float16Compression, NoCompression, TensorRole
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.proto.runtime_pb2 import Tensor
from hivemind.utils.serializer import MSGPackSerializer
from processes import Script, make_prefix, wait_until
from programs.peers import make_state_averager
from records import run_dhts
from swarms import start_peer

from arguments import AveragingArguments, OptimizerArguments
from experiment.optimizer import choose_optimizer
from models.state_codecs import LOAD_STATE_COMPRESSIONS, Dynamic8bit, Scaled16bit
from swarm import state_download, state_server
from swarm.config import AveragingConfig, make_config
from swarm.log_records import pack, unpack
from swarm.optimizer_state import copy_flat, list_params, list_state
from swarm.state_download import BlockDownload, Donor, DownloadProgress, StateDownload, digests_differ, group_donors
from swarm.state_server import (
    BLOCK,
    MAX_LINEAGE,
    NOTHING,
    NUM_SUMS,
    STATE,
    StateRequest,
    StateServer,
    StateSnapshot,
    digest,
)
from swarm.state_sync import StateSync
from swarm.uplink import Uplink

NUMBERS = 3 * 979_000  # and four of steps, which are zero and not sent
MBITS = 12.0  # of a donor's line: its share of 12 MB takes some seconds


class Donors:
    """Donors of a run, which start with these options, and a peer that loads their state."""

    def __init__(self, start, *each: dict):
        self.start, self.prefix, self.all = start, make_prefix(), []
        for number, options in enumerate(each):
            self.all.append(self.add(f"donor{number}", role="donor", **options))
            self.all[0].wait_for('"maddrs"')  # the others join through it, at the same time
        for donor in self.all:
            donor.wait_for('"maddrs"')
        self.ids = [donor.json_lines()[0]["maddrs"][0].rpartition("/")[2] for donor in self.all]

    def add(self, name: str = "taker", role: str = "taker", **options) -> Script:
        maddrs = self.all[0].json_lines()[0]["maddrs"] if self.all else []
        own = {"prefix": self.prefix, "maddrs": maddrs, "donors": len(self.all), "mbits": MBITS, "role": role}
        options = {**own, **options}
        return self.start(name, "-m", "tests.programs.state_peer", json.dumps(options))


def read_facts(taker) -> dict:
    taker.assert_clean_end(90)
    return taker.json_lines()[-1]


def sent(donor) -> int:
    return max((line["sent"] for line in donor.json_lines() if "sent" in line), default=0)


@pytest.mark.parametrize("codec, bytes_each", [pytest.param("none", 4, marks=pytest.mark.slow), ("8bit", 4 / 3)])
def test_state_is_loaded_from_all_donors(start, codec, bytes_each):
    donors = Donors(start, *[{"codec": codec, "mbits": 4.0}] * 3)
    facts = read_facts(donors.add(codec=codec))
    assert (facts["epoch"], facts["lineage"], facts["numbers"]) == (3, "common", NUMBERS) and len(facts["donors"]) == 3
    assert facts["kept"] == 4 * NUMBERS  # and not the memory of the download with it
    assert facts["bytes"] == pytest.approx(bytes_each * NUMBERS, rel=0.03)
    # each had its share, as the lines are alike
    shares = [sent(donor) / facts["bytes"] for donor in donors.all]
    assert sum(shares) == pytest.approx(1, abs=0.05) and min(shares) > 0.2, shares
    assert max(facts["errors"]) < (2e-6 if codec == "none" else 0.02), facts["errors"]
    assert max(facts["errors"][:4]) < 5e-4  # the parameters


def test_downloads_free_their_memory(start):
    """Issue 42: after each download, the averager's process kept a state of 7 MB, some of them for an hour."""
    donors = Donors(start, *[{"mbits": 40.0}] * 3)
    assert read_facts(donors.add(again=3))["grown"] < NUMBERS * 4 / 2


@pytest.mark.parametrize("how", ["kill", pytest.param("freeze", marks=pytest.mark.slow)])
def test_download_continues_after_donor_failure(start, how):
    donors = Donors(start, *[{"mbits": 4.0}] * 3)
    taker = donors.add()
    taker.wait_for(r'"received": [3-9]\d{6}\b')  # of 12 MB
    getattr(donors.all[1], how)()
    facts = read_facts(taker)
    assert (facts["epoch"], facts["numbers"]) == (3, NUMBERS) and max(facts["errors"]) < 2e-6
    # its blocks remain, and only blocks in transit came twice
    assert len(facts["donors"]) == 3 and sent(donors.all[1]) > 4e5 and facts["bytes"] < 1.1 * 4 * NUMBERS
    # the others may finish before a frozen donor counts as silent
    assert len(re.findall("cannot be used", taker.text)) in ([1] if how == "kill" else [0, 1])
    if how == "freeze":
        donors.all[1].thaw()


def test_known_contributors_state_wins(start):
    """Two strangers have one state under the same name; of two peers that are known to have worked, both another."""
    donors = Donors(start, {}, {"lie": 6}, {"lie": 6}, {})
    known = [donors.ids[0], donors.ids[3]]
    taker = donors.add(known=known)
    facts = read_facts(taker)
    assert max(facts["errors"]) < 2e-6 and sorted(facts["donors"]) == sorted(known)
    assert taker.text.count("differs from others' of the same epoch") == 2 and max(map(sent, donors.all[1:3])) < 1e5


@pytest.mark.slow
def test_similar_states_confirm_each_other(start):
    """Peers that do not step together have a lineage each. A fourth contributor has a later state of its own."""
    each = [{"lineage": f"group {number}", "epoch": 3 + number, "noise": 0.01} for number in range(3)]
    each.append({"lineage": "lie", "epoch": 5, "lie": 1})
    donors = Donors(start, *({"mbits": 40.0, **options} for options in each))
    facts = read_facts(donors.add(known=donors.ids, is_synchronous=False))
    assert len(facts["donors"]) == 1 and facts["donors"][0] in donors.ids[:3]
    assert (facts["epoch"], facts["lineage"]) in [(3 + number, f"group {number}") for number in range(3)]
    assert 1e-3 < max(facts["errors"]) < 0.011 and facts["numbers"] == NUMBERS


@pytest.mark.parametrize("states, chosen", [("AAAB", "AAA"), ("AABB", ""), ("ABBx", ""), ("BBBBA", "BBBB"), ("A", "A")])
def test_state_needs_more_than_half_of_the_known(states, chosen):
    """Letters are states, x is a peer without an answer. Three unknown peers with state B do not count."""
    peers, groups = [PeerID(bytes([number])) for number in range(len(states) + 3)], {}
    witnesses = peers[: len(states)]
    for peer, state in zip(peers, states + "BBB" * ("B" in states), strict=False):
        groups.setdefault(state, []).append(Donor(peer, {}, [], torch.zeros(0, 1 + NUM_SUMS)))
    groups.pop("x", None)
    agreed = state_download.select_agreed(list(groups.values()), witnesses)
    expected = [peer for peer, state in zip(witnesses, states, strict=True) if state in chosen]
    assert [[it.peer for it in group if it.peer in witnesses] for group in agreed] == [expected] * bool(chosen)
    assert len(state_download.select_agreed(list(groups.values()), [])) == len(groups)


@run_async
async def test_failed_contributors_leave_no_choice_to_others():
    """They are present, but were too slow twice. Otherwise, a stranger's state would be loaded."""
    slow, stranger = PeerID(b"slow"), PeerID(b"stranger")
    averager = SimpleNamespace(fetch_epochs=AsyncMock(return_value={slow: 5.0, stranger: 6.0}), client_mode=True)
    download = StateDownload(averager, [], contributors=[slow.to_bytes()])
    assert await download.find_peers(5) == {slow: 5.0, stranger: 6.0}
    download.failures[slow] = 2
    assert await download.find_peers(5) == {}


@run_async
async def test_contributors_that_are_clients_choose_state():
    """A stranger that accepts connections would otherwise be the only donor."""
    relay, stranger, *clients = (PeerID(name) for name in (b"relay", b"stranger", b"a", b"b", b"c"))
    fetch = AsyncMock(return_value={relay: state_server.RELAY, stranger: 1e6})
    averager = SimpleNamespace(fetch_epochs=fetch, client_mode=False, mode=AveragingMode.NODE)
    averager.dht = SimpleNamespace(initial_ids=[])
    known = [peer.to_bytes() for peer in clients[:2]]
    download = StateDownload(averager, [], contributors=known, clients=dict.fromkeys(clients, 5))
    found = await download.find_peers(5)
    assert found == {stranger: 1e6, clients[0]: 5, clients[1]: 5}
    assert {*download.witnesses} == {*clients[:2]} and {*averager.relays.values()} == {relay}
    fetch.return_value, averager.dht.initial_ids = {relay: state_server.RELAY, stranger: state_server.RELAY}, [stranger]
    assert await download.find_peers(5) == dict.fromkeys(clients, 5)
    assert {*averager.relays.values()} == {stranger}, "anyone can pose as an auxiliary peer"
    # if this peer cannot reach them, or all have failed, a stranger still has no choice
    download.failures.update(dict.fromkeys(clients[:2], state_download.MAX_FAILURES))
    assert await download.find_peers(5) == {}
    fetch.return_value, averager.client_mode = {stranger: 1e6}, True
    download.failures.clear()
    assert await download.find_peers(5) == {}


@run_async
async def test_client_that_declares_state_has_one_vote_of_clients():
    """It would otherwise be the only witness, because clients declare none."""
    behind, client, hostile = (PeerID(name) for name in (b"behind", b"client", b"hostile"))
    averager = SimpleNamespace(fetch_epochs=AsyncMock(return_value={behind: 6.0, hostile: 7.0}), client_mode=False)
    averager.mode, averager.dht = AveragingMode.NODE, SimpleNamespace(initial_ids=[])
    known = [peer.to_bytes() for peer in (client, hostile)]
    download = StateDownload(averager, [], contributors=known, clients={client: 7, hostile: 7})
    assert await download.find_peers(7) == {behind: 6.0, client: 7, hostile: 7}
    assert {*download.witnesses} == {client, hostile}


@run_async
async def test_claims_of_high_epochs_keep_no_donor_waiting(monkeypatch):
    """Without known contributors: as many untrusted peers as are asked at once claim an epoch, and describe none."""
    most, honest, ask = state_download.MAX_DONORS, PeerID(b"honest"), AsyncMock(return_value=[])
    epochs = {PeerID(bytes([number])): 1e9 for number in range(most)} | {honest: 5.0}
    monkeypatch.setattr(StateDownload, "ask_for_descriptions", ask)
    monkeypatch.setattr("swarm.state_download.DOWNLOAD_PAUSE", 0.0)
    dht = SimpleNamespace(initial_ids=[])
    averager = SimpleNamespace(fetch_epochs=AsyncMock(return_value=epochs), client_mode=True, dht=dht)
    assert await StateDownload(averager, []).fetch_state(5, 5) is None
    first, second, *_ = (call.args[0][:most] for call in ask.await_args_list)
    assert honest not in first and honest in second


def offer(copy: StateSnapshot, peer: bytes = b"a") -> Donor:
    digests = torch.frombuffer(bytearray(copy.description["digests"]), dtype=torch.float32).view(-1, 1 + NUM_SUMS)
    return Donor(PeerID(peer), copy.description, copy.infos, digests)


def describe(scale=1.0, moment=1e-3, epoch=3, steps=1e5, peer=b"a", lineage="") -> Donor:
    """Return the description of a state with one parameter, as a donor would send it."""
    generator = torch.Generator().manual_seed(0)
    param, noise = (torch.randn(512, 512, generator=generator) for _ in range(2))
    tensors = [0.02 * scale * param, torch.tensor(steps), moment * noise, moment**2 * noise**2]
    roles = {"parameter": TensorRole.PARAMETER, **dict.fromkeys(("step", "mean", "square"), TensorRole.OPTIMIZER)}
    named = zip(tensors, roles.items(), strict=True)
    infos = [CompressionInfo.from_tensor(tensor, key=key, role=role) for tensor, (key, role) in named]
    return offer(StateSnapshot(dict(epoch=epoch, lineage=lineage), tensors, infos, 60.0), peer)


def test_state_within_limit_loses_to_central_one():
    """One of four witnesses names a later epoch, and scales its parameters by about as much as the limit allows."""
    honest = [describe(scale, peer=bytes([int(100 * scale)]), lineage=f"{scale}") for scale in (1, 0.99, 1.02)]

    def select(hostile: Donor) -> list[Donor]:
        donors = [*honest, hostile]
        groups, peers = group_donors(donors), [donor.peer for donor in donors]
        return [donor for [donor] in state_download.select_agreed(groups, peers, is_synchronous=False)]

    for scale in (0.55, 1.8):
        hostile = describe(scale, epoch=5, peer=b"h", lineage="hostile")
        assert len(select(hostile)) == 4 and select(hostile)[0] is honest[0]
        assert all(0.5 < donor.measure_distance(hostile) < 1 for donor in honest)
    assert len(select(describe(2.0, epoch=5, peer=b"h", lineage="hostile"))) == 3


def test_state_of_most_donors_comes_first():
    first, other, second = donors = [describe(peer=b"a"), describe(-1.0, peer=b"b"), describe(peer=b"c")]
    assert group_donors(donors) == [[first, second], [other]]


def test_large_count_of_steps_hides_no_difference():
    """It is a number of the state as well, and once made the tolerance of all parameters larger than these."""
    state = describe()
    near, far = describe(moment=2e-3, epoch=5, steps=1e5 + 2), [describe(moment=1e-2), describe(epoch=6)]
    assert state.has_state_of(describe()) and state.measure_distance(near) == 0
    assert not state.has_state_of(describe(-1.0)) and state.measure_distance(describe(-1.0)) > 1
    assert not state.has_state_of(describe(moment=2e-3))
    assert {state.measure_distance(other) for other in [*far, describe(steps=0.0)]} == {float("inf")}


def describe_optimizer(name: str) -> tuple[StateDownload, dict]:
    """Return a download of the state of an optimizer after ten steps, and a donor's description of this state."""
    torch.manual_seed(0)
    make, _ = choose_optimizer(OptimizerArguments(optim=name, learning_rate=0.1))
    shapes = [(30, 20), (40, 20)] if name == "muon" else [(30, 20)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make([{"params": [param], "weight_decay": 0.0} for param in params])
    for _ in range(10):
        for param in params:
            param.grad = torch.randn(param.shape)
        optimizer.step()
    tensors, infos = list_state(optimizer)
    metadata = {"epoch": 3, "lineage": "a"}
    copies = copy_flat([tensor.detach() for tensor in tensors], infos)
    return StateDownload(SimpleNamespace(), infos), StateSnapshot(metadata, copies, infos, 60.0).description


def change_block(description: dict, number: int, factor: float) -> dict:
    """Return a description that names this multiple of a block's numbers."""
    digests = torch.frombuffer(bytearray(description["digests"]), dtype=torch.float32).view(-1, 1 + NUM_SUMS)
    digests[number] *= factor
    return description | {"digests": digests.numpy().tobytes()}


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_tensors_of_another_kind_are_refused(name):
    """A joining peer would fail at its next step, or when it loads the state."""
    download, description = describe_optimizer(name)
    assert download.parse_description(PeerID(b"a"), description, 0)
    first, second, *rest = description["tensors"]
    for wrong in ([first, second], [first, ["text"], *rest], [*rest, second, first], [first, 1, *rest], "text"):
        with pytest.raises(ValueError, match="other shapes or types"):
            download.parse_description(PeerID(b"a"), description | {"tensors": wrong}, 0)


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_other_value_of_optimizer_is_another_state(name):
    """Muon's matrices have one moment, and all other tensors two. The second ones are far smaller than the first."""
    download, description = describe_optimizer(name)
    honest = download.parse_description(PeerID(b"a"), description, 0)
    assert len(honest.digests) == len(download.infos) == {"adamw": 4, "muon": 6}.get(name, len(honest.digests))
    for number, info in enumerate(download.infos):
        for factor in (0.0, 3.0):
            other = download.parse_description(PeerID(b"b"), change_block(description, number, factor), 0)
            is_same = honest.has_state_of(other) and other.has_state_of(honest)
            assert not is_same, f"{factor} times {info.key}"


def test_step_of_another_group_is_another_state():
    """A peer that made the step with this group's id would be alone with its lineage."""
    first, second = describe(), describe(peer=b"b")
    first.metadata["group"], second.metadata["group"] = b"group", b"invented"
    assert not first.has_state_of(second) and first.has_state_of(first)


def make_infos(*tensors: torch.Tensor) -> list[CompressionInfo]:
    return [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]


def make_copy(*tensors: torch.Tensor, epoch: int = 3, lineage: str = "a") -> StateSnapshot:
    return StateSnapshot(dict(epoch=epoch, lineage=lineage), tensors, make_infos(*tensors), 60.0)


def test_empty_messages_are_limited():
    """Thousands of them for one block would otherwise be kept until the download ends."""
    messages, failures = [], []

    async def answer(*_):
        while len(messages) < 10_000:
            messages.append(DownloadData(tensor_part=Tensor(chunks=10**9)))
            yield messages[-1]

    averager = SimpleNamespace(request_state=answer, donor_timeout=9.0, download_progress=DownloadProgress())
    donor = offer(make_copy(torch.randn(5)))
    download = BlockDownload([donor], averager, lambda peer, error: failures.append(str(error)))
    asyncio.run(download.run(60.0))
    assert failures == ["the donor sent more data than requested"] and len(messages) < 1000


@pytest.mark.parametrize("is_log", [True, False])
def test_false_bit_names_donor_in_log(is_log):
    """There, all peers must have the same bits, or they load the state in each epoch. The description is a copy."""
    lineage, honest = "c" * MAX_LINEAGE if is_log else "a", torch.randn(4 * BLOCK)
    false = honest.clone()
    false.view(torch.int32)[::BLOCK] ^= 1
    copies, failures = [make_copy(it, lineage=lineage) for it in (honest, false)], []

    async def answer(peer: PeerID, request: StateRequest):
        await asyncio.sleep(0.05 if peer == PeerID(b"a") else 0.0)
        for message in copies[peer == PeerID(b"b")].serve(request.blocks, LOAD_STATE_COMPRESSIONS["none"], peer):
            yield message

    averager = SimpleNamespace(request_state=answer, donor_timeout=9.0, download_progress=DownloadProgress())
    averager.state_compression = LOAD_STATE_COMPRESSIONS["none"]
    donors = [offer(copies[0], name) for name in (b"a", b"b")]
    download = BlockDownload(donors, averager, lambda peer, error: failures.append((peer, str(error))))
    asyncio.run(download.run(60.0))
    assert not download.missing and download.tensors[0].equal(honest) is is_log
    assert [peer for peer, _ in failures] == [PeerID(b"b")] * is_log
    assert offer(copies[0]).has_state_of(offer(copies[1])) is not is_log


def test_busy_donor_offers_state_without_step():
    """With a step, the joining peer would take a healthy donor for a faulty one."""
    state = SimpleNamespace(lineage="state", is_step=False, used={}, last_use=time.monotonic())
    step = SimpleNamespace(**vars(state) | dict(lineage=StateServer.make_step_key("state"), is_step=True, used={}))
    donor = SimpleNamespace(lineage="newer", _lock_snapshots=asyncio.Lock(), _snapshots=[state, step])
    donor.client_mode = False
    assert asyncio.run(StateServer._find_snapshot(donor, PeerID(b"a"), 0, "")) is state
    donor._snapshots = [step, step]
    assert asyncio.run(StateServer._find_snapshot(donor, PeerID(b"a"), 0, "")) is None


def make_donor(copies: list) -> SimpleNamespace:
    """Return what `StateServer._answer` needs of a donor, which appends the kind of each copy that it makes."""
    tensors, metadata = [torch.randn(5)], MSGPackSerializer.dumps(dict(epoch=3, lineage="a"))

    async def get_state():
        copies.append(donor._wanted.value)
        await asyncio.sleep(0.05)
        return metadata, tensors, make_infos(*tensors)

    donor = SimpleNamespace(lineage="a", state_sharing_priority=3, _snapshots=[], _wanted=SimpleNamespace(value=STATE))
    donor._lock_snapshots, donor.client_mode = asyncio.Lock(), False
    donor._last_lineage, donor.make_step_key = SimpleNamespace(value=b"before"), StateServer.make_step_key
    donor.dht = SimpleNamespace(uplink=Uplink())
    donor.serializer, donor._get_current_state_from_host_process = MSGPackSerializer, get_state
    for name in ("_find_snapshot", "_drop_when_unused", "_remove"):
        setattr(donor, name, partial(getattr(StateServer, name), donor))
    return donor


async def ask(donor: SimpleNamespace, *terms, peer: bytes = b"b") -> int:
    """Return the epoch of the state or step that a donor describes."""
    answer = await anext(StateServer._answer(donor, PeerID(peer), StateRequest(*terms)))
    return MSGPackSerializer.loads(answer.metadata)["epoch"]


@run_async
async def test_copy_is_kept_if_its_peer_is_gone():
    """A peer that hangs up again and again would otherwise make its donor copy the state each time."""
    donor = make_donor(copies := [])
    for _ in range(2):
        asking = asyncio.create_task(ask(donor, 0, peer=b"a"))
        await asyncio.sleep(0.01)
        asking.cancel()
    assert await ask(donor, 0) == 3 and copies == [STATE, NOTHING]


@pytest.mark.parametrize("is_client", [False, True])
def test_request_through_relay_ends_no_other_download(is_client):
    """A client sees the relay as the caller of all requests."""
    donor, relay = make_donor([]), PeerID(b"relay")
    donor.client_mode, donor.lineage = is_client, "c"
    donor._snapshots = copies = [make_copy(torch.randn(5), lineage=lineage) for lineage in "ab"]
    for copy in copies:
        copy.taken -= 50.0
        copy.used[relay] = time.monotonic()
    assert asyncio.run(donor._find_snapshot(relay, 0, "")).lineage == ("b" if is_client else "a")
    assert [copy.lineage for copy in donor._snapshots] == (["a", "b"] if is_client else ["b", "a"])


def test_copy_of_large_state_outlives_slow_download(monkeypatch):
    """A state of 124 M parameters at 10 Mbit/s takes longer than MAX_SNAPSHOT_AGE, and was lost each time."""
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        now = runner.get_loop().time
        monkeypatch.setattr("swarm.state_server.time", SimpleNamespace(monotonic=now))
        donor, copy = make_donor([]), make_copy(torch.randn(5))
        copy.hold = 4000.0

        async def run() -> float:
            donor._snapshots.append(copy)
            dropping = asyncio.create_task(donor._drop_when_unused(copy))
            while not dropping.done():
                copy.last_request = now()
                await asyncio.sleep(10.0)
            return now() - copy.taken

        assert runner.run(run()) == pytest.approx(4000.0, abs=20.0)


@run_async
async def test_time_for_state_follows_slow_donor(monkeypatch):
    limits, numbers = [], 10**9

    async def run(self, timeout: float) -> None:
        limits.append(timeout)

    monkeypatch.setattr(BlockDownload, "run", run)
    monkeypatch.setattr(state_download, "allocate_flat", lambda _: [SimpleNamespace(nbytes=4 * numbers)])
    uplink = Uplink()
    uplink.set_bandwidth(1000, is_fixed=True)
    averager = SimpleNamespace(dht=SimpleNamespace(uplink=uplink), download_progress=DownloadProgress())
    await StateDownload(averager, []).download_from([offer(make_copy(torch.randn(5)))])
    assert limits == [8e-6 * 4 * numbers / 2]


def test_removed_copy_is_not_held_by_stream():
    """A caller that does not read would otherwise hold the copies of many epochs."""
    donor, tensor = make_donor([]), torch.randn(5)
    copy, kept = make_copy(tensor), weakref.ref(tensor)
    donor._snapshots.append(copy)
    messages = copy.serve([0, 0], NoCompression(), PeerID(b"a"))
    assert next(messages).tensor_part.buffer
    donor._remove(copy)
    del tensor
    assert kept() is None and not donor._snapshots
    with pytest.raises(IndexError):
        list(messages)


@run_async
async def test_peer_with_few_requests_does_not_hold_old_states():
    """It could otherwise keep a donor's newer states from all others, with two requests every five seconds."""
    donor, tensor = make_donor([]), torch.randn(5)
    copies = [make_copy(tensor, epoch=epoch, lineage="old") for epoch in (1, 2)]
    donor._snapshots.extend(copies)
    for copy in copies:
        list(copy.serve([0], NoCompression(), PeerID(b"a")))
    assert await ask(donor, 0) == 2
    copies[0].taken -= 70.0
    assert await ask(donor, 0) == 3


def test_invented_step_costs_no_copy():
    """A donor knows the name of the only step that it can have, and copies the gradients for no other one."""
    copies = []
    assert asyncio.run(ask(make_donor(copies), 2, StateServer.make_step_key("invented"))) == -1 and copies == []
    asyncio.run(ask(make_donor(copies), 2, StateServer.make_step_key("before")))
    assert copies == [b"before step", NOTHING]


@pytest.fixture
def averager():
    """The state averager of a lone peer in this process, with a parameter of five zeros."""
    with run_dhts([]) as (dht,):
        dht.uplink.fix_timeouts(make_config(AveragingConfig, AveragingArguments(), matchmaking_time=2.0))
        averager = make_state_averager(dht, make_prefix(), torch.zeros(5))
        yield averager
        averager.shutdown()


def test_state_epoch_matches_parameters_during_overlap(averager):
    """With --overlap, the epoch of a peer is ahead of its parameters until the round in the background has ended."""
    is_averaged = threading.Event()
    list_params(averager.optimizer)[0].grad.fill_(1.0)
    in_background = dict(delay_optimizer_step=True, delay_averaging=True, wait_for_trigger=is_averaged.wait)
    averager.step(increment_epoch=True, optimizer_step=True, **in_background)
    states = [averager.get_current_state()]
    is_averaged.set()
    wait_until(lambda: all(update.done() for update in averager.pending_updates), 20, "the step")
    states.append(averager.get_current_state())
    found = [(metadata["epoch"], tensors[0].tolist()) for metadata, tensors, _ in states]
    assert averager.local_epoch == 1 and found == [(0, [0.0] * 5), (1, [-1.0] * 5)]
    assert states[0][0]["lineage"] != states[1][0]["lineage"] == averager.lineage


def test_donor_copies_only_wanted_step(averager):
    """A request for another one would cost a copy of all gradients."""
    last_step, gradients = (3, "a", b"group"), contextlib.nullcontext([torch.ones(5)])
    averager.grad_averager = SimpleNamespace(last_step=last_step, get_tensors=lambda: gradients)
    for wanted, epoch, tensors in ((b"a step", 3, 1), (b"b step", -1, 0), (NOTHING, -1, 0)):
        averager._wanted.value = wanted
        metadata, found, _ = averager.get_current_state()
        assert metadata["epoch"] == epoch and len(found) == tensors


def test_missed_parameter_round_blocks_no_step(averager):
    """The next optimizer step waits for it, and the others go on meanwhile: here matchmaking_time is 2 s."""
    averager.set_expected_peers({b"somebody": math.inf})
    start = time.monotonic()
    averager.step(averaging_round=True, delay_averaging=False, averaging_opts=dict(timeout=120.0))
    assert time.monotonic() - start < 60


def test_donor_keeps_snapshot_during_download(start):
    """It makes ten epochs a second meanwhile, in each of which a parameter grows by 1."""
    donors = Donors(start, {"steps": True, "mbits": 40.0})
    facts = read_facts(donors.add())
    assert facts["epoch"] == 3 and max(facts["errors"]) < 2e-6
    assert len([line for line in donors.all[0].json_lines() if "sent" in line]) > 10


def test_missed_step_is_replayed_from_gradients(start):
    """Both begin with the same state, of epoch 0; one of them is there when the other has stepped."""
    prefix, waiting = make_prefix(), ("--step_seconds", 4, "--others", 1, "--others_at", 1)
    first = start_peer(start, "first", prefix, gradient=1, batch_size=128, flags=waiting)
    first.wait_for('"epoch": 1')
    late = start_peer(start, "late", prefix, gradient=4, batch_size=1, others=[first])
    late.wait_for("made the step to epoch 1")
    late.wait_for('"epoch": 2')
    first.wait_for('"epoch": 2')
    (first1, first2), (late1, late2) = ([line for line in p.json_lines() if "epoch" in line][:2] for p in (first, late))
    assert late1["parameter"] == first1["parameter"] == [-1, -1, -1] and late1["rounds"] == 0
    # and continues with the same lineage, or they would not have averaged
    assert late2["averaged_with"] == first2["averaged_with"] == 2 and late2["samples"] > 1
    samples = first2["samples"], late2["samples"]  # on a busy machine, the first one makes a second step meanwhile
    expected = -1 - (samples[0] * 1 + samples[1] * 4) / sum(samples)
    assert late2["parameter"] + first2["parameter"] == pytest.approx([expected] * 6)


def download(tensors: list[torch.Tensor], delays: dict[bytes, float]) -> tuple[BlockDownload, Counter, float]:
    """Return a download from donors with these ids and delays, the count of requests of each for each block, and the
    seconds that it takes if the processor is never busy."""
    requested, snapshot = Counter(), make_copy(*tensors)

    async def answer(peer: PeerID, request: StateRequest):
        requested.update((peer.to_bytes(), number) for number in request.blocks)
        await asyncio.sleep(delays[peer.to_bytes()])
        for message in snapshot.serve(list(request.blocks), LOAD_STATE_COMPRESSIONS["none"], peer):
            yield message

    averager = SimpleNamespace(request_state=answer, donor_timeout=9.0)
    averager.state_compression, averager.download_progress = LOAD_STATE_COMPRESSIONS["none"], DownloadProgress()
    donors = [offer(snapshot, peer) for peer in delays]
    download = BlockDownload(donors, averager, lambda peer, error: pytest.fail(repr(error)))
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        start = runner.get_loop().time()
        runner.run(download.run(60.0))
        seconds = runner.get_loop().time() - start
    assert not download.missing and all(map(torch.equal, download.tensors, tensors))
    return download, requested, seconds


def test_blocks_arrive_unless_they_are_zeros():
    torch.manual_seed(0)
    tensors = [torch.randn(2, BLOCK + 5), torch.tensor(3.0), torch.zeros(BLOCK + 5), torch.zeros(0)]
    tensors.append(torch.randint(1, 256, (BLOCK + 1,), dtype=torch.uint8))
    finished, requested, _ = download(tensors, {b"a": 0.0})
    assert requested == Counter((b"a", number) for number in (0, 1, 2, 3, 6, 7))
    assert [(it.shape, it.dtype) for it in finished.tensors] == [(it.shape, it.dtype) for it in tensors]
    # those of a type share their memory
    assert len({tensor.untyped_storage().data_ptr() for tensor in finished.tensors}) == 2


def test_silent_donor_does_not_delay_end():
    """The others fetch its blocks once nothing else is left, and it stays a donor."""
    torch.manual_seed(0)
    finished, requested, seconds = download([torch.randn(20, BLOCK)], {b"a": 0.01, b"b": 60.0, b"c": 0.01})
    assert seconds < state_download.SILENT_DONOR_TIMEOUT and len(finished.donors) == 3
    assert finished.progress.elements == 20 * BLOCK and max(requested.values()) == 1


def test_changed_numbers_change_digest():
    torch.manual_seed(0)
    numbers = torch.randn(BLOCK)
    assert not digests_differ(digest(numbers), digest(numbers * (1 + 0.02 * torch.randn(BLOCK))))
    reordered = (numbers[torch.randperm(BLOCK)], numbers.flip(0), numbers.roll(1))
    changes = (-numbers, 1.3 * numbers, numbers + 0.5, numbers * float("nan"), 0 * numbers, numbers.abs())
    for changed in [*map(digest, changes + reordered), torch.full((1 + NUM_SUMS,), 1e38)]:
        assert digests_differ(digest(numbers), changed) and digests_differ(changed, digest(numbers))


def test_invalid_requests_are_refused():
    for request in ([5, "", [], b""], [5, "a", [0, 7], b"client"]):
        assert pack(unpack(StateRequest, MSGPackSerializer.dumps(request))) == MSGPackSerializer.dumps(request)
    blocks = (list(range(state_server.MAX_BLOCKS + 1)), [True], [1.5], [[1]])
    wrong = ([5, 7, [1], b""], [5, "a", [], "client"], [5], [None], {"epoch": 5}, 7)
    for request in (*([5, "a", numbers, b""] for numbers in blocks), *wrong):
        with pytest.raises(ValueError):
            unpack(StateRequest, MSGPackSerializer.dumps(request))
    for data in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"GET / HTTP/1.1", bytes(100)):
        with pytest.raises(ValueError):
            unpack(StateRequest, data)


def test_state_of_zeros_is_compared_with_swarm():
    """Its download takes no bytes."""
    tracker = SimpleNamespace(refresh_now=lambda: None, view=SimpleNamespace(epoch=7))
    averager = SimpleNamespace(local_epoch=5, download_progress=DownloadProgress())
    sync = StateSync(tracker, averager)
    sync.check_staleness()
    assert sync.backoff.min_epoch == 8


@pytest.mark.parametrize(
    "epochs, is_synchronous, ahead",
    [((6, 6, 5), True, "ab"), ((6, 6, 6), True, ""), ((6, 5), False, ""), ((6, 6, 6, 6, 6, 6, 5), True, "")],
)
def test_peers_ahead_without_common_state_do_not_stop_others(epochs, is_synchronous, ahead):
    """A hostile peer has made a step with one peer alone, and serves another state than it."""
    records = {bytes([97 + i]): SimpleNamespace(epoch=epoch) for i, epoch in enumerate(epochs)}
    missed = []
    trust = SimpleNamespace(select_known=dict, count_missed_round=lambda peer, _: missed.append(peer.decode()))
    tracker = SimpleNamespace(trust=trust, present=records, ping_quiet_peers=lambda _: None)
    sync = StateSync(tracker, SimpleNamespace(local_epoch=5))
    sync.download = lambda *_, **__: None
    assert sync.load(6, (), is_synchronous, can_replay=False) is None
    assert "".join(missed) == ahead and sync.backoff.not_before > time.monotonic()


def digest_all(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([digest(block) for block in tensor.view(-1).split(BLOCK)])


def round_trip(codec, tensor: torch.Tensor, role: TensorRole = TensorRole.OPTIMIZER) -> torch.Tensor:
    info = CompressionInfo.from_tensor(tensor, key=0, role=role)
    while hasattr(codec, "choose_compression"):
        codec = codec.choose_compression(info)
    return codec.extract(codec.compress(tensor, info))


def test_missed_step_transfers_8_bit_gradients():
    torch.manual_seed(0)
    gradient = torch.randn(300, 1000) * torch.logspace(-6, 0, 300)[:, None]  # of layers that learn at different speeds
    taken = round_trip(LOAD_STATE_COMPRESSIONS["8bit"], gradient, TensorRole.GRADIENT)
    assert (taken - gradient).norm() < 0.02 * gradient.norm()
    assert torch.nn.functional.cosine_similarity(taken[0], gradient[0], dim=0) > 0.999


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8])
def test_state_codec_float16_parameters(scale):
    """Also biases that are near 0, as at the start of training."""
    torch.manual_seed(0)
    for numbers in (scale * torch.randn(10_000), torch.zeros(300)):
        taken = round_trip(LOAD_STATE_COMPRESSIONS["float16"], numbers, TensorRole.PARAMETER)
        assert torch.allclose(taken, numbers, rtol=2**-11, atol=2**-24 * numbers.abs().max().item())
        assert not digests_differ(digest(numbers), digest(taken))
    numbers[3] = float("nan")
    assert not round_trip(Scaled16bit(), numbers).isfinite().all()


@pytest.mark.parametrize("decades", [0, 2, 4])
def test_state_codec_8bit_moments(decades):
    """In hivemind's codecs, second moments become 0 where first ones do not, and the step leaps."""
    torch.manual_seed(0)
    mean, square = torch.zeros(100, 1000), torch.zeros(100, 1000)
    scale = 1e-4 * 10.0 ** torch.empty(100, 1000).uniform_(-decades, 0)
    for _ in range(50):
        gradient = torch.randn(100, 1000) * scale
        mean.lerp_(gradient, 0.1)
        square.lerp_(gradient.square(), 0.001)

    def largest_change(codec) -> float:
        arrived = [round_trip(codec, moment) for moment in (mean, square)]
        step, taken = (m / (s.sqrt() + 1e-12) for m, s in ((mean, square), arrived))
        return ((taken - step).abs().max() / step.abs().max()).item()

    codec = LOAD_STATE_COMPRESSIONS["8bit"]
    for moment in (mean, square):
        taken = round_trip(codec, moment)
        assert taken.shape == moment.shape and taken.dtype == torch.float32
        assert ((taken - moment).norm() / moment.norm()).item() < 0.02
        assert not digests_differ(digest_all(moment), digest_all(taken))
    assert (taken > 0).all() and largest_change(codec) < 0.5 and largest_change(Float16Compression()) > 100


def test_state_codec_keeps_small_tensors_exact():
    codec = LOAD_STATE_COMPRESSIONS["8bit"]
    for tensor in (torch.randint(0, 256, (20, 20), dtype=torch.uint8), torch.randn(300), torch.tensor(1234567.0)):
        taken = round_trip(codec, tensor)
        assert taken.dtype == tensor.dtype and torch.equal(taken, tensor)
    zeros = torch.zeros(20, 20)
    assert torch.equal(round_trip(codec, zeros), zeros)
    assert not round_trip(codec, torch.full((20, 20), float("nan"))).isfinite().any()


def test_state_codec_refuses_invalid_bytes():
    for codec in (Dynamic8bit(), Scaled16bit()):
        message = codec.compress(torch.ones(300), None)
        for data in (b"", message.buffer[:-1], message.buffer + b"1"):
            message.buffer = data
            with pytest.raises(ValueError):
                codec.extract(message)


def test_idle_peers_lose_their_places(monkeypatch):
    """Nine keys that fetch a block every 2.5 s keep no new peer out, and do not drive out one that fetches."""
    server, now = SimpleNamespace(mode=AveragingMode.NODE, _served={}), 0.0
    monkeypatch.setattr("swarm.state_server.time", SimpleNamespace(monotonic=lambda: now))
    admitted = []
    for step in range(240):
        now = step / 4
        if step % 10 == 0:
            for number in range(9):
                StateServer._admit(server, f"idle{number}", 1)
        assert StateServer._admit(server, "asks for a description", 0)
        if now > 10:
            admitted.append(StateServer._admit(server, "new", 20))
    assert len(server._served) == state_server.MAX_SERVED_PEERS
    assert all(admitted[admitted.index(True) :]) and admitted.index(True) < 4 * state_server.IN_USE


def test_declaration_never_expires(monkeypatch):
    """Each store takes a sixth of the period, as with dead peers in the DHT."""
    period, stored = 30.0, []

    async def store(_, expiration_time: float, **entry) -> None:
        await asyncio.sleep(period / 6)
        stored.append((loop.time(), expiration_time))

    async def declare() -> None:
        tasks = StateServer._declare_for_download_periodically(averager), StateServer._renew_declaration(averager)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*tasks), 5 * period)

    matchmaking = SimpleNamespace(group_key_manager=SimpleNamespace(prefix="run"))
    peer = dict(_matchmaking=matchmaking, peer_id=PeerID(b"a"), dht=SimpleNamespace(store=store))
    state = dict(allow_state_sharing=True, state_sharing_priority=3.0, declare_state_period=period)
    averager = SimpleNamespace(**peer, **state, _state_updated=asyncio.Event())
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        loop = runner.get_loop()
        monkeypatch.setattr("hivemind.averaging.averager.get_dht_time", loop.time)
        runner.run(declare())
    assert len(stored) >= 5 and all(at < expiration for (_, expiration), (at, _) in itertools.pairwise(stored))
