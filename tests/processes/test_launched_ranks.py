"""The launcher and the ranks of its groups."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from forks import own_server
from serving import serve_process

from rolemesh.config.job import make_job
from rolemesh.cpus import usable_cpus
from rolemesh.errors import InvalidConfig, RoleTaken, RoleUnavailable
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import ActorClient
from rolemesh.services.controller.role_clients import new_client
from rolemesh.services.controller.run.run_dir import new_term
from rolemesh.services.processes import fork_server
from rolemesh.services.processes.environments import role_environment
from rolemesh.services.processes.role_processes import role_processes
from rolemesh.services.processes.serve_ranks import spread_group


def test_the_ranks_of_a_group_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "16")  # of whoever starts the launcher
    cpus = usable_cpus()
    shares = [str(cpus), str(max(1, cpus // 2)), "1"]
    assert [role_environment(ranks)["OMP_NUM_THREADS"] for ranks in (1, 2, 1000)] == shares
    assert "WORLD_SIZE" not in role_environment()


def shown_name(pid: int) -> str:
    """Return the name that `ps -e` and `top` show."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def test_the_launcher_starts_ranks_watches_each_and_leaves_none(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "server", own_server())  # the command line has one, too
    groups = {"policy": ["actor", "reward"], "reference": ["reference"], "rollout": ["rollout"]}
    job = make_job(
        {
            "actor": {"model": {"path": str(tiny_model)}, "use_kl_loss": True},
            "algorithm": {"adv_estimator": "grpo"},
            "rollout": {"n": 2},
            "placement": {
                "strategy": "custom",
                "groups": groups,
                "ranks": {"policy": 2, "reference": 2},
                "replicas": {"reference": 1},
            },
            "trainer": {"default_local_dir": str(tmp_path), "device": "cpu"},
        }
    )
    async with role_processes(job) as processes:
        ranks = {member.name: member for member in processes.members}
        assert [*ranks] == ["policy-0", "policy-0-rank-1", "reference-0", "reference-0-rank-1", "rollout-0"]
        addresses = await processes.addresses(200)
        assert {role: len(found) for role, found in addresses.items()} == dict.fromkeys(job.roles, 1)
        assert all(member.metrics_address for member in ranks.values())
        shown = [shown_name(member.process.pid) for member in ranks.values()]
        assert shown == ["policy-0", "policy-0/1", "reference-0", "reference-0/1", "rollout-0"]
        for role in ("actor", "reference"):
            async with new_client(role, addresses[role], job) as client:
                await client.wait_until_ready(200)
        watching = asyncio.create_task(processes.watch())
        ranks["policy-0-rank-1"].process.kill()
        with pytest.raises(
            RoleUnavailable, match=r"^policy-0-rank-1 \(with actor, reward, pid \d+\) was killed by"
        ):
            await watching
        await ranks["policy-0"].process.gone
        assert ranks["policy-0"].process.returncode == 1
        assert "rank 1 of 2 of actor,reward is gone" in ranks["policy-0"].exit_report()
        # Standard input closes, as it does when the launcher is killed.
        for member in (ranks["reference-0"], ranks["reference-0-rank-1"]):
            member.process.close_stdin()
            await member.process.gone
        assert [ranks[f"reference-0{end}"].process.returncode for end in ("", "-rank-1")] == [0, 0]
    assert all(member.process.returncode is not None for member in ranks.values())


def test_a_group_of_several_ranks_is_served_whole_and_alone() -> None:
    placement = {
        "strategy": "custom",
        "groups": {"policy": ["actor", "reward"], "reference": ["reference"], "rollout": ["rollout"]},
        "ranks": {"policy": 2},
    }
    job = make_job(
        {
            "actor": {"use_kl_loss": True},
            "algorithm": {"adv_estimator": "grpo"},
            "rollout": {"n": 2},
            "placement": placement,
        }
    )
    assert spread_group(["reward", "actor"], job, {}) == job.plan["policy"]
    assert spread_group(["actor"], job, {"WORLD_SIZE": "2"}) is None  # a rank
    assert spread_group(["reference", "rollout"], job, {}) is None  # no group, but of one rank each
    for roles in (["actor"], ["reward", "rollout"], ["actor", "reward", "reference"]):
        with pytest.raises(InvalidConfig, match=r"group policy has 2 ranks .* serve actor,reward\."):
            spread_group(roles, job, {})


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_serve_starts_every_rank_and_ends_with_any_of_them(tiny_model: Path, tmp_path: Path) -> None:
    """As in a pod with several GPUs: one command, which Kubernetes starts again."""
    job = make_job(
        {
            "actor": {"model": {"path": str(tiny_model)}},
            "algorithm": {"adv_estimator": "grpo"},
            "rollout": {"n": 2},
            "placement": {"ranks": {"actor": 2}},
            "trainer": {"default_local_dir": str(tmp_path), "device": "cpu"},
        }
    )
    async with serve_process("actor", job, tmp_path) as served:
        term = new_term(job.run_dir)
        async with (
            ActorClient([served.address], methods(job), term=term) as actor,
            ActorClient([served.address], methods(job)) as stranger,
        ):
            await actor.wait_until_ready(200)
            await actor.load_checkpoint(None)
            with pytest.raises(RoleTaken, match=re.escape(str(term))):  # rank 0 decides
                await stranger.load_checkpoint(None)
            await actor.load_checkpoint(None)
        children = children_of(served.process.pid)
        assert len(children) == 2
        os.kill(int(children[1]), signal.SIGKILL)
        assert served.process.stderr
        said = (await served.process.stderr.read()).decode()
        assert await served.process.wait() == 1
        assert f"rank 1 of 2 of actor (pid {children[1]}) was killed by SIGKILL" in said
        assert not any(map(os.path.exists, [f"/proc/{child}" for child in children]))
