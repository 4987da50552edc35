"""The public names of DiLoCo across machines. Same notation as expected_surface.py."""

from __future__ import annotations

_STORE = {
    "put": "(key, data)",
    "create": "(key, data)",
    "get": "(key, *, most_bytes)",
    "size": "(key)",
    "keys": "(prefix)",
    "delete": "(keys)",
}

NEW_DILOCO: dict[str, dict[str, str]] = {
    "diloco.payload": {
        "BLOCK_ELEMENTS": "value",
        "ErrorFeedback": "()",
        "PayloadError": "error: ComposerError, ValueError",
        "PayloadKind": "(*args, **kwargs)",
        "decode_vector": "(data, *, elements, about, most_bytes=None)",
        "encode_vector": "(vector, *, kind, about)",
        "payload_bytes": "(elements, kind)",
    },
    "diloco.store": {
        "MemoryStore": '(name="memory")',
        "MissingObject": "error: StoreError",
        "ObjectStore": "protocol",
        "ObjectTooLarge": "error: StoreError",
        "StoreCannotCreate": "error: StoreError",
        "StoreClientMissing": "error: MissingExtraError, RuntimeError",
        "StoreDenied": "error: StoreError",
        "StoreError": "error: ComposerError, RuntimeError",
        "StoreFull": "error: StoreError",
        "StoreUnavailable": "error: StoreError",
        "open_store": "(uri, *, deadline_s=60.0, slowest_mb_s=1.0, options=None, probes=True)",
    },
}

MEMBERS_DILOCO: dict[str, dict[str, str]] = {
    "ErrorFeedback": {
        "compress": "(vector, kind)",
        "keep": "(residual)",
        "load_state_dict": "(state)",
        "state_dict": "()",
    },
    "MemoryStore": _STORE,
    "ObjectStore": {"uri": "property", **_STORE},
}
