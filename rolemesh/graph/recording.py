"""Runs a page once with roles that compute nothing and record every call.

The recording roles implement the same Protocols as workers and clients. Each checks its batch against
`rolemesh.methods.methods`, and answers with columns of the declared shape and dtype. So a page that forgets a
column fails in milliseconds, before any model loads. The controller's own functions are marked with `@node`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rolemesh.catalog.catalog import load
from rolemesh.catalog.role_specs import ROLES
from rolemesh.columns import COLUMNS
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig
from rolemesh.graph import nodes
from rolemesh.graph.graph import Edge, Node, StepGraph
from rolemesh.methods import Method, methods
from rolemesh.roles import Metrics, Roles
from rolemesh.v1.environment_pb2 import (
    ActRequest,
    ActResponse,
    Agent,
    CloseEpisodeRequest,
    CloseEpisodeResponse,
    DescribeRequest,
    DescribeResponse,
    OpenEpisodeRequest,
    OpenEpisodeResponse,
)
from rolemesh.weights.weight_source import Fits, WeightSource

Page = Callable[[DataProto, Roles], Awaitable[object]]

# Sizes of the recorded batches: enough for groups of responses, small enough to cost nothing.
NUM_PROMPTS = 2
PROMPT_TOKENS = 3
RESPONSE_TOKENS = 4
KEPT_TOKENS = 5
PAGE = "controller.page"  # writes the columns that the page itself sets
FROM_THE_DATA = ("prompts", "prompt_mask", "uid", "data_source", "reward_model", "extra_info")
ANSWERED = ("prompts", "prompt_mask", "responses", "response_mask", "turns", "uid", "data_source")
COLUMNS_OF = {"prompts": FROM_THE_DATA, "responses": ANSWERED, "pairs": (*ANSWERED, "contexts")}


async def record(page: Page, job: JobConfig, title: str) -> StepGraph:
    """Run a page on a few blank rows with recording roles, and return its graph.

    Args:
        page: takes prompts and roles.
        job: determines the columns that each method reads.
        title: title of the graph.

    Raises:
        InvalidBatch: a call reads a column that no earlier call wrote, or one of a wrong shape or dtype.
        InvalidConfig: the rollouts end the step with older weights than the actor's.
    """
    recorder = Recorder(job, StepGraph(title))
    recorder.add(Node("data", (), COLUMNS_OF[job.page.learns_from]))
    token = nodes.observer.set(recorder)
    try:
        await page(_some_prompts(job), recorder.roles())
    finally:
        nodes.observer.reset(token)
    if job.generates and recorder.updates_of_rollouts < recorder.updates:
        raise InvalidConfig(
            f"{title}: it ends while the rollouts have older weights than the actor, and would generate with "
            "these; call `await roles.sync_weights(step.number)` after `roles.actor.update`"
        )
    return recorder.graph


class Recorder:
    """Records each call, its columns, and the calls that wrote them."""

    def __init__(self, job: JobConfig, graph: StepGraph) -> None:
        self.job = job
        self.graph = graph
        self.methods = methods(job)
        self.updates = self.updates_of_rollouts = 0  # of the actor, and those in the rollouts' weights
        self._writer: dict[str, str] = {}

    def roles(self) -> Roles:
        """Return a recording role for each of the job's roles."""
        return Roles.of(self.job, {role: load(ROLES[role].recorded)(self) for role in self.job.roles})

    def add(self, this: Node) -> None:
        """Add a call, with edges from the last writers of the columns that it reads.

        A call that is repeated for each chunk is one node.
        """
        if this in self.graph.nodes:
            return
        flows: dict[str, list[str]] = {}
        for column in this.reads:
            flows.setdefault(self._writer.get(column, PAGE), []).append(column)
        if PAGE in flows and not any(node.name == PAGE for node in self.graph.nodes):
            self.graph.nodes.append(Node(PAGE, (), tuple(flows[PAGE])))
        self.graph.nodes.append(this)
        self.graph.edges += [Edge(source, this.name, tuple(columns)) for source, columns in flows.items()]
        self._writer |= dict.fromkeys(this.writes, this.name)

    def call(self, name: str, batch: DataProto) -> DataProto:
        """Check and record a role's call; return its answer."""
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
        """Raise InvalidBatch unless the batch has every column, with the shape and dtype of `COLUMNS`."""
        for name in reads:
            if name not in batch:
                writers = self._could_write(name)
                way_out = f"call {' or '.join(writers)} before it" if writers else "no call writes it"
                raise InvalidBatch(
                    f"{self.graph.title}: {reader} reads column {name!r}, which the batch does not have; "
                    f"{way_out}. The batch has {sorted(batch.columns)}"
                )
            if name in batch.tensors and name in COLUMNS:
                wanted = _blank(name, len(batch), self.job)
                got = batch.tensors[name]
                if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
                    raise InvalidBatch(
                        f"{self.graph.title}: {reader} reads column {name!r} as "
                        f"{wanted.dtype} {list(COLUMNS[name].axes)} {list(wanted.shape)}; "
                        f"{self._writer.get(name, 'the page')} made it {got.dtype} {list(got.shape)}"
                    )

    def _could_write(self, column: str) -> list[str]:
        calls = [name for name, method in self.methods.items() if column in method.writes]
        calls += [
            f"controller.{n.name}" for n in nodes.CONTROLLER_NODES.values() if column in n.writes(self.job)
        ]
        return calls + ["the data set"] * (column in COLUMNS_OF[self.job.page.learns_from])

    @contextmanager
    def during(self, node: nodes.ControllerNode, batch: DataProto) -> Iterator[None]:
        name = f"controller.{node.name}"
        self.check(name, node.reads(self.job), batch)
        yield
        if node.reads(self.job) or node.writes(self.job):  # otherwise it does nothing in this job
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
        self.recorder.updates += 1
        return {}

    async def publish_weights(self, version: int) -> WeightSource:
        return RecordedWeights(version, self.recorder.updates)

    async def begin_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint; the loop does")

    async def finish_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint; the loop does")

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
        raise AssertionError("a page loads no checkpoint; the loop does")


