"""The dress rehearsal's short form: a quarter of an hour. `make test-all`."""

import json

import netlab
import pytest
from processes import ROOT, run_python

pytestmark = pytest.mark.slow


def test_rehearsal_survives_events_and_hostile_peers(tmp_path):
    if why := netlab.unavailable():
        pytest.skip(why)
    data = ["--dataset_path", tmp_path / "dataset", "--tokenizer_path", tmp_path / "tokenizer"]
    words = ["--corpus", "sample", "--train_tokenizer", "--vocab_size", 1000, "--seq_length", 64]
    run_python("tokenize_wikitext103.py", *words, *data, timeout=300, expect=0)
    out = ["--output_dir", tmp_path / "out"]
    run_python(ROOT / "benchmarks" / "rehearsal.py", "--short", *data, *out, timeout=1800, expect=0)
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert {event["kind"] for event in figures["events"]} >= {
        "kill",
        "again",
        "stop",
        "partition",
        "disk",
        "monitor",
        "aux",
    }
    assert len(figures["lies"]) == 2 and len(figures["codes"]) == 5
    assert not any(figures["codes"]) and not figures["deaths"]
    assert figures["goodput"] > 0.9
    assert figures["losses"]["swarm"] < 1.1 * figures["losses"]["alone"]
    assert figures["difference"] < 0.01
    page = figures["page"]
    assert page["looks"] > 60 and not page["epoch"] and not page["loss"]
