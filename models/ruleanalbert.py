"""Load RuLeanALBERT's checkpoints as LeanALBERT models.

python -c "from models.ruleanalbert import *; print(load_ruleanalbert('config.json', 'state.pth'))"
"""

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.lean_albert import LeanAlbertConfig, LeanAlbertForPreTraining


def load_ruleanalbert(config_path: str | Path, state_path: str | Path) -> LeanAlbertForPreTraining:
    """Load the model of a RuLeanALBERT checkpoint, in eval mode.

    :param config_path: the checkpoint's config.json
    :param state_path: its state.pth, {"model": state dict, ...} or the state dict itself, or a .safetensors file
    :raises OSError: a file cannot be read
    :raises ValueError: a file is invalid, or the state does not match the config; the text names the tensors
    """
    try:
        config = LeanAlbertConfig(**json.loads(Path(config_path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as e:
        raise ValueError(f"{config_path} is not the configuration of a LeanALBERT: {e}") from e
    try:
        if Path(state_path).suffix == ".safetensors":
            state = load_file(state_path)
        else:
            state = torch.load(state_path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError) as e:
        raise ValueError(f"{state_path} holds no state that torch can load: {str(e).splitlines()[0]}") from e
    state = state.get("model", state) if isinstance(state, dict) else {}
    words = "albert.embeddings.word_embeddings.weight"
    if words not in state:
        raise ValueError(f"{state_path} has no {words}: it is not a state of RuLeanALBERT")
    # the config may be older than the final tokenizer
    config.vocab_size = len(state[words])
    # safetensors files keep only one name of tied weights
    state = {"predictions.decoder.weight": state[words], **state}
    if "predictions.bias" in state:
        state = {"predictions.decoder.bias": state["predictions.bias"], **state}
    model = LeanAlbertForPreTraining(config)
    try:
        model.load_state_dict(state)
    except RuntimeError as e:
        raise ValueError(f"{state_path} does not belong to {config_path}: {e}") from e
    return model.eval()
