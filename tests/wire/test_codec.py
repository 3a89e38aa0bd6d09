"""The codec: what goes in comes out, bit for bit, and in few bytes."""

from __future__ import annotations

import math
import re
import struct

import numpy as np
import pytest
import torch
from wire_batches import DTYPES, assert_same, layout, octets, ppo_batch, specs

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.v1 import data_pb2
from rolemesh.v1.frame_pb2 import Frame, FrameHeader
from rolemesh.wire.codec import decode, dump, encode, load
from rolemesh.wire.ndarrays import to_cells

# ------------------------------------------------------------------------------ every tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 5), (2, 3, 4), (0,), (0, 4), (3, 0), (2, 0, 3), (1, 1, 1, 1)])
def test_every_dtype_and_shape_survives(dtype: torch.dtype, shape: tuple[int, ...]):
    count = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(1)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    batch = DataProto({"x": raw.view(dtype).reshape(shape)})
    assert_same(load(dump(batch)), batch)


def test_nan_payloads_and_negative_zero_survive():
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0, 0x7F800000, -1], dtype=torch.int64)
    column = bits.to(torch.int32).view(torch.float32)
    batch = DataProto({"x": column, "zeros": torch.tensor([0.0, -0.0, 0.0, 0.0, 0.0, 0.0])})
    assert_same(load(dump(batch)), batch)


def test_non_contiguous_tensors_arrive_row_major():
    base = torch.arange(24).reshape(4, 6)
    batch = DataProto({"t": base.t()[:4], "step": base[:, ::2], "wide": base[:, :1].expand(4, 5)})
    assert_same(load(dump(batch)), batch)


def test_received_tensors_are_writable_and_share_no_element():
    batch = DataProto({"a": torch.randn(4, 4), "b": torch.randn(4, 4), "zeros": torch.zeros(4, 4)})
    back = load(dump(batch))
    back["a"].fill_(7)
    back["zeros"][0, 0] = 1
    assert octets(back["b"]) == octets(batch["b"])
    assert back["zeros"].sum() == 1


def test_a_tensor_that_has_no_place_on_the_wire_is_named():
    for tensor in (
        torch.zeros(1, dtype=torch.complex64),
        torch.zeros(1, 2).to_sparse(),
        torch.zeros(1, device="meta"),
    ):
        with pytest.raises(InvalidBatch, match="'x'"):
            dump(DataProto({"x": tensor}))


def test_tensors_that_need_gradients_travel_as_values():
    batch = DataProto({"x": torch.randn(2, 2, requires_grad=True)})
    back = load(dump(batch))["x"]
    assert not back.requires_grad
    assert torch.equal(back, batch["x"].detach())


def test_a_batch_without_columns_or_rows_survives():
    for batch in (
        DataProto(),
        DataProto(meta_info={"step": 1}),
        DataProto.from_dict({"x": torch.zeros(0, 3)}, {"c": []}),
        DataProto.from_dict(non_tensors={"c": ["a"]}),
    ):
        assert_same(load(dump(batch)), batch)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", ">i4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2), (3, 0), (0, 5), (1, 1, 1, 1)])
def test_a_multi_axis_numpy_column_keeps_dtype_shape_and_bits(dtype: str, shape: tuple[int, ...]):
    cells = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    batch = DataProto.from_dict({}, {"c": cells, "text": ["x"] * shape[0]})
    back = load(dump(batch))["c"]
    assert (back.dtype, back.shape) == (cells.dtype.newbyteorder("="), shape)
    assert np.array_equal(back, cells)
    assert back.flags.writeable


@pytest.mark.parametrize("cells", [np.array([[b"ab"]]), np.zeros((1,) * 9)])
def test_a_numpy_column_of_text_or_of_nine_axes_cannot_be_sent(cells: np.ndarray):
    with pytest.raises(InvalidBatch, match=f"column 'c' of dtype .* and shape {re.escape(str(cells.shape))}"):
        to_cells("c", cells)


def test_a_batch_of_rows_without_columns_keeps_their_number():
    assert len(load(dump(DataProto(num_rows=7, meta_info={"step": 1})))) == 7
    with pytest.raises(InvalidBatch, match="rows of no columns"):
        dump(DataProto(num_rows=1 << 40))


# -------------------------------------------------------------------------------- few bytes


