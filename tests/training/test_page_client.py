"""The status page and joining by HOST:PORT, with friendly and hostile visitors and pages."""

import contextlib
import json
import socket
import time

import pytest
from file_server import drip, send, serve
from mains import expect_user_error, refuse
from processes import LOOPBACK, make_prefix, wait_until
from records import ask, make_metrics, run_peers
from swarms import stop

import run_trainer
import run_training_monitor
from arguments import SwarmArguments
from common.addresses import make_host_maddrs
from common.console import UserError
from swarm.addresses import is_local, is_public, list_shareable_maddrs
from training.page_client import MAX_PAGE_BYTES, VISIT_TIMEOUT, choose_maddrs, find_maddrs

PEER = "12D3KooWBadDR5ZTXD5kbXn8YbWYpzJk1VHokKJDVpj8dN7CipHr"
RELAY = f"/ip4/198.51.100.7/tcp/7/p2p/{PEER}/p2p-circuit"


def page(prefix: str, *maddrs: object, status: str = "200 OK", **more) -> bytes:
    body = json.dumps({"experiment_prefix": prefix, "multiaddrs": maddrs, **more})
    return f"HTTP/1.0 {status}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    "answer, words",
    [
        (send(b"HTTP/1.0 200 OK\r\n\r\nHello"), "no status page"),
        (send(b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe\x00"), "no status page"),
        (send(b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 60_000), "no status page"),
        (drip(b"HTTP/1.0 200 OK\r\n\r\n" + b" " * 2 * MAX_PAGE_BYTES), f"longer than {MAX_PAGE_BYTES} bytes"),
        (drip(b"HTTP/1.0 200 OK\r\n\r\n{"), "no answer within"),
        (drip(b"\x13/multistream/1.0.0\n"), "a peer listens there, but does not reveal its id"),
        (send(b"SSH-2.0-OpenSSH_9.2\r\n"), "it answers b'SSH-2.0"),
        (send(page("run", "/ip4/1.2.3.4", status="404 Not Found")), "404"),
        (send(page("another", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")), "shows run 'another', not 'run'"),
        (send(page("run", "/ip4/127.0.0.1/tcp/1")), "which is not a multiaddr"),
        (send(page("run", f"/ip4/1.1.1.1/tcp/1/p2p/{PEER},/ip4/6.6.6.6/tcp/1/p2p/{PEER}")), "which is not a multiaddr"),
        (send(page("run", {"a": 1})), "which is not a multiaddr"),
        (send(page("run")), "accepts no connections"),
        (send(page("run", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", client_mode=True)), "accepts no connections"),
        (send(b"HTTP/1.0 200 OK\r\n\r\n[1]"), "lists no multiaddrs"),
        (send(b""), "no status page"),
    ],
)
def test_wrong_page_is_one_line(answer, words):
    start = time.monotonic()
    with serve(answer) as address, expect_user_error(address, words, "--status_port"):
        find_maddrs(address, "run")
    assert time.monotonic() - start < VISIT_TIMEOUT + 15  # on a busy machine


def test_unreachable_page_is_one_line():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    cases = {f"127.0.0.1:{port}": "Connection refused", "no.such.host.invalid:80": "known"}
    malformed = ("127.0.0.1:99999", "127.0.0.1", "127.0.0.1:*", "http://a")
    for address, words in (cases | dict.fromkeys(malformed, "HOST:PORT")).items():
        with expect_user_error(words):
            find_maddrs(address, "run")


@pytest.mark.parametrize(
    "maddrs, ip, chosen",
    [
        # the address that has just answered works
        (["/ip4/11.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1"], "192.168.1.2", ["/ip4/192.168.1.2/tcp/1"]),
        (["/ip4/11.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1"], "::ffff:11.0.0.1", ["/ip4/11.0.0.1/tcp/1"]),
        # behind a router or in a container, the peer does not know its address
        (["/ip4/172.17.0.2/tcp/31337"], "203.0.113.5", ["/ip4/203.0.113.5/tcp/31337"]),
        (["/ip4/127.0.0.1/tcp/31337"], "2001:db8::1", ["/ip6/2001:db8::1/tcp/31337"]),
        (["/ip4/10.0.0.2/tcp/1", RELAY], "11.2.3.4", ["/ip4/11.2.3.4/tcp/1", RELAY]),
        # on this machine, no address is replaced
        (["/ip4/10.0.0.2/tcp/1"], "127.0.0.1", ["/ip4/10.0.0.2/tcp/1"]),
        (["/ip4/127.0.0.1/tcp/1"], "127.0.0.1", ["/ip4/127.0.0.1/tcp/1"]),
    ],
)
def test_new_peer_gets_reachable_addresses(maddrs, ip, chosen):
    with_id = [f"{maddr}/p2p/{PEER}" for maddr in maddrs]
    assert choose_maddrs(with_id, ip) == [f"{maddr}/p2p/{PEER}" for maddr in chosen]


def test_loopback_is_shown_only_alone():
    local, home, public = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip4/11.0.0.1/tcp/1"
    assert list_shareable_maddrs([local, home, RELAY, public]) == [public, home, RELAY]
    assert list_shareable_maddrs([local, "/ip6/::1/tcp/1"]) == [local, "/ip6/::1/tcp/1"]
    assert [is_public(maddr) for maddr in (local, home, public, RELAY)] == [False, False, True, True]
    assert is_local("/ip6/::1/tcp/1") and not is_local("/ip6/2001:db8::1/tcp/1") and not is_local("/dns4/a/tcp/1")


def test_old_listen_addresses_parse():
    assert make_host_maddrs("[::]:*") == ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
    assert make_host_maddrs("[::1]:31337") == ["/ip6/::1/tcp/31337"]
    assert make_host_maddrs("0.0.0.0:31337") == ["/ip4/0.0.0.0/tcp/31337"]
    assert SwarmArguments("a", host_maddrs=["/ip6/::1/tcp/0", "127.0.0.1:*"]).host_maddrs == [
        "/ip6/::1/tcp/0",
        "/ip4/127.0.0.1/tcp/0",
    ]
    for wrong in ("localhost:1", "1.2.3.4", "[::]:99999", "[1.2.3:4"):
        with pytest.raises(UserError, match="--host_maddrs"):
            make_host_maddrs(wrong)


def test_monitor_page_survives_hostile_visitors(start, tmp_path):
    prefix = make_prefix()
    command = ["run_training_monitor.py", "--experiment_prefix", prefix, *LOOPBACK, "--report_to", "none"]
    command += ["--refresh_period", 1]
    shared = ["--seed", 7, "--optim", "adamw", "--learning_rate", 0.00176]  # the last one is a default that was typed
    monitor = start("monitor", *command, *shared, "--status_port", 0, "--output_dir", tmp_path / "monitor")
    port = int(monitor.wait_for(r"status page: http://\S+:(\d+)/").group(1))
    address = monitor.wait_for(r"--initial_peers (\S+)").group(1)

    code, _, body = ask(port)
    read = json.loads(body)
    assert code == 200
    assert read["multiaddrs"] == [address] and read["experiment_prefix"] == prefix
    assert read["peers"] == 0 and read["epoch"] is None and read["loss"] is None and not read["client_mode"]
    assert read["join"].endswith(f"{address} --seed 7 --optim adamw --learning_rate 0.00176")
    assert f"\n{read['join']}\n" in monitor.text
    wrong = refuse(run_trainer, "--initial_peers", address, "--learning_rate", 0.01, "--preflight")
    assert f"run '{prefix}' uses different settings; --learning_rate: the run has 0.00176, you have 0.01." in wrong
    assert find_maddrs(f"127.0.0.1:{port}", prefix) == [address]
    assert [ask(port, method=method)[0] for method in ("POST", "PUT", "DELETE", "HEAD")] == [501] * 4
    assert [ask(port, path)[0] for path in ("/etc/passwd", "/../arguments.py", "/status")] == [404, 404, 200]

    with run_peers(prefix, address, True) as (peer,):
        peer.publish(make_metrics(3).dict())
        wait_until(lambda: json.loads(ask(port)[2])["epoch"] == 3, 30, "the epoch on the page")

    garbage = [b"\x00" * 1000, b"\x13/multistream/1.0.0\n", b"GET " + b"a" * 100_000, b"GET / HTTP/1.1\r\n" * 5000]
    for junk in garbage:
        visitor = socket.create_connection(("127.0.0.1", port), timeout=10)
        with contextlib.suppress(OSError):  # it may hang up before it has heard all
            visitor.sendall(junk)
        visitor.close()

    # the port is in use; a monitor cannot be a client
    for flags, words in (
        (["--status_port", port], f"--status_port {port}: address already in use"),
        (["--client_mode"], "--client_mode"),
    ):
        assert words in refuse(run_training_monitor, *command[1:], *flags, "--output_dir", tmp_path / "other")
    stop(monitor)
