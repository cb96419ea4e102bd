# make demo | make test | make lint | make sanitize | make simt | make gate | make gpu | make full | make matrix | make mutants
# make clean
# PYTHON=python3.12 make demo

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml setup.py CMakeLists.txt constraints.txt $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)

# The CUDA kernels are compiled only where a GPU is visible. DREAM_CUDA=ON or AUTO on the command line overrides it.
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'),0)
export DREAM_CUDA ?= OFF
endif

.PHONY: demo test lint sanitize simt gate gpu full matrix mutants clean

demo: $(VENV)/installed
	$(BIN)/dream-ext demo --install
	$(BIN)/dream-ext demo

test: $(VENV)/installed-for-tests
	$(BIN)/dream-ext demo --install
	$(BIN)/python -m pytest

lint: $(VENV)/installed-for-tests
	$(BIN)/ruff check .

# Needs compilers and the standard library of Python alone.
sanitize:
	$(PYTHON) tests/sanitize.py

# The CUDA kernels without a GPU: needs g++, the headers of CUDA, and nvcc for their PTX.
simt:
	$(PYTHON) tests/simt.py

# What nvcc makes of the CUDA kernels, against limits. Needs nvcc, no GPU.
gate: $(VENV)/installed-for-tests
	$(BIN)/python bench/gate.py

# Builds for the GPU present, proves, times: under 8 minutes. The environment is installed without kernels, to build them once.
gpu:
	$(MAKE) DREAM_CUDA=OFF $(VENV)/installed-for-tests
	PYTHON=$(BIN)/python bench/gpu.sh gpu.json

# A target of 2 billion random weights decoded in memory: minutes, and 8 GB. No download but the test environment's.
full: $(VENV)/installed-for-tests
	DREAM_FULL_SIZE=1 $(BIN)/python -m pytest -m full_size -s tests/test_full_size.py

# The exactness tests under the oldest and the newest torch and transformers; by command alone, 15 GB in .matrix.
matrix:
	$(PYTHON) tests/matrix.py

# Known bugs, put into a copy of the tree one at a time: which test catches each.
mutants: $(VENV)/installed-for-tests
	$(BIN)/python tests/mutants.py

clean:
	rm -rf $(VENV) .matrix build dist .pytest_cache .ruff_cache *.egg-info
	rm -f dream_ext/_C*.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Editable in both cases, so that the demo and the tests run the code of this folder.
$(VENV)/installed: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo]"
	touch $@

$(VENV)/installed-for-tests: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo,make,test]"
	touch $(VENV)/installed $@
