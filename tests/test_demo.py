"""The Makefile's targets: `make demo`, run as users do, which takes minutes (`make test-all`), and `make setup`."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from processes import ROOT, run_python, wait_for_end, wait_until
from safetensors.numpy import load_file


@pytest.fixture
def start_demo(start, tmp_path):
    return lambda name="demo": start(name, "demo.py", "--output_dir", tmp_path / "out")


def find_processes(demo) -> list[psutil.Process]:
    return psutil.Process(demo.process.pid).children(recursive=True)


@pytest.mark.slow
def test_demo_beats_word_frequencies(start_demo, tmp_path):
    started = time.monotonic()
    demo = start_demo()
    demo.wait_for(r"(?m)^epoch \d+/", 300)
    assert len(processes := find_processes(demo)) > 3
    assert demo.wait(600) == 0 and time.monotonic() - started < 600, demo.text[-3000:]
    wait_for_end(processes, 60)
    # compute the figures again from the files
    out = tmp_path / "out"
    summaries = [json.loads((out / name / "summary.json").read_text()) for name in ("trainer1", "trainer2")]
    entropy = json.loads((out / "data" / "dataset" / "corpus.json").read_text())["unigram_entropy"]
    weights = [load_file(out / name / "model" / "model.safetensors") for name in ("trainer1", "trainer2")]
    assert all(summary["final_loss"] < entropy - 0.1 for summary in summaries)
    assert all(abs(weights[0][name] - weights[1][name]).max() <= 1e-6 for name in weights[0])

    assert re.search(r"(?m)^The status page, until the run ends: http://127\.0\.0\.1:\d+$", demo.text)
    *figures, _, heading, _, _, _ = demo.text.splitlines()[-11:]
    assert heading == "Three texts by the trained model:"
    assert all(re.fullmatch(r"  .*\[\S*\].*", line) for line in demo.text.splitlines()[-3:])
    final, contributions, averaged, agreement, checkpoint, curve = figures
    loss, _, printed_entropy = re.fullmatch(r"final loss (\S+) \(start (\S+), unigram entropy (\S+)\)", final).groups()
    assert float(loss) == pytest.approx(max(summary["final_loss"] for summary in summaries), abs=1e-3)
    assert float(printed_entropy) == pytest.approx(entropy, abs=1e-3)
    assert all(f"{summary['samples']:,} samples" in contributions for summary in summaries)
    joint = re.fullmatch(r"averaged with 2 of 2 in (\d+) of 128 epochs", averaged)[1]
    assert int(joint) >= 120  # on a loaded machine single rounds fail
    assert agreement.startswith("the peers' weights agree")
    assert (ROOT / checkpoint.removeprefix("checkpoint: ") / "config.json").exists()
    assert (ROOT / curve.removeprefix("learning curve: ")).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["Tokenize", "Start the monitor", "Start another peer", r"\nepoch \d+/"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_ctrl_c_leaves_no_process(start_demo, moment, number):
    demo = start_demo()
    demo.wait_for(moment, 300)
    wait_until(lambda: find_processes(demo), 60, "a process of the demo's")
    processes = find_processes(demo)
    demo.process.send_signal(number)
    assert demo.wait(30) == 128 + number
    wait_for_end(processes, 60)
    assert "Traceback" not in demo.text and demo.text.endswith("\ninterrupted: the same command starts again\n")


@pytest.mark.slow
def test_second_demo_leaves_first_alone(start_demo, tmp_path):
    first = start_demo()
    first.wait_for("Start the monitor", 300)
    second, folder = start_demo("second"), f"--output_dir {tmp_path / 'out'}"
    assert second.wait(30) == 2
    assert second.text == f"demo.py: error: {folder} is in use by another peer, or not yours: choose another one\n"
    assert first.process.poll() is None and (tmp_path / "out" / "monitor.log").exists()
    first.interrupt()
    assert first.wait(30) == 130


def test_demo_wrong_flags_remove_nothing(tmp_path):
    (tmp_path / "thesis").write_text("of a year")
    for config, words in (
        ("configs/demo.json", "has other files, such as thesis: give a new folder"),
        ("configs/no.json", "--config_path must be one of configs/demo.json, "),
    ):
        [line] = run_python("demo.py", "--output_dir", tmp_path, "--config_path", config, expect=2).stderr.splitlines()
        assert line.startswith("demo.py: error: ") and words in line
        assert (tmp_path / "thesis").read_text() == "of a year"


@pytest.mark.slow
def test_demo_fails_after_killed_trainer(start_demo, tmp_path):
    demo = start_demo()
    demo.wait_for(r"(?m)^epoch \d+/", 300)
    processes = find_processes(demo)
    parents = [p for p in psutil.Process(demo.process.pid).children() if "run_trainer.py" in p.cmdline()]
    parents[0].kill()
    assert demo.wait(60) == 1
    wait_for_end(processes, 60)
    assert f"error: trainer1 ended by signal SIGKILL, see {tmp_path / 'out' / 'trainer1.log'}" in demo.text


@pytest.fixture
def set_up(tmp_path):
    """set_up(shell, *words) -> the finished `make setup`, in a folder of its own, with a shell script as its Python."""
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    # `make test` may have set variables
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}

    def run(shell: str, *words: str) -> subprocess.CompletedProcess:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{shell}\n")
        (tmp_path / "python").chmod(0o755)
        command = ["make", "setup", f"PYTHON={tmp_path / 'python'}", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0"])
def test_setup_unsupported_python_is_one_line(version, set_up, tmp_path):
    code = f"import sys; sys.version_info = ({version.replace('.', ', ')}); exec(sys.argv[1])"
    run = set_up(f'[ "$1" = --version ] && echo Python {version} && exit\nexec {sys.executable} -c \'{code}\' "$2"')
    line, of_make = run.stderr.splitlines()
    assert run.returncode == 2 and not run.stdout and of_make.startswith("make: ***")
    assert f"Python {version}" in line and "3.13" in line and "make setup PYTHON=python3.12" in line
    assert not (tmp_path / ".venv").exists()


def test_setup_failure_names_step_and_cure(set_up, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(shutil.which("false"))  # as if pip had failed
    (tmp_path / ".venv" / "complete").touch()
    os.utime(tmp_path / ".venv" / "complete", (0, 0))  # older than the lists
    run = set_up(f'[ "$2" = venv ] || exec {sys.executable} "$@"', "TORCH=torch==0 --no-index")
    assert run.returncode == 2 and "set-up: .venv is unfinished" in run.stdout
    *_, line, _ = run.stderr.splitlines()
    assert "set-up: installing torch==0 --no-index failed" in line and "network" in line and "same command" in line
    assert not (tmp_path / ".venv" / "complete").exists()


def test_constraints_lie_within_requirements():
    ranges, pins = (
        [Requirement(line) for line in (text.split("#")[0].strip() for text in (ROOT / name).open()) if line]
        for name in ("requirements.txt", "constraints.txt")
    )
    versions = {pin.name.lower().replace("_", "-"): Version(str(pin.specifier).removeprefix("==")) for pin in pins}
    assert "torch" not in versions
    for requirement in ranges:
        assert versions[requirement.name.lower().replace("_", "-")] in requirement.specifier, requirement
