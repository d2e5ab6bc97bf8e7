"""The commands of docs/speedrun.md, with a small model, a few epochs, and local text instead of the Hub; and
examples/minimal_trainer.py, run as its docstring says: two peers of plain hivemind learn together."""

import ast
import json
import lzma
import re
import shlex
from pathlib import Path

import pytest
from conventions import MODULES
from datasets import load_dataset
from processes import LOOPBACK, ROOT, Script, run_python, wait_until
from swarms import flags, stop

PAGE = (ROOT / "docs" / "speedrun.md").read_text()
COMMANDS = re.findall(r"(?m)^    python (.*)$", re.sub(r"\\\n\s*", "", PAGE))
TOKENIZE, ALONE, MONITOR, PEER = (shlex.split(command) for command in COMMANDS)
SHARED = {"--learning_rate": 2e-3, "--warmup_steps": 1, "--total_steps": 4, "--target_batch_size": 64}
TRAINER = flags({"--per_device_train_batch_size": 16, "--dataloader_num_workers": 0})
TRAINER += ["--eval_steps", 2, "--max_eval_samples", 32, "--matchmaking_time", 2, "--bandwidth", 1000]


@pytest.fixture
def stand_in(tmp_path, text_data):
    """stand_in(words) -> the words with local files instead of those of the page."""
    with lzma.open(ROOT / "sample_data" / "austen.txt.xz", "rt") as sample:
        chapters = sample.read(400_000).split("CHAPTER")
    text = "".join(json.dumps({"text": chapter, "url": "none"}) + "\n" for chapter in chapters)
    (tmp_path / "crawl.jsonl").write_text(text)
    (tmp_path / "gpt2.json").write_text('{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32}')
    sources = json.loads((ROOT / "configs" / "sources-fineweb-edu.json").read_text())
    assert [source.pop("config") for source in sources] == ["CC-MAIN-2024-10"]
    sources[0]["path"] = str(tmp_path / "crawl.jsonl")
    (tmp_path / "sources.json").write_text(json.dumps(sources))
    names = {"configs/gpt2-124m.json": tmp_path / "gpt2.json", "data/heldout.jsonl": tmp_path / "heldout.jsonl"}
    names |= {"configs/sources-fineweb-edu.json": tmp_path / "sources.json", "data/gpt2": tmp_path / "gpt2"}
    names |= {"openai-community/gpt2": text_data["--tokenizer_path"], "data/fineweb-edu": tmp_path / "dataset"}
    names |= {"1024": 32, "monitor.id": tmp_path / "monitor.id", "/ip4/0.0.0.0/tcp/31337": LOOPBACK[1]}
    # compilation takes a minute on a CPU
    return lambda words: [names.get(word, word) for word in words if word != "--torch_compile"]


def assert_learned(output_dir: Path) -> None:
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["final_loss"] < summary["start_loss"] - 0.05


@pytest.mark.slow
def test_speedrun_commands_run(start, stand_in, tmp_path):
    [code] = re.findall(r"(?s)```python\n(.*?)```", PAGE)
    code = code.replace('"HuggingFaceFW/fineweb-edu", "CC-MAIN-2023-50"', '"json", data_files=DATA')
    code = code.replace("data/heldout.jsonl", str(tmp_path / "heldout.jsonl"))
    exec(code, {"DATA": str(tmp_path / "crawl.jsonl")})
    columns = load_dataset("json", data_files=str(tmp_path / "heldout.jsonl"), cache_dir=tmp_path)["train"].features
    assert list(columns) == ["text"]
    run_python(*stand_in(TOKENIZE), expect=0)

    words = [*stand_in(ALONE), *LOOPBACK, *flags(SHARED), *TRAINER]
    alone = start("alone", *words, "--output_dir", tmp_path / "alone")
    alone.assert_clean_end(120)
    assert_learned(tmp_path / "alone")

    words = [*stand_in(MONITOR), *flags(SHARED), "--refresh_period", 0.3, "--output_dir", tmp_path / "monitor"]
    monitor = start("monitor", *words)
    peers = monitor.wait_for(r"(?m)^--initial_peers (/ip4/\S+)$", 120)[1]
    words = [word.replace("/ip4/203.0.113.1/tcp/31337/p2p/XXXX", peers) for word in map(str, stand_in(PEER))]
    trainers = [start(n, *words, *LOOPBACK, *TRAINER, "--output_dir", tmp_path / n) for n in ("first", "second")]
    for trainer in trainers:
        trainer.assert_clean_end(180)
    assert_learned(tmp_path / "first")
    stop(monitor)


EXAMPLE = ROOT / "examples" / "minimal_trainer.py"
ROUND = "Averaged gradients with 2 peers"


def read_epochs(peer: Script) -> dict[int, dict]:
    lines = re.findall(r"(?m)^epoch=(\d+) loss=(\S+) peers=(\d+) samples=(\d+)$", peer.text)
    return {int(e): {"loss": float(loss), "peers": int(p), "samples": int(n)} for e, loss, p, n in lines}


@pytest.mark.slow
def test_example_peers_learn_together(start):
    first = start("first", EXAMPLE, *LOOPBACK, "--verbose")
    address = first.wait_for(r"(?m)^join with: --initial_peers (/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)$")[1]
    second = start("second", EXAMPLE, *LOOPBACK, "--verbose", "--initial_peers", address)

    def find_joint_epochs() -> list[int]:
        epochs = [read_epochs(peer) for peer in (first, second)]
        return sorted(e for e in epochs[0].keys() & epochs[1] if all(own[e]["peers"] == 2 for own in epochs))

    wait_until(lambda: len(find_joint_epochs()) >= 4, 120, f"four joint epochs:\n{first.text}\n{second.text}")
    stop(first, second)

    joint, (one, two) = find_joint_epochs(), (read_epochs(first), read_epochs(second))
    # Ctrl-C may interrupt one peer's last epoch
    assert abs(max(one) - max(two)) <= 1
    # both have the same model, and similar data
    assert abs(one[joint[-1]]["loss"] - two[joint[-1]]["loss"]) < 0.3, (one, two)
    assert 5.5 < one[1]["loss"] < 6 and one[joint[-1]]["loss"] < one[1]["loss"] - 1.5, one
    # on a loaded machine, single rounds fail
    assert all(peer.text.count(ROUND) >= len(joint) - 1 for peer in (first, second)), first.text + second.text


def test_example_is_short_and_standalone():
    text = EXAMPLE.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 150
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {name.split(".")[0] for name in MODULES}
    # the files that its docstring names
    named = re.findall(r"\b(?:\w+/)?\w+\.(?:py|md)\b", ast.get_docstring(tree))
    assert len(named) > 15 and all((ROOT / name).exists() for name in named)
