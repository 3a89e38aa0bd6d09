"""What may come over the wire at most. Sender and receiver keep to the same numbers; docs/wire.md says why.

Each bounds what one message can cost the process that reads it, in time and in memory, and leaves a wide margin
above what a step sends: some thousand rows of 30 columns, with kilobytes of JSON in a row.
"""

from __future__ import annotations

# ------------------------------------------------------------------------------------------ messages

MAX_MESSAGE_BYTES = 64 << 20  # of any, as gRPC takes it
MAX_FOREIGN_BYTES = 64 << 10  # of a request to health or reflection: a name
MAX_REQUEST_BYTES = 1 << 20  # of a request that is one message: paths, addresses, numbers
MAX_ANSWER_BYTES = 1 << 20  # of an answer that is one message: metrics, digests
MAX_ANSWER_FIELDS = 4096  # of such an answer; metrics are some fifty
MAX_MANIFEST_BYTES = 16 << 20  # of weights; a trillion parameters in 50,000 tensors take 12 MiB
MAX_WEIGHTS = 1 << 16  # tensors of a manifest
MAX_WEIGHT_FIELDS = 8  # of a tensor's description in it; it has five
MAX_WEIGHT_AXES = 64  # as in torch

# ------------------------------------------------------------------------------- frames and headers

MAX_FRAME_FIELDS = 32  # a frame has two; the others may be a newer sender's
MAX_HEADER_BYTES = 2 << 20  # a batch of 30 columns has 2 KiB and its meta
MAX_META_BYTES = 1 << 20  # of JSON; it is read in one call, which nothing interrupts
MAX_COLUMNS = 256  # of tensors, and as many others
MAX_NAME_BYTES = 1024  # of a column
MAX_SPEC_BYTES = 4096  # of one tensor's description: its name, a shape, an element
MAX_AXES = 16
MAX_REGION_BYTES = 64 << 30  # a batch above this is a mistake

# ------------------------------------------------------------------------- all streams of one process

MAX_STREAMS = 128  # calls at once on one connection; a client sends some ten, and gRPC lets the others wait
# Regions that arrive or are worked on, and what they unpack to, have one part in MEMORY_SHARE of the machine's
# memory, or the container's. A large step's batch is 1 GiB and unpacks to 10; the rest is the model's.
MEMORY_SHARE = 2
STALL_S = 60.0  # without a frame, after which a request is ended: far more than it takes to encode the largest
IDLE_S = 1.0  # without a frame, after which a request gives way where another has no room, or one is refused

# A batch without its padding may be far smaller than with it, and a few bytes may claim a column of any size:
# unpacked columns take no more than FREE_EXPANSION bytes plus MAX_EXPANSION times the region. A sender that
# would exceed it sends some columns with their padding.
FREE_EXPANSION = 64 << 20
MAX_EXPANSION = 64

# ------------------------------------------------------------------------- non-tensor columns, meta

MAX_SCHEMA_BYTES = 512 << 10  # of an Arrow message's description: MAX_COLUMNS names, types and encodings
MAX_CELL_BYTES = 16 << 20  # of one text or bytes object: it is read in one call
MAX_VALUES = 1 << 21  # cells of a batch; also the values within its JSON cells. One takes some 100 bytes
MAX_JSON_VALUES = 1 << 17  # in one JSON text: it is read in one call
