"""observed_trainer.py in float16 on a CPU, which is slow but computes as a GPU does, from a scale that overflows."""

import torch

import run_trainer
from tests.programs.observed_trainer import main
from training import ranks

if __name__ == "__main__":
    place_model = run_trainer.place_model
    ranks.choose_devices = lambda args: [torch.device("cpu")]
    run_trainer.place_model = lambda *args: (place_model(*args)[0], torch.amp.GradScaler("cpu", init_scale=2.0**21))
    main()
