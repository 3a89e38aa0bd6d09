"""The section trainer: the training loop, checkpoints, logs and timeouts."""

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from rolemesh.config.base import Config, LocalPath

Logger = Literal["console", "file", "tensorboard", "wandb", "mlflow"]


class TrainerConfig(Config):
    project_name: str = Field("rolemesh", description="project of the run in wandb and mlflow")
    experiment_name: str = Field("run", description="name of the run in loggers, metrics and its directory")
    default_local_dir: LocalPath | None = Field(
        None, description="the run directory; null: outputs/<experiment_name>"
    )
    total_epochs: int = Field(1, gt=0, description="passes over the prompts, if total_training_steps is null")
    total_training_steps: int | None = Field(
        None, gt=0, description="number of steps; null: as many as total_epochs gives"
    )
    max_staleness: int = Field(
        1,
        ge=0,
        description="rollout.mode async: how many steps old the weights that generated a token may be; 0 is "
        "sync",
    )
    max_rollout_kl: float | None = Field(
        0.5,
        gt=0,
        description="without generation ahead: end the run before an update if rollout_corr/kl is above this, "
        "in nats per token, since the engine then cannot have the actor's weights; null: never",
    )
    critic_warmup: int = Field(0, ge=0, description="first steps, in which only the critic is trained")
    balance_batch: bool = Field(
        True,
        description="distribute a mini-batch's rows so that micro-batches have similar numbers of tokens, with "
        "answers to one prompt together where possible",
    )
    val_before_train: bool = Field(
        True, description="validate before the first step, if there is validation data"
    )
    val_only: bool = Field(False, description="validate once and make no step")
    test_freq: int = Field(-1, ge=-1, description="validate every N steps and after the last; 0 or -1: never")
    save_freq: int = Field(
        -1, ge=-1, description="save a checkpoint every N steps and after the last; 0 or -1: never"
    )
    save_best: str = Field(
        "",
        description="a metric of validation: when it is the best so far, a checkpoint is saved, and the "
        "best one is kept; higher is better, except for a loss; empty: none",
    )
    max_actor_ckpt_to_keep: int | None = Field(
        None, gt=0, description="checkpoints to keep; older ones are deleted; null: keep all"
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        "auto",
        description="auto: resume from the run directory's latest checkpoint, if any; disable: start a new "
        "run; resume_path: resume from resume_from_path. The last two decide once for a run directory; later "
        "starts resume from its latest checkpoint",
    )
    resume_from_path: LocalPath | None = Field(
        None, description="resume_path: a global_step_<n> directory, which the run never deletes"
    )
    logger: list[Logger] = Field(
        ["console", "file"], description="outputs of step metrics; metrics.jsonl (file) is always written"
    )
    rollout_data_dir: LocalPath | None = Field(
        None, description="directory for one JSONL file of responses per training step; null: none"
    )
    validation_data_dir: LocalPath | None = Field(
        None, description="directory for one JSONL file of responses per validation; null: none"
    )
    log_val_generations: int = Field(3, ge=0, description="number of validation answers shown at the end")
    profile_steps: tuple[PositiveInt, ...] = Field(
        (),
        description="steps to profile, e.g. [2, 5]: profile/step_<n> gets a timeline and a trace of each role",
    )
    n_gpus_per_node: int | None = Field(
        None,
        gt=0,
        description="verl's name: with nnodes the default of placement.ranks for each group with a model on a "
        "device, except one of the rollout alone; null: 1",
    )
    nnodes: int = Field(1, gt=0, description="verl's name: machines with n_gpus_per_node GPUs each")
    deterministic: bool = Field(
        False,
        description="on a GPU, every kernel of a role adds in one order, so that a call has the same bits "
        "twice; slower. A kernel that cannot is an error that names it. Not for vLLM and openai",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is a GPU, else cpu")
    rpc_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="deadline of every call to a role, in seconds; time behind the run's earlier calls to the "
        "role does not count as long as they are answered",
    )
    weight_sync_timeout_s: float = Field(
        300.0,
        gt=0,
        description="time for a rollout to load new weights, in seconds; a slower replica gets no work until "
        "it has "
        "them",
    )
    progress_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="time without progress on its device, in seconds, after which a role is no longer live; "
        "progress is a micro-batch, or a token of each row of engine hf",
    )
    ready_timeout_s: float = Field(600.0, gt=0, description="time for every role to become ready, in seconds")

    @property
    def world_size(self) -> int | None:
        """verl's world size: n_gpus_per_node times nnodes; None if the job does not set them."""
        return None if self.n_gpus_per_node is None else self.n_gpus_per_node * self.nnodes

    @model_validator(mode="after")
    def _name_is_a_folder(self) -> "TrainerConfig":
        name = self.experiment_name
        if not self.default_local_dir and (name.startswith("~") or {"", ".", ".."} & {*name.split("/")}):
            raise ValueError(
                f"experiment_name is {name!r:.200}, but outputs/<experiment_name> is the run directory; use a "
                "name that does not begin with ~ or / and has no part . or .., or set default_local_dir"
            )
        return self

    @model_validator(mode="after")
    def _nodes_have_gpus(self) -> "TrainerConfig":
        if self.nnodes > 1 and self.n_gpus_per_node is None:
            raise ValueError(
                f"nnodes is {self.nnodes}, but n_gpus_per_node is not set; set both, or placement.ranks instead"
            )
        return self
