"""Curves, contributors, dashboards and reads of records; the monitor as users run it, fed through a real DHT."""

import json
import math
import os
import signal
import struct
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy
import psutil
import pytest
from file_server import send, serve
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from mains import refuse
from processes import LOOPBACK, ROOT, make_prefix, start_python, wait_until
from records import Peer, make_metrics, run_peers
from swarms import read_epochs, start_monitor

import run_training_monitor
from arguments import ReportArguments, SwarmArguments
from common.console import UserError
from monitoring.history import Contributions, History, load_history
from monitoring.report import READS_BEFORE_GOING_BACK, RunReport
from swarm.contract import RunContract
from training.figures import aggregate_metrics
from utils import RecordValidator, find_peer_id, peer_label


def test_history_thins_out_evenly(monkeypatch):
    monkeypatch.setattr("monitoring.history.MAX_POINTS", 100)
    for step in (5, 1):  # an observer may miss most epochs
        history = History()
        for epoch in range(1, 10_001, step):
            history.add({"epoch": epoch})
            assert history[-1]["epoch"] == epoch and len(history) <= 100
        epochs = [entry["epoch"] for entry in history]
        gaps = numpy.diff(epochs)
        assert epochs[0] == 1 and len(epochs) >= 50 and min(gaps) > 0 and max(gaps) < history.stride + step
    assert set(gaps[:-1]) == {history.stride}
    # the swarm continues from an older state
    history.add({"epoch": 5_000})
    assert [entry["epoch"] for entry in history] == [epoch for epoch in epochs if epoch < 5_000] + [5_000]


def test_history_round_trips(tmp_path):
    path, history = tmp_path / "metrics.jsonl", History()
    assert load_history(path, "run") == []
    line = {**vars(aggregate_metrics([("a", make_metrics())])), "experiment_prefix": "run", "total_samples": 64}
    lines = [line | {"epoch": epoch, "time": 1e9 + 10 * epoch} for epoch in (*range(1, 8), *range(4, 7))]
    others = line | {"experiment_prefix": "another"}, {"experiment_prefix": "run", "epoch": 10}, [1], lines[0]
    path.write_text("\n".join(map(json.dumps, [*lines, *others]))[:-9])  # the writer of the last line was killed
    for line in lines:
        history.add(line)
    assert load_history(path, "run") == history
    assert [entry["epoch"] for entry in history] == [1, 2, 3, 4, 5, 6]


def test_contributions_survive_restarts():
    contributors, expires = Contributions({}), iter(range(1, 100))

    def tell(label: str, total: int, epoch: int = 3, at: int | None = None) -> int:
        """Add a record of 64 samples in its epoch, `total` so far, and return the samples in the table."""
        record = make_metrics(epoch, total_samples=total), float(next(expires) if at is None else at)
        contributors.update({label: record}, {}, 1000.0 + record[1])
        return contributors.peers[label].total_samples

    assert tell("a", 640, at=0) == 640  # it was there before this monitor
    assert tell("a", 768, epoch=5) == 768
    assert tell("a", 640, at=0) == 768  # a read that missed the newest record
    seen = contributors.peers["a"].last_seen
    assert tell("b", 64) == 64
    # after a restart from a checkpoint, only its new 64 samples count
    assert tell("a", 704, epoch=6) == 832
    assert tell("a", 768, epoch=7) == 896
    # after a restart without one
    assert tell("a", 64, epoch=8) == 960
    assert tell("a", 128, epoch=9) == 1024
    assert contributors.peers["a"].last_seen > seen
    # its first record after a restart may hold no samples at all
    assert tell("a", 0, epoch=10) == 1024

    saved = {label: asdict(peer) for label, peer in contributors.ranking()}  # as summary.json has them
    contributors = Contributions(json.loads(json.dumps(saved)))
    assert contributors.total_samples() == 1024 + 64 and tell("a", 64, epoch=11) == 1088
    first, second = contributors.describe()["contributors"]
    assert (first["peer"], first["total_samples"], round(first["share"], 3)) == ("a", 1088, 0.944)
    assert (second["peer"], second["total_samples"], round(second["share"], 3)) == ("b", 64, 0.056)


