# Commands for developers, hooks and CI. They need Python 3.11 or 3.12 and make, and install everything else once.
# ARGS passes arguments: make test ARGS="-k ste_sign", make bench ARGS="--quick".

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
TOOLS := .venv-tools
PEERS := .venv-peers
BENCH_PEERS := .venv-bench
BRIDGES := .venv-bridges
CLUSTER := .venv-cluster
NODE_CLIENT := client/node
CONSOLE := client/console
PIP_FLAGS := --quiet --disable-pip-version-check --require-hashes
ARGS ?=

# Tests run in one process per core, at most four; each process has its own servers. The tests of a file stay together.
# Files start in the order of `testpaths`: those with servers first, so that no long file is left at the end.
WORKERS ?= auto
APT = $$(test "$$(id -u)" = 0 || echo sudo) env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=5
APT_INSTALL = $(APT) update && $(APT) install --yes --no-install-recommends
# The registry's own tests run on PostgreSQL too.
CLUSTER_TESTS ?= tests/cluster $(patsubst %,tests/unit/registry/test_%.py,store rules programs tenants) tests/service/test_rules.py
# Write bytecode even if the environment forbids it: tests start many servers and commands.
PYTEST = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The first supported Python, unless PYTHON is set.
PYTHON ?= $(shell for python in python3.11 python3.12 python3 python; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo "$$python" && break; done)

# Use Node of the system if it is 20 or newer, otherwise the one in the tools' environment.
SYSTEM_NODE := $(shell npm --version >/dev/null 2>&1 && \
	node -e 'process.exit(Number(process.versions.node.split(".")[0]) >= 20 ? 0 : 1)' 2>/dev/null && echo yes)
NODE_PATH := $(if $(SYSTEM_NODE),,:$(CURDIR)/$(TOOLS)/bin)
NODE_NEEDS := $(if $(SYSTEM_NODE),,$(TOOLS)/.installed)
export PATH := $(CURDIR)/$(VENV)/bin$(NODE_PATH):$(PATH)

.PHONY: help demo check test test-all test-general test-kernels test-models test-peers test-console test-bridges cluster-test postgres redis nginx kubectl placement lint size format proto client proto-baseline tables op-policy gradients docs node console bench bench-quick battery scaling gpu-wheels gpu-check image-test fresh-test lock clean

help: ## list all commands
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | while IFS=$$'\t' read -r verb text; do printf '  make %-15s %s\n' "$$verb" "$$text"; done

demo: $(VENV)/.demo ## start a server and train a binary network through it; writes pictures to out/
	$(VENV)/bin/gradrule demo $(ARGS)

check: $(VENV)/.installed ## run the quick tests: units, contracts, rules; 2 minutes on two cores
	$(PYTEST) tests/rules tests/contract tests/unit $(ARGS)

test: $(VENV)/.installed $(NODE_CLIENT)/node_modules/.installed ## run these and all tests with servers, including the Node client's; 15 minutes on two cores
	$(PYTEST) $(ARGS)

test-all: export GRADRULE_WHOLE_SAMPLES := 1
test-all: $(VENV)/.installed $(NODE_CLIENT)/node_modules/.installed ## run these with larger samples, a sample of the battery, the tests of the benchmarks, and large models
	$(PYTEST) tests --ignore=tests/bridges --ignore=tests/cluster $(ARGS)

test-general: $(VENV)/.installed ## run the tests of calls with every fast path off (docs/guide/operating.md); ARGS selects other files
	GRADRULE_DISABLED_FAST_PATHS=all $(PYTEST) $(or $(ARGS),tests/service)

test-kernels: export GRADRULE_WHOLE_SAMPLES := 1
test-kernels: $(VENV)/.installed ## run the tests of rules with kernels that processors without AVX-512 get, and without oneDNN's
	ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) tests/rules $(ARGS)
	TF_ENABLE_ONEDNN_OPTS=0 $(PYTEST) tests/rules $(ARGS)

test-models: $(VENV)/.installed ## compare whole models with local TensorFlow; writes docs/reference/model-comparison.md
	$(VENV)/bin/python -m pytest tests/models --models-page docs/reference/model-comparison.md $(ARGS)

test-peers: $(VENV)/.installed $(PEERS)/.installed ## compare rules with the libraries that they come from; writes tests/peers/results.json
	$(VENV)/bin/python -m tests.peers.keras_models out/peers
	$(PEERS)/bin/python -m tests.peers.reference out/peers
	$(VENV)/bin/python -m tests.peers.compare out/peers $(ARGS)

test-console: $(VENV)/.installed $(CONSOLE)/node_modules/.installed ## test the console in a headless Chromium against a real server and gateway
	@command -v chromium >/dev/null || { $(APT_INSTALL) chromium >/dev/null; }
	cd $(CONSOLE) && CHROMIUM=$$(command -v chromium) npm run --silent test -- $(ARGS)

