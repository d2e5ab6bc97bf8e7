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
    move_batch = run_trainer.move_batch

    def move_batch_slowly(batch, device):
        time.sleep(seconds)
        return move_batch(batch, device)

    run_trainer.move_batch = move_batch_slowly
    run_trainer.main(*run_trainer.parse_arguments(*run_trainer.GROUPS))


if __name__ == "__main__":
    with run_trainer.clean_end():
        main()
