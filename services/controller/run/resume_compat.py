"""The settings that a resume compares: what a checkpoint holds of them, and how a job is compared with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.plugin_imports import used_plugins
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.actor import ActorConfig, CriticConfig
from rolemesh.config.algorithm import AlgorithmConfig
from rolemesh.config.base import Config, leaves
from rolemesh.config.reward import RewardConfig
from rolemesh.config.rollout import RolloutConfig
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
AHEAD = "steps that the rollouts may be ahead (rollout.mode, trainer.max_staleness)"
CLIPS = CLIP_LOW, CLIP_HIGH = tuple(
    f"{end} end of the clip range (actor.clip_ratio)" for end in ("lower", "upper")
)
CRITIC = "whether the job has a critic (critic.enable)"
IDLE = "keys without effect"  # of those that are kept: as they say nothing, they are not compared
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
MAY_CHANGE = re.compile(  # a warning, not an error
    r"(actor|critic)\.(optim\.\w+|ppo_mini_batch_size|ppo_epochs)|reward\.(?!rules$).+"
    rf"|rollout\.(multi_turn|val_kwargs|agent)\..+|reference\.model\.path|{FILE}.+|{VALIDATION}"
)
# Keys that are compared by themselves, or that change how a step is computed and not its result.
COMPARED_SEPARATELY = {
    "enable",
    "model",
    "optim",
    "fsdp_config",
    "ulysses_sequence_parallel_size",
    "use_dynamic_bsz",
    "ppo_mini_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "ppo_max_token_len_per_gpu",
    "ppo_epochs",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "adv_estimator",
    "options",
    "page",
    "page_options",
    "gdpo_reward_keys",
    "gdpo_reward_weights",
    "filter_groups",
}
SECTIONS: dict[str, type[Config]] = {"actor": ActorConfig, "critic": CriticConfig, "algorithm": AlgorithmConfig}
LOSS = "actor.policy_loss.loss_mode"
THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
LEARNING = (  # what advantages, losses and updates depend on, beside the optimizers; each may change
    *(
        f"{name}.{key}"
        for name, section in SECTIONS.items()
        for key in leaves(section)
        if key.partition(".")[0] not in COMPARED_SEPARATELY
    ),
    "rollout.name",
    "trainer.critic_warmup",
)
MAY_CHANGE_TOO = {*LEARNING, *CLIPS, AHEAD}
SAMPLING = ("seed", "temperature", "top_k", "top_p", "do_sample", "ignore_eos", "stop")  # keys of rollout
OF_ROLLOUTS = {"rollout.name", "rollout.options", *(f"rollout.{key}" for key in SAMPLING)}
OF_ADVANTAGES = {
    f"algorithm.{key}" for key in ("adv_estimator", "options", "gdpo_reward_keys", "gdpo_reward_weights")
}
SCORING = (  # keys of reward that a score depends on, beside the rules
    *(f"custom_reward_function.{key}" for key in ("path", "name", "reward_kwargs")),
    "reward_manager",
    "options",
    "reward_model.enable",
    "reward_model.model.path",
    *(f"overlong_buffer.{key}" for key in ("enable", "len", "penalty_factor")),
    "format_score",
    "answer_chars",
    "skip_special_tokens",
    "math",
    "timeout_s",
    *(f"sandbox.{key}" for key in ("continuous", "timeout_s", "memory_limit_mb")),
)
OF_PROGRAMS = ("command", "reward_at_limit")  # keys of rollout.agent.external
OF_OPERATION = {"call_timeout_s", "episode_timeout_s", "max_attempts", "max_episodes"}  # keys of multi_turn
ABSENT_IF_UNUSED = re.compile(
    r"(digest of plug-in|revision of) .*"
)  # absent where a job uses no such part or model


def file_digests(job: JobConfig) -> dict[str, str | None]:
    """Return the digests of the files that the job's roles read, by the key that names the file.

    None: the key names no file, or one that this process cannot read.
    """
    keys = [key for role in job.roles for key in ROLES[role].reads_files]
    paths = {key: attrgetter(key)(job) for key in keys}
    digests = {key: content_digest(path) if path else None for key, path in paths.items()}
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
    would be neither the old run nor a new one. Those of LEARNING and those that match MAY_CHANGE are changed on
    purpose, so the resume only warns. A role's dtype depends on its device, so actor and critic keep theirs in
    their own files. Where several values mean the same, e.g. null and the default of another key, one of them
    is kept.

    Args:
        job: with its number of steps.
        num_prompts: of the training data.
        prompts: digest of these prompts in token ids.
        columns: digest of their other columns; None if training reads none.
        validation: digest of the validation rows; None without validation.
        files: `file_digests` of the job, as its roles began with them.

    Returns:
        Settings as they come back from a checkpoint, so that the two can be compared: lists for tuples, and
        text for paths. Options of plug-ins may hold these. IDLE lists those without effect in this job.

    Raises:
        InvalidConfig: the job uses a part of a plug-in that other processes would not import.
    """
    data = job.data
    rollout = job.rollout
    filter_groups = job.algorithm.filter_groups
    model = job.actor.model
    plugins = used_plugins(job.plugins, job.parts)
    optims = [job.actor.optim, *([job.critic.optim] if job.uses_critic else [])]
    settings = {
        **{f"revision of {role}'s model": read.revision or None for role, read in models_of(job).items()},
        LORA_ALPHA: model.lora_alpha if model.lora_rank else None,
        **{f"digest of plug-in {name}": digest for name, digest in plugins.items()},
        "algorithm.adv_estimator": job.algorithm.adv_estimator,
        "algorithm.options": job.algorithm.options or None,
        "algorithm.page": job.page.name,
        "algorithm.page_options": job.algorithm.page_options or None,
        "data.dataset": data.dataset,
        "data.options": data.options or None,
        "algorithm.gdpo_reward_keys": list(job.algorithm.gdpo_reward_keys) or None,
        "algorithm.gdpo_reward_weights": list(job.algorithm.gdpo_reward_weights or ()) or None,
        "algorithm.filter_groups.metric": filter_groups.metric if filter_groups.enable else None,
        "data.train_files": [Path(file).name for file in data.train_files],
        NUM_PROMPTS: num_prompts,
        PROMPTS: prompts,
        COLUMNS: columns,
        VALIDATION: validation,
        **{f"{FILE}{key}": digest for key, digest in (files or {}).items()},
        BATCH: data.train_batch_size,
        GEN_BATCH: data.prompts_at_once if data.prompts_at_once != data.train_batch_size else None,
        "data.shuffle": data.shuffle,
        "data.seed": data.seed,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        RULES: job.reward.rules,
        STEPS: job.trainer.total_training_steps if any(optim.depends_on_total for optim in optims) else None,
        CRITIC: None if job.page.origin == BUILT_IN else job.uses_critic,  # adv_estimator and page say it
        **_optimizer_settings_to_keep(job, "actor"),
        **(_optimizer_settings_to_keep(job, "critic") if job.uses_critic else {}),
        **_learning_settings_to_keep(job),
        # Its name alone: directories may move. A model of the Hub has its revision, too.
        "reference.model.path": Path(job.reference_model.path).name if "reference" in job.roles else None,
        "rollout.n": rollout.n,
        "rollout.options": rollout.options or None,
        **({f"rollout.{key}": getattr(rollout, key) for key in SAMPLING} if job.generates else {}),
        **(_conversation_settings_to_keep(rollout) if rollout.multi_turn.enable else {}),
        **(_scoring_settings_to_keep(job.reward) if "reward" in job.roles else {}),
        **(_validation_settings_to_keep(job) if job.generates else {}),
    }
    return dict(in_json(settings | {IDLE: sorted(_idle(job) & settings.keys())}))


