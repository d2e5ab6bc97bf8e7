"""finetune_mlm.py and predict_on_lidirus.py, run as users do: they learn, resume, and refuse wrong input."""

import csv
import json
import os
import resource
import shutil
from pathlib import Path

import finetune_data as toys
import pytest
import torch
from mains import expect_user_error, refuse, run_main
from processes import wait_until
from safetensors.torch import load_file, save_file
from sklearn.metrics import accuracy_score, matthews_corrcoef
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as Processor
from tokenizers.trainers import BpeTrainer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

import finetune_mlm
import predict_on_lidirus
from experiment.tasks import TASKS, load_examples, load_task_file
from finetune_mlm import FinetuneArguments, encode, load_pretrained, make_task_model
from models.lean_albert import LeanAlbertForPreTraining
from models.pretrained import MODULES, Pretrained, check_tokenizer, load_tokenizer

CPU = torch.device("cpu")
QUICK = ["--batch-size", "16", "--learning_rate", "2e-3", "--dropout", "0"]


def expect_refusal(words: list[str], folder: Path, *flags: object) -> None:
    """Check that finetune_mlm.py refuses these flags with these words, and writes nothing."""
    with expect_user_error(*words):
        tune(folder, *flags)
    assert not (folder / "run").exists()


def read_results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def read_labels(path: Path) -> list:
    return [json.loads(line)["label"] for line in path.read_text().splitlines()]


def tune(folder: Path, *flags: object) -> dict:
    """Run finetune_mlm.py on the data of a folder, with folder/run for its results, and return these."""
    run_main(finetune_mlm, *flags, "-d", folder, "--output_dir", folder / "run")
    return read_results(folder / "run")


def drop_times(seeds: list[dict]) -> list[dict]:
    return [{name: value for name, value in seed.items() if name != "seconds"} for seed in seeds]


@pytest.fixture(scope="module")
def terra_run(toy_model, tmp_path_factory) -> Path:
    """The folder of a run with two seeds on a toy task, next to data/ with that task."""
    folder = tmp_path_factory.mktemp("terra")
    toys.write_toy_task(folder / "data", "TERRa", toys.make_toy_pairs())
    run_main(finetune_mlm, *terra_command(toy_model, folder / "run")[1:])
    return folder / "run"


def terra_command(model: Path, folder: Path) -> list[object]:
    command = ["finetune_mlm.py", "-t", "terra", "--checkpoint", model, "--data-dir", folder.parent / "data"]
    return [*command, *QUICK, "--num-seeds", "2", "--num_train_epochs", "15", "--output_dir", folder]


