"""Pack JSON files of an experiment as compressed columns, for a commit, or unpack them: every value stays as it is.

    python experiments/pack.py FOLDER/results.json ...                      # results.columns.json.xz in its place
    python experiments/pack.py --unpack FOLDER/results.columns.json.xz ...  # and back

`crf ablate --table`, `benchmarks/hints.py table` and the scripts of this folder read both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from composer_replication.atomic import atomic_write_bytes, atomic_write_json
from composer_replication.evaluation.ablation.job import (
    PACKED,
    pack,
    packed_path,
    read_record,
    unpack,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--unpack", action="store_true")
    args = parser.parse_args()
    ending = PACKED if args.unpack else ".json"
    for path in args.files:
        if not path.name.endswith(ending):
            parser.error(f"{path}: expected a file whose name ends in {ending}")
    for path in args.files:
        stored = unpack_file(path) if args.unpack else pack_file(path)
        print(f"{stored}: {stored.stat().st_size:,} bytes, of {path.stat().st_size:,}")
        path.unlink()


def pack_file(path: Path) -> Path:
    """Write the packed form beside a plain file, once it has been read back, and return its path."""
    record = read_record(path, dict, expected="a JSON object", fix="Put the file back as it was.")
    data = pack(record)
    if json.dumps(unpack(data)) != json.dumps(record):
        raise SystemExit(f"{path}: got other values back from the packed form, expected the same; nothing was written")
    atomic_write_bytes(packed_path(path), data)
    return packed_path(path)


def unpack_file(path: Path) -> Path:
    """Write the plain form beside a packed file, and return its path."""
    record = read_record(path, dict, expected="packed columns", fix="Put the file back as it was.")
    plain = path.with_name(path.name.removesuffix(PACKED) + ".json")
    if plain.exists():
        raise SystemExit(f"{plain}: got a file, expected a name that is free: it may be newer than {path.name}")
    atomic_write_json(plain, record)
    return plain


if __name__ == "__main__":
    main()
