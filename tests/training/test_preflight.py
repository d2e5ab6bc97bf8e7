"""The preflight: its findings by numbers, its table as users see it, and wrong input at a start."""

import asyncio
import contextlib
import dataclasses
import os
import re
import resource
import shutil
import socket

from hivemind.dht.protocol import ValidationError
from processes import LOOPBACK, ROOT, make_prefix, run_python, wait_until
from swarms import TRAINER, flags, start_monitor

from arguments import (
    AveragingArguments,
    DataArguments,
    ModelArguments,
    OptimizerArguments,
    SwarmArguments,
    TrainerArguments,
)
from experiment.model import make_model
from swarm.attestation import diagnose_unreachable
from swarm.config import AveragingConfig, make_config
from swarm.uplink import Uplink
from training.checks import Check, check_disk, check_epoch_time, check_machine, check_step_time
from training.preflight import check_bandwidth, check_connection, run_preflight

PEER = "12D3KooWBadDR5ZTXD5kbXn8YbWYpzJk1VHokKJDVpj8dN7CipHr"


def test_preflight_compares_bandwidth_with_round():
    """In a large group, each peer sends its gradients and as many averages."""
    model = make_model(ModelArguments(str(ROOT / "configs/demo.json")), 1000)
    count, uplink = sum(param.numel() for param in model.parameters()), Uplink()
    uplink.set_bandwidth(count * 1e-5, is_fixed=True)
    options = make_config(AveragingConfig, AveragingArguments())
    # parameters are averaged uncompressed: twice the bytes of gradients in 16 bits
    for config, seconds in ((options, 6.4), (dataclasses.replace(options, state_compression="float16"), 3.2)):
        assert f"about {seconds} s" in check_bandwidth(model, config, uplink).message


def test_preflight_compares_epoch_with_matchmaking():
    assert check_epoch_time(2.0, peers=3, matchmaking_time=15).level == "warning"
    assert check_epoch_time(60.0, peers=3, matchmaking_time=15).level == "ok"
    # a single peer looks for no group
    assert check_epoch_time(2.0, peers=1, matchmaking_time=15).level == "ok"


def test_preflight_separates_errors_and_warnings(tmp_path):
    assert [check_step_time(seconds, 8).level for seconds in (0.1, 0.5, 10, 11)] == ["warning", "ok", "ok", "warning"]
    seen = [(True, False), (False, True), (False, False), (None, False)]
    assert [check_connection(["11.0.0.1"], *facts).level for facts in seen] == ["ok", "warning", "warning", "warning"]
    assert "--client_mode" in check_connection(["11.0.0.1"], False, True).hint
    parameters = int(shutil.disk_usage("/tmp").free / (12 * 10 + 4))  # room for nine of ten states and one more
    assert check_disk("/tmp", parameters, 10).level == "warning"
    args = TrainerArguments(output_dir=str(tmp_path / "not" / "there"))
    for parameters, level in ((1000, "ok"), (10**14, "fatal")):
        levels = {check.what: check.level for check in check_machine(parameters, args)}
        assert levels["memory"] == levels["disk"] == level


def test_preflight_formats_table_line():
    assert str(Check("disk", "fine", "no hint")) == "ok      disk            fine"
    lines = str(Check("disk", "it is full", "free some", is_fatal=True)).splitlines()
    assert lines == ["fatal   disk            it is full", " " * 24 + "-> free some"]


def test_file_limit_is_raised_if_allowed():
    code = """if True:
        import resource
        from resource import RLIMIT_NOFILE
        from arguments import TrainerArguments
        from training.checks import check_machine
        for hard in (resource.getrlimit(RLIMIT_NOFILE)[1], 256):
            resource.setrlimit(RLIMIT_NOFILE, (256, hard))
            print(check_machine(1, TrainerArguments())[0].level, resource.getrlimit(RLIMIT_NOFILE)[0])
        """
    level, limit, *hard = run_python("-c", code, expect=0).stdout.split()
    assert level == "ok" and int(limit) >= 4096
    assert hard == ["warning", "256"]


