"""Run one job of an experiment: an arm with a seed, in its own folder.

`python -m composer_replication.evaluation.ablation.job FOLDER` runs it:

    job.json      what to do: world, settings, seed
    log.txt       the output of the process
    result.json   the result, written atomically as the last file; a job with a result is done

A job resumes from the files that an earlier process left in the folder. It exits when its parent process exits.

The JSON files of an experiment can be packed for publication: `results.columns.json.xz` has exactly the values of
`results.json`, as compressed columns. The 25 packed files in this repository are 21.9 MB of JSON and 0.79 MB of xz;
compressed without columns, they would take 1.3 MB. Decompressed, a packed file is one JSON column whose only value is
the original object. A column takes one of these forms:

    [1, 2, "x"]                                             a list of values
    {"shapes": [["a", "b"]], "rows": [0, 0], "columns": {"a": COLUMN, "b": COLUMN}}    objects
    {"lengths": [2, 0], "items": COLUMN}                    lists
    {"float32": [0.1, 0.5]}                                 32-bit floats, in the fewest digits

`shapes` lists the distinct tuples of keys, and `rows` gives the shape of each object. The column of a key holds the
values of the objects that have this key.
"""

from __future__ import annotations

import lzma
import os
import sys
import threading
import tomllib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from composer_replication.atomic import atomic_write_json, lock
from composer_replication.canonical_json import decode_object, encode_as_written
from composer_replication.config import CrfConfig, config_hash, to_toml
from composer_replication.config.loader import from_tables
from composer_replication.errors import ArtefactCorruptError, ComposerError, explain
from composer_replication.evaluation.ablation.plan import Budget, world_of

JOB, RESULT, LOG = "job.json", "result.json", "log.txt"
_SCHEMA, _VERSION = "composer_replication.ablation_job", 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training and its evaluation, to be run as a job.

    `config` contains the seed; `options` are the world's options.
    """

    folder: Path
    arm: str
    seed: int
    world: str
    config: CrfConfig
    options: Mapping[str, Any]
    budget: Budget
    run: Path | None = None

    @property
    def shared(self) -> Path:
        """A folder that all jobs of the experiment share.

        A job must hold a lock to write to it, and write only complete files or folders.
        """
        return self.folder.parents[1] / ".shared"

    @property
    def config_sha256(self) -> str:
        """A digest of all settings except paths, which differ between machines."""
        return config_hash(replace(self.config, train=replace(self.config.train, model=None, run=None, output=None)))


class Spent(NamedTuple):
    """The cost of a job. `steps` counts optimizer steps, including those of a warm-up."""

    rollouts: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


class Unit(NamedTuple):
    """A held-out task or session, with the sums and counts from which metrics (`plan.Metric`) are computed."""

    unit: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a job.

    Each point of `curve` has `rollouts` or `step`, and metrics; `digests` identify the models.
    """

    arm: str
    seed: int
    world: str
    spent: Spent
    units: Sequence[Unit]
    curve: Sequence[Mapping[str, float]] = ()
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    config_sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the content of `result.json`."""
        record = asdict(self)
        record["spent"] = self.spent._asdict()
        record["units"] = [{"unit": unit.unit, "metrics": dict(unit.metrics)} for unit in self.units]
        return record

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        """Return the result stored in the content of `result.json`."""
        units = [Unit(str(unit["unit"]), dict(unit["metrics"])) for unit in value["units"]]
        fields = {name: value[name] for name in ("arm", "seed", "world", "curve", "digests", "config_sha256")}
        return cls(spent=Spent(**value["spent"]), units=units, **fields)


def write_job(job: Job) -> None:
    """Create a job's folder and write its `job.json`."""
    job.folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "arm": job.arm,
        "seed": job.seed,
        "world": job.world,
        "options": dict(job.options),
        "budget": asdict(job.budget),
        "run": None if job.run is None else str(job.run.absolute()),
        "config_sha256": job.config_sha256,
        "config": tomllib.loads(to_toml(job.config)),
    }
    atomic_write_json(job.folder / JOB, record)


