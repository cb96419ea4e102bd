# make demo | make test | make lint | make sanitize | make clean      PYTHON=python3.12 make demo

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml setup.py CMakeLists.txt constraints.txt $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)

# The CUDA kernels are compiled only where a GPU is visible. DREAM_CUDA=ON or AUTO on the command line overrides it.
ifeq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'),0)
export DREAM_CUDA ?= OFF
endif

.PHONY: demo test lint sanitize clean

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

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache *.egg-info
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
