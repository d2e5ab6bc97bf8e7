"""Open a trained model for fine-tuning: a folder or an id on the Hub, or a checkpoint of RuLeanALBERT.

python -c "from models.pretrained import *; print(load_ruleanalbert('config.json', 'state.pth'))"
"""

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers.processors import Sequence, TemplateProcessing
from transformers import AutoConfig, AutoTokenizer

from common.console import UserError, first_line
from models.build import warn_of_weights
from models.lean_albert import LeanAlbertConfig, LeanAlbertForPreTraining


@dataclass
class Pretrained:
    """The source of the weights: a folder or an id for from_pretrained, or the encoder of a loaded RuLeanALBERT."""

    name: str
    config: transformers.PretrainedConfig
    tokenizer: transformers.PreTrainedTokenizerBase
    encoder: torch.nn.Module | None = None
    #: whether unused weights were reported, because each seed loads the weights again
    is_reported: bool = False


def load_folder(name: str | Path, what: str, cure: str) -> Pretrained:
    """Load the config and tokenizer of a folder or id, or raise a UserError."""
    transformers.utils.logging.set_verbosity_error()  # it warns of the new head
    transformers.utils.logging.disable_progress_bar()
    try:
        return Pretrained(str(name), AutoConfig.from_pretrained(name, trust_remote_code=False), load_tokenizer(name))
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{what} cannot be loaded ({first_line(e)}): {cure}") from e


def load_tokenizer(name: str | Path) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or id, which separates the texts of a pair; the errors are from_pretrained's."""
    names = ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json")
    # AutoTokenizer would replace the normalizer of RuLeanALBERT by that of AlbertTokenizer
    is_ruleanalbert = [(Path(name) / file).is_file() for file in names] == [True, True, False]
    kind = transformers.PreTrainedTokenizerFast if is_ruleanalbert else AutoTokenizer
    tokenizer = kind.from_pretrained(name, trust_remote_code=False)
    if tokenizer.is_fast and tokenizer.eos_token and not tokenizer.num_special_tokens_to_add(pair=True):
        # GPT-2's: the texts of a pair would be one text
        end = (tokenizer.eos_token, tokenizer.eos_token_id)
        pairs = TemplateProcessing(single="$A", pair=f"$A {end[0]} $B:1", special_tokens=[end])
        backend = tokenizer.backend_tokenizer
        backend.post_processor = Sequence([it for it in (backend.post_processor, pairs) if it])
    return tokenizer


def load_old_checkpoint(path: Path) -> Pretrained:
    """Load a state.pth of RuLeanALBERT, with config.json and tokenizer/ in the same folder, as in its guide."""
    for part in ("config.json", "tokenizer/tokenizer.json"):
        if not (path.parent / part).is_file():
            raise UserError(f"--checkpoint {path} needs {path.parent / part}: get it from the source of the state")
    try:
        model = load_ruleanalbert(path.parent / "config.json", path)
        return Pretrained(str(path), model.config, load_tokenizer(path.parent / "tokenizer"), model.albert)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"--checkpoint {path} cannot be loaded: {first_line(e)}") from e


def check_tokenizer(pretrained: Pretrained) -> None:
    """Raise a UserError if the tokenizer does not fit the model."""
    tokens = len(pretrained.tokenizer)
    rows = pretrained.config.vocab_size
    # other models may have rounded the size of the vocabulary up
    if tokens > rows or (tokens < rows and pretrained.config.model_type == "lean_albert"):
        raise UserError(
            f"{pretrained.name} has {rows:,} tokens, its tokenizer {tokens:,}: they do not belong together, use the "
            "tokenizer that it was trained with"
        )
    if pretrained.tokenizer.pad_token_id is None or not pretrained.tokenizer.is_fast:
        raise UserError(f"the tokenizer of {pretrained.name} cannot pad or has no fast version: choose another model")


def load_weights(auto_class: type, pretrained: Pretrained, is_tuned: bool = False) -> torch.nn.Module:
    """Load a model, and raise a UserError if weights are missing, which from_pretrained silently initializes.

    :param is_tuned: whether the head must be among the weights
    """
    try:
        options = dict(config=pretrained.config, dtype=torch.float32, output_loading_info=True)
        model, info = auto_class.from_pretrained(pretrained.name, trust_remote_code=False, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise UserError(
            f"the weights of {pretrained.name} cannot be loaded ({first_line(e)}): give another model"
        ) from e
    # heads are ignored: the task's head is new, and the pretraining head is unused
    encoder = {*model.base_model.parameters()}
    absent = [name for name, param in model.named_parameters() if name in info["missing_keys"]]
    lacking = [name for name in absent if is_tuned or model.get_parameter(name) in encoder]
    # some models are trained without a pooler
    if missing := [name for name in lacking if is_tuned or "pooler" not in name]:
        raise UserError(
            f"{pretrained.name} has no weights for {len(missing)} of its tensors ({missing[0]}, ...): give a folder "
            "whose weights and config.json belong together"
        )
    if not pretrained.is_reported:
        unused = [name for name in info["unexpected_keys"] if name.startswith(f"{model.base_model_prefix}.")]
        warn_of_weights(pretrained.name, model, lacking, unused)
        pretrained.is_reported = True
    return model


# ---------------------------------------------------------------- checkpoints of RuLeanALBERT

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
