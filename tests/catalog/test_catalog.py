"""One of each kind is added from outside, and everything that reads declarations knows it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from pydantic import AfterValidator, Field, model_validator

from rolemesh.algos.aggregation import BatchCounts
from rolemesh.algos.policy_loss import TokenLosses
from rolemesh.catalog.catalog import BUILT_IN, Catalog, Declaration, load
from rolemesh.catalog.datasets import DATASETS, DatasetSpec
from rolemesh.catalog.engines import ENGINES, EngineSpec
from rolemesh.catalog.estimators import ESTIMATORS, EstimatorSpec
from rolemesh.catalog.pages import PAGES, PageSpec
from rolemesh.catalog.plugin_imports import NAMED
from rolemesh.catalog.policy_losses import POLICY_LOSSES, PolicyLossSpec
from rolemesh.catalog.reward_managers import REWARD_MANAGERS, RewardManagerSpec
from rolemesh.catalog.role_specs import ROLES, RoleSpec
from rolemesh.checks.device_memory import least_memory
from rolemesh.config.base import Config, merge
from rolemesh.config.job import make_job
from rolemesh.config.yaml_file import check_written, parse_yaml
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from rolemesh.methods import Method, methods
from rolemesh.planner.cost import role_seconds
from rolemesh.planner.device_specs import GPUS
from rolemesh.planner.estimate import Cluster, Planner
from rolemesh.planner.memory import role_memory, role_shapes
from rolemesh.rpc.calling.clients import RoleClient
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.role_clients import new_client
from rolemesh.services.controller.stages.advantage_estimation import compute_advantages
from rolemesh.services.processes.serve import group_server, load_group
from rolemesh.services.reward.servicer import RewardServicer
from rolemesh.services.reward.worker import RewardWorker
from tests.support.rows.reward_rows import batch

HERE = __name__


# ------------------------------------------------------------------------------- the declarations


@pytest.mark.parametrize(
    "declaration",
    [each for catalog in (*NAMED.values(), ROLES) for each in catalog.values()],
    ids=lambda each: f"{type(each).__name__}-{each.name}",
)
def test_every_declaration_names_existing_code_and_its_meaning(declaration: Declaration) -> None:
    assert callable(declaration.load())
    assert declaration.meaning
    assert declaration.origin == BUILT_IN
    if isinstance(declaration, RoleSpec):
        parts = ("methods", "service", "servicer", "client", "recorded")
        assert all(load(getattr(declaration, part)) is not None for part in parts)


class Fruit(Declaration):
    kind = "fruit"


def test_two_origins_cannot_declare_one_name() -> None:
    catalog = Catalog(Fruit, Fruit(name="apple", code=len))
    with pytest.raises(InvalidConfig, match=r"mine\.py declares the fruit 'apple', which rolemesh"):
        catalog.add(Fruit(name="apple", code=len, origin="mine.py"))
    catalog.add(Fruit(name="pear", code=len, origin="mine.py"))
    catalog.add(Fruit(name="pear", code=max, origin="mine.py"))  # its file was imported again
    assert catalog["pear"].code is max
    with pytest.raises(InvalidConfig, match=r"yours\.py declares the fruit 'pear', which mine\.py"):
        catalog.add(Fruit(name="pear", code=len, origin="yours.py"))
    assert catalog.unknown("peer") == "which is none of apple; of mine.py: pear; did you mean 'pear'?"
    catalog.remove("mine.py")
    assert list(catalog) == ["apple"]


# ------------------------------------------------------------------- one of each, from one place


class Strength(Config):
    strength: float = 2.0


def compute_signed(token_level_rewards: Any, response_mask: Any, *, strength: float) -> tuple[Any, Any]:
    advantages = strength * token_level_rewards.sum(1, keepdim=True).sign() * response_mask
    return advantages, advantages


def test_an_estimator_is_added_in_one_place() -> None:
    own = EstimatorSpec(
        name="signed", code=compute_signed, reads=("token_level_rewards", "response_mask"), options=Strength
    )
    with ESTIMATORS.adding(own):
        job = make_job({"algorithm": {"adv_estimator": "signed", "options": {"strength": 3}}})
        assert not job.uses_critic
        assert "controller.compute_advantages" in {node.name for node in record_step(job).nodes}
        rows = DataProto.from_dict(
            {
                "token_level_rewards": torch.tensor([[0.0, 0.5], [0.0, -0.1]]),
                "response_mask": torch.ones(2, 2).bool(),
            }
        )
        assert compute_advantages(rows, job)["advantages"].tolist() == [[3.0, 3.0], [-3.0, -3.0]]
        assert make_job({"algorithm": {"adv_estimator": "signed"}}).algorithm.options == {"strength": 2.0}
        with pytest.raises(InvalidConfig, match=r"signed: unknown key 'strenght'; did you mean 'strength'\?"):
            make_job({"algorithm": {"adv_estimator": "signed", "options": {"strenght": 3}}})
    with pytest.raises(InvalidConfig, match="'signed', which is none of gae, grpo"):
        make_job({"algorithm": {"adv_estimator": "signed"}})


def test_an_estimator_reading_values_has_a_critic_and_its_page() -> None:
    own = EstimatorSpec(name="td", code=compute_signed, reads=("values", "response_mask"))
    with ESTIMATORS.adding(own):
        job = make_job({"algorithm": {"adv_estimator": "td"}})
        assert job.page.name == "ppo"
        assert "critic" in job.roles


def square_loss(
    log_probs: Any, old: Any, advantages: Any, mask: Any, *, tau_pos: float, strength: float
) -> Any:
    return TokenLosses(strength * tau_pos * (log_probs - old - advantages).square())


def test_a_policy_loss_is_added_in_one_place() -> None:
    from rolemesh.services.actor.objective import policy_objective

    own = PolicyLossSpec(name="square", code=square_loss, keys=("tau_pos",), options=Strength)
    rows = DataProto.from_dict(
        {
            "old_log_probs": torch.tensor([[-1.0, -1.0]]),
            "advantages": torch.tensor([[0.0, 1.0]]),
            "response_mask": torch.ones(1, 2).bool(),
        }
    )
    with POLICY_LOSSES.adding(own):
        job = make_job({"actor": {"policy_loss": {"loss_mode": "square"}, "tau_pos": 0.5}})
        loss, _ = policy_objective(
            torch.tensor([[-2.0, -1.0]]), None, rows, BatchCounts.of(rows["response_mask"]), job
        )
    assert loss.item() == pytest.approx((1 + 1) / 2)  # 2 · 0.5 · (1, 1), the mean of two tokens


async def twice(prompts: DataProto, roles: Any, step: Any, *, strength: float) -> dict[str, float]:
    from rolemesh.services.controller.pages.grpo import grpo_step

    metrics: dict[str, float] = await grpo_step(prompts, roles, step)
    return metrics | {"strength": strength}


def test_a_page_is_added_in_one_place() -> None:
    with PAGES.adding(PageSpec(name="twice", code=twice, options=Strength, answers_greedily=True)):
        job = make_job({"algorithm": {"adv_estimator": "grpo", "page": "twice"}, "rollout": {"n": 2}})
        assert job.page.answers_greedily
        assert record_step(job).title.startswith("twice")
        with pytest.raises(InvalidConfig, match=r"page twice does not filter groups, but .*enable is true"):
            make_job(
                {
                    "algorithm": {"adv_estimator": "grpo", "page": "twice", "filter_groups": {"enable": True}},
                    "rollout": {"n": 2},
                    "trainer": {"total_training_steps": 1},
                }
            )


def test_an_engine_is_added_in_one_place(tiny_model: Path) -> None:
    made: list[Any] = []

    def make(job: Any, worker: Any, **options: Any) -> Any:
        made.append(options)
        from rolemesh.services.rollout.engines.hf import HfEngine

        return HfEngine(job, worker)

    from rolemesh.services.rollout.worker import RolloutWorker

    spec = EngineSpec(name="mine", code=make, options=Strength, keys=("enforce_eager",), on_device=False)
    with ENGINES.adding(spec):
        job = make_job(
            {
                "actor": {"model": {"path": str(tiny_model)}},
                "rollout": {"name": "mine", "enforce_eager": True},
                "trainer": {"device": "cpu"},
            }
        )
        assert not job.on_device("rollout")
        assert "rollout" not in role_shapes(job)  # the planner counts no memory for it
        RolloutWorker(job).close()
        assert made == [{"strength": 2.0}]
        with pytest.raises(InvalidConfig, match=r"rollout\.stop is a key of engine vllm, but .* is mine"):
            make_job({"rollout": {"name": "mine", "stop": ["."]}})


def doubled(compute_score: Any, rows: Any, *, strength: float) -> list[float]:
    return [strength * compute_score(**row)["score"] for row in rows]


def test_a_reward_manager_is_added_in_one_place() -> None:
    from rolemesh.services.reward.scoring_process import scorer_of

    spec = RewardManagerSpec(name="doubled", code=doubled, options=Strength, together=True, origin="mine.py")
    row = {"data_source": "openai/gsm8k", "solution_str": "#### 7", "ground_truth": "7", "extra_info": {}}
    with REWARD_MANAGERS.adding(spec):
        job = make_job({"reward": {"reward_manager": "doubled"}})
        scorer = scorer_of(job.reward)
    assert scorer.name == "reward manager doubled of mine.py"
    assert [scored.score for scored in scorer.score([row, row])] == [2.0, 2.0]


def test_a_data_set_is_added_in_one_place() -> None:
    from rolemesh.data import PromptDataset
    from rolemesh.models.tiny import byte_tokenizer

    def sums(files: Any, config: Any, split: str, *, strength: float) -> list[dict[str, Any]]:
        return [
            {
                "prompt": [{"role": "user", "content": f"{split} {n}*{strength:g}="}],
                "data_source": "openai/gsm8k",
                "reward_model": {"style": "rule", "ground_truth": str(n * strength)},
            }
            for n in range(3)
        ]

    with DATASETS.adding(DatasetSpec(name="sums", code=sums, options=Strength)):
        job = make_job({"data": {"dataset": "sums", "max_prompt_length": 64}})
        assert job.data.has_validation
        data = PromptDataset((), job.data, byte_tokenizer())
        rows = data.batch([2])
    assert len(data) == 3
    assert rows["uid"][0] == "train-000002"
    assert rows["reward_model"][0]["ground_truth"] == "4.0"


class Weights(Config):
    weights: Any = 1.0
    share: Annotated[float, Field(ge=1), AfterValidator(lambda percent: percent / 100)] | None = None
    pairs: dict[tuple[int, int], float] = Field({})
    given: dict[int, float] = Field({1: 0.5})
    percent: Annotated[float, AfterValidator(lambda percent: percent / 100)] = 0

    @model_validator(mode="before")
    @classmethod
    def _is_in_percent(cls, values: dict[str, Any]) -> dict[str, Any]:
        if 0 < values.get("percent", 0) < 1:
            raise ValueError("this is a fraction")
        return values


OPTIONS: dict[str, tuple[Catalog[Any], str, str]] = {
    "algorithm.options": (ESTIMATORS, "adv_estimator", "grpo"),
    "algorithm.page_options": (PAGES, "page", "grpo"),
    "actor.policy_loss.options": (POLICY_LOSSES, "loss_mode", "vanilla"),
    "rollout.options": (ENGINES, "name", "hf"),
    "reward.options": (REWARD_MANAGERS, "reward_manager", "naive"),
    "data.options": (DATASETS, "dataset", "parquet"),
}
NOT_IN_FILES = (
    *({1: 0.5}, {0.5: 0.5}, {True: 0.5}, {None: 0.5}, {(1, 2): 0.5}, {frozenset([1]): 0.5}),
    *({1: 0.5, "1": 0.7}, [{"a": {2: 1}}], {1, 2}, Path("a"), b"\xff", object()),
)


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_a_job_file_cannot_hold_is_refused_by_name(key: str) -> None:
    """Each process of a job reads its options from a job file, and a checkpoint keeps them as JSON."""
    catalog, name, like = OPTIONS[key]

    def job_of(**given: Any) -> Any:
        *parents, options = key.split(".")
        section: dict[str, Any] = {name: "own", options: given}
        for parent in reversed(parents):
            section = {parent: section}
        return make_job(merge({"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 2}}, section))

    with catalog.adding(dataclasses.replace(catalog[like], name="own", options=Weights)):
        kept = job_of(weights={"a": [1, None, {"b": 0.5}]}, given={"2": 1})
        assert make_job(parse_yaml(kept.to_yaml(), "written")).model_dump() == kept.model_dump()
        for value in NOT_IN_FILES:
            with pytest.raises(InvalidConfig, match=rf"{key}: weights is .* job file"):
                job_of(weights=value)
        with pytest.raises(InvalidConfig, match=rf"{key}: pairs is \{{\(1, 2\): 0\.5\}}, .* back as .*'1,2'"):
            job_of(pairs={(1, 2): 0.5})
        with pytest.raises(
            InvalidConfig, match=rf"{key}: share is 0\.05, .* back as 0\.05, and that is refused"
        ):
            job_of(share=5)
        whole = r"the whole is \{'weights': 1\.0, .*, which .* back as \{'weights': 1\.0, .* this is a fraction"
        with pytest.raises(InvalidConfig, match=f"{key}: {whole}"):
            job_of(percent=5)


class Renamed(Config):
    share: float = Field(alias="part")


def test_a_refused_option_is_named_even_after_another_keys_error() -> None:
    """Here that is `part`, which no value has."""
    with pytest.raises(ValueError, match=r"^share is 0\.5, .* refused \(Extra inputs are not permitted\)"):
        check_written({"share": 0.5}, lambda written: Renamed.model_validate(written).model_dump())


class JudgeWorker(RewardWorker):
    """A second role that scores."""


class JudgeClient(RoleClient):
    role = "judge"

    async def compute_scores(self, rows: DataProto) -> DataProto:
        return await self._batch("compute_scores", rows)


def judge_methods(job: Any) -> list[Method]:
    from rolemesh.methods import reward_methods

    return [dataclasses.replace(method, role="judge") for method in reward_methods(job)]


async def test_a_role_is_added_in_one_place(tiny_model: Path) -> None:
    """It is placed, planned, served, called and watched like any other."""
    judge = RoleSpec(
        name="judge",
        code=JudgeWorker,
        methods=judge_methods,
        service="rolemesh.rpc.contract:REWARD",
        servicer=RewardServicer,
        client=JudgeClient,
        recorded="rolemesh.graph.recording:RecordedReward",
        on_device=lambda job: False,
        meaning="a second opinion",
    )
    groups = {"one": ["actor", "critic"], "two": ["rollout"], "three": ["reward"], "four": ["judge"]}
    sections = {
        "actor": {"model": {"path": str(tiny_model)}},
        "data": {"max_prompt_length": 16, "max_response_length": 24},
        "placement": {"strategy": "custom", "groups": groups, "replicas": {"judge": 3}},
        "trainer": {"device": "cpu"},
    }
    with ROLES.adding(judge):
        job = make_job(sections)
        assert "judge" in job.roles
        assert job.plan["four"].replicas == 3
        assert "judge.compute_scores" in methods(job)
        plan = Planner(job, role_shapes(job), Cluster(GPUS["h100"], 8)).plan("custom", groups)
        assert {group.name: group.devices for group in plan.groups}["four"] == 0
        server = group_server(["judge"], job)
        address = await server.start("127.0.0.1:0")
        workers, servicers = await load_group(["judge"], job)
        await server.ready(servicers)
        try:
            async with new_client("judge", [address], job) as client:
                await client.wait_until_ready(60)
                scores = await client.compute_scores(batch(("openai/gsm8k", "#### 72", "72")))  # type: ignore[attr-defined]
            assert scores["acc"].tolist() == [1.0]
        finally:
            await server.drain(0)
            for worker in workers:
                worker.close()
    assert "judge" not in make_job({}).roles

    on_a_device = dataclasses.replace(
        judge,
        on_device=lambda job: True,
        scores=True,
        pass_rows_key="reward.reward_model.micro_batch_size_per_gpu",
    )
    with ROLES.adding(on_a_device):
        job = make_job(sections).with_dtypes("cpu")
        shapes = role_shapes(job)
        weights = 4 * shapes["actor"].score_parameters
        assert least_memory(job, "judge", shapes).weights == weights
        assert role_memory(job, "judge", shapes, GPUS["h100"]).weights == weights
        assert role_seconds(job, "judge", shapes, GPUS["h100"]).keys() == {"score"}
