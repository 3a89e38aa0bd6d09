"""The pages by the name that a job gives them, and a page's step graph."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rolemesh.algos.estimators import ESTIMATORS
from rolemesh.algos.kl import KLController
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.graph import StepGraph, record
from rolemesh.roles import Roles
from rolemesh.services.controller.pages.dapo import dapo_step
from rolemesh.services.controller.pages.grpo import grpo_step
from rolemesh.services.controller.pages.ppo import ppo_step
from rolemesh.services.controller.pages.remax import remax_step
from rolemesh.services.controller.pages.step import Page, Step
from rolemesh.services.controller.stages.bypass import bypassing
from rolemesh.services.controller.stages.dynamic_sampling import DynamicSampling

PAGES: Mapping[str, Page] = dict.fromkeys(ESTIMATORS, grpo_step) | {"gae": ppo_step, "remax": remax_step}


def page_of(job: JobConfig) -> Page:
    """The page that `algorithm.adv_estimator` names, or that of dynamic sampling."""
    return dapo_step if job.algorithm.filter_groups.enable else PAGES[job.algorithm.adv_estimator]


async def check_step(job: JobConfig) -> StepGraph:
    """Runs the job's page on a few empty rows with roles that only record.

    Raises:
        InvalidBatch: a method reads a column that nothing wrote before it.
    """
    page = page_of(job)

    async def recorded(prompts: DataProto, roles: Roles) -> None:
        sampling = DynamicSampling(len(prompts), lambda number: prompts)
        await page(prompts, bypassing(roles, job), Step(1, job, KLController(job.algorithm.kl_ctrl), sampling))

    return await record(recorded, job, f"{page.__module__.rpartition('.')[2]}.py, one step")


def record_step(job: JobConfig) -> StepGraph:
    """`check_step` where no event loop runs."""
    return asyncio.run(check_step(job))
