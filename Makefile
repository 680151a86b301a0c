# `make` shows the targets. Every target makes what it needs; nothing has to be activated or installed by hand.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
UV_VERSION := 0.13.8
UV := .uv/bin/uv
VENV := .venv
BIN := $(VENV)/bin
FILE ?= examples/nano.yaml
NAME ?= nano
GPU_VENV := .venv-gpu
GPU_PYTHON ?= $(GPU_VENV)/bin/python
NODES ?= 2
FAKE ?= 0
IMAGE_CONTEXT := pyproject.toml README.md LICENSE requirements-build.txt operator runtime kernels

export UV_LINK_MODE ?= copy

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: up
up: $(VENV)/.ready ## Start the tiny DeepSeek-V4 on this machine and answer a first chat
	@$(BIN)/dsv4 up $(FILE) --detach
	@$(BIN)/dsv4 chat $(NAME) "Say something." --max-tokens 24 --no-thinking
	@command -v dsv4 >/dev/null || printf '\nSo that your shell finds dsv4:  export PATH="%s/$(BIN):$$PATH"\n' "$$PWD"

.PHONY: down
down: ## Stop it and remove everything that it started
	@if [ -x $(BIN)/dsv4 ]; then $(BIN)/dsv4 down $(NAME); else echo "nothing is installed, so nothing runs"; fi

.PHONY: test
test: check $(VENV)/.kit ## Check the code, then run every test ring that this machine can run
	@$(BIN)/python tests/rings.py

.PHONY: check
check: $(VENV)/.ready ## Format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.ready ## Format the code and apply the fixes of ruff
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

.PHONY: bench
bench: $(VENV)/.kit ## Measure start-up and recovery on this machine
	@$(BIN)/python benchmarks/recovery.py

.PHONY: gate
gate: $(VENV)/.ready ## Compile every kernel configuration for sm_90, sm_120 and sm_121 with three Tritons, without a GPU
	@$(BIN)/python benchmarks/kernels/fetch.py tritons
	@$(BIN)/python -m dsv4_kernels.gate --check

.PHONY: cluster-up
cluster-up: $(VENV)/.ready ## Start a Kubernetes cluster of real parts on this machine (NODES=2 FAKE=0), for trying and tests
	@PYTHONPATH=tests/cluster $(BIN)/python -m clusterkit up --nodes $(NODES) --fake $(FAKE)

.PHONY: cluster-down
cluster-down: $(VENV)/.ready ## Stop that cluster and check that nothing of it is left
	@PYTHONPATH=tests/cluster $(BIN)/python -m clusterkit down

.PHONY: engine-test
engine-test: $(VENV)/.kit ## Run the engine ring of the tests with its long tests
	@$(BIN)/python -m pytest -q tests/engine

.PHONY: gpu-setup
gpu-setup: $(GPU_VENV)/.ready ## Make the virtual environment for machines with NVIDIA GPUs: vLLM for CUDA and Ray (12 GB and more)

.PHONY: gpu-test
gpu-test: ## Run the tests on this machine's NVIDIA GPUs, and write the results to gpu-results.md
	@if ! nvidia-smi -L >/dev/null 2>&1; then echo "the GPU tests are left out: nvidia-smi lists no NVIDIA GPU on this machine"; \
	else { [ "$(GPU_PYTHON)" != "$(GPU_VENV)/bin/python" ] || $(MAKE) --no-print-directory $(GPU_VENV)/.kit; } \
	  && $(GPU_PYTHON) -m pytest -q -s tests/gpu; fi

.PHONY: cluster-build
cluster-build: $(VENV)/.ready ## Build Kubernetes and the other cluster components from their Go modules, once
	@PYTHONPATH=tests/cluster $(BIN)/python -m clusterkit prepare

.PHONY: cluster-test
cluster-test: $(VENV)/.ready ## Run the cluster ring of the tests with its long tests; the first time it builds Kubernetes
	@$(BIN)/python -m pytest -q -n 2 tests/cluster

.PHONY: release-check
release-check: test ## Before a release: all tests with the long ones, and the mutants (hours)
	@$(BIN)/python -m pytest -q -m long tests/kernels
	@$(BIN)/python -m pytest -q -m long tests/engine
	@$(BIN)/python -m pytest -q -m long tests/cluster
	@$(BIN)/python tests/mutants.py