def test_contributions_show_reports_and_counted_shares():
    contributors, names = Contributions({}), [letter * 8 for letter in "abcd"]
    claims = [dict(zip(names, it, strict=False)) for it in ((0.25, 1.0), (0.25, 1.0), (1.0, 0.0), ())]
    contributors.update(dict(zip(names, ((make_metrics(counted=it), 1e9) for it in claims), strict=True)), {}, 0.0)
    # those of most trainers
    assert [row["counted"] for row in contributors.describe()["contributors"]] == [0.25, 1.0, None, None]
    contributors, now = Contributions({}), get_dht_time()
    options = dict(peer_id=b"1", epoch=3, samples_accumulated=0, samples_per_second=1.0, client_mode=False)
    reports = {name: LocalTrainingProgress(time=now + at, **options) for name, at in (("there", -7), ("ahead", 9))}
    # the metrics of all were made 100 s ago
    contributors.update(dict.fromkeys(("gone", *reports), (make_metrics(), now + 500)), reports, now)
    seen = {label: peer.last_seen - now for label, peer in contributors.peers.items()}
    assert seen == pytest.approx({"gone": -100, "there": -7, "ahead": 0}, abs=0.01)


def test_contributions_are_bounded(monkeypatch):
    monkeypatch.setattr("monitoring.history.MAX_PEERS", 50)
    monkeypatch.setattr("monitoring.history.MAX_PEERS_SENT", 10)
    contributors = Contributions({})
    contributors.update({f"{i:08x}": (make_metrics(total_samples=i), 1.0) for i in range(80)}, {}, 0.0)
    shown = contributors.describe()
    assert len(contributors.peers) == 50 and min(peer.total_samples for peer in contributors.peers.values()) == 30
    assert [row["total_samples"] for row in shown["contributors"]] == list(range(79, 69, -1))
    assert shown["num_contributors"] == 50 and shown["total_samples"] == sum(range(30, 80))


