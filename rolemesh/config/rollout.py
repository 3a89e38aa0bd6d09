"""rollout: generation."""

from typing import Literal

from pydantic import Field, model_validator

from rolemesh.config.base import Config
from rolemesh.config.model import Precision


# Of a truncated distribution the trainer is sent every token that could be drawn, [B, T, top_k].
MAX_KEPT = 512


class SamplingConfig(Config):
    """How tokens are drawn. top_k is applied before top_p, both on logits / temperature."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_k: int = Field(-1, ge=-1, description="draw from the k likeliest tokens; -1: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the smallest set with this mass")
    do_sample: bool = Field(True, description="false: greedy")
    n: int = Field(1, gt=0, description="responses per prompt")

    @model_validator(mode="after")
    def _top_k_is_not_zero(self) -> "SamplingConfig":
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves no token; -1 takes all")
        return self

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Some tokens cannot be drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def num_kept(self) -> int:
        """K of the column kept_ids; 0: no such column. Only what is trained on has it."""
        return 0


class ValSamplingConfig(SamplingConfig):
    do_sample: bool = Field(False, description="false: greedy")


class RolloutConfig(SamplingConfig):
    name: Literal["hf", "vllm", "openai"] = Field("hf", description="the engine")
    mode: Literal["sync", "async"] = Field(
        "sync", description="async: rollouts run ahead of training by trainer.max_staleness steps"
    )
    ignore_eos: bool = Field(False, description="always use the whole response length")
    dtype: Precision = Field("float32", description="what the engine computes in")
    max_num_seqs: int = Field(256, ge=4, description="rows decoded at once")
    seed: int = Field(42, description="of the rows' random streams")
    val_kwargs: ValSamplingConfig = ValSamplingConfig()

    @model_validator(mode="after")
    def _kept_tokens_are_bounded(self) -> "RolloutConfig":
        if self.truncates and not 0 < self.top_k <= MAX_KEPT:
            raise ValueError(
                f"top_p {self.top_p:g} with top_k {self.top_k}: the trainer is sent the tokens that could be "
                f"drawn, at most {MAX_KEPT} of them; set rollout.top_k between 1 and {MAX_KEPT}"
            )
        return self

    @property
    def num_kept(self) -> int:
        return self.top_k if self.truncates else 0
