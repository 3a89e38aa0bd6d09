"""Checks on settings of several sections of a job file."""

from __future__ import annotations

from rolemesh.catalog.agents import AGENTS
from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.estimators import BY_COMPONENTS, BY_CRITIC, BY_GREEDY, BY_TURN
from rolemesh.catalog.pages import PAGES
from rolemesh.config.job_sections import JobSections
from rolemesh.config.plan import Plan

FIXED_TOOLS = {"calculator", "calc_gsm8k_reward"}  # what they answer follows from their arguments


def check_sections(job: JobSections) -> None:
    """Raise ValueError for the first pair of sections that contradict each other."""
    _check_keys(job)
    _check_page(job)
    _check_calls(job)
    _check_batches(job)
    if job.trainer.save_best and job.trainer.test_freq < 1:
        raise ValueError(
            f"trainer.save_best is {job.trainer.save_best}, but nothing is validated after a step: "
            f"trainer.test_freq is {job.trainer.test_freq}; set it"
        )
    if job.estimates:
        _check_estimator(job)
        _check_greedy(job)
    _check_adaptive_kl(job)
    for key, is_used in (("rollout", job.generates), ("rollout.val_kwargs", job.generates and job.validates)):
        if is_used and (reason := job.rollout.raised_temperature(key) or equal_answers(job, key)):
            raise ValueError(reason)
    for key in ("prompt_length", "response_length"):
        own = getattr(job.rollout, key)
        common = getattr(job.data, f"max_{key}")
        if own not in (None, common):
            raise ValueError(
                f"rollout.{key} is {own}, but data.max_{key} is {common} and always used; leave the former out"
            )
    overlong = job.reward.overlong_buffer
    longest = job.data.max_response_length
    if overlong.enable and overlong.len > longest:
        raise ValueError(
            f"reward.overlong_buffer.len is {overlong.len}, but data.max_response_length is {longest}; the "
            "buffer is the last part of a response, so make it smaller"
        )
    if job.trainer.resume_mode == "resume_path" and not job.trainer.resume_from_path:
        raise ValueError("trainer.resume_mode is resume_path, but trainer.resume_from_path is not set")
    _check_dynamic_sampling(job)
    _check_adapter(job)
    _check_bypass(job)
    _check_passes(job)
    plan = Plan.of(job)
    _check_groups(job, plan)
    _check_ulysses(job, plan)
    _check_rows_of_ranks(job, plan)


def _check_keys(job: JobSections) -> None:
    """Raise ValueError if a declaration names a key that its section lacks."""
    estimator = job.estimator
    loss = job.policy_loss
    actor = job.actor
    named = {
        estimator: [key for key in estimator.keys if not hasattr(job.algorithm, key)],
        loss: [
            key
            for key in (*loss.keys, *loss.choose_keys)
            if not hasattr(actor, key) and not hasattr(actor.policy_loss, key)
        ],
    }
    for part, missing in named.items():
        if missing:
            raise ValueError(
                f"{part.name} of {part.origin} declares the key {missing[0]!r}, which the job file does not "
                "have; declare a key of your own in options"
            )


