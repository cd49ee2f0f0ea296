# SPDX-License-Identifier: Apache-2.0
# `make` alone lists the targets. They work in .venv, which `make setup` makes; nothing has to be activated.

.DEFAULT_GOAL := help
TARGETS := help setup demo test test-all test-slurm test-te test-lowest parity versions lint audit docs bench faults stress flags gpu cost tables stale dist clean distclean
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
# The same for the parity table: make parity PARITY_ARGS="--only CP2", or "--output docs/parity.md" to keep it
PARITY_ARGS ?=
# And for the releases of Megatron: make versions VERSIONS_ARGS="--sources ../sources" (docs/versions.md)
VERSIONS_ARGS ?=
# And for the report of a GPU: make gpu GPU_ARGS="--calls a --output runs/right"
GPU_ARGS ?=
# How many cases: make stress STRESS_ARGS="--small 1000000 --large 200 --record"
STRESS_ARGS ?=
# How many combinations, and where they are counted: make flags FLAGS_ARGS="--combinations 5000 --record"
FLAGS_ARGS ?=
# Which faults: make faults FAULTS_ARGS="--only full-disk --jobs 2"
FAULTS_ARGS ?=
# Tables to make again, stale or not: make tables ONLY="parity versions"
ONLY ?=
# Two workers, one file each at a time: whole runs of Megatron are made once a file and shared by its tests. The order
# is that of tests/conftest.py, long files first.
PYTEST := $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with all that the demo and the tests need (once: 1 to 4 minutes, 6.2 GB)
	@bash tools/setup.sh

demo: setup ## pretrain two tiny LLaMAs on real text, with and without SimReg, and compare them
	$(PY) launch/demo.py $(if $(STEPS),--steps $(STEPS)) $(DEMO_ARGS)

test: setup ## the quick tests (4 to 10 minutes on 2 cores)
	$(PYTEST) -m "not slow and not gpu and not slurm and not te" $(PYTEST_ARGS) tests

test-all: setup test-slurm ## every test but those of test-te; those for a GPU only where one is, those of SLURM only where it can start
	$(PYTEST) \
	  -m "not slurm and not te$$($(PY) -c 'import torch; print("" if torch.cuda.is_available() else " and not gpu")')" \
	  $(PYTEST_ARGS) tests

test-slurm: setup ## the life of a cluster job, on a SLURM of two nodes that it starts here (as root; 15 minutes on 2 cores)
	$(PY) -m pytest -q -rs -m slurm $(PYTEST_ARGS) tests/slurm

test-te: setup ## Transformer Engine and Megatron-Bridge without a GPU, in an environment of their own (first: some minutes)
	@bash tools/te_on_cpu.sh $(PYTEST_ARGS)

test-lowest: setup ## the quick tests with the lowest versions of all packages that setup.py allows, in an environment of their own
	@bash tools/lowest.sh $(PYTEST_ARGS)

parity: setup ## the same function in every parallel layout: print the table (5 minutes on 2 cores)
	$(PY) -m tests.megatron.parity $(PARITY_ARGS)

versions: setup ## drive every release of Megatron and write docs/versions.md (15 to 30 minutes on 2 cores)
	$(PY) -m tests.versions --output docs/versions.md $(VERSIONS_ARGS)

lint: setup ## ruff (rules, bandit's among them, and format), mypy, shellcheck, zizmor for the workflows, lines of code per package
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy simreg_megatron launch
	.venv/bin/shellcheck $(SHELL_FILES)
	.venv/bin/zizmor --offline --quiet .github/workflows
	$(PY) -m tools.budget

audit: setup ## known vulnerabilities of the packages in .venv, by pip-audit (asks the package index)
	$(or $(PYTHON),python3) -m venv --clear build/audit-venv
	PIP_USER=0 build/audit-venv/bin/pip install --quiet --disable-pip-version-check "pip-audit>=2.7,<3"
	build/audit-venv/bin/pip-audit --path "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" --skip-editable

docs: build/docs-venv/stamp ## build the documentation as a site into build/site (first: 190 MB of tools, no torch)
	build/docs-venv/bin/python -m mkdocs build --strict

build/docs-venv/stamp: setup.py tools/extra.py
	$(or $(PYTHON),python3) -m venv --clear build/docs-venv
	build/docs-venv/bin/python tools/extra.py DOCS >build/docs-venv/requirements.txt
	PIP_USER=0 build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check -r build/docs-venv/requirements.txt
	touch $@

bench: setup ## what SimReg costs, as ratios of one run
	$(PY) -m benchmarks $(BENCH_ARGS)

faults: setup ## kill, hang and starve tiny runs, and see that they end with the same bits (220 faults: hours)
	$(PY) -m tests.faults $(FAULTS_ARGS)

stress: setup ## compare SimReg's numbers with float64 on hard random inputs (10,000 cases; STRESS_ARGS for more)
	$(PY) -m tests.stress $(STRESS_ARGS)

flags: setup ## our flags in combination with Megatron's: a step runs, or one sentence refuses it (600 combinations; FLAGS_ARGS for more)
	$(PY) -m tests.flags $(FLAGS_ARGS)

gpu: $(if $(filter command,$(origin PY)),,setup) ## tests and benchmarks on the GPU that is here, into runs/gpu/report.md (half of it: GPU_ARGS="--calls a")
	$(PY) -m benchmarks.gpu $(GPU_ARGS)

cost: setup ## what SimReg launches on a GPU, counted without one (10 seconds)
	$(PY) -m benchmarks.launches

tables: setup ## make generated tables again that are older than their code (all: an hour on 2 cores that are otherwise idle)
	PARITY_ARGS="$(PARITY_ARGS)" VERSIONS_ARGS="$(VERSIONS_ARGS)" $(PY) -m tools.tables --make $(ONLY)

stale: setup ## list the generated tables that are stale, and how long each takes
	@$(PY) -m tools.tables

dist: setup ## build the wheel and the source archive into dist/
	$(PY) -m build --outdir dist

clean: ## remove builds and caches; keep .venv and the runs
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## the same, and .venv
	rm -rf .venv .venv.lock
