"""benchmarks/paced_trainer.py, whose parameters turn into NaN after its third epoch, once."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import paced_trainer
from callback import CollaborativeCallback
from common.console import clean_end

end_epoch = CollaborativeCallback.on_epoch_end


def spoil(self) -> None:
    if self.stats.epochs == 3:
        with torch.no_grad():
            for tensor in self.state.list_tensors():
                tensor.fill_(float("nan"))
    end_epoch(self)


CollaborativeCallback.on_epoch_end = spoil
with clean_end():
    paced_trainer.main()
