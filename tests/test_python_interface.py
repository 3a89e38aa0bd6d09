"""What `import rolemesh` offers."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from in_process import recorded, small_job, train

import rolemesh
from rolemesh.algos.kl import KLController
from rolemesh.data import PromptDataset
from rolemesh.importing import imported
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.pages.choice import page_of
from rolemesh.services.controller.pages.step import Step
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.numerics import device_prepared
from tests.support.jobs.observed import served

SMALL = ("trainer.total_training_steps=1", "algorithm.use_kl_in_reward=false", "algorithm.adv_estimator=grpo")


def test_every_public_name_is_there_typed_and_documented() -> None:
    assert rolemesh.__all__ == sorted(rolemesh.__all__)
    assert set(rolemesh.__all__) <= set(dir(rolemesh))
    for name in rolemesh.__all__:
        thing = getattr(rolemesh, name)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            hints = inspect.signature(thing)
            assert hints.return_annotation is not inspect.Signature.empty, name
            assert all(p.annotation is not p.empty for p in hints.parameters.values()), name
    with pytest.raises(AttributeError, match="module 'rolemesh' has no attribute 'trian'"):
        _ = rolemesh.trian  # type: ignore[attr-defined]


def test_importing_it_loads_no_library() -> None:
    """Nor does what comes before a run in its pod, which has to count a start that its imports would kill."""
    source = (
        "import rolemesh, sys; print({'torch', 'pydantic', 'grpc', 'numpy', 'yaml'} & set(sys.modules)); "
        "from rolemesh.services.controller import preparing, start_guard; "
        "print({'torch', 'grpc', 'numpy'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["set()", "set()"]


def test_opening_roles_works_under_tf32_and_restores_it(tiny_model: Path, tmp_path: Path) -> None:
    """torch refuses to read an older setting that the newer ones contradict, here that of matrix products."""
    job, own = small_job(tmp_path, tiny_model, "run"), cast(Any, torch.backends)
    parts = [own.cuda.matmul, own.mkldnn.matmul, own.cudnn.conv, own.cudnn.rnn]
    given, before = own.fp32_precision, [part.fp32_precision for part in parts]
    exact, allows = torch.get_float32_matmul_precision(), own.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        own.cudnn.allow_tf32 = True
        own.fp32_precision = "tf32"
        for part in parts:  # an earlier test may have set them
            part.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        with device_prepared(job.roles, job):
            assert [part.fp32_precision for part in parts] == ["ieee"] * 4
            assert not own.cudnn.allow_tf32
        assert [part.fp32_precision for part in parts] == ["tf32"] * 4
        assert own.cudnn.allow_tf32
    finally:
        own.fp32_precision = given
        torch.set_float32_matmul_precision(exact)
        own.cudnn.allow_tf32 = allows
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision
    assert (torch.get_float32_matmul_precision(), own.cudnn.allow_tf32) == (exact, allows)


async def test_local_and_remote_roles_make_the_same_step(tiny_model: Path, tmp_path: Path) -> None:
    """In this process in a fixed order meanwhile, as the job asks for."""
    job = small_job(tmp_path, tiny_model, "run", *SMALL, "trainer.deterministic=true")
    prompts = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model)).batch(range(4))
    found = []
    async with rolemesh.open_roles(job) as roles:
        assert torch.are_deterministic_algorithms_enabled()
        await roles.sync_weights(0)
        found.append(await page_of(job)(prompts, roles, Step(1, job, KLController(job.algorithm.kl_ctrl))))
    assert not torch.are_deterministic_algorithms_enabled()
    async with (
        served("actor", job) as actor,
        served("rollout", job) as rollout,
        served("reward", job) as reward,
        rolemesh.connect_roles(job, {"actor": actor, "rollout": rollout, "reward": reward}) as roles,
    ):
        await roles.sync_weights(0)
        found.append(await page_of(job)(prompts, roles, Step(1, job, KLController(job.algorithm.kl_ctrl))))
    assert found[0] == found[1]
    assert found[0]["actor/grad_norm"] > 0


async def test_loaded_roles_are_closed_when_a_later_role_fails_to_load(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    close = LocalWorker.close

    def noted(worker: LocalWorker) -> None:
        closed.append(worker.role)
        close(worker)

    monkeypatch.setattr(LocalWorker, "close", noted)
    broken = ("actor.use_kl_loss=true", f"reference.model.path={tmp_path / 'absent'}")
    job = small_job(tmp_path, tiny_model, "run", *SMALL, *broken)
    with pytest.raises(rolemesh.RolemeshError, match="absent"):
        async with rolemesh.open_roles(job):
            raise AssertionError("the reference is absent")
    assert closed
    assert set(closed) == {*job.roles[: job.roles.index("reference")]}


async def test_a_role_without_an_address_is_named(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *SMALL)
    with pytest.raises(rolemesh.InvalidConfig, match=r"no address was given for \['rollout', 'reward'\]"):
        async with rolemesh.connect_roles(job, {"actor": ["127.0.0.1:1"]}):
            pass


async def test_where_an_event_loop_runs_the_awaitable_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(rolemesh.RolemeshError, match=r"await rolemesh\.run_async"):
        rolemesh.run(small_job(tmp_path, tiny_model, "run", *SMALL))
    assert rolemesh.step_graph(small_job(tmp_path, tiny_model, "run", *SMALL)).nodes  # which needs a loop, too


async def test_metrics_and_curves_are_read_from_a_run_directory(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *SMALL)
    with pytest.raises(FileNotFoundError, match=r"no metrics of a run: .*run/metrics\.jsonl"):
        rolemesh.read_metrics(job.run_dir)
    await train(job)
    assert [record["training/global_step"] for record in rolemesh.read_metrics(str(job.run_dir))] == [
        record["training/global_step"] for record in recorded(job)
    ]
    rolemesh.draw_curves(job.run_dir, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_garbage_collection_resumes_after_any_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed import re-enables it, too."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imports_much.py").write_text("import gc\ncollects = gc.isenabled()\n")
    (tmp_path / "fails_to_import.py").write_text("import absent_for_certain\n")
    assert not imported("imports_much").collects
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError, match="absent_for_certain"):
        imported("fails_to_import")
    assert gc.isenabled()


def test_a_plan_is_the_command_lines(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *SMALL)
    plans = rolemesh.plan(job, gpus=8)
    assert plans[0].fits
    assert {plan.name for plan in plans} >= {"standalone", "hybrid", "collocate"}
    with pytest.raises(rolemesh.InvalidConfig, match="abacus is unknown"):
        rolemesh.plan(job, gpus=8, gpu="abacus")
