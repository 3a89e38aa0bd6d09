"""Rolemesh: RLHF in which every role is a gRPC service.

The public interface for Python, with the modules that docs/plugins.md lists ("What a plug-in may import").
Everything else may change from one version to the next.

    import rolemesh

    job = rolemesh.load_job("configs/tiny.yaml", ["trainer.total_training_steps=5"])
    summary = rolemesh.run(job)
    print(rolemesh.read_metrics(summary.run_dir)[-1]["critic/score/mean"])

Names are imported when they are first used, so `import rolemesh` itself costs next to nothing. The module
`rolemesh.plugins` is public too: it adds parts of your own (docs/plugins.md).
"""

import os
from typing import TYPE_CHECKING, Any

from rolemesh.importing import imported
from rolemesh.version import __version__ as __version__

if TYPE_CHECKING:
    from rolemesh.config import JobConfig, load_job
    from rolemesh.config.job import make_job
    from rolemesh.dataproto import DataProto
    from rolemesh.errors import InvalidConfig, RolemeshError
    from rolemesh.python_interface import (
        connect_roles,
        draw_curves,
        open_roles,
        plan,
        read_metrics,
        run,
        run_async,
        step_graph,
    )
    from rolemesh.roles import Roles

# A row's bits must not depend on the rows beside it, nor on the number of threads. MKL reads this at the
# process's first matrix product; without it, matrices of few rows take other kernels or cut sums in pieces.
# It costs a few per cent of time at most.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__all__ = [
    "DataProto",
    "InvalidConfig",
    "JobConfig",
    "RolemeshError",
    "Roles",
    "connect_roles",
    "draw_curves",
    "load_job",
    "make_job",
    "open_roles",
    "plan",
    "read_metrics",
    "run",
    "run_async",
    "step_graph",
]

_HOMES = {
    "DataProto": "rolemesh.dataproto",
    "InvalidConfig": "rolemesh.errors",
    "JobConfig": "rolemesh.config",
    "RolemeshError": "rolemesh.errors",
    "Roles": "rolemesh.roles",
    "load_job": "rolemesh.config",
    "make_job": "rolemesh.config.job",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rolemesh' has no attribute {name!r}")
    value = getattr(imported(_HOMES.get(name, "rolemesh.python_interface")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