def test_unreadable_summary_is_kept(tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(UserError, match=f"--output_dir {tmp_path} cannot be read"):
        RunReport(ReportArguments(output_dir=str(tmp_path)), SwarmArguments("run"))


def read_wandb_history(path: Path) -> dict[int, dict]:
    """Return the values of each step in a .wandb file: records in blocks of 32 KiB, as LevelDB writes its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, history = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        at += 32768 - at % 32768 if 32768 - at % 32768 < 7 else 0
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, part = Record.FromString(part).history, b""
            if record.item:
                names = [item.key or "/".join(item.nested_key) for item in record.item]
                values = [json.loads(item.value_json) for item in record.item]
                history[record.step.num] = dict(zip(names, values, strict=True))
    return history


def test_slow_dht_does_not_delay_reads(tmp_path, monkeypatch):
    """It answers after a second, because a peer that it asks does not; the period of reads is 1.5 s."""
    stop, requests, answered = threading.Event(), defaultdict(list), []

    def reply(answer: Future) -> None:
        answered.append(time.monotonic())
        answer.set_result(None)

    def get(key: str, **_) -> Future:
        requests[key].append(time.monotonic())
        answer = Future()
        threading.Timer(1.0, reply, [answer]).start()
        return answer

    monkeypatch.setattr("monitoring.report.STOP_REQUESTED", stop)
    report = RunReport(ReportArguments(output_dir=str(tmp_path), refresh_period=1.5), SwarmArguments("run"))
    dht = SimpleNamespace(get=get, attestation=None)
    report.attest(SimpleNamespace(dht=dht, prefix="run", attest=lambda *_: None))
    report.start()
    try:
        wait_until(lambda: len(requests["run_metrics"]) >= 4, 20, "four reads")
    finally:
        stop.set()
        report.reading.result()
    # on busy cores, some of them take longer
    periods = [after - before for before, after in pairwise(requests["run_metrics"])]
    assert min(periods) < 2.2, periods
    # all records are requested at once
    assert max(requests[f"run_{name}"][0] for name in ("metrics", "progress", "run")) < answered[0]


def test_contract_outlasts_long_round(tmp_path):
    """Then trainers renew their progress only."""
    report = RunReport(ReportArguments(output_dir=str(tmp_path)), SwarmArguments("run"))
    key = RecordValidator(RSAPrivateKey()).local_public_key
    report.workers.trust([find_peer_id(key)])
    contract = RunContract(joined=0.0, contract={"target_batch_size": "64"})
    report.update_contract({key: contract}, has_trainers=True)
    for _ in range(3):
        report.update_contract({}, has_trainers=True)
        assert report.contract == contract and report.workers.schedule.target_batch_size == 64
    report.update_contract({}, has_trainers=False)
    assert report.contract is None


def test_report_run_starts_over_drops_old_epochs(tmp_path, monkeypatch):
    """Reads may miss epochs; a restarted monitor shows the same curve."""
    report = RunReport(ReportArguments(output_dir=str(tmp_path)), SwarmArguments("run"))
    report.attest(SimpleNamespace(dht=SimpleNamespace(attestation=None), attest=lambda *_: None))
    for epoch in (1, 2, 3, 4, 5, 1, 1, 2, 4, 3):
        record = make_metrics(epoch), get_dht_time() + 600
        monkeypatch.setattr("training.figures.fetch_records", lambda *_, record=record, **__: {"a" * 8: record})
        report.update(is_last=True)
    pilot = read_epochs(tmp_path)[4]
    assert [entry["epoch"] for entry in report.history] == [2, 4]
    assert report.history[0]["time"] > pilot["time"]
    assert load_history(tmp_path / "metrics.jsonl", "run") == report.history


def test_restarted_report_waits_for_lost_peers(tmp_path, monkeypatch):
    """After an outage, peers of a live run are back after minutes; a new peer that came first has other epochs."""
    found, present = {}, {}
    monkeypatch.setattr("training.figures.fetch_records", lambda *_, **__: dict(found))
    monkeypatch.setattr("training.figures.fetch_progress", lambda *_: dict(present))
    monkeypatch.setattr("monitoring.report.fetch_contracts", lambda *_: {})

    def start_report() -> RunReport:
        report = RunReport(ReportArguments(output_dir=str(tmp_path)), SwarmArguments("run"))
        report.attest(SimpleNamespace(dht=SimpleNamespace(attestation=None), attest=lambda *_: None))
        return report

    def read(report: RunReport, epoch: int | None = None, is_there: bool = True) -> tuple[list[int], bool]:
        """Return the epochs of the curve, and whether the page shows an end, after some reads of a peer's records."""
        found.clear()
        present.clear()
        if epoch is not None:
            found["a" * 8] = make_metrics(epoch), get_dht_time() + 600
        if epoch is not None and is_there:
            options = dict(peer_id=b"1", samples_accumulated=0, samples_per_second=1.0, client_mode=False)
            present["a" * 8] = LocalTrainingProgress(time=get_dht_time(), epoch=epoch, **options)
        for _ in range(READS_BEFORE_GOING_BACK):
            report.update()
        return [entry["epoch"] for entry in report.history], report.read_progress()["ended"] is not None

    first = start_report()
    for epoch in (4, 5):
        read(first, epoch)
    assert read(first) == ([4, 5], True)  # it has seen the peers leave
    assert read(start_report()) == ([4, 5], False)
    assert read(start_report(), 1) == ([4, 5], False)
    assert read(start_report(), 5, is_there=False) == ([4, 5], False)  # a record outlives its peer
    # a peer of the run is back, and then leaves, or the run starts over
    back = start_report()
    assert read(back, 5) == ([4, 5], False) and read(back) == ([4, 5], True)
    back = start_report()
    assert read(back, 6) == ([4, 5, 6], False) and read(back, 5) == ([4, 5], False)
    monkeypatch.setattr("monitoring.report.RECONNECT_TIME", 0.0)
    assert read(start_report()) == ([4, 5], True)
    assert read(start_report(), 4) == ([4], False)


def test_dashboard_starts_after_failure(tmp_path, monkeypatch):
    """The service answers with errors. Later, a file gets the reports, until the process that writes it dies."""
    report = RunReport(ReportArguments(output_dir=str(tmp_path), wandb_project="mine"), SwarmArguments("run"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with monkeypatch.context() as patch, serve(send(b"HTTP/1.0 400 Bad Request\r\n\r\n")) as address:
        patch.setattr("monitoring.dashboards.INIT_TIMEOUT", 1.0)
        patch.setenv("WANDB_BASE_URL", f"http://{address}")
        report.start_dashboard()
    assert report.dashboard.run is None and math.isfinite(report.dashboard.retry_at)
    monkeypatch.setenv("WANDB_MODE", "offline")
    report.add_entry({"epoch": 1, "loss": 3.0})
    assert math.isfinite(report.dashboard.retry_at)  # not yet
    for epoch in (2, 4):
        report.dashboard.retry_at = 0.0
        report.add_entry({"epoch": epoch, "loss": 2.0})
        wait_until(lambda: report.dashboard.run, 60, "the dashboard")
        report.add_entry({"epoch": epoch + 1, "loss": 1.0})
        if epoch == 2:
            [service] = (it for it in psutil.Process().children(recursive=True) if it.name() == "wandb-core")
            service.kill()
            wait_until(lambda: report.add_entry({"epoch": 3, "loss": 1.0}) or not report.dashboard.run, 60, "a failure")
    report.dashboard.finish()
    file = max(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    assert {step: values["loss"] for step, values in read_wandb_history(file).items()} == {5: 1.0}


def publish_until_seen(monitor, peers: list[Peer], epoch: int, output_dir: Path, **fields) -> None:
    monitor.process.send_signal(signal.SIGSTOP)  # or it may look between two of them; its DHT is another process
    for peer in peers:
        peer.publish(make_metrics(epoch, **fields).dict())
    monitor.process.send_signal(signal.SIGCONT)
    wait_until(lambda: [e for e in read_epochs(output_dir) if e["epoch"] == epoch], 30, f"epoch {epoch}")


def test_monitor_follows_run_over_restart(start, tmp_path, prefix):
    """An attacker publishes records. The monitor restarts, one of two peers has left for good, and then the run starts
    over."""
    output_dir, key, env = tmp_path / "out", RSAPrivateKey(), {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    monitor, address = start_monitor(start, prefix, output_dir, "--wandb_project", "mine", env=env)
    assert f"python run_trainer.py --experiment_prefix {prefix} --initial_peers {address}\n" in monitor.text
    with run_peers(prefix, address, True, True, False, key=key) as (first, second, attacker):
        publish_until_seen(monitor, [first, second], 40, output_dir, loss=18.0, total_samples=856)
        attacker.store({**make_metrics(41).dict(), "loss": float("nan")})
        attacker.store({"epoch": 41})
        attacker.publish(make_metrics(10**9).dict())  # well formed: a lie
        first.publish(make_metrics(41, loss=30.0, mini_steps=6, total_samples=964).dict())
        publish_until_seen(monitor, [second], 41, output_dir, loss=8.0, mini_steps=2, total_samples=856)
        publish_until_seen(monitor, [first, second], 42, output_dir, loss=12.0, total_samples=1064, skipped_steps=1)
        wait_until(lambda: monitor.text.count("epoch 42  loss 6.0000"), 60, "the log of epoch 42")
        # a late observer reads the metrics at once
        own = ["--experiment_prefix", prefix, *LOOPBACK, "--initial_peers", address]
        late = start("late", "run_aux_peer.py", *own, "--refresh_period", "inf", "--output_dir", tmp_path / "late")
        late.wait_for("epoch 42  loss 6.0000")
        late.process.send_signal(signal.SIGINT)
        late.assert_clean_end(30)
        monitor.process.send_signal(signal.SIGTERM)
        monitor.assert_clean_end(30)
        stayed, left = peer_label(first.subkey), peer_label(second.subkey)

    epochs = read_epochs(output_dir)
    assert [entry["epoch"] for entry in epochs] == [40, 41, 42]
    assert [entry["loss"] for entry in epochs[::2]] == [9.0, 6.0]
    assert (epochs[-1]["alive_peers"], epochs[-1]["samples"]) == (2, 128)
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["epochs"], summary["last_loss"], summary["peers"].keys()) == (42, 6.0, {stayed, left})
    for peer in summary["peers"].values():
        assert (peer["total_samples"], peer["last_epoch"], peer["skipped_steps"]) == (1064, 42, 1)
    assert summary["total_samples"] == epochs[-1]["total_samples"] == 2128
    assert (output_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "\033" not in monitor.text  # no colours in a file
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    reported = read_wandb_history(file)
    for entry in epochs:
        values = reported.pop(entry["epoch"])
        assert values["loss"] == entry["loss"] and values["total_samples"] == entry["total_samples"]
        assert values["round/samples"] == entry["samples"] and values["alive_peers"] == entry["alive_peers"]
    # no path or address is reported
    assert not reported and str(tmp_path).encode() not in file.read_bytes() and b"/ip4/" not in file.read_bytes()

    # a peer returns and continues from a checkpoint, and then the run starts over under the same name
    monitor, address = start_monitor(start, prefix, output_dir, env=env, name="restarted")
    with run_peers(prefix, address, True, key=key) as peers:
        for epoch, (loss, total) in {43: (14.0, 864), 44: (12.0, 928), 2: (22.0, 128), 3: (21.0, 192)}.items():
            publish_until_seen(monitor, peers, epoch, output_dir, loss=loss, total_samples=total)
        monitor.process.send_signal(signal.SIGTERM)
        monitor.assert_clean_end(30)
    seen = json.loads((output_dir / "summary.json").read_text())["peers"]
    # after a restart, only the samples of the epoch itself are certainly new
    assert {name: it["total_samples"] for name, it in seen.items()} == {stayed: 1064 + 64 + 64 + 64 + 64, left: 1064}
    epochs = read_epochs(output_dir)
    assert [entry["epoch"] for entry in epochs] == [40, 41, 42, 43, 44, 2, 3]
    assert [entry["total_samples"] for entry in epochs[3:]] == [2192, 2256, 2320, 2384]


def test_monitor_outlives_full_disk_of_output(tmp_path):
    words = ["--experiment_prefix", make_prefix(), *LOOPBACK, "--output_dir", tmp_path / "out"]
    with open("/dev/full", "w") as full, open(log := tmp_path / "log", "w") as errors:
        monitor = start_python("run_training_monitor.py", *words, stdout=full, stderr=errors)
    try:
        wait_until(lambda: "Waiting for trainers" in log.read_text() or monitor.poll() is not None, 60, "its start")
        monitor.send_signal(signal.SIGINT)
        assert monitor.wait(60) == 0 and "Traceback" not in log.read_text(), log.read_text()
    finally:
        monitor.kill()


def test_monitor_wrong_flags_are_one_line():
    for flag, value in {"--output_dir": ROOT / "LICENSE", "--logging_dir": "LICENSE"}.items():
        assert flag in refuse(run_training_monitor, "--experiment_prefix", make_prefix(), *LOOPBACK, flag, value)
