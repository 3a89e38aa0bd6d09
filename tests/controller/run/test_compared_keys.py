"""Which keys of a job a resume compares: each has its reason, and a value without effect says nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from rolemesh.catalog.plugin_imports import NAMED, forget
from rolemesh.config import JobConfig
from rolemesh.config.base import merge, section_type, value_at
from rolemesh.config.job import make_job
from rolemesh.config.job_sections import KEY_FACTS
from rolemesh.config.key_facts import AtResume
from rolemesh.config.placement import PlacementConfig
from rolemesh.config.unused_keys import without_effect
from rolemesh.errors import InvalidConfig
from rolemesh.services.controller.run.resume_compat import (
    CLIPS,
    COLUMNS,
    CRITIC,
    PROMPTS,
    REVISIONS,
    STEPS,
    TOGETHER,
    UNUSED,
    VALIDATION,
    Comparison,
    compare,
    settings_to_keep,
)

NOTHING = Comparison([], [], [], [])
Sections = dict[str, Any]
GRPO = {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 2}}
LOSS = {"actor": {"policy_loss": {"loss_mode": "gpg"}}}
SFT, DPO = ({"algorithm": {"page": page}} for page in ("sft", "dpo"))
FILTERS = {"algorithm": {"filter_groups": {"enable": True}}, "trainer": {"total_training_steps": 4}}
CORRECTS = {"algorithm": {"rollout_correction": {"rollout_is": "token"}}}
# Additions to a job that change nothing: the job, what is added.
SAME: tuple[tuple[Sections, Sections], ...] = (
    ({}, {"actor": {"kl_loss_coef": 0.5, "kl_loss_type": "k1"}}),
    ({}, {"algorithm": {"kl_penalty": "abs", "kl_ctrl": {"kl_coef": 0.5}}}),
    (GRPO, {"algorithm": {"lam": 0.9, "gamma": 0.9}}),
    (SFT, {"algorithm": {"lam": 0.9, "gamma": 0.9, "adv_estimator": "reinforce_plus_plus"}}),
    (
        SFT,
        {"reward": {"rules": "verl"}, "rollout": {"seed": 3, "temperature": 0.5}, "actor": {"clip_ratio": 0.3}},
    ),
    (DPO, {"actor": {"policy_loss": {"loss_mode": "dpo"}}}),
    ({}, {"actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}}),
    (LOSS, {"actor": {"clip_ratio": 0.3}}),
    ({}, {"actor": {"loss_scale_factor": 64}}),
    ({}, {"algorithm": {"rollout_correction": {"rollout_is_threshold": 3.0}}}),
    (CORRECTS, {"algorithm": {"rollout_correction": {"rollout_is_threshold": "2.0"}}}),
    ({}, {"rollout": {"val_kwargs": {"n": 4, "do_sample": True}}}),  # nothing validates
    ({"rollout": {"do_sample": False}}, {"rollout": {"temperature": 0.5}}),
    ({"data": {"shuffle": False}}, {"data": {"seed": 7}}),
    (merge(GRPO, FILTERS), {"data": {"gen_batch_size": 1024}}),
)


def settings(*jobs: Sections) -> Sections:
    """What a checkpoint of the job that these sections make together keeps."""
    whole: Sections = {}
    for job in jobs:
        whole = merge(whole, job)
    return dict(json.loads(json.dumps(settings_to_keep(make_job(whole), 10))))


@pytest.mark.parametrize(("job", "added"), SAME)
def test_settings_with_the_same_effect_compare_as_equal(job: Sections, added: Sections) -> None:
    """A key without effect, or another spelling of the same, is neither refused nor reported."""
    assert (
        compare(settings(job), settings(job, added)) == compare(settings(job, added), settings(job)) == NOTHING
    )


@pytest.mark.parametrize(
    "added",
    [
        {"actor": {"entropy_coeff": 0.01}},
        {"actor": {"use_kl_loss": True}},
        {"actor": {"policy_loss": {"loss_mode": "vanilla"}}},
    ],
)
def test_loss_scale_factor_counts_where_a_term_is_divided_by_it(added: Sections) -> None:
    job = {"actor": {"policy_loss": {"loss_mode": "sapo"}, "loss_agg_mode": "seq-mean-token-sum-norm"}}
    divided = {"actor": {"loss_scale_factor": 64}}
    of_the_critic = "critic.loss_scale_factor from None to 64"
    assert compare(settings(job), settings(job, divided)).changed == [of_the_critic]
    assert compare(settings(job, added), settings(job, added, divided)).changed == [
        "actor.loss_scale_factor from None to 64",
        of_the_critic,
    ]


def test_a_switched_on_key_is_reported_with_its_switch() -> None:
    job: Sections = {"actor": {"model": {"path": "models/sft"}}}
    off, on = settings(job), settings(job, {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.5}})
    assert compare(off, on).changed == [
        "actor.use_kl_loss from False to True",
        "actor.kl_loss_coef from 0.001 to 0.5",
        "reference.model.path from None to 'sft'",
    ]
    assert compare(on, off).changed == [
        "actor.use_kl_loss from True to False",
        "reference.model.path from 'sft' to None",
    ]


def test_an_adapter_is_not_added_or_left_out_half_way() -> None:
    without, adapter = settings({}), settings({"actor": {"model": {"lora_rank": 8}}})
    assert compare(adapter, without).refused == ["actor.model.lora_alpha is None now and was 16"]
    assert compare(without, adapter).refused == ["actor.model.lora_alpha is 16 now and was None"]


def test_rules_that_scored_nothing_may_change() -> None:
    own = settings({"reward": {"custom_reward_function": {"path": "mine.py"}}})
    by_rules = settings({"reward": {"rules": "verl"}})
    path = "reward.custom_reward_function.path"
    assert compare(own, by_rules) == Comparison(
        [], [], [f"{path} from 'mine.py' to None", "reward.rules from 'rolemesh' to 'verl'"], []
    )
    assert compare(by_rules, own) == Comparison([], [], [f"{path} from None to 'mine.py'"], [])


def test_a_pages_critic_is_not_added_or_left_out_half_way(tmp_path: Path) -> None:
    page = tmp_path / "own.py"
    page.write_text(
        "from rolemesh.plugins import page\n@page('own')\nasync def own(prompts, roles, step): return {}\n"
    )
    job: Sections = merge(GRPO, {"algorithm": {"page": "own"}, "plugins": [str(page)]})
    try:
        without, with_one = settings(job), settings(job, {"critic": {"enable": True}})
    finally:
        forget(str(page))
    phrase = "whether the job has a critic (critic.enable) is {} now and was {}"
    assert compare(without, with_one).refused == [phrase.format(True, False)]
    assert compare(with_one, without).refused == [phrase.format(False, True)]


def test_an_older_checkpoint_is_compared_by_what_its_keys_mean() -> None:
    now = settings({})
    earlier = {key: value for key, value in now.items() if key not in (CRITIC, UNUSED, *CLIPS)}
    earlier["data.gen_batch_size"] = earlier["data.train_batch_size"]
    assert compare(earlier, now) == Comparison([], [], [], ["the other keys of actor"])


def test_conversations_do_not_begin_or_end_half_way() -> None:
    """Their keys are those of one job alone, so they are not compared, and none is said to be missing."""
    without, talks = settings({}), settings({"rollout": {"multi_turn": {"enable": True}}})
    phrase = "rollout.multi_turn.enable is {} now and was {}"
    assert compare(without, talks) == Comparison([phrase.format(True, False)], [], [], [])
    assert compare(talks, without) == Comparison([phrase.format(False, True)], [], [], [])


@pytest.mark.parametrize(
    ("role", "job"),
    [
        ("reference", {"actor": {"use_kl_loss": True}}),
        ("reward", {"reward": {"reward_model": {"enable": True, "model": {"path": "judge"}}}}),
    ],
)
def test_a_model_that_is_not_trained_may_be_another_also_at_the_hub(role: str, job: Sections) -> None:
    """But a branch that has moved on is no intention."""
    revision, path = f"revision of {role}'s model", REVISIONS[f"revision of {role}'s model"]
    other, one, moved = (
        {**settings(job), path: name, **({revision: commit} if commit else {})}
        for name, commit in (("local", ""), ("model", "a"), ("model", "b"))
    )
    said = {f"{path} from 'local' to 'model'", f"{revision} from None to 'a'"}
    assert {*compare(other, one).changed} == said
    assert compare(other, one).refused == compare(one, other).refused == []
    assert compare(one, moved).refused == [f"{revision} is 'b' now and was 'a'"]


def test_the_models_of_two_checkpoints_are_not_the_same() -> None:
    def of_step(step: int, under: str) -> Sections:
        path = f"{under}/global_step_{step}/actor"
        return settings({"actor": {"use_kl_loss": True}, "reference": {"model": {"path": path}}})

    assert compare(of_step(20, "outputs/sft"), of_step(20, "/moved")) == NOTHING
    assert compare(of_step(20, "outputs/sft"), of_step(60, "outputs/sft")).changed == [
        "reference.model.path from 'global_step_20/actor' to 'global_step_60/actor'"
    ]


# What a resume compares in place of a key itself.
ROLE = "the checkpoint of the role"
FOLLOWS = {
    "plugins": "digest of plug-in",
    "algorithm.filter_groups.enable": "algorithm.filter_groups.metric",
    "data.val_files": VALIDATION,
    **dict.fromkeys(
        (
            *(
                "data.max_length",
                "data.prompt_key",
                "data.response_key",
                "data.chosen_key",
                "data.rejected_key",
            ),
            *("data.messages_key", "data.apply_chat_template_kwargs", "data.tools_key", "data.truncation"),
            *("data.filter_overlong_prompts", "data.train_max_samples", "actor.model.path"),
            *("actor.model.revision", "actor.model.custom_chat_template"),
        ),
        PROMPTS,
    ),
    "data.val_max_samples": VALIDATION,
    **dict.fromkeys(
        ("data.reward_fn_key", "data.reward_model_key", "rollout.agent.default_agent_loop"), COLUMNS
    ),
    **dict.fromkeys(
        ("actor.model.lora_rank", "actor.model.target_modules", "actor.model.lora_adapter_path"), ROLE
    ),
    **dict.fromkeys(
        ("actor.model.dtype", "critic.model.dtype", "critic.model.path", "critic.model.revision"), ROLE
    ),
    "reference.model.revision": "revision of reference's model",
    "reward.reward_model.model.revision": "revision of reward's model",
    "trainer.total_epochs": STEPS,
}


def test_each_key_from_which_something_follows_says_what() -> None:
    derived = {key for key, facts in KEY_FACTS.items() if facts.at_resume is AtResume.DERIVED}
    assert FOLLOWS.keys() == derived


# Jobs in which keys have an effect that they do not have in the default job.
BASES: tuple[Sections, ...] = (
    {},
    merge(GRPO, FILTERS),
    {"rollout": {"multi_turn": {"enable": True}}, "data": {"val_files": ["a"]}},
    {"actor": {"use_kl_loss": True, "model": {"path": "models/sft"}}},
    {"actor": {"model": {"lora_rank": 8}}},
    {"reward": {"custom_reward_function": {"path": "mine.py"}}},
    {"reward": {"reward_model": {"enable": True, "model": {"path": "judge"}}}},
    {"reward": {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 1}}},
    {"algorithm": {"use_kl_in_reward": True, "use_pf_ppo": True}},
    {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}},
    {"algorithm": {"rollout_correction": {"rollout_is": "token"}}},
    {"algorithm": {"rollout_correction": {"rollout_rs": "token_k2", "rollout_rs_threshold": 1}}},
    {"algorithm": {"rollout_correction": {"bypass_mode": True}}},
    merge(GRPO, {"algorithm": {"adv_estimator": "egpo"}}),
    {"actor": {"loss_agg_mode": "seq-mean-token-sum-norm"}},
    *({"actor": {"policy_loss": {"loss_mode": name}}} for name in ("sapo", "clip_cov", "kl_cov")),
    {"actor": {"policy_loss": {"loss_mode": "dro", "dro_beta": 0.1}}},
    DPO,
    {"rollout": {"mode": "async", "name": "vllm"}},
    {role: {"optim": {"lr_scheduler_type": "cosine"}} for role in ("actor", "critic")}
    | {"trainer": {"total_training_steps": 4}},
    {"rollout": {"val_kwargs": {"do_sample": True}}, "data": {"val_files": ["a"]}},
    {"rollout": {"name": "openai", "openai": {"urls": ["http://a:1"], "weights_dir": "/shared"}}},
)
# Another value needs a plug-in, an adapter for servers, or further keys beside it.
NOT_DRAWN = {
    *("algorithm.options", "algorithm.page_options", "data.dataset", "data.options", "reward.options"),
    *("actor.policy_loss.options", "rollout.options", "rollout.multi_turn.mcp_servers", "critic.enable"),
    *("algorithm.gdpo_reward_weights", "algorithm.rollout_correction.rollout_rs", "rollout.top_p"),
    *("actor.optim.min_lr_ratio", "critic.optim.min_lr_ratio", "reward.overlong_buffer.enable"),
    *("rollout.prompt_length", "rollout.response_length", "rollout.calculate_log_probs", "trainer.nnodes"),
    *("actor.ulysses_sequence_parallel_size", "actor.ppo_max_token_len_per_gpu", "trainer.save_best"),
    *("trainer.max_actor_ckpt_to_keep", *(f"placement.{key}" for key in PlacementConfig.model_fields)),
}


@cache
def job_of(base: int) -> tuple[JobConfig, frozenset[str], Sections]:
    """A job of BASES, its keys without effect, and what a checkpoint keeps of it."""
    job = make_job(BASES[base])
    return job, frozenset(without_effect(job)), settings(BASES[base])


def other_values(key: str) -> list[Any]:
    """Values that a key may have beside its default, and perhaps a few that it may not."""
    *parents, name = key.split(".")
    section: type[BaseModel] = JobConfig
    for parent in parents:
        section = section_type(section, parent) or section
    field = section.model_fields[name]
    if key in NAMED:
        return [value for named in NAMED[key] for value in (named, [named])]
    parts = [field.annotation, *get_args(field.annotation)]
    literals = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
    if isinstance(field.default, bool):
        return [not field.default]
    if isinstance(field.default, int | float):
        return [5, 0.5, 2 * field.default, field.default / 2]
    return [
        *literals,
        *([value] for value in literals),
        True,
        5,
        64,
        0.25,
        "x",
        ["x"],
        [2],
        [0.5, 0.6],
        {"x": 1},
    ]


def changed(key: str) -> Iterator[tuple[Sections, Sections]]:
    """Yield what checkpoints keep of two jobs that differ in a key, which has an effect in both."""
    for base in range(len(BASES)):
        job, idle, kept = job_of(base)
        for value in () if key in idle else other_values(key):
            other = value
            for name in reversed(key.split(".")):
                other = {name: other}
            try:
                then = make_job(merge(BASES[base], other))
            except InvalidConfig:
                continue
            if value_at(then, key) != value_at(job, key) and key not in without_effect(then):
                yield kept, settings_to_keep(then, 10)


def declared(at_resume: AtResume) -> list[str]:
    return [key for key, facts in KEY_FACTS.items() if facts.at_resume is at_resume and key not in NOT_DRAWN]


@pytest.mark.parametrize("at_resume", [AtResume.REFUSED, AtResume.WARNED])
def test_a_resume_refuses_or_warns_as_a_key_declares(at_resume: AtResume) -> None:
    silent = []
    for key in declared(at_resume):
        names = tuple(name for name, keys in TOGETHER.items() if key in keys) or (key,)
        compared = (compare(*pair) for pair in changed(key))
        said = (each.refused if at_resume is AtResume.REFUSED else each.changed for each in compared)
        if not any(phrase.startswith(names) for phrases in said for phrase in phrases):
            silent.append(key)
    assert silent == []


def test_a_resume_says_nothing_of_a_key_that_is_free() -> None:
    assert {key: compare(*next(changed(key))) for key in declared(AtResume.FREE)} == dict.fromkeys(
        declared(AtResume.FREE), NOTHING
    )
