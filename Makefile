# Everything a developer or a user of a fresh clone needs; each target makes the virtual environment when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test check bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,tensorboard]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/paceline compare cnn --data digits --ranks 2 --batch 32 --lr 0.02 --epochs 3

test: $(STAMP)
	$(BIN)/pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_imports.py

$(VENV)/.bench: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/measuring_cost.py
	$(BIN)/python benchmarks/all_reduces.py
	$(BIN)/python benchmarks/strategies.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
