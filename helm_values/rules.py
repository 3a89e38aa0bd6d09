"""Values that contradict each other, each pair with the sentence with which the chart's schema refuses it.

A rule is `if` and `then` of JSON Schema. Where its condition holds, the values would have to be the sentence,
which they never are, and the validator says so: Helm prints "value must be 'SENTENCE'". So a rule says what to
do, all broken rules are reported at once, and `rolemesh check` says the same without Helm. Conditions that JSON
Schema cannot express (a comparison of two values, the longest of several paths) stay in the templates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from helm_values.values import AutoscalingValues, ClaimValues, StorageValues
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.plugin_imports import NAMED
from rolemesh.config.placement import strategies

Condition = dict[str, Any]

NOTHING: tuple[Any, ...] = (None, "", [], {})
IN_CLAIM = "write a path in a claim, relative to storage.workspace.mountPath or absolute"
CODE = "/etc/rolemesh-reward/reward.py"


def at(path: str, schema: Condition) -> Condition:
    """The value at a dotted path is there, and matches a schema."""
    for key in reversed(path.split(".")):
        schema = {"type": "object", "required": [key], "properties": {key: schema}}
    return schema


def each_of(*conditions: Condition) -> Condition:
    return {"allOf": list(conditions)}


def any_of(*conditions: Condition) -> Condition:
    return {"anyOf": list(conditions)}


def no(condition: Condition) -> Condition:
    return {"not": condition}


def has(path: str, *values: Any) -> Condition:
    """The value at a path is one of these. None is also one that is not there."""
    if None in values:
        return no(at(path, no({"enum": list(values)})))
    return at(path, {"enum": list(values)})


def given(path: str) -> Condition:
    """There is a value at a path, and it is not empty."""
    return at(path, no({"enum": list(NOTHING)}))


HAS_CLAIM = any_of(given("size"), given("existingClaim"))


def is_above(path: str, most: int) -> Condition:
    return at(path, {"type": "integer", "exclusiveMinimum": most})


def text(pattern: str) -> Condition:
    return {"type": "string", "pattern": pattern}


def rules() -> list[Condition]:
    """Return the rules about several sections, for `allOf` of the schema."""
    found = (*_of_job(), *_of_placement(), *_of_storage(), *_of_the_rest())
    return [rule(sentence, condition) for sentence, condition in found]


def rule(sentence: str, condition: Condition) -> Condition:
    return {"if": condition, "then": {"const": sentence}}


def rule_of_paths() -> Condition:
    """Return the rule about a path: the chart checks where it leads, so it has to be the same in every pod."""
    home = rule(f"a path without ~, which in a pod is /tmp and is lost with it: {IN_CLAIM}", text("^~"))
    variable = rule(f"a path without $(NAME), which the chart does not know: {IN_CLAIM}", text(r"\$\("))
    return home | {"else": variable}


def rules_of_types() -> dict[str, list[Condition]]:
    """Return the rules about one section, by the name of its type."""
    made = each_of(given("size"), no(given("existingClaim")))
    return {
        "ClaimValues": [
            rule(
                "accessModes has ReadWriteOncePod, with which one pod alone can mount the claim, but a job has "
                "several: use ReadWriteMany, or ReadWriteOnce with storage.singleNode",
                each_of(made, _mode("ReadWriteOncePod")),
            ),
        ],
        "Scaler": [
            rule(
                "pendingPerReplica is set, but the scaler is hpa, which does not count rows: set the scaler to "
                "keda, or leave it out",
                each_of(has("scaler", "hpa"), given("pendingPerReplica")),
            ),
            rule(
                "metrics is set, but the scaler is keda, which counts pending rows alone: set the scaler to "
                "hpa, or leave them out",
                each_of(has("scaler", "keda"), given("metrics")),
            ),
        ],
    }


def _mode(mode: str) -> Condition:
    return at("accessModes", {"contains": {"const": mode}})


def _of_job() -> Iterator[tuple[str, Condition]]:
    yield (
        "job.placement is set, but in the chart this section is a separate value: move it to placement",
        given("job.placement"),
    )
    without_plugins = each_of(*(no(given(key)) for key in ("plugins.code", "plugins.configMap", "job.plugins")))
    for key, catalog in NAMED.items():
        unknown = each_of({"type": "string"}, no({"enum": list(catalog)}))
        several = {"type": "array", "contains": unknown}
        yield (
            f"job.{key} has a name that is not built in: set it to one of {', '.join(catalog)}, or define it "
            "in plugins.code",
            each_of(without_plugins, at(f"job.{key}", any_of(unknown, several))),
        )
    own_page = at("job.algorithm.page", each_of({"type": "string"}, no({"enum": list(PAGES)})))
    of_own_estimator = each_of(
        has("job.algorithm.page", None),
        has("job.algorithm.filter_groups.enable", None, False),
        at("job.algorithm.adv_estimator", no({"enum": list(ESTIMATORS)})),
    )
    yield (
        "job.algorithm has a page of a plug-in, or an estimator of one, and the chart cannot know "
        "whether it calls a critic: set job.critic.enable to true or false",
        each_of(no(without_plugins), has("job.critic.enable", None), any_of(own_page, of_own_estimator)),
    )
    estimating = [name for name, page in PAGES.items() if page.learns_from == "prompts"]
    comparing = [name for name, estimator in ESTIMATORS.items() if estimator.compares]
    one_answer = [has(f"job.rollout.{key}", None, 1) for key in ("n", "false")]  # as Helm reads the key n
    yield (
        "job.algorithm.adv_estimator compares the responses to one prompt, but job.rollout.n is 1: set it to 2 "
        "or more",
        each_of(
            has("job.algorithm.page", None, *estimating),
            has("job.algorithm.adv_estimator", *comparing),
            *one_answer,
        ),
    )
    several_machines = each_of(given("job.trainer.n_gpus_per_node"), is_above("job.trainer.nnodes", 1))
    yield (
        "job.trainer.n_gpus_per_node times nnodes is above 1, but the chart takes the ranks of a group from "
        "placement.ranks: set them there, and leave these keys out",
        any_of(is_above("job.trainer.n_gpus_per_node", 1), several_machines),
    )


def _of_placement() -> Iterator[tuple[str, Condition]]:
    fixed = has("placement.strategy", *(name for name, table in strategies().items() if table))
    custom = has("placement.strategy", *(name for name, table in strategies().items() if not table))
    yield (
        f"placement.strategy is not set: set it to one of {', '.join(strategies())}",
        no(at("placement.strategy", {})),
    )
    yield (
        "placement.groups is set, but placement.strategy defines its own groups: set the strategy to custom",
        each_of(fixed, given("placement.groups")),
    )
    yield (
        "placement.strategy is custom, but placement.groups is empty: list the roles of each group there, or "
        "choose another strategy",
        each_of(custom, no(given("placement.groups"))),
    )
    yield (
        "placement.groups has no group with actor, which every job has: add it to a group",
        each_of(
            custom,
            given("placement.groups"),
            at("placement.groups", {"additionalProperties": no({"contains": {"const": "actor"}})}),
        ),
    )
    yield (
        "placement.launcher is ray, but the chart decides this for each group: leave it out; a group of "
        "several pods starts by Ray",
        has("placement.launcher", "ray"),
    )
    scaled = [given(f"autoscaling.{role}") for role in AutoscalingValues.model_fields]
    yield (
        "autoscaling is set, but gang.scheduler is kueue: a scaler counts pods that wait for quota as "
        "replicas that do too little, and adds more; remove it, or set the scheduler to none",
        each_of(has("gang.scheduler", "kueue"), any_of(*scaled)),
    )
    for role in AutoscalingValues.model_fields:
        key = f"autoscaling.{role}"
        yield (
            f"placement.replicas.{role} is above 1, but {key} decides the number of its pods: set "
            f"{key}.minReplicas instead",
            each_of(given(key), is_above(f"placement.replicas.{role}", 1)),
        )


def claims() -> dict[str, ClaimValues]:
    """Return the claims of storage, with their defaults."""
    fields = StorageValues.model_fields.items()
    return {name: field.default for name, field in fields if isinstance(field.default, ClaimValues)}


def _of_storage() -> Iterator[tuple[str, Condition]]:
    absent = {}
    for name, default in claims().items():
        key = f"storage.{name}"
        absent[name] = no(at(key, HAS_CLAIM))
        read_by_many = each_of(has("readOnly", True), _mode("ReadOnlyMany"))
        of_one_node = each_of(
            given("size"),
            no(given("existingClaim")),
            no(any_of(_mode("ReadWriteMany"), _mode("ReadWriteOncePod"), read_by_many)),
        )
        yield (
            f"{key}.accessModes has no mode with which pods on several nodes can use the claim: set "
            "storage.singleNode to true, or use ReadWriteMany",
            each_of(no(has("storage.singleNode", True)), at(key, of_one_node)),
        )
        settings = default.model_dump(mode="json", exclude={"size", "existingClaim"})
        changed = [at(setting, no({"const": value})) for setting, value in settings.items()]
        if name != "workspace":
            yield (
                f"{key} has settings, but neither a size nor an existingClaim: set one, or leave the settings "
                "out",
                each_of(absent[name], at(key, any_of(*changed))),
            )
    yield (
        "storage.workspace has neither a size nor an existingClaim: set one, because the run directory is "
        "there",
        absent["workspace"],
    )
    yield (
        "storage.workspace.readOnly is true, but the controller takes its lock there: set it to false",
        has("storage.workspace.readOnly", True),
    )
    yield (
        "storage.caches.readOnly is true, but pods write what they compile there: set it to false",
        each_of(no(absent["caches"]), has("storage.caches.readOnly", True)),
    )


def _of_the_rest() -> Iterator[tuple[str, Condition]]:
    yield (
        "image.repository has a digest: put the digest in image.digest, and leave it out here",
        at("image.repository", text("@")),
    )
    yield (
        "image.repository has a tag: put the tag in image.tag, and leave it out here",
        at("image.repository", text("^[^@]*:[^@/]*$")),
    )
    yield (
        "gang.scheduler is kueue, but gang.queue is empty: set it to a LocalQueue of the namespace",
        each_of(has("gang.scheduler", "kueue"), no(given("gang.queue"))),
    )
    yield (
        "gang.queue is set, but gang.scheduler has no queues: set it to volcano or kueue, or leave the queue "
        "out",
        each_of(has("gang.scheduler", None, "none", "coscheduling"), given("gang.queue")),
    )
    yield (
        "controller.scaleUp is true, but the controller scales up what it scales down: set "
        "controller.scaleDown and controller.rbac to true",
        each_of(
            has("controller.scaleUp", True),
            any_of(no(has("controller.scaleDown", True)), no(has("controller.rbac", True))),
        ),
    )
    yield (
        f"rewardFunction.code is set: set job.reward.custom_reward_function.path to {CODE}, where the code is "
        "mounted, and leave rewardFunction.configMap empty",
        each_of(
            given("rewardFunction.code"),
            any_of(no(has("job.reward.custom_reward_function.path", CODE)), given("rewardFunction.configMap")),
        ),
    )
    yield (
        "plugins.code and plugins.configMap are both set: set only one, and put all files into it",
        each_of(given("plugins.code"), given("plugins.configMap")),
    )
    yield (
        "plugins.configMap is set, but job.plugins names none of its files: add them, as "
        "/etc/rolemesh-plugins/FILE.py",
        each_of(given("plugins.configMap"), no(any_of(given("plugins.code"), given("job.plugins")))),
    )
    fetches = has("huggingFace.fetch", True)
    yield (
        "huggingFace.cache is set, but huggingFace.fetch is false, and nothing is downloaded: set it to "
        "true, or leave the cache out",
        each_of(given("huggingFace.cache"), no(fetches)),
    )
    yield (
        "huggingFace.secret is set, but no pod fetches or prepares anything: set huggingFace.fetch to true, or "
        "leave the secret out",
        each_of(given("huggingFace.secret"), no(fetches), no(given("prepare"))),
    )
    yield (
        "tls.issuerRef.kind or group is set, but tls.issuerRef.name is empty: set it, or leave the others out",
        each_of(
            no(given("tls.issuerRef.name")),
            no(
                each_of(
                    has("tls.issuerRef.kind", None, "Issuer"),
                    has("tls.issuerRef.group", None, "cert-manager.io"),
                )
            ),
        ),
    )
    yield (
        "tls.secret or tls.secrets is set, but tls.mode is not secret: set the mode to secret, or leave them "
        "out",
        each_of(no(has("tls.mode", "secret")), any_of(given("tls.secret"), given("tls.secrets"))),
    )
