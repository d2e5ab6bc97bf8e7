"""Every kind of language model: losses against transformers' own, swarms that train each, and adapters (LoRA)."""

import gc
import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from mains import expect_user_error
from processes import LOOPBACK, make_prefix, run_python, wait_until
from rows import collate, make_model_batch
from safetensors.torch import load_file, save_file
from swarms import SHARED, TRAINER, flags, largest_difference, run_card, start_trainer, stop
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

import finetune_mlm
from arguments import AveragingArguments, ModelArguments, OptimizerArguments, TrainerArguments
from experiment.merge import merge
from experiment.model import find_objective, make_model
from experiment.objectives import compute_losses
from experiment.optimizer import make_contract, make_local_optimizer, make_param_groups
from models.build import describe_architecture, find_longest_sequence, is_same
from swarm.contract import RunContract, find_differences
from text.collators import DataCollatorForCausalLM
from text.instances import BLOCKS
from text.tokenizers import load_tokenizer
from training import checkpoint
from training.checkpoint import find_checkpoints, write_weights
from training.evaluation import evaluate
from training.model import make_trainable_model, move_batch, try_out

VOCABULARY = 300
CPU = torch.device("cpu")
SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
SMALL |= dict(max_position_embeddings=40, initializer_range=0.06)
#: a tiny model of each type
CONFIGS = {
    "bert": SMALL,
    "roberta": SMALL | dict(type_vocab_size=1),
    "distilbert": dict(dim=64, n_layers=2, n_heads=2, hidden_dim=128, max_position_embeddings=40),
    "modernbert": SMALL | dict(global_attn_every_n_layers=2),
    "fnet": SMALL,  # takes no attention_mask, and has a pooler that no gradient reaches
    "mobilebert": SMALL | dict(embedding_size=32, intra_bottleneck_size=32),  # its last layer is no module
    "albert": SMALL | dict(embedding_size=32),
    "lean_albert": SMALL | dict(embedding_size=32),
    "gpt2": dict(n_embd=64, n_layer=2, n_head=2, n_positions=40),
    "llama": SMALL | dict(num_key_value_heads=2),
    "qwen2": SMALL | dict(num_key_value_heads=2),
    "mixtral": SMALL | dict(num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.5),
    "codegen": dict(n_embd=64, n_layer=1, n_head=4, rotary_dim=8, n_positions=40),
    "modernbert-decoder": SMALL,
    "xlnet": dict(d_model=32, n_layer=1, n_head=2, d_inner=64),
    "ibert": SMALL,
    "esm": SMALL,
}
MASKED, CAUSAL = ["bert", "roberta", "distilbert", "modernbert", "fnet", "mobilebert"], ["gpt2", "llama"]


@pytest.fixture
def write(tmp_path):
    """write(type, ...) -> the path of its configuration."""

    def write_config(name: str, **changes) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"model_type": name, **CONFIGS.get(name, {}), **changes}))
        return str(path)

    return write_config


@pytest.fixture
def save(write, tmp_path):
    """save(type, seed) -> the folder of a pretrained model, which has random weights."""

    def save_model(name: str, seed: int = 42, size: int = VOCABULARY) -> str:
        folder = tmp_path / f"{name}_{seed}"
        make_model(ModelArguments(write(name), seed=seed), size).save_pretrained(folder)
        return str(folder)

    return save_model


def contract(model) -> RunContract:
    return make_contract(model, "a" * 64, OptimizerArguments(), AveragingArguments())


