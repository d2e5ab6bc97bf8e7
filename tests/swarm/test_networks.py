"""Peers behind firewalls and routers, on IPv6, and with a wrong clock: the users' scripts, on emulated hosts."""

import json
import re
import shutil
import socket
from pathlib import Path

import netlab
import pytest
from processes import Script, make_prefix, wait_until
from swarms import SHARED, TRAINER, flags, history

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
# each measures its line
ON_NET = {name: value for name, value in TRAINER.items() if name != "--bandwidth"}


def start_on(start, net: netlab.Net, host: str, name: str, *command: object, **options) -> Script:
    return start(name, *command, prefix=net.prefix(host), **options)


def start_trainer_on(
    start, net: netlab.Net, tmp_path: Path, host: str, prefix: str, peers: str, *groups: dict, **options
) -> Script:
    own = {"--experiment_prefix": prefix, "--initial_peers": peers, "--output_dir": tmp_path / host}
    return start_on(start, net, host, host, *PACED_TRAINER, *flags(ON_NET, own, *groups), **options)


def start_monitor_on(start, net: netlab.Net, host: str, tmp_path: Path, prefix: str) -> tuple[Script, str]:
    own = {"--experiment_prefix": prefix, "--output_dir": tmp_path / "monitor", "--report_to": "none"}
    own |= {"--refresh_period": 0.5, "--status_port": STATUS_PORT}
    monitor = start_on(start, net, host, "monitor", "run_training_monitor.py", *flags(own))
    address = monitor.wait_for(r"(?m)^--initial_peers (/ip4/\S+)").group(1)
    monitor.wait_for("status page: ")
    assert address.startswith(f"/ip4/{net.ip(host)}/tcp/")  # not 127.0.0.1
    return monitor, address


def joint_epochs(tmp_path: Path, name: str) -> int:
    return sum(line["averaged_with"] == 2 for line in history(tmp_path, name).values())


def stop(*scripts: Script) -> None:
    for script in scripts:
        script.interrupt()
    for script in scripts:
        script.assert_clean_end(60)


@pytest.mark.slow
def test_firewalled_peer_becomes_client_and_contributes(start, net, tmp_path, tiny_data):
    """It joins by the monitor's HOST:PORT, and finds that no peer reaches it and that a public trainer is there."""
    net.host("server", rtt_ms=20)
    net.host("public", rtt_ms=20)
    net.host("walled", rtt_ms=20, firewall=True)
    net.start()
    prefix, pair = make_prefix(), {**tiny_data, **PAIR}
    monitor, address = start_monitor_on(start, net, "server", tmp_path, prefix)
    public = start_trainer_on(start, net, tmp_path, "public", prefix, address, pair)
    wait_until(lambda: history(tmp_path, "public"), 90, "an epoch")
    joining = f"{net.ip('server')}:{STATUS_PORT}"
    walled = start_trainer_on(start, net, tmp_path, "walled", prefix, joining, pair)
    walled.wait_for(
        rf"cannot reach this peer at {net.ip('walled')}, port \d+ .*: continuing in client mode, 1 peer", 60
    )
    wait_until(lambda: joint_epochs(tmp_path, "walled") >= 3, 90, "three epochs averaged by both")
    assert "cannot reach" not in public.text and "client mode" not in public.text
    stop(walled, public, monitor)
    assert json.loads((tmp_path / "walled" / "summary.json").read_text())["samples"] > 0
    # the gradient was averaged, by numbers
    ours, theirs = history(tmp_path, "walled"), history(tmp_path, "public")
    both = [epoch for epoch in ours if epoch in theirs and ours[epoch]["averaged_with"] == 2]
    assert both
    assert all(ours[epoch]["grad_norm"] == pytest.approx(theirs[epoch]["grad_norm"], rel=1e-3) for epoch in both[:-1])


@pytest.mark.slow
def test_killed_peer_returns_with_its_key(start, net, tmp_path):
    """The initial peer still has a connection to the last process, and asks that one whether it is there."""
    net.host("server", rtt_ms=10)
    net.host("home", rtt_ms=90)
    net.start()
    prefix, port = make_prefix(), 31337
    server = start_on(start, net, "server", "server", "-c", JOINER, prefix, port)
    server.wait_for('"used"')
    [address] = server.json_lines()[0]["own"]
    env = {"IDENTITY_PATH": str(tmp_path / "key")}
    for number in range(4):
        home = start_on(start, net, "home", f"home{number}", "-c", JOINER, prefix, 0, address, env=env)
        home.wait_for('"used"', 40)
        assert home.json_lines()[0]["is_client"] is False
        home.kill()