def _check_page(job: JobSections) -> None:
    algorithm = job.algorithm
    estimator = job.estimator
    if estimator.default_page not in PAGES:
        raise ValueError(
            f"algorithm.adv_estimator {estimator.name} has the page {estimator.default_page!r}, "
            f"{PAGES.unknown(estimator.default_page)}"
        )
    options = job.page.options
    if not algorithm.page and options and any(each.is_required() for each in options.model_fields.values()):
        raise ValueError(
            f"algorithm.page is not set, and page {job.page.name} has options without defaults; set page to "
            f"{job.page.name} and its options in algorithm.page_options"
        )
    if algorithm.page and job.page.filters != algorithm.filter_groups.enable:
        filters = ("does not filter groups", "true") if not job.page.filters else ("filters groups", "false")
        raise ValueError(
            f"algorithm.page {algorithm.page} {filters[0]}, but algorithm.filter_groups.enable is "
            f"{filters[1]}; change one of them"
        )
    called = "critic" in job.page.roles or (job.estimates and estimator.needs_critic)
    if job.critic.enable is False and called:
        raise ValueError(
            f"critic.enable is false, but algorithm.adv_estimator {estimator.name} with page {job.page.name} "
            "needs a critic; leave critic.enable out"
        )
    owner = next((page.name for page in PAGES.values() if job.actor.loss.name in page.losses), job.page.name)
    if owner != job.page.name:
        raise ValueError(
            f"actor.policy_loss.loss_mode is {job.actor.loss.name}, a loss of page {owner}, but the page is "
            f"{job.page.name}; set algorithm.page to {owner}, or another loss_mode"
        )
    if not job.generates and job.rollout.n > 1:
        raise ValueError(
            f"rollout.n is {job.rollout.n}, but page {job.page.name} answers no prompts; leave rollout.n out"
        )
    if job.generates and job.data.max_length is not None:
        raise ValueError(
            f"data.max_length is {job.data.max_length}, but page {job.page.name} answers prompts; set "
            "algorithm.page to sft or dpo; or max_length to null, and data.max_prompt_length and "
            "data.max_response_length in its place"
        )
    if job.critic.enable and not called and job.page.origin == BUILT_IN:
        raise ValueError(
            f"critic.enable is true, but page {job.page.name} calls no critic; leave critic.enable out"
        )
    if job.trainer.critic_warmup and not job.uses_critic:
        raise ValueError(
            f"trainer.critic_warmup is {job.trainer.critic_warmup}, but a job with "
            f"algorithm.adv_estimator {estimator.name} has no critic; set it to 0"
        )


def _check_calls(job: JobSections) -> None:
    """Raise ValueError if a built-in page does not call the role that the estimator or the loss needs.

    The recorded step finds it too, of every page, but names columns in place of keys.
    """
    page = job.page
    estimator = job.estimator
    if page.origin != BUILT_IN:
        return
    if job.estimates and estimator.needs_critic and "critic" not in page.roles and not page.filters:
        raise ValueError(
            f"algorithm.adv_estimator is {estimator.name}, which needs a critic, but page {page.name} calls "
            f"none; set algorithm.page to {estimator.default_page}, or another adv_estimator"
        )
    if job.actor.use_kl_loss and not job.estimates and "reference" not in page.roles:
        raise ValueError(
            f"actor.use_kl_loss is true, but page {page.name} calls no reference policy; set use_kl_loss to "
            "false"
        )


def _check_batches(job: JobSections) -> None:
    trained = {"actor": (job.actor.ppo_mini_batch_size, job.actor.ppo_micro_batch_size_per_gpu)}
    if job.uses_critic:
        trained["critic"] = (job.mini_batch_size("critic"), job.critic.ppo_micro_batch_size_per_gpu)
    for role, (prompts, micro) in trained.items():
        mini = prompts * job.rollout.n
        if job.data.train_batch_size % prompts:
            raise ValueError(
                f"data.train_batch_size {job.data.train_batch_size} does not divide into mini-batches "
                f"of {role}.ppo_mini_batch_size {prompts}"
            )
        if mini % micro and job.max_tokens(role) is None:
            raise ValueError(
                f"{role}.ppo_mini_batch_size is {prompts}, so a mini-batch has {mini} rows (rollout.n is "
                f"{job.rollout.n}), but these do not divide into micro-batches of "
                f"{role}.ppo_micro_batch_size_per_gpu {micro} rows"
            )
    longest = job.data.max_prompt_length + job.data.max_response_length
    keys = (
        "data.max_length"
        if job.data.splits_max_length
        else "data.max_prompt_length and data.max_response_length"
    )
    for role in ("actor", "critic", "reference"):
        budget = job.max_tokens(role)
        if role in job.roles and budget is not None and budget < longest:
            raise ValueError(
                f"{job.max_tokens_key(role)} is {budget}, but a row may have {longest} tokens "
                f"({keys}); set it to at least {longest}"
            )