@pytest.mark.parametrize("name", [*MASKED, *CAUSAL, "albert"])
def test_families_match_transformers_losses_and_gradients(write, name):
    is_causal, has_pairs = name in CAUSAL, name == "albert"
    kind = "CausalLM" if is_causal else "PreTraining" if has_pairs else "MaskedLM"
    objective = {"CausalLM": "clm", "PreTraining": "mlm_sop", "MaskedLM": "mlm"}[kind]
    output = "prediction_logits" if has_pairs else "logits"
    model = make_model(ModelArguments(write(name)), VOCABULARY).eval()
    reference = getattr(transformers, f"AutoModelFor{kind}").from_config(model.config).eval()
    assert type(reference) is type(model) and model.objective.name == objective
    reference.load_state_dict(model.state_dict())
    batch = make_model_batch(1.0 if is_causal else 0.15)
    inputs = {key: batch[key] for key in model.input_names if key in batch}
    assert ("token_type_ids" in inputs) == (name in ("bert", "fnet", "mobilebert", "albert"))
    assert ("attention_mask" in inputs) == (name != "fnet")
    order = {"sentence_order_label": batch["sentence_order_label"]} if has_pairs else {}
    outputs = reference(**inputs, labels=batch["labels"], **order)
    outputs.loss.backward()
    # of each token, predicted at the position before it by causal models
    logits = outputs[output].roll(int(is_causal), dims=1)
    token_loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()

    losses = compute_losses(model, move_batch(batch, CPU))
    losses["loss"].backward()
    assert losses["loss"].item() == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert losses["token_loss"].item() == pytest.approx(token_loss, rel=1e-5)
    assert has_pairs or losses["token_loss"].item() == losses["loss"].item()
    gradients, expected = ([param.grad for param in each.parameters()] for each in (model, reference))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)  # both None without a gradient

    # use the predictions as labels, except for one
    labels = torch.where(batch["labels"] == -100, -100, logits.argmax(-1))
    row, column = (labels != -100).nonzero()[0]
    labels[row, column] = (labels[row, column] + 1) % VOCABULARY
    fewer = labels.masked_fill(torch.arange(4)[:, None] > 1, -100)
    count, rest = (int((part != -100).sum()) for part in (labels, fewer))
    assert compute_losses(model, move_batch(batch | {"labels": labels}, CPU))["correct"].item() == count - 1
    # all labels have the same weight
    result = evaluate(model, [batch | {"labels": part} for part in (labels, fewer)], CPU)
    assert result["accuracy"] == pytest.approx((count + rest - 2) / (count + rest)) and result["samples"] == 8
    # an evaluation is of the tokens alone, not of the order of sentences
    assert evaluate(model, [batch, batch], CPU)["loss"] == pytest.approx(token_loss, rel=1e-5)
    losses = compute_losses(model, move_batch(batch | {"labels": torch.full((4, 16), -100)}, CPU))
    assert losses["token_loss"].item() == 0 and losses["loss"].isfinite()
    # other callers still get all logits
    assert model.eval()(**inputs)[output].shape == (4, 16, VOCABULARY)


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_documents_match_documents_alone(write, name):
    tokenizer = make_word_tokenizer()
    model = make_model(ModelArguments(write(name)), tokenizer).eval()
    collator, end = DataCollatorForCausalLM(tokenizer), tokenizer.eos_token_id
    first, second, third = [*range(10, 21), end], [*range(30, 37), end], [*range(40, 43), end]
    packed = collate(collator, [{"input_ids": [*first, *second]}, {"input_ids": third}])
    assert packed["position_ids"].tolist() == [[*range(12), *range(8)], [*range(4), *[0] * 16]]
    alone = [collate(collator, [{"input_ids": document}]) for document in (first, second, third)]
    results, gradients = [evaluate(model, batches, CPU) for batches in ([packed], alone)], []
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-5)
    for batches in ([packed], alone):
        model.zero_grad()
        for batch in batches:
            labels = (batch["labels"] != -100).sum()
            (compute_losses(model.eval(), move_batch(batch, CPU))["loss"] * labels).backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, is_apart", [("gpt2", True), ("bert", False)])
def test_model_that_joins_documents_is_known(write, name, is_apart):
    """The contract names it, because it changes the loss."""
    model = make_model(ModelArguments(write(name), objective="clm"), VOCABULARY)
    assert model.keeps_documents_apart is is_apart and ("documents" in contract(model).contract) is is_apart
    collator = DataCollatorForCausalLM(make_word_tokenizer())
    batch = collate(collator, [{"input_ids": [5, 7, 2, 8, 9]}, {"input_ids": [5, 7]}])
    assert compute_losses(model, move_batch(batch, CPU))["loss"].isfinite()


def test_padding_token_beyond_pretrained_rows_is_added(write, tmp_path):
    """The embeddings were made with the index of a row that they get later."""
    tokenizer = make_word_tokenizer()
    make_model(ModelArguments(write("llama")), len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    model = make_model(ModelArguments(str(tmp_path / "model"), objective="clm"), tokenizer)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) == tokenizer.pad_token_id + 1


