# `make help` lists the targets. Everything is installed into .venv; nothing outside this directory is touched, and root is not needed.
#
#   make PYTHON=/path/to/python3   the Python (3.10 or newer) that .venv is made with; found by itself otherwise
#   make CXX=clang++               the C++17 compiler; the one that this Python was built with otherwise
#   make TORCH_INDEX=URL           one more wheel index to look for torch in (the one that PyTorch's install page names for CPU)
#   make train ARGS="--steps 50"   more arguments for what the target runs: train, test, test-slow, law

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help train test test-slow law faults sanitize mutants lint bench clean install FORCE

PYTHON ?=
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
TORCH := $(shell sed -n 's/^torch==//p' requirements-dev.txt)

# Stamps are named after the content they stand for, so that a checkout, a touch or a branch and back installs nothing again.
SOURCES := pyproject.toml setup.py $(sort $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.py'))
digest = $(shell { echo $(1); cat $(1); } | cksum | cut -d ' ' -f 1)
MADE := $(VENV)/.made
REQUIREMENTS := $(VENV)/.requirements-$(call digest,requirements-dev.txt)
INSTALLED := $(VENV)/.installed-$(call digest,requirements-dev.txt $(SOURCES))

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: install  ## train a GPT whose parameters and optimizer state rest on NVMe (configs/nvme.json), on the sources of Python's library
	@mkdir -p runs/nvme
	$(PY) -m infinity train configs/nvme.json $(ARGS)

test: install  ## the tests, without the slow ones
	$(PY) -m pytest $(ARGS)

test-slow: install  ## the slow tests
	$(PY) -m pytest -m "slow and not law" --timeout 1800 $(ARGS)

law: install  ## the full matrix of placements, page sizes, budgets, backends and threads: no bit may differ (up to an hour)
	$(PY) -m pytest -m law --timeout 0 -s $(ARGS)

faults: install  ## every file operation of a short run goes wrong in every way, in turn: the table of what came of it
	$(PY) -m tests.support.faulting $(ARGS)

sanitize: install  ## the native code under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer (some minutes)
	$(PY) -m tests.support.sanitize $(ARGS)

mutants: install  ## small wrongs put into copies of the sources, one at a time: the tests must notice each (half an hour)
	$(PY) -m tests.support.mutants $(ARGS)

lint: install  ## ruff, mypy and the floors: imports point down only
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports; raise SystemExit(lint_imports())'

bench: install  ## every file of benchmarks/, one after the other
	@for file in $(sort $(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(PY) "$$file" || exit 1; done

clean:  ## remove what was built and cached (.venv and runs/ stay)
	rm -rf build dist *.egg-info infinity/_native* .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	rm -f $(VENV)/.installed-*
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

install: $(INSTALLED)  ## make .venv and install into it what has changed since

# The Python, the compiler and the headers are tried before anything is downloaded.
define make_venv
stop() { printf 'Stopped: %s\n' "$$*" >&2; exit 1; }
recent() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }
[ "$$(uname -s)" = Linux ] || stop "infinity runs on Linux only; this is $$(uname -s)."
python='$(PYTHON)'
if [ -n "$$python" ]; then
  recent "$$python" || stop "PYTHON=$$python is not a Python of version 3.10 or newer that runs here."
else
  for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    if recent "$$name"; then python=$$name; break; fi
  done
  [ -n "$$python" ] || stop "no Python of version 3.10 or newer was found. Install one, or name one: make PYTHON=/path/to/python3"
fi
scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT
cxx=$${CXX:-$$("$$python" -c 'import sysconfig; print(sysconfig.get_config_var("CXX") or "c++")')}
headers=$$("$$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
printf '#include <string_view>\nstatic_assert(__cplusplus >= 201703L, "C++17");\n' > "$$scratch/compiler.cpp"
printf '#include <Python.h>\n' > "$$scratch/headers.cpp"
$$cxx -std=c++17 -c "$$scratch/compiler.cpp" -o "$$scratch/compiler.o" 2> "$$scratch/log" || {
  head -n 5 "$$scratch/log" >&2
  stop "'$$cxx' does not compile C++17. Install a C++ compiler (Debian, Ubuntu: g++; Fedora: gcc-c++), or name one: make CXX=clang++"
}
$$cxx -std=c++17 -I"$$headers" -c "$$scratch/headers.cpp" -o "$$scratch/headers.o" 2> "$$scratch/log" || {
  head -n 5 "$$scratch/log" >&2
  stop "the headers of $$python (Python.h, looked for in $$headers) are missing. Install them (Debian, Ubuntu: python3-dev; Fedora: python3-devel), or use another Python: make PYTHON=/path/to/python3"
}
printf '== making $(VENV) with %s (%s)\n' "$$python" "$$("$$python" --version)"
if "$$python" -c 'import venv, ensurepip' 2>/dev/null; then
  "$$python" -m venv $(VENV)
elif "$$python" -c 'import venv, pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (22, 3))' 2>/dev/null; then
  "$$python" -m venv --without-pip $(VENV) && "$$python" -m pip --python $(PY) install --quiet pip
else
  stop "$$python can make no virtual environment (no venv with ensurepip, and no pip of version 22.3 or newer). Install it (Debian, Ubuntu: python3-venv), or use another Python: make PYTHON=/path/to/python3"
fi
endef

define install_requirements
index=$(if $(TORCH_INDEX),--extra-index-url=$(TORCH_INDEX))
if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  echo '== an NVIDIA GPU is here: installing torch $(TORCH) as pip finds it (some minutes)'
  $(PIP) install --quiet $$index 'torch==$(TORCH)'
else
  echo '== no NVIDIA GPU is here: installing the CPU build of torch $(TORCH) (some minutes)'
  $(PIP) install --quiet $$index 'torch==$(TORCH)+cpu' 2> $(VENV)/torch.log || {
    echo '== pip could not install the CPU build (why: $(VENV)/torch.log); installing torch $(TORCH) as pip finds it.'
    echo '   It works as well, but may be the CUDA build: some GB. The CPU build has an index of its own, which the install page'
    echo '   of PyTorch names; to use it, stop this and run: make TORCH_INDEX=URL'
    $(PIP) install --quiet $$index 'torch==$(TORCH)'
  }
fi
echo '== installing the other pinned requirements'
$(PIP) install --quiet --requirement requirements-dev.txt
endef

# Each block runs in one shell, which stops at the first failure.
export make_venv install_requirements

$(MADE):
	@sh -euc "$$make_venv"
	@touch $@

$(REQUIREMENTS): | $(MADE)
	@sh -euc "$$install_requirements"
	@rm -f $(VENV)/.requirements-* && touch $@

$(INSTALLED): $(REQUIREMENTS) $(if $(wildcard infinity/_native*.so),,FORCE)
	@echo '== building the native module and installing infinity (editable)'
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-* && touch $@
