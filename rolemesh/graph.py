"""The step graph: a page run once with roles that compute nothing and write everything down.

The recording roles are Protocol implementations like workers and clients. Each checks the batch it is given
against `rolemesh.roles.methods` and answers with columns of the declared shape and dtype, so that a page
which forgets a column fails in milliseconds, before any model loads. What the controller itself computes is
marked with `@node`.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.roles import COLUMNS, Method, Metrics, Roles, methods
from rolemesh.weights.source import Fits, WeightSource

P = ParamSpec("P")
R = TypeVar("R")
Page = Callable[[DataProto, Roles], Awaitable[object]]

# Sizes of the recording: enough for groups of responses, small enough to cost nothing.
NUM_PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS, KEPT_TOKENS = 2, 3, 4, 5
FROM_THE_DATA = ("prompts", "prompt_mask", "uid", "data_source", "reward_model", "extra_info")


# --------------------------------------------------------------- what the controller computes


@dataclass(frozen=True)
class ControllerNode:
    """A function of the controller that works on the batch.

    Args:
        name: the function's name.
        phase: the `timing_s/` key that it counts towards; empty for none.
        reads: the columns that it needs, of a job.
        writes: the columns that it adds, of a job.
    """

    name: str
    phase: str
    reads: Callable[[JobConfig], tuple[str, ...]]
    writes: Callable[[JobConfig], tuple[str, ...]]


class Observer(Protocol):
    """Who wants to know when the controller computes: the recorder, or the loop's stopwatch."""

    def during(self, node: ControllerNode, batch: DataProto) -> AbstractContextManager[None]:
        """Entered before the function runs, left after it."""
        ...


observer: ContextVar[Observer | None] = ContextVar("observer", default=None)
CONTROLLER_NODES: dict[str, ControllerNode] = {}
Columns = tuple[str, ...] | Callable[[JobConfig], tuple[str, ...]]


def node(
    reads: Columns, writes: Columns, phase: str = ""
) -> Callable[[Callable[Concatenate[DataProto, P], R]], Callable[Concatenate[DataProto, P], R]]:
    """Marks a function of the controller, whose first argument is the batch, as a node of the step graph."""

    def decorate(function: Callable[Concatenate[DataProto, P], R]) -> Callable[Concatenate[DataProto, P], R]:
        this = ControllerNode(function.__name__, phase, _of_job(reads), _of_job(writes))
        CONTROLLER_NODES[this.name] = this

        @functools.wraps(function)
        def observed(batch: DataProto, /, *args: P.args, **kwargs: P.kwargs) -> R:
            watching = observer.get()
            with watching.during(this, batch) if watching else nullcontext():
                return function(batch, *args, **kwargs)

        return observed

    return decorate


def _of_job(columns: Columns) -> Callable[[JobConfig], tuple[str, ...]]:
    return columns if callable(columns) else lambda job: columns