def test_albert_large_has_published_size():
    for name in ("albert-large", "lean-albert"):
        with torch.device("meta"):
            model = make_model(ModelArguments(f"configs/{name}.json"), 30_000)
        # 17.85 M (arxiv.org/abs/1909.11942, table 1: 18 M), of which the masked-LM head is part
        assert 17.5e6 < model.num_parameters() < 18.5e6


def test_objective_selects_class(write):
    model = make_trainable_model(ModelArguments(write("bert"), objective="clm"), TrainerArguments(), VOCABULARY)
    assert type(model) is transformers.BertLMHeadModel and model.config.is_decoder
    model = make_trainable_model(ModelArguments(write("lean_albert"), objective="mlm"), TrainerArguments(), VOCABULARY)
    assert type(model).__name__ == "LeanAlbertForMaskedLM"


# type, fields of its configuration, arguments, words of the error
UNTRAINABLE = [
    ("bert", {}, dict(objective="mlm_sop"), ["--objective mlm_sop", "bert has mlm, clm"]),
    ("gpt2", {}, dict(objective="mlm"), ["--objective mlm", "gpt2 has clm"]),
    ("vit", {}, {}, ["vit is not a language model"]),
    ("t5", {}, {}, ["t5 needs more than one text"]),
    ("bart", {}, dict(objective="clm"), ["bart needs more than one text"]),
    ("gemma3", {}, {}, ["gemma3 needs more than one text", "the part that reads text"]),
    ("xlnet", {}, {}, ["xlnet sees the tokens that it should predict"]),
    ("ibert", {}, {}, ["ibert collects statistics"]),
    ("esm", {}, {}, ["esm cannot be trained on text alone"]),
    ("bert", dict(hidden_size="64"), {}, ["hidden_size"]),
    ("bert", dict(num_attention_heads=3), {}, ["num_attention_heads 3 must divide hidden_size 64"]),
    ("bert", dict(num_atention_heads=2), {}, ["no field num_atention_heads, did you mean num_attention_heads?"]),
    ("bert", dict(layers=2), {}, ["bert has no field layers: remove it"]),
    ("bert", dict(hidden_act="magic"), {}, ["magic"]),
    ("bert", dict(model_type="magic", auto_map={"AutoConfig": "magic.Magic"}), {}, ["custom code"]),
]


@pytest.mark.parametrize("name, fields, options, words", UNTRAINABLE, ids=[words[-1] for *_, words in UNTRAINABLE])
def test_untrainable_model_is_one_line(write, name, fields, options, words):
    with expect_user_error(*words):
        make_trainable_model(ModelArguments(write(name, **fields), **options), TrainerArguments(), VOCABULARY)


def test_foreign_weights_are_one_line(save):
    args = ModelArguments(model_name_or_path=save("bert"))
    folder = Path(args.model_name_or_path)
    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 120}))
    with expect_user_error("different shapes than its config.json says: bert.encoder"):
        make_model(args, VOCABULARY)
    weights.write_bytes(weights.read_bytes()[:1000])
    with expect_user_error("cannot be made"):
        make_model(args, VOCABULARY)
    with expect_user_error("--config_path"):
        make_model(ModelArguments(model_name_or_path=str(config)), VOCABULARY)


def test_pretrained_mismatched_weights_are_named(save, caplog):
    args = ModelArguments(model_name_or_path=save("bert"))
    make_model(args, VOCABULARY)
    assert not caplog.records
    name, weights = "cls.predictions.transform.dense.weight", Path(args.model_name_or_path) / "model.safetensors"
    changed = {"my_head.weight" if key == name else key: tensor for key, tensor in load_file(weights).items()}
    save_file(changed, weights, {"format": "pt"})
    make_model(args, VOCABULARY)
    what = f"{args.model_name_or_path} (saved by BertForMaskedLM, opened by BertForMaskedLM)"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, f"{what} lacks these weights, which start from random values: {name}"),
        (logging.WARNING, f"{what} has these weights, which are not used: my_head.weight"),
    ]


@pytest.mark.parametrize("name", ["codegen", "modernbert-decoder"])
def test_tokenizer_must_fit_model_type(write, name):
    """They have no padding token, or need numbers for tokens that the tokenizer lacks."""
    model = make_trainable_model(ModelArguments(write(name)), TrainerArguments(), make_word_tokenizer())
    assert model.objective.name == "clm" and getattr(model.config, "eos_token_id", None) in (None, 2)
    # a type whose tokenizer class would change this one
    with expect_user_error("model of type qwen2"):
        make_trainable_model(ModelArguments(write("qwen2")), TrainerArguments(), make_word_tokenizer())


