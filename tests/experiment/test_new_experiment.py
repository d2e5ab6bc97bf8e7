"""The recipes of docs/new_experiment.md, each applied to a fresh copy that then trains; and `experiment.show`."""

import ast
import json
import re
import shutil
from pathlib import Path
from statistics import mean

import pytest
from processes import ROOT, make_prefix, run_python

GUIDE = (ROOT / "docs" / "new_experiment.md").read_text()
ROOMS = ["experiment", "training", "models", "common", "swarm", "text"]
RECIPES = {diff[1]: diff[2] for diff in re.finditer(r"```diff\n--- (\S+)\n(.*?)```", GUIDE, re.DOTALL)}


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the files of an experiment."""
    for name in [*ROOMS, "configs"]:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("arguments.py", "utils.py", "tokenize_wikitext103.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def apply_recipe(copy: Path, name: str) -> None:
    """Apply each part of the diff to its file; there is one diff for each file, and no other."""
    assert GUIDE.count("```diff") == len(RECIPES) == 3
    text = (copy / name).read_text()
    parts = [part.splitlines() for part in RECIPES[name].split("@@\n") if part]
    assert sum(line[:1] in ("+", "-") for part in parts for line in part) <= 30
    for part in parts:
        before, after = ("\n".join(line[1:] for line in part if line[:1] in kept) + "\n" for kept in (" -", " +"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (copy / name).write_text(text)


def run(copy: Path, program: str, *words: object, **options) -> dict:
    """Run a program in the copy, and return its output."""
    result = run_python(ROOT / "tests" / "programs" / program, *words, cwd=copy, timeout=180, expect=0, **options)
    return json.loads(result.stdout.splitlines()[-1])


STEPS = ("--optim", "adamw", "--learning_rate", "3e-3", "--warmup_steps", "0")


def test_recipe_custom_head_trains_and_opens(copy, tiny_data):
    apply_recipe(copy, "experiment/model.py")
    (copy / "bert-4.json").write_text(re.search(r"```json\n(.*?)```", GUIDE, re.DOTALL)[1])
    model, lines = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (copy / "experiment" / "wide_bert.py").write_text(model)
    words = [*STEPS, "--config_path", "bert-4.json", *sum(tiny_data.items(), ())]
    facts = run(copy, "few_steps.py", *words)
    assert (facts["model"], facts["objective"], facts["layers"]) == ("BertWithWideHead", "mlm", 4)
    assert mean(facts["losses"][-5:]) < mean(facts["losses"][:5]) - 0.2

    # in another folder, without our code: by the guide's lines and by those of the saved folder
    shutil.copytree(copy / "outputs", copy / "elsewhere" / "outputs")
    card = re.search(r"```python\n(.*?)```", (copy / "outputs/trainer/model/README.md").read_text(), re.DOTALL)[1]
    options = dict(cwd=copy / "elsewhere", timeout=180, env={"HF_HOME": str(copy / "cache")})
    result = run_python("-c", f"{lines}\n{card}", expect=0, is_real=True, **options)
    answer, (best, *_) = map(ast.literal_eval, result.stdout.splitlines())
    assert answer == best and answer["token_str"] == facts["answer"]
    assert answer["score"] == pytest.approx(facts["score"], rel=1e-4) and answer["score"] > 5 / 500
    assert "MISSING" not in result.stderr and "UNEXPECTED" not in result.stderr
    assert facts["frequency"] > len(facts["texts"]) / 4


def test_custom_objective_reuses_a_kind(copy, tiny_data):
    """CONTRIBUTING.md describes the steps: an entry, and its name in the flag's type."""
    for name, before, more in (
        ("arguments.py", 'OBJECTIVES = Literal["mlm", ', '"mine", '),
        ("experiment/objectives.py", '    "mlm": ', '"mine": Objective("mine", BLOCKS, find_masked_class, "words"), '),
    ):
        text, place = (copy / name).read_text(), before.index('"mlm"')
        assert text.count(before) == 1
        (copy / name).write_text(text.replace(before, before[:place] + more + before[place:]))
    (copy / "a.txt").write_text("A first line of text.\n\nAnd one more of the lines here.\n\n" * 100)
    (copy / "bert.json").write_text(re.search(r"```json\n(.*?)```", GUIDE, re.DOTALL)[1])
    words = [*STEPS, "--config_path", "bert.json", "--objective", "mine", "--train_file", "a.txt"]
    words += ["--max_sequence_length", 32, "--dataset_cache_dir", "cache"]
    facts = run(copy, "few_steps.py", *words, "--tokenizer_path", tiny_data["--tokenizer_path"])
    assert facts["objective"] == "mine" and mean(facts["losses"][-5:]) < mean(facts["losses"][:5])


