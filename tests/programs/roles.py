"""A monitor's and a trainer's optimizer, each over a DHT of its own; then the trainer breaks."""

import contextlib
import json
import math
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import arguments
from arguments import AveragingArguments, ModelArguments, OptimizerArguments, SwarmArguments
from callback import CollaborativeCallback
from common.files import read_json_lines
from experiment.model import make_model
from experiment.optimizer import describe_averaging, make_optimizer, make_param_groups
from swarm.contract import RunContract
from tests.programs.peers import clean_end, join, print_facts
from training.checkpoint import apply_state, find_checkpoints
from training.evaluation import Evaluator
from training.figures import fetch_records
from training.progress import ProgressDisplay
from training.state import TrainerState
from utils import Evaluation

with clean_end():
    options = OptimizerArguments(optim=sys.argv[3], min_8bit_size=4096)
    facts, optimizers = {}, []  # kept: an optimizer that is collected shuts down
    for role, auxiliary in (("monitor", True), ("trainer", False)):
        swarm, model = join(sys.argv[1]), make_model(ModelArguments("configs/demo.json"), 300)
        averaging = AveragingArguments(target_batch_size=64, batch_size_lead=8)
        optimizer = make_optimizer(model, swarm, options, averaging, auxiliary=auxiliary)
        by_value = {param.data.double().pow(2).sum().item(): name for name, param in model.named_parameters()}
        # names by the value at each position of the state that peers exchange, if the values differ
        _, tensors, _ = optimizer.state_averager.get_current_state()
        count = sum(len(group["params"]) for group in optimizer.opt.param_groups)
        shapes = [list(tensor.shape) for tensor in tensors]
        names = [name for group in make_param_groups(model) for name in group["names"]]
        at = [by_value[tensor.double().pow(2).sum().item()] for tensor in tensors[:count] if tensor.dim() == 2]
        facts[role] = {"names": names, "shapes": shapes, "matrices": at}
        optimizers.append(optimizer)

    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")

    class MemoryHog(Evaluator):
        def compute(self):
            return torch.empty(2**60, dtype=torch.uint8)

    swarm.contract = RunContract(joined=0.0, contract=describe_averaging(optimizer.averaging))

    def make_callback():
        sizes = dict(per_device_train_batch_size="25", gradient_accumulation_steps=1, max_steps=100, save_steps=500)
        args = arguments.TrainerArguments(output_dir=sys.argv[2], do_eval=True, eval_steps=1, **sizes)
        groups = SwarmArguments(sys.argv[1]), ModelArguments(), options, averaging, arguments.DataArguments(), args
        loaded = dict(tokenizer=tokenizer, dataset={"train": range(100)}, corpus={"unigram_entropy": 1.0})
        state = TrainerState(swarm, optimizer, model, **loaded, scaler=None, groups=groups)
        return CollaborativeCallback(state, MemoryHog(state, contextlib.nullcontext()), ProgressDisplay(args), None)

    callback = make_callback()
    saved = callback.state.collect()
    with torch.no_grad():
        for tensor in callback.state.list_tensors():
            tensor.fill_(0 if tensor.dtype == torch.uint8 else float("nan"))
    try:
        callback.on_epoch_end()
    except SystemExit as e:  # no peer is there to send a state
        facts["exit_code"] = e.code
    apply_state(saved, model, optimizer)
    facts["is_finite"] = callback.state.is_finite()
    # the second line is of an earlier version, which did not name the run
    lines = {"epoch": 300, "experiment_prefix": "another"}, {"epoch": 7}
    (history := Path(sys.argv[2]) / "history.jsonl").write_text("\n".join(map(json.dumps, lines)))
    callback = make_callback()
    facts["last_written"] = callback.metrics.last_written
    facts["lines"] = [callback.format_progress()]
    callback.stats.recent_epochs.append((1, 30.0))
    facts["progress"] = callback.metrics.measure_progress()
    for loss in (1.0, 2.0, math.nan):
        callback.on_step_end(loss, waited=0.0, tokens=0)
    facts["lines"].append(callback.format_progress())
    facts["has_contributed"] = callback.has_contributed
    facts["measured"] = [callback.evaluator.measure(), callback.evaluator.measure(), callback.evaluator.last]
    callback.metrics.measure_epoch()
    callback.metrics.write(None)
    views = callback.metrics.read_history(), read_json_lines(history)
    facts["epochs"] = [[line["epoch"] for line in lines] for lines in views]
    facts["expirations"] = []
    for epoch in (0, 0, 99):  # at once, when it is time to renew, and with an evaluation of an epoch that was given up
        callback.evaluator.last = Evaluation(epoch=epoch, loss=1.0, accuracy=0.5, samples=9)
        callback.metrics.next_time = 0.0
        callback.on_step_end(1.0, waited=0.0, tokens=0)
        assert callback.metrics.next_time > time.monotonic() and swarm.stores["metrics"].result(30)
        [(metrics, expiration)] = fetch_records(swarm.dht, sys.argv[1]).values()
        facts["expirations"].append([expiration, metrics.evaluation is not None])
    (newer := Path(sys.argv[2]) / "checkpoint-517").mkdir()
    optimizer.stats.total_samples = 640
    callback.state.save()
    facts["set_aside"] = not newer.exists()
    facts["samples"] = []
    for peer_id in (callback.state.peer_id, "another"):
        callback.state.peer_id = peer_id
        callback.state.load(*find_checkpoints(sys.argv[2]))
        facts["samples"].append([optimizer.stats.total_samples, callback.stats.computed_samples])
    print_facts(**facts)
    swarm.leave(optimizer)
