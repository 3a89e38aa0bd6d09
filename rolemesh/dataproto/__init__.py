"""DataProto, the batch that travels between the roles: named columns of tensors and Python objects.

dataproto.py has the class, padding.py makes its rows divide, column.py has one column of Python objects,
equality.py compares to the bit, tensordict.py converts from and to TensorDict. Files are the codec's
(rolemesh/wire/codec.py: save_batch, load_batch).
"""

from rolemesh.dataproto.dataproto import DataProto
from rolemesh.dataproto.padding import pad_dataproto_to_divisor, unpad_dataproto

__all__ = ["DataProto", "pad_dataproto_to_divisor", "unpad_dataproto"]
