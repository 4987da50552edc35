"""Preference pairs as a data set that TRL's DPOTrainer takes unchanged: a JSON object a line, read by `datasets`.

    dataset = datasets.load_dataset("json", data_files="preferences.jsonl", split="train")

A row has `prompt`, `chosen` and `rejected` as messages, `tools` as JSON text (TRL reads it), and `state_id`.

* Types. `datasets` guesses them from the first 10 MB: messages that all have the same keys become a fixed record, and
  a later message with other keys, or a call with other arguments, then fails or loses its types. The first message of
  each column therefore has one key more than the others, so that messages are read as free JSON wherever they stand.
* Arguments. Most templates write them with `tojson`, for which they must be objects: as text, a model of such a family
  would be trained to quote its arguments. `arguments="text"` is for templates that take text only.
* Numbers. `datasets` reads free JSON with a parser that misses the last bit of some fractions (0.6 becomes
  0.6000000000000001) and keeps 10 decimals. Arguments whose numbers would change by more stand as text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from composer_replication.atomic import staged
from composer_replication.canonical_json import decode, decode_object, encode_as_written
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.last_gate import Find, LastGate, refusal
from composer_replication.pairs.export_messages import Arguments, answer_messages, prompt_messages
from composer_replication.pairs.normalise.normalizer import NormalizedDPOPair
from composer_replication.types import DPOPair

SCHEMA = "composer_replication.preferences/1"
Tools = Sequence[Mapping[str, Any]]


def export_preferences(
    pairs: Iterable[DPOPair | NormalizedDPOPair],
    path: str | os.PathLike[str],
    *,
    tools: Tools | None = None,
    arguments: Arguments = "object",
    gate: LastGate | None = None,
) -> int:
    """Write the pairs to a JSONL file, whole or not at all, and return how many there are.

    `tools` are the schemas of every row whose pair has none of its own under "tools". No pairs at all is an InputError:
    there is no data set without a row. So is a row that looks as if it held a secret, the environment's ones included;
    `gate=OpenGate()` lets it through.
    """
    if arguments not in ("object", "text"):
        raise InputError(explain("arguments", got=repr(arguments), expected='"object" or "text"'))
    target, num_rows, finds = Path(path), 0, dict[bytes, Find]()
    gate = LastGate(os.environ) if gate is None else gate
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as stage:
        for row in _rows(pairs, tools, arguments):
            line = encode_as_written(row, where=f"pair {row['state_id']!r}")
            for find in _finds(line, gate):
                finds.setdefault(find.digest, find)
            stage.file.write(line + b"\n")
            num_rows += 1
        if finds:
            raise refusal(f"preference pairs for {target}", list(finds.values()))
        if not num_rows:
            raise InputError(explain(f"pairs for {target}", got="none", expected="at least one"))
        stage.commit()
    return num_rows


def _finds(line: bytes, gate: LastGate) -> Iterator[Find]:
    """What the gate finds in the bytes of a row."""
    row: Any = decode_object(line)
    place = f"pair {row['state_id']}"
    parts = [("tools", decode(row["tools"].encode()))]
    for column in ("prompt", "chosen", "rejected"):
        parts += [(f"{column} message {number}", each) for number, each in enumerate(row[column], start=1)]
    found = (gate.look(part, f"{place}, {name}") for name, part in parts)
    return (find for find in found if find is not None)


def _rows(
    pairs: Iterable[DPOPair | NormalizedDPOPair], tools: Tools | None, arguments: Arguments
) -> Iterator[dict[str, Any]]:
    for number, pair in enumerate(pairs):
        row = preference_row(pair, number=number, tools=tools, arguments=arguments)
        if number == 0:
            for column in ("prompt", "chosen", "rejected"):
                row[column][0] = {**row[column][0], "schema": SCHEMA}
        yield row


def preference_row(
    pair: DPOPair | NormalizedDPOPair, *, number: int = 0, tools: Tools | None = None, arguments: Arguments = "object"
) -> dict[str, Any]:
    """One pair as a row; `number` is what an error calls it beside its state's id."""
    given = _fields(pair, number)
    where = f"pair {number} ({given['state_id']!r})"
    prompt = prompt_messages(given["state_messages"], arguments, where)
    if not prompt:
        raise InputError(explain(f"state of {where}", got="no messages", expected="at least one"))
    schemas = given.get("tools") or tools or ()
    chosen, rejected = answer_messages((given["chosen"], given["rejected"]), arguments)
    return {
        "state_id": given["state_id"],
        "prompt": prompt,
        "chosen": [chosen],
        "rejected": [rejected],
        "tools": encode_as_written(list(schemas), where=f"tools of {where}").decode(),
    }


def _fields(pair: DPOPair | NormalizedDPOPair, number: int) -> Mapping[str, Any]:
    if isinstance(pair, NormalizedDPOPair):
        sides = {"chosen": pair.chosen_messages, "rejected": pair.rejected_messages}
        texts = {side: "\n".join(str(message["content"]) for message in said) for side, said in sides.items()}
        return pair.metadata | {"state_id": pair.state_id, "state_messages": pair.state_messages} | texts
    wanted = {"state_id": str, "state_messages": list, "chosen": str, "rejected": str}
    given = cast("Mapping[str, Any]", pair) if isinstance(pair, Mapping) else {}  # pyright: ignore[reportUnnecessaryIsInstance]
    for key, kind in wanted.items():
        if not isinstance(given.get(key), kind):
            raise InputError(
                explain(f"pair {number}, {key!r}", got=type(given.get(key)).__name__, expected=kind.__name__)
            )
    return given
