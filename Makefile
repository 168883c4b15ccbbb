# Targets for users and developers of a clone; each one creates the virtual environment if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-gpu soak check bench bench-gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,tensorboard]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/paceline compare cnn --data digits --ranks 2 --batch 32 --epochs 3

# Two parts: first all tests except those marked `timing`, on two workers (each file on one worker); then the `timing`
# tests, with nothing else running. Plain `pytest` runs the same tests one after the other.
WORKERS ?= 2
# The tests start hundreds of processes; without cached bytecode each one compiles the package again.
test soak: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)
	@parts=0; \
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not gpu and not soak and not timing' \
	  && parts=$$((parts + 1)); \
	$(BIN)/pytest -q -m 'timing and not gpu and not soak' && parts=$$((parts + 1)); \
	if [ $$parts = 2 ]; then echo 'make test: both parts passed'; else echo 'make test: FAILED, see above'; exit 1; fi

# Tests that need a GPU; `make test` leaves them out.
test-gpu: $(STAMP)
	$(BIN)/pytest -q -m 'gpu and not soak'

# Large test matrices and the endurance test, of which `make test` runs a part. Run by hand after a change to the code
# that they cover.
soak: $(STAMP)
	$(BIN)/pytest -q -n $(WORKERS) --dist loadfile -m 'soak and not gpu'
	$(BIN)/python benchmarks/endurance.py --faults 200

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_imports.py tests/test_conventions.py

$(VENV)/.bench: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/measuring_cost.py
	$(BIN)/python benchmarks/cpu_step.py
	$(BIN)/python benchmarks/all_reduces.py
	$(BIN)/python benchmarks/strategies.py

# Seconds per epoch on a GPU, beside hand-written loops, and the kernels of a step; about ten minutes.
bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py --compile --kernels 32 512 2048

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
