"""The tool as a plug-in of ours."""

from __future__ import annotations

from benchmarks.agents_beside_trl.setting import TOOL
from benchmarks.agents_beside_trl.tool import lookup
from rolemesh.plugins import tool

tool(TOOL)(lookup)
