"""The wire: DataProto to bytes and back (docs/wire.md).

codec.py      a batch as a header and a region of bytes; files of one batch
header.py     reads a header and holds it against the limits of limits.py; frame.py cuts messages into fields
layouts.py    how a tensor lies in the region: dense, by spans, counted; dtypes.py its element types
columns.py    columns of Python objects as Arrow; ndarrays.py, json_text.py and flatbuffer.py their parts
streams.py    sends and receives batches as streams of frames; carrier.py moves the bytes
room.py       memory for batches, shared by all streams of a process; allocator.py gets it
"""
