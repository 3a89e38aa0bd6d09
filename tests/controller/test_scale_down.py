"""What a controller scales to zero, and when: after a run that has ended, not after one that failed. (With a
real API server: tests/cluster/test_endpoints.py.)"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from api_server import ApiServer, Request, api_server
from in_process import small_job, train
from serving import served

from rolemesh import kubernetes
from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig, InvalidData, RolemeshError, RoleUnavailable
from rolemesh.rpc.calling.dispatch import cancel_all
from rolemesh.services.controller import scale_down
from rolemesh.services.controller.main import Addresses, control
from rolemesh.services.controller.run.attempts import FILE, NoProgress
from rolemesh.services.controller.run.run_dir import held
from rolemesh.services.controller.scale_down import PAUSED, REPLICAS, Workload, workloads
from rolemesh.services.controller.service.controller_server import serving
from rolemesh.services.controller.service.status import RunStatus
from rolemesh.services.controller.start_guard import start_guard

LOCAL = "127.0.0.1:0"
OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "trainer.total_training_steps=1",
)


async def controlled(
    job: JobConfig,
    addresses: Addresses,
    *,
    scales_up: bool = False,
    max_attempts: int = 0,
    attempts_of: str = "",
    begun: Callable[[], None] = lambda: None,
    **workloads_: Sequence[Workload],
) -> None:
    """As `rolemesh control` does it."""
    async with serving(RunStatus("run"), job.roles, LOCAL) as server:
        how: dict[str, Any] = {"scales_up": scales_up, "begun": begun}
        how |= {"max_attempts": max_attempts, "attempts_of": attempts_of}
        await control(job, addresses, server, **how, **workloads_)


def test_scalers_come_before_the_workloads_that_they_scale() -> None:
    given = ["deployment/a,statefulset/b", "scaledobject/a"]
    assert [f"{w.kind}/{w.name}" for w in workloads(given)] == [
        "scaledobject/a",
        "deployment/a",
        "statefulset/b",
    ]


@pytest.mark.parametrize("given", ["pod/a", "deployment", "deployment/", ""])
def test_a_workload_that_cannot_be_scaled_is_refused(given: str) -> None:
    with pytest.raises(
        InvalidConfig, match="write KIND/NAME with a kind of scaledobject, deployment, statefulset"
    ):
        workloads([given])


def in_pod(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = api.url.removeprefix("https://").split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(kubernetes, "ACCOUNT", api.account)


SCALED_OBJECT = "/apis/keda.sh/v1alpha1/namespaces/here/scaledobjects/job-reward"


async def patched(api: ApiServer, path: str) -> tuple[Request, Any]:
    """The next request, which changes this, and what it lays on it."""
    request = await api.next()
    assert (request.method, request.path) == ("PATCH", path)
    return request, json.loads(request.body)


async def asked(api: ApiServer, path: str) -> Request:
    """The next request, which reads this: a path, or a workload of the API apps."""
    request = await api.next()
    assert request.method == "GET"
    assert request.path == (path if path[0] == "/" else f"/apis/apps/v1/namespaces/here/{path}")
    return request


def of_values(wanted: int, *, now: int) -> Any:
    """A workload whose values ask for `wanted` pods, scaled to `now`."""
    return {"metadata": {"annotations": {REPLICAS: str(wanted)}}, "spec": {"replicas": now}}


async def test_scale_up_keeps_added_replicas_and_logs_absent_workloads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with api_server(tmp_path) as api:
        some = workloads(["deployment/a,deployment/b,deployment/c,deployment/d"])
        scaling = asyncio.create_task(scale_down.scale_up(some, api.cluster, sets_replicas=True))
        await (await asked(api, "deployments/a")).answer(of_values(3, now=5))
        await (await asked(api, "deployments/b")).answer({"message": "b is not found"}, 404)
        await (await asked(api, "deployments/c")).answer(of_values(3, now=1))
        request, change = await patched(api, "/apis/apps/v1/namespaces/here/deployments/c/scale")
        assert change == {"spec": {"replicas": 3}}
        await request.answer({})
        await (await asked(api, "deployments/d")).answer({"metadata": {"annotations": {REPLICAS: "two"}}})
        await scaling
    assert "could not scale up deployment b: b is not found" in caplog.text
    assert "could not scale up deployment d: invalid literal" in caplog.text


async def test_a_start_scales_up_what_it_can_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start without its pods fails, and the next one tries again. After a run nobody would."""
    assert scale_down.START_PATIENCE_S <= 10
    monkeypatch.setattr(scale_down, "START_PATIENCE_S", 0.0)
    some = workloads(["scaledobject/job-reward,deployment/a"])
    async with api_server(tmp_path) as api:
        scaling = asyncio.create_task(scale_down.scale_up(some, api.cluster, sets_replicas=True))
        request, _ = await patched(api, SCALED_OBJECT)
        await request.answer({"message": "failed calling webhook"}, 500)
        await (await asked(api, "deployments/a")).answer(of_values(1, now=1))
        await scaling
        assert api.requests.empty()
    assert "could not scale up scaledobject job-reward: 500: failed calling webhook" in caplog.text


