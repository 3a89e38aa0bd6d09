"""Generates the chart's dashboards: `make dashboards`."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from monitoring.agents import agents
from monitoring.job import job
from monitoring.roles import roles
from monitoring.transport import transport

DIRECTORY = Path(__file__).parents[1] / "charts" / "rlhf-job" / "dashboards"


def generated() -> dict[Path, str]:
    """Return the path and content of each dashboard file."""
    boards = {"agents": agents(), "job": job(), "roles": roles(), "transport": transport()}
    return {
        DIRECTORY / f"{name}.json": json.dumps(board.build(), cls=JSONEncoder, indent=2) + "\n"
        for name, board in boards.items()
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