def _read_job(folder: Path) -> Job:
    """Read `job.json` in a folder and return the job."""
    path = folder / JOB

    def parse(record: Mapping[str, Any]) -> Job:
        check_schema(record, _SCHEMA, _VERSION)
        return Job(
            folder=folder,
            config=from_tables(CrfConfig, [(record["config"], f"{path}, config")]),
            options=record["options"],
            budget=from_tables(
                Budget,
                [({name: value for name, value in record["budget"].items() if value is not None}, f"{path}, budget")],
            ),
            run=None if record["run"] is None else Path(record["run"]),
            **{name: record[name] for name in ("arm", "seed", "world")},
        )

    return read_record(path, parse, expected="a job", fix="`crf ablate --config arms.toml` rewrites it.")


def read_result(folder: Path) -> Result | None:
    """Return the result of the job in `folder`, or None if the job has not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None
    return read_record(
        path, Result.from_json, expected="a job's result", fix="Delete the file; the job will run again."
    )


def run_in(folder: Path) -> Result:
    """Run or resume the job in a folder, and return its result. Does nothing if the job has finished."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(descriptor, exclusive=True)  # another process may still run the job
        earlier_result = read_result(folder)
        if earlier_result is not None:
            return earlier_result
        job = _read_job(folder)
        result: Result = world_of(job.world).run_job(job)
        atomic_write_json(folder / RESULT, result.as_json())
        return result
    finally:
        os.close(descriptor)


def _end_with_parent() -> None:
    """Exit the process when stdin reaches its end.

    The parent process holds the other end of the pipe and never writes to it, so the end of stdin means that the parent
    has exited.
    """
    while os.read(0, 4096):
        pass
    # Not sys.exit, which would end only this thread.
    os._exit(1)


def _main(arguments: Sequence[str]) -> int:
    """Run the job given by the arguments `FOLDER [--tied]` and return the exit code.

    With `--tied`, the process exits when stdin ends.
    """
    if "--tied" in arguments[1:]:
        # A daemon thread does not keep a finished job running.
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_in(Path(arguments[0]))
    except ComposerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


# ---- JSON files, plain or packed

_Record = TypeVar("_Record")
PACKED = ".columns.json.xz"
_PACKED_SCHEMA, _PACKED_VERSION = "composer_replication.columns", 1


# Results may come from anyone, and a few kilobytes of xz can decompress to gigabytes or need as much memory.
_MAX_TEXT_BYTES = 256 << 20
_MAX_DECODER_BYTES = 128 << 20
_PRESET = 6 | lzma.PRESET_EXTREME


def read_record(path: Path, parse: Callable[[Mapping[str, Any]], _Record], *, expected: str, fix: str) -> _Record:
    """Read the JSON object in a file, parse it with `parse`, and return the result.

    A file whose name ends in `PACKED` is unpacked first. `expected` and `fix` complete the error message. Raises
    ArtefactCorruptError if the file contains no object that `parse` accepts.
    """
    try:
        data = path.read_bytes()
        return parse(unpack(data) if path.name.endswith(PACKED) else decode_object(data))
    # The file is truncated, has no object, lacks a key, or has a value of the wrong type.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"a file that cannot be read ({type(error).__name__}: {error})"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=expected, fix=fix)) from error


def check_schema(value: Mapping[str, Any], schema: str, version: int) -> None:
    """Raise ValueError unless an object has this schema and version.

    `read_record` turns the exception into an error message.
    """
    header = value.get("schema"), value.get("version")
    if header != (schema, version):
        got = "an object without a schema" if header == (None, None) else f"{header[0]} {header[1]}"
        raise ValueError(f"got {got}, expected {schema} {version}")


