# Every target makes or repairs the environment first; `make help` lists them.
SHELL := /bin/bash
PY := .venv/bin/python
# More processes than this do not make the tests faster: each runs compiled code on several threads.
TEST_PROCESSES ?= 8
PYTEST_ARGS ?=
DEMO_ARGS ?=
# cpu, cuda12 or cuda13; stays what it was when not given.
ACCELERATOR ?=

.PHONY: help setup compiler test test-gpu lint style types imports format docs assets demo clean

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile
	@echo "  Variables: PYTHON=/path/to/python3.12  ACCELERATOR=cpu|cuda12|cuda13  PYTEST_ARGS='-k name'  DEMO_ARGS='--help'"

setup: ## make or repair .venv with the pinned packages
	@scripts/setup.sh $(ACCELERATOR)

compiler: setup ## fetch the compilers for NVIDIA GPUs into .cache/aot/; going on without them is possible
	@scripts/compiler.sh

test: assets compiler ## run the tests that need no GPU and are not slow
	@echo "test: running the tests in parallel"
	@$(PY) -m pytest -n logical --maxprocesses $(TEST_PROCESSES) $(PYTEST_ARGS)

test-gpu: assets ## run the tests that need one GPU
	@echo "test-gpu: running the tests marked gpu"
	@$(PY) -m pytest -m "(gpu or gpu_kernel) and not slow" $(PYTEST_ARGS)

lint: style types imports ## check style, format, types and import rules

style: setup
	@echo "style: ruff check, ruff format"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: setup
	@echo "types: pyright"
	@$(PY) -m pyright

imports: setup
	@echo "imports: who may import whom"
	@.venv/bin/lint-imports --no-cache --no-logo

format: setup ## write the format and the safe fixes
	@echo "format: ruff"
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: setup ## build the documentation into site/
	@echo "docs: building site/"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "docs: open site/index.html"

assets: setup ## fetch a small model and conversations into .assets/; going on without them is possible
	@$(PY) -m pensieve_jax.assets .assets || echo "assets: going on without what is missing"

demo: assets ## serve real conversations with and without kept state, and compare
	@echo "demo: serving the conversations"
	@.venv/bin/pensieve demo $(DEMO_ARGS)

clean: ## remove the environment, caches and everything that was built; fetched assets stay
	@echo "clean: removing .venv, caches and build outputs"
	@rm -rf .venv .cache .jax_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis site build dist demo-out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
