"""The status page: in a real browser with a live swarm, and the answers to friendly and hostile visitors."""

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import browser
import pytest
from mains import refuse
from processes import LOOPBACK, make_prefix, wait_until
from records import ask, make_metrics
from swarms import choose_trainer, flags, history, start_monitor, start_trainer, stop

import run_trainer
from monitoring.history import MAX_PEERS_SENT, MAX_POINTS_SENT, Contributions, History
from monitoring.page import MAX_VISITORS, StatusServer
from training.page_client import MAX_PAGE_BYTES
from utils import LocalMetrics

# a volunteer's name of the most hostile kind that is accepted
HOSTILE = "expression.alert_1-"  # the most that a name may be, see USERNAME of common/flags.py
PEER = "12D3KooWBadDR5ZTXD5kbXn8YbWYpzJk1VHokKJDVpj8dN7CipHr"


def make_history(epochs: int) -> History:
    run = History()
    for epoch in range(1, epochs + 1):
        validation = {"validation_epoch": epoch, "validation_loss": 5.0} if epoch % 2 == 0 else {}
        metrics = {**make_metrics(epoch).dict(), "alive_peers": 2, "time": 1e9 + 6 * epoch, **validation}
        run.add({**metrics, "loss": 8.0 / epoch})
    return run


@pytest.fixture
def server():
    """A page of a long run with many contributors, and a DHT without other peers."""
    contributors = Contributions({})
    records = {f"{i:08x}": (make_metrics(total_samples=i, username="\U00020000" * 32), 1.0) for i in range(500)}
    contributors.update(records, {}, 0.0)
    maddrs = [f"/ip4/203.0.113.{i}/tcp/31337/p2p/{PEER}" for i in range(8)]
    dht = SimpleNamespace(get_visible_maddrs=lambda: maddrs, client_mode=False, peer_id=PEER, membership=None)
    server = StatusServer(0, "run")
    server.serve(dht, lambda: {"epoch": 3000, "flags": "", **contributors.describe()}, make_history(3000))
    yield server
    server.shutdown()
    server.server_close()


def test_page_serves_browsers_and_programs(server):
    port = server.socket.getsockname()[1]
    for path, accept in (("/", "*/*"), ("/status", "*/*"), ("/status.json", "text/html,*/*")):
        code, headers, body = ask(port, path, Accept=accept)
        assert code == 200 and headers["Content-Type"] == "application/json"
        status = json.loads(body)
        assert status["experiment_prefix"] == "run" and len(status["multiaddrs"]) == 8
        # with any names, others can still join by HOST:PORT
        assert len(status["contributors"]) == MAX_PEERS_SENT and len(body) < MAX_PAGE_BYTES * 0.9
    code, headers, body = ask(port, Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert code == 200 and headers["Content-Type"].startswith("text/html") and body.startswith(b"<!DOCTYPE html>")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert b"<code>python tokenize_wikitext103.py</code>" in body
    # no external resources, and no markup from texts
    assert not re.search(rb'(?:src|href)="(?!data:,|status\.json)|@import|url\(', body)
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", body)


def test_page_history_is_bounded(server):
    port = server.socket.getsockname()[1]

    def get(query: str) -> dict:
        return json.loads(ask(port, f"/history.json{query}")[2])

    full = get("")
    epochs = [point[0] for point in full["training"]]
    assert epochs[-1] == 3000 and epochs == sorted(set(epochs)) and 200 < len(epochs) <= MAX_POINTS_SENT
    assert full["begin"] == 1e9 and 200 < len(full["validation"]) <= MAX_POINTS_SENT
    assert [point[0] for point in get("?since=2998")["training"]] == [2999, 3000]
    assert get("?since=3000")["training"] == [] and get("?since=-1") == full
    for wrong in ("?since=a", "?since=99999999999999999999", "?since=1e3"):
        assert ask(port, f"/history.json{wrong}")[0] == 400


def test_page_replaces_oldest_idle_connection(server, monkeypatch):
    """500 visitors that send nothing."""
    monkeypatch.setattr("monitoring.page.StatusHandler.timeout", 2.0)
    port, threads = server.socket.getsockname()[1], threading.active_count()
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", port)
        many = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(500)]
        assert ask(port)[0] == 200
        assert threading.active_count() <= threads + MAX_VISITORS
        many[-1].settimeout(5)
        wait_until(lambda: not server.visits, 10, "none that says nothing stays")
        assert many[0].recv(1) == many[-1].recv(1) == b""
    wait_until(lambda: threading.active_count() <= threads, 10, "no thread is left")


def test_page_escapes_peer_names(tmp_path):
    assert make_metrics(username="Катя").dict()["username"] == "Катя" and "username" not in make_metrics().dict()
    for wrong in ("", " a", "a" * 33, "a\n", "a\u202eb", "\x1b[31m", "<img src=x onerror=alert(1)>", 5):
        with pytest.raises(ValueError, match="username"):
            LocalMetrics.parse_obj({**make_metrics().dict(), "username": wrong})
    command = ("--experiment_prefix", "a", *LOOPBACK, "--output_dir", tmp_path, "--username")
    assert "--username 'a\\tb' is not a name" in refuse(run_trainer, *command, "a\tb")


# two peers are a full group, which averages at once
SETTINGS = {"--target_batch_size": 128, "--target_group_size": 2, "--total_steps": 5000, "--do_eval": True}
SETTINGS |= {"--eval_steps": 4, "--max_eval_samples": 32}


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_page_works_in_browser(start, tmp_path, tiny_data):
    """The curve grows, a hostile name stays text, the copied command joins, and the monitor may restart."""
    prefix, port = make_prefix(), 0
    options = ["--identity_path", tmp_path / "monitor.id", "--report_to", "none"]
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor", *options, "--status_port", port)
    port = int(monitor.wait_for(r"status page: http://\S+:(\d+)/").group(1))
    settings = {**SETTINGS, "--status_port": 0, **tiny_data}
    trainer = start_trainer(start, tmp_path, "one", prefix, peers, settings, {"--username": HOSTILE}, pace=0.1)
    pictures = Path(os.environ.get("KEEP_PICTURES", tmp_path))
    with browser.open_browser(tmp_path / "profile") as tab:
        tab.set_width(1400)
        tab.open(f"http://127.0.0.1:{port}/")
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
            for scheme in ("light", "dark"):
                tab.take_picture(pictures / f"page_{width}_{scheme}.png", width, scheme)
            assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.complaints == []

        # the monitor dies and restarts
        monitor.kill()
        tab.wait_for("document.querySelector('#news').textContent.startsWith('No answer since')", 60)
        same = ["--host_maddrs", re.sub("/p2p/.*", "", peers)]
        same += [*options, "--status_port", port]
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
        result = (
            r"training loss \d+\.\d+, validation loss \d+\.\d+ at epoch [\d,]+, [\d,]+ samples by [12] contributors?\."
        )
        assert re.match(f"{end}; .* Result: {result}$", news), news
        assert re.search(r"peers now\s+0\b", figures) and re.search(r"samples/s\s+0", figures), figures
        assert "ends in" not in figures and tab.run("document.title").startswith("ended")
        tab.run("status.final_epoch = status.epoch; show()")
        assert re.match(r"Ended .* at epoch ([\d,]+) of \1\. Result: training loss ", tab.run("$('news').innerText"))
    stop(monitor)
