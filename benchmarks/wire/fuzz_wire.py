"""Changed batches, each with a budget of time and of memory.

    python -m benchmarks.wire.fuzz_wire [--seconds N] [--seed S]

Takes valid batches apart along their structure (header fields, specs, spans, Arrow's description and body,
texts, frames), changes some of it and receives what comes of it. An input is to be read, and then to be sent
again, or to be refused with InvalidBatch. It has CPU_S of CPU time, and of memory four times its bytes and what
a batch may unpack to (docs/wire.md). Anything else ends the run with a traceback that names input and seed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.v1.frame_pb2 import FrameHeader
from rolemesh.wire import limits
from rolemesh.wire.codec import dump, encode
from rolemesh.wire.frame import join_frame
from rolemesh.wire.streams import receive

CPU_S = 1.0
SLACK_BYTES = 32 << 20  # Python, Arrow and torch take memory by the piece
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    63,
    64,
    255,
    256,
    1 << 16,
    (1 << 31) - 1,
    1 << 32,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
TEXTS = (
    "",
    "{}",
    "[]",
    "null",
    '{"a":1e999}',
    '{"a":"\\ud800"}',
    "[" * 999,
    '"' * 99,
    "{" + '"a":{' * 99,
    "x" * 999,
)


def batches() -> list[DataProto]:
    """Every layout, every encoding."""
    mask = torch.arange(96) < torch.tensor([[5], [9], [0], [96]])
    everything = DataProto.from_dict(
        {
            "mask": mask,
            "positions": (mask.cumsum(1) - 1).clamp(min=0),
            "ragged": torch.randn(4, 96, generator=torch.Generator().manual_seed(0)).where(mask, 0.0),
            "constant": torch.ones(4, 7),
            "narrow": torch.arange(4) * 1000,
            "wide": torch.arange(4 * 700).reshape(4, 700) % 3,
            "cube": mask[:, None].expand(4, 3, 96).long() * 70_000,
            "flags": torch.tensor([True, False, False, True]),
        },
        {
            "uid": list("abcd"),
            "n": [1, 2, 3, 4],
            "some": [None, "x", None, "y"],
            "chat": [[], {"k": 1}, None, 2.5],
            "raw": [b"x", None, b"", b"y"],
            "half": np.arange(4, dtype=np.float16),
        },
        {"step": 1, "names": ["a", {"b": None}]},
    )
    many = DataProto.from_dict(
        {"row": torch.arange(3000)},
        {"c": [{"i": i} for i in range(3000)], "t": ["ü" * (i % 9) for i in range(3000)]},
    )
    return [everything, many, DataProto(meta_info={"a": [1]}), everything[:0]]


class Fuzzer:
    """Makes the same inputs for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._encoded = [encode(batch) for batch in batches()]

    def messages(self) -> list[bytes]:
        """One input: the messages of a stream."""
        chosen = self.random.choice(self._encoded)
        header = FrameHeader.FromString(chosen.header)
        region = bytearray(b"".join(chosen.buffers))
        changes: list[Callable[[FrameHeader, bytearray], None]] = [
            self._change_header, self._change_spec, self._change_span, self._change_numbers, self._flip,
            self._change_arrow, self._resize,
        ]  # fmt: skip
        for _ in range(self.random.randint(1, 3)):
            self.random.choice(changes)(header, region)
        data = header.SerializeToString()
        if self.random.random() < 0.2:
            data = self._cut(data)
        return self._frames(data, bytes(region))

    def _number(self) -> int:
        return self.random.choice(NUMBERS) if self.random.random() < 0.7 else self.random.randrange(1 << 16)

    def _change_header(self, header: FrameHeader, region: bytearray) -> None:
        change = self.random.randrange(6)
        if change == 0:
            header.num_rows = self._number()
        elif change == 1:
            header.region_bytes = self._number()
        elif change == 2:
            header.meta_json = self.random.choice(TEXTS)
        elif change == 3 and header.tensors:
            header.tensors.extend(
                [self.random.choice(header.tensors)] * self.random.choice((1, 100, 300, 3000))
            )
        elif change == 4:
            header.spans.extend(list(header.spans) * self.random.choice((1, 100, 1000)))
        else:
            header.MergeFromString(b"\x38\x01" * self.random.choice((1, 30, 40, 9000)))  # field 7, unknown

    def _change_spec(self, header: FrameHeader, region: bytearray) -> None:
        if not header.tensors:
            return
        spec: Any = self.random.choice(header.tensors)
        change = self.random.randrange(8)
        if change == 0:
            spec.name = self.random.choice((*TEXTS, "mask", "n" * 5000))
        elif change == 1:
            spec.dtype = self.random.randrange(18)
        elif change == 2:
            spec.wire_dtype = self.random.randrange(18)
        elif change == 3:
            spec.layout = self.random.randrange(7)
        elif change == 4:
            spec.shape[self.random.randrange(len(spec.shape))] = self._number()
        elif change == 5:
            spec.shape.extend([self._number()] * self.random.choice((1, 20, 5000)))
        elif change == 6:
            spec.span_index = self._number() & 0xFFFFFFFF
        else:
            spec.fill = self.random.randbytes(self.random.choice((0, 1, 2, 4, 8, 9)))

    def _change_span(self, header: FrameHeader, region: bytearray) -> None:
        """Where something lies."""
        spans = [header.columns, *header.spans, *(spec.data for spec in header.tensors)]
        setattr(self.random.choice(spans), self.random.choice(("offset", "num_bytes")), self._number())

    def _change_numbers(self, header: FrameHeader, region: bytearray) -> None:
        """Where the rows' spans begin, and their lengths."""
        if not header.spans:
            return
        span = self.random.choice(header.spans)
        at = span.offset + 4 * self.random.randrange(max(1, span.num_bytes // 4))
        if at + 4 <= len(region):
            region[at : at + 4] = (self._number() & 0xFFFFFFFF).to_bytes(4, "little")

    def _flip(self, header: FrameHeader, region: bytearray) -> None:
        for _ in range(self.random.randint(1, 8)):
            if region:
                region[self.random.randrange(len(region))] ^= 1 << self.random.randrange(8)

    def _change_arrow(self, header: FrameHeader, region: bytearray) -> None:
        """A number of the description, where sizes, offsets and lengths are, or a piece of the rest."""
        start = header.columns.offset
        end = header.columns.offset + min(header.columns.num_bytes, 4096)
        if end > len(region) or end - start < 64:
            return
        for _ in range(self.random.randint(1, 4)):
            size = self.random.choice((1, 2, 4, 8))
            at = start + self.random.randrange((end - start) // size) * size
            if self.random.random() < 0.5:
                region[at : at + size] = (self._number() & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            else:
                other = start + self.random.randrange((end - start) // size) * size
                region[at : at + size] = region[other : other + size]

    def _resize(self, header: FrameHeader, region: bytearray) -> None:
        if self.random.random() < 0.5:
            del region[self.random.randrange(len(region) + 1) :]
        else:
            region += bytes(self.random.choice((1, 64, 1 << 20)))
        if self.random.random() < 0.7:
            header.region_bytes = len(region)

    def _cut(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randrange(len(changed) + 1)
            changed[at : at + self.random.randrange(4)] = self.random.randbytes(self.random.randrange(4))
        return bytes(changed)

    def _frames(self, header: bytes, region: bytes) -> list[bytes]:
        size = self.random.choice((len(region) or 1, 1 << 12, 64 if len(region) < 1 << 14 else 1 << 14))
        parts = [region[at : at + size] for at in range(0, len(region), size)] or [b""]
        frames = [join_frame(None, [part], len(part)) for part in parts]
        frames[0] = join_frame(header, [parts[0]], len(parts[0]))
        if self.random.random() < 0.1:
            frames.insert(self.random.randrange(len(frames) + 1), self.random.choice(frames))
        if self.random.random() < 0.1:
            frames[0] += b"\x10\x01" * self.random.choice((1, 29, 40, 100_000))
        return frames


class Overdrawn(Exception):
    """An input took more than its budget."""


async def check(messages: list[bytes]) -> bool:
    """Whether the stream is a batch.

    Raises:
        Overdrawn: it took more time or memory than it may.
    """

    async def stream() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    num_bytes = sum(map(len, messages))
    before = _begin_peak()
    begun = time.process_time()
    batch: DataProto | None = None
    with contextlib.suppress(InvalidBatch):
        batch = await receive(stream())
    cpu_s = time.process_time() - begun
    rise = _memory("VmHWM") - before
    budget = 4 * num_bytes + limits.FREE_EXPANSION + limits.MAX_EXPANSION * num_bytes * (batch is not None)
    if cpu_s > CPU_S or rise > budget + SLACK_BYTES:
        raise Overdrawn(f"{num_bytes} bytes took {cpu_s:.2f} s and {rise >> 20} MiB, of {budget >> 20} MiB")
    if batch is None:
        return False
    if sum(tensor.nbytes for tensor in batch.tensors.values()) < 1 << 20:
        repr(batch)
        dump(batch)  # whatever was read is a whole batch
    return True


def _begin_peak() -> int:
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(key: str) -> int:
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) << 10


def run(seed: int, most: int, seconds: float) -> tuple[int, int]:
    """Checks inputs of the seed until there are `most`, or the time is over.

    Returns:
        how many were checked, and how many of them were batches.

    Raises:
        Exception: what an input caused; its note says which.
    """
    asyncio.run(check(Fuzzer(seed).messages()))  # whatever is loaded on first use
    fuzzer = Fuzzer(seed)
    end = time.monotonic() + seconds
    accepted = 0
    for number in range(most):
        messages = fuzzer.messages()
        try:
            accepted += asyncio.run(check(messages))
        except Exception as error:
            error.add_note(f"input {number} of seed {seed}")
            raise
        if time.monotonic() > end:
            return number + 1, accepted
    return most, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    checked, accepted = run(arguments.seed, 1 << 62, arguments.seconds)
    print(f"{checked} inputs of seed {arguments.seed}, {accepted} of them batches: all within their budgets")


if __name__ == "__main__":
    main()
