"""Writes the pages of this folder from the code: `make reference`.

A page says nothing that the code does not: verbs and options come from argparse, keys from the config's declarations,
parameters from a signature, fields from the records. Only sentences that the code has no place for stand in
`sentences.py`, and a name without one ends the script. `tests/contract/test_reference_pages.py` compares both.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parent))
import sentences  # the file beside this one

import composer_replication
from composer_replication import types
from composer_replication.batch import flat_batch
from composer_replication.cli import main as cli
from composer_replication.cli.replicas.request import ROUND_KEYS
from composer_replication.config import CrfConfig, load
from composer_replication.config.schema import OptionSpec, dotted, options_of, type_text
from composer_replication.config.values import value_text
from composer_replication.runs import ARTEFACTS, ArtefactMeta, Source
from composer_replication.runs.artefacts import OLDEST_READABLE, SIDECAR_VERSION
from composer_replication.trainer.objective.compose import LossComponents, compose_loss

FOLDER = Path(__file__).parent
COMMAND = "make reference"
PRESETS = Path(composer_replication.__file__).parent / "recipes" / "presets"
MADE = f"<!-- made by docs/reference/generate.py: change the code, then `{COMMAND}` -->"


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {
        "cli.md": cli_page(),
        "config.md": config_page(),
        "compose_loss.md": compose_loss_page(),
        "artefacts.md": artefacts_page(),
    }


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", MADE, *(part.strip("\n") for part in parts)]) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    """A sentence as it may stand in a cell."""
    return " ".join(text.split()).replace("*", "\\*").replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Code as it may stand in a cell; a bar would end the cell, also within backticks."""
    return f"`{text.replace(' | ', ' or ')}`" if text else ""


# ---- the command line


def cli_page() -> str:
    parser = cli.build_parser()
    (verbs,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    intro = f"{parser.description} `crf VERB --help` prints the same. Every verb has `--json`."
    codes = table(("exit status", "means"), [(str(code), plain(what)) for code, what in cli.EXIT_CODES.items()])
    return page("Commands", intro, codes, *(_verb(name, sub) for name, sub in verbs.choices.items()))


def _verb(name: str, parser: argparse.ArgumentParser) -> str:
    shown = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    given = [each for each in shown if not isinstance(each, argparse._HelpAction)]
    words = [
        _called(each)[-1] if each.required else f"[{_called(each)[-1]}]"
        for each in given
        if each.required or not each.option_strings
    ]
    has_options = any(each.option_strings and not each.required for each in given)
    usage = " ".join(["crf", name, *words, *(["[options]"] if has_options else [])])
    rows = [
        (
            " ".join(code(each) for each in _called(action)),
            "required" if action.required else _default(action.default),
            plain(action.help or ""),
        )
        for action in given
    ]
    files = [code(each.file_name) for each in ARTEFACTS.values() if each.command == f"crf {name}"]
    guide = FOLDER.parent / "guides" / f"{name}.md"
    more = [
        f"Writes {', '.join(files)} ([fields](artefacts.md))." if files else "",
        f"Guide: [{name}](../guides/{name}.md)." if guide.exists() else "",
    ]
    on_message = f"{_sentence(parser.description or '')} {' '.join(filter(None, more))}".strip()
    head = [f"{'#' * (1 + len(name.split()))} crf {name}", on_message, f"```text\n{usage}\n```"]
    inner = [each for each in given if isinstance(each, argparse._SubParsersAction)]
    if inner:
        return "\n\n".join([*head, *(_verb(f"{name} {sub}", each) for sub, each in inner[0].choices.items())])
    tables = [table(("argument", "default", "does"), rows)]
    return "\n\n".join([*head, *tables, *([_round_keys()] if name == "diloco launch" else [])])


def _round_keys() -> str:
    """What stands behind `--round`."""
    rows = [
        (code(each.name), plain(each.kind), "" if each.default is None else code(value_text(each.default)), each.text)
        for each in ROUND_KEYS.values()
    ]
    return f"{sentences.ROUND}\n\n{table(('--round', 'takes', 'default', 'is'), rows)}"


def _called(action: argparse.Action) -> list[str]:
    """How an argument is written: by its names, each with what follows it."""
    choices = "" if action.choices is None else f"{{{','.join(map(str, action.choices))}}}"
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest)
    if not action.option_strings:
        return [f"{value}..." if action.nargs == "+" else value]
    return [f"{name} {value}".strip() for name in action.option_strings]


def _default(value: object) -> str:
    has_none = value is None or value == argparse.SUPPRESS or isinstance(value, bool) or value == []
    return "" if has_none else code(str(value))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# ---- the config


def config_page() -> str:
    presets = {path.stem: load(CrfConfig, path) for path in sorted(PRESETS.glob("*.toml"))}
    return page("Config keys", sentences.CONFIG, *_sections(CrfConfig, "", presets))


def _sections(config_class: type, path: str, presets: dict[str, CrfConfig]) -> Iterable[str]:
    specs = options_of(config_class)
    own = [spec for spec in specs if spec.section_class is None]
    if own:
        columns = ("key", "type", "bounds", "default", "presets", "what it does")
        yield table(columns, (_option(spec, dotted(path, spec.name), presets) for spec in own))
    for spec in specs:
        if spec.section_class is not None:
            below = dotted(path, spec.name)
            yield f"## [{below}]\n\n{spec.doc}"
            yield from _sections(spec.section_class, below, presets)


