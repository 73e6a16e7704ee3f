# make demo   from nothing to a report: environment, three models of 200 layers on the synthetic task, one page about them
# make docs   docs/_build/index.html: quickstart, probes, figures, how-tos, API
# make test   lint, types, tests (the same environment)
# make test-sets   the numerical tests once more under an older instruction set
# make test-torch TORCH=2.15   those that lean on torch under another torch, in an environment of its own
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Each process of a test would compile the package and its tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-fast test-slow test-sets test-torch lint clean

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "stabilitylab needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 5; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

JOBS ?= $(shell nproc 2>/dev/null || echo 2)

demo: $(VENV)/.base
	$(BIN)/stabilitylab sweep --grid arch=postln,deepnorm,branchnorm depth=200 seed=3 --out runs --jobs $(JOBS)
	$(BIN)/stabilitylab report runs
	@echo
	@echo "Look:  report/index.html                                        figures, claims, runs on one page"
	@echo "Next:  $(BIN)/stabilitylab claims --fast                        21 claims, judged in minutes"
	@echo "       $(BIN)/stabilitylab sweep branchnorm:8 --jobs $(JOBS)             the runs that a paper's figure needs"
	@echo "       docs/runs.md                                            the tables in pandas"

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build
	@echo "Look:  docs/_build/index.html"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Types are looked at beside the tests: one process, which leaves the other cores idle.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 lint test-fast

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

# Sums are taken in another order there, in both runs of a test of two; tests/conftest.py refuses to start where torch
# does not follow. One set besides that of make test, without the long tests; all of both with EVERY=1.
SETS ?= avx2 default
NUMERICAL := tests/probes tests/models tests/train

test-sets: $(VENV)/.dev
	@set -e; for set in $(SETS); do \
	  if [ "$$($(BIN)/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability().lower())')" = $$set ]; then \
	    echo "$$set is what make test runs under here"; continue; \
	  fi; \
	  echo "under ATEN_CPU_CAPABILITY=$$set"; \
	  ATEN_CPU_CAPABILITY=$$set $(BIN)/python -m pytest -n auto -m "not two_runs$(if $(EVERY),, and not slow)" $(NUMERICAL); \
	  [ -n "$(EVERY)" ] || break; \
	done

# The oldest that pyproject.toml promises, unless told otherwise. Torch pins sympy, so both are free here.
TORCH ?= $(shell sed -n 's/^ *"torch>=\(.*\)",$$/\1/p' pyproject.toml)
TORCH_TESTS ?= $(addprefix tests/,probes models train store onestep distributed)
WORKERS ?= auto

$(VENV)-torch-$(TORCH)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(torch|sympy)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt \
	  'torch==$(TORCH)' --editable '.[tests]'
	@touch $@

test-torch: $(VENV)-torch-$(TORCH)/.made
	@$(<D)/bin/python -c 'import torch; print("under torch", torch.__version__)'
	$(<D)/bin/python -m pytest -n $(WORKERS) $(TORCH_TESTS)

clean:
	rm -rf $(VENV) $(VENV)-torch-* .pytest_cache .ruff_cache .hypothesis dist build docs/_build
