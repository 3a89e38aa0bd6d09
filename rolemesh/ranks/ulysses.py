"""Sequence parallelism: several ranks compute the same rows, each a part of their tokens.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Everything but attention works token by token, so a
rank computes it for its part of the tokens. For attention the ranks exchange heads for tokens: each gets all
tokens of its share of the heads. So a sequence may be longer than one device could hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rolemesh.errors import InvalidConfig
from rolemesh.ranks.rank_load import Clock


@dataclass(frozen=True)
class Ulysses:
    """The ranks that compute the same rows, seen from one of them.

    Args:
        rank: of this process among them.
        size: their number.
        group: their process group.
        clock: measures the exchanges.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    clock: Clock = field(default_factory=Clock)

    def part(self, inputs: dict[str, Any], places: Tensor) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Take this rank's part of the tokens of a forward pass.

        Args:
            inputs: of the model's body, as rolemesh.models.packed.layout.pack makes them for N tokens.
            places: [n], some of the N tokens.

        Returns:
            The inputs with the part's tokens alone; the positions in `places` that lie in it, [m]; and their
            index in the part, [m].
        """
        num_tokens = inputs["input_ids"].shape[1]
        width = -(-num_tokens // self.size)  # the last part is padded
        begin = self.rank * width
        own: dict[str, Any] = {
            name: F.pad(inputs[name], (0, self.size * width - num_tokens))[:, begin : begin + width]
            for name in ("input_ids", "position_ids")
        }
        mine = ((places >= begin) & (places < begin + width)).nonzero()[:, 0]
        own["segments"] = replace(inputs["segments"], ulysses=self)
        return inputs | own, mine, places[mine] - begin

    def whole(self, cells: Tensor, mine: Tensor, num_cells: int) -> Tensor:
        """Put together the ranks' numbers [m] for the positions `mine` of [num_cells].

        Every rank gets all numbers. A gradient flows into its own: every rank computes the same loss, and the
        ranks' gradients are added.
        """
        return joined(cells, mine, num_cells, self)

    def to_heads(self, x: Tensor) -> Tensor:
        """Map the part's tokens [N / size, heads, w] to all tokens of a share of heads [N, heads / size, w].

        Keys and values with fewer heads than ranks are repeated first.
        """
        if x.shape[1] % self.size:
            x = x.repeat_interleave(self.size // x.shape[1], 1)
        return exchanged(x, self, 1, 0)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Map [N, heads / size, w] back to [N / size, heads, w]; N is padded first."""
        return exchanged(F.pad(x, (0, 0, 0, 0, 0, -len(x) % self.size)), self, 0, 1)


class Exchange(torch.autograd.Function):
    """Splits axis `split` over the ranks and joins their parts along axis `join`; its gradient: the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ulysses: Ulysses, split: int, join: int) -> Tensor:
        ctx.ulysses = ulysses
        ctx.split = split
        ctx.join = join
        given = torch.stack(x.chunk(ulysses.size, split))
        taken = torch.empty_like(given)
        with ulysses.clock.running(given):
            dist.all_to_all_single(taken, given, group=ulysses.group)
        return torch.cat(taken.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return exchanged(gradient, ctx.ulysses, ctx.join, ctx.split), None, None, None


class Join(torch.autograd.Function):
    """Puts the ranks' numbers in their places. A rank's gradient is that of its own numbers."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, mine: Tensor, num_cells: int, ulysses: Ulysses) -> Tensor:
        ctx.save_for_backward(mine)
        whole = cells.new_zeros(num_cells).index_copy_(0, mine, cells)
        with ulysses.clock.running(whole):
            dist.all_reduce(whole, group=ulysses.group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return gradient.index_select(0, mine), None, None, None


exchanged: Callable[..., Tensor] = Exchange.apply
joined: Callable[..., Tensor] = Join.apply


def check_heads(settings: Any, size: int, key: str) -> None:
    """Check that a model's heads divide among the ranks.

    Args:
        settings: a transformers model's configuration.
        size: number of ranks.
        key: the job's key that sets it.

    Raises:
        InvalidConfig: they do not.
    """
    heads = settings.num_attention_heads
    groups = getattr(settings, "num_key_value_heads", None) or heads
    if heads % size or (groups % size and size % groups):
        raise InvalidConfig(
            f"{key} is {size}, but the model has {heads} attention heads and {groups} heads of keys and "
            f"values, which do not divide among {size} ranks; set it to a divisor of {heads} that divides "
            f"{groups} or is a multiple of it"
        )
