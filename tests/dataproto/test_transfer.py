"""Tensors that go to a device at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.dataproto.transfer import on_device


@dataclass(frozen=True)
class Layout:
    places: Tensor
    width: int
    more: Any = None


def value() -> tuple[Any, ...]:
    """Every kind of element, of sizes that fit in no alignment; views, and tensors without an element."""
    return (
        torch.arange(5, dtype=torch.int32),
        None,
        {"mask": torch.tensor([[True], [False], [True]]), "name": "a"},
        Layout(torch.arange(6.0).view(2, 3).t(), 7, (torch.tensor(2.5, dtype=torch.bfloat16),)),
        torch.zeros(3, 0),
        torch.arange(10, dtype=torch.float64)[1::3],
        Layout,
    )


def test_on_its_own_device_a_value_stays_the_same_tensors() -> None:
    given = value()
    moved = on_device(given, torch.device("cpu"))
    assert moved[0] is given[0]
    assert moved[3].places is given[3].places
    batch = DataProto({"a": given[0]}, meta_info={"step": 3})
    assert batch.to("cpu")["a"] is given[0]
    assert batch.to("cpu").meta_info == {"step": 3}


def test_tensors_move_and_what_is_none_stays() -> None:
    ids, none, columns, layout, empty, strided, kind = on_device(value(), torch.device("meta"))
    assert {t.device.type for t in (ids, columns["mask"], layout.places, *layout.more, empty, strided)} == {
        "meta"
    }
    assert (none, columns["name"], layout.width, kind) == (None, "a", 7, Layout)
    assert layout.places.shape == (3, 2)


@pytest.mark.gpu
def test_one_copy_takes_all_tensors_to_a_gpu_bit_for_bit() -> None:
    cuda, given = torch.device("cuda"), value()
    there = torch.arange(3, device=cuda)
    on_device((*given, there), cuda)  # the first one pins memory
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        moved = on_device((*given, there), cuda)
        torch.cuda.synchronize()
    copies = [event for event in profiled.events() if event.name.startswith("Memcpy HtoD")]
    assert [event.name for event in copies] == ["Memcpy HtoD (Pinned -> Device)"]
    assert moved[-1] is there
    ids, _, columns, layout, empty, strided, _ = moved[:-1]
    for mine, theirs in (
        (ids, given[0]),
        (columns["mask"], given[2]["mask"]),
        (layout.places, given[3].places),
        (layout.more[0], given[3].more[0]),
        (empty, given[4]),
        (strided, given[5]),
    ):
        assert mine.device.type == "cuda"
        assert torch.equal(mine.cpu(), theirs)
