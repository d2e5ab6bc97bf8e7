"""The notebook, executed cell by cell against a swarm on loopback, and the rules for the committed file."""

import ast
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest
from file_server import FileServer
from mains import parse
from members import make_invitation, secret_parts
from processes import LOOPBACK, ROOT, make_prefix, wait_until
from swarms import history, start_monitor, start_trainer, stop

from arguments import TRAINER_ARGS
from text.fetch import make_archive

NOTEBOOK = ROOT / "notebooks" / "join_collaboration.ipynb"
# flags of each peer, because all are on one machine
OWN = ["--matchmaking_time", "3", "--bandwidth", "1000", "--dataloader_num_workers", "0"]


def find_processes(word: str) -> list[int]:
    commands = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, parts in commands.items() if pid != os.getpid() and any(word in part for part in parts)]


async def execute(notebook, until, seconds: float) -> None:
    """Run all cells, and interrupt the kernel like the stop button once `until` is true."""
    client = nbclient.NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    run, deadline = asyncio.create_task(client.async_execute()), time.monotonic() + seconds
    while not run.done() and not until() and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    if not run.done():
        await client.km.interrupt_kernel()
    await run


def text_of(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_notebook_joins_contributes_and_leaves(start, tmp_path, tiny_data, monkeypatch, is_closed):
    prefix, output_dir, hosted = make_prefix(), tmp_path / "notebook", tmp_path / "hosted"
    hosted.mkdir()
    make_archive(tiny_data["--dataset_path"], tiny_data["--tokenizer_path"], hosted / "tiny.tar.gz")
    closed = ["--authorize", "--authority_key", tmp_path / "authority.pem"] if is_closed else []
    more = ["--status_port", 0, *closed]
    monitor, address = start_monitor(start, prefix, tmp_path / "monitor", *more)
    own = {"--total_steps": 2000, "--target_batch_size": 1024, "--per_device_train_batch_size": 32, **tiny_data}
    env = {"OUTPUT_DIR": str(output_dir), "OMP_NUM_THREADS": "1"}
    if is_closed:
        own["--invite"] = make_invitation(tmp_path, prefix, "other")
        env["INVITATION"] = invitation = Path(make_invitation(tmp_path, prefix, "guest")).read_text()
    other = start_trainer(start, tmp_path, "other", prefix, address, own)

    other.wait_for("epoch 2/")  # now it is known by which flags
    page = monitor.wait_for(r"status page: http://\S+:(\d+)/").group(1)
    env["MORE_FLAGS"] = shlex.join([*LOOPBACK, *OWN, "--dataset_cache_dir", str(tmp_path / "cache")])

    def has_averaged() -> bool:
        return sum(line["averaged_with"] > 1 for line in history(tmp_path, "notebook").values()) >= 5

    with FileServer(hosted) as server:
        env |= {"INITIAL_PEERS": f"http://127.0.0.1:{page}/", "DATASET_URL": f"{server.url}/tiny.tar.gz"}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        asyncio.run(execute(notebook, has_averaged, 240))
    stop(other, monitor)

    lines = list(history(tmp_path, "notebook").values())
    together = [line for line in lines if line["averaged_with"] > 1]
    assert len(together) >= 5 and len(together) >= 0.8 * len(lines)
    samples = lines[-1]["total_samples"]
    assert samples > 0 and not any(line["client_mode"] for line in lines)  # on loopback, others reach it
    # both report the same gradient of an epoch
    norms = {epoch: line["grad_norm"] for epoch, line in history(tmp_path, "other").items()}
    assert sum(abs(norms[line["epoch"]] / line["grad_norm"] - 1) < 1e-3 for line in together if line["epoch"] in norms)
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["samples"] >= samples and summary["epochs_averaged"] >= len(together)  # it has ended in order
    assert (output_dir / "model" / "model.safetensors").exists()

    if is_closed:
        assert lines[-1]["username"] == "guest"
        written = [path.read_text(errors="replace") for path in output_dir.rglob("*") if path.is_file()]
        assert not any(part in text for text in (json.dumps(notebook), *written) for part in secret_parts(invitation))

    *_, join, end = [cell for cell in notebook.cells if cell.cell_type == "code"]
    log = (output_dir / "trainer.log").read_text()
    sizes = re.search(r"--per_device_train_batch_size (\d+) --gradient_accumulation_steps (\d+) suit this device", log)
    batch_size, accumulation = map(int, sizes.groups())
    assert 1 <= batch_size * accumulation <= 1024 // 8
    assert lines[-1]["samples_accumulated"] % (batch_size * accumulation) == 0
    # only the last picture of the progress remains
    assert sum("image/png" in output.get("data", {}) for output in join.outputs) == 1
    shown = int(re.search(r"you have contributed ([\d,]+) samples", text_of(join))[1].replace(",", ""))
    assert 0 < shown <= summary["samples"] and f"{shown:,} samples of yours" in text_of(end)
    drawing = next(cell for cell in notebook.cells if "SVG(" in cell.source and cell.outputs)
    assert any("image/svg+xml" in output.get("data", {}) for output in drawing.outputs)

    wait_until(lambda: not find_processes(str(output_dir)), 10, "no process of the notebook's is left")


def test_notebook_cells_compile_with_valid_flags():
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    trees = [ast.parse(re.sub("(?m)^[%!].*$", "", source)) for source in cells]
    for tree in trees:
        compile(tree, str(NOTEBOOK), "exec")
    *_, prepare, join, _ = trees
    settings = {"dataset_url": "https://example.org/data.tar.gz", "dataset_sha256": "0" * 64, "more_flags": ""}
    settings |= {"experiment_prefix": "run", "initial_peers": "/ip4/127.0.0.1/tcp/1/p2p/Qm 127.0.0.1:8080"}
    settings |= {"invite": "/tmp/invitation"}
    names = {"settings": settings, "has_gpu": True, "shlex": shlex, "sys": sys, "folder": Path("out")}
    exec(compile(prepare, str(NOTEBOOK), "exec"), names)
    # evaluate the cell's command without running it
    [start] = [node for node in ast.walk(join) if isinstance(node, ast.Call) and "Popen" in ast.unparse(node.func)]
    _, script, *words = eval(ast.unparse(start.args[0]), names)
    assert script == "run_trainer.py"
    swarm, *_, data, args = parse(TRAINER_ARGS, script, *words)
    assert swarm.experiment_prefix == "run" and len(swarm.initial_peers) == 2 and swarm.invite == "/tmp/invitation"
    assert data.dataset_path == settings["dataset_url"] and args.fp16
    # in client mode, it would look for no relay
    assert not swarm.client_mode and args.output_dir == "out" and args.per_device_train_batch_size == "auto"


def test_notebook_finds_its_clone_after_restart(tmp_path, monkeypatch):
    """The kernel begins in the first folder again, where `git clone` would fail."""
    clone = tmp_path / "collaborative-training"
    clone.mkdir()
    (clone / "run_trainer.py").touch()
    monkeypatch.chdir(tmp_path)
    [source] = [it.source for it in nbformat.read(NOTEBOOK, as_version=4).cells if "places =" in it.source]
    begin, end = source.index("places ="), source.index("os.chdir(here)")
    names = {"Path": Path, "settings": {"repository": str(tmp_path / "none")}, "subprocess": subprocess}
    exec(source[begin:end], names)
    assert names["here"] == clone


def test_notebook_has_no_outputs_or_keys():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    # the address to fill in, and values that the organizer may give
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    empty = re.findall(r'^(\w+) = ""', parameters.source, re.MULTILINE)
    assert empty == ["initial_peers", "experiment_prefix", "dataset_url", "dataset_sha256", "more_flags"]
    source = "\n".join(cell.source for cell in notebook.cells)
    source = re.sub(r"kaggle_secrets|UserSecretsClient|get_secret|\b[Ss]ecrets?\b", "", source)  # the stores of secrets
    assert not re.search(r"hf_\w{20}|\b[0-9a-fA-F]{32,}\b|\b[A-Za-z0-9+/_-]{40,}\b|(?i:api_?key|passw|secret)", source)
