"""The archive of monitors and auxiliary peers: its checkpoints, uploads to the Hub, and failures of the Hub."""

import hashlib
import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from hub_server import TOKEN, Commit, HubServer
from mains import expect_user_error, parse, refuse
from processes import LOOPBACK, ROOT, make_prefix, read_files, wait_until
from swarms import ALONE, flags, history, read_epochs, start_alone, start_monitor, stop
from transformers import AlbertForPreTraining, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import run_aux_peer
import run_training_monitor
from arguments import SHARED_ARGS, ArchiveArguments, ModelArguments, ReportArguments, SwarmArguments
from common.console import UserError
from experiment.model import make_model
from experiment.samples import sample_texts
from models.build import is_same
from monitoring import archive
from monitoring.archive import PUBLIC_ARGUMENTS, CheckpointHandler, make_auxiliary, write_card
from monitoring.hub import Publisher, read_stamp, upload_checkpoint
from text.instances import PAIRS, TEXT
from text.tokenizers import load_tokenizer
from training import checkpoint
from training.checkpoint import (
    CheckpointError,
    check_weights,
    describe_base,
    find_checkpoints,
    is_below_adapters,
    load_state,
    save_checkpoint,
    save_model,
)
from training.figures import describe_evaluation
from utils import Evaluation

REPOSITORY = "org/my-albert"


def test_repo_url_is_parsed_or_refused(monkeypatch):
    script, url = "run_training_monitor.py", ("--store_checkpoints", "--repo_url")
    for words, cure in (
        (("--repo_url", "org/name"), "--store_checkpoints"),
        (("--store_checkpoints", "--upload_interval", "60"), "--repo_url"),
        ((*url, "name"), "HF_ORGANIZATION_NAME"),
        ((*url, "org/my name"), "ORG/NAME"),
        ((*url, "https://huggingface.co/datasets/org/name"), "ORG/NAME"),
        ((*url, "https://me:hf_secret@huggingface.co/org"), "ORG/NAME"),
    ):
        with pytest.raises(UserError, match=cure) as error:
            parse([ArchiveArguments], script, *words)
        assert "hf_secret" not in str(error.value)
    monkeypatch.setenv("HF_ORGANIZATION_NAME", "org")
    hub, login = f"huggingface.co/{REPOSITORY}", "me:hf_secret@"
    texts = f"https://{hub}", f"https://{login}{hub}.git", f"http://127.0.0.1:8080/{REPOSITORY}/"
    for text in (REPOSITORY, "my-albert", *texts):
        [args] = parse([ArchiveArguments], script, *url, text)
        assert (args.repo_url, args.upload_interval) == (REPOSITORY, 43_200)


def test_auxiliary_peer_needs_shared_memory(tmp_path, tiny_data, monkeypatch):
    """In a container, it would end with a traceback of torch."""
    words = ["--config_path", ROOT / "configs/demo.json", "--tokenizer_path", tiny_data["--tokenizer_path"]]
    groups = parse(run_aux_peer.GROUPS, "run_aux_peer.py", *words, "--experiment_prefix", "E")
    monkeypatch.setattr("training.checks.SHARED_BYTES_PER_PARAMETER", 10**12)
    with expect_user_error("/dev/shm has", "--shm-size"):
        make_auxiliary(SimpleNamespace(), groups)


def make_handler(folder: Path, *words: str) -> CheckpointHandler:
    args = ArchiveArguments(True, 5, 2, str(folder), *words)
    groups = SwarmArguments("my_albert"), ReportArguments(output_dir=str(folder)), args
    return CheckpointHandler(groups, model=None, tokenizer=None, optimizer=None)


