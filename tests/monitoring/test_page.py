"""The status page and joining by HOST:PORT: in a real browser with a live swarm, and with friendly and hostile visitors
and pages."""

import contextlib
import itertools
import json
import math
import os
import re
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from file_server import drip, send, serve
from mains import expect_user_error, refuse
from processes import LOOPBACK, make_prefix, wait_until
from records import ask, make_metrics, run_peers
from swarms import choose_trainer, flags, history, start_monitor, start_trainer, stop

import run_trainer
import run_training_monitor
from arguments import SwarmArguments
from common.addresses import make_host_maddrs
from common.console import UserError
from monitoring.history import MAX_PEERS_SENT, MAX_POINTS_SENT, Contributions, History
from monitoring.page import MAX_REQUEST_BYTES, MAX_VISITORS, StatusServer, TrainerPage
from swarm.addresses import is_local, is_public, list_shareable_maddrs
from training.page_client import MAX_PAGE_BYTES, VISIT_TIMEOUT, choose_maddrs, find_maddrs, resolve_initial_peers
from training.settings import discover_settings
from utils import LocalMetrics

# a volunteer's name of the most hostile kind that is accepted
HOSTILE = "expression.alert_1-"  # the most that a name may be, see USERNAME of common/flags.py
PEER = "12D3KooWBadDR5ZTXD5kbXn8YbWYpzJk1VHokKJDVpj8dN7CipHr"
RELAY = f"/ip4/198.51.100.7/tcp/7/p2p/{PEER}/p2p-circuit"


@pytest.fixture
def server():
    """A page of a long run with many contributors, and a DHT without other peers."""
    contributors, run = Contributions({}), History()
    records = {f"{i:08x}": (make_metrics(total_samples=i, username="\U00020000" * 32), 1.0) for i in range(500)}
    contributors.update(records, {}, 0.0)
    for epoch in range(1, 3001):
        validation = {"validation_epoch": epoch, "validation_loss": 5.0} if epoch % 2 == 0 else {}
        run.add({**make_metrics(epoch).dict(), "alive_peers": 2, "time": 1e9 + 6 * epoch, **validation})
    maddrs = [f"/ip4/203.0.113.{i}/tcp/31337/p2p/{PEER}" for i in range(8)]
    dht = SimpleNamespace(client_mode=False, peer_id=PEER, membership=None)
    swarm = SimpleNamespace(prefix="run", dht=dht, list_maddrs=lambda: maddrs)
    server = StatusServer(0)
    server.serve(swarm, lambda: {"epoch": 3000, "flags": "", **contributors.describe()}, run)
    server.port = server.socket.getsockname()[1]
    yield server
    server.shutdown()
    server.server_close()


def test_page_serves_browsers_and_programs(server):
    for path, accept in (("/", "*/*"), ("/status", "*/*"), ("/status.json", "text/html,*/*")):
        code, headers, body = ask(server.port, path, Accept=accept)
        assert code == 200 and headers["Content-Type"] == "application/json"
        status = json.loads(body)
        assert status["experiment_prefix"] == "run" and len(status["multiaddrs"]) == 8
        # with any names, others can still join by HOST:PORT
        assert len(status["contributors"]) == MAX_PEERS_SENT and len(body) < MAX_PAGE_BYTES * 0.9
    code, headers, body = ask(server.port, Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert code == 200 and headers["Content-Type"].startswith("text/html") and body.startswith(b"<!DOCTYPE html>")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert b"<code>python tokenize_wikitext103.py</code>" in body
    # no external resources, and no markup from texts
    assert not re.search(rb'(?:src|href)="(?!data:,|status\.json)|@import|url\(', body)
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", body)


def test_page_history_is_bounded(server):
    queries = ("", "?since=2998", "?since=3000", "?since=-1")
    full, newest, none, all_again = (json.loads(ask(server.port, f"/history.json{query}")[2]) for query in queries)
    epochs = [point[0] for point in full["training"]]
    assert epochs[-1] == 3000 and epochs == sorted(set(epochs)) and 200 < len(epochs) <= MAX_POINTS_SENT
    assert full["begin"] == 1e9 and 200 < len(full["validation"]) <= MAX_POINTS_SENT
    assert [point[0] for point in newest["training"]] == [2999, 3000]
    assert none["training"] == [] and all_again == full
    for wrong in ("?since=a", "?since=99999999999999999999", "?since=1e3"):
        assert ask(server.port, f"/history.json{wrong}")[0] == 400


def test_page_replaces_oldest_idle_connection(server, monkeypatch):
    monkeypatch.setattr("monitoring.page.StatusHandler.timeout", 2.0)
    monkeypatch.setattr("monitoring.page.SLOT_TIMEOUT", 5.0)  # this machine may be busy
    server.socket.listen(1000)  # each connection for which the kernel has no place takes a second more
    threads, address = threading.active_count(), ("127.0.0.1", server.port)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(500)]
        assert ask(server.port)[0] == 200 and threading.active_count() <= threads + MAX_VISITORS
        many[-1].settimeout(5)
        wait_until(lambda: not server.visits, 60, "none that says nothing stays")
        assert many[0].recv(1) == many[-1].recv(1) == b""
    wait_until(lambda: threading.active_count() <= threads, 60, "no thread is left")


