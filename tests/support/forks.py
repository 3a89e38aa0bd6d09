"""Processes forked from one that has imported what is slow to import, 6 s of CPU each.

The server that forks is one for each test process, and so is its list of imports.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("torch.distributed.fsdp", "torch._dynamo", "pytest"),
        *("rolemesh.models.lora", "rolemesh.models.heads", "rolemesh.services.processes.serve"),
        *(
            f"rolemesh.services.{role}.{part}"
            for role in ("actor", "critic", "reward")
            for part in ("worker", "servicer")
        ),
        "rolemesh.rpc.calling.clients",
    ]
)
