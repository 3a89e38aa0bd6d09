"""Runs with conversations: every page trains on them, and the same bits come out twice, also after a resume."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from echoing import TALKS
from in_process import recorded, small_job, train, workers

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config import load_job
from rolemesh.config.model import ModelConfig
from rolemesh.data.dataset import Agents, PromptDataset
from rolemesh.data.parquet import write_rows
from rolemesh.errors import InvalidConfig, RoleFailed
from rolemesh.forwarding import Forwarding
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Environment
from rolemesh.services.controller.conversations.conversation_rollout import ConversationRollout
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.token_mask import token_mask

PAGES = {
    "ppo": ("trainer.test_freq=1",),
    "grpo": ("algorithm.adv_estimator=grpo",),
    "grpo_by_turn": ("algorithm.adv_estimator=grpo_by_turn",),
    "remax": ("algorithm.adv_estimator=remax", "rollout.mode=async"),
    "condensed": ("rollout.agent.default_agent_loop=condenser", "data.max_response_length=200"),
    "dapo": ("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true", "trainer.save_freq=1"),
}
# The others make rows as ppo does, whose bits test_agents_over_grpc.py compares.
TWICE = ("condensed", "dapo")


@pytest.mark.parametrize("page", PAGES)
async def test_a_page_trains_on_conversations(page: str, tmp_path: Path, talkative_model: Path) -> None:
    """Pages that make rows in their own way do so twice, with the same bits."""
    runs = []
    for run in ("first", "second") if page in TWICE else ("first",):
        dumps = tmp_path / run / "dumps"
        job = small_job(
            tmp_path, talkative_model, run, *TALKS, *PAGES[page],
            "trainer.total_training_steps=2", f"trainer.rollout_data_dir={dumps}",
        )  # fmt: skip
        summary = await train(job)
        runs.append(recorded(job))
    assert runs == runs[:1] * len(runs)
    for row in map(json.loads, (dumps / "2.jsonl").read_text().splitlines()):
        facts = row["conversation"]
        speakers = [said["who"] for said in facts["said"]]
        other = "prompt" if page == "condensed" else "environment"
        assert speakers == (["policy", other] * int(facts["turns"]))[:-1]
        assert sum(said["reward"] for said in facts["said"][::2]) >= 1
        assert all("<|im_start|>user" in said["text"] for said in facts["said"][1::2])
    last = summary.records[-1]
    assert last["conversation/turns/mean"] > 1
    assert last["conversation/tokens/mean"] > last["response_length/mean"]


class Ending(Forwarding[Environment]):
    """Fails for good after some turns, as a controller that is killed does."""

    def __init__(self, environment: Environment, turns: int) -> None:
        super().__init__(environment)
        self._turns_left = turns

    async def act(self, request: Any) -> Any:
        self._turns_left -= 1
        if self._turns_left < 0:
            raise RoleFailed("killed")
        return await self._role.act(request)


async def test_a_run_killed_in_a_conversation_ends_as_an_unbroken_one(
    tmp_path: Path, talkative_model: Path
) -> None:
    overrides = (*TALKS, "trainer.save_freq=1", "trainer.total_training_steps=3")
    jobs = [small_job(tmp_path, talkative_model, run, *overrides) for run in ("whole", "broken")]
    await train(jobs[0])
    with workers(jobs[1]) as roles:
        ending = replace(roles, environment=Ending(roles.environment, 25))
        with pytest.raises(RoleFailed, match="killed"):
            await Run(jobs[1], load_tokenizer(jobs[1].actor.model)).train(ending)
    assert 1 <= len(recorded(jobs[1])) < 4
    await train(jobs[1])
    assert recorded(jobs[0]) == recorded(jobs[1])
    assert Run(jobs[1], load_tokenizer(jobs[1].actor.model)).finished()  # before it knows the agents' tools
    ends = [(job.run_dir / "global_step_3" / "actor" / "model.safetensors").read_bytes() for job in jobs]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("agent", "warned"), [("single_turn_agent", True), ("echo", False)])
def test_a_job_whose_rows_all_have_one_turn_is_told_so_at_start(
    tmp_path: Path, talkative_model: Path, caplog: pytest.LogCaptureFixture, agent: str, warned: bool
) -> None:
    tools = ("rollout.multi_turn.tools=[calculator]", f"rollout.agent.default_agent_loop={agent}")
    job = small_job(tmp_path, talkative_model, "talk", *TALKS, *tools)
    Run(job, load_tokenizer(job.actor.model))
    assert ("the agent of every row is single_turn_agent, so no row has" in caplog.text) == warned


async def test_advantages_of_unsampled_tokens_change_no_gradient(tmp_path: Path, talkative_model: Path) -> None:
    job = small_job(tmp_path, talkative_model, "talk", *TALKS)
    tokenizer = load_tokenizer(job.actor.model)
    data = PromptDataset(job.data.train_files, job.data, tokenizer, agents=Agents("echo"))
    rows = fan_out(data.batch(range(8)), 3, job.rollout.seed, 1)
    outcomes = []
    with workers(job) as roles:
        talking = ConversationRollout(roles.rollout, roles.environment, job, tokenizer)

        async def with_log_probs(finished):  # type: ignore[no-untyped-def]
            return finished.union(await roles.actor.compute_log_probs(finished))

        batch = await collect(talking.generate(rows), rows, with_log_probs)
    added = token_mask(batch) & ~batch["response_mask"]
    assert added.any()
    advantages = torch.randn(added.shape, generator=torch.Generator().manual_seed(0))
    for there in (advantages, torch.where(added, 1e3, advantages)):
        batch["advantages"] = there
        with workers(job) as roles:
            metrics = await roles.actor.update(batch)
            weights = await (await roles.actor.publish_weights(1)).fetch()
        outcomes.append((metrics, {name: tensor.clone() for name, tensor in weights.items()}))
    (outcome, weights), (outcome_again, weights_again) = outcomes
    assert outcome == outcome_again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


DESCRIBED = """
from rolemesh.plugins import agent
from rolemesh.agents.environment import Observation, Outcome

