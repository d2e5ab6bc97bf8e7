"""Every flag is read by something, has help, and a wrong one is one clear line."""

import dataclasses
import re
import sys
import tempfile

import pytest
from conventions import MODULES, load_groups
from mains import expect_user_error, parse
from processes import run_python

import arguments
from common.console import UserError
from common.flags import describe_shared, find_typed
from swarm.attestation import RunAttestation
from training.settings import apply_settings, list_settings

GROUPS = load_groups()


def test_full_disk_is_one_line(monkeypatch, tmp_path):
    """Otherwise an import that needs a temporary folder fails."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with expect_user_error("the disk is full or read-only", "TMPDIR"):
        parse(arguments.TRAINER_ARGS, "run_trainer.py", "--experiment_prefix", "a")


def test_flags_have_help_and_are_read():
    readers = "".join(path.read_text() for module, path in MODULES.items() if module != "arguments")
    # as an attribute or by name, outside of its own dataclass; RuLeanALBERT's --authorize only requires other flags
    read = {"authorize", *re.findall(r"""[."](\w+)""", readers)}
    for item in (item for groups in GROUPS.values() for group in groups for item in dataclasses.fields(group)):
        assert len(item.metadata.get("help", "")) > 20, item.name
        assert not item.name.endswith("_steps") or re.search(r"[Ee]poch", item.metadata["help"]), item.name
        assert item.name in read, f"nothing reads --{item.name}"


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--initial_peers /ip4/127.0.0.1/tcp/1/p2p/Qm --new_run", ["--experiment_prefix"]),
        ("--initial_peers --run_id a", ["--initial_peers", "expected at least one argument"]),
        ("--run_id a.b", ["dot", "a_b"]),
        (f"--run_id {'a' * 257}", ["--experiment_prefix", "256"]),  # the most that other peers accept
        ("--experiment-prefx a", ["--experiment-prefx", "did you mean --experiment_prefix?"]),
        ("--lerning-rate=1", ["--lerning-rate,", "did you mean --learning_rate?"]),
        ("--learning 1", ["--learning"]),
        ("--learning_rate fast", ["--learning_rate", "fast"]),
        ("--total_steps 60", ["--warmup_steps 5000", "--total_steps 60"]),
        ("--adam_beta2 1.5", ["--adam_beta2", "below 1"]),
        ("--matchmaking_time -1", ["--matchmaking_time", "above 0"]),
        ("--matchmaking_time inf", ["--matchmaking_time", "at most 600"]),
        ("--weight_decay nan", ["--weight_decay", "at least 0"]),
        ("--host_maddrs localhost", ["--host_maddrs", "'localhost'"]),
        ("--authorize", ["--authorize needs --invite FILE or --authority_key FILE"]),
        ("--fp16 --bf16", ["--fp16", "--bf16"]),
        ("--max_steps 10000000000", ["--max_steps", "at most 1000000000"]),  # other peers would reject its metrics
        ("--eval_steps 9", ["--eval_steps needs --do_eval: add it"]),
        ("--reuse_grad_buffers", ["--reuse_grad_buffers"]),  # RuLeanALBERT's, which docs/models.md explains
        ("--initial_sequence_length 128", ["--max_sequence_length", "--sequence_length_warmup_steps"]),
        ("--objective nsp", ["--objective", "mlm_sop"]),
        ("--local_steps 25 --total_steps 5000", ["--local_steps 25", "5000", "--warmup_steps"]),
        ("--compression sparse", ["--compression sparse", "--local_steps 25"]),
        ("--validation_file b", ["--validation_file", "--train_file"]),
    ],
)
def test_invalid_flag_is_one_line(flags, words):
    with expect_user_error(*words):
        parse(arguments.TRAINER_ARGS, "./run_trainer.py", *flags.split())


