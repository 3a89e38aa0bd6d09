"""What a job names at the Hub is fetched by one pod, with the token; the others wait, and read it."""

from __future__ import annotations

from typing import Any

import pytest
from rendering import objects, of_kind, pods, refusal
from test_texts import AMBIGUOUS

from rolemesh.services.controller.run.attempts import COUNTED, NoProgress

FETCH = {
    "huggingFace": {"fetch": True, "cache": "/models/hub", "secret": "hub"},
    "storage": {"models": {"existingClaim": "weights", "readOnly": False}},
    "job": {"actor": {"model": {"path": "Owner/Name"}}},
    "prepare": [{"creates": "data/train.parquet", "command": ["make", "data"]}],
}


def specs(values: dict[str, Any]) -> dict[str, Any]:
    """Of each pod with containers, by component."""
    found = {}
    for pod in pods(objects(values)):
        labels = pod["metadata"]["labels"]
        found[labels["app.kubernetes.io/component"]] = pod["spec"]
    return found


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_the_controllers_pod_fetches_and_the_others_wait() -> None:
    found = specs(FETCH)
    assert {"controller", "actor", "reward"} <= found.keys()
    [done] = {spec["initContainers"][0]["args"][0] for spec in found.values()}
    assert done.startswith("/models/hub/fetched/")
    for component, spec in found.items():
        fetch, prepare = spec["initContainers"]
        assert (fetch["name"], prepare["name"]) == ("fetch", "prepare-0")
        runs = fetch["command"][0] == "flock"
        assert runs == (component == "controller")
        if runs:
            assert fetch["args"] == [done, "rolemesh", "fetch", "/etc/rolemesh/job.yaml", "--done", done]
        assert ("HF_TOKEN_PATH" in env(fetch)) == runs
        [main] = spec["containers"]
        assert env(main)["HF_HUB_OFFLINE"] == "1"
        assert env(main)["HF_HUB_CACHE"] == env(fetch)["HF_HUB_CACHE"] == "/models/hub"
        mounts = [
            {m["name"]: m["readOnly"] for m in c["volumeMounts"] if "readOnly" in m} for c in (fetch, main)
        ]
        assert [mount["models"] for mount in mounts] == [not runs, True]
    [job] = of_kind(objects(FETCH), "Job")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    failing = {
        r["onExitCodes"]["containerName"]: r["onExitCodes"]["values"] for r in rules if r["action"] == "FailJob"
    }
    assert failing == {"controller": [2, NoProgress.exit_code], "fetch": [2]}
    (ignored,) = [rule["onExitCodes"] for rule in rules if rule["action"] == "Ignore" and "onExitCodes" in rule]
    assert (ignored["containerName"], ignored["operator"]) == ("controller", "In")
    assert ignored["values"] == [COUNTED]  # what it cannot count, as what flock ends with, backoffLimit counts
    assert "--max-attempts=5" in job["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rewardFunction": {"writes": True}},
        {"job": {"trainer": {"profile_steps": [1]}, "rollout": {"multi_turn": {"enable": True}}}},
        {"placement": {"strategy": "hybrid"}},
    ],
)
def test_the_token_is_a_file_where_something_is_prepared_and_nowhere_else(values: dict[str, Any]) -> None:
    """It is in no pod whose roles are reward or environment alone, whatever else these may do."""
    secret = {"secretName": "hub", "defaultMode": 0o400, "items": [{"key": "token", "path": "token"}]}
    holding = set()
    for component, spec in specs(FETCH | values).items():
        volumes = [volume for volume in spec["volumes"] if volume["name"] == "hub-token"]
        assert volumes in ([], [{"name": "hub-token", "secret": secret}])
        for container in [*spec["initContainers"], *spec["containers"]]:
            paths = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "hub-token"]
            runs = container in spec["initContainers"] and container["command"][0] == "flock"
            assert paths == (["/etc/rolemesh-hub"] if runs else [])
            assert env(container).get("HF_TOKEN_PATH") == ("/etc/rolemesh-hub/token" if runs else None)
            assert "hub" not in str(container["env"]).replace("rolemesh-hub", "").replace("/models/hub", "")
            if runs:
                assert volumes
                holding.add(component)
    assert holding >= {"controller", "check"}
    assert not holding & {"reward", "environment"}


def test_other_models_are_fetched_anew_and_other_settings_are_not() -> None:
    def done(job: dict[str, Any]) -> str:
        return str(specs(FETCH | {"job": job})["actor"]["initContainers"][0]["args"][0])

    model = FETCH["job"]["actor"]["model"]  # type: ignore[index]
    assert done({"actor": {"model": model}}) == done({"actor": {"model": model, "clip_ratio": 0.3}})
    assert done({"actor": {"model": model}}) != done({"actor": {"model": model | {"revision": "v1"}}})


def test_the_workspace_has_the_cache_by_default_and_without_fetch_there_is_none() -> None:
    found = specs({"huggingFace": {"fetch": True}})
    assert env(found["actor"]["containers"][0])["HF_HUB_CACHE"] == "/workspace/huggingface"
    names = {name for spec in specs({}).values() for name in env(spec["containers"][0])}
    assert not any(name.startswith("HF_") for name in names)


@pytest.mark.parametrize("text", [text for text in AMBIGUOUS if ":" not in text])  # as in any mount's path
def test_the_cache_stays_one_text(text: str) -> None:
    cache = f"/models/{text}"
    spec = specs(FETCH | {"huggingFace": {"fetch": True, "cache": cache}})["controller"]
    assert env(spec["containers"][0])["HF_HUB_CACHE"] == cache
    assert spec["initContainers"][0]["args"][0].startswith(f"{cache}/fetched/")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"storage": {"models": {"existingClaim": "w"}}},
            "storage.models is read-only: set storage.models.readOnly",
        ),
        ({"storage": {}}, "huggingFace.cache is /models/hub, which is in no claim"),
    ],
)
def test_a_cache_that_nobody_can_write_is_refused(values: dict[str, Any], words: str) -> None:
    assert words in refusal(FETCH | values)
