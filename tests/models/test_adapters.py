"""LoRA: adapters of a pretrained model are trained, saved, averaged, merged."""

import json
import os

import pytest
import torch
import transformers
from processes import LOOPBACK, make_prefix, run_python, wait_until
from safetensors.torch import load_file
from swarms import TRAINER, choose_trainer, flags, history
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from arguments import AveragingArguments, ModelArguments, OptimizerArguments
from common.console import UserError
from experiment.model import make_model
from experiment.optimizer import make_contract, make_local_optimizer, make_param_groups
from swarm.contract import find_differences
from training.checkpoint import find_checkpoints, write_weights

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


def test_merged_adapters_compute_the_same(tmp_path):
    model = make_model(ModelArguments(model_name_or_path=make_base(tmp_path / "base", 300), **LORA), 300).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    folder, merged, ids = tmp_path / "model", tmp_path / "merged", torch.arange(20)[None]
    write_weights(model, None, folder)
    make_tokenizer().save_pretrained(folder)
    run_python("-m", "experiment.merge", folder, merged, expect=0)
    expected = model(input_ids=ids).logits
    assert not (merged / "adapter_config.json").exists()
    for each in (folder, merged):
        opened = transformers.AutoModelForCausalLM.from_pretrained(each).eval()
        torch.testing.assert_close(opened(ids).logits, expected)
    again = run_python("-m", "experiment.merge", folder, merged, expect=2)
    assert "exists already" in again.stderr
    assert "has no adapters" in run_python("-m", "experiment.merge", merged, tmp_path / "x", expect=2).stderr


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")), unk_token="<unk>"
    )


def test_lora_wrong_flags_are_one_line(tmp_path):
    with pytest.raises(UserError, match="--lora_r needs --model_name_or_path"):
        ModelArguments(lora_r=4)
    arguments = ModelArguments(
        model_name_or_path=make_base(tmp_path / "base", 300), lora_r=4, lora_target_modules=["nothing"]
    )
    with pytest.raises(UserError, match="--lora_target_modules: .*choose some of .*q_proj"):
        make_model(arguments, 300)


@pytest.mark.slow
def test_lora_swarm_archives_and_resumes(start, tmp_path, text_data):
    """Two trainers, an auxiliary peer that keeps their states, a late trainer, and a restart of that one."""
    size = len(json.loads((text_data["--tokenizer_path"] / "tokenizer.json").read_text())["model"]["vocab"])
    base = make_base(tmp_path / "base", size)
    own = {"--model_name_or_path": base, "--lora_r": 8, "--lora_target_modules": ["q_proj", "v_proj", "down_proj"]}
    own |= {
        "--load_state_compression": "none",
        "--learning_rate": 0.02,
        "--target_batch_size": 256,
        "--total_steps": 40,
        "--target_group_size": 3,
    }
    shared = {name: value for name, value in (TRAINER | own).items() if not name.startswith(("--per", "--grad", "--d"))}
    shared.pop("--config_path")
    prefix, archive, names = make_prefix(), tmp_path / "archive", ("first", "second", "late")
    aux_flags = {"--tokenizer_path": text_data["--tokenizer_path"], "--save_checkpoint_step_interval": 2}
    aux_flags |= {"--refresh_period": 0.3, "--output_dir": archive, "--report_to": "none", "--store_checkpoints": []}
    aux = start("aux", "run_aux_peer.py", "--experiment_prefix", prefix, *LOOPBACK, *flags(shared, aux_flags))
    peers = aux.wait_for(r"--initial_peers (/ip4/\S+)", 60).group(1)

    def begin(name: str, last: int):
        run = {"--experiment_prefix": prefix, "--initial_peers": peers, "--output_dir": tmp_path / name}
        groups = [TRAINER | own, text_data, run, {"--max_steps": last, "--do_eval": []}]
        groups[0].pop("--config_path")
        return start(name, *choose_trainer(0.1), *LOOPBACK, *flags(*groups))

    trainers = [begin(name, 14) for name in names[:2]]
    wait_until(lambda: history(tmp_path, "first").get(3), 120, "epoch 3")
    trainers.append(begin("late", 14))
    for trainer in trainers:
        trainer.assert_clean_end(180)
    models = [
        load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in ("first", "second", "late")
    ]
    for other in models[1:]:
        assert max((models[0][key] - other[key]).abs().max() for key in other) < 1e-5
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert summary["final_loss"] < summary["start_loss"] - 0.05 and summary["epochs_averaged"] >= 8
    again = begin("late", 16)
    again.assert_clean_end(180)
    assert json.loads((tmp_path / "late" / "summary.json").read_text())["epoch"] == 16

    aux.interrupt()
    aux.assert_clean_end(30)
    folder = find_checkpoints(archive)[-1]
    assert os.path.getsize(folder / "adapter_model.safetensors") < os.path.getsize(folder / "model.safetensors") / 4
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert opened(torch.arange(8)[None]).logits.isfinite().all()
