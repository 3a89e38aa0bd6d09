"""What a checkpoint keeps of a job's settings, and how the job of a resume is compared with it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.plugin_imports import forget
from rolemesh.catalog.reward_managers import REWARD_MANAGERS, RewardManagerSpec
from rolemesh.config.base import merge
from rolemesh.config.job import JobConfig, make_job
from rolemesh.errors import InvalidConfig
from rolemesh.fingerprint import fingerprint
from rolemesh.plugins import Options
from rolemesh.services.controller.run.checkpoints import Checkpoints, ControllerState
from rolemesh.services.controller.run.resume_compat import (
    COLUMNS,
    NUM_PROMPTS,
    OF_THE_ROWS,
    PROMPTS,
    RULES,
    STEPS,
    VALIDATION,
    Comparison,
    compare,
    file_digests,
    settings_to_keep,
)


@pytest.mark.parametrize(
    ("key", "first", "then"),
    [("gdpo_reward_keys", ["a", "b"], ["b", "a"]), ("gdpo_reward_weights", None, [1.0, 2.0])],
)
def test_waiting_groups_keep_the_components_they_were_scored_by(
    key: str, first: Any, then: Any, tmp_path: Path
) -> None:
    """So a resume refuses other reward components or weights."""
    gdpo = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"]}
    own = {"rollout": {"n": 2}, "reward": {"custom_reward_function": {"path": "mine.py"}}}
    before, now = ({"algorithm": gdpo | {key: value}, **own} for value in (first, then))
    settings = settings_to_keep(make_job(before), 10)
    file, state = tmp_path / "controller.json", ControllerState(1, {}, settings)
    for name in ("same_course", "kept_settings"):  # the earlier name, and today's
        file.write_text(state.to_json().replace("kept_settings", name))
        assert Checkpoints.read(tmp_path, settings).to_json() == state.to_json()
    with pytest.raises(InvalidConfig, match=rf"algorithm\.{key} is .* now and was"):
        Checkpoints.read(tmp_path, settings_to_keep(make_job(now), 10))


@pytest.mark.parametrize(
    ("job", "prompts", "refused"),
    [
        (
            {"optim": {"lr_scheduler_type": "cosine"}},
            ("a", "a"),
            "trainer.total_training_steps is 8 now and was 4",
        ),
        (
            {"optim": {"lr_warmup_steps_ratio": 0.1}},
            ("a", "a"),
            "trainer.total_training_steps is 8 now and was 4",
        ),
        ({"optim": {"lr_warmup_steps": 2}}, ("a", "a"), ""),
        ({}, ("a", "a"), ""),
        (
            {},
            ("a", "b"),
            "digest of the tokenised prompts is 'b' now and was 'a'.*the date of the run's beginning",
        ),
    ],
)
def test_a_resume_refuses_changed_schedules_and_prompts(
    job: dict[str, Any], prompts: tuple[str, str], refused: str, tmp_path: Path
) -> None:
    """The number of steps counts only where a learning rate schedule depends on it."""
    before, now = (
        settings_to_keep(make_job({"actor": job, "trainer": {"total_training_steps": steps}}), 10, digest)
        for steps, digest in zip((4, 8), prompts, strict=True)
    )
    file = tmp_path / "controller.json"
    file.write_text(ControllerState(1, {}, before).to_json())
    with pytest.raises(InvalidConfig, match=refused) if refused else nullcontext():
        Checkpoints.read(tmp_path, now)
    of_an_earlier_version = {key: before[key] for key in before if key not in (STEPS, PROMPTS)}
    file.write_text(ControllerState(1, {}, of_an_earlier_version).to_json())
    assert Checkpoints.read(tmp_path, now).step == 1


def test_an_edited_column_is_refused_if_its_digest_was_kept() -> None:
    """A checkpoint without the digest is compared in everything else."""

    def settings(prompts: str, columns: str | None) -> dict[str, Any]:
        return settings_to_keep(make_job({}), 10, prompts, columns)

    compared = compare(settings("a", "b"), settings("a", "c"))
    assert compared.refused == ["digest of the prompts' other columns is 'c' now and was 'b'"]
    assert ["reward_model" in hint for hint in compared.hints] == [True]
    # Tools have left none out, so they are the same rows; with one less they need not be.
    assert compare(settings("a", "b"), settings("x", "b"), OF_THE_ROWS).refused == []
    assert compare(settings("a", "b"), settings("x", "c"), OF_THE_ROWS).refused == compared.refused
    fewer = settings("a", "b") | {NUM_PROMPTS: 9}
    assert compare(fewer, settings("x", "c"), OF_THE_ROWS) == Comparison([], [], [], [])
    earlier = settings("a", "b")
    del earlier[COLUMNS]
    assert compare(earlier, settings("a", "c")) == Comparison([], [], [], [COLUMNS])
    assert compare(earlier, settings("a", None)) == Comparison([], [], [], [])  # it trains on given tokens
    assert compare(earlier, settings("x", "b")).refused == [
        "digest of the tokenised prompts is 'x' now and was 'a'"
    ]


FALLS = {"lr_scheduler_type": "cosine"}
TOTAL = "trainer.total_training_steps"


@pytest.mark.parametrize(
    ("before", "now", "changed", "refused"),
    [
        (({}, 4), ({}, 8), [], []),
        (({"lr": 1e-3}, 4), ({"lr": 5e-4}, 8), ["actor.optim.lr from 0.001 to 0.0005"], []),
        (
            ({"lr_warmup_steps": 2}, 4),
            ({"lr_warmup_steps": 3, "betas": [0.9, 0.95]}, 4),
            ["actor.optim.lr_warmup_steps from 2 to 3", "actor.optim.betas from [0.9, 0.999] to [0.9, 0.95]"],
            [],
        ),
        ((FALLS, 4), (FALLS, 8), [], [f"{TOTAL} is 8 now and was 4"]),
        (
            (FALLS, 4),
            ({"lr_scheduler_type": "linear", "min_lr_ratio": 0.1}, 4),
            [
                "actor.optim.lr_scheduler_type from 'cosine' to 'linear'",
                "actor.optim.min_lr_ratio from 0.0 to 0.1",
            ],
            [],
        ),
        (
            ({}, 4),
            (FALLS, 8),
            [
                "actor.optim.lr_scheduler_type from 'constant' to 'cosine'",
                f"the learning rate now depends on {TOTAL}",
            ],
            [],
        ),
        (
            ({"lr_warmup_steps_ratio": 0.5}, 4),
            ({}, 8),
            [
                "actor.optim.lr_warmup_steps_ratio from 0.5 to 0.0",
                f"the learning rate no longer depends on {TOTAL}",
            ],
            [],
        ),
    ],
)
def test_a_resume_says_what_another_learning_rate_comes_from(
    before: tuple[Any, int], now: tuple[Any, int], changed: list[str], refused: list[str]
) -> None:
    """It is refused only where nobody asked for another rate: more steps stretch a schedule."""
    kept, settings = (
        settings_to_keep(make_job({"actor": {"optim": optim}, "trainer": {"total_training_steps": steps}}), 10)
        for optim, steps in (before, now)
    )
    compared = compare(json.loads(json.dumps(kept)), settings)
    assert (compared.refused, compared.changed, compared.missing) == (refused, changed, [])
    assert ["trainer.total_epochs" in hint for hint in compared.hints] == [True] * any(
        TOTAL in words for words in (*refused, *changed)
    )


def test_a_resume_reports_changed_mini_batches_and_epochs() -> None:
    """They change an optimizer step's share of a training step."""

    def settings(**critic: Any) -> dict[str, Any]:
        return settings_to_keep(make_job({"actor": {"ppo_mini_batch_size": 512}, "critic": critic}), 10)

    assert compare(settings(), settings(ppo_mini_batch_size=256, ppo_epochs=2, optim={"lr": 0.5})).changed == [
        "critic.optim.lr from 1e-05 to 0.5",
        "critic.ppo_mini_batch_size from 512 to 256",
        "critic.ppo_epochs from 1 to 2",
    ]


