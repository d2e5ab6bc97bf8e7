"""Write trained models to disk so that a folder is either whole or not there. (Training states: see issue 3.)

A checkpoint is a folder that `from_pretrained` reads: the weights as safetensors, the configuration, the tokenizer, and
`training_state.json` with the epoch and what else the writer knows. To look at one:

    python -c "from transformers import AlbertForPreTraining; \
        print(AlbertForPreTraining.from_pretrained('outputs/monitor/checkpoint-10').num_parameters())"
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

logger = logging.getLogger("checkpoint")


def save_model(model, tokenizer, folder: str | Path, extra: dict) -> bool:
    """Write model, tokenizer and `extra` (JSON) to `folder`, which is replaced as a whole if it exists.

    Everything goes to a temporary folder beside it first, and reaches the disk before that is renamed: a reader, or a
    restart after a power cut, finds the old state or the new one. A disk that is full or gone is a warning and False:
    training is worth more than one checkpoint.
    """
    folder = Path(folder).absolute()
    # one name, not a random one: what a killed process left behind is overwritten
    unfinished, replaced = folder.with_name(f".{folder.name}.unfinished"), folder.with_name(f".{folder.name}.replaced")
    try:
        for leftover in (unfinished, replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        unfinished.mkdir(parents=True)
        disable_progress_bar()  # "Writing model shards" would break into the log at each checkpoint
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "training_state.json").write_text(json.dumps(extra, indent=2) + "\n", encoding="utf-8")
        for path in (*unfinished.rglob("*"), unfinished):
            flush_to_disk(path)
        if folder.exists():  # a folder that is not empty cannot be replaced by a rename
            folder.rename(replaced)
        unfinished.rename(folder)
        flush_to_disk(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as e:  # safetensors wraps the system's error
        logger.warning(f"Could not save the model to {folder}: {e}")
        shutil.rmtree(unfinished, ignore_errors=True)
        return False
    return True


def flush_to_disk(path: Path) -> None:
    """fsync of a file, or of a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders `checkpoint-{epoch}` in `output_dir`, by epoch; unfinished ones have other names."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: int(path.name.split("-")[1]))


def save_checkpoint(model, tokenizer, output_dir: str | Path, epoch: int, extra: dict, save_total_limit: int) -> bool:
    """save_model to `checkpoint-{epoch}`, then remove all but the newest `save_total_limit` checkpoints."""
    if not save_model(model, tokenizer, Path(output_dir) / f"checkpoint-{epoch}", {"epoch": epoch, **extra}):
        return False
    for old in find_checkpoints(output_dir)[:-save_total_limit]:
        shutil.rmtree(old, ignore_errors=True)
    return True
