"""Load RuLeanALBERT's checkpoints as LeanALBERT models.

python -c "from models.ruleanalbert import *; print(load_ruleanalbert('config.json', 'state.pth'))"
"""

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.console import first_line
from models.lean_albert import LeanAlbertConfig, LeanAlbertForPreTraining

#: errors of invalid JSON, of a file that torch cannot load, and of a state that lacks names or has other shapes
INVALID = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError)
INVALID += (pickle.UnpicklingError, SafetensorError)


def load_ruleanalbert(config_path: str | Path, state_path: str | Path) -> LeanAlbertForPreTraining:
    """Load the model of a RuLeanALBERT checkpoint, in eval mode.

    :param config_path: the checkpoint's config.json
    :param state_path: its state.pth, {"model": state dict, ...} or the state dict itself, or a .safetensors file
    :raises OSError: a file cannot be read
    :raises ValueError: a file is invalid, or the state does not match the config; the text names a tensor
    """
    try:
        config = LeanAlbertConfig(**json.loads(Path(config_path).read_text(encoding="utf-8")))
        if Path(state_path).suffix == ".safetensors":
            state = load_file(state_path)
        else:
            state = torch.load(state_path, map_location="cpu", weights_only=True)
        state = state.get("model", state)
        words = state["albert.embeddings.word_embeddings.weight"]
        # the config may be older than the final tokenizer
        config.vocab_size = len(words)
        # safetensors files keep only one name of tied weights
        state = {"predictions.decoder.weight": words, **state}
        if "predictions.bias" in state:
            state = {"predictions.decoder.bias": state["predictions.bias"], **state}
        model = LeanAlbertForPreTraining(config)
        model.load_state_dict(state)
    except INVALID as e:
        problem = "torch cannot load it" if isinstance(e, pickle.UnpicklingError) else first_line(e)
        raise ValueError(f"{state_path} is not a state of RuLeanALBERT for {config_path}: {problem}") from e
    return model.eval()
