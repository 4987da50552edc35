"""The public names of replicas on rented machines. Same notation as expected_surface.py."""

from __future__ import annotations

_ASKED = {"cancel": "(handle)", "poll": "(handle)", "stream_logs": "(handle, *, n_lines=200)"}
_OWN = {"exit_code": "(handle)", "find": "(launch, rank, attempt)"}
_LOCAL = {"LocalProcessExecutor": "(*, secrets=(), env=None, folder=None, tied=True)"}
_PROTOCOL = {
    "ReplicaHandle": "(rank, backend_name, metadata=<factory>)",
    "ServerlessExecutor": "protocol",
}
_STORE = {
    "MockManager": (
        "(store, *, rank=None, world_size=None, generation=None, min_replicas=None, grace_s=30.0, first_grace_s=None, "
        "timeout_s=None, poll_s=None, lease_s=20.0, takeover=False, payload='fp32', mean_payload=None, weight=1.0, "
        "shard_bytes=67108864, parallel=4, state_every=10, keep_rounds=2)"
    ),
    "ObjectStoreAllReduce": "(uri, rank, world_size, *, round_id=None, timeout_s=1800.0, poll_interval_s=1.0)",
}

NEW_SERVERLESS = {
    "diloco.serverless": {**_LOCAL, **_PROTOCOL, **_STORE},
    "diloco.serverless.executor": {
        **_PROTOCOL,
        **_LOCAL,
        "ReplicaJob": (
            "(*, entrypoint, args, rank, launch, attempt=0, rank_env='REPLICA_RANK', gpu=None, timeout_s=None, "
            "secrets=(), path=())"
        ),
        "ReplicaStatus": "(*args, **kwargs)",
    },
    "diloco.serverless.local_process": _LOCAL,
    "diloco.serverless.modal": {
        "ModalExecutor": (
            "(image='modal:python3.11', gpu='A100', *, secrets=(), env=None, modal_secrets=(), "
            "packages=('composer-replication[diloco,serverless,train]',), app_name='crf-diloco')"
        )
    },
    "diloco.serverless.hf_jobs": {
        "HFJobsExecutor": (
            "(hardware='a10g-large', *, secrets=(), env=None, image='python:3.11', "
            "packages=('composer-replication[diloco,serverless,train]',), namespace=None, endpoint=None, token=None)"
        )
    },
    "diloco.serverless.ray": {
        "RayExecutor": "(address=None, *, num_cpus=1, num_gpus=0, secrets=(), env=None, detached=False)"
    },
    "diloco.serverless.replica_entrypoint": {
        "main": (
            '(rendezvous_uri, world_size, trainer_module, trainer_fn="train", trainer_kwargs=None, *, settings=None)'
        )
    },
}
MEMBERS_SERVERLESS = {
    "HFJobsExecutor": {**_ASKED, **_OWN, "log_place": "(handle)", "was_refused": "(error)"},
    "ModalExecutor": {**_ASKED, **_OWN, "check": "(job)"},
    "LocalProcessExecutor": {**_ASKED, **_OWN, "log_place": "(handle)", "reaches": "(handle)"},
    "RayExecutor": {**_ASKED, **_OWN, "reaches": "(handle)"},
    "MockManager": {
        "agree_on_weights": "()",
        "end_after": "(commits)",
        "allow_state_dict_read": "()",
        "allreduce": "(tensor, **_options)",
        "close": "()",
        "current_step": "()",
        "disallow_state_dict_read": "()",
        "follow": "(follower)",
        "is_leader": "()",
        "num_participants": "property",
        "register_state_dict_fn": "(key, load_fn, value)",
        "should_commit": "(**_options)",
        "start_quorum": "(**_options)",
        "wait_quorum": "()",
    },
    "ObjectStoreAllReduce": {"allreduce": "(tensor, *, name=None)"},
    "ReplicaHandle": {"attempt": "property"},
    "ReplicaJob": {"as_json": "()", "check": "()", "environment": "()", "name": "property"},
    "ServerlessExecutor": {
        **_ASKED,
        "collect": "(handles, *, timeout=None)",
        "launch_replicas": "(n_replicas, entrypoint, entrypoint_args, *, gpu=None, timeout=3600)",
    },
}
