"""What a job names at the Hub is fetched by the controller or `helm test`; the others wait, and read it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rendering import AMBIGUOUS, objects, of_kind, pods, refusal
from test_two_releases import COMMANDS

from rolemesh.services.controller.run.attempts import COUNTED, NoProgress

PREPARES = ["rolemesh", "prepare"]
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


def test_the_controller_and_helm_test_fetch_and_other_pods_wait() -> None:
    """While the controller is suspended, `helm test` would otherwise wait for ever, and so would the roles."""
    suspended = FETCH | {"controller": {"suspend": True}}
    assert of_kind(objects(suspended), "Job")[0]["spec"]["suspend"] is True
    found = specs(suspended)
    assert {"controller", "check", "actor", "reward"} <= found.keys()
    [done] = {spec["initContainers"][0]["args"][0].removeprefix("--creates=") for spec in found.values()}
    assert done.startswith("/models/hub/fetched/")
    for component, spec in found.items():
        fetch, prepare = spec["initContainers"]
        assert (fetch["name"], prepare["name"]) == ("fetch", "prepare-0")
        runs = fetch["command"] == PREPARES
        assert runs == (component in ("controller", "check"))
        if runs:
            assert fetch["args"][-5:] == ["rolemesh", "fetch", "/etc/rolemesh/job.yaml", "--done", done]
        if component != "reward":  # by one program in all pods: else the first pod decides what may be started
            assert prepare["command"] == PREPARES
            parsed = COMMANDS["prepare"].make_context("prepare", list(prepare["args"])).params
            assert (str(parsed["creates"]), parsed["command"]) == ("data/train.parquet", ["make", "data"])
            assert (parsed["counts_in"] is None) == (component != "controller")
        assert ("HF_TOKEN_PATH" in env(fetch)) == runs
        [main] = spec["containers"]
        assert env(main)["HF_HUB_OFFLINE"] == "1"
        assert env(main)["HF_HUB_CACHE"] == env(fetch)["HF_HUB_CACHE"] == "/models/hub"
        mounts = [
            {m["name"]: m["readOnly"] for m in c["volumeMounts"] if "readOnly" in m} for c in (fetch, main)
        ]
        assert [mount["models"] for mount in mounts] == [not runs, True]


def test_pods_and_releases_that_make_the_same_thing_take_turns() -> None:
    """In one workspace a release that downloads for hours must not keep another one waiting."""
    made = ["a/b", "/workspace/a/b/", "a/c"]
    steps = [{"creates": creates, "command": ["make", "it"]} for creates in made]
    locks = []
    for spec in specs({"prepare": steps}).values():
        named = [str(arg) for step in spec["initContainers"] for arg in step["args"] if "--lock=" in arg]
        locks += [named] * bool(named)  # those of the reward's own pods wait, and hold none
    assert len(locks) >= 4
    [first, same, other] = locks[0]
    assert all(each == locks[0] for each in locks)
    assert first == same != other
    assert re.fullmatch(r"--lock=\.prepare-[0-9a-f]{8}\.lock", first)  # in the workspace


def test_a_failure_before_the_controller_begins_ends_the_run() -> None:
    """It counts failures, and scales the roles down after the last one. Nobody else would do it."""
    things = objects(FETCH)
    [job] = of_kind(things, "Job")
    spec = job["spec"]["template"]["spec"]
    [main] = spec["containers"]
    assert "--max-attempts=5" in main["args"]
    begins = COMMANDS["control"].make_context("control", main["args"][1:]).params
    assert str(begins["counts_in"]) == ".jobs.demo-controller.start.json"
    ends = {arg for arg in main["args"] if re.match("--(scale-down|max-attempts|attempts-of)=", arg)}
    assert len(ends) > 5
    for container, command, final in zip(
        spec["initContainers"], (["rolemesh", "fetch"], ["make", "data"]), (2, None), strict=True
    ):
        assert container["command"] == PREPARES
        parsed = COMMANDS["prepare"].make_context("prepare", list(container["args"])).params
        assert parsed["command"][:2] == command
        assert parsed["final"] == final
        assert ends <= {*container["args"]}
        # A file of its own: another step's success must not forget its failures.
        assert str(parsed["counts_in"]) == f".jobs.demo-controller.{container['name']}.json"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    on_codes = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    final, counted = [2, NoProgress.exit_code], [COUNTED]  # of any container
    assert on_codes == {
        "FailJob": {"operator": "In", "values": final},
        "Ignore": {"operator": "In", "values": counted},
    }


def test_attempts_are_counted_per_job_and_revision_of_values() -> None:
    """A Job that is made anew has another uid, and an upgrade another revision, though it restarts no pod."""
    things = objects(FETCH)
    [job] = of_kind(things, "Job")
    spec = job["spec"]["template"]["spec"]
    for container in (*spec["containers"], *spec["initContainers"]):
        assert "--attempts-of=$(ROLEMESH_JOB)/$(ROLEMESH_REVISION)" in container["args"]
        found = env(container)
        assert (
            found["ROLEMESH_JOB"]["fieldRef"]["fieldPath"]
            == "metadata.labels['batch.kubernetes.io/controller-uid']"
        )
        where = found["ROLEMESH_REVISION"]["configMapKeyRef"]
        [config] = [
            thing for thing in of_kind(things, "ConfigMap") if thing["metadata"]["name"] == where["name"]
        ]
        assert config["data"][where["key"]] == "1"
    unlimited = FETCH | {"controller": {"maxAttempts": 0}}
    assert "ROLEMESH_" not in str(of_kind(objects(unlimited), "Job"))


@pytest.mark.parametrize(
    ("controller", "advice"),
    [
        ({"backoffLimit": 5}, ""),
        ({"backoffLimit": 4}, "set backoffLimit to 5 or more, or maxAttempts to 4 or less"),
        ({"backoffLimit": 0}, "set backoffLimit to 5 or more"),  # maxAttempts: 0 is no limit
        ({"backoffLimit": 4, "rbac": False}, ""),
        ({"backoffLimit": 4, "scaleDown": False}, ""),
    ],
)
def test_a_job_that_ends_before_its_roles_scale_down_is_refused(
    controller: dict[str, Any], advice: str
) -> None:
    said = refusal({"controller": controller})
    assert said.startswith("controller.backoffLimit is ") == bool(advice)
    assert said.partition(" would leave the roles their GPUs: ")[2] == advice


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rewardFunction": {"writes": True}},
        {"job": {"trainer": {"profile_steps": [1]}, "rollout": {"multi_turn": {"enable": True}}}},
        {"placement": {"strategy": "hybrid"}},
    ],
)
def test_the_token_is_mounted_only_where_something_is_prepared(values: dict[str, Any]) -> None:
    """It is in no pod whose roles are reward or environment alone, whatever else these may do."""
    secret = {"secretName": "hub", "defaultMode": 0o400, "items": [{"key": "token", "path": "token"}]}
    holding = set()
    for component, spec in specs(FETCH | values).items():
        volumes = [volume for volume in spec["volumes"] if volume["name"] == "hub-token"]
        assert volumes in ([], [{"name": "hub-token", "secret": secret}])
        for container in [*spec["initContainers"], *spec["containers"]]:
            paths = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "hub-token"]
            runs = container in spec["initContainers"] and container["command"] == PREPARES
            assert paths == (["/etc/rolemesh-hub"] if runs else [])
            assert env(container).get("HF_TOKEN_PATH") == ("/etc/rolemesh-hub/token" if runs else None)
            assert "hub" not in str(container["env"]).replace("rolemesh-hub", "").replace("/models/hub", "")
            if runs:
                assert volumes
                holding.add(component)
    assert holding >= {"controller", "check"}
    assert not holding & {"reward", "environment"}


def test_other_models_are_fetched_anew_but_other_settings_not() -> None:
    def done(job: dict[str, Any]) -> str:
        return str(specs(FETCH | {"job": job})["actor"]["initContainers"][0]["args"][0])

    model = FETCH["job"]["actor"]["model"]  # type: ignore[index]
    assert done({"actor": {"model": model}}) == done({"actor": {"model": model, "clip_ratio": 0.3}})
    assert done({"actor": {"model": model}}) != done({"actor": {"model": model | {"revision": "v1"}}})


def test_the_workspace_has_the_cache_only_with_fetch() -> None:
    """With fetch it is there by default; without fetch there is none."""
    found = specs({"huggingFace": {"fetch": True}})
    assert env(found["actor"]["containers"][0])["HF_HUB_CACHE"] == "/workspace/huggingface"
    names = {name for spec in specs({}).values() for name in env(spec["containers"][0])}
    assert not any(name.startswith("HF_") for name in names)


@pytest.mark.parametrize("text", [text for text in AMBIGUOUS if ":" not in text])  # as in any mount's path
def test_the_cache_stays_one_text(text: str) -> None:
    cache = f"/models/{text}"
    spec = specs(FETCH | {"huggingFace": {"fetch": True, "cache": cache}})["controller"]
    assert env(spec["containers"][0])["HF_HUB_CACHE"] == cache
    assert spec["initContainers"][0]["args"][0].startswith(f"--creates={cache}/fetched/")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"storage": {"models": {"existingClaim": "w"}}},
            "storage.models is read-only: set storage.models.readOnly",
        ),
        ({"storage": {}}, "huggingFace.cache is /models/hub, which is in no claim that all pods mount"),
        (
            {
                "storage": {"caches": {"size": "1Gi"}},
                "huggingFace": {"fetch": True, "cache": "/workspace/../caches/hub"},
            },
            "huggingFace.cache is /caches/hub, which is in no claim that all pods mount",
        ),
    ],
)
def test_a_cache_that_nobody_can_write_is_refused(values: dict[str, Any], words: str) -> None:
    assert words in refusal(FETCH | values)
