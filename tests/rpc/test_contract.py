"""The .proto's options, the client that reads them, and what it refuses."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from rolemesh.roles import Actor, Critic, Reference, Reward, Rollout
from rolemesh.rpc.calling.dispatch import Dispatcher
from rolemesh.rpc.calling.pool import ReplicaPool
from rolemesh.rpc.contract import (
    ACTOR,
    CRITIC,
    FRAME,
    REFERENCE,
    REWARD,
    ROLLOUT,
    WEIGHTS,
    Rpc,
    deserializer,
    rpcs,
    serializer,
)
from rolemesh.v1.data_pb2 import DISPATCH_BROADCAST, DISPATCH_SHARD_ROWS, DISPATCH_UNSPECIFIED, Dispatch
from rolemesh.v1.weights_pb2 import GetManifestRequest

ROLE_RPCS = [rpc for service in (ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT) for rpc in rpcs(service)]


@pytest.mark.parametrize("rpc", ROLE_RPCS, ids=lambda rpc: rpc.path)
def test_batches_are_cut_by_rows_and_messages_go_to_every_replica(rpc: Rpc) -> None:
    takes_batch, _ = rpc.streams
    assert rpc.dispatch == (DISPATCH_SHARD_ROWS if takes_batch else DISPATCH_BROADCAST)


def test_a_method_is_what_its_proto_says() -> None:
    """Update changes weights, so it is not tried again; publishing the same weights twice is."""
    (scores,) = rpcs(REWARD)
    assert scores.path == "/rolemesh.v1.RewardService/ComputeScores"
    assert scores.takes_batch
    assert {rpc.name: rpc.pure for rpc in rpcs(ACTOR) if rpc.name in ("Update", "PublishWeights")} == {
        "Update": False,
        "PublishWeights": True,
    }
    assert {rpc.callers for rpc in rpcs(WEIGHTS)} == {frozenset({"rollout"})}
    assert {rpc.callers for rpc in rpcs(REWARD)} == {frozenset({"controller"})}


def test_a_methods_name_is_its_protocols() -> None:
    protocols = {ACTOR: Actor, CRITIC: Critic, REFERENCE: Reference, REWARD: Reward, ROLLOUT: Rollout}
    for service, protocol in protocols.items():
        assert [rpc.method for rpc in rpcs(service) if not hasattr(protocol, rpc.method)] == []


def test_a_service_of_another_projects_proto_names_no_callers() -> None:
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    assert {rpc.callers for rpc in rpcs(health)} == {frozenset()}


def test_a_frame_is_left_to_the_codec_and_other_messages_are_protobufs_own() -> None:
    message = GetManifestRequest.DESCRIPTOR
    for of in (serializer, deserializer):
        assert of(FRAME) is None
    written, read = serializer(message), deserializer(message)
    assert written is not None
    assert read is not None
    assert read(written(GetManifestRequest())) == GetManifestRequest()


async def test_a_method_without_a_dispatch_is_refused_by_the_client_that_spreads_calls() -> None:
    """The .proto says so, and every value that it has for a method to name is one that the client can do."""
    assert {rpc.dispatch for rpc in rpcs(WEIGHTS)} == {DISPATCH_UNSPECIFIED}
    assert set(Dispatch.values()) == {DISPATCH_UNSPECIFIED, DISPATCH_SHARD_ROWS, DISPATCH_BROADCAST}
    dispatcher = Dispatcher(ReplicaPool("rollout", ["127.0.0.1:1"], patience_s=0.0), WEIGHTS, timeout_s=1.0)
    with pytest.raises(AssertionError, match=r"GetManifest: the \.proto declares no dispatch"):
        await dispatcher.call("GetManifest", GetManifestRequest())