def test_page_reads_bounded_requests(server):
    """A longer request is answered once MAX_REQUEST_BYTES are read, and before its headers end."""
    request = b"GET /status.json HTTP/1.1\r\n" + (b"X: " + b"a" * 5000 + b"\r\n") * 4
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as visitor:
        visitor.sendall(request[:MAX_REQUEST_BYTES])
        assert visitor.recv(12) == b"HTTP/1.0 200"


def test_page_survives_limit_of_processes(server, monkeypatch):
    """Visits for which no thread could start keep no slot."""

    def fail(_) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(MAX_VISITORS):
            with socket.create_connection(("127.0.0.1", server.port), 10) as visitor:
                assert visitor.recv(1) == b""
    assert ask(server.port)[0] == 200
    wait_until(lambda: not server.visits, 60, "none of them stays")


def test_page_escapes_peer_names(tmp_path):
    assert make_metrics(username="Катя").dict()["username"] == "Катя" and "username" not in make_metrics().dict()
    for wrong in ("", " a", "a" * 33, "a\n", "a\u202eb", "\x1b[31m", "<img src=x onerror=alert(1)>", 5):
        with pytest.raises(ValueError, match="username"):
            LocalMetrics.parse_obj({**make_metrics().dict(), "username": wrong})
    command = ("--experiment_prefix", "a", *LOOPBACK, "--output_dir", tmp_path, "--username")
    assert "--username 'a\\tb' is not a name" in refuse(run_trainer, *command, "a\tb")


def test_trainer_page_ends_at_own_epoch():
    """Its curve may have the last epoch of an earlier start."""
    own = {"epoch": 0, "final_epoch": 3}
    page = TrainerPage(None, SimpleNamespace(contract=SimpleNamespace(flags="")), lambda: own)
    page.next_read = math.inf
    page.add({**make_metrics(3).dict(), "time": 1e9})
    assert page.read()["ended"] is None
    own["epoch"] = 3
    assert page.read()["ended"] == 1e9


OK = b"HTTP/1.0 200 OK\r\n\r\n"
PEER_GREETING = b"\x13/multistream/1.0.0\n"
LOCAL = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"


def page(prefix: str, *maddrs: object, **more) -> Callable:
    return send(OK, json.dumps({"experiment_prefix": prefix, "multiaddrs": maddrs, **more}).encode())


def expect_wrong_page(answer: Callable, words: str) -> None:
    start = time.monotonic()
    with serve(answer) as address, expect_user_error(address, words, "--status_port"):
        find_maddrs(address, "run")
    assert time.monotonic() - start < VISIT_TIMEOUT + 15  # on a busy machine


@pytest.mark.parametrize(
    "answer, words, timeout",
    [
        (drip(OK, b"{"), "no answer within 1 s", "training.page_client.VISIT_TIMEOUT"),
        (drip(PEER_GREETING), "a peer listens there, but does not reveal its id", "swarm.attestation.CONNECT_TIMEOUT"),
    ],
    ids=["page", "peer"],
)
def test_silent_page_is_one_line(monkeypatch, answer, words, timeout):
    monkeypatch.setattr(timeout, 1.0)
    expect_wrong_page(answer, words)


