"""What a rank reads from its environment, and the store where ranks meet."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from ranked import exit_codes, follower, forked
from server_addresses import reserved_port

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.ranks.leader import Leader
from rolemesh.ranks.ranks import join
from rolemesh.ranks.rendezvous import Rendezvous, local_store, own_gpu

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


def test_without_variables_a_rank_is_alone_and_joins_nothing() -> None:
    assert Rendezvous.of({}) == Rendezvous.of({"RANK": "0", "WORLD_SIZE": "1"}) == Rendezvous()
    assert join({}) == (0, 1)


def test_ranks_meet_where_torchruns_variables_say() -> None:
    assert Rendezvous.of(TORCHRUN) == Rendezvous(1, 4, "node-0", 29500)
    hosted = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Rendezvous.of(hosted) == Rendezvous(1, 4, "node-0", 29500, "2")
    places = {"node-0": False, "10.0.0.1": False, "127.0.0.1": True, "localhost": True, "::1": True}
    assert {host: Rendezvous(host=host).is_on_one_machine for host in places} == places
    assert Rendezvous(host="::1").address(5) == "[::1]:5"


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, None),  # a launcher that counts no ranks of a machine
        ({"LOCAL_RANK": "2"}, "2"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "5,3"}, "3"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-8f"}, None),  # its launcher has chosen
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),  # alone in its pod
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}, None),  # no GPU at all
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "1", "RANK": "0"}, None),
    ],
)
def test_a_rank_sees_its_own_gpu_alone(given: dict[str, str], seen: str | None) -> None:
    assert own_gpu(TORCHRUN | given) == ({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen})


def test_a_machine_with_fewer_gpus_than_ranks_is_an_error() -> None:
    with pytest.raises(InvalidConfig, match="LOCAL_RANK is '2', and CUDA_VISIBLE_DEVICES '5,3'"):
        own_gpu(TORCHRUN | {"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "5,3"})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "4"}, "RANK is 4, and WORLD_SIZE 4; expected ranks from 0 to 3"),
        ({"RANK": "one"}, "RANK, WORLD_SIZE, MASTER_PORT should be numbers: .*'one'"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 4, but MASTER_ADDR is not set"),
        ({"MASTER_PORT": "", "MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT is not set"),
    ],
)
def test_variables_that_cannot_be_are_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        Rendezvous.of(TORCHRUN | changed)


def test_a_store_of_one_machine_listens_on_loopback_alone() -> None:
    store = local_store(2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))
    with pytest.raises(RoleUnavailable, match="in use"):
        _ = Rendezvous(0, 2, "127.0.0.1", store.port).store


async def test_rank_0_hosts_the_store_where_no_launcher_does(tmp_path: Path) -> None:
    with ExitStack() as stack:
        here = Rendezvous(0, 2, "127.0.0.1", stack.enter_context(reserved_port()))
        processes = stack.enter_context(forked(follower, [(tmp_path, replace(here, rank=1))]))
        leader = Leader("ab", here)
        await leader.start()
        await leader.gather()
        answers = await asyncio.to_thread(
            leader.executor("a").run, "echo", lambda rows: rows, [DataProto()] * 2
        )
        assert len(answers) == 2
        await leader.close()
        assert await exit_codes(processes) == [0]