@dataclass
class RecordedWeights:
    version: int
    updates: int
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
        # A source that the page made of them says nothing: it is taken to have the newest.
        self.recorder.updates_of_rollouts = getattr(source, "updates", self.recorder.updates)


@dataclass
class RecordedReward:
    recorder: Recorder

    async def compute_scores(self, batch: DataProto) -> DataProto:
        """Answer with scores that all differ, so that dynamic sampling finds groups to keep and ends."""
        answer = self.recorder.call("reward.compute_scores", batch)
        answer["acc"] = torch.arange(len(batch), dtype=torch.float32)
        answer["token_level_scores"][:, -1] = answer["acc"]
        return answer


@dataclass
class RecordedEnvironment:
    """Ends every conversation without an answer. It records nothing, since its calls have no columns."""

    recorder: Recorder

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        return DescribeResponse(agents=[Agent(name=name) for name in request.agents])

    async def open_episode(self, request: OpenEpisodeRequest) -> OpenEpisodeResponse:
        return OpenEpisodeResponse()

    async def act(self, request: ActRequest) -> ActResponse:
        return ActResponse(done=True, why="recorded")

    async def close_episode(self, request: CloseEpisodeRequest) -> CloseEpisodeResponse:
        return CloseEpisodeResponse()


@dataclass
class RecordedCritic:
    recorder: Recorder

    async def compute_values(self, batch: DataProto) -> DataProto:
        return self.recorder.call("critic.compute_values", batch)

    async def update(self, batch: DataProto) -> Metrics:
        self.recorder.call("critic.update", batch)
        return {}

    async def begin_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint; the loop does")

    async def finish_checkpoint(self, directory: Path) -> None:
        raise AssertionError("a page saves no checkpoint; the loop does")

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None:
        raise AssertionError("a page loads no checkpoint; the loop does")


def _blank(name: str, num_rows: int, job: JobConfig) -> Tensor:
    """Make a column of the declared shape and dtype: masks all True, all others zero."""
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
    """Make prompts with the columns of the job's data set."""
    columns = COLUMNS_OF[job.page.learns_from]
    cells = {
        "uid": [f"prompt-{i}" for i in range(NUM_PROMPTS)],
        "data_source": ["recording"] * NUM_PROMPTS,
        "reward_model": [{"style": "rule", "ground_truth": ""}] * NUM_PROMPTS,
        "extra_info": [{}] * NUM_PROMPTS,
    }
    return DataProto.from_dict(
        {name: _blank(name, NUM_PROMPTS, job) for name in columns if name not in cells},
        {name: cells[name] for name in columns if name in cells},
    )
