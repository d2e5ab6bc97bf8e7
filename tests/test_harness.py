"""The task of lm-eval in sample_data/, on a saved model as docs/models.md shows. Skipped without lm_eval."""

import json
import re
import shlex

import pytest
from processes import ROOT, run_python

from arguments import ModelArguments
from experiment.model import make_model
from text.instances import TEXT
from text.tokenizers import load_tokenizer


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
