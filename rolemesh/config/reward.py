"""reward: what a response is worth."""

from pydantic import Field

from rolemesh.config.base import Config
from rolemesh.config.model import ModelConfig


class CustomRewardConfig(Config):
    path: str | None = Field(None, description="a Python file of yours")
    name: str = Field(
        "compute_score",
        description="the function in it: (data_source, solution_str, ground_truth, extra_info)",
    )
    reward_kwargs: dict[str, str | int | float | bool] = Field({}, description="further keyword arguments")


class RewardModelConfig(Config):
    enable: bool = Field(False, description="score rows whose reward_model.style is 'model' by a model")
    model: ModelConfig = Field(ModelConfig(), description="a sequence- or token-classification directory")
    micro_batch_size_per_gpu: int = Field(8, gt=0, description="rows per forward pass")


class RewardConfig(Config):
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    format_score: float = Field(0.0, description="gsm8k: of a well-formed wrong answer")
