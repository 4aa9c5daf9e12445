# `make help` lists the targets. PYTHON: what makes the environment; VENV: where it lies.
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
# A Python before 3.7 can't read the script that refuses it.
READS := $(PYTHON) -c 'import sys; sys.version_info >= (3, 7) or sys.exit("bootstrap: layercast needs Python 3.11 or newer: make ... PYTHON=python3.11")'
BOOTSTRAP := $(READS) && $(PYTHON) scripts/bootstrap.py --venv $(VENV)
# Tests run real models on few cores: one compute thread each, and nothing is ever fetched.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
DEMO_ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm test test-full check format bench clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## a small real model, its KV moved layer by layer: a table, a picture, demo.json (DEMO_ARGS=...)
	@$(BOOTSTRAP) demo
	@HF_HUB_OFFLINE=1 $(BIN)/layercast demo --json demo.json $(DEMO_ARGS)

demo-vllm: ## the same in vLLM's CPU build: cold, then a hit; demo-vllm.json (DEMO_ARGS=...)
	@$(BOOTSTRAP) demo vllm
	@mkdir -p demo-out
	@HF_HUB_OFFLINE=1 $(BIN)/layercast demo --vllm --json demo-vllm.json --out demo-out/vllm $(DEMO_ARGS)

test: ## everything but the slow tests (a part: PYTEST_ARGS=tests/plan)
	@$(BOOTSTRAP) demo test vllm
	@$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-full: ## every test
	@$(BOOTSTRAP) demo test vllm
	@$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

check: ## format, lint, types, rooms, sizes
	@$(BOOTSTRAP) check
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/size.py

format: ## mend what ruff can mend
	@$(BOOTSTRAP) check
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# bench_vllm_gpu.py needs a GPU's build of vLLM, and a model to be named.
BENCHES := $(filter-out bench/bench_vllm_gpu.py,$(wildcard bench/bench_*.py))
bench: ## the project's figures, as JSON (bench/)
	@$(BOOTSTRAP) demo test vllm
	@for file in $(BENCHES); do echo "== $$file"; OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python $$file || exit 1; done

clean: ## remove the environment, caches and what the demo and the benchmarks wrote
	rm -rf $(VENV) $(VENV).lock .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist demo-out bench-out demo.json demo-vllm.json
	find src tests scripts bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
