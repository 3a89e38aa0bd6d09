"""Every key of the job file has an effect that can be named: code outside the schema reads it, or the schema
says that it has none. Found in the sources, by the types that they declare, without running them."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import pytest
from key_readers import ROOT, Sources, keys
from launched import rolemesh as command
from pydantic import Field

from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.catalog.reward_managers import REWARD_MANAGERS, RewardManagerSpec
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import Config, JobConfig, load_job, parse_overrides
from rolemesh.config.actor import ActorConfig, PolicyLossConfig
from rolemesh.config.algorithm import AlgorithmConfig
from rolemesh.config.base import NoEffect
from rolemesh.config.job import make_job
from rolemesh.config.job_sections import KEY_FACTS
from rolemesh.config.key_facts import FREE, REFUSED, Key, KeyFacts, key_facts
from rolemesh.config.rollout import RolloutConfig
from rolemesh.config.unused_keys import SWITCHES
from rolemesh.services.controller.job_warnings import warn_of_unused_keys
from rolemesh.services.rollout.engines.vllm.engine_args import ENGINE

# Keys that code takes by name from a table: by getattr.
TABLES: dict[type[Config], set[str]] = {
    AlgorithmConfig: {key for estimator in ESTIMATORS.values() for key in estimator.keys},
    RolloutConfig: set(ENGINE),
    JobConfig: {"plugins"},  # imported before the job is made
    ActorConfig: {key for loss in POLICY_LOSSES.values() for key in (*loss.keys, *loss.choose_keys)}
    | {"clip_ratio", "clip_ratio_low", "clip_ratio_high"},  # clip_low and clip_high
    PolicyLossConfig: {key for loss in POLICY_LOSSES.values() for key in (*loss.keys, *loss.choose_keys)},
}


def has_no_effect(section: type[Config], name: str) -> bool:
    """Whatever its value."""
    return any(isinstance(m, NoEffect) and m.value is None for m in section.model_fields[name].metadata)


def effective(readers: set[str]) -> set[str]:
    unused = (
        "rolemesh/checks/",
        "rolemesh/planner/",
        "rolemesh/config/cross_checks.py",
        "rolemesh/config/unused_keys.py",
        "services/command_line/plan_command.py",
        "services/controller/run/resume_compat.py",
    )
    return {reader for reader in readers if not reader.startswith(unused)}


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def test_every_key_is_read_or_is_said_to_have_no_effect(sources: Sources) -> None:
    """A new key needs code that reads it, or a reason in the schema why it changes nothing. Readers that change
    nothing do not count: plans, and the settings that a checkpoint is compared with."""
    ignored = []
    for key, section, name in keys(JobConfig):
        in_a_table = name in TABLES.get(section, ())
        if (
            not in_a_table
            and not has_no_effect(section, name)
            and not effective(sources.readers(section, name))
        ):
            ignored.append(key)
    assert ignored == []


def test_nothing_reads_a_key_that_is_said_to_have_no_effect(sources: Sources) -> None:
    marked = [(section, name) for _, section, name in keys(JobConfig) if has_no_effect(section, name)]
    assert len(marked) == 11
    assert [(s, n) for s, n in marked if n in TABLES.get(s, ()) or effective(sources.readers(s, n))] == []


def test_the_decision_lists_every_key_without_effect() -> None:
    (text,) = (path.read_text() for path in (ROOT / "docs" / "decisions").glob("0009-*.md"))
    marked = {key for key, section, name in keys(JobConfig) if has_no_effect(section, name)}
    assert {key for key in marked if f"`{key}`" not in text} == set()


def test_readers_are_found_through_types_properties_and_names(sources: Sources) -> None:
    def readers(dotted: str) -> set[str]:
        (found,) = (sources.readers(section, name) for key, section, name in keys(JobConfig) if key == dotted)
        return found

    assert "rolemesh/training/optimizer.py: Optimizer.__init__" in readers(
        "critic.optim.lr"
    )  # by its base class
    assert "services/reward/worker.py: RewardWorker._columns" in readers(
        "reward.overlong_buffer.log"
    )  # tells_more
    assert readers("trainer.max_actor_ckpt_to_keep") == {"services/controller/run/loop.py: Run.__init__"}
    assert readers("reference.model.enable_gradient_checkpointing") == set()  # the actor's is read
    assert "rolemesh/training/update_loop.py: checkpoint_activations" in readers(
        "actor.model.enable_gradient_checkpointing"
    )


# ------------------------------------------------------------- the keys that a role reads

ALL = tuple(ROLES)
TRAINED = tuple(name for name, role in ROLES.items() if role.trained)
OWNER = ("the role whose section has the key",)
# Sections of classes that several roles have: code that reads a role's own is found to read the others', too.
LIKE_OTHERS = re.compile(r"(critic|reference)\.|.*\.(model|fsdp_config|optim)\.")
# Which roles run the code of "READER reads KEY"; the first pattern that fits counts.
RUNS: dict[str, tuple[str, ...]] = {
    **{f"rolemesh/methods.py: {role}_methods reads *": (role,) for role in ROLES},
    # Others read the parameters of training, by the same base class.
    "rolemesh/* reads rollout.val_kwargs.*": ("rollout",),
    "services/actor/* reads rollout.val_kwargs.*": ("rollout",),
    "services/actor/worker.py: PolicyWorker.*": ("actor", "reference"),
    "services/actor/worker.py: ReferenceWorker.*": ("reference",),
    "services/actor/*": ("actor",),
    "services/critic/*": ("critic",),
    "services/reward/*": ("reward",),
    "rolemesh/rules/sources.py: rule_of *": ("reward",),
    "rolemesh/rules/checking.py: *": (),  # before a run begins
    "services/rollout/*": ("rollout",),
    "services/environment/*": ("environment",),
    "services/processes/serve.py: _with_ranks *": OWNER,
    "services/processes/serve.py: *": ALL,
    **dict.fromkeys(("services/controller/*", "services/command_line/*", "services/processes/*"), ()),
    "rolemesh/python_interface.py: *": (),
    "rolemesh/methods.py: _kept *": ("actor", "rollout", "reference"),
    "rolemesh/methods.py: methods reads data.*": tuple(role for role in ROLES if role != "environment"),
    "rolemesh/methods.py: methods *": (),  # sizes of columns, which the functions above name
    "rolemesh/roles.py: Roles.of *": (),
    "rolemesh/algos/kl.py: KLController.*": (),
    **dict.fromkeys(("rolemesh/algos/learning_rate.py: *", "rolemesh/training/optimizer.py: *"), OWNER),
    "rolemesh/ranks/*": OWNER,
    "rolemesh/algos/*": ("actor",),
    **dict.fromkeys(
        ("rolemesh/training/*", "rolemesh/rpc/serving/trained.py: *", "rolemesh/home.py: *"), TRAINED
    ),
    "rolemesh/models/micro_batches.py: *": ("actor", "critic", "reference"),
    "rolemesh/models/*": OWNER,
    "rolemesh/workers/numerics.py: allocator_settings *": (),  # no answer depends on the allocator
    "rolemesh/workers/trained_worker.py: *": TRAINED,
    "rolemesh/workers/*": ALL,
    **dict.fromkeys(("rolemesh/checks/*", "rolemesh/planner/*", "rolemesh/graph/*"), ()),
    **dict.fromkeys(("rolemesh/data/*", "rolemesh/config/*"), ()),
    "rolemesh/fingerprint.py: *": (),
}
NOT_COMPARED = {
    "trainer.experiment_name": "every call names it",
    "trainer.default_local_dir": "the terms of controllers name it",
    "trainer.device": "pods with GPUs are given cuda, and those without take a CPU",
    "trainer.progress_timeout_s": "says when a role that hangs is ended, not what a role answers",
    "plugins": "the content counts for every role",
}


def running(reader: str, key: str) -> set[str]:
    """The roles that run the code of a reader."""
    read = f"{reader} reads {key}"
    roles = next((roles for pattern, roles in RUNS.items() if fnmatchcase(read, pattern)), None)
    assert roles is not None, f"{key}: which roles run {reader}? Add it to RUNS"
    if roles == OWNER or LIKE_OTHERS.match(key):
        return {key.partition(".")[0]} & {*ROLES}
    return {*roles}


def test_a_role_declares_exactly_the_keys_that_its_code_reads(sources: Sources) -> None:
    """Its fingerprint is made of these. Of its own section a role may declare all."""
    needed: dict[str, set[str]] = {role: set() for role in ROLES}
    for key, section, name in keys(JobConfig):
        for reader in sources.readers(section, name):
            for role in running(reader, key):
                needed[role].add(key)
    for reader in sources.readers(ActorConfig, "model"):  # e.g. for its tokenizer
        for role in running(reader, "actor.model"):
            needed[role] |= {f"actor.model.{name}" for name in ("path", "revision", "trust_remote_code")}
    for role, spec in ROLES.items():
        follows = spec.model_key != "actor.model" and spec.model_key.partition(".")[0] == role
        if follows and role != "reward":  # its own key has the actor's value then
            needed[role] -= {f"actor.model.{name}" for name in ("path", "revision", "trust_remote_code")}
        reads = tuple(f"{key}." for key, facts in KEY_FACTS.items() if role in facts.read_by)
        declared = {key for key, _, _ in keys(JobConfig) if f"{key}.".startswith(reads)}
        assert needed[role] - declared - {*NOT_COMPARED} == set(), role
        in_a_table = {key for key, section, name in keys(JobConfig) if name in TABLES.get(section, ())}
        own = {key for key in declared if key.partition(".")[0] == role}
        assert declared - needed[role] - own - in_a_table == set(), role
    assert all(facts.read_by for facts in KEY_FACTS.values() if facts.content)


class Undeclared(Config):
    momentum: float = Field(0.9)


class Inherits(ActorConfig):
    FACTS: ClassVar[dict[str, KeyFacts]] = {"clip_ratio": KeyFacts(FREE)}

    ppo_epochs: int = Key(1, REFUSED)


class Misspelt(Inherits):
    FACTS: ClassVar[dict[str, KeyFacts]] = {"clip_ratios": KeyFacts(FREE)}


class Depends(Config):
    momentum: float = Key(0.9, FREE, counts_if="adam.enable")


def test_the_facts_of_a_key_are_those_of_the_nearest_class_that_has_some() -> None:
    base, found = key_facts(ActorConfig, "actor."), key_facts(Inherits, "actor.")
    assert {key: facts.at_resume for key, facts in found.items() if facts != base[key]} == {
        "actor.clip_ratio": FREE,
        "actor.ppo_epochs": REFUSED,
    }


def test_a_key_without_facts_does_not_load() -> None:
    with pytest.raises(TypeError, match="FACTS of Misspelt name clip_ratios, which it does not inherit"):
        key_facts(Misspelt, "actor.")
    with pytest.raises(TypeError, match=r"key momentum counts if adam\.enable is set, but there"):
        key_facts(Depends)
    with pytest.raises(TypeError, match=r"key actor\.optim\.momentum has no facts"):
        key_facts(Undeclared, "actor.optim.")
    with pytest.raises(ValueError, match="read_by names judge; roles are actor, rollout"):
        KeyFacts(FREE, read_by=("actor", "judge"))


NAMED = {
    "reference.model.enable_gradient_checkpointing": "false",
    "reference.model.enable_activation_offload": "true",
    "reward.reward_model.model.enable_gradient_checkpointing": "true",
    "rollout.load_format": "auto",
    "rollout.calculate_log_probs": "true",
    "rollout.prompt_length": "512",
    "rollout.response_length": "512",
    "rollout.agent.num_workers": "4",
    "rollout.multi_turn.max_parallel_calls": "2",
    "reward.reward_manager": "prime",
}


# A value other than the default, for each key of SWITCHES.
OTHER = {
    **dict.fromkeys((key for keys_ in SWITCHES.values() for key in keys_), "0.5"),
    "actor.kl_loss_type": "abs",
    "algorithm.kl_penalty": "abs",
    "algorithm.kl_ctrl.horizon": "5",
    "algorithm.pf_ppo.reweight_method": "max_min",
    "algorithm.filter_groups.metric": "score",
    "algorithm.rollout_correction.rollout_is_threshold": "3.0",
    "actor.model.lora_alpha": "32",
    "actor.model.target_modules": "[q_proj]",
    "data.seed": "7",
    "reward.custom_reward_function.name": "score",
    "reward.custom_reward_function.reward_kwargs": "{cap: 2}",
    "reward.reward_model.model.path": "judge",
    "reward.overlong_buffer.len": "4",
    "reward.overlong_buffer.log": "true",
    "rollout.top_k": "5",
}


BUDGETS = {
    "actor": "ppo_max_token_len_per_gpu",
    "critic": "ppo_max_token_len_per_gpu",
    "reference": "log_prob_max_token_len_per_gpu",
}


def test_a_key_without_effect_is_warned_of_only_if_it_is_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warnings(*overrides: str) -> list[str]:
        caplog.clear()
        warn_of_unused_keys(make_job(parse_overrides(overrides)))
        return [record.getMessage() for record in caplog.records]

    assert warnings() == []
    assert warnings("reward.reward_manager=naive") == []
    for key, value in NAMED.items():
        (line,) = warnings(f"{key}={value}")
        assert line.startswith(f"{key} has no effect: ")
    assert len(warnings(*(f"{key}={value}" for key, value in NAMED.items()))) == len(NAMED)


def test_beside_an_adapter_no_key_of_the_reference_has_an_effect() -> None:
    adapter = ("actor.model.lora_rank=8", "algorithm.use_kl_in_reward=true")
    rows = "reference.log_prob_micro_batch_size_per_gpu=4"
    assert not [unused for unused in make_job(parse_overrides([rows])).unused_keys() if unused.is_set]
    unused_keys = make_job(parse_overrides([rows, *adapter])).unused_keys()
    assert [unused.key for unused in unused_keys if unused.is_set] == [rows.partition("=")[0]]
    reference = {key for key, _, _ in keys(JobConfig) if key.startswith("reference.")}
    assert reference <= {unused.key for unused in unused_keys}


def test_a_key_that_another_one_overrules_is_warned_of() -> None:
    def warned(*overrides: str) -> list[str]:
        return [unused.key for unused in make_job(parse_overrides(overrides)).unused_keys() if unused.is_set]

    where = "trainer.resume_from_path=runs/global_step_3"
    assert warned(where) == ["trainer.resume_from_path"]
    assert warned(where, "trainer.resume_mode=resume_path") == []
    servers = ("rollout.name=openai", "rollout.openai.urls=[http://a:1]", "rollout.openai.weights_dir=/shared")
    assert warned("rollout.free_cache_engine=false", *servers) == ["rollout.free_cache_engine"]
    assert warned("rollout.free_cache_engine=false") == []


def test_a_switched_off_value_is_warned_of_and_a_default_is_not() -> None:
    """Another key switches the value off."""

    def warned(*overrides: str) -> dict[str, str]:
        unused_keys = make_job(parse_overrides(overrides)).unused_keys()
        return {unused.key: unused.reason for unused in unused_keys if unused.is_set}

    for switch, keys_ in SWITCHES.items():
        for key in keys_:
            value: Any = make_job({})
            for part in key.split("."):
                value = getattr(value, part)
            off = f"{switch}=false" if switch in ("data.shuffle", "rollout.do_sample") else ""
            assert warned(*filter(None, [off, f"{key}={json.dumps(value)}"])) == {}, key
            found = warned(*filter(None, [off, f"{key}={OTHER[key]}"]))
            assert list(found) == [key]
            assert found[key].startswith(f"{switch} is ")
    both = warned("critic.optim={lr_warmup_steps: 3, lr_warmup_steps_ratio: 0.1}")
    assert both == {"critic.optim.lr_warmup_steps_ratio": "critic.optim.lr_warmup_steps is 3"}
    for said in ("true", "false"):  # written, so meant
        assert warned("actor.kl_loss_coef=0.01", f"actor.use_kl_loss={said}") == {}
    own_kwargs = "reward.custom_reward_function={path: null, reward_kwargs: {a: 1}}"  # verl writes each null
    assert warned(own_kwargs) == {
        "reward.custom_reward_function.reward_kwargs": "reward.custom_reward_function.path is not set"
    }
    assert warned("trainer.max_staleness=2", "rollout.mode=sync") == {}
    assert warned("actor.tau_pos=2") == {"actor.tau_pos": "the policy loss is vanilla"}
    assert warned("actor.tau_pos=2", "actor.policy_loss.loss_mode=sapo") == {}
    assert warned("actor.clip_ratio_c=4", "actor.policy_loss.loss_mode=sapo").keys() == {"actor.clip_ratio_c"}
    unread = {"actor.clip_ratio": 0.3, "actor.clip_ratio_low": 0.1, "actor.clip_ratio_high": 0.4}
    unread |= {"actor.clip_ratio_c": 4}
    clips = [f"{key}={value}" for key, value in unread.items()]
    beside = {"actor.clip_ratio": "clip_ratio_low and clip_ratio_high are set"}
    assert warned(*clips) == beside
    assert warned(clips[0], clips[1]) == warned(clips[0], clips[2]) == {}
    gspo = warned(*clips, "actor.policy_loss.loss_mode=gspo")
    assert gspo.keys() == {"actor.clip_ratio", "actor.clip_ratio_c"}
    assert warned(*clips, "actor.policy_loss.loss_mode=gpg").keys() == unread.keys()
    correction = "algorithm.rollout_correction={bypass_mode: true, loss_type: %s}"
    assert warned(*clips, correction % "ppo_clip") == beside
    reason = "algorithm.rollout_correction.loss_type is reinforce"
    assert warned(*clips, correction % "reinforce") == dict.fromkeys(unread, reason)
    greedy = warned("rollout.val_kwargs={do_sample: true, temperature: 0, top_k: 5}")
    assert greedy == {"rollout.val_kwargs.top_k": "rollout.val_kwargs.temperature is 0"}
    assert warned("trainer.max_staleness=2") == {"trainer.max_staleness": "rollout.mode is sync"}
    own = "reward.custom_reward_function.path=mine.py"
    assert warned(own, "reward.rules=verl", "reward.custom_reward_function.name=score") == {
        "reward.rules": "reward.custom_reward_function.path is mine.py"
    }
    chars = "reward.answer_chars=9"
    assert warned(own, chars) == {"reward.answer_chars": "reward.custom_reward_function.path is mine.py"}
    assert warned(own, chars, "rollout.multi_turn.enable=true") == {}  # the interaction gsm8k reads it
    manager = RewardManagerSpec(name="own", code=lambda compute_score, rows: [])
    with REWARD_MANAGERS.adding(manager):  # it is given the rules
        assert warned("reward={reward_manager: own, rules: verl, format_score: 0.1}") == {}
    kl = "algorithm={use_kl_in_reward: true, kl_ctrl: {target_kl: 0.2}}"
    assert warned(kl) == {"algorithm.kl_ctrl.target_kl": "algorithm.kl_ctrl.type is fixed"}
    assert warned(kl, "algorithm.kl_ctrl.type=fixed") == warned(kl, "algorithm.kl_ctrl.type=adaptive") == {}
    pf_ppo = "algorithm={use_pf_ppo: true, pf_ppo: {weight_pow: 3, reweight_method: %s}}"
    assert warned(pf_ppo % "pow") == {}
    assert warned(pf_ppo % "max_min") == {
        "algorithm.pf_ppo.weight_pow": "algorithm.pf_ppo.reweight_method is max_min"
    }
    bound = "trainer.max_rollout_kl=0.1"
    ahead = ("rollout.mode=async", "trainer.max_staleness=1")
    assert warned(bound) == warned(*ahead, "trainer.max_rollout_kl=null") == {}
    assert warned(bound, *ahead) == {"trainer.max_rollout_kl": "rollout.mode is async"}
    assert warned(bound, "rollout.mode=async", "trainer.max_staleness=0") == {}
    assert warned(bound, correction % "ppo_clip") == {
        "trainer.max_rollout_kl": "algorithm.rollout_correction.bypass_mode is true"
    }
    lam = warned("algorithm={adv_estimator: grpo, lam: 0.95}", "rollout.n=2")
    assert lam == {"algorithm.lam": "algorithm.adv_estimator is grpo"}
    none = "algorithm.page sft computes no advantages"
    assert warned("algorithm={page: sft, lam: 0.95, gamma: 0.9}") == {
        "algorithm.lam": none,
        "algorithm.gamma": none,
    }
    assert warned("algorithm={lam: 0.95, gamma: 0.9}") == {}
    factors = ("actor.loss_scale_factor=64", "critic.loss_scale_factor=64")
    whole = {f"{role}.loss_scale_factor": f"{role}.loss_agg_mode is token-mean" for role in ("actor", "critic")}
    assert warned(*factors) == whole
    assert warned(*factors, "actor.loss_agg_mode=seq-mean-token-sum-norm") == {}
    norm = ("actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.policy_loss.loss_mode=sapo", factors[0])
    sapo = {"actor.loss_scale_factor": "the policy loss sapo always uses seq-mean-token-mean"}
    assert warned(*norm) == sapo
    assert warned(*norm, "actor.entropy_coeff=0.01") == {}


def test_limits_of_what_does_not_happen_are_warned_of() -> None:
    """Of cuts, of the tokens of a pass, and of the number of checkpoints."""

    def warned(*overrides: str) -> dict[str, str]:
        unused_keys = make_job(parse_overrides(overrides)).unused_keys()
        return {unused.key: unused.reason for unused in unused_keys if unused.is_set}

    cut, left_out = "data.truncation=left", "data.filter_overlong_prompts=true"
    assert warned(cut) == warned(left_out, "data.truncation=error") == {}
    assert warned(cut, left_out) == {"data.truncation": "data.filter_overlong_prompts is true"}
    assert warned(cut, "algorithm.page=sft") == {}
    assert warned(cut, "algorithm.page=dpo") == {"data.truncation": "algorithm.page dpo cuts no pair"}

    def budgets(*overrides: str) -> set[str]:
        keys_ = {f"{role}.{job_key}": 50_000 for role, job_key in BUDGETS.items()}
        return warned(*(f"{key}={value}" for key, value in keys_.items()), *overrides).keys() & keys_.keys()

    with_kl, dynamic = "actor.use_kl_loss=true", "actor.use_dynamic_bsz=true"
    assert budgets(with_kl) == {f"{role}.{job_key}" for role, job_key in BUDGETS.items()}
    assert budgets(with_kl, dynamic) == budgets(with_kl, "actor.use_dynamic_bsz=false") == set()
    assert budgets(with_kl, "critic.use_dynamic_bsz=true") == {
        "actor.ppo_max_token_len_per_gpu",
        "reference.log_prob_max_token_len_per_gpu",
    }
    own = "reference.log_prob_use_dynamic_bsz=true"  # with the actor's limit, if it has none
    assert budgets(with_kl, own) == {"critic.ppo_max_token_len_per_gpu"}
    grpo = ("algorithm.adv_estimator=grpo", "rollout.n=2")  # without critic and reference
    assert budgets(*grpo) == {"actor.ppo_max_token_len_per_gpu"}

    two = "trainer.max_actor_ckpt_to_keep=2"
    assert warned(two) == {"trainer.max_actor_ckpt_to_keep": "trainer.save_freq is -1"}
    best = "trainer={save_best: val/loss, test_freq: 1}"
    assert warned(two, "trainer.save_freq=5") == warned(two, best) == warned(two, "trainer.save_freq=-1") == {}


def test_the_resolved_job_file_begins_with_the_same_warnings(tmp_path: Path) -> None:
    for overrides in ([], [f"{key}={value}" for key, value in NAMED.items()], ["actor.model.lora_rank=8"]):
        job = make_job(parse_overrides(["actor.use_kl_loss=true", *overrides]))
        (tmp_path / "config.yaml").write_text(job.to_yaml())
        again = load_job(tmp_path / "config.yaml")
        assert again == job
        set_keys = [[unused.key for unused in either.unused_keys() if unused.is_set] for either in (job, again)]
        assert set_keys[0] == set_keys[1]


async def test_a_run_begins_with_the_warning() -> None:
    addresses = [word for role in ("actor", "rollout", "reward") for word in (f"--{role}", "127.0.0.1:1")]
    wrong = ("reward.reward_manager=prime", "actor.model.path=nowhere")
    config = str(ROOT / "configs" / "tiny.yaml")
    async with command("control", "--config", config, *addresses, *wrong) as launched:
        _, output = await launched.end()
    lines = output.splitlines()
    assert [line for line in lines if "reward.reward_manager has no effect: prime does what naive does" in line]
    assert len([line for line in lines if "has no effect" in line]) == 1
    assert "no such model directory: nowhere" in lines[-1]
