"""docs/forerunners.md: each command on it runs, in swarms on loopback, and its log lines and imports are there."""

import importlib
import os
import re
import shlex
import socket

import finetune_data as toys
import pytest
from conventions import FILES
from hub_server import TOKEN, HubServer
from mains import parse, run_main
from processes import LOOPBACK, ROOT, run_python, wait_until
from swarms import choose_trainer, flags, stop, wait_for_joint_epochs

import finetune_mlm
import predict_on_lidirus
from arguments import TRAINER_ARGS, ModelArguments
from experiment.model import make_model
from text.tokenizers import load_tokenizer

PAGE = (ROOT / "docs" / "forerunners.md").read_text()
SECTIONS = {title: text for title, text in re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE)}
#: the differences from the commands on the page, to be fast: flags that all peers share, and each peer's own
SHARED = {"--optim": "adamw", "--learning_rate": 2e-3, "--warmup_steps": 5, "--total_steps": 1000}
SHARED |= {"--target_batch_size": 320, "--load_state_compression": "none"}
OWN = {"--matchmaking_time": 3, "--bandwidth": 1000}
TRAINER = {**OWN, "--dataloader_num_workers": 0}


def list_commands(title: str) -> list[str]:
    blocks = "".join(re.findall(r"(?ms)^```$(.*?)^```$", SECTIONS[title]))
    return [line for line in re.sub(r"\\\n\s*", "", blocks).splitlines() if "python " in line]


def split(command: str, **values: object) -> list[str]:
    """Split the words after `python` like a shell, with these values of variables and placeholders."""
    command = command.partition("python ")[2]
    for name in values:
        command = command if f"${name}" in command else command.replace(name, str(values[name]))
    return shlex.split(re.sub(r"\$(\w+)", lambda match: str(values.get(match[1], "")), command))


TUTORIAL, COLAB, RULEAN, NETMIND = map(
    list_commands, ["hivemind's ALBERT tutorial", "The notebook for Colab", "RuLeanALBERT", "NetMind's scripts"]
)


def test_forerunners_page_lists_tested_commands():
    in_blocks = re.findall(r"\bpython ", "".join(re.findall(r"(?ms)^```$(.*?)^```$", PAGE)))
    assert [len(commands) for commands in (TUTORIAL, COLAB, RULEAN, NETMIND)] == [3, 1, 6, 2] and len(in_blocks) == 12


def find_names(title: str) -> list[str]:
    """Return the code in the second column of a section's table."""
    rows = [row.split("|")[2] for row in SECTIONS[title].splitlines()[3:] if row.startswith("|")]
    return re.findall(r"`([^`]+)`", " ".join(rows))


def test_forerunners_imports_and_log_lines_exist():
    """Only the constant beginnings of log lines are compared."""
    for name in find_names("Imports"):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) if module else attribute
    code = "".join(path.read_text() for path in FILES)
    for phrase in find_names("Log lines"):
        assert re.split(r" ?(?:\d|outputs|checkpoint|N\b|up to )", phrase)[0].rstrip() in code, phrase


def test_empty_announce_maddrs_means_none():
    for words in (["--announce_maddrs"], ["--announce_maddrs", ""], []):
        swarm, *_ = parse(TRAINER_ARGS, "run_trainer.py", "--run_id", "a", *words, "--initial_peers", "/ip4/1.2.3.4")
        assert swarm.announce_maddrs == [] and swarm.initial_peers == ["/ip4/1.2.3.4"]


def test_unnamed_run_keeps_generated_name(tmp_path):
    def name_run(*words: str) -> tuple:
        swarm, *_, data, _ = parse(TRAINER_ARGS, "run_trainer.py", *words)
        return swarm.experiment_prefix, data.train_file

    (name, text), again = (name_run("--model_name_or_path", "bert-base-uncased") for _ in range(2))
    assert re.fullmatch(r"run-[0-9a-f]{8}", name) and (name, text) == again and (ROOT / text).exists()
    assert name_run("--output_dir", str(tmp_path))[0] != name
    # given data and given names of runs do not change
    assert name_run("--model_name_or_path", "a", "--train_file", "b")[1] == "b"
    assert name_run("--model_name_or_path", "a", "--dataset_path", "b")[1] is None
    assert name_run("--model_name_or_path", "a", "--tokenizer_path", "data/tokenizer")[1] is None
    assert name_run("--run_id", "mine", "--model_name_or_path", "a") == ("mine", None)
    assert name_run("--initial_peers", "127.0.0.1:1", "--model_name_or_path", "a") == ("", None)
    assert name_run() == (name, None)


