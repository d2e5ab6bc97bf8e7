"""Low-rank adapters (LoRA, arxiv.org/abs/2106.09685) on a pretrained model, by peft, which is an optional package."""

import torch
from transformers import PreTrainedModel

from arguments import ModelArguments
from common.console import UserError, first_line


def add_lora(model: PreTrainedModel, args: ModelArguments) -> None:
    """Freeze the model and add adapters, with the same weights on all peers. Only adapters are trained and averaged.

    :raises UserError: peft is missing, or the model has no such layers
    """
    try:
        from peft import LoraConfig
    except ImportError as e:
        raise UserError("--lora_r needs the package peft: pip install peft") from e
    targets = args.lora_target_modules or "all-linear"
    config = LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules=targets)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)
            model.add_adapter(config)
    except ValueError as e:
        layers = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        raise UserError(
            f"--lora_target_modules: no adapters for {model.config.model_type} ({first_line(e)}): "
            f"choose some of {', '.join(sorted(layers)) or 'its matrices'}"
        ) from e
    model.enable_input_require_grads()  # otherwise, --gradient_checkpointing finds nothing to differentiate
    model.initial_weights += f", LoRA rank {args.lora_r}"
