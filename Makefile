# Each target works alone, in a fresh clone: the virtual environment is made, or brought up to date, when it must be.

PYTHON ?= python3
SEED ?= 0
KILLS ?= 300
JOBS ?= 4
VENV := .venv
BIN := $(VENV)/bin
NANO_frozen_lake := --largest 3 --layers 3 --hidden 64 --heads 2 --intermediate 128
NANO_calculator := --largest 500
NANO_moe := --experts 8
STAMP := $(VENV)/.installed

# Compiled modules are kept, whatever the environment says: a training starts half a dozen processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv quickstart warm-start gridworlds test tests test-slow test-long soak faults models memory bench bench-peers curves tournament recipes gpu-day release lint types layers docs configuration

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

venv: $(STAMP)  ## the virtual environment .venv, with the CPU stack and the tools

# The stamp is newer than what it was made from. An install that broke off leaves none, and is done again.
$(STAMP): pyproject.toml tools/install.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/install.py cpu,test,docs
	@touch $@

quickstart: $(STAMP)  ## train the small model on Countdown and show what it learned (SEED=0)
	@$(BIN)/rlsdk train examples/quickstart.yaml seed=$(SEED) --overwrite

# Random weights, taught the task, then made to show it seldom: what the quickstart starts from. Takes a few minutes.
# With TASK, what one of the examples with several turns starts from: each file of examples/warm_start/TASK in its order.
warm-start: $(STAMP)  ## make examples/models/countdown-nano again, in runs/warm-start (SEED=0; TASK=frozen_lake, calculator, dialogue, moe)
ifdef TASK
	@test $(TASK) != frozen_lake || $(MAKE) --no-print-directory gridworlds
	@$(BIN)/rlsdk model new nano runs/$(TASK)-new --seed $(SEED) $(NANO_$(TASK)) --overwrite
	@for config in examples/warm_start/$(TASK)/*.yaml; do $(BIN)/rlsdk train $$config seed=$(SEED) --overwrite || exit 1; done
else
	@$(BIN)/rlsdk model new nano runs/nano --seed $(SEED) --overwrite
	@$(BIN)/rlsdk train examples/warm_start/1_skill.yaml seed=$(SEED) --overwrite
	@$(BIN)/rlsdk train examples/warm_start/2_dilute.yaml seed=$(SEED) --overwrite
endif

gridworlds: $(STAMP)  ## install plugins/rlsdk-gridworlds into the virtual environment
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation plugins/rlsdk-gridworlds

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

layers: $(STAMP)  ## import-linter: which module may import which
	$(BIN)/lint-imports --no-logo

docs: $(STAMP)  ## the documentation, in site/; any broken link or unknown name is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

configuration: $(STAMP)  ## write docs/configuration.md, docs/rlsdk.schema.json and first pages from docstrings and signatures
	@$(BIN)/python tools/docs_configuration.py

# Types and documentation are checked beside the tests: on two cores, no part then waits for another.
test: $(STAMP)  ## everything but whole training runs, the real Ray, vLLM and DeepSpeed included (JOBS=4)
	@$(MAKE) --no-print-directory lint layers
	@$(MAKE) --no-print-directory -j 3 types docs tests

# One OpenMP thread for each process: tests start several at once, and waiting threads spin. Tests are dealt out by file,
# those of the engines and of the learners by folder, since they share processes; those that start the stack come last
# (tests/conftest.py). Four processes keep two cores busy: half of their time is waiting, for processes or for limits.
tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and not gpu" -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 20

# Two here: a training keeps little more than one core busy, as engine and learner take turns.
test-slow: $(STAMP)  ## whole training runs, kills, and all examples of the property tests
	OMP_NUM_THREADS=1 RLSDK_TEST_EXAMPLES=all $(BIN)/pytest -m "property and not slow and not gpu and not stack" -n 2 --dist loadfile --timeout 600
	OMP_NUM_THREADS=1 RLSDK_TEST_EXAMPLES=all $(BIN)/pytest -m "slow and not long and not gpu" -n 2 --dist loadfile --no-loadscope-reorder --timeout 600 --durations 40

# One after the other: some of them fail on a busy machine.
test-long: $(STAMP)  ## the longest runs, which CI leaves out; an hour
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "long and not gpu" --timeout 1800 --durations 0

release: $(STAMP)  ## wheel, sdist, constraints and SBOM (CycloneDX JSON) of a release, in dist/; nothing is uploaded
	@$(BIN)/python tools/release.py

soak: $(STAMP)  ## kill, stop and end parts of a training at random moments, KILLS=300 times; write docs/soak.md; hours
	@$(BIN)/python tools/soak.py --kills $(KILLS) --seed $(SEED)

faults: $(STAMP)  ## make a training fail in every way of the fault matrix (CELLS=engine/SIGKILL/sync,…: these); write docs/faults.md; an hour
	@$(BIN)/python tools/faults.py "$(CELLS)"

models: $(STAMP)  ## try tiny models of many architectures on both engines (MODELS=qwen3-moe,…: these); write docs/models_measured.md; half an hour
	@$(BIN)/python tools/architectures.py $(MODELS)

memory: $(STAMP)  ## watch the memory of every process over 8,000 steps; write docs/memory.md; a quarter of an hour
	@$(BIN)/python tools/memory.py

bench: $(STAMP)  ## against TRL, overhead, estimators, the head; write docs/benchmarks/ and its page; nothing else may run
	@RLSDK_BENCH_RESULTS=$(CURDIR)/docs/benchmarks $(BIN)/pytest tests/benchmarks -m bench -s; \
	  status=$$?; $(BIN)/python tools/bench/results.py; exit $$status

# Each peer has an environment of its own, .venv-NAME: what they ask for does not fit together.
bench-peers: $(STAMP)  ## beside TRL, verl and OpenRLHF (PEERS=trl,verl,openrlhf SEEDS=0 QUICK=1 PUBLISH=1); a quarter of an hour
	@$(BIN)/python tools/bench/peers.py --seeds $(or $(SEEDS),0) $(if $(PEERS),--peers $(PEERS)) \
	  $(if $(filter-out undefined,$(origin SIDES)),--sides "$(SIDES)") $(if $(QUICK),--quick) $(if $(PUBLISH),--publish)

recipes: $(STAMP) gridworlds  ## run recipes (RECIPES="arithmetic …"; none: only the page), and write their curves and docs/recipes.md
	@$(BIN)/python tools/recipes.py $(RECIPES)

curves: $(STAMP) gridworlds  ## train with many algorithms, with several turns, ahead, and with routing replay; write docs/curves*.md; an hour or more
	@$(BIN)/python tools/curves.py $(ALGORITHMS)
	@$(BIN)/python tools/curves_multiturn.py $(TASKS)
	@$(BIN)/python tools/curves_staleness.py
	@$(MAKE) --no-print-directory warm-start TASK=moe
	@$(BIN)/python tools/curves_routing.py

tournament: $(STAMP)  ## compare all algorithms on the suite nano over SEEDS=3 seeds; write docs/tournament.md; hours; it goes on where it stopped
	@$(BIN)/python tools/tournament.py --seeds $(or $(SEEDS),3)

# Environments of its own: the builds of torch and vLLM for CPUs and for GPUs cannot be in one. TRL gets rlsdk for its rewards.
gpu-day:  ## on one GPU, in half an hour: tests, memory, times, and curves beside TRL; tables in gpu-day/ (MODEL=PATH); docs/gpu_day.md
	@nvidia-smi -L >/dev/null 2>&1 || { echo "gpu-day: nvidia-smi finds no GPU on this machine; python tools/gpu_day.py --dry-run shows the plan"; exit 2; }
	@test -x .venv-gpu/bin/rlsdk || { $(PYTHON) -m venv .venv-gpu && .venv-gpu/bin/pip install -q -e '.[gpu,test]'; }
	@test -x .venv-trl/bin/trl || { $(PYTHON) -m venv .venv-trl && .venv-trl/bin/pip install -q 'trl[vllm]==1.16.*' pyyaml -e .; }
	@.venv-gpu/bin/python tools/gpu_day.py $(if $(MODEL),--model $(MODEL))