def test_a_ppo_batch_39_percent_full_takes_a_fifth_of_its_bytes():
    batch = ppo_batch()
    filled = batch["attention_mask"].float().mean().item()
    assert filled == pytest.approx(0.39, abs=0.03)
    padded = sum(tensor.nbytes for tensor in batch.tensors.values())
    assert padded / encode(batch).region_bytes > 5
    assert {name: layout(batch, name) for name in batch.columns} == {
        "input_ids": "RAGGED",
        "attention_mask": "MASK",
        "position_ids": "POSITIONS",
        "response_mask": "MASK",
        "old_log_probs": "RAGGED",
        "advantages": "RAGGED",
    }
    assert_same(load(dump(batch)), batch)


def test_columns_that_share_a_mask_share_its_spans():
    header = FrameHeader.FromString(encode(ppo_batch()).header)
    assert len(header.spans) == 2  # attention_mask and response_mask
    assert [span.num_bytes for span in header.spans] == [64 * 8, 64 * 8]


def test_padding_is_found_without_a_mask_on_either_side():
    row = torch.tensor([0] * 20 + [3, 0, 5] + [0] * 20)
    batch = DataProto({"x": torch.stack([row, row.flip(0), row.roll(7), torch.zeros_like(row)])})
    assert layout(batch, "x") == "RAGGED"
    assert specs(batch)["x"].data.num_bytes == 9  # 3 + 3 + 3 + 0 elements of one byte
    assert_same(load(dump(batch)), batch)


def test_a_score_on_the_last_token_sends_that_token_only():
    scores = torch.zeros(8, 256)
    mask = torch.zeros(8, 256, dtype=torch.bool)
    for row in range(8):
        mask[row, : 100 + row] = True
        scores[row, 99 + row] = 1.5
    batch = DataProto({"response_mask": mask, "token_level_scores": scores})
    assert specs(batch)["token_level_scores"].data.num_bytes == 8 * 4
    assert_same(load(dump(batch)), batch)