def test_wrong_page_is_one_line():
    for answer, words in (
        (send(OK, b"\xff\xfe\x00"), "no status page"),
        (send(OK, b"[" * 60_000), "no status page"),
        (drip(OK, b" " * 2 * MAX_PAGE_BYTES), f"longer than {MAX_PAGE_BYTES} bytes"),
        (send(b"SSH-2.0-OpenSSH_9.2\r\n"), "it answers b'SSH-2.0"),
        (send(b"HTTP/1.0 404 Not Found\r\n\r\n"), "404"),
        (page("another", LOCAL), "shows run 'another', not 'run'"),
        (page("run", "/ip4/999.0.0.1/tcp/1"), "no status page"),
        (page("run"), "accepts no connections"),
        (page("run", LOCAL, client_mode=True), "accepts no connections"),
        (send(OK, b"[1]"), "lists no multiaddrs"),
        (send(b""), "no status page"),
    ):
        expect_wrong_page(answer, words)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    cases = {f"127.0.0.1:{port}": "Connection refused", "no.such.host.invalid:80": "known"}
    cases |= dict.fromkeys(("127.0.0.1:99999", "127.0.0.1", "127.0.0.1:*", "http://a"), "HOST:PORT")
    for address, words in cases.items():
        with expect_user_error(words):
            find_maddrs(address, "run")


def test_dead_page_among_others_is_warning(caplog):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        dead = f"127.0.0.1:{listener.getsockname()[1]}"
    with serve(page("run", LOCAL)) as address:
        for addresses in ([dead, address], [address, dead]):
            caplog.clear()
            assert resolve_initial_peers(addresses, "run") == [LOCAL]
            assert [dead in record.message for record in caplog.records] == [True]
        assert resolve_initial_peers([dead, RELAY, dead], "run") == [RELAY]
        with expect_user_error("HOST:PORT"):  # a typo
            resolve_initial_peers([address, "127.0.0.1"], "run")
    with expect_user_error(dead, "--status_port"):
        resolve_initial_peers([dead, dead], "run")


def test_wrong_address_on_page_is_refused():
    for wrong in ("/ip4/127.0.0.1/tcp/1", f"{LOCAL},{LOCAL}", f"{LOCAL}\n", "a" * 600, {"a": 1}):
        with serve(page("run", wrong)) as address, expect_user_error("--initial_peers", "is not an address such as"):
            discover_settings(SwarmArguments("run", initial_peers=[address]), None)


