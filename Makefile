# Two commands: `make demo` trains a real model on real text; `make test` passes the tests. Both set `.venv` up themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The version the project is developed with; the package itself only asks for torch>=2.13. PyPI's build for Linux brings
# CUDA; for the much smaller one: make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH  ?= torch==2.13.0
# Test files are spread over this many processes, each with warm ranks of its own.
SPREAD ?= --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
STAMP  := $(VENV)/.sheer-setup
PEERS  := $(VENV)/.sheer-bench

.PHONY: setup demo test check fmt bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@echo "Setting up $(VENV); PyTorch is large, so the first time takes a minute or more"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/sheer demo $(ARGS)

test: setup
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

# Everything CI checks, in the order that fails fastest.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m sheer.config.docs --check docs/config.md
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/python -m sheer.config.docs docs/config.md

# DeepSpeed's setup imports torch, so it is built in this environment, and without its kernels.
$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet setuptools wheel ninja hatchling editables
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[bench]'
	touch $(PEERS)

bench: $(PEERS)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
