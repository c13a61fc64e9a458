# Needs make and Python 3.11. Most targets first make sure that .venv holds the pinned packages
# (tools/set_up.py): that takes minutes the first time, and no time later.

# Candidates: the first that is a Python 3.11 and can make environments makes .venv. The system's is
# built with optimizations, pyenv's by default without: vLLM's imports take a third longer there.
PYTHON ?= /usr/bin/python3.11 python3.11 python3
FITTING_PYTHON = $(shell for p in $(PYTHON); do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 \
	&& { echo $$p; break; }; done)
SET_UP = $(or $(FITTING_PYTHON),$(error None of these is a Python 3.11 with ensurepip: $(PYTHON). \
	Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv) \
	or name it: make PYTHON=/path/to/python3.11)) tools/set_up.py
# The environment of a machine with an accelerator is not made here: see CONTRIBUTING.md.
GPU_PYTHON ?= python3
ARGS ?=
STEPS ?= 100000
SCRIPTS ?= 200
SEED ?= 0
# Tests that share engines run in one process, so more than a few are of no use.
WORKERS ?= 2
VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help set-up set-up-eval demo accuracy docs test check soak simulate-builtin
.PHONY: bench-serve bench-scheduler test-gpu clean

help: ## List the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

set-up: ## Make .venv, or bring it up to date (the other targets do it by themselves)
	@$(SET_UP)

set-up-eval: ## Make .venv-eval, which holds lm_eval (accuracy does it by itself)
	@$(SET_UP) eval

demo: set-up ## Run conversations on vLLM with and without the connector, on the CPU
	@$(VENV_PYTHON) -m examples.demo $(ARGS)

accuracy: set-up set-up-eval ## Compare answers with and without the connector (ARGS="--help" for more)
	@$(VENV_PYTHON) -m examples.accuracy $(ARGS)

# Processes that tests start share compiled modules, also where the environment forbids to write
# them. Without, each compiles all tests that it collects: five seconds.
test: export PYTHONDONTWRITEBYTECODE :=
test: set-up ## Run all tests that need no accelerator (ARGS="-k name" for some of them)
	$(VENV_PYTHON) -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

check: set-up ## Check formatting, lint and types
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m mypy

docs: set-up ## Regenerate the table and the figure of the documentation
	@$(VENV_PYTHON) -m tools.docs

bench-serve: set-up ## Measure conversations and other work with and without the connector
	@$(VENV_PYTHON) -m examples.serve_bench $(ARGS)

# A set of strings has another order in each process. A seed must play alike in all of them.
soak: export PYTHONHASHSEED := 0
soak: set-up ## Simulate STEPS engine steps (default 100000) from SEED (default 0), checking every page
	@$(VENV_PYTHON) -m tests.simulation.soak --steps $(STEPS) --seed $(SEED)

simulate-builtin: set-up ## Simulate SCRIPTS (default 200) scripts with vLLM's built-in connector: which fail
	@$(VENV_PYTHON) -m tests.simulation.builtin --scripts $(SCRIPTS) --seed $(SEED)

bench-scheduler: set-up ## Measure cost in vLLM's scheduler, and what requests find and wait for
	@$(VENV_PYTHON) -m examples.scheduler_bench $(ARGS)

test-gpu: ## Run tests that need an accelerator, with GPU_PYTHON (default python3)
	$(GPU_PYTHON) -m pytest -m gpu $(ARGS)

clean: ## Remove caches and outputs; .venv and downloads stay
	rm -rf build dist accuracy-out demo-out copy-bench-out scheduler-bench-out serve-bench-out
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.*' -prune -exec rm -rf {} +
