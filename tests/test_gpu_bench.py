"""benchmarks/gpu_bench.py without a GPU: its error, and its small form on the CPU."""

import re

import pytest
from processes import ROOT, run_python

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
