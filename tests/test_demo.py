"""`make demo`, run as users do, which takes minutes: `make test-all`."""

import json
import re
import signal
import time

import psutil
import pytest
from processes import ROOT, run_python, wait_for_end, wait_until
from safetensors.numpy import load_file


@pytest.fixture
def start_demo(start, tmp_path):
    def start_with_flags(*flags: object, name: str = "demo"):
        return start(name, "demo.py", "--output_dir", tmp_path / "out", *flags)

    return start_with_flags


def find_processes(demo) -> list[psutil.Process]:
    return psutil.Process(demo.process.pid).children(recursive=True)


@pytest.mark.slow
def test_demo_beats_word_frequencies(start_demo, tmp_path):
    started = time.monotonic()
    demo = start_demo()
    demo.wait_for(r"(?m)^epoch \d+/", 300)
    processes = find_processes(demo)
    assert len(processes) > 3
    assert demo.wait(600) == 0, demo.text[-3000:]
    assert time.monotonic() - started < 600
    wait_for_end(processes, 5)

    # compute the figures again from the files
    out = tmp_path / "out"
    summaries = [json.loads((out / name / "summary.json").read_text()) for name in ("trainer1", "trainer2")]
    entropy = json.loads((out / "data" / "dataset" / "corpus.json").read_text())["unigram_entropy"]
    weights = [load_file(out / name / "model" / "model.safetensors") for name in ("trainer1", "trainer2")]
    assert all(summary["final_loss"] < entropy - 0.1 for summary in summaries)
    assert all(abs(weights[0][name] - weights[1][name]).max() <= 1e-6 for name in weights[0])

    assert re.search(r"(?m)^The status page, until the run ends: http://127\.0\.0\.1:\d+$", demo.text)
    *figures, _, heading = demo.text.splitlines()[-12:-3]
    sentences = demo.text.splitlines()[-3:]
    assert heading == "Three texts by the trained model:"
    assert all(re.fullmatch(r"  .*\[\S*\].*", line) for line in sentences)
    final, contributions, averaged, agreement, checkpoint, curve, dashboard = figures
    loss, _, printed_entropy = re.fullmatch(r"final loss (\S+) \(start (\S+), unigram entropy (\S+)\)", final).groups()
    assert float(loss) == pytest.approx(max(summary["final_loss"] for summary in summaries), abs=1e-3)
    assert float(printed_entropy) == pytest.approx(entropy, abs=1e-3)
    for summary in summaries:
        assert f"{summary['samples']:,} samples" in contributions
    joint, epochs = re.fullmatch(r"averaged with 2 of 2 in (\d+) of (\d+) epochs", averaged).groups()
    # on a loaded machine single rounds fail
    assert int(epochs) == 128 and int(joint) >= 120
    assert agreement.startswith("the peers' weights agree")
    assert (ROOT / checkpoint.removeprefix("checkpoint: ") / "config.json").exists()
    assert (ROOT / curve.removeprefix("learning curve: ")).stat().st_size > 10_000
    assert "trackio" in dashboard and (out / "monitor" / "trackio" / "demo.db").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["Tokenize", "Start the monitor", "Start another peer", r"(?m)^epoch \d+/"], ids=lambda m: m.split()[-1]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_ctrl_c_leaves_no_process(start_demo, moment, number):
    demo = start_demo()
    demo.wait_for(moment, 300)
    wait_until(lambda: find_processes(demo), 10, "a process of the demo's")
    processes = find_processes(demo)
    demo.process.send_signal(number)
    assert demo.wait(30) == 130
    wait_for_end(processes, 5)
    assert "Traceback" not in demo.text
    assert demo.text.endswith("stopped, no process is left\n")


@pytest.mark.slow
def test_second_demo_leaves_first_alone(start_demo, tmp_path):
    first = start_demo()
    first.wait_for("Start the monitor", 300)
    second = start_demo(name="second")
    assert second.wait(30) == 1
    folder = f"--output_dir {tmp_path / 'out'}"
    assert second.text == f"error: {folder} is in use by another peer, or not yours: choose another one\n"
    assert first.process.poll() is None
    assert (tmp_path / "out" / "monitor.log").exists()
    first.interrupt()
    assert first.wait(30) == 130


@pytest.mark.parametrize(
    "config, words",
    [
        ("configs/demo.json", "has other files, such as thesis: give a new folder"),
        ("configs/no.json", "--config_path configs/no.json holds no model (No such file or directory)"),
        ("LICENSE", "--config_path LICENSE holds no model (JSONDecodeError: "),
    ],
)
def test_demo_wrong_flags_remove_nothing(tmp_path, config, words):
    (tmp_path / "thesis").write_text("of a year")
    result = run_python("demo.py", "--output_dir", tmp_path, "--config_path", config, expect=1)
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ") and words in line
    assert (tmp_path / "thesis").read_text() == "of a year"


@pytest.mark.slow
def test_demo_fails_after_killed_trainer(start_demo, tmp_path):
    demo = start_demo()
    demo.wait_for(r"(?m)^epoch \d+/", 300)
    processes = find_processes(demo)
    parents = [p for p in psutil.Process(demo.process.pid).children() if "run_trainer.py" in p.cmdline()]
    parents[0].kill()
    assert demo.wait(60) == 1
    wait_for_end(processes, 5)
    assert f"error: trainer1 ended by signal SIGKILL, see {tmp_path / 'out' / 'trainer1.log'}" in demo.text
