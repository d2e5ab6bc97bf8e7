# make demo      two peers on this machine learn English together, two to three minutes
# make test      the tests, in minutes; make test-all: the slow ones too
# make gpu-bench speed, MFU and memory on a GPU, as a table for docs/measured.md
# make lint      style, words, and the conventions of tests/test_conventions.py
# make setup     what all of them do first: .venv with everything in it
#
# PYTHON=python3.12   another interpreter than python3 (3.11, 3.12 or 3.13) for .venv
# TORCH=...           another torch, e.g. one without CUDA, which is a tenth of the size:
#                     make demo TORCH="torch==2.13.0 --index-url URL_OF_PYTORCH_CPU_WHEELS"
# Both take effect when .venv is made; to change them later: rm -rf .venv

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP = .venv/bin/python -m pip --disable-pip-version-check install -qq

.PHONY: demo test test-all gpu-bench lint setup

demo: setup
	@.venv/bin/python demo.py

test: setup
	@.venv/bin/python tests/parallel.py 5 -m "not slow"

# and each script that the tests start imports its libraries itself
test-all: setup
	@.venv/bin/python -m pytest --real-starts

gpu-bench: setup
	@.venv/bin/python benchmarks/gpu_bench.py

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/python tests/check_words.py
	@.venv/bin/python -m pytest -q tests/test_conventions.py

setup: .venv/complete

# $(call step,what it does,command)
define step
	@echo "set-up: $(1)"
	@$(2) || { echo "set-up: $(1) failed, for the reason above; often there is no network, or the disk is full \
	(df -h .). The same command again continues from here" >&2; exit 1; }
endef

# the stamp comes last: an interrupted set-up starts again, and finds what it has downloaded in pip's cache
.venv/complete: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "set-up: Python 3.11, 3.12 or \
	3.13 is needed, not $(PYTHON) ($$($(PYTHON) --version 2>&1)): make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12" >&2; \
	exit 1; }
	@test ! -d .venv || echo "set-up: .venv is unfinished, or its lists of packages have changed"
	@rm -f $@
	$(call step,making .venv with $$($(PYTHON) --version),$(PYTHON) -m venv .venv)
	$(call step,installing $(TORCH),$(PIP) $(TORCH))
	$(call step,installing requirements.txt,$(PIP) -r requirements.txt -c constraints.txt)
	@touch $@
