"""PF-PPO on the page: actor and critic are trained on the rows that are drawn, and the record is of all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from in_process import small_job, workers

from rolemesh.algos.kl import KLController
from rolemesh.data import PromptDataset
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Actor, Critic, Metrics
from rolemesh.services.controller.pages.ppo import ppo_step
from rolemesh.services.controller.pages.step import Step


@dataclass
class Seen:
    """A trained role that keeps what it is trained on."""

    role: Actor | Critic
    batches: list[DataProto] = field(default_factory=list)

    async def update(self, batch: DataProto) -> Metrics:
        self.batches.append(batch)
        return await self.role.update(batch)

    def __getattr__(self, name: str) -> object:
        return getattr(self.role, name)


async def test_actor_and_critic_learn_from_the_rows_drawn(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(
        tmp_path, tiny_model, "run", "rollout.n=4",
        "algorithm.use_pf_ppo=true", "algorithm.pf_ppo.reweight_method=max_min",
    )  # fmt: skip
    prompts = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model)).batch(range(4))
    step = Step(1, job, KLController(job.algorithm.kl_ctrl))
    with workers(job) as roles:
        actor, critic = Seen(roles.actor), Seen(roles.critic)
        metrics = await ppo_step(prompts, replace(roles, actor=actor, critic=critic), step)  # type: ignore[arg-type]
    assert step.batch is not None
    assert actor.batches == critic.batches
    [drawn] = actor.batches
    scores = step.batch["token_level_scores"].sum(dim=1)
    between = (scores > scores.min()) & (scores < scores.max())
    assert len(drawn) == len(step.batch) == 16
    assert between.any()
    assert set(drawn["token_level_scores"].sum(dim=1).tolist()) <= {scores.min().item(), scores.max().item()}
    # a row drawn is one of the batch, with the advantages that it had among all
    rows = torch.cat([drawn["responses"].double(), drawn["advantages"].double()], dim=1)
    among = torch.cat([step.batch["responses"].double(), step.batch["advantages"].double()], dim=1)
    assert all((row == among).all(dim=1).any() for row in rows)
    assert 0 < metrics["actor/share_of_rows_drawn"] < 1
    assert metrics["critic/score/mean"] == scores.mean().item()
