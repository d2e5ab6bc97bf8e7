"""The set-up of the Makefile: its interpreters, its errors, and the packages that it installs."""

import os
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from processes import ROOT


@pytest.fixture
def set_up(tmp_path):
    """set_up(*words) -> the finished `make setup`, in a folder of its own."""
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    # `make test` may have set variables
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return lambda *words: subprocess.run(
        ["make", "setup", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0"])
def test_setup_unsupported_python_is_one_line(version, set_up, tmp_path):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version} && exit\n'
        f"exec {sys.executable} -c 'import sys; sys.version_info = ({version.replace('.', ', ')}); exec(sys.argv[1])'"
        ' "$2"\n'
    )
    python.chmod(0o755)
    run = set_up(f"PYTHON={python}")
    line, of_make = run.stderr.splitlines()
    assert run.returncode == 2 and not run.stdout and of_make.startswith("make: ***")
    assert f"Python {version}" in line and "3.13" in line and "make setup PYTHON=python3.12" in line
    assert not (tmp_path / ".venv").exists()


def test_setup_failure_names_step_and_cure(set_up, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(shutil.which("false"))  # as if pip had failed
    (tmp_path / ".venv" / "complete").touch()
    os.utime(tmp_path / ".venv" / "complete", (0, 0))  # older than the lists
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = venv ] || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = set_up(f"PYTHON={python}", "TORCH=torch==0 --no-index")
    assert run.returncode == 2 and "set-up: .venv is unfinished" in run.stdout
    *_, line, _ = run.stderr.splitlines()
    assert "set-up: installing torch==0 --no-index failed" in line and "network" in line and "same command" in line
    assert not (tmp_path / ".venv" / "complete").exists()


def test_constraints_lie_within_requirements():
    ranges, pins = (
        [Requirement(line) for line in (text.split("#")[0].strip() for text in (ROOT / name).open()) if line]
        for name in ("requirements.txt", "constraints.txt")
    )
    versions = {pin.name.lower().replace("_", "-"): Version(str(pin.specifier).removeprefix("==")) for pin in pins}
    assert "torch" not in versions
    for requirement in ranges:
        assert versions[requirement.name.lower().replace("_", "-")] in requirement.specifier, requirement
