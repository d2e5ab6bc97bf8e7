"""A single trainer: steps that must not count, parameters that must be restored, and the same model in all roles."""

import contextlib
import json
import math
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from processes import make_prefix, run_python
from rows import make_model_batch
from safetensors.torch import load_file
from swarms import TINY, Swarm, flags, history

from arguments import ModelArguments, TrainerArguments
from experiment.model import make_model
from run_trainer import accumulate_gradients
from training.ranks import RankGroup


def run(program: str, *arguments: object) -> CompletedProcess:
    return run_python("-m", f"tests.programs.{program}", *arguments, timeout=180, expect=0)


def run_changed(change: str, folder: Path, *groups: dict) -> tuple[CompletedProcess, dict, list[dict]]:
    own = {"--experiment_prefix": make_prefix(), "--output_dir": folder / "out"}
    result = run("changed_trainer", change, *TINY, *flags(own, *groups))
    summary = json.loads((folder / "out" / "summary.json").read_text())
    return result, summary, list(history(folder, "out").values())


def test_nonfinite_steps_are_skipped_and_counted(tmp_path, tiny_data):
    _, summary, lines = run_changed("faulty", tmp_path, tiny_data, {"--max_steps": 4})
    # 4 epochs of 64 samples in steps of 16: 16 good steps, and every fifth of all is bad
    assert (summary["samples"], summary["skipped_steps"], lines[-1]["skipped_steps"]) == (256, 3, 3)
    assert all(math.isfinite(line["loss"]) for line in lines)
    weights = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


def test_growing_sequences_model_learns(tmp_path, tiny_data):
    own = {"--do_eval": [], "--dataloader_num_workers": 2, "--max_steps": 8, **tiny_data}
    own |= {"--initial_sequence_length": 16, "--max_sequence_length": 32, "--sequence_length_warmup_steps": 4}
    result, summary, lines = run_changed("measured", tmp_path, own)
    widths, tokens = {}, 0
    for line in result.stdout.splitlines():
        epoch, width, count = json.loads(line)
        widths.setdefault(epoch, []).append(width)
        tokens += count
    # 16 + 4 per epoch, in multiples of 8; an epoch has four batches
    expected = [16, 16, 24, 24, 32, 32, 32, 32]
    assert list(widths) == list(range(8)) and all(len(widths[epoch]) == 4 for epoch in widths)
    assert all(max(widths[epoch]) <= expected[epoch] for epoch in range(8)), widths
    longest = [max(widths[epoch] + widths[epoch + 1]) for epoch in (0, 2, 4)]
    assert longest[:2] == [16, 24] and longest[2] > 24, widths
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    assert summary["tokens"] == tokens and summary["mfu"] is None  # on a CPU
    assert summary["tokens_per_second"] == pytest.approx(tokens / summary["seconds"])
    assert summary["seconds"] == pytest.approx(sum(line["epoch_seconds"] for line in lines), rel=0.01)
    assert sum(line["tokens_per_second"] * line["epoch_seconds"] for line in lines) == pytest.approx(tokens)
    assert f"{summary['tokens_per_second']:,.0f} tokens/s, MFU -; model and state are in" in result.stderr
    assert lines[-1]["loss"] < lines[0]["loss"] and summary["final_loss"] < summary["start_loss"] - 0.3


@pytest.mark.parametrize("config", ["gpt-demo", "demo"])
def test_gradient_is_independent_of_batch_size(config):
    """The rows have different numbers of labels, as answers in conversations."""
    model = make_model(ModelArguments(f"configs/{config}.json"), 300).eval()
    rows = make_model_batch()
    device = torch.device("cpu")
    results = []
    for size in (1, 2, 4):
        model.zero_grad()
        batches = [{name: tensor[start : start + size] for name, tensor in rows.items()} for start in range(0, 4, size)]
        args = TrainerArguments(device="cpu", gradient_accumulation_steps=len(batches))
        options = device, contextlib.nullcontext(), torch.amp.GradScaler("cpu", enabled=False)
        loss = accumulate_gradients(model, RankGroup(0, [device]), iter(batches), args, *options)
        results.append([loss, *[param.grad for param in model.parameters()]])
    for result in results[:2]:
        torch.testing.assert_close(result, results[2], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module", params=[pytest.param("lamb", marks=pytest.mark.slow), "lamb_8bit"])
def facts(request, tmp_path_factory) -> dict:
    roles = run("roles", make_prefix(), tmp_path_factory.mktemp("roles"), request.param)
    return json.loads(roles.stdout.splitlines()[-1])


def test_roles_order_parameters_equally(facts):
    """Peers exchange states by position (note 9)."""
    assert facts["trainer"] == facts["monitor"]
    matrices = [name for name in facts["trainer"]["names"] if name in facts["trainer"]["matrices"]]
    assert facts["trainer"]["matrices"] == matrices and len(matrices) >= 8


@pytest.mark.slow
def test_nonfinite_parameters_reload_from_swarm(start, tmp_path, tiny_data):
    swarm = Swarm(start, tmp_path, {**tiny_data, "--load_state_compression": "none"})
    swarm.start_monitor()
    swarm.start_trainers("a", "b")
    swarm.start_trainers("broken", program="tests/programs/spoiled_trainer.py")
    swarm.trainers["broken"].wait_for("non-finite parameters", 120)
    joint = swarm.wait_for_joint_epochs(["a", "b", "broken"], 3, 60)
    swarm.stop_together(["a", "b", "broken"], joint[0])
    assert swarm.difference(["a", "b", "broken"]) < 1e-6


def test_trainer_history_reads_only_its_run(facts):
    """A trainer that has gone back drops its own later epochs only."""
    assert facts["last_written"] == 7 and facts["epochs"] == [[0], [300, 0]]


def test_callback_reports_good_steps_and_ends_bad_trainer(facts):
    """The loss is the mean of the steps that were not skipped, and unknown values are omitted."""
    assert facts["exit_code"] == 1 and facts["is_finite"]  # with non-finite parameters, and after a restart
    before, after = facts["lines"]
    assert facts["progress"]["target_batch_size"] == 64  # not less --batch_size_lead
    assert re.fullmatch(r"epoch 0/100  peers 1/1  \d\.\d s  local samples 0  next epoch 0%", before), before
    assert re.fullmatch(r"epoch 0/100  loss 1\.5000  peers 1/1  .* s  .*  ETA 50:00  next epoch 0%", after), after
    assert facts["has_contributed"]  # the step of an epoch's end uses its samples at once, and leaves none pending
    assert facts["measured"] == [None, None, None]  # the evaluation was out of memory
    expirations, are_evaluated = zip(*facts["expirations"], strict=True)
    assert expirations[0] < expirations[1] < expirations[2] and are_evaluated == (True, True, False)
    assert facts["set_aside"]


def test_checkpoint_of_other_peer_counts_no_samples(facts):
    """The other peer has reported them, so they would count twice in the run."""
    (total, computed), other = facts["samples"]
    assert total == 640 and computed > 0 and other == [0, 0]
