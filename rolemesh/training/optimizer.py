"""AdamW with a learning-rate schedule, gradient clipping, and a state of named tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rolemesh.algos.learning_rate import learning_rate
from rolemesh.config.model import OptimConfig
from rolemesh.errors import InvalidConfig, UpdateFailed
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharded_files import TensorFiles
from rolemesh.ranks.sharding import clip, gradient_norm, local
from rolemesh.telemetry.metrics import NONFINITE_GRADIENTS
from rolemesh.workers.offloading import Offloader

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over a model's parameters.

    Args:
        model: its parameters are float32; those without requires_grad are not trained.
        config: learning-rate schedule, betas, eps and weight decay.
        grad_clip: maximum norm of the whole gradient.
        num_training_steps: of the whole job; None: not known yet.
        updates_per_step: optimizer steps in a training step, which share one learning rate.
        role: for messages and metrics.
        ranks: over which the model is sharded.
        offloader_of: takes a function that lists the state's tensors, and returns their Offloader, which
            moves them off the device. They come back when they are needed. None: they stay on the device.
        offload: whether the state leaves the device after each step.

    Attributes:
        num_training_steps: as above. It is set when a run begins.
        num_updates: steps made.
        offloader: of the state; None: it stays on the device.
        is_untouched: True while model and state are as before the first update: no step was begun, not even
            one that failed, and no checkpoint was loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        *,
        grad_clip: float,
        num_training_steps: int | None = None,
        updates_per_step: int = 1,
        role: str,
        ranks: Ranks | None = None,
        offloader_of: Callable[..., Offloader] | None = None,
        offload: bool = False,
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sharded = [local(parameter) is not parameter for parameter in self.parameters.values()]
        assert ranks is None or ranks.size == 1 or all(sharded), "some weights are gathered: reshard the Root"
        self.config = config
        self.grad_clip = grad_clip
        self.role = role
        self.num_training_steps = num_training_steps
        self.updates_per_step = updates_per_step
        self.num_updates = 0
        self.is_untouched = True
        self._ranks = ranks or Ranks.alone()
        self._offload = offload
        self.offloader = offloader_of(self.tensors) if offloader_of else None
        self._nonfinite = NONFINITE_GRADIENTS.labels(role)
        self._adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next step. It depends on num_updates alone.

        Raises:
            InvalidConfig: it depends on num_training_steps, which is not known.
        """
        if self.num_training_steps is None and (key := self.config.depends_on_total):
            raise InvalidConfig(
                f"{self.role}.optim.{key} is {getattr(self.config, key)}, which depends on the number of "
                "steps, and no controller has said it; set trainer.total_training_steps, or give "
                "num_training_steps to load_checkpoint"
            )
        step = self.num_updates // self.updates_per_step
        return learning_rate(step, self.config, self.num_training_steps)

    def step(self) -> float:
        """Make one optimizer step with the accumulated gradients, and clear them.

        Returns:
            The gradient's norm before clipping.

        Raises:
            UpdateFailed: the norm is not finite. The weights are unchanged.
        """
        norm = float(self._clip())
        if not math.isfinite(norm):
            self._adamw.zero_grad()
            self._nonfinite.inc()
            raise UpdateFailed(
                f"{self.role}.update: the gradient's norm is {norm} at optimizer step {self.num_updates + 1}; "
                "the step was skipped. Try a smaller learning rate, or check the rewards and advantages"
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._count_changes()
        with self.on_device():
            try:
                self._adamw.step()
            except BaseException:
                if not self.num_updates:  # it was allocating the state, perhaps for some of the parameters
                    self._adamw.state.clear()
                raise
        self._adamw.zero_grad()
        self.num_updates += 1
        return norm

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the state on the device within the context. It stays there afterwards, unless offloaded."""
        if self.offloader is not None:
            self.offloader.reload()
        try:
            yield
        finally:
            if self.offloader is not None and self._offload:
                self.offloader.offload()

    def _count_changes(self) -> None:
        """Count a write in the versions of weights and state. The Offloader finds changes by these versions.

        Torch counts no write to a DTensor in the version of its local part. Frozen weights are not counted.
        """
        self.is_untouched = False
        increment_version([*map(local, self.parameters.values()), *self.tensors()])

    def _clip(self) -> Tensor:
        """Clip the gradients, and return their norm before that."""
        if self._ranks.size == 1:
            return nn.utils.clip_grad_norm_(self.parameters.values(), self.grad_clip)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = gradient_norm(gradients, self._ranks)
        clip(gradients, norm, self.grad_clip)
        return norm

    def tensors(self) -> list[Tensor]:
        """Return the state's tensors themselves, not copies; of a sharded one, this rank's part. There are none
        before the first step."""
        return [local(moment) for state in self._adamw.state.values() for moment in state.values()]

    def state_tensors(self) -> dict[str, Tensor]:
        """Map `<parameter>.<moment>` to its tensor, whole or sharded; empty before the first step.

        Read the tensors within `on_device`.
        """
        return {
            f"{name}.{moment}": self._adamw.state[parameter][moment].detach()
            for name, parameter in self.parameters.items()
            if parameter in self._adamw.state
            for moment in MOMENTS
        }

    def read_state(self, file: Path) -> dict[str, Tensor]:
        """Read this rank's rows of the state_tensors that a file has.

        Raises:
            ModelNotFound: the file is absent or damaged.
            ValueError: the tensors belong to another model.
        """
        files = TensorFiles([file])
        rows = {}
        owners = self._owners(files.names)
        for name in files.names:
            like = torch.zeros(()) if name.endswith(".step") else self.parameters[owners[name]]
            if files.shape(name) != like.shape:
                raise ValueError(
                    f"the optimizer's moments of {owners[name]!r} differ in shape from the parameter"
                )
            rows[name] = files.rows(name, like)
        return rows

    def load_state_tensors(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Restore the state from what read_state returned.

        Raises:
            ValueError: the tensors belong to another model. The state is unchanged.
        """
        names = set(self._owners(tensors).values())
        self._count_changes()
        with self.on_device():
            self._set_state(names, tensors)
        self.num_updates = num_updates

    def _set_state(self, names: Collection[str], tensors: Mapping[str, Tensor]) -> None:
        self._adamw.state.clear()
        for name in names:
            parameter = self.parameters[name]
            state = self._adamw.state[parameter] = {}
            for moment in MOMENTS:
                rows = tensors[f"{name}.{moment}"]
                # a copy: a fused step must not write to tensors that are memory-mapped from a file
                with torch.no_grad():
                    like = parameter if rows.dim() else torch.zeros((), device=parameter.device)
                    state[moment] = torch.empty_like(like)
                    local(state[moment]).copy_(rows)

    def _owners(self, tensors: Collection[str]) -> dict[str, str]:
        """Map each tensor of a state to the parameter to which it belongs."""
        owners = {name: name.rpartition(".")[0] for name in tensors}
        names = set(owners.values())
        expected = {f"{name}.{moment}" for name in names for moment in MOMENTS}
        if not names <= self.parameters.keys() or set(tensors) != expected:
            raise ValueError(f"the optimizer's state is of other parameters, e.g. {sorted(names)[:1]}")
        return owners