def _idle(job: JobConfig) -> set[str]:
    """Return the keys that change nothing in the rest of a run."""
    keys = without_effect(job) - {LORA_ALPHA}  # None says it, and an adapter is not added half way
    for end, key in ((CLIP_LOW, "actor.clip_ratio_low"), (CLIP_HIGH, "actor.clip_ratio_high")):
        if key in keys:
            keys.add(end)
    if not job.validates:
        keys |= _validation_settings_to_keep(job).keys()
    if not job.generates:
        keys |= OF_ROLLOUTS
    if not job.estimates:
        keys |= OF_ADVANTAGES
    if "reward" not in job.roles:
        keys.add(RULES)
    return keys


def _scoring_settings_to_keep(reward: RewardConfig) -> dict[str, Any]:
    """Return what a response's score depends on, except the content of the user's file."""
    kept = {f"reward.{key}": attrgetter(key)(reward) for key in SCORING}
    if path := reward.custom_reward_function.path:  # its directory may change, as that of the data may
        kept["reward.custom_reward_function.path"] = Path(path).name
    return kept


def _validation_settings_to_keep(job: JobConfig) -> dict[str, Any]:
    """Return how the responses of a validation are sampled."""
    sampling = job.rollout.val_kwargs.model_dump(mode="json")
    return {f"rollout.val_kwargs.{key}": value for key, value in sampling.items()}


