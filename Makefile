PYTHON ?= python3
BIN := .venv/bin

.PHONY: proto
proto: ## regenerate rolemesh/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(sort $(wildcard proto/rolemesh/v1/*.proto))