def test_recipe_json_lines_trains(copy, tiny_data):
    apply_recipe(copy, "experiment/data.py")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    talks = [[f"I say {one} and then {two}.", f"You say {two}, not {one}."] for one in words for two in words]
    lines = [{"turns": [{"speaker": n, "text": text} for n, text in enumerate(talk)]} for talk in talks]
    (copy / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # the guide's flags, because the model takes no longer sequences
    where = re.search(r"`(--train_file talks.jsonl .*?)` names", GUIDE)[1].split() + ["--dataset_cache_dir", "cache"]
    tokenizer = ["--tokenizer_path", tiny_data["--tokenizer_path"]]
    facts = run(copy, "few_steps.py", *STEPS, "--config_path", "configs/demo.json", *where, *tokenizer)
    # 5 of 100 conversations are for validation; each of the others is one pair of turns
    assert (facts["source"], facts["instances"]) == ("talks.jsonl", 95)
    turns = {turn.lower() for talk in talks for turn in talk}
    seen = re.findall(r"(?:i|you) say .*?\.", " ".join(facts["texts"]).replace(" ,", ",").replace(" .", "."))
    assert len(seen) == 2 * len(facts["texts"]) and set(seen) <= turns
    assert mean(facts["losses"][-5:]) < mean(facts["losses"][:5]) - 0.2


MUON = "muon, beta 0.9 0.999, epsilon 1e-06, decay 0.5, clip 1"


@pytest.mark.parametrize(
    "optim, rate, terms, kinds",
    [
        ("adamw", 0.1, "sgd, momentum 0.9, decay 0.5, clip 1", {"momentum_buffer": 32}),  # by the recipe
        ("muon", 0.01, MUON, {"momentum_buffer": 10, "exp_avg": 22}),
    ],
)
def test_recipe_optimizer_trains_and_transfers(copy, optim, rate, terms, kinds):
    """The moments start at zero, without weight decay, and a joining peer loads all of them."""
    apply_recipe(copy, "experiment/optimizer.py")
    facts = run(copy, "shared_momentum.py", make_prefix(), optim, rate)
    assert facts["contract"] == terms and facts["kinds"] == kinds
    assert not any(facts["before"]) and facts["losses"][-1] < facts["losses"][0]
    assert facts["loaded"] and facts["epochs"] == [4, 4]
    assert sum(size > 1e-3 for size in facts["sizes"]) > len(facts["sizes"]) / 2
    assert all(facts["same_momentum"]) and all(facts["same_weights"])


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_show_prints_each_batch_kind(tmp_path, tiny_data, objective):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert" if objective == "mlm" else "gpt2"}))
    (tmp_path / "a.txt").write_text("A first line of text.\n\nAnd one more of the lines here.\n\n" * 100)
    words = ["-m", "experiment.show", "--config_path", tmp_path / "config.json", "--max_sequence_length", 32]
    words += ["--train_file", tmp_path / "a.txt", "--dataset_cache_dir", tmp_path]
    run = run_python(*words, "--tokenizer_path", tiny_data["--tokenizer_path"], expect=0)
    assert f"objective {objective}" in run.stdout and "more of the lines" in run.stdout.replace("\n   ", "")
    assert ("⟦" in run.stdout) == (objective == "mlm") and "swapped" not in run.stdout
    rows = re.findall(r"row \d of 4: (\d+) tokens, \d+ of padding, (\d+) to be predicted\n((?: {4}.*\n)+)", run.stdout)
    assert len(rows) == 6 and all(int(length) <= 32 for length, *_ in rows)
    assert objective == "clm" or all(row.count("⟦") == int(count) for _, count, row in rows)
