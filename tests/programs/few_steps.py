"""Make a few steps by the experiment in the current folder, without a swarm, and print the results as JSON.

A model with masked words only is saved as a trainer does it, and asked for a word."""

import itertools
import json
import os
import sys

sys.path.insert(0, os.getcwd())

import torch

from arguments import DataArguments, ModelArguments, OptimizerArguments, TrainerArguments, parse_arguments
from experiment.data import load_data, make_train_batches
from experiment.objectives import compute_losses
from experiment.optimizer import choose_optimizer, make_local_optimizer, make_param_groups
from training.checkpoint import save_model, write_readme
from training.model import make_trainable_model, move_batch

torch.set_num_threads(1)
groups = ModelArguments, OptimizerArguments, DataArguments
model_args, optimizer_args, data_args = parse_arguments(*groups, description=__doc__)
tokenizer, dataset, corpus = load_data(model_args, data_args, needs_validation=False)
model = make_trainable_model(model_args, TrainerArguments(), tokenizer)
optimizer = make_local_optimizer(optimizer_args, make_param_groups(model))
batches = make_train_batches(dataset["train"], tokenizer, data_args, batch_size=16, seed=1)
losses, texts = [], []
for batch in itertools.islice(batches, 20):
    loss = compute_losses(model, move_batch(batch, torch.device("cpu")))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    true = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    texts += tokenizer.batch_decode(true, skip_special_tokens=True)
facts = dict(losses=losses, texts=texts, optimizer=choose_optimizer(optimizer_args)[1], model=type(model).__name__)
facts |= dict(objective=model.objective.name, layers=model.config.num_hidden_layers)
facts |= dict(instances=corpus["instances"]["train"], source=corpus["source"])
if not model.objective.kind.has_pairs:
    folder = "outputs/trainer/model"
    assert save_model(model, tokenizer, folder, {}, extra_files={"README.md": write_readme(model, folder)})
    inputs = tokenizer("The captain was [MASK].", return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id]
    facts["score"], token = (value.item() for value in logits.softmax(-1).max(-1))
    facts["answer"], facts["frequency"] = tokenizer.decode([token]), sum(tokenizer.decode([token]) in t for t in texts)
print(json.dumps(facts))
