"""run_trainer.py whose batches each take some seconds and little of the processor, as where a GPU computes them.

    python benchmarks/paced_trainer.py 0.4 --experiment_prefix tiny ...  (flags of run_trainer.py)

Several trainers on the few cores of one machine slow each other down, and speed up when one of them dies: what a fault
costs could not be told from that. Here each batch waits first, so that the cores are never the bottleneck.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import run_trainer


def main() -> None:
    seconds = float(sys.argv.pop(1))
    make_train_batches = run_trainer.make_train_batches

    def make_paced_batches(*args, **options):
        for batch in make_train_batches(*args, **options):
            time.sleep(seconds)
            yield batch

    run_trainer.make_train_batches = make_paced_batches
    run_trainer.main()


if __name__ == "__main__":
    with run_trainer.clean_end():
        main()
