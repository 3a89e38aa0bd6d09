"""The chart deploys every job as Plan says, and what Plan refuses, the chart or its first pod refuses.

`make drawn` compares 2,000 jobs, and the ordinary tests the first 200: every recipe, and every page with every
estimator. One render has many jobs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from drawn_jobs import CHANGES, RECIPES, STRATEGIES, Drawn, bases, drawn_job, job_of
from rendering import (
    APIS,
    CHART,
    KUBERNETES,
    Object,
    Refused,
    groups,
    helm,
    of_kind,
    refusal,
    run_go,
    workloads,
)

from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config.base import merge
from rolemesh.config.job import JobConfig, make_job
from rolemesh.config.plan import PlannedGroup, paths_at
from rolemesh.config.yaml_file import parse_yaml

AT_ONCE = 100
NUM_JOBS = int(os.environ.get("DRAWN_JOBS", str(2 * AT_ONCE)))
STARTS = range(0, NUM_JOBS, AT_ONCE)

# Renders the workloads of each job of a list, in one process.
MANY = """
{{- range $number, $drawn := .Files.Get "drawn.json" | fromJsonArray }}
{{- $values := include "rlhf-job.over" (list (deepCopy $.Values) $drawn.values) | fromJson }}
{{- $at := merge (dict "Values" $values) (pick $ "Files" "Release" "Capabilities" "Chart" "Template") }}
---
kind: Drawn
number: {{ $number }}
file: {{ include "rlhf-job.file" $at | toJson }}
{{- if $drawn.renders }}
workloads: {{ include (print $.Template.BasePath "/workloads.yaml") $at | toJson }}
{{- end }}
{{- end }}
"""
MOUNT_PATHS = {"models": "/models", "data": "/data", "checkpoints": "/checkpoints"}
STORAGE: Object = {name: {"existingClaim": name} for name in MOUNT_PATHS}


def without_replicas(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"placement": job.placement.model_copy(update={"replicas": {}})})


def values_of(drawn: Drawn, seed: int) -> Object:
    """The chart's values of a job; by turns on CPUs, and on the GPUs that Plan asks for."""
    sections, job = drawn.sections, drawn.job
    on_gpus = seed % 2 == 0 or (job and job.rollout.tensor_model_parallel_size > 1)
    own: Object = {}
    if job and on_gpus:
        own = {group.name: {"gpus": group.devices} for group in job.plan.groups}
    roles = {role: {"gpus": 0} for role in ROLES}
    kind = "gpu" if on_gpus or sections.get("rollout", {}).get("name") == "vllm" else "cpu"
    values: Object = {"job": sections, "placement": drawn.placement, "storage": STORAGE}
    return values | {"image": {"kind": kind}, "roles": roles, "groups": own}


@cache
def rules() -> jsonschema.Draft202012Validator:
    """What the schema says of the job's values together, and of the placement. Of one value Python says it."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    of_jobs = [rule for rule in schema["allOf"] if re.search('"(job|placement)"', json.dumps(rule))]
    of_placement = {"placement": schema["properties"]["placement"]}
    return jsonschema.Draft202012Validator(
        {"$defs": schema["$defs"], "allOf": of_jobs, "properties": of_placement}
    )


@cache
def defaults() -> Object:
    found: Object = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return found


def rendered(drawn: Sequence[Object], into: Path) -> list[tuple[str, list[Object]]]:
    """Render jobs, and return of each the job file of its pods and its workloads."""
    chart = into / "chart"
    shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("dashboards", "examples", "tests", "NOTES.txt"))
    for path in (chart / "templates").glob("*.yaml"):
        if path.name not in ("workloads.yaml", "controller.yaml"):
            path.unlink()
    (chart / "templates" / "many.yaml").write_text(MANY, encoding="utf-8")
    (chart / "drawn.json").write_text(json.dumps(drawn), encoding="utf-8")
    program = helm()
    assert program
    command = [program, "template", "demo", str(chart), "--kube-version", KUBERNETES]
    command += ["--show-only", "templates/many.yaml"]
    command += [word for api in APIS for word in ("--api-versions", api)]
    ran = run_go(*command)
    if ran.returncode:
        raise Refused(ran.stderr)
    parts = {part["number"]: part for part in _read(ran.stdout)}
    return [(parts[number]["file"], _read(parts[number].get("workloads", ""))) for number in range(len(drawn))]


def _read(text: str) -> list[Object]:
    return [thing for thing in yaml.load_all(text, Loader=yaml.CSafeLoader) if thing]


def disagreements(job: JobConfig, things: list[Object], on_gpus: bool) -> Iterator[str]:
    """Say where the workloads differ from the job's plan."""
    plan = job.plan
    if (found := groups(things)) != plan.grouping:
        yield f"groups {found}, not {plan.grouping}"
        return
    for thing in (*workloads(things), *of_kind(things, "RayCluster")):
        group = plan[thing["metadata"]["labels"]["app.kubernetes.io/component"]]
        for name, (of_chart, planned) in _facts(thing, job, group, on_gpus).items():
            if of_chart != planned:
                yield f"{name} of {group.name} {of_chart}, not {planned}"


