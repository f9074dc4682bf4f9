# `make quickstart` runs the main job on a fresh machine, `make test` passes the tests. Both install everything into .venv first.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.txt
STAMP := $(VENV)/.installed-$(shell cat $(LOCK) requirements/uv.txt pyproject.toml | sha256sum | cut -c1-16)
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: install quickstart test test-full lint unit docs lock clean

install: $(STAMP)

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed; install Python 3.11 to 3.13 and say make PYTHON=python3.12, say"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode --no-deps --require-hashes -r $(LOCK)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.installed-*
	touch $@

quickstart: install
	$(BIN)/rlrun local examples/quickstart.yaml --output-dir $(RUN)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: install
	$(BIN)/pytest tests/unit

test: lint
	$(BIN)/pytest tests

# Also what takes long: the benchmarks' tables with real parts, and more repetitions.
test-full: test
	$(BIN)/python -m benchmarks.async_vs_sync --real

docs: install
	$(BIN)/python -m rlrun.cli.docs --write

# Lock files carry versions and hashes but no addresses.
UV_COMPILE = $(BIN)/uv pip compile --generate-hashes --no-header --no-emit-index-url --no-annotate --upgrade --quiet
lock:
	$(UV_COMPILE) pyproject.toml --extra operator --extra orchestrator --extra trainer --extra inference --extra cli --extra cpu --extra dev \
	  --override requirements/overrides-cpu.txt --python-version 3.11 -o requirements/cpu.txt
	$(UV_COMPILE) pyproject.toml --extra orchestrator --extra trainer --extra inference --extra cli --extra gpu --python-version 3.12 -o requirements/gpu.txt
	$(UV_COMPILE) pyproject.toml --extra operator --python-version 3.11 -o requirements/operator.txt

clean:
	rm -rf $(VENV) build workloads/*.egg-info
