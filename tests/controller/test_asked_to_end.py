"""A controller that is asked to end leaves the roles to the next one, though its run ends in the same step."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from api_server import api_server
from in_process import small_job
from serving import served
from test_scale_down import LOCAL, OVERRIDES, in_pod, patched

from rolemesh.config import JobConfig
from rolemesh.rpc.calling.dispatch import cancel_all
from rolemesh.services.controller.main import control
from rolemesh.services.controller.scale_down import workloads
from rolemesh.services.controller.service.controller_server import serving
from rolemesh.services.controller.service.status import RunStatus

LEFT = workloads(["deployment/job-reward"])
SCALE = "/apis/apps/v1/namespaces/here/deployments/job-reward/scale"
VOTE = "val-core/numbers/acc/maj@2/mean"
SAMPLED = ("rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=1", "rollout.val_kwargs.n=2")
# Its first call says that it has begun, and waits until it may go on.
REWARD = """
from pathlib import Path

here = Path({here!r})

def compute_score(**row):
    if not (here / "called").exists():
        (here / "called").touch()
        (here / "begun").write_text("now")
        (here / "go").read_text()
    return 0.0
"""


async def controlled(job: JobConfig, addresses: dict[str, list[str]]) -> None:
    async with serving(RunStatus("run"), job.roles, LOCAL) as server:
        await control(job, addresses, server, scaled_down=LEFT)


@pytest.mark.parametrize(
    ("overrides", "is_complete"),
    [
        (["trainer.save_freq=1", "trainer.val_before_train=false"], True),
        # The reward reports no answer to vote on, which the first validation finds out.
        (["trainer.test_freq=1", f"trainer.save_best={VOTE}", *SAMPLED], False),
    ],
    ids=["the last step", "a wrong setting"],
)
async def test_a_controller_that_is_asked_to_end_scales_nothing_down(
    overrides: list[str],
    is_complete: bool,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An upgrade has replaced it, perhaps by one that makes more steps. The next start scales down."""
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES, *overrides)
    (tmp_path / "reward.py").write_text(REWARD.format(here=str(tmp_path)))
    for fifo in ("begun", "go"):
        os.mkfifo(tmp_path / fifo)

    async def ask() -> None:
        await asyncio.to_thread((tmp_path / "begun").read_text)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.to_thread((tmp_path / "go").write_text, "on")

    async with api_server(tmp_path) as api, AsyncExitStack() as stack:
        in_pod(api, monkeypatch)
        addresses = {role: await stack.enter_async_context(served(role, job)) for role in job.roles}
        asking = asyncio.create_task(ask())
        unexpected = asyncio.create_task(api.next())
        ending = asyncio.create_task(_ended(job, addresses))
        stack.push_async_callback(cancel_all, [asking, unexpected, ending])
        await asyncio.wait({ending, unexpected}, return_when=asyncio.FIRST_COMPLETED)
        assert not unexpected.done()
        assert await ending == 128 + signal.SIGTERM
        unexpected.cancel()
        assert ("trainer.save_best is" in caplog.text) is not is_complete
        if is_complete:
            again = asyncio.create_task(controlled(job, {}))
            stack.push_async_callback(cancel_all, [again])
            request, change = await patched(api, SCALE)
            assert change == {"spec": {"replicas": 0}}
            await request.answer({})
            await again


async def _ended(job: JobConfig, addresses: dict[str, list[str]]) -> object:
    """The exit code. As an exception of its own task it would end the loop."""
    with pytest.raises(SystemExit) as ended:
        await controlled(job, addresses)
    return ended.value.code