def _facts(thing: Object, job: JobConfig, group: PlannedGroup, on_gpus: bool) -> dict[str, tuple[Any, Any]]:
    """Facts of a group, each by the chart and by the plan."""
    spec, pods = thing["spec"], 1
    if thing["kind"] == "RayCluster":
        pods += sum(each["numOfHosts"] for each in spec["workerGroupSpecs"])
        spec = spec["headGroupSpec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    written = {_claim_of(path) for key in group.writes for path in paths_at(job, key)}
    only_user_code = all(ROLES[role].runs_user_code for role in group.roles)
    ranks = sum(port["name"].startswith("metrics") for port in container["ports"])
    found = {
        "replicas": (spec.get("replicas", 1), group.replicas),
        "ranks": (ranks * pods, group.ranks),
        "claims": (claims, group.claims(MOUNT_PATHS, "/workspace") | {"workspace"}),
        "written": (writable & written, written),
        "only read": ("workspace" not in writable, only_user_code and not group.writes),
        "trained": (thing["kind"] != "Deployment", group.is_trained or pods > 1),
        "models": ("trainer.device=cuda" in container["args"], bool(group.models) and on_gpus),
    }
    if on_gpus:
        limits = container["resources"].get("limits", {})
        found["devices"] = (int(limits.get("nvidia.com/gpu", 0)) * pods, group.devices)
    return found


def _claim_of(path: str) -> str:
    within = [name for name, at in MOUNT_PATHS.items() if path.startswith(f"{at}/")]
    return within[0] if within else "workspace"


@pytest.mark.parametrize("start", STARTS)
def test_the_chart_deploys_drawn_jobs_as_plan_says(start: int, tmp_path: Path) -> None:
    drawn = [drawn_job(seed) for seed in range(start, start + AT_ONCE)]
    values = [values_of(each, seed) for seed, each in enumerate(drawn)]
    entries = [
        {"values": of_job, "renders": each.is_for_chart} for of_job, each in zip(values, drawn, strict=True)
    ]
    wrong = {}
    refused_by_template = 0
    for number, (file, things) in enumerate(rendered(entries, tmp_path)):
        job, seed = drawn[number].job, start + number
        by_schema = [error.message for error in rules().iter_errors(merge(defaults(), values[number]))]
        of_pods = parse_yaml(file, "job.yaml")
        if job and not drawn[number].is_for_chart:
            assert any("n_gpus_per_node" in said for said in by_schema)
            continue
        if job:
            found = [*by_schema, *disagreements(job, things, bool(values[number]["groups"]))]
            if without_replicas(make_job(of_pods)) != without_replicas(job):
                found.append("the pods read another job")
            if found:
                wrong[seed] = found
        elif not by_schema and job_of(of_pods, of_pods["placement"]) is not None:
            refused_by_template += 1
            if not refusal(values[number] | {"monitoring": {"dashboards": {"enabled": False}}}):
                wrong[seed] = ["refused by Plan alone"]
    assert not wrong, json.dumps(wrong, indent=1)
    assert refused_by_template < AT_ONCE / 5  # these take a render each
    assert AT_ONCE / 4 < sum(each.job is not None for each in drawn) < AT_ONCE * 3 / 4


# Hardly a job can have these in the chart.
REFUSED = {
    *("an unknown estimator", "an unknown page", "a budget of tokens", "devices by verl's names"),
    *("a batch of no mini-batches", "a mini-batch of no micro-batches"),
}


def test_the_jobs_that_the_chart_deploys_cover_every_recipe_page_estimator_change_and_placement() -> None:
    every = [drawn_job(seed) for seed in range(NUM_JOBS)]
    deployed = [each for each in every if each.is_for_chart]
    assert {each.base for each in deployed} == set(bases())
    pairs = {f"{page} {estimator}" for page, estimator in product([None, *PAGES], ESTIMATORS)}
    apart = {"dapo gae", "dapo remax", "grpo gae", "remax gae"}  # the page lacks what the estimator needs
    assert set(bases()) == {path.stem for path in RECIPES} | pairs - apart
    assert {name for each in deployed for name in each.changes} >= CHANGES.keys() - REFUSED
    assert {name for each in every for name in each.changes} == CHANGES.keys()
    jobs = [each.job for each in deployed if each.job]
    assert {job.page.name for job in jobs} == set(PAGES)
    assert {job.estimator.name for job in jobs} == set(ESTIMATORS)
    assert {role for job in jobs for role in job.roles} == set(ROLES)
    assert {job.placement.strategy for job in jobs} == {*STRATEGIES, "custom"}
    assert any(job.plan.num_devices > 8 for job in jobs)