def test_page_opens_if_first_address_drops_packets(monkeypatch):
    """As a name's address of IPv6 does in many networks. A full queue of connections drops packets too."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serve(page("run", LOCAL)))
        port = int(address.strip("/").rpartition(":")[2])
        stack.enter_context(silent := socket.create_server(("127.0.0.2", port), backlog=0))
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
        assert find_maddrs(f"example.org:{port}", "run") == [LOCAL]


def test_new_peer_gets_reachable_addresses():
    for maddrs, ip, chosen in (
        # the address that has just answered works
        (["/ip4/11.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1"], "192.168.1.2", ["/ip4/192.168.1.2/tcp/1"]),
        (["/ip4/11.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1"], "::ffff:11.0.0.1", ["/ip4/11.0.0.1/tcp/1"]),
        # behind a router or in a container, the peer does not know its address
        (["/ip4/127.0.0.1/tcp/31337"], "2001:db8::1", ["/ip6/2001:db8::1/tcp/31337"]),
        (["/ip4/10.0.0.2/tcp/1", RELAY], "11.2.3.4", ["/ip4/11.2.3.4/tcp/1", RELAY]),
        # on this machine, no address is replaced
        (["/ip4/10.0.0.2/tcp/1"], "127.0.0.1", ["/ip4/10.0.0.2/tcp/1"]),
        (["/ip4/127.0.0.1/tcp/1"], "127.0.0.1", ["/ip4/127.0.0.1/tcp/1"]),
    ):
        with_id = [f"{maddr}/p2p/{PEER}" for maddr in maddrs]
        assert choose_maddrs(with_id, ip) == [f"{maddr}/p2p/{PEER}" for maddr in chosen]

    # loopback is shown only alone
    local, home, public = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip4/11.0.0.1/tcp/1"
    assert list_shareable_maddrs([local, home, RELAY, public]) == [public, home, RELAY]
    assert list_shareable_maddrs([local, "/ip6/::1/tcp/1"]) == [local, "/ip6/::1/tcp/1"]
    assert [is_public(maddr) for maddr in (local, home, public, RELAY)] == [False, False, True, True]
    assert is_local("/ip6/::1/tcp/1") and not is_local("/ip6/2001:db8::1/tcp/1") and not is_local("/dns4/a/tcp/1")


def test_old_listen_addresses_parse():
    swarm = SwarmArguments("a", host_maddrs=["[::]:*", "/ip6/::1/tcp/0", "[::1]:31337", "127.0.0.1:*"])
    any_address = ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
    assert swarm.host_maddrs == [*any_address, "/ip6/::1/tcp/0", "/ip6/::1/tcp/31337", "/ip4/127.0.0.1/tcp/0"]
    for wrong in ("localhost:1", "1.2.3.4", "[::]:99999", "[1.2.3:4"):
        with pytest.raises(UserError, match="--host_maddrs"):
            make_host_maddrs(wrong)


def test_monitor_page_survives_hostile_visitors(start, tmp_path, prefix):
    shared = ["--seed", 7, "--optim", "adamw", "--learning_rate", 0.00176]  # the last one is a default that was typed
    words = ["--status_port", 0, *shared]
    monitor, address = start_monitor(start, prefix, tmp_path / "monitor", *words)
    port = int(monitor.wait_for(r"status page: http://\S+:(\d+)/").group(1))

    code, read = ask(port)[0], json.loads(ask(port)[2])
    assert code == 200 and read["multiaddrs"] == [address] and read["experiment_prefix"] == prefix
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

    for junk in (b"\x00" * 1000, PEER_GREETING, b"GET " + b"a" * 100_000, b"GET / HTTP/1.1\r\n" * 5000):
        # the page may hang up before it has heard all
        with socket.create_connection(("127.0.0.1", port), timeout=10) as visitor, contextlib.suppress(OSError):
            visitor.sendall(junk)
    # the port is in use; a monitor cannot be a client
    other = ["--experiment_prefix", prefix, *LOOPBACK, "--output_dir", tmp_path / "other"]
    in_use = refuse(run_training_monitor, *other, "--status_port", port)
    assert f"--status_port {port}: address already in use" in in_use
    assert "--client_mode" in refuse(run_training_monitor, *other, "--client_mode")
    stop(monitor)


class Browser:
    """A tab of a real browser, controlled through a pipe (--remote-debugging-pipe), without a driver."""

    def __init__(self, commands: int, answers: int):
        self.commands, self.answers, self.numbers, self.unread = commands, answers, itertools.count(1), b""
        self.complaints: list[str] = []  # the page's errors, including violations of its policy
        self.session = {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params) -> dict:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params} | self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != number:
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.complaints.append(answer["params"]["entry"]["text"])
            elif answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(answer["params"]["exceptionDetails"]))
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def read(self) -> dict:
        while b"\0" not in self.unread:
            assert select.select([self.answers], [], [], 60.0)[0], "the browser does not answer"
            data = os.read(self.answers, 1 << 20)
            assert data, "the browser has ended"
            self.unread += data
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def run(self, script: str):
        """Return the value of an expression in the page."""
        result = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60):
        try:
            return wait_until(lambda: self.run(script), seconds, f"in the page: {script}")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.complaints}\n{self.run('document.body.innerText')}") from None

    def click(self, selector: str) -> None:
        """Click with the mouse, because a page may copy only after a real click."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"{element}.getBoundingClientRect().toJSON()")
        where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def read_clipboard(self) -> str:
        self.ask("Browser.grantPermissions", permissions=["clipboardReadWrite"])
        return self.run("navigator.clipboard.readText()")

    def set_width(self, width: int) -> None:
        options = {"height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", width=width, **options)


@pytest.fixture
def tab(tmp_path):
    if not (chromium := shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")):
        pytest.skip("needs a browser: apt-get install chromium")
    (theirs_in, commands), (answers, theirs_out) = os.pipe(), os.pipe()
    # it reads commands from file 3 and answers in file 4
    words = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} 2>/dev/null', "bash", chromium, "--headless"]
    words += ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "about:blank"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--remote-debugging-pipe"]
    process = subprocess.Popen(words, pass_fds=[theirs_in, theirs_out], start_new_session=True)
    os.close(theirs_in), os.close(theirs_out)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands), os.close(answers)  # ends it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


# two peers are a full group, which averages at once
SETTINGS = {"--target_batch_size": 128, "--target_group_size": 2, "--total_steps": 5000, "--do_eval": True}
SETTINGS |= {"--eval_steps": 4, "--max_eval_samples": 32}


