# make setup | sglang | trainers | demo | test | slow | browser | nullcuda | slurm-test | check | docs | bench | clean | help. Nothing has to be prepared: .venv is made by the first target
# that needs it, from the exact versions in requirements.txt.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup sglang trainers demo test slow browser nullcuda slurm-test check docs bench clean

PYTHON := .venv/bin/python
STAMP := .venv/.installed
export OMP_NUM_THREADS ?= 1
# else every process of a test would compile the tests anew
export PYTHONDONTWRITEBYTECODE :=
# pytest arguments, e.g. make test ARGS="-k losses"; of make demo overrides
ARGS ?=
# tests run in as many processes as this, a file's tests in one; they wait much of their time
WORKERS ?= 4
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# what needs nothing but Python
HERE := not gpu and not nullcuda and not slurm and not sglang and not trainers and not browser

# The first Python 3.12 that really runs: a pyenv shim may be on the PATH and refuse to.
FIND_PYTHON = for candidate in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python python3; do \
	version=$$("$$candidate" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	if [ "$$version" = 3.12 ]; then echo "$$candidate"; break; fi; done

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP) ## make .venv (Python 3.12) with the tested versions

$(STAMP): requirements.txt setup.py
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
		echo "Python 3.12 with venv was not found. Install it (Debian/Ubuntu: apt-get install python3.12 python3.12-venv;" >&2; \
		echo "pyenv: pyenv install 3.12; macOS: brew install python@3.12) and run make again." >&2; exit 1; \
	fi; \
	echo "making .venv with $$python"; "$$python" -m venv .venv
	$(PYTHON) -m pip install --disable-pip-version-check --progress-bar off --quiet -r requirements.txt
	$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

sglang: ## make .venv-sglang (Python 3.11): a real SGLang server that needs no GPU
	tools/sglang_cpu/build

trainers: $(STAMP) ## make .venv-trainers: TRL and verl beside what .venv has, for their examples
	tools/other_trainers/build

demo: $(STAMP) ## entropy collapse and its cure on this machine, in minutes; results in runs/quickstart
	$(PYTHON) -m megatron_stare train quickstart run.dir=runs/quickstart $(ARGS)

test: $(STAMP) ## every test that needs no GPU, Slurm or SGLang, but for the slow ones (make slow)
	$(PYTHON) -m pytest $(SIDE_BY_SIDE) -m 'not slow and $(HERE)' $(ARGS)

slow: $(STAMP) ## the tests that take longest: kills in mid-run, most layouts of four ranks, sandbox and verifiers by the thousand
	$(PYTHON) -m pytest $(SIDE_BY_SIDE) -m 'slow and $(HERE)' $(ARGS)

browser: $(STAMP) ## the report's page in a Chromium without a window, installed here if absent (root, apt-get)
	CHROMIUM=$$(tools/browser/install) && export CHROMIUM && $(PYTHON) -m pytest -m browser $(ARGS)

nullcuda: $(STAMP) ## the CUDA path on a device that computes nothing: built once (minutes), then its tests, and those marked gpu
	tools/nullcuda/build
	NULLCUDA_ELEMENTS=8000000 tools/nullcuda/run $(PYTHON) -m pytest -m '(nullcuda or gpu) and not slow' \
		$(if $(filter tests/%,$(ARGS)),,$$(tools/nullcuda/tests)) $(ARGS)

slurm-test: $(STAMP) ## slurm/ on a real Slurm, installed here if absent (root, apt-get), that takes this machine for three nodes
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

docs: .venv-docs/.installed ## the documentation as a site that loads nothing from elsewhere, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

bench: $(STAMP) ## every script in benchmarks/
	@shopt -s nullglob; scripts=(benchmarks/[a-z]*.py); \
	if [ $${#scripts[@]} = 0 ]; then echo "benchmarks/ holds no script yet"; fi; \
	for script in "$${scripts[@]}"; do echo "== $$script"; $(PYTHON) "$$script" || exit 1; done

clean: ## remove .venv, caches and build output; runs/ stays
	rm -rf .venv .venv-sglang .venv-sglang-older .venv-trainers .venv-docs site .nullcuda build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find megatron_stare tests -name __pycache__ -type d -prune -exec rm -rf {} +
