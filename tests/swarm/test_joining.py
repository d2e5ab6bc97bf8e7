"""The way into the network: the public address, the bandwidth."""

import asyncio
import contextlib
import json
import math
import socket
from collections import Counter
from types import SimpleNamespace

import pytest
from coroutines import TimelessLoop
from file_server import send, serve
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PDaemonError, PeerID
from processes import LOOPBACK, make_prefix, run_python

from arguments import SwarmArguments
from common.addresses import find_used_port, make_host_maddrs
from common.console import UserError
from swarm import reachability
from swarm.addresses import add_quic, get_host_port, get_peer_id, list_shareable_maddrs
from swarm.config import SwarmConfig
from swarm.joining import explain_failed_start
from swarm.reachability import DIAL_BACK, MAX_CALLERS, MAX_DIALS, register_dial_back_handler
from training.settings import announce_public_address, check_multiaddrs

# A peer that measures its bandwidth, as trainers and auxiliary peers do at their start.
MEASURER = """
import json, sys
from swarm.config import SwarmConfig
from swarm.joining import Swarm
from common.console import clean_end

with clean_end():
    swarm = Swarm.join(SwarmConfig(sys.argv[1], sys.argv[3:], host_maddrs=[sys.argv[2]]))
    print(json.dumps(swarm.measure_bandwidth(None)), flush=True)
    swarm.leave()
"""


# A trainer's way to its identity; its folder may be a copy of another peer's.
KEEPER = """
import json, sys, threading
from pathlib import Path
from swarm.config import SwarmConfig
from swarm.identity import keep_identity, make_identity
from swarm.joining import Swarm
from common.console import clean_end

with clean_end():
    _, prefix, path, *peers = sys.argv
    config = SwarmConfig(prefix, peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    membership = make_identity(config, Path(path))
    swarm = Swarm.join(config, membership)
    keep_identity(config, Path(path))
    print(json.dumps({"maddrs": swarm.list_maddrs()}), flush=True)
    if not peers:
        threading.Event().wait()
    swarm.leave()
"""


def test_copied_key_of_running_peer_is_refused(start, tmp_path):
    prefix, key, copied = make_prefix(), tmp_path / "signing_key", tmp_path / "copied_key"
    first = start("first", "-c", KEEPER, prefix, key)
    first.wait_for('"maddrs"')
    addresses = first.json_lines()[0]["maddrs"]
    copied.write_bytes(key.read_bytes())
    result = run_python("-c", KEEPER, prefix, copied, *addresses, expect=2)
    assert "a running peer" in result.stderr and "signing_key" in result.stderr
    # one dead address of two does not stop the start
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{PeerID(bytes([0x12, 0x20]) + bytes(32))}"
    assert explain_failed_start(SwarmConfig(prefix, [dead, *addresses]), "", None) is None
    assert dead in explain_failed_start(SwarmConfig(prefix, [dead]), "", None)


def test_used_tcp_port_is_refused():
    """p2pd would start with QUIC alone, and announce the TCP port of another program."""
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        place = f"/ip4/0.0.0.0/tcp/{port}"
        result = run_python("-c", MEASURER, make_prefix(), place, expect=2)
        assert f"--host_maddrs {place}: the port is in use" in result.stderr
        assert find_used_port(["/ip4/0.0.0.0/tcp/0", place]) == place
        for free in (
            "/ip4/0.0.0.0/tcp/0",
            place.replace("tcp", "udp"),
            f"/dns4/localhost/tcp/{port}",
            "/ip4/1.1.1.1/tcp/1",
        ):
            assert find_used_port([free]) is None
    # a connection of an earlier process, which is about to end
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()
        place = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
        assert find_used_port([place]) == place
    assert find_used_port([place]) is None


def test_public_address_uses_listening_port():
    with serve(send(b"HTTP/1.0 200 OK\r\n\r\n203.0.113.7\n")) as url:
        maddrs = ["/ip4/0.0.0.0/tcp/31337", "/ip4/0.0.0.0/udp/31338/quic-v1", "/ip4/127.0.0.1/udp/0/quic-v1"]
        fixed = announce_public_address(SwarmArguments("run", host_maddrs=maddrs), url)
        free = announce_public_address(SwarmArguments("run", host_maddrs=make_host_maddrs("[::]:*")), url)
    assert fixed.announce_maddrs == ["/ip4/203.0.113.7/tcp/31337", "/ip4/203.0.113.7/udp/31338/quic-v1"]
    assert fixed.host_maddrs == maddrs
    [announced] = free.announce_maddrs
    listened = {protocol: port for protocol, _, port in map(get_host_port, free.host_maddrs)}
    assert get_host_port(announced) == ("ip4", "203.0.113.7", listened["ip4"]) and listened["ip4"] > 0
    assert listened["ip6"] == 0  # nothing is announced of it


