"""LeanALBERT: the same numbers as a plain implementation and as RuLeanALBERT's own, at a fraction of the memory."""

import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from processes import ROOT, run_python
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.flop_counter import FlopCounterMode

from arguments import ModelArguments, TrainerArguments
from common.console import UserError
from experiment.objectives import compute_losses
from models import lean_albert
from models.lean_albert import LeanAlbertConfig, LeanAlbertForPreTraining
from models.pretrained import LAYER, load_ruleanalbert, rename_state
from training.model import make_trainable_model, move_batch

sys.path.append(str(ROOT / "benchmarks"))
from bench_model import LENGTH, make_batch, make_lean, measure_kept

VOCABULARY, LONG = 60, 12
SMALL = dict(vocab_size=VOCABULARY, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=4)
# weights larger than SmallInit's, so that every part matters
SMALL |= dict(intermediate_size=24, max_position_embeddings=LONG, initializer_range=0.15)
SHARING = {
    "own layers": {},
    "one group": dict(num_hidden_groups=1),
    "inner groups": dict(num_hidden_groups=2, num_inner_groups=2),
    "shared matrices": dict(share_large_matrices=True),
    "shared with adapters": dict(share_large_matrices=1, adapter_dim=3),
    "two sets in turns": dict(num_inner_groups=2, share_large_matrices=2, num_inner_matrices=2, adapter_dim=3),
}
BLOCKS = {
    f"{position}{' gated' * gated}{' sandwich' * sandwich}": {"position_embedding_type": position}
    | {"hidden_act_gated": gated, "sandwich_norm": sandwich}
    for position, gated, sandwich in itertools.product(("rotary", "absolute"), (False, True), (False, True))
}
OTHERS = {
    "exact gelu": dict(hidden_act="gelu"),
    "relu": dict(hidden_act="relu", hidden_act_gated=True),
    "no bias of queries": dict(attn_qkv_bias=False),
    "no bias of outputs": dict(out_proj_bias=False),
    "sandwich with biases": dict(sandwich_norm=True, out_proj_bias=True),
    "another rotary base": dict(rotary_embedding_base=100),
}
OPTIONS = OTHERS | {f"{block}, {sharing}": BLOCKS[block] | SHARING[sharing] for block in BLOCKS for sharing in SHARING}
# each block with one kind of sharing, and each kind of sharing with the simplest and the largest block
QUICK = {name for name in OPTIONS if re.search("^rotary, |^rotary gated sandwich, |, shared with adapters$", name)}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(OPTIONS.keys() - OTHERS.keys() - QUICK)]


def make_inputs(length: int = LONG, padding: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        mask[0, length // 2 :] = mask[1, -1:] = 0
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, ids, -100)
    labels[2, 0] = 5
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": (torch.arange(length) >= length // 2).long().expand(3, -1),
        "labels": labels.masked_fill(mask == 0, -100),
        "sentence_order_label": torch.arange(3) % 2,
    }


def make_model_of(options: dict) -> nn.Module:
    torch.manual_seed(0)
    model = LeanAlbertForPreTraining(LeanAlbertConfig(**SMALL | options))
    with torch.no_grad():  # parameters that start as 0 or 1 must matter too
        for param in model.parameters():
            if param.dim() == 1 or param.shape[1] == 3:
                param.add_(torch.randn_like(param) * 0.2)
    model.get_input_embeddings().padding_idx = None  # by which torch leaves out the gradient of padding
    return model.train()


