"""Run one job of an experiment: an arm with a seed, in a folder of its own.

`python -m composer_replication.evaluation.ablation.job FOLDER` runs it:

    job.json      what to do: world, settings, seed
    log.txt       the job's output
    result.json   the result, written atomically and last: a job that has one is done

A world resumes from what an earlier process left in the folder. A job ends when the process that started it ends.

The JSON files of an experiment can be packed for publication: `results.columns.json.xz` holds exactly the values of
`results.json` as compressed columns. The 25 packed files in this repository are 21.9 MB of JSON and 0.79 MB of xz;
without columns they would be 1.3 MB. The unpacked text is JSON too: a column with the file's object, where a column is

    [1, 2, "x"]                                             a list of values
    {"shapes": [["a", "b"]], "rows": [0, 0], "columns": {"a": COLUMN, "b": COLUMN}}    objects
    {"lengths": [2, 0], "items": COLUMN}                    lists
    {"float32": [0.1, 0.5]}                                 32-bit floats, in the fewest digits

`rows` has the shape of each object, which is its keys in order; a key's column has the values of the objects with it.
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
    """The input of a world. `config` has the job's seed; `shared` is a folder for all jobs of an experiment."""

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
        """The folder for all jobs. It is never removed while jobs run; write whole files or folders, under a lock."""
        return self.folder.parents[1] / ".shared"

    @property
    def config_sha256(self) -> str:
        """Digest of all settings except paths: the same weights may be elsewhere on another machine."""
        return config_hash(replace(self.config, train=replace(self.config.train, model=None, run=None, output=None)))


class Spent(NamedTuple):
    """What a job used: sampled rollouts, tokens, optimizer steps (including a warm-up's), and seconds."""

    rollouts: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


class Unit(NamedTuple):
    """A held-out task or session: the sums and counts that metrics are computed from (`plan.Metric`)."""

    unit: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a job. `curve` has points with `rollouts` or `step` and metrics; `digests` identify the models."""

    arm: str
    seed: int
    world: str
    spent: Spent
    units: Sequence[Unit]
    curve: Sequence[Mapping[str, float]] = ()
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    config_sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["spent"] = self.spent._asdict()
        record["units"] = [{"unit": unit.unit, "metrics": dict(unit.metrics)} for unit in self.units]
        return record

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        """Return the result that `as_json` wrote."""
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


def read_job(folder: Path) -> Job:
    """Return the job of a folder."""
    path = folder / JOB

    def make(record: Mapping[str, Any]) -> Job:
        check_schema(record, _SCHEMA, _VERSION)
        return Job(
            folder=folder,
            config=from_tables(CrfConfig, [(record["config"], f"{path}, config")]),
            options=record["options"],
            budget=from_tables(Budget, [(_set(record["budget"]), f"{path}, budget")]),
            run=None if record["run"] is None else Path(record["run"]),
            **{name: record[name] for name in ("arm", "seed", "world")},
        )

    return read_record(path, make, expected="a job", fix="`crf ablate --config arms.toml` rewrites it.")


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def read_result(folder: Path) -> Result | None:
    """Return the result of a job, or None if it is not done."""
    path = folder / RESULT
    if not path.is_file():
        return None
    return read_record(path, Result.from_json, expected="a job's result", fix="Delete it; the job will run again.")


def run_in(folder: Path) -> Result:
    """Run or resume the job of a folder, and return its result; a finished job only returns it."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(descriptor, exclusive=True)  # wait for a process that outlived its starter
        earlier_result = read_result(folder)
        if earlier_result is not None:
            return earlier_result
        job = read_job(folder)
        result: Result = world_of(job.world).run_job(job)
        atomic_write_json(folder / RESULT, result.as_json())
        return result
    finally:
        os.close(descriptor)


