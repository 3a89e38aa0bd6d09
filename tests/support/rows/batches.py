"""Batches for the methods of a job, made from the declarations: correct ones, and one for each error."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

import torch
from sequences import sequence_batch
from torch import Tensor

from rolemesh.columns import COLUMNS
from rolemesh.dataproto import DataProto
from rolemesh.methods import Method
from rolemesh.services.rollout.engines.sampling import draw_uniforms
from rolemesh.v1 import frame_pb2
from rolemesh.wire.codec import encode
from rolemesh.wire.frame import join_frame

P, T, K = 6, 10, 4
VOCABULARY = 259  # of the tiny models
# For each integer column used as an index: the lowest valid value, and the lowest value that is too high.
LIMITS = {
    "prompts": (0, VOCABULARY),
    "responses": (0, VOCABULARY),
    "input_ids": (0, VOCABULARY),
    "kept_ids": (-1, VOCABULARY),
    "attention_mask": (0, 2),
    "position_ids": (0, P + T),
}


def correct(method: Method, rows: int, *, prompt: int = P, response: int = T) -> DataProto:
    """Make a batch that the method accepts, for a job with these widths and rollout.top_k K."""
    batch = sequence_batch(rows, prompt=prompt, response=response)
    ids, attended = batch["input_ids"], batch["attention_mask"].bool()
    sampled = batch["response_mask"]
    drawn = ids[:, prompt:, None].int()
    others = (drawn + torch.arange(1, K)) % VOCABULARY
    more = {
        "prompts": ids[:, :prompt],
        "prompt_mask": attended[:, :prompt],
        "responses": ids[:, prompt:],
        "turns": attended[:, prompt:].where(torch.arange(response) < response - 1, False).long(),
        "seeds": torch.arange(rows) * 7919 - 5,
        "kept_ids": torch.where(sampled[..., None], torch.cat([drawn, others], -1), -1).int(),
        "loss_mask": sampled & (torch.arange(response) != 2),
        "rollout_is_weights": draw_uniforms(range(rows), response).float() + 0.5,
    }
    cells = {
        "uid": [f"train-{row:06}" for row in range(rows)],
        "data_source": ["openai/gsm8k"] * rows,
        "reward_model": [{"style": "rule", "ground_truth": "7"}] * rows,
        "extra_info": [{"index": row} for row in range(rows)],
    }
    meta = {key: values[0] for key, values in method.meta.items()}
    return method.prune(DataProto.from_dict({**batch.tensors, **more}, cells, meta))


def with_column(batch: DataProto, name: str, value: Any) -> DataProto:
    """Return the batch with the column replaced or added."""
    changed = DataProto(batch.tensors, batch.non_tensors, dict(batch.meta_info))
    changed[name] = value
    return changed


def without(batch: DataProto, name: str) -> DataProto:
    return batch.select_columns([other for other in batch.columns if other != name])


def wrong_columns(method: Method, batch: DataProto) -> Iterator[tuple[str, str, DataProto]]:
    """Yield each possible error of each column: the column, the error, and the batch."""
    for name in batch.columns:
        ways = _wrong_tensors(name, batch, batch) if COLUMNS[name].dtype else _wrong_cells(name, batch)
        for how, value in ways:
            yield name, how, with_column(batch, name, value)
        if name not in method.optional:
            yield name, "missing", without(batch, name)


def wrong_answers(answer: DataProto, request: DataProto) -> Iterator[tuple[str, str, DataProto]]:
    """Yield each possible error of an answer: the column, the error, and the answer."""
    masked = answer if "response_mask" in answer else request
    for name in answer.columns:
        ways = _wrong_tensors(name, answer, masked) if COLUMNS[name].dtype else _wrong_cells(name, answer)
        for how, value in ways:
            yield name, how, with_column(answer, name, value)
        yield name, "missing", without(answer, name)
    foreign = {"row", "old_log_probs", "ref_log_probs", "advantages", "uid", "foreign"} - set(answer.columns)
    for name in sorted(foreign):
        yield name, "not asked for", with_column(answer, name, torch.zeros(len(answer)))
    yield answer.columns[0], "no columns", DataProto()
    yield "rows", "zero rows", answer[:0]
    yield "meta_info", "meta", DataProto(answer.tensors, answer.non_tensors, {"sampling": "train"})
    if "row" not in answer:
        yield "rows", "a row less", answer[1:]
        yield "rows", "twice", DataProto.concat([answer, answer])
    if "reward_extra_info" in answer:
        no_numbers = (float("nan"), float("inf"), 10**400, -(10**400), 1e39, "0.5", True, [], None, {})
        wrong = [{"fluency": value} for value in no_numbers]
        for cell in wrong + [{"pred": value} for value in (0.5, 7, True, None, ["7"])]:
            cells = [*answer["reward_extra_info"][:-1], cell]
            yield (
                "reward_extra_info",
                f"with {reprlib.repr(cell)}",
                with_column(answer, "reward_extra_info", cells),
            )


def _wrong_tensors(name: str, batch: DataProto, masked: DataProto) -> Iterator[tuple[str, Any]]:
    """Yield wrong tensors. `masked` has the response_mask of the batch's rows."""
    column, tensor, rows = COLUMNS[name], batch[name], len(batch)
    for dtype in (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16):
        if dtype != column.dtype:
            yield str(dtype), tensor.to(dtype)
    if name == "weight_versions":
        yield "-2 in it", torch.full_like(tensor, -2)
    yield "not a number", torch.full(tensor.shape, torch.nan)
    yield "of strings", ["7"] * rows
    yield "of numbers", torch.arange(rows).numpy()
    yield "of lists", [[1, 2]] * rows
    yield "with one axis more", tensor[..., None]
    yield "with one axis of no size", tensor[..., None][..., :0]
    if len(column.axes) > 1:
        yield "narrower", tensor[..., :-1]
        yield "wider", torch.cat([tensor, tensor[..., -1:]], -1)
        yield "flat", tensor.flatten(1)[:, 0]
        yield "without a token", tensor[:, :0]
    if name in LIMITS:
        low, end = LIMITS[name]
        largest = torch.iinfo(column.dtype).max
        for value in (low - 1, end, largest, -largest):
            yield f"{value} in padding", _with(tensor, value, -1, -1)
            yield f"{value} in a token", _with(tensor, value, 0, P - 1)
        if largest > 2**40:
            yield "2**40 in it", _with(tensor, 2**40, -1, -1)
    if column.dtype and column.dtype.is_floating_point:
        where = masked["response_mask"] if column.axes == "BT" else torch.ones_like(tensor).bool()
        for number in (torch.nan, torch.inf, -torch.inf):
            yield f"{number} in it", tensor.masked_fill(where, number)