def _check_estimator(job: JobSections) -> None:
    """Raise ValueError if the job lacks what its advantage estimator compares or reads."""
    estimator = job.estimator
    if estimator.compares and job.rollout.n == 1:
        raise ValueError(
            f"algorithm.adv_estimator {estimator.name} compares the responses to one prompt, but rollout.n is "
            "1; set rollout.n to 2 or more"
        )
    if BY_TURN in estimator.reads and not job.rollout.multi_turn.enable:
        raise ValueError(
            f"algorithm.adv_estimator {estimator.name} compares turns of conversations, but "
            "rollout.multi_turn.enable is false; set it to true, or use grpo"
        )
    own = [key for key in job.algorithm.gdpo_reward_keys if key not in ("score", "acc")]
    by_components = BY_COMPONENTS in estimator.reads
    if by_components and own and job.reward.custom_reward_function.path is None:
        raise ValueError(
            f"algorithm.gdpo_reward_keys names {own[0]}, which only your own function could return, but "
            "reward.custom_reward_function.path is not set; name your file"
        )
    if by_components and job.reward.overlong_buffer.enable:
        raise ValueError(
            "reward.overlong_buffer.enable is true and changes the score, but algorithm.adv_estimator "
            f"{estimator.name} uses only the reward's components; set enable to false"
        )
    multi_turn = job.rollout.multi_turn
    weights = {key: getattr(multi_turn, key) for key in ("turn_reward_weight", "episode_reward_weight")}
    if by_components and multi_turn.enable and any(weights.values()):
        key, weight = next((key, weight) for key, weight in weights.items() if weight)
        by_default = "" if key in multi_turn.model_fields_set else " by default"
        raise ValueError(
            f"rollout.multi_turn.{key} is {weight:g}{by_default} and adds the environment's rewards to the "
            f"score, but algorithm.adv_estimator {estimator.name} uses only the reward's components; set "
            f"{' and '.join(weights)} to 0, or adv_estimator to grpo"
        )
    if estimator.needs_distribution and job.algorithm.rollout_correction.bypass_mode:
        raise ValueError(
            f"algorithm.adv_estimator {estimator.name} reads statistics of the actor's distributions before "
            "the update, but algorithm.rollout_correction.bypass_mode leaves that call out; set it to false"
        )


def _check_adaptive_kl(job: JobSections) -> None:
    """Raise ValueError if a step could bring the adapted coefficient of the KL to 0 or below.

    A step changes it by at most 0.2 * samples / horizon of its value (rolemesh/algos/kl.py).
    """
    control = job.algorithm.kl_ctrl
    samples = job.data.train_batch_size * job.rollout.n
    if control.type == "adaptive" and samples >= 5 * control.horizon:
        raise ValueError(
            f"algorithm.kl_ctrl.horizon is {control.horizon}, but a step has {samples} samples, so one step "
            "could bring the adaptive coefficient to 0 or below, which would reward the KL; set horizon to "
            f"{samples // 5 + 1} or more"
        )


def _check_greedy(job: JobSections) -> None:
    estimator = job.estimator
    rollout = job.rollout
    reasons = {
        "do_sample is false": not rollout.do_sample,
        "temperature is 0": rollout.temperature == 0,
        "top_k is 1": rollout.top_k == 1,
    }
    learners = {
        f"algorithm.adv_estimator {estimator.name}": estimator.learns_from_differences(rollout.n),
        "algorithm.filter_groups.enable": job.algorithm.filter_groups.enable,
    }
    found = [[text for text, holds in each.items() if holds] for each in (reasons, learners)]
    if all(found) and not _environment_varies(job):
        raise ValueError(
            f"rollout.{found[0][0]}, so all answers to a prompt are the same, but {found[1][0]} needs answers "
            "that differ; set do_sample to true, temperature above 0 and top_k to -1"
        )


def equal_answers(job: JobSections, key: str) -> str:
    """Return why several answers to a prompt would all be the same, and what to set; empty if they may differ.

    Args:
        job: greedy answers differ if an environment says different things in between.
        key: rollout or rollout.val_kwargs.
    """
    sampling = job.rollout if key == "rollout" else job.rollout.val_kwargs
    if sampling.n == 1 or not (sampling.greedy or sampling.top_k == 1) or _environment_varies(job):
        return ""
    why = "top_k is 1" if not sampling.greedy else "temperature is 0"
    if not sampling.do_sample:
        why = f"do_sample is false{' (its default there)' * (key != 'rollout')}"
    return (
        f"{key}.n is {sampling.n}, but {key}.{why}, so all answers to a prompt are the same; set n to "
        "1, or do_sample to true, temperature above 0 and top_k to -1"
    )


