# make bench | test | coverage | lint | sanitize | simt | cuda | audit | triton-oldest: each sets up what it needs in .venv, then
# runs. Stamps in .venv/stamps keep a second run from setting up again; a changed C++ source is rebuilt.
#
# Needs python3 (3.10 or newer) with venv and headers, a C++ compiler (GCC 11 or Clang 14, or newer) and make. On Debian and
# Ubuntu: apt install python3-venv python3-dev g++ make

PYTHON ?= python3
# The version the tests are run with. Any from 2.11 on does, and any build: make test TORCH=torch takes the newest, which
# on Linux brings several GB of CUDA libraries along.
TORCH ?= torch==2.13.0
# The CUDA kernels: auto (where an nvcc is found), on, off. By default they are compiled where there is a GPU for them.
PYCKPT_CUDA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo auto || echo off)
export PYCKPT_CUDA
# Further arguments for the command: make bench ARGS=--quick, make test ARGS='-k softmax'
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip install --quiet
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
CXX_FILES := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
SANITIZED := build/sanitize

.PHONY: help bench test coverage lint sanitize simt cuda audit triton-oldest clean FORCE
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(MAKEFILE_LIST)

bench: $(STAMPS)/bench
	@mkdir -p bench/results
	$(BIN)/python -m bench --json bench/results/bench.json --plot bench/results/bench.png $(ARGS)

# A process for each processor, at most four; ARGS='-n 0' for a debugger.
test: $(STAMPS)/test
	PYTHONPATH=$(CURDIR) $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal \
	    -p tests._backend_report --require-backend cpu $(ARGS)

# docs/coverage.json against this machine: real architectures' gradients and bytes. Written by python -m bench.coverage.
coverage: $(STAMPS)/test
	$(BIN)/python -m bench.coverage --check $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

# The kernels' tests on a build with AddressSanitizer and UBSan, which end the process at the first fault. The sanitizer's
# runtime has to be loaded before Python; leaks are not looked for, since the interpreter has its own. Needs GCC. The other
# backends of the tests have no code in that build.
SANITIZED_TESTS ?= $(patsubst %,tests/test_%.py,accuracy attention invariants dropout property)
sanitize: $(STAMPS)/test
	PYCKPT_CUDA=off PYCKPT_SANITIZE=address,undefined $(BIN)/python setup.py --quiet build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	@export LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(CURDIR)/$(SANITIZED)/lib:$(CURDIR); \
	$(BIN)/python -c 'import sys; sys.path.pop(0); import pyckpt; print("under test:", pyckpt.backends.native.__file__)' \
	    | grep '$(SANITIZED)' && \
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal -p tests._backend_report -p no:faulthandler -p no:cacheprovider \
	    --capture=sys --require-backend cpu -m 'not slow' -k 'not cuda_emulated and not triton_interpreted and not reference' \
	    $(SANITIZED_TESTS) $(ARGS)

# The CUDA kernels on the CPU, every access of theirs checked: no GPU and no nvcc, but CUDA's headers (tests/simt/build.py).
simt: $(STAMPS)/test
	$(BIN)/python -m tests.simt
	PYTHONPATH=$(CURDIR) PYCKPT_TEST_SIMT=check $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal -p tests._backend_report \
	    --require-backend cuda_emulated -m 'not slow' -k 'simt or cuda_emulated' $(ARGS)

# The CUDA kernels compiled by nvcc, for one architecture unless PYCKPT_CUDA_ARCHS names others. Needs no GPU.
CUDA_BUILD := build/cuda
# Where setup.py builds editable installs: the CPU's objects are there already.
OBJECTS = build/editable-$(shell $(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
cuda: $(STAMPS)/tools
	PYCKPT_CUDA=on PYCKPT_CUDA_ARCHS='$(or $(PYCKPT_CUDA_ARCHS),90)' $(BIN)/python setup.py --quiet build \
	    --build-base $(CUDA_BUILD) --build-temp $(OBJECTS) --build-lib $(CUDA_BUILD)/lib
	cd $(CUDA_BUILD)/lib && $(abspath $(BIN)/python) -m pyckpt doctor | grep -A 1 '^CUDA kernels' | grep nvcc

# The Triton kernels, and csrc/cuda where there is an nvcc, compiled without a GPU, and what came out: docs/audit*.md;
# ARGS='--quick' for a part.
audit: $(STAMPS)/test
	$(BIN)/python -m bench.audit $(ARGS)

# The same with the oldest Triton that is supported, and its interpreter, which needs an older numpy too.
OLD_TRITON := build/triton-oldest
triton-oldest: $(STAMPS)/test
	rm -rf $(OLD_TRITON)
	$(PIP) --target $(OLD_TRITON) --no-deps triton==3.6.0 'numpy<2.4'
	PYTHONPATH=$(CURDIR)/$(OLD_TRITON):$(CURDIR) $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal \
	    -p tests._backend_report --require-backend triton_interpreted -m 'not slow' -k triton_interpreted \
	    tests/test_accuracy.py tests/test_dropout.py tests/test_attention_triton.py $(ARGS)
	PYTHONPATH=$(CURDIR)/$(OLD_TRITON):$(CURDIR) $(BIN)/python -m bench.audit --quick --only triton

clean:
	rm -rf $(VENV) build dist *.egg-info pyckpt/_C*.so pyckpt/_no_compiler.txt

# One stamp for each extra: the package, editable, with what that extra needs.
$(STAMPS)/bench $(STAMPS)/test: $(SOURCES) $(STAMPS)/settings
$(STAMPS)/dev: setup.py pyproject.toml
$(STAMPS)/bench $(STAMPS)/test $(STAMPS)/dev: $(STAMPS)/tools
	$(PIP) --no-build-isolation --editable '.[$(@F)]'
	@test ! -e pyckpt/_no_compiler.txt || { cat pyckpt/_no_compiler.txt; \
	    echo "No C++ compiler: install g++ or clang++, or name one in CXX."; exit 1; }
	@touch $@

# Torch, and what pyproject.toml builds with: builds then need no environment of their own, and reuse their objects.
$(STAMPS)/tools: $(STAMPS)/torch pyproject.toml
	$(PIP) $(TORCH)
	sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '" ' | tr , '\n' > $(STAMPS)/requires.txt
	$(PIP) -r $(STAMPS)/requires.txt
	@touch $@

# Newer only when the build is asked for something else.
$(STAMPS)/settings: FORCE | $(BIN)/pip
	@mkdir -p $(@D)
	@echo '$(PYCKPT_CUDA) $(PYCKPT_CUDA_ARCHS)' | cmp --silent - $@ || echo '$(PYCKPT_CUDA) $(PYCKPT_CUDA_ARCHS)' > $@

# Newer only when another TORCH is asked for.
$(STAMPS)/torch: FORCE | $(BIN)/pip
	@mkdir -p $(@D)
	@echo '$(TORCH)' | cmp --silent - $@ || echo '$(TORCH)' > $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit("pyckpt needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -c 'import os, sysconfig; sys_h = os.path.join(sysconfig.get_path("include"), "Python.h"); \
	    raise SystemExit(0 if os.path.exists(sys_h) else f"{sys_h} is missing: install python3-dev")'
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made: install python3-venv."; exit 1; }
