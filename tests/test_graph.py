"""The step graph: what a page reads and writes, checked before any model loads."""

from __future__ import annotations

import pytest
import torch

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, Unsupported
from rolemesh.graph import Edge, StepGraph, node, nodes, record
from rolemesh.roles import Roles
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.stages.experience import collect, fan_out

PPO = make_job({"algorithm": {"use_kl_in_reward": True}})
GRPO = make_job({"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 2}, "actor": {"use_kl_loss": True}})


@pytest.fixture(autouse=True)
def nodes_of_a_test_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the functions that it marks would be among those that an error names in a later one."""
    monkeypatch.setattr(nodes, "CONTROLLER_NODES", dict(nodes.CONTROLLER_NODES))


def flows(graph: StepGraph, target: str) -> dict[str, tuple[str, ...]]:
    return {edge.source: edge.columns for edge in graph.edges if edge.target == target}


def test_ppo_is_a_graph_of_calls_and_the_columns_between_them() -> None:
    graph = record_step(PPO)
    assert [call.name for call in graph.nodes] == [
        "data",
        "controller.fan_out",
        "rollout.generate",
        "controller.join",
        "actor.compute_log_probs",
        "reference.compute_log_probs",
        "critic.compute_values",
        "reward.compute_scores",
        "controller.apply_rollout_correction",
        "controller.apply_kl_penalty",
        "controller.compute_advantages",
        "critic.update",
        "actor.update",
        "rollout.update_weights",
    ]
    assert flows(graph, "actor.update") == {
        "controller.join": ("input_ids", "attention_mask", "position_ids"),
        "rollout.generate": ("response_mask",),
        "actor.compute_log_probs": ("old_log_probs",),
        "controller.compute_advantages": ("advantages",),
    }
    assert Edge("actor.update", "rollout.update_weights", ("weights",)) in graph.edges


def test_the_weights_of_a_rollout_correction_reach_the_actor() -> None:
    job = make_job({"algorithm": {"rollout_correction": {"rollout_is": "token"}}})
    assert flows(record_step(job), "actor.update")["controller.apply_rollout_correction"] == (
        "rollout_is_weights",
    )


def test_grpo_has_no_critic_and_its_kl_loss_reads_the_reference() -> None:
    graph = record_step(GRPO)
    assert not [call for call in graph.nodes if call.name.startswith("critic")]
    assert flows(graph, "actor.update")["reference.compute_log_probs"] == ("ref_log_probs",)


def test_a_job_that_weighs_no_kl_asks_no_reference() -> None:
    graph = record_step(make_job({}))
    assert "reference.compute_log_probs" not in [call.name for call in graph.nodes]
    assert flows(graph, "controller.apply_kl_penalty") == {"reward.compute_scores": ("token_level_scores",)}


def test_calls_of_one_stage_do_not_wait_for_each_other() -> None:
    stages = [{call.name for call in stage} for stage in record_step(PPO).stages]
    assert {"critic.update", "actor.update"} in stages
    judging = next(stage for stage in stages if "critic.compute_values" in stage)
    assert judging == {"actor.compute_log_probs", "reference.compute_log_probs", "critic.compute_values"}


def test_columns_that_no_call_reads_are_named() -> None:
    assert record_step(PPO).unread == {
        "rollout.generate": ["weight_versions"],
        "actor.compute_log_probs": ["entropys"],
        "reward.compute_scores": ["acc"],
    }


def test_text_and_mermaid_show_every_call() -> None:
    graph = record_step(PPO)
    text, mermaid = graph.to_text(), graph.to_mermaid()
    for call in graph.nodes:
        assert call.name in text
        assert f"{call.name.replace('.', '_')}[" in mermaid
    assert max(map(len, text.splitlines())) <= 100
    assert 'actor_update -->|"weights"| rollout_update_weights' in mermaid
    assert mermaid.startswith("flowchart TD\n")


# ------------------------------------------------------------------------- pages that are wrong


async def score_nothing(rows: DataProto) -> DataProto:
    return rows


async def generated(prompts: DataProto, roles: Roles) -> DataProto:
    rows = fan_out(prompts, 2, 0, 1)
    return await collect(roles.rollout.generate(rows), rows, score_nothing)


async def test_a_missing_column_error_names_reader_column_and_writer() -> None:
    async def page(prompts: DataProto, roles: Roles) -> None:
        await roles.critic.update(await generated(prompts, roles))

    with pytest.raises(
        InvalidBatch, match=r"page: critic\.update reads column 'values'.*call critic\.compute_values before it"
    ):
        await record(page, PPO, "page")


async def test_an_unmade_controller_column_names_its_function() -> None:
    async def page(prompts: DataProto, roles: Roles) -> None:
        batch = await generated(prompts, roles)
        await roles.critic.update(batch.union(await roles.critic.compute_values(batch)))

    with pytest.raises(InvalidBatch, match=r"'returns'.*call controller\.compute_advantages before it"):
        await record(page, PPO, "page")


async def test_a_kl_loss_without_a_reference_in_the_page_is_an_error() -> None:
    async def page(prompts: DataProto, roles: Roles) -> None:
        batch = await generated(prompts, roles)
        batch = batch.union(await roles.actor.compute_log_probs(batch))
        batch["advantages"] = batch["old_log_probs"]
        await roles.actor.update(batch)

    with pytest.raises(InvalidBatch, match=r"'ref_log_probs'.*call .*reference\.compute_log_probs before it"):
        await record(page, GRPO, "page")


async def test_a_column_of_undeclared_dtype_or_shape_is_refused() -> None:
    @node(reads=("response_mask",), writes=("returns",))
    def make_returns(batch: DataProto) -> None:
        batch["returns"] = batch["response_mask"].double()

    async def page(prompts: DataProto, roles: Roles) -> None:
        batch = await generated(prompts, roles)
        batch = batch.union(await roles.critic.compute_values(batch))
        make_returns(batch)
        await roles.critic.update(batch)

    with pytest.raises(
        InvalidBatch, match=r"'returns' as torch\.float32 .*controller\.make_returns made it torch\.float64"
    ):
        await record(page, PPO, "page")


async def test_calling_the_critic_of_a_job_without_one_is_refused() -> None:
    async def page(prompts: DataProto, roles: Roles) -> None:
        await roles.critic.compute_values(await generated(prompts, roles))

    with pytest.raises(Unsupported, match="has no critic"):
        await record(page, GRPO, "page")


async def test_an_algorithm_may_score_rows_again_with_its_own_column() -> None:
    async def page(prompts: DataProto, roles: Roles) -> None:
        rows = await generated(prompts, roles)
        await roles.reward.compute_scores(rows)
        rows["response_texts"] = [""] * len(rows)
        await roles.reward.compute_scores(rows)
        await roles.sync_weights(1)

    graph = await record(page, GRPO, "page")
    assert "response_texts" in flows(graph, "reward.compute_scores")["controller.page"]
    stages = [{call.name for call in stage} for stage in graph.stages]
    assert [i for i, names in enumerate(stages) if "reward.compute_scores" in names][-1] > next(
        i for i, names in enumerate(stages) if "rollout.generate" in names
    )
    assert graph.to_text().count("reward.compute_scores") >= 2


def test_recording_loads_no_model_and_costs_no_random_numbers() -> None:
    job: JobConfig = make_job({"actor": {"model": {"path": "/no/such/model"}}})
    before = torch.get_rng_state()
    record_step(job)
    assert torch.equal(torch.get_rng_state(), before)
