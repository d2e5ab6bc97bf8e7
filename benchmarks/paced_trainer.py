"""run_trainer.py with batches that wait for some seconds and take little of the processor, as if a GPU computed them.

    python benchmarks/paced_trainer.py 0.4 --experiment_prefix tiny ...  (flags of run_trainer.py)

With 0.4,0.4,90 the third batch and all later ones take 90 s.
Several trainers on a few cores slow each other down, and speed up if one of them dies, which would hide the cost of a
fault. With a wait in each batch, the cores are not the bottleneck. Epochs are short, so the times in which faults count
are flags. CLOCK_FILE names the file with the error of this machine's clock (rehearsal.py).
"""

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import run_trainer
from arguments import AveragingArguments
from common.flags import flag


@dataclass
class PacedAveragingArguments(AveragingArguments):
    """Batches and averaging of the swarm, with more fields of AveragingConfig."""

    averaging_timeout: float | None = flag(None, "Seconds after which an averaging round fails.")
    next_chunk_timeout: float | None = flag(None, "Seconds without data until a peer is excluded from a round.")
    metadata_expiration: float = flag(120.0, "Seconds for which this peer's records stay in the DHT.")


GROUPS = tuple(PacedAveragingArguments if group is AveragingArguments else group for group in run_trainer.GROUPS)


def main() -> None:
    if clock := os.environ.get("CLOCK_FILE"):
        ctypes.CDLL(None).use_clock(clock.encode())
    paces = [float(seconds) for seconds in sys.argv.pop(1).split(",")]
    move_batch = run_trainer.move_batch

    def move_batch_slowly(batch, device):
        time.sleep(paces.pop(0) if len(paces) > 1 else paces[0])
        return move_batch(batch, device)

    run_trainer.move_batch = move_batch_slowly
    run_trainer.main(*run_trainer.parse_arguments(*GROUPS))


if __name__ == "__main__":
    with run_trainer.clean_end():
        main()
