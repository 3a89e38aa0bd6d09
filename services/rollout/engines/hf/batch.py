"""The rows that are decoded together. They join and leave between two decode steps."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.services.rollout.engines.hf.cached_attention import AttentionPass, Decoding, Reading, Token
from rolemesh.services.rollout.engines.hf.group import RowGroup
from rolemesh.services.rollout.engines.hf.kv_store import KeptRow, KeptRows
from rolemesh.services.rollout.engines.hf.slots import GenerateCall, Slots
from rolemesh.telemetry import metrics
from rolemesh.threads import progress

# Seconds of decode steps before their finished rows are handed over. For a small model, handing rows over takes
# as long as all of a step except the forward pass.
STEPS_S = 0.05
# Rows wait until this share of a full batch is free, because each group of rows that join costs a pass over
# their prompts and an attention of its own.
JOIN_AT = 0.25
# Tokens of continued rows that are read in a step. The other rows wait for them.
READ_TOKENS = 2048


class Model(Protocol):
    """What a batch needs of its engine."""

    model: Any
    called: Any  # the model with the head that the job wants
    device: torch.device
    dtype: torch.dtype
    ends: Tensor
    pad: int
    ignore_eos: bool
    min_rows: int
    max_num_seqs: int
    prompt_width: int
    max_tokens: int
    kept: KeptRows

    @property
    def version(self) -> int: ...
    @property
    def is_waited_for(self) -> bool: ...
    def precision(self) -> torch.autocast: ...
    def sample(
        self, logits: Tensor, uniforms: Tensor, sampling: SamplingConfig
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class _Member:
    """A row that joins, with the kept row that has its first `start` response tokens: `num_kept` in all."""

    slot: int
    call: GenerateCall
    kept: KeptRow | None
    start: int
    num_kept: int


class Batch:
    """Up to max_num_seqs rows, each in a slot of tensors [slots, ...], in groups at the same token.

    `arriving` and `leaving` are filled by the event loop, and everything else belongs to the engine's thread.
    """

    def __init__(self, engine: Model) -> None:
        self._engine = engine
        self._version = engine.version
        widths = engine.prompt_width, engine.max_tokens
        self._slots = Slots(engine.max_num_seqs, *widths, engine.pad, engine.device)
        self.arriving: deque[GenerateCall] = deque()
        self.leaving: deque[GenerateCall] = deque()
        self._waiting: deque[tuple[GenerateCall, int]] = deque()
        self._groups: list[RowGroup] = []

    # --------------------------------------------------------------------------------- steps

    def steps(self) -> list[tuple[GenerateCall, DataProto]]:
        """Decode one token of every row, and more until something waits for the thread, or STEPS_S have passed.

        Returns:
            calls with their finished rows; `row` has the rows' positions in the call's request.
        """
        until = time.monotonic() + STEPS_S
        while True:
            self._leave()
            self._compact()
            if not (self._groups or self._waiting or self.arriving):
                break
            self._step()
            progress()
            if self._engine.is_waited_for or time.monotonic() >= until:
                break
        return self._slots.answers()

    def _step(self) -> None:
        """Decode the next token of every row, and the first one of rows that join."""
        ready: list[RowGroup] = []
        if self._version != self._engine.version:
            self._version = self._engine.version
            ready += self._read_again()
        ready += self._join()
        if going_on := [group for group in self._groups if group not in ready]:
            self._decode(going_on)

    @torch.inference_mode()
    def _decode(self, groups: Sequence[RowGroup]) -> None:
        """Compute keys and values of the tokens that lack them, and sample in groups that then lack none."""
        passed: list[Token] = []
        cells = []
        positions = []
        last = []
        ready = []
        n = 0
        room = READ_TOKENS
        for group in groups:
            for i, rows in group.pending():
                if room <= 0 and i < group.t - 1:
                    break
                room -= rows if i < group.t - 1 else 0
                passed.append(group.token(i, rows))
                cells.append(group.cells(i, rows))
                positions.append(group.positions(i, rows))
                n = n + rows
                group.filled = i + 1
            if group.filled == group.t:
                ready.append(group)
                last.append((n - len(group), n))
        ids = self._filled_up(self._slots.responses.take(_joined(cells)))
        wanted: int | Tensor = 0  # all logits
        if len(ready) < len(passed):
            spans = [torch.arange(begin, end, device=ids.device) for begin, end in last or [(0, 1)]]
            wanted = self._filled_up(_joined(spans))
        logits = self._forward(ids[None], self._filled_up(_joined(positions))[None], Decoding(passed), wanted)
        if ready:
            self._sample(ready, logits[0])

    def _sample(self, groups: Sequence[RowGroup], logits: Tensor) -> None:
        """Sample a token for each row of the groups; the logits' first rows are theirs, in order."""
        cells = _joined([group.cells(group.t) for group in groups])
        uniforms = self._slots.uniforms.take(cells)
        for sampling, rows in _by_sampling(groups):
            drawn = self._engine.sample(logits[rows], uniforms[rows], sampling)
            self._slots.write(cells[rows], *drawn)
        ended: set[int] = set()
        if not self._engine.ignore_eos:
            tokens = self._slots.responses.take(cells)
            ended.update(torch.isin(tokens, self._engine.ends).nonzero()[:, 0].tolist())
        first = 0
        for group in groups:
            group.t += 1
            group.versions.append(self._engine.version)
            if group.t == self._engine.max_tokens:
                self._end(group, range(len(group)))
            elif ended:
                self._end(group, [row for row in range(len(group)) if first + row in ended])
            first += len(group)

    def _forward(self, ids: Tensor, positions: Tensor, reading: AttentionPass, wanted: int | Tensor) -> Tensor:
        """Compute the logits [b, n, V] of the tokens [b, n], or of those that `wanted` names."""
        with self._engine.precision():
            output = self._engine.called(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=wanted,
                reading=reading,
            )
        logits: Tensor = output.logits
        return logits

    def _filled_up(self, index: Tensor) -> Tensor:
        """Return the index with its first entry repeated up to min_rows."""
        missing = self._engine.min_rows - len(index)
        return index if missing <= 0 else torch.cat([index, index[:1].expand(missing)])

    # ------------------------------------------------------------------------------- prompts

    def _read(self, ids: Tensor, visible: Tensor, groups: Sequence[tuple[RowGroup, Tensor]]) -> Tensor:
        """Compute keys and values of whole rows from their beginning.

        Equal rows (responses to one prompt) are computed once, and copied to each.

        Args:
            ids: [b, n].
            visible: [b, n] bool, False on padding.
            groups: which of these rows each group's first rows are.

        Returns:
            the logits [b, V] after the last token.
        """
        num_rows, width = ids.shape
        device = ids.device
        _, which = torch.unique(torch.cat([ids, visible], 1), dim=0, return_inverse=True)
        some = torch.empty_like(which[: int(which.max()) + 1])
        some[which] = torch.arange(num_rows, device=device)
        least = -(-self._engine.min_rows // width)  # number of rows that together have min_rows tokens
        some = torch.cat([some, some[:1].expand(max(0, least - len(some)))])
        targets = [(group.columns, 0, which[rows]) for group, rows in groups]
        positions = (visible[some].cumsum(1) - 1).clamp(min=0)
        wanted = -(-self._engine.min_rows // len(some))
        logits = self._forward(ids[some], positions, Reading(visible[some], targets), wanted)
        return logits[:, -1][which]

    @torch.inference_mode()
    def _read_prompts(self, groups: Sequence[tuple[RowGroup, int]]) -> None:
        """Compute keys and values of the prompts of each group's first rows. Sample the first token where a
        group has none."""
        index = _joined([group.index[:count] for group, count in groups])
        end = 0
        parts = []
        for group, count in groups:
            parts.append((group, torch.arange(end, end + count, device=index.device)))
            end += count
        logits = self._read(self._slots.prompts[index], self._slots.visible[index], parts)
        for group, rows in parts:
            if group.t == 0:
                self._sample([group], logits[rows])

    @torch.inference_mode()
    def _read_again(self) -> list[RowGroup]:
        """Compute all keys and values with new weights, so that a token has the distribution of the version
        that it names, given all tokens before it. Return the groups that have sampled one."""
        ready = []
        for group in self._groups:
            group.forget()
            if group.t == group.begin:
                self._read_prompts([(group, len(group))])
                continue
            ids = torch.cat(
                [self._slots.prompts[group.index], self._slots.responses[group.index, : group.t]], 1
            )
            visible = F.pad(self._slots.visible[group.index], (0, group.t), value=True)
            rows = torch.arange(len(group), device=ids.device)
            logits = self._read(ids, visible, [(group, rows)])
            group.filled = group.t
            group.is_canonical = False
            self._sample([group], logits)
            ready.append(group)
        return ready

    # ------------------------------------------------------------------------- rows come and go

    @torch.inference_mode()
    def _join(self) -> list[RowGroup]:
        """Let waiting rows join, if there is room for all, or for JOIN_AT of a batch. Return the groups that
        have sampled their first token."""
        while self.arriving:
            call = self.arriving.popleft()
            if not call.is_left:  # `_leave` has looked for it among the waiting rows
                self._waiting.extend((call, row) for row in range(len(call.prompts)))
        room = self._slots.num_free
        if not self._waiting or room < min(len(self._waiting), JOIN_AT * self._engine.max_num_seqs):
            return []
        joining: dict[GenerateCall, list[tuple[int, int]]] = defaultdict(list)  # rows and slots
        members: dict[tuple[int, int], list[_Member]] = defaultdict(list)
        for _ in range(min(room, len(self._waiting))):
            call, row = self._waiting.popleft()
            slot = self._slots.take(call, row)
            joining[call].append((row, slot))
            begun = call.begun[row]
            members[begun, id(call.sampling)].append(self._member(call, row, slot))
        for call, places in joining.items():
            self._slots.fill(call, *zip(*places, strict=True))
        self._count(joining, chain.from_iterable(members.values()))
        groups = [
            (self._group_of(rows, begun), sum(each.kept is None for each in rows))
            for (begun, _), rows in members.items()
        ]
        self._groups += [group for group, _ in groups]
        if unread := [(group, count) for group, count in groups if count]:
            self._read_prompts(unread)
        return [group for group, _ in groups if group.t > group.begin]

    def _member(self, call: GenerateCall, row: int, slot: int) -> _Member:
        """Look for the row's keys and values among the kept ones."""
        member = _Member(slot, call, None, 0, 0)
        if begun := call.begun[row]:
            response = call.prompts["responses"][row, :begun].numpy()
            if (found := self._engine.kept.find(call.prompt_bytes(row), response)) is not None:
                # The last token is computed in any case, for its logits.
                start = min(found[1], begun - 1)
                member = _Member(slot, call, found[0], start, call.prompt_lengths[row] + start)
        return member

    def _count(
        self, joining: Mapping[GenerateCall, Sequence[tuple[int, int]]], members: Iterable[_Member]
    ) -> None:
        """Count the tokens before the first new one of rows that join, by where keys and values come from."""
        context = sum(
            call.prompt_lengths[row] + call.begun[row] for call, places in joining.items() for row, _ in places
        )
        kept = sum(each.num_kept for each in members)
        metrics.ROLLOUT_CONTEXT_TOKENS.labels("kept").inc(kept)
        metrics.ROLLOUT_CONTEXT_TOKENS.labels("computed").inc(context - kept)

    def _group_of(self, members: list[_Member], begun: int) -> RowGroup:
        """Make a group, with the keys and values that were kept. Rows without any come first."""
        members.sort(key=lambda each: (each.kept is not None, each.start))
        slots = [each.slot for each in members]
        group = RowGroup(
            slots,
            [each.start for each in members],
            begun,
            visible=self._slots.visible[torch.tensor(slots, device=self._slots.visible.device)],
            num_tokens=self._engine.max_tokens,
            num_layers=self._engine.model.config.get_text_config().num_hidden_layers,
            sampling=members[0].call.sampling,
            dtype=self._engine.dtype,
        )
        for row, each in enumerate(members):
            if each.kept is not None:
                end = self._engine.prompt_width + each.start
                for columns, (keys, values) in zip(group.columns, each.kept.layers, strict=True):
                    columns.write(row, keys[:, :, :end], values[:, :, :end])
        return group

    def _end(self, group: RowGroup, rows: Iterable[int]) -> None:
        """Note that rows of a group have ended with their last token."""
        for row in rows:
            if not group.finish(row):
                continue
            slot = group.slots[row]
            self._slots.end(slot, group.t, group)
            call, at = self._slots.owners[slot]
            if call.may_go_on and group.is_canonical and group.t < self._engine.max_tokens:
                response = self._slots.responses[slot, : group.filled].cpu().numpy().copy()
                end = self._engine.prompt_width + group.filled
                layers = [columns.copy(row, end) for columns in group.columns]
                self._engine.kept.keep(KeptRow(call.prompt_bytes(at), response, layers))

    def _leave(self) -> None:
        """Remove rows whose callers are gone."""
        if not self.leaving:
            return
        self.leaving.clear()
        self._waiting = deque((call, row) for call, row in self._waiting if not call.is_left)
        for group in self._groups:
            for row in group.unfinished:
                if self._slots.owners[group.slots[row]][0].is_left:
                    group.finish(row)

    def _compact(self) -> None:
        """Remove finished rows from groups in which they are many, and free their slots."""
        free = []
        for group in self._groups:
            if group.is_sparse:
                free += group.compact()
        if free:
            self._groups = [group for group in self._groups if len(group)]
            self._slots.release(free)


def _by_sampling(groups: Sequence[RowGroup]) -> Iterator[tuple[SamplingConfig, slice | Tensor]]:
    """Yield each kind of sampling, with the rows of the groups that have it."""
    kinds: dict[int, list[int]] = defaultdict(list)
    first = 0
    for group in groups:
        kinds[id(group.sampling)].extend(range(first, first + len(group)))
        first += len(group)
    if len(kinds) == 1:
        yield groups[0].sampling, slice(first)
        return
    for group in {id(group.sampling): group for group in groups}.values():
        yield group.sampling, torch.tensor(kinds[id(group.sampling)], device=group.index.device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
