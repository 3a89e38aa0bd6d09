"""Selects a job's page, and records its step graph."""

from __future__ import annotations

import asyncio

from rolemesh.algos.kl import KLController
from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from rolemesh.graph import StepGraph, record
from rolemesh.roles import Metrics, Roles
from rolemesh.services.controller.conversations.conversation_rollout import recorded as recorded_conversations
from rolemesh.services.controller.pages.step import Page, Step
from rolemesh.services.controller.stages.advantage_estimation import REWARD_KL
from rolemesh.services.controller.stages.bypass import bypassing
from rolemesh.services.controller.stages.dynamic_sampling import DynamicSampling


def page_of(job: JobConfig) -> Page:
    """Return the job's page (JobConfig.page), with its options bound."""
    code = job.page.load()
    options = job.page_options

    async def page(prompts: DataProto, roles: Roles, step: Step) -> Metrics:
        with job.page.errors_named():
            metrics: Metrics = await code(prompts, roles, step, **options)
            return metrics

    return page


async def check_step(job: JobConfig) -> StepGraph:
    """Run the job's page on a few empty rows, with roles that only record, and return the step graph.

    Raises:
        InvalidBatch: a method reads a column that nothing wrote before it.
        InvalidConfig: the page does not end as a page must, weighs no KL although the job says so, or leaves
            the rollouts with older weights than the actor's.
    """
    page = page_of(job)

    async def recorded(prompts: DataProto, roles: Roles) -> None:
        sampling = DynamicSampling(len(prompts), lambda number: prompts)
        step = Step(1, job, KLController(job.algorithm.kl_ctrl), sampling)
        metrics = await page(prompts, bypassing(recorded_conversations(roles, job), job), step)
        if step.batch is None or not isinstance(metrics, dict) or "perf/total_num_tokens" not in metrics:
            raise InvalidConfig(
                f"{job.page} should end with `return step.report(batch, ...)`, whose metrics the loop logs"
            )
        if job.algorithm.use_kl_in_reward and REWARD_KL not in metrics:
            own = "call apply_kl_penalty, and give its metrics to step.report; or "
            raise InvalidConfig(
                f"algorithm.use_kl_in_reward is true, but {job.page} does not report the KL: "
                f"{'' if job.page.origin == BUILT_IN else own}set use_kl_in_reward to false"
            )

    title = f"{job.page.name}.py" if job.page.origin == BUILT_IN else str(job.page)
    return await record(recorded, job, f"{title}, one step")


def record_step(job: JobConfig) -> StepGraph:
    """Run `check_step` without an event loop."""
    return asyncio.run(check_step(job))
