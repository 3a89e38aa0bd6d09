"""The step graph: the calls of one step and the columns between them, as text or as a Mermaid flowchart."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """One call of the step, e.g. `critic.update`."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Edge:
    """Columns (or "weights") that one call writes and another reads."""

    source: str
    target: str
    columns: tuple[str, ...]


@dataclass
class StepGraph:
    """The calls of one step, in the order in which the page made them, and the flows between them.

    Args:
        title: of the graph.
        nodes: the calls.
        edges: the flows.
    """

    title: str
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    @property
    def unread(self) -> dict[str, list[str]]:
        """Columns that no other call reads, by the name of the call that writes them."""
        read = {(edge.source, column) for edge in self.edges for column in edge.columns}
        unread = {n.name: [c for c in n.writes if (n.name, c) not in read] for n in self.nodes}
        return {name: columns for name, columns in unread.items() if columns}

    @property
    def stages(self) -> list[list[Node]]:
        """The calls by depth. Calls of one stage wait only for earlier stages, not for each other."""
        depth: dict[str, int] = {}
        for each in self.nodes:
            # a page may make a call again after a node that comes later here
            sources = [depth.get(edge.source, -1) for edge in self.edges if edge.target == each.name]
            depth[each.name] = 1 + max(sources, default=-1)
        levels: list[list[Node]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
        for each in self.nodes:
            levels[depth[each.name]].append(each)
        return levels

    def to_text(self) -> str:
        """Render the graph as text: each call, numbered by stage, with the columns it reads and writes."""
        lines = [self.title]
        for number, stage in enumerate(self.stages, 1):
            for i, each in enumerate(stage):
                lines += ["", f"{'' if i else number:>2}  {each.name}"]
                lines += _listed("reads ", each.reads) + _listed("writes", each.writes)
        lines += ["", "Calls under one number do not wait for each other."]
        if self.unread:
            lines.append("No call reads these columns; only metrics or dumps may:")
        for name, columns in self.unread.items():
            lines += _listed(f"{name}:", columns)
        return "\n".join(lines)

    def to_mermaid(self) -> str:
        """Render the graph as a Mermaid flowchart: a box for each call, an arrow with columns for each flow."""
        lines = ["flowchart TD"]
        for each in self.nodes:
            role, _, method = each.name.partition(".")
            label = f"{role}<br/><b>{method}</b>" if method else f"<b>{role}</b>"
            lines.append(f'    {_id(each.name)}["{label}"]:::{role}')
        for edge in self.edges:
            label = "<br/>".join(edge.columns)
            lines.append(f'    {_id(edge.source)} -->|"{label}"| {_id(edge.target)}')
        used = {each.name.partition(".")[0] for each in self.nodes}
        lines += [f"    classDef {role} {style}" for role, style in MERMAID_STYLES.items() if role in used]
        return "\n".join(lines)


MERMAID_STYLES = {
    "data": "fill:#eeeeee,stroke:#888888,color:#222222",
    "controller": "fill:#ffffff,stroke:#888888,color:#222222",
    "rollout": "fill:#dbeafe,stroke:#2563eb,color:#222222",
    "actor": "fill:#dcfce7,stroke:#16a34a,color:#222222",
    "reference": "fill:#ecfccb,stroke:#65a30d,color:#222222",
    "critic": "fill:#fef3c7,stroke:#d97706,color:#222222",
    "reward": "fill:#fee2e2,stroke:#dc2626,color:#222222",
}


def _listed(verb: str, columns: Sequence[str]) -> list[str]:
    """Format columns as lines of at most 100 characters."""
    first = f"      {verb} "
    indent = " " * len(first)
    return textwrap.wrap(", ".join(columns), 100, initial_indent=first, subsequent_indent=indent)


def _id(name: str) -> str:
    return name.replace(".", "_")