def test_mixture_of_experts_adds_router_loss(write):
    model = make_model(ModelArguments(write("mixtral", output_router_logits=True)), VOCABULARY)
    batch = make_model_batch(1.0)
    losses = compute_losses(model, move_batch(batch, CPU))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    torch.testing.assert_close(losses["loss"], model(**inputs).loss)
    assert losses["loss"] > losses["token_loss"] + 0.1


def make_word_tokenizer(**more: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 57 words, with special tokens in an unusual order."""
    pieces = ["<s>", "a", "</s>", "<unk>", "<mask>", "b", "<pad>", *(f"w{number}" for number in range(50))]
    backend = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    names = dict(pad_token="<pad>", sep_token="</s>", eos_token="</s>", mask_token="<mask>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **more)


def test_roberta_length_excludes_padding_positions(write):
    """RoBERTa counts positions from the id of the tokenizer's padding token."""
    tokenizer = make_word_tokenizer(cls_token="<s>")
    model = make_model(ModelArguments(write("roberta")), tokenizer).eval()
    longest = find_longest_sequence(model)
    assert (model.config.pad_token_id, longest, model.config.vocab_size) == (6, 33, 57)
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))
    for name, expected in (("bert", 40), ("gpt2", 40), ("llama", 40), ("distilbert", 40), ("lean_albert", math.inf)):
        assert find_longest_sequence(make_model(ModelArguments(write(name)), VOCABULARY)) == expected


def test_roles_build_same_architecture(write, save):
    """A pretrained folder and its configuration have the same architecture, and contracts that differ."""
    folder = save("bert")
    torch.rand(3)  # earlier draws change nothing
    model = make_model(ModelArguments(write("bert")), VOCABULARY)
    pretrained = make_model(ModelArguments(model_name_or_path=folder, seed=7), VOCABULARY)
    scratch = make_model(ModelArguments(folder, seed=7), VOCABULARY)
    assert all(map(torch.equal, model.parameters(), pretrained.parameters()))
    assert not torch.equal(scratch.get_input_embeddings().weight, model.get_input_embeddings().weight)
    described = {describe_architecture(m) for m in (model, pretrained, scratch)}
    assert len(described) == 1
    assert model.initial_weights == scratch.initial_weights == "random"
    assert re.fullmatch(r"pretrained \w{12}", pretrained.initial_weights)
    [difference] = find_differences(contract(scratch), [contract(pretrained)])
    assert difference.startswith("initial weights: the run has pretrained") and "you have random" in difference
    # these changes keep the shapes of all weights
    for change in (dict(num_attention_heads=4), dict(hidden_act="relu"), dict(layer_norm_eps=1e-6)):
        assert describe_architecture(make_model(ModelArguments(write("bert", **change)), VOCABULARY)) not in described
    causal = make_model(ModelArguments(write("bert"), objective="clm"), VOCABULARY)
    assert describe_architecture(causal) not in described
    # so does the contract of another model's weights
    other = make_model(ModelArguments(model_name_or_path=save("bert", seed=8)), VOCABULARY)
    assert other.initial_weights != pretrained.initial_weights


def test_pretrained_vocabulary_only_grows(save):
    args = ModelArguments(model_name_or_path=save("bert", size=320))
    stored = transformers.BertForMaskedLM.from_pretrained(args.model_name_or_path)
    rounded, grown, again = (make_model(args, size) for size in (VOCABULARY, 400, 400))
    rows = [m.get_input_embeddings().weight for m in (stored, rounded, grown, again)]
    assert [len(weight) for weight in rows] == [320, 320, 400, 400]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2][:320]) and torch.equal(rows[2], rows[3])
    compute_losses(rounded, move_batch(make_model_batch(), CPU))["loss"].backward()


def test_missing_head_depends_on_seed(minilm):
    tokenizer = load_tokenizer(minilm, BLOCKS)
    made = []
    for seed in (0, 0, 1):
        made.append(make_model(ModelArguments(model_name_or_path=str(minilm), seed=seed), tokenizer))
        torch.rand(5)  # changes nothing
    weights = [model.state_dict() for model in made]
    stored = transformers.AutoModel.from_pretrained(minilm).state_dict()
    for name, tensor in weights[0].items():
        assert tensor.equal(weights[1][name]), name
        if name.startswith("bert."):
            assert tensor.equal(weights[2][name]) and tensor.equal(stored[name.removeprefix("bert.")]), name
    head = "cls.predictions.transform.dense.weight"
    assert not weights[0][head].equal(weights[2][head])
    assert len({model.initial_weights for model in made}) == 1


