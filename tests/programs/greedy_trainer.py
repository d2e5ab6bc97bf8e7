"""run_trainer.py with slow data and, in the 42nd pass of rank 0's training, without any memory left."""

import os
import time

import torch

import run_trainer
from text.collators import DataCollatorForWholeWordMask
from training.ranks import NUMBER_VARIABLE

make_model, collate, passes = run_trainer.make_trained_model, DataCollatorForWholeWordMask.collate, 0
collated = float("inf")  # when the last batch was ready


def collate_slowly(*args, **options):
    """Collate in 0.1 s, or in a part of the computing time if a busy machine makes that much longer."""
    global collated
    time.sleep(max(0.1, 0.4 * (time.monotonic() - collated)))
    batch = collate(*args, **options)
    collated = time.monotonic()
    return batch


def make_greedy_model(*args):
    model = make_model(*args)

    def allocate(module, inputs):
        global passes
        passes += module.training
        if passes == 42 and NUMBER_VARIABLE not in os.environ:
            torch.empty(2**60, dtype=torch.uint8)

    model.albert.encoder.register_forward_pre_hook(allocate)
    return model


DataCollatorForWholeWordMask.collate = collate_slowly
run_trainer.make_trained_model = make_greedy_model
with run_trainer.clean_end():
    run_trainer.main(*run_trainer.parse_arguments(*run_trainer.GROUPS))
