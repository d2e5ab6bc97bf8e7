# make demo      two peers on this machine learn English together, two to three minutes
# make test      the tests, in minutes
# make test-all  the slow ones too, and each script that they start imports its libraries itself
# make lint      style
# make setup     what all of them do first: .venv with everything in it
#
# PYTHON=python3.12   another interpreter than python3 (3.10 or newer) for .venv
# TORCH=...           another torch, e.g. one without CUDA, which is a tenth of the size:
#                     make demo TORCH="torch==2.13.0 --index-url URL_OF_PYTORCH_CPU_WHEELS"
# Both take effect when .venv is made; to change them later: rm -rf .venv

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP = .venv/bin/python -m pip --disable-pip-version-check install -qq

.PHONY: demo test test-1 test-2 test-3 test-all lint setup

demo: setup
	@.venv/bin/python demo.py

# beside each other, as most of a swarm's time is waiting; what a part prints is shown when it ends
test: setup
	@$(MAKE) --silent --jobs=3 --output-sync=target --keep-going test-1 test-2 test-3

test-1 test-2 test-3: setup
	@.venv/bin/python -m pytest -m "not slow" --part $(@:test-%=%)/3

test-all: setup
	@.venv/bin/python -m pytest --real-starts

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

setup: .venv/complete

# the stamp comes last: an interrupted set-up starts again, and finds what it has downloaded in pip's cache
.venv/complete: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed, $(PYTHON) is not: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@rm -f $@
	@echo "set-up, once: making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "set-up: installing $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "set-up: installing requirements.txt"
	@$(PIP) -r requirements.txt
	@touch $@
