"""Build the request for a launch: what the replicas train, with which settings, and the files that they get.

training_request  returns `crf train` on a run's sessions as fields of a LaunchRequest
prepare_launch    reserves a number, creates the launch file, and uploads the run's files
ROUND_KEYS        the settings of `--round NAME=VALUE`
upload, download  copy files to the bucket and back, in parts, and verify their hashes
"""

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
from composer_replication.errors import ArtefactCorruptError, ConfigError, InputError, explain
from composer_replication.privacy.outgoing import Find, LastGate, outgoing_gate, refusal
from composer_replication.runs import ARTEFACTS, RunDir

ENTRYPOINT = "composer_replication.diloco.serverless.replica_entrypoint"
TRAINER = "composer_replication.cli.replicas.supervision"
TRAINING = "composer_replication.cli.replicas.replica_training"
_SECRET_OPTIONS = ("secrets", "modal_secrets")
_EXECUTORS_ON_LOCAL_FILES = ("local", "ray")  # their machines may share folders with this machine


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A request for a launch: the trainer, its arguments and files, and the executor."""

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
            fix = "Put the weights on the Hub or into the image, and use their name there."
            got = f"{self.model}, a folder on this machine"
            raise InputError(explain("train.model", got=got, expected="weights that replicas can load", fix=fix))

    @cached_property
    def entrypoint_args(self) -> dict[str, Any]:
        """The arguments of the entrypoint. They do not include the number of the launch, which is not known yet."""
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
        """The total size in bytes of the files to upload."""
        return sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in self.files.values())


def bucket_for_replicas(bucket: str, executor: str) -> str:
    """Return the bucket's address as the replicas have to use it. Raises InputError for a folder that the replicas
    cannot reach.
    """
    if scheme_of(bucket) != "file":
        return bucket
    if executor not in _EXECUTORS_ON_LOCAL_FILES:
        expected = f"an s3://, gs://, az:// or hf:// URL, which the machines of {executor} can reach"
        raise InputError(explain(f"bucket for {executor}", got=f"the local folder {bucket!r}", expected=expected))
    return bucket if "://" in bucket else str(Path(bucket).expanduser().absolute())


def training_request(
    config: str | None, overrides: Sequence[str], outer: Mapping[str, Any], *, no_scrub: bool, allowed: Iterable[str]
) -> dict[str, Any]:
    """Return the fields of a LaunchRequest for `crf train`: its arguments, and the config and the run's files to
    upload.

    The files are first checked for secrets.
    """
    chosen = load_with_preset(config, overrides)
    chosen.train.required_model()
    if chosen.train.mode != "offline" or chosen.train.run is None:
        got = f"train.mode {chosen.train.mode}, train.run {chosen.train.run}"
        fix = "To train with rollouts, use a custom trainer: --trainer-module."
        raise ConfigError(explain("training data of replicas", got=got, expected="the sessions of a run", fix=fix))
    from composer_replication.diloco.training import OuterLoop

    loop = OuterLoop(**outer)
    try:
        loop.check()
    except InputError as error:
        message = explain(f"--round {error.what}", got=error.got, expected=error.expected, fix=error.fix)
        raise InputError(message) from None
    steps = chosen.train.optimiser.steps
    if not steps or steps % loop.steps_per_commit:
        parts = "" if loop.num_fragments == 1 else f" by num_fragments={loop.num_fragments}"
        why = f"the steps between two exchanges (sync_every={loop.sync_every}{parts})"
        expected = f"a multiple of {loop.steps_per_commit}, {why}"
        fix = f"Set --round sync_every=N to a divisor of {steps}, or change --set train.optimiser.steps=N."
        raise ConfigError(explain("train.optimiser.steps", got=steps, expected=expected, fix=fix))
    run = RunDir.open(chosen.train.run)
    files = _training_files(run)
    _refuse_secrets(run, files, no_scrub=no_scrub, allowed=allowed)
    return {
        "arguments": {"outer": asdict(loop)},
        "files": {**files, CONFIG: to_toml(chosen).encode()},
        "commits": steps // loop.steps_per_commit,
        "model": chosen.train.model,
    }


def refuse_secret_values(request: LaunchRequest) -> None:
    """Raise InputError if an option or argument contains the value of a secret.

    Options and arguments are stored in the launch file and shown by executors, so secrets are passed only by name.
    """
    options = {key: value for key, value in request.options.items() if key not in _SECRET_OPTIONS}
    public_values = {"options": options, "arguments": dict(request.arguments), "settings": dict(request.settings)}
    location = "options, variables and arguments"
    # is_text=False: these are names and paths, to which rules for prose do not apply
    if (find := LastGate(os.environ).look(public_values, location, is_text=False)) is not None:
        fix = "Put it into an environment variable of this machine, and pass that with --secret NAME."
        raise InputError(explain("launch", got=f"what looks like a secret ({find})", expected="no secrets", fix=fix))


def prepare_launch(store: ObjectStore, request: LaunchRequest, path: Path | None = None) -> LaunchFile:
    """Reserve a number, create the launch file, upload the run's files, and return the launch file."""
    refuse_secret_values(request)
    if path is not None:
        refuse_existing_file(path)
    launch = create_launch(
        store,
        above=max(local_launch_numbers(canonical_bucket(request.bucket)), default=-1),
        bucket=request.bucket,
        executor=request.executor,
        options=dict(request.options),
        replicas=request.replicas,
        commits=request.commits,
        entrypoint=request.entrypoint,
        args=request.entrypoint_args,
        gpu=request.gpu,
        timeout_s=request.timeout_s,
    )
    file = LaunchFile.create(path or launch_path(launch.place, launch.number), launch)
    upload(store, launch.key("input"), request.files)
    return file