@pytest.mark.parametrize("text", ["<html>you are 203.0.113.7</html>", "", "2001:db8::1"])
def test_unusable_public_address_is_one_line(text):
    with serve(send(b"HTTP/1.0 200 OK\r\n\r\n" + text.encode())) as url, pytest.raises(UserError) as error:
        announce_public_address(SwarmArguments("run"), url)
    [line] = str(error.value).splitlines()
    assert "--use_google_dns" in line


@pytest.mark.parametrize("maddr", ["/ip4/203.0.113.7", "/dns4/example.org/tcp", "203.0.113.7:31337"])
def test_address_without_a_port_is_one_line(maddr):
    check_multiaddrs("--announce_maddrs", ["/ip4/203.0.113.7/tcp/31337", "/ip6/::1/udp/31337/quic"])
    with pytest.raises(UserError, match="--announce_maddrs '.*' is not an address such as /ip4/203.0.113.1/tcp/31337 "):
        check_multiaddrs("--announce_maddrs", [maddr])
    with pytest.raises(UserError, match="is not an address such as /ip4/203.0.113.1/tcp/31337/p2p/"):
        check_multiaddrs("--initial_peers", ["/ip4/127.0.0.1/tcp/31337"], needs_peer_id=True)


def test_quic_is_added_at_tcp_ports():
    local, public, own = "/ip4/127.0.0.1/tcp/1", "/ip4/203.0.113.7/tcp/2/p2p/A", "/dns4/a.org/udp/3/quic-v1"
    quic = "/ip4/203.0.113.7/udp/2/quic-v1/p2p/A"
    assert add_quic([local, public, "/p2p/B"]) == [local, public, "/p2p/B", quic]
    assert add_quic([public, own]) == [public, own]
    assert list_shareable_maddrs([local, quic, public, own]) == [own, public]
    assert [get_host_port(maddr)[2] for maddr in (public, quic)] == [2, 2]


def test_relayed_initial_peer_is_trusted_itself():
    """Not its relay, which any peer may be."""
    relay, peer = (PeerID(b"\x12\x20" + bytes([number]) * 32) for number in (1, 2))
    maddr = f"/ip4/203.0.113.7/tcp/1/p2p/{relay}/p2p-circuit/p2p/{peer}"
    assert get_peer_id(maddr) == peer
    check_multiaddrs("--initial_peers", [maddr], needs_peer_id=True)
    with pytest.raises(UserError):
        check_multiaddrs("--initial_peers", ["/ip4/203.0.113.7/tcp/1"], needs_peer_id=True)


@pytest.mark.parametrize(
    "answer, expected",
    [
        ({"seen_at": ["203.0.113.7"], "reached": True}, [("203.0.113.7", True)]),
        ({"seen_at": ["203.0.113.7", "::1"], "reached": 1}, [("203.0.113.7", False)]),
        ({"seen_at": ["203.0.113.7"]}, []),
        ({"seen_at": [], "reached": False}, []),
        ({"seen_at": ["nowhere"], "reached": True}, []),
        ({"reached": True}, []),
        ([], []),
        (100_000 * b"[", []),
        (DecodeError("bytes that are no message"), []),
    ],
)
def test_answers_of_other_peers_about_reachability_are_checked(answer, expected):
    async def call(*_) -> BytesValue:
        if isinstance(answer, Exception):
            raise answer
        return BytesValue(value=answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    dht, node = SimpleNamespace(initial_ids=["peer"]), SimpleNamespace(p2p=SimpleNamespace(call_protobuf_handler=call))
    assert asyncio.run(reachability.ask_to_dial_back([31337], dht, node)) == expected


def test_dials_back_are_limited(monkeypatch):
    """To two daemons at once, and to a queue with each caller once."""
    dialled, handlers = Counter(), {}

    async def find_connections(*_) -> list[str]:
        return ["/ip4/203.0.113.7/tcp/31337"]

    async def dial(peer: str, *_) -> None:
        dialled["now"] += 1
        dialled["most"] = max(dialled["now"], dialled["most"])
        await asyncio.sleep(0.01)
        dialled["now"] -= 1
        dialled[peer] += 1

    async def add_handler(name: str, handler, _) -> None:
        handlers[name] = handler

    async def call_back(*callers: str) -> list:
        calls = (handlers[DIAL_BACK](BytesValue(value=bytes(2)), SimpleNamespace(remote_id=peer)) for peer in callers)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def run() -> None:
        await register_dial_back_handler(None, SimpleNamespace(p2p=SimpleNamespace(add_protobuf_handler=add_handler)))
        callers = [f"peer {number}" for number in range(MAX_CALLERS)]
        *answers, repeated, last = await call_back(*callers, callers[0], "late")
        assert all(json.loads(answer.value)["reached"] for answer in answers)
        # not tested, so these become clients
        assert not any(json.loads(answer.value)["reached"] for answer in (repeated, last))
        assert dialled["most"] == MAX_DIALS and sum(dialled[peer] for peer in callers) == MAX_CALLERS
        assert json.loads((await call_back("late"))[0].value)["reached"]
        for number in range(5):  # a caller that breaks off leaves its place to no other
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call_back(f"hasty {number}"), 0.001)
        await asyncio.sleep(0.1)
        assert dialled["most"] == MAX_DIALS and dialled["now"] == 0 and dialled["hasty 4"] == 1

    monkeypatch.setattr("swarm.reachability.find_connections", find_connections)
    monkeypatch.setattr("swarm.reachability.dial", dial)
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    "own, seen_at, expected",
    [
        (["/ip4/192.168.1.5"], "2a00::1", False),
        (["/ip4/198.41.0.4"], "2a00::1", None),
        (["/ip4/192.168.1.5", "/ip6/2a00::5"], "198.41.0.4", False),
    ],
)
def test_address_of_other_ip_version_is_not_tested(own, seen_at, expected):
    """A peer that listens on IPv4 alone is seen at its IPv6 address, where no port of it is open."""
    visible = [f"{place}/tcp/31337" for place in own]
    dht = SimpleNamespace(get_visible_maddrs=lambda **_: visible, run_coroutine=lambda _: [(seen_at, False)])
    assert reachability.find_reachability(dht)[1] is expected


