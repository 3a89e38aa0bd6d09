"""Names of variables, volumes, paths, labels and annotations that the chart has in pods itself.

Values that have one are refused by a rule, as in rules.py. Three variables may be replaced (_pod.tpl), so they
are not here. What compares two values, one name twice or the path of a claim, is refused by _unread.tpl.
"""

from __future__ import annotations

from collections.abc import Iterator

from helm_values.rules import HAS_CLAIM, Condition, at, claims, each_of, given, has, no, rule, text

Names = dict[
    str, tuple[str, ...]
]  # by the key of a pod's settings; one that ends with / is the beginning of many

PATHS = (*(f"/etc/rolemesh{of}" for of in ("", "-tls", "-reward", "-plugins", "-hub")), "/tmp", "/dev/shm")
OWN = "rolemesh.dev/"  # whatever follows, as Services and NetworkPolicies select pods by such labels
LABELS = (OWN, *(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")))
IN_PODS: Names = {
    "env": ("HOME", "USER", "PYTHONUNBUFFERED", "ROLEMESH_JOB", "ROLEMESH_REVISION"),
    "volumes": ("job", "tls", "reward", "plugins", "hub-token", "tmp", "shm"),
    "volumeMounts": PATHS,
    "labels": LABELS,
    "annotations": (
        OWN,
        *(f"checksum/{name}" for name in ("job", "reward", "plugins")),
        *(f"helm.sh/hook{of}" for of in ("", "-weight", "-delete-policy")),
    ),
}
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
SCRAPED = ("prometheus.io/scrape", "prometheus.io/port")
# In pods of groups, by gang.scheduler.
GANGS: dict[str, Names] = {
    "volcano": {"annotations": ("scheduling.k8s.io/group-name",)},
    "coscheduling": {"labels": ("scheduling.x-k8s.io/pod-group",)},
    "kueue": {
        "labels": ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name"),
        "annotations": ("kueue.x-k8s.io/pod-group-total-count", "kueue.x-k8s.io/pod-group-serving"),
    },
}
# In objects for monitoring.
MONITORING = (*LABELS, "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart")


def rules_of_pods() -> Iterator[Condition]:
    """Yield the rules about `pods`, `controller` and `groups`, some of which hold beside other values alone."""
    yield _in_pods(_without(IN_PODS))
    token = _without({"env": ("HF_TOKEN", "HF_TOKEN_PATH")}, "huggingFace.secret names another")
    yield {"if": given("huggingFace.secret"), "then": _in_pods(token)}
    cache = _without({"env": ("HF_HUB_CACHE",)}, "set huggingFace.cache") + _without(
        {"env": ("HF_HUB_OFFLINE",)}
    )
    yield {"if": has("huggingFace.fetch", True), "then": _in_pods(cache)}
    for name in claims():
        names: Names = {"volumes": (name,)} | ({"env": CACHES} if name == "caches" else {})
        yield {"if": at(f"storage.{name}", HAS_CLAIM), "then": _in_pods(_without(names))}
    yield {"if": has("monitoring.annotations", True), "then": _in_pods(_without({"annotations": SCRAPED}))}
    for scheduler, names in GANGS.items():
        of_groups = _in_pods(_without(names), "pods", "groups")
        yield {"if": has("gang.scheduler", scheduler), "then": of_groups}


def reserved_by_types() -> dict[str, list[Condition]]:
    """Return the rules about one section, by the name of its type."""
    labels = _without({"labels": MONITORING})
    paths = [
        rule(
            f"mountPath is {path}, which is reserved for the chart: set another path",
            each_of(HAS_CLAIM, at("mountPath", _is_path(path))),
        )
        for path in PATHS
    ]
    return {"MonitoringValues": labels, "DashboardsValues": labels, "ClaimValues": paths}


def _in_pods(each: list[Condition], *where: str) -> Condition:
    """Apply rules about settings of pods wherever these are, or to some of the places."""
    rest = {"allOf": each}
    places = {"pods": rest, "controller": rest, "groups": {"additionalProperties": rest}}
    return {"properties": {name: place for name, place in places.items() if not where or name in where}}


def _without(names: Names, advice: str = "leave it out, or use another name") -> list[Condition]:
    """Return the rules about an object that may not have these names."""
    found = []
    for key, name in ((key, name) for key, each in names.items() for name in each):
        what = name
        if key in ("env", "volumes"):
            there = _contains(at("name", {"const": name}))
        elif key == "volumeMounts":
            there = _contains(at("mountPath", _is_path(name)))
        elif name.endswith("/"):
            what = f"a name that begins with {name}"
            there = no({"propertyNames": no(text(f"^{name}"))})
        else:
            there = {"type": "object", "required": [name]}
        found.append(rule(f"{key} has {what}, which is reserved for the chart: {advice}", at(key, there)))
    return found


def _contains(item: Condition) -> Condition:
    return {"type": "array", "contains": item}


def _is_path(path: str) -> Condition:
    return text(f"^{path.replace('/', '/+')}/*$")
