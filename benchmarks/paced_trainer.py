"""run_trainer.py with batches that wait for some seconds and take little of the processor, as if a GPU computed them.

    python benchmarks/paced_trainer.py 0.4 --experiment_prefix tiny ...  (flags of run_trainer.py)

Several trainers on a few cores slow each other down, and speed up if one of them dies, which would hide the cost of a
fault. With a wait in each batch, the cores are not the bottleneck.
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