def test_of_three_axes_each_token_has_a_span_of_its_own():
    """256 x 128 tokens with 1 to 20 of 50 places filled, half of the tokens padding."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 21, (256, 128, 1), generator=generator)
    counts[:, 64:] = 0
    ids = torch.randint(0, 150_000, (256, 128, 50), dtype=torch.int32, generator=generator)
    batch = DataProto({"kept_ids": ids.where(torch.arange(50) < counts, -1)})
    assert layout(batch, "kept_ids") == "RAGGED"
    assert encode(batch).region_bytes < 4 * counts.sum() + 8 * 256 * 128 + 64
    assert encode(batch).region_bytes < batch["kept_ids"].nbytes / 6
    assert_same(load(dump(batch)), batch)


def test_spans_of_tokens_are_none_of_rows_that_are_as_wide():
    mask = torch.ones(16, 24, dtype=torch.bool).tril()
    cube = mask.expand(3, 16, 24).long() * 3
    batch = DataProto({"mask": mask[:3], "cube": cube, "masks": mask.expand(3, 16, 24)})
    assert layout(batch, "cube") == "RAGGED"
    assert layout(batch, "masks") == "MASK"
    assert_same(load(dump(batch)), batch)


def test_negative_zero_is_not_padding():
    column = torch.zeros(4, 64)
    column[:, 0] = 1.0
    column[2, 50] = -0.0
    batch = DataProto({"x": column})
    assert layout(batch, "x") == "RAGGED"
    assert specs(batch)["x"].data.num_bytes == (1 + 1 + 51 + 1) * 4
    assert_same(load(dump(batch)), batch)


def test_nan_padding_comes_back_with_its_payload():
    column = torch.full((4, 64), 0x7FC12345, dtype=torch.int32)
    column[:, :5] = torch.arange(5)
    batch = DataProto({"x": column.view(torch.float32)})
    assert layout(batch, "x") == "RAGGED"
    assert_same(load(dump(batch)), batch)


def test_a_mask_with_a_hole_is_not_sent_as_a_span():
    mask = torch.zeros(4, 64, dtype=torch.int64)
    mask[:, 5:20] = 1
    assert layout(DataProto({"m": mask}), "m") == "MASK"
    mask[1, 9] = 0
    batch = DataProto({"m": mask})
    assert layout(batch, "m") == "RAGGED"
    assert_same(load(dump(batch)), batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_of_any_dtype_and_with_empty_rows_survive(dtype: torch.dtype):
    mask = torch.zeros(4, 64)
    mask[0, :] = 1
    mask[1, 60:] = 1
    mask[3, :1] = 1
    batch = DataProto({"m": mask.to(dtype)})
    assert layout(batch, "m") == "MASK"
    assert_same(load(dump(batch)), batch)


def test_positions_that_break_the_rule_in_one_place_are_sent():
    batch = ppo_batch(8)
    positions = batch["position_ids"].clone()
    positions[3, 100] += 1
    batch["position_ids"] = positions
    assert layout(batch, "position_ids") != "POSITIONS"
    assert specs(batch)["position_ids"].wire_dtype == data_pb2.DTYPE_UINT16
    assert_same(load(dump(batch)), batch)


def test_a_constant_is_one_element():
    batch = DataProto({"x": torch.full((8, 9, 10), 2.5), "z": torch.zeros(8, dtype=torch.int64)})
    assert layout(batch, "x") == layout(batch, "z") == "CONSTANT"
    assert encode(batch).region_bytes == 0
    assert_same(load(dump(batch)), batch)


@pytest.mark.parametrize(
    ("low", "high", "wire"),
    [
        (0, 255, "UINT8"),
        (0, 256, "UINT16"),
        (0, 65535, "UINT16"),
        (0, 65536, "INT32"),
        (-1, 5, "INT32"),
        (-(2**31), 2**31 - 1, "INT32"),
        (0, 2**31, "INT64"),
        (-(2**31) - 1, 0, "INT64"),
        (-(2**63), 2**63 - 1, "INT64"),
    ],
)
def test_integers_take_the_narrowest_type_that_holds_them_all(low: int, high: int, wire: str):
    batch = DataProto({"x": torch.tensor([low, high, 1, 2])})
    assert data_pb2.Dtype.Name(specs(batch)["x"].wire_dtype) == f"DTYPE_{wire}"
    assert_same(load(dump(batch)), batch)


def test_a_batch_that_unpacks_to_far_more_is_sent_with_padding():
    batch = DataProto({"x": torch.zeros(1 << 20, 20)})  # 80 MiB of one value
    assert layout(batch, "x") == "DENSE"
    assert_same(load(dump(batch)), batch)


def test_tensors_start_on_64_byte_boundaries():
    batch = DataProto({"a": torch.randn(5), "b": torch.randn(5, 7)})
    header = FrameHeader.FromString(encode(batch).header)
    assert [spec.data.offset % 64 for spec in header.tensors] == [0, 0]
    back = load(dump(batch))
    assert [tensor.data_ptr() % 64 for tensor in back.tensors.values()] == [0, 0]


def test_a_dense_tensor_is_sent_and_read_without_a_copy():
    batch = DataProto({"x": torch.randn(64, 64)})
    encoded = encode(batch)
    (buffer,) = encoded.buffers
    region = bytearray(buffer)
    batch["x"][0, 0] = 42.0
    assert struct.unpack_from("<f", buffer)[0] == 42.0
    back = decode(encoded.header, memoryview(region))["x"]
    struct.pack_into("<f", region, 0, 7.0)
    assert back[0, 0] == 7.0


# -------------------------------------------------------------------------- ordinary protobuf


def test_generated_code_reads_what_is_written_by_hand():
    batch = DataProto.from_dict({"x": torch.randn(4, 4)}, {"c": ["a", "b", "c", "d"]}, {"step": 1})
    frame = Frame.FromString(dump(batch))
    encoded = encode(batch)
    assert frame.header.SerializeToString() == encoded.header
    assert frame.payload == b"".join(encoded.buffers)
    assert [spec.name for spec in frame.header.tensors] == ["x"]


def test_the_hand_written_reader_reads_frames_of_generated_code():
    batch = DataProto.from_dict({"x": torch.randn(4, 4)}, {"c": ["a", "b", "c", "d"]})
    frame = Frame.FromString(dump(batch))
    assert_same(load(frame.SerializeToString()), batch)


def test_fields_of_a_newer_sender_are_skipped():
    batch = DataProto({"x": torch.randn(2)})
    unknown = b"\x10\x96\x01" + b"\x1a\x03abc" + b"\x21" + bytes(8) + b"\x2d" + bytes(4)  # varint, bytes, fixed
    assert_same(load(unknown + dump(batch) + unknown), batch)
