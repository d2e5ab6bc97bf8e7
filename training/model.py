"""A model in training: a trial before this peer joins the swarm, and the transfer of batches to its device."""

import contextlib

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from arguments import ModelArguments, TrainerArguments
from common.console import UserError, first_line
from common.files import temporary_folder
from common.hub import calm_transformers
from experiment.model import make_model
from experiment.objectives import compute_losses
from models.build import is_same
from models.lean_albert import find_labelled_positions
from text.tokenizers import PROBE

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


class FloatProducts(TorchDispatchMode):
    """A mode that computes matrix products of bfloat16 in float32, which is faster on a CPU without AVX-512."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Compute the operation, with copies of a product's factors."""
        if func.overloadpacket in PRODUCTS and args[0].dtype == torch.bfloat16:
            args = [value.float() if torch.is_tensor(value) else value for value in args]
            return func(*args, **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def make_trainable_model(
    args: ModelArguments, trainer_args: TrainerArguments, tokenizer: PreTrainedTokenizerBase | int
) -> PreTrainedModel:
    """Return the model for training, or raise a UserError if these flags cannot train or save it."""
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
    try_out(model, "--gradient_checkpointing: " if trainer_args.gradient_checkpointing else "")
    return model


def check_saved_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a UserError if the tokenizer changes when it is saved with this model and loaded again.

    For some model types, such as Qwen2, AutoTokenizer uses the type's own class for any tokenizer.
    """
    with temporary_folder() as folder, calm_transformers():
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if again(PROBE, verbose=False)["input_ids"] != tokenizer(PROBE, verbose=False)["input_ids"]:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} changes when it is saved with a model of type "
            f"{model.config.model_type}: use a tokenizer made for this type"
        )


def try_out(model: PreTrainedModel, where: str) -> None:
    """Run a forward and backward pass on a tiny batch, or raise a UserError if the model cannot be trained.

    hivemind averages parameters and gradients, but not the statistics that a forward pass may collect.

    :param where: the start of an error's text: the flags that may have caused it
    """
    kind = model.config.model_type
    cpu = torch.device("cpu")
    ids = model.config.vocab_size - 1 - torch.arange(16).reshape(2, 8)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    batch |= {"labels": torch.where(torch.arange(8) > 0, ids, -100), "sentence_order_label": torch.tensor([0, 1])}
    buffers = {name: value.clone() for name, value in dict(model.named_buffers()).items() if name in model.state_dict()}
    is_slow = model.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() != "AVX512"
    try:
        # eager, because flex_attention would compile for ten seconds
        eager = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices=[]), eager, FloatProducts() if is_slow else contextlib.nullcontext():
            compute_losses(model.train(), move_batch(batch, cpu))["loss"].backward()
            if model.objective.is_causal:
                with torch.no_grad():
                    before, after = (model.eval()(ids[:, :end], use_cache=False).logits[:, :4] for end in (5, 8))
    except Exception as e:  # a model without a loss, or with other inputs than text, raises any type
        reason = f"{type(e).__name__}: {first_line(e)}"
        raise UserError(f"{where}the model {kind} cannot be trained on text alone ({reason})") from e
    if model.objective.is_causal and not is_same(before, after):
        raise UserError(f"the model {kind} sees the tokens that it should predict: it does not suit --objective clm")
    if changed := [name for name, value in model.named_buffers() if name in buffers and not value.equal(buffers[name])]:
        raise UserError(
            f"the model {kind} collects statistics ({changed[0]}), which peers do not average: use layer norms instead"
        )
    model.train().zero_grad()


def move_batch(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the model's inputs on the device, with the positions of the labels, and without a mask that masks nothing.

    Both are found on the host, because the GPU would have to wait for them. Attention is fastest without a mask.
    """
    positions = find_labelled_positions(batch["labels"])
    if device.type == "cuda":  # like TrainingFeed: from other memory, the host would wait for the copy
        positions = positions.pin_memory()
    batch = dict(batch, labelled_positions=positions)
    if batch["attention_mask"].all():
        del batch["attention_mask"]
    if "position_ids" in batch and (batch["position_ids"].diff() == 1).all():  # each row is of one document
        del batch["position_ids"]
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
