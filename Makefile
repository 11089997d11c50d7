# Tasks of a developer. `make help` lists them.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help venv fmt lint test-fast test weekly graphs docs wheel kernels mutants

help: ## list the tasks
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

venv: ## create the virtual environment with everything that the tasks need
	@source scripts/setup_venv.sh && setup_venv export,benchmark,completion,docs,dev

fmt: venv ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: venv ## run ruff, mypy --strict and the check of the prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_language.py

test-fast: venv ## run the tests that need no sample pipeline, about two minutes
	$(BIN)/python -m pytest -m "not gpu and not pipeline and not slow" -n auto

test: ## run everything that CI runs
	scripts/test.sh

weekly: ## run and record what takes too long for CI, hours; it continues after a kill
	@source scripts/setup_venv.sh && setup_venv export,benchmark,completion,docs,dev,ray
	$(BIN)/python scripts/weekly.py

graphs: venv ## export the graphs in tests/graphs again, after a change of the exporter, torch or diffusers
	rm -f tests/graphs/*.xz
	SDONNX_TEST_GRAPHS=write $(BIN)/python -m pytest -m "not gpu and (pipeline or slow)" -n auto --dist loadfile --ignore tests/export

docs: venv ## build the documentation into site/, warnings are errors
	$(BIN)/mkdocs build --strict

wheel: venv ## build the source distribution and the wheel into dist/
	SDONNX_KERNELS=0 $(BIN)/python -m build --no-isolation

kernels: venv ## build the wheel of our CUDA kernels into dist/, for all GPUs and systems with glibc 2.28 or newer
	rm -rf build/kernels
	SDONNX_GLIBC=2.28 $(BIN)/python -m build --wheel --outdir build/kernels kernels
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --only-plat --plat manylinux_2_28_$$(uname -m) --wheel-dir dist build/kernels/*.whl

mutants: venv ## check that tests notice 40 mutations of the package, about ten minutes
	$(BIN)/python scripts/mutate.py