def compute_plainly(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute the architecture from the model's weights in the simplest way, without shared code or fused kernels."""
    config, weights = model.config, dict(model.named_parameters(remove_duplicate=False))
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    activations = {"relu": torch.relu, "gelu": gelu, "gelu_fused": lambda x: gelu(x, approximate="tanh")}
    act = activations[config.hidden_act]

    def norm(hidden, name, eps=config.layer_norm_eps):
        mean, variance = hidden.mean(-1, keepdim=True), hidden.var(-1, keepdim=True, unbiased=False)
        return (hidden - mean) / (variance + eps).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def dense(hidden, name):
        return hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def layer_dense(hidden, layer, part, matrices):
        output = hidden @ weights[f"albert.matrices.{matrices}.{part}"].T
        own = f"albert.layers.{layer}.{part}"
        if f"{own}.bias" in weights:
            output = output + weights[f"{own}.bias"]
        if config.adapter_dim:
            output = output + hidden @ weights[f"{own}.adapter_first"].T @ weights[f"{own}.adapter_second"].T
        return output

    def turn(states):  # pair (i, i + size / 2) of each head as one complex number
        angles = torch.arange(states.shape[1], dtype=torch.float64)[:, None] / config.rotary_embedding_base ** (
            torch.arange(0, size, 2, dtype=torch.float64) / size
        )
        wide = torch.complex(*states.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((wide.real, wide.imag), dim=-1).to(states.dtype)

    ids, length = inputs["input_ids"], inputs["input_ids"].shape[1]
    hidden = weights["albert.embeddings.word_embeddings.weight"][ids]
    hidden = hidden + weights["albert.embeddings.token_type_embeddings.weight"][inputs["token_type_ids"]]
    if config.position_embedding_type == "absolute":
        hidden = hidden + weights["albert.embeddings.position_embeddings.weight"][:length]
    hidden = dense(norm(hidden, "albert.embeddings.layer_norm"), "albert.embeddings.embedding_hidden_mapping")

    own_layers = config.num_hidden_groups * config.num_inner_groups
    for step in range(config.num_hidden_layers):
        group = int(step / (config.num_hidden_layers / config.num_hidden_groups))
        for layer in range(group * config.num_inner_groups, (group + 1) * config.num_inner_groups):
            matrices = layer
            if config.share_large_matrices:
                turns = config.num_inner_matrices
                matrices = layer * int(config.share_large_matrices) // own_layers * turns + layer % turns
            name = f"albert.layers.{layer}"
            states = layer_dense(norm(hidden, f"{name}.attention_norm"), layer, "qkv", matrices)
            query, key, value = (part.unflatten(-1, (heads, size)) for part in states.chunk(3, dim=-1))
            if config.position_embedding_type == "rotary":
                query, key = turn(query), turn(key)
            scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
            if "attention_mask" in inputs:
                hole = torch.finfo(scores.dtype).min
                scores = scores.masked_fill(inputs["attention_mask"][:, None, None, :] == 0, hole)
            mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2)
            output = layer_dense(mixed, layer, "attention_output", matrices)
            hidden = hidden + (norm(output, f"{name}.attention_sandwich_norm") if config.sandwich_norm else output)
            wide = layer_dense(norm(hidden, f"{name}.ffn_norm"), layer, "ffn_input", matrices)
            if config.hidden_act_gated:
                wide = act(wide[..., : config.intermediate_size]) * wide[..., config.intermediate_size :]
            else:
                wide = act(wide)
            output = layer_dense(wide, layer, "ffn_output", matrices)
            hidden = hidden + (norm(output, f"{name}.ffn_sandwich_norm") if config.sandwich_norm else output)
    hidden = norm(hidden, "albert.post_layer_norm")

    words = norm(act(dense(hidden, "predictions.dense")), "predictions.layer_norm", eps=1e-5)
    words = words @ weights["albert.embeddings.word_embeddings.weight"].T + weights["predictions.decoder.bias"]
    order = dense(torch.tanh(dense(hidden[:, 0], "albert.pooler")), "sop_classifier.classifier")
    loss = cross_entropy(words.flatten(0, 1), inputs["labels"].flatten())
    loss = loss + cross_entropy(order, inputs["sentence_order_label"])
    return {"loss": loss, "prediction_logits": words, "sop_logits": order}


def assert_same(model: nn.Module, inputs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare logits, loss and gradients, relative to the largest value of each tensor."""

    def compare(name, found, expected):
        difference = (found - expected).abs().max().item()
        assert difference <= tolerance * max(expected.abs().max().item(), 1e-2), name

    model.zero_grad()
    expected = compute_plainly(model, inputs)
    gradients = torch.autograd.grad(expected["loss"], [*model.parameters()])
    outputs = model(**inputs)
    outputs["loss"].backward()
    compare("loss", outputs["loss"], expected["loss"])
    at_labels = expected["prediction_logits"][inputs["labels"] != -100]
    compare("logits at labels", outputs["prediction_logits"], at_labels)
    for (name, param), gradient in zip(model.named_parameters(), gradients, strict=True):
        compare(name, param.grad, gradient)
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    model.train()
    for name in expected:
        compare(name, outputs[name], expected[name])


@pytest.mark.parametrize("name", [*OTHERS, *sorted(QUICK), *SLOW])
def test_lean_albert_matches_plain_implementation(name):
    model = make_model_of(OPTIONS[name])
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        for padding in (True, False):
            # the rounding of 32 bits depends on the processor: 1.05e-5 on an Intel Xeon
            assert_same(model, make_inputs(padding=padding), 2e-5)
    assert_same(model.double(), make_inputs(), 1e-10)


def test_lean_albert_bf16_is_close():
    inputs = make_inputs()
    model = make_model_of(dict(sandwich_norm=True, hidden_act_gated=True) | SHARING["shared with adapters"])
    gradients = torch.autograd.grad(model(**inputs).loss, [*model.parameters()])
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**inputs)
            assert model.albert(inputs["input_ids"]).last_hidden_state.dtype == torch.float32
        outputs.loss.backward()
        for (name, param), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert param.grad.dtype == torch.float32
            assert (param.grad - gradient).norm() / gradient.norm().clamp(min=1e-3) < 0.2, name
    loss = model.bfloat16()(**inputs).loss  # all weights in bf16
    loss.backward()
    assert loss.item() == pytest.approx(outputs.loss.item(), rel=0.05)


def test_backward_repeats_no_product():
    """The backward pass recomputes only the cheap part before the product."""
    weight, hidden = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    for rank, repeated in ((0, 0), (2, 2 * 3 * 2 * (4 + 5))):
        layer = lean_albert.SharedLinear(4, 5, True, rank)
        with FlopCounterMode(display=False) as forward:
            output = lean_albert.recompute(lambda hidden, layer=layer: layer(hidden.relu(), weight), hidden)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        assert backward.get_total_flops() == 2 * forward.get_total_flops() + repeated


@pytest.mark.parametrize("position", ["rotary", "absolute"])
def test_padding_rows_are_finite(position):
    inputs, model = make_inputs(), make_model_of(dict(position_embedding_type=position))
    expected = model(**{name: value[1:] for name, value in inputs.items()})
    inputs["attention_mask"][0], inputs["labels"][0] = 0, -100
    outputs = model(**inputs)
    outputs.loss.backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())
    torch.testing.assert_close(outputs.prediction_logits, expected.prediction_logits)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**inputs).sop_logits.isfinite().all()


def test_lean_albert_accepts_longest_sequence():
    long = make_inputs(length=3 * LONG)
    assert_same(make_model_of({}).double(), long, 1e-10)
    with pytest.raises(ValueError, match=f"sequence of {3 * LONG} tokens .* max_position_embeddings {LONG}.*rotary"):
        make_model_of(dict(position_embedding_type="absolute"))(**long)


@pytest.mark.parametrize(
    "options, cure",
    [
        (dict(num_attention_heads=5), "must be a multiple of num_attention_heads"),
        (dict(num_attention_heads=16), "heads of even size"),
        (dict(position_embedding_type="relative"), "rotary or absolute"),
        (dict(num_hidden_groups=5), "between 1 and num_hidden_layers"),
        (dict(adapter_dim=4), "need share_large_matrices"),
        (dict(num_inner_groups=0), "must be at least 1"),
        (dict(share_large_matrices=-1), "must be between 0"),
        (dict(share_large_matrices=3, num_inner_matrices=2), "must be between 0 and 4"),
        (dict(hidden_dropout_prob=0.1), "has no hidden_dropout_prob"),
        (dict(block_size=32), "block_size is not supported"),
        (dict(hidden_act="gulp"), "hidden_act gulp is unknown"),
    ],
)
def test_invalid_config_names_reason(options, cure):
    with pytest.raises(ValueError, match=cure):
        LeanAlbertConfig(**SMALL | options)


def test_small_init_has_expected_std():
    torch.manual_seed(0)
    model = LeanAlbertForPreTraining(LeanAlbertConfig(**SMALL | dict(hidden_size=64, initializer_range=None)))
    expected = (2 / (5 * 64)) ** 0.5
    for param in (model.albert.matrices[0].ffn_input, model.albert.pooler.weight, model.predictions.dense.weight):
        assert param.std().item() == pytest.approx(expected, rel=0.1)
    model = LeanAlbertForPreTraining(LeanAlbertConfig(**SMALL | SHARING["shared with adapters"]))
    assert model.albert.layers[0].qkv.adapter_first.std() > 0 and not model.albert.layers[0].qkv.adapter_second.any()


def test_gradient_checkpointing_needs_less_memory():
    args, batch = ModelArguments("configs/lean-demo.json"), move_batch(make_inputs(), torch.device("cpu"))
    flags = TrainerArguments(gradient_checkpointing=True), TrainerArguments()
    models = [make_trainable_model(args, each, VOCABULARY) for each in flags]
    kept = [measure_kept(lambda m=m: compute_losses(m, batch)["loss"], m) for m in models]
    assert kept[0] < kept[1]
    with pytest.raises(UserError, match="configs/lean-albert.json"):
        make_trainable_model(ModelArguments("configs/demo.json"), flags[0], VOCABULARY)


def test_saved_folder_opens_with_auto_classes(tmp_path):
    model = make_model_of(dict(position_embedding_type="absolute") | SHARING["shared with adapters"]).eval()
    model.save_pretrained(tmp_path)
    call = {name: value for name, value in make_inputs().items() if "label" not in name}
    expected, hidden = model(**call), model.albert(**call)
    for auto, kind, name, value in (
        (transformers.AutoModelForPreTraining, LeanAlbertForPreTraining, "sop_logits", expected.sop_logits),
        (transformers.AutoModelForMaskedLM, lean_albert.LeanAlbertForMaskedLM, "logits", expected.prediction_logits),
        (transformers.AutoModel, lean_albert.LeanAlbertModel, "pooler_output", hidden.pooler_output),
    ):
        loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is kind and not info["missing_keys"] and loaded(**call)[name].equal(value)


def test_saved_folder_includes_code(tmp_path):
    model, inputs = make_model_of({}).eval(), make_inputs()
    model.save_pretrained(tmp_path / "model")
    torch.save(inputs["input_ids"], tmp_path / "ids.pt")
    program = f"""
import torch, transformers
transformers.dynamic_module_utils.HF_MODULES_CACHE = "{tmp_path / "cache"}"  # empty
model = transformers.AutoModelForMaskedLM.from_pretrained("model", trust_remote_code=True)
torch.save(model(torch.load("ids.pt")).logits, "logits.pt")
"""
    run_python("-c", program, cwd=tmp_path, expect=0)
    assert list((tmp_path / "cache").rglob("lean_albert.py"))
    assert torch.load(tmp_path / "logits.pt").equal(model(inputs["input_ids"]).prediction_logits)


def test_lean_albert_classifier_matches_encoder(tmp_path):
    make_model_of({}).save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).train()
    assert type(model) is lean_albert.LeanAlbertForSequenceClassification and model.dropout.p == 0.1
    inputs, labels = {name: value for name, value in make_inputs().items() if "label" not in name}, torch.arange(3)
    outputs, encoded = model.eval()(**inputs, labels=labels), model.albert(**inputs)
    torch.testing.assert_close(outputs.logits, model.classifier(encoded.pooler_output))
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.logits, labels))


def test_lean_albert_memory_is_below_yardstick():
    """benchmarks/bench_model.py has times too, and other models to compare with."""
    shape = dict(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048, vocab_size=8000)
    batch = make_batch(8000, 1)
    for options, limit in (({}, 225), (dict(checkpointing=True), 100)):
        model = make_lean(shape, **options).train()
        kept = measure_kept(lambda model=model: model(**batch)["loss"], model)
        # this batch has a quarter of 4 x 512 tokens
        assert LENGTH == 512 and kept < limit * 2**20 / 4
        with torch.no_grad():
            assert measure_kept(lambda model=model: model(**batch)["loss"], model) == 0


@pytest.fixture
def reference(shared_data) -> Path:
    """The folder of RuLeanALBERT's own states and numbers."""
    return shared_data / "lean_albert_reference"


@pytest.mark.parametrize("form", ["safetensors", "safetensors, tied", "pth", "pth of a trainer"])
@pytest.mark.parametrize("name", ["plain_rotary", "gated_sandwich"])
def test_ruleanalbert_state_gives_same_logits(name, form, reference, tmp_path):
    parts = defaultdict(dict)
    for key, tensor in load_file(reference / f"{name}.safetensors").items():
        part, rest = key.split(".", 1)
        parts[part][rest] = tensor.clone()
    path = tmp_path / f"state.{re.match('[a-z]+', form)[0]}"
    if "safetensors" in form:
        if "tied" in form:
            del parts["state"]["predictions.decoder.weight"], parts["state"]["predictions.decoder.bias"]
        save_file(parts["state"], path)
    else:
        torch.save({"model": parts["state"], "local_epoch": 7} if "trainer" in form else parts["state"], path)

    model = load_ruleanalbert(reference / f"{name}.config.json", path)
    if "tied" in form or "trainer" in form:
        model.activation_checkpointing_enable()
    outputs = model(**parts["in"])
    for key in ("prediction_logits", "sop_logits"):
        torch.testing.assert_close(outputs[key], parts["out"][key], rtol=1e-4, atol=1e-5)
    assert outputs.loss.item() == pytest.approx(parts["out"]["loss"].item(), rel=1e-5)
    model.train()(**parts["in"]).loss.backward()
    gradients = rename_state(parts["grad"], model.config)
    for key, param in model.named_parameters():
        torch.testing.assert_close(param.grad, gradients.pop(key), rtol=1e-4, atol=1e-5)
    assert not gradients


def test_ruleanalbert_names_all_map(reference):
    known = json.loads((reference / "state_names.json").read_text())
    for name, variant in known["variants"].items():
        config = LeanAlbertConfig(**known["common"], **variant["options"])
        state, shared = {}, {}
        for number, (key, shape) in enumerate(variant["state"].items()):
            found, state[key] = LAYER.fullmatch(key), torch.full(shape, number / 7)
            if found and found[4] == "shared_matrix.weight":
                layer = int(found[1]) * config.num_inner_groups + int(found[2])
                state[key] = shared.setdefault((found[3], config.find_matrices(layer)), state[key])
        state["predictions.decoder.weight"] = state["albert.embeddings.word_embeddings.weight"]
        state["predictions.decoder.bias"] = state["predictions.bias"]
        model = LeanAlbertForPreTraining(config)
        model.load_state_dict(rename_state(state, config))  # strict: each name once, each shape right
        assert len(model.albert.matrices) == (len(shared) // 4), name
        values = [param.flatten()[0].item() for param in model.parameters()]
        assert len(set(values)) == len(values), name


def test_ruleanalbert_foreign_state_is_one_error(reference, tmp_path):
    tensors, config = load_file(reference / "plain_rotary.safetensors"), tmp_path / "config.json"
    state = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("state.")}
    torch.save(state, tmp_path / "state.pth")

    def refuse(config: Path, state: Path, words: str) -> None:
        with pytest.raises(ValueError, match=f"(?s){state} is not a state .*{words}"):
            load_ruleanalbert(config, state)

    refuse(reference / "gated_sandwich.config.json", tmp_path / "state.pth", "sandwich_norm")
    options = json.loads((reference / "plain_rotary.config.json").read_text())
    config.write_text(json.dumps(options | {"share_large_matrices": 1}))
    refuse(config, tmp_path / "state.pth", "should be shared")
    for name in ("state.pth", "state.safetensors"):
        (tmp_path / name).write_bytes(b"no state")
        refuse(config, tmp_path / name, "config.json")
    torch.save([1, 2], tmp_path / "state.pth")
    for text in (config.read_text(), "{"):
        config.write_text(text)
        refuse(config, tmp_path / "state.pth", "config.json")
