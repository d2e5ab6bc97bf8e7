"""The model as a trainer uses it, tried out before any other peer has seen this one."""

import logging
import tempfile

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from arguments import ModelArguments, TrainerArguments
from experiment.model import make_model
from experiment.objectives import compute_losses
from machine.devices import move_batch
from support.console import UserError, first_line
from support.hub import calm_transformers
from text.tokenizers import PROBE

logger = logging.getLogger("model")


def make_trained_model(
    args: ModelArguments, trainer_args: TrainerArguments, tokenizer: PreTrainedTokenizerBase | int
) -> PreTrainedModel:
    """The model as a trainer uses it: with --gradient_checkpointing, it keeps less for the backward pass. A
    UserError where it cannot be trained so, or not be saved, before any other peer has seen this one."""
    model = make_model(args, tokenizer)
    if not isinstance(tokenizer, int):
        check_saved_tokenizer(model, tokenizer)
    if trainer_args.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(
                f"--gradient_checkpointing: the model {model.config.model_type} has none: leave it away, or train a "
                "LeanALBERT (--config_path configs/lean-albert.json)"
            )
        model.activation_checkpointing_enable()
    if "flash" not in (args.attn_implementation or ""):  # which no CPU has
        flags = ["--gradient_checkpointing"] * trainer_args.gradient_checkpointing
        flags += [f"--attn_implementation {args.attn_implementation}"] if args.attn_implementation else []
        try_out(model, " ".join(flags) + ": " if flags else "")
    return model


def check_saved_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whether it comes back from a folder with this model: some model types, Qwen2's for one, have AutoTokenizer take a
    class of their own for whichever tokenizer is there."""
    with tempfile.TemporaryDirectory() as folder, calm_transformers():
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = transformers.AutoTokenizer.from_pretrained(folder)
    if again(PROBE, verbose=False)["input_ids"] != tokenizer(PROBE, verbose=False)["input_ids"]:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} becomes another one when it is saved with a model of type "
            f"{model.config.model_type}: take one of that model's kind"
        )


def try_out(model: PreTrainedModel, where: str = "") -> None:
    """One forward and backward pass of a tiny batch, or a UserError. hivemind averages parameters and their
    gradients: those that no gradient reaches count as zero, which is right; statistics that a forward pass gathers
    would be each peer's own.

    :param where: the flags to blame
    """
    kind, cpu = model.config.model_type, torch.device("cpu")
    ids = model.config.vocab_size - 1 - torch.arange(16).reshape(2, 8)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    batch |= {"labels": torch.where(torch.arange(8) > 0, ids, -100), "sentence_order_label": torch.tensor([0, 1])}
    buffers = {name: value.clone() for name, value in dict(model.named_buffers()).items() if name in model.state_dict()}
    try:
        with torch.random.fork_rng(devices=[]):
            compute_losses(model.train(), move_batch(batch, cpu))["loss"].backward()
            if model.objective.is_causal:
                with torch.no_grad():
                    before, after = (model.eval()(ids[:, :end], use_cache=False).logits[:, :4] for end in (5, 8))
    except Exception as e:  # whatever a model comes up with that wants more than text, or has no loss
        raise UserError(
            f"{where}the model {kind} cannot be trained on text alone ({type(e).__name__}: {first_line(e)})"
        ) from e
    if model.objective.is_causal and not torch.allclose(before, after, atol=1e-3):
        raise UserError(f"the model {kind} sees the words that it is to predict: it is none for --objective clm")
    if changed := [name for name, value in model.named_buffers() if name in buffers and not value.equal(buffers[name])]:
        raise UserError(
            f"the model {kind} gathers statistics ({changed[0]}), which peers do not average: use layer norms instead"
        )
    unused = [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]
    if unused:  # or, of a mixture of experts, those that this batch did not ask
        more = f" and {len(unused) - 2} more" if len(unused) > 2 else ""
        logger.info(
            f"no gradient has reached {', '.join(unused[:2])}{more}: where none ever does, weight decay shrinks them"
        )
    model.train().zero_grad()
