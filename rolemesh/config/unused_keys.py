"""Keys without effect in a job, of which the run warns at its start.

A recipe may be merged over any job file, so keys of a part that a job does not have are no error
(docs/decisions/0009-no-key-is-ignored-in-silence.md). A value other than the default that another key switches
off causes a warning: `kl_loss_coef: 0.01` without `use_kl_loss` trains without a KL. If the job file also has
`use_kl_loss: false`, this is intended, and there is no warning. A null is no such intention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.config.base import Config, NoEffect, value_at
from rolemesh.config.job_sections import KEY_FACTS, JobSections

KL_CTRL = "algorithm.kl_ctrl"
CORRECTION = "algorithm.rollout_correction"
OWN = "reward.custom_reward_function"
OF_RULES = tuple(
    f"reward.{key}" for key in ("rules", "format_score", "answer_chars", "math", "sandbox.continuous")
)
OF_SEVERAL = {"gdpo_reward_keys"}  # of estimators' keys: the reward reads these whatever the estimator
# Each switch, to the keys that have no effect while it is off.
SWITCHES: dict[str, tuple[str, ...]] = {
    switch: tuple(key for key, facts in KEY_FACTS.items() if facts.counts_if == switch)
    for switch in dict.fromkeys(facts.counts_if for facts in KEY_FACTS.values())
    if switch
}


@dataclass(frozen=True)
class UnusedKey:
    """A key that has no effect in a job.

    Args:
        key: dotted.
        reason: why it has no effect.
        is_set: whether the job file or the command line sets it.
    """

    key: str
    reason: str
    is_set: bool


def unused_keys(
    section: Config, overruled: Mapping[str, str], prefix: str = "", reason: str = ""
) -> Iterator[UnusedKey]:
    """Yield the keys that are marked with NoEffect, and those that other keys of the job override.

    Args:
        section: the section.
        overruled: dotted key, or section (for all its keys), to the reason.
        prefix: prefix of the section's keys.
        reason: why the whole section is overridden; empty: it is not.
    """
    for name, field in type(section).model_fields.items():
        key = prefix + name
        value = getattr(section, name)
        why = reason or overruled.get(key, "")
        if isinstance(value, Config):
            yield from unused_keys(value, overruled, f"{key}.", why)
            continue
        marks = [mark for mark in field.metadata if isinstance(mark, NoEffect) and mark.value in (None, value)]
        if why or marks:
            yield UnusedKey(key, why or marks[0].reason, name in section.model_fields_set)


def without(data: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Delete dotted keys from nested sections, in place, and return the sections."""
    for key in keys:
        *parents, leaf = key.split(".")
        section = data
        for part in parents:
            section = section[part]
        del section[leaf]
    return data


def overruled_keys(job: JobSections) -> dict[str, str]:
    """Return the dotted keys, or sections (for all their keys), that others override, each with the reason."""
    found = switched_off(job)
    if job.ref_in_actor:
        found["reference"] = "with actor.model.lora_rank the reference is the actor with its adapter off"
    if not job.engine.on_device:
        found["rollout.free_cache_engine"] = f"the servers of engine {job.engine.name} keep their memory"
    if job.trainer.resume_mode != "resume_path":
        found["trainer.resume_from_path"] = f"trainer.resume_mode is {job.trainer.resume_mode}"
    if not job.rollout.multi_turn.enable:
        keys = type(job.rollout.multi_turn).model_fields.keys() - {"enable"}
        found |= {f"rollout.multi_turn.{key}": "rollout.multi_turn.enable is false" for key in keys}
    return found


def switched_off(job: JobSections) -> dict[str, str]:
    """Return the dotted keys whose value is not the default and has no effect, each with the reason.

    Of a switch that the job file itself sets to its default, nothing is returned: that is intended.
    """
    return {
        key: reason
        for key, reason, switch in _off(job)
        if _chosen(job, key) and not (switch and _is_meant(job, switch))
    }


def without_effect(job: JobSections) -> set[str]:
    """Return all dotted keys that another key switches off, whatever their values, and intended or not."""
    return {key for key, _, _ in _off(job)}


def _off(job: JobSections) -> Iterator[tuple[str, str, str]]:
    """Yield each key that has no effect, the reason, and the switch that is off; empty: it is no switch.

    A page of a plug-in may read any key, so only keys of built-in pages are checked.
    """
    if job.page.origin != BUILT_IN:
        return
    for switch, keys in SWITCHES.items():
        if not (value := value_at(job, switch)):
            said = "not set" if value is None else str(value).lower()
            yield from ((key, f"{switch} is {said}", switch) for key in keys)
    if job.rollout.mode == "sync":
        yield "trainer.max_staleness", "rollout.mode is sync", "rollout.mode"
    kl_ctrl = job.algorithm.kl_ctrl
    if job.algorithm.use_kl_in_reward and kl_ctrl.type == "fixed":
        reason = f"{KL_CTRL}.type is fixed"
        yield from ((f"{KL_CTRL}.{key}", reason, f"{KL_CTRL}.type") for key in ("horizon", "target_kl"))
    if job.trainer.save_freq < 1 and not job.trainer.save_best:
        reason = f"trainer.save_freq is {job.trainer.save_freq}"
        yield "trainer.max_actor_ckpt_to_keep", reason, "trainer.save_freq"
    yield from _budgets(job)
    yield from ((key, reason, "") for key, reason in (*_overruled(job), *_without_answers(job)))