def test_a_resume_reports_changed_losses_and_advantages() -> None:
    """A change of how they are computed is not reported."""

    def settings(**sections: Any) -> dict[str, Any]:
        return settings_to_keep(make_job({"rollout": {"n": 4}} | sections), 10)

    changes: dict[str, Any] = {
        "actor": {"clip_ratio_high": 0.28, "policy_loss": {"loss_mode": "gspo"}, "entropy_coeff": 0.01},
        "critic": {"cliprange_value": 0.2},
        "algorithm": {"gamma": 0.9, "rollout_correction": {"rollout_is": "token"}},
        "rollout": {"n": 4, "mode": "async"},
        "trainer": {"critic_warmup": 5, "max_staleness": 2},
    }
    compared = compare(json.loads(json.dumps(settings())), settings(**changes))
    assert compared == Comparison(
        [],
        [],
        [
            "algorithm.gamma from 1.0 to 0.9",
            "algorithm.rollout_correction.rollout_is from None to 'token'",
            "actor.policy_loss.loss_mode from 'vanilla' to 'gspo'",
            "actor.entropy_coeff from 0.0 to 0.01",
            "critic.cliprange_value from 0.5 to 0.2",
            "trainer.critic_warmup from 0 to 5",
            "upper end of the clip range (actor.clip_ratio) from 0.2 to 0.28",
            "steps that the rollouts may be ahead (rollout.mode, trainer.max_staleness) from 0 to 2",
        ],
        [],
    )
    passes = {"use_dynamic_bsz": True, "ppo_micro_batch_size_per_gpu": 2, "ppo_max_token_len_per_gpu": 4096}
    assert settings(actor=passes, critic=passes) == settings()
    assert settings(rollout={"n": 4, "mode": "async"}, trainer={"max_staleness": 0}) == settings()
    adaptive = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}
    other = adaptive | {"kl_ctrl": {"type": "adaptive", "kl_coef": 0.5}}
    assert settings(algorithm=other) == settings(algorithm=adaptive)  # the run's own goes on
    grpo = {"algorithm": {"adv_estimator": "grpo"}, "critic": {"cliprange_value": 0.2}}
    assert not any(key.startswith("critic.") for key in settings(**grpo))  # it has none


