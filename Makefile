# Each target makes its environment first, and uses a GPU where there is one: `make demo`, `make test`, `make benchmarks`,
# `make notebooks`, `make docs`.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint benchmarks notebooks docs

BENCHMARKS := fragmentation reuse idle allocator generate serve

demo: .venv/demo
	@echo "== Replaying requests through a vmmkv cache, checking attention against float64"
	$(BIN)/vmmkv demo

test: .venv/test
	@echo "== Running the tests (those that need a GPU run where there is one)"
	$(BIN)/python -m pytest $(PYTEST)

benchmarks: .venv/benchmarks
	@for name in $(BENCHMARKS); do echo "== benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name || exit; done

notebooks: .venv/notebooks
	@echo "== Opening the notebooks"
	$(BIN)/jupyter lab notebooks

docs: .venv/docs
	@echo "== Building the documentation: open site/index.html"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/test
	@echo "== Checking style and types"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/demo: pyproject.toml constraints.txt
	@echo "== Installing vmmkv and what its demo needs into .venv"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[bench]"
	@touch $@

.venv/test: pyproject.toml constraints.txt
	@echo "== Installing vmmkv and what its tests need into .venv"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	@touch $@

.venv/benchmarks: pyproject.toml constraints.txt
	@echo "== Installing vmmkv and what its benchmarks need into .venv"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[bench,hf]"
	@touch $@

.venv/notebooks: pyproject.toml constraints.txt
	@echo "== Installing vmmkv and what its notebooks need into .venv"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[notebooks]"
	@touch $@

.venv/docs: pyproject.toml constraints.txt
	@echo "== Installing what the documentation is built with into .venv"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@
