from rolemesh.v1 import checkpoint_pb2 as _checkpoint_pb2
from rolemesh.v1 import data_pb2 as _data_pb2
from rolemesh.v1 import frame_pb2 as _frame_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PublishWeightsRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class PublishWeightsResponse(_message.Message):
    __slots__ = ("version", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...
