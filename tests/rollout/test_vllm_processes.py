"""The processes of the engine vllm on a CPU: those of two ranks are one engine; all end with their owner."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM
from vllm_rollouts import (
    PLAIN,
    assert_log_probs_agree,
    generated,
    installed,
    job_of,
    model_with_ends,
    prompts_of,
    weights_of,
    with_weights,
)

from rolemesh.errors import RoleUnavailable
from rolemesh.services.rollout.engines import load_engine
from rolemesh.services.rollout.engines.vllm import engine_args

pytestmark = pytest.mark.timeout(900)  # three processes import vLLM, on cores that other tests use too


@pytest.fixture(scope="module", autouse=True)
def _questions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_args, "EXTENSION", "asked_vllm.AskedExtension")
        patch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other spin, on cores that others use
        yield


@installed
async def test_two_ranks_are_one_engine_whose_death_is_reported(tmp_path: Path):
    directory = model_with_ends(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompts = prompts_of(12)
    job = job_of(directory, tensor_model_parallel_size=2, max_num_batched_tokens=16, max_num_seqs=16)
    engine = load_engine(job, None)
    try:
        assert_log_probs_agree(model, prompts, await generated(engine, prompts, PLAIN), PLAIN)
        weights = weights_of(model, 1)
        await engine.load_weights(1, weights)
        assert await engine.sleep() == await engine.wake()
        with_weights(model, weights)
        assert_log_probs_agree(model, prompts, await generated(engine, prompts, PLAIN), PLAIN)

        workers = await engine._on_all_ranks("process_id")
        assert len(workers) == 2
        rows = asyncio.create_task(generated(engine, prompts_of(400), PLAIN))
        update = asyncio.create_task(engine.load_weights(2, weights))
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        for lost in (rows, update):
            with pytest.raises(RoleUnavailable, match="has ended"):
                await lost
        with pytest.raises(RoleUnavailable):
            await generated(engine, prompts, PLAIN)
    finally:
        engine.close()


@installed
def test_its_processes_end_with_the_one_that_started_them(tmp_path: Path):
    """Also when that is killed while the first of them has only begun."""
    model_directory = model_with_ends(tmp_path, "qwen2")
    program = f"""
        from pathlib import Path
        from vllm_rollouts import job_of
        from rolemesh.services.rollout.engines import load_engine
        load_engine(job_of(Path({str(model_directory)!r})), None)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "support" / "engines"), str(Path(__file__).parents[2])]
    )
    owner = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    children: list[psutil.Process] = []
    while len(children) < 2:  # multiprocessing's tracker of resources, and the engine
        assert owner.poll() is None
        time.sleep(0.01)  # a look takes CPU that the start needs
        children = psutil.Process(owner.pid).children(recursive=True)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
