# make run    set up and answer examples/prompts.jsonl with the model that comes with LABInfer
# make test   set up and run the tests (some twenty minutes on 2 cores)
# make help   all targets

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Pinned: a looser request may bring another. pip's own index has the torch for GPUs, with gigabytes of their packages: give
# the index of the one for this machine, the URL in the line of https://pytorch.org/get-started/locally/, or install it first.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# A folder of wheels, as "make wheels" fills it, to install from without a network.
WHEELS ?= $(wildcard wheels)
ALOUD = $(PYTHON) tools/aloud.py
PIP_INSTALL = $(ALOUD) $(BIN)/pip --disable-pip-version-check install --no-compile $(if $(WHEELS),--no-index --find-links $(WHEELS))
TORCH_HINT = $(if $(WHEELS)$(TORCH_INDEX),,echo "$(TORCH) comes from pip's own index, which may bring gigabytes for GPUs; TORCH_INDEX=URL takes it from another (see README.md)")
MODEL ?= demo
# Parts of the tests that "make test" runs at the same time: one more than most machines of this kind have cores, as tests also wait.
JOBS ?= 3
# The tests that a part runs: all but those of the full matrices, unless another choice is given.
SAMPLE ?= -m "not slow"
ARGS ?=
# A test run that hangs is ended; mpirun and torchrun then end their ranks. In the foreground, so that Ctrl-C works.
LIMIT := timeout --foreground --kill-after=10
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Many containers set it; each of the hundreds of launches in the tests would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test test-all test-core test-core-engine test-core-others test-unit test-functions test-features test-online test-server test-browser test-dist test-cluster test-plugins test-failures test-devices test-timing test-clients fuzz lint format tree size bench bench-comm bench-schedules bench-policies bench-workloads bench-engine bench-layouts bench-hosts bench-growth bench-experts bench-start bench-gateway bench-peers bench-compare bench-plot bench-restart soak screenshots demo-model wheel wheels bundle release test-packages clean

help: ## show this list
	@grep -E '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /\1	/' | expand -t 20

setup: $(VENV)/.setup ## create .venv and install the package with MPI

$(VENV)/.setup: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "LABInfer needs Python 3.10 or newer; say make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(ALOUD) $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import torch' 2>/dev/null || { $(or $(TORCH_HINT),true); $(PIP_INSTALL) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)); }
	@echo "installing LABInfer and what it needs"
	@$(PIP_INSTALL) --editable '.[mpi]'
	@echo "compiling the packages, so that later starts are fast"
	@$(ALOUD) $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || :  # on all cores, where pip takes one; files for a newer Python fail
	@touch $@

$(VENV)/.setup-test: $(VENV)/.setup
	@echo "installing what the tests need"
	@$(PIP_INSTALL) --editable '.[mpi,test]'
	@touch $@

run: $(VENV)/.setup ## answer examples/prompts.jsonl (MODEL=DIR takes another model)
	$(BIN)/python launch.py --model $(MODEL) --input examples/prompts.jsonl --output-format text --log-level warning $(ARGS)

# The longest first, so that none is left to run alone at the end.
LAUNCHED := test-cluster test-failures test-devices test-plugins
ONE_PROCESS := test-features test-unit test-server test-functions test-browser test-online
FUNCTIONS := tests/unit/functions tests/unit/weights
LAUNCHING := tests/test_chat.py tests/test_chat_other_servers.py tests/test_offline.py tests/test_signals.py
FAILURES := $(patsubst %,tests/cluster/test_%.py,failing layout_change serving stopped supervise three_hosts two_hosts)
DEVICES := $(patsubst %,tests/cluster/test_%.py,accelerator check_device device_copies device_matrix fake_device unlike_hosts)
UNTIMED := -m "not slow and not timing"

test: lint ## everything a change must pass: lint, the parts, and alone what measures times
	@$(MAKE) --no-print-directory test-mpi-3
	@$(MAKE) --no-print-directory -j $(JOBS) --output-sync=target THREADS=1 SAMPLE='$(UNTIMED)' $(LAUNCHED) $(ONE_PROCESS)
	@$(MAKE) --no-print-directory test-timing

# A launch divides the cores among its ranks; a single process would start a thread on each core.
ifdef THREADS
$(ONE_PROCESS): export OMP_NUM_THREADS := $(THREADS)
endif

test-all: SAMPLE =
test-all: lint test-unit test-functions test-features test-online test-server test-browser test-dist test-mpi-4 test-mpi-5 test-torchrun-3 test-cluster test-plugins test-failures test-devices test-packages ## the whole matrices as well (over an hour)