@agent("measurer", meaning="has a tool, and ends after a turn")
class Measurer:
    tools = [{"type": "function", "function": {"name": "measure", "parameters": {}}}]
    def __init__(self, job): pass
    def open(self, episode): return Talk()

class Talk:
    async def begin(self): return []
    async def act(self, turn): return Observation(done=True, why="measured")
    async def close(self): return Outcome(reward=0.0)
"""


async def test_epochs_count_the_prompts_that_fit_with_their_tools(
    tmp_path: Path, talkative_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten prompts, of which six leave room for a tool's name: two epochs are 3 steps of four, and not 5."""
    model = shutil.copytree(talkative_model, tmp_path / "model")
    tokenizer = load_tokenizer(ModelConfig(path=str(model)))
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + str(
        tokenizer.chat_template
    )
    tokenizer.save_pretrained(model)
    chats = [[{"role": "user", "content": "1+1=" if i < 6 else "what is 1 + 1 ="}] for i in range(10)]
    longest = tokenizer.apply_chat_template(chats[-1], add_generation_prompt=True, return_dict=False)
    rows = [
        {"prompt": chat, "data_source": "digits", "reward_model": {"style": "rule", "ground_truth": "2"}}
        for chat in chats
    ]
    (tmp_path / "measurer.py").write_text(DESCRIBED)
    job = small_job(
        tmp_path, model, "run", *TALKS, f"plugins=[{tmp_path / 'measurer.py'}]",
        "rollout.agent.default_agent_loop=measurer", "data.val_files=[]", "data.filter_overlong_prompts=true",
        f"data.train_files={write_rows(tmp_path / 'own.parquet', rows)}",
        f"data.max_prompt_length={len(longest)}",
        "trainer.total_training_steps=null", "trainer.total_epochs=2", "trainer.save_freq=2",
        "actor.optim.lr_scheduler_type=linear",
    )  # fmt: skip
    assert Run(job, load_tokenizer(job.actor.model)).status.total_steps == 5
    summary = await train(job)
    assert (summary.step, summary.total_steps) == (3, 3)
    rates = [record["actor/lr"] for record in summary.records if "actor/lr" in record]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    assert load_job(job.run_dir / "config.yaml").trainer.total_training_steps == 3
    again = Run(job, load_tokenizer(job.actor.model))
    finished = again.finished()  # by the number of prompts that the checkpoint has: no role need start for it
    assert finished is not None
    assert (finished.step, finished.total_steps) == (3, 3)
    assert (
        "had 6 prompts that are short enough with their tools, and data.train_files now has 10" in caplog.text
    )
    longer = job.model_copy(update={"trainer": job.trainer.model_copy(update={"total_training_steps": 6})})
    with pytest.raises(
        InvalidConfig, match=r"total_training_steps is 6 now and was 3.*follows from trainer\.total_epochs"
    ):
        Run(longer, load_tokenizer(job.actor.model)).finished()
    forget(str(tmp_path / "measurer.py"))
