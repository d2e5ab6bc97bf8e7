"""Build a transformers model from a configuration or a pretrained folder, and describe its architecture."""

import contextlib
import hashlib
import inspect
import json
import logging
import math
import os
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from arguments import ModelArguments
from common.console import UserError, first_line, suggest
from common.hub import calm_transformers, hub

logger = logging.getLogger("model")


def load_config(args: ModelArguments) -> PreTrainedConfig:
    """Load the configuration that --model_name_or_path or --config_path names; raise a UserError if that fails."""
    name = args.model_name_or_path or args.config_path
    what = f"--{'model_name_or_path' if args.model_name_or_path else 'config_path'} {name}"
    is_file = name.endswith(".json")
    if is_file and args.model_name_or_path:
        raise UserError(f"{what} has no weights: give a folder or a name on the Hub, or --config_path {name}")
    if is_file and not os.path.isfile(name):
        raise UserError(f"{what} does not exist: choose one of configs/*.json")
    try:
        with contextlib.nullcontext() if os.path.exists(name) else hub(what, "a folder that exists"):
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        given = json.loads(Path(name).read_text(encoding="utf-8")) if is_file else {}
        check_config(config, what, () if "architectures" in given else given)
        return config
    except UserError:
        raise
    except Exception as e:  # many types, because each configuration class validates its own values
        raise UserError(f"{what} is not the configuration of a model ({first_line(e)})") from e


def check_config(config: PreTrainedConfig, what: str, given: Collection[str]) -> None:
    """Raise a UserError for an unknown field, which would have no effect, or for heads that do not fit.

    :param given: the fields of a hand-written file; files that transformers saved may have those of other versions
    """
    known = vars(type(config)()).keys() | config.attribute_map.keys() | {"model_type"}
    unknown = [name for name in given if name not in known and hasattr(config, name)]
    # some classes read more fields than they declare; Python parses whole modules to find their source
    source = "".join(inspect.getsource(part) for part in type(config).__mro__[:-1]) if unknown else ""
    for name in unknown:
        if f'"{name}"' not in source:
            problem = f"a model of type {config.model_type} has no field {name}"
            raise UserError(f"{what}: {problem}{suggest(name, known) or ': remove it'}")
    names = [config.attribute_map.get(name, name) for name in ("hidden_size", "num_attention_heads")]
    size, heads = (getattr(config, name, None) for name in names)
    has_own_size = getattr(config, "head_dim", None) or not isinstance(heads, int) or not isinstance(size, int)
    if not has_own_size and (heads < 1 or size % heads):
        raise UserError(f"{what}: {names[1]} {heads} must divide {names[0]} {size}")


def is_text_alone(config: PreTrainedConfig) -> bool:
    """Return whether the whole model reads a single text: no images, no sounds, no encoder with a decoder."""
    try:
        return not config.is_encoder_decoder and config.get_text_config() is config
    except ValueError:  # several parts of it read text
        return False


def find_pairs_class(config: PreTrainedConfig) -> type | None:
    """Return transformers' Auto class for masked words and sentence order, or None if the model type has none."""
    return transformers.AutoModelForPreTraining if config.model_type in ("albert", "lean_albert") else None


def find_masked_class(config: PreTrainedConfig) -> type | None:
    """Return transformers' Auto class for masked words, or None if the model type has none."""
    return transformers.AutoModelForMaskedLM if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING else None


def find_causal_class(config: PreTrainedConfig) -> type | None:
    """Return transformers' Auto class for the next word, or None if the model type has none."""
    # if a type has both classes, is_decoder selects causal attention
    is_causal = not find_masked_class(config) or hasattr(config, "is_decoder")
    has_class = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if has_class and is_causal else None


def copy_special_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | int, is_causal: bool) -> None:
    """Copy the tokenizer's special token ids (RoBERTa's positions need them); if it is a number, remove invalid ids."""
    if is_causal and hasattr(config, "is_decoder"):
        config.is_decoder = True
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    for name in [name for name in names if hasattr(config, name)]:
        value = getattr(config if isinstance(tokenizer, int) else tokenizer, name)
        if isinstance(tokenizer, int) and isinstance(value, int) and value >= tokenizer:
            value = None
        if name == "pad_token_id" and is_causal:
            value = None  # its embedding would get no gradient, as an end token needs, and may not exist yet
        try:
            setattr(config, name, value)
        except StrictDataclassError:  # the field must be a number
            setattr(config, name, getattr(tokenizer, "eos_token_id", None) or 0)


