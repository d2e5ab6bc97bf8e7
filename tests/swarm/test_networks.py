"""Peers behind firewalls and routers, on IPv6, and with a wrong clock: the users' scripts, on emulated hosts."""

import json
import shutil
import socket
from pathlib import Path

import netlab
import pytest
from processes import Script, make_prefix, wait_until
from swarms import SHARED, TRAINER, flags, history, stop

STATUS_PORT = 8080
# epochs long enough for a newcomer to see the others before it has stepped alone: at this pace, 2.4 s alone
PACED_TRAINER = ("benchmarks/paced_trainer.py", 0.1)
PAIR = {"--target_group_size": 2, "--target_batch_size": 384}
# A peer that reports whether it has become a client, its addresses, and its connections to the initial peer.
JOINER = """
import json, os, sys, time
from functools import partial
from swarm.addresses import get_peer_id
from swarm.config import SwarmConfig
from swarm.identity import make_identity
from swarm.joining import Swarm
from common.console import clean_end
from swarm.reachability import find_connections

async def find(dht, node):
    return [await find_connections(node, get_peer_id(peer)) for peer in dht.initial_peers][:1]

with clean_end():
    _, prefix, port, *peers = sys.argv
    places, identity = [f"/ip4/0.0.0.0/tcp/{port}"], os.environ.get("IDENTITY_PATH")
    config = SwarmConfig(prefix, peers, places, use_relay=False, identity_path=identity)
    swarm = Swarm.join(config, make_identity(config))
    [used] = swarm.dht.run_coroutine(find) if peers else [[]]
    print(json.dumps(dict(is_client=swarm.dht.client_mode, own=swarm.list_maddrs(), used=used)), flush=True)
    time.sleep(3600)
"""
# A monitor that is not reached through a third peer, nor reaches others so.
UNRELAYED_MONITOR = """
import dataclasses, run_training_monitor
from arguments import SwarmArguments, parse_arguments
from common.flags import flag

field = "use_relay", bool, flag(False, "Reach peers behind routers, and be reached by others, through a third peer.")
kind = dataclasses.make_dataclass("UnrelayedArguments", [field], bases=(SwarmArguments,))
with run_training_monitor.clean_end():
    run_training_monitor.main(*parse_arguments(kind, *run_training_monitor.GROUPS[1:]))
"""
# each measures its line
ON_NET = {name: value for name, value in TRAINER.items() if name != "--bandwidth"}


def start_net(net: netlab.Net, **hosts: dict) -> None:
    """Start hosts with these properties, at 20 ms unless they have another `rtt_ms`."""
    for name, properties in hosts.items():
        net.host(name, **{"rtt_ms": 20, **properties})
    net.start()


def start_on(start, net: netlab.Net, host: str, name: str, *command: object, **options) -> Script:
    return start(name, *command, prefix=net.prefix(host), **options)


def start_trainer_on(start, net: netlab.Net, tmp_path: Path, host: str, prefix: str, peers: str, *groups: dict):
    own = {"--experiment_prefix": prefix, "--initial_peers": peers, "--output_dir": tmp_path / host}
    return start_on(start, net, host, host, *PACED_TRAINER, *flags(ON_NET, own, *groups))


def start_monitor_on(start, net: netlab.Net, host: str, tmp_path: Path, prefix: str, **more) -> tuple[Script, str]:
    own = {"--experiment_prefix": prefix, "--output_dir": tmp_path / "monitor", **more}
    own |= {"--refresh_period": 0.5, "--status_port": STATUS_PORT}
    monitor = start_on(start, net, host, "monitor", "run_training_monitor.py", *flags(own))
    address = monitor.wait_for(r"(?m)^--initial_peers (/ip4/\S+)").group(1)
    monitor.wait_for("status page: ")
    assert address.startswith(f"/ip4/{net.ip(host)}/tcp/")  # not 127.0.0.1
    return monitor, address


def joint_epochs(tmp_path: Path, name: str) -> int:
    return sum(line["averaged_with"] == 2 for line in history(tmp_path, name).values())


def assert_gradients_averaged(tmp_path: Path, *names: str) -> list[int]:
    """Assert that the averaged gradients of two trainers have the same norms, and return their joint epochs."""
    ours, theirs = (history(tmp_path, name) for name in names)
    both = [epoch for epoch in ours if epoch in theirs and ours[epoch]["averaged_with"] == 2]
    assert all(ours[epoch]["grad_norm"] == pytest.approx(theirs[epoch]["grad_norm"], rel=1e-3) for epoch in both[:-1])
    return both


