"""The monitor as users run it, fed with records through a real DHT that joins it."""

import contextlib
import json
import signal
import sqlite3
from pathlib import Path

import pytest
from hivemind.utils.crypto import RSAPrivateKey
from mains import refuse
from processes import LOOPBACK, ROOT, make_prefix, start_python, wait_until
from records import Peer, make_metrics, run_peers
from swarms import read_epochs, start_monitor

import run_training_monitor
from utils import peer_label


def publish_until_seen(monitor, peers: list[Peer], epoch: int, output_dir: Path, **fields) -> None:
    monitor.process.send_signal(signal.SIGSTOP)  # or it may look between two of them; its DHT is another process
    for peer in peers:
        peer.publish(make_metrics(epoch, **fields).dict())
    monitor.process.send_signal(signal.SIGCONT)
    wait_until(lambda: [e for e in read_epochs(output_dir) if e["epoch"] == epoch], 30, f"epoch {epoch}")


def test_monitor_follows_run_and_exits_cleanly(start, tmp_path):
    prefix, output_dir = make_prefix(), tmp_path / "out"
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    monitor, address = start_monitor(start, prefix, output_dir, env=environment)
    assert f"python run_trainer.py --experiment_prefix {prefix} --initial_peers {address}\n" in monitor.text
    with run_peers(prefix, address, True, True, False) as (first, second, attacker):
        publish_until_seen(monitor, [first, second], 1, output_dir, loss=18.0)
        attacker.store({**make_metrics(2).dict(), "loss": float("nan")})
        attacker.store({"epoch": 2})
        attacker.publish(make_metrics(10**9).dict())  # well formed: a lie
        first.publish(make_metrics(2, loss=30.0, mini_steps=6, total_samples=300).dict())
        publish_until_seen(monitor, [second], 2, output_dir, loss=8.0, mini_steps=2)
        publish_until_seen(monitor, [first, second], 3, output_dir, loss=12.0, total_samples=400, skipped_steps=1)
        wait_until(lambda: monitor.text.count("epoch 3  loss 6.0000"), 10, "the log of epoch 3")
        # a late observer reads the metrics at once
        flags = ["--experiment_prefix", prefix, *LOOPBACK, "--initial_peers", address, "--report_to", "none"]
        late = start("late", "run_aux_peer.py", *flags, "--refresh_period", "inf", "--output_dir", tmp_path / "late")
        late.wait_for("epoch 3  loss 6.0000")
        late.process.send_signal(signal.SIGINT)
        late.assert_clean_end(30)
        monitor.process.send_signal(signal.SIGINT)
        monitor.assert_clean_end(30)
        labels = {peer_label(first.subkey), peer_label(second.subkey)}

    epochs = read_epochs(output_dir)
    assert [entry["epoch"] for entry in epochs] == [1, 2, 3]
    assert [entry["loss"] for entry in epochs[::2]] == [9.0, 6.0]
    assert epochs[-1]["alive_peers"] == 2
    assert epochs[-1]["samples"] == 128
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["epochs"] == 3 and summary["last_loss"] == 6.0
    assert summary["peers"].keys() == labels
    for peer in summary["peers"].values():
        assert (peer["total_samples"], peer["last_epoch"], peer["skipped_steps"]) == (400, 3, 1)
    assert summary["total_samples"] == epochs[-1]["total_samples"] == 800
    assert (output_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not any("\033" in line for line in monitor.text.splitlines())  # no colours in a file

    [run] = read_trackio(environment, prefix).values()
    assert {step: values["loss"] for step, values in run.items()} == {1: 9.0, 2: epochs[1]["loss"], 3: 6.0}


def read_trackio(environment: dict, prefix: str) -> dict[str, dict[int, dict]]:
    """Return the dashboard's values of each step by run."""
    runs = {}
    with contextlib.closing(sqlite3.connect(Path(environment["TRACKIO_DIR"]) / f"{prefix}.db")) as database:
        for run, step, values in database.execute("SELECT run_name, step, metrics FROM metrics"):
            assert step not in runs.setdefault(run, {})
            runs[run][step] = json.loads(values)
    return runs


def test_monitor_restart_keeps_curves_and_contributors(start, tmp_path):
    """The monitor restarts, and then the run starts over."""
    prefix, output_dir, key = make_prefix(), tmp_path / "out", RSAPrivateKey()
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio")}

    def contributors() -> dict[str, int]:
        peers = json.loads((output_dir / "summary.json").read_text())["peers"]
        return {label: peer["total_samples"] for label, peer in peers.items()}

    # two peers, of which one leaves for good
    monitor, address = start_monitor(start, prefix, output_dir, env=environment, name="one")
    with run_peers(prefix, address, True, True, key=key) as (first, second):
        publish_until_seen(monitor, [first, second], 40, output_dir, loss=18.0, total_samples=1000)
        publish_until_seen(monitor, [first, second], 41, output_dir, loss=16.0, total_samples=1064)
        monitor.process.send_signal(signal.SIGTERM)
        monitor.assert_clean_end(30)
        stayed, left = peer_label(first.subkey), peer_label(second.subkey)
    assert contributors() == {stayed: 1064, left: 1064}

    # a peer returns and continues from a checkpoint
    monitor, address = start_monitor(start, prefix, output_dir, env=environment, name="two")
    with run_peers(prefix, address, True, key=key) as (first,):
        publish_until_seen(monitor, [first], 42, output_dir, loss=14.0, total_samples=864)
        publish_until_seen(monitor, [first], 43, output_dir, loss=12.0, total_samples=928)
        # the run starts over under the same name
        publish_until_seen(monitor, [first], 2, output_dir, loss=22.0, total_samples=128)
        publish_until_seen(monitor, [first], 3, output_dir, loss=21.0, total_samples=192)
        monitor.process.send_signal(signal.SIGTERM)
        monitor.assert_clean_end(30)

    # after a restart, only the samples of the epoch itself are certainly new
    assert contributors() == {stayed: 1064 + 64 + 64 + 64 + 64, left: 1064}
    epochs = read_epochs(output_dir)
    assert [entry["epoch"] for entry in epochs] == [40, 41, 42, 43, 2, 3]
    assert [entry["total_samples"] for entry in epochs[2:]] == [2192, 2256, 2320, 2384]

    # the dashboard has one curve over both restarts, and one of the new run
    old_run, new_run = read_trackio(environment, prefix).values()
    assert {step: values["loss"] for step, values in old_run.items()} == {40: 9.0, 41: 8.0, 42: 7.0, 43: 6.0}
    assert {step: values["loss"] for step, values in new_run.items()} == {2: 11.0, 3: 10.5}
    totals = {entry["epoch"]: entry["total_samples"] for entry in epochs[:4]}
    assert {step: values["total_samples"] for step, values in old_run.items()} == totals


def test_monitor_outlives_full_disk_of_output(tmp_path):
    words = ["--experiment_prefix", make_prefix(), *LOOPBACK, "--report_to", "none", "--output_dir", tmp_path / "out"]
    log = tmp_path / "log"
    with open("/dev/full", "w") as full, open(log, "w") as errors:
        monitor = start_python("run_training_monitor.py", *words, stdout=full, stderr=errors)
    try:
        wait_until(lambda: "Waiting for trainers" in log.read_text() or monitor.poll() is not None, 60, "its start")
        monitor.send_signal(signal.SIGINT)
        assert monitor.wait(60) == 0 and "Traceback" not in log.read_text(), log.read_text()
    finally:
        monitor.kill()


@pytest.mark.parametrize(
    "flag, value", [("--report_to", "wandb"), ("--output_dir", ROOT / "LICENSE"), ("--logging_dir", ROOT / "LICENSE")]
)
def test_monitor_wrong_flags_are_one_line(flag, value):
    assert flag in refuse(run_training_monitor, "--experiment_prefix", make_prefix(), *LOOPBACK, flag, value)