def build_model(model_class: type, config: PreTrainedConfig, args: ModelArguments, vocab_size: int) -> PreTrainedModel:
    """Build the model at epoch 0, with the same weights on every peer: pretrained, or random ones that the seed sets.

    The model's attributes `initial_weights`, a description, and `seed` are for the contract.

    :param model_class: one of transformers' Auto classes or model classes
    :raises UserError: the model cannot be built
    """
    name = args.model_name_or_path or args.config_path
    # autocast handles half precision, but weights below adapters never change, so they stay as they are in their files
    is_half = args.lora_r and config.dtype == torch.bfloat16
    options = {"dtype": torch.bfloat16 if is_half else torch.float32}
    initial_weights = "random"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)
            if args.model_name_or_path:
                with calm_transformers():
                    options |= dict(config=config, output_loading_info=True, ignore_mismatched_sizes=True)
                    model, report = model_class.from_pretrained(name, trust_remote_code=False, **options)
                if mismatched := [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]:
                    raise ValueError(f"its weights have different shapes than its config.json says: {mismatched[0]}")
                initial_weights = f"pretrained {digest_weights(model, report['missing_keys'])}"
                warn_of_weights(name, model, report["missing_keys"], report["unexpected_keys"])
                # a pretrained vocabulary that was rounded up keeps its rows
                if vocab_size > config.vocab_size:
                    model.resize_token_embeddings(vocab_size, mean_resizing=False)
            else:
                config.vocab_size = vocab_size
                if issubclass(model_class, PreTrainedModel):
                    model = model_class._from_config(config, **options)
                else:
                    model = model_class.from_config(config, trust_remote_code=False, **options)
    except Exception as e:  # many types: from files, values and missing packages
        raise UserError(f"the model {name} cannot be made ({first_line(e)})") from e
    model.train()
    model.initial_weights = initial_weights
    model.seed = args.seed
    if args.lora_r:
        add_lora(model, args)
    return model


def add_lora(model: PreTrainedModel, args: ModelArguments) -> None:
    """Freeze the model and add low-rank adapters (LoRA, arxiv.org/abs/2106.09685) by peft, an optional package.

    They have the same weights on all peers, and only they are trained and averaged.

    :raises UserError: peft is missing
    """
    try:
        from peft import LoraConfig
    except ImportError as e:
        raise UserError("--lora_r needs the package peft: pip install peft") from e
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        model.add_adapter(LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear"))
    for param in model.parameters():
        if param.requires_grad:  # peft gives them the precision of the weights
            param.data = param.data.float()
    model.enable_input_require_grads()  # otherwise, --gradient_checkpointing finds nothing to differentiate
    model.initial_weights += f", LoRA rank {args.lora_r}"
    # saved folders contain the base model, which may have new tokens or a new head; transformers takes it from there
    model.peft_config["default"].base_model_name_or_path = None


def warn_of_weights(name: str, model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Warn about the weights that a pretrained model lacks, and about those that are not used."""
    saved = ", ".join(model.config.architectures or ()) or "no named class"
    for problem, names in (
        ("lacks these weights, which start from random values", sorted(missing)),
        ("has these weights, which are not used", sorted(unexpected)),
    ):
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            what = f"{name} (saved by {saved}, opened by {type(model).__name__})"
            logger.warning(f"{what} {problem}: {', '.join(names[:10])}{more}")


def digest_weights(model: PreTrainedModel, left_out: set[str]) -> str:
    """Return a short hash of the weights without random ones, whose last bits may differ between machines."""
    total = hashlib.sha256()
    for name, param in model.named_parameters():
        if name not in left_out:
            total.update(param.detach().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()[:12]


#: fields of a configuration that do not affect the computation, or that the contract has elsewhere, like the vocabulary
NOT_ARCHITECTURE = {
    *("architectures", "auto_map", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "model_type"),
    *("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id"),
    *("use_cache", "gradient_checkpointing", "initializer_range", "output_attentions", "output_hidden_states"),
    *("return_dict", "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
    *("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "qa_dropout"),
}


def describe_architecture(model: PreTrainedModel) -> str:
    """Describe the architecture, on which peers must agree: different models may have weights of the same shapes.

    The description covers the fields that differ from their defaults, because later versions of transformers may add
    fields. A pretrained folder and its configuration alone have the same architecture.
    """
    config = model.config
    defaults = type(model.config)().to_dict()
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if name not in NOT_ARCHITECTURE and value != defaults.get(name)
    }
    layers, heads = (getattr(config, name, "?") for name in ("num_hidden_layers", "num_attention_heads"))
    sizes = f"{layers} layer{'s' * (layers != 1)}, {heads} head{'s' * (heads != 1)}"
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{config.model_type} {model.objective.name}, {sizes}, {digest(text)}"


def digest(value: object) -> str:
    """Return a short hash that is the same on every machine, unlike Python's hash()."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def find_longest_sequence(model: PreTrainedModel) -> float:
    """Return the maximum number of tokens: the size of the table of positions, or infinity without one."""
    if getattr(model.config, "position_embedding_type", "absolute") == "rotary":
        return math.inf
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    if longest <= 0:
        return math.inf
    # RoBERTa and similar models count positions from the padding id + 1
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    offsets = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    return longest - max(offsets, default=0)


def is_same(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether these differ by rounding errors only; in 16 bits, by a tenth of the standard deviation at most."""
    tolerance = 1e-3 if logits.dtype == torch.float32 else 0.1 * logits.float().std().item()
    return torch.allclose(logits, others, rtol=1e-3, atol=tolerance)


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether the model computes the same for a document alone and after another one in the same sequence.

    Most models of transformers do, if `position_ids` restart at each document and there is no mask.
    """
    ids = torch.arange(16).reshape(2, 8) % model.config.vocab_size
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            packed = model(input_ids=ids, position_ids=torch.arange(8).expand(2, 8) % 4, use_cache=False).logits[:, 4:]
            alone = model(input_ids=ids[:, 4:], use_cache=False).logits
        return is_same(packed, alone)
    except Exception:  # many types; `try_out` reports a model that fails without position_ids too
        return False
    finally:
        model.train()
