# One set of verbs for a person, a hook and CI. Needs Python 3.11 or 3.12 and make; everything else is set up below, once.
# Words after the verb's own are passed with ARGS: make test ARGS="-k ste_sign", make bench ARGS="--quick".

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
TOOLS := .venv-tools
PEERS := .venv-peers
BENCH_PEERS := .venv-bench
NODE_CLIENT := client/node
PIP_FLAGS := --quiet --disable-pip-version-check --require-hashes
ARGS ?=

# Tests run in as many processes as there are cores, at most four: each has servers of its own. One file's tests stay together.
# Files start in the order in which they are named: those with servers first, so that no long file is left at the end.
WORKERS ?= auto
# Compiled code is written, also where the environment forbids it: tests start many servers and command lines.
PYTEST = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The first Python that is supported, unless PYTHON names one.
PYTHON ?= $(shell for python in python3.11 python3.12 python3 python; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo "$$python" && break; done)

# Node comes from the system where that has 20 or newer, else from the tools' environment.
SYSTEM_NODE := $(shell npm --version >/dev/null 2>&1 && \
	node -e 'process.exit(Number(process.versions.node.split(".")[0]) >= 20 ? 0 : 1)' 2>/dev/null && echo yes)
NODE_PATH := $(if $(SYSTEM_NODE),,:$(CURDIR)/$(TOOLS)/bin)
NODE_NEEDS := $(if $(SYSTEM_NODE),,$(TOOLS)/.installed)
export PATH := $(CURDIR)/$(VENV)/bin$(NODE_PATH):$(PATH)

.PHONY: help demo check test test-all test-general test-models test-peers lint format proto client proto-baseline tables op-policy docs node bench bench-quick battery scaling gpu-wheels gpu-check image-test fresh-test lock clean

help: ## say what each verb does
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | while IFS=$$'\t' read -r verb text; do printf '  make %-15s %s\n' "$$verb" "$$text"; done

demo: $(VENV)/.demo ## train a binary network through a server of its own; pictures go to out/
	$(VENV)/bin/gradrule demo $(ARGS)

check: $(VENV)/.installed ## the quick tests: units, contracts, rules; two minutes on two cores
	$(PYTEST) tests/rules tests/contract tests/unit $(ARGS)

test: $(VENV)/.installed $(NODE_CLIENT)/node_modules/.installed ## these and all tests of servers, the Node client's too; twelve minutes on two cores
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.installed $(NODE_CLIENT)/node_modules/.installed ## these and a sample of the battery, tests of the benchmarks, large models
	$(PYTEST) tests $(ARGS)

test-general: $(VENV)/.installed ## tests of calls with every fast path off (see docs/guide/operating.md); ARGS names other files
	GRADRULE_DISABLED_FAST_PATHS=all $(PYTEST) $(or $(ARGS),tests/service)

test-models: $(VENV)/.installed ## compare whole architectures with local TensorFlow; writes docs/model-comparison.md
	$(VENV)/bin/python -m pytest tests/models --models-page docs/model-comparison.md $(ARGS)

test-peers: $(VENV)/.installed $(PEERS)/.installed ## compare rules with the libraries they come from; writes tests/peers/results.json
	$(PEERS)/bin/python -m tests.peers.reference out/peers
	$(VENV)/bin/python -m tests.peers.compare out/peers $(ARGS)

lint: $(VENV)/.installed $(TOOLS)/.installed $(NODE_CLIENT)/node_modules/.installed ## style, types, import rules, protos, stubs
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(NODE_CLIENT)/node_modules/.bin/buf lint
	$(NODE_CLIENT)/node_modules/.bin/buf breaking --against protos/baseline.binpb
	$(TOOLS)/bin/python tools/generate_protos.py --check
	$(VENV)/bin/python tools/generate_sync_client.py --check
	cd $(NODE_CLIENT) && npm run --silent lint

format: $(VENV)/.installed ## put the Python code into shape
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

proto: $(TOOLS)/.installed $(NODE_CLIENT)/node_modules/.installed ## write the stubs of protos/, Python's and Node's
	$(TOOLS)/bin/python tools/generate_protos.py
	cd $(NODE_CLIENT) && npm run --silent proto

client: $(VENV)/.installed ## write the Python client's sync form from its asyncio form
	$(VENV)/bin/python tools/generate_sync_client.py

proto-baseline: $(NODE_CLIENT)/node_modules/.installed ## accept the protos as they are as the ones that must stay compatible
	$(NODE_CLIENT)/node_modules/.bin/buf build --path protos/gradrule/v1 --exclude-source-info --output protos/baseline.binpb

