"""The section reward: how responses are scored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.reward_managers import REWARD_MANAGERS, RewardManagerSpec
from rolemesh.config.base import Config, LocalPath, NoEffect, name_in, options_of
from rolemesh.config.key_facts import FREE, REFUSED, WARNED, Key, KeyFacts
from rolemesh.config.model import FrozenModelConfig, FsdpConfig, Ulysses

PRIME = NoEffect("prime does what naive does: rows in parallel, each with a time limit", "prime")


class CustomRewardConfig(Config):
    path: LocalPath | None = Key(
        None,
        WARNED,
        content=True,
        description="your Python file with the reward function; null: built-in rules",
    )
    name: str = Key(
        "compute_score",
        WARNED,
        counts_if="reward.custom_reward_function.path",
        description="name of the function: (data_source, solution_str, ground_truth, extra_info); with "
        "reward_manager batch: (data_sources, solution_strs, ground_truths, extra_infos)",
    )
    reward_kwargs: dict[str, str | int | float | bool] = Key(
        {},
        WARNED,
        counts_if="reward.custom_reward_function.path",
        description="further keyword arguments of the function: texts, numbers and booleans",
    )


class ScoringModelConfig(FrozenModelConfig):
    FACTS: ClassVar[dict[str, KeyFacts]] = {
        "path": KeyFacts(WARNED, counts_if="reward.reward_model.enable"),
    }

    fsdp_config: FsdpConfig = FsdpConfig()


class RewardModelConfig(Config):
    enable: bool = Key(False, WARNED, description="score rows whose reward_model.style is 'model' with a model")
    model: ScoringModelConfig = Field(
        ScoringModelConfig(), description="a sequence- or token-classification model"
    )
    micro_batch_size_per_gpu: int = Key(8, FREE, gt=0, description="rows per forward pass")
    ulysses_sequence_parallel_size: Ulysses = Key(1, FREE)


class OverlongBufferConfig(Config):
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13)."""

    enable: bool = Key(False, WARNED, description="penalize responses close to data.max_response_length")
    len: int = Key(
        0,
        WARNED,
        counts_if="reward.overlong_buffer.enable",
        ge=0,
        description="number of tokens before the maximum in which the penalty grows",
    )
    penalty_factor: float = Key(
        1.0,
        WARNED,
        counts_if="reward.overlong_buffer.enable",
        ge=0,
        description="penalty at the maximum length",
    )
    log: bool = Key(
        False,
        FREE,
        counts_if="reward.overlong_buffer.enable",
        description="report metrics: the mean penalty, reward/overlong_reward/mean, and the share of penalized "
        "responses, reward/overlong/mean",
    )


class SandboxConfig(Config):
    """The sandbox for programs of prime_code."""

    continuous: bool = Key(
        True,
        WARNED,
        description="score the share of the first ten tests that pass; false: 1 if all tests pass, else 0",
    )
    timeout_s: int = Key(
        10,
        WARNED,
        read_by=("environment",),
        gt=0,
        description="CPU seconds of one test; also the seconds that all tests of a row may sleep",
    )
    memory_limit_mb: int = Key(
        1024,
        WARNED,
        read_by=("environment",),
        ge=64,
        description="memory of one test with its interpreter, in MiB",
    )


class RewardConfig(Config):
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    reward_manager: Annotated[str, name_in(REWARD_MANAGERS), PRIME] = Key(
        "naive",
        WARNED,
        description="naive, prime: score rows in parallel; dapo: the same, with overlong_buffer; batch: call "
        "your "
        "function with all rows of a call at once",
    )
    options: Annotated[dict[str, Any], options_of(REWARD_MANAGERS, "reward_manager")] = Key(
        {}, WARNED, description="options of a plug-in's reward manager"
    )
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    num_workers: int | None = Key(
        None, FREE, gt=0, description="number of scoring processes; null: the number of CPUs, at most 8"
    )
    timeout_s: float = Key(
        300.0,
        WARNED,
        gt=0,
        description="seconds to score a row (batch: a call), after which the run fails and names it",
    )
    rules: Literal["rolemesh", "verl"] = Key(
        "rolemesh",
        REFUSED,
        description="whose rules score gsm8k, math and dapo: rolemesh forgives every form of an answer and "
        "nothing else; verl gives the scores of verl 0.9.1, to compare with its curves",
    )
    format_score: float = Key(0.0, WARNED, description="gsm8k: score of a wrong answer in the right format")
    answer_chars: int | None = Key(
        300,
        WARNED,
        read_by=("environment",),
        gt=0,
        description="gsm8k, dapo: number of characters to search at the end of a response, as in verl; null: "
        "all",
    )
    skip_special_tokens: bool = Key(
        True,
        WARNED,
        description="reward functions, dumps and generated files show responses without special tokens; false: "
        "with them, such as a <think> that is one; tokens of the end and of padding are never shown",
    )
    math: Literal["hendrycks", "math_verify"] = Key(
        "hendrycks",
        WARNED,
        description="MATH: compare answers as normalized text (hendrycks) or as mathematics (math_verify)",
    )
    sandbox: SandboxConfig = SandboxConfig()

    @property
    def manager(self) -> RewardManagerSpec:
        """The declaration of reward_manager."""
        return REWARD_MANAGERS[self.reward_manager]

    @property
    def rules_score(self) -> bool:
        """True if built-in rules score the rows that no model does; False: your function or manager."""
        return self.custom_reward_function.path is None and self.manager.origin == BUILT_IN

    @property
    def tells_more(self) -> bool:
        """True if scores may come with further numbers, for the step's metrics."""
        own = self.custom_reward_function.path is not None or not self.manager.quick
        return own or self.overlong_buffer.log

    @model_validator(mode="after")
    def _manager_fits(self) -> RewardConfig:
        if self.manager.needs_function and self.custom_reward_function.path is None:
            raise ValueError(
                f"reward_manager is {self.reward_manager}, which calls your function with all rows at once, "
                "but "
                "custom_reward_function.path is not set; name your file, or set reward_manager to naive"
            )
        if self.overlong_buffer.enable and not self.manager.punishes_length:
            raise ValueError(
                f"overlong_buffer.enable is true, but reward_manager {self.reward_manager} does not penalize "
                "length; set reward_manager to dapo"
            )
        if self.overlong_buffer.enable and self.overlong_buffer.len == 0:
            raise ValueError("overlong_buffer.enable is true, but overlong_buffer.len is 0; set it above 0")
        return self
