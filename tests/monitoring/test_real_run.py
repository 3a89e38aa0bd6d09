"""Dashboards and alerts, asked of a Prometheus that has watched a run."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import time
from collections import defaultdict
from pathlib import Path

import pytest
from echoing import PLUGIN, TALKS, make_talkative
from in_process import small_job
from launched import DEADLINE_S, rolemesh, written
from questions import Question, of_panels, of_rules, of_variables
from real_prometheus import INSTALL, Prometheus, gpu_exporter, prometheus
from serving import gate

# Something for every panel: roles that share a device and roles that do not, a critic, KL in reward and loss,
# rollouts that run ahead, conversations with a tool, validation, checkpoints.
EVERYTHING = (
    *TALKS,
    "placement.strategy=custom",
    "placement.groups={learners: [actor, critic], rollouts: [rollout],"
    "                  scoring: [reference, reward, environment]}",
    "placement.ranks={learners: 2}",  # panels about ranks show roles of several
    "rollout.mode=async",
    "algorithm.rollout_correction.rollout_is=token",
    "actor.use_kl_loss=true",
    "rollout.multi_turn.call_timeout_s=600",  # a call waits for scrapes
    "trainer.total_training_steps=6",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
)
# A step has 8 conversations. A rate needs a scrape before a change and one after it. So conversations wait for
# scrapes after step 1, when every series is there, and after step 4, when each has changed.
STOPS = [20, 44]
NUM_SCRAPES = 3
SCRAPED_EVERY = "500ms"
# Metrics of a step that there are on a GPU alone.
ON_A_GPU = re.compile(r'name="perf/(mfu|max_memory_\w+)(/|")')
VARIABLES = {"namespace": "local", "job": "run", "role": ".+", "datasource": "-", "__rate_interval": "1h"}
# The agent `echo`, which tells at these conversations of the training data, and waits there with open episodes.
STOPPING = """

stops, begun = {stops}, 0


def opened(self, episode, plain=Echo.open):
    global begun
    begun += episode.row["extra_info"]["split"] == "train"
    return plain(self, episode)


async def acted(self, turn, plain=EchoTalk.act):
    if stops and begun >= stops[0]:
        del stops[0]
        await asyncio.to_thread(wait)
    return await plain(self, turn)


def wait():
    with open({reached!r}, "wb", buffering=0) as file:
        file.write(b".")
    with open({release!r}, "rb", buffering=0) as file:
        file.read(1)


Echo.open, EchoTalk.act = opened, acted
"""


async def test_every_panel_and_alert_asks_for_what_a_run_shows(tmp_path: Path) -> None:
    if not shutil.which("prometheus"):
        pytest.skip(f"DASHBOARDS AND ALERTS ARE NOT TESTED: {INSTALL}")
    job = small_job(tmp_path, make_talkative(tmp_path / "model"), "run", *EVERYTHING)
    agent = tmp_path / "stopping_echo.py"
    job = job.model_copy(update={"plugins": [str(agent)]})
    with (
        gate(tmp_path / "reached") as reached,
        gate(tmp_path / "release") as release,
        gpu_exporter() as gpus,
        prometheus(tmp_path, str(tmp_path / "*.targets.json"), SCRAPED_EVERY, gpus.address) as asked,
    ):
        agent.write_text(
            PLUGIN.read_text()
            + STOPPING.format(stops=STOPS, reached=str(reached.path), release=str(release.path))
        )
        start = time.time()
        async with rolemesh("run", written(job, tmp_path)) as launched:
            for _ in STOPS:
                async with asyncio.timeout(DEADLINE_S):
                    await reached.passed(launched.ended())
                    gpus.show(pods(tmp_path))
                    await scraped(asked, pods(tmp_path))
                release.open(1)
            code, output = await launched.end()
        end = time.time()
        assert code == 0, output
        assert not pods(tmp_path)  # a run that has ended has no targets

        labels = _labels(asked)
        problems = [p for question in of_panels(VARIABLES) for p in _panel(asked, question, labels, start, end)]
        problems += [p for question in of_rules() for p in _rule(asked, question, labels)]
        for where, selector, label in of_variables(VARIABLES):
            if not all(label in series for series in asked.series(selector) or [{}]):
                problems.append(f"{where}: {selector} has no label {label}")
        for group in asked.get("/rules")["groups"]:
            for rule in group["rules"]:
                if rule["health"] != "ok" or rule.get("state") == "firing":
                    problems.append(
                        f"{rule['name']}: {rule['health']}, {rule.get('state')}, {rule['lastError']}"
                    )
    assert not problems, "\n".join(problems)


def pods(directory: Path) -> set[str]:
    """The processes that the runs in a directory ask Prometheus to scrape."""
    found = [json.loads(path.read_text()) for path in directory.glob("*.targets.json")]
    return {target["labels"]["pod"] for targets in found for target in targets}


async def scraped(asked: Prometheus, processes: set[str]) -> None:
    """Returns when each process has answered NUM_SCRAPES more scrapes."""
    before = now = asked.num_scrapes()
    while any(now.get(process, 0) < before.get(process, 0) + NUM_SCRAPES for process in processes):
        await asyncio.sleep(0.1)
        now = asked.num_scrapes()


def _labels(asked: Prometheus) -> dict[str, set[str]]:
    """Metric to the labels of its series, of every process of the run."""
    labels: dict[str, set[str]] = defaultdict(set)
    for selector in ('{rolemesh_job!=""}', '{__name__=~"DCGM_.+"}'):
        for series in asked.series(selector):
            labels[series["__name__"]] |= series.keys()
    return labels


def _panel(
    asked: Prometheus, question: Question, labels: dict[str, set[str]], start: float, end: float
) -> list[str]:
    problems = _names(question, labels)
    series = asked.over_time(question.expr, start, end, 0.5)
    if ON_A_GPU.search(question.expr):
        return problems
    if not any(math.isfinite(float(value)) for one in series for _, value in one["values"]):
        problems.append(f"{question.where}: is empty: {question.expr}")
    if not any(one["metric"].keys() >= set(question.legend) for one in series):
        problems.append(f"{question.where}: no series has the legend's labels {question.legend}")
    return problems


def _rule(asked: Prometheus, question: Question, labels: dict[str, set[str]]) -> list[str]:
    problems = _names(question, labels)
    for selector in question.selectors:
        selected = selector.prettify().partition(" offset ")[0]
        if not asked.series(selected):
            problems.append(f"{question.where}: nothing is {selected}")
    known = question.labels | {label for s in question.selectors for label in labels.get(s.name, ())}
    if strange := set(question.legend) - known:
        problems.append(f"{question.where}: its texts show {strange}, which its series do not have")
    return problems


def _names(question: Question, labels: dict[str, set[str]]) -> list[str]:
    """Metrics and labels that no process of the run has."""
    problems = []
    for selector in question.selectors:
        if selector.name not in labels:
            problems.append(f"{question.where}: no process has {selector.name}")
        elif strange := {m.name for m in selector.matchers.matchers} - labels[selector.name]:
            problems.append(f"{question.where}: {selector.name} has no labels {strange}")
    known = question.made_labels.union(*(labels.get(s.name, ()) for s in question.selectors))
    if strange := question.labels - known:
        problems.append(f"{question.where}: nothing in it has labels {strange}")
    return problems
