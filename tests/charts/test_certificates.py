"""Which certificates the chart asks for, what they name, and which pods mount their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from rendering import STRATEGIES, Object, objects, of_kind, pods, refusals

JOB = {"algorithm": {"use_kl_in_reward": True}}


def secret_of(pod: Object) -> str:
    """The one Secret that a pod mounts, by mode 0400, and for its process alone, not for steps of `prepare`."""
    spec = pod["spec"]
    [keys] = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
    assert keys["defaultMode"] == 0o400
    assert {item["path"] for item in keys["items"]} == {"tls.crt", "tls.key", "ca.crt"}
    assert all("tls" not in {m["name"] for m in init["volumeMounts"]} for init in spec["initContainers"])
    [container] = spec["containers"]
    [where] = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "tls"]
    assert f"--tls-dir={where}" in container["args"]
    return str(keys["secretName"])


def roles_of(pod: Object) -> tuple[str, ...]:
    """What the pod's certificate has to name: what it serves, or both that the controller's pod is used as."""
    args = pod["spec"]["containers"][0]["args"]
    return tuple(args[1].split(",")) if args[0] == "serve" else ("controller", "operator")


def named(certificate: Object) -> tuple[str, ...]:
    job, *names = certificate["spec"]["dnsNames"]
    assert job == "demo"
    return tuple(name.removesuffix(".demo") for name in names if name != "demo-controller.jobs")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_workload_has_its_own_key_that_names_what_it_serves(strategy: str) -> None:
    """It names nothing else."""
    things = objects(
        {
            "job": JOB,
            "placement": STRATEGIES[strategy],
            "tls": {"mode": "certManager"},
            "prepare": [{"creates": "made", "command": ["true"]}],
        }
    )
    certificates = {
        thing["spec"]["secretName"]: named(thing)
        for thing in of_kind(things, "Certificate")
        if not thing["spec"].get("isCA")
    }
    mounted = {secret_of(pod): roles_of(pod) for pod in pods(things)}
    assert certificates == mounted
    owners = [
        (secret_of(pod), pod["metadata"]["labels"]["app.kubernetes.io/component"]) for pod in pods(things)
    ]
    assert len(set(owners)) == len(mounted) + 1  # helm test has the controller's


def test_secrets_of_ones_own_go_to_the_pods_that_are_named() -> None:
    tls = {
        "mode": "secret",
        "secret": "all",
        "secrets": {"reward": "judge", "controller": "boss"},
    }
    things = objects({"job": JOB, "tls": tls, "prepare": [STEP]})
    found = {roles_of(pod)[0]: secret_of(pod) for pod in pods(things)}
    rest = dict.fromkeys(("actor", "rollout", "reference", "critic"), "all")
    assert found == {"reward": "judge", "controller": "boss"} | rest


STEP = {"creates": "made", "command": ["true"]}


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        ({"mode": "secret"}, "but no Secret is named for actor: set tls.secrets.actor, or tls.secret for all"),
        ({"mode": "secret", "secrets": {"actor": "a"}}, "no Secret is named for controller"),
        (
            {"mode": "secret", "secret": "a", "secrets": {"rewards": "b"}},
            "tls.secrets.rewards is set, but the components are actor, controller, critic, reward, rollout",
        ),
        ({"secrets": {"reward": "a"}}, "tls.secret or tls.secrets is set, but tls.mode is not secret"),
        (
            {"mode": "certManager", "secret": "a"},
            "tls.secret or tls.secrets is set, but tls.mode is not secret",
        ),
    ],
)
def test_keys_that_nobody_would_have_are_refused(tls: Mapping[str, Any], words: str) -> None:
    [said] = refusals({"tls": tls})
    assert words in said
