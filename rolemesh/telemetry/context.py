"""The current job, role, rank and step. Job and step are carried as gRPC metadata; logs read all of them."""

from __future__ import annotations

from contextvars import ContextVar

job: ContextVar[str] = ContextVar("job", default="")
role: ContextVar[str] = ContextVar("role", default="")
rank: ContextVar[int | None] = ContextVar("rank", default=None)  # None: the role is one process
step: ContextVar[int] = ContextVar("step", default=0)
