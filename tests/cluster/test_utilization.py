"""An autoscaler that follows a role's CPU, with the cluster's own metrics."""

from __future__ import annotations

import json

import pytest
from cluster import Failed, Namespace, make_claim
from training import BUSY, REWARD_ALONE, Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

# The demo's data and model without the minute of training: what it answers does not matter here.
UNTRAINED = """
from pathlib import Path
from rolemesh.services.command_line.demo import prepare_demo
prepare_demo(Path("outputs/tiny"), num_steps=0)
"""


def test_an_autoscaler_scales_the_reward_by_its_load(namespace: Namespace) -> None:
    try:
        namespace.kubectl("get", "--raw", "/apis/metrics.k8s.io/v1beta1")
    except Failed:
        pytest.skip("NOTHING IS SCALED BY LOAD: the cluster has no metrics-server")
    make_claim(namespace, "workspace", "ReadWriteOnce")
    job = Job(namespace, "standalone", "workspace", "scaled")
    values = {
        "prepare": [{"creates": "outputs/tiny/model", "command": ["python", "-c", UNTRAINED]}],
        "placement": REWARD_ALONE,
        "autoscaling": {"reward": {"scaler": "hpa", "minReplicas": 1, "maxReplicas": 3}},
        "rewardFunction": {"code": BUSY},
        "job": {"reward": {"custom_reward_function": {"path": "/etc/rolemesh-reward/reward.py"}}},
    }
    job.install("--values", "-", stdin=json.dumps(values))
    scaled = f"{job.name}-reward"
    namespace.until(lambda thing: thing["status"].get("readyReplicas") == 3, "deployment", scaled, within_s=400)
    job.reach(job.step() + 10)  # what starting took of the CPU is forgotten by then; what the rows take is not
    job.upgrade("--values", "-", "--set", "monitoring.dashboards.labels.board=mine", stdin=json.dumps(values))
    assert namespace.one("deployment", scaled)["spec"]["replicas"] == 3  # the autoscaler's, not the chart's
    job.stop()
    job.end()