async def test_failures_to_scale_down_are_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scale_down, "PATIENCE_S", 0.05)
    monkeypatch.setattr(scale_down, "RETRY_S", 0.01)
    some = workloads(["deployment/a"])
    async with api_server(tmp_path) as api:
        scaling = asyncio.create_task(scale_down.scale_down(some, api.cluster))
        request, _ = await patched(api, "/apis/apps/v1/namespaces/here/deployments/a/scale")
        await request.answer({"message": "it is too old"}, 410)
        await scaling
        for name in ("token", "ca.crt"):
            (tmp_path / name).unlink()
            await scale_down.scale_down(some, api.cluster)
        (tmp_path / "ca.crt").touch()
        await scale_down.scale_down(some, api.cluster)
    said = [record.message for record in caplog.records if record.name == scale_down.log.name]
    reasons = ["it is too old", r".*No such file.*token", r".*No such file", r".*\[X509"]
    for message, reason in zip(said, reasons, strict=True):
        assert re.match(f"could not scale down deployment a: {reason}", message)


async def test_scaling_down_waits_while_the_api_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else would scale down: the Job is then complete."""
    monkeypatch.setattr(scale_down, "RETRY_S", 0.001)
    monkeypatch.setattr(scale_down, "LONGEST_RETRY_S", 0.004)
    caplog.set_level("INFO", scale_down.log.name)
    async with api_server(tmp_path) as api:
        scaling = asyncio.create_task(scale_down.scale_down(workloads(["deployment/a"]), api.cluster))
        for code in [503] * 12 + [200]:
            request, _ = await patched(api, "/apis/apps/v1/namespaces/here/deployments/a/scale")
            await request.answer({"message": "not now"}, code)
        await scaling
    said = [record.message for record in caplog.records if record.name == scale_down.log.name]
    assert re.match(r"trying for another (600|59\d) s: 503: not now", said[0])
    assert said[12:] == ["scaled down deployment a"]


async def test_a_ray_cluster_is_suspended_and_resumed(
    tmp_path: Path,
) -> None:
    """A cluster that is still suspended is refused, and not waited for."""
    cluster, path = workloads(["raycluster/job-actor"]), "/apis/ray.io/v1/namespaces/here/rayclusters/job-actor"
    async with api_server(tmp_path) as api:
        scaling = asyncio.create_task(scale_down.scale_down(cluster, api.cluster))
        request, change = await patched(api, path)
        assert change == {"spec": {"suspend": True}}
        await request.answer({})
        await scaling
        # KubeRay would replace all pods of one that never was suspended, if the field came to be there.
        for spec in ({"suspend": True}, {"suspend": False}, {}):
            scaling = asyncio.create_task(scale_down.scale_up(cluster, api.cluster, sets_replicas=False))
            await (await asked(api, path)).answer({"spec": spec})
            if spec.get("suspend"):
                request, change = await patched(api, path)
                assert change == {"spec": {"suspend": False}}
                await request.answer({})
            await scaling
            assert api.requests.empty()
        for is_suspended in (False, True):
            asking = asyncio.create_task(scale_down.refuse_scaled_down(cluster, api.cluster))
            await (await asked(api, path)).answer({"spec": {"suspend": is_suspended}})
            words = r"raycluster/job-actor in .* -n here patch raycluster/job-actor .*\"suspend\": false"
            with pytest.raises(InvalidConfig, match=words) if is_suspended else nullcontext():
                await asking


async def test_an_ended_run_leaves_no_pod_and_survives_a_refusal(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scale_down, "RETRY_S", 0.01)
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    async with api_server(tmp_path) as api, AsyncExitStack() as stack:
        in_pod(api, monkeypatch)
        addresses = {role: await stack.enter_async_context(served(role, job)) for role in job.roles}
        left = workloads(
            ["poddisruptionbudget/job-controller", "scaledobject/job-reward", "statefulset/job-actor"]
        )
        run = asyncio.create_task(controlled(job, addresses, scaled_down=left, scales_up=True))
        stack.push_async_callback(cancel_all, [run])
        request, change = await patched(api, SCALED_OBJECT)
        assert change["metadata"]["annotations"] == {PAUSED: None}  # an earlier run's end is taken back
        await request.answer({})
        await (await asked(api, "statefulsets/job-actor")).answer(of_values(1, now=0))
        request, change = await patched(api, "/apis/apps/v1/namespaces/here/statefulsets/job-actor/scale")
        assert change == {"spec": {"replicas": 1}}
        await request.answer({})

        request, change = await patched(api, SCALED_OBJECT)
        assert change["metadata"]["annotations"] == {PAUSED: "0"}
        assert (job.run_dir / "metrics.jsonl").exists()  # the run is over
        await request.answer({"message": "not now"}, 503)  # e.g. an admission webhook; the others come first
        request, change = await patched(api, "/apis/apps/v1/namespaces/here/statefulsets/job-actor/scale")
        assert change == {"spec": {"replicas": 0}}
        await request.answer({"message": "statefulsets is forbidden"}, 403)
        request = await api.next()
        budget = "/apis/policy/v1/namespaces/here/poddisruptionbudgets/job-controller"
        assert (request.method, request.path) == ("DELETE", budget)
        await request.answer({"message": "not found"}, 404)  # there are no budgets, which is no error
        request, _ = await patched(api, SCALED_OBJECT)
        await request.answer({})
        await run
    assert "job-controller" not in caplog.text
    assert "scale it by hand: kubectl -n here scale statefulset job-actor --replicas=0" in caplog.text


class NoPods:
    """The members of a role whose pods no node has room for."""

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield frozenset()
        await asyncio.Event().wait()


async def test_a_failed_run_keeps_its_pods_until_its_last_attempt(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller is started again and needs the roles. Starts that wait for nodes are not counted."""
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES, "trainer.ready_timeout_s=0.1")
    nobody: Addresses = {role: ["127.0.0.1:1"] for role in job.roles}
    no_node: Addresses = {role: NoPods() for role in job.roles}
    left = workloads(["deployment/job-reward"])
    limit: dict[str, Any] = {"max_attempts": 1, "attempts_of": "job/1"}
    begun: list[bool] = []
    async with api_server(tmp_path) as api, AsyncExitStack() as stack:
        in_pod(api, monkeypatch)
        for addresses in (no_node, no_node, nobody):
            with pytest.raises(RoleUnavailable):
                await controlled(
                    job,
                    addresses,
                    scaled_down=left,
                    **limit,
                    begun=lambda: begun.append((job.run_dir / FILE).exists()),
                )
        assert begun == [True] * 3  # from here on the run counts its starts itself
        assert api.requests.empty()

        async def the_last_one() -> None:
            with start_guard(tmp_path / "starts.json", 1, scaled_down=left) as begins:
                # Nothing asks whether the needed one has pods: how the run ended matters more.
                await controlled(job, nobody, scaled_down=left, needed=left, **limit, begun=begins)

        run = asyncio.create_task(the_last_one())
        stack.push_async_callback(cancel_all, [run])
        request, change = await patched(api, "/apis/apps/v1/namespaces/here/deployments/job-reward/scale")
        assert change == {"spec": {"replicas": 0}}
        assert (job.run_dir / FILE).exists()  # if it is killed now, the next start does the same
        await request.answer({})
        with pytest.raises(NoProgress, match=r"started 1 times .* at 127\.0\.0\.1:1") as ended:
            await run
        assert ended.value.exit_code == 3  # no start that may be made again
        assert api.requests.empty()
        assert json.loads((tmp_path / "starts.json").read_text())["starts"] == 0
        assert json.loads((job.run_dir / FILE).read_text())["starts"] == 1  # or now


