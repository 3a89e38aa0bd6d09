"""Reads the properties of each method from the .proto's descriptors. Server and client need no table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions

from rolemesh.v1 import (
    actor_pb2,
    critic_pb2,
    data_pb2,
    environment_pb2,
    frame_pb2,
    group_pb2,
    reference_pb2,
    reward_pb2,
    rollout_pb2,
    weights_pb2,
)

ACTOR = actor_pb2.DESCRIPTOR.services_by_name["ActorService"]
CRITIC = critic_pb2.DESCRIPTOR.services_by_name["CriticService"]
ENVIRONMENT = environment_pb2.DESCRIPTOR.services_by_name["EnvironmentService"]
GROUP = group_pb2.DESCRIPTOR.services_by_name["GroupService"]
REFERENCE = reference_pb2.DESCRIPTOR.services_by_name["ReferenceService"]
REWARD = reward_pb2.DESCRIPTOR.services_by_name["RewardService"]
ROLLOUT = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
WEIGHTS = weights_pb2.DESCRIPTOR.services_by_name["WeightsService"]
FRAME: Any = frame_pb2.Frame.DESCRIPTOR


# The roles that a certificate may name, by number in enum Caller: its names without prefix, in lower case.
CALLERS = {
    number: name.removeprefix("CALLER_").lower()
    for name, number in data_pb2.Caller.items()
    if number != data_pb2.CALLER_UNSPECIFIED
}


@dataclass(frozen=True)
class Rpc:
    """One method of a service.

    Args:
        service: full name, e.g. rolemesh.v1.RewardService.
        name: e.g. ComputeScores.
        method: its name in Protocol and worker, e.g. compute_scores.
        dispatch: how a call is distributed over replicas, a value of rolemesh.v1.Dispatch.
            DISPATCH_UNSPECIFIED: the caller chooses one server, and the Dispatcher refuses the method.
        callers: the roles that may call it under TLS, e.g. controller.
        pure: True if a failed call may be retried, also at another replica (idempotency_level).
        streams: whether the request is a stream, and whether the response is.
        request, response: the message types.
    """

    service: str
    name: str
    method: str
    dispatch: int
    callers: frozenset[str]
    pure: bool
    streams: tuple[bool, bool]
    request: Descriptor
    response: Descriptor

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    @property
    def takes_batch(self) -> bool:
        """True if the request is `stream Frame`: one batch, which a Method of rolemesh/methods.py declares."""
        return self.streams[0] and self.request is FRAME


def rpcs(service: ServiceDescriptor) -> list[Rpc]:
    """Return the methods of a service."""
    return [_rpc(service, method) for method in service.methods]


def _rpc(service: ServiceDescriptor, method: MethodDescriptor) -> Rpc:
    options: Any = method.GetOptions()
    return Rpc(
        service=service.full_name,
        name=method.name,
        method=_in_python(method),
        dispatch=options.Extensions[data_pb2.dispatch],
        callers=_callers(method),
        pure=options.idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN,
        streams=(method.client_streaming, method.server_streaming),
        request=method.input_type,
        response=method.output_type,
    )


def _in_python(method: MethodDescriptor) -> str:
    words = "".join(f" {letter}" if letter.isupper() else letter for letter in method.name).split()
    return "_".join(words).lower()


def _callers(method: MethodDescriptor) -> frozenset[str]:
    options: Any = method.GetOptions()
    return frozenset(CALLERS[caller] for caller in options.Extensions[data_pb2.callers])


def serializer(message: Descriptor) -> Callable[[Any], bytes] | None:
    """Return a function from message to bytes; None for Frame, which the codec writes with fewer copies."""
    if message is FRAME:
        return None
    return message_factory.GetMessageClass(message).SerializeToString


def deserializer(message: Descriptor) -> Callable[[bytes], Any] | None:
    """Return a function from an answer's bytes to a message; None for Frame, which the codec reads."""
    if message is FRAME:
        return None
    return message_factory.GetMessageClass(message).FromString
