#!/bin/sh
# build.sh PROTO_DIRECTORY PROGRAM: generates the Go code of the contract and compiles the service. It needs Go 1.26 and
# protoc; PROTOC may be another command, such as "python -m grpc_tools.protoc".
set -eu
proto=$(cd "$1" && pwd) program=$(realpath -m "$2")
cd "$(dirname "$0")"
GOBIN=$(mktemp -d)
trap 'rm -r "$GOBIN"' EXIT
export GOBIN
go install google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
set -- --go_out=. --go_opt=module=rolemesh.example/reward --go-grpc_out=. --go-grpc_opt=module=rolemesh.example/reward
for file in data frame reward; do # the .proto files name no Go package
    package=Mrolemesh/v1/$file.proto=rolemesh.example/reward/rolemesh/v1
    set -- "$@" "--go_opt=$package" "--go-grpc_opt=$package" "rolemesh/v1/$file.proto"
done
PATH=$GOBIN:$PATH ${PROTOC:-protoc} -I "$proto" "$@"
CGO_ENABLED=0 go build -o "$program" .