test-bridges: $(BRIDGES)/.installed ## test the modules for PyTorch, JAX, SciPy, PyTensor and TensorFlow
	PYTHONDONTWRITEBYTECODE= $(BRIDGES)/bin/python -m pytest tests/bridges $(ARGS)

cluster-test: $(CLUSTER)/.installed postgres redis nginx kubectl ## test several servers with PostgreSQL, an object store and Ray
	PYTHONDONTWRITEBYTECODE= $(CLUSTER)/bin/python -m pytest --registry-database postgresql $(CLUSTER_TESTS) $(ARGS)

placement: $(CLUSTER)/.installed ## simulate how the choice of a server for each request affects caches and waiting times
	$(CLUSTER)/bin/python -m tools.simulate_placement $(ARGS)

lint: $(VENV)/.installed $(TOOLS)/.installed $(NODE_CLIENT)/node_modules/.installed $(CONSOLE)/node_modules/.installed ## check style, types, import rules, protos and generated code
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python tools/size.py
	$(NODE_CLIENT)/node_modules/.bin/buf lint
	$(NODE_CLIENT)/node_modules/.bin/buf breaking --against protos/baseline.binpb
	$(TOOLS)/bin/python tools/generate_protos.py --check
	$(TOOLS)/bin/python tools/generate_openapi.py --check
	$(VENV)/bin/python tools/generate_sync_client.py --check
	cd $(NODE_CLIENT) && npm run --silent lint
	cd $(CONSOLE) && npm run --silent lint

size: $(VENV)/.installed ## count the server's lines and modules against the budget in pyproject.toml; ARGS=--update sets it
	$(VENV)/bin/python tools/size.py $(ARGS)

format: $(VENV)/.installed ## format the Python code
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

proto: $(TOOLS)/.installed $(NODE_CLIENT)/node_modules/.installed ## generate the stubs of protos/ for Python and Node, and the OpenAPI document
	$(TOOLS)/bin/python tools/generate_protos.py
	$(TOOLS)/bin/python tools/generate_openapi.py
	cd $(NODE_CLIENT) && npm run --silent proto

client: $(VENV)/.installed ## generate the sync Python client from the asyncio client
	$(VENV)/bin/python tools/generate_sync_client.py

proto-baseline: $(NODE_CLIENT)/node_modules/.installed ## make the current protos the baseline for compatibility
	$(NODE_CLIENT)/node_modules/.bin/buf build --path protos/gradrule/v1 --exclude-source-info --output protos/baseline.binpb

tables: $(VENV)/.installed ## generate the table of op definitions from the installed TensorFlow
	$(VENV)/bin/python tools/generate_tables.py

op-policy: $(VENV)/.installed ## deny ops that are new in the installed TensorFlow, until somebody reviews them; writes docs/reference/ops.md
	$(VENV)/bin/python tools/generate_op_policy.py

gradients: $(VENV)/.installed ## compare the gradients of all differentiable ops with finite differences; writes docs/reference/gradients.md
	$(VENV)/bin/python -m tests.policy.gradients

docs: $(VENV)/.installed ## generate docs/reference/rules.md from the registry and the last comparison with other libraries, and docs/reference/onnx.md
	$(VENV)/bin/python tools/generate_reference.py
	$(VENV)/bin/python tools/generate_onnx_reference.py

node: $(NODE_CLIENT)/node_modules/.installed ## build the Node client
	cd $(NODE_CLIENT) && npm run --silent build

console: $(CONSOLE)/node_modules/.installed ## build the console in the browser to server/gradrule_gateway/console
	cd $(CONSOLE) && npm run --silent build

http-tools: ## install what tests of HTTP examples need and this machine lacks: curl, jq, and R with httr2 and jsonlite
	@missing="$$(command -v curl >/dev/null || echo curl) $$(command -v jq >/dev/null || echo jq)"; \
	Rscript -e 'library(httr2); library(jsonlite)' >/dev/null 2>&1 || missing="$$missing r-base-core r-cran-httr2 r-cran-jsonlite"; \
	test -z "$${missing// /}" || { $(APT_INSTALL) $$missing; }

postgres: ## install PostgreSQL where this machine lacks it
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || { $(APT_INSTALL) postgresql; }

redis: ## install Redis where this machine lacks it
	@command -v redis-server >/dev/null || { $(APT_INSTALL) redis-server; }

nginx: ## install nginx where this machine lacks it
	@test -x /usr/sbin/nginx || command -v nginx >/dev/null || { $(APT_INSTALL) nginx-light; }