@pytest.mark.parametrize("script, number", [("run_trainer", 37), ("run_training_monitor", 30), ("finetune_mlm", 18)])
def test_help_lists_basic_flags_first(script, number, monkeypatch, capsys):
    groups, example = (
        GROUPS[f"{script}.py"],
        "    python run_trainer.py --experiment_prefix my_albert \\\n        --fp16\n",
    )
    monkeypatch.setenv("COLUMNS", "80")
    listed, texts = [], []
    for flag in ("--help", "--help_all"):
        with pytest.raises(SystemExit):
            parse(groups, f"{script}.py", flag, description=example)
        texts.append(text := capsys.readouterr().out)
        listed.append(re.findall(r"(?m)^  --(?!help)(\w+)", text))
        assert text.startswith(f"usage: {script}.py ") and example in text and "--no_x" not in text
        assert not re.search(r"--\w+-\w", text), "one spelling"
    assert len(listed[0]) == number
    assert set(listed[1]) == {item.name for group in groups for item in dataclasses.fields(group)}
    if script == "run_trainer":
        assert texts[0].splitlines()[0].endswith("run_trainer.py [--FLAG VALUE ...]")
        assert "\nThe optimizer and its schedule:\n" in texts[0]
        assert re.search(r"\n  --whole_word_mask, --no_whole_word_mask\n[^-]+\(default:\s+on\)", texts[1])


def test_infinite_limit_is_accepted():
    arguments.OptimizerArguments(max_grad_norm=float("inf"))
    arguments.ReportArguments(refresh_period=float("inf"))
    for number in (0.0, float("nan")):
        with pytest.raises(UserError, match="--max_grad_norm (0|nan) must be above 0$"):
            arguments.OptimizerArguments(max_grad_norm=number)
    with pytest.raises(UserError, match="--num_train_epochs inf must be at most"):
        arguments.TrainerArguments(num_train_epochs=float("inf"))


def test_flags_of_monitor_parse_in_trainer(monkeypatch):
    """With a switch that is off."""
    monitor = "run_training_monitor.py --run_id a --overlap False --model_name_or_path gpt2 --lora_r 4"
    monkeypatch.setattr(sys, "argv", monitor.split())
    groups = arguments.parse_arguments(*arguments.MONITOR_ARGS)
    flags = describe_shared(groups, find_typed(map(type, groups)))
    settings = list_settings(RunAttestation(prefix="a", flags=flags))
    trainer = ["run_trainer.py", "--initial_peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm", "--model_name_or_path", "gpt2"]
    monkeypatch.setattr(sys, "argv", trainer)
    own = arguments.parse_arguments(*arguments.TRAINER_ARGS)
    _, model, _, averaging, *_ = apply_settings(own, {"experiment_prefix": "a", **settings})
    assert model.lora_r == 4 and not averaging.overlap
    monkeypatch.setattr(sys, "argv", [*trainer, "--overlap", "--lora_r", "8"])
    with expect_user_error("--lora_r: the run has 4, you have 8", "has False, you have True"):
        apply_settings(own, {"experiment_prefix": "a", **settings})


PARSES = re.compile(r"groups = parse_arguments|\(args,\) = parse_arguments")
# runs each module in a fork with the imports that precede its flags
RUN_WITH_TYPO = """
import os, runpy, sys, arguments, transformers
for module in sys.argv[1:]:
    if not os.fork():
        sys.argv = [module, "--nonsense"]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as e:
            print(e.code, {"torch", "hivemind", "datasets"} & {*sys.modules}, flush=True)
        os._exit(0)
    os.wait()
"""


def test_typo_is_answered_before_imports():
    modules = [module for module, path in MODULES.items() if PARSES.search(path.read_text())]
    run = run_python("-c", RUN_WITH_TYPO, *modules, is_real=True, expect=0)
    assert len(modules) == 7 and run.stdout == "2 set()\n" * 7
    for module, line in zip(modules, run.stderr.splitlines(), strict=True):
        assert line.startswith(f"{MODULES[module].name}: error: ") and "--" in line


def test_pretrained_model_sets_config_and_tokenizer():
    for options, expected in (
        ({}, ("configs/albert-large.json", "data/tokenizer")),
        ({"model_name_or_path": "a"}, (None, "a")),
        # an explicit default
        ({"model_name_or_path": "a", "tokenizer_path": "data/tokenizer"}, (None, "data/tokenizer")),
    ):
        args = arguments.ModelArguments(**options)
        assert (args.config_path, args.tokenizer_path) == expected
        assert dataclasses.replace(args) == args
