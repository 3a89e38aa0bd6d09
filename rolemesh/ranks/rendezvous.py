"""Let the ranks of a group find each other: by torchrun's environment, and a store of torch.distributed."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in its __all__

from rolemesh.errors import InvalidConfig, RoleUnavailable

# A collective waits this long for a rank that computes. A rank that has died or is stopped is noticed by the
# stream of orders, much earlier.
COLLECTIVE_TIMEOUT = timedelta(hours=6)
STORE_TIMEOUT = timedelta(minutes=30)  # for rank 0 to start, which may be pulling its image


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet.

    Args:
        rank: of this process, from 0.
        size: number of ranks.
        host: rank 0's machine.
        port: of the store; 0: none, the rank is alone.
        attempt: with a store that outlives a group, which of its groups this is; None: rank 0 hosts the store.
    """

    rank: int = 0
    size: int = 1
    host: str = ""
    port: int = 0
    attempt: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Rendezvous:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. Without them: alone.

        If TORCHELASTIC_USE_AGENT_STORE is True, the launcher hosts the store, otherwise rank 0.

        Raises:
            InvalidConfig: a variable is missing or wrong.
        """
        numbers = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}
        try:
            rank, size, port = (int(environment.get(name) or default) for name, default in numbers.items())
        except ValueError as error:
            raise InvalidConfig(f"{', '.join(numbers)} should be numbers: {error}") from error
        if not 0 <= rank < size:
            raise InvalidConfig(f"RANK is {rank}, and WORLD_SIZE {size}; expected ranks from 0 to {size - 1}")
        if size == 1:
            return cls()
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
            raise InvalidConfig(f"WORLD_SIZE is {size}, but {' and '.join(missing)} is not set")
        hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if hosted else None
        return cls(rank, size, environment["MASTER_ADDR"], port, attempt)

    def address(self, port: int) -> str:
        """Return host:port of rank 0."""
        return join_address(self.host, port)

    @property
    def is_on_one_machine(self) -> bool:
        """True if the ranks speak over the loopback interface."""
        return is_loopback(self.host)

    @cached_property
    def own_host(self) -> str:
        """The address of this machine in the network in which it reaches rank 0's machine.

        Raises:
            RoleUnavailable: there is no way to it.
        """
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(self.host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise RoleUnavailable(f"rank 0 at {self.host} cannot be reached: {error}") from error

    @cached_property
    def store(self) -> Store:
        """The group's store. The first access connects to it, and blocks until it is there.

        Raises:
            RoleUnavailable: it was not there in time.
        """
        is_mine = self.rank == 0 and self.attempt is None
        try:
            if is_mine and self.is_on_one_machine:
                return local_store(self.size, self.host, self.port)
            store = TCPStore(
                self.host, self.port, self.size, is_mine, timeout=STORE_TIMEOUT, wait_for_workers=False
            )
        except (dist.DistError, OSError) as error:
            raise RoleUnavailable(f"no store of the ranks at {self.host}:{self.port}: {error}") from error
        return store if self.attempt is None else PrefixStore(f"/rolemesh/{self.attempt}", store)

    def join(self) -> None:
        """Join torch.distributed, unless this process has. Every rank calls it; blocks until all have."""
        if self.size > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=self.size, timeout=COLLECTIVE_TIMEOUT
            )


def join_address(host: str, port: int) -> str:
    """Return host:port, or [v6]:port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address, also in brackets, is the loopback interface's."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def own_gpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the CUDA_VISIBLE_DEVICES with which a rank sees its own GPU alone, the one at LOCAL_RANK.

    torchrun lets every rank see all GPUs of a machine. CUDA's current device is a property of a thread, and a
    role has several, so the choice is made for the process: set the variable before anything asks CUDA. Empty
    if the process is no rank, or its launcher has chosen.

    Raises:
        InvalidConfig: LOCAL_RANK is no number, or there is no such GPU among those named.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    named = visible.split(",") if visible else []
    if Rendezvous.of(environment).size == 1 or "LOCAL_RANK" not in environment:
        return {}
    if len(named) == 1 or visible == "" or environment.get("LOCAL_WORLD_SIZE") == "1":
        return {}
    try:
        rank = int(environment["LOCAL_RANK"])
        return {"CUDA_VISIBLE_DEVICES": named[rank] if named else str(rank)}
    except (ValueError, IndexError) as error:
        raise InvalidConfig(
            f"LOCAL_RANK is {environment['LOCAL_RANK']!r}, and CUDA_VISIBLE_DEVICES {visible!r}; expected the "
            "number of a GPU among them, from 0: start as many ranks on a machine as it has GPUs"
        ) from error


def local_store(size: int, host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """Host the store of a group whose ranks run on this machine; only this machine reaches it.

    Args:
        size: number of ranks.
        host: of the loopback interface.
        port: where it listens; 0 picks a free port.
    """
    # A TCPStore listens on every interface by default.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        size,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
