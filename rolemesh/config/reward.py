"""reward: what a response is worth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rolemesh.config.base import Config
from rolemesh.config.effects import NoEffect
from rolemesh.config.model import JudgingModelConfig

PRIME = NoEffect("prime does what naive does: rows in parallel, each with a time limit", "prime")


class CustomRewardConfig(Config):
    path: str | None = Field(None, description="a Python file of yours")
    name: str = Field(
        "compute_score",
        description="the function in it: (data_source, solution_str, ground_truth, extra_info); with "
        "reward_manager batch: (data_sources, solution_strs, ground_truths, extra_infos)",
    )
    reward_kwargs: dict[str, str | int | float | bool] = Field({}, description="further keyword arguments")


class RewardModelConfig(Config):
    enable: bool = Field(False, description="score rows whose reward_model.style is 'model' by a model")
    model: JudgingModelConfig = Field(
        JudgingModelConfig(), description="a sequence- or token-classification directory"
    )
    micro_batch_size_per_gpu: int = Field(8, gt=0, description="rows per forward pass")


class OverlongBufferConfig(Config):
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13)."""

    enable: bool = Field(False, description="punish responses that come near data.max_response_length")
    len: int = Field(0, ge=0, description="tokens before the maximum over which the punishment grows")
    penalty_factor: float = Field(1.0, ge=0, description="of the full punishment, at the maximum")
    log: bool = Field(
        False, description="metrics: reward/overlong_reward/mean, and reward/overlong/mean, the share"
    )


class SandboxConfig(Config):
    """Programs of prime_code."""

    continuous: bool = Field(True, description="score the share of the first ten tests; false: all or nothing")
    timeout_s: int = Field(
        10, gt=0, description="CPU seconds of a test, and seconds that a row's tests may sleep together"
    )
    memory_limit_mb: int = Field(1024, ge=64, description="MiB of a test, the interpreter's own included")


class RewardConfig(Config):
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    reward_manager: Annotated[Literal["naive", "batch", "dapo", "prime"], PRIME] = Field(
        "naive",
        description="naive and prime: rows in parallel; dapo: with overlong_buffer; batch: your function gets "
        "all rows of a call at once",
    )
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    num_workers: int | None = Field(
        None, gt=0, description="processes that score rows; null: as many as there are CPUs, 8 at most"
    )
    timeout_s: float = Field(300.0, gt=0, description="for a row (batch: a call); then the run ends, naming it")
    format_score: float = Field(0.0, description="gsm8k: of a well-formed wrong answer")
    answer_chars: int | None = Field(
        300,
        gt=0,
        description="gsm8k, dapo: read so many characters at the end of a response, as verl does; null: all",
    )
    math: Literal["hendrycks", "math_verify"] = Field(
        "hendrycks", description="MATH's answers are equal as normalised text, or as mathematics"
    )
    sandbox: SandboxConfig = SandboxConfig()

    @property
    def tells_more(self) -> bool:
        """Whether further numbers may come with a score, for the step's metrics."""
        return self.custom_reward_function.path is not None or self.overlong_buffer.log

    @model_validator(mode="after")
    def _manager_fits(self) -> RewardConfig:
        if self.reward_manager == "batch" and self.custom_reward_function.path is None:
            raise ValueError(
                "reward_manager is batch, which calls a function of yours with all rows at once, and "
                "custom_reward_function.path is not set; name your file, or set reward_manager to naive"
            )
        if self.overlong_buffer.enable and self.reward_manager != "dapo":
            raise ValueError(
                f"overlong_buffer.enable is true and reward_manager is {self.reward_manager}, which does not "
                "punish length; set reward_manager to dapo"
            )
        if self.overlong_buffer.enable and self.overlong_buffer.len == 0:
            raise ValueError("overlong_buffer.enable is true and overlong_buffer.len is 0; say how many tokens")
        return self
