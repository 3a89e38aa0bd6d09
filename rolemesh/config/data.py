"""data: Parquet in verl's layout."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rolemesh.config.base import Config

Files = Annotated[
    list[str],
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value or [],
        json_schema_input_type=str | list[str] | None,
    ),
]


class DataConfig(Config):
    train_files: Files = Field([], description="one Parquet file or several")
    val_files: Files = Field([], description="one Parquet file or several; none: no validation")
    train_batch_size: int = Field(1024, gt=0, description="prompts per step")
    gen_batch_size: int | None = Field(
        None, gt=0, description="prompts answered at once in dynamic sampling; null: train_batch_size"
    )
    val_batch_size: int | None = Field(None, gt=0, description="prompts per validation call; null: all at once")
    max_prompt_length: int = Field(512, gt=0, description="P, tokens")
    max_response_length: int = Field(512, gt=0, description="T, tokens")
    prompt_key: str = Field("prompt", description="the column with the chat messages")
    reward_fn_key: str = Field("data_source", description="the column that picks the reward function")
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", description="what becomes of a longer prompt: error, or which end is cut"
    )
    filter_overlong_prompts: bool = Field(False, description="leave longer prompts out before training")
    shuffle: bool = Field(True, description="a new order of prompts in every epoch")
    seed: int = Field(42, description="of that order")
    train_max_samples: int = Field(-1, ge=-1, description="use only so many rows; -1: all")
    val_max_samples: int = Field(-1, ge=-1, description="use only so many rows; -1: all")

    @property
    def prompts_at_once(self) -> int:
        """Prompts that are answered together."""
        return self.gen_batch_size or self.train_batch_size
