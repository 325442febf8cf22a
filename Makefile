# Everything a newcomer types. ARGS passes options on: `make demo ARGS=--exit`, `make test ARGS="-k planner"`.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install demo mini-reproduction up test check format

help:
	@echo "make install   create .venv from constraints.txt"
	@echo "make demo      the whole product on this machine: train, measure, fit, predict, then serve (ARGS=--exit stops instead)"
	@echo "make mini-reproduction   four sizes, both protocols, every rule, in a quarter of an hour; writes docs/mini-reproduction.md"
	@echo "make up        serve without submitting anything"
	@echo "make test      the whole test suite"
	@echo "make check     ruff, mypy --strict, import contracts, migrations against models"
	@echo "make format    let ruff format and fix"

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

demo: install
	@$(BIN)/longlaw demo $(ARGS)

# The cores are for training: nine series are fitted at the end, not after every measurement.
mini-reproduction: export LONGLAW_FIT_DEBOUNCE_S ?= 60
mini-reproduction: install
	@$(BIN)/longlaw demo grids/mini-reproduction.yaml grids/mini-reproduction-linear-decay.yaml --exit --report docs $(ARGS)

up: install
	@$(BIN)/longlaw up $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/longlaw db check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
