"""KEDA's own operator scales a role by the rows that wait at the controller, and by nothing else."""

from __future__ import annotations

import json

import pytest
from cluster import Failed, Namespace, Object
from training import BUSY, REWARD_ALONE, Job

from rolemesh.v1 import controller_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# Down without the minutes that a cluster would wait.
SCALER = {
    "scaler": "keda",
    "minReplicas": 1,
    "maxReplicas": 4,
    "pendingPerReplica": 32,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
}
VALUES = {
    "placement": REWARD_ALONE,
    "autoscaling": {"reward": SCALER},
    "rewardFunction": {"code": BUSY.replace("0.01", "0.03")},
    "job": {"reward": {"custom_reward_function": {"path": "/etc/rolemesh-reward/reward.py"}}},
}
REWARD, AUTOSCALER = "kd-reward", "keda-hpa-kd-reward"


def test_rewards_scale_from_one_to_four_under_load_and_back(
    workspace: tuple[Namespace, str],
) -> None:
    namespace, claim = workspace
    try:
        namespace.kubectl("get", "--raw", "/apis/external.metrics.k8s.io/v1beta1")
    except Failed:
        pytest.skip("KEDA IS NOT TESTED: its operator is not on this cluster")
    job = Job(namespace, "standalone", claim, "kd")
    job.install("--values", "-", "--set", "controller.suspend=true", stdin=json.dumps(VALUES))
    namespace.until(lambda thing: thing["status"].get("readyReplicas") == 1, "deployment", REWARD, within_s=400)
    # The autoscaler has looked, and nobody answers: it knows of no metric but ours, not of the CPU, either.
    autoscaler = namespace.until(_has_no_value, "hpa", AUTOSCALER)
    [metric] = autoscaler["spec"]["metrics"]
    assert metric["type"] == "External"
    assert namespace.one("deployment", REWARD)["spec"]["replicas"] == 1

    job.upgrade("--values", "-", stdin=json.dumps(VALUES))
    namespace.until(lambda thing: thing["spec"]["replicas"] == 4, "deployment", REWARD, within_s=400)
    with namespace.controller(job.controller()) as service:
        service.Pause(pb.PauseRequest(), timeout=60)
    namespace.until(lambda thing: thing["spec"]["replicas"] == 1, "deployment", REWARD, within_s=400)
    job.stop()
    namespace.until(lambda thing: thing["spec"]["replicas"] == 0, "deployment", REWARD)


def _has_no_value(autoscaler: Object) -> bool:
    conditions = autoscaler.get("status", {}).get("conditions", [])
    return any(c["type"] == "ScalingActive" and c["reason"] == "FailedGetExternalMetric" for c in conditions)