@pytest.mark.slow
def test_blocked_transport_leaves_the_other(start, net):
    """Peers dial QUIC first, and TCP if UDP is blocked; only a firewall for both makes a peer a client."""
    net.host("server", rtt_ms=20)
    net.host("open", rtt_ms=20)
    net.host("no_udp", rtt_ms=20, blocked="udp")
    net.host("no_tcp", rtt_ms=20, blocked="tcp")
    net.host("walled", rtt_ms=20, firewall=True)
    net.start()
    prefix, port = make_prefix(), 31337
    server = start_on(start, net, "server", "server", "-c", JOINER, prefix, port)
    server.wait_for('"used"')
    [address] = server.json_lines()[0]["own"]
    assert address.startswith(f"/ip4/{net.ip('server')}/tcp/{port}/")
    expected = {"open": (False, "udp"), "no_udp": (False, "tcp"), "no_tcp": (False, "udp"), "walled": (True, "udp")}
    peers = {name: start_on(start, net, name, name, "-c", JOINER, prefix, 0, address) for name in expected}
    for name, peer in peers.items():
        peer.wait_for('"used"', 60)
        [report] = peer.json_lines()
        assert (report["is_client"], report["used"][0].split("/")[3]) == expected[name], peer.text


@pytest.mark.slow
def test_firewalled_monitor_observes_without_archive(start, net, tmp_path, tiny_data):
    net.host("server", rtt_ms=20)
    net.host("walled", rtt_ms=20, firewall=True)
    net.start()
    prefix = make_prefix()
    monitor, address = start_monitor_on(start, net, "server", tmp_path, prefix)
    own = {"--experiment_prefix": prefix, "--initial_peers": address, "--report_to": "none"}
    own |= {"--tokenizer_path": tiny_data["--tokenizer_path"], "--config_path": "configs/demo.json"}
    command = ["-m", "tests.programs.unrelayed_monitor", *flags(own)]
    archive = start_on(
        start, net, "walled", "archive", *command, "--output_dir", tmp_path / "archive", "--store_checkpoints"
    )
    onlooker = start_on(start, net, "walled", "onlooker", *command, "--output_dir", tmp_path / "onlooker")
    assert archive.wait(60) == 2
    assert "error: others cannot reach this peer: open the port" in archive.text.splitlines()[-1]
    assert "Traceback" not in archive.text
    wait_until(lambda: not archive.left_processes(), 5, f"no process left: {archive.left_processes()}")
    onlooker.wait_for("continuing in client mode")
    onlooker.wait_for("Waiting for trainers")
    assert "To join this run" not in onlooker.text  # no peer can join through it
    stop(onlooker, monitor)


@pytest.mark.slow
def test_routed_peers_average_through_relay(start, net, tmp_path, tiny_data):
    """The only public peer is the monitor, which averages nothing: it relays."""
    net.host("server", rtt_ms=20)
    net.host("home1", rtt_ms=20, nat="router1")
    net.host("home2", rtt_ms=20, nat="router2")
    net.start()
    prefix, pair = make_prefix(), {**tiny_data, **PAIR}
    monitor, address = start_monitor_on(start, net, "server", tmp_path, prefix)
    trainers = [start_trainer_on(start, net, tmp_path, name, prefix, address, pair) for name in ("home1", "home2")]
    for trainer in trainers:
        # alone, libp2p looks for three minutes (note 30)
        trainer.wait_for(rf"waiting for an address at a relay(.|\n)*through a relay: {address}/p2p-circuit", 60)
    for name in ("home1", "home2"):
        wait_until(lambda name=name: joint_epochs(tmp_path, name) >= 5, 120, f"five epochs averaged by {name}")
    # parameters and gradients passed through the monitor, as there is no other way
    sent, received = net.bytes("server")
    assert min(sent, received) > 5 * 300_000 * 4
    stop(*trainers, monitor)
    ours, theirs = history(tmp_path, "home1"), history(tmp_path, "home2")
    both = [epoch for epoch in ours if epoch in theirs and ours[epoch]["averaged_with"] == 2]
    assert len(both) >= 5
    assert all(ours[epoch]["grad_norm"] == pytest.approx(theirs[epoch]["grad_norm"], rel=1e-3) for epoch in both[:-1])


