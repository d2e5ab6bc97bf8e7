"""Edit me: what a model learns. Each value of --objective is one entry of OBJECTIVES.

python -c "from experiment.objectives import *; print(*OBJECTIVES.values(), sep='\\n')"
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel

from models.build import find_causal_class, find_masked_class
from models.lean_albert import to_float32
from text.instances import BLOCKS, PAIRS, TEXT, InstanceKind

# ---------------------------------------------------------------- losses

Losses = tuple[dict[str, Tensor], Tensor]  # by name, loss to train on among them; and logits [labels, vocabulary]


def compute_losses(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of one batch, scalars in nats: loss, to train on, and without gradient those that its objective names, which are
    means over the labels or rows. In evaluation also `correct`: how many labels were predicted.

    :param batch: as `move_batch` returns it
    """
    targets = batch["labels"].flatten()[batch["labelled_positions"]]
    losses, logits = model.objective.losses_of(model, batch, targets)
    if not model.training:
        losses["correct"] = (logits.argmax(-1) == targets).sum()
    return losses


def take_own_losses(model: PreTrainedModel, batch: dict[str, Tensor], targets: Tensor) -> Losses:
    """Those that a model of ours computes by itself from a whole batch, see AlbertForPreTraining."""
    outputs = model(**batch)
    return {name: outputs[name] for name in ("loss", "mlm_loss", "sop_loss")}, outputs["prediction_logits"]


def compute_token_loss(model: PreTrainedModel, batch: dict[str, Tensor], targets: Tensor) -> Losses:
    """Of any model that gives logits [batch, length, vocabulary]. They are computed only where there is a label, except
    by models whose last layer is none of the kind."""
    positions, objective = batch["labelled_positions"], model.objective
    inputs = {name: batch[name] for name in model.input_names if name in batch}
    if objective.is_causal:
        inputs["use_cache"] = False
    head = model.get_output_embeddings()  # None where the model does not say which layer that is
    if head is not None:
        head.labelled_positions = positions
    try:
        outputs = model(**inputs)
    finally:
        if head is not None:
            head.labelled_positions = None
    logits = outputs.logits
    if logits.dim() == 3:
        logits = logits.flatten(0, 1)[positions - int(objective.is_causal)]
    # sum / count: the mean over no label at all would be 0 / 0
    loss = cross_entropy(to_float32(logits), targets, reduction="sum") / max(1, len(targets))
    losses = {"loss": loss, objective.token_loss: loss.detach()}
    if getattr(outputs, "aux_loss", None) is not None:  # of a mixture of experts, that none of them lies idle
        losses["loss"] = loss + model.config.router_aux_loss_coef * outputs.aux_loss
    return losses, logits


def select_labelled_positions(head: torch.nn.Module, inputs: tuple) -> tuple | None:
    """Have a model's last layer compute only the logits that `compute_token_loss` wants: [labels, vocabulary]."""
    labelled = getattr(head, "labelled_positions", None)
    return None if labelled is None else (inputs[0].flatten(0, 1)[labelled - head.label_distance], *inputs[1:])


# ---------------------------------------------------------------- objectives


@dataclass(frozen=True)
class Objective:
    """What a model learns, of which instances, and how it is told."""

    name: str
    kind: InstanceKind
    #: which of transformers' classes makes a model of a configuration; our own are in experiment/model.py
    find_class: Callable[[PreTrainedConfig], type | None]
    #: for a checkpoint's card: what the loss is of, the pipeline that the model opens in, and an example for it
    description: str
    pipeline: str = "fill-mask"
    example: str = 'f"The captain was {predict.tokenizer.mask_token}."'
    #: of a model, a batch, and its labels without those to be ignored
    losses_of: Callable[[PreTrainedModel, dict[str, Tensor], Tensor], Losses] = compute_token_loss
    #: of these losses the one that is the mean over the labels
    token_loss: str = "mlm_loss"

    @property
    def is_causal(self) -> bool:
        """Whether a token is predicted from those before it alone, by the logits one place before its label."""
        return not self.kind.is_masked


#: the first one that the model's type has a class for is the default
OBJECTIVES = {
    "mlm_sop": Objective(
        "mlm_sop", PAIRS, lambda _: None, "masked words and sentence order", losses_of=take_own_losses
    ),
    "mlm": Objective("mlm", BLOCKS, find_masked_class, "masked words"),
    "clm": Objective(
        "clm",
        TEXT,
        find_causal_class,
        "the next word",
        pipeline="text-generation",
        example='"The captain was", max_new_tokens=20, add_special_tokens=False',
        token_loss="lm_loss",
    ),
}