async def test_wrong_configuration_leaves_no_pod_either(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody will try again: the controller's Job has failed for good."""
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES, "data.val_files=absent.parquet")
    async with api_server(tmp_path) as api, AsyncExitStack() as stack:
        in_pod(api, monkeypatch)
        run = asyncio.create_task(controlled(job, {}, scaled_down=workloads(["deployment/a"])))
        stack.push_async_callback(cancel_all, [run])
        request, change = await patched(api, "/apis/apps/v1/namespaces/here/deployments/a/scale")
        assert change == {"spec": {"replicas": 0}}
        await request.answer({})
        with pytest.raises(InvalidData, match=r"absent\.parquet"):
            await run


async def test_a_signal_while_the_run_takes_over_counts_no_attempt(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES, "data.val_files=absent.parquet")
    files = [tmp_path / "starts.json", job.run_dir / FILE]
    found: list[list[int]] = []

    def note(number: int, frame: FrameType | None) -> None:
        found.append([json.loads(file.read_text())["starts"] for file in files if file.exists()])

    async def start(*, is_taken: bool) -> None:
        with start_guard(files[0], 1) as begins:

            def begun() -> None:
                if is_taken:
                    begins()
                signal.raise_signal(signal.SIGTERM)
                begins()

            await controlled(job, {}, max_attempts=1, begun=begun)

    default = signal.signal(signal.SIGTERM, note)
    try:
        for is_taken in (False, True):
            with pytest.raises(InvalidData):
                await start(is_taken=is_taken)
            assert signal.getsignal(signal.SIGTERM) is note
    finally:
        signal.signal(signal.SIGTERM, default)
    assert found == [[0, 0], [0, 0]]


