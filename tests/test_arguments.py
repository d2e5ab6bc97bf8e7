"""Every flag is read by something, has help, and a wrong one is one clear line."""

import dataclasses
import re
import sys

import pytest
from conventions import MODULES, load_groups
from mains import expect_user_error
from processes import run_python

import arguments
from common.console import UserError
from common.flags import describe_shared, find_typed
from swarm.attestation import RunAttestation
from training.settings import apply_settings, list_settings

GROUPS = load_groups()
FIELDS = [item for groups in GROUPS.values() for group in groups for item in dataclasses.fields(group)]
# RuLeanALBERT's --authorize only requires --invite or --authority_key
ONLY_CHECKED = {"authorize"}
READERS = "".join(path.read_text() for module, path in MODULES.items() if module != "arguments")


def test_flags_have_help_and_are_read():
    # as an attribute or by name, outside of its own dataclass
    read = set(re.findall(r"""[."](\w+)""", READERS))
    for item in FIELDS:
        assert len(item.metadata.get("help", "")) > 20, item.name
        assert item.name in read or item.name in ONLY_CHECKED, f"nothing reads --{item.name}"


def test_flags_in_steps_mention_epochs():
    for item in FIELDS:
        if item.name.endswith("_steps"):
            assert re.search(r"[Ee]poch", item.metadata["help"]), item.name


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--initial_peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm", "--new_run"], ["--experiment_prefix"]),
        (["--initial_peers", "--run_id", "a"], ["--initial_peers", "expected at least one argument"]),
        (["--run_id", "a.b"], ["dot", "a_b"]),
        (["--experiment-prefx", "a"], ["--experiment-prefx", "did you mean --experiment_prefix?"]),
        (["--lerning-rate=1"], ["--lerning-rate,", "did you mean --learning_rate?"]),
        (["--learning", "1"], ["--learning"]),
        (["--learning_rate", "fast"], ["--learning_rate", "fast"]),
        (["--total_steps", "60"], ["--warmup_steps 5000", "--total_steps 60"]),
        (["--adam_beta2", "1.5"], ["--adam_beta2", "below 1"]),
        (["--matchmaking_time", "-1"], ["--matchmaking_time", "above 0"]),
        (["--weight_decay", "nan"], ["--weight_decay", "at least 0"]),
        (["--statistics_expiration", "7200"], ["--statistics_expiration", "at most 3600"]),
        (["--host_maddrs", "localhost"], ["--host_maddrs", "'localhost'"]),
        (["--use_ipfs"], ["--use_ipfs needs --initial_peers"]),
        (["--authorize"], ["--authorize needs --invite FILE or --authority_key FILE"]),
        (["--fp16", "--bf16"], ["--fp16", "--bf16"]),
        # other peers would reject its metrics
        (["--max_steps", "10000000000"], ["--max_steps", "at most 1000000000"]),
        (["--eval_steps", "9"], ["--eval_steps needs --do_eval: add it"]),
        # RuLeanALBERT's flag, which docs/models.md explains
        (["--reuse_grad_buffers"], ["--reuse_grad_buffers"]),
        (["--initial_sequence_length", "128"], ["--max_sequence_length", "--sequence_length_warmup_steps"]),
        (["--objective", "nsp"], ["--objective", "mlm_sop"]),
        (["--compression", "sparse"], ["--compression sparse", "--local_steps 25"]),
        (["--validation_file", "b"], ["--validation_file", "--train_file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_flag_is_one_line(flags, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["./run_trainer.py", *flags])
    with expect_user_error(*words):
        arguments.parse_arguments(*arguments.TRAINER_ARGS)


@pytest.mark.parametrize("script, number", [("run_trainer", 38), ("run_training_monitor", 30), ("finetune_mlm", 18)])
def test_help_lists_basic_flags_first(script, number, monkeypatch, capsys):
    texts, example = {}, "    python run_trainer.py --experiment_prefix my_albert \\\n        --fp16\n"
    groups = GROUPS[f"{script}.py"]
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "--help_all"):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", flag])
        with pytest.raises(SystemExit):
            arguments.parse_arguments(*groups, description=example)
        texts[flag] = capsys.readouterr().out
    listed = {flag: re.findall(r"(?m)^  --(?!help)(\w+)", text) for flag, text in texts.items()}
    assert len(listed["--help"]) == number
    assert set(listed["--help_all"]) == {item.name for group in groups for item in dataclasses.fields(group)}
    for text in texts.values():
        assert text.startswith(f"usage: {script}.py ") and example in text and "--no_x" not in text
        assert not re.search(r"--\w+-\w", text), "one spelling"
    if script == "run_trainer":
        assert texts["--help"].splitlines()[0].endswith("run_trainer.py [--FLAG VALUE ...]")
        assert "\nThe optimizer and its schedule:\n" in texts["--help"]
        assert re.search(r"\n  --whole_word_mask, --no_whole_word_mask\n[^-]+\(default: on\)", texts["--help_all"])


def test_infinite_limit_is_accepted():
    arguments.OptimizerArguments(max_grad_norm=float("inf"))
    arguments.ReportArguments(refresh_period=float("inf"))
    for number in (0.0, float("nan")):
        with pytest.raises(UserError, match="--max_grad_norm must be above 0$"):
            arguments.OptimizerArguments(max_grad_norm=number)
    with pytest.raises(UserError, match="--num_train_epochs must be at most"):
        arguments.TrainerArguments(num_train_epochs=float("inf"))


def test_flags_of_monitor_parse_in_trainer(monkeypatch):
    """A switch that is off, and a list."""
    monitor = ["run_training_monitor.py", "--run_id", "a", "--overlap", "False", "--model_name_or_path", "gpt2"]
    monitor += ["--lora_r", "4", "--lora_target_modules", "c_attn", "c_proj"]
    monkeypatch.setattr(sys, "argv", monitor)
    groups = arguments.parse_arguments(*arguments.MONITOR_ARGS)
    flags = describe_shared(groups, find_typed(map(type, groups)))
    settings = list_settings(RunAttestation(prefix="a", flags=flags))
    trainer = ["run_trainer.py", "--initial_peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm", "--model_name_or_path", "gpt2"]
    monkeypatch.setattr(sys, "argv", trainer)
    own = arguments.parse_arguments(*arguments.TRAINER_ARGS)
    _, model, _, averaging, *_ = apply_settings(own, ["--experiment_prefix=a", *settings])
    assert model.lora_target_modules == ["c_attn", "c_proj"] and model.lora_r == 4 and not averaging.overlap
    monkeypatch.setattr(sys, "argv", [*trainer, "--overlap", "--lora_target_modules", "c_fc"])
    with expect_user_error("--lora_target_modules: the run has c_attn,c_proj, you have c_fc", "has False, you have on"):
        apply_settings(own, ["--experiment_prefix=a", *settings])


PARSES = re.compile(r"groups = parse_arguments|\(args,\) = parse_arguments")
# runs each module in a fork with the imports that precede its flags
RUN_WITH_TYPO = """
import os, runpy, sys, arguments, transformers
for module in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    sys.argv = [module, "--nonsense"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        print(e.code, {"torch", "hivemind", "datasets"} & {*sys.modules}, flush=True)
    os._exit(0)
"""


def test_typo_is_answered_before_imports():
    modules = [module for module, path in MODULES.items() if PARSES.search(path.read_text())]
    run = run_python("-c", RUN_WITH_TYPO, *modules, is_real=True, expect=0)
    assert len(modules) == 7 and run.stdout == "2 set()\n" * 7
    for module, line in zip(modules, run.stderr.splitlines(), strict=True):
        assert line.startswith(f"{MODULES[module].name}: error: ") and "--" in line


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ("configs/albert-large.json", "data/tokenizer")),
        ({"model_name_or_path": "a"}, (None, "a")),
        # the default value, given explicitly
        ({"model_name_or_path": "a", "tokenizer_path": "data/tokenizer"}, (None, "data/tokenizer")),
    ],
)
def test_pretrained_model_sets_config_and_tokenizer(given, expected):
    args = arguments.ModelArguments(**given)
    assert (args.config_path, args.tokenizer_path) == expected
    assert dataclasses.replace(args) == args