def start_joiner(start, net: netlab.Net, prefix: str, port: int = 31337) -> str:
    """Start a peer on the host of the name "server" that reports its address, and return that."""
    server = start_on(start, net, "server", "server", "-c", JOINER, prefix, port)
    server.wait_for('"used"')
    [address] = server.json_lines()[0]["own"]
    assert address.startswith(f"/ip4/{net.ip('server')}/tcp/{port}/")
    return address


@pytest.mark.slow
def test_firewalled_peer_becomes_client_and_contributes(start, net, tmp_path, tiny_data):
    """It joins by the monitor's HOST:PORT, and finds that no peer reaches it and that a public trainer is there."""
    start_net(net, server={}, public={}, walled={"firewall": True})
    prefix, pair = make_prefix(), {**tiny_data, **PAIR}
    monitor, address = start_monitor_on(start, net, "server", tmp_path, prefix)
    public = start_trainer_on(start, net, tmp_path, "public", prefix, address, pair)
    wait_until(lambda: history(tmp_path, "public"), 90, "an epoch")
    joining = f"{net.ip('server')}:{STATUS_PORT}"
    walled = start_trainer_on(start, net, tmp_path, "walled", prefix, joining, pair)
    walled.wait_for(rf"cannot reach this peer at {net.ip('walled')}, port \d+ .*: continuing in client mode, 1 peer")
    wait_until(lambda: joint_epochs(tmp_path, "walled") >= 3, 90, "three epochs averaged by both")
    assert "cannot reach" not in public.text and "client mode" not in public.text
    stop(walled, public, monitor)
    assert json.loads((tmp_path / "walled" / "summary.json").read_text())["samples"] > 0
    assert assert_gradients_averaged(tmp_path, "walled", "public")


@pytest.mark.slow
def test_killed_peer_returns_with_its_key(start, net, tmp_path):
    """The initial peer still has a connection to the last process, and asks that one whether it is there."""
    start_net(net, server={"rtt_ms": 10}, home={"rtt_ms": 90})
    prefix, env = make_prefix(), {"IDENTITY_PATH": str(tmp_path / "key")}
    address = start_joiner(start, net, prefix)
    for number in range(4):
        home = start_on(start, net, "home", f"home{number}", "-c", JOINER, prefix, 0, address, env=env)
        home.wait_for('"used"', 40)
        assert home.json_lines()[0]["is_client"] is False
        home.kill()


@pytest.mark.slow
def test_blocked_transport_leaves_the_other(start, net):
    """Peers dial QUIC first, and TCP if UDP is blocked; only a firewall for both makes a peer a client."""
    walls = dict(no_udp={"blocked": "udp"}, no_tcp={"blocked": "tcp"}, walled={"firewall": True})
    start_net(net, server={}, open={}, **walls)
    prefix = make_prefix()
    address = start_joiner(start, net, prefix)
    expected = {"open": (False, "udp"), "no_udp": (False, "tcp"), "no_tcp": (False, "udp"), "walled": (True, "udp")}
    peers = {name: start_on(start, net, name, name, "-c", JOINER, prefix, 0, address) for name in expected}
    for name, peer in peers.items():
        peer.wait_for('"used"', 60)
        [report] = peer.json_lines()
        assert (report["is_client"], report["used"][0].split("/")[3]) == expected[name], peer.text


@pytest.mark.slow
def test_firewalled_monitor_observes_without_archive(start, net, tmp_path, tiny_data):
    start_net(net, server={}, walled={"firewall": True})
    prefix = make_prefix()
    monitor, address = start_monitor_on(start, net, "server", tmp_path, prefix)
    own = {"--experiment_prefix": prefix, "--initial_peers": address}
    own |= {"--tokenizer_path": tiny_data["--tokenizer_path"], "--config_path": "configs/demo.json"}
    command = ["-c", UNRELAYED_MONITOR, *flags(own), "--output_dir"]
    archive = start_on(start, net, "walled", "archive", *command, tmp_path / "archive", "--store_checkpoints")
    onlooker = start_on(start, net, "walled", "onlooker", *command, tmp_path / "onlooker")
    archive.assert_user_error("error: others cannot reach this peer: open the port")
    onlooker.wait_for("continuing in client mode")
    onlooker.wait_for("Waiting for trainers")
    assert "To join this run" not in onlooker.text  # no peer can join through it
    stop(onlooker, monitor)


