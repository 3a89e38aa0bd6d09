"""AdamW with warm-up and gradient clipping, and a state of named tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rolemesh.config.model import OptimConfig
from rolemesh.errors import InvalidConfig, UpdateFailed
from rolemesh.metrics import NONFINITE_GRADIENTS

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def num_warmup_steps(config: OptimConfig, num_steps: int | None, role: str) -> int:
    """Optimizer steps over which the learning rate rises.

    Args:
        config: lr_warmup_steps, or where that is -1 the share lr_warmup_steps_ratio of num_steps.
        num_steps: optimizer steps of the whole job; None where trainer.total_training_steps is not set.
        role: for the message.

    Raises:
        InvalidConfig: a share of an unknown number.
    """
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    if config.lr_warmup_steps_ratio == 0:
        return 0
    if num_steps is None:
        raise InvalidConfig(
            f"{role}.optim.lr_warmup_steps_ratio is a share of all steps, and trainer.total_training_steps is "
            f"not set; set it, or {role}.optim.lr_warmup_steps"
        )
    return int(config.lr_warmup_steps_ratio * num_steps)


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over a model's parameters.

    Args:
        model: float32 parameters; those without requires_grad are left alone.
        config: learning rate, decay rates.
        grad_clip: largest norm of the whole gradient.
        warmup_steps: step k of the first `warmup_steps` runs at lr·k/warmup_steps, k from 1; then lr.
        role: for the message.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, grad_clip: float, warmup_steps: int, role: str
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.config, self.grad_clip, self.warmup_steps, self.role = config, grad_clip, warmup_steps, role
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
        return self.config.lr * min(1.0, (self.num_updates + 1) / max(1, self.warmup_steps))

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
