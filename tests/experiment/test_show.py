"""python -m experiment.show: batches as a model will see them."""

import itertools
import json
import re

import pytest
from mains import run_main
from processes import run_python

from arguments import DataArguments, ModelArguments
from experiment import show


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_show_prints_each_batch_kind(tmp_path, tiny_data, objective):
    shape = {"model_type": "bert" if objective == "mlm" else "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "a.txt").write_text("A first line of text.\n\nAnd one more of the lines here.\n\n" * 100)
    words = ["-m", "experiment.show", "--config_path", tmp_path / "config.json", "--max_sequence_length", 32]
    words += ["--train_file", tmp_path / "a.txt", "--dataset_cache_dir", tmp_path]
    run = run_python(*words, "--tokenizer_path", tiny_data["--tokenizer_path"], expect=0)
    assert f"objective {objective}" in run.stdout and "more of the lines" in run.stdout.replace("\n   ", "")
    assert ("mask rate" in run.stdout) == (objective == "mlm") == ("⟦" in run.stdout)
    assert "1,000 sequences" in run.stdout and "swapped" not in run.stdout


def test_show_prints_batches(tiny_data, capsys):
    shown = {}
    for name, more in {
        "words": [],
        "pieces": ["--no_whole_word_mask", "--mlm_probability", 0.3],
        "short": ["--initial_sequence_length", 16, "--max_sequence_length", 32, "--sequence_length_warmup_steps", 9],
    }.items():
        run_main(show, *itertools.chain(*tiny_data.items()), *more, groups=(ModelArguments, DataArguments))
        shown[name] = capsys.readouterr().out
    for name, text in shown.items():
        row = r"row \d of 4: (\d+) tokens, (\d+) of padding, .*, (\d+) to be predicted\n((?: {4}.*\n)+)"
        rows = re.findall(row, text)
        assert len(rows) == 6
        assert all(row.startswith("    [CLS] ") and row.endswith(" [SEP]\n") for *_, row in rows), rows
        assert all(int(length) <= (16 if name == "short" else 32) for length, *_ in rows)
        assert [row.count("⟦") for *_, row in rows] == [int(count) for _, _, count, _ in rows]
    percents = {name: [float(p) for p in re.findall(r"([\d.]+)%", text)] for name, text in shown.items()}
    for name, rate in (("words", 15), ("pieces", 30), ("short", 15)):
        expected = (rate, 80, 10, 10)
        assert all(abs(p - e) < 3 for p, e in zip(percents[name], expected, strict=False)), percents[name]
        assert sum(percents[name][1:4]) == pytest.approx(100, abs=0.2)