def _environment_varies(job: JobSections) -> bool:
    """Return whether an environment may say different things after equal turns of the policy."""
    multi_turn = job.rollout.multi_turn
    of_users = (
        multi_turn.tool_config_path,
        multi_turn.interaction_config_path,
        multi_turn.mcp_servers,
        job.rollout.agent.external.command,
        set(multi_turn.tools) - FIXED_TOOLS,
        any(agent.origin != BUILT_IN for agent in AGENTS.values()),  # rows may name it
    )
    return multi_turn.enable and any(of_users)


def _check_adapter(job: JobSections) -> None:
    model = job.actor.model
    own = job.reference.model
    if model.lora_adapter_path and not model.lora_rank:
        raise ValueError(
            f"actor.model.lora_adapter_path is {model.lora_adapter_path}, but actor.model.lora_rank is 0; set "
            "lora_rank to the adapter's rank"
        )
    if job.ref_in_actor and own.path and (own.path, own.revision) != (model.path, model.revision):
        other = f"{own.path} at {own.revision}" if own.revision else own.path
        raise ValueError(
            f"reference.model.path is {other}, but with actor.model.lora_rank {model.lora_rank} the "
            "reference policy is the actor with its adapter off; leave one of them out"
        )
    if job.ref_in_actor and "dtype" in own.model_fields_set and own.dtype != model.dtype:
        raise ValueError(
            f"reference.model.dtype is {own.dtype}, but with actor.model.lora_rank {model.lora_rank} the "
            f"reference policy is the actor, whose dtype is {model.dtype}; leave reference.model.dtype out"
        )


def _check_dynamic_sampling(job: JobSections) -> None:
    algorithm = job.algorithm
    data = job.data
    if algorithm.use_pf_ppo and not job.page.resamples:
        raise ValueError(
            "algorithm.use_pf_ppo resamples rows for PPO, but algorithm.adv_estimator is "
            f"{algorithm.adv_estimator}; set use_pf_ppo to false, or adv_estimator to gae"
        )
    if not algorithm.filter_groups.enable:
        if data.prompts_at_once != data.train_batch_size:
            raise ValueError(
                f"data.gen_batch_size is {data.gen_batch_size} and data.train_batch_size "
                f"{data.train_batch_size}, but without algorithm.filter_groups.enable a step trains on all "
                "answers; set that, or leave gen_batch_size out"
            )
        return
    if job.rollout.n == 1:
        raise ValueError(
            "algorithm.filter_groups.enable drops prompts whose answers do not differ, but rollout.n is 1; set "
            "rollout.n to 2 or more"
        )
    if not {BY_CRITIC, BY_GREEDY}.isdisjoint(job.estimator.reads):  # the page does not add these columns
        raise ValueError(
            "algorithm.filter_groups.enable is for estimators that compare the answers to one prompt, but "
            f"algorithm.adv_estimator is {algorithm.adv_estimator}; set adv_estimator to grpo"
        )
    if algorithm.filter_groups.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        raise ValueError(
            "algorithm.filter_groups.metric is seq_final_reward, but with algorithm.use_kl_in_reward no two "
            "rewards are equal, so no group would be dropped; set metric to seq_reward"
        )
    if algorithm.filter_groups.metric == "score" and job.reward.overlong_buffer.enable:
        raise ValueError(
            "algorithm.filter_groups.metric is score, but with reward.overlong_buffer.enable the score without "
            "the penalty is not kept; set metric to acc, or to seq_reward, which includes the penalty"
        )
    if job.rollout.mode == "async" and job.trainer.max_staleness > 0:
        raise ValueError(
            "algorithm.filter_groups.enable cannot be combined with rollout.mode async: how many prompts a "
            "step takes is unknown before they are answered, so prompts of later steps cannot be answered "
            "ahead; set rollout.mode to sync, or trainer.max_staleness to 0"
        )
    if job.trainer.total_training_steps is None:
        raise ValueError(
            "algorithm.filter_groups.enable needs trainer.total_training_steps, because the number of steps in "
            "trainer.total_epochs is unknown before the prompts are answered; set it"
        )


