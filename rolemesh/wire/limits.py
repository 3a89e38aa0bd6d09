"""Limits of the wire format. Sender and receiver enforce the same numbers; docs/wire.md gives the reasons.

Each limit bounds the time and memory that one message can cost its reader. All leave a wide margin above a
normal step: about a thousand rows of 30 columns, with kilobytes of JSON per row.
"""

from __future__ import annotations

# ------------------------------------------------------------------------------------------ messages

MAX_MESSAGE_BYTES = 64 << 20  # any gRPC message
MAX_FOREIGN_BYTES = 64 << 10  # a request to health or reflection, which holds a name
MAX_REQUEST_BYTES = 1 << 20  # a unary request: paths, addresses, numbers
MAX_ANSWER_BYTES = 1 << 20  # a unary response: metrics, digests
MAX_ANSWER_FIELDS = 4096  # fields of a unary response; metrics take about fifty
MAX_TRAILER_BYTES = 256 << 10  # metadata behind an answer; timeline.MOST_PARTS of a profiled call
MAX_MANIFEST_BYTES = 16 << 20  # a manifest of weights; a trillion parameters in 50,000 tensors take 12 MiB
MAX_WEIGHTS = 1 << 16  # tensors in a manifest
MAX_WEIGHT_FIELDS = 8  # fields of a tensor's description in a manifest; it has five
MAX_WEIGHT_AXES = 64  # axes of a tensor in a manifest, as in torch
MAX_HOLDERS = 1024  # machines that hold a version between them

# ------------------------------------------------------------------------------- frames and headers

MAX_FRAME_FIELDS = 32  # a frame has two; a newer sender may add some
MAX_HEADER_BYTES = 2 << 20  # a batch of 30 columns takes 2 KiB plus its meta_info
MAX_META_BYTES = 1 << 20  # meta_info as JSON, which is parsed in one uninterruptible call
MAX_COLUMNS = 256  # tensors; also spans, and non-tensor columns
MAX_NAME_BYTES = 1024  # a column's name
MAX_SPEC_BYTES = 4096  # one tensor's description: its name, shape and fill
MAX_AXES = 16  # axes of a tensor in a batch
MAX_REGION_BYTES = 64 << 30  # a batch's region; a larger one is a mistake

# ------------------------------------------------------------------------- all streams of one process

MAX_STREAMS = 128  # concurrent calls on one connection; a client sends about ten, and gRPC queues the excess
# All batches in a process, with their unpacked tensors, may use 1/MEMORY_SHARE of the machine's memory, or of
# the container's limit. A large step's batch is 1 GiB and unpacks to 10 GiB; the rest is for the model.
MEMORY_SHARE = 2
STALL_S = 60.0  # end a request after this silence between frames; encoding the largest batch takes far less
# After this silence a request is evicted if another needs its memory, and a refused one is read no further.
IDLE_S = 1.0

# Packed tensors may be far smaller than unpacked ones, so a few bytes could claim a tensor of any size.
# Unpacked tensors may take at most FREE_EXPANSION bytes plus MAX_EXPANSION times the region. A sender above
# that sends some tensors with their padding.
FREE_EXPANSION = 64 << 20
MAX_EXPANSION = 64

# ------------------------------------------------------------------------- non-tensor columns, meta

MAX_SCHEMA_BYTES = 512 << 10  # an Arrow message's description: MAX_COLUMNS names, types and encodings
MAX_CELL_BYTES = 16 << 20  # one text or bytes cell, which is read in one call
MAX_VALUES = 1 << 21  # cells of a batch; also the values within its JSON cells. A value takes up to 100 bytes
MAX_JSON_VALUES = 1 << 17  # values in one JSON text, which is parsed in one call
MAX_ANSWER_ROW_BYTES = 1 << 20  # non-tensor columns of a role's answer, for each of its rows, on average

# ------------------------------------------------------------------------------------ conversations

# Each open episode may have a call that waits for a tool, so a connection to environments has many calls. Each
# may hold a request of MAX_REQUEST_BYTES, but holds a turn of a few kB.
MAX_EPISODE_STREAMS = 8192
MAX_EPISODE_NAME = 512  # characters of an episode's name, an agent's, a uid
MAX_MESSAGES = 1024  # of a prompt, or of an answer of an environment
MAX_CONTEXTS = 64  # prompts of a conversation, one after another
MAX_CALLS = 256  # of tools in one turn
MAX_TOOLS = 1024  # of an agent