def test_archive_resumes_after_restart(save):
    for epoch in (40, 45):
        folder = save(epoch).parent
    handler = make_handler(folder)
    due = [epoch for epoch in range(60) if handler.is_due(epoch)]
    # reports may lag behind the state by some epochs; if they lag more, the run has started over
    assert due == [*range(35), *range(50, 60)]
    # without a history, a state may be of the earlier run
    handler.download = Future()
    handler.download.set_result(({"epoch": 5}, []))
    handler.step(None, [], {}, ())
    assert handler.download is not None
    stamp = read_stamp(folder / "checkpoint-45") | {"experiment_prefix": "another"}
    (folder / "checkpoint-45" / "training_state.json").write_text(json.dumps(stamp))
    assert make_handler(folder).last_epoch == 0 and find_checkpoints(folder) == []
    assert len(list(folder.glob("set-aside-*/checkpoint-*"))) == 2


def test_archive_missing_folder_or_token_is_one_line(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HF_USER_ACCESS_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "login"))
    (tmp_path / "file").write_text("")
    with expect_user_error("--local_path"):
        make_handler(tmp_path / "file")
    for script in (run_aux_peer, run_training_monitor):
        words = ["--experiment_prefix", make_prefix(), *LOOPBACK, "--output_dir", tmp_path / "out"]
        line = refuse(script, *words, "--store_checkpoints", "--repo_url", REPOSITORY)
        assert line.startswith("--repo_url needs a token") and "hf auth login" in line
        assert not (tmp_path / "out").exists()
    (tmp_path / "login").write_text(TOKEN)
    assert make_handler(tmp_path / "archive", REPOSITORY).publisher.repo_id == REPOSITORY


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on loopback, which this process uses too."""
    with HubServer() as server:
        values = {"ENDPOINT": server.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
        values["HUGGINGFACE_CO_URL_TEMPLATE"] = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in values.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def make_stamp(epoch: int) -> tuple[dict, list[dict]]:
    arguments = {name: value for group in SHARED_ARGS for name, value in vars(group()).items()}
    settings = {name: value for name, value in arguments.items() if name in PUBLIC_ARGUMENTS}
    metrics = {"epoch": epoch, "time": 1e9 + 3600 * epoch, "loss": 5.5, "alive_peers": 3, "samples_per_second": 10.0}
    stamp = {"epoch": epoch, "loss": 5.5, "time": float(epoch), "experiment_prefix": "my_albert"}
    stamp |= {"given_by": ["0123abcd"], "swarm": metrics, "validation": {}, "settings": settings}
    return stamp, [metrics | {"epoch": 1, "time": 1e9, "alive_peers": 7}, metrics]


@pytest.fixture
def save(tmp_path, tiny_data):
    """save(epoch) -> the folder of a checkpoint as the archive writes it, of a small model."""
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    model = make_model(ModelArguments(str(ROOT / "configs/demo.json")), len(tokenizer))

    def save_epoch(epoch: int) -> Path:
        folder = tmp_path / "archive" / f"checkpoint-{epoch}"
        stamp, history = make_stamp(epoch)
        state = {"model": model.state_dict(), "optimizer": {}, "scheduler": {}, "local_epoch": epoch}
        extra_files = {"README.md": write_card(stamp, history, model, tokenizer, REPOSITORY, True).encode()}
        extra_files["learning_curve.png"] = b"\x89PNG\0"
        assert save_model(model, tokenizer, folder, stamp, state | {"arguments": stamp["settings"]}, extra_files)
        return folder

    return save_epoch


@pytest.mark.parametrize("config, kind", [("demo", PAIRS), ("gpt-demo", TEXT)])
def test_card_holds_texts_and_evaluation(tiny_data, text_data, caplog, config, kind):
    tokenizer = load_tokenizer((text_data if kind is TEXT else tiny_data)["--tokenizer_path"], kind)
    model = make_model(ModelArguments(str(ROOT / f"configs/{config}.json")), tokenizer)
    stamp, history = make_stamp(45)
    evaluation = Evaluation(epoch=40, loss=4.0, accuracy=0.5, samples=8, bits_per_byte=1.8 if kind is TEXT else None)
    stamp["validation"] = describe_evaluation(evaluation)
    card = write_card(stamp, history, model, tokenizer, REPOSITORY, False)
    texts = "".join(f"    {text}\n" for text in sample_texts(model, tokenizer))
    assert f"## Sample texts\n\n{texts}\n## Use\n" in card and texts.count("\n") == 3
    bits = ", 1.8000 bits per byte" if kind is TEXT else ""
    assert f"| validation | loss 4.0000 nats per token, perplexity 54.6{bits}, at epoch 40 |\n" in card
    assert "Sample texts" not in write_card(stamp, history, model, None, REPOSITORY, False)
    assert "no sample texts" in caplog.text


def test_upload_is_complete_archive_checkpoint(hub, save, tmp_path, capsys):
    """The card's code runs with the downloaded model."""
    for epoch in (40, 45):
        folder = save(epoch)
        upload_checkpoint(folder, REPOSITORY)
    first, last = hub.commits(REPOSITORY)
    assert (first.message, last.message) == ("epoch 40, loss 5.5000", "epoch 45, loss 5.5000")
    assert last.files == read_files(folder)
    # the unchanged weights and picture were not sent again
    assert sum(method == "PUT" for method, *_ in hub.requests) == 4
    # a trainer's checkpoint, which holds its addresses and paths, is not sent at all
    stamp, count = read_stamp(folder), len(hub.requests)
    del stamp["settings"]
    (folder / "training_state.json").write_text(json.dumps(stamp))
    with pytest.raises(ValueError, match="whole command line"):
        upload_checkpoint(folder, REPOSITORY)
    assert len(hub.requests) == count

    card = last.files["README.md"].decode()
    phrases = "epoch 45 of the run `my_albert`", "5.5000 nats", "| 3 at this epoch, 7 at most |", "| 45.0 hours, "
    for words in (*phrases, f"{45 * 4096:,} (epochs", "peak learning rate 0.00176 after 5,000 epochs"):
        assert words in card, card
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], {})
    assert "'score'" in capsys.readouterr().out and list(tmp_path.glob("cache/*my-albert"))


