"""DataProto, the batch that the roles exchange: named columns of tensors and Python objects.

dataproto.py defines the class, padding.py pads its rows to a divisor, column.py checks and joins columns,
equality.py compares bit for bit, transfer.py copies tensors to a device, tensordict.py converts to and from
TensorDict. To save or load a file, use
save_batch and load_batch of rolemesh/wire/codec.py.
"""

from rolemesh.dataproto.dataproto import DataProto
from rolemesh.dataproto.padding import pad_dataproto_to_divisor, unpad_dataproto

__all__ = ["DataProto", "pad_dataproto_to_divisor", "unpad_dataproto"]
