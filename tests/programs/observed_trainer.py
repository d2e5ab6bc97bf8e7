"""run_trainer.py that saves each rank's weights at the end, and the batches that it has read.

    python -m tests.programs.observed_trainer SECONDS FOLDER ...  (flags of run_trainer.py)

Each batch takes SECONDS, and little of the processor."""

import os
import sys
import time

import torch

import run_trainer
from training.ranks import NUMBER_VARIABLE


def main() -> None:
    seconds, folder = sys.argv[1:3]
    del sys.argv[1:3]
    make_model, move_batch, models, rows = run_trainer.make_trained_model, run_trainer.move_batch, [], []

    def keep_model(*args):
        models.append(make_model(*args))
        return models[-1]

    def keep_rows(batch, device):
        time.sleep(float(seconds))
        rows.extend(batch["input_ids"].sum(1).tolist())
        return move_batch(batch, device)

    run_trainer.make_trained_model, run_trainer.move_batch = keep_model, keep_rows
    with run_trainer.clean_end():
        try:
            run_trainer.main(*run_trainer.parse_arguments(*run_trainer.GROUPS))
        finally:  # rank 0 ends with its exit code
            path = os.path.join(folder, f"rank{os.environ.get(NUMBER_VARIABLE, 0)}.pt")
            torch.save({"weights": dict(models[-1].named_parameters()), "rows": rows}, path)


if __name__ == "__main__":
    main()
