"""Edit me: the training objectives. Each value of --objective is one entry of OBJECTIVES.

python -c "from experiment.objectives import *; print(*OBJECTIVES.values(), sep='\\n')"
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from models.build import find_causal_class, find_masked_class, find_pairs_class
from models.lean_albert import to_float32
from text.instances import BLOCKS, CHAT, PAIRS, TEXT, InstanceKind

# ---------------------------------------------------------------- losses


def compute_losses(
    model: PreTrainedModel, batch: dict[str, Tensor], labels_per_batch: float | None = None
) -> dict[str, Tensor]:
    """Compute the losses of a batch of `move_batch`, scalars in nats: `loss`, to train on, and its terms.

    These are means over labels (`token_loss`) or sequences (`sop_loss`, of the order of pairs), without gradient. In
    evaluation mode, `correct` counts correct labels.

    :param labels_per_batch: the mean number of labels of the batches in a step; then all of them have the same weight
    """
    outputs, logits = compute_logits(model, batch)
    targets = batch["labels"].flatten()[batch["labelled_positions"]]
    # sum / count, because the mean would be 0 / 0 without a label
    loss = model.sum_token_losses(logits, targets) / (labels_per_batch or max(1, len(targets)))
    losses = {"loss": loss, "token_loss": loss.detach()}
    if getattr(outputs, "aux_loss", None) is not None:  # load balancing of a mixture of experts
        losses["loss"] = loss + model.config.router_aux_loss_coef * outputs.aux_loss
    if model.objective.kind.has_pairs:
        sop_loss = cross_entropy(to_float32(outputs.sop_logits), batch["sentence_order_label"])
        losses |= {"loss": loss + sop_loss, "sop_loss": sop_loss.detach()}
    if not model.training:
        losses["correct"] = (logits.argmax(-1) == targets).sum()
    return losses


def sum_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of logits, [labels, vocabulary], in nats."""
    return cross_entropy(to_float32(logits), targets, reduction="sum")


def compute_logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[ModelOutput, Tensor]:
    """Return the model's outputs for a batch, and the logits [labels, vocabulary] at `labelled_positions`.

    If possible, the model computes no others. Those of all positions would take most of a small model's time and
    memory.
    """
    objective = model.objective
    positions = batch["labelled_positions"] - int(objective.is_causal)
    inputs = {name: batch[name] for name in model.input_names if name in batch}
    if model.keeps_documents_apart and "position_ids" in batch:
        # without a mask, transformers finds the documents by these positions, and limits attention to each of them
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    if objective.is_causal:
        inputs["use_cache"] = False
    head = find_head(model)
    if head is not None:
        head.labelled_positions = positions
    try:
        outputs = model(**inputs)
    finally:
        if head is not None:
            head.labelled_positions = None
    logits = outputs["prediction_logits" if objective.kind.has_pairs else "logits"]
    if logits.dim() == 3:
        logits = logits.flatten(0, 1)[positions]
    return outputs, logits


def find_head(model: PreTrainedModel) -> torch.nn.Module | None:
    """Return the layers that compute the logits, or None if the model does not name them."""
    return getattr(model, "predictions", None) or model.get_output_embeddings()


def select_labelled_positions(head: torch.nn.Module, inputs: tuple) -> tuple | None:
    """Limit the input of a model's head to labelled positions, for logits [labels, vocabulary]."""
    labelled = getattr(head, "labelled_positions", None)
    return None if labelled is None else (inputs[0].flatten(0, 1)[labelled], *inputs[1:])


# ---------------------------------------------------------------- objectives


@dataclass(frozen=True)
class Objective:
    """A training objective: its kind of sequences and its model class; the losses follow from the kind."""

    name: str
    kind: InstanceKind
    #: returns transformers' class for a configuration; see experiment/model.py for other classes
    find_class: Callable[[PreTrainedConfig], type | None]
    #: for a checkpoint's card: the targets of the loss, the model's pipeline, and an example for it
    description: str
    pipeline: str = "fill-mask"
    example: str = 'f"The captain was {predict.tokenizer.mask_token}."'

    @property
    def is_causal(self) -> bool:
        """Return whether the model predicts each token from earlier ones, by the logits one position before it."""
        return not self.kind.is_masked


#: the default is the first objective for which the model type has a class
OBJECTIVES = {
    "mlm_sop": Objective("mlm_sop", PAIRS, find_pairs_class, "masked words and sentence order"),
    "mlm": Objective("mlm", BLOCKS, find_masked_class, "masked words"),
    "clm": Objective(
        "clm",
        TEXT,
        find_causal_class,
        "the next word",
        pipeline="text-generation",
        example='"The captain was", max_new_tokens=20, '
        'add_special_tokens=predict.tokenizer("a")["input_ids"][-1] != predict.tokenizer.eos_token_id',
    ),
    "sft": Objective(
        "sft",
        CHAT,
        find_causal_class,
        "the assistant's next word",
        pipeline="text-generation",
        example='[{"role": "user", "content": "Who was the captain?"}], max_new_tokens=20',
    ),
}
