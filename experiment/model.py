"""Edit me: the model. All roles build it by `make_model`.

Any language model of transformers' Auto classes works. For another model or head, write a class in a file of its own
and add it to OWN_MODELS (docs/new_experiment.md).

    python -c "from experiment.model import make_model; from arguments import ModelArguments; \\
        print(make_model(ModelArguments(config_path='configs/demo.json'), 1000).num_parameters())"
"""

import inspect
import logging

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from arguments import ModelArguments
from common.console import UserError
from experiment.objectives import OBJECTIVES, Objective, find_head, select_labelled_positions, sum_token_losses
from models.build import build_model, copy_special_tokens, digest, is_text_alone, keeps_documents_apart, load_config

logger = logging.getLogger("model")


#: Classes that replace those of transformers, by objective and model_type. They have the same inputs and outputs.
OWN_MODELS: dict[tuple[str, str], type[PreTrainedModel]] = {}


def find_class(objective: Objective, config: PreTrainedConfig) -> type | None:
    """Return the model class for this objective, or None if the model type has none."""
    return OWN_MODELS.get((objective.name, config.model_type)) or objective.find_class(config)


def find_objective(args: ModelArguments) -> Objective:
    """Return the objective: --objective, or the first one for which the model type has a class."""
    config = load_config(args)
    if not is_text_alone(config):
        cure = "choose another model, or the part that reads text, if it has its own configuration"
        raise UserError(f"the model type {config.model_type} needs more than one text to train on: {cure}")
    available = {name: objective for name, objective in OBJECTIVES.items() if find_class(objective, config)}
    if not available:
        raise UserError(
            f"the model type {config.model_type} is not a language model of transformers: choose another model"
        )
    if args.objective and args.objective not in available:
        raise UserError(f"--objective {args.objective}: the model type {config.model_type} has {', '.join(available)}")
    return available[args.objective or next(iter(available))]


def make_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase | int) -> PreTrainedModel:
    """Return the model at epoch 0 with the same weights on all peers: pretrained, or random from the seed.

    Its attributes: `objective`; `sum_token_losses`, which --torch_compile replaces; `input_names`, the columns of a
    batch that it takes, which the tokenizer gets too; `initial_weights`, a description for the contract;
    `keeps_documents_apart`; `chat_template`, a hash.

    :param tokenizer: the tokenizer, which defines the vocabulary size and the special tokens, or that size alone
    """
    config = load_config(args)
    objective = find_objective(args)
    vocab_size = tokenizer if isinstance(tokenizer, int) else len(tokenizer)
    copy_special_tokens(config, tokenizer, objective.is_causal)
    model = build_model(find_class(objective, config), config, args, vocab_size)
    model.objective = objective
    model.sum_token_losses = sum_token_losses
    accepted = inspect.signature(model.forward).parameters
    has_types = not objective.is_causal and (getattr(config, "type_vocab_size", None) or 0) > 1
    names = ("input_ids", "token_type_ids", "attention_mask") if has_types else ("input_ids", "attention_mask")
    model.input_names = [name for name in names if name in accepted]
    model.keeps_documents_apart = objective.is_causal and keeps_documents_apart(model)
    if objective.is_causal and not model.keeps_documents_apart:
        logger.warning(f"a {config.model_type} reads the documents that share a sequence as one text")
    if objective.kind.has_turns:
        model.chat_template = digest(tokenizer.chat_template)
    if (head := find_head(model)) is not None:
        head.register_forward_pre_hook(select_labelled_positions)
    if not isinstance(tokenizer, int):
        tokenizer.model_input_names = list(model.input_names)  # for a pipeline that loads both from a folder
    return model
