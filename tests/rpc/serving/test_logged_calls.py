"""What a real role's process logs of calls whose metadata and content are a stranger's."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import reward_batch, reward_job, serve_process

from rolemesh.errors import NotPermitted, RewardFailed
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import RewardClient
from rolemesh.telemetry import context

# What a log shows of its last four characters: of an error's text, and of a name that a message quotes.
ESCAPED, QUOTED = r"\u001b[31m\u009b\u202e\u2028", r"\x1b[31m\x9b\u202e\u2028"
FORGED = "x\n12:00:00 ERROR actor: forged\r\x1b[31m\x9b\u202e\u2028"
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    raise ValueError(extra_info["say"])
"""


async def test_a_strangers_text_never_begins_a_line_of_the_log(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    (tmp_path / "gated.py").write_text(FUNCTION)
    custom = job.reward.custom_reward_function.model_copy(update={"reward_kwargs": {}})
    job = job.model_copy(update={"reward": job.reward.model_copy(update={"custom_reward_function": custom})})
    batch = reward_batch(1)
    batch["extra_info"] = [{"say": FORGED}]
    async with (
        serve_process("reward", job, tmp_path) as served,
        RewardClient([served.address], methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        with pytest.raises(RewardFailed, match="forged"):
            await client.compute_scores(batch)
        token = context.job.set(FORGED)
        try:
            with pytest.raises(NotPermitted, match="forged"):
                await client.compute_scores(batch)
        finally:
            context.job.reset(token)
        served.process.terminate()
        assert served.process.stderr is not None
        log = (await served.process.stderr.read()).decode()
    lines = log.split("\n")[:-1]
    assert [line for line in lines if not line.isprintable()] == []
    assert lines == log.splitlines()
    assert any(line.startswith("  ValueError: x") for line in lines)  # of the judge, which has no logger
    forged = [line for line in lines if "forged" in line and line[0] != " "]
    text, job_name = (r"x\n12:00:00 ERROR actor: forged\r" + rest for rest in (ESCAPED, QUOTED))
    # A call that is refused before the role has read the whole request may be sent and refused once more.
    assert [text in forged[0], *(job_name in line for line in forged[1:])] == [True] * len(forged)
    assert len(forged) > 1