tables: $(VENV)/.installed ## write the table of op definitions from the installed TensorFlow
	$(VENV)/bin/python tools/generate_tables.py

op-policy: $(VENV)/.installed ## deny ops that are new in the installed TensorFlow until they are reviewed; writes docs/reference/ops.md
	$(VENV)/bin/python tools/generate_op_policy.py

docs: $(VENV)/.installed ## write docs/reference/rules.md from the registry and the last comparison with other libraries
	$(VENV)/bin/python tools/generate_reference.py

node: $(NODE_CLIENT)/node_modules/.installed ## set up and build the Node client
	cd $(NODE_CLIENT) && npm run --silent build

bench: $(VENV)/.installed $(BENCH_PEERS)/.installed ## measure against bare echoes, TensorFlow and other services; ARGS="--rows tiny,profile"; JSON in out/
	$(VENV)/bin/python tests/benchmarks/bench.py $(ARGS)

bench-quick: $(VENV)/.installed ## two minutes: fail where a ratio is worse than the recorded one; ARGS="--record" records
	$(VENV)/bin/python tests/benchmarks/guard.py $(ARGS)

battery: $(VENV)/.installed ## try to break servers of its own, for hours; ARGS="--scale 0.01" for a sample; JSON on the last line
	$(VENV)/bin/python -m tests.battery $(ARGS)

scaling: $(VENV)/.installed ## compile time and memory from 1,000 to 100,000 nodes; writes docs/scaling.md
	$(VENV)/bin/python tests/benchmarks/scaling.py $(ARGS)

gpu-wheels: ## fetch what gpu-check installs, into WHEELS=folder (for a machine without a network)
	$(PYTHON) tools/gpu_check.py fetch "$(or $(WHEELS),out/wheels)"

gpu-check: ## GPU tests and the bench from WHEELS=folder, without a network; JSON on the last line
	$(PYTHON) tools/gpu_check.py check "$(or $(WHEELS),out/wheels)" $(ARGS)

image-test: $(VENV)/.installed ## build the container image without a Docker engine, kill -9 it, find its rules again
	$(VENV)/bin/python tools/image_test.py $(ARGS)

fresh-test: ## README's commands and the built wheel on a machine where nothing ever ran; ARGS="--quick" for CI's part
	$(PYTHON) -m tools.fresh_test $(ARGS)

lock: $(TOOLS)/.installed ## write requirements/*.txt anew (run it with Python 3.11)
	$(TOOLS)/bin/python tools/lock.py

clean: ## remove everything that make made
	rm -rf $(VENV) $(TOOLS) $(PEERS) $(BENCH_PEERS) .venv-gpu out build dist $(NODE_CLIENT)/node_modules $(NODE_CLIENT)/dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
	find . -name '*.egg-info' -not -path './.git/*' -prune -exec rm -rf {} +

define make_venv
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $1/bin/python || $(PYTHON) -m venv $1
endef

define install_gradrule
	$(call make_venv,$(VENV))
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -r $1
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
endef

# What the demo needs is a part of what developers need, in the same versions.
$(VENV)/.demo: requirements/demo.txt pyproject.toml
	$(call install_gradrule,requirements/demo.txt)
	@touch $@

$(VENV)/.installed: requirements/dev.txt pyproject.toml
	$(call install_gradrule,requirements/dev.txt)
	@touch $(VENV)/.demo $@

$(TOOLS)/.installed: requirements/tools.txt
	$(call make_venv,$(TOOLS))
	$(TOOLS)/bin/python -m pip install $(PIP_FLAGS) -r requirements/tools.txt
	@touch $@

# The CPU build of torch is on PyTorch's own index, which PIP_EXTRA_INDEX_URL may have to name.
$(PEERS)/.installed: requirements/peers.txt
	$(call make_venv,$(PEERS))
	$(PEERS)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/peers.txt
	@touch $@

$(BENCH_PEERS)/.installed: requirements/bench-peers.txt
	$(call make_venv,$(BENCH_PEERS))
	$(BENCH_PEERS)/bin/python -m pip install $(PIP_FLAGS) -r requirements/bench-peers.txt
	@touch $@

$(NODE_CLIENT)/node_modules/.installed: $(NODE_CLIENT)/package-lock.json $(NODE_NEEDS)
	cd $(NODE_CLIENT) && npm ci --no-audit --no-fund --loglevel=error
	@touch $@
