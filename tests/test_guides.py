"""The commands of the guides that volunteers followed elsewhere: each parses here, and means what it meant there."""

import dataclasses
import re
import shlex
import sys

import pytest

import arguments

SHARED = ("ModelArguments", "OptimizerArguments", "AveragingArguments")
GROUPS = {
    "run_trainer.py": ("SwarmArguments", *SHARED, "DataArguments", "TrainerArguments"),
    "run_training_monitor.py": ("SwarmArguments", "MonitorArguments", "ArchiveArguments", *SHARED),
    "run_aux_peer.py": ("SwarmArguments", "AuxPeerArguments", "ArchiveArguments", *SHARED),
}
PEER = "/ip4/203.0.113.1/tcp/31337/p2p/12D3KooWRZaQor8srzhFHM8yLXjHcyy4Fx9VcCo9a5sGWcuRred2"
# hivemind's ALBERT tutorial, the notebook for Colab, NetMind's scripts, RuLeanALBERT
COMMANDS = {
    "run_training_monitor.py --dht_listen_on '[::]:*' --experiment_prefix my-albert-v1 --wandb_project Demo-run": {
        "host_maddrs": ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"],
        "wandb_project": "Demo-run",
        "report_to": "wandb",
    },
    f"run_trainer.py --experiment_prefix E --initial_peers {PEER} --seed 42 --logging_first_step --logging_steps 100 "
    "--output_dir ./outputs --overwrite_output_dir --logging_dir ./logs": {
        "seed": 42,
        "logging_first_step": True,
        "logging_steps": 100,
        "logging_dir": "./logs",
        "overwrite_output_dir": True,
    },
    f"run_trainer.py --client_mode --initial_peers {PEER} --averaging_expiration 10 --statistics_expiration 120 "
    "--batch_size_lead 300 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --logging_first_step "
    "--logging_steps 100 --output_dir ./outputs --overwrite_output_dir --logging_dir ./logs --experiment_prefix E "
    "--seed 42": {"client_mode": True, "matchmaking_time": 10, "statistics_expiration": 120, "batch_size_lead": 300},
    "run_trainer.py --run_id E --dataset_path ./data --tokenizer ./tokenizer": {
        "dataset_path": "./data",
        "tokenizer_path": "./tokenizer",
    },
    "run_aux_peer.py --run_id E --host_maddrs /ip4/0.0.0.0/tcp/12345 --announce_maddrs /ip4/203.0.113.1/tcp/12345 "
    "--wandb_project E --store_checkpoints --upload_interval 43200 --repo_url ORG/NAME --assist_in_averaging "
    "--bandwidth 100": {
        "announce_maddrs": ["/ip4/203.0.113.1/tcp/12345"],
        "store_checkpoints": True,
        "upload_interval": 43200,
        "repo_url": "ORG/NAME",
        "assist_in_averaging": True,
        "bandwidth": 100,
    },
    "run_trainer.py --run_id E --host_maddrs /ip4/0.0.0.0/tcp/31337 --announce_maddrs /ip4/203.0.113.1/tcp/31337 "
    f"--initial_peers {PEER} --bandwidth 100 --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --fp16 "
    "--gradient_checkpointing": {
        "gradient_checkpointing": True,
        "experiment_prefix": "E",
        "bandwidth": 100,
        "fp16": True,
        "gradient_accumulation_steps": 1,
    },
    "run_trainer.py --run_id E --gradient_checkpoints": {"gradient_checkpointing": True},
    f"run_trainer.py --run_id E --initial_peers {PEER} --authorize False": {"authorize": False},
    "run_trainer.py --run_id E --optim lamb_8bit --min_8bit_size 1048576 --clamp_value 1e9 --learning_rate 2.5e-3 "
    "--min_learning_rate 1e-5 --grad_compression 8bit --average_state_every 5 --min_vector_size 4000000": {
        "min_8bit_size": 2**20,
        "min_learning_rate": 1e-5,
        "compression": "8bit",
    },
    "run_training_monitor.py --run_id E --use_google_dns --refresh_period 10 --store_checkpoints "
    "--save_checkpoint_step_interval 20 --model_config_path configs/demo.json --repo_path ./repo --repo_url ORG/NAME "
    "--upload_interval 600": {
        "use_google_dns": True,
        "refresh_period": 10,
        "save_checkpoint_step_interval": 20,
        "config_path": "configs/demo.json",
        "local_path": "./repo",
    },
    f"run_aux_peer.py --run_id E --initial_peers {PEER} --assist_in_averaging --assist_refresh 2 --store_checkpoints "
    "--save_checkpoint_epoch_interval 10 --local_path ./repo": {
        "assist_refresh": 2,
        "save_checkpoint_step_interval": 10,
    },
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_guides_parses(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    groups = arguments.parse_arguments(*(getattr(arguments, name) for name in GROUPS[sys.argv[0]]))
    values = {name: value for group in groups for name, value in vars(group).items()}
    assert {name: values[name] for name in COMMANDS[command]} == COMMANDS[command]


@pytest.mark.parametrize("script", GROUPS)
def test_each_other_name_of_a_flag_stands_in_its_help(script, monkeypatch, capsys):
    groups = [getattr(arguments, name) for name in GROUPS[script]]
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setenv("COLUMNS", "10000")
    with pytest.raises(SystemExit) as error:
        arguments.parse_arguments(*groups)
    assert not error.value.code
    text = capsys.readouterr().out
    for aliases in (field.metadata.get("aliases", []) for group in groups for field in dataclasses.fields(group)):
        assert all(re.search(rf"Also known as [^.]*{alias}\b", text) for alias in aliases), aliases
