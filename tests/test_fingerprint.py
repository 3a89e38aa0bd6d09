"""Which changes of a job change the fingerprint of which role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rolemesh.catalog.plugin_imports import forget
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig, parse_overrides
from rolemesh.config.job import make_job
from rolemesh.errors import InvalidBatch
from rolemesh.fingerprint import Fingerprint, fingerprint

MODELS = {"actor", "rollout", "reference", "critic"}


def job(*overrides: str) -> JobConfig:
    return make_job(parse_overrides(["actor.model.path=policy", *overrides]))


def changed(before: JobConfig, after: JobConfig) -> set[str]:
    """The roles whose fingerprints differ."""
    return {role for role in ROLES if fingerprint(before, role).difference(fingerprint(after, role))}


@pytest.mark.parametrize(
    ("override", "roles"),
    [
        ("trainer.total_epochs=9", set()),
        ("trainer.default_local_dir=elsewhere", set()),
        ("trainer.experiment_name=other", set()),
        ("placement.replicas={rollout: 4}", set()),
        ("data.train_files=[other.parquet]", set()),
        ("algorithm.gamma=0.5", set()),
        ("reward.format_score=0.5", {"reward"}),
        ("actor.optim.lr=0.5", {"actor"}),
        ("critic.optim.lr=0.5", {"critic"}),
        ("rollout.max_num_seqs=8", {"rollout"}),
        ("rollout.temperature=0.5", {"actor", "rollout", "reference"}),
        ("rollout.multi_turn.call_timeout_s=5", {"environment"}),
        ("trainer.total_training_steps=7", {"actor", "critic"}),
        ("data.max_response_length=99", MODELS | {"reward"}),
        ("actor.model.path=other", MODELS | {"reward"}),
    ],
)
def test_a_key_changes_the_fingerprints_of_its_readers(override: str, roles: set[str]) -> None:
    assert changed(job(), job(override)) == roles
    key = override.partition("=")[0]
    for role in roles & {key.partition(".")[0]}:
        said = fingerprint(job(), role).difference(fingerprint(job(override), role))
        assert said == f"it was started with another job, which differs in {key}"


def test_a_model_of_its_own_does_not_follow_the_actors() -> None:
    own = ("critic.model.path=values", "reference.model.path=base")
    assert changed(job(*own), job(*own, "actor.model.path=other")) == {"actor", "rollout", "reward"}
    assert changed(job(), job("critic.model.path=policy")) == set()  # the model that it loads is the same


def test_a_reward_functions_content_counts_and_its_path_does_not(tmp_path: Path) -> None:
    jobs = []
    for name, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        (tmp_path / f"{name}.py").write_text(text)
        jobs.append(job(f"reward.custom_reward_function.path={tmp_path / name}.py"))
    assert changed(jobs[0], jobs[1]) == set()
    assert changed(jobs[0], jobs[2]) == {"reward"}
    assert changed(job(), jobs[0]) == {"reward"}
    unread = fingerprint(job(f"reward.custom_reward_function.path={tmp_path}/absent.py"), "reward")
    assert unread.unreadable == ["reward.custom_reward_function.path"]
    assert unread.difference(fingerprint(jobs[0], "reward")) == ""  # whoever cannot read it cannot compare it
    said = "it cannot read the file of reward.custom_reward_function.path, and this process can"
    assert fingerprint(jobs[0], "reward").difference(unread) == said
    other = replace(unread, digests={**unread.digests, "plugins": "other"})
    assert fingerprint(jobs[0], "reward").difference(other).startswith("it was started with another job")


def test_the_content_of_a_plug_in_counts_for_every_role(tmp_path: Path) -> None:
    plugin, found = tmp_path / "mine.py", []
    for text in ("x = 1", "x = 2"):
        plugin.write_text(text)
        found.append({role: fingerprint(job(f"plugins=[{plugin}]"), role) for role in ROLES})
        forget(str(plugin))
    said = "it was started with another job, which differs in plugins"
    assert [found[0][role].difference(found[1][role]) for role in ROLES] == [said] * len(ROLES)


def test_another_version_of_rolemesh_is_another_role() -> None:
    here = fingerprint(job(), "reward")
    said = f"it runs version '0.0.9' of Rolemesh, and this is '{here.version}'"
    assert here.difference(replace(here, version="0.0.9")) == said


def test_a_difference_counts_many_keys_but_none_of_a_trials_own() -> None:
    other = job("actor.seed=7", "actor.grad_clip=9", "actor.ppo_epochs=3", "actor.kl_loss_coef=1",
                "actor.optim.lr=1", "actor.entropy_coeff=1")  # fmt: skip
    said = fingerprint(job(), "actor").difference(fingerprint(other, "actor"))
    assert said.endswith(" and 1 more")
    trial = fingerprint(job("trainer.total_training_steps=1", "trainer.resume_mode=disable"), "actor")
    assert trial.difference(fingerprint(job(), "actor"))
    assert not trial.without("data", "trainer").difference(fingerprint(job(), "actor"))


@pytest.mark.parametrize(
    "metadata", ["", "[]", "{}", '{"version":1,"keys":{}}', '{"version":"1","keys":[]}', "[" * 6000, "x" * 9000]
)
def test_metadata_that_is_not_a_fingerprint_is_refused(metadata: str) -> None:
    with pytest.raises(InvalidBatch, match="its fingerprint is invalid"):
        Fingerprint.of_metadata(metadata)


def test_a_fingerprint_is_the_same_after_its_way_over_the_wire() -> None:
    for role in ROLES:
        sent = fingerprint(job(), role)
        assert Fingerprint.of_metadata(sent.to_metadata()) == sent
        assert len(sent.to_metadata()) < 6000  # gRPC limits all metadata of an answer to 8 KiB
