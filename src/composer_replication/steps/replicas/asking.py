"""What a launch asks of its replicas: `crf train` on a run's sessions, or a trainer of one's own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from composer_replication.config.presets import load_with_preset
from composer_replication.config.writer import to_toml
from composer_replication.diloco.store import ObjectStore
from composer_replication.diloco.store.opening import scheme_of
from composer_replication.errors import ConfigError, InputError, explain
from composer_replication.ingestion.last_gate import LastGate
from composer_replication.runs import RunDir
from composer_replication.steps.replicas.bucket_files import CONFIG, digests_of, refuse_secrets, run_files, upload
from composer_replication.steps.replicas.launch_file import LaunchFile, known_numbers, path_of, refuse_a_taken_name
from composer_replication.steps.replicas.launches import MOST_REPLICAS, create_launch, place_of
from composer_replication.steps.replicas.round_keys import check_outer_loop

ENTRYPOINT = "composer_replication.diloco.serverless.replica_entrypoint"
TRAINER = "composer_replication.steps.replicas.replica"
TRAINING = "composer_replication.steps.around.replica"
_NAMES_OF_SECRETS = ("secrets", "modal_secrets")
_NEAR = ("local", "ray")  # whose machines may have this one's folders


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A launch before it is one."""

    bucket: str
    executor: str
    replicas: int
    module: str = TRAINING
    function: str = "train"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the manager
    options: Mapping[str, Any] = field(default_factory=dict)  # of the executor
    entrypoint: str = ENTRYPOINT
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    commits: int | None = None
    model: str | None = None
    gpu: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise InputError(explain("--replicas", got=self.replicas, expected=f"1 to {MOST_REPLICAS}"))
        if (quorum := self.settings.get("min_replicas", 1)) > self.replicas:
            raise InputError(
                explain("--round min_replicas", got=quorum, expected=f"1 to {self.replicas}, the replicas")
            )
        if self.model is not None and self.executor not in _NEAR and Path(self.model).is_dir():
            fix = "Put the weights on the Hub, or into the image, and name them as they are there."
            got = f"{self.model}, a folder of this machine"
            raise InputError(explain("train.model", got=got, expected="weights that replicas can get", fix=fix))

    @cached_property
    def entrypoint_args(self) -> dict[str, Any]:
        """Of the entrypoint, but for the launch's number, which is not known yet."""
        trainer = {
            "bucket": self.bucket,
            "module": self.module,
            "function": self.function,
            "arguments": dict(self.arguments),
            "files": digests_of(self.files),
        }
        return {
            "rendezvous_uri": self.bucket,
            "world_size": self.replicas,
            "trainer_module": TRAINER,
            "trainer_kwargs": trainer,
            "settings": dict(self.settings),
        }

    @property
    def num_bytes(self) -> int:
        """Of the files that go to the bucket."""
        return sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in self.files.values())


def reachable(bucket: str, executor: str) -> str:
    """The bucket as replicas name it; a folder of this machine is no place to meet for others."""
    if scheme_of(bucket) != "file":
        return bucket
    if executor not in _NEAR:
        expected = "s3://, gs://, az:// or hf://, which its machines can reach"
        raise InputError(explain(f"bucket of {executor}", got="a folder of this machine", expected=expected))
    return bucket if "://" in bucket else str(Path(bucket).expanduser().absolute())


def training(
    config: str | None, overrides: Sequence[str], outer: Mapping[str, Any], *, no_scrub: bool, allowed: Iterable[str]
) -> dict[str, Any]:
    """`crf train` as fields of `Asked`: the config as text, and the run's files after a last look at them."""
    chosen = load_with_preset(config, overrides)
    chosen.train.required_model()
    if chosen.train.mode != "offline" or chosen.train.run is None:
        got = f"train.mode {chosen.train.mode}, train.run {chosen.train.run}"
        fix = "A training with rollouts is launched with a trainer of your own: --trainer-module."
        raise ConfigError(explain("what replicas learn from", got=got, expected="the sessions of a run", fix=fix))
    from composer_replication.diloco.training import OuterLoop

    check_outer_loop(outer)
    loop = OuterLoop(**outer)
    steps = chosen.train.optimiser.steps
    if not steps or steps % loop.steps_per_commit:
        parts = "" if loop.num_fragments == 1 else f" by num_fragments={loop.num_fragments}"
        why = f"the steps between two exchanges (sync_every={loop.sync_every}{parts})"
        expected = f"a multiple of {loop.steps_per_commit}, {why}"
        fix = f"Set --round sync_every=N, so that it divides {steps}, or --set train.optimiser.steps=N."
        raise ConfigError(explain("train.optimiser.steps", got=steps, expected=expected, fix=fix))
    run = RunDir.open(chosen.train.run)
    files = run_files(run)
    refuse_secrets(run, files, no_scrub=no_scrub, allowed=allowed)
    return {
        "arguments": {"outer": asdict(loop)},
        "files": {**files, CONFIG: to_toml(chosen).encode()},
        "commits": steps // loop.steps_per_commit,
        "model": chosen.train.model,
    }


def refuse_values(asked: Asked) -> None:
    """What replicas are asked stands in the launch's file, and services show it: secrets stand there by name."""
    options = {key: value for key, value in asked.options.items() if key not in _NAMES_OF_SECRETS}
    request = {"options": options, "arguments": dict(asked.arguments), "settings": dict(asked.settings)}
    location = "options, variables and arguments"
    if (find := LastGate(os.environ).look(request, location, is_text=False)) is not None:  # names and paths, no prose
        fix = "Set a variable of this machine to it, and hand that over by its name: --secret NAME."
        raise InputError(explain("launch", got=f"what looks like a secret ({find})", expected="none", fix=fix))


def begin(store: ObjectStore, asked: Asked, path: Path | None = None) -> LaunchFile:
    """Take a number, begin the launch's file, and put the run's files into the bucket; replicas are started after."""
    refuse_values(asked)
    if path is not None:
        refuse_a_taken_name(path)
    launch = create_launch(
        store,
        above=max(known_numbers(place_of(asked.bucket)), default=-1),
        bucket=asked.bucket,
        executor=asked.executor,
        options=dict(asked.options),
        replicas=asked.replicas,
        commits=asked.commits,
        entrypoint=asked.entrypoint,
        args=asked.entrypoint_args,
        gpu=asked.gpu,
        timeout_s=asked.timeout_s,
    )
    file = LaunchFile.create(path or path_of(launch.place, launch.number), launch)
    upload(store, launch.key("input"), asked.files)
    return file
