"""Merge trained adapters (--lora_r) into their base model, which then opens without peft.

python -m experiment.merge outputs/trainer/model merged
"""

import argparse
import json
import logging
from pathlib import Path

from common.console import UserError, edge, setup_logging
from common.files import unfinished_folder


def merge(folder: Path, output_dir: Path) -> None:
    """Write the model in `folder` to `output_dir`, with its adapters added to the weights, and the tokenizer."""
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} has no adapters: give a folder that a trainer with --lora_r has saved")
    if output_dir.exists():
        raise UserError(f"{output_dir} exists already: choose another folder")
    import torch
    import transformers

    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as e:
        raise UserError("adapters need the package peft: pip install peft") from e

    from experiment.model import OWN_MODELS
    from models.lean_albert import AUTO_CLASSES

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    own = {kind.__name__: kind for kind in (*AUTO_CLASSES.values(), *OWN_MODELS.values())}
    kind = own.get(name) or getattr(transformers, name)
    model = kind.from_pretrained(folder, trust_remote_code=False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    with torch.device("meta"):  # no second copy of the weights
        plain = kind._from_config(model.config, dtype=model.dtype)  # `model` would save its adapters alone
    with unfinished_folder(output_dir) as unfinished:
        plain.save_pretrained(unfinished, state_dict=model.state_dict())
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(unfinished)
        unfinished.rename(output_dir)
    logging.getLogger("model").info(f"{model.num_parameters():,} parameters in {output_dir}")


if __name__ == "__main__":
    with edge(interrupted="nothing was written"):
        setup_logging("merge")
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("folder", type=Path, help="Folder of a model with adapters, or a checkpoint.")
        parser.add_argument("output_dir", type=Path, help="Folder to create.")
        merge(**vars(parser.parse_args()))
