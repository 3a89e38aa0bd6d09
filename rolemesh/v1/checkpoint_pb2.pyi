from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class UpdateResponse(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class BeginCheckpointRequest(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class BeginCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishCheckpointRequest(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class FinishCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadCheckpointRequest(_message.Message):
    __slots__ = ("directory", "num_training_steps")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINING_STEPS_FIELD_NUMBER: _ClassVar[int]
    directory: str
    num_training_steps: int
    def __init__(self, directory: _Optional[str] = ..., num_training_steps: _Optional[int] = ...) -> None: ...

class LoadCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
