"""Reads an answer that is one message, at the client.

The client does not trust the server, just as the server does not trust the client (serving/requests.py). gRPC
passes on the bytes, whose size and number of fields are checked before they are parsed.
"""

from __future__ import annotations

import asyncio

from google.protobuf.message import DecodeError, Message

from rolemesh.errors import InvalidBatch
from rolemesh.rpc.contract import Rpc, deserializer
from rolemesh.wire.frame import fields
from rolemesh.wire.limits import MAX_ANSWER_BYTES, MAX_ANSWER_FIELDS, MAX_MANIFEST_BYTES

# Limits of the answers that may exceed MAX_ANSWER_BYTES. GetManifest: a manifest, and the place of its region.
LARGE = {"GetManifest": MAX_MANIFEST_BYTES + MAX_ANSWER_BYTES}
LARGE_BYTES = 64 << 10  # answers of this size or more are parsed in a thread


async def read_answer(rpc: Rpc, answer: bytes) -> Message:
    """Parse an answer, or one message of a streamed answer.

    Args:
        rpc: the method's description.
        answer: the message as bytes.

    Raises:
        InvalidBatch: more bytes or fields than allowed for the rpc, or not a message of its type.
    """
    name = rpc.response.name
    most = LARGE.get(rpc.name, MAX_ANSWER_BYTES)
    if len(answer) > most:
        raise InvalidBatch(f"a {name} has at most {most} bytes; got {len(answer)}")
    for _ in fields(memoryview(answer), MAX_ANSWER_FIELDS, f"a {name}"):
        pass
    read = deserializer(rpc.response)
    assert read is not None, f"{rpc.path} answers with Frames, which the codec reads"
    try:
        message: Message = await asyncio.to_thread(read, answer) if len(answer) >= LARGE_BYTES else read(answer)
    except DecodeError as error:
        raise InvalidBatch(f"not a {rpc.response.full_name}: {error}") from None
    return message
