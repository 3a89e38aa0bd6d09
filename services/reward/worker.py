"""The reward role in process: scores each finished response by a rule, a user's function or a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rolemesh.batch_validation import BatchValidator
from rolemesh.config import JobConfig
from rolemesh.data.texts import ResponseTexts
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, RewardFailed
from rolemesh.methods import methods
from rolemesh.models.loading import load_tokenizer, vocabulary_in
from rolemesh.rules.sources import UnknownDataSource, rule_of
from rolemesh.services.reward.functions import QUICK
from rolemesh.services.reward.overlong import overlong_penalty
from rolemesh.services.reward.scoring_call import RowScore, Scorer
from rolemesh.services.reward.scoring_pool import CallQueue, ScoringJob, ScoringPool
from rolemesh.services.reward.scoring_process import scorer_of
from rolemesh.services.reward.thoughts import thought_tokens
from rolemesh.token_mask import last_contexts, token_mask
from rolemesh.workers.commands import ShardedBatch, on_all_ranks
from rolemesh.workers.local import LocalWorker, as_call
from rolemesh.workers.offloading import Offloader, model_tensors
from rolemesh.workers.worker_context import WorkerContext

if TYPE_CHECKING:
    from rolemesh.services.reward.model_scorer import ModelScorer


class RewardWorker(LocalWorker):
    """Implements rolemesh.roles.Reward.

    A row whose reward_model.style is "model" is scored by reward.reward_model. Any other row is scored by
    reward.custom_reward_function if set, else by the rule of its data_source. Quick rules run on the worker's
    thread. A user's function, and rules that are slow or run programs, run in processes of their own.

    Raises:
        InvalidConfig: the custom function cannot be loaded.
        ModelNotFound: the policy's tokenizer or vocabulary size, or the reward model, cannot be read.
    """

    def __init__(self, job: JobConfig, worker_context: WorkerContext | None = None) -> None:
        super().__init__("reward", worker_context)
        self._config = job.reward
        self._component_keys = job.algorithm.gdpo_reward_keys
        self._writes = methods(job)["reward.compute_scores"].writes
        self._max_tokens = job.data.max_response_length
        self._tokenizer = load_tokenizer(job.actor.model)
        self._texts = ResponseTexts(self._tokenizer, skip_special_tokens=job.reward.skip_special_tokens)
        vocabulary = vocabulary_in(job.actor.model, "actor")
        self.validator = BatchValidator.of(methods(job), "reward", vocabulary)
        self._pool = ScoringPool(job.reward, job.plugins)
        self._scorer: Scorer | None = None  # of quick rules, which need no process of their own
        if job.reward.manager.quick and job.reward.custom_reward_function.path is None:
            self._scorer = scorer_of(job.reward)
        elif self.worker_context.ranks.rank == 0:  # other ranks have the model alone
            self._pool.start()
        self._model: ModelScorer | None = None
        if job.reward.reward_model.enable:
            from rolemesh.services.reward.model_scorer import ModelScorer

            self._model = scorer = ModelScorer(job, self._tokenizer, vocabulary, self.worker_context.ranks)
            self.offloader = Offloader(lambda: model_tensors(scorer.root), scorer.device, job.run_dir)

    @as_call
    async def compute_scores(self, batch: DataProto) -> DataProto:
        """Score each response.

        Returns:
            token_level_scores [B, T] float32, the score on the last response token and 0 elsewhere; acc [B]. If
            the job's method declares them, reward_components [B, K] float32, think_mask [B, T] and
            reward_extra_info.

        Raises:
            InvalidBatch: a response has no token.
            RewardFailed: a row could not be scored; the message names its uid and the function.
        """
        mask: Tensor = batch["response_mask"]
        if len(empty := (~mask.any(1)).nonzero().flatten()):
            raise InvalidBatch(f"reward.compute_scores: response of {batch['uid'][int(empty[0])]} has no token")
        by_model = [row for row in range(len(batch)) if batch["reward_model"][row].get("style") == "model"]
        by_function = sorted(set(range(len(batch))) - set(by_model))
        async with self.traced("compute_scores"):
            scores, queue = await self.run(self._begin, batch, by_function)
        try:
            if by_model:
                async with self.turn(), self.traced("compute_scores"):
                    scores |= await self.run(self._by_model, batch, by_model)
            scored: dict[int, RowScore] = await asyncio.wrap_future(queue.scores)
            scores |= scored
        finally:
            queue.leave()
        return await self.run(self._columns, batch, [scores[row] for row in range(len(batch))])

    def close(self) -> None:
        self._pool.close()
        super().close()

    def _begin(self, batch: DataProto, rows: list[int]) -> tuple[dict[int, RowScore], CallQueue]:
        """Score rows with quick rules, and submit the others to the pool."""
        named = partial(_named, batch)
        each = dict(zip(rows, self._arguments(batch, rows), strict=True))
        scores: dict[int, RowScore] = {}
        calls = []
        if self._config.manager.together:
            calls = [ScoringJob(rows, list(each.values()))] if rows else []
        else:
            for row, arguments in each.items():
                try:
                    if self._scorer and rule_of(arguments["data_source"], self._config) in QUICK:
                        [scores[row]] = self._scorer.score([arguments])
                    else:
                        calls.append(ScoringJob([row], [arguments]))
                except (RewardFailed, UnknownDataSource) as error:
                    raise RewardFailed(f"{named([row])}: {error}") from error
        queue = CallQueue(calls, named)
        self._pool.submit(queue)
        return scores, queue

    def _arguments(self, batch: DataProto, rows: list[int]) -> list[dict[str, Any]]:
        """Return the reward function's arguments for each of the rows."""
        if not rows:
            return []
        by_policy = self._config.rules_score and self._config.rules == "rolemesh"
        if "response_texts" in batch:
            texts = [batch["response_texts"][row] for row in rows]
        elif by_policy and "turns" in batch:
            texts = [self._turns_of_policy(batch["responses"][row], batch["turns"][row]) for row in rows]
        else:
            responses = batch["responses"]
            mask = token_mask(batch)
            ids = [responses[row][mask[row]].tolist() for row in rows]
            texts = self._texts(ids)
        return [
            {
                "data_source": batch["data_source"][row],
                "solution_str": text,
                "ground_truth": batch["reward_model"][row].get("ground_truth"),
                "extra_info": batch["extra_info"][row] if "extra_info" in batch else {},
            }
            for row, text in zip(rows, texts, strict=True)
        ]

    def _turns_of_policy(self, response: Tensor, turns: Tensor) -> str:
        """Return a row's text without what others wrote, so that no rule takes their answer for the policy's.

        Each turn is decoded by itself: `#### 1` of one turn and `8 apples` of the next are not 18.
        """
        numbers = sorted(set(turns[turns > 0].tolist()))
        return "\n".join(self._texts([response[turns == number].tolist() for number in numbers]))

    def _by_model(self, batch: DataProto, rows: list[int]) -> dict[int, RowScore]:
        if self._model is None:
            raise RewardFailed(
                f"{_named(batch, rows[:1])}: its reward_model.style is 'model', but "
                "reward.reward_model.enable is false"
            )
        scored = last_contexts(batch).select_idxs(rows)
        sharded = ShardedBatch.evenly(scored, self.worker_context.ranks)
        scores = sharded.gather(self.score_rows(sharded.parts))["scores"]
        if len(bad := (~scores.isfinite()).nonzero().flatten()):
            at = int(bad[0])
            raise RewardFailed(f"{_named(batch, [rows[at]])}: the reward model's score is {scores[at].item()}")
        return {row: RowScore(score, score, {}) for row, score in zip(rows, scores.tolist(), strict=True)}

    @on_all_ranks
    def score_rows(self, part: DataProto) -> DataProto:
        """Compute the reward model's `scores` [b] of this rank's rows."""
        assert self._model is not None
        return DataProto({"scores": self._model.score(part)})

    def _columns(self, batch: DataProto, scored: list[RowScore]) -> DataProto:
        mask: Tensor = batch["response_mask"]
        scores = torch.tensor([each.score for each in scored])
        extra = [each.others for each in scored]
        overlong = self._config.overlong_buffer
        if overlong.enable:
            penalties = overlong_penalty(token_mask(batch).sum(1), self._max_tokens, overlong)
            scores += penalties
            if overlong.log:
                for of_row, penalty in zip(extra, penalties.tolist(), strict=True):
                    of_row |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        last = mask.shape[1] - 1 - mask.flip(1).to(torch.int8).argmax(1)
        by_token = torch.zeros(mask.shape).scatter_(1, last[:, None], scores[:, None])
        if "environment_rewards" in batch:
            by_token += batch["environment_rewards"]
        columns = {
            "token_level_scores": by_token,
            "acc": torch.tensor([each.acc for each in scored]),
        }
        if "reward_components" in self._writes:
            columns["reward_components"] = torch.tensor(
                [self._components(batch, row, each) for row, each in enumerate(scored)]
            )
        if "think_mask" in self._writes:
            columns["think_mask"] = thought_tokens(batch["responses"], mask, self._tokenizer)
        names = ("reward_extra_info",) if "reward_extra_info" in self._writes else ()
        return DataProto.from_dict(columns, dict.fromkeys(names, extra))

    def _components(self, batch: DataProto, row: int, score: RowScore) -> list[float]:
        for key in self._component_keys:
            if key not in score.entries:
                raise RewardFailed(
                    f"{_named(batch, [row])}: algorithm.gdpo_reward_keys names {key!r}, but the reward "
                    f"function returned no such number; it returned {dict(score.entries)}"
                )
        return [score.entries[key] for key in self._component_keys]


def _named(batch: DataProto, rows: Sequence[int]) -> str:
    """Return the name of rows for messages."""
    first = batch["uid"][rows[0]]
    last = batch["uid"][rows[-1]]
    return f"row {first}" if len(rows) == 1 else f"{len(rows)} rows, {first} to {last}"
