# Every target makes or repairs the environment first; `make help` lists them.
SHELL := /bin/bash
PY := .venv/bin/python
# More processes than this do not make the tests faster: each runs compiled code on several threads.
TEST_PROCESSES ?= 8
PYTEST_ARGS ?=
DEMO_ARGS ?=
# cpu, cuda12 or cuda13; stays what it was when not given.
ACCELERATOR ?=

.PHONY: help setup test test-gpu lint format docs assets demo clean

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile
	@echo "  Variables: PYTHON=/path/to/python3.12  ACCELERATOR=cpu|cuda12|cuda13  PYTEST_ARGS='-k name'  DEMO_ARGS='--help'"

setup: ## make or repair .venv with the pinned packages
	@scripts/setup.sh $(ACCELERATOR)

test: setup ## run the tests that need no GPU and are not slow
	@echo "test: running the tests in parallel"
	@$(PY) -m pytest -n logical --maxprocesses $(TEST_PROCESSES) $(PYTEST_ARGS)

test-gpu: setup ## run the tests that need one GPU
	@echo "test-gpu: running the tests marked gpu"
	@$(PY) -m pytest -m "gpu and not slow" $(PYTEST_ARGS)

lint: setup ## check style, format, types and import rules
	@echo "lint: ruff check"
	@$(PY) -m ruff check .
	@echo "lint: ruff format"
	@$(PY) -m ruff format --check .
	@echo "lint: pyright"
	@$(PY) -m pyright
	@echo "lint: import rules"
	@.venv/bin/lint-imports --no-cache --no-logo

format: setup ## write the format and the safe fixes
	@echo "format: ruff"
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: setup ## build the documentation into site/
	@echo "docs: building site/"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "docs: open site/index.html"

assets: setup ## fetch the demo's model and conversations into .assets/
	@$(PY) -m pensieve_jax.assets .assets

demo: setup ## serve real conversations with and without kept state, and compare
	@$(PY) -m pensieve_jax.assets .assets || echo "demo: going on without the missing assets"
	@echo "demo: serving the conversations"
	@.venv/bin/pensieve demo $(DEMO_ARGS)

clean: ## remove the environment, caches and everything that was built; fetched assets stay
	@echo "clean: removing .venv, caches and build outputs"
	@rm -rf .venv .cache .jax_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis site build dist demo-out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