def test_finetune_learns_classes(terra_run):
    results, records = read_results(terra_run), toys.make_toy_pairs()
    assert (results["task"], results["metric"], results["majority"]) == ("TERRa", "accuracy", {"accuracy": 0.5})
    for name, count in (("examples", 32), ("texts_cut", 0)):
        assert results[name] == {"train": count, "validation": count, "test": count}
    scores = [seed["metrics"]["accuracy"] for seed in results["seeds"]]
    assert min(scores) >= 0.95
    assert results["mean"]["accuracy"] == sum(scores) / 2
    assert results["standard_deviation"]["accuracy"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    for number, seed in enumerate(results["seeds"]):
        history = [epoch["accuracy"] for epoch in seed["history"]]
        assert seed["seed"] == number and len(history) == 15
        # the first of the best epochs
        assert seed["best_epoch"] == history.index(max(history)) + 1 and seed["metrics"]["accuracy"] == max(history)
        assert seed["history"][-1]["train_loss"] < seed["history"][0]["train_loss"] / 3
    assert results["seeds"][0]["history"] != results["seeds"][1]["history"]
    # the saved model and the predictions are those of the best seed
    assert scores[results["best_seed"]] == max(scores)
    labels = read_labels(terra_run / "TERRa.jsonl")
    assert labels == predict_plainly(terra_run / "model", records, ("premise", "hypothesis"))
    right = sum(label == record["label"] for label, record in zip(labels, records, strict=True))
    assert right / 32 == max(scores)


def predict_plainly(folder: Path, records: list[dict], columns: tuple[str, str]) -> list[str]:
    """Predict with transformers alone, one record at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [[record[column] for column in columns] for record in records]
    logits = [model(**tokenizer(*pair, return_tensors="pt")).logits for pair in pairs]
    return [model.config.id2label[row.argmax().item()] for row in logits]


LEARNED = {"parus": (toys.make_toy_choices, 4), "russe": (toys.make_toy_spans, 8), "rucos": (toys.make_toy_gaps, 8)}


@pytest.mark.parametrize("name", LEARNED)
def test_finetune_learns_each_head(name, toy_model, tmp_path, capsys):
    (make_records, epochs), task = LEARNED[name], TASKS[name]
    toys.write_toy_task(tmp_path, task.name, make_records())
    [seed] = tune(tmp_path, "-t", name, "-c", toy_model, *QUICK, "--num_train_epochs", epochs)["seeds"]
    assert next(iter(seed["metrics"].values())) >= 0.95
    assert seed["history"][-1]["train_loss"] < seed["history"][0]["train_loss"] / 3
    assert f"{task.name}, validation" in capsys.readouterr().out
    if name == "parus":
        assert read_labels(tmp_path / "run" / "PARus.jsonl") == [record["label"] for record in make_records()]
    else:  # the saved files open again: the encoder by from_pretrained, and the head
        assert AutoModel.from_pretrained(tmp_path / "run" / "model").config.model_type == "lean_albert"
        assert sorted(load_file(tmp_path / "run" / "model" / "head.safetensors")) == ["bias", "weight"]


def test_finetune_learns_custom_task(toy_model, tmp_path):
    rows = [
        {"number": 7 + i, "a": f"{record['premise']}, да", "b": record["hypothesis"]}
        | {"follows": "yes" if record["label"] == "entailment" else "no"}
        for i, record in enumerate(toys.make_toy_pairs())
    ]
    for name, dialect in (("train.csv", "excel"), ("dev.tsv", "excel-tab")):
        with open(tmp_path / name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), dialect=dialect)
            writer.writeheader()
            writer.writerows(rows)
    toys.write_lines(tmp_path / "test.jsonl", [{name: row[name] for name in ("a", "b", "number")} for row in rows])
    description = {"train": "train.csv", "validation": "dev.tsv", "test": "test.jsonl", "text": "a", "text_pair": "b"}
    description |= {"name": "follows", "label": "follows", "metric": "mcc", "id": "number"}
    (tmp_path / "my.json").write_text(json.dumps(description))
    results = tune(tmp_path, "--task_file", tmp_path / "my.json", "-c", toy_model, *QUICK, "--num_train_epochs", "20")
    assert results["metric"] == "mcc" and results["mean"]["mcc"] >= 0.9
    predicted = [json.loads(line) for line in (tmp_path / "run" / "follows.jsonl").read_text().splitlines()]
    assert [row["idx"] for row in predicted] == [row["number"] for row in rows]
    assert sum(row["label"] == right["follows"] for row, right in zip(predicted, rows, strict=True)) >= 0.95 * 32


def test_finetune_spans_average_each_text(toy_model, tmp_path):
    records = toys.make_toy_pairs()[:4]
    toys.write_lines(tmp_path / "a.jsonl", records)
    description = {"train": "a.jsonl", "validation": "a.jsonl", "text": "premise", "text_pair": "hypothesis"}
    (tmp_path / "my.json").write_text(json.dumps(description | {"label": "label", "head": "spans"}))
    task = load_task_file(tmp_path / "my.json")
    pretrained = load_pretrained(FinetuneArguments(task_file="my.json", checkpoint=str(toy_model)))
    examples = load_examples(task, ".")["train"]
    encode(examples, pretrained, 64)
    model = make_task_model(pretrained, task, dropout=0.1).eval()
    logits, _ = finetune_mlm.compute_logits(model, finetune_mlm.collate(examples, task, pretrained.tokenizer, CPU))
    options = dict(return_tensors="pt", return_token_type_ids=True)
    for number, record in enumerate(records):
        inputs = pretrained.tokenizer(record["premise"], record["hypothesis"], **options)
        hidden = model.encoder(**inputs).last_hidden_state[0]
        text = torch.tensor([-1 if i is None else i for i in inputs.sequence_ids(0)])
        first, second = hidden[text == 0].mean(0), hidden[text == 1].mean(0)
        features = torch.cat([hidden[0], first, second, (first - second).abs(), first * second])
        torch.testing.assert_close(logits[number], model.classifier(features), rtol=1e-4, atol=1e-5)


def test_real_data_load(shared_data, tmp_path):
    for name, count in (("terra", 2616), ("rucola", 7869)):
        (tmp_path / TASKS[name].name).symlink_to(shared_data / name)
        assert len(load_examples(TASKS[name], tmp_path)["train"]) == count


def test_grad_acc_steps_match_one_batch(toy_model, tmp_path):
    toys.write_toy_task(tmp_path, "PARus", toys.make_toy_choices()[:16])
    gradients = []

    def keep(optimizer, *_) -> None:
        gradients.append([param.grad.clone() for group in optimizer.param_groups for param in group["params"]])

    hook = register_optimizer_step_pre_hook(keep)
    try:
        for steps in (1, 2, 4):
            flags = ["-t", "parus", "-c", toy_model, "-d", tmp_path, "--dropout", 0, "--max_grad_norm", 1e9]
            flags += ["--batch_size", 16 // steps, "--grad_acc_steps", steps, "--num_train_epochs", 1]
            run_main(finetune_mlm, *flags, "--output_dir", tmp_path / f"{steps} steps")
    finally:
        hook.remove()
    expected, *others = gradients  # of one step each
    assert sum(gradient.abs().sum() for gradient in expected) > 1
    torch.testing.assert_close(others, [expected] * 2, rtol=1e-4, atol=1e-6)


def prepare(task: str, **source: object) -> tuple[Pretrained, torch.nn.Module]:
    args = FinetuneArguments(task=task, **{name: str(value) for name, value in source.items()})
    pretrained = load_pretrained(args)
    check_tokenizer(pretrained)
    torch.manual_seed(1)  # not 0, the seed of toys.write_model, because new weights must differ from its
    return pretrained, make_task_model(pretrained, TASKS[task], 0.0)


def assert_begins_with(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Check that each tensor of the encoder equals the one of this name."""
    encoder = (model.encoder if hasattr(model, "encoder") and hasattr(model, "classifier") else model).base_model
    names = [name for name, _ in encoder.named_parameters() if name in weights]
    assert len(names) > 20 and all(name in weights for name, _ in encoder.named_parameters() if "pooler" not in name)
    for name in names:
        assert encoder.get_parameter(name).equal(weights[name]), name


def test_finetune_starts_from_saved_model(toy_model):
    weights = {name.removeprefix("albert."): t for name, t in load_file(toy_model / "model.safetensors").items()}
    for task in ("terra", "parus", "russe", "rucos"):
        _, model = prepare(task, checkpoint=toy_model)
        assert_begins_with(model, weights)


def test_causal_tokenizer_separates_texts_of_pair(tmp_path):
    """GPT-2's adds no special tokens, so the words at the boundary could belong to either text."""
    tokenizer = Tokenizer(BPE(unk_token=None))
    tokenizer.pre_tokenizer, tokenizer.post_processor = ByteLevel(add_prefix_space=False), Processor(trim_offsets=False)
    trainer = BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the house and friends"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    pairs = [("the house", "and friends"), ("the houseand", " friends")]
    first, second = (loaded(*pair).input_ids for pair in pairs)
    assert first != second and first.count(loaded.eos_token_id) == 1
    loaded.save_pretrained(tmp_path / "tuned")
    again = load_tokenizer(tmp_path / "tuned")
    assert again(*pairs[0]).input_ids == first and again("the house").input_ids == loaded("the house").input_ids
    assert loaded.eos_token_id not in loaded("the house").input_ids


def test_finetune_accepts_other_model(minilm, tmp_path):
    weights = load_file(minilm / "model.safetensors")
    shutil.copytree(minilm, tmp_path / "causal", copy_function=os.symlink)
    (path := tmp_path / "causal" / "config.json").unlink()
    path.write_text(json.dumps(json.loads((minilm / "config.json").read_text()) | {"is_decoder": True}))
    for task, source in (("rucos", minilm), ("terra", minilm), ("terra", tmp_path / "causal")):
        pretrained, model = prepare(task, model_name=source)
        assert_begins_with(model, weights)
        assert finetune_mlm.choose_length(model, 1000) == 512
    # a decoder becomes bidirectional
    logits, others = (model.eval()(torch.tensor([[101, 2000, 2001, last]])).logits for last in (2002, 2003))
    assert not torch.allclose(logits, others, atol=1e-4)
    pretrained.config.vocab_size += 6  # rounded up, as pretrained vocabularies are
    check_tokenizer(pretrained)
    pairs = [
        {"premise": f"{who} sleeps.", "hypothesis": f"{who} {what}.", "label": label, "idx": 0}
        for who in ("The man", "Our old dog")
        for what, label in (("sleeps", "entailment"), ("eats", "not_entailment"))
    ]
    toys.write_toy_task(tmp_path, "TERRa", pairs)
    tune(tmp_path, "-t", "terra", "--model-name", minilm, "--num_train_epochs", "1", "--batch-size", "4")
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert (saved.config.model_type, saved.config.hidden_dropout_prob) == ("bert", 0.1)
    expected = predict_plainly(tmp_path / "run" / "model", pairs, ("premise", "hypothesis"))
    assert read_labels(tmp_path / "run" / "TERRa.jsonl") == expected


@pytest.fixture
def old_checkpoint(toy_model, tmp_path) -> Path:
    """state.pth with RuLeanALBERT's names, config.json and tokenizer/, whose normalizer is not AlbertTokenizer's."""
    folder = tmp_path / "guide"
    (folder / "tokenizer").mkdir(parents=True)
    theirs = {ours: name for name, ours in MODULES.items()}
    state = {}
    for name, tensor in LeanAlbertForPreTraining.from_pretrained(toy_model).state_dict().items():
        parts = name.split(".")
        if name.startswith("albert.layers."):
            name = f"albert.transformer.layer_groups.{parts[2]}.layers.0.{theirs[parts[3]]}.{parts[4]}"
        elif name.startswith("albert.matrices."):
            name = f"albert.transformer.layer_groups.{parts[2]}.layers.0.{theirs[parts[3]]}.shared_matrix.weight"
        state[name.replace("albert.post_layer_norm", "albert.transformer.post_layer_norm")] = tensor
    torch.save({"model": state, "local_epoch": 3}, folder / "state.pth")
    config = json.loads((toy_model / "config.json").read_text()) | {"vocab_size": 30000}
    names = ("hidden_size", "embedding_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    (folder / "config.json").write_text(json.dumps({name: config[name] for name in (*names, "vocab_size")}))
    backend = AutoTokenizer.from_pretrained(toy_model).backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Replace("ё", "о"), normalizers.Lowercase()])
    backend.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "sep": "[SEP]", "pad": "<pad>", "cls": "[CLS]"}
    tokens = {f"{name}_token": token for name, token in names.items()}
    tokens["mask_token"] = {"content": "[MASK]", "single_word": False, "lstrip": True, "rstrip": False}
    (folder / "tokenizer" / "special_tokens_map.json").write_text(json.dumps(tokens))
    (folder / "tokenizer" / "config.json").write_text('{"model_type": "albert"}')
    return folder


