"""run_trainer.py with a change, which the first word names.

    python -m tests.programs.changed_trainer CHANGE ...  (flags of run_trainer.py)

observed and half take SECONDS and FOLDER before the flags: each batch takes these seconds, at little work.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time

import torch

import run_trainer
import swarm.averager
from text.collators import DataCollatorForWholeWordMask
from training import ranks

IS_MAIN = ranks.NUMBER_VARIABLE not in os.environ
make_model, move_batch = run_trainer.make_trainable_model, run_trainer.move_batch
make_optimizer = run_trainer.make_optimizer
models, optimizers, rows, ready, passes = [], [], [], [], itertools.count(1)


def keep_model(*args):
    models.append(make_model(*args))
    return models[-1]


def keep_optimizer(*args, **options):
    optimizers.append(make_optimizer(*args, **options))
    return optimizers[-1]


def make_crowded_optimizer(*args, **options):
    """The device has no room for the pending gradients."""
    optimizer = keep_optimizer(*args, **options)
    optimizer.accumulate_on = lambda device: torch.empty(2**60, dtype=torch.uint8)
    return optimizer


def make_faulty_model(*args):
    """The output of every fifth forward pass is NaN, a bad machine's work."""
    model = keep_model(*args)
    model.predictions.register_forward_hook(lambda *it: it[2] * float("nan") if next(passes) % 5 == 0 else it[2])
    return model


def make_greedy_model(*args):
    """Run out of memory in the 42nd training pass of rank 0."""

    def allocate(module, inputs):
        if module.training and next(passes) == 42 and IS_MAIN:
            torch.empty(2**60, dtype=torch.uint8)

    model = keep_model(*args)
    model.albert.encoder.register_forward_pre_hook(allocate)
    return model


def make_slowly_evaluated_model(*args):
    """Evaluations after the first step take half a second for each batch."""
    model = keep_model(*args)

    def wait(module, inputs):
        if module.training:
            ready.append(time.monotonic())
        elif ready:
            print("evaluating", flush=True)
            time.sleep(0.5)

    model.albert.encoder.register_forward_pre_hook(wait)
    return model


def collate_slowly(*args, collate=DataCollatorForWholeWordMask.collate, **options):
    """Collate in 0.1 s, or in a part of the computing time if a busy machine makes that much longer."""
    time.sleep(max(0.1, 0.4 * (time.monotonic() - ready[-1])) if ready else 0.1)
    batch = collate(*args, **options)
    ready.append(time.monotonic())
    return batch


def print_batch(batch, device):
    """Print the epoch, and the width and the tokens of a batch to train on."""
    values = [optimizers[-1].local_epoch, batch["input_ids"].shape[1], int(batch["attention_mask"].sum())]
    print(json.dumps(values), flush=True)
    return move_batch(batch, device)


class SilentRunner(swarm.averager.FailFastAllReduceRunner):
    """From its second round on, it sends nothing."""

    rounds = 0  # of this process, as each averager has one of its own

    async def run(self):
        SilentRunner.rounds += 1
        if SilentRunner.rounds > 1:
            print("silent from now on", flush=True)
            await asyncio.sleep(600)
        async for update in super().run():
            yield update


@contextlib.contextmanager
def observe():
    """Save each rank's weights at the end, and the batches that it has read."""
    seconds, folder = sys.argv[1:3]
    del sys.argv[1:3]

    def keep_rows(batch, device):
        time.sleep(float(seconds))
        rows.extend(batch["input_ids"].sum(1).tolist())
        return move_batch(batch, device)

    run_trainer.move_batch = keep_rows
    try:
        yield
    finally:  # rank 0 ends with its exit code
        path = os.path.join(folder, f"rank{os.environ.get(ranks.NUMBER_VARIABLE, 0)}.pt")
        torch.save({"weights": dict(models[-1].named_parameters()), "rows": rows}, path)


if __name__ == "__main__":
    change, context = sys.argv.pop(1), contextlib.nullcontext()
    run_trainer.make_trainable_model, run_trainer.make_optimizer = keep_model, keep_optimizer
    if change == "faulty":
        run_trainer.make_trainable_model = make_faulty_model
    elif change == "greedy":
        run_trainer.make_trainable_model, DataCollatorForWholeWordMask.collate = make_greedy_model, collate_slowly
    elif change == "slowly_evaluated":
        run_trainer.make_trainable_model = make_slowly_evaluated_model
    elif change == "silent":
        swarm.averager.FailFastAllReduceRunner = SilentRunner
    elif change == "measured":
        run_trainer.move_batch = print_batch
    elif change == "crowded":
        run_trainer.make_optimizer = make_crowded_optimizer
    else:
        context = observe()
    if change == "half":  # float16 on a CPU is slow, but computes as a GPU does, from a scale that overflows
        place_model = run_trainer.place_model
        ranks.choose_devices = lambda args: [torch.device("cpu")]
        run_trainer.place_model = lambda *args: (place_model(*args)[0], torch.amp.GradScaler("cpu", init_scale=2.0**21))
    with run_trainer.clean_end(), context:
        run_trainer.main(*run_trainer.parse_arguments(*run_trainer.GROUPS))
