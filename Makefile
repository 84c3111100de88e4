# Every target makes the environment it needs: `make demo` and `make test` work in a fresh clone.
# ARGS is handed on:  make test ARGS="-k planner"     make demo ARGS="--steps 4"

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The real KvikIO for its tests, without the 2 GB of CUDA libraries that it needs on a GPU.
KVIKIO := kvikio-cu13==26.10.0 libkvikio-cu13==26.10.0 rapids-logger==0.3.0 cuda-pathfinder==1.9.1 \
          nvidia-cufile==1.20.0.107
BENCH  := $(wildcard tools/bench.py tools/bench/__main__.py)

.DEFAULT_GOAL := test
.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	@$(BIN)/teraio demo $(ARGS)

test: lint
	@$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict

bench: $(STAMP)
ifeq ($(BENCH),)
	@echo "bench: this checkout has no module tools.bench, so nothing was measured" >&2; exit 1
else
	@$(BIN)/python -m tools.bench $(ARGS)
endif

# Leaves the environment's packages in place, and checks them again at the next call.
clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMP)
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# Made anew when the requirements change; an environment made some other way is filled up, not replaced.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@echo "installing teraio and its checks into $(VENV) (the first time this takes a minute or more)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps $(KVIKIO) 2>/dev/null \
	  || echo "KvikIO cannot be installed here: the tests of its store will be skipped"
	@touch $@
