"""Each key under "Not here yet" in docs/tutorials/from-verl.md is refused with the words of that page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from rolemesh.config.base import ELSEWHERE, ROLE, leaves, parse_overrides
from rolemesh.config.job import JobConfig, make_job
from rolemesh.errors import InvalidConfig

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "from-verl.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Not here yet\n")[2].partition("|-|-|-|\n")[2].partition("\n\n")[0]
# Our section to verl's, where the names differ, and what the error says of verl's.
PARTS = "its parts are the top-level sections actor, rollout and reference, and actor.model"
VERLS = {
    "actor.model": ("actor_rollout_ref.model", PARTS),
    "actor": ("actor_rollout_ref.actor", PARTS),
    "reference": ("actor_rollout_ref.ref", PARTS),
    "rollout": ("actor_rollout_ref.rollout", PARTS),
    "reward.reward_model": ("reward_model", ELSEWHERE["reward_model"]),
}


def sections(schema: type[BaseModel]) -> set[str]:
    """The dotted keys of a schema's sections."""
    return {key[:at] for key in leaves(schema) for at, character in enumerate(key) if character == "."}


def plain(markdown: str) -> str:
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", markdown).replace("`", "")


def not_here() -> dict[str, str]:
    """Dotted key to what the page says of it. A section – is the top of the file."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.splitlines()]
    return {
        f"{section}.{key}".removeprefix("–."): plain(said)
        for sections, keys, said in rows
        for section in plain(sections).split(", ")
        for key in plain(keys).split(", ")
    }


def error_of(key: str) -> str:
    with pytest.raises(InvalidConfig) as error:
        make_job(parse_overrides([f"{key}=fsdp2"]))
    return str(error.value)


@pytest.mark.parametrize(("key", "said"), not_here().items(), ids=list(not_here()))
def test_a_key_that_is_not_here_gets_the_words_of_the_page(key: str, said: str) -> None:
    """The words name no unknown key."""
    assert error_of(key) == f"job: unknown key {key!r} (not here: {said})"
    assert set(re.findall(r"\b[a-z_]+\.[a-z_]+\b", said)) - {"config.json"} <= set(leaves(JobConfig))


def test_the_page_lists_every_key_that_the_code_says_is_not_here() -> None:
    said = {key for key, hint in ELSEWHERE.items() if hint.startswith("not here")}
    assert {ROLE.sub("ROLE.", key) for key in not_here()} == said


@pytest.mark.parametrize("ours", VERLS)
def test_unsupported_keys_of_verls_sections_are_led_to_ours(ours: str) -> None:
    verls, hint = VERLS[ours]
    keys = [key for key in not_here() if key.startswith(f"{ours}.")]
    assert keys
    for key in keys:
        top = verls.partition(".")[0]
        assert error_of(verls + key.removeprefix(ours)) == f"job: unknown key {top!r} ({hint})"


def test_tis_imp_ratio_cap_is_led_to_the_rollout_correction() -> None:
    """It is the cap of truncated importance sampling."""
    assert error_of("actor.tis_imp_ratio_cap") == (
        "job: unknown key 'actor.tis_imp_ratio_cap' "
        "(it is algorithm.rollout_correction.rollout_is_threshold, with rollout_is: token)"
    )
    assert "algorithm.rollout_correction.rollout_is_threshold" in set(leaves(JobConfig))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        *(
            (key, "it is ppo_micro_batch_size_per_gpu: rows of one rank, not of all")
            for key in (
                "actor.ppo_micro_batch_size",
                "critic.ppo_micro_batch_size",
                "critic.forward_micro_batch_size",
            )
        ),
        *(
            (f"rollout.{key}", f"the actor computes the old log-probabilities: set actor.{actors}")
            for key, actors in {
                "log_prob_micro_batch_size": "ppo_micro_batch_size_per_gpu",
                "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
                "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
                "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
            }.items()
        ),
        ("algorithm.lambda", "it is algorithm.lam"),
        ("reward_model", ELSEWHERE["reward_model"]),
        ("reward.reward_kwargs", "its overlong_buffer_cfg is reward.overlong_buffer"),
        ("reward.reward_model.reward_kwargs", "its overlong_buffer_cfg is reward.overlong_buffer"),
        ("data.micro_batch_size_per_gpu", "it is actor.ppo_micro_batch_size_per_gpu"),
        ("data.micro_batch_size", "it is actor.ppo_micro_batch_size_per_gpu: rows of one rank, not of all"),
        ("optim", "it is actor.optim"),
        ("global_profiler", "its steps are trainer.profile_steps; leave out the rest"),
        ("data.path", "it is data.val_files of rolemesh generate and evaluate, and data.train_files of a run"),
        ("data.n_samples", "it is rollout.val_kwargs.n of rolemesh generate"),
        ("data.output_path", "it is the option --output of rolemesh generate and evaluate"),
        ("data.data_source_key", "it is data.reward_fn_key"),
    ],
)
def test_keys_of_verls_scripts_are_led_to_the_same_meaning(key: str, hint: str) -> None:
    """And not to the most similar one, such as ppo_mini_batch_size for ppo_micro_batch_size."""
    assert error_of(key) == f"job: unknown key {key!r} ({hint})"
    named = re.findall(r"\b(?:actor|critic|algorithm|data|reward|rollout|trainer)\.[a-z_.]+\b", hint)
    assert {*named} <= {*leaves(JobConfig), *sections(JobConfig)}


def test_other_unknown_keys_are_led_to_the_nearest_as_before() -> None:
    assert "did you mean 'actor.clip_ratio_c'" in error_of("actor.clip_ratio_d")
    assert "did you mean 'placement.strategy'" in error_of("trainer.strategy")
