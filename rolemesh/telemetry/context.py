"""Which job, role and step this code runs for. Set by the loop, carried as gRPC metadata, read by logs."""

from __future__ import annotations

from contextvars import ContextVar

job: ContextVar[str] = ContextVar("job", default="")
role: ContextVar[str] = ContextVar("role", default="")
step: ContextVar[int] = ContextVar("step", default=0)
