"""Which keys of a job a resume compares: each has its reason, and a value without effect says nothing."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config import JobConfig
from rolemesh.config.base import leaves, merge
from rolemesh.config.job import make_job
from rolemesh.services.controller.run.resume_compat import (
    CLIPS,
    CRITIC,
    IDLE,
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
        [], [], ["reward.rules from 'rolemesh' to 'verl'", f"{path} from 'mine.py' to None"], []
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
    earlier = {key: value for key, value in now.items() if key not in (CRITIC, IDLE, *CLIPS)}
    earlier["data.gen_batch_size"] = earlier["data.train_batch_size"]
    assert compare(earlier, now) == Comparison([], [], [], ["the other keys of actor"])


# The keys that are not kept under their own names, by the reason.
NOT_KEPT = {
    "a digest of the rows has what it changes": """
        data.val_files data.*_key data.apply_chat_template_kwargs data.truncation data.filter_overlong_prompts
        data.*_max_samples rollout.agent.default_agent_loop actor.model.custom_chat_template""",
    "kept under another name": """
        plugins algorithm.filter_groups.enable critic.enable actor.clip_ratio actor.clip_ratio_* rollout.mode
        trainer.max_staleness trainer.total_epochs *.model.revision data.max_length""",
    "the role's own checkpoint has it": """
        actor.model.path critic.model.path actor.model.dtype critic.model.dtype actor.model.lora_*
        actor.model.target_modules""",
    "a dtype that may follow the device; the documentation says that it is not compared": """
        reference.model.dtype reward.reward_model.model.dtype rollout.dtype""",
    "where, in which pieces and how fast it is computed": """
        placement.* *.fsdp_config.* *.ulysses_sequence_parallel_size *.use_remove_padding *.trust_remote_code
        *micro_batch_size_per_gpu *use_dynamic_bsz *_max_token_len_per_gpu data.val_batch_size
        *.enable_gradient_checkpointing *.enable_activation_offload *.num_workers
        rollout.tensor_model_parallel_size rollout.gpu_memory_utilization rollout.free_cache_engine
        rollout.max_num_* rollout.enable_* rollout.enforce_eager rollout.load_format
        trainer.balance_batch trainer.deterministic trainer.device trainer.nnodes trainer.n_gpus_per_node""",
    "how roles, servers and programs are reached, and how long is waited for them": """
        rollout.openai.* rollout.multi_turn.*_timeout_s rollout.multi_turn.max_attempts
        rollout.multi_turn.max_episodes rollout.agent.external.pass_env trainer.*timeout_s""",
    "when a run begins, ends, validates and saves, and what it writes": """
        algorithm.filter_groups.max_num_gen_batches trainer.max_rollout_kl trainer.project_name
        trainer.experiment_name trainer.*_dir trainer.logger trainer.val_* trainer.test_freq trainer.save_*
        trainer.max_actor_ckpt_to_keep trainer.resume_* trainer.log_val_generations trainer.profile_steps
        rollout.disable_log_stats reward.overlong_buffer.log""",
    "refused with any value but its default or the same as another key's": """
        rollout.prompt_length rollout.response_length rollout.calculate_log_probs""",
}


def test_every_key_is_kept_or_has_a_reason_why_not() -> None:
    """A new key is compared at a resume, or this table says why it need not be."""
    kept = settings({"rollout": {"multi_turn": {"enable": True}}, "actor": {"use_kl_loss": True}})
    not_kept = [key for key in leaves(JobConfig) if key not in kept]
    reasons = {pattern: why for why, patterns in NOT_KEPT.items() for pattern in patterns.split()}
    found = {key: [why for pattern, why in reasons.items() if fnmatchcase(key, pattern)] for key in not_kept}
    assert {key: whys for key, whys in found.items() if len({*whys}) != 1} == {}
    assert [pattern for pattern in reasons if not any(fnmatchcase(key, pattern) for key in not_kept)] == []
