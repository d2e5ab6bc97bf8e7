"""Fixtures: scripts that are ended whatever happens, an emulated network, and a small tokenized dataset."""

import lzma
import signal
import sys
from collections import Counter
from pathlib import Path

import netlab
import processes
import pytest
import torch
from processes import ROOT, Script, run_python

# beside other processes, two threads of a small product wait for each other longer than they work
torch.set_num_threads(1)


# Of a test that starts scripts, in terms of one that does not: most of its time is waiting.
WEIGHT_OF_A_START = 60
# and what to add for files whose tests start programs in other ways, or longer ones
WEIGHTS = {"test_line.py": 1300, "test_devices.py": 1000, "test_checkpoint.py": 500, "test_families.py": 400}
WEIGHTS |= {"test_networks.py": 400, "test_archive.py": 350, "test_aux_peer.py": 250, "test_guard.py": 200}
WEIGHTS |= {"test_evaluation.py": 100, "test_tokenize.py": 100}


def pytest_addoption(parser):
    parser.addoption("--real-starts", action="store_true", help="let each program import its libraries itself")
    parser.addoption("--part", default="1/1", metavar="N/M", help="the Nth of M parts, each of whole files")


def pytest_configure(config):
    # a shell that starts tests in the background has them, and all that they start, ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.IS_FORKING = sys.platform == "linux" and not config.getoption("--real-starts")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keep one part's files: the longest of all goes first, and each to the part that has least to do by then."""
    number, count = map(int, config.getoption("--part").split("/"))
    weights, loads, parts = Counter(), [0] * count, [[] for _ in range(count)]
    for item in items:
        weights[item.path] += WEIGHT_OF_A_START if "start" in item.fixturenames else 1
    weights.update({path: WEIGHTS.get(path.name, 0) for path in weights})
    for path, weight in weights.most_common():
        part = loads.index(min(loads))
        parts[part].append(path)
        loads[part] += weight
    config.hook.pytest_deselected(items=[item for item in items if item.path not in parts[number - 1]])
    items[:] = [item for item in items if item.path in parts[number - 1]]


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
