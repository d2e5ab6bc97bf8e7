"""The emulated network does what tests of faults rely on: delay, rate, partition, firewall, NAT."""

import subprocess
import sys
import time

import netlab
import pytest
from processes import wait_until

SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 5000))
while True:
    connection, _ = listener.accept()
    received = 0
    while received < 1_000_000 and (data := connection.recv(1 << 16)):
        received += len(data)
    connection.sendall(b"!")
    connection.close()
"""
# prints the seconds of a handshake (a round trip), and of sending a million bytes
CLIENT = """
import socket, sys, time
begin = time.monotonic()
connection = socket.create_connection((sys.argv[1], 5000), timeout=3)
print(time.monotonic() - begin)
connection.settimeout(20)
connection.sendall(bytes(1_000_000))
assert connection.recv(1) == b"!"
print(time.monotonic() - begin)
"""


@pytest.mark.slow
def test_netlab_links_match_declaration(net):
    net.host("near")
    net.host("far", rtt_ms=80, up=20, down=20)
    net.host("guarded", firewall=True)
    net.host("home", nat="router")
    net.start()
    for name in ("near", "far", "guarded"):
        net.popen(name, [sys.executable, "-c", SERVER])

    def connect(source: str, target: str) -> tuple[float, float] | None:
        """Measure a round trip and the transfer of a million bytes, in seconds; return None without a connection."""
        client = net.popen(source, [sys.executable, "-c", CLIENT, net.ip(target)], stdout=-1, stderr=-1, text=True)
        output, errors = client.communicate()
        assert output or "timed out" in errors or "refused" in errors, errors
        return tuple(map(float, output.split())) if client.returncode == 0 else None

    wait_until(lambda: connect("near", "far") and connect("far", "near"), 20, "both servers listen")
    round_trip, seconds = connect("near", "far")
    assert 0.08 <= round_trip < 0.5
    assert 0.4 <= seconds < 3  # 8 Mbit at 20 Mbit/s
    assert connect("guarded", "far")
    assert connect("near", "guarded") is None
    assert connect("home", "near")

    net.partition(["far", "home"])
    assert connect("near", "far") is None
    assert connect("home", "far")
    net.heal()
    assert connect("near", "far")
    net.set("far", down=2)
    before = time.monotonic(), net.bytes("far")[1]
    assert connect("near", "far")
    assert time.monotonic() - before[0] > 4
    assert net.bytes("far")[1] - before[1] > 1_000_000


def test_renumbered_router_keeps_its_host_online(net):
    net.host("server")
    net.host("home", nat="router")
    net.start()
    serve = (
        "import socket; s = socket.create_server(('0.0.0.0', 5000))\nwhile 1: c, a = s.accept(); c.send(a[0].encode())"
    )
    net.popen("server", [sys.executable, "-c", serve])
    client = "import socket, sys; print(socket.create_connection((sys.argv[1], 5000), timeout=3).recv(99).decode())"

    def ask() -> str:
        """Return the address that the server sees."""
        asked = net.popen("home", [sys.executable, "-c", client, net.ip("server")], stdout=-1, stderr=-1, text=True)
        return asked.communicate()[0].strip()

    before = wait_until(ask, 20, "the server listens")
    net.renumber("home")
    after = wait_until(ask, 20, "the host reaches the server")
    assert (before, after) == ("11.99.0.2", "11.99.0.3")


def test_netlab_leaves_nothing_behind():
    if why := netlab.unavailable():
        pytest.skip(why)
    with netlab.Net() as net:
        net.host("home", nat="router")
        net.start()
        daemon = net.popen("home", ["setsid", "sleep", "1000"])
        assert net.tag in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert daemon.poll() is not None
    assert net.tag not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
