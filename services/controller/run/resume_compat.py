"""The settings that a resume compares: what a checkpoint holds of them, and how a job is compared with it.

What a resume does with another value is declared with each key (rolemesh/config/key_facts.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.plugin_imports import used_plugins
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.base import value_at
from rolemesh.config.job_sections import KEY_FACTS
from rolemesh.config.key_facts import REFUSED, WARNED
from rolemesh.config.unused_keys import without_effect
from rolemesh.config.yaml_file import in_json
from rolemesh.fingerprint import UNREADABLE, content_digest
from rolemesh.models.fetching import models_of

RULES = "reward.rules"
NUM_PROMPTS = "prompts in data.train_files"
PROMPTS = "digest of the tokenised prompts"
COLUMNS = "digest of the prompts' other columns"
VALIDATION = "digest of the validation rows"
FILE = "digest of the file "
STEPS = "trainer.total_training_steps"
BATCH = "data.train_batch_size"
GEN_BATCH = "data.gen_batch_size"
LORA_ALPHA = "actor.model.lora_alpha"
KL_COEF = "algorithm.kl_ctrl.kl_coef"
REFERENCE = "reference.model.path"
REVISION = "revision of {}'s model"
CONVERSATIONS = "rollout.multi_turn.enable"
OF_CONVERSATIONS = ("rollout.multi_turn.", "rollout.agent.")
REWARD_FILE = "reward.custom_reward_function.path"
LOSS = "actor.policy_loss.loss_mode"
THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
AHEAD = "steps that the rollouts may be ahead (rollout.mode, trainer.max_staleness)"
CLIPS = CLIP_LOW, CLIP_HIGH = tuple(
    f"{end} end of the clip range (actor.clip_ratio)" for end in ("lower", "upper")
)
CRITIC = "whether the job has a critic (critic.enable)"
OTHERS = "the other keys of "
UNUSED = "keys without effect"  # of those that are kept: as they say nothing, they are not compared
HINTS = {
    PROMPTS: "The prompts' tokens depend on the content of data.train_files, on the tokenizer and on its chat "
    "template. A template that writes today's date takes the date of the run's beginning from "
    "data.apply_chat_template_kwargs, as in {date_string: 26 Jul 2024}",
    COLUMNS: "The other columns are data_source, reward_model and extra_info, and in conversations agent_name "
    "and messages: what rewards, tools and interactions read",
    VALIDATION: "Validations from here on are of other rows, or of the same as another tokenizer or template "
    "writes them; trainer.save_best compares them with earlier ones all the same",
    STEPS: "Where the job does not set trainer.total_training_steps, it follows from trainer.total_epochs and "
    "the number of rows",
}
OF_THE_ROWS = (NUM_PROMPTS, PROMPTS, COLUMNS, VALIDATION)
# Settings that say what several keys mean together, in place of these.
TOGETHER: dict[str, tuple[str, ...]] = {
    CLIP_LOW: ("actor.clip_ratio", "actor.clip_ratio_low"),
    CLIP_HIGH: ("actor.clip_ratio", "actor.clip_ratio_high"),
    AHEAD: ("rollout.mode", "trainer.max_staleness"),
    CRITIC: ("critic.enable",),
}
# The revision of a model at the Hub, to the key that names the model: with another model it may change as that.
REVISIONS = {REVISION.format(role): f"{spec.model_key}.path" for role, spec in ROLES.items()}
COMPARED = tuple(
    key
    for key, facts in KEY_FACTS.items()
    if facts.at_resume in (REFUSED, WARNED) and not any(key in keys for keys in TOGETHER.values())
)
OF_ROLLOUTS = {key for key in COMPARED if re.fullmatch(r"rollout\.\w+", key)} - {"rollout.n"}
OF_ADVANTAGES = {
    f"algorithm.{key}" for key in ("adv_estimator", "options", "gdpo_reward_keys", "gdpo_reward_weights")
}
OF_VALIDATIONS = {key for key in COMPARED if key.startswith("rollout.val_kwargs.")}
NONE_IF_EMPTY = {"algorithm.page_options", "data.options", "rollout.options", *OF_ADVANTAGES}
ABSENT_IF_UNUSED = re.compile(
    r"(digest of plug-in|revision of) .*"
)  # absent where a job uses no such part or model


def file_digests(job: JobConfig) -> dict[str, str | None]:
    """Return the digests of the files that the job's roles read, by the key that names the file.

    None: the key names no file, or one that this process cannot read.
    """
    paths = {
        key: value_at(job, key)
        for key, facts in KEY_FACTS.items()
        if facts.content and {*facts.read_by} & {*job.roles}
    }
    digests = {key: content_digest(str(path)) if path else None for key, path in paths.items()}
    return {key: None if digest == UNREADABLE else digest for key, digest in digests.items()}


def settings_to_keep(
    job: JobConfig,
    num_prompts: int,
    prompts: str = "",
    columns: str | None = None,
    validation: str | None = None,
    files: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Return the settings that determine the rest of a run, bit for bit.

    They determine a step's prompts, the scores of their responses, its sampled tokens, the waiting groups, the
    learning rates and losses, and what a validation measures. A resumed run must have the same ones, or it
    would be neither the old run nor a new one. Those that are WARNED of are changed on purpose. A role's dtype
    depends on its device, so actor and critic keep theirs in their own files. Where several values mean the
    same, e.g. null and the default of another key, one of them is kept.

    Args:
        job: with its number of steps.
        num_prompts: of the training data.
        prompts: digest of these prompts in token ids.
        columns: digest of their other columns; None if training reads none.
        validation: digest of the validation rows; None without validation.
        files: `file_digests` of the job, as its roles began with them.

    Returns:
        Settings as they come back from a checkpoint, so that the two can be compared: lists for tuples, and
        text for paths. Options of plug-ins may hold these. UNUSED lists those without effect in this job.

    Raises:
        InvalidConfig: the job uses a part of a plug-in that other processes would not import.
    """
    plugins = used_plugins(job.plugins, job.parts)
    settings = {
        **{REVISION.format(role): read.revision or None for role, read in models_of(job).items()},
        **{f"digest of plug-in {name}": digest for name, digest in plugins.items()},
        NUM_PROMPTS: num_prompts,
        PROMPTS: prompts,
        COLUMNS: columns,
        VALIDATION: validation,
        **{f"{FILE}{key}": digest for key, digest in (files or {}).items()},
        CRITIC: None if job.page.origin == BUILT_IN else job.uses_critic,  # adv_estimator and page say it
        **_values(job),
        CLIP_LOW: job.actor.clip_low,
        CLIP_HIGH: job.actor.clip_high,
        AHEAD: job.steps_ahead,
    }
    return dict(in_json(settings | {UNUSED: sorted(_unused(job) & settings.keys())}))


