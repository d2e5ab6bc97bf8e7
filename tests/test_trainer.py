"""One trainer's own affairs: steps that must not count, parameters that must be restored, and what all roles build."""

import json
from subprocess import CompletedProcess

import pytest
from processes import LOOPBACK, make_prefix, run_python
from safetensors.torch import load_file

from arguments import DataArguments
from text.batches import sequence_length_at

TINY = [
    *("--config_path", "configs/demo.json", "--optim", "adamw", "--learning_rate", "1e-3", "--warmup_steps", "2"),
    *("--total_steps", "50", "--target_batch_size", "64", "--per_device_train_batch_size", "16"),
    *("--gradient_accumulation_steps", "1", "--dataloader_num_workers", "0", "--max_steps", "4"),
]

# Runs run_trainer.py with a fault in the model: the output of every fifth forward pass is NaN, a bad machine's work.
FAULTY_TRAINER = """
import sys
import run_trainer

make_model, passes = run_trainer.make_trained_model, 0

def make_faulty_model(*args):
    model = make_model(*args)

    def spoil(module, inputs, output):
        global passes
        passes += 1
        return output * float("nan") if passes % 5 == 0 else output

    model.predictions.register_forward_hook(spoil)
    return model

run_trainer.make_trained_model = make_faulty_model
with run_trainer.clean_end():
    run_trainer.main(*run_trainer.parse_arguments(*run_trainer.GROUPS))
"""

# Runs run_trainer.py and prints the width of each batch that it trains on, with the epoch.
MEASURED_TRAINER = """
import json
import run_trainer

make_optimizer, move_batch = run_trainer.make_optimizer, run_trainer.move_batch

def keep_optimizer(*args, **options):
    global optimizer
    optimizer = make_optimizer(*args, **options)
    return optimizer

def measure_batch(batch, device):
    print(json.dumps([optimizer.local_epoch, batch["input_ids"].shape[1]]), flush=True)
    return move_batch(batch, device)

run_trainer.make_optimizer, run_trainer.move_batch = keep_optimizer, measure_batch
with run_trainer.clean_end():
    run_trainer.main(*run_trainer.parse_arguments(*run_trainer.GROUPS))
"""

# A monitor's and a trainer's optimizer, each over a DHT of its own; then the trainer breaks, and is restored.
ROLES = """
import contextlib, json, os, sys, time
import torch
from arguments import *
from swarm.processes import clean_end, shut_down
from swarm.joining import make_dht
from callback import CollaborativeCallback
from experiment.model import make_model
from experiment.optimizer import make_optimizer, make_param_groups
from utils import RunContract

with clean_end():
    swarm = SwarmArguments(sys.argv[1], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    options = OptimizerArguments(optim=sys.argv[3], min_8bit_size=4096)
    facts, optimizers = {}, []  # kept: an optimizer that is collected shuts down
    for role, auxiliary in (("monitor", True), ("trainer", False)):
        dht, public_key = make_dht(swarm)
        model = make_model(ModelArguments("configs/demo.json"), 300)
        averaging = AveragingArguments(target_batch_size=64, batch_size_lead=8)
        optimizer = make_optimizer(model, dht, swarm, options, averaging, auxiliary=auxiliary)
        by_value = {param.data.double().pow(2).sum().item(): name for name, param in model.named_parameters()}
        # names by what stands at each position of the state that peers exchange, where the values tell
        _, tensors, _ = optimizer.state_averager.get_current_state()
        count = sum(len(group["params"]) for group in optimizer.opt.param_groups)
        shapes = [list(tensor.shape) for tensor in tensors]
        names = [name for group in make_param_groups(model) for name in group["names"]]
        at = [by_value[tensor.double().pow(2).sum().item()] for tensor in tensors[:count] if tensor.dim() == 2]
        facts[role] = {"names": names, "shapes": shapes, "matrices": at}
        optimizers.append(optimizer)

    class Callback(CollaborativeCallback):
        def compute_evaluation(self):
            return torch.empty(2**60, dtype=torch.uint8)

    def make_callback(**more):
        sizes = dict(per_device_train_batch_size="25", gradient_accumulation_steps=1, max_steps=100)
        arguments = TrainerArguments(output_dir=sys.argv[2], **sizes, **more)
        return Callback(
            dht, optimizer, (swarm, ModelArguments(), options, averaging, DataArguments(), arguments), public_key,
            RunContract(joined=0.0, contract={}), model=model, tokenizer=None, dataset={"train": range(100)}, corpus={},
            autocast=contextlib.nullcontext(), scaler=None,
        )

    restored = {}
    for state_path in (None, os.path.join(sys.argv[2], "state.pt")):
        callback = make_callback(state_path=state_path)
        with torch.no_grad():
            for tensor in callback.state_tensors():
                tensor.random_(256) if tensor.dtype == torch.uint8 else tensor.uniform_()
        optimizer.state_averager._apply_optimizer_parameters_()
        callback.back_up()
        good = [tensor.clone() for tensor in [*callback.state_tensors(), *model.parameters()]]
        with torch.no_grad():
            for tensor in callback.state_tensors():
                tensor.fill_(0 if tensor.dtype == torch.uint8 else float("nan"))
        # the swarm has gone on: the parameters come back, the epoch stays
        optimizer.state_averager.local_epoch = 3
        optimizer.state_averager._update_scheduler()
        finite = [callback.parameters_are_finite()]
        callback.on_epoch_end(0.0)
        finite.append(callback.parameters_are_finite())
        now = [*callback.state_tensors(), *model.parameters()]
        restored["file" if state_path else "memory"] = {
            "finite": finite,
            "equal": all(map(torch.equal, good, now)) and len(good) == len(now),
            "in_memory": callback.backup is not None,
            "epoch": optimizer.local_epoch,
            "learning_rate": optimizer.opt.param_groups[0]["lr"],
        }
        optimizer.state_averager.local_epoch = 0
    facts["restored"] = restored
    # 25 of 100 samples, or of 10,000, in 50 s; and 100 epochs of 30 s
    facts["progress"] = []
    for passes in (1.0, 100.0):
        callback = make_callback(num_train_epochs=passes)
        callback.on_step_end(torch.tensor(1.0), is_finite=True, waited=0.0)
        callback.train_start = time.monotonic() - 50
        callback.recent_seconds.append(30.0)
        facts["progress"].append(callback.measure_progress())
    facts["measured"] = [callback.measure(), callback.measure(), callback.evaluation]
    print(json.dumps(facts), flush=True)
    shut_down(dht, optimizer)
"""


