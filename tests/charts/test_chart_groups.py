"""The chart and the local launcher make the same processes of a job."""

from __future__ import annotations

import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import (
    CHART,
    EXAMPLES,
    ROOT,
    Object,
    groups,
    heads,
    notes,
    objects,
    of_kind,
    refusal,
    template,
    workloads,
)

from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.role_specs import ROLES as DECLARED
from rolemesh.config.base import merge
from rolemesh.config.job import JobConfig, load_job, make_job
from rolemesh.config.placement import PlacementConfig, strategies
from rolemesh.config.yaml_file import read_yaml
from rolemesh.errors import InvalidConfig
from rolemesh.fingerprint import fingerprint

ROLES = tuple(DECLARED)

NO_DASHBOARDS = {"monitoring": {"dashboards": {"enabled": False}}}  # large, and no matter here
GRPO: dict[str, Any] = {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 4}}
# Each may change which roles a job has, or what is refused of it.
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "KL in the reward": {"algorithm": {"use_kl_in_reward": True}},
    "KL in the loss": {"actor": {"use_kl_loss": True}},
    "an adapter": {"algorithm": {"use_kl_in_reward": True}, "actor": {"model": {"lora_rank": 8}}},
    "turns": {"rollout": {"multi_turn": {"enable": True}}},
    "a critic": {"critic": {"enable": True}},
    "filtered groups": {"algorithm": {"filter_groups": {"enable": True}}},
    "short rows": {
        "data": {"max_length": 256},
        "actor": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 256},
    },
}
# What some estimators need besides.
NEEDS: dict[str, dict[str, Any]] = {
    "gdpo": {"algorithm": {"gdpo_reward_keys": ["score"]}},
    "grpo_by_turn": {"rollout": {"multi_turn": {"enable": True}}},
}
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
BOUNDED = {"trainer": {"total_training_steps": 4}}  # filtered groups need it


def jobs() -> dict[str, dict[str, Any]]:
    """Return every recipe, and of every page (None: the estimator's) with every estimator one job, by name.

    The changes take turns, so that each page and each estimator has each of them; where the job file may not
    have a change, it has the next one. Left out are an estimator and a page that do not go together.
    """
    found = {f"recipe {path.stem}": _of_recipe(path) for path in RECIPES}
    changes = list(CHANGES.items())
    for (place, page), (turn, estimator) in product(enumerate([None, *PAGES]), enumerate(ESTIMATORS)):
        own = {"adv_estimator": estimator, "page": page}
        answers = page is None or "rollout" in PAGES[page].roles
        sections: dict[str, Any] = merge(BOUNDED, {"algorithm": own, "rollout": {"n": 4 if answers else 1}})
        if page and PAGES[page].filters:
            sections = merge(sections, CHANGES["filtered groups"])
        sections = merge(sections, NEEDS.get(estimator, {}))
        first = (place + turn) % len(changes)
        for name, change in (*changes[first:], *changes[:first]):
            if not _is_refused(changed := merge(sections, change)):
                found[f"{page or 'no page'}, {estimator}, {name}"] = changed
                break
    return found


def _of_recipe(path: Path) -> dict[str, Any]:
    """A recipe laid on nothing; on GRPO's if it is one to be laid on another."""
    recipe = read_yaml(path)
    return merge(BOUNDED, recipe if "adv_estimator" in recipe["algorithm"] else merge(GRPO, recipe))


def _is_refused(sections: dict[str, Any]) -> bool:
    try:
        make_job(sections)
    except InvalidConfig:
        return True
    return False


def drawn(seed: int) -> dict[str, Any]:
    """A placement: roles in groups at random, now and then one twice or none, and replicas that may not fit."""
    draw = random.Random(seed)
    names = ["a", "b-2", "learn", "x" * 24]
    own: dict[str, list[str]] = {}
    for role in draw.sample(ROLES, len(ROLES)):
        for _ in range(draw.choice([1, 1, 1, 1, 1, 1, 1, 1, 0, 2])):
            own.setdefault(draw.choice(names), []).append(role)
    replicas = {role: draw.choice([1, 1, 2]) for role in ("rollout", "reference", "reward")}
    return {"strategy": "custom", "groups": own, "replicas": replicas}


JOBS = jobs()
TABLES = [{"strategy": name} for name, table in strategies().items() if table]
# One placement of each job: the tables take turns with a drawn one.
PLACED = {
    name: (sections, [*TABLES, drawn(seed)][seed % (len(TABLES) + 1)])
    for seed, (name, sections) in enumerate(JOBS.items())
}