@pytest.mark.slow
def test_routed_peers_average_through_relay(start, net, tmp_path, tiny_data):
    """The only public peer is the monitor, which averages nothing: it relays, also after a restart."""
    start_net(net, server={}, home1={"nat": "router1"}, home2={"nat": "router2"})
    prefix, pair, names = make_prefix(), {**tiny_data, **PAIR}, ("home1", "home2")
    own = {"--identity_path": tmp_path / "key", "--host_maddrs": f"/ip4/{net.ip('server')}/tcp/31337"}
    monitor, address = start_monitor_on(start, net, "server", tmp_path, prefix, **own)
    joining = flags(ON_NET, pair, {"--experiment_prefix": prefix, "--initial_peers": address})
    preflight = start_on(start, net, "home1", "preflight", "run_trainer.py", "--preflight", *joining)
    preflight.assert_clean_end(90)
    assert f"others reach this peer through a relay: {address}/p2p-circuit" in preflight.text, preflight.text
    trainers = [start_trainer_on(start, net, tmp_path, name, prefix, address, pair) for name in names]
    for trainer in trainers:
        trainer.wait_for(rf"others reach it through {address}/p2p-circuit", 60)
    for name in names:
        wait_until(lambda name=name: joint_epochs(tmp_path, name) >= 5, 120, f"five epochs averaged by {name}")
    sent, received = net.bytes("server")
    assert min(sent, received) > 5 * 300_000 * 4
    monitor.kill()
    done = max(joint_epochs(tmp_path, name) for name in names)
    monitor, _ = start_monitor_on(start, net, "server", tmp_path, prefix, **own)
    for name in names:
        wait_until(lambda name=name: joint_epochs(tmp_path, name) >= done + 6, 120, f"five more epochs of {name}")
    stop(*trainers, monitor)
    assert len(assert_gradients_averaged(tmp_path, *names)) >= 5


@pytest.mark.slow
def test_firewalled_peers_average_through_aux_peer(start, net, tmp_path, tiny_data):
    """No other peer accepts a connection: both become clients by themselves, because the auxiliary peer averages."""
    start_net(net, server={}, one={"firewall": True}, two={"firewall": True})
    prefix, names, pair = make_prefix(), ("one", "two"), {**tiny_data, **PAIR}
    shared = {name: value for name, value in {**TRAINER, **PAIR}.items() if name in (*SHARED, *PAIR)}
    own = {"--experiment_prefix": prefix, "--output_dir": tmp_path / "aux"}
    own |= {"--tokenizer_path": tiny_data["--tokenizer_path"], "--assist_in_averaging": []}
    aux = start_on(start, net, "server", "aux", "run_aux_peer.py", *flags(own, shared))
    address = aux.wait_for(r"--initial_peers (/ip4/\S+)").group(1)
    trainers = [start_trainer_on(start, net, tmp_path, name, prefix, address, pair) for name in names]
    for trainer in trainers:
        trainer.wait_for(r"cannot reach this peer .*: continuing in client mode, 1 peer that averages", 60)
    wait_until(lambda: all(joint_epochs(tmp_path, name) >= 5 for name in names), 120, "5 joint epochs")
    stop(*trainers, aux)


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 on the loopback interface")
def test_ipv6_swarm_tolerates_wrong_clock(start, tmp_path, tiny_data):
    prefix, local = make_prefix(), {"--host_maddrs": "/ip6/::1/tcp/0"}
    own = {"--experiment_prefix": prefix, "--output_dir": tmp_path / "monitor"}
    monitor = start("monitor", "run_training_monitor.py", "--dht_listen_on", "[::1]:*", *flags(own), "--status_port", 0)
    address = monitor.wait_for(r"(?m)^--initial_peers (/ip6/::1/tcp/\S+)$").group(1)
    port, names, trainers = monitor.wait_for(r"status page: http://\S+:(\d+)/").group(1), ["first", "second"], []
    for name, peers in zip(names, (address, f"[::1]:{port}"), strict=True):
        more = {"--experiment_prefix": prefix, "--initial_peers": peers, "--output_dir": tmp_path / name}
        trainers.append(start(name, *PACED_TRAINER, *flags(ON_NET, tiny_data, local, more, PAIR)))
    wait_until(lambda: joint_epochs(tmp_path, "first") >= 3, 90, "three epochs averaged by both")
    if shutil.which("faketime"):
        failures = [trainer.text.count("averaging failed") for trainer in trainers]
        more = {"--experiment_prefix": prefix, "--initial_peers": address, "--output_dir": tmp_path / "late"}
        command = flags(TRAINER, tiny_data, local, more, PAIR)
        late = start("late", "run_trainer.py", *command, prefix=["faketime", "-f", "+1h"])
        late.assert_user_error(r"clock is 3,(599|600)\.\d s ahead of the swarm.s.*timedatectl", 90)
        so_far = joint_epochs(tmp_path, "first")
        wait_until(lambda: joint_epochs(tmp_path, "first") >= so_far + 5, 60, "five epochs more")
        assert [trainer.text.count("averaging failed") for trainer in trainers] == failures
    stop(*trainers)
    assert_gradients_averaged(tmp_path, *names)
    stop(monitor)