def _budgets(job: JobSections) -> Iterator[tuple[str, str, str]]:
    """Yield the limits on the tokens of a pass, where passes have a fixed number of rows."""
    own = {"critic": job.critic.use_dynamic_bsz, "reference": job.reference.log_prob_use_dynamic_bsz}
    if not job.actor.use_dynamic_bsz:
        follow = [role for role, uses in own.items() if uses is None and role in job.roles]
        for role in follow if own["reference"] else ["actor", *follow]:  # whose budget the reference may have
            yield job.max_tokens_key(role), "actor.use_dynamic_bsz is false", "actor.use_dynamic_bsz"


def _overruled(job: JobSections) -> Iterator[tuple[str, str]]:
    for role, optim in (("actor", job.actor.optim), ("critic", job.critic.optim)):
        if optim.lr_warmup_steps > 0:
            steps = f"{role}.optim.lr_warmup_steps"
            yield f"{steps}_ratio", f"{steps} is {optim.lr_warmup_steps}"
    for section, sampling in (("rollout", job.rollout), ("rollout.val_kwargs", job.rollout.val_kwargs)):
        if sampling.do_sample and sampling.temperature == 0:
            yield from ((f"{section}.{key}", f"{section}.temperature is 0") for key in ("top_k", "top_p"))
    if path := job.reward.custom_reward_function.path:  # a manager of a plug-in is given the rules without one
        of_gsm8k = {"reward.answer_chars"} if job.rollout.multi_turn.enable else set()  # the interaction's, too
        yield from ((key, f"{OWN}.path is {path}") for key in OF_RULES if key not in of_gsm8k)
    if job.algorithm.use_pf_ppo and (method := job.algorithm.pf_ppo.reweight_method) != "pow":
        yield "algorithm.pf_ppo.weight_pow", f"algorithm.pf_ppo.reweight_method is {method}"
    used = {*job.estimator.keys, *OF_SEVERAL}
    reason = f"algorithm.adv_estimator is {job.estimator.name}"
    if not job.estimates:
        used = OF_SEVERAL
        reason = f"algorithm.page {job.page.name} computes no advantages"
    of_estimators = {key for each in ESTIMATORS.values() for key in each.keys}
    for key in (of_estimators - used) & type(job.algorithm).model_fields.keys():
        yield f"algorithm.{key}", reason
    loss = job.policy_loss
    reason = f"the policy loss is {job.policy_loss.name}"
    read = _fields(*loss.keys, *loss.choose_keys)
    if loss.name == "bypass" and (loss_type := job.algorithm.rollout_correction.loss_type) != "ppo_clip":
        read = set()
        reason = f"{CORRECTION}.loss_type is {loss_type}"
    of_losses = _fields(*(key for each in POLICY_LOSSES.values() for key in (*each.keys, *each.choose_keys)))
    for key in of_losses - read:
        for section in ("actor", "actor.policy_loss"):
            if key in type(_section(job, section)).model_fields:
                yield f"{section}.{key}", reason
    ends = {"clip_ratio_low": job.actor.clip_ratio_low, "clip_ratio_high": job.actor.clip_ratio_high}
    if None not in ends.values() and "clip_ratio" in read - {*loss.keys, *loss.choose_keys}:
        yield "actor.clip_ratio", f"{' and '.join(ends)} are set"
    if job.page.learns_from == "pairs":
        yield "data.truncation", f"algorithm.page {job.page.name} cuts no pair"
    elif job.data.filter_overlong_prompts:
        yield "data.truncation", "data.filter_overlong_prompts is true"
    if not (mode := job.actor.loss_agg_mode).endswith("-norm"):
        yield "actor.loss_scale_factor", f"actor.loss_agg_mode is {mode}"
    elif loss.aggregation and not (job.actor.entropy_coeff or job.actor.use_kl_loss):
        yield "actor.loss_scale_factor", f"the policy loss {loss.name} always uses {loss.aggregation}"
    if not (mode := job.critic.loss_agg_mode or mode).endswith("-norm"):
        yield "critic.loss_scale_factor", f"critic.loss_agg_mode is {mode}"


def _without_answers(job: JobSections) -> Iterator[tuple[str, str]]:
    """Yield keys that compare engine and actor, and those of conversations, where there is nothing of them."""
    correction = job.algorithm.rollout_correction
    limit = "trainer.max_rollout_kl"
    limits = job.trainer.max_rollout_kl is not None
    if not job.generates:
        reason = f"algorithm.page {job.page.name} answers no prompts"
        yield from ((f"{CORRECTION}.{key}", reason) for key in type(correction).model_fields)
        yield from ((key, reason) for key in ("rollout.multi_turn.enable", *[limit] * limits))
    elif limits and correction.bypass_mode:
        yield limit, f"{CORRECTION}.bypass_mode is true"
    elif limits and job.steps_ahead:
        yield limit, "rollout.mode is async"


def _fields(*keys: str) -> set[str]:
    """Return the fields of the keys that a loss declares: two fields hold each end of its clip range."""
    ends = {end: ("clip_ratio", f"clip_ratio_{end.removeprefix('clip_')}") for end in ("clip_low", "clip_high")}
    return {field for key in keys for field in ends.get(key, (key,))}


def _is_meant(job: JobSections, switch: str) -> bool:
    """Return whether the job file itself sets the switch, to its default.

    A null does not count: files of verl write it for every key that is not set.
    """
    section, _, name = switch.rpartition(".")
    inner = _section(job, section)
    value = getattr(inner, name)
    return (
        name in inner.model_fields_set
        and value is not None
        and bool(value == type(inner).model_fields[name].default)
    )


def _chosen(job: JobSections, key: str) -> bool:
    section, _, name = key.rpartition(".")
    inner = _section(job, section)
    return bool(getattr(inner, name) != type(inner).model_fields[name].default)


def _section(job: JobSections, name: str) -> Config:
    section = value_at(job, name)
    assert isinstance(section, Config), "each key is in a section"
    return section
