# SPDX-License-Identifier: Apache-2.0
# `make` alone lists the targets. They work in .venv, which `make setup` makes; nothing has to be activated.

.DEFAULT_GOAL := help
TARGETS := help setup demo test test-all test-slurm test-te parity versions lint docs bench gpu dist clean
.PHONY: $(TARGETS)
# A folder's name would be a target that is up to date.
UNKNOWN := $(filter-out $(TARGETS),$(MAKECMDGOALS))
ifneq ($(UNKNOWN),)
$(error there is no target $(firstword $(UNKNOWN)): `make` alone lists them)
endif

PY := .venv/bin/python
# Shell files that bash alone reads; a launcher that is Python as well as bash is left to its tests.
SHELL_FILES := $(wildcard tools/*.sh launch/slurm/*.sh) launch/slurm/pretrain.sbatch launch/prepare_data.sh launch/evaluate.sh launch/start.bash .ci/run
# Options of the demo: make demo STEPS=100, or DEMO_ARGS="--simreg-lambda 3 --output runs/three" (DEMO_ARGS=--help lists them)
STEPS ?=
DEMO_ARGS ?=
# More words for pytest: make test PYTEST_ARGS="-x -k losses"
PYTEST_ARGS ?=
# The same for the parity table: make parity PARITY_ARGS="--only CP2", or "--output benchmarks/results/parity.md" to keep it
PARITY_ARGS ?=
# And for the releases of Megatron: make versions VERSIONS_ARGS="--sources ../sources" (benchmarks/results/versions.md)
VERSIONS_ARGS ?=
# And for the report of a GPU: make gpu GPU_ARGS="--calls a --output runs/right"
GPU_ARGS ?=
# Two workers, one file each at a time: whole runs of Megatron are made once a file and shared by its tests. The order
# is that of tests/conftest.py, long files first.
PYTEST := $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with all that the demo and the tests need (once: 1 to 4 minutes, 6.2 GB)
	@bash tools/setup.sh

demo: setup ## pretrain two tiny LLaMAs on real text, with and without SimReg, and compare them
	$(PY) launch/demo.py $(if $(STEPS),--steps $(STEPS)) $(DEMO_ARGS)

test: setup ## the quick tests (3 to 10 minutes on 2 cores)
	$(PYTEST) -m "not slow and not gpu and not slurm and not te" $(PYTEST_ARGS) tests

test-all: setup test-slurm ## every test but those of test-te; those for a GPU only where one is, those of SLURM only where it can start
	$(PYTEST) \
	  -m "not slurm and not te$$($(PY) -c 'import torch; print("" if torch.cuda.is_available() else " and not gpu")')" \
	  $(PYTEST_ARGS) tests

test-slurm: setup ## the life of a cluster job, on a SLURM of two nodes that it starts here (as root; 15 minutes on 2 cores)
	$(PY) -m pytest -q -rs -m slurm $(PYTEST_ARGS) tests/slurm

test-te: setup ## Transformer Engine and Megatron-Bridge without a GPU, in an environment of their own (first: some minutes)
	@bash tools/te_on_cpu.sh $(PYTEST_ARGS)

parity: setup ## the same function in every parallel layout: print the table (5 minutes on 2 cores)
	$(PY) -m tests.megatron.parity $(PARITY_ARGS)

versions: setup ## drive every release of Megatron and write benchmarks/results/versions.md (15 to 35 minutes on 2 cores)
	$(PY) -m tests.versions --output benchmarks/results/versions.md $(VERSIONS_ARGS)

lint: setup ## ruff (rules, bandit's among them, and format), mypy, shellcheck, zizmor for the workflows, lines of code per package
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy simreg_megatron launch
	.venv/bin/shellcheck $(SHELL_FILES)
	.venv/bin/zizmor --offline --quiet .github/workflows
	$(PY) -m tools.budget

docs: build/docs-venv/stamp ## build the documentation as a site into build/site (first: 190 MB of tools, no torch)
	build/docs-venv/bin/python -m mkdocs build --strict

build/docs-venv/stamp: setup.py tools/extra.py
	$(or $(PYTHON),python3) -m venv --clear build/docs-venv
	build/docs-venv/bin/python tools/extra.py DOCS >build/docs-venv/requirements.txt
	PIP_USER=0 build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check -r build/docs-venv/requirements.txt
	touch $@

bench: setup ## what SimReg costs, as ratios of one run
	$(PY) -m benchmarks $(BENCH_ARGS)

gpu: $(if $(filter command,$(origin PY)),,setup) ## tests and benchmarks on the GPU that is here, into runs/gpu/report.md (half of it: GPU_ARGS="--calls a")
	$(PY) -m benchmarks.gpu $(GPU_ARGS)

dist: setup ## build the wheel and the source archive into dist/
	$(PY) -m build --outdir dist

clean: ## remove builds and caches; keep .venv and the runs
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
