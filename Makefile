# Each target makes its environment first, and uses a GPU where there is one: `make demo`, `make test`, `make benchmarks`,
# `make notebooks`, `make docs`.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint benchmarks notebooks docs

# Two GPUs are needed to send between them.
TRANSFER = "transfer$(shell nvidia-smi -L 2>/dev/null | grep -q 'GPU 1' || echo ' --device cpu')"
BENCHMARKS = fragmentation pools "core --device null" mapper sharing swap $(TRANSFER) prefixes prefix_tree \
	eight_bits generate serve

demo: .venv/demo
	@echo "== Replaying requests through a vmmkv cache, checking attention against float64"
	$(BIN)/vmmkv demo

# A process for each core; with a GPU one process. A test that hangs fails after 15 minutes, and where it does not even
# notice that, its process ends. More arguments: `make test PYTEST="--exitfirst"`.
test: .venv/test | .venv/transformers-newest
	@echo "== Running the tests (those that need a GPU run where there is one)"
	$(BIN)/python -m pytest --numprocesses auto --timeout 900 \
		-o faulthandler_timeout=1000 -o faulthandler_exit_on_timeout=true $(PYTEST)

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

# A few tests run with the newest transformers, too; they are skipped where it cannot be had.
.venv/transformers-newest: | .venv/test
	-$(BIN)/pip install --quiet --no-deps --no-compile --target $@ transformers==5.24.0

EXTRAS_demo := bench
EXTRAS_test := test
EXTRAS_benchmarks := bench,hf
EXTRAS_notebooks := notebooks
EXTRAS_docs := docs

.venv/%: pyproject.toml constraints.txt
	@echo "== Installing vmmkv into .venv, and what 'make $*' needs"
	$(PYTHON) -m venv .venv
	-@$(BIN)/pip install --quiet "pip>=24" # older ones find no version of what torch needs of CUDA
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS_$*)]"
	@touch $@
