from rolemesh.v1 import data_pb2 as _data_pb2
from rolemesh.v1 import frame_pb2 as _frame_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