def test_another_reference_and_another_program_are_said() -> None:
    weighs: dict[str, Any] = {"actor": {"use_kl_loss": True, "model": {"path": "/models/sft"}}}
    other = merge(weighs, {"actor": {"model": {"path": "outputs/mine/global_step_20/actor"}}})
    kept, now, without = (settings_to_keep(make_job(job), 10) for job in (weighs, other, {}))
    assert compare(kept, now).changed == ["reference.model.path from 'sft' to 'global_step_20/actor'"]
    assert without["reference.model.path"] is None
    talks = {"rollout": {"multi_turn": {"enable": True}}}
    kept, now = (
        settings_to_keep(make_job(merge(talks, {"rollout": {"agent": {"external": external}}})), 10)
        for external in ({"command": ["a"]}, {"command": ["b"], "reward_at_limit": 1.0})
    )
    assert compare(json.loads(json.dumps(kept)), now).changed == [
        "rollout.agent.external.command from ['a'] to ['b']",
        "rollout.agent.external.reward_at_limit from None to 1.0",
    ]


def test_other_options_of_an_engine_are_refused() -> None:
    engine = str(Path(__file__).parents[3] / "examples" / "engine" / "min_p.py")
    try:
        kept, now = (
            settings_to_keep(
                make_job({"plugins": [engine], "rollout": {"name": "min_p", "options": {"min_p": min_p}}}), 10
            )
            for min_p in (0.1, 0.6)
        )
    finally:
        forget(engine)
    assert compare(kept, now).refused == ["rollout.options is {'min_p': 0.6} now and was {'min_p': 0.1}"]
    assert settings_to_keep(make_job({}), 10)["rollout.options"] is None


def test_without_rollouts_their_settings_are_not_compared() -> None:
    """Earlier versions kept them of every job."""
    kept, now = (
        settings_to_keep(make_job({"algorithm": {"page": "sft"}, "rollout": rollout}), 10)
        for rollout in ({}, {"seed": 3, "temperature": 0.5, "ignore_eos": True, "n": 1})
    )
    assert kept == now
    assert compare(kept | {"rollout.seed": 42, "rollout.temperature": 1.0}, now) == Comparison([], [], [], [])


@pytest.mark.parametrize(
    ("key", "then", "phrase"),
    [
        ("rollout.do_sample", False, "is False now and was True"),
        ("rollout.ignore_eos", True, "is True now and was False"),
        ("rollout.stop", ["</answer>"], "is ['</answer>'] now and was []"),
    ],
)
def test_what_changes_sampled_tokens_is_refused(key: str, then: Any, phrase: str) -> None:
    engine = {"rollout": {"name": "vllm"}}  # which has stop texts
    before, now = (settings_to_keep(make_job(job), 10) for job in (engine, merge(engine, nested(key, then))))
    assert compare(json.loads(json.dumps(before)), now) == Comparison([f"{key} {phrase}"], [], [], [])


