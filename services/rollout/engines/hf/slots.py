"""Calls of engine hf, and the slots of their rows: the state of each row that is being decoded."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleFailed
from rolemesh.services.rollout.engines.hf.group import RowGroup
from rolemesh.services.rollout.engines.sampling import draw_uniforms
from rolemesh.services.rollout.engines.token_rows import num_begun


@dataclass(eq=False)
class GenerateCall:
    """A call of generate.

    Attributes:
        finished: rows that have finished; then None, or an error.
        context: of the caller.
        is_left: the caller is gone.
        num_unfinished: rows that are not in `finished` yet.
        begun: how many response tokens each row has at first.
        prompt_lengths: number of prompt tokens of each row.
        may_go_on: another call may continue a row of this one.
    """

    prompts: DataProto
    sampling: SamplingConfig
    finished: asyncio.Queue[DataProto | BaseException | None] = field(default_factory=asyncio.Queue)
    context: Context = field(default_factory=copy_context)
    is_left: bool = False

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.prompts)
        self.begun: list[int] = num_begun(self.prompts).tolist()
        self.prompt_lengths: list[int] = self.prompts["prompt_mask"].sum(1).tolist()
        self.may_go_on = "turns" in self.prompts

    def prompt_bytes(self, row: int) -> bytes:
        """Return the bytes of a padded prompt, which identify it."""
        ids = self.prompts["prompts"][row]
        mask = self.prompts["prompt_mask"][row]
        return bytes(ids.numpy().tobytes() + mask.numpy().tobytes())


@dataclass(frozen=True, eq=False)
class _Ended:
    """A row that has ended, and is still in its slot."""

    slot: int
    length: int
    group: RowGroup


class Slots:
    """The state of each row that is being decoded, in tensors [slots, ...].

    Attributes:
        prompts, visible: [slots, P] token ids; bool, False on padding.
        responses, uniforms, log_probs: [slots, T] token ids; the row's random numbers; of the sampled tokens.
        kept_ids: [slots, T, K] the tokens that could be sampled.
        owners: call and row of each slot in use.
    """

    def __init__(self, number: int, prompt_width: int, num_tokens: int, pad: int, device: torch.device) -> None:
        self.number = number
        self._num_tokens = num_tokens
        self._pad = pad
        self.prompts = torch.empty(number, prompt_width, dtype=torch.int64, device=device)
        self.visible = torch.empty(number, prompt_width, dtype=torch.bool, device=device)
        self.responses = torch.zeros(number, num_tokens, dtype=torch.int64, device=device)
        self.uniforms = torch.empty(number, num_tokens, dtype=torch.float64, device=device)
        self.log_probs = torch.empty(number, num_tokens, device=device)
        self.kept_ids = torch.empty(number, num_tokens, 0, dtype=torch.int32, device=device)
        self.owners: dict[int, tuple[GenerateCall, int]] = {}
        self._free = list(range(number))[::-1]
        self._ended: list[_Ended] = []
        self._answers: list[tuple[GenerateCall, DataProto]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, call: GenerateCall, row: int) -> int:
        """Give a free slot to a row."""
        slot = self._free.pop()
        self.owners[slot] = call, row
        return slot

    def fill(self, call: GenerateCall, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Copy rows of a call to their slots."""
        device = self.prompts.device
        which = list(rows)
        index = torch.tensor(slots, device=device)
        self.prompts[index] = call.prompts["prompts"][which].to(device)
        self.visible[index] = call.prompts["prompt_mask"][which].to(device=device, dtype=torch.bool)
        uniforms = draw_uniforms(call.prompts["seeds"][which].tolist(), self._num_tokens)
        self.uniforms[index] = uniforms.to(device)
        if call.may_go_on:
            self.responses[index] = call.prompts["responses"][which].to(device)

    def write(self, cells: Tensor, tokens: Tensor, log_probs: Tensor, kept_ids: Tensor) -> None:
        """Write sampled tokens.

        Args:
            cells: [n] where, in [slots, T], flat.
            tokens, log_probs, kept_ids: [n] and [n, K], as sampled.
        """
        self.responses.view(-1).index_copy_(0, cells, tokens)
        self.log_probs.view(-1).index_copy_(0, cells, log_probs)
        if num_kept := kept_ids.shape[1]:
            if self.kept_ids.shape[2] != num_kept:
                self.kept_ids = kept_ids.new_empty(*self.responses.shape, num_kept)
            self.kept_ids.flatten(0, 1)[cells] = kept_ids

    def end(self, slot: int, length: int, group: RowGroup) -> None:
        """Note that a slot's row has ended with `length` tokens."""
        self._ended.append(_Ended(slot, length, group))

    def release(self, slots: Iterable[int]) -> None:
        """Take slots back, once the answers of their rows are made."""
        self._make_answers()
        for slot in slots:
            del self.owners[slot]
            self._free.append(slot)

    def answers(self) -> list[tuple[GenerateCall, DataProto]]:
        """Return the answers of the rows that have ended since the last time, with their calls."""
        self._make_answers()
        answers = self._answers
        self._answers = []
        return answers

    def _make_answers(self) -> None:
        together: dict[tuple[GenerateCall, RowGroup], list[_Ended]] = defaultdict(list)
        for ended in self._ended:
            call, _ = self.owners[ended.slot]
            if not call.is_left:
                together[call, ended.group].append(ended)
        self._ended = []
        for (call, group), rows in together.items():
            self._answers.append((call, self._answer(call, group, rows)))

    def _answer(self, call: GenerateCall, group: RowGroup, rows: Sequence[_Ended]) -> DataProto:
        device = self.responses.device
        tokens = self._num_tokens
        slots = torch.tensor([ended.slot for ended in rows], device=device)
        lengths = torch.tensor([ended.length for ended in rows], device=device)
        t = torch.arange(tokens, device=device)
        mask = (t >= group.begin) & (t < lengths[:, None])
        made = torch.tensor(group.versions, device=device)
        versions = F.pad(made, (group.begin, tokens - group.begin - len(made)))
        columns = {
            "row": torch.tensor([self.owners[ended.slot][1] for ended in rows]),
            "responses": torch.where(mask, self.responses[slots], self._pad),
            "response_mask": mask,
            "rollout_log_probs": torch.where(mask, self.log_probs[slots], 0),
            "weight_versions": torch.where(mask, versions, -1),
        }
        if call.sampling.num_kept:
            columns["kept_ids"] = torch.where(mask[..., None], self.kept_ids[slots], -1)
        columns = {name: column.cpu() for name, column in columns.items()}
        if not columns["rollout_log_probs"].isfinite().all():
            raise RoleFailed(
                "rollout: the model's logits are not finite: its weights have diverged, or are too large for "
                "rollout.dtype"
            )
        return DataProto(columns)
