"""`rolemesh status JOB` on Kubernetes: which pod is asked, how, and what there is to say where none runs.

kubectl is a script here, which answers with what a test puts in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.services.command_line.kubectl import ATTEMPTS, FAILED, Job

SCRIPT = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/asked"
case $1 in
get) [ -e "$here/answer" ] || { echo 'Error from server (Forbidden): jobs is forbidden' >&2; exit 1; }
     cat "$here/answer"; [ ! -e "$here/then" ] || mv "$here/then" "$here/answer" ;;
exec) exit "$(cat "$here/code")" ;;
esac
"""
# kubectl whose `get` fails at its third and fourth call of all.
RESTARTED = """#!/bin/sh
num=$(($(wc -l < "$(dirname "$0")/asked" 2>/dev/null || echo 0) + 1))
if [ "$1" = get ] && [ $num -ge 3 ] && [ $num -le 4 ]; then
    echo "$@" >> "$(dirname "$0")/asked"; echo 'connection refused' >&2; exit 1
fi
"""
SELECTOR = (
    "app.kubernetes.io/name=rlhf-job,app.kubernetes.io/instance=my-job,app.kubernetes.io/component=controller"
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kubectl").write_text(SCRIPT)
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def controllers(*pods: tuple[str, str], end: str = "", suspended: bool = False) -> str:
    """Name and phase of each pod, the oldest first, and how their Job has ended."""
    conditions = [{"type": end, "status": "True", "message": "exit code 2"}] if end else []
    items: list[dict[str, Any]] = [
        {
            "kind": "Pod",
            "metadata": {"name": name, "creationTimestamp": f"2030-01-01T00:00:0{age}Z"},
            "spec": {
                "containers": [{"name": "controller", "args": ["control", "--tls-dir=/etc/rolemesh-tls"]}]
            },
            "status": {
                "phase": phase,
                "containerStatuses": [
                    {"name": "controller", "state": {"running": {}} if phase == "Running" else {"waiting": {}}}
                ],
            },
        }
        for age, (name, phase) in enumerate(pods)
    ]
    job = {"kind": "Job", "spec": {"suspend": suspended}, "status": {"conditions": conditions}}
    return json.dumps({"items": [job, *reversed(items)]})


def asked(cluster: Path) -> list[str]:
    return (cluster / "asked").read_text().splitlines()


def test_the_command_runs_in_the_running_pod_with_its_keys(cluster: Path) -> None:
    (cluster / "answer").write_text(controllers(("old", "Failed"), ("new", "Running")))
    (cluster / "code").write_text("3")
    assert Job("my-job", "research", "prod").once("status", as_json=True) == 3
    where = "--namespace=research --context=prod"
    command = "rolemesh status 127.0.0.1:50051 --tls-dir=/etc/rolemesh-tls --json"
    assert asked(cluster) == [
        f"get {where} jobs,pods --selector {SELECTOR} --output=json",
        f"exec {where} new --container=controller -- {command}",
    ]


def test_a_job_that_has_ended_says_how(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster / "answer").write_text(controllers(("last", "Succeeded"), end="Complete"))
    assert Job("my-job").once("status") == 0
    (cluster / "answer").write_text(controllers(("last", "Failed"), end="Failed"))
    assert Job("my-job").once("status") == FAILED
    assert capsys.readouterr().out.splitlines() == [
        "my-job: the run has ended",
        "my-job: the run has failed: exit code 2",
    ]
    with pytest.raises(RoleUnavailable, match="my-job: the run has failed"):
        Job("my-job").once("stop")


def test_a_watcher_goes_from_pod_to_pod_to_the_end(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rolemesh.services.command_line.kubectl.RETRY_S", 0.0)
    (cluster / "answer").write_text(controllers(("only", "Running")))
    (cluster / "then").write_text(controllers(("only", "Succeeded"), end="Complete"))
    (cluster / "code").write_text("137")  # the controller was killed beside it
    assert Job("my-job").watch() == 0
    assert [line.split()[0] for line in asked(cluster)] == ["get", "exec", "get"]
    assert capsys.readouterr().err == "my-job: the run has ended\n"


@pytest.mark.parametrize("code", ["1", "2", "126"])
def test_a_pod_that_may_not_be_entered_is_not_tried_for_ever(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """2: the certificate in the pod does not name operator."""
    monkeypatch.setattr("rolemesh.services.command_line.kubectl.RETRY_S", 0.0)
    (cluster / "answer").write_text(controllers(("only", "Running")))
    (cluster / "code").write_text(code)
    assert Job("my-job").watch() == int(code)
    assert len(asked(cluster)) == 2 * ATTEMPTS


def test_a_watcher_outlasts_an_api_server_that_is_restarted(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exec is cut and nothing is found; then the API server answers again, and the job has ended."""
    monkeypatch.setattr("rolemesh.services.command_line.kubectl.RETRY_S", 0.0)
    (cluster / "kubectl").write_text(RESTARTED + SCRIPT.removeprefix("#!/bin/sh"))
    (cluster / "answer").write_text(controllers(("only", "Running")))
    (cluster / "then").write_text(controllers(("only", "Succeeded"), end="Complete"))
    (cluster / "code").write_text("1")
    assert Job("my-job").watch() == 0
    assert [line.split()[0] for line in asked(cluster)] == ["get", "exec", "get", "get", "get"]
    assert capsys.readouterr().err.splitlines() == [
        "my-job: kubectl: connection refused",
        "my-job: the run has ended",
    ]


def test_a_watcher_gives_up_an_unreachable_api_server(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that never answered."""
    monkeypatch.setattr("rolemesh.services.command_line.kubectl.RETRY_S", 0.0)
    monkeypatch.setattr("rolemesh.services.command_line.kubectl.PATIENCE_S", 0.2)
    with pytest.raises(RoleUnavailable, match="jobs is forbidden"):
        Job("my-job").watch()
    assert len(asked(cluster)) == 1
    (cluster / "kubectl").write_text(
        RESTARTED.replace("-le 4", "-le 1000000") + SCRIPT.removeprefix("#!/bin/sh")
    )
    (cluster / "answer").write_text(controllers(("only", "Running")))
    (cluster / "code").write_text("1")
    (cluster / "asked").unlink()
    with pytest.raises(RoleUnavailable, match="connection refused"):
        Job("my-job").watch()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (controllers(("a", "Failed"), ("b", "Failed")), r"no controller runs: b failed \(see its logs\), and"),
        (controllers(("a", "Failed"), ("b", "Pending")), "no controller runs: b is Pending$"),
        (controllers(), "no controller runs: its pod is not created yet"),
        (controllers(suspended=True), "the run is suspended"),
        (None, "kubectl: Error from server .*jobs is forbidden"),
    ],
)
def test_where_no_controller_runs_it_says_why(cluster: Path, answer: str | None, words: str) -> None:
    if answer:
        (cluster / "answer").write_text(answer)
    with pytest.raises(RoleUnavailable, match=words):
        Job("my-job").once("pause")


def test_a_name_that_is_no_release_is_refused(cluster: Path) -> None:
    (cluster / "answer").write_text('{"items": []}')
    with pytest.raises(InvalidConfig, match="no job 'my-job' in this namespace"):
        Job("my-job").once("status")
