"""The reward role in process: one score for each finished response, by rule, user's function or model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.door import Door
from rolemesh.errors import InvalidBatch, RewardFailed
from rolemesh.models.loading import load_tokenizer, vocabulary_in
from rolemesh.roles import methods
from rolemesh.services.reward.functions import QUICK, UnknownDataSource, rule_of
from rolemesh.services.reward.judge import function_of
from rolemesh.services.reward.judges import Call, Judges, Line
from rolemesh.services.reward.model import ModelScorer
from rolemesh.services.reward.overlong import overlong_penalty
from rolemesh.services.reward.thoughts import thought_tokens
from rolemesh.services.reward.verdict import PLURAL, Verdict, judge
from rolemesh.workers.local import LocalWorker, as_call
from rolemesh.workers.parking import Parking, model_tensors


class RewardWorker(LocalWorker):
    """Implements rolemesh.roles.Reward.

    A row whose reward_model.style is "model" is scored by reward.reward_model; any other by
    reward.custom_reward_function where one is set, else by the rule of its data_source. Quick rules run on the
    worker's thread; the user's function, and rules that are slow or run programs, in processes of their own.

    Raises:
        InvalidConfig: the custom function cannot be loaded.
        ModelNotFound: the policy's tokenizer or the reward model is not there.
    """

    def __init__(self, job: JobConfig) -> None:
        super().__init__("reward")
        self._config = job.reward
        self._component_keys = job.algorithm.gdpo_reward_keys
        self._writes = methods(job)["reward.compute_scores"].writes
        self._max_tokens = job.data.max_response_length
        self._tokenizer = load_tokenizer(job.actor.model)
        vocabulary = vocabulary_in(job.actor.model, "actor")
        self.door = Door.of(methods(job), "reward", vocabulary)
        self._judges = Judges(job.reward)
        if job.reward.custom_reward_function.path is not None:
            self._judges.start()
        self._model: ModelScorer | None = None
        if job.reward.reward_model.enable:
            self._model = scorer = ModelScorer(job, self._tokenizer, vocabulary)
            self.parking = Parking(lambda: model_tensors(scorer.model), scorer.device, job.run_dir)

    @as_call
    async def compute_scores(self, batch: DataProto) -> DataProto:
        """token_level_scores [B, T] float32, the score on the last response token and 0 elsewhere; acc [B];
        where the job's advantages need them, reward_components [B, K] float32 and think_mask [B, T].

        Raises:
            InvalidBatch: a response has no token.
            RewardFailed: a row could not be scored; names its uid and the function. No score is made up.
        """
        mask: Tensor = batch["response_mask"]
        if len(empty := (~mask.any(1)).nonzero().flatten()):
            raise InvalidBatch(f"reward.compute_scores: response of {batch['uid'][int(empty[0])]} has no token")
        by_model = [row for row in range(len(batch)) if batch["reward_model"][row].get("style") == "model"]
        by_function = sorted(set(range(len(batch))) - set(by_model))
        async with self.traced("compute_scores"):
            verdicts, line = await self.run(self._begin, batch, by_function)
        try:
            if by_model:
                async with self.turn(), self.traced("compute_scores"):
                    verdicts |= await self.run(self._by_model, batch, by_model)
            judged: dict[int, Verdict] = await asyncio.wrap_future(line.verdicts)
            verdicts |= judged
        finally:
            line.leave()
        return await self.run(self._columns, batch, [verdicts[row] for row in range(len(batch))])

    def close(self) -> None:
        self._judges.close()
        super().close()

    def _begin(self, batch: DataProto, rows: list[int]) -> tuple[dict[int, Verdict], Line]:
        """Scores what is quick, and has the judges begin with the rest."""
        named = partial(_named, batch)
        each = dict(zip(rows, self._arguments(batch, rows), strict=True))
        verdicts: dict[int, Verdict] = {}
        calls = []
        if self._config.reward_manager == "batch":
            together = {plural: [each[row][name] for row in rows] for name, plural in PLURAL.items()}
            calls = [Call(rows, together)] if rows else []
        else:
            for row, arguments in each.items():
                try:
                    if self._is_quick(arguments["data_source"]):
                        [verdicts[row]] = judge(*function_of(self._config), arguments)
                    else:
                        calls.append(Call([row], arguments))
                except (RewardFailed, UnknownDataSource) as error:
                    raise RewardFailed(f"{named([row])}: {error}") from error
        line = Line(calls, named)
        self._judges.submit(line)
        return verdicts, line

    def _is_quick(self, data_source: str) -> bool:
        is_custom = self._config.custom_reward_function.path is not None
        return not is_custom and rule_of(data_source, self._config) in QUICK

    def _arguments(self, batch: DataProto, rows: list[int]) -> list[dict[str, Any]]:
        """What a reward function is called with for each of the rows."""
        if not rows:
            return []
        responses, mask = batch["responses"], batch["response_mask"]
        texts = self._tokenizer.batch_decode(
            [responses[row][mask[row]].tolist() for row in rows], skip_special_tokens=True
        )
        return [
            {
                "data_source": batch["data_source"][row],
                "solution_str": text,
                "ground_truth": batch["reward_model"][row].get("ground_truth"),
                "extra_info": batch["extra_info"][row] if "extra_info" in batch else {},
            }
            for row, text in zip(rows, texts, strict=True)
        ]

    def _by_model(self, batch: DataProto, rows: list[int]) -> dict[int, Verdict]:
        if self._model is None:
            raise RewardFailed(
                f"{_named(batch, rows[:1])}: its reward_model.style is 'model'; "
                "reward.reward_model.enable is false"
            )
        scores = self._model.score(batch.select_idxs(rows))
        if len(bad := (~scores.isfinite()).nonzero().flatten()):
            at = int(bad[0])
            raise RewardFailed(f"{_named(batch, [rows[at]])}: the reward model's score is {scores[at].item()}")
        return {row: Verdict(score, score, {}) for row, score in zip(rows, scores.tolist(), strict=True)}

    def _columns(self, batch: DataProto, verdicts: list[Verdict]) -> DataProto:
        mask: Tensor = batch["response_mask"]
        scores = torch.tensor([verdict.score for verdict in verdicts])
        extra = [verdict.besides for verdict in verdicts]
        overlong = self._config.overlong_buffer
        if overlong.enable:
            penalties = overlong_penalty(mask.sum(1), self._max_tokens, overlong)
            scores += penalties
            if overlong.log:
                for told, penalty in zip(extra, penalties.tolist(), strict=True):
                    told |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        last = mask.shape[1] - 1 - mask.flip(1).to(torch.int8).argmax(1)
        columns = {
            "token_level_scores": torch.zeros(mask.shape).scatter_(1, last[:, None], scores[:, None]),
            "acc": torch.tensor([verdict.acc for verdict in verdicts]),
        }
        if "reward_components" in self._writes:
            columns["reward_components"] = torch.tensor(
                [self._components(batch, row, verdict) for row, verdict in enumerate(verdicts)]
            )
        if "think_mask" in self._writes:
            columns["think_mask"] = thought_tokens(batch["responses"], mask, self._tokenizer)
        names = ("reward_extra_info",) if "reward_extra_info" in self._writes else ()
        return DataProto.from_dict(columns, dict.fromkeys(names, extra))

    def _components(self, batch: DataProto, row: int, verdict: Verdict) -> list[float]:
        for key in self._component_keys:
            if key not in verdict.entries:
                raise RewardFailed(
                    f"{_named(batch, [row])}: algorithm.gdpo_reward_keys names {key!r}, and what "
                    f"scored the row gave no number of that name, but {dict(verdict.entries)}"
                )
        return [verdict.entries[key] for key in self._component_keys]


def _named(batch: DataProto, rows: Sequence[int]) -> str:
    """What an error calls the rows."""
    first, last = batch["uid"][rows[0]], batch["uid"][rows[-1]]
    return f"row {first}" if len(rows) == 1 else f"{len(rows)} rows, {first} to {last}"
