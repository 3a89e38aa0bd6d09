"""A job whose actor has two pods, by KubeRay, and whose critic has two ranks in one pod. It trains unattended,
whichever pods are deleted, with the bits of a local run, and each pod sends its part of the weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster import Namespace, knows, make_claim
from rendering import ROOT
from test_training import equal
from training import Job, train_here

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

STEPS, DEATHS = 30, {10: "worker", 20: "head"}  # steps with a checkpoint, and whose pod dies after them
# Of 13 million parameters: 50 MB, of which each of two pods holds stripes of 16 MiB.
LARGER = ["rolemesh", "model", "outputs/larger", "--hidden-size", "512", "--num-layers", "4"]
PREPARE = [
    {"creates": "outputs/tiny/model", "command": ["rolemesh", "demo", "outputs/tiny"]},
    {"creates": "outputs/larger", "command": LARGER},
]
METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9090/metrics').read().decode())"


@pytest.fixture
def kuberay() -> None:
    if not knows("rayclusters.ray.io"):
        pytest.skip("NO GROUP OF SEVERAL PODS IS TESTED: the cluster has no KubeRay")


def test_an_actor_of_two_pods_survives_both_deaths_bit_for_bit(
    kuberay: None, namespace: Namespace, tmp_path: Path
) -> None:
    """The run ends with the bits of a local run."""
    make_claim(namespace, "workspace", "ReadWriteOnce")
    job = Job(namespace, "ranks", "workspace", "ranked")
    steps = ("--set", f"job.trainer.total_training_steps={STEPS}")
    job.install(*steps, "--set", "controller.suspend=true")
    namespace.helm("test", job.name, "--timeout=10m")
    job.upgrade(*steps)
    for saved, kind in DEATHS.items():
        job.reach(saved + 1)
        (pod,) = [
            pod["metadata"]["name"]
            for pod in namespace.pods(job.name, "actor")
            if pod["metadata"]["labels"]["ray.io/node-type"] == kind
        ]
        namespace.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
    job.end(900)
    assert namespace.one("raycluster", f"{job.name}-actor")["spec"]["suspend"] is True
    ranks = str(ROOT / "configs" / "tiny-ranks.yaml")
    run_dir = ("trainer.default_local_dir=outputs/tiny", f"trainer.total_training_steps={STEPS}")
    equal(job.outcome(), train_here(tmp_path, ranks, *run_dir), STEPS)


def test_both_pods_of_an_actor_send_their_parts_of_a_version(kuberay: None, namespace: Namespace) -> None:
    make_claim(namespace, "workspace", "ReadWriteOnce")
    job = Job(namespace, "ranks", "workspace", "striped")
    sections = {
        "actor": {"model": {"path": "outputs/larger"}, "ppo_mini_batch_size": 64},
        "data": {"train_batch_size": 64, "val_max_samples": 4, "max_prompt_length": 32},
    }
    room = {"resources": {"limits": {"memory": "6Gi"}}}
    values = {"prepare": PREPARE, "job": sections, "roles": {"critic": room}}
    job.install("--values", "-", "--set", "job.trainer.total_training_steps=100000", stdin=json.dumps(values))
    job.reach(1)
    sent = {}
    for pod in namespace.pods(job.name, "actor"):
        name = pod["metadata"]["name"]
        text = namespace.kubectl("exec", name, "--", "python", "-c", METRICS)
        found = re.findall(r'^rolemesh_weights_sent_bytes_total\{role="actor"\} (\S+)$', text, re.MULTILINE)
        sent[pod["metadata"]["labels"]["ray.io/node-type"]] = float(found[0]) if found else 0.0
        assert re.search(r'^rolemesh_role_ready\{rank="\d",role="actor"\} 1\.0$', text, re.MULTILINE), name
    assert sent.keys() == {"head", "worker"}
    assert min(sent.values()) >= 16 << 20, sent
    job.stop()
    job.end()
