# `make` alone lists what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Written last, so that an install that failed or is out of date is done again.
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo train-demo bench test lint protos

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Make .venv and install Pilotfish with its tools (PYTHON=python3.12 chooses the interpreter)

demo: $(INSTALLED) ## Start all services on SmolLM2-135M, answer, and measure with and without the draft
	$(BIN)/pilotfish demo

train-demo: $(INSTALLED) ## Have SmolLM2-135M write text, train a head on it, and judge it: ten minutes of two cores
	$(BIN)/pilotfish train demo $(ARGS)

bench: $(INSTALLED) ## Start all services and measure them, with the draft and without (ARGS="--concurrency 1,4")
	$(BIN)/pilotfish bench --up "" $(ARGS)

test: $(INSTALLED) ## Run every test, on up to four cores at once (ARGS="-k client" runs some, ARGS="-n 0" in one process)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

lint: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

protos: $(INSTALLED) ## Generate pilotfish/v1 again after a .proto has changed
	$(BIN)/python hatch_build.py

$(INSTALLED): pyproject.toml heads/pyproject.toml constraints.txt hatch_build.py $(shell find protos -name '*.proto')
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "Pilotfish needs Python 3.11, 3.12 or 3.13; try: make setup PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ./heads -e '.[dev]'
	@touch $@