def test_published_adapters_open_by_name(hub, tmp_path, text_data, monkeypatch):
    """The weights below them are in several files, as those of a large model."""
    pytest.importorskip("peft")
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 500_000)
    tokenizer = load_tokenizer(text_data["--tokenizer_path"], TEXT)
    make_model(ModelArguments(str(ROOT / "configs/gpt-demo.json")), len(tokenizer)).save_pretrained(tmp_path / "base")
    model = make_model(ModelArguments(model_name_or_path=str(tmp_path / "base"), lora_r=4), tokenizer).eval()
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1)
    for repository in ([], [REPOSITORY]):
        folder = tmp_path / f"archive{len(repository)}" / "checkpoint-5"
        args = ArchiveArguments(True, 5, 2, str(folder.parent), *repository)
        CheckpointHandler((SwarmArguments("run"), ReportArguments(), args), model, tokenizer, optimizer=None)
        assert save_model(model, tokenizer, folder, make_stamp(5)[0])
    upload_checkpoint(folder, REPOSITORY)
    [commit] = hub.commits(REPOSITORY)
    assert not [name for name, content in commit.files.items() if str(tmp_path).encode() in content]
    assert sum(name.startswith("model-") for name in commit.files) > 1

    shutil.rmtree(tmp_path / "base")
    ids = torch.arange(20)[None]
    for place in (REPOSITORY, folder, tmp_path / "archive0" / "checkpoint-5"):
        opened = AutoModelForCausalLM.from_pretrained(place).eval()
        torch.testing.assert_close(opened(ids).logits, model(input_ids=ids).logits)