def _unused(job: JobConfig) -> set[str]:
    """Return the keys that change nothing in the rest of a run."""
    keys = without_effect(job) - {LORA_ALPHA}  # None says it, and an adapter is not added half way
    for end, key in ((CLIP_LOW, "actor.clip_ratio_low"), (CLIP_HIGH, "actor.clip_ratio_high")):
        if key in keys:
            keys.add(end)
    if not job.validates:
        keys |= OF_VALIDATIONS
    if not job.generates:
        keys |= OF_ROLLOUTS
    if not job.estimates:
        keys |= OF_ADVANTAGES
    if "reward" not in job.roles:
        keys.add(RULES)
    return keys


def _values(job: JobConfig) -> dict[str, Any]:
    """Return the compared keys of the parts that a job has, each with one value for all that mean the same."""
    whole = job.model_dump()
    values: dict[str, Any] = {}
    for key in COMPARED:
        if _has(job, key):
            values[key] = whole
            for part in key.split("."):
                values[key] = values[key][part]
    low, high = job.algorithm.rollout_correction.bounds
    filter_groups = job.algorithm.filter_groups
    optims = [job.actor.optim, *([job.critic.optim] if job.uses_critic else [])]
    meant = {
        **{key: values[key] or None for key in NONE_IF_EMPTY & values.keys()},
        LORA_ALPHA: job.actor.model.lora_alpha if job.actor.model.lora_rank else None,
        LOSS: job.policy_loss.name if job.page.losses else values[LOSS],  # any other name is the page's first
        KL_COEF: None if job.algorithm.kl_ctrl.type == "adaptive" else values[KL_COEF],  # beta is in the state
        THRESHOLD: high if low is None else f"{low}_{high}",
        "algorithm.page": job.page.name,
        "algorithm.filter_groups.metric": filter_groups.metric if filter_groups.enable else None,
        "data.train_files": [Path(file).name for file in job.data.train_files],  # directories may move
        GEN_BATCH: None if job.data.prompts_at_once == job.data.train_batch_size else job.data.gen_batch_size,
        STEPS: values[STEPS] if any(optim.depends_on_total for optim in optims) else None,
        REFERENCE: _model_name(job.reference_model.path) if "reference" in job.roles else None,
        REWARD_FILE: values.get(REWARD_FILE) and Path(values[REWARD_FILE]).name,
        **{f"{role}.ppo_mini_batch_size": job.mini_batch_size(role) for role in ("actor", "critic")},
    }
    return {key: meant.get(key, value) for key, value in values.items()}


def _model_name(path: str) -> str:
    """Return a model's name: its directory may move. In a checkpoint every model of a role has the same one."""
    at = Path(path)
    return f"{at.parent.name}/{at.name}" if at.parent.name.startswith("global_step_") else at.name


