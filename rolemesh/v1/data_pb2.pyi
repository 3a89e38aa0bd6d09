from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class Dispatch(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISPATCH_UNSPECIFIED: _ClassVar[Dispatch]
    DISPATCH_SHARD_ROWS: _ClassVar[Dispatch]
    DISPATCH_BROADCAST: _ClassVar[Dispatch]

class Caller(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CALLER_UNSPECIFIED: _ClassVar[Caller]
    CALLER_CONTROLLER: _ClassVar[Caller]
    CALLER_OPERATOR: _ClassVar[Caller]
    CALLER_ACTOR: _ClassVar[Caller]
    CALLER_ROLLOUT: _ClassVar[Caller]
    CALLER_REFERENCE: _ClassVar[Caller]
    CALLER_CRITIC: _ClassVar[Caller]
    CALLER_REWARD: _ClassVar[Caller]
    CALLER_ENVIRONMENT: _ClassVar[Caller]

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT64: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT8_E4M3FN: _ClassVar[Dtype]
    DTYPE_FLOAT8_E5M2: _ClassVar[Dtype]
    DTYPE_INT64: _ClassVar[Dtype]
    DTYPE_INT32: _ClassVar[Dtype]
    DTYPE_INT16: _ClassVar[Dtype]
    DTYPE_INT8: _ClassVar[Dtype]
    DTYPE_UINT8: _ClassVar[Dtype]
    DTYPE_UINT16: _ClassVar[Dtype]
    DTYPE_UINT32: _ClassVar[Dtype]
    DTYPE_UINT64: _ClassVar[Dtype]
    DTYPE_BOOL: _ClassVar[Dtype]

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_UNSPECIFIED: _ClassVar[Layout]
    LAYOUT_DENSE: _ClassVar[Layout]
    LAYOUT_RAGGED: _ClassVar[Layout]
    LAYOUT_CONSTANT: _ClassVar[Layout]
    LAYOUT_MASK: _ClassVar[Layout]
    LAYOUT_POSITIONS: _ClassVar[Layout]
DISPATCH_UNSPECIFIED: Dispatch
DISPATCH_SHARD_ROWS: Dispatch
DISPATCH_BROADCAST: Dispatch
CALLER_UNSPECIFIED: Caller
CALLER_CONTROLLER: Caller
CALLER_OPERATOR: Caller
CALLER_ACTOR: Caller
CALLER_ROLLOUT: Caller
CALLER_REFERENCE: Caller
CALLER_CRITIC: Caller
CALLER_REWARD: Caller
CALLER_ENVIRONMENT: Caller
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT64: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT8_E4M3FN: Dtype
DTYPE_FLOAT8_E5M2: Dtype
DTYPE_INT64: Dtype
DTYPE_INT32: Dtype
DTYPE_INT16: Dtype
DTYPE_INT8: Dtype
DTYPE_UINT8: Dtype
DTYPE_UINT16: Dtype
DTYPE_UINT32: Dtype
DTYPE_UINT64: Dtype
DTYPE_BOOL: Dtype
LAYOUT_UNSPECIFIED: Layout
LAYOUT_DENSE: Layout
LAYOUT_RAGGED: Layout
LAYOUT_CONSTANT: Layout
LAYOUT_MASK: Layout
LAYOUT_POSITIONS: Layout
DISPATCH_FIELD_NUMBER: _ClassVar[int]
dispatch: _descriptor.FieldDescriptor
CALLERS_FIELD_NUMBER: _ClassVar[int]
callers: _descriptor.FieldDescriptor
