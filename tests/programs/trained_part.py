"""A model of which a part alone is trained, and written by save_pretrained, as adapters are. A trainer steps, an
auxiliary peer loads its state and archives it, and not that of an untrusted peer with a later epoch; a trainer
continues from its own checkpoint, and from the archive."""

import json
import sys
import time

import torch

import arguments
from arguments import AveragingArguments, ModelArguments, OptimizerArguments, SwarmArguments
from experiment.model import make_model
from experiment.optimizer import make_optimizer
from monitoring.archive import CheckpointHandler
from monitoring.history import pick
from monitoring.report import RunReport
from tests.programs.peers import clean_end, join, list_maddrs, print_facts, shut_down
from text.tokenizers import load_tokenizer
from training.checkpoint import apply_state, check_weights, collect_state, find_checkpoints, load_state, save_checkpoint
from training.figures import SwarmMetrics


def make_part(tokenizer):
    """The matrices of the layer are trained: neither the embeddings nor the norms nor the biases."""
    model = make_model(ModelArguments("configs/demo.json"), tokenizer)
    for name, param in model.named_parameters():
        param.requires_grad_("encoder" in name and param.dim() == 2)
    model._keys_to_ignore_on_save = {name for name, param in model.named_parameters() if not param.requires_grad}
    return model


def copy_trained(model):
    return [param.detach().clone() for param in model.parameters() if param.requires_grad]


with clean_end():
    torch.set_num_threads(1)
    prefix, folder, tokenizer_path, record = sys.argv[1:]
    tokenizer, options = load_tokenizer(tokenizer_path), OptimizerArguments(optim="adamw", warmup_steps=0)
    averaging = AveragingArguments(target_batch_size=4, load_state_compression="none", matchmaking_time=1.0)
    peers = []
    for role in ("trainer", "stranger", "archive"):
        swarm, model = join(prefix, list_maddrs(*(dht for dht, *_ in peers))), make_part(tokenizer)
        optimizer = make_optimizer(model, swarm, options, averaging, auxiliary=role == "archive")
        peers.append((swarm.dht, model, optimizer))
        if role == "stranger":
            optimizer.state_averager.set_epoch(3)
        elif role == "trainer":
            optimizer.accumulate_on(torch.device("cpu"))
            start = copy_trained(model)
            while optimizer.local_epoch < 2:
                for param in filter(lambda param: param.requires_grad, model.parameters()):
                    param.grad = torch.randn_like(param)
                optimizer.step(batch_size=4)
                time.sleep(0.1)  # of the tracker's processor time
    (dht, model, optimizer), _, (_, helper_model, helper) = peers
    trained, state = copy_trained(model), collect_state(model, optimizer, {})
    facts = {"moved": [not a.equal(b) for a, b in zip(start, trained, strict=True)]}
    assert save_checkpoint(model, tokenizer, folder, state, {}, 2)

    outputs = arguments.ReportArguments(output_dir=f"{folder}/archive")
    kept = arguments.ArchiveArguments(store_checkpoints=True, save_steps=2)
    groups = SwarmArguments(prefix), outputs, kept, ModelArguments("configs/demo.json"), options, averaging
    report = RunReport(outputs, groups[0])
    report.history.add(json.loads(record))
    report.workers.present = {dht.peer_id.to_bytes()}
    report.archive = CheckpointHandler(groups, helper_model, tokenizer, helper)
    while not report.archive.saving:
        report.step_archive(SwarmMetrics(**pick(report.history[-1], SwarmMetrics)))
        time.sleep(0.1)
    report.archive.saving.join()
    facts["taken"] = [a.equal(b) for a, b in zip(trained, copy_trained(helper_model), strict=True)]

    folders = {"own": find_checkpoints(folder), "archive": find_checkpoints(f"{folder}/archive")}
    for name, [path] in folders.items():
        with torch.no_grad():
            for param in filter(lambda param: param.requires_grad, model.parameters()):
                param.zero_()
        loaded = load_state(path)
        apply_state(loaded, model, optimizer)
        facts[name] = [a.equal(b) for a, b in zip(trained, copy_trained(model), strict=True)]
        weights = check_weights(loaded, model)
        facts[name] += [weights[key].equal(tensor) for key, tensor in state["model"].items()]
        facts[name] += [loaded["local_epoch"] == optimizer.local_epoch == 2]
    print_facts(**facts)
    for dht, _, optimizer in peers:
        shut_down(dht, optimizer)