def test_the_jobs_cover_every_recipe_page_estimator_and_change() -> None:
    made = [make_job(sections) for sections in JOBS.values()]
    assert {job.page.name for job in made} == set(PAGES)
    assert {job.estimator.name for job in made} == set(ESTIMATORS)
    assert {role for job in made for role in job.roles} == set(ROLES)
    assert {name.rpartition(", ")[2] for name in JOBS if ", " in name} == set(CHANGES)
    assert sum(name.startswith("recipe ") for name in JOBS) == len(RECIPES)


@pytest.mark.parametrize(("sections", "placement"), PLACED.values(), ids=PLACED)
def test_the_groups_of_the_chart_are_the_jobs(sections: dict[str, Any], placement: dict[str, Any]) -> None:
    values = {"job": sections, "placement": placement} | NO_DASHBOARDS
    try:
        job = make_job(sections | {"placement": placement})
    except InvalidConfig:
        assert refusal(values)
        return
    things = objects(values)
    assert groups(things) == job.groups
    counts = {thing["metadata"]["name"]: thing["spec"]["replicas"] for thing in workloads(things)}
    assert counts == {f"demo-{group}": job.num_replicas(group) for group in job.groups}
    trained = {f"demo-{name}" for name, roles in job.groups.items() if {"actor", "critic"} & set(roles)}
    assert {thing["metadata"]["name"] for thing in of_kind(things, "StatefulSet")} == trained
    assert _read(things) == job.model_copy(
        update={"placement": job.placement.model_copy(update={"replicas": PlacementConfig().replicas})}
    )


AHEAD = {"rollout": {"mode": "async"}}
DISAGREEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "a batch of no mini-batches": ({"data": {"train_batch_size": 100}}, {}),
    "a mini-batch of no micro-batches": ({"actor": {"ppo_micro_batch_size_per_gpu": 48}}, {}),
    "rows that divide though prompts do not": (
        {"actor": {"ppo_micro_batch_size_per_gpu": 48}, "rollout": {"n": 3}},
        {},
    ),
    "the critic's mini-batch": ({"critic": {"ppo_mini_batch_size": 96}}, {}),
    "no critic's": ({"critic": {"ppo_mini_batch_size": 96}} | GRPO, {}),
    "nothing to compare": ({"algorithm": {"adv_estimator": "grpo"}}, {}),
    "nothing to leave out": ({"algorithm": {"adv_estimator": "rloo"}}, {}),
    "the batch to compare with": ({"algorithm": {"adv_estimator": "reinforce_plus_plus_baseline"}}, {}),
    "ahead": (AHEAD, {"strategy": "standalone"}),
    "ahead on a shared device": (AHEAD, {"strategy": "hybrid"}),
    "ahead by nothing": (AHEAD | {"trainer": {"max_staleness": 0}}, {"strategy": "hybrid"}),
    "ahead beside rules": (
        AHEAD,
        {"strategy": "custom", "groups": {"a": ["actor", "critic"], "b": ["rollout", "reward"]}},
    ),
    "ahead beside a model": (
        AHEAD | {"reward": {"reward_model": {"enable": True}}},
        {"strategy": "custom", "groups": {"a": ["actor", "critic"], "b": ["rollout", "reward"]}},
    ),
}


@pytest.mark.parametrize(("sections", "placement"), DISAGREEING.values(), ids=DISAGREEING)
def test_the_chart_and_the_job_file_refuse_the_same_listed_jobs(
    sections: dict[str, Any], placement: dict[str, Any]
) -> None:
    """The jobs are those of JOBS, on each placement."""
    try:
        make_job(sections | {"placement": placement})
        agree = True
    except InvalidConfig:
        agree = False
    assert (refusal({"job": sections, "placement": placement} | NO_DASHBOARDS) == "") == agree


