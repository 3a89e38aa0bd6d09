"""An answer that is one message, read at the client. It believes a server no more than a server believes it
(requests.py): gRPC hands over bytes, which are measured and counted before they are parsed."""

from __future__ import annotations

import asyncio

from google.protobuf.message import DecodeError, Message

from rolemesh.errors import InvalidBatch
from rolemesh.rpc.contract import Rpc, deserializer
from rolemesh.wire.frame import fields
from rolemesh.wire.limits import MAX_ANSWER_BYTES, MAX_ANSWER_FIELDS, MAX_MANIFEST_BYTES

# Of the answers that may have more than MAX_ANSWER_BYTES: a manifest, and where its region is.
LARGE = {"GetManifest": MAX_MANIFEST_BYTES + MAX_ANSWER_BYTES}
LARGE_BYTES = 64 << 10  # from here on it is parsed in a thread


async def read_answer(rpc: Rpc, answer: bytes) -> Message:
    """The message of an answer, or of one part of it where the answer is a stream.

    Raises:
        InvalidBatch: larger or of more fields than the rpc's answers are, or no message of its type.
    """
    name, most = rpc.response.name, LARGE.get(rpc.name, MAX_ANSWER_BYTES)
    if len(answer) > most:
        raise InvalidBatch(f"a {name} has at most {most} bytes; got {len(answer)}")
    for _ in fields(memoryview(answer), MAX_ANSWER_FIELDS, f"a {name}"):
        pass
    read = deserializer(rpc.response)
    assert read is not None, f"{rpc.path} answers with frames"
    try:
        message: Message = await asyncio.to_thread(read, answer) if len(answer) >= LARGE_BYTES else read(answer)
    except DecodeError as error:
        raise InvalidBatch(f"no {rpc.response.full_name}: {error}") from None
    return message
