# Each target does its own set-up: .venv in the repository root, the pinned set, then the work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup check test soak demo demo-sim demo-sim-five bench-sim test-sim fmt

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not soak and not sim"

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak -rP tests

demo: $(STAMP)
	bash script/demo.sh

# Only these need the simulator: the extra `sim`, and off-screen OpenGL (Debian: libosmesa6).
SIM := $(VENV)/.sim-installed

$(SIM): $(STAMP)
	@$(PYTHON) -c 'import ctypes.util, sys; sys.exit(None if ctypes.util.find_library("OSMesa") or ctypes.util.find_library("EGL") else "The simulator needs off-screen OpenGL: apt install libosmesa6 (or libegl1, and MUJOCO_GL=egl)")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,sim]'
	touch $@

demo-sim: $(SIM)
	bash script/demo_sim.sh

demo-sim-five: $(SIM)
	SIM_SET=five bash script/demo_sim.sh
	$(BIN)/python benchmarks/training/sim_criteria.py user_checkpoints/demo_sim_five/metaworld.json

bench-sim: $(SIM)
	bash script/bench_sim.sh

test-sim: $(SIM)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m sim tests/sim

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