# The settings of `--round NAME=VALUE`.
# The table repeats defaults of the outer loop and of the round manager, so that `--help` does not load torch. A test
# compares it with both.

NUMBER, INTEGER, BOOLEAN, PAYLOAD = "a number", "a whole number", "true or false", "fp32, bf16, int8 or int4"


class _RoundKey(NamedTuple):
    """The definition of one setting of the outer loop or of the rounds."""

    name: str
    kind: str
    default: Any  # None if it depends on other settings, as described in `text`
    text: str
    least: float = -math.inf


OUTER_KEYS = (
    _RoundKey("sync_every", INTEGER, 100, "steps of each replica between two exchanges of the same fragment", 1),
    _RoundKey("outer_lr", NUMBER, 0.7, "learning rate of the outer optimiser, which averages the replicas' updates", 0),
    _RoundKey("outer_momentum", NUMBER, 0.9, "momentum of the outer optimiser", 0),
    _RoundKey("nesterov", BOOLEAN, True, "whether that is Nesterov momentum"),
    _RoundKey("num_fragments", INTEGER, 1, "fragments of the model, exchanged in turn; divides `sync_every`", 1),
    _RoundKey("fragment_sync_delay", INTEGER, 0, "steps that training continues while a fragment is exchanged", 0),
    _RoundKey("fragment_update_alpha", NUMBER, 0.0, "share of its own weights that a replica keeps at an exchange", 0),
)
MANAGER_KEYS = (
    _RoundKey("payload", PAYLOAD, "fp32", "format of the updates that replicas upload"),
    _RoundKey("mean_payload", PAYLOAD, None, "format of their mean; default: as `payload`, but bf16 for int8 and int4"),
    _RoundKey("min_replicas", INTEGER, None, "quorum of a round; default: half of the replicas, rounded up", 1),
    _RoundKey("grace_s", NUMBER, 30.0, "seconds that a round with a quorum waits for stragglers", 0),
    _RoundKey("first_grace_s", NUMBER, None, "the same before the first round; default: half of `timeout_s`", 0),
    _RoundKey("timeout_s", NUMBER, 1800.0, "seconds after which a replica gives up a round and fails", 0),
    _RoundKey("poll_s", NUMBER, 1.0, "seconds between two reads of the bucket while waiting", 0),
    _RoundKey("lease_s", NUMBER, 20.0, "seconds without a heartbeat after which another process may take a rank", 0),
    _RoundKey("shard_bytes", INTEGER, 64 * 2**20, "maximum size of an object", 1),
    _RoundKey("parallel", INTEGER, 4, "concurrent requests in each direction", 1),
    _RoundKey("state_every", INTEGER, 10, "exchanges between two full states, which late replicas load", 1),
    _RoundKey("keep_rounds", INTEGER, 2, "exchanges whose updates are kept in the bucket", 1),
)
ROUND_KEYS = {key.name: key for key in (*OUTER_KEYS, *MANAGER_KEYS)}