CORE_ENGINE := tests/unit/engine
CORE_OTHERS := tests/unit/base tests/unit/worker tests/unit/models tests/unit/test_imports.py
test-core: $(VENV)/.setup-test ## engine, worker, models and the registry: what to run while you work on them (two minutes)
	@OMP_NUM_THREADS=1 $(MAKE) --no-print-directory -j 2 --output-sync=target test-core-engine test-core-others

test-core-engine: $(VENV)/.setup-test
	$(LIMIT) 600 $(BIN)/python -m pytest $(CORE_ENGINE) -m "not slow and not timing"

test-core-others: $(VENV)/.setup-test
	$(LIMIT) 600 $(BIN)/python -m pytest $(CORE_OTHERS) -m "not slow and not timing"

test-unit: $(VENV)/.setup-test ## unit tests of all packages but functions and weights, in one process
	$(LIMIT) 1200 $(BIN)/python -m pytest tests/unit $(addprefix --ignore=,$(FUNCTIONS)) $(SAMPLE)

test-functions: $(VENV)/.setup-test ## unit tests of functions and weights
	$(LIMIT) 1200 $(BIN)/python -m pytest $(FUNCTIONS) $(SAMPLE)

test-features: $(VENV)/.setup-test ## what users see of a feature, in one process
	$(LIMIT) 1200 $(BIN)/python -m pytest $(filter-out $(LAUNCHING),$(wildcard tests/test_*.py)) $(SAMPLE)

test-online: $(VENV)/.setup-test ## what users see of a job and of a chat
	$(LIMIT) 600 $(BIN)/python -m pytest $(LAUNCHING) $(SAMPLE)

test-server: $(VENV)/.setup-test ## the gateway, and servers on one rank
	$(LIMIT) 1800 $(BIN)/python -m pytest tests/server $(SAMPLE)

test-browser: $(VENV)/.setup-test ## the pages in Chromium, which the system has to have
	$(LIMIT) 900 $(BIN)/python -m pytest tests/browser $(SAMPLE)

test-dist: test-mpi-1 test-mpi-2 test-mpi-3 test-torchrun-2 ## the same tests at several world sizes

test-mpi-%: $(VENV)/.setup-test ## tests/dist under mpirun with that many ranks
	$(LIMIT) 600 mpirun -n $* $(BIN)/python -m pytest --with-mpi tests/dist $(SAMPLE)

test-torchrun-%: $(VENV)/.setup-test ## tests/dist under torchrun with that many ranks
	$(LIMIT) 600 torchrun --nproc-per-node $* -m pytest tests/dist $(SAMPLE)

test-cluster: $(VENV)/.setup-test ## real launches, a sample of the matrices
	$(LIMIT) 3600 $(BIN)/python -m pytest tests/cluster $(addprefix --ignore=,$(FAILURES) $(DEVICES)) $(SAMPLE)

test-plugins: $(VENV)/.setup-test ## real launches with plugins
	$(LIMIT) 1800 $(BIN)/python -m pytest tests/plugins $(SAMPLE)

test-failures: $(VENV)/.setup-test ## real launches that fail, or change while they serve
	$(LIMIT) 3600 $(BIN)/python -m pytest $(FAILURES) $(SAMPLE)

test-devices: $(VENV)/.setup-test ## real launches on an accelerator, or on a make-believe one
	$(LIMIT) 7200 $(BIN)/python -m pytest $(DEVICES) $(SAMPLE)

# Those of the pages apart: their event loop stays in the process.
test-timing: $(VENV)/.setup-test ## what must be fast, with nothing beside it
	$(LIMIT) 300 $(BIN)/python -m pytest -m "timing and not slow" $(shell grep -rl --include='test_*.py' 'mark.timing' tests/unit tests/server tests/cluster tests/plugins tests/test_*.py)
	$(LIMIT) 300 $(BIN)/python -m pytest -m "timing and not slow" tests/browser

CLIENTS := .clients
test-clients: $(foreach suite,agents libraries load javascript,$(CLIENTS)/$(suite)/.setup) ## the clients that others wrote, and the examples, in environments of their own, which this makes (gigabytes)
	$(LIMIT) 3600 $(BIN)/python tests/clients/run.py $(CLIENTS) $(ARGS)
	$(LIMIT) 600 $(CLIENTS)/agents/bin/python -m pytest -rs tests/test_examples.py

# Each sees the packages of $(VENV) behind its own.
$(CLIENTS)/%/.setup: tests/clients/%/requirements.txt $(VENV)/.setup-test
	$(BIN)/python -m venv --without-pip $(CLIENTS)/$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(CLIENTS)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(BIN)/pip --python $(CLIENTS)/$*/bin/python install --quiet --no-deps --requirement $<
	touch $@

