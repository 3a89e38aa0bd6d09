"""trainer: the loop around the steps."""

from typing import Literal

from pydantic import Field, PositiveInt

from rolemesh.config.base import Config

Logger = Literal["console", "file", "tensorboard", "wandb", "mlflow"]


class TrainerConfig(Config):
    project_name: str = "rolemesh"
    experiment_name: str = "run"
    default_local_dir: str | None = Field(
        None, description="the run directory; null: outputs/<experiment_name>"
    )
    total_epochs: int = Field(1, gt=0, description="passes over the prompts")
    total_training_steps: int | None = Field(None, gt=0, description="null: as many as the epochs hold")
    max_staleness: int = Field(
        1, ge=0, description="rollout.mode async: steps by which a token's weights may be behind; 0 is sync"
    )
    critic_warmup: int = Field(0, ge=0, description="first steps in which the critic alone is trained")
    balance_batch: bool = Field(
        True,
        description="rows of a mini-batch go to micro-batches by length, answers to one prompt together where "
        "they can: each has about as many tokens",
    )
    val_before_train: bool = True
    val_only: bool = False
    test_freq: int = Field(-1, ge=-1, description="validate every so many steps and at the end; -1: never")
    save_freq: int = Field(-1, ge=-1, description="checkpoint every so many steps and at the end; -1: never")
    max_actor_ckpt_to_keep: int | None = Field(None, gt=0, description="older ones are deleted; null: keep all")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        "auto", description="auto: from the run directory's latest checkpoint if there is one"
    )
    resume_from_path: str | None = Field(None, description="a global_step_<n> directory, for resume_path")
    logger: list[Logger] = Field(
        ["console", "file"], description="where step metrics go; to metrics.jsonl, which is file, always"
    )
    rollout_data_dir: str | None = Field(None, description="one JSONL of responses per training step")
    validation_data_dir: str | None = Field(None, description="one JSONL of responses per validation")
    log_val_generations: int = Field(3, ge=0, description="validation answers shown at the end")
    profile_steps: tuple[PositiveInt, ...] = Field(
        (), description="steps of which profile/step_<n> gets a timeline and each role's trace, as [2, 5]"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    rpc_timeout_s: float = Field(1800.0, gt=0, description="seconds; deadline of every call to a role")
    weight_sync_timeout_s: float = Field(
        300.0, gt=0, description="seconds for a rollout to take new weights; a replica that cannot is left out"
    )
    ready_timeout_s: float = Field(600.0, gt=0, description="seconds until every role must be ready")