.PHONY: dist
dist: $(VENV)/.ready ## Build wheels, the packed chart and the build contexts of both images into dist/
	@rm -rf dist && mkdir dist
	@$(UV) build --quiet --wheel --out-dir dist . && $(UV) build --quiet --wheel --out-dir dist kernels
	@"$$(PYTHONPATH=tests/cluster $(BIN)/python -m clusterkit build helm | tail -n 1)/helm" package charts/dsv4-operator --destination dist >/dev/null 2>&1
	@git archive --prefix=dsv4/ -o dist/images-context.tar.gz HEAD $(IMAGE_CONTEXT)
	@rm -f dist/.gitignore; (cd dist && sha256sum *.whl *.tgz *.tar.gz) >dist/SHA256SUMS; cat dist/SHA256SUMS

.PHONY: manifests
manifests: $(VENV)/.ready ## Make the CustomResourceDefinition, manifests/install.yaml and the dashboards again
	@$(BIN)/python manifests/dashboards.py
	@$(BIN)/python manifests/generate.py --helm "$$(PYTHONPATH=tests/cluster $(BIN)/python -m clusterkit build helm | tail -n 1)/helm"

.PHONY: lock
lock: $(UV) ## Resolve the exact pins again, with hashes for what goes into images
	@$(UV) pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
	  --extra local --extra dev --override requirements-overrides.txt -o requirements.txt pyproject.toml
	@$(UV) pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
	  --no-emit-package dsv4-kernels --extra gpu --extra test --override requirements-gpu-overrides.txt \
	  -o requirements-gpu.txt pyproject.toml
	@$(UV) pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
	  --generate-hashes --extra operator --constraint requirements.txt -o operator/requirements.txt pyproject.toml
	@echo "ray[default]" | $(UV) pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
	  --no-emit-index-url --generate-hashes --extra runtime --constraint requirements.txt \
	  --override runtime/requirements-overrides.txt -o runtime/requirements.txt pyproject.toml -
	@sed -n 's/^requires = \["\(.*\)"\]$$/\1/p' pyproject.toml | $(UV) pip compile --quiet --universal --python-version 3.11 \
	  --no-header --no-annotate --no-emit-index-url --generate-hashes -o requirements-build.txt -

.PHONY: setup
setup: $(VENV)/.kit ## Only make the virtual environment

.PHONY: clean
clean: down ## Remove the virtual environments and caches (not ~/.dsv4)
	rm -rf $(VENV) $(GPU_VENV) .uv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(UV):
	@PYTHON=$(PYTHON) UV_VERSION=$(UV_VERSION) bash .ci/bootstrap

$(VENV)/.ready: $(UV) requirements.txt requirements-overrides.txt pyproject.toml kernels/pyproject.toml
	@echo "dsv4: installing the pinned packages into $(VENV) (once, some minutes on a slow line)"
	@[ -x $(BIN)/python ] || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@$(UV) pip sync --quiet --compile-bytecode --python $(BIN)/python requirements.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable . --editable ./kernels
	@touch $@

# Needed by tests and benchmarks only: fault injection in vLLM's workers.
$(VENV)/.kit $(GPU_VENV)/.kit: %/.kit: %/.ready tests/kit/pyproject.toml $(wildcard tests/kit/dsv4_faults/*.py)
	@$(UV) pip install --quiet --python $*/bin/python --no-deps --reinstall ./tests/kit
	@touch $@

$(GPU_VENV)/.ready: $(UV) requirements-gpu.txt requirements-gpu-overrides.txt pyproject.toml kernels/pyproject.toml
	@echo "dsv4: installing vLLM for CUDA into $(GPU_VENV) (once, many minutes on a slow line)"
	@[ -x $(GPU_VENV)/bin/python ] || $(UV) venv --quiet --python $(PYTHON) $(GPU_VENV)
	@$(UV) pip sync --quiet --compile-bytecode --python $(GPU_VENV)/bin/python requirements-gpu.txt
	@$(UV) pip install --quiet --python $(GPU_VENV)/bin/python --no-deps --editable . --editable ./kernels
	@touch $@
