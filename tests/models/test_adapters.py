"""LoRA: adapters of a pretrained model are trained, saved, averaged, merged."""

import pytest
import torch
import transformers
from mains import expect_user_error
from processes import run_python
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

import finetune_mlm
from arguments import AveragingArguments, ModelArguments, OptimizerArguments
from experiment.model import make_model
from experiment.optimizer import make_contract, make_local_optimizer, make_param_groups
from models.lean_albert import LeanAlbertConfig, LeanAlbertForPreTraining
from swarm.contract import find_differences
from training.checkpoint import write_weights

pytest.importorskip("peft")
LORA = {"lora_r": 4, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]}


def make_base(folder, vocab_size: int, seed: int = 0) -> str:
    """Save a small Llama with random weights as the pretrained model."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=vocab_size, max_position_embeddings=64)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_lora_trains_only_equal_adapters(tmp_path):
    base = make_base(tmp_path / "base", 300)
    model, twin = (make_model(ModelArguments(model_name_or_path=base, **LORA), 300) for _ in range(2))
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert len(trained) == 2 * 3 * 2 and all("lora_" in name for name in trained)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    optimizer = make_local_optimizer(OptimizerArguments(optim="adamw", warmup_steps=0), make_param_groups(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other) is (name not in trained)


def test_lora_contract_names_base_and_rank(tmp_path):
    def describe(seed: int = 0, **changes) -> object:
        base = make_base(tmp_path / f"base{seed}", 300, seed)
        model = make_model(ModelArguments(model_name_or_path=base, **LORA | changes), 300)
        return make_contract(model, "a" * 64, OptimizerArguments(), AveragingArguments())

    mine = describe()
    assert find_differences(mine, [describe()]) == []
    assert [text.split(":")[0] for text in find_differences(mine, [describe(seed=1)])] == ["initial weights"]
    names = {text.split(":")[0] for text in find_differences(mine, [describe(lora_r=8)])}
    assert names == {"initial weights", "model shapes"}


def make_lean_base(folder, vocab_size: int) -> str:
    """Save a small LeanALBERT, whose class transformers does not have."""
    sizes = dict(embedding_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    LeanAlbertForPreTraining(LeanAlbertConfig(vocab_size=vocab_size, **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "make, adapted, auto_class, output",
    [
        (make_base, LORA, transformers.AutoModelForCausalLM, "logits"),
        (make_lean_base, {"lora_r": 4}, transformers.AutoModelForPreTraining, "prediction_logits"),
    ],
    ids=["llama", "lean_albert"],
)
def test_merged_adapters_compute_the_same(tmp_path, make, adapted, auto_class, output):
    model = make_model(ModelArguments(model_name_or_path=make(tmp_path / "base", 300), **adapted), 300).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    folder, merged, ids = tmp_path / "model", tmp_path / "merged", torch.arange(20)[None]
    write_weights(model, None, folder)
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    run_python("-m", "experiment.merge", folder, merged, expect=0)
    expected = model(input_ids=ids)[output]
    assert not (merged / "adapter_config.json").exists()
    for each in (folder, merged):
        opened = auto_class.from_pretrained(each).eval()
        torch.testing.assert_close(opened(ids)[output], expected)
    again = run_python("-m", "experiment.merge", folder, merged, expect=2)
    assert "exists already" in again.stderr
    assert "has no adapters" in run_python("-m", "experiment.merge", merged, tmp_path / "x", expect=2).stderr


def test_finetune_with_adapters_names_merge(tmp_path):
    """transformers freezes the weights of a folder with adapters."""
    model = make_model(ModelArguments(model_name_or_path=make_lean_base(tmp_path / "base", 300), lora_r=4), 300)
    write_weights(model, None, tmp_path / "model")
    args = finetune_mlm.FinetuneArguments(task="terra", checkpoint=str(tmp_path / "model"))
    with expect_user_error("model has adapters", f"python -m experiment.merge {tmp_path / 'model'}"):
        finetune_mlm.load_pretrained(args)


def test_lora_wrong_flags_are_one_line(tmp_path):
    with expect_user_error("--lora_r needs --model_name_or_path"):
        ModelArguments(lora_r=4)
    options = {**LORA, "model_name_or_path": make_base(tmp_path / "base", 300), "lora_target_modules": ["nothing"]}
    with expect_user_error("--lora_target_modules: ", "choose some of ", "q_proj"):
        make_model(ModelArguments(**options), 300)
