# `make help` lists the targets. No preparation is needed: the first target that needs .venv makes it,
# with the exact versions of requirements.txt.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup gpu sglang-gpu sglang trainers agents demo demo-llm test slow browser nullcuda slurm-test check docs bench clean

PYTHON := .venv/bin/python
STAMP := .venv/.installed
export OMP_NUM_THREADS ?= 1
# otherwise every process of a test would compile the tests again
export PYTHONDONTWRITEBYTECODE :=
# pytest arguments, e.g. make test ARGS="-k losses"; of make demo overrides
ARGS ?=
# processes that run tests, each whole files; tests spend much of their time waiting
WORKERS ?= 4
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# tests that need only Python
HERE := not gpu and not nullcuda and not slurm and not sglang and not trainers and not agents and not browser

# The first Python 3.12 that starts: a pyenv shim on the PATH may refuse to.
PYENV := $${PYENV_ROOT:-$$HOME/.pyenv}
PRINT_VERSION := import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])
FIND_PYTHON = for candidate in python3.12 "$(PYENV)"/versions/3.12*/bin/python python3; do \
	version=$$("$$candidate" -c '$(PRINT_VERSION)' 2>/dev/null) || continue; \
	if [ "$$version" = 3.12 ]; then echo "$$candidate"; break; fi; done

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP) ## make .venv (Python 3.12) with the tested versions

$(STAMP): requirements.txt setup.py
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
		echo "Python 3.12 with venv was not found. Install it and run make again:" >&2; \
		echo "  Debian/Ubuntu: apt-get install python3.12 python3.12-venv" >&2; \
		echo "  pyenv: pyenv install 3.12; macOS: brew install python@3.12" >&2; exit 1; \
	fi; \
	echo "making .venv with $$python"; "$$python" -m venv .venv
	$(PYTHON) -m pip install --disable-pip-version-check --progress-bar off --quiet -r requirements.txt
	$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

gpu: $(STAMP) ## TransformerEngine and NCCL for GPUs into .venv (minutes of g++)
	tools/gpu/build trainer

sglang-gpu: $(STAMP) ## make .venv-sglang-gpu: SGLang for GPUs
	tools/gpu/build server

sglang: ## make .venv-sglang (Python 3.11): a real SGLang server that needs no GPU
	tools/sglang_cpu/build

agents: ## make .venv-agents: agent frameworks, verifiers and OpenEnv, for examples/ and tests
	PYTHON=$$($(FIND_PYTHON)) tools/agents/build

trainers: $(STAMP) ## make .venv-trainers: TRL, verl, flash-linear-attention in addition to .venv
	tools/other_trainers/build

demo: $(STAMP) ## entropy collapse and its cure, in minutes; results in runs/quickstart
	$(PYTHON) -m megatron_stare train quickstart run.dir=runs/quickstart $(ARGS)

# its cold start may use all cores; the two runs divide them
demo-llm: $(STAMP) models/smollm2-135m ## the same with a pretrained language model, about 40 minutes
	env -u OMP_NUM_THREADS $(PYTHON) -m megatron_stare train smollm2_135m $(ARGS)

models/smollm2-135m: | $(STAMP)
	$(PYTHON) -m megatron_stare fetch smollm2-135m $@

test: $(STAMP) ## every test that needs no GPU, Slurm or SGLang, except the slow ones
	$(PYTHON) -m pytest $(SIDE_BY_SIDE) -m 'not slow and $(HERE)' $(ARGS)

slow: $(STAMP) ## the longest tests: kills, layouts of four ranks, thousands of verifier calls
	$(PYTHON) -m pytest $(SIDE_BY_SIDE) -m 'slow and $(HERE)' $(ARGS)

browser: $(STAMP) ## the report in headless Chromium, installed if absent (root, apt-get)
	CHROMIUM=$$(tools/browser/install) && export CHROMIUM && $(PYTHON) -m pytest -m browser $(ARGS)

nullcuda: $(STAMP) ## the CUDA path on the null device (built once, minutes), and tests marked gpu
	tools/nullcuda/build
	NULLCUDA_ELEMENTS=8000000 tools/nullcuda/run $(PYTHON) -m pytest -m '(nullcuda or gpu) and not slow' $(ARGS)

slurm-test: $(STAMP) ## slurm/ on a Slurm of three nodes, installed if absent (root, apt-get)
	tools/slurm_cluster/install
	$(PYTHON) -m pytest -m slurm $(ARGS)

check: $(STAMP) ## format, lint, types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

.venv-docs/.installed: tools/docs_site/requirements.txt | $(STAMP)
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps -r $<
	@touch $@

docs: .venv-docs/.installed ## the documentation in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

bench: $(STAMP) ## every script in benchmarks/
	@shopt -s nullglob; scripts=(benchmarks/[a-z]*.py); \
	if [ $${#scripts[@]} = 0 ]; then echo "benchmarks/ holds no script yet"; fi; \
	for script in "$${scripts[@]}"; do echo "== $$script"; $(PYTHON) "$$script" || exit 1; done

clean: ## remove .venv, caches and build output; runs/ stays
	rm -rf .venv .venv-sglang-gpu .gpu-wheels .venv-sglang .venv-sglang-older .venv-trainers .venv-agents .venv-docs site .nullcuda build dist
	rm -rf *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find megatron_stare tests -name __pycache__ -type d -prune -exec rm -rf {} +
