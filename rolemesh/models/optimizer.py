"""AdamW with a schedule and gradient clipping, and a state of named tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rolemesh.algos.learning_rate import learning_rate
from rolemesh.config.model import OptimConfig
from rolemesh.errors import UpdateFailed
from rolemesh.telemetry.metrics import NONFINITE_GRADIENTS

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over a model's parameters.

    Args:
        model: float32 parameters; those without requires_grad are left alone.
        config: the schedule of the learning rate, decay rates.
        grad_clip: largest norm of the whole gradient.
        num_training_steps: of the whole job; None where the schedule does not depend on it.
        updates_per_step: optimizer steps in a training step, which share one learning rate.
        role: for the message.
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
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.config, self.grad_clip, self.role = config, grad_clip, role
        self.num_training_steps, self.updates_per_step = num_training_steps, updates_per_step
        self.num_updates = 0
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
        """The learning rate of the next step: a function of num_updates alone."""
        step = self.num_updates // self.updates_per_step
        return learning_rate(step, self.config, self.num_training_steps)

    def step(self) -> float:
        """One step along the gradients that backward() left; they are cleared.

        Returns:
            The gradient's norm before clipping.

        Raises:
            UpdateFailed: the norm is not finite. The weights are as before the step.
        """
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.grad_clip))
        if not math.isfinite(norm):
            self._adamw.zero_grad()
            self._nonfinite.inc()
            raise UpdateFailed(
                f"{self.role}.update: the gradient's norm is {norm} at optimizer step {self.num_updates + 1}; "
                "the step was not taken. A smaller learning rate, or a look at rewards and advantages, may help"
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self._adamw.zero_grad()
        self.num_updates += 1
        return norm

    def tensors(self) -> list[Tensor]:
        """The state as it is held; empty before the first step."""
        return [moment for state in self._adamw.state.values() for moment in state.values()]

    def state_tensors(self) -> dict[str, Tensor]:
        """`<parameter>.<moment>` to tensor, on the CPU; empty before the first step."""
        return {
            f"{name}.{moment}": self._adamw.state[parameter][moment].detach().cpu().contiguous()
            for name, parameter in self.parameters.items()
            if parameter in self._adamw.state
            for moment in MOMENTS
        }

    def load_state_tensors(self, tensors: dict[str, Tensor], num_updates: int) -> None:
        """Takes up what state_tensors gave.

        Raises:
            ValueError: the tensors belong to another model. Nothing is changed.
        """
        names = {name.rpartition(".")[0] for name in tensors}
        expected = {f"{name}.{moment}" for name in names for moment in MOMENTS}
        if not names <= self.parameters.keys() or tensors.keys() != expected:
            raise ValueError(f"the optimizer's state names other parameters, e.g. {sorted(names)[:1]}")
        for name in names:
            if tensors[f"{name}.exp_avg"].shape != self.parameters[name].shape:
                raise ValueError(f"the optimizer's moments of {name!r} have another shape than the parameter")
        self._adamw.state.clear()
        for name in names:
            parameter = self.parameters[name]
            # copies: a fused step on tensors that a file is mapped to would write where it may not
            self._adamw.state[parameter] = {
                moment: tensors[f"{name}.{moment}"].clone().to(parameter.device) for moment in MOMENTS
            }
        self.num_updates = num_updates