# What _refuse.tpl reads of a job, each key with values of which some do not agree.
READ: dict[str, list[Any]] = {
    "algorithm.adv_estimator": ["gae", "gae", "gae", "grpo", "remax"],
    "rollout.n": [1, 1, 2],
    "rollout.mode": ["sync", "sync", "async"],
    "rollout.name": ["hf", "hf", "openai"],
    "data.train_batch_size": [12, 12, 12, 12, 10],
    "data.max_prompt_length": [48, 56],
    "data.max_response_length": [16, 16, 40],
    "actor.ppo_mini_batch_size": [6, 12],
    "actor.ppo_micro_batch_size_per_gpu": [2, 3, 4],
    "actor.use_dynamic_bsz": [None, False, True, True],
    "actor.ppo_max_token_len_per_gpu": [None, 96, 128],
    "actor.use_kl_loss": [None, True],
    "critic.ppo_mini_batch_size": [None, 4, 6],
    "critic.ppo_micro_batch_size_per_gpu": [2, 4],
    "critic.use_dynamic_bsz": [None, False, True],
    "critic.ppo_max_token_len_per_gpu": [None, 64, 128],
    "reference.log_prob_use_dynamic_bsz": [None, False, True],
    "reference.log_prob_max_token_len_per_gpu": [None, 64, 128],
    "reward.reward_model.enable": [None, True],
    "trainer.max_staleness": [None, 0, 1],
}
# Pods, and what each role has, are the chart's matter alone, and have tests of their own.
OF_PODS = {"rollout.tensor_model_parallel_size", "trainer.device", "reward.custom_reward_function"}
# What plug-ins bring, too (test_plugin_values.py); and what JOBS has with each page.
OF_PODS |= {"algorithm.page", "critic.enable", "data.max_length"}
OF_PODS |= {"trainer.n_gpus_per_node", "trainer.nnodes"}  # the chart reads placement.ranks alone
OF_PODS |= {"rollout.dtype", "rollout.free_cache_engine"}  # the memory of pods (test_refusals.py)
SEEDS = range(32)