def _has(job: JobConfig, key: str) -> bool:
    """Return whether a job has the part that a key is of. A checkpoint always has the three keys below."""
    if key in (RULES, "rollout.n", "rollout.options"):
        return True
    if key.startswith(OF_CONVERSATIONS) and key != CONVERSATIONS:
        return job.rollout.multi_turn.enable
    parts = {"critic": job.uses_critic, "rollout": job.generates, "reward": "reward" in job.roles}
    return parts.get(key.partition(".")[0], True)


def _may_change(setting: str) -> bool:
    """Return whether a resume only warns of another value."""
    keys = TOGETHER.get(setting, (REVISIONS.get(setting, setting),))
    learns = all(key in KEY_FACTS and KEY_FACTS[key].at_resume is WARNED for key in keys)
    return learns or setting.startswith((FILE, VALIDATION))


@dataclass(frozen=True)
class Comparison:
    """How a job's settings compare with those in a checkpoint.

    Args:
        refused: what differs, so that the checkpoint cannot be resumed exactly; a phrase each.
        hints: what these depend on, or if nothing is refused, what a change means; a sentence each.
        changed: what differs and may; a phrase each.
        missing: settings that were not compared, since an earlier version wrote the checkpoint without them.
    """

    refused: list[str]
    hints: list[str]
    changed: list[str]
    missing: list[str]


def compare(kept: Mapping[str, Any], now: Mapping[str, Any], unknown: Collection[str] = ()) -> Comparison:
    """Compare the settings that a checkpoint holds with those of a job.

    A setting that the checkpoint lacks is not compared, since its version did not know the setting. Only one of
    ABSENT_IF_UNUSED is: the checkpoint lacks it because its job did not use that part or model. Nor is one
    compared that has no effect in the job; one that had none in the checkpoint's job may change. A file's
    content is compared if both jobs name a file that could be read, and validation rows if both jobs have some.

    Args:
        kept: `settings_to_keep` of the job that wrote the checkpoint, as its version knew them.
        now: `settings_to_keep` of the job.
        unknown: settings that are left out. They depend on the tools of the prompts, which are not known yet:
            with them a prompt may be too long. But if as many prompts are short enough without tools as had
            been with them, they are of the same rows, and their other columns are compared.
    """
    if kept.get(NUM_PROMPTS) == now.get(NUM_PROMPTS):
        unknown = [key for key in unknown if key != COLUMNS]
    keys = [key for key in {**kept, **now} if key != UNUSED and key not in unknown]
    if CONVERSATIONS in kept and kept[CONVERSATIONS] != now.get(CONVERSATIONS):  # which says it of all of them
        keys = [key for key in keys if key == CONVERSATIONS or not key.startswith(OF_CONVERSATIONS)]
    missing = [key for key in keys if key not in kept and not ABSENT_IF_UNUSED.fullmatch(key)]
    left_out = {*missing, *now.get(UNUSED, ()), *(OF_ROLLOUTS - now.keys())}
    kept = {**kept, GEN_BATCH: None if kept.get(GEN_BATCH) == kept.get(BATCH) else kept.get(GEN_BATCH)}
    differing = [key for key in keys if key not in left_out and kept.get(key) != now.get(key)]
    differing = [k for k in differing if not k.startswith((FILE, VALIDATION)) or (kept.get(k) and now.get(k))]
    moved = {key for key, path in REVISIONS.items() if path not in differing}  # the branch, of the same model
    changed = [
        key for key in differing if (_may_change(key) and key not in moved) or key in kept.get(UNUSED, ())
    ]
    phrases = [f"{key} from {kept.get(key)!r} to {now.get(key)!r}" for key in changed]
    if STEPS in differing and None in (kept[STEPS], now[STEPS]):  # only one of the two schedules depends on it
        phrases.append(f"the learning rate {'now depends' if now[STEPS] else 'no longer depends'} on {STEPS}")
        changed.append(STEPS)
    refused = [key for key in differing if key not in changed]
    names = dict.fromkeys(_shortened(key) for key in missing if now[key] is not None)
    return Comparison(
        [f"{key} is {now.get(key)!r} now and was {kept.get(key)!r}" for key in refused],
        [HINTS[key] for key in refused or changed if key in HINTS],
        phrases,
        sorted(names, key=lambda name: name.startswith(OTHERS)),
    )


def _shortened(key: str) -> str:
    """Return one name for the many keys of a section."""
    section = "actor" if key in CLIPS else key.partition(".")[0]
    named = re.compile(r"\w+\.(optim\..*|ppo_\w+)")
    if section in ("actor", "critic", "algorithm", "reward") and _may_change(key) and not named.fullmatch(key):
        return f"{OTHERS}{section}"
    return re.sub(r"\.(optim|multi_turn|val_kwargs|agent)\..*", r".\1", key)
