"""Load RuLeanALBERT's checkpoints as LeanALBERT models.

python -c "from models.ruleanalbert import *; print(load_ruleanalbert('config.json', 'state.pth'))"
"""

import json
import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.console import first_line
from models.lean_albert import LeanAlbertConfig, LeanAlbertForPreTraining

#: RuLeanALBERT's names -> ours, if they differ. Our layer number is group x num_inner_groups + number in the group; our
#: state has a single copy of each shared matrix
LAYER = re.compile(r"albert\.transformer\.layer_groups\.(\d+)\.layers\.(\d+)\.(\w+\.\w+)\.(.+)")
MODULES = {
    "attention.layer_norm": "attention_norm",
    "attention.sandwich_norm": "attention_sandwich_norm",
    "attention.dense_qkv": "qkv",
    "attention.dense_out": "attention_output",
    "ffn.layer_norm": "ffn_norm",
    "ffn.sandwich_norm": "ffn_sandwich_norm",
    "ffn.dense_i2h": "ffn_input",
    "ffn.dense_h2o": "ffn_output",
}
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
        model = LeanAlbertForPreTraining(config)
        # safetensors files keep only one name of tied weights
        model.load_state_dict(rename_state({"predictions.decoder.weight": words, **state}, config))
    except INVALID as e:
        problem = "torch cannot load it" if isinstance(e, pickle.UnpicklingError) else first_line(e)
        raise ValueError(f"{state_path} is not a state of RuLeanALBERT for {config_path}: {problem}") from e
    return model.eval()


def rename_state(state: dict[str, torch.Tensor], config: LeanAlbertConfig) -> dict[str, torch.Tensor]:
    """Return a state dict with our names, from one with RuLeanALBERT's names.

    :raises ValueError: copies of a shared tensor differ, so the config does not belong to this state
    """
    renamed = {}
    for name, tensor in state.items():
        new = name.replace("albert.transformer.post_layer_norm.", "albert.post_layer_norm.")
        new = new.replace("predictions.bias", "predictions.decoder.bias")
        if match := LAYER.fullmatch(name):
            group, inner, module, rest = match.groups()
            layer = int(group) * config.num_inner_groups + int(inner)
            new = f"albert.layers.{layer}.{MODULES.get(module, module)}.{rest}"
            if rest == "shared_matrix.weight":
                new = f"albert.matrices.{config.find_matrices(layer)}.{MODULES[module]}"
        if new in renamed and not torch.equal(renamed[new], tensor):
            raise ValueError(f"{name} should be shared, but differs: use the state's own config")
        renamed[new] = tensor
    renamed.pop("albert.embeddings.position_ids", None)  # a constant
    return renamed
