"""Training states on disk: bit for bit, complete or absent, and resumption after kill -9."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import statistics
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from mains import expect_user_error, refuse
from processes import LOOPBACK, ROOT, make_prefix, run_python, wait_until
from safetensors.torch import load_file
from swarms import ALONE, flags, history, list_joint_epochs, start_alone, start_monitor, stop
from transformers import AlbertForPreTraining, AutoModelForCausalLM, AutoTokenizer

import run_trainer
from arguments import ModelArguments, TrainerArguments
from common.console import UserError
from common.files import append_line, lock_folder, write_file, write_whole
from experiment.model import make_model
from models.build import describe_architecture
from text.tokenizers import load_tokenizer, tokenizer_fingerprint
from training import checkpoint
from training.checkpoint import CheckpointError, check_weights, choose_state, find_checkpoints, load_state
from training.figures import SwarmMetrics


@pytest.mark.parametrize("optims", [["lamb_8bit", "muon"], pytest.param(["adamw", "lamb"], marks=pytest.mark.slow)])
def test_checkpoint_restores_state_exactly(tmp_path, tiny_data, optims):
    """Including loss scale and random numbers."""
    words = ["-m", "tests.programs.round_trip", make_prefix(), tmp_path, tiny_data["--tokenizer_path"], *optims]
    lines = run_python(*words, timeout=180, expect=0).stdout.splitlines()[-len(optims) :]
    expected = dict.fromkeys(("weights", "masters", "moments", "numbers", "draws", "is_copied"), True)
    expected |= {"went_on": [4, False], "tracker": [3, 3], "priority": 3, "scale": 1024.0}
    for optim, line in zip(optims, lines, strict=True):
        assert json.loads(line) == expected
        folder = tmp_path / optim / "checkpoint-3"
        model, collected = AlbertForPreTraining.from_pretrained(folder), torch.load(tmp_path / optim / "collected.pt")
        assert all(collected[name].equal(tensor) for name, tensor in model.state_dict().items())
    rest = torch.load(folder / "training_state.pt", weights_only=True)
    assert rest["local_epoch"] == 3 and rest["versions"]["torch"] == torch.__version__
    vocabulary = load_tokenizer(tiny_data["--tokenizer_path"]).get_vocab()
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == vocabulary


def test_partial_training_resumes_from_each_source(tmp_path, tiny_data):
    """save_pretrained writes the trained part only."""
    record = {name: 2 for name in SwarmMetrics.__dataclass_fields__} | {"time": 0.0}  # of the state's epoch
    words = [make_prefix(), tmp_path, tiny_data["--tokenizer_path"], json.dumps(record)]
    result = run_python("-m", "tests.programs.trained_part", *words, timeout=180, expect=0)
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts.keys() == {"moved", "taken", "own", "archive"}
    assert all(len(checks) >= 6 and all(checks) for checks in facts.values()), facts


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral"])
def test_checkpoint_restores_renamed_weights(tmp_path, tiny_data, name):
    """transformers renames these weights in its files."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    sizes |= dict(num_key_value_heads=2, num_local_experts=2) if name == "mixtral" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **sizes}))
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    model, other = (make_model(ModelArguments(str(tmp_path / "config.json"), seed=s), len(tokenizer)) for s in (1, 2))
    state = {"model": model.state_dict(), "optimizer": {}, "scheduler": {}, "local_epoch": 2}
    assert checkpoint.save_checkpoint(model, tokenizer, tmp_path, state, {}, 2)
    loaded = check_weights(load_state(tmp_path / "checkpoint-2"), other)
    for weights in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()):
        assert all(weights[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_checkpoint_stores_frozen_weights_once(tmp_path, tiny_data, monkeypatch):
    """Adapters rename the matrices below them. The files are small, because a GPU's weights are copied file by file."""
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 65_000)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    make_model(ModelArguments(str(tmp_path / "config.json")), len(tokenizer)).save_pretrained(tmp_path / "base")
    adapters = dict(model_name_or_path=str(tmp_path / "base"), lora_r=1)
    model, other = (make_model(ModelArguments(**adapters), len(tokenizer)) for _ in range(2))
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            tensor.fill_(0.5)
    state = {"model": model.state_dict(), "optimizer": {}, "scheduler": {}, "local_epoch": 2}
    assert checkpoint.save_checkpoint(model, tokenizer, tmp_path, state, {}, 2)
    frozen = 4 * sum(tensor.numel() for name, tensor in model.state_dict().items() if "lora_" not in name)
    assert (tmp_path / "checkpoint-2" / "training_state.pt").stat().st_size < frozen / 2
    files = [load_file(path) for path in (tmp_path / "checkpoint-2").glob("model*.safetensors")]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    assert len(sizes) > 2 and max(sizes) <= 65_000 and sum(sizes) == frozen
    loaded = check_weights(load_state(tmp_path / "checkpoint-2"), other)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    for name, tensor in model.state_dict().items():
        assert loaded[name].equal(tensor) and opened[name].equal(tensor)


def test_checkpoint_weights_must_match_model(saved):
    """Peers do not send frozen weights. Earlier versions have another digest, or none."""
    model, save, _ = saved
    other = make_model(ModelArguments(str(ROOT / "configs/demo.json"), seed=7), model.config.vocab_size)
    state = save(2)
    assert check_weights(state, other).keys() == state["model"].keys()
    other.get_input_embeddings().requires_grad_(False)
    with pytest.raises(CheckpointError, match="--seed.*word_embeddings.weight, which is not trained"):
        check_weights(state, other)
    model.get_input_embeddings().requires_grad_(False)
    for architecture in (None, "albert, 1 layers, 4 heads, 0123456789ab", describe_architecture(model)):
        assert check_weights({**state, "architecture": architecture}, model).keys() == state["model"].keys()
    with pytest.raises(CheckpointError, match="a different model"):
        check_weights({**state, "architecture": "albert mlm_sop, 1 layers, 4 heads, 0123456789ab"}, model)


@pytest.fixture
def saved(tmp_path, tiny_data):
    """A model, a function that saves states of it, or of another one, to a folder, and the tokenizer's fingerprint."""
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    model = make_model(ModelArguments(str(ROOT / "configs/demo.json")), len(tokenizer))

    def save(epoch: int, folder: Path = tmp_path, model=model, limit: int = 3, **arguments) -> dict:
        state = {"model": model.state_dict(), "optimizer": {"state": {}}, "scheduler": {}, "local_epoch": epoch}
        state["arguments"] = {"experiment_prefix": "a", **arguments}
        assert checkpoint.save_checkpoint(model, tokenizer, folder, state, {}, limit)
        return state

    return model, save, tokenizer_fingerprint(tokenizer)


def list_names(folder: Path) -> list[str]:
    return [path.name for path in find_checkpoints(folder)]


@pytest.mark.parametrize("kind", ["cut model.safetensors", "flip tokenizer.json", "flip training_state.json", "remove"])
def test_damaged_checkpoint_is_skipped(saved, tmp_path, caplog, kind):
    """The next older one is loaded, and the damaged one is moved away."""
    model, save, own = saved
    for epoch in (2, 4):
        save(epoch)
    damage, _, name = kind.partition(" ")
    victim = tmp_path / "checkpoint-4" / (name or "training_state.json")
    content = bytearray(victim.read_bytes())
    if damage == "remove":
        victim.unlink()
    elif damage == "cut":
        os.truncate(victim, len(content) // 2)
    else:
        content[content.index(b"sha256") if name == "training_state.json" else len(content) // 2] ^= 1
        victim.write_bytes(content)
    path = choose_state(TrainerArguments(output_dir=str(tmp_path)), model, "a", own)
    state = load_state(path)
    assert path == tmp_path / "checkpoint-2" and state["local_epoch"] == 2
    assert all(state["model"][key].equal(model.state_dict()[key]) for key in state["model"])
    [warning] = [record.getMessage() for record in caplog.records if record.levelname.startswith("WARN")]
    assert "checkpoint-4" in warning and list_names(tmp_path) == ["checkpoint-2"]
    assert len(list(tmp_path.glob("set-aside-*/checkpoint-4"))) == 1


def test_later_checkpoints_are_set_aside(saved, tmp_path):
    """Otherwise a later restart would load them."""
    model, save, own = saved
    for epoch in (2, 4, 6):
        save(epoch)
    arguments = TrainerArguments(output_dir=str(tmp_path), resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert choose_state(arguments, model, "another", own).name == "checkpoint-4"  # a PATH may begin another run
    assert list_names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    arguments.resume_from_checkpoint = "none"
    assert choose_state(arguments, model, "a", own) is None
    assert list_names(tmp_path) == [] and len(list(tmp_path.glob("set-aside-*/checkpoint-*"))) == 3
    for epoch in (3, 5, 7):
        save(epoch, limit=2)
    assert list_names(tmp_path) == ["checkpoint-5", "checkpoint-7"]
    save(1, limit=2)  # a swarm that has gone back
    assert list_names(tmp_path) == ["checkpoint-1"] and len(list(tmp_path.glob("set-aside-*/checkpoint-*"))) == 5


def test_checkpoint_of_another_owner_is_one_line(saved, tmp_path, monkeypatch):
    model, save, own = saved
    save(2)

    def refuse_move(path: Path, _) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "rename", refuse_move)
    arguments = TrainerArguments(output_dir=str(tmp_path), resume_from_checkpoint="none")
    with expect_user_error("--output_dir: checkpoints cannot be moved", "Permission denied", "checkpoint-2"):
        choose_state(arguments, model, "a", own)


def test_restarted_command_resumes_its_newest_checkpoint(saved, tmp_path):
    """A command that began with a state from another folder, such as an archive, does so as well."""
    model, save, own = saved
    save(7, tmp_path / "archive")
    path = str(tmp_path / "archive" / "checkpoint-7")
    arguments = TrainerArguments(output_dir=str(tmp_path / "own"), resume_from_checkpoint=path)
    assert choose_state(arguments, model, "a", own) == Path(path)
    save(90, tmp_path / "own", resume_from_checkpoint=path)
    assert choose_state(arguments, model, "a", own).name == "checkpoint-90"
    # another run that begins with the same state does not continue this one
    assert choose_state(arguments, model, "another", own) == Path(path)


def test_wrong_checkpoint_is_one_line(saved, tmp_path):
    model, save, own = saved
    small, big = tmp_path / "small", tmp_path / "big"
    save(2, small)
    config = json.loads((ROOT / "configs/demo.json").read_text()) | {"hidden_size": 64, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save(2, big, make_model(ModelArguments(str(tmp_path / "config.json")), model.config.vocab_size))
    checkpoint.save_model(model, load_tokenizer(small / "checkpoint-2"), tmp_path / "model", {})
    for output_dir, path, prefix, words in (
        (big, None, "a", ["a different model", "--config_path", "none"]),
        (tmp_path / "new", big / "checkpoint-2", "a", ["a different model", "--config_path"]),
        (small, None, "b", ["a different run, a", "--output_dir", "none"]),
        (tmp_path / "new", tmp_path / "no", "a", ["not intact", "training_state.json: No such file"]),
        (tmp_path / "new", tmp_path / "model", "a", ["no training state"]),
    ):
        arguments = TrainerArguments(output_dir=str(output_dir), resume_from_checkpoint=path and str(path))
        with expect_user_error("cannot resume", *words):
            choose_state(arguments, model, prefix, own)
    arguments = TrainerArguments(output_dir=str(small))
    with expect_user_error("cannot resume", "a different tokenizer", "--tokenizer_path"):
        choose_state(arguments, model, "a", "another")


def test_killed_removal_leaves_new_folder(tmp_path, monkeypatch):
    def fill(folder: Path, text: str) -> None:
        folder.mkdir()
        (folder / "file").write_text(text)

    def end_while_removing(folder: Path, **_) -> None:
        if folder.exists():
            (folder / "file").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", end_while_removing)
        for text in ("old", "new"):
            write_whole(tmp_path / "model", partial(fill, text=text))
    assert (tmp_path / "model" / "file").read_text() == "new"
    write_whole(tmp_path / "model", partial(fill, text="newer"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def small_disk(tmp_path):
    """mount(kilobytes) -> a folder with so much room."""
    with contextlib.ExitStack() as stack:

        def mount(size: int) -> Path:
            (folder := tmp_path / f"disk{size}").mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder]
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip("mounting a small tmpfs needs root")
            stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
            return folder

        yield mount


def test_checkpoint_full_disk_is_one_warning(saved, small_disk, caplog):
    (_, save, _), disk = saved, small_disk(6000)
    room = disk / "filler"
    save(1, disk)
    size = sum(path.stat().st_size for path in (disk / "checkpoint-1").iterdir()) // 1024
    shutil.rmtree(disk / "checkpoint-1")
    for free in range(16, size, size // 8):
        room.write_bytes(bytes((6000 - free) * 1024))
        caplog.clear()
        with pytest.raises(AssertionError):
            save(2, disk)
        [warning] = [record.getMessage() for record in caplog.records if record.levelname.startswith("WARN")]
        assert "No space left" in warning and list(disk.iterdir()) == [room]
        room.unlink()
        save(2, disk)
        shutil.rmtree(disk / "checkpoint-2")


def test_read_only_disk_is_one_warning(small_disk, caplog):
    """Each write logs one; only the start fails."""
    disk = small_disk(100)
    append_line(disk / "history.jsonl", "1")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    append_line(disk / "history.jsonl", "2")
    assert not write_file(disk / "summary.json", "3") and not write_whole(disk / "checkpoint-1", Path.mkdir)
    assert [path.name for path in disk.iterdir()] == ["history.jsonl"]
    assert (disk / "history.jsonl").read_text() == "1\n"
    warnings = [record.getMessage() for record in caplog.records if record.levelname.startswith("WARN")]
    assert len(warnings) == 3 and all("(Read-only file system)" in warning for warning in warnings)
    with expect_user_error("--output_dir", "cannot be written (Read-only file system)"):
        lock_folder("--output_dir", disk)


def assert_goes_on(lines: dict[int, dict], epoch: int, total_steps: int) -> None:
    """Check the schedule and the samples after a restart, and that the loss did not jump, far below a new model's."""
    for number in range(epoch, epoch + 4):
        # warm-up of 5, peak at the sixth, zero at the end: the learning rate after an epoch
        rate = (number + 1) / 6 if number < 5 else (total_steps - number) / (total_steps - 5)
        assert lines[number]["learning_rate"] == pytest.approx(2e-3 * rate)
    assert lines[epoch + 1]["total_samples"] == lines[epoch]["total_samples"] + lines[epoch + 1]["samples_accumulated"]
    before = statistics.mean([lines[number]["loss"] for number in sorted(lines) if number <= epoch][-3:])
    after = statistics.mean([lines[number]["loss"] for number in sorted(lines) if number > epoch][:2])
    assert before < math.log(500) + math.log(2) - 0.3 and after == pytest.approx(before, abs=0.35)


def test_insufficient_disk_is_error_before_joining(small_disk, tiny_data, prefix, monkeypatch):
    disk = small_disk(1000)
    monkeypatch.setattr(run_trainer.Swarm, "join", None)
    own = {"--experiment_prefix": prefix, "--output_dir": disk / "out", LOOPBACK[0]: LOOPBACK[1]}
    error = refuse(run_trainer, *flags(ALONE, tiny_data, own))
    assert re.search("/out has .* free, .* needed for the model and one checkpoint: free some", error)
    assert not list(disk.iterdir())


@pytest.mark.slow
def test_full_disk_does_not_end_training(start, small_disk, tiny_data):
    disk = small_disk(20_000)
    # the disk must be full before the first of these files is due
    own = {**tiny_data, "--max_steps": 16, "--save_steps": 12, "--resume_from_checkpoint": "none"}
    trainer = start_alone(start, "trainer", disk, make_prefix(), own, pace=0.1)
    trainer.wait_for("trainer run ")
    with open(disk / "filler", "wb") as filler:
        free = os.statvfs(disk)
        os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_frsize)
    assert trainer.wait(120) == 1 and "Traceback" not in trainer.text
    assert "epoch 16, contributed" in trainer.text and "NOT SAVED" in trainer.text
    names = re.findall(r"warning: could not .*/disk20000/(\S+) \(No space left", trainer.text)
    assert {"checkpoint-12", "history.jsonl", "model"} <= {*names}, trainer.text
    assert not find_checkpoints(disk) and not list(disk.glob(".*.unfinished"))


def test_killed_trainer_resumes(start, tmp_path, tiny_data):
    """By the same command, and then from a given checkpoint."""
    prefix, own = make_prefix(), {**tiny_data, "--overwrite_output_dir": []}
    trainer = start_alone(start, "first", tmp_path / "out", prefix, own)
    wait_until(lambda: max(history(tmp_path, "out"), default=0) >= 13, 90, "epoch 13")
    trainer.kill()
    trainer.wait()
    first, saved = history(tmp_path, "out"), find_checkpoints(tmp_path / "out")
    epoch = json.loads((saved[-1] / "training_state.json").read_text())["epoch"]
    assert len(saved) == 3 and max(first) - 2 <= epoch <= max(first)

    second = start_alone(start, "second", tmp_path / "out", prefix, own)
    second.wait_for(f"resuming from .*checkpoint-{epoch}, epoch {epoch}")
    second.wait_for(f"epoch {epoch + 3}/")
    with pytest.raises(UserError):
        lock_folder("--output_dir", tmp_path / "out")
    stop(second)
    both = history(tmp_path, "out")
    assert sorted(both) == list(range(1, max(both) + 1))
    assert all(both[number] == first[number] for number in range(1, epoch + 1))
    assert_goes_on(both, epoch, 100)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["samples"] == both[max(both)]["total_samples"] and summary["epochs_here"] == max(both)
    # Ctrl-C saves: nothing of what was trained is lost
    last = find_checkpoints(tmp_path / "out")[-1]
    assert last.name == f"checkpoint-{summary['epoch']}"
    trained, saved = load_file(tmp_path / "out" / "model" / "model.safetensors"), load_file(last / "model.safetensors")
    assert all(trained[name].equal(saved[name]) for name in trained)

    own["--resume_from_checkpoint"] = last
    wrong = start_alone(start, "wrong", tmp_path / "wrong", prefix, own, {"--optim": "lamb"})
    wrong.assert_user_error("min_8bit_size.*--resume_from_checkpoint none")

    own["--max_steps"] = summary["epoch"] + 1
    start_alone(start, "chosen", tmp_path / "chosen", prefix, own).assert_clean_end()
    assert list(history(tmp_path, "chosen")) == [summary["epoch"] + 1]
    # another peer, because its folder has another key: it must not count the first one's samples again
    assert json.loads((tmp_path / "chosen" / "summary.json").read_text())["samples"] == 64


@pytest.mark.slow
def test_killed_swarm_resumes_from_one_peer(start, tmp_path, tiny_data):
    prefix, names = make_prefix(), ["first", "second"]
    _, peers = start_monitor(start, prefix, tmp_path / "monitor")
    own = {**tiny_data, "--initial_peers": peers, "--target_batch_size": 256, "--target_group_size": 2}
    own |= {"--total_steps": 400, "--save_steps": 3}
    trainers = [start_alone(start, name, tmp_path / name, prefix, own) for name in names]

    wait_until(lambda: len(list_joint_epochs(tmp_path, names)) >= 12, 120, "epochs together")
    for trainer in trainers:
        trainer.kill()
    before, of_second = history(tmp_path, "first"), history(tmp_path, "second")
    epoch = checkpoint.read_epoch(find_checkpoints(tmp_path / "first")[-1])

    back = start_alone(start, "back", tmp_path / "first", prefix, own)
    back.wait_for(f"epoch {epoch + 3}/", 90)
    after = history(tmp_path, "first")
    kept, lines = ([line for number, line in of.items() if number <= epoch] for of in (after, before))
    assert kept == lines
    assert [number for number in after if number > epoch][:3] == [epoch + 1, epoch + 2, epoch + 3]
    assert all(after[number]["averaged_with"] == 1 for number in range(epoch + 1, epoch + 4))
    assert_goes_on(after, epoch, 400)

    start_alone(start, "follower", tmp_path / "second", prefix, own)
    joint = wait_until(lambda: list_joint_epochs(tmp_path, names, epoch + 3), 90, "an epoch together again")[-1]
    norms = [history(tmp_path, name)[joint]["grad_norm"] for name in names]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    # also the epochs after its own checkpoint, because it has loaded a later state
    assert all(history(tmp_path, "second")[number] == line for number, line in of_second.items() if number <= epoch + 3)