LEARNING = ("bert", "roberta", "distilbert", "modernbert", "fnet", "albert", "lean_albert", "llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", *LEARNING])
def test_swarm_checkpoint_opens_in_pipeline(start, write, tmp_path, tiny_data, text_data, name):
    """Two trainers, and an auxiliary peer that archives."""
    data = text_data if name in CAUSAL else tiny_data
    # the other models learn more slowly, in larger epochs
    target = 128 if name == "gpt2" else 1024
    shared = {
        "--config_path": write(name),
        "--total_steps": 40,
        "--target_batch_size": target,
        "--target_group_size": 2,
    }
    own = shared | {"--max_steps": 8, "--do_eval": []}
    shared = {name: TRAINER[name] for name in SHARED} | shared
    prefix, archive = make_prefix(), tmp_path / "archive"
    aux_flags = {"--tokenizer_path": data["--tokenizer_path"], "--save_checkpoint_step_interval": 2}
    aux_flags |= {"--refresh_period": 0.3, "--output_dir": archive, "--store_checkpoints": []}
    aux = start("aux", "run_aux_peer.py", "--experiment_prefix", prefix, *LOOPBACK, *flags(shared, aux_flags))
    peers = aux.wait_for(r"--initial_peers (/ip4/\S+)", 60).group(1)
    names = ["first", "second"]
    trainers = [start_trainer(start, tmp_path, who, prefix, peers, data, own, pace=0.3) for who in names]
    for trainer in trainers:
        trainer.assert_clean_end(120)
    assert largest_difference(tmp_path, *names) < 1e-6
    for who in names:
        summary = json.loads((tmp_path / who / "summary.json").read_text())
        assert summary["epoch"] == 8 and summary["final_loss"] < summary["start_loss"] - 0.1, summary
    assert summary["epochs_averaged"] >= 3

    wait_until(lambda: find_checkpoints(archive), 30, "a checkpoint")
    stop(aux)
    folder = find_checkpoints(archive)[-1]
    card = (folder / "README.md").read_text()
    objective = find_objective(ModelArguments(own["--config_path"]))
    assert f"pipeline_tag: {objective.pipeline}" in card and objective.description in card
    assert ("generated_text" if name in CAUSAL else "'score'") in run_card(folder)


def test_unnamed_output_layer_has_same_loss(write, monkeypatch):
    model, batch = make_model(ModelArguments(write("bert")), VOCABULARY).eval(), move_batch(make_model_batch(), CPU)
    expected = compute_losses(model, batch)["loss"]
    monkeypatch.setattr(transformers.BertForMaskedLM, "get_output_embeddings", lambda self: None)
    other = make_model(ModelArguments(write("bert")), VOCABULARY).eval()
    torch.testing.assert_close(compute_losses(other, batch)["loss"], expected)


LORA = {"lora_r": 4}


