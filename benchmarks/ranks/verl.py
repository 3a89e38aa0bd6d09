"""verl's scheme, as a contestant: rows in equal numbers for each rank, padded, and a mean for each rank.

This is its FSDP actor's update (`dp_actor.update_policy` without `use_remove_padding`): the batch is cut in its
order into a part for each rank. Each micro-batch's loss is a mean over its own tokens, divided by the number of
micro-batches, and FSDP takes the mean of the ranks' gradients. So a token in a short micro-batch counts more
than one in a long one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rolemesh.dataproto import DataProto


class PaddedMeans:
    """A rank of verl's scheme.

    Args:
        model: directory of a causal LM.
        mesh: the ranks.
        micro_batch: rows of a pass.
        lr: AdamW's.
    """

    def __init__(self, model: Path, mesh: DeviceMesh, micro_batch: int, lr: float) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=lr, weight_decay=0.01)
        self._micro_batch = micro_batch

    def update(self, part: DataProto) -> float:
        """Make an optimizer step with this rank's rows; return the gradient's norm."""
        num_passes = -(-len(part) // self._micro_batch)
        for first in range(0, len(part), self._micro_batch):
            rows = part[first : first + self._micro_batch]
            mask = rows["response_mask"]
            ratio = (self._log_probs(rows) - rows["old_log_probs"]).exp()
            advantages = rows["advantages"]
            losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
            torch.autograd.backward((losses * mask).sum() / mask.sum() / num_passes)
        norm: Any = nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _log_probs(self, rows: DataProto) -> Tensor:
        width = rows["response_mask"].shape[1]
        given = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = self._model(**given, use_cache=False, logits_to_keep=width + 1).logits[:, :-1]
        drawn = rows["input_ids"][:, -width:, None]
        return logits.log_softmax(-1).gather(-1, drawn)[..., 0]  # type: ignore[no-any-return]
