"""A vector as bytes that a reader can trust: safetensors with a header of one possible form, and a checksum.

formats   what each kind of payload holds, and how much
rounding  blocks of numbers as small integers and a scale
vectors   a vector to bytes and back
feedback  what rounding left out of a payload is sent with the next one
"""

from composer_replication.diloco.payload.feedback import ErrorFeedback
from composer_replication.diloco.payload.formats import BLOCK_ELEMENTS, PayloadError, PayloadKind, payload_bytes
from composer_replication.diloco.payload.vectors import decode_vector, encode_vector

__all__ = [
    "BLOCK_ELEMENTS",
    "ErrorFeedback",
    "PayloadError",
    "PayloadKind",
    "decode_vector",
    "encode_vector",
    "payload_bytes",
]
