"""What a launch asks of its replicas: `crf train` on a run's sessions, or a trainer of one's own."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.atomic import staged
from composer_replication.canonical_json import decode_object
from composer_replication.cli.replicas.launches import (
    MAX_REPLICAS,
    LaunchFile,
    canonical_bucket,
    create_launch,
    launch_path,
    local_launch_numbers,
    refuse_existing_file,
)
from composer_replication.config.presets import load_with_preset
from composer_replication.config.values import to_toml
from composer_replication.diloco.store import ObjectStore
from composer_replication.diloco.store.opening import scheme_of
from composer_replication.errors import (
    ArtefactCorruptError,
    ConfigError,
    InputError,
    explain,
)
from composer_replication.privacy.outgoing import (
    Find,
    LastGate,
    gate_of,
    refusal,
)
from composer_replication.runs import ARTEFACTS, RunDir

ENTRYPOINT = "composer_replication.diloco.serverless.replica_entrypoint"
TRAINER = "composer_replication.cli.replicas.tending"
TRAINING = "composer_replication.cli.replicas.replica_training"
_SECRET_OPTIONS = ("secrets", "modal_secrets")
_EXECUTORS_ON_LOCAL_FILES = ("local", "ray")  # whose machines may have this one's folders


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
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
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise InputError(explain("--replicas", got=self.replicas, expected=f"1 to {MAX_REPLICAS}"))
        if (quorum := self.settings.get("min_replicas", 1)) > self.replicas:
            raise InputError(
                explain("--round min_replicas", got=quorum, expected=f"1 to {self.replicas}, the replicas")
            )
        if self.model is not None and self.executor not in _EXECUTORS_ON_LOCAL_FILES and Path(self.model).is_dir():
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
            "files": hash_files(self.files),
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


def bucket_for_replicas(bucket: str, executor: str) -> str:
    """The bucket as replicas name it; a folder of this machine is no place to meet for others."""
    if scheme_of(bucket) != "file":
        return bucket
    if executor not in _EXECUTORS_ON_LOCAL_FILES:
        expected = "s3://, gs://, az:// or hf://, which its machines can reach"
        raise InputError(explain(f"bucket of {executor}", got="a folder of this machine", expected=expected))
    return bucket if "://" in bucket else str(Path(bucket).expanduser().absolute())


def training_request(
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

    _check_outer_loop(outer)
    loop = OuterLoop(**outer)
    steps = chosen.train.optimiser.steps
    if not steps or steps % loop.steps_per_commit:
        parts = "" if loop.num_fragments == 1 else f" by num_fragments={loop.num_fragments}"
        why = f"the steps between two exchanges (sync_every={loop.sync_every}{parts})"
        expected = f"a multiple of {loop.steps_per_commit}, {why}"
        fix = f"Set --round sync_every=N, so that it divides {steps}, or --set train.optimiser.steps=N."
        raise ConfigError(explain("train.optimiser.steps", got=steps, expected=expected, fix=fix))
    run = RunDir.open(chosen.train.run)
    files = _run_files(run)
    _refuse_secrets(run, files, no_scrub=no_scrub, allowed=allowed)
    return {
        "arguments": {"outer": asdict(loop)},
        "files": {**files, CONFIG: to_toml(chosen).encode()},
        "commits": steps // loop.steps_per_commit,
        "model": chosen.train.model,
    }


def refuse_secret_values(asked: LaunchRequest) -> None:
    """What replicas are asked stands in the launch's file, and services show it: secrets stand there by name."""
    options = {key: value for key, value in asked.options.items() if key not in _SECRET_OPTIONS}
    request = {"options": options, "arguments": dict(asked.arguments), "settings": dict(asked.settings)}
    location = "options, variables and arguments"
    if (find := LastGate(os.environ).look(request, location, is_text=False)) is not None:  # names and paths, no prose
        fix = "Set a variable of this machine to it, and hand that over by its name: --secret NAME."
        raise InputError(explain("launch", got=f"what looks like a secret ({find})", expected="none", fix=fix))


