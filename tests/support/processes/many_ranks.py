"""Run a function in several processes that have joined as the ranks of a role (gloo, this machine)."""

from __future__ import annotations

import faulthandler
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import fork_calling
from namespaces import as_machine
from torch._C._distributed_c10d import TCPStore

from rolemesh.ranks.ranks import Ranks, join

GRACE_S = 5.0  # for the other ranks, once one has failed


def on_ranks(
    num_ranks: int,
    function: Callable[..., None],
    directory: Path,
    *args: Any,
    timeout_s: float = 240.0,
    machines: int = 0,
) -> None:
    """Call function(ranks, directory, *args) on every rank, each in a process of its own.

    Args:
        num_ranks: number of processes.
        function: a module's function; it asserts.
        directory: shared, for files.
        args: further arguments.
        timeout_s: after this time the processes are killed.
        machines: number of PID namespaces to which the ranks are assigned in a row, so that those of one cannot
            open the memory of another; 0: none is made.

    Raises:
        AssertionError: with the traceback of each rank that failed or did not end in time.
    """
    # The parent hosts the store, so nobody can take a port that only seemed free.
    store = TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
    tracebacks = [directory / f"traceback-{os.urandom(4).hex()}-{rank}" for rank in range(num_ranks)]
    each = [
        (rank, num_ranks, store.port, file, timeout_s, function, directory, *args)
        for rank, file in enumerate(tracebacks)
    ]
    if machines:
        size = num_ranks // machines
        sharded = [each[first : first + size] for first in range(0, num_ranks, size)]
        processes = [fork_calling(_machine, ranks) for ranks in sharded]
    else:
        processes = [fork_calling(_main, *arguments) for arguments in each]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.01)
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    failed = [file.read_text() for file in tracebacks if file.exists()]
    codes = [process.exitcode for process in processes]
    assert not any(codes), f"exit codes {codes}, ranks {late} were killed\n" + "\n".join(failed)


def _machine(ranks: Sequence[tuple[Any, ...]]) -> None:
    as_machine(*(partial(_main, *arguments) for arguments in ranks))


def _main(
    rank: int,
    num_ranks: int,
    port: int,
    traceback_file: Path,
    timeout_s: float,
    function: Callable[..., None],
    directory: Path,
    *args: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    with open(traceback_file, "w") as file:
        faulthandler.dump_traceback_later(timeout_s - GRACE_S, file=file)  # where it waits
        try:
            join(os.environ)
            function(Ranks.of_process("cpu"), directory, *args)
            with suppress(RuntimeError):  # a rank that failed does not come
                dist.barrier()
        except BaseException:
            file.write(f"rank {rank}:\n{traceback.format_exc()}")
            file.flush()
            os._exit(1)
    os._exit(0)  # without waiting for the threads of gloo
