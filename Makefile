# Everything runs in .venv, which the first target that needs it builds.
#
#   make demo     fine-tune a small language model with four virtual workers
#   make test     lint, types, tests: what CI runs.   make test PYTEST_ARGS="-k schedule -x"
#   make lint     ruff and mypy only.                 make format rewrites what ruff would complain about
#   make docs     build the documentation into site/, warnings as errors
#   make venv     build .venv and stop
#   make clean    remove .venv and every cache
#
# TORCH is what pip installs before anything else, and therefore which build of torch you get. The version below is the
# one the tests run with; any torch >= 2.6 will do. pip takes options with it: for a CPU-only or another CUDA build, use
# the `--index-url` that PyTorch's install page names for it: make venv TORCH="torch --index-url URL"
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
PYTEST_JOBS ?= 2
DEMO_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format docs venv clean

demo: $(INSTALLED)
	$(BIN)/python examples/finetune_causal_lm.py $(DEMO_ARGS)

test: lint
	$(BIN)/python -m pytest -q -m timing $(PYTEST_ARGS) || test $$? -eq 5  # none was selected
	$(BIN)/python -m pytest -q -m "not timing" -n $(PYTEST_JOBS) --dist loadfile $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

venv: $(INSTALLED)

# torch first: a package that depends on it would otherwise choose the build.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