def test_finetune_loads_ruleanalbert_checkpoint(old_checkpoint, toy_model, tmp_path):
    weights = {name.removeprefix("albert."): t for name, t in load_file(toy_model / "model.safetensors").items()}
    own = AutoTokenizer.from_pretrained(toy_model)
    for path in (old_checkpoint, old_checkpoint / "state.pth"):
        for task in ("terra", "russe"):
            pretrained, model = prepare(task, checkpoint=path)
            assert_begins_with(model, weights)
        tokenizer = pretrained.tokenizer
        ids = (tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id)
        assert ids == (own.pad_token_id, own.cls_token_id, own.sep_token_id, own.mask_token_id) == (0, 2, 3, 4)
        assert tokenizer.tokenize("Её ёж") == own.tokenize("ео ож") != own.tokenize("Её ёж")
    # tune it, and predict LiDiRus with the same tokenizer
    toys.write_toy_task(tmp_path, "TERRa", toys.make_toy_pairs()[:8])
    tune(tmp_path, "-t", "terra", "-c", old_checkpoint, "--num_train_epochs", "1")
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved.tokenize("Её ёж") == tokenizer.tokenize("Её ёж")
    toys.write_lidirus(tmp_path)
    for arch in ("lean_albert", old_checkpoint / "tokenizer"):
        run_main(predict_on_lidirus, "-m", tmp_path / "run", "-a", arch, "-d", tmp_path)
        assert len(read_labels(tmp_path / "run" / "LiDiRus.jsonl")) == 32
    assert pretrained.config.vocab_size == len(own)