def _check_bypass(job: JobSections) -> None:
    bypasses = job.algorithm.rollout_correction.bypass_mode
    loss_mode = job.actor.policy_loss.loss_mode
    if job.actor.loss.corrects and not bypasses:
        raise ValueError(
            f"actor.policy_loss.loss_mode is {loss_mode}, but algorithm.rollout_correction.bypass_mode is "
            "false; set bypass_mode to true, or loss_mode to vanilla"
        )
    if bypasses and not job.actor.loss.corrects and loss_mode != "vanilla":
        raise ValueError(
            "algorithm.rollout_correction.bypass_mode is true, which has its own loss (loss_type), but "
            f"actor.policy_loss.loss_mode is {loss_mode}; set loss_mode to bypass, or bypass_mode to false"
        )


def _check_passes(job: JobSections) -> None:
    loss = job.policy_loss
    plain = loss.corrects and job.algorithm.rollout_correction.is_plain_reinforce
    if job.actor.ppo_epochs > 1 and job.generates and (plain or not loss.has_ratio):
        of = "loss_type reinforce without rollout_is" if plain else f"loss_mode {loss.name}"
        raise ValueError(
            f"actor.ppo_epochs is {job.actor.ppo_epochs}, but {of} has no ratio, so later passes could not "
            "correct for the policy's change; set ppo_epochs to 1, or another loss"
        )


def _check_groups(job: JobSections, plan: Plan) -> None:
    for group in plan.groups:
        split = job.rollout.tensor_model_parallel_size
        if group.ranks > 1 and split > 1 and "rollout" in group.roles:
            raise ValueError(
                f"rollout.tensor_model_parallel_size is {split}, but group {group.name} has {group.ranks} "
                "ranks (placement.ranks), each with one GPU and an engine of its own; set "
                "tensor_model_parallel_size to 1, or give rollout its own group (placement.strategy)"
            )
        is_ahead = job.rollout.mode == "async" and job.trainer.max_staleness > 0
        if is_ahead and "rollout" in group.models and len(group.models) > 1:
            raise ValueError(
                f"rollout.mode is async, but rollout shares the device of group {group.name} with "
                f"{', '.join(role for role in group.models if role != 'rollout')}: generation keeps its turn "
                "to the end, so nothing could overlap with it; give rollout its own group "
                "(placement.strategy), or set rollout.mode to sync"
            )


def _check_ulysses(job: JobSections, plan: Plan) -> None:
    sections = {
        "actor": ("actor", job.actor.model),
        "critic": ("critic", job.critic.model),
        "reference": ("reference", job.reference.model),
        "reward": ("reward.reward_model", job.reward.reward_model.model),
    }
    for group in plan.groups:
        for role in sections.keys() & group.roles:
            section, model = sections[role]
            size = job.ulysses_size(role)
            ranks = group.ranks
            key = f"{section}.ulysses_sequence_parallel_size"
            if ranks % size:
                raise ValueError(
                    f"{key} is {size}, which does not divide the {ranks} rank"
                    f"{'s' * (ranks > 1)} of group {group.name} (placement.ranks)"
                )
            if size > 1 and not model.use_remove_padding:
                raise ValueError(
                    f"{key} is {size}, but {section}.model.use_remove_padding is false; "
                    "tokens are spread over ranks only without padding, so set it to true"
                )


def _check_rows_of_ranks(job: JobSections, plan: Plan) -> None:
    for group in plan.groups:
        for role in {"actor", "critic"}.intersection(group.roles):
            prompts = job.mini_batch_size(role)
            ranks = group.ranks
            rows = prompts * job.rollout.n
            parts = ranks // job.ulysses_size(role)
            if rows < parts:
                raise ValueError(
                    f"{role}.ppo_mini_batch_size is {prompts}, so a mini-batch has {rows} row"
                    f"{'s' * (rows > 1)} (rollout.n is {job.rollout.n}), fewer than the {parts} parts that the "
                    f"{ranks} ranks of group {group.name} (placement.ranks) compute; set it to a multiple of "
                    f"{-(-parts // job.rollout.n)}, or have fewer ranks"
                )