@pytest.mark.slow
def test_page_works_in_browser(start, tab, tmp_path, tiny_data):
    """The curve grows, a hostile name stays text, the copied command joins, and the monitor may restart."""
    prefix, port = make_prefix(), 0
    options = ["--identity_path", tmp_path / "monitor.id"]
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor", *options, "--status_port", port)
    port = int(monitor.wait_for(r"status page: http://\S+:(\d+)/").group(1))
    settings = {**SETTINGS, "--status_port": 0, **tiny_data}
    trainer = start_trainer(start, tmp_path, "one", prefix, peers, settings, {"--username": HOSTILE}, pace=0.1)
    tab.set_width(1400)
    tab.ask("Page.navigate", url=f"http://127.0.0.1:{port}/")
    tab.wait_for("document.querySelector('#chart .training')?.getAttribute('d')?.split('L').length > 3", 120)
    first = tab.run("status.epoch")
    tab.wait_for(f"points.at(-1)[0] > {first} && document.querySelectorAll('#chart .validation').length", 60)
    assert tab.run("document.querySelector('#contributors th').textContent").startswith(HOSTILE)
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert "python tokenize_wikitext103.py" in tab.run("document.querySelector('#data').innerText")
    assert "word frequencies" in tab.run("document.querySelector('#legend').textContent")
    # start a peer by the copied command
    tab.wait_for("status.join.includes('--target_batch_size')", 60)
    tab.click("[data-copies=join]")
    tab.wait_for("document.querySelector('[data-copies=join]').textContent === 'Copied'", 10)
    command = f'python() {{ printf "%s\\n" "$@"; }}\n{tab.read_clipboard()}'
    words = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=True).stdout.splitlines()
    own = {"--output_dir": tmp_path / "two", "--bandwidth": 1000, "--dataloader_num_workers": 0, **tiny_data}
    own |= {"--per_device_train_batch_size": 16, "--matchmaking_time": 3}
    assert words[0] == "run_trainer.py"
    other = start("two", *choose_trainer(0.1), *words[1:], *LOOPBACK, *flags(own))
    wait_until(lambda: any(e["averaged_with"] == 2 for e in history(tmp_path, "two").values()), 240, "an average")
    tab.wait_for("document.querySelectorAll('#contributors tr').length === 2", 60)
    tab.click("[data-copies=peers]")
    assert tab.read_clipboard() == peers
    # a trainer's own page
    own_port = int(trainer.wait_for(r"status page: http://\S+:(\d+)/").group(1))
    seen = json.loads(ask(own_port)[2])
    assert HOSTILE in [contributor["username"] for contributor in seen["contributors"]] and seen["join"]
    assert len(json.loads(ask(own_port, "/history.json")[2])["training"]) > 3

    for number in (1, 2, 3):
        tab.click(f"#axes button:nth-of-type({number})")
        box = tab.run("document.querySelector('#chart').getBoundingClientRect().toJSON()")
        where = {"x": box["x"] + 60, "y": box["y"] + 100}
        tab.ask("Input.dispatchMouseEvent", type="mouseMoved", **where)
        shown = tab.wait_for("document.querySelector('#read').textContent.match(/^epoch ([\\d,]+),/)?.[1]", 10)
        assert int(shown.replace(",", "")) < tab.run("status.epoch")
    for width in (390, 1400):
        tab.set_width(width)
        assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    # the monitor dies and restarts
    monitor.kill()
    tab.wait_for("document.querySelector('#news').textContent.startsWith('No answer since')", 60)
    same = ["--host_maddrs", re.sub("/p2p/.*", "", peers), *options, "--status_port", port]
    monitor, _ = start_monitor(start, prefix, tmp_path / "monitor", *same, name="again")
    last = tab.run("points.at(-1)[0]")
    tab.wait_for(f"$('news').textContent.startsWith('live') && points.at(-1)[0] > {last}", 120)
    assert tab.run("performance.getEntriesByType('navigation').length") == 1  # without another load
    # all trainers leave: the page shows the end and the result
    assert tab.run("status.ended") is None
    stop(trainer, other)
    tab.wait_for("status.ended", 60)
    assert time.time() - 60 < tab.run("status.ended") < time.time()
    news, figures = tab.run("$('news').innerText"), tab.run("$('figures').innerText")
    end = r"Ended .* at epoch [\d,]+ of 5,000 because all trainers left"
    losses = r"training loss \d+\.\d+, validation loss \d+\.\d+ at epoch [\d,]+"
    assert re.match(rf"{end}; .* Result: {losses}, [\d,]+ samples by [12] contributors?\.$", news), news
    assert re.search(r"peers now\s+0\b", figures) and re.search(r"samples/s\s+0", figures), figures
    assert "ends in" not in figures and tab.run("document.title").startswith("ended")
    tab.run("status.final_epoch = status.epoch; show()")
    assert re.match(r"Ended .* at epoch ([\d,]+) of \1\. Result: training loss ", tab.run("$('news').innerText"))
    stop(monitor)