def draws(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job, of which the chart may know that its sections do not agree, and its placement."""
    draw = random.Random(seed)
    sections: dict[str, dict[str, Any]] = {}
    for key, choices in READ.items():
        *path, name = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        if (value := draw.choice(choices)) is not None:
            section[name] = value
    if sections["rollout"]["name"] == "openai":
        sections["rollout"]["openai"] = {"urls": ["http://fleet:8000"], "weights_dir": "/mnt/weights"}
    return sections, {"strategy": draw.choice(["standalone", "standalone", "hybrid", "split-collocate"])}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_chart_and_the_job_file_refuse_the_same_drawn_jobs(seed: int) -> None:
    """The jobs are drawn at random, by seed."""
    sections, placement = draws(seed)
    assert (refusal({"job": sections, "placement": placement} | NO_DASHBOARDS) != "") == _is_refused(
        sections | {"placement": placement}
    )


def test_neither_few_nor_most_of_the_drawn_jobs_are_refused() -> None:
    drawn_jobs = [sections | {"placement": placement} for sections, placement in map(draws, SEEDS)]
    assert len(SEEDS) / 4 < sum(map(_is_refused, drawn_jobs)) < len(SEEDS) * 3 / 4


def test_every_key_of_a_job_that_the_chart_refuses_by_is_drawn() -> None:
    text = (CHART / "templates" / "_refuse.tpl").read_text(encoding="utf-8")
    sections = "|".join(JobConfig.model_fields)
    read = set(re.findall(rf"[$)][a-z]*\.((?:{sections})\.[a-z_]+(?:\.[a-z_]+)?)", text))
    missing = {key for key in read if not any(known.startswith(key) for known in (*READ, *OF_PODS))}
    assert not {key for key in missing if not any(key.startswith(known) for known in OF_PODS)}
    for name in set(re.findall(r"\$section\.([a-z_]+)", text)):
        assert any(key.endswith(f".{name}") for key in READ), name
    assert {"actor.use_dynamic_bsz", "data.max_prompt_length"} <= read


def _read(things: list[Object]) -> Any:
    """The job as a process reads it."""
    (config,) = [t for t in of_kind(things, "ConfigMap") if t["metadata"]["name"] == "demo-job"]
    return make_job(yaml.safe_load(config["data"]["job.yaml"]))


# A file that is merged over another one is no job.
JOB_FILES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "train_files" in path.read_text()]


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
def test_a_job_file_pasted_under_job_is_the_same_job(path: Path, tmp_path: Path) -> None:
    """Word for word but for its placement, though Helm reads YAML 1.1, where the key n is a boolean."""
    text = re.sub(r"(?m)^placement:\n(  .*\n)*", "", path.read_text(encoding="utf-8"))
    values = tmp_path / "values.yaml"
    values.write_text("job:\n" + "".join(f"  {line}\n" for line in text.splitlines()), encoding="utf-8")
    on_cpu = {"image": {"kind": "gpu"}, "job": {"trainer": {"device": "auto"}}}
    job = load_job(path, ["trainer.device=auto"])
    assert _read(objects(on_cpu, files=[values])) == job


def test_resources_of_roles_that_take_turns() -> None:
    """The most CPU and GPUs of any, the sum of the memory; a group's own numbers win."""
    actor = {"requests": {"cpu": "1500m", "memory": "1.5Gi"}, "limits": {"cpu": 2, "memory": "2Gi"}}
    rollout = {"requests": {"cpu": 1, "memory": "512Mi"}, "limits": {"memory": "2G"}}
    roles = {"actor": {"gpus": 1, "resources": actor}, "rollout": {"gpus": 2, "resources": rollout}}
    engine = {"rollout": {"name": "vllm", "tensor_model_parallel_size": 2}}
    values = {"placement": {"strategy": "hybrid"}, "roles": roles, "job": engine}
    container = _containers(values)["demo-policy"]
    assert container["resources"] == {
        "requests": {"cpu": "1500m", "memory": "2Gi", "ephemeral-storage": "1Gi"},
        "limits": {"memory": str(2 * 1024**3 + 2 * 10**9), "nvidia.com/gpu": 2},
    }
    assert container["args"][-1] == "trainer.device=cuda"
    without = _containers({"roles": {"actor": {"gpus": 0}}})["demo-actor"]
    assert "trainer.device=cuda" not in without["args"]
    engine["rollout"]["tensor_model_parallel_size"] = 8
    own = {"gpus": 8, "resources": {"requests": {"cpu": 7}}}
    container = _containers(values | {"groups": {"policy": own}})["demo-policy"]
    assert container["resources"] == {
        "requests": {"cpu": 7, "ephemeral-storage": "1Gi"},
        "limits": {"nvidia.com/gpu": 8},
    }


def _containers(values: dict[str, Any]) -> dict[str, Object]:
    return {
        t["metadata"]["name"]: t["spec"]["template"]["spec"]["containers"][0]
        for t in workloads(objects(values))
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_notes_count_the_gpus_that_pods_request(example: Path, tmp_path: Path) -> None:
    said = notes({}, tmp_path, files=[example])
    asked = sum(
        thing["spec"]["replicas"] * container["resources"]["limits"].get("nvidia.com/gpu", 0)
        for thing in workloads(objects({}, files=[example], chart=tmp_path / "chart"))  # of the same render
        for container in thing["spec"]["template"]["spec"]["containers"]
    )
    assert f"It uses {asked} GPUs (nvidia.com/gpu) in total." in said


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_roles_pods_have_the_job_fingerprint_of_the_controller(example: Path, tmp_path: Path) -> None:
    things = objects({}, files=[example])
    (tmp_path / "job.yaml").write_text(
        next(thing["data"]["job.yaml"] for thing in of_kind(things, "ConfigMap") if "job.yaml" in thing["data"])
    )

    def read(workload: Object) -> tuple[list[str], JobConfig]:
        """The roles of a process, and the job as it reads it."""
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        overrides = [word for word in container["args"] if "=" in word and word[0] != "-"]
        return container["args"][1].split(","), load_job(tmp_path / "job.yaml", overrides)

    ((_, of_controller),) = map(read, of_kind(things, "Job"))
    for roles, of_pod in map(read, (*workloads(things), *heads(things))):
        for role in roles:
            assert fingerprint(of_controller, role).difference(fingerprint(of_pod, role)) == ""


def test_notes_of_a_scaled_role_tell_of_the_most(tmp_path: Path) -> None:
    scaler = {"scaler": "hpa", "minReplicas": 2, "maxReplicas": 5}
    said = notes({"autoscaling": {"reward": scaler}, "roles": {"reward": {"gpus": 1}}}, tmp_path)
    assert re.search(r"deployment/demo-reward +2 to 5 x 1 GPUs: reward", said)
    assert "It uses 5 GPUs (nvidia.com/gpu) in total, and up to 8 when scaled up." in said
    values = {"autoscaling": {"reward": scaler}, "placement": {"ranks": {"actor": 16}}}
    said = notes(values | {"roles": {"reward": {"gpus": 1}, "actor": {"gpus": 16}}}, tmp_path)
    assert "It uses 20 GPUs (nvidia.com/gpu) in total, and up to 23 when scaled up." in said


def on_cluster(into: Path, condition: str, *, pods: int, asked: int = 1) -> Path:
    """Copy the chart, with what `lookup` would find: a Job with this condition, and the pods of each group."""
    notes({}, into)
    commands = into / "chart" / "templates" / "_commands.tpl"
    annotated = f'dict "annotations" (dict "rolemesh.dev/replicas" "{asked}")'
    live = f'dict "metadata" ({annotated}) "spec" (dict "replicas" {pods})'
    text = commands.read_text(encoding="utf-8")
    text = text.replace('lookup "apps/v1" $group.kind $namespace $group.workload', live)
    job = f'dict "status" (dict "conditions" (list (dict "type" "{condition}" "status" "True")))'
    text, num_jobs = re.subn('lookup "batch/v1" .*?(?= }})', job, text)
    assert (live in text, num_jobs) == (True, 2)
    commands.write_text(text, encoding="utf-8")
    return into / "chart"


@pytest.mark.parametrize("condition", ["Complete", "Failed", "Suspended"])
def test_an_upgrade_after_the_run_starts_no_pods(condition: str, tmp_path: Path) -> None:
    """The notes say so."""
    chart, has_ended = on_cluster(tmp_path, condition, pods=0), condition != "Suspended"
    values = {"placement": {"replicas": {"reward": 2}}}
    assert ("THE RUN HAS ENDED" in notes(values, tmp_path)) == has_ended
    counts = [thing["spec"]["replicas"] for thing in workloads(objects(values, chart=chart))]
    assert sorted(counts) == [0, 0, 0, 0 if has_ended else 2]


@pytest.mark.parametrize(("pods", "members"), [(1, 4), (2, 5), (5, 6), (0, 6)])
def test_a_gang_asks_for_no_more_pods_than_an_upgrade_leaves(pods: int, members: int, tmp_path: Path) -> None:
    """Of the reward's three: somebody has scaled it, or the run has ended."""
    chart = on_cluster(tmp_path, "Suspended", pods=pods, asked=3)
    values = {"gang": {"scheduler": "volcano"}, "placement": {"replicas": {"reward": 3}}}
    (gang,) = of_kind(objects(values, chart=chart), "PodGroup")
    assert gang["spec"]["minMember"] == members


def test_notes_tell_what_brings_the_alerts(tmp_path: Path) -> None:
    assert "Install the Prometheus operator" in notes({}, tmp_path, apis=())
    assert "A PodMonitor makes Prometheus scrape" in notes({}, tmp_path)


def test_notes_warn_of_a_memory_limit_that_only_a_guess_exceeds(tmp_path: Path) -> None:
    """27.6 GiB of weights and 7 GiB of processes, of 32 GiB."""
    values = {"job": {"rollout": {"name": "vllm"}}, "roles": {"rollout": {"billionParameters": 14.8}}}
    said = notes(values, tmp_path)
    assert (
        "PERHAPS TOO LITTLE MEMORY: a pod of group rollout has a memory limit of 32Gi, but its rollout" in said
    )
    assert "PERHAPS" not in notes({}, tmp_path)


def test_names_of_53_characters_fit_and_differ() -> None:
    """A Service's name has 63 at most, a StatefulSet's 52: its pods carry it and a hash of ten in a label."""
    first, second = "a" * 52 + "b", "a" * 52 + "c"
    values = {"placement": {"strategy": "custom", "groups": {"g" * 24: list(ROLES)}}}
    made = [objects(values, release=release) for release in (first, second)]
    names = [{(t["kind"], t["metadata"]["name"]) for t in things} for things in made]
    assert not names[0] & names[1]
    assert all(len(name) <= 52 for _, name in names[0] | names[1])
    assert template(values, release=first).count(first) > 10  # labels have all of it


def test_the_order_of_a_groups_roles_changes_no_immutable_field() -> None:
    """The API server refuses an upgrade that changes another field than replicas, template and a few more."""

    def fixed(*learn: str) -> list[Object]:
        groups = {"learn": learn, "rest": [role for role in ROLES if role not in learn]}
        things = objects({"placement": {"strategy": "custom", "groups": groups}})
        return [
            {key: value for key, value in thing["spec"].items() if key not in ("template", "replicas")}
            for thing in of_kind(things, "StatefulSet")
        ]

    (expected,) = fixed("actor", "critic", "reference")
    assert expected["serviceName"] == "demo-actor"
    assert fixed("reference", "critic", "actor") == fixed("critic", "actor", "reference") == [expected]
    (alone,) = fixed("actor", "rollout", "reward", "critic")
    assert alone == expected
