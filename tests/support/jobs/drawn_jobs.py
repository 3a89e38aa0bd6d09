"""Jobs drawn at random from every page, estimator, recipe, placement and option that decides a deployment."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config.base import merge
from rolemesh.config.job import JobConfig, make_job
from rolemesh.config.placement import strategies
from rolemesh.config.yaml_file import read_yaml
from rolemesh.errors import InvalidConfig

Sections = dict[str, Any]

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
STRATEGIES = [name for name, table in strategies().items() if table]
BOUNDED: Sections = {"trainer": {"total_training_steps": 4}}  # filtered groups need it
GRPO: Sections = {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 4}}
FILTERED: Sections = {"algorithm": {"filter_groups": {"enable": True}}}
TURNS: Sections = {"rollout": {"multi_turn": {"enable": True}}}
# What some estimators need besides.
NEEDS: dict[str, Sections] = {"gdpo": {"algorithm": {"gdpo_reward_keys": ["score"]}}, "grpo_by_turn": TURNS}
SERVERS: Sections = {"urls": ["http://fleet:8000"], "weights_dir": "/checkpoints/weights"}
# Each may change which roles a job has, where they run, what they read and write, or what is refused.
CHANGES: dict[str, Sections] = {
    "KL in the reward": {"algorithm": {"use_kl_in_reward": True}},
    "KL in the loss": {"actor": {"use_kl_loss": True}},
    "an adapter": {"actor": {"model": {"lora_rank": 8}}},
    "turns": TURNS,
    "a critic": {"critic": {"enable": True}},
    "no critic": {"critic": {"enable": False}},
    "filtered groups": FILTERED,
    "one answer": {"rollout": {"n": 1}},
    "a reward model": {"reward": {"reward_model": {"enable": True, "model": {"path": "/models/judge"}}}},
    "vllm": {"rollout": {"name": "vllm"}},
    "servers": {"rollout": {"name": "openai", "openai": SERVERS}},
    "an engine over two devices": {"rollout": {"name": "vllm", "tensor_model_parallel_size": 2}},
    "ahead": {"rollout": {"mode": "async"}},
    "ahead by nothing": {"rollout": {"mode": "async"}, "trainer": {"max_staleness": 0}},
    "short rows": {
        "data": {"max_length": 256},
        "actor": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 256},
    },
    "a budget of tokens": {"actor": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 96}},
    "the critic's budget": {"critic": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 64}},
    "a batch of no mini-batches": {"data": {"train_batch_size": 100}},
    "a mini-batch of no micro-batches": {"actor": {"ppo_micro_batch_size_per_gpu": 48}},
    "the critic's mini-batch": {"critic": {"ppo_mini_batch_size": 96}},
    "models in a claim": {
        "actor": {"model": {"path": "/models/policy"}},
        "critic": {"model": {"path": "../data/v"}},
    },
    "a run in a claim": {"trainer": {"default_local_dir": "/checkpoints/run"}},
    "a run with a name": {"trainer": {"experiment_name": "first"}},
    "dumps": {"trainer": {"rollout_data_dir": "dumps", "validation_data_dir": "/checkpoints/dumps"}},
    "profiles": {"trainer": {"profile_steps": [2]}},
    "a checkpoint": {
        "trainer": {"resume_mode": "resume_path", "resume_from_path": "/checkpoints/global_step_2"}
    },
    "tools": {"rollout": {"multi_turn": {"enable": True, "tool_config_path": "/data/tools.yaml"}}},
    "a reward function": {
        "reward": {"custom_reward_function": {"path": "r.py", "reward_kwargs": {"table": "/data/t.json"}}}
    },
    "devices by verl's names": {"trainer": {"n_gpus_per_node": 2}},
    "one device by verl's names": {"trainer": {"n_gpus_per_node": 1}},
    "an unknown estimator": {"algorithm": {"adv_estimator": "gea"}},
    "an unknown page": {"algorithm": {"page": "gpro"}},
}


class Drawn(NamedTuple):
    """A drawn job.

    Args:
        base: the recipe, or the page and the estimator, that the changes are made to.
        changes: their names.
        sections: of the job, without placement.
        placement: the section.
        job: None if the job file refuses it.
    """

    base: str
    changes: tuple[str, ...]
    sections: Sections
    placement: Sections
    job: JobConfig | None

    @property
    def is_for_chart(self) -> bool:
        """Whether the chart can deploy the job. It takes ranks from placement.ranks alone."""
        return self.job is not None and self.job.trainer.world_size in (None, 1)


@cache
def drawn_job(seed: int) -> Drawn:
    """Draw a job. Of three the chart can deploy two, whose bases come in turn; the third is refused."""
    draw = random.Random(seed)
    deploys = seed % 3 < 2
    in_turn = bases()[(seed - seed // 3) % len(bases())]
    while True:
        base = in_turn if deploys else draw.choice(list(_all_bases()))
        changes = draw.sample(sorted(CHANGES), draw.choice([0, 1, 1, 2, 2, 3]))
        sections = _all_bases()[base]
        for name in changes:
            sections = merge(sections, CHANGES[name])
        placement = _placement(draw)
        drawn = Drawn(base, tuple(changes), sections, placement, job_of(sections, placement))
        if drawn.is_for_chart == deploys:
            return drawn


def job_of(sections: Sections, placement: Sections) -> JobConfig | None:
    """Return the job of these sections; None if the job file refuses it."""
    try:
        return make_job(sections | {"placement": placement})
    except InvalidConfig:
        return None


@cache
def bases() -> list[str]:
    """Return each recipe, and each page with each estimator that it can have."""
    return [name for name, sections in _all_bases().items() if job_of(sections, {})]


@cache
def _all_bases() -> dict[str, Sections]:
    """Return each recipe, and each page (None: the estimator's) with each estimator."""
    found: dict[str, Sections] = {}
    for path in RECIPES:
        recipe = read_yaml(path)
        whole = recipe if "adv_estimator" in recipe["algorithm"] else merge(GRPO, recipe)
        found[path.stem] = merge(BOUNDED, whole)
    for page, estimator in product([None, *PAGES], ESTIMATORS):
        answers = page is None or "rollout" in PAGES[page].roles
        own: Sections = {
            "algorithm": {"adv_estimator": estimator, "page": page},
            "rollout": {"n": 4 if answers else 1},
        }
        filtered = FILTERED if page and PAGES[page].filters else {}
        needed = merge(filtered, NEEDS.get(estimator, {}))
        found[f"{page} {estimator}"] = merge(merge(BOUNDED, own), needed)
    return found


def _placement(draw: random.Random) -> Sections:
    """Draw a strategy, or groups; and replicas and ranks that may not fit them."""
    placement: Sections = {"strategy": draw.choice([*STRATEGIES, "custom", "custom"])}
    if placement["strategy"] == "custom":
        placement["groups"] = _groups(draw)
    if draw.random() < 0.4:
        role = draw.choice(["rollout", "reference", "reward", "environment"])
        placement["replicas"] = {role: draw.choice([1, 2, 3])}
    if draw.random() < 0.4:
        names = [*placement.get("groups", strategies()[placement["strategy"]]), "actor", "critic"]
        several = "replicas" in placement  # the chart starts one replica of several pods, as 16 ranks need
        placement["ranks"] = {draw.choice(names): draw.choice([2, 4] if several else [2, 4, 16])}
    if draw.random() < 0.03:
        placement["strategy"] = draw.choice(["custom", "hibrid", "standalone"])
    return placement


def _groups(draw: random.Random) -> dict[str, list[str]]:
    """Put roles into groups, now and then one of them twice or nowhere."""
    names = ["a", "b-2", "learn", "x" * 24]
    groups: dict[str, list[str]] = {}
    for role in draw.sample(list(ROLES), len(ROLES)):
        for _ in range(draw.choice([1] * 28 + [0, 2])):
            groups.setdefault(draw.choice(names), []).append(role)
    return groups
