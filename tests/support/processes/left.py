"""What a command and everything that it started leave behind: processes, and sockets that listen."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from pathlib import Path

LISTEN = "0A"


def marked(mark: str) -> set[int]:
    """The processes that have this text in their environment, whoever their parent is by now."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.add(int(process.name))
        except OSError:  # it ended meanwhile
            continue
    return found - {os.getpid()}


async def none_is_left(mark: str, within_s: float) -> None:
    """Returns when no process has the mark."""
    async with asyncio.timeout(within_s):
        while marked(mark):  # noqa: ASYNC110  # not our children
            await asyncio.sleep(0.05)


def listening(pids: set[int]) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses on which these processes listen."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                packed = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
                address = ipaddress.ip_address(words)
                found.add(getattr(address, "ipv4_mapped", None) or address)
    return found


def _sockets(pid: int) -> list[str]:
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
    return [match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))]