@pytest.mark.slow
def test_firewalled_peers_average_through_aux_peer(start, net, tmp_path, tiny_data):
    """No other peer accepts a connection: both become clients by themselves, because the auxiliary peer averages."""
    net.host("server", rtt_ms=20)
    for name in ("one", "two"):
        net.host(name, rtt_ms=20, firewall=True)
    net.start()
    prefix = make_prefix()
    shared = {name: value for name, value in {**TRAINER, **PAIR}.items() if name in (*SHARED, *PAIR)}
    own = {"--experiment_prefix": prefix, "--output_dir": tmp_path / "aux", "--report_to": "none"}
    own |= {"--tokenizer_path": tiny_data["--tokenizer_path"], "--assist_in_averaging": []}
    aux = start_on(start, net, "server", "aux", "run_aux_peer.py", *flags(own, shared))
    address = aux.wait_for(r"--initial_peers (/ip4/\S+)").group(1)
    trainers = [
        start_trainer_on(start, net, tmp_path, name, prefix, address, {**tiny_data, **PAIR}) for name in ("one", "two")
    ]
    for trainer in trainers:
        trainer.wait_for(r"cannot reach this peer .*: continuing in client mode, 1 peer that averages", 60)
    wait_until(lambda: all(joint_epochs(tmp_path, name) >= 5 for name in ("one", "two")), 120, "5 joint epochs")
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
    """Two trainers train over ::1; a third, whose clock is an hour ahead, gets an error and does not disturb them."""
    prefix, local = make_prefix(), {"--host_maddrs": "/ip6/::1/tcp/0"}
    own = {"--experiment_prefix": prefix, "--output_dir": tmp_path / "monitor", "--report_to": "none"}
    monitor = start("monitor", "run_training_monitor.py", "--dht_listen_on", "[::1]:*", *flags(own), "--status_port", 0)
    address = monitor.wait_for(r"(?m)^--initial_peers (/ip6/::1/tcp/\S+)$").group(1)
    port = monitor.wait_for(r"status page: http://\S+:(\d+)/").group(1)
    names, trainers = ["first", "second"], []
    for name, peers in zip(names, (address, f"[::1]:{port}"), strict=True):
        more = {"--experiment_prefix": prefix, "--initial_peers": peers, "--output_dir": tmp_path / name}
        more |= PAIR
        trainers.append(start(name, *PACED_TRAINER, *flags(ON_NET, tiny_data, local, more)))
    wait_until(lambda: joint_epochs(tmp_path, "first") >= 3, 90, "three epochs averaged by both")

    if shutil.which("faketime"):
        failures = [trainer.text.count("averaging failed") for trainer in trainers]
        more = {"--experiment_prefix": prefix, "--initial_peers": address, "--output_dir": tmp_path / "late"}
        command = flags(TRAINER, tiny_data, local, more, PAIR)
        late = start("late", "run_trainer.py", *command, prefix=["faketime", "-f", "+1h"])
        assert late.wait(90) == 2, late.text
        (error,) = [line for line in late.text.splitlines() if "error:" in line]
        assert re.search(r"clock is 3,(599|600)\.\d s ahead of the swarm.s.*timedatectl", error), error
        assert "Traceback" not in late.text
        wait_until(lambda: not late.left_processes(), 5, f"no process left: {late.left_processes()}")
        so_far = joint_epochs(tmp_path, "first")
        wait_until(lambda: joint_epochs(tmp_path, "first") >= so_far + 5, 60, "five epochs more")
        assert [trainer.text.count("averaging failed") for trainer in trainers] == failures

    stop(*trainers)
    ours, theirs = (history(tmp_path, name) for name in names)
    both = [epoch for epoch in ours if epoch in theirs and ours[epoch]["averaged_with"] == 2]
    assert all(ours[epoch]["grad_norm"] == pytest.approx(theirs[epoch]["grad_norm"], rel=1e-3) for epoch in both[:-1])
    stop(monitor)
