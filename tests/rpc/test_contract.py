"""The .proto's options, the client that reads them, and what it refuses."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from rolemesh.catalog.catalog import load
from rolemesh.catalog.role_specs import ROLES
from rolemesh.dataproto import DataProto
from rolemesh.roles import Actor, Critic, Reference, Reward, Rollout
from rolemesh.rpc.calling.dispatch import Dispatcher
from rolemesh.rpc.calling.pool import ReplicaPool
from rolemesh.rpc.contract import (
    ACTOR,
    CRITIC,
    ENVIRONMENT,
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
from rolemesh.rpc.serving import servicers
from rolemesh.rpc.serving.handlers import Context
from rolemesh.services.controller.service.servicer import ControllerServicer
from rolemesh.v1.data_pb2 import DISPATCH_BROADCAST, DISPATCH_SHARD_ROWS, DISPATCH_UNSPECIFIED, Dispatch
from rolemesh.v1.weights_pb2 import GetManifestRequest
from rolemesh.weights.service import WeightsServicer

ROLE_RPCS = [rpc for service in (ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT) for rpc in rpcs(service)]


@pytest.mark.parametrize("rpc", ROLE_RPCS, ids=lambda rpc: rpc.path)
def test_batches_are_sharded_by_rows_and_messages_are_broadcast(rpc: Rpc) -> None:
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


def test_the_codec_serializes_frames_and_protobuf_other_messages() -> None:
    message = GetManifestRequest.DESCRIPTOR
    for of in (serializer, deserializer):
        assert of(FRAME) is None
    written, read = serializer(message), deserializer(message)
    assert written is not None
    assert read is not None
    assert read(written(GetManifestRequest())) == GetManifestRequest()


async def test_the_dispatcher_refuses_a_method_without_a_dispatch() -> None:
    """The .proto says so, and every value that it has for a method to name is one that the client can do."""
    assert {rpc.dispatch for rpc in rpcs(WEIGHTS)} == {DISPATCH_UNSPECIFIED}
    assert set(Dispatch.values()) == {DISPATCH_UNSPECIFIED, DISPATCH_SHARD_ROWS, DISPATCH_BROADCAST}
    dispatcher = Dispatcher(ReplicaPool("rollout", ["127.0.0.1:1"], patience_s=0.0), WEIGHTS, timeout_s=1.0)
    with pytest.raises(AssertionError, match=r"GetManifest: the \.proto declares no dispatch"):
        await dispatcher.call("GetManifest", GetManifestRequest())


# ------------------------------------------------------------------------------------------- servicers


def test_the_bases_of_servicers_are_what_the_protos_generate() -> None:
    generator = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "generate-servicers"))
    assert generator["FILE"].read_text() == generator["generated"]()


def test_every_servicer_has_a_base_that_rejects_a_misspelt_rpc() -> None:
    for service in (ACTOR, CRITIC, ENVIRONMENT, REFERENCE, REWARD, ROLLOUT):
        [role] = (role for role in ROLES.values() if load(role.service) is service)
        base = getattr(servicers, f"{service.name}Base")
        assert issubclass(load(role.servicer), base)
        assert base.__abstractmethods__ == {rpc.name for rpc in rpcs(service)}
    assert issubclass(WeightsServicer, servicers.WeightsServiceBase)
    assert issubclass(ControllerServicer, servicers.ControllerServiceBase)

    class Misspelt(servicers.RewardServiceBase):
        async def ComputeScore(self, batch: DataProto, context: Context) -> AsyncIterator[DataProto]:
            yield batch

    with pytest.raises(TypeError, match=r"abstract method '?ComputeScores"):
        Misspelt()  # type: ignore[abstract]


BUF = Path(sys.executable).with_name("buf")  # make lint installs it


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")
@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("critic", "", "", ""),
        ("weights", "  uint64 version = 1;", "  uint64 version = 1;\n  uint64 more = 99;", ""),
        ("weights", "  uint64 version = 1;", "  uint64 version = 77;", 'present field "1" with name "version"'),
        ("weights", "  uint64 version = 1;", "  string version = 1;", 'from "uint64" to "string"'),
        ("reference", "rpc ComputeLogProbs", "rpc ComputeLogProb", '"ComputeLogProbs" on service'),
    ],
)
def test_a_contract_that_breaks_the_last_releases_is_refused(
    file: str, before: str, after: str, said: str, tmp_path: Path
) -> None:
    proto = Path(__file__).parents[2] / "proto"
    shutil.copytree(proto, tmp_path / "proto")
    changed = tmp_path / "proto" / "rolemesh" / "v1" / f"{file}.proto"
    text = changed.read_text()
    assert before in text
    changed.write_text(text.replace(before, after, 1) if before else text)
    command = [BUF, "breaking", tmp_path / "proto", "--against", proto / "released.binpb"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode == 0) is (not said), done.stdout + done.stderr
    assert said in done.stdout