def _conversation_settings_to_keep(rollout: RolloutConfig) -> dict[str, Any]:
    """Return what the turns of a conversation depend on, except the content of files."""
    dumped = rollout.multi_turn.model_dump(mode="json", exclude=OF_OPERATION)
    external = {f"rollout.agent.external.{key}": getattr(rollout.agent.external, key) for key in OF_PROGRAMS}
    return {f"rollout.multi_turn.{key}": value for key, value in dumped.items()} | external


def _learning_settings_to_keep(job: JobConfig) -> dict[str, Any]:
    """Return what advantages, losses and updates depend on."""
    absent = tuple(
        f"{name}." for name, there in (("critic", job.uses_critic), ("rollout", job.generates)) if not there
    )
    settings = {key: attrgetter(key)(job) for key in LEARNING if not key.startswith(absent)}
    if job.algorithm.kl_ctrl.type == "adaptive":
        settings[KL_COEF] = None  # beta goes on from the checkpoint's
    if job.page.losses:  # any other name means the page's first
        settings[LOSS] = job.policy_loss.name
    low, high = job.algorithm.rollout_correction.bounds
    settings[THRESHOLD] = high if low is None else f"{low}_{high}"
    settings |= {CLIP_LOW: job.actor.clip_low, CLIP_HIGH: job.actor.clip_high}
    return {**settings, AHEAD: job.steps_ahead}


def _optimizer_settings_to_keep(job: JobConfig, role: Literal["actor", "critic"]) -> dict[str, Any]:
    """Return the settings that the learning rate of an optimizer step depends on, and the optimizer's others.

    The size and number of mini-batches determine to which training step an optimizer step belongs.
    """
    section: ActorConfig | CriticConfig = job.actor if role == "actor" else job.critic
    return {
        **{f"{role}.optim.{key}": value for key, value in section.optim.model_dump(mode="json").items()},
        f"{role}.ppo_mini_batch_size": job.mini_batch_size(role),
        f"{role}.ppo_epochs": section.ppo_epochs,
    }


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
    keys = [key for key in {**kept, **now} if key != IDLE and key not in unknown]
    missing = [key for key in keys if key not in kept and not ABSENT_IF_UNUSED.fullmatch(key)]
    left_out = {*missing, *now.get(IDLE, ()), *(OF_ROLLOUTS - now.keys())}
    kept = {**kept, GEN_BATCH: None if kept.get(GEN_BATCH) == kept.get(BATCH) else kept.get(GEN_BATCH)}
    differing = [key for key in keys if key not in left_out and kept.get(key) != now.get(key)]
    differing = [k for k in differing if not k.startswith((FILE, VALIDATION)) or (kept.get(k) and now.get(k))]
    may_change = {*MAY_CHANGE_TOO, *kept.get(IDLE, ())}
    changed = [key for key in differing if key in may_change or MAY_CHANGE.fullmatch(key)]
    phrases = [f"{key} from {kept.get(key)!r} to {now.get(key)!r}" for key in changed]
    if STEPS in differing and None in (kept[STEPS], now[STEPS]):  # only one of the two schedules depends on it
        phrases.append(f"the learning rate {'now depends' if now[STEPS] else 'no longer depends'} on {STEPS}")
        changed.append(STEPS)
    refused = [key for key in differing if key not in changed]
    return Comparison(
        [f"{key} is {now.get(key)!r} now and was {kept.get(key)!r}" for key in refused],
        [HINTS[key] for key in refused or changed if key in HINTS],
        phrases,
        list(dict.fromkeys(_shortened(key) for key in missing if now[key] is not None)),
    )


def _shortened(key: str) -> str:
    """Return one name for the many keys of a section."""
    section = "actor" if key in CLIPS else key.partition(".")[0]
    learns = key in (*LEARNING, *CLIPS) and section in SECTIONS
    if learns or (section == "reward" and key != RULES):
        return f"the other keys of {section}"
    return re.sub(r"\.(optim|multi_turn|val_kwargs|agent)\..*", r".\1", key)
