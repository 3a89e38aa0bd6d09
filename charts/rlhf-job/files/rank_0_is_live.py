import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Exit with 1 if rank 0 hangs. If nobody listens, it is being started, or the launcher waits for other pods.
channel = grpc.insecure_channel("localhost:50052", [("grpc.enable_http_proxy", 0)])
try:
    request = health_pb2.HealthCheckRequest(service="live")
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
except grpc.RpcError as error:
    sys.exit(error.code() != grpc.StatusCode.UNAVAILABLE)
sys.exit(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)
