"""Large answers are read while the event loop goes on; a message is measured before it is parsed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from batches import VOCABULARY, P, T, correct

from rolemesh.batch_validation import BatchValidator
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, RoleFailed
from rolemesh.methods import methods
from rolemesh.roles import Metrics
from rolemesh.rpc import unary_answers
from rolemesh.rpc.batches import LARGE_ROWS, batch_of, check_answer
from rolemesh.rpc.calling.clients import CriticClient
from rolemesh.rpc.contract import CRITIC, FRAME, REWARD, Rpc, deserializer, rpcs
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.critic.servicer import CriticServicer
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.processes.serve import services_of
from rolemesh.v1.actor_pb2 import PublishWeightsResponse
from rolemesh.wire.limits import MAX_ANSWER_BYTES, MAX_ANSWER_FIELDS, MAX_MANIFEST_BYTES, MAX_REGION_BYTES
from rolemesh.wire.streams import LARGE_BYTES, send

# -------------------------------------------------------------------- where batches are looked through


class Watched(BatchValidator):
    """Says on which threads it was asked."""

    threads: ClassVar[list[int]] = []

    def check_request(self, rpc: str, batch: DataProto) -> DataProto:
        self.threads.append(threading.get_ident())
        return super().check_request(rpc, batch)

    def check_answer(self, rpc: str, answer: DataProto, request: DataProto) -> None:
        self.threads.append(threading.get_ident())
        super().check_answer(rpc, answer, request)


@pytest.mark.parametrize(
    ("rows", "width", "in_a_thread"),
    [
        (LARGE_ROWS - 1, 1, False),
        (LARGE_ROWS, 1, True),
        (4, LARGE_BYTES // 64, False),
        (4, LARGE_BYTES // 4, True),
    ],
)
async def test_validating_a_large_batch_does_not_block_the_event_loop(
    rows: int, width: int, in_a_thread: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """The batch has many rows or many bytes."""
    job = make_job(
        {
            "data": {"max_prompt_length": 1, "max_response_length": width},
            "trainer": {"device": "cpu", "default_local_dir": str(tmp_path)},
            "actor": {"model": {"path": str(tiny_model)}},
        }
    )
    validator = Watched.of(methods(job), "reward", VOCABULARY)
    [rpc] = [rpc for rpc in rpcs(REWARD) if rpc.name == "ComputeScores"]
    request = DataProto.from_dict(
        {
            "prompts": torch.zeros(rows, 1, dtype=torch.int64),
            "prompt_mask": torch.ones(rows, 1, dtype=torch.bool),
            "responses": torch.zeros(rows, width, dtype=torch.int64),
            "response_mask": torch.ones(rows, width, dtype=torch.bool),
        },
        {"uid": ["x"] * rows, "data_source": ["x"] * rows, "reward_model": [{}] * rows},
    )
    answer = DataProto({"token_level_scores": torch.zeros(rows, width), "acc": torch.zeros(rows)})
    Watched.threads.clear()
    admitted = await batch_of(
        rpc, send(request), validator, max_bytes=MAX_REGION_BYTES, reserve=lambda num_bytes: None
    )
    await check_answer(rpc, answer, validator, admitted)
    assert [thread != threading.get_ident() for thread in Watched.threads] == [in_a_thread] * 2


# ------------------------------------------------------------------------- answers that are one message

ROLES = ("actor", "reference", "critic", "reward", "rollout")
SERVICES = dict.fromkeys(service for role in ROLES for service in services_of(role))
MESSAGES = [rpc for service in SERVICES for rpc in rpcs(service) if rpc.response is not FRAME]
EMPTY_FIELD = b"\x7a\x00"  # of two bytes, which no message knows


@pytest.mark.parametrize("rpc", MESSAGES, ids=lambda rpc: rpc.path)
async def test_an_answer_is_measured_and_counted_before_it_is_parsed(
    rpc: Rpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rpc of a role: one that somebody adds is asked here too."""
    parsed: list[int] = []

    def seen(message: Any) -> Callable[[bytes], Any]:
        def read(data: bytes) -> Any:
            parsed.append(len(data))
            return deserializer(message)(data)  # type: ignore[misc]

        return read

    monkeypatch.setattr(unary_answers, "deserializer", seen)
    most = MAX_ANSWER_BYTES + (MAX_MANIFEST_BYTES if rpc.name == "GetManifest" else 0)
    for wrong, message in [
        (bytes(most + 1), f"a {rpc.response.name} has at most {most} bytes; got {most + 1}"),
        (
            EMPTY_FIELD * (MAX_ANSWER_FIELDS + 1),
            f"a {rpc.response.name} of more than {MAX_ANSWER_FIELDS} fields",
        ),
        (b"\xff" * 40, "a number of more than 64 bits"),
    ]:
        with pytest.raises(InvalidBatch, match=message):
            await unary_answers.read_answer(rpc, wrong)
    assert parsed == []
    await unary_answers.read_answer(rpc, EMPTY_FIELD * MAX_ANSWER_FIELDS)
    assert parsed == [2 * MAX_ANSWER_FIELDS]


@pytest.mark.parametrize("size", [unary_answers.LARGE_BYTES - 1, unary_answers.LARGE_BYTES])
async def test_a_large_answer_is_parsed_while_the_event_loop_goes_on(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def seen(message: Any) -> Callable[[bytes], Any]:
        def read(data: bytes) -> Any:
            threads.append(threading.get_ident())
            return deserializer(message)(data)  # type: ignore[misc]

        return read

    monkeypatch.setattr(unary_answers, "deserializer", seen)
    [rpc] = [rpc for rpc in MESSAGES if rpc.name == "PublishWeights"]
    empty = PublishWeightsResponse(digest="x" * (size - 4)).SerializeToString()
    assert len(empty) == size
    await unary_answers.read_answer(rpc, empty)
    assert [thread != threading.get_ident() for thread in threads] == [size == unary_answers.LARGE_BYTES]


class Talkative(CriticWorker):
    """Has more metrics than anybody reads."""

    async def update(self, batch: DataProto) -> Metrics:
        return {f"critic/{i}": 0.0 for i in range(MAX_ANSWER_FIELDS + 1)}


async def test_metrics_without_end_are_the_roles_failure(tiny_model: Path, tmp_path: Path) -> None:
    job = make_job(
        {
            "data": {"max_prompt_length": P, "max_response_length": T},
            "trainer": {"device": "cpu", "default_local_dir": str(tmp_path)},
            "actor": {"model": {"path": str(tiny_model)}},
        }
    )
    worker = Talkative(job)
    server = RoleServer({"critic": [CRITIC]})
    address = await server.start("127.0.0.1:0")
    await server.ready({CRITIC: CriticServicer(worker)})
    try:
        async with CriticClient([address], methods(job)) as client:
            await client.wait_until_ready(60)
            with pytest.raises(
                RoleFailed, match=f"critic.Update at {address}.*UpdateResponse of more than 4096"
            ):
                await client.update(correct(methods(job)["critic.update"], 4))
    finally:
        await server.drain(0)
        worker.close()
