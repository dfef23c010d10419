# The two commands that matter: make demo, make test. Everything happens in .venv, made by the first of them.

# The first Python >= 3.11 on the path; override with: make demo PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
BIN := .venv/bin
SETUP = @$(if $(PYTHON),"$(PYTHON)" tools/setup_environment.py,\
	echo "setup: error: no Python 3.11 or newer found; install one, or: make PYTHON=/path/to/python" >&2; exit 1;)

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test check format clean distclean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup:  ## make .venv and install swarmtrain into it (nothing to do: under a second)
	$(SETUP)

setup-dev:
	$(SETUP) --dev

demo: setup  ## one bootstrap peer and three training peers on this machine, about two minutes
	@$(BIN)/swarmtrain demo $(DEMO_OPTIONS)

# Two at a time: most files compute on one core, and those that start processes mind no company. A file stays together.
PYTEST_OPTIONS ?= -n 2 --dist loadfile

test: check  ## linters, types and the whole test suite
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

check: setup-dev  ## linters and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-dev  ## put the source into its one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches, build output and the demo's results
	rm -rf build dist swarmtrain-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	rm -rf .venv