def split_round_settings(pairs: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings into those of the outer loop and those of the rounds, and return both. Raises InputError for
    invalid settings.
    """
    if unknown := sorted({name for name, _ in pairs} - ROUND_KEYS.keys()):
        raise InputError(explain("--round", got=", ".join(unknown), expected=f"some of {', '.join(ROUND_KEYS)}"))
    for name, value in pairs:
        _check(ROUND_KEYS[name], value)
    settings = dict(pairs)
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


# Files in the bucket.
#
#     conversations.jsonl              a file of up to PART_BYTES is a single object
#     model.safetensors.parts/000000   a larger file is split, because objects are held in memory while they are sent

MARKER, CONFIG = "run.json", "config.toml"
_TRAINING_ARTEFACTS = ("conversations", "tools", "split", "sites", "pairs")
PART_BYTES = 256 << 20
_MAX_FILE_BYTES, _MAX_FILES = 64 << 30, 1000
# "model-00001-of-00002.safetensors" matches; not "../x.json", "a/b.json" or ".hidden"
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
# Of trained weights, only files with these suffixes are exchanged. Pickled files (.bin, .pt) could run code.
_ALLOWED_SUFFIXES = {".safetensors", ".json", ".md", ".jinja", ".txt", ".model", ".toml"}
_JSONL, _PARTS_INFIX = ".jsonl", ".parts/"


def _training_files(run: RunDir) -> dict[str, Path]:
    """Return the paths of a run's files that are needed for training, keyed by name."""
    names = [
        name
        for artefact in _TRAINING_ARTEFACTS
        for name in (ARTEFACTS[artefact].file_name, ARTEFACTS[artefact].sidecar_name)
    ]
    return {name: run.root / name for name in (MARKER, *dict.fromkeys(names)) if (run.root / name).is_file()}


def _refuse_secrets(run: RunDir, files: Mapping[str, Path], *, no_scrub: bool, allowed: Iterable[str]) -> None:
    """Raise an error if any row of the files to upload appears to contain a secret."""
    gate = outgoing_gate(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    finds: dict[bytes, Find] = {}
    for name, path in files.items():
        if gate.is_open or path.suffix != _JSONL:
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                row = decode_object(line)
                # "session": "3f2a..." looks like a key and its secret. The field names are ours, so check only values.
                part = list(row.values()) if name == ARTEFACTS["split"].file_name else row
                if (find := gate.look(part, f"{name}, line {number}")) is not None:
                    finds.setdefault(find.digest, find)
    if finds:
        raise refusal("files for the replicas", list(finds.values()))


def hash_files(files: Mapping[str, Path | bytes]) -> dict[str, str]:
    """Return the SHA-256 digest of each file, keyed by file name."""
    digests = {}
    for name, file in files.items():
        digest = hashlib.sha256()
        for chunk in _chunks(file):
            digest.update(chunk)
        digests[name] = digest.hexdigest()
    return digests


def upload(store: ObjectStore, prefix: str, files: Mapping[str, Path | bytes]) -> None:
    """Upload files under `prefix`, and delete parts of these files that remain from earlier uploads."""
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
        existing = [key for key in store.keys(prefix) if key in whole or key.rpartition(_PARTS_INFIX)[0] in whole]
        store.delete([key for key in existing if key not in written])


def _chunks(source: Path | bytes) -> Iterator[bytes]:
    """Yield a file's bytes in chunks of PART_BYTES. An empty file yields one empty chunk."""
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
    """Return the keys and sizes of the objects that make up a file, in order. Raises ArtefactCorruptError if one is
    missing.
    """
    if (size := store.size(key)) is not None:
        return {key: size}
    listed = len(store.keys(f"{key}{_PARTS_INFIX}"))
    # The expected names, not the listed ones, so that an unexpected object makes the file invalid.
    names = [_part_key(key, number) for number in range(listed)]
    sizes = {part: store.size(part) for part in names} if listed <= _MAX_FILE_BYTES // PART_BYTES else {}
    if not sizes or None in sizes.values():
        got = f"{listed} parts" if listed else "nothing"
        raise ArtefactCorruptError(explain(f"{key} at {store.uri}", got=got, expected="a whole file"))
    return {part: size or 0 for part, size in sizes.items()}


def download(store: ObjectStore, prefix: str, digests: Mapping[str, str], folder: Path) -> None:
    """Download the files with these SHA-256 digests. Raises ArtefactCorruptError if a file is missing, too large or
    has a different digest.
    """
    refuse_unsafe_names(store, prefix, digests)
    folder.mkdir(parents=True, exist_ok=True)
    objects = {name: _objects(store, f"{prefix}/{name}") for name in digests}
    num_bytes = sum(size for sizes in objects.values() for size in sizes.values())
    if num_bytes > (room := shutil.disk_usage(folder).free):
        expected = f"at most {room:,} bytes, the free space"
        raise ArtefactCorruptError(explain(f"{prefix} at {store.uri}", got=f"{num_bytes:,} bytes", expected=expected))
    for name, expected in digests.items():
        with staged(folder / name) as stage:
            digest = hashlib.sha256()
            for key, size in objects[name].items():
                # Read at most the size that was compared with the free space, even if the object has grown.
                data = store.get(key, most_bytes=min(size, PART_BYTES))
                digest.update(data)
                stage.file.write(data)
            if digest.hexdigest() != expected:
                fix = "Somebody wrote to the bucket: check who has access."
                where = f"{prefix}/{name} at {store.uri}"
                raise ArtefactCorruptError(
                    explain(where, got="other bytes", expected=f"sha256 {expected[:12]}", fix=fix)
                )
            stage.commit()


def refuse_unsafe_names(store: ObjectStore, prefix: str, names: Iterable[str]) -> None:
    """Raise ArtefactCorruptError for a name that is not a plain file name with an allowed suffix.

    The names come from the bucket, which is not trusted, and become paths on this machine.
    """
    listed = list(names)
    odd = [
        name
        for name in listed
        if not _FILE_NAME.fullmatch(name) or Path(name).suffix not in _ALLOWED_SUFFIXES | {_JSONL}
    ]
    if odd or len(listed) > _MAX_FILES:
        got = repr(odd[0][:80]) if odd else f"{len(listed)} files"
        expected = f"up to {_MAX_FILES} files, with the suffixes {', '.join(sorted(_ALLOWED_SUFFIXES))}"
        raise ArtefactCorruptError(explain(f"{prefix} at {store.uri}", got=got, expected=expected))


def trained_files(folder: Path) -> dict[str, Path]:
    """Return the paths of the files with trained weights that may be uploaded, keyed by name."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _ALLOWED_SUFFIXES}
