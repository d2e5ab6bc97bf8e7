"""Fixtures: scripts that are ended whatever happens, an emulated network, and a small tokenized dataset."""

import functools
import lzma
import signal
import sys
from pathlib import Path

import netlab
import processes
import pytest
import torch
from processes import ROOT, Script, run_python

# beside other processes, two threads of a small product wait for each other longer than they work
torch.set_num_threads(1)

# Seconds that the quick tests of test_*.py take on two cores, beside three other parts; of files that are not named, 3.
# fmt: off
SECONDS = {
    "devices": 90, "averaging": 85, "archive": 95, "checkpoint": 75, "aux_peer": 75, "states": 80, "page": 60,
    "monitor": 60, "families": 60, "local_steps": 50, "line": 50, "tokenize": 45, "guard": 45, "swarm": 45,
    "finetune": 40, "dashboard": 35, "lean_albert": 35, "networks": 35, "preflight": 35, "evaluation": 30,
    "faults": 5, "membership": 25, "new_experiment": 25, "joining": 20, "arguments": 20, "trainer": 15, "vouching": 10,
    "hosting": 10, "status": 10, "streaming": 10, "hivemind_gaps": 10, "fetch": 10, "metrics": 10, "setup": 10,
}
# fmt: on


def pytest_addoption(parser):
    parser.addoption("--real-starts", action="store_true", help="let each program import its libraries itself")
    parser.addoption("--part", default="1/1", metavar="N/M", help="the Nth of M parts, each of whole files")


def pytest_configure(config):
    # a shell that starts tests in the background has them, and all that they start, ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.IS_FORKING = sys.platform == "linux" and not config.getoption("--real-starts")


@functools.cache
def divide_files(count: int) -> list[set[Path]]:
    """The files of each part: the longest of all goes first, and each to the part that has least to do by then."""
    parts, loads = [set() for _ in range(count)], [0] * count
    seconds = {
        path: SECONDS.get(path.stem.removeprefix("test_"), 3)
        for path in sorted(Path(__file__).parent.glob("**/test_*.py"))
    }
    for path in sorted(seconds, key=seconds.get, reverse=True):
        part = loads.index(min(loads))
        parts[part].add(path)
        loads[part] += seconds[path]
    return parts


def pytest_ignore_collect(collection_path, config):
    number, count = map(int, config.getoption("--part").split("/"))
    is_others = collection_path.is_file() and collection_path not in divide_files(count)[number - 1]
    return is_others or None


@pytest.fixture
def start(tmp_path):
    """start(name, script, *flags) -> Script; kills what the test has left running."""
    scripts = []

    def start_script(name: str, *command: object, **options) -> Script:
        scripts.append(Script(tmp_path / f"{name}.log", *command, **options))
        return scripts[-1]

    yield start_script
    for script in scripts:
        script.kill()
        script.process.wait(10)


@pytest.fixture
def net():
    """An emulated network; its hosts are declared and started by the test."""
    if why := netlab.unavailable():
        pytest.skip(why)
    with netlab.Net() as network:
        yield network


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> dict[str, Path]:
    """Flags that name a dataset of 300 kB of text in pieces of 500, made by the script that users run."""
    folder = tmp_path_factory.mktemp("data")
    with lzma.open(ROOT / "sample_data" / "austen.txt.xz", "rt", encoding="utf-8") as sample:
        text = sample.read(300_000)
    chapters = text.split("CHAPTER")
    files = []
    for number, chapter in enumerate(chapters):
        files.append(folder / f"{number:03d}.txt")
        files[-1].write_text(chapter, encoding="utf-8")
    flags = {"--dataset_path": folder / "dataset", "--tokenizer_path": folder / "tokenizer"}
    words = ["tokenize_wikitext103.py", "--train_tokenizer", "--vocab_size", 500, "--seq_length", 32]
    run_python(*words, "--text_files", *files, *sum(flags.items(), ()), expect=0)
    return flags


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory) -> Path:
    """Folder of a tiny LeanALBERT, untrained, and its tokenizer, for the toy tasks of finetune_data.py."""
    import finetune_data as toys

    records = [*toys.make_toy_pairs(), *toys.make_toy_choices(), *toys.make_toy_spans()]
    texts = [text for record in records for text in record.values() if isinstance(text, str)]
    folder = tmp_path_factory.mktemp("toy") / "model"
    toys.write_model(folder, texts)
    return folder