async def test_a_run_directory_is_one_runs(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    nobody = {role: ["127.0.0.1:1"] for role in job.roles}
    begun: list[str] = []
    with held(job.run_dir), pytest.raises(RolemeshError, match=r"run is the directory of a running run"):
        await controlled(job, nobody, begun=lambda: begun.append("locked"))
    assert begun == ["locked"]  # to wait for another run is no start that failed before it had begun
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="file cannot be written: File exists"):
        await controlled(
            small_job(tmp_path, tiny_model, "file", *OVERRIDES), nobody, begun=lambda: begun.append("file")
        )
    assert begun == ["locked"]


async def test_roles_that_have_been_scaled_down_are_not_waited_for(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    needed = workloads(["deployment/job-reward", "statefulset/job-actor"])
    async with api_server(tmp_path) as api, AsyncExitStack() as stack:
        in_pod(api, monkeypatch)
        run = asyncio.create_task(controlled(job, {}, needed=needed))
        stack.push_async_callback(cancel_all, [run])
        for replicas in (2, 0):
            request = await api.next()
            assert request.method == "GET"
            await request.answer({"spec": {"replicas": replicas}})
        assert request.path == "/apis/apps/v1/namespaces/here/statefulsets/job-actor/scale"
        with pytest.raises(InvalidConfig) as refused:
            await run
    assert "scaled to zero, as after a run: statefulset/job-actor in namespace here" in str(refused.value)
    assert str(refused.value).endswith("kubectl -n here scale --replicas=1 statefulset/job-actor")


async def test_outside_of_a_pod_nothing_can_be_scaled_down(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    with pytest.raises(InvalidConfig, match="not in a pod"):
        await controlled(job, {}, scaled_down=workloads(["deployment/job-reward"]))


async def test_a_controller_killed_before_scaling_down_does_it_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start finds the run at its end, and needs no role to scale down."""
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES, "trainer.save_freq=1")
    await train(job)
    nobody = {role: ["127.0.0.1:1"] for role in job.roles}
    async with api_server(tmp_path) as api, AsyncExitStack() as stack:
        in_pod(api, monkeypatch)
        left = workloads(["statefulset/job-actor"])
        run = asyncio.create_task(controlled(job, nobody, scaled_down=left, scales_up=True))
        stack.push_async_callback(cancel_all, [run])
        request, change = await patched(api, "/apis/apps/v1/namespaces/here/statefulsets/job-actor/scale")
        assert change == {"spec": {"replicas": 0}}
        await request.answer({})
        await run