@pytest.mark.parametrize(
    ("key", "then", "phrase"),
    [
        ("reward.custom_reward_function.path", "mine.py", "from None to 'mine.py'"),
        ("reward.custom_reward_function.reward_kwargs", {"cap": 2}, "from {} to {'cap': 2}"),
        ("reward.answer_chars", None, "from 300 to None"),
        ("reward.format_score", 0.1, "from 0.0 to 0.1"),
        ("reward.math", "math_verify", "from 'hendrycks' to 'math_verify'"),
        ("reward.skip_special_tokens", False, "from True to False"),
        ("reward.sandbox.continuous", False, "from True to False"),
        ("reward.overlong_buffer.penalty_factor", 0.5, "from 1.0 to 0.5"),
    ],
)
def test_what_changes_rewards_is_said(key: str, then: Any, phrase: str) -> None:
    own = {"custom_reward_function": {"path": "mine.py"}} if key.endswith("kwargs") else {}
    base = {"reward": {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 1}} | own}
    before, now = (settings_to_keep(make_job(merge(base, job)), 10) for job in ({}, nested(key, then)))
    assert compare(json.loads(json.dumps(before)), now) == Comparison([], [], [f"{key} {phrase}"], [])
    del before[key]
    assert compare(before, now).missing == (["the other keys of reward"] if then is not None else [])
    without = settings_to_keep(make_job({"algorithm": {"page": "sft"}}), 10)  # nothing scores
    assert key not in without


class OwnOptions(Options):
    words: tuple[str, ...] = ("a", "b")
    vocabulary: Path = Path("words.txt")
    marks: frozenset[int] = frozenset([8, 0])
    prices: dict[int, float] = Field({1: 0.5})
    by_file: dict[Path, bool] = Field({Path("a.txt"): True})


def test_plugin_options_are_compared_as_a_checkpoint_holds_them() -> None:
    """JSON has no tuples, paths, or numbers as keys. Equal sets may have two orders, here of 0 and 8."""
    grpo = replace(ESTIMATORS["grpo"], name="own", origin=BUILT_IN, options=OwnOptions)
    own = RewardManagerSpec(name="own", code=lambda compute_score, rows, **options: [], options=OwnOptions)
    with ESTIMATORS.adding(grpo), REWARD_MANAGERS.adding(own):

        def job_of(**options: Any) -> JobConfig:
            estimator = {"adv_estimator": "own", "options": options}
            reward = {"reward_manager": "own", "options": options}
            return make_job({"algorithm": estimator, "reward": reward, "rollout": {"n": 2}})

        assert [*frozenset([8, 0])] != [*frozenset([0, 8])]
        jobs = job_of(), job_of(marks=[0, 8]), job_of(prices={"1": 0.5}), job_of(prices={2: 0.5})
        assert len({fingerprint(job, "reward").to_metadata() for job in jobs[:3]}) == 1
        settings, *others = (settings_to_keep(job, 10) for job in jobs)
    written = json.loads(ControllerState(1, {}, settings).to_json())["kept_settings"]
    assert [compare(written, each) for each in others[:2]] == [Comparison([], [], [], [])] * 2
    assert [said.partition(" ")[0] for said in compare(written, others[2]).refused] == ["algorithm.options"]
    as_json = {"words": ["a", "b"], "vocabulary": "words.txt", "marks": [0, 8], "prices": {"1": 0.5}}
    assert written["algorithm.options"] == written["reward.options"] == as_json | {"by_file": {"a.txt": True}}


def test_a_resume_reports_what_changes_conversations() -> None:
    """Timeouts and numbers of attempts only keep them alive, and are not reported."""

    def settings(**multi_turn: Any) -> dict[str, Any]:
        return settings_to_keep(make_job({"rollout": {"multi_turn": {"enable": True, **multi_turn}}}), 10)

    now = settings(tools=["python"], turn_reward_weight=0.5, call_timeout_s=1, max_attempts=9)
    assert compare(json.loads(json.dumps(settings())), now).changed == [
        "rollout.multi_turn.tools from [] to ['python']",
        "rollout.multi_turn.turn_reward_weight from 1.0 to 0.5",
    ]


def test_a_resume_reports_files_edited_since_the_run_began(tmp_path: Path) -> None:
    """Of a file that the controller cannot read, of one that is new, and of rows that are, there is no other
    content to say."""
    tools, rewards = tmp_path / "tools.yaml", tmp_path / "reward.py"
    tools.write_text("tools: []")
    rewards.write_text("def compute_score(**row): return 1")
    job = make_job(
        {
            "rollout": {"multi_turn": {"enable": True, "tool_config_path": str(tools)}},
            "reward": {"custom_reward_function": {"path": str(rewards)}},
        }
    )

    def settings(validation: str | None = None) -> dict[str, Any]:
        return settings_to_keep(job, 10, validation=validation, files=file_digests(job))

    began = json.loads(json.dumps(settings("a+b")))
    assert compare(began, settings()) == compare(settings(), settings("a+b")) == Comparison([], [], [], [])
    tools.write_text("tools: [{class_name: mine.Tool, config: {depth: 3}}]")
    rewards.write_text("def compute_score(**row): return 2")
    compared = compare(began, settings("a+c"))
    assert [phrase.partition(" from ")[0] for phrase in compared.changed] == [
        "digest of the validation rows",
        "digest of the file rollout.multi_turn.tool_config_path",
        "digest of the file reward.custom_reward_function.path",
    ]
    assert ["trainer.save_best" in hint for hint in compared.hints] == [True]
    tools.unlink()
    rewards.unlink()
    assert compare(began, settings("a+b")) == Comparison([], [], [], [])
    for key in ("digest of the file reward.custom_reward_function.path", VALIDATION):
        del began[key]
    assert compare(began, settings("a+b")).missing == [VALIDATION]
    assert compare(began, settings()).missing == []


