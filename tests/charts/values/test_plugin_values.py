"""Plug-ins in the chart: where their files are, which process imports them, and which names are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import Object, groups, objects, of_kind, pods, refusals

from rolemesh.config.job import make_job

FILE = "/etc/rolemesh-plugins/plugins.py"
CODE = "from rolemesh.plugins import estimator\n# {{ not a template }} \u2028 \"'\n"
ESTIMATOR = """
from rolemesh.plugins import estimator

@estimator("centred", reads=("token_level_rewards", "response_mask"))
def centred(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards
"""
OWN = {"algorithm": {"adv_estimator": "centred"}, "critic": {"enable": False}}


UNKNOWN = "has a name that is not built in: set it to one of"


def job_file(things: list[Object]) -> Any:
    (config,) = [thing for thing in of_kind(things, "ConfigMap") if thing["metadata"]["name"] == "demo-job"]
    return yaml.safe_load(config["data"]["job.yaml"])


def mounts(pod: Object) -> list[str]:
    return [
        mount["mountPath"]
        for container in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"])
        for mount in container["volumeMounts"]
        if mount["name"] == "plugins" and mount["readOnly"]
    ]


def test_every_process_imports_the_given_code_and_has_its_file() -> None:
    things = objects({"plugins": {"code": CODE}, "job": OWN | {"plugins": ["my_package.losses"]}})
    assert job_file(things)["plugins"] == ["my_package.losses", FILE]
    (config,) = [thing for thing in of_kind(things, "ConfigMap") if thing["metadata"]["name"] == "demo-plugins"]
    assert config["data"] == {"plugins.py": CODE}
    found = list(pods(things))
    assert len(found) == 5  # actor, rollout, reward, controller, helm test
    for pod in found:
        assert mounts(pod) == ["/etc/rolemesh-plugins"]
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "plugins"]
        assert volume["configMap"]["name"] == "demo-plugins"


def test_other_code_begins_every_process_anew() -> None:
    def checksums(code: str) -> list[str]:
        things = objects({"plugins": {"code": code}, "job": OWN})
        return [
            pod["metadata"]["annotations"]["checksum/plugins"]
            for pod in pods(things)
            if "annotations" in pod["metadata"]
        ]

    one, other = checksums(CODE), checksums(CODE + "# more\n")
    assert len(set(one)) == len(set(other)) == 1
    assert one[0] != other[0]


def test_a_users_config_map_is_mounted_and_named_by_the_job() -> None:
    things = objects(
        {"plugins": {"configMap": "mine"}, "job": OWN | {"plugins": ["/etc/rolemesh-plugins/a.py"]}}
    )
    assert job_file(things)["plugins"] == ["/etc/rolemesh-plugins/a.py"]
    for pod in pods(things):
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "plugins"]
        assert volume["configMap"]["name"] == "mine"


def test_without_plug_ins_nothing_is_mounted() -> None:
    assert [mounts(pod) for pod in pods(objects({}))] == [[]] * 6


@pytest.mark.parametrize("enable", [True, False])
def test_critic_enable_decides_on_the_critic_of_a_plugin(enable: bool) -> None:
    things = objects({"plugins": {"code": CODE}, "job": OWN | {"critic": {"enable": enable}}})
    assert ("critic" in groups(things)) == enable
    assert job_file(things)["critic"]["enable"] is enable


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"job": OWN}, f"job.algorithm.adv_estimator {UNKNOWN} gae, grpo, "),
        ({"job": {"algorithm": {"adv_estimator": ""}}}, f"job.algorithm.adv_estimator {UNKNOWN} gae, grpo, "),
        ({"job": {"rollout": {"name": "sglang"}}}, f"job.rollout.name {UNKNOWN} hf, vllm, openai"),
        ({"job": {"actor": {"policy_loss": {"loss_mode": "gps"}}}}, f"loss_mode {UNKNOWN} vanilla, "),
        ({"job": {"reward": {"reward_manager": "mine"}}}, f"reward_manager {UNKNOWN} naive, "),
        ({"job": {"data": {"dataset": "mine"}}}, f"job.data.dataset {UNKNOWN} parquet"),
        ({"job": {"algorithm": {"page": "mine"}}}, f"job.algorithm.page {UNKNOWN} ppo, grpo"),
        ({"plugins": {"code": CODE, "configMap": "mine"}}, "plugins.code and plugins.configMap are both set"),
        (
            {"plugins": {"code": CODE}, "job": {"algorithm": {"adv_estimator": "centred"}}},
            "set job.critic.enable to true or false",
        ),
        (
            {"plugins": {"code": CODE}, "job": {"algorithm": {"page": "mine"}}},
            "set job.critic.enable to true or false",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(values: Object, said: str) -> None:
    [found] = refusals(values)
    assert said in found


@pytest.mark.parametrize(
    "algorithm",
    [*({"page": page} for page in ("ppo", "grpo", "remax", "sft", "dpo")), {"filter_groups": {"enable": True}}],
    ids=json.dumps,
)
def test_a_built_in_page_has_its_roles_with_any_plugin_estimator(algorithm: Object, tmp_path: Path) -> None:
    """critic.enable is left out: ppo calls a critic, and the others refuse an estimator that needs one."""
    (tmp_path / "own.py").write_text(ESTIMATOR, encoding="utf-8")
    sections = {
        "algorithm": {"adv_estimator": "centred"} | algorithm,
        "rollout": {"n": 1 if algorithm.get("page") in ("sft", "dpo") else 4},
        "trainer": {"total_training_steps": 4},
    }
    expected = make_job(sections | {"plugins": [str(tmp_path / "own.py")]}).roles
    things = objects({"plugins": {"code": ESTIMATOR}, "job": sections})
    assert {role for roles in groups(things).values() for role in roles} == set(expected)