def run(code: str, *arguments: object) -> CompletedProcess:
    return run_python("-c", code, *arguments, timeout=180, expect=0)


def test_steps_that_are_not_finite_are_skipped_counted_and_never_contributed(tmp_path, tiny_data):
    data = [str(word) for flag in tiny_data.items() for word in flag]
    where = ["--experiment_prefix", make_prefix(), "--output_dir", tmp_path]
    run(FAULTY_TRAINER, *TINY, *LOOPBACK, *data, *where)
    summary = json.loads((tmp_path / "summary.json").read_text())
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    # 4 epochs of 64 samples in steps of 16: 16 good steps, and every fifth of all is bad
    assert summary["samples"] == 256
    assert summary["skipped_steps"] == 3
    assert history[-1]["skipped_steps"] == 3
    assert all(line["loss"] == pytest.approx(line["loss"], nan_ok=False) for line in history)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


def test_sequences_grow_with_the_epoch_and_the_model_learns(tmp_path, tiny_data):
    growing = dict(initial_sequence_length=16, max_sequence_length=32, sequence_length_warmup_steps=4)
    where = [*sum(tiny_data.items(), ()), "--experiment_prefix", make_prefix(), "--output_dir", tmp_path, "--do_eval"]
    more = ["--dataloader_num_workers", 2, "--max_steps", 8, *(w for n, v in growing.items() for w in (f"--{n}", v))]
    result = run(MEASURED_TRAINER, *TINY, *LOOPBACK, *where, *more)
    widths = {}
    for line in result.stdout.splitlines():
        epoch, width = json.loads(line)
        widths.setdefault(epoch, []).append(width)
    # 16 + 4 an epoch, in multiples of 8, from the first batch of an epoch on; four batches make an epoch
    expected = [sequence_length_at(epoch, DataArguments(**growing)) for epoch in range(8)]
    assert expected == [16, 16, 24, 24, 32, 32, 32, 32]
    assert list(widths) == list(range(8)) and all(len(widths[epoch]) == 4 for epoch in widths)
    assert all(max(widths[epoch]) <= expected[epoch] for epoch in range(8)), widths
    longest = [max(widths[epoch] + widths[epoch + 1]) for epoch in (0, 2, 4)]
    assert longest[:2] == [16, 24] and longest[2] > 24, widths
    summary = json.loads((tmp_path / "summary.json").read_text())
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in history] == list(range(1, 9))
    assert history[-1]["loss"] < history[0]["loss"] and summary["final_loss"] < summary["start_loss"] - 0.3


@pytest.fixture(scope="module", params=[pytest.param("lamb", marks=pytest.mark.slow), "lamb_8bit"])
def facts(request, tmp_path_factory) -> dict:
    roles = run(ROLES, make_prefix(), tmp_path_factory.mktemp("roles"), request.param)
    return json.loads(roles.stdout.splitlines()[-1])


def test_all_roles_have_the_same_ordered_parameters(facts):
    """State is exchanged by position (note 9): names, and what really stands at each position."""
    assert facts["trainer"] == facts["monitor"]
    matrices = [name for name in facts["trainer"]["names"] if name in facts["trainer"]["matrices"]]
    assert facts["trainer"]["matrices"] == matrices
    assert len(matrices) >= 8


@pytest.mark.parametrize("where", ["memory", "file"])
def test_parameters_that_are_not_finite_are_restored(facts, where):
    """From the backup in memory, or from --state_path: parameters and moments bit for bit, at the swarm's epoch."""
    restored = facts["restored"][where]
    assert restored["finite"] == [False, True]
    assert restored["equal"]
    assert restored["in_memory"] is (where == "memory")
    assert restored["epoch"] == 3
    # the fourth of the 5,001 steps of warm-up
    assert restored["learning_rate"] == pytest.approx(0.00176 * 4 / 5001)


def test_the_end_is_the_earlier_one_and_an_epoch_has_whole_batches(facts):
    by_passes, by_epochs = facts["progress"]
    assert by_passes["seconds_left"] == pytest.approx(150, rel=0.05) and by_epochs["seconds_left"] == 3000
    assert by_passes["target_batch_size"] == 64  # not less --batch_size_lead


def test_out_of_memory_in_evaluation_is_no_evaluation(facts):
    assert facts["measured"] == [False, False, None]