$(CLIENTS)/javascript/.setup: tests/clients/javascript/package.json tests/clients/javascript/package-lock.json
	mkdir -p $(CLIENTS)/javascript
	cp $^ $(CLIENTS)/javascript
	cd $(CLIENTS)/javascript && npm ci --no-audit --no-fund --ignore-scripts --loglevel error
	touch $@

FUZZ_CASES ?= 20000
FUZZ_SEED ?= 1
fuzz: $(VENV)/.setup-test ## mutated input for every reader and port (FUZZ_CASES each, some minutes)
	$(LIMIT) 3600 $(BIN)/python -m pytest tests/unit/fuzz tests/server/test_http_fuzz.py -rP --fuzz-cases $(FUZZ_CASES) --fuzz-seed $(FUZZ_SEED)

lint: $(VENV)/.setup-test ## check style, and that Python 3.10 suffices
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vermin --quiet --no-tips --eval-annotations --violations -t=3.10- launch.py labinfer benchmarks tools

format: $(VENV)/.setup-test ## put style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tree: ## print the packages and files with what they say of themselves (ARGS=engine: of one package)
	@$(PYTHON) tools/tree.py $(ARGS)

size: ## list files over 400 lines
	@git ls-files '*.py' '*.cpp' '*.h' '*.js' ':!:labinfer/server/webui/vendor' | xargs wc -l | awk '$$1 > 400 && $$2 != "total" { print; found = 1 } END { if (!found) print "no file over 400 lines" }'

bench: bench-comm bench-schedules bench-policies bench-engine bench-workloads bench-start ## measure this machine

bench-comm: $(VENV)/.setup ## latency and bandwidth between two ranks, over MPI, gloo and shared memory
	mpirun -n 2 $(BIN)/python launch.py bench comm
	torchrun --nproc-per-node 2 launch.py bench comm

bench-schedules: $(VENV)/.setup ## the pipeline schedules against each other
	@test -e .small/config.json || $(BIN)/python tools/random_checkpoint.py --shape small .small
	mpirun -n 2 $(BIN)/python benchmarks/pipeline_schedules.py --model .small
	torchrun --nproc-per-node 2 benchmarks/pipeline_schedules.py --model .small

bench-policies: $(VENV)/.setup ## the batch policies against each other, on long prompts among answers
	@test -e .small/config.json || $(BIN)/python tools/random_checkpoint.py --shape small .small
	mpirun -n 2 $(BIN)/python benchmarks/batch_policies.py --model .small

bench-workloads: $(VENV)/.setup ## decode, batch and prefill of a 0.5B model, with and without the compiled functions
	@test -e .qwen2-0.5b/config.json || $(BIN)/python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 .qwen2-0.5b
	$(BIN)/python benchmarks/workloads.py --model .qwen2-0.5b

bench-layouts: $(VENV)/.setup ## the batch workload on one rank, and on pipelines and tensor-parallel ranks under both launchers
	@test -e .qwen2-0.5b/config.json || $(BIN)/python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 .qwen2-0.5b
	$(BIN)/python benchmarks/layouts.py --model .qwen2-0.5b

bench-hosts: $(VENV)/.setup ## the batch workload on one rank, and on a pipeline over two hosts: network namespaces with a gigabit between them (root)
	@test -e .qwen2-0.5b/config.json || $(BIN)/python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 .qwen2-0.5b
	$(BIN)/python benchmarks/layouts.py --model .qwen2-0.5b --layouts --mbit 1000

bench-growth: $(VENV)/.setup ## a step's time against rows, sequences, context, threads and layers, drawn (an hour)
	$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(PIP_INSTALL) --editable '.[bench]'
	for layers in 6 12 24; do test -e .qwen2-0.5b-layers/$$layers/config.json || $(BIN)/python tools/random_checkpoint.py --shape qwen2-0.5b \
	  --dtype bfloat16 --layers $$layers .qwen2-0.5b-layers/$$layers; done
	$(BIN)/python benchmarks/growth.py --models .qwen2-0.5b-layers/6 .qwen2-0.5b-layers/12 .qwen2-0.5b-layers/24 --plot docs/benchmarks/growth.png

bench-experts: $(VENV)/.setup ## a mixture's experts: one call beside memory and dense products, whole decodes, and ranks with a thread each
	@test -e .qwen3-moe/config.json || $(BIN)/python tools/random_checkpoint.py --shape qwen3-moe --dtype bfloat16 .qwen3-moe
	$(BIN)/python benchmarks/experts.py
	for bits in none int8 int4; do $(BIN)/python benchmarks/workloads.py --model .qwen3-moe --variants auto --quantization $$bits; done
	$(BIN)/python benchmarks/layouts.py --model .qwen3-moe --layouts "tp 2, mpirun"

