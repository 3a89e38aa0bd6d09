"""The section data: prompts, from files in verl's layout or a plug-in's data set."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from rolemesh.catalog.datasets import DATASETS, DatasetSpec
from rolemesh.config.base import Config, LocalPath, name_in, options_of
from rolemesh.config.key_facts import DERIVED, FREE, REFUSED, Key
from rolemesh.config.yaml_file import check_written

# Arguments of a tokenizer's apply_chat_template that are no variables of the template.
NO_VARIABLES = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)

Files = Annotated[
    list[LocalPath],
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value or [],
        json_schema_input_type=str | list[str] | None,
    ),
]


class DataConfig(Config):
    dataset: Annotated[str, name_in(DATASETS)] = Key(
        "parquet", REFUSED, description="the kind of data set; parquet: files"
    )
    options: Annotated[dict[str, Any], options_of(DATASETS, "dataset")] = Key(
        {}, REFUSED, description="options of a plug-in's data set"
    )
    train_files: Files = Key(
        [],
        REFUSED,
        description="one file or a list of them: Parquet or JSON Lines, also in a data set of the Hugging Face "
        "Hub: hf://datasets/OWNER/NAME/FILE",
    )
    val_files: Files = Key(
        [], DERIVED, description="one file or a list of them, as train_files; empty: no validation"
    )
    train_batch_size: int = Key(
        1024, REFUSED, read_by=("actor", "critic"), gt=0, description="prompts per step"
    )
    gen_batch_size: int | None = Key(
        None, REFUSED, gt=0, description="dynamic sampling: prompts answered at once; null: train_batch_size"
    )
    val_batch_size: int | None = Key(
        None, FREE, gt=0, description="prompts per validation call; null: all at once"
    )
    max_prompt_length: int = Key(
        512,
        REFUSED,
        read_by=("actor", "rollout", "reference", "critic", "reward"),
        gt=0,
        description="P, the maximum length of a prompt, in tokens",
    )
    max_response_length: int = Key(
        512,
        REFUSED,
        read_by=("actor", "rollout", "reference", "critic", "reward"),
        gt=0,
        description="T, the maximum length of a response, in tokens",
    )
    max_length: int | None = Key(
        None,
        DERIVED,
        gt=1,
        description="sft, dpo: the maximum length of a row, in tokens, wherever its prompt ends; sets "
        "max_prompt_length to 1, and max_response_length to the rest",
    )
    prompt_key: str = Key("prompt", DERIVED, description="the column with the chat messages")
    response_key: str = Key(
        "response",
        DERIVED,
        description="sft: the column with the response to prompt_key, or a path as in extra_info.answer",
    )
    chosen_key: str = Key("chosen", DERIVED, description="dpo: the column with the response that was preferred")
    rejected_key: str = Key("rejected", DERIVED, description="dpo: the column with the other response")
    messages_key: str = Key(
        "messages",
        DERIVED,
        description="sft: the column with whole conversations, in place of prompt_key and response_key",
    )
    apply_chat_template_kwargs: dict[str, Any] = Key(
        {},
        DERIVED,
        description="variables of the chat template, e.g. {enable_thinking: false}; a template that writes "
        "today's date may take a fixed one, {date_string: 26 Jul 2024}",
    )
    tools_key: str = Key("tools", DERIVED, description="sft: the column with the tools that a prompt describes")
    reward_fn_key: str = Key("data_source", DERIVED, description="the column that selects the reward function")
    reward_model_key: str = Key(
        "reward_model",
        DERIVED,
        description="the column with style and ground_truth, by which responses are scored",
    )
    truncation: Literal["error", "left", "right", "middle"] = Key(
        "error",
        DERIVED,
        description="for a prompt longer than max_prompt_length: an error, or where tokens are cut off",
    )
    filter_overlong_prompts: bool = Key(
        False, DERIVED, description="drop prompts longer than max_prompt_length before training"
    )
    shuffle: bool = Key(True, REFUSED, description="shuffle the prompts in every epoch")
    seed: int = Key(42, REFUSED, counts_if="data.shuffle", description="seed of the shuffle")
    train_max_samples: int = Key(-1, DERIVED, ge=-1, description="maximum number of training rows; -1: all")
    val_max_samples: int = Key(-1, DERIVED, ge=-1, description="maximum number of validation rows; -1: all")

    @model_validator(mode="before")
    @classmethod
    def _splits_the_whole_length(cls, values: Any) -> Any:
        """Split max_length into a prompt of one token, which is never learned, and the rest."""
        longest = values.get("max_length") if isinstance(values, dict) else None
        if isinstance(longest, float) and longest.is_integer():
            longest = int(longest)
        if not isinstance(longest, int):
            return values
        return {"max_prompt_length": 1, "max_response_length": max(1, longest - 1), **values}

    @model_validator(mode="after")
    def _lengths_agree(self) -> "DataConfig":
        parts = self.max_prompt_length, self.max_response_length
        if self.max_length is not None and sum(parts) != self.max_length:
            raise ValueError(
                f"max_length is {self.max_length}, but max_prompt_length is {parts[0]} and max_response_length "
                f"{parts[1]}, together {sum(parts)}; take these two out of the job file, or set them to 1 and "
                f"{self.max_length - 1}"
            )
        return self

    @model_validator(mode="after")
    def _variables_are_the_templates(self) -> "DataConfig":
        if taken := sorted(NO_VARIABLES & self.apply_chat_template_kwargs.keys()):
            raise ValueError(
                f"apply_chat_template_kwargs has {taken[0]}, which is no variable of a chat template; leave it "
                "out"
            )
        try:
            check_written(self.apply_chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"apply_chat_template_kwargs: {error}") from None
        return self

    @property
    def splits_max_length(self) -> bool:
        """True if max_prompt_length and max_response_length follow from max_length."""
        return self.max_length is not None and self.max_prompt_length == 1

    @property
    def source(self) -> DatasetSpec:
        """The declaration of `dataset`."""
        return DATASETS[self.dataset]

    @property
    def has_validation(self) -> bool:
        """True if there is validation data: files, or a data set that needs no files."""
        return bool(self.val_files) or not self.source.reads_files

    @property
    def prompts_at_once(self) -> int:
        """Number of prompts answered together."""
        return self.gen_batch_size or self.train_batch_size
