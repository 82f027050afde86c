# Every task of this repository. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NATIVE_STAMP := $(VENV)/.native-ready
# Byte code of the tests is kept, also where the environment forbids it: compiling it again takes each worker ten seconds.
unexport PYTHONDONTWRITEBYTECODE
# Many tests wait for other processes, so two workers more than cores keep the cores busy. A worker takes one to two GiB of memory.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 2, 8))')
# A file's tests run in one process: they share what takes seconds to start. The order is conftest.py's.
# A worker that dies ends the run: pytest-xdist 3.8 replaces it and may then wait for ever (its issue 1378).
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
DISTRIBUTIONS := $(patsubst %/pyproject.toml,./%,$(wildcard libs/*/pyproject.toml services/*/pyproject.toml deploy/*/pyproject.toml integrations/*/pyproject.toml))
NATIVE := $(wildcard services/intercept/native/src/*) services/intercept/native/setup.py
MANIFESTS := constraints.txt requirements/dev.txt pyproject.toml VERSION hatch_build.py $(DISTRIBUTIONS:%=%/pyproject.toml)

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(NATIVE_STAMP) ## prepare .venv with everything (both run and test call it)

$(STAMP): $(MANIFESTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
		{ echo "Wooly needs Python 3.11 to 3.14; $(PYTHON) is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements/dev.txt
	@touch $(STAMP)

$(NATIVE_STAMP): $(STAMP) $(NATIVE)
	@if command -v $${CXX:-c++} > /dev/null; then $(MAKE) --no-print-directory native || echo "wooly-native was not built; the client is pure Python"; \
		else echo "no C++ compiler, so wooly-native is not built; the client is pure Python"; fi
	@touch $(NATIVE_STAMP)

.PHONY: native
native: ## build the client's native kernels into .venv (optional; needs a C++ compiler, one minute)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e services/intercept/native

.PHONY: test-native
test-native: setup ## the client's and the conformance tests with native kernels, and without them
	for native in on off; do \
		WOOLYAI_NATIVE=$$native $(PYTEST) -m "not slow and not gpu and not docker" services/intercept/tests tests/conformance || exit 1; \
	done

.PHONY: run
run: setup ## train a network on the digits data set, its "cuda" work executed by another process
	$(BIN)/wooly run examples/train_digits.py

.PHONY: test
test: setup ## the tests (six to eight minutes on two cores)
	$(PYTEST) -m "not slow and not gpu and not docker"

.PHONY: test-all
test-all: setup ## all tests, the slow ones too
	WOOLY_THOROUGH=1 $(PYTEST) -m "not gpu and not docker"

# Python:PyTorch; client@executor: the client's tests with an executor of the other environment. docs/guides/install.md says what is supported.
MATRIX ?= 3.11:2.11 3.12:2.12 3.13:2.13 3.14:2.14 3.14:2.15 3.11:2.11@3.14:2.15 3.14:2.15@3.11:2.11

.PHONY: test-matrix
test-matrix: setup ## the tests of client, executor, torch.distributed and conformance with other releases of Python and PyTorch (gigabytes; MATRIX="3.12:2.12 3.13:2.13")
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements/matrix.txt
	$(BIN)/python tests/matrix.py --workers $(WORKERS) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(MATRIX)

ECOSYSTEM := .ecosystem

.PHONY: ecosystem
ecosystem: setup ## programs of other people's libraries (trl, diffusers, gpytorch, ...) on "cuda" and on the CPU (installs a gigabyte)
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	# The packages of .venv are visible there, so that pip adds only what is missing.
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$packages")')" > $$($(ECOSYSTEM)/bin/python -c "$$packages")/checkout.pth
	$(ECOSYSTEM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements/ecosystem.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" $(ECOSYSTEM)/bin/python -m pytest tests/ecosystem

# vLLM and the environment below it, whose PyTorch is the one that vLLM pins. test-vllm-current sets them for another release.
VLLM ?= .vllm
VLLM_RELEASE ?= 0.32.0
VLLM_BELOW ?= $(BIN)/python

.PHONY: vllm
vllm: setup ## prepare .vllm, an environment with vLLM and this checkout (needs two gigabytes)
	test -x $(VLLM)/bin/python || $(VLLM_BELOW) -m venv $(VLLM)
	# The packages of the environment below are visible there, so that pip adds only what is missing.
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(VLLM_BELOW) -c "$$packages")')" > $$($(VLLM)/bin/python -c "$$packages")/checkout.pth
	# vLLM requires libraries of NVIDIA's that only a GPU in this machine could use, so it is installed without its requirements.
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==$(VLLM_RELEASE)

.PHONY: test-vllm
test-vllm: vllm ## vLLM on "cuda": its tokens, its server, its recovery (slow: many minutes)
	PATH="$(CURDIR)/$(VLLM)/bin:$(CURDIR)/$(BIN):$$PATH" $(VLLM)/bin/python -m pytest -p no:xdist -o faulthandler_timeout=0 integrations/vllm/tests

.PHONY: test-vllm-current
test-vllm-current: setup ## the same with the current vLLM and the PyTorch that it pins (needs eight gigabytes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements/matrix.txt
	$(BIN)/python tests/matrix.py --prepare $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) 3.13:2.14
	$(MAKE) test-vllm VLLM=.vllm-0.33 VLLM_RELEASE=0.33.0 VLLM_BELOW=.matrix/3.13-2.14/bin/python

.PHONY: bench-serving
bench-serving: vllm ## servers of vLLM on one device: tokens per second, two against one, P0 beside P4, weights, wake (--json)
	PATH="$(CURDIR)/$(VLLM)/bin:$(CURDIR)/$(BIN):$$PATH" $(VLLM)/bin/python bench/serving.py $(BENCH_SERVING)

.PHONY: lint
lint: setup ## ruff (with a ban on pickle, marshal, eval, exec), mypy (strict for libs), import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: setup ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: setup ## the benchmarks: the client against local PyTorch, the cores of dispatch, memory and placement, tenants against each other, a thousand sessions
	$(BIN)/python bench/client.py
	$(BIN)/python bench/far.py
	$(BIN)/python bench/bytes.py
	$(BIN)/python bench/kernels.py
	$(BIN)/python bench/products.py
	$(BIN)/python bench/one_thread.py
	$(BIN)/python bench/dispatch.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/sharing.py
	$(BIN)/python bench/control.py
	$(BIN)/python bench/scale.py

.PHONY: costs
costs: setup ## what an operation costs, in bytecode instructions, against the accepted counts (COSTS=--accept accepts the new ones)
	$(BIN)/python -m tests.costs.record $(COSTS)

.PHONY: bench-credits
bench-credits: setup ## what metering takes, and ten models' bills alone and beside another tenant (an hour; --runs, --generations)
	$(BIN)/python bench/credits.py $(CREDITS_ARGS)

.PHONY: credits-table
credits-table: setup ## the table of ten models' credits, as the page docs/performance/credits.md; add it to mkdocs.yml (an hour on a quiet machine)
	$(BIN)/python bench/credits.py --only models --page docs/performance/credits.md $(CREDITS_ARGS)

.PHONY: bench-jit
bench-jit: setup ## generated kernels on PoCL, as ratios to eager PyTorch; who computes in whole models, what is left
	$(BIN)/python bench/jit.py
	$(BIN)/python bench/coverage.py

.PHONY: bench-gpu
bench-gpu: setup ## one GPU, used by eager CUDA and by Wooly (needs an NVIDIA GPU; BENCH_GPU="--fake" shows the table without one)
	$(BIN)/python bench/gpu.py $(BENCH_GPU)

.PHONY: kernel-table
kernel-table: setup ## build every kernel for six GPUs, and write docs/performance/registers.md anew (needs `make amd-compiler`, no GPU; ten minutes)
	$(BIN)/python -m services.compiler.tests.chips.table

.PHONY: amd-compiler
amd-compiler: ## install the compiler for AMD targets (Debian; `make test` skips its tests without it, `make test-all` needs it)
	apt-get install -y --no-install-recommends clang-19 lld-19

.PHONY: postgres
postgres: ## install a PostgreSQL server (Debian; tests on it skip without)
	apt-get install -y --no-install-recommends postgresql

.PHONY: browser
browser: ## install a browser for the tests of the web UI (Debian; they skip without)
	apt-get install -y --no-install-recommends chromium fonts-dejavu-core

.PHONY: screenshots
screenshots: setup ## take docs/images/ui-*.png anew, of a stack with work in it (needs `make browser`; two minutes)
	$(BIN)/python docs/images/screenshots.py

.PHONY: every-float
every-float: setup ## our elementary functions against all 2**32 numbers: minutes per function
	WOOLY_EVERY_FLOAT=1 $(BIN)/python -m pytest services/compiler/tests/test_mathlib.py -k far_and_wide -s

.PHONY: fuzz
fuzz: setup ## decode a million mutated programs
	WOOLY_FUZZ_COUNT=1000000 $(BIN)/python -m pytest libs/wis/tests/test_fuzz.py -p no:xdist --timeout 3600

HOSTILE_OUT ?= .hostile

.PHONY: hostile
hostile: setup ## every operator, whether its results show fresh memory; then with arguments that do not fit (half an hour; HOSTILE="--calls N --seed S")
	$(BIN)/python services/executor/tests/hostile/unwritten.py --out $(HOSTILE_OUT) $(HOSTILE)
	$(BIN)/python services/executor/tests/hostile/fuzz.py --out $(HOSTILE_OUT) $(HOSTILE)

.PHONY: torch-suite
torch-suite: setup ## PyTorch's own device tests on "cuda" and on the CPU (hours; SUITE="test_indexing.py -k name --jobs N --json")
	tests/torch_suite/fetch.sh .torch-suite
	$(BIN)/python tests/torch_suite/suite.py $(SUITE)

.PHONY: chaos
chaos: setup ## twenty minutes of faults: processes killed and stopped, links cut, disks full, clocks moved (CHAOS="--minutes N --seed S")
	$(BIN)/python tests/faults/chaos.py $(CHAOS)

.PHONY: soak
soak: setup ## half an hour of ordinary work: does anything grow? (SOAK="--minutes N")
	$(BIN)/python tests/faults/soak.py $(SOAK)

# For the machine with the GPU: not for this one. torch and what comes with it are there.
GPU_PYTHON ?= 3.12
GPU_WHEELS := .gpu-wheels
GPU_PLATFORMS := $(foreach n,34 28 27 24 17 12 5,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64

.PHONY: gpu-wheels
gpu-wheels: setup ## collect what tests/gpu/run.sh needs on a machine without a network (.gpu-wheels, 40 MiB)
	rm -rf $(GPU_WHEELS)
	grep -v '^torch==' constraints.txt > $(VENV)/gpu-constraints.txt
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version $(GPU_PYTHON) \
		--implementation cp $(GPU_PLATFORMS) -d $(GPU_WHEELS) -c $(VENV)/gpu-constraints.txt -r requirements/gpu.txt
	@du -sh $(GPU_WHEELS)

.PHONY: gpu
gpu: ## the same work on a real GPU and on ours, side by side (needs an NVIDIA GPU; GPU_ARGS="--truth cpu" does not)
	tests/gpu/run.sh $(GPU_ARGS)

.PHONY: docs
docs: setup ## write the generated reference pages anew
	$(BIN)/python docs/reference/optable.py > $(VENV)/optable.md && cp $(VENV)/optable.md docs/reference/optable.md
	$(BIN)/python -m wooly_triton.page > docs/reference/ttir.md
	$(BIN)/python -m wooly_cuda_c.page > docs/reference/cuda-c.md
	$(BIN)/python docs/decisions.py > $(VENV)/decisions.md && cp $(VENV)/decisions.md docs/adr/index.md
	$(BIN)/python docs/reference/configuration.py > $(VENV)/configuration.md && cp $(VENV)/configuration.md docs/reference/configuration.md
	$(BIN)/python docs/reference/asyncapi.py > $(VENV)/asyncapi.yaml && cp $(VENV)/asyncapi.yaml docs/reference/asyncapi.yaml

SITE_STAMP := $(VENV)/.site-ready

$(SITE_STAMP): $(STAMP) requirements/site.txt constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements/site.txt
	@touch $(SITE_STAMP)

.PHONY: site
site: setup $(SITE_STAMP) ## build the documentation as a site, in site/; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: docker-engine
docker-engine: ## install a Docker engine (Debian); dockerd is started by whoever needs it, compose v2 and buildx are not in Debian 12
	apt-get install -y --no-install-recommends docker.io containerd runc iptables mmdebstrap

# BASE, TORCH_INDEX, PIP_CONF, CA_FILE, BUILD_ARGS: see deploy/docker/build.sh. LOCAL=1: NATS and PostgreSQL are built too, and a BASE where none is named.
.PHONY: compose-test
compose-test: setup ## build the images, run the compose stack, and scripts on it (needs a Docker engine; minutes)
	$(if $(LOCAL),$(if $(BASE),,deploy/docker/local/debian.sh))
	$(if $(LOCAL),BASE=$(or $(BASE),wooly-debian)) deploy/docker/build.sh $(if $(LOCAL),nats postgres) router scheduler metering compiler operator executor-cpu client
	WOOLY_COMPOSE_LOCAL=$(LOCAL) $(BIN)/python -m pytest tests/deploy/test_compose.py -m docker -p no:xdist

.PHONY: manifests
manifests: setup ## write the kustomize bases anew from the chart
	$(BIN)/python deploy/k8s/render.py

.PHONY: dist
dist: setup ## build a wheel of each distribution into dist/ (docs/guides/install.md says how to install from there)
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist $(DISTRIBUTIONS)
	@ls dist

.PHONY: clean
clean: ## remove the virtual environment, caches, wheels and the site
	rm -rf $(VENV) .matrix site dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
