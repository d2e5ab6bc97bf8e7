# make demo      two peers on this machine learn English together, two to three minutes
# make test      the tests, in minutes; make test-all: the slow ones too
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

.PHONY: demo test test-all lint setup

demo: setup
	@.venv/bin/python demo.py

# in parts beside each other, as most of a swarm's time is waiting; what a part prints is shown when it ends
PARTS = 1 2 3
.PHONY: $(PARTS:%=test-%)

test: setup
	@$(MAKE) --silent --jobs --output-sync=target --keep-going $(PARTS:%=test-%)

$(PARTS:%=test-%): setup
	@.venv/bin/python -m pytest -m "not slow" --part $(@:test-%=%)/$(words $(PARTS))

# and each script that the tests start imports its libraries itself
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
