"""By the planner's own word every example of the chart can be run on the devices that its pods get."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import EXAMPLES, ROOT, groups, heads, objects, of_kind, workloads

from rolemesh.config import JobConfig, load_job
from rolemesh.config.job import make_job
from rolemesh.models.tiny import make_tiny_model
from rolemesh.planner.compare import make_plans
from rolemesh.planner.device_specs import GPUS, cpu, parse_size
from rolemesh.planner.estimate import Cluster, Planner
from rolemesh.planner.memory import role_shapes

# Their config.json, as published; a reward model of 7B has the shape of a language model of 7B.
HIDDEN = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
QWEN2_5 = {
    "Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 4864),
    "Qwen2.5-3B-Instruct": (2048, 36, 16, 2, 11008),
    "reward-7B": (3584, 28, 28, 4, 18944),
    "Qwen2.5-7B-Instruct": (3584, 28, 28, 4, 18944),
}


def model_directory(path: str, parent: Path) -> str:
    """A directory with the shape of the model that an example names."""
    directory = parent / Path(path).name
    if path == "outputs/tiny/model":
        return str(make_tiny_model(directory))
    numbers = dict(zip(HIDDEN, QWEN2_5[directory.name], strict=True))
    directory.mkdir(exist_ok=True)
    config = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": "7B" not in path, **numbers}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def job_of(values: Mapping[str, Any], parent: Path) -> JobConfig:
    """The example's job, its models where they can be read."""

    def with_models(section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        found = {key: with_models(value) for key, value in section.items()}
        if path := (found.get("model") or {}).get("path"):
            found["model"]["path"] = model_directory(path, parent)
        return found

    return make_job(with_models(values["job"]) | {"placement": values["placement"]})


def pod_limits(example: Path) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """Of each group: how many pods, and what one of them may take."""
    things = objects({}, files=(example,))
    names = list(groups(things))
    specs = [workload["spec"] for workload in (*workloads(things), *heads(things))]
    containers = [spec["template"]["spec"]["containers"][0] for spec in specs]
    pods = dict.fromkeys(names, 1) | {
        cluster["metadata"]["labels"]["app.kubernetes.io/component"]: 1 + group["numOfHosts"]
        for cluster in of_kind(things, "RayCluster")
        for group in cluster["spec"]["workerGroupSpecs"]
    }
    return {
        name: (spec.get("replicas", 1) * pods[name], container["resources"]["limits"])
        for name, spec, container in zip(names, specs, containers, strict=True)
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_planner_says_that_the_example_can_be_run(path: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    job, limits = job_of(values, tmp_path), pod_limits(path)
    devices = {group: pods * int(limit.get("nvidia.com/gpu", 0)) for group, (pods, limit) in limits.items()}
    on_gpus = any(devices.values())
    memory = sum(pods * parse_size(limit["memory"].replace("i", "iB")) for pods, limit in limits.values())
    cluster = Cluster(GPUS["h100"] if on_gpus else cpu(memory), sum(devices.values()) or 1)
    plan = Planner(job, role_shapes(job), cluster).divided(job.placement.strategy, job.plan.grouping, devices)
    assert plan.verdict == "fits"


def test_a_job_that_needs_two_gpus_for_one_role_is_no_example(tmp_path: Path) -> None:
    """The large example with a policy of 7B: not as the chart would place it, but on more GPUs with ranks."""
    (path,) = [path for path in EXAMPLES if path.stem == "gpu-standalone"]
    values = yaml.safe_load(path.read_text())
    values["job"]["actor"]["model"]["path"] = "/models/Qwen2.5-7B-Instruct"
    job, limits = job_of(values, tmp_path), pod_limits(path)
    devices = {group: pods * int(limit["nvidia.com/gpu"]) for group, (pods, limit) in limits.items()}
    planner = Planner(job, role_shapes(job), Cluster(GPUS["h100"], sum(devices.values())))
    alone = devices | {"actor": 1, "critic": 1}
    assert planner.divided("standalone", job.plan.grouping, alone).verdict == "does not fit"
    plans = {plan.name: plan for plan in make_plans(job, Cluster(GPUS["h100"], 128), searching=False)}
    assert plans["standalone"].verdict == "fits"
    assert {group.name: group.ranks > 1 for group in plans["standalone"].groups}["actor"]
    # One rank has too little memory, and a group whose engine is spread over GPUs has no more.
    assert plans["hybrid"].verdict == plans["collocate"].verdict == "does not fit"


@pytest.mark.parametrize("name", ["gsm8k-ppo", "gsm8k-grpo"])
def test_a_job_file_with_realistic_sizes_fits_on_an_80_gb_gpu(name: str, tmp_path: Path) -> None:
    files = [str(ROOT / "configs" / f"{stem}.yaml") for stem in (name, "gsm8k-0.5b")]
    job = load_job(files[0], files[1:])
    assert job.trainer.total_training_steps is None
    directory = model_directory(job.actor.model.path, tmp_path)
    job = load_job(files[0], [*files[1:], f"actor.model.path={directory}"])
    planner = Planner(job, role_shapes(job), Cluster(GPUS["h100"], 1))
    assert planner.plan(job.placement.strategy, job.plan.grouping).verdict == "fits"
