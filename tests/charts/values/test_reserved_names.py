"""What the chart has in a pod under a name, values cannot have under the same name."""

from __future__ import annotations

import pytest
from rendering import Object, objects, pods, refusals
from test_every_value import DEFAULTS
from test_texts import OPERATED, OWN, SCALED, merged

FILES: Object = {
    "huggingFace": {"fetch": True, "secret": "hub"},
    "rewardFunction": {"configMap": "mine"},
    "plugins": {"configMap": "mine"},
    "job": {"plugins": ["/etc/rolemesh-plugins/a.py"]},
}
KUEUE: Object = {
    "gang": {"scheduler": "kueue", "queue": "lab"},
    "autoscaling": dict.fromkeys(SCALED["autoscaling"]),
}
FREE = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"}
FREE |= {"sidecar.istio.io/inject", "istio.io/dataplane-mode", "linkerd.io/inject"}
FREE |= {claim["mountPath"] for claim in DEFAULTS["storage"].values() if isinstance(claim, dict)}


@pytest.mark.parametrize(
    "base",
    [OPERATED, OWN, merged(OPERATED, KUEUE)],
    ids=["volcano", "coscheduling", "kueue"],
)
def test_every_name_that_the_chart_has_in_a_pod_is_reserved(base: Object) -> None:
    """The values of meshes and threads may be replaced. Paths of claims are compared by a template."""
    values = merged(base, FILES)
    names: dict[str, set[str]] = {
        key: set() for key in ("env", "volumes", "volumeMounts", "labels", "annotations")
    }
    for pod in pods([thing for thing in objects(values) if thing["kind"] != "Pod"]):
        for key in ("labels", "annotations"):
            names[key] |= pod["metadata"][key].keys()
        names["volumes"] |= {each["name"] for each in pod["spec"]["volumes"]}
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            names["env"] |= {each["name"] for each in container["env"]}
            names["volumeMounts"] |= {each["mountPath"] for each in container["volumeMounts"]}
    given = {
        "env": [{"name": name, "value": ""} for name in names["env"]],
        "volumes": [{"name": name} for name in names["volumes"]],
        "volumeMounts": [{"name": "a", "mountPath": path} for path in names["volumeMounts"]],
        "labels": dict.fromkeys(names["labels"], "a"),
        "annotations": dict.fromkeys(names["annotations"], "a"),
    }
    said = " ".join(refusals(values | {"pods": given}))
    every = {(key, name) for key, each in names.items() for name in each}
    every = {each for each in every if not each[1].startswith("rolemesh.dev/")}
    accepted = {name for key, name in every if f"{key} has {name}, which is reserved for the chart" not in said}
    assert accepted == {name for _, name in every if name in FREE}
    assert {"ROLEMESH_JOB", "HF_TOKEN_PATH", "hub-token", "/etc/rolemesh-tls"} <= {name for _, name in every}


def test_a_null_is_no_reserved_name() -> None:
    """It stands for the settings of `pods`."""
    objects({"groups": {"reward": dict.fromkeys(("env", "volumes", "volumeMounts", "labels", "annotations"))}})
