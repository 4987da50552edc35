"""Replicas on this machine train one adapter on a run's sessions; a folder stands for the bucket between them.

    python examples/diloco/offline.py RUN MODEL                    # after `crf ingest` and `crf sites`
    python examples/diloco/offline.py RUN MODEL --replicas 4 --rendezvous s3://bucket/prefix

Every replica learns from its own part of the sessions, and gives what its adapter has moved every few steps. Printed:
what each of them did, and whether they ended with the same weights, which they have to.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path

from composer_replication.diloco.serverless import LocalProcessExecutor

ENTRYPOINT = "composer_replication.diloco.serverless.replica_entrypoint"
TRAINER = "composer_replication.cli.replicas.replica_training"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one adapter with several replicas.")
    parser.add_argument("run", type=Path, help="run directory with sites in it")
    parser.add_argument("model", help="folder or hub name of a causal LM")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--rendezvous", default=None, metavar="URI", help="default: a folder that is removed at the end"
    )
    parser.add_argument("--steps", type=int, default=40, help="of each replica")
    parser.add_argument("--every", type=int, default=10, help="steps between two exchanges")
    parser.add_argument("--output", type=Path, default=Path("diloco-output"))
    parser.add_argument("--set", dest="overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of the config")
    return parser.parse_args(argv)


def train(args: argparse.Namespace, rendezvous: str) -> list[dict]:
    """One process a replica; rented machines differ in the executor alone (`ModalExecutor`, `HFJobsExecutor`)."""
    overrides = [
        f"train.run={args.run.absolute()}",
        f"train.model={args.model}",
        f"train.output={args.output.absolute()}",
        f"train.optimiser.steps={args.steps}",
        *args.overrides,
    ]
    arguments = {
        "rendezvous_uri": rendezvous,
        "world_size": args.replicas,
        "trainer_module": TRAINER,
        "trainer_kwargs": {"overrides": overrides, "outer": {"sync_every": args.every}},
    }
    executor = LocalProcessExecutor()
    handles = executor.launch_replicas(args.replicas, ENTRYPOINT, arguments)
    ends = executor.collect(handles)
    for handle, end in zip(handles, ends, strict=True):
        if end["status"] != "succeeded":
            print(executor.stream_logs(handle, n_lines=20))
    return ends


def digest_of(folder: Path) -> str:
    """Of the weights in a folder."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))).hexdigest()[:12]


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        ends = train(args, args.rendezvous or temporary)
    for end in ends:
        print(f"replica {end['rank']}: {end['status']}  {end.get('result') or end['error'] or ''}")
    if any(end["status"] != "succeeded" for end in ends):
        return 1
    digests = {digest_of(Path(end["result"]["saved"])) for end in ends}
    print(f"weights: {', '.join(sorted(digests))}")
    return 0 if len(digests) == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