def _with(tensor: Tensor, value: int, row: int, column: int) -> Tensor:
    """Return the tensor with the value in a cell. The last cell of the last row is padding, if any is."""
    changed = tensor.clone()
    changed[row, column] = value
    return changed


def _wrong_cells(name: str, batch: DataProto) -> Iterator[tuple[str, Any]]:
    rows = len(batch)
    yield "a tensor", torch.zeros(rows, dtype=torch.int64)
    yield "of numbers", torch.arange(rows).numpy()
    yield "with a None", [*batch[name][:-1], None]
    for wrong in (None, 7, 0.5, True, ["7"], b"7", {"7": 7}, "7"):
        if type(wrong) is not COLUMNS[name].cells:
            yield f"of {type(wrong).__name__}", [wrong] * rows


def wrong_wholes(method: Method, batch: DataProto) -> Iterator[tuple[str, DataProto]]:
    """Yield errors of the whole batch: the error, and the batch."""
    yield "no columns", DataProto()
    yield "zero rows", batch[:0]
    yield "no tokens", _narrowed(batch)
    for key in method.meta:
        for value in ([], ["train"], {}, {"train": 1}, None, 1, 0.5, True, "", "test", "x" * 100_000):
            yield f"meta {key} {str(value)[:20]}", DataProto(batch.tensors, batch.non_tensors, {key: value})
        yield f"no meta {key}", DataProto(batch.tensors, batch.non_tensors)


def _narrowed(batch: DataProto) -> DataProto:
    """Return the batch with T = 0, or with P = 0 if the method reads only prompts."""
    lost = "T" if any("T" in COLUMNS[name].axes for name in batch.columns) else "P"
    widths = {lost: 0, "S": P}
    tensors = {
        name: tensor[:, : widths.get(COLUMNS[name].axes[-1], P)] if tensor.dim() > 1 else tensor
        for name, tensor in batch.tensors.items()
    }
    tensors |= {name: batch[name][:, :0] for name in tensors if COLUMNS[name].axes == "BTK"}
    return DataProto(tensors, batch.non_tensors, batch.meta_info)


def of_shape(batch: DataProto, shape: tuple[int, ...]) -> list[bytes]:
    """Encode no row of the batch, in columns of a shape without elements, which `encode` never writes."""
    encoded = encode(batch[:0])
    header = frame_pb2.FrameHeader.FromString(encoded.header)
    for spec in header.tensors:
        spec.shape[:] = shape
    return [join_frame(header.SerializeToString(), encoded.buffers, encoded.region_bytes)]