def test_bandwidth_counts_if_peer_leaves_during_measurement():
    calls = []

    async def call(*_) -> None:
        calls.append(await asyncio.sleep(0.01))
        if len(calls) > 1:
            raise P2PDaemonError("the peer has left")

    dht, node = SimpleNamespace(initial_ids=["peer"]), SimpleNamespace(p2p=SimpleNamespace(call_protobuf_handler=call))
    assert asyncio.run(reachability.measure_rate(dht, node)) > 10


def test_bandwidth_is_measured_without_silent_or_busy_peer(monkeypatch):
    """The uplink would start at a low rate because one of the initial peers is frozen, or answers after seconds."""
    monkeypatch.setattr("swarm.reachability.MEASURE_TIMEOUT", 0.5)

    def node_that_is_busy_once() -> SimpleNamespace:
        pauses = [60.0]

        async def call(*_) -> None:
            await asyncio.sleep(pauses.pop() if pauses else 0.01)

        return SimpleNamespace(p2p=SimpleNamespace(call_protobuf_handler=call))

    def measure(*slow: str, seconds: float = 60.0) -> float:
        async def call(peer: str, *_) -> None:
            await asyncio.sleep(seconds if peer in slow else 0.01)

        node = SimpleNamespace(p2p=SimpleNamespace(call_protobuf_handler=call))
        return asyncio.run(reachability.measure_rate(SimpleNamespace(initial_ids=["a", "b"]), node))

    assert min(measure("a"), measure("b"), measure("a", seconds=0.45)) > 10
    dht = SimpleNamespace(initial_ids=["peer"])
    assert asyncio.run(reachability.measure_rate(dht, node_that_is_busy_once())) > 10
    assert measure("a", "b") == reachability.MIN_BANDWIDTH


@pytest.mark.parametrize(
    "limit, expected", [(b"\x10\x07", 7), (b"\x10\0", math.inf), (b"", math.inf), (b"\x12\3abc", 0), (b"\x13\x14", 0)]
)
def test_relay_limit_is_checked(limit, expected):
    """A relay may send bytes, or a group, in place of the number."""

    async def call(*_) -> tuple:
        answer, reader = bytes([0x22, len(limit)]) + limit + b"\x28\x64", asyncio.StreamReader()
        reader.feed_data(bytes([len(answer)]) + answer)
        return None, reader, SimpleNamespace(write=lambda _: None, close=lambda: None)

    p2p = SimpleNamespace(call_binary_stream_handler=call)
    assert asyncio.run(reachability.ask_relay_limit(p2p, PeerID(b"relay"))) == expected


def test_bandwidth_is_measured_with_initial_peer(start, net, tmp_path):
    """With an uplink of 20 Mbit/s and 40 ms; a single peer cannot measure it."""
    net.host("public", rtt_ms=20)
    net.host("home", rtt_ms=20, up=20, down=20)
    net.start()
    prefix = make_prefix()
    listen = f"/ip4/{net.ip('public')}/tcp/0"
    command = ["run_training_monitor.py", "--experiment_prefix", prefix, "--host_maddrs", listen]
    monitor = start("monitor", *command, "--output_dir", tmp_path, prefix=net.prefix("public"))
    address = monitor.wait_for(r"--initial_peers (/ip4/\S+)").group(1)
    measurer = start("home", "-c", MEASURER, prefix, f"/ip4/{net.ip('home')}/tcp/0", address, prefix=net.prefix("home"))
    assert measurer.wait(60) == 0, measurer.text
    measured = json.loads(measurer.text.splitlines()[-1])
    assert 10 <= measured <= 21
    alone = run_python("-c", MEASURER, prefix, LOOPBACK[1])
    assert json.loads(alone.stdout) == 100.0