def test_states_lack_weights_below_adapters(hub, tmp_path, text_data):
    """The folder holds them once, in their own precision."""
    pytest.importorskip("peft")
    tokenizer = load_tokenizer(text_data["--tokenizer_path"], TEXT)
    for seed in (1, 2):
        base = make_model(ModelArguments(str(ROOT / "configs/gpt-demo.json"), seed=seed), len(tokenizer)).bfloat16()
        base.save_pretrained(tmp_path / f"base{seed}")
        hub.repositories[f"org/base{seed}"] = [Commit("base", read_files(tmp_path / f"base{seed}"))]
    model, again, other = (
        make_model(ModelArguments(model_name_or_path=f"org/base{seed}", lora_r=4), tokenizer).eval()
        for seed in (1, 1, 2)
    )
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1)
    weights = model.state_dict(keep_vars=True).items()
    state = {"model": {name: tensor for name, tensor in weights if not is_below_adapters(model, tensor)}}
    state |= {"optimizer": {}, "scheduler": {}, "local_epoch": 2, "base": describe_base(model)}
    assert save_checkpoint(model, tokenizer, tmp_path, state, {}, 2)
    folder = tmp_path / "checkpoint-2"
    assert (folder / "model.safetensors").stat().st_size > 4 * (folder / "training_state.pt").stat().st_size
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    ids = torch.arange(20)[None]
    opened = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain = AutoModelForCausalLM.from_pretrained("org/base1").eval()
    logits = model(input_ids=ids).logits
    assert is_same(opened(ids).logits, logits) and not is_same(plain(ids).logits, logits)
    found = check_weights(load_state(folder), again)
    assert len(found) == len(state["model"]) > 0
    assert all(found[name].equal(tensor) for name, tensor in state["model"].items())
    with pytest.raises(CheckpointError, match="see --model_name_or_path"):
        check_weights(load_state(folder), other)


def run_until_uploaded(publisher: Publisher, folder: Path) -> None:
    wait_until(lambda: publisher.step() or not publisher.find_new(), 60, f"{folder} uploaded")
    publisher.thread.join()


# test_monitor_archives_and_publishes has an invalid token and a cut connection
FAULTS = {"repos/create": ("hang", "time"), "validate-yaml": (500, "HTTP 500")}
FAULTS["objects/batch"] = (403, r"HTTP 403.*exceeded your storage quota")


@pytest.mark.parametrize("path", FAULTS)
def test_upload_failure_warns_and_retries(hub, save, caplog, monkeypatch, capfd, path):
    kind, words = FAULTS[path]
    monkeypatch.setattr("monitoring.hub.NETWORK_TIMEOUT", 2.0 if kind == "hang" else 60.0)
    caplog.set_level("INFO")
    folder = save(5)
    fault = hub.fail("POST", path, kind, times=2)
    run_until_uploaded(Publisher(REPOSITORY, 0.2, folder.parent), folder)
    assert fault.met == 2
    warning, _, success = [record.getMessage() for record in caplog.records if record.name == "hub"]
    assert re.search(f"checkpoint-5 is not on the Hub.*{words}", warning), warning
    assert "uploaded checkpoint-5" in success
    [commit] = hub.commits(REPOSITORY)
    assert commit.files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    # neither progress bars nor the token on the terminal
    output = "".join(capfd.readouterr()) + caplog.text
    assert TOKEN not in output and "%|" not in output


def test_upload_without_network_is_warning(hub, save, caplog, monkeypatch):
    folder = save(5)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    publisher = Publisher(REPOSITORY, 0.2, folder.parent)
    publisher.upload(folder)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    publisher.upload(folder)
    first, second = [record.getMessage() for record in caplog.records]
    assert all(word in first for word in ("HTTP 401", "set HF_TOKEN", "hf auth login"))
    assert "Connection refused" in second and "hf_wrong" not in caplog.text
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_USER_ACCESS_TOKEN", TOKEN)
    publisher.upload(folder)
    assert len(hub.commits(REPOSITORY)) == 1


