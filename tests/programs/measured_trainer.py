"""run_trainer.py that prints the width and the tokens of each batch that it trains on, with the epoch."""

import json

import run_trainer

make_optimizer, move_batch = run_trainer.make_optimizer, run_trainer.move_batch


def keep_optimizer(*args, **options):
    global optimizer
    optimizer = make_optimizer(*args, **options)
    return optimizer


def measure_batch(batch, device):
    values = [optimizer.local_epoch, batch["input_ids"].shape[1], int(batch["attention_mask"].sum())]
    print(json.dumps(values), flush=True)
    return move_batch(batch, device)


run_trainer.make_optimizer, run_trainer.move_batch = keep_optimizer, measure_batch
with run_trainer.clean_end():
    run_trainer.main(*run_trainer.parse_arguments(*run_trainer.GROUPS))
