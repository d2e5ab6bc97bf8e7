#!/usr/bin/env python
"""Predict LiDiRus, the diagnostic data of RussianSuperGLUE, with a model fine-tuned on TERRa.

LiDiRus has no training data, and its pairs have TERRa's labels:

    python finetune_mlm.py -t terra --checkpoint outputs/trainer/model --output_dir outputs/finetune/TERRa
    python predict_on_lidirus.py -m outputs/finetune/TERRa -a lean_albert --data-dir .

It writes LiDiRus.jsonl, in the leaderboard's format, next to the results. If the data have labels, it prints Matthews
correlation and accuracy.
"""

import json
import logging
from dataclasses import MISSING, dataclass
from pathlib import Path

from arguments import MIN_SEQUENCE_LENGTH, parse_arguments
from common.console import UserError, edge, first_line, setup_logging
from common.flags import FlagGroup, flag


@dataclass
class PredictArguments(FlagGroup):
    """Predictions of a tuned model. Names are RuLeanALBERT's."""

    model: str = flag(MISSING, "The --output_dir of finetune_mlm.py, run on TERRa.", aliases=["-m"])
    arch: str = flag(
        "lean_albert", "Tokenizer: an id or folder, or lean_albert for the one saved with the model.", aliases=["-a"]
    )
    data_dir: str = flag(
        ".", "Folder that contains LiDiRus/LiDiRus.jsonl, which is downloaded from the Hub if missing.", aliases=["-d"]
    )
    batch_size: int = flag(32, "Samples per forward pass.", ge=1)
    max_length: int = flag(512, "Maximum tokens of a pair; longer ones are truncated.", ge=MIN_SEQUENCE_LENGTH)


GROUPS = (PredictArguments,)

if __name__ == "__main__":  # before the imports below, which take seconds
    with edge(interrupted="nothing was written"):
        groups = parse_arguments(*GROUPS, description=__doc__)

import torch
from transformers import AutoModelForSequenceClassification

from common.files import write_file
from experiment.tasks import TASKS, format_predictions, load_examples
from finetune_mlm import choose_length, encode, predict
from models.pretrained import Pretrained, check_tokenizer, load_folder, load_tokenizer, load_weights

logger = logging.getLogger("finetune")


def load_tuned(args: PredictArguments) -> tuple[Pretrained, torch.nn.Module]:
    """Return the run's best model and its tokenizer, or raise a UserError."""
    folder = Path(args.model)
    cure = "give the --output_dir of python finetune_mlm.py -t terra"
    try:
        task = json.loads((folder / "results.json").read_text(encoding="utf-8"))["task"]
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise UserError(f"--model {folder} is not a run of finetune_mlm.py ({e!r}): {cure}") from e
    if task != "TERRa":
        raise UserError(f"--model {folder} was tuned for {task}: {cure}")
    pretrained = load_folder(folder / "model", str(folder / "model"), cure)
    if args.arch != "lean_albert":
        own = pretrained.tokenizer
        try:
            pretrained.tokenizer = load_tokenizer(args.arch)
            if pretrained.tokenizer.get_vocab() != own.get_vocab():
                raise ValueError(f"its {len(pretrained.tokenizer):,} tokens differ from the run's {len(own):,}")
        except (OSError, ValueError, KeyError) as e:
            raise UserError(
                f"--arch {args.arch} is not the tokenizer of this run ({first_line(e)}): give lean_albert"
            ) from e
    check_tokenizer(pretrained)
    return pretrained, load_weights(AutoModelForSequenceClassification, pretrained, is_tuned=True)


def main(args: PredictArguments) -> None:
    """Write the predictions, and print the scores if the data have labels."""
    setup_logging("finetune")
    task = TASKS["lidirus"]
    pretrained, model = load_tuned(args)
    examples = load_examples(task, args.data_dir)["test"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    max_length = choose_length(model, args.max_length)
    cut = encode(examples, pretrained, max_length)
    pairs = f"{len(examples):,} pairs"
    logger.info(f"{task.name}: {pairs}; {cut:,} are longer than {max_length} tokens and were cut; {device}")
    predictions = predict(model.to(device), examples, task, pretrained.tokenizer, args.batch_size, device)
    name, text = format_predictions(task, examples, predictions)
    if not write_file(Path(args.model) / name, text):
        raise UserError(f"{name} could not be written, see above: free some space, and run this again")
    if all(example.right is not None for example in examples):
        metrics = task.measure(examples, predictions)
        print(", ".join(f"{metric} {value:.3f}" for metric, value in metrics.items()))
    print(f"predictions: {Path(args.model) / name}")


if __name__ == "__main__":
    with edge(interrupted="nothing was written"):
        main(*groups)
