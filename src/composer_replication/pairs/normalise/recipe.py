"""Recipes in data-juicer's format: a YAML file with `process`, a list of operators with their parameters."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from composer_replication.errors import ArtefactNotFoundError, InputError, explain
from composer_replication.optional import require
from composer_replication.pairs.normalise.pair_texts import TEXT_KEYS

_MAX_BYTES = 1 << 16  # a recipe is a page; a parser in Python takes seconds for a megabyte
_SAYS_WHAT = frozenset({"process", "text_keys"})
# These say where data-juicer's executor reads and writes and how many processes it starts. Nothing here does that.
_SAYS_WHERE = frozenset({"project_name", "dataset_path", "export_path", "np", "executor_type", "work_dir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operator of a recipe on one text of a pair; `reason` is what its drops are counted under."""

    operator: str
    text_key: str
    parameters: Mapping[str, Any]
    reason: str
    where: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps in their order, and the hash of the file they were read from."""

    steps: tuple[Step, ...]
    sha256: str


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """A recipe file; ArtefactNotFoundError (a FileNotFoundError) if there is none, InputError if it is no recipe."""
    where = f"recipe {os.fspath(path)}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ArtefactNotFoundError(f"{where}: no such file. Leave recipe_path out for the shipped one") from None
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise InputError(explain(where, got=f"more than {_MAX_BYTES} bytes", expected="a page of YAML"))
    return Recipe(steps_of(_parse(data, where), where), hashlib.sha256(data).hexdigest())


def steps_of(recipe: object, where: str) -> tuple[Step, ...]:
    """The steps of a recipe that is already parsed."""
    fields = _mapping(recipe, where)
    for key in fields:
        if key not in _SAYS_WHAT | _SAYS_WHERE:
            refuse(where, key, _SAYS_WHAT | _SAYS_WHERE)
    process = fields.get("process")
    if not isinstance(process, list) or not process:
        raise InputError(explain(f"{where}, 'process'", got=_shown(process), expected="a list of operators"))
    usual = _usual_text_key(fields.get("text_keys"), where)
    steps: list[Step] = []
    for number, item in enumerate(cast("list[object]", process)):
        location = f"{where}, operator {number + 1}"
        entry = _mapping(item, location)
        if len(entry) != 1:
            raise InputError(explain(location, got=f"keys {sorted(entry)}", expected="one name with its parameters"))
        ((name, parameters),) = entry.items()
        settings = {} if parameters is None else _mapping(parameters, f"{location} ({name})")
        key = _text_key(settings.pop("text_key", usual), f"{location} ({name})")
        same = sum(step.operator == name and step.text_key == key for step in steps)
        reason = f"{name}({key})" + (f"#{same + 1}" if same else "")
        steps.append(
            Step(operator=name, text_key=key, parameters=settings, reason=reason, where=f"{location} ({name})")
        )
    return tuple(steps)


def refuse(where: str, name: str, known: Iterable[str], fix: str = "") -> NoReturn:
    """An InputError for a name nobody knows, with the one that was probably meant."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1)
    fix = " ".join(part for part in (f"Did you mean {near[0]!r}?" if near else "", fix) if part)
    raise InputError(explain(where, got=repr(name), expected=f"one of {', '.join(choices)}", fix=fix))


def _parse(data: bytes, where: str) -> object:
    yaml = require("yaml", extra="replaysim")
    try:
        tree = yaml.compose(data, Loader=yaml.SafeLoader)
        _check_tree(yaml, tree, where)
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(explain(where, got="deeper nesting", expected="a list of operators")) from None
    except InputError:
        raise
    except ValueError as error:  # a date or a number that Python cannot hold
        raise InputError(f"{where}: {error}") from None


def _check_tree(yaml: Any, root: Any, where: str) -> None:
    """YAML keeps the last of two equal keys without a word; here that is an error."""
    level, seen_ids = [root], set[int]()
    while level:
        node = level.pop()
        if id(node) in seen_ids:  # a node may be named again and again, and even inside itself
            continue
        seen_ids.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            twice = next((key for key, number in keys.items() if number > 1), None)
            if twice is not None:
                raise InputError(explain(where, got=f"{twice!r} twice", expected="each key once"))
            level.extend(value for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            level.extend(node.value)


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in cast("dict[object, object]", value)):
        raise InputError(explain(where, got=_shown(value), expected="names with values (`name: value`)"))
    return dict(cast("dict[str, Any]", value))


def _usual_text_key(text_keys: object, where: str) -> str | None:
    """data-juicer's `text_keys`: a name or a list of names, of which operators take the first."""
    if isinstance(text_keys, list) and len(cast("list[object]", text_keys)) == 1:
        text_keys = cast("list[object]", text_keys)[0]
    return None if text_keys is None else _text_key(text_keys, f"{where}, 'text_keys'")


def _text_key(text_key: object, where: str) -> str:
    if text_key is None:
        fix = "Filter chosen and rejected one by one: an operator takes one text."
        raise InputError(
            explain(f"{where}, 'text_key'", got="none", expected=f"one of {', '.join(TEXT_KEYS)}", fix=fix)
        )
    if not isinstance(text_key, str) or text_key not in TEXT_KEYS:
        refuse(f"{where}, 'text_key'", str(text_key), TEXT_KEYS)
    return text_key


def _shown(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