def test_another_sampling_of_validations_is_said() -> None:
    greedy, sampled = (
        settings_to_keep(make_job({"data": {"val_files": ["a"]}, "rollout": {"val_kwargs": sampling}}), 10)
        for sampling in ({}, {"n": 4, "do_sample": True, "temperature": 0.5})
    )
    assert compare(json.loads(json.dumps(greedy)), sampled).changed == [
        "rollout.val_kwargs.temperature from 1.0 to 0.5",
        "rollout.val_kwargs.do_sample from False to True",
        "rollout.val_kwargs.n from 1 to 4",
    ]
    earlier = {key: value for key, value in greedy.items() if ".val_kwargs." not in key}
    assert compare(earlier, sampled).missing == ["rollout.val_kwargs"]
    assert not any(
        ".val_kwargs." in key for key in settings_to_keep(make_job({"algorithm": {"page": "sft"}}), 10)
    )


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def test_an_older_checkpoint_is_not_compared_in_what_it_lacks() -> None:
    now = settings_to_keep(
        make_job({"actor": {"optim": FALLS}, "trainer": {"total_training_steps": 4}}), 10, "a", "b"
    )
    earlier = {
        key: now[key]
        for key in now
        if not key.startswith(("actor.", "critic.", "digest of the prompts", STEPS))
    }
    roles = [
        f"{role}.{key}"
        for role in ("actor", "critic")
        for key in ("optim", "ppo_mini_batch_size", "ppo_epochs")
    ]
    others = ["the other keys of actor", "the other keys of critic"]
    assert compare(earlier, now) == Comparison([], [], [], [COLUMNS, *roles, STEPS, *others])


# All that a checkpoint held before pages, plug-ins, digests and optimizers were compared.
FIRST_SETTINGS = (
    *("actor.model.lora_alpha", "algorithm.adv_estimator", "algorithm.gdpo_reward_keys"),
    *("algorithm.gdpo_reward_weights", "algorithm.filter_groups.metric", "data.train_files"),
    *("prompts in data.train_files", "data.train_batch_size", "data.gen_batch_size", "data.shuffle"),
    *("data.seed", "data.max_prompt_length", "data.max_response_length", "rollout.n", "rollout.seed"),
    *("rollout.temperature", "rollout.top_k", "rollout.top_p"),
)


def test_a_first_version_checkpoint_is_compared_in_what_it_has() -> None:
    """Keys that the job newly uses are compared, too."""
    now = settings_to_keep(make_job({}), 10, "a", "b")
    earlier = {key: now[key] for key in FIRST_SETTINGS}
    compared = compare(earlier, now)
    assert (compared.refused, compared.changed) == ([], [])
    assert {"algorithm.page", "data.dataset", RULES, PROMPTS, COLUMNS} <= set(compared.missing)
    assert not {*FIRST_SETTINGS, "data.options"} & set(compared.missing)  # the job sets no data.options
    for key in ("rollout.n", "digest of plug-in mine.py", "revision of actor's model"):
        [refused] = compare(earlier, now | {key: 3}).refused
        assert refused == f"{key} is 3 now and was {earlier.get(key)}"


def test_a_resume_keeps_its_reward_rules_unless_none_were_saved(tmp_path: Path) -> None:
    """Earlier versions saved none, and their checkpoints resume under any rules."""
    ours, verl = (
        settings_to_keep(make_job({"reward": {"rules": rules}}), 10) for rules in ("rolemesh", "verl")
    )
    file = tmp_path / "controller.json"
    file.write_text(ControllerState(1, {}, ours).to_json())
    with pytest.raises(InvalidConfig, match=r"reward\.rules is 'verl' now and was 'rolemesh'"):
        Checkpoints.read(tmp_path, verl)
    del ours["reward.rules"]
    file.write_text(ControllerState(1, {}, ours).to_json())
    for each in (ours, verl):
        assert Checkpoints.read(tmp_path, each).step == 1
