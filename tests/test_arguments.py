"""Every flag is read by something, has help, and a wrong one is one clear line."""

import dataclasses
import re
import subprocess
import sys

import pytest
from conventions import MODULES
from processes import ROOT, run_python

import arguments
import finetune_mlm
from common.console import UserError

GROUPS = [group for group in vars(arguments).values() if isinstance(group, type) and dataclasses.is_dataclass(group)]
FIELDS = [(group, field) for group in GROUPS for field in dataclasses.fields(group)]
# RuLeanALBERT's --authorize: a run is closed by --invite or --authority_key, one of which it needs
ONLY_CHECKED = {"authorize"}
READERS = [path.read_text() for module, path in MODULES.items() if module != "arguments"]


@pytest.mark.parametrize("group, field", FIELDS, ids=[f"{group.__name__}.{field.name}" for group, field in FIELDS])
def test_flag_has_help_and_is_read(group, field):
    assert len(field.metadata.get("help", "")) > 20
    # read outside the checks of its own dataclass, as an attribute or by its name
    is_read = any(re.search(rf"""[."]{field.name}\b""", text) for text in READERS)
    assert is_read or field.name in ONLY_CHECKED, f"nothing reads --{field.name}"


def test_flags_of_one_script_do_not_collide():
    shared = ["SwarmArguments", "ModelArguments", "OptimizerArguments", "AveragingArguments"]
    for groups in ([*shared, "DataArguments", "TrainerArguments"], [*shared, "MonitorArguments"]):
        names = [f.name for group, f in FIELDS if group.__name__ in groups]
        assert len(names) == len(set(names))


