"""python -m experiment.show: batches as a model will see them."""

import json
import re

import pytest
from processes import run_python


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_show_prints_each_batch_kind(tmp_path, tiny_data, objective):
    shape = {"model_type": "bert" if objective == "mlm" else "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "a.txt").write_text("A first line of text.\n\nAnd one more of the lines here.\n\n" * 100)
    words = ["-m", "experiment.show", "--config_path", tmp_path / "config.json", "--max_sequence_length", 32]
    words += ["--train_file", tmp_path / "a.txt", "--dataset_cache_dir", tmp_path]
    run = run_python(*words, "--tokenizer_path", tiny_data["--tokenizer_path"], expect=0)
    assert f"objective {objective}" in run.stdout and "more of the lines" in run.stdout.replace("\n   ", "")
    assert ("⟦" in run.stdout) == (objective == "mlm") and "swapped" not in run.stdout
    rows = re.findall(r"row \d of 4: (\d+) tokens, \d+ of padding, (\d+) to be predicted\n((?: {4}.*\n)+)", run.stdout)
    assert len(rows) == 6 and all(int(length) <= 32 for length, *_ in rows)
    assert objective == "clm" or all(row.count("⟦") == int(count) for _, count, row in rows)
