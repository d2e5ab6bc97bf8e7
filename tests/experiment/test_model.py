"""The model: the same losses as HF's own ALBERT at a fraction of the work, the same weights on every peer."""

import pytest
import torch
import transformers
from rows import make_model_batch
from torch.nn.functional import cross_entropy

from arguments import ModelArguments
from experiment.model import make_model
from experiment.objectives import compute_losses
from training.evaluation import evaluate
from training.model import move_batch

VOCABULARY = 300


@pytest.fixture
def model():
    return make_model(ModelArguments(config_path="configs/demo.json"), VOCABULARY)


def test_masked_head_matches_full_logits(model):
    batch = make_model_batch()
    reference = transformers.AlbertForPreTraining(model.config)
    reference.load_state_dict(model.state_dict())
    model.eval(), reference.eval()  # the head of sentence order has dropout
    outputs = reference(**{name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")})
    mlm_loss = cross_entropy(outputs.prediction_logits.flatten(0, 1), batch["labels"].flatten())
    sop_loss = cross_entropy(outputs.sop_logits, batch["sentence_order_label"])
    (mlm_loss + sop_loss).backward()

    losses = compute_losses(model, move_batch(batch, torch.device("cpu")))
    losses["loss"].backward()
    assert losses["mlm_loss"].item() == pytest.approx(mlm_loss.item(), rel=1e-5)
    assert losses["sop_loss"].item() == pytest.approx(sop_loss.item(), rel=1e-5)
    # an evaluation is of the masked words alone
    result = evaluate(model, [batch, batch], torch.device("cpu"))
    assert result["loss"] == pytest.approx(mlm_loss.item(), rel=1e-5)
    model.eval()
    expected = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_batch_without_labels_has_zero_loss(model):
    batch = make_model_batch() | {"labels": torch.full((4, 16), -100)}
    losses = model(**batch)
    assert losses["mlm_loss"].item() == 0
    assert losses["loss"].isfinite()


def test_make_model_depends_on_seed(model):
    torch.rand(3)  # whatever else has drawn random numbers
    again = make_model(ModelArguments(config_path="configs/demo.json"), VOCABULARY)
    other = make_model(ModelArguments(config_path="configs/demo.json", seed=7), VOCABULARY)
    name = "albert.embeddings.word_embeddings.weight"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.state_dict()[name], other.state_dict()[name])


def test_albert_large_has_published_size():
    with torch.device("meta"):
        model = make_model(ModelArguments(), 30_000)
    # 17.85 M (arxiv.org/abs/1909.11942, table 1: 18 M), of which the masked-LM head is part
    assert 17.5e6 < model.num_parameters() < 18.5e6
