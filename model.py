"""Edit me: which model is trained. `make_model` is the one function that builds it, for every role.

    python -c "from model import make_model; from arguments import ModelArguments; \\
        print(make_model(ModelArguments(config_path='configs/demo.json'), vocab_size=1000).num_parameters())"
"""

import os
from collections.abc import Iterable

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AlbertConfig

from arguments import ModelArguments, stop_for_user


class AlbertForPreTraining(transformers.AlbertForPreTraining):
    """HF's ALBERT with masked-LM and sentence-order heads, but vocabulary logits only where there is a label.

    About 15 % of the positions carry a label; the logits of the rest are most of a small model's work and memory, and
    nothing reads them. Saves and loads as HF's own AlbertForPreTraining.
    """

    def forward(
        self, input_ids, attention_mask, token_type_ids, labels, sentence_order_label, labelled_positions=None
    ) -> dict[str, torch.Tensor]:
        """Losses of one batch.

        :param input_ids: [batch, length] int64, as are attention_mask, token_type_ids and labels (-100: no label)
        :param sentence_order_label: [batch] int64, 1 where the two segments were swapped
        :param labelled_positions: [labels] int64 indices into the flattened labels, see `move_batch`; looking for them
            here would make a GPU wait for the host
        :returns: loss (their sum, to train on), mlm_loss and sop_loss, scalars in nats
        """
        outputs = self.albert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        if labelled_positions is None:
            labelled_positions = find_labelled_positions(labels)
        hidden = outputs.last_hidden_state.flatten(0, 1)[labelled_positions]
        logits = self.predictions(hidden)
        # sum / count: the mean over no label at all would be 0 / 0
        mlm_loss = cross_entropy(logits.float(), labels.flatten()[labelled_positions], reduction="sum")
        mlm_loss = mlm_loss / max(1, len(labelled_positions))
        sop_loss = cross_entropy(self.sop_classifier(outputs.pooler_output).float(), sentence_order_label)
        return {"loss": mlm_loss + sop_loss, "mlm_loss": mlm_loss.detach(), "sop_loss": sop_loss.detach()}


def make_model(args: ModelArguments, vocab_size: int) -> AlbertForPreTraining:
    """The untrained model, with the same initial weights on every peer of the same seed.

    :param vocab_size: len(tokenizer); a trained tokenizer may have fewer pieces than were asked for
    """
    config_path = args.config_path
    if config_path.endswith(".json") and not os.path.isfile(config_path):
        stop_for_user(f"--config_path {config_path} does not exist: choose one of configs/*.json")
    try:
        config = AlbertConfig.from_pretrained(config_path)
    except (OSError, ValueError) as e:
        stop_for_user(f"--config_path {config_path} is no ALBERT configuration ({str(e).splitlines()[0]})")
    config.vocab_size = vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        return AlbertForPreTraining(config)


def find_labelled_positions(labels: torch.Tensor) -> torch.Tensor:
    """Indices into the flattened [batch, length] labels where there is one (not -100), int64."""
    return (labels.flatten() != -100).nonzero().squeeze(1)


def move_batch(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The model's inputs on the device, with the labelled positions found while the labels are still on the host."""
    batch = dict(batch, labelled_positions=find_labelled_positions(batch["labels"]))
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
