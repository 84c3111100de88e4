# Every target makes the environment it needs: `make demo` and `make test` work in a fresh clone.
# ARGS is handed on:  make test ARGS="-k planner"     make demo ARGS="--steps 4"

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
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
	@touch $@