def test_checkpoint_precedes_sample_texts(hub, tmp_path, tiny_data, monkeypatch):
    """The end of a process may cost the texts, but not the checkpoint. The upload waits for both."""
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    model = make_model(ModelArguments(str(ROOT / "configs/demo.json")), tokenizer)
    folder = tmp_path / "checkpoint-5"
    args = ArchiveArguments(True, 5, 2, str(tmp_path), REPOSITORY)
    handler = CheckpointHandler((SwarmArguments("run"), ReportArguments(), args), model, tokenizer, optimizer=None)
    stamp, history = make_stamp(5)
    state = {"model": model.state_dict(), "optimizer": {}, "scheduler": {}, "local_epoch": 5}
    is_continued = threading.Event()
    found = []

    def look(*_) -> None:
        found.append((load_state(folder)["local_epoch"], "Sample texts" in (folder / "README.md").read_text()))
        assert is_continued.wait(60)

    model.get_input_embeddings().register_forward_pre_hook(look)
    handler.saving = threading.Thread(target=handler.write, args=(state, stamp, history))
    handler.saving.start()
    wait_until(lambda: found, 60, "a sample text")
    handler.step(None, [], {}, ())
    assert handler.publisher.thread is None
    is_continued.set()
    handler.saving.join(60)
    handler.step(None, [], {}, ())
    handler.publisher.thread.join(60)
    [commit] = hub.commits(REPOSITORY)
    assert found == [(5, False)] * 3 and b"## Sample texts" in commit.files["README.md"]
    assert commit.files == read_files(folder)

    monkeypatch.setattr(archive, "MAX_SAMPLED_PARAMETERS", model.num_parameters())
    handler.write(state, stamp, history)
    assert len(found) == 3 and "Sample texts" not in (folder / "README.md").read_text()


def test_restart_keeps_upload_time_and_counts(hub, save):
    folder = save(5)
    run_until_uploaded(Publisher(REPOSITORY, 1000, folder.parent), folder)
    restarted = Publisher(REPOSITORY, 1000, folder.parent)
    assert restarted.find_new() is None and 900 < restarted.next_upload - time.monotonic() <= 1000
    newer = save(10)
    restarted.step()
    assert restarted.thread is None and restarted.find_new() == newer
    assert Publisher("org/another", 1000, folder.parent).next_upload <= time.monotonic()
    # the same epoch of another history of the run
    record = folder.parent / "uploaded.json"
    record.write_text(json.dumps({"repo_id": REPOSITORY, "checkpoint": 9.0, "time": time.time() + 1e6}))
    restarted = Publisher(REPOSITORY, 1000, folder.parent)
    assert restarted.find_new() == newer
    assert restarted.next_upload <= time.monotonic() + 1000  # a clock that was set back
    record.write_text("{")
    assert Publisher(REPOSITORY, 1000, folder.parent).next_upload <= time.monotonic()


@pytest.mark.parametrize("token", [TOKEN, "hf_wrong"])
def test_missing_token_prompts_on_terminal(start, hub, tmp_path, token):
    """As RuLeanALBERT's guide promises."""
    code = "import sys; from huggingface_hub import constants; constants.HF_TOKEN_PATH = sys.argv[1]\n"
    code += "from common.console import edge; from monitoring.hub import require_token\nwith edge(): require_token()"
    (keyboard, terminal), env = os.openpty(), {"HF_TOKEN": "", "HF_ENDPOINT": hub.endpoint}
    role = start("role", "-c", code, tmp_path / "token", env=env, stdin=terminal)
    for question, answer in (("How would you like to log in", "2"), ("Enter your token", token)):
        role.wait_for(question)
        os.write(keyboard, f"{answer}\n".encode())
    if token == TOKEN:
        assert role.wait(60) == 0 and (tmp_path / "token").read_text() == TOKEN
    else:
        assert role.wait(60) == 2
        assert re.search("error: cannot log in.*HTTP 401.*HF_TOKEN", role.text.splitlines()[-1])
    assert token not in role.text
    os.close(keyboard), os.close(terminal)


