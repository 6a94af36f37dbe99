# What one does with this project; `make help` lists it. Each target installs what it needs, once, into .venv.
#
#   make run ARGS="--port 8001 --engines 1"       ARGS go to `chat-server serve`, `pytest` or `chat-server doctor`
#   make chaos CUTS=1000 ARGS="--seed 7"          and to the load tests; make chaos ARGS=--help tells what it does
#   make install PYTHON=python3.12                another Python than the first fitting one

.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
# the first of these that is 3.11 or later
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint constraints.txt
# The CPU build of torch, for machines whose package index does not have it.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
ARGS ?=
CUTS ?= 200
SEEDS ?= 1000

# one pip at a time
.NOTPARALLEL:
.PHONY: help run install install-engine test check format doctor browser proxy bench-slow-readers chaos rolling model \
	model-mutants exact clean clean-all

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

run: $(VENV)/.engine ## everything for a chat on this machine: two engines, the demo model, the page
	@exec $(BIN)/chat-server serve $(ARGS)

install: $(VENV)/.installed ## the server alone, without vLLM: for engines that run elsewhere

install-engine: $(VENV)/.engine ## the server, and vLLM for this machine (GPU or CPU)

test: $(VENV)/.engine $(VENV)/.test browser proxy ## all tests; ARGS="-m 'not vllm'" for a part
	@$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.check ## format, lint and types, without changing anything
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/.check ## put the code into its format
	@$(BIN)/ruff check --fix --exit-zero --quiet .
	@$(BIN)/ruff format .

doctor: $(VENV)/.installed ## what is installed, reachable and healthy here
	@$(BIN)/chat-server doctor $(ARGS)

bench-slow-readers: $(VENV)/.test ## what slow and frozen readers do to the others, and cost; ARGS="--help"
	@$(BIN)/python -m loadtest.slow_readers $(ARGS)

chaos: $(VENV)/.installed ## clients that judge every event while sockets, replicas and the store fail; CUTS=1000 for all
	@$(BIN)/python -m loadtest.chaos --cuts $(CUTS) $(ARGS)

rolling: $(VENV)/.installed ## rolling restarts of two replicas with 200 running streams: nothing lost, each in its time
	@$(BIN)/python -m loadtest.chaos --cuts 0 --storms 0 --rolls 4 --clients 200 --tokens-per-s 12 --grace 5 --strict $(ARGS)

model: $(VENV)/.test ## who makes an answer, under random schedules: SEEDS=10000, or SEED=7 for one with its trace
	@PYTHONHASHSEED=0 $(BIN)/python -m tests.model $(if $(SEED),--seed $(SEED),$(SEEDS))

model-mutants: $(VENV)/.test ## that the model check can fail: the server broken in known ways, each found by some seed
	@PYTHONHASHSEED=0 $(BIN)/python -m tests.model.mutants

exact: $(VENV)/.test ## every place where an answer may have to go on, on a vLLM server: URL=http://...
	@$(BIN)/python -m tests.vllm $(URL)

browser: ## Chromium, for the tests of the page
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "== Installing Chromium for the tests of the page (350 MB on disk)"; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium && exit 0; \
	fi; \
	echo "The tests of the page need Chromium. Run: sudo apt-get install --no-install-recommends chromium"; exit 1

proxy: ## nginx, for the tests of a server behind a proxy
	@for name in nginx /usr/sbin/nginx; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "== Installing nginx for the tests of a server behind a proxy"; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends nginx-light && exit 0; \
	fi; \
	echo "The tests of a server behind a proxy need nginx. Run: sudo apt-get install --no-install-recommends nginx-light"; exit 1

clean: ## remove what builds and tests leave behind
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis test-results .coverage
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-all: clean ## and the environment (3.7 GB); conversations and models stay
	rm -rf $(VENV)

# The stamps say what the environment holds. An installation that was broken off leaves none and is taken up again.

$(VENV)/.venv:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed. Install it, or run: make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	@echo "== Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "Python's venv module is missing. On Debian and Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -c 'import pip; v = pip.__version__.split("."); raise SystemExit((int(v[0]), int(v[1])) < (25, 1))' \
		|| $(PIP) install --quiet --upgrade 'pip>=25.1' || $(FAILED)
	@touch $@

$(VENV)/.installed: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "== Installing the server (about 25 MB to download)"
	@$(INSTALL) --quiet --editable . || $(FAILED)
	@touch $@

$(VENV)/.engine: $(VENV)/.installed
	@if nvidia-smi -L 2>/dev/null | grep -q GPU; then \
		echo "== Installing vLLM for the GPU (several GB to download, about 10 GB on disk; once)"; \
		$(INSTALL) --editable '.[gpu]'; \
	else \
		echo "== Installing vLLM for the CPU (about 1.5 GB to download, 3.5 GB on disk; once, some minutes)"; \
		$(INSTALL) --editable '.[cpu]' || { \
			echo "== Again, with PyTorch's own index for the CPU build of torch"; \
			$(INSTALL) --editable '.[cpu]' --extra-index-url $(TORCH_CPU_INDEX); \
		} && $(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi || $(FAILED)
	@touch $@

$(VENV)/.check: $(VENV)/.installed
	@echo "== Installing the tools for checks and tests (about 90 MB to download)"
	@$(INSTALL) --quiet --group check --group test || $(FAILED)
	@touch $@ $(VENV)/.test

$(VENV)/.test: $(VENV)/.check
	@touch $@

FAILED = { echo "The installation failed; the reason is above. Look at the network and the disk, then run the same command again: it goes on."; exit 1; }
