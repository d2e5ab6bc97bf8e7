"""Whole swarms of the scripts that users run, on loopback: they learn, agree, join late, mix and end."""

import json
import math
import os
import re
import signal

import pytest
import torch
from processes import LOOPBACK, make_prefix, wait_until
from swarms import TRAINER, choose_trainer, flags, history, largest_difference, start_monitor, start_trainer, stop
from transformers import AutoModelForPreTraining

from arguments import TRAINER_ARGS, DataArguments, ModelArguments, OptimizerArguments
from common.flags import list_shared
from experiment.data import make_eval_batches, make_train_batches
from experiment.model import make_model
from experiment.optimizer import make_local_optimizer, make_param_groups, make_scheduler
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer
from training.evaluation import evaluate
from training.model import move_batch


def test_late_trainer_loads_state_and_learns(start, tmp_path, tiny_data):
    """Batches are paced, so that the epochs do not end before the third trainer is there."""
    prefix, epochs = make_prefix(), 14
    together = {**tiny_data, "--max_steps": epochs, "--target_group_size": 3, "--target_batch_size": 192}
    together |= {"--load_state_compression": "none"}  # or the weights differ until parameters are averaged
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor")
    names = ["first", "second", "third"]
    trainers = [start_trainer(start, tmp_path, name, prefix, peers, together, pace=0.4) for name in names[:2]]
    wait_until(lambda: history(tmp_path, "first"), 90, "an epoch")
    monitor.wait_for("--target_batch_size 192")  # it knows the settings of the run, which the first trainers brought
    # it is told the monitor's host and port; the run and all that its peers share it finds out
    shared = {f"--{name}" for name in list_shared(TRAINER_ARGS)} - {"--tokenizer_path"}
    own = {name: value for name, value in {**TRAINER, **together}.items() if name not in shared}
    own |= {"--initial_peers": f"127.0.0.1:{peers.split('/')[4]}", "--output_dir": tmp_path / "third"}
    trainers.append(start("third", *choose_trainer(0.4), *LOOPBACK, *flags(own)))
    trainers[-1].wait_for("first samples", 120)
    taken = re.search("inherited from --initial_peers: (.*)", trainers[-1].text)[1]
    inherited = {"--experiment_prefix", "--target_group_size", "--load_state_compression"}
    assert set(re.findall(r"--\w+", taken)) == shared & TRAINER.keys() | inherited
    stranger = start_trainer(start, tmp_path, "stranger", prefix, peers, together, {"--target_batch_size": 64})
    stranger.assert_user_error("target_batch_size: the run has 192, you have 64", 90)
    for trainer in trainers:
        trainer.assert_clean_end(120)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in names]
    assert [summary["epoch"] for summary in summaries] == [epochs] * 3
    assert largest_difference(tmp_path, *names) < 1e-6
    # the third began where the others were, not at zero, and went on from their weights: its first loss shows it
    third = history(tmp_path, "third")
    assert min(third) >= 2 and third[max(third)]["loss"] < 0.95 * (math.log(500) + math.log(2)), third
    assert summaries[2]["samples"] > 0
    for epoch, line in third.items():
        if line["averaged_with"] == 3:
            norms = [history(tmp_path, name)[epoch]["grad_norm"] for name in names]
            assert norms == pytest.approx([norms[0]] * 3, rel=1e-3)
    assert sum(line["averaged_with"] == 3 for line in third.values()) >= 3
    # the monitor has seen the signed metrics of all
    stop(monitor)
    lines = [json.loads(line) for line in (tmp_path / "monitor" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["epoch"] == epochs and max(line["alive_peers"] for line in lines) == 3
    assert lines[-1]["loss"] < lines[0]["loss"]
    seen = json.loads((tmp_path / "monitor" / "summary.json").read_text())["peers"]
    assert sorted(peer["total_samples"] for peer in seen.values()) == sorted(s["samples"] for s in summaries)


@pytest.mark.slow
def test_small_groups_converge(start, tmp_path, tiny_data):
    """No more than two trainers average at once. A fifth one comes later, although no two have the same state."""
    # from epoch 8 on the learning rate is zero, and only the averaging of parameters moves them
    pairs = {**tiny_data, "--target_group_size": 2, "--learning_rate": 2e-4, "--total_steps": 8, "--max_steps": 48}
    pairs |= {"--average_state_every": 1, "--load_state_compression": "none"}  # 16 bits of a weight are 1e-5 apart
    prefix = make_prefix()
    monitor, peers = start_monitor(start, prefix, tmp_path / "monitor")
    names = ["a", "b", "c", "d"]
    trainers = [start_trainer(start, tmp_path, name, prefix, peers, pairs) for name in names]
    wait_until(lambda: min(len(history(tmp_path, name)) for name in names) >= 4, 90, "four epochs of all")
    names.append("late")
    trainers.append(start_trainer(start, tmp_path, "late", prefix, peers, pairs))
    trainers[-1].wait_for(r"loaded the state of epoch (?:[4-9]|\d\d) \(was at 0\)", 90)
    for trainer in trainers:
        assert trainer.wait(200) == 0, trainer.text[-3000:]
    assert max(line["averaged_with"] for name in names for line in history(tmp_path, name).values()) == 2
    # one step of 2e-4 moves weights by about as much; mixing has brought them closer by far
    assert largest_difference(tmp_path, *names) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("optim, kind", [("adamw", "linear"), ("muon", "wsd")])
def test_swarm_matches_single_process_curve(start, tmp_path, tiny_data, optim, kind):
    """Two trainers with a target batch of B against a plain loop with a batch of B: within 1 % after 10 epochs."""
    epochs, batch_size = 10, 512
    curve = {**tiny_data, "--target_batch_size": batch_size, "--max_steps": epochs, "--target_group_size": 2}
    curve |= {"--do_eval": [], "--optim": optim, "--lr_scheduler_type": kind}
    prefix = make_prefix()
    _, peers = start_monitor(start, prefix, tmp_path / "monitor")
    trainers = [start_trainer(start, tmp_path, "first", prefix, peers, curve, is_real=True)]
    trainers[0].wait_for(r"hivemind [\d.]+, torch")  # the imports are over, in which the second would go alone
    trainers.append(start_trainer(start, tmp_path, "second", prefix, peers, curve))
    for trainer in trainers:
        trainer.assert_clean_end(180)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("first", "second")]
    # the first peer steps alone until the other is there
    assert all(summary["epochs_averaged"] >= epochs / 2 for summary in summaries)
    times = dict(learning_rate=2e-3, warmup_steps=5, total_steps=100)
    options = OptimizerArguments(optim=optim, lr_scheduler_type=kind, **times)
    tokenizer = load_tokenizer(tiny_data["--tokenizer_path"])
    dataset, _ = load_tokenized_dataset(tiny_data["--dataset_path"], tokenizer)
    model, device = make_model(ModelArguments(config_path="configs/demo.json"), len(tokenizer)), torch.device("cpu")
    optimizer = make_local_optimizer(options, make_param_groups(model, separate_hidden=optim == "muon"))
    scheduler = make_scheduler(options, optimizer)
    batches = iter(make_train_batches(dataset["train"], tokenizer, DataArguments(), batch_size=16, seed=1))
    for _ in range(epochs):
        optimizer.zero_grad()
        for _ in range(batch_size // 16):
            (model(**move_batch(next(batches), device))["loss"] * 16 / batch_size).backward()
        optimizer.step()
        scheduler.step()
    validation = make_eval_batches(dataset["validation"], tokenizer, DataArguments(), batch_size=32)
    alone = evaluate(model, validation, device)["loss"]
    assert alone < summaries[0]["start_loss"] - 0.3  # the curve has moved by far more than the tolerance
    for summary in summaries:
        assert summary["final_loss"] == pytest.approx(alone, rel=0.01)


@pytest.mark.slow
def test_lean_albert_swarm_learns(start, tmp_path, tiny_data):
    """With 8-bit moments and gradients, checkpointing by one peer alone, and sequences that grow."""
    lean = {**tiny_data, "--config_path": "configs/lean-demo.json", "--max_steps": 12, "--target_group_size": 2}
    lean |= {"--optim": "lamb_8bit", "--min_8bit_size": 4096, "--learning_rate": 0.02, "--grad_compression": "8bit"}
    lean |= {"--initial_sequence_length": 16, "--max_sequence_length": 32, "--sequence_length_warmup_steps": 6}
    prefix = make_prefix()
    _, peers = start_monitor(start, prefix, tmp_path / "monitor")
    own = {"first": {"--gradient_checkpointing": []}, "second": {"--do_eval": []}}
    trainers = [start_trainer(start, tmp_path, name, prefix, peers, lean, more) for name, more in own.items()]
    for trainer in trainers:
        trainer.assert_clean_end(180)
    assert largest_difference(tmp_path, "first", "second") < 1e-6
    summary = json.loads((tmp_path / "second" / "summary.json").read_text())
    assert summary["epochs_averaged"] >= 6 and summary["final_loss"] < summary["start_loss"] - 0.3
    loaded = AutoModelForPreTraining.from_pretrained(tmp_path / "first" / "model")
    assert type(loaded).__name__ == "LeanAlbertForPreTraining" and loaded.config.hidden_act_gated


def test_ctrl_c_saves_and_exits_cleanly(start, tmp_path, tiny_data, prefix):
    """While the imports run; and in a round that hangs, as the terminal closes. The model is saved, no process left."""
    alone = [*LOOPBACK, *flags(TRAINER, tiny_data, {"--experiment_prefix": prefix, "--output_dir": tmp_path})]
    early = start("early", "-X", "importtime", "run_trainer.py", *alone)
    early.wait_for("import time:.*torch")
    early.interrupt()
    early.assert_clean_end(60)
    assert early.text.splitlines()[-1] == "stopped"
    patient = ("--averaging_timeout", 300, "--next_chunk_timeout", 300)
    trainer = start("trainer", *choose_trainer(0), *alone, *patient)
    address = trainer.wait_for(r"--initial_peers (\S+)")[1]
    own = {"--experiment_prefix": prefix, "--output_dir": tmp_path / "silent", "--initial_peers": address}
    command = ("-m", "tests.programs.changed_trainer", "silent", *LOOPBACK, *flags(TRAINER, tiny_data, own))
    silent = start("silent", *command)
    silent.wait_for("silent from now on", 150)
    for _ in range(2):  # by the shell, and by the system
        os.killpg(trainer.session, signal.SIGHUP)
    trainer.assert_clean_end(60)  # the round would go on for 300 s
    assert trainer.text.count("trainer stopping: saving") == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["epoch"] >= 2
    assert summary["samples"] == sum(line["samples_accumulated"] for line in history(tmp_path, ".").values())
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("helpers", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_ctrl_c_during_helper_start_exits_cleanly(start, tmp_path, tiny_data, helpers):
    """At the moment when another one appears; the first is torch's manager of shared memory."""
    own = {**tiny_data, "--experiment_prefix": make_prefix(), "--output_dir": tmp_path}
    trainer = start("trainer", "run_trainer.py", *LOOPBACK, *flags(TRAINER, own))
    wait_until(lambda: len(trainer.processes()) > helpers, 60, f"{helpers} helpers")
    trainer.interrupt()
    trainer.assert_clean_end(60)
    assert "epoch 2/" not in trainer.text


def test_second_ctrl_c_warns_of_loss(start):
    code = """if True:
        import time
        from common.console import clean_end, handle_stop_signals, setup_logging
        setup_logging("peer")
        with clean_end():
            handle_stop_signals(unsaved="a day of work")
            while True:
                print("ready", flush=True)
                time.sleep(0.1)
        """
    peer = start("peer", "-c", code)
    peer.wait_for("ready")
    lost = "Ctrl-C once more stops at once, and loses a day", "lost: a day of work"
    for words in ("stopping: .* Ctrl-C again", *lost):
        assert not re.search(words, peer.text)
        peer.interrupt()
        peer.wait_for(words)
    assert peer.wait(60) == 130