kubectl: $(CLUSTER)/.installed ## install kubectl for tests, where this machine has none that renders components
	@test -x $(CLUSTER)/bin/kubectl || kubectl kustomize deploy/kubernetes/overlays/ha >/dev/null 2>&1 || \
	$(CLUSTER)/bin/python tools/install_kubectl.py $(CLUSTER)/bin

bench: $(VENV)/.installed $(BENCH_PEERS)/.installed ## measure against echo servers, TensorFlow and other services; ARGS="--rows tiny,profile" selects rows; writes JSON to out/
	$(VENV)/bin/python tests/benchmarks/bench.py $(ARGS)

bench-quick: $(VENV)/.installed ## fail if a ratio is worse than the recorded one; 2 minutes; ARGS="--record" records
	$(VENV)/bin/python tests/benchmarks/guard.py $(ARGS)

battery: $(VENV)/.installed ## try to break servers, for hours; ARGS="--scale 0.01" runs a sample; prints JSON on the last line
	$(VENV)/bin/python -m tests.battery $(ARGS)

scaling: $(VENV)/.installed ## measure compile time and memory from 1,000 to 100,000 nodes; writes docs/reference/scaling.md
	$(VENV)/bin/python tests/benchmarks/scaling.py $(ARGS)

gpu-wheels: ## download what gpu-check installs to WHEELS=folder, for a machine without a network
	$(PYTHON) tools/gpu_check.py fetch "$(or $(WHEELS),out/wheels)"

gpu-check: ## run GPU tests and benchmarks from WHEELS=folder, without a network; prints JSON on the last line
	$(PYTHON) tools/gpu_check.py check "$(or $(WHEELS),out/wheels)" $(ARGS)

image-test: $(VENV)/.installed ## build the container image without Docker, kill it, and find its rules after a restart
	$(VENV)/bin/python tools/image_test.py $(ARGS)

fresh-test: ## run the README's commands and the built wheel on a bare machine; ARGS="--quick" runs the part for CI
	$(PYTHON) -m tools.fresh_test $(ARGS)

lock: $(TOOLS)/.installed ## generate requirements/*.txt (run it with Python 3.11)
	$(TOOLS)/bin/python tools/lock.py

clean: ## delete everything that make created
	rm -rf $(VENV) $(TOOLS) $(PEERS) $(BENCH_PEERS) $(BRIDGES) $(CLUSTER) .venv-gpu out build dist $(NODE_CLIENT)/node_modules $(NODE_CLIENT)/dist $(CONSOLE)/node_modules $(CONSOLE)/test-results
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
	find . -name '*.egg-info' -not -path './.git/*' -prune -exec rm -rf {} +

define make_venv
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $1/bin/python || $(PYTHON) -m venv $1
endef

define install_gradrule
	$(call make_venv,$1)
	$1/bin/python -m pip install $(PIP_FLAGS) -r $2
	$1/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
endef

# The demo needs a subset of what developers need, in the same versions.
$(VENV)/.demo: requirements/demo.txt pyproject.toml
	$(call install_gradrule,$(VENV),requirements/demo.txt)
	@touch $@

$(VENV)/.installed: requirements/dev.txt pyproject.toml
	$(call install_gradrule,$(VENV),requirements/dev.txt)
	@touch $(VENV)/.demo $@

# The CPU build of torch is on PyTorch's own index; PIP_EXTRA_INDEX_URL may have to name it.
$(BRIDGES)/.installed: requirements/bridges.txt pyproject.toml
	$(call install_gradrule,$(BRIDGES),requirements/bridges.txt --no-deps)
	@touch $@

$(CLUSTER)/.installed: requirements/cluster.txt pyproject.toml
	$(call install_gradrule,$(CLUSTER),requirements/cluster.txt)
	@touch $@

$(TOOLS)/.installed: requirements/tools.txt
	$(call make_venv,$(TOOLS))
	$(TOOLS)/bin/python -m pip install $(PIP_FLAGS) -r requirements/tools.txt
	@touch $@

# As for the bridges, this needs the CPU build of torch.
$(PEERS)/.installed: requirements/peers.txt
	$(call make_venv,$(PEERS))
	$(PEERS)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/peers.txt
	@touch $@

$(BENCH_PEERS)/.installed: requirements/bench-peers.txt
	$(call make_venv,$(BENCH_PEERS))
	$(BENCH_PEERS)/bin/python -m pip install $(PIP_FLAGS) -r requirements/bench-peers.txt
	@touch $@

$(NODE_CLIENT)/node_modules/.installed $(CONSOLE)/node_modules/.installed: %/node_modules/.installed: %/package-lock.json $(NODE_NEEDS)
	cd $* && npm ci --no-audit --no-fund --loglevel=error
	@touch $@
