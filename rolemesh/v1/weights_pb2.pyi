from rolemesh.v1 import data_pb2 as _data_pb2
from rolemesh.v1 import frame_pb2 as _frame_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _data_pb2.Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_data_pb2.Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("version", "weights", "region_bytes", "piece_bytes", "piece_checksums")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    version: int
    weights: _containers.RepeatedCompositeFieldContainer[WeightSpec]
    region_bytes: int
    piece_bytes: int
    piece_checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., weights: _Optional[_Iterable[_Union[WeightSpec, _Mapping]]] = ..., region_bytes: _Optional[int] = ..., piece_bytes: _Optional[int] = ..., piece_checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class SharedRegion(_message.Message):
    __slots__ = ("path", "name")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    path: str
    name: str
    def __init__(self, path: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class StripedHolders(_message.Message):
    __slots__ = ("stripe_bytes", "addresses")
    STRIPE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    stripe_bytes: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stripe_bytes: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("version", "digest", "wait_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    wait_s: float
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest", "shared", "striped")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    STRIPED_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    shared: SharedRegion
    striped: StripedHolders
    def __init__(self, manifest: _Optional[bytes] = ..., shared: _Optional[_Union[SharedRegion, _Mapping]] = ..., striped: _Optional[_Union[StripedHolders, _Mapping]] = ...) -> None: ...

class FetchRangeRequest(_message.Message):
    __slots__ = ("version", "digest", "offset", "length")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    offset: int
    length: int
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class WatchRegionRequest(_message.Message):
    __slots__ = ("version", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class WatchRegionResponse(_message.Message):
    __slots__ = ("num_verified",)
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    num_verified: int
    def __init__(self, num_verified: _Optional[int] = ...) -> None: ...