# ------------------------------------------------------------------------------------ the graph


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
    """The calls of one step in the order of the page, and what flows between them."""

    title: str
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    @property
    def unread(self) -> dict[str, list[str]]:
        """Columns that no later call reads, by the call that writes them."""
        read = {(edge.source, column) for edge in self.edges for column in edge.columns}
        unread = {n.name: [c for c in n.writes if (n.name, c) not in read] for n in self.nodes}
        return {name: columns for name, columns in unread.items() if columns}

    @property
    def stages(self) -> list[list[Node]]:
        """The calls by depth: those of one stage wait only for earlier stages, not for each other."""
        depth: dict[str, int] = {}
        for each in self.nodes:
            sources = [depth[edge.source] for edge in self.edges if edge.target == each.name]
            depth[each.name] = 1 + max(sources, default=-1)
        levels: list[list[Node]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
        for each in self.nodes:
            levels[depth[each.name]].append(each)
        return levels

    def to_text(self) -> str:
        """A line for each call, numbered by stage: what it reads, and what it writes."""
        lines = [self.title]
        for number, stage in enumerate(self.stages, 1):
            for i, each in enumerate(stage):
                lines += ["", f"{'' if i else number:>2}  {each.name}"]
                lines += _listed("reads ", each.reads) + _listed("writes", each.writes)
        lines += ["", "Calls under one number do not wait for each other."]
        if self.unread:
            lines.append("No call reads these; metrics and dumps do, or nobody does:")
        for name, columns in self.unread.items():
            lines += _listed(f"{name}:", columns)
        return "\n".join(lines)

    def to_mermaid(self) -> str:
        """A Mermaid flowchart: a box for each call, an arrow for each flow, labelled with its columns."""
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
    """Columns on lines of at most 100 characters."""
    first = f"      {verb} "
    indent = " " * len(first)
    return textwrap.wrap(", ".join(columns), 100, initial_indent=first, subsequent_indent=indent)


def _id(name: str) -> str:
    return name.replace(".", "_")


# -------------------------------------------------------------------------------- the recording


async def record(page: Page, job: JobConfig, title: str) -> StepGraph:
    """Runs a page on a few empty rows with recording roles.

    Args:
        page: takes prompts and roles.
        job: says which columns each method reads.
        title: of the graph.

    Raises:
        InvalidBatch: a call reads a column that no call before it wrote, or one of a wrong shape or dtype.
    """
    recorder = Recorder(job, StepGraph(title))
    recorder.add(Node("data", (), FROM_THE_DATA))
    token = observer.set(recorder)
    try:
        await page(_some_prompts(job), recorder.roles())
    finally:
        observer.reset(token)
    return recorder.graph


class Recorder:
    """Writes down each call: its columns, and who wrote them."""

    def __init__(self, job: JobConfig, graph: StepGraph) -> None:
        self.job = job
        self.graph = graph
        self.methods = methods(job)
        self._writer: dict[str, str] = {}

    def roles(self) -> Roles:
        """Roles that record."""
        return Roles.of(self.job, {role: RECORDED[role](self) for role in self.job.roles})

    def add(self, this: Node) -> None:
        """A call, with an edge from the last writer of each column that it reads. A call that is made once
        for each chunk is one node."""
        if this in self.graph.nodes:
            return
        flows: dict[str, list[str]] = {}
        for column in this.reads:
            flows.setdefault(self._writer[column], []).append(column)
        self.graph.nodes.append(this)
        self.graph.edges += [Edge(source, this.name, tuple(columns)) for source, columns in flows.items()]
        self._writer |= dict.fromkeys(this.writes, this.name)

    def call(self, name: str, batch: DataProto) -> DataProto:
        """Checks and records a role's call; returns its answer."""
        method = self.methods[name]
        optional = tuple(column for column in method.optional if column in batch)
        self.check(name, (*method.reads, *optional), batch)
        self.add(Node(name, (*method.reads, *optional), method.writes))
        return self.answer(method, len(batch))

    def answer(self, method: Method, num_rows: int) -> DataProto:
        tensors = [name for name in method.writes if COLUMNS[name].dtype]
        others = [name for name in method.writes if name not in tensors]
        return DataProto.from_dict(
            {name: _blank(name, num_rows, self.job) for name in tensors},
            {name: [{}] * num_rows for name in others},
        )

    def check(self, reader: str, reads: Iterable[str], batch: DataProto) -> None:
        """Raises InvalidBatch unless every column is there and is what `COLUMNS` says."""
        for name in reads:
            if name not in batch:
                writers = self._could_write(name)
                way_out = f"call {' or '.join(writers)} before it" if writers else "no call writes it"
                raise InvalidBatch(
                    f"{self.graph.title}: {reader} reads column {name!r}, which the batch does not have "
                    f"there; {way_out}. The batch has {sorted(batch.columns)}"
                )
            if name in batch.tensors and name in COLUMNS:
                wanted, got = _blank(name, len(batch), self.job), batch.tensors[name]
                if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
                    raise InvalidBatch(
                        f"{self.graph.title}: {reader} reads column {name!r} as "
                        f"{wanted.dtype} {list(COLUMNS[name].axes)} {list(wanted.shape)}; "
                        f"{self._writer.get(name, 'the page')} made it {got.dtype} {list(got.shape)}"
                    )

    def _could_write(self, column: str) -> list[str]:
        calls = [name for name, method in self.methods.items() if column in method.writes]
        calls += [f"controller.{n.name}" for n in CONTROLLER_NODES.values() if column in n.writes(self.job)]
        return calls + ["the data set"] * (column in FROM_THE_DATA)

    @contextmanager
    def during(self, node: ControllerNode, batch: DataProto) -> Iterator[None]:
        name = f"controller.{node.name}"
        self.check(name, node.reads(self.job), batch)
        yield
        if node.reads(self.job) or node.writes(self.job):  # else it has nothing to do in this job
            self.add(Node(name, node.reads(self.job), node.writes(self.job)))


@dataclass
class RecordedActor:
    recorder: Recorder

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return self.recorder.call("actor.compute_log_probs", batch)

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        return self.recorder.call("actor.compute_ref_log_probs", batch)

    async def update(self, batch: DataProto) -> Metrics:
        self.recorder.call("actor.update", batch)
        self.recorder._writer["weights"] = "actor.update"
        return {}

    async def publish_weights(self, version: int) -> WeightSource:
        return RecordedWeights(version)

    async def save_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint; the loop does")

    async def load_checkpoint(self, directory: Path | None) -> None:
        raise AssertionError("a page loads no checkpoint; the loop does")


@dataclass
class RecordedWeights:
    version: int
    address: str | None = None

    async def fetch(self, fits: Fits | None = None) -> dict[str, Tensor]:
        return {}


@dataclass
class RecordedReference:
    recorder: Recorder

    async def compute_log_probs(self, batch: DataProto) -> DataProto:
        return self.recorder.call("reference.compute_log_probs", batch)


@dataclass
class RecordedRollout:
    recorder: Recorder

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        answer = self.recorder.call("rollout.generate", prompts)
        answer["row"] = torch.arange(len(prompts))
        yield answer

    async def update_weights(self, source: WeightSource) -> None:
        self.recorder.add(Node("rollout.update_weights", ("weights",), ()))


@dataclass
class RecordedReward:
    recorder: Recorder

    async def compute_scores(self, batch: DataProto) -> DataProto:
        """No two scores are equal: a page that waits for answers which differ comes to its end."""
        answer = self.recorder.call("reward.compute_scores", batch)
        answer["acc"] = torch.arange(len(batch), dtype=torch.float32)
        answer["token_level_scores"][:, -1] = answer["acc"]
        return answer


@dataclass
class RecordedCritic:
    recorder: Recorder

    async def compute_values(self, batch: DataProto) -> DataProto:
        return self.recorder.call("critic.compute_values", batch)

    async def update(self, batch: DataProto) -> Metrics:
        self.recorder.call("critic.update", batch)
        return {}

    async def save_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint; the loop does")

    async def load_checkpoint(self, directory: Path | None) -> None:
        raise AssertionError("a page loads no checkpoint; the loop does")


RECORDED: dict[str, Callable[[Recorder], Any]] = {
    "actor": RecordedActor,
    "rollout": RecordedRollout,
    "reference": RecordedReference,
    "critic": RecordedCritic,
    "reward": RecordedReward,
}


def _blank(name: str, num_rows: int, job: JobConfig) -> Tensor:
    """A column of the declared shape and dtype: masks all True, the rest zero."""
    column = COLUMNS[name]
    sizes = {
        "B": num_rows,
        "P": PROMPT_TOKENS,
        "T": RESPONSE_TOKENS,
        "S": PROMPT_TOKENS + RESPONSE_TOKENS,
        "K": KEPT_TOKENS,
        "C": len(job.algorithm.gdpo_reward_keys),
    }
    shape = [sizes[axis] for axis in column.axes]
    return torch.full(shape, column.dtype == torch.bool, dtype=column.dtype)


def _some_prompts(job: JobConfig) -> DataProto:
    return DataProto.from_dict(
        {name: _blank(name, NUM_PROMPTS, job) for name in ("prompts", "prompt_mask")},
        {
            "uid": [f"prompt-{i}" for i in range(NUM_PROMPTS)],
            "data_source": ["recording"] * NUM_PROMPTS,
            "reward_model": [{"style": "rule", "ground_truth": ""}] * NUM_PROMPTS,
            "extra_info": [{}] * NUM_PROMPTS,
        },
    )
