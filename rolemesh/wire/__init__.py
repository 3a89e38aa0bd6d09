"""The wire format: encode a DataProto as bytes and decode it again (docs/wire.md).

codec.py          encodes a batch as a header and a region of bytes, and decodes it; files of one batch
header.py         parses a header and enforces the limits of limits.py; frame.py splits messages into fields
layouts.py        packs a tensor into the region: dense, as spans, as counts; dtypes.py lists the element types
arrow_columns.py  columns of Python objects as Arrow; helpers in ndarrays.py, json_text.py and flatbuffer.py
streams.py        sends and receives batches as streams of frames; carrier.py moves the bytes
allocator.py      memory of batches as they arrive; limits.py bounds it
"""