def test_steps_count_epochs_and_say_so():
    for _, field in FIELDS:
        if field.name.endswith("_steps"):
            assert re.search(r"[Ee]poch", field.metadata["help"]), field.name


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--initial_peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm", "--no_adopt"], ["--experiment_prefix"]),
        (["--initial_peers", "--run_id", "a"], ["--initial_peers", "expected at least one argument"]),
        (["--run_id", "a.b"], ["dot", "a_b"]),
        (["--run_id", "a", "--no_such_flag", "1"], ["--no_such_flag"]),
        (["--experiment-prefx", "a"], ["--experiment-prefx", "did you mean --experiment_prefix?"]),
        (["--run_id", "a", "--lerning-rate=1"], ["--lerning-rate,", "did you mean --learning_rate?"]),
        (["--run_id", "a", "--total_steps", "60"], ["--warmup_steps 5000", "--total_steps 60"]),
        (["--run_id", "a", "--adam_beta1", "1.5"], ["--adam_beta1", "below 1"]),
        (["--run_id", "a", "--averaging_timeout", "-1"], ["--averaging_timeout", "above 0"]),
        (["--run_id", "a", "--expected_drift_rate", "nan"], ["--expected_drift_rate", "at least 0"]),
        (["--run_id", "a", "--seed", "-1"], ["--seed", "at most 4294967295"]),
        (["--run_id", "a", "--max_sequence_length", "0"], ["--max_sequence_length", "at least 8"]),
        (["--run_id", "a", "--learning", "1"], ["--learning"]),
        (["--run_id", "a", "--learning_rate", "fast"], ["--learning_rate", "fast"]),
        (
            ["--run_id", "a", "--matchmaking_time", "2", "--request_timeout", "3"],
            ["--matchmaking_time", "--request_timeout"],
        ),
        (
            ["--run_id", "a", "--averaging_timeout", "9", "--matchmaking_time", "9"],
            ["--averaging_timeout", "--matchmaking_time"],
        ),
        (["--run_id", "a", "--statistics_expiration", "7200"], ["--statistics_expiration", "3600"]),
        (["--run_id", "a", "--metadata_expiration", "0"], ["--metadata_expiration", "3600"]),
        (["--run_id", "a", "--host_maddrs", "localhost"], ["--host_maddrs", "'localhost'"]),
        (["--run_id", "a", "--dht_listen_on", "[::]:70000"], ["--host_maddrs", "70000"]),
        (["--run_id", "a", "--status_port", "70000"], ["--status_port", "70000"]),
        (["--run_id", "a", "--use_auto_relay", "--no_use_relay"], ["--use_auto_relay", "--no_use_relay"]),
        (["--run_id", "a", "--fp16", "--bf16"], ["--fp16", "--bf16"]),
        (["--run_id", "a", "--min_learning_rate", "1"], ["--min_learning_rate 1", "--learning_rate 0.00176"]),
        (["--run_id", "a", "--min_8bit_size", "0"], ["--min_8bit_size"]),
        (["--run_id", "a", "--target_group_size", "1"], ["--target_group_size", "at least 2"]),
        (["--run_id", "a", "--do_eval", "--eval_steps", "0"], ["--eval_steps", "at least 1"]),
        # gradients that are accumulated where the batch's own are could not be dropped, kept, or put aside
        (["--run_id", "a", "--reuse_grad_buffers"], ["--reuse_grad_buffers"]),
        (["--run_id", "a", "--warmup_steps", "9", "--total_steps", "3"], ["--warmup_steps"]),
        (["--run_id", "a", "--mlm_probability", "15"], ["--mlm_probability", "above 0 and below 1"]),
        (["--run_id", "a", "--max_sequence_length", "7"], ["--max_sequence_length", "8"]),
        (
            ["--run_id", "a", "--initial_sequence_length", "128"],
            ["--max_sequence_length", "--sequence_length_warmup_steps"],
        ),
        (["--run_id", "a", "--sequence_length_warmup_steps", "9"], ["--initial_sequence_length"]),
        (["--run_id", "a", "--objective", "nsp"], ["--objective", "mlm_sop"]),
        (
            ["--run_id", "a", "--model_name_or_path", "b", "--config_name", "c"],
            ["--model_name_or_path", "--config_path"],
        ),
        (["--run_id", "a", "--train_file", "b", "--dataset_name", "c"], ["--train_file", "--dataset_name"]),
        (["--run_id", "a", "--train_file", "b", "--streaming"], ["--train_file", "--streaming"]),
        (["--run_id", "a", "--validation_file", "b"], ["--validation_file", "--train_file"]),
        (["--run_id", "a", "--dataset_config_name", "b"], ["--dataset_config_name", "--dataset_name"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_flag_is_one_line(flags, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["./run_trainer.py", *flags])
    with pytest.raises(UserError) as error:
        arguments.parse_arguments(
            arguments.SwarmArguments,
            arguments.ModelArguments,
            arguments.OptimizerArguments,
            arguments.AveragingArguments,
            arguments.DataArguments,
            arguments.TrainerArguments,
        )
    [line] = str(error.value).splitlines()
    assert all(word in line for word in words), line


@pytest.mark.parametrize("script, number", [("run_trainer", 42), ("run_training_monitor", 34), ("finetune_mlm", 18)])
def test_help_lists_the_flags_that_matter_first(script, number, monkeypatch, capsys):
    texts, example = {}, "    python run_trainer.py --experiment_prefix my_albert \\\n        --fp16\n"
    groups = {
        "run_trainer": arguments.TRAINER_ARGS,
        "run_training_monitor": arguments.MONITOR_ARGS,
        "finetune_mlm": [finetune_mlm.FinetuneArguments],
    }
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "--help_all"):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", flag])
        with pytest.raises(SystemExit):
            arguments.parse_arguments(*groups[script], description=example)
        texts[flag] = capsys.readouterr().out
    listed = {flag: re.findall(r"(?m)^  --(?!help)(\w+)", text) for flag, text in texts.items()}
    assert len(listed["--help"]) == number
    assert set(listed["--help_all"]) == {item.name for group in groups[script] for item in dataclasses.fields(group)}
    for text in texts.values():
        assert text.startswith(f"usage: {script}.py ") and example in text and "--no_x" not in text
        assert not re.search(r"--\w+-\w", text), "one spelling"
    if script == "run_trainer":
        assert texts["--help"].splitlines()[0].endswith("run_trainer.py [--FLAG VALUE ...]")
        assert "\nThe optimizer and its schedule:\n" in texts["--help"]
        assert "\n  --use_relay, --no_use_relay\n" in texts["--help_all"] and "(default: on)" in texts["--help_all"]


def test_no_limit_is_infinite():
    arguments.OptimizerArguments(max_grad_norm=float("inf"))
    arguments.MonitorArguments(refresh_period=float("inf"))
    for number in (0.0, float("nan")):
        with pytest.raises(UserError, match="--max_grad_norm must be above 0$"):
            arguments.OptimizerArguments(max_grad_norm=number)
    with pytest.raises(UserError, match="--num_train_epochs must be above 0 and at most"):
        arguments.TrainerArguments(num_train_epochs=float("inf"))


PARSES = re.compile(r"groups = parse_arguments|\(args,\) = parse_arguments")


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if PARSES.search(path.read_text())])
def test_a_typo_is_answered_before_the_slow_imports(module):
    command = [sys.executable, "-X", "importtime", "-m", module, "--nonsense"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    *imported, line = run.stderr.splitlines()
    assert run.returncode == 2 and line.startswith(f"{MODULES[module].name}: error: ") and "--" in line
    assert not {"torch", "hivemind", "datasets"} & {line.split("|")[-1].strip() for line in imported}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ("configs/albert-large.json", "data/tokenizer")),
        ({"model_name_or_path": "a"}, (None, "a")),
        # the default, named
        ({"model_name_or_path": "a", "tokenizer_path": "data/tokenizer"}, (None, "data/tokenizer")),
    ],
)
def test_shape_and_tokenizer_come_from_the_pretrained_model_unless_others_are_named(given, expected):
    args = arguments.ModelArguments(**given)
    assert (args.config_path, args.tokenizer_path) == expected
    assert dataclasses.replace(args) == args


def test_a_missing_tokenizer_names_the_script_that_makes_it():
    run = run_python("run_trainer.py", "--run_id", "a", "--tokenizer_path", "no/such/folder", expect=2)
    assert "Traceback" not in run.stderr
    [line] = [line for line in run.stderr.splitlines() if "error:" in line]
    assert "tokenize_wikitext103.py" in line
