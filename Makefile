# Every task of this repository. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
MANIFESTS := constraints.txt requirements/dev.txt pyproject.toml $(wildcard libs/*/pyproject.toml services/*/pyproject.toml deploy/local/pyproject.toml)

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(STAMP) ## prepare .venv with everything (both run and test call it)

$(STAMP): $(MANIFESTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "Wooly needs Python 3.11 or 3.12; $(PYTHON) is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements/dev.txt
	@touch $(STAMP)

.PHONY: run
run: setup ## train a network on the digits data set, its "cuda" work executed by another process
	$(BIN)/wooly run examples/train_digits.py

.PHONY: test
test: setup ## the tests (under ten minutes on two cores)
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu and not docker"

.PHONY: test-all
test-all: setup ## all tests, the slow ones too
	$(BIN)/python -m pytest -n 2 -m "not gpu and not docker"

.PHONY: lint
lint: setup ## ruff, mypy (strict for libs), import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: setup ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: setup ## the client benchmarks, each as a ratio to local PyTorch
	$(BIN)/python bench/client.py

.PHONY: bench-jit
bench-jit: setup ## generated kernels on PoCL, each as a ratio to eager PyTorch
	$(BIN)/python bench/jit.py

.PHONY: amd-compiler
amd-compiler: ## install the compiler for AMD targets (Debian; its tests skip without it)
	apt-get install -y --no-install-recommends clang-19 lld-19

.PHONY: fuzz
fuzz: setup ## decode a million mutated programs
	WOOLY_FUZZ_COUNT=1000000 $(BIN)/python -m pytest libs/wis/tests/test_fuzz.py -p no:xdist --timeout 3600

.PHONY: docs
docs: setup ## write the generated reference pages anew
	$(BIN)/python -m wooly_wis.docgen > docs/reference/optable.md

.PHONY: clean
clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