def _end_with_parent() -> None:
    """Exit when stdin ends: it is a pipe that the starter never writes to, so its end means that
    the starter is gone.
    """
    while os.read(0, 4096):
        pass
    # Not sys.exit: this thread must end the whole process, whatever the others wait for.
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Run the job of `FOLDER [--tied]` and return the exit code; with `--tied`, exit when stdin ends."""
    if "--tied" in arguments[1:]:
        # A daemon thread, so that a finished job does not wait for its starter.
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_in(Path(arguments[0]))
    except ComposerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


# ---- JSON files, plain or packed

Record = TypeVar("Record")
PACKED = ".columns.json.xz"
_RECORD_FILES_SCHEMA, _RECORD_FILES_VERSION = "composer_replication.columns", 1


# A few kilobytes of xz can unpack to gigabytes or demand as much memory, and anyone may publish results.
_MAX_TEXT_BYTES = 256 << 20
_MAX_READER_BYTES = 128 << 20
_PRESET = 6 | lzma.PRESET_EXTREME


def read_record(path: Path, make: Callable[[Mapping[str, Any]], Record], *, expected: str, fix: str) -> Record:
    """Return what `make` builds from the object in a file, which is packed if its name says so.

    Raises ArtefactCorruptError if the file holds no object, or one without what `make` needs.
    """
    try:
        data = path.read_bytes()
        return make(unpack(data) if path.name.endswith(PACKED) else decode_object(data))
    # Cut off, no object, a missing key, a wrong type.
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        got = f"a file that cannot be read ({type(error).__name__}: {error})"
        raise ArtefactCorruptError(explain(str(path), got=got, expected=expected, fix=fix)) from error


def check_schema(value: Mapping[str, Any], schema: str, version: int) -> None:
    """Raise ValueError, which `read_record` reports, if an object has another schema or none."""
    header = value.get("schema"), value.get("version")
    if header != (schema, version):
        got = "an object without a schema" if header == (None, None) else f"{header[0]} {header[1]}"
        raise ValueError(f"got {got}, expected {schema} {version}")


def unpack(data: bytes) -> dict[str, Any]:
    """Return the object that `pack` was given. Raises ValueError for damaged or cut-off data."""
    try:
        document = decode_object(_decompressed(data))
        check_schema(document, _RECORD_FILES_SCHEMA, _RECORD_FILES_VERSION)
        # The file's object is the only value of the outermost column.
        [record] = _values(document["column"])
    except (lzma.LZMAError, KeyError, IndexError, TypeError, AttributeError, RecursionError, StopIteration) as error:
        raise ValueError(f"no columns as `pack` writes them ({type(error).__name__}: {error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"got a packed {type(record).__name__}, expected an object")
    return record


def _decompressed(data: bytes) -> bytes:
    reader = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_MAX_READER_BYTES)
    text = reader.decompress(data, max_length=_MAX_TEXT_BYTES)
    if not reader.eof or reader.unused_data:
        raise ValueError(f"got data that is cut off, has more after its end, or holds over {_MAX_TEXT_BYTES:,} bytes")
    return text


def _values(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    if "float32" in column:
        return array("f", column["float32"]).tolist()
    if "lengths" in column:
        items, lengths = _values(column["items"]), column["lengths"]
        if len(items) != sum(lengths):
            raise ValueError(f"got {len(items):,} items for lists of {sum(lengths):,}")
        rest = iter(items)
        return [list(islice(rest, length)) for length in lengths]
    # An object without a key takes nothing from that key's column, so columns differ in length.
    columns = {key: iter(_values(values)) for key, values in column["columns"].items()}
    objects = [{key: next(columns[key]) for key in column["shapes"][shape]} for shape in column["rows"]]
    if any(True for values in columns.values() for _ in values):
        raise ValueError("got columns that are longer than their rows")
    return objects


def packed_path(path: Path) -> Path:
    """Return the path of a JSON file's packed form, in the same folder."""
    return path.with_name(path.name.removesuffix(".json") + PACKED)


def stored_path(path: Path) -> Path:
    """Return the file that holds a record: the plain JSON, or its packed form if only that exists.

    The plain file wins because commands write it: of the two it is the newer one.
    """
    packed = packed_path(path)
    return packed if packed.is_file() and not path.is_file() else path


def read_stored(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file with a plain JSON name, which may be stored packed."""
    fix = "Restore the file."
    return read_record(stored_path(path), dict, expected="a JSON object, plain or packed", fix=fix)


def pack(record: Mapping[str, Any]) -> bytes:
    """Return a JSON object as compressed columns; equal objects, with keys in the same order, give equal bytes."""
    document = {"schema": _RECORD_FILES_SCHEMA, "version": _RECORD_FILES_VERSION, "column": _as_column([record])}
    text = encode_as_written(document, where="a record to pack")
    return lzma.compress(text, format=lzma.FORMAT_XZ, preset=_PRESET)


def _as_column(values: list[Any]) -> Any:
    """Return a column of values that `_values` reads."""
    if values and all(type(value) is dict for value in values):
        numbers: dict[tuple[str, ...], int] = {}
        rows = [numbers.setdefault(tuple(value), len(numbers)) for value in values]
        keys = dict.fromkeys(key for shape in numbers for key in shape)
        columns = {key: _as_column([value[key] for value in values if key in value]) for key in keys}
        return {"shapes": [list(shape) for shape in numbers], "rows": rows, "columns": columns}
    if values and all(type(value) is list for value in values):
        items = [item for value in values for item in value]
        return {"lengths": [len(value) for value in values], "items": _as_column(items)}
    if values and all(type(value) is float for value in values) and array("f", values).tolist() == values:
        return {"float32": [_in_few_digits(value) for value in values]}
    return values


def _in_few_digits(value: float) -> float:
    """Return the float of fewest digits that 32 bits round to `value`, such as 0.1 for 0.10000000149011612."""
    # Nine digits distinguish any two 32-bit floats.
    shortened = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(short for short in shortened if array("f", [short])[0] == value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