def unpack(data: bytes) -> dict[str, Any]:
    """Return the JSON object from data packed by `pack`. Raises ValueError if the data is damaged or truncated."""
    try:
        document = decode_object(_decompress(data))
        check_schema(document, _PACKED_SCHEMA, _PACKED_VERSION)
        [record] = _column_values(document["column"])
    except (lzma.LZMAError, KeyError, IndexError, TypeError, AttributeError, RecursionError, StopIteration) as error:
        raise ValueError(f"not the columns that `pack` writes ({type(error).__name__}: {error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"got a packed {type(record).__name__}, expected an object")
    return record


def _decompress(data: bytes) -> bytes:
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_MAX_DECODER_BYTES)
    text = decoder.decompress(data, max_length=_MAX_TEXT_BYTES)
    if not decoder.eof or decoder.unused_data:
        raise ValueError(f"got data that is truncated, continues after its end, or has over {_MAX_TEXT_BYTES:,} bytes")
    return text


def _column_values(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    if "float32" in column:
        return array("f", column["float32"]).tolist()
    if "lengths" in column:
        items, lengths = _column_values(column["items"]), column["lengths"]
        if len(items) != sum(lengths):
            raise ValueError(f"got {len(items):,} items for lists of {sum(lengths):,}")
        remaining = iter(items)
        return [list(islice(remaining, length)) for length in lengths]
    # A key's column has no value for objects without the key, so columns differ in length.
    columns = {key: iter(_column_values(values)) for key, values in column["columns"].items()}
    objects = [{key: next(columns[key]) for key in column["shapes"][shape]} for shape in column["rows"]]
    if any(True for values in columns.values() for _ in values):
        raise ValueError("got columns that are longer than their rows")
    return objects


def packed_path(path: Path) -> Path:
    """Return the path of the packed form of a JSON file."""
    return path.with_name(path.name.removesuffix(".json") + PACKED)


def stored_path(path: Path) -> Path:
    """Return the path of a JSON file, or of its packed form if only the packed form exists.

    If both files exist, the plain one is newer, because commands write plain files.
    """
    packed = packed_path(path)
    return packed if packed.is_file() and not path.is_file() else path


def read_stored(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file that may be stored plain or packed; `path` is the plain name."""
    fix = "Restore the file."
    return read_record(stored_path(path), dict, expected="a JSON object, plain or packed", fix=fix)


def pack(record: Mapping[str, Any]) -> bytes:
    """Return a JSON object as compressed columns. Equal objects with the same order of keys give equal bytes."""
    document = {"schema": _PACKED_SCHEMA, "version": _PACKED_VERSION, "column": _make_column([record])}
    text = encode_as_written(document, where="a record to pack")
    return lzma.compress(text, format=lzma.FORMAT_XZ, preset=_PRESET)


def _make_column(values: list[Any]) -> Any:
    """Encode a list of values as a column. `_column_values` decodes it."""
    if values and all(type(value) is dict for value in values):
        shapes: dict[tuple[str, ...], int] = {}
        rows = [shapes.setdefault(tuple(value), len(shapes)) for value in values]
        keys = dict.fromkeys(key for shape in shapes for key in shape)
        columns = {key: _make_column([value[key] for value in values if key in value]) for key in keys}
        return {"shapes": [list(shape) for shape in shapes], "rows": rows, "columns": columns}
    if values and all(type(value) is list for value in values):
        items = [item for value in values for item in value]
        return {"lengths": [len(value) for value in values], "items": _make_column(items)}
    if values and all(type(value) is float for value in values) and array("f", values).tolist() == values:
        return {"float32": [_shortest_float32(value) for value in values]}
    return values


def _shortest_float32(value: float) -> float:
    """Return the float with the fewest digits that rounds to the 32-bit float `value`: 0.1 for 0.10000000149011612."""
    # Nine digits distinguish any two 32-bit floats.
    shortened = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(short for short in shortened if array("f", [short])[0] == value)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
