"""A run whose every connection is mutual TLS is the same run, also when its keys change in the midst."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from certificates import Authority, swap
from in_process import recorded, small_job, train
from launched import gated, rolemesh, written
from serving import gate, serve_process, served_group

from rolemesh.models.loading import load_tokenizer
from rolemesh.rpc import tls
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run

LOCAL = "127.0.0.1:0"


async def test_mutual_tls_with_changing_keys_equals_in_process_bits(tiny_model: Path, tmp_path: Path) -> None:
    """Each group of roles and the controller have a certificate of their own."""
    overrides = ("trainer.save_freq=4", "trainer.test_freq=2")
    job = small_job(tmp_path, tiny_model, "secure", *overrides, "placement.replicas.rollout=2")
    authority, processes = Authority(), {**job.plan.grouping, "controller": ("controller",)}

    def renew() -> None:
        for process, roles in processes.items():
            swap(tmp_path / process, authority.keys("my-job", *roles))

    renew()
    async with AsyncExitStack() as stack:
        addresses: dict[str, list[str]] = {role: [] for role in job.roles}
        for group, roles in job.plan.grouping.items():
            tls.use_keys(tmp_path / group, *roles)
            for _ in range(job.plan[group].replicas):
                address = await stack.enter_async_context(served_group(roles, job))
                for role in roles:
                    addresses[role].append(address)
        tls.use_keys(tmp_path / "controller", "controller")
        run = Run(job, load_tokenizer(job.actor.model))
        training = asyncio.create_task(drive(run, addresses, LOCAL, None))
        async for _ in run.status.watch():  # before the first step and after each
            renew()
        await training
    tls.use_keys(None)
    (tmp_path / "plain").mkdir()
    plain = small_job(tmp_path / "plain", tiny_model, "plain", *overrides)
    await train(plain)
    assert recorded(job) == recorded(plain)
    weights = [j.run_dir / "global_step_4" / "actor" / "model.safetensors" for j in (job, plain)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


async def test_processes_with_keys_train_and_tell_whoever_shows_keys(tiny_model: Path, tmp_path: Path) -> None:
    """`serve`, `control` and `status` as a cluster starts them, with all roles in one process."""
    authority = Authority()
    with gate(tmp_path / "started") as started, gate(tmp_path / "go_on") as go_on:
        one_step = ("trainer.total_training_steps=1", "trainer.val_before_train=false")
        plain = small_job(tmp_path, tiny_model, "run", "placement.strategy=collocate", *one_step)
        job = gated(plain, tmp_path, started.path, go_on.path)
        secure = {
            process: f"--tls-dir={swap(tmp_path / process, authority.keys('my-job', *roles))}"
            for process, roles in {
                "roles": job.roles,
                "controller": ["controller"],
                "operator": ["operator"],
            }.items()
        }
        async with (
            serve_process(",".join(job.roles), job, tmp_path, secure["roles"]) as roles,
            rolemesh(
                *("control", "--config", written(job, tmp_path), secure["controller"], "--listen=127.0.0.1:0"),
                *(f"--{role}={roles.address}" for role in job.roles),
            ) as controller,
        ):
            await started.passed(controller.ended())  # step 1 runs
            async with rolemesh("status", str(job.run_dir), secure["operator"]) as asked:
                code, output = await asked.end()
                assert code == 0, output
                assert f"actor      {roles.address}  ready" in output
            async with rolemesh("status", str(job.run_dir)) as asked:
                code, output = await asked.end()
                assert code == 1
                assert (
                    "hangs up on a plain connection: if it has keys, give this process --tls-dir too" in output
                )
            go_on.open()
            code, output = await controller.end()
            assert code == 0, output