def prepare_launch(store: ObjectStore, asked: LaunchRequest, path: Path | None = None) -> LaunchFile:
    """Take a number, begin the launch's file, and put the run's files into the bucket; replicas are started after."""
    refuse_secret_values(asked)
    if path is not None:
        refuse_existing_file(path)
    launch = create_launch(
        store,
        above=max(local_launch_numbers(canonical_bucket(asked.bucket)), default=-1),
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
    file = LaunchFile.create(path or launch_path(launch.place, launch.number), launch)
    upload(store, launch.key("input"), asked.files)
    return file


# What `--round NAME=VALUE` takes: settings of the outer loop and of the rounds, with defaults and bounds.
#
# A table of its own, so that whoever prints it loads no tensors; a test compares it with what the two are made of.

NUMBER, INTEGER, BOOLEAN, PAYLOAD = "a number", "a whole number", "true or false", "fp32, bf16, int8 or int4"


class _RoundKey(NamedTuple):
    """One setting."""

    name: str
    kind: str
    default: Any  # None: what the text says
    text: str
    least: float = -math.inf


OUTER_KEYS = (
    _RoundKey("sync_every", INTEGER, 100, "steps of each replica between two exchanges of one part of the model", 1),
    _RoundKey("outer_lr", NUMBER, 0.7, "of the outer optimiser, which steps by the mean of what replicas learnt", 0),
    _RoundKey("outer_momentum", NUMBER, 0.9, "of the outer optimiser", 0),
    _RoundKey("nesterov", BOOLEAN, True, "whether that momentum is Nesterov's"),
    _RoundKey("num_fragments", INTEGER, 1, "parts of the model, exchanged in turn; divides `sync_every`", 1),
    _RoundKey("fragment_sync_delay", INTEGER, 0, "steps that a part may be on its way while training goes on", 0),
    _RoundKey("fragment_update_alpha", NUMBER, 0.0, "share of its own weights that a replica keeps at an exchange", 0),
)
MANAGER_KEYS = (
    _RoundKey("payload", PAYLOAD, "fp32", "how what was learnt travels"),
    _RoundKey("mean_payload", PAYLOAD, None, "how the mean travels; default: as `payload`, bf16 for int8 and int4"),
    _RoundKey("min_replicas", INTEGER, None, "without so many there is no round; default: half of them, rounded up", 1),
    _RoundKey("grace_s", NUMBER, 30.0, "seconds that a round waits for those who are late, once it has a quorum", 0),
    _RoundKey("first_grace_s", NUMBER, None, "the same before the first round; default: half of `timeout_s`", 0),
    _RoundKey("timeout_s", NUMBER, 1800.0, "seconds after which a replica gives a round up, and fails", 0),
    _RoundKey("poll_s", NUMBER, 1.0, "seconds between two looks at the bucket while it waits", 0),
    _RoundKey(
        "lease_s", NUMBER, 20.0, "seconds without a sign of life after which a rank is free for another process", 0
    ),
    _RoundKey("shard_bytes", INTEGER, 64 * 2**20, "bytes of one object, at most", 1),
    _RoundKey("parallel", INTEGER, 4, "requests at once, each way", 1),
    _RoundKey("state_every", INTEGER, 10, "exchanges between two states that one who is behind may load", 1),
    _RoundKey("keep_rounds", INTEGER, 2, "exchanges whose offers are kept", 1),
)
ROUND_KEYS = {key.name: key for key in (*OUTER_KEYS, *MANAGER_KEYS)}


def split_round_settings(given: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the outer loop, and of the rounds; InputError where one is unknown or holds something wrong."""
    if unknown := sorted({name for name, _ in given} - ROUND_KEYS.keys()):
        raise InputError(explain("--round", got=", ".join(unknown), expected=f"some of {', '.join(ROUND_KEYS)}"))
    for name, value in given:
        _check(ROUND_KEYS[name], value)
    settings = dict(given)
    outer = {key.name for key in OUTER_KEYS}
    return {name: settings[name] for name in settings if name in outer}, {
        name: settings[name] for name in settings if name not in outer
    }


def _check(key: _RoundKey, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    is_right = {
        NUMBER: is_number,
        INTEGER: is_number and isinstance(value, int),
        BOOLEAN: isinstance(value, bool),
        PAYLOAD: value in ("fp32", "bf16", "int8", "int4"),
    }[key.kind]
    bound = "" if key.least == -math.inf else f", {key.least:g} or more"
    if not is_right or (is_number and value < key.least):
        raise InputError(explain(f"--round {key.name}", got=repr(value), expected=f"{key.kind}{bound}"))


def _check_outer_loop(settings: Mapping[str, Any]) -> None:
    """What replicas would refuse of the outer loop before their first step, refused here."""
    from composer_replication.diloco.outer_loop import check_outer, check_schedule

    chosen = {key.name: key.default for key in OUTER_KEYS} | dict(settings)
    try:
        check_schedule(
            chosen["num_fragments"],
            sync_every=chosen["sync_every"],
            delay=chosen["fragment_sync_delay"],
            alpha=chosen["fragment_update_alpha"],
        )
        check_outer(lr=chosen["outer_lr"], momentum=chosen["outer_momentum"], nesterov=chosen["nesterov"])
    except InputError as error:
        message = explain(f"--round {error.what}", got=error.got, expected=error.expected, fix=error.fix)
        raise InputError(message) from None


# Files of a run into the bucket and out of it: those that a training reads, and the folder that it writes.
#
# conversations.jsonl              a file of PART_BYTES at most: one object
# model.safetensors.parts/000000   a larger one: an object for every PART_BYTES of it, as no more is held in memory

MARKER, CONFIG = "run.json", "config.toml"
_TRAINING_ARTEFACTS = ("conversations", "tools", "split", "sites", "pairs")
PART_BYTES = 256 << 20
_MAX_FILE_BYTES, _MAX_FILES = 64 << 30, 1000
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
# What a training leaves besides; weights are safetensors, and nothing that would have to be unpickled is taken.
_ALLOWED_SUFFIXES = {".safetensors", ".json", ".md", ".jinja", ".txt", ".model", ".toml"}
_JSONL, _PARTS_INFIX = ".jsonl", ".parts/"


def _run_files(run: RunDir) -> dict[str, Path]:
    """What a training on this run reads."""
    names = [
        name
        for artefact in _TRAINING_ARTEFACTS
        for name in (ARTEFACTS[artefact].file_name, ARTEFACTS[artefact].sidecar_name)
    ]
    return {name: run.root / name for name in (MARKER, *dict.fromkeys(names)) if (run.root / name).is_file()}


def _refuse_secrets(run: RunDir, files: Mapping[str, Path], *, no_scrub: bool, allowed: Iterable[str]) -> None:
    """The last look at what leaves this machine, row by row."""
    gate = gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    finds: dict[bytes, Find] = {}
    for name, path in files.items():
        if gate.is_open or path.suffix != _JSONL:
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                row = decode_object(line)
                # `session` and a long id behind it read like a key and its value: values alone, as the names are ours.
                part = list(row.values()) if name == ARTEFACTS["split"].file_name else row
                if (find := gate.look(part, f"{name}, line {number}")) is not None:
                    finds.setdefault(find.digest, find)
    if finds:
        raise refusal("files for the replicas", list(finds.values()))


def hash_files(files: Mapping[str, Path | bytes]) -> dict[str, str]:
    """The sha256 of each file, by its name."""
    digests = {}
    for name, file in files.items():
        digest = hashlib.sha256()
        for chunk in _chunks(file):
            digest.update(chunk)
        digests[name] = digest.hexdigest()
    return digests


def upload(store: ObjectStore, prefix: str, files: Mapping[str, Path | bytes]) -> None:
    """Put files below `prefix`; of what an earlier upload left under their names nothing stays."""
    written = set[str]()
    for name, file in files.items():
        key = f"{prefix}/{name}"
        is_parted = (len(file) if isinstance(file, bytes) else file.stat().st_size) > PART_BYTES
        for number, chunk in enumerate(_chunks(file)):
            part = _part_key(key, number) if is_parted else key
            store.put(part, chunk)
            written.add(part)
    if files:
        whole = {f"{prefix}/{name}" for name in files}
        there = [key for key in store.keys(prefix) if key in whole or key.rpartition(_PARTS_INFIX)[0] in whole]
        store.delete([key for key in there if key not in written])


def _chunks(source: Path | bytes) -> Iterator[bytes]:
    """A file's bytes, a part at a time; of an empty one the one part that it has."""
    if isinstance(source, bytes):
        yield from (source[start : start + PART_BYTES] for start in range(0, len(source) or 1, PART_BYTES))
        return
    with source.open("rb") as file:
        yield file.read(PART_BYTES)
        while chunk := file.read(PART_BYTES):
            yield chunk


def _part_key(key: str, number: int) -> str:
    return f"{key}{_PARTS_INFIX}{number:06d}"


def _objects(store: ObjectStore, key: str) -> dict[str, int]:
    """The objects that a file is made of, in order, and how large each is."""
    if (size := store.size(key)) is not None:
        return {key: size}
    listed = len(store.keys(f"{key}{_PARTS_INFIX}"))
    # The names that there should be, not those that are: whoever wrote others among them spoilt the file.
    names = [_part_key(key, number) for number in range(listed)]
    sizes = {part: store.size(part) for part in names} if listed <= _MAX_FILE_BYTES // PART_BYTES else {}
    if not sizes or None in sizes.values():
        got = f"{listed} parts" if listed else "nothing"
        raise ArtefactCorruptError(explain(f"{key} at {store.uri}", got=got, expected="a whole file"))
    return {part: size or 0 for part, size in sizes.items()}


def download(store: ObjectStore, prefix: str, digests: Mapping[str, str], folder: Path) -> None:
    """Get the files that were put there, and no others; one with other bytes is an error."""
    refuse_odd_names(store, prefix, digests)
    folder.mkdir(parents=True, exist_ok=True)
    objects = {name: _objects(store, f"{prefix}/{name}") for name in digests}
    num_bytes = sum(size for sizes in objects.values() for size in sizes.values())
    if num_bytes > (room := shutil.disk_usage(folder).free):
        expected = f"at most {room:,}, which are free"
        raise ArtefactCorruptError(explain(f"{prefix} at {store.uri}", got=f"{num_bytes:,} bytes", expected=expected))
    for name, expected in digests.items():
        with staged(folder / name) as stage:
            digest = hashlib.sha256()
            for key, size in objects[name].items():
                data = store.get(key, most_bytes=min(size, PART_BYTES))  # and no more than there was room for
                digest.update(data)
                stage.file.write(data)
            if digest.hexdigest() != expected:
                fix = "Somebody wrote to the bucket: look at who may."
                where = f"{prefix}/{name} at {store.uri}"
                raise ArtefactCorruptError(
                    explain(where, got="other bytes", expected=f"sha256 {expected[:12]}", fix=fix)
                )
            stage.commit()


def refuse_odd_names(store: ObjectStore, prefix: str, names: Iterable[str]) -> None:
    """Names of files in a folder, of the kinds that travel; nothing else is written here."""
    listed = list(names)
    odd = [
        name
        for name in listed
        if not _FILE_NAME.fullmatch(name) or Path(name).suffix not in _ALLOWED_SUFFIXES | {_JSONL}
    ]
    if odd or len(listed) > _MAX_FILES:
        got = repr(odd[0][:80]) if odd else f"{len(listed)} files"
        expected = f"a file's name with {', '.join(sorted(_ALLOWED_SUFFIXES))}; {_MAX_FILES} at most"
        raise ArtefactCorruptError(explain(f"{prefix} at {store.uri}", got=got, expected=expected))


def trained_files(folder: Path) -> dict[str, Path]:
    """The files of trained weights that may travel."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _ALLOWED_SUFFIXES}