def test_unlimited_open_files_is_accepted(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert check_machine(1, TrainerArguments())[0].message == "no limit"


def test_preflight_reports_tokenizer_and_clock(monkeypatch, capsys, tmp_path):
    def be_late(**_):
        raise ValidationError("local: 3601.0, peer: 1.0")

    monkeypatch.setattr("swarm.joining.DHT", be_late)
    monkeypatch.setattr("swarm.joining.quiet_hivemind_logs", lambda: None)
    model_args = ModelArguments(str(ROOT / "configs/demo.json"), tokenizer_path=str(tmp_path / "none"))
    groups = [SwarmArguments("a"), model_args, OptimizerArguments(), AveragingArguments()]
    args = TrainerArguments(output_dir=str(tmp_path), device="cpu")
    assert run_preflight(None, (*groups, DataArguments(streaming=True), args)) == 2
    fatal = [line[8:].split() for line in capsys.readouterr().out.splitlines() if line.startswith("fatal")]
    assert [what for what, *_ in fatal] == ["tokenizer", "clock"], fatal


def test_preflight_explains_silent_peers():
    async def diagnose(*places: str) -> list[str | None]:
        return await asyncio.gather(*(diagnose_unreachable(f"{place}/p2p/{PEER}") for place in places))

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        silent = f"/ip4/127.0.0.1/tcp/{port}"
        reasons = asyncio.run(diagnose(silent, "/dns4/localhost/tcp/9", "/dns4/no.such.host.invalid/tcp/1", ""))
    assert "is not a hivemind peer" in reasons[0] and "nothing listens on its port 9" in reasons[1]
    assert "does not resolve" in reasons[2] and reasons[3] is None


def test_trainer_wrong_input_is_one_line(start, tmp_path, tiny_data):
    """Each at a real start of a trainer: exit code 2, one line that names the flag, no process left."""
    prefix = make_prefix()
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor", "--report_to", "none")
    port = peers.split("/")[4]
    another = peers.rpartition("/")[0] + f"/{PEER}"
    (tmp_path / "not_a_key").write_text("hello")
    (tmp_path / "vocabulary").mkdir()
    # a tokenizer like the dataset's, with one piece more
    tokenizer = (tiny_data["--tokenizer_path"] / "tokenizer.json").read_text()
    for path in tiny_data["--tokenizer_path"].iterdir():
        (tmp_path / "vocabulary" / path.name).write_bytes(path.read_bytes())
    changed = tokenizer.replace('"vocab": [', '"vocab": [["\u2581zyzzyva", -20.0],', 1)
    assert changed != tokenizer
    (tmp_path / "vocabulary" / "tokenizer.json").write_text(changed)
    cases = {
        "wrong_id": ({"--initial_peers": another}, f"its id is {peers.rpartition('/')[2]}"),
        "port": ({"--host_maddrs": f"/ip4/127.0.0.1/tcp/{port}"}, "--host_maddrs"),
        "announce": ({"--announce_maddrs": "/ip4/11.0.0.1/tcp/0"}, "--announce_maddrs"),
        "key": ({"--identity_path": tmp_path / "not_a_key"}, "not_a_key"),
        "folder": ({"--identity_path": tmp_path / "nowhere" / "key"}, "nowhere"),
        "vocabulary": ({"--tokenizer_path": tmp_path / "vocabulary"}, "another tokenizer"),
    }
    own = {**TRAINER, **tiny_data, "--experiment_prefix": prefix, "--initial_peers": peers}
    own |= {LOOPBACK[0]: LOOPBACK[1]}
    waiting = []
    for name, (wrong, words) in cases.items():
        more = {"--output_dir": tmp_path / name, **wrong}
        waiting.append((start(name, "run_trainer.py", *flags(own, more)), words))
        if len(waiting) == 2:  # not all at once: they load torch
            check_one_line(waiting)
    check_one_line(waiting)
    monitor.interrupt()
    monitor.assert_clean_end(30)


def check_one_line(waiting: list) -> None:
    while waiting:
        script, words = waiting.pop()
        assert script.wait(90) == 2, script.text
        errors = [line for line in script.text.splitlines() if "error:" in line]
        assert len(errors) == 1 and words in errors[0], script.text
        assert "Traceback" not in script.text
        wait_until(lambda script=script: not script.left_processes(), 5, f"no process left: {script.left_processes()}")


def test_preflight_tells_if_peer_may_train(start, tmp_path, tiny_data):
    prefix = make_prefix()
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor", "--report_to", "none")
    own = {**TRAINER, **tiny_data, "--experiment_prefix": prefix, "--output_dir": tmp_path / "out"}
    del own["--bandwidth"]  # it is measured
    preflight = ["run_trainer.py", "--preflight", *LOOPBACK, *flags(own)]
    good = start("good", *preflight, "--initial_peers", peers)
    assert good.wait(90) == 0, good.text
    table = {line[8:23].strip(): line[:8].strip() for line in good.text.splitlines() if line[:1] not in (" ", "")}
    for what in ("open files", "tokenizer", "dataset", "memory", "disk", "peer", "connection", "settings"):
        assert table[what] == "ok", good.text
    assert {"step time", "epoch time", "bandwidth", "own addresses"} < set(table), good.text
    assert re.search("bandwidth: measured .* Mbit/s up", good.text), good.text
    assert good.text.splitlines()[-1].startswith("ready to train")
    assert not os.path.exists(tmp_path / "out")  # it trains and writes nothing

    another = peers.rpartition("/")[0] + f"/{PEER}"
    wrong = start(
        "wrong", *preflight, "--initial_peers", another, "--dataset_path", tmp_path / "none", "--bandwidth", 0.01
    )
    assert wrong.wait(90) == 2, wrong.text
    fatal = [line[8:23].strip() for line in wrong.text.splitlines() if line.startswith("fatal")]
    assert fatal == ["dataset", "peer"], wrong.text
    assert "use the address it prints now" in wrong.text
    for script in (good, wrong):
        assert "Traceback" not in script.text
        wait_until(lambda script=script: not script.left_processes(), 5, f"no process left: {script.left_processes()}")
    monitor.interrupt()
    monitor.assert_clean_end(30)
