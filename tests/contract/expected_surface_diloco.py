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
    "diloco.simulation": {
        "Bucket": (
            "(*, put_s=0.05, get_s=0.03, connection_mb_s=60.0, total_mb_s=100000.0, connections=4, "
            "shard_bytes=67108864, poll_s=1.0, grace_s=30.0, quorum=0.5, dollars_per_million_puts=5.0, "
            "dollars_per_million_gets=0.4, dollars_per_gb_out=0.0)"
        ),
        "Machine": "(*, up_mb_s, down_mb_s, latency_s=0.03, codec_mb_s=400.0, dollars_per_hour=2.0)",
        "Scenario": "(*, replicas, work, machine, bucket=<factory>, spot=<factory>, seed=0)",
        "SimulatedRun": (
            "(*, scenario, wall_s=0.0, rounds=0, offers=0, sent_bytes=0.0, received_bytes=0.0, puts=0.0, gets=0.0, "
            "kills=0, lost_rounds=0)"
        ),
        "Spot": "(*, kills_per_hour=0.0, return_s=180.0, heartbeat_s=5.0)",
        "Work": "(*, payload_bytes, state_bytes, step_s=6.0, sync_every=100, spread=0.01, num_rounds=20)",
        "simulate_bucket": "(scenario)",
        "simulate_direct": "(scenario)",
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
    "Bucket": {
        "num_shards": "(payload_bytes, parties)",
        "transfer_s": "(num_bytes, *, requests_s, line_mb_s, parties)",
    },
    "ErrorFeedback": {
        "compress": "(vector, kind)",
        "keep": "(residual)",
        "load_state_dict": "(state)",
        "state_dict": "()",
    },
    "MemoryStore": _STORE,
    "SimulatedRun": {
        "bucket_dollars": "property",
        "bytes_per_replica_and_round": "property",
        "machine_dollars": "property",
        "round_s": "property",
        "useful_share": "property",
        "waiting_s": "property",
    },
    "Work": {"train_s": "property"},
    "ObjectStore": {"uri": "property", **_STORE},
}
