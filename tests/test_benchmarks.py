"""Measurements: the GPU benchmark without a GPU, the task of lm-eval in sample_data/, and the dress rehearsal."""

import json
import re
import shlex

import netlab
import pytest
from processes import ROOT, run_python

from arguments import ModelArguments
from experiment.model import make_model
from text.instances import TEXT
from text.tokenizers import load_tokenizer

BENCHMARK = ROOT / "benchmarks" / "gpu_bench.py"


def test_gpu_bench_without_gpu_names_small_form():
    run = run_python(BENCHMARK, env={"CUDA_VISIBLE_DEVICES": ""}, expect=2)
    [line] = run.stderr.splitlines()
    assert "`python benchmarks/gpu_bench.py --small`" in line and not run.stdout


@pytest.mark.slow
def test_gpu_bench_small_form_fills_each_row():
    run = run_python(BENCHMARK, "--small", timeout=600, expect=0)
    rows = [line.split("|")[1:-1] for line in run.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8
    for _, _, result in rows:
        numbers = re.findall(r"(?<![\w:.])\d[\d,]*(?:\.\d+)?", result)  # not that of cpu:0
        assert numbers and all(float(number.replace(",", "")) > 0 for number in numbers), result


@pytest.mark.slow
def test_harness_command_evaluates_saved_model(tmp_path, text_data):
    """An untrained model chooses one of four orders of words at random."""
    pytest.importorskip("lm_eval")
    tokenizer = load_tokenizer(text_data["--tokenizer_path"], TEXT)
    for part in (model := make_model(ModelArguments("configs/gpt-demo.json"), tokenizer)), tokenizer:
        part.save_pretrained(tmp_path / "model")
    assert model.objective.is_causal
    page = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "models.md").read_text())
    command = re.search(r"(?m)^    (lm_eval .*)$", page)[1].replace("outputs/trainer/model", str(tmp_path / "model"))
    words = ["-m", *shlex.split(command), "--device", "cpu", "--output_path", tmp_path / "results.json"]
    run_python(*words, expect=0, timeout=300)
    [results] = tmp_path.glob("results*.json")
    results = json.loads(results.read_text())
    assert results["n-samples"]["word_order"]["original"] == 60
    assert 0.1 < results["results"]["word_order"]["acc,none"] < 0.4


@pytest.mark.slow
def test_rehearsal_survives_churn_and_colluding_liars(tmp_path):
    if why := netlab.unavailable():
        pytest.skip(why)
    data = ["--dataset_path", tmp_path / "dataset", "--tokenizer_path", tmp_path / "tokenizer"]
    words = ["--objective", "clm", "--corpus", "sample", "--train_tokenizer", "--vocab_size", 1000, "--seq_length", 64]
    run_python("tokenize_wikitext103.py", *words, *data, timeout=300, expect=0)
    out = ["--output_dir", tmp_path / "out"]
    run_python(ROOT / "benchmarks" / "rehearsal.py", "--short", *data, *out, timeout=2400, expect=0)
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert list(figures) == ["closed", "open"]
    kinds = {event["kind"] for run in figures.values() for event in run["events"]}
    assert kinds >= {*["kill", "freeze", "partition", "slow", "router", "clock", "newcomer", "disk", "monitor", "aux"]}
    for run in figures.values():
        assert len(run["lies"]) == 2 and len(run["codes"]) >= 12
        assert not any(run["codes"]) and not run["deaths"]
        assert run["digests"] == 1 and not run["bans"] and not run["poisoned"]
        assert run["goodput"] > 0.85
        assert run["loss"] < 1.15 * run["alone"]  # after seven sparse commits
        assert run["page"]["looks"] > 40 and len(run["page"]["epoch"]) < 5 and not run["page"]["loss"]
