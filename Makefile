# make demo   a first run, from nothing: environment, 200-layer BranchNorm on the synthetic task, where to look next
# make test   lint, types, tests (the same environment)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow lint bench clean

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "stabilitylab needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 5; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.base
	$(BIN)/stabilitylab probe --arch branchnorm --depth 200
	@echo
	@echo "Next:  $(BIN)/stabilitylab runs                                     the runs so far"
	@echo "       $(BIN)/stabilitylab probe --arch postln --depth 200          the same, with Post-LN"
	@echo "       $(BIN)/stabilitylab list                                     archs, probes, presets"
	@echo "       README.md, 'Read a run'                                 the tables in pandas"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint
	$(BIN)/python -m pytest -n auto -m "not slow"

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m slow

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist build