def test_monitor_archives_and_publishes(start, hub, save, tmp_path, tiny_data):
    """The Hub refuses a token and cuts a connection, and Ctrl-C comes during an upload."""
    prefix, folder = make_prefix(), tmp_path / "archive"
    stamp = read_stamp(save(400)) | {"experiment_prefix": prefix}
    (folder / "checkpoint-400" / "training_state.json").write_text(json.dumps(stamp))
    (folder / "uploaded.json").write_text(json.dumps({"repo_id": REPOSITORY, "checkpoint": stamp["time"], "time": 0}))
    trainers_only = ("--per_device", "--gradient_acc", "--dataloader", "--save_steps", "--save_total", "--dataset")
    own = {**tiny_data, "--total_steps": 400}
    shared = {name: value for name, value in {**ALONE, **own}.items() if not name.startswith(trainers_only)}
    interval = {"--save_checkpoint_epoch_interval": 4, "--upload_interval": 1}
    faults = [hub.fail("POST", "repos/create", 401), hub.fail("POST", "/commit/", "cut")]
    words = flags(shared, interval, {"--local_path": folder, "--repo_url": REPOSITORY})
    env = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN}
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor", *words, "--store_checkpoints", env=env)
    trainer = start_alone(start, "trainer", tmp_path / "trainer", prefix, own, {"--initial_peers": peers}, pace=0.15)
    donor = trainer.wait_for(r"parameters, peer (\w+)").group(1)
    digest = hashlib.sha256(donor.encode()).hexdigest()[:8]
    commits = wait_until(lambda: hub.commits(REPOSITORY), 120, "an upload")
    assert [fault.met for fault in faults] == [1, 1]
    wait_until(lambda: max(history(tmp_path, "trainer")) >= 5, 60, "training goes on")
    hang = hub.fail("PUT", "/large/", "hang")
    wait_until(lambda: hang.met, 60, "the next upload")
    epoch_then = max(history(tmp_path, "trainer"))
    saved = find_checkpoints(folder)
    wait_until(lambda: find_checkpoints(folder)[-1] not in saved, 60, "a checkpoint while an upload hangs")
    stop(monitor)
    wait_until(lambda: max(history(tmp_path, "trainer")) > epoch_then + 4, 60, "training continues")
    warnings = [line for line in monitor.text.splitlines() if "warning" in line]
    assert len(warnings) == 2 and "HTTP 401" in warnings[0] and "Error: " in warnings[1], monitor.text
    assert TOKEN not in monitor.text
    newest = find_checkpoints(folder)[-1]
    assert f"{newest} is not on the Hub yet. To upload it: hf upload {REPOSITORY} {newest} ." in monitor.text
    assert len(find_checkpoints(folder)) == 2 and int(newest.name[11:]) < 400
    assert len(list(folder.glob("set-aside-*/checkpoint-400"))) == 1
    lines, seen_epochs = history(tmp_path, "trainer"), [it["epoch"] for it in read_epochs(tmp_path / "monitor")]
    for path in find_checkpoints(folder):
        stamp, card = read_stamp(path), (path / "README.md").read_text()
        assert stamp["given_by"] == [digest] and "## Sample texts" in card
        # of an epoch that the monitor has seen, not after the state's
        assert stamp["swarm"]["epoch"] in seen_epochs and stamp["swarm"]["epoch"] <= stamp["epoch"]
        assert stamp["loss"] == pytest.approx(lines[stamp["swarm"]["epoch"]]["loss"], rel=1e-6)
        assert load_state(path)["local_epoch"] == stamp["epoch"]
        assert ("](learning_curve.png)" in card) == (path / "learning_curve.png").exists()
    # the Hub's content, as a folder
    (copy := tmp_path / "copy").mkdir()
    secrets = [str(tmp_path), str(tiny_data["--tokenizer_path"]), str(ROOT), "/ip4/", donor, TOKEN]
    for name, content in commits[-1].files.items():
        (copy / name).write_bytes(content)
        assert not any(secret.encode() in content for secret in secrets), name
    state = load_state(copy)
    assert state["arguments"].keys() <= PUBLIC_ARGUMENTS and state["arguments"]["target_batch_size"] == 64
    for kind in (AlbertForPreTraining, AutoModelForMaskedLM):
        loaded, info = kind.from_pretrained(copy, output_loading_info=True)
        assert not info["missing_keys"]
        weights = loaded.state_dict()
        assert all(weights[name].equal(tensor) for name, tensor in state["model"].items() if name in weights)
    assert len(AutoTokenizer.from_pretrained(copy)) == loaded.config.vocab_size
