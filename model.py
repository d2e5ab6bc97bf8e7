"""Edit me: which model is trained. `make_model` is the one function that builds it, for every role.

    python -c "from model import make_model; from arguments import ModelArguments; \\
        print(make_model(ModelArguments(config_path='configs/demo.json'), vocab_size=1000).num_parameters())"
"""

import hashlib
import math
import os
from collections.abc import Iterable

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from arguments import ModelArguments, TrainerArguments, stop_for_user
from lean_albert import LeanAlbertForPreTraining, find_labelled_positions, masked_lm_loss, widen


class AlbertForPreTraining(transformers.AlbertForPreTraining):
    """HF's ALBERT with masked-LM and sentence-order heads, but vocabulary logits only where there is a label.

    About 15 % of the positions carry a label; the logits of the rest are most of a small model's work and memory, and
    nothing reads them. Saves and loads as HF's own AlbertForPreTraining.
    """

    def forward(
        self, input_ids, token_type_ids, labels, sentence_order_label, attention_mask=None, labelled_positions=None
    ) -> dict[str, torch.Tensor]:
        """Losses of one batch.

        :param input_ids: [batch, length] int64, as are token_type_ids, labels (-100: no label) and attention_mask (None
            where there is no padding)
        :param sentence_order_label: [batch] int64, 1 where the two segments were swapped
        :param labelled_positions: [labels] int64 indices into the flattened labels, see `move_batch`; looking for them
            here would make a GPU wait for the host
        :returns: loss (their sum, to train on), mlm_loss and sop_loss, scalars in nats
        """
        outputs = self.albert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        mlm_loss, _ = masked_lm_loss(outputs.last_hidden_state, self.predictions, labels, labelled_positions)
        sop_loss = cross_entropy(widen(self.sop_classifier(outputs.pooler_output)), sentence_order_label)
        return {"loss": mlm_loss + sop_loss, "mlm_loss": mlm_loss.detach(), "sop_loss": sop_loss.detach()}


#: by the model_type of a configuration. Each gives loss (to train on), mlm_loss and sop_loss for a batch of data.py
MODELS = {"albert": AlbertForPreTraining, "lean_albert": LeanAlbertForPreTraining}


def make_model(args: ModelArguments, vocab_size: int) -> transformers.PreTrainedModel:
    """The untrained model, with the same initial weights on every peer of the same seed.

    :param vocab_size: len(tokenizer); a trained tokenizer may have fewer pieces than were asked for
    """
    config_path = args.config_path
    if config_path.endswith(".json") and not os.path.isfile(config_path):
        stop_for_user(f"--config_path {config_path} does not exist: choose one of configs/*.json")
    try:
        config = AutoConfig.from_pretrained(config_path)
    except (OSError, ValueError, TypeError) as e:
        stop_for_user(f"--config_path {config_path} is no model's configuration ({str(e).splitlines()[0]})")
    if config.model_type not in MODELS:
        stop_for_user(
            f"--config_path {config_path} has the model_type {config.model_type}: choose one of {', '.join(MODELS)}"
        )
    config.vocab_size = vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        return MODELS[config.model_type](config)


#: fields of a configuration that shapes of weights do not tell, and that decide what the weights compute
ARCHITECTURE = (
    *("num_hidden_layers", "num_hidden_groups", "num_inner_groups", "inner_group_num", "num_attention_heads"),
    *("hidden_act", "hidden_act_gated", "sandwich_norm", "layer_norm_eps"),
    *("position_embedding_type", "rotary_embedding_base", "share_large_matrices", "num_inner_matrices"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
)


def describe_architecture(model: transformers.PreTrainedModel) -> str:
    """What peers must agree on beside the shapes of the weights: 4 layers and 12 may share the same ones."""
    config = model.config
    fields = [(name, getattr(config, name, None)) for name in ARCHITECTURE]
    size = f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads"
    return f"{config.model_type}, {size}, {digest(fields)}"


def digest(value: object) -> str:
    """A short hash that is the same on every machine, unlike Python's hash()."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def find_longest_sequence(model: transformers.PreTrainedModel) -> float:
    """Tokens that the model takes at most: the size of its table of positions, or infinite without one."""
    is_rotary = getattr(model.config, "position_embedding_type", "absolute") == "rotary"
    return math.inf if is_rotary else model.config.max_position_embeddings


def make_trained_model(
    args: ModelArguments, trainer_args: TrainerArguments, vocab_size: int
) -> transformers.PreTrainedModel:
    """The model as a trainer uses it: with --gradient_checkpointing, it keeps less for the backward pass."""
    model = make_model(args, vocab_size)
    if trainer_args.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            stop_for_user(
                f"--gradient_checkpointing: the model {model.config.model_type} has none: leave it away, or train a "
                "LeanALBERT (--config_path configs/lean-albert.json)"
            )
        model.activation_checkpointing_enable()
    return model


def move_batch(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The model's inputs on the device. What would make a GPU wait for the host is found out here, on the host: where
    the labels are; and whether there is no padding, so that attention needs no mask and takes its fastest way."""
    batch = dict(batch, labelled_positions=find_labelled_positions(batch["labels"]))
    if batch["attention_mask"].all():
        del batch["attention_mask"]
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: Iterable[dict[str, torch.Tensor]], device: torch.device) -> float:
    """Masked-LM loss in nats per masked token, over all masked tokens of the batches."""
    model.eval()
    total, count = torch.zeros((), device=device), 0
    for batch in batches:
        batch = move_batch(batch, device)
        total += model(**batch)["mlm_loss"] * len(batch["labelled_positions"])
        count += len(batch["labelled_positions"])
    model.train()
    return total.item() / max(1, count)