bench-start: $(VENV)/.setup ## from the start to the first token, and the memory each rank holds at most, with a 0.5B model
	@test -e .qwen2-0.5b/config.json || $(BIN)/python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 .qwen2-0.5b
	$(BIN)/python benchmarks/cold_start.py --model .qwen2-0.5b
	$(BIN)/python benchmarks/peak_memory.py --model .qwen2-0.5b
	mpirun -n 2 $(BIN)/python benchmarks/peak_memory.py --model .qwen2-0.5b
	mpirun -n 2 $(BIN)/python benchmarks/peak_memory.py --model .qwen2-0.5b --tensor-parallel-size 2

bench-gateway: $(VENV)/.setup ## what the server adds to a token, and what it costs when nobody asks or somebody looks (ten minutes)
	$(BIN)/python benchmarks/gateway_overhead.py --model demo
	$(BIN)/python benchmarks/idle_server.py --rounds 1
	@test -e .small/config.json || $(BIN)/python tools/random_checkpoint.py --shape small .small
	$(BIN)/python benchmarks/watch_cost.py --model .small

soak: $(VENV)/.setup ## twenty minutes of load, cancelled requests, bursts and killed ranks on a supervised server
	$(BIN)/python benchmarks/soak.py --minutes 20

bench-restart: $(VENV)/.setup ## the pause of open streams when a rank is killed under a supervisor
	$(BIN)/python benchmarks/restart_pause.py --model demo --dtype float32 --limit 3
	@test -e .qwen2-0.5b/config.json || $(BIN)/python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 .qwen2-0.5b
	$(BIN)/python benchmarks/restart_pause.py --model .qwen2-0.5b --limit 6

bench-engine: $(VENV)/.setup ## what the prefix cache saves, what the scheduler costs, and what a smaller KV cache loses
	@test -e .small/config.json || $(BIN)/python tools/random_checkpoint.py --shape small .small
	$(BIN)/python benchmarks/prefix_cache.py --model .small
	$(BIN)/python benchmarks/scheduler_cost.py
	$(BIN)/python benchmarks/kv_cache_dtype.py

bench-peers: $(VENV)/.setup ## install other engines in benchmarks/.envs (several GB; llama.cpp is compiled)
	$(BIN)/python benchmarks/setup_peers.py

bench-compare: $(VENV)/.setup ## this engine beside those that are installed (half an hour a round)
	@test -e .qwen2-0.5b/config.json || $(BIN)/python tools/random_checkpoint.py --shape qwen2-0.5b --dtype bfloat16 .qwen2-0.5b
	$(BIN)/python benchmarks/compare.py --model .qwen2-0.5b --json benchmarks/.envs/figures.json

bench-plot: $(VENV)/.setup ## draw what bench-compare found
	$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(PIP_INSTALL) --editable '.[bench]'
	$(BIN)/python benchmarks/plot.py benchmarks/.envs/figures.json

screenshots: $(VENV)/.setup-test ## draw the pages for docs/images anew (four minutes)
	@test -e .small/config.json || $(BIN)/python tools/random_checkpoint.py --shape small .small
	$(BIN)/python tests/browser/screenshots.py .small

# About an hour and a half on 2 cores.
demo-model: $(VENV)/.setup-test ## train the models in labinfer/assets anew, and measure them
	$(BIN)/python tools/demo_model/train.py --output labinfer/assets
	$(BIN)/python tools/demo_model/evaluate.py --card

wheel: $(VENV)/.setup-test ## build a wheel in dist/ that needs no compiler where it is installed (some minutes)
	$(BIN)/python tools/build_wheel.py

bundle: $(VENV)/.setup-test ## pack dist/'s wheel with all that it needs, docs and examples in a tar file, for machines without a network
	$(BIN)/python tools/build_bundle.py --torch $(TORCH) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

release: $(VENV)/.setup-test ## build the wheel anew, check it, install it in an empty environment and try it there; says what to tag
	rm -f dist/labinfer-*.whl
	$(BIN)/python tools/build_wheel.py
	$(BIN)/python tools/check_release.py $(if $(WHEELS),--wheels $(WHEELS)) --torch $(TORCH) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

test-packages: $(VENV)/.setup-test ## wheel, bundle and container images, installed where nothing else is (half an hour; root, debootstrap)
	$(LIMIT) 3600 $(BIN)/python -m pytest tests/packages $(SAMPLE)

wheels: ## fill wheels/ with all that a machine without a network needs; copy the checkout with it
	$(PYTHON) -m pip --disable-pip-version-check download --dest wheels $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH) 'setuptools>=68' '.[mpi,test]'

clean: ## remove what the targets above made
	rm -rf $(VENV) $(CLIENTS) .small .qwen2-0.5b .qwen3-moe benchmarks/.envs
