"""Evaluation alone: scores the responses of a file, and computes the metrics of a validation from them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics, Reward
from rolemesh.services.controller.offline.responses import ResponseRows
from rolemesh.services.controller.stages.validation import standard_errors, validation_metrics
from rolemesh.tasks import gather
from rolemesh.telemetry.logs import printable

CALLS_AT_ONCE = 8
SCORES = ("token_level_scores", "acc", "reward_extra_info")


@dataclass(frozen=True)
class Evaluation:
    """The result.

    Args:
        n: responses to each prompt.
        num_prompts: of each data source.
        metrics: those of a validation (docs/metrics.md).
        standard_errors: of each metric, over prompts; NaN of a single prompt.
    """

    n: int
    num_prompts: dict[str, int]
    metrics: Metrics
    standard_errors: Metrics

    def to_json(self) -> str:
        """Return it as JSON, in which null stands for a number that is not finite."""
        content = asdict(self)
        for name in ("metrics", "standard_errors"):
            content[name] = {k: v if math.isfinite(v) else None for k, v in content[name].items()}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def table(self) -> Table:
        """Return a table with a row for each metric of each data source."""
        table = Table("data source", "prompts", "of", "metric", "mean", "standard error")
        for number in (1, 4, 5):
            table.columns[number].justify = "right"
        for source, prompts in self.num_prompts.items():
            first = True
            for name, value in self.metrics.items():
                if (of := _of(name, source)) is None:
                    continue
                error = self.standard_errors[name]
                shown = f"{error:.4f}" if math.isfinite(error) else "–"
                table.add_row(Text(printable(source) * first), str(prompts) * first, *of, f"{value:.4f}", shown)
                first = False
            table.add_section()
        return table


async def evaluate(rows: ResponseRows, reward: Reward, finished: Callable[[int], None]) -> Evaluation:
    """Score responses as a validation does.

    Args:
        rows: the responses.
        reward: the only role that is called.
        finished: gets the number of rows that were scored.

    Raises:
        RewardFailed: a row could not be scored; the message names it.
    """
    slots = asyncio.Semaphore(CALLS_AT_ONCE)

    async def scored(at: range) -> DataProto:
        async with slots:
            some = rows.batch(at)
            scores = await reward.compute_scores(some)
            scores["token_level_scores"] = scores["token_level_scores"].sum(dim=1, keepdim=True)
            finished(len(some))
            wanted = [name for name in SCORES if name in scores]
            return some.select_columns(["data_source"]).union(scores.select_columns(wanted))

    batch = DataProto.concat(await gather(*(scored(at) for at in rows.parts())))
    n = rows.n
    sources = list(batch["data_source"])[:: rows.n]
    num_prompts = {source: sources.count(source) for source in sorted(set(sources))}
    return Evaluation(n, num_prompts, validation_metrics(batch, n), standard_errors(batch, n))


def _of(name: str, source: str) -> tuple[str, str] | None:
    """Split val-core/SOURCE/acc/best@4/mean into acc and best@4; None if it is of another source."""
    rest = name.partition("/")[2]
    number, _, of = rest.removeprefix(f"{source}/").partition("/")
    of = of.removesuffix("/mean")
    return (number, of) if rest.startswith(f"{source}/") and "/" not in of else None
