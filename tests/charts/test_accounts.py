"""Service accounts: which pods share one, who makes it, and whose token is mounted."""

from __future__ import annotations

from typing import Any

import pytest
from rendering import Object, objects, of_kind, pods, refusal

ROLE = {"eks.amazonaws.com/role-arn": "arn:aws:iam::111122223333:role/models"}
CONVERSES: Object = {"job": {"rollout": {"multi_turn": {"enable": True}}}}


def accounts(values: Object) -> dict[str, Any]:
    """Component to the account of its pods; None: the namespace's default."""
    found = {}
    for pod in pods(objects(values)):
        spec = pod["spec"]
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        found[component] = spec.get("serviceAccountName")
        assert spec["automountServiceAccountToken"] == (component in ("controller", "check")), component
    return found


def made(values: Object) -> dict[str, Object]:
    things = of_kind(objects(values), "ServiceAccount")
    assert all(thing["automountServiceAccountToken"] is False for thing in things)
    return {thing["metadata"]["name"]: thing["metadata"].get("annotations", {}) for thing in things}


def test_by_default_only_the_controller_has_a_service_account() -> None:
    found = accounts(CONVERSES)
    assert {name for name, account in found.items() if account} == {"controller", "check"}
    assert made({}) == {"demo-controller": {}}


def test_roles_user_code_and_the_controller_have_own_accounts() -> None:
    """Trained roles share one account; code of users and the controller have their own."""
    values = CONVERSES | {
        "serviceAccounts": {
            "roles": {"create": True, "annotations": ROLE},
            "reward": {"name": "scoring"},
            "environment": {"create": True, "name": "tools"},
            "controller": {"annotations": {"a": "b"}},
        }
    }
    assert accounts(values) == dict.fromkeys(("actor", "critic", "rollout"), "demo-roles") | {
        "reward": "scoring",
        "environment": "tools",
        "controller": "demo-controller",
        "check": "demo-controller",
    }
    assert made(values) == {"demo-roles": ROLE, "tools": {}, "demo-controller": {"a": "b"}}


def test_a_reward_in_a_pod_with_a_trained_role_has_its_account() -> None:
    found = accounts({"placement": {"strategy": "hybrid"}, "serviceAccounts": {"roles": {"name": "models"}}})
    assert (found["policy"], found["scoring"]) == ("models", "models")


def test_the_controllers_rights_go_to_the_account_that_is_named() -> None:
    values = {"serviceAccounts": {"controller": {"name": "mine"}}}
    assert made(values) == {}
    [binding] = of_kind(objects(values), "RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == ["mine"]
    assert accounts(values)["controller"] == "mine"


@pytest.mark.parametrize("key", ["roles", "reward", "environment"])
def test_annotations_of_an_account_that_nobody_makes_are_refused(key: str) -> None:
    said = refusal(CONVERSES | {"serviceAccounts": {key: {"name": "mine", "annotations": ROLE}}})
    assert f"serviceAccounts.{key}.annotations is set, but the chart makes no such account: set service" in said


HYBRID: Object = {"placement": {"strategy": "hybrid"}}
SCORING = {"scoring": ["reward", "environment"], "others": ["actor", "rollout", "reference", "critic"]}
TOGETHER = CONVERSES | {"placement": {"strategy": "custom", "groups": SCORING}}


@pytest.mark.parametrize(
    ("values", "key", "account", "why"),
    [
        ({}, "environment", {"create": True}, "this job has no environment: leave it out"),
        ({}, "environment", {"annotations": ROLE}, "this job has no environment"),
        (HYBRID, "reward", {"egress": [{}]}, "pods of reward have the account serviceAccounts.roles, because"),
        (TOGETHER, "environment", {"name": "a"}, "pods of environment have the account serviceAccounts.reward"),
    ],
)
def test_an_account_that_no_pod_has_is_refused(values: Object, key: str, account: Object, why: str) -> None:
    [field] = account
    said = refusal(values | {"serviceAccounts": {key: account}})
    assert said.startswith(f"serviceAccounts.{key}.{field} is set, but {why}")
