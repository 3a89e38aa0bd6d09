from rolemesh.v1 import data_pb2 as _data_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: FrameHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[FrameHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("num_rows", "tensors", "columns", "meta_json", "region_bytes", "spans")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    META_JSON_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    columns: Span
    meta_json: str
    region_bytes: int
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, num_rows: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., columns: _Optional[_Union[Span, _Mapping]] = ..., meta_json: _Optional[str] = ..., region_bytes: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("offset", "num_bytes")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    num_bytes: int
    def __init__(self, offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "wire_dtype", "shape", "layout", "data", "span_index", "fill")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SPAN_INDEX_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _data_pb2.Dtype
    wire_dtype: _data_pb2.Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    layout: _data_pb2.Layout
    data: Span
    span_index: int
    fill: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_data_pb2.Dtype, str]] = ..., wire_dtype: _Optional[_Union[_data_pb2.Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., layout: _Optional[_Union[_data_pb2.Layout, str]] = ..., data: _Optional[_Union[Span, _Mapping]] = ..., span_index: _Optional[int] = ..., fill: _Optional[bytes] = ...) -> None: ...