@pytest.fixture(scope="module")
def model(tiny_data, tmp_path_factory) -> str:
    """A pretrained model's path from the repository, which may be part of the command to join."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), load_tokenizer(tiny_data["--tokenizer_path"])
    make_model(ModelArguments("configs/demo.json"), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return os.path.relpath(folder, ROOT)


@pytest.mark.slow
def test_guide_commands_form_one_swarm(start, tmp_path, tiny_data, model):
    """A monitor, an auxiliary peer that publishes, and four trainers, one of them a client."""
    where = {"--identity_path": tmp_path / "identity.key", "--output_dir": tmp_path / "monitor"}
    same = ["--model_name_or_path", model]
    monitor = [*split(TUTORIAL[1], YOUR_WANDB_PROJECT="Demo-run"), *LOOPBACK, *flags(where, SHARED), *same]
    scripts = [start("monitor", *monitor, "--refresh_period", 0.3, env={"WANDB_DISABLED": "true"})]
    peers = scripts[0].wait_for(r"(?m)^--initial_peers (/ip4/\S+)$", 120)[1]
    name = scripts[0].wait_for(r"--experiment_prefix (run-\w{8}) ")[1]
    port = re.search(r"/tcp/(\d+)", peers)[1]
    values = {"EXP_NAME": name, "INITIAL_PEERS": peers, "BANDWIDTH": 1000, "LISTEN_ON": LOOPBACK[1]}

    def start_trainer(label: str, words: list[str], *more: object) -> None:
        folder = ["--output_dir", tmp_path / label]
        scripts.append(start(label, *words, *LOOPBACK, *flags(tiny_data, TRAINER), *same, *more, *folder))

    logs = "--logging_dir", tmp_path / "logs"
    start_trainer("tutorial", split(TUTORIAL[2], BATCH_SIZE_FOR_YOUR_GPU=8, ONE_OR_MORE_PEERS=peers))
    colab = split(COLAB[0], NAME_YOUR_EXPERIMENT=name, HOST="127.0.0.1")
    start_trainer("colab", [word.replace("31337", port) for word in colab], *logs)
    start_trainer("rulean", split(RULEAN[1], **values))
    start_trainer("netmind", split(NETMIND[1].replace("bert_experiment", name), IP=peers), *flags(SHARED), *logs)
    with HubServer() as hub:
        more = {"--refresh_period": 0.3, "--output_dir": tmp_path / "aux", "--save_checkpoint_epoch_interval": 2}
        more |= {"--initial_peers": peers, "--model_name_or_path": model}
        values |= {"HF_ORGANIZATION_NAME": "org", "HF_MODEL_NAME": "my-exp", "WANDB_PROJECT": "my-exp"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
        aux = split(RULEAN[0], **values | {"LISTEN_ON": address, "ANNOUNCE_ON": address})
        env = {"WANDB_DISABLED": "true", "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN}
        scripts.append(start("aux", *aux, *flags(OWN, more), env=env))
        wait_for_joint_epochs(tmp_path, ["tutorial", "colab", "rulean", "netmind"], 2, 150, scripts)
        wait_until(lambda: hub.commits("org/my-exp"), 150, "an upload")
        stop(*scripts[::-1])
    assert "in client mode" in scripts[2].text and "helped in" in scripts[-1].text and (tmp_path / "logs").is_dir()
    seen = "".join(script.text for script in scripts)
    for line in (
        "To join this run, give other peers this:",
        r"others may join through --initial_peers /ip4/\S+",
        "Waiting for trainers, checking every",
        r"epoch \d+/\d+  loss \d+\.\d{4}  peers \d/\d  \d+\.\d s  samples \d",
        r"epoch \d+/\d+  loss \d+\.\d{4}  peers 4/4  \d+\.\d s  local samples \d",
        r"saved \S+/checkpoint-\d+ ",
        r"uploaded checkpoint-\d+ to ",
    ):
        assert re.search(line, seen), line


@pytest.mark.slow
def test_netmind_command_starts_joinable_run(start, tmp_path, model):
    """The second peer joins by the command that the first one logs."""
    own = flags(TRAINER, {"--max_sequence_length": 64, "--dataset_cache_dir": tmp_path / "cache"})

    def start_trainer(name: str, words: list[str], *more: object):
        assert words[0] == "run_trainer.py"
        words = [*choose_trainer(0.1), *words[1:], *LOOPBACK, *own, *more]
        return start(name, *words, "--output_dir", tmp_path / name)

    words = [word.replace("bert-base-uncased", model) for word in split(NETMIND[0])]
    first = start_trainer("first", words, *flags(SHARED, {"--target_batch_size": 96}))
    command = first.wait_for(r"for example: python (run_trainer\.py .*)", 120)[1]
    second = start_trainer("second", command.split())
    wait_for_joint_epochs(tmp_path, ["first", "second"], 2, 150, [first, second])
    stop(second, first)


@pytest.mark.slow
def test_forerunner_commands_run(start, tmp_path, tiny_data, toy_model):
    text = tmp_path / "text.txt"
    text.write_text("It is a truth. It is acknowledged. " * 200)
    made = {"--dataset_path": tmp_path / "dataset", "--tokenizer_path": tmp_path / "tokenizer"}
    small = {"--text_files": text, "--tokenizer": tiny_data["--tokenizer_path"], "--seq_length": 32}
    run_python(*split(TUTORIAL[0]), *flags(small, made), expect=0)
    shown = run_python(*split(RULEAN[4]), *flags(made), expect=0)
    assert "[MASK]" in shown.stdout
    own = *LOOPBACK, "--output_dir", tmp_path / "monitor"
    monitor, tuned = start("monitor", *split(RULEAN[5]), *own), tmp_path / "run"
    toys.write_toy_task(tmp_path, "TERRa", toys.make_toy_pairs()[:8])
    words = [word.replace("state.pth", str(toy_model)) for word in split(RULEAN[2])]
    run_main(finetune_mlm, *words[1:], "--data_dir", tmp_path, "--num_train_epochs", 1, "--output_dir", tuned)
    toys.write_lidirus(tmp_path)
    words = [word.replace("outputs/finetune/TERRa", str(tuned)) for word in split(RULEAN[3])]
    run_main(predict_on_lidirus, *words[1:], "--data_dir", tmp_path)
    assert (tuned / "TERRa.jsonl").exists() and len((tuned / "LiDiRus.jsonl").read_text().splitlines()) == 32
    monitor.wait_for("--optim lamb_8bit .*--min_vector_size 4000000")
    stop(monitor)
