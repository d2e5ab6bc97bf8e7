"""A model in training: tried out before any other peer sees this one, fed with batches, and measured."""

import logging
from collections import Counter
from collections.abc import Iterable

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from arguments import ModelArguments, TrainerArguments
from experiment.model import make_model
from experiment.objectives import compute_losses
from models.lean_albert import find_labelled_positions
from support.console import UserError, first_line
from support.files import temporary_folder
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
                f"--gradient_checkpointing: the model {model.config.model_type} does not support it: omit it, or train "
                "a LeanALBERT (--config_path configs/lean-albert.json)"
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
    with temporary_folder() as folder, calm_transformers():
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if again(PROBE, verbose=False)["input_ids"] != tokenizer(PROBE, verbose=False)["input_ids"]:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} changes when it is saved with a model of type "
            f"{model.config.model_type}: use one of that model's kind"
        )


def try_out(model: PreTrainedModel, where: str) -> None:
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
        # to compile, as flex_attention does, would take ten seconds
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            compute_losses(model.train(), move_batch(batch, cpu))["loss"].backward()
            if model.objective.is_causal:
                with torch.no_grad():
                    before, after = (model.eval()(ids[:, :end], use_cache=False).logits[:, :4] for end in (5, 8))
    except Exception as e:  # whatever a model comes up with that wants more than text, or has no loss
        raise UserError(
            f"{where}the model {kind} cannot be trained on text alone ({type(e).__name__}: {first_line(e)})"
        ) from e
    if model.objective.is_causal and not torch.allclose(before, after, atol=1e-3):
        raise UserError(f"the model {kind} sees the words that it is to predict: it is not suited to --objective clm")
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


def move_batch(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The model's inputs on the device. What would make a GPU wait for the host is found out here, on the host: where
    the labels are; and whether there is no padding, so that attention needs no mask and takes its fastest way."""
    positions = find_labelled_positions(batch["labels"])
    if device.type == "cuda":  # as DeviceFeed does with the rest: from other memory the host waits for the copy
        positions = positions.pin_memory()
    batch = dict(batch, labelled_positions=positions)
    if batch["attention_mask"].all():
        del batch["attention_mask"]
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, batches: Iterable[dict[str, torch.Tensor]], device: torch.device
) -> dict[str, float]:
    """Means over all batches: loss, in nats per token to be predicted; accuracy, the share of these that was; and
    sop_loss where the model has one, in nats per row. The device is waited for once."""
    model.eval()
    sums, labels, rows = Counter(), 0, 0
    try:
        for batch in batches:
            batch = move_batch(batch, device)
            losses = compute_losses(model, batch)
            count, size = len(batch["labelled_positions"]), len(batch["input_ids"])
            sums["loss"] += losses[model.objective.token_loss] * count
            sums["correct"] += losses["correct"]
            if "sop_loss" in losses:
                sums["sop_loss"] += losses["sop_loss"] * size
            labels, rows = labels + count, rows + size
    finally:  # training continues where memory was short here
        model.train()
    result = {"loss": float(sums["loss"]) / max(1, labels), "accuracy": float(sums["correct"]) / max(1, labels)}
    return result | ({"sop_loss": float(sums["sop_loss"]) / max(1, rows)} if "sop_loss" in sums else {})
