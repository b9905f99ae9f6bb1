# Everything a person types. Each target does its own set-up and is quick when set-up exists.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: quickstart test lint types clean help

help:
	@echo "make quickstart  train GRPO and PODS on the shipped policy, then write a report (about 4 minutes)"
	@echo "make test        lint, type check and tests (about 8 minutes)"

$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (first time only; installs PyTorch)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/pods compare --config quickstart --output runs/quickstart --parallel 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -q

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
