"""The section trainer: the training loop, checkpoints, logs and timeouts."""

from typing import Literal

from pydantic import PositiveInt, model_validator

from rolemesh.config.base import Config, LocalPath
from rolemesh.config.key_facts import DERIVED, EVERY_ROLE, FREE, REFUSED, WARNED, Key

Logger = Literal["console", "file", "tensorboard", "wandb", "mlflow"]


class TrainerConfig(Config):
    project_name: str = Key("rolemesh", FREE, description="project of the run in wandb and mlflow")
    experiment_name: str = Key("run", FREE, description="name of the run in loggers, metrics and its directory")
    default_local_dir: LocalPath | None = Key(
        None, FREE, description="the run directory; null: outputs/<experiment_name>"
    )
    total_epochs: int = Key(
        1, DERIVED, gt=0, description="passes over the prompts, if total_training_steps is null"
    )
    total_training_steps: int | None = Key(
        None,
        REFUSED,
        read_by=("actor", "critic"),
        gt=0,
        description="number of steps; null: as many as total_epochs gives",
    )
    max_staleness: int = Key(
        1,
        WARNED,
        ge=0,
        description="rollout.mode async: how many steps old the weights that generated a token may be; 0 is "
        "sync",
    )
    max_rollout_kl: float | None = Key(
        0.5,
        FREE,
        gt=0,
        description="without generation ahead: end the run before an update if rollout_corr/kl is above this, "
        "in nats per token, since the engine then cannot have the actor's weights; null: never",
    )
    critic_warmup: int = Key(0, WARNED, ge=0, description="first steps, in which only the critic is trained")
    balance_batch: bool = Key(
        True,
        FREE,
        read_by=("actor", "reference", "critic"),
        description="distribute a mini-batch's rows so that micro-batches have similar numbers of tokens, with "
        "answers to one prompt together where possible",
    )
    val_before_train: bool = Key(
        True, FREE, description="validate before the first step, if there is validation data"
    )
    val_only: bool = Key(False, FREE, description="validate once and make no step")
    test_freq: int = Key(
        -1, FREE, ge=-1, description="validate every N steps and after the last; 0 or -1: never"
    )
    save_freq: int = Key(
        -1, FREE, ge=-1, description="save a checkpoint every N steps and after the last; 0 or -1: never"
    )
    save_best: str = Key(
        "",
        FREE,
        description="a metric of validation: when it is the best so far, a checkpoint is saved, and the "
        "best one is kept; higher is better, except for a loss; empty: none",
    )
    max_actor_ckpt_to_keep: int | None = Key(
        None, FREE, gt=0, description="checkpoints to keep; older ones are deleted; null: keep all"
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = Key(
        "auto",
        FREE,
        read_by=("actor", "critic"),
        description="auto: resume from the run directory's latest checkpoint, if any; disable: start a new "
        "run; resume_path: resume from resume_from_path. The last two decide once for a run directory; later "
        "starts resume from its latest checkpoint",
    )
    resume_from_path: LocalPath | None = Key(
        None,
        FREE,
        read_by=("actor", "critic"),
        description="resume_path: a global_step_<n> directory, which the run never deletes",
    )
    logger: list[Logger] = Key(
        ["console", "file"], FREE, description="outputs of step metrics; metrics.jsonl (file) is always written"
    )
    rollout_data_dir: LocalPath | None = Key(
        None, FREE, description="directory for one JSONL file of responses per training step; null: none"
    )
    validation_data_dir: LocalPath | None = Key(
        None, FREE, description="directory for one JSONL file of responses per validation; null: none"
    )
    log_val_generations: int = Key(3, FREE, ge=0, description="number of validation answers shown at the end")
    profile_steps: tuple[PositiveInt, ...] = Key(
        (),
        FREE,
        read_by=EVERY_ROLE,
        description="steps to profile, e.g. [2, 5]: profile/step_<n> gets a timeline and a trace of each role",
    )
    n_gpus_per_node: int | None = Key(
        None,
        FREE,
        gt=0,
        description="verl's name: with nnodes the default of placement.ranks for each group with a model on a "
        "device, except one of the rollout alone; null: 1",
    )
    nnodes: int = Key(1, FREE, gt=0, description="verl's name: machines with n_gpus_per_node GPUs each")
    deterministic: bool = Key(
        False,
        FREE,
        read_by=EVERY_ROLE,
        description="on a GPU, every kernel of a role adds in one order, so that a call has the same bits "
        "twice; slower. A kernel that cannot is an error that names it. Not for vLLM and openai",
    )
    device: Literal["auto", "cpu", "cuda"] = Key(
        "auto", FREE, description="auto: cuda if there is a GPU, else cpu"
    )
    rpc_timeout_s: float = Key(
        1800.0,
        FREE,
        gt=0,
        description="deadline of every call to a role, in seconds; time behind the run's earlier calls to the "
        "role does not count as long as they are answered",
    )
    weight_sync_timeout_s: float = Key(
        300.0,
        FREE,
        read_by=("rollout",),
        gt=0,
        description="time for a rollout to load new weights, in seconds; a slower replica gets no work until "
        "it has "
        "them",
    )
    progress_timeout_s: float = Key(
        1800.0,
        FREE,
        gt=0,
        description="time without progress on its device, in seconds, after which a role is no longer live; "
        "progress is a micro-batch, or a token of each row of engine hf",
    )
    ready_timeout_s: float = Key(
        600.0, FREE, gt=0, description="time for every role to become ready, in seconds"
    )

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
