# `make demo` and `make test` set everything up. Needed: make, and Python 3.11 or 3.12 with pip. No GPU.
#   PYTHON=/path/to/python  the interpreter to build the environment with (default: the first that fits)
#   SGLANG=0.5.17           another line of SGLang, in a folder of its own: make test SGLANG=0.5.17 (Python 3.10, too)
#   ARGS="..."              more arguments for the command: make test ARGS="-k exactness", make demo ARGS="--queries 50"
#   MINUTES=60 ANSWERS=20000 JSON=FILE   of `make soak`: how long, how many answers at least, where the summary goes
#   WORKERS=N               processes that run tests, a file each at a time (default: 2; 0: in one, as where there is a GPU)

SHELL := /bin/sh
# The SGLang to build the environment with: of each line, the version with which all tests are run (`tried` in lines.py).
NEWER := 0.5.23
OLDER := 0.5.17
SGLANG ?= $(NEWER)
VENV ?= $(if $(filter $(NEWER),$(SGLANG)),.venv,.venv-$(SGLANG))
BIN := $(VENV)/bin
# What a folder was made for is in the name: one that an earlier checkout made has another line in it, perhaps.
READY := $(VENV)/.ready-$(SGLANG)
ARGS ?=
WORKERS ?= 2
MINUTES ?= 15

# Whether a Python is one we support, and whether it can install things. A name on PATH need not run (pyenv leaves such).
LEAST := $(if $(filter $(OLDER),$(SGLANG)),10,11)
FITTING := $(if $(filter $(OLDER),$(SGLANG)),3.10 to 3.12,3.11 or 3.12)
SIZE := $(if $(filter $(OLDER),$(SGLANG)),9,11)
FITS := import sys; raise SystemExit(not (3, $(LEAST)) <= sys.version_info[:2] < (3, 13))
FITS_AND_INSTALLS := import sys, pip, venv; raise SystemExit(not (3, $(LEAST)) <= sys.version_info[:2] < (3, 13))

.PHONY: help demo test test-all test-lines soak models-table lint format docs env clean

help:
	@echo "make demo    answer 250 questions from a pool of demonstrations, on this machine"
	@echo "make test    run the tests but the slow ones: ten minutes on two cores, with real engines of every system"
	@echo "make test-all  run all tests"
	@echo "make test-lines  run the tests of what differs with the older SGLang, in an environment of its own (9 GB)"
	@echo "make soak    32 clients mix everything for 15 minutes, every answer checked (MINUTES=60 ANSWERS=20000)"
	@echo "make lint    ruff and mypy"
	@echo "make docs    write the tables of options and of results in README.md and docs/"
	@echo "make models-table  serve small models of many architectures with every system, for docs/models.md"
	@echo "make env     create $(VENV) (the others do it too): about $(SIZE) GB and a few minutes"
	@echo "make clean   remove build outputs and caches; $(VENV) stays (rm -r $(VENV) removes it)"

demo: $(READY)
	@$(BIN)/sglang-ext demo $(ARGS)

# An environment that was made elsewhere may lack pytest-xdist: one process is slower, and no reason to test nothing.
test: CHOSEN := -m "not slow"
test test-all: $(READY)
	@workers=; if $(BIN)/python -c 'import xdist' 2>/dev/null; then \
	  workers="-n $(WORKERS) --dist loadfile --no-loadscope-reorder"; \
	else \
	  echo "pytest-xdist is not installed in $(VENV): tests run in one process"; \
	fi; \
	$(BIN)/python -m pytest $$workers $(CHOSEN) $(ARGS)

# The other line of SGLang: real engines of every system, what the adapters change, flags, keys, and what pip takes.
LINES := tests/packaging tests/launch/test_serve.py $(addprefix tests/plugin/test_, radix.py streams.py lora.py) \
  $(addprefix tests/plugin/test_, graphs.py choice.py models.py drafting.py refused_arguments.py host_tier.py) \
  $(addprefix tests/e2e/test_, stock.py exactness.py cascade.py double_p.py ltri.py hooks.py http_pools.py access.py) \
  $(addprefix tests/e2e/test_, priorities.py page_size.py drafting.py double_p_hybrid.py double_p_mixed.py)
test-lines:
	@$(MAKE) --no-print-directory test-all SGLANG=$(OLDER) ARGS="$(LINES)"

soak: $(READY)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(ANSWERS),--answers $(ANSWERS)) $(if $(JSON),--json $(JSON)) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m sglang_ext.launch.docs
	$(BIN)/sglang-ext bench report --markdown README.md docs/RESULTS.md

models-table: $(READY)
	$(BIN)/python -m tests.models $(ARGS)

env: $(READY)

# An environment that is there gets what it lacks; pip does nothing where all is installed. The stamp comes last, so that
# an installation that broke off is taken up again, and stamps of other lines go first.
$(READY): pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
	  python=; \
	  for name in $(if $(PYTHON),"$(PYTHON)",python3.12 python3.11 python3.10 python3 python); do \
	    if "$$name" -c '$(FITS_AND_INSTALLS)' 2>/dev/null; then python=$$name; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "$(if $(PYTHON),$(PYTHON) is not,There is no) Python $(FITTING) with pip$(if $(PYTHON),, on PATH)." \
	      "Install one, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$("$$python" --version), $$(command -v "$$python")"; \
	  if ! "$$python" -m venv --clear $(VENV) 2>/dev/null; then \
	    echo "(without ensurepip: pip comes from the registry)"; \
	    "$$python" -m venv --clear --without-pip $(VENV) && \
	      "$$python" -m pip --python $(BIN)/python install --quiet pip || { rm -rf $(VENV); exit 1; }; \
	  fi; \
	elif ! $(BIN)/python -c '$(FITS)'; then \
	  echo "$(VENV) holds $$($(BIN)/python --version); $(FITTING) is needed: remove it (rm -r $(VENV)) and run again" >&2; \
	  exit 1; \
	elif ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(BIN)/python -m ensurepip --default-pip >/dev/null; \
	fi
	@echo "installing sglang-ext and what it needs into $(VENV) (the first time: about $(SIZE) GB, a few minutes)"
	@rm -f $(VENV)/.ready*
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check sglang==$(SGLANG) -e '.[dev]'
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .demo
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