def test_finetune_pads_within_odd_positions(tmp_path):
    """The next multiple for padding is beyond the table of positions."""
    texts = [record["premise"] for record in toys.make_toy_pairs()]
    toys.write_model(tmp_path / "model", texts, position_embedding_type="absolute", max_position_embeddings=21)
    toys.write_toy_task(tmp_path, "TERRa", [r | {"premise": "Дождь и снег. " * 9} for r in toys.make_toy_pairs()[:8]])
    results = tune(tmp_path, "-t", "terra", "-c", tmp_path / "model", "--num_train_epochs", "1")
    assert results["texts_cut"]["train"] == 8


def test_finetune_resumes_after_interrupt(terra_run, toy_model, start):
    expected, folder = read_results(terra_run), terra_run.parent / "interrupted"
    command = terra_command(toy_model, folder)
    script = start("first", *command)
    wait_until((folder / "results.json").exists, 60, "the first seed")
    script.interrupt()
    script.assert_clean_end(10, code=130)
    assert "the same command resumes with the unfinished seed" in script.text.splitlines()[-1]
    assert drop_times(read_results(folder)["seeds"]) == drop_times(expected["seeds"][:1])
    assert {path.name for path in folder.iterdir()} == {".lock", "TERRa.jsonl", "model", "results.json"}

    script = start("second", *command)
    script.assert_clean_end()
    assert "seed 0 is in" in script.text
    # the table comes last
    *_, header, row, first, second, where = script.text.splitlines()
    assert " ".join(header.split()) == "TERRa, validation mean deviation lowest highest most frequent answer"
    assert row.split()[0] == "accuracy" and row.split()[-1] == "0.500"
    assert first.startswith("seed 0: accuracy") and "of 15" in second and where.endswith(str(folder))
    results = read_results(folder)
    assert drop_times(results.pop("seeds")) == drop_times(expected.pop("seeds"))
    assert results == expected
    assert (folder / "TERRa.jsonl").read_bytes() == (terra_run / "TERRa.jsonl").read_bytes()
    weights = [load_file(run / "model" / "model.safetensors") for run in (folder, terra_run)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_finetune_without_room_leaves_seed_open(terra_run, toy_model, tmp_path):
    """As on a full disk, the model does not fit, but results.json would."""
    command = [*terra_command(toy_model, terra_run)[1:-1], tmp_path / "run"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        assert "seed 0 could not be written" in refuse(finetune_mlm, *command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "run" / "results.json").exists()


def test_finetune_skips_finished_run(terra_run, toy_model, capsys):
    before = (terra_run / "results.json").read_bytes()
    command = terra_command(toy_model, terra_run)[1:]
    run_main(finetune_mlm, *command)
    assert "TERRa, validation" in capsys.readouterr().out
    line = refuse(finetune_mlm, *command, "--weight-decay", "0.5", "--max_length", "64")
    assert "max_length, weight_decay" in line or "weight_decay, max_length" in line
    assert "another --output_dir" in line and (terra_run / "results.json").read_bytes() == before


def test_finetune_notices_changed_model_and_data(terra_run, toy_model, tmp_path):
    """At the same paths, as after more training."""
    model, folder = shutil.copytree(toy_model, tmp_path / "model"), tmp_path / "run"
    shutil.copytree(terra_run.parent / "data", tmp_path / "data")
    results = read_results(terra_run)
    results["settings"] |= {"checkpoint": str(model), "data_dir": str(tmp_path / "data")}
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    command = terra_command(model, folder)[1:]
    run_main(finetune_mlm, *command)
    assert read_results(folder) == results
    train = tmp_path / "data" / "TERRa" / "train.jsonl"
    train.write_text(train.read_text().split("\n", 1)[1])
    assert "a different data:" in refuse(finetune_mlm, *command)
    weights = model / "model.safetensors"
    save_file({name: tensor + 0.1 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    assert "a different data, model:" in refuse(finetune_mlm, *command)


@pytest.mark.parametrize("text", ["{", '{"seeds": [], "settings": []}', '{"seeds": [{}], "settings": {}}'])
def test_finetune_broken_results_are_one_line(text, terra_run, toy_model, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(text)
    line = refuse(finetune_mlm, *terra_command(toy_model, terra_run)[1:-1], tmp_path / "run")
    assert "run/results.json cannot be read" in line and "remove it" in line
    assert (tmp_path / "run" / "results.json").read_text() == text


@pytest.mark.parametrize(
    "flags, words",
    [
        (["-t", "tera"], ["--task tera", "terra", "rucola", "--task_file"]),
        (["-t", "TERRa"], ["--task TERRa", "did you mean terra?"]),
        (["-t", "lidirus"], ["no training data", "-t terra", "predict_on_lidirus.py"]),
        ([], ["--task or --task_file"]),
        (["-t", "terra", "--task_file", "my.json"], ["--task or --task_file"]),
        (["-t", "terra", "--model-name", "x"], ["--checkpoint", "--model-name"]),
        (["-t", "terra", "--fp16"], ["--fp16", "CUDA", "--bf16"]),
        (["-t", "terra", "--num-seeds", "0"], ["--num_seeds"]),
        (["--task_file", "no/such.json"], ["--task_file no/such.json", "No such file"]),
        (["-t", "rucola"], ["no folder", "RuCoLA", "in_domain_train.csv", "https://github.com/RussianNLP/RuCoLA"]),
    ],
    ids=str,
)
def test_finetune_wrong_flags_are_one_line(flags, words, toy_model, tmp_path):
    if "--fp16" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    expect_refusal(words, tmp_path, *flags, "--checkpoint", toy_model)


def rename_weights(folder: Path) -> None:
    weights = {f"my_{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))


OTHER_COLUMNS, UNLABELLED = '{"sentence1": "а", "sentence2": "б"}', '{"premise": "а", "hypothesis": "б"}'


@pytest.mark.parametrize(
    "path, content, words",
    [
        ("TERRa/val.jsonl", Path.unlink, ["no file", "TERRa/val.jsonl", "https://russiansuperglue.com"]),
        ("TERRa/train.jsonl", "", ["train data of TERRa is empty", "https://russiansuperglue.com"]),
        ("TERRa/train.jsonl", OTHER_COLUMNS, ["line 1", "no premise, hypothesis among sentence1"]),
        ("TERRa/val.jsonl", f'\n{UNLABELLED[:-1]}, "label": "maybe"}}', ["val.jsonl, line 2", "'maybe'"]),
        ("TERRa/train.jsonl", UNLABELLED, ["train data", "without label"]),
        ("TERRa/train.jsonl", "[1]", ["train.jsonl, line 1", "in [1]"]),
        ("TERRa/test.jsonl", "{", ["test.jsonl, line 1 is not JSON"]),
        ("model/config.json", Path.unlink, ["no config.json", "outputs/trainer/model", "state.pth"]),
        ("model/model.safetensors", Path.unlink, ["weights", "cannot be loaded"]),
        ("model/tokenizer.json", Path.unlink, ["its tokenizer 5", "do not belong together"]),
        ("model/model.safetensors", "{", ["weights", "cannot be loaded"]),
        ("model/config.json", "{", ["cannot be loaded"]),
        ("model/tokenizer.json", "{", ["cannot be loaded"]),
        ("model", rename_weights, ["no weights for", "albert.embeddings.word_embeddings.weight"]),
        ("model", change_shape, ["weights", "cannot be loaded"]),
        ("model/state.pth", "{", ["tokenizer/tokenizer.json", "get it"]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_finetune_damaged_file_is_one_line(path, content, words, toy_model, tmp_path):
    toys.write_toy_task(tmp_path, "TERRa", toys.make_toy_pairs()[:2])
    shutil.copytree(toy_model, tmp_path / "model")
    if isinstance(content, str):
        (tmp_path / path).write_text(content)
    else:
        content(tmp_path / path)
    expect_refusal(words, tmp_path, "-t", "terra", "-c", tmp_path / "model")


def test_finetune_wrong_old_checkpoint_is_one_line(old_checkpoint, tmp_path):
    toys.write_toy_task(tmp_path, "TERRa", toys.make_toy_pairs()[:2])
    flags = ("-t", "terra", "-c", old_checkpoint / "state.pth")
    (old_checkpoint / "tokenizer" / "tokenizer.json").write_text("{")
    expect_refusal(["state.pth cannot be loaded"], tmp_path, *flags)
    (old_checkpoint / "state.pth").write_text("{")
    expect_refusal(["is not a state of RuLeanALBERT"], tmp_path, *flags)
    (old_checkpoint / "config.json").unlink()
    expect_refusal(["config.json: get it"], tmp_path, *flags)


def test_lidirus_predictions_are_written(terra_run, tmp_path, capsys):
    run, records = shutil.copytree(terra_run, tmp_path / "run"), toys.write_lidirus(tmp_path)
    command, file = ["-m", run, "--data-dir", tmp_path], run / "LiDiRus.jsonl"
    run_main(predict_on_lidirus, *command, "-a", "lean_albert")
    expected = predict_plainly(run / "model", records, ("sentence1", "sentence2"))
    text = file.read_text()
    assert text == "".join(f'{{"idx": {i}, "label": "{label}"}}\n' for i, label in enumerate(expected))
    right = [record["label"] for record in records]
    mcc, accuracy = matthews_corrcoef(right, expected), accuracy_score(right, expected)
    assert 0 < mcc < 1
    assert f"mcc {mcc:.3f}, accuracy {accuracy:.3f}" in capsys.readouterr().out.splitlines()
    # another copy of the tokenizer, and data without labels
    AutoTokenizer.from_pretrained(run / "model").save_pretrained(tmp_path / "tokenizer")
    bare = [{name: value for name, value in record.items() if name != "label"} for record in records]
    toys.write_lines(tmp_path / "LiDiRus" / "LiDiRus.jsonl", bare)
    file.unlink()
    run_main(predict_on_lidirus, *command, "-a", tmp_path / "tokenizer")
    assert file.read_text() == text and capsys.readouterr().out == f"predictions: {file}\n"


def test_lidirus_wrong_run_is_one_line(terra_run, tmp_path):
    def look(words: str, *flags: object) -> None:
        assert words in refuse(predict_on_lidirus, *flags, "-d", tmp_path)
        assert not (tmp_path / "run" / "LiDiRus.jsonl").exists()

    run = shutil.copytree(terra_run, tmp_path / "run")
    toys.write_lidirus(tmp_path)
    look("-t terra", "-m", tmp_path)
    toys.write_model(tmp_path / "other", ["раз два три четыре пять " * 3], pieces=120)
    look("tokens differ from the run's", "-m", run, "-a", tmp_path / "other")
    look("not the tokenizer of this run", "-m", run, "-a", tmp_path / "nowhere" / "at" / "all")
    for records, words in (([], "LiDiRus is empty"), (toys.make_toy_pairs(), "no sentence1, sentence2 among premise")):
        toys.write_lines(tmp_path / "LiDiRus" / "LiDiRus.jsonl", records)
        look(words, "-m", run)
    weights = load_file(run / "model" / "model.safetensors")
    rest = {name: tensor for name, tensor in weights.items() if not name.startswith("classifier")}
    save_file(rest, run / "model" / "model.safetensors", {"format": "pt"})
    look("no weights for 2 of its tensors (classifier.weight", "-m", run)
    other = json.dumps(read_results(run) | {"task": "RCB"})
    for text, words in ((other, "tuned for RCB"), ("[]", "not a run of finetune_mlm.py")):
        (run / "results.json").write_text(text)
        look(words, "-m", run)
