"""Measurements: the GPU benchmark without a GPU, the task of lm-eval in sample_data/, and the dress rehearsal; and the
emulated network, which does what tests of faults rely on: delay, rate, partition, firewall, NAT."""

import json
import re
import shlex
import subprocess
import sys
import time

import netlab
import pytest
from processes import ROOT, run_python, wait_until

from arguments import ModelArguments
from experiment.model import make_model
from text.instances import TEXT
from text.tokenizers import load_tokenizer

BENCHMARK = ROOT / "benchmarks" / "gpu_bench.py"


def test_gpu_bench_without_gpu_names_small_form():
    run = run_python(BENCHMARK, env={"CUDA_VISIBLE_DEVICES": ""}, expect=2)
    [line] = run.stderr.splitlines()
    assert "`python benchmarks/gpu_bench.py --small`" in line and not run.stdout


@pytest.mark.slow
def test_gpu_bench_small_form_fills_each_row():
    run = run_python(BENCHMARK, "--small", timeout=600, expect=0)
    rows = [line.split("|")[1:-1] for line in run.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8
    for _, _, result in rows:
        numbers = re.findall(r"(?<![\w:.])\d[\d,]*(?:\.\d+)?", result)  # not that of cpu:0
        assert numbers and all(float(number.replace(",", "")) > 0 for number in numbers), result


@pytest.mark.slow
def test_harness_command_evaluates_saved_model(tmp_path, text_data):
    """An untrained model chooses one of four orders of words at random."""
    pytest.importorskip("lm_eval")
    tokenizer = load_tokenizer(text_data["--tokenizer_path"], TEXT)
    for part in (model := make_model(ModelArguments("configs/gpt-demo.json"), tokenizer)), tokenizer:
        part.save_pretrained(tmp_path / "model")
    assert model.objective.is_causal
    page = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "models.md").read_text())
    command = re.search(r"(?m)^    (lm_eval .*)$", page)[1].replace("outputs/trainer/model", str(tmp_path / "model"))
    words = ["-m", *shlex.split(command), "--device", "cpu", "--output_path", tmp_path / "results.json"]
    run_python(*words, expect=0, timeout=300)
    [results] = tmp_path.glob("results*.json")
    results = json.loads(results.read_text())
    assert results["n-samples"]["word_order"]["original"] == 60
    assert 0.1 < results["results"]["word_order"]["acc,none"] < 0.4


@pytest.mark.slow
def test_rehearsal_survives_churn_and_colluding_liars(tmp_path):
    if why := netlab.unavailable():
        pytest.skip(why)
    data = ["--dataset_path", tmp_path / "dataset", "--tokenizer_path", tmp_path / "tokenizer"]
    words = ["--objective", "clm", "--corpus", "sample", "--train_tokenizer", "--vocab_size", 1000, "--seq_length", 64]
    run_python("tokenize_wikitext103.py", *words, *data, timeout=300, expect=0)
    out = ["--output_dir", tmp_path / "out"]
    run_python(ROOT / "benchmarks" / "rehearsal.py", "--short", *data, *out, timeout=2400, expect=0)
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert list(figures) == ["closed", "open"]
    kinds = {event["kind"] for run in figures.values() for event in run["events"]}
    assert kinds >= {*["kill", "freeze", "partition", "slow", "router", "clock", "newcomer", "disk", "monitor", "aux"]}
    for run in figures.values():
        assert len(run["lies"]) == 2 and len(run["codes"]) >= 12 and not any(run["codes"]) and not run["deaths"]
        assert run["digests"] == 1 and not run["bans"] and not run["poisoned"] and run["goodput"] > 0.85
        assert run["loss"] < 1.15 * run["alone"]  # after seven sparse commits
        assert run["page"]["looks"] > 40 and len(run["page"]["epoch"]) < 5 and not run["page"]["loss"]


# answers a million bytes by the address that sent them
SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 5000))
while True:
    connection, address = listener.accept()
    received = 0
    while received < 1_000_000 and (data := connection.recv(1 << 16)):
        received += len(data)
    connection.sendall(address[0].encode())
    connection.close()
"""
# prints the seconds of a handshake (a round trip), and of sending a million bytes, and the answer
CLIENT = """
import socket, sys, time
begin = time.monotonic()
connection = socket.create_connection((sys.argv[1], 5000), timeout=3)
print(time.monotonic() - begin)
connection.settimeout(20)
connection.sendall(bytes(1_000_000))
answer = connection.recv(99).decode()
print(time.monotonic() - begin)
print(answer)
"""


def connect(net: netlab.Net, source: str, target: str) -> list[str]:
    """Return what a client prints, nothing without a connection."""
    client = net.popen(source, [sys.executable, "-c", CLIENT, net.ip(target)], stdout=-1, stderr=-1, text=True)
    output, errors = client.communicate()
    assert output or "timed out" in errors or "refused" in errors, errors
    return output.split() if client.returncode == 0 else []


@pytest.mark.slow
def test_netlab_links_match_declaration(net):
    net.host("near")
    net.host("far", rtt_ms=80, up=20, down=20)
    net.host("guarded", firewall=True)
    net.host("home", nat="router")
    net.start()
    for name in ("near", "far", "guarded"):
        net.popen(name, [sys.executable, "-c", SERVER])
    both = [("near", "far"), ("far", "near")]
    wait_until(lambda: all(connect(net, *pair) for pair in both), 20, "both servers listen")
    round_trip, seconds, _ = connect(net, "near", "far")
    assert 0.08 <= float(round_trip) < 0.5
    assert 0.4 <= float(seconds) < 3  # 8 Mbit at 20 Mbit/s
    assert connect(net, "guarded", "far") and connect(net, "home", "near")
    assert not connect(net, "near", "guarded")

    net.partition(["far", "home"])
    assert connect(net, "home", "far") and not connect(net, "near", "far")
    net.heal()
    assert connect(net, "near", "far")
    net.set("far", down=2)
    before = time.monotonic(), net.bytes("far")[1]
    assert connect(net, "near", "far")
    assert time.monotonic() - before[0] > 4 and net.bytes("far")[1] - before[1] > 1_000_000


def test_netlab_renumbers_router_and_leaves_nothing():
    if why := netlab.unavailable():
        pytest.skip(why)
    with netlab.Net() as net:
        net.host("server")
        net.host("home", nat="router")
        net.start()
        net.popen("server", [sys.executable, "-c", SERVER])
        before = wait_until(lambda: connect(net, "home", "server"), 20, "the server listens")
        net.renumber("home")
        after = wait_until(lambda: connect(net, "home", "server"), 20, "the host reaches the server")
        assert (before[-1], after[-1]) == ("11.99.0.2", "11.99.0.3")
        daemon = net.popen("home", ["setsid", "sleep", "1000"])
        assert net.tag in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert daemon.poll() is not None
    assert net.tag not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
