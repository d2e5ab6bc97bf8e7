"""Writes checkpoints without end, each with weights that are all its own number."""

import sys

import torch

from arguments import ModelArguments
from experiment.model import make_model
from text.tokenizers import load_tokenizer
from training.checkpoint import save_checkpoint

folder, tokenizer_path = sys.argv[1:]
tokenizer = load_tokenizer(tokenizer_path)
model = make_model(ModelArguments("configs/demo.json"), len(tokenizer))
number = 0
while True:
    number += 1
    weights = {name: torch.full_like(tensor, number) for name, tensor in model.state_dict().items()}
    state = {"model": weights, "optimizer": {}, "scheduler": {}, "local_epoch": number, "number": number}
    assert save_checkpoint(model, tokenizer, folder, state, {}, 2)
    print(number, flush=True)
