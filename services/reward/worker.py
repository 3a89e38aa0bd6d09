"""The reward role in process: one score for each finished response, by rule, user's function or model."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, RewardFailed
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import methods
from rolemesh.workers.local import LocalWorker, on_worker_thread
from rolemesh.workers.parking import Parking, model_tensors
from services.reward.functions import ScoreFunction, UnknownDataSource, default_compute_score
from services.reward.functions.custom import load_function
from services.reward.model import ModelScorer
from services.reward.thoughts import thought_tokens


class RewardWorker(LocalWorker):
    """Implements rolemesh.roles.Reward.

    A row whose reward_model.style is "model" is scored by reward.reward_model; any other by
    reward.custom_reward_function where one is set, else by the rule of its data_source.

    Raises:
        InvalidConfig: the custom function cannot be loaded.
        ModelNotFound: the policy's tokenizer or the reward model is not there.
    """

    def __init__(self, job: JobConfig) -> None:
        super().__init__("reward")
        self._tokenizer = load_tokenizer(job.actor.model)
        self._marks_thoughts = "think_mask" in methods(job)["reward.compute_scores"].writes
        custom = job.reward.custom_reward_function
        self._function: ScoreFunction = partial(default_compute_score, format_score=job.reward.format_score)
        self._function_name = "default_compute_score"
        if custom.path is not None:
            self._function, self._function_name = load_function(custom), f"{custom.name} of {custom.path}"
        self._model: ModelScorer | None = None
        if job.reward.reward_model.enable:
            self._model = scorer = ModelScorer(job, self._tokenizer)
            self.parking = Parking(lambda: model_tensors(scorer.model), scorer.device, job.run_dir)

    @on_worker_thread
    def compute_scores(self, batch: DataProto) -> DataProto:
        """token_level_scores [B, T] float32, the score on the last response token and 0 elsewhere; acc [B];
        think_mask [B, T], where the job's advantages need it.

        Raises:
            InvalidBatch: a response has no token.
            RewardFailed: a row could not be scored; names its uid and the function. No score is made up.
        """
        mask: Tensor = batch["response_mask"]
        if len(empty := (~mask.any(1)).nonzero().flatten()):
            raise InvalidBatch(f"reward.compute_scores: response of {batch['uid'][int(empty[0])]} has no token")
        by_model = [row for row in range(len(batch)) if batch["reward_model"][row].get("style") == "model"]
        scores, acc = torch.zeros(len(batch)), torch.zeros(len(batch))
        if by_model:
            scores[by_model] = acc[by_model] = self._by_model(batch.select_idxs(by_model))
        for row in sorted(set(range(len(batch))) - set(by_model)):
            scores[row], acc[row] = self._by_function(batch, row)
        last = mask.shape[1] - 1 - mask.flip(1).to(torch.int8).argmax(1)
        token_level_scores = torch.zeros(mask.shape).scatter_(1, last[:, None], scores[:, None])
        columns = {"token_level_scores": token_level_scores, "acc": acc}
        if self._marks_thoughts:
            columns["think_mask"] = thought_tokens(batch["responses"], mask, self._tokenizer)
        return DataProto(columns)

    def _by_model(self, rows: DataProto) -> Tensor:
        if self._model is None:
            raise RewardFailed(
                f"row {rows['uid'][0]}: its reward_model.style is 'model'; reward.reward_model.enable is false"
            )
        scores = self._model.score(rows)
        if len(bad := (~scores.isfinite()).nonzero().flatten()):
            at = int(bad[0])
            raise RewardFailed(f"row {rows['uid'][at]}: the reward model's score is {scores[at].item()}")
        return scores

    def _by_function(self, batch: DataProto, row: int) -> tuple[float, float]:
        response: Tensor = batch["responses"][row][batch["response_mask"][row]]
        try:
            result = self._function(
                data_source=batch["data_source"][row],
                solution_str=self._tokenizer.decode(response, skip_special_tokens=True),
                ground_truth=batch["reward_model"][row].get("ground_truth"),
                extra_info=batch["extra_info"][row] if "extra_info" in batch else {},
            )
        except UnknownDataSource as error:
            raise RewardFailed(f"row {batch['uid'][row]}: {error}") from error
        except Exception as error:  # whatever a user's function raises belongs to this row
            raise RewardFailed(
                f"row {batch['uid'][row]}: {self._function_name} raised {type(error).__name__}: {error}"
                f"{_where(error)}"
            ) from error
        try:
            return score_and_acc(result)
        except (TypeError, ValueError) as error:
            raise RewardFailed(
                f"row {batch['uid'][row]}: {self._function_name} returned {result!r:.200}: {error}"
            ) from error


def _where(error: Exception) -> str:
    """The line that raised: only the message crosses to the controller."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({at.filename}, line {at.lineno})"


def score_and_acc(result: Any) -> tuple[float, float]:
    """What a function returned, as (score, acc); acc is the score where the function names none.

    Raises:
        TypeError: neither a number nor a dict with "score".
        ValueError: not finite.
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError('a dict needs "score"')
        score, acc = result["score"], result.get("acc", result["score"])
    else:
        score = acc = result
    for value in (score, acc):
        if not isinstance(value, Real):
            raise TypeError("expected a number, or a dict with one under 'score'")
        if not math.isfinite(value):
            raise ValueError(f"the score is {value}, which is not finite")
    return float(score), float(acc)
