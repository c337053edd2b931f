# `make demo`, `make test`, `make notebooks` and `make docs`. Each makes its environment first, and uses a GPU where there is one.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint notebooks docs

demo: .venv/demo
	@echo "== Replaying requests through a vmmkv cache, checking attention against float64"
	$(BIN)/vmmkv demo

test: .venv/test
	@echo "== Running the tests (those that need a GPU run where there is one)"
	$(BIN)/python -m pytest

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