def test_lora_trains_only_equal_adapters(save):
    base = save("llama")
    model, twin = (make_model(ModelArguments(model_name_or_path=base, **LORA), VOCABULARY) for _ in range(2))
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    optimizer = make_local_optimizer(OptimizerArguments(optim="adamw", warmup_steps=0), make_param_groups(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other) is (name not in trained)


def test_lora_keeps_half_precision_of_base(save, tmp_path):
    """Most large models have files in bfloat16."""
    base = save("llama")
    make_model(ModelArguments(model_name_or_path=base), VOCABULARY).bfloat16().save_pretrained(tmp_path / "half")
    model, whole = (
        make_model(ModelArguments(model_name_or_path=str(path), **LORA), VOCABULARY).eval()
        for path in (tmp_path / "half", base)
    )
    assert {(param.dtype, param.requires_grad) for param in model.parameters()} == {
        (torch.bfloat16, False),
        (torch.float32, True),
    }
    assert model.keeps_documents_apart
    try_out(model, "")
    batch = move_batch(make_model_batch(), CPU)
    losses = [compute_losses(each, batch)["loss"] for each in (model, whole)]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    for loss in losses:
        loss.backward()
    gradients = [[param.grad for param in each.parameters() if param.requires_grad] for each in (model, whole)]
    norms = [torch.stack([gradient.norm() for gradient in each]) for each in gradients]
    torch.testing.assert_close(*norms, rtol=0.1, atol=1e-3)
    # a model that sees later tokens differs by more than rounding
    logits = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert is_same(logits, logits * 1.01) and not is_same(logits, logits.flip(0))


def test_lora_contract_names_base_and_rank(save):
    def name_differences(seed: int, **changes) -> set[str]:
        args = (ModelArguments(model_name_or_path=save("llama", s), **LORA | c) for s, c in ((0, {}), (seed, changes)))
        mine, other = (contract(make_model(each, VOCABULARY)) for each in args)
        return {text.split(":")[0] for text in find_differences(mine, [other])}

    assert name_differences(0) == set()
    assert name_differences(1) == {"initial weights"}
    assert name_differences(0, lora_r=8) == {"initial weights", "model shapes"}


@pytest.mark.parametrize(
    "name, adapted, auto_class, output",
    [
        ("llama", LORA, transformers.AutoModelForCausalLM, "logits"),
        # transformers does not have its class
        ("lean_albert", {"lora_r": 4}, transformers.AutoModelForPreTraining, "prediction_logits"),
    ],
)
def test_merged_adapters_compute_the_same(save, tmp_path, name, adapted, auto_class, output):
    model = make_model(ModelArguments(model_name_or_path=save(name), **adapted), VOCABULARY).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "lora_B" in key:
                param.normal_(std=0.1)
    folder, merged, ids = tmp_path / "model", tmp_path / "merged", torch.arange(20)[None]
    write_weights(model, None, folder)
    make_word_tokenizer().save_pretrained(folder)
    run_python("-m", "experiment.merge", folder, merged, expect=0)
    assert not (merged / "adapter_config.json").exists()
    for each in (folder, merged):
        opened = auto_class.from_pretrained(each).eval()
        torch.testing.assert_close(opened(ids)[output], model(input_ids=ids)[output])
    if name == "llama":  # errors before the model is read
        again = run_python("-m", "experiment.merge", folder, merged, expect=2)
        assert "exists already" in again.stderr
        assert "has no adapters" in run_python("-m", "experiment.merge", merged, tmp_path / "x", expect=2).stderr


def sum_tensor_bytes() -> int:
    """Return the size of all tensors of this process, which may share memory."""
    kinds = torch.Tensor, torch.nn.Parameter  # earlier tests may have left others, which have no memory
    tensors = [it for it in gc.get_objects() if type(it) in kinds and it.device.type == "cpu"]
    return sum({it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in tensors}.values())


def test_merge_holds_weights_once(save, tmp_path, monkeypatch):
    """The merged model still has one matrix for input and output, and the adapters' folder may have several files."""
    model = make_model(ModelArguments(model_name_or_path=save("gpt2"), **LORA), VOCABULARY).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "lora_B" in key:
                param.normal_(std=0.1)
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 200_000)
    write_weights(model, None, tmp_path / "model")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    make_word_tokenizer().save_pretrained(tmp_path / "model")
    before = sum_tensor_bytes()
    held = []
    save_pretrained = transformers.PreTrainedModel.save_pretrained

    def measure(self, *args, **options) -> None:
        held.append(sum_tensor_bytes() - before)
        save_pretrained(self, *args, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", measure)
    merge(tmp_path / "model", tmp_path / "merged")
    size = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    assert held == [pytest.approx(size, rel=0.2)]
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert opened.lm_head.weight is opened.transformer.wte.weight
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(opened(ids).logits, model(input_ids=ids).logits)


def test_finetune_with_adapters_names_merge(save, tmp_path):
    """transformers freezes the weights of a folder with adapters."""
    model = make_model(ModelArguments(model_name_or_path=save("lean_albert"), lora_r=4), VOCABULARY)
    write_weights(model, None, tmp_path / "model")
    args = finetune_mlm.FinetuneArguments(task="terra", checkpoint=str(tmp_path / "model"))
    with expect_user_error("model has adapters", f"python -m experiment.merge {tmp_path / 'model'}"):
        finetune_mlm.load_pretrained(args)


def test_lora_wrong_flags_are_one_line():
    with expect_user_error("--lora_r needs --model_name_or_path"):
        ModelArguments(lora_r=4)