def _option(spec: OptionSpec, path: str, presets: dict[str, CrfConfig]) -> tuple[str, ...]:
    default = code(value_text(spec.default))
    on_message = {name: _at(config, path) for name, config in presets.items()}
    other = [f"{name}: {code(value_text(value))}" for name, value in on_message.items() if value != spec.default]
    bounds = str(spec.bounds).strip()
    return code(spec.name), _kind(spec.annotation), code(bounds), default, ", ".join(other), plain(spec.doc)


def _kind(annotation: object) -> str:
    if NoneType in get_args(annotation):
        (inner,) = (member for member in get_args(annotation) if member is not NoneType)
        return f"{_kind(inner)}, or unset"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(code(str(each)) for each in get_args(annotation))
    return type_text(annotation)


def _at(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


# ---- compose_loss


def compose_loss_page() -> str:
    signature = inspect.signature(compose_loss)
    known = {spec.name: spec for spec in options_of(type(CrfConfig().loss))}
    rows = []
    for name, parameter in signature.parameters.items():
        sentence = known[name].doc if name in known else sentences.PARAMETERS[name]
        default = "required" if parameter.default is inspect.Parameter.empty else code(repr(parameter.default))
        rows.append((code(name), code(str(parameter.annotation)), default, plain(sentence)))
    fields = [(code(name), code(kind), plain(sentences.COMPONENTS[name])) for name, kind in fields_of(LossComponents)]
    return page(
        "compose_loss",
        sentences.COMPOSE_LOSS,
        "## Parameters\n\n" + table(("name", "type", "default", "what it does"), rows),
        "## Batch keys\n\n" + sentences.BATCH + "\n\n" + table(("channel", "key", "shape", "holds"), _batch_keys()),
        "## What it returns\n\n" + "A `LossComponents`:\n\n" + table(("field", "type", "holds"), fields),
    )


def _batch_keys() -> Iterable[tuple[str, ...]]:
    groups = (
        ("all", flat_batch.STUDENT_KEYS),
        ("2", flat_batch.HINT_KEYS),
        ("2, contrast", flat_batch.CONTRAST_KEYS),
        ("3", (*flat_batch.PAIR_REQUIRED, *flat_batch.PAIR_REFERENCE, *flat_batch.PAIR_OPTIONAL)),
    )
    for channel, keys in groups:
        for key in keys:
            shape, holds = sentences.BATCH_KEYS[key]
            yield channel, code(key), code(shape), plain(holds)


# ---- artefacts


def artefacts_page() -> str:
    rows = []
    for each in ARTEFACTS.values():
        is_there = each.command.removeprefix("crf ") in cli.VERBS
        command = code(each.command) if is_there else f"{code(each.command)}, a verb to come"
        rows.append((code(each.name), code(each.file_name), each.kind, command, plain(sentences.ARTEFACTS[each.name])))
    return page(
        "Artefacts",
        sentences.RUN_DIRECTORY,
        table(("name", "file", "kind", "written by", "holds"), rows),
        *(_record(name) for name in sentences.RECORDS),
        f"## Files with a schema of their own\n\n{_written()}\n\n{sentences.EXPORT}",
        f"## Words that a field may hold\n\n{_words()}",
        f"## The sidecar\n\n{sentences.SIDECAR} `sidecar_version` is {SIDECAR_VERSION}.",
        _fields(fields_of(ArtefactMeta)),
        f"One of its `sources`:\n\n{_fields(fields_of(Source))}",
    )


def record_fields(name: str) -> list[tuple[str, str]]:
    """The fields of a row of an artefact, with their types."""
    record = sentences.RECORDS[name]
    own = [field for field in fields_of(record.kind) if field[0] not in record.without] if record.kind else []
    return [*own, *record.more]


def _record(name: str) -> str:
    record = sentences.RECORDS[name]
    oldest = OLDEST_READABLE.get(record.schema, 1)
    older = f" Versions from {oldest} on are read." if oldest > 1 else ""
    parts = [
        f"## {ARTEFACTS[name].file_name}",
        f"Schema `{record.schema}`, version {record.version}.{older} {record.sentence}",
        _fields(record_fields(name)),
    ]
    for kind in record.inside:
        parts += [f"### {kind.__name__}", inspect.cleandoc(kind.__doc__ or ""), _fields(fields_of(kind))]
    return "\n\n".join(parts)


def _written() -> str:
    rows = [
        (
            code(each.file),
            code(each.schema),
            str(each.version),
            ", ".join(code(name) for name in (*_keys_in(each.writer), *each.more)),
            each.sentence,
        )
        for each in sentences.WRITTEN
    ]
    return table(("file", "schema", "version", "fields", ""), rows)


def _keys_in(writer: Any) -> list[str]:
    """Keys of the one dict in a function that says which schema it is."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(writer)))
    found = [
        [key.value for key in node.keys if isinstance(key, ast.Constant)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
    ]
    (keys,) = (each for each in found if "schema" in each)
    return keys


def _words() -> str:
    names = [name for name, each in vars(types).items() if get_origin(each) is Literal and not name.startswith("_")]
    rows = ((code(name), ", ".join(code(each) for each in get_args(getattr(types, name)))) for name in names)
    return table(("type", "one of"), rows)


def _fields(fields: Iterable[tuple[str, str]]) -> str:
    return table(("field", "type"), ((code(name), code(kind)) for name, kind in fields))


def fields_of(kind: Any) -> list[tuple[str, str]]:
    """The fields of a dataclass or a TypedDict, with their types as they were written."""
    if dataclasses.is_dataclass(kind):
        return [(each.name, str(each.type)) for each in dataclasses.fields(kind)]
    written = {name: getattr(each, "__forward_arg__", str(each)) for name, each in kind.__annotations__.items()}
    return [(name, text[12:-1] if text.startswith("NotRequired[") else text) for name, text in written.items()]


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
